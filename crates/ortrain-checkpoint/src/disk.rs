//! Reading of complete files.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Seek};
use std::path::{Path, PathBuf};

use bytes::Bytes;
#[cfg(target_os = "linux")]
use memmap2::Advice;
use memmap2::MmapMut;

use crate::{Error, Result};

/// Returns `path` with `suffix` appended to its last component.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    PathBuf::from(name)
}

/// Reads the content of a regular file.
pub(crate) fn read(path: &Path) -> Result<Bytes> {
    let fail = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => Error::Missing { path: path.to_owned() },
        io::ErrorKind::IsADirectory => Error::Directory { path: path.to_owned() },
        _ => Error::Io { action: "read", path: path.to_owned(), source },
    };
    if path.as_os_str().is_empty() {
        return Err(Error::NoName { path: path.to_owned() });
    }
    // Checked before opening, because opening a pipe waits for its writer.
    let kind = fs::metadata(path).map_err(fail)?;
    if kind.is_dir() {
        return Err(Error::Directory { path: path.to_owned() });
    }
    if !kind.is_file() {
        return Err(Error::NotAFile { path: path.to_owned() });
    }
    read_file(path).map_err(fail)
}

/// Size in bytes from which a file is read into large pages, where the system has them. The page faults of 4 KiB pages
/// would take longer than reading the file.
pub(crate) const LARGE: u64 = 4 << 20;

/// Reads the content of a file.
fn read_file(path: &Path) -> io::Result<Bytes> {
    let mut file = File::open(path)?;
    if let Some(length) = file.metadata().ok().map(|kind| kind.len()).filter(|&length| length >= LARGE)
        && let Ok(length) = usize::try_from(length)
        && let Ok(mut memory) = MmapMut::map_anon(length)
    {
        #[cfg(target_os = "linux")]
        let _ = memory.advise(Advice::HugePage);
        read_in_pieces(&mut file, &mut memory)?;
        if file.read(&mut [0])? == 0 {
            return Ok(Bytes::from_owner(memory));
        }
        // Another process appends to the file.
        file.rewind()?;
    }
    let mut content = Vec::new();
    file.read_to_end(&mut content)?;
    Ok(content.into())
}

/// Number of bytes that a thread reads at a time.
pub(crate) const PIECE: usize = 32 << 20;
/// Maximum number of threads that read one file. More threads are not faster.
const READERS: usize = 4;

/// Fills `memory` with the first bytes of a file, and leaves the file position after them.
///
/// Several threads read, because zero-filling fresh memory takes longer than copying the file from the page cache.
fn read_in_pieces(file: &mut File, memory: &mut [u8]) -> io::Result<()> {
    #[cfg(unix)]
    if memory.len() > PIECE {
        use std::os::unix::fs::FileExt;
        use std::sync::{Mutex, PoisonError};
        use std::{panic, thread};

        let bytes = memory.len();
        let readers = bytes.div_ceil(PIECE).min(READERS);
        let readers = thread::available_parallelism().map_or(1, |cores| readers.min(cores.get()));
        let shared = &*file;
        let pieces = Mutex::new(memory.chunks_mut(PIECE).enumerate());
        let next = || pieces.lock().unwrap_or_else(PoisonError::into_inner).next();
        let read = || -> io::Result<()> {
            while let Some((index, piece)) = next() {
                shared.read_exact_at(piece, (index * PIECE) as u64)?;
            }
            Ok(())
        };
        thread::scope(|scope| {
            // If the system refuses a thread, this thread reads the remaining pieces.
            let start = |_| thread::Builder::new().spawn_scoped(scope, read).ok();
            let others: Vec<_> = (1..readers).filter_map(start).collect();
            let done = others
                .into_iter()
                .map(|other| other.join().unwrap_or_else(|panic| panic::resume_unwind(panic)));
            done.fold(read(), io::Result::and)
        })?;
        file.seek(io::SeekFrom::Start(bytes as u64))?;
        return Ok(());
    }
    file.read_exact(memory)
}
