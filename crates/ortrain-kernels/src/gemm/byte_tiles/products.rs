//! Method of products of bytes: the unit, and the signs of the panels.

use ortrain_expr::DType;

#[cfg(target_arch = "x86_64")]
use super::avx2;
#[cfg(target_arch = "x86_64")]
use super::avx512;
use super::job::{Job, LINES, WIDE_PANELS, panel_bytes};
use super::portable;
use super::slice::{ColumnSums, SliceInPlace};
use crate::gemm::corner_copy::write_panels;
use crate::gemm::pack::Block;
use crate::gemm::tiles::Side;
use crate::isa::Isa;
use crate::isa::bytes::ByteUnit;

/// Method of products of bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ByteProducts {
    unit: ByteUnit,
    /// True if the panels of A have signed bytes and the panels of B unsigned bytes.
    a_is_signed: bool,
}

impl ByteProducts {
    /// Creates the method for operands of two types, `U8` or `I8`. Only one operand is shifted, if any.
    pub(crate) fn new(isa: Isa, dtypes: [DType; 2]) -> ByteProducts {
        ByteProducts { unit: ByteUnit::detect(isa), a_is_signed: dtypes == [DType::I8, DType::U8] }
    }

    /// Returns the method with another unit.
    #[cfg(test)]
    pub(super) fn with_unit(self, unit: ByteUnit) -> ByteProducts {
        ByteProducts { unit, ..self }
    }

    /// Returns the method for operands of other types.
    pub(crate) fn for_types(self, dtypes: [DType; 2]) -> ByteProducts {
        ByteProducts { a_is_signed: dtypes == [DType::I8, DType::U8], ..self }
    }

    /// Returns true if the panels of an operand have signed bytes.
    pub(crate) fn has_signed_panels(&self, side: Side) -> bool {
        (side == Side::A) == self.a_is_signed
    }

    /// Returns the bits that turn bytes of a type into bytes of a panel, and the shift of their zero points.
    pub(crate) fn shift(&self, side: Side, dtype: DType) -> (u8, i32) {
        match (self.has_signed_panels(side), dtype == DType::I8) {
            (true, false) => (0x80, -128),
            (false, true) => (0x80, 128),
            _ => (0, 0),
        }
    }

    /// Returns the number of columns that [`ByteProducts::pack_wide_rows`] packs; zero if the machine has no method.
    pub(crate) fn wide_columns(&self) -> usize {
        match self.unit {
            #[cfg(target_arch = "x86_64")]
            ByteUnit::Avx512Vnni => WIDE_PANELS * LINES,
            _ => 0,
        }
    }

    /// Packs rows of adjacent bytes into panels of B, which are `panel` bytes apart, and returns the sum of each column.
    /// `row` returns the address of the row of a depth.
    ///
    /// # Safety
    /// Each row has [`ByteProducts::wide_columns`] bytes, which are valid for reads. `to` has the capacity of all depths.
    ///
    /// # Panics
    /// Panics if the machine has no method.
    #[inline(always)]
    pub(crate) unsafe fn pack_wide_rows(
        &self,
        depth: usize,
        dtype: DType,
        row: impl Fn(usize) -> *const u8,
        (to, panel): (*mut u8, usize),
    ) -> [[i32; LINES]; WIDE_PANELS] {
        #[cfg(target_arch = "x86_64")]
        if self.unit == ByteUnit::Avx512Vnni {
            let (flip, _) = self.shift(Side::B, dtype);
            let has_signed_panels = self.has_signed_panels(Side::B);
            let rows = avx512::WideRows { depth, flip, has_signed_panels, to, panel };
            // SAFETY: the caller's contract; the unit exists, and its level has the other features.
            return unsafe { avx512::pack_wide_rows(&rows, row) };
        }
        let _ = (depth, dtype, row, to, panel);
        unreachable!("the machine packs no wide rows")
    }

    /// Packs a panel of A with adjacent depths, and returns the sums of its lines. Returns `None` if the machine has
    /// no method.
    ///
    /// # Safety
    /// The lines of the block are valid for reads. `to` has the capacity of a panel.
    #[inline(always)]
    pub(super) unsafe fn pack_adjacent_lines(
        &self,
        block: Block,
        dtype: DType,
        to: *mut u8,
    ) -> Option<[i32; LINES]> {
        #[cfg(target_arch = "x86_64")]
        if self.unit == ByteUnit::Avx512Vnni {
            let (flip, _) = self.shift(Side::A, dtype);
            let Block { at, line_step, lines, depth, .. } = block;
            let has_signed_panels = self.has_signed_panels(Side::A);
            let lines = avx512::AdjacentLines { at, line_step, lines, depth, flip, has_signed_panels, to };
            // SAFETY: the caller's contract; the unit exists, and its level has the other features.
            return Some(unsafe { avx512::pack_adjacent_lines(&lines) });
        }
        let _ = (block, dtype, to);
        None
    }

    /// Adds the products of a slice.
    ///
    /// # Safety
    /// The slice is valid for reads, and the machine [has](ByteProducts::multiplies_small_m) the method.
    pub(super) unsafe fn add_slice(&self, slice: &SliceInPlace, sums: &mut ColumnSums) {
        #[cfg(target_arch = "x86_64")]
        if self.unit == ByteUnit::Avx512Vnni {
            // SAFETY: the caller's contract; the unit exists, and its level has the other features.
            return unsafe { avx512::add_slice_in_place(slice, sums) };
        }
        let _ = (slice, sums);
        unreachable!("the machine multiplies no rows in place");
    }

    /// Computes `C = A·B`, or `C += A·B`, of at most [`SIDE`] rows and columns. Panels are adjacent.
    ///
    /// # Safety
    /// The panels are valid for reads and packed for this depth, C is valid for writes, and the machine has the unit.
    pub(crate) unsafe fn multiply(
        &self,
        isa: Isa,
        (rows, cols): (usize, usize),
        depth: usize,
        (a, b): (*const u8, *const u8),
        c: *mut i32,
        c_row: isize,
        add: bool,
    ) {
        let (quads, panel) = (depth.div_ceil(4), panel_bytes(depth));
        // SAFETY: the caller's contract; all existing rows of the block are written, whole panels wide.
        unsafe {
            write_panels(isa, (rows, cols), (c, c_row), add, |to, to_row| {
                Job { quads, a, b, panel, rows, cols, to, to_row }.run(*self, isa);
            });
        }
    }
}

impl Job {
    /// # Safety
    /// The panels are valid for reads, the destination for writes, and the machine has the unit.
    unsafe fn run(self, products: ByteProducts, isa: Isa) {
        let ByteProducts { unit, a_is_signed } = products;
        // SAFETY: the caller's contract.
        unsafe {
            match unit {
                ByteUnit::Portable => isa.run(portable::Sums { job: self, a_is_signed }),
                #[cfg(target_arch = "x86_64")]
                ByteUnit::Avx2 => avx2::sums(self, a_is_signed),
                #[cfg(target_arch = "x86_64")]
                ByteUnit::AvxVnni => avx2::sums_vnni(self, a_is_signed),
                #[cfg(target_arch = "x86_64")]
                ByteUnit::Avx512Vnni => avx512::sums(self, a_is_signed),
            }
        }
    }
}
