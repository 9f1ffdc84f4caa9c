//! Devices, and the backend of each.

use std::sync::Arc;

use ortrain_cpu::Cpu;
use ortrain_program::{Backend, HOST, Limits, Memory, OutOfMemory, Reference};

use crate::suggest::hint;
use crate::{Error, Result};

/// Name of the reference evaluator.
const REFERENCE: &str = "reference";

/// Name that selects the best available device.
const AUTO: &str = "auto";

/// A device of this machine, as [`devices`] lists it.
///
/// ```
/// let cpu = &ortrain::devices()[0];
/// assert_eq!((cpu.name.as_str(), cpu.kind), ("cpu", "processor"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceInfo {
    /// Name, as [`backend`] accepts it.
    pub name: String,
    /// `"processor"`; for GPUs `"discrete"`, `"integrated"` or `"other"`, or `"software"` for a driver that
    /// computes on the processor; `"reference"` for the evaluator that defines the correct results.
    pub kind: &'static str,
    /// Description by its driver, or instruction-set level.
    pub description: String,
    /// Driver with its version; empty without a driver.
    pub driver: String,
    /// Bytes of device memory; `None` if unknown: Vulkan, Metal and Direct3D 12 do not report it.
    pub memory: Option<u64>,
    /// Maximum total bytes of all weights of one element type; `None` if only the memory limits them.
    pub plane_bytes: Option<u64>,
    /// Maximum bytes of one tensor that a step reads or writes; `None` if only the memory limits it.
    pub tensor_bytes: Option<u64>,
}

/// Returns the devices of this machine: the processor, the reference evaluator, then the GPUs.
///
/// GPUs through CUDA come first, then the GPUs of each other interface, the fastest kind first.
///
/// GPUs require the features `cuda` and `wgpu` of this crate. Drivers that compute on the processor are included if the
/// environment variable `ORTRAIN_SOFTWARE_GPU` is `1`.
///
/// ```
/// let devices = ortrain::devices();
/// assert!(devices.iter().all(|device| ortrain::backend(&device.name, 0).is_ok()));
/// ```
#[must_use]
pub fn devices() -> Vec<DeviceInfo> {
    let host = |name: &str, kind, description: String| DeviceInfo {
        name: name.to_owned(),
        kind,
        description,
        driver: String::new(),
        memory: ortrain_cpu::memory_bytes(),
        plane_bytes: None,
        tensor_bytes: None,
    };
    let level = Cpu::new().map_or_else(|error| error.to_string(), |cpu| cpu.level().to_owned());
    let mut available = vec![
        host(HOST, "processor", level),
        host(REFERENCE, REFERENCE, "reference evaluator for tests".to_owned()),
    ];
    available.extend(cuda::devices());
    available.extend(gpu::devices());
    available
}

/// Returns the default backend: the processor.
///
/// ```
/// assert_eq!(ortrain::default_backend()?.name(), "cpu");
/// # Ok::<(), ortrain::Error>(())
/// ```
///
/// # Errors
/// If the environment variable `ORTRAIN_ISA` names no instruction-set level.
pub fn default_backend() -> Result<Arc<dyn Backend>> {
    Ok(Arc::new(Cpu::new()?))
}

/// Returns the backend of a device.
///
/// - `"cpu"`: the processor. `num_threads` is the maximum number of threads for runs of this process; 0
///   leaves it unchanged. Results do not depend on it.
/// - `"reference"`: the evaluator that defines the correct results; it is slow.
/// - `"cuda"`: the first GPU of NVIDIA through CUDA, with the feature `cuda` of this crate; `"cuda:1"` is the
///   second one.
/// - `"vulkan"`, `"metal"`, `"dx12"`: a GPU through that interface, with the feature `wgpu` of this crate;
///   `"vulkan:1"` is the second one. `"webgpu"` is the best GPU.
/// - `"auto"`: `"cuda"` if it is available, or else the best GPU, or else the processor; [`Backend::device`]
///   names the choice.
///
/// All callers share a device.
///
/// Drivers that compute on the processor are used only if the environment variable `ORTRAIN_SOFTWARE_GPU` is
/// `1`, and never for `"auto"`.
///
/// ```
/// use ortrain::{ErrorKind, backend};
///
/// assert_eq!(backend("cpu", 2)?.name(), "cpu");
/// assert_eq!(backend("reference", 0)?.name(), "reference");
/// assert_eq!(backend("tpu", 0).unwrap_err().kind(), ErrorKind::InvalidArgument);
/// assert_eq!(backend("cuda:99", 0).unwrap_err().kind(), ErrorKind::DeviceUnavailable);
/// # Ok::<(), ortrain::Error>(())
/// ```
///
/// # Errors
/// If no device has this name, or if the device is not available: the error names the remedy. For `cpu`, see
/// [`default_backend`].
pub fn backend(device: &str, num_threads: usize) -> Result<Arc<dyn Backend>> {
    match device {
        "cpu" | "cpu:0" => {
            if num_threads > 0 {
                Cpu::set_num_threads(num_threads);
            }
            default_backend()
        }
        REFERENCE => Ok(Arc::new(Reference)),
        AUTO => cuda::best().or_else(gpu::best).map_or_else(|| backend(HOST, num_threads), Ok),
        name if cuda::is_name(name) => cuda::open(name),
        name if gpu::is_name(name) => gpu::open(name),
        _ if device.split(':').next() == Some("rocm") => Err(Error::DeviceUnavailable {
            device: device.to_owned(),
            reason: "ortrain has no ROCm backend".to_owned(),
            remedy: "use \"vulkan\", or \"webgpu\" for the best GPU".to_owned(),
        }),
        _ => {
            let names = [HOST, REFERENCE, AUTO, "cuda", "webgpu", "vulkan", "metal", "dx12"];
            let meant = if device.split(':').next().is_some_and(|name| name.eq_ignore_ascii_case("gpu")) {
                format!("; did you mean {AUTO:?}, the best GPU?")
            } else {
                hint(device, names)
            };
            Err(Error::Argument(format!(
                "there is no device {device:?} here; there are \"cpu\", \"reference\", \"auto\", and for GPUs \
                 \"cuda\", \"webgpu\", \"vulkan\", \"metal\" and \"dx12\"{meant}"
            )))
        }
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::sync::Arc;

    use ortrain_cuda::{Cuda, CudaInfo, cuda_devices};
    use ortrain_program::{Backend, NoDevice};

    pub(super) use ortrain_cuda::is_cuda_name as is_name;

    use super::DeviceInfo;
    use crate::{Error, Result};

    pub(super) fn devices() -> Vec<DeviceInfo> {
        let described = |device: CudaInfo| DeviceInfo {
            name: device.name,
            kind: if device.is_integrated { "integrated" } else { "discrete" },
            description: device.description,
            driver: device.driver,
            memory: Some(device.memory),
            plane_bytes: None,
            tensor_bytes: Some(ortrain_cuda::TENSOR_BYTES),
        };
        cuda_devices().into_iter().map(described).collect()
    }

    pub(super) fn open(device: &str) -> Result<Arc<dyn Backend>> {
        match Cuda::open(device) {
            Ok(backend) => Ok(Arc::new(backend)),
            Err(NoDevice { device, reason, remedy }) => {
                Err(Error::DeviceUnavailable { device, reason, remedy })
            }
        }
    }

    pub(super) fn best() -> Option<Arc<dyn Backend>> {
        open("cuda").ok()
    }
}

#[cfg(not(feature = "cuda"))]
mod cuda {
    use std::sync::Arc;

    use ortrain_program::Backend;

    use super::DeviceInfo;
    use crate::{Error, Result};

    pub(super) fn devices() -> Vec<DeviceInfo> {
        Vec::new()
    }

    pub(super) fn is_name(name: &str) -> bool {
        name.split(':').next() == Some("cuda")
    }

    pub(super) fn open(device: &str) -> Result<Arc<dyn Backend>> {
        Err(Error::DeviceUnavailable {
            device: device.to_owned(),
            reason: "this build has no support for CUDA".to_owned(),
            remedy: "build the crate ortrain with its feature \"cuda\"".to_owned(),
        })
    }

    pub(super) fn best() -> Option<Arc<dyn Backend>> {
        None
    }
}

/// Adds folders to the search for the libraries of CUDA: the folders of Python packages.
///
/// The device `"cuda"` needs NVIDIA's compiler NVRTC. The search covers the environment variable
/// `ORTRAIN_CUDA_LIBRARIES` (a folder that replaces the whole search), these folders, the active Python
/// environment, conda, `CUDA_HOME`, and the system.
///
/// ```
/// ortrain::search_cuda_packages(["/opt/venv/lib/python3.11/site-packages".into()]);
/// ```
#[cfg(feature = "cuda")]
pub fn search_cuda_packages(folders: impl IntoIterator<Item = std::path::PathBuf>) {
    ortrain_cuda::search_packages(folders);
}

#[cfg(feature = "wgpu")]
mod gpu {
    use std::sync::Arc;

    use ortrain_program::{Backend, NoDevice};
    use ortrain_wgpu::{AdapterInfo, Wgpu, adapters};

    pub(super) use ortrain_wgpu::is_adapter_name as is_name;

    use super::DeviceInfo;
    use crate::{Error, Result};

    /// Environment variable that allows drivers that compute on the processor.
    const SOFTWARE_GPU: &str = "ORTRAIN_SOFTWARE_GPU";

    fn allows_software_gpu() -> bool {
        std::env::var_os(SOFTWARE_GPU).is_some_and(|value| value == "1")
    }

    pub(super) fn devices() -> Vec<DeviceInfo> {
        let described = |adapter: AdapterInfo| DeviceInfo {
            name: adapter.name,
            kind: adapter.kind.name(),
            description: adapter.description,
            driver: adapter.driver,
            memory: None,
            plane_bytes: Some(adapter.buffer_bytes),
            tensor_bytes: Some(adapter.binding_bytes),
        };
        adapters(allows_software_gpu()).into_iter().map(described).collect()
    }

    pub(super) fn open(device: &str) -> Result<Arc<dyn Backend>> {
        open_with(device, allows_software_gpu())
    }

    pub(super) fn best() -> Option<Arc<dyn Backend>> {
        open_with("webgpu", false).ok()
    }

    fn open_with(device: &str, software: bool) -> Result<Arc<dyn Backend>> {
        match Wgpu::open(device, software) {
            Ok(backend) => Ok(Arc::new(backend)),
            Err(NoDevice { device, reason, remedy }) => {
                Err(Error::DeviceUnavailable { device, reason, remedy })
            }
        }
    }
}

#[cfg(not(feature = "wgpu"))]
mod gpu {
    use std::sync::Arc;

    use ortrain_program::Backend;

    use super::DeviceInfo;
    use crate::{Error, Result};

    pub(super) fn devices() -> Vec<DeviceInfo> {
        Vec::new()
    }

    pub(super) fn is_name(name: &str) -> bool {
        matches!(name.split(':').next(), Some("webgpu" | "vulkan" | "metal" | "dx12"))
    }

    pub(super) fn open(device: &str) -> Result<Arc<dyn Backend>> {
        Err(Error::DeviceUnavailable {
            device: device.to_owned(),
            reason: "this build has no support for GPUs".to_owned(),
            remedy: "build the crate ortrain with its feature \"wgpu\"".to_owned(),
        })
    }

    pub(super) fn best() -> Option<Arc<dyn Backend>> {
        None
    }
}

/// Allocates zeroed host memory.
pub(crate) fn host_memory(bytes: usize) -> std::result::Result<Memory, OutOfMemory> {
    ortrain_cpu::allocate(bytes, bytes).map(Memory::Host)
}

/// Touches every page of memory that is about to be written, on all threads, so that the system maps it now.
pub(crate) fn prefault(memory: &Memory) {
    if let Some(memory) = memory.host() {
        ortrain_cpu::prefault(memory);
    }
}

/// Returns the performance limits of a backend's machine. If the backend does not know them, the limits of
/// the processor are the answer.
pub(crate) fn limits_of(backend: &dyn Backend) -> Result<Limits> {
    let of_processor = || Ok(Cpu::new()?.limits().expect("the limits of the processor are measured"));
    backend.limits().map_or_else(of_processor, Ok)
}
