//! Cross-entropy of labels: attributes, checks and reductions that the losses share.

use ortrain_expr::{CompareOp, ReduceOp, Reg, Scalar, Type};
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor};
use ortrain_program::BufferId;

use crate::OpError;
use crate::infer::Infer;
use crate::lower::{Lower, NestBuilder};

/// Reduction of the losses of the samples.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Reduction {
    None,
    Sum,
    Mean,
}

impl Reduction {
    pub(super) fn read(attrs: &Attrs) -> Result<Reduction, OpError> {
        match attrs.string("reduction")?.unwrap_or("mean") {
            "none" => Ok(Reduction::None),
            "sum" => Ok(Reduction::Sum),
            "mean" => Ok(Reduction::Mean),
            other => Err(OpError::invalid(format!(
                "reduction must be \"none\", \"sum\" or \"mean\", got {other:?}"
            ))),
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Reduction::None => "none",
            Reduction::Sum => "sum",
            Reduction::Mean => "mean",
        }
    }
}

/// Source of the label to ignore.
#[derive(Clone, Copy)]
pub(super) enum IgnoredLabel {
    /// No label is ignored.
    None,
    /// A constant label.
    Label(i64),
    /// The content of this input, if the node has the input.
    Input(usize),
}

/// Attributes and input indices that the loss and its gradient share.
pub(super) struct CrossEntropy {
    pub(super) reduction: Reduction,
    pub(super) ignore: IgnoredLabel,
    /// Type of the loss, or of the gradient of the scores. The default is the type of the scores.
    pub(super) output_type: Option<DType>,
    /// Index of the input with the scores or their log-softmax, `[N, C, ...]`.
    pub(super) scores: usize,
    /// Index of the input with the labels, `[N, ...]`.
    pub(super) labels: usize,
    /// Index of the optional input with the weights, `[C]`.
    pub(super) weights: usize,
}

impl CrossEntropy {
    pub(super) fn read(
        graph: &Graph,
        node: &Node,
        internal: bool,
        grad: bool,
    ) -> Result<CrossEntropy, OpError> {
        let attrs = &node.attrs;
        let first = usize::from(grad);
        let ignore = match attrs.int("ignore_index")? {
            _ if internal => {
                let input = node.inputs.get(first + 3).copied().flatten();
                let constant =
                    input.and_then(|id| graph.value(id).constant.as_ref()).and_then(Tensor::to_i64);
                match constant.as_deref() {
                    Some(&[label]) => IgnoredLabel::Label(label),
                    _ => IgnoredLabel::Input(first + 3),
                }
            }
            Some(label) => IgnoredLabel::Label(label),
            None => IgnoredLabel::None,
        };
        let output_type = match attrs.int("output_type")?.filter(|_| internal) {
            None | Some(0) => None,
            Some(number) => {
                let dtype =
                    i32::try_from(number).ok().and_then(DType::from_onnx).filter(|dtype| dtype.is_float());
                Some(dtype.ok_or_else(|| {
                    OpError::invalid(format!("output_type must be a float type, got {number}"))
                })?)
            }
        };
        Ok(CrossEntropy {
            reduction: Reduction::read(attrs)?,
            ignore,
            output_type,
            scores: first,
            labels: first + 1,
            weights: first + 2,
        })
    }

    /// Checks types and shapes of scores, labels and weights. Returns the type of the scores and the shape of the
    /// unreduced losses.
    pub(super) fn check_inputs(&self, cx: &Infer<'_>) -> Result<(DType, Option<Shape>), OpError> {
        let dtype = cx.expect_dtype(self.scores, "a float type", DType::is_float)?;
        cx.expect_dtype(self.labels, "int32 or int64", |dtype| matches!(dtype, DType::I32 | DType::I64))?;
        if cx.has_input(self.weights) {
            cx.expect_dtype(self.weights, "a float type", DType::is_float)?;
        }
        if let IgnoredLabel::Input(k) = self.ignore
            && cx.has_input(k)
        {
            cx.expect_dtype(k, "int64", DType::is_integer)?;
            check_single_element(cx, k)?;
        }
        let labels = cx.shape(self.labels).cloned();
        let Some(scores) = cx.shape(self.scores) else { return Ok((dtype, labels)) };
        if scores.rank() < 2 {
            return Err(OpError::invalid(format!(
                "scores must have an axis of samples and an axis of classes, got shape {scores}"
            )));
        }
        if scores[1] == Dim::Known(0) {
            return Err(OpError::invalid(format!("scores of shape {scores} have no classes (axis 1)")));
        }
        if let Some(weights) = cx.shape(self.weights)
            && (weights.rank() != 1 || are_known_to_differ(&weights[0], &scores[1]))
        {
            return Err(OpError::invalid(format!(
                "weights of shape {weights} do not match scores of shape {scores}"
            )));
        }
        let mut samples: Shape = scores.clone();
        samples.0.remove(1);
        if let Some(labels) = labels {
            if labels.rank() != samples.rank()
                || labels.iter().zip(samples.iter()).any(|(a, b)| are_known_to_differ(a, b))
            {
                return Err(OpError::invalid(format!(
                    "labels of shape {labels} for scores of shape {scores}: {samples} is needed"
                )));
            }
            let known = |(a, b): (&Dim, &Dim)| if a.known().is_some() { a.clone() } else { b.clone() };
            samples = labels.iter().zip(samples.iter()).map(known).collect();
        }
        Ok((dtype, Some(samples)))
    }

    /// Returns true if labels may have different weights, or may be ignored.
    pub(super) fn is_weighted(&self, cx: &Lower<'_>) -> bool {
        cx.has_input(self.weights)
            || match self.ignore {
                IgnoredLabel::None => false,
                IgnoredLabel::Label(_) => true,
                IgnoredLabel::Input(k) => cx.has_input(k),
            }
    }

    /// Loads the label of the sample at a point of a nest.
    pub(super) fn load_label(&self, cx: &mut Lower<'_>, nest: &mut NestBuilder, strides: &[isize]) -> Label {
        let buffer = cx.input(self.labels);
        let loaded = nest.load_strided(cx, buffer, 0, strides);
        let value = nest.b.convert(loaded, Type::I64);
        let ignore = match self.ignore {
            IgnoredLabel::Label(label) => Some(nest.b.int(label)),
            IgnoredLabel::Input(k) if cx.has_input(k) => {
                let buffer = cx.input(k);
                let loaded = nest.load_strided(cx, buffer, 0, &vec![0; strides.len()]);
                Some(nest.b.convert(loaded, Type::I64))
            }
            IgnoredLabel::None | IgnoredLabel::Input(_) => None,
        };
        let ignored = ignore.map(|ignore| nest.b.compare(CompareOp::Eq, value, ignore));
        let zero = nest.b.int(0);
        let safe = ignored.map_or(value, |ignored| nest.b.select(ignored, zero, value));
        Label { value, valid: safe, ignored }
    }

    /// Returns the weight of a label, or 0 if the label is ignored.
    pub(super) fn load_weight(
        &self,
        cx: &mut Lower<'_>,
        nest: &mut NestBuilder,
        label: &Label,
        ty: Type,
    ) -> Reg {
        let weight = if cx.has_input(self.weights) {
            let buffer = cx.input(self.weights);
            let loaded = nest.gather(cx, buffer, label.valid);
            nest.b.convert(loaded, ty)
        } else {
            nest.b.constant(ty, 1.0)
        };
        label.zero_if_ignored(nest, weight)
    }

    /// Makes the run fail if a label is outside the classes and is not ignored.
    pub(super) fn guard_labels(&self, cx: &mut Lower<'_>, classes: usize) -> Result<(), OpError> {
        let (dims, strides) = cx.guarded_space(self.labels);
        let mut nest = cx.nest(&dims, 0);
        let label = self.load_label(cx, &mut nest, &strides);
        nest.b.guard(label.valid, classes as i64);
        cx.emit(nest.instruction())
    }
}

/// Returns the buffer of the losses of the samples: the result itself, or a temporary buffer for a reduction.
pub(super) fn losses_buffer(
    entropy: &CrossEntropy,
    cx: &mut Lower<'_>,
    dtype: DType,
    samples: usize,
) -> BufferId {
    match entropy.reduction {
        Reduction::None => cx.output(0),
        Reduction::Sum | Reduction::Mean => cx.alloc_temp("losses", arithmetic_dtype(dtype), samples),
    }
}

/// Sums or averages the losses.
pub(super) fn emit_reduction(
    entropy: &CrossEntropy,
    cx: &mut Lower<'_>,
    losses: BufferId,
    samples: usize,
) -> Result<(), OpError> {
    if entropy.reduction == Reduction::None {
        return Ok(());
    }
    let mut nest = cx.nest(&[samples], 1);
    let loss = nest.load_strided(cx, losses, 0, &[1]);
    let mut total = nest.reduce(ReduceOp::Sum, loss);
    if entropy.reduction == Reduction::Mean {
        let ty = nest.b.ty(total);
        let count = reduce_weights(entropy, cx, &mut nest, samples, ty);
        total = nest.b.div(total, count);
    }
    let output = cx.output(0);
    nest.store_outer(cx, output, total);
    cx.emit(nest.instruction())
}

/// Returns a scalar of an integer type, without a conversion through a float.
pub(super) fn integer_scalar(dtype: DType, value: i64) -> Tensor {
    let mut bytes = vec![0; dtype.size()];
    Scalar::I64(value).write(dtype, &mut bytes);
    Tensor::new(dtype, Vec::new(), bytes.into()).expect("one element")
}

/// Returns true if two sizes are known and not equal.
pub(super) fn are_known_to_differ(a: &Dim, b: &Dim) -> bool {
    matches!((a.known(), b.known()), (Some(a), Some(b)) if a != b)
}

/// Checks that input `k` has one element, if its shape is known.
pub(super) fn check_single_element(cx: &Infer<'_>, k: usize) -> Result<(), OpError> {
    match cx.shape(k) {
        Some(shape) if shape.concrete().is_some_and(|dims| dims.iter().product::<usize>() != 1) => {
            Err(OpError::invalid(format!("input {k} has shape {shape}; one element is needed")))
        }
        _ => Ok(()),
    }
}

/// Returns the type of the arithmetic and of the sums for scores of type `dtype`.
pub(super) fn arithmetic_dtype(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Returns the sum of the weights of all labels, in a nest that reduces over the samples.
pub(super) fn reduce_weights(
    entropy: &CrossEntropy,
    cx: &mut Lower<'_>,
    nest: &mut NestBuilder,
    samples: usize,
    ty: Type,
) -> Reg {
    if !entropy.is_weighted(cx) {
        return nest.b.constant(ty, samples as f64);
    }
    let label = entropy.load_label(cx, nest, &[1]);
    let weight = entropy.load_weight(cx, nest, &label, ty);
    nest.reduce(ReduceOp::Sum, weight)
}

/// Label of the sample at a point of a nest.
pub(super) struct Label {
    /// The label as the input has it.
    pub(super) value: Reg,
    /// The label, or 0 if the label is ignored: always a valid index.
    pub(super) valid: Reg,
    /// True if the label is ignored. `None` if the loss ignores no labels.
    pub(super) ignored: Option<Reg>,
}

impl Label {
    /// Returns `value`, or 0 where the label is ignored.
    pub(super) fn zero_if_ignored(&self, nest: &mut NestBuilder, value: Reg) -> Reg {
        let Some(ignored) = self.ignored else { return value };
        let zero = nest.b.constant(nest.b.ty(value), 0.0);
        nest.b.select(ignored, zero, value)
    }
}
