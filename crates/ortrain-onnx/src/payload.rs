//! Numbers of a tensor as little-endian bytes, from every field that can hold them.

use bytes::Bytes;

use crate::error::label;
use crate::proto::tensor_proto::{DataLocation, DataType};
use crate::{ExternalData, OnnxError, TensorProto};

/// Returns the dimensions of a stored tensor.
///
/// # Errors
///
/// Fails for a negative dimension, or if the product of the dimensions does not fit an address.
pub fn tensor_dims(tensor: &TensorProto) -> Result<Vec<usize>, OnnxError> {
    checked_dims(&tensor.dims, || label(tensor))
}

/// Returns the element type of a stored tensor, if [`tensor_payload`] supports it: every type but text and complex
/// numbers.
///
/// # Errors
///
/// Fails for other types, and names the type.
pub fn element_type(tensor: &TensorProto) -> Result<DataType, OnnxError> {
    let refuse = |name: String| OnnxError::ElementType { tensor: label(tensor), element_type: name };
    let Ok(data_type) = DataType::try_from(tensor.data_type) else {
        return Err(refuse(format!("number {} (unknown to this version)", tensor.data_type)));
    };
    match element_bits(data_type) {
        Some(_) => Ok(data_type),
        None => Err(refuse(data_type.as_str_name().to_owned())),
    }
}

/// Returns the bits per stored element of a type that [`tensor_payload`] supports, `None` for all others.
pub fn element_bits(data_type: DataType) -> Option<usize> {
    match data_type {
        DataType::Uint2 | DataType::Int2 => Some(2),
        DataType::Uint4 | DataType::Int4 | DataType::Float4e2m1 => Some(4),
        DataType::Bool
        | DataType::Int8
        | DataType::Uint8
        | DataType::Float8e4m3fn
        | DataType::Float8e4m3fnuz
        | DataType::Float8e5m2
        | DataType::Float8e5m2fnuz
        | DataType::Float8e8m0 => Some(8),
        DataType::Float16 | DataType::Bfloat16 | DataType::Int16 | DataType::Uint16 => Some(16),
        DataType::Float | DataType::Int32 | DataType::Uint32 => Some(32),
        DataType::Double | DataType::Int64 | DataType::Uint64 => Some(64),
        _ => None,
    }
}

/// Returns the elements of a tensor in row-major order, as little-endian bytes of its element type.
///
/// The number of bytes matches [`tensor_dims`] and [`element_type`]. Data in `raw_data` is returned as a range of the
/// file's buffer, without a copy and therefore **without any alignment**. Data in typed fields is converted. External
/// data is read by this call. A boolean is a byte. In typed fields, every nonzero value becomes 1. Several elements of
/// less than eight bits share a byte, the lowest bits first.
///
/// # Errors
///
/// Fails if dimensions, type, size or location of the data are wrong. The error names the tensor and the reason.
pub fn tensor_payload(tensor: &TensorProto, external: &ExternalData) -> Result<Bytes, OnnxError> {
    let data_type = element_type(tensor)?;
    let bits = element_bits(data_type).unwrap_or(8);
    let (elements, bytes) = counts(tensor, bits)?;
    check_data_location(tensor)?;
    if is_external(tensor) {
        return external.read(tensor, bytes);
    }
    let fields = fields_with_data(tensor);
    match *fields.as_slice() {
        [] if bytes == 0 => Ok(Bytes::new()),
        [] => Err(OnnxError::DataLength {
            tensor: label(tensor),
            field: "it",
            unit: "bytes",
            expected: bytes,
            found: 0,
        }),
        ["raw_data"] => {
            let length = tensor.raw_data.len();
            if length != bytes {
                return Err(OnnxError::DataLength {
                    tensor: label(tensor),
                    field: "raw_data",
                    unit: "bytes",
                    expected: bytes,
                    found: length,
                });
            }
            Ok(tensor.raw_data.clone())
        }
        // A number of a typed field holds a byte of packed elements.
        [field] => typed(tensor, data_type, field, if bits < 8 { bytes } else { elements }),
        [first, second, ..] => Err(OnnxError::DataTwice { tensor: label(tensor), first, second }),
    }
}

pub(crate) fn is_external(tensor: &TensorProto) -> bool {
    tensor.data_location == DataLocation::External as i32
}

pub(crate) fn checked_dims(dims: &[i64], label: impl Fn() -> String) -> Result<Vec<usize>, OnnxError> {
    let mut product = 1_usize;
    let mut out = Vec::with_capacity(dims.len());
    let mut overflow = false;
    for (axis, &value) in dims.iter().enumerate() {
        let dim =
            usize::try_from(value).map_err(|_| OnnxError::Dimension { tensor: label(), axis, value })?;
        match product.checked_mul(dim) {
            Some(next) => product = next,
            None => overflow = true,
        }
        out.push(dim);
    }
    if overflow && !out.contains(&0) {
        return Err(too_many(dims, label()));
    }
    Ok(out)
}

pub(crate) fn too_many(dims: &[i64], tensor: String) -> OnnxError {
    OnnxError::TooManyElements { tensor, dims: dims.iter().copied().take(16).collect() }
}

/// Returns the numbers of elements and bytes of a tensor with `bits` per element.
pub(crate) fn counts(tensor: &TensorProto, bits: usize) -> Result<(usize, usize), OnnxError> {
    let dims = tensor_dims(tensor)?;
    let elements = if dims.contains(&0) { 0 } else { dims.iter().product::<usize>() };
    // No slice is larger than `isize::MAX`.
    let bytes = (elements as u64).checked_mul(bits as u64).map(|bits| bits.div_ceil(8));
    match bytes.and_then(|bytes| isize::try_from(bytes).ok()) {
        Some(bytes) => Ok((elements, bytes.unsigned_abs())),
        None => Err(too_many(&tensor.dims, label(tensor))),
    }
}

fn check_data_location(tensor: &TensorProto) -> Result<(), OnnxError> {
    if tensor.segment.is_some() {
        return Err(OnnxError::Segments { tensor: label(tensor) });
    }
    if is_external(tensor)
        && let Some(&second) = fields_with_data(tensor).first()
    {
        return Err(OnnxError::DataTwice { tensor: label(tensor), first: "external_data", second });
    }
    Ok(())
}

/// Returns the names of the fields that hold data.
fn fields_with_data(tensor: &TensorProto) -> Vec<&'static str> {
    [
        ("raw_data", tensor.raw_data.is_empty()),
        ("float_data", tensor.float_data.is_empty()),
        ("int32_data", tensor.int32_data.is_empty()),
        ("string_data", tensor.string_data.is_empty()),
        ("int64_data", tensor.int64_data.is_empty()),
        ("double_data", tensor.double_data.is_empty()),
        ("uint64_data", tensor.uint64_data.is_empty()),
    ]
    .into_iter()
    .filter_map(|(name, empty)| (!empty).then_some(name))
    .collect()
}

fn typed(
    tensor: &TensorProto,
    data_type: DataType,
    field: &'static str,
    elements: usize,
) -> Result<Bytes, OnnxError> {
    let fits = match data_type {
        DataType::Float => "float_data",
        DataType::Double => "double_data",
        DataType::Int64 => "int64_data",
        DataType::Uint32 | DataType::Uint64 => "uint64_data",
        _ => "int32_data",
    };
    if field != fits {
        let element_type = data_type.as_str_name();
        return Err(OnnxError::DataField { tensor: label(tensor), element_type, field });
    }
    let length = match field {
        "float_data" => tensor.float_data.len(),
        "double_data" => tensor.double_data.len(),
        "int64_data" => tensor.int64_data.len(),
        "uint64_data" => tensor.uint64_data.len(),
        _ => tensor.int32_data.len(),
    };
    if length != elements {
        return Err(OnnxError::DataLength {
            tensor: label(tensor),
            field,
            unit: "elements",
            expected: elements,
            found: length,
        });
    }
    let out_of_range = |index: usize, value: i128| OnnxError::ValueRange {
        tensor: label(tensor),
        element_type: data_type.as_str_name(),
        index,
        value,
    };
    // Small integers may be stored as signed or unsigned numbers, as in every runtime: 255 is -1 as INT8.
    let small = |low: i32, high: i32| {
        let out_of_bounds = tensor.int32_data.iter().position(|value| !(low..=high).contains(value));
        out_of_bounds.map_or(Ok(()), |index| Err(out_of_range(index, tensor.int32_data[index].into())))
    };
    let bytes: Vec<u8> = match data_type {
        DataType::Float => tensor.float_data.iter().flat_map(|value| value.to_le_bytes()).collect(),
        DataType::Double => tensor.double_data.iter().flat_map(|value| value.to_le_bytes()).collect(),
        DataType::Int64 => tensor.int64_data.iter().flat_map(|value| value.to_le_bytes()).collect(),
        DataType::Uint64 => tensor.uint64_data.iter().flat_map(|value| value.to_le_bytes()).collect(),
        DataType::Uint32 => {
            if let Some(index) = tensor.uint64_data.iter().position(|&value| value > u32::MAX.into()) {
                return Err(out_of_range(index, tensor.uint64_data[index].into()));
            }
            tensor.uint64_data.iter().flat_map(|&value| (value as u32).to_le_bytes()).collect()
        }
        DataType::Int32 => tensor.int32_data.iter().flat_map(|value| value.to_le_bytes()).collect(),
        DataType::Bool => tensor.int32_data.iter().map(|&value| u8::from(value != 0)).collect(),
        _ if element_bits(data_type).is_some_and(|bits| bits <= 8) => {
            small(i8::MIN.into(), u8::MAX.into())?;
            tensor.int32_data.iter().map(|&value| value as u8).collect()
        }
        _ => {
            small(i16::MIN.into(), u16::MAX.into())?;
            tensor.int32_data.iter().flat_map(|&value| (value as u16).to_le_bytes()).collect()
        }
    };
    Ok(bytes.into())
}

/// Reads external data of any type with a fixed size, without conversion. Saving uses it for data that it only copies.
pub(crate) fn stored_bytes(tensor: &TensorProto, external: &ExternalData) -> Result<Bytes, OnnxError> {
    check_data_location(tensor)?;
    external.read(tensor, stored_size(tensor)?)
}

/// Returns the number of bytes of [`stored_bytes`], by dimensions and type.
pub(crate) fn stored_size(tensor: &TensorProto) -> Result<usize, OnnxError> {
    let bits = match DataType::try_from(tensor.data_type) {
        Ok(DataType::Complex64) => 64,
        Ok(DataType::Complex128) => 128,
        _ => element_bits(element_type(tensor)?).unwrap_or(8),
    };
    Ok(counts(tensor, bits)?.1)
}
