//! Products with a packed right factor.

use crate::gemm::levels::Real;
use crate::gemm::micro::{Factor, Micro, Target};
use crate::isa::Isa;

/// Depths of a chunk: a panel of the right factor stays in the first-level cache.
const CHUNK_DEPTH: usize = 256;

/// Left factor, a matrix that is read in place.
#[derive(Clone, Copy)]
pub(super) struct LeftFactor<T> {
    pub(super) at: *const T,
    /// Steps from row to row and along the depth.
    pub(super) row: isize,
    pub(super) depth: isize,
}

impl<T> LeftFactor<T> {
    /// Returns the transposed matrix.
    pub(super) fn transpose(self) -> LeftFactor<T> {
        LeftFactor { row: self.depth, depth: self.row, ..self }
    }
}

/// A product `C = A·B`, or `C += A·B`.
pub(super) struct Product<T> {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) depth: usize,
    pub(super) a: LeftFactor<T>,
    /// B in panels of the micro-kernel's columns, and the depths of a panel: at least `depth`.
    pub(super) b: *const T,
    pub(super) pitch: usize,
    pub(super) c: Target<T>,
    pub(super) add: bool,
    /// Memory for one block of the micro-kernel.
    pub(super) corner: *mut T,
}

impl<T: Real> Product<T> {
    /// # Safety
    /// A, B and C have the elements that the sizes describe. C and the corner are valid for writes, and overlap
    /// nothing. The machine has the level of `micro`.
    pub(super) unsafe fn run(&self, isa: Isa, micro: Micro<T>) {
        let &Product { rows, cols, depth, a, b, pitch, c, add, corner } = self;
        let nr = micro.nr;
        let height = micro.panel_rows(rows);
        for p in (0..depth).step_by(CHUNK_DEPTH) {
            let n = CHUNK_DEPTH.min(depth - p);
            let add = add || p > 0;
            for j in (0..cols).step_by(nr) {
                let columns = nr.min(cols - j);
                let b = b.wrapping_add(j * pitch + p * nr);
                let b = Factor { at: b, line: 1, depth: nr as isize };
                for i in (0..rows).step_by(height) {
                    let count = height.min(rows - i);
                    let at = a.at.wrapping_offset(i as isize * a.row + p as isize * a.depth);
                    let a = Factor { at, line: a.row, depth: a.depth };
                    let at = c.at.wrapping_offset(i as isize * c.row).wrapping_add(j);
                    let to = Target { at, row: c.row };
                    // SAFETY: rows before `rows` are valid, and panels of B are padded.
                    unsafe { micro.multiply_partial(isa, (count, columns), n, a, b, to, add, corner) };
                }
            }
        }
    }
}
