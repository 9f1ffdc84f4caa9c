//! What can be wrong with a graph.

use ortrain_onnx::OnnxError;

use crate::{AttrError, TensorError};

/// Why a message is not a graph, or a graph cannot become a message.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// The message's payload cannot be read.
    #[error(transparent)]
    Onnx(#[from] OnnxError),
    /// A tensor contradicts itself.
    #[error("tensor {name:?}: {source}")]
    Tensor {
        /// Its name.
        name: String,
        /// What is wrong.
        source: TensorError,
    },
    /// The model has no graph.
    #[error("the model has no graph")]
    NoGraph,
    /// One set of operators is imported in two versions.
    #[error("the model imports operator set {domain:?} in versions {} and {}", .versions.0, .versions.1)]
    TwoVersions {
        /// The domain.
        domain: String,
        /// The versions.
        versions: (i64, i64),
    },
    /// A node uses a value that nothing makes.
    #[error("{node} uses {value:?}, which is no input, initializer or output of another node")]
    UndefinedValue {
        /// The node, or the graph's outputs.
        node: String,
        /// The value.
        value: String,
    },
    /// Two things make one value.
    #[error("{value:?} is made twice: {second} makes it again")]
    DuplicateValue {
        /// The value.
        value: String,
        /// The second maker.
        second: String,
    },
    /// Nodes wait for each other.
    #[error("the graph has a cycle through {}", listed(.nodes))]
    Cycle {
        /// The nodes that wait.
        nodes: Vec<String>,
    },
    /// A type that no value can have here.
    #[error(
        "{value:?} has type {found}, which is not supported{}; tensors of numbers and sequences of them are{}",
        used_by(.users),
        helps(.found)
    )]
    UnsupportedType {
        /// The value.
        value: String,
        /// The type.
        found: String,
        /// The nodes that use it.
        users: Vec<String>,
    },
    /// An attribute that a node has twice, which may contradict each other.
    #[error("attribute {attribute:?} of {node} is given twice; a node has each attribute once")]
    DuplicateAttribute {
        /// The attribute.
        attribute: String,
        /// The node.
        node: String,
    },
    /// An attribute that cannot be represented.
    #[error("attribute {attribute:?} of {node} is of a kind that is not supported ({kind})")]
    UnsupportedAttribute {
        /// The node.
        node: String,
        /// The attribute.
        attribute: String,
        /// Its kind.
        kind: String,
    },
    /// An attribute is absent or of the wrong kind.
    #[error("{node}: {source}")]
    Attribute {
        /// The node.
        node: String,
        /// What is wrong.
        source: AttrError,
    },
}

/// The most nodes that a message names.
const NAMED: usize = 3;

/// The list of the nodes of a message: at most three of them, and the number of the others.
///
/// ```
/// use ortrain_graph::listed;
///
/// let nodes = ["a", "b", "c", "d", "e"].map(String::from);
/// assert_eq!(listed(&nodes[..2]), "a, b");
/// assert_eq!(listed(&nodes), "a, b, c and 2 more");
/// ```
#[must_use]
pub fn listed(nodes: &[String]) -> String {
    match nodes.len().saturating_sub(NAMED) {
        0 => nodes.join(", "),
        more => format!("{} and {more} more", nodes[..NAMED].join(", ")),
    }
}

/// The advice for a value that cannot have a type, as the end of a sentence.
fn helps(found: &str) -> &'static str {
    if found.starts_with("string") {
        "; number texts outside of the model (scikit-learn: encode columns before the pipeline, fit with numbers as classes)"
    } else {
        ""
    }
}

fn used_by(users: &[String]) -> String {
    match users {
        [] => String::new(),
        [one] => format!(" ({one} uses it)"),
        many => format!(" ({} use it)", listed(many)),
    }
}
