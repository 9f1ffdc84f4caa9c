//! Operands of a product, and their storage for the micro-kernels.

use ortrain_expr::{Access, DType, Nest};

use super::pack::Elements;
use crate::tile::strided_iter::StridedIter;

/// Maximum number of bytes of an operand's block that is kept packed over all of k. It is packed once, so it may exceed
/// the second-level cache.
pub(super) const MAX_REUSED_BLOCK_BYTES: usize = 2 << 20;

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
    pub(super) offset: isize,
    pub(super) batch: StridedIter,
    /// Steps across the panels and along k.
    pub(super) line: isize,
    pub(super) depth: isize,
    pub(super) packing: Packing,
    /// Offset of the packed block in scratch memory.
    pub(super) at: usize,
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
            offset: access.offset as isize,
            batch: StridedIter::new(batch)?,
            line: access.strides[across],
            depth: access.strides[along],
            packing: Packing::InPlace,
            at: 0,
        })
    }

    /// Returns true if a micro-kernel can read the lines in place like lines of A: elements are adjacent along k.
    pub(super) fn is_adjacent_along_k(&self, real: DType) -> bool {
        self.elements.are_stored_as(real) && self.depth == 1 && !has_page_stride(self.line, real.size(), 4096)
    }
}

/// Returns true if the distance between lines is a multiple of a page: the lines then conflict in the caches.
pub(super) fn has_page_stride(step: isize, bytes: usize, page: isize) -> bool {
    step.wrapping_mul(bytes as isize) % page == 0
}
