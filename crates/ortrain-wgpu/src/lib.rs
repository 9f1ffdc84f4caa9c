//! Runs programs on GPUs through wgpu: Vulkan, Metal and Direct3D 12.
//!
//! - [`Wgpu`]: a device as a backend, with the kernels of `ortrain-codegen`.
//! - [`adapters`]: the devices of the machine, by name.
//! - [`Made`]: counts of the objects on a device. A repeated run creates no objects.
//!
//! State and values are stored on the device. A plane in host memory is copied to the device for each run, and copied
//! back if the run changed it.
#![forbid(unsafe_code)]

mod adapter;
mod buffer_pool;
mod device;
mod executable;
mod memory;
mod resident;
mod timing;

use std::sync::Arc;

use ortrain_codegen::{Dialect as _, Wgsl, split_host_part};
use ortrain_program::{
    AllocationError, Backend, Bf16Fallback, Executable, Memory, NoDevice, Precision, Program, Target,
    UnsupportedOnBackend, UnsupportedPrecision,
};

pub use adapter::{AdapterInfo, AdapterKind, adapters, is_adapter_name};
use device::Device;
pub use device::DeviceCounts;
use memory::WgpuMemory;

/// GPU as a backend.
#[derive(Clone, Debug)]
pub struct Wgpu {
    device: Arc<Device>,
    /// True if factors may be rounded in 32-bit arithmetic.
    emulates: bool,
}

impl Wgpu {
    /// Opens the device of a name: `"vulkan"`, `"vulkan:1"`, `"metal"`, `"dx12"`, or `"webgpu"` for the best one. All
    /// users of a device share it. Drivers that compute on the processor are allowed only if `software` is true.
    ///
    /// # Errors
    /// When no device has the name, with a remedy.
    pub fn open(name: &str, software: bool) -> Result<Wgpu, NoDevice> {
        Ok(Wgpu { device: adapter::open(name, software)?, emulates: false })
    }

    /// Destroys the device for all users, like a failing driver. Its memory is lost, and later calls report a lost
    /// device. Its name opens the device again.
    pub fn destroy(&self) {
        self.device.destroy();
    }

    /// Returns the names of the device and of its driver.
    #[must_use]
    pub fn description(&self) -> &str {
        &self.device.description
    }

    /// Returns the counts of objects and bytes of the device so far.
    #[must_use]
    pub fn counts(&self) -> DeviceCounts {
        self.device.counts()
    }

    /// Returns the modules of the kernels that a program needs on this device, in order.
    ///
    /// # Errors
    /// When an instruction is not supported.
    pub fn sources(&self, program: &Program) -> Result<Vec<String>, UnsupportedOnBackend> {
        let rest = split_host_part(program, &Wgsl);
        let (program, checked) = match &rest {
            Some((rest, host)) => (rest, &host.checked[..]),
            None => (program, &[][..]),
        };
        let lowered = self.device.lower(program, checked)?;
        Ok(lowered.launches.iter().map(|launch| Wgsl.module(&[&launch.kernel])).collect())
    }
}

impl Backend for Wgpu {
    fn name(&self) -> &'static str {
        self.device.interface
    }

    /// Supports rounded factors in `f32` arithmetic, only on request.
    fn with_precision(
        &self,
        precision: Precision,
        fallback: Bf16Fallback,
    ) -> Result<Arc<dyn Backend>, UnsupportedPrecision> {
        let emulates = precision != Precision::F32;
        if emulates && fallback != Bf16Fallback::Emulated {
            let reason = "needs a bfloat16 unit, which wgpu does not support; bf16_fallback=\"emulated\" \
                          computes the same in float32 arithmetic, slower than \"f32\"";
            return Err(UnsupportedPrecision { precision, reason: reason.to_owned() });
        }
        Ok(Arc::new(Wgpu { device: self.device.clone(), emulates }))
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

    /// Allocates memory without reserved space: buffers do not grow.
    fn allocate(&self, bytes: usize, _room: usize) -> Result<Memory, AllocationError> {
        Ok(Memory::Device(Arc::new(WgpuMemory::new(self.device.clone(), bytes)?)))
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>, UnsupportedOnBackend> {
        let rounds = |precision| precision != Precision::F32 && !self.emulates;
        if let Some(scheduled) = program.instructions.iter().find(|i| rounds(i.instruction.precision())) {
            return Err(UnsupportedOnBackend {
                backend: self.device.interface,
                node: scheduled.node.to_string(),
                instruction: scheduled.instruction.name(),
                reason: format!(
                    "its factors are {}, but no bfloat16 unit was selected",
                    scheduled.instruction.precision()
                ),
            });
        }
        Ok(Box::new(executable::WgpuExecutable::new(program, self.device.clone())?))
    }
}
