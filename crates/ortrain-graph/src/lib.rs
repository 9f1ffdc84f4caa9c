//! The graph of an ONNX model: element types, symbolic shapes, attributes, values and nodes, and their text dump.
//!
//! Nothing here knows an operator: what one means is said in `ortrain-ops`.
#![forbid(unsafe_code)]

mod dtype;
mod tensor;

pub use dtype::DType;
pub use tensor::{Tensor, TensorError, byte_length};
