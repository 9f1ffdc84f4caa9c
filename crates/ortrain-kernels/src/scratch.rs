//! Arguments of a run: run scalars, scratch memory and buffers.

use crate::pool::Pool;

/// Alignment of frames and registers.
pub(crate) const ALIGN: usize = 64;

/// Values of [`ortrain_expr::RunScalar`] in one run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunScalars {
    /// Seed of random numbers.
    pub seed: u64,
    /// Number of completed training steps.
    pub train_step: u64,
}

/// Working memory that a caller provides for one run: registers, packed blocks, partial results.
///
/// A kernel reports its required size for a number of threads. With less memory, down to the size for one thread, the
/// kernel uses fewer threads, with the same result. The contents before and after a run are irrelevant.
#[derive(Clone, Copy, Debug)]
pub struct Scratch {
    at: *mut u8,
    bytes: usize,
}

impl Scratch {
    /// Required alignment of scratch memory.
    pub const ALIGN: usize = ALIGN;

    /// Creates scratch memory of `bytes` bytes at `at`, which must be aligned to [`Scratch::ALIGN`]. The caller of a
    /// run guarantees that the memory is valid for reads and writes, and that no other code uses it until the run is
    /// over.
    #[must_use]
    pub fn new(at: *mut u8, bytes: usize) -> Scratch {
        Scratch { at, bytes }
    }

    /// Divides the memory into a shared part and one part for each worker.
    ///
    /// # Panics
    /// Panics if the memory is too small for one worker, or not aligned.
    pub(crate) fn split(self, shared: usize, each: usize, pool: &Pool) -> ScratchParts {
        debug_assert!(shared.is_multiple_of(ALIGN) && each.is_multiple_of(ALIGN) && each > 0);
        assert!(
            self.at.addr().is_multiple_of(ALIGN),
            "scratch memory at {:p} is not aligned to {ALIGN}",
            self.at
        );
        assert!(
            self.bytes >= shared + each,
            "got {} bytes of scratch memory, but one thread needs {}",
            self.bytes,
            shared + each
        );
        let workers = ((self.bytes - shared) / each).min(pool.num_threads());
        ScratchParts { at: self.at, shared, each, workers }
    }
}

/// Scratch memory, divided into parts.
#[derive(Clone, Copy)]
pub(crate) struct ScratchParts {
    at: *mut u8,
    shared: usize,
    each: usize,
    /// Number of workers that have a part.
    pub(crate) workers: usize,
}

// SAFETY: an address and sizes; each use of the memory states its own guarantee.
unsafe impl Sync for ScratchParts {}
// SAFETY: as above.
unsafe impl Send for ScratchParts {}

impl ScratchParts {
    /// Returns the shared part.
    pub(crate) fn shared_part(&self) -> *mut u8 {
        self.at
    }

    /// Returns the part of a worker.
    pub(crate) fn worker_part(&self, worker: usize) -> *mut u8 {
        debug_assert!(worker < self.workers);
        self.at.wrapping_add(self.shared + worker * self.each)
    }
}

/// Addresses of the buffers of a run, shared between threads.
#[derive(Clone, Copy)]
pub(crate) struct BaseAddresses<'a>(pub(crate) &'a [*mut u8]);

// SAFETY: addresses; the contract of each run states which threads may access the memory.
unsafe impl Sync for BaseAddresses<'_> {}
// SAFETY: as above.
unsafe impl Send for BaseAddresses<'_> {}
