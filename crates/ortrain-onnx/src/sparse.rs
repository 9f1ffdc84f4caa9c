//! Conversion of sparse tensors to dense tensors.

use bytes::Bytes;

use crate::error::{label, label_of};
use crate::payload::{checked_dims, element_bits, element_type, tensor_payload, too_many};
use crate::proto::tensor_proto::DataType;
use crate::{ExternalData, OnnxError, SparseTensorProto, TensorProto};

/// Converts a sparse tensor to a dense one with the same name, type and dimensions, and its data in `raw_data`.
///
/// A file of a hundred bytes can describe a sparse tensor of any size. `limit` is therefore the maximum number of bytes
/// of the dense tensor.
///
/// # Errors
///
/// Fails if the values or indices are missing, damaged, out of range or not in ascending order. A dense tensor of more
/// than `limit` bytes is an error too.
pub fn densify(
    tensor: &SparseTensorProto,
    external: &ExternalData,
    limit: usize,
) -> Result<TensorProto, OnnxError> {
    let name = tensor.values.as_ref().map_or("", |values| values.name.as_str());
    let sparse_error = |reason: String| OnnxError::Sparse { tensor: label_of(name), reason };
    let values = tensor.values.as_ref().ok_or_else(|| sparse_error("it has no values".into()))?;
    let dims = checked_dims(&tensor.dims, || label(values))?;
    let data_type = element_type(values)?;
    let bits = element_bits(data_type).unwrap_or(8);
    if bits < 8 {
        let reason = format!("its elements have {bits} bits; only elements of whole bytes are supported");
        return Err(sparse_error(reason));
    }
    let size = bits / 8;
    let elements = if dims.contains(&0) { 0 } else { dims.iter().product::<usize>() };
    let needed = elements.checked_mul(size).ok_or_else(|| too_many(&tensor.dims, label(values)))?;
    if needed > limit {
        return Err(OnnxError::SparseTooLarge { tensor: label(values), needed, limit });
    }

    let stored = tensor_payload(values, external)?;
    let count = stored.len() / size;
    if values.dims.len() != 1 {
        return Err(sparse_error(format!("its values have {} dimensions instead of one", values.dims.len())));
    }
    let positions = positions(tensor, external, &dims, elements, count).map_err(|fault| match fault {
        Fault::Here(reason) => sparse_error(reason),
        Fault::Tensor(error) => error,
    })?;

    let mut dense = Vec::new();
    dense
        .try_reserve_exact(needed)
        .map_err(|_| OnnxError::OutOfMemory { tensor: label(values), bytes: needed })?;
    dense.resize(needed, 0);
    let mut last = None;
    for (position, value) in positions.into_iter().zip(stored.chunks_exact(size)) {
        if last.is_some_and(|last| last >= position) {
            return Err(sparse_error("its indices are not in ascending order".into()));
        }
        last = Some(position);
        dense[position * size..][..size].copy_from_slice(value);
    }
    Ok(TensorProto {
        name: values.name.clone(),
        doc_string: values.doc_string.clone(),
        data_type: values.data_type,
        dims: tensor.dims.clone(),
        raw_data: Bytes::from(dense),
        ..TensorProto::default()
    })
}

enum Fault {
    Here(String),
    Tensor(OnnxError),
}

/// Returns the linear indices of the values in the dense tensor, each less than its number of elements.
fn positions(
    tensor: &SparseTensorProto,
    external: &ExternalData,
    dims: &[usize],
    elements: usize,
    count: usize,
) -> Result<Vec<usize>, Fault> {
    let fail = |reason: String| Err(Fault::Here(reason));
    let Some(indices) = &tensor.indices else {
        return if count == 0 { Ok(Vec::new()) } else { fail("it has no indices".into()) };
    };
    if element_type(indices).map_err(Fault::Tensor)? != DataType::Int64 {
        return fail("its indices are not of the type INT64".into());
    }
    let bytes = tensor_payload(indices, external).map_err(Fault::Tensor)?;
    let rank = dims.len();
    let linear = match *indices.dims.as_slice() {
        [rows] if rows == count as i64 => true,
        [rows, columns] if rows == count as i64 && columns == rank as i64 => false,
        _ => {
            return fail(format!(
                "its indices have the dimensions {:?}; with {count} values they should be [{count}] or [{count}, {rank}]",
                indices.dims
            ));
        }
    };
    let mut numbers =
        bytes.chunks_exact(8).map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap_or_default()));
    let mut out = Vec::with_capacity(count);
    for _ in 0..count {
        let mut position = 0;
        let axes = if linear { std::slice::from_ref(&elements) } else { dims };
        for &dim in axes {
            let index = numbers.next().unwrap_or(-1);
            match usize::try_from(index) {
                Ok(index) if index < dim => position = position * dim + index,
                _ => return fail(format!("its index {index} is not below {dim}")),
            }
        }
        out.push(position);
    }
    Ok(out)
}
