//! Uses of the values of a graph by its nodes.

use ortrain_graph::{Graph, Node, ValueId};
use rustc_hash::FxHashMap;

use crate::class::{Class, Traits};
use crate::{Definition, Registry};

/// Use of a value by a node.
pub(super) struct Use {
    /// Label of the node in messages.
    pub(super) label: String,
    /// Name of the node in the model, or the name of its first output.
    pub(super) name: String,
    pub(super) definition: Option<&'static Definition>,
    /// Index of the input.
    pub(super) input: usize,
    /// True if the node is in a subgraph.
    pub(super) inner: bool,
}

impl Use {
    /// Returns the class of the node's operator.
    pub(super) fn class(&self) -> Class {
        self.definition.map_or(Class::Other, |definition| definition.class)
    }

    /// Returns true if the operator of the node has these traits.
    pub(super) fn has(&self, traits: Traits) -> bool {
        self.definition.is_some_and(|definition| definition.traits.has(traits))
    }

    /// Returns true for a weight input. The table of a Gather does not count, because it may be any table.
    pub(super) fn is_weight(&self) -> bool {
        let weights = self.definition.map_or(&[][..], |definition| definition.weights);
        self.class() != Class::Lookup && weights.contains(&self.input)
    }
}

/// Collects the uses of the values of a graph, including subgraphs. `outer` maps a value of this graph to its value of
/// the main graph.
pub(super) fn collect_uses(
    graph: &Graph,
    inner: bool,
    outer: &mut dyn FnMut(ValueId) -> Option<ValueId>,
    uses: &mut FxHashMap<ValueId, Vec<Use>>,
) {
    for node in &graph.nodes {
        let subgraphs: Vec<&Graph> = Graph::subgraphs(node).map(|(_, subgraph)| subgraph).collect();
        let input_count =
            if subgraphs.is_empty() { node.inputs.len() } else { node.inputs.len() - node.captures };
        for (input, id) in node.inputs[..input_count].iter().enumerate() {
            if let Some(id) = id.and_then(&mut *outer) {
                uses.entry(id).or_default().push(Use {
                    label: graph.node_label(node),
                    name: node_name(graph, node),
                    definition: Registry::standard().find(&node.domain, &node.op),
                    input,
                    inner,
                });
            }
        }
        for subgraph in subgraphs {
            // Captured values are last on both sides.
            let Some(formal) = subgraph.inputs.len().checked_sub(node.captures) else { continue };
            let captured: FxHashMap<ValueId, ValueId> = (subgraph.inputs[formal..].iter())
                .zip(&node.inputs[input_count..])
                .filter_map(|(&inside, port)| Some((inside, outer((*port)?)?)))
                .collect();
            collect_uses(subgraph, true, &mut |id| captured.get(&id).copied(), uses);
        }
    }
}

/// Returns the name of a node, or the name of its first output.
pub(super) fn node_name(graph: &Graph, node: &Node) -> String {
    match node.present_outputs().next() {
        Some(output) if node.name.is_empty() => graph.name_of(output).to_owned(),
        _ => node.name.to_string(),
    }
}
