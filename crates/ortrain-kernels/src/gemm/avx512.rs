//! AVX-512 micro-kernels: 14×32 and 14×16 of f32, 14×16 and 14×8 of f64.

use std::arch::x86_64::*;

use super::micro::{
    DotKernels, Micro, UNROLLED_DEPTHS, dots, dots_kernel, micro_kernel, operand_layout, prefetch, rows,
};

micro_kernel!(
    f32_rows,
    f32_rows_lying,
    "avx512f",
    f32,
    16,
    14,
    _mm512_setzero_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_set1_ps,
    _mm512_add_ps,
    _mm512_fmadd_ps
);
micro_kernel!(
    f64_rows,
    f64_rows_lying,
    "avx512f",
    f64,
    8,
    14,
    _mm512_setzero_pd,
    _mm512_loadu_pd,
    _mm512_storeu_pd,
    _mm512_set1_pd,
    _mm512_add_pd,
    _mm512_fmadd_pd
);

pub(super) const F32: Micro<f32> = Micro {
    mr: 14,
    nr: 32,
    run: rows!(f32_rows, 2, 1 2 3 4 5 6 7 8 9 10 11 12 13 14),
    half_width: Some(rows!(f32_rows, 1, 1 2 3 4 5 6 7 8 9 10 11 12 13 14)),
    tiles: None,
};

pub(super) const F64: Micro<f64> = Micro {
    mr: 14,
    nr: 16,
    run: rows!(f64_rows, 2, 1 2 3 4 5 6 7 8 9 10 11 12 13 14),
    half_width: Some(rows!(f64_rows, 1, 1 2 3 4 5 6 7 8 9 10 11 12 13 14)),
    tiles: None,
};

/// Returns the sums of the lanes of four registers, each in the first lane of a quarter.
#[inline]
#[target_feature(enable = "avx512f")]
fn f32_join([a, b, c, d]: [__m512; 4]) -> __m512 {
    let halves = |a, b| _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
    let (ab, cd) = (halves(a, b), halves(c, d));
    let sums = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(ab, cd), _mm512_shuffle_f32x4::<0xdd>(ab, cd));
    let sums = _mm512_add_ps(sums, _mm512_permute_ps::<0x4e>(sums));
    _mm512_add_ps(sums, _mm512_permute_ps::<0xb1>(sums))
}

/// Returns the sums of the lanes of four registers, as [`f32_join`].
#[inline]
#[target_feature(enable = "avx512f")]
fn f64_join([a, b, c, d]: [__m512d; 4]) -> __m512d {
    let halves = |a, b| _mm512_add_pd(_mm512_shuffle_f64x2::<0x44>(a, b), _mm512_shuffle_f64x2::<0xee>(a, b));
    let (ab, cd) = (halves(a, b), halves(c, d));
    let sums = _mm512_add_pd(_mm512_shuffle_f64x2::<0x88>(ab, cd), _mm512_shuffle_f64x2::<0xdd>(ab, cd));
    _mm512_add_pd(sums, _mm512_permute_pd::<0x55>(sums))
}

dots_kernel!(
    f32_dots,
    "avx512f",
    f32,
    16,
    4,
    _mm512_setzero_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_fmadd_ps,
    f32_join
);
pub(super) const F32_DOTS: DotKernels<f32> =
    DotKernels { single: dots!(f32_dots, 1), several: dots!(f32_dots, 4), width: 4 };

dots_kernel!(
    f64_dots,
    "avx512f",
    f64,
    8,
    4,
    _mm512_setzero_pd,
    _mm512_loadu_pd,
    _mm512_storeu_pd,
    _mm512_fmadd_pd,
    f64_join
);
pub(super) const F64_DOTS: DotKernels<f64> =
    DotKernels { single: dots!(f64_dots, 1), several: dots!(f64_dots, 4), width: 4 };
