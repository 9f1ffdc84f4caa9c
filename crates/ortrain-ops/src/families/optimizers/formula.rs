//! Builder of optimizer formulas. Arithmetic on [`Number`] records the instructions of an expression.

use std::cell::RefCell;
use std::ops::{Add, Div, Mul, Neg, Sub};

use ortrain_expr::{BinaryOp, Builder, CompareOp, Expr, Reg, Type, UnaryOp};

/// Instructions of a formula under construction.
pub(super) struct FormulaBuilder {
    builder: Builder,
    /// Type of numbers that differ for each element of a parameter.
    element: Type,
    /// Values that are summed over a parameter. The sum of value `k` is reduction `k`.
    sums: Vec<Reg>,
    /// First input with a sum, if the sums are inputs: the input of sum `k` follows `k` inputs later.
    first_sum_input: Option<usize>,
}

/// Number in a formula: one for each element of a parameter, or one for the whole parameter.
///
/// Numbers that do not depend on elements (rates, decays, step counts) are computed in `f64`, as in PyTorch. In
/// operations with elements they are rounded to the element type.
#[derive(Clone, Copy)]
pub struct Number<'a> {
    formula: &'a RefCell<FormulaBuilder>,
    reg: Reg,
}

impl<'a> Number<'a> {
    fn ty(self) -> Type {
        self.formula.borrow().builder.ty(self.reg)
    }

    fn convert(self, ty: Type) -> Number<'a> {
        let reg = self.formula.borrow_mut().builder.convert(self.reg, ty);
        Number { reg, ..self }
    }

    /// Converts two numbers to their common type: `f64` together with another type becomes the other type.
    fn promote(self, other: Number<'a>) -> (Number<'a>, Number<'a>) {
        let (a, b) = (self.ty(), other.ty());
        match (a, b) {
            _ if a == b => (self, other),
            (Type::F64, _) => (self.convert(b), other),
            _ => (self, other.convert(a)),
        }
    }

    fn binary(self, op: BinaryOp, other: Number<'a>) -> Number<'a> {
        let (a, b) = self.promote(other);
        let reg = self.formula.borrow_mut().builder.binary(op, a.reg, b.reg);
        Number { reg, ..self }
    }

    fn unary(self, op: UnaryOp) -> Number<'a> {
        let reg = self.formula.borrow_mut().builder.unary(op, self.reg);
        Number { reg, ..self }
    }

    /// Returns a constant of the type of this number.
    pub(super) fn like(self, value: f64) -> Number<'a> {
        let ty = self.ty();
        let reg = self.formula.borrow_mut().builder.constant(ty, value);
        Number { reg, ..self }
    }

    /// Returns the square root.
    #[must_use]
    pub fn sqrt(self) -> Number<'a> {
        self.unary(UnaryOp::Sqrt)
    }

    /// Returns the absolute value.
    #[must_use]
    pub fn abs(self) -> Number<'a> {
        self.unary(UnaryOp::Abs)
    }

    /// Returns the sign: -1, 0 or 1.
    #[must_use]
    pub fn sign(self) -> Number<'a> {
        self.unary(UnaryOp::Sign)
    }

    /// Returns the number to the power of `exponent`.
    #[must_use]
    pub fn pow(self, exponent: Number<'a>) -> Number<'a> {
        self.binary(BinaryOp::Pow, exponent)
    }

    /// Returns the larger of two numbers.
    #[must_use]
    pub fn max(self, other: Number<'a>) -> Number<'a> {
        self.binary(BinaryOp::Max, other)
    }

    /// Returns the smaller of two numbers.
    #[must_use]
    pub fn min(self, other: Number<'a>) -> Number<'a> {
        self.binary(BinaryOp::Min, other)
    }

    /// Returns a moving average, `factor * self + (1 - factor) * new`.
    #[must_use]
    pub fn blend(self, factor: Number<'a>, new: Number<'a>) -> Number<'a> {
        factor * self + (1.0 - factor) * new
    }

    /// Returns the sum over the elements of the parameter.
    #[must_use]
    pub fn sum(self) -> Number<'a> {
        let mut tape = self.formula.borrow_mut();
        let ty = tape.builder.ty(self.reg);
        tape.sums.push(self.reg);
        let k = tape.sums.len() - 1;
        let reg = match tape.first_sum_input {
            Some(first) => {
                let reg = tape.builder.load(first + k, Type::F64);
                tape.builder.convert(reg, ty)
            }
            None => tape.builder.reduced(k, ty),
        };
        drop(tape);
        Number { reg, ..self }
    }

    /// Returns the L2 norm over the elements of the parameter.
    #[must_use]
    pub fn norm(self) -> Number<'a> {
        (self * self).sum().sqrt()
    }

    /// Returns the condition that the number is greater than a constant.
    #[must_use]
    pub fn greater_than(self, other: f64) -> Condition<'a> {
        let other = self.like(other);
        self.compare(CompareOp::Lt, other, self)
    }

    /// Returns the condition that the number is less than a constant.
    #[must_use]
    pub fn less_than(self, other: f64) -> Condition<'a> {
        let other = self.like(other);
        self.compare(CompareOp::Lt, self, other)
    }

    /// Returns the condition that the number is neither infinite nor NaN.
    #[must_use]
    pub fn is_finite(self) -> Condition<'a> {
        self.abs().less_than(f64::INFINITY)
    }

    /// Returns the condition that the number equals a constant.
    #[must_use]
    pub fn equals(self, other: f64) -> Condition<'a> {
        let other = self.like(other);
        self.compare(CompareOp::Eq, self, other)
    }

    fn compare(self, op: CompareOp, a: Number<'a>, b: Number<'a>) -> Condition<'a> {
        let (a, b) = a.promote(b);
        let reg = self.formula.borrow_mut().builder.compare(op, a.reg, b.reg);
        Condition { formula: self.formula, reg }
    }
}

/// Boolean value in a formula.
#[derive(Clone, Copy)]
pub struct Condition<'a> {
    formula: &'a RefCell<FormulaBuilder>,
    reg: Reg,
}

impl<'a> Condition<'a> {
    /// Returns `yes` where the condition is true, `no` where it is false.
    #[must_use]
    pub fn select(self, yes: Number<'a>, no: Number<'a>) -> Number<'a> {
        let (yes, no) = yes.promote(no);
        let reg = self.formula.borrow_mut().builder.select(self.reg, yes.reg, no.reg);
        Number { formula: self.formula, reg }
    }

    /// Returns the condition that both conditions are true.
    #[must_use]
    pub fn and(self, other: Condition<'a>) -> Condition<'a> {
        let reg = self.formula.borrow_mut().builder.binary(BinaryOp::And, self.reg, other.reg);
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

/// A complete formula: an expression with one result for each output.
pub(super) struct Formula {
    /// Expression. Load `k` is input `k` of the formula.
    pub(super) expr: Expr,
    /// Registers that are summed over a parameter. The sum of register `k` is reduction `k`.
    pub(super) sums: Vec<Reg>,
}

impl Formula {
    /// Builds a formula. `write` computes the results from the inputs. `element` is the type of a parameter's elements.
    /// With `first_sum_input` the sums are inputs, from this one on.
    pub(super) fn build(
        element: Type,
        first_sum_input: Option<usize>,
        write: impl for<'a> FnOnce(FormulaInputs<'a>) -> Vec<Number<'a>>,
    ) -> Formula {
        let builder = Builder::new();
        let tape = RefCell::new(FormulaBuilder { builder, element, sums: Vec::new(), first_sum_input });
        let results: Vec<Reg> =
            write(FormulaInputs { formula: &tape }).iter().map(|number| number.reg).collect();
        let FormulaBuilder { builder, mut sums, .. } = tape.into_inner();
        if first_sum_input.is_some() {
            sums.clear();
        }
        let (expr, sums) = builder.finish_keeping(&results, &sums);
        Formula { expr, sums }
    }
}

/// Inputs of a formula.
#[derive(Clone, Copy)]
pub(super) struct FormulaInputs<'a> {
    formula: &'a RefCell<FormulaBuilder>,
}

impl<'a> FormulaInputs<'a> {
    /// Returns input `k`, which has a value for each element.
    pub(super) fn element(&self, k: usize) -> Number<'a> {
        let ty = self.formula.borrow().element;
        self.load(k, ty)
    }

    /// Returns input `k`, a setting in `f64`.
    pub(super) fn setting(&self, k: usize) -> Number<'a> {
        self.load(k, Type::F64)
    }

    /// Returns the sums over the elements of the parameter that were computed so far.
    pub(super) fn sums(&self) -> Vec<Number<'a>> {
        let mut tape = self.formula.borrow_mut();
        let FormulaBuilder { builder, sums, .. } = &mut *tape;
        let regs: Vec<Reg> = (sums.iter().enumerate())
            .map(|(k, &value)| {
                let ty = builder.ty(value);
                builder.reduced(k, ty)
            })
            .collect();
        drop(tape);
        regs.into_iter().map(|reg| Number { formula: self.formula, reg }).collect()
    }

    /// Returns an `f64` constant, the type of settings.
    pub(super) fn constant(&self, value: f64) -> Number<'a> {
        let reg = self.formula.borrow_mut().builder.constant(Type::F64, value);
        Number { formula: self.formula, reg }
    }

    fn load(&self, k: usize, ty: Type) -> Number<'a> {
        let reg = self.formula.borrow_mut().builder.load(k, ty);
        Number { formula: self.formula, reg }
    }
}
