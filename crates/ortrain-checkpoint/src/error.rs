//! What can go wrong, in sentences.

use std::io;
use std::path::PathBuf;

use ortrain_graph::TensorError;

/// Why a file cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no file at the path.
    #[error("there is no file {}", path.display())]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// The path is a folder.
    #[error("{} is a folder, but a checkpoint is a file", path.display())]
    Directory {
        /// The path.
        path: PathBuf,
    },
    /// The path is neither file nor folder: a device or a pipe.
    #[error("{} is not a regular file", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried, as a verb.
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A path that names no file.
    #[error("{:?} is not the path of a file", path)]
    NoName {
        /// The path.
        path: PathBuf,
    },
    /// The path is no place for a file of ours.
    #[error(transparent)]
    Unwritable(ortrain_files::Error),
    /// What is wrong with the content of a file. [`Error::content`] reaches through.
    #[error("{}: {source}", path.display())]
    InFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<Error>,
    },

    /// The file has no bytes.
    #[error("the checkpoint is empty")]
    Empty,
    /// The identifier is not there.
    #[error(
        "this is not a checkpoint, which has the identifier ODTC in bytes 4 to 7; generate_artifacts and save_checkpoint \
         write checkpoints"
    )]
    NotACheckpoint,
    /// These are safetensors.
    #[error("this is not a checkpoint but looks like safetensors, which load_safetensors reads")]
    LooksLikeSafetensors,
    /// Something is said to lie past the end.
    #[error("the checkpoint points past its end, so it was cut short or is damaged ({0})")]
    CutShort(#[source] planus::Error),
    /// The `FlatBuffers` structure is broken.
    #[error("the checkpoint is damaged ({0})")]
    Malformed(#[source] planus::Error),
    /// The checksum trailer that was written is gone.
    #[error(
        "the checksum at the end of the checkpoint is missing, so it was cut short, extended or is damaged"
    )]
    NoTrailer,
    /// The checksum does not match.
    #[error(
        "the checkpoint is damaged: its checksum is {found:08x} but was {expected:08x} when it was written"
    )]
    Damaged {
        /// The checksum that was written.
        expected: u32,
        /// The checksum of the bytes there are.
        found: u32,
    },
    /// The format has another version.
    #[error("checkpoint version {0} is not supported, only version 2 is")]
    Version(i32),
    /// A part that every checkpoint has is not there.
    #[error("the checkpoint has no {0}")]
    NoPart(&'static str),
    /// Far more is referenced than the file holds: its parts overlap.
    #[error("the checkpoint refers to far more data than its {length} bytes hold, so its parts overlap")]
    Overlapping {
        /// Bytes of the file and its `.data` together.
        length: u64,
    },
    /// A table without its name.
    #[error("the checkpoint holds a {0} without a name")]
    Unnamed(&'static str),

    /// A tensor of strings.
    #[error("tensor '{name}' holds strings, but only tensors of numbers can be trained or kept")]
    Strings {
        /// The tensor.
        name: String,
    },
    /// A tensor of a type that is not supported.
    #[error("tensor '{name}' has the element type {dtype}, which is not supported")]
    UnsupportedType {
        /// The tensor.
        name: String,
        /// The type, by the name its format gives it.
        dtype: String,
    },
    /// A dimension below zero.
    #[error(
        "tensor '{name}' has the shape {dims:?}, but no dimension can be negative or too large to address"
    )]
    BadDims {
        /// The tensor.
        name: String,
        /// Its dimensions.
        dims: Vec<i64>,
    },
    /// Shape, type and bytes do not fit.
    #[error("tensor '{name}' is damaged: {source}")]
    Tensor {
        /// The tensor.
        name: String,
        /// What does not fit.
        source: TensorError,
    },

    /// A buffer cannot say where its `.data` lies.
    #[error(
        "the checkpoint keeps its tensors in a .data file beside it: load it from its path, not from a buffer"
    )]
    ExternalFromBuffer,
    /// The `.data` file is not there.
    #[error("the checkpoint keeps its tensors in {}, but there is no such file", path.display())]
    ExternalMissing {
        /// The path of the `.data` file.
        path: PathBuf,
    },
    /// The `.data` file is not the one that was written with the checkpoint.
    #[error("{} is damaged or belongs to another checkpoint: its checksum does not match", path.display())]
    ExternalDamaged {
        /// The path of the `.data` file.
        path: PathBuf,
    },
    /// A tensor lies in a `.data` file, but the checkpoint says there is none.
    #[error("tensor '{name}' lies in a .data file, but the checkpoint says that it has none")]
    ExternalUnannounced {
        /// The tensor.
        name: String,
    },
    /// A tensor lies outside the `.data` file.
    #[error(
        "tensor '{name}' takes {length} bytes at offset {offset} of the .data file, which has {size} bytes"
    )]
    ExternalRange {
        /// The tensor.
        name: String,
        /// Where it should start.
        offset: i64,
        /// Bytes it needs.
        length: usize,
        /// Bytes of the `.data` file.
        size: usize,
    },

    /// A name occurs twice in what is to be written.
    #[error("the name '{name}' is given to two {what}")]
    DuplicateName {
        /// What kinds of things, in the plural.
        what: &'static str,
        /// The name.
        name: String,
    },
    /// What is to be written does not fit one buffer.
    #[error(
        "the checkpoint would take about {bytes} bytes, more than the 2 GiB that fit one buffer; \
         saved to a path, its tensors go to a .data file"
    )]
    TooLarge {
        /// Bytes it would take.
        bytes: u64,
    },

    /// A safetensors file is broken.
    #[error("this is not a sound safetensors file: {0}")]
    Safetensors(#[source] safetensors::SafeTensorError),
    /// Tensors cannot be written as safetensors.
    #[error("the tensors cannot be written as safetensors: {0}")]
    SafetensorsWrite(#[source] safetensors::SafeTensorError),
}

impl Error {
    /// The error itself, without the file it was found in.
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
