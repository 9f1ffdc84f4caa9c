//! Memory of planes and workspaces, in this process and on devices.
//!
//! - [`Memory`]: memory that programs run on. Its copies can fail, because it may be on a device.
//! - [`HostMemory`]: memory of this process, owned or [lent](BorrowedMemory).
//! - [`DeviceMemory`]: trait for the memory of a backend on another device.
#![forbid(unsafe_code)]

mod host_memory;
mod memory;

pub use host_memory::{ALIGNMENT, BorrowedMemory, HostMemory, OutOfMemory, align};
pub use memory::{AllocationError, DeviceError, DeviceMemory, HOST, LateFault, Memory};
