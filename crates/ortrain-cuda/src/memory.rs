//! Memory on a device.

use std::any::Any;
use std::sync::Arc;

use ortrain_program::{AllocationError, DeviceError, DeviceMemory, Memory};

use crate::device::{Allocation, AllocationFailure, Device};
use crate::driver::Address;
use crate::queue::DEFAULT_STREAM;

/// Range of memory on a device.
#[derive(Debug)]
pub(crate) struct CudaMemory {
    device: Arc<Device>,
    allocation: Option<Allocation>,
    bytes: usize,
    /// True for a copy of a result. Later results reuse its allocation.
    is_result: bool,
}

impl AllocationFailure {
    /// Returns the error of an allocation of `bytes` bytes.
    pub(crate) fn error(self, device: &Device, bytes: usize) -> AllocationError {
        match self {
            AllocationFailure::OutOfMemory => {
                AllocationError::OnDevice { device: device.name().to_owned(), bytes, max_bytes: None }
            }
            AllocationFailure::Device(error) => AllocationError::Device(error),
        }
    }
}

impl CudaMemory {
    /// Allocates zeroed memory.
    pub(crate) fn new(device: &Arc<Device>, bytes: usize) -> Result<CudaMemory, AllocationError> {
        let allocation = device.allocate(bytes).map_err(|failure| failure.error(device, bytes))?;
        let memory =
            CudaMemory { device: device.clone(), allocation: Some(allocation), bytes, is_result: false };
        memory.clear()?;
        Ok(memory)
    }

    /// Allocates memory with undefined content for a result. It reuses the allocation of a dropped result of the same
    /// size, if available.
    fn for_result(device: &Arc<Device>, bytes: usize) -> Result<CudaMemory, AllocationError> {
        device.check()?;
        let allocation = match device.spare.take(Allocation::size_for(bytes)) {
            Some(allocation) => allocation,
            None => device.allocate(bytes).map_err(|failure| failure.error(device, bytes))?,
        };
        Ok(CudaMemory { device: device.clone(), allocation: Some(allocation), bytes, is_result: true })
    }

    /// Returns the allocation, which exists until the memory is dropped.
    pub(crate) fn allocation(&self) -> &Allocation {
        self.allocation.as_ref().expect("the allocation is taken by the drop alone")
    }

    fn address_at(&self, offset: usize) -> Address {
        self.allocation().address + offset as u64
    }

    /// Returns a range of memory that another library owns.
    pub(crate) fn adopted(device: &Arc<Device>, allocation: Allocation) -> CudaMemory {
        let bytes = allocation.bytes;
        CudaMemory { device: device.clone(), allocation: Some(allocation), bytes, is_result: false }
    }

    /// Returns true if another library owns the memory.
    pub(crate) fn is_adopted(&self) -> bool {
        self.allocation().is_adopted()
    }

    /// Makes later work of another library that owns the memory wait for the work of this process so far.
    fn hand_over(&self) -> Result<(), DeviceError> {
        if !self.is_adopted() {
            return Ok(());
        }
        self.device.on_queue("the order of two streams", |queue| {
            queue.flush()?;
            queue.order_before(DEFAULT_STREAM)
        })
    }

    /// Returns the device.
    pub(crate) fn owner(&self) -> &Arc<Device> {
        &self.device
    }

    /// Returns the memory as memory on `device`; `None` for host memory, or for another device.
    pub(crate) fn on<'m>(memory: &'m Memory, device: &Arc<Device>) -> Option<&'m CudaMemory> {
        let Memory::Device(memory) = memory else { return None };
        let memory = memory.as_any().downcast_ref::<CudaMemory>()?;
        Arc::ptr_eq(&memory.device, device).then_some(memory)
    }
}

impl DeviceMemory for CudaMemory {
    fn device(&self) -> &str {
        self.device.name()
    }

    fn size(&self) -> usize {
        self.bytes
    }

    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        self.device.write(self.address_at(offset), bytes)?;
        self.hand_over()
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.device.read(self.address_at(offset), bytes)
    }

    fn clear(&self) -> Result<(), DeviceError> {
        let Allocation { address, bytes, .. } = *self.allocation();
        self.device.on_queue("cuMemsetD8Async", |queue| {
            queue.flush()?;
            // SAFETY: the range is allocated; freeing waits for the work of the device.
            unsafe { queue.stream.clear(address, bytes) }
        })?;
        self.hand_over()
    }

    fn copy(&self, offset: usize, bytes: usize) -> Result<Arc<dyn DeviceMemory>, AllocationError> {
        let copy = CudaMemory::for_result(&self.device, bytes)?;
        if bytes > 0 {
            let (to, from) = (copy.address_at(0), self.address_at(offset));
            self.device.on_queue("cuMemcpyDtoDAsync", |queue| {
                queue.flush()?;
                // SAFETY: both ranges are allocated; freeing waits for the work of the device.
                unsafe { queue.stream.copy(to, from, bytes) }
            })?;
            self.hand_over()?;
        }
        Ok(Arc::new(copy))
    }

    fn copy_from(&self, offset: usize, source: &dyn DeviceMemory, bytes: usize) -> Result<bool, DeviceError> {
        let Some(source) = source.as_any().downcast_ref::<CudaMemory>() else { return Ok(false) };
        if !Arc::ptr_eq(&source.device, &self.device) {
            return Ok(false);
        }
        let (to, from) = (self.address_at(offset), source.address_at(0));
        self.device.on_queue("cuMemcpyDtoDAsync", |queue| {
            queue.flush_overlapping([to, from], bytes)?;
            // SAFETY: both ranges are allocated; freeing waits for the work of the device.
            unsafe { queue.stream.copy(to, from, bytes) }
        })?;
        source.hand_over()?;
        self.hand_over()?;
        Ok(true)
    }

    fn address(&self) -> Option<usize> {
        usize::try_from(self.allocation().address).ok()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        if self.is_result
            && self.device.check().is_ok()
            && let Some(allocation) = self.allocation.take()
        {
            self.device.spare.put(allocation.bytes, allocation);
        }
    }
}
