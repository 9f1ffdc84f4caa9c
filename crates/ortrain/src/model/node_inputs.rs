//! Nodes and values that other values of a message need.

use ortrain_onnx::{AttributeProto, GraphProto, NodeProto};
use rustc_hash::{FxHashMap, FxHashSet};

/// Returns for each node of a graph whether one of the values needs it, and the names of all needed values.
pub(crate) fn needed_nodes_and_values(graph: &GraphProto, values: &[&str]) -> (Vec<bool>, FxHashSet<String>) {
    let mut producers: FxHashMap<&str, usize> = FxHashMap::default();
    for (index, node) in graph.node.iter().enumerate() {
        producers
            .extend(node.output.iter().filter(|name| !name.is_empty()).map(|name| (name.as_str(), index)));
    }
    let mut needed: FxHashSet<String> = FxHashSet::default();
    let mut keep = vec![false; graph.node.len()];
    let mut rest: FxHashSet<String> = values.iter().map(|&name| name.to_owned()).collect();
    // Nodes may be in any order: the topological order has not been checked.
    while !rest.is_empty() {
        let mut next = FxHashSet::default();
        for name in rest {
            if let Some(&index) = producers.get(name.as_str())
                && !std::mem::replace(&mut keep[index], true)
            {
                collect_inputs(&graph.node[index], &mut next);
            }
            needed.insert(name);
        }
        rest = next;
    }
    (keep, needed)
}

/// Adds the names of the values that a node uses, including its subgraphs.
pub(crate) fn collect_inputs(node: &NodeProto, names: &mut FxHashSet<String>) {
    names.extend(node.input.iter().filter(|name| !name.is_empty()).cloned());
    node.attribute.iter().for_each(|attribute| collect_attribute_names(attribute, names));
}

/// Adds the names that a subgraph uses. Names that it defines itself are included and do no harm.
fn collect_free_names(graph: &GraphProto, names: &mut FxHashSet<String>) {
    for node in &graph.node {
        names.extend(node.input.iter().cloned());
        for attribute in &node.attribute {
            collect_attribute_names(attribute, names);
        }
    }
    names.extend(graph.output.iter().map(|info| info.name.clone()));
}

fn collect_attribute_names(attribute: &AttributeProto, names: &mut FxHashSet<String>) {
    attribute.g.iter().for_each(|graph| collect_free_names(graph, names));
    attribute.graphs.iter().for_each(|graph| collect_free_names(graph, names));
}
