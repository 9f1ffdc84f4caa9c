//! Activation functions as expressions, for operators of their own and for recurrent layers.

use ortrain_expr::{Builder, CompareOp, Reg, UnaryOp};
use ortrain_graph::Attrs;

use crate::OpError;

pub(crate) const ALPHA: &str = "alpha";

/// Reads a float attribute.
pub(crate) fn float_attr(attrs: &Attrs, name: &str, default: f32) -> Result<f64, OpError> {
    Ok(f64::from(attrs.float(name)?.unwrap_or(default)))
}

/// Returns the truth value of `x > 0`.
pub(crate) fn is_positive(b: &mut Builder, x: Reg) -> Reg {
    let zero = b.constant(b.ty(x), 0.0);
    b.compare(CompareOp::Lt, zero, x)
}

/// Clamps `x` to `-end..=end`. `end` must be so large that the clamp does not change the final result.
pub(crate) fn clamp_symmetric(b: &mut Builder, x: Reg, end: f64) -> Reg {
    let ty = b.ty(x);
    let (low, high) = (b.constant(ty, -end), b.constant(ty, end));
    let (below, above) = (b.compare(CompareOp::Lt, x, low), b.compare(CompareOp::Lt, high, x));
    let raised = b.select(below, low, x);
    b.select(above, high, raised)
}

pub(crate) fn relu(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let zero = b.constant(b.ty(x[0]), 0.0);
    // A comparison instead of a maximum, so that NaN passes.
    let negative = b.compare(CompareOp::Lt, x[0], zero);
    Ok(b.select(negative, zero, x[0]))
}

/// Default slope of LeakyRelu below 0.
pub(crate) const DEFAULT_LEAKY_RELU_ALPHA: f32 = 0.01;

/// Multiplies `x` by 1 where `of` is above 0, and by `alpha` elsewhere. The factor is selected instead of the product,
/// so that the derivative is the factor.
pub(crate) fn leaky_product(b: &mut Builder, x: Reg, alpha: Reg, of: Reg) -> Reg {
    let one = b.constant(b.ty(x), 1.0);
    let above = is_positive(b, of);
    let factor = b.select(above, one, alpha);
    b.mul(x, factor)
}

pub(crate) fn leaky_relu(b: &mut Builder, x: &[Reg], attrs: &Attrs) -> Result<Reg, OpError> {
    let alpha = float_attr(attrs, ALPHA, DEFAULT_LEAKY_RELU_ALPHA)?;
    let alpha = b.constant(b.ty(x[0]), alpha);
    Ok(leaky_product(b, x[0], alpha, x[0]))
}

/// Computes `exp(x) - 1` without cancellation near 0: `2 t / (1 - t)` with `t = tanh(x / 2)`. Up to `x = 1`, `1 - t`
/// does not cancel either. `large` is true if `x` may be above 1.
pub(crate) fn exp_minus_one(b: &mut Builder, x: Reg, large: bool) -> Reg {
    let ty = b.ty(x);
    let (one, half, two) = (b.constant(ty, 1.0), b.constant(ty, 0.5), b.constant(ty, 2.0));
    let halved = b.mul(x, half);
    let t = b.unary(UnaryOp::Tanh, halved);
    let (twice, rest) = (b.mul(t, two), b.sub(one, t));
    let near = b.div(twice, rest);
    if !large {
        return near;
    }
    let exp = b.unary(UnaryOp::Exp, x);
    let direct = b.sub(exp, one);
    let above = b.compare(CompareOp::Lt, one, x);
    b.select(above, direct, near)
}

/// Coefficients of `scale * (x above 0, alpha (exp(x / width) - 1) elsewhere)`.
pub(crate) struct ExponentialUnit {
    pub(crate) scale: f64,
    pub(crate) alpha: f64,
    pub(crate) width: f64,
}

impl ExponentialUnit {
    pub(crate) fn elu(attrs: &Attrs) -> Result<ExponentialUnit, OpError> {
        Ok(ExponentialUnit { scale: 1.0, alpha: float_attr(attrs, ALPHA, 1.0)?, width: 1.0 })
    }

    pub(crate) fn selu(attrs: &Attrs) -> Result<ExponentialUnit, OpError> {
        let alpha = float_attr(attrs, ALPHA, 1.673_263_2)?;
        Ok(ExponentialUnit { scale: float_attr(attrs, "gamma", 1.050_701)?, alpha, width: 1.0 })
    }

    pub(crate) fn celu(attrs: &Attrs) -> Result<ExponentialUnit, OpError> {
        let alpha = float_attr(attrs, ALPHA, 1.0)?;
        if alpha == 0.0 {
            return Err(OpError::invalid("alpha must not be 0"));
        }
        Ok(ExponentialUnit { scale: 1.0, alpha, width: alpha })
    }

    pub(crate) fn value(&self, b: &mut Builder, x: Reg) -> Reg {
        let ty = b.ty(x);
        let (scale, alpha, width) =
            (b.constant(ty, self.scale), b.constant(ty, self.alpha), b.constant(ty, self.width));
        let inner = b.div(x, width);
        // For a negative width the exponent is positive where this branch is selected.
        let bent = exp_minus_one(b, inner, self.width < 0.0);
        let scaled = b.mul(bent, alpha);
        let above = is_positive(b, x);
        let chosen = b.select(above, x, scaled);
        b.mul(chosen, scale)
    }

    pub(crate) fn gradient(&self, b: &mut Builder, x: Reg, g: Reg) -> Reg {
        let ty = b.ty(x);
        let width = b.constant(ty, self.width);
        let (right, left) =
            (b.constant(ty, self.scale), b.constant(ty, self.scale * self.alpha / self.width));
        let inner = b.div(x, width);
        // The exponential may be infinite above 0. It is selected instead of multiplied by zero.
        let exp = b.unary(UnaryOp::Exp, inner);
        let bent = b.mul(exp, left);
        let above = is_positive(b, x);
        let slope = b.select(above, right, bent);
        b.mul(g, slope)
    }
}

pub(crate) fn elu(b: &mut Builder, x: &[Reg], attrs: &Attrs) -> Result<Reg, OpError> {
    Ok(ExponentialUnit::elu(attrs)?.value(b, x[0]))
}

/// Computes `log(1 + t)` without loss of precision (Kahan's method). `1 + t` rounds; multiplying by `t / ((1 + t) - 1)`
/// corrects this error. From `1 + t = 2` on there is no loss.
pub(crate) fn log_one_plus(b: &mut Builder, t: Reg) -> Reg {
    let ty = b.ty(t);
    let (zero, one, two) = (b.constant(ty, 0.0), b.constant(ty, 1.0), b.constant(ty, 2.0));
    let u = b.add(one, t);
    let left = b.sub(u, one);
    let log = b.unary(UnaryOp::Log, u);
    let product = b.mul(log, t);
    let quotient = b.div(product, left);
    let lost = b.compare(CompareOp::Eq, left, zero);
    let near = b.select(lost, t, quotient);
    let is_large = b.compare(CompareOp::Lt, two, u);
    b.select(is_large, log, near)
}

/// Computes `log(1 + exp(x))` as `max(x, 0) + log(1 + t)` with `t = exp(-|x|)`.
pub(crate) fn softplus(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let ty = b.ty(x[0]);
    let zero = b.constant(ty, 0.0);
    let size = b.unary(UnaryOp::Abs, x[0]);
    let minus = b.unary(UnaryOp::Neg, size);
    let t = b.unary(UnaryOp::Exp, minus);
    let log = log_one_plus(b, t);
    // A comparison instead of a maximum, so that NaN passes.
    let negative = b.compare(CompareOp::Lt, x[0], zero);
    let line = b.select(negative, zero, x[0]);
    Ok(b.add(line, log))
}

/// Bound of `|x|` beyond which `|x| / (1 + |x|)` and the sigmoid of `|x|` are 1 in every float type.
pub(crate) const SIGMOID_SATURATION: f64 = 1e30;

pub(crate) fn softsign(b: &mut Builder, x: &[Reg], _: &Attrs) -> Result<Reg, OpError> {
    let one = b.constant(b.ty(x[0]), 1.0);
    let x = clamp_symmetric(b, x[0], SIGMOID_SATURATION);
    let size = b.unary(UnaryOp::Abs, x);
    let below = b.add(one, size);
    Ok(b.div(x, below))
}

/// Returns `alpha x + beta`, and `alpha`.
pub(crate) fn hard_sigmoid_line(b: &mut Builder, x: Reg, attrs: &Attrs) -> Result<(Reg, Reg), OpError> {
    let (alpha, beta) = (float_attr(attrs, ALPHA, 0.2)?, float_attr(attrs, "beta", 0.5)?);
    let (alpha, beta) = (b.constant(b.ty(x), alpha), b.constant(b.ty(x), beta));
    let scaled = b.mul(x, alpha);
    Ok((b.add(scaled, beta), alpha))
}

pub(crate) fn hard_sigmoid(b: &mut Builder, x: &[Reg], attrs: &Attrs) -> Result<Reg, OpError> {
    let (line, _) = hard_sigmoid_line(b, x[0], attrs)?;
    let (zero, one) = (b.constant(b.ty(line), 0.0), b.constant(b.ty(line), 1.0));
    let (below, above) = (b.compare(CompareOp::Lt, line, zero), b.compare(CompareOp::Lt, one, line));
    let capped = b.select(above, one, line);
    Ok(b.select(below, zero, capped))
}

pub(crate) fn thresholded_relu(b: &mut Builder, x: &[Reg], attrs: &Attrs) -> Result<Reg, OpError> {
    let alpha = float_attr(attrs, ALPHA, 1.0)?;
    let (alpha, zero) = (b.constant(b.ty(x[0]), alpha), b.constant(b.ty(x[0]), 0.0));
    // A comparison, so that NaN passes.
    let below = b.compare(CompareOp::Le, x[0], alpha);
    Ok(b.select(below, zero, x[0]))
}
