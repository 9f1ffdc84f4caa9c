//! bfloat16 products by AVX-512 BF16: x86-64 servers since 2020 (Intel) and processors since 2022 (AMD).

use std::arch::x86_64::*;

use crate::gemm::tiles::job::{Job, LINE, LINES};

/// Number of rows of sums in registers.
const ROWS: usize = 8;

/// # Safety
/// The contract of [`Job::run`], and the machine must have AVX-512 F and BF16.
pub(super) unsafe fn sums(job: Job<'_>) {
    let (_, across) = job.num_tiles();
    for row in (0..job.rows).step_by(ROWS) {
        // SAFETY: the caller's contract.
        unsafe { if across == 2 { rows::<2>(&job, row) } else { rows::<1>(&job, row) } }
    }
}

/// Computes `ROWS` rows of `V` tiles.
///
/// # Safety
/// As [`sums`].
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn rows<const V: usize>(job: &Job<'_>, row: usize) {
    let Job { chunks, a, b, panels, steps, products, to, to_row, .. } = *job;
    let a = a.wrapping_add(row / LINES * panels[0] + row % LINES * LINE);
    let mut sums = [[_mm512_setzero_ps(); V]; ROWS];
    for chunk in 0..chunks {
        for product in products {
            let a = a.wrapping_add(chunk * steps[0] + product[0]).cast::<i32>();
            let b = b.wrapping_add(chunk * steps[1] + product[1]);
            for q in 0..LINE / 4 {
                // SAFETY: each line of a tile has `LINE / 4` pairs of depths; all bit patterns are numbers.
                unsafe {
                    let mut line = [_mm512_setzero_si512(); V];
                    for (v, line) in line.iter_mut().enumerate() {
                        *line = _mm512_loadu_si512(b.add(v * panels[1] + q * LINE).cast());
                    }
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let x = _mm512_set1_epi32(a.add(i * LINE / 4 + q).read_unaligned());
                        let x: __m512bh = std::mem::transmute(x);
                        for (sum, &y) in sums.iter_mut().zip(&line) {
                            *sum = _mm512_dpbf16_ps(*sum, x, std::mem::transmute::<__m512i, __m512bh>(y));
                        }
                    }
                }
            }
        }
    }
    for (i, sums) in sums.into_iter().enumerate() {
        for (v, sum) in sums.into_iter().enumerate() {
            // SAFETY: whole tiles may be written.
            unsafe {
                let to = to.wrapping_offset((row + i) as isize * to_row).wrapping_add(v * LINES);
                _mm512_storeu_ps(to, sum);
            }
        }
    }
}
