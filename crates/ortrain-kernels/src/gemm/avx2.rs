//! AVX2 micro-kernels with fused multiply-add: 6×16 and 6×8 of f32, 6×8 and 6×4 of f64.

use std::arch::x86_64::*;

use super::micro::{
    DotKernels, Micro, UNROLLED_DEPTHS, dots, dots_kernel, micro_kernel, operand_layout, prefetch, rows,
};

micro_kernel!(
    f32_rows,
    f32_rows_lying,
    "avx2,fma",
    f32,
    8,
    6,
    _mm256_setzero_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_set1_ps,
    _mm256_add_ps,
    _mm256_fmadd_ps
);
micro_kernel!(
    f64_rows,
    f64_rows_lying,
    "avx2,fma",
    f64,
    4,
    6,
    _mm256_setzero_pd,
    _mm256_loadu_pd,
    _mm256_storeu_pd,
    _mm256_set1_pd,
    _mm256_add_pd,
    _mm256_fmadd_pd
);

pub(super) const F32: Micro<f32> = Micro {
    mr: 6,
    nr: 16,
    run: rows!(f32_rows, 2, 1 2 3 4 5 6),
    half_width: Some(rows!(f32_rows, 1, 1 2 3 4 5 6)),
    tiles: None,
};

pub(super) const F64: Micro<f64> = Micro {
    mr: 6,
    nr: 8,
    run: rows!(f64_rows, 2, 1 2 3 4 5 6),
    half_width: Some(rows!(f64_rows, 1, 1 2 3 4 5 6)),
    tiles: None,
};

/// Returns the sums of the lanes of two registers, each in the first lane of a half.
#[inline]
#[target_feature(enable = "avx2")]
fn f32_join([a, b]: [__m256; 2]) -> __m256 {
    let sums = _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
    let sums = _mm256_add_ps(sums, _mm256_permute_ps::<0x4e>(sums));
    _mm256_add_ps(sums, _mm256_permute_ps::<0xb1>(sums))
}

/// Returns the sums of the lanes of two registers, as [`f32_join`].
#[inline]
#[target_feature(enable = "avx2")]
fn f64_join([a, b]: [__m256d; 2]) -> __m256d {
    let sums = _mm256_add_pd(_mm256_permute2f128_pd::<0x20>(a, b), _mm256_permute2f128_pd::<0x31>(a, b));
    _mm256_add_pd(sums, _mm256_permute_pd::<0x5>(sums))
}

dots_kernel!(
    f32_dots,
    "avx2,fma",
    f32,
    8,
    2,
    _mm256_setzero_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_fmadd_ps,
    f32_join
);
pub(super) const F32_DOTS: DotKernels<f32> =
    DotKernels { single: dots!(f32_dots, 1), several: dots!(f32_dots, 2), width: 2 };

dots_kernel!(
    f64_dots,
    "avx2,fma",
    f64,
    4,
    2,
    _mm256_setzero_pd,
    _mm256_loadu_pd,
    _mm256_storeu_pd,
    _mm256_fmadd_pd,
    f64_join
);
pub(super) const F64_DOTS: DotKernels<f64> =
    DotKernels { single: dots!(f64_dots, 1), several: dots!(f64_dots, 2), width: 2 };
