//! Benchmark cases and their buffers.

use ortrain_expr::Precision;
use ortrain_kernels::{Isa, Pool, RunScalars, Scratch};

/// One kernel at one shape.
pub(crate) struct Case {
    /// Family, operation, and sizes.
    pub(crate) name: String,
    /// Minimum number of floating-point operations.
    pub(crate) flops: f64,
    /// Peak rate of the machine for these operations, relative to multiply-adds in f32: 0.5 for f64.
    pub(crate) rate: f64,
    /// Precision of the factors of products.
    pub(crate) precision: Precision,
    /// Bytes of all operands and results: the minimum traffic.
    pub(crate) bytes: f64,
    /// Compiles the kernel for an instruction set and a number of threads.
    pub(crate) compile: Box<dyn Fn(Isa, usize) -> Run>,
}

/// Closure that runs a compiled kernel once, on its own buffers.
pub(crate) type Run = Box<dyn FnMut(&Pool)>;

pub(crate) const SCALARS: RunScalars = RunScalars { seed: 1, train_step: 7 };

/// Operands, results and scratch memory.
pub(crate) struct Buffers {
    lines: Vec<Vec<Line>>,
    scratch: Vec<Line>,
}

/// Cache line. Buffers consist of lines, so that they are aligned to 64 bytes.
#[repr(align(64))]
#[derive(Clone, Copy)]
struct Line(#[allow(dead_code, reason = "only its bytes are used")] [f32; 16]);

impl Buffers {
    /// Creates buffers and scratch memory of these sizes in bytes, filled with floats between 0.5 and 1.5.
    pub(crate) fn new(bytes: &[usize], scratch: usize) -> Buffers {
        let mut state = 1u32;
        let mut value = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            0.5 + (state >> 8) as f32 / (1 << 24) as f32
        };
        let mut fill =
            |bytes: usize| (0..bytes.div_ceil(64)).map(|_| Line(std::array::from_fn(|_| value()))).collect();
        Buffers { lines: bytes.iter().map(|&bytes| fill(bytes)).collect(), scratch: fill(scratch) }
    }

    /// Returns the start of each buffer.
    pub(crate) fn bases(&mut self) -> Vec<*mut u8> {
        self.lines.iter_mut().map(|lines| lines.as_mut_ptr().cast()).collect()
    }

    /// Returns the scratch memory.
    pub(crate) fn scratch(&mut self) -> Scratch {
        Scratch::new(self.scratch.as_mut_ptr().cast(), self.scratch.len() * 64)
    }
}
