//! Definition of an operator: the [`Op`] trait and the table entry [`Definition`].

use std::sync::Arc;

use ortrain_graph::{DType, Graph, Node, ValueId};
use ortrain_program::{HostFunction, ScanAxis};

use crate::OpError;
use crate::class::{Class, Traits};
use crate::grad::Grad;
use crate::infer::Infer;
use crate::lower::Lower;
use crate::rewrite::Rewrite;
use crate::sample::Sample;

/// Message of the error for an operator without a gradient.
pub(crate) const NO_GRADIENT: &str = "it has no gradient";

/// One application of an operator, with its attributes parsed.
pub trait Op {
    /// Checks arity, types and shapes, and reports the types and shapes of the outputs. If an output holds sizes that
    /// are computed from shapes, also reports its elements.
    ///
    /// # Errors
    /// Returns an error if the node contradicts the operator's definition.
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError>;

    /// Adds the nodes that compute the gradients of the inputs that need one. May request further forward outputs.
    /// An operator with a zero derivative sets no gradient. The default is for operators without a gradient, and for
    /// operators that are differentiated through their decomposition.
    ///
    /// # Errors
    /// Returns an error that says why there is no gradient, and how to repair the model.
    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let _ = cx;
        Err(OpError::unsupported(NO_GRADIENT))
    }

    /// Emits the instructions that compute the outputs. All shapes are concrete at this point. The default lowers the
    /// operator's decomposition.
    ///
    /// # Errors
    /// Returns an error if the node cannot be lowered.
    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        cx.lower_decomposition()
    }

    /// Returns the extent to which the elements of input `k` must be known before a program is built.
    fn needs_value(&self, k: usize, dtype: DType) -> ValueRequirement {
        let _ = k;
        if dtype.is_float() { ValueRequirement::Never } else { ValueRequirement::ForShapes }
    }

    /// Returns true if the results follow from the shapes of the inputs, without their elements.
    fn depends_only_on_shapes(&self) -> bool {
        false
    }

    /// Returns the input that determines the shapes of the results through its producer: both nodes belong in one
    /// program.
    fn shape_source_input(&self) -> Option<usize> {
        None
    }

    /// Returns the place where the operator runs.
    fn placement(&self) -> Placement {
        Placement::Program
    }

    /// Returns pairs of an output and the state input that the output replaces. The replacement takes effect at the end
    /// of a run. Until then every reader sees the old value, except the next node that updates the same state.
    fn state_updates(&self) -> &'static [(usize, usize)] {
        &[]
    }

    /// Returns pairs of an output and the input that the operator changes in place. Sequences of tensors are such
    /// inputs.
    fn in_place_outputs(&self) -> &'static [(usize, usize)] {
        &[]
    }

    /// Returns true if the operator writes state in place. Such a node runs after every node that can fail.
    fn writes_state(&self) -> bool {
        false
    }
}

/// Extent to which the elements of an input must be known before a program is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueRequirement {
    /// The elements only take part in the computation.
    Never,
    /// Required if the shapes of the outputs are unknown without them.
    ForShapes,
    /// Required because the instructions depend on them.
    Always,
}

/// Place where an operator runs.
#[derive(Clone, Debug)]
pub enum Placement {
    /// Instructions of a program.
    Program,
    /// A decomposition into other nodes before programs are built: some of these nodes do not run in a program.
    Composition,
    /// A function on the host: the shapes of its results depend on values.
    Host(Arc<dyn HostFunction>),
    /// One of two schedules, built from the subgraphs in these attributes. The first input selects the schedule.
    If {
        /// Attribute with the graph that runs if the condition is true.
        then_branch: &'static str,
        /// Attribute with the graph that runs if the condition is false.
        else_branch: &'static str,
    },
    /// A schedule that runs repeatedly.
    Repeat(Repetition),
    /// The point at which control returns to the caller. It is an instruction if the rest is one program, and a segment
    /// of its own otherwise.
    Yield,
}

/// Description of how a node repeats a subgraph.
///
/// Own inputs of the node:
/// - for a node with a condition, the maximum number of iterations and the first condition, both optional;
/// - the initial values of the carried values;
/// - the scanned tensors.
///
/// Inputs of the subgraph: the iteration index and the condition (for a node with a condition), the carried values, and
/// slices of the scanned tensors.
/// Outputs of the subgraph: the condition (for a node with a condition), the next carried values, and the collected
/// values.
/// Outputs of the node: the last carried values and the stacked collected values.
#[derive(Clone, Debug)]
pub struct Repetition {
    /// Attribute with the subgraph.
    pub body: &'static str,
    /// True if the node runs while a condition is true. Otherwise the node runs once for each slice of the scanned
    /// tensors.
    pub conditional: bool,
    /// Number of carried values.
    pub carried: usize,
    /// Axes of the scanned tensors.
    pub scanned: Vec<ScanAxis>,
    /// Axes along which collected values are stacked.
    pub stacked: Vec<ScanAxis>,
}

impl Repetition {
    /// Returns the number of inputs of the subgraph before the carried values.
    #[must_use]
    pub fn leading_inputs(&self) -> usize {
        if self.conditional { 2 } else { 0 }
    }

    /// Returns the number of outputs of the subgraph before the carried values.
    #[must_use]
    pub fn leading_outputs(&self) -> usize {
        usize::from(self.conditional)
    }

    /// Returns the number of inputs of the subgraph without captures.
    #[must_use]
    pub fn formal_inputs(&self) -> usize {
        self.leading_inputs() + self.carried + self.scanned.len()
    }

    /// Returns the node's own input `k` (captures excluded), if it is present.
    #[must_use]
    pub fn own_input(node: &Node, k: usize) -> Option<ValueId> {
        node.inputs[..node.inputs.len() - node.captures].get(k).copied().flatten()
    }
}

/// Function that parses the attributes of a node of the newest version.
pub type BuildFn = fn(&Graph, &Node) -> Result<Box<dyn Op>, OpError>;

/// Function that rewrites a node from or to an older version.
pub type RewriteFn = fn(&mut Rewrite<'_>) -> Result<(), OpError>;

/// Function that builds a node in the newest version that the operator accepts. A sample without inputs requests a
/// search by trial.
pub type SampleFn = fn(&Definition) -> Sample;

/// Axis of the scales of a quantized input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// The attributes `axis` and `block_size` say so.
    Attributes,
    /// The first axis.
    First,
    /// The first axis; the first and the last, if the scale has two axes.
    FirstAndLast,
    /// The last axis.
    Last,
    /// The last axis, or the one before if this attribute transposes the matrix.
    LastUnless(&'static str),
}

/// Scale of a quantized input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// An input.
    Input(usize),
    /// The product of two inputs.
    Product([usize; 2]),
    /// A factor of the nodes behind the operator.
    Following,
}

/// Input with the integers of a quantized tensor, which may be a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantizedInput {
    /// Index of the integers.
    pub tensor: usize,
    /// Scale.
    pub scale: Scale,
    /// Index of the zero point, if the operator has one.
    pub zero_point: Option<usize>,
    /// Axis along which scales differ.
    pub axis: Axis,
}

impl QuantizedInput {
    /// Creates a quantized input with a scale among the inputs.
    #[must_use]
    pub const fn new(tensor: usize, scale: usize, zero_point: Option<usize>, axis: Axis) -> QuantizedInput {
        QuantizedInput { tensor, scale: Scale::Input(scale), zero_point, axis }
    }
}

/// Definition of an operator.
pub struct Definition {
    /// Domain; empty for `ai.onnx`.
    pub domain: &'static str,
    /// Operator name.
    pub name: &'static str,
    /// Every opset version that changed the operator's schema, the oldest supported version first.
    pub since: &'static [i64],
    /// Parses the attributes of a node of the newest version.
    pub build: BuildFn,
    /// Rewrites a node of an older version ([`Rewrite::version`]) to the newest. `None`: older nodes have the same
    /// meaning.
    pub upgrade: Option<RewriteFn>,
    /// Rewrites a node for an older opset ([`Rewrite::version`] is the target). `None`: the node is written unchanged.
    pub downgrade: Option<RewriteFn>,
    /// Decomposition for exports to plain ONNX below this opset version. The rewrite emits other operators in their
    /// newest version, which can be downgraded to [`Rewrite::version`]. `None` or an empty patch: `downgrade` suffices.
    pub decomposed_before: Option<(i64, RewriteFn)>,
    /// Decomposes a node into other operators in their newest version. [`Rewrite::version`] is the version for which
    /// the nodes are needed.
    pub decompose: Option<RewriteFn>,
    /// True if the operator has instructions of its own. Otherwise it runs as its decomposition.
    pub has_instructions: bool,
    /// Returns true if a node is differentiated through its decomposition.
    pub is_composition: fn(&Node) -> bool,
    /// True if ONNX does not have the operator although its domain is a domain of ONNX. Training graphs of ONNX Runtime
    /// contain such operators. Exports to plain ONNX contain its decomposition.
    pub is_extension: bool,
    /// True if only the shape that a file declares for the result determines this shape.
    pub has_declared_shape: bool,
    /// Element types that were added after the first version, as pairs of a version and its new types.
    pub later_types: &'static [(i64, &'static [DType])],
    /// Inputs that are weights if they are constant, even if they are scalars.
    pub weights: &'static [usize],
    /// Inputs that are running statistics of the training data.
    pub statistics: &'static [usize],
    /// True if the operator is a row of the table of element-wise operators.
    pub is_elementwise_row: bool,
    /// True if every node is rewritten to other operators when a model is read. The last version is one that no model
    /// has.
    pub is_always_rewritten: bool,
    /// Builds a node that the operator accepts, if a search by trial does not find one.
    pub sample: Option<SampleFn>,
    /// Class of the operator.
    pub class: Class,
    /// Properties that analyses of graphs ask for.
    pub traits: Traits,
    /// Float inputs that keep their type when a model computes in narrow floats.
    pub kept_inputs: &'static [usize],
    /// Inputs to which no gradient flows in models of onnxruntime-training.
    pub inputs_without_gradient: &'static [usize],
    /// Inputs with the integers of quantized tensors.
    pub quantized: &'static [QuantizedInput],
    /// Inputs that are scales of quantized tensors. They are trained only if a user names them.
    pub scales: &'static [usize],
}

impl Definition {
    /// Creates a definition without rewrites.
    #[must_use]
    pub const fn new(
        domain: &'static str,
        name: &'static str,
        since: &'static [i64],
        build: BuildFn,
    ) -> Definition {
        Definition {
            domain,
            name,
            since,
            build,
            upgrade: None,
            downgrade: None,
            decomposed_before: None,
            decompose: None,
            has_instructions: true,
            is_composition: |_| false,
            is_extension: false,
            has_declared_shape: false,
            later_types: &[],
            weights: &[],
            statistics: &[],
            is_elementwise_row: false,
            is_always_rewritten: false,
            sample: None,
            class: Class::Other,
            traits: Traits::NONE,
            kept_inputs: &[],
            inputs_without_gradient: &[],
            quantized: &[],
            scales: &[],
        }
    }

    /// Marks the operator as a row of the table of element-wise operators.
    #[must_use]
    pub const fn elementwise_row(mut self) -> Definition {
        self.is_elementwise_row = true;
        self
    }

    /// Marks the operator as one that is always rewritten to other operators when a model is read.
    #[must_use]
    pub const fn always_rewritten(mut self, rewrite: RewriteFn) -> Definition {
        self.is_always_rewritten = true;
        self.upgrade(rewrite)
    }

    /// Sets the class of the operator.
    #[must_use]
    pub const fn class(mut self, class: Class) -> Definition {
        self.class = class;
        self
    }

    /// Sets the float inputs that keep their type when a model computes in narrow floats.
    #[must_use]
    pub const fn kept_inputs(mut self, inputs: &'static [usize]) -> Definition {
        self.kept_inputs = inputs;
        self
    }

    /// Sets the inputs to which no gradient flows in models of onnxruntime-training.
    #[must_use]
    pub const fn inputs_without_gradient(mut self, inputs: &'static [usize]) -> Definition {
        self.inputs_without_gradient = inputs;
        self
    }

    /// Sets the inputs with the integers of quantized tensors.
    #[must_use]
    pub const fn quantized(mut self, inputs: &'static [QuantizedInput]) -> Definition {
        self.quantized = inputs;
        self
    }

    /// Sets the inputs that are scales of quantized tensors.
    #[must_use]
    pub const fn scales(mut self, inputs: &'static [usize]) -> Definition {
        self.scales = inputs;
        self
    }

    /// Sets the properties that analyses of graphs ask for.
    #[must_use]
    pub const fn traits(mut self, traits: Traits) -> Definition {
        self.traits = traits;
        self
    }

    /// Sets the sample node that the operator accepts, for [`Definition::facts`].
    #[must_use]
    pub const fn sample(mut self, sample: SampleFn) -> Definition {
        self.sample = Some(sample);
        self
    }

    /// Marks the operator as one that ONNX Runtime adds to a domain of ONNX.
    #[must_use]
    pub const fn extension(mut self) -> Definition {
        self.is_extension = true;
        self
    }

    /// Gives the operator's result its declared shape.
    #[must_use]
    pub const fn declared_shape(mut self) -> Definition {
        self.has_declared_shape = true;
        self
    }

    /// Sets the element types that older versions do not have.
    #[must_use]
    pub const fn later_types(mut self, types: &'static [(i64, &'static [DType])]) -> Definition {
        self.later_types = types;
        self
    }

    /// Sets the inputs that are weights if they are constant.
    #[must_use]
    pub const fn weights(mut self, inputs: &'static [usize]) -> Definition {
        self.weights = inputs;
        self
    }

    /// Sets the inputs that are running statistics.
    #[must_use]
    pub const fn statistics(mut self, inputs: &'static [usize]) -> Definition {
        self.statistics = inputs;
        self
    }

    /// Returns true if plain ONNX has the operator.
    #[must_use]
    pub fn is_standard(&self) -> bool {
        self.domain.is_empty() && !self.is_extension
    }

    /// Sets the rewrite from older versions.
    #[must_use]
    pub const fn upgrade(mut self, rewrite: RewriteFn) -> Definition {
        self.upgrade = Some(rewrite);
        self
    }

    /// Sets the rewrite to older versions.
    #[must_use]
    pub const fn downgrade(mut self, rewrite: RewriteFn) -> Definition {
        self.downgrade = Some(rewrite);
        self
    }

    /// Sets the decomposition for opsets older than `version`.
    #[must_use]
    pub const fn decomposed_before(mut self, version: i64, rewrite: RewriteFn) -> Definition {
        self.decomposed_before = Some((version, rewrite));
        self
    }

    /// Sets the decomposition.
    #[must_use]
    pub const fn decompose(mut self, rewrite: RewriteFn) -> Definition {
        self.decompose = Some(rewrite);
        self
    }

    /// Sets the decomposition as the way the operator runs. The gradient stays the operator's own.
    #[must_use]
    pub const fn runs_as(mut self, rewrite: RewriteFn) -> Definition {
        self.has_instructions = false;
        self.decompose(rewrite)
    }

    /// Defines the operator by its decomposition alone: gradient, lowering and every backend use it.
    #[must_use]
    pub const fn composition(self, rewrite: RewriteFn) -> Definition {
        self.runs_as(rewrite).differentiated_as(rewrite)
    }

    /// Sets a decomposition through which every node is differentiated. The operator runs as instructions of its own.
    #[must_use]
    pub const fn differentiated_as(self, rewrite: RewriteFn) -> Definition {
        self.decompose(rewrite).composition_where(|_| true)
    }

    /// Sets the predicate for nodes that are differentiated through their decomposition.
    #[must_use]
    pub const fn composition_where(mut self, holds: fn(&Node) -> bool) -> Definition {
        self.is_composition = holds;
        self
    }
}
