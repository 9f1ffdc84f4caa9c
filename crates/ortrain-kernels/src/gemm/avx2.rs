//! Micro-kernels of AVX2 with fused multiply-add: 6×16 and 6×8 of f32, 6×8 and 6×4 of f64.

use std::arch::x86_64::*;

use super::micro::{Dots, Micro, dots, dots_kernel, micro_kernel, rows};

micro_kernel!(
    f32_rows,
    "avx2,fma",
    f32,
    8,
    _mm256_setzero_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_set1_ps,
    _mm256_add_ps,
    _mm256_fmadd_ps
);
micro_kernel!(
    f64_rows,
    "avx2,fma",
    f64,
    4,
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
    half: Some(rows!(f32_rows, 1, 1 2 3 4 5 6)),
};

pub(super) const F64: Micro<f64> =
    Micro { mr: 6, nr: 8, run: rows!(f64_rows, 2, 1 2 3 4 5 6), half: Some(rows!(f64_rows, 1, 1 2 3 4 5 6)) };

dots_kernel!(
    f32_dots,
    "avx2,fma",
    f32,
    8,
    _mm256_setzero_ps,
    _mm256_loadu_ps,
    _mm256_storeu_ps,
    _mm256_fmadd_ps
);
pub(super) const F32_DOTS: Dots<f32> = Dots { one: dots!(f32_dots, 1), many: dots!(f32_dots, 2), width: 2 };

dots_kernel!(
    f64_dots,
    "avx2,fma",
    f64,
    4,
    _mm256_setzero_pd,
    _mm256_loadu_pd,
    _mm256_storeu_pd,
    _mm256_fmadd_pd
);
pub(super) const F64_DOTS: Dots<f64> = Dots { one: dots!(f64_dots, 1), many: dots!(f64_dots, 2), width: 2 };
