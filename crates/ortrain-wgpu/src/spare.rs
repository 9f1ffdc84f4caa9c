//! Sizes of buffers, and buffers that wait for their next use.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Bytes of buffers that wait for results, at most.
const SPARE: u64 = 8 << 20;

/// Bytes of the buffer for so many bytes.
pub(crate) fn size_for(bytes: usize) -> u64 {
    (bytes.next_multiple_of(256) as u64).max(256)
}

/// Buffers of results that are gone, for the results of later runs.
#[derive(Debug, Default)]
pub(crate) struct Spare(Mutex<Vec<wgpu::Buffer>>);

impl Spare {
    fn buffers(&self) -> MutexGuard<'_, Vec<wgpu::Buffer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A buffer of the size for so many bytes.
    pub(crate) fn take(&self, bytes: usize) -> Option<wgpu::Buffer> {
        let mut buffers = self.buffers();
        let at = buffers.iter().position(|buffer| buffer.size() == size_for(bytes))?;
        Some(buffers.swap_remove(at))
    }

    /// Keeps a buffer. Returns false if there are enough.
    pub(crate) fn keep(&self, buffer: &wgpu::Buffer) -> bool {
        let mut buffers = self.buffers();
        let held: u64 = buffers.iter().map(wgpu::Buffer::size).sum();
        let keeps = held + buffer.size() <= SPARE;
        if keeps {
            buffers.push(buffer.clone());
        }
        keeps
    }
}
