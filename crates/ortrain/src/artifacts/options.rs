//! Options of artifact generation.

use ortrain_ops::training::{BatchNormMode, LossTerm, OptimizerKind, OptimizerSettings};
use rustc_hash::FxHashSet;

use crate::ModelSource;
use crate::train::optim::{OptimizerFunction, OptimizerSpec};

/// Optimizer of artifacts.
///
/// ```
/// use ortrain::artifacts::{ArtifactOptions, OptimizerChoice, OptimizerKind};
/// use ortrain::optim::OptimizerSpec;
///
/// let plain = OptimizerChoice::from(OptimizerKind::AdamW);
/// let lion = OptimizerChoice::from(OptimizerSpec::new("Lion")?);
/// let options = ArtifactOptions { optimizer: Some(lion), ..ArtifactOptions::default() };
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub enum OptimizerChoice {
    /// An optimizer of onnxruntime-training.
    Kind(OptimizerKind, OptimizerSettings),
    /// An optimizer of the table with its settings and groups. Groups name trained parameters.
    Described(Box<OptimizerSpec>),
    /// A custom function with settings and groups.
    Function(Box<OptimizerFunction>, Box<OptimizerSpec>),
    /// An existing optimizer model.
    Model(ModelSource),
}

impl From<OptimizerKind> for OptimizerChoice {
    fn from(kind: OptimizerKind) -> OptimizerChoice {
        OptimizerChoice::Kind(kind, OptimizerSettings::default())
    }
}

impl From<OptimizerSpec> for OptimizerChoice {
    fn from(spec: OptimizerSpec) -> OptimizerChoice {
        OptimizerChoice::Described(Box::new(spec))
    }
}

impl From<OptimizerFunction> for OptimizerChoice {
    fn from(function: OptimizerFunction) -> OptimizerChoice {
        let spec = function.spec();
        OptimizerChoice::Function(Box::new(function), Box::new(spec))
    }
}

impl From<ModelSource> for OptimizerChoice {
    fn from(model: ModelSource) -> OptimizerChoice {
        OptimizerChoice::Model(model)
    }
}

/// Options of artifact generation.
///
/// This example trains the last layer. All other trainable parameters are in the checkpoint as frozen ones:
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::artifacts::{ArtifactOptions, Loss, OptimizerKind, generate};
/// use ortrain::{ParameterRole, Scope, inspect};
///
/// # let model = setup::MODEL;
/// let found = inspect(model.into(), &Scope::Outputs)?;
/// let all = || found.names(ParameterRole::Trained).map(String::from);
/// let options = ArtifactOptions {
///     requires_grad: all().filter(|name| name.starts_with("fc2.")).collect(),
///     frozen_params: all().filter(|name| !name.starts_with("fc2.")).collect(),
///     losses: vec![Loss::CrossEntropyLoss.into()],
///     optimizer: Some(OptimizerKind::AdamW.into()),
///     additional_output_names: vec!["logits".into()],
///     nominal_checkpoint: true,
///     ..ArtifactOptions::default()
/// };
/// let artifacts = generate(model.into(), options)?;
/// assert!(artifacts.optimizer_model.is_some() && artifacts.nominal_checkpoint.is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct ArtifactOptions {
    /// Trained initializers. A value that the model computes from constants alone is also possible: it
    /// becomes a parameter with its current value, and the nodes that computed it are removed.
    pub requires_grad: Vec<String>,
    /// Frozen parameters in the checkpoint. All other initializers remain in the models.
    pub frozen_params: Vec<String>,
    /// Inputs with gradients, which the training model accumulates like gradients of parameters. The caller
    /// provides the buffers; a [`Module`](crate::Module) does not support this.
    pub input_gradients: Vec<String>,
    /// Losses to append to the model: their sum is trained. Without losses, the first output is the loss.
    pub losses: Vec<LossTerm>,
    /// Optimizer; `None` for no optimizer model.
    pub optimizer: Option<OptimizerChoice>,
    /// Additional outputs after the loss.
    pub additional_output_names: Vec<String>,
    /// True to also generate a nominal checkpoint.
    pub nominal_checkpoint: bool,
    /// Inputs of losses without own value names: the scores, then optionally the target. The default is the
    /// model's outputs. A missing target becomes a new input.
    pub loss_input_names: Vec<String>,
    /// Statistics of BatchNormalization in the training model. Updated statistics are frozen parameters, even
    /// if not named. The evaluation model uses the running statistics.
    pub batch_norm: BatchNormMode,
    /// True to store trained float16 and bfloat16 weights as float32 in the checkpoint and to cast them when
    /// read. Small updates then accumulate. Exports have the types of the model again.
    pub master_weights: bool,
}

impl ArtifactOptions {
    /// Returns the named parameters, trained ones first.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = &str> {
        self.requires_grad.iter().chain(&self.frozen_params).map(String::as_str)
    }

    pub(crate) fn trained_names(&self) -> FxHashSet<&str> {
        self.requires_grad.iter().map(String::as_str).collect()
    }
}
