//! Values without a gradient, such as results of PyTorch's `detach` and `no_grad`; ONNX files have no trace of these.

use ortrain_graph::{Graph, Node, ValueId};
use ortrain_onnx::{GraphProto, NodeProto};
use rustc_hash::FxHashSet;

use crate::class::Class;
use crate::dependence::GradientValues;
use crate::families::custom_gradient;
use crate::passes::differentiate::may_pass_gradient_to;
use crate::passes::functions::{is_custom_gradient, wrap_without_gradient};
use crate::registry::class_of;

/// Suffix of the name of a result if another result of its node has a gradient.
const BEFORE_STOP_SUFFIX: &str = "/before_stop";

/// Blocks gradients at some values of a graph and its subgraphs.
///
/// Each of their nodes is wrapped with an empty gradient, and unwrapped after differentiation. Generated models
/// therefore have the original nodes and names. If a node has other results with gradients, the stopped result becomes
/// a separate Identity.
///
/// ```
/// use ortrain_onnx::{GraphProto, NodeProto};
/// use ortrain_ops::training::{stop_gradients, stopped_values};
///
/// let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<String>>();
/// let node = NodeProto { op_type: "Exp".into(), input: names(&["x"]), output: names(&["y"]), ..NodeProto::default() };
/// let mut graph = GraphProto { node: vec![node], ..GraphProto::default() };
/// stop_gradients(&mut graph, &["y"].into_iter().collect());
/// assert_eq!(stopped_values(&graph), ["y"]);
/// ```
pub fn stop_gradients(graph: &mut GraphProto, values: &FxHashSet<&str>) {
    let mut names = FxHashSet::default();
    collect_names(graph, &mut names);
    stop_in_graph(graph, values, &mut names);
}

fn subgraphs_mut(node: &mut NodeProto) -> impl Iterator<Item = &mut GraphProto> {
    node.attribute.iter_mut().flat_map(|attr| attr.g.iter_mut().map(AsMut::as_mut).chain(&mut attr.graphs))
}

fn subgraphs(node: &NodeProto) -> impl Iterator<Item = &GraphProto> {
    node.attribute.iter().flat_map(|attr| attr.g.iter().map(AsRef::as_ref).chain(&attr.graphs))
}

fn collect_names(graph: &GraphProto, names: &mut FxHashSet<String>) {
    for node in &graph.node {
        names.extend(node.output.iter().cloned());
        subgraphs(node).for_each(|graph| collect_names(graph, names));
    }
}

fn stop_in_graph(graph: &mut GraphProto, values: &FxHashSet<&str>, names: &mut FxHashSet<String>) {
    let mut nodes = Vec::with_capacity(graph.node.len());
    for mut node in std::mem::take(&mut graph.node) {
        if is_custom_gradient(&node) {
            nodes.push(node);
            continue;
        }
        subgraphs_mut(&mut node).for_each(|graph| stop_in_graph(graph, values, names));
        let output_count = node.output.iter().filter(|name| !name.is_empty()).count();
        let stopped: Vec<usize> =
            (0..node.output.len()).filter(|&k| values.contains(node.output[k].as_str())).collect();
        if stopped.is_empty() {
            nodes.push(node);
            continue;
        }
        if stopped.len() == output_count {
            nodes.push(wrap_without_gradient(node));
            continue;
        }
        let mut copies = Vec::with_capacity(stopped.len());
        for k in stopped {
            let value = node.output[k].clone();
            let mut before = format!("{value}{BEFORE_STOP_SUFFIX}");
            while !names.insert(before.clone()) {
                before.push('_');
            }
            node.output[k].clone_from(&before);
            copies.push(wrap_without_gradient(NodeProto {
                name: before.clone(),
                op_type: "Identity".into(),
                input: vec![before],
                output: vec![value],
                ..NodeProto::default()
            }));
        }
        nodes.push(node);
        nodes.extend(copies);
    }
    graph.node = nodes;
}

/// Returns the values of a graph and its subgraphs at which gradients end: [`stop_gradients`] blocked them, or a
/// `StopGradient` node produces them.
#[must_use]
pub fn stopped_values(graph: &GraphProto) -> Vec<String> {
    let mut stopped = Vec::new();
    for node in &graph.node {
        match custom_gradient::is_stop_message(node) {
            true => stopped.extend(node.output.iter().filter(|name| !name.is_empty()).cloned()),
            false => stopped.extend(subgraphs(node).flat_map(stopped_values)),
        }
    }
    stopped
}

/// Value at which PyTorch may block the gradient, with the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopCandidate {
    /// Name of the value.
    pub value: String,
    /// Reason, from the graph.
    pub reason: String,
}

/// State of a node's results in the search for [`stop_candidates`].
#[derive(Clone, Copy, Default)]
struct GradientState {
    /// True if the results are computed from parameters.
    depends: bool,
    /// True if a gradient flows from the results to parameters.
    passes: bool,
    /// Node at which they become weights that the model selected itself.
    chosen: Option<usize>,
}

/// Returns the values that PyTorch may have detached. They are floats that weight other results, and result from a
/// product with decisions of the model (comparisons, indices of TopK and ArgMax) or from a selection by TopK.
///
/// The targets that a detector assigns to its predictions are such values. Others are differentiable by design, such as
/// the weights of experts. The types of the graph must have been inferred. Candidates are in the order of their nodes;
/// values that are computed only from candidates are not listed.
#[must_use]
pub fn stop_candidates(graph: &Graph, parameters: &[ValueId]) -> Vec<StopCandidate> {
    let mut states = rustc_hash::FxHashMap::<ValueId, GradientState>::default();
    for &id in parameters {
        states.insert(id, GradientState { depends: true, passes: true, chosen: None });
    }
    let weights: FxHashSet<ValueId> = parameters.iter().copied().collect();
    let values = GradientValues::new(graph);
    let has_gradient = |id: ValueId| values.contains(graph, id);
    let mut candidates_found: Vec<(ValueId, usize)> = Vec::new();
    for (index, node) in graph.nodes.iter().enumerate() {
        if is_size(node) {
            continue;
        }
        let of = |id: ValueId| states.get(&id).copied().unwrap_or_default();
        let inputs: Vec<(ValueId, GradientState)> = node.present_inputs().map(|id| (id, of(id))).collect();
        if !inputs.iter().any(|(_, state)| state.depends) {
            continue;
        }
        let passes = inputs
            .iter()
            .any(|&(id, state)| state.passes && may_pass_gradient_to((graph, &values), node, id));
        let mut moving = inputs.iter().filter(|(_, state)| state.passes).map(|(_, state)| state.chosen);
        // Results that depend only on selected weights are selected weights.
        let mut chosen = moving.next().flatten().filter(|_| moving.all(|other| other.is_some()));
        if passes && is_product(node) {
            let plain = |&(id, state): &(ValueId, GradientState)| {
                state.passes && state.chosen.is_none() && has_gradient(id) && !weights.contains(&id)
            };
            if inputs.iter().any(plain) {
                let candidates = inputs.iter().filter_map(|&(id, state)| Some((id, state.chosen?)));
                candidates_found.extend(candidates);
                let decided = |&(_, state): &(ValueId, GradientState)| state.depends && !state.passes;
                if inputs.iter().any(decided) {
                    chosen = Some(index);
                }
            }
        }
        if passes && is_top_k(node) {
            chosen = Some(index);
        }
        for id in node.present_outputs() {
            let floats = passes && has_gradient(id);
            states.insert(
                id,
                GradientState { depends: true, passes: floats, chosen: chosen.filter(|_| floats) },
            );
        }
    }
    let mut listed = Vec::new();
    let mut dependent: FxHashSet<ValueId> = FxHashSet::default();
    for node in &graph.nodes {
        let passes = |id: &ValueId| states.get(id).is_some_and(|state| state.passes);
        let mut moving = node.present_inputs().filter(passes).peekable();
        if moving.peek().is_some() && moving.all(|id| dependent.contains(&id)) {
            dependent.extend(node.present_outputs());
        }
        for (value, by) in
            candidates_found.iter().filter(|(id, _)| node.present_outputs().any(|output| output == *id))
        {
            if dependent.insert(*value) {
                let maker = &graph.nodes[*by];
                let reason = match is_top_k(maker) {
                    true => format!("it comes from the values of {}", graph.node_label(maker)),
                    false => format!(
                        "{} multiplies by a selection of the model's own results",
                        graph.node_label(maker)
                    ),
                };
                listed.push(StopCandidate { value: graph.name_of(*value).to_owned(), reason });
            }
        }
    }
    listed
}

fn is_size(node: &Node) -> bool {
    matches!(class_of(node), Class::Shape | Class::Size)
}

fn is_product(node: &Node) -> bool {
    class_of(node) == Class::Multiply
}

fn is_top_k(node: &Node) -> bool {
    class_of(node) == Class::TopK
}

#[cfg(test)]
mod tests {
    use ortrain_graph::{Attrs, Tensor};

    use super::*;
    use crate::testing::one_node_graph;

    #[test]
    fn stops_single_results_of_a_node() {
        let node = NodeProto {
            op_type: "Split".into(),
            input: vec!["x".into()],
            output: vec!["a".into(), "b".into()],
            ..NodeProto::default()
        };
        let producer = NodeProto { output: vec![format!("a{BEFORE_STOP_SUFFIX}")], ..NodeProto::default() };
        let mut graph = GraphProto { node: vec![node, producer], ..GraphProto::default() };
        stop_gradients(&mut graph, &["a"].into_iter().collect());
        assert_eq!(stopped_values(&graph), ["a"]);
        assert_eq!(graph.node[0].output, [format!("a{BEFORE_STOP_SUFFIX}_"), "b".to_owned()]);
    }

    #[test]
    fn no_candidate_without_selection() {
        let x = Tensor::f32(&[2], &[1.0, 2.0]);
        let graph = one_node_graph(17, ("", "Mul"), &[Some(&x), Some(&x)], 1, Attrs::new())
            .expect("the settings are valid");
        assert_eq!(stop_candidates(&graph, &graph.inputs), []);
    }
}
