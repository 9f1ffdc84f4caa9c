//! Postprocessing nodes of a model that no operator here can compute: names of classes, maps of
//! probabilities. Training ignores them, and so do runs without their outputs. Edited messages keep them.

use ortrain_graph::{DType, GraphError};
use ortrain_onnx::proto::TensorProto;
use ortrain_onnx::{AttributeProto, GraphProto, LoadedModel, NodeProto, ValueInfoProto};
use ortrain_ops::Registry;
use ortrain_ops::passes::sequences;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::Error;
use crate::model::node_inputs::{collect_inputs, needed_nodes_and_values};

/// Maximum number of values in a message.
const MAX_LISTED: usize = 5;

/// Parts that were removed from a graph.
#[derive(Debug, Default)]
pub(crate) struct RemovedParts {
    nodes: Vec<NodeProto>,
    initializers: Vec<TensorProto>,
    outputs: Vec<ValueInfoProto>,
}

impl RemovedParts {
    /// Appends the parts again, after all other nodes, which do not need them. Former outputs are only
    /// declared.
    pub(crate) fn put_back(self, graph: &mut GraphProto) {
        graph.node.extend(self.nodes);
        graph.initializer.extend(self.initializers);
        graph.value_info.extend(self.outputs);
    }
}

/// Removes unsupported parts that no value in `values` needs: nodes of unknown operators, all nodes after
/// them, and constants of non-numeric types.
pub(crate) fn remove_unsupported(graph: &mut GraphProto, values: &[&str]) -> RemovedParts {
    match find_unsupported(graph, values) {
        Some(parts) => remove_parts(graph, &parts),
        None => RemovedParts::default(),
    }
}

/// Returns the model without unsupported parts that `values` do not need, even outputs; `None` if nothing is
/// removed.
pub(crate) fn without_unsupported(model: &LoadedModel, values: &[&str]) -> Option<LoadedModel> {
    let parts = find_unsupported(model.proto.graph.as_ref()?, values)?;
    let mut proto = model.proto.clone();
    remove_parts(proto.graph.as_mut()?, &parts);
    Some(model.with_proto(proto))
}

/// Returns the names of a message's outputs.
pub(crate) fn output_names(model: &LoadedModel) -> Vec<&str> {
    model.proto.graph.iter().flat_map(|graph| &graph.output).map(|info| info.name.as_str()).collect()
}

/// Adds the values that could be trained to an error about unknown operators or types.
pub(crate) fn add_advice(error: Error, model: &LoadedModel) -> Error {
    let unknown = match &error {
        Error::Model { source, .. } => matches!(**source, ortrain_ops::Error::UnknownOperators { .. }),
        Error::Graph { source, .. } => matches!(**source, GraphError::UnsupportedType { .. }),
        _ => false,
    };
    let Some(graph) = model.proto.graph.as_ref().filter(|_| unknown) else { return error };
    let unsupported = unsupported_nodes(graph);
    let produced: FxHashSet<&str> = graph
        .node
        .iter()
        .zip(&unsupported)
        .filter(|(_, is_unsupported)| !**is_unsupported)
        .flat_map(|(node, _)| node.output.iter().map(String::as_str))
        .collect();
    let mut values: Vec<String> = Vec::new();
    for (node, _) in graph.node.iter().zip(&unsupported).filter(|(_, is_unsupported)| **is_unsupported) {
        for name in node.input.iter().filter(|name| !name.is_empty() && produced.contains(name.as_str())) {
            let quoted = format!("{name:?}");
            if values.len() < MAX_LISTED && !values.contains(&quoted) {
                values.push(quoted);
            }
        }
    }
    if values.is_empty() { error } else { Error::TrainableWithout { source: Box::new(error), values } }
}

/// Parts to remove from a graph.
struct UnsupportedParts {
    nodes: Vec<bool>,
    initializers: FxHashSet<String>,
}

fn find_unsupported(graph: &GraphProto, values: &[&str]) -> Option<UnsupportedParts> {
    let mut nodes = unsupported_nodes(graph);
    if !nodes.contains(&true) && graph.initializer.iter().all(is_numeric) {
        return None;
    }
    let (needed, names) = needed_nodes_and_values(graph, values);
    nodes.iter_mut().zip(needed).for_each(|(node, needed)| *node &= !needed);
    let mut used = names;
    for (node, _) in graph.node.iter().zip(&nodes).filter(|(_, is_removed)| !**is_removed) {
        collect_inputs(node, &mut used);
    }
    let initializers: FxHashSet<String> = graph
        .initializer
        .iter()
        .filter(|tensor| !is_numeric(tensor) && !used.contains(&tensor.name))
        .map(|tensor| tensor.name.clone())
        .collect();
    (nodes.contains(&true) || !initializers.is_empty()).then_some(UnsupportedParts { nodes, initializers })
}

fn remove_parts(graph: &mut GraphProto, parts: &UnsupportedParts) -> RemovedParts {
    let mut flags = parts.nodes.iter();
    let nodes: Vec<NodeProto> = graph.node.extract_if(.., |_| flags.next() == Some(&true)).collect();
    let produced: FxHashSet<&str> =
        nodes.iter().flat_map(|node| node.output.iter().map(String::as_str)).collect();
    let outputs = graph.output.extract_if(.., |info| produced.contains(info.name.as_str())).collect();
    let foreign = |tensor: &mut TensorProto| parts.initializers.contains(&tensor.name);
    let initializers = graph.initializer.extract_if(.., foreign).collect();
    RemovedParts { nodes, initializers, outputs }
}

/// Returns for each node true if the node, or one that it depends on, is unsupported.
pub(crate) fn unsupported_nodes(graph: &GraphProto) -> Vec<bool> {
    let sequences = sequences::unsupported_sequence_nodes(graph);
    let mut flags: Vec<bool> =
        graph.node.iter().zip(sequences).map(|(node, sequence)| sequence || !is_known(node)).collect();
    let texts: FxHashSet<&str> = graph
        .initializer
        .iter()
        .filter(|tensor| !is_numeric(tensor))
        .map(|tensor| tensor.name.as_str())
        .collect();
    if !flags.contains(&true) && texts.is_empty() {
        return flags;
    }
    let mut users: FxHashMap<String, Vec<usize>> = FxHashMap::default();
    for (index, node) in graph.node.iter().enumerate() {
        let mut names = FxHashSet::default();
        collect_inputs(node, &mut names);
        flags[index] |= names.iter().any(|name| texts.contains(name.as_str()));
        for name in names {
            users.entry(name).or_default().push(index);
        }
    }
    let mut rest: Vec<usize> = (0..flags.len()).filter(|&index| flags[index]).collect();
    while let Some(index) = rest.pop() {
        for user in graph.node[index].output.iter().filter_map(|name| users.get(name)).flatten() {
            if !std::mem::replace(&mut flags[*user], true) {
                rest.push(*user);
            }
        }
    }
    flags
}

fn is_known(node: &NodeProto) -> bool {
    let domain = if node.domain == "ai.onnx" { "" } else { &node.domain };
    Registry::standard().is_known(domain, &node.op_type) && node.attribute.iter().all(is_readable)
}

fn is_readable(attribute: &AttributeProto) -> bool {
    attribute.t.iter().all(|tensor| is_numeric(tensor))
        && attribute
            .g
            .iter()
            .all(|graph| graph.node.iter().all(is_known) && graph.initializer.iter().all(is_numeric))
}

fn is_numeric(tensor: &TensorProto) -> bool {
    DType::from_onnx(tensor.data_type).is_some()
}
