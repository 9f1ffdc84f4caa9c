//! Adagrad: learning rates by the sum of squared gradients.

use crate::families::optimizers::row::{Optimizer, Range, Rule, Start, setting, slot};

pub(super) const ADAGRAD: Optimizer = Optimizer {
    name: "Adagrad",
    summary: "rates from the sum of all squared gradients",
    source: "Duchi, Hazan and Singer, Adaptive Subgradient Methods, 2011; torch.optim.Adagrad",
    slots: &[slot("square_sum").with_start(Start::Setting("initial_accumulator_value"))],
    settings: &[
        setting(
            "lr_decay",
            0.0,
            Range::NotNegative,
            "decay of the learning rate (divided by `1 + (t - 1) * lr_decay` at step t)",
        ),
        setting(
            "weight_decay",
            0.0,
            Range::NotNegative,
            "factor of an L2 penalty (`weight_decay * weight` is added to the gradient)",
        ),
        setting("initial_accumulator_value", 0.0, Range::NotNegative, "initial value of the sum of squares"),
        setting("eps", 1e-10, Range::NotNegative, "added to the square root that divides a step"),
    ],
    flags: &[],
    learning_rate: 1e-2,
    average: None,
    update: Rule::Elements(|u| {
        let gradient = u.penalized_gradient();
        let rate = u.rate / (1.0 + (u.step - 1.0) * u.setting("lr_decay"));
        let sum = u.store_slot("square_sum", u.slot("square_sum") + gradient * gradient);
        u.parameter - rate * gradient / (sum.sqrt() + u.setting("eps"))
    }),
};
