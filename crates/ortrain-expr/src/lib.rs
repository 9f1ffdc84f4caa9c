//! Element types, scalar expressions and loop nests: the intermediate representation of operators, which kernels
//! evaluate.
//!
//! - [`DType`]: the storage type of an element.
//! - [`Type`]: the type in which a scalar is computed. Narrow floats exist in loads and stores only.
//! - [`Expr`]: a pure function of scalars in SSA form. [`derive()`] differentiates it, [`Scalar`] has the reference
//!   semantics.
//! - [`Nest`]: an expression evaluated at every point of an iteration space, with optional reductions.
//! - [`Precision`]: the precision of the factors of inner products.
//! - [`QuantizedMatrix`]: the layout of a matrix of packed integers, and the numbers that they stand for.
//! - [`ConvShape`], [`WindowShape`]: the geometry of convolutions and pooling.
//! - [`stoppable`], [`pause`]: cancellation of long work.
#![forbid(unsafe_code)]

pub mod coefficients;
mod derive;
mod dtype;
pub mod elementary;
mod expr;
mod iteration_space;
mod nest;
mod ops;
mod philox;
mod precision;
mod quantized;
mod scalar;
mod sliding;
mod small;
mod split_derivative;
mod stop;
mod zero_analysis;

pub use derive::derive;
pub use dtype::DType;
pub use expr::{Builder, Evaluation, Expr, Inst, OutOfRange, Reduction, Reg, RunScalar};
pub use iteration_space::{flat_index_of, index_of, product_of_sizes};
pub use nest::{Access, Dims, Load, Nest, Segments, Strides};
pub use ops::{BinaryOp, CompareOp, ReduceOp, Type, UnaryOp};
pub use philox::{philox4x32_10, philox4x32_10_blocks, random_bits};
pub use precision::{InnerProduct, Precision, UnknownPrecision};
pub use quantized::{QuantizedMatrix, QuantizedNumbers};
pub use scalar::{Mode, Scalar};
pub use sliding::{ConvPass, ConvShape, IndexKind, SlidingAxes, SlidingAxis, WindowPass, WindowShape};
pub use small::{PowerRounding, SmallType, SpecialCodes};
pub use split_derivative::split_derivative;
pub use stop::{Steps, StopQuestion, Stopped, pause, stoppable, unstoppable};
pub use zero_analysis::zero_registers;
