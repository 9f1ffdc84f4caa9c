//! Activation functions of gates and states.

use ortrain_expr::{BinaryOp, Builder, CompareOp, Reg, Type, UnaryOp};
use ortrain_graph::{Attrs, DType};

use crate::OpError;
use crate::support::activation_functions;

/// Function of one number, increasing if its slope is used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Activation {
    /// `alpha * x + beta`.
    Affine { alpha: f64, beta: f64 },
    /// `x`, below zero `alpha * (exp(x) - 1)`.
    Elu { alpha: f64 },
    /// `alpha * x + beta`, limited to the range from 0 to 1.
    HardSigmoid { alpha: f64, beta: f64 },
    /// `x`, below zero `alpha * x`.
    LeakyRelu { alpha: f64 },
    /// `x`, below zero 0.
    Relu,
    /// `alpha * tanh(beta * x)`.
    ScaledTanh { alpha: f64, beta: f64 },
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `log(1 + exp(x))`.
    Softplus,
    /// `x / (1 + abs(x))`.
    Softsign,
    /// `tanh(x)`.
    Tanh,
    /// `x` if it is above `alpha`, else 0.
    ThresholdedRelu { alpha: f64 },
}

/// Returns true if the function of this name has the parameter alpha.
pub(super) fn has_alpha(name: &str) -> bool {
    has_beta(name)
        || ["elu", "leakyrelu", "thresholdedrelu"].iter().any(|other| name.eq_ignore_ascii_case(other))
}

/// Returns true if the function of this name has the parameter beta.
pub(super) fn has_beta(name: &str) -> bool {
    ["affine", "hardsigmoid", "scaledtanh"].iter().any(|other| name.eq_ignore_ascii_case(other))
}

impl Activation {
    /// Parses the functions that a node names, or returns `default`. Functions with parameters consume the lists of
    /// parameters in order. If a list is too short, the defaults of the ONNX operators apply.
    pub(super) fn parse_all(attrs: &Attrs, default: &[Activation]) -> Result<Vec<Activation>, OpError> {
        let Some(names) = attrs.strings("activations")? else { return Ok(default.to_vec()) };
        if names.len() != default.len() {
            let (expected, actual) = (default.len(), names.len());
            return Err(OpError::invalid(format!(
                "activations names {actual} functions, expected {expected}"
            )));
        }
        let (alphas, betas) = (attrs.floats("activation_alpha")?, attrs.floats("activation_beta")?);
        let mut alphas = alphas.unwrap_or_default().iter().map(|&x| f64::from(x));
        let mut betas = betas.unwrap_or_default().iter().map(|&x| f64::from(x));
        names
            .iter()
            .map(|name| {
                let mut alpha = |default: f64| alphas.next().unwrap_or(default);
                let mut beta = |default: f64| betas.next().unwrap_or(default);
                Ok(match name.to_ascii_lowercase().as_str() {
                    "affine" => Activation::Affine { alpha: alpha(1.0), beta: beta(0.0) },
                    "elu" => Activation::Elu { alpha: alpha(1.0) },
                    "hardsigmoid" => Activation::HardSigmoid { alpha: alpha(0.2), beta: beta(0.5) },
                    "leakyrelu" => Activation::LeakyRelu { alpha: alpha(0.01) },
                    "relu" => Activation::Relu,
                    "scaledtanh" => Activation::ScaledTanh { alpha: alpha(1.0), beta: beta(1.0) },
                    "sigmoid" => Activation::Sigmoid,
                    "softplus" => Activation::Softplus,
                    "softsign" => Activation::Softsign,
                    "tanh" => Activation::Tanh,
                    "thresholdedrelu" => Activation::ThresholdedRelu { alpha: alpha(1.0) },
                    _ => {
                        return Err(OpError::invalid(format!(
                            "the activation {name:?} is unknown; the activations are Affine, Elu, HardSigmoid, \
                             LeakyRelu, Relu, ScaledTanh, Sigmoid, Softplus, Softsign, Tanh and ThresholdedRelu"
                        )));
                    }
                })
            })
            .collect()
    }

    /// Returns true if the slope can be computed from the value: the function has no equal values on both sides of a
    /// kink.
    pub(super) fn has_slope_from_value(self) -> bool {
        match self {
            Activation::Elu { alpha }
            | Activation::LeakyRelu { alpha }
            | Activation::ThresholdedRelu { alpha } => alpha >= 0.0,
            _ => true,
        }
    }

    /// Emits the function.
    pub(super) fn apply(self, b: &mut Builder, x: Reg) -> Reg {
        let ty = b.ty(x);
        // The operators of these names, with the parameters as attributes.
        let number = |name: &str, value: f64| Attrs::new().with(name, value as f32);
        let none = Attrs::new();
        let operator = |b: &mut Builder, value: fn(&mut Builder, &[Reg], &Attrs) -> _, attrs: &Attrs| {
            let result: Result<Reg, OpError> = value(b, &[x], attrs);
            result.expect("the attributes are floats")
        };
        match self {
            Activation::Affine { alpha, beta } => {
                let (alpha, beta) = (b.constant(ty, alpha), b.constant(ty, beta));
                let scaled = b.mul(x, alpha);
                b.add(scaled, beta)
            }
            Activation::Elu { alpha } => operator(b, activation_functions::elu, &number("alpha", alpha)),
            Activation::HardSigmoid { alpha, beta } => operator(
                b,
                activation_functions::hard_sigmoid,
                &number("alpha", alpha).with("beta", beta as f32),
            ),
            Activation::LeakyRelu { alpha } => {
                operator(b, activation_functions::leaky_relu, &number("alpha", alpha))
            }
            Activation::Relu => operator(b, activation_functions::relu, &none),
            Activation::ScaledTanh { alpha, beta } => {
                let (alpha, beta) = (b.constant(ty, alpha), b.constant(ty, beta));
                let scaled = b.mul(x, beta);
                let tanh = b.unary(UnaryOp::Tanh, scaled);
                b.mul(alpha, tanh)
            }
            Activation::Sigmoid => b.unary(UnaryOp::Sigmoid, x),
            Activation::Softplus => operator(b, activation_functions::softplus, &none),
            Activation::Softsign => operator(b, activation_functions::softsign, &none),
            Activation::Tanh => b.unary(UnaryOp::Tanh, x),
            Activation::ThresholdedRelu { alpha } => {
                operator(b, activation_functions::thresholded_relu, &number("alpha", alpha))
            }
        }
    }

    /// Emits the derivative at the point where the function has the value `y`. At a kink it is the derivative of the
    /// flat side.
    pub(super) fn slope(self, b: &mut Builder, y: Reg) -> Reg {
        let ty = b.ty(y);
        let zero = b.constant(ty, 0.0);
        let one = b.constant(ty, 1.0);
        match self {
            Activation::Affine { alpha, .. } => b.constant(ty, alpha),
            Activation::Elu { alpha } => {
                let negative = b.compare(CompareOp::Lt, y, zero);
                let alpha = b.constant(ty, alpha);
                let below = b.add(y, alpha);
                b.select(negative, below, one)
            }
            Activation::HardSigmoid { alpha, .. } => {
                let (low, high) = (b.compare(CompareOp::Lt, zero, y), b.compare(CompareOp::Lt, y, one));
                let inside = b.binary(BinaryOp::And, low, high);
                let alpha = b.constant(ty, alpha);
                b.select(inside, alpha, zero)
            }
            Activation::LeakyRelu { alpha } => {
                let positive = b.compare(CompareOp::Lt, zero, y);
                let alpha = b.constant(ty, alpha);
                b.select(positive, one, alpha)
            }
            Activation::Relu | Activation::ThresholdedRelu { .. } => {
                let positive = b.compare(CompareOp::Lt, zero, y);
                b.select(positive, one, zero)
            }
            Activation::ScaledTanh { alpha, beta } => {
                if alpha == 0.0 {
                    return zero;
                }
                let (alpha, slope) = (b.constant(ty, alpha), b.constant(ty, alpha * beta));
                let tanh = b.div(y, alpha);
                let square = b.mul(tanh, tanh);
                let rest = b.sub(one, square);
                b.mul(slope, rest)
            }
            Activation::Sigmoid => {
                let rest = b.sub(one, y);
                b.mul(y, rest)
            }
            Activation::Softplus => {
                let negative = b.unary(UnaryOp::Neg, y);
                let power = b.unary(UnaryOp::Exp, negative);
                b.sub(one, power)
            }
            Activation::Softsign => {
                let size = b.unary(UnaryOp::Abs, y);
                let rest = b.sub(one, size);
                b.mul(rest, rest)
            }
            Activation::Tanh => {
                let square = b.mul(y, y);
                b.sub(one, square)
            }
        }
    }
}

/// Activation with its argument limited to the range from `-clip` to `clip`, if `clip` is set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clipped {
    pub(super) activation: Activation,
    pub(super) clip: Option<f64>,
}

/// Relative distance from the value at the clip limit up to which a value counts as clipped. The value at the limit is
/// computed once exactly and once by a kernel, and the results may differ in the last bits.
const CLIP_TOLERANCE: f64 = 1e-6;

/// [`CLIP_TOLERANCE`] for values that are rounded to a narrow type, in units of its rounding error. A value at the clip limit
/// is stored within one unit, and a value that is not clipped beyond two (see [`Clipped::apply`]).
const NARROW_CLIP_TOLERANCE: f64 = 1.5;
const NARROW_CLIP_MARGIN: f64 = 3.0;

/// Returns the largest relative error of rounding to a narrow type; `None` for other types.
fn rounding_error(stored: DType) -> Option<f64> {
    match stored {
        DType::F16 => Some(1.0 / 2048.0),
        DType::BF16 => Some(1.0 / 256.0),
        _ => None,
    }
}

impl Clipped {
    /// Emits the function of `x` for a result that is stored as type `stored`.
    ///
    /// [`Clipped::slope`] detects from the stored value if the argument was clipped. A narrow type could round a value
    /// near the clip limit to the value at the limit. Such values are therefore moved three rounding errors away.
    pub(super) fn apply(self, b: &mut Builder, x: Reg, stored: DType) -> Reg {
        let Some(clip) = self.clip else { return self.activation.apply(b, x) };
        let ty = b.ty(x);
        let (low, high) = (b.constant(ty, -clip), b.constant(ty, clip));
        let above = b.binary(BinaryOp::Max, x, low);
        let clipped = b.binary(BinaryOp::Min, above, high);
        let y = self.activation.apply(b, clipped);
        let Some(rounding) = rounding_error(stored) else { return y };
        let (above, below) = (b.compare(CompareOp::Lt, low, x), b.compare(CompareOp::Lt, x, high));
        let inside = b.binary(BinaryOp::And, above, below);
        let (lower, upper) = self.clip_bounds(b, ty, clip, NARROW_CLIP_MARGIN * rounding);
        let bounded_below = b.binary(BinaryOp::Max, y, lower);
        let bounded = b.binary(BinaryOp::Min, bounded_below, upper);
        b.select(inside, bounded, y)
    }

    /// Emits the derivative at the point where the function has the value `y`, which was stored as type `stored`. The
    /// derivative is zero if the argument was clipped.
    pub(super) fn slope(self, b: &mut Builder, y: Reg, stored: DType) -> Reg {
        let slope = self.activation.slope(b, y);
        let Some(clip) = self.clip else { return slope };
        let ty = b.ty(y);
        let zero = b.constant(ty, 0.0);
        let margin =
            rounding_error(stored).map_or(CLIP_TOLERANCE, |rounding| NARROW_CLIP_TOLERANCE * rounding);
        let (low, high) = self.clip_bounds(b, ty, clip, margin);
        let (above, below) = (b.compare(CompareOp::Lt, low, y), b.compare(CompareOp::Lt, y, high));
        let inside = b.binary(BinaryOp::And, above, below);
        b.select(inside, slope, zero)
    }

    /// Returns the lower and the upper value at the clip limits, each moved inwards by the fraction `share` of its
    /// magnitude.
    fn clip_bounds(self, b: &mut Builder, ty: Type, clip: f64, share: f64) -> (Reg, Reg) {
        let margin = b.constant(ty, share);
        let [first, second] = [-clip, clip].map(|at| {
            let at = b.constant(ty, at);
            self.activation.apply(b, at)
        });
        let (low, high) = (b.binary(BinaryOp::Min, first, second), b.binary(BinaryOp::Max, first, second));
        let clip_margin = |b: &mut Builder, bound: Reg| {
            let size = b.unary(UnaryOp::Abs, bound);
            b.mul(size, margin)
        };
        let (low_margin, high_margin) = (clip_margin(b, low), clip_margin(b, high));
        (b.add(low, low_margin), b.sub(high, high_margin))
    }
}
