//! Convolutions and the gradients of their operands, with a nest over the result as epilogue.
//!
//! Every pass is a matrix product for each group of channels. At least one operand is a tensor seen through sliding
//! windows: an element of the tensor occurs in that matrix once for each window that covers it. The full matrix is
//! never stored: its panels are packed on demand (implicit GEMM), or its rows are read directly from the tensor.

mod channel_vectors;
mod copy;
mod depthwise;
mod depthwise_3x3;
mod desc;
mod direct;
mod engine;
mod epilogue;
mod fallback;
mod filter_gradient;
mod im2col;
mod implicit_gemm;
mod interleave;
mod padding_fixup;
mod partition;
mod rect;
mod tiles;
mod winograd;

pub use desc::ConvDesc;

use std::fmt;
use std::sync::Arc;

use ortrain_expr::{ConvPass, DType, Dims, OutOfRange, Type};

use crate::conv::engine::{Engine, choose_micro_kernel};
use crate::gemm::levels::Real;
use crate::pool::Pool;
use crate::scratch::{RunScalars, Scratch};
use crate::tile::Compiler;
use channel_vectors::ChannelVectors;
use depthwise::{Depthwise, DepthwiseFilterGradient};
use direct::Direct;
use epilogue::Epilogue;
use fallback::Fallback;
use filter_gradient::FilterGradient;
use implicit_gemm::ImplicitGemm;
use padding_fixup::RunSettings;
use rect::Rect;
use winograd::Winograd;

/// A compiled [`ConvDesc`].
pub struct ConvKernel {
    engine: Box<dyn Engine>,
    /// A faster algorithm, for operands without infinite, NaN or huge elements.
    winograd: Option<Winograd>,
    is_f64: bool,
    buffers: usize,
}

impl fmt::Debug for ConvKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConvKernel").finish_non_exhaustive()
    }
}

impl ConvKernel {
    /// Compiles a convolution.
    ///
    /// # Errors
    /// The fault of the description: sizes that overflow, operands that are not floats of one compute type, or an
    /// epilogue that reduces, is not well typed or is not over the result.
    pub fn new<'a>(desc: &ConvDesc, compiler: impl Into<Compiler<'a>>) -> Result<ConvKernel, String> {
        let compiler = compiler.into();
        if let Some(fault) = desc.shape.validate() {
            return Err(fault);
        }
        // The sizes of empty tensors must not overflow, either.
        let countless = |dims: &Dims| {
            let mut sizes = dims.iter().filter(|&&dim| dim > 0);
            sizes.try_fold(1usize, |n, &dim| n.checked_mul(dim)).is_none()
        };
        if desc.shape.operands().iter().any(countless) {
            return Err("the tensors are too large to count".to_owned());
        }
        let double = match (desc.a, desc.b) {
            (DType::F64, DType::F64) => true,
            (a, b) if Type::of(a) == Type::F32 && Type::of(b) == Type::F32 => false,
            (a, b) => return Err(format!("a convolution of {a} and {b} is not supported")),
        };
        let (engine, transformed) = if double {
            choose_engine::<f64>(desc, compiler)?
        } else {
            choose_engine::<f32>(desc, compiler)?
        };
        let nest = &desc.epilogue;
        let buffers = 1 + nest.loads.len() + nest.stores.len();
        Ok(ConvKernel { engine, winograd: transformed, is_f64: double, buffers })
    }

    /// Describes the algorithm.
    #[must_use]
    pub fn describe(&self) -> String {
        let name = self.engine.name();
        match self.winograd {
            Some(_) => {
                format!("Winograd F(2x2, 3x3); for operands with infinite, NaN or huge elements: {name}")
            }
            None => name.to_owned(),
        }
    }

    /// Returns true if a run can fail, because the epilogue has a guard.
    #[must_use]
    pub fn can_fail(&self) -> bool {
        self.engine.epilogue().program.can_fail
    }

    /// Returns the bytes of scratch memory for a run on `threads` threads.
    #[must_use]
    pub fn scratch_bytes(&self, threads: usize) -> usize {
        let (shared, each) = self.scratch();
        shared + threads.max(1) * each
    }

    /// Returns the bytes that all workers share, and the bytes of each worker. They suffice for both algorithms.
    fn scratch(&self) -> (usize, usize) {
        let (a, b) = (self.engine.scratch(), self.winograd.as_ref().map_or((0, 0), Winograd::scratch));
        (a.0.max(b.0), a.1.max(b.1))
    }

    /// Computes the convolution and its epilogue. Allocates nothing, and the result has the same bits on any number of
    /// threads.
    ///
    /// `bases` has the start of each buffer: A, B, the loads of the epilogue after the first one, and its stores.
    ///
    /// # Errors
    /// The first guard of the epilogue that fails, in index order. The stores are written even then.
    ///
    /// # Panics
    /// If `bases` has another number of buffers, or `scratch` is smaller than required.
    ///
    /// # Safety
    /// As [`crate::NestKernel::run`]. A and B are loads of whole row-major tensors, and no store may overlap A or B.
    pub unsafe fn run(
        &self,
        bases: &[*mut u8],
        scalars: RunScalars,
        pool: &Pool,
        scratch: Scratch,
    ) -> Result<(), OutOfRange> {
        assert_eq!(bases.len(), self.buffers, "one pointer for each buffer");
        let (shared, each) = self.scratch();
        let workers = scratch.split(shared, each, pool).workers;
        let finish = self.engine.epilogue();
        let mut settings = RunSettings { scalars, may_need_fixup: true };
        if let Some(transformed) = &self.winograd {
            if !transformed.has_unsupported_elements(bases, pool, workers) {
                settings.may_need_fixup = false;
                // SAFETY: the caller's contract.
                return unsafe { transformed.run(bases, settings, pool, scratch) };
            }
        } else {
            settings.may_need_fixup = finish
                .padding_fixup
                .as_ref()
                .is_some_and(|edges| edges.may_be_nonfinite(bases, pool, workers));
        }
        // SAFETY: the caller's contract.
        unsafe { self.engine.run(bases, settings, pool, scratch) }?;
        if let Some(edges) =
            finish.padding_fixup.as_ref().filter(|_| settings.may_need_fixup && finish.is_direct())
        {
            let full = Rect { image: 0, channels: (0, 0), positions: (0, 0) };
            // SAFETY: the caller's contract; the result is stored unchanged, so the store has the sums.
            unsafe {
                if self.is_f64 {
                    edges.recompute_all(bases, finish.target::<f64>(bases, full), pool, workers);
                } else {
                    edges.recompute_all(bases, finish.target::<f32>(bases, full), pool, workers);
                }
            }
        }
        Ok(())
    }
}

/// Chooses the engine for a shape: the first one that supports the shape and is not slower than the engines after it.
/// Also chooses Winograd's algorithm if that is faster.
fn choose_engine<T: Real + Send + Sync>(
    desc: &ConvDesc,
    compiler: Compiler<'_>,
) -> Result<(Box<dyn Engine>, Option<Winograd>), String> {
    let isa = compiler.isa();
    let finish = Arc::new(Epilogue::new::<T>(desc, compiler)?);
    fn boxed<E: Engine + 'static>(engine: E) -> Box<dyn Engine> {
        Box::new(engine)
    }
    // Engines without packing, and engines that transform windows, multiply the operands unchanged.
    let as_they_are = choose_micro_kernel::<T>(desc, isa, [desc.a, desc.b]).tiles.is_none();
    let engine = as_they_are.then(|| ChannelVectors::<T>::new(desc, isa, &finish).map(boxed)).flatten();
    let engine = engine.or_else(|| match desc.shape.pass {
        ConvPass::Output | ConvPass::InputGradient => as_they_are
            .then(|| {
                let direct = || if T::BYTES == 4 { Direct::new(desc, isa, &finish).map(boxed) } else { None };
                Depthwise::<T>::new(desc, isa, &finish).map(boxed).or_else(direct)
            })
            .flatten()
            .or_else(|| ImplicitGemm::<T>::new(desc, isa, &finish).map(boxed)),
        ConvPass::FilterGradient => as_they_are
            .then(|| DepthwiseFilterGradient::<T>::new(desc, isa, &finish).map(boxed))
            .flatten()
            .or_else(|| FilterGradient::<T>::new(desc, isa, &finish).map(boxed)),
    });
    let engine = engine.unwrap_or_else(|| boxed(Fallback::<T>::new(desc, isa, Arc::clone(&finish))));
    let fits = T::BYTES == 4 && as_they_are;
    Ok((engine, fits.then(|| Winograd::new(desc, isa, &finish)).flatten()))
}
