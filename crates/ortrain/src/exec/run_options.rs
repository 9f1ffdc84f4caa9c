//! Options of all runs: backend, limits, precision, interrupt.

use std::sync::Arc;

use ortrain_program::{Backend, Bf16Fallback, ITERATION_LIMIT, Interrupt, Precision, Workspace};

use crate::Result;
use crate::exec::backend::default_backend;

/// Options of the runs of a model, for training and inference.
///
/// [`ModuleOptions`], [`SessionOptions`] and [`ForwardBackwardOptions`] contain them. They also convert into
/// [`ModuleOptions`] and [`SessionOptions`].
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let artifacts = setup::artifacts()?;
/// use ortrain::{CheckpointState, ModelSource, Module, RunOptions, backend};
///
/// # let mut state = CheckpointState::from_bytes(artifacts.checkpoint_bytes()?)?;
/// # let train = ModelSource::from_proto(&artifacts.training_model)?;
/// let options = RunOptions::default().backend(backend("cpu", 2)?).memory_limit(64 << 20);
/// let module = Module::new(train, &mut state, None, options.into())?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// [`ModuleOptions`]: crate::ModuleOptions
/// [`SessionOptions`]: crate::SessionOptions
/// [`ForwardBackwardOptions`]: crate::ForwardBackwardOptions
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct RunOptions {
    /// Backend; the default is [`default_backend`].
    pub backend: Option<Arc<dyn Backend>>,
    /// Memory limit in bytes: see [`RunOptions::memory_limit`]. The default is no limit.
    pub memory_limit: Option<usize>,
    /// Maximum iterations of a loop; the default is [`ITERATION_LIMIT`].
    pub iteration_limit: Option<u64>,
    /// Precision of inner products: see [`RunOptions::precision`].
    pub precision: Precision,
    /// Alternative to AMX for bfloat16 products: see [`RunOptions::bf16_fallback`].
    pub bf16_fallback: Bf16Fallback,
    /// Interrupt that can end a run early: see [`RunOptions::interrupt`].
    pub interrupt: Option<Interrupt>,
}

impl RunOptions {
    /// Sets the backend.
    #[must_use]
    pub fn backend(mut self, backend: Arc<dyn Backend>) -> RunOptions {
        self.backend = Some(backend);
        self
    }

    /// Sets the memory limit in bytes. A run that would exceed the limit is rejected before it allocates
    /// memory, with an error that names the largest buffers.
    ///
    /// For a run of a session, the limit covers constants, values and kernel scratch. For a step of a
    /// [`Module`](crate::Module), it covers everything that the step reads and writes: all parameters (also
    /// frozen ones and running statistics), their gradients, the constants of the program, the arena of its
    /// values, and kernel scratch. Optimizer state and tensors of the caller do not count.
    #[must_use]
    pub fn memory_limit(mut self, bytes: usize) -> RunOptions {
        self.memory_limit = Some(bytes);
        self
    }

    /// Sets the maximum iterations of a loop (default: [`ITERATION_LIMIT`]). A loop that exceeds it stops
    /// with an error that names the loop.
    #[must_use]
    pub fn iteration_limit(mut self, iterations: u64) -> RunOptions {
        self.iteration_limit = Some(iterations);
        self
    }

    /// Sets the precision of inner products (default: [`Precision::F32`]).
    ///
    /// It applies to matrix products and convolutions that sum in `float32`. Sums and all other operations
    /// remain `float32`, and so do inputs, outputs, parameters and gradients. Products with short sides
    /// ([`Precision::of_product`]) and the products of fused attention are always computed in `float32`.
    ///
    /// The products run on AMX, or on the alternative that [`RunOptions::bf16_fallback`] allows.
    /// [`Module::bf16_unit`](crate::Module::bf16_unit) returns the choice.
    #[must_use]
    pub fn precision(mut self, precision: Precision) -> RunOptions {
        self.precision = precision;
        self
    }

    /// Sets the alternative to AMX for a precision that needs AMX on a machine without it. With
    /// [`Bf16Fallback::None`], that is an error: the precision is never changed silently.
    #[must_use]
    pub fn bf16_fallback(mut self, fallback: Bf16Fallback) -> RunOptions {
        self.bf16_fallback = fallback;
        self
    }

    /// Sets an interrupt that can end a run early. It is polled every tenth of a second, between two
    /// instructions.
    ///
    /// An interrupted run ends with [`RunError::Interrupted`](crate::RunError::Interrupted). If it was a
    /// training step, the state is unchanged. If the step would have accumulated gradients, they are
    /// unchanged, too. If it would have replaced them
    /// ([`Module::lazy_reset_grad`](crate::Module::lazy_reset_grad)), they are zero, and the next step
    /// replaces them.
    ///
    /// To restore gradients, a step that takes more than a few hundredths of a second and accumulates into
    /// nonzero gradients keeps a copy of them, if the memory limit permits. Otherwise the step cannot be
    /// interrupted.
    #[must_use]
    pub fn interrupt(mut self, interrupt: Interrupt) -> RunOptions {
        self.interrupt = Some(interrupt);
        self
    }

    /// Returns the backend, or the default one, with the precision of these options.
    ///
    /// # Errors
    /// If there is no such backend, or it does not support the precision.
    pub(crate) fn open_backend(&self) -> Result<Arc<dyn Backend>> {
        let backend = self.backend.clone().map_or_else(default_backend, Ok)?;
        Ok(backend.with_precision(self.precision, self.bf16_fallback)?)
    }

    /// Creates an empty workspace on a backend. `outside` is the number of bytes outside of the workspace that the
    /// memory limit also covers.
    pub(crate) fn workspace(&self, backend: &Arc<dyn Backend>, outside: usize) -> Workspace {
        Workspace::with_limit(backend.clone(), self.memory_limit, outside)
            .iteration_limit(self.iteration_limit.unwrap_or(ITERATION_LIMIT))
            .interrupt(self.interrupt.clone())
    }
}
