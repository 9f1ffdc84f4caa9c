//! Memory on a device.

use std::any::Any;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use ortrain_program::{AllocationError, DeviceError, DeviceMemory, Memory};

use crate::device::Device;

/// Bytes of a word. Copies must start and end at word boundaries.
const WORD_BYTES: usize = 4;
/// Maximum bytes of one read: the size of the staging buffer.
const MAX_READ_BYTES: usize = 4 << 20;

/// Buffer on a device.
#[derive(Debug)]
pub(crate) struct WgpuMemory {
    device: Arc<Device>,
    buffer: wgpu::Buffer,
    bytes: usize,
    /// True for a copy of a result. Later results reuse its buffer.
    is_result: bool,
}

impl WgpuMemory {
    /// Allocates zeroed memory.
    pub(crate) fn new(device: Arc<Device>, bytes: usize) -> Result<WgpuMemory, AllocationError> {
        device.check()?;
        let error =
            |max_bytes| AllocationError::OnDevice { device: device.name().to_owned(), bytes, max_bytes };
        let limit = device.device.limits().max_buffer_size;
        if bytes as u64 > limit {
            return Err(error(Some(limit)));
        }
        let scope = device.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let buffer = device.buffer(bytes);
        if pollster::block_on(scope.pop()).is_some() {
            return Err(error(None));
        }
        Ok(WgpuMemory { device, buffer, bytes, is_result: false })
    }

    /// Allocates memory with undefined content for a result. It reuses the buffer of a dropped result of the same size,
    /// if available.
    fn for_result(device: Arc<Device>, bytes: usize) -> Result<WgpuMemory, AllocationError> {
        match device.spare.take_buffer(bytes) {
            Some(buffer) => Ok(WgpuMemory { device, buffer, bytes, is_result: true }),
            None => {
                let mut new_memory = WgpuMemory::new(device, bytes)?;
                new_memory.is_result = true;
                Ok(new_memory)
            }
        }
    }

    /// Returns the buffer of a memory on `device`; `None` for host memory, or for another device.
    pub(crate) fn buffer_of<'m>(memory: &'m Memory, device: &Arc<Device>) -> Option<&'m wgpu::Buffer> {
        let Memory::Device(memory) = memory else { return None };
        let memory = memory.as_any().downcast_ref::<WgpuMemory>()?;
        Arc::ptr_eq(&memory.device, device).then_some(&memory.buffer)
    }
}

impl DeviceMemory for WgpuMemory {
    fn device(&self) -> &str {
        self.device.name()
    }

    fn size(&self) -> usize {
        self.bytes
    }

    /// Writes bytes. Partially covered words are read first.
    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        let (start, end) =
            (offset / WORD_BYTES * WORD_BYTES, (offset + bytes.len()).next_multiple_of(WORD_BYTES));
        self.device.check()?;
        if bytes.is_empty() {
            return Ok(());
        }
        if (start, end) == (offset, offset + bytes.len()) {
            self.device.upload(&self.buffer, start as u64, bytes)?;
        } else {
            let mut words = vec![0; end - start];
            let last = words.len() - WORD_BYTES;
            read_buffer(&self.device, &self.buffer, start, &mut words[..WORD_BYTES])?;
            if last > 0 {
                read_buffer(&self.device, &self.buffer, end - WORD_BYTES, &mut words[last..])?;
            }
            words[offset - start..][..bytes.len()].copy_from_slice(bytes);
            self.device.upload(&self.buffer, start as u64, &words)?;
        }
        self.device.check()
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        read_buffer(&self.device, &self.buffer, offset, bytes)
    }

    fn clear(&self) -> Result<(), DeviceError> {
        self.device.check()?;
        let mut encoder = self.device.encoder();
        encoder.clear_buffer(&self.buffer, 0, None);
        self.device.queue.submit([encoder.finish()]);
        self.device.check()
    }

    /// Copies a range. Ranges without word alignment are copied through the host.
    fn copy(&self, offset: usize, bytes: usize) -> Result<Arc<dyn DeviceMemory>, AllocationError> {
        let copy = WgpuMemory::for_result(self.device.clone(), bytes)?;
        let end = (offset + bytes).next_multiple_of(WORD_BYTES) as u64;
        if bytes > 0 && offset.is_multiple_of(WORD_BYTES) && end <= self.buffer.size() {
            let mut encoder = self.device.encoder();
            encoder.copy_buffer_to_buffer(&self.buffer, offset as u64, &copy.buffer, 0, end - offset as u64);
            self.device.queue.submit([encoder.finish()]);
        } else {
            let mut words = vec![0; bytes];
            self.read(offset, &mut words)?;
            copy.write(0, &words)?;
        }
        self.device.check()?;
        Ok(Arc::new(copy))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for WgpuMemory {
    /// Releases the buffer. Bind groups of earlier programs keep it alive until these programs run on other memory.
    fn drop(&mut self) {
        if self.device.is_own_process() && !(self.is_result && self.device.spare.put(&self.buffer)) {
            self.device.release(&self.buffer);
            self.buffer.destroy();
        }
    }
}

/// Copies bytes of a buffer to the host, after all submitted work is complete.
pub(crate) fn read_buffer(
    device: &Device,
    buffer: &wgpu::Buffer,
    offset: usize,
    bytes: &mut [u8],
) -> Result<(), DeviceError> {
    device.check()?;
    let mut staging = device.staging.lock().unwrap_or_else(PoisonError::into_inner);
    device.downloaded.fetch_add(bytes.len() as u64, Ordering::Relaxed);
    for (at, piece) in (0..).step_by(MAX_READ_BYTES).zip(bytes.chunks_mut(MAX_READ_BYTES)) {
        let from = offset + at;
        let (start, end) =
            (from / WORD_BYTES * WORD_BYTES, (from + piece.len()).next_multiple_of(WORD_BYTES));
        let bytes = (end - start) as u64;
        let readback = match staging.take() {
            Some(readback) if readback.size() >= bytes => readback,
            small => {
                small.iter().for_each(|readback| device.release(readback));
                device.readable_buffer(bytes)
            }
        };
        let mut encoder = device.encoder();
        encoder.copy_buffer_to_buffer(buffer, start as u64, &readback, 0, bytes);
        device.queue.submit([encoder.finish()]);
        let (sender, receiver) = std::sync::mpsc::channel();
        readback.map_async(wgpu::MapMode::Read, ..bytes, move |outcome| {
            // The receiver is dropped only after a failed wait, which is reported.
            let _ = sender.send(outcome);
        });
        device.wait()?;
        receiver.recv().map_err(|error| device.error(&error))?.map_err(|error| device.error(&error))?;
        let view = readback.get_mapped_range(..bytes).map_err(|error| device.error(&error))?;
        piece.copy_from_slice(&view[from - start..][..piece.len()]);
        drop(view);
        readback.unmap();
        *staging = Some(readback);
    }
    Ok(())
}
