//! Kernels of whole groups on the software driver, at sizes around the edges of their tiles, beside the reference evaluator.

mod convolutions;
mod finish;
mod guards;
mod making;
mod products;
mod reductions;
