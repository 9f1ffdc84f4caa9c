//! The closed instruction set, programs, their fusion passes and memory plan, the backend traits, and the reference
//! evaluator.
//!
//! - [`Instruction`]: the closed set of instructions. The set of operators is open.
//! - [`ProgramBuilder`] → [`Program`]: dead-code elimination, fusion, scheduling, memory plan.
//! - [`Schedule`]: programs, host functions and control flow, in order.
//! - [`Backend`], [`Executable`]: execution of programs. [`Reference`] is the slow and simple backend.
#![forbid(unsafe_code)]

mod backend;
mod bindings;
mod buffer;
mod builder;
mod cost;
mod draft;
mod editor;
mod error;
mod gradient_modes;
mod input_view;
mod instruction;
mod instructions;
mod interrupt;
mod last_uses;
mod liveness;
mod operand;
mod output_view;
mod passes;
mod program;
pub mod reference;
mod repeat;
mod rewrite;
mod run_context;
mod run_error;
mod schedule;
mod scheduled;
mod target;
mod text;
mod uses;
mod versions;
mod weight;

pub use backend::{
    Backend, Bf16Fallback, Copied, Executable, ITERATION_LIMIT, Limits, MAX_GROWING_BYTES, NoDevice,
    Observer, SavedInputs, Scalars, UnknownFallback, UnsupportedOnBackend, UnsupportedPrecision, Workspace,
};
pub use bindings::Bindings;
pub(crate) use buffer::is_work;
pub use buffer::{Buffer, BufferId, BufferIds, BufferLocation, PlaneId};
pub use builder::ProgramBuilder;
pub use cost::Cost;
pub use error::ProgramError;
pub use gradient_modes::{GradientMode, GradientModes};
pub use input_view::{InputBytes, InputView};
pub use instruction::Instruction;
pub use instructions::{
    Attention, AttentionGradients, AttentionPass, Conv, IntegerProduct, IntegerShape, MatMul, NestGroup,
    QuantizedFactor, QuantizedMatMul, ScatterAdd, Window, WindowIndex, Yield,
};
pub use interrupt::{CommitGate, Interrupt, InterruptPoints, Watch, interruptible};
pub use operand::{Load, Nest, Operand, Use};
pub use ortrain_expr::{Precision, UnknownPrecision, index_of};
pub use ortrain_memory::{
    ALIGNMENT, AllocationError, BorrowedMemory, DeviceError, DeviceMemory, HOST, HostMemory, LateFault,
    Memory, OutOfMemory, align,
};
pub use output_view::{OutputSink, OutputView, ResultType};
pub use passes::{LOWERED, PASSES, Pass, PassLog, PassRecord};
pub use program::{PlaneUse, Program, RunPart};
pub use reference::Reference;
pub use repeat::{Count, SEED_FACTOR, ScanAxis, StackedResult, iteration_seed};
pub use run_context::RunContext;
pub use run_error::{LargeBuffer, MemoryNeed, OverLimit, RunError, describe_position};
pub use schedule::{
    Branch, BranchSource, Branches, ForwardState, HostFunction, PlaneLocation, Repeat, Schedule,
    ScheduleExecutor, Segment, SegmentNode, SlotId, SlotSpec, Specialise, Specialised, YieldSlots,
};
pub use scheduled::ScheduledInstruction;
pub use target::{BatchTiles, FusionWeights, Panels, Speed, Target};
