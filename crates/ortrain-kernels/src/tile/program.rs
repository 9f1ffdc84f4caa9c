//! Tile program: operations in stages, with the memory accesses of loads and stores.

use std::ops::Deref;
use std::sync::Arc;

use ortrain_expr::{OutOfRange, ReduceOp, Type};

use super::jit::Functions;
use super::memory::StridedView;
use super::op::{Kind, Op, Slot};
use crate::isa::Isa;

/// A reduction inside a stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StageReduction {
    pub(crate) op: ReduceOp,
    pub(crate) ty: Type,
    /// Index of the reduction in the nest.
    pub(crate) reduction_index: usize,
    /// `Row`: a [`PairwiseSum`]. `Col`: the tile that accumulates the values.
    pub(crate) state: Slot,
    /// Register of the result: one value (`Row`) or a tile (`Col`).
    pub(crate) result: Slot,
}

/// The operations between two dependent reductions.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stage {
    /// Runs once for each outer index (`Row`), or once for each tile (`Col`).
    pub(crate) pre: Vec<Op>,
    /// Runs for each tile of the reduced axes (`Row`), for each reduced index (`Col`), or for each tile (`Map`).
    pub(crate) body: Vec<Op>,
    pub(crate) reductions: Vec<StageReduction>,
}

/// A compiled expression, with the memory accesses of its loads and stores.
#[derive(Debug)]
pub(crate) struct TileProgram {
    pub(super) loads: Vec<StridedView>,
    pub(super) stores: Vec<StridedView>,
    /// Linear index in the index order of the nest.
    pub(super) index: StridedView,
    pub(super) code: Arc<Code>,
}

/// Returns a number with its noun, for example `2 tasks`.
pub(crate) fn counted(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

impl Code {
    /// Describes the size of a tile, and the execution of the operations.
    pub(crate) fn describe(&self) -> String {
        let of_stages = self.stages.iter().flat_map(|stage| stage.pre.iter().chain(&stage.body));
        let ops = || self.per_run.iter().chain(of_stages.clone()).chain(&self.post);
        let functions = ops().filter(|op| matches!(op.kind, Kind::Native(_))).count();
        format!(
            "tiles of {}, {}, {}",
            counted(self.tile, "element"),
            counted(ops().count() - functions, "interpreted operation"),
            counted(functions, "machine-code function")
        )
    }
}

impl Deref for TileProgram {
    type Target = Code;

    fn deref(&self) -> &Code {
        &self.code
    }
}

/// Operations, independent of the offsets and lengths of buffers. The steps of a recurrent network share one code at
/// different offsets.
#[derive(Debug)]
pub(crate) struct Code {
    pub(crate) isa: Isa,
    /// Runs once for each task.
    pub(crate) per_run: Vec<Op>,
    /// The last stage has no totals.
    pub(crate) stages: Vec<Stage>,
    /// Stores of one element per outer index.
    pub(crate) post: Vec<Op>,
    pub(super) functions: Functions,
    /// Maximum number of indices of a tile.
    pub(crate) tile: usize,
    /// No tile crosses a multiple of this index. Between two multiples, elements that are read directly are contiguous.
    pub(super) piece: usize,
    /// Bytes of a worker's frame, a multiple of [`ALIGN`].
    pub(crate) frame: usize,
    /// Number of values that the first stage saves for later stages, in buffers of the driver. Each has one load after
    /// the loads of the nest, and one store after the stores of the nest.
    pub(crate) num_saved: usize,
    /// True if a guard may fail.
    pub(crate) can_fail: bool,
    /// Work per element of the last axis, in additions.
    pub(crate) cost: usize,
}

/// The first guard that failed, at the start of each frame. All zero bits do not mean "no failure": see
/// [`Failure::NONE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(C)]
pub(crate) struct Failure {
    pub(super) linear: u64,
    pub(super) inst: u64,
    pub(super) index: i64,
    pub(super) bound: i64,
}

/// Header of a worker's frame.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct FrameHeader {
    pub(super) failure: Failure,
    /// The frame has the values before the body of this stage, for this long segment.
    pub(crate) prepared: Option<(usize, usize)>,
}

impl Default for FrameHeader {
    fn default() -> FrameHeader {
        FrameHeader { failure: Failure::NONE, prepared: None }
    }
}

impl Failure {
    pub(crate) const NONE: Failure = Failure { linear: u64::MAX, inst: 0, index: 0, bound: 0 };

    pub(crate) fn result(self) -> Result<(), OutOfRange> {
        if self == Failure::NONE {
            return Ok(());
        }
        Err(OutOfRange { point: self.linear as usize, index: self.index, bound: self.bound })
    }
}

impl TileProgram {
    /// Returns the number of loads of the nest itself, without the loads of saved values.
    pub(crate) fn num_loads(&self) -> usize {
        self.loads.len() - self.code.num_saved
    }

    /// Iterates over the tiles of the indices `begin..end`: start and number of indices of each tile.
    pub(crate) fn tiles(&self, begin: usize, end: usize) -> impl Iterator<Item = (usize, usize)> {
        let mut start = begin;
        std::iter::from_fn(move || {
            let n = self.tile.min(end - start).min(self.piece - start % self.piece);
            start += n;
            (n > 0).then_some((start - n, n))
        })
    }
}
