//! The steps that are taken on the disk; with the feature `faults` each is noted and can be made to fail.

use std::io;

/// A step on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Bytes are appended to a file beside its place.
    Write,
    /// A file is flushed to the disk.
    Flush,
    /// A file gets its name.
    Rename,
    /// A folder is flushed to the disk.
    FlushFolder,
}

#[cfg(not(feature = "faults"))]
#[allow(clippy::unnecessary_wraps, reason = "in tests it fails")]
pub(crate) fn before(_: Act) -> io::Result<()> {
    Ok(())
}

#[cfg(feature = "faults")]
pub(crate) fn before(act: Act) -> io::Result<()> {
    STEPS.with_borrow_mut(|steps| {
        let Some(steps) = steps else { return Ok(()) };
        steps.done.push(act);
        match steps.failing {
            Some(at) if steps.done.len() > at => Err(io::ErrorKind::StorageFull.into()),
            _ => Ok(()),
        }
    })
}

#[cfg(feature = "faults")]
struct Steps {
    done: Vec<Act>,
    failing: Option<usize>,
}

#[cfg(feature = "faults")]
thread_local! {
    static STEPS: std::cell::RefCell<Option<Steps>> = const { std::cell::RefCell::new(None) };
}

/// The result of `work` and the steps that it takes on this thread. All from number `failing` on fail.
#[cfg(feature = "faults")]
pub fn with<T>(failing: Option<usize>, work: impl FnOnce() -> T) -> (T, Vec<Act>) {
    STEPS.set(Some(Steps { done: Vec::new(), failing }));
    let result = work();
    (result, STEPS.take().map_or_else(Vec::new, |steps| steps.done))
}
