//! Loads and saves ONNX messages, and decodes the numbers of their tensors.
//!
//! [`LoadedModel`] is a [`ModelProto`] with the source of its external data. Payloads are [`bytes::Bytes`]: ranges of
//! the file's buffer, without copies.
//!
//! ```
//! use ortrain_onnx::{ExternalData, GraphProto, LoadedModel, ModelProto, encode};
//!
//! let proto = ModelProto { ir_version: 10, graph: Some(GraphProto::default()), ..Default::default() };
//! let model = LoadedModel::from_bytes(encode(&proto)?, ExternalData::none())?;
//! for tensor in &model.proto.graph.as_ref().unwrap().initializer {
//!     println!("{}: {} bytes", tensor.name, model.tensor_payload(tensor)?.len());
//! }
//! # Ok::<(), ortrain_onnx::OnnxError>(())
//! ```
//!
//! # Untrusted files
//!
//! For any bytes, loading returns a model or an [`OnnxError`] with the reason. It does not panic, does not overflow the
//! stack, and takes at most a small multiple of the file's size as memory. No file outside the model's folder is
//! opened.
//!
//! # Lost information
//!
//! Fields that `generate/onnx.proto3` does not define are dropped. [`LoadedModel::unknown_fields`] counts them. Scalars
//! with their default value (an empty text, a zero, also a float attribute of -0.0) are written as absent. Every reader
//! of ONNX treats both the same.

#![deny(unsafe_code)]

mod checksum;
mod error;
mod external;
mod generated;
mod load;
#[allow(unsafe_code)]
mod mapped;
mod message;
mod payload;
mod save;
mod sparse;
mod tensors;
mod wire;

/// All messages, enumerations and nested types of ONNX, generated from `onnx.proto3`.
pub mod proto {
    pub use crate::generated::onnx::*;
}

pub use checksum::checksum_of;
pub use error::OnnxError;
pub use external::{ExternalData, Maps, Storage};
pub use load::{LoadedModel, decode_function, decode_model};
pub use payload::{element_bits, element_type, tensor_dims, tensor_payload};
pub use proto::attribute_proto::AttributeType;
pub use proto::tensor_proto::DataType;
pub use proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, SparseTensorProto,
    StringStringEntryProto, TensorAnnotation, TensorProto, TensorShapeProto, TrainingInfoProto, TypeProto,
    ValueInfoProto,
};
pub use save::{
    DataFile, EXTERNAL_FROM, LARGEST_MESSAGE, StagedModels, ToWrite, encode, message_size, save, stage,
};
pub use sparse::densify;
pub use tensors::{TensorRole, visit_tensors_mut};
