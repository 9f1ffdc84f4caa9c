//! Gradient of a loop.

use ortrain_graph::{Attrs, DType, Graph, Node, Tensor, ValueId, ValueType};
use ortrain_program::ScanAxis;
use rustc_hash::FxHashMap;

use super::Repeat;
use super::flow::{Flow, Ports};
use crate::OpError;
use crate::families::control_flow::growing_loop::{GrowingLoop, has_fixed_shape, outer_sizes};
use crate::families::control_flow::residuals::Residuals;
use crate::grad::{Grad, gradient_dtype, gradient_type};
use crate::support::subgraphs::{BODY, is_used, subgraph, subgraph_error, zeros_like};

/// Returns a gradient of zeros for input `k`.
pub(super) fn zeros_like_input(cx: &mut Grad<'_>, k: usize) -> Result<ValueId, OpError> {
    let like = cx.input(k)?;
    let dtype = gradient_dtype(cx.dtype(like)?);
    Ok(zeros_like_value(cx, like, dtype))
}

/// Returns zeros of the shape of a value.
pub(super) fn zeros_like_value(cx: &mut Grad<'_>, like: ValueId, dtype: DType) -> ValueId {
    let zero = Tensor::filled(dtype, &[1], 0.0);
    let shape = cx.shape_of(like);
    cx.add("ConstantOfShape", &[shape], Attrs::new().with("value", zero))
}

/// Sets axes and directions as attributes of a Scan; `what` is "input" or "output".
pub(super) fn set_scan_axes(mut attrs: Attrs, what: &str, along: &[ScanAxis]) -> Attrs {
    for (name, values) in [
        (format!("scan_{what}_axes"), along.iter().map(|along| along.axis).collect::<Vec<i64>>()),
        (format!("scan_{what}_directions"), along.iter().map(|along| i64::from(along.reversed)).collect()),
    ] {
        attrs.0.remove(&name);
        if values.iter().any(|&value| value != 0) {
            attrs = attrs.with(&name, values);
        }
    }
    attrs
}

/// The body of a loop, followed by the nodes of its gradient.
struct Backward {
    graph: Graph,
    /// Numbers of nodes and of values of the body.
    forward_nodes: usize,
    forward_values: usize,
    /// Carried values with a gradient, by index.
    carries: Vec<usize>,
    /// Gradients that arrive at carried values, by carried value.
    adjoints: Vec<Option<ValueId>>,
    /// Gradients that arrive at collected values, in the order of [`Flow::arriving`].
    elements: Vec<ValueId>,
    /// Gradients that leave the body.
    of_carried: FxHashMap<usize, ValueId>,
    of_slices: Vec<(usize, ValueId)>,
    of_captured: Vec<(usize, ValueId)>,
    /// Outputs of the body.
    forward_outputs: Vec<ValueId>,
    /// Inputs of the gradient's body that it carries: gradients of carried values, then sums of gradients of captured
    /// values.
    states: Vec<ValueId>,
}

impl Backward {
    /// Appends the nodes of the gradient to a body; `None` if no gradient flows.
    fn new(
        cx: &Grad<'_>,
        body: &Graph,
        ports: &Ports,
        flow: &Flow,
        carried: usize,
    ) -> Result<Option<Backward>, OpError> {
        let (followed, targets) = (flow.followed(), flow.targets(ports));
        let arrives: Vec<bool> =
            (0..carried).map(|j| flow.depends[j] && cx.output_grad(j).is_some()).collect();
        let mut carries = flow.carried_gradients(body, ports, &arrives);
        let (graph, adjoints, elements, found) = loop {
            let mut graph = body.clone();
            // The name differs from gradient names: an input that is passed on is no gradient.
            let add_grad_input = |graph: &mut Graph, id: ValueId| {
                let name = format!("{}_grad_in", graph.name_of(id));
                let ty = gradient_type(&graph.value(id).ty);
                graph.add_value(&name, ty)
            };
            let adjoints: Vec<Option<ValueId>> = (0..carried)
                .map(|j| carries[j].then(|| add_grad_input(&mut graph, ports.carried_out[j])))
                .collect();
            let elements: Vec<ValueId> =
                flow.arriving.iter().map(|&k| add_grad_input(&mut graph, ports.collected[k])).collect();
            let mut seeds: Vec<(ValueId, ValueId)> = Vec::new();
            seeds.extend(
                ports.carried_out.iter().zip(&adjoints).filter_map(|(&id, adjoint)| Some((id, (*adjoint)?))),
            );
            seeds.extend(
                flow.arriving.iter().zip(&elements).map(|(&k, &element)| (ports.collected[k], element)),
            );
            if seeds.is_empty() {
                return Ok(None);
            }
            let found = (cx.passes.backpropagate)(&mut graph, &seeds, &targets).map_err(subgraph_error)?;
            // Operators without a derivative on the path may stop some of these gradients.
            let mut fewer = arrives.clone();
            for (&j, gradient) in followed.iter().zip(&found) {
                fewer[j] |= carries[j] && gradient.is_some();
            }
            if fewer == carries {
                break (graph, adjoints, elements, found);
            }
            carries = fewer;
        };
        let (of_carried, rest) = found.split_at(followed.len());
        let (of_slices, of_captured) = rest.split_at(flow.slices_with_grad.len());
        let present = |indices: &[usize], found: &[Option<ValueId>]| -> Vec<(usize, ValueId)> {
            indices.iter().zip(found).filter_map(|(&k, id)| Some((k, (*id)?))).collect()
        };
        Ok(Some(Backward {
            graph,
            forward_nodes: body.nodes.len(),
            forward_values: body.value_count(),
            carries: (0..carried).filter(|&j| carries[j]).collect(),
            adjoints,
            elements,
            of_carried: present(&followed, of_carried).into_iter().collect(),
            of_slices: present(&flow.slices_with_grad, of_slices),
            of_captured: present(&flow.captures_with_grad, of_captured),
            forward_outputs: Vec::new(),
            states: Vec::new(),
        }))
    }

    /// Sets the outputs of the gradient's body: next gradients of carried values, next sums, and gradients of slices,
    /// which are collected.
    fn append_outputs(&mut self, ports: &Ports, grows: bool) {
        let graph = &mut self.graph;
        self.forward_outputs = std::mem::take(&mut graph.outputs);
        for &j in &self.carries {
            let adjoint = self.adjoints[j].expect("it is carried");
            self.states.push(adjoint);
            let next = self.of_carried.get(&j).copied();
            let like = if grows { ports.carried_in[j] } else { adjoint };
            let next = next.unwrap_or_else(|| zeros_like(graph, like));
            graph.outputs.push(next);
        }
        for &(c, gradient) in &self.of_captured {
            let captured = ports.captured[c];
            let name = graph.name_of(captured).to_owned();
            let ty = gradient_type(&graph.value(captured).ty);
            let sum = graph.add_value(&format!("{name}_grad_sum"), ty.clone());
            let next = graph.add_value(&format!("{name}_grad_next"), ty);
            let inputs = [Some(sum), Some(gradient)];
            graph.nodes.push(Node::new("", "Add", &inputs, &[Some(next)], Attrs::new()));
            self.states.push(sum);
            graph.outputs.push(next);
        }
        graph.outputs.extend(self.of_slices.iter().map(|&(_, gradient)| gradient));
    }
}

/// Scanned inputs of the gradient of a loop.
struct Scans {
    /// Values in the body, values outside, and their axes.
    inputs: Vec<(ValueId, ValueId, ScanAxis)>,
    /// Results of the forward body that the forward node collects in addition, and their values outside.
    added: Vec<(ValueId, ValueId)>,
    /// True if the forward node runs from the last slice to the first.
    is_reversed: bool,
}

impl Repeat {
    pub(super) fn gradient(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let r = &self.repetition;
        let node = cx.node().clone();
        let mut body = subgraph(&node, BODY)?.clone();
        let ports = Ports::new(&node, &body, r);
        let flow = Flow::new(self, cx, &body, &ports);
        let sources: Vec<(ValueId, ValueId)> = flow.sources(&ports).into_iter().map(|id| (id, id)).collect();
        (cx.passes.decompose_on_path)(&mut body, &sources, &flow.targets(&ports)).map_err(subgraph_error)?;
        let Some(mut back) = Backward::new(cx, &body, &ports, &flow, r.carried)? else { return Ok(()) };
        let gives = back.carries.iter().any(|&j| cx.needs_grad(self.carried_input(j)));
        if !gives && back.of_slices.is_empty() && back.of_captured.is_empty() {
            return Ok(());
        }

        // A carried value changes its shape if its type in the body differs from its type before the first iteration. A
        // value of unknown rank may change its shape.
        let changes = |j: usize| {
            let before = cx.input(self.carried_input(j));
            let inside = &back.graph.value(ports.carried_in[j]).ty;
            let is_unranked = matches!(inside, ValueType::Tensor(_, None));
            r.conditional && (is_unranked || before.is_ok_and(|id| cx.ty(id) != inside))
        };
        let grows = back.carries.iter().any(|&j| changes(j));
        let something_grows = (0..r.carried).any(changes);
        back.append_outputs(&ports, grows);

        let selected = Residuals::select(&back.graph, back.forward_nodes, r)?;
        let outer = outer_sizes(cx);
        let mut saved = selected.saved.iter();
        if grows || something_grows && saved.any(|&id| !has_fixed_shape(&back.graph, id, &outer)) {
            return self.emit_growing(cx, back, &ports, &flow, selected);
        }
        self.emit_scan(cx, &node, back, &ports, &flow, &selected)
    }

    /// Emits the gradient as a loop with accumulators of growing shapes.
    fn emit_growing(
        &self,
        cx: &mut Grad<'_>,
        back: Backward,
        ports: &Ports,
        flow: &Flow,
        residuals: Residuals,
    ) -> Result<(), OpError> {
        let Backward { graph, carries, elements, of_captured, .. } = back;
        let mut initial = Vec::with_capacity(back.states.len());
        for &j in &carries {
            let name = graph.name_of(ports.carried_out[j]).to_owned();
            initial.push(match cx.output_grad(j) {
                Some(gradient) => gradient,
                None => {
                    let last = cx.output(j, &name);
                    let dtype =
                        graph.value(ports.carried_out[j]).ty.dtype().map_or(DType::F32, gradient_dtype);
                    zeros_like_value(cx, last, dtype)
                }
            });
        }
        for &(c, _) in &of_captured {
            initial.push(zeros_like_input(cx, ports.explicit_count + c)?);
        }
        let arrived = flow.arriving.iter().zip(&elements);
        let carried = self.repetition.carried;
        let collected = arrived
            .map(|(&k, &element)| (element, cx.output_grad(carried + k).expect("it arrives")))
            .collect();
        let growing = GrowingLoop {
            repetition: &self.repetition,
            graph,
            forward_nodes: back.forward_nodes,
            forward_values: back.forward_values,
            residuals,
            forward_outputs: back.forward_outputs,
            states: back.states,
            initial,
            collected,
        };
        let gradients = growing.emit(cx)?;
        self.set_state_gradients(cx, &carries, &of_captured, ports, &gradients);
        Ok(())
    }

    /// Sets the gradients of carried and captured values, which the gradient of the loop carries.
    fn set_state_gradients(
        &self,
        cx: &mut Grad<'_>,
        carries: &[usize],
        of_captured: &[(usize, ValueId)],
        ports: &Ports,
        gradients: &[ValueId],
    ) {
        for (&j, &gradient) in carries.iter().zip(gradients) {
            if cx.needs_grad(self.carried_input(j)) {
                cx.set_grad(self.carried_input(j), gradient);
            }
        }
        for (&(c, _), &gradient) in of_captured.iter().zip(&gradients[carries.len()..]) {
            cx.set_grad(ports.explicit_count + c, gradient);
        }
    }

    /// Emits the gradient as a Scan over saved values, slices, and gradients of collected values.
    fn emit_scan(
        &self,
        cx: &mut Grad<'_>,
        node: &Node,
        back: Backward,
        ports: &Ports,
        flow: &Flow,
        selected: &Residuals,
    ) -> Result<(), OpError> {
        let r = &self.repetition;
        let mut forward = back.graph.clone();
        forward.nodes.truncate(back.forward_nodes);
        forward.outputs.clone_from(&back.forward_outputs);
        let mut scans = self.saved_scans(cx, node, &back.graph, &mut forward, ports, selected);
        self.add_scans_from_outside(cx, &mut scans, &back.elements, ports, flow, selected)?;

        // The body of the gradient.
        let Backward { mut graph, carries, of_slices, of_captured, states, .. } = back;
        selected.retain_recomputed(&mut graph, back.forward_nodes, r);
        graph.name = format!("{}_grad", graph.name);
        graph.remove_unused();
        (cx.passes.remove_updates)(&mut graph).map_err(subgraph_error)?;
        let mut outer: Vec<ValueId> = Vec::new();
        let mut inner: Vec<ValueId> = Vec::new();
        for (c, &id) in ports.captured.iter().enumerate() {
            if is_used(&graph, id) {
                inner.push(id);
                outer.push(cx.input(ports.explicit_count + c)?);
            }
        }
        let scanned = scans.inputs.iter().map(|&(id, ..)| id);
        graph.inputs = states.iter().copied().chain(scanned).chain(inner).collect();
        for id in graph.value_ids().skip(back.forward_values) {
            let name = format!("{}{BODY}/{}", cx.prefix, graph.name_of(id));
            graph.rename(id, &name);
        }
        (cx.passes.infer_added)(&mut graph).map_err(subgraph_error)?;
        self.collect_saved(cx, forward, &scans);

        let mut inputs: Vec<Option<ValueId>> = Vec::new();
        for &j in &carries {
            inputs.push(Some(match cx.output_grad(j) {
                Some(gradient) => gradient,
                None => zeros_like_input(cx, self.carried_input(j))?,
            }));
        }
        for &(c, _) in &of_captured {
            inputs.push(Some(zeros_like_input(cx, ports.explicit_count + c)?));
        }
        inputs.extend(scans.inputs.iter().map(|&(_, outside, _)| Some(outside)));
        inputs.extend(outer.iter().copied().map(Some));
        let read: Vec<ScanAxis> = scans.inputs.iter().map(|&(.., along)| along).collect();
        let written: Vec<ScanAxis> = of_slices
            .iter()
            .map(|&(s, _)| ScanAxis { axis: r.scanned[s].axis, reversed: !r.scanned[s].reversed })
            .collect();
        let mut attrs = Attrs::new().with("num_scan_inputs", scans.inputs.len() as i64).with(BODY, graph);
        attrs = set_scan_axes(attrs, "input", &read);
        attrs = set_scan_axes(attrs, "output", &written);
        let count = states.len() + of_slices.len();
        let gradients = cx.add_node("", "Scan", &inputs, count, attrs);
        cx.nodes.last_mut().expect("just added").captures = outer.len();
        let (of_states, of_scans) = gradients.split_at(states.len());
        self.set_state_gradients(cx, &carries, &of_captured, ports, of_states);
        for (&(s, _), &gradient) in of_slices.iter().zip(of_scans) {
            cx.set_grad(self.scanned_input(s), gradient);
        }
        Ok(())
    }

    /// Returns the scans over saved values. Saved values that the forward node does not collect yet become results of
    /// `forward`.
    fn saved_scans(
        &self,
        cx: &mut Grad<'_>,
        node: &Node,
        graph: &Graph,
        forward: &mut Graph,
        ports: &Ports,
        selected: &Residuals,
    ) -> Scans {
        let r = &self.repetition;
        let is_reversed = r.scanned.first().is_some_and(|along| along.reversed);
        let mut saved = selected.saved.clone();
        if saved.is_empty() && r.conditional {
            // At least one value is collected: its length is the number of iterations.
            saved.push(graph.inputs[0]);
        }
        let mut scans = Scans { inputs: Vec::new(), added: Vec::new(), is_reversed };
        for &id in &saved {
            let collects = |&k: &usize| ports.collected[k] == id && r.stacked[k].reversed == is_reversed;
            if let Some(k) = (0..ports.collected.len()).find(collects) {
                let ScanAxis { axis, reversed } = r.stacked[k];
                let outside = cx.output(r.carried + k, &graph.value(id).name);
                scans.inputs.push((id, outside, ScanAxis { axis, reversed: !reversed }));
                continue;
            }
            let outer_name = node.present_outputs().next().map_or("", |id| cx.name_of(id));
            let outside = cx.value(&format!("{outer_name}_{}", graph.name_of(id)), ValueType::Unknown);
            let is_result = forward.outputs.contains(&id) || forward.inputs.contains(&id);
            let result = if is_result {
                let name = format!("{}_saved", graph.name_of(id));
                let copy = forward.add_value(&name, forward.value(id).ty.clone());
                forward.nodes.push(Node::new("", "Identity", &[Some(id)], &[Some(copy)], Attrs::new()));
                copy
            } else {
                id
            };
            scans.added.push((result, outside));
            scans.inputs.push((id, outside, ScanAxis { axis: 0, reversed: !is_reversed }));
        }
        scans
    }

    /// Adds the scans over slices of the loop, and over gradients of collected values.
    fn add_scans_from_outside(
        &self,
        cx: &Grad<'_>,
        scans: &mut Scans,
        elements: &[ValueId],
        ports: &Ports,
        flow: &Flow,
        selected: &Residuals,
    ) -> Result<(), OpError> {
        let r = &self.repetition;
        for (s, &slice) in ports.slices.iter().enumerate() {
            if selected.slices.contains(&slice) || (s == 0 && scans.inputs.is_empty()) {
                let ScanAxis { axis, reversed } = r.scanned[s];
                let outside = cx.input(self.scanned_input(s))?;
                scans.inputs.push((slice, outside, ScanAxis { axis, reversed: !reversed }));
            }
        }
        // Random numbers depend on the position along the first scanned input. Its direction must be opposite to the
        // forward direction.
        if let Some(first) = scans.inputs.iter().position(|(.., along)| along.reversed != scans.is_reversed) {
            scans.inputs.swap(0, first);
        }
        for (&k, &element) in flow.arriving.iter().zip(elements) {
            let ScanAxis { axis, reversed } = r.stacked[k];
            let gradient = cx.output_grad(r.carried + k).expect("it arrives");
            scans.inputs.push((element, gradient, ScanAxis { axis, reversed: !reversed }));
        }
        Ok(())
    }

    /// Lets the forward node collect the saved values.
    fn collect_saved(&self, cx: &mut Grad<'_>, mut forward: Graph, scans: &Scans) {
        let r = &self.repetition;
        forward.outputs.extend(scans.added.iter().map(|&(result, _)| result));
        forward.remove_unused();
        let results = r.carried + r.stacked.len();
        let added = scans.added.iter().map(|_| ScanAxis { axis: 0, reversed: scans.is_reversed });
        let stacked: Vec<ScanAxis> = r.stacked.iter().copied().chain(added).collect();
        cx.replace_node(|outside, index| {
            let node = &mut outside.nodes[index];
            node.outputs.resize(results, None);
            node.outputs.extend(scans.added.iter().map(|&(_, id)| Some(id)));
            let mut attrs = std::mem::take(&mut node.attrs).with(BODY, forward);
            if !r.conditional {
                attrs = set_scan_axes(attrs, "output", &stacked);
            }
            node.attrs = attrs;
        });
    }
}
