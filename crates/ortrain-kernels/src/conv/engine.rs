//! Engine: one way to compute a convolution, and the request that selects it.

use std::sync::Arc;

use ortrain_expr::{DType, OutOfRange};

use super::epilogue::Epilogue;
use super::padding_fixup::RunSettings;
use crate::candidates::{Candidate, Table};
use crate::conv::desc::ConvDesc;
use crate::gemm::levels::Real;
use crate::gemm::micro::Micro;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::scratch::{BaseAddresses, Scratch, ScratchParts};

/// Request for an engine.
pub(super) struct Request<'a> {
    pub(super) desc: &'a ConvDesc,
    pub(super) isa: Isa,
    pub(super) epilogue: &'a Arc<Epilogue>,
}

impl Request<'_> {
    /// Returns true if the operands are multiplied unchanged. Engines without packing, and engines that transform
    /// windows, do not round operands to bfloat16.
    pub(super) fn multiplies_unchanged<T: Real>(&self) -> bool {
        let Request { desc, isa, .. } = *self;
        choose_micro_kernel::<T>(desc, isa, [desc.a, desc.b]).tiles.is_none()
    }
}

/// Table of convolutions.
pub(super) struct Convolutions;

impl Table for Convolutions {
    type Request<'a> = Request<'a>;
    type Kernel = Box<dyn Engine>;
}

/// Candidate of the table of convolutions.
pub(super) type ConvCandidate = Candidate<Convolutions>;

/// Returns an engine for a table of candidates.
pub(super) fn boxed<E: Engine + 'static>(engine: E) -> Box<dyn Engine> {
    Box::new(engine)
}

/// A run of an engine: the addresses of the buffers, the settings, and the memory of each worker.
#[derive(Clone, Copy)]
pub(super) struct EngineRun<'a> {
    bases: BaseAddresses<'a>,
    pub(super) settings: RunSettings,
    pub(super) parts: ScratchParts,
    pool: &'a Pool,
}

impl EngineRun<'_> {
    /// Runs tasks on all workers. `task` receives the addresses of the buffers, its own index, and the index of its
    /// worker.
    pub(super) fn each(&self, tasks: usize, task: impl Fn(&[*mut u8], usize, usize) + Sync) {
        let bases = self.bases;
        self.pool.run(tasks, self.parts.workers, &|index, worker| task({ bases }.0, index, worker));
    }
}

/// An algorithm for convolutions.
pub(super) trait Engine: Send + Sync {
    fn epilogue(&self) -> &Epilogue;

    /// Returns true if infinite, NaN and huge elements of the operands give wrong results.
    fn needs_moderate_elements(&self) -> bool {
        false
    }

    /// Bytes of scratch memory: shared by all workers, and for each worker.
    fn scratch(&self) -> (usize, usize);

    /// Runs the tasks of a run.
    ///
    /// # Safety
    /// The contract of [`super::ConvKernel::run`]. The memory of each worker begins with an initialised frame.
    unsafe fn run_tasks(&self, run: EngineRun<'_>);

    /// Runs the engine, from the frames of the workers to the first failure of the epilogue.
    ///
    /// # Safety
    /// The contract of [`super::ConvKernel::run`].
    unsafe fn run(
        &self,
        bases: &[*mut u8],
        settings: RunSettings,
        pool: &Pool,
        scratch: Scratch,
    ) -> Result<(), OutOfRange> {
        let (shared, each) = self.scratch();
        let parts = scratch.split(shared, each, pool);
        // SAFETY: the memory of each worker begins with a frame, and the caller's contract. All tasks have finished when
        // `run_tasks` returns.
        unsafe {
            self.epilogue().init_frames(parts);
            self.run_tasks(EngineRun { bases: BaseAddresses(bases), settings, parts, pool });
            self.epilogue().first_failure(parts)
        }
    }
}

/// Returns the micro-kernel for the products of a group. `dtypes`: first the operand of the rows, then the other
/// operand.
pub(super) fn choose_micro_kernel<T: Real>(desc: &ConvDesc, isa: Isa, dtypes: [DType; 2]) -> Micro<T> {
    Micro::select(isa, desc.products, dtypes)
}
