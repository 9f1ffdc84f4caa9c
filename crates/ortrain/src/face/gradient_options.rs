//! Options and weights of a [`ForwardBackward`](crate::ForwardBackward).

use std::sync::Arc;

use ortrain_graph::{DType, Tensor};
use ortrain_ops::training::BatchNormMode;
use ortrain_program::{Memory, RunError};

use crate::exec::caller_memory::{DEVICE_ALIGN, is_aligned};
use crate::exec::run_options::RunOptions;
use crate::{Error, Result};

/// Options of a [`ForwardBackward`].
///
/// ```
/// use ortrain::ForwardBackwardOptions;
///
/// let options = ForwardBackwardOptions::default().weights(["fc2.weight", "fc2.bias"]).inputs(["x"]);
/// assert_eq!(options.inputs, Some(vec!["x".to_owned()]));
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ForwardBackwardOptions {
    /// Initializers that each call receives as weights, with gradients: see
    /// [`ForwardBackwardOptions::weights`].
    pub weights: Option<Vec<String>>,
    /// Inputs with gradients: see [`ForwardBackwardOptions::inputs`].
    pub inputs: Option<Vec<String>>,
    /// Training mode of forward passes, if set: see [`ForwardBackwardOptions::training`].
    pub training: Option<BatchNormMode>,
    /// Seed of random numbers.
    pub seed: i64,
    /// Backend, limits and precision: see [`ForwardBackwardOptions::run`].
    pub run: RunOptions,
}

impl ForwardBackwardOptions {
    /// Sets the weights: these initializers, in this order.
    ///
    /// The default is all float initializers that a gradient reaches, in the order of the model. If
    /// [`ForwardBackwardOptions::training`] is set, the default excludes running statistics.
    #[must_use]
    pub fn weights<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> ForwardBackwardOptions {
        self.weights = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// Sets the inputs with gradients. The default is all float inputs that the outputs depend on.
    #[must_use]
    pub fn inputs<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> ForwardBackwardOptions {
        self.inputs = Some(names.into_iter().map(Into::into).collect());
        self
    }

    /// Makes forward passes behave as in training artifacts.
    ///
    /// Every Dropout drops elements. Every BatchNormalization uses the statistics that `mode` selects and
    /// updates the running statistics, which belong to the [`ForwardBackward`]. Evaluations follow the model,
    /// with these running statistics. By default, forward passes compute the model as it is.
    #[must_use]
    pub fn training(mut self, mode: BatchNormMode) -> ForwardBackwardOptions {
        self.training = Some(mode);
        self
    }

    /// Sets the seed of random numbers. Each forward pass draws new numbers.
    #[must_use]
    pub fn seed(mut self, seed: i64) -> ForwardBackwardOptions {
        self.seed = seed;
        self
    }

    /// Sets the backend, limits, the precision and an interrupt. A forward pass cannot be used again after an
    /// interrupt of its backward pass.
    ///
    /// A memory limit covers the weights, their gradients, and the activations of all live forward passes
    /// together. Activations are recomputed if a single pass would exceed the limit.
    #[must_use]
    pub fn run(mut self, options: RunOptions) -> ForwardBackwardOptions {
        self.run = options;
        self
    }
}

/// A weight of a [`ForwardBackward`].
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{ForwardBackward, ForwardBackwardOptions};
///
/// let both = ForwardBackward::new(setup::MODEL.into(), ForwardBackwardOptions::default())?;
/// let weight = &both.weights()[0];
/// assert_eq!((weight.name.as_str(), weight.initial.dims()), ("fc1.weight", &[96, 64][..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Weight {
    /// The name.
    pub name: String,
    /// Value in the model.
    pub initial: Tensor,
}

impl Weight {
    /// Copies the value of the model into host memory.
    ///
    /// # Errors
    /// If the system cannot allocate the memory.
    pub fn to_memory(&self) -> Result<Arc<Memory>> {
        let memory = self.allocate_gradient()?;
        memory.write(0, self.initial.data())?;
        Ok(memory)
    }

    /// Allocates zeroed host memory for the gradient.
    ///
    /// # Errors
    /// If the system cannot allocate the memory.
    pub fn allocate_gradient(&self) -> Result<Arc<Memory>> {
        Ok(Arc::new(Memory::try_new(self.initial.data().len()).map_err(RunError::from)?))
    }

    /// Checks that a buffer of `bytes` bytes has the type, shape and size of the weight, and that the address of a
    /// memory is aligned.
    pub(crate) fn check(
        &self,
        (dtype, dims): (DType, &[usize]),
        bytes: usize,
        memory: Option<&Memory>,
        label: &str,
    ) -> Result<()> {
        let (own_dtype, own_dims) = (self.initial.dtype(), self.initial.dims());
        let fits = dtype == own_dtype && dims == own_dims;
        let own_bytes = self.initial.data().len();
        if !fits || bytes < own_bytes || (memory.is_none() && bytes > own_bytes) {
            let actual = if fits { format!("{bytes} bytes") } else { format!("{dtype}{dims:?}") };
            return Err(Error::Argument(format!(
                "{label}{:?} should be {own_dtype}{own_dims:?}, but it is {actual}",
                self.name
            )));
        }
        let Some(memory) = memory.filter(|memory| !is_aligned(memory, dtype)) else { return Ok(()) };
        let multiple = match memory.host() {
            Some(_) => format!("{} bytes, its element size", dtype.size()),
            None => format!("{DEVICE_ALIGN} bytes"),
        };
        Err(Error::Argument(format!(
            "the address of {label}{:?} is not a multiple of {multiple}; give an aligned copy",
            self.name
        )))
    }
}
