//! Loading of models from bytes and files.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;

use crate::wire::{self, Fault, MAX_DEPTH};
use crate::{
    ExternalData, FunctionProto, Maps, ModelProto, OnnxError, SparseTensorProto, Storage, TensorProto,
};
use crate::{mapped, payload, sparse};

/// Model with the source of its external data.
///
/// [`proto`](Self::proto) may be changed. Payloads are resolved by its content at the time of the call.
#[derive(Debug, Clone)]
pub struct LoadedModel {
    /// ONNX message of the model.
    pub proto: ModelProto,
    external: Arc<ExternalData>,
    unknown_fields: u64,
    /// Mapped file of the model, of which payloads are ranges, and its path after following all links.
    file: Option<(PathBuf, Bytes)>,
}

/// Returns an error for a pipe or a device before it is opened, because opening a pipe waits for its writer. A folder
/// passes, and fails when it is read.
fn check_regular(path: &Path) -> io::Result<()> {
    let kind = path.metadata()?.file_type();
    if kind.is_file() || kind.is_dir() {
        return Ok(());
    }
    Err(io::Error::other("it is not a regular file"))
}

impl LoadedModel {
    /// Loads a model from a file, which is read completely. External data is read on request.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read, is not a regular file, or does not hold an ONNX model.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, OnnxError> {
        Self::load_with(path, Storage::Read)
    }

    /// Loads a model from a file, by reading or mapping. [`Storage::Mapped`] has requirements for the caller.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read, is not a regular file, or does not hold an ONNX model.
    pub fn load_with(path: impl AsRef<Path>, storage: Storage) -> Result<Self, OnnxError> {
        let path = path.as_ref();
        let bytes = check_regular(path).and_then(|()| match storage {
            Storage::Read | Storage::MappedInPlace => std::fs::read(path).map(Bytes::from),
            Storage::Mapped => File::open(path).and_then(|file| mapped::map(&file)),
        });
        let bytes = bytes.map_err(|error| OnnxError::Read { path: path.to_owned(), error })?;
        let model =
            Self::from_buffer(&bytes, &path.display().to_string(), ExternalData::beside(path, storage))?;
        let is_mapped = storage == Storage::Mapped;
        let file = path.canonicalize().ok().filter(|_| is_mapped).map(|path| (path, bytes));
        Ok(Self { file, ..model })
    }

    /// Loads a model from bytes. Payloads are ranges of the bytes.
    ///
    /// `external` is the source of the model's external data: [`ExternalData::none`] if there is no such data.
    ///
    /// # Errors
    ///
    /// Fails if the bytes are not an ONNX model.
    pub fn from_bytes(bytes: impl Into<Bytes>, external: ExternalData) -> Result<Self, OnnxError> {
        Self::from_buffer(&bytes.into(), "the model", external)
    }

    /// Wraps a message that the program has built.
    pub fn from_proto(proto: ModelProto, external: ExternalData) -> Self {
        Self { proto, external: Arc::new(external), unknown_fields: 0, file: None }
    }

    /// Wraps another message with the external data of this model.
    pub fn with_proto(&self, proto: ModelProto) -> Self {
        Self {
            proto,
            external: Arc::clone(&self.external),
            unknown_fields: self.unknown_fields,
            file: self.file.clone(),
        }
    }

    /// Returns the model with another method of reading its external data. It uses the maps of files in `maps`, and
    /// adds new maps.
    #[must_use]
    pub fn with_storage(self, storage: Storage, maps: &Maps) -> Self {
        Self { external: Arc::new(self.external.with_storage(storage, maps)), ..self }
    }

    /// Returns the path of the model's own file and the offset in it, for a payload that is a range of the file. The
    /// file must be [mapped](Storage::Mapped).
    pub fn own_file(&self, payload: &Bytes) -> Option<(&Path, u64)> {
        let (path, bytes) = self.file.as_ref()?;
        let offset = payload.as_ptr().addr().checked_sub(bytes.as_ptr().addr())?;
        (offset.checked_add(payload.len())? <= bytes.len()).then_some((path.as_path(), offset as u64))
    }

    /// Returns the source of external data.
    pub fn external(&self) -> &Arc<ExternalData> {
        &self.external
    }

    /// Returns the folder of the model's file.
    pub fn folder(&self) -> Option<&Path> {
        self.external.folder()
    }

    /// Returns the number of fields in the file that this version of ONNX does not define. They were dropped.
    pub fn unknown_fields(&self) -> u64 {
        self.unknown_fields
    }

    /// Returns the elements of a tensor of the model; see [`tensor_payload`](crate::tensor_payload).
    ///
    /// # Errors
    ///
    /// Fails if dimensions, type, size or location of the data are wrong. The error names the tensor and the reason.
    pub fn tensor_payload(&self, tensor: &TensorProto) -> Result<Bytes, OnnxError> {
        payload::tensor_payload(tensor, &self.external)
    }

    /// Returns the path of the file with a tensor's external data, after following all links, and the offset of the
    /// data. Returns `None` if the tensor has no external data, or if its data is not in a file.
    ///
    /// # Errors
    ///
    /// Fails if the file does not exist, or is not inside the model's folder.
    pub fn external_file(&self, tensor: &TensorProto) -> Result<Option<(PathBuf, u64)>, OnnxError> {
        if payload::is_external(tensor) { self.external.locate(tensor) } else { Ok(None) }
    }

    /// Compares the file of a tensor's external data with the checksum that the model gives for it, if there is one.
    /// `known` are files with checksums that were compared before.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read, or has another checksum.
    pub fn verify_external_file(
        &self,
        tensor: &TensorProto,
        known: &mut HashSet<(PathBuf, String)>,
    ) -> Result<(), OnnxError> {
        if payload::is_external(tensor) { self.external.verify(tensor, known) } else { Ok(()) }
    }

    /// Converts a sparse tensor of the model to a dense one; see [`densify`](crate::densify).
    ///
    /// # Errors
    ///
    /// Fails if the tensor is inconsistent, or would take more than `limit` bytes.
    pub fn densify(&self, tensor: &SparseTensorProto, limit: usize) -> Result<TensorProto, OnnxError> {
        sparse::densify(tensor, &self.external, limit)
    }

    fn from_buffer(bytes: &Bytes, name: &str, external: ExternalData) -> Result<Self, OnnxError> {
        let (proto, unknown_fields) = decode(bytes, name)?;
        Ok(Self { proto, external: Arc::new(external), unknown_fields, file: None })
    }
}

/// Limit of the decoded size in bytes: a base for every file, plus a multiple of the file's size.
const MEMORY_BASE: u64 = 64 << 20;
const MEMORY_PER_BYTE: u64 = 64;

fn decode(bytes: &Bytes, name: &str) -> Result<(ModelProto, u64), OnnxError> {
    let other = |error| match other_format(bytes) {
        Some(reason) => OnnxError::NotAModel { file: name.to_owned(), reason },
        None => error,
    };
    if bytes.is_empty() {
        return Err(OnnxError::Empty { file: name.to_owned() });
    }
    let (proto, unknown): (ModelProto, u64) = read(bytes, name, wire::scan(bytes)).map_err(other)?;
    if proto.graph.is_none() {
        return Err(other(OnnxError::NotAModel { file: name.to_owned(), reason: "it has no graph" }));
    }
    Ok((proto, unknown))
}

/// Decodes a model from the bytes of its message. Payloads are ranges of the bytes.
///
/// # Errors
///
/// Fails if the bytes are not an ONNX model.
pub fn decode_model(bytes: impl Into<Bytes>) -> Result<ModelProto, OnnxError> {
    Ok(decode(&bytes.into(), "the model")?.0)
}

/// Decodes a function from the bytes of its message. Payloads are ranges of the bytes.
///
/// # Errors
///
/// Fails if the bytes are not an ONNX function.
pub fn decode_function(bytes: impl Into<Bytes>) -> Result<FunctionProto, OnnxError> {
    let bytes = bytes.into();
    Ok(read(&bytes, "the function", wire::scan_function(&bytes))?.0)
}

/// Decodes a message after its scan, and returns it with the number of its unknown fields.
fn read<M: prost::Message + Default>(
    bytes: &Bytes,
    name: &str,
    report: Result<wire::Report, Fault>,
) -> Result<(M, u64), OnnxError> {
    let file = || name.to_owned();
    let size = bytes.len();
    let report = report.map_err(|fault| match fault {
        Fault::CutShort { offset: 0, .. } | Fault::Malformed { offset: 0, .. } => {
            OnnxError::NotAModel { file: file(), reason: "its first bytes are not those of an ONNX model" }
        }
        Fault::CutShort { offset, field } => OnnxError::CutShort { file: file(), field, offset, size },
        Fault::Malformed { offset, what } => OnnxError::Malformed { file: file(), offset, what },
        Fault::TooDeep { .. } => OnnxError::TooDeep { file: file(), limit: MAX_DEPTH },
    })?;
    if report.memory > MEMORY_BASE.saturating_add(MEMORY_PER_BYTE.saturating_mul(size as u64)) {
        return Err(OnnxError::Bomb { file: file(), size, needed: report.memory });
    }
    let proto = M::decode(bytes.clone())
        .map_err(|error| OnnxError::Decode { file: file(), reason: error.to_string() })?;
    Ok((proto, report.unknown))
}

/// Returns true for a zip archive if the name of its first file has the ending of NumPy's arrays.
fn is_npz(bytes: &[u8]) -> bool {
    // The length of the name is at byte 26 of the header of 30 bytes, the name follows.
    let Some([low, high]) = bytes.get(26..28) else { return false };
    let end = 30 + usize::from(u16::from_le_bytes([*low, *high]));
    bytes.starts_with(b"PK\x03\x04") && bytes.get(30..end).is_some_and(|name| name.ends_with(b".npy"))
}

/// Guesses the format of bytes that are not a model.
fn other_format(bytes: &[u8]) -> Option<&'static str> {
    const BY_START: [(&[u8], &str); 9] = [
        (b"\x89PNG", "it is a PNG image"),
        (b"\xff\xd8\xff", "it is a JPEG image"),
        (b"\x93NUMPY", "it is an array of NumPy"),
        (b"\x7fELF", "it is a program or a library"),
        (b"%PDF", "it is a PDF document"),
        (b"version https://git-lfs", "it is a Git LFS pointer; fetch the file itself with `git lfs pull`"),
        (b"PK\x03\x04", "it is a zip archive (a saved PyTorch model is one); export it to ONNX first"),
        (b"\x89HDF", "it is an HDF5 file (a saved Keras model is one); convert it to ONNX first"),
        (b"\x1f\x8b", "it is compressed with gzip; unpack it first"),
    ];
    if is_npz(bytes) {
        return Some("it is an NPZ archive of NumPy, which has arrays but no graph; pass it as data");
    }
    if let Some((_, reason)) = BY_START.iter().find(|(start, _)| bytes.starts_with(start)) {
        return Some(reason);
    }
    match bytes.get(4..8) {
        Some(b"ORTM") => return Some("it is in the ORT format; use the ONNX model it was made from"),
        Some(b"ODTC") => return Some("it is a training checkpoint, not a model"),
        Some(b"TFL3") => return Some("it is a TensorFlow Lite model; convert it to ONNX first"),
        _ => {}
    }
    // A safetensors file starts with the length of its JSON header.
    if bytes.get(8) == Some(&b'{') && bytes.get(4..8) == Some(&[0; 4]) {
        return Some("it is a safetensors file, which has tensors but no graph");
    }
    let start = &bytes[..bytes.len().min(256)];
    let text = match std::str::from_utf8(start) {
        Ok(_) => true,
        // The cut after 256 bytes may split a character.
        Err(error) => error.error_len().is_none(),
    };
    let printed = |&byte: &u8| byte >= 0x20 && byte != 0x7f || matches!(byte, b'\n' | b'\r' | b'\t');
    (text && start.iter().all(printed)).then_some("it looks like text")
}
