//! Errors of model files. Their messages tell the owner of the file how to repair it.

use std::io;
use std::path::PathBuf;

use crate::TensorProto;

/// Error of reading, resolving or writing a model.
///
/// Messages name the file as the caller named it, and the tensor as the model names it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OnnxError {
    /// The operating system reported an error while reading a file.
    #[error("cannot read {}: {error}", .path.display())]
    Read {
        /// Path of the file, as the caller or the model named it.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        error: io::Error,
    },

    /// The operating system reported an error while writing a file. The path has the complete old or new file.
    #[error("cannot write {}: {error}", .path.display())]
    Write {
        /// Path of the file, as the caller named it.
        path: PathBuf,
        /// Error of the operating system.
        #[source]
        error: io::Error,
    },

    /// The file is empty.
    #[error("{file} is empty; expected an ONNX model")]
    Empty {
        /// Name of the file, or a description of the bytes.
        file: String,
    },

    /// The bytes are not an ONNX model.
    #[error("{file} is not an ONNX model: {reason}")]
    NotAModel {
        /// Name of the file, or a description of the bytes.
        file: String,
        /// Likely format of the bytes.
        reason: &'static str,
    },

    /// The file is truncated.
    #[error(
        "{file} is cut short: {field}, at byte {offset} of {size}, is longer than the rest of the file; was it \
         copied or downloaded completely?"
    )]
    CutShort {
        /// Name of the file, or a description of the bytes.
        file: String,
        /// Field that does not fit.
        field: String,
        /// Offset of the field's length.
        offset: usize,
        /// Number of bytes of the file.
        size: usize,
    },

    /// The file contradicts the ONNX format.
    #[error("{file} is damaged: {what} (at byte {offset})")]
    Malformed {
        /// Name of the file, or a description of the bytes.
        file: String,
        /// Offset of the contradiction.
        offset: usize,
        /// Description of the contradiction.
        what: String,
    },

    /// A text in the file is not UTF-8, or another value cannot be decoded.
    #[error("{file} is damaged: {reason}")]
    Decode {
        /// Name of the file, or a description of the bytes.
        file: String,
        /// Message of the decoder.
        reason: String,
    },

    /// Messages are nested deeper than any reader of protobuf accepts.
    #[error("{file} nests messages more than {limit} levels deep; nest fewer subgraphs")]
    TooDeep {
        /// Name of the file, or a description of the bytes.
        file: String,
        /// Maximum depth.
        limit: u32,
    },

    /// The decoded file would need far more memory than its size justifies.
    #[error(
        "{file} is refused: its {size} bytes describe {needed} bytes of nodes and names, which no exporter writes"
    )]
    Bomb {
        /// Name of the file, or a description of the bytes.
        file: String,
        /// Number of bytes of the file.
        size: usize,
        /// Number of bytes of the decoded file.
        needed: u64,
    },

    /// A dimension is negative, or larger than this machine can address.
    #[error("{tensor} has the dimension {value} on axis {axis}; dimensions must be at least 0")]
    Dimension {
        /// Label of the tensor.
        tensor: String,
        /// Axis of the dimension.
        axis: usize,
        /// Value of the dimension.
        value: i64,
    },

    /// The product of the dimensions cannot be addressed.
    #[error("{tensor} has the dimensions {dims:?}, which are too many elements to address")]
    TooManyElements {
        /// Label of the tensor.
        tensor: String,
        /// First dimensions of the tensor, at most 16.
        dims: Vec<i64>,
    },

    /// The element type is not one of the numbers that ortrain stores.
    #[error(
        "{tensor} has the element type {element_type}; supported are FLOAT, DOUBLE, FLOAT16, BFLOAT16, BOOL, \
         INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32 and UINT64"
    )]
    ElementType {
        /// Label of the tensor.
        tensor: String,
        /// ONNX name of the element type.
        element_type: String,
    },

    /// The size of the data does not match dimensions and element type.
    #[error("{tensor} should have {expected} {unit} by its dimensions and type, but {field} holds {found}")]
    DataLength {
        /// Label of the tensor.
        tensor: String,
        /// Field of the message that holds the data.
        field: &'static str,
        /// Unit of the numbers: `bytes` or `elements`.
        unit: &'static str,
        /// Required number of units.
        expected: usize,
        /// Actual number of units.
        found: usize,
    },

    /// More than one field holds data.
    #[error("{tensor} holds data in both {first} and {second}; only one may be used")]
    DataTwice {
        /// Label of the tensor.
        tensor: String,
        /// A field with data.
        first: &'static str,
        /// Another field with data.
        second: &'static str,
    },

    /// The data is in a field that is not used for its element type.
    #[error("{tensor} has the element type {element_type}, whose values cannot be in {field}")]
    DataField {
        /// Label of the tensor.
        tensor: String,
        /// ONNX name of the element type.
        element_type: &'static str,
        /// Field with data.
        field: &'static str,
    },

    /// A value does not fit the element type.
    #[error("{tensor} holds the value {value} at element {index}, which does not fit {element_type}")]
    ValueRange {
        /// Label of the tensor.
        tensor: String,
        /// ONNX name of the element type.
        element_type: &'static str,
        /// Index of the element.
        index: usize,
        /// Value of the element.
        value: i128,
    },

    /// The tensor is stored in segments, which no version of ONNX has ever used.
    #[error("{tensor} is stored in segments, which are not supported")]
    Segments {
        /// Label of the tensor.
        tensor: String,
    },

    /// The model was not loaded from a folder, so that external data cannot be found.
    #[error(
        "{tensor} has its data in the file `{location}`, but the model was loaded from bytes; load it from its path, \
         name its folder, or provide the file's bytes"
    )]
    NoFolder {
        /// Label of the tensor.
        tensor: String,
        /// File, as the model names it.
        location: String,
    },

    /// The location of external data is not a plain path inside the model's folder.
    #[error("{tensor} has its data in the file `{location}`, which is refused: {reason}")]
    Location {
        /// Label of the tensor.
        tensor: String,
        /// File, as the model names it.
        location: String,
        /// Reason of the refusal.
        reason: &'static str,
    },

    /// The file with external data is missing or cannot be read.
    #[error(
        "{tensor} has its data in the file `{location}`, which cannot be read: {error}; it must be beside the model"
    )]
    ExternalFile {
        /// Label of the tensor.
        tensor: String,
        /// File, as the model names it.
        location: String,
        /// Error of the operating system.
        #[source]
        error: io::Error,
    },

    /// An entry of the external data is missing or not a number.
    #[error("{tensor} has an invalid description of its external data: {reason}")]
    ExternalEntry {
        /// Label of the tensor.
        tensor: String,
        /// Description of the wrong entry.
        reason: String,
    },

    /// The range of external data is beyond the end of its file.
    #[error(
        "{tensor} should have {length} bytes at offset {offset} of the file `{location}`, which has only {size} bytes; \
         was it copied or downloaded completely?"
    )]
    ExternalRange {
        /// Label of the tensor.
        tensor: String,
        /// File, as the model names it.
        location: String,
        /// First byte of the range.
        offset: u64,
        /// Number of bytes of the range.
        length: u64,
        /// Number of bytes of the file.
        size: u64,
    },

    /// A file with external data has another checksum than the model gives for it.
    #[error(
        "the file `{location}` with the external data of {tensor} has changed: its SHA-1 is {found}, and the model was \
         written for {expected}; bring back the file, or make the model again from the present file"
    )]
    Changed {
        /// Label of the tensor.
        tensor: String,
        /// File, as the model names it.
        location: String,
        /// Checksum in the model.
        expected: String,
        /// Checksum of the file.
        found: String,
    },

    /// A sparse tensor is inconsistent.
    #[error("{tensor} is a damaged sparse tensor: {reason}")]
    Sparse {
        /// Label of the tensor of its values.
        tensor: String,
        /// Description of the inconsistency.
        reason: String,
    },

    /// A sparse tensor is too large to convert to a dense one.
    #[error("{tensor} is sparse and needs {needed} bytes as a dense tensor, more than the limit of {limit}")]
    SparseTooLarge {
        /// Label of the tensor of its values.
        tensor: String,
        /// Number of bytes of the dense tensor.
        needed: usize,
        /// Maximum number of bytes.
        limit: usize,
    },

    /// Memory for a payload could not be allocated.
    #[error("{tensor} needs {bytes} bytes of memory, which could not be allocated")]
    OutOfMemory {
        /// Label of the tensor.
        tensor: String,
        /// Requested number of bytes.
        bytes: usize,
    },

    /// The protobuf message would be larger than 2 GiB.
    #[error(
        "the model takes {size} bytes, but an ONNX message holds at most 2 GiB; save it to a path, with its weights \
         in a file beside it"
    )]
    TooLarge {
        /// Number of bytes of the message.
        size: usize,
    },

    /// A model without its weights is larger than 2 GiB.
    #[error(
        "{} takes {size} bytes without the weights in the file beside it, but an ONNX message holds at most 2 GiB; \
         turn the large constants of its nodes into initializers", .path.display()
    )]
    TooLargeInside {
        /// Path of the model to be written.
        path: PathBuf,
        /// Number of bytes of the message.
        size: usize,
    },

    /// A file cannot be written to the path.
    #[error(transparent)]
    Unwritable(ortrain_files::Error),

    /// The path does not end in a file name.
    #[error("cannot save to {}: the path does not end in a file name", .path.display())]
    FileName {
        /// The path.
        path: PathBuf,
    },
}

impl From<ortrain_files::Error> for OnnxError {
    fn from(error: ortrain_files::Error) -> OnnxError {
        match error {
            ortrain_files::Error::NoName { path } => OnnxError::FileName { path },
            ortrain_files::Error::Io { path, source, .. } => OnnxError::Write { path, error: source },
            error => OnnxError::Unwritable(error),
        }
    }
}

/// Maximum number of characters of an untrusted text in a message.
const SHOWN: usize = 120;

/// Makes an untrusted text safe to show: escaped, and not longer than a line or two.
pub(crate) fn shown(text: &str) -> String {
    let mut out: String = text.chars().take(SHOWN).flat_map(char::escape_debug).collect();
    if text.chars().nth(SHOWN).is_some() {
        out.push('…');
    }
    out
}

/// Returns the label of a tensor in a message.
pub(crate) fn label(tensor: &TensorProto) -> String {
    label_of(&tensor.name)
}

/// Returns the label of a tensor with a name.
pub(crate) fn label_of(name: &str) -> String {
    if name.is_empty() { "a tensor without a name".to_owned() } else { format!("tensor `{}`", shown(name)) }
}
