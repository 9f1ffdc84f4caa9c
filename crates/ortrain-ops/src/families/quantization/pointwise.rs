//! Operators of `com.microsoft` on quantized tensors, version 1: `QLinearAdd`, `QLinearMul`, `QLinearSigmoid`,
//! `QLinearLeakyRelu`, `QLinearSoftmax` and `QLinearConcat`.
//!
//! Each one dequantizes its inputs, applies a float operator, and quantizes the result. Every scale and zero point
//! belongs to a whole tensor. The gradients are the gradients of the three parts.

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, ValueId};

use crate::OpError;
use crate::infer::{Infer, broadcast, normalize_axis};
use crate::op::{Axis, Definition, Op, QuantizedInput};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::casts::cast;
use crate::support::quantization_grid::{
    SCALE_SAMPLE, SampleInput, ZERO_POINT_SAMPLE, check_grid_of_tensor, dequantize, emit, is_byte, number,
    quantize, typed_input,
};

const MICROSOFT: &str = "com.microsoft";
/// Coefficient of `QLinearLeakyRelu` without the attribute `alpha`.
const DEFAULT_ALPHA: f32 = 0.01;
/// First version of Softmax that normalizes along one axis.
const ONE_AXIS_SOFTMAX: i64 = 13;

/// Returns input `k` dequantized by the scale and the zero point behind it.
fn dequantized_input(rw: &mut Rewrite<'_>, k: usize) -> Result<ValueId, OpError> {
    let (x, scale, zero_point) = (rw.required_input(k)?, rw.required_input(k + 1)?, rw.input(k + 2));
    Ok(dequantize(rw, x, scale, zero_point))
}

/// Replaces the output by a value quantized to scale `k` and the zero point behind it.
fn quantize_output(rw: &mut Rewrite<'_>, value: ValueId, k: usize, dtype: DType) -> Result<(), OpError> {
    let (scale, zero_point) = (rw.required_input(k)?, rw.input(k + 1));
    let result = quantize(rw, value, scale, zero_point, dtype);
    rw.replace_output(0, result);
    Ok(())
}

/// `QLinearAdd` and `QLinearMul`.
struct Binary;

impl Op for Binary {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(7, 8, 1)?;
        cx.expect_dtype(0, "int8 or uint8", is_byte)?;
        let dtype = cx.expect_same_dtype([0, 3])?;
        for scale in [1, 4, 6] {
            check_grid_of_tensor(cx, scale, dtype)?;
        }
        let shape = match (cx.shape(0), cx.shape(3)) {
            (Some(a), Some(b)) => Some(broadcast(a, b)?),
            _ => None,
        };
        cx.set_output(0, dtype, shape);
        Ok(())
    }
}

fn decompose_mul(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let dtype = typed_input(rw, 0)?.1;
    let (a, b) = (dequantized_input(rw, 0)?, dequantized_input(rw, 3)?);
    let result = rw.add("Mul", &[a, b], Attrs::new());
    quantize_output(rw, result, 6, dtype)
}

/// Decomposes a sum in the order of ONNX Runtime. Many sums lie in the middle of two integers, and the order of the
/// additions decides which of the two they become: `a * ra + (b * rb + (zero - (ra * zero_a + rb * zero_b)))` with the
/// ratios `ra` and `rb` of the scales of the inputs to the scale of the result.
fn decompose_add(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let dtype = typed_input(rw, 0)?.1;
    let (scale, wide) = typed_input(rw, 6)?;
    let zero_point_of = |rw: &mut Rewrite<'_>, k: usize| match rw.input(k) {
        Some(id) => cast(rw, id, dtype, wide),
        None => number(rw, wide, 0.0),
    };
    let scaled = |rw: &mut Rewrite<'_>, k: usize| -> Result<[ValueId; 2], OpError> {
        let (x, own) = (rw.required_input(k)?, rw.required_input(k + 1)?);
        let ratio = emit(rw, "Div", &[own, scale]);
        let zero_point = zero_point_of(rw, k + 2);
        Ok([dequantize(rw, x, ratio, None), emit(rw, "Mul", &[ratio, zero_point])])
    };
    let ([a, zero_a], [b, zero_b]) = (scaled(rw, 0)?, scaled(rw, 3)?);
    let zero_points = emit(rw, "Add", &[zero_a, zero_b]);
    let zero_point = zero_point_of(rw, 7);
    let constant = emit(rw, "Sub", &[zero_point, zero_points]);
    let right = emit(rw, "Add", &[b, constant]);
    let sum = emit(rw, "Add", &[a, right]);
    let one = number(rw, wide, 1.0);
    let result = quantize(rw, sum, one, None, dtype);
    rw.replace_output(0, result);
    Ok(())
}

/// Operators on one tensor that keep its shape.
struct Unary;

impl Op for Unary {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(4, 5, 1)?;
        let dtype = cx.expect_dtype(0, "int8 or uint8", is_byte)?;
        for scale in [1, 3] {
            check_grid_of_tensor(cx, scale, dtype)?;
        }
        cx.set_output(0, dtype, cx.shape(0).cloned());
        Ok(())
    }
}

fn decompose_unary(
    rw: &mut Rewrite<'_>,
    compute: impl FnOnce(&mut Rewrite<'_>, ValueId) -> Result<ValueId, OpError>,
) -> Result<(), OpError> {
    let dtype = typed_input(rw, 0)?.1;
    let x = dequantized_input(rw, 0)?;
    let result = compute(rw, x)?;
    quantize_output(rw, result, 3, dtype)
}

fn decompose_sigmoid(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    decompose_unary(rw, |rw, x| Ok(rw.add("Sigmoid", &[x], Attrs::new())))
}

fn decompose_leaky_relu(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let alpha = rw.attrs().float("alpha")?.unwrap_or(DEFAULT_ALPHA);
    decompose_unary(rw, |rw, x| Ok(rw.add("LeakyRelu", &[x], Attrs::new().with("alpha", alpha))))
}

/// `QLinearSoftmax`. The attribute `opset` is the version of Softmax; before 13 the axes from `axis` on are normalized
/// together.
struct Softmax {
    axis: i64,
    is_one_axis: bool,
}

impl Softmax {
    fn read(node: &Node) -> Result<Softmax, OpError> {
        let opset = Attrs::required("opset", node.attrs.int("opset")?)?;
        let is_one_axis = opset >= ONE_AXIS_SOFTMAX;
        let axis = node.attrs.int("axis")?.unwrap_or(if is_one_axis { -1 } else { 1 });
        Ok(Softmax { axis, is_one_axis })
    }
}

impl Op for Softmax {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        if let Some(shape) = cx.shape(0) {
            normalize_axis(self.axis, shape.rank())?;
        }
        Unary.infer(cx)
    }
}

fn decompose_softmax(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let Softmax { axis, is_one_axis } = Softmax::read(rw.node())?;
    decompose_unary(rw, |rw, x| {
        if is_one_axis {
            return Ok(rw.add("Softmax", &[x], Attrs::new().with("axis", axis)));
        }
        let shape = rw.add("Shape", &[x], Attrs::new());
        let flat = rw.add("Flatten", &[x], Attrs::new().with("axis", axis));
        let result = rw.add("Softmax", &[flat], Attrs::new().with("axis", 1i64));
        Ok(rw.add("Reshape", &[result, shape], Attrs::new()))
    })
}

/// `QLinearConcat`. Inputs: scale and zero point of the result, then tensor, scale and zero point of each part.
struct Concat {
    axis: i64,
}

/// Position of the first part of a concatenation.
const FIRST_PART: usize = 2;

impl Op for Concat {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let inputs = cx.node().inputs.len();
        if inputs <= FIRST_PART || !(inputs - FIRST_PART).is_multiple_of(3) {
            return Err(OpError::invalid(format!(
                "it has {inputs} inputs; scale and zero point of the result are needed, then tensor, scale and zero \
                 point of each part"
            )));
        }
        cx.check_arity(inputs, inputs, 1)?;
        let dtype = cx.expect_dtype(1, "int8 or uint8", is_byte)?;
        check_grid_of_tensor(cx, 0, dtype)?;
        let mut result: Option<Vec<Dim>> = None;
        let mut is_known = true;
        for part in (FIRST_PART..inputs).step_by(3) {
            let own = cx.expect_dtype(part, "int8 or uint8", is_byte)?;
            check_grid_of_tensor(cx, part + 1, own)?;
            let Some(shape) = cx.shape(part) else {
                is_known = false;
                continue;
            };
            let axis = normalize_axis(self.axis, shape.rank())?;
            match &mut result {
                None => result = Some(shape.to_vec()),
                Some(total) => join(cx, total, shape, axis, part)?,
            }
        }
        let shape = result.filter(|_| is_known).map(|dims| dims.into_iter().collect::<Shape>());
        cx.set_output(0, dtype, shape);
        Ok(())
    }
}

/// Adds a part of shape `shape` to the sizes of a concatenation.
fn join(cx: &Infer<'_>, total: &mut [Dim], shape: &Shape, axis: usize, part: usize) -> Result<(), OpError> {
    let differs = |at: usize| total[at].known().zip(shape[at].known()).is_some_and(|(a, b)| a != b);
    if shape.rank() != total.len() || (0..total.len()).any(|at| at != axis && differs(at)) {
        return Err(OpError::invalid(format!(
            "input {part} has shape {shape}, which does not fit the other parts along the axes beside axis {axis}"
        )));
    }
    total[axis] = match total[axis].known().zip(shape[axis].known()) {
        Some((a, b)) => Dim::Known(a.saturating_add(b)),
        None => cx.unknown_dim(0, axis),
    };
    Ok(())
}

fn decompose_concat(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let axis = Attrs::required("axis", rw.attrs().int("axis")?)?;
    let (scale, zero_point) = (rw.required_input(0)?, typed_input(rw, 1)?);
    let mut parts = Vec::new();
    for part in (FIRST_PART..rw.node().inputs.len()).step_by(3) {
        let value = dequantized_input(rw, part)?;
        parts.push(quantize(rw, value, scale, Some(zero_point.0), zero_point.1));
    }
    let result = rw.add("Concat", &parts, Attrs::new().with("axis", axis));
    rw.replace_output(0, result);
    Ok(())
}

fn build_softmax(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Softmax::read(node)?))
}

fn build_concat(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Concat { axis: Attrs::required("axis", node.attrs.int("axis")?)? }))
}

const TENSOR: SampleInput = (DType::U8, &[2, 2]);

fn sample_binary(_: &Definition) -> Sample {
    let inputs = [
        TENSOR,
        SCALE_SAMPLE,
        ZERO_POINT_SAMPLE,
        TENSOR,
        SCALE_SAMPLE,
        ZERO_POINT_SAMPLE,
        SCALE_SAMPLE,
        ZERO_POINT_SAMPLE,
    ];
    Sample::with_inputs(Attrs::new(), &inputs)
}

fn sample_unary(_: &Definition) -> Sample {
    let attrs = Attrs::new().with("opset", ONE_AXIS_SOFTMAX);
    Sample::with_inputs(attrs, &[TENSOR, SCALE_SAMPLE, ZERO_POINT_SAMPLE, SCALE_SAMPLE, ZERO_POINT_SAMPLE])
}

fn sample_concat(_: &Definition) -> Sample {
    let inputs = [SCALE_SAMPLE, ZERO_POINT_SAMPLE, TENSOR, SCALE_SAMPLE, ZERO_POINT_SAMPLE];
    Sample::with_inputs(Attrs::new().with("axis", 0i64), &inputs)
}

const OF_BINARY: &[usize] = &[1, 4, 6];
/// Either addend or factor may be a weight.
const WEIGHTS_OF_BINARY: &[QuantizedInput] =
    &[QuantizedInput::new(0, 1, Some(2), Axis::First), QuantizedInput::new(3, 4, Some(5), Axis::First)];

pub(super) fn definitions() -> Vec<Definition> {
    let new = |name: &'static str, build| Definition::new(MICROSOFT, name, &[1], build);
    vec![
        new("QLinearAdd", |_, _| Ok(Box::new(Binary)))
            .composition(decompose_add)
            .quantized(WEIGHTS_OF_BINARY)
            .scales(OF_BINARY)
            .sample(sample_binary),
        new("QLinearMul", |_, _| Ok(Box::new(Binary)))
            .composition(decompose_mul)
            .quantized(WEIGHTS_OF_BINARY)
            .scales(OF_BINARY)
            .sample(sample_binary),
        new("QLinearSigmoid", |_, _| Ok(Box::new(Unary)))
            .composition(decompose_sigmoid)
            .scales(&[1, 3])
            .sample(sample_unary),
        new("QLinearLeakyRelu", |_, _| Ok(Box::new(Unary)))
            .composition(decompose_leaky_relu)
            .scales(&[1, 3])
            .sample(sample_unary),
        new("QLinearSoftmax", build_softmax)
            .composition(decompose_softmax)
            .scales(&[1, 3])
            .sample(sample_unary),
        new("QLinearConcat", build_concat)
            .composition(decompose_concat)
            .scales(&[0, 3, 6, 9, 12, 15, 18, 21, 24, 27, 30])
            .sample(sample_concat),
    ]
}
