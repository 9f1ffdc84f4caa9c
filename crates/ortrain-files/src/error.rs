//! Why a file cannot be written, in sentences.

use std::io;
use std::path::PathBuf;

/// Why a file cannot be written. What was there before is still there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A path that names no file.
    #[error("{:?} is not the path of a file", path)]
    NoName {
        /// The path.
        path: PathBuf,
    },
    /// The path is a folder.
    #[error("cannot write {}: it is a folder; name a file in it", path.display())]
    Directory {
        /// The path.
        path: PathBuf,
    },
    /// The path is a device, a pipe or a socket: to replace it would take it away from everybody else.
    #[error("cannot write {}: it is {kind}, and only regular files are replaced; name another file", path.display())]
    NotRegular {
        /// The path.
        path: PathBuf,
        /// The kind of thing at the path, with its article.
        kind: &'static str,
    },
    /// The path is a symbolic link without an end.
    #[error("cannot write {}: it is a symbolic link that leads back to itself; remove it or name another file", path.display())]
    Loop {
        /// The path.
        path: PathBuf,
    },
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// The action that failed, as a verb.
        action: &'static str,
        /// The path.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
}

/// The result of a step on the disk.
pub type Result<T> = std::result::Result<T, Error>;
