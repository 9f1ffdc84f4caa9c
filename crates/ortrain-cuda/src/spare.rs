//! Allocations of dropped results, for later results.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::device::Allocation;

/// Maximum bytes of the pool.
const MAX_BYTES: usize = 8 << 20;

/// Pool of allocations. An allocation takes long, and a release waits for the device.
#[derive(Debug, Default)]
pub(crate) struct Spare(Mutex<Vec<Allocation>>);

impl Spare {
    fn allocations(&self) -> MutexGuard<'_, Vec<Allocation>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes an allocation of the size for `bytes` bytes out of the pool.
    pub(crate) fn take(&self, bytes: usize) -> Option<Allocation> {
        let mut allocations = self.allocations();
        let at = allocations.iter().position(|known| known.bytes == Allocation::size_for(bytes))?;
        Some(allocations.swap_remove(at))
    }

    /// Puts an allocation into the pool, or frees it if the pool is full.
    pub(crate) fn put(&self, allocation: Allocation) {
        let mut allocations = self.allocations();
        let pooled: usize = allocations.iter().map(|known| known.bytes).sum();
        if pooled + allocation.bytes <= MAX_BYTES {
            allocations.push(allocation);
        }
    }
}
