//! CPU backend: runs a [`Program`] on the kernels of `ortrain-kernels`.
//!
//! Instructions are compiled once. A run turns buffers into addresses and calls the kernels in order, without
//! allocations. Results have the same bits at every thread count and in every run at one instruction-set level.

mod addresses;
mod executable;
mod prefault;
mod settings;

use std::sync::Arc;
use std::time::Duration;

use ortrain_kernels::{Bf16Unit, Isa, KernelFilter, Pool, TileMode, limits, prefer_large_pages};
pub use ortrain_kernels::{UnknownSetting, memory_bytes};
use ortrain_program::{
    AllocationError, Backend, Bf16Fallback, Executable, HostMemory, Limits, Memory, OutOfMemory, Precision,
    Program, Reference, Target, UnsupportedOnBackend, UnsupportedPrecision,
};
pub use prefault::prefault;
use settings::Settings;

/// Backend that runs programs on the CPU.
#[derive(Clone, Debug)]
pub struct Cpu {
    settings: Settings,
}

impl Cpu {
    /// Creates a backend at the best instruction-set level of this machine, capped by `ORTRAIN_ISA`. With
    /// `ORTRAIN_JIT=off` it uses no machine code, and `ORTRAIN_KERNELS` excludes or forces kernels.
    ///
    /// # Errors
    /// Returns an error if one of the variables has an unknown value.
    pub fn new() -> Result<Cpu, UnknownSetting> {
        Ok(Cpu { settings: Settings::detect()? })
    }

    /// Creates a backend at an instruction-set level, independent of the environment.
    #[must_use]
    pub fn with_isa(isa: Isa) -> Cpu {
        Cpu { settings: Settings::with_isa(isa) }
    }

    /// Returns the backend with another mode for groups of element-wise operations.
    #[must_use]
    pub fn with_mode(self, mode: TileMode) -> Cpu {
        Cpu { settings: Settings { mode, ..self.settings } }
    }

    /// Returns the backend with another filter of kernels.
    #[must_use]
    pub fn with_kernels(self, kernels: KernelFilter) -> Self {
        Cpu { settings: Settings { kernels, ..self.settings } }
    }

    /// Returns the name of the instruction-set level.
    #[must_use]
    pub fn level(&self) -> &'static str {
        self.settings.isa.name()
    }

    /// Sets the number of threads for runs of this process, including the calling thread.
    pub fn set_num_threads(threads: usize) {
        Pool::global().set_num_threads(threads);
    }

    /// Returns the number of threads for runs of this process, including the calling thread.
    #[must_use]
    pub fn num_threads() -> usize {
        Pool::global().num_threads()
    }
}

/// Returns the backend for the host part of a program on another device: the processor, or the reference evaluator if
/// `ORTRAIN_ISA`, `ORTRAIN_JIT` or `ORTRAIN_KERNELS` has an unknown value.
#[must_use]
pub fn host_backend() -> Arc<dyn Backend> {
    match Cpu::new() {
        Ok(cpu) => Arc::new(cpu),
        Err(_) => Arc::new(Reference),
    }
}

/// Allocates zeroed host memory that can grow to `capacity` bytes. If the memory is large enough, it uses large pages,
/// which the system maps faster at the first access.
///
/// # Errors
/// Returns an error if the system does not provide that much memory.
pub fn allocate(bytes: usize, capacity: usize) -> Result<HostMemory, OutOfMemory> {
    let memory = HostMemory::with_capacity(bytes, capacity)?;
    prefer_large_pages(memory.as_ptr(), bytes);
    Ok(memory)
}

/// Advice for machines without a bfloat16 unit.
const EMULATION_ADVICE: &str =
    "bf16_fallback=\"emulated\" computes the same in float32 arithmetic, slower than \"f32\"";

/// Returns the bfloat16 unit of a level, if `fallback` allows it; otherwise the error message.
fn select_bf16_unit(isa: Isa, fallback: Bf16Fallback) -> Result<Bf16Unit, String> {
    let unit = Bf16Unit::detect(isa);
    match (unit.name(), fallback) {
        ("amx", _) | ("avx512_bf16", Bf16Fallback::Avx512Bf16) | (_, Bf16Fallback::Emulated) => Ok(unit),
        ("avx512_bf16", Bf16Fallback::None) => Err(
            "needs AMX, which this machine does not have; bf16_fallback=\"avx512_bf16\" uses AVX512-BF16, which it has"
                .to_owned(),
        ),
        (_, Bf16Fallback::None) => {
            Err(format!("needs AMX, which this machine does not have, nor AVX512-BF16; {EMULATION_ADVICE}"))
        }
        (_, Bf16Fallback::Avx512Bf16) => {
            Err(format!("needs AMX or AVX512-BF16, and this machine has neither; {EMULATION_ADVICE}"))
        }
    }
}

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn with_precision(
        &self,
        precision: Precision,
        fallback: Bf16Fallback,
    ) -> Result<Arc<dyn Backend>, UnsupportedPrecision> {
        let unit = || {
            select_bf16_unit(self.settings.isa, fallback)
                .map_err(|reason| UnsupportedPrecision { precision, reason })
        };
        let bf16_unit = (precision != Precision::F32).then(unit).transpose()?;
        Ok(Arc::new(Cpu { settings: Settings { bf16_unit, ..self.settings.clone() } }))
    }

    fn bf16_unit(&self) -> Option<&'static str> {
        self.settings.bf16_unit.map(Bf16Unit::name)
    }

    fn target(&self) -> Target {
        Target::CPU
    }

    fn allocate(&self, bytes: usize, capacity: usize) -> Result<Memory, AllocationError> {
        Ok(Memory::Host(allocate(bytes, capacity)?))
    }

    fn grow(&self, memory: &mut Memory, bytes: usize) -> bool {
        let grows = memory.grow(bytes);
        if let (true, Memory::Host(memory)) = (grows, memory) {
            prefer_large_pages(memory.as_ptr(), memory.len());
        }
        grows
    }

    /// Measures on the threads that execute runs. Takes less than 0.3 s and temporarily allocates 192 MiB of memory.
    fn limits(&self) -> Option<Limits> {
        const PATIENCE: Duration = Duration::from_millis(40);
        let pool = Pool::global();
        let ortrain_kernels::Limits { flops, bandwidth } =
            ortrain_kernels::Limits::measure(self.settings.isa, pool);
        let of_unit =
            self.settings.bf16_unit.and_then(|unit| limits::measure_bf16_flops(unit, pool, PATIENCE));
        Some(Limits { flops, product_flops: of_unit.unwrap_or(flops), bandwidth })
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>, UnsupportedOnBackend> {
        Ok(Box::new(executable::CpuExecutable::new(program, &self.settings)?))
    }
}
