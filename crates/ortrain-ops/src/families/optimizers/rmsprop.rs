//! RMSprop, perhaps centred.

use super::{Optimizer, Range, When, setting, slot};

pub(super) const RMSPROP: Optimizer = Optimizer {
    name: "RMSprop",
    source: "Hinton, Neural Networks for Machine Learning, lecture 6, 2012; centred: Graves, 2013; torch.optim.RMSprop",
    slots: &[
        slot("square_average"),
        slot("gradient_average").when(When::Flag("centered")),
        slot("momentum0").when(When::Nonzero("momentum")),
    ],
    settings: &[
        setting("alpha", 0.99, Range::BelowOne),
        setting("eps", 1e-8, Range::NotNegative),
        setting("weight_decay", 0.0, Range::NotNegative),
        setting("momentum", 0.0, Range::NotNegative),
    ],
    flags: &[("centered", false)],
    learning_rate: 1e-2,
    update: |u| {
        let (gradient, alpha) = (u.penalized_gradient(), u.setting("alpha"));
        let mut variance = u.average("square_average", alpha, gradient * gradient);
        if u.flag("centered") {
            let mean = u.average("gradient_average", alpha, gradient);
            // What is rounded may be a little below zero.
            variance = (variance - mean * mean).max(u.number(0.0));
        }
        let mut direction = gradient / (variance.sqrt() + u.setting("eps"));
        if let Some(velocity) = u.slot_if_any("momentum0") {
            direction = u.keep("momentum0", u.setting("momentum") * velocity + direction);
        }
        u.parameter - u.rate * direction
    },
};
