//! Errors of a node, and of a model.

use ortrain_graph::{AttrError, Graph, GraphError, Node, ValueId};
use ortrain_program::ProgramError;

/// Error in one application of an operator.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpError {
    /// The node contradicts the operator's definition: arity, types, shapes, values of attributes.
    #[error("{0}")]
    Invalid(String),
    /// The node is valid but needs an unsupported feature.
    #[error("{0}")]
    Unsupported(String),
    /// An attribute is missing or of the wrong kind.
    #[error(transparent)]
    Attr(#[from] AttrError),
    /// A lowering failed.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// A subgraph has an error.
    #[error("in its subgraph: {0}")]
    Subgraph(Box<Error>),
    /// A user-defined gradient has an error.
    #[error("in {rule} {source}")]
    Gradient {
        /// Name of the gradient in messages.
        rule: String,
        /// Error in the gradient.
        source: Box<Error>,
    },
}

impl OpError {
    /// Creates an error for a node that contradicts the operator's definition.
    pub fn invalid(message: impl Into<String>) -> OpError {
        OpError::Invalid(message.into())
    }

    /// Creates an error for a node with an unsupported feature.
    pub fn unsupported(message: impl Into<String>) -> OpError {
        OpError::Unsupported(message.into())
    }
}

/// Maximum number of inputs in a message.
const MAX_INPUTS: usize = 16;

/// Reason why a model cannot be prepared, differentiated, rewritten or run.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The graph contradicts itself.
    #[error("{0}")]
    Graph(String),
    /// A node has an error.
    #[error("{node} with inputs ({inputs}): {source}")]
    Node {
        /// Name of the node in messages.
        node: String,
        /// Types and shapes of its inputs.
        inputs: String,
        /// Error of the node.
        source: OpError,
    },
    /// The model uses unknown operators.
    #[error(
        "the model uses operators that are not supported: {}; an operator can be added as a function of ONNX \
         (docs/extending.md)", .list.join("; ")
    )]
    UnknownOperators {
        /// One line for each operator, with the nodes that use it.
        list: Vec<String>,
    },
    /// A version of an operator set is not supported.
    #[error(
        "the model uses version {found} of operator set {domain:?}; versions {oldest} to {newest} are supported"
    )]
    Opset {
        /// Domain of the operator set.
        domain: String,
        /// Version of the model.
        found: i64,
        /// Oldest supported version.
        oldest: i64,
        /// Newest supported version.
        newest: i64,
    },
    /// A function of the model cannot be used.
    #[error("{function} {reason}")]
    Function {
        /// Function with its domain.
        function: String,
        /// Reason, as the rest of the sentence.
        reason: String,
    },
    /// A call does not match its function.
    #[error("{node}: {reason}")]
    Call {
        /// Node of the call.
        node: String,
        /// Reason.
        reason: String,
    },
    /// There is no loss to train.
    #[error("{0}")]
    Loss(String),
    /// There is no head that can be replaced.
    #[error("{0}")]
    Head(String),
    /// An adapter cannot be added, changed or merged.
    #[error("{0}")]
    Adapter(String),
    /// A parameter does not contribute to the loss.
    #[error("{value:?} cannot be trained: {reason}")]
    NoPath {
        /// Name of the parameter.
        value: String,
        /// Node or value at which the path to the loss ends.
        reason: String,
    },
    /// A node cannot be written in an older operator set.
    #[error("{node} cannot be written at opset {target}: it needs opset {oldest} or newer")]
    TooOld {
        /// Node.
        node: String,
        /// Target opset.
        target: i64,
        /// Oldest opset that can express the operator.
        oldest: i64,
    },
    /// A program could not be built.
    #[error(transparent)]
    Program(#[from] ProgramError),
}

impl From<GraphError> for Error {
    fn from(error: GraphError) -> Error {
        Error::Graph(error.to_string())
    }
}

impl Error {
    /// Creates an error of a node, with its name and the types of its inputs.
    #[must_use]
    pub fn at(graph: &Graph, node: &Node, source: OpError) -> Error {
        // A captured value may also be an input of the node itself.
        let (direct, captured) = node.inputs.split_at(node.inputs.len() - node.captures);
        let named = |port: &&Option<ValueId>| !direct[..direct.len().min(MAX_INPUTS)].contains(port);
        let ports = || direct.iter().chain(captured.iter().filter(named));
        let more = ports().nth(MAX_INPUTS).is_some().then(|| "…".to_owned());
        let inputs: Vec<String> = ports()
            .take(MAX_INPUTS)
            .map(|port| {
                port.map_or("none".to_owned(), |id| format!("{}: {}", graph.name_of(id), graph.value(id).ty))
            })
            .chain(more)
            .collect();
        Error::Node { node: graph.node_label(node), inputs: inputs.join(", "), source }
    }
}
