//! Allocations of dropped results, for later results.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Maximum bytes of the pool.
const MAX_BYTES: usize = 8 << 20;

/// Pool of allocations with their bytes. An allocation takes long, and a release waits for the device.
#[derive(Debug)]
pub(crate) struct Spare<A>(Mutex<Vec<(usize, A)>>);

impl<A> Default for Spare<A> {
    fn default() -> Spare<A> {
        Spare(Mutex::default())
    }
}

impl<A> Spare<A> {
    fn allocations(&self) -> MutexGuard<'_, Vec<(usize, A)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an allocation of `bytes` bytes out of the pool.
    pub(crate) fn take(&self, bytes: usize) -> Option<A> {
        let mut allocations = self.allocations();
        let at = allocations.iter().position(|(known, _)| *known == bytes)?;
        Some(allocations.swap_remove(at).1)
    }

    /// Puts an allocation of `bytes` bytes into the pool, or frees it if the pool is full.
    pub(crate) fn put(&self, bytes: usize, allocation: A) {
        let mut allocations = self.allocations();
        let pooled: usize = allocations.iter().map(|(known, _)| known).sum();
        if pooled + bytes <= MAX_BYTES {
            allocations.push((bytes, allocation));
        }
    }
}
