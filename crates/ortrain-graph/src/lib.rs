//! Graph of an ONNX model: element types, symbolic shapes, attributes, values, nodes, and a text dump.
//!
//! This crate does not know any operator. `ortrain-ops` defines their meaning.
#![forbid(unsafe_code)]

mod dump;
mod error;
mod export;
mod graph;
mod import;
mod onnx_text;
mod shape;
mod tensor;
mod value;

pub use error::{GraphError, listed};
pub use export::tensor_to_proto;
pub use graph::{Attr, AttrError, AttrMap, Attrs, Graph, Node, Patch, Ports};
pub use import::declared_value_type;
pub use onnx_text::onnx_text;
pub use ortrain_expr::{DType, SmallType};
pub use shape::{Dim, Shape};
pub use tensor::{Tensor, TensorError, aligned_copy, byte_length};
pub use value::{Value, ValueId, ValueType};
