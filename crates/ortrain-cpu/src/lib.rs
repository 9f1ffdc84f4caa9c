//! The CPU backend: a [`Program`] on the kernels of `ortrain-kernels`.
//!
//! Instructions are compiled once; a run turns buffers into addresses and calls the kernels in order. It allocates
//! nothing. Results have the same bits at every thread count and on every run at one instruction-set level.

mod addresses;
mod executable;

use std::sync::Arc;
use std::time::Duration;

use ortrain_kernels::{Bf16Unit, Isa, Pool, limits, prefer_large_pages};
pub use ortrain_kernels::{UnknownIsa, memory_bytes};
use ortrain_program::{
    AllocationError, Backend, Bf16Fallback, Executable, HostMemory, Limits, Memory, OutOfMemory, Precision,
    Program, Target, UnsupportedOnBackend, UnsupportedPrecision,
};

/// The backend that runs programs on the CPU.
#[derive(Clone, Debug)]
pub struct Cpu {
    isa: Isa,
    /// What multiplies bfloat16, if that was asked for.
    bf16: Option<Bf16Unit>,
}

impl Cpu {
    /// At the best instruction-set level of this machine, or what `ORTRAIN_ISA` caps it to.
    ///
    /// # Errors
    /// When that environment variable names no level.
    pub fn new() -> Result<Cpu, UnknownIsa> {
        Ok(Cpu::with_isa(Isa::detect()?))
    }

    /// At a given level.
    #[must_use]
    pub fn with_isa(isa: Isa) -> Cpu {
        Cpu { isa, bf16: None }
    }

    /// The name of the instruction-set level.
    #[must_use]
    pub fn level(&self) -> &'static str {
        self.isa.name()
    }

    /// Sets how many threads runs of this process use, the caller's included.
    pub fn set_num_threads(threads: usize) {
        Pool::global().set_num_threads(threads);
    }

    /// How many threads runs of this process use, the caller's included.
    #[must_use]
    pub fn num_threads() -> usize {
        Pool::global().num_threads()
    }
}

/// Memory of this process, all zero, which can grow to `room` bytes: of large pages, if there is enough of it. They are quicker
/// to touch for the first time.
///
/// # Errors
/// When the system does not give that much.
pub fn allocate(bytes: usize, room: usize) -> Result<HostMemory, OutOfMemory> {
    let memory = HostMemory::with_room(bytes, room)?;
    prefer_large_pages(memory.as_ptr(), bytes);
    Ok(memory)
}

/// Bytes that a thread touches at a time: a large page.
const PIECE: usize = 2 << 20;

/// Has every page of memory that is going to be written given by the system, once, on all threads: see
/// [`HostMemory::touch`].
pub fn prefault(memory: &HostMemory) {
    if memory.prefault() {
        let bytes = memory.len();
        let touch = |piece: usize, _| memory.touch(piece * PIECE..bytes.min((piece + 1) * PIECE));
        Pool::global().run(bytes.div_ceil(PIECE), usize::MAX, &touch);
    }
}

/// What computes in a precision where a machine has no unit for it.
const EMULATED: &str =
    "bf16_fallback=\"emulated\" computes the same in float32 arithmetic, slower than \"f32\"";

/// The unit of a level, if it may be used; otherwise what is to be said.
fn allowed(isa: Isa, fallback: Bf16Fallback) -> Result<Bf16Unit, String> {
    let unit = Bf16Unit::detect(isa);
    match (unit.name(), fallback) {
        ("amx", _) | ("avx512_bf16", Bf16Fallback::Avx512Bf16) | (_, Bf16Fallback::Emulated) => Ok(unit),
        ("avx512_bf16", Bf16Fallback::None) => Err(
            "needs AMX, which this machine does not have; bf16_fallback=\"avx512_bf16\" uses AVX512-BF16, which it has"
                .to_owned(),
        ),
        (_, Bf16Fallback::None) => {
            Err(format!("needs AMX, which this machine does not have, nor AVX512-BF16; {EMULATED}"))
        }
        (_, Bf16Fallback::Avx512Bf16) => {
            Err(format!("needs AMX or AVX512-BF16, and this machine has neither; {EMULATED}"))
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
        let unit =
            || allowed(self.isa, fallback).map_err(|reason| UnsupportedPrecision { precision, reason });
        let bf16 = (precision != Precision::F32).then(unit).transpose()?;
        Ok(Arc::new(Cpu { bf16, isa: self.isa }))
    }

    fn bf16_unit(&self) -> Option<&'static str> {
        self.bf16.map(Bf16Unit::name)
    }

    fn target(&self) -> Target {
        Target::CPU
    }

    fn allocate(&self, bytes: usize, room: usize) -> Result<Memory, AllocationError> {
        Ok(Memory::Host(allocate(bytes, room)?))
    }

    fn grow(&self, memory: &mut Memory, bytes: usize) -> bool {
        let grows = memory.grow(bytes);
        if let (true, Memory::Host(memory)) = (grows, memory) {
            prefer_large_pages(memory.as_ptr(), memory.len());
        }
        grows
    }

    /// On the threads that runs use. Takes less than 0.3 s and asks for 192 MiB of memory, which it gives back.
    fn limits(&self) -> Option<Limits> {
        const PATIENCE: Duration = Duration::from_millis(40);
        let pool = Pool::global();
        let ortrain_kernels::Limits { flops, bandwidth } = ortrain_kernels::Limits::measure(self.isa, pool);
        let of_unit = self.bf16.and_then(|unit| limits::bf16_flops(unit, pool, PATIENCE));
        Some(Limits { flops, product_flops: of_unit.unwrap_or(flops), bandwidth })
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>, UnsupportedOnBackend> {
        Ok(Box::new(executable::CpuExecutable::new(program, self.isa, self.bf16)?))
    }
}
