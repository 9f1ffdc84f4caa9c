//! The formula of an optimizer while it is written down: numbers with operators.

use std::cell::RefCell;
use std::ops::{Add, Div, Mul, Neg, Sub};

use ortrain_expr::{BinaryOp, Builder, CompareOp, Expr, Reg, Type, UnaryOp};

/// The instructions of a formula as far as it is written.
pub(super) struct Tape {
    builder: Builder,
    /// The type of what is different for each element of a parameter.
    element: Type,
    /// Values that are summed over a parameter.
    sums: Vec<Reg>,
}

/// A number of a formula: one for each element of a parameter, or one for the whole parameter.
///
/// Numbers that do not depend on elements (rates, decays, counts of steps) are computed in `f64`, as PyTorch computes
/// them; where they meet elements they are rounded to the type of these.
#[derive(Clone, Copy)]
pub struct Number<'a> {
    tape: &'a RefCell<Tape>,
    reg: Reg,
}

impl<'a> Number<'a> {
    fn ty(self) -> Type {
        self.tape.borrow().builder.ty(self.reg)
    }

    fn converted(self, ty: Type) -> Number<'a> {
        let reg = self.tape.borrow_mut().builder.convert(self.reg, ty);
        Number { reg, ..self }
    }

    /// Both in the type that they are computed in together.
    fn matched(self, other: Number<'a>) -> (Number<'a>, Number<'a>) {
        let (a, b) = (self.ty(), other.ty());
        match (a, b) {
            _ if a == b => (self, other),
            (Type::F64, _) => (self.converted(b), other),
            _ => (self, other.converted(a)),
        }
    }

    fn binary(self, op: BinaryOp, other: Number<'a>) -> Number<'a> {
        let (a, b) = self.matched(other);
        let reg = self.tape.borrow_mut().builder.binary(op, a.reg, b.reg);
        Number { reg, ..self }
    }

    fn unary(self, op: UnaryOp) -> Number<'a> {
        let reg = self.tape.borrow_mut().builder.unary(op, self.reg);
        Number { reg, ..self }
    }

    /// A constant, of the type of this number.
    pub(super) fn like(self, value: f64) -> Number<'a> {
        let ty = self.ty();
        let reg = self.tape.borrow_mut().builder.constant(ty, value);
        Number { reg, ..self }
    }

    /// The square root.
    #[must_use]
    pub fn sqrt(self) -> Number<'a> {
        self.unary(UnaryOp::Sqrt)
    }

    /// The absolute value.
    #[must_use]
    pub fn abs(self) -> Number<'a> {
        self.unary(UnaryOp::Abs)
    }

    /// -1, 0 or 1.
    #[must_use]
    pub fn sign(self) -> Number<'a> {
        self.unary(UnaryOp::Sign)
    }

    /// The power.
    #[must_use]
    pub fn pow(self, exponent: Number<'a>) -> Number<'a> {
        self.binary(BinaryOp::Pow, exponent)
    }

    /// The larger of two.
    #[must_use]
    pub fn max(self, other: Number<'a>) -> Number<'a> {
        self.binary(BinaryOp::Max, other)
    }

    /// The smaller of two.
    #[must_use]
    pub fn min(self, other: Number<'a>) -> Number<'a> {
        self.binary(BinaryOp::Min, other)
    }

    /// `factor * self + (1 - factor) * new`: a moving average.
    #[must_use]
    pub fn blend(self, factor: Number<'a>, new: Number<'a>) -> Number<'a> {
        factor * self + (1.0 - factor) * new
    }

    /// The sum over the elements of the parameter.
    #[must_use]
    pub fn sum(self) -> Number<'a> {
        let mut tape = self.tape.borrow_mut();
        let ty = tape.builder.ty(self.reg);
        tape.sums.push(self.reg);
        let k = tape.sums.len() - 1;
        let reg = tape.builder.reduced(k, ty);
        drop(tape);
        Number { reg, ..self }
    }

    /// The L2 norm of the parameter's elements.
    #[must_use]
    pub fn norm(self) -> Number<'a> {
        (self * self).sum().sqrt()
    }

    /// A condition: larger than a number.
    #[must_use]
    pub fn above(self, other: f64) -> Condition<'a> {
        let other = self.like(other);
        self.compare(CompareOp::Lt, other, self)
    }

    /// A condition: smaller than a number.
    #[must_use]
    pub fn below(self, other: f64) -> Condition<'a> {
        let other = self.like(other);
        self.compare(CompareOp::Lt, self, other)
    }

    /// A condition: neither infinite nor NaN.
    #[must_use]
    pub fn is_finite(self) -> Condition<'a> {
        self.abs().below(f64::INFINITY)
    }

    /// A condition: equal to a number.
    #[must_use]
    pub fn equals(self, other: f64) -> Condition<'a> {
        let other = self.like(other);
        self.compare(CompareOp::Eq, self, other)
    }

    fn compare(self, op: CompareOp, a: Number<'a>, b: Number<'a>) -> Condition<'a> {
        let (a, b) = a.matched(b);
        let reg = self.tape.borrow_mut().builder.compare(op, a.reg, b.reg);
        Condition { tape: self.tape, reg }
    }
}

/// A truth value of a formula.
#[derive(Clone, Copy)]
pub struct Condition<'a> {
    tape: &'a RefCell<Tape>,
    reg: Reg,
}

impl<'a> Condition<'a> {
    /// One number where it holds, another where not.
    #[must_use]
    pub fn choose(self, yes: Number<'a>, no: Number<'a>) -> Number<'a> {
        let (yes, no) = yes.matched(no);
        let reg = self.tape.borrow_mut().builder.select(self.reg, yes.reg, no.reg);
        Number { tape: self.tape, reg }
    }

    /// The condition that both hold.
    #[must_use]
    pub fn and(self, other: Condition<'a>) -> Condition<'a> {
        let reg = self.tape.borrow_mut().builder.binary(BinaryOp::And, self.reg, other.reg);
        Condition { reg, ..self }
    }
}

macro_rules! operator {
    ($trait:ident, $method:ident, $op:ident) => {
        impl<'a> $trait for Number<'a> {
            type Output = Number<'a>;

            fn $method(self, other: Number<'a>) -> Number<'a> {
                self.binary(BinaryOp::$op, other)
            }
        }

        impl<'a> $trait<f64> for Number<'a> {
            type Output = Number<'a>;

            fn $method(self, other: f64) -> Number<'a> {
                self.binary(BinaryOp::$op, self.like(other))
            }
        }

        impl<'a> $trait<Number<'a>> for f64 {
            type Output = Number<'a>;

            fn $method(self, other: Number<'a>) -> Number<'a> {
                other.like(self).binary(BinaryOp::$op, other)
            }
        }
    };
}

operator!(Add, add, Add);
operator!(Sub, sub, Sub);
operator!(Mul, mul, Mul);
operator!(Div, div, Div);

impl<'a> Neg for Number<'a> {
    type Output = Number<'a>;

    fn neg(self) -> Number<'a> {
        self.unary(UnaryOp::Neg)
    }
}

/// A formula that was written down: an expression with a result for each of its outputs.
pub(super) struct Formula {
    /// The expression. Load `k` is input `k` of who wrote it.
    pub(super) expr: Expr,
    /// Registers that are summed over a parameter, in order.
    pub(super) sums: Vec<Reg>,
}

impl Formula {
    /// The formula that `write` writes; elements are computed as `element`.
    pub(super) fn write(element: Type, write: impl for<'a> FnOnce(Sheet<'a>) -> Vec<Number<'a>>) -> Formula {
        let tape = RefCell::new(Tape { builder: Builder::new(), element, sums: Vec::new() });
        let results: Vec<Reg> = write(Sheet { tape: &tape }).iter().map(|number| number.reg).collect();
        let Tape { builder, sums, .. } = tape.into_inner();
        let (expr, sums) = builder.finish_keeping(&results, &sums);
        Formula { expr, sums }
    }
}

/// The inputs of a formula.
#[derive(Clone, Copy)]
pub(super) struct Sheet<'a> {
    tape: &'a RefCell<Tape>,
}

impl<'a> Sheet<'a> {
    /// Input `k`, which has a value for each element.
    pub(super) fn element(&self, k: usize) -> Number<'a> {
        let ty = self.tape.borrow().element;
        self.load(k, ty)
    }

    /// Input `k`, a setting.
    pub(super) fn setting(&self, k: usize) -> Number<'a> {
        self.load(k, Type::F64)
    }

    /// A constant beside settings.
    pub(super) fn constant(&self, value: f64) -> Number<'a> {
        let reg = self.tape.borrow_mut().builder.constant(Type::F64, value);
        Number { tape: self.tape, reg }
    }

    fn load(&self, k: usize, ty: Type) -> Number<'a> {
        let reg = self.tape.borrow_mut().builder.load(k, ty);
        Number { tape: self.tape, reg }
    }
}
