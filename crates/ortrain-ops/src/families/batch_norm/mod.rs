//! Batch normalization: `BatchNormalization`, and the operators of training graphs, `BatchNormInternal` and
//! `BatchNormalizationGrad`.
//!
//! Sources: ONNX BatchNormalization-7, 9, 14 and 15 (<https://onnx.ai/onnx/operators/onnx__BatchNormalization.html>);
//! `BatchNormInternal` and `BatchNormalizationGrad` of `com.microsoft` version 1 (ONNX Runtime's training operators).
//!
//! Axis 1 is the channel axis; a vector has one channel. Before opset 14 the number of outputs selects the training
//! mode. `spatial=0` of opset 7 has statistics for each element of a row. It is read as a normalization of flattened
//! rows.
//!
//! In inference mode `y = (x - mean) * scale / sqrt(var + epsilon) + bias`, with mean and variance as inputs. The
//! gradient is the derivative of this formula, in operators of `ai.onnx`.
//!
//! In training mode mean and (biased) variance are computed from the batch, in two passes. The running statistics
//! become `momentum * old + (1 - momentum) * batch`; they have no gradient. `BatchNormInternal` also returns the mean
//! and `1 / sqrt(var + epsilon)` of the batch, which its gradient needs. If its running statistics are state, it
//! updates them. An empty batch leaves them unchanged. float16 and bfloat16 are computed in float32.

mod channels;
mod rewrites;

use ortrain_expr::{Access, ReduceOp, Reg, Strides, Type, UnaryOp};
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId, ValueType};
use ortrain_program::BufferId;

use crate::OpError;
use crate::class::Class;
use crate::families::batch_norm::channels::{
    GRADIENT, INTERNAL, MICROSOFT, sum_channels, unknown_rank_error, unsqueeze_channels,
};
use crate::families::batch_norm::rewrites::{decompose_grad, decompose_internal, downgrade, upgrade};
use crate::grad::Grad;
use crate::infer::Infer;
use crate::lower::{Lower, NestBuilder};
use crate::op::{Definition, Op};
use crate::support::casts::{arithmetic_dtype, cast};
use crate::support::formula::formula;

/// Names of the outputs that onnxruntime-training adds.
const ADDED_OUTPUTS: [&str; 4] = ["running_mean_def", "running_var_def", "saved_mean_def", "saved_inv_std"];

/// `BatchNormalization` or `BatchNormInternal`.
struct BatchNorm {
    epsilon: f64,
    momentum: f64,
    is_training: bool,
    /// True if the operator also returns the statistics of the batch.
    is_internal: bool,
}

/// Gradient of [`BatchNorm`] in training mode.
///
/// The inputs are the gradient of the result, `X`, the scale, and mean and `1 / sqrt(var + epsilon)` of the batch. The
/// outputs are the gradients of `X`, scale and bias.
struct BatchNormGrad;

/// Axes of a batch: elements, channels, space. A vector gets a channel axis of size 1.
struct BatchAxes {
    dims: Vec<usize>,
}

impl BatchAxes {
    fn from_dims(dims: &[usize]) -> BatchAxes {
        let mut dims = dims.to_vec();
        if dims.len() == 1 {
            dims.push(1);
        }
        BatchAxes { dims }
    }

    fn channel_count(&self) -> usize {
        self.dims[1]
    }

    /// Returns the number of elements of a channel.
    fn elements_per_channel(&self) -> usize {
        self.dims[2..].iter().fold(self.dims[0], |count, &dim| count.saturating_mul(dim))
    }

    /// Starts a map over the batch in memory order.
    fn start_map(&self, cx: &Lower<'_>) -> NestBuilder {
        cx.nest(&self.dims, 0)
    }

    /// Returns the strides of a buffer with one element for each channel, in a map over the batch.
    fn channel_strides(&self) -> Strides {
        (0..self.dims.len()).map(|axis| isize::from(axis == 1)).collect()
    }

    /// Starts a reduction of each channel. Also returns the strides of the batch, and of a buffer with one element for
    /// each channel.
    fn start_channel_reduction(&self, cx: &Lower<'_>) -> (NestBuilder, Strides, Strides) {
        let mut strides = Access::contiguous(DType::F32, &self.dims).strides;
        let mut dims = self.dims.clone();
        strides.swap(0, 1);
        dims.swap(0, 1);
        let channel = (0..dims.len()).map(|axis| isize::from(axis == 0)).collect();
        (cx.nest(&dims, dims.len() - 1), strides, channel)
    }
}

/// Loads an element with strides and converts it to a type.
fn load_as(cx: &Lower<'_>, nest: &mut NestBuilder, buffer: BufferId, strides: &[isize], ty: Type) -> Reg {
    let value = nest.load_strided(cx, buffer, 0, strides);
    nest.b.convert(value, ty)
}

impl BatchNorm {
    /// Emits `y = (x - mean) * factor + bias`, with one mean and factor for each channel.
    fn emit_normalization(
        &self,
        cx: &mut Lower<'_>,
        axes: &BatchAxes,
        mean: BufferId,
        factor: BufferId,
    ) -> Result<(), OpError> {
        let (x, bias, y) = (cx.input(0), cx.input(2), cx.output(0));
        let (ty, dtype) = (Type::of(cx.dtype(0)), cx.dtype(0));
        let (mut nest, channel) = (axes.start_map(cx), axes.channel_strides());
        let x = nest.load_broadcast(x, dtype, &axes.dims);
        let mean = load_as(cx, &mut nest, mean, &channel, ty);
        let factor = load_as(cx, &mut nest, factor, &channel, ty);
        let bias = load_as(cx, &mut nest, bias, &channel, ty);
        let centred = nest.b.sub(x, mean);
        let scaled = nest.b.mul(centred, factor);
        let result = nest.b.add(scaled, bias);
        nest.store_contiguous(cx, y, result);
        cx.emit(nest.instruction())
    }

    fn lower_inference(&self, cx: &mut Lower<'_>, axes: &BatchAxes) -> Result<(), OpError> {
        let (dtype, channels) = (arithmetic_dtype(cx.dtype(0)), axes.channel_count());
        let ty = Type::of(dtype);
        let (scale, mean, var) = (cx.input(1), cx.input(3), cx.input(4));
        let factor = cx.alloc_temp("factor", dtype, channels);
        let mut nest = cx.nest(&[channels], 0);
        let scale = load_as(cx, &mut nest, scale, &[1], ty);
        let var = load_as(cx, &mut nest, var, &[1], ty);
        let epsilon = nest.b.constant(ty, self.epsilon);
        let sum = nest.b.add(var, epsilon);
        let root = nest.b.unary(UnaryOp::Sqrt, sum);
        let value = nest.b.div(scale, root);
        nest.store_contiguous(cx, factor, value);
        cx.emit(nest.instruction())?;
        self.emit_normalization(cx, axes, mean, factor)?;
        cx.alias(1, 3);
        cx.alias(2, 4);
        Ok(())
    }

    fn lower_training(&self, cx: &mut Lower<'_>, axes: &BatchAxes) -> Result<(), OpError> {
        let (dtype, channels, count) =
            (arithmetic_dtype(cx.dtype(0)), axes.channel_count(), axes.elements_per_channel());
        let ty = Type::of(dtype);
        let mean = if cx.has_output(3) && cx.out_dtype(3) == dtype {
            cx.output(3)
        } else {
            cx.alloc_temp("mean", dtype, channels)
        };
        let factor = cx.alloc_temp("factor", dtype, channels);
        let (x, scale) = (cx.input(0), cx.input(1));
        let (mut nest, batch, channel) = axes.start_channel_reduction(cx);
        let x = load_as(cx, &mut nest, x, &batch, ty);
        let scale = load_as(cx, &mut nest, scale, &channel, ty);
        // The sums of an empty batch are zero; the divisor 1 keeps the statistics finite.
        let n = nest.b.constant(ty, count.max(1) as f64);
        let sum = nest.reduce(ReduceOp::Sum, x);
        let average = nest.b.div(sum, n);
        let centred = nest.b.sub(x, average);
        let square = nest.b.mul(centred, centred);
        let squares = nest.reduce(ReduceOp::Sum, square);
        let variance = nest.b.div(squares, n);
        let (epsilon, one) = (nest.b.constant(ty, self.epsilon), nest.b.constant(ty, 1.0));
        let sum = nest.b.add(variance, epsilon);
        let root = nest.b.unary(UnaryOp::Sqrt, sum);
        let inverse = nest.b.div(one, root);
        let value = nest.b.mul(scale, inverse);
        nest.store_outer(cx, mean, average);
        nest.store_outer(cx, factor, value);
        for (k, value) in [(3, average), (4, inverse)] {
            if !cx.has_output(k) {
                continue;
            }
            let saved = cx.output(k);
            if saved != mean {
                nest.store_outer(cx, saved, value);
            }
        }
        for (k, input, value) in [(1, 3, average), (2, 4, variance)] {
            if !cx.has_output(k) {
                continue;
            }
            if count == 0 {
                cx.alias(k, input);
                continue;
            }
            let (old, new) = (cx.input(input), cx.output(k));
            let ty = Type::of(cx.dtype(input));
            let old = load_as(cx, &mut nest, old, &channel, ty);
            let b = &mut nest.b;
            let (keep, take) = (b.constant(ty, self.momentum), b.constant(ty, 1.0 - self.momentum));
            let value = b.convert(value, ty);
            let (old_share, batch_share) = (b.mul(keep, old), b.mul(take, value));
            let result = b.add(old_share, batch_share);
            nest.store_outer(cx, new, result);
        }
        cx.emit(nest.instruction())?;
        self.emit_normalization(cx, axes, mean, factor)
    }

    /// Returns the gradient of `X` through the saved statistics of the batch. The derivative of the mean m is 1 / n.
    /// The derivative of r = 1 / sqrt(variance + epsilon) is -r^3 * (x - m) / n.
    fn gradient_through_saved_statistics(&self, cx: &mut Grad<'_>) -> Result<Option<ValueId>, OpError> {
        let arriving = [cx.output_grad(3), cx.output_grad(4)];
        if !cx.needs_grad(0) || arriving == [None, None] {
            return Ok(None);
        }
        let x = cx.input(0)?;
        let rank = cx.shape(x).map(Shape::rank).ok_or_else(unknown_rank_error)?;
        let (narrow, statistics) = (cx.dtype(x)?, cx.dtype(cx.input(3)?)?);
        let spread = |cx: &mut Grad<'_>, value: ValueId| {
            let value = cast(cx, value, statistics, narrow);
            unsqueeze_channels(cx, value, rank)
        };
        let none = Attrs::new;
        let mean = cx.output(3, ADDED_OUTPUTS[2]);
        let (element_count, channels) = (cx.add("Size", &[x], none()), cx.add("Size", &[mean], none()));
        let count = cx.add("Div", &[element_count, channels], none());
        let count = cx.add("Cast", &[count], none().with("to", i64::from(narrow.to_onnx())));
        let mean = spread(cx, mean);
        let centred = cx.add("Sub", &[x, mean], none());
        let mut parts = Vec::new();
        if let Some(of_mean) = arriving[0] {
            let of_mean = spread(cx, of_mean);
            let shape = cx.shape_of(x);
            parts.push(cx.add("Expand", &[of_mean, shape], none()));
        }
        if let Some(of_inverse) = arriving[1] {
            let inverse = cx.output(4, ADDED_OUTPUTS[3]);
            let factor = formula(cx, [of_inverse, inverse], |[g, r]| g * (r * r * r));
            let factor = spread(cx, factor);
            parts.push(formula(cx, [factor, centred], |[factor, centred]| -(factor * centred)));
        }
        let sum = if parts.len() == 1 { parts[0] } else { cx.add("Add", &parts, none()) };
        Ok(Some(cx.add("Div", &[sum, count], none())))
    }

    /// Adds the gradients in inference mode, where mean and variance are inputs.
    fn grad_inference(&self, cx: &mut Grad<'_>, g: ValueId) -> Result<(), OpError> {
        let [x, scale, mean, var] = [cx.input(0)?, cx.input(1)?, cx.input(3)?, cx.input(4)?];
        let rank = cx.shape(x).map(Shape::rank).ok_or_else(unknown_rank_error)?;
        let [dtype, scale_ty, mean_ty] = [cx.dtype(x)?, cx.dtype(scale)?, cx.dtype(mean)?];
        let none = Attrs::new;
        let epsilon = cx.constant("epsilon", Tensor::scalar(mean_ty, self.epsilon));
        let shifted = cx.add("Add", &[var, epsilon], none());
        let root = cx.add("Sqrt", &[shifted], none());
        let wide_scale = cast(cx, scale, scale_ty, mean_ty);
        let factor = cx.add("Div", &[wide_scale, root], none());
        if cx.needs_grad(0) {
            let factor = cast(cx, factor, mean_ty, dtype);
            let factor = unsqueeze_channels(cx, factor, rank);
            let gradient = cx.add("Mul", &[g, factor], none());
            cx.set_grad(0, gradient);
        }
        let (of_statistics, of_var) = (cx.needs_grad(3) || cx.needs_grad(4), cx.needs_grad(4));
        let bias = cx.needs_grad(2) || of_statistics;
        let sum = if bias { Some(sum_channels(cx, g, rank)) } else { None };
        if let (true, Some(sum)) = (cx.needs_grad(2), sum) {
            let gradient = cast(cx, sum, dtype, scale_ty);
            cx.set_grad(2, gradient);
        }
        if cx.needs_grad(1) || of_var {
            let middle = cast(cx, mean, mean_ty, dtype);
            let middle = unsqueeze_channels(cx, middle, rank);
            let product = formula(cx, [g, x, middle], |[g, x, middle]| g * (x - middle));
            let sum = sum_channels(cx, product, rank);
            let sum = cast(cx, sum, dtype, mean_ty);
            if cx.needs_grad(1) {
                let gradient = cx.add("Div", &[sum, root], none());
                let gradient = cast(cx, gradient, mean_ty, scale_ty);
                cx.set_grad(1, gradient);
            }
            if of_var {
                let half = cx.constant("minus_half", Tensor::scalar(mean_ty, -0.5));
                let values = [sum, factor, shifted, half];
                let gradient =
                    formula(cx, values, |[sum, factor, shifted, half]| sum * (factor / shifted) * half);
                cx.set_grad(4, gradient);
            }
        }
        if let (true, Some(sum)) = (cx.needs_grad(3), sum) {
            let sum = cast(cx, sum, dtype, mean_ty);
            let gradient = formula(cx, [sum, factor], |[sum, factor]| -(sum * factor));
            cx.set_grad(3, gradient);
        }
        Ok(())
    }
}

/// Checks that some inputs have one element for each channel of input `x`.
fn check_channels(cx: &Infer<'_>, x: usize, inputs: &[usize]) -> Result<(), OpError> {
    let channels = match cx.shape(x) {
        Some(shape) if shape.rank() == 0 => {
            return Err(OpError::invalid(format!("input {x} must have a batch axis, got a scalar")));
        }
        Some(shape) if shape.rank() == 1 => Some(Dim::Known(1)),
        Some(shape) => Some(shape[1].clone()),
        None => None,
    };
    for &k in inputs {
        let Some(shape) = cx.shape(k) else { continue };
        let fits = match (&channels, &shape[..]) {
            (Some(Dim::Known(channels)), [Dim::Known(size)]) => channels == size,
            (_, [_]) => true,
            _ => false,
        };
        if !fits {
            let expected = channels.as_ref().map_or("the number of channels".to_owned(), ToString::to_string);
            return Err(OpError::invalid(format!(
                "input {k} has shape {shape}, but [{expected}] is needed: one element for each channel of input {x}"
            )));
        }
    }
    Ok(())
}

/// Returns the shape `[channels]`, from `x` or from one of the other inputs. A known size is preferred to a symbolic
/// one.
fn channel_shape(cx: &Infer<'_>, x: usize, other_inputs: &[usize]) -> Option<Shape> {
    let of_x = cx.shape(x).map(|shape| if shape.rank() == 1 { Dim::Known(1) } else { shape[1].clone() });
    let of_others = other_inputs.iter().filter_map(|&k| cx.shape(k)).map(|shape| shape[0].clone());
    let known = of_x.into_iter().chain(of_others).max_by_key(|dim| dim.known().is_some())?;
    Some([known].into_iter().collect())
}

impl Op for BatchNorm {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(5, 5, if self.is_internal { 5 } else { 3 })?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        for k in 1..5 {
            cx.expect_dtype(k, "a float type", DType::is_float)?;
        }
        cx.expect_same_dtype([1, 2])?;
        let statistics = cx.expect_same_dtype([3, 4])?;
        check_channels(cx, 0, &[1, 2, 3, 4])?;
        if !self.is_training && (cx.has_output(3) || cx.has_output(4)) {
            return Err(OpError::invalid("batch statistics (outputs 3 and 4) exist only in training mode"));
        }
        let channels = channel_shape(cx, 0, &[1, 2, 3, 4]);
        let mut shape = cx.shape(0).cloned();
        if let (Some(shape), Some(channels)) = (&mut shape, &channels)
            && shape.rank() > 1
        {
            shape.0[1] = channels[0].clone();
        }
        cx.set_output(0, dtype, shape);
        for k in 1..5 {
            cx.set_output(k, statistics, channels.clone());
        }
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let arriving = cx.output_grad(0);
        if !self.is_training {
            return arriving.map_or(Ok(()), |g| self.grad_inference(cx, g));
        }
        let mut of_x = self.gradient_through_saved_statistics(cx)?;
        if let Some(g) = arriving {
            cx.replace_node(|graph, index| convert_to_internal(graph, index, ""));
            let saved = [cx.output(3, ADDED_OUTPUTS[2]), cx.output(4, ADDED_OUTPUTS[3])];
            let inputs = [g, cx.input(0)?, cx.input(1)?, saved[0], saved[1]].map(Some);
            let attrs = Attrs::new().with("epsilon", self.epsilon as f32);
            let gradients = cx.add_node(MICROSOFT, GRADIENT, &inputs, 3, attrs);
            of_x = Some(match of_x {
                Some(other) => cx.add("Add", &[gradients[0], other], Attrs::new()),
                None => gradients[0],
            });
            for k in [1, 2] {
                if cx.needs_grad(k) {
                    cx.set_grad(k, gradients[k]);
                }
            }
        }
        if let Some(of_x) = of_x.filter(|_| cx.needs_grad(0)) {
            cx.set_grad(0, of_x);
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let axes = BatchAxes::from_dims(&cx.dims(0));
        if self.is_training { self.lower_training(cx, &axes) } else { self.lower_inference(cx, &axes) }
    }

    fn state_updates(&self) -> &'static [(usize, usize)] {
        if self.is_internal && self.is_training { &[(1, 3), (2, 4)] } else { &[] }
    }
}

impl Op for BatchNormGrad {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(5, 5, 3)?;
        for k in 0..5 {
            cx.expect_dtype(k, "a float type", DType::is_float)?;
        }
        let dtype = cx.expect_same_dtype([0, 1])?;
        let (scale, shape) = (cx.dtype(2)?, cx.broadcast([0, 1])?);
        if let (Some(g), Some(x)) = (cx.shape(0), cx.shape(1)) {
            let differ = |a: &Dim, b: &Dim| matches!((a.known(), b.known()), (Some(a), Some(b)) if a != b);
            if g.rank() != x.rank() || g.iter().zip(x.iter()).any(|(a, b)| differ(a, b)) {
                return Err(OpError::invalid(format!(
                    "the gradient has shape {g}, but the input has shape {x}"
                )));
            }
        }
        check_channels(cx, 1, &[2, 3, 4])?;
        let channels = channel_shape(cx, 1, &[2, 3, 4]);
        cx.set_output(0, dtype, shape);
        cx.set_output(1, scale, channels.clone());
        cx.set_output(2, scale, channels);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let axes = BatchAxes::from_dims(&cx.dims(1));
        let (narrow, dtype, channels, count) =
            (cx.dtype(1), arithmetic_dtype(cx.dtype(1)), axes.channel_count(), axes.elements_per_channel());
        let ty = Type::of(dtype);
        let [gradient, x, scale, mean, inverse] = [0, 1, 2, 3, 4].map(|k| cx.input(k));
        // dX = factor * (g - share - (x - mean) * slope)
        let terms = ["factor", "share", "slope"].map(|name| cx.alloc_temp(name, dtype, channels));

        let (mut nest, batch, channel) = axes.start_channel_reduction(cx);
        let g = load_as(cx, &mut nest, gradient, &batch, ty);
        let at = load_as(cx, &mut nest, x, &batch, ty);
        let middle = load_as(cx, &mut nest, mean, &channel, ty);
        let inv = load_as(cx, &mut nest, inverse, &channel, ty);
        let sum = nest.reduce(ReduceOp::Sum, g);
        let centred = nest.b.sub(at, middle);
        let product = nest.b.mul(g, centred);
        let products = nest.reduce(ReduceOp::Sum, product);
        // The sum of an empty batch is zero, but its inverse standard deviation may be NaN.
        let of_scale = if count == 0 { products } else { nest.b.mul(products, inv) };
        for (k, value) in [(1, of_scale), (2, sum)] {
            if cx.has_output(k) {
                let output = cx.output(k);
                nest.store_outer(cx, output, value);
            }
        }
        let scale = load_as(cx, &mut nest, scale, &channel, ty);
        let b = &mut nest.b;
        let n = b.constant(ty, count.max(1) as f64);
        let (factor, share) = (b.mul(scale, inv), b.div(sum, n));
        let slope = b.mul(of_scale, inv);
        let slope = b.div(slope, n);
        for (&term, value) in terms.iter().zip([factor, share, slope]) {
            nest.store_outer(cx, term, value);
        }
        cx.emit(nest.instruction())?;

        if !cx.has_output(0) {
            return Ok(());
        }
        let (mut nest, channel) = (axes.start_map(cx), axes.channel_strides());
        let g = nest.load_broadcast(gradient, narrow, &axes.dims);
        let at = nest.load_broadcast(x, narrow, &axes.dims);
        let middle = load_as(cx, &mut nest, mean, &channel, ty);
        let [factor, share, slope] = terms.map(|term| load_as(cx, &mut nest, term, &channel, ty));
        let b = &mut nest.b;
        let centred = b.sub(at, middle);
        let along = b.mul(centred, slope);
        let rest = b.sub(g, share);
        let rest = b.sub(rest, along);
        let result = b.mul(factor, rest);
        let output = cx.output(0);
        nest.store_contiguous(cx, output, result);
        cx.emit(nest.instruction())
    }
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let internal = &*node.op == INTERNAL;
    let training = node.attrs.int("training_mode")?.unwrap_or(i64::from(internal));
    Ok(Box::new(BatchNorm {
        epsilon: f64::from(node.attrs.float("epsilon")?.unwrap_or(1e-5)),
        momentum: f64::from(node.attrs.float("momentum")?.unwrap_or(0.9)),
        is_training: training != 0,
        is_internal: internal,
    }))
}

/// Converts a `BatchNormalization` to `BatchNormInternal`, which uses and returns the statistics of the batch.
///
/// Training graphs of onnxruntime-training have this form. Its running statistics are updated if they are state. The
/// names of new values begin with `prefix`.
pub(crate) fn convert_to_internal(graph: &mut Graph, index: usize, prefix: &str) {
    let node = &mut graph.nodes[index];
    if &*node.op == INTERNAL {
        return;
    }
    let attr = |name: &str, default: f32| node.attrs.float(name).ok().flatten().unwrap_or(default);
    let attrs = Attrs::new()
        .with("epsilon", attr("epsilon", 1e-5))
        .with("momentum", attr("momentum", 0.9))
        .with("training_mode", 1i64);
    (node.domain, node.op, node.attrs) = (MICROSOFT.into(), INTERNAL.into(), attrs);
    if !node.name.is_empty() {
        node.name = format!("{}_{INTERNAL}", node.name).into();
    }
    let mut outputs = node.outputs.clone();
    outputs.resize(5, None);
    for (port, name) in outputs[1..].iter_mut().zip(ADDED_OUTPUTS) {
        port.get_or_insert_with(|| graph.add_value(&format!("{prefix}{name}"), ValueType::Unknown));
    }
    graph.nodes[index].outputs = outputs;
}

/// Converts a `BatchNormalization` to inference mode. The running statistics outputs become copies of the inputs, by
/// nodes after the normalization. Returns the number of added nodes.
pub(crate) fn convert_to_inference(graph: &mut Graph, index: usize) -> usize {
    let node = &mut graph.nodes[index];
    node.attrs.0.remove("training_mode");
    let (inputs, outputs) = (node.inputs.clone(), node.outputs.clone());
    node.outputs.truncate(1);
    let port = |ports: &[Option<ValueId>], k: usize| ports.get(k).copied().flatten();
    let pairs = [(1, 3), (2, 4)].map(|(k, input)| Some((port(&outputs, k)?, port(&inputs, input)?)));
    let copies: Vec<Node> = pairs
        .into_iter()
        .flatten()
        .map(|(new, statistic)| Node::new("", "Identity", &[Some(statistic)], &[Some(new)], Attrs::new()))
        .collect();
    let count = copies.len();
    graph.nodes.splice(index + 1..index + 1, copies);
    count
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "BatchNormalization", &[7, 9, 14, 15], build)
            .class(Class::Normalization { scale: 1, bias: Some(2), of_instances: false })
            .inputs_without_gradient(&[3, 4])
            .kept_inputs(&[3, 4])
            .weights(&[1, 2])
            .statistics(&[3, 4])
            .upgrade(upgrade)
            .downgrade(downgrade),
        Definition::new(MICROSOFT, INTERNAL, &[1], build).decompose(decompose_internal),
        Definition::new(MICROSOFT, GRADIENT, &[1], |_, _| Ok(Box::new(BatchNormGrad)))
            .differentiated_as(decompose_grad),
    ]
}

#[cfg(test)]
mod tests;
