//! Conversion of element types without arithmetic: 8-bit and 4-bit floats, and integers of two and four bits.
//!
//! Buffers hold the codes of their elements as bytes. A table has the number of each code. The code of a number is found
//! by bisection of a table of thresholds, so every backend rounds alike.

use ortrain_expr::{BinaryOp, CompareOp, PowerRounding, Reg, SmallType, Type, UnaryOp};
use ortrain_graph::Tensor;

use crate::lower::{Lower, NestBuilder};

/// Returns the number, as float32, that a code stands for.
pub(crate) fn decode(cx: &mut Lower<'_>, nest: &mut NestBuilder, small: SmallType, code: Reg) -> Reg {
    let numbers = small.numbers();
    let table = cx.constant_buffer(small.name(), &Tensor::f32(&[numbers.len()], &numbers));
    let at = nest.b.convert(code, Type::I64);
    nest.gather(cx, table, at)
}

/// Conversion of numbers to codes.
#[derive(Clone, Copy)]
pub(crate) struct Encoding {
    pub(crate) small: SmallType,
    /// True if numbers above the largest one become the largest one.
    pub(crate) saturates: bool,
    /// Rounding of powers of two.
    pub(crate) rounding: PowerRounding,
}

impl Encoding {
    /// Returns the code of a number.
    pub(crate) fn encode(self, cx: &mut Lower<'_>, nest: &mut NestBuilder, number: Reg) -> Reg {
        if let Some((low, high)) = self.small.integer_range() {
            let integer = nest.b.convert(number, Type::I32);
            let mask = nest.b.constant(Type::I32, f64::from(high - low));
            return nest.b.binary(BinaryOp::And, integer, mask);
        }
        let number = nest.b.convert(number, Type::F32);
        let code = self.bisect(cx, nest, number);
        self.with_special(nest, number, code)
    }

    /// Returns the index of the largest threshold that is not above the magnitude of a number, as int64.
    fn bisect(self, cx: &mut Lower<'_>, nest: &mut NestBuilder, number: Reg) -> Reg {
        let thresholds = self.small.thresholds(self.rounding);
        let label = format!("{} thresholds", self.small.name());
        let table = cx.constant_buffer(&label, &Tensor::f32(&[thresholds.len()], &thresholds));
        let magnitude = nest.b.unary(UnaryOp::Abs, number);
        let mut code = nest.b.int(0);
        let mut step = thresholds.len() / 2;
        while step > 0 {
            let distance = nest.b.int(step as i64);
            let next = nest.b.add(code, distance);
            let threshold = nest.gather(cx, table, next);
            let is_reached = nest.b.compare(CompareOp::Le, threshold, magnitude);
            code = nest.b.select(is_reached, next, code);
            step /= 2;
        }
        code
    }

    /// Adds the sign to a code, and replaces the codes of NaN and of numbers above the largest one.
    fn with_special(self, nest: &mut NestBuilder, number: Reg, code: Reg) -> Reg {
        let b = &mut nest.b;
        let special = self.small.special_codes(self.saturates);
        let largest = b.int(i64::from(self.small.special_codes(true).overflow));
        let is_beyond = b.compare(CompareOp::Lt, largest, code);
        let overflow = b.int(i64::from(special.overflow));
        let mut code = b.select(is_beyond, overflow, code);
        let none = b.int(0);
        if special.has_sign {
            let (zero, one) = (b.constant(Type::F32, 0.0), b.constant(Type::F32, 1.0));
            let is_zero = b.compare(CompareOp::Eq, number, zero);
            // The reciprocal of a negative zero is negative.
            let reciprocal = b.div(one, number);
            let shown = b.select(is_zero, reciprocal, number);
            let mut is_negative = b.compare(CompareOp::Lt, shown, zero);
            if special.is_zero_unsigned {
                let is_nothing = b.compare(CompareOp::Eq, code, none);
                let not = b.unary(UnaryOp::Not, is_nothing);
                is_negative = b.binary(BinaryOp::And, is_negative, not);
            }
            let sign_bit = b.int(1 << (self.small.bits() - 1));
            let signed = b.binary(BinaryOp::Or, code, sign_bit);
            code = b.select(is_negative, signed, code);
        }
        let is_number = b.compare(CompareOp::Eq, number, number);
        let nan = b.int(i64::from(special.nan.unwrap_or(0)));
        b.select(is_number, code, nan)
    }
}
