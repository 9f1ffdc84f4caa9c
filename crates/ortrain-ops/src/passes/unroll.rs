//! Inlining of subgraphs: the branch of an `If` with a known condition, and the iterations of a short Loop or Scan.

use ortrain_graph::{Attr, Attrs, DType, Graph, Node, Patch, Shape, Tensor, ValueId, ValueType};
use ortrain_program::ScanAxis;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::Error;
use crate::class::Class;
use crate::infer::normalize_axis;
use crate::iterations::{constant_flag, known_iteration_count};
use crate::lower::{ORIGINAL_NAMES, POSITIONS};
use crate::op::{Placement, Repetition};
use crate::passes::node::fold_node;
use crate::registry::{build, class_of};
use crate::support::random::is_random;

/// Maximum number of nodes of all unrolled loops of a schedule. A program is planned as a whole: for many more nodes
/// the planning takes longer than the run saves.
pub(crate) const MAX_UNROLLED_NODES: usize = 2048;

/// Maximum number of nodes of a loop that is unrolled for inspection.
const MAX_INSPECTED_NODES: usize = 1 << 15;

/// Returns the condition of an `If`, its first input, if known.
pub(crate) fn constant_condition(graph: &Graph, node: &Node) -> Option<bool> {
    constant_flag(graph, node.inputs.first().copied().flatten()?)
}

/// Returns a subgraph of a node.
pub(crate) fn subgraph_of<'a>(graph: &Graph, node: &'a Node, attribute: &str) -> Result<&'a Graph, Error> {
    let subgraph = node.attrs.graph(attribute).and_then(|body| Attrs::required(attribute, body));
    subgraph.map_err(|error| Error::at(graph, node, error.into()))
}

/// Copier of a subgraph's nodes into the outer graph.
struct SubgraphCopier<'a> {
    subgraph: &'a Graph,
    /// Iteration indices: of the unrolled outer loops, the outermost first, and then of this loop.
    positions: Vec<i64>,
    /// Suffix of names.
    suffix: String,
    /// Outer value of each value of the subgraph.
    outside: FxHashMap<ValueId, ValueId>,
}

impl SubgraphCopier<'_> {
    /// Returns the outer value of a value of the subgraph.
    fn outer_value(&mut self, patch: &mut Patch, inner: ValueId) -> ValueId {
        if let Some(&known) = self.outside.get(&inner) {
            return known;
        }
        let value = self.subgraph.value(inner);
        let name = format!("{}{}", value.name, self.suffix);
        let outer = match &value.constant {
            Some(tensor) => patch.constant(&name, tensor.clone()),
            None => {
                // Shapes are inferred again, as for all values.
                let ty = match value.ty {
                    ValueType::Tensor(dtype, _) => ValueType::Tensor(dtype, None),
                    ref other => other.clone(),
                };
                patch.add_value(&name, ty)
            }
        };
        self.outside.insert(inner, outer);
        outer
    }

    /// Adds the nodes to a patch.
    fn copy_nodes(&mut self, patch: &mut Patch) {
        let subgraph = self.subgraph;
        for inner in &subgraph.nodes {
            let mut copy = inner.clone();
            mark_positions(subgraph, &mut copy, &self.positions);
            if is_random(&inner.domain, &inner.op) {
                // Output names identify streams of random numbers. With the original names, a recomputation of the
                // subgraph draws the same numbers.
                let name = |port: &Option<ValueId>| {
                    port.map_or_else(String::new, |id| subgraph.name_of(id).to_owned())
                };
                let names = inner.outputs.iter().map(name).collect();
                copy.attrs.0.entry(ORIGINAL_NAMES.to_owned()).or_insert(Attr::Strings(names));
            }
            for port in copy.inputs.iter_mut().chain(&mut copy.outputs).flatten() {
                *port = self.outer_value(patch, *port);
            }
            patch.push(copy);
        }
    }
}

/// Records the iteration indices on random-number nodes and on loops.
fn mark_positions(graph: &Graph, node: &mut Node, positions: &[i64]) {
    if positions.is_empty() {
        return;
    }
    let repeats = build(graph, node).is_ok_and(|op| matches!(op.placement(), Placement::Repeat(_)));
    if repeats || is_random(&node.domain, &node.op) {
        node.attrs.0.insert(POSITIONS.to_owned(), Attr::Ints(positions.to_vec()));
    }
    if !repeats {
        for attr in node.attrs.0.values_mut() {
            if let Attr::Graph(branch) = attr {
                let mut nodes = std::mem::take(&mut branch.nodes);
                nodes.iter_mut().for_each(|node| mark_positions(branch, node, positions));
                branch.nodes = nodes;
            }
        }
    }
}

/// Replaces a node by the nodes of one of its branches. The other branch is ignored: it may contradict the current
/// shapes.
pub(crate) fn inline_branch(graph: &mut Graph, index: usize, attribute: &str) -> Result<(), Error> {
    let node = graph.nodes[index].clone();
    let subgraph = subgraph_of(graph, &node, attribute)?;
    let mut patch = Patch::new(graph, "");
    let captured = node.inputs[node.inputs.len() - node.captures..].iter().flatten().copied();
    let outside = subgraph.inputs.iter().copied().zip(captured).collect();
    let mut copy = SubgraphCopier { subgraph, positions: Vec::new(), suffix: String::new(), outside };
    copy.copy_nodes(&mut patch);
    for (port, &inner) in node.outputs.iter().zip(&subgraph.outputs) {
        if let Some(old) = *port {
            let new = copy.outer_value(&mut patch, inner);
            patch.replace(old, new);
        }
    }
    patch.apply(graph, &[index]);
    Ok(())
}

/// Returns the condition after an iteration, if it is always the same. Types must have been inferred.
fn constant_continuation(
    graph: &Graph,
    node: &Node,
    body: &Graph,
    r: &Repetition,
) -> Result<Option<bool>, Error> {
    if !r.conditional {
        return Ok(None);
    }
    let mut body = body.clone();
    let flag = body.inputs[1];
    let dims = body.value(flag).ty.shape().and_then(Shape::concrete).unwrap_or_default();
    body.value_mut(flag).constant = Some(Tensor::filled(ortrain_graph::DType::Bool, &dims, 1.0));
    let captured = node.inputs[node.inputs.len() - node.captures..].iter().flatten();
    let fixed: Vec<ValueId> = body.inputs.iter().skip(r.formal_inputs()).copied().collect();
    for (inner, outer) in fixed.into_iter().zip(captured) {
        body.value_mut(inner).constant = graph.value(*outer).constant.clone();
    }
    // Keeps only the nodes that the condition depends on.
    body.outputs.truncate(1);
    body.remove_unused();
    for index in 0..body.nodes.len() {
        fold_node(&mut body, index)?;
    }
    Ok(constant_flag(&body, body.outputs[0]))
}

/// Inlines the subgraph of a node according to a run: `known` returns values of the run, such as the inputs and results
/// of the node. Returns true if the node has a subgraph, and the values determine the taken branch or the number of
/// iterations.
pub(crate) fn inline_run(
    graph: &mut Graph,
    index: usize,
    known: &dyn Fn(ValueId) -> Option<Tensor>,
) -> Result<bool, Error> {
    let node = graph.nodes[index].clone();
    let constant_int = |k: usize| Repetition::own_input(&node, k).and_then(known)?.to_i64()?.first().copied();
    match build(graph, &node)?.placement() {
        Placement::If { then_branch, else_branch } => {
            let Some(holds) = constant_int(0) else { return Ok(false) };
            inline_branch(graph, index, if holds != 0 { then_branch } else { else_branch })?;
            Ok(true)
        }
        Placement::Repeat(r) => {
            for k in r.leading_inputs()..r.formal_inputs() {
                if let Some((id, tensor)) =
                    Repetition::own_input(&node, k).and_then(|id| Some((id, known(id)?)))
                {
                    graph.value_mut(id).ty = ValueType::tensor(tensor.dtype(), tensor.dims());
                }
            }
            let collected = r.stacked.iter().enumerate().find_map(|(k, along)| {
                let tensor = node.outputs.get(r.carried + k).copied().flatten().and_then(known)?;
                let axis = normalize_axis(along.axis, tensor.dims().len()).ok()?;
                Some(tensor.dims()[axis] as i64)
            });
            if r.conditional {
                if let (Some(count), Some(Attr::Graph(body))) =
                    (collected, graph.nodes[index].attrs.0.get_mut(r.body))
                {
                    // The number of iterations is known: the condition is not evaluated any more.
                    let holds =
                        body.add_constant("holds", Tensor::filled(ortrain_graph::DType::Bool, &[], 1.0));
                    body.outputs[0] = holds;
                    graph.nodes[index].inputs[1] = None;
                    set_input(graph, index, 0, Tensor::i64(&[], &[count]));
                } else {
                    for k in 0..r.leading_inputs() {
                        if let Some(tensor) = Repetition::own_input(&node, k).and_then(known) {
                            set_input(graph, index, k, tensor);
                        }
                    }
                }
            }
            unroll(graph, index, &r, &mut MAX_INSPECTED_NODES.clone())
        }
        _ => Ok(false),
    }
}

fn set_input(graph: &mut Graph, index: usize, k: usize, tensor: Tensor) {
    let constant = graph.add_constant("known", tensor);
    graph.nodes[index].inputs[k] = Some(constant);
}

/// Returns the number of nodes of a graph, including subgraphs.
fn node_count(graph: &Graph) -> usize {
    let inside = |node: &Node| Graph::subgraphs(node).map(|(_, graph)| node_count(graph)).sum::<usize>();
    graph.nodes.iter().map(|node| 1 + inside(node)).sum()
}

/// Replaces a node by the iterations of its body, if their number is known and they have at most `budget` nodes.
/// Subtracts these nodes from `budget`. Returns true if the node was replaced. Types must have been inferred up to this
/// node.
pub(crate) fn unroll(
    graph: &mut Graph,
    index: usize,
    r: &Repetition,
    budget: &mut usize,
) -> Result<bool, Error> {
    let node = graph.nodes[index].clone();
    let body = subgraph_of(graph, &node, r.body)?;
    let Some(count) = known_iteration_count(graph, &node, r, constant_continuation(graph, &node, body, r)?)
    else {
        return Ok(false);
    };
    let input_count = node.inputs.len() - node.captures;
    let is_requested: Vec<bool> =
        (0..r.stacked.len()).map(|k| node.outputs.get(r.carried + k).copied().flatten().is_some()).collect();
    let per_iteration = node_count(body) + 2 * r.scanned.len() + r.stacked.len();
    let total = usize::try_from(count).ok().and_then(|count| count.checked_mul(per_iteration.max(1)));
    let Some(total) = total.filter(|total| total <= budget) else { return Ok(false) };
    let empty = if count == 0 { empty_stacks(body, r, &is_requested) } else { Some(FxHashMap::default()) };
    let Some(mut empty) = empty else { return Ok(false) };
    *budget -= total;

    let producers = graph.producers();
    let mut patch = Patch::new(graph, "");
    let label = if node.name.is_empty() { &node.op } else { &node.name };
    let mut carried: Vec<ValueId> =
        (0..r.carried).filter_map(|j| node.inputs[r.leading_inputs() + j]).collect();
    let captured: Vec<(ValueId, ValueId)> = body.inputs[r.formal_inputs()..]
        .iter()
        .copied()
        .zip(node.inputs[input_count..].iter().flatten().copied())
        .collect();
    let positions = node.attrs.0.get(POSITIONS);
    let around = if let Some(Attr::Ints(positions)) = positions { positions.clone() } else { Vec::new() };
    let mut collected: Vec<Vec<ValueId>> = vec![Vec::new(); r.stacked.len()];
    for iteration in 0..count {
        let at = |along: ScanAxis| if along.reversed { count - 1 - iteration } else { iteration };
        let position = r.scanned.first().map_or(iteration, |&along| at(along));
        let mut outside: FxHashMap<ValueId, ValueId> = captured.iter().copied().collect();
        if r.conditional {
            for (k, content) in [(0, iteration as f64), (1, 1.0)] {
                let ty = &body.value(body.inputs[k]).ty;
                let dims = ty.shape().and_then(Shape::concrete).unwrap_or_default();
                let dtype = if k == 0 { DType::I64 } else { DType::Bool };
                let name = format!("{label}/{}.{iteration}", body.name_of(body.inputs[k]));
                let value = patch.constant(&name, Tensor::filled(dtype, &dims, content));
                outside.insert(body.inputs[k], value);
            }
        }
        for (&inner, &outer) in body.inputs[r.leading_inputs()..].iter().zip(&carried) {
            outside.insert(inner, outer);
        }
        for (s, &along) in r.scanned.iter().enumerate() {
            let inner = body.inputs[r.leading_inputs() + r.carried + s];
            let source =
                node.inputs[r.leading_inputs() + r.carried + s].expect("inference checked that it is there");
            let position = at(along) as i64;
            if let Some(value) = stacked_slice(graph, &producers, source, along.axis, position as usize) {
                outside.insert(inner, value);
                continue;
            }
            let name = format!("{}.{iteration}", body.name_of(inner));
            let mut ints = |suffix: &str, value: i64| {
                patch.constant(&format!("{label}/{name}/{suffix}"), Tensor::i64(&[1], &[value]))
            };
            let (start, end, axes) =
                (ints("start", position), ints("end", position + 1), ints("axis", along.axis));
            let dtype = graph.value(source).ty.dtype();
            let unknown = || dtype.map_or(ValueType::Unknown, |dtype| ValueType::Tensor(dtype, None));
            let part = patch.add_value(&format!("{name}/part"), unknown());
            let slice = patch.add_value(&name, unknown());
            patch.push(named("Slice", label, &[source, start, end, axes], part, Attrs::new()));
            patch.push(named("Squeeze", label, &[part, axes], slice, Attrs::new()));
            outside.insert(inner, slice);
        }
        let mut positions = around.clone();
        positions.push(position as i64);
        let mut copy = SubgraphCopier { subgraph: body, positions, suffix: format!(".{iteration}"), outside };
        copy.copy_nodes(&mut patch);
        for (j, value) in carried.iter_mut().enumerate() {
            *value = copy.outer_value(&mut patch, body.outputs[r.leading_outputs() + j]);
        }
        for (k, values) in collected.iter_mut().enumerate().filter(|&(k, _)| is_requested[k]) {
            values.push(copy.outer_value(&mut patch, body.outputs[r.leading_outputs() + r.carried + k]));
        }
    }
    for (port, &value) in node.outputs.iter().zip(&carried) {
        if let Some(old) = *port {
            patch.replace(old, value);
        }
    }
    for (k, mut values) in collected.into_iter().enumerate() {
        let Some(old) = node.outputs.get(r.carried + k).copied().flatten() else { continue };
        if let Some(tensor) = empty.remove(&k) {
            let empty_tensor = patch.constant(graph.name_of(old), tensor);
            patch.replace(old, empty_tensor);
            continue;
        }
        let along = r.stacked[k];
        if along.reversed {
            values.reverse();
        }
        let axes = patch.constant(&format!("{label}/axes_{k}"), Tensor::i64(&[1], &[along.axis]));
        let ty = || match graph.value(old).ty.dtype() {
            Some(dtype) => ValueType::Tensor(dtype, None),
            None => ValueType::Unknown,
        };
        let mut parts = Vec::with_capacity(values.len());
        for (t, value) in values.into_iter().enumerate() {
            let part = patch.add_value(&format!("{}.{t}", graph.name_of(old)), ty());
            patch.push(named("Unsqueeze", label, &[value, axes], part, Attrs::new()));
            parts.push(part);
        }
        patch.push(named("Concat", label, &parts, old, Attrs::new().with("axis", along.axis)));
    }
    patch.apply(graph, &[index]);
    Ok(true)
}

/// Returns a node of `ai.onnx` with one output.
fn named(op: &str, name: &str, inputs: &[ValueId], output: ValueId, attrs: Attrs) -> Node {
    let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
    let mut node = Node::new("", op, &inputs, &[Some(output)], attrs);
    node.name = name.into();
    node
}

/// Returns the requested stacks of a loop without iterations, by index; `None` if a shape or type is not known.
fn empty_stacks(body: &Graph, r: &Repetition, is_requested: &[bool]) -> Option<FxHashMap<usize, Tensor>> {
    let mut empty = FxHashMap::default();
    for (k, along) in r.stacked.iter().enumerate().filter(|&(k, _)| is_requested[k]) {
        let value = body.value(body.outputs[r.leading_outputs() + r.carried + k]);
        let mut dims = value.ty.shape().and_then(Shape::concrete)?;
        let axis = normalize_axis(along.axis, dims.len() + 1).ok()?;
        dims.insert(axis, 0);
        empty.insert(k, Tensor::filled(value.ty.dtype()?, &dims, 0.0));
    }
    Some(empty)
}

/// Returns the slice at a position along an axis of a value, if the value was stacked from slices.
fn stacked_slice(
    graph: &Graph,
    producers: &[Option<usize>],
    source: ValueId,
    axis: i64,
    position: usize,
) -> Option<ValueId> {
    let maker = |id: ValueId, class: Class| {
        let node = &graph.nodes[producers[id.0 as usize]?];
        (class_of(node) == class).then_some(node)
    };
    let rank = graph.value(source).ty.shape()?.rank();
    let axis = normalize_axis(axis, rank).ok()?;
    let concatenation = maker(source, Class::Join)?;
    if normalize_axis(concatenation.attrs.int("axis").ok()??, rank).ok()? != axis {
        return None;
    }
    // Each part is one slice.
    let is_unsqueezed = |port: &Option<ValueId>| port.is_some_and(|id| maker(id, Class::Unsqueeze).is_some());
    if !concatenation.inputs.iter().all(is_unsqueezed) {
        return None;
    }
    let part = maker(concatenation.inputs.get(position).copied().flatten()?, Class::Unsqueeze)?;
    let axes = graph.value(part.inputs.get(1).copied().flatten()?).constant.as_ref()?.to_i64()?;
    match axes.as_slice() {
        [one] if normalize_axis(*one, rank).ok()? == axis => part.inputs[0],
        _ => None,
    }
}

/// Removes unused nodes and their entries in `kinds`, which has one entry per node. Nodes that write state are never
/// removed.
pub(crate) fn remove_unused_nodes<K>(graph: &mut Graph, kinds: &mut Vec<K>) {
    let mut needed: FxHashSet<ValueId> = graph.outputs.iter().copied().collect();
    let mut keep = vec![true; graph.nodes.len()];
    for (index, node) in graph.nodes.iter().enumerate().rev() {
        let writes = || build(graph, node).is_ok_and(|op| op.writes_state());
        keep[index] = node.present_outputs().any(|id| needed.contains(&id)) || writes();
        if keep[index] {
            needed.extend(node.present_inputs());
        }
    }
    let mut node_flags = keep.iter();
    graph.nodes.retain(|_| node_flags.next() == Some(&true));
    let mut kind_flags = keep.iter();
    kinds.retain(|_| kind_flags.next() == Some(&true));
}
