//! Arithmetic of the compute types of products.

use crate::isa::Level;
use crate::tile::number::Number;

/// Arithmetic of a compute type of products.
pub(crate) trait Arithmetic: Number {
    const BYTES: usize = size_of::<Self>();
    /// True for `f32`.
    const IS_F32: bool = false;
    /// Computes `a * b + c`, as the level does.
    fn mul_add_at<L: Level>(a: Self, b: Self, c: Self) -> Self;
    /// Returns true for NaN.
    fn is_nan_value(self) -> bool;
    /// Returns the nearest value to `number`.
    fn round_from_f64(value: f64) -> Self;
}

impl Arithmetic for f32 {
    const IS_F32: bool = true;

    #[inline(always)]
    fn mul_add_at<L: Level>(a: f32, b: f32, c: f32) -> f32 {
        L::mul_add(a, b, c)
    }

    fn is_nan_value(self) -> bool {
        self.is_nan()
    }

    fn round_from_f64(value: f64) -> f32 {
        value as f32
    }
}

impl Arithmetic for f64 {
    #[inline(always)]
    fn mul_add_at<L: Level>(a: f64, b: f64, c: f64) -> f64 {
        L::mul_add64(a, b, c)
    }

    fn is_nan_value(self) -> bool {
        self.is_nan()
    }

    fn round_from_f64(value: f64) -> f64 {
        value
    }
}

impl Arithmetic for i32 {
    #[inline(always)]
    fn mul_add_at<L: Level>(a: i32, b: i32, c: i32) -> i32 {
        a.wrapping_mul(b).wrapping_add(c)
    }

    fn is_nan_value(self) -> bool {
        false
    }

    fn round_from_f64(value: f64) -> i32 {
        value as i32
    }
}
