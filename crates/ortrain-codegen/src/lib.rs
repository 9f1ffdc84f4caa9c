//! Prints the instructions of programs as kernels for GPUs.
//!
//! - [`lower()`]: the launches of a [`Program`](ortrain_program::Program). It is pure: no device is needed.
//! - [`Launch`], [`Binding`]: what a device is asked to do, and on what.
//! - [`split`]: what the host computes and checks before a run: numbers in float64, for devices that have none, and guards of inputs.
//! - [`Dialect`]: a language for kernels. [`Wgsl`] is that of WebGPU.
//!
//! Products and reductions of long rows are computed by whole groups, which share what they load, or what they have of a sum;
//! long sums of few groups are cut into parts. Other kernels are plain: one invocation computes what is stored at one point, or
//! at four neighbours. The order of each sum follows from sizes alone. 64-bit integers are 32-bit ones where sizes, constants and
//! checks prove that they fit, else pairs of words. 64-bit floats are pairs of words as well: nests compute with them by integers,
//! exactly as IEEE 754 says. Functions of them that need tables (exponential, logarithm, …) are refused, and so are products,
//! attention, pooling and scattered sums of them.
#![forbid(unsafe_code)]

mod attention;
mod binding_range;
mod bindings;
mod bounds_checks;
mod conv;
mod dialect;
mod elements;
mod expr;
mod functions;
mod host_prologue;
mod inner_product;
mod kernel;
mod launch;
mod lower;
mod matmul;
mod matmul_strategy;
mod nest;
mod ranges;
mod reduction_strategy;
mod row_reduction;
mod scatter;
mod skinny;
mod split_k;
mod split_reduction;
mod text;
mod thread_index;
mod thread_reduction;
mod tiled;
mod vectorized_map;
mod wgsl;
mod wgsl_library;
mod window;
mod workgroup_reduce;

pub use dialect::{Declared, Dialect, GROUP, Repr, SHARED, Shared};
pub use host_prologue::{HostPart, split};
pub use launch::{Binding, Caps, Fault, Home, Launch, Lowered, Unsupported};
pub use lower::lower;
pub use wgsl::Wgsl;
