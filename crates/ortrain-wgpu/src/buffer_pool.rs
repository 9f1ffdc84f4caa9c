//! Buffer sizes, and pool of buffers for results.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Maximum bytes of the pool.
const MAX_POOL_BYTES: u64 = 8 << 20;

/// Returns the size of the buffer for `bytes` bytes.
pub(crate) fn buffer_size(bytes: usize) -> u64 {
    (bytes.next_multiple_of(256) as u64).max(256)
}

/// Pool of buffers of dropped results, for the results of later runs.
#[derive(Debug, Default)]
pub(crate) struct BufferPool(Mutex<Vec<wgpu::Buffer>>);

impl BufferPool {
    fn buffers(&self) -> MutexGuard<'_, Vec<wgpu::Buffer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a buffer of the size for `bytes` bytes out of the pool.
    pub(crate) fn take_buffer(&self, bytes: usize) -> Option<wgpu::Buffer> {
        let mut buffers = self.buffers();
        let at = buffers.iter().position(|buffer| buffer.size() == buffer_size(bytes))?;
        Some(buffers.swap_remove(at))
    }

    /// Returns a buffer to the pool. Returns false if the pool is full.
    pub(crate) fn put(&self, buffer: &wgpu::Buffer) -> bool {
        let mut buffers = self.buffers();
        let pooled_bytes: u64 = buffers.iter().map(wgpu::Buffer::size).sum();
        let keeps = pooled_bytes + buffer.size() <= MAX_POOL_BYTES;
        if keeps {
            buffers.push(buffer.clone());
        }
        keeps
    }
}
