//! Convolutions and the gradients of their operands, with a nest over the finished result.
//!
//! Every pass is a product of matrices, one for each group of channels, of which one operand (or both) is a tensor seen
//! through sliding windows: an element of the tensor occurs in it as often as windows cover it. That matrix is never
//! made as a whole: its panels are packed when they are needed, or its rows are read where they lie.

mod channel_vectors;
mod copy;
mod depthwise;
mod depthwise_3x3;
mod direct;
mod epilogue;
mod fallback;
mod filter_gradient;
mod im2col;
mod implicit_gemm;
mod interleave;
mod padding_fixup;
mod partition;
mod tiles;
mod winograd;

use std::fmt;
use std::sync::Arc;

use ortrain_expr::{ConvPass, ConvShape, DType, Dims, Nest, OutOfRange, Type};

use crate::gemm::Products;
use crate::gemm::micro::{Micro, Real};
use crate::isa::Isa;
use crate::pool::Pool;
use crate::scratch::{RunScalars, Scratch};
use crate::tile::Compiler;
use channel_vectors::Lanes;
use depthwise::{Depthwise, DepthwiseFilter};
use direct::Direct;
use epilogue::{Finish, Rect};
use fallback::General;
use filter_gradient::FilterGradient;
use implicit_gemm::Product;
use padding_fixup::PaddedInput;
use winograd::Winograd;

/// A convolution, or the gradient of one.
#[derive(Clone, Debug)]
pub struct ConvDesc {
    /// What is computed, and the sizes.
    pub shape: ConvShape,
    /// Element type of operand A ([`ConvShape::operands`]).
    pub a: DType,
    /// Element type of operand B.
    pub b: DType,
    /// How the products inside the sums are made.
    pub products: Products,
    /// What becomes of the result, over its dimensions. The result is its accumulator: an `F32`, or an `F64` if both operands
    /// are.
    pub epilogue: Nest,
}

/// A compiled [`ConvDesc`].
pub struct ConvKernel {
    engine: Box<dyn Engine>,
    /// A quicker way for operands that hold nothing odd.
    transformed: Option<Winograd>,
    double: bool,
    buffers: usize,
}

impl fmt::Debug for ConvKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConvKernel").finish_non_exhaustive()
    }
}

/// A way to compute a convolution.
trait Engine: Send + Sync {
    fn finish(&self) -> &Finish;
    /// Bytes of scratch memory that all workers share, and of that which each has for itself.
    fn scratch(&self) -> (usize, usize);
    /// # Safety
    /// The contract of [`ConvKernel::run`].
    unsafe fn run(
        &self,
        bases: &[*mut u8],
        given: PaddedInput,
        pool: &Pool,
        scratch: Scratch,
    ) -> Result<(), OutOfRange>;
}

impl ConvKernel {
    /// Compiles a convolution.
    ///
    /// # Errors
    /// What is wrong with the description: sizes that cannot be counted, operands that are not floats of one compute
    /// type, an epilogue that reduces, is not well typed or not over the result.
    pub fn new<'a>(desc: &ConvDesc, compiler: impl Into<Compiler<'a>>) -> Result<ConvKernel, String> {
        let compiler = compiler.into();
        if let Some(fault) = desc.shape.validate() {
            return Err(fault);
        }
        // Empty tensors, too, must have sizes that can be counted.
        let countless = |dims: &Dims| {
            let mut sizes = dims.iter().filter(|&&dim| dim > 0);
            sizes.try_fold(1usize, |n, &dim| n.checked_mul(dim)).is_none()
        };
        if desc.shape.operands().iter().any(countless) {
            return Err("tensors that are too large to count".to_owned());
        }
        let double = match (desc.a, desc.b) {
            (DType::F64, DType::F64) => true,
            (a, b) if Type::of(a) == Type::F32 && Type::of(b) == Type::F32 => false,
            (a, b) => return Err(format!("a convolution of {a} and {b}")),
        };
        let (engine, transformed) =
            if double { choose::<f64>(desc, compiler)? } else { choose::<f32>(desc, compiler)? };
        let nest = &desc.epilogue;
        let buffers = 1 + nest.loads.len() + nest.stores.len();
        Ok(ConvKernel { engine, transformed, double, buffers })
    }

    /// Whether a run can fail (the epilogue holds a guard).
    #[must_use]
    pub fn can_fail(&self) -> bool {
        self.engine.finish().tape.can_fail
    }

    /// Bytes of scratch memory for a run on so many threads.
    #[must_use]
    pub fn scratch_bytes(&self, threads: usize) -> usize {
        let (shared, each) = self.scratch();
        shared + threads.max(1) * each
    }

    /// Bytes that all workers share, and that each has for itself: enough for either way.
    fn scratch(&self) -> (usize, usize) {
        let (a, b) = (self.engine.scratch(), self.transformed.as_ref().map_or((0, 0), Winograd::scratch));
        (a.0.max(b.0), a.1.max(b.1))
    }

    /// Computes the convolution and its epilogue. Allocates nothing, and gives the same bits on any number of threads.
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
    /// As [`crate::NestKernel::run`], where A and B are loads of whole row-major tensors, which no store may overlap.
    pub unsafe fn run(
        &self,
        bases: &[*mut u8],
        scalars: RunScalars,
        pool: &Pool,
        scratch: Scratch,
    ) -> Result<(), OutOfRange> {
        assert_eq!(bases.len(), self.buffers, "one pointer for each buffer");
        let (shared, each) = self.scratch();
        let workers = scratch.part(shared, each, pool).workers;
        let finish = self.engine.finish();
        let mut given = PaddedInput { scalars, doubtful: true };
        if let Some(transformed) = &self.transformed {
            if !transformed.is_odd(bases, pool, workers) {
                given.doubtful = false;
                // SAFETY: the caller's contract.
                return unsafe { transformed.run(bases, given, pool, scratch) };
            }
        } else {
            given.doubtful =
                finish.edges.as_ref().is_some_and(|edges| edges.may_be_nonfinite(bases, pool, workers));
        }
        // SAFETY: the caller's contract.
        unsafe { self.engine.run(bases, given, pool, scratch) }?;
        if let Some(edges) = finish.edges.as_ref().filter(|_| given.doubtful && finish.is_direct()) {
            let all = Rect { image: 0, channels: (0, 0), places: (0, 0) };
            // SAFETY: the caller's contract; what is stored as it is holds the sums.
            unsafe {
                if self.double {
                    edges.recompute_all(bases, finish.target::<f64>(bases, all), pool, workers);
                } else {
                    edges.recompute_all(bases, finish.target::<f32>(bases, all), pool, workers);
                }
            }
        }
        Ok(())
    }
}

/// What makes the products of a group; the operand that rows are of comes first.
fn micro<T: Real>(desc: &ConvDesc, isa: Isa, dtypes: [DType; 2]) -> Micro<T> {
    Micro::choose(isa, desc.products, dtypes)
}

/// The engine for a shape: the first of these that fits and is not worse than those that follow; and the transformed way
/// where it is better.
fn choose<T: Real + Send + Sync>(
    desc: &ConvDesc,
    compiler: Compiler<'_>,
) -> Result<(Box<dyn Engine>, Option<Winograd>), String> {
    let isa = compiler.isa();
    let finish = Arc::new(Finish::new::<T>(desc, compiler)?);
    fn boxed<E: Engine + 'static>(engine: E) -> Box<dyn Engine> {
        Box::new(engine)
    }
    // What packs nothing, or transforms windows, multiplies operands as they are.
    let as_they_are = micro::<T>(desc, isa, [desc.a, desc.b]).tiles.is_none();
    let engine = as_they_are.then(|| Lanes::<T>::new(desc, isa, &finish).map(boxed)).flatten();
    let engine = engine.or_else(|| match desc.shape.pass {
        ConvPass::Output | ConvPass::InputGradient => as_they_are
            .then(|| {
                let direct = || if T::BYTES == 4 { Direct::new(desc, isa, &finish).map(boxed) } else { None };
                Depthwise::<T>::new(desc, isa, &finish).map(boxed).or_else(direct)
            })
            .flatten()
            .or_else(|| Product::<T>::new(desc, isa, &finish).map(boxed)),
        ConvPass::FilterGradient => as_they_are
            .then(|| DepthwiseFilter::<T>::new(desc, isa, &finish).map(boxed))
            .flatten()
            .or_else(|| FilterGradient::<T>::new(desc, isa, &finish).map(boxed)),
    });
    let engine = engine.unwrap_or_else(|| boxed(General::<T>::new(desc, isa, Arc::clone(&finish))));
    let fits = T::BYTES == 4 && as_they_are;
    Ok((engine, fits.then(|| Winograd::new(desc, isa, &finish)).flatten()))
}
