//! Kernels of whole groups and of quads on the software driver, at sizes around the edges of their tiles, beside the reference
//! evaluator.

mod convolutions;
mod finish;
mod guards;
mod making;
mod maps;
mod products;
mod reductions;
