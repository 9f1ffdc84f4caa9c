//! Portable micro-kernels: arrays that the compiler keeps in registers. 4×8 of f32, 4×4 of f64.

use super::micro::Micro;
use crate::tile::number::Number;

/// # Safety
/// The contract of [`Micro::run`].
unsafe fn kernel<T: Number, const M: usize, const N: usize>(
    k: usize,
    mut a: *const T,
    a_row: isize,
    a_col: isize,
    mut b: *const T,
    b_row: isize,
    c: *mut T,
    c_row: isize,
    add: bool,
) {
    let mut sum = [[T::ZERO; N]; M];
    for _ in 0..k {
        // SAFETY: the caller's contract: all elements that the strides address are valid.
        let line = unsafe { b.cast::<[T; N]>().read_unaligned() };
        for (i, sum) in sum.iter_mut().enumerate() {
            // SAFETY: as above.
            let x = unsafe { a.wrapping_offset(i as isize * a_row).read_unaligned() };
            for (s, &y) in sum.iter_mut().zip(&line) {
                *s = s.add(x.mul(y));
            }
        }
        a = a.wrapping_offset(a_col);
        b = b.wrapping_offset(b_row);
    }
    for (i, sum) in sum.iter_mut().enumerate() {
        let c = c.wrapping_offset(i as isize * c_row).cast::<[T; N]>();
        // SAFETY: as above.
        unsafe {
            if add {
                for (s, &old) in sum.iter_mut().zip(&c.read_unaligned()) {
                    *s = old.add(*s);
                }
            }
            c.write_unaligned(*sum);
        }
    }
}

pub(super) const F32: Micro<f32> = Micro {
    mr: 4,
    nr: 8,
    run: &[kernel::<f32, 1, 8>, kernel::<f32, 2, 8>, kernel::<f32, 3, 8>, kernel::<f32, 4, 8>],
    half_width: None,
    tiles: None,
};
pub(super) const F64: Micro<f64> = Micro {
    mr: 4,
    nr: 4,
    run: &[kernel::<f64, 1, 4>, kernel::<f64, 2, 4>, kernel::<f64, 3, 4>, kernel::<f64, 4, 4>],
    half_width: None,
    tiles: None,
};
