//! AVX2 with fused multiply-add and half-precision conversion: x86-64 since 2013 (Intel) and 2015 (AMD).

use std::arch::x86_64::*;
use std::hint::black_box;

use super::level::{CHAINS, Level, Work};

/// Number of f32 lanes of a register.
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
    unsafe fn transpose_8x8(from: *const f32, from_step: isize, to: *mut f32, to_step: usize) {
        // SAFETY: the caller's contract; code of this level runs only on machines that have the level.
        unsafe { transpose_8x8(from, from_step, to, to_step) }
    }

    #[inline(always)]
    unsafe fn transpose_6(from: *const f32, from_step: isize, to: *mut f32) {
        // SAFETY: as above.
        unsafe { transpose_6(from, from_step, to) }
    }
}

/// Runs work compiled for this level.
///
/// # Safety
/// The machine must have AVX2, FMA and F16C.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
pub(crate) unsafe fn enter<W: Work>(work: W) -> W::Out {
    work.work::<Avx2>()
}

/// Runs `rounds` rounds of multiply-adds on registers: [`CHAINS`] sums of [`LANES`] lanes, one multiply-add each per
/// round.
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

/// Transposes a square of 8×8; see [`Level::transpose_8x8`].
///
/// # Safety
/// The contract of the method, and the machine must have AVX2.
#[inline]
#[target_feature(enable = "avx2")]
pub(crate) unsafe fn transpose_8x8(from: *const f32, from_step: isize, to: *mut f32, to_step: usize) {
    for p in [0, 4] {
        // SAFETY: the caller's contract.
        let half = |i: isize| unsafe { _mm_loadu_ps(from.wrapping_offset(i * from_step).wrapping_add(p)) };
        // Lines i and i + 4 share a register, each in one half.
        let lines = [0, 1, 2, 3].map(|i| _mm256_set_m128(half(i + 4), half(i)));
        for (q, line) in transpose_4x4_halves(lines).into_iter().enumerate() {
            // SAFETY: the caller's contract.
            unsafe { _mm256_storeu_ps(to.wrapping_add((p + q) * to_step), line) };
        }
    }
}

/// Transposes the squares of 4×4 in the halves of four registers.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose_4x4_halves([a, b, c, d]: [__m256; 4]) -> [__m256; 4] {
    let (low_ab, high_ab) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    let (low_cd, high_cd) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    [
        _mm256_shuffle_ps::<0x44>(low_ab, low_cd),
        _mm256_shuffle_ps::<0xee>(low_ab, low_cd),
        _mm256_shuffle_ps::<0x44>(high_ab, high_cd),
        _mm256_shuffle_ps::<0xee>(high_ab, high_cd),
    ]
}

/// Transposes six lines of 8; see [`Level::transpose_6`].
///
/// # Safety
/// The contract of the method, and the machine must have AVX2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn transpose_6(from: *const f32, from_step: isize, to: *mut f32) {
    for p in [0, 4] {
        // SAFETY: the caller's contract.
        let half = |i: isize| unsafe { _mm_loadu_ps(from.wrapping_offset(i * from_step).wrapping_add(p)) };
        let zero = _mm_setzero_ps();
        let lines = [
            _mm256_set_m128(half(4), half(0)),
            _mm256_set_m128(half(5), half(1)),
            _mm256_set_m128(zero, half(2)),
            _mm256_set_m128(zero, half(3)),
        ];
        for (q, line) in transpose_4x4_halves(lines).into_iter().enumerate() {
            let to = to.wrapping_add(6 * (p + q));
            // SAFETY: the caller's contract. All lines but the last one have two more elements of `to` after them,
            // which the next line overwrites.
            unsafe {
                if p + q < 7 {
                    _mm256_storeu_ps(to, line);
                } else {
                    _mm_storeu_ps(to, _mm256_castps256_ps128(line));
                    _mm_storel_pd(to.add(4).cast(), _mm_castps_pd(_mm256_extractf128_ps::<1>(line)));
                }
            }
        }
    }
}
