//! Tests of every GPU backend. Their crates include this folder, and `crate::common::device` is their device.

mod classic;
mod doubles;
pub(crate) mod example;
mod functions;
mod kernels;
pub(crate) mod nests;
pub(crate) mod programs;
pub(crate) mod training;
pub(crate) mod workload;
