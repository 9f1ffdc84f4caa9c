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

mod flow;
mod gradient;

use ortrain_graph::{Attr, Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId, ValueType};
use ortrain_program::ScanAxis;
use rustc_hash::FxHashSet;

use crate::OpError;
use crate::families::control_flow::common_type::common_type;
use crate::grad::Grad;
use crate::infer::{Infer, normalize_axis};
use crate::iterations::known_iteration_count;
use crate::op::{Definition, Op, Placement, Repetition};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::subgraphs::{BODY, add_copy, clear_folded, set_capture_types, subgraph, subgraph_error};
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
