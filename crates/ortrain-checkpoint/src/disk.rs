//! Files read whole, and files that are there entirely or not at all.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
#[cfg(target_os = "linux")]
use memmap2::Advice;
use memmap2::MmapMut;

use crate::{Error, Result};

/// `path` with `suffix` after its last component.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    PathBuf::from(name)
}

/// The content of a regular file.
pub(crate) fn read(path: &Path) -> Result<Bytes> {
    let fail = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => Error::Missing { path: path.to_owned() },
        io::ErrorKind::IsADirectory => Error::Directory { path: path.to_owned() },
        _ => Error::Io { action: "read", path: path.to_owned(), source },
    };
    if path.as_os_str().is_empty() {
        return Err(Error::NoName { path: path.to_owned() });
    }
    // Asked before opening: to open a pipe is to wait for its writer.
    let kind = fs::metadata(path).map_err(fail)?;
    if kind.is_dir() {
        return Err(Error::Directory { path: path.to_owned() });
    }
    if !kind.is_file() {
        return Err(Error::NotAFile { path: path.to_owned() });
    }
    read_whole(path).map_err(fail)
}

/// Files from this size on are read into large pages where the system has them: to have that much memory 4 KiB at a time
/// takes longer than to read the file.
pub(crate) const LARGE: u64 = 4 << 20;

/// The content of a file.
fn read_whole(path: &Path) -> io::Result<Bytes> {
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
        // Somebody appends to it.
        file.rewind()?;
    }
    let mut content = Vec::new();
    file.read_to_end(&mut content)?;
    Ok(content.into())
}

/// Bytes that a thread reads at a time.
pub(crate) const PIECE: usize = 32 << 20;
/// Threads that read one file, at most: more do not get it sooner.
const READERS: usize = 4;

/// Reads the first bytes of a file, and stays behind them. To have fresh memory filled with zeros takes longer than to
/// copy what the system holds of the file, so that several threads read.
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
            while let Some((number, piece)) = next() {
                shared.read_exact_at(piece, (number * PIECE) as u64)?;
            }
            Ok(())
        };
        thread::scope(|scope| {
            // Threads that the system does not give leave more to this one.
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

/// Lets one save at a time replace two files in a folder, until what is returned is dropped. Where there are no locks,
/// or somebody else keeps the folder locked for long, nobody waits.
pub(crate) fn lock_folder(of: &Path) -> Option<FolderLock> {
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

/// See [`lock_folder`].
pub(crate) struct FolderLock(File);

impl Drop for FolderLock {
    fn drop(&mut self) {
        // To close it would not do: a process that was forked meanwhile has it open, too.
        let _ = self.0.unlock();
    }
}

/// Makes renames in a folder last through a loss of power.
pub(crate) fn flush_folder(of: &Path) -> Result<()> {
    #[cfg(unix)]
    {
        let folder = folder(of);
        let flush = faults::before(faults::Act::FlushFolder)
            .and_then(|()| File::open(folder))
            .and_then(|folder| folder.sync_all());
        flush.map_err(|source| Error::Io { action: "flush the folder", path: folder.to_owned(), source })?;
    }
    Ok(())
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Removes the files that saves to `target` were writing when their process was killed. Those of saves that go on are
/// locked.
fn sweep(target: &Path) {
    sweep_named(target, |rest| {
        rest.strip_suffix(b".tmp").is_some_and(|middle| {
            !middle.is_empty() && middle.iter().all(|&byte| byte.is_ascii_digit() || byte == b'-')
        })
    });
}

/// Removes the `.data` files that wait beside their place, `side`, for a checkpoint that never came, because its process
/// was killed. Those of saves that go on are locked.
///
/// To be called when nothing that is there waits for them.
pub(crate) fn sweep_waiting(side: &Path) {
    sweep_named(side, |rest| rest.len() == 8 && rest.iter().all(u8::is_ascii_hexdigit));
}

/// Removes the files called as `target`, with a dot and something more that is `wanted`, that nobody has locked.
fn sweep_named(target: &Path, wanted: impl Fn(&[u8]) -> bool) {
    let (Some(name), Ok(entries)) = (target.file_name(), fs::read_dir(folder(target))) else { return };
    let prefix = [name.as_encoded_bytes(), b"."].concat();
    for entry in entries.flatten() {
        if !entry.file_name().as_encoded_bytes().strip_prefix(&*prefix).is_some_and(&wanted) {
            continue;
        }
        // Whatever cannot be swept stays: it is in nobody's way.
        if let Ok(file) = OpenOptions::new().write(true).open(entry.path())
            && file.try_lock().is_ok()
        {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// A file being written beside its place. It vanishes unless [`Staged::place`] or [`Staged::keep`] is reached.
#[derive(Debug)]
pub(crate) struct Staged {
    file: File,
    at: PathBuf,
    /// What it is to become, for errors.
    target: PathBuf,
    kept: bool,
}

impl Staged {
    /// An empty file in the folder of `target`, under a name of its own.
    pub(crate) fn beside(target: &Path) -> Result<Staged> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        if target.is_dir() {
            return Err(Error::Directory { path: target.to_owned() });
        }
        if target.file_name().is_none() {
            return Err(Error::NoName { path: target.to_owned() });
        }
        sweep(target);
        loop {
            let number = COUNTER.fetch_add(1, Ordering::Relaxed);
            let at = with_suffix(target, &format!(".{}-{number}.tmp", std::process::id()));
            match OpenOptions::new().write(true).create_new(true).open(&at) {
                Ok(file) => {
                    // Not every file system has locks; where there are none, nothing is swept.
                    let _ = file.lock();
                    let staged = Staged { file, at, target: target.to_owned(), kept: false };
                    // Another save may have swept it before it was locked.
                    if staged.at.exists() {
                        return Ok(staged);
                    }
                }
                // Left by a process of the same number that was killed.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(source) => {
                    let source = match source.kind() {
                        io::ErrorKind::NotFound if !folder(target).exists() => io::Error::new(
                            io::ErrorKind::NotFound,
                            format!("there is no folder {}, and none is made", folder(target).display()),
                        ),
                        _ => source,
                    };
                    return Err(Error::Io { action: "write", path: target.to_owned(), source });
                }
            }
        }
    }

    /// Appends.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let done = faults::before(faults::Act::Write).and_then(|()| self.file.write_all(bytes));
        done.map_err(|source| self.fail("write", source))
    }

    /// Makes what was written last through a loss of power.
    pub(crate) fn flush(&mut self) -> Result<()> {
        let done = faults::before(faults::Act::Flush).and_then(|()| self.file.sync_all());
        done.map_err(|source| self.fail("flush", source))
    }

    /// Moves the file to `target`, replacing what is there. It still vanishes unless it is kept.
    pub(crate) fn rename(&mut self, target: &Path) -> Result<()> {
        let done = faults::before(faults::Act::Rename).and_then(|()| fs::rename(&self.at, target));
        done.map_err(|source| Error::Io { action: "replace", path: target.to_owned(), source })?;
        target.clone_into(&mut self.at);
        Ok(())
    }

    /// From here on the file stays.
    pub(crate) fn keep(&mut self) {
        self.kept = true;
    }

    /// Moves the flushed file to `target` and flushes the folder.
    pub(crate) fn place(mut self, target: &Path) -> Result<()> {
        self.rename(target)?;
        self.keep();
        flush_folder(target)
    }

    fn fail(&self, action: &'static str, source: io::Error) -> Error {
        Error::Io { action, path: self.target.clone(), source }
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

/// What is done to the disk, step by step; in tests each step is noted and can be made to fail.
pub(crate) mod faults {
    use std::io;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) enum Act {
        Write,
        Flush,
        Rename,
        FlushFolder,
    }

    #[cfg(not(test))]
    #[allow(clippy::unnecessary_wraps, reason = "in tests it fails")]
    pub(super) fn before(_: Act) -> io::Result<()> {
        Ok(())
    }

    #[cfg(test)]
    pub(super) fn before(act: Act) -> io::Result<()> {
        STEPS.with_borrow_mut(|steps| {
            steps.done.push(act);
            match steps.failing {
                Some(at) if steps.done.len() > at => Err(io::ErrorKind::StorageFull.into()),
                _ => Ok(()),
            }
        })
    }

    #[cfg(test)]
    #[derive(Default)]
    struct Steps {
        done: Vec<Act>,
        failing: Option<usize>,
    }

    #[cfg(test)]
    thread_local! {
        static STEPS: std::cell::RefCell<Steps> = std::cell::RefCell::default();
    }

    /// The steps that `work` takes on this thread. All from number `failing` on fail.
    #[cfg(test)]
    pub(crate) fn with<T>(failing: Option<usize>, work: impl FnOnce() -> T) -> (T, Vec<Act>) {
        STEPS.set(Steps { done: Vec::new(), failing });
        let result = work();
        (result, STEPS.take().done)
    }
}
