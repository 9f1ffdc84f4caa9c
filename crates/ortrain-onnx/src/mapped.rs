//! Memory maps of files, for callers that request them. This is the only `unsafe` code of this crate.

use std::fs::File;
use std::io;

use bytes::Bytes;
use memmap2::Mmap;

/// Maps `file` as private, read-only bytes. The map lives as long as any range of the bytes.
///
/// # Contract
///
/// Until the last range is dropped, no process writes to the file or truncates it. Neither the compiler nor this crate
/// can check this. The documentation of [`Storage::Mapped`](crate::Storage::Mapped), the only way to call this
/// function, passes the contract on to the user.
///
/// If the contract is broken, numbers change while they are read, or the process gets `SIGBUS`. Payloads are plain
/// numbers, for which every bit pattern is valid. Texts and structure are copied out of the map before they are
/// checked, so that checked data cannot change.
pub(crate) fn map(file: &File) -> io::Result<Bytes> {
    if file.metadata()?.len() == 0 {
        // Mapping an empty file is an error on some systems.
        return Ok(Bytes::new());
    }
    // SAFETY: the contract above guarantees that the file is neither written nor truncated while the map lives. The
    // user has accepted the contract. The map is read-only and owned by the returned `Bytes`.
    let map = unsafe { Mmap::map(file)? };
    Ok(Bytes::from_owner(map))
}
