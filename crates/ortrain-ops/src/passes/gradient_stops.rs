//! Nodes that stop a gradient by intent of the caller.

use ortrain_graph::{Graph, Node};

use crate::families::custom_gradient;

/// Returns the outputs of a node and its operator, if gradients are blocked there.
#[must_use]
pub fn find_stop(graph: &Graph, node: &Node) -> Option<(Vec<String>, String)> {
    if !custom_gradient::is_stop(node) {
        return None;
    }
    let values = node.present_outputs().map(|id| graph.name_of(id).to_owned()).collect();
    let inner = Graph::subgraphs(node).find(|(name, _)| *name == custom_gradient::FORWARD);
    let operator = inner.and_then(|(_, graph)| graph.nodes.first()).map_or_else(String::new, Node::op_label);
    Some((values, operator))
}
