//! Gradient of a Loop with carried values of changing shape, for example the keys and values of a decoder.
//!
//! A Loop only collects values of one shape. For each value of changing shape that the gradient needs, the forward node
//! carries a tape. The tape is a vector to which every iteration appends the elements of the value. The shapes of the
//! value are collected. The gradient is a Loop with the same number of iterations, which reads the tapes from their
//! ends.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId, ValueType};
use rustc_hash::FxHashSet;

use crate::OpError;
use crate::families::control_flow::residuals::Residuals;
use crate::grad::Grad;
use crate::op::Repetition;
use crate::support::random::draws_random_numbers;
use crate::support::subgraphs::{BODY, is_used, subgraph_error};

/// A Loop and its gradient in one body, before the gradient becomes a separate node.
pub(super) struct GrowingLoop<'a> {
    pub(super) repetition: &'a Repetition,
    /// Body, followed by the nodes of its gradient. The outputs are the next states.
    pub(super) graph: Graph,
    /// Numbers of nodes and of values of the original body.
    pub(super) forward_nodes: usize,
    pub(super) forward_values: usize,
    pub(super) residuals: Residuals,
    /// Outputs of the original body.
    pub(super) forward_outputs: Vec<ValueId>,
    /// Values that the gradient carries: gradients of carried values, followed by sums of gradients of captured values.
    pub(super) states: Vec<ValueId>,
    /// Values of the states before the first iteration of the gradient.
    pub(super) initial: Vec<ValueId>,
    /// Gradients of collected values: the gradient of one iteration in the body, and the stacked gradients outside.
    pub(super) collected: Vec<(ValueId, ValueId)>,
}

/// A value of every iteration: `inner` in the body of the gradient, `outside` in the outputs of the forward node.
struct StackedValue {
    inner: ValueId,
    outside: ValueId,
}

/// A value with its elements on a tape.
struct TapedValue {
    inner: ValueId,
    tape: ValueId,
    shapes: ValueId,
}

/// Builder for nodes that are added to a body.
struct BodyBuilder<'a> {
    graph: &'a mut Graph,
    nodes: Vec<Node>,
}

impl BodyBuilder<'_> {
    fn value(&mut self, name: &str, dtype: DType, shape: Option<Shape>) -> ValueId {
        self.graph.add_value(name, ValueType::Tensor(dtype, shape))
    }

    fn push(&mut self, op: &str, inputs: &[ValueId], output: ValueId, attrs: Attrs) {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        self.nodes.push(Node::new("", op, &inputs, &[Some(output)], attrs));
    }

    fn add(&mut self, name: &str, op: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId {
        let output = self.graph.add_value(name, ValueType::Unknown);
        self.push(op, inputs, output, attrs);
        output
    }

    fn ints(&mut self, name: &str, values: &[i64]) -> ValueId {
        self.graph.add_constant(name, Tensor::i64(&[values.len()], values))
    }
}

fn axis_attr(axis: i64) -> Attrs {
    Attrs::new().with("axis", axis)
}

/// Returns all sizes in the shapes of a node's inputs.
pub(super) fn outer_sizes(cx: &Grad<'_>) -> FxHashSet<Dim> {
    let shapes = cx.node().present_inputs().filter_map(|id| cx.shape(id));
    shapes.flat_map(|shape| shape.iter().cloned()).collect()
}

/// Returns true if a value has the same shape in all iterations: its sizes are numbers, or symbols of the graph around
/// the Loop.
pub(super) fn has_fixed_shape(graph: &Graph, id: ValueId, outer: &FxHashSet<Dim>) -> bool {
    let steady = |dim: &Dim| dim.known().is_some() || outer.contains(dim);
    graph.value(id).ty.shape().is_some_and(|shape| shape.iter().all(steady))
}

impl GrowingLoop<'_> {
    /// Changes the forward node and adds the gradient node. Returns the gradients: the states after its last iteration.
    pub(super) fn emit(mut self, cx: &mut Grad<'_>) -> Result<Vec<ValueId>, OpError> {
        let (stacked, taped) = self.extend_forward(cx);
        let mut captured: Vec<(ValueId, ValueId)> = Vec::new();
        let (count, last) = iteration_count(cx, stacked[0].outside);

        self.residuals.retain_recomputed(&mut self.graph, self.forward_nodes, self.repetition);
        if let Some(node) = self.graph.nodes.iter().find(|node| draws_random_numbers(node)) {
            return Err(OpError::unsupported(format!(
                "a carried value changes its shape: the gradient cannot repeat the random numbers of {}",
                self.graph.node_label(node)
            )));
        }
        let graph = &mut self.graph;
        graph.name = format!("{}_grad", graph.name);
        let mut body = BodyBuilder { graph, nodes: Vec::new() };
        let iteration = body.value("iteration", DType::I64, Some(Shape::default()));
        let condition = body.value("condition", DType::Bool, Some(Shape::default()));
        let last_inside = body.value("last", DType::I64, Some(Shape::default()));
        captured.push((last_inside, last));
        let forward_iteration = body.add("forward_iteration", "Sub", &[last_inside, iteration], Attrs::new());
        let goes_on = body.add("goes_on", "Identity", &[condition], Attrs::new());
        let pairs = stacked.iter().map(|&StackedValue { inner, outside }| (inner, outside));
        for (inner, outside) in pairs.chain(self.collected.iter().copied()) {
            let history = body.add_stacked_input(inner);
            captured.push((history, outside));
            body.push("Gather", &[history, forward_iteration], inner, axis_attr(0));
        }
        let (mut ends, mut starts) = (Vec::new(), Vec::new());
        for one in &taped {
            let (tape, shapes, end, start) = body.read_tape(one.inner, forward_iteration);
            captured.extend([(tape, one.tape), (shapes, one.shapes)]);
            ends.push(end);
            starts.push(start);
        }
        let mut nodes = std::mem::take(&mut body.nodes);
        nodes.append(&mut graph.nodes);
        graph.nodes = nodes;
        graph.outputs.insert(0, goes_on);
        graph.outputs.extend(starts);
        let own_captured = std::mem::take(&mut graph.inputs).split_off(self.repetition.formal_inputs());
        graph.remove_unused();
        (cx.passes.remove_updates)(graph).map_err(subgraph_error)?;

        let explicit_count = cx.node().inputs.len() - cx.node().captures;
        for (c, &id) in own_captured.iter().enumerate() {
            if is_used(graph, id) {
                captured.push((id, cx.input(explicit_count + c)?));
            }
        }
        graph.inputs = [iteration, condition].into_iter().chain(self.states).chain(ends).collect();
        graph.inputs.extend(captured.iter().map(|&(inner, _)| inner));
        for id in graph.value_ids().skip(self.forward_values) {
            let name = format!("{}{BODY}/{}", cx.prefix, graph.name_of(id));
            graph.rename(id, &name);
        }
        (cx.passes.infer_added)(graph).map_err(subgraph_error)?;

        let mut inputs = vec![Some(count), None];
        inputs.extend(self.initial.iter().copied().map(Some));
        for one in &taped {
            inputs.push(Some(cx.add("Shape", &[one.tape], Attrs::new())));
        }
        inputs.extend(captured.iter().map(|&(_, outer)| Some(outer)));
        let states = self.initial.len();
        let attrs = Attrs::new().with(BODY, self.graph);
        let mut gradients = cx.add_node("", "Loop", &inputs, states + taped.len(), attrs);
        cx.nodes.last_mut().expect("just added").captures = captured.len();
        gradients.truncate(states);
        Ok(gradients)
    }

    /// Extends the outputs of the forward node: collected values of one shape, and for other values the tapes and
    /// shapes.
    fn extend_forward(&self, cx: &mut Grad<'_>) -> (Vec<StackedValue>, Vec<TapedValue>) {
        let r = self.repetition;
        let node = cx.node().clone();
        let outer = outer_sizes(cx);
        let steady = |id: &ValueId| has_fixed_shape(&self.graph, *id, &outer);
        let (mut steady, growing): (Vec<ValueId>, Vec<ValueId>) =
            self.residuals.saved.iter().partition(|id| steady(id));
        if steady.is_empty() {
            // At least one value is collected: its length is the number of iterations.
            steady.push(self.graph.inputs[0]);
        }
        let mut forward = self.graph.clone();
        forward.nodes.truncate(self.forward_nodes);
        forward.outputs.clone_from(&self.forward_outputs);
        let base = node.present_outputs().next().map_or("", |id| cx.name_of(id)).to_owned();
        let mut body = BodyBuilder { graph: &mut forward, nodes: Vec::new() };
        let (mut stacked, mut taped) = (Vec::new(), Vec::new());
        let (mut collects, mut tapes) = (Vec::new(), Vec::new());
        let collected = &self.forward_outputs[r.leading_outputs() + r.carried..];
        for id in steady {
            let name = body.graph.name_of(id).to_owned();
            if let Some(k) = collected.iter().position(|&other| other == id) {
                stacked.push(StackedValue { inner: id, outside: cx.output(r.carried + k, &name) });
                continue;
            }
            let copy = body.add(&format!("{name}_saved"), "Identity", &[id], Attrs::new());
            let outside = cx.value(&format!("{base}_{name}"), ValueType::Unknown);
            collects.push((copy, outside));
            stacked.push(StackedValue { inner: id, outside });
        }
        for id in growing {
            let name = body.graph.name_of(id).to_owned();
            let dtype = body.graph.value(id).ty.dtype().unwrap_or(DType::F32);
            let shape = body.add(&format!("{name}_shape"), "Shape", &[id], Attrs::new());
            let shapes = cx.value(&format!("{base}_{name}_shapes"), ValueType::Unknown);
            collects.push((shape, shapes));
            let before = body.value(&format!("{name}_tape"), dtype, None);
            let flat = body.ints("flat", &[-1]);
            let elements = body.add(&format!("{name}_elements"), "Reshape", &[id, flat], Attrs::new());
            let next = body.add(&format!("{name}_tape_next"), "Concat", &[before, elements], axis_attr(0));
            let initial = cx.constant("tape", Tensor::filled(dtype, &[0], 0.0));
            let tape = cx.value(&format!("{base}_{name}_tape"), ValueType::Unknown);
            tapes.push((before, next, initial, tape));
            taped.push(TapedValue { inner: id, tape, shapes });
        }
        let added = body.nodes;
        forward.nodes.extend(added);
        let (lead, lead_out) = (r.leading_inputs() + r.carried, r.leading_outputs() + r.carried);
        forward.inputs.splice(lead..lead, tapes.iter().map(|tape| tape.0));
        forward.outputs.splice(lead_out..lead_out, tapes.iter().map(|tape| tape.1));
        forward.outputs.extend(collects.iter().map(|&(copy, _)| copy));
        forward.remove_unused();
        let results = r.carried + r.stacked.len();
        cx.replace_node(|outside, index| {
            let node = &mut outside.nodes[index];
            node.outputs.resize(results, None);
            node.outputs.insert_many(r.carried, tapes.iter().map(|tape| Some(tape.3)));
            node.outputs.extend(collects.iter().map(|&(_, id)| Some(id)));
            node.inputs.insert_many(lead, tapes.iter().map(|tape| Some(tape.2)));
            node.attrs = std::mem::take(&mut node.attrs).with(BODY, forward);
        });
        (stacked, taped)
    }
}

impl BodyBuilder<'_> {
    /// Adds a captured value: `inner` of all iterations, stacked along axis 0.
    fn add_stacked_input(&mut self, inner: ValueId) -> ValueId {
        let name = format!("{}_all", self.graph.name_of(inner));
        let ty = &self.graph.value(inner).ty;
        let (dtype, shape) = (ty.dtype().unwrap_or(DType::F32), ty.shape().cloned());
        let stacked = shape
            .map(|shape| std::iter::once(Dim::symbol("iterations")).chain(shape.iter().cloned()).collect());
        self.value(&name, dtype, stacked)
    }

    /// Reads a value from the end of a tape. Returns the tape, the shapes, the end and the next end.
    fn read_tape(&mut self, inner: ValueId, at: ValueId) -> (ValueId, ValueId, ValueId, ValueId) {
        let name = self.graph.name_of(inner).to_owned();
        let ty = &self.graph.value(inner).ty;
        let (dtype, rank) = (ty.dtype().unwrap_or(DType::F32), ty.shape().map(Shape::rank));
        let vector = |size: Dim| Some([size].into_iter().collect::<Shape>());
        let tape = self.value(&format!("{name}_tape"), dtype, vector(Dim::symbol("elements")));
        let of_all =
            rank.map(|rank| [Dim::symbol("iterations"), Dim::Known(rank)].into_iter().collect::<Shape>());
        let shapes = self.value(&format!("{name}_shapes"), DType::I64, of_all);
        let end = self.value(&format!("{name}_end"), DType::I64, vector(Dim::Known(1)));
        let shape = self.add(&format!("{name}_shape"), "Gather", &[shapes, at], axis_attr(0));
        let size =
            self.add(&format!("{name}_size"), "ReduceProd", &[shape], Attrs::new().with("keepdims", 1i64));
        let start = self.add(&format!("{name}_start"), "Sub", &[end, size], Attrs::new());
        let axes = self.ints("axes", &[0]);
        let piece = self.add(&format!("{name}_elements"), "Slice", &[tape, start, end, axes], Attrs::new());
        self.push("Reshape", &[piece, shape], inner, Attrs::new().with("allowzero", 1i64));
        (tape, shapes, end, start)
    }
}

/// Returns the number of iterations, which is the length of a collected value, and the index of the last iteration.
fn iteration_count(cx: &mut Grad<'_>, collected: ValueId) -> (ValueId, ValueId) {
    let shape = cx.add("Shape", &[collected], Attrs::new());
    let [first, one] = [0, 1].map(|value| cx.constant("number", Tensor::i64(&[], &[value])));
    let count = cx.add("Gather", &[shape, first], axis_attr(0));
    let last = cx.add("Sub", &[count, one], Attrs::new());
    (count, last)
}
