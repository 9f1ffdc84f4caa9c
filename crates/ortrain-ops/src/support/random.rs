//! Operators that draw random numbers.

use ortrain_graph::{Graph, Node};

/// Returns true if an operator returns another result in every run.
pub(crate) fn is_random(domain: &str, name: &str) -> bool {
    domain.is_empty() && name == "Dropout"
}

/// Returns true if a node gives different results on every run, itself or in one of its subgraphs.
#[must_use]
pub fn draws_random_numbers(node: &Node) -> bool {
    is_random(&node.domain, &node.op)
        || Graph::subgraphs(node).any(|(_, graph)| graph.nodes.iter().any(draws_random_numbers))
}
