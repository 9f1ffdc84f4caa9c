//! How far results may differ, and why.

use ortrain_expr::Precision;

/// Analytic gradient against central difference, relative to the larger of 1 and the difference. Both are computed in
/// float64 with a step of [`STEP`]: the difference itself is off by about `STEP^2 + 1e-16 / STEP`, and constants of
/// expressions are rounded to float32 (6e-8).
pub const GRADIENT: f64 = 2e-6;

/// Instruction of central differences.
pub const STEP: f64 = 1e-5;

/// A float32 backend against the same program in float64, relative to the largest magnitude in the tensor: sums of a
/// few hundred terms, each rounded to 2^-24, and functions of a few ULP.
pub const FLOAT32: f64 = 2e-5;

/// The magnitude that a result of nothing but zeros is compared with instead of its own: zeros may be what is left where terms
/// cancel, and not every device rounds quotients and square roots as the others do.
pub const CANCELLED: f64 = 1e-3;

/// [`FLOAT32`] where factors of products are rounded to bfloat16. A factor that was computed may differ in its last bit, and
/// then what is rounded may differ by a step: of 8 bits, of 16, or none beyond those of float32. Twice that, for gradients
/// of gradients.
#[must_use]
pub fn of_factors(precision: Precision) -> f64 {
    match precision {
        Precision::F32 | Precision::Bf16x6 => FLOAT32,
        Precision::Bf16x3 => 2.0 * FLOAT32,
        Precision::Bf16 => 1.6e-2,
    }
}

/// The same for results stored as float16 (2^-11 each).
pub const FLOAT16: f64 = 2e-3;

/// The same for results stored as bfloat16 (2^-8 each).
pub const BFLOAT16: f64 = 1.6e-2;
