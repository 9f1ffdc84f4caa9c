//! Reverse-mode differentiation: the gradient of a graph is a graph, built in one reverse pass over the path between
//! the parameters and the loss.

use ortrain_expr::pause;
use ortrain_graph::{Attrs, DType, Graph, Node, Shape, Tensor, ValueId, ValueType, listed};
use ortrain_onnx::proto::TensorProto;
use ortrain_onnx::{AttributeProto, AttributeType, NodeProto};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::class::Traits;
use crate::dependence::GradientValues;
pub use crate::dependence::dependent_values;
use crate::families::custom_gradient::has_gradient_of;
use crate::families::elementwise::MAX_OPERANDS;
use crate::grad::{Grad, GradientPasses, gradient_type};
use crate::passes::gradient_stops::find_stop;
use crate::passes::node::{decompose_node, infer_added, infer_nodes, infer_part, remove_updates};
use crate::registry::{Registry, build, has_traits};
pub use crate::support::random::draws_random_numbers;
use crate::{Error, OpError};

/// Adds the nodes that compute the gradients of `loss` (one float) with respect to `targets`. Returns the gradients,
/// named `<target>_grad`. Types must have been inferred; types of the new values are inferred as well.
///
/// # Errors
/// Returns an error if the loss is not one float, or if there is no differentiable path from a target to the loss. The
/// message names the operators and nodes that interrupt the path.
pub fn differentiate(graph: &mut Graph, loss: ValueId, targets: &[ValueId]) -> Result<Vec<ValueId>, Error> {
    let name = graph.name_of(loss).to_owned();
    let is_single = |shape: &Shape| shape.iter().all(|dim| dim.known() == Some(1));
    let seed = match &graph.value(loss).ty {
        ValueType::Tensor(dtype, Some(shape)) if dtype.is_float() && is_single(shape) => {
            Tensor::filled(*dtype, &vec![1; shape.rank()], 1.0)
        }
        ty => {
            return Err(Error::Loss(format!(
                "the loss must be one float, but {name:?} is {ty}; reduce it with ReduceMean or ReduceSum (keepdims=0)"
            )));
        }
    };
    let seed = graph.add_constant(&format!("{name}_grad"), seed);
    let gradients = backpropagate(graph, &[(loss, seed)], targets)?;
    let gradients: Vec<ValueId> = targets
        .iter()
        .zip(gradients)
        .map(|(&target, gradient)| gradient.ok_or_else(|| no_path_error(graph, target, &[loss])))
        .collect::<Result<_, _>>()?;
    Ok(gradients)
}

/// Adds the nodes that propagate gradients from some values back to others. `seeds` are values with their gradients.
/// The result has a gradient for each target, or `None` if no gradient arrives.
///
/// # Errors
/// Returns an error if an operator on the path cannot be differentiated.
pub fn backpropagate(
    graph: &mut Graph,
    seeds: &[(ValueId, ValueId)],
    targets: &[ValueId],
) -> Result<Vec<Option<ValueId>>, Error> {
    propagate(graph, seeds, targets, None)
}

/// Adds a gradient of ones for a value of any shape: the gradient of the sum of its elements. It is a constant if the
/// value has one element, and computed from its shape otherwise.
pub fn ones_like(graph: &mut Graph, value: ValueId, name: &str) -> ValueId {
    let ty = graph.value(value).ty.clone();
    let dtype = ty.dtype().unwrap_or(DType::F32);
    let dims = ty.shape().and_then(Shape::concrete);
    if let Some(dims) = dims.filter(|dims| dims.iter().all(|&dim| dim == 1)) {
        return graph.add_constant(name, Tensor::filled(dtype, &dims, 1.0));
    }
    let one = graph.add_constant(&format!("{name}/one"), Tensor::filled(dtype, &[], 1.0));
    let rank: Vec<usize> = ty.shape().map(Shape::rank).into_iter().collect();
    let sizes = graph.add_value(&format!("{name}/shape"), ValueType::tensor(DType::I64, &rank));
    let ones = graph.add_value(name, ty);
    let shape = Node::new("", "Shape", &[Some(value)], &[Some(sizes)], Attrs::new());
    let expand = Node::new("", "Expand", &[Some(one), Some(sizes)], &[Some(ones)], Attrs::new());
    for (mut node, part) in [(shape, "Shape"), (expand, "Expand")] {
        node.name = format!("{name}/{part}").into();
        graph.nodes.push(node);
    }
    ones
}

/// Builds the message of a `Constant` node: files from before initializers without inputs hold constants in this form.
#[must_use]
pub fn constant_node(name: &str, tensor: &TensorProto) -> NodeProto {
    let mut value = AttributeProto { name: "value".into(), ..AttributeProto::default() };
    value.set_type(AttributeType::Tensor);
    value.t = Some(Box::new(TensorProto { name: String::new(), ..tensor.clone() }));
    NodeProto {
        op_type: "Constant".into(),
        output: vec![name.to_owned()],
        attribute: vec![value],
        ..NodeProto::default()
    }
}

/// Returns the labels of the nodes that give different results on every run. These are the Dropout nodes of the graph
/// and its subgraphs, unless their `training_mode` is missing or constant false.
#[must_use]
pub fn random_nodes(graph: &Graph) -> Vec<String> {
    let mut random = Vec::new();
    for node in &graph.nodes {
        let mode = node.inputs.get(2).copied().flatten();
        let drops = mode.is_some_and(|id| {
            graph.value(id).constant.as_ref().is_none_or(|mode| mode.data().iter().any(|&byte| byte != 0))
        });
        if drops && crate::support::random::is_random(&node.domain, &node.op) {
            random.push(graph.node_label(node));
        }
        random.extend(Graph::subgraphs(node).flat_map(|(_, inner)| random_nodes(inner)));
    }
    random
}

/// Node that interrupts the gradient.
#[derive(Clone, Debug)]
pub struct GradientStop {
    /// Label of the node in messages.
    pub node: String,
    /// Operator of the node.
    pub operator: String,
    /// Reason; `None` if its derivative is zero, or if the operator gives no reason.
    pub error: Option<Error>,
    /// Targets that lose their gradient at the node.
    pub targets: Vec<ValueId>,
    /// True if sizes of its inputs are unknown.
    pub has_unknown_sizes: bool,
}

/// Runs [`backpropagate`] as far as possible. Returns true for each target with a gradient, and the nodes that
/// interrupt gradients, the last nodes first. The graph cannot be used afterwards.
///
/// # Errors
/// Returns an error if a composition on the path cannot be decomposed.
pub fn backpropagate_known(
    graph: &mut Graph,
    seeds: &[(ValueId, ValueId)],
    targets: &[ValueId],
) -> Result<(Vec<bool>, Vec<GradientStop>), Error> {
    let mut stops = Vec::new();
    let gradients = propagate(graph, seeds, targets, Some(&mut stops))?;
    Ok((gradients.iter().map(Option::is_some).collect(), stops))
}

/// Returns true if a gradient may flow back through a node to one of these inputs: the node has outputs with a
/// gradient, and its derivative is not zero everywhere.
fn may_pass_gradient(
    (graph, values): (&Graph, &GradientValues),
    node: &Node,
    inputs: impl IntoIterator<Item = ValueId>,
) -> bool {
    let leads_on = node.present_outputs().any(|id| values.contains(graph, id));
    let flat = has_traits(node, Traits::ZERO_DERIVATIVE);
    leads_on && inputs.into_iter().any(|input| has_gradient_of(node, input).unwrap_or(!flat))
}

/// Returns true if a gradient may flow back through a node to one of its inputs.
pub(crate) fn may_pass_gradient_to(
    (graph, values): (&Graph, &GradientValues),
    node: &Node,
    input: ValueId,
) -> bool {
    may_pass_gradient((graph, values), node, [input])
}

/// Returns the values that may get a gradient from the values `from`, including these values.
#[must_use]
pub fn values_with_gradient(graph: &Graph, from: &[ValueId]) -> FxHashSet<ValueId> {
    let values = GradientValues::new(graph);
    let mut reached: FxHashSet<ValueId> = from.iter().copied().collect();
    for node in graph.nodes.iter().rev() {
        if node.present_outputs().any(|output| reached.contains(&output)) {
            let passes = |&input: &ValueId| may_pass_gradient_to((graph, &values), node, input);
            let inputs: Vec<ValueId> = node.present_inputs().filter(passes).collect();
            reached.extend(inputs);
        }
    }
    reached
}

/// Returns the targets on which a node depends through paths that may propagate a gradient.
#[must_use]
pub fn targets_of_node(graph: &Graph, index: usize, targets: &[ValueId]) -> Vec<ValueId> {
    let values = GradientValues::new(graph);
    let mut before: FxHashSet<ValueId> = graph.nodes[index].present_inputs().collect();
    for node in graph.nodes[..index].iter().rev() {
        if node.present_outputs().any(|id| before.contains(&id))
            && may_pass_gradient((graph, &values), node, node.present_inputs())
        {
            before.extend(node.present_inputs());
        }
    }
    targets.iter().copied().filter(|id| before.contains(id)).collect()
}

fn propagate(
    graph: &mut Graph,
    seeds: &[(ValueId, ValueId)],
    targets: &[ValueId],
    mut stops: Option<&mut Vec<GradientStop>>,
) -> Result<Vec<Option<ValueId>>, Error> {
    decompose_on_path(graph, seeds, targets)?;
    let values = GradientValues::with_targets(graph, targets);
    let forward = graph.nodes.len();
    let dependent = dependent_values(graph, targets);

    let mut arriving: FxHashMap<ValueId, Vec<ValueId>> = FxHashMap::default();
    for &(value, gradient) in seeds {
        arriving.entry(value).or_default().push(gradient);
    }
    let mut named: FxHashSet<ValueId> = seeds.iter().map(|&(_, gradient)| gradient).collect();
    // Existing values keep their names.
    named.extend(graph.value_ids());
    let mut added: Vec<Node> = Vec::new();
    for index in (0..forward).rev() {
        pause();
        let node = graph.nodes[index].clone();
        let on_path = node.present_outputs().any(|output| arriving.contains_key(&output));
        let needed: Vec<bool> = node
            .inputs
            .iter()
            .map(|port| port.is_some_and(|id| dependent.contains(&id) && values.contains(graph, id)))
            .collect();
        if !on_path || !needed.contains(&true) {
            continue;
        }
        let output_grads: Vec<Option<ValueId>> = node
            .outputs
            .iter()
            .map(|port| port.and_then(|id| sum_gradients(graph, &mut added, &mut arriving, &mut named, id)))
            .collect();
        let op = build(graph, &node)?;
        let before = added.len();
        let label = if node.name.is_empty() { node.op.to_string() } else { node.name.to_string() };
        let mut cx = Grad {
            passes: GRADIENT_PASSES,
            graph,
            node_index: index,
            nodes: &mut added,
            prefix: format!("{label}_Grad/"),
            output_grads,
            input_grads: vec![None; node.inputs.len()],
            input_needs_grad: needed.clone(),
        };
        let outcome = op.grad(&mut cx);
        let input_grads = std::mem::take(&mut cx.input_grads);
        let none = needed
            .iter()
            .zip(&input_grads)
            .all(|(&is_needed, input_gradient)| !is_needed || input_gradient.is_none());
        let outcome = outcome.map_err(|source| Error::at(graph, &graph.nodes[index], with_advice(source)));
        match (outcome, stops.as_deref_mut()) {
            (Err(error), None) => return Err(error),
            (outcome, Some(stops)) if none || outcome.is_err() => {
                added.truncate(before);
                stops.push(GradientStop {
                    node: graph.node_label(&node),
                    operator: node.op_label(),
                    error: outcome.err(),
                    targets: targets_of_node(graph, index, targets),
                    has_unknown_sizes: node
                        .present_inputs()
                        .any(|id| graph.value(id).ty.shape().and_then(Shape::concrete).is_none()),
                });
                continue;
            }
            _ => {}
        }
        for ((port, gradient), is_needed) in node.inputs.iter().zip(input_grads).zip(needed) {
            if let (Some(id), Some(gradient), true) = (port, gradient, is_needed) {
                arriving.entry(*id).or_default().push(gradient);
            }
        }
    }
    let totals: Vec<Option<ValueId>> = targets
        .iter()
        .map(|&target| sum_gradients(graph, &mut added, &mut arriving, &mut named, target))
        .collect();
    // A gradient that is shared by several values (a sum propagates its own gradient) gets a name for each target.
    let mut used_gradients: FxHashSet<ValueId> = FxHashSet::default();
    let mut results = Vec::with_capacity(totals.len());
    for (&target, total) in targets.iter().zip(totals) {
        let Some(gradient) = total else {
            results.push(None);
            continue;
        };
        let gradient_name = format!("{}_grad", graph.name_of(target));
        let is_own_name = used_gradients.insert(gradient) && graph.name_of(gradient) == gradient_name;
        results.push(Some(if is_own_name {
            gradient
        } else {
            let copy = graph.add_value(&gradient_name, gradient_type(&graph.value(target).ty));
            added.push(Node::new("", "Identity", &[Some(gradient)], &[Some(copy)], Attrs::new()));
            copy
        }));
    }
    graph.nodes.extend(added);
    if stops.is_none() {
        // Forward nodes may have new outputs, so their types are inferred first.
        infer_added(graph)?;
    }
    Ok(results)
}

/// Decomposes the compositions on the path, so that their parts are differentiated and intermediate results for the
/// gradient are computed once.
pub(crate) fn decompose_on_path(
    graph: &mut Graph,
    seeds: &[(ValueId, ValueId)],
    targets: &[ValueId],
) -> Result<(), Error> {
    let is_composition = |node: &Node| {
        let known_definition = Registry::standard().find(&node.domain, &node.op);
        known_definition.is_some_and(|definition| (definition.is_composition)(node))
    };
    let dependent = dependent_values(graph, targets);
    let mut parts = 0;
    let mut reaching: FxHashSet<ValueId> = seeds.iter().map(|&(value, _)| value).collect();
    for index in (0..graph.nodes.len()).rev() {
        let node = &graph.nodes[index];
        if !node.present_outputs().any(|output| reaching.contains(&output)) {
            continue;
        }
        reaching.extend(node.present_inputs());
        if !is_composition(node) || !node.present_inputs().any(|input| dependent.contains(&input)) {
            continue;
        }
        let count = decompose_node(graph, index)?.unwrap_or(1);
        for part in index..index + count {
            infer_part(graph, part)?;
        }
        parts += count;
    }
    // A part may be a composition itself.
    if parts > 0 { decompose_on_path(graph, seeds, targets) } else { Ok(()) }
}

/// Returns the sum of the gradients of a value, named `<value>_grad`.
fn sum_gradients(
    graph: &mut Graph,
    added: &mut Vec<Node>,
    arriving: &mut FxHashMap<ValueId, Vec<ValueId>>,
    named: &mut FxHashSet<ValueId>,
    value: ValueId,
) -> Option<ValueId> {
    let parts = arriving.get(&value)?.clone();
    let name = format!("{}_grad", graph.name_of(value));
    let sum = match parts.as_slice() {
        [] => return None,
        [one] => {
            // Renames the gradient, unless it already is the gradient of another value.
            if named.insert(*one) {
                graph.rename(*one, &name);
            }
            *one
        }
        many => {
            for (k, &part) in many.iter().enumerate() {
                if named.insert(part) {
                    graph.rename(part, &format!("{name}_{k}"));
                }
            }
            let mut rest: Vec<Option<ValueId>> = many.iter().copied().map(Some).collect();
            // Gradients beyond the limit of operands are summed in several steps, in the same order.
            let mut part = 0;
            while rest.len() > MAX_OPERANDS {
                let first: Vec<_> = rest.drain(..MAX_OPERANDS).collect();
                let sum =
                    graph.add_value(&format!("{name}_part_{part}"), gradient_type(&graph.value(value).ty));
                let mut node = Node::new("", "Sum", &first, &[Some(sum)], Attrs::new());
                node.name = format!("AccumulateGrad_{name}_part_{part}").into();
                added.push(node);
                named.insert(sum);
                rest.insert(0, Some(sum));
                part += 1;
            }
            let sum = graph.add_value(&name, gradient_type(&graph.value(value).ty));
            let mut node = Node::new("", "Sum", &rest, &[Some(sum)], Attrs::new());
            node.name = format!("AccumulateGrad_{name}").into();
            added.push(node);
            named.insert(sum);
            sum
        }
    };
    arriving.insert(value, vec![sum]);
    Some(sum)
}

/// Appends advice to an error: a user can add a missing gradient.
fn with_advice(error: OpError) -> OpError {
    match error {
        OpError::Unsupported(message) => OpError::Unsupported(format!("{message}; {ADVICE}")),
        other => other,
    }
}

/// Passes for the differentiation.
const GRADIENT_PASSES: GradientPasses =
    GradientPasses { infer: infer_nodes, infer_added, remove_updates, decompose_on_path, backpropagate };

/// Advice for a missing gradient.
const ADVICE: &str = "a gradient of your own can be added (docs/extending.md)";

/// Returns the values from which `values` are computed, including these values.
fn ancestors_of(graph: &Graph, values: &[ValueId]) -> FxHashSet<ValueId> {
    let mut needed: FxHashSet<ValueId> = values.iter().copied().collect();
    for node in graph.nodes.iter().rev() {
        if node.present_outputs().any(|output| needed.contains(&output)) {
            needed.extend(node.present_inputs());
        }
    }
    needed
}

/// Returns the nodes between the values `from` and the values `to` that interrupt a gradient: their results are not
/// floats, or their derivative is zero.
#[must_use]
pub fn gradient_cuts(graph: &Graph, to: &[ValueId], from: &[ValueId]) -> Vec<usize> {
    let needed = ancestors_of(graph, to);
    let values = GradientValues::new(graph);
    let mut reached: FxHashSet<ValueId> = from.iter().copied().collect();
    let mut cuts = Vec::new();
    for (index, node) in graph.nodes.iter().enumerate() {
        let inputs: Vec<ValueId> = node.present_inputs().filter(|input| reached.contains(input)).collect();
        let leads_on = node.present_outputs().any(|output| needed.contains(&output));
        if inputs.is_empty() || !leads_on {
            continue;
        }
        if may_pass_gradient((graph, &values), node, inputs) {
            reached.extend(node.present_outputs());
        } else {
            cuts.push(index);
        }
    }
    cuts
}

/// Returns the reason why no gradient reaches a target from any of the values `from`: an [`Error::NoPath`].
#[must_use]
pub fn no_path_error(graph: &Graph, target: ValueId, from: &[ValueId]) -> Error {
    let users: Vec<&Node> =
        graph.nodes.iter().filter(|node| node.present_inputs().any(|input| input == target)).collect();
    let value = graph.name_of(target).to_owned();
    let dtype = graph.value(target).ty.dtype();
    let names: Vec<String> = from.iter().map(|&id| format!("{:?}", graph.name_of(id))).collect();
    let names = names.join(" or ");
    let reason = if dtype.is_some_and(|dtype| !dtype.is_float()) {
        format!("its elements are {}, not floats", graph.value(target).ty)
    } else if users.is_empty() {
        format!("no node on a path to {names} uses it")
    } else {
        let needed = ancestors_of(graph, from);
        if !needed.contains(&target) {
            let reason = match from {
                [_] => format!("{names} does not depend on it"),
                _ => format!("neither {} depends on it", names.replace(" or ", " nor ")),
            };
            return Error::NoPath { value, reason };
        }
        let cut_nodes = gradient_cuts(graph, from, &[target]);
        let stops: Vec<Option<(Vec<String>, String)>> =
            cut_nodes.iter().map(|&index| find_stop(graph, &graph.nodes[index])).collect();
        let stopped: Vec<String> =
            stops.iter().flatten().flat_map(|(values, _)| values).map(|value| format!("{value:?}")).collect();
        let other_stops = stops.iter().filter(|stop| stop.is_none()).count();
        let cut_labels: Vec<String> =
            cut_nodes.into_iter().map(|index| graph.node_label(&graph.nodes[index])).collect();
        if !stopped.is_empty() && other_stops == 0 {
            format!(
                "every path from it to {names} goes through {}, where stop_gradients ends the gradient",
                listed(&stopped)
            )
        } else if cut_labels.is_empty() {
            let users: Vec<String> = users.iter().map(|node| graph.node_label(node)).collect();
            let users = listed(&users);
            format!("the results of {users} that reach {names} do not depend on it")
        } else {
            let cut_list = listed(&cut_labels);
            format!(
                "every path from it to {names} goes through {cut_list}, which passes no gradient back; {ADVICE}"
            )
        }
    };
    Error::NoPath { value, reason }
}
