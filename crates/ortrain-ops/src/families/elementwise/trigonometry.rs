//! Circular and hyperbolic functions and their inverses, rows of the table of element-wise operators.
//!
//! Tan-7, 22; Asin-7, 22; Acos-7, 22; Atan-7, 22; Sinh-9, 22; Cosh-9, 22; Asinh-9, 22; Acosh-9, 22; Atanh-9, 22 of
//! ONNX; version 22 adds bfloat16. (Sine and cosine are primitives in `elementwise.rs`.)
//!
//! The formulas avoid cancellation near 0 and near the ends of the domain, and they do not overflow before the result
//! does. Outside of the domain the result is NaN. Errors in float32 are a few units in the last place. Gradients are
//! closed forms of the input, and infinite where the slope is.

use ortrain_expr::{Builder, CompareOp, Reg, UnaryOp};
use ortrain_graph::Attrs;

use super::row::{Row, TypeConstraint, row, unary};
use crate::OpError;
use crate::support::activation_functions::log_one_plus;

/// Bound above which `sqrt(x^2 + 1)` and `sqrt(x^2 - 1)` are `x` in every float type.
const LARGE_ROOT_ARGUMENT: f64 = 1e9;

fn one_like(b: &mut Builder, like: Reg) -> Reg {
    b.constant(b.ty(like), 1.0)
}

/// Emits `(1 - x) (1 + x)`, which avoids the cancellation of `1 - x^2`.
fn one_minus_square(b: &mut Builder, x: Reg) -> Reg {
    let one = one_like(b, x);
    let (left, right) = (b.sub(one, x), b.add(one, x));
    b.mul(left, right)
}

/// Returns true if `x` is so large that its root formulas are `x` itself.
fn is_large(b: &mut Builder, x: Reg) -> Reg {
    let end = b.constant(b.ty(x), LARGE_ROOT_ARGUMENT);
    b.compare(CompareOp::Lt, end, x)
}

fn tan(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let (sine, cosine) = (b.unary(UnaryOp::Sin, x[0]), b.unary(UnaryOp::Cos, x[0]));
    Ok(b.div(sine, cosine))
}

fn tan_gradient(b: &mut Builder, x: Reg, g: Reg, _: &Attrs) -> Result<Reg, OpError> {
    let cosine = b.unary(UnaryOp::Cos, x);
    let square = b.mul(cosine, cosine);
    Ok(b.div(g, square))
}

/// Emits the angle with the tangent `x / sqrt(1 - x^2)`, which is infinite at the ends.
fn asin(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let square = one_minus_square(b, x[0]);
    let root = b.unary(UnaryOp::Sqrt, square);
    let tangent = b.div(x[0], root);
    Ok(b.unary(UnaryOp::Atan, tangent))
}

fn asin_gradient(b: &mut Builder, x: Reg, g: Reg, _: &Attrs) -> Result<Reg, OpError> {
    let square = one_minus_square(b, x);
    let root = b.unary(UnaryOp::Sqrt, square);
    Ok(b.div(g, root))
}

/// Emits twice the angle with the tangent `sqrt((1 - x) / (1 + x))`.
fn acos(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let (one, two) = (one_like(b, x[0]), b.constant(b.ty(x[0]), 2.0));
    let (left, right) = (b.sub(one, x[0]), b.add(one, x[0]));
    let square = b.div(left, right);
    let tangent = b.unary(UnaryOp::Sqrt, square);
    let half = b.unary(UnaryOp::Atan, tangent);
    Ok(b.mul(half, two))
}

fn acos_gradient(b: &mut Builder, x: Reg, g: Reg, attrs: &Attrs) -> Result<Reg, OpError> {
    let opposite = asin_gradient(b, x, g, attrs)?;
    Ok(b.unary(UnaryOp::Neg, opposite))
}

/// Emits half of `exp(|x|)` and half of its inverse: neither overflows before their sum does.
fn half_exponentials(b: &mut Builder, x: Reg) -> (Reg, Reg) {
    let half = b.constant(b.ty(x), 0.5);
    let size = b.unary(UnaryOp::Abs, x);
    let halved = b.mul(size, half);
    let root = b.unary(UnaryOp::Exp, halved);
    let (scaled, square) = (b.mul(root, half), b.mul(root, root));
    (b.mul(scaled, root), b.div(half, square))
}

/// Emits sinh; near 0 it is `2 t / (1 - t^2)` with `t = tanh(x / 2)`.
fn emit_sinh(b: &mut Builder, x: Reg) -> Reg {
    let ty = b.ty(x);
    let (one, half, two) = (one_like(b, x), b.constant(ty, 0.5), b.constant(ty, 2.0));
    let (grown, shrunk) = half_exponentials(b, x);
    let difference = b.sub(grown, shrunk);
    let sign = b.unary(UnaryOp::Sign, x);
    let large_value = b.mul(difference, sign);
    let halved = b.mul(x, half);
    let t = b.unary(UnaryOp::Tanh, halved);
    let (twice, rest) = (b.mul(t, two), one_minus_square(b, t));
    let small_value = b.div(twice, rest);
    let size = b.unary(UnaryOp::Abs, x);
    let is_large = b.compare(CompareOp::Lt, one, size);
    b.select(is_large, large_value, small_value)
}

fn emit_cosh(b: &mut Builder, x: Reg) -> Reg {
    let (grown, shrunk) = half_exponentials(b, x);
    b.add(grown, shrunk)
}

fn sinh_gradient(b: &mut Builder, x: Reg, g: Reg, _: &Attrs) -> Result<Reg, OpError> {
    let slope = emit_cosh(b, x);
    Ok(b.mul(g, slope))
}

fn cosh_gradient(b: &mut Builder, x: Reg, g: Reg, _: &Attrs) -> Result<Reg, OpError> {
    let slope = emit_sinh(b, x);
    Ok(b.mul(g, slope))
}

/// Emits `log(2 x)` for a large `x`.
fn log_of_double(b: &mut Builder, x: Reg) -> Reg {
    let two = b.constant(b.ty(x), std::f64::consts::LN_2);
    let log = b.unary(UnaryOp::Log, x);
    b.add(log, two)
}

/// Emits `log(1 + (a + a^2 / (1 + sqrt(1 + a^2))))` for the absolute value `a`, with the sign of `x`.
fn asinh(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let one = one_like(b, x[0]);
    let size = b.unary(UnaryOp::Abs, x[0]);
    let square = b.mul(size, size);
    let sum = b.add(one, square);
    let root = b.unary(UnaryOp::Sqrt, sum);
    let below = b.add(one, root);
    let correction = b.div(square, below);
    let beyond_one = b.add(size, correction);
    let small_value = log_one_plus(b, beyond_one);
    let (large, large_value) = (is_large(b, size), log_of_double(b, size));
    let value = b.select(large, large_value, small_value);
    let sign = b.unary(UnaryOp::Sign, x[0]);
    Ok(b.mul(value, sign))
}

fn asinh_gradient(b: &mut Builder, x: Reg, g: Reg, _: &Attrs) -> Result<Reg, OpError> {
    let one = one_like(b, x);
    let size = b.unary(UnaryOp::Abs, x);
    let square = b.mul(size, size);
    let sum = b.add(one, square);
    let root = b.unary(UnaryOp::Sqrt, sum);
    let large = is_large(b, size);
    let below = b.select(large, size, root);
    Ok(b.div(g, below))
}

/// Emits `log(1 + (t + sqrt(t (t + 2))))` with `t = x - 1`.
fn acosh(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let ty = b.ty(x[0]);
    let (one, two, nan) = (one_like(b, x[0]), b.constant(ty, 2.0), b.constant(ty, f64::NAN));
    let t = b.sub(x[0], one);
    let further = b.add(t, two);
    let square = b.mul(t, further);
    let root = b.unary(UnaryOp::Sqrt, square);
    let beyond_one = b.add(t, root);
    let small_value = log_one_plus(b, beyond_one);
    let (large, large_value) = (is_large(b, x[0]), log_of_double(b, x[0]));
    let value = b.select(large, large_value, small_value);
    // Far below its domain the formula has a value.
    let outside = b.compare(CompareOp::Lt, x[0], one);
    Ok(b.select(outside, nan, value))
}

/// Divides by two roots: their product does not overflow and is NaN below 1.
fn acosh_gradient(b: &mut Builder, x: Reg, g: Reg, _: &Attrs) -> Result<Reg, OpError> {
    let one = one_like(b, x);
    let (less, more) = (b.sub(x, one), b.add(x, one));
    let (less, more) = (b.unary(UnaryOp::Sqrt, less), b.unary(UnaryOp::Sqrt, more));
    let root = b.mul(less, more);
    Ok(b.div(g, root))
}

/// Emits half of `log(1 + 2 a / (1 - a))` for the absolute value `a`, with the sign of `x`.
fn atanh(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let ty = b.ty(x[0]);
    let (one, half, two) = (one_like(b, x[0]), b.constant(ty, 0.5), b.constant(ty, 2.0));
    let size = b.unary(UnaryOp::Abs, x[0]);
    let (twice, rest) = (b.mul(size, two), b.sub(one, size));
    let beyond_one = b.div(twice, rest);
    let log = log_one_plus(b, beyond_one);
    let value = b.mul(log, half);
    let sign = b.unary(UnaryOp::Sign, x[0]);
    Ok(b.mul(value, sign))
}

fn atanh_gradient(b: &mut Builder, x: Reg, g: Reg, _: &Attrs) -> Result<Reg, OpError> {
    let below = one_minus_square(b, x);
    Ok(b.div(g, below))
}

/// Rows of the table.
#[rustfmt::skip]
pub(super) static ROWS: &[Row] = &[
    row("Tan", &[7, 22], 1, TypeConstraint::Float, tan).backward(tan_gradient),
    row("Asin", &[7, 22], 1, TypeConstraint::Float, asin).backward(asin_gradient),
    row("Acos", &[7, 22], 1, TypeConstraint::Float, acos).backward(acos_gradient),
    row("Atan", &[7, 22], 1, TypeConstraint::Float, unary!(Atan)),
    row("Sinh", &[9, 22], 1, TypeConstraint::Float, |b, x, _| Ok(emit_sinh(b, x[0]))).backward(sinh_gradient),
    row("Cosh", &[9, 22], 1, TypeConstraint::Float, |b, x, _| Ok(emit_cosh(b, x[0]))).backward(cosh_gradient),
    row("Asinh", &[9, 22], 1, TypeConstraint::Float, asinh).backward(asinh_gradient),
    row("Acosh", &[9, 22], 1, TypeConstraint::Float, acosh).backward(acosh_gradient),
    row("Atanh", &[9, 22], 1, TypeConstraint::Float, atanh).backward(atanh_gradient),
];

#[cfg(test)]
mod tests {
    use ortrain_graph::{DType, Graph, Tensor};

    use super::*;
    use crate::passes;
    use crate::registry::{NEWEST_OPSET, Registry};
    use crate::testing::{
        check_decomposition, check_downgrade, check_gradients, f64s, generic_tensor, gradient_graph,
        one_node_graph, run,
    };

    /// Maximum error in float32, in units in the last place. It covers a few rounding errors, each of which may be
    /// doubled.
    const MAX_ULP: f64 = 6.0;
    /// Maximum error in float64, where the expected values of the library are inexact themselves.
    const MAX_ULP_WIDE: f64 = 10.0;

    const INF: f64 = f64::INFINITY;
    const NAN: f64 = f64::NAN;

    /// Name, value, slope, and the ends of an interval of the domain.
    type Function = (&'static str, fn(f64) -> f64, fn(f64) -> f64, [f64; 2]);

    const FUNCTIONS: [Function; 9] = [
        ("Tan", f64::tan, |x| 1.0 / x.cos().powi(2), [-1.5, 1.5]),
        ("Asin", f64::asin, |x| 1.0 / ((1.0 - x) * (1.0 + x)).sqrt(), [-1.0, 1.0]),
        ("Acos", f64::acos, |x| -1.0 / ((1.0 - x) * (1.0 + x)).sqrt(), [-1.0, 1.0]),
        ("Atan", f64::atan, |x| 1.0 / (1.0 + x * x), [-30.0, 30.0]),
        ("Sinh", f64::sinh, f64::cosh, [-20.0, 20.0]),
        ("Cosh", f64::cosh, f64::sinh, [-20.0, 20.0]),
        ("Asinh", f64::asinh, |x| 1.0 / x.hypot(1.0), [-40.0, 40.0]),
        (
            "Acosh",
            |x| (x - 1.0 + ((x - 1.0) * (x + 1.0)).sqrt()).ln_1p(),
            |x| 1.0 / ((x - 1.0) * (x + 1.0)).sqrt(),
            [1.0, 60.0],
        ),
        (
            "Atanh",
            |x| (0.5 * (2.0 * x.abs() / (1.0 - x.abs())).ln_1p()).copysign(x),
            |x| 1.0 / ((1.0 - x) * (1.0 + x)),
            [-1.0, 1.0],
        ),
    ];

    fn graph_of(op: &str, x: &Tensor) -> Graph {
        one_node_graph(NEWEST_OPSET, ("", op), &[Some(x)], 1, Attrs::new()).expect("valid")
    }

    /// Returns values and slopes at some points.
    fn values_and_slopes(op: &str, x: &Tensor) -> [Vec<f64>; 2] {
        let graph = graph_of(op, x);
        let ones = Tensor::filled(x.dtype(), x.dims(), 1.0);
        let gradient = gradient_graph(&graph, &[Some(ones)], &[0]);
        [&graph, &gradient]
            .map(|graph| run(graph, std::slice::from_ref(x)).expect("the graph runs")[0].to_f64())
    }

    #[test]
    fn values_and_slopes_are_precise() {
        const COUNT: usize = 4001;
        for (op, value, slope, [low, high]) in FUNCTIONS {
            let mut points: Vec<f64> =
                (0..COUNT).map(|k| low + (high - low) * k as f64 / (COUNT - 1) as f64).collect();
            // Near 0, if the domain contains it.
            let small = [1e-30, -1e-12, 3e-7, -2e-4, 1e-3, 0.02];
            points.extend(small.iter().filter(|_| low < 0.0));
            points.extend(small.iter().map(|x| 1.0 + x.abs()).filter(|_| low == 1.0));
            let narrow = Tensor::f32(&[points.len()], &points.iter().map(|&x| x as f32).collect::<Vec<_>>());
            for (x, unit, max_error) in [
                (&narrow, f64::from(f32::EPSILON), MAX_ULP),
                (&f64s(&[points.len()], &points), f64::EPSILON, MAX_ULP_WIDE),
            ] {
                let at = x.to_f64();
                for (got, exact) in values_and_slopes(op, x).iter().zip([value, slope]) {
                    for (k, &got) in got.iter().enumerate() {
                        let expected = exact(at[k]);
                        let close = (got - expected).abs() <= max_error * unit * expected.abs();
                        assert!(got == expected || close, "{op} at {}: {got}, not {expected}", at[k]);
                    }
                }
            }
        }
    }

    #[test]
    fn ends_of_domains_and_beyond() {
        let half = std::f64::consts::FRAC_PI_2;
        let cases: [(&str, &[[f64; 3]]); 9] = [
            ("Tan", &[[INF, NAN, NAN], [0.0, 0.0, 1.0]]),
            ("Asin", &[[1.0, half, INF], [-1.0, -half, INF], [1.5, NAN, NAN], [-INF, NAN, NAN]]),
            ("Acos", &[[1.0, 0.0, -INF], [-1.0, 2.0 * half, -INF], [-1.5, NAN, NAN], [INF, NAN, NAN]]),
            ("Atan", &[[INF, half, 0.0], [-INF, -half, 0.0], [1e30, half, 0.0]]),
            ("Sinh", &[[INF, INF, INF], [-INF, -INF, INF], [0.0, 0.0, 1.0]]),
            ("Cosh", &[[INF, INF, INF], [-INF, INF, -INF], [0.0, 1.0, 0.0]]),
            ("Asinh", &[[INF, INF, 0.0], [-INF, -INF, 0.0], [0.0, 0.0, 1.0], [-1e30, -69.770_699_2, 1e-30]]),
            (
                "Acosh",
                &[[INF, INF, 0.0], [1.0, 0.0, INF], [0.5, NAN, NAN], [-1e30, NAN, NAN], [-INF, NAN, NAN]],
            ),
            ("Atanh", &[[1.0, INF, INF], [-1.0, -INF, INF], [0.0, 0.0, 1.0], [-INF, NAN, 0.0]]),
        ];
        for (op, samples) in cases {
            for dtype in [DType::F64, DType::F32] {
                let x: Vec<f64> = samples.iter().map(|sample| sample[0]).chain([NAN]).collect();
                let x = Tensor::from_f64(dtype, vec![x.len()], &x);
                let [values, slopes] = values_and_slopes(op, &x);
                assert!(values.last().expect("NaN").is_nan(), "{op} of NaN");
                for (k, [at, value, slope]) in samples.iter().enumerate() {
                    for (got, expected) in [(values[k], *value), (slopes[k], *slope)] {
                        // Far outside, any slope of the formula is accepted.
                        let same = got == expected
                            || expected.is_nan() && got.is_nan()
                            || at.is_infinite() && value.is_nan();
                        let close = (got - expected).abs() <= 1e-6 * expected.abs().max(1e-30);
                        assert!(same || close, "{op} at {at} in {dtype}: {got}, not {expected}");
                    }
                }
            }
        }
        // exp(89) overflows float32, but half of it does not.
        let x = Tensor::f32(&[2], &[89.2, -89.2]);
        for (op, expected_signs) in [("Sinh", [1.0, -1.0]), ("Cosh", [1.0, 1.0])] {
            let got = values_and_slopes(op, &x)[0].clone();
            assert!(
                (0..2).all(|k| got[k].is_finite() && got[k].signum() == expected_signs[k]),
                "{op}: {got:?}"
            );
        }
    }

    #[test]
    fn gradients() {
        for (op, _, _, [low, high]) in FUNCTIONS {
            let (low, high) = (low.max(-3.0), high.min(4.0));
            let (middle, reach) = (0.5 * (low + high), 0.45 * (high - low));
            let points: Vec<f64> =
                generic_tensor(&[16], 3).to_f64().iter().map(|x| middle + reach * 0.5 * x).collect();
            let x = f64s(&[2, 8], &points);
            let graph = graph_of(op, &x);
            check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
            let mut gradient = gradient_graph(&graph, &[Some(generic_tensor(&[2, 8], 9))], &[0]);
            check_decomposition(&gradient, std::slice::from_ref(&x), 1e-12);
            passes::infer::infer(&mut gradient).expect("valid");
            let oldest = Registry::standard().find("", op).expect("known").since[0].max(7);
            for opset in [oldest, 9, 12, 22] {
                check_downgrade(&gradient, std::slice::from_ref(&x), opset);
            }
        }
    }
}
