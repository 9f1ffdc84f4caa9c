//! Cross-entropy losses with classes along the last axis, as in training graphs of ONNX Runtime.
//!
//! `SoftmaxCrossEntropy` and `SoftmaxCrossEntropyGrad` of `com.microsoft` have distributions over the classes as
//! labels, one-hot or not, with the shape `[..., C]` of the logits. The loss of a row is
//! `-sum(label * log_softmax(logits))`. ONNX Runtime's `SparseSoftmaxCrossEntropy` and `SparseSoftmaxCrossEntropyGrad`
//! in the domain of ONNX, version 9, have classes as labels, `[...]`. They have a weight for each label (not for each
//! class).
//!
//! `mean` divides by the number of rows, or by the sum of the weights. Without a reduction there is one loss for each
//! row. (ONNX Runtime 1.19 sums the losses in this case.) A label outside the classes is an error of the run. The
//! second result is the log-softmax. A class with probability zero and label zero adds nothing.
//!
//! The gradients are the derivatives also where labels do not sum to one; ONNX Runtime 1.19 differs there. All four
//! operators are compositions. Logits, distributions and weights have gradients.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId};

use crate::OpError;
use crate::class::Traits;
use crate::families::loss::entropy::Reduction;
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::formula::formula;

/// Cross-entropy loss of rows, or its gradient. Dense labels are distributions, sparse labels are classes.
struct RowCrossEntropy {
    reduction: Reduction,
    is_sparse: bool,
    is_gradient: bool,
}

impl RowCrossEntropy {
    fn read(node: &Node) -> Result<RowCrossEntropy, OpError> {
        Ok(RowCrossEntropy {
            reduction: Reduction::read(&node.attrs)?,
            is_sparse: node.op.starts_with("Sparse"),
            is_gradient: node.op.ends_with("Grad"),
        })
    }

    /// Returns the index of the input with the logits. Labels and weights follow.
    fn logits_input(&self) -> usize {
        usize::from(self.is_gradient)
    }
}

fn are_known_to_differ(a: &Shape, b: &Shape) -> bool {
    let sizes_differ = |(a, b): (&Dim, &Dim)| matches!((a.known(), b.known()), (Some(a), Some(b)) if a != b);
    a.rank() != b.rank() || a.iter().zip(b.iter()).any(sizes_differ)
}

impl Op for RowCrossEntropy {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let first = self.logits_input();
        let min_inputs = first + 2;
        cx.check_arity(
            min_inputs,
            min_inputs + usize::from(self.is_sparse),
            if self.is_gradient { 1 } else { 2 },
        )?;
        let dtype = cx.expect_dtype(first, "a float type", DType::is_float)?;
        if self.is_gradient {
            cx.expect_same_dtype([0, first])?;
        }
        if self.is_sparse {
            cx.expect_dtype(first + 1, "int32 or int64", |dtype| matches!(dtype, DType::I32 | DType::I64))?;
            if cx.has_input(first + 2) {
                cx.expect_same_dtype([first, first + 2])?;
            }
        } else {
            cx.expect_same_dtype([first, first + 1])?;
        }
        let logits = cx.shape(first).cloned();
        if logits.as_ref().is_some_and(|shape| shape.rank() == 0) {
            return Err(OpError::invalid("the logits must have an axis of classes, got a scalar"));
        }
        let rows = logits.as_ref().map(|shape| shape[..shape.rank() - 1].iter().cloned().collect::<Shape>());
        let label_shape = if self.is_sparse { rows.clone() } else { logits.clone() };
        for k in first + 1..min_inputs + usize::from(self.is_sparse) {
            if let (Some(expected), Some(found)) = (&label_shape, cx.shape(k))
                && are_known_to_differ(expected, found)
            {
                return Err(OpError::invalid(format!(
                    "input {k} has shape {found} for logits of shape {}: {expected} is needed",
                    logits.as_ref().unwrap_or(expected)
                )));
            }
        }
        let loss = match self.reduction {
            Reduction::None => rows,
            Reduction::Sum | Reduction::Mean => Some(Shape::scalar()),
        };
        if self.is_gradient {
            if let (Some(loss_shape), Some(found)) = (&loss, cx.shape(0)) {
                let is_one = loss_shape.rank() == 0
                    && found.iter().all(|dim| dim.known().is_none_or(|size| size == 1));
                if !is_one && are_known_to_differ(loss_shape, found) {
                    return Err(OpError::invalid(format!(
                        "the gradient has shape {found}, but the loss has shape {loss_shape}"
                    )));
                }
            }
            cx.set_output(0, dtype, logits);
            return Ok(());
        }
        cx.set_output(0, dtype, loss);
        cx.set_output(1, dtype, logits);
        Ok(())
    }
}

/// Logits, labels and weights, flattened to a list of rows.
struct FlatRows {
    logits: ValueId,
    labels: ValueId,
    weights: Option<ValueId>,
}

impl FlatRows {
    fn flatten(rw: &mut Rewrite<'_>, first: usize) -> Result<FlatRows, OpError> {
        let (logits, labels) = (rw.required_input(first)?, rw.required_input(first + 1)?);
        let last = rw.shape(logits).map_or(-1, |shape| shape.rank() as i64 - 1);
        let row = rw.ints("row", &[-1]);
        let logits = rw.add("Flatten", &[logits], Attrs::new().with("axis", last));
        let labels = rw.add("Reshape", &[labels, row], Attrs::new());
        let weights = rw.input(first + 2).map(|weights| rw.add("Reshape", &[weights, row], Attrs::new()));
        Ok(FlatRows { logits, labels, weights })
    }
}

fn without_keepdims() -> Attrs {
    Attrs::new().with("keepdims", 0i64)
}

fn no_attrs() -> Attrs {
    Attrs::new()
}

fn last_axis_attrs() -> Attrs {
    Attrs::new().with("axis", -1i64)
}

fn dtype_of(rw: &Rewrite<'_>, value: ValueId) -> Result<DType, OpError> {
    rw.dtype(value).ok_or_else(|| OpError::invalid("the type of the logits is not known"))
}

fn decompose_dense(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = RowCrossEntropy::read(rw.node())?;
    let (logits, labels) = (rw.required_input(0)?, rw.required_input(1)?);
    let dtype = dtype_of(rw, logits)?;
    let log_prob = rw.add("LogSoftmax", &[logits], last_axis_attrs());
    if rw.has_output(1) {
        rw.replace_output(1, log_prob);
    }
    if !rw.has_output(0) {
        return Ok(());
    }
    let zero = rw.constant("zero", Tensor::scalar(dtype, 0.0));
    // Zero times minus infinity is NaN.
    let product = formula(rw, [labels, log_prob, zero], |[labels, log_prob, zero]| {
        labels.equals(zero).choose(zero, labels * log_prob)
    });
    let classes = rw.ints("classes", &[-1]);
    let sums = rw.add("ReduceSum", &[product, classes], without_keepdims());
    let losses = rw.add("Neg", &[sums], no_attrs());
    let loss = match op.reduction {
        Reduction::None => losses,
        Reduction::Sum => rw.add("ReduceSum", &[losses], without_keepdims()),
        Reduction::Mean => rw.add("ReduceMean", &[losses], without_keepdims()),
    };
    rw.replace_output(0, loss);
    Ok(())
}

fn decompose_sparse(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = RowCrossEntropy::read(rw.node())?;
    let (logits, labels) = (rw.required_input(0)?, rw.required_input(1)?);
    if rw.has_output(1) {
        let log_prob = rw.add("LogSoftmax", &[logits], last_axis_attrs());
        rw.replace_output(1, log_prob);
    }
    if !rw.has_output(0) {
        return Ok(());
    }
    let flat = FlatRows::flatten(rw, 0)?;
    let loss_of = |rw: &mut Rewrite<'_>, reduction: Reduction| {
        let attrs = Attrs::new().with("reduction", reduction.name());
        rw.add("SoftmaxCrossEntropyLoss", &[flat.logits, flat.labels], attrs)
    };
    let loss = match (flat.weights, op.reduction) {
        (None, Reduction::Sum | Reduction::Mean) => loss_of(rw, op.reduction),
        (weights, reduction) => {
            let mut losses = loss_of(rw, Reduction::None);
            if let Some(weights) = weights {
                losses = rw.add("Mul", &[losses, weights], no_attrs());
            }
            match reduction {
                Reduction::None => {
                    let shape = rw.add("Shape", &[labels], no_attrs());
                    rw.add("Reshape", &[losses, shape], no_attrs())
                }
                Reduction::Sum => rw.add("ReduceSum", &[losses], without_keepdims()),
                Reduction::Mean => {
                    let sum = rw.add("ReduceSum", &[losses], without_keepdims());
                    let count = rw.add("ReduceSum", &[weights.unwrap_or(losses)], without_keepdims());
                    rw.add("Div", &[sum, count], no_attrs())
                }
            }
        }
    };
    rw.replace_output(0, loss);
    Ok(())
}

/// Returns the gradient of the loss as a scalar. Without a reduction it is one number for each row, reshaped by
/// `per_row`.
fn reshape_loss_gradient(
    rw: &mut Rewrite<'_>,
    reduction: Reduction,
    per_row: impl Fn(&mut Rewrite<'_>, ValueId) -> ValueId,
) -> Result<ValueId, OpError> {
    let g = rw.required_input(0)?;
    Ok(match reduction {
        Reduction::None => per_row(rw, g),
        Reduction::Sum | Reduction::Mean => {
            let scalar = rw.ints("scalar", &[]);
            rw.add("Reshape", &[g, scalar], no_attrs())
        }
    })
}

/// Decomposes the gradient into `g * (sum(label) * exp(log_prob) - label)`. For distributions this is
/// `g * (exp(log_prob) - label)`.
fn decompose_dense_grad(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = RowCrossEntropy::read(rw.node())?;
    let (log_prob, labels) = (rw.required_input(1)?, rw.required_input(2)?);
    let dtype = dtype_of(rw, log_prob)?;
    let classes = rw.ints("classes", &[-1]);
    let mut g = reshape_loss_gradient(rw, op.reduction, |rw, g| {
        let classes = rw.ints("classes", &[-1]);
        rw.add("Unsqueeze", &[g, classes], no_attrs())
    })?;
    let sums = rw.add("ReduceSum", &[labels, classes], Attrs::new().with("keepdims", 1i64));
    if op.reduction == Reduction::Mean {
        let count = rw.add("Size", &[sums], no_attrs());
        let count = rw.add("Cast", &[count], Attrs::new().with("to", i64::from(dtype.to_onnx())));
        g = rw.add("Div", &[g, count], no_attrs());
    }
    let values = [log_prob, sums, labels, g];
    let gradient = formula(rw, values, |[log_prob, sums, labels, g]| (log_prob.exp() * sums - labels) * g);
    rw.replace_output(0, gradient);
    Ok(())
}

fn decompose_sparse_grad(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = RowCrossEntropy::read(rw.node())?;
    let log_prob = rw.required_input(1)?;
    let flat = FlatRows::flatten(rw, 1)?;
    let mut g = reshape_loss_gradient(rw, op.reduction, |rw, g| {
        let row = rw.ints("row", &[-1]);
        rw.add("Reshape", &[g, row], no_attrs())
    })?;
    let mut reduction = op.reduction;
    if let Some(weights) = flat.weights {
        if reduction == Reduction::Mean {
            let count = rw.add("ReduceSum", &[weights], without_keepdims());
            g = rw.add("Div", &[g, count], no_attrs());
        }
        g = rw.add("Mul", &[g, weights], no_attrs());
        reduction = Reduction::None;
    }
    let inputs = [Some(g), Some(flat.logits), Some(flat.labels)];
    let attrs = Attrs::new().with("reduction", reduction.name());
    let gradient = rw.add_node("com.microsoft", "SoftmaxCrossEntropyLossGrad", &inputs, 1, attrs)[0];
    let shape = rw.add("Shape", &[log_prob], no_attrs());
    let gradient = rw.add("Reshape", &[gradient, shape], no_attrs());
    rw.replace_output(0, gradient);
    Ok(())
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(RowCrossEntropy::read(node)?))
}

pub(super) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("com.microsoft", "SoftmaxCrossEntropy", &[1], build)
            .composition(decompose_dense)
            .traits(Traits::COMPUTES_LOSS),
        Definition::new("com.microsoft", "SoftmaxCrossEntropyGrad", &[1], build)
            .composition(decompose_dense_grad),
        Definition::new("", "SparseSoftmaxCrossEntropy", &[9], build)
            .composition(decompose_sparse)
            .traits(Traits::COMPUTES_LOSS)
            .extension(),
        Definition::new("", "SparseSoftmaxCrossEntropyGrad", &[9], build)
            .composition(decompose_sparse_grad)
            .extension(),
    ]
}

#[cfg(test)]
mod tests {
    use ortrain_program::RunError;

    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, assert_close, check_decomposition, check_gradients, f64s, generic_tensor, one_node_graph,
        run_node,
    };

    const DENSE: (&str, &str) = ("com.microsoft", "SoftmaxCrossEntropy");
    const SPARSE: (&str, &str) = ("", "SparseSoftmaxCrossEntropy");
    const REDUCTIONS: [&str; 3] = ["none", "sum", "mean"];

    fn reduction(name: &str) -> Attrs {
        Attrs::new().with("reduction", name)
    }

    /// Logits of the probabilities 1/2, 1/4, 1/4.
    fn logits() -> Tensor {
        f64s(&[2, 3], &[2f64.ln(), 0.0, 0.0, 2f64.ln(), 0.0, 0.0])
    }

    #[test]
    fn losses_of_all_reductions() {
        let (first, second) = (4f64.ln(), 2f64.ln());
        let labels = Tensor::i64(&[2], &[1, 0]);
        let one_hot = f64s(&[2, 3], &[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]);
        let weights = f64s(&[2], &[3.0, 1.0]);
        let expected = [
            f64s(&[2], &[first, second]),
            f64s(&[], &[first + second]),
            f64s(&[], &[(first + second) / 2.0]),
        ];
        for (name, expected) in REDUCTIONS.iter().zip(&expected) {
            for (op, labels) in [(DENSE, &one_hot), (SPARSE, &labels)] {
                let got =
                    run_node(op, &[Some(&logits()), Some(labels)], 2, reduction(name)).expect("it runs");
                assert_close(&got[0], expected, 1e-12);
                assert_close(
                    &got[1],
                    &f64s(&[2, 3], &[-second, -first, -first, -second, -first, -first]),
                    1e-12,
                );
            }
        }
        let weighted = |name| {
            let inputs = [logits(), labels.clone(), weights.clone()];
            let ports: Vec<Option<&Tensor>> = inputs.iter().map(Some).collect();
            run_node(SPARSE, &ports, 1, reduction(name)).expect("it runs").remove(0)
        };
        assert_close(&weighted("none"), &f64s(&[2], &[3.0 * first, second]), 1e-12);
        assert_close(&weighted("mean"), &f64s(&[], &[(3.0 * first + second) / 4.0]), 1e-12);
        // A class with probability zero.
        let masked = f64s(&[1, 2], &[0.0, f64::NEG_INFINITY]);
        let got = run_node(DENSE, &[Some(&masked), Some(&f64s(&[1, 2], &[1.0, 0.0]))], 1, Attrs::new());
        assert_close(&got.expect("it runs")[0], &f64s(&[], &[0.0]), 0.0);
    }

    #[test]
    fn gradients() {
        let logits = generic_tensor(&[2, 3, 4], 1);
        let soft = generic_tensor(&[2, 3, 4], 2);
        let labels = Tensor::i64(&[2, 3], &[0, 3, 1, 2, 2, 0]);
        let weights = generic_tensor(&[2, 3], 3);
        for name in REDUCTIONS {
            let ports = [Some(&logits), Some(&soft)];
            let graph = one_node_graph(NEWEST_OPSET, DENSE, &ports, 2, reduction(name)).expect("valid");
            check_gradients(&graph, &[logits.clone(), soft.clone()], &[0, 1], &[0, 1]);
            let ports = [Some(&logits), Some(&labels), Some(&weights)];
            let graph = one_node_graph(NEWEST_OPSET, SPARSE, &ports, 2, reduction(name)).expect("valid");
            check_gradients(&graph, &[logits.clone(), labels.clone(), weights.clone()], &[0, 2], &[0, 1]);
        }
    }

    /// The gradient operators equal central differences of the forward operators, in float64.
    #[test]
    fn gradient_operators() {
        const STEP: f64 = 1e-5;
        let logits = generic_tensor(&[2, 3], 1);
        let labels = Tensor::i64(&[2], &[2, 0]);
        let weights = generic_tensor(&[2], 3);
        let soft = generic_tensor(&[2, 3], 2);
        for name in REDUCTIONS {
            let g = if name == "none" { generic_tensor(&[2], 5) } else { generic_tensor(&[], 5) };
            let dense: Vec<&Tensor> = vec![&soft];
            for (forward, backward, other_inputs) in [
                (DENSE, ("com.microsoft", "SoftmaxCrossEntropyGrad"), dense),
                (SPARSE, ("", "SparseSoftmaxCrossEntropyGrad"), vec![&labels]),
                (SPARSE, ("", "SparseSoftmaxCrossEntropyGrad"), vec![&labels, &weights]),
            ] {
                let run = |logits: &Tensor| {
                    let ports: Vec<Option<&Tensor>> =
                        [logits].into_iter().chain(other_inputs.iter().copied()).map(Some).collect();
                    run_node(forward, &ports, 2, reduction(name)).expect("it runs")
                };
                let log_prob = run(&logits).remove(1);
                let ports: Vec<Option<&Tensor>> =
                    [&g, &log_prob].into_iter().chain(other_inputs.iter().copied()).map(Some).collect();
                let got = run_node(backward, &ports, 1, reduction(name)).expect("it runs").remove(0);
                let total = |k: usize, by: f64| -> f64 {
                    let mut elements = logits.to_f64();
                    elements[k] += by;
                    let loss = run(&f64s(logits.dims(), &elements)).remove(0).to_f64();
                    loss.into_iter().zip(g.to_f64()).map(|(loss, g)| loss * g).sum()
                };
                let expected: Vec<f64> =
                    (0..logits.len()).map(|k| (total(k, STEP) - total(k, -STEP)) / (2.0 * STEP)).collect();
                assert_close(&got, &f64s(logits.dims(), &expected), 1e-7);
                let inputs: Vec<Tensor> = ports.iter().map(|port| port.expect("there").clone()).collect();
                let graph =
                    one_node_graph(NEWEST_OPSET, backward, &ports, 1, reduction(name)).expect("valid");
                check_decomposition(&graph, &inputs, 1e-12);
            }
        }
    }

    #[test]
    fn out_of_range_labels_fail() {
        for bad in [-1, 3] {
            let labels = Tensor::i64(&[2], &[0, bad]);
            let failure = run_node(SPARSE, &[Some(&logits()), Some(&labels)], 1, Attrs::new());
            let Err(Failure::Run(RunError::IndexOutOfRange { index, .. })) = failure else {
                panic!("{failure:?}")
            };
            assert_eq!(index, bad);
        }
    }

    #[test]
    fn rejects_mismatched_shapes() {
        let weights = generic_tensor(&[3], 1);
        let labels = Tensor::i64(&[2], &[0, 1]);
        let message = |op, ports: &[Option<&Tensor>]| {
            let failure = run_node(op, ports, 1, Attrs::new()).expect_err("refused");
            let Failure::Prepare(error) = failure else { panic!("prepared") };
            error.to_string()
        };
        let refusal = message(DENSE, &[Some(&logits()), Some(&generic_tensor(&[2], 1))]);
        assert!(
            refusal.contains("input 1 has shape [2] for logits of shape [2, 3]: [2, 3] is needed"),
            "{refusal}"
        );
        let refusal = message(SPARSE, &[Some(&logits()), Some(&labels), Some(&weights)]);
        assert!(
            refusal.contains("input 2 has shape [3] for logits of shape [2, 3]: [2] is needed"),
            "{refusal}"
        );
        let gradient = ("com.microsoft", "SoftmaxCrossEntropyGrad");
        let refusal = message(gradient, &[Some(&weights), Some(&logits()), Some(&logits())]);
        assert!(refusal.contains("the gradient has shape [3], but the loss has shape []"), "{refusal}");
        let gradient = ("", "SparseSoftmaxCrossEntropyGrad");
        let refusal = message(gradient, &[Some(&weights), Some(&logits()), Some(&labels)]);
        assert!(refusal.contains("the gradient has shape [3], but the loss has shape []"), "{refusal}");
        let refusal = message(DENSE, &[Some(&generic_tensor(&[], 1)), Some(&generic_tensor(&[], 1))]);
        assert!(refusal.contains("the logits must have an axis of classes, got a scalar"), "{refusal}");
    }
}
