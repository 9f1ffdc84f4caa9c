//! Checksum after the buffer.
//!
//! `FlatBuffers` verifiers accept bytes after the buffer. `extras.has_trailer` records that the trailer exists. Damage
//! of the trailer therefore cannot turn a checked file into an unchecked one.

use crate::{Error, Result};

const MAGIC: [u8; 8] = *b"ORTRSUM1";
/// Number of bytes of the trailer: magic, length of the buffer, checksum.
pub(crate) const LENGTH: usize = 8 + 8 + 4;

/// Returns the trailer of a buffer, which is passed in two parts.
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

/// Splits a file into its buffer and its trailer. Returns the buffer, and true if a matching trailer follows.
///
/// # Errors
/// [`Error::Damaged`] if the trailer's checksum does not match, [`Error::NoTrailer`] if its length does not.
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
