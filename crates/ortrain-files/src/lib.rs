//! Atomic writes: a file is complete or unchanged.
//!
//! [`Staged`] is a file that is written beside its destination and moved there by one rename. A reader of the path
//! finds the complete old file or the complete new one at every moment.
//!
//! ```
//! use ortrain_files::Staged;
//!
//! # let folder = tempfile::tempdir().unwrap();
//! # let path = folder.path().join("greeting");
//! let mut file = Staged::beside(&path)?;
//! file.append(b"hello")?;
//! assert!(!path.exists());
//! file.sync()?;
//! file.persist()?;
//! assert_eq!(std::fs::read(&path).unwrap(), b"hello");
//! # Ok::<(), ortrain_files::Error>(())
//! ```
//!
//! - **Mode:** the mode of the replaced file is preserved, and so are its owner and group as far as the system allows
//!   it. A file without a predecessor gets the process's defaults for new files.
//! - **Symbolic links** are followed: the target of the link is replaced or created, and the link stays.
//! - **Devices, pipes, sockets and folders** are refused.
//! - **Temporary files of killed processes** are removed when a file is next written to the same path. A file that is
//!   being written is locked, to tell it from such a leftover.
//! - **Names** of temporary files fit wherever the name of the file itself fits.
#![forbid(unsafe_code)]

mod error;
pub mod faults;
mod names;
mod staged;

pub use error::{Error, Result};
pub use names::{folder, resolved, sibling_path};
pub use staged::{FolderLock, Staged, flush_folder, lock_folder, sweep, sweep_waiting};
