//! The numbers of a tensor, wherever the message keeps them, as little-endian bytes.

use bytes::Bytes;

use crate::error::shown;
use crate::proto::tensor_proto::{DataLocation, DataType};
use crate::{ExternalData, OnnxError, TensorProto};

/// The dimensions of a stored tensor.
///
/// # Errors
///
/// A negative dimension, and dimensions whose product does not fit an address, are refused.
pub fn tensor_dims(tensor: &TensorProto) -> Result<Vec<usize>, OnnxError> {
    checked_dims(&tensor.dims, || label(tensor))
}

/// The element type of a stored tensor, one of the types that [`tensor_payload`] can hand out:
/// `Float`, `Double`, `Float16`, `Bfloat16`, `Bool`, `Int8` to `Int64` and `Uint8` to `Uint64`.
///
/// # Errors
///
/// Other types (text, complex, 8-bit floats, packed 4-bit and smaller types) are refused by name.
pub fn element_type(tensor: &TensorProto) -> Result<DataType, OnnxError> {
    let refuse = |name: String| OnnxError::ElementType { tensor: label(tensor), element_type: name };
    let Ok(data_type) = DataType::try_from(tensor.data_type) else {
        return Err(refuse(format!("number {} (unknown to this version)", tensor.data_type)));
    };
    match element_size(data_type) {
        Some(_) => Ok(data_type),
        None => Err(refuse(data_type.as_str_name().to_owned())),
    }
}

/// Bytes per element of the types that [`tensor_payload`] can hand out, `None` for all others.
pub fn element_size(data_type: DataType) -> Option<usize> {
    match data_type {
        DataType::Bool | DataType::Int8 | DataType::Uint8 => Some(1),
        DataType::Float16 | DataType::Bfloat16 | DataType::Int16 | DataType::Uint16 => Some(2),
        DataType::Float | DataType::Int32 | DataType::Uint32 => Some(4),
        DataType::Double | DataType::Int64 | DataType::Uint64 => Some(8),
        _ => None,
    }
}

/// The elements of a tensor in row-major order, as little-endian bytes of its element type.
///
/// The result has exactly the bytes that [`tensor_dims`] and [`element_type`] ask for. Data in `raw_data` is handed out
/// as a range of the file's buffer, without a copy and therefore **without any alignment**; data in typed fields is
/// converted; external data is read now. A boolean is a byte; in typed fields any value but zero becomes 1.
///
/// # Errors
///
/// Dimensions, type, size or place of the data may be wrong; the error names the tensor and says how.
pub fn tensor_payload(tensor: &TensorProto, external: &ExternalData) -> Result<Bytes, OnnxError> {
    let data_type = element_type(tensor)?;
    let size = element_size(data_type).unwrap_or(1);
    let (elements, bytes) = counts(tensor, size * 8)?;
    check_place(tensor)?;
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
            let found = tensor.raw_data.len();
            if found != bytes {
                return Err(OnnxError::DataLength {
                    tensor: label(tensor),
                    field: "raw_data",
                    unit: "bytes",
                    expected: bytes,
                    found,
                });
            }
            Ok(tensor.raw_data.clone())
        }
        [field] => typed(tensor, data_type, field, elements),
        [first, second, ..] => Err(OnnxError::DataTwice { tensor: label(tensor), first, second }),
    }
}

/// As a message names a tensor.
pub(crate) fn label(tensor: &TensorProto) -> String {
    label_of(&tensor.name)
}

pub(crate) fn label_of(name: &str) -> String {
    if name.is_empty() { "a tensor without a name".to_owned() } else { format!("tensor `{}`", shown(name)) }
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

/// Elements and bytes of a tensor whose elements take `bits` each.
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

fn check_place(tensor: &TensorProto) -> Result<(), OnnxError> {
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

/// The fields of the message that hold data.
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
    let found = match field {
        "float_data" => tensor.float_data.len(),
        "double_data" => tensor.double_data.len(),
        "int64_data" => tensor.int64_data.len(),
        "uint64_data" => tensor.uint64_data.len(),
        _ => tensor.int32_data.len(),
    };
    if found != elements {
        return Err(OnnxError::DataLength {
            tensor: label(tensor),
            field,
            unit: "elements",
            expected: elements,
            found,
        });
    }
    let out_of_range = |index: usize, value: i128| OnnxError::ValueRange {
        tensor: label(tensor),
        element_type: data_type.as_str_name(),
        index,
        value,
    };
    // Small integers are accepted in either reading of their bits, as every runtime does: 255 is -1 as INT8.
    let small = |low: i32, high: i32| {
        let wrong = tensor.int32_data.iter().position(|value| !(low..=high).contains(value));
        wrong.map_or(Ok(()), |index| Err(out_of_range(index, tensor.int32_data[index].into())))
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
        DataType::Int8 | DataType::Uint8 => {
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

/// External data of any type with a fixed size, as it is stored: for saving what only passes through.
pub(crate) fn stored_bytes(tensor: &TensorProto, external: &ExternalData) -> Result<Bytes, OnnxError> {
    check_place(tensor)?;
    external.read(tensor, stored_size(tensor)?)
}

/// How many bytes [`stored_bytes`] are, by dimensions and type.
pub(crate) fn stored_size(tensor: &TensorProto) -> Result<usize, OnnxError> {
    let bits = match DataType::try_from(tensor.data_type) {
        Ok(DataType::Complex64) => 64,
        Ok(DataType::Complex128) => 128,
        Ok(
            DataType::Float8e4m3fn
            | DataType::Float8e4m3fnuz
            | DataType::Float8e5m2
            | DataType::Float8e5m2fnuz
            | DataType::Float8e8m0,
        ) => 8,
        Ok(DataType::Uint4 | DataType::Int4 | DataType::Float4e2m1) => 4,
        Ok(DataType::Uint2 | DataType::Int2) => 2,
        _ => element_size(element_type(tensor)?).unwrap_or(1) * 8,
    };
    Ok(counts(tensor, bits)?.1)
}
