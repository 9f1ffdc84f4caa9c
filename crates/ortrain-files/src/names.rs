//! Targets of paths with symbolic links, and names of temporary files beside them.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// Maximum length of a file name in common file systems, in bytes.
const LONGEST_NAME: usize = 255;
/// Maximum length of a suffix in bytes: process ID, file counter, dots and `tmp`, or a checksum.
const LONGEST_SUFFIX: usize = 40;
/// Maximum number of symbolic links that are followed; the limit of Linux.
const LINKS: usize = 40;

/// Returns the folder that contains a file.
#[must_use]
pub fn folder(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Returns the first part of names beside a file: the file's name, or a hash if the name is too long for a suffix.
pub(crate) fn stem(name: &OsStr) -> OsString {
    if name.len() + LONGEST_SUFFIX <= LONGEST_NAME {
        return name.to_owned();
    }
    // FNV-1a gives the same hash in every process, so that another process can sweep the file.
    let hash = name.as_encoded_bytes().iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("~{hash:016x}").into()
}

/// Returns a name beside a file: `<name>.<suffix>`. A hash replaces a name that is too long for the suffix.
///
/// ```
/// use std::path::Path;
/// use ortrain_files::sibling_path;
///
/// assert_eq!(sibling_path(Path::new("a/c"), "12ab"), Path::new("a/c.12ab"));
/// let long = "x".repeat(250);
/// assert!(sibling_path(Path::new(&long), "12ab").as_os_str().len() < 255);
/// ```
#[must_use]
pub fn sibling_path(path: &Path, suffix: &str) -> PathBuf {
    let mut name = stem(path.file_name().unwrap_or_default());
    name.push(".");
    name.push(suffix);
    path.with_file_name(name)
}

/// Returns the target of a path after following symbolic links, even if no file exists there yet. If the target is
/// unknown, returns the path itself.
#[must_use]
pub fn resolved(path: &Path) -> PathBuf {
    destination_of(path).unwrap_or_else(|_| path.to_owned())
}

/// Returns the destination of a file that is written to `path`: the path, or the target of a symbolic link.
///
/// # Errors
/// Fails if a regular file cannot be written there.
pub(crate) fn destination_of(path: &Path) -> Result<PathBuf> {
    let named = || path.to_owned();
    let text = path.as_os_str().as_encoded_bytes();
    let ends_in_folder = text.ends_with(b"/") || text.ends_with(b"/.") || text.ends_with(b"..");
    if path.file_name().is_none() && !path.is_dir() || text.is_empty() {
        return Err(Error::NoName { path: named() });
    }
    let refused = |source| Error::Io { action: "write", path: named(), source };
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => Err(Error::Directory { path: named() }),
        Ok(metadata) if !metadata.is_file() => {
            Err(Error::NotRegular { path: named(), kind: kind(&metadata) })
        }
        Ok(_) => match fs::symlink_metadata(path) {
            Ok(itself) if itself.is_symlink() => fs::canonicalize(path).map_err(refused),
            _ => Ok(named()),
        },
        Err(_) if ends_in_folder => Err(Error::NoName { path: named() }),
        Err(missing) if missing.kind() == io::ErrorKind::NotFound => resolve_links(path),
        Err(source) => match fs::symlink_metadata(path) {
            // The standard library has no error kind for a loop of symbolic links.
            Ok(itself) if itself.is_symlink() => resolve_links(path),
            _ => Err(refused(source)),
        },
    }
}

/// Follows a chain of symbolic links to a file that does not exist yet.
fn resolve_links(path: &Path) -> Result<PathBuf> {
    let mut resolved = path.to_owned();
    for _ in 0..=LINKS {
        match fs::read_link(&resolved) {
            Ok(next) => resolved = folder(&resolved).join(next),
            Err(_) if resolved.file_name().is_none() => return Err(Error::NoName { path: path.to_owned() }),
            Err(_) => return Ok(resolved),
        }
    }
    Err(Error::Loop { path: path.to_owned() })
}

/// Returns the kind of a path that is neither a regular file nor a folder.
fn kind(metadata: &fs::Metadata) -> &'static str {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        let kind = metadata.file_type();
        if kind.is_fifo() {
            return "a pipe";
        }
        if kind.is_socket() {
            return "a socket";
        }
    }
    let _ = metadata;
    "a device"
}
