//! Which backend runs what.

use std::sync::Arc;

use ortrain_cpu::Cpu;
pub(crate) use ortrain_cpu::UnknownIsa;
use ortrain_program::{Backend, Limits, Memory, OutOfMemory, Reference};

use crate::{Error, Result};

/// The backend that is used when none is given.
///
/// ```
/// assert_eq!(ortrain::default_backend()?.name(), "cpu");
/// # Ok::<(), ortrain::Error>(())
/// ```
///
/// # Errors
/// When the environment variable `ORTRAIN_ISA` names no instruction-set level.
pub fn default_backend() -> Result<Arc<dyn Backend>> {
    Ok(Arc::new(Cpu::new()?))
}

/// The backend of a name: `cpu`, or `reference`, which says what is right and takes its time. `num_threads` is how many
/// threads runs of this process may take, 0 to leave it as it is; results do not depend on it.
///
/// ```
/// use ortrain::{ErrorKind, backend};
///
/// assert_eq!(backend("cpu", 2)?.name(), "cpu");
/// assert_eq!(backend("reference", 0)?.name(), "reference");
/// assert_eq!(backend("tpu", 0).unwrap_err().kind(), ErrorKind::InvalidArgument);
/// # Ok::<(), ortrain::Error>(())
/// ```
///
/// # Errors
/// When there is none of this name; for `cpu`, as [`default_backend`].
pub fn backend(name: &str, num_threads: usize) -> Result<Arc<dyn Backend>> {
    match name {
        "cpu" => {
            if num_threads > 0 {
                Cpu::set_num_threads(num_threads);
            }
            default_backend()
        }
        "reference" => Ok(Arc::new(Reference)),
        _ => Err(Error::Argument(format!(
            "there is no device {name:?} here; there are \"cpu\" and \"reference\""
        ))),
    }
}

/// Memory of the host, all zero.
pub(crate) fn host_memory(bytes: usize) -> std::result::Result<Memory, OutOfMemory> {
    ortrain_cpu::allocate(bytes, bytes).map(Memory::Host)
}

/// Has the system give every page of memory that is about to be written, on all threads.
pub(crate) fn claim(memory: &Memory) {
    if let Some(memory) = memory.host() {
        ortrain_cpu::claim(memory);
    }
}

/// What the machine of a backend can do at most; of one that does not know, what the processor can do.
pub(crate) fn limits_of(backend: &dyn Backend) -> Result<Limits> {
    let of_processor = || Ok(Cpu::new()?.limits().expect("the limits of the processor are measured"));
    backend.limits().map_or_else(of_processor, Ok)
}
