//! Expressions, printed at a point of their space.

use ortrain_expr::{BinaryOp, CompareOp, Inst, Reg, RunScalar, Scalar, Type, UnaryOp};
use ortrain_program::{Load, Nest, Operand};

use crate::context::Context;
use crate::kernel::Kernel;
use crate::ranges::{Range, ranges};
use crate::repr::{Repr, Value, type_of};

/// Nest with the ranges of its registers.
#[derive(Debug)]
pub(crate) struct AnalyzedNest<'n> {
    pub(crate) nest: &'n Nest,
    ranges: Vec<Range>,
}

/// Point of a space where an expression is computed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Point {
    /// Index along each axis, as 32-bit signed integers.
    pub(crate) at: Vec<String>,
    /// Accumulators: values that the instruction passes to its epilogue nest.
    pub(crate) accumulators: Vec<Value>,
    /// Values of all loads at this point, or empty if they are not yet loaded.
    pub(crate) loaded: Vec<Value>,
    /// Results of the reductions so far.
    pub(crate) reduced: Vec<Value>,
}

/// Returns the index of an operand's element at a point.
pub(crate) fn position(operand: &Operand, at: &[String]) -> String {
    let mut text = operand.access.offset.to_string();
    for (name, &stride) in at.iter().zip(&operand.access.strides) {
        match stride {
            0 => {}
            1 => text += &format!(" + {name}"),
            _ => text += &format!(" + {name} * ({stride})"),
        }
    }
    text
}

impl<'n> AnalyzedNest<'n> {
    pub(crate) fn new(cx: &Context<'_>, nest: &'n Nest) -> Result<AnalyzedNest<'n>, String> {
        let refused = nest.expr.insts().iter().find_map(|&(inst, ty)| unsupported_double(inst, ty));
        if let Some(name) = refused.filter(|_| !cx.has_float64()) {
            return Err(format!(
                "it computes {name} in float64, which this device does not support; use float32 or the cpu backend"
            ));
        }
        Ok(AnalyzedNest { nest, ranges: ranges(nest) })
    }

    /// Returns the printed type of a register.
    pub(crate) fn repr(&self, reg: Reg) -> Repr {
        let k = usize::from(reg.0);
        self.ranges[k].repr(self.nest.expr.ty(reg))
    }

    /// Prints the instructions that `roots` need at a point, and returns the values of `roots`.
    pub(crate) fn print(
        &self,
        kernel: &mut Kernel<'_>,
        point: &Point,
        roots: &[Reg],
    ) -> Result<Vec<Value>, String> {
        let needed = self.nest.expr.dependencies_of(roots);
        let mut values: Vec<Option<Value>> = vec![None; needed.len()];
        for (k, &(inst, ty)) in self.nest.expr.insts().iter().enumerate() {
            if !needed[k] {
                continue;
            }
            let repr = self.repr(Reg(k as u16));
            let value = self.instruction(kernel, point, inst, (ty, repr), &values)?;
            let is_name = matches!(inst, Inst::Const(_) | Inst::Coordinate(_) | Inst::Reduced(_));
            values[k] = Some(if is_name { value } else { kernel.define(value) });
        }
        Ok(roots.iter().map(|reg| values[usize::from(reg.0)].clone().expect("roots are computed")).collect())
    }

    fn instruction(
        &self,
        kernel: &mut Kernel<'_>,
        point: &Point,
        inst: Inst,
        (ty, repr): (Type, Repr),
        values: &[Option<Value>],
    ) -> Result<Value, String> {
        let value = |reg: Reg| values[usize::from(reg.0)].clone().expect("operands precede their users");
        Ok(match inst {
            Inst::Const(constant) => kernel.constant(constant.convert(ty), repr),
            Inst::Load(slot) => {
                let slot_index = usize::from(slot);
                let loaded = match (point.loaded.get(slot_index), &self.nest.loads[slot_index]) {
                    (Some(known), _) => known.clone(),
                    (_, Load::Accumulator(_)) => point.accumulators[slot_index].clone(),
                    (_, Load::Buffer(from)) => kernel.load(from.buffer, &position(from, &point.at)),
                };
                kernel.as_repr(&loaded, repr)
            }
            Inst::LoadAt(slot, index) => {
                self.gathered_load(kernel, usize::from(slot), &value(index), repr)?
            }
            Inst::Coordinate(axis) => {
                kernel.as_repr(&Value::new(&*point.at[usize::from(axis)], Repr::I32), repr)
            }
            Inst::Run(RunScalar::Seed) => kernel.run_scalar(0),
            Inst::Run(RunScalar::TrainStep) => kernel.run_scalar(1),
            Inst::Reduced(k) => kernel.as_repr(&point.reduced[usize::from(k)], repr),
            Inst::Unary(op, a) => self.unary(kernel, op, ty, repr, &value(a)),
            Inst::Binary(op, a, b) => self.binary(kernel, op, ty, repr, [value(a), value(b)]),
            Inst::Compare(op, a, b) => compare(kernel, op, self.nest.expr.ty(a), [value(a), value(b)]),
            Inst::Select(condition, a, b) => {
                let [a, b] = [a, b].map(|reg| kernel.as_repr(&value(reg), repr).text);
                Value::new(kernel.select(&value(condition).text, &a, &b), repr)
            }
            Inst::Convert(a) | Inst::Guard(a, _) => kernel.as_repr(&value(a), repr),
            Inst::Random(key, stream, index) => {
                let [key, stream, index] =
                    [key, stream, index].map(|reg| kernel.as_repr(&value(reg), Repr::U64).text);
                Value::new(format!("random_bits({key}, {stream}, {index})"), Repr::U32)
            }
        })
    }

    /// Prints a load by computed index, with zero for indices out of range.
    fn gathered_load(
        &self,
        kernel: &mut Kernel<'_>,
        slot: usize,
        index: &Value,
        repr: Repr,
    ) -> Result<Value, String> {
        let Load::Buffer(from) = &self.nest.loads[slot] else {
            return Err("an accumulator cannot be read at a computed index".into());
        };
        let len = from.access.len.saturating_sub(from.access.offset);
        let index = kernel.define(index.clone());
        let text = &index.text;
        let inside = match index.repr {
            Repr::I32 => format!("{text} >= 0 && {text} < {len}"),
            Repr::U32 => format!("{text} < {len}u"),
            _ => format!("high({text}) == 0u && low({text}) < {len}u"),
        };
        let inside = kernel.define(Value::new(inside, Repr::Bool)).text;
        let at = kernel.as_repr(&index, Repr::I32).text;
        let zero = kernel.constant(Scalar::from_f64(type_of(repr), 0.0), repr);
        let result = kernel.variable(&zero);
        if len > 0 {
            let depth = kernel.depth();
            kernel.begin_if(&inside);
            let loaded = kernel.load(from.buffer, &format!("{} + {at}", from.access.offset));
            let loaded = kernel.as_repr(&loaded, repr);
            kernel.assign(&result, &loaded);
            kernel.close_to(depth);
        }
        Ok(result)
    }

    fn unary(&self, kernel: &Kernel<'_>, op: UnaryOp, ty: Type, repr: Repr, a: &Value) -> Value {
        let name = match op {
            UnaryOp::Not => return Value::new(format!("!{}", a.text), repr),
            UnaryOp::Neg => "neg",
            UnaryOp::Abs => "abs",
            UnaryOp::Sign => "sign",
            UnaryOp::Floor => "floor",
            UnaryOp::Round => "nearest",
            UnaryOp::Exp => "exp",
            UnaryOp::Log => "log",
            UnaryOp::Sqrt => "sqrt",
            UnaryOp::Rsqrt => "rsqrt",
            UnaryOp::Sin => "sin",
            UnaryOp::Cos => "cos",
            UnaryOp::Atan => "atan",
            UnaryOp::Erf => "erf",
            UnaryOp::Tanh => "tanh",
            UnaryOp::Sigmoid => "sigmoid",
            UnaryOp::ToF16 | UnaryOp::ToBf16 if repr == Repr::F64 => return a.clone(),
            UnaryOp::ToF16 => return Value::new(format!("to_f16({})", a.text), repr),
            UnaryOp::ToBf16 => return Value::new(format!("to_bf16({})", a.text), repr),
        };
        match repr {
            Repr::F32 => return Value::new(format!("{name}_f32({})", a.text), repr),
            Repr::F64 => return Value::new(format!("{name}_f64({})", a.text), repr),
            _ => {}
        }
        let unsigned = matches!(ty, Type::U32 | Type::U64);
        if matches!(op, UnaryOp::Floor | UnaryOp::Round) || (op == UnaryOp::Abs && unsigned) {
            return kernel.as_repr(a, repr);
        }
        // The result may fit 32 bits although the operand does not.
        let text = match (op, a.repr) {
            (UnaryOp::Neg, Repr::I64 | Repr::U64) => format!("neg_pair({})", a.text),
            (UnaryOp::Neg, Repr::I32) if repr.is_pair() => format!("neg_pair(pair_of_i32({}))", a.text),
            (UnaryOp::Neg, Repr::U32) => format!("(0u - {})", a.text),
            (UnaryOp::Abs, Repr::I64 | Repr::U64) => format!("abs_pair({})", a.text),
            (UnaryOp::Abs, Repr::I32) if repr.is_pair() => format!("abs_pair(pair_of_i32({}))", a.text),
            (UnaryOp::Sign, Repr::I64) => format!("sign_i64({})", a.text),
            (UnaryOp::Sign, Repr::U64) => format!("sign_u64({})", a.text),
            (UnaryOp::Sign, Repr::U32) => format!("sign_u32({})", a.text),
            _ => format!("{name}_i32({})", a.text),
        };
        let result = match (op, a.repr) {
            (UnaryOp::Neg | UnaryOp::Abs, Repr::I32) if repr.is_pair() => repr,
            _ => a.repr,
        };
        kernel.as_repr(&Value::new(text, result), repr)
    }

    fn binary(&self, kernel: &Kernel<'_>, op: BinaryOp, ty: Type, repr: Repr, operands: [Value; 2]) -> Value {
        let [a, b] = operands;
        match repr {
            Repr::F32 => return float_binary(op, &a, &b),
            Repr::F64 => return double_binary(op, &a, &b),
            Repr::Bool => {
                let sign = match op {
                    BinaryOp::And => "&&",
                    BinaryOp::Or => "||",
                    _ => "!=",
                };
                return Value::new(format!("({} {sign} {})", a.text, b.text), repr);
            }
            _ => {}
        }
        let wraps = matches!(
            op,
            BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul | BinaryOp::And | BinaryOp::Or | BinaryOp::Xor
        );
        // The low words of these results depend only on the low words of the operands. For other operations they do
        // not.
        let common = match op {
            BinaryOp::Pow => Repr::I64,
            _ if wraps && !repr.is_pair() => repr,
            _ if repr.is_pair() || a.repr.is_pair() || b.repr.is_pair() => {
                if ty == Type::U64 {
                    Repr::U64
                } else {
                    Repr::I64
                }
            }
            _ => repr,
        };
        let [a, b] = [a, b].map(|value| kernel.as_repr(&value, common).text);
        kernel.as_repr(&Value::new(integer_binary(kernel, op, common, &a, &b), common), repr)
    }
}

pub(crate) fn integer_binary(kernel: &Kernel<'_>, op: BinaryOp, repr: Repr, a: &str, b: &str) -> String {
    let suffix = match repr {
        Repr::I32 => "i32",
        Repr::U32 => "u32",
        Repr::I64 => "i64",
        _ => "u64",
    };
    let call = |name: &str| format!("{name}_{suffix}({a}, {b})");
    let wrapping = |sign: &str, name: &str| match repr {
        Repr::I64 | Repr::U64 => format!("{name}_pair({a}, {b})"),
        Repr::I32 => format!("int_of(bits_of_int({a}) {sign} bits_of_int({b}))"),
        _ => format!("({a} {sign} {b})"),
    };
    match op {
        BinaryOp::Add => wrapping("+", "add"),
        BinaryOp::Sub => wrapping("-", "sub"),
        BinaryOp::Mul => wrapping("*", "mul"),
        BinaryOp::And => wrapping("&", "and"),
        BinaryOp::Or => wrapping("|", "or"),
        BinaryOp::Xor => wrapping("^", "xor"),
        BinaryOp::Div => call("div"),
        BinaryOp::Rem => call("rem"),
        BinaryOp::Pow => call("pow"),
        BinaryOp::Min if repr.is_pair() => call("min"),
        BinaryOp::Max if repr.is_pair() => call("max"),
        BinaryOp::Min => kernel.select(&format!("{a} < {b}"), a, b),
        BinaryOp::Max => kernel.select(&format!("{a} < {b}"), b, a),
    }
}

pub(crate) fn float_binary(op: BinaryOp, a: &Value, b: &Value) -> Value {
    let (a, b) = (&a.text, &b.text);
    let text = match op {
        BinaryOp::Add => format!("({a} + {b})"),
        BinaryOp::Sub => format!("({a} - {b})"),
        BinaryOp::Mul => format!("({a} * {b})"),
        BinaryOp::Div => format!("div_f32({a}, {b})"),
        BinaryOp::Rem => format!("rem_f32({a}, {b})"),
        BinaryOp::Pow => format!("pow_f32({a}, {b})"),
        BinaryOp::Min => format!("min_f32({a}, {b})"),
        _ => format!("max_f32({a}, {b})"),
    };
    Value::new(text, Repr::F32)
}

pub(crate) fn double_binary(op: BinaryOp, a: &Value, b: &Value) -> Value {
    let name = match op {
        BinaryOp::Add => "add",
        BinaryOp::Sub => "sub",
        BinaryOp::Mul => "mul",
        BinaryOp::Div => "div",
        BinaryOp::Min => "min",
        BinaryOp::Max => "max",
        BinaryOp::Rem => "rem",
        BinaryOp::Pow => "pow",
        _ => unreachable!("{op:?} is no operation of floats"),
    };
    Value::new(format!("{name}_f64({}, {})", a.text, b.text), Repr::F64)
}

/// Returns the name of a function that a language without 64-bit floats does not support, because it would need its own
/// tables.
fn unsupported_double(inst: Inst, ty: Type) -> Option<&'static str> {
    match inst {
        _ if ty != Type::F64 => None,
        Inst::Unary(UnaryOp::Exp, _) => Some("exp"),
        Inst::Unary(UnaryOp::Log, _) => Some("log"),
        Inst::Unary(UnaryOp::Sin, _) => Some("sin"),
        Inst::Unary(UnaryOp::Cos, _) => Some("cos"),
        Inst::Unary(UnaryOp::Atan, _) => Some("atan"),
        Inst::Unary(UnaryOp::Erf, _) => Some("erf"),
        Inst::Unary(UnaryOp::Tanh, _) => Some("tanh"),
        Inst::Unary(UnaryOp::Sigmoid, _) => Some("sigmoid"),
        Inst::Binary(BinaryOp::Rem, ..) => Some("rem"),
        Inst::Binary(BinaryOp::Pow, ..) => Some("pow"),
        _ => None,
    }
}

pub(crate) fn compare(kernel: &Kernel<'_>, op: CompareOp, ty: Type, operands: [Value; 2]) -> Value {
    if ty == Type::F64 {
        let [a, b] = operands.map(|value| value.text);
        let name = match op {
            CompareOp::Eq => "eq",
            CompareOp::Lt => "lt",
            CompareOp::Le => "le",
        };
        return Value::new(format!("{name}_f64({a}, {b})"), Repr::Bool);
    }
    let pairs = operands.iter().any(|value| value.repr.is_pair());
    let [a, b] = operands.map(|value| match (pairs, ty) {
        (true, Type::U64) => kernel.as_repr(&value, Repr::U64).text,
        (true, _) => kernel.as_repr(&value, Repr::I64).text,
        (false, Type::Bool) => kernel.as_repr(&value, Repr::U32).text,
        (false, _) => value.text,
    });
    let less = if ty == Type::U64 { "lt_u64" } else { "lt_i64" };
    // A driver may assume that every number equals itself.
    if ty == Type::F32 && a == b && op != CompareOp::Lt {
        return Value::new(format!("(!is_nan({a}))"), Repr::Bool);
    }
    let text = match (op, pairs) {
        (CompareOp::Eq, true) => format!("eq_pair({a}, {b})"),
        (CompareOp::Lt, true) => format!("{less}({a}, {b})"),
        (CompareOp::Le, true) => format!("!{less}({b}, {a})"),
        (CompareOp::Eq, false) => format!("{a} == {b}"),
        (CompareOp::Lt, false) => format!("{a} < {b}"),
        (CompareOp::Le, false) => format!("{a} <= {b}"),
    };
    Value::new(format!("({text})"), Repr::Bool)
}
