//! Tolerances of results, with their reasons.

use ortrain_expr::Precision;

/// Tolerance of an analytic gradient against the central difference, relative to the larger of 1 and the
/// difference.
///
/// Both are computed in float64 with a step of [`STEP`]. The error of the difference itself is about
/// `STEP^2 + 1e-16 / STEP`, and constants of expressions are rounded to float32 (6e-8).
pub const GRADIENT: f64 = 2e-6;

/// Step of central differences.
pub const STEP: f64 = 1e-5;

/// Tolerance of a float32 backend against the same program in float64, relative to the largest magnitude in
/// the tensor. It allows for sums of a few hundred terms, each rounded to 2^-24, and functions with errors of
/// a few ULP.
pub const FLOAT32: f64 = 2e-5;

/// Minimum reference magnitude for all-zero results. Zeros may result from cancellation, and rounding of
/// quotients and square roots differs between devices.
pub const MIN_ZERO_MAGNITUDE: f64 = 1e-3;

/// Returns [`FLOAT32`], adapted to factors rounded to bfloat16.
///
/// A computed factor may differ in its last bit, so its rounded value may differ by one unit of 8 bits, of 16
/// bits, or of float32. The tolerance is twice that, for gradients of gradients.
#[must_use]
pub fn for_rounded_factors(precision: Precision) -> f64 {
    match precision {
        Precision::F32 | Precision::Bf16x6 => FLOAT32,
        Precision::Bf16x3 => 2.0 * FLOAT32,
        Precision::Bf16 => 1.6e-2,
    }
}

/// Tolerance of results stored as float16 (2^-11 each).
pub const FLOAT16: f64 = 2e-3;

/// Tolerance of results stored as bfloat16 (2^-8 each).
pub const BFLOAT16: f64 = 1.6e-2;
