//! The CPU backend: a [`Program`] on the kernels of `ortrain-kernels`.
//!
//! Instructions are compiled once; a run turns buffers into addresses and calls the kernels in order. It allocates
//! nothing. Results have the same bits at every thread count and on every run at one instruction-set level.

mod addresses;
mod executable;

use std::sync::Arc;

pub use ortrain_kernels::Limits;
use ortrain_kernels::{Isa, Pool, prefer_large_pages};
use ortrain_program::{Backend, Executable, Memory, Program, UnsupportedOnBackend};

/// The backend that runs programs on the CPU.
#[derive(Clone, Debug)]
pub struct Cpu {
    isa: Isa,
}

impl Default for Cpu {
    fn default() -> Cpu {
        Cpu { isa: Isa::detect() }
    }
}

impl Cpu {
    /// At the best instruction-set level of this machine, or what `ORTRAIN_ISA` caps it to.
    #[must_use]
    pub fn new() -> Cpu {
        Cpu::default()
    }

    /// At a given level.
    #[must_use]
    pub fn with_isa(isa: Isa) -> Cpu {
        Cpu { isa }
    }

    /// Sets how many threads runs of this process use, the caller's included.
    pub fn set_num_threads(threads: usize) {
        Pool::global().set_num_threads(threads);
    }

    /// What this machine can do at most, measured now, on the threads that runs use. Takes less than 0.3 s and asks for
    /// 192 MiB of memory, which it gives back.
    #[must_use]
    pub fn limits(&self) -> Limits {
        Limits::measure(self.isa, Pool::global())
    }

    /// How many threads runs of this process use, the caller's included.
    #[must_use]
    pub fn num_threads() -> usize {
        Pool::global().num_threads()
    }
}

/// Makes memory quicker to touch for the first time, if it is large: asks the system for large pages. To be called before
/// anything is written there; contents stay as they are.
pub fn settle(memory: &Memory) {
    prefer_large_pages(memory.as_ptr(), memory.len());
}

impl Backend for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>, UnsupportedOnBackend> {
        Ok(Box::new(executable::CpuExecutable::new(program, self.isa)?))
    }
}
