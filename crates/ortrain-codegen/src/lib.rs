//! Prints the instructions of programs as kernels for GPUs.
//!
//! - [`lower()`]: the launches of a [`Program`](ortrain_program::Program). It is a pure function and needs no device.
//! - [`Launch`], [`Binding`]: a kernel, and its memory.
//! - [`split_host_part`]: the host part of a program: float64 numbers for languages without float64, and guards of
//!   inputs. [`HostExecutable`] runs it.
//! - [`Dialect`]: a language for kernels. [`Wgsl`] is the language of WebGPU, [`CudaC`] the language of NVIDIA.
//!
//! Products and reductions of long rows are computed by whole groups, which share loads or partial sums. Long sums of
//! few groups are split into parts. Other kernels are plain: one invocation computes the results at one point, or at
//! four adjacent points. The order of each sum depends on sizes alone.
//!
//! 64-bit integers become 32-bit integers if sizes, constants and checks prove that they fit.
//!
//! In WGSL, other 64-bit integers are pairs of words. 64-bit floats are pairs of words too: nests compute them with
//! integer arithmetic, exactly as IEEE 754 requires. Their functions with tables (exponential, logarithm, …) are not
//! supported. Neither are 64-bit products, attention, pooling and scattered sums. CUDA C has both types, and plain
//! kernels support all instructions in float64.
#![forbid(unsafe_code)]

mod attention;
mod binding_range;
mod bindings;
mod bounds_checks;
mod context;
mod conv;
mod cuda_c;
mod dialect;
mod elements;
mod expr;
mod functions;
mod host_executable;
mod host_prologue;
mod inner_product;
mod kernel;
mod launch;
mod library;
mod lower;
mod matmul;
mod matmul_strategy;
mod nest;
mod quantized_matmul;
mod ranges;
mod reduction_strategy;
mod repr;
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
mod window;
mod workgroup_reduce;

pub use cuda_c::CudaC;
pub use dialect::{DeclaredBinding, Dialect, GROUP_SIZE, MAX_SHARED_BYTES, SharedArray};
pub use host_executable::HostExecutable;
pub use host_prologue::{HostPart, split_host_part};
pub use launch::{Binding, Caps, Fault, KernelSource, Launch, Lowered, MemoryId, RUN_WORDS, Unsupported};
pub use lower::lower;
pub use repr::Repr;
pub use wgsl::Wgsl;
