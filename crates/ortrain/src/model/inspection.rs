//! Report of an inspection.

use ortrain_graph::DType;

use crate::FileKind;
use crate::model::obstacle::Obstacle;
use crate::train::optim::OptimizerSpec;

/// Role of a model's constant in training.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{ParameterRole, Scope, inspect};
///
/// # let convnet = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/convnet.onnx");
/// let found = inspect(convnet.into(), &Scope::Outputs)?;
/// let statistics: Vec<&str> = found.names(ParameterRole::Statistic).take(2).collect();
/// assert_eq!(statistics, ["block1.mean", "block1.var"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_ops::training::{Confidence, ParameterRole};

/// A constant of a model.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{Confidence, ParameterInfo, ParameterRole, Scope, inspect};
///
/// let found = inspect(setup::MODEL.into(), &Scope::Outputs)?;
/// let ParameterInfo { name, dims, role, confidence, reason, nodes, layer, .. } = &found.parameters[0];
/// assert_eq!((name.as_str(), dims.as_slice()), ("fc1.weight", &[96, 64][..]));
/// assert_eq!((*role, *confidence), (ParameterRole::Trained, Confidence::Certain));
/// assert_eq!(reason, r#"it is a weight of node "fc1" (Gemm)"#);
/// assert_eq!((nodes.as_slice(), *layer), (&["fc1".to_owned()][..], Some(2)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterInfo {
    /// Name of the constant.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub dims: Vec<usize>,
    /// Role by default.
    pub role: ParameterRole,
    /// Strength of the evidence for the role.
    pub confidence: Confidence,
    /// Reason for the role, as a part of a sentence.
    pub reason: String,
    /// Names of the nodes that use the constant; for a node without a name, the name of its first output.
    pub nodes: Vec<String>,
    /// Layer of a trained constant, counted from the end: 1 is the last layer.
    ///
    /// A layer is a node with weights (a convolution, a product, a normalization, an embedding, a recurrent
    /// layer), together with constants that are added to or multiplied with its results. Layers are in node
    /// order. A constant of several layers belongs to the last of them.
    pub layer: Option<usize>,
}

/// A node that passes no gradient to its inputs.
///
/// ```
/// use ortrain::{GradientStop, Scope, inspect};
///
/// # let convnet = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/convnet.onnx");
/// let found = inspect(convnet.into(), &Scope::Outputs)?;
/// let nodes: Vec<&str> = found.stops.iter().map(|stop: &GradientStop| stop.node.as_str()).collect();
/// assert!(nodes.is_empty(), "a gradient reaches everything");
/// # Ok::<(), ortrain::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GradientStop {
    /// Node, as messages name it.
    pub node: String,
    /// Operator of the node.
    pub operator: String,
    /// Reason.
    pub reason: String,
    /// Constants that are therefore not trained: no gradient reaches them on another path.
    pub parameters: Vec<String>,
    /// Remedy, if the stop is not intended.
    pub fix: String,
}

/// A value at which PyTorch may have stopped the gradient: `detach` and `no_grad` leave no trace in a file.
///
/// ```
/// use ortrain::{Scope, StopCandidate, inspect};
///
/// # let convnet = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/convnet.onnx");
/// let found = inspect(convnet.into(), &Scope::Outputs)?;
/// let values: Vec<&StopCandidate> = found.stop_candidates.iter().collect();
/// assert!(values.is_empty(), "no result decides about others");
/// # Ok::<(), ortrain::Error>(())
/// ```
#[doc(inline)]
pub use ortrain_ops::training::StopCandidate;

/// A node that is not part of a single program.
///
/// ```
/// use ortrain::{NodeNote, Scope, inspect};
///
/// # let convnet = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/convnet.onnx");
/// let found = inspect(convnet.into(), &Scope::Outputs)?;
/// let notes: Vec<&NodeNote> = found.host_steps.iter().chain(&found.control_flow).collect();
/// assert!(notes.is_empty(), "a step is one program");
/// # Ok::<(), ortrain::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeNote {
    /// Node, as messages name it.
    pub node: String,
    /// Operator of the node.
    pub operator: String,
    /// Execution of the node.
    pub what: String,
}

/// Findings about a model before training.
///
/// The text of an inspection is a short report; with `{:#}` it has every tensor and every node:
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{Scope, inspect};
///
/// let found = inspect(setup::MODEL.into(), &Scope::Outputs)?;
/// assert_eq!(found.obstacle, None);
/// assert!(found.to_string().contains("trained: 4 tensors, 7,210 elements, 28.8 kB\n"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Inspection {
    /// Kind of the file. Files other than forward models only have `parameters` and `inputs`.
    pub kind: FileKind,
    /// Inputs of a run, each with its type.
    pub inputs: Vec<(String, String)>,
    /// Initializers of the model in its order, then initializers of subgraphs, then the values of Constant
    /// nodes.
    pub parameters: Vec<ParameterInfo>,
    /// Reason why the model cannot be trained as it is: the error of artifact generation.
    pub obstacle: Option<String>,
    /// All obstacles, with their remedies.
    pub obstacles: Vec<Obstacle>,
    /// Nodes between constants and the loss that pass no gradient. This may be intended.
    pub stops: Vec<GradientStop>,
    /// Values at which PyTorch may have stopped the gradient, with the reasons.
    pub stop_candidates: Vec<StopCandidate>,
    /// Possible mistakes, each with the value to name instead: an output that is no logit, or a loss in the
    /// model on unsuitable values.
    pub warnings: Vec<String>,
    /// A sentence about trained constants that may be no parameters.
    pub about_guesses: Option<String>,
    /// Nodes that run on the host.
    pub host_steps: Vec<NodeNote>,
    /// Nodes that choose or repeat subgraphs.
    pub control_flow: Vec<NodeNote>,
    /// Inputs with unknown shapes that a plan of a step requires, each with its type.
    pub open_inputs: Vec<(String, String)>,
    /// Inputs with values that decide shapes: a step cannot be planned before a run.
    pub value_inputs: Vec<String>,
    /// Cost of a training step, if all shapes are known.
    pub step: Option<StepCost>,
    /// The optimizer with its settings and groups, for an optimizer model or a checkpoint with optimizer
    /// settings.
    pub optimizer: Option<OptimizerSpec>,
}

impl Inspection {
    /// Returns the names of the constants with a role, in the model's order.
    pub fn names(&self, role: ParameterRole) -> impl Iterator<Item = &str> {
        self.parameters.iter().filter(move |info| info.role == role).map(|info| info.name.as_str())
    }
}

/// Values that the loss depends on.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{ParameterRole, Scope, inspect};
///
/// // A loss of the hidden layer does not reach the second one.
/// let found = inspect(setup::MODEL.into(), &Scope::Values(vec!["hidden".into()]))?;
/// let trained: Vec<&str> = found.names(ParameterRole::Trained).collect();
/// assert_eq!(trained, ["fc1.weight", "fc1.bias"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// All outputs of the model.
    #[default]
    Outputs,
    /// The first output.
    FirstOutput,
    /// These values.
    Values(Vec<String>),
}

/// Cost of a training step, planned but not run. The loss is the sum of the means of the selected values, so
/// a real loss costs slightly more.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{InspectOptions, Scope, StepCost, inspect_with};
///
/// let options = InspectOptions::default().batch_size(32);
/// let found = inspect_with(setup::MODEL.into(), &Scope::Outputs, &options)?;
/// let step: StepCost = found.step.unwrap();
/// assert_eq!(step.inputs, [("x".to_owned(), vec![32, 64])]);
/// assert!(step.training_flops > 2 * step.forward_flops);
/// assert_eq!(step.moments, 2 * step.gradients);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepCost {
    /// Shapes of the inputs.
    pub inputs: Vec<(String, Vec<usize>)>,
    /// Floating-point operations of a forward run; a multiply-add counts as two.
    pub forward_flops: u64,
    /// Floating-point operations of a training step: forward and backward.
    pub training_flops: u64,
    /// Bytes of the parameters, including frozen ones and running statistics.
    pub parameters: usize,
    /// Bytes of the gradients.
    pub gradients: usize,
    /// Bytes of the moments of AdamW.
    pub moments: usize,
    /// Bytes of the constants of the program.
    pub constants: usize,
    /// Bytes of inputs, activations and intermediate values: the arena of a training step.
    pub work: usize,
    /// Bytes of kernel scratch.
    pub scratch: usize,
    /// Bytes of the arena of a forward run.
    pub forward_work: usize,
    /// Parts of the model that the numbers exclude, as sentences: they are planned during a run.
    pub without: Vec<String>,
}

impl StepCost {
    /// Returns the peak memory of a training step with AdamW, in bytes.
    #[must_use]
    pub fn total(&self) -> usize {
        let parts = [self.parameters, self.gradients, self.moments, self.constants, self.work, self.scratch];
        parts.into_iter().fold(0, usize::saturating_add)
    }
}

/// Inputs for which a training step is planned.
///
/// ```
/// use ortrain::InspectOptions;
///
/// let options = InspectOptions::default().batch_size(8).shape("tokens", &[8, 128]);
/// assert_eq!(options.shapes, [("tokens".to_owned(), vec![8, 128])]);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct InspectOptions {
    /// Size of symbolic first axes.
    pub batch_size: Option<usize>,
    /// Shapes of inputs, by name.
    pub shapes: Vec<(String, Vec<usize>)>,
}

impl InspectOptions {
    /// Sets the size of symbolic first axes.
    #[must_use]
    pub fn batch_size(mut self, rows: usize) -> InspectOptions {
        self.batch_size = Some(rows);
        self
    }

    /// Sets the shape of an input.
    #[must_use]
    pub fn shape(mut self, name: &str, dims: &[usize]) -> InspectOptions {
        self.shapes.push((name.to_owned(), dims.to_vec()));
        self
    }
}
