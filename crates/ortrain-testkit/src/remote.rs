//! Test device: memory without host addresses, and optional failures.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ortrain_program::{
    AllocationError, Backend, Bf16Fallback, DeviceError, DeviceMemory, Executable, Memory, Precision,
    Program, Reference, Target, UnsupportedOnBackend, UnsupportedPrecision,
};

/// Name of the device.
const NAME: &str = "remote";

/// State of a device, and its limits.
#[derive(Debug)]
struct DeviceState {
    /// True if every call fails.
    is_lost: AtomicBool,
    /// Allocated bytes, and their maximum.
    used: AtomicUsize,
    max_used: AtomicUsize,
}

/// Reference evaluator over memory without host pointers.
#[derive(Clone, Debug)]
pub struct Remote(Arc<DeviceState>);

impl Default for Remote {
    fn default() -> Remote {
        Remote(Arc::new(DeviceState {
            is_lost: AtomicBool::new(false),
            used: AtomicUsize::new(0),
            max_used: AtomicUsize::new(usize::MAX),
        }))
    }
}

impl Remote {
    /// Creates a separate device.
    #[must_use]
    pub fn new() -> Remote {
        Remote::default()
    }

    /// Makes every following call fail.
    pub fn fail_all(&self) {
        self.0.is_lost.store(true, Ordering::Relaxed);
    }

    /// Limits further allocations to this number of bytes.
    pub fn limit_memory(&self, bytes: usize) {
        self.0.max_used.store(self.used().saturating_add(bytes), Ordering::Relaxed);
    }

    /// Returns the allocated bytes.
    #[must_use]
    pub fn used(&self) -> usize {
        self.0.used.load(Ordering::Relaxed)
    }
}

/// Bytes on the device.
#[derive(Debug)]
struct RemoteMemory {
    wire: Arc<DeviceState>,
    bytes: Mutex<Vec<u8>>,
}

impl RemoteMemory {
    fn new(wire: &Arc<DeviceState>, bytes: usize) -> Result<RemoteMemory, AllocationError> {
        let used = wire.used.load(Ordering::Relaxed).checked_add(bytes);
        let used = used.filter(|&total| total <= wire.max_used.load(Ordering::Relaxed));
        used.ok_or(AllocationError::OnDevice { device: NAME.into(), bytes, max_bytes: None })?;
        wire.used.fetch_add(bytes, Ordering::Relaxed);
        Ok(RemoteMemory { wire: wire.clone(), bytes: Mutex::new(vec![0; bytes]) })
    }

    fn bytes(&self) -> Result<MutexGuard<'_, Vec<u8>>, DeviceError> {
        match self.wire.is_lost.load(Ordering::Relaxed) {
            true => Err(DeviceError::new(NAME, "the wire is cut")),
            false => Ok(self.bytes.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }
}

impl DeviceMemory for RemoteMemory {
    fn device(&self) -> &str {
        NAME
    }

    fn size(&self) -> usize {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        self.bytes()?[offset..offset + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        bytes.copy_from_slice(&self.bytes()?[offset..offset + bytes.len()]);
        Ok(())
    }

    fn clear(&self) -> Result<(), DeviceError> {
        self.bytes()?.fill(0);
        Ok(())
    }

    fn copy(&self, offset: usize, bytes: usize) -> Result<Arc<dyn DeviceMemory>, AllocationError> {
        let copy = RemoteMemory::new(&self.wire, bytes)?;
        copy.write(0, &self.bytes()?[offset..offset + bytes])?;
        Ok(Arc::new(copy))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for RemoteMemory {
    fn drop(&mut self) {
        self.wire.used.fetch_sub(self.size(), Ordering::Relaxed);
    }
}

impl Backend for Remote {
    fn name(&self) -> &'static str {
        NAME
    }

    fn with_precision(
        &self,
        precision: Precision,
        fallback: Bf16Fallback,
    ) -> Result<Arc<dyn Backend>, UnsupportedPrecision> {
        Reference.with_precision(precision, fallback)?;
        Ok(Arc::new(self.clone()))
    }

    fn bf16_unit(&self) -> Option<&'static str> {
        None
    }

    fn target(&self) -> Target {
        Target::PLAIN
    }

    fn device(&self) -> &str {
        NAME
    }

    fn allocate(&self, bytes: usize, _room: usize) -> Result<Memory, AllocationError> {
        Ok(Memory::Device(Arc::new(RemoteMemory::new(&self.0, bytes)?)))
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>, UnsupportedOnBackend> {
        Reference.compile(program)
    }
}
