//! Memory that this process shares with other libraries on the same device, in the order of streams.

use std::any::Any;
use std::sync::Arc;

use ortrain_program::{DeviceError, Memory};

use crate::Cuda;
use crate::memory::CudaMemory;

/// Device memory, as other libraries address it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedMemory {
    /// Address of the first byte.
    pub address: u64,
    /// Index of the device.
    pub index: i32,
    /// Stream in which this process uses the memory, as a handle of CUDA.
    pub stream: u64,
}

/// Returns the address of memory on a CUDA device; `None` for other memory.
///
/// `stream` is a handle of CUDA; 1 is the default stream. Its work after this call waits for the earlier work of this
/// process. Later work of this process waits for the work of the stream at that time. A user of a live address repeats
/// the call before each use.
///
/// # Errors
/// When the device fails.
pub fn share_memory(memory: &Memory, stream: Option<u64>) -> Option<Result<SharedMemory, DeviceError>> {
    let Memory::Device(device_memory) = memory else { return None };
    let memory = device_memory.as_any().downcast_ref::<CudaMemory>()?;
    let device = memory.owner();
    let shared = || {
        let (ordered, own) = device.on_queue("a copy to the device", |queue| {
            queue.flush()?;
            let ordered = stream.map_or(Ok(()), |stream| queue.order_before(stream));
            Ok((ordered, queue.stream.as_raw() as usize as u64))
        })?;
        // A stream that does not exist is a fault of the caller.
        ordered.map_err(|error| device.refusal(error, "the order of two streams"))?;
        Ok(SharedMemory { address: memory.allocation().address, index: device.index(), stream: own })
    };
    Some(shared())
}

/// Returns true for memory that another library owns: see [`Cuda::adopt`].
#[must_use]
pub fn is_adopted(memory: &Memory) -> bool {
    let Memory::Device(memory) = memory else { return false };
    memory.as_any().downcast_ref::<CudaMemory>().is_some_and(CudaMemory::is_adopted)
}

impl Cuda {
    /// Returns the stream of the device, as a handle of CUDA for other libraries.
    #[must_use]
    pub fn stream(&self) -> u64 {
        self.device.lock_queue().stream.as_raw() as usize as u64
    }

    /// Makes later work of this process wait for the work of a stream so far, for example of the default stream, 1.
    ///
    /// # Errors
    /// When the device fails.
    pub fn order_after(&self, stream: u64) -> Result<(), DeviceError> {
        let ordered = self.device.on_queue("a copy to the device", |queue| Ok(queue.order_after(stream)))?;
        ordered.map_err(|error| self.device.refusal(error, "the order of two streams"))
    }

    /// Returns memory of another library on this device. `owner` keeps it alive; it is dropped when the device has
    /// completed all work on the memory.
    ///
    /// # Safety
    /// The range is allocated on this device as long as `owner` exists, and other libraries change it only in the order
    /// of streams.
    #[must_use]
    pub unsafe fn adopt(&self, address: u64, bytes: usize, owner: Box<dyn Any + Send + Sync>) -> Memory {
        let allocation = self.device.adopt(address, bytes, owner);
        Memory::Device(Arc::new(CudaMemory::adopted(&self.device, allocation)))
    }
}
