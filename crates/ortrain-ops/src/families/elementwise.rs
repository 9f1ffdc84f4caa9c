//! Element-wise operators: one row each.
//!
//! A row is a name, the versions of its schema, and an expression. The gradient is the symbolic derivative of the
//! expression, the lowering a map. Inputs broadcast by the rules of ONNX ("multidirectional broadcasting").
//! Sources: the operator pages of ONNX, opset 7 to 28; `com.microsoft` contrib operators of ONNX Runtime.

use ortrain_expr::{BinaryOp, Builder, CompareOp, Expr, Reg, Type, UnaryOp, derive};
use ortrain_graph::{Attrs, DType, Graph, Node, Tensor, ValueId};

use crate::OpError;
use crate::grad::Grad;
use crate::infer::Infer;
use crate::lower::Lower;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::spell::spell;

/// What an element-wise operator takes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Takes {
    Float,
    Number,
    Bool,
    Any,
}

impl Takes {
    fn accepts(self, dtype: DType) -> bool {
        match self {
            Takes::Float => dtype.is_float(),
            Takes::Number => dtype != DType::Bool,
            Takes::Bool => dtype == DType::Bool,
            Takes::Any => true,
        }
    }

    fn describe(self) -> &'static str {
        match self {
            Takes::Float => "a float type",
            Takes::Number => "a number type",
            Takes::Bool => "bool",
            Takes::Any => "any type",
        }
    }
}

/// A row: one element-wise operator.
pub(crate) struct Row {
    domain: &'static str,
    name: &'static str,
    since: &'static [i64],
    inputs: usize,
    takes: Takes,
    /// Whether the result is `bool` whatever the inputs are.
    gives_bool: bool,
    /// The expression of the inputs, all of one type.
    expr: fn(&mut Builder, &[Reg], &Attrs) -> Result<Reg, OpError>,
    /// A gradient operator of ONNX Runtime: domain `com.microsoft`, inputs `dY` and then input (`false`) or output
    /// (`true`) of the forward node.
    grad_op: Option<(&'static str, bool)>,
    /// Whether the derivative is zero almost everywhere.
    flat: bool,
}

const fn row(
    name: &'static str,
    since: &'static [i64],
    inputs: usize,
    takes: Takes,
    expr: fn(&mut Builder, &[Reg], &Attrs) -> Result<Reg, OpError>,
) -> Row {
    Row { domain: "", name, since, inputs, takes, gives_bool: false, expr, grad_op: None, flat: false }
}

impl Row {
    const fn grad_op(mut self, name: &'static str, of_output: bool) -> Row {
        self.grad_op = Some((name, of_output));
        self
    }

    const fn gives_bool(mut self) -> Row {
        self.gives_bool = true;
        self.flat = true;
        self
    }

    const fn flat(mut self) -> Row {
        self.flat = true;
        self
    }

    const fn microsoft(mut self) -> Row {
        self.domain = "com.microsoft";
        self
    }
}

macro_rules! unary {
    ($op:ident) => {
        |b, x, _| Ok(b.unary(UnaryOp::$op, x[0]))
    };
}

macro_rules! binary {
    ($op:ident) => {
        |b, x, _| Ok(b.binary(BinaryOp::$op, x[0], x[1]))
    };
}

/// `sqrt(1/2)`.
const SQRT_HALF: f64 = std::f64::consts::FRAC_1_SQRT_2;
/// `sqrt(2/pi)`, the scale inside the tanh form of Gelu.
const GELU_TANH_SCALE: f64 = 0.797_884_560_802_865_4;
/// The cubic coefficient of the tanh form of Gelu (Hendrycks and Gimpel, 2016).
const GELU_TANH_CUBIC: f64 = 0.044_715;
/// `1/sqrt(2 pi)`, the normal density at 0.
const NORMAL_DENSITY: f64 = 0.398_942_280_401_432_7;

/// `x * (1 + erf(x / sqrt 2)) / 2`.
fn gelu_erf(b: &mut Builder, x: Reg) -> Reg {
    let ty = b.ty(x);
    let (scale, one, half) = (b.constant(ty, SQRT_HALF), b.constant(ty, 1.0), b.constant(ty, 0.5));
    let scaled = b.mul(x, scale);
    let erf = b.unary(UnaryOp::Erf, scaled);
    let sum = b.add(erf, one);
    let cdf = b.mul(sum, half);
    b.mul(x, cdf)
}

/// `tanh(sqrt(2/pi) (x + 0.044715 x^3))`.
fn gelu_inner_tanh(b: &mut Builder, x: Reg) -> Reg {
    let ty = b.ty(x);
    let (scale, cubic, one) =
        (b.constant(ty, GELU_TANH_SCALE), b.constant(ty, GELU_TANH_CUBIC), b.constant(ty, 1.0));
    let square = b.mul(x, x);
    let bent = b.mul(square, cubic);
    let factor = b.add(bent, one);
    let inner = b.mul(x, factor);
    let scaled = b.mul(inner, scale);
    b.unary(UnaryOp::Tanh, scaled)
}

fn gelu_tanh(b: &mut Builder, x: Reg) -> Reg {
    let ty = b.ty(x);
    let (one, half) = (b.constant(ty, 1.0), b.constant(ty, 0.5));
    let tanh = gelu_inner_tanh(b, x);
    let sum = b.add(tanh, one);
    let weight = b.mul(sum, half);
    b.mul(x, weight)
}

fn gelu(b: &mut Builder, x: &[Reg], attrs: &Attrs) -> Result<Reg, OpError> {
    match attrs.string("approximate")?.unwrap_or("none") {
        "none" => Ok(gelu_erf(b, x[0])),
        "tanh" => Ok(gelu_tanh(b, x[0])),
        other => {
            Err(OpError::invalid(format!("approximate is {other:?}; \"none\" and \"tanh\" are defined")))
        }
    }
}

fn gelu_grad(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let (g, x) = (x[0], x[1]);
    let ty = b.ty(x);
    let (scale, one, half) = (b.constant(ty, SQRT_HALF), b.constant(ty, 1.0), b.constant(ty, 0.5));
    let scaled = b.mul(x, scale);
    let erf = b.unary(UnaryOp::Erf, scaled);
    let sum = b.add(erf, one);
    let cdf = b.mul(sum, half);
    let square = b.mul(scaled, scaled);
    let minus = b.unary(UnaryOp::Neg, square);
    let bell = b.unary(UnaryOp::Exp, minus);
    let density = b.constant(ty, NORMAL_DENSITY);
    let pdf = b.mul(bell, density);
    let slope = b.mul(x, pdf);
    let total = b.add(cdf, slope);
    Ok(b.mul(g, total))
}

fn fast_gelu_grad(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let (g, x) = (x[0], x[1]);
    let ty = b.ty(x);
    let (one, half) = (b.constant(ty, 1.0), b.constant(ty, 0.5));
    let (scale, cubic) = (b.constant(ty, GELU_TANH_SCALE), b.constant(ty, 3.0 * GELU_TANH_CUBIC));
    let tanh = gelu_inner_tanh(b, x);
    let square = b.mul(x, x);
    let bent = b.mul(square, cubic);
    let factor = b.add(bent, one);
    let inner = b.mul(scale, factor);
    let tanh_square = b.mul(tanh, tanh);
    let sech = b.sub(one, tanh_square);
    let steep = b.mul(sech, inner);
    let slope = b.mul(x, steep);
    let level = b.add(one, tanh);
    let total = b.add(level, slope);
    let halved = b.mul(total, half);
    Ok(b.mul(g, halved))
}

fn relu(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let zero = b.constant(b.ty(x[0]), 0.0);
    // Written so that NaN passes.
    let negative = b.compare(CompareOp::Lt, x[0], zero);
    Ok(b.select(negative, zero, x[0]))
}

fn relu_grad(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let zero = b.constant(b.ty(x[1]), 0.0);
    let positive = b.compare(CompareOp::Lt, zero, x[1]);
    Ok(b.select(positive, x[0], zero))
}

fn sigmoid_grad(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let one = b.constant(b.ty(x[1]), 1.0);
    let rest = b.sub(one, x[1]);
    let slope = b.mul(x[1], rest);
    Ok(b.mul(x[0], slope))
}

fn tanh_grad(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let one = b.constant(b.ty(x[1]), 1.0);
    let square = b.mul(x[1], x[1]);
    let slope = b.sub(one, square);
    Ok(b.mul(x[0], slope))
}

fn greater(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    Ok(b.compare(CompareOp::Lt, x[1], x[0]))
}

fn modulo(b: &mut Builder, x: &[Reg], attrs: &Attrs) -> Result<Reg, OpError> {
    let ty = b.ty(x[0]);
    let rest = b.binary(BinaryOp::Rem, x[0], x[1]);
    if attrs.int("fmod")?.unwrap_or(0) == 1 {
        return Ok(rest);
    }
    if ty.is_float() {
        return Err(OpError::invalid("fmod must be 1 for float types"));
    }
    // The sign of the divisor, as in Python.
    let zero = b.constant(ty, 0.0);
    let uneven = b.compare(CompareOp::Eq, rest, zero);
    let (rest_negative, divisor_negative) =
        (b.compare(CompareOp::Lt, rest, zero), b.compare(CompareOp::Lt, x[1], zero));
    let differ = b.binary(BinaryOp::Xor, rest_negative, divisor_negative);
    let shifted = b.add(rest, x[1]);
    let signed = b.select(differ, shifted, rest);
    Ok(b.select(uneven, rest, signed))
}

fn clamped(op: BinaryOp) -> impl Fn(&mut Builder, &[Reg]) -> Reg {
    move |b, x| {
        let mut all = x[0];
        for &other in &x[1..] {
            all = b.binary(op, all, other);
        }
        all
    }
}

/// The most inputs of a variadic operator: each is a load of one expression.
const MOST_OPERANDS: usize = 1024;

/// Any number of inputs.
const VARIADIC: usize = usize::MAX;

/// The rows.
#[rustfmt::skip]
static ROWS: &[Row] = &[
    row("Add", &[7, 13, 14], 2, Takes::Number, binary!(Add)),
    row("Sub", &[7, 13, 14], 2, Takes::Number, binary!(Sub)),
    row("Mul", &[7, 13, 14], 2, Takes::Number, binary!(Mul)),
    row("Div", &[7, 13, 14], 2, Takes::Number, binary!(Div)),
    row("Mod", &[10, 13], 2, Takes::Number, modulo),
    row("Neg", &[6, 13], 1, Takes::Number, unary!(Neg)),
    row("Abs", &[6, 13], 1, Takes::Number, unary!(Abs)),
    row("Sign", &[9, 13], 1, Takes::Number, unary!(Sign)).flat(),
    row("Floor", &[6, 13], 1, Takes::Float, unary!(Floor)).flat(),
    row("Exp", &[6, 13], 1, Takes::Float, unary!(Exp)),
    row("Log", &[6, 13], 1, Takes::Float, unary!(Log)),
    row("Sqrt", &[6, 13], 1, Takes::Float, unary!(Sqrt)),
    row("Erf", &[9, 13], 1, Takes::Float, unary!(Erf)),
    row("Relu", &[6, 13, 14], 1, Takes::Number, relu).grad_op("ReluGrad", true),
    row("Sigmoid", &[6, 13], 1, Takes::Float, unary!(Sigmoid)).grad_op("SigmoidGrad", true),
    row("Tanh", &[6, 13], 1, Takes::Float, unary!(Tanh)).grad_op("TanhGrad", true),
    row("Gelu", &[20], 1, Takes::Float, gelu).grad_op("GeluGrad", false),
    row("Min", &[6, 8, 12, 13], VARIADIC, Takes::Number, |b, x, _| Ok(clamped(BinaryOp::Min)(b, x))),
    row("Max", &[6, 8, 12, 13], VARIADIC, Takes::Number, |b, x, _| Ok(clamped(BinaryOp::Max)(b, x))),
    row("Sum", &[6, 8, 13], VARIADIC, Takes::Float, |b, x, _| Ok(clamped(BinaryOp::Add)(b, x))),
    row("And", &[7], 2, Takes::Bool, binary!(And)).gives_bool(),
    row("Or", &[7], 2, Takes::Bool, binary!(Or)).gives_bool(),
    row("Xor", &[7], 2, Takes::Bool, binary!(Xor)).gives_bool(),
    row("Not", &[1], 1, Takes::Bool, unary!(Not)).gives_bool(),
    row("Equal", &[7, 11, 13, 19], 2, Takes::Any, |b, x, _| Ok(b.compare(CompareOp::Eq, x[0], x[1]))).gives_bool(),
    row("Less", &[7, 9, 13], 2, Takes::Number, |b, x, _| Ok(b.compare(CompareOp::Lt, x[0], x[1]))).gives_bool(),
    row("Greater", &[7, 9, 13], 2, Takes::Number, greater).gives_bool(),
    row("ReluGrad", &[1], 2, Takes::Float, relu_grad).microsoft(),
    row("SigmoidGrad", &[1], 2, Takes::Float, sigmoid_grad).microsoft(),
    row("TanhGrad", &[1], 2, Takes::Float, tanh_grad).microsoft(),
    row("GeluGrad", &[1], 2, Takes::Float, gelu_grad).microsoft(),
    row("FastGeluGrad", &[1], 2, Takes::Float, fast_gelu_grad).microsoft(),
];

struct Elementwise {
    row: &'static Row,
    attrs: Attrs,
}

impl Elementwise {
    fn count(&self, node: &Node) -> usize {
        if self.row.inputs == VARIADIC { node.inputs.len() } else { self.row.inputs }
    }

    /// The expression for inputs of a compute type.
    fn expr(&self, ty: Type, count: usize) -> Result<Expr, OpError> {
        let mut b = Builder::new();
        let loads: Vec<Reg> = (0..count).map(|slot| b.load(slot, ty)).collect();
        let result = (self.row.expr)(&mut b, &loads, &self.attrs)?;
        Ok(b.finish(&[result]))
    }
}

impl Op for Elementwise {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let count = self.count(cx.node());
        cx.arity(count.max(1), count.max(1), 1)?;
        if count > MOST_OPERANDS {
            return Err(OpError::unsupported(format!("it has {count} inputs; {MOST_OPERANDS} are the most")));
        }
        for k in 0..count {
            cx.dtype_where(k, self.row.takes.describe(), |dtype| self.row.takes.accepts(dtype))?;
        }
        let dtype = cx.same_dtype(0..count)?;
        // Attributes that contradict the definition are found here and not at the first run.
        self.expr(Type::of(dtype), count)?;
        let shape = cx.broadcast(0..count)?;
        cx.output(0, if self.row.gives_bool { DType::Bool } else { dtype }, shape);
        crate::families::shape::arithmetic_on_sizes(cx, self.row.name);
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        if self.row.flat {
            return Ok(());
        }
        let count = self.count(cx.node());
        let inputs: Vec<_> = (0..count).map(|k| cx.input(k)).collect::<Result<_, _>>()?;
        let y = cx.output(0, "y");
        let dtype = cx.dtype(y)?;
        if let Some((name, of_output)) = self.row.grad_op {
            let name = if self.attrs.string("approximate")? == Some("tanh") { "FastGeluGrad" } else { name };
            let seen = if of_output { y } else { inputs[0] };
            let gradient = cx.add_in("com.microsoft", name, &[g, seen], Attrs::new());
            cx.give(0, gradient);
            return Ok(());
        }
        let expr = self.expr(Type::of(dtype), count)?;
        for k in 0..count {
            if !cx.wants(k) {
                continue;
            }
            let Some(derivative) = derive(&expr, count, k) else { continue };
            let mut loads = inputs.clone();
            loads.extend([y, g]);
            let gradient = cx.spell(&derivative, &loads, dtype)?;
            let gradient = cx.sum_to(gradient, inputs[k], y)?;
            cx.give(k, gradient);
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
        nest.store_whole(cx, output, result);
        cx.step(nest.map())
    }
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let row = ROWS.iter().find(|row| *row.name == *node.op && *row.domain == *node.domain);
    let row = row.ok_or_else(|| OpError::unsupported("it is not in the table of element-wise operators"))?;
    Ok(Box::new(Elementwise { row, attrs: node.attrs.clone() }))
}

/// The expression of a gradient operator, spelled in `ai.onnx`.
fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (node, attrs) = (rw.node(), rw.attrs().clone());
    let row = ROWS.iter().find(|row| *row.name == *node.op && *row.domain == *node.domain);
    let row = row.ok_or_else(|| OpError::unsupported("it is not in the table of element-wise operators"))?;
    let inputs: Vec<_> = (0..row.inputs).map(|k| rw.required(k)).collect::<Result<_, _>>()?;
    let dtype = rw.dtype(inputs[0]).ok_or_else(|| OpError::invalid("the type of input 0 is not known"))?;
    let expr = Elementwise { row, attrs }.expr(Type::of(dtype), row.inputs)?;
    let result = spell(&expr, dtype, rw.patch().1, |_, slot| inputs[slot])?;
    rw.output(0, result);
    Ok(())
}

/// Gelu is an operator of `ai.onnx` from opset 20 on; before, ONNX Runtime's own operators say the same.
fn downgrade_gelu(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() < 20 {
        let op = if rw.attrs().string("approximate")? == Some("tanh") { "FastGelu" } else { "Gelu" };
        rw.renamed("com.microsoft", op, &[rw.input(0)], Attrs::new());
    }
    Ok(())
}

/// `Gelu` and `FastGelu` of ONNX Runtime as `Gelu` of `ai.onnx` (with an optional bias added first).
fn upgrade_microsoft_gelu(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let attrs =
        if &*rw.node().op == "FastGelu" { Attrs::new().with("approximate", "tanh") } else { Attrs::new() };
    let x = rw.required(0)?;
    let x = match rw.input(1) {
        Some(bias) => rw.add("Add", &[x, bias], Attrs::new()),
        None => x,
    };
    rw.renamed("", "Gelu", &[Some(x)], attrs);
    Ok(())
}

/// Before opset 9, Less and Greater know floats only: integers are compared as float64. Before 11, Equal knows
/// integers and bool only: floats are equal where both are numbers and neither is less.
fn downgrade_comparison(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (a, b) = (rw.required(0)?, rw.required(1)?);
    // A comparison that a rewrite made has values of no type yet, and is right.
    let Some(dtype) = rw.dtype(a).or(rw.dtype(b)) else { return Ok(()) };
    let equal = &*rw.node().op == "Equal";
    if equal && dtype.is_float() && rw.version() < 11 {
        let result = equal_floats(rw, a, b, dtype);
        rw.output(0, result);
    } else if !equal && !dtype.is_float() && rw.version() < 9 {
        let cast = Attrs::new().with("to", i64::from(DType::F64.to_onnx()));
        let (x, y) = (rw.add("Cast", &[a], cast.clone()), rw.add("Cast", &[b], cast));
        rw.same(&[Some(x), Some(y)], Attrs::new());
    }
    Ok(())
}

/// Whether floats are equal, in operators that opset 7 has. NaN equals nothing.
fn equal_floats(rw: &mut Rewrite<'_>, a: ValueId, b: ValueId, dtype: DType) -> ValueId {
    let (less, greater) = (rw.add("Less", &[a, b], Attrs::new()), rw.add("Greater", &[a, b], Attrs::new()));
    let differ = rw.add("Or", &[less, greater], Attrs::new());
    let mut result = rw.add("Not", &[differ], Attrs::new());
    for value in [a, b] {
        if rw.constant_of(value).is_some_and(|tensor| !tensor.to_f64().iter().any(|x| x.is_nan())) {
            continue;
        }
        // Every number is below 1 or above -1.
        let (one, minus) = (Tensor::scalar(dtype, 1.0), Tensor::scalar(dtype, -1.0));
        let (one, minus) = (rw.constant("one", one), rw.constant("minus_one", minus));
        let (below, above) =
            (rw.add("Less", &[value, one], Attrs::new()), rw.add("Greater", &[value, minus], Attrs::new()));
        let number = rw.add("Or", &[below, above], Attrs::new());
        result = rw.add("And", &[result, number], Attrs::new());
    }
    result
}

/// Sign is an operator from opset 9 on; before, it is what is above 0 less what is below.
fn downgrade_sign(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let x = rw.required(0)?;
    let Some(dtype) = rw.dtype(x).filter(|dtype| rw.version() < 9 && dtype.is_float()) else { return Ok(()) };
    let zero = rw.constant("zero", Tensor::scalar(dtype, 0.0));
    let [above, below] = ["Greater", "Less"].map(|op| {
        let flag = rw.add(op, &[x, zero], Attrs::new());
        rw.add("Cast", &[flag], Attrs::new().with("to", i64::from(dtype.to_onnx())))
    });
    let sign = rw.add("Sub", &[above, below], Attrs::new());
    rw.output(0, sign);
    Ok(())
}

struct Unrunnable;

impl Op for Unrunnable {
    fn infer(&self, _: &mut Infer<'_>) -> Result<(), OpError> {
        Err(OpError::unsupported("it is rewritten when a model is read and cannot stand in a graph"))
    }
}

/// For operators that are rewritten as others when a model is read.
pub(crate) fn build_unrunnable(_: &Graph, _: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Unrunnable))
}

pub(crate) fn definitions() -> Vec<Definition> {
    let mut all: Vec<Definition> = ROWS
        .iter()
        .map(|row| {
            let definition = Definition::new(row.domain, row.name, row.since, build);
            match row.name {
                "Gelu" => definition.downgrade(downgrade_gelu),
                "Sign" => definition.downgrade(downgrade_sign),
                "Less" | "Greater" | "Equal" => definition.downgrade(downgrade_comparison),
                _ if row.domain == "com.microsoft" => definition.decompose(decompose),
                _ => definition,
            }
        })
        .collect();
    // Read as Gelu of ai.onnx; "since 1, 2" makes every one of them an old version.
    for name in ["Gelu", "FastGelu"] {
        let definition = Definition::new("com.microsoft", name, &[1, 2], build_unrunnable);
        all.push(definition.upgrade(upgrade_microsoft_gelu));
    }
    all
}

pub(crate) fn is_flat(domain: &str, name: &str) -> bool {
    ROWS.iter().any(|row| row.flat && row.domain == domain && row.name == name)
}
