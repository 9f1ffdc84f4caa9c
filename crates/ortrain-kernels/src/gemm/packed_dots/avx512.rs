//! Dot products with packed integers by AVX-512.

use std::arch::x86_64::*;

use super::block::{LANES, PackedDots, parts};

/// Computes the dot products of all rows and lines.
///
/// # Safety
/// The contract of [`super::multiply`], and the machine must have AVX-512 F.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn multiply(dots: &PackedDots<'_>) {
    // SAFETY: the caller's contract.
    unsafe {
        match (dots.b.bits, dots.b.block) {
            (4, 32) if dots.k.is_multiple_of(32) => rows::<4, 2>(dots),
            (4, _) => rows::<4, 0>(dots),
            (2, _) => rows::<2, 0>(dots),
            _ => rows::<8, 0>(dots),
        }
    }
}

/// Computes the dot products with all lines, one [part](parts) of the rows after the other. `GROUPS` is the number of
/// registers of each block if it is known, otherwise 0.
///
/// # Safety
/// As [`multiply`].
#[target_feature(enable = "avx512f")]
unsafe fn rows<const BITS: usize, const GROUPS: usize>(dots: &PackedDots<'_>) {
    for (first, count) in parts(dots.rows) {
        let part = PackedDots {
            a: dots.a.wrapping_add(first * dots.k),
            rows: count,
            c: dots.c.wrapping_offset(first as isize * dots.c_row),
            ..*dots
        };
        // SAFETY: the caller's contract.
        unsafe {
            match count {
                1 => all_lines::<BITS, GROUPS, 1, 4>(&part),
                2 => all_lines::<BITS, GROUPS, 2, 4>(&part),
                3 => all_lines::<BITS, GROUPS, 3, 4>(&part),
                4 => all_lines::<BITS, GROUPS, 4, 2>(&part),
                6 => all_lines::<BITS, GROUPS, 6, 2>(&part),
                8 => all_lines::<BITS, GROUPS, 8, 2>(&part),
                _ => all_lines::<BITS, GROUPS, 12, 2>(&part),
            }
        }
    }
}

/// Computes the dot products of one part of the rows with all lines, `COUNT` at a time.
///
/// # Safety
/// As [`multiply`].
#[target_feature(enable = "avx512f")]
unsafe fn all_lines<const BITS: usize, const GROUPS: usize, const ROWS: usize, const COUNT: usize>(
    dots: &PackedDots<'_>,
) {
    // SAFETY: the caller's contract. The last lines may overlap with the lines before them.
    unsafe {
        if dots.lines < COUNT {
            for (m, line) in (0..ROWS).flat_map(|m| (0..dots.lines).map(move |line| (m, line))) {
                let row = PackedDots {
                    a: dots.a.wrapping_add(m * LANES),
                    c: dots.c.wrapping_offset(m as isize * dots.c_row),
                    ..*dots
                };
                some_lines::<BITS, GROUPS, 1, 1>(&row, line);
            }
            return;
        }
        for line in (0..dots.lines).step_by(COUNT) {
            some_lines::<BITS, GROUPS, ROWS, COUNT>(dots, line.min(dots.lines - COUNT));
        }
    }
}

/// Computes the dot products of the first `ROWS` rows of a part with `COUNT` lines from `first` on.
///
/// # Safety
/// As [`multiply`].
// A function of its own has registers for all sums.
#[inline(never)]
#[target_feature(enable = "avx512f")]
unsafe fn some_lines<const BITS: usize, const GROUPS: usize, const ROWS: usize, const COUNT: usize>(
    dots: &PackedDots<'_>,
    first: usize,
) {
    let &PackedDots { mut a, rows, k, ref b, c, c_row, .. } = dots;
    let step = if COUNT == 1 { rows } else { ROWS } * LANES;
    let bytes_of_line = b.blocks * b.block * BITS / 8;
    let mut bytes = b.bytes.wrapping_add(first * bytes_of_line);
    let mut sums = [[_mm512_setzero_ps(); COUNT]; ROWS];
    let per_block = b.block / LANES;
    // SAFETY: the caller's contract. A permutation reads the lowest four bits of each index.
    unsafe {
        let numbers = _mm512_loadu_ps(b.numbers.as_ptr());
        let shifts = match BITS {
            4 => _mm512_set_epi32(28, 28, 24, 24, 20, 20, 16, 16, 12, 12, 8, 8, 4, 4, 0, 0),
            _ => _mm512_loadu_si512(b.shifts_of_two_bits().as_ptr().cast()),
        };
        let mut left = k / LANES;
        let mut block = first * b.blocks;
        while left > 0 {
            let groups = if GROUPS > 0 { GROUPS } else { per_block.min(left) };
            left -= groups;
            // A table of the numbers of a block, or its scale and zero point.
            let mut of_block = [(numbers, numbers); COUNT];
            for (l, of_line) in of_block.iter_mut().enumerate() {
                let (scale, zero_point) = b.scale_and_zero_point(block + l * b.blocks);
                let (scale, zero_point) = (_mm512_set1_ps(scale), _mm512_set1_ps(zero_point));
                let table = _mm512_mul_ps(_mm512_sub_ps(numbers, zero_point), scale);
                *of_line = (if BITS == 8 { scale } else { table }, zero_point);
            }
            block += 1;
            for _ in 0..groups {
                let mut decoded = [numbers; COUNT];
                for (l, decoded) in decoded.iter_mut().enumerate() {
                    let (table, zero_point) = of_block[l];
                    let bytes = bytes.wrapping_add(l * bytes_of_line);
                    *decoded = match BITS {
                        4 => {
                            let integers = _mm512_set1_epi64(bytes.cast::<i64>().read_unaligned());
                            _mm512_permutexvar_ps(_mm512_srlv_epi32(integers, shifts), table)
                        }
                        2 => {
                            let integers = _mm512_set1_epi32(bytes.cast::<i32>().read_unaligned());
                            _mm512_permutexvar_ps(_mm512_srlv_epi32(integers, shifts), table)
                        }
                        _ => {
                            let integers = _mm512_cvtepu8_epi32(_mm_loadu_si128(bytes.cast()));
                            let numbers = _mm512_cvtepi32_ps(integers);
                            _mm512_mul_ps(_mm512_sub_ps(numbers, zero_point), table)
                        }
                    };
                }
                for (m, sums) in sums.iter_mut().enumerate() {
                    let x = _mm512_loadu_ps(a.wrapping_add(m * LANES));
                    for (sum, decoded) in sums.iter_mut().zip(&decoded) {
                        *sum = _mm512_fmadd_ps(x, *decoded, *sum);
                    }
                }
                bytes = bytes.wrapping_add(LANES * BITS / 8);
                a = a.wrapping_add(step);
            }
        }
        for (m, sums) in sums.iter().enumerate() {
            let to = c.wrapping_offset(m as isize * c_row).wrapping_add(first);
            for (l, sum) in sums.iter().enumerate() {
                store_sum(*sum, to.add(l));
            }
        }
    }
}

/// Stores the sum of the lanes.
///
/// # Safety
/// `to` is valid for writes, and the machine must have AVX-512 F.
// Inlined into the loop over all sums, it would keep the sums in memory from the start.
#[inline(never)]
#[target_feature(enable = "avx512f")]
unsafe fn store_sum(sum: __m512, to: *mut f32) {
    // SAFETY: the caller's contract.
    unsafe { to.write(_mm512_reduce_add_ps(sum)) };
}
