//! Layer normalization over all axes from `axis` on, and its gradients.
//!
//! Operators: `LayerNormalization`, `RMSNormalization` and its older name in ONNX Runtime,
//! `SimplifiedLayerNormalization`. Training graphs also have `LayerNormalizationGrad`,
//! `SimplifiedLayerNormalizationGrad` and `InvertibleLayerNormalizationGrad`.
//!
//! Sources: ONNX LayerNormalization-17 (<https://onnx.ai/onnx/operators/onnx__LayerNormalization.html>) and
//! RMSNormalization-23 (<https://onnx.ai/onnx/operators/onnx__RMSNormalization.html>); ONNX Runtime's
//! LayerNormalization-1 (the same before opset 17) and SimplifiedLayerNormalization-1 in the domain of ONNX, and the
//! gradient operators of `com.microsoft` version 1.
//!
//! `y = (x - mean) / sqrt(variance + epsilon) * scale + bias`. Mean and (biased) variance are over the elements from
//! `axis` on, in two passes. The second and third result are the mean and `1 / sqrt(variance + epsilon)`. Their reduced
//! axes have size 1, their type is `stash_type`, and they have gradients as any other result.
//!
//! `RMSNormalization` has no mean and no bias, and the mean square in place of the variance. Scale and bias broadcast
//! to `x`. float16 and bfloat16 are computed in float32. float64 is computed in float64 for every `stash_type`.
//!
//! Below its opset each operator is written as its decomposition.

use ortrain_expr::{Access, ReduceOp, Reg, Strides, Type, UnaryOp};
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId};

use crate::OpError;
use crate::class::Class;
use crate::grad::Grad;
use crate::infer::{Infer, normalize_axis};
use crate::lower::{Lower, NestBuilder};
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::casts::{arithmetic_dtype, cast};
use crate::support::formula::formula;
use crate::support::norms::check_broadcasts;
use crate::support::onnx_decomposition::NodeSink;

const MICROSOFT: &str = "com.microsoft";
const LAYER: &str = "LayerNormalization";
const RMS: &str = "RMSNormalization";
const SIMPLIFIED: &str = "SimplifiedLayerNormalization";
const LAYER_GRAD: &str = "LayerNormalizationGrad";
const SIMPLIFIED_GRAD: &str = "SimplifiedLayerNormalizationGrad";
const INVERTIBLE_GRAD: &str = "InvertibleLayerNormalizationGrad";

/// Variant of the normalization.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Mean and variance: `Y`, `Mean`, `InvStdDev` of `X`, `Scale`, `B`.
    Layer,
    /// Mean square: `Y`, `inv_std_var` of `X`, `scale`.
    Simplified,
    /// Mean square: `Y` of `X`, `scale`.
    Rms,
}

impl Kind {
    fn from_node(node: &Node) -> Kind {
        match &*node.op {
            RMS => Kind::Rms,
            SIMPLIFIED => Kind::Simplified,
            _ => Kind::Layer,
        }
    }

    /// Returns the index of the output that is the mean.
    fn mean_output(self) -> Option<usize> {
        (self == Kind::Layer).then_some(1)
    }

    /// Returns the index of the output that is the inverse standard deviation.
    fn inverse_std_dev_output(self) -> Option<usize> {
        match self {
            Kind::Layer => Some(2),
            Kind::Simplified => Some(1),
            Kind::Rms => None,
        }
    }
}

/// Normalization of `X` (any float type) over its axes from `axis` on.
struct LayerNorm {
    kind: Kind,
    axis: i64,
    epsilon: f64,
    /// Type of the outputs `Mean` and `InvStdDev`.
    stash_dtype: DType,
}

/// Gradient of [`LayerNorm`].
///
/// The inputs are the gradient of the result, `X`, the scale, the mean (if the variant has one) and the inverse
/// standard deviation. The outputs are the gradients of `X`, of the scale and, if the variant has a mean, of the bias.
/// The bias has the shape of the scale.
struct LayerNormGrad {
    axis: i64,
    has_mean: bool,
}

/// Gradient of [`LayerNorm`] for a training graph that does not save `X`. It has the inputs of [`LayerNormGrad`], but
/// the result of the normalization in place of `X`, and the bias in place of the mean. It is a composition.
struct InvertibleLayerNormGrad(LayerNormGrad);

/// Returns the normalized axes, counted from the front if the rank is known.
fn normalized_axes(axis: i64, rank: Option<usize>) -> Result<Vec<i64>, OpError> {
    match rank {
        Some(rank) => Ok((normalize_axis(axis, rank)? as i64..rank as i64).collect()),
        None if axis < 0 => Ok((axis..0).collect()),
        None => Err(unknown_rank_error()),
    }
}

fn unknown_rank_error() -> OpError {
    OpError::unsupported("the rank of the data must be known; declare its shape in the model")
}

/// Returns a shape with the axes from `axis` on reduced to size 1.
fn reduced_shape(shape: &Shape, axis: usize) -> Shape {
    shape.iter().enumerate().map(|(k, dim)| if k < axis { dim.clone() } else { Dim::Known(1) }).collect()
}

/// Returns the number of elements of a shape.
fn element_count(dims: &[usize]) -> f64 {
    dims.iter().map(|&dim| dim as f64).product()
}

/// Loads an element of input `k`, broadcast to the nest and converted to the type of the arithmetic.
fn load(nest: &mut NestBuilder, cx: &mut Lower<'_>, k: usize, ty: Type) -> Reg {
    let (buffer, dtype, dims) = (cx.input(k), cx.dtype(k), cx.dims(k));
    let value = nest.load_broadcast(buffer, dtype, &dims);
    nest.b.convert(value, ty)
}

impl LayerNorm {
    /// Adds nodes that compute the mean (if the variant has one), the centered data, and the inverse standard
    /// deviation. Gradients use them where the stored statistics have a narrower type than the arithmetic.
    fn emit_statistics(
        &self,
        to: &mut impl NodeSink,
        x: ValueId,
        axes: &[i64],
        dtype: DType,
    ) -> (Option<ValueId>, ValueId, ValueId) {
        let axes = to.emit_constant(Tensor::i64(&[axes.len()], axes));
        let mean_of = |to: &mut _, value| emit_node(to, "ReduceMean", &[value, axes]);
        let (mean, centred) = if self.kind == Kind::Layer {
            let mean = mean_of(to, x);
            (Some(mean), emit_node(to, "Sub", &[x, mean]))
        } else {
            (None, x)
        };
        let square = emit_node(to, "Mul", &[centred, centred]);
        let variance = mean_of(to, square);
        let epsilon = to.emit_constant(Tensor::scalar(dtype, self.epsilon));
        let root = formula(to, [variance, epsilon], |[variance, epsilon]| (variance + epsilon).sqrt());
        let one = to.emit_constant(Tensor::scalar(dtype, 1.0));
        (mean, centred, emit_node(to, "Div", &[one, root]))
    }

    /// Returns the mean (if the variant has one) and the inverse standard deviation, in the type of the arithmetic.
    fn saved_statistics(&self, cx: &mut Grad<'_>, x: ValueId) -> Result<(Option<ValueId>, ValueId), OpError> {
        let dtype = cx.dtype(x)?;
        if self.stash_dtype == arithmetic_dtype(dtype) {
            if self.kind == Kind::Rms {
                // SimplifiedLayerNormalization is the same operator with a second result.
                cx.replace_node(|graph, index| graph.nodes[index].op = SIMPLIFIED.into());
            }
            let mean = self.kind.mean_output().map(|k| cx.output(k, "mean"));
            return Ok((mean, cx.output(self.kind.inverse_std_dev_output().unwrap_or(1), "inv_std_dev")));
        }
        let axes = normalized_axes(self.axis, cx.shape(x).map(Shape::rank))?;
        let data = cast(cx, x, dtype, arithmetic_dtype(dtype));
        let (mean, _, inverse) = self.emit_statistics(cx, data, &axes, arithmetic_dtype(dtype));
        Ok((mean, inverse))
    }

    /// Returns the gradient of `X` through the statistics: `(g_mean - g_inverse * inverse^3 * (x - mean)) / n`.
    fn gradient_through_statistics(
        &self,
        cx: &mut Grad<'_>,
        x: ValueId,
        (mean, inverse): (Option<ValueId>, ValueId),
        grads: [Option<ValueId>; 2],
    ) -> Result<Option<ValueId>, OpError> {
        let narrow = cx.dtype(x)?;
        let dtype = arithmetic_dtype(narrow);
        let [of_mean, of_inverse] = grads.map(|g| g.map(|g| cast(cx, g, self.stash_dtype, dtype)));
        let mut sum = of_mean;
        if let Some(g) = of_inverse {
            let data = cast(cx, x, narrow, dtype);
            let centred = mean.map_or(data, |mean| emit_node(cx, "Sub", &[data, mean]));
            let part = formula(cx, [g, inverse, centred], |[g, r, centred]| g * (r * r * r) * centred);
            sum = Some(match sum {
                Some(sum) => emit_node(cx, "Sub", &[sum, part]),
                None => emit_node(cx, "Neg", &[part]),
            });
        }
        let Some(sum) = sum else { return Ok(None) };
        let sizes = cx.shape(x).and_then(|shape| {
            let axis = normalize_axis(self.axis, shape.rank()).ok()?;
            shape[axis..].iter().map(Dim::known).collect::<Option<Vec<usize>>>()
        });
        let sum = match sizes {
            Some(sizes) => {
                let count = cx.constant("count", Tensor::scalar(dtype, element_count(&sizes)));
                emit_node(cx, "Div", &[sum, count])
            }
            None => {
                let (total, rows) = (emit_node(cx, "Size", &[x]), emit_node(cx, "Size", &[inverse]));
                let count = emit_node(cx, "Div", &[total, rows]);
                let attrs = Attrs::new().with("scale_down", 1i64);
                cx.add_in(MICROSOFT, "Scale", &[sum, count], attrs)
            }
        };
        Ok(Some(cast(cx, sum, dtype, narrow)))
    }
}

/// Adds a node with one result.
fn emit_node(to: &mut impl NodeSink, op: &str, inputs: &[ValueId]) -> ValueId {
    let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
    to.emit(op, &inputs, Attrs::new())
}

impl Op for LayerNorm {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let centred = self.kind == Kind::Layer;
        let outputs = self.kind.inverse_std_dev_output().map_or(1, |k| k + 1);
        cx.check_arity(2, if centred { 3 } else { 2 }, outputs)?;
        cx.expect_dtype(0, "a float type", DType::is_float)?;
        let dtype = cx.expect_same_dtype(0..3)?;
        let axis = cx.shape(0).map(|shape| normalize_axis(self.axis, shape.rank())).transpose()?;
        for k in 1..3 {
            check_broadcasts(cx, k, 0)?;
        }
        let statistics = cx.shape(0).zip(axis).map(|(shape, axis)| reduced_shape(shape, axis));
        cx.set_output(0, dtype, cx.shape(0).cloned());
        for k in 1..outputs {
            cx.set_output(k, self.stash_dtype, statistics.clone());
        }
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let g = cx.output_grad(0);
        let through = [self.kind.mean_output(), self.kind.inverse_std_dev_output()]
            .map(|k| k.and_then(|k| cx.output_grad(k)));
        let (x, scale) = (cx.input(0)?, cx.input(1)?);
        let mut of_x = Vec::new();
        let mut of_bias = None;
        if cx.needs_grad(0) || g.is_some() && cx.needs_grad(1) {
            let (mean, inverse) = self.saved_statistics(cx, x)?;
            if let Some(g) = g {
                let inputs: Vec<Option<ValueId>> =
                    [g, x, scale].into_iter().chain(mean).chain([inverse]).map(Some).collect();
                let (op, outputs) = if mean.is_some() { (LAYER_GRAD, 3) } else { (SIMPLIFIED_GRAD, 2) };
                let attrs = Attrs::new().with("axis", self.axis);
                let gradients = cx.add_node(MICROSOFT, op, &inputs, outputs, attrs);
                of_x.push(gradients[0]);
                if cx.needs_grad(1) {
                    cx.set_grad(1, gradients[1]);
                }
                of_bias = gradients.get(2).copied();
            }
            if cx.needs_grad(0) {
                of_x.extend(self.gradient_through_statistics(cx, x, (mean, inverse), through)?);
            }
        }
        if cx.needs_grad(0)
            && let Some(&first) = of_x.first()
        {
            let sum = of_x[1..].iter().fold(first, |sum, &part| emit_node(cx, "Add", &[sum, part]));
            // A gradient through the statistics only may have size 1 along the reduced axes.
            let sum = match g {
                Some(_) => sum,
                None => {
                    let shape = cx.shape_of(x);
                    emit_node(cx, "Expand", &[sum, shape])
                }
            };
            cx.set_grad(0, sum);
        }
        if let (true, Some(g), Some(bias)) = (cx.needs_grad(2), g, cx.optional_input(2)) {
            let alike = cx.shape(bias).is_some() && cx.shape(bias) == cx.shape(scale);
            let gradient = match of_bias {
                Some(gradient) if alike => gradient,
                _ => {
                    let y = cx.output(0, "y");
                    cx.sum_to(g, bias, y)?
                }
            };
            cx.set_grad(2, gradient);
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let (dims, ty) = (cx.dims(0), Type::of(cx.dtype(0)));
        let axis = normalize_axis(self.axis, dims.len())?;
        let mut nest = cx.nest(&dims, dims.len() - axis);
        let x = load(&mut nest, cx, 0, ty);
        let scale = load(&mut nest, cx, 1, ty);
        let bias = cx.has_input(2).then(|| load(&mut nest, cx, 2, ty));
        let n = nest.b.constant(ty, element_count(&dims[axis..]));
        let (mean, centred) = if self.kind == Kind::Layer {
            let sum = nest.reduce(ReduceOp::Sum, x);
            let mean = nest.b.div(sum, n);
            (Some(mean), nest.b.sub(x, mean))
        } else {
            (None, x)
        };
        let square = nest.b.mul(centred, centred);
        let squares = nest.reduce(ReduceOp::Sum, square);
        let b = &mut nest.b;
        let variance = b.div(squares, n);
        let (epsilon, one) = (b.constant(ty, self.epsilon), b.constant(ty, 1.0));
        let shifted = b.add(variance, epsilon);
        let root = b.unary(UnaryOp::Sqrt, shifted);
        let inverse = b.div(one, root);
        let normal = b.mul(centred, inverse);
        let scaled = b.mul(normal, scale);
        let y = match bias {
            Some(bias) => b.add(scaled, bias),
            None => scaled,
        };
        if cx.has_output(0) {
            let output = cx.output(0);
            nest.store_contiguous(cx, output, y);
        }
        for (k, value) in
            [(self.kind.mean_output(), mean), (self.kind.inverse_std_dev_output(), Some(inverse))]
        {
            if let (Some(k), Some(value)) = (k, value)
                && cx.has_output(k)
            {
                let output = cx.output(k);
                nest.store_outer(cx, output, value);
            }
        }
        cx.emit(nest.instruction())
    }
}

impl LayerNormGrad {
    /// Returns the indices of the inputs that are the mean (if the variant has one) and the inverse standard deviation.
    fn statistics_inputs(&self) -> (Option<usize>, usize) {
        if self.has_mean { (Some(3), 4) } else { (None, 3) }
    }
}

impl LayerNormGrad {
    /// Checks types and shapes. With `has_bias` input 1 is the result of the normalization and input 3 the bias;
    /// otherwise input 3 is the mean.
    fn check_inputs(&self, cx: &mut Infer<'_>, has_bias: bool) -> Result<(), OpError> {
        let (mean, inverse) = self.statistics_inputs();
        cx.check_arity(inverse + 1, inverse + 1, if self.has_mean { 3 } else { 2 })?;
        for k in 0..=inverse {
            cx.expect_dtype(k, "a float type", DType::is_float)?;
        }
        let dtype = cx.expect_same_dtype([0, 1])?;
        let differ = |a: &Shape, b: &Shape| {
            let sizes_differ =
                |a: &Dim, b: &Dim| matches!((a.known(), b.known()), (Some(a), Some(b)) if a != b);
            a.rank() != b.rank() || a.iter().zip(b.iter()).any(|(a, b)| sizes_differ(a, b))
        };
        if let (Some(g), Some(x)) = (cx.shape(0), cx.shape(1))
            && differ(g, x)
        {
            return Err(OpError::invalid(format!("the gradient has shape {g}, but the input has shape {x}")));
        }
        if let Some(x) = cx.shape(1) {
            let expected = reduced_shape(x, normalize_axis(self.axis, x.rank())?);
            for k in mean.filter(|_| !has_bias).into_iter().chain([inverse]) {
                if let Some(actual) = cx.shape(k)
                    && differ(actual, &expected)
                {
                    return Err(OpError::invalid(format!(
                        "input {k} has shape {actual}, but {expected} is needed: the statistics of an input of shape {x}"
                    )));
                }
            }
        }
        check_broadcasts(cx, 2, 1)?;
        if has_bias {
            check_broadcasts(cx, 3, 1)?;
        }
        cx.set_output(0, dtype, cx.shape(1).or(cx.shape(0)).cloned());
        for k in 1..3 {
            cx.set_output(k, cx.dtype(2)?, cx.shape(2).cloned());
        }
        Ok(())
    }
}

impl Op for InvertibleLayerNormGrad {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        self.0.check_inputs(cx, true)
    }
}

impl Op for LayerNormGrad {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        self.check_inputs(cx, false)
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let (dims, ty) = (cx.dims(1), Type::of(cx.dtype(1)));
        let axis = normalize_axis(self.axis, dims.len())?;
        let (mean, inverse) = self.statistics_inputs();
        if cx.has_output(0) {
            let mut nest = cx.nest(&dims, dims.len() - axis);
            let [g, x, scale] = [0, 1, 2].map(|k| load(&mut nest, cx, k, ty));
            let inverse = load(&mut nest, cx, inverse, ty);
            let centred = match mean {
                Some(mean) => {
                    let mean = load(&mut nest, cx, mean, ty);
                    nest.b.sub(x, mean)
                }
                None => x,
            };
            let n = nest.b.constant(ty, element_count(&dims[axis..]));
            let normal = nest.b.mul(centred, inverse);
            let scaled = nest.b.mul(g, scale);
            let product = nest.b.mul(scaled, normal);
            let products = nest.reduce(ReduceOp::Sum, product);
            let slope = nest.b.div(products, n);
            let along = nest.b.mul(normal, slope);
            let mut rest = nest.b.sub(scaled, along);
            if self.has_mean {
                let sum = nest.reduce(ReduceOp::Sum, scaled);
                let share = nest.b.div(sum, n);
                rest = nest.b.sub(rest, share);
            }
            let result = nest.b.mul(rest, inverse);
            let output = cx.output(0);
            nest.store_contiguous(cx, output, result);
            cx.emit(nest.instruction())?;
        }
        if cx.has_output(1) || cx.has_output(2) {
            self.lower_parameter_gradients(cx, &dims, ty)?;
        }
        Ok(())
    }
}

impl LayerNormGrad {
    /// Emits the gradients of scale and bias: sums over the axes along which the scale was broadcast.
    fn lower_parameter_gradients(&self, cx: &mut Lower<'_>, dims: &[usize], ty: Type) -> Result<(), OpError> {
        let scale = cx.dims(2);
        let lead = dims.len() - scale.len();
        let is_retained = |&axis: &usize| axis >= lead && scale[axis - lead] == dims[axis];
        let (retained_axes, summed): (Vec<usize>, Vec<usize>) = (0..dims.len()).partition(is_retained);
        // A reduction needs at least one axis.
        let padding = usize::from(summed.is_empty());
        let order: Vec<usize> = retained_axes.iter().chain(&summed).copied().collect();
        let space: Vec<usize> =
            order.iter().map(|&axis| dims[axis]).chain(std::iter::repeat_n(1, padding)).collect();
        let mut nest = cx.nest(&space, summed.len() + padding);
        let load = |cx: &mut Lower<'_>, nest: &mut NestBuilder, k: usize| {
            let (buffer, mut access) = (cx.input(k), Access::broadcast(cx.dtype(k), &cx.dims(k), dims));
            let strides: Strides = order.iter().map(|&axis| access.strides[axis]).collect();
            access.strides = strides.into_iter().chain(std::iter::repeat_n(0, padding)).collect();
            let value = nest.load(buffer, access);
            nest.b.convert(value, ty)
        };
        let g = load(cx, &mut nest, 0);
        if cx.has_output(1) {
            let (mean, inverse) = self.statistics_inputs();
            let x = load(cx, &mut nest, 1);
            let inverse = load(cx, &mut nest, inverse);
            let centred = match mean {
                Some(mean) => {
                    let mean = load(cx, &mut nest, mean);
                    nest.b.sub(x, mean)
                }
                None => x,
            };
            let normal = nest.b.mul(centred, inverse);
            let product = nest.b.mul(g, normal);
            let sum = nest.reduce(ReduceOp::Sum, product);
            let output = cx.output(1);
            nest.store_outer(cx, output, sum);
        }
        if cx.has_output(2) {
            let sum = nest.reduce(ReduceOp::Sum, g);
            let output = cx.output(2);
            nest.store_outer(cx, output, sum);
        }
        cx.emit(nest.instruction())
    }
}

/// Reads the attributes of a node.
fn read_attributes(node: &Node) -> Result<LayerNorm, OpError> {
    let number = node.attrs.int("stash_type")?.unwrap_or(1);
    let stash = i32::try_from(number).ok().and_then(DType::from_onnx).filter(|dtype| dtype.is_float());
    let stash = stash.ok_or_else(|| {
        OpError::invalid(format!("stash_type must be a float type, 1 (FLOAT) or 16 (BFLOAT16), got {number}"))
    })?;
    Ok(LayerNorm {
        kind: Kind::from_node(node),
        axis: read_axis(node)?,
        epsilon: f64::from(node.attrs.float("epsilon")?.unwrap_or(1e-5)),
        stash_dtype: stash,
    })
}

fn read_axis(node: &Node) -> Result<i64, OpError> {
    Ok(node.attrs.int("axis")?.unwrap_or(-1))
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(read_attributes(node)?))
}

fn build_grad(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(LayerNormGrad { axis: read_axis(node)?, has_mean: &*node.op == LAYER_GRAD }))
}

fn build_invertible_grad(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(InvertibleLayerNormGrad(LayerNormGrad { axis: read_axis(node)?, has_mean: true })))
}

/// Decomposes the operator for opsets before 17 (`RMSNormalization`: before 23).
fn downgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let since = if Kind::from_node(rw.node()) == Kind::Rms { 23 } else { 17 };
    if rw.version() < since { decompose(rw) } else { Ok(()) }
}

/// Returns the element type of a value.
fn dtype_of(rw: &Rewrite<'_>, value: ValueId) -> Result<DType, OpError> {
    rw.dtype(value).ok_or_else(|| OpError::invalid("the type of an input is not known"))
}

/// Converts a value to the type of the arithmetic.
fn cast_to(rw: &mut Rewrite<'_>, value: ValueId, to: DType) -> Result<ValueId, OpError> {
    let from = dtype_of(rw, value)?;
    Ok(cast(rw.patch().1, value, from, to))
}

/// Decomposes the normalizations into operators that every opset has.
fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = read_attributes(rw.node())?;
    let (x, scale) = (rw.required_input(0)?, rw.required_input(1)?);
    let narrow = dtype_of(rw, x)?;
    let dtype = arithmetic_dtype(narrow);
    let axes = normalized_axes(op.axis, rw.shape(x).map(Shape::rank))?;
    let data = cast_to(rw, x, dtype)?;
    let (mean, centred, inverse) = op.emit_statistics(rw.patch().1, data, &axes, dtype);
    if rw.has_output(0) {
        let scale = cast_to(rw, scale, dtype)?;
        let normal = rw.add("Mul", &[centred, inverse], Attrs::new());
        let mut y = rw.add("Mul", &[normal, scale], Attrs::new());
        if let Some(bias) = rw.input(2) {
            let bias = cast_to(rw, bias, dtype)?;
            y = rw.add("Add", &[y, bias], Attrs::new());
        }
        let y = cast(rw.patch().1, y, dtype, narrow);
        rw.replace_output(0, y);
    }
    for (k, value) in [(op.kind.mean_output(), mean), (op.kind.inverse_std_dev_output(), Some(inverse))] {
        if let (Some(k), Some(value)) = (k, value)
            && rw.has_output(k)
        {
            let value = cast(rw.patch().1, value, dtype, op.stash_dtype);
            rw.replace_output(k, value);
        }
    }
    Ok(())
}

/// Decomposes the gradient operators into operators of `ai.onnx`.
fn decompose_grad(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let [g, x, scale] = [rw.required_input(0)?, rw.required_input(1)?, rw.required_input(2)?];
    let invertible = &*rw.node().op == INVERTIBLE_GRAD;
    let centred = invertible || &*rw.node().op == LAYER_GRAD;
    let third = if centred { Some(rw.required_input(3)?) } else { None };
    let inverse = rw.required_input(if centred { 4 } else { 3 })?;
    let (narrow, scale_dtype) = (dtype_of(rw, x)?, dtype_of(rw, scale)?);
    let dtype = arithmetic_dtype(narrow);
    let rank = rw.shape(x).or(rw.shape(g)).map(Shape::rank);
    let axes = normalized_axes(read_axis(rw.node())?, rank)?;
    let none = Attrs::new;
    let [wide_g, data, wide_scale, inverse] = [
        cast_to(rw, g, dtype)?,
        cast_to(rw, x, dtype)?,
        cast_to(rw, scale, dtype)?,
        cast_to(rw, inverse, dtype)?,
    ];
    // Input 3 is the mean of `X`, or the bias that the result contains.
    let shifted = match third {
        Some(third) => {
            let third = cast_to(rw, third, dtype)?;
            rw.add("Sub", &[data, third], none())
        }
        None => data,
    };
    let normal = match invertible {
        true => rw.add("Div", &[shifted, wide_scale], none()),
        false => rw.add("Mul", &[shifted, inverse], none()),
    };
    if rw.has_output(0) {
        let axes = rw.ints("axes", &axes);
        let scaled = rw.add("Mul", &[wide_g, wide_scale], none());
        let product = rw.add("Mul", &[scaled, normal], none());
        let slope = rw.add("ReduceMean", &[product, axes], none());
        let mut rest =
            formula(rw, [scaled, normal, slope], |[scaled, normal, slope]| scaled - normal * slope);
        if centred {
            let share = rw.add("ReduceMean", &[scaled, axes], none());
            rest = rw.add("Sub", &[rest, share], none());
        }
        let gradient = rw.add("Mul", &[rest, inverse], none());
        let gradient = cast(rw.patch().1, gradient, dtype, narrow);
        rw.replace_output(0, gradient);
    }
    for k in 1..3 {
        if !rw.has_output(k) {
            continue;
        }
        let value = if k == 1 { rw.add("Mul", &[wide_g, normal], none()) } else { wide_g };
        let sum = sum_to_scale(rw, value, x, scale)?;
        let sum = cast(rw.patch().1, sum, dtype, scale_dtype);
        rw.replace_output(k, sum);
    }
    Ok(())
}

/// Sums a value of the shape of `x` over the axes along which the scale was broadcast to `x`.
fn sum_to_scale(
    rw: &mut Rewrite<'_>,
    value: ValueId,
    x: ValueId,
    scale: ValueId,
) -> Result<ValueId, OpError> {
    let (large, small) = (rw.shape(x).cloned(), rw.shape(scale).cloned());
    let (large, small) = (large.ok_or_else(unknown_rank_error)?, small.ok_or_else(unknown_rank_error)?);
    let lead = large.rank().saturating_sub(small.rank());
    let mut stretched = Vec::new();
    for (axis, (a, b)) in small.iter().zip(&large[lead..]).enumerate() {
        if a.is_one() && !b.is_one() {
            stretched.push((axis + lead) as i64);
        } else if a.known().is_none() && a != b {
            return Err(OpError::unsupported(format!(
                "shapes {small} and {large} do not determine whether the scale is broadcast; declare the sizes in the \
                 model"
            )));
        }
    }
    let mut sum = value;
    if !stretched.is_empty() {
        let axes = rw.ints("stretched", &stretched);
        sum = rw.add("ReduceSum", &[sum, axes], Attrs::new().with("keepdims", 1i64));
    }
    if lead > 0 {
        let axes = rw.ints("leading", &(0..lead as i64).collect::<Vec<_>>());
        sum = rw.add("ReduceSum", &[sum, axes], Attrs::new().with("keepdims", 0i64));
    }
    Ok(sum)
}

pub(crate) fn definitions() -> Vec<Definition> {
    let gradients = [LAYER_GRAD, SIMPLIFIED_GRAD]
        .map(|name| Definition::new(MICROSOFT, name, &[1], build_grad).differentiated_as(decompose_grad));
    let forward = [
        // ONNX Runtime has LayerNormalization in the domain of ONNX from version 1 on.
        Definition::new("", LAYER, &[1, 17], build)
            .class(Class::Normalization { scale: 1, bias: Some(2), of_instances: false })
            .decompose(decompose)
            .downgrade(downgrade)
            .weights(&[1, 2]),
        Definition::new("", RMS, &[23], build)
            .class(Class::Normalization { scale: 1, bias: None, of_instances: false })
            .decompose(decompose)
            .downgrade(downgrade)
            .weights(&[1]),
        Definition::new("", SIMPLIFIED, &[1], build).decompose(decompose).extension().weights(&[1]),
    ];
    let invertible =
        Definition::new(MICROSOFT, INVERTIBLE_GRAD, &[1], build_invertible_grad).composition(decompose_grad);
    forward.into_iter().chain(gradients).chain([invertible]).collect()
}

#[cfg(test)]
mod tests;
