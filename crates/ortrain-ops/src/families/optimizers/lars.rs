//! LARS: momentum with a learning rate per tensor, scaled by the ratio of the weights' norm to the gradient's norm.

use crate::families::optimizers::row::{Optimizer, Range, Rule, flag, setting, slot};

pub(super) const LARS: Optimizer = Optimizer {
    name: "LARS",
    summary: "momentum with a learning rate for each tensor, scaled by its norm",
    source: "You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, 2017",
    slots: &[slot("momentum0")],
    settings: &[
        setting("momentum", 0.9, Range::NotNegative, "factor of the previous velocity"),
        setting(
            "weight_decay",
            1e-4,
            Range::NotNegative,
            "factor of an L2 penalty (`weight_decay * weight` is added to the gradient)",
        ),
        setting("trust_coefficient", 1e-3, Range::Positive, "factor of the trust ratio of a tensor"),
        setting("eps", 1e-8, Range::NotNegative, "added to the divisor of the trust ratio"),
    ],
    flags: &[flag("nesterov", false, "use Nesterov's momentum")],
    learning_rate: 0.1,
    average: None,
    update: Rule::Elements(|u| {
        let (weights, gradients) = (u.parameter.norm(), u.gradient.norm());
        let (momentum, decay) = (u.setting("momentum"), u.setting("weight_decay"));
        let trust =
            u.setting("trust_coefficient") * weights / (gradients + decay * weights + u.setting("eps"));
        let trust = weights.greater_than(0.0).and(gradients.greater_than(0.0)).select(trust, u.constant(1.0));
        let gradient = trust * u.penalized_gradient();
        let velocity = u.store_slot("momentum0", momentum * u.slot("momentum0") + gradient);
        let direction = if u.flag("nesterov") { gradient + momentum * velocity } else { velocity };
        u.parameter - u.rate * direction
    }),
};
