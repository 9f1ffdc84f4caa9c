//! Copy of the part of a block that exists.

use super::arithmetic::Arithmetic;
use crate::isa::{Level, Work};

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
