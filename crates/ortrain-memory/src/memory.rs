//! Memory of planes and workspaces.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use crate::host_memory::{BorrowedMemory, HostMemory, OutOfMemory};

/// Number of bytes that a copy within this process moves at a time. They fit into a cache.
const PIECE: usize = 1 << 12;

/// Name of the device that is the memory of this process.
pub const HOST: &str = "cpu";

/// Failed allocation of memory by a backend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocationError {
    /// The system has no more memory.
    #[error(transparent)]
    Host(#[from] OutOfMemory),
    /// The device has no more memory, or no contiguous range of this size.
    #[error("the device {device:?} cannot allocate {bytes} bytes of memory{}", in_one_piece(.max_bytes))]
    OnDevice {
        /// Name of the device.
        device: String,
        /// Requested number of bytes.
        bytes: usize,
        /// Maximum number of bytes of a contiguous range, if that is less than requested.
        max_bytes: Option<u64>,
    },
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

fn in_one_piece(limit: &Option<u64>) -> String {
    limit.map_or_else(String::new, |limit| format!("; one allocation has at most {limit} bytes"))
}

/// Failed call on a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the device {device:?} failed: {reason}")]
pub struct DeviceError {
    /// Name of the device.
    pub device: String,
    /// Message of the device's driver.
    pub reason: String,
    /// Index out of range in an earlier run, which the device reports with the next read. The device still works.
    pub fault: Option<Box<LateFault>>,
}

/// Index out of range that a device reports after its run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LateFault {
    /// Node.
    pub node: String,
    /// Position of the index in the index tensor, by axis.
    pub at: Vec<usize>,
    /// Index.
    pub index: i64,
    /// Number of entries.
    pub bound: i64,
}

impl DeviceError {
    /// Creates the error of a device that failed.
    pub fn new(device: impl Into<String>, reason: impl Into<String>) -> DeviceError {
        DeviceError { device: device.into(), reason: reason.into(), fault: None }
    }
}

/// Memory on a device, which this process can access only by copies.
///
/// A device has one queue: copies and runs are executed in the order of the calls. A write may return before it is
/// executed; a read waits. [`Memory`] has checked that offsets and lengths, in bytes, are inside the memory.
pub trait DeviceMemory: Send + Sync + Debug {
    /// Returns the name of the device.
    fn device(&self) -> &str;

    /// Returns the requested number of bytes.
    fn size(&self) -> usize;

    /// Copies bytes in.
    ///
    /// # Errors
    /// Fails if the device fails.
    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Copies bytes out. A device that checks indices itself reports the first index out of range of earlier runs
    /// here, once: see [`DeviceError::fault`].
    ///
    /// # Errors
    /// Fails if the device fails, or if an earlier run has failed.
    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Sets all bytes to zero.
    ///
    /// # Errors
    /// Fails if the device fails.
    fn clear(&self) -> Result<(), DeviceError>;

    /// Copies a range on the device. The call returns before the copy is executed.
    ///
    /// # Errors
    /// Fails if the device has no more memory, or fails.
    fn copy(&self, offset: usize, bytes: usize) -> Result<Arc<dyn DeviceMemory>, AllocationError>;

    /// Copies a range of other memory to an offset, if this device can do so without the host. The call returns before
    /// the copy is executed. Returns false, and changes nothing, otherwise.
    ///
    /// # Errors
    /// Fails if the device fails.
    fn copy_from(&self, offset: usize, source: &dyn DeviceMemory, bytes: usize) -> Result<bool, DeviceError> {
        let _ = (offset, source, bytes);
        Ok(false)
    }

    /// Returns the address of the first byte, if the device has one address space with this process. Then two memories
    /// share bytes only if their ranges of addresses overlap. `None` means that no two memories share bytes.
    fn address(&self) -> Option<usize> {
        None
    }

    /// Returns the memory for a downcast to the backend's type.
    fn as_any(&self) -> &dyn Any;
}

/// Region of bytes for planes and workspaces, in this process or on a device.
#[derive(Debug)]
pub enum Memory {
    /// Memory of this process.
    Host(HostMemory),
    /// Memory on a device.
    Device(Arc<dyn DeviceMemory>),
}

impl Memory {
    /// Allocates a zeroed region of at least `bytes` bytes in this process.
    ///
    /// # Errors
    /// Fails if the system does not provide the memory.
    pub fn try_new(bytes: usize) -> Result<Memory, OutOfMemory> {
        HostMemory::try_new(bytes).map(Memory::Host)
    }

    /// Like [`Memory::try_new`], for a size that does not exceed the memory that the process already holds.
    ///
    /// # Panics
    /// Panics if the system does not provide the memory.
    #[must_use]
    pub fn new(bytes: usize) -> Memory {
        Memory::Host(HostMemory::new(bytes))
    }

    /// Wraps the bytes of a lender: see [`HostMemory::borrowed`].
    #[must_use]
    pub fn borrowed(lender: Arc<dyn BorrowedMemory>) -> Memory {
        Memory::Host(HostMemory::borrowed(lender))
    }

    /// Returns the memory, if it belongs to this process.
    #[must_use]
    pub fn host(&self) -> Option<&HostMemory> {
        match self {
            Memory::Host(memory) => Some(memory),
            Memory::Device(_) => None,
        }
    }

    /// Returns the name of the memory's device: [`HOST`] for memory of this process.
    #[must_use]
    pub fn device(&self) -> &str {
        match self {
            Memory::Host(_) => HOST,
            Memory::Device(memory) => memory.device(),
        }
    }

    /// Returns the requested number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Memory::Host(memory) => memory.len(),
            Memory::Device(memory) => memory.size(),
        }
    }

    /// Returns true if the memory has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns true if the memory is lent for reading only.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.host().is_some_and(HostMemory::is_read_only)
    }

    /// Extends the memory to at least `bytes` bytes, within its capacity. The content is preserved, and new bytes are
    /// zero. Returns false, and changes nothing, if the capacity is too small.
    pub fn grow(&mut self, bytes: usize) -> bool {
        match self {
            Memory::Host(memory) => memory.grow(bytes),
            Memory::Device(memory) => bytes <= memory.size(),
        }
    }

    /// Asserts that a range is inside the memory.
    fn check(&self, offset: usize, bytes: usize) {
        assert!(offset + bytes <= self.len(), "{offset}+{bytes} bytes of {}", self.len());
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// Fails if the memory is on a device that fails.
    ///
    /// # Panics
    /// Panics if the range ends after the memory, or if the memory is read-only.
    pub fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        match self {
            Memory::Host(memory) => memory.write(offset, bytes),
            Memory::Device(memory) => {
                self.check(offset, bytes.len());
                memory.write(offset, bytes)?;
            }
        }
        Ok(())
    }

    /// Copies the first bytes of other memory in: on the device of both memories, or through this process.
    ///
    /// # Errors
    /// Fails if a device fails.
    ///
    /// # Panics
    /// Panics if a range ends after its memory, or if this memory is read-only.
    pub fn copy_from(&self, offset: usize, source: &Memory, bytes: usize) -> Result<(), DeviceError> {
        self.check(offset, bytes);
        source.check(0, bytes);
        if let (Memory::Device(to), Memory::Device(from)) = (self, source)
            && to.copy_from(offset, &**from, bytes)?
        {
            return Ok(());
        }
        self.write(offset, &source.to_vec(0, bytes)?)
    }

    /// Copies bytes out.
    ///
    /// # Errors
    /// Fails if the memory is on a device that fails.
    ///
    /// # Panics
    /// Panics if the range ends after the memory.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        match self {
            Memory::Host(memory) => memory.read(offset, bytes),
            Memory::Device(memory) => {
                self.check(offset, bytes.len());
                memory.read(offset, bytes)?;
            }
        }
        Ok(())
    }

    /// Returns a copy of a range.
    ///
    /// # Errors
    /// Fails if the memory is on a device that fails.
    ///
    /// # Panics
    /// Panics if the range ends after the memory.
    pub fn to_vec(&self, offset: usize, len: usize) -> Result<Vec<u8>, DeviceError> {
        let mut bytes = vec![0; len];
        self.read(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// Copies a range to new memory on the same device.
    ///
    /// # Errors
    /// Fails if the device has no more memory, or fails.
    ///
    /// # Panics
    /// Panics if the range ends after the memory.
    pub fn copy(&self, offset: usize, bytes: usize) -> Result<Memory, AllocationError> {
        match self {
            Memory::Host(memory) => {
                let copy = HostMemory::try_new(bytes)?;
                let mut piece = [0; PIECE];
                for from in (0..bytes).step_by(PIECE) {
                    let piece = &mut piece[..PIECE.min(bytes - from)];
                    memory.read(offset + from, piece);
                    copy.write(from, piece);
                }
                Ok(Memory::Host(copy))
            }
            Memory::Device(memory) => {
                self.check(offset, bytes);
                Ok(Memory::Device(memory.copy(offset, bytes)?))
            }
        }
    }

    /// Returns true if all bytes are zero. For memory of this process, the check does not allocate pages that were
    /// never touched.
    ///
    /// # Errors
    /// Fails if the memory is on a device that fails.
    pub fn is_zero(&self) -> Result<bool, DeviceError> {
        match self {
            Memory::Host(memory) => Ok(memory.is_zero()),
            Memory::Device(_) => Ok(self.to_vec(0, self.len())?.iter().all(|&byte| byte == 0)),
        }
    }

    /// Sets all bytes to zero.
    ///
    /// # Errors
    /// Fails if the memory is on a device that fails.
    ///
    /// # Panics
    /// Panics if the memory is read-only.
    pub fn clear(&self) -> Result<(), DeviceError> {
        match self {
            Memory::Host(memory) => memory.clear(),
            Memory::Device(memory) => memory.clear()?,
        }
        Ok(())
    }
}
