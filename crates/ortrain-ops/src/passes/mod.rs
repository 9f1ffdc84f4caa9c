//! Passes over graphs. Each is a function from one graph to the next without other effects.

pub mod decompose;
pub mod differentiate;
pub mod functions;
pub(crate) mod gradient_stops;
pub mod infer;
pub mod linear_models;
pub mod mixed_precision;
pub(crate) mod node;
pub mod sequences;
pub mod specialise;
pub(crate) mod unroll;
pub mod updates;
pub mod versions;
