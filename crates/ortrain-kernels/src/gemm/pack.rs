//! Packing: a block of a matrix, converted to the compute type, in the order in which a micro-kernel reads it.

use ortrain_expr::DType;

use super::micro::Real;
use crate::isa::{Isa, Level, Work};
use crate::tape::number::{Brain, Half, Stored};

/// A block of a matrix as packing sees it: `lines` run across the panels (rows of A, columns of B), `depth` is k.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    pub(crate) at: *const u8,
    pub(crate) line_step: isize,
    pub(crate) depth_step: isize,
    pub(crate) lines: usize,
    pub(crate) depth: usize,
}

struct Pack<S: Stored> {
    block: Block,
    /// Lines of a panel.
    panel: usize,
    to: *mut S::Computed,
    zero: S::Computed,
}

impl<S: Stored> Pack<S> {
    /// `PANEL` lines starting at line `first`; those that are not there are zero.
    #[inline(always)]
    fn panel<const PANEL: usize>(&self, first: usize, to: *mut S::Computed) {
        let Block { at, line_step, depth_step, lines, depth } = self.block;
        let there = PANEL.min(lines - first);
        let at = at.cast::<S>().wrapping_offset(first as isize * line_step);
        for p in 0..depth {
            let from = at.wrapping_offset(p as isize * depth_step);
            // SAFETY: lines before `lines` and depths before `depth` are elements of the matrix; `to` has room for
            // whole panels (contract of `pack`).
            unsafe {
                let to = to.add(p * PANEL);
                if there == PANEL && line_step == 1 {
                    for i in 0..PANEL {
                        to.add(i).write(from.add(i).read_unaligned().decode());
                    }
                } else if there == PANEL {
                    for i in 0..PANEL {
                        let from = from.wrapping_offset(i as isize * line_step);
                        to.add(i).write(from.read_unaligned().decode());
                    }
                } else {
                    for i in 0..PANEL {
                        let from = from.wrapping_offset(i as isize * line_step);
                        to.add(i).write(if i < there { from.read_unaligned().decode() } else { self.zero });
                    }
                }
            }
        }
    }
}

impl<S: Stored> Work for Pack<S> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        for first in (0..self.block.lines).step_by(self.panel) {
            let to = self.to.wrapping_add(first * self.block.depth);
            match self.panel {
                1 => self.panel::<1>(first, to),
                4 => self.panel::<4>(first, to),
                6 => self.panel::<6>(first, to),
                8 => self.panel::<8>(first, to),
                14 => self.panel::<14>(first, to),
                16 => self.panel::<16>(first, to),
                32 => self.panel::<32>(first, to),
                other => unreachable!("no micro-kernel has panels of {other} lines"),
            }
        }
    }
}

/// Packs a block into panels of `panel` lines: within a panel, the lines of each depth are adjacent.
///
/// # Safety
/// `at` and the steps name elements that are valid for reads; `to` has room for `lines` rounded up to whole panels,
/// times `depth`. `dtype` is computed as `T`.
pub(crate) unsafe fn pack<T: Real>(isa: Isa, dtype: DType, block: Block, panel: usize, to: *mut T) {
    macro_rules! go {
        ($s:ty, $zero:literal) => {
            isa.run(Pack::<$s> { block, panel, to: to.cast(), zero: $zero })
        };
    }
    match dtype {
        DType::F32 => go!(f32, 0.0),
        DType::F64 => go!(f64, 0.0),
        DType::F16 => go!(Half, 0.0),
        DType::BF16 => go!(Brain, 0.0),
        other => unreachable!("a matrix of {other}: checked when compiled"),
    }
}
