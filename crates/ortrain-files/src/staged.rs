//! A file beside its place.

use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::faults::{self, Act};
use crate::names::{beside, folder, place_of, stem};
use crate::{Error, Result};

/// A file that is written beside its place. It vanishes unless [`Staged::place`] or [`Staged::keep`] is reached.
#[derive(Debug)]
pub struct Staged {
    file: File,
    at: PathBuf,
    /// As the caller named it, for errors.
    target: PathBuf,
    /// The target of that path.
    place: PathBuf,
    kept: bool,
}

impl Staged {
    /// An empty file in the folder of the place that `target` leads to, with the mode and the owner of what it is to
    /// replace. What killed processes left there is swept.
    ///
    /// # Errors
    /// When `target` is no place for a regular file, or the operating system refuses.
    pub fn beside(target: &Path) -> Result<Staged> {
        Staged::beside_like(target, target)
    }

    /// [`Staged::beside`]; where nothing is to be replaced, the mode and the owner are those of `like`, if that is there:
    /// a second file is not for more eyes than the first.
    ///
    /// # Errors
    /// As there.
    pub fn beside_like(target: &Path, like: &Path) -> Result<Staged> {
        let place = place_of(target)?;
        let pattern = fs::metadata(&place).or_else(|_| fs::metadata(like)).ok();
        sweep(&place);
        loop {
            let at = temporary(&place);
            let mut options = OpenOptions::new();
            options.write(true).create_new(true);
            #[cfg(unix)]
            if pattern.is_some() {
                // Nobody else's until its mode is known.
                std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
            }
            match options.open(&at) {
                Ok(file) => {
                    // Not every file system has locks; where there are none, nothing is swept.
                    let _ = file.lock();
                    if let Some(pattern) = &pattern {
                        keep_access(&file, pattern);
                    }
                    let (target, place) = (target.to_owned(), place.clone());
                    let staged = Staged { file, at, target, place, kept: false };
                    // Another save may have swept it before it was locked.
                    if staged.at.exists() {
                        return Ok(staged);
                    }
                }
                // Left by a process of the same number that was killed.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(source) => {
                    let source = match source.kind() {
                        io::ErrorKind::NotFound if !folder(&place).exists() => io::Error::new(
                            io::ErrorKind::NotFound,
                            format!("there is no folder {}, and none is made", folder(&place).display()),
                        ),
                        _ => source,
                    };
                    return Err(Error::Io { action: "write", path: target.to_owned(), source });
                }
            }
        }
    }

    /// The place of the finished file: the path that it was made for, or the target of its links.
    #[must_use]
    pub fn destination(&self) -> &Path {
        &self.place
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// When the operating system refuses.
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        let done = self.write_all(bytes);
        done.map_err(|source| self.fail("write", source))
    }

    /// Makes what was written last through a loss of power.
    ///
    /// # Errors
    /// When the operating system refuses.
    pub fn sync(&mut self) -> Result<()> {
        let done = faults::before(Act::Flush).and_then(|()| self.file.sync_all());
        done.map_err(|source| self.fail("flush", source))
    }

    /// Moves the file to another name in the folder of its place. It still vanishes unless it is kept.
    ///
    /// # Errors
    /// When the operating system refuses.
    pub fn rename(&mut self, name: &Path) -> Result<()> {
        let done = faults::before(Act::Rename).and_then(|()| fs::rename(&self.at, name));
        done.map_err(|source| Error::Io { action: "replace", path: name.to_owned(), source })?;
        name.clone_into(&mut self.at);
        Ok(())
    }

    /// Gives the file a second name, its place, and replaces what is there; the name that it has stays as well. `false`
    /// where files cannot have two names.
    ///
    /// # Errors
    /// When the operating system refuses.
    pub fn link_to_place(&self) -> Result<bool> {
        let second = temporary(&self.place);
        let _ = fs::remove_file(&second);
        if fs::hard_link(&self.at, &second).is_err() {
            return Ok(false);
        }
        let done = faults::before(Act::Rename).and_then(|()| fs::rename(&second, &self.place));
        done.map_err(|source| {
            let _ = fs::remove_file(&second);
            Error::Io { action: "replace", path: self.target.clone(), source }
        })?;
        Ok(true)
    }

    /// From here on the file stays where it is.
    pub fn keep(&mut self) {
        self.kept = true;
    }

    /// Moves the flushed file to its place, and flushes the folder.
    ///
    /// # Errors
    /// When the operating system refuses.
    pub fn place(mut self) -> Result<()> {
        let place = self.place.clone();
        self.rename(&place)?;
        self.keep();
        flush_folder(&place)
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
        if !self.kept {
            // The error that got us here is the one to tell.
            let _ = fs::remove_file(&self.at);
        }
    }
}

/// A name that no other file has, beside a place.
fn temporary(place: &Path) -> PathBuf {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    beside(place, &format!("{}-{}.tmp", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed)))
}

/// Gives a file the owner, the group and the mode of another one, as far as the system lets us. Whoever could not read
/// that one cannot read this one.
#[cfg(unix)]
fn keep_access(file: &File, of: &Metadata) {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};

    const SET_IDS: u32 = 0o6000;
    let mut mode = of.mode() & 0o7777;
    let same = file.metadata().is_ok_and(|new| (new.uid(), new.gid()) == (of.uid(), of.gid()));
    if !same && fchown(file, Some(of.uid()), Some(of.gid())).is_err() {
        mode &= !SET_IDS;
        if fchown(file, None, Some(of.gid())).is_err() {
            // Another group gets what everybody has.
            mode &= !0o070 | (mode & 0o007) << 3;
        }
    }
    // Where there are no modes, the file is at least nobody else's.
    let _ = file.set_permissions(fs::Permissions::from_mode(mode));
}

#[cfg(not(unix))]
fn keep_access(_: &File, _: &Metadata) {}

/// Makes renames in the folder of a file last through a loss of power.
///
/// # Errors
/// When the operating system refuses.
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

/// Lets one save at a time replace several files in a folder, until what is returned is dropped. Where there are no
/// locks, or somebody else keeps the folder locked for long, nobody waits.
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

/// A lock on a folder: see [`lock_folder`].
#[derive(Debug)]
pub struct FolderLock(File);

impl Drop for FolderLock {
    fn drop(&mut self) {
        // To close it would not do: a process that was forked meanwhile has it open, too.
        let _ = self.0.unlock();
    }
}

/// Removes the temporary files of killed saves to `target`, and to names that differ in numbers only: a training that counts its
/// checkpoints up never writes to one path twice. Files of running saves are locked, and stay.
pub fn sweep(target: &Path) {
    let Some(name) = target.file_name() else { return };
    let stem = stem(name);
    sweep_named(target, |found, rest| {
        let alike = || {
            let (first, numbers) = found.strip_suffix(b".tmp").and_then(|left| split_at_last_dot(left))?;
            let same = counted_alike(first, stem.as_encoded_bytes());
            let parts: Vec<&[u8]> = numbers.split(|&byte| byte == b'-').collect();
            let digits = parts.iter().all(|part| !part.is_empty() && part.iter().all(u8::is_ascii_digit));
            Some(same && parts.len() == 2 && digits)
        };
        let same = rest.and_then(|rest| rest.strip_suffix(b".tmp")).is_some_and(|middle| {
            !middle.is_empty() && middle.iter().all(|&byte| byte.is_ascii_digit() || byte == b'-')
        });
        same || alike() == Some(true)
    });
}

/// The parts of a name before and after its last dot.
fn split_at_last_dot(name: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = name.iter().rposition(|&byte| byte == b'.')?;
    Some((&name[..at], &name[at + 1..]))
}

/// Returns true if two first parts of names are equal but for their numbers, or if both stand for long names.
fn counted_alike(a: &[u8], b: &[u8]) -> bool {
    let hashed = |name: &[u8]| {
        name.strip_prefix(b"~").is_some_and(|hash| hash.len() == 16 && hash.iter().all(u8::is_ascii_hexdigit))
    };
    let without_numbers = |name: &[u8]| {
        let mut kept: Vec<u8> =
            name.iter().map(|&byte| if byte.is_ascii_digit() { b'0' } else { byte }).collect();
        kept.dedup_by(|next, before| *next == b'0' && *before == b'0');
        kept
    };
    hashed(a) && hashed(b) || without_numbers(a) == without_numbers(b)
}

/// Removes the files that wait beside their place, `target`, under the name of a checksum, for a file that never came to
/// name them, because its process was killed. Those of saves that go on are locked.
///
/// To be called when nothing that is there waits for them.
pub fn sweep_waiting(target: &Path) {
    sweep_named(target, |_, rest| {
        rest.is_some_and(|rest| rest.len() == 8 && rest.iter().all(u8::is_ascii_hexdigit))
    });
}

/// Removes the `wanted` files without a lock in the folder of `target`. `wanted` takes the name of a file, and its part after the
/// name of `target` and a dot.
fn sweep_named(target: &Path, wanted: impl Fn(&[u8], Option<&[u8]>) -> bool) {
    let (Some(name), Ok(entries)) = (target.file_name(), fs::read_dir(folder(target))) else { return };
    let stem = stem(name);
    // The second is what versions before 0.2 called models that they were writing.
    let prefixes = [[stem.as_encoded_bytes(), b"."].concat(), [b".", name.as_encoded_bytes(), b"."].concat()];
    for entry in entries.flatten() {
        let found = entry.file_name();
        let rest = prefixes.iter().find_map(|prefix| found.as_encoded_bytes().strip_prefix(&**prefix));
        // To open a pipe is to wait for its other end.
        if !wanted(found.as_encoded_bytes(), rest) || !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        // Whatever cannot be swept stays: it is in nobody's way.
        let opened = OpenOptions::new().write(true).open(entry.path()).or_else(|_| File::open(entry.path()));
        if opened.is_ok_and(|file| file.try_lock().is_ok()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of files in a folder.
    fn names(folder: &Path) -> Vec<String> {
        let mut found: Vec<String> = fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        found.sort();
        found
    }

    #[test]
    fn leftovers_of_counted_names_are_swept() {
        let folder = tempfile::tempdir().unwrap();
        let ours = ["step-9.ckpt.77-0.tmp", "step-10.ckpt.4194304-12.tmp", "step-11.ckpt.77-1.tmp"];
        let others = [
            "step-9.ckpt",
            "steps-9.ckpt.77-0.tmp",
            "step-9.ckpt.77.tmp",
            "step-9.ckpt.77-0-1.tmp",
            "a.77-0.tmp",
        ];
        for name in ours.iter().chain(&others) {
            fs::write(folder.path().join(name), name).unwrap();
        }
        let mut staged = Staged::beside(&folder.path().join("step-12.ckpt")).unwrap();
        staged.append(b"new").unwrap();
        staged.sync().unwrap();
        staged.place().unwrap();
        let mut wanted = others.map(str::to_owned).to_vec();
        wanted.push("step-12.ckpt".to_owned());
        wanted.sort();
        assert_eq!(names(folder.path()), wanted);
    }

    #[test]
    fn saves_that_go_on_are_not_swept() {
        let folder = tempfile::tempdir().unwrap();
        let mut saves: Vec<Staged> =
            (0..4).map(|at| Staged::beside(&folder.path().join(format!("step-{at}"))).unwrap()).collect();
        assert_eq!(names(folder.path()).len(), saves.len());
        for (at, save) in saves.iter_mut().enumerate() {
            save.append(at.to_string().as_bytes()).unwrap();
        }
        for save in saves {
            save.place().unwrap();
        }
        assert_eq!(names(folder.path()), ["step-0", "step-1", "step-2", "step-3"]);
    }

    #[test]
    fn long_names_that_are_hashed_count_as_alike() {
        let folder = tempfile::tempdir().unwrap();
        let long = |at: u32| folder.path().join(format!("{}-{at}", "x".repeat(240)));
        fs::write(beside(&long(1), "77-0.tmp"), "half").unwrap();
        Staged::beside(&long(2)).unwrap().place().unwrap();
        assert_eq!(names(folder.path()).len(), 1);
    }
}
