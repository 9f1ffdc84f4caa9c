//! The closed set of instructions, the programs made of them, how they are fused and placed in memory, what a backend
//! is, and the reference evaluator.
//!
//! - [`Instruction`]: the instructions. Operators are open; this is closed.
//! - [`ProgramBuilder`] → [`Program`]: narrowing to what is read, fusion, order, memory plan.
//! - [`Schedule`]: programs, host functions and control flow, in order.
//! - [`Backend`], [`Executable`]: what runs a program. [`Reference`] is the slow and obvious one.
#![forbid(unsafe_code)]

mod attention;
mod backend;
mod bits;
mod builder;
mod cost;
mod fuse;
mod instruction;
mod interrupt;
mod memory;
mod narrow;
mod operand;
mod parts;
mod plan;
mod program;
mod recompute;
pub mod reference;
mod repeat;
mod schedule;
mod versions;

pub use attention::{Attention, AttentionGradients, AttentionPass};
pub use backend::{
    Backend, Bf16Fallback, Bindings, Copied, Executable, ITERATION_LIMIT, LargeBuffer, MOST_GROWN,
    MemoryNeed, Observer, OverLimit, RunError, Scalars, UnknownFallback, UnsupportedOnBackend,
    UnsupportedPrecision, Workspace, index_of, place,
};
pub use builder::{ProgramBuilder, ProgramError, align};
pub use cost::Cost;
pub use instruction::{
    BufferIds, Conv, HandOver, Instruction, MatMul, ScatterAdd, ScheduledInstruction, Window,
};
pub use interrupt::{Interrupt, Marks, Watch};
pub use memory::{ALIGNMENT, LentMemory, Memory, OutOfMemory};
pub use operand::{Load, Nest, Operand, Use};
pub use ortrain_expr::{Precision, UnknownPrecision};
pub(crate) use program::is_work;
pub use program::{Buffer, BufferId, Entries, Entry, Part, Place, PlaneId, PlaneUse, Program};
pub use reference::Reference;
pub use repeat::{Along, Count, Repeat, SEED_FACTOR, Stacked, iteration_seed};
pub use schedule::{
    Branch, BranchSource, Branches, Code, Deliver, Delivered, Given, Handed, HostFunction, PlanePlace,
    Runner, Schedule, Segment, SegmentNode, SlotId, SlotSpec, Specialise, Suspended,
};
