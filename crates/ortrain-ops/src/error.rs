//! What can be wrong with a node, and with a model as a whole.

use ortrain_graph::{AttrError, Graph, GraphError, Node, ValueId};
use ortrain_program::ProgramError;

/// What is wrong with one application of an operator.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpError {
    /// The node contradicts the operator's definition: arity, types, shapes, values of attributes.
    #[error("{0}")]
    Invalid(String),
    /// The node is right but asks for what is not supported.
    #[error("{0}")]
    Unsupported(String),
    /// An attribute is absent or of the wrong kind.
    #[error(transparent)]
    Attr(#[from] AttrError),
    /// A lowering went wrong.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// A subgraph is at fault.
    #[error("in its subgraph: {0}")]
    Subgraph(Box<Error>),
    /// A gradient of the user's own is at fault.
    #[error("in {rule} {source}")]
    Gradient {
        /// How messages name it.
        rule: String,
        /// What is wrong with it.
        source: Box<Error>,
    },
}

impl OpError {
    /// The node contradicts the operator's definition.
    pub fn invalid(message: impl Into<String>) -> OpError {
        OpError::Invalid(message.into())
    }

    /// What the node asks for is not supported.
    pub fn unsupported(message: impl Into<String>) -> OpError {
        OpError::Unsupported(message.into())
    }
}

/// The most inputs that a message names.
const MAX_INPUTS: usize = 16;

/// Why a model cannot be prepared, differentiated, rewritten or run.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The graph contradicts itself.
    #[error("{0}")]
    Graph(String),
    /// A node is at fault.
    #[error("{node} with inputs ({inputs}): {source}")]
    Node {
        /// The node, as messages name it.
        node: String,
        /// Types and shapes of its inputs.
        inputs: String,
        /// What is wrong.
        source: OpError,
    },
    /// Operators that nobody here knows.
    #[error(
        "the model uses operators that are not supported: {}; an operator can be added as a function of ONNX \
         (docs/extending.md)", .list.join("; ")
    )]
    UnknownOperators {
        /// One line for each operator, with the nodes that use it.
        list: Vec<String>,
    },
    /// A version of a set of operators that cannot be read.
    #[error(
        "the model uses version {found} of operator set {domain:?}; versions {least} to {newest} are supported"
    )]
    Opset {
        /// The domain.
        domain: String,
        /// The model's version.
        found: i64,
        /// The oldest supported version.
        least: i64,
        /// The newest supported version.
        newest: i64,
    },
    /// A function that the model brings along cannot be used.
    #[error("{function} {reason}")]
    Function {
        /// The function with its domain.
        function: String,
        /// What is wrong, as the rest of the sentence.
        reason: String,
    },
    /// A node that calls a function does not fit it.
    #[error("{node}: {reason}")]
    Call {
        /// The node.
        node: String,
        /// What is wrong.
        reason: String,
    },
    /// Nothing to train towards.
    #[error("{0}")]
    Loss(String),
    /// No head that could be replaced.
    #[error("{0}")]
    Head(String),
    /// A value to be trained does not reach the loss.
    #[error("{value:?} cannot be trained: {reason}")]
    NoPath {
        /// The value.
        value: String,
        /// Where the path ends.
        reason: String,
    },
    /// A node cannot be written in an older set of operators.
    #[error("{node} cannot be written at opset {target}: it needs opset {least} or newer")]
    TooOld {
        /// The node.
        node: String,
        /// The opset asked for.
        target: i64,
        /// The oldest in which the operator can be written.
        least: i64,
    },
    /// A program could not be made.
    #[error(transparent)]
    Program(#[from] ProgramError),
}

impl From<GraphError> for Error {
    fn from(error: GraphError) -> Error {
        Error::Graph(error.to_string())
    }
}

impl Error {
    /// An error of a node, with its name and the types of its inputs.
    #[must_use]
    pub fn at(graph: &Graph, node: &Node, source: OpError) -> Error {
        // What a subgraph captures may be an input of the node's own, too.
        let (own, captured) = node.inputs.split_at(node.inputs.len() - node.captures);
        let named = |port: &&Option<ValueId>| !own[..own.len().min(MAX_INPUTS)].contains(port);
        let ports = || own.iter().chain(captured.iter().filter(named));
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
