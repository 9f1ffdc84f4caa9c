//! What a checkpoint holds, as plain data.

use std::collections::BTreeMap;

use ortrain_graph::{DType, Tensor};

/// A training state: parameters, optimizer state, properties, and what only ortrain keeps.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Checkpoint {
    /// The parameters.
    pub module: ModuleState,
    /// State of the optimizer's parameter groups (ONNX Runtime uses one, `group0`); empty when it was not saved.
    pub optimizer_groups: Vec<OptimizerGroup>,
    /// The user's own values, sorted by name.
    pub properties: BTreeMap<String, Property>,
    /// What ONNX Runtime's format has no place for.
    pub extras: Extras,
}

/// The parameters of a model. No name occurs twice, neither within a list nor across the two.
#[derive(Clone, Debug, PartialEq)]
pub enum ModuleState {
    /// Parameters and their values.
    Full {
        /// Parameters that are trained.
        trainable: Vec<NamedTensor>,
        /// Parameters that are not.
        frozen: Vec<NamedTensor>,
    },
    /// A *nominal* checkpoint: which parameters there are, without values. They are delivered later.
    Nominal {
        /// Parameters that are trained.
        trainable: Vec<NominalTensor>,
        /// Parameters that are not.
        frozen: Vec<NominalTensor>,
    },
}

impl ModuleState {
    /// Whether the values are missing.
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

/// A tensor and its name.
#[derive(Clone, Debug, PartialEq)]
pub struct NamedTensor {
    /// The name; may be empty.
    pub name: String,
    /// The value.
    pub tensor: Tensor,
}

impl NamedTensor {
    /// A tensor with this name.
    #[must_use]
    pub fn new(name: impl Into<String>, tensor: Tensor) -> NamedTensor {
        NamedTensor { name: name.into(), tensor }
    }
}

/// A parameter of a nominal checkpoint: a name and an element type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NominalTensor {
    /// The name; may be empty.
    pub name: String,
    /// The type of the elements to come.
    pub dtype: DType,
}

/// The optimizer state of one group of parameters.
#[derive(Clone, Debug, PartialEq)]
pub struct OptimizerGroup {
    /// The name; `group0` is the only one ONNX Runtime uses.
    pub name: String,
    /// Optimizer steps taken.
    pub step: i64,
    /// The learning rate a scheduler starts from. The current one is in [`Extras::learning_rate`].
    pub initial_learning_rate: f32,
    /// State per trainable parameter.
    pub states: Vec<ParameterState>,
}

/// The optimizer state of one parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterState {
    /// The name of the parameter.
    pub parameter: String,
    /// The slots of the optimizer by name: `momentum0` and, for `AdamW`, `momentum1`; those of optimizers that ONNX Runtime
    /// does not have begin with the name of the optimizer.
    pub moments: Vec<NamedTensor>,
}

/// A value of the user's own.
#[derive(Clone, Debug, PartialEq)]
pub enum Property {
    /// An integer.
    Int(i64),
    /// A number.
    Float(f32),
    /// A text.
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

/// What ortrain keeps beyond ONNX Runtime's format. Readers of 1.19.2 ignore it, and its files have none of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Extras {
    /// The current learning rate.
    pub learning_rate: Option<f32>,
    /// The learning-rate scheduler.
    pub scheduler: Option<Scheduler>,
    /// The seed of the random numbers.
    pub seed: Option<i64>,
    /// Training steps taken, optimizer steps or not: with the seed, the state of the random numbers.
    pub train_step: Option<i64>,
    /// The optimizer, its settings and groups of parameters, where they are not in the optimizer model alone: JSON.
    pub optimizer: Option<String>,
    /// The factor of the schedule, for groups with a learning rate of their own.
    pub schedule_factor: Option<f64>,
}

/// The state of a learning-rate scheduler.
#[derive(Clone, Debug, PartialEq)]
pub struct Scheduler {
    /// Which one: `linear`, or a schedule as it prints itself, with what it remembers.
    pub kind: String,
    /// Steps over which the learning rate rises.
    pub warmup_steps: i64,
    /// Steps of the whole training; zero if the schedule has no end.
    pub total_steps: i64,
    /// The learning rate that is times the factor of the schedule.
    pub initial_learning_rate: f32,
    /// Steps taken.
    pub step: i64,
}
