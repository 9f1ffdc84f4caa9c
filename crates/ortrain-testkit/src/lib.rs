//! Cases, checkers and tolerances shared by the tests of every backend.
//!
//! - [`Case`]: a graph with inputs; [`cases`] lists one or more for every operator and relevant attribute.
//! - [`check_gradient`]: analytic gradients against central differences in float64.
//! - [`check_backend`]: a backend against the reference evaluator.
//! - [`check_standard`]: gradients against their decomposition into plain ONNX.
//! - [`suites`]: functions of a backend that every backend's tests call.
//! - [`Remote`]: a device without host pointers that can be made to fail.
//! - [`kernels`]: kernels of the suites, for tests of their text.
//! - [`programs`]: random programs, for fusion and the planner.
#![forbid(unsafe_code)]

mod breadth;
pub mod c_printer;
mod case;
mod cases;
mod check;
pub mod kernels;
pub mod programs;
mod remote;
pub mod suites;
mod tables;
pub mod tolerance;
mod training;

pub use case::{Case, CaseBuilder, Fill};
pub use cases::cases;
pub use check::{
    check_backend, check_backend_at, check_gradient, check_gradient_after, check_second_order,
    check_standard, compile_with_precision, gradient_graph, run, run_with_precision,
};
pub use remote::Remote;
