//! What can be wrong with a model file, said so that its owner knows what to do.

use std::io;
use std::path::PathBuf;

/// Why a model could not be read, resolved or written.
///
/// Texts name the file as the caller named it, and the tensor as the model names it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OnnxError {
    /// The operating system refused to read a file.
    #[error("cannot read {}: {error}", .path.display())]
    Read {
        /// The file, as the caller or the model named it.
        path: PathBuf,
        /// What the operating system said.
        #[source]
        error: io::Error,
    },

    /// The operating system refused to write a file; under its name is the old file or the new one, never a part.
    #[error("cannot write {}: {error}", .path.display())]
    Write {
        /// The file, as the caller named it.
        path: PathBuf,
        /// What the operating system said.
        #[source]
        error: io::Error,
    },

    /// The file holds no bytes.
    #[error("{file} is empty; an ONNX model was expected")]
    Empty {
        /// The file, or what stands for it.
        file: String,
    },

    /// The bytes are not an ONNX model at all.
    #[error("{file} is not an ONNX model: {reason}")]
    NotAModel {
        /// The file, or what stands for it.
        file: String,
        /// What it seems to be.
        reason: &'static str,
    },

    /// The file ends before its contents do.
    #[error(
        "{file} is cut short: {place}, at byte {offset} of {size}, is longer than what is left; \
         was the file copied or downloaded completely?"
    )]
    CutShort {
        /// The file, or what stands for it.
        file: String,
        /// The field that does not fit.
        place: String,
        /// Where the field's length stands.
        offset: usize,
        /// How many bytes there are.
        size: usize,
    },

    /// The file contradicts the ONNX format.
    #[error("{file} is damaged: {what} (at byte {offset})")]
    Malformed {
        /// The file, or what stands for it.
        file: String,
        /// Where.
        offset: usize,
        /// What is wrong there.
        what: String,
    },

    /// A text in the file is not UTF-8, or another value cannot be decoded.
    #[error("{file} is damaged: {reason}")]
    Decode {
        /// The file, or what stands for it.
        file: String,
        /// What the decoder said.
        reason: String,
    },

    /// Messages nested deeper than any reader of protobuf accepts.
    #[error("{file} nests its messages more than {limit} deep; subgraphs within subgraphs must be fewer")]
    TooDeep {
        /// The file, or what stands for it.
        file: String,
        /// The greatest depth that is read.
        limit: u32,
    },

    /// The file would need far more memory than its size justifies.
    #[error(
        "{file} has {size} bytes but describes {needed} bytes of nodes and names, which no exporter does; it was refused"
    )]
    Bomb {
        /// The file, or what stands for it.
        file: String,
        /// Bytes of the file.
        size: usize,
        /// Bytes it would take when decoded.
        needed: u64,
    },

    /// A dimension is below zero, or larger than this machine can address.
    #[error(
        "{tensor} has the dimension {value} on axis {axis}; a stored tensor has dimensions of zero or more"
    )]
    Dimension {
        /// The tensor.
        tensor: String,
        /// The axis.
        axis: usize,
        /// The value found.
        value: i64,
    },

    /// The product of the dimensions cannot be addressed.
    #[error("{tensor} has the dimensions {dims:?}, which are more elements than can be addressed")]
    TooManyElements {
        /// The tensor.
        tensor: String,
        /// Its dimensions, the first few.
        dims: Vec<i64>,
    },

    /// An element type that is not a number ortrain stores.
    #[error(
        "{tensor} has the element type {element_type}; supported are FLOAT, DOUBLE, FLOAT16, BFLOAT16, BOOL, \
         INT8, INT16, INT32, INT64, UINT8, UINT16, UINT32 and UINT64"
    )]
    ElementType {
        /// The tensor.
        tensor: String,
        /// The type by its ONNX name.
        element_type: String,
    },

    /// The data does not have the size that dimensions and type ask for.
    #[error("{tensor} should have {expected} {unit} by its dimensions and type, but {field} holds {found}")]
    DataLength {
        /// The tensor.
        tensor: String,
        /// The field of the message that holds the data.
        field: &'static str,
        /// What is counted: `bytes` or `elements`.
        unit: &'static str,
        /// How many there should be.
        expected: usize,
        /// How many there are.
        found: usize,
    },

    /// The data is given in more than one field.
    #[error("{tensor} holds data in both {first} and {second}; only one may be used")]
    DataTwice {
        /// The tensor.
        tensor: String,
        /// One field with data.
        first: &'static str,
        /// Another.
        second: &'static str,
    },

    /// The data is in a field that is not used for its element type.
    #[error("{tensor} has the element type {element_type}, whose values cannot be in {field}")]
    DataField {
        /// The tensor.
        tensor: String,
        /// The type by its ONNX name.
        element_type: &'static str,
        /// The field with data.
        field: &'static str,
    },

    /// A value does not fit the element type.
    #[error("{tensor} holds the value {value} at element {index}, which does not fit {element_type}")]
    ValueRange {
        /// The tensor.
        tensor: String,
        /// The type by its ONNX name.
        element_type: &'static str,
        /// Which element.
        index: usize,
        /// The value found.
        value: i128,
    },

    /// The tensor is stored in segments, which no version of ONNX ever put to use.
    #[error("{tensor} is stored in segments, which are not supported")]
    Segments {
        /// The tensor.
        tensor: String,
    },

    /// The model was not loaded from a folder, so external data cannot be found.
    #[error(
        "{tensor} has its data in the file `{location}`, but the model was given as bytes; \
         load it from its path, name its folder, or provide the file's bytes"
    )]
    NoFolder {
        /// The tensor.
        tensor: String,
        /// The file as the model names it.
        location: String,
    },

    /// The location of external data is not a plain path inside the model's folder.
    #[error("{tensor} has its data in the file `{location}`, which is refused: {reason}")]
    Location {
        /// The tensor.
        tensor: String,
        /// The file as the model names it.
        location: String,
        /// Why.
        reason: &'static str,
    },

    /// The file with external data is not there.
    #[error(
        "{tensor} has its data in the file `{location}`, which cannot be read: {error}; \
         it must lie beside the model"
    )]
    ExternalFile {
        /// The tensor.
        tensor: String,
        /// The file as the model names it.
        location: String,
        /// What the operating system said.
        #[source]
        error: io::Error,
    },

    /// An entry of the external data is missing or not a number.
    #[error("{tensor} has a wrong description of its external data: {reason}")]
    ExternalEntry {
        /// The tensor.
        tensor: String,
        /// What is wrong.
        reason: String,
    },

    /// The external data lies beyond the end of its file.
    #[error(
        "{tensor} should have {length} bytes at offset {offset} of the file `{location}`, which has only {size} bytes; \
         was it copied or downloaded completely?"
    )]
    ExternalRange {
        /// The tensor.
        tensor: String,
        /// The file as the model names it.
        location: String,
        /// The first byte.
        offset: u64,
        /// The number of bytes.
        length: u64,
        /// The size of the file.
        size: u64,
    },

    /// A sparse tensor contradicts itself.
    #[error("{tensor} is a damaged sparse tensor: {reason}")]
    Sparse {
        /// The tensor of its values.
        tensor: String,
        /// What is wrong.
        reason: String,
    },

    /// A sparse tensor would be too large when written out.
    #[error("{tensor} is sparse and needs {needed} bytes when written out, more than the limit of {limit}")]
    SparseTooLarge {
        /// The tensor of its values.
        tensor: String,
        /// The bytes of the dense tensor.
        needed: usize,
        /// The bytes allowed.
        limit: usize,
    },

    /// Memory for a payload could not be had.
    #[error("{tensor} needs {bytes} bytes of memory, which could not be allocated")]
    OutOfMemory {
        /// The tensor.
        tensor: String,
        /// The bytes asked for.
        bytes: usize,
    },

    /// A protobuf message cannot be larger than 2 GiB.
    #[error(
        "the model takes {size} bytes, but one message of ONNX holds at most 2 GiB; only written to a path, with its \
         weights in a file beside it, can a model be larger"
    )]
    TooLarge {
        /// The bytes the message would take.
        size: usize,
    },

    /// What is left of a model without its weights is larger than 2 GiB.
    #[error(
        "{} takes {size} bytes without the weights that lie in the file beside it, but one message of ONNX holds at most \
         2 GiB; its nodes hold large constants: make initializers of them", .path.display()
    )]
    TooLargeInside {
        /// The file that was to be written.
        path: PathBuf,
        /// The bytes the message would take.
        size: usize,
    },

    /// The path to save to is no place for a file.
    #[error(transparent)]
    Unwritable(ortrain_files::Error),

    /// The path to save to does not name a file.
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

/// How much of a stranger's text is repeated in a message.
const SHOWN: usize = 120;

/// A stranger's text, made safe to show: escaped, and not longer than a line or two.
pub(crate) fn shown(text: &str) -> String {
    let mut out: String = text.chars().take(SHOWN).flat_map(char::escape_debug).collect();
    if text.chars().nth(SHOWN).is_some() {
        out.push('…');
    }
    out
}
