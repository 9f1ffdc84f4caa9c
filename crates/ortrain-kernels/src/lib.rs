//! CPU kernels: the compiled instructions of ortrain's programs.
//!
//! Each kernel is created once, which may allocate and fail, and run many times, without allocations:
//!
//! - [`NestKernel`] runs an [`ortrain_expr::Nest`]: maps, and reductions along rows or down columns.
//! - [`GemmKernel`] multiplies matrices, with a nest over the finished product as its epilogue.
//! - [`ConvKernel`] computes a convolution, or the gradients of its operands, with an epilogue of the same kind.
//! - [`AttentionKernel`] computes attention or its gradients, without storing the matrix of scores.
//! - [`WindowKernel`] computes pooling: the maximum or the sum under sliding windows, and their gradients.
//! - [`ScatterKernel`] adds rows to the rows selected by indices.
//! - [`Products`] selects the precision of products in matrix products and convolutions: f32, or bfloat16 by a
//!   [`Bf16Unit`].
//! - [`with_shared_code`] compiles the kernels of a program. Nests that differ only in the positions of their operands
//!   share code.
//! - [`KernelFilter`] excludes kernels, or uses one wherever it supports the sizes; [`kernel_names`] lists them.
//! - [`Pool`] distributes the tasks of a run over threads; [`Isa`] is the instruction-set level of the code.
//! - [`prefer_large_pages`] makes the first access to new memory faster.
//! - [`Limits`] are the measured peak rates of the machine.
//! - [`vecmath`] states the error bounds of the elementary functions.
//!
//! # Contract of a run
//! A run takes the start of each buffer as a raw pointer, [`Scratch`] memory, and nothing else. The partition of a run
//! into tasks depends on shapes only, and sums have a fixed order. Results therefore have the same bits on any number
//! of threads. Levels differ in the last bits: they round fused multiply-adds once or twice. Memory of callers is
//! accessed through raw pointers only, never through a Rust reference, since other threads may read it during the run.

#[cfg(target_endian = "big")]
compile_error!("registers and constants are laid out for little-endian machines");

mod attention;
mod candidates;
mod catalog;
mod conv;
mod gemm;
mod huge_pages;
mod isa;
pub mod limits;
mod nest;
mod pool;
mod row_norms;
mod scatter;
mod scratch;
mod settings;
mod tile;
mod transpose;
pub mod vecmath;
mod window;

pub use attention::{AttentionDesc, AttentionGradients, AttentionKernel, AttentionPass};
pub use candidates::KernelFilter;
pub use catalog::kernel_names;
pub use conv::{ConvDesc, ConvKernel};
pub use gemm::{GemmDesc, GemmKernel, Products, QuantizedRight};
pub use huge_pages::{memory_bytes, prefer_large_pages};
pub use isa::{Bf16Unit, Isa};
pub use limits::Limits;
pub use nest::{NestKernel, Order};
pub use pool::Pool;
pub use scatter::{ScatterDesc, ScatterKernel};
pub use scratch::{RunScalars, Scratch};
pub use settings::{TileMode, UnknownSetting};
pub use tile::{Compiler, with_shared_code};
pub use window::{WindowDesc, WindowKernel};
