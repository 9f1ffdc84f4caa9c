//! Micro-kernels of AVX2 with fused multiply-add: 6×16 of f32, 6×8 of f64.

use std::arch::x86_64::*;

use super::micro::Micro;

macro_rules! micro_kernel {
    ($name:ident, $t:ty, $lanes:literal, $zero:ident, $load:ident, $store:ident, $set:ident, $add:ident, $fma:ident) => {
        /// # Safety
        /// The contract of [`Micro::run`], and the machine has AVX2 and FMA.
        #[target_feature(enable = "avx2,fma")]
        unsafe fn $name<const M: usize>(
            k: usize,
            mut a: *const $t,
            a_row: isize,
            a_col: isize,
            mut b: *const $t,
            b_row: isize,
            c: *mut $t,
            c_row: isize,
            add: bool,
        ) {
            // SAFETY: the caller's contract: all elements named by the strides are there.
            unsafe {
                let mut sum = [[$zero(); 2]; M];
                for _ in 0..k {
                    let b0 = $load(b);
                    let b1 = $load(b.add($lanes));
                    for i in 0..M {
                        let x = $set(a.wrapping_offset(i as isize * a_row).read_unaligned());
                        sum[i][0] = $fma(x, b0, sum[i][0]);
                        sum[i][1] = $fma(x, b1, sum[i][1]);
                    }
                    a = a.wrapping_offset(a_col);
                    b = b.wrapping_offset(b_row);
                }
                for (i, [s0, s1]) in sum.into_iter().enumerate() {
                    let c = c.wrapping_offset(i as isize * c_row);
                    if add {
                        $store(c, $add($load(c), s0));
                        $store(c.add($lanes), $add($load(c.add($lanes)), s1));
                    } else {
                        $store(c, s0);
                        $store(c.add($lanes), s1);
                    }
                }
            }
        }
    };
}

micro_kernel!(
    f32_6x16,
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
    f64_6x8,
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
    run: &[f32_6x16::<1>, f32_6x16::<2>, f32_6x16::<3>, f32_6x16::<4>, f32_6x16::<5>, f32_6x16::<6>],
};
pub(super) const F64: Micro<f64> = Micro {
    mr: 6,
    nr: 8,
    run: &[f64_6x8::<1>, f64_6x8::<2>, f64_6x8::<3>, f64_6x8::<4>, f64_6x8::<5>, f64_6x8::<6>],
};
