//! Softmax and its logarithm along one axis, and their gradients.
//!
//! Sources: ONNX Softmax and LogSoftmax-1, 11 (the input is a matrix with the axes from `axis`, by default 1, as its
//! rows) and 13 (one axis, by default the last). `SoftmaxGrad_13`, `LogSoftmaxGrad_13` (one axis) and `SoftmaxGrad`,
//! `LogSoftmaxGrad` (a matrix) of `com.microsoft`. All gradient operators get the forward *result*, not the input.
//!
//! Older forms are rewritten to Flatten, the newest form, and Reshape. Narrow floats are computed in float32. The
//! largest element is subtracted before the exponential. A row with only -inf gives NaN, as in PyTorch. If a graph
//! replaces these rows by zeros, their gradients are zero.

use ortrain_expr::{ReduceOp, Strides, UnaryOp};
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId};
use rustc_hash::FxHashSet;

use crate::OpError;
use crate::class::{Class, Traits};
use crate::grad::Grad;
use crate::infer::{Infer, normalize_axis};
use crate::lower::{Lower, NestBuilder, split_at_axis};
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::formula::formula;
use crate::support::matrix_form::{downgrade, upgrade, upgrade_matrix_form};
use crate::support::rewritten_on_read::build_rewritten_on_read;

/// `exp(x) / sum(exp(x))`, or its logarithm.
struct Softmax {
    axis: i64,
    log: bool,
}

/// Gradient of [`Softmax`]: inputs are the gradient of the result, and the result.
struct SoftmaxGrad {
    axis: i64,
    log: bool,
}

/// Returns a nest over the rows along an axis, and the strides of a tensor of shape `dims` in it.
fn row_nest(cx: &Lower<'_>, dims: &[usize], axis: i64) -> Result<(NestBuilder, Strides), OpError> {
    let (before, size, after) = split_at_axis(dims, normalize_axis(axis, dims.len())?);
    let strides = [(size * after) as isize, 1, after as isize].into_iter().collect();
    Ok((cx.nest(&[before, after, size], 1), strides))
}

impl Op for Softmax {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        let shape = cx.shape(0).cloned();
        if let Some(shape) = &shape {
            normalize_axis(self.axis, shape.rank())?;
        }
        cx.set_output(0, dtype, shape);
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let y = cx.output(0, "y");
        let y = result_without_nan(cx, y)?;
        let name = if self.log { "LogSoftmaxGrad_13" } else { "SoftmaxGrad_13" };
        let gradient = cx.add_in("com.microsoft", name, &[g, y], Attrs::new().with("axis", self.axis));
        cx.set_grad(0, gradient);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let (mut nest, strides) = row_nest(cx, &cx.dims(0), self.axis)?;
        let (input, output) = (cx.input(0), cx.output(0));
        let x = nest.load_strided(cx, input, 0, &strides);
        let largest = nest.reduce(ReduceOp::Max, x);
        let shifted = nest.b.sub(x, largest);
        let power = nest.b.unary(UnaryOp::Exp, shifted);
        let sum = nest.reduce(ReduceOp::Sum, power);
        let result = if self.log {
            let log = nest.b.unary(UnaryOp::Log, sum);
            nest.b.sub(shifted, log)
        } else {
            nest.b.div(power, sum)
        };
        nest.store_strided(cx, output, 0, strides, result);
        cx.emit(nest.instruction())
    }
}

/// Operators that copy or change each element separately: NaN stays NaN.
const ELEMENTWISE_OPERATORS: [&str; 18] = [
    "Cast",
    "CastLike",
    "Concat",
    "Div",
    "Dropout",
    "Expand",
    "Flatten",
    "Gather",
    "Identity",
    "Mul",
    "Pad",
    "Reshape",
    "Slice",
    "Split",
    "Squeeze",
    "Tile",
    "Transpose",
    "Unsqueeze",
];

/// Returns the result of a softmax for its gradient: `y`, or `y` with NaN replaced by zeros.
///
/// A row with only -inf has no softmax. A graph may replace it by zeros (`Where(IsNaN(y), 0, y)`, as exporters write
/// attention after a padding mask). No gradient flows back to such a row. The gradient must use these zeros, because
/// NaN times the incoming zero is NaN.
fn result_without_nan(cx: &mut Grad<'_>, y: ValueId) -> Result<ValueId, OpError> {
    let producers_of_nan = |graph: &Graph, condition: Option<ValueId>| {
        let is_nan = |node: &Node| {
            &*node.op == "IsNaN"
                && node.outputs.first().copied().flatten() == condition
                && node.inputs.first().copied().flatten() == Some(y)
        };
        condition.is_some() && graph.nodes.iter().any(is_nan)
    };
    let mut holds: FxHashSet<ValueId> = FxHashSet::default();
    holds.insert(y);
    let mut chosen = false;
    let graph = &*cx.graph;
    for node in &graph.nodes[cx.node_index + 1..] {
        let port = |k: usize| node.inputs.get(k).copied().flatten();
        if !node.present_inputs().any(|id| holds.contains(&id)) || !node.domain.is_empty() {
            continue;
        }
        match &*node.op {
            "Where" => {
                let zero = |k: usize| {
                    let content = port(k).and_then(|id| graph.value(id).content());
                    content.is_some_and(|tensor| tensor.len() == 1 && tensor.to_f64()[0] == 0.0)
                };
                let rank =
                    |id: Option<ValueId>| id.and_then(|id| graph.value(id).ty.shape()).map(Shape::rank);
                if port(2) == Some(y)
                    && zero(1)
                    && rank(port(1)) <= rank(Some(y))
                    && producers_of_nan(graph, port(0))
                    && let Some(left) = node.outputs.first().copied().flatten()
                {
                    return Ok(left);
                }
                chosen |= [1, 2].into_iter().any(|k| port(k).is_some_and(|id| holds.contains(&id)));
            }
            op if ELEMENTWISE_OPERATORS.contains(&op) => holds.extend(node.present_outputs()),
            // A branch may select, too.
            _ => chosen |= node.captures > 0,
        }
    }
    if !chosen {
        return Ok(y);
    }
    let zero = Tensor::scalar(cx.dtype(y)?, 0.0);
    let zero = cx.constant("zero", zero);
    let broken = cx.add("IsNaN", &[y], Attrs::new());
    Ok(cx.add("Where", &[broken, zero, y], Attrs::new()))
}

impl Op for SoftmaxGrad {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 1)?;
        cx.expect_dtype(0, "a float type", DType::is_float)?;
        let dtype = cx.expect_same_dtype([0, 1])?;
        let shape = cx.broadcast([0, 1])?;
        if let (Some(shape), Some(g), Some(y)) = (&shape, cx.shape(0), cx.shape(1)) {
            let differ = |a: &Dim, b: &Dim| matches!((a.known(), b.known()), (Some(a), Some(b)) if a != b);
            if g.rank() != y.rank() || g.iter().zip(y.iter()).any(|(a, b)| differ(a, b)) {
                return Err(OpError::invalid(format!(
                    "the gradient has shape {g}, but the result has shape {y}"
                )));
            }
            normalize_axis(self.axis, shape.rank())?;
        }
        cx.set_output(0, dtype, shape);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let (mut nest, strides) = row_nest(cx, &cx.dims(1), self.axis)?;
        let (gradient, result, output) = (cx.input(0), cx.input(1), cx.output(0));
        let g = nest.load_strided(cx, gradient, 0, &strides);
        let y = nest.load_strided(cx, result, 0, &strides);
        let value = if self.log {
            let sum = nest.reduce(ReduceOp::Sum, g);
            let share = nest.b.unary(UnaryOp::Exp, y);
            let part = nest.b.mul(share, sum);
            nest.b.sub(g, part)
        } else {
            let product = nest.b.mul(g, y);
            let sum = nest.reduce(ReduceOp::Sum, product);
            let rest = nest.b.sub(g, sum);
            nest.b.mul(y, rest)
        };
        nest.store_strided(cx, output, 0, strides, value);
        cx.emit(nest.instruction())
    }
}

/// Returns true for the logarithmic operators.
fn is_log(node: &Node) -> bool {
    node.op.starts_with("Log")
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Softmax { axis: node.attrs.int("axis")?.unwrap_or(-1), log: is_log(node) }))
}

fn build_grad(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(SoftmaxGrad { axis: node.attrs.int("axis")?.unwrap_or(-1), log: is_log(node) }))
}

fn upgrade_grad(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = format!("{}_13", rw.node().op);
    upgrade_matrix_form(rw, "com.microsoft", &op)
}

/// Decomposes the gradients into operators of `ai.onnx`.
fn decompose_grad(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (g, y) = (rw.required_input(0)?, rw.required_input(1)?);
    let axis = rw.attrs().int("axis")?.unwrap_or(-1);
    let axes = rw.ints("axes", &[axis]);
    let keep = Attrs::new().with("keepdims", 1i64);
    let result = if is_log(rw.node()) {
        let sum = rw.add("ReduceSum", &[g, axes], keep);
        formula(rw, [g, y, sum], |[g, y, sum]| g - y.exp() * sum)
    } else {
        let product = rw.add("Mul", &[g, y], Attrs::new());
        let sum = rw.add("ReduceSum", &[product, axes], keep);
        formula(rw, [g, y, sum], |[g, y, sum]| y * (g - sum))
    };
    rw.replace_output(0, result);
    Ok(())
}

pub(crate) fn definitions() -> Vec<Definition> {
    let forward = ["Softmax", "LogSoftmax"].map(|name| {
        let class = Class::Softmax { log: name != "Softmax" };
        let definition = Definition::new("", name, &[1, 11, 13], build).class(class);
        definition.traits(Traits::FOLLOWS_HEAD).upgrade(upgrade).downgrade(downgrade)
    });
    let gradients = ["SoftmaxGrad_13", "LogSoftmaxGrad_13"].map(|name| {
        Definition::new("com.microsoft", name, &[1], build_grad).differentiated_as(decompose_grad)
    });
    // The versions 1, 2 make every node an old version, which is rewritten to an operator above.
    let matrix_forms = ["SoftmaxGrad", "LogSoftmaxGrad"].map(|name| {
        Definition::new("com.microsoft", name, &[1, 2], build_rewritten_on_read)
            .always_rewritten(upgrade_grad)
    });
    forward.into_iter().chain(gradients).chain(matrix_forms).collect()
}

#[cfg(test)]
mod tests {
    use ortrain_graph::{Tensor, ValueType};

    use super::*;
    use crate::testing::{
        add, assert_close, check_decomposition, check_downgrade, check_gradients, f64s, generic_tensor,
        gradient_graph, graph, one_node_graph, run, run_node,
    };

    const NEWEST: i64 = crate::NEWEST_OPSET;

    fn axis(axis: i64) -> Attrs {
        Attrs::new().with("axis", axis)
    }

    /// Computes the definition in float64.
    fn expected(x: &Tensor, axis: usize, log: bool) -> Tensor {
        let (before, size, after) = split_at_axis(x.dims(), axis);
        let x_values = x.to_f64();
        let mut y = vec![0.0; x_values.len()];
        for b in 0..before {
            for a in 0..after {
                let at = |k: usize| (b * size + k) * after + a;
                let sum: f64 = (0..size).map(|k| x_values[at(k)].exp()).sum();
                for k in 0..size {
                    let share = x_values[at(k)].exp() / sum;
                    y[at(k)] = if log { share.ln() } else { share };
                }
            }
        }
        f64s(x.dims(), &y)
    }

    #[test]
    fn every_axis() {
        let x = generic_tensor(&[2, 3, 4], 1);
        for (name, log) in [("Softmax", false), ("LogSoftmax", true)] {
            for k in 0..3i64 {
                let got = run_node(("", name), &[Some(&x)], 1, axis(k - 3)).expect("the graph runs");
                assert_close(&got[0], &expected(&x, k as usize, log), 1e-12);
            }
        }
    }

    #[test]
    fn large_and_masked_elements() {
        let x =
            Tensor::f32(&[3, 2], &[1e4, 1e4, f32::NEG_INFINITY, 3.0, f32::NEG_INFINITY, f32::NEG_INFINITY]);
        let got = run_node(("", "Softmax"), &[Some(&x)], 1, Attrs::new()).expect("the graph runs");
        let y = got[0].to_f64();
        assert_eq!(y[..4], [0.5, 0.5, 0.0, 1.0]);
        assert!(y[4].is_nan() && y[5].is_nan(), "a row without anything is NaN, as in PyTorch");
    }

    #[test]
    fn narrow_floats_are_rounded_once() {
        let elements = [0.1f32, 0.7, -1.3, 2.0].map(half::f16::from_f32);
        let x = Tensor::from_slice(DType::F16, &[4], &elements);
        let got = run_node(("", "Softmax"), &[Some(&x)], 1, Attrs::new()).expect("the graph runs");
        let exact = expected(&f64s(&[4], &x.to_f64()), 0, false).to_f64();
        let expected_elements: Vec<half::f16> = exact.into_iter().map(half::f16::from_f64).collect();
        assert_eq!(got[0].to_vec::<half::f16>(), expected_elements);
    }

    #[test]
    fn older_forms_flatten_from_axis() {
        let x = generic_tensor(&[2, 3, 4], 2);
        let flat = x.reshaped(vec![2, 12]).expect("as many elements");
        for (name, log) in [("Softmax", false), ("LogSoftmax", true)] {
            for opset in [7, 12] {
                let graph = one_node_graph(opset, ("", name), &[Some(&x)], 1, Attrs::new())
                    .expect("the node is valid");
                let got = run(&graph, std::slice::from_ref(&x)).expect("the graph runs");
                let expected_output =
                    expected(&flat, 1, log).reshaped(vec![2, 3, 4]).expect("as many elements");
                assert_close(&got[0], &expected_output, 1e-12);
            }
        }
        // On the last axis no node is added.
        let graph =
            one_node_graph(11, ("", "Softmax"), &[Some(&flat)], 1, Attrs::new()).expect("the node is valid");
        assert_eq!(graph.nodes.len(), 1);
    }

    #[test]
    fn downgrades_to_older_opsets() {
        let x = generic_tensor(&[2, 3, 4], 3);
        for k in 0..3 {
            let graph = one_node_graph(NEWEST, ("", "LogSoftmax"), &[Some(&x)], 1, axis(k))
                .expect("the node is valid");
            for opset in [7, 11] {
                let old = check_downgrade(&graph, std::slice::from_ref(&x), opset);
                assert_eq!(old.nodes.len(), if k == 2 { 1 } else { 3 });
            }
        }
    }

    #[test]
    fn gradients() {
        let x = generic_tensor(&[2, 3, 4], 4);
        for name in ["Softmax", "LogSoftmax"] {
            for k in 0..3 {
                let graph =
                    one_node_graph(NEWEST, ("", name), &[Some(&x)], 1, axis(k)).expect("the node is valid");
                check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
            }
            let graph =
                one_node_graph(11, ("", name), &[Some(&x)], 1, Attrs::new()).expect("the node is valid");
            check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
        }
    }

    /// Ways in which a graph replaces rows without softmax by zeros.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum NanReplacement {
        /// As exporters write it.
        Plainly,
        /// By NaN after a cast.
        ByCast,
        /// After a cast of the result.
        AsCast,
        /// By the comparison of a number with itself.
        ByEqual,
        /// By the mask.
        ByMask,
        /// By rows of the input with only -inf, as in PyTorch's decomposition of its safe softmax.
        ByRows,
        /// After dropout.
        AfterDropout,
        /// In another shape, on a part.
        Moved,
        /// In a branch.
        Inside,
    }

    const NAN_REPLACEMENTS: [NanReplacement; 9] = [
        NanReplacement::Plainly,
        NanReplacement::ByCast,
        NanReplacement::AsCast,
        NanReplacement::ByEqual,
        NanReplacement::ByMask,
        NanReplacement::ByRows,
        NanReplacement::AfterDropout,
        NanReplacement::Moved,
        NanReplacement::Inside,
    ];

    /// Builds `softmax(x + mask)` with zeros for rows that contain only -inf.
    fn graph_with_nan_replacement(
        replacement: NanReplacement,
        op: &str,
        x: &Tensor,
        mask: &Tensor,
        along: i64,
    ) -> Graph {
        let (mut graph, ids) = graph(&[x]);
        let mask_id = graph.add_constant("mask", mask.clone());
        let zero = graph.add_constant("zero", Tensor::scalar(DType::F64, 0.0));
        let add_to = |graph: &mut Graph, op: &str, inputs: &[ValueId], attrs: Attrs| {
            let ports: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
            add(graph, ("", op), "v", &ports, 1, attrs)[0]
        };
        let cast = |dtype: DType| Attrs::new().with("to", i64::from(dtype.to_onnx()));
        let none = Attrs::new;
        let masked = add_to(&mut graph, "Add", &[ids[0], mask_id], none());
        let y = add_to(&mut graph, op, &[masked], axis(along));
        let b = &mut graph;
        let result = match replacement {
            NanReplacement::Plainly => {
                let broken = add_to(b, "IsNaN", &[y], none());
                add_to(b, "Where", &[broken, zero, y], none())
            }
            NanReplacement::ByCast => {
                let narrow = add_to(b, "Cast", &[y], cast(DType::F32));
                let broken = add_to(b, "IsNaN", &[narrow], none());
                add_to(b, "Where", &[broken, zero, y], none())
            }
            NanReplacement::AsCast => {
                let zero = b.add_constant("narrow zero", Tensor::scalar(DType::F64, 0.0));
                let same = add_to(b, "Cast", &[y], cast(DType::F64));
                let broken = add_to(b, "IsNaN", &[same], none());
                add_to(b, "Where", &[broken, zero, same], none())
            }
            NanReplacement::ByEqual => {
                let is_not_nan = add_to(b, "Equal", &[y, y], none());
                add_to(b, "Where", &[is_not_nan, y, zero], none())
            }
            NanReplacement::ByMask => {
                let hidden = add_to(b, "IsInf", &[mask_id], none());
                add_to(b, "Where", &[hidden, zero, y], none())
            }
            NanReplacement::ByRows => {
                let hidden = add_to(b, "IsInf", &[masked], none());
                let hidden = add_to(b, "Cast", &[hidden], cast(DType::I32));
                let axes = b.add_constant("axes", Tensor::i64(&[1], &[along]));
                let rows = add_to(b, "ReduceMin", &[hidden, axes], none());
                let rows = add_to(b, "Cast", &[rows], cast(DType::Bool));
                add_to(b, "Where", &[rows, zero, y], none())
            }
            NanReplacement::AfterDropout => {
                let ratio = b.add_constant("ratio", Tensor::scalar(DType::F32, 0.25));
                let on = b.add_constant("on", Tensor::filled(DType::Bool, &[], 1.0));
                let dropped = add_to(b, "Dropout", &[y, ratio, on], Attrs::new().with("seed", 3i64));
                let broken = add_to(b, "IsNaN", &[dropped], none());
                add_to(b, "Where", &[broken, zero, dropped], none())
            }
            NanReplacement::Moved => {
                let transposed = add_to(b, "Transpose", &[y], none());
                let bounds = [[1], [3], [0]].map(|at| b.add_constant("at", Tensor::i64(&[1], &at)));
                let part = add_to(b, "Slice", &[transposed, bounds[0], bounds[1], bounds[2]], none());
                let broken = add_to(b, "IsNaN", &[part], none());
                add_to(b, "Where", &[broken, zero, part], none())
            }
            NanReplacement::Inside => {
                let on = add_to(b, "Equal", &[zero, zero], none());
                let mut branch = Graph::new("branch");
                let inner = branch.add_value("inner", ValueType::tensor(DType::F64, x.dims()));
                branch.inputs = vec![inner];
                let zero = branch.add_constant("nothing", Tensor::scalar(DType::F64, 0.0));
                let broken = add_to(&mut branch, "IsNaN", &[inner], none());
                let chosen = add_to(&mut branch, "Where", &[broken, zero, inner], none());
                branch.outputs = vec![chosen];
                let attrs = Attrs::new().with("then_branch", branch.clone()).with("else_branch", branch);
                let result = add_to(b, "If", &[on, y], attrs);
                b.nodes.last_mut().expect("just added").captures = 1;
                result
            }
        };
        graph.outputs = vec![result];
        crate::passes::infer::infer(&mut graph).expect("the graph is valid");
        graph
    }

    /// Gradients through rows without softmax are finite, and zero for replaced rows, for every shape and mask.
    #[test]
    fn replaced_rows_get_zero_gradient() {
        let hidden = f64::NEG_INFINITY;
        for (dims, along) in [(vec![3, 4], -1i64), (vec![4, 3], 0), (vec![2, 3, 4], 2), (vec![2, 4, 3], 1)] {
            let x = generic_tensor(&dims, 7);
            let (_, size, after) = split_at_axis(&dims, normalize_axis(along, dims.len()).expect("valid"));
            let row = |k: usize| (k / (size * after)) * after + k % after;
            let at = |k: usize| k / after % size;
            // One row, all rows except one, parts of rows, all.
            for kind in 0..4 {
                let mask: Vec<f64> = (0..x.len())
                    .map(|k| match kind {
                        0 if row(k) == 1 => hidden,
                        1 if row(k) != 1 => hidden,
                        2 if at(k) < row(k) => hidden,
                        3 => hidden,
                        _ => 0.25 * at(k) as f64,
                    })
                    .collect();
                let mask = f64s(&dims, &mask);
                for replacement in NAN_REPLACEMENTS {
                    for op in ["Softmax", "LogSoftmax"] {
                        // A finite logarithm is not masked: some elements are -inf only in the logarithm.
                        if op == "LogSoftmax" && kind == 2 {
                            continue;
                        }
                        let graph = graph_with_nan_replacement(replacement, op, &x, &mask, along);
                        let dims = graph.value(graph.outputs[0]).ty.shape().and_then(Shape::concrete);
                        let arriving = Tensor::filled(DType::F64, &dims.expect("known"), 1.5);
                        let gradient = gradient_graph(&graph, &[Some(arriving)], &[0]);
                        let inputs = std::slice::from_ref(&x);
                        let got = run(&gradient, inputs).expect("the graph runs").remove(0).to_f64();
                        for (k, got) in got.iter().enumerate() {
                            let label = format!("{op} {replacement:?} {kind}: {got} at {k}");
                            assert!(got.is_finite(), "{label}");
                            let is_masked = kind == 3 || kind == 0 && row(k) == 1 || kind == 1 && row(k) != 1;
                            assert!(!is_masked || *got == 0.0, "{label}");
                        }
                        check_gradients(&graph, inputs, &[0], &[0]);
                    }
                }
            }
        }
    }

    /// If a row without softmax is not replaced, its gradient is NaN, as in PyTorch.
    #[test]
    fn unreplaced_rows_get_nan_gradient() {
        let x = f64s(&[2, 2], &[f64::NEG_INFINITY, f64::NEG_INFINITY, 1.0, 2.0]);
        let graph =
            one_node_graph(NEWEST, ("", "Softmax"), &[Some(&x)], 1, Attrs::new()).expect("the node is valid");
        let gradient = gradient_graph(&graph, &[Some(generic_tensor(&[2, 2], 1))], &[0]);
        assert_eq!(gradient.nodes.len(), 2, "{gradient}");
        let got = run(&gradient, &[x]).expect("the graph runs").remove(0).to_f64();
        assert_eq!([0, 1, 2, 3].map(|k| got[k].is_nan()), [true, true, false, false]);
    }

    /// The zeros of the graph are reused, and no others are created.
    #[test]
    fn reuses_existing_replacement() {
        let (x, mask) = (generic_tensor(&[2, 3], 1), f64s(&[2, 3], &[0.0; 6]));
        let graph = graph_with_nan_replacement(NanReplacement::Plainly, "Softmax", &x, &mask, -1);
        let gradient = gradient_graph(&graph, &[Some(generic_tensor(&[2, 3], 2))], &[0]);
        assert_eq!(gradient.nodes.iter().filter(|node| &*node.op == "IsNaN").count(), 1, "{gradient}");
    }

    #[test]
    fn gradient_operators() {
        let (g, y) = (generic_tensor(&[2, 3, 4], 5), generic_tensor(&[2, 3, 4], 6));
        let inputs = [g, y];
        let ports = [Some(&inputs[0]), Some(&inputs[1])];
        for name in ["SoftmaxGrad_13", "LogSoftmaxGrad_13"] {
            let graph = one_node_graph(NEWEST, ("com.microsoft", name), &ports, 1, axis(1))
                .expect("the node is valid");
            check_decomposition(&graph, &inputs, 1e-12);
        }
        // The form on matrices equals the other one on reshaped inputs.
        let flat = inputs.clone().map(|x| x.reshaped(vec![2, 12]).expect("as many elements"));
        let flat_ports = [Some(&flat[0]), Some(&flat[1])];
        for (old, new) in [("SoftmaxGrad", "SoftmaxGrad_13"), ("LogSoftmaxGrad", "LogSoftmaxGrad_13")] {
            let got = run_node(("com.microsoft", old), &ports, 1, Attrs::new()).expect("the graph runs");
            let expected_outputs =
                run_node(("com.microsoft", new), &flat_ports, 1, Attrs::new()).expect("the graph runs");
            assert_eq!(got[0].data(), expected_outputs[0].data());
            assert_eq!(got[0].dims(), [2, 3, 4]);
        }
    }

    #[test]
    fn empty_batches_and_wrong_axes() {
        let x = Tensor::f32(&[0, 3], &[]);
        let got = run_node(("", "Softmax"), &[Some(&x)], 1, Attrs::new()).expect("the graph runs");
        assert_eq!(got[0].dims(), [0, 3]);
        let error =
            one_node_graph(NEWEST, ("", "Softmax"), &[Some(&x)], 1, axis(2)).expect_err("there are two axes");
        assert!(error.to_string().contains("axis 2 is out of range for rank 2"), "{error}");
    }
}
