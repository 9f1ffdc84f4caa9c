//! Content of a checkpoint, as plain data.

use std::collections::BTreeMap;

use ortrain_graph::{DType, Tensor};

/// Training state: parameters, optimizer state, properties, and ortrain's additions.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Checkpoint {
    /// Parameters of the model.
    pub module: ModuleState,
    /// State of the optimizer's parameter groups. ONNX Runtime uses one group, `group0`. The list is empty if the state
    /// was not saved.
    pub optimizer_groups: Vec<OptimizerGroup>,
    /// User-defined values, sorted by name.
    pub properties: BTreeMap<String, Property>,
    /// Additions of ortrain to ONNX Runtime's format.
    pub extras: Extras,
}

/// Parameters of a model. Every name is unique across both lists.
#[derive(Clone, Debug, PartialEq)]
pub enum ModuleState {
    /// Parameters with their values.
    Full {
        /// Trainable parameters.
        trainable: Vec<NamedTensor>,
        /// Frozen parameters.
        frozen: Vec<NamedTensor>,
    },
    /// *Nominal* checkpoint: names and types of the parameters, without values. The values are supplied later.
    Nominal {
        /// Trainable parameters.
        trainable: Vec<NominalTensor>,
        /// Frozen parameters.
        frozen: Vec<NominalTensor>,
    },
}

impl ModuleState {
    /// Returns true if the checkpoint has no values.
    #[must_use]
    pub fn is_nominal(&self) -> bool {
        matches!(self, ModuleState::Nominal { .. })
    }
}

impl Default for ModuleState {
    fn default() -> Self {
        ModuleState::Full { trainable: Vec::new(), frozen: Vec::new() }
    }
}

/// Tensor with a name.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedTensor {
    /// Name; may be empty.
    pub name: String,
    /// Value.
    pub tensor: Tensor,
}

impl NamedTensor {
    /// Creates a tensor with a name.
    #[must_use]
    pub fn new(name: impl Into<String>, tensor: Tensor) -> NamedTensor {
        NamedTensor { name: name.into(), tensor }
    }
}

/// Parameter of a nominal checkpoint: a name and an element type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NominalTensor {
    /// Name; may be empty.
    pub name: String,
    /// Element type of the future value.
    pub dtype: DType,
}

/// Optimizer state of a parameter group.
#[derive(Clone, Debug, PartialEq)]
pub struct OptimizerGroup {
    /// Name of the group. ONNX Runtime uses only `group0`.
    pub name: String,
    /// Number of completed optimizer steps.
    pub step: i64,
    /// Initial learning rate of a scheduler. [`Extras::learning_rate`] is the current learning rate.
    pub initial_learning_rate: f32,
    /// Optimizer states of the trainable parameters.
    pub states: Vec<ParameterState>,
}

/// Optimizer state of one parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterState {
    /// Name of the parameter.
    pub parameter: String,
    /// Slots of the optimizer by name: `momentum0` and, for `AdamW`, `momentum1`. The slots of other optimizers, which
    /// ONNX Runtime does not have, begin with the name of the optimizer.
    pub moments: Vec<NamedTensor>,
}

/// User-defined value.
#[derive(Clone, Debug, PartialEq)]
pub enum Property {
    /// Integer.
    Int(i64),
    /// Floating-point number.
    Float(f32),
    /// Text.
    String(String),
}

impl From<i64> for Property {
    fn from(value: i64) -> Property {
        Property::Int(value)
    }
}

impl From<f32> for Property {
    fn from(value: f32) -> Property {
        Property::Float(value)
    }
}

impl From<&str> for Property {
    fn from(value: &str) -> Property {
        Property::String(value.to_owned())
    }
}

impl From<String> for Property {
    fn from(value: String) -> Property {
        Property::String(value)
    }
}

/// Additions of ortrain to ONNX Runtime's format. ONNX Runtime 1.19.2 ignores them, and its own files do not contain
/// them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Extras {
    /// Current learning rate.
    pub learning_rate: Option<f32>,
    /// State of the learning-rate scheduler.
    pub scheduler: Option<Scheduler>,
    /// Seed of the random number generator.
    pub seed: Option<i64>,
    /// Number of completed training steps, with or without an optimizer step. Together with the seed, this number is
    /// the state of the random number generator.
    pub train_step: Option<i64>,
    /// JSON of the optimizer, its settings and its parameter groups, if the optimizer model alone does not determine
    /// them.
    pub optimizer: Option<String>,
    /// Factor of the schedule, for parameter groups with their own learning rate.
    pub schedule_factor: Option<f64>,
}

/// State of a learning-rate scheduler.
#[derive(Clone, Debug, PartialEq)]
pub struct Scheduler {
    /// `linear`, or the text form of a schedule with its state.
    pub kind: String,
    /// Number of warmup steps, in which the learning rate rises.
    pub warmup_steps: i64,
    /// Total number of training steps; zero if the schedule has no end.
    pub total_steps: i64,
    /// Learning rate that the factor of the schedule multiplies.
    pub initial_learning_rate: f32,
    /// Number of completed optimizer steps.
    pub step: i64,
}
