//! Steps on the disk. The feature `faults` records each step and can make it fail.

use std::io;

/// Step on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Write of bytes to a file beside its destination.
    Write,
    /// Flush of a file to the disk.
    Flush,
    /// Rename of a file.
    Rename,
    /// Flush of a folder to the disk.
    FlushFolder,
}

#[cfg(not(feature = "faults"))]
#[allow(clippy::unnecessary_wraps, reason = "fails in tests")]
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

/// Runs `work`, and returns its result and its steps on this thread. All steps from index `failing` on fail.
#[cfg(feature = "faults")]
pub fn with<T>(failing: Option<usize>, work: impl FnOnce() -> T) -> (T, Vec<Act>) {
    STEPS.set(Some(Steps { done: Vec::new(), failing }));
    let result = work();
    (result, STEPS.take().map_or_else(Vec::new, |steps| steps.done))
}
