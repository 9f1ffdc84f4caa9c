//! Operands of a product, and their storage for the micro-kernels.

use ortrain_expr::{Access, DType, Nest};

use super::byte_tiles::ZeroPoints;
use super::pack::{Block, Elements};
use super::quantized::{DecodedRows, QuantizedSlots, decode};
use crate::isa::Isa;
use crate::tile::strided_iter::StridedIter;

/// Maximum number of bytes of an operand's block that is kept packed over all of k. It is packed once, so it may exceed
/// the second-level cache.
pub(super) const MAX_REUSED_BLOCK_BYTES: usize = 2 << 20;

/// Number of panels of adjacent lines of a quantized operand that are decoded together.
const DECODED_PANELS: usize = 4;

/// Storage of an operand for the micro-kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Packing {
    /// Read in place.
    InPlace,
    /// Packed by each task. If `full_depth`, the block covers all of a part's depth, and the next task may reuse it.
    PerTask { full_depth: bool },
    /// Packed once for all tasks.
    Shared,
}

impl Packing {
    pub(super) fn describe(self) -> &'static str {
        match self {
            Packing::InPlace => "in place",
            Packing::PerTask { .. } => "packed by each task",
            Packing::Shared => "packed once",
        }
    }
}

/// Operand A or B.
#[derive(Debug)]
pub(super) struct Operand {
    /// Index among the buffers.
    pub(super) slot: usize,
    pub(super) elements: Elements,
    /// Packed integers in place of the elements.
    pub(super) quantized: Option<QuantizedSlots>,
    /// Zero points of bytes.
    pub(super) zero_points: Option<ZeroPointSlot>,
    pub(super) offset: isize,
    pub(super) batch: StridedIter,
    /// Steps across the panels and along k.
    pub(super) line: isize,
    pub(super) depth: isize,
    pub(super) packing: Packing,
    /// Offset of the packed block in scratch memory.
    pub(super) at: usize,
}

/// Buffer of the zero points of an operand.
#[derive(Debug)]
pub(super) struct ZeroPointSlot {
    slot: usize,
    offset: isize,
    batch: StridedIter,
    line: isize,
}

impl Operand {
    /// Creates operand `slot` of a product over `nest`. Its lines are the lines of the axes `lines`, with a constant
    /// step. `across` is the last of these axes in the access, and `along` is the axis of k.
    pub(super) fn new(
        (access, rounded, slot): (&Access, Option<DType>, usize),
        nest: &Nest,
        k: usize,
        outside: &[usize],
        (across, along): (usize, usize),
    ) -> Result<Operand, String> {
        let mut dims = nest.dims.clone();
        dims[along] = k;
        if access.strides.len() != dims.len() {
            return Err(format!("strides {:?} for {} axes", access.strides, dims.len()));
        }
        if let Some((low, high)) = access.position_range(&dims)
            && (low < 0 || high >= access.len as isize)
        {
            return Err(format!("elements {low}..={high} of a buffer of {}", access.len));
        }
        let batch = outside.iter().map(|&axis| (nest.dims[axis], access.strides[axis]));
        Ok(Operand {
            slot,
            elements: Elements { stored: access.dtype, rounded },
            quantized: None,
            zero_points: None,
            offset: access.offset as isize,
            batch: StridedIter::new(batch)?,
            line: access.strides[across],
            depth: access.strides[along],
            packing: Packing::InPlace,
            at: 0,
        })
    }

    /// Sets the zero points of all lines, from buffer `slot`. The other arguments are the arguments of
    /// [`Operand::new`].
    pub(super) fn set_zero_points(
        &mut self,
        (access, slot): (&Access, usize),
        nest: &Nest,
        k: usize,
        outside: &[usize],
        axes: (usize, usize),
    ) -> Result<(), String> {
        let own = Operand::new((access, None, slot), nest, k, outside, axes)?;
        if own.elements != self.elements || own.depth != 0 {
            return Err(format!(
                "zero points of type {} for elements of type {}, with a step of {} along the sums",
                access.dtype, self.elements.stored, own.depth
            ));
        }
        let Operand { slot, offset, batch, line, .. } = own;
        self.zero_points = Some(ZeroPointSlot { slot, offset, batch, line });
        Ok(())
    }

    /// Returns the zero points from a line on.
    pub(super) fn zero_points(&self, bases: &[*mut u8], batch: usize, line: usize) -> ZeroPoints {
        let Some(ZeroPointSlot { slot, offset, batch: batches, line: step }) = &self.zero_points else {
            return ZeroPoints::ZEROS;
        };
        let position = offset + batches.offset(batch) + line as isize * step;
        ZeroPoints { at: bases[*slot].wrapping_offset(position).cast_const(), step: *step }
    }

    /// Returns true if the elements are in memory as they are multiplied, in type `real`.
    pub(super) fn is_stored_as(&self, real: DType) -> bool {
        self.quantized.is_none() && self.elements.are_stored_as(real)
    }

    /// Calls `pack` for the pieces of a block, and passes the number of the first line of the piece inside the block. A
    /// piece has one or several panels of `panel` lines. The pieces of a quantized operand are decoded into `decoded`.
    ///
    /// # Safety
    /// The lines and depths belong to the operand, and `bases` are its buffers. `decoded` is valid for writes of
    /// [`Operand::decoded_lines`] lines.
    pub(super) unsafe fn for_each_piece(
        &self,
        isa: Isa,
        bases: &[*mut u8],
        batch: usize,
        (first, lines): (usize, usize),
        (p, depth): (usize, usize),
        panel: usize,
        decoded: *mut u8,
        mut pack: impl FnMut(usize, Block),
    ) {
        let Operand { line, depth: step, .. } = *self;
        let Some(quantized) = &self.quantized else {
            let at = self.element_address(bases, batch, first, p);
            return pack(0, Block { at, line_step: line, depth_step: step, lines, depth });
        };
        let source = quantized.source(self.slot, bases);
        let piece_lines = self.decoded_lines(panel);
        for piece in (0..lines).step_by(piece_lines) {
            let count = piece_lines.min(lines - piece);
            let position = self.position(batch, first + piece, p) as usize;
            let (rows, line_step, depth_step) = if self.has_depths_adjacent() {
                let rows = DecodedRows { first: position, step: line as usize, rows: count, len: depth };
                (rows, depth as isize, 1)
            } else {
                let rows = DecodedRows { first: position, step: step as usize, rows: depth, len: count };
                (rows, 1, count as isize)
            };
            // SAFETY: the caller's contract.
            unsafe { decode(isa, source, rows, decoded.cast()) };
            pack(piece, Block { at: decoded.cast_const(), line_step, depth_step, lines: count, depth });
        }
    }

    /// Returns the number of lines of a quantized operand that are decoded together, for panels of `panel` lines. If
    /// lines are adjacent, longer rows of them are decoded faster.
    pub(super) fn decoded_lines(&self, panel: usize) -> usize {
        if self.has_depths_adjacent() { panel } else { DECODED_PANELS * panel }
    }

    /// Returns true if the elements of a line are adjacent along k.
    pub(super) fn has_depths_adjacent(&self) -> bool {
        self.depth == 1
    }

    /// Returns true if the operand is one matrix of packed integers. Its lines follow each other, and the elements of a
    /// line are adjacent.
    pub(super) fn is_packed_line_by_line(&self) -> bool {
        self.quantized.is_some_and(|quantized| {
            let len = quantized.matrix.line_len() as isize;
            self.elements.rounded.is_none()
                && self.depth == 1
                && self.line == len
                && self.offset % len == 0
                && self.batch.is_constant()
        })
    }

    /// Returns the position of an element in the buffer.
    pub(super) fn position(&self, batch: usize, line: usize, depth: usize) -> isize {
        let matrix = self.offset + self.batch.offset(batch);
        matrix + line as isize * self.line + depth as isize * self.depth
    }

    /// Returns the address of an element of an operand that is not quantized.
    pub(super) fn element_address(
        &self,
        bases: &[*mut u8],
        batch: usize,
        line: usize,
        depth: usize,
    ) -> *const u8 {
        let position = self.position(batch, line, depth);
        bases[self.slot].wrapping_offset(position * self.elements.size() as isize).cast_const()
    }

    /// Returns true if a micro-kernel can read the lines in place like lines of A: elements are adjacent along k.
    pub(super) fn is_adjacent_along_k(&self, real: DType) -> bool {
        self.is_stored_as(real) && self.depth == 1 && !has_page_stride(self.line, real.size(), 4096)
    }
}

/// Returns true if the distance between lines is a multiple of a page: the lines then conflict in the caches.
pub(super) fn has_page_stride(step: isize, bytes: usize, page: isize) -> bool {
    step.wrapping_mul(bytes as isize) % page == 0
}
