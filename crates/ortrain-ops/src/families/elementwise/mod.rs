//! Element-wise operators as rows of a table.
//!
//! A row is a name, the versions of its schema, and an expression. The gradient is the symbolic derivative of the
//! expression; the lowering is a map. Inputs broadcast by the rules of ONNX ("multidirectional broadcasting"). If the
//! closed form of a derivative is shorter or more exact than the symbolic derivative, the row defines it. This file
//! contains arithmetic, comparisons, logic and bit operations. Activations and their gradient operators are in
//! `activations.rs`, circular and hyperbolic functions in `trigonometry.rs`.
//!
//! Sources: the operator pages of ONNX, opset 7 to 28; `com.microsoft` contrib operators of ONNX Runtime.

mod activations;
mod row;
mod trigonometry;

use ortrain_expr::{BinaryOp, Builder, CompareOp, Expr, Inst, Reg, Scalar, Type, UnaryOp, derive};
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Tensor, ValueId};

use crate::OpError;
use crate::class::{Class, Traits};
use crate::families::elementwise::row::{Row, TypeConstraint, row};
use crate::grad::{Grad, gradient_dtype};
use crate::infer::Infer;
use crate::lower::Lower;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::casts::cast;
use crate::support::onnx_decomposition::emit_as_onnx;
use crate::support::rewritten_on_read::build_rewritten_on_read;
use row::unary;

macro_rules! binary {
    ($op:ident) => {
        |b, x, _| Ok(b.binary(BinaryOp::$op, x[0], x[1]))
    };
}

macro_rules! compare {
    ($op:ident, $left:literal, $right:literal) => {
        |b, x, _| Ok(b.compare(CompareOp::$op, x[$left], x[$right]))
    };
}

fn modulo(b: &mut Builder, x: &[Reg], attrs: &Attrs) -> Result<Reg, OpError> {
    let ty = b.ty(x[0]);
    let rest = b.binary(BinaryOp::Rem, x[0], x[1]);
    if attrs.int("fmod")?.unwrap_or(0) == 1 {
        return Ok(rest);
    }
    // The result has the sign of the divisor, as in Python.
    let zero = b.constant(ty, 0.0);
    let even = b.compare(CompareOp::Eq, rest, zero);
    let (rest_negative, divisor_negative) =
        (b.compare(CompareOp::Lt, rest, zero), b.compare(CompareOp::Lt, x[1], zero));
    let differ = b.binary(BinaryOp::Xor, rest_negative, divisor_negative);
    let shifted = b.add(rest, x[1]);
    let signed = b.select(differ, shifted, rest);
    Ok(b.select(even, rest, signed))
}

/// Rounds up to an integer.
fn ceil(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let minus = b.unary(UnaryOp::Neg, x[0]);
    let floor = b.unary(UnaryOp::Floor, minus);
    Ok(b.unary(UnaryOp::Neg, floor))
}

/// Rounds to the nearest integer, ties to even.
fn round(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    Ok(b.unary(UnaryOp::Round, x[0]))
}

fn is_nan(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let equal = b.compare(CompareOp::Eq, x[0], x[0]);
    Ok(b.unary(UnaryOp::Not, equal))
}

fn is_inf(b: &mut Builder, x: &[Reg], attrs: &Attrs) -> Result<Reg, OpError> {
    let detects = |name: &str| Ok::<_, OpError>(attrs.int(name)?.unwrap_or(1) != 0);
    let mut result = b.push(Inst::Const(Scalar::Bool(false)), Type::Bool);
    for (name, value) in [("detect_negative", f64::NEG_INFINITY), ("detect_positive", f64::INFINITY)] {
        if detects(name)? {
            let end = b.constant(b.ty(x[0]), value);
            let is_equal = b.compare(CompareOp::Eq, x[0], end);
            result = b.binary(BinaryOp::Or, result, is_equal);
        }
    }
    Ok(result)
}

/// Inverts all bits: `-x - 1`.
fn invert_bits(b: &mut Builder, x: Reg) -> Reg {
    let (ty, minus) = (b.ty(x), b.unary(UnaryOp::Neg, x));
    let one = b.constant(ty, 1.0);
    b.sub(minus, one)
}

/// Shifts by multiplication with a power of two, or by division.
///
/// The power is 0 for negative shifts and for shifts by the width of the type or more. Division by 0 gives 0. A shift
/// to the right keeps the sign: the bits of a negative number are inverted, shifted and inverted again.
fn shift(b: &mut Builder, x: &[Reg], attrs: &Attrs) -> Result<Reg, OpError> {
    let ty = b.ty(x[0]);
    let (zero, two) = (b.constant(ty, 0.0), b.constant(ty, 2.0));
    let power = b.binary(BinaryOp::Pow, two, x[1]);
    match Attrs::required("direction", attrs.string("direction")?)? {
        "LEFT" => Ok(b.mul(x[0], power)),
        "RIGHT" => {
            let negative = b.compare(CompareOp::Lt, x[0], zero);
            let inverted = invert_bits(b, x[0]);
            let bits = b.select(negative, inverted, x[0]);
            let quotient = b.div(bits, power);
            let back = invert_bits(b, quotient);
            Ok(b.select(negative, back, quotient))
        }
        other => Err(OpError::invalid(format!("direction must be \"LEFT\" or \"RIGHT\", got {other:?}"))),
    }
}

fn mean(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let sum = fold_operands(BinaryOp::Add)(b, x);
    let count = b.constant(b.ty(sum), x.len() as f64);
    Ok(b.div(sum, count))
}

fn fold_operands(op: BinaryOp) -> impl Fn(&mut Builder, &[Reg]) -> Reg {
    move |b, x| {
        let mut folded = x[0];
        for &other in &x[1..] {
            folded = b.binary(op, folded, other);
        }
        folded
    }
}

/// Maximum number of inputs of a variadic operator: each input is a load of one expression.
pub(crate) const MAX_OPERANDS: usize = 1024;

/// Value of [`Row::inputs`] for a variadic operator.
const VARIADIC: usize = usize::MAX;

/// Rows of arithmetic, comparisons, logic and bit operations.
#[rustfmt::skip]
static ROWS: &[Row] = &[
    row("Add", &[7, 13, 14], 2, TypeConstraint::Number, binary!(Add)).class(Class::Add).traits(Traits::BROADCASTS.and(Traits::KEEPS_DECISION)),
    row("Sub", &[7, 13, 14], 2, TypeConstraint::Number, binary!(Sub)).class(Class::Subtract).traits(Traits::BROADCASTS.and(Traits::KEEPS_DECISION)),
    row("Mul", &[7, 13, 14], 2, TypeConstraint::Number, binary!(Mul)).class(Class::Multiply).traits(Traits::BROADCASTS.and(Traits::KEEPS_DECISION)),
    row("Div", &[7, 13, 14], 2, TypeConstraint::Number, binary!(Div)).class(Class::Divide).traits(Traits::BROADCASTS),
    row("Mod", &[10, 13, 28], 2, TypeConstraint::Number, modulo),
    row("Reciprocal", &[6, 13], 1, TypeConstraint::Float, |b, x, _| {
        let one = b.constant(b.ty(x[0]), 1.0);
        Ok(b.div(one, x[0]))
    }).class(Class::Reciprocal),
    row("Neg", &[6, 13], 1, TypeConstraint::Number, unary!(Neg)).class(Class::Negate).traits(Traits::PREPARES.and(Traits::KEEPS_DECISION)),
    row("Abs", &[6, 13], 1, TypeConstraint::Number, unary!(Abs)).traits(Traits::PREPARES),
    row("Sign", &[9, 13], 1, TypeConstraint::Number, unary!(Sign)).zero_gradient(),
    row("Floor", &[6, 13], 1, TypeConstraint::Float, unary!(Floor)).zero_gradient(),
    row("Ceil", &[6, 13], 1, TypeConstraint::Float, ceil).zero_gradient(),
    row("Round", &[11, 22], 1, TypeConstraint::Float, round).zero_gradient(),
    row("Exp", &[6, 13], 1, TypeConstraint::Float, unary!(Exp)).traits(Traits::PREPARES),
    row("Log", &[6, 13], 1, TypeConstraint::Float, unary!(Log)).class(Class::Logarithm).traits(Traits::PREPARES),
    row("Sqrt", &[6, 13], 1, TypeConstraint::Float, unary!(Sqrt)).class(Class::Root).traits(Traits::PREPARES),
    row("Sin", &[7, 22], 1, TypeConstraint::Float, unary!(Sin)).class(Class::Sine),
    row("Cos", &[7, 22], 1, TypeConstraint::Float, unary!(Cos)).class(Class::Sine),
    row("Erf", &[9, 13], 1, TypeConstraint::Float, unary!(Erf)),
    row("Min", &[6, 8, 12, 13], VARIADIC, TypeConstraint::Number, |b, x, _| Ok(fold_operands(BinaryOp::Min)(b, x))).traits(Traits::BROADCASTS).selects(),
    row("Max", &[6, 8, 12, 13], VARIADIC, TypeConstraint::Number, |b, x, _| Ok(fold_operands(BinaryOp::Max)(b, x))).traits(Traits::BROADCASTS).selects(),
    row("Sum", &[6, 8, 13], VARIADIC, TypeConstraint::Float, |b, x, _| Ok(fold_operands(BinaryOp::Add)(b, x))),
    row("Mean", &[6, 8, 13], VARIADIC, TypeConstraint::Float, mean),
    row("IsNaN", &[9, 13, 20], 1, TypeConstraint::Float, is_nan).bool_output(),
    row("IsInf", &[10, 20], 1, TypeConstraint::Float, is_inf).bool_output(),
    row("BitwiseAnd", &[18], 2, TypeConstraint::Integer, binary!(And)).zero_gradient(),
    row("BitwiseOr", &[18], 2, TypeConstraint::Integer, binary!(Or)).zero_gradient(),
    row("BitwiseXor", &[18], 2, TypeConstraint::Integer, binary!(Xor)).zero_gradient(),
    row("BitwiseNot", &[18], 1, TypeConstraint::Integer, |b, x, _| Ok(invert_bits(b, x[0]))).zero_gradient(),
    row("BitShift", &[11, 28], 2, TypeConstraint::Integer, shift).zero_gradient(),
    row("And", &[7], 2, TypeConstraint::Bool, binary!(And)).traits(Traits::BROADCASTS).bool_output(),
    row("Or", &[7], 2, TypeConstraint::Bool, binary!(Or)).traits(Traits::BROADCASTS).bool_output(),
    row("Xor", &[7], 2, TypeConstraint::Bool, binary!(Xor)).traits(Traits::BROADCASTS).bool_output(),
    row("Not", &[1], 1, TypeConstraint::Bool, unary!(Not)).bool_output(),
    row("Equal", &[7, 11, 13, 19], 2, TypeConstraint::Any, compare!(Eq, 0, 1)).traits(Traits::BROADCASTS).bool_output(),
    row("Less", &[7, 9, 13], 2, TypeConstraint::Number, compare!(Lt, 0, 1)).traits(Traits::BROADCASTS).bool_output(),
    row("Greater", &[7, 9, 13], 2, TypeConstraint::Number, compare!(Lt, 1, 0)).traits(Traits::BROADCASTS).bool_output(),
    row("LessOrEqual", &[12, 16], 2, TypeConstraint::Number, compare!(Le, 0, 1)).traits(Traits::BROADCASTS).bool_output(),
    row("GreaterOrEqual", &[12, 16], 2, TypeConstraint::Number, compare!(Le, 1, 0)).traits(Traits::BROADCASTS).bool_output(),
];

/// Returns the rows of this file, of `activations.rs` and of `trigonometry.rs`.
fn all_rows() -> impl Iterator<Item = &'static Row> {
    ROWS.iter().chain(activations::ROWS).chain(trigonometry::ROWS)
}

fn find_row(domain: &str, name: &str) -> Result<&'static Row, OpError> {
    let found = all_rows().find(|row| row.name == name && row.domain == domain);
    found.ok_or_else(|| OpError::unsupported("it is not in the table of element-wise operators"))
}

struct Elementwise {
    row: &'static Row,
    attrs: Attrs,
}

impl Elementwise {
    fn count(&self, node: &Node) -> usize {
        if self.row.inputs == VARIADIC { node.inputs.len() } else { self.row.inputs }
    }

    /// Returns the expression for inputs of a compute type.
    fn expr(&self, ty: Type, count: usize) -> Result<Expr, OpError> {
        let mut b = Builder::new();
        let loads: Vec<Reg> = (0..count).map(|slot| b.load(slot, ty)).collect();
        let result = (self.row.expr)(&mut b, &loads, &self.attrs)?;
        Ok(b.finish(&[result]))
    }

    /// Returns the gradient of input `k`, as an expression of the inputs, the result and the gradient of the result.
    /// `None` if the gradient is zero everywhere.
    fn derivative(&self, ty: Type, count: usize, k: usize) -> Result<Option<Expr>, OpError> {
        if self.row.selects_input && count > 2 {
            return Ok(Some(split_gradient_among_ties(ty, count, k)));
        }
        let Some(backward) = self.row.backward else {
            return Ok(derive(&self.expr(ty, count)?, count, k));
        };
        let mut b = Builder::new();
        // The same load slots as in `derive`: the input, the result, and the gradient of the result.
        let (x, g) = (b.load(0, ty), b.load(2, ty));
        let result = backward(&mut b, x, g, &self.attrs)?;
        Ok(Some(b.finish(&[result])))
    }
}

/// Returns the gradient of input `k` of an operator that selects one of several inputs. All inputs that equal the
/// result get the same share. (For two inputs `derive` gives the same result in fewer operations.)
fn split_gradient_among_ties(ty: Type, count: usize, k: usize) -> Expr {
    let mut b = Builder::new();
    let (y, g) = (b.load(count, ty), b.load(count + 1, ty));
    let (zero, one) = (b.constant(ty, 0.0), b.constant(ty, 1.0));
    let mut ties = zero;
    let mut is_extreme = None;
    for slot in 0..count {
        let x = b.load(slot, ty);
        let chosen = b.compare(CompareOp::Eq, x, y);
        let tie = b.select(chosen, one, zero);
        ties = b.add(ties, tie);
        if slot == k {
            is_extreme = Some(chosen);
        }
    }
    let share = b.div(g, ties);
    let result = is_extreme.map_or(zero, |mask| b.select(mask, share, zero));
    b.finish(&[result])
}

impl Op for Elementwise {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let count = self.count(cx.node());
        cx.check_arity(count.max(1), count.max(1), 1)?;
        if count > MAX_OPERANDS {
            return Err(OpError::unsupported(format!("expected at most {MAX_OPERANDS} inputs, got {count}")));
        }
        for k in 0..count {
            cx.expect_dtype(k, self.row.accepted_types.describe(), |dtype| {
                self.row.accepted_types.accepts(dtype)
            })?;
        }
        let dtype = cx.expect_same_dtype(0..count)?;
        // Invalid attributes are reported here, not during the first run.
        self.expr(Type::of(dtype), count)?;
        let shape = cx.broadcast(0..count)?;
        // Unknown sizes may broadcast.
        let differ = |(a, b): (&Dim, &Dim)| matches!((a.known(), b.known()), (Some(a), Some(b)) if a != b);
        if self.row.broadcast_to_first
            && let (Some(broadcast_shape), Some(first)) = (&shape, cx.shape(0))
            && (broadcast_shape.rank() != first.rank()
                || broadcast_shape.iter().zip(first.iter()).any(differ))
        {
            let other_shapes: Vec<String> =
                (1..count).filter_map(|k| cx.shape(k)).map(ToString::to_string).collect();
            return Err(OpError::invalid(format!(
                "shape {} does not broadcast to {first}, the shape of input 0",
                other_shapes.join(" or ")
            )));
        }
        let shape = if self.row.broadcast_to_first { cx.shape(0).cloned() } else { shape };
        cx.set_output(0, if self.row.bool_output { DType::Bool } else { dtype }, shape);
        crate::support::size_arithmetic::infer_size_arithmetic(cx, self.row.name);
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        if self.row.traits.has(Traits::ZERO_DERIVATIVE) {
            return Ok(());
        }
        let count = self.count(cx.node());
        let inputs: Vec<_> = (0..count).map(|k| cx.input(k)).collect::<Result<_, _>>()?;
        let y = cx.output(0, "y");
        let dtype = cx.dtype(y)?;
        if let Some(grad_op) = self.row.grad_op
            && let Some(op) = grad_op(&self.attrs)?
        {
            let operand = if op.reads_output { y } else { inputs[0] };
            let gradient = cx.add_in("com.microsoft", op.name, &[g, operand], op.attrs);
            cx.set_grad(0, gradient);
            return Ok(());
        }
        // Integers of quantized tensors are differentiated as floats.
        let wide = gradient_dtype(dtype);
        for k in 0..count {
            if !cx.needs_grad(k) {
                continue;
            }
            let Some(derivative) = self.derivative(Type::of(wide), count, k)? else { continue };
            let mut loads: Vec<ValueId> = Vec::with_capacity(count + 2);
            for &value in inputs.iter().chain([&y]) {
                loads.push(cast(cx, value, dtype, wide));
            }
            loads.push(g);
            let gradient = cx.emit_as_onnx(&derivative, &loads, wide)?;
            let gradient = cx.sum_to(gradient, inputs[k], y)?;
            cx.set_grad(k, gradient);
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let count = self.count(cx.node());
        let mut nest = cx.nest(&cx.out_dims(0), 0);
        let mut loads = Vec::with_capacity(count);
        for k in 0..count {
            let buffer = cx.input(k);
            loads.push(nest.load_broadcast(buffer, cx.dtype(k), &cx.dims(k)));
        }
        let result = (self.row.expr)(&mut nest.b, &loads, &self.attrs)?;
        let output = cx.output(0);
        nest.store_contiguous(cx, output, result);
        cx.emit(nest.instruction())
    }
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Elementwise { row: find_row(&node.domain, &node.op)?, attrs: node.attrs.clone() }))
}

/// Decomposes an operator of the table into operators of `ai.onnx`.
fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (node, attrs) = (rw.node(), rw.attrs().clone());
    let row = find_row(&node.domain, &node.op)?;
    let inputs: Vec<_> = (0..row.inputs).map(|k| rw.required_input(k)).collect::<Result<_, _>>()?;
    let dtype = rw.dtype(inputs[0]).ok_or_else(|| OpError::invalid("the type of input 0 is not known"))?;
    let expr = Elementwise { row, attrs }.expr(Type::of(dtype), row.inputs)?;
    let result = emit_as_onnx(&expr, dtype, rw.patch().1, |_, slot| inputs[slot])?;
    rw.replace_output(0, result);
    Ok(())
}

/// Downgrades Gelu. Before opset 20 `ai.onnx` has no Gelu, so it becomes an operator of ONNX Runtime.
fn downgrade_gelu(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() < 20 {
        let op = if rw.attrs().string("approximate")? == Some("tanh") { "FastGelu" } else { "Gelu" };
        rw.emit_op("com.microsoft", op, &[rw.input(0)], Attrs::new());
    }
    Ok(())
}

/// Upgrades `Gelu`, `FastGelu` and `BiasGelu` of ONNX Runtime to `Gelu` of `ai.onnx`. An optional bias is added first.
fn upgrade_microsoft_gelu(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let attrs =
        if &*rw.node().op == "FastGelu" { Attrs::new().with("approximate", "tanh") } else { Attrs::new() };
    let x = rw.required_input(0)?;
    let x = match rw.input(1) {
        Some(bias) => rw.add("Add", &[x, bias], Attrs::new()),
        None => x,
    };
    rw.emit_op("", "Gelu", &[Some(x)], attrs);
    Ok(())
}

/// Downgrades comparisons. Before opset 9, Less and Greater accept only floats: integers are compared as float64.
/// Before opset 11, Equal accepts only integers and bool: floats are equal if neither is less and neither is NaN.
fn downgrade_comparison(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (a, b) = (rw.required_input(0)?, rw.required_input(1)?);
    // The values of a comparison that a rewrite created have no type yet. Such a comparison is already valid.
    let Some(dtype) = rw.dtype(a).or(rw.dtype(b)) else { return Ok(()) };
    let equal = &*rw.node().op == "Equal";
    if equal && dtype.is_float() && rw.version() < 11 {
        let result = equal_floats(rw, a, b, dtype);
        rw.replace_output(0, result);
    } else if !equal && !dtype.is_float() && rw.version() < 9 {
        let cast = Attrs::new().with("to", i64::from(DType::F64.to_onnx()));
        let (x, y) = (rw.add("Cast", &[a], cast.clone()), rw.add("Cast", &[b], cast));
        rw.emit_same_op(&[Some(x), Some(y)], Attrs::new());
    }
    Ok(())
}

/// Downgrades LessOrEqual and GreaterOrEqual. Before opset 12, each becomes a strict comparison or Equal.
fn downgrade_non_strict_comparison(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() < 12 {
        let (a, b) = (rw.required_input(0)?, rw.required_input(1)?);
        let strict = if &*rw.node().op == "LessOrEqual" { "Less" } else { "Greater" };
        let (differs, equal) =
            (rw.add(strict, &[a, b], Attrs::new()), rw.add("Equal", &[a, b], Attrs::new()));
        let either = rw.add("Or", &[differs, equal], Attrs::new());
        rw.replace_output(0, either);
    }
    Ok(())
}

/// Returns the truth value of `a == b` for floats, in operators of opset 7. NaN equals nothing.
fn equal_floats(rw: &mut Rewrite<'_>, a: ValueId, b: ValueId, dtype: DType) -> ValueId {
    let (less, greater) = (rw.add("Less", &[a, b], Attrs::new()), rw.add("Greater", &[a, b], Attrs::new()));
    let differ = rw.add("Or", &[less, greater], Attrs::new());
    let mut result = rw.add("Not", &[differ], Attrs::new());
    for value in [a, b] {
        if rw.constant_of(value).is_some_and(|tensor| !tensor.to_f64().iter().any(|x| x.is_nan())) {
            continue;
        }
        // Every number is below 1 or above -1; NaN is neither.
        let (one, minus) = (Tensor::scalar(dtype, 1.0), Tensor::scalar(dtype, -1.0));
        let (one, minus) = (rw.constant("one", one), rw.constant("minus_one", minus));
        let (below, above) =
            (rw.add("Less", &[value, one], Attrs::new()), rw.add("Greater", &[value, minus], Attrs::new()));
        let is_number = rw.add("Or", &[below, above], Attrs::new());
        result = rw.add("And", &[result, is_number], Attrs::new());
    }
    result
}

/// Downgrades Sign. Before opset 9 it becomes `(x > 0) - (x < 0)`.
fn downgrade_sign(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let x = rw.required_input(0)?;
    let Some(dtype) = rw.dtype(x).filter(|dtype| rw.version() < 9 && dtype.is_float()) else { return Ok(()) };
    let zero = rw.constant("zero", Tensor::scalar(dtype, 0.0));
    let [above, below] = ["Greater", "Less"].map(|op| {
        let flag = rw.add(op, &[x, zero], Attrs::new());
        rw.add("Cast", &[flag], Attrs::new().with("to", i64::from(dtype.to_onnx())))
    });
    let sign = rw.add("Sub", &[above, below], Attrs::new());
    rw.replace_output(0, sign);
    Ok(())
}

/// Swish of input 0 times input 1, which has the same shape.
struct SwiGlu;

impl Op for SwiGlu {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 1)?;
        cx.expect_dtype(0, "a float type", DType::is_float)?;
        let dtype = cx.expect_same_dtype(0..2)?;
        if let (Some(gate), Some(value)) = (cx.shape(0), cx.shape(1)) {
            let differ =
                |(a, b): (&Dim, &Dim)| matches!((a.known(), b.known()), (Some(a), Some(b)) if a != b);
            if gate.rank() != value.rank() || gate.iter().zip(value.iter()).any(differ) {
                return Err(OpError::invalid(format!(
                    "the shapes of the inputs must be equal, got {gate} and {value}"
                )));
            }
        }
        cx.set_output(0, dtype, cx.shape(0).or(cx.shape(1)).cloned());
        Ok(())
    }
}

fn decompose_swi_glu(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (gate, value) = (rw.required_input(0)?, rw.required_input(1)?);
    let weight = rw.add("Swish", &[gate], rw.attrs().clone());
    let result = rw.add("Mul", &[weight, value], Attrs::new());
    rw.replace_output(0, result);
    Ok(())
}

pub(crate) fn definitions() -> Vec<Definition> {
    let mut all: Vec<Definition> = all_rows()
        .map(|row| {
            let definition = Definition::new(row.domain, row.name, row.since, build)
                .elementwise_row()
                .class(row.class)
                .traits(row.traits)
                .inputs_without_gradient(row.inputs_without_gradient);
            match row.name {
                "BitShift" => definition.sample(|_| Sample::of(Attrs::new().with("direction", "LEFT"))),
                "Gelu" => definition.downgrade(downgrade_gelu).decomposed_before(20, decompose),
                "PRelu" => definition.weights(&[1]),
                "Sign" => definition.downgrade(downgrade_sign),
                "Less" | "Greater" | "Equal" => definition.downgrade(downgrade_comparison),
                "LessOrEqual" | "GreaterOrEqual" => definition.downgrade(downgrade_non_strict_comparison),
                _ if row.domain == "com.microsoft" => definition.decompose(decompose),
                _ => definition,
            }
        })
        .collect();
    let swi_glu = Definition::new("", "SwiGLU", &[28], |_, node| {
        node.attrs.float("alpha")?;
        Ok(Box::new(SwiGlu))
    });
    all.push(swi_glu.composition(decompose_swi_glu));
    // These operators become Gelu of `ai.onnx` when a model is read. Models have version 1, so the invented version 2
    // makes every node an old one that is upgraded.
    for name in ["Gelu", "FastGelu", "BiasGelu"] {
        let definition = Definition::new("com.microsoft", name, &[1, 2], build_rewritten_on_read);
        all.push(definition.always_rewritten(upgrade_microsoft_gelu));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::passes;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, assert_close, check_downgrade, check_gradients, f64s, generic_tensor, gradient_graph,
        one_node_graph, run, run_node,
    };

    const INF: f64 = f64::INFINITY;
    const NAN: f64 = f64::NAN;

    fn graph_of(op: &str, inputs: &[&Tensor], attrs: Attrs) -> Graph {
        let ports: Vec<Option<&Tensor>> = inputs.iter().copied().map(Some).collect();
        one_node_graph(NEWEST_OPSET, ("", op), &ports, 1, attrs).expect("valid")
    }

    fn run_op(op: &str, inputs: &[&Tensor], attrs: Attrs) -> Tensor {
        let ports: Vec<Option<&Tensor>> = inputs.iter().copied().map(Some).collect();
        run_node(("", op), &ports, 1, attrs).expect("it runs").remove(0)
    }

    /// Returns the gradients of all inputs, for a gradient of ones.
    fn gradients_for_ones(op: &str, inputs: &[&Tensor], attrs: Attrs) -> Vec<Vec<f64>> {
        let graph = graph_of(op, inputs, attrs);
        let dims = graph.value(graph.outputs[0]).ty.shape().and_then(ortrain_graph::Shape::concrete);
        let ones = Tensor::filled(DType::F64, &dims.expect("known"), 1.0);
        let all: Vec<usize> = (0..inputs.len()).collect();
        let args: Vec<Tensor> = inputs.iter().copied().cloned().collect();
        let got = run(&gradient_graph(&graph, &[Some(ones)], &all), &args).expect("it runs");
        got.iter().map(Tensor::to_f64).collect()
    }

    #[test]
    fn tied_inputs_share_gradient() {
        let (a, b, c) =
            (f64s(&[4], &[1.0, 2.0, 3.0, INF]), f64s(&[4], &[1.0, 5.0, 3.0, INF]), f64s(&[1], &[3.0]));
        let third = 1.0 / 3.0;
        let got = gradients_for_ones("Max", &[&a, &b, &c], Attrs::new());
        assert_eq!(got, [vec![0.0, 0.0, third, 0.5], vec![0.0, 1.0, third, 0.5], vec![1.0 + third]]);
        let got = gradients_for_ones("Min", &[&a, &b, &c], Attrs::new());
        assert_eq!(got, [vec![0.5, 1.0, third, 0.0], vec![0.5, 0.0, third, 0.0], vec![third + 1.0]]);
        assert_eq!(gradients_for_ones("Max", &[&a, &b], Attrs::new())[0], [0.5, 0.0, 0.5, 0.5]);
        for op in ["Max", "Min", "Mean", "Sum"] {
            assert_eq!(gradients_for_ones(op, &[&a], Attrs::new()), [vec![1.0; 4]], "{op} of one is itself");
        }
        for op in ["Max", "Min", "Mean"] {
            let inputs = [generic_tensor(&[2, 3], 1), generic_tensor(&[3], 2), generic_tensor(&[2, 1], 3)];
            let graph = graph_of(op, &[&inputs[0], &inputs[1], &inputs[2]], Attrs::new());
            check_gradients(&graph, &inputs, &[0, 1, 2], &[0]);
            let mut gradient = gradient_graph(&graph, &[Some(generic_tensor(&[2, 3], 4))], &[0, 1, 2]);
            passes::infer::infer(&mut gradient).expect("valid");
            check_downgrade(&gradient, &inputs, 8);
        }
    }

    #[test]
    fn round_and_ceil() {
        let x = [-2.5, -1.5, -0.5, -0.3, 0.0, 0.5, 1.5, 2.5, 2.6, 1e18, INF, -INF, NAN];
        let expected_round = [-2.0, -2.0, 0.0, 0.0, 0.0, 0.0, 2.0, 2.0, 3.0, 1e18, INF, -INF, NAN];
        let expected_ceil = [-2.0, -1.0, 0.0, 0.0, 0.0, 1.0, 2.0, 3.0, 3.0, 1e18, INF, -INF, NAN];
        for dtype in [DType::F64, DType::F32] {
            let x = Tensor::from_f64(dtype, vec![x.len()], &x);
            assert_close(
                &run_op("Round", &[&x], Attrs::new()),
                &Tensor::from_f64(dtype, vec![13], &expected_round),
                0.0,
            );
            assert_close(
                &run_op("Ceil", &[&x], Attrs::new()),
                &Tensor::from_f64(dtype, vec![13], &expected_ceil),
                0.0,
            );
        }
        let near = Tensor::f32(&[3], &[0.499_999_97, -0.499_999_97, 8_388_609.0]);
        assert_eq!(run_op("Round", &[&near], Attrs::new()).to_f64(), [0.0, 0.0, 8_388_609.0]);
        let signed = Tensor::f32(&[5], &[-0.5, -0.3, -0.0, 0.0, 0.5]);
        let rounded = run_op("Round", &[&signed], Attrs::new()).to_f64();
        assert_eq!(
            rounded.iter().map(|x| x.is_sign_negative()).collect::<Vec<_>>(),
            [true, true, true, false, false]
        );
    }

    #[test]
    fn is_nan_and_is_inf() {
        let x = f64s(&[4], &[1.0, NAN, INF, -INF]);
        assert_eq!(run_op("IsNaN", &[&x], Attrs::new()).to_f64(), [0.0, 1.0, 0.0, 0.0]);
        let only = |name: &str| Attrs::new().with(name, 0i64);
        assert_eq!(run_op("IsInf", &[&x], Attrs::new()).to_f64(), [0.0, 0.0, 1.0, 1.0]);
        assert_eq!(run_op("IsInf", &[&x], only("detect_negative")).to_f64(), [0.0, 0.0, 1.0, 0.0]);
        assert_eq!(run_op("IsInf", &[&x], only("detect_positive")).to_f64(), [0.0, 0.0, 0.0, 1.0]);
    }

    #[test]
    fn bits_of_every_integer_type() {
        let byte = |values: &[u8]| Tensor::from_slice(DType::U8, &[values.len()], values);
        let (a, b) = (byte(&[0b1100, 0xff]), byte(&[0b1010, 0x0f]));
        assert_eq!(run_op("BitwiseAnd", &[&a, &b], Attrs::new()), byte(&[0b1000, 0x0f]));
        assert_eq!(run_op("BitwiseOr", &[&a, &b], Attrs::new()), byte(&[0b1110, 0xff]));
        assert_eq!(run_op("BitwiseXor", &[&a, &b], Attrs::new()), byte(&[0b0110, 0xf0]));
        assert_eq!(run_op("BitwiseNot", &[&a], Attrs::new()), byte(&[0xf3, 0]));
        let wide = Tensor::i64(&[2], &[i64::MIN, -1]);
        assert_eq!(run_op("BitwiseNot", &[&wide], Attrs::new()).to_i64(), Some(vec![i64::MAX, 0]));
        assert!(run_node(("", "BitwiseNot"), &[Some(&generic_tensor(&[2], 1))], 1, Attrs::new()).is_err());
    }

    #[test]
    fn shifts_of_signed_and_large_amounts() {
        let direction = |name: &str| Attrs::new().with("direction", name);
        let signed = |values: &[i8]| Tensor::from_slice(DType::I8, &[values.len()], values);
        let (x, by) = (signed(&[-128, -1, 127, 5, -5, 3]), signed(&[1, 7, 3, 8, 9, -1]));
        assert_eq!(run_op("BitShift", &[&x, &by], direction("RIGHT")), signed(&[-64, -1, 15, 0, -1, 0]));
        assert_eq!(run_op("BitShift", &[&x, &by], direction("LEFT")), signed(&[0, -128, -8, 0, 0, 0]));
        let wide = |values: &[u64]| Tensor::from_slice(DType::U64, &[values.len()], values);
        let (x, by) = (wide(&[u64::MAX, 1, u64::MAX]), wide(&[63, 63, 64]));
        assert_eq!(run_op("BitShift", &[&x, &by], direction("RIGHT")), wide(&[1, 0, 0]));
        assert_eq!(run_op("BitShift", &[&x, &by], direction("LEFT")), wide(&[1 << 63, 1 << 63, 0]));
        for attrs in [Attrs::new(), direction("UP")] {
            let failure = run_node(("", "BitShift"), &[Some(&x), Some(&by)], 1, attrs).expect_err("refused");
            let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
            assert!(error.to_string().contains("direction"), "{error}");
        }
    }

    #[test]
    fn mod_with_and_without_fmod() {
        let (a, b) =
            (f64s(&[6], &[5.3, -5.3, 5.3, 0.0, 3.0, INF]), f64s(&[6], &[2.0, 2.0, -2.0, -2.0, INF, 2.0]));
        let fmod = Attrs::new().with("fmod", 1i64);
        let close = |got: Tensor, expected: [f64; 6]| assert_close(&got, &f64s(&[6], &expected), 1e-15);
        close(run_op("Mod", &[&a, &b], Attrs::new()), [1.3, 0.7, -0.7, 0.0, 3.0, NAN]);
        close(run_op("Mod", &[&a, &b], fmod.clone()), [1.3, -1.3, 1.3, 0.0, 3.0, NAN]);
        let (a, b) = (f64s(&[3], &[5.3, -5.3, 5.3]), f64s(&[3], &[2.0, 2.0, -2.0]));
        for (attrs, quotients) in [(Attrs::new(), [-2.0, 3.0, 3.0]), (fmod, [-2.0, 2.0, 2.0])] {
            let got = gradients_for_ones("Mod", &[&a, &b], attrs);
            assert_eq!(got[0], [1.0; 3]);
            assert_close(&f64s(&[3], &got[1]), &f64s(&[3], &quotients), 1e-14);
        }
    }

    #[test]
    fn reciprocal_gradient_at_zero_is_infinite() {
        let x = f64s(&[2], &[0.0, 4.0]);
        assert_eq!(gradients_for_ones("Reciprocal", &[&x], Attrs::new()), [vec![-INF, -0.0625]]);
    }

    #[test]
    fn swi_glu_gradients() {
        let inputs = [generic_tensor(&[2, 3], 1), generic_tensor(&[2, 3], 2)];
        let attrs = Attrs::new().with("alpha", 0.7f32);
        let graph = graph_of("SwiGLU", &[&inputs[0], &inputs[1]], attrs);
        check_gradients(&graph, &inputs, &[0, 1], &[0]);
        let failure =
            run_node(("", "SwiGLU"), &[Some(&inputs[0]), Some(&generic_tensor(&[3], 1))], 1, Attrs::new());
        let Failure::Prepare(error) = failure.expect_err("refused") else { panic!("prepared") };
        assert!(error.to_string().contains("the shapes of the inputs must be equal"), "{error}");
    }
}
