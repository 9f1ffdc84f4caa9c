//! Copy of the part of a block that exists.

use std::mem::MaybeUninit;

use super::arithmetic::Arithmetic;
use crate::isa::{Isa, Level, Work};

/// Lines of a panel of tiles, and lines of both operands that are multiplied at a time: two panels by two.
pub(crate) const LINES: usize = 16;
pub(crate) const SIDE: usize = 2 * LINES;

/// Sums of two panels by two.
#[repr(align(64))]
struct Corner<T>([MaybeUninit<T>; SIDE * SIDE]);

/// Computes `C`, or adds to `C`, of at most [`SIDE`] rows and columns. `compute` receives a destination and its step from
/// row to row. It writes all existing rows, whole panels wide; further rows, up to a whole panel, may be written.
///
/// # Safety
/// C is valid for writes.
#[inline(always)]
pub(super) unsafe fn write_panels<T: Arithmetic>(
    isa: Isa,
    (rows, cols): (usize, usize),
    (c, c_row): (*mut T, isize),
    add: bool,
    compute: impl FnOnce(*mut T, isize),
) {
    // Whole panels can be stored to C directly.
    if !add && rows.is_multiple_of(LINES) && cols.is_multiple_of(LINES) {
        compute(c, c_row);
        return;
    }
    let mut corner: Corner<T> = Corner([const { MaybeUninit::uninit() }; SIDE * SIDE]);
    let from = corner.0.as_mut_ptr().cast::<T>();
    compute(from, SIDE as isize);
    isa.run(CornerCopy { from, from_row: SIDE, to: c, to_row: c_row, size: (rows, cols), add });
}

/// Copies the valid part of a narrow block to its destination.
pub(crate) struct CornerCopy<T> {
    pub(crate) from: *const T,
    pub(crate) from_row: usize,
    pub(crate) to: *mut T,
    pub(crate) to_row: isize,
    pub(crate) size: (usize, usize),
    pub(crate) add: bool,
}

impl<T: Arithmetic> Work for CornerCopy<T> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        for i in 0..self.size.0 {
            for j in 0..self.size.1 {
                // SAFETY: both blocks have these elements.
                unsafe {
                    let value = self.from.add(i * self.from_row + j).read();
                    let to = self.to.wrapping_offset(i as isize * self.to_row).add(j);
                    to.write_unaligned(if self.add { to.read_unaligned().add(value) } else { value });
                }
            }
        }
    }
}
