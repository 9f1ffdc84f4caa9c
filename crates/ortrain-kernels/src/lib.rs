//! Kernels.
mod isa;
mod pool;
/// v
pub mod vecmath;
pub use isa::Isa;
pub use pool::Pool;
