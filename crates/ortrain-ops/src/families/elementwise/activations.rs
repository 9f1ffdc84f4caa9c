//! Activations, as rows of the table of element-wise operators, and the operators of ONNX Runtime for their gradients.
//!
//! Relu-6, 13, 14; LeakyRelu-6, 16; PRelu-7, 9, 16; Elu-6, 22; Selu-6, 22; Celu-12, 28; Softplus-1, 22; Softsign-1, 22;
//! HardSigmoid-6, 22; HardSwish-14, 22; Mish-18, 22; ThresholdedRelu-10, 22; Sigmoid-6, 13; Tanh-6, 13; Gelu-20;
//! Shrink-9; Swish-24; SwiGLU-28 (a Swish times a second input) of ONNX;
//! `QuickGelu`, `ReluGrad`, `LeakyReluGrad`, `SigmoidGrad`, `TanhGrad`, `GeluGrad`, `FastGeluGrad`, `QuickGeluGrad`,
//! `BiasGeluGrad_dX` and `BiasFastGeluGrad_dX` of `com.microsoft`. `Gelu`, `FastGelu` and `BiasGelu` of `com.microsoft`
//! are read as Gelu of ONNX. (Clip has optional inputs and is defined in its own file.)
//!
//! Values and gradients are correct for every input. At infinities they are the limit of the standard's formula, if the
//! formula has one. Intermediate overflow does not affect a result, and nothing cancels near 0. NaN gives NaN. At kinks
//! the gradient equals PyTorch's.

use ortrain_expr::{Builder, CompareOp, Reg, Type, UnaryOp};
use ortrain_graph::Attrs;

use super::row::{GradOp, Row, TypeConstraint, row, unary};
use crate::OpError;
use crate::class::{Class, Traits};
use crate::support::activation_functions::{
    ALPHA, DEFAULT_LEAKY_RELU_ALPHA, ExponentialUnit, SIGMOID_SATURATION, clamp_symmetric, elu, float_attr,
    hard_sigmoid, hard_sigmoid_line, is_positive, leaky_product, leaky_relu, relu, softplus, softsign,
    thresholded_relu,
};

/// `sqrt(1/2)`.
const SQRT_HALF: f64 = std::f64::consts::FRAC_1_SQRT_2;
/// `sqrt(2/pi)`, the scale inside the tanh form of Gelu.
const GELU_TANH_SCALE: f64 = 0.797_884_560_802_865_4;
/// The cubic coefficient of the tanh form of Gelu (Hendrycks and Gimpel, 2016).
const GELU_TANH_CUBIC: f64 = 0.044_715;
/// `1/sqrt(2 pi)`, the normal density at 0.
const NORMAL_DENSITY: f64 = 0.398_942_280_401_432_7;

/// Bound of `|x|` beyond which Gelu is 0 or the identity in every float type, and the slope of both forms is 0 or 1.
const GELU_SATURATION: f64 = 1000.0;

/// Clamps `x` from below where Gelu is 0: minus infinity times 0 then gives the limit, 0.
fn clamp_gelu_input(b: &mut Builder, x: Reg) -> Reg {
    let end = b.constant(b.ty(x), -GELU_SATURATION);
    let below = b.compare(CompareOp::Lt, x, end);
    b.select(below, end, x)
}

/// Computes `x * (1 + erf(x / sqrt 2)) / 2`.
fn gelu_erf(b: &mut Builder, x: Reg) -> Reg {
    let ty = b.ty(x);
    let x = clamp_gelu_input(b, x);
    let (scale, one, half) = (b.constant(ty, SQRT_HALF), b.constant(ty, 1.0), b.constant(ty, 0.5));
    let scaled = b.mul(x, scale);
    let erf = b.unary(UnaryOp::Erf, scaled);
    let sum = b.add(erf, one);
    let cdf = b.mul(sum, half);
    b.mul(x, cdf)
}

/// Computes `tanh(sqrt(2/pi) (x + 0.044715 x^3))`.
fn gelu_inner_tanh(b: &mut Builder, x: Reg) -> Reg {
    let ty = b.ty(x);
    let (scale, cubic, one) =
        (b.constant(ty, GELU_TANH_SCALE), b.constant(ty, GELU_TANH_CUBIC), b.constant(ty, 1.0));
    let square = b.mul(x, x);
    let bent = b.mul(square, cubic);
    let factor = b.add(bent, one);
    let inner = b.mul(x, factor);
    let scaled = b.mul(inner, scale);
    b.unary(UnaryOp::Tanh, scaled)
}

fn gelu_tanh(b: &mut Builder, x: Reg) -> Reg {
    let ty = b.ty(x);
    let x = clamp_gelu_input(b, x);
    let (one, half) = (b.constant(ty, 1.0), b.constant(ty, 0.5));
    let tanh = gelu_inner_tanh(b, x);
    let sum = b.add(tanh, one);
    let weight = b.mul(sum, half);
    b.mul(x, weight)
}

fn gelu(b: &mut Builder, x: &[Reg], attrs: &Attrs) -> Result<Reg, OpError> {
    match attrs.string("approximate")?.unwrap_or("none") {
        "none" => Ok(gelu_erf(b, x[0])),
        "tanh" => Ok(gelu_tanh(b, x[0])),
        other => Err(OpError::invalid(format!("approximate must be \"none\" or \"tanh\", got {other:?}"))),
    }
}

/// Computes `g (cdf(x) + x pdf(x))` of the normal distribution.
fn gelu_slope(b: &mut Builder, g: Reg, x: Reg) -> Reg {
    let ty = b.ty(x);
    let x = clamp_symmetric(b, x, GELU_SATURATION);
    let (scale, one, half) = (b.constant(ty, SQRT_HALF), b.constant(ty, 1.0), b.constant(ty, 0.5));
    let scaled = b.mul(x, scale);
    let erf = b.unary(UnaryOp::Erf, scaled);
    let sum = b.add(erf, one);
    let cdf = b.mul(sum, half);
    let square = b.mul(scaled, scaled);
    let minus = b.unary(UnaryOp::Neg, square);
    let bell = b.unary(UnaryOp::Exp, minus);
    let density = b.constant(ty, NORMAL_DENSITY);
    let pdf = b.mul(bell, density);
    let slope = b.mul(x, pdf);
    let total = b.add(cdf, slope);
    b.mul(g, total)
}

/// Computes the gradient of the tanh form of Gelu.
fn fast_gelu_slope(b: &mut Builder, g: Reg, x: Reg) -> Reg {
    let ty = b.ty(x);
    let x = clamp_symmetric(b, x, GELU_SATURATION);
    let (one, half) = (b.constant(ty, 1.0), b.constant(ty, 0.5));
    let (scale, cubic) = (b.constant(ty, GELU_TANH_SCALE), b.constant(ty, 3.0 * GELU_TANH_CUBIC));
    let tanh = gelu_inner_tanh(b, x);
    let square = b.mul(x, x);
    let bent = b.mul(square, cubic);
    let factor = b.add(bent, one);
    let inner = b.mul(scale, factor);
    let tanh_square = b.mul(tanh, tanh);
    let sech = b.sub(one, tanh_square);
    let steep = b.mul(sech, inner);
    let slope = b.mul(x, steep);
    let level = b.add(one, tanh);
    let total = b.add(level, slope);
    let halved = b.mul(total, half);
    b.mul(g, halved)
}

/// Computes `x * sigmoid(alpha x)`.
fn sigmoid_weighted(b: &mut Builder, x: Reg, alpha: f64) -> Reg {
    let (alpha, zero) = (b.constant(b.ty(x), alpha), b.constant(b.ty(x), 0.0));
    let scaled = b.mul(x, alpha);
    let weight = b.unary(UnaryOp::Sigmoid, scaled);
    let product = b.mul(x, weight);
    // Minus infinity times 0 gives the limit, 0.
    let nothing = b.compare(CompareOp::Eq, weight, zero);
    b.select(nothing, zero, product)
}

fn quick_gelu(b: &mut Builder, x: &[Reg], attrs: &Attrs) -> Result<Reg, OpError> {
    Ok(sigmoid_weighted(b, x[0], float_attr(attrs, ALPHA, DEFAULT_QUICK_GELU_ALPHA)?))
}

fn swish(b: &mut Builder, x: &[Reg], attrs: &Attrs) -> Result<Reg, OpError> {
    Ok(sigmoid_weighted(b, x[0], float_attr(attrs, ALPHA, 1.0)?))
}

fn swish_gradient(b: &mut Builder, x: Reg, g: Reg, attrs: &Attrs) -> Result<Reg, OpError> {
    Ok(sigmoid_weighted_slope(b, g, x, float_attr(attrs, ALPHA, 1.0)?))
}

fn quick_gelu_op(attrs: &Attrs) -> Result<Option<GradOp>, OpError> {
    let alpha = attrs.float(ALPHA)?.unwrap_or(DEFAULT_QUICK_GELU_ALPHA);
    Ok(Some(GradOp::of_input("QuickGeluGrad").with(Attrs::new().with(ALPHA, alpha))))
}

/// Computes `g s (1 + alpha x (1 - s))` with the sigmoid `s`.
fn sigmoid_weighted_slope(b: &mut Builder, g: Reg, x: Reg, alpha: f64) -> Reg {
    let x = clamp_symmetric(b, x, SIGMOID_SATURATION);
    let (alpha, one) = (b.constant(b.ty(x), alpha), b.constant(b.ty(x), 1.0));
    let scaled = b.mul(x, alpha);
    let weight = b.unary(UnaryOp::Sigmoid, scaled);
    let complement = b.sub(one, weight);
    let bent = b.mul(scaled, complement);
    let sum = b.add(one, bent);
    let slope = b.mul(weight, sum);
    b.mul(g, slope)
}

fn quick_gelu_grad(b: &mut Builder, x: &[Reg], attrs: &Attrs) -> Result<Reg, OpError> {
    Ok(sigmoid_weighted_slope(b, x[0], x[1], float_attr(attrs, ALPHA, DEFAULT_QUICK_GELU_ALPHA)?))
}

fn relu_grad(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let zero = b.constant(b.ty(x[1]), 0.0);
    let positive = b.compare(CompareOp::Lt, zero, x[1]);
    Ok(b.select(positive, x[0], zero))
}

fn sigmoid_grad(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let one = b.constant(b.ty(x[1]), 1.0);
    let complement = b.sub(one, x[1]);
    let slope = b.mul(x[1], complement);
    Ok(b.mul(x[0], slope))
}

fn tanh_grad(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let one = b.constant(b.ty(x[1]), 1.0);
    let square = b.mul(x[1], x[1]);
    let slope = b.sub(one, square);
    Ok(b.mul(x[0], slope))
}

/// Default slope inside the sigmoid of QuickGelu.
const DEFAULT_QUICK_GELU_ALPHA: f32 = 1.702;

/// Returns the gradient operator, unless the slope is negative. The operator reads the output. Output and input have
/// the same sign only if the slope is not negative.
fn leaky_relu_op(attrs: &Attrs) -> Result<Option<GradOp>, OpError> {
    let alpha = attrs.float(ALPHA)?.unwrap_or(DEFAULT_LEAKY_RELU_ALPHA);
    Ok((alpha >= 0.0).then(|| GradOp::of_output("LeakyReluGrad").with(Attrs::new().with(ALPHA, alpha))))
}

fn leaky_relu_grad(b: &mut Builder, x: &[Reg], attrs: &Attrs) -> Result<Reg, OpError> {
    let alpha = float_attr(attrs, ALPHA, DEFAULT_LEAKY_RELU_ALPHA)?;
    let alpha = b.constant(b.ty(x[0]), alpha);
    Ok(leaky_product(b, x[0], alpha, x[1]))
}

fn prelu(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    Ok(leaky_product(b, x[0], x[1], x[0]))
}

fn softplus_gradient(b: &mut Builder, x: Reg, g: Reg, _: &Attrs) -> Result<Reg, OpError> {
    let slope = b.unary(UnaryOp::Sigmoid, x);
    Ok(b.mul(g, slope))
}

fn softsign_gradient(b: &mut Builder, x: Reg, g: Reg, _: &Attrs) -> Result<Reg, OpError> {
    let one = b.constant(b.ty(g), 1.0);
    let size = b.unary(UnaryOp::Abs, x);
    let below = b.add(one, size);
    let root = b.div(one, below);
    let slope = b.mul(root, root);
    Ok(b.mul(g, slope))
}

/// Computes `g alpha` where the line is inside (0, 1), and 0 elsewhere, including at both ends.
fn hard_sigmoid_gradient(b: &mut Builder, x: Reg, g: Reg, attrs: &Attrs) -> Result<Reg, OpError> {
    let (line, alpha) = hard_sigmoid_line(b, x, attrs)?;
    let (zero, one) = (b.constant(b.ty(line), 0.0), b.constant(b.ty(line), 1.0));
    let (after, before) = (b.compare(CompareOp::Lt, zero, line), b.compare(CompareOp::Lt, line, one));
    let scaled = b.mul(g, alpha);
    let masked = b.select(before, scaled, zero);
    Ok(b.select(after, masked, zero))
}

/// Computes `x` times the line `x / 6 + 1 / 2`, with the line clamped to [0, 1].
fn hard_swish(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let x = x[0];
    let ty = b.ty(x);
    let (sixth, half, zero) = (b.constant(ty, 1.0 / 6.0), b.constant(ty, 0.5), b.constant(ty, 0.0));
    let (left, right) = (b.constant(ty, -3.0), b.constant(ty, 3.0));
    let scaled = b.mul(x, sixth);
    let line = b.add(scaled, half);
    let bent = b.mul(x, line);
    let (below, above) = (b.compare(CompareOp::Le, x, left), b.compare(CompareOp::Le, right, x));
    let capped = b.select(above, x, bent);
    Ok(b.select(below, zero, capped))
}

/// Computes `g` times the slope: `(2 x + 3) / 6` inside (-3, 3), 0 at and below -3, 1 at and above 3.
fn hard_swish_gradient(b: &mut Builder, x: Reg, g: Reg, _: &Attrs) -> Result<Reg, OpError> {
    let ty = b.ty(x);
    let (third, half, zero) = (b.constant(ty, 1.0 / 3.0), b.constant(ty, 0.5), b.constant(ty, 0.0));
    let (left, right) = (b.constant(ty, -3.0), b.constant(ty, 3.0));
    let scaled = b.mul(x, third);
    let slope = b.add(scaled, half);
    let bent = b.mul(g, slope);
    let (after, before) = (b.compare(CompareOp::Lt, left, x), b.compare(CompareOp::Lt, x, right));
    let capped = b.select(before, bent, g);
    Ok(b.select(after, capped, zero))
}

/// Bound of `|x|` beyond which `exp(-|x|)` is 0 in every float type.
const MISH_SATURATION: f64 = 1000.0;

/// Computes `tanh(log(1 + exp(x)))` as a fraction. With `w = exp(-|x|)` the fraction is `(1 + 2 w) / (1 + 2 w + 2 w^2)`
/// above 0 and `(w^2 + 2 w) / (w^2 + 2 w + 2)` below. Returns numerator, denominator, and their difference.
fn mish_fraction(b: &mut Builder, x: Reg) -> (Reg, Reg, Reg) {
    let ty = b.ty(x);
    let (one, two) = (b.constant(ty, 1.0), b.constant(ty, 2.0));
    let size = b.unary(UnaryOp::Abs, x);
    let minus = b.unary(UnaryOp::Neg, size);
    let w = b.unary(UnaryOp::Exp, minus);
    let (square, twice) = (b.mul(w, w), b.mul(w, two));
    let above = is_positive(b, x);
    let (right, left) = (b.add(one, twice), b.add(square, twice));
    let top = b.select(above, right, left);
    let difference = b.mul(square, two);
    let difference = b.select(above, difference, two);
    (top, b.add(top, difference), difference)
}

fn mish(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let (top, bottom, _) = mish_fraction(b, x[0]);
    let tanh = b.div(top, bottom);
    // Minus infinity times 0 gives the limit, 0.
    let end = b.constant(b.ty(x[0]), -MISH_SATURATION);
    let below = b.compare(CompareOp::Lt, x[0], end);
    let x = b.select(below, end, x[0]);
    Ok(b.mul(x, tanh))
}

/// Computes `g (t + x sigmoid(x) (1 - t^2))` with the tanh `t`.
fn mish_gradient(b: &mut Builder, x: Reg, g: Reg, _: &Attrs) -> Result<Reg, OpError> {
    let (top, bottom, difference) = mish_fraction(b, x);
    let tanh = b.div(top, bottom);
    // 1 - t^2 = (1 - t) (1 + t). Both factors come from the fraction, without cancellation.
    let sum = b.add(bottom, top);
    let (one, other) = (b.div(difference, bottom), b.div(sum, bottom));
    let rest = b.mul(one, other);
    let x = clamp_symmetric(b, x, MISH_SATURATION);
    let sigmoid = b.unary(UnaryOp::Sigmoid, x);
    let steep = b.mul(sigmoid, rest);
    let bent = b.mul(x, steep);
    let slope = b.add(tanh, bent);
    Ok(b.mul(g, slope))
}

fn thresholded_relu_gradient(b: &mut Builder, x: Reg, g: Reg, attrs: &Attrs) -> Result<Reg, OpError> {
    let alpha = float_attr(attrs, ALPHA, 1.0)?;
    let (alpha, zero) = (b.constant(b.ty(g), alpha), b.constant(b.ty(g), 0.0));
    let above = b.compare(CompareOp::Lt, alpha, x);
    Ok(b.select(above, g, zero))
}

/// Computes `x + bias` below `-lambd`, `x - bias` above `lambd`, and 0 between. Integers are computed as float64.
fn shrink(b: &mut Builder, x: &[Reg], attrs: &Attrs) -> Result<Reg, OpError> {
    let input_type = b.ty(x[0]);
    let ty = if input_type.is_float() { input_type } else { Type::F64 };
    let x = b.convert(x[0], ty);
    let (bias, end) = (float_attr(attrs, "bias", 0.0)?, float_attr(attrs, "lambd", 0.5)?);
    let (low, high, zero) = (b.constant(ty, -end), b.constant(ty, end), b.constant(ty, 0.0));
    let bias = b.constant(ty, bias);
    let (raised, lowered) = (b.add(x, bias), b.sub(x, bias));
    let (below, above) = (b.compare(CompareOp::Lt, x, low), b.compare(CompareOp::Lt, high, x));
    let upper = b.select(above, lowered, zero);
    let result = b.select(below, raised, upper);
    Ok(b.convert(result, input_type))
}

fn gelu_op(attrs: &Attrs) -> Result<Option<GradOp>, OpError> {
    let tanh = attrs.string("approximate")? == Some("tanh");
    Ok(Some(GradOp::of_input(if tanh { "FastGeluGrad" } else { "GeluGrad" })))
}

macro_rules! of_output {
    ($name:literal) => {
        |_| Ok(Some(GradOp::of_output($name)))
    };
}

/// Activations and gradient operators.
#[rustfmt::skip]
pub(super) static ROWS: &[Row] = &[
    row("Relu", &[6, 13, 14], 1, TypeConstraint::Number, relu).traits(Traits::UNBOUNDED.and(Traits::FOLLOWS_HEAD)).grad_op(of_output!("ReluGrad")),
    row("LeakyRelu", &[6, 16], 1, TypeConstraint::Float, leaky_relu).grad_op(leaky_relu_op),
    row("PRelu", &[7, 9, 16], 2, TypeConstraint::Number, prelu).broadcast_to_first(),
    row("Elu", &[6, 22], 1, TypeConstraint::Float, elu)
        .backward(|b, x, g, attrs| Ok(ExponentialUnit::elu(attrs)?.gradient(b, x, g))),
    row("Selu", &[6, 22], 1, TypeConstraint::Float, |b, x, attrs| Ok(ExponentialUnit::selu(attrs)?.value(b, x[0])))
        .backward(|b, x, g, attrs| Ok(ExponentialUnit::selu(attrs)?.gradient(b, x, g))),
    row("Celu", &[12, 28], 1, TypeConstraint::Float, |b, x, attrs| Ok(ExponentialUnit::celu(attrs)?.value(b, x[0])))
        .backward(|b, x, g, attrs| Ok(ExponentialUnit::celu(attrs)?.gradient(b, x, g))),
    row("Softplus", &[1, 22], 1, TypeConstraint::Float, softplus).backward(softplus_gradient),
    row("Softsign", &[1, 22], 1, TypeConstraint::Float, softsign).backward(softsign_gradient),
    row("HardSigmoid", &[6, 22], 1, TypeConstraint::Float, hard_sigmoid).class(Class::Sigmoid { hard: true }).backward(hard_sigmoid_gradient),
    row("HardSwish", &[14, 22], 1, TypeConstraint::Float, hard_swish).backward(hard_swish_gradient),
    row("Mish", &[18, 22], 1, TypeConstraint::Float, mish).backward(mish_gradient),
    row("ThresholdedRelu", &[10, 22], 1, TypeConstraint::Float, thresholded_relu).backward(thresholded_relu_gradient),
    row("Sigmoid", &[6, 13], 1, TypeConstraint::Float, unary!(Sigmoid)).class(Class::Sigmoid { hard: false }).traits(Traits::FOLLOWS_HEAD).grad_op(of_output!("SigmoidGrad")),
    row("Tanh", &[6, 13], 1, TypeConstraint::Float, unary!(Tanh)).traits(Traits::UNBOUNDED).grad_op(of_output!("TanhGrad")),
    row("Shrink", &[9], 1, TypeConstraint::Number, shrink),
    row("Swish", &[24], 1, TypeConstraint::Float, swish).backward(swish_gradient),
    row("Gelu", &[20], 1, TypeConstraint::Float, gelu).grad_op(gelu_op),
    row("ReluGrad", &[1], 2, TypeConstraint::Float, relu_grad).microsoft(),
    row("LeakyReluGrad", &[1], 2, TypeConstraint::Float, leaky_relu_grad).microsoft(),
    row("SigmoidGrad", &[1], 2, TypeConstraint::Float, sigmoid_grad).microsoft(),
    row("TanhGrad", &[1], 2, TypeConstraint::Float, tanh_grad).microsoft(),
    row("GeluGrad", &[1], 2, TypeConstraint::Float, |b, x, _| Ok(gelu_slope(b, x[0], x[1]))).microsoft(),
    row("FastGeluGrad", &[1], 2, TypeConstraint::Float, |b, x, _| Ok(fast_gelu_slope(b, x[0], x[1]))).microsoft(),
    row("QuickGelu", &[1], 1, TypeConstraint::Float, quick_gelu).grad_op(quick_gelu_op).microsoft(),
    row("QuickGeluGrad", &[1], 2, TypeConstraint::Float, quick_gelu_grad).microsoft(),
    row("BiasGeluGrad_dX", &[1], 3, TypeConstraint::Float, |b, x, _| {
        let sum = b.add(x[1], x[2]);
        Ok(gelu_slope(b, x[0], sum))
    }).broadcast_to_first().microsoft(),
    row("BiasFastGeluGrad_dX", &[1], 3, TypeConstraint::Float, |b, x, _| {
        let sum = b.add(x[1], x[2]);
        Ok(fast_gelu_slope(b, x[0], sum))
    }).broadcast_to_first().microsoft(),
];

#[cfg(test)]
mod tests {
    use ortrain_graph::{DType, Graph, Tensor};

    use super::*;
    use crate::passes;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, check_decomposition, check_downgrade, check_gradients, f64s, generic_tensor, gradient_graph,
        one_node_graph, run, run_node,
    };

    const INF: f64 = f64::INFINITY;
    const NAN: f64 = f64::NAN;

    fn graph_of(op: &str, inputs: &[&Tensor], attrs: &Attrs) -> Graph {
        let inputs: Vec<Option<&Tensor>> = inputs.iter().copied().map(Some).collect();
        let domain = if op == "QuickGelu" { "com.microsoft" } else { "" };
        one_node_graph(NEWEST_OPSET, (domain, op), &inputs, 1, attrs.clone()).expect("valid")
    }

    fn alpha(value: f32) -> Attrs {
        Attrs::new().with(ALPHA, value)
    }

    /// Returns values and slopes of an operator at the points `x`.
    fn values_and_slopes(op: &str, attrs: &Attrs, x: &Tensor) -> (Vec<f64>, Vec<f64>) {
        let graph = graph_of(op, &[x], attrs);
        let ones = Tensor::filled(x.dtype(), x.dims(), 1.0);
        let gradient = gradient_graph(&graph, &[Some(ones)], &[0]);
        let inputs = std::slice::from_ref(x);
        let get = |graph: &Graph| run(graph, inputs).expect("it runs").remove(0).to_f64();
        (get(&graph), get(&gradient))
    }

    #[track_caller]
    fn assert_near(got: f64, expected: f64, tolerance: f64, what: &str) {
        let same = got == expected || got.is_nan() && expected.is_nan();
        assert!(
            same || (got - expected).abs() <= tolerance * expected.abs(),
            "{what}: {got}, not {expected}"
        );
    }

    /// Normal distribution function and density at 1.
    const CDF: f64 = 0.841_344_746_068_542_9;
    const PDF: f64 = 0.241_970_724_519_143_37;

    /// Point, value and slope, from the formula of the standard or its limit.
    type Sample = (f64, f64, f64);

    #[test]
    fn values_and_slopes_at_limits_and_kinks() {
        let e = f64::exp(-100.0);
        let (sigmoid, tanh) = (1.0 / (1.0 + f64::exp(-1.0)), f64::ln_1p(f64::exp(1.0)).tanh());
        let mish = tanh + sigmoid * (1.0 - tanh * tanh);
        let elu = f64::exp_m1(-1.0);
        let (scale, bend) = (f64::from(1.050_701_f32), f64::from(1.673_263_2_f32));
        // The tanh form at 1: the tanh, and the slope of its argument.
        let bent = (GELU_TANH_SCALE * (1.0 + GELU_TANH_CUBIC)).tanh();
        let steep = GELU_TANH_SCALE * (1.0 + 3.0 * GELU_TANH_CUBIC);
        let none = Attrs::new();
        let cases: Vec<(&str, Attrs, Vec<Sample>)> = vec![
            (
                "LeakyRelu",
                alpha(0.5),
                vec![(-INF, -INF, 0.5), (-2.0, -1.0, 0.5), (0.0, 0.0, 0.5), (INF, INF, 1.0)],
            ),
            (
                "LeakyRelu",
                alpha(-0.5),
                vec![(-INF, INF, -0.5), (-2.0, 1.0, -0.5), (0.0, 0.0, -0.5), (3.0, 3.0, 1.0)],
            ),
            (
                "Elu",
                alpha(2.0),
                vec![
                    (-INF, -2.0, 0.0),
                    (-100.0, -2.0, 2.0 * e),
                    (-1.0, 2.0 * elu, 2.0 * f64::exp(-1.0)),
                    (0.0, 0.0, 2.0),
                    (100.0, 100.0, 1.0),
                    (1e30, 1e30, 1.0),
                    (INF, INF, 1.0),
                ],
            ),
            (
                "Selu",
                none.clone(),
                vec![
                    (-INF, -scale * bend, 0.0),
                    (-1.0, scale * bend * elu, scale * bend * f64::exp(-1.0)),
                    (0.0, 0.0, scale * bend),
                    (100.0, 100.0 * scale, scale),
                    (INF, INF, scale),
                ],
            ),
            (
                "Celu",
                alpha(2.0),
                vec![
                    (-INF, -2.0, 0.0),
                    (-2.0, 2.0 * elu, f64::exp(-1.0)),
                    (0.0, 0.0, 1.0),
                    (100.0, 100.0, 1.0),
                    (INF, INF, 1.0),
                ],
            ),
            (
                "Celu",
                alpha(-1.0),
                vec![
                    (-4.0, -f64::exp_m1(4.0), f64::exp(4.0)),
                    (-0.5, -f64::exp_m1(0.5), f64::exp(0.5)),
                    (2.0, 2.0, 1.0),
                ],
            ),
            (
                "Softplus",
                none.clone(),
                vec![
                    (-INF, 0.0, 0.0),
                    (-100.0, e, e),
                    (0.0, 2f64.ln(), 0.5),
                    (1.0, f64::ln_1p(f64::exp(1.0)), sigmoid),
                    (100.0, 100.0, 1.0),
                    (1e30, 1e30, 1.0),
                    (INF, INF, 1.0),
                ],
            ),
            (
                "Softsign",
                none.clone(),
                vec![
                    (-INF, -1.0, 0.0),
                    (-100.0, -100.0 / 101.0, 1.0 / (101.0 * 101.0)),
                    (0.0, 0.0, 1.0),
                    (1.0, 0.5, 0.25),
                    (1e38, 1.0, 1e-76),
                    (INF, 1.0, 0.0),
                ],
            ),
            (
                "HardSigmoid",
                alpha(0.5).with("beta", 0.5f32),
                vec![
                    (-INF, 0.0, 0.0),
                    (-1.0, 0.0, 0.0),
                    (-0.5, 0.25, 0.5),
                    (0.0, 0.5, 0.5),
                    (1.0, 1.0, 0.0),
                    (100.0, 1.0, 0.0),
                    (INF, 1.0, 0.0),
                ],
            ),
            (
                "HardSwish",
                none.clone(),
                vec![
                    (-INF, 0.0, 0.0),
                    (-100.0, 0.0, 0.0),
                    (-3.0, 0.0, 0.0),
                    (-1.5, -0.375, 0.0),
                    (0.0, 0.0, 0.5),
                    (1.5, 1.125, 1.0),
                    (3.0, 3.0, 1.0),
                    (INF, INF, 1.0),
                ],
            ),
            (
                "Mish",
                none.clone(),
                vec![
                    (-INF, 0.0, 0.0),
                    (-100.0, -100.0 * e, -99.0 * e),
                    (0.0, 0.0, 0.6),
                    (1.0, tanh, mish),
                    (100.0, 100.0, 1.0),
                    (1e30, 1e30, 1.0),
                    (INF, INF, 1.0),
                ],
            ),
            (
                "Gelu",
                none.clone(),
                vec![
                    (-INF, 0.0, 0.0),
                    (-1e30, 0.0, 0.0),
                    (0.0, 0.0, 0.5),
                    (1.0, CDF, CDF + PDF),
                    (100.0, 100.0, 1.0),
                    (INF, INF, 1.0),
                ],
            ),
            (
                "Gelu",
                none.clone().with("approximate", "tanh"),
                vec![
                    (-INF, 0.0, 0.0),
                    (-1e30, 0.0, 0.0),
                    (0.0, 0.0, 0.5),
                    (1.0, 0.5 * (1.0 + bent), 0.5 * (1.0 + bent) + 0.5 * (1.0 - bent * bent) * steep),
                    (1e30, 1e30, 1.0),
                    (INF, INF, 1.0),
                ],
            ),
            (
                "QuickGelu",
                alpha(1.0),
                vec![
                    (-INF, 0.0, 0.0),
                    (-100.0, -100.0 * e, -99.0 * e),
                    (0.0, 0.0, 0.5),
                    (1.0, sigmoid, sigmoid * (2.0 - sigmoid)),
                    (100.0, 100.0, 1.0),
                    (INF, INF, 1.0),
                ],
            ),
            ("QuickGelu", alpha(-1.0), vec![(-INF, -INF, 1.0), (0.0, 0.0, 0.5), (INF, 0.0, 0.0)]),
            (
                "ThresholdedRelu",
                alpha(2.0),
                vec![(-INF, 0.0, 0.0), (2.0, 0.0, 0.0), (2.5, 2.5, 1.0), (INF, INF, 1.0)],
            ),
        ];
        for (op, attrs, samples) in &cases {
            let points: Vec<f64> = samples.iter().map(|sample| sample.0).chain([NAN]).collect();
            for dtype in [DType::F64, DType::F32] {
                let x = match dtype {
                    DType::F64 => f64s(&[points.len()], &points),
                    _ => Tensor::f32(&[points.len()], &points.iter().map(|&x| x as f32).collect::<Vec<_>>()),
                };
                // Attributes, and constants of float32 expressions, have 24 bits.
                let tolerance = if dtype == DType::F64 { 1e-14 } else { 4e-7 };
                let (values, slopes) = values_and_slopes(op, attrs, &x);
                for (k, &(x, y, slope)) in samples.iter().enumerate() {
                    // Subnormal numbers of float32 have few digits.
                    let required = |value: f64, got: f64| {
                        dtype == DType::F64 || value == 0.0 || value.abs() > 1e-37 || got.abs() > 1e-36
                    };
                    let what = format!("{op} at {x} in {dtype}");
                    for (got, expected, name) in [(values[k], y, "value"), (slopes[k], slope, "slope")] {
                        if required(expected, got) {
                            assert_near(got, expected, tolerance, &format!("{what}, {name}"));
                        }
                    }
                }
                assert!(values[samples.len()].is_nan(), "{op} of NaN in {dtype}");
            }
        }
    }

    #[test]
    fn small_inputs_keep_precision() {
        let x = Tensor::f32(&[4], &[-1e-6, -1e-3, -1e-2, -0.3]);
        let wide = x.to_f64();
        for (op, attrs, f) in [
            ("Elu", Attrs::new(), (|x| f64::exp_m1(x)) as fn(f64) -> f64),
            ("Celu", alpha(0.5), |x| 0.5 * f64::exp_m1(x / 0.5)),
        ] {
            for (k, got) in values_and_slopes(op, &attrs, &x).0.into_iter().enumerate() {
                assert_near(got, f(wide[k]), 4e-7, op);
            }
        }
        let x = Tensor::f32(&[5], &[-80.0, -20.0, -15.0, -5.0, -0.1]);
        for (k, got) in values_and_slopes("Softplus", &Attrs::new(), &x).0.into_iter().enumerate() {
            assert_near(got, f64::ln_1p(f64::exp(x.to_f64()[k])), 4e-7, "Softplus");
        }
        for (k, got) in values_and_slopes("Mish", &Attrs::new(), &x).0.into_iter().enumerate() {
            let x = x.to_f64()[k];
            assert_near(got, x * f64::ln_1p(f64::exp(x)).tanh(), 1e-6, "Mish");
        }
    }

    /// Returns the operators with one input, each with several values of its attributes.
    fn attribute_cases() -> Vec<(&'static str, Attrs)> {
        let mut all: Vec<(&str, Attrs)> = ["Softplus", "Softsign", "HardSwish", "Mish", "Sigmoid", "Tanh"]
            .into_iter()
            .map(|op| (op, Attrs::new()))
            .collect();
        for op in ["LeakyRelu", "Elu", "Selu", "Celu", "HardSigmoid", "ThresholdedRelu"] {
            all.push((op, Attrs::new()));
            all.extend([0.3, -0.7, 1.9].map(|value| (op, alpha(value))));
        }
        all.push(("Selu", Attrs::new().with("gamma", -0.4f32)));
        all.push(("HardSigmoid", Attrs::new().with("beta", 0.1f32)));
        all
    }

    #[test]
    fn gradients() {
        let x = f64s(&[2, 8], &generic_tensor(&[16], 3).to_f64().iter().map(|x| 2.3 * x).collect::<Vec<_>>());
        for (op, attrs) in attribute_cases() {
            let graph = graph_of(op, &[&x], &attrs);
            check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
            let gradient = gradient_graph(&graph, &[Some(generic_tensor(&[2, 8], 9))], &[0]);
            check_decomposition(&gradient, std::slice::from_ref(&x), 1e-12);
        }
    }

    #[test]
    fn quick_gelu_gradients() {
        let x = f64s(&[2, 8], &generic_tensor(&[16], 3).to_f64().iter().map(|x| 2.3 * x).collect::<Vec<_>>());
        for attrs in [Attrs::new(), alpha(0.4), alpha(-1.3)] {
            let graph = graph_of("QuickGelu", &[&x], &attrs);
            check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
            check_decomposition(&graph, std::slice::from_ref(&x), 1e-12);
            let gradient = gradient_graph(&graph, &[Some(generic_tensor(&[2, 8], 9))], &[0]);
            assert_eq!(&*gradient.nodes[0].op, "QuickGeluGrad", "{gradient}");
            check_decomposition(&gradient, std::slice::from_ref(&x), 1e-12);
            check_downgrade(&gradient, std::slice::from_ref(&x), 7);
        }
    }

    /// The operators of ONNX Runtime that first add a bias equal the operators without a bias on the sum.
    #[test]
    fn biased_gelus_equal_gelu_of_sum() {
        const DOMAIN: &str = "com.microsoft";
        let (x, bias, g) = (generic_tensor(&[3, 4], 1), generic_tensor(&[4], 2), generic_tensor(&[3, 4], 3));
        let one = |domain: &str, op: &str, inputs: &[&Tensor]| {
            let ports: Vec<Option<&Tensor>> = inputs.iter().copied().map(Some).collect();
            run_node((domain, op), &ports, 1, Attrs::new()).expect("it runs").remove(0)
        };
        let sum = one("", "Add", &[&x, &bias]);
        for (op, plain, grad, plain_grad) in [
            ("BiasGelu", "Gelu", "BiasGeluGrad_dX", "GeluGrad"),
            ("FastGelu", "FastGelu", "BiasFastGeluGrad_dX", "FastGeluGrad"),
        ] {
            assert_eq!(one(DOMAIN, op, &[&x, &bias]), one(DOMAIN, plain, &[&sum]));
            assert_eq!(one(DOMAIN, grad, &[&g, &x, &bias]), one(DOMAIN, plain_grad, &[&g, &sum]));
            let inputs = [x.clone(), bias.clone()];
            let ports = [Some(&x), Some(&bias)];
            let graph = one_node_graph(NEWEST_OPSET, (DOMAIN, op), &ports, 1, Attrs::new()).expect("valid");
            check_gradients(&graph, &inputs, &[0, 1], &[0]);
            let operands = [g.clone(), x.clone(), bias.clone()];
            let ports = [Some(&g), Some(&x), Some(&bias)];
            let graph = one_node_graph(NEWEST_OPSET, (DOMAIN, grad), &ports, 1, Attrs::new()).expect("valid");
            check_decomposition(&graph, &operands, 1e-12);
        }
        let wide = generic_tensor(&[2, 3, 4], 4);
        let ports = [Some(&g), Some(&x), Some(&wide)];
        let error = one_node_graph(NEWEST_OPSET, (DOMAIN, "BiasGeluGrad_dX"), &ports, 1, Attrs::new());
        assert!(error.expect_err("refused").to_string().contains("does not broadcast to [3, 4]"));
    }

    /// A slope that is set to 0 also stops an infinite gradient.
    #[test]
    fn zero_slopes_stop_infinite_gradients() {
        let x = f64s(&[2], &[-5.0, 5.0]);
        for (op, stops) in
            [("HardSigmoid", [true, true]), ("HardSwish", [true, false]), ("ThresholdedRelu", [true, false])]
        {
            let graph = graph_of(op, &[&x], &Attrs::new());
            let seed = f64s(&[2], &[INF, NAN]);
            let got = run(&gradient_graph(&graph, &[Some(seed)], &[0]), std::slice::from_ref(&x));
            let got = got.expect("it runs").remove(0).to_f64();
            for k in 0..2 {
                assert_eq!(got[k] == 0.0, stops[k], "{op} at {}: {got:?}", x.to_f64()[k]);
            }
        }
    }

    #[test]
    fn prelu_values_and_gradients() {
        let x = f64s(&[2, 3], &[1.0, -2.0, 0.0, -0.5, 4.0, INF]);
        let slope = f64s(&[3], &[0.5, -1.0, 2.0]);
        let graph = graph_of("PRelu", &[&x, &slope], &Attrs::new());
        let inputs = [x.clone(), slope];
        let got = run(&graph, &inputs).expect("it runs").remove(0);
        assert_eq!(got, f64s(&[2, 3], &[1.0, 2.0, 0.0, -0.25, 4.0, INF]));
        let ones = Tensor::filled(DType::F64, &[2, 3], 1.0);
        let got = run(&gradient_graph(&graph, &[Some(ones)], &[0, 1]), &inputs).expect("it runs");
        // At 0 the negative branch is selected. The other branch (infinity here) has no influence.
        assert_eq!(got[0], f64s(&[2, 3], &[1.0, -1.0, 2.0, 0.5, 1.0, 1.0]));
        assert_eq!(got[1], f64s(&[3], &[-0.5, -2.0, 0.0]));
        for dims in [&[][..], &[1], &[3, 1], &[2, 3, 4], &[1, 4]] {
            let (x, slope) = (generic_tensor(&[2, 3, 4], 1), generic_tensor(dims, 2));
            let graph = graph_of("PRelu", &[&x, &slope], &Attrs::new());
            check_gradients(&graph, &[x, slope], &[0, 1], &[0]);
        }
        let full = run_node(
            ("", "PRelu"),
            &[Some(&Tensor::i64(&[3], &[-2, 0, 5])), Some(&Tensor::i64(&[1], &[3]))],
            1,
            Attrs::new(),
        );
        assert_eq!(full.expect("it runs")[0], Tensor::i64(&[3], &[-6, 0, 5]));
    }

    /// A slope of unknown sizes may broadcast. The check takes place once the sizes are known.
    #[test]
    fn prelu_slopes_of_unknown_sizes() {
        use ortrain_graph::{Dim, Shape, ValueType};
        let sizes = |dims: &[&str]| -> Shape {
            dims.iter().map(|dim| dim.parse().map_or_else(|_| Dim::symbol(dim), Dim::Known)).collect()
        };
        for (x, slope, x_dims, slope_dims) in [
            (&["n", "1", "4"][..], &["a", "b"][..], [2, 1, 4], &[1, 4][..]),
            (&["n", "1", "4"], &["a", "b"], [2, 1, 4], &[1, 1]),
            (&["n", "c", "4"], &["c", "b"], [2, 3, 4], &[3, 1]),
            (&["2", "3", "4"], &["a", "b", "c"], [2, 3, 4], &[1, 3, 4]),
            (&["1", "1", "1"], &["a"], [1, 1, 1], &[1]),
        ] {
            let inputs = [generic_tensor(&x_dims, 1), generic_tensor(slope_dims, 2)];
            let mut graph = graph_of("PRelu", &[&inputs[0], &inputs[1]], &Attrs::new());
            for (k, open) in [x, slope].into_iter().enumerate() {
                let id = graph.inputs[k];
                graph.value_mut(id).ty = ValueType::Tensor(DType::F64, Some(sizes(open)));
            }
            let y = graph.outputs[0];
            graph.value_mut(y).ty = ValueType::Unknown;
            passes::infer::infer(&mut graph).expect("it may fit");
            assert_eq!(graph.value(y).ty.shape(), Some(&sizes(x)));
            check_gradients(&graph, &inputs, &[0, 1], &[0]);
            let wide = [inputs[0].clone(), generic_tensor(&[5, 5, 5], 3)];
            assert!(run(&graph, &wide).is_err(), "it does not fit");
        }
    }

    #[test]
    fn rejects_larger_prelu_slopes() {
        for (x, slope) in [(&[2, 1][..], &[3][..]), (&[3], &[2, 3]), (&[], &[1, 1])] {
            let failure = run_node(
                ("", "PRelu"),
                &[Some(&generic_tensor(x, 1)), Some(&generic_tensor(slope, 2))],
                1,
                Attrs::new(),
            );
            let Failure::Prepare(error) = failure.expect_err("refused") else { panic!("prepared") };
            assert!(error.to_string().contains("does not broadcast to"), "{error}");
        }
    }

    #[test]
    fn leaky_relu_gradient_operator() {
        let x = generic_tensor(&[5], 4);
        for (value, expected) in [(0.3, true), (0.0, true), (-0.3, false)] {
            let graph = graph_of("LeakyRelu", &[&x], &alpha(value));
            let gradient = gradient_graph(&graph, &[Some(generic_tensor(&[5], 5))], &[0]);
            let result = gradient.nodes.iter().find(|node| &*node.op == "LeakyReluGrad");
            assert_eq!(result.map(|node| node.attrs.clone()), expected.then(|| alpha(value)));
        }
    }

    #[test]
    fn rejects_invalid_attributes_and_types() {
        let x = generic_tensor(&[2], 1);
        for (op, attrs, sentence) in [
            ("Celu", alpha(0.0), "alpha must not be 0"),
            ("Elu", Attrs::new().with(ALPHA, 1i64), "must be FLOAT, got INT"),
            (
                "Gelu",
                Attrs::new().with("approximate", "sine"),
                "approximate must be \"none\" or \"tanh\", got \"sine\"",
            ),
        ] {
            let failure = run_node(("", op), &[Some(&x)], 1, attrs).expect_err("refused");
            let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
            assert!(error.to_string().contains(sentence), "{error}");
        }
        assert!(run_node(("", "Softplus"), &[Some(&Tensor::i64(&[1], &[1]))], 1, Attrs::new()).is_err());
    }

    /// Most activations are older than the operator Where: their gradients must decompose without Where for old opsets.
    #[test]
    fn gradients_of_every_opset() {
        let x = generic_tensor(&[2, 4], 6);
        for (op, attrs) in attribute_cases() {
            let graph = graph_of(op, &[&x], &attrs);
            let mut gradient = gradient_graph(&graph, &[Some(generic_tensor(&[2, 4], 7))], &[0]);
            passes::infer::infer(&mut gradient).expect("valid");
            let oldest = crate::Registry::standard().find("", op).expect("known").since[0].max(7);
            for opset in [oldest, 9.max(oldest), 11.max(oldest), 12.max(oldest), 22] {
                check_downgrade(&gradient, std::slice::from_ref(&x), opset);
            }
        }
        let (x, slope) = (generic_tensor(&[2, 3], 8), generic_tensor(&[3], 9));
        let graph = graph_of("PRelu", &[&x, &slope], &Attrs::new());
        let mut gradient = gradient_graph(&graph, &[Some(generic_tensor(&[2, 3], 7))], &[0, 1]);
        passes::infer::infer(&mut gradient).expect("valid");
        for opset in [7, 8, 9, 16] {
            check_downgrade(&gradient, &[x.clone(), slope.clone()], opset);
        }
    }
}
