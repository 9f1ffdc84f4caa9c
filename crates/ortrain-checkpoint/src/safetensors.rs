//! Named tensors as safetensors, for exchange with everything else.

use std::collections::HashSet;
use std::path::Path;

use bytes::Bytes;
use ortrain_files::Staged;
use ortrain_graph::{DType, Tensor};
use safetensors::tensor::{Dtype, TensorView};

use crate::{Error, NamedTensor, Result, disk};

/// Reads the tensors of a safetensors buffer, in the order of their bytes. Tensors are ranges of the buffer.
///
/// # Errors
/// When the buffer is not sound, or a tensor has a type that is not supported.
#[allow(clippy::needless_pass_by_value, reason = "the tensors share the buffer; passing it says so")]
pub fn read_safetensors(bytes: Bytes) -> Result<Vec<NamedTensor>> {
    let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).map_err(Error::Safetensors)?;
    let payload = bytes.slice(size_of::<u64>() + header..);
    let mut tensors = Vec::new();
    for name in metadata.offset_keys() {
        let Some(info) = metadata.info(&name) else { continue };
        let Some(dtype) = from_safetensors(info.dtype) else {
            return Err(Error::UnsupportedType { name, dtype: info.dtype.to_string() });
        };
        let (start, end) = info.data_offsets;
        match Tensor::new(dtype, info.shape.clone(), payload.slice(start..end)) {
            Ok(tensor) => tensors.push(NamedTensor { name, tensor }),
            Err(source) => return Err(Error::Tensor { name, source }),
        }
    }
    Ok(tensors)
}

/// Reads the tensors of a safetensors file. See [`read_safetensors`].
///
/// # Errors
/// When there is no file, it cannot be read, or as [`read_safetensors`] inside [`Error::InFile`].
pub fn load_safetensors(path: impl AsRef<Path>) -> Result<Vec<NamedTensor>> {
    let path = path.as_ref();
    read_safetensors(disk::read(path)?)
        .map_err(|source| Error::InFile { path: path.to_owned(), source: Box::new(source) })
}

/// The bytes of a safetensors file. Tensors are ordered by type, then by name, as the format asks.
///
/// # Errors
/// When a name occurs twice, or the header would exceed the format's 100 MB.
pub fn write_safetensors(tensors: &[NamedTensor]) -> Result<Vec<u8>> {
    let mut seen = HashSet::new();
    let mut views = Vec::with_capacity(tensors.len());
    for NamedTensor { name, tensor } in tensors {
        if !seen.insert(name) {
            return Err(Error::DuplicateName { what: "tensors", name: name.clone() });
        }
        let view = TensorView::new(to_safetensors(tensor.dtype()), tensor.dims().to_vec(), tensor.data());
        views.push((name, view.map_err(Error::SafetensorsWrite)?));
    }
    safetensors::serialize(views, None).map_err(Error::SafetensorsWrite)
}

/// Writes a safetensors file: beside its place first, then there.
///
/// # Errors
/// As [`write_safetensors`], or when the operating system refuses.
pub fn save_safetensors(tensors: &[NamedTensor], path: impl AsRef<Path>) -> Result<()> {
    let bytes = write_safetensors(tensors)?;
    let mut file = Staged::beside(path.as_ref())?;
    file.append(&bytes)?;
    file.sync()?;
    Ok(file.place()?)
}

fn to_safetensors(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::U8 => Dtype::U8,
        DType::I8 => Dtype::I8,
        DType::U16 => Dtype::U16,
        DType::I16 => Dtype::I16,
        DType::I32 => Dtype::I32,
        DType::I64 => Dtype::I64,
        DType::Bool => Dtype::BOOL,
        DType::F16 => Dtype::F16,
        DType::F64 => Dtype::F64,
        DType::U32 => Dtype::U32,
        DType::U64 => Dtype::U64,
        DType::BF16 => Dtype::BF16,
    }
}

fn from_safetensors(dtype: Dtype) -> Option<DType> {
    DType::ALL.into_iter().find(|&known| to_safetensors(known) == dtype)
}
