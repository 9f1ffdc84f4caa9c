//! Errors of writing a file, with complete sentences as messages.

use std::io;
use std::path::PathBuf;

/// Error of writing a file. The old file is unchanged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The path does not name a file.
    #[error("{:?} is not the path of a file", path)]
    NoName {
        /// The path.
        path: PathBuf,
    },
    /// The path is a folder.
    #[error("cannot write {}: it is a folder; name a file in it", path.display())]
    Directory {
        /// Path of the folder.
        path: PathBuf,
    },
    /// The path is a device, a pipe or a socket. Replacing it would take it away from all other users.
    #[error("cannot write {}: it is {kind}, and only regular files are replaced; name another file", path.display())]
    NotRegular {
        /// Path of the device, pipe or socket.
        path: PathBuf,
        /// Kind of the file at the path, with its article.
        kind: &'static str,
    },
    /// The path is a symbolic link that leads back to itself.
    #[error("cannot write {}: it is a symbolic link that leads back to itself; remove it or name another file", path.display())]
    Loop {
        /// Path of the link.
        path: PathBuf,
    },
    /// The operating system reported an error.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// Failed action, as a verb.
        action: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// Result of a step on the disk.
pub type Result<T> = std::result::Result<T, Error>;
