//! Errors of reading and writing, with complete sentences as messages.

use std::io;
use std::path::PathBuf;

use ortrain_graph::TensorError;

/// Error of reading or writing a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No file exists at the path.
    #[error("there is no file {}", path.display())]
    Missing {
        /// Path of the file.
        path: PathBuf,
    },
    /// The path is a folder.
    #[error("{} is a folder, but a checkpoint is a file", path.display())]
    Directory {
        /// Path of the folder.
        path: PathBuf,
    },
    /// The path is neither file nor folder, but a device or a pipe.
    #[error("{} is not a regular file", path.display())]
    NotAFile {
        /// Path of the device or pipe.
        path: PathBuf,
    },
    /// The operating system reported an error.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// Attempted action, as a verb.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The path does not name a file.
    #[error("{:?} is not the path of a file", path)]
    NoName {
        /// The path.
        path: PathBuf,
    },
    /// A file cannot be written to the path.
    #[error(transparent)]
    Unwritable(ortrain_files::Error),
    /// Error in the content of a file. [`Error::content`] returns the error without the file.
    #[error("{}: {source}", path.display())]
    InFile {
        /// Path of the file.
        path: PathBuf,
        /// Error in its content.
        source: Box<Error>,
    },

    /// The file is empty.
    #[error("the checkpoint is empty")]
    Empty,
    /// The identifier is missing.
    #[error(
        "this is not a checkpoint: bytes 4 to 7 are not the identifier ODTC; generate_artifacts and save_checkpoint \
         write checkpoints"
    )]
    NotACheckpoint,
    /// The bytes look like safetensors.
    #[error("this looks like a safetensors file, not a checkpoint; load it with load_safetensors")]
    LooksLikeSafetensors,
    /// An offset or length points past the end.
    #[error("the checkpoint is cut short or damaged: an offset points past its end ({0})")]
    CutShort(#[source] planus::Error),
    /// The `FlatBuffers` structure is broken.
    #[error("the checkpoint is damaged ({0})")]
    Malformed(#[source] planus::Error),
    /// The checksum trailer is missing, although the file was written with one.
    #[error("the checkpoint is cut short, extended or damaged: the checksum at its end is missing")]
    NoTrailer,
    /// The checksum does not match.
    #[error("the checkpoint is damaged: its checksum is {found:08x}, expected {expected:08x}")]
    Damaged {
        /// Checksum in the trailer.
        expected: u32,
        /// Checksum of the bytes in the file.
        found: u32,
    },
    /// The version of the format is not supported.
    #[error("checkpoint version {0} is not supported; the supported version is 2")]
    Version(i32),
    /// A mandatory part is missing.
    #[error("the checkpoint has no {0}")]
    NoPart(&'static str),
    /// The file refers to far more bytes than it holds, so its parts overlap.
    #[error(
        "the checkpoint is damaged: its {length} bytes describe more data than they can hold, so parts overlap"
    )]
    Overlapping {
        /// Number of bytes of the file and its `.data` file together.
        length: u64,
    },
    /// A table has no name.
    #[error("the checkpoint holds a {0} without a name")]
    Unnamed(&'static str),

    /// A tensor holds strings.
    #[error("tensor '{name}' holds strings; only tensors of numbers can be trained or saved")]
    Strings {
        /// Name of the tensor.
        name: String,
    },
    /// The element type of a tensor is not supported.
    #[error("tensor '{name}' has the element type {dtype}, which is not supported")]
    UnsupportedType {
        /// Name of the tensor.
        name: String,
        /// Element type, by its name in the file's format.
        dtype: String,
    },
    /// A dimension is negative, or too large to address.
    #[error(
        "tensor '{name}' has the shape {dims:?}; dimensions must be at least 0 and small enough to address"
    )]
    BadDims {
        /// Name of the tensor.
        name: String,
        /// Dimensions of the tensor.
        dims: Vec<i64>,
    },
    /// Shape, element type and number of bytes contradict each other.
    #[error("tensor '{name}' is damaged: {source}")]
    Tensor {
        /// Name of the tensor.
        name: String,
        /// The contradiction.
        source: TensorError,
    },

    /// A buffer refers to a `.data` file, but has no path to find it.
    #[error(
        "the tensors of the checkpoint are in a .data file beside it; load the checkpoint from its path, not from a \
         buffer"
    )]
    ExternalFromBuffer,
    /// The `.data` file is missing.
    #[error("the tensors of the checkpoint are in {}, but this file does not exist", path.display())]
    ExternalMissing {
        /// Path of the `.data` file.
        path: PathBuf,
    },
    /// The `.data` file was not written with this checkpoint, or is damaged.
    #[error("{} is damaged or belongs to another checkpoint: its checksum does not match", path.display())]
    ExternalDamaged {
        /// Path of the `.data` file.
        path: PathBuf,
    },
    /// A tensor refers to a `.data` file, but the checkpoint declares no such file.
    #[error("tensor '{name}' is in a .data file, but the checkpoint declares no .data file")]
    ExternalUnannounced {
        /// Name of the tensor.
        name: String,
    },
    /// The range of a tensor is outside the `.data` file.
    #[error(
        "tensor '{name}' takes {length} bytes at offset {offset} of the .data file, which has {size} bytes"
    )]
    ExternalRange {
        /// Name of the tensor.
        name: String,
        /// First byte of the range.
        offset: i64,
        /// Number of bytes of the tensor.
        length: usize,
        /// Number of bytes of the `.data` file.
        size: usize,
    },

    /// A name occurs twice in the data to be written.
    #[error("two {what} have the name '{name}'")]
    DuplicateName {
        /// Kind of the objects with this name, in the plural.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// The data to be written does not fit into one buffer.
    #[error(
        "the checkpoint takes about {bytes} bytes, but a buffer holds at most 2 GiB; save it to a path, which puts \
         its tensors into a .data file"
    )]
    TooLarge {
        /// Estimated number of bytes.
        bytes: u64,
    },

    /// A safetensors file is invalid.
    #[error("this is not a valid safetensors file: {0}")]
    Safetensors(#[source] safetensors::SafeTensorError),
    /// Tensors cannot be written as safetensors.
    #[error("the tensors cannot be written as safetensors: {0}")]
    SafetensorsWrite(#[source] safetensors::SafeTensorError),
}

impl Error {
    /// Returns the innermost error, without the path of the file.
    #[must_use]
    pub fn content(&self) -> &Error {
        match self {
            Error::InFile { source, .. } => source.content(),
            error => error,
        }
    }
}

impl From<ortrain_files::Error> for Error {
    fn from(error: ortrain_files::Error) -> Error {
        match error {
            ortrain_files::Error::NoName { path } => Error::NoName { path },
            ortrain_files::Error::Directory { path } => Error::Directory { path },
            ortrain_files::Error::Io { action, path, source } => Error::Io { action, path, source },
            error => Error::Unwritable(error),
        }
    }
}

impl From<planus::Error> for Error {
    fn from(error: planus::Error) -> Error {
        use planus::errors::ErrorKind;
        match error.error_kind {
            ErrorKind::InvalidOffset | ErrorKind::InvalidLength => Error::CutShort(error),
            _ => Error::Malformed(error),
        }
    }
}
