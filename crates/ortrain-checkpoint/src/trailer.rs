//! The checksum after the buffer.
//!
//! `FlatBuffers` verifiers tolerate bytes after the buffer. A file whose trailer is no longer recognised still says, in
//! `extras.has_trailer`, that there was one, so that no damage turns a checked file into an unchecked one.

use crate::{Error, Result};

const MAGIC: [u8; 8] = *b"ORTRSUM1";
/// Magic, length of the buffer, checksum.
pub(crate) const LENGTH: usize = 8 + 8 + 4;

/// The trailer of a buffer, which comes in two parts.
pub(crate) fn trailer(body: [&[u8]; 2]) -> [u8; LENGTH] {
    let length = body.map(<[u8]>::len).iter().sum::<usize>() as u64;
    let mut trailer = [0; LENGTH];
    trailer[..8].copy_from_slice(&MAGIC);
    trailer[8..16].copy_from_slice(&length.to_le_bytes());
    let mut hasher = crc32fast::Hasher::new();
    body.iter().for_each(|part| hasher.update(part));
    hasher.update(&trailer[..16]);
    trailer[16..].copy_from_slice(&hasher.finalize().to_le_bytes());
    trailer
}

/// The buffer of a file, and whether a trailer followed and matched.
///
/// # Errors
/// [`Error::Damaged`] when a trailer is there and does not match.
pub(crate) fn split(file: &[u8]) -> Result<(&[u8], bool)> {
    let Some((body, found)) = file.split_last_chunk::<LENGTH>() else { return Ok((file, false)) };
    if found[..8] != MAGIC {
        return Ok((file, false));
    }
    let expected = trailer([body, &[]]);
    if *found == expected {
        return Ok((body, true));
    }
    let checksum =
        |trailer: &[u8; LENGTH]| u32::from_le_bytes([trailer[16], trailer[17], trailer[18], trailer[19]]);
    if found[8..16] != expected[8..16] {
        return Err(Error::NoTrailer);
    }
    Err(Error::Damaged { expected: checksum(found), found: checksum(&expected) })
}
