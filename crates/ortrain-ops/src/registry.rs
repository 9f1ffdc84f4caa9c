//! Registry of operators.

use std::sync::OnceLock;

use ortrain_graph::{Graph, Node};
use ortrain_onnx::NodeProto;
use rustc_hash::FxHashMap;

use crate::class::{Class, Traits};
use crate::op::{Definition, Op};
use crate::sequence_operators::is_sequence_operator;
use crate::{Error, families};

/// Newest supported version of `ai.onnx`.
pub const NEWEST_OPSET: i64 = 28;

/// Oldest supported version of `ai.onnx`.
pub const OLDEST_OPSET: i64 = 7;

/// Operators by domain and name.
pub struct Registry {
    by_domain: FxHashMap<&'static str, FxHashMap<&'static str, Definition>>,
}

impl Registry {
    /// Returns the registry of every operator of this crate.
    #[must_use]
    pub fn standard() -> &'static Registry {
        static REGISTRY: OnceLock<Registry> = OnceLock::new();
        REGISTRY.get_or_init(|| {
            let mut by_domain: FxHashMap<_, FxHashMap<_, _>> = FxHashMap::default();
            for definition in families::definitions() {
                let name = definition.name;
                let twice =
                    by_domain.entry(definition.domain).or_default().insert(name, definition).is_some();
                assert!(!twice, "{name} is defined twice");
            }
            Registry { by_domain }
        })
    }

    /// Returns the definition of an operator.
    #[must_use]
    pub fn find(&self, domain: &str, name: &str) -> Option<&Definition> {
        self.by_domain.get(domain)?.get(name)
    }

    /// Returns true if models may use an operator. It has a definition, or it is an operator on sequences, which is
    /// replaced by operators on tensors when a model is read.
    #[must_use]
    pub fn is_known(&self, domain: &str, name: &str) -> bool {
        self.find(domain, name).is_some() || is_sequence_operator(domain, name)
    }

    /// Returns true if a node of version `first_version` of its opset has the same meaning in version `other`. Unknown operators
    /// count as equal; a later check reports them.
    #[must_use]
    pub fn has_same_meaning(&self, domain: &str, name: &str, first_version: i64, other: i64) -> bool {
        self.find(domain, name).is_none_or(|definition| {
            let since = |version: i64| definition.since.iter().rev().find(|&&since| since <= version);
            // Without an upgrade rewrite, an older node has the same meaning in newer versions.
            let is_unchanged =
                definition.upgrade.is_none() && first_version <= other && since(first_version).is_some();
            is_unchanged || since(first_version) == since(other)
        })
    }

    /// Returns every definition that files may use, sorted by domain and name.
    #[must_use]
    pub fn file_definitions(&self) -> Vec<&Definition> {
        let in_no_file = [families::custom_gradient::DOMAIN, families::optimizers::DOMAIN];
        let of_files = self.by_domain.iter().filter(|&(domain, _)| !in_no_file.contains(domain));
        let mut sorted: Vec<&Definition> =
            of_files.flat_map(|(_, definitions)| definitions.values()).collect();
        sorted.sort_by_key(|definition| (definition.domain, definition.name));
        sorted
    }
}

/// Normalizes a domain: the domain of ONNX has two names.
pub(crate) fn normalize_domain(name: &str) -> &str {
    if name == "ai.onnx" { "" } else { name }
}

/// Builds the operator of a node from its attributes.
///
/// # Errors
/// Returns an error if the operator is unknown, or if its attributes are invalid.
pub fn build(graph: &Graph, node: &Node) -> Result<Box<dyn Op>, Error> {
    let definition = Registry::standard().find(&node.domain, &node.op).ok_or_else(|| {
        Error::UnknownOperators { list: vec![format!("{} ({})", node.op_label(), graph.node_label(node))] }
    })?;
    (definition.build)(graph, node).map_err(|source| Error::at(graph, node, source))
}

/// Returns the definition of a node's operator, if the operator is known.
pub(crate) fn definition_of(node: &Node) -> Option<&'static Definition> {
    Registry::standard().find(&node.domain, &node.op)
}

/// Returns the class of a node's operator.
pub(crate) fn class_of(node: &Node) -> Class {
    definition_of(node).map_or(Class::Other, |definition| definition.class)
}

/// Returns true if the operator of a node has these traits.
pub(crate) fn has_traits(node: &Node, traits: Traits) -> bool {
    definition_of(node).is_some_and(|definition| definition.traits.has(traits))
}

/// Returns the class of the operator of a message.
pub(crate) fn class_of_message(node: &NodeProto) -> Class {
    let definition = Registry::standard().find(normalize_domain(&node.domain), &node.op_type);
    definition.map_or(Class::Other, |definition| definition.class)
}
