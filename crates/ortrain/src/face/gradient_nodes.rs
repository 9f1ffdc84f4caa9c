//! Selection and order of the nodes of a gradient model.

use std::collections::BTreeSet;

use ortrain_graph::{Graph, ValueId};
use ortrain_onnx::{GraphProto, ModelProto, NodeProto};
use ortrain_ops::passes::differentiate::draws_random_numbers;
use ortrain_ops::{Definition, Registry};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::model::node_inputs::collect_inputs;

/// Graph of a message with an index of its values.
pub(crate) struct MessageIndex<'a> {
    pub(crate) graph: &'a GraphProto,
    /// Index of the node that computes each value.
    pub(crate) producers: FxHashMap<&'a str, usize>,
    /// Names of inputs and initializers.
    pub(crate) inputs_and_initializers: FxHashSet<&'a str>,
}

impl<'a> MessageIndex<'a> {
    pub(crate) fn new(graph: &'a GraphProto) -> MessageIndex<'a> {
        let mut producer_map = FxHashMap::default();
        for (index, node) in graph.node.iter().enumerate() {
            let names = node.output.iter().filter(|name| !name.is_empty());
            producer_map.extend(names.map(|name| (name.as_str(), index)));
        }
        let sparse = graph.sparse_initializer.iter().filter_map(|sparse| sparse.values.as_ref());
        let input_names = graph.input.iter().map(|info| info.name.as_str());
        let all_names = input_names.chain(graph.initializer.iter().map(|tensor| tensor.name.as_str()));
        let value_names = all_names.chain(sparse.map(|values| values.name.as_str())).collect();
        MessageIndex { graph, producers: producer_map, inputs_and_initializers: value_names }
    }

    pub(crate) fn has_value(&self, name: &str) -> bool {
        self.producers.contains_key(name) || self.inputs_and_initializers.contains(name)
    }

    pub(crate) fn value_names(&self) -> impl Iterator<Item = &'a str> {
        self.producers.keys().chain(&self.inputs_and_initializers).copied()
    }
}

/// Nodes of the graph to append to the message, and nodes of the message to replace.
pub(crate) struct NodeSelection {
    /// Indices of nodes of the graph.
    pub(crate) nodes: BTreeSet<usize>,
    /// Constants of the graph that are missing in the message.
    pub(crate) constants: BTreeSet<ValueId>,
    /// Indices of nodes of the message.
    pub(crate) replaced: FxHashSet<usize>,
}

impl NodeSelection {
    pub(crate) fn new(
        graph: &Graph,
        message: &MessageIndex<'_>,
        gradients: &[ValueId],
        plain: bool,
    ) -> NodeSelection {
        let producers = graph.producers();
        let is_computed =
            |name: &String| graph.find(name).is_some_and(|id| producers[id.0 as usize].is_some());
        let nodes = message.graph.node.iter().enumerate();
        let foreign =
            nodes.filter(|(_, node)| plain && !is_plain(node) && node.output.iter().any(is_computed));
        let mut selection = NodeSelection {
            nodes: BTreeSet::new(),
            constants: BTreeSet::new(),
            replaced: foreign.map(|(index, _)| index).collect(),
        };
        loop {
            selection.select_nodes(graph, message, &producers, gradients);
            let conflicts = selection.conflicts(graph, message);
            if conflicts.is_empty() {
                return selection;
            }
            selection.replaced.extend(conflicts);
        }
    }

    /// Returns the index of the node of the message that computes a value, unless the node is replaced.
    pub(crate) fn remaining_producer(&self, message: &MessageIndex<'_>, name: &str) -> Option<usize> {
        message.producers.get(name).copied().filter(|index| !self.replaced.contains(index))
    }

    /// Selects the nodes for the gradients, and for the outputs of replaced nodes.
    pub(crate) fn select_nodes(
        &mut self,
        graph: &Graph,
        message: &MessageIndex<'_>,
        producers: &[Option<usize>],
        gradients: &[ValueId],
    ) {
        self.nodes.clear();
        self.constants.clear();
        let mut used: FxHashSet<String> = message.graph.output.iter().map(|info| info.name.clone()).collect();
        for (index, node) in message.graph.node.iter().enumerate() {
            if !self.replaced.contains(&index) {
                collect_inputs(node, &mut used);
            }
        }
        let mut rest: Vec<ValueId> = gradients.to_vec();
        for &index in &self.replaced {
            let outputs = message.graph.node[index].output.iter().filter(|name| used.contains(*name));
            rest.extend(outputs.filter_map(|name| graph.find(name)));
        }
        while let Some(id) = rest.pop() {
            let name = graph.name_of(id);
            if message.inputs_and_initializers.contains(name)
                || self.remaining_producer(message, name).is_some()
            {
                continue;
            }
            match producers[id.0 as usize] {
                Some(index) if self.nodes.insert(index) => rest.extend(graph.nodes[index].present_inputs()),
                None if graph.value(id).constant.is_some() => {
                    self.constants.insert(id);
                }
                // Already selected, or an input.
                Some(_) | None => {}
            }
        }
    }

    /// Returns the nodes of the message that conflict with the selected nodes: both compute the same value, or
    /// depend on the same random numbers.
    pub(crate) fn conflicts(&self, graph: &Graph, message: &MessageIndex<'_>) -> Vec<usize> {
        let mut indices = Vec::new();
        let mut drawn: FxHashSet<ValueId> = FxHashSet::default();
        for (index, node) in graph.nodes.iter().enumerate() {
            let is_selected = self.nodes.contains(&index);
            let random = is_selected && draws_random_numbers(node);
            let is_random = random || node.present_inputs().any(|id| drawn.contains(&id));
            for id in node.present_outputs() {
                match self.remaining_producer(message, graph.name_of(id)) {
                    Some(producer) if is_selected || is_random => indices.push(producer),
                    None if is_random => {
                        drawn.insert(id);
                    }
                    _ => {}
                }
            }
        }
        indices
    }
}

/// Origin of a node of the result.
pub(crate) enum NodeSource {
    /// Index of an original node.
    Message(usize),
    /// Index of a selected node.
    Graph(usize),
}

/// Topological order of the nodes of the result.
pub(crate) struct NodeOrder<'a> {
    pub(crate) graph: &'a Graph,
    /// Selected nodes that are not placed yet, by output.
    pub(crate) unplaced: FxHashMap<ValueId, usize>,
    pub(crate) nodes: Vec<NodeSource>,
}

impl<'a> NodeOrder<'a> {
    pub(crate) fn new(graph: &'a Graph, selection: &NodeSelection) -> NodeOrder<'a> {
        let mut waiting = FxHashMap::default();
        for &index in &selection.nodes {
            waiting.extend(graph.nodes[index].present_outputs().map(|id| (id, index)));
        }
        NodeOrder { graph, unplaced: waiting, nodes: Vec::new() }
    }

    /// Places the selected node that computes a value, unless it is already placed.
    pub(crate) fn place_producer(&mut self, name: &str) {
        if let Some(&index) = self.graph.find(name).and_then(|id| self.unplaced.get(&id)) {
            self.place_node(index);
        }
    }

    /// Places a selected node after the producers of its inputs.
    pub(crate) fn place_node(&mut self, index: usize) {
        let mut stack = vec![(index, false)];
        while let Some((index, ready)) = stack.pop() {
            let node = &self.graph.nodes[index];
            if !node.present_outputs().any(|id| self.unplaced.contains_key(&id)) {
                continue;
            }
            if ready {
                node.present_outputs().for_each(|id| {
                    self.unplaced.remove(&id);
                });
                self.nodes.push(NodeSource::Graph(index));
            } else {
                stack.push((index, true));
                let needed = node.present_inputs().filter_map(|id| self.unplaced.get(&id));
                stack.extend(needed.map(|&index| (index, false)));
            }
        }
    }
}

/// Returns true if a node and its subgraphs use only standard operators of `ai.onnx`.
pub(crate) fn is_plain(node: &NodeProto) -> bool {
    let mut subgraphs = node
        .attribute
        .iter()
        .flat_map(|attribute| attribute.g.as_deref().into_iter().chain(&attribute.graphs));
    let definition = Registry::standard().find("", &node.op_type);
    is_standard(&node.domain)
        && definition.is_none_or(Definition::is_standard)
        && subgraphs.all(|graph| graph.node.iter().all(is_plain))
}

/// Suffix of the name of a gradient.
pub(crate) const GRADIENT_SUFFIX: &str = "_grad";

/// Initial gradients.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seeds {
    /// Ones of the shape of each value.
    Ones,
    /// An input for each value.
    Inputs,
}

pub(crate) fn is_standard(domain: &str) -> bool {
    domain.is_empty() || domain == "ai.onnx"
}

pub(crate) fn imports_standard(proto: &ModelProto) -> bool {
    proto.opset_import.iter().any(|set| is_standard(&set.domain))
}
