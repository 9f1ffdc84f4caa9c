//! RAdam: Adam with a rectified adaptive rate during the first steps.

use super::adamw::update_moments;
use crate::families::optimizers::row::{BETAS, Optimizer, Range, Rule, flag, setting, slot};

/// Length of the moving average above which its variance is tractable.
const MIN_AVERAGE_LENGTH: f64 = 5.0;

pub(super) const RADAM: Optimizer = Optimizer {
    name: "RAdam",
    summary: "Adam with a rectified adaptive rate in the first steps",
    source: "Liu et al., On the Variance of the Adaptive Learning Rate and Beyond, 2020; torch.optim.RAdam",
    slots: &[slot("momentum0"), slot("momentum1")],
    settings: &[
        BETAS[0],
        BETAS[1],
        setting("eps", 1e-8, Range::NotNegative, "added to the square root that divides a step"),
        setting(
            "weight_decay",
            0.0,
            Range::NotNegative,
            "factor of an L2 penalty (`weight_decay * weight` is added to the gradient)",
        ),
    ],
    flags: &[flag(
        "decoupled_weight_decay",
        false,
        "subtract weight decay from the weights instead of adding it to the gradients",
    )],
    learning_rate: 1e-3,
    average: None,
    update: Rule::Elements(|u| {
        let (decay, gradient) = match u.flag("decoupled_weight_decay") {
            true => (u.decay(), u.gradient),
            false => (u.constant(0.0), u.penalized_gradient()),
        };
        let beta2 = u.setting("beta2");
        let (first, second) = update_moments(u, gradient);
        let (c1, c2) = (u.bias_correction(u.setting("beta1")), u.bias_correction(beta2));
        let max_length = 2.0 / (1.0 - beta2) - 1.0;
        let length = max_length - 2.0 * u.step * beta2.pow(u.step) / c2;
        let rectified =
            (length - 4.0) * (length - 2.0) * max_length / ((max_length - 4.0) * (max_length - 2.0) * length);
        let adaptive = rectified.max(u.constant(0.0)).sqrt() * c2.sqrt() / (second.sqrt() + u.setting("eps"));
        let scale = length.greater_than(MIN_AVERAGE_LENGTH).select(adaptive, u.constant(1.0));
        u.parameter - (decay + u.rate / c1 * first * scale)
    }),
};
