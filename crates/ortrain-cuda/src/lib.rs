//! Runs programs on NVIDIA GPUs through CUDA.
//!
//! - [`Cuda`]: a device as a backend, with the kernels of `ortrain-codegen`.
//! - [`cuda_devices`]: the devices of the machine, by name.
//! - [`search_packages`]: folders in which NVIDIA's libraries are searched.
//! - [`share_memory`], [`Cuda::adopt`]: memory of other libraries on the device, without a copy.
//! - [`CudaCounts`]: counts of the objects on a device. A repeated run creates no objects.
//!
//! State and values are stored on the device. The first run of a program launches its kernels one by one, the second run
//! records them as a graph, and later runs replay the graph. A host thread waits only for values that it reads.
//!
//! `unsafe` is limited to the modules that call NVIDIA's libraries, and to the calls of their contracts.

mod device;
mod driver;
mod executable;
mod failure;
mod kernel_cache;
mod kernels;
mod libraries;
mod lt;
mod memory;
mod nvrtc;
mod products;
mod queue;
mod resident;
mod share;
mod spare;

use std::sync::Arc;

use ortrain_program::{
    AllocationError, Backend, Bf16Fallback, Executable, Memory, NoDevice, Precision, Program, Target,
    UnsupportedOnBackend, UnsupportedPrecision,
};

use device::Device;
pub use device::{CudaCounts, CudaInfo, cuda_devices, is_cuda_name};
pub use executable::TENSOR_BYTES;
use executable::{BACKEND, CudaExecutable};
pub use libraries::search_packages;
use memory::CudaMemory;
pub use share::{SharedMemory, is_adopted, share_memory};

/// GPU as a backend.
#[derive(Clone, Debug)]
pub struct Cuda {
    device: Arc<Device>,
    /// True if factors may be rounded in 32-bit arithmetic.
    emulates: bool,
    /// Number of multiplications from which cuBLASLt computes a product.
    min_library_product: u64,
}

/// Default number of multiplications from which cuBLASLt computes a product. Smaller products are faster together with
/// their epilogues.
pub const MIN_LIBRARY_PRODUCT: u64 = 1 << 22;

impl Cuda {
    /// Opens the device of a name: `"cuda"` for the first GPU, `"cuda:1"` for the second. All users of a device share
    /// it.
    ///
    /// # Errors
    /// When no device has the name, with a remedy.
    pub fn open(name: &str) -> Result<Cuda, NoDevice> {
        Ok(Cuda { device: device::open(name)?, emulates: false, min_library_product: MIN_LIBRARY_PRODUCT })
    }

    /// Returns the backend with another number of multiplications from which cuBLASLt computes a product, instead of
    /// [`MIN_LIBRARY_PRODUCT`]: 0 for every product that the library supports, `u64::MAX` for none.
    #[must_use]
    pub fn with_min_library_product(self, multiplications: u64) -> Cuda {
        Cuda { min_library_product: multiplications, ..self }
    }

    /// Makes the device unusable for all users, like a failing driver. Later calls report a lost device. Its name opens
    /// the device again.
    pub fn abandon(&self) {
        self.device.abandon();
    }

    /// Returns the name of the device by its driver.
    #[must_use]
    pub fn description(&self) -> &str {
        self.device.description()
    }

    /// Returns the bytes of memory of the device.
    #[must_use]
    pub fn memory(&self) -> u64 {
        self.device.memory()
    }

    /// Describes the kernels of each instruction of a program on this device, in order: cuBLASLt, or printed kernels by
    /// name. The program is not compiled.
    ///
    /// # Errors
    /// When the backend does not support an instruction.
    pub fn describe_kernels(&self, program: Arc<Program>) -> Result<Vec<String>, UnsupportedOnBackend> {
        executable::describe_kernels(program, &self.device, self.min_library_product)
    }

    /// Returns the counts of objects and bytes of the device so far.
    #[must_use]
    pub fn counts(&self) -> CudaCounts {
        self.device.counts()
    }
}

/// Compiles a source for an architecture, for example `sm_90`, with NVRTC. A device is not needed. Returns the image and
/// the messages of the compiler.
///
/// # Errors
/// When NVRTC is missing or refuses the source, with its message.
pub fn compile_source(
    source: &str,
    architecture: &str,
    options: &[&str],
) -> Result<(Vec<u8>, String), String> {
    match nvrtc::compile(source, architecture, options) {
        Ok(nvrtc::Compiled { image, log }) => Ok((image, log)),
        Err(nvrtc::CompileError::Missing(missing)) => Err(format!("{}; {}", missing.reason, missing.remedy)),
        Err(nvrtc::CompileError::Refused(log)) => Err(log),
    }
}

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        BACKEND
    }

    /// Supports rounded factors in `f32` arithmetic, only on request.
    fn with_precision(
        &self,
        precision: Precision,
        fallback: Bf16Fallback,
    ) -> Result<Arc<dyn Backend>, UnsupportedPrecision> {
        let emulates = precision != Precision::F32;
        if emulates && fallback != Bf16Fallback::Emulated {
            let reason = "needs products in bfloat16, which the cuda backend does not have; \
                          bf16_fallback=\"emulated\" computes the same in float32 arithmetic, slower than \"f32\"";
            return Err(UnsupportedPrecision { precision, reason: reason.to_owned() });
        }
        Ok(Arc::new(Cuda { emulates, ..self.clone() }))
    }

    fn bf16_unit(&self) -> Option<&'static str> {
        self.emulates.then_some("emulated")
    }

    fn target(&self) -> Target {
        Target::PLAIN
    }

    fn device(&self) -> &str {
        self.device.name()
    }

    /// Allocates memory without reserved space: it does not grow.
    fn allocate(&self, bytes: usize, _capacity: usize) -> Result<Memory, AllocationError> {
        Ok(Memory::Device(Arc::new(CudaMemory::new(&self.device, bytes)?)))
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>, UnsupportedOnBackend> {
        let rounds = |precision| precision != Precision::F32 && !self.emulates;
        if let Some(scheduled) = program.instructions.iter().find(|i| rounds(i.instruction.precision())) {
            return Err(UnsupportedOnBackend {
                backend: BACKEND,
                node: scheduled.node.to_string(),
                instruction: scheduled.instruction.name(),
                reason: format!(
                    "its factors are {}, but no bfloat16 unit was selected",
                    scheduled.instruction.precision()
                ),
            });
        }
        Ok(Box::new(CudaExecutable::new(program, self.device.clone(), self.min_library_product)?))
    }
}
