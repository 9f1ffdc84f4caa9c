//! Runs programs on GPUs through wgpu: Vulkan, Metal and Direct3D 12.
//!
//! - [`Wgpu`]: a device as a backend. Its kernels are those that `ortrain-codegen` prints.
//! - [`adapters`]: the devices of the machine, by name; [`NoDevice`]: why there is none of a name.
//! - [`Made`]: what was made on a device so far. A run that is repeated makes nothing.
//!
//! State and values lie on the device. A plane that lies on the host is copied to the device for each run, and what the run has
//! changed of it back.
#![forbid(unsafe_code)]

mod adapter;
mod device;
mod executable;
mod memory;
mod resident;
mod spare;
mod timing;

use std::sync::Arc;

use ortrain_codegen::split;
use ortrain_program::{
    AllocationError, Backend, Bf16Fallback, Executable, Memory, Precision, Program, Target,
    UnsupportedOnBackend, UnsupportedPrecision,
};

pub use adapter::{AdapterInfo, AdapterKind, NoDevice, adapters, is_adapter_name};
use device::Device;
pub use device::Made;
use memory::WgpuMemory;

/// A GPU as a backend.
#[derive(Clone, Debug)]
pub struct Wgpu {
    device: Arc<Device>,
    /// True if factors may be rounded in 32-bit arithmetic.
    emulates: bool,
}

impl Wgpu {
    /// Opens the device of a name: `"vulkan"`, `"vulkan:1"`, `"metal"`, `"dx12"`, or `"webgpu"` for the best one. Whoever opens a
    /// device shares it. Drivers that compute on the processor are taken only if `software` is true.
    ///
    /// # Errors
    /// When there is none of the name, with what would help.
    pub fn open(name: &str, software: bool) -> Result<Wgpu, NoDevice> {
        Ok(Wgpu { device: adapter::open(name, software)?, emulates: false })
    }

    /// Ends the device for all who share it, as a driver does that fails: what lies on it is gone, and whoever uses it is told
    /// that it is lost. Its name opens it anew.
    pub fn destroy(&self) {
        self.device.destroy();
    }

    /// The names of the device and of its driver.
    #[must_use]
    pub fn description(&self) -> &str {
        &self.device.description
    }

    /// The counts of objects and bytes of the device so far.
    #[must_use]
    pub fn made(&self) -> Made {
        self.device.made()
    }

    /// The kernels that a program needs, as they are printed for this device, in order.
    ///
    /// # Errors
    /// When an instruction cannot run here.
    pub fn sources(&self, program: &Program) -> Result<Vec<Arc<str>>, UnsupportedOnBackend> {
        let rest = split(program);
        let (program, checked) = match &rest {
            Some((rest, host)) => (rest, &host.checked[..]),
            None => (program, &[][..]),
        };
        let lowered = self.device.lower(program, checked)?;
        Ok(lowered.launches.into_iter().map(|launch| launch.source).collect())
    }
}

impl Backend for Wgpu {
    fn name(&self) -> &'static str {
        self.device.interface
    }

    /// It rounds factors where they are loaded, and multiplies in `f32`: that must be asked for.
    fn with_precision(
        &self,
        precision: Precision,
        fallback: Bf16Fallback,
    ) -> Result<Arc<dyn Backend>, UnsupportedPrecision> {
        let emulates = precision != Precision::F32;
        if emulates && fallback != Bf16Fallback::Emulated {
            let reason = "needs a unit that multiplies bfloat16, of which wgpu knows none; bf16_fallback=\"emulated\" \
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

    /// Buffers do not grow: there is no room.
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
                    "its factors are {}, for which nothing was chosen",
                    scheduled.instruction.precision()
                ),
            });
        }
        Ok(Box::new(executable::WgpuExecutable::new(program, self.device.clone())?))
    }
}
