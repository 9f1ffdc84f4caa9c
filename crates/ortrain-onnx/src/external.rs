//! External data of a model, in files beside it.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use ortrain_files::folder;

use crate::checksum::checksum_of;
use crate::error::{label, shown};
use crate::mapped;
use crate::{OnnxError, TensorProto};

/// Source of a model's external data: a folder, bytes of the caller, both, or neither.
///
/// A file is opened when first needed. A few files stay open at a time. Files outside the model's folder are not read:
/// an absolute location, a location with `..`, or a link out of the folder is refused. If the model's own path is a
/// link, as in download caches, links into the folder of its target are accepted.
#[derive(Debug, Default)]
pub struct ExternalData {
    folders: Option<Folders>,
    provided: HashMap<String, Bytes>,
    storage: Storage,
    open: Mutex<HashMap<String, Arc<Source>>>,
    maps: Maps,
}

/// Maps of files by their paths, which several models can share: memory that two maps have in common counts twice in
/// the size of a process.
#[derive(Debug, Clone, Default)]
pub struct Maps(Arc<Mutex<HashMap<PathBuf, Bytes>>>);

impl Maps {
    fn of(&self, path: PathBuf, file: &File) -> io::Result<Bytes> {
        let mut maps = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(map) = maps.get(&path) {
            return Ok(map.clone());
        }
        let map = mapped::map(file)?;
        maps.insert(path, map.clone());
        Ok(map)
    }
}

/// Method of bringing files into memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Storage {
    /// Reads files. This is the default: data in memory no longer depends on the file.
    #[default]
    Read,
    /// Maps files, so that only used weights take memory.
    ///
    /// While the model or any payload of it lives, **no process may write to the files or truncate them**. Otherwise,
    /// numbers change while the program uses them, or reading past the new end kills the process. Replacing files as
    /// this crate saves them (written beside, then renamed) is fine.
    Mapped,
    /// Maps tensors at offsets that are multiples of 256, because computations can use them in place. Reads the model
    /// itself and all other tensors. The requirements of [`Storage::Mapped`] apply.
    MappedInPlace,
}

#[derive(Debug, Clone)]
struct Folders {
    /// Absolute folder of the caller's path. The program may change its working directory.
    path: PathBuf,
    /// Folder of the target, if the caller's path is a link.
    target_folder: Option<PathBuf>,
}

#[derive(Debug)]
enum Source {
    Memory(Bytes),
    File(OpenFile),
}

#[derive(Debug)]
struct OpenFile {
    file: Mutex<File>,
    size: u64,
    /// Map of the file, if tensors may be used in place.
    map: Option<Bytes>,
}

/// Maximum number of open files. A model may have a file for each of thousands of tensors, but a process may open only
/// about a thousand files.
const MAX_OPEN: usize = 32;

/// Alignment in memory of data read from files, in bytes. Computations can use the data without another copy.
const READ_ALIGNMENT: usize = 256;

impl ExternalData {
    /// Creates a source without folder and bytes. Reading external data from it is an error.
    pub fn none() -> Self {
        Self::default()
    }

    /// Creates a source of files in `folder`.
    pub fn in_folder(folder: impl Into<PathBuf>, storage: Storage) -> Self {
        let folders = Folders { path: absolute(folder.into()), target_folder: None };
        Self { folders: Some(folders), storage, ..Self::default() }
    }

    /// Creates a source of files beside the model at `path`.
    pub fn beside(path: &Path, storage: Storage) -> Self {
        let folder_path = absolute(folder(path).to_owned());
        let target_folder = std::fs::canonicalize(path).ok().and_then(|real| Some(real.parent()?.to_owned()));
        Self { folders: Some(Folders { path: folder_path, target_folder }), storage, ..Self::default() }
    }

    /// Returns a source of the same files and bytes with another method of reading. Maps of files go to `maps`.
    #[must_use]
    pub fn with_storage(&self, storage: Storage, maps: &Maps) -> Self {
        let folders = self.folders.clone();
        let (provided, maps) = (self.provided.clone(), maps.clone());
        Self { folders, provided, storage, open: Mutex::default(), maps }
    }

    /// Provides the bytes of the file `location`, as the model names it. They take precedence over a file of that name.
    pub fn provide(&mut self, location: impl Into<String>, bytes: impl Into<Bytes>) {
        self.provided.insert(location.into(), bytes.into());
    }

    /// Returns the folder of the files.
    pub fn folder(&self) -> Option<&Path> {
        self.folders.as_ref().map(|folders| folders.path.as_path())
    }

    /// Reads the external data of `tensor`. Its type and dimensions require `expected` bytes.
    pub(crate) fn read(&self, tensor: &TensorProto, expected: usize) -> Result<Bytes, OnnxError> {
        let Range { location, offset, length, .. } = Range::of(tensor)?;
        let length = length.unwrap_or(expected as u64);
        if length != expected as u64 {
            return Err(OnnxError::DataLength {
                tensor: label(tensor),
                field: "external_data",
                unit: "bytes",
                expected,
                found: usize::try_from(length).unwrap_or(usize::MAX),
            });
        }
        let source = self.source(tensor, location)?;
        let size = source.size();
        if offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(OnnxError::ExternalRange {
                tensor: label(tensor),
                location: shown(location),
                offset,
                length,
                size,
            });
        }
        // The range is inside the bytes, so that both numbers fit `usize`.
        let slice = |bytes: &Bytes| Ok(bytes.slice(offset as usize..offset as usize + expected));
        match &*source {
            Source::Memory(bytes) => slice(bytes),
            Source::File(OpenFile { map: Some(map), .. }) if offset.is_multiple_of(READ_ALIGNMENT as u64) => {
                slice(map)
            }
            Source::File(OpenFile { file, .. }) => {
                let mut bytes: Vec<u8> = Vec::new();
                bytes
                    .try_reserve_exact(expected.saturating_add(READ_ALIGNMENT - 1))
                    .map_err(|_| OnnxError::OutOfMemory { tensor: label(tensor), bytes: expected })?;
                let skipped = bytes.as_ptr().addr().wrapping_neg() % READ_ALIGNMENT;
                bytes.resize(skipped, 0);
                let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
                let read = file
                    .seek(SeekFrom::Start(offset))
                    .and_then(|_| file.by_ref().take(length).read_to_end(&mut bytes))
                    .map_err(|error| unreadable(tensor, location, error))?;
                if read != expected {
                    // The file was truncated after it was opened.
                    let size = offset + read as u64;
                    return Err(OnnxError::ExternalRange {
                        tensor: label(tensor),
                        location: shown(location),
                        offset,
                        length,
                        size,
                    });
                }
                Ok(Bytes::from(bytes).slice(skipped..))
            }
        }
    }

    /// Returns the path of the file with the external data of `tensor`, after following all links, and the offset of
    /// the data.
    pub(crate) fn locate(&self, tensor: &TensorProto) -> Result<Option<(PathBuf, u64)>, OnnxError> {
        let Range { location, offset, .. } = Range::of(tensor)?;
        if self.provided.contains_key(location) || self.folders.is_none() {
            return Ok(None);
        }
        Ok(Some((self.path_of(tensor, location)?, offset)))
    }

    /// Compares the file of a tensor with the checksum that the model gives for it, if there is one. `known` are files
    /// with checksums that were compared before.
    pub(crate) fn verify(
        &self,
        tensor: &TensorProto,
        known: &mut HashSet<(PathBuf, String)>,
    ) -> Result<(), OnnxError> {
        // Reading the tensor reports entries that contradict each other.
        let Ok(Range { location, checksum: Some(expected), .. }) = Range::of(tensor) else { return Ok(()) };
        if self.provided.contains_key(location) {
            return Ok(());
        }
        let path = self.path_of(tensor, location)?;
        let key = (path, expected.to_owned());
        if known.contains(&key) {
            return Ok(());
        }
        let found = checksum_of(&key.0).map_err(|error| unreadable(tensor, location, error))?;
        if !found.eq_ignore_ascii_case(expected) {
            return Err(OnnxError::Changed {
                tensor: label(tensor),
                location: shown(location),
                expected: shown(expected),
                found,
            });
        }
        known.insert(key);
        Ok(())
    }

    fn source(&self, tensor: &TensorProto, location: &str) -> Result<Arc<Source>, OnnxError> {
        if let Some(bytes) = self.provided.get(location) {
            return Ok(Arc::new(Source::Memory(bytes.clone())));
        }
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(source) = open.get(location) {
            return Ok(Arc::clone(source));
        }
        let source = Arc::new(self.open(tensor, location)?);
        if open.len() >= MAX_OPEN {
            open.clear();
        }
        open.insert(location.to_owned(), Arc::clone(&source));
        Ok(source)
    }

    /// Returns the path of a regular file inside the model's folder, after following all links.
    fn path_of(&self, tensor: &TensorProto, location: &str) -> Result<PathBuf, OnnxError> {
        let refuse =
            |reason| OnnxError::Location { tensor: label(tensor), location: shown(location), reason };
        let relative = plain_relative(location).map_err(refuse)?;
        let Some(folders) = &self.folders else {
            return Err(OnnxError::NoFolder { tensor: label(tensor), location: shown(location) });
        };
        let failed = |error| unreadable(tensor, location, error);
        let folder = folders.path.canonicalize().map_err(failed)?;
        let path = folders.path.join(relative).canonicalize().map_err(failed)?;
        let inside = path.starts_with(&folder)
            || folders.target_folder.as_ref().is_some_and(|target| path.starts_with(target));
        if !inside {
            return Err(refuse("it is a link that leads out of the model's folder"));
        }
        // Checked before opening, because opening a pipe waits for its writer.
        if !path.metadata().map_err(failed)?.is_file() {
            return Err(refuse("it is not a regular file"));
        }
        Ok(path)
    }

    fn open(&self, tensor: &TensorProto, location: &str) -> Result<Source, OnnxError> {
        let failed = |error| unreadable(tensor, location, error);
        let path = self.path_of(tensor, location)?;
        let file = File::open(&path).map_err(failed)?;
        match self.storage {
            Storage::Mapped => Ok(Source::Memory(self.maps.of(path, &file).map_err(failed)?)),
            Storage::Read | Storage::MappedInPlace => {
                let size = file.metadata().map_err(failed)?.len();
                // On a file system without maps, all tensors are read.
                let in_place = self.storage == Storage::MappedInPlace;
                let map = in_place.then(|| self.maps.of(path, &file).ok()).flatten();
                Ok(Source::File(OpenFile { file: Mutex::new(file), size, map }))
            }
        }
    }
}

impl Source {
    fn size(&self) -> u64 {
        match self {
            Source::Memory(bytes) => bytes.len() as u64,
            Source::File(file) => file.size,
        }
    }
}

/// Entries of `external_data`.
pub(crate) struct Range<'a> {
    pub(crate) location: &'a str,
    pub(crate) offset: u64,
    pub(crate) length: Option<u64>,
    /// SHA-1 of the file, in hexadecimal digits.
    pub(crate) checksum: Option<&'a str>,
}

impl<'a> Range<'a> {
    pub(crate) fn of(tensor: &'a TensorProto) -> Result<Self, OnnxError> {
        let error = |reason: String| OnnxError::ExternalEntry { tensor: label(tensor), reason };
        let parse = |key: &str, text: &str| {
            text.trim()
                .parse::<u64>()
                .map_err(|_| error(format!("`{key}` is `{}`, not a number", shown(text))))
        };
        let mut location = None;
        let mut offset = 0;
        let mut length = None;
        let mut checksum = None;
        for entry in &tensor.external_data {
            match entry.key.as_str() {
                "location" => location = Some(entry.value.as_str()),
                "offset" => offset = parse("offset", &entry.value)?,
                "length" => length = Some(parse("length", &entry.value)?),
                "checksum" => checksum = Some(entry.value.as_str()).filter(|text| is_sha1(text)),
                // `basepath` is optional, and is not checked.
                _ => {}
            }
        }
        let location = location.ok_or_else(|| error("it has no `location`".into()))?;
        Ok(Range { location, offset, length, checksum })
    }
}

/// Returns true for the digits of a SHA-1. Other texts are no checksums of the standard, and are ignored.
fn is_sha1(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|digit| digit.is_ascii_hexdigit())
}

fn absolute(path: PathBuf) -> PathBuf {
    std::path::absolute(&path).unwrap_or(path)
}

/// Accepts a location that names the same file inside a folder on every system.
fn plain_relative(location: &str) -> Result<&Path, &'static str> {
    if location.is_empty() {
        return Err("it is empty");
    }
    if location.contains('\0') {
        return Err("it contains a zero byte");
    }
    let bytes = location.as_bytes();
    let drive =
        bytes.len() >= 2 && bytes[0].is_ascii_alphabetic() && bytes[1] == b':' && bytes.get(2) != Some(&b':');
    if location.starts_with(['/', '\\']) || drive {
        return Err("it is an absolute path; it must be relative to the model's folder");
    }
    if location.split(['/', '\\']).any(|part| part == "..") {
        return Err("it leads out of the model's folder by `..`");
    }
    if location.contains('\\') {
        return Err("it contains a backslash; folders are separated by `/` in a model");
    }
    let path = Path::new(location);
    if !path.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir)) {
        return Err("it must be relative to the model's folder");
    }
    if cfg!(windows) && location.contains(':') {
        return Err("it contains a colon");
    }
    Ok(path)
}

fn unreadable(tensor: &TensorProto, location: &str, error: io::Error) -> OnnxError {
    OnnxError::ExternalFile { tensor: label(tensor), location: shown(location), error }
}
