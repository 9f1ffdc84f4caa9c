//! Convolutions and the gradients of their operands, with a nest over the result as epilogue.
//!
//! Every pass is a matrix product for each group of channels. At least one operand is a tensor seen through sliding
//! windows: an element of the tensor occurs in that matrix once for each window that covers it. The full matrix is
//! never stored: its panels are packed on demand (implicit GEMM), or its rows are read directly from the tensor.

mod bytes;
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

use crate::candidates::choose;
use crate::conv::engine::{ConvCandidate, Engine, Request};
use crate::gemm::levels::Real;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::scratch::{RunScalars, Scratch};
use crate::tile::Compiler;
use epilogue::Epilogue;
use padding_fixup::RunSettings;
use rect::Rect;
use winograd::has_unsupported_elements;

/// A compiled [`ConvDesc`].
pub struct ConvKernel {
    name: &'static str,
    engine: Box<dyn Engine>,
    /// Engine for infinite, NaN or huge elements, if `engine` needs moderate elements.
    general: Option<(&'static str, Box<dyn Engine>)>,
    isa: Isa,
    is_f64: bool,
    /// Number of elements of A and B, and number of buffers.
    sizes: [usize; 2],
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
    /// Returns the fault of the description. Sizes must not overflow. Operands are floats of one compute type, or bytes;
    /// bytes have no gradient. The epilogue is over the result, does not reduce, and is well typed.
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
        let ((chosen, general), double) = match (desc.a, desc.b) {
            (DType::U8 | DType::I8, DType::U8 | DType::I8) => (choose_byte_engine(desc, compiler)?, false),
            _ if desc.zero_points != [None; 2] => {
                return Err("only tensors of bytes have zero points".to_owned());
            }
            (DType::F64, DType::F64) => (choose_engines::<f64>(desc, compiler)?, true),
            (a, b) if Type::of(a) == Type::F32 && Type::of(b) == Type::F32 => {
                (choose_engines::<f32>(desc, compiler)?, false)
            }
            (a, b) => return Err(format!("a convolution of {a} and {b} is not supported")),
        };
        let [a, b, _] = desc.shape.operands().map(|dims| dims.iter().product());
        Ok(ConvKernel {
            name: chosen.0,
            engine: chosen.1,
            general,
            isa: compiler.isa(),
            is_f64: double,
            sizes: [a, b],
            buffers: 1
                + desc.epilogue.loads.len()
                + desc.epilogue.stores.len()
                + desc.zero_points.iter().flatten().count(),
        })
    }

    /// Returns the name of the kernel.
    #[must_use]
    pub fn describe(&self) -> String {
        let name = self.name;
        match &self.general {
            Some((general, _)) => {
                format!("{name}; for operands with infinite, NaN or huge elements {general}")
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
        let general = self.general.as_ref().map_or((0, 0), |(_, engine)| engine.scratch());
        let (a, b) = (self.engine.scratch(), general);
        (a.0.max(b.0), a.1.max(b.1))
    }

    /// Computes the convolution and its epilogue. Allocates nothing, and the result has the same bits on any number of
    /// threads.
    ///
    /// `bases` has the start of each buffer: A, B, the loads of the epilogue after the first one, its stores, and the
    /// zero points of A and of B.
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
        let mut engine = &self.engine;
        if let Some((_, general)) = &self.general {
            if !has_unsupported_elements(self.isa, self.sizes, bases, pool, workers) {
                settings.may_need_fixup = false;
                // SAFETY: the caller's contract.
                return unsafe { engine.run(bases, settings, pool, scratch) };
            }
            engine = general;
        } else {
            settings.may_need_fixup = finish
                .padding_fixup
                .as_ref()
                .is_some_and(|edges| edges.may_be_nonfinite(bases, pool, workers));
        }
        // SAFETY: the caller's contract.
        unsafe { engine.run(bases, settings, pool, scratch) }?;
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

/// All candidates, from the fastest to the most general one.
fn candidates<T: Real + Send + Sync>() -> [ConvCandidate; 9] {
    [
        winograd::result::candidate::<T>(),
        winograd::filter::candidate::<T>(),
        channel_vectors::candidate::<T>(),
        depthwise::candidate::<T>(),
        depthwise::filter_gradient_candidate::<T>(),
        direct::candidate::<T>(),
        implicit_gemm::candidate::<T>(),
        filter_gradient::candidate::<T>(),
        fallback::candidate::<T>(),
    ]
}

/// Returns the candidates for bytes.
fn byte_candidates() -> [ConvCandidate; 1] {
    [bytes::candidate()]
}

/// Returns the names of all candidates.
pub(crate) fn kernel_names() -> impl Iterator<Item = &'static str> {
    candidates::<f32>().into_iter().chain(byte_candidates()).map(|candidate| candidate.name)
}

/// An engine and its name.
type Named = (&'static str, Box<dyn Engine>);

/// Chooses the engine for a shape, and a general engine if the first one needs moderate elements.
fn choose_engines<T: Real + Send + Sync>(
    desc: &ConvDesc,
    compiler: Compiler<'_>,
) -> Result<(Named, Option<Named>), String> {
    let epilogue = &Arc::new(Epilogue::new::<T>(desc, compiler)?);
    let request = Request { desc, isa: compiler.isa(), epilogue };
    let candidates = candidates::<T>();
    let chosen = choose(&candidates, &request, compiler.kernels())?;
    let general = chosen
        .1
        .needs_moderate_elements()
        .then(|| choose(&candidates, &request, &compiler.kernels().without(&winograd::NAMES)));
    Ok((chosen, general.transpose()?))
}

/// Chooses the engine for a convolution of bytes.
fn choose_byte_engine(desc: &ConvDesc, compiler: Compiler<'_>) -> Result<(Named, Option<Named>), String> {
    let ConvDesc { shape, zero_points, .. } = desc;
    if shape.pass != ConvPass::Output {
        return Err("a convolution of bytes has no gradient of bytes".to_owned());
    }
    let channels = shape.groups * shape.channels_out;
    for (count, most) in zero_points.iter().zip([1, channels]) {
        if let Some(count) = count.filter(|&count| count != 1 && count != most) {
            return Err(format!("{count} zero points of an operand, expected 1 or {most}"));
        }
    }
    let epilogue = &Arc::new(Epilogue::new::<i32>(desc, compiler)?);
    let request = Request { desc, isa: compiler.isa(), epilogue };
    Ok((choose(&byte_candidates(), &request, compiler.kernels())?, None))
}
