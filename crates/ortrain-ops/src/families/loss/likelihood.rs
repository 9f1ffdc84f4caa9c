//! Negative log-likelihood loss.
//!
//! NegativeLogLikelihoodLoss-12, 13, 22 of ONNX
//! (<https://onnx.ai/onnx/operators/onnx__NegativeLogLikelihoodLoss.html>): the negated input element at the label of
//! each sample. Weights, `ignore_index` and reductions are the same as in the cross-entropy. The gradient is a scatter
//! to these elements. `NegativeLogLikelihoodLossInternal` and `NegativeLogLikelihoodLossInternal2` of `com.microsoft`
//! take `ignore_index` as an input.

use ortrain_expr::Reg;
use ortrain_graph::{Attrs, DType, Graph, Node, Shape, Tensor, ValueId};

use crate::OpError;
use crate::class::{Class, Traits};
use crate::families::loss::entropy::{
    CrossEntropy, IgnoredLabel, Reduction, emit_reduction, integer_scalar, losses_buffer,
};
use crate::grad::Grad;
use crate::infer::Infer;
use crate::lower::{Lower, NestBuilder, split_at_axis};
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;

struct NegativeLogLikelihoodLoss {
    entropy: CrossEntropy,
}

impl NegativeLogLikelihoodLoss {
    fn check_inputs(&self, cx: &mut Infer<'_>, inputs: usize) -> Result<(), OpError> {
        cx.check_arity(2, inputs, 1)?;
        let (dtype, samples) = self.entropy.check_inputs(cx)?;
        let loss = match self.entropy.reduction {
            Reduction::None => samples,
            Reduction::Sum | Reduction::Mean => Some(Shape::scalar()),
        };
        cx.set_output(0, dtype, loss);
        Ok(())
    }
}

impl Op for NegativeLogLikelihoodLoss {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        self.check_inputs(cx, 3)
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        if !cx.needs_grad(0) {
            return Ok(());
        }
        let (scores, labels) = (cx.input(0)?, cx.input(1)?);
        let (dtype, label_type) = (cx.dtype(scores)?, cx.dtype(labels)?);
        let zero = cx.constant("zero", Tensor::scalar(dtype, 0.0));
        // Ignored labels are replaced by class 0, with weight 0.
        let ignored = match self.entropy.ignore {
            IgnoredLabel::Label(label) => {
                // No label equals an `ignore_index` that the type of the labels cannot represent.
                let label = match label_type {
                    DType::I64 => Some(Tensor::i64(&[], &[label])),
                    _ => i32::try_from(label).ok().map(|label| Tensor::from_slice(label_type, &[], &[label])),
                };
                label.map(|label| {
                    let label = cx.constant("ignore_index", label);
                    cx.add("Equal", &[labels, label], Attrs::new())
                })
            }
            IgnoredLabel::None | IgnoredLabel::Input(_) => None,
        };
        let safe = match ignored {
            Some(ignored) => {
                let first = cx.constant("first", Tensor::scalar(label_type, 0.0));
                cx.add("Where", &[ignored, first, labels], Attrs::new())
            }
            None => labels,
        };
        let mut weight = match cx.optional_input(2) {
            Some(weights) => {
                let weight_type = cx.dtype(weights)?;
                let weights = match weight_type == dtype {
                    true => weights,
                    false => cx.add("Cast", &[weights], Attrs::new().with("to", i64::from(dtype.to_onnx()))),
                };
                Some(cx.add("Gather", &[weights, safe], Attrs::new().with("axis", 0i64)))
            }
            None => None,
        };
        if let Some(ignored) = ignored {
            let one = cx.constant("one", Tensor::scalar(dtype, 1.0));
            weight = Some(cx.add("Where", &[ignored, zero, weight.unwrap_or(one)], Attrs::new()));
        }
        let mut share = g;
        if self.entropy.reduction == Reduction::Mean {
            share = match weight {
                Some(weight) => {
                    let sum = cx.add("ReduceSum", &[weight], Attrs::new().with("keepdims", 0i64));
                    cx.add("Div", &[g, sum], Attrs::new())
                }
                None => {
                    let count = cx.add("Size", &[labels], Attrs::new());
                    let down = Attrs::new().with("scale_down", 1i64);
                    cx.add_in("com.microsoft", "Scale", &[g, count], down)
                }
            };
        }
        let mut scaled = match weight {
            Some(weight) => cx.add("Mul", &[share, weight], Attrs::new()),
            None if self.entropy.reduction == Reduction::None => share,
            None => {
                let shape = cx.shape_of(labels);
                cx.add("Expand", &[share, shape], Attrs::new())
            }
        };
        if let Some(ignored) = ignored {
            // If all labels are ignored, the mean divides by zero.
            scaled = cx.add("Where", &[ignored, zero, scaled], Attrs::new());
        }
        let down = cx.add("Neg", &[scaled], Attrs::new());
        let axis = cx.ints("classes", &[1]);
        let down = cx.add("Unsqueeze", &[down, axis], Attrs::new());
        let indices = cx.add("Unsqueeze", &[safe, axis], Attrs::new());
        let shape = cx.shape_of(scores);
        let attrs = Attrs::new().with("axis", 1i64);
        let gradient: ValueId =
            cx.add_in("com.microsoft", "GatherElementsGrad", &[down, shape, indices], attrs);
        cx.set_grad(0, gradient);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let entropy = &self.entropy;
        let dtype = cx.dtype(0);
        let (batch, classes, spatial) = split_at_axis(&cx.dims(0), 1);
        let samples = batch * spatial;
        entropy.guard_labels(cx, classes)?;
        let losses = losses_buffer(entropy, cx, dtype, samples);
        let scores = cx.input(0);
        let mut nest = cx.nest(&[batch, spatial], 0);
        let label = entropy.load_label(cx, &mut nest, &[spatial as isize, 1]);
        let index = class_element_index(&mut nest, (classes, spatial), label.valid);
        let ty = ortrain_expr::Type::of(dtype);
        let score = nest.gather(cx, scores, index);
        let weight = entropy.load_weight(cx, &mut nest, &label, ty);
        let loss = nest.b.mul(score, weight);
        let loss = nest.b.unary(ortrain_expr::UnaryOp::Neg, loss);
        let loss = label.zero_if_ignored(&mut nest, loss);
        nest.store_contiguous(cx, losses, loss);
        cx.emit(nest.instruction())?;
        emit_reduction(entropy, cx, losses, samples)
    }
}

/// Returns the flat index of the element of a class in scores `[batch, classes, positions]`. The first two axes of the
/// nest are batch and positions.
fn class_element_index(nest: &mut NestBuilder, (classes, positions): (usize, usize), class: Reg) -> Reg {
    let (sample, position) = (nest.b.coordinate(0), nest.b.coordinate(1));
    let (classes, spatial) = (nest.b.int(classes as i64), nest.b.int(positions as i64));
    let first = nest.b.mul(sample, classes);
    let row = nest.b.add(first, class);
    let start = nest.b.mul(row, spatial);
    nest.b.add(start, position)
}

fn build(graph: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(NegativeLogLikelihoodLoss { entropy: CrossEntropy::read(graph, node, false, false)? }))
}

/// Variant with `ignore_index` as an input. It is a composition, so it only checks types and shapes.
struct NegativeLogLikelihoodLossInternal(NegativeLogLikelihoodLoss);

impl Op for NegativeLogLikelihoodLossInternal {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        self.0.check_inputs(cx, 4)
    }
}

fn build_internal(graph: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(NegativeLogLikelihoodLossInternal(NegativeLogLikelihoodLoss {
        entropy: CrossEntropy::read(graph, node, true, false)?,
    })))
}

fn decompose_internal(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let log_prob = rw.required_input(0)?;
    let loss = add_negative_log_likelihood(rw, log_prob, rw.dtype(log_prob))?;
    rw.replace_output(0, loss);
    Ok(())
}

/// Adds the negative log-likelihood loss of `log_prob`. Inputs 1 to 3 of the node are labels, weights and the optional
/// label to ignore.
///
/// `log_prob` may be a new value, without an inferred type, so `dtype` is its type.
pub(super) fn add_negative_log_likelihood(
    rw: &mut Rewrite<'_>,
    log_prob: ValueId,
    dtype: Option<DType>,
) -> Result<ValueId, OpError> {
    const LOSS: &str = "NegativeLogLikelihoodLoss";
    let (labels, weights) = (rw.required_input(1)?, rw.input(2));
    let reduction = Reduction::read(rw.attrs())?;
    let loss_of = |rw: &mut Rewrite<'_>, labels: ValueId, weights: Option<ValueId>, attrs: Attrs| {
        let inputs: Vec<Option<ValueId>> = [log_prob, labels].into_iter().chain(weights).map(Some).collect();
        rw.add_node("", LOSS, &inputs, 1, attrs)[0]
    };
    let reduced = |reduction: Reduction| Attrs::new().with("reduction", reduction.name());
    let Some(ignore) = rw.input(3) else {
        return Ok(loss_of(rw, labels, weights, reduced(reduction)));
    };
    if let Some(&[label]) = rw.constant_of(ignore).and_then(Tensor::to_i64).as_deref() {
        return Ok(loss_of(rw, labels, weights, reduced(reduction).with("ignore_index", label)));
    }
    // `ignore_index` is computed in the graph: the ignored labels are replaced by class 0, and their losses by 0.
    let types = dtype.zip(rw.dtype(labels));
    let (dtype, label_type) = types.ok_or_else(|| OpError::invalid("the types of the inputs are unknown"))?;
    let cast = |rw: &mut Rewrite<'_>, value: ValueId, to: DType| {
        rw.add("Cast", &[value], Attrs::new().with("to", i64::from(to.to_onnx())))
    };
    let scalar = rw.ints("scalar", &[]);
    let ignore = rw.add("Reshape", &[ignore, scalar], Attrs::new());
    let ignore = cast(rw, ignore, label_type);
    let ignored = rw.add("Equal", &[labels, ignore], Attrs::new());
    let first = rw.constant("first", integer_scalar(label_type, 0));
    let safe = rw.add("Where", &[ignored, first, labels], Attrs::new());
    let zero = rw.constant("zero", Tensor::scalar(dtype, 0.0));
    let mut losses = loss_of(rw, safe, None, reduced(Reduction::None));
    // The weights are factors here, not an input of the loss. The loss passes no gradient to its weights, but the
    // divisor of the mean does; as factors they get the complete gradient.
    let weight = match weights {
        Some(weights) => {
            let weights = cast(rw, weights, dtype);
            let weight = rw.add("Gather", &[weights, safe], Attrs::new().with("axis", 0i64));
            losses = rw.add("Mul", &[losses, weight], Attrs::new());
            weight
        }
        None => rw.constant("one", Tensor::scalar(dtype, 1.0)),
    };
    let masked_losses = rw.add("Where", &[ignored, zero, losses], Attrs::new());
    if reduction == Reduction::None {
        return Ok(masked_losses);
    }
    let reduce_attrs = || Attrs::new().with("keepdims", 0i64);
    let sum = rw.add("ReduceSum", &[masked_losses], reduce_attrs());
    if reduction == Reduction::Sum {
        return Ok(sum);
    }
    let weight = rw.add("Where", &[ignored, zero, weight], Attrs::new());
    let count = rw.add("ReduceSum", &[weight], reduce_attrs());
    Ok(rw.add("Div", &[sum, count], Attrs::new()))
}

pub(super) fn definitions() -> Vec<Definition> {
    let internal = ["NegativeLogLikelihoodLossInternal", "NegativeLogLikelihoodLossInternal2"].map(|name| {
        Definition::new("com.microsoft", name, &[1], build_internal)
            .composition(decompose_internal)
            .traits(Traits::COMPUTES_LOSS)
    });
    let mut all = vec![
        Definition::new("", "NegativeLogLikelihoodLoss", &[12, 13, 22], build)
            .class(Class::LabelLoss { of_logits: false })
            .traits(Traits::COMPUTES_LOSS.and(Traits::READS_LABELS)),
    ];
    all.extend(internal);
    all
}

#[cfg(test)]
mod tests {
    use ortrain_graph::Dim;
    use ortrain_program::RunError;

    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, assert_close, check_decomposition, check_downgrade, check_gradients, f64s, generic_tensor,
        gradient_graph, one_node_graph, run, run_node,
    };

    const LOSS: (&str, &str) = ("", "NegativeLogLikelihoodLoss");

    fn attrs(reduction: &str, ignore: Option<i64>) -> Attrs {
        let attrs = Attrs::new().with("reduction", reduction);
        ignore.map_or(attrs.clone(), |label| attrs.with("ignore_index", label))
    }

    #[test]
    fn loss_values() {
        let x = f64s(&[3, 2], &[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]);
        let (labels, weights) = (Tensor::i64(&[3], &[1, 0, 1]), f64s(&[2], &[0.5, 2.0]));
        let get = |weights: Option<&Tensor>, attrs: Attrs| {
            run_node(LOSS, &[Some(&x), Some(&labels), weights], 1, attrs).expect("it runs").remove(0).to_f64()
        };
        assert_eq!(get(None, attrs("none", None)), [2.0, 3.0, 6.0]);
        assert_eq!(get(None, attrs("sum", Some(0))), [8.0]);
        assert_eq!(get(None, attrs("mean", Some(0))), [4.0]);
        assert_eq!(get(Some(&weights), attrs("none", None)), [4.0, 1.5, 12.0]);
        assert_eq!(get(Some(&weights), attrs("mean", None)), [17.5 / 4.5]);
        assert!(get(None, attrs("mean", Some(1)))[0] == 3.0);
        assert_eq!(get(None, attrs("mean", Some(-1))), [11.0 / 3.0]);
    }

    #[test]
    fn gradients() {
        let labels = Tensor::from_slice(DType::I32, &[2, 3], &[1i32, 0, 3, 2, 1, 3]);
        for reduction in ["none", "sum", "mean"] {
            for ignore in [None, Some(1), Some(-100), Some(1 << 40)] {
                for weighted in [false, true] {
                    let mut inputs = vec![generic_tensor(&[2, 4, 3], 1), labels.clone()];
                    inputs.extend(weighted.then(|| f64s(&[4], &[0.5, 1.5, 0.7, 2.0])));
                    let ports: Vec<Option<&Tensor>> = inputs.iter().map(Some).collect();
                    let graph = one_node_graph(NEWEST_OPSET, LOSS, &ports, 1, attrs(reduction, ignore))
                        .expect("valid");
                    check_gradients(&graph, &inputs, &[0], &[0]);
                    let dims =
                        graph.value(graph.outputs[0]).ty.shape().and_then(Shape::concrete).expect("known");
                    let mut gradient = gradient_graph(&graph, &[Some(generic_tensor(&dims, 2))], &[0]);
                    check_decomposition(&gradient, &inputs, 1e-12);
                    crate::passes::infer::infer(&mut gradient).expect("valid");
                    check_downgrade(&gradient, &inputs, 12);
                }
            }
        }
    }

    /// If all labels are ignored, the mean is NaN and the gradient is zero.
    #[test]
    fn all_labels_ignored() {
        let inputs = [generic_tensor(&[2, 3], 1), Tensor::i64(&[2], &[1, 1])];
        let ports = [Some(&inputs[0]), Some(&inputs[1])];
        let graph = one_node_graph(NEWEST_OPSET, LOSS, &ports, 1, attrs("mean", Some(1))).expect("valid");
        assert!(run(&graph, &inputs).expect("it runs")[0].to_f64()[0].is_nan());
        let got = run(&gradient_graph(&graph, &[Some(f64s(&[], &[1.0]))], &[0]), &inputs).expect("it runs");
        assert_close(&got[0], &Tensor::filled(DType::F64, &[2, 3], 0.0), 0.0);
    }

    #[test]
    fn out_of_range_labels_fail() {
        let x = generic_tensor(&[2, 3], 1);
        for bad in [3, -1] {
            let labels = Tensor::i64(&[2], &[0, bad]);
            let failure = run_node(LOSS, &[Some(&x), Some(&labels)], 1, Attrs::new()).expect_err("outside");
            let Failure::Run(RunError::IndexOutOfRange { index, bound, .. }) = failure else {
                panic!("{failure:?}")
            };
            assert_eq!((index, bound), (bad, 3));
        }
        let labels = Tensor::i64(&[3], &[0; 3]);
        assert!(run_node(LOSS, &[Some(&x), Some(&labels)], 1, Attrs::new()).is_err());
    }

    #[test]
    fn symbolic_batch_size() {
        let inputs = [generic_tensor(&[2, 3], 1), Tensor::i64(&[2], &[1, 2])];
        let ports = [Some(&inputs[0]), Some(&inputs[1])];
        let mut graph = one_node_graph(NEWEST_OPSET, LOSS, &ports, 1, Attrs::new()).expect("valid");
        for (k, dims) in [(0, vec![Dim::symbol("N"), Dim::Known(3)]), (1, vec![Dim::symbol("N")])] {
            let (id, dtype) = (graph.inputs[k], inputs[k].dtype());
            let shape = dims.into_iter().collect();
            graph.value_mut(id).ty = ortrain_graph::ValueType::Tensor(dtype, Some(shape));
        }
        check_gradients(&graph, &inputs, &[0], &[0]);
    }

    /// The loss with an `ignore_index` input equals the loss with the attribute. The gradients equal central
    /// differences.
    #[test]
    fn ignore_index_as_input() {
        let x = generic_tensor(&[3, 4, 2], 1);
        let labels = Tensor::i64(&[3, 2], &[1, 0, 3, 2, 2, 1]);
        let (weights, ignore) = (generic_tensor(&[4], 2), Tensor::i64(&[1], &[2]));
        for name in ["NegativeLogLikelihoodLossInternal", "NegativeLogLikelihoodLossInternal2"] {
            for reduction in ["none", "sum", "mean"] {
                for weights in [None, Some(&weights)] {
                    let ports = [Some(&x), Some(&labels), weights];
                    let expected = run_node(LOSS, &ports, 1, attrs(reduction, Some(2))).expect("it runs");
                    let ports = [Some(&x), Some(&labels), weights, Some(&ignore)];
                    let op = ("com.microsoft", name);
                    let got = run_node(op, &ports, 1, attrs(reduction, None)).expect("it runs");
                    assert_close(&got[0], &expected[0], 1e-12);
                    let inputs: Vec<Tensor> = ports.into_iter().flatten().cloned().collect();
                    let graph =
                        one_node_graph(NEWEST_OPSET, op, &ports, 1, attrs(reduction, None)).expect("valid");
                    let floats: &[usize] = if weights.is_some() { &[0, 2] } else { &[0] };
                    check_gradients(&graph, &inputs, floats, &[0]);
                    check_decomposition(&graph, &inputs, 1e-12);
                }
            }
        }
        let wrong = run_node(
            ("com.microsoft", "NegativeLogLikelihoodLossInternal"),
            &[Some(&x), Some(&labels), None, Some(&labels)],
            1,
            attrs("mean", None),
        );
        let Err(Failure::Prepare(error)) = wrong else { panic!("{wrong:?}") };
        assert!(error.to_string().contains("input 3 has shape [3, 2]; one element is needed"), "{error}");
    }
}
