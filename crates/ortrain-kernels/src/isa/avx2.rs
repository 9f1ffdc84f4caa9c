//! AVX2 with fused multiply-add and half-precision conversion: x86-64 since 2013 (Intel) and 2015 (AMD).

use std::arch::x86_64::*;
use std::hint::black_box;

use super::{CHAINS, Level, Work};

/// Floats of a register.
pub(crate) const LANES: usize = 8;

#[derive(Clone, Copy)]
pub(crate) struct Avx2;

impl Level for Avx2 {
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
        unsafe { turn8(from, from_step, to, to_step) }
    }
}

/// Enters the level.
///
/// # Safety
/// The machine must have AVX2, FMA and F16C.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn enter<W: Work>(work: W) -> W::Out {
    work.work::<Avx2>()
}

/// So many rounds of multiply-adds on registers: [`CHAINS`] sums of [`LANES`] lanes, each multiplied and added to once.
///
/// # Safety
/// The machine must have AVX2, FMA and F16C.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn multiply_add(rounds: usize) {
    let (x, y) = black_box((_mm256_set1_ps(0.5), _mm256_set1_ps(0.25)));
    let mut sums = [x; CHAINS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm256_fmadd_ps(*sum, x, y);
        }
    }
    black_box(sums);
}

/// See [`Level::turn8`].
///
/// # Safety
/// Its contract, and the machine must have AVX2.
#[inline]
#[target_feature(enable = "avx2")]
pub(crate) unsafe fn turn8(from: *const f32, from_step: isize, to: *mut f32, to_step: usize) {
    for p in [0, 4] {
        // Lines i and i + 4 share a register, a half each.
        let pair = |i: isize| {
            // SAFETY: the caller's contract.
            let half =
                |i: isize| unsafe { _mm_loadu_ps(from.wrapping_offset(i * from_step).wrapping_add(p)) };
            _mm256_insertf128_ps::<1>(_mm256_castps128_ps256(half(i)), half(i + 4))
        };
        let lines = [pair(0), pair(1), pair(2), pair(3)];
        let (low01, high01) =
            (_mm256_unpacklo_ps(lines[0], lines[1]), _mm256_unpackhi_ps(lines[0], lines[1]));
        let (low23, high23) =
            (_mm256_unpacklo_ps(lines[2], lines[3]), _mm256_unpackhi_ps(lines[2], lines[3]));
        let turned = [
            _mm256_shuffle_ps::<0x44>(low01, low23),
            _mm256_shuffle_ps::<0xee>(low01, low23),
            _mm256_shuffle_ps::<0x44>(high01, high23),
            _mm256_shuffle_ps::<0xee>(high01, high23),
        ];
        for (q, line) in turned.into_iter().enumerate() {
            // SAFETY: the caller's contract.
            unsafe { _mm256_storeu_ps(to.wrapping_add((p + q) * to_step), line) };
        }
    }
}
