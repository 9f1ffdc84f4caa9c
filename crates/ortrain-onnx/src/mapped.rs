//! Files as memory, for those who ask for it: the only `unsafe` of this crate.

use std::fs::File;
use std::io;

use bytes::Bytes;
use memmap2::Mmap;

/// The bytes of `file` as a private, read-only map that lives as long as any range of it.
///
/// # Contract
///
/// Until the last range is dropped, nobody writes to the file or cuts it short. The compiler cannot see to that, and
/// neither can we: it is asked of the user, in the documentation of [`Storage::Mapped`](crate::Storage::Mapped), which
/// is the only way to get here. What would happen otherwise: numbers change while they are read, or the process gets
/// `SIGBUS`. Payloads are plain numbers for which every pattern of bits is valid; texts and structure are copied out of
/// the map before they are checked, so nothing that was checked can change afterwards.
pub(crate) fn map(file: &File) -> io::Result<Bytes> {
    if file.metadata()?.len() == 0 {
        // An empty map is an error on some systems.
        return Ok(Bytes::new());
    }
    // SAFETY: the file is neither written nor cut short while the map lives: the contract above, passed on to the
    // user who opted in. The map is read-only and owned by the returned `Bytes`.
    let map = unsafe { Mmap::map(file)? };
    Ok(Bytes::from_owner(map))
}
