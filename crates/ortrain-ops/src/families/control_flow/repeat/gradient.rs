//! Gradient of a loop.

use ortrain_graph::{Attrs, DType, Graph, Node, Tensor, ValueId, ValueType};
use ortrain_program::ScanAxis;
use rustc_hash::{FxHashMap, FxHashSet};

use super::Repeat;
use crate::OpError;
use crate::dependence::dependent_values;
use crate::families::control_flow::growing_loop::{GrowingLoop, has_fixed_shape, outer_sizes};
use crate::families::control_flow::residuals::Residuals;
use crate::grad::Grad;
use crate::support::subgraphs::{BODY, is_used, subgraph, subgraph_error, zeros_like};

/// Returns the values on which `ends` depend through floats, including `ends`.
pub(super) fn float_ancestors(graph: &Graph, ends: impl Iterator<Item = ValueId>) -> FxHashSet<ValueId> {
    let mut leading: FxHashSet<ValueId> = ends.collect();
    for node in graph.nodes.iter().rev() {
        if node.present_outputs().any(|output| leading.contains(&output)) {
            let is_float = |id: &ValueId| graph.value(*id).ty.dtype().is_some_and(DType::is_float);
            leading.extend(node.present_inputs().filter(is_float));
        }
    }
    leading
}

/// Returns zeros of the shape and type of input `k`.
pub(super) fn zeros_like_input(cx: &mut Grad<'_>, k: usize) -> Result<ValueId, OpError> {
    let like = cx.input(k)?;
    let dtype = cx.dtype(like)?;
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

impl Repeat {
    pub(super) fn gradient(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let r = &self.repetition;
        let node = cx.node().clone();
        let explicit_count = node.inputs.len() - node.captures;
        let mut body = subgraph(&node, BODY)?.clone();
        let carried_in: Vec<ValueId> = body.inputs[r.leading_inputs()..][..r.carried].to_vec();
        let carried_out: Vec<ValueId> = body.outputs[r.leading_outputs()..][..r.carried].to_vec();
        let slices: Vec<ValueId> = body.inputs[r.leading_inputs() + r.carried..r.formal_inputs()].to_vec();
        let captured: Vec<ValueId> = body.inputs[r.formal_inputs()..].to_vec();
        let collected: Vec<ValueId> = body.outputs[r.leading_outputs() + r.carried..].to_vec();

        // Carried values that depend on values with a required gradient, over any number of iterations.
        let slices_with_grad: Vec<usize> =
            (0..slices.len()).filter(|&s| cx.needs_grad(self.scanned_input(s))).collect();
        let captures_with_grad: Vec<usize> =
            (0..captured.len()).filter(|&c| cx.needs_grad(explicit_count + c)).collect();
        let fixed = slices_with_grad
            .iter()
            .map(|&s| slices[s])
            .chain(captures_with_grad.iter().map(|&c| captured[c]));
        let fixed: Vec<ValueId> = fixed.collect();
        let mut depends: Vec<bool> = (0..r.carried).map(|j| cx.needs_grad(self.carried_input(j))).collect();
        loop {
            let on: Vec<ValueId> = (0..r.carried)
                .filter(|&j| depends[j])
                .map(|j| carried_in[j])
                .chain(fixed.iter().copied())
                .collect();
            let reached = dependent_values(&body, &on);
            let more = (0..r.carried).map(|j| depends[j] || reached.contains(&carried_out[j])).collect();
            if depends == more {
                break;
            }
            depends = more;
        }
        let followed: Vec<usize> = (0..r.carried).filter(|&j| depends[j]).collect();
        let targets: Vec<ValueId> =
            followed.iter().map(|&j| carried_in[j]).chain(fixed.iter().copied()).collect();
        let arriving: Vec<usize> =
            (0..collected.len()).filter(|&k| cx.output_grad(r.carried + k).is_some()).collect();
        let possible: Vec<(ValueId, ValueId)> = followed
            .iter()
            .map(|&j| carried_out[j])
            .chain(arriving.iter().map(|&k| collected[k]))
            .map(|id| (id, id))
            .collect();
        (cx.passes.decompose_on_path)(&mut body, &possible, &targets).map_err(subgraph_error)?;
        let (forward_nodes, forward_values) = (body.nodes.len(), body.value_count());

        // Carried values with a gradient that comes from outside or from a later iteration.
        let arrives: Vec<bool> = (0..r.carried).map(|j| depends[j] && cx.output_grad(j).is_some()).collect();
        let mut carries = arrives.clone();
        loop {
            let through =
                carried_out.iter().zip(&carries).filter(|(_, carries)| **carries).map(|(&id, _)| id);
            let reaching = float_ancestors(&body, through.chain(arriving.iter().map(|&k| collected[k])));
            let more = (0..r.carried)
                .map(|j| carries[j] || depends[j] && reaching.contains(&carried_in[j]))
                .collect();
            if carries == more {
                break;
            }
            carries = more;
        }
        let (mut graph, adjoints, elements, found) = loop {
            let mut graph = body.clone();
            // The name differs from gradient names: an input that is passed on is no gradient.
            let add_grad_input = |graph: &mut Graph, id: ValueId| {
                let (name, ty) = (format!("{}_grad_in", graph.name_of(id)), graph.value(id).ty.clone());
                graph.add_value(&name, ty)
            };
            let adjoints: Vec<Option<ValueId>> = (0..r.carried)
                .map(|j| carries[j].then(|| add_grad_input(&mut graph, carried_out[j])))
                .collect();
            let elements: Vec<ValueId> =
                arriving.iter().map(|&k| add_grad_input(&mut graph, collected[k])).collect();
            let mut seeds: Vec<(ValueId, ValueId)> = Vec::new();
            seeds.extend(
                carried_out.iter().zip(&adjoints).filter_map(|(&id, adjoint)| Some((id, (*adjoint)?))),
            );
            seeds.extend(arriving.iter().zip(&elements).map(|(&k, &element)| (collected[k], element)));
            if seeds.is_empty() {
                return Ok(());
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
        let of_carried: FxHashMap<usize, ValueId> =
            followed.iter().zip(&found).filter_map(|(&j, id)| Some((j, (*id)?))).collect();
        let of_slices: Vec<(usize, ValueId)> = slices_with_grad
            .iter()
            .zip(&found[followed.len()..])
            .filter_map(|(&s, id)| Some((s, (*id)?)))
            .collect();
        let of_captured: Vec<(usize, ValueId)> = captures_with_grad
            .iter()
            .zip(&found[followed.len() + slices_with_grad.len()..])
            .filter_map(|(&c, id)| Some((c, (*id)?)))
            .collect();
        let carries: Vec<usize> = (0..r.carried).filter(|&j| carries[j]).collect();
        let gives = carries.iter().any(|&j| cx.needs_grad(self.carried_input(j)));
        if !gives && of_slices.is_empty() && of_captured.is_empty() {
            return Ok(());
        }

        // A carried value changes its shape if its type in the body differs from its type before the first iteration. A
        // value of unknown rank may change its shape.
        let changes = |j: usize| {
            let before = cx.input(self.carried_input(j));
            let inside = &graph.value(carried_in[j]).ty;
            let is_unranked = matches!(inside, ValueType::Tensor(_, None));
            r.conditional && (is_unranked || before.is_ok_and(|id| cx.ty(id) != inside))
        };
        let grows = carries.iter().any(|&j| changes(j));
        let something_grows = (0..r.carried).any(changes);

        // Outputs of the gradient's body: next gradients of carried values, next sums, and gradients of slices, which
        // are collected.
        let forward_outputs = std::mem::take(&mut graph.outputs);
        let mut states: Vec<ValueId> = Vec::new();
        for &j in &carries {
            let adjoint = adjoints[j].expect("it is carried");
            states.push(adjoint);
            let next = of_carried.get(&j).copied();
            let like = if grows { carried_in[j] } else { adjoint };
            let next = next.unwrap_or_else(|| zeros_like(&mut graph, like));
            graph.outputs.push(next);
        }
        for &(c, gradient) in &of_captured {
            let (name, ty) = (graph.name_of(captured[c]).to_owned(), graph.value(captured[c]).ty.clone());
            let sum = graph.add_value(&format!("{name}_grad_sum"), ty.clone());
            let next = graph.add_value(&format!("{name}_grad_next"), ty);
            let inputs = [Some(sum), Some(gradient)];
            graph.nodes.push(Node::new("", "Add", &inputs, &[Some(next)], Attrs::new()));
            states.push(sum);
            graph.outputs.push(next);
        }
        graph.outputs.extend(of_slices.iter().map(|&(_, gradient)| gradient));

        let selected = Residuals::select(&graph, forward_nodes, r)?;
        let outer = outer_sizes(cx);
        if grows || something_grows && selected.saved.iter().any(|&id| !has_fixed_shape(&graph, id, &outer)) {
            let mut initial = Vec::with_capacity(states.len());
            for &j in &carries {
                let name = graph.name_of(carried_out[j]).to_owned();
                initial.push(match cx.output_grad(j) {
                    Some(gradient) => gradient,
                    None => {
                        let last = cx.output(j, &name);
                        let dtype = graph.value(carried_out[j]).ty.dtype().unwrap_or(DType::F32);
                        zeros_like_value(cx, last, dtype)
                    }
                });
            }
            for &(c, _) in &of_captured {
                initial.push(zeros_like_input(cx, explicit_count + c)?);
            }
            let arrived = arriving.iter().zip(&elements);
            let collected = arrived
                .map(|(&k, &element)| (element, cx.output_grad(r.carried + k).expect("it arrives")))
                .collect();
            let growing = GrowingLoop {
                repetition: r,
                graph,
                forward_nodes,
                forward_values,
                residuals: selected,
                forward_outputs,
                states,
                initial,
                collected,
            };
            let gradients = growing.emit(cx)?;
            for (&j, &gradient) in carries.iter().zip(&gradients) {
                if cx.needs_grad(self.carried_input(j)) {
                    cx.set_grad(self.carried_input(j), gradient);
                }
            }
            for (&(c, _), &gradient) in of_captured.iter().zip(&gradients[carries.len()..]) {
                cx.set_grad(explicit_count + c, gradient);
            }
            return Ok(());
        }
        let direction = r.scanned.first().is_some_and(|along| along.reversed);
        let mut saved = selected.saved.clone();
        if saved.is_empty() && r.conditional {
            // At least one value is collected: its length is the number of iterations.
            saved.push(graph.inputs[0]);
        }
        let mut forward = graph.clone();
        forward.nodes.truncate(forward_nodes);
        forward.outputs = forward_outputs;

        // Scanned inputs of the gradient: saved values, slices, and gradients of collected values.
        let mut scans: Vec<(ValueId, ValueId, ScanAxis)> = Vec::new();
        let mut more: Vec<(ValueId, ValueId)> = Vec::new();
        for &id in &saved {
            let collects = |&k: &usize| collected[k] == id && r.stacked[k].reversed == direction;
            if let Some(k) = (0..collected.len()).find(collects) {
                let ScanAxis { axis, reversed } = r.stacked[k];
                let outside = cx.output(r.carried + k, &graph.value(id).name);
                scans.push((id, outside, ScanAxis { axis, reversed: !reversed }));
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
            more.push((result, outside));
            scans.push((id, outside, ScanAxis { axis: 0, reversed: !direction }));
        }
        for (s, &slice) in slices.iter().enumerate() {
            if selected.slices.contains(&slice) || (s == 0 && scans.is_empty()) {
                let ScanAxis { axis, reversed } = r.scanned[s];
                let outside = cx.input(self.scanned_input(s))?;
                scans.push((slice, outside, ScanAxis { axis, reversed: !reversed }));
            }
        }
        // Random numbers depend on the position along the first scanned input. Its direction must be opposite to the
        // forward direction.
        if let Some(first) = scans.iter().position(|(.., along)| along.reversed != direction) {
            scans.swap(0, first);
        }
        for (&k, &element) in arriving.iter().zip(&elements) {
            let ScanAxis { axis, reversed } = r.stacked[k];
            let gradient = cx.output_grad(r.carried + k).expect("it arrives");
            scans.push((element, gradient, ScanAxis { axis, reversed: !reversed }));
        }

        // The body of the gradient.
        selected.retain_recomputed(&mut graph, forward_nodes, r);
        graph.name = format!("{}_grad", graph.name);
        graph.remove_unused();
        (cx.passes.remove_updates)(&mut graph).map_err(subgraph_error)?;
        let mut outer: Vec<ValueId> = Vec::new();
        let mut inner: Vec<ValueId> = Vec::new();
        for (c, &id) in captured.iter().enumerate() {
            if is_used(&graph, id) {
                inner.push(id);
                outer.push(cx.input(explicit_count + c)?);
            }
        }
        graph.inputs = states.iter().copied().chain(scans.iter().map(|&(id, ..)| id)).chain(inner).collect();
        for id in graph.value_ids().skip(forward_values) {
            let name = format!("{}{BODY}/{}", cx.prefix, graph.name_of(id));
            graph.rename(id, &name);
        }
        (cx.passes.infer_added)(&mut graph).map_err(subgraph_error)?;

        // The forward node collects the saved values.
        forward.outputs.extend(more.iter().map(|&(result, _)| result));
        forward.remove_unused();
        let results = r.carried + r.stacked.len();
        let stacked: Vec<ScanAxis> = (r.stacked.iter().copied())
            .chain(more.iter().map(|_| ScanAxis { axis: 0, reversed: direction }))
            .collect();
        cx.replace_node(|outside, index| {
            let node = &mut outside.nodes[index];
            node.outputs.resize(results, None);
            node.outputs.extend(more.iter().map(|&(_, id)| Some(id)));
            let mut attrs = std::mem::take(&mut node.attrs).with(BODY, forward);
            if !r.conditional {
                attrs = set_scan_axes(attrs, "output", &stacked);
            }
            node.attrs = attrs;
        });

        let mut inputs: Vec<Option<ValueId>> = Vec::new();
        for &j in &carries {
            inputs.push(Some(match cx.output_grad(j) {
                Some(gradient) => gradient,
                None => zeros_like_input(cx, self.carried_input(j))?,
            }));
        }
        for &(c, _) in &of_captured {
            inputs.push(Some(zeros_like_input(cx, explicit_count + c)?));
        }
        inputs.extend(scans.iter().map(|&(_, outside, _)| Some(outside)));
        inputs.extend(outer.iter().copied().map(Some));
        let read: Vec<ScanAxis> = scans.iter().map(|&(.., along)| along).collect();
        let written: Vec<ScanAxis> = of_slices
            .iter()
            .map(|&(s, _)| ScanAxis { axis: r.scanned[s].axis, reversed: !r.scanned[s].reversed })
            .collect();
        let mut attrs = Attrs::new().with("num_scan_inputs", scans.len() as i64).with(BODY, graph);
        attrs = set_scan_axes(attrs, "input", &read);
        attrs = set_scan_axes(attrs, "output", &written);
        let count = states.len() + of_slices.len();
        let gradients = cx.add_node("", "Scan", &inputs, count, attrs);
        cx.nodes.last_mut().expect("just added").captures = outer.len();
        let (of_states, of_scans) = gradients.split_at(states.len());
        for (&j, &gradient) in carries.iter().zip(of_states) {
            if cx.needs_grad(self.carried_input(j)) {
                cx.set_grad(self.carried_input(j), gradient);
            }
        }
        for (&(c, _), &gradient) in of_captured.iter().zip(&of_states[carries.len()..]) {
            cx.set_grad(explicit_count + c, gradient);
        }
        for (&(s, _), &gradient) in of_slices.iter().zip(of_scans) {
            cx.set_grad(self.scanned_input(s), gradient);
        }
        Ok(())
    }
}
