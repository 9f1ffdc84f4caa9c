//! Block of a product of few rows with packed integers.

use ortrain_expr::QuantizedMatrix;

use crate::isa::PackedBlocks;

/// Number of elements of a register.
pub(crate) const LANES: usize = QuantizedMatrix::GROUP;
/// Maximum number of rows of a product.
pub(crate) const MAX_ROWS: usize = 64;
/// Numbers of rows that are multiplied together: their sums stay in registers.
const PARTS: [usize; 7] = [12, 8, 6, 4, 3, 2, 1];

/// Block of a product of few rows with packed integers.
pub(crate) struct PackedDots<'a> {
    /// Rows of `k` elements, [rearranged](super::rearrange), and their number.
    pub(crate) a: *const f32,
    pub(crate) rows: usize,
    /// Length of the sums: whole registers.
    pub(crate) k: usize,
    /// First line of integers, all its blocks, and the number of lines.
    pub(crate) b: PackedBlocks<'a>,
    pub(crate) lines: usize,
    /// Destination, and its step from row to row.
    pub(crate) c: *mut f32,
    pub(crate) c_row: isize,
}

/// Returns the first row and the number of rows of each part, one of [`PARTS`].
pub(super) fn parts(rows: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut first = 0;
    std::iter::from_fn(move || {
        let count = PARTS.into_iter().find(|&count| count <= rows - first)?;
        first += count;
        Some((first - count, count))
    })
}
