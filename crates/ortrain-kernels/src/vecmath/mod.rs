//! Elementary functions of f32. They are branch-free, so that loops over them become vector code at every level.
//!
//! Each function states its maximum error in units in the last place (ULP) against the correctly rounded result, and a
//! test checks the bound over all magnitudes. Infinities, NaN, signed zeros and subnormal numbers follow IEEE 754.
//! Functions of f64 call `libm`, element by element.
//!
//! [`ortrain_expr::elementary`] defines `exp`, `log`, `tanh`, `sigmoid` and `erf`. Coefficients are in
//! [`ortrain_expr::coefficients`]. Error bounds were measured.

use std::marker::PhantomData;

use ortrain_expr::coefficients::{ATAN, COSINE, EXP2, LOG2, SINE, SQRT_HALF_BITS};
use ortrain_expr::elementary::{self, Machine};

use crate::isa::Level;

/// Maximum error of `exp`, in ULP.
pub const EXP_MAX_ULP: u32 = 1;
/// Maximum error of `log`, in ULP.
pub const LOG_MAX_ULP: u32 = 1;
/// Maximum error of `tanh`, in ULP.
pub const TANH_MAX_ULP: u32 = 1;
/// Maximum error of `sigmoid`, in ULP.
pub const SIGMOID_MAX_ULP: u32 = 2;
/// Maximum error of `erf`, in ULP.
pub const ERF_MAX_ULP: u32 = 1;
/// Maximum error of `1 / sqrt(x)`, in ULP.
pub const RSQRT_MAX_ULP: u32 = 1;
/// Maximum error of `sin`, in ULP.
pub const SIN_MAX_ULP: u32 = 1;
/// Maximum error of `cos`, in ULP.
pub const COS_MAX_ULP: u32 = 1;
/// Maximum error of `atan`, in ULP.
pub const ATAN_MAX_ULP: u32 = 1;
/// Maximum error of `pow`, in ULP.
pub const POW_MAX_ULP: u32 = 1;

#[inline(always)]
fn polynomial64<L: Level, const N: usize>(x: f64, coefficients: [f64; N]) -> f64 {
    let mut sum = coefficients[0];
    for &c in &coefficients[1..] {
        sum = L::mul_add64(sum, x, c);
    }
    sum
}

/// Returns 2^n for -126 <= n <= 127.
#[inline(always)]
fn exp2_int(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// Adding and subtracting this constant rounds a small float to the nearest integer. The low bits of the sum contain
/// this integer.
pub(crate) const ROUNDING_OFFSET: f32 = 12_582_912.0;
/// A lane of a vector, as a machine of elementary functions.
struct Lane<L>(PhantomData<L>);

impl<L: Level> Machine for Lane<L> {
    type Number = f32;
    type Truth = bool;
    /// The sum of the number and [`ROUNDING_OFFSET`].
    type Rounded = f32;

    #[inline(always)]
    fn number(&mut self, value: f32) -> f32 {
        value
    }

    #[inline(always)]
    fn add(&mut self, a: f32, b: f32) -> f32 {
        a + b
    }

    #[inline(always)]
    fn sub(&mut self, a: f32, b: f32) -> f32 {
        a - b
    }

    #[inline(always)]
    fn mul(&mut self, a: f32, b: f32) -> f32 {
        a * b
    }

    #[inline(always)]
    fn div(&mut self, a: f32, b: f32) -> f32 {
        a / b
    }

    #[inline(always)]
    fn mul_add(&mut self, a: f32, b: f32, c: f32) -> f32 {
        L::mul_add(a, b, c)
    }

    #[inline(always)]
    fn negative(&mut self, a: f32) -> f32 {
        -a
    }

    #[inline(always)]
    fn magnitude(&mut self, a: f32) -> f32 {
        a.abs()
    }

    #[inline(always)]
    fn with_sign(&mut self, a: f32, sign: f32) -> f32 {
        a.copysign(sign)
    }

    #[inline(always)]
    fn clamp_max(&mut self, a: f32, bound: f32) -> f32 {
        if a > bound { bound } else { a }
    }

    #[inline(always)]
    fn clamp_min(&mut self, a: f32, bound: f32) -> f32 {
        if a < bound { bound } else { a }
    }

    #[inline(always)]
    fn is_less(&mut self, a: f32, bound: f32) -> bool {
        a < bound
    }

    #[inline(always)]
    fn is_zero(&mut self, a: f32) -> bool {
        a == 0.0
    }

    #[inline(always)]
    fn is_nonnegative(&mut self, a: f32) -> bool {
        a >= 0.0
    }

    #[inline(always)]
    fn is_positive_infinity(&mut self, a: f32) -> bool {
        a == f32::INFINITY
    }

    #[inline(always)]
    fn is_nan(&mut self, a: f32) -> bool {
        a.is_nan()
    }

    #[inline(always)]
    fn choose(&mut self, truth: bool, yes: f32, no: f32) -> f32 {
        if truth { yes } else { no }
    }

    #[inline(always)]
    fn round_product(&mut self, a: f32, factor: f32) -> f32 {
        L::mul_add(a, factor, ROUNDING_OFFSET)
    }

    #[inline(always)]
    fn integer(&mut self, a: f32) -> f32 {
        a - ROUNDING_OFFSET
    }

    #[inline(always)]
    fn scale(&mut self, a: f32, power: f32) -> f32 {
        // Multiplies by 2^n in two steps: n is between -254 and 129, and subnormal results must be rounded once.
        let n = (power.to_bits() as i32).wrapping_sub(ROUNDING_OFFSET.to_bits() as i32);
        let half = n >> 1;
        a * exp2_int(half) * exp2_int(n.wrapping_sub(half))
    }

    #[inline(always)]
    fn split(&mut self, a: f32) -> (f32, f32) {
        split_mantissa(a)
    }
}

/// Computes the natural exponential.
#[inline(always)]
pub(crate) fn exp<L: Level>(x: f32) -> f32 {
    elementary::exp(&mut Lane::<L>(PhantomData), x)
}

/// Splits a positive, finite `x` into `m` in [sqrt(1/2), sqrt(2)) and an exponent.
#[inline(always)]
fn split_mantissa(x: f32) -> (f32, f32) {
    let subnormal = x < f32::MIN_POSITIVE;
    let scaled = if subnormal { x * 16_777_216.0 } else { x };
    let correction = if subnormal { -24.0 } else { 0.0 };
    let shifted = scaled.to_bits().wrapping_sub(SQRT_HALF_BITS);
    let exponent = (shifted as i32) >> 23;
    let m = f32::from_bits((shifted & 0x007f_ffff).wrapping_add(SQRT_HALF_BITS));
    (m, exponent as f32 + correction)
}

/// Computes the natural logarithm.
#[inline(always)]
pub(crate) fn log<L: Level>(x: f32) -> f32 {
    elementary::log(&mut Lane::<L>(PhantomData), x)
}

/// Computes the hyperbolic tangent.
#[inline(always)]
pub(crate) fn tanh<L: Level>(x: f32) -> f32 {
    elementary::tanh(&mut Lane::<L>(PhantomData), x)
}

/// Computes `1 / (1 + exp(-x))`.
#[inline(always)]
pub(crate) fn sigmoid<L: Level>(x: f32) -> f32 {
    elementary::sigmoid(&mut Lane::<L>(PhantomData), x)
}

/// Computes the Gauss error function.
#[inline(always)]
pub(crate) fn erf<L: Level>(x: f32) -> f32 {
    elementary::erf(&mut Lane::<L>(PhantomData), x)
}

/// Computes `1 / sqrt(x)`.
#[inline(always)]
pub(crate) fn rsqrt(x: f32) -> f32 {
    1.0 / x.sqrt()
}

/// Adding and subtracting this constant rounds a small double to the nearest integer. The low bits of the sum contain
/// this integer.
const ROUNDING_OFFSET_F64: f64 = 6_755_399_441_055_744.0;
/// Magnitude from which sine and cosine need more digits of pi than `sin` and `cos` use.
const MIN_LARGE_ANGLE: f32 = 4_194_304.0;

/// Returns true if a sine or cosine of `x` needs [`sin_large`] or [`cos_large`]: `x` is finite and large, or infinite.
#[inline(always)]
pub(crate) fn is_large_angle(x: f32) -> bool {
    x.abs() >= MIN_LARGE_ANGLE
}

/// Computes the sine of an argument that [is not large](is_far).
#[inline(always)]
pub(crate) fn sin<L: Level>(x: f32) -> f32 {
    sine_of_shifted::<L>(x, 0)
}

/// Computes the cosine of an argument that [is not large](is_far).
#[inline(always)]
pub(crate) fn cos<L: Level>(x: f32) -> f32 {
    sine_of_shifted::<L>(x, 1)
}

/// Computes the sine of an argument that [is large](is_far).
pub(crate) fn sin_large(x: f32) -> f32 {
    let sine = sine_of_shifted_large(x.abs(), 0);
    if x < 0.0 { -sine } else { sine }
}

/// Computes the cosine of an argument that [is large](is_far).
pub(crate) fn cos_large(x: f32) -> f32 {
    sine_of_shifted_large(x.abs(), 1)
}

/// Computes `sin(x + quarters * pi / 2)`: reduces `x` modulo pi/2 in doubles, to the nearest multiple.
#[inline(always)]
fn sine_of_shifted<L: Level>(x: f32, quarters: u64) -> f32 {
    // The first part of pi/2 has 31 bits: its product with an integer up to 2^22 is exact, and so is the difference.
    const HIGH: f64 = f64::from_bits(0x3ff9_21fb_5440_0000);
    const LOW: f64 = 6.077_100_506_506_192e-11;
    let x = f64::from(x);
    let rounded = x * std::f64::consts::FRAC_2_PI + ROUNDING_OFFSET_F64;
    let n = rounded - ROUNDING_OFFSET_F64;
    let rest = (x - n * HIGH) - n * LOW;
    sine_in_quadrant::<L>(rest, rounded.to_bits().wrapping_add(quarters))
}

/// Computes `sin(rest + n * pi / 2)` for `rest` between -pi/4 and pi/4.
#[inline(always)]
fn sine_in_quadrant<L: Level>(rest: f64, n: u64) -> f32 {
    let z = rest * rest;
    let sine = polynomial64::<L, 4>(z, SINE);
    // A product, which keeps the sign of zero.
    let sine = rest * L::mul_add64(sine, z, 1.0);
    let cosine = polynomial64::<L, 5>(z, COSINE);
    let cosine = L::mul_add64(cosine, z, 1.0);
    let result = if n & 1 == 0 { sine } else { cosine };
    f64::from_bits(result.to_bits() ^ ((n & 2) << 62)) as f32
}

/// Computes `sin(x + quarters * pi / 2)` of a large, positive `x` with the range reduction of Payne and Hanek. Of the
/// product of the integer mantissa and 2/pi, only the bits that matter modulo 4 are computed.
fn sine_of_shifted_large(x: f32, quarters: u64) -> f32 {
    /// 64 zero bits, and the first 256 binary digits of 2/pi.
    const TWO_OVER_PI: [u64; 5] =
        [0, 0xa2f9_836e_4e44_1529, 0xfc27_57d1_f534_ddc0, 0xdb62_9599_3c43_9041, 0xfe51_63ab_debb_c561];
    /// Number of binary digits of the product's fraction.
    const FRACTION: u32 = 94;
    if !x.is_finite() {
        return f32::NAN;
    }
    // x is mantissa times 2^exponent, with an exponent from -1 to 104.
    let bits = x.to_bits();
    let mantissa = u128::from(bits & 0x007f_ffff | 0x0080_0000);
    let exponent = (bits >> 23) as usize;
    // Digits before this one contribute multiples of 4 to the product.
    let first = exponent + 62 - 150;
    let (word, shift) = (first / 64, first % 64);
    let two = u128::from(TWO_OVER_PI[word]) << 64 | u128::from(TWO_OVER_PI[word + 1]);
    let third = u128::from(TWO_OVER_PI[word + 2]);
    let digits = (two << shift | third << shift >> 64) >> 32;
    let product = mantissa * digits;
    let fraction = ((product << (128 - FRACTION)) as i128) >> (128 - FRACTION);
    let n = (product >> FRACTION) as u64 + u64::from(fraction < 0);
    // 2^-94 and pi/2.
    let scale = f64::from_bits(u64::from(1023 - FRACTION) << 52) * std::f64::consts::FRAC_PI_2;
    sine_in_quadrant::<crate::isa::portable::Portable>(fraction as f64 * scale, n.wrapping_add(quarters))
}

/// Computes the inverse tangent in doubles, from the difference to the nearest of the angles 0, pi/4 and pi/2.
#[inline(always)]
pub(crate) fn atan<L: Level>(x: f32) -> f32 {
    /// Tangents of pi/8 and 3 pi/8.
    const TAN_PI_8: f64 = 0.414_213_562_373_095_03;
    const TAN_3_PI_8: f64 = 2.414_213_562_373_095;
    let t = f64::from(x.abs());
    let (steep, flat) = (t > TAN_3_PI_8, t <= TAN_PI_8);
    // Tangent of the remaining angle. NaN fails both comparisons and takes the middle case.
    let over = if flat { t } else { t - 1.0 };
    let over = if steep { -1.0 } else { over };
    let under = if flat { 1.0 } else { t + 1.0 };
    let under = if steep { t } else { under };
    let base = if flat { 0.0 } else { std::f64::consts::FRAC_PI_4 };
    let base = if steep { std::f64::consts::FRAC_PI_2 } else { base };
    let rest = over / under;
    let z = rest * rest;
    let p = polynomial64::<L, 6>(z, ATAN);
    let angle = base + L::mul_add64(p * z, rest, rest);
    (angle as f32).copysign(x)
}

/// Computes `x` to the power `y` by 64-bit logarithm and exponential. The result is nearly always correctly rounded.
#[inline(always)]
pub(crate) fn pow<L: Level>(x: f32, y: f32) -> f32 {
    let magnitude = x.abs();
    let (m, k) = split_mantissa(magnitude);
    let m = f64::from(m);
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let log2 = s * polynomial64::<L, 6>(z, LOG2) + f64::from(k);
    let exponent = f64::from(y) * log2;
    // Beyond these bounds the result overflows or underflows. A finite bound keeps the integer part small. NaN is
    // handled below.
    let exponent = if exponent > 200.0 { 200.0 } else { exponent };
    let exponent = if exponent > -200.0 { exponent } else { -200.0 };
    let rounded = exponent + ROUNDING_OFFSET_F64;
    let f = exponent - (rounded - ROUNDING_OFFSET_F64);
    let p = L::mul_add64(f, polynomial64::<L, 7>(f, EXP2), 1.0);
    let n = rounded.to_bits().wrapping_sub(ROUNDING_OFFSET_F64.to_bits()) as i64;
    let scale = f64::from_bits((n.wrapping_add(1023) as u64) << 52);
    let y_abs = y.abs();
    let mut result = (p * scale) as f32;

    // x| of 0 or infinity, |y| of infinity: 0, 1 or infinity by the sign of the product of y and log |x|.
    let grows = (magnitude > 1.0) == (y > 0.0);
    let extreme = if grows { f32::INFINITY } else { 0.0 };
    let edge = magnitude == 0.0 || magnitude == f32::INFINITY || y_abs == f32::INFINITY;
    result = if edge { extreme } else { result };
    result = if magnitude == 1.0 { 1.0 } else { result };

    // A negative base needs an integer exponent; an odd one makes the result negative. From 2^24 on every float is
    // even.
    let small_y = if y_abs < 16_777_216.0 { y } else { 0.0 };
    // SAFETY: `small_y` is finite and inside the range of i32.
    let integer = unsafe { small_y.to_int_unchecked::<i32>() };
    let is_integer = integer as f32 == small_y;
    let odd = is_integer & (integer & 1 != 0);
    let negative = x.to_bits() >> 31 != 0;
    result = if negative & odd { -result } else { result };
    let undefined = (x < 0.0) & (magnitude < f32::INFINITY) & !is_integer;
    result = if undefined { f32::NAN } else { result };

    result = if x.is_nan() | y.is_nan() { f32::NAN } else { result };
    // This also applies to NaN.
    if (y == 0.0) | (x == 1.0) { 1.0 } else { result }
}

#[cfg(test)]
mod tests;
