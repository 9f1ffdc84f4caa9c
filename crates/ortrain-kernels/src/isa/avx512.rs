//! AVX-512 with byte, word, double-word and vector-length extensions: x86-64 servers since 2017 (Intel) and 2022 (AMD).

use std::arch::x86_64::{_mm512_cvtne2ps_pbh, _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_set1_ps};
use std::hint::black_box;

use super::{CHAINS, Level, Work};

/// Floats of a register.
pub(crate) const LANES: usize = 16;

#[derive(Clone, Copy)]
pub(crate) struct Avx512;

impl Level for Avx512 {
    #[inline(always)]
    fn mul_add(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }

    #[inline(always)]
    fn mul_add64(a: f64, b: f64, c: f64) -> f64 {
        a.mul_add(b, c)
    }

    #[inline(always)]
    fn floor(a: f32) -> f32 {
        a.floor()
    }

    #[inline(always)]
    fn floor64(a: f64) -> f64 {
        a.floor()
    }

    #[inline(always)]
    unsafe fn turn8(from: *const f32, from_step: isize, to: *mut f32, to_step: usize) {
        // SAFETY: the caller's contract, and code of this level runs where the level is.
        unsafe { super::avx2::turn8(from, from_step, to, to_step) }
    }
}

/// Enters the level.
///
/// # Safety
/// The machine must have AVX-512 F, BW, DQ and VL, AVX2, FMA and F16C.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn enter<W: Work>(work: W) -> W::Out {
    work.work::<Avx512>()
}

/// So many rounds of multiply-adds on registers: [`CHAINS`] sums of [`LANES`] lanes, each multiplied and added to once.
///
/// # Safety
/// The machine must have AVX-512 F, BW, DQ and VL, AVX2, FMA and F16C.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn multiply_add(rounds: usize) {
    let (x, y) = black_box((_mm512_set1_ps(0.5), _mm512_set1_ps(0.25)));
    let mut sums = [x; CHAINS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(*sum, x, y);
        }
    }
    black_box(sums);
}

/// The same of products of pairs of bfloat16, summed in f32: `rounds * CHAINS` of them, each 32 multiply-adds.
///
/// # Safety
/// The machine must have AVX-512 F and BF16.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(crate) unsafe fn multiply_add_bf16(rounds: usize) {
    let (a, b) = black_box((_mm512_set1_ps(0.5), _mm512_set1_ps(0.25)));
    let (x, y) = (_mm512_cvtne2ps_pbh(a, a), _mm512_cvtne2ps_pbh(b, b));
    let mut sums = [a; CHAINS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbf16_ps(*sum, x, y);
        }
    }
    black_box(sums);
}
