//! Element-wise operators with inputs of different types: Where, Cast, CastLike and Pow.
//!
//! Where-9, 16; Cast-6 to 28; CastLike-15 to 25 (a Cast to the type of a second input); Pow-7 to 15 of ONNX.
//!
//! Conversions:
//! - Floats to integers truncate and saturate (ONNX leaves values out of range open), and NaN gives 0.
//! - Integers wrap, and floats round to nearest even.
//! - float64 and 64-bit integers are converted to float16 and bfloat16 through float32.
//! - 8-bit and 4-bit floats round to nearest even, from float32. `saturate` and `round_mode` apply only to 8-bit floats.
//!   Integers of less than eight bits wrap. Strings and complex numbers are not supported.
//!
//! Pow computes in the type of a float base. An integer base with a float exponent is computed in float64 and
//! truncated.

use ortrain_expr::{BinaryOp, Builder, Expr, PowerRounding, Reg, Type, derive};
use ortrain_graph::{Attrs, DType, Graph, Node, Tensor, ValueId};

use crate::OpError;
use crate::class::{Class, Traits};
use crate::grad::{Grad, gradient_dtype};
use crate::infer::Infer;
use crate::lower::Lower;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::formula::formula;
use crate::support::small_casts::{Encoding, decode};

fn cast_attrs(dtype: DType) -> Attrs {
    Attrs::new().with("to", i64::from(dtype.to_onnx()))
}

/// Selection between two values by a condition.
struct Where;

impl Op for Where {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 3, 1)?;
        cx.expect_dtype(0, "bool", |dtype| dtype == DType::Bool)?;
        let dtype = cx.expect_same_dtype([1, 2])?;
        let shape = cx.broadcast(0..3)?;
        cx.set_output(0, dtype, shape);
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let (condition, y) = (cx.input(0)?, cx.output(0, "y"));
        let zero = Tensor::scalar(cx.dtype(y)?, 0.0);
        let zero = cx.constant("zero", zero);
        for k in [1, 2] {
            if !cx.needs_grad(k) {
                continue;
            }
            let (yes, no) = if k == 1 { (g, zero) } else { (zero, g) };
            let chosen = cx.add("Where", &[condition, yes, no], Attrs::new());
            let gradient = cx.sum_to(chosen, cx.input(k)?, y)?;
            cx.set_grad(k, gradient);
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let mut nest = cx.nest(&cx.out_dims(0), 0);
        let mut loads = Vec::with_capacity(3);
        for k in 0..3 {
            let buffer = cx.input(k);
            loads.push(nest.load_broadcast(buffer, cx.dtype(k), &cx.dims(k)));
        }
        let chosen = nest.b.select(loads[0], loads[1], loads[2]);
        let output = cx.output(0);
        nest.store_contiguous(cx, output, chosen);
        cx.emit(nest.instruction())
    }
}

/// Conversion to another element type.
struct Cast {
    to: DType,
    /// True if numbers beyond the range of an 8-bit float become its largest number.
    saturates: bool,
    /// Rounding to powers of two.
    rounding: PowerRounding,
}

/// Attributes of a conversion to an element type without arithmetic.
fn read_rounding(attrs: &Attrs) -> Result<(bool, PowerRounding), OpError> {
    let saturates = attrs.int("saturate")?.unwrap_or(1) != 0;
    let rounding = match attrs.string("round_mode")?.unwrap_or("up") {
        "up" => PowerRounding::Up,
        "down" => PowerRounding::Down,
        "nearest" => PowerRounding::Nearest,
        other => {
            return Err(OpError::invalid(format!("round_mode must be up, down or nearest, got {other:?}")));
        }
    };
    Ok((saturates, rounding))
}

impl Op for Cast {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        let from = cx.dtype(0)?;
        cx.set_output(0, self.to, cx.shape(0).cloned());
        let is_integer = |dtype: DType| matches!(dtype, DType::I32 | DType::I64);
        if is_integer(from) && is_integer(self.to) {
            cx.set_output_sizes(0, cx.sizes(0));
        }
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let from = cx.dtype(cx.input(0)?)?;
        // Integers on the path of a gradient stand for floats on a grid. A cast from floats to integers truncates.
        if self.to.is_float() || !from.is_float() {
            let (from, to) = (gradient_dtype(from), gradient_dtype(self.to));
            let gradient = if from == to { g } else { cx.add("Cast", &[g], cast_attrs(from)) };
            cx.set_grad(0, gradient);
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let from = cx.input_element_type(0);
        if from == self.to {
            cx.alias(0, 0);
            return Ok(());
        }
        let dims = cx.out_dims(0);
        let (input, output) = (cx.input(0), cx.output(0));
        let mut nest = cx.nest(&dims, 0);
        let mut value = nest.load_broadcast(input, cx.dtype(0), &dims);
        if let DType::Small(small) = from {
            value = decode(cx, &mut nest, small, value);
        }
        if let DType::Small(small) = self.to {
            let encoding = Encoding { small, saturates: self.saturates, rounding: self.rounding };
            value = encoding.encode(cx, &mut nest, value);
        }
        nest.store_contiguous(cx, output, value);
        cx.emit(nest.instruction())
    }
}

/// Conversion to the element type of another value.
struct CastLike;

impl Op for CastLike {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 1)?;
        cx.dtype(0)?;
        cx.set_output(0, cx.dtype(1)?, cx.shape(0).cloned());
        Ok(())
    }
}

fn decompose_cast_like(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (x, like) = (rw.required_input(0)?, rw.required_input(1)?);
    let to = rw.dtype(like).ok_or_else(|| OpError::invalid("the type of input 1 is not known"))?;
    let mut attrs = rw.attrs().clone();
    attrs.0.insert("to".into(), i64::from(to.to_onnx()).into());
    rw.emit_op("", "Cast", &[Some(x)], attrs);
    Ok(())
}

/// Power; base and exponent may have different types.
struct Pow;

/// Emits `base ** exponent` in the compute type of the base.
fn emit_power(b: &mut Builder, base: Reg, exponent: Reg) -> Reg {
    let (ty, other) = (b.ty(base), b.ty(exponent));
    let computed = match (ty.is_float(), other.is_float()) {
        (true, _) => ty,
        (false, true) => Type::F64,
        (false, false) if ty == other => ty,
        (false, false) => Type::I64,
    };
    let (base, exponent) = (b.convert(base, computed), b.convert(exponent, computed));
    let result = b.binary(BinaryOp::Pow, base, exponent);
    b.convert(result, ty)
}

impl Pow {
    /// Builds the power as an expression over the base's type. A constant exponent is part of the expression, which
    /// simplifies the derivative.
    fn power_expr(ty: Type, exponent: Option<f64>) -> Expr {
        let mut b = Builder::new();
        let base = b.load(0, ty);
        let exponent = match exponent {
            Some(value) => b.constant(ty, value),
            None => b.load(1, ty),
        };
        let result = b.binary(BinaryOp::Pow, base, exponent);
        b.finish(&[result])
    }
}

impl Op for Pow {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 1)?;
        let dtype = cx.expect_dtype(0, "a number type", DType::is_number)?;
        cx.expect_dtype(1, "a number type", DType::is_number)?;
        let shape = cx.broadcast(0..2)?;
        cx.set_output(0, dtype, shape);
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let (base, exponent, y) = (cx.input(0)?, cx.input(1)?, cx.output(0, "y"));
        let (dtype, exponent_dtype) = (cx.dtype(base)?, cx.dtype(exponent)?);
        let ty = Type::of(dtype);
        let scalar_exponent =
            cx.constant_of(exponent).filter(|tensor| tensor.len() == 1).map(|tensor| tensor.to_f64()[0]);
        // An exponent of 0 has slope 0 everywhere; the general form gives it the right shape.
        let nonzero_exponent = scalar_exponent.filter(|&value| value != 0.0);
        let mut cast: Option<ValueId> = None;
        for k in [0, 1] {
            if !cx.needs_grad(k) {
                continue;
            }
            let constant = if k == 0 { nonzero_exponent } else { None };
            let Some(derivative) = derive(&Pow::power_expr(ty, constant), 2, k) else { continue };
            let converted_exponent = match cast {
                _ if exponent_dtype == dtype || constant.is_some() => exponent,
                Some(known) => known,
                None => *cast.insert(cx.add("Cast", &[exponent], cast_attrs(dtype))),
            };
            let gradient = cx.emit_as_onnx(&derivative, &[base, converted_exponent, y, g], dtype)?;
            let mut gradient = cx.sum_to(gradient, if k == 0 { base } else { exponent }, y)?;
            if k == 1 && exponent_dtype != dtype {
                gradient = cx.add("Cast", &[gradient], cast_attrs(exponent_dtype));
            }
            cx.set_grad(k, gradient);
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let mut nest = cx.nest(&cx.out_dims(0), 0);
        let mut load = |cx: &mut Lower<'_>, k: usize| match cx.constant(k).filter(|tensor| tensor.len() == 1)
        {
            // A constant exponent lets backends choose a product or a root.
            Some(tensor) if cx.dtype(k).is_float() => {
                let value = tensor.to_f64()[0];
                nest.b.constant(Type::of(cx.dtype(k)), value)
            }
            _ => {
                let buffer = cx.input(k);
                nest.load_broadcast(buffer, cx.dtype(k), &cx.dims(k))
            }
        };
        let (base, exponent) = (load(cx, 0), load(cx, 1));
        let result = emit_power(&mut nest.b, base, exponent);
        let output = cx.output(0);
        nest.store_contiguous(cx, output, result);
        cx.emit(nest.instruction())
    }
}

fn build_cast(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let (saturates, rounding) = read_rounding(&node.attrs)?;
    let code = Attrs::required("to", node.attrs.int("to")?)?;
    let Some(to) = i32::try_from(code).ok().and_then(DType::from_onnx) else {
        let known = i32::try_from(code).ok().and_then(DType::unsupported_name);
        return Err(match known {
            Some(name) => OpError::unsupported(format!("elements of type {name} are not supported")),
            None => OpError::invalid(format!("to is {code}, which is not an element type")),
        });
    };
    Ok(Box::new(Cast { to, saturates, rounding }))
}

fn build_where(_: &Graph, _: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Where))
}

fn build_pow(_: &Graph, _: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Pow))
}

/// Replaces Where before opset 9. `ReluGrad` of `com.microsoft` passes its first input through if the second is
/// positive, and gives 0 otherwise, even for NaN. Two of them select the halves, which are added. `ReluGrad` needs
/// inputs of one shape, so all inputs are first broadcast to the shape of the result.
fn downgrade_where(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (condition, yes, no) = (rw.required_input(0)?, rw.required_input(1)?, rw.required_input(2)?);
    let Some(dtype) = rw.dtype(yes).or(rw.dtype(no)).filter(|dtype| rw.version() < 9 && dtype.is_float())
    else {
        return Ok(());
    };
    let result_shape = rw.node().present_outputs().next().and_then(|id| rw.shape(id)).cloned();
    let has_result_shape =
        |rw: &Rewrite<'_>, value: ValueId| result_shape.is_some() && rw.shape(value) == result_shape.as_ref();
    let mut flags = condition;
    if !has_result_shape(rw, condition) {
        // No number is less than itself: this broadcasts the flags without changing them.
        for value in [yes, no] {
            let never = rw.add("Less", &[value, value], Attrs::new());
            flags = rw.add("Or", &[flags, never], Attrs::new());
        }
    }
    let inverted = rw.add("Not", &[flags], Attrs::new());
    let mut halves = Vec::with_capacity(2);
    for (value, flags) in [(yes, flags), (no, inverted)] {
        if rw.constant_of(value).is_some_and(|tensor| tensor.to_f64().iter().all(|&x| x == 0.0)) {
            continue;
        }
        let mask = rw.add("Cast", &[flags], cast_attrs(dtype));
        let value = if has_result_shape(rw, value) {
            value
        } else {
            let zeros = rw.add("Sub", &[mask, mask], Attrs::new());
            rw.add("Add", &[value, zeros], Attrs::new())
        };
        let inputs = [Some(value), Some(mask)];
        halves.push(rw.add_node("com.microsoft", "ReluGrad", &inputs, 1, Attrs::new())[0]);
    }
    let result = match halves[..] {
        [one] => one,
        [a, b] => rw.add("Add", &[a, b], Attrs::new()),
        _ => {
            let mask = rw.add("Cast", &[flags], cast_attrs(dtype));
            rw.add("Sub", &[mask, mask], Attrs::new())
        }
    };
    rw.replace_output(0, result);
    Ok(())
}

/// Replaces Where in plain ONNX before opset 9, through bounds. Selected elements are limited to the range from minus
/// to plus infinity, others to the range from zero to zero. Only an unselected NaN is not removed.
fn decompose_where(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (condition, yes, no) = (rw.required_input(0)?, rw.required_input(1)?, rw.required_input(2)?);
    let Some(dtype) = rw.dtype(yes).or(rw.dtype(no)).filter(|dtype| dtype.is_float()) else { return Ok(()) };
    let one = rw.constant("one", Tensor::scalar(dtype, 1.0));
    // Max of different shapes came with opset 8: every input is broadcast to the shape of the result.
    let chosen = rw.add("Cast", &[condition], cast_attrs(dtype));
    let mut halves = Vec::with_capacity(2);
    let mut spread = rw.add("Sub", &[chosen, chosen], Attrs::new());
    for value in [yes, no] {
        spread = formula(rw, [spread, value], |[spread, value]| spread + value.is_less(value).cast(dtype));
    }
    let chosen = rw.add("Add", &[chosen, spread], Attrs::new());
    let unchosen = rw.add("Sub", &[one, chosen], Attrs::new());
    for (value, mask, other) in [(yes, chosen, unchosen), (no, unchosen, chosen)] {
        if rw.constant_of(value).is_some_and(|tensor| tensor.to_f64().iter().all(|&x| x == 0.0)) {
            continue;
        }
        halves.push(formula(rw, [value, spread, mask, other], |[value, spread, mask, other]| {
            let value = value + spread;
            let above = mask / other;
            value.max(-above).min(above)
        }));
    }
    let result = match halves[..] {
        [one] => one,
        [a, b] => rw.add("Add", &[a, b], Attrs::new()),
        _ => spread,
    };
    rw.replace_output(0, result);
    Ok(())
}

/// Removes attributes: `saturate` came with opset 19, `round_mode` with 24. bfloat16 came with 13.
fn downgrade_cast(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let to = rw.attrs().int("to")?;
    let from = rw.input(0).and_then(|id| rw.dtype(id));
    let brain = Some(i64::from(DType::BF16.to_onnx()));
    if rw.version() < 13 && (to == brain || from == Some(DType::BF16)) {
        return Err(OpError::unsupported("bfloat16 needs opset 13 or newer"));
    }
    let mut attrs = rw.attrs().clone();
    for (name, since) in [("saturate", 19), ("round_mode", 24)] {
        if rw.version() < since {
            attrs.0.remove(name);
        }
    }
    if attrs != *rw.attrs() {
        let inputs = rw.node().inputs.to_vec();
        rw.emit_same_op(&inputs, attrs);
    }
    Ok(())
}

/// Converts types before opset 12, where base and exponent are floats of one type: an integer base is computed in
/// float64.
fn downgrade_pow(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() >= 12 {
        return Ok(());
    }
    let (base, exponent) = (rw.required_input(0)?, rw.required_input(1)?);
    // The values of a power that a rewrite emitted have no type yet, and need no conversion.
    let (Some(dtype), Some(other)) = (rw.dtype(base), rw.dtype(exponent)) else { return Ok(()) };
    if dtype.is_float() {
        if dtype != other {
            let exponent = rw.add("Cast", &[exponent], cast_attrs(dtype));
            rw.emit_same_op(&[Some(base), Some(exponent)], Attrs::new());
        }
        return Ok(());
    }
    let (base, exponent) = (
        rw.add("Cast", &[base], cast_attrs(DType::F64)),
        rw.add("Cast", &[exponent], cast_attrs(DType::F64)),
    );
    let result = rw.add("Pow", &[base, exponent], Attrs::new());
    let result = rw.add("Cast", &[result], cast_attrs(dtype));
    rw.replace_output(0, result);
    Ok(())
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "Where", &[9, 16], build_where)
            .class(Class::Selection)
            .traits(Traits::BROADCASTS)
            .inputs_without_gradient(&[0])
            .downgrade(downgrade_where)
            .decomposed_before(9, decompose_where),
        Definition::new("", "Cast", &[6, 9, 13, 19, 21, 23, 24, 25, 28], build_cast)
            .class(Class::Cast)
            .traits(Traits::KEEPS_ELEMENTS)
            .downgrade(downgrade_cast),
        Definition::new("", "CastLike", &[15, 19, 21, 23, 24, 25], |_, _| Ok(Box::new(CastLike)))
            .traits(Traits::MOVES.and(Traits::SHAPED_BY_INPUTS).and(Traits::KEEPS_SCORES))
            .composition(decompose_cast_like),
        Definition::new("", "Pow", &[7, 12, 13, 15], build_pow)
            .class(Class::Power)
            .traits(Traits::BROADCASTS)
            .inputs_without_gradient(&[1])
            .downgrade(downgrade_pow),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, check_decomposed, check_downgrade, check_gradients, f64s, generic_tensor, gradient_graph,
        one_node_graph, run, run_node,
    };

    const WHERE: (&str, &str) = ("", "Where");

    /// Plain ONNX before opset 9 selects floats by bounds: unselected infinities do not leak.
    #[test]
    fn decomposes_where_into_bounds() {
        let (infinite, x) =
            (f64s(&[2, 2], &[f64::INFINITY, 1.0, f64::NEG_INFINITY, -2.0]), generic_tensor(&[1, 2], 1));
        let condition = Tensor::from_slice(DType::Bool, &[2, 1], &[1u8, 0]);
        for (yes, no) in [(&infinite, &x), (&x, &infinite)] {
            let ports = [Some(&condition), Some(yes), Some(no)];
            let chosen = one_node_graph(NEWEST_OPSET, WHERE, &ports, 1, Attrs::new()).expect("valid");
            for opset in [8, 7] {
                let inputs = [condition.clone(), yes.clone(), no.clone()];
                let old = check_decomposed(&chosen, &inputs, opset);
                assert!(old.nodes.iter().all(|node| node.domain.is_empty()), "{old}");
            }
        }
    }

    const CAST: (&str, &str) = ("", "Cast");
    const POW: (&str, &str) = ("", "Pow");

    fn flags(dims: &[usize], values: &[u8]) -> Tensor {
        Tensor::from_slice(DType::Bool, dims, values)
    }

    fn two_input_graph(op: (&str, &str), a: &Tensor, b: &Tensor) -> Graph {
        one_node_graph(NEWEST_OPSET, op, &[Some(a), Some(b)], 1, Attrs::new()).expect("valid")
    }

    #[track_caller]
    fn cast(x: &Tensor, to: DType) -> Tensor {
        run_node(CAST, &[Some(x)], 1, cast_attrs(to)).expect("the graph runs").remove(0)
    }

    #[track_caller]
    fn pow(a: &Tensor, b: &Tensor) -> Tensor {
        run_node(POW, &[Some(a), Some(b)], 1, Attrs::new()).expect("the graph runs").remove(0)
    }

    #[test]
    fn chooses_elements_of_every_type() {
        let condition = flags(&[2, 1], &[1, 0]);
        for dtype in DType::ALL {
            let (x, y) = (Tensor::filled(dtype, &[3], 1.0), Tensor::filled(dtype, &[], 0.0));
            let got = run_node(WHERE, &[Some(&condition), Some(&x), Some(&y)], 1, Attrs::new())
                .expect("the graph runs");
            assert_eq!((got[0].dtype(), got[0].dims()), (dtype, &[2, 3][..]));
            assert_eq!(got[0].to_f64(), [1.0, 1.0, 1.0, 0.0, 0.0, 0.0], "{dtype}");
        }
    }

    #[test]
    fn each_branch_is_reduced_to_its_own_shape() {
        let condition = flags(&[2, 3], &[1, 0, 1, 0, 0, 1]);
        let (x, y) = (generic_tensor(&[1], 1), generic_tensor(&[2, 1], 2));
        let graph =
            one_node_graph(NEWEST_OPSET, WHERE, &[Some(&condition), Some(&x), Some(&y)], 1, Attrs::new());
        check_gradients(&graph.expect("valid"), &[condition, x, y], &[1, 2], &[0]);
    }

    #[test]
    fn unselected_elements_do_not_leak() {
        let condition = flags(&[2], &[1, 0]);
        let (x, y) = (Tensor::f32(&[2], &[1.0, f32::NAN]), Tensor::f32(&[2], &[f32::INFINITY, 2.0]));
        let graph =
            one_node_graph(NEWEST_OPSET, WHERE, &[Some(&condition), Some(&x), Some(&y)], 1, Attrs::new());
        let graph = graph.expect("valid");
        let seed = Tensor::f32(&[2], &[3.0, f32::NAN]);
        let gradient = gradient_graph(&graph, &[Some(seed)], &[1]);
        let got = run(&gradient, &[condition, x, y]).expect("the graph runs");
        assert_eq!(got[0], Tensor::f32(&[2], &[3.0, 0.0]));
    }

    #[test]
    fn casts_between_all_types() {
        for from in DType::ALL {
            for to in DType::ALL {
                assert_eq!(
                    cast(&Tensor::filled(from, &[2], 1.0), to),
                    Tensor::filled(to, &[2], 1.0),
                    "{from} to {to}"
                );
            }
        }
        let x = Tensor::f32(&[6], &[1.9, -1.9, 3e9, -3e9, f32::NAN, -0.0]);
        assert_eq!(
            cast(&x, DType::I32).to_i64().expect("integers"),
            [1, -1, 2_147_483_647, -2_147_483_648, 0, 0]
        );
        assert_eq!(cast(&x, DType::Bool).to_i64().expect("integers"), [1, 1, 1, 1, 1, 0]);
        let wide = Tensor::i64(&[2], &[257, -1]);
        assert_eq!(cast(&wide, DType::U8).to_i64().expect("integers"), [1, 255]);
    }

    #[test]
    fn narrow_floats_round_to_even() {
        // Halfway between neighbours of float16 (step 2 above 2048) and of bfloat16 (step 2 above 256).
        let x = Tensor::f32(&[3], &[2049.0, 2051.0, 1e6]);
        assert_eq!(cast(&x, DType::F16).to_f64(), [2048.0, 2052.0, f64::INFINITY]);
        let x = Tensor::f32(&[2], &[257.0, 259.0]);
        assert_eq!(cast(&x, DType::BF16).to_f64(), [256.0, 260.0]);
    }

    #[test]
    fn the_gradient_of_a_cast_is_a_cast() {
        let x = Tensor::f32(&[2], &[1.0, 2.0]);
        let graph =
            one_node_graph(NEWEST_OPSET, CAST, &[Some(&x)], 1, cast_attrs(DType::F16)).expect("valid");
        let gradient = gradient_graph(&graph, &[Some(Tensor::filled(DType::F16, &[2], 0.5))], &[0]);
        assert_eq!(run(&gradient, &[x]).expect("the graph runs")[0], Tensor::f32(&[2], &[0.5, 0.5]));
    }

    #[test]
    fn names_unsupported_types() {
        let x = Tensor::f32(&[1], &[1.0]);
        for (to, message) in [
            (8, "elements of type string are not supported"),
            (14, "elements of type complex64 are not supported"),
            (99, "99, which is not an element type"),
        ] {
            let error = run_node(CAST, &[Some(&x)], 1, Attrs::new().with("to", to)).expect_err("refused");
            let Failure::Prepare(error) = error else { panic!("{error:?}") };
            assert!(error.to_string().contains(message), "{error}");
        }
        assert!(run_node(CAST, &[Some(&x)], 1, Attrs::new()).is_err());
    }

    #[test]
    fn powers_of_mixed_types() {
        let base = Tensor::f32(&[3], &[1.0, 2.0, 3.0]);
        assert_eq!(pow(&base, &Tensor::i64(&[3], &[4, 5, 6])), Tensor::f32(&[3], &[1.0, 32.0, 729.0]));
        assert_eq!(pow(&base, &f64s(&[1], &[2.0])), Tensor::f32(&[3], &[1.0, 4.0, 9.0]));
        let base = Tensor::i64(&[3], &[1, 2, 3]);
        assert_eq!(pow(&base, &Tensor::i64(&[], &[2])), Tensor::i64(&[3], &[1, 4, 9]));
        assert_eq!(pow(&base, &Tensor::f32(&[3], &[0.5, 0.5, 1.5])), Tensor::i64(&[3], &[1, 1, 5]));
        let base = Tensor::from_slice(DType::I32, &[2], &[-2i32, 7]);
        let exponent = Tensor::from_slice(DType::U8, &[2], &[3u8, 2]);
        assert_eq!(pow(&base, &exponent), Tensor::from_slice(DType::I32, &[2], &[-8i32, 49]));
    }

    #[test]
    fn gradients_of_powers() {
        let positive = |dims: &[usize], seed: u32| {
            f64s(dims, &generic_tensor(dims, seed).to_f64().iter().map(|x| x.abs() + 0.2).collect::<Vec<_>>())
        };
        for (a, b) in [(&[2, 3][..], &[3][..]), (&[1], &[2, 2]), (&[3], &[]), (&[2, 1], &[1, 2])] {
            let (base, exponent) = (positive(a, 5), generic_tensor(b, 6));
            check_gradients(&two_input_graph(POW, &base, &exponent), &[base, exponent], &[0, 1], &[0]);
        }
        let (base, exponent) = (generic_tensor(&[3], 7), Tensor::i64(&[], &[3]));
        check_gradients(&two_input_graph(POW, &base, &exponent), &[base, exponent], &[0], &[0]);
        // Constant exponents, as in files.
        for value in [-1.0, 0.0, 0.5, 1.0, 2.0, 3.0] {
            for dims in [&[][..], &[1, 1, 1]] {
                let (base, exponent) = (positive(&[2, 2], 8), Tensor::filled(DType::F64, dims, value));
                let mut graph = two_input_graph(POW, &base, &exponent);
                let id = graph.inputs.pop().expect("the exponent");
                graph.value_mut(id).constant = Some(exponent);
                check_gradients(&graph, &[base], &[0], &[0]);
            }
        }
    }

    #[test]
    fn the_gradient_of_a_square_is_a_product() {
        let base = Tensor::f32(&[2], &[-3.0, 0.0]);
        let mut graph = two_input_graph(POW, &base, &Tensor::f32(&[], &[2.0]));
        let id = graph.inputs.pop().expect("the exponent");
        graph.value_mut(id).constant = Some(Tensor::f32(&[], &[2.0]));
        let gradient = gradient_graph(&graph, &[Some(Tensor::f32(&[2], &[1.0, 1.0]))], &[0]);
        assert!(gradient.nodes.iter().all(|node| &*node.op == "Mul"), "{gradient}");
        assert_eq!(run(&gradient, &[base]).expect("the graph runs")[0].to_f64(), [-6.0, 0.0]);
    }

    #[test]
    fn kinks_of_powers() {
        // Base 0: the exponent's gradient is 0 for nonnegative exponents. Exponent 0: the base's gradient is 0.
        let (base, exponent) = (f64s(&[4], &[0.0, 0.0, 0.0, -2.0]), f64s(&[4], &[2.0, 0.0, 1.0, 0.5]));
        let graph = two_input_graph(POW, &base, &exponent);
        let ones = Tensor::filled(DType::F64, &[4], 1.0);
        let got =
            run(&gradient_graph(&graph, &[Some(ones)], &[0, 1]), &[base, exponent]).expect("the graph runs");
        assert_eq!(got[0].to_f64()[..3], [0.0, 0.0, 1.0]);
        assert_eq!(got[1].to_f64()[..3], [0.0, 0.0, 0.0]);
        assert!(got[0].to_f64()[3].is_nan() && got[1].to_f64()[3].is_nan());
    }

    #[test]
    fn older_versions() {
        let (base, exponent) = (Tensor::f32(&[2], &[1.5, 2.0]), Tensor::i64(&[2], &[2, 3]));
        let graph = two_input_graph(POW, &base, &exponent);
        assert_eq!(check_downgrade(&graph, &[base.clone(), exponent.clone()], 12).nodes.len(), 1);
        assert_eq!(check_downgrade(&graph, &[base, exponent.clone()], 11).nodes.len(), 2);
        let integer_base = Tensor::from_slice(DType::I32, &[2], &[3i32, -2]);
        let graph = two_input_graph(POW, &integer_base, &exponent);
        assert_eq!(check_downgrade(&graph, &[integer_base, exponent], 7).nodes.len(), 4);

        let x = Tensor::f32(&[1], &[1.5]);
        let attrs = cast_attrs(DType::F16).with("saturate", 1i64).with("round_mode", "up");
        let graph = one_node_graph(NEWEST_OPSET, CAST, &[Some(&x)], 1, attrs).expect("valid");
        let old = check_downgrade(&graph, std::slice::from_ref(&x), 13);
        assert_eq!(old.nodes[0].attrs, cast_attrs(DType::F16));
        let graph =
            one_node_graph(NEWEST_OPSET, CAST, &[Some(&x)], 1, cast_attrs(DType::BF16)).expect("valid");
        assert!(passes::versions::downgrade(&mut graph.clone(), 12).is_err());

        let (condition, integers) = (flags(&[1], &[1]), Tensor::i64(&[1], &[1]));
        let inputs = [Some(&condition), Some(&integers), Some(&integers)];
        let graph = one_node_graph(NEWEST_OPSET, WHERE, &inputs, 1, Attrs::new()).expect("valid");
        let error = passes::versions::downgrade(&mut graph.clone(), 8).expect_err("refused");
        assert!(error.to_string().contains("needs opset 9"), "{error}");
    }

    /// Before opset 9, without Where: unselected elements do not leak, and all inputs broadcast.
    #[test]
    fn where_at_opset_7() {
        let (nan, inf) = (f64::NAN, f64::INFINITY);
        let x = f64s(&[2, 3], &[1.0, nan, -2.0, inf, 0.5, nan]);
        for (condition, other) in [
            (flags(&[2, 3], &[1, 0, 1, 0, 1, 0]), f64s(&[2, 3], &[nan, 1.0, inf, 2.0, -inf, 3.0])),
            (flags(&[3], &[1, 0, 1]), f64s(&[2, 1], &[4.0, 5.0])),
            (flags(&[2, 1], &[1, 0]), f64s(&[], &[-3.0])),
            (flags(&[], &[0]), f64s(&[4, 1, 1], &[1.0, 2.0, 3.0, 4.0])),
        ] {
            for swapped in [false, true] {
                let (yes, no) = if swapped { (&other, &x) } else { (&x, &other) };
                let inputs = [Some(&condition), Some(yes), Some(no)];
                let graph = one_node_graph(NEWEST_OPSET, WHERE, &inputs, 1, Attrs::new()).expect("valid");
                let feeds = [condition.clone(), yes.clone(), no.clone()];
                assert_eq!(check_downgrade(&graph, &feeds, 9).nodes.len(), 1);
                let old = check_downgrade(&graph, &feeds, 7);
                assert!(old.nodes.iter().all(|node| &*node.op != "Where"), "{old}");
            }
        }
    }
}
