//! Micro-kernels of AVX-512: 14×32 of f32, 14×16 of f64.

use std::arch::x86_64::*;

use super::micro::Micro;

macro_rules! micro_kernel {
    ($name:ident, $t:ty, $lanes:literal, $zero:ident, $load:ident, $store:ident, $set:ident, $add:ident, $fma:ident) => {
        /// # Safety
        /// The contract of [`Micro::run`], and the machine has AVX-512 F.
        #[target_feature(enable = "avx512f")]
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
    f32_14x32,
    f32,
    16,
    _mm512_setzero_ps,
    _mm512_loadu_ps,
    _mm512_storeu_ps,
    _mm512_set1_ps,
    _mm512_add_ps,
    _mm512_fmadd_ps
);
micro_kernel!(
    f64_14x16,
    f64,
    8,
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
    run: &[
        f32_14x32::<1>,
        f32_14x32::<2>,
        f32_14x32::<3>,
        f32_14x32::<4>,
        f32_14x32::<5>,
        f32_14x32::<6>,
        f32_14x32::<7>,
        f32_14x32::<8>,
        f32_14x32::<9>,
        f32_14x32::<10>,
        f32_14x32::<11>,
        f32_14x32::<12>,
        f32_14x32::<13>,
        f32_14x32::<14>,
    ],
};
pub(super) const F64: Micro<f64> = Micro {
    mr: 14,
    nr: 16,
    run: &[
        f64_14x16::<1>,
        f64_14x16::<2>,
        f64_14x16::<3>,
        f64_14x16::<4>,
        f64_14x16::<5>,
        f64_14x16::<6>,
        f64_14x16::<7>,
        f64_14x16::<8>,
        f64_14x16::<9>,
        f64_14x16::<10>,
        f64_14x16::<11>,
        f64_14x16::<12>,
        f64_14x16::<13>,
        f64_14x16::<14>,
    ],
};
