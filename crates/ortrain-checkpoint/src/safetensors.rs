//! Named tensors as safetensors, for exchange with other tools.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use bytes::Bytes;
use ortrain_files::Staged;
use ortrain_graph::{DType, Tensor};
use safetensors::tensor::{Dtype, TensorView};

use crate::{Error, NamedTensor, Result, disk};

/// Reads the tensors of a safetensors buffer, in the order of their bytes. Tensors are ranges of the buffer.
///
/// # Errors
/// Fails if the buffer is invalid, or if the type of a tensor is not supported.
#[allow(clippy::needless_pass_by_value, reason = "the tensors share the buffer")]
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
/// Fails if the file does not exist or cannot be read. [`Error::InFile`] wraps errors of [`read_safetensors`].
pub fn load_safetensors(path: impl AsRef<Path>) -> Result<Vec<NamedTensor>> {
    let path = path.as_ref();
    read_safetensors(disk::read(path)?)
        .map_err(|source| Error::InFile { path: path.to_owned(), source: Box::new(source) })
}

/// Encodes tensors as a safetensors file. The format orders tensors by type, then by name.
///
/// # Errors
/// Fails if a name occurs twice, or if the header would exceed the format's 100 MB.
pub fn write_safetensors(tensors: &[NamedTensor]) -> Result<Vec<u8>> {
    write_safetensors_with(tensors, None)
}

fn write_safetensors_with(
    tensors: &[NamedTensor],
    metadata: Option<HashMap<String, String>>,
) -> Result<Vec<u8>> {
    let mut names = HashSet::new();
    let mut views = Vec::with_capacity(tensors.len());
    for NamedTensor { name, tensor } in tensors {
        if !names.insert(name) {
            return Err(Error::DuplicateName { what: "tensors", name: name.clone() });
        }
        let view = TensorView::new(to_safetensors(tensor.dtype()), tensor.dims().to_vec(), tensor.data());
        views.push((name, view.map_err(Error::SafetensorsWrite)?));
    }
    safetensors::serialize(views, metadata).map_err(Error::SafetensorsWrite)
}

/// Writes a safetensors file beside its destination, then renames the file.
///
/// # Errors
/// Fails like [`write_safetensors`], or if the operating system reports an error.
pub fn save_safetensors(tensors: &[NamedTensor], path: impl AsRef<Path>) -> Result<()> {
    save(&write_safetensors(tensors)?, path.as_ref())
}

/// Works like [`save_safetensors`], with texts in the header: the `__metadata__` of the format.
///
/// # Errors
/// As [`save_safetensors`].
pub fn save_safetensors_with(
    tensors: &[NamedTensor],
    metadata: HashMap<String, String>,
    path: impl AsRef<Path>,
) -> Result<()> {
    save(&write_safetensors_with(tensors, Some(metadata))?, path.as_ref())
}

/// Reads the texts in the header of a safetensors file.
///
/// # Errors
/// Fails if the file cannot be read, or its header is damaged.
pub fn load_safetensors_metadata(path: impl AsRef<Path>) -> Result<HashMap<String, String>> {
    let path = path.as_ref();
    let (_, header) = safetensors::SafeTensors::read_metadata(&disk::read(path)?).map_err(|source| {
        Error::InFile { path: path.to_owned(), source: Box::new(Error::Safetensors(source)) }
    })?;
    Ok(header.metadata().clone().unwrap_or_default())
}

fn save(bytes: &[u8], path: &Path) -> Result<()> {
    let mut file = Staged::beside(path)?;
    file.append(bytes)?;
    file.sync()?;
    Ok(file.persist()?)
}

/// Returns the type in the format. Codes of types without arithmetic are bytes.
fn to_safetensors(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::U8 | DType::Small(_) => Dtype::U8,
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
