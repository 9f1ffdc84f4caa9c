//! Products of matrices: `C = A·B`, with a nest over the finished product.
//!
//! The product is cut into blocks of C, each a task that goes through all of k on its own, so that every sum has one
//! order. Where blocks are too few and sums are long, k is cut too, and partial sums are added in order at the end.
//! Operands come packed into panels: once for all tasks, or by the task that needs a block, which is kept while the
//! next task of the same worker needs it again; what is read once anyway is read where it lies (`plan`). Where B is
//! much larger than A and C (weights, and a few rows), `Cᵀ = Bᵀ·Aᵀ` is made instead: each part of the weights is then read
//! where it lies, or packed, by the one task that multiplies it, and finished blocks are turned. A micro-kernel (one file
//! per level) multiplies panel by panel (`run`). A finished block goes through the epilogue while it is in cache.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub(crate) mod micro;
pub(crate) mod pack;
mod plan;
mod portable;
pub(crate) mod run;
mod small_m;
pub(crate) mod tiles;

use std::fmt;

use ortrain_expr::{Access, DType, Nest, OutOfRange, Precision, Type, UnaryOp};

use crate::isa::Bf16Unit;
use crate::pool::Pool;
use crate::scratch::{Parts, RunScalars, Scratch};
use crate::tile::Compiler;
use micro::Real;
use plan::Shape;
use run::Product;
use tiles::Tiles;

/// How the products inside sums are made, of operands in f32 or narrower. Sums are in f32, whatever it is.
///
/// With [`Precision::F32`] operands are multiplied as they are, and no unit is used. Otherwise each is taken for a sum of
/// one, two or three bfloat16 numbers, whose products a [`Bf16Unit`] makes. The error of a product, relative to the
/// magnitudes of the operands, is at most about 2⁻⁷, 2⁻¹⁵ or 2⁻²⁴; numbers below the normal range may count as zero, and
/// infinities and NaN come out as those of the operands, rounded to bfloat16, multiplied.
///
/// That costs a rounding for each element of an operand and block of the result, so it pays where elements are used
/// often: [`Precision::of_product`] says where. Operands in f64 are multiplied in f64, whatever is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Products {
    /// What the products keep of the operands.
    pub precision: Precision,
    /// What makes them, unless it is [`Precision::F32`].
    pub unit: Bf16Unit,
}

impl Products {
    /// Operands are multiplied as they are.
    pub const F32: Products = Products { precision: Precision::F32, unit: Bf16Unit::EMULATED };

    /// Tiles of bfloat16, if products of operands of such types are made of them.
    fn tiles<T: Real>(self, dtypes: [DType; 2]) -> Option<Tiles> {
        let rounded = self.precision != Precision::F32 && T::BYTES == 4;
        rounded.then(|| Tiles::new(self.precision, self.unit, dtypes))
    }
}

/// A product of matrices, or of batches of them.
///
/// Its space is that of the epilogue: batch axes, then m, then n. Transposed operands are a matter of strides.
#[derive(Clone, Debug)]
pub struct GemmDesc {
    /// Length of the sums.
    pub k: usize,
    /// A, over the batch axes, m and k.
    pub a: Access,
    /// B, over the batch axes, k and n.
    pub b: Access,
    /// The float of 16 bits that elements of each operand, which are `F32` then, are rounded to before they are multiplied.
    /// Results are those of an operand that is stored in that type.
    pub rounded: [Option<DType>; 2],
    /// How the products inside the sums are made.
    pub products: Products,
    /// What becomes of the product, which is its accumulator: an `F32`, or an `F64` if both operands are.
    pub epilogue: Nest,
}

/// A compiled [`GemmDesc`].
pub struct GemmKernel {
    engine: Box<dyn Engine>,
}

impl fmt::Debug for GemmKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GemmKernel").finish_non_exhaustive()
    }
}

trait Engine: Send + Sync {
    fn shape(&self) -> &Shape;
    /// # Safety
    /// The contract of [`GemmKernel::run`].
    unsafe fn run(
        &self,
        bases: &[*mut u8],
        scalars: RunScalars,
        pool: &Pool,
        parts: Parts,
    ) -> Result<(), OutOfRange>;
}

impl GemmKernel {
    /// Compiles a product.
    ///
    /// # Errors
    /// What is wrong with the description: accesses out of bounds, operands that are not floats of one compute type,
    /// an epilogue that reduces or is not well typed.
    pub fn new<'a>(desc: &GemmDesc, compiler: impl Into<Compiler<'a>>) -> Result<GemmKernel, String> {
        let compiler = compiler.into();
        let double = match (desc.a.dtype, desc.b.dtype) {
            (DType::F64, DType::F64) => true,
            (a, b) if Type::of(a) == Type::F32 && Type::of(b) == Type::F32 => false,
            (a, b) => return Err(format!("a product of {a} and {b}")),
        };
        for (operand, to) in [&desc.a, &desc.b].into_iter().zip(desc.rounded) {
            let fits = |to| operand.dtype == DType::F32 && UnaryOp::rounding_to(to).is_some();
            if let Some(to) = to.filter(|&to| !fits(to)) {
                return Err(format!("a matrix of {} rounded to {to}", operand.dtype));
            }
        }
        let engine: Box<dyn Engine> = if double {
            Box::new(Product::<f64>::new(desc, compiler)?)
        } else {
            Box::new(Product::<f32>::new(desc, compiler)?)
        };
        Ok(GemmKernel { engine })
    }

    /// Whether a run can fail (the epilogue holds a guard).
    #[must_use]
    pub fn can_fail(&self) -> bool {
        self.engine.shape().tape.can_fail
    }

    /// Bytes of scratch memory for a run on so many threads.
    #[must_use]
    pub fn scratch_bytes(&self, threads: usize) -> usize {
        let shape = self.engine.shape();
        shape.shared + threads.max(1) * shape.bytes
    }

    /// Computes the product and its epilogue. Allocates nothing, and gives the same bits on any number of threads.
    ///
    /// `bases` holds the start of each buffer: A, B, the epilogue's loads but the first, its stores.
    ///
    /// # Errors
    /// The first guard of the epilogue that fails, in index order. Stores have been made all the same.
    ///
    /// # Panics
    /// When `bases` or `scratch` are not what the kernel asked for.
    ///
    /// # Safety
    /// As [`crate::NestKernel::run`], where A and B are loads too, which no store may overlap.
    pub unsafe fn run(
        &self,
        bases: &[*mut u8],
        scalars: RunScalars,
        pool: &Pool,
        scratch: Scratch,
    ) -> Result<(), OutOfRange> {
        let shape = self.engine.shape();
        assert_eq!(bases.len(), shape.buffers, "one pointer for each buffer");
        let parts = scratch.part(shape.shared, shape.bytes, pool);
        // SAFETY: the caller's contract.
        unsafe { self.engine.run(bases, scalars, pool, parts) }
    }
}
