//! `If`.
//!
//! If-1, 11, 13, 16, 19, 21, 23, 24, 25 of ONNX. The node's only own input is the condition.
//!
//! If the condition is known when a program is built, the selected branch replaces the node. The other branch may then
//! contradict the actual shapes. Otherwise the branches are separate schedules, each built before its first run. One
//! branch may contradict the actual shapes as long as it does not run. The results have the shapes of the other branch
//! in this case.
//!
//! The gradient of an If is an If with the same condition. Its branches recompute the forward branch, as far as
//! necessary, and compute the gradients of the captured values. A branch that does not use a captured value returns
//! zeros for it. Random numbers repeat, because they depend on names and the copy has the same names. Only captured
//! values get gradients: weights that are constants of a branch are moved outside before training.

use ortrain_graph::{Attr, Attrs, DType, Dim, Graph, Node, Shape, ValueId, ValueType};
use rustc_hash::FxHashSet;

use crate::OpError;
use crate::families::control_flow::common_type::{ELSE, THEN, common_type};
use crate::grad::Grad;
use crate::infer::Infer;
use crate::op::{Definition, Op, Placement};
use crate::sample::Sample;
use crate::support::subgraphs::{
    add_copy, clear_folded, is_used, set_capture_types, subgraph, subgraph_error, zeros_like,
};

struct If;

/// Information that the inputs of a branch take from the captured values, in addition to the element types.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CaptureInfo {
    /// Shapes and contents.
    ShapesAndContents,
    /// Ranks.
    Ranks,
    ElementTypesOnly,
}

/// Infers the types of a branch from the types of the captured values. Returns the branch and the types of its outputs.
/// The last result is true if a declared shape or a nested branch contradicts the inferred types.
fn infer_branch(
    cx: &Infer<'_>,
    attribute: &str,
    known: CaptureInfo,
) -> Result<(Graph, Vec<ValueType>, bool), OpError> {
    let node = cx.node();
    let mut graph = subgraph(node, attribute)?.clone();
    if graph.inputs.len() != node.captures {
        let input_count = graph.inputs.len();
        return Err(OpError::invalid(format!("{attribute} must have no inputs, got {input_count}")));
    }
    set_capture_types(cx, attribute, &mut graph)?;
    if known != CaptureInfo::ShapesAndContents {
        for id in graph.inputs.clone() {
            let name = graph.name_of(id).to_owned();
            let value = graph.value_mut(id);
            if let ValueType::Tensor(dtype, shape) = &value.ty {
                let axes = shape.as_ref().filter(|_| known == CaptureInfo::Ranks).map(Shape::rank);
                let open =
                    |rank: usize| (0..rank).map(|axis| Dim::symbol(&format!("{name}.{axis}"))).collect();
                value.ty = ValueType::Tensor(*dtype, axes.map(open));
            }
            (value.constant, value.derived_constant, value.sizes) = (None, None, None);
        }
        (cx.passes.forget_shapes)(&mut graph);
    }
    let contradicts = (cx.passes.infer)(&mut graph).map_err(subgraph_error)?;
    let outputs = graph.outputs.iter().map(|&id| graph.value(id).ty.clone()).collect();
    clear_folded(&mut graph);
    Ok((graph, outputs, contradicts))
}

/// Maximum nesting depth of subgraphs in a branch that is inferred again. Each of them may be inferred three times in
/// this case.
const MAX_BRANCH_DEPTH: usize = 6;

/// Returns the nesting depth of the subgraphs in a graph.
fn subgraph_depth(graph: &Graph) -> usize {
    let inside = graph.nodes.iter().flat_map(Graph::subgraphs).map(|(_, graph)| 1 + subgraph_depth(graph));
    inside.max().unwrap_or(0)
}

/// A branch with inferred types.
enum Branch {
    /// The branch fits the actual shapes. Contains the types of its outputs, and true if a declaration in it
    /// contradicts the inferred types.
    Fits(Graph, Vec<ValueType>, bool),
    /// The branch contradicts the actual shapes, which is allowed while it does not run. Contains the branch with types
    /// for other shapes, and the error.
    Contradicts(Graph, OpError),
}

impl Branch {
    /// Infers the types of a branch.
    ///
    /// # Errors
    /// Returns an error if the branch is invalid for all shapes.
    fn from_attribute(cx: &Infer<'_>, attribute: &str) -> Result<Branch, OpError> {
        let error = match infer_branch(cx, attribute, CaptureInfo::ShapesAndContents) {
            Ok((graph, outputs, contradicts)) => return Ok(Branch::Fits(graph, outputs, contradicts)),
            Err(error) => error,
        };
        if subgraph_depth(subgraph(cx.node(), attribute)?) > MAX_BRANCH_DEPTH {
            return Err(error);
        }
        let open = infer_branch(cx, attribute, CaptureInfo::Ranks)
            .or_else(|_| infer_branch(cx, attribute, CaptureInfo::ElementTypesOnly));
        match open {
            Ok((graph, ..)) => Ok(Branch::Contradicts(graph, error)),
            Err(_) => Err(error),
        }
    }

    /// Returns the types of the outputs, if the branch fits.
    fn outputs(&self) -> Option<&[ValueType]> {
        match self {
            Branch::Fits(_, outputs, _) => Some(outputs),
            Branch::Contradicts(..) => None,
        }
    }

    fn into_graph(self) -> Graph {
        match self {
            Branch::Fits(graph, ..) | Branch::Contradicts(graph, _) => graph,
        }
    }

    fn contradicts(&self) -> bool {
        matches!(self, Branch::Fits(_, _, true) | Branch::Contradicts(..))
    }
}

impl Op for If {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let node = cx.node();
        cx.check_arity(1 + node.captures, 1 + node.captures, usize::MAX)?;
        cx.expect_dtype(0, "bool", |dtype| dtype == DType::Bool)?;
        if let Some(shape) = cx.shape(0)
            && shape.iter().any(|dim| dim.known().is_some_and(|size| size != 1))
        {
            return Err(OpError::invalid(format!("the condition has shape {shape}; one element is needed")));
        }
        let holds = cx.constant(0).map(|condition| condition.data().iter().any(|&byte| byte != 0));
        let counts = (subgraph(node, THEN)?.outputs.len(), subgraph(node, ELSE)?.outputs.len());
        if counts.0 != counts.1 || counts.0 < node.outputs.len() {
            return Err(OpError::invalid(format!(
                "the node has {} outputs, but {THEN} has {} and {ELSE} {}",
                node.outputs.len(),
                counts.0,
                counts.1
            )));
        }
        // The branch that does not run may contradict the actual shapes. It still gets types, for its gradient.
        let (yes, no) = (Branch::from_attribute(cx, THEN), Branch::from_attribute(cx, ELSE));
        let (yes, no) = match holds {
            Some(true) => (Some(yes?), no.ok()),
            Some(false) => (yes.ok(), Some(no?)),
            None => (Some(yes?), Some(no?)),
        };
        let captured: Vec<&Shape> = (1..node.inputs.len()).filter_map(|k| cx.shape(k)).collect();
        let outer: FxHashSet<&Dim> = captured.iter().flat_map(|shape| shape.iter()).collect();
        let outputs = |branch: &Option<Branch>, is_then: bool| match branch {
            Some(branch) if holds != Some(!is_then) => branch.outputs().map(<[ValueType]>::to_vec),
            _ => None,
        };
        let (from_yes, from_no) = (outputs(&yes, true), outputs(&no, false));
        let pair = match (&from_yes, &from_no) {
            (Some(yes), Some(no)) => (yes, no),
            (Some(only), None) | (None, Some(only)) => (only, only),
            (None, None) => {
                let of = |branch: Option<Branch>| match branch {
                    Some(Branch::Contradicts(_, error)) => Some(error),
                    _ => None,
                };
                let error = if holds == Some(false) { of(no) } else { of(yes) };
                return Err(error.expect("a branch that may run has types or an error"));
            }
        };
        for k in 0..node.outputs.len() {
            cx.set_output_type(k, common_type(cx, k, (&pair.0[k], &pair.1[k]), &outer)?);
        }
        for (attribute, typed, condition) in [(THEN, yes, true), (ELSE, no, false)] {
            if let Some(branch) = typed {
                cx.contradicts |= holds != Some(!condition) && branch.contradicts();
                cx.set_output_subgraph(attribute, branch.into_graph());
            }
        }
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let node = cx.node().clone();
        let condition = cx.input(0)?;
        // Captured values of the gradient: the captured values of the node (without repetitions) and the output
        // gradients.
        let mut outer: Vec<ValueId> = node.inputs[1..].iter().flatten().copied().collect();
        let required: Vec<usize> = (0..outer.len()).filter(|&k| cx.needs_grad(k + 1)).collect();
        let arriving: Vec<(usize, usize)> = (0..node.outputs.len())
            .filter_map(|k| {
                let gradient = cx.output_grad(k)?;
                let known = outer.iter().position(|&id| id == gradient);
                Some((
                    k,
                    known.unwrap_or_else(|| {
                        outer.push(gradient);
                        outer.len() - 1
                    }),
                ))
            })
            .collect();
        let mut halves = Vec::with_capacity(2);
        for attribute in [THEN, ELSE] {
            let mut graph = subgraph(&node, attribute)?.clone();
            let forward = graph.value_count();
            for &(k, position) in &arriving {
                if position >= graph.inputs.len() {
                    let output = graph.value(graph.outputs[k]);
                    // The name differs from gradient names: an input that is passed on is no gradient.
                    let (name, ty) = (format!("{}_grad_in", output.name), output.ty.clone());
                    let id = graph.add_value(&name, ty);
                    graph.inputs.push(id);
                }
            }
            let seeds: Vec<(ValueId, ValueId)> =
                arriving.iter().map(|&(k, position)| (graph.outputs[k], graph.inputs[position])).collect();
            let targets: Vec<ValueId> = required.iter().map(|&k| graph.inputs[k]).collect();
            let found = (cx.passes.backpropagate)(&mut graph, &seeds, &targets).map_err(subgraph_error)?;
            halves.push((attribute, graph, found, forward));
        }
        // A value without a gradient in either branch gets no gradient.
        let reached: Vec<bool> =
            (0..required.len()).map(|t| halves.iter().any(|(_, _, found, _)| found[t].is_some())).collect();
        if !reached.contains(&true) {
            return Ok(());
        }
        for (attribute, graph, found, forward) in &mut halves {
            graph.name = format!("{}_grad", graph.name);
            graph.outputs.clear();
            for (t, &k) in required.iter().enumerate() {
                if reached[t] {
                    let id = match found[t] {
                        Some(id) => id,
                        None => zeros_like(graph, graph.inputs[k]),
                    };
                    graph.outputs.push(id);
                }
            }
            graph.remove_unused();
            (cx.passes.remove_updates)(graph).map_err(subgraph_error)?;
            // Names must not repeat names of the outer graph: the outer gradients have the same names.
            for id in graph.value_ids().skip(*forward) {
                let name = format!("{}{attribute}/{}", cx.prefix, graph.name_of(id));
                graph.rename(id, &name);
            }
            (cx.passes.infer_added)(graph).map_err(subgraph_error)?;
        }
        // Removes values that only the forward branches needed.
        for position in (0..outer.len()).rev() {
            if !halves.iter().any(|(_, graph, ..)| is_used(graph, graph.inputs[position])) {
                outer.remove(position);
                for (_, graph, ..) in &mut halves {
                    graph.inputs.remove(position);
                }
            }
        }
        let mut attrs = Attrs::new();
        for (attribute, graph, ..) in halves {
            attrs = attrs.with(attribute, Attr::Graph(Box::new(graph)));
        }
        let inputs: Vec<Option<ValueId>> =
            std::iter::once(condition).chain(outer.iter().copied()).map(Some).collect();
        let count = reached.iter().filter(|&&reached| reached).count();
        let gradients = cx.add_node("", "If", &inputs, count, attrs);
        cx.nodes.last_mut().expect("just added").captures = outer.len();
        let selected = required.iter().zip(&reached).filter(|&(_, &reached)| reached);
        for ((&k, _), gradient) in selected.zip(gradients) {
            cx.set_grad(k + 1, gradient);
        }
        Ok(())
    }

    fn placement(&self) -> Placement {
        Placement::If { then_branch: THEN, else_branch: ELSE }
    }
}

fn build(_: &Graph, _: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(If))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![Definition::new("", "If", &[1, 11, 13, 16, 19, 21, 23, 24, 25], build).sample(|_| {
        let [number, condition] = [DType::F32, DType::Bool].map(|dtype| ValueType::tensor(dtype, &[]));
        let branch = |name: &str| {
            let mut graph = Graph::new(name);
            let argument = graph.add_value("given", number.clone());
            graph.inputs.push(argument);
            let copy = add_copy(&mut graph, argument);
            graph.outputs.push(copy);
            graph
        };
        Sample {
            attrs: Attrs::new().with(THEN, branch(THEN)).with(ELSE, branch(ELSE)),
            inputs: vec![Some(condition), Some(number.clone())],
            captures: 1,
            output: None,
        }
    })]
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ortrain_graph::Tensor;
    use ortrain_program::{Memory, PlaneId, RunError, Scalars, Schedule, Segment};

    use super::*;
    use crate::passes::infer::infer;
    use crate::testing::{
        Failure, add, assert_close, check_decomposition, check_downgrade, check_gradients, f64s,
        generic_tensor, gradient_graph, graph, round_trip_through_file, run, run_bound, run_with,
    };
    use crate::{Role, Specialiser};

    fn add_op(graph: &mut Graph, op: &str, name: &str, inputs: &[ValueId]) -> ValueId {
        add_op_with(graph, op, name, inputs, Attrs::new())
    }

    fn add_op_with(graph: &mut Graph, op: &str, name: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        let output = add(graph, ("", op), name, &inputs, 1, attrs)[0];
        graph.outputs.pop();
        output
    }

    /// Returns a branch with `captures` captured values; `build` returns the outputs.
    fn branch_graph(captures: usize, build: impl FnOnce(&mut Graph, &[ValueId]) -> Vec<ValueId>) -> Graph {
        let mut graph = Graph::new("block");
        let inputs: Vec<ValueId> =
            (0..captures).map(|k| graph.add_value(&format!("captured{k}"), ValueType::Unknown)).collect();
        graph.inputs.clone_from(&inputs);
        graph.outputs = build(&mut graph, &inputs);
        graph
    }

    /// Adds an If with results named after `name`.
    fn add_if(
        graph: &mut Graph,
        name: &str,
        condition: ValueId,
        captured: &[ValueId],
        (yes, no): (Graph, Graph),
    ) -> Vec<ValueId> {
        let attrs = Attrs::new().with(THEN, yes.clone()).with(ELSE, no);
        let inputs: Vec<Option<ValueId>> =
            std::iter::once(condition).chain(captured.iter().copied()).map(Some).collect();
        let output = add(graph, ("", "If"), name, &inputs, yes.outputs.len(), attrs);
        graph.nodes.last_mut().expect("just added").captures = captured.len();
        output
    }

    fn flag(value: bool) -> Tensor {
        Tensor::filled(DType::Bool, &[], f64::from(u8::from(value)))
    }

    /// Sets the outputs to a value and its sum of squares.
    fn append_sum_of_squares(graph: &mut Graph, y: ValueId) {
        let square = add_op(graph, "Mul", "square", &[y, y]);
        let sum = add_op_with(graph, "ReduceSum", "sum", &[square], Attrs::new().with("keepdims", 0i64));
        graph.outputs = vec![y, sum];
        infer(graph).expect("valid");
    }

    fn schedule(graph: &Graph, inputs: &[Tensor]) -> Arc<Schedule> {
        let specialiser = Specialiser::new(graph.clone(), vec![Role::User; inputs.len()]);
        specialiser.schedule(inputs).expect("it compiles").schedule().clone()
    }

    /// Returns the graph of `condition ? tanh(x w) : x + x`.
    fn tanh_or_double(x: &Tensor, w: &Tensor) -> Graph {
        let (mut graph, ids) = graph(&[&flag(true), x, w]);
        let yes = branch_graph(2, |g, c| {
            let product = add_op(g, "Mul", "product", c);
            vec![add_op(g, "Tanh", "result", &[product])]
        });
        let no = branch_graph(2, |g, c| vec![add_op(g, "Add", "result", &[c[0], c[0]])]);
        add_if(&mut graph, "y", ids[0], &ids[1..], (yes, no));
        infer(&mut graph).expect("valid");
        graph
    }

    #[test]
    fn runs_selected_branch() {
        let (x, w) = (f64s(&[2], &[1.0, -2.0]), f64s(&[2], &[0.5, 3.0]));
        let graph = tanh_or_double(&x, &w);
        assert_eq!(graph.value(graph.outputs[0]).ty, ValueType::tensor(DType::F64, &[2]));
        let got = run(&graph, &[flag(true), x.clone(), w.clone()]).expect("it runs");
        assert_close(&got[0], &f64s(&[2], &[0.5f64.tanh(), (-6.0f64).tanh()]), 1e-15);
        let got = run(&graph, &[flag(false), x, w]).expect("it runs");
        assert_eq!(got[0], f64s(&[2], &[2.0, -4.0]));
    }

    #[test]
    fn gradients_of_both_branches() {
        let (x, w) = (generic_tensor(&[2, 3], 1), generic_tensor(&[2, 3], 2));
        let graph = tanh_or_double(&x, &w);
        for condition in [true, false] {
            check_gradients(&graph, &[flag(condition), x.clone(), w.clone()], &[1, 2], &[0]);
        }
        let gradient = gradient_graph(&graph, &[Some(generic_tensor(&[2, 3], 3))], &[1, 2]);
        assert!(gradient.nodes.iter().all(|node| &*node.op == "If"), "{gradient}");
        for condition in [true, false] {
            check_decomposition(&gradient, &[flag(condition), x.clone(), w.clone()], 1e-12);
        }
    }

    #[test]
    fn computed_condition() {
        let (x, w) = (generic_tensor(&[3], 1), generic_tensor(&[3], 2));
        let (mut graph, ids) = graph(&[&x, &w]);
        let sum = add_op_with(&mut graph, "ReduceSum", "sum", &[ids[0]], Attrs::new().with("keepdims", 0i64));
        let zero = graph.add_constant("zero", f64s(&[], &[0.0]));
        let condition = add_op(&mut graph, "Less", "condition", &[sum, zero]);
        let yes = branch_graph(2, |g, c| vec![add_op(g, "Mul", "result", c)]);
        let no = branch_graph(2, |g, c| vec![add_op(g, "Exp", "result", &c[1..])]);
        let y = add_if(&mut graph, "y", condition, &ids, (yes, no))[0];
        graph.outputs.clear();
        let result = add_op(&mut graph, "Sigmoid", "result", &[y]);
        graph.outputs = vec![result];
        infer(&mut graph).expect("valid");
        for sign in [1.0, -1.0] {
            let x = f64s(&[3], &x.to_f64().iter().map(|x| x.abs() * sign).collect::<Vec<_>>());
            check_gradients(&graph, &[x, w.clone()], &[0, 1], &[0]);
        }
    }

    #[test]
    fn nested_ifs() {
        let (x, w) = (generic_tensor(&[2], 4), generic_tensor(&[2], 5));
        let (mut graph, ids) = graph(&[&flag(true), &flag(true), &x, &w]);
        let yes = branch_graph(3, |g, c| {
            let inner_yes = branch_graph(2, |g, c| vec![add_op(g, "Mul", "product", c)]);
            let inner_no = branch_graph(2, |g, c| vec![add_op(g, "Exp", "power", &c[1..])]);
            let inner = add_if(g, "inner", c[0], &c[1..], (inner_yes, inner_no))[0];
            vec![add_op(g, "Mul", "result", &[inner, c[1]])]
        });
        let no = branch_graph(3, |g, c| vec![add_op(g, "Sub", "result", &c[1..])]);
        add_if(&mut graph, "y", ids[0], &ids[1..], (yes, no));
        infer(&mut graph).expect("valid");
        for (outer, inner) in [(true, true), (true, false), (false, true)] {
            check_gradients(&graph, &[flag(outer), flag(inner), x.clone(), w.clone()], &[2, 3], &[0]);
        }
    }

    #[test]
    fn captured_values_and_constants_as_outputs() {
        // Outputs: a captured value, a constant, a captured constant.
        let x = generic_tensor(&[2], 6);
        let (mut graph, ids) = graph(&[&flag(true), &x]);
        let outside = graph.add_constant("outside", f64s(&[1], &[7.0]));
        let yes = branch_graph(2, |g, c| {
            let inside = g.add_constant("inside", f64s(&[1], &[5.0]));
            vec![c[0], inside, c[1]]
        });
        let no = branch_graph(2, |g, c| {
            let y = add_op(g, "Mul", "y", c);
            let sum = add_op(g, "ReduceSum", "sum", &[y]);
            vec![y, sum, c[1]]
        });
        add_if(&mut graph, "y", ids[0], &[ids[1], outside], (yes, no));
        infer(&mut graph).expect("valid");
        let got = run(&graph, &[flag(true), x.clone()]).expect("it runs");
        assert_eq!(got, [x.clone(), f64s(&[1], &[5.0]), f64s(&[1], &[7.0])]);
        let got = run(&graph, &[flag(false), x.clone()]).expect("it runs");
        assert_eq!(got[2], f64s(&[1], &[7.0]));
        for condition in [true, false] {
            check_gradients(&graph, &[flag(condition), x.clone()], &[1], &[0, 1, 2]);
        }
        // A branch of a gradient never returns a captured value directly, because runtimes reject this.
        let gradient = gradient_graph(&graph, &[Some(generic_tensor(&[2], 7)), None, None], &[1]);
        let node = gradient.nodes.iter().find(|node| &*node.op == "If").expect("the gradient is an If");
        for (_, graph) in Graph::subgraphs(node) {
            assert!(!graph.outputs.iter().any(|id| graph.inputs.contains(id)), "{graph}");
        }
    }

    #[test]
    fn unused_output() {
        let x = f64s(&[2], &[1.0, 2.0]);
        let (mut graph, ids) = graph(&[&flag(true), &x]);
        let both = || {
            branch_graph(1, |g, c| {
                let sum = add_op(g, "Add", "sum", &[c[0], c[0]]);
                vec![sum, add_op(g, "Neg", "negative", c)]
            })
        };
        let outputs = add_if(&mut graph, "y", ids[0], &ids[1..], (both(), both()));
        graph.nodes[0].outputs[0] = None;
        graph.outputs = vec![outputs[1]];
        infer(&mut graph).expect("valid");
        assert_eq!(run(&graph, &[flag(true), x]).expect("it runs")[0], f64s(&[2], &[-1.0, -2.0]));
    }

    /// Returns the graph of `condition ? exp(x) : concat(x, x)` with further nodes after it.
    fn exp_or_concat(x: &Tensor) -> Graph {
        let (mut graph, ids) = graph(&[&flag(true), x]);
        let yes = branch_graph(1, |g, c| vec![add_op(g, "Exp", "result", c)]);
        let no = branch_graph(1, |g, c| {
            let axis = Attrs::new().with("axis", 0i64);
            vec![add_op_with(g, "Concat", "result", &[c[0], c[0]], axis)]
        });
        let y = add_if(&mut graph, "y", ids[0], &ids[1..], (yes, no))[0];
        graph.outputs.clear();
        let square = add_op(&mut graph, "Mul", "square", &[y, y]);
        let sum =
            add_op_with(&mut graph, "ReduceMean", "mean", &[square], Attrs::new().with("keepdims", 0i64));
        let ready = add_op(&mut graph, "Tanh", "ready", &[ids[1]]);
        graph.outputs = vec![square, sum, ready];
        infer(&mut graph).expect("valid");
        graph
    }

    #[test]
    fn different_shapes_defer_later_nodes() {
        let x = generic_tensor(&[3], 8);
        let graph = exp_or_concat(&x);
        let scheduled = schedule(&graph, &[flag(true), x.clone()]);
        let late = scheduled.segments.iter().filter(|node| matches!(node.segment, Segment::Deferred(_)));
        assert_eq!(late.count(), 1, "{scheduled}");
        for (condition, len) in [(true, 3), (false, 6)] {
            let inputs = [flag(condition), x.clone()];
            let got = run(&graph, &inputs).expect("it runs");
            assert_eq!(got[0].dims(), [len]);
            assert_eq!(got[2].dims(), [3]);
            check_gradients(&graph, &inputs, &[1], &[1, 2]);
        }
    }

    #[test]
    fn known_condition_inlines_branch() {
        // The other branch contradicts the shape.
        let x = f64s(&[2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let (mut graph, ids) = graph(&[&x]);
        let rows = ortrain_graph::Shape([Dim::symbol("N"), Dim::Known(3)].into_iter().collect());
        graph.value_mut(ids[0]).ty = ValueType::Tensor(DType::F64, Some(rows));
        let shape = add_op(&mut graph, "Shape", "shape", &ids);
        let first = graph.add_constant("first", Tensor::i64(&[], &[0]));
        let size = add_op(&mut graph, "Gather", "size", &[shape, first]);
        let one_row = graph.add_constant("one_row", Tensor::i64(&[], &[1]));
        let condition = add_op(&mut graph, "Equal", "condition", &[size, one_row]);
        let yes = branch_graph(1, |g, c| {
            let axes = g.add_constant("axes", Tensor::i64(&[1], &[0]));
            vec![add_op(g, "Squeeze", "squeezed", &[c[0], axes])]
        });
        let no = branch_graph(1, |g, c| vec![add_op(g, "Exp", "result", c)]);
        let y = add_if(&mut graph, "y", condition, &ids, (yes, no))[0];
        append_sum_of_squares(&mut graph, y);
        assert_eq!(graph.value(y).ty, ValueType::Tensor(DType::F64, None));
        for x in [x, f64s(&[1, 3], &[1.0, 2.0, 3.0])] {
            let inputs = [x];
            let scheduled = schedule(&graph, &inputs);
            assert!(scheduled.single_program().is_some(), "{scheduled}");
            assert_eq!(run(&graph, &inputs).expect("it runs")[0].dims().len(), inputs[0].dims()[0]);
            check_gradients(&graph, &inputs, &[0], &[1]);
        }
    }

    #[test]
    fn if_on_values_of_unknown_shape() {
        // The indices of nonzero elements of x are used in both branches and after them. Their count is only known at
        // run time.
        let (x, w) = (generic_tensor(&[4], 9), generic_tensor(&[1], 10));
        let (mut graph, ids) = graph(&[&flag(true), &x, &w]);
        let indices = add_op(&mut graph, "NonZero", "found", &[ids[1]]);
        let to = Attrs::new().with("to", i64::from(DType::F64.to_onnx()));
        let late = add_op_with(&mut graph, "Cast", "late", &[indices], to);
        let yes = branch_graph(2, |g, c| vec![add_op(g, "Mul", "result", c)]);
        let no = branch_graph(2, |g, c| {
            let sum = add_op(g, "Sub", "sum", c);
            vec![add_op(g, "Tanh", "result", &[sum])]
        });
        let y = add_if(&mut graph, "y", ids[0], &[late, ids[2]], (yes, no))[0];
        graph.outputs.clear();
        let square = add_op(&mut graph, "Mul", "square", &[y, y]);
        let sum = add_op_with(&mut graph, "ReduceSum", "sum", &[square], Attrs::new().with("keepdims", 0i64));
        graph.outputs = vec![sum, y];
        infer(&mut graph).expect("valid");
        let x = f64s(&[4], &[0.0, 3.0, 0.0, 1.0]);
        for condition in [true, false] {
            let inputs = [flag(condition), x.clone(), w.clone()];
            assert_eq!(run(&graph, &inputs).expect("it runs")[1].dims(), [1, 2]);
            check_gradients(&graph, &inputs, &[2], &[0]);
        }
    }

    #[test]
    fn value_dependent_shapes_in_branch() {
        let (x, shape) = (generic_tensor(&[6], 11), Tensor::i64(&[2], &[2, 3]));
        let (mut graph, ids) = graph(&[&flag(true), &x, &shape]);
        let yes = branch_graph(2, |g, c| {
            let matrix = add_op(g, "Reshape", "matrix", c);
            let last = g.add_constant("last", Tensor::i64(&[1], &[1]));
            vec![add_op(g, "ReduceSum", "rows", &[matrix, last])]
        });
        let no = branch_graph(2, |g, c| vec![add_op(g, "Neg", "result", &c[..1])]);
        let y = add_if(&mut graph, "y", ids[0], &ids[1..], (yes, no))[0];
        append_sum_of_squares(&mut graph, y);
        for (shape, rows) in [(shape, 2), (Tensor::i64(&[2], &[3, 2]), 3)] {
            let inputs = [flag(true), x.clone(), shape.clone()];
            assert_eq!(run(&graph, &inputs).expect("it runs")[0].dims(), [rows, 1]);
            check_gradients(&graph, &inputs, &[1], &[1]);
            let inputs = [flag(false), x.clone(), shape];
            assert_eq!(run(&graph, &inputs).expect("it runs")[0].dims(), [6]);
            check_gradients(&graph, &inputs, &[1], &[1]);
        }
    }

    /// Runs a graph with input 2 in plane 0, at byte 256.
    fn run_on_plane(graph: &Graph, inputs: &[Tensor], plane: &Tensor) -> (Arc<Schedule>, Vec<Tensor>) {
        let roles = vec![Role::User, Role::User, Role::Plane(PlaneId(0), 256)];
        let memory = Memory::new(256 + plane.data().len());
        memory.write(256, plane.data()).unwrap();
        run_bound(graph, roles, &[&memory], inputs, Scalars::default()).expect("it runs")
    }

    #[test]
    fn branches_access_planes_directly() {
        let (x, w) = (generic_tensor(&[2], 12), generic_tensor(&[2], 13));
        let graph = tanh_or_double(&x, &w);
        let seed = generic_tensor(&[2], 14);
        let gradient = gradient_graph(&graph, &[Some(seed)], &[1, 2]);
        for condition in [true, false] {
            let inputs = [flag(condition), x.clone()];
            let all = [flag(condition), x.clone(), w.clone()];
            for graph in [&graph, &gradient] {
                let (scheduled, got) = run_on_plane(graph, &inputs, &w);
                assert_eq!(got, run(graph, &all).expect("it runs"));
                let branching =
                    scheduled.segments.iter().find(|node| matches!(node.segment, Segment::If(..)));
                assert_eq!(branching.expect("an If").inputs.len(), 2, "condition and x: {scheduled}");
            }
        }
    }

    #[test]
    fn deferred_programs_access_planes_directly() {
        // The branch consists of one program of unknown shape, which uses a plane.
        let (x, w) = (f64s(&[3], &[0.0, 1.0, 2.0]), generic_tensor(&[1], 16));
        let (mut graph, ids) = graph(&[&flag(true), &x, &w]);
        let indices = add_op(&mut graph, "NonZero", "found", &ids[1..2]);
        let to = Attrs::new().with("to", i64::from(DType::F64.to_onnx()));
        let late = add_op_with(&mut graph, "Cast", "late", &[indices], to);
        let yes = branch_graph(2, |g, c| vec![add_op(g, "Mul", "result", c)]);
        let no = branch_graph(2, |_, c| vec![c[1]]);
        let y = add_if(&mut graph, "y", ids[0], &[late, ids[2]], (yes, no))[0];
        graph.outputs = vec![y];
        infer(&mut graph).expect("valid");
        for condition in [true, false] {
            let (_, got) = run_on_plane(&graph, &[flag(condition), x.clone()], &w);
            assert_eq!(got, run(&graph, &[flag(condition), x.clone(), w.clone()]).expect("it runs"));
            assert_eq!(got[0].dims(), if condition { &[1, 2][..] } else { &[1] });
        }
    }

    /// Checks that the names defined in branches differ from the names of the enclosing graphs.
    fn check_names_are_unique(graph: &Graph, outer: &FxHashSet<String>) {
        let inner_names: Vec<String> = graph
            .nodes
            .iter()
            .flat_map(|node| node.present_outputs().chain(node.present_inputs()))
            .filter(|id| !graph.inputs.contains(id))
            .map(|id| graph.name_of(id).to_owned())
            .collect();
        for name in &inner_names {
            assert!(!outer.contains(name), "{name:?} is defined outside as well");
        }
        let visible: FxHashSet<String> = outer.iter().cloned().chain(inner_names).collect();
        for node in &graph.nodes {
            for (_, inner) in Graph::subgraphs(node) {
                check_names_are_unique(inner, &visible);
            }
        }
    }

    #[test]
    fn file_round_trip() {
        let (x, w) = (generic_tensor(&[2], 17), generic_tensor(&[2], 18));
        let graph = tanh_or_double(&x, &w);
        let mut training = gradient_graph(&graph, &[Some(generic_tensor(&[2], 19))], &[1, 2]);
        training.nodes.insert(0, graph.nodes[0].clone());
        training.outputs.push(graph.outputs[0]);
        check_names_are_unique(&training, &FxHashSet::default());
        let read = round_trip_through_file(&training);
        check_names_are_unique(&read, &FxHashSet::default());
        for condition in [true, false] {
            let inputs = [flag(condition), x.clone(), w.clone()];
            assert_eq!(run(&read, &inputs).expect("it runs"), run(&training, &inputs).expect("it runs"));
        }
    }

    #[test]
    fn recomputed_dropout_draws_the_same_mask() {
        let x = Tensor::filled(DType::F64, &[64], 1.0);
        for known in [false, true] {
            let (mut graph, ids) = graph(&[&flag(true), &x]);
            let branch = |scale: f64| {
                branch_graph(1, |g, c| {
                    let ratio = g.add_constant("ratio", Tensor::f32(&[], &[0.5]));
                    let training = g.add_constant("training", flag(true));
                    let scale = g.add_constant("scale", f64s(&[], &[scale]));
                    let scaled = add_op(g, "Mul", "scaled", &[c[0], scale]);
                    let dropped = add_op(g, "Dropout", "kept", &[scaled, ratio, training]);
                    vec![add_op(g, "Mul", "result", &[dropped, dropped])]
                })
            };
            add_if(&mut graph, "y", ids[0], &ids[1..], (branch(1.0), branch(3.0)));
            infer(&mut graph).expect("valid");
            let y = graph.outputs[0];
            let mut gradient = gradient_graph(&graph, &[Some(Tensor::filled(DType::F64, &[64], 1.0))], &[1]);
            // Forward and backward nodes are in one graph, as during training.
            gradient.nodes.insert(0, graph.nodes[0].clone());
            gradient.outputs.push(y);
            if known {
                gradient.inputs.remove(0);
                gradient.value_mut(ids[0]).constant = Some(flag(true));
            }
            let inputs = [flag(true), x.clone()];
            let inputs = if known { &inputs[1..] } else { &inputs[..] };
            let scalars = Scalars { seed: 3, train_step: 1 };
            let got = run_with(&gradient, inputs, scalars).expect("it runs");
            // x is 1 and the remaining elements are doubled: y is 4 or 0, and its slope 8 or 0.
            let doubled: Vec<f64> = got[1].to_f64().iter().map(|y| 2.0 * y).collect();
            assert_eq!(got[0].to_f64(), doubled);
            assert!(doubled.contains(&0.0) && doubled.contains(&8.0));
        }
    }

    #[test]
    fn downgrade_includes_branches() {
        let (x, exponent) = (f64s(&[2], &[1.0, 2.0]), Tensor::i64(&[], &[3]));
        let (mut graph, ids) = graph(&[&flag(true), &x, &exponent]);
        let both = || branch_graph(2, |g, c| vec![add_op(g, "Pow", "result", c)]);
        add_if(&mut graph, "y", ids[0], &ids[1..], (both(), both()));
        infer(&mut graph).expect("valid");
        let written = check_downgrade(&graph, &[flag(true), x, exponent], 11);
        for (_, graph) in Graph::subgraphs(&written.nodes[0]) {
            assert_eq!(graph.nodes.len(), 2, "{graph}");
        }
    }

    #[test]
    fn branch_symbols_are_separate() {
        // Both branches have a value of the same name, and therefore of the same symbol, but of different lengths.
        let x = f64s(&[3], &[0.0, 1.0, 2.0]);
        let (mut graph, ids) = graph(&[&flag(true), &x]);
        let rows = |from: i64| {
            branch_graph(1, |g, c| {
                let start = g.add_constant("start", Tensor::i64(&[1], &[from]));
                let end = g.add_constant("end", Tensor::i64(&[1], &[i64::MAX]));
                let part = add_op(g, "Slice", "part", &[c[0], start, end]);
                vec![add_op(g, "NonZero", "found", &[part])]
            })
        };
        let y = add_if(&mut graph, "y", ids[0], &ids[1..], (rows(0), rows(2)))[0];
        infer(&mut graph).expect("valid");
        let ValueType::Tensor(_, Some(shape)) = &graph.value(y).ty else { panic!("the rank is known") };
        assert_eq!(shape[1], Dim::symbol("y.1"));
        for (condition, count) in [(true, 2), (false, 1)] {
            assert_eq!(run(&graph, &[flag(condition), x.clone()]).expect("it runs")[0].dims(), [1, count]);
        }
    }

    #[test]
    fn rejects_contradictory_branches() {
        let x = f64s(&[2], &[1.0, 2.0]);
        let attempt = |condition: &Tensor, yes: Graph, no: Graph| {
            let (mut graph, ids) = graph(&[condition, &x]);
            add_if(&mut graph, "y", ids[0], &ids[1..], (yes, no));
            infer(&mut graph).expect_err("refused").to_string()
        };
        let negative = || branch_graph(1, |g, c| vec![add_op(g, "Neg", "result", c)]);
        let compared = || branch_graph(1, |g, c| vec![add_op(g, "Equal", "result", &[c[0], c[0]])]);
        let message = attempt(&flag(true), negative(), compared());
        assert!(
            message.contains("output 0 is float64[2] in then_branch but bool[2] in else_branch"),
            "{message}"
        );
        let message = attempt(&flag(true), negative(), branch_graph(1, |_, c| vec![c[0], c[0]]));
        assert!(message.contains("then_branch has 1 and else_branch 2"), "{message}");
        let message = attempt(&Tensor::filled(DType::Bool, &[2], 1.0), negative(), negative());
        assert!(message.contains("one element is needed"), "{message}");
        let message = attempt(&flag(true), negative(), branch_graph(2, |_, c| vec![c[0]]));
        assert!(message.contains("else_branch must have no inputs, got 2"), "{message}");
        let message =
            attempt(&flag(true), branch_graph(1, |g, c| vec![add_op(g, "Not", "result", c)]), negative());
        assert!(message.contains("in its subgraph") && message.contains("expected bool"), "{message}");
    }

    #[test]
    fn contradictory_branch_fails_only_when_run() {
        // [2, 3] times [2, 3] is no valid product, and such a matrix has no axis that Squeeze can remove.
        let (x, w) = (generic_tensor(&[2, 3], 1), generic_tensor(&[2, 3], 2));
        let fits = || branch_graph(2, |g, c| vec![add_op(g, "Mul", "scaled", c)]);
        let contradicts = |k: usize| {
            branch_graph(2, |g, c| {
                let passed = add_op(g, "Identity", "passed", &c[..1]);
                let wrong = match k {
                    0 => add_op(g, "MatMul", "wrong", &[passed, c[1]]),
                    _ => {
                        let axes = g.add_constant("axes", Tensor::i64(&[1], &[1]));
                        add_op(g, "Squeeze", "wrong", &[passed, axes])
                    }
                };
                vec![add_op(g, "Sin", "result", &[wrong])]
            })
        };
        for k in 0..2 {
            for holds in [true, false] {
                let (mut graph, ids) = graph(&[&flag(true), &x, &w]);
                let branches = if holds { (fits(), contradicts(k)) } else { (contradicts(k), fits()) };
                let y = add_if(&mut graph, "y", ids[0], &ids[1..], branches)[0];
                append_sum_of_squares(&mut graph, y);
                assert_eq!(graph.value(y).ty, ValueType::tensor(DType::F64, &[2, 3]));
                let inputs = [flag(holds), x.clone(), w.clone()];
                let product: Vec<f64> = x.to_f64().iter().zip(w.to_f64()).map(|(x, w)| x * w).collect();
                assert_close(
                    &run(&graph, &inputs).expect("it is not taken")[0],
                    &f64s(&[2, 3], &product),
                    1e-15,
                );
                check_gradients(&graph, &inputs, &[1, 2], &[0, 1]);
                let read = round_trip_through_file(&graph);
                assert_eq!(run(&read, &inputs).expect("it runs"), run(&graph, &inputs).expect("it runs"));

                let failing_inputs = [flag(!holds), x.clone(), w.clone()];
                let error = run(&graph, &failing_inputs).expect_err("it is taken");
                let Failure::Run(error @ RunError::Branch { .. }) = error else { panic!("{error:?}") };
                let (message, branch) = (error.to_string(), if holds { ELSE } else { THEN });
                let begins =
                    format!("node \"y\" (If) takes its {branch}, which cannot be run on these inputs: ");
                assert!(message.starts_with(&begins), "{message}");
                let op = ["MatMul", "Squeeze"][k];
                assert!(message.contains(&format!("node \"wrong\" ({op}) with inputs")), "{message}");
                assert!(message.contains("float64[2, 3]"), "{message}");
            }
        }
    }

    #[test]
    fn rejects_two_contradictory_branches() {
        let x = generic_tensor(&[2, 3], 1);
        let (mut graph, ids) = graph(&[&flag(true), &x]);
        let wrong = || branch_graph(1, |g, c| vec![add_op(g, "MatMul", "wrong", &[c[0], c[0]])]);
        add_if(&mut graph, "y", ids[0], &ids[1..], (wrong(), wrong()));
        let message = infer(&mut graph).expect_err("refused").to_string();
        assert!(message.contains("node \"y\" (If)"), "{message}");
        assert!(message.contains("node \"wrong\" (MatMul)"), "{message}");
    }

    #[test]
    fn declared_shapes_in_branch_are_hints() {
        let x = f64s(&[3], &[0.0, 1.0, 2.0]);
        let (mut graph, ids) = graph(&[&flag(true), &x]);
        // The result of NonZero is declared with five elements, and Exp of x as a matrix.
        let yes = branch_graph(1, |g, c| {
            let indices = add_op(g, "NonZero", "found", c);
            g.value_mut(indices).ty = ValueType::tensor(DType::I64, &[1, 5]);
            let to = Attrs::new().with("to", i64::from(DType::F64.to_onnx()));
            let number = add_op_with(g, "Cast", "number", &[indices], to);
            vec![add_op(g, "Mul", "product", &[number, number])]
        });
        let no = branch_graph(1, |g, c| {
            let result = add_op(g, "Exp", "result", c);
            g.value_mut(result).ty = ValueType::tensor(DType::F64, &[7, 1]);
            g.value_mut(g.inputs[0]).ty = ValueType::tensor(DType::F64, &[2]);
            vec![result]
        });
        let y = add_if(&mut graph, "y", ids[0], &ids[1..], (yes, no))[0];
        graph.value_mut(y).ty = ValueType::tensor(DType::F64, &[4, 4, 4]);
        append_sum_of_squares(&mut graph, y);
        let got = run(&graph, &[flag(true), x.clone()]).expect("it runs");
        assert_eq!(got[0], f64s(&[1, 2], &[1.0, 4.0]));
        let inputs = [flag(false), x.clone()];
        let expected: Vec<f64> = x.to_f64().iter().map(|x| x.exp()).collect();
        assert_close(&run(&graph, &inputs).expect("it runs")[0], &f64s(&[3], &expected), 1e-15);
        check_gradients(&graph, &inputs, &[1], &[1]);
    }

    #[test]
    fn branch_is_compiled_at_first_run() {
        let (x, w) = (generic_tensor(&[2], 1), generic_tensor(&[2], 2));
        let scheduled = schedule(&tanh_or_double(&x, &w), &[flag(true), x, w]);
        let Segment::If(branches, _) = &scheduled.segments[0].segment else { panic!("{scheduled}") };
        let both = || branches.named_branches().map(|(_, branch)| branch.built_schedule().is_some());
        assert_eq!((both(), scheduled.programs().len()), ([false, false], 0));
        branches.else_branch.schedule().expect("it fits");
        assert_eq!((both(), scheduled.programs().len()), ([false, true], 1));
    }

    #[test]
    fn branch_failure_names_node() {
        let x = f64s(&[2], &[1.0, 2.0]);
        let index = Tensor::i64(&[], &[5]);
        let (mut graph, ids) = graph(&[&flag(true), &x, &index]);
        let yes = branch_graph(2, |g, c| vec![add_op(g, "Gather", "picked", c)]);
        let no = branch_graph(2, |g, c| vec![add_op(g, "ReduceSum", "sum", &c[..1])]);
        add_if(&mut graph, "y", ids[0], &ids[1..], (yes, no));
        infer(&mut graph).expect("valid");
        let failure = run(&graph, &[flag(true), x.clone(), index.clone()]).expect_err("out of range");
        let Failure::Run(error) = failure else { panic!("{failure:?}") };
        assert!(error.to_string().contains("picked"), "{error}");
        assert!(run(&graph, &[flag(false), x, index]).is_ok());
    }
}
