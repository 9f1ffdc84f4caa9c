//! Convolutions of quantized tensors: `ConvInteger` and `QLinearConv`.
//!
//! `ConvInteger` convolves bytes without their zero points, and returns the sums as int32. The padding is the zero
//! point. It is an instruction, except for groups of few channels. `QLinearConv` adds an int32 bias, scales the sums, and rounds them to a new grid.
//!
//! The gradient of the integer convolution is the gradient of the convolution of the same numbers as floats.
//!
//! Sources: ConvInteger-10 and QLinearConv-10 of ONNX.

use ortrain_expr::ConvPass;
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, ValueId};
use ortrain_program::IntegerShape;

use crate::OpError;
use crate::broadcast::ShapedNodeSink;
use crate::class::Traits;
use crate::grad::Grad;
use crate::infer::Infer;
use crate::lower::Lower;
use crate::op::{Axis, Definition, Op, QuantizedInput, Scale};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::casts::cast;
use crate::support::convolution::{Conv, check_bias};
use crate::support::onnx_decomposition::NodeSink;
use crate::support::quantization_grid::{
    SCALE_SAMPLE, SampleInput, Typed, ZERO_POINT_SAMPLE, check_scale, check_single, check_zero_point_type,
    emit, exact_sum_dtype, is_byte, quantize_positions, typed_input, without_zero_point,
};
use crate::support::sizes::shape_of;

/// Minimum number of channels of a group that run as an instruction for bytes.
const MIN_CHANNELS: usize = 4;

/// Checks scale or zero point of a filter: one number, or one for each channel of the result.
fn check_per_channel(cx: &Infer<'_>, k: usize, filter: usize, name: &str) -> Result<(), OpError> {
    let Some(shape) = cx.shape(k) else { return Ok(()) };
    let channels = cx.shape(filter).and_then(|shape| shape.first().and_then(Dim::known));
    let fits = match &shape[..] {
        [] => true,
        [size] => {
            size.known().is_none_or(|size| size == 1 || channels.is_none_or(|channels| size == channels))
        }
        _ => false,
    };
    if fits {
        return Ok(());
    }
    Err(OpError::invalid(format!(
        "{name}, input {k}, has shape {shape}; one number, or one for each channel of the result is needed"
    )))
}

/// Returns numbers for the channels of a filter of this rank, with axes of size 1 for the others; one number stays.
fn per_channel(to: &mut impl ShapedNodeSink, value: ValueId, axes: usize) -> ValueId {
    let is_vector = to.known_shape(value).is_some_and(|shape| shape.rank() == 1 && !shape[0].is_one());
    if !is_vector {
        return value;
    }
    let axes: Vec<i64> = (1..=axes as i64).collect();
    let axes = to.emit_ints("axes", &axes);
    emit(to, "Unsqueeze", &[value, axes])
}

/// Returns image and filter without their zero points, as floats.
fn float_factors(
    to: &mut impl ShapedNodeSink,
    [x, w]: [Typed; 2],
    [x_zero_point, w_zero_point]: [Option<ValueId>; 2],
    (rank, dtype): (usize, DType),
) -> [ValueId; 2] {
    let w_zero_point = w_zero_point.map(|id| per_channel(to, id, rank - 1));
    [without_zero_point(to, x, x_zero_point, dtype), without_zero_point(to, w, w_zero_point, dtype)]
}

/// `ConvInteger`.
struct ConvInteger(Conv);

impl Op for ConvInteger {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 4, 1)?;
        for (k, zero_point) in [(0, 2), (1, 3)] {
            let dtype = cx.expect_dtype(k, "int8 or uint8", is_byte)?;
            check_zero_point_type(cx, zero_point, dtype)?;
        }
        check_single(cx, 2, "the zero point of the image")?;
        check_per_channel(cx, 3, 1, "the zero point of the filter")?;
        let shape = self.0.result_shape(cx, 0, 1)?;
        cx.set_output(0, DType::I32, shape);
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let (x, w) = (cx.input(0)?, cx.input(1)?);
        let attrs = self.0.explicit_padding_attrs(&cx.node().attrs, cx.shape(x), cx.shape(w))?;
        let factors = [(x, cx.dtype(x)?), (w, cx.dtype(w)?)];
        let rank = shape_of(cx, w, "the filter")?.rank();
        let zero_points = [cx.optional_input(2), cx.optional_input(3)];
        let [x, w] = float_factors(cx, factors, zero_points, (rank, DType::F32));
        let required = [cx.needs_grad(0), cx.needs_grad(1), false];
        let inputs = [g, x, w].map(Some);
        let gradients =
            cx.add_node_with_optional_outputs("com.microsoft", "ConvGrad", &inputs, &required, attrs);
        for (k, gradient) in gradients.into_iter().enumerate() {
            if let Some(gradient) = gradient {
                cx.set_grad(k, gradient);
            }
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let (image, filter) = (cx.dims(0), cx.dims(1));
        // Panels of few channels are mostly empty: sums of few terms are exact as floats, too.
        if filter[1] < MIN_CHANNELS && self.0.groups > 1 {
            return cx.lower_decomposition();
        }
        let shape = self.0.shape(ConvPass::Output, &image, &filter)?;
        let [a, b] = [(0, &image), (1, &filter)].map(|(k, dims)| {
            let buffer = cx.input(k);
            cx.operand(buffer, dims)
        });
        let zero_points = [2, 3].map(|k| {
            let buffer = cx.has_input(k).then(|| cx.input(k))?;
            Some(cx.flat_operand(buffer))
        });
        let result = cx.output(0);
        let mut nest = cx.nest(&cx.out_dims(0), 0);
        let sum = nest.accumulator(DType::I32);
        nest.store_contiguous(cx, result, sum);
        cx.emit(nest.integer_product(IntegerShape::Windows(shape), [a, b], zero_points))
    }
}

fn decompose_integer(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (x, w) = (typed_input(rw, 0)?, typed_input(rw, 1)?);
    let filter = shape_of(rw, w.0, "the filter")?;
    let terms: Option<Vec<usize>> = filter[1..].iter().map(Dim::known).collect();
    let dtype = exact_sum_dtype(terms.map(|sizes| sizes.into_iter().fold(1, usize::saturating_mul)));
    let zero_points = [rw.input(2), rw.input(3)];
    let factors = float_factors(rw, [x, w], zero_points, (filter.rank(), dtype));
    let attrs = rw.attrs().clone();
    let sums = rw.add("Conv", &factors, attrs);
    let result = cast(rw, sums, dtype, DType::I32);
    rw.replace_output(0, result);
    Ok(())
}

const X: usize = 0;
const X_SCALE: usize = 1;
const X_ZERO_POINT: usize = 2;
const W: usize = 3;
const W_SCALE: usize = 4;
const W_ZERO_POINT: usize = 5;
const Y_SCALE: usize = 6;
const Y_ZERO_POINT: usize = 7;
const BIAS: usize = 8;

/// `QLinearConv`.
struct QLinearConv(Conv);

impl Op for QLinearConv {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(8, 9, 1)?;
        for (k, zero_point) in [(X, X_ZERO_POINT), (W, W_ZERO_POINT)] {
            let dtype = cx.expect_dtype(k, "int8 or uint8", is_byte)?;
            check_zero_point_type(cx, zero_point, dtype)?;
        }
        for scale in [X_SCALE, W_SCALE, Y_SCALE] {
            cx.expect_dtype(scale, "a float type", DType::is_float)?;
            check_scale(cx, scale)?;
        }
        let single = [
            (X_SCALE, "the scale of the image"),
            (X_ZERO_POINT, "the zero point of the image"),
            (Y_SCALE, "the scale of the result"),
            (Y_ZERO_POINT, "the zero point of the result"),
        ];
        for (k, name) in single {
            check_single(cx, k, name)?;
        }
        check_per_channel(cx, W_SCALE, W, "the scale of the filter")?;
        check_per_channel(cx, W_ZERO_POINT, W, "the zero point of the filter")?;
        let shape = self.0.result_shape(cx, X, W)?;
        if cx.has_input(BIAS) {
            cx.expect_dtype(BIAS, "int32", |dtype| dtype == DType::I32)?;
            if let Some(shape) = &shape {
                check_bias(cx, BIAS, &shape[1])?;
            }
        }
        let dtype = cx.expect_dtype(Y_ZERO_POINT, "int8 or uint8", is_byte)?;
        cx.set_output(0, dtype, shape);
        Ok(())
    }
}

fn decompose_linear(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let of = |k: usize| rw.required_input(k);
    let (x, w, x_scale, w_scale, y_scale) = (of(X)?, of(W)?, of(X_SCALE)?, of(W_SCALE)?, of(Y_SCALE)?);
    let zero_points = [rw.input(X_ZERO_POINT), rw.input(W_ZERO_POINT)];
    let (dtype, y_zero_point, bias) =
        (typed_input(rw, X_SCALE)?.1, typed_input(rw, Y_ZERO_POINT)?, rw.input(BIAS));
    let axes = rank_of(rw, w)? - 2;
    let attrs = rw.attrs().clone();
    let mut sums = rw.emit("ConvInteger", &[Some(x), Some(w), zero_points[0], zero_points[1]], attrs);
    if let Some(bias) = bias {
        let bias = per_channel(rw, bias, axes);
        sums = emit(rw, "Add", &[sums, bias]);
    }
    let w_scale = per_channel(rw, w_scale, axes);
    let scale = emit(rw, "Mul", &[x_scale, w_scale]);
    let scale = emit(rw, "Div", &[scale, y_scale]);
    let sums = cast(rw, sums, DType::I32, dtype);
    let positions = emit(rw, "Mul", &[sums, scale]);
    let result = quantize_positions(rw, (positions, dtype), Some(y_zero_point.0), y_zero_point.1);
    rw.replace_output(0, result);
    Ok(())
}

fn rank_of(rw: &Rewrite<'_>, filter: ValueId) -> Result<usize, OpError> {
    shape_of(rw, filter, "the filter").map(|shape: Shape| shape.rank())
}

fn build_integer(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(ConvInteger(Conv::read(node)?)))
}

fn build_linear(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(QLinearConv(Conv::read(node)?)))
}

/// Filter of an integer convolution; the nodes behind multiply by its scale.
const INTEGER_FILTER: &[QuantizedInput] =
    &[QuantizedInput { tensor: 1, scale: Scale::Following, zero_point: Some(3), axis: Axis::First }];
const LINEAR_FILTER: &[QuantizedInput] = &[
    QuantizedInput::new(W, W_SCALE, Some(W_ZERO_POINT), Axis::First),
    QuantizedInput {
        tensor: BIAS,
        scale: Scale::Product([X_SCALE, W_SCALE]),
        zero_point: None,
        axis: Axis::First,
    },
];

const IMAGE: &[usize] = &[1, 1, 1];

fn sample_of_integers(_: &Definition) -> Sample {
    Sample::with_inputs(Attrs::new(), &[(DType::U8, IMAGE), (DType::U8, IMAGE)])
}

fn sample_of_linear(_: &Definition) -> Sample {
    const OF_TENSOR: [SampleInput; 3] = [(DType::U8, IMAGE), SCALE_SAMPLE, ZERO_POINT_SAMPLE];
    let inputs = [&OF_TENSOR[..], &OF_TENSOR, &OF_TENSOR[1..]].concat();
    Sample::with_inputs(Attrs::new(), &inputs)
}

pub(super) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "ConvInteger", &[10], build_integer)
            .decompose(decompose_integer)
            .traits(Traits::PASSES_QUANTIZED)
            .sample(sample_of_integers)
            .quantized(INTEGER_FILTER),
        Definition::new("", "QLinearConv", &[10], build_linear)
            .composition(decompose_linear)
            .scales(&[X_SCALE, W_SCALE, Y_SCALE])
            .quantized(LINEAR_FILTER)
            .sample(sample_of_linear),
    ]
}
