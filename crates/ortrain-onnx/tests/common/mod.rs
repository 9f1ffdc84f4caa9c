#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use ortrain_onnx::{
    DataType, ExternalData, GraphProto, LoadedModel, ModelProto, OnnxError, OperatorSetIdProto,
    StringStringEntryProto, TensorProto, proto::tensor_proto::DataLocation,
};

pub fn tensor(name: &str, data_type: DataType, dims: &[i64]) -> TensorProto {
    TensorProto {
        name: name.into(),
        data_type: data_type.into(),
        dims: dims.to_vec(),
        ..TensorProto::default()
    }
}

pub fn raw(name: &str, data_type: DataType, dims: &[i64], bytes: impl Into<bytes::Bytes>) -> TensorProto {
    TensorProto { raw_data: bytes.into(), ..tensor(name, data_type, dims) }
}

pub fn external(name: &str, dims: &[i64], entries: &[(&str, &str)]) -> TensorProto {
    let entry =
        |&(key, value): &(&str, &str)| StringStringEntryProto { key: key.into(), value: value.into() };
    TensorProto {
        data_location: DataLocation::External.into(),
        external_data: entries.iter().map(entry).collect(),
        ..tensor(name, DataType::Float, dims)
    }
}

pub fn model(initializer: Vec<TensorProto>) -> ModelProto {
    ModelProto {
        ir_version: 10,
        producer_name: "test".into(),
        opset_import: vec![OperatorSetIdProto { version: 21, ..OperatorSetIdProto::default() }],
        graph: Some(GraphProto { name: "g".into(), initializer, ..GraphProto::default() }),
        ..ModelProto::default()
    }
}

pub fn load(bytes: impl Into<bytes::Bytes>) -> Result<LoadedModel, OnnxError> {
    LoadedModel::from_bytes(bytes, ExternalData::none())
}

pub fn assert_error<T: std::fmt::Debug>(result: Result<T, OnnxError>, sentence: &str) {
    assert_eq!(result.unwrap_err().to_string(), sentence);
}
