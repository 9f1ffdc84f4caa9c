//! The list of operators.

use std::sync::OnceLock;

use ortrain_graph::{Graph, Node};
use rustc_hash::FxHashMap;

use crate::op::{Definition, Op};
use crate::passes::sequences;
use crate::{Error, families};

/// The newest version of `ai.onnx` that can be read.
pub const NEWEST_OPSET: i64 = 28;

/// The oldest version of `ai.onnx` that can be read.
pub const OLDEST_OPSET: i64 = 7;

/// Operators by domain and name.
pub struct Registry {
    by_domain: FxHashMap<&'static str, FxHashMap<&'static str, Definition>>,
}

impl Registry {
    /// Every operator of this crate.
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

    /// The definition of an operator.
    #[must_use]
    pub fn find(&self, domain: &str, name: &str) -> Option<&Definition> {
        self.by_domain.get(domain)?.get(name)
    }

    /// Whether models may use an operator: it has a definition, or it is one of sequences, which are written as the tensors
    /// in them when a model is read.
    #[must_use]
    pub fn is_known(&self, domain: &str, name: &str) -> bool {
        self.find(domain, name).is_some() || sequences::is_operator(domain, name)
    }

    /// Whether a node written in version `own` of its set means the same in version `other`. One that nobody knows does:
    /// that is said elsewhere.
    #[must_use]
    pub fn means_the_same(&self, domain: &str, name: &str, own: i64, other: i64) -> bool {
        self.find(domain, name).is_none_or(|definition| {
            let since = |version: i64| definition.since.iter().rev().find(|&&since| since <= version);
            // What needs no rewrite to become newer means the same there.
            let stays = definition.upgrade.is_none() && own <= other && since(own).is_some();
            stays || since(own) == since(other)
        })
    }

    /// Every definition of what files may hold, sorted by domain and name.
    #[must_use]
    pub fn all(&self) -> Vec<&Definition> {
        let in_no_file = [families::custom_gradient::DOMAIN, families::optimizers::DOMAIN];
        let of_files = self.by_domain.iter().filter(|&(domain, _)| !in_no_file.contains(domain));
        let mut all: Vec<&Definition> = of_files.flat_map(|(_, definitions)| definitions.values()).collect();
        all.sort_by_key(|definition| (definition.domain, definition.name));
        all
    }
}

/// The operator of a node, its attributes read.
///
/// # Errors
/// When nobody knows it, or its attributes are wrong.
pub fn build(graph: &Graph, node: &Node) -> Result<Box<dyn Op>, Error> {
    let definition = Registry::standard().find(&node.domain, &node.op).ok_or_else(|| {
        Error::UnknownOperators { list: vec![format!("{} ({})", node.op_label(), graph.node_label(node))] }
    })?;
    (definition.build)(graph, node).map_err(|source| Error::at(graph, node, source))
}
