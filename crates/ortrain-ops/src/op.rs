//! What an operator is.

use std::sync::Arc;

use ortrain_graph::{DType, Graph, Node, ValueId};
use ortrain_program::{HostFunction, ScanAxis};

use crate::OpError;
use crate::grad::Grad;
use crate::infer::Infer;
use crate::introspect::Sample;
use crate::lower::Lower;
use crate::rewrite::Rewrite;

/// The error of an operator without a gradient.
pub(crate) const NO_GRADIENT: &str = "it has no gradient";

/// One application of an operator, its attributes read.
pub trait Op {
    /// Checks arity, types and shapes, and says the types and shapes of the outputs (and their elements, where they
    /// are sizes computed from shapes).
    ///
    /// # Errors
    /// What contradicts the operator's definition.
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError>;

    /// Adds the nodes that compute the gradients of the inputs that want one. May ask for further forward outputs.
    /// Operators whose derivative is zero give nothing. The default is for those that have none, and for those that are
    /// differentiated as their decomposition.
    ///
    /// # Errors
    /// What prevents a gradient, and what would help.
    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let _ = cx;
        Err(OpError::unsupported(NO_GRADIENT))
    }

    /// Emits the instructions that compute the outputs; all shapes are numbers by now. The default lowers the
    /// operator's decomposition.
    ///
    /// # Errors
    /// What prevents it.
    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        cx.lower_decomposition()
    }

    /// Whether what is in input `k` must be known before a program is made.
    fn needs_value(&self, k: usize, dtype: DType) -> Need {
        let _ = k;
        if dtype.is_float() { Need::Never } else { Need::ForShapes }
    }

    /// An input whose maker tells the shapes of the results: both nodes belong in one program.
    fn shaped_by_maker_of(&self) -> Option<usize> {
        None
    }

    /// Where the operator runs.
    fn placement(&self) -> Placement {
        Placement::Program
    }

    /// Outputs that take the place of inputs where those are state, as pairs of output and input. They do so when a
    /// run is over: until then everybody sees the old values, but for the next node that updates the same state.
    fn updates(&self) -> &'static [(usize, usize)] {
        &[]
    }

    /// Outputs that are inputs, changed where they lie, as pairs of output and input. Sequences of tensors are.
    fn in_place(&self) -> &'static [(usize, usize)] {
        &[]
    }

    /// Whether it writes state in place. Such nodes run after everything that can fail.
    fn writes_state(&self) -> bool {
        false
    }
}

/// Whether the elements of an input must be known before a program is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// They are only computed with.
    Never,
    /// If the shapes of the outputs are not known without them.
    ForShapes,
    /// The instructions depend on them.
    Always,
}

/// Where an operator runs.
#[derive(Clone, Debug)]
pub enum Placement {
    /// As instructions of a program.
    Program,
    /// As what it is made of, parts of which do not run in a program: it is written out before programs are made.
    Composition,
    /// As a function on the host: the shapes of its results depend on values.
    Host(Arc<dyn HostFunction>),
    /// As one of two schedules, made of the subgraphs in these attributes, chosen by the first input.
    If {
        /// The attribute with the graph that runs if the condition holds.
        then_branch: &'static str,
        /// The attribute with the graph that runs if not.
        else_branch: &'static str,
    },
    /// As a schedule that is run again and again.
    Repeat(Repetition),
    /// As the point at which the caller takes over: an instruction where all else is one program, or a segment of its own.
    Yield,
}

/// How a node repeats a subgraph. The node's own inputs are, where it runs while a condition holds, the largest number
/// of iterations and the first condition (each may be left out); then the initial values of what is carried, and what is
/// scanned. The subgraph takes the number of the iteration and the condition (in such a node), what is carried, and
/// slices of what is scanned; it gives the condition, what is carried on, and what is collected. The node's outputs are
/// the last carried values and what was collected.
#[derive(Clone, Debug)]
pub struct Repetition {
    /// The attribute with the subgraph.
    pub body: &'static str,
    /// Whether it runs while a condition holds; otherwise it runs once for each slice of what is scanned.
    pub conditional: bool,
    /// How many values are carried.
    pub carried: usize,
    /// The axes of what is scanned.
    pub scanned: Vec<ScanAxis>,
    /// The axes of what is collected.
    pub stacked: Vec<ScanAxis>,
}

impl Repetition {
    /// How many inputs of the subgraph come before what is carried.
    #[must_use]
    pub fn lead(&self) -> usize {
        if self.conditional { 2 } else { 0 }
    }

    /// How many outputs of the subgraph come before what is carried on.
    #[must_use]
    pub fn lead_out(&self) -> usize {
        usize::from(self.conditional)
    }

    /// How many inputs of the subgraph are not captured.
    #[must_use]
    pub fn formal(&self) -> usize {
        self.lead() + self.carried + self.scanned.len()
    }

    /// Input `k` of the node's own, if it is there.
    #[must_use]
    pub fn own(node: &Node, k: usize) -> Option<ValueId> {
        node.inputs[..node.inputs.len() - node.captures].get(k).copied().flatten()
    }
}

/// Reads the attributes of a node of the newest version.
pub type BuildFn = fn(&Graph, &Node) -> Result<Box<dyn Op>, OpError>;

/// Rewrites a node of an older version, or into one.
pub type RewriteFn = fn(&mut Rewrite<'_>) -> Result<(), OpError>;

/// Makes a node that an operator accepts, in its newest version. Without inputs: they are found by trying.
pub type SampleFn = fn(&Definition) -> Sample;

/// The definition of an operator.
pub struct Definition {
    /// The domain; empty for `ai.onnx`.
    pub domain: &'static str,
    /// The name.
    pub name: &'static str,
    /// Every version of the set in which the operator's schema changed, oldest supported first.
    pub since: &'static [i64],
    /// Reads the attributes of a node of the newest version.
    pub build: BuildFn,
    /// Rewrites a node of an older version ([`Rewrite::version`]) to the newest. `None`: older nodes mean the same.
    pub upgrade: Option<RewriteFn>,
    /// Rewrites a node for an older set ([`Rewrite::version`] is the target). `None`: it is written as it is.
    pub downgrade: Option<RewriteFn>,
    /// Where plain ONNX below a version is wanted: rewrites a node as other operators in the newest version, which
    /// [`Rewrite::version`] has spellings of. `None` or an empty patch: a downgrade says it all.
    pub decomposed_before: Option<(i64, RewriteFn)>,
    /// Rewrites a node as other operators, in the newest version. [`Rewrite::version`] is the one that these are wanted
    /// for.
    pub decompose: Option<RewriteFn>,
    /// Whether it has instructions of its own, or runs as its decomposition.
    pub has_instructions: bool,
    /// Whether a node is differentiated as its decomposition.
    pub composition: fn(&Node) -> bool,
    /// Whether ONNX does not have the operator although it lies in a domain of ONNX: training graphs of ONNX Runtime
    /// hold such. Where plain ONNX is wanted it is written as its decomposition.
    pub extension: bool,
    /// Whether the shape that a file declares for its result says what nothing else does.
    pub declared_shape: bool,
    /// Element types that came with later versions than the first, as pairs of the version and its new types.
    pub later_types: &'static [(i64, &'static [DType])],
    /// Inputs that are weights where they are constant, even a single number.
    pub weights: &'static [usize],
    /// Inputs that are statistics of what training has seen.
    pub statistics: &'static [usize],
    /// Whether it is a row of the table of element-wise operators.
    pub row: bool,
    /// Whether every node is rewritten as others when a model is read. The last version is one that no model has.
    pub rewritten: bool,
    /// A node that the operator accepts, where it is not found by trying.
    pub sample: Option<SampleFn>,
}

impl Definition {
    /// A definition without rewrites.
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
            composition: |_| false,
            extension: false,
            declared_shape: false,
            later_types: &[],
            weights: &[],
            statistics: &[],
            row: false,
            rewritten: false,
            sample: None,
        }
    }

    /// As a row of the table of element-wise operators.
    #[must_use]
    pub const fn row(mut self) -> Definition {
        self.row = true;
        self
    }

    /// As an operator that is read as others, always.
    #[must_use]
    pub const fn rewritten(mut self, rewrite: RewriteFn) -> Definition {
        self.rewritten = true;
        self.upgrade(rewrite)
    }

    /// With a node that the operator accepts, for [`Definition::facts`].
    #[must_use]
    pub const fn sample(mut self, sample: SampleFn) -> Definition {
        self.sample = Some(sample);
        self
    }

    /// As an operator that ONNX Runtime adds to a domain of ONNX.
    #[must_use]
    pub const fn extension(mut self) -> Definition {
        self.extension = true;
        self
    }

    /// As an operator whose result has the shape that is declared for it.
    #[must_use]
    pub const fn declared_shape(mut self) -> Definition {
        self.declared_shape = true;
        self
    }

    /// With element types that older versions do not have.
    #[must_use]
    pub const fn later_types(mut self, types: &'static [(i64, &'static [DType])]) -> Definition {
        self.later_types = types;
        self
    }

    /// With inputs that are weights where they are constant.
    #[must_use]
    pub const fn weights(mut self, inputs: &'static [usize]) -> Definition {
        self.weights = inputs;
        self
    }

    /// With inputs that are statistics.
    #[must_use]
    pub const fn statistics(mut self, inputs: &'static [usize]) -> Definition {
        self.statistics = inputs;
        self
    }

    /// Whether plain ONNX has the operator.
    #[must_use]
    pub fn is_standard(&self) -> bool {
        self.domain.is_empty() && !self.extension
    }

    /// With a rewrite from older versions.
    #[must_use]
    pub const fn upgrade(mut self, rewrite: RewriteFn) -> Definition {
        self.upgrade = Some(rewrite);
        self
    }

    /// With a rewrite to older versions.
    #[must_use]
    pub const fn downgrade(mut self, rewrite: RewriteFn) -> Definition {
        self.downgrade = Some(rewrite);
        self
    }

    /// With other words for sets of operators older than `version`.
    #[must_use]
    pub const fn decomposed_before(mut self, version: i64, rewrite: RewriteFn) -> Definition {
        self.decomposed_before = Some((version, rewrite));
        self
    }

    /// With a decomposition.
    #[must_use]
    pub const fn decompose(mut self, rewrite: RewriteFn) -> Definition {
        self.decompose = Some(rewrite);
        self
    }

    /// As an operator that runs as its decomposition, but has a gradient of its own.
    #[must_use]
    pub const fn runs_as(mut self, rewrite: RewriteFn) -> Definition {
        self.has_instructions = false;
        self.decompose(rewrite)
    }

    /// As nothing but a decomposition: gradient, lowering and every backend follow.
    #[must_use]
    pub const fn composition(self, rewrite: RewriteFn) -> Definition {
        self.runs_as(rewrite).differentiated_as(rewrite)
    }

    /// With a decomposition that every node is differentiated as, whereas it runs as instructions of its own.
    #[must_use]
    pub const fn differentiated_as(self, rewrite: RewriteFn) -> Definition {
        self.decompose(rewrite).composition_where(|_| true)
    }

    /// With nodes that are differentiated as their decomposition.
    #[must_use]
    pub const fn composition_where(mut self, holds: fn(&Node) -> bool) -> Definition {
        self.composition = holds;
        self
    }
}
