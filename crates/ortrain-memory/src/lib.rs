//! Memory of planes and workspaces, in this process and on devices.
//!
//! - [`Memory`]: what programs run on. Its copies can fail, for it may lie on a device.
//! - [`HostMemory`]: bytes of this process, of its own or [lent](LentMemory) by somebody.
//! - [`DeviceMemory`]: what a backend implements whose memory lies elsewhere.
#![forbid(unsafe_code)]

mod host_memory;
mod memory;

pub use host_memory::{HostMemory, LentMemory};
pub use memory::{ALIGNMENT, AllocationError, DeviceError, DeviceMemory, HOST, Memory, OutOfMemory, align};
