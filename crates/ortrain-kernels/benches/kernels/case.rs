//! What a case is, and the buffers that it runs on.

use ortrain_expr::Precision;
use ortrain_kernels::{Isa, Pool, RunScalars, Scratch};

/// One kernel at one shape.
pub(crate) struct Case {
    /// Family, what it computes, and sizes.
    pub(crate) name: String,
    /// Floating-point operations that nobody can do without.
    pub(crate) flops: f64,
    /// The machine's rate for them, compared with that of f32.
    pub(crate) rate: f64,
    /// What the products of the operations keep of their factors.
    pub(crate) precision: Precision,
    /// Bytes of all operands and results: the least traffic.
    pub(crate) bytes: f64,
    /// Compiles it for a level and a number of threads. What comes back runs it once.
    pub(crate) compile: Box<dyn Fn(Isa, usize) -> Run>,
}

/// Runs a compiled kernel once, on buffers of its own.
pub(crate) type Run = Box<dyn FnMut(&Pool)>;

pub(crate) const SCALARS: RunScalars = RunScalars { seed: 1, train_step: 7 };

/// Operands, results and scratch memory.
pub(crate) struct Buffers {
    lines: Vec<Vec<Line>>,
    scratch: Vec<Line>,
}

#[repr(align(64))]
#[derive(Clone, Copy)]
struct Line(#[allow(dead_code, reason = "only its bytes are used")] [f32; 16]);

impl Buffers {
    /// Buffers of so many bytes each, of floats between 0.5 and 1.5, and scratch memory.
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

    /// The start of each buffer.
    pub(crate) fn bases(&mut self) -> Vec<*mut u8> {
        self.lines.iter_mut().map(|lines| lines.as_mut_ptr().cast()).collect()
    }

    /// The scratch memory.
    pub(crate) fn scratch(&mut self) -> Scratch {
        Scratch::new(self.scratch.as_mut_ptr().cast(), self.scratch.len() * 64)
    }
}
