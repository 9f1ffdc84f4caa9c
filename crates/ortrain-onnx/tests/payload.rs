//! Numbers of tensors, from every field that may hold them.

#![allow(clippy::unwrap_used)]

mod common;

use common::{assert_error, raw, tensor};
use ortrain_onnx::proto::tensor_proto::Segment;
use ortrain_onnx::{
    DataType, ExternalData, OnnxError, SparseTensorProto, TensorProto, densify, element_bits, element_type,
    tensor_dims, tensor_payload,
};

fn payload(tensor: &TensorProto) -> Result<bytes::Bytes, OnnxError> {
    tensor_payload(tensor, &ExternalData::none())
}

fn bytes<const N: usize>(values: &[[u8; N]]) -> Vec<u8> {
    values.concat()
}

#[test]
fn every_typed_field_becomes_little_endian() {
    let float = TensorProto { float_data: vec![1.5, -0.0], ..tensor("t", DataType::Float, &[2]) };
    assert_eq!(payload(&float).unwrap(), bytes(&[1.5_f32.to_le_bytes(), (-0.0_f32).to_le_bytes()]));
    let double = TensorProto { double_data: vec![0.1], ..tensor("t", DataType::Double, &[]) };
    assert_eq!(payload(&double).unwrap(), bytes(&[0.1_f64.to_le_bytes()]));
    let int64 = TensorProto { int64_data: vec![i64::MIN, 7], ..tensor("t", DataType::Int64, &[2, 1]) };
    assert_eq!(payload(&int64).unwrap(), bytes(&[i64::MIN.to_le_bytes(), 7_i64.to_le_bytes()]));
    let uint64 = TensorProto { uint64_data: vec![u64::MAX], ..tensor("t", DataType::Uint64, &[1]) };
    assert_eq!(payload(&uint64).unwrap(), bytes(&[u64::MAX.to_le_bytes()]));
    let uint32 = TensorProto { uint64_data: vec![u32::MAX.into()], ..tensor("t", DataType::Uint32, &[1]) };
    assert_eq!(payload(&uint32).unwrap(), bytes(&[u32::MAX.to_le_bytes()]));

    let in_int32 = |data_type, values: &[i32]| {
        let len = values.len() as i64;
        payload(&TensorProto { int32_data: values.to_vec(), ..tensor("t", data_type, &[len]) }).unwrap()
    };
    assert_eq!(in_int32(DataType::Int32, &[-2]), bytes(&[(-2_i32).to_le_bytes()]));
    assert_eq!(in_int32(DataType::Int8, &[-1, 127, 255]), [0xff, 0x7f, 0xff].as_slice());
    assert_eq!(in_int32(DataType::Uint8, &[255, 0]), [0xff, 0].as_slice());
    assert_eq!(in_int32(DataType::Int16, &[-2]), [0xfe, 0xff].as_slice());
    assert_eq!(in_int32(DataType::Uint16, &[65535]), [0xff, 0xff].as_slice());
    assert_eq!(in_int32(DataType::Bool, &[0, 1, 5]), [0, 1, 1].as_slice());
    assert_eq!(in_int32(DataType::Float16, &[0x3c00]), [0x00, 0x3c].as_slice());
    assert_eq!(in_int32(DataType::Bfloat16, &[0x3f80]), [0x80, 0x3f].as_slice());
}

#[test]
fn raw_data_is_not_converted() {
    let t = raw("t", DataType::Int16, &[2], vec![1, 2, 3, 4]);
    assert_eq!(payload(&t).unwrap(), [1, 2, 3, 4].as_slice());
    assert_eq!(element_type(&t).unwrap(), DataType::Int16);
    assert_eq!(tensor_dims(&t).unwrap(), [2]);
    assert_eq!(element_bits(DataType::Bfloat16), Some(16));
    assert_eq!(element_bits(DataType::String), None);
}

#[test]
fn elements_of_less_than_eight_bits_share_bytes() {
    let three = |data: TensorProto| payload(&data).unwrap();
    assert_eq!(element_bits(DataType::Int4), Some(4));
    let stored = TensorProto { int32_data: vec![0x21, 0x03], ..tensor("t", DataType::Uint4, &[3]) };
    assert_eq!(three(stored), [0x21, 0x03].as_slice());
    let stored = TensorProto { raw_data: vec![0x39].into(), ..tensor("t", DataType::Uint2, &[4]) };
    assert_eq!(three(stored), [0x39].as_slice());
    let float8 = TensorProto { int32_data: vec![0x7E, 0xFF], ..tensor("t", DataType::Float8e4m3fn, &[2]) };
    assert_eq!(three(float8), [0x7E, 0xFF].as_slice());
    let odd = TensorProto { int32_data: vec![0x21, 0x03, 0], ..tensor("t", DataType::Int4, &[3]) };
    assert_error(
        payload(&odd),
        "tensor `t` should have 2 elements by its dimensions and type, but int32_data holds 3",
    );
}

#[test]
fn empty_tensors_need_no_data() {
    assert!(payload(&tensor("t", DataType::Float, &[3, 0])).unwrap().is_empty());
    let max = i64::MAX;
    assert!(payload(&tensor("t", DataType::Float, &[max, max, 0])).unwrap().is_empty());
    assert_error(
        payload(&tensor("t", DataType::Float, &[])),
        "tensor `t` should have 4 bytes by its dimensions and type, but it holds 0",
    );
}

#[test]
fn dimensions_are_checked() {
    assert_error(
        payload(&tensor("t", DataType::Float, &[2, -1])),
        "tensor `t` has the dimension -1 on axis 1; dimensions must be at least 0",
    );
    let max = i64::MAX;
    let message = "tensor `t` has the dimensions [9223372036854775807, 9223372036854775807], which are too many \
                elements to address";
    assert_error(tensor_dims(&tensor("t", DataType::Float, &[max, max])), message);
    assert_error(payload(&tensor("t", DataType::Float, &[max, max])), message);
    // The number of elements fits an address, the number of bytes does not.
    assert!(matches!(
        payload(&tensor("t", DataType::Float, &[1 << 62])),
        Err(OnnxError::TooManyElements { .. })
    ));
}

#[test]
fn unsupported_types_are_named() {
    for (data_type, name) in
        [(DataType::String, "STRING"), (DataType::Complex64, "COMPLEX64"), (DataType::Undefined, "UNDEFINED")]
    {
        assert_error(
            payload(&tensor("t", data_type, &[1])),
            &format!(
                "tensor `t` has the element type {name}; supported are FLOAT, DOUBLE, FLOAT16, BFLOAT16, BOOL, INT8, \
                 INT16, INT32, INT64, UINT8, UINT16, UINT32 and UINT64"
            ),
        );
    }
    let strange = TensorProto { data_type: 77, ..tensor("", DataType::Float, &[1]) };
    let error = payload(&strange).unwrap_err().to_string();
    assert!(
        error
            .starts_with("a tensor without a name has the element type number 77 (unknown to this version);"),
        "{error}"
    );
}

#[test]
fn data_must_fit() {
    assert_error(
        payload(&raw("t", DataType::Float, &[2], vec![0; 7])),
        "tensor `t` should have 8 bytes by its dimensions and type, but raw_data holds 7",
    );
    assert_error(
        payload(&TensorProto { float_data: vec![0.0; 3], ..tensor("t", DataType::Float, &[2]) }),
        "tensor `t` should have 2 elements by its dimensions and type, but float_data holds 3",
    );
    assert_error(
        payload(&TensorProto { float_data: vec![0.0], ..raw("t", DataType::Float, &[1], vec![0; 4]) }),
        "tensor `t` holds data in both raw_data and float_data; only one may be used",
    );
    assert_error(
        payload(&TensorProto { int64_data: vec![0], ..tensor("t", DataType::Float, &[1]) }),
        "tensor `t` has the element type FLOAT, whose values cannot be in int64_data",
    );
    assert_error(
        payload(&TensorProto { int32_data: vec![0, 300], ..tensor("t", DataType::Uint8, &[2]) }),
        "tensor `t` holds the value 300 at element 1, which does not fit UINT8",
    );
    assert_error(
        payload(&TensorProto { int32_data: vec![-32769], ..tensor("t", DataType::Float16, &[1]) }),
        "tensor `t` holds the value -32769 at element 0, which does not fit FLOAT16",
    );
    assert_error(
        payload(&TensorProto { uint64_data: vec![1 << 32], ..tensor("t", DataType::Uint32, &[1]) }),
        "tensor `t` holds the value 4294967296 at element 0, which does not fit UINT32",
    );
    assert_error(
        payload(&TensorProto { segment: Some(Segment::default()), ..tensor("t", DataType::Float, &[1]) }),
        "tensor `t` is stored in segments, which are not supported",
    );
}

#[test]
fn long_names_are_shortened_and_escaped() {
    let name = format!("a\n{}", "é".repeat(1000));
    let error = payload(&tensor(&name, DataType::String, &[])).unwrap_err().to_string();
    assert!(error.starts_with("tensor `a\\né") && error.contains("é…` has"), "{error}");
    assert!(error.chars().count() < 400);
}

fn sparse(dims: &[i64], indices: TensorProto, values: &[f32]) -> SparseTensorProto {
    let values =
        TensorProto { float_data: values.to_vec(), ..tensor("s", DataType::Float, &[values.len() as i64]) };
    SparseTensorProto { values: Some(values), indices: Some(indices), dims: dims.to_vec() }
}

fn indices(dims: &[i64], values: &[i64]) -> TensorProto {
    TensorProto { int64_data: values.to_vec(), ..tensor("i", DataType::Int64, dims) }
}

fn dense(tensor: &SparseTensorProto) -> Result<TensorProto, OnnxError> {
    densify(tensor, &ExternalData::none(), 1024)
}

#[test]
fn sparse_tensors_are_written_out() {
    let expected = [0.0_f32, 0.0, 5.0, 0.0, 0.0, 7.0].map(f32::to_le_bytes).concat();
    for indices in [indices(&[2], &[2, 5]), indices(&[2, 2], &[0, 2, 1, 2])] {
        let got = dense(&sparse(&[2, 3], indices, &[5.0, 7.0])).unwrap();
        assert_eq!((got.name.as_str(), got.dims.as_slice()), ("s", [2, 3].as_slice()));
        assert_eq!(payload(&got).unwrap(), expected);
    }
    let none = SparseTensorProto { indices: None, ..sparse(&[2], indices(&[0], &[]), &[]) };
    assert_eq!(dense(&none).unwrap().raw_data, [0; 8].as_slice());
    let max = i64::MAX;
    assert!(dense(&sparse(&[max, max, 0], indices(&[0], &[]), &[])).unwrap().raw_data.is_empty());
}

#[test]
fn sparse_tensors_are_checked() {
    let damaged = |tensor, reason: &str| {
        assert_error(dense(&tensor), &format!("tensor `s` is a damaged sparse tensor: {reason}"));
    };
    damaged(sparse(&[6], indices(&[2], &[5, 2]), &[5.0, 7.0]), "its indices are not in ascending order");
    damaged(sparse(&[6], indices(&[2], &[2, 2]), &[5.0, 7.0]), "its indices are not in ascending order");
    damaged(sparse(&[6], indices(&[1], &[6]), &[5.0]), "its index 6 is not below 6");
    damaged(sparse(&[6], indices(&[1], &[-1]), &[5.0]), "its index -1 is not below 6");
    damaged(sparse(&[2, 3], indices(&[1, 2], &[0, 3]), &[5.0]), "its index 3 is not below 3");
    damaged(
        sparse(&[2, 3], indices(&[1, 3], &[0, 1, 1]), &[5.0]),
        "its indices have the dimensions [1, 3]; with 1 values they should be [1] or [1, 2]",
    );
    damaged(
        sparse(&[6], TensorProto { int32_data: vec![0], ..tensor("i", DataType::Int32, &[1]) }, &[5.0]),
        "its indices are not of the type INT64",
    );
    damaged(
        SparseTensorProto { indices: None, ..sparse(&[6], indices(&[0], &[]), &[1.0]) },
        "it has no indices",
    );
    assert_error(
        dense(&SparseTensorProto::default()),
        "a tensor without a name is a damaged sparse tensor: it has no values",
    );
    assert_error(
        dense(&sparse(&[1 << 20, 1 << 20], indices(&[1], &[0]), &[5.0])),
        "tensor `s` is sparse and needs 4398046511104 bytes as a dense tensor, more than the limit of 1024",
    );
}
