//! What a run is given.

use crate::pool::Pool;
use crate::tile::ALIGN;

/// The values of [`ortrain_expr::RunScalar`] in one run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunScalars {
    /// The seed of random numbers.
    pub seed: u64,
    /// The number of train steps done so far.
    pub train_step: u64,
}

/// Working memory that a caller lends to one run: registers, packed blocks, partial results.
///
/// A kernel says how much it wants for a number of threads; with less (down to what it wants for one thread) it uses
/// fewer threads, with the same result. What the memory holds before does not matter, what it holds after means
/// nothing.
#[derive(Clone, Copy, Debug)]
pub struct Scratch {
    at: *mut u8,
    bytes: usize,
}

impl Scratch {
    /// The alignment that scratch memory needs.
    pub const ALIGN: usize = ALIGN;

    /// `bytes` bytes from `at` on, which must be aligned to [`Scratch::ALIGN`]. Whoever hands it to a run promises
    /// that the memory may be read and written, and that nobody else uses it until the run is over.
    #[must_use]
    pub fn new(at: *mut u8, bytes: usize) -> Scratch {
        Scratch { at, bytes }
    }

    /// Parts the memory into a shared piece and one piece for each worker.
    ///
    /// # Panics
    /// When there is not enough for one worker, or it is not aligned.
    pub(crate) fn part(self, shared: usize, each: usize, pool: &Pool) -> Parts {
        debug_assert!(shared.is_multiple_of(ALIGN) && each.is_multiple_of(ALIGN) && each > 0);
        assert!(
            self.at.addr().is_multiple_of(ALIGN),
            "scratch memory at {:p} is not aligned to {ALIGN}",
            self.at
        );
        assert!(
            self.bytes >= shared + each,
            "{} bytes of scratch memory where one thread needs {}",
            self.bytes,
            shared + each
        );
        let workers = ((self.bytes - shared) / each).min(pool.num_threads());
        Parts { at: self.at, shared, each, workers }
    }
}

/// Scratch memory, parted.
#[derive(Clone, Copy)]
pub(crate) struct Parts {
    at: *mut u8,
    shared: usize,
    each: usize,
    /// Workers that have a piece.
    pub(crate) workers: usize,
}

// SAFETY: an address and sizes; what is done with the memory is answered for where it is done.
unsafe impl Sync for Parts {}
// SAFETY: as above.
unsafe impl Send for Parts {}

impl Parts {
    /// The shared piece.
    pub(crate) fn shared(&self) -> *mut u8 {
        self.at
    }

    /// The piece of a worker.
    pub(crate) fn of(&self, worker: usize) -> *mut u8 {
        debug_assert!(worker < self.workers);
        self.at.wrapping_add(self.shared + worker * self.each)
    }
}

/// The buffers of a run, as the threads share them.
#[derive(Clone, Copy)]
pub(crate) struct Bases<'a>(pub(crate) &'a [*mut u8]);

// SAFETY: addresses; the contract of each run says who may touch what they point to.
unsafe impl Sync for Bases<'_> {}
// SAFETY: as above.
unsafe impl Send for Bases<'_> {}
