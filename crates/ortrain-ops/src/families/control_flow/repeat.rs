//! `Loop` and `Scan`: repeated execution of a body.
//!
//! Loop-1, 11, 13, 16, 19, 21, 23, 24, 25 and Scan-8, 9, 11, 16, 19, 21, 23, 24, 25 of ONNX. A Loop runs while its
//! condition is true, up to a maximum number of iterations. A Scan runs once for each slice of its scanned inputs. Both
//! carry values from one iteration to the next, and collect other values.
//!
//! If the number of iterations is known when a program is built, and all iterations together have few nodes, they are
//! unrolled. Otherwise the body is a separate schedule. A value that a Loop carries may change its shape, unless the
//! model collects it. Sequences cannot be carried.
//!
//! The gradient of both is a Scan in the opposite direction. The gradient carries the gradients of carried values, and
//! sums of the gradients of captured values. It scans values of the forward body, which the forward node collects for
//! it. Two kinds of values are recomputed instead of collected: integers, except the inputs of the body, and values
//! that only depend on captured values.
//!
//! Random numbers of a body are therefore drawn once. In a recomputed subgraph of the body the same random numbers are
//! drawn again. They depend on names, and on the position along the first scanned value, and both nodes share these.
//!
//! If values that a Loop carries change their shape, the gradient is a Loop that reads tapes (see `GrowingLoop`).

use ortrain_graph::{Attr, Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId, ValueType};
use ortrain_program::ScanAxis;
use rustc_hash::{FxHashMap, FxHashSet};

use super::growing_loop::{GrowingLoop, has_fixed_shape, outer_sizes};
use crate::OpError;
use crate::dependence::dependent_values;
use crate::families::control_flow::common_type::common_type;
use crate::families::control_flow::residuals::Residuals;
use crate::grad::Grad;
use crate::infer::{Infer, normalize_axis};
use crate::iterations::known_iteration_count;
use crate::op::{Definition, Op, Placement, Repetition};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::subgraphs::{
    BODY, add_copy, clear_folded, is_used, set_capture_types, subgraph, subgraph_error, zeros_like,
};
use crate::type_merge::{merge_advised, merge_types};

/// Maximum number of inferences of a body while the types of carried values change. Nested bodies are inferred
/// repeatedly in each of them, so the number is small.
const MAX_ROUNDS: usize = 4;

/// Maximum nesting depth of loops.
const MAX_LOOP_DEPTH: usize = 8;

struct Repeat {
    repetition: Repetition,
}

/// Returns the nesting depth of the loops in a graph.
fn loop_depth(graph: &Graph) -> usize {
    let of = |node: &Node| {
        let inside = Graph::subgraphs(node).map(|(_, graph)| loop_depth(graph)).max().unwrap_or(0);
        inside + usize::from(node.attrs.0.contains_key(BODY))
    };
    graph.nodes.iter().map(of).max().unwrap_or(0)
}

/// Returns the body of a node, after a check of the nesting depth.
fn checked_body(node: &Node) -> Result<&Graph, OpError> {
    let body = subgraph(node, BODY)?;
    match loop_depth(body) {
        deep if deep >= MAX_LOOP_DEPTH => Err(OpError::unsupported(format!(
            "loops are nested {} deep; at most {MAX_LOOP_DEPTH} levels are supported",
            deep + 1
        ))),
        _ => Ok(body),
    }
}

/// Result of the type inference of a body.
struct InferredBody {
    graph: Graph,
    /// Types of the carried values that hold in every iteration.
    carried: Vec<ValueType>,
    outputs: Vec<ValueType>,
    /// Condition after an iteration, if it is constant.
    continues: Option<bool>,
    /// True if a declared shape or a branch contradicts the inferred types.
    contradicts: bool,
}

/// Returns element type and shape of a tensor that is carried, scanned or collected.
fn tensor_type(ty: &ValueType, what: impl FnOnce() -> String) -> Result<(DType, Option<&Shape>), OpError> {
    match ty {
        ValueType::Tensor(dtype, shape) => Ok((*dtype, shape.as_ref())),
        ValueType::Sequence(_) => {
            Err(OpError::unsupported(format!("{} is a sequence; only tensors are supported here", what())))
        }
        ValueType::Unknown => Err(OpError::invalid(format!("the type of {} is not declared", what()))),
    }
}

/// Returns a type that includes both types of a value that an iteration may change.
fn widen_type(name: &str, now: &ValueType, next: &ValueType) -> ValueType {
    let (ValueType::Tensor(dtype, Some(from)), ValueType::Tensor(_, Some(to))) = (now, next) else {
        return now.dtype().map_or(ValueType::Unknown, |dtype| ValueType::Tensor(dtype, None));
    };
    if from.rank() != to.rank() {
        return ValueType::Tensor(*dtype, None);
    }
    let dim = |(axis, (x, y)): (usize, (&Dim, &Dim))| {
        if x == y { x.clone() } else { Dim::symbol(&format!("{name}.{axis}")) }
    };
    ValueType::Tensor(*dtype, Some(from.iter().zip(to.iter()).enumerate().map(dim).collect()))
}

impl Repeat {
    /// Returns the index of carried value `j` among the node's inputs.
    fn carried_input(&self, j: usize) -> usize {
        self.repetition.leading_inputs() + j
    }

    /// Returns the index of scanned value `s` among the node's inputs.
    fn scanned_input(&self, s: usize) -> usize {
        self.repetition.leading_inputs() + self.repetition.carried + s
    }

    /// Infers the types in the body.
    fn infer_body(&self, cx: &Infer<'_>) -> Result<InferredBody, OpError> {
        let r = &self.repetition;
        let node = cx.node();
        let body = subgraph(node, BODY)?;
        let name_of = |k: usize| body.name_of(body.inputs[k]).to_owned();
        let (lead, n) = (r.leading_inputs(), r.carried);
        let mut carried: Vec<ValueType> = Vec::with_capacity(n);
        for j in 0..n {
            let ty = cx.ty(self.carried_input(j));
            tensor_type(ty, || format!("the carried value {:?}", name_of(lead + j)))?;
            carried.push(ty.clone());
        }
        let mut slices: Vec<ValueType> = Vec::with_capacity(r.scanned.len());
        for (s, along) in r.scanned.iter().enumerate() {
            let name = || format!("the scanned value {:?}", name_of(lead + n + s));
            let (dtype, shape) = tensor_type(cx.ty(self.scanned_input(s)), name)?;
            let rest = |shape: &Shape| -> Result<Shape, OpError> {
                let axis = normalize_axis(along.axis, shape.rank())
                    .map_err(|error| OpError::invalid(format!("scan_input_axes: {error}")))?;
                Ok(shape
                    .iter()
                    .enumerate()
                    .filter(|&(at, _)| at != axis)
                    .map(|(_, dim)| dim.clone())
                    .collect())
            };
            slices.push(ValueType::Tensor(dtype, shape.map(rest).transpose()?));
        }
        for round in 1.. {
            let mut graph = body.clone();
            let inputs = graph.inputs.clone();
            let mismatch = |graph: &Graph, id: ValueId, actual: &ValueType| {
                let (name, ty) = (graph.name_of(id), &graph.value(id).ty);
                OpError::invalid(format!("input {name:?} of {BODY} is declared as {ty}, but gets {actual}"))
            };
            if r.conditional {
                for (k, dtype) in [DType::I64, DType::Bool].into_iter().enumerate() {
                    // One element, as a scalar or a vector, as declared.
                    let axis_count = graph.value(inputs[k]).ty.shape().map_or(0, Shape::rank).min(1);
                    let element_ty = ValueType::tensor(dtype, &vec![1; axis_count]);
                    let merged = merge_advised(&graph.value(inputs[k]).ty, element_ty.clone());
                    let ty = merged.map_err(|_| mismatch(&graph, inputs[k], &element_ty))?;
                    graph.value_mut(inputs[k]).ty = ty;
                }
                // The condition is true whenever an iteration runs.
                let dims = graph.value(inputs[1]).ty.shape().and_then(Shape::concrete).unwrap_or_default();
                graph.value_mut(inputs[1]).constant = Some(Tensor::filled(DType::Bool, &dims, 1.0));
            }
            for (k, outer_ty) in carried.iter().chain(&slices).enumerate() {
                let id = inputs[lead + k];
                // A value that a Loop carries may have other shapes than the declared one.
                let declared = match &graph.value(id).ty {
                    ValueType::Tensor(dtype, _) if r.conditional && k < n => ValueType::Tensor(*dtype, None),
                    ty => ty.clone(),
                };
                let ty =
                    merge_advised(&declared, outer_ty.clone()).map_err(|_| mismatch(&graph, id, outer_ty))?;
                graph.value_mut(id).ty = ty;
            }
            set_capture_types(cx, BODY, &mut graph)?;
            let contradicts = (cx.passes.infer)(&mut graph).map_err(subgraph_error)?;
            let outputs: Vec<ValueType> =
                graph.outputs.iter().map(|&id| graph.value(id).ty.clone()).collect();
            let mut next = Vec::with_capacity(n);
            for (j, now) in carried.iter().enumerate() {
                let next_ty = &outputs[r.leading_outputs() + j];
                let name = name_of(lead + j);
                tensor_type(next_ty, || format!("the next value of {name:?}"))?;
                let unified = merge_types(now, next_ty.clone());
                next.push(match unified {
                    Ok(ty) if !r.conditional => ty,
                    _ if r.conditional && now.dtype() == next_ty.dtype() => widen_type(&name, now, next_ty),
                    _ => {
                        let same = if r.conditional { "" } else { " and shape" };
                        return Err(OpError::invalid(format!(
                            "the carried value {name:?} is {now}, but {BODY} returns {next_ty}; its type{same} must not \
                             change"
                        )));
                    }
                });
            }
            if next != carried && (r.conditional || round < MAX_ROUNDS) {
                carried = next;
                if r.conditional && round + 1 >= MAX_ROUNDS {
                    // In the last round only the element types are assumed.
                    for ty in &mut carried {
                        *ty = ty.dtype().map_or(ValueType::Unknown, |dtype| ValueType::Tensor(dtype, None));
                    }
                }
                continue;
            }
            let continues = r.conditional.then(|| constant_condition(&graph, graph.outputs[0])).flatten();
            clear_folded(&mut graph);
            return Ok(InferredBody { graph, carried, outputs, continues, contradicts });
        }
        unreachable!("types with only a known element type do not change")
    }
}

/// Returns the value of a constant condition.
pub(crate) fn constant_condition(graph: &Graph, id: ValueId) -> Option<bool> {
    match graph.value(id).constant.as_ref()?.to_i64()?.as_slice() {
        [one] => Some(*one != 0),
        _ => None,
    }
}

impl Op for Repeat {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let r = &self.repetition;
        let node = cx.node();
        let outputs = r.carried + r.stacked.len();
        if node.outputs.len() > outputs {
            let output_count = node.outputs.len();
            return Err(OpError::invalid(format!(
                "the node has {output_count} outputs, but {BODY} has {outputs}"
            )));
        }
        for k in r.leading_inputs()..r.formal_inputs() {
            if Repetition::own_input(node, k).is_none() {
                return Err(OpError::invalid(format!("input {k} is missing")));
            }
        }
        if r.conditional {
            for (k, dtype, what) in
                [(0, DType::I64, "the number of iterations"), (1, DType::Bool, "the condition")]
            {
                if Repetition::own_input(node, k).is_none() {
                    continue;
                }
                cx.expect_dtype(k, &dtype.to_string(), |actual| actual == dtype)?;
                if let Some(shape) = cx.shape(k)
                    && shape.iter().any(|dim| dim.known().is_some_and(|size| size != 1))
                {
                    return Err(OpError::invalid(format!("{what} has shape {shape}; one element is needed")));
                }
            }
        }
        let typed = match self.infer_body(cx) {
            // A body that never runs may be invalid: it may read a row of a matrix without rows.
            Err(_) if self.has_no_iterations(cx) => {
                for k in 0..r.carried {
                    cx.set_output_type(k, cx.ty(self.carried_input(k)).clone());
                }
                return Ok(());
            }
            typed => typed?,
        };
        if r.conditional && typed.outputs[0].dtype().is_some_and(|dtype| dtype != DType::Bool) {
            let condition_ty = &typed.outputs[0];
            return Err(OpError::invalid(format!(
                "the condition of {BODY} must be a bool, got {condition_ty}"
            )));
        }
        let count = match self.slice_count(cx)? {
            Some(dim) => Some(dim),
            None => known_iteration_count(cx.graph(), node, r, typed.continues)
                .map(|count| Dim::Known(count as usize)),
        };
        let input_shapes: Vec<&Shape> = (0..node.inputs.len()).filter_map(|k| cx.shape(k)).collect();
        let outer: FxHashSet<&Dim> = input_shapes.iter().flat_map(|shape| shape.iter()).collect();
        for k in 0..node.outputs.len() {
            if k < r.carried {
                let ty = &typed.carried[k];
                cx.set_output_type(k, common_type(cx, k, (ty, ty), &outer)?);
                continue;
            }
            let name = || format!("the collected output {k}");
            let (dtype, shape) = tensor_type(&typed.outputs[r.leading_outputs() + k], name)?;
            let Some(shape) = shape else {
                cx.set_output(k, dtype, None);
                continue;
            };
            let axis = normalize_axis(r.stacked[k - r.carried].axis, shape.rank() + 1)
                .map_err(|error| OpError::invalid(format!("scan_output_axes: {error}")))?;
            let mut dims: Vec<Dim> = shape.iter().cloned().collect();
            dims.insert(axis, count.clone().unwrap_or_else(|| cx.unknown_dim(k, axis)));
            let known = |(at, dim): (usize, Dim)| {
                let is_known = at == axis || dim.known().is_some() || outer.contains(&dim);
                if is_known { dim } else { cx.unknown_dim(k, at) }
            };
            let shape: Shape = dims.into_iter().enumerate().map(known).collect();
            cx.set_output(k, dtype, Some(shape));
        }
        cx.contradicts |= typed.contradicts;
        cx.set_output_subgraph(BODY, typed.graph);
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        self.gradient(cx)
    }

    fn placement(&self) -> Placement {
        Placement::Repeat(self.repetition.clone())
    }
}

impl Repeat {
    /// Returns true for a Loop that is known to have no iterations, if none of its collected outputs is used.
    fn has_no_iterations(&self, cx: &Infer<'_>) -> bool {
        let r = &self.repetition;
        let collects = cx.node().outputs.iter().skip(r.carried).any(Option::is_some);
        r.conditional && !collects && known_iteration_count(cx.graph(), cx.node(), r, None) == Some(0)
    }

    /// Returns the number of slices of the scanned inputs, as far as it is known.
    fn slice_count(&self, cx: &Infer<'_>) -> Result<Option<Dim>, OpError> {
        let mut length: Option<(usize, Dim)> = None;
        for (s, along) in self.repetition.scanned.iter().enumerate() {
            let Some(shape) = cx.shape(self.scanned_input(s)) else { continue };
            let dim = shape[normalize_axis(along.axis, shape.rank())?].clone();
            match &length {
                Some((first, Dim::Known(size))) if dim.known().is_some_and(|other| other != *size) => {
                    return Err(OpError::invalid(format!(
                        "the scanned inputs {first} and {s} must have the same number of slices, got {size} and {dim}"
                    )));
                }
                Some((_, Dim::Known(_))) => {}
                _ => length = Some((s, dim)),
            }
        }
        Ok(length.map(|(_, dim)| dim))
    }

    fn gradient(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
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

/// Returns the values on which `ends` depend through floats, including `ends`.
fn float_ancestors(graph: &Graph, ends: impl Iterator<Item = ValueId>) -> FxHashSet<ValueId> {
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
fn zeros_like_input(cx: &mut Grad<'_>, k: usize) -> Result<ValueId, OpError> {
    let like = cx.input(k)?;
    let dtype = cx.dtype(like)?;
    Ok(zeros_like_value(cx, like, dtype))
}

/// Returns zeros of the shape of a value.
fn zeros_like_value(cx: &mut Grad<'_>, like: ValueId, dtype: DType) -> ValueId {
    let zero = Tensor::filled(dtype, &[1], 0.0);
    let shape = cx.shape_of(like);
    cx.add("ConstantOfShape", &[shape], Attrs::new().with("value", zero))
}

/// Sets axes and directions as attributes of a Scan; `what` is "input" or "output".
fn set_scan_axes(mut attrs: Attrs, what: &str, along: &[ScanAxis]) -> Attrs {
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

/// Returns the number of inputs of a body that are not captured.
fn formal_input_count(node: &Node, body: &Graph) -> Result<usize, OpError> {
    body.inputs.len().checked_sub(node.captures).ok_or_else(|| {
        OpError::invalid(format!("{BODY} has fewer inputs than the {} values it captures", node.captures))
    })
}

fn build_loop(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let body = checked_body(node)?;
    let carried = (node.inputs.len() - node.captures).saturating_sub(2);
    let input_count = formal_input_count(node, body)?;
    if input_count != carried + 2 {
        return Err(OpError::invalid(format!(
            "{BODY} has {input_count} inputs, but {} are needed: the iteration, the condition and {carried} carried values",
            carried + 2
        )));
    }
    let stacked = body.outputs.len().checked_sub(carried + 1).ok_or_else(|| {
        OpError::invalid(format!(
            "{BODY} has {} outputs, but {} are needed: the condition and {carried} carried values",
            body.outputs.len(),
            carried + 1
        ))
    })?;
    let stacked = vec![ScanAxis { axis: 0, reversed: false }; stacked];
    let repetition = Repetition { body: BODY, conditional: true, carried, scanned: Vec::new(), stacked };
    Ok(Box::new(Repeat { repetition }))
}

/// Reads axes and directions of the scanned or collected values of a Scan; `what` is "input" or "output".
fn read_scan_axes(node: &Node, what: &str, count: usize) -> Result<Vec<ScanAxis>, OpError> {
    let list = |name: &str| -> Result<Vec<i64>, OpError> {
        let values = node.attrs.ints(name)?.map_or_else(|| vec![0; count], <[i64]>::to_vec);
        if values.len() == count {
            return Ok(values);
        }
        let value_count = values.len();
        Err(OpError::invalid(format!(
            "{name} has {value_count} elements, but there are {count} scan {what}s"
        )))
    };
    let (axes, directions) = (list(&format!("scan_{what}_axes"))?, list(&format!("scan_{what}_directions"))?);
    if let Some(other) = directions.iter().find(|direction| !(0..=1).contains(*direction)) {
        return Err(OpError::invalid(format!("scan_{what}_directions must be 0 or 1, got {other}")));
    }
    let along = |(axis, direction): (i64, i64)| ScanAxis { axis, reversed: direction == 1 };
    Ok(axes.into_iter().zip(directions).map(along).collect())
}

fn build_scan(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let body = checked_body(node)?;
    let explicit_count = node.inputs.len() - node.captures;
    let scanned = Attrs::required("num_scan_inputs", node.attrs.int("num_scan_inputs")?)?;
    let scanned = usize::try_from(scanned)
        .ok()
        .filter(|&count| (1..=explicit_count).contains(&count))
        .ok_or_else(|| {
            OpError::invalid(format!(
                "num_scan_inputs must be from 1 to {explicit_count} (the number of inputs), got {scanned}"
            ))
        })?;
    let carried = explicit_count - scanned;
    let input_count = formal_input_count(node, body)?;
    if input_count != explicit_count {
        return Err(OpError::invalid(format!(
            "{BODY} has {input_count} inputs, but {explicit_count} are needed: {carried} states and {scanned} slices"
        )));
    }
    let stacked = body.outputs.len().checked_sub(carried).ok_or_else(|| {
        let output_count = body.outputs.len();
        OpError::invalid(format!("{BODY} has {output_count} outputs, but {carried} states"))
    })?;
    let scanned = read_scan_axes(node, "input", scanned)?;
    let stacked = read_scan_axes(node, "output", stacked)?;
    let repetition = Repetition { body: BODY, conditional: false, carried, scanned, stacked };
    Ok(Box::new(Repeat { repetition }))
}

/// Downgrades a Scan. Before opset 11 axes are counted from the front only.
fn downgrade_scan(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() < 9 {
        return Err(OpError::unsupported(
            "a Scan without a batch axis (as in gradients of loops) needs opset 9 or newer",
        ));
    }
    if rw.version() >= 11 {
        return Ok(());
    }
    let mut node = rw.node().clone();
    let explicit_count = node.inputs.len() - node.captures;
    for (name, first) in [("scan_input_axes", true), ("scan_output_axes", false)] {
        let Some(axes) = node.attrs.ints(name)?.map(<[i64]>::to_vec) else { continue };
        let (ports, offset) = if first {
            (&node.inputs, explicit_count - axes.len())
        } else {
            let body = subgraph(rw.node(), BODY)?;
            (&node.outputs, body.outputs.len() - axes.len())
        };
        let mut front = Vec::with_capacity(axes.len());
        for (k, &axis) in axes.iter().enumerate() {
            let rank = ports.get(offset + k).copied().flatten().and_then(|id| rw.shape(id)).map(Shape::rank);
            front.push(match rank {
                _ if axis >= 0 => axis,
                Some(rank) => normalize_axis(axis, rank)? as i64,
                None => {
                    return Err(OpError::unsupported(format!(
                        "{name} is negative for a value of unknown rank, which needs opset 11 or newer"
                    )));
                }
            });
        }
        if front != axes {
            node.attrs.0.insert(name.to_owned(), Attr::Ints(front));
        }
    }
    if node != *rw.node() {
        rw.patch().1.push(node);
    }
    Ok(())
}

pub(super) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "Loop", &[1, 11, 13, 16, 19, 21, 23, 24, 25], build_loop).sample(|_| {
            let [count, condition, number] =
                [DType::I64, DType::Bool, DType::F32].map(|dtype| ValueType::tensor(dtype, &[]));
            let mut body = Graph::new(BODY);
            body.inputs = (["iteration", "condition", "carried"].iter().zip([&count, &condition, &number]))
                .map(|(name, ty)| body.add_value(name, ty.clone()))
                .collect();
            let arguments = body.inputs.clone();
            body.outputs = arguments[1..].iter().map(|&id| add_copy(&mut body, id)).collect();
            let inputs = [count, condition, number].map(Some).to_vec();
            Sample { inputs, ..Sample::of(Attrs::new().with(BODY, body)) }
        }),
        Definition::new("", "Scan", &[8, 9, 11, 16, 19, 21, 23, 24, 25], build_scan)
            .sample(|_| {
                let number = ValueType::tensor(DType::F32, &[]);
                let mut body = Graph::new(BODY);
                let slice = body.add_value("slice", number);
                body.inputs.push(slice);
                let copy = add_copy(&mut body, slice);
                body.outputs.push(copy);
                let attrs = Attrs::new().with(BODY, body).with("num_scan_inputs", 1i64);
                Sample { inputs: vec![Some(ValueType::tensor(DType::F32, &[2]))], ..Sample::of(attrs) }
            })
            .upgrade(super::scan_8::upgrade)
            .downgrade(downgrade_scan),
    ]
}
