//! Elementary functions of `f32`, written once for every machine that computes them: vector code of the CPU, machine
//! code of the JIT, and text of WGSL and CUDA.
//!
//! Coefficients are in [`crate::coefficients`]. Error bounds are stated and tested where a machine is defined.

use crate::coefficients::{
    ERF, ERF_LARGE, ERF_POLYNOMIAL_LIMIT, ERF_SATURATION, EXP, EXP_MIN_ARGUMENT, LN2_HIGH, LN2_LOW, LOG,
    TANH, TANH_POLYNOMIAL_LIMIT,
};

/// Largest argument of [`exp`]. Beyond it the result is infinite.
const EXP_MAX_ARGUMENT: f32 = 89.0;
/// Bound of `2 |x|` in [`tanh`], beyond which the result is one.
const TANH_EXP_ARGUMENT: f32 = 80.0;
/// Bound of `x²` in [`erf`], beyond which the result is one.
const ERF_EXP_ARGUMENT: f32 = 16.0;

/// Operations that elementary functions consist of. Infinities, NaN, signed zeros and subnormal numbers follow IEEE 754.
pub trait Machine {
    /// Number of 32 bits.
    type Number: Copy;
    /// Truth value.
    type Truth: Copy;
    /// Number that was rounded to an integer.
    type Rounded: Copy;

    /// Returns a constant.
    fn number(&mut self, value: f32) -> Self::Number;
    /// Returns `a + b`.
    fn add(&mut self, a: Self::Number, b: Self::Number) -> Self::Number;
    /// Returns `a - b`.
    fn sub(&mut self, a: Self::Number, b: Self::Number) -> Self::Number;
    /// Returns `a * b`.
    fn mul(&mut self, a: Self::Number, b: Self::Number) -> Self::Number;
    /// Returns `a / b`.
    fn div(&mut self, a: Self::Number, b: Self::Number) -> Self::Number;
    /// Returns `a * b + c`, rounded once or twice.
    fn mul_add(&mut self, a: Self::Number, b: Self::Number, c: Self::Number) -> Self::Number;
    /// Returns `-a`.
    fn negative(&mut self, a: Self::Number) -> Self::Number;
    /// Returns `|a|`.
    fn magnitude(&mut self, a: Self::Number) -> Self::Number;
    /// Returns `-|a|`.
    #[inline(always)]
    fn negative_magnitude(&mut self, a: Self::Number) -> Self::Number {
        let magnitude = self.magnitude(a);
        self.negative(magnitude)
    }
    /// Returns `a` with the sign of `sign`.
    fn with_sign(&mut self, a: Self::Number, sign: Self::Number) -> Self::Number;
    /// Returns `a`, or `bound` if that is less. NaN stays NaN.
    fn clamp_max(&mut self, a: Self::Number, bound: f32) -> Self::Number;
    /// Returns `a`, or `bound` if that is greater. NaN stays NaN.
    fn clamp_min(&mut self, a: Self::Number, bound: f32) -> Self::Number;
    /// Returns `a`, or `bound` if that is less, where the function's result is the same for all numbers above `bound`.
    /// Machines with infinities as in IEEE 754 return `a`.
    #[inline(always)]
    fn without_overflow(&mut self, a: Self::Number, _bound: f32) -> Self::Number {
        a
    }
    /// Returns true if `a < bound`.
    fn is_less(&mut self, a: Self::Number, bound: f32) -> Self::Truth;
    /// Returns true if `a` is a zero.
    fn is_zero(&mut self, a: Self::Number) -> Self::Truth;
    /// Returns true if `a` is a zero or positive.
    fn is_nonnegative(&mut self, a: Self::Number) -> Self::Truth;
    /// Returns true if `a` is the positive infinity.
    fn is_positive_infinity(&mut self, a: Self::Number) -> Self::Truth;
    /// Returns true if `a` is NaN.
    fn is_nan(&mut self, a: Self::Number) -> Self::Truth;
    /// Returns `yes` where `truth` is true, and `no` elsewhere.
    fn choose(&mut self, truth: Self::Truth, yes: Self::Number, no: Self::Number) -> Self::Number;
    /// Returns `a * factor`, between -256 and 256, rounded to the nearest integer.
    fn round_product(&mut self, a: Self::Number, factor: f32) -> Self::Rounded;
    /// Returns a rounded number as a number.
    fn integer(&mut self, a: Self::Rounded) -> Self::Number;
    /// Returns `a * 2^power` with one rounding.
    fn scale(&mut self, a: Self::Number, power: Self::Rounded) -> Self::Number;
    /// Splits a positive, finite number into a mantissa in [sqrt(1/2), sqrt(2)) and an exponent.
    fn split(&mut self, a: Self::Number) -> (Self::Number, Self::Number);
    /// Returns the natural exponential, for functions that are defined by it.
    #[inline(always)]
    fn exponential(&mut self, a: Self::Number) -> Self::Number
    where
        Self: Sized,
    {
        exp(self, a)
    }
}

/// Computes a polynomial by Horner's rule; `coefficients` has the highest power first.
#[inline(always)]
pub fn polynomial<M: Machine, const N: usize>(m: &mut M, x: M::Number, coefficients: [f32; N]) -> M::Number {
    let mut sum = m.number(coefficients[0]);
    for &coefficient in &coefficients[1..] {
        let coefficient = m.number(coefficient);
        sum = m.mul_add(sum, x, coefficient);
    }
    sum
}

/// Computes the natural exponential: `exp(x) = 2^n exp(r)`, with `n` the nearest integer of `x / ln 2`.
#[inline(always)]
pub fn exp<M: Machine>(m: &mut M, x: M::Number) -> M::Number {
    // Beyond these bounds the result is infinite or zero in any case.
    let clamped = m.clamp_max(x, EXP_MAX_ARGUMENT);
    let clamped = m.clamp_min(clamped, EXP_MIN_ARGUMENT);
    let rounded = m.round_product(clamped, std::f32::consts::LOG2_E);
    let n = m.integer(rounded);
    let (high, low) = (m.number(-LN2_HIGH), m.number(-LN2_LOW));
    let r = m.mul_add(n, high, clamped);
    let r = m.mul_add(n, low, r);
    let q = polynomial(m, r, EXP);
    let (square, one) = (m.mul(r, r), m.number(1.0));
    let p = m.mul_add(q, square, r);
    let p = m.add(p, one);
    m.scale(p, rounded)
}

/// Computes the natural logarithm: `log(1 + f) = f - f²/2 + s (f²/2 + R)` of the mantissa, small terms first.
#[inline(always)]
pub fn log<M: Machine>(m: &mut M, x: M::Number) -> M::Number {
    let (mantissa, k) = m.split(x);
    let (half, one, two) = (m.number(0.5), m.number(1.0), m.number(2.0));
    let f = m.sub(mantissa, one);
    let sum = m.add(two, f);
    let s = m.div(f, sum);
    let z = m.mul(s, s);
    let r = polynomial(m, z, LOG);
    let r = m.mul(z, r);
    let half_square = m.mul(half, f);
    let half_square = m.mul(half_square, f);
    let (high, low) = (m.number(LN2_HIGH), m.number(LN2_LOW));
    let small = m.add(half_square, r);
    let small = m.mul(s, small);
    let small = m.mul_add(k, low, small);
    let rest = m.sub(small, half_square);
    let rest = m.add(rest, f);
    let y = m.mul_add(k, high, rest);
    let infinite = m.is_positive_infinity(x);
    let y = m.choose(infinite, x, y);
    let (zero, lowest) = (m.is_zero(x), m.number(f32::NEG_INFINITY));
    let y = m.choose(zero, lowest, y);
    let (defined, nan) = (m.is_nonnegative(x), m.number(f32::NAN));
    m.choose(defined, y, nan)
}

/// Computes the hyperbolic tangent: a polynomial near zero, and `1 - 2 / (exp(2 |x|) + 1)` elsewhere.
#[inline(always)]
pub fn tanh<M: Machine>(m: &mut M, x: M::Number) -> M::Number {
    let t = m.magnitude(x);
    let z = m.mul(x, x);
    let p = polynomial(m, z, TANH);
    let small = m.mul(p, z);
    let small = m.mul_add(small, x, x);
    let twice = m.add(t, t);
    let twice = m.without_overflow(twice, TANH_EXP_ARGUMENT);
    let e = m.exponential(twice);
    let (one, two) = (m.number(1.0), m.number(2.0));
    let sum = m.add(e, one);
    let rest = m.div(two, sum);
    let large = m.sub(one, rest);
    let is_small = m.is_less(t, TANH_POLYNOMIAL_LIMIT);
    let y = m.choose(is_small, small, large);
    // Restores the sign of zero, which the sum loses.
    m.with_sign(y, x)
}

/// Computes `1 / (1 + exp(-x))`.
#[inline(always)]
pub fn sigmoid<M: Machine>(m: &mut M, x: M::Number) -> M::Number {
    // The exponential of -|x| cannot overflow, and small results keep their bits.
    let below = m.negative_magnitude(x);
    let e = m.exponential(below);
    let one = m.number(1.0);
    let is_negative = m.is_less(x, 0.0);
    let numerator = m.choose(is_negative, e, one);
    let sum = m.add(one, e);
    let y = m.div(numerator, sum);
    let nan = m.is_nan(x);
    m.choose(nan, x, y)
}

/// Computes the Gauss error function: a polynomial near zero, and `1 + exp(-x²) q(|x| - 1)` elsewhere.
#[inline(always)]
pub fn erf<M: Machine>(m: &mut M, x: M::Number) -> M::Number {
    let t = m.magnitude(x);
    let z = m.mul(x, x);
    let p = polynomial(m, z, ERF);
    let small = m.mul_add(p, x, x);
    let one = m.number(1.0);
    let clamped = m.clamp_max(t, ERF_SATURATION);
    let past = m.sub(clamped, one);
    let q = polynomial(m, past, ERF_LARGE);
    // The derivative of `erf` uses the same exponential.
    let below = m.without_overflow(z, ERF_EXP_ARGUMENT);
    let below = m.negative(below);
    let e = m.exponential(below);
    let large = m.mul_add(e, q, one);
    let is_small = m.is_less(t, ERF_POLYNOMIAL_LIMIT);
    let y = m.choose(is_small, small, large);
    // Restores the sign of zero, which the sum loses.
    m.with_sign(y, x)
}
