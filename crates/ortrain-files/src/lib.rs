//! Files that are there entirely or not at all.
//!
//! [`Staged`] is a file that is written beside its place and gets there by one rename: whoever opens the path finds the
//! old file or the new one, whole, whatever happens in between.
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
//! file.place()?;
//! assert_eq!(std::fs::read(&path).unwrap(), b"hello");
//! # Ok::<(), ortrain_files::Error>(())
//! ```
//!
//! - **The mode** of the file that is replaced stays, and so do its owner and its group as far as the system lets them. A
//!   file that was not there gets what the process gives to new files.
//! - **Symbolic links** are followed: the file that a link leads to is replaced, or made, and the link stays.
//! - **What is no regular file** (a device, a pipe, a folder) is refused.
//! - **What a killed process left** is removed when a file is next written to the same path. A file that is being written
//!   is locked, so that it is known from what was left.
//! - **Names** of files that are being written fit wherever the name of the file itself fits.
#![forbid(unsafe_code)]

mod error;
pub mod faults;
mod names;
mod staged;

pub use error::{Error, Result};
pub use names::{beside, folder, resolved};
pub use staged::{FolderLock, Staged, flush_folder, lock_folder, sweep, sweep_waiting};
