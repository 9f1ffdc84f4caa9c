//! Checksums of files with external data.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use sha1::{Digest, Sha1};

/// Number of bytes that are read at a time.
const PIECE: usize = 1 << 18;

/// Returns the SHA-1 of a file in hexadecimal digits. ONNX defines it as the `checksum` of external data.
///
/// # Errors
///
/// Fails if the file cannot be read.
pub fn checksum_of(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut digest = Sha1::new();
    let mut piece = vec![0; PIECE];
    loop {
        match file.read(&mut piece)? {
            0 => break,
            read => digest.update(&piece[..read]),
        }
    }
    Ok(digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checksum_is_sha1() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("data");
        // Vectors of FIPS 180-4.
        std::fs::write(&path, b"abc").expect("it is writable");
        assert_eq!(checksum_of(&path).expect("it is readable"), "a9993e364706816aba3e25717850c26c9cd0d89d");
        std::fs::write(&path, vec![b'a'; 1_000_000]).expect("it is writable");
        assert_eq!(checksum_of(&path).expect("it is readable"), "34aa973cd4c4daa4f61eeb2bdbad27316534016f");
        assert!(checksum_of(&folder.path().join("missing")).is_err());
    }
}
