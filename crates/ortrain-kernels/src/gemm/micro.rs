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
}

/// `C = A·B`, or `C += A·B` if the last argument says so: (k; A, its steps by row and by column; B, its step by row,
/// columns are adjacent; C, its step by row, columns are adjacent). Each sum over k is made in order, and then added.
///
/// # Safety
/// The elements of A, B and C that the sizes and steps name are valid for reads, those of C for writes; the machine has
/// the level that the kernel is of.
pub(crate) type Run<T> = unsafe fn(usize, *const T, isize, isize, *const T, isize, *mut T, isize, bool);

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
