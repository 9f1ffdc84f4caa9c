//! Adagrad: rates by the sum of squared gradients.

use super::{Optimizer, Range, Start, setting, slot};

pub(super) const ADAGRAD: Optimizer = Optimizer {
    name: "Adagrad",
    source: "Duchi, Hazan and Singer, Adaptive Subgradient Methods, 2011; torch.optim.Adagrad",
    slots: &[slot("square_sum").starts(Start::Setting("initial_accumulator_value"))],
    settings: &[
        setting("lr_decay", 0.0, Range::NotNegative),
        setting("weight_decay", 0.0, Range::NotNegative),
        setting("initial_accumulator_value", 0.0, Range::NotNegative),
        setting("eps", 1e-10, Range::NotNegative),
    ],
    flags: &[],
    learning_rate: 1e-2,
    update: |u| {
        let gradient = u.penalized_gradient();
        let rate = u.rate / (1.0 + (u.step - 1.0) * u.setting("lr_decay"));
        let sum = u.keep("square_sum", u.slot("square_sum") + gradient * gradient);
        u.parameter - rate * gradient / (sum.sqrt() + u.setting("eps"))
    },
};
