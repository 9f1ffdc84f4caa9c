//! Expressions compiled to tile programs: lists of operations over tile registers.
//!
//! A tile program runs along a part of the iteration space, one tile of consecutive indices at a time. A driver steps
//! through the other axes (see [`crate::nest`]). Every instruction is placed as far out of the loops as its operands
//! allow. An instruction with the same result for the whole tile computes one value instead of a tile.

mod check;
mod compiler;
mod grouping;
mod interpreter;
mod jit;
mod loop_plan;
pub(crate) mod memory;
pub(crate) mod number;
mod op;
pub(crate) mod ops;
mod pairwise_sum;
mod program;
mod random;
mod registers;
mod shared;
pub(crate) mod strided_iter;

pub(crate) use crate::scratch::ALIGN;
pub(crate) use interpreter::ExecContext;
pub(crate) use loop_plan::{LoopOrder, LoopPlan};
pub(crate) use pairwise_sum::PairwiseSum;
pub(crate) use program::{Failure, FrameHeader, Stage, StageReduction, TileProgram, counted};
pub use shared::{Compiler, with_shared_code};
