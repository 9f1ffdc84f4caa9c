//! Slices of products of few rows: some depths of the panels of A, and of columns of B in place.

use super::job::{DEPTHS, LINES, SIDE, WIDE_PANELS};

/// Maximum number of rows.
pub(crate) const MAX_ROWS: usize = SIDE;
/// Maximum number of rows for which sums stay in registers while B is read.
pub(super) const MAX_ROWS_IN_REGISTERS: usize = 4;
/// Maximum number of depths of a slice.
pub(super) const MAX_SLICE_DEPTHS: usize = 4 * DEPTHS;
/// Columns that are multiplied together: the bytes of a vector.
pub(crate) const COLUMNS: usize = WIDE_PANELS * LINES;

/// Unfinished results of [`COLUMNS`] columns: the products of each row, and the sums of the columns of B.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct ColumnSums {
    pub(super) products: [[i32; COLUMNS]; MAX_ROWS],
    pub(super) columns: [i32; COLUMNS],
}

/// Some depths of the panels of A, and of [`COLUMNS`] columns of B in place.
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "only machines of this kind multiply rows in place")
)]
pub(super) struct SliceInPlace {
    /// First tile, and the bytes from panel to panel.
    pub(super) a: *const u8,
    pub(super) panel: usize,
    pub(super) rows: usize,
    pub(super) b: *const u8,
    pub(super) b_step: isize,
    /// At most [`MAX_SLICE_DEPTHS`]; with few rows at most the depths of a tile.
    pub(super) depths: usize,
    /// Bits that turn elements of B into bytes of a panel.
    pub(super) flip: u8,
    pub(super) a_is_signed: bool,
}
