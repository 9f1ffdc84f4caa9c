//! What a micro-kernel is.

use crate::isa::{Isa, Kind, Level};
use crate::tape::number::Number;

/// Multiplies a few rows of A with a few columns of B, keeping the sums in registers.
#[derive(Clone, Copy)]
pub(crate) struct Micro<T: 'static> {
    /// Rows, at most.
    pub(crate) mr: usize,
    /// Columns, always.
    pub(crate) nr: usize,
    /// One function for each number of rows from 1 on.
    pub(crate) run: &'static [Run<T>],
    /// The same for half as many columns, if that saves time.
    pub(crate) half: Option<&'static [Run<T>]>,
}

/// `C = A·B`, or `C += A·B` if the last argument says so: (k; A, its steps by row and by column; B, its step by row,
/// columns are adjacent; C, its step by row, columns are adjacent). Each sum over k is made in order, and then added.
///
/// # Safety
/// The elements of A, B and C that the sizes and steps name are valid for reads, those of C for writes; the machine has
/// the level that the kernel is of.
pub(crate) type Run<T> = unsafe fn(usize, *const T, isize, isize, *const T, isize, *mut T, isize, bool);

/// A micro-kernel of `V` registers of columns, and `M` rows.
#[cfg(target_arch = "x86_64")]
macro_rules! micro_kernel {
    (
        $name:ident, $features:literal, $t:ty, $lanes:literal,
        $zero:ident, $load:ident, $store:ident, $set:ident, $add:ident, $fma:ident
    ) => {
        /// # Safety
        /// The contract of [`super::micro::Run`].
        #[target_feature(enable = $features)]
        unsafe fn $name<const M: usize, const V: usize>(
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
                let mut sums = [[$zero(); V]; M];
                for _ in 0..k {
                    let mut line = [$zero(); V];
                    for (v, line) in line.iter_mut().enumerate() {
                        *line = $load(b.add(v * $lanes));
                    }
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let x = $set(a.wrapping_offset(i as isize * a_row).read_unaligned());
                        for (sum, &y) in sums.iter_mut().zip(&line) {
                            *sum = $fma(x, y, *sum);
                        }
                    }
                    a = a.wrapping_offset(a_col);
                    b = b.wrapping_offset(b_row);
                }
                for (i, sums) in sums.into_iter().enumerate() {
                    let c = c.wrapping_offset(i as isize * c_row);
                    for (v, sum) in sums.into_iter().enumerate() {
                        let c = c.add(v * $lanes);
                        $store(c, if add { $add($load(c), sum) } else { sum });
                    }
                }
            }
        }
    };
}

/// The functions of a micro-kernel for each number of rows.
#[cfg(target_arch = "x86_64")]
macro_rules! rows {
    ($name:ident, $v:literal, $($m:literal)*) => { &[$($name::<$m, $v>),*] };
}

#[cfg(target_arch = "x86_64")]
pub(super) use {micro_kernel, rows};

/// An element type that products are computed in.
pub(crate) trait Real: Number {
    const BYTES: usize = size_of::<Self>();
    fn micro(isa: Isa) -> Micro<Self>;
    /// `a * b + c`, as the level does it.
    fn fused<L: Level>(a: Self, b: Self, c: Self) -> Self;
}

impl Real for f32 {
    fn micro(isa: Isa) -> Micro<f32> {
        match isa.kind() {
            Kind::Portable => super::portable::F32,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => super::avx2::F32,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => super::avx512::F32,
        }
    }

    #[inline(always)]
    fn fused<L: Level>(a: f32, b: f32, c: f32) -> f32 {
        L::mul_add(a, b, c)
    }
}

impl Real for f64 {
    fn micro(isa: Isa) -> Micro<f64> {
        match isa.kind() {
            Kind::Portable => super::portable::F64,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => super::avx2::F64,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => super::avx512::F64,
        }
    }

    #[inline(always)]
    fn fused<L: Level>(a: f64, b: f64, c: f64) -> f64 {
        L::mul_add64(a, b, c)
    }
}
