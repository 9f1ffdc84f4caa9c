//! AVX2 with fused multiply-add and half-precision conversion: x86-64 since 2013 (Intel) and 2015 (AMD).

use std::arch::x86_64::*;
use std::hint::black_box;

use super::level::{CHAINS, Level, PackedBlocks, Work};

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
    fn round(a: f32) -> f32 {
        a.round_ties_even()
    }

    #[inline(always)]
    fn round64(a: f64) -> f64 {
        a.round_ties_even()
    }

    #[inline(always)]
    unsafe fn transpose_8x8(from: *const f32, from_step: isize, to: *mut f32, to_step: usize) {
        // SAFETY: the caller's contract; code of this level runs only on machines that have the level.
        unsafe { transpose_8x8(from, from_step, to, to_step) }
    }

    #[inline(always)]
    unsafe fn decode_blocks(packed: &PackedBlocks<'_>, to: *mut f32) {
        // SAFETY: as above.
        unsafe {
            match (packed.bits, packed.block) {
                (4, 32) => decode_nibbles::<2>(packed, to),
                (4, _) => decode_nibbles::<0>(packed, to),
                (2, _) => decode_pairs_of_bits(packed, to),
                _ => packed.decode_each(to),
            }
        }
    }

    #[inline(always)]
    unsafe fn transpose_6(from: *const f32, from_step: isize, to: *mut f32) {
        // SAFETY: as above.
        unsafe { transpose_6(from, from_step, to) }
    }
}

/// Returns numbers of a table of 16, in two halves. A permutation reads the lowest three bits of each index; the fourth
/// bit selects the half.
#[inline]
#[target_feature(enable = "avx2")]
fn look_up([low, high]: [__m256; 2], index: __m256i) -> __m256 {
    let is_high = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(index));
    let (low, high) = (_mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index));
    _mm256_blendv_ps(low, high, is_high)
}

/// Returns the numbers of a block, in two halves.
///
/// # Safety
/// The contract of [`PackedBlocks::scale_and_zero_point`], and the machine must have AVX2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn numbers_of_block(packed: &PackedBlocks<'_>, block: usize) -> [__m256; 2] {
    // SAFETY: the caller's contract.
    unsafe {
        let (scale, zero_point) = packed.scale_and_zero_point(block);
        let (scale, zero_point) = (_mm256_set1_ps(scale), _mm256_set1_ps(zero_point));
        [0, 8].map(|half| {
            let numbers = _mm256_loadu_ps(packed.numbers.as_ptr().wrapping_add(half));
            _mm256_mul_ps(_mm256_sub_ps(numbers, zero_point), scale)
        })
    }
}

/// Decodes integers of four bits. `GROUPS` is the number of groups of 16 of a block if it is known, otherwise 0.
///
/// # Safety
/// The contract of [`Level::decode_blocks`], and the machine must have AVX2.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn decode_nibbles<const GROUPS: usize>(packed: &PackedBlocks<'_>, mut to: *mut f32) {
    let groups = if GROUPS > 0 { GROUPS } else { packed.block / 16 };
    // The two integers of a byte move to the lowest bits of the halves of 64 bits.
    let (right, left) = if packed.is_high_first { (4, 32) } else { (0, 28) };
    let (right, left) = (_mm256_set1_epi64x(right), _mm256_set1_epi64x(left));
    let mut bytes = packed.bytes;
    // SAFETY: the caller's contract.
    unsafe {
        for b in 0..packed.blocks {
            let table = numbers_of_block(packed, b);
            for _ in 0..2 * groups {
                let each = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(bytes.cast::<i32>().read_unaligned()));
                let index = _mm256_or_si256(_mm256_srlv_epi64(each, right), _mm256_sllv_epi64(each, left));
                _mm256_storeu_ps(to, look_up(table, index));
                (bytes, to) = (bytes.wrapping_add(4), to.wrapping_add(8));
            }
        }
    }
}

/// Decodes integers of two bits.
///
/// # Safety
/// As [`decode_nibbles`].
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn decode_pairs_of_bits(packed: &PackedBlocks<'_>, mut to: *mut f32) {
    let shifts = packed.shifts_of_two_bits();
    let mut bytes = packed.bytes;
    // SAFETY: the caller's contract.
    unsafe {
        let shifts = _mm256_loadu_si256(shifts.as_ptr().cast());
        for b in 0..packed.blocks {
            let table = numbers_of_block(packed, b);
            for _ in 0..packed.block / 8 {
                let word = _mm256_set1_epi32(i32::from(bytes.cast::<i16>().read_unaligned()));
                _mm256_storeu_ps(to, look_up(table, _mm256_srlv_epi32(word, shifts)));
                (bytes, to) = (bytes.wrapping_add(2), to.wrapping_add(8));
            }
        }
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
