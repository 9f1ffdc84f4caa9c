//! Operators: their definition, gradient and lowering; and the passes over graphs of operators.
//!
//! - [`Op`], [`Definition`], [`Registry`]: each family of operators is a module in `families`; one list registers all.
//!   Families import no other family; their common helpers are in `support`.
//! - [`passes`]: upgrade, infer, fold, differentiate, decompose, downgrade, specialise.
//!
//! Other crates contain no operator names.
#![forbid(unsafe_code)]

mod axis_map;
mod broadcast;
mod class;
mod dependence;
mod error;
pub mod families;
mod grad;
mod infer;
mod introspect;
mod iterations;
mod library;
mod lower;
mod op;
pub mod passes;
mod registry;
mod rewrite;
mod sample;
mod sequence_operators;
mod sliding;
mod support;
#[cfg(test)]
mod testing;
pub mod training;
mod type_merge;

pub use class::{Class, Traits};
pub use error::{Error, OpError};
pub use families::optimizers;
pub use grad::Grad;
pub use infer::{Infer, broadcast, normalize_axes, normalize_axis};
pub use introspect::{Gradient, OperatorInfo, Runs};
pub use library::OperatorLibrary;
pub use lower::{Lower, NestBuilder, PartTensor, PlanePart};
pub use op::{BuildFn, Definition, Op, Placement, Repetition, RewriteFn, SampleFn, ValueRequirement};
pub use passes::specialise::{Role, Specialiser};
pub use registry::{NEWEST_OPSET, OLDEST_OPSET, Registry, build};
pub use rewrite::{Rewrite, ints_attribute_to_input, ints_input_to_attribute};
pub use sample::Sample;
