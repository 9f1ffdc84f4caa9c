//! Packing of bytes into panels.

use ortrain_expr::DType;

use super::job::{DEPTHS, LINES, PanelFooter, QUADS, ROW, TILE, panel_bytes};
use super::products::ByteProducts;
use crate::gemm::pack::Block;
use crate::gemm::tiles::Side;
use crate::isa::{Isa, Level, Work};

/// Zero points of the lines of a block: the first one, of the type of the elements, and the step from line to line in
/// elements. A null pointer stands for zeros.
#[derive(Clone, Copy)]
pub(crate) struct ZeroPoints {
    pub(crate) at: *const u8,
    pub(crate) step: isize,
}

impl ZeroPoints {
    /// Zero for all lines.
    pub(crate) const ZEROS: ZeroPoints = ZeroPoints { at: std::ptr::null(), step: 0 };

    /// Returns the zero points from a line on.
    pub(super) fn starting_at(self, line: usize) -> ZeroPoints {
        if self.at.is_null() {
            return self;
        }
        ZeroPoints { at: self.at.wrapping_offset(line as isize * self.step), ..self }
    }

    /// Returns the zero point of a line as a number.
    ///
    /// # Safety
    /// The zero point is valid for reads, and has this type.
    #[inline(always)]
    pub(super) unsafe fn number(self, line: usize, dtype: DType) -> i32 {
        if self.at.is_null() {
            return 0;
        }
        // SAFETY: the caller's contract.
        let byte = unsafe { self.at.wrapping_offset(line as isize * self.step).read() };
        if dtype == DType::I8 { i32::from(byte.cast_signed()) } else { i32::from(byte) }
    }
}

impl ByteProducts {
    /// Packs a block of bytes into panels of A or B.
    ///
    /// # Safety
    /// `at` and the steps of the block address elements that are valid for reads, and the zero points, too. `to` has
    /// the capacity of the panels of all lines ([`panel_bytes`]).
    pub(crate) unsafe fn pack(
        &self,
        isa: Isa,
        dtype: DType,
        (block, zero_points): (Block, ZeroPoints),
        side: Side,
        to: *mut u8,
    ) {
        let (shift, zero_point_shift) = self.shift(side, dtype);
        let has_signed_panels = self.has_signed_panels(side);
        isa.run(PackBytes {
            products: *self,
            block,
            zero_points,
            dtype,
            has_signed_panels,
            shift,
            zero_point_shift,
            side,
            to,
        });
    }
}

struct PackBytes {
    products: ByteProducts,
    block: Block,
    zero_points: ZeroPoints,
    /// Type of the elements.
    dtype: DType,
    /// True for signed bytes in the panels.
    has_signed_panels: bool,
    /// Bits that turn elements into bytes of a panel, and the shift of their zero points.
    shift: u8,
    zero_point_shift: i32,
    side: Side,
    to: *mut u8,
}

/// Depths for which all wide columns are packed before the next depths: rows are often a page apart, and these pages
/// stay in the first-level translation cache.
const SLICE_DEPTHS: usize = 32;

/// Four depths of each line of a panel. The first depth is in the lowest byte.
pub(crate) type Quads = [u32; LINES];

impl PackBytes {
    /// Packs `depths` depths of `lines` lines into a tile, and adds their bytes to the sums.
    ///
    /// # Safety
    /// The contract of [`ByteProducts::pack`].
    #[inline(always)]
    unsafe fn tile<L: Level>(
        &self,
        (first, lines): (usize, usize),
        (p, depths): (usize, usize),
        to: *mut u8,
        sums: &mut [i32; LINES],
    ) {
        let PackBytes { block: Block { at, line_step, depth_step, .. }, shift, .. } = *self;
        let element = |line: usize, depth: usize| {
            let line = (first + line) as isize * line_step;
            at.wrapping_offset(line + (p + depth) as isize * depth_step)
        };
        let mut transposed = [[0u32; LINES]; QUADS];
        // SAFETY: the caller's contract; a tile has `QUADS` rows of `LINES` quads, or `LINES` rows of `QUADS` quads.
        unsafe {
            if self.side == Side::A && depth_step == 1 {
                let rows = to.cast::<[u8; ROW]>();
                for (line, sum) in sums.iter_mut().enumerate() {
                    let mut row = [0; ROW];
                    if line < lines && depths == DEPTHS {
                        row = element(line, 0).cast::<[u8; ROW]>().read_unaligned().map(|byte| byte ^ shift);
                    } else if line < lines {
                        std::ptr::copy_nonoverlapping(element(line, 0), row.as_mut_ptr(), depths);
                        row.iter_mut().take(depths).for_each(|byte| *byte ^= shift);
                    }
                    *sum = sum.wrapping_add(sum_of_row(&row, self.has_signed_panels));
                    rows.add(line).write_unaligned(row);
                }
                return;
            }
            if line_step == 1 {
                for (q, quads) in transposed.iter_mut().enumerate().take(depths.div_ceil(4)) {
                    let exists = |i: usize| 4 * q + i < depths;
                    let rows: [[u8; LINES]; 4] = std::array::from_fn(|i| {
                        if !exists(i) {
                            return [0; LINES];
                        }
                        let from = element(0, 4 * q + i);
                        if lines == LINES {
                            return from.cast::<[u8; LINES]>().read_unaligned();
                        }
                        let mut row = [0; LINES];
                        std::ptr::copy_nonoverlapping(from, row.as_mut_ptr(), lines);
                        row
                    });
                    let shifts = std::array::from_fn(|i| if exists(i) { shift } else { 0 });
                    *quads = interleave(&rows, shifts);
                }
                if lines < LINES {
                    transposed.iter_mut().for_each(|quads| quads[lines..].fill(0));
                }
                self.store_quads::<L>(&transposed, to, sums);
                return;
            }
            let mut rows = [[0u8; ROW]; LINES];
            for (line, row) in rows.iter_mut().take(lines).enumerate() {
                if depth_step == 1 && depths == DEPTHS {
                    *row = element(line, 0).cast::<[u8; ROW]>().read_unaligned();
                } else if depth_step == 1 {
                    std::ptr::copy_nonoverlapping(element(line, 0), row.as_mut_ptr(), depths);
                } else {
                    row.iter_mut().take(depths).enumerate().for_each(|(i, to)| *to = element(line, i).read());
                }
                row.iter_mut().take(depths).for_each(|byte| *byte ^= shift);
            }
            let from = rows.as_ptr().cast::<f32>();
            L::transpose_16(from, QUADS as isize, transposed.as_mut_ptr().cast(), LINES, LINES);
            self.add_sums(&transposed, sums);
            match self.side {
                Side::A => to.cast::<[[u8; ROW]; LINES]>().write_unaligned(rows),
                Side::B => to.cast::<[Quads; QUADS]>().write_unaligned(transposed),
            }
        }
    }

    /// Stores a tile of quads.
    ///
    /// # Safety
    /// `to` has the capacity of a tile.
    #[inline(always)]
    unsafe fn store_quads<L: Level>(&self, quads: &[Quads; QUADS], to: *mut u8, sums: &mut [i32; LINES]) {
        self.add_sums(quads, sums);
        // SAFETY: the caller's contract.
        unsafe {
            match self.side {
                Side::A => {
                    L::transpose_16(quads.as_ptr().cast(), LINES as isize, to.cast(), QUADS, LINES);
                }
                Side::B => to.cast::<[Quads; QUADS]>().write_unaligned(*quads),
            }
        }
    }

    /// Adds the bytes of each line.
    #[inline(always)]
    fn add_sums(&self, quads: &[Quads; QUADS], sums: &mut [i32; LINES]) {
        for quads in quads {
            for (sum, &quad) in sums.iter_mut().zip(quads) {
                *sum = sum.wrapping_add(sum_of_quad(quad, self.has_signed_panels));
            }
        }
    }

    /// Packs a panel of A, if its depths are adjacent and the machine has a method. Returns the sums of the lines.
    ///
    /// # Safety
    /// The contract of [`ByteProducts::pack`].
    #[inline(always)]
    unsafe fn pack_adjacent_lines(
        &self,
        (first, lines): (usize, usize),
        panel: *mut u8,
    ) -> Option<[i32; LINES]> {
        let Block { at, line_step, depth_step, .. } = self.block;
        if self.side != Side::A || depth_step != 1 {
            return None;
        }
        let block = Block { at: at.wrapping_offset(first as isize * line_step), lines, ..self.block };
        // SAFETY: the caller's contract.
        unsafe { self.products.pack_adjacent_lines(block, self.dtype, panel) }
    }

    /// Packs the columns that the machine packs together. Returns the number of packed columns.
    ///
    /// # Safety
    /// The contract of [`ByteProducts::pack`]; columns are adjacent.
    #[inline(always)]
    unsafe fn pack_wide_columns(&self) -> usize {
        let Block { at, depth_step, lines, depth, .. } = self.block;
        let wide = self.products.wide_columns();
        if wide == 0 {
            return 0;
        }
        let (columns, each) = (lines / wide * wide, panel_bytes(depth));
        let panel = |column: usize| self.to.wrapping_add(column / LINES * each);
        let sums_of = |column: usize| {
            let footer = panel(column).wrapping_add(depth.div_ceil(DEPTHS) * TILE).cast::<PanelFooter>();
            // SAFETY: the panel has the capacity of its footer.
            unsafe { &raw mut (*footer).sums }
        };
        // SAFETY: the caller's contract. The sums so far are in the footers.
        unsafe {
            (0..columns).step_by(LINES).for_each(|column| sums_of(column).write_unaligned([0; LINES]));
            for p in (0..depth).step_by(SLICE_DEPTHS) {
                let depths = SLICE_DEPTHS.min(depth - p);
                for column in (0..columns).step_by(wide) {
                    let from = at.wrapping_add(column).wrapping_offset(p as isize * depth_step);
                    let row = |i: usize| from.wrapping_offset(i as isize * depth_step);
                    let to = (panel(column).wrapping_add(p / 4 * ROW), each);
                    let sums = self.products.pack_wide_rows(depths, self.dtype, row, to);
                    for (j, sums) in sums.into_iter().enumerate() {
                        let total = sums_of(column + j * LINES);
                        let old = total.read_unaligned();
                        total.write_unaligned(std::array::from_fn(|l| old[l].wrapping_add(sums[l])));
                    }
                }
            }
            for column in (0..columns).step_by(LINES) {
                let sums = sums_of(column).read_unaligned();
                self.finish_panel((column, LINES), sums);
            }
        }
        columns
    }

    /// Writes the footer of the panel of some lines.
    ///
    /// # Safety
    /// The contract of [`ByteProducts::pack`].
    #[inline(always)]
    unsafe fn finish_panel(&self, (first, lines): (usize, usize), mut sums: [i32; LINES]) {
        let depth = self.block.depth;
        let mut zero_points = [0; LINES];
        for (line, zero_point) in zero_points.iter_mut().take(lines).enumerate() {
            // SAFETY: the caller's contract.
            *zero_point = unsafe { self.zero_point(first + line) };
        }
        if self.side == Side::B {
            for (sum, zero_point) in sums.iter_mut().zip(zero_points) {
                *sum = sum.wrapping_sub(zero_point.wrapping_mul(depth as i32));
            }
        }
        let panel = self.to.wrapping_add(first / LINES * panel_bytes(depth));
        // SAFETY: the caller's contract.
        unsafe { PanelFooter { zero_points, sums }.write(panel, depth) };
    }

    /// Returns the zero point of a line after the shift.
    ///
    /// # Safety
    /// The contract of [`ByteProducts::pack`].
    #[inline(always)]
    unsafe fn zero_point(&self, line: usize) -> i32 {
        let PackBytes { zero_points, dtype, zero_point_shift, .. } = *self;
        // SAFETY: the caller's contract.
        let own = unsafe { zero_points.number(line, dtype) };
        own + zero_point_shift
    }
}

/// Returns the sum of a row of bytes.
#[inline(always)]
fn sum_of_row(row: &[u8; ROW], is_signed: bool) -> i32 {
    if is_signed {
        row.iter().map(|&byte| i32::from(byte.cast_signed())).sum()
    } else {
        row.iter().map(|&byte| i32::from(byte)).sum()
    }
}

/// Returns the sum of four bytes.
#[inline(always)]
pub(crate) fn sum_of_quad(quad: u32, is_signed: bool) -> i32 {
    if is_signed {
        let quad = quad as i32;
        (quad << 24 >> 24) + (quad << 16 >> 24) + (quad << 8 >> 24) + (quad >> 24)
    } else {
        // Two sums of 16 bits in one register.
        let pairs = (quad & 0x00ff_00ff) + (quad >> 8 & 0x00ff_00ff);
        (pairs & 0xffff) as i32 + (pairs >> 16) as i32
    }
}

/// Returns four rows of bytes as quads, with the bits of `shifts` flipped.
#[inline(always)]
pub(crate) fn interleave(rows: &[[u8; LINES]; 4], shifts: [u8; 4]) -> Quads {
    let shift = u32::from_le_bytes(shifts);
    std::array::from_fn(|l| {
        let byte = |i: usize| u32::from(rows[i][l]) << (8 * i);
        (byte(0) | byte(1) | byte(2) | byte(3)) ^ shift
    })
}

impl Work for PackBytes {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let Block { line_step, lines, depth, .. } = self.block;
        let chunks = depth.div_ceil(DEPTHS);
        let is_wide = self.side == Side::B && line_step == 1;
        // SAFETY: the contract of `ByteProducts::pack`.
        let start = if is_wide { unsafe { self.pack_wide_columns() } } else { 0 };
        for first in (start..lines).step_by(LINES) {
            let count = LINES.min(lines - first);
            let panel = self.to.wrapping_add(first / LINES * panel_bytes(depth));
            // SAFETY: the contract of `ByteProducts::pack`.
            let adjacent = unsafe { self.pack_adjacent_lines((first, count), panel) };
            let sums = adjacent.unwrap_or_else(|| {
                let mut sums = [0; LINES];
                for chunk in 0..chunks {
                    let p = chunk * DEPTHS;
                    // SAFETY: the contract of `ByteProducts::pack`.
                    unsafe {
                        let to = panel.wrapping_add(chunk * TILE);
                        self.tile::<L>((first, count), (p, DEPTHS.min(depth - p)), to, &mut sums);
                    }
                }
                sums
            });
            // SAFETY: the contract of `ByteProducts::pack`.
            unsafe { self.finish_panel((first, count), sums) };
        }
    }
}
