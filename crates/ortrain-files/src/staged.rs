//! Temporary file that replaces its destination.

use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::faults::{self, Act};
use crate::names::{destination_of, folder, sibling_path, stem};
use crate::{Error, Result};

/// File that is written beside its destination. The file is removed when dropped, unless [`Staged::persist`] or
/// [`Staged::keep`] was called.
#[derive(Debug)]
pub struct Staged {
    file: File,
    at: PathBuf,
    /// Path as the caller named it, for errors.
    target: PathBuf,
    /// Destination: the path after following symbolic links.
    destination: PathBuf,
    is_retained: bool,
}

impl Staged {
    /// Creates an empty file beside the destination of `target`, with the mode and owner of the file to be replaced.
    /// Temporary files of killed processes are swept.
    ///
    /// # Errors
    /// Fails if a regular file cannot be written to `target`, or if the operating system reports an error.
    pub fn beside(target: &Path) -> Result<Staged> {
        Staged::beside_like(target, target)
    }

    /// Like [`Staged::beside`], but takes mode and owner from `like` if no file is replaced and `like` exists. A second
    /// file is then readable to the same users as the first one.
    ///
    /// # Errors
    /// Fails like [`Staged::beside`].
    pub fn beside_like(target: &Path, mode_source: &Path) -> Result<Staged> {
        let destination = destination_of(target)?;
        let pattern = fs::metadata(&destination).or_else(|_| fs::metadata(mode_source)).ok();
        sweep(&destination);
        loop {
            let at = temporary(&destination);
            let mut options = OpenOptions::new();
            options.write(true).create_new(true);
            #[cfg(unix)]
            if pattern.is_some() {
                // The file is private until it gets its final mode.
                std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
            }
            match options.open(&at) {
                Ok(file) => {
                    // Not every file system has locks. Without locks, nothing is swept.
                    let _ = file.lock();
                    if let Some(pattern) = &pattern {
                        keep_access(&file, pattern);
                    }
                    let (target, destination) = (target.to_owned(), destination.clone());
                    let staged = Staged { file, at, target, destination, is_retained: false };
                    // Another save may have swept the file before it was locked.
                    if staged.at.exists() {
                        return Ok(staged);
                    }
                }
                // A killed process with the same ID left this file.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(source) => {
                    let source = match source.kind() {
                        io::ErrorKind::NotFound if !folder(&destination).exists() => io::Error::new(
                            io::ErrorKind::NotFound,
                            format!("there is no folder {}; create it first", folder(&destination).display()),
                        ),
                        _ => source,
                    };
                    return Err(Error::Io { action: "write", path: target.to_owned(), source });
                }
            }
        }
    }

    /// Returns the destination of the finished file: the path passed by the caller, or the target of its links.
    #[must_use]
    pub fn destination(&self) -> &Path {
        &self.destination
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// Fails if the operating system reports an error.
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let done = self.write_all(bytes);
        done.map_err(|source| self.fail("write", source))
    }

    /// Flushes the file to the disk, so that its content survives a loss of power.
    ///
    /// # Errors
    /// Fails if the operating system reports an error.
    pub fn sync(&mut self) -> Result<()> {
        let done = faults::before(Act::Flush).and_then(|()| self.file.sync_all());
        done.map_err(|source| self.fail("flush", source))
    }

    /// Renames the file within its folder. The file is still removed when dropped, unless it is kept.
    ///
    /// # Errors
    /// Fails if the operating system reports an error.
    pub fn rename(&mut self, name: &Path) -> Result<()> {
        let done = faults::before(Act::Rename).and_then(|()| fs::rename(&self.at, name));
        done.map_err(|source| Error::Io { action: "replace", path: name.to_owned(), source })?;
        name.clone_into(&mut self.at);
        Ok(())
    }

    /// Replaces the destination by a hard link to this file, which keeps its current name too. Returns false if the
    /// file system has no hard links.
    ///
    /// # Errors
    /// Fails if the operating system reports an error.
    pub fn link_to_destination(&self) -> Result<bool> {
        let second = temporary(&self.destination);
        let _ = fs::remove_file(&second);
        if fs::hard_link(&self.at, &second).is_err() {
            return Ok(false);
        }
        let done = faults::before(Act::Rename).and_then(|()| fs::rename(&second, &self.destination));
        done.map_err(|source| {
            let _ = fs::remove_file(&second);
            Error::Io { action: "replace", path: self.target.clone(), source }
        })?;
        Ok(true)
    }

    /// Keeps the file under its current name when dropped.
    pub fn keep(&mut self) {
        self.is_retained = true;
    }

    /// Renames the flushed file to its destination, and flushes the folder.
    ///
    /// # Errors
    /// Fails if the operating system reports an error.
    pub fn persist(mut self) -> Result<()> {
        let destination = self.destination.clone();
        self.rename(&destination)?;
        self.keep();
        flush_folder(&destination)
    }

    fn fail(&self, action: &'static str, source: io::Error) -> Error {
        Error::Io { action, path: self.target.clone(), source }
    }
}

impl Write for Staged {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        faults::before(Act::Write)?;
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if !self.is_retained {
            // An error here is ignored, because the error that caused the drop matters more.
            let _ = fs::remove_file(&self.at);
        }
    }
}

/// Returns an unused name beside a destination.
fn temporary(destination: &Path) -> PathBuf {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    sibling_path(
        destination,
        &format!("{}-{}.tmp", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed)),
    )
}

/// Gives a file the owner, group and mode of another file, as far as the system allows it. No user gains access that
/// the other file denies.
#[cfg(unix)]
fn keep_access(file: &File, of: &Metadata) {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};

    const SET_IDS: u32 = 0o6000;
    let mut mode = of.mode() & 0o7777;
    let same = file.metadata().is_ok_and(|new| (new.uid(), new.gid()) == (of.uid(), of.gid()));
    if !same && fchown(file, Some(of.uid()), Some(of.gid())).is_err() {
        mode &= !SET_IDS;
        if fchown(file, None, Some(of.gid())).is_err() {
            // If the group cannot be set, the group gets no permission that other users lack.
            mode &= !0o070 | (mode & 0o007) << 3;
        }
    }
    // If the mode cannot be set, the file stays private.
    let _ = file.set_permissions(fs::Permissions::from_mode(mode));
}

#[cfg(not(unix))]
fn keep_access(_: &File, _: &Metadata) {}

/// Flushes the folder of a file, so that renames in it survive a loss of power.
///
/// # Errors
/// Fails if the operating system reports an error.
pub fn flush_folder(of: &Path) -> Result<()> {
    #[cfg(unix)]
    {
        let folder = folder(of);
        let flush = faults::before(Act::FlushFolder)
            .and_then(|()| File::open(folder))
            .and_then(|folder| folder.sync_all());
        flush.map_err(|source| Error::Io { action: "flush the folder", path: folder.to_owned(), source })?;
    }
    Ok(())
}

/// Locks the folder of a file, so that one save at a time replaces several files there.
///
/// Returns `None` if the file system has no locks, or if the folder stays locked for ten seconds. The save then
/// continues without a lock.
#[must_use]
pub fn lock_folder(of: &Path) -> Option<FolderLock> {
    const PATIENCE: u32 = 2000;
    const PAUSE: Duration = Duration::from_millis(5);
    let folder = File::open(folder(of)).ok()?;
    for _ in 0..PATIENCE {
        match folder.try_lock() {
            Ok(()) => return Some(FolderLock(folder)),
            Err(TryLockError::WouldBlock) => std::thread::sleep(PAUSE),
            Err(TryLockError::Error(_)) => break,
        }
    }
    None
}

/// Lock on a folder: see [`lock_folder`].
#[derive(Debug)]
pub struct FolderLock(File);

impl Drop for FolderLock {
    fn drop(&mut self) {
        // Closing the file would not release the lock: a child process forked in the meantime has inherited it.
        let _ = self.0.unlock();
    }
}

/// Removes the temporary files of killed saves to `target`, and to names that differ only in their numbers.
///
/// A training run that numbers its checkpoints never writes to the same path twice. Files of running saves are locked
/// and stay.
pub fn sweep(target: &Path) {
    let Some(name) = target.file_name() else { return };
    let stem = stem(name);
    sweep_named(target, |file_name, rest| {
        let pattern = || {
            let (first, numbers) =
                file_name.strip_suffix(b".tmp").and_then(|left| split_at_last_dot(left))?;
            let same = counted_alike(first, stem.as_encoded_bytes());
            let parts: Vec<&[u8]> = numbers.split(|&byte| byte == b'-').collect();
            let digits = parts.iter().all(|part| !part.is_empty() && part.iter().all(u8::is_ascii_digit));
            Some(same && parts.len() == 2 && digits)
        };
        let same = rest.and_then(|rest| rest.strip_suffix(b".tmp")).is_some_and(|middle| {
            !middle.is_empty() && middle.iter().all(|&byte| byte.is_ascii_digit() || byte == b'-')
        });
        same || pattern() == Some(true)
    });
}

/// Splits a name at its last dot.
fn split_at_last_dot(name: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = name.iter().rposition(|&byte| byte == b'.')?;
    Some((&name[..at], &name[at + 1..]))
}

/// Returns true if two stems differ only in their numbers, or if both are hashes of long names.
fn counted_alike(a: &[u8], b: &[u8]) -> bool {
    let hashed = |name: &[u8]| {
        name.strip_prefix(b"~").is_some_and(|hash| hash.len() == 16 && hash.iter().all(u8::is_ascii_hexdigit))
    };
    let without_numbers = |name: &[u8]| {
        let mut patterns: Vec<u8> =
            name.iter().map(|&byte| if byte.is_ascii_digit() { b'0' } else { byte }).collect();
        patterns.dedup_by(|next, before| *next == b'0' && *before == b'0');
        patterns
    };
    hashed(a) && hashed(b) || without_numbers(a) == without_numbers(b)
}

/// Removes files that wait beside their destination `target` under the name of a checksum.
///
/// Such files remain if a process was killed before another file referred to them. Files of running saves are locked
/// and stay. Call this function only if no existing file refers to a waiting file.
pub fn sweep_waiting(target: &Path) {
    sweep_named(target, |_, rest| {
        rest.is_some_and(|rest| rest.len() == 8 && rest.iter().all(u8::is_ascii_hexdigit))
    });
}

/// Removes the files in the folder of `target` for which `matches` returns true and that are not locked. The arguments of
/// `matches` are the name of a file, and the part after the name of `target` and a dot.
fn sweep_named(target: &Path, matches: impl Fn(&[u8], Option<&[u8]>) -> bool) {
    let (Some(name), Ok(entries)) = (target.file_name(), fs::read_dir(folder(target))) else { return };
    let stem = stem(name);
    // Versions before 0.2 used the second prefix for models.
    let prefixes = [[stem.as_encoded_bytes(), b"."].concat(), [b".", name.as_encoded_bytes(), b"."].concat()];
    for entry in entries.flatten() {
        let file_name = entry.file_name();
        let rest = prefixes.iter().find_map(|prefix| file_name.as_encoded_bytes().strip_prefix(&**prefix));
        // Opening a pipe would wait for its other end.
        if !matches(file_name.as_encoded_bytes(), rest) || !entry.file_type().is_ok_and(|kind| kind.is_file())
        {
            continue;
        }
        // Files that cannot be removed stay. They do no harm.
        let opened = OpenOptions::new().write(true).open(entry.path()).or_else(|_| File::open(entry.path()));
        if opened.is_ok_and(|file| file.try_lock().is_ok()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the sorted names of the files in a folder.
    fn names(folder: &Path) -> Vec<String> {
        let mut sorted: Vec<String> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        sorted.sort();
        sorted
    }

    #[test]
    fn leftovers_of_counted_names_are_swept() {
        let folder = tempfile::tempdir().unwrap();
        let leftovers = ["step-9.ckpt.77-0.tmp", "step-10.ckpt.4194304-12.tmp", "step-11.ckpt.77-1.tmp"];
        let others = [
            "step-9.ckpt",
            "steps-9.ckpt.77-0.tmp",
            "step-9.ckpt.77.tmp",
            "step-9.ckpt.77-0-1.tmp",
            "a.77-0.tmp",
        ];
        for name in leftovers.iter().chain(&others) {
            fs::write(folder.path().join(name), name).unwrap();
        }
        let mut staged = Staged::beside(&folder.path().join("step-12.ckpt")).unwrap();
        staged.append(b"new").unwrap();
        staged.sync().unwrap();
        staged.persist().unwrap();
        let mut expected = others.map(str::to_owned).to_vec();
        expected.push("step-12.ckpt".to_owned());
        expected.sort();
        assert_eq!(names(folder.path()), expected);
    }

    #[test]
    fn running_saves_are_not_swept() {
        let folder = tempfile::tempdir().unwrap();
        let mut saves: Vec<Staged> =
            (0..4).map(|at| Staged::beside(&folder.path().join(format!("step-{at}"))).unwrap()).collect();
        assert_eq!(names(folder.path()).len(), saves.len());
        for (at, save) in saves.iter_mut().enumerate() {
            save.append(at.to_string().as_bytes()).unwrap();
        }
        for save in saves {
            save.persist().unwrap();
        }
        assert_eq!(names(folder.path()), ["step-0", "step-1", "step-2", "step-3"]);
    }

    #[test]
    fn hashed_long_names_match_the_pattern() {
        let folder = tempfile::tempdir().unwrap();
        let long = |at: u32| folder.path().join(format!("{}-{at}", "x".repeat(240)));
        fs::write(sibling_path(&long(1), "77-0.tmp"), "half").unwrap();
        Staged::beside(&long(2)).unwrap().persist().unwrap();
        assert_eq!(names(folder.path()).len(), 1);
    }
}
