//! Products of few rows of bytes: B is read once, in place, because packing it would cost more than multiplying.

use ortrain_expr::DType;

use super::job::{DEPTHS, LINES, PanelFooter, SIDE, TILE, panel_bytes};
use super::pack::ZeroPoints;
use super::products::ByteProducts;
use super::slice::{COLUMNS, ColumnSums, MAX_ROWS_IN_REGISTERS, MAX_SLICE_DEPTHS, SliceInPlace};
use crate::gemm::pack::Block;
use crate::gemm::tiles::Side;
use crate::isa::{Isa, Level, Work};
use crate::tile::ALIGN;

/// Depths of all columns that come before the next depths: rows of B are often a page apart, and these pages stay in the
/// first-level translation cache. With more rows, sums are loaded and stored less often.
const SLICE_DEPTHS: usize = DEPTHS;

/// Block of a product of few rows.
pub(crate) struct SmallM {
    /// Packed panels of A, and the number of existing rows.
    pub(crate) a: *const u8,
    pub(crate) rows: usize,
    /// Adjacent columns of B, their type and their zero points.
    pub(crate) b: Block,
    pub(crate) dtype: DType,
    pub(crate) zero_points: ZeroPoints,
    /// Memory of [`ByteProducts::small_m_scratch`] bytes.
    pub(crate) scratch: *mut u8,
    /// Destination, and its step from row to row.
    pub(crate) c: *mut i32,
    pub(crate) c_row: isize,
}

impl ByteProducts {
    /// Returns true if the machine multiplies few rows with B in place.
    pub(crate) fn multiplies_small_m(&self) -> bool {
        self.wide_columns() > 0
    }

    /// Returns the bytes of scratch memory for `columns` columns of B.
    pub(crate) fn small_m_scratch(columns: usize, depth: usize) -> usize {
        let sums = (columns / COLUMNS * size_of::<ColumnSums>()).next_multiple_of(ALIGN);
        sums + SIDE / LINES * panel_bytes(depth)
    }

    /// Computes a block of a product of few rows.
    ///
    /// # Safety
    /// The panel of A and the elements and zero points of B are valid for reads. C and the scratch memory, which is
    /// aligned, are valid for writes. The machine [has](ByteProducts::multiplies_small_m) the method.
    pub(crate) unsafe fn multiply_small_m(&self, isa: Isa, block: &SmallM) {
        let SmallM { a, rows, b, scratch, c, c_row, .. } = *block;
        let groups = b.lines / COLUMNS;
        let (_, shift) = self.shift(Side::B, block.dtype);
        // SAFETY: the caller's contract.
        unsafe {
            let sums = std::slice::from_raw_parts_mut(scratch.cast::<ColumnSums>(), groups);
            self.add_products(block, sums);
            for (group, sums) in sums.iter().enumerate() {
                isa.run(FinishGroup { block, sums, first: group * COLUMNS, shift });
            }
            // The last, incomplete columns.
            let panels = scratch.wrapping_add(std::mem::size_of_val(sums).next_multiple_of(ALIGN));
            for first in (groups * COLUMNS..b.lines).step_by(SIDE) {
                let columns = SIDE.min(b.lines - first);
                let part = Block { at: b.at.wrapping_add(first), lines: columns, ..b };
                let zero_points = block.zero_points.starting_at(first);
                self.pack(isa, block.dtype, (part, zero_points), Side::B, panels);
                let factors = (a, panels.cast_const());
                self.multiply(isa, (rows, columns), b.depth, factors, c.wrapping_add(first), c_row, false);
            }
        }
    }

    /// Sums the products and the columns of all groups.
    ///
    /// # Safety
    /// The contract of [`ByteProducts::multiply_small_m`].
    unsafe fn add_products(&self, block: &SmallM, sums: &mut [ColumnSums]) {
        let SmallM { a, rows, b, dtype, .. } = *block;
        for sums in &mut *sums {
            sums.columns.fill(0);
            sums.products.iter_mut().take(rows.next_multiple_of(LINES)).for_each(|sums| sums.fill(0));
        }
        let slice = if rows <= MAX_ROWS_IN_REGISTERS { SLICE_DEPTHS } else { MAX_SLICE_DEPTHS };
        for p in (0..b.depth).step_by(slice) {
            for (group, sums) in sums.iter_mut().enumerate() {
                let from = b.at.wrapping_add(group * COLUMNS);
                let part = SliceInPlace {
                    a: a.wrapping_add(p / DEPTHS * TILE),
                    panel: panel_bytes(b.depth),
                    rows,
                    b: from.wrapping_offset(p as isize * b.depth_step),
                    b_step: b.depth_step,
                    depths: slice.min(b.depth - p),
                    flip: self.shift(Side::B, dtype).0,
                    a_is_signed: self.has_signed_panels(Side::A),
                };
                // SAFETY: the caller's contract.
                unsafe { self.add_slice(&part, sums) };
            }
        }
    }
}

/// Subtracts the zero points from the results of a group of columns, and stores the results.
struct FinishGroup<'a> {
    block: &'a SmallM,
    sums: &'a ColumnSums,
    /// First column of the group.
    first: usize,
    /// Shift of the zero points of B.
    shift: i32,
}

impl Work for FinishGroup<'_> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let FinishGroup { block, sums, first, shift } = self;
        let SmallM { a, rows, b, dtype, zero_points, c, c_row, .. } = *block;
        let footer = |panel: usize| {
            let of_panel = a.wrapping_add(panel * panel_bytes(b.depth) + b.depth.div_ceil(DEPTHS) * TILE);
            of_panel.cast::<PanelFooter>()
        };
        // SAFETY: the contract of `ByteProducts::multiply_small_m`.
        let zeros: [i32; COLUMNS] =
            std::array::from_fn(|j| unsafe { zero_points.number(first + j, dtype) }.wrapping_add(shift));
        let columns: [i32; COLUMNS] =
            std::array::from_fn(|j| sums.columns[j].wrapping_sub(zeros[j].wrapping_mul(b.depth as i32)));
        for (i, products) in sums.products.iter().enumerate().take(rows) {
            // SAFETY: the contract of `ByteProducts::multiply_small_m`.
            unsafe {
                let of_a = footer(i / LINES);
                let zero = (&raw const (*of_a).zero_points[i % LINES]).read_unaligned();
                let sum = (&raw const (*of_a).sums[i % LINES]).read_unaligned();
                let results: [i32; COLUMNS] = std::array::from_fn(|j| {
                    let of_zeros = zero.wrapping_mul(columns[j]).wrapping_add(sum.wrapping_mul(zeros[j]));
                    products[j].wrapping_sub(of_zeros)
                });
                let to = c.wrapping_offset(i as isize * c_row).wrapping_add(first);
                to.cast::<[i32; COLUMNS]>().write_unaligned(results);
            }
        }
    }
}
