//! Memory that planes and workspaces are made of.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use crate::host_memory::{HostMemory, LentMemory};

/// Alignment, in bytes, of every [`Memory`] and of every tensor in it.
pub const ALIGNMENT: usize = 256;

/// Bytes that are copied at once within this process: they stay in a cache.
const PIECE: usize = 1 << 12;

/// The name of the device that is the memory of this process.
pub const HOST: &str = "cpu";

/// The next multiple of the alignment.
#[must_use]
pub fn align(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT)
}

/// The system does not give as much memory as is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the system does not give {bytes} bytes of memory")]
pub struct OutOfMemory {
    /// The bytes that were asked for.
    pub bytes: usize,
}

/// Memory that a backend does not give.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AllocationError {
    /// The system has no more.
    #[error(transparent)]
    Host(#[from] OutOfMemory),
    /// The device has no more, or none of this size in one piece.
    #[error("the device {device:?} does not give {bytes} bytes of memory{}", in_one_piece(.most))]
    OnDevice {
        /// The name of the device.
        device: String,
        /// The bytes that were asked for.
        bytes: usize,
        /// The most bytes that it ever gives in one piece, if that is less.
        most: Option<u64>,
    },
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

fn in_one_piece(most: &Option<u64>) -> String {
    most.map_or_else(String::new, |most| format!(", of which one piece has at most {most}"))
}

/// A call on a device that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the device {device:?} failed: {reason}")]
pub struct DeviceError {
    /// The name of the device.
    pub device: String,
    /// The message of its driver.
    pub reason: String,
}

/// Memory that lies on a device, out of reach of this process but for copies.
///
/// A device has one queue: copies and runs happen in the order of the calls. A write may return before it has happened; a read
/// waits. Offsets and lengths are any numbers of bytes inside the memory: [`Memory`] has checked them.
pub trait DeviceMemory: Send + Sync + Debug {
    /// The name of the device.
    fn device(&self) -> &str;

    /// The number of bytes asked for.
    fn size(&self) -> usize;

    /// Copies bytes in.
    ///
    /// # Errors
    /// When the device fails.
    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Copies bytes out.
    ///
    /// # Errors
    /// When the device fails.
    fn read(&self, offset: usize, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Sets everything to zero.
    ///
    /// # Errors
    /// When the device fails.
    fn clear(&self) -> Result<(), DeviceError>;

    /// A copy of a range, on the device. It returns before it has happened.
    ///
    /// # Errors
    /// When the device has no more memory, or fails.
    fn copy(&self, offset: usize, bytes: usize) -> Result<Arc<dyn DeviceMemory>, AllocationError>;

    /// The memory as its backend knows it.
    fn as_any(&self) -> &dyn Any;
}

/// A region of bytes that planes and workspaces are made of, in this process or on a device.
#[derive(Debug)]
pub enum Memory {
    /// In this process.
    Host(HostMemory),
    /// On a device.
    Device(Arc<dyn DeviceMemory>),
}

impl Memory {
    /// A region of this process of at least `bytes` bytes, all zero.
    ///
    /// # Errors
    /// When the system does not give that much.
    pub fn try_new(bytes: usize) -> Result<Memory, OutOfMemory> {
        HostMemory::try_new(bytes).map(Memory::Host)
    }

    /// The same for sizes that are no larger than what the process holds already.
    ///
    /// # Panics
    /// When the system does not give that much.
    #[must_use]
    pub fn new(bytes: usize) -> Memory {
        Memory::Host(HostMemory::new(bytes))
    }

    /// The region that somebody lends: see [`HostMemory::lent`].
    #[must_use]
    pub fn lent(lender: Arc<dyn LentMemory>) -> Memory {
        Memory::Host(HostMemory::lent(lender))
    }

    /// The memory, if it lies in this process.
    #[must_use]
    pub fn host(&self) -> Option<&HostMemory> {
        match self {
            Memory::Host(memory) => Some(memory),
            Memory::Device(_) => None,
        }
    }

    /// The name of the device that it lies on: [`HOST`] for memory of this process.
    #[must_use]
    pub fn device(&self) -> &str {
        match self {
            Memory::Host(_) => HOST,
            Memory::Device(memory) => memory.device(),
        }
    }

    /// The number of bytes asked for.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Memory::Host(memory) => memory.len(),
            Memory::Device(memory) => memory.size(),
        }
    }

    /// True without any byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// True for memory that is lent for reading alone.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.host().is_some_and(HostMemory::is_read_only)
    }

    /// Makes it at least `bytes` bytes long, if there is room: what is there stays, what comes to it is zero. Returns false, and
    /// changes nothing, if there is less room.
    pub fn grow(&mut self, bytes: usize) -> bool {
        match self {
            Memory::Host(memory) => memory.grow(bytes),
            Memory::Device(memory) => bytes <= memory.size(),
        }
    }

    /// Checks that a range lies inside.
    fn check(&self, offset: usize, bytes: usize) {
        assert!(offset + bytes <= self.len(), "{offset}+{bytes} bytes of {}", self.len());
    }

    /// Copies bytes in.
    ///
    /// # Errors
    /// When the memory lies on a device, and that fails.
    ///
    /// # Panics
    /// When they do not fit, or nobody may write here.
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

    /// Copies bytes out.
    ///
    /// # Errors
    /// When the memory lies on a device, and that fails.
    ///
    /// # Panics
    /// When there are fewer.
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

    /// A copy of a range.
    ///
    /// # Errors
    /// When the memory lies on a device, and that fails.
    ///
    /// # Panics
    /// When there are fewer bytes.
    pub fn to_vec(&self, offset: usize, len: usize) -> Result<Vec<u8>, DeviceError> {
        let mut bytes = vec![0; len];
        self.read(offset, &mut bytes)?;
        Ok(bytes)
    }

    /// A copy of a range in memory of its own, where this memory lies.
    ///
    /// # Errors
    /// When there is no more memory there, or the device fails.
    ///
    /// # Panics
    /// When there are fewer bytes.
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

    /// True if all bytes are zero. Memory of this process that nobody has touched stays with the system.
    ///
    /// # Errors
    /// When the memory lies on a device, and that fails.
    pub fn is_zero(&self) -> Result<bool, DeviceError> {
        match self {
            Memory::Host(memory) => Ok(memory.is_zero()),
            Memory::Device(_) => Ok(self.to_vec(0, self.len())?.iter().all(|&byte| byte == 0)),
        }
    }

    /// Sets everything to zero.
    ///
    /// # Errors
    /// When the memory lies on a device, and that fails.
    ///
    /// # Panics
    /// When nobody may write here.
    pub fn clear(&self) -> Result<(), DeviceError> {
        match self {
            Memory::Host(memory) => memory.clear(),
            Memory::Device(memory) => memory.clear()?,
        }
        Ok(())
    }
}
