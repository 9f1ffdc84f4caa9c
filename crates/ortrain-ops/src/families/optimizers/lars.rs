//! LARS: momentum with a rate for each tensor by its norm.

use super::{Optimizer, Range, setting, slot};

pub(super) const LARS: Optimizer = Optimizer {
    name: "LARS",
    source: "You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, 2017",
    slots: &[slot("momentum0")],
    settings: &[
        setting("momentum", 0.9, Range::NotNegative),
        setting("weight_decay", 1e-4, Range::NotNegative),
        setting("trust_coefficient", 1e-3, Range::Positive),
        setting("eps", 1e-8, Range::NotNegative),
    ],
    flags: &[("nesterov", false)],
    learning_rate: 0.1,
    update: |u| {
        let (weights, gradients) = (u.parameter.norm(), u.gradient.norm());
        let (momentum, decay) = (u.setting("momentum"), u.setting("weight_decay"));
        let trust =
            u.setting("trust_coefficient") * weights / (gradients + decay * weights + u.setting("eps"));
        let trust = weights.above(0.0).and(gradients.above(0.0)).choose(trust, u.number(1.0));
        let gradient = trust * u.penalized_gradient();
        let velocity = u.keep("momentum0", momentum * u.slot("momentum0") + gradient);
        let direction = if u.flag("nesterov") { gradient + momentum * velocity } else { velocity };
        u.parameter - u.rate * direction
    },
};
