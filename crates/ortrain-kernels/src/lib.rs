//! Kernels: what ortrain's programs run on, on a processor.
//!
//! Everything here is made once (that may allocate and fail) and run many times (that does neither):
//!
//! - [`NestKernel`] runs an [`ortrain_expr::Nest`]: maps, and reductions along rows or down columns.
//! - [`GemmKernel`] multiplies matrices, with a nest over the finished product as its epilogue.
//! - [`ConvKernel`] convolves, or makes the gradients of a convolution's operands, with an epilogue of the same kind.
//! - [`AttentionKernel`] weighs values by the softmax of scores, or makes the gradients, and keeps no scores.
//! - [`WindowKernel`] pools: the largest or the sum under sliding windows, and their gradients.
//! - [`ScatterKernel`] adds rows into the rows that indices name.
//! - [`Products`] says how those two make products: in f32, or in bfloat16 by a [`Bf16Unit`].
//! - [`with_shared_code`] makes the kernels of a program, with the same code for nests that are equal but for their places.
//! - [`Pool`] shares the tasks of a run between threads; [`Isa`] is the instruction-set level that it runs at.
//! - [`prefer_large_pages`] makes fresh memory quicker to touch.
//! - [`Limits`] are what the machine can do at most, measured.
//! - [`vecmath`] states how exact the elementary functions are.
//!
//! # Contract of a run
//! A run takes the start of each buffer as a raw pointer, [`Scratch`] memory, and nothing else. How a run is cut into
//! tasks depends on shapes alone, and sums are made in a fixed order, so results have the same bits on any number of
//! threads (levels differ in the last bits: they round fused multiply-adds once or twice). Memory of callers is reached
//! through raw pointers only, never through a Rust reference, since others may look at it meanwhile.

#[cfg(target_endian = "big")]
compile_error!("registers and constants are laid out for little-endian machines");

mod attention;
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
mod tile;
mod transpose;
pub mod vecmath;
mod window;

pub use attention::{AttentionDesc, AttentionGradients, AttentionKernel, AttentionPass};
pub use conv::{ConvDesc, ConvKernel};
pub use gemm::{GemmDesc, GemmKernel, Products};
pub use huge_pages::{memory_bytes, prefer_large_pages};
pub use isa::{Bf16Unit, Isa, UnknownIsa};
pub use limits::Limits;
pub use nest::{NestKernel, Order};
pub use pool::Pool;
pub use scatter::{ScatterDesc, ScatterKernel};
pub use scratch::{RunScalars, Scratch};
pub use tile::{Compiler, with_shared_code};
pub use window::{WindowDesc, WindowKernel};
