//! Group kernels and vectorized kernels on the device, at sizes around the edges of their tiles, compared with
//! the reference evaluator.

mod convolutions;
mod epilogue;
mod guards;
mod integer_products;
mod maps;
mod products;
mod quantized_products;
mod reductions;
mod scatters;
mod test_program;
