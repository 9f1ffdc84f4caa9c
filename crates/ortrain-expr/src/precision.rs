//! Precisions of the factors of inner products.

use std::fmt;
use std::str::FromStr;

use crate::{BinaryOp, ReduceOp, Scalar, Type};

/// Precision of the factors of an inner product, in a matrix product or a convolution of `f32`. Sums are always
/// accumulated in `f32`, for every precision.
///
/// A factor is rounded to bfloat16, or split into a sum of several bfloat16 terms ([`Precision::terms`]). Each term is
/// the bfloat16 nearest to the remainder after the terms before it. Products of bfloat16 are exact in `f32`.
///
/// A sum that is NaN is replaced by the sum of the products of first terms. Otherwise, an infinite factor would always
/// give NaN: its further terms are zero, and infinity times zero is NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Factors are multiplied as they are.
    #[default]
    F32,
    /// Factors are rounded to bfloat16: 8 bits.
    Bf16,
    /// Factors have two terms, together 16 bits. Three products are computed, without the product of the small terms.
    Bf16x3,
    /// Factors have three terms, together all 24 bits of an `f32`. Six products are computed, without the three
    /// smallest products.
    Bf16x6,
}

impl Precision {
    /// All precisions.
    pub const ALL: [Precision; 4] = [Precision::F32, Precision::Bf16, Precision::Bf16x3, Precision::Bf16x6];

    /// Returns the name of the precision in the user interface.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Precision::F32 => "f32",
            Precision::Bf16 => "bf16",
            Precision::Bf16x3 => "bf16x3",
            Precision::Bf16x6 => "bf16x6",
        }
    }

    /// Returns the number of terms of a factor: one `f32`, or one to three bfloat16.
    #[must_use]
    pub fn terms(self) -> usize {
        match self {
            Precision::F32 | Precision::Bf16 => 1,
            Precision::Bf16x3 => 2,
            Precision::Bf16x6 => 3,
        }
    }

    /// Returns the pairs of terms (left factor, right factor) that are multiplied, the largest products first. In these
    /// pairs, the sum of the indices is less than [`Precision::terms`].
    #[must_use]
    pub fn products(self) -> &'static [(usize, usize)] {
        const ALL: [(usize, usize); 6] = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0)];
        match self {
            Precision::F32 | Precision::Bf16 => &ALL[..1],
            Precision::Bf16x3 => &ALL[..3],
            Precision::Bf16x6 => &ALL,
        }
    }

    /// Returns the precision for a matrix product with these sizes (m, n, k). The result is `F32` if a size is small:
    /// an element then has few products, and rounding it takes longer than multiplying it.
    #[must_use]
    pub fn for_product(self, sides: [usize; 3]) -> Precision {
        const SHORT: usize = 16;
        if sides.iter().all(|&side| side > SHORT) { self } else { Precision::F32 }
    }

    /// Splits a factor into its terms. Terms beyond [`Precision::terms`] are zero.
    ///
    /// Terms are rounded to the nearest bfloat16, ties to even. A finite factor that would round to infinity is
    /// truncated instead if further terms represent the remainder. Infinity and NaN have one term.
    #[must_use]
    pub fn split(self, factor: f32) -> [f32; 3] {
        let rounded = |value: f32| half::bf16::from_f32(value).to_f32();
        let mut terms = [0.0; 3];
        if self == Precision::F32 {
            terms[0] = factor;
            return terms;
        }
        terms[0] = rounded(factor);
        if self.terms() > 1 && factor.is_finite() {
            if terms[0].is_infinite() {
                terms[0] = f32::from_bits(factor.to_bits() & 0xffff_0000);
            }
            let mut rest = factor - terms[0];
            for term in &mut terms[1..self.terms()] {
                *term = rounded(rest);
                rest -= *term;
            }
        }
        terms
    }
}

/// Inner product, accumulated in a scalar type.
#[derive(Clone, Copy, Debug)]
pub struct InnerProduct {
    total: Scalar,
    /// Sum of the products of first terms only.
    first: Scalar,
}

impl InnerProduct {
    /// Returns the empty sum.
    #[must_use]
    pub fn new(ty: Type) -> InnerProduct {
        let zero = Scalar::from_f64(ty, 0.0);
        InnerProduct { total: zero, first: zero }
    }

    /// Adds the product of two factors, or the products of their terms.
    pub fn add(&mut self, precision: Precision, a: Scalar, b: Scalar) {
        let ty = self.total.ty();
        let add = |total: Scalar, x: Scalar, y: Scalar| {
            ReduceOp::Sum.combine(total, Scalar::binary(BinaryOp::Mul, x, y))
        };
        if precision == Precision::F32 {
            self.total = add(self.total, a.convert(ty), b.convert(ty));
            return;
        }
        let terms = |factor: Scalar| {
            precision.split(factor.to_f64() as f32).map(|term| Scalar::from_f64(ty, f64::from(term)))
        };
        let (a, b) = (terms(a), terms(b));
        self.first = add(self.first, a[0], b[0]);
        self.total = precision.products().iter().fold(self.total, |total, &(i, j)| add(total, a[i], b[j]));
    }

    /// Returns the sum of the products that were added in `precision`. If this sum is NaN, returns the sum of the
    /// products of first terms.
    #[must_use]
    pub fn result(self, precision: Precision) -> Scalar {
        if precision.terms() > 1 && self.total.to_f64().is_nan() { self.first } else { self.total }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Error for a text that is not the name of a [`Precision`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownPrecision(pub String);

impl fmt::Display for UnknownPrecision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d] = Precision::ALL.map(Precision::name);
        write!(f, "unknown precision {:?}; expected one of {a:?}, {b:?}, {c:?} and {d:?}", self.0)
    }
}

impl std::error::Error for UnknownPrecision {}

impl FromStr for Precision {
    type Err = UnknownPrecision;

    fn from_str(name: &str) -> Result<Precision, UnknownPrecision> {
        let parsed = Precision::ALL.into_iter().find(|precision| precision.name() == name);
        parsed.ok_or_else(|| UnknownPrecision(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Yields numbers of all magnitudes, in equal steps through the bit patterns.
    fn numbers() -> impl Iterator<Item = f32> {
        (0..=u32::MAX).step_by(0xfff1).map(f32::from_bits)
    }

    #[test]
    fn names_round_trip() {
        for precision in Precision::ALL {
            assert_eq!(precision.to_string().parse(), Ok(precision));
        }
        let error = "f16".parse::<Precision>().unwrap_err();
        assert_eq!(
            error.to_string(),
            r#"unknown precision "f16"; expected one of "f32", "bf16", "bf16x3" and "bf16x6""#
        );
    }

    #[test]
    fn terms_are_bfloat16_and_sum_to_the_factor() {
        for (precision, bits) in [(Precision::Bf16, 8), (Precision::Bf16x3, 16), (Precision::Bf16x6, 24)] {
            for number in numbers().filter(|number| number.is_finite()) {
                let terms = precision.split(number);
                assert!(
                    terms.iter().all(|term| term.to_bits() & 0xffff == 0),
                    "{precision}, {number:e}: {terms:?}"
                );
                let sum: f64 = terms.iter().map(|&term| f64::from(term)).sum();
                // The tolerance is half of the last bit, and at least half of the smallest positive bfloat16.
                let close = (f64::from(number).abs() * (-f64::from(bits)).exp2()).max(2f64.powi(-134));
                let overflows = precision == Precision::Bf16 && number.abs() >= f32::from_bits(0x7f7f_8000);
                assert!(
                    overflows || (sum - f64::from(number)).abs() <= close,
                    "{precision}, {number:e}: {terms:?}"
                );
                assert!(!overflows || terms[0].is_infinite());
            }
        }
    }

    #[test]
    fn ties_round_to_even() {
        let one_and = |bits: u32| f32::from_bits(0x3f80_0000 + bits);
        assert_eq!(Precision::Bf16.split(one_and(0x8000))[0], 1.0);
        assert_eq!(Precision::Bf16.split(one_and(0x8001))[0], one_and(0x1_0000));
        assert_eq!(Precision::Bf16.split(one_and(0x1_8000))[0], one_and(0x2_0000));
    }

    #[test]
    fn nonfinite_factors_have_one_term() {
        for precision in [Precision::Bf16, Precision::Bf16x3, Precision::Bf16x6] {
            assert_eq!(precision.split(f32::INFINITY), [f32::INFINITY, 0.0, 0.0]);
            assert_eq!(precision.split(f32::NEG_INFINITY), [f32::NEG_INFINITY, 0.0, 0.0]);
            let [nan, others @ ..] = precision.split(f32::NAN);
            assert!(nan.is_nan() && others == [0.0; 2]);
        }
    }

    #[test]
    fn products_with_short_sides_stay_in_f32() {
        assert_eq!(Precision::Bf16.for_product([17, 17, 17]), Precision::Bf16);
        for sides in [[16, 99, 99], [99, 16, 99], [99, 99, 16], [0, 99, 99]] {
            assert_eq!(Precision::Bf16.for_product(sides), Precision::F32);
        }
    }

    #[test]
    fn products_pair_the_large_terms() {
        for precision in Precision::ALL {
            let terms = precision.terms();
            let pairs = (0..terms).flat_map(|i| (0..terms).map(move |j| (i, j)));
            let mut large: Vec<(usize, usize)> = pairs.filter(|(i, j)| i + j < terms).collect();
            let mut products = precision.products().to_vec();
            large.sort_unstable();
            products.sort_unstable();
            assert_eq!(products, large, "{precision}");
        }
    }
}
