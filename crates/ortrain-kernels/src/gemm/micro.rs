//! What a micro-kernel is.

#[cfg(target_arch = "x86_64")]
pub(super) use crate::isa::prefetch;
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

/// Multiplies a few lines with a few lines, both of elements that are adjacent along k, keeping the sums in registers.
#[derive(Clone, Copy)]
pub(crate) struct Dots<T: 'static> {
    /// Functions for 1, 2, ... lines of the first operand and one of the second.
    pub(crate) one: &'static [RunDots<T>],
    /// The same with `width` lines of the second.
    pub(crate) many: &'static [RunDots<T>],
    pub(crate) width: usize,
}

/// (k; A, its step from line to line; B, its step from line to line; C, its steps by line of A and by line of B; whether
/// to add to C). A sum has as many chains as a register has lanes, which are joined as a tree, and then added.
///
/// # Safety
/// As [`Run`].
pub(crate) type RunDots<T> = unsafe fn(usize, *const T, isize, *const T, isize, *mut T, isize, isize, bool);

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
                // The results are there when the sums are made.
                for i in 0..M {
                    (0..V).for_each(|v| {
                        prefetch(c.wrapping_offset(i as isize * c_row).wrapping_add(v * $lanes))
                    });
                }
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

/// A micro-kernel of dot products, of `M` lines with `N` lines, `$width` at most. `$join` adds up the lanes of so many
/// sums, as trees, each to the first lane of its share of a register.
#[cfg(target_arch = "x86_64")]
macro_rules! dots_kernel {
    (
        $name:ident, $features:literal, $t:ty, $lanes:literal, $width:literal,
        $zero:ident, $load:ident, $store:ident, $fma:ident, $join:ident
    ) => {
        /// # Safety
        /// The contract of [`super::micro::RunDots`].
        #[target_feature(enable = $features)]
        unsafe fn $name<const M: usize, const N: usize>(
            k: usize,
            a: *const $t,
            a_line: isize,
            b: *const $t,
            b_line: isize,
            c: *mut $t,
            c_row: isize,
            c_col: isize,
            add: bool,
        ) {
            // SAFETY: the caller's contract: all elements named by the steps are there.
            unsafe {
                let mut sums = [[$zero(); N]; M];
                let whole = k - k % $lanes;
                for p in (0..whole).step_by($lanes) {
                    let mut lines = [$zero(); N];
                    for (j, line) in lines.iter_mut().enumerate() {
                        *line = $load(b.wrapping_offset(j as isize * b_line).wrapping_add(p));
                    }
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let x = $load(a.wrapping_offset(i as isize * a_line).wrapping_add(p));
                        for (sum, &y) in sums.iter_mut().zip(&lines) {
                            *sum = $fma(x, y, *sum);
                        }
                    }
                }
                if whole < k {
                    let rest = |line: *const $t| {
                        let mut lanes: [$t; $lanes] = [0.0; $lanes];
                        (whole..k).for_each(|p| lanes[p - whole] = line.add(p).read_unaligned());
                        $load(lanes.as_ptr())
                    };
                    let mut lines = [$zero(); N];
                    for (j, line) in lines.iter_mut().enumerate() {
                        *line = rest(b.wrapping_offset(j as isize * b_line));
                    }
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let x = rest(a.wrapping_offset(i as isize * a_line));
                        for (sum, &y) in sums.iter_mut().zip(&lines) {
                            *sum = $fma(x, y, *sum);
                        }
                    }
                }
                for (i, sums) in sums.into_iter().enumerate() {
                    let mut some = [$zero(); $width];
                    some[..N].copy_from_slice(&sums);
                    let mut lanes: [$t; $lanes] = [0.0; $lanes];
                    $store(lanes.as_mut_ptr(), $join(some));
                    for j in 0..N {
                        let sum = lanes[j * $lanes / $width];
                        let c = c.wrapping_offset(i as isize * c_row + j as isize * c_col);
                        c.write_unaligned(if add { c.read_unaligned() + sum } else { sum });
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

/// The functions of a micro-kernel of dot products.
#[cfg(target_arch = "x86_64")]
macro_rules! dots {
    ($name:ident, $n:literal) => {
        &[$name::<1, $n>, $name::<2, $n>, $name::<3, $n>, $name::<4, $n>]
    };
}

#[cfg(target_arch = "x86_64")]
pub(super) use {dots, dots_kernel, micro_kernel, rows};

/// An element type that products are computed in.
pub(crate) trait Real: Number {
    const BYTES: usize = size_of::<Self>();
    fn micro(isa: Isa) -> Micro<Self>;
    /// Where lines of both operands are adjacent along k.
    fn dots(isa: Isa) -> Option<Dots<Self>>;
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

    fn dots(isa: Isa) -> Option<Dots<f32>> {
        match isa.kind() {
            Kind::Portable => None,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => Some(super::avx2::F32_DOTS),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => Some(super::avx512::F32_DOTS),
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

    fn dots(isa: Isa) -> Option<Dots<f64>> {
        match isa.kind() {
            Kind::Portable => None,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => Some(super::avx2::F64_DOTS),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => Some(super::avx512::F64_DOTS),
        }
    }

    #[inline(always)]
    fn fused<L: Level>(a: f64, b: f64, c: f64) -> f64 {
        L::mul_add64(a, b, c)
    }
}
