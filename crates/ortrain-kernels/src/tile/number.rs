//! Compute types of numbers, and storage types of elements. Results agree with `ortrain_expr::Scalar` bit for bit,
//! except for the stated errors of [`crate::vecmath`].

use std::marker::PhantomData;

use crate::isa::Level;
use crate::vecmath;

/// A type of numbers in computations.
pub(crate) trait Number: Copy + PartialOrd + 'static {
    const ZERO: Self;
    const ONE: Self;
    /// Neutral element of the maximum.
    const LOWEST: Self;
    /// Neutral element of the minimum.
    const GREATEST: Self;
    fn add(self, other: Self) -> Self;
    fn sub(self, other: Self) -> Self;
    fn mul(self, other: Self) -> Self;
    fn div(self, other: Self) -> Self;
    fn remainder(self, other: Self) -> Self;
    fn smaller(self, other: Self) -> Self;
    fn larger(self, other: Self) -> Self;
    fn power<L: Level>(self, other: Self) -> Self;
    fn negated(self) -> Self;
    fn magnitude(self) -> Self;
    fn sign(self) -> Self;
    fn rounded_down<L: Level>(self) -> Self;
    fn rounded<L: Level>(self) -> Self;
}

/// Operations of floats only.
pub(crate) trait Float: Number {
    fn exp<L: Level>(self) -> Self;
    fn log<L: Level>(self) -> Self;
    fn sqrt(self) -> Self;
    fn rsqrt(self) -> Self;
    /// Sine, undefined if the argument [is far](Float::is_far) from zero.
    fn sin<L: Level>(self) -> Self;
    /// Cosine, undefined if the argument [is far](Float::is_far) from zero.
    fn cos<L: Level>(self) -> Self;
    /// Returns true if sine and cosine need [`Float::sin_large`] and [`Float::cos_large`], which do not become vector code.
    fn needs_range_reduction(self) -> bool;
    fn sin_large(self) -> Self;
    fn cos_large(self) -> Self;
    fn atan<L: Level>(self) -> Self;
    fn erf<L: Level>(self) -> Self;
    fn tanh<L: Level>(self) -> Self;
    fn sigmoid<L: Level>(self) -> Self;
}

macro_rules! float_number {
    ($t:ty, $floor:ident, $round:ident, $power:expr) => {
        impl Number for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const LOWEST: Self = <$t>::NEG_INFINITY;
            const GREATEST: Self = <$t>::INFINITY;
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self + other
            }
            #[inline(always)]
            fn sub(self, other: Self) -> Self {
                self - other
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self * other
            }
            #[inline(always)]
            fn div(self, other: Self) -> Self {
                self / other
            }
            #[inline(always)]
            fn remainder(self, other: Self) -> Self {
                self % other
            }
            #[inline(always)]
            fn smaller(self, other: Self) -> Self {
                let smaller = if self <= other { self } else { other };
                if self.is_nan() | other.is_nan() { self + other } else { smaller }
            }
            #[inline(always)]
            fn larger(self, other: Self) -> Self {
                let larger = if self >= other { self } else { other };
                if self.is_nan() | other.is_nan() { self + other } else { larger }
            }
            #[inline(always)]
            fn power<L: Level>(self, other: Self) -> Self {
                $power(self, other)
            }
            #[inline(always)]
            fn negated(self) -> Self {
                -self
            }
            #[inline(always)]
            fn magnitude(self) -> Self {
                self.abs()
            }
            #[inline(always)]
            fn sign(self) -> Self {
                let unit = (1.0 as $t).copysign(self);
                if (self == 0.0) | self.is_nan() { self } else { unit }
            }
            #[inline(always)]
            fn rounded_down<L: Level>(self) -> Self {
                L::$floor(self)
            }
            #[inline(always)]
            fn rounded<L: Level>(self) -> Self {
                L::$round(self)
            }
        }
    };
}

float_number!(f32, floor, round, vecmath::pow::<L>);
float_number!(f64, floor64, round64, libm::pow);

macro_rules! integer_number {
    ($t:ty, $magnitude:expr, $sign:expr) => {
        impl Number for $t {
            const ZERO: Self = 0;
            const ONE: Self = 1;
            const LOWEST: Self = <$t>::MIN;
            const GREATEST: Self = <$t>::MAX;
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                self.wrapping_add(other)
            }
            #[inline(always)]
            fn sub(self, other: Self) -> Self {
                self.wrapping_sub(other)
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }
            #[inline(always)]
            fn div(self, other: Self) -> Self {
                if other == 0 { 0 } else { self.wrapping_div(other) }
            }
            #[inline(always)]
            fn remainder(self, other: Self) -> Self {
                if other == 0 { 0 } else { self.wrapping_rem(other) }
            }
            #[inline(always)]
            fn smaller(self, other: Self) -> Self {
                self.min(other)
            }
            #[inline(always)]
            fn larger(self, other: Self) -> Self {
                self.max(other)
            }
            #[inline(always)]
            #[allow(
                clippy::cast_lossless,
                reason = "not every type of the macro has the lossless conversion"
            )]
            fn power<L: Level>(self, other: Self) -> Self {
                integer_power(self as i64, other as i64) as $t
            }
            #[inline(always)]
            fn negated(self) -> Self {
                self.wrapping_neg()
            }
            #[inline(always)]
            fn magnitude(self) -> Self {
                $magnitude(self)
            }
            #[inline(always)]
            fn sign(self) -> Self {
                $sign(self)
            }
            #[inline(always)]
            fn rounded_down<L: Level>(self) -> Self {
                self
            }
            #[inline(always)]
            fn rounded<L: Level>(self) -> Self {
                self
            }
        }
    };
}

integer_number!(i32, i32::wrapping_abs, i32::signum);
integer_number!(i64, i64::wrapping_abs, i64::signum);
integer_number!(u32, |v| v, |v: u32| v.min(1));
integer_number!(u64, |v| v, |v: u64| v.min(1));

fn integer_power(base: i64, exponent: i64) -> i64 {
    match u32::try_from(exponent) {
        Ok(exponent) => base.wrapping_pow(exponent),
        Err(_) if base == 1 || (base == -1 && exponent % 2 == 0) => 1,
        Err(_) if base == -1 => -1,
        Err(_) => 0,
    }
}

impl Float for f32 {
    #[inline(always)]
    fn exp<L: Level>(self) -> f32 {
        vecmath::exp::<L>(self)
    }
    #[inline(always)]
    fn log<L: Level>(self) -> f32 {
        vecmath::log::<L>(self)
    }
    #[inline(always)]
    fn sqrt(self) -> f32 {
        f32::sqrt(self)
    }
    #[inline(always)]
    fn rsqrt(self) -> f32 {
        vecmath::rsqrt(self)
    }
    #[inline(always)]
    fn sin<L: Level>(self) -> f32 {
        vecmath::sin::<L>(self)
    }
    #[inline(always)]
    fn cos<L: Level>(self) -> f32 {
        vecmath::cos::<L>(self)
    }
    #[inline(always)]
    fn needs_range_reduction(self) -> bool {
        vecmath::is_large_angle(self)
    }
    fn sin_large(self) -> f32 {
        vecmath::sin_large(self)
    }
    fn cos_large(self) -> f32 {
        vecmath::cos_large(self)
    }
    #[inline(always)]
    fn atan<L: Level>(self) -> f32 {
        vecmath::atan::<L>(self)
    }
    #[inline(always)]
    fn erf<L: Level>(self) -> f32 {
        vecmath::erf::<L>(self)
    }
    #[inline(always)]
    fn tanh<L: Level>(self) -> f32 {
        vecmath::tanh::<L>(self)
    }
    #[inline(always)]
    fn sigmoid<L: Level>(self) -> f32 {
        vecmath::sigmoid::<L>(self)
    }
}

impl Float for f64 {
    #[inline(always)]
    fn exp<L: Level>(self) -> f64 {
        libm::exp(self)
    }
    #[inline(always)]
    fn log<L: Level>(self) -> f64 {
        libm::log(self)
    }
    #[inline(always)]
    fn sqrt(self) -> f64 {
        f64::sqrt(self)
    }
    #[inline(always)]
    fn rsqrt(self) -> f64 {
        1.0 / f64::sqrt(self)
    }
    #[inline(always)]
    fn sin<L: Level>(self) -> f64 {
        libm::sin(self)
    }
    #[inline(always)]
    fn cos<L: Level>(self) -> f64 {
        libm::cos(self)
    }
    #[inline(always)]
    fn needs_range_reduction(self) -> bool {
        false
    }
    fn sin_large(self) -> f64 {
        libm::sin(self)
    }
    fn cos_large(self) -> f64 {
        libm::cos(self)
    }
    #[inline(always)]
    fn atan<L: Level>(self) -> f64 {
        libm::atan(self)
    }
    #[inline(always)]
    fn erf<L: Level>(self) -> f64 {
        libm::erf(self)
    }
    #[inline(always)]
    fn tanh<L: Level>(self) -> f64 {
        libm::tanh(self)
    }
    #[inline(always)]
    fn sigmoid<L: Level>(self) -> f64 {
        1.0 / (1.0 + libm::exp(-self))
    }
}

/// The storage type of an element.
pub(crate) trait Stored: Copy + 'static {
    /// Type of the element in computations.
    type Computed: Copy + 'static;
    fn decode(self) -> Self::Computed;
    fn encode(value: Self::Computed) -> Self;
}

macro_rules! stored {
    ($($t:ty => $computed:ty),*) => {$(
        impl Stored for $t {
            type Computed = $computed;
            #[inline(always)]
            fn decode(self) -> $computed {
                self as $computed
            }
            #[inline(always)]
            fn encode(value: $computed) -> $t {
                value as $t
            }
        }
    )*};
}

stored!(f32 => f32, f64 => f64, i8 => i32, i16 => i32, i32 => i32, i64 => i64);
stored!(u8 => u32, u16 => u32, u32 => u32, u64 => u64);

/// A stored truth value. Truth values are computed as bytes 0 and 1.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Truth(u8);

impl Stored for Truth {
    type Computed = u8;
    #[inline(always)]
    fn decode(self) -> u8 {
        u8::from(self.0 != 0)
    }
    #[inline(always)]
    fn encode(value: u8) -> Truth {
        Truth(value)
    }
}

/// The bits of a half-precision number. Conversions are arithmetic, without branches or tables, and so become vector
/// code at every level.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct F16(u16);

impl Stored for F16 {
    type Computed = f32;

    #[inline(always)]
    fn decode(self) -> f32 {
        // Read as an f32, these bits are too small by a factor of 2^112. The multiplication also normalises subnormals.
        const SCALE: f32 = f32::from_bits((127 + 112) << 23);
        let magnitude = u32::from(self.0 & 0x7fff) << 13;
        let scaled = (f32::from_bits(magnitude) * SCALE).to_bits();
        let special = magnitude | 0x7f80_0000;
        let special = if magnitude > 0x7c00 << 13 { special | 0x0040_0000 } else { special };
        let bits = if magnitude >= 0x7c00 << 13 { special } else { scaled };
        f32::from_bits(bits | u32::from(self.0 & 0x8000) << 16)
    }

    #[inline(always)]
    fn encode(value: f32) -> F16 {
        let bits = value.to_bits();
        let sign = (bits >> 16) & 0x8000;
        let magnitude = bits & 0x7fff_ffff;
        // Normal results: shift the exponent, and round by the dropped bits. Ties go to even.
        let normal =
            magnitude.wrapping_sub(112 << 23).wrapping_add(0x0fff).wrapping_add((magnitude >> 13) & 1) >> 13;
        // Subnormal results: the last bit of the sum is the last bit of the result, so the addition rounds.
        const MAGIC: f32 = f32::from_bits((126) << 23);
        let subnormal = (f32::from_bits(magnitude) + MAGIC).to_bits().wrapping_sub(MAGIC.to_bits());
        // Magnitudes of 65520 and more round to infinity.
        let overflow = if magnitude > 0x7f80_0000 { 0x7e00 | ((magnitude >> 13) & 0x03ff) } else { 0x7c00 };
        let small = if magnitude < 113 << 23 { subnormal } else { normal };
        let result = if magnitude >= 0x477f_f000 { overflow } else { small };
        F16((result | sign) as u16)
    }
}

/// The upper half of a single-precision number.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Bf16(u16);

impl Stored for Bf16 {
    type Computed = f32;

    #[inline(always)]
    fn decode(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    #[inline(always)]
    fn encode(value: f32) -> Bf16 {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let nan = (bits >> 16) | 0x0040;
        Bf16(if value.is_nan() { nan } else { rounded } as u16)
    }
}

/// A 16-bit float.
pub(crate) trait Float16: Stored<Computed = f32> {
    /// Returns the number that a store of `value` and a load read back, without memory.
    fn nearest(value: f32) -> f32;
}

impl Float16 for F16 {
    #[inline(always)]
    fn nearest(value: f32) -> f32 {
        let bits = value.to_bits();
        let magnitude = bits & 0x7fff_ffff;
        // Rounds as `encode`, but in place: ten digits of the fraction remain.
        let normal = magnitude.wrapping_add(0x0fff).wrapping_add((magnitude >> 13) & 1) & !0x1fff;
        let subnormal = ((f32::from_bits(magnitude) + 0.5) - 0.5).to_bits();
        let overflow =
            if magnitude > 0x7f80_0000 { (magnitude & !0x1fff) | 0x7fc0_0000 } else { 0x7f80_0000 };
        let small = if magnitude < 113 << 23 { subnormal } else { normal };
        let result = if magnitude >= 0x477f_f000 { overflow } else { small };
        f32::from_bits(result | (bits & 0x8000_0000))
    }
}

impl Float16 for Bf16 {
    #[inline(always)]
    fn nearest(value: f32) -> f32 {
        Bf16::encode(value).decode()
    }
}

/// A number stored as `f32`, and read as the nearest number of a narrower type.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct RoundedF32<N>(f32, PhantomData<N>);

impl<N: Float16> Stored for RoundedF32<N> {
    type Computed = f32;

    #[inline(always)]
    fn decode(self) -> f32 {
        N::nearest(self.0)
    }

    #[inline(always)]
    fn encode(value: f32) -> RoundedF32<N> {
        RoundedF32(value, PhantomData)
    }
}

/// Evaluates an expression with `$s` as the storage type of a [`ortrain_expr::DType`].
macro_rules! with_stored {
    ($dtype:expr, $s:ident => $e:expr) => {
        match $dtype {
            ortrain_expr::DType::F32 => {
                type $s = f32;
                $e
            }
            ortrain_expr::DType::F64 => {
                type $s = f64;
                $e
            }
            ortrain_expr::DType::F16 => {
                type $s = $crate::tile::number::F16;
                $e
            }
            ortrain_expr::DType::BF16 => {
                type $s = $crate::tile::number::Bf16;
                $e
            }
            ortrain_expr::DType::I8 => {
                type $s = i8;
                $e
            }
            ortrain_expr::DType::I16 => {
                type $s = i16;
                $e
            }
            ortrain_expr::DType::I32 => {
                type $s = i32;
                $e
            }
            ortrain_expr::DType::I64 => {
                type $s = i64;
                $e
            }
            ortrain_expr::DType::U8 | ortrain_expr::DType::Small(_) => {
                type $s = u8;
                $e
            }
            ortrain_expr::DType::U16 => {
                type $s = u16;
                $e
            }
            ortrain_expr::DType::U32 => {
                type $s = u32;
                $e
            }
            ortrain_expr::DType::U64 => {
                type $s = u64;
                $e
            }
            ortrain_expr::DType::Bool => {
                type $s = $crate::tile::number::Truth;
                $e
            }
        }
    };
}
pub(crate) use with_stored;

/// Evaluates an expression with `$t` as the Rust type of a numeric [`ortrain_expr::Type`], or `$bool` for truth values.
macro_rules! with_number {
    ($ty:expr, $t:ident => $e:expr, bool => $bool:expr) => {
        match $ty {
            ortrain_expr::Type::F32 => {
                type $t = f32;
                $e
            }
            ortrain_expr::Type::F64 => {
                type $t = f64;
                $e
            }
            ortrain_expr::Type::I32 => {
                type $t = i32;
                $e
            }
            ortrain_expr::Type::I64 => {
                type $t = i64;
                $e
            }
            ortrain_expr::Type::U32 => {
                type $t = u32;
                $e
            }
            ortrain_expr::Type::U64 => {
                type $t = u64;
                $e
            }
            ortrain_expr::Type::Bool => $bool,
        }
    };
}
pub(crate) use with_number;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_match_the_half_crate() {
        for bits in 0..=u16::MAX {
            let (actual, theirs) = (F16(bits).decode(), half::f16::from_bits(bits).to_f32());
            assert!(
                actual.to_bits() == theirs.to_bits() || (actual.is_nan() && theirs.is_nan()),
                "{bits:#x}"
            );
            let (actual, theirs) = (Bf16(bits).decode(), half::bf16::from_bits(bits).to_f32());
            assert!(
                actual.to_bits() == theirs.to_bits() || (actual.is_nan() && theirs.is_nan()),
                "{bits:#x}"
            );
        }
        let neighbors = (0..=u16::MAX).flat_map(|bits| {
            let value = half::f16::from_bits(bits).to_f32().to_bits();
            // Values around every representable number and around every midpoint.
            [0u32, 0xfff, 0x1000, 0x1001].map(|delta| value.wrapping_add(delta))
        });
        for bits in (0..u32::MAX).step_by(997).chain(neighbors).chain(0x477f_e000..0x4780_0100) {
            let value = f32::from_bits(bits);
            let (actual, theirs) = (F16::encode(value).0, half::f16::from_f32(value));
            assert!(
                actual == theirs.to_bits() || (theirs.is_nan() && half::f16::from_bits(actual).is_nan()),
                "f16 of {value:e} ({bits:#x}): {actual:#x}, not {:#x}",
                theirs.to_bits()
            );
            let (actual, theirs) = (Bf16::encode(value).0, half::bf16::from_f32(value));
            assert!(
                actual == theirs.to_bits() || (theirs.is_nan() && half::bf16::from_bits(actual).is_nan()),
                "bf16 of {value:e}"
            );
            let [half, brain] = [F16::encode(value).decode(), Bf16::encode(value).decode()];
            assert_eq!(F16::nearest(value).to_bits(), half.to_bits(), "f16 of {value:e}");
            assert_eq!(
                RoundedF32::<Bf16>::encode(value).decode().to_bits(),
                brain.to_bits(),
                "bf16 of {value:e}"
            );
        }
    }
}
