//! Products of bytes by AVX2, and by AVX-VNNI: processors since 2021 (Intel).

use std::arch::x86_64::*;

use super::job::{Job, LINES, PanelFooter, QUADS, ROW, TILE};

/// Number of rows of sums in registers.
const ROWS: usize = 4;
/// Registers of a row of a tile of B.
const HALVES: usize = 2;

/// Defines the sums of a unit. `$split` prepares a register of quads of B, and `$dot` adds its products with the quads
/// of a row of A.
macro_rules! unit {
    ($name:ident, $rows:ident, $features:literal, $split:ident, $dot:ident) => {
        /// # Safety
        /// The contract of [`Job::run`], and the machine must have the features.
        pub(super) unsafe fn $name(job: Job, a_is_signed: bool) {
            for column in 0..job.across() {
                for row in (0..job.rows).step_by(ROWS) {
                    // SAFETY: the caller's contract.
                    unsafe {
                        match a_is_signed {
                            true => $rows::<true>(&job, row, column),
                            false => $rows::<false>(&job, row, column),
                        }
                    }
                }
            }
        }

        /// Computes `ROWS` rows of one panel.
        ///
        /// # Safety
        /// The contract of [`Job::run`], and the machine must have the features.
        #[target_feature(enable = $features)]
        unsafe fn $rows<const A_IS_SIGNED: bool>(job: &Job, row: usize, column: usize) {
            let (a, footer_of_a) = job.row_of_a(row);
            let (b, footer_of_b) = job.panel_of_b(column);
            let mut sums = [[_mm256_setzero_si256(); HALVES]; ROWS];
            for chunk in 0..job.chunks() {
                let (a, b) = (a.wrapping_add(chunk * TILE).cast::<i32>(), b.wrapping_add(chunk * TILE));
                for q in 0..job.quads_of(chunk) {
                    // SAFETY: each row of a tile has `QUADS` quads of depths.
                    unsafe {
                        let half = |h: usize| b.add(q * ROW + h * ROW / HALVES).cast();
                        let line = [
                            $split::<A_IS_SIGNED>(_mm256_loadu_si256(half(0))),
                            $split::<A_IS_SIGNED>(_mm256_loadu_si256(half(1))),
                        ];
                        for (i, sums) in sums.iter_mut().enumerate() {
                            let x = _mm256_set1_epi32(a.add(i * QUADS + q).read_unaligned());
                            for (sum, &y) in sums.iter_mut().zip(&line) {
                                *sum = $dot::<A_IS_SIGNED>(*sum, x, y);
                            }
                        }
                    }
                }
            }
            // SAFETY: panels end with a footer, and whole panels may be written.
            unsafe { finish(job, (row, column), footer_of_a, footer_of_b, sums) };
        }
    };
}

unit!(sums, rows, "avx2", pairs_of_b, dot_of_pairs);
unit!(sums_vnni, rows_vnni, "avx2,avxvnni", keep, dot_of_quads);

/// Returns the even and the odd bytes as 16-bit integers.
#[target_feature(enable = "avx2")]
fn pairs<const IS_SIGNED: bool>(x: __m256i) -> [__m256i; 2] {
    if IS_SIGNED {
        [_mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(x)), _mm256_srai_epi16::<8>(x)]
    } else {
        [_mm256_and_si256(x, _mm256_set1_epi16(0xff)), _mm256_srli_epi16::<8>(x)]
    }
}

/// Prepares a register of B.
#[target_feature(enable = "avx2")]
fn pairs_of_b<const A_IS_SIGNED: bool>(y: __m256i) -> [__m256i; 2] {
    if A_IS_SIGNED { pairs::<false>(y) } else { pairs::<true>(y) }
}

#[target_feature(enable = "avx2")]
fn dot_of_pairs<const A_IS_SIGNED: bool>(sum: __m256i, x: __m256i, [y_even, y_odd]: [__m256i; 2]) -> __m256i {
    let [x_even, x_odd] = pairs::<A_IS_SIGNED>(x);
    let products = _mm256_add_epi32(_mm256_madd_epi16(x_even, y_even), _mm256_madd_epi16(x_odd, y_odd));
    _mm256_add_epi32(sum, products)
}

#[target_feature(enable = "avx2")]
fn keep<const A_IS_SIGNED: bool>(y: __m256i) -> __m256i {
    y
}

#[target_feature(enable = "avx2,avxvnni")]
fn dot_of_quads<const A_IS_SIGNED: bool>(sum: __m256i, x: __m256i, y: __m256i) -> __m256i {
    let (unsigned, signed) = if A_IS_SIGNED { (y, x) } else { (x, y) };
    _mm256_dpbusd_avx_epi32(sum, unsigned, signed)
}

/// Subtracts the zero points, and stores the sums.
///
/// # Safety
/// The footers are valid for reads, and the destination for writes.
#[target_feature(enable = "avx2")]
unsafe fn finish(
    job: &Job,
    (row, column): (usize, usize),
    of_a: *const PanelFooter,
    of_b: *const PanelFooter,
    sums: [[__m256i; HALVES]; ROWS],
) {
    // SAFETY: the caller's contract.
    unsafe {
        let of_a = of_a.read_unaligned();
        for half in 0..HALVES {
            let first = half * LINES / HALVES;
            let load = |numbers: *const i32| _mm256_loadu_si256(numbers.add(first).cast());
            let column_sums = load((&raw const (*of_b).sums).cast());
            let column_zeros = load((&raw const (*of_b).zero_points).cast());
            for (i, sums) in sums.iter().enumerate() {
                let line = (row + i) % LINES;
                let of_row = _mm256_mullo_epi32(_mm256_set1_epi32(of_a.zero_points[line]), column_sums);
                let of_column = _mm256_mullo_epi32(_mm256_set1_epi32(of_a.sums[line]), column_zeros);
                let sum = _mm256_sub_epi32(sums[half], _mm256_add_epi32(of_row, of_column));
                let to = job.to.wrapping_offset((row + i) as isize * job.to_row);
                _mm256_storeu_si256(to.wrapping_add(column * LINES + first).cast(), sum);
            }
        }
    }
}
