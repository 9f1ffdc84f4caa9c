//! RMSprop, optionally centered.

use crate::families::optimizers::row::{Optimizer, Range, Rule, When, flag, setting, slot};

pub(super) const RMSPROP: Optimizer = Optimizer {
    name: "RMSprop",
    summary: "rates from a running average of squared gradients",
    source: "Hinton, Neural Networks for Machine Learning, lecture 6, 2012; centred: Graves, 2013; torch.optim.RMSprop",
    slots: &[
        slot("square_average"),
        slot("gradient_average").with_condition(When::Flag("centered")),
        slot("momentum0").with_condition(When::Nonzero("momentum")),
    ],
    settings: &[
        setting("alpha", 0.99, Range::BelowOne, "decay rate of the average of squares"),
        setting("eps", 1e-8, Range::NotNegative, "added to the square root that divides a step"),
        setting(
            "weight_decay",
            0.0,
            Range::NotNegative,
            "factor of an L2 penalty (`weight_decay * weight` is added to the gradient)",
        ),
        setting("momentum", 0.0, Range::NotNegative, "factor of the previous velocity"),
    ],
    flags: &[flag(
        "centered",
        false,
        "divide by the variance of gradients, not by the mean of their squares",
    )],
    learning_rate: 1e-2,
    average: None,
    update: Rule::Elements(|u| {
        let (gradient, alpha) = (u.penalized_gradient(), u.setting("alpha"));
        let mut variance = u.average("square_average", alpha, gradient * gradient);
        if u.flag("centered") {
            let mean = u.average("gradient_average", alpha, gradient);
            // Rounding can make the difference slightly negative.
            variance = (variance - mean * mean).max(u.constant(0.0));
        }
        let mut direction = gradient / (variance.sqrt() + u.setting("eps"));
        if let Some(velocity) = u.optional_slot("momentum0") {
            direction = u.store_slot("momentum0", u.setting("momentum") * velocity + direction);
        }
        u.parameter - u.rate * direction
    }),
};
