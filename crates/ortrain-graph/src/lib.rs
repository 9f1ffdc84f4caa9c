//! The graph of an ONNX model: element types, symbolic shapes, attributes, values and nodes, and their text dump.
//!
//! Nothing here knows an operator: what one means is said in `ortrain-ops`.
#![forbid(unsafe_code)]

mod attr;
mod dump;
mod error;
mod export;
mod graph;
mod import;
mod shape;
mod tensor;

pub use attr::{Attr, AttrError, AttrMap, Attrs};
pub use error::{GraphError, listed};
pub use export::tensor_to_proto;
pub use graph::{Graph, Node, Patch, Ports, Value, ValueId, ValueType};
pub use import::declared_value_type;
pub use ortrain_expr::DType;
pub use shape::{Dim, Shape};
pub use tensor::{Tensor, TensorError, aligned_copy, byte_length};
