//! Sums of products of terms, as the units compute them.

pub(crate) use crate::gemm::corner_copy::{LINES, SIDE};

/// Depths of a tile.
pub(crate) const DEPTHS: usize = 32;

/// Bytes of a tile, and of each of its lines.
pub(super) const TILE: usize = 1024;

pub(super) const LINE: usize = 64;

/// Sums of some products of terms over all depths of two panels by two, or fewer.
#[derive(Clone, Copy)]
pub(super) struct Job<'a> {
    /// Number of tiles along the depth.
    pub(super) chunks: usize,
    pub(super) a: *const u8,
    pub(super) b: *const u8,
    /// Bytes from panel to panel of A and of B, and from chunk to chunk.
    pub(super) panels: [usize; 2],
    pub(super) steps: [usize; 2],
    /// Numbers of existing rows and columns.
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Offsets of the multiplied terms (A, B) in a chunk, in bytes.
    pub(super) products: &'a [[usize; 2]],
    /// Destination. All existing rows are written, whole tiles wide; further rows, up to a whole tile, may be written.
    pub(super) to: *mut f32,
    pub(super) to_row: isize,
}

impl Job<'_> {
    /// Returns the number of tiles along the rows and along the columns.
    pub(super) fn num_tiles(&self) -> (usize, usize) {
        (self.rows.div_ceil(LINES), self.cols.div_ceil(LINES))
    }
}
