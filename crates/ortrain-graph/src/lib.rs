//! The graph of an ONNX model: element types, symbolic shapes, attributes, values and nodes, and their text dump.
//!
//! Nothing here knows an operator: what one means is said in `ortrain-ops`.
#![forbid(unsafe_code)]


mod tensor;

pub use ortrain_expr::DType;
pub use tensor::{Tensor, TensorError, byte_length};
