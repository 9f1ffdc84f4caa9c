//! Compiled kernels on disk.
//!
//! An entry is a file. The name of the file is a hash of source, architecture and version of the compiler. The file
//! contains all three, so that an entry is never used for another source. A checksum covers the file.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use ortrain_files::Staged;

/// Environment variable with the folder of the cache. An empty value turns the cache off.
const FOLDER_VARIABLE: &str = "ORTRAIN_CUDA_CACHE";
/// Maximum bytes of all entries. The entries that were written first are removed.
const MAX_BYTES: u64 = 512 << 20;
/// Maximum bytes of an entry.
const MAX_ENTRY_BYTES: u64 = 64 << 20;
/// First bytes of an entry.
const MAGIC: &[u8; 8] = b"ortrain1";
/// End of the names of entries.
const EXTENSION: &str = "cubin";

/// Key of an entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Key<'k> {
    pub(crate) source: &'k str,
    pub(crate) architecture: &'k str,
    /// Version of the compiler.
    pub(crate) compiler: &'k str,
}

impl Key<'_> {
    fn parts(&self) -> [&str; 3] {
        [self.compiler, self.architecture, self.source]
    }

    /// Returns the name of the file.
    fn file_name(&self) -> String {
        // FNV-1a (Fowler, Noll and Vo) with 128 bits.
        let mut hash: u128 = 0x6c62_272e_07bb_0142_62b8_2175_6295_c58d;
        for byte in self.parts().join("\0").bytes() {
            hash = (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
        }
        format!("{hash:032x}.{EXTENSION}")
    }

    /// Returns the content of the entry: magic, lengths, texts, image, checksum.
    fn encode(&self, image: &[u8]) -> Vec<u8> {
        let parts = self.parts().map(str::as_bytes);
        let mut bytes = MAGIC.to_vec();
        for part in parts.into_iter().chain([image]) {
            bytes.extend((part.len() as u64).to_le_bytes());
        }
        for part in parts.into_iter().chain([image]) {
            bytes.extend(part);
        }
        bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
        bytes
    }

    /// Returns the image of an entry; `None` if the file is damaged or belongs to another key.
    fn decode(&self, bytes: &[u8]) -> Option<Vec<u8>> {
        let (content, checksum) = bytes.split_at_checked(bytes.len().checked_sub(4)?)?;
        if crc32fast::hash(content).to_le_bytes() != checksum {
            return None;
        }
        let mut rest = content.strip_prefix(MAGIC)?;
        let mut lengths = [0; 4];
        for length in &mut lengths {
            let (number, after) = rest.split_first_chunk::<8>()?;
            *length = usize::try_from(u64::from_le_bytes(*number)).ok()?;
            rest = after;
        }
        for (part, length) in self.parts().into_iter().zip(lengths) {
            let (text, after) = rest.split_at_checked(length)?;
            if text != part.as_bytes() {
                return None;
            }
            rest = after;
        }
        (rest.len() == lengths[3]).then(|| rest.to_vec())
    }
}

/// Cache in a folder. A folder that is missing, full, or of another user makes it empty, which costs only time.
#[derive(Clone, Debug)]
pub(crate) struct KernelCache {
    folder: Option<PathBuf>,
}

impl KernelCache {
    /// Opens the cache of the user: the folder that the environment names, or the user's folder for caches.
    pub(crate) fn of_user() -> KernelCache {
        let path =
            |variable: &str| std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
        let folder = match std::env::var_os(FOLDER_VARIABLE) {
            Some(folder) => Some(PathBuf::from(folder)).filter(|folder| !folder.as_os_str().is_empty()),
            None => path("XDG_CACHE_HOME")
                .or_else(|| Some(path("HOME")?.join(".cache")))
                .map(|caches| caches.join("ortrain").join("cuda")),
        };
        KernelCache { folder }
    }

    /// Returns the folder, if only this user can write to it.
    fn folder(&self) -> Option<&Path> {
        let folder = self.folder.as_deref()?;
        is_private(folder).then_some(folder)
    }

    /// Returns the image of a key, if the cache has it.
    pub(crate) fn read(&self, key: &Key<'_>) -> Option<Vec<u8>> {
        let path = self.folder()?.join(key.file_name());
        let is_possible =
            fs::metadata(&path).is_ok_and(|data| data.is_file() && data.len() <= MAX_ENTRY_BYTES);
        if !is_possible {
            return None;
        }
        key.decode(&fs::read(path).ok()?)
    }

    /// Stores an image. A cache that cannot store it stays as it is.
    pub(crate) fn write(&self, key: &Key<'_>, image: &[u8]) {
        let Some(folder) = self.folder.as_deref() else { return };
        if create_private(folder).is_err() || !is_private(folder) {
            return;
        }
        let bytes = key.encode(image);
        if bytes.len() as u64 > MAX_ENTRY_BYTES {
            return;
        }
        remove_oldest(folder, bytes.len() as u64);
        // The name depends on the content, so that two processes write the same file.
        if let Ok(mut file) = Staged::beside(&folder.join(key.file_name())) {
            let _ = file.append(&bytes).and_then(|()| file.persist());
        }
    }

    /// Returns the version of a compiler that an earlier process asked, by the path of its library.
    pub(crate) fn compiler_version(&self, library: &Path) -> Option<String> {
        let text = fs::read_to_string(self.folder()?.join(version_file(library)?)).ok()?;
        (text.len() < 20 && text.chars().all(|c| c.is_ascii_digit() || c == '.')).then_some(text)
    }

    /// Stores the version of a compiler.
    pub(crate) fn set_compiler_version(&self, library: &Path, version: &str) {
        let Some(folder) = self.folder.as_deref() else { return };
        if create_private(folder).is_err() || !is_private(folder) {
            return;
        }
        let Some(name) = version_file(library) else { return };
        if let Ok(mut file) = Staged::beside(&folder.join(name)) {
            let _ = file.append(version.as_bytes()).and_then(|()| file.persist());
        }
    }
}

/// Returns the name of the file with the version of a library. It changes with the library.
fn version_file(library: &Path) -> Option<String> {
    let data = fs::metadata(library).ok()?;
    let modified = data.modified().ok()?.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_nanos();
    let identity = format!("{}\0{}\0{modified}", library.display(), data.len());
    let key = Key { source: &identity, architecture: "", compiler: "" };
    Some(key.file_name().replace(EXTENSION, "version"))
}

/// Creates a folder that only this user can change.
fn create_private(folder: &Path) -> std::io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

/// Returns true if only this user can change a folder.
#[cfg(unix)]
fn is_private(folder: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    const WRITABLE_BY_OTHERS: u32 = 0o022;
    let Ok(data) = fs::metadata(folder) else { return false };
    let own = fs::metadata("/proc/self").map_or(data.uid(), |process| process.uid());
    data.is_dir() && data.uid() == own && data.mode() & WRITABLE_BY_OTHERS == 0
}

/// Returns true if only this user can change a folder: folders of caches belong to the user.
#[cfg(not(unix))]
fn is_private(folder: &Path) -> bool {
    folder.is_dir()
}

/// Removes the oldest entries until `more` bytes fit.
fn remove_oldest(folder: &Path, more: u64) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    let mut files: Vec<(SystemTime, u64, PathBuf)> = entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let data = fs::metadata(&path).ok()?;
            (path.extension()? == EXTENSION).then_some((data.modified().ok()?, data.len(), path))
        })
        .collect();
    files.sort();
    let mut total = files.iter().map(|(_, bytes, _)| bytes).sum::<u64>() + more;
    for (_, bytes, path) in files {
        if total <= MAX_BYTES {
            break;
        }
        if fs::remove_file(path).is_ok() {
            total -= bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: Key<'static> = Key { source: "a kernel", architecture: "sm_90", compiler: "13.0" };

    fn cache() -> (tempfile::TempDir, KernelCache) {
        let folder = tempfile::tempdir().expect("there is a folder for files");
        let cache = KernelCache { folder: Some(folder.path().join("a").join("b")) };
        (folder, cache)
    }

    #[test]
    fn entries_are_found_by_every_part_of_the_key() {
        let (_folder, cache) = cache();
        assert_eq!(cache.read(&KEY), None);
        cache.write(&KEY, b"an image");
        assert_eq!(cache.read(&KEY).as_deref(), Some(&b"an image"[..]));
        for other in [
            Key { source: "another kernel", ..KEY },
            Key { architecture: "sm_80", ..KEY },
            Key { compiler: "13.1", ..KEY },
        ] {
            assert_eq!(cache.read(&other), None);
        }
    }

    /// Every damaged byte, and every length, makes an entry invalid.
    #[test]
    fn damaged_entries_are_no_entries() {
        let bytes = KEY.encode(b"an image");
        assert_eq!(KEY.decode(&bytes).as_deref(), Some(&b"an image"[..]));
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x10;
            assert_eq!(KEY.decode(&damaged), None);
            assert_eq!(KEY.decode(&bytes[..at]), None);
        }
    }

    /// An entry of another key, under the name of this key.
    #[test]
    fn entry_of_another_key_is_ignored() {
        let (_folder, cache) = cache();
        let other = Key { source: "another kernel", ..KEY };
        cache.write(&KEY, b"an image");
        let folder = cache.folder().expect("it was created");
        fs::rename(folder.join(KEY.file_name()), folder.join(other.file_name())).expect("it is a file");
        assert_eq!(cache.read(&other), None);
    }

    #[test]
    fn the_oldest_entries_make_room() {
        let (_folder, cache) = cache();
        cache.write(&KEY, b"an image");
        let folder = cache.folder().expect("it was created").to_owned();
        remove_oldest(&folder, MAX_BYTES - 1000);
        assert!(cache.read(&KEY).is_some());
        remove_oldest(&folder, MAX_BYTES);
        assert_eq!(cache.read(&KEY), None);
    }

    #[cfg(unix)]
    #[test]
    fn folders_of_others_are_not_read() {
        use std::os::unix::fs::PermissionsExt;
        let (_folder, cache) = cache();
        cache.write(&KEY, b"an image");
        let folder = cache.folder().expect("it was created").to_owned();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).expect("it belongs to this process");
        assert_eq!(cache.read(&KEY), None);
    }

    #[test]
    fn a_file_in_place_of_the_folder_is_no_cache() {
        let folder = tempfile::tempdir().expect("there is a folder for files");
        let path = folder.path().join("file");
        fs::write(&path, "text").expect("the folder is new");
        let cache = KernelCache { folder: Some(path.join("cuda")) };
        cache.write(&KEY, b"an image");
        assert_eq!(cache.read(&KEY), None);
        assert_eq!(KernelCache { folder: None }.read(&KEY), None);
    }

    #[test]
    fn versions_belong_to_a_library() {
        let (folder, cache) = cache();
        let library = folder.path().join("libnvrtc.so.13");
        fs::write(&library, "library").expect("the folder is new");
        assert_eq!(cache.compiler_version(&library), None);
        cache.set_compiler_version(&library, "13.5");
        assert_eq!(cache.compiler_version(&library).as_deref(), Some("13.5"));
        fs::write(&library, "a longer library").expect("the folder is writable");
        assert_eq!(cache.compiler_version(&library), None);
    }
}
