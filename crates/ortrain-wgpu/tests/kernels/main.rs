//! Group kernels and vectorized kernels on the software driver, at sizes around the edges of their tiles, compared with
//! the reference evaluator.

#[path = "../common/mod.rs"]
mod common;
mod convolutions;
mod finish;
mod guards;
mod making;
mod maps;
mod products;
mod reductions;
mod scatters;
