//! Errors of graphs.

use ortrain_onnx::OnnxError;

use crate::{AttrError, TensorError};

/// Error of importing or exporting a graph.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GraphError {
    /// The payload of a tensor cannot be read.
    #[error(transparent)]
    Onnx(#[from] OnnxError),
    /// A tensor is inconsistent.
    #[error("tensor {name:?}: {source}")]
    Tensor {
        /// Name of the tensor.
        name: String,
        /// The inconsistency.
        source: TensorError,
    },
    /// The model has no graph.
    #[error("the model has no graph")]
    NoGraph,
    /// The model imports one operator set in two versions.
    #[error("the model imports operator set {domain:?} in versions {} and {}", .versions.0, .versions.1)]
    TwoVersions {
        /// Domain of the operator set.
        domain: String,
        /// Both versions.
        versions: (i64, i64),
    },
    /// A node uses a value that has no producer.
    #[error("{node} uses {value:?}, which is not an input, an initializer or an output of another node")]
    UndefinedValue {
        /// Label of the node, or the list of the graph's outputs.
        node: String,
        /// Name of the value.
        value: String,
    },
    /// A value has two producers.
    #[error("{value:?} is defined twice, the second time by {second}")]
    DuplicateValue {
        /// Name of the value.
        value: String,
        /// Label of the second producer.
        second: String,
    },
    /// The graph has a cycle.
    #[error("the graph has a cycle through {}", listed(.nodes))]
    Cycle {
        /// Labels of the nodes that depend on the cycle or belong to it.
        nodes: Vec<String>,
    },
    /// The type of a value is not supported.
    #[error(
        "{value:?} has type {found}, which is not supported{}; expected a tensor of numbers or a sequence of such \
         tensors{}",
        used_by(.users),
        helps(.found)
    )]
    UnsupportedType {
        /// Name of the value.
        value: String,
        /// Type of the value.
        found: String,
        /// Labels of the nodes that use the value.
        users: Vec<String>,
    },
    /// A node has an attribute twice. The two values may differ.
    #[error("attribute {attribute:?} of {node} occurs twice; a node can have each attribute only once")]
    DuplicateAttribute {
        /// Name of the attribute.
        attribute: String,
        /// Label of the node.
        node: String,
    },
    /// An attribute cannot be represented.
    #[error("attribute {attribute:?} of {node} has an unsupported kind ({kind})")]
    UnsupportedAttribute {
        /// Label of the node.
        node: String,
        /// Name of the attribute.
        attribute: String,
        /// Kind of the attribute.
        kind: String,
    },
    /// An attribute is missing or has the wrong kind.
    #[error("{node}: {source}")]
    Attribute {
        /// Label of the node.
        node: String,
        /// Error of the attribute.
        source: AttrError,
    },
}

/// Maximum number of nodes that a message lists.
const NAMED: usize = 3;

/// Lists nodes for a message: at most three, then the number of the others.
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

/// Returns advice for a value of an unsupported type, as the end of a sentence.
fn helps(ty: &str) -> &'static str {
    if ty.starts_with("string") {
        "; convert strings to numbers outside of the model (scikit-learn: encode columns before the pipeline, fit \
         with numbers as classes)"
    } else {
        ""
    }
}

fn used_by(users: &[String]) -> String {
    match users {
        [] => String::new(),
        [one] => format!(" ({one} uses it)"),
        several => format!(" ({} use it)", listed(several)),
    }
}
