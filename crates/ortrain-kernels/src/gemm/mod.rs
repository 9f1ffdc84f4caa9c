//! Matrix products: `C = A·B`, with a nest over the finished product as its epilogue.
//!
//! C is partitioned into blocks. Each block is a task that iterates over all of k, so that every sum has one order. If
//! blocks are few and sums are long, k is split too (split-K), and partial sums are added in order at the end. Operands
//! are packed into panels, either once for all tasks, or by each task. A worker keeps a packed block while its next
//! task needs the same block. Operands that are read only once anyway are read in place (`plan`). If B is much larger
//! than A and C (weights, and few rows), the kernel computes `Cᵀ = Bᵀ·Aᵀ` instead. Each part of the weights is then
//! read in place, or packed, by only one task, and finished blocks are transposed. A micro-kernel (one file per level)
//! multiplies panel by panel (`run`). The epilogue processes a finished block while it is in cache.

mod arithmetic;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod byte_tiles;
mod corner_copy;
mod desc;
pub(crate) mod levels;
pub(crate) mod micro;
mod operand;
pub(crate) mod pack;
mod packed_dots;
mod plan;
mod portable;
mod quantized;
pub(crate) mod run;
mod small_m;
mod strategies;
pub(crate) mod tiles;

use std::fmt;

use ortrain_expr::{DType, OutOfRange, Type, UnaryOp};

use crate::pool::Pool;
use crate::scratch::{RunScalars, Scratch};
use crate::tile::Compiler;
pub use desc::{GemmDesc, Products, QuantizedRight};
use run::{Engine, Product};

/// Compiled [`GemmDesc`].
pub struct GemmKernel {
    engine: Box<dyn Engine>,
}

/// Returns the names of all candidates.
pub(crate) fn kernel_names() -> [&'static str; 9] {
    strategies::candidates::<f32>().map(|candidate| candidate.name)
}

impl fmt::Debug for GemmKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GemmKernel").finish_non_exhaustive()
    }
}

impl GemmKernel {
    /// Compiles a matrix product.
    ///
    /// # Errors
    /// Returns an error if an access is out of bounds, if the operands are neither floats of one compute type nor bytes,
    /// or if the epilogue is invalid: it must not reduce, and it must be well typed.
    pub fn new<'a>(desc: &GemmDesc, compiler: impl Into<Compiler<'a>>) -> Result<GemmKernel, String> {
        let compiler = compiler.into();
        let has_bytes = [&desc.a, &desc.b].map(|access| matches!(access.dtype, DType::U8 | DType::I8));
        if has_bytes == [true; 2] && desc.quantized.is_none() && desc.rounded_to == [None; 2] {
            return Ok(GemmKernel { engine: Box::new(Product::<i32>::new(desc, compiler)?) });
        }
        let double = match (desc.a.dtype, desc.b.dtype) {
            (DType::F64, DType::F64) => true,
            (a, b) if Type::of(a) == Type::F32 && Type::of(b) == Type::F32 => false,
            (a, b) => return Err(format!("a product of {a} and {b} is not supported")),
        };
        if desc.zero_points != [None, None] {
            return Err("only matrices of bytes have zero points".to_owned());
        }
        for (operand, to) in [&desc.a, &desc.b].into_iter().zip(desc.rounded_to) {
            let fits = |to| operand.dtype == DType::F32 && UnaryOp::rounding_to(to).is_some();
            if let Some(to) = to.filter(|&to| !fits(to)) {
                return Err(format!("a matrix of type {} cannot be rounded to {to}", operand.dtype));
            }
        }
        if let Some(quantized) = &desc.quantized {
            quantized.fault(&desc.b).map_or(Ok(()), Err)?;
        }
        let engine: Box<dyn Engine> = if double {
            Box::new(Product::<f64>::new(desc, compiler)?)
        } else {
            Box::new(Product::<f32>::new(desc, compiler)?)
        };
        Ok(GemmKernel { engine })
    }

    /// Describes the kernel: its name, the blocks, the packing of the operands, and the epilogue.
    #[must_use]
    pub fn describe(&self) -> String {
        self.engine.describe()
    }

    /// Returns true if a run can fail (the epilogue contains a guard).
    #[must_use]
    pub fn can_fail(&self) -> bool {
        self.engine.shape().epilogue.can_fail
    }

    /// Returns the bytes of scratch memory for a run on `threads` threads.
    #[must_use]
    pub fn scratch_bytes(&self, threads: usize) -> usize {
        let shape = self.engine.shape();
        shape.shared + threads.max(1) * shape.bytes
    }

    /// Computes the product and its epilogue. Allocates nothing, and gives the same bits on any number of threads.
    ///
    /// `bases` contains the start of each buffer: A, B, the epilogue's loads without the first, its stores. If B is
    /// quantized, its scales and zero points follow. The zero points of A and of B follow.
    ///
    /// # Errors
    /// Returns the first guard of the epilogue that fails, in index order. Stores are executed nevertheless.
    ///
    /// # Panics
    /// Panics if `bases` has the wrong length, or if `scratch` is too small or not aligned.
    ///
    /// # Safety
    /// The contract of [`crate::NestKernel::run`]. A and B are loads too, and no store overlaps them.
    pub unsafe fn run(
        &self,
        bases: &[*mut u8],
        scalars: RunScalars,
        pool: &Pool,
        scratch: Scratch,
    ) -> Result<(), OutOfRange> {
        let shape = self.engine.shape();
        assert_eq!(bases.len(), shape.buffers, "one pointer for each buffer");
        let parts = scratch.split(shape.shared, shape.bytes, pool);
        // SAFETY: the caller's contract.
        unsafe { self.engine.run(bases, scalars, pool, parts) }
    }
}
