//! `QuantizeLinear`, `DequantizeLinear` and `DynamicQuantizeLinear`.
//!
//! `QuantizeLinear` rounds `x / scale` to integers, half to even, adds the zero point, and clamps to the range of the
//! integer type. `DequantizeLinear` returns `(x - zero_point) * scale`. A scale belongs to the tensor, to an index along
//! an axis, or to a block.
//!
//! The gradients are straight-through estimators (Bengio, Léonard, Courville 2013, arXiv:1308.3432): rounding passes the
//! gradient, clamping passes it inside the range. The gradient of the scale is the gradient of learned step sizes (Esser
//! et al. 2020, arXiv:1902.08153). The gradient of a quantized tensor is float32, in units of its integers.
//! `DynamicQuantizeLinear` computes its scale from the input; this path passes no gradient.
//!
//! Sources: QuantizeLinear and DequantizeLinear of ONNX, versions 10 to 28, and of `com.microsoft`;
//! DynamicQuantizeLinear-11.

use ortrain_graph::{Attrs, DType, Graph, Node, Shape, SmallType, Tensor, ValueId};

use crate::OpError;
use crate::broadcast::ShapedNodeSink;
use crate::class::{Class, Traits};
use crate::grad::Grad;
use crate::infer::Infer;
use crate::op::{Axis, Definition, Op, QuantizedInput};
use crate::rewrite::Rewrite;
use crate::support::casts::{arithmetic_dtype, cast};
use crate::support::quantization_grid::{
    Layout, Typed, check_scale, check_zero_point, emit, integer_range, number, number_range,
    optional_typed_input, typed_input, without_zero_point,
};
use crate::support::sizes::shape_of;

const X: usize = 0;
const SCALE: usize = 1;
const ZERO_POINT: usize = 2;

/// Type of a result without a zero point and without `output_dtype`.
const DEFAULT_TYPE: DType = DType::U8;
/// Number of steps between the smallest and the largest number of a dynamic grid.
const DYNAMIC_STEPS: f64 = 255.0;

/// Returns the element type in an attribute, if the attribute is present and not 0.
fn dtype_attribute(attrs: &Attrs, name: &str) -> Result<Option<DType>, OpError> {
    let Some(code) = attrs.int(name)?.filter(|&code| code != 0) else { return Ok(None) };
    let known = i32::try_from(code).ok().and_then(DType::from_onnx);
    known
        .map(Some)
        .ok_or_else(|| OpError::unsupported(format!("{name} is {code}, a type that is not supported")))
}

/// Returns true for types of scales: floats, and powers of two.
fn is_scale(dtype: DType) -> bool {
    dtype.is_float() || dtype == DType::Small(SmallType::F8E8M0)
}

/// Returns the first type if it has arithmetic of floats, and the other one otherwise.
fn float_or(dtype: DType, other: DType) -> DType {
    if dtype.is_float() { dtype } else { other }
}

/// `QuantizeLinear`.
struct QuantizeLinear {
    /// Type of the result, if an attribute says so.
    output: Option<DType>,
    /// Type of the division, if an attribute says so.
    precision: Option<DType>,
    attrs: Attrs,
}

impl QuantizeLinear {
    fn read(node: &Node) -> Result<QuantizeLinear, OpError> {
        Ok(QuantizeLinear {
            output: dtype_attribute(&node.attrs, "output_dtype")?,
            precision: dtype_attribute(&node.attrs, "precision")?,
            attrs: node.attrs.clone(),
        })
    }

    /// Returns `x / scale`, rounded for the type `output`, plus the zero point, before clamping, and `x / scale`.
    fn rounded(
        &self,
        to: &mut impl ShapedNodeSink,
        [x, scale]: [Typed; 2],
        zero_point: Option<Typed>,
        output: DType,
    ) -> Result<Rounded, OpError> {
        let (x_shape, scale_shape) = (shape_of(to, x.0, "the input")?, shape_of(to, scale.0, "the scale")?);
        let layout =
            Layout::new(&self.attrs, Some(&x_shape), Some(&scale_shape))?.expect("both shapes are known");
        let division = self.precision.unwrap_or_else(|| float_or(scale.1, x.1));
        let step = layout.broadcast(to, scale.0, &x_shape)?;
        let step = cast(to, step, scale.1, division);
        let x = cast(to, x.0, x.1, division);
        let quotient = emit(to, "Div", &[x, step]);
        // Floats of eight and four bits round when they are stored, and their zero points are zero.
        let is_integer = integer_range(output).is_some();
        let nearest = if is_integer { emit(to, "Round", &[quotient]) } else { quotient };
        // Zero points are exact in float32, but not in every narrow float.
        let dtype = arithmetic_dtype(division);
        let mut position = cast(to, nearest, division, dtype);
        if let Some((zero_point, own)) = zero_point.filter(|_| is_integer) {
            let zero_point = layout.broadcast(to, zero_point, &x_shape)?;
            let zero_point = cast(to, zero_point, own, dtype);
            position = emit(to, "Add", &[position, zero_point]);
        }
        let quotient = cast(to, quotient, division, dtype);
        let step = cast(to, step, division, dtype);
        Ok(Rounded { layout, x_shape, scale_shape, dtype, quotient, step, position })
    }
}

/// Positions on the grid before clamping.
struct Rounded {
    layout: Layout,
    x_shape: Shape,
    scale_shape: Shape,
    /// Type of the values below.
    dtype: DType,
    /// `x / scale`.
    quotient: ValueId,
    /// The scale, broadcast to the input.
    step: ValueId,
    /// Rounded quotient plus zero point.
    position: ValueId,
}

impl Op for QuantizeLinear {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 3, 1)?;
        let is_number = |dtype: DType| dtype.is_float() || dtype == DType::I32;
        cx.expect_dtype(X, "a float type or int32", is_number)?;
        cx.expect_dtype(SCALE, "a float type", is_scale)?;
        let of_zero_point = if cx.has_input(ZERO_POINT) { Some(cx.dtype(ZERO_POINT)?) } else { None };
        if let (Some(attribute), Some(own)) = (self.output, of_zero_point)
            && attribute != own
        {
            return Err(OpError::invalid(format!(
                "output_dtype is {attribute}, but the zero point is of type {own}"
            )));
        }
        let dtype = of_zero_point.or(self.output).unwrap_or(DEFAULT_TYPE);
        if number_range(dtype).is_none() {
            return Err(OpError::invalid(format!("a tensor cannot be quantized to type {dtype}")));
        }
        check_scale(cx, SCALE)?;
        check_zero_point(cx, ZERO_POINT, dtype, SCALE)?;
        Layout::new(&self.attrs, cx.shape(X), cx.shape(SCALE))?;
        cx.set_output(0, dtype, cx.shape(X).cloned());
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let (x, scale) = (cx.input(X)?, cx.input(SCALE)?);
        let dtypes = [cx.dtype(x)?, cx.dtype(scale)?];
        let zero_point = match cx.optional_input(ZERO_POINT) {
            Some(id) => Some((id, cx.dtype(id)?)),
            None => None,
        };
        let output = cx.output(0, "y");
        let output = cx.dtype(output)?;
        let (low, high) = number_range(output).expect("checked by inference");
        let rounded = self.rounded(cx, [(x, dtypes[0]), (scale, dtypes[1])], zero_point, output)?;
        let dtype = rounded.dtype;
        let (low, high) = (number(cx, dtype, low), number(cx, dtype, high));
        let above = emit(cx, "GreaterOrEqual", &[rounded.position, low]);
        let below = emit(cx, "LessOrEqual", &[rounded.position, high]);
        let inside = emit(cx, "And", &[above, below]);
        let g = cast(cx, g, DType::F32, dtype);
        let step_gradient = emit(cx, "Div", &[g, rounded.step]);
        let zero = number(cx, dtype, 0.0);
        let gradient = emit(cx, "Where", &[inside, step_gradient, zero]);
        if cx.needs_grad(X) {
            let gradient = cast(cx, gradient, dtype, dtypes[0]);
            cx.set_grad(X, gradient);
        }
        if cx.needs_grad(SCALE) {
            let each = emit(cx, "Mul", &[gradient, rounded.quotient]);
            let each = emit(cx, "Neg", &[each]);
            let total = rounded.layout.sum_to_scale(cx, each, &rounded.x_shape, &rounded.scale_shape)?;
            let total = cast(cx, total, dtype, dtypes[1]);
            cx.set_grad(SCALE, total);
        }
        Ok(())
    }
}

fn decompose_quantize(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = QuantizeLinear::read(rw.node())?;
    let (x, scale) = (typed_input(rw, X)?, typed_input(rw, SCALE)?);
    let zero_point = optional_typed_input(rw, ZERO_POINT)?;
    let dtype = zero_point.map(|(_, dtype)| dtype).or(op.output).unwrap_or(DEFAULT_TYPE);
    let rounded = op.rounded(rw, [x, scale], zero_point, dtype)?;
    let Some((low, high)) = integer_range(dtype) else {
        let attrs = Attrs::new().with("to", i64::from(dtype.to_onnx()));
        let attrs = match rw.attrs().int("saturate")? {
            Some(saturate) => attrs.with("saturate", saturate),
            None => attrs,
        };
        let result = rw.add("Cast", &[rounded.position], attrs);
        rw.replace_output(0, result);
        return Ok(());
    };
    let (low, high) = (number(rw, rounded.dtype, low), number(rw, rounded.dtype, high));
    let clamped = emit(rw, "Clip", &[rounded.position, low, high]);
    let result = cast(rw, clamped, rounded.dtype, dtype);
    rw.replace_output(0, result);
    Ok(())
}

/// `DequantizeLinear`.
struct DequantizeLinear {
    /// Type of the result, if an attribute says so.
    output: Option<DType>,
    attrs: Attrs,
}

impl DequantizeLinear {
    fn read(node: &Node) -> Result<DequantizeLinear, OpError> {
        Ok(DequantizeLinear {
            output: dtype_attribute(&node.attrs, "output_dtype")?,
            attrs: node.attrs.clone(),
        })
    }

    /// Returns the scale, broadcast to the input, and `x - zero_point`, in the type `dtype`.
    fn factors(
        &self,
        to: &mut impl ShapedNodeSink,
        [x, scale]: [Typed; 2],
        zero_point: Option<ValueId>,
        dtype: DType,
    ) -> Result<Factors, OpError> {
        let (x_shape, scale_shape) = (shape_of(to, x.0, "the input")?, shape_of(to, scale.0, "the scale")?);
        let layout =
            Layout::new(&self.attrs, Some(&x_shape), Some(&scale_shape))?.expect("both shapes are known");
        let step = layout.broadcast(to, scale.0, &x_shape)?;
        let step = cast(to, step, scale.1, dtype);
        let zero_point = zero_point.map(|id| layout.broadcast(to, id, &x_shape)).transpose()?;
        let distance = without_zero_point(to, x, zero_point, dtype);
        Ok(Factors { layout, x_shape, scale_shape, step, distance })
    }
}

/// Factors of a dequantized tensor.
struct Factors {
    layout: Layout,
    x_shape: Shape,
    scale_shape: Shape,
    /// The scale, broadcast to the input.
    step: ValueId,
    /// `x - zero_point`.
    distance: ValueId,
}

impl Op for DequantizeLinear {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 3, 1)?;
        let is_quantized = |dtype: DType| number_range(dtype).is_some();
        let dtype =
            cx.expect_dtype(X, "an integer of up to 32 bits, or a float of up to 8 bits", is_quantized)?;
        let scale = cx.expect_dtype(SCALE, "a float type", is_scale)?;
        let output = self.output.unwrap_or_else(|| float_or(scale, DType::F32));
        if !output.is_float() {
            return Err(OpError::invalid(format!("output_dtype is {output}, expected a float type")));
        }
        check_scale(cx, SCALE)?;
        check_zero_point(cx, ZERO_POINT, dtype, SCALE)?;
        Layout::new(&self.attrs, cx.shape(X), cx.shape(SCALE))?;
        cx.set_output(0, output, cx.shape(X).cloned());
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let (x, scale) = (cx.input(X)?, cx.input(SCALE)?);
        let dtypes = [cx.dtype(x)?, cx.dtype(scale)?];
        let output = cx.output(0, "y");
        let of_output = cx.dtype(output)?;
        let dtype = arithmetic_dtype(of_output);
        let g = cast(cx, g, of_output, dtype);
        let zero_point = cx.optional_input(ZERO_POINT);
        let factors = self.factors(cx, [(x, dtypes[0]), (scale, dtypes[1])], zero_point, dtype)?;
        if cx.needs_grad(X) {
            let gradient = emit(cx, "Mul", &[g, factors.step]);
            let gradient = cast(cx, gradient, dtype, DType::F32);
            cx.set_grad(X, gradient);
        }
        if cx.needs_grad(SCALE) {
            let each = emit(cx, "Mul", &[g, factors.distance]);
            let total = factors.layout.sum_to_scale(cx, each, &factors.x_shape, &factors.scale_shape)?;
            let total = cast(cx, total, dtype, dtypes[1]);
            cx.set_grad(SCALE, total);
        }
        Ok(())
    }
}

fn decompose_dequantize(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let op = DequantizeLinear::read(rw.node())?;
    let (x, scale) = (typed_input(rw, X)?, typed_input(rw, SCALE)?);
    let output = op.output.unwrap_or_else(|| float_or(scale.1, DType::F32));
    let dtype = arithmetic_dtype(output);
    let factors = op.factors(rw, [x, scale], rw.input(ZERO_POINT), dtype)?;
    let product = emit(rw, "Mul", &[factors.distance, factors.step]);
    let result = cast(rw, product, dtype, output);
    rw.replace_output(0, result);
    Ok(())
}

/// `DynamicQuantizeLinear`: a grid of unsigned bytes from the smallest to the largest element and zero.
struct DynamicQuantizeLinear;

impl Op for DynamicQuantizeLinear {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 3)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        cx.set_output(0, DType::U8, cx.shape(0).cloned());
        cx.set_output(1, dtype, Some(Shape::default()));
        cx.set_output(2, DType::U8, Some(Shape::default()));
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        if let (Some(g), true) = (cx.output_grad(0), cx.needs_grad(0)) {
            let x = cx.input(0)?;
            let dtype = cx.dtype(x)?;
            let scale = cx.output(1, "scale");
            let g = cast(cx, g, DType::F32, dtype);
            // No element lies outside of the grid.
            let gradient = emit(cx, "Div", &[g, scale]);
            cx.set_grad(0, gradient);
        }
        Ok(())
    }
}

fn decompose_dynamic(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let x = rw.required_input(0)?;
    let dtype = rw.dtype(x).ok_or_else(|| OpError::invalid("the type of input 0 is not known"))?;
    let constant = |rw: &mut Rewrite<'_>, value: f64| number(rw, dtype, value);
    let (zero, steps, one) = (constant(rw, 0.0), constant(rw, DYNAMIC_STEPS), constant(rw, 1.0));
    // The zero joins the elements, so an empty tensor has a grid too.
    let flat = rw.ints("flat", &[-1]);
    let elements = rw.add("Reshape", &[x, flat], Attrs::new());
    let single = rw.constant("zero", Tensor::filled(dtype, &[1], 0.0));
    let elements = rw.add("Concat", &[elements, single], Attrs::new().with("axis", 0i64));
    let [largest, smallest] =
        ["ReduceMax", "ReduceMin"].map(|op| rw.add(op, &[elements], Attrs::new().with("keepdims", 0i64)));
    let range = emit(rw, "Sub", &[largest, smallest]);
    let is_constant = emit(rw, "Equal", &[range, zero]);
    let scale = emit(rw, "Div", &[range, steps]);
    let scale = emit(rw, "Where", &[is_constant, one, scale]);
    let origin = emit(rw, "Div", &[smallest, scale]);
    let origin = emit(rw, "Sub", &[zero, origin]);
    let origin = emit(rw, "Clip", &[origin, zero, steps]);
    let origin = emit(rw, "Round", &[origin]);
    let zero_point = cast(rw, origin, dtype, DType::U8);
    let quantized = emit(rw, "QuantizeLinear", &[x, scale, zero_point]);
    for (k, value) in [quantized, scale, zero_point].into_iter().enumerate() {
        if rw.has_output(k) {
            rw.replace_output(k, value);
        }
    }
    Ok(())
}

fn build_quantize(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(QuantizeLinear::read(node)?))
}

fn build_dequantize(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(DequantizeLinear::read(node)?))
}

pub(super) fn definitions() -> Vec<Definition> {
    const VERSIONS: &[i64] = &[10, 13, 19, 21, 23, 24, 25, 28];
    let of_domain = |domain: &'static str, since: &'static [i64]| {
        [
            Definition::new(domain, "QuantizeLinear", since, build_quantize)
                .runs_as(decompose_quantize)
                .class(Class::Quantization)
                .traits(Traits::PASSES_QUANTIZED)
                .weights(&[X])
                .scales(&[SCALE]),
            Definition::new(domain, "DequantizeLinear", since, build_dequantize)
                .runs_as(decompose_dequantize)
                .class(Class::Dequantization)
                .scales(&[SCALE])
                .quantized(const { &[QuantizedInput::new(X, SCALE, Some(ZERO_POINT), Axis::Attributes)] }),
        ]
    };
    let dynamic =
        Definition::new("", "DynamicQuantizeLinear", &[11], |_, _| Ok(Box::new(DynamicQuantizeLinear)))
            .runs_as(decompose_dynamic)
            .class(Class::Quantization)
            .traits(Traits::PASSES_QUANTIZED);
    of_domain("", VERSIONS).into_iter().chain(of_domain("com.microsoft", &[1])).chain([dynamic]).collect()
}
