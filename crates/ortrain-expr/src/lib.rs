//! Element types, scalar expressions and loop nests: the language that operators are lowered to and kernels evaluate.
//!
//! - [`DType`]: how an element is stored.
//! - [`Type`]: how a scalar is computed. Narrow floats exist at load and store only.
//! - [`Expr`]: a pure function of scalars in SSA form, with [`derive()`] and reference semantics in [`Scalar`].
//! - [`Nest`]: an expression evaluated over a space of indices, with optional reductions.
//! - [`Precision`]: how exactly the factors of inner products are taken.
//! - [`ConvShape`], [`WindowShape`]: the geometry of convolutions and pooling.
//! - [`stoppable`], [`pause`]: long work that can be stopped.
#![forbid(unsafe_code)]

pub mod coefficients;
mod derive;
mod dtype;
mod expr;
mod iteration_space;
mod nest;
mod philox;
mod precision;
mod scalar;
mod sliding;
mod split_derivative;
mod stop;
mod zero_analysis;

pub use derive::derive;
pub use dtype::DType;
pub use expr::{
    BinaryOp, Builder, CompareOp, Evaluation, Expr, Inst, OutOfRange, Reg, RunScalar, Type, UnaryOp,
};
pub use iteration_space::{count, element_of, index_of};
pub use nest::{Access, Dims, Load, Nest, ReduceOp, Reduction, Segments, Strides};
pub use philox::{philox4x32_10, philox4x32_10_blocks, random_bits};
pub use precision::{InnerProduct, Precision, UnknownPrecision};
pub use scalar::{Mode, Scalar};
pub use sliding::{ConvPass, ConvShape, IndexKind, SlidingAxes, SlidingAxis, WindowPass, WindowShape};
pub use split_derivative::split_derivative;
pub use stop::{Question, Steps, Stopped, pause, stoppable, unstoppable};
pub use zero_analysis::zero_registers;
