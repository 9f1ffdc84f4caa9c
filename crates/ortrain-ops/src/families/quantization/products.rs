//! Products of quantized matrices: `MatMulInteger`, `QLinearMatMul`, and `QGemm`, `MatMulIntegerToFloat` and
//! `DynamicQuantizeMatMul` of `com.microsoft`.
//!
//! `MatMulInteger` multiplies bytes without their zero points, and returns the sums as int32: an instruction, except for
//! zero points that vary along the sums. The others are compositions: they scale these sums, and round them to a new
//! grid or add a bias.
//!
//! The gradient of the integer product is the gradient of the product of the same numbers as floats.
//!
//! Sources: MatMulInteger-10 and QLinearMatMul-10, 21 of ONNX; the operators of `com.microsoft`, version 1.
//!
//! Limits: scale and zero point of a result hold one number; the gradient needs matrices.

use ortrain_expr::{Access, Dims};
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, ValueId};
use ortrain_program::{IntegerShape, Operand};

use crate::OpError;
use crate::broadcast::ShapedNodeSink;
use crate::class::{Class, Traits};
use crate::grad::Grad;
use crate::infer::{Infer, broadcast};
use crate::lower::Lower;
use crate::op::{Axis, Definition, Op, QuantizedInput, Scale};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::casts::{arithmetic_dtype, cast};
use crate::support::onnx_decomposition::NodeSink;
use crate::support::quantization_grid::{
    Typed, check_scale, check_single, check_zero_point_type, emit, exact_sum_dtype, is_byte, number,
    optional_typed_input, quantize_positions, typed_input, without_zero_point,
};

const MICROSOFT: &str = "com.microsoft";

/// Returns the shape of a product of matrices, or of batches of them.
fn product_shape(a: &Shape, b: &Shape) -> Result<Shape, OpError> {
    if a.rank() == 0 || b.rank() == 0 {
        return Err(OpError::invalid(format!("shapes {a} and {b}: a scalar has no matrix product")));
    }
    let columns = |shape: &Shape| shape[shape.rank() - 1].clone();
    let rows_of_b = if b.rank() == 1 { columns(b) } else { b[b.rank() - 2].clone() };
    if let (Some(k), Some(l)) = (columns(a).known(), rows_of_b.known())
        && k != l
    {
        return Err(OpError::invalid(format!(
            "shapes {a} and {b} do not fit: the left matrix has {k} columns, the right matrix has {l} rows"
        )));
    }
    let batch = |shape: &Shape| shape.iter().take(shape.rank().saturating_sub(2)).cloned().collect::<Shape>();
    let mut result = broadcast(&batch(a), &batch(b))?;
    if a.rank() > 1 {
        result.0.push(a[a.rank() - 2].clone());
    }
    if b.rank() > 1 {
        result.0.push(columns(b));
    }
    Ok(result)
}

/// Lines of a factor: its rows or columns.
struct Lines {
    /// Number of lines, if known.
    count: Option<usize>,
    /// Number of axes of the factor.
    rank: usize,
}

impl Lines {
    /// Returns the rows (`back` is 2) or the columns (`back` is 1) of a matrix.
    fn new(matrix: Option<&Shape>, back: usize) -> Option<Lines> {
        let matrix = matrix?;
        let axis = matrix.rank().checked_sub(back);
        Some(Lines { count: axis.and_then(|axis| matrix[axis].known()), rank: matrix.rank() })
    }
}

/// Checks scale or zero point of a factor: one number, or one for each line.
fn check_per_line(cx: &Infer<'_>, k: usize, lines: Option<&Lines>, name: &str) -> Result<(), OpError> {
    let (Some(shape), Some(lines)) = (cx.shape(k), lines) else { return Ok(()) };
    let (Some(dims), Some(count)) = (shape.concrete(), lines.count) else { return Ok(()) };
    let numbers: usize = dims.iter().copied().fold(1, usize::saturating_mul);
    let fits = numbers == 1 || numbers > 0 && numbers.is_multiple_of(count.max(1));
    if dims.len() <= lines.rank.max(1) && fits {
        return Ok(());
    }
    Err(OpError::invalid(format!(
        "{name}, input {k}, has shape {shape}; one number, or one for each of {count} lines of the matrix is needed"
    )))
}

/// Positions of the inputs of a product.
struct Inputs {
    a: usize,
    b: usize,
    a_scale: Option<usize>,
    b_scale: Option<usize>,
    a_zero_point: usize,
    b_zero_point: usize,
}

const OF_INTEGERS: Inputs =
    Inputs { a: 0, b: 1, a_scale: None, b_scale: None, a_zero_point: 2, b_zero_point: 3 };
const OF_LINEAR: Inputs =
    Inputs { a: 0, b: 3, a_scale: Some(1), b_scale: Some(4), a_zero_point: 2, b_zero_point: 5 };
const TO_FLOAT: Inputs =
    Inputs { a: 0, b: 1, a_scale: Some(2), b_scale: Some(3), a_zero_point: 4, b_zero_point: 5 };

impl Inputs {
    /// Checks the types of both factors, their scales and zero points, and returns the shape of the product. The
    /// shapes of the factors are given, because an attribute may transpose them.
    fn check(&self, cx: &Infer<'_>, a: Option<&Shape>, b: Option<&Shape>) -> Result<Option<Shape>, OpError> {
        let lines = [Lines::new(a, 2), Lines::new(b, 1)];
        let parts = [
            (self.a, self.a_scale, self.a_zero_point, &lines[0], "a"),
            (self.b, self.b_scale, self.b_zero_point, &lines[1], "b"),
        ];
        for (k, scale, zero_point, lines, name) in parts {
            let dtype = cx.expect_dtype(k, "int8 or uint8", is_byte)?;
            check_zero_point_type(cx, zero_point, dtype)?;
            if cx.has_input(zero_point) {
                check_per_line(cx, zero_point, lines.as_ref(), &format!("the zero point of {name}"))?;
            }
            if let Some(scale) = scale {
                cx.expect_dtype(scale, "a float type", DType::is_float)?;
                check_scale(cx, scale)?;
                check_per_line(cx, scale, lines.as_ref(), &format!("the scale of {name}"))?;
            }
        }
        match (a, b) {
            (Some(a), Some(b)) => product_shape(a, b).map(Some),
            _ => Ok(None),
        }
    }
}

/// Makes a vector of numbers for the rows of `a` a column.
fn per_row(to: &mut impl ShapedNodeSink, value: ValueId) -> ValueId {
    let is_vector = to.known_shape(value).is_some_and(|shape| shape.rank() == 1 && !shape[0].is_one());
    if !is_vector {
        return value;
    }
    let axis = to.emit_ints("axis", &[1]);
    emit(to, "Unsqueeze", &[value, axis])
}

/// Returns both factors without their zero points, as floats.
fn float_factors(
    to: &mut impl ShapedNodeSink,
    [a, b]: [Typed; 2],
    [a_zero_point, b_zero_point]: [Option<ValueId>; 2],
    dtype: DType,
) -> [ValueId; 2] {
    let a_zero_point = a_zero_point.map(|id| per_row(to, id));
    [without_zero_point(to, a, a_zero_point, dtype), without_zero_point(to, b, b_zero_point, dtype)]
}

/// Returns true if a tensor of shape `from` can be broadcast to the shape `to`.
fn is_broadcast_to(from: &[usize], to: &[usize]) -> bool {
    from.len() <= to.len()
        && from.iter().rev().zip(to.iter().rev()).all(|(&own, &size)| own == size || own == 1)
}

/// `MatMulInteger`.
struct MatMulInteger;

impl Op for MatMulInteger {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 4, 1)?;
        let shape = OF_INTEGERS.check(cx, cx.shape(0), cx.shape(1))?;
        cx.set_output(0, DType::I32, shape);
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let (a, b) = (cx.input(0)?, cx.input(1)?);
        let (Some(a_shape), Some(b_shape)) = (cx.shape(a).cloned(), cx.shape(b).cloned()) else {
            return Err(OpError::unsupported(
                "the ranks of both matrices must be known to differentiate a product",
            ));
        };
        let is_one_matrix = b_shape.rank() == 2;
        let batch = |shape: &Shape| shape.iter().take(shape.rank() - 2).cloned().collect::<Vec<Dim>>();
        if a_shape.rank() < 2 || b_shape.rank() < 2 || (!is_one_matrix && batch(&a_shape) != batch(&b_shape))
        {
            return Err(OpError::unsupported(format!(
                "factors of shapes {a_shape} and {b_shape} cannot be differentiated: the right factor must be one \
                 matrix, or both must have the same batch axes"
            )));
        }
        let factors = [(a, cx.dtype(a)?), (b, cx.dtype(b)?)];
        let zero_points = [cx.optional_input(2), cx.optional_input(3)];
        let [a, b] = float_factors(cx, factors, zero_points, DType::F32);
        let transposed = |cx: &mut Grad<'_>, x: ValueId, tx: bool, y: ValueId, ty: bool| {
            let attrs = Attrs::new().with("transA", i64::from(tx)).with("transB", i64::from(ty));
            cx.add_in(MICROSOFT, "FusedMatMul", &[x, y], attrs)
        };
        if cx.needs_grad(0) {
            let gradient = transposed(cx, g, false, b, true);
            cx.set_grad(0, gradient);
        }
        if cx.needs_grad(1) {
            let (mut a, mut g) = (a, g);
            if is_one_matrix && a_shape.rank() > 2 {
                let sizes = [a_shape.last(), b_shape.last()].map(|dim| dim.and_then(Dim::known));
                let [Some(inner), Some(columns)] = sizes else {
                    return Err(OpError::unsupported(format!(
                        "the sizes of the last axes must be known to differentiate with respect to the right factor; \
                         the shapes are {a_shape} and {b_shape}"
                    )));
                };
                let (rows_a, rows_g) =
                    (cx.ints("rows", &[-1, inner as i64]), cx.ints("rows", &[-1, columns as i64]));
                a = cx.add("Reshape", &[a, rows_a], Attrs::new());
                g = cx.add("Reshape", &[g, rows_g], Attrs::new());
            }
            let gradient = transposed(cx, a, true, g, false);
            cx.set_grad(1, gradient);
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let ([a_dims, b_dims], out_dims) = ([cx.dims(0), cx.dims(1)], cx.out_dims(0));
        let (a_is_vector, b_is_vector) = (a_dims.len() == 1, b_dims.len() == 1);
        let as_matrix = |dims: &[usize], is_row: bool| match *dims {
            [size] if is_row => vec![1, size],
            [size] => vec![size, 1],
            _ => dims.to_vec(),
        };
        let dims = [as_matrix(&a_dims, true), as_matrix(&b_dims, false)];
        let [m, k] = dims[0][dims[0].len() - 2..] else { unreachable!("a matrix has two axes") };
        let n = dims[1][dims[1].len() - 1];
        let rank = out_dims.len() - usize::from(!a_is_vector) - usize::from(!b_is_vector);
        let batch: Dims = out_dims[..rank].iter().copied().collect();
        let spaces = [[m, k], [k, n]].map(|sizes| batch.iter().copied().chain(sizes).collect::<Dims>());
        let mut zero_points = [None, None];
        for side in [0, 1] {
            if !cx.has_input(2 + side) {
                continue;
            }
            let mut own = cx.dims(2 + side);
            // A vector of numbers for the rows of `a`.
            if side == 0 && own.len() == 1 {
                own.push(1);
            }
            let varies = own.last_chunk::<2>().is_some_and(|matrix| matrix[1 - side] != 1);
            if varies || !is_broadcast_to(&own, &spaces[side]) {
                return cx.lower_decomposition();
            }
            let buffer = cx.input(2 + side);
            let access = Access::broadcast(cx.buffer_dtype(buffer), &own, &spaces[side]);
            zero_points[side] = Some(Operand { buffer, access });
        }
        let [a, b] = [0, 1].map(|side| {
            let buffer = cx.input(side);
            let access = Access::broadcast(cx.buffer_dtype(buffer), &dims[side], &spaces[side]);
            Operand { buffer, access }
        });
        let result = cx.output(0);
        let mut nest = cx.nest(&batch.iter().copied().chain([m, n]).collect::<Vec<_>>(), 0);
        let sum = nest.accumulator(DType::I32);
        nest.store_contiguous(cx, result, sum);
        let shape = IntegerShape::Matrices { batch, m, n, k };
        cx.emit(nest.integer_product(shape, [a, b], zero_points))
    }
}

fn decompose_integers(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (a, b) = (typed_input(rw, 0)?, typed_input(rw, 1)?);
    let terms = rw.shape(a.0).and_then(|shape| shape.last().and_then(Dim::known));
    let dtype = exact_sum_dtype(terms);
    let zero_points = [rw.input(2), rw.input(3)];
    let [a, b] = float_factors(rw, [a, b], zero_points, dtype);
    let product = emit(rw, "MatMul", &[a, b]);
    let result = cast(rw, product, dtype, DType::I32);
    rw.replace_output(0, result);
    Ok(())
}

/// Adds `MatMulInteger`.
fn integer_product(rw: &mut Rewrite<'_>, [a, b]: [ValueId; 2], zero_points: [Option<ValueId>; 2]) -> ValueId {
    rw.emit("MatMulInteger", &[Some(a), Some(b), zero_points[0], zero_points[1]], Attrs::new())
}

/// Adds a product of scales; the scale of `a` may hold a number for each row.
fn scale_of_product(rw: &mut Rewrite<'_>, a_scale: ValueId, b_scale: ValueId) -> ValueId {
    let a_scale = per_row(rw, a_scale);
    emit(rw, "Mul", &[a_scale, b_scale])
}

/// Adds integer sums as floats of type `dtype`, multiplied by a scale.
fn scaled_sums(rw: &mut Rewrite<'_>, sums: ValueId, scale: ValueId, dtype: DType) -> ValueId {
    let sums = cast(rw, sums, DType::I32, dtype);
    emit(rw, "Mul", &[sums, scale])
}

/// `QLinearMatMul`.
struct QLinearMatMul;

impl Op for QLinearMatMul {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(8, 8, 1)?;
        let shape = OF_LINEAR.check(cx, cx.shape(0), cx.shape(3))?;
        cx.expect_dtype(6, "a float type", DType::is_float)?;
        check_scale(cx, 6)?;
        check_single(cx, 6, "the scale of the result")?;
        check_single(cx, 7, "the zero point of the result")?;
        let dtype = cx.expect_dtype(7, "int8 or uint8", is_byte)?;
        cx.set_output(0, dtype, shape);
        Ok(())
    }
}

fn decompose_linear(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (a, b) = (rw.required_input(0)?, rw.required_input(3)?);
    let scales = [typed_input(rw, 1)?, typed_input(rw, 4)?, typed_input(rw, 6)?];
    let zero_points = [rw.input(2), rw.input(5)];
    let y_zero_point = typed_input(rw, 7)?;
    // Sums exceed the range of narrow floats.
    let dtype = arithmetic_dtype(scales[0].1);
    let [a_scale, b_scale, y_scale] = scales.map(|(id, own)| cast(rw, id, own, dtype));
    let sums = integer_product(rw, [a, b], zero_points);
    let scale = scale_of_product(rw, a_scale, b_scale);
    let scale = emit(rw, "Div", &[scale, y_scale]);
    let positions = scaled_sums(rw, sums, scale, dtype);
    let result = quantize_positions(rw, (positions, dtype), Some(y_zero_point.0), y_zero_point.1);
    rw.replace_output(0, result);
    Ok(())
}

/// `MatMulIntegerToFloat`.
struct MatMulIntegerToFloat;

impl Op for MatMulIntegerToFloat {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(4, 7, 1)?;
        let shape = TO_FLOAT.check(cx, cx.shape(0), cx.shape(1))?;
        let dtype = cx.expect_same_dtype([2, 3, 6])?;
        check_bias_of_columns(cx, 6, shape.as_ref())?;
        cx.set_output(0, dtype, shape);
        Ok(())
    }
}

/// Checks that an optional bias fits the columns of a product.
fn check_bias_of_columns(cx: &Infer<'_>, k: usize, product: Option<&Shape>) -> Result<(), OpError> {
    let (Some(bias), Some(product)) = (cx.shape(k), product) else { return Ok(()) };
    let columns = product.last().and_then(Dim::known);
    let fits = bias.rank() == 1 && bias[0].known().zip(columns).is_none_or(|(size, columns)| size == columns);
    if fits {
        return Ok(());
    }
    Err(OpError::invalid(format!("the bias has shape {bias}, but the result has shape {product}")))
}

/// Adds the product of integers as floats, plus an optional bias.
fn float_product(
    rw: &mut Rewrite<'_>,
    factors: [ValueId; 2],
    scales: [Typed; 2],
    zero_points: [Option<ValueId>; 2],
    bias: Option<ValueId>,
) -> ValueId {
    let dtype = scales[0].1;
    let sums = integer_product(rw, factors, zero_points);
    let scale = scale_of_product(rw, scales[0].0, scales[1].0);
    let product = scaled_sums(rw, sums, scale, dtype);
    match bias {
        Some(bias) => emit(rw, "Add", &[product, bias]),
        None => product,
    }
}

fn decompose_to_float(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let factors = [rw.required_input(0)?, rw.required_input(1)?];
    let scales = [typed_input(rw, 2)?, typed_input(rw, 3)?];
    let zero_points = [rw.input(4), rw.input(5)];
    let bias = rw.input(6);
    let result = float_product(rw, factors, scales, zero_points, bias);
    rw.replace_output(0, result);
    Ok(())
}

/// `DynamicQuantizeMatMul`: the left factor is float, and is quantized before the product.
struct DynamicQuantizeMatMul;

impl Op for DynamicQuantizeMatMul {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 5, 1)?;
        cx.expect_dtype(0, "a float type", DType::is_float)?;
        let dtype = cx.expect_same_dtype([0, 2, 4])?;
        let own = cx.expect_dtype(1, "int8 or uint8", is_byte)?;
        check_scale(cx, 2)?;
        let columns = Lines::new(cx.shape(1), 1);
        check_per_line(cx, 2, columns.as_ref(), "the scale of b")?;
        if cx.has_input(3) {
            let of_zero_point = cx.dtype(3)?;
            if of_zero_point != own {
                return Err(OpError::invalid(format!(
                    "the zero point of b, input 3, is of type {of_zero_point}, but b is of type {own}"
                )));
            }
            check_per_line(cx, 3, columns.as_ref(), "the zero point of b")?;
        }
        let shape = match (cx.shape(0), cx.shape(1)) {
            (Some(a), Some(b)) => Some(product_shape(a, b)?),
            _ => None,
        };
        check_bias_of_columns(cx, 4, shape.as_ref())?;
        cx.set_output(0, dtype, shape);
        Ok(())
    }
}

fn decompose_dynamic(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (a, b) = (typed_input(rw, 0)?, rw.required_input(1)?);
    let (b_scale, b_zero_point, bias) = (typed_input(rw, 2)?, rw.input(3), rw.input(4));
    let parts = rw.add_node("", "DynamicQuantizeLinear", &[Some(a.0)], 3, Attrs::new());
    let scales = [(parts[1], a.1), b_scale];
    let result = float_product(rw, [parts[0], b], scales, [Some(parts[2]), b_zero_point], bias);
    rw.replace_output(0, result);
    Ok(())
}

/// `QGemm`: `alpha * A' B' + C`, on a new grid if it has one.
struct QGemm {
    transposed: [bool; 2],
    alpha: f32,
}

impl QGemm {
    fn read(node: &Node) -> Result<QGemm, OpError> {
        let flag = |name: &str| Ok::<bool, OpError>(node.attrs.int(name)?.unwrap_or(0) != 0);
        Ok(QGemm {
            transposed: [flag("transA")?, flag("transB")?],
            alpha: node.attrs.float("alpha")?.unwrap_or(1.0),
        })
    }
}

impl Op for QGemm {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(6, 9, 1)?;
        let oriented = |k: usize, transposed: bool| -> Result<Option<Shape>, OpError> {
            let Some(shape) = cx.shape(k) else { return Ok(None) };
            if shape.rank() != 2 {
                return Err(OpError::invalid(format!("input {k} has shape {shape}; a matrix is needed")));
            }
            let order = if transposed { [1, 0] } else { [0, 1] };
            Ok(Some(order.into_iter().map(|axis| shape[axis].clone()).collect()))
        };
        let (a, b) = (oriented(0, self.transposed[0])?, oriented(3, self.transposed[1])?);
        let shape = OF_LINEAR.check(cx, a.as_ref(), b.as_ref())?;
        if cx.has_input(6) {
            cx.expect_dtype(6, "int32", |dtype| dtype == DType::I32)?;
        }
        if cx.has_input(7) != cx.has_input(8) {
            return Err(OpError::invalid(
                "scale and zero point of the result must both be present, or both missing",
            ));
        }
        let mut dtype = cx.dtype(1)?;
        if cx.has_input(7) {
            cx.expect_dtype(7, "a float type", DType::is_float)?;
            check_scale(cx, 7)?;
            check_single(cx, 7, "the scale of the result")?;
            check_single(cx, 8, "the zero point of the result")?;
            dtype = cx.expect_dtype(8, "int8 or uint8", is_byte)?;
        }
        cx.set_output(0, dtype, shape);
        Ok(())
    }
}

fn decompose_gemm(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = QGemm::read(rw.node())?;
    let mut factors = [rw.required_input(0)?, rw.required_input(3)?];
    let (a_scale, b_scale) = (typed_input(rw, 1)?, rw.required_input(4)?);
    let zero_points = [rw.input(2), rw.input(5)];
    let (bias, y_scale, y_zero_point) = (rw.input(6), rw.input(7), optional_typed_input(rw, 8)?);
    let dtype = a_scale.1;
    for (factor, transposed) in factors.iter_mut().zip(op.transposed) {
        if transposed {
            *factor = rw.add("Transpose", &[*factor], Attrs::new().with("perm", vec![1i64, 0]));
        }
    }
    let mut sums = integer_product(rw, factors, zero_points);
    if let Some(bias) = bias {
        sums = emit(rw, "Add", &[sums, bias]);
    }
    let mut scale = scale_of_product(rw, a_scale.0, b_scale);
    if op.alpha != 1.0 {
        let alpha = number(rw, dtype, f64::from(op.alpha));
        scale = emit(rw, "Mul", &[scale, alpha]);
    }
    let result = match (y_scale, y_zero_point) {
        (Some(y_scale), Some(y_zero_point)) => {
            let scale = emit(rw, "Div", &[scale, y_scale]);
            let positions = scaled_sums(rw, sums, scale, dtype);
            quantize_positions(rw, (positions, dtype), Some(y_zero_point.0), y_zero_point.1)
        }
        _ => scaled_sums(rw, sums, scale, dtype),
    };
    rw.replace_output(0, result);
    Ok(())
}

fn build_gemm(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(QGemm::read(node)?))
}

/// Weights of an integer product; the nodes behind multiply by their scale.
const INTEGER_WEIGHTS: &[QuantizedInput] =
    &[QuantizedInput { tensor: 1, scale: Scale::Following, zero_point: Some(3), axis: Axis::Last }];
const LINEAR_WEIGHTS: &[QuantizedInput] =
    &[QuantizedInput::new(3, 4, Some(5), Axis::Last), QuantizedInput::new(0, 1, Some(2), Axis::Last)];
const TO_FLOAT_WEIGHTS: &[QuantizedInput] = &[QuantizedInput::new(1, 3, Some(5), Axis::Last)];
const DYNAMIC_WEIGHTS: &[QuantizedInput] = &[QuantizedInput::new(1, 2, Some(3), Axis::Last)];
const GEMM_WEIGHTS: &[QuantizedInput] = &[
    QuantizedInput::new(3, 4, Some(5), Axis::LastUnless("transB")),
    QuantizedInput { tensor: 6, scale: Scale::Product([1, 4]), zero_point: None, axis: Axis::Last },
];

const MATRIX: &[usize] = &[2, 2];
const NUMBER: &[usize] = &[];

fn sample_of_integers(_: &Definition) -> Sample {
    Sample::with_inputs(Attrs::new(), &[(DType::U8, MATRIX), (DType::U8, MATRIX)])
}

fn sample_of_linear(definition: &Definition) -> Sample {
    let of_factor = [(DType::U8, MATRIX), (DType::F32, NUMBER), (DType::U8, NUMBER)];
    let of_result = [(DType::F32, NUMBER), (DType::U8, NUMBER)];
    // QGemm has a bias before the scale of the result.
    let of_result = if definition.domain == MICROSOFT { &[][..] } else { &of_result };
    Sample::with_inputs(Attrs::new(), &[&of_factor[..], &of_factor, of_result].concat())
}

fn sample_to_float(_: &Definition) -> Sample {
    let inputs = [(DType::U8, MATRIX), (DType::U8, MATRIX), (DType::F32, NUMBER), (DType::F32, NUMBER)];
    Sample::with_inputs(Attrs::new(), &inputs)
}

fn sample_dynamic(_: &Definition) -> Sample {
    Sample::with_inputs(Attrs::new(), &[(DType::F32, MATRIX), (DType::U8, MATRIX), (DType::F32, NUMBER)])
}

pub(super) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "MatMulInteger", &[10], |_, _| Ok(Box::new(MatMulInteger)))
            .decompose(decompose_integers)
            .class(Class::MatrixProduct)
            .traits(Traits::PASSES_QUANTIZED)
            .sample(sample_of_integers)
            .quantized(INTEGER_WEIGHTS),
        Definition::new("", "QLinearMatMul", &[10, 21], |_, _| Ok(Box::new(QLinearMatMul)))
            .composition(decompose_linear)
            .scales(&[1, 4, 6])
            .quantized(LINEAR_WEIGHTS)
            .sample(sample_of_linear),
        Definition::new(MICROSOFT, "MatMulIntegerToFloat", &[1], |_, _| Ok(Box::new(MatMulIntegerToFloat)))
            .composition(decompose_to_float)
            .scales(&[2, 3])
            .weights(&[6])
            .quantized(TO_FLOAT_WEIGHTS)
            .sample(sample_to_float),
        Definition::new(MICROSOFT, "DynamicQuantizeMatMul", &[1], |_, _| Ok(Box::new(DynamicQuantizeMatMul)))
            .composition(decompose_dynamic)
            .scales(&[2])
            .weights(&[4])
            .quantized(DYNAMIC_WEIGHTS)
            .sample(sample_dynamic),
        Definition::new(MICROSOFT, "QGemm", &[1], build_gemm)
            .composition(decompose_gemm)
            .scales(&[1, 4, 7])
            .quantized(GEMM_WEIGHTS)
            .sample(sample_of_linear),
    ]
}
