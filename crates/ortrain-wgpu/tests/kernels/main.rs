//! Group kernels and vectorized kernels on the software driver, at sizes around the edges of their tiles, compared with
//! the reference evaluator.

#[path = "../common/mod.rs"]
mod common;
mod convolutions;
mod epilogue;
mod guards;
mod maps;
mod products;
mod reductions;
mod scatters;
mod test_program;
