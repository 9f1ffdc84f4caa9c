//! AVX-512 with byte, word, double-word and vector-length extensions: x86-64 servers since 2017 (Intel) and 2022 (AMD).

use std::arch::x86_64::*;
use std::hint::black_box;

use super::level::{CHAINS, Level, PackedBlocks, Work};

/// Number of f32 lanes of a register.
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
        unsafe { super::avx2::transpose_8x8(from, from_step, to, to_step) }
    }

    #[inline(always)]
    unsafe fn transpose_16(from: *const f32, from_step: isize, to: *mut f32, to_step: usize, lines: usize) {
        // SAFETY: as above.
        unsafe { transpose_16(from, from_step, to, to_step, lines) }
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

    const HAS_FAST_SELECT: bool = true;

    #[inline(always)]
    unsafe fn select_16_of_32(from: *const f32, index: &[u32; 16], to: *mut f32) {
        // SAFETY: as above.
        unsafe { select_16_of_32(from, index, to) }
    }
}

/// # Safety
/// The contract of [`Level::pick`], and the machine must have AVX-512 F.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn select_16_of_32(from: *const f32, index: &[u32; 16], to: *mut f32) {
    // SAFETY: the caller's contract.
    unsafe {
        let index = _mm512_loadu_epi32(index.as_ptr().cast());
        let (low, high) = (_mm512_loadu_ps(from), _mm512_loadu_ps(from.add(16)));
        _mm512_storeu_ps(to, _mm512_permutex2var_ps(low, index, high));
    }
}

/// Decodes integers of four bits. `GROUPS` is the number of groups of 16 of a block if it is known, otherwise 0.
///
/// # Safety
/// The contract of [`Level::decode_blocks`], and the machine must have AVX-512 F.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn decode_nibbles<const GROUPS: usize>(packed: &PackedBlocks<'_>, mut to: *mut f32) {
    let groups = if GROUPS > 0 { GROUPS } else { packed.block / 16 };
    // The two integers of a byte move to the lowest bits of the halves of 64 bits. A permutation reads only the lowest
    // four bits of each index.
    let (right, left) = if packed.is_high_first { (4, 32) } else { (0, 28) };
    let (right, left) = (_mm512_set1_epi64(right), _mm512_set1_epi64(left));
    let mut bytes = packed.bytes;
    // SAFETY: the caller's contract.
    unsafe {
        let numbers = _mm512_loadu_ps(packed.numbers.as_ptr());
        for b in 0..packed.blocks {
            let (scale, zero_point) = packed.scale_and_zero_point(b);
            let table = _mm512_sub_ps(numbers, _mm512_set1_ps(zero_point));
            let table = _mm512_mul_ps(table, _mm512_set1_ps(scale));
            for _ in 0..groups {
                let each = _mm512_cvtepu8_epi64(_mm_loadl_epi64(bytes.cast()));
                let index = _mm512_or_si512(_mm512_srlv_epi64(each, right), _mm512_sllv_epi64(each, left));
                _mm512_storeu_ps(to, _mm512_permutexvar_ps(index, table));
                (bytes, to) = (bytes.wrapping_add(8), to.wrapping_add(16));
            }
        }
    }
}

/// Decodes integers of two bits.
///
/// # Safety
/// As [`decode_nibbles`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn decode_pairs_of_bits(packed: &PackedBlocks<'_>, mut to: *mut f32) {
    let shifts = packed.shifts_of_two_bits();
    let mut bytes = packed.bytes;
    // SAFETY: the caller's contract. A permutation reads the lowest four bits of each index.
    unsafe {
        let (shifts, numbers) =
            (_mm512_loadu_epi32(shifts.as_ptr()), _mm512_loadu_ps(packed.numbers.as_ptr()));
        for b in 0..packed.blocks {
            let (scale, zero_point) = packed.scale_and_zero_point(b);
            let table = _mm512_sub_ps(numbers, _mm512_set1_ps(zero_point));
            let table = _mm512_mul_ps(table, _mm512_set1_ps(scale));
            for _ in 0..packed.block / 16 {
                let word = _mm512_set1_epi32(bytes.cast::<i32>().read_unaligned());
                _mm512_storeu_ps(to, _mm512_permutexvar_ps(_mm512_srlv_epi32(word, shifts), table));
                (bytes, to) = (bytes.wrapping_add(4), to.wrapping_add(16));
            }
        }
    }
}

/// Runs work compiled for this level.
///
/// # Safety
/// The machine must have AVX-512 F, BW, DQ and VL, AVX2, FMA and F16C.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn enter<W: Work>(work: W) -> W::Out {
    work.work::<Avx512>()
}

/// Runs `rounds` rounds of multiply-adds on registers: [`CHAINS`] sums of [`LANES`] lanes, one multiply-add each per
/// round.
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

/// Runs `rounds * CHAINS` products of vectors of bfloat16 pairs, summed in f32. Each is 32 multiply-adds.
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

/// Transposes lines of 16; see [`Level::transpose_16`].
///
/// # Safety
/// The contract of the method, and the machine must have AVX-512 F.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn transpose_16(from: *const f32, from_step: isize, to: *mut f32, to_step: usize, lines: usize) {
    // Lines beyond `lines` are read as the last line, and not written.
    let line = |i: usize| {
        // SAFETY: the caller's contract.
        unsafe { _mm512_loadu_ps(from.wrapping_offset(i.min(lines - 1) as isize * from_step)) }
    };
    let mut rows: [__m512; 16] = std::array::from_fn(line);
    // Transposes squares of 2×2, then of 4×4, inside each quarter of the registers, then the quarters themselves.
    for pair in rows.chunks_exact_mut(2) {
        (pair[0], pair[1]) = (_mm512_unpacklo_ps(pair[0], pair[1]), _mm512_unpackhi_ps(pair[0], pair[1]));
    }
    for four in rows.chunks_exact_mut(4) {
        let [a, b, c, d] = [four[0], four[1], four[2], four[3]];
        four[0] = _mm512_shuffle_ps::<0x44>(a, c);
        four[1] = _mm512_shuffle_ps::<0xee>(a, c);
        four[2] = _mm512_shuffle_ps::<0x44>(b, d);
        four[3] = _mm512_shuffle_ps::<0xee>(b, d);
    }
    let mask = u16::MAX >> (16 - lines);
    for q in 0..4 {
        let [a, b, c, d] = [rows[q], rows[4 + q], rows[8 + q], rows[12 + q]];
        let (even, odd) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
        let (even2, odd2) = (_mm512_shuffle_f32x4::<0x88>(c, d), _mm512_shuffle_f32x4::<0xdd>(c, d));
        let transposed = [
            _mm512_shuffle_f32x4::<0x88>(even, even2),
            _mm512_shuffle_f32x4::<0x88>(odd, odd2),
            _mm512_shuffle_f32x4::<0xdd>(even, even2),
            _mm512_shuffle_f32x4::<0xdd>(odd, odd2),
        ];
        for (quarter, row) in transposed.into_iter().enumerate() {
            // SAFETY: the caller's contract.
            unsafe { _mm512_mask_storeu_ps(to.wrapping_add((4 * quarter + q) * to_step), mask, row) };
        }
    }
}
