//! Prints the instructions of programs as kernels for GPUs.
//!
//! - [`lower()`]: the launches of a [`Program`](ortrain_program::Program). It is pure: no device is needed.
//! - [`Launch`], [`Binding`]: what a device is asked to do, and on what.
//! - [`split`]: numbers in float64 that the host computes before a run, for devices that have none.
//! - [`Dialect`]: a language for kernels. [`Wgsl`] is that of WebGPU.
//!
//! Kernels are plain: one invocation computes what is stored at one point, with a loop for each sum, in one fixed order. 64-bit
//! integers are 32-bit ones where sizes, constants and checks prove that they fit, else pairs of words. 64-bit floats are pairs of
//! words as well: nests compute with them by integers, exactly as IEEE 754 says. Functions of them that need tables (exponential,
//! logarithm, …) are refused, and so are products, attention, pooling and scattered sums of them.
#![forbid(unsafe_code)]

mod attention;
mod dialect;
mod expr;
mod functions;
mod host;
mod kernel;
mod launch;
mod lower;
mod nest;
mod product;
mod ranges;
mod scatter;
mod text;
mod wgsl;
mod window;

pub use dialect::{Declared, Dialect, GROUP, Repr};
pub use host::{HostPart, split};
pub use launch::{Binding, Caps, Fault, Home, Launch, Lowered, Unsupported};
pub use lower::lower;
pub use wgsl::Wgsl;
