//! Cross-entropy loss of scores and class labels, and its gradient.
//!
//! `loss/likelihood.rs` has the negative log-likelihood loss, `loss/rows.rs` the operators with classes along the last
//! axis.
//!
//! Sources: ONNX SoftmaxCrossEntropyLoss-12, 13; `SoftmaxCrossEntropyLossGrad`, `SoftmaxCrossEntropyLossInternal` and
//! `SoftmaxCrossEntropyLossInternalGrad` of `com.microsoft` (the latter two take `ignore_index` as an input).
//!
//! Axis 1 of the scores is the class axis. Each label has the weight of its class (1 without weights). A label equal to
//! `ignore_index` has no loss and no weight; `ignore_index` may be outside the classes. `mean` divides by the sum of
//! the weights of the labels that are not ignored. If all labels are ignored, or the batch is empty, the mean is NaN
//! and the gradient zero, as in PyTorch. Any other label outside the classes is an error of the run, which then commits
//! nothing. float16 and bfloat16 are computed and summed in float32. Weights have no gradient.

use ortrain_expr::{Access, CompareOp, ReduceOp, Strides, Type, UnaryOp};
use ortrain_graph::{Attrs, DType, Graph, Node, Shape, Tensor, ValueId};

use crate::OpError;
use crate::class::{Class, Traits};
use crate::families::loss::entropy::{
    CrossEntropy, IgnoredLabel, Reduction, are_known_to_differ, arithmetic_dtype, check_single_element,
    emit_reduction, integer_scalar, losses_buffer, reduce_weights,
};
use crate::grad::Grad;
use crate::infer::Infer;
use crate::lower::{Lower, split_at_axis};
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::formula::formula;

mod entropy;
mod likelihood;
mod rows;

/// SoftmaxCrossEntropyLoss: `-log(softmax(scores)[label])`, times the weight of the label.
struct Loss {
    entropy: CrossEntropy,
    internal: bool,
}

impl Op for Loss {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, if self.internal { 4 } else { 3 }, 2)?;
        let (dtype, samples) = self.entropy.check_inputs(cx)?;
        let loss = match self.entropy.reduction {
            Reduction::None => samples,
            Reduction::Sum | Reduction::Mean => Some(Shape::scalar()),
        };
        cx.set_output(0, self.entropy.output_type.unwrap_or(dtype), loss);
        cx.set_output(1, dtype, cx.shape(0).cloned());
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let (of_loss, of_log_prob) = (cx.output_grad(0), cx.output_grad(1));
        if !cx.needs_grad(0) {
            return Ok(());
        }
        let log_prob = cx.output(1, "log_prob");
        let mut gradient = None;
        if let Some(g) = of_loss {
            let mut attrs = Attrs::new().with("reduction", self.entropy.reduction.name());
            let mut inputs = vec![Some(g), Some(log_prob), Some(cx.input(1)?)];
            let name = if self.internal {
                inputs.extend([cx.optional_input(2), cx.optional_input(3)]);
                "SoftmaxCrossEntropyLossInternalGrad"
            } else {
                if let IgnoredLabel::Label(label) = self.entropy.ignore {
                    attrs = attrs.with("ignore_index", label);
                }
                inputs.push(cx.optional_input(2));
                "SoftmaxCrossEntropyLossGrad"
            };
            while inputs.last() == Some(&None) {
                inputs.pop();
            }
            gradient = Some(cx.add_node("com.microsoft", name, &inputs, 1, attrs)[0]);
        }
        if let Some(g) = of_log_prob {
            let attrs = Attrs::new().with("axis", 1i64);
            let part = cx.add_in("com.microsoft", "LogSoftmaxGrad_13", &[g, log_prob], attrs);
            gradient = Some(match gradient {
                Some(other) => cx.add("Add", &[other, part], Attrs::new()),
                None => part,
            });
        }
        if let Some(gradient) = gradient {
            cx.set_grad(0, gradient);
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let entropy = &self.entropy;
        let dtype = cx.dtype(0);
        let (batch, classes, spatial) = split_at_axis(&cx.dims(0), 1);
        let samples = batch * spatial;
        entropy.guard_labels(cx, classes)?;

        // One loss per sample, and the log-softmax.
        let losses = cx.has_output(0).then(|| losses_buffer(entropy, cx, dtype, samples));
        let mut nest = cx.nest(&[batch, spatial, classes], 1);
        let along: Strides = [(classes * spatial) as isize, 1, spatial as isize].into_iter().collect();
        let scores = cx.input(0);
        let x = nest.load_strided(cx, scores, 0, &along);
        let ty = nest.b.ty(x);
        let largest = nest.reduce(ReduceOp::Max, x);
        // Finds the score of the label while reducing over the row, without a load by index. So a gradient of the
        // scores can overwrite the scores in place.
        let picked = losses.map(|losses| {
            let label = entropy.load_label(cx, &mut nest, &[spatial as isize, 1, 0]);
            let class = nest.b.coordinate(2);
            let hit = nest.b.compare(CompareOp::Eq, label.valid, class);
            let minus_infinity = nest.b.constant(ty, f64::NEG_INFINITY);
            let candidate = nest.b.select(hit, x, minus_infinity);
            (losses, label, nest.reduce(ReduceOp::Max, candidate))
        });
        let shifted = nest.b.sub(x, largest);
        let power = nest.b.unary(UnaryOp::Exp, shifted);
        let sum = nest.reduce(ReduceOp::Sum, power);
        let log_sum = nest.b.unary(UnaryOp::Log, sum);
        if cx.has_output(1) {
            let log_prob = nest.b.sub(shifted, log_sum);
            let output = cx.output(1);
            nest.store_strided(cx, output, 0, along, log_prob);
        }
        if let Some((losses, label, score)) = picked {
            let shifted = nest.b.sub(score, largest);
            // The order of operations is the same as in the log-softmax, so both results are bit-identical.
            let log_prob = nest.b.sub(shifted, log_sum);
            let weight = entropy.load_weight(cx, &mut nest, &label, ty);
            let loss = nest.b.mul(log_prob, weight);
            let loss = nest.b.unary(UnaryOp::Neg, loss);
            let loss = label.zero_if_ignored(&mut nest, loss);
            nest.store_outer(cx, losses, loss);
        }
        cx.emit(nest.instruction())?;

        match losses {
            Some(losses) => emit_reduction(entropy, cx, losses, samples),
            None => Ok(()),
        }
    }
}

/// Gradient of [`Loss`] for the scores.
///
/// The inputs are the gradient of the loss, the log-softmax of the scores, labels and weights. The internal variant
/// also has the label to ignore and a summand.
struct LossGrad {
    entropy: CrossEntropy,
    internal: bool,
}

/// Index of the input that is added to the gradient.
const BIAS_INPUT: usize = 5;

impl LossGrad {
    fn has_bias(&self, has: impl Fn(usize) -> bool) -> bool {
        self.internal && has(BIAS_INPUT)
    }
}

impl Op for LossGrad {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, if self.internal { 6 } else { 4 }, 1)?;
        let (dtype, samples) = self.entropy.check_inputs(cx)?;
        cx.expect_dtype(0, "a float type", DType::is_float)?;
        match (self.entropy.reduction, cx.shape(0), &samples) {
            (Reduction::None, Some(g), Some(samples)) => {
                if g.rank() != samples.rank()
                    || g.iter().zip(samples.iter()).any(|(a, b)| are_known_to_differ(a, b))
                {
                    let message = format!("the gradient has shape {g}, but the losses have shape {samples}");
                    return Err(OpError::invalid(message));
                }
            }
            (Reduction::None, ..) => {}
            (Reduction::Sum | Reduction::Mean, ..) => check_single_element(cx, 0)?,
        }
        let shape = cx.shape(self.entropy.scores).cloned();
        if self.has_bias(|k| cx.has_input(k)) {
            cx.expect_dtype(BIAS_INPUT, "a float type", DType::is_float)?;
            if let (Some(bias), Some(shape)) = (cx.shape(BIAS_INPUT), &shape)
                && (bias.rank() != shape.rank()
                    || bias.iter().zip(shape.iter()).any(|(a, b)| are_known_to_differ(a, b)))
            {
                let message =
                    format!("a bias of shape {bias} cannot be added to a gradient of shape {shape}");
                return Err(OpError::invalid(message));
            }
        }
        cx.set_output(0, self.entropy.output_type.unwrap_or(dtype), shape);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let entropy = &self.entropy;
        let dtype = arithmetic_dtype(cx.dtype(entropy.scores));
        let ty = Type::of(dtype);
        let (batch, classes, spatial) = split_at_axis(&cx.dims(entropy.scores), 1);
        let samples = batch * spatial;
        entropy.guard_labels(cx, classes)?;

        // For the mean: divides the gradient of the loss by the sum of the weights, once instead of for each element.
        let incoming = cx.input(0);
        let scale = if entropy.reduction == Reduction::Mean {
            let scale = cx.alloc_temp("scale", dtype, 1);
            let weighted = entropy.is_weighted(cx);
            let mut nest = if weighted { cx.nest(&[samples], 1) } else { cx.nest(&[1], 0) };
            let count = reduce_weights(entropy, cx, &mut nest, samples, ty);
            let g = nest.load_strided(cx, incoming, 0, &[0]);
            let g = nest.b.convert(g, ty);
            let value = nest.b.div(g, count);
            nest.store_strided(cx, scale, 0, [0].into_iter().collect(), value);
            cx.emit(nest.instruction())?;
            scale
        } else {
            incoming
        };

        let mut nest = cx.nest(&[batch, classes, spatial], 0);
        let per_sample = [spatial as isize, 0, 1];
        let strides = if entropy.reduction == Reduction::None { per_sample } else { [0; 3] };
        let g = nest.load_strided(cx, scale, 0, &strides);
        let g = nest.b.convert(g, ty);
        let label = entropy.load_label(cx, &mut nest, &per_sample);
        let weight = entropy.load_weight(cx, &mut nest, &label, ty);
        let factor = nest.b.mul(g, weight);

        let log_prob = cx.input(entropy.scores);
        let access = Access::contiguous(cx.buffer_dtype(log_prob), nest.dims());
        let log_prob = nest.load(log_prob, access);
        let prob = nest.b.unary(UnaryOp::Exp, log_prob);
        let class = nest.b.coordinate(1);
        let hit = nest.b.compare(CompareOp::Eq, label.value, class);
        let one = nest.b.constant(ty, 1.0);
        let prob_minus_one = nest.b.sub(prob, one);
        let gap = nest.b.select(hit, prob_minus_one, prob);
        let product = nest.b.mul(factor, gap);
        let mut gradient = label.zero_if_ignored(&mut nest, product);
        if self.has_bias(|k| cx.has_input(k)) {
            let bias = cx.input(BIAS_INPUT);
            let access = Access::contiguous(cx.buffer_dtype(bias), nest.dims());
            let bias = nest.load(bias, access);
            let bias = nest.b.convert(bias, ty);
            gradient = nest.b.add(gradient, bias);
        }
        let output = cx.output(0);
        nest.store_contiguous(cx, output, gradient);
        cx.emit(nest.instruction())
    }
}

fn build(graph: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let internal = node.op.contains("Internal");
    Ok(Box::new(Loss { entropy: CrossEntropy::read(graph, node, internal, false)?, internal }))
}

fn build_grad(graph: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let internal = node.op.contains("Internal");
    Ok(Box::new(LossGrad { entropy: CrossEntropy::read(graph, node, internal, true)?, internal }))
}

/// Decomposes the internal variant into a log-softmax and a negative log-likelihood loss.
fn decompose_internal(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let scores = rw.required_input(0)?;
    let log_prob = rw.add("LogSoftmax", &[scores], Attrs::new().with("axis", 1i64));
    if rw.has_output(0) {
        let mut loss = likelihood::add_negative_log_likelihood(rw, log_prob, rw.dtype(scores))?;
        if let Some(to) = rw.attrs().int("output_type")?.filter(|&to| to != 0) {
            loss = rw.add("Cast", &[loss], Attrs::new().with("to", to));
        }
        rw.replace_output(0, loss);
    }
    if rw.has_output(1) {
        rw.replace_output(1, log_prob);
    }
    Ok(())
}

/// Decomposes the gradient into operators of `ai.onnx`: `factor * (exp(log_prob) - onehot)`, with one factor per
/// sample.
fn decompose_grad(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let internal = rw.node().op.contains("Internal");
    let reduction = Reduction::read(rw.attrs())?;
    let (g, log_prob, labels, weights) =
        (rw.required_input(0)?, rw.required_input(1)?, rw.required_input(2)?, rw.input(3));
    let types = (rw.dtype(log_prob), rw.dtype(labels), rw.shape(log_prob).cloned());
    let (Some(dtype), Some(label_type), Some(shape)) = types else {
        return Err(OpError::unsupported(
            "the rank of the scores and the types of scores and labels must be known",
        ));
    };
    let cast = |rw: &mut Rewrite<'_>, value: ValueId, to: DType| {
        if rw.dtype(value) == Some(to) {
            return value;
        }
        rw.add("Cast", &[value], Attrs::new().with("to", i64::from(to.to_onnx())))
    };
    let g = cast(rw, g, dtype);
    let zero = rw.constant("zero", Tensor::scalar(dtype, 0.0));

    let ignore = match (internal, rw.attrs().int("ignore_index")?) {
        (true, _) => rw.input(4).map(|id| cast(rw, id, label_type)),
        // Exact: a conversion through a float would round large labels.
        (false, Some(label)) => Some(rw.constant("ignore_index", integer_scalar(label_type, label))),
        (false, None) => None,
    };
    let ignored = ignore.map(|ignore| rw.add("Equal", &[labels, ignore], Attrs::new()));
    let mut factor = g;
    if ignored.is_some() || weights.is_some() {
        let one = rw.constant("one", Tensor::scalar(dtype, 1.0));
        let mut weight = one;
        if let Some(weights) = weights {
            let mut safe = labels;
            if let Some(ignored) = ignored {
                let first = rw.constant("first", integer_scalar(label_type, 0));
                safe = rw.add("Where", &[ignored, first, labels], Attrs::new());
            }
            let weights = cast(rw, weights, dtype);
            weight = rw.add("Gather", &[weights, safe], Attrs::new().with("axis", 0i64));
        }
        if let Some(ignored) = ignored {
            weight = rw.add("Where", &[ignored, zero, weight], Attrs::new());
        }
        if reduction == Reduction::Mean {
            let sum = rw.add("ReduceSum", &[weight], Attrs::new().with("keepdims", 0i64));
            weight = rw.add("Div", &[weight, sum], Attrs::new());
        }
        factor = rw.add("Mul", &[weight, factor], Attrs::new());
    } else if reduction == Reduction::Mean {
        let count = rw.add("Size", &[labels], Attrs::new());
        let count = rw.add("Cast", &[count], Attrs::new().with("to", i64::from(dtype.to_onnx())));
        factor = rw.add("Div", &[factor, count], Attrs::new());
    }

    let class_axis = rw.ints("class_axis", &[1]);
    let column = |rw: &mut Rewrite<'_>, value| rw.add("Unsqueeze", &[value, class_axis], Attrs::new());
    let per_sample = ignored.is_some() || weights.is_some() || reduction == Reduction::None;
    let factor = if per_sample { column(rw, factor) } else { factor };
    let mut lying: Vec<usize> = vec![1; shape.rank() - 1];
    let classes = match shape[1].known() {
        Some(count) => {
            lying[0] = count;
            let numbers: Vec<i64> = (0..count as i64).collect();
            let numbers = Tensor::i64(&lying, &numbers);
            let numbers = rw.constant("classes", numbers);
            cast(rw, numbers, label_type)
        }
        None => {
            let sizes = rw.add("Shape", &[log_prob], Attrs::new());
            let axis = rw.ints("axis", &[1]);
            let count = rw.add("Gather", &[sizes, axis], Attrs::new());
            let numbers = rw.count_up(count);
            let mut lying: Vec<i64> = vec![1; shape.rank() - 1];
            lying[0] = -1;
            let lying = rw.ints("lying", &lying);
            let numbers = rw.add("Reshape", &[numbers, lying], Attrs::new());
            cast(rw, numbers, label_type)
        }
    };
    let standing = column(rw, labels);
    let values = [standing, classes, log_prob, factor];
    let mut gradient = formula(rw, values, |[labels, classes, log_prob, factor]| {
        let one_hot = labels.equals(classes).cast(dtype);
        (log_prob.exp() - one_hot) * factor
    });
    if let Some(ignored) = ignored {
        let ignored = column(rw, ignored);
        gradient = rw.add("Where", &[ignored, zero, gradient], Attrs::new());
    }
    if let (true, Some(bias)) = (internal, rw.input(BIAS_INPUT)) {
        let bias = cast(rw, bias, dtype);
        gradient = rw.add("Add", &[gradient, bias], Attrs::new());
    }
    if let Some(to) = rw.attrs().int("output_type")?.filter(|&to| internal && to != 0) {
        gradient = rw.add("Cast", &[gradient], Attrs::new().with("to", to));
    }
    rw.replace_output(0, gradient);
    Ok(())
}

pub(crate) fn definitions() -> Vec<Definition> {
    let microsoft = |name, build| Definition::new("com.microsoft", name, &[1], build);
    let entropy = [
        Definition::new("", "SoftmaxCrossEntropyLoss", &[12, 13], build)
            .class(Class::LabelLoss { of_logits: true })
            .traits(Traits::COMPUTES_LOSS.and(Traits::READS_LABELS))
            .inputs_without_gradient(&[1, 2]),
        microsoft("SoftmaxCrossEntropyLossInternal", build)
            .decompose(decompose_internal)
            .traits(Traits::COMPUTES_LOSS.and(Traits::READS_LABELS)),
        microsoft("SoftmaxCrossEntropyLossGrad", build_grad)
            .class(Class::LogitGradient)
            .differentiated_as(decompose_grad)
            .traits(Traits::READS_LABELS),
        microsoft("SoftmaxCrossEntropyLossInternalGrad", build_grad)
            .differentiated_as(decompose_grad)
            .traits(Traits::READS_LABELS),
    ];
    entropy.into_iter().chain(likelihood::definitions()).chain(rows::definitions()).collect()
}

#[cfg(test)]
mod tests {
    use ortrain_program::RunError;

    use super::*;
    use crate::testing::{
        Failure, assert_close, cast_tensor, check_decomposition, check_gradients, f64s, generic_tensor,
        gradient_graph, one_node_graph, run, run_node,
    };
    use crate::{Role, Specialiser};

    const NEWEST: i64 = crate::NEWEST_OPSET;
    const LOSS: (&str, &str) = ("", "SoftmaxCrossEntropyLoss");
    const INTERNAL: (&str, &str) = ("com.microsoft", "SoftmaxCrossEntropyLossInternal");
    const REDUCTIONS: [&str; 3] = ["none", "sum", "mean"];

    fn reduction(name: &str) -> Attrs {
        Attrs::new().with("reduction", name)
    }

    fn i32s(dims: &[usize], elements: &[i32]) -> Tensor {
        Tensor::from_slice(DType::I32, dims, elements)
    }

    /// Computes loss and log-softmax by the definition, in float64.
    fn expected(
        x: &Tensor,
        labels: &[i64],
        weights: Option<&[f64]>,
        ignore: Option<i64>,
        how: &str,
    ) -> (Vec<f64>, Tensor) {
        let (batch, classes, positions) = split_at_axis(x.dims(), 1);
        let scores = x.to_f64();
        let mut log_prob = vec![0.0; scores.len()];
        let (mut losses, mut total) = (Vec::new(), 0.0);
        for n in 0..batch {
            for p in 0..positions {
                let at = |c: usize| (n * classes + c) * positions + p;
                let sum: f64 = (0..classes).map(|c| scores[at(c)].exp()).sum();
                for c in 0..classes {
                    log_prob[at(c)] = scores[at(c)] - sum.ln();
                }
                let label = labels[n * positions + p];
                let counts = ignore != Some(label);
                let weight = match weights {
                    _ if !counts => 0.0,
                    Some(weights) => weights[label as usize],
                    None => 1.0,
                };
                total += weight;
                losses.push(if counts { -weight * log_prob[at(label as usize)] } else { 0.0 });
            }
        }
        let sum: f64 = losses.iter().sum();
        let losses = match how {
            "none" => losses,
            "sum" => vec![sum],
            _ => vec![sum / total],
        };
        (losses, f64s(x.dims(), &log_prob))
    }

    #[test]
    fn all_reductions_weights_and_ignored_labels() {
        let x = generic_tensor(&[2, 3, 4], 1);
        let labels = [0, 2, 1, -7, 2, 2, 0, 1];
        let plain: Vec<i64> = labels.iter().map(|&label| i64::max(label, 0)).collect();
        let weights = [0.5, 2.0, 1.25];
        for how in REDUCTIONS {
            for (ignore, labels) in [(None, &plain[..]), (Some(-7), &labels[..]), (Some(2), &plain[..])] {
                for weights in [None, Some(&weights[..])] {
                    let weight_tensor = weights.map(|weights| f64s(&[3], weights));
                    let label_tensor = Tensor::i64(&[2, 4], labels);
                    let mut attrs = reduction(how);
                    if let Some(ignore) = ignore {
                        attrs = attrs.with("ignore_index", ignore);
                    }
                    let inputs = [Some(&x), Some(&label_tensor), weight_tensor.as_ref()];
                    let count = if weights.is_some() { 3 } else { 2 };
                    let got = run_node(LOSS, &inputs[..count], 2, attrs).expect("it runs");
                    let (losses, log_prob) = expected(&x, labels, weights, ignore, how);
                    let dims: &[usize] = if how == "none" { &[2, 4] } else { &[] };
                    assert_close(&got[0], &f64s(dims, &losses), 1e-12);
                    assert_close(&got[1], &log_prob, 1e-12);
                }
            }
        }
    }

    #[test]
    fn gradient_reuses_scores_buffer() {
        let (samples, classes) = (64, 500);
        let x = cast_tensor(&generic_tensor(&[samples, classes], 1), DType::F32);
        let labels = Tensor::i64(&[samples], &vec![7; samples]);
        let ports = [Some(&x), Some(&labels)];
        let forward = one_node_graph(NEWEST, LOSS, &ports, 1, reduction("mean")).expect("it is read");
        let mut graph = gradient_graph(&forward, &[Some(Tensor::f32(&[], &[1.0]))], &[0]);
        // The graph also returns the loss, as in training.
        graph.outputs.push(forward.outputs[0]);
        let schedule = Specialiser::new(graph, vec![Role::User; 2]).schedule(&[x, labels]).expect("it runs");
        let programs = schedule.programs();
        let [program] = programs.as_slice() else { panic!("{} programs", programs.len()) };
        let scores = 4 * samples * classes;
        assert!(program.work_bytes < scores + scores / 10, "{program}");
    }

    #[test]
    fn int32_labels_of_a_matrix_in_float32() {
        let x = Tensor::f32(&[2, 2], &[1.0, 1.0, 3.0, 3.0]);
        let got = run_node(LOSS, &[Some(&x), Some(&i32s(&[2], &[0, 1]))], 1, Attrs::new()).expect("it runs");
        assert_close(&got[0], &Tensor::scalar(DType::F32, std::f64::consts::LN_2), 1e-6);
    }

    #[test]
    fn all_labels_ignored() {
        let ignoring = Attrs::new().with("ignore_index", -100i64);
        let x = generic_tensor(&[2, 3], 2);
        let labels = Tensor::i64(&[2], &[-100, -100]);
        let inputs = [x.clone(), labels];
        let ports = [Some(&inputs[0]), Some(&inputs[1])];
        let graph = one_node_graph(NEWEST, LOSS, &ports, 1, ignoring).expect("it is read");
        assert!(run(&graph, &inputs).expect("it runs")[0].to_f64()[0].is_nan());
        let gradients = gradient_graph(&graph, &[Some(Tensor::scalar(DType::F64, 1.0))], &[0]);
        assert_eq!(run(&gradients, &inputs).expect("it runs")[0].to_f64(), [0.0; 6]);

        let inputs = [f64s(&[0, 3], &[]), Tensor::i64(&[0], &[])];
        let ports = [Some(&inputs[0]), Some(&inputs[1])];
        let graph = one_node_graph(NEWEST, LOSS, &ports, 1, Attrs::new()).expect("it is read");
        assert!(run(&graph, &inputs).expect("it runs")[0].to_f64()[0].is_nan());
        let gradients = gradient_graph(&graph, &[Some(Tensor::scalar(DType::F64, 1.0))], &[0]);
        assert_eq!(run(&gradients, &inputs).expect("it runs")[0].dims(), [0, 3]);
        let got = run_node(LOSS, &ports, 1, reduction("sum")).expect("it runs");
        assert_eq!(got[0].to_f64(), [0.0]);
    }

    #[test]
    fn out_of_range_labels_fail() {
        let x = generic_tensor(&[2, 3], 3);
        for (bad, ignore) in [(3, None), (-1, None), (7, Some(-1))] {
            let labels = Tensor::i64(&[2], &[1, bad]);
            let mut attrs = Attrs::new();
            if let Some(ignore) = ignore {
                attrs = attrs.with("ignore_index", ignore);
            }
            let failure =
                run_node(LOSS, &[Some(&x), Some(&labels)], 2, attrs.clone()).expect_err("it must fail");
            let Failure::Run(RunError::IndexOutOfRange { node, at, index, bound }) = failure else {
                panic!("{failure:?}")
            };
            assert!(node.contains("SoftmaxCrossEntropyLoss"), "{node}");
            assert_eq!((at, index, bound), (vec![1], bad, 3));
            let g = Tensor::scalar(DType::F64, 1.0);
            let inputs = [Some(&g), Some(&x), Some(&labels)];
            let grad = ("com.microsoft", "SoftmaxCrossEntropyLossGrad");
            let failure = run_node(grad, &inputs, 1, attrs).expect_err("it must fail");
            assert!(
                matches!(failure, Failure::Run(RunError::IndexOutOfRange { bound: 3, .. })),
                "{failure:?}"
            );
        }
    }

    #[test]
    fn gradients() {
        let x = generic_tensor(&[2, 3, 2], 4);
        let labels = Tensor::i64(&[2, 2], &[0, 2, -1, 1]);
        let weights = f64s(&[3], &[0.5, 2.0, 1.25]);
        for how in REDUCTIONS {
            for weighted in [false, true] {
                let attrs = reduction(how).with("ignore_index", -1i64);
                let mut inputs = vec![x.clone(), labels.clone()];
                inputs.extend(weighted.then(|| weights.clone()));
                let ports: Vec<Option<&Tensor>> = inputs.iter().map(Some).collect();
                let graph = one_node_graph(NEWEST, LOSS, &ports, 2, attrs).expect("it is read");
                for through in [&[0][..], &[1], &[0, 1]] {
                    check_gradients(&graph, &inputs, &[0], through);
                }
                // The model does not use the second output, which the gradient needs.
                let mut single = graph.clone();
                single.nodes[0].outputs.truncate(1);
                single.outputs.truncate(1);
                check_gradients(&single, &inputs, &[0], &[0]);
            }
        }
    }

    #[test]
    fn gradient_attributes_follow_the_model() {
        let (x, labels) = (generic_tensor(&[2, 3], 5), Tensor::i64(&[2], &[0, 1]));
        for ignore in [None, Some(5)] {
            let attrs = ignore.map_or(Attrs::new(), |label: i64| Attrs::new().with("ignore_index", label));
            let graph =
                one_node_graph(NEWEST, LOSS, &[Some(&x), Some(&labels)], 1, attrs).expect("it is read");
            let gradients = gradient_graph(&graph, &[Some(Tensor::scalar(DType::F64, 1.0))], &[0]);
            let node = &gradients.nodes.last().expect("a gradient");
            assert_eq!(&*node.op, "SoftmaxCrossEntropyLossGrad");
            assert_eq!(node.attrs.string("reduction"), Ok(Some("mean")));
            assert_eq!(node.attrs.int("ignore_index"), Ok(ignore));
            assert_eq!(node.inputs.len(), 3);
        }
    }

    #[test]
    fn internal_form() {
        let x = generic_tensor(&[2, 3, 2], 6);
        let labels = Tensor::i64(&[2, 2], &[0, 2, -1, 1]);
        let weights = f64s(&[3], &[0.5, 2.0, 1.25]);
        let ignore = Tensor::i64(&[], &[-1]);
        for how in REDUCTIONS {
            let inputs = [x.clone(), labels.clone(), weights.clone(), ignore.clone()];
            let ports: Vec<Option<&Tensor>> = inputs.iter().map(Some).collect();
            let graph = one_node_graph(NEWEST, INTERNAL, &ports, 2, reduction(how)).expect("it is read");
            let got = run(&graph, &inputs).expect("it runs");
            let attrs = reduction(how).with("ignore_index", -1i64);
            let expected_outputs = run_node(LOSS, &ports[..3], 2, attrs).expect("it runs");
            for (got, expected_output) in got.iter().zip(&expected_outputs) {
                assert_eq!(got, expected_output);
            }
            check_gradients(&graph, &inputs, &[0], &[0, 1]);
            check_decomposition(&graph, &inputs, 1e-12);

            let mut constant = graph.clone();
            let label = constant.inputs[3];
            constant.value_mut(label).constant = Some(ignore.clone());
            constant.inputs.truncate(3);
            check_decomposition(&constant, &inputs[..3], 1e-12);
        }
    }

    #[test]
    fn output_type_attribute() {
        let (x, labels) = (generic_tensor(&[2, 3], 7), Tensor::i64(&[2], &[0, 1]));
        let attrs = Attrs::new().with("output_type", i64::from(DType::F32.to_onnx()));
        let got = run_node(INTERNAL, &[Some(&x), Some(&labels)], 2, attrs).expect("it runs");
        assert_eq!((got[0].dtype(), got[1].dtype()), (DType::F32, DType::F64));
    }

    #[test]
    fn gradient_operators_decompose() {
        let log_prob = generic_tensor(&[2, 3, 2], 8);
        let labels = Tensor::i64(&[2, 2], &[0, 2, 1, 1]);
        let weights = f64s(&[3], &[0.5, 2.0, 1.25]);
        let bias = generic_tensor(&[2, 3, 2], 9);
        for how in REDUCTIONS {
            let g = if how == "none" { generic_tensor(&[2, 2], 10) } else { f64s(&[], &[0.7]) };
            for (weighted, ignoring) in [(false, false), (true, false), (false, true), (true, true)] {
                let mut inputs = vec![g.clone(), log_prob.clone(), labels.clone()];
                inputs.extend(weighted.then(|| weights.clone()));
                let ports: Vec<Option<&Tensor>> = inputs.iter().map(Some).collect();
                let mut attrs = reduction(how);
                if ignoring {
                    attrs = attrs.with("ignore_index", 1i64);
                }
                let op = ("com.microsoft", "SoftmaxCrossEntropyLossGrad");
                let graph = one_node_graph(NEWEST, op, &ports, 1, attrs).expect("it is read");
                check_decomposition(&graph, &inputs, 1e-12);
            }
            let ignore = Tensor::i64(&[], &[2]);
            let inputs = [g, log_prob.clone(), labels.clone(), ignore, bias.clone()];
            let ports = [
                Some(&inputs[0]),
                Some(&inputs[1]),
                Some(&inputs[2]),
                None,
                Some(&inputs[3]),
                Some(&inputs[4]),
            ];
            let op = ("com.microsoft", "SoftmaxCrossEntropyLossInternalGrad");
            let graph = one_node_graph(NEWEST, op, &ports, 1, reduction(how)).expect("it is read");
            check_decomposition(&graph, &inputs, 1e-12);
        }
    }

    #[test]
    fn rejects_mismatched_inputs() {
        let x = generic_tensor(&[2, 3], 11);
        let cases = [
            (Tensor::i64(&[3], &[0; 3]), "labels of shape [3] for scores of shape [2, 3]: [2] is needed"),
            (f64s(&[2], &[0.0; 2]), "expected int32 or int64"),
        ];
        for (labels, message) in cases {
            let ports = [Some(&x), Some(&labels)];
            let error = one_node_graph(NEWEST, LOSS, &ports, 1, Attrs::new()).expect_err("it is wrong");
            assert!(error.to_string().contains(message), "{error}");
        }
        let ports = [Some(&x), Some(&Tensor::i64(&[2], &[0; 2]))];
        let error = one_node_graph(NEWEST, LOSS, &ports, 1, reduction("max")).expect_err("it is wrong");
        assert!(
            error.to_string().contains("reduction must be \"none\", \"sum\" or \"mean\", got \"max\""),
            "{error}"
        );
    }
}
