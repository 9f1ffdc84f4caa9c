//! Lion: steps by the sign of the momentum.

use crate::families::optimizers::row::{Optimizer, Range, Rule, setting, slot};

pub(super) const LION: Optimizer = Optimizer {
    name: "Lion",
    summary: "steps of equal size, with the sign of the momentum",
    source: "Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, program 1",
    slots: &[slot("momentum0")],
    settings: &[
        setting("beta1", 0.9, Range::BelowOne, "weight of the momentum in the direction of a step"),
        setting("beta2", 0.99, Range::BelowOne, "decay rate of the momentum"),
        setting(
            "weight_decay",
            0.0,
            Range::NotNegative,
            "decoupled weight decay (a step subtracts `lr * weight_decay * weight`)",
        ),
    ],
    flags: &[],
    learning_rate: 1e-4,
    average: None,
    update: Rule::Elements(|u| {
        let direction = u.slot("momentum0").blend(u.setting("beta1"), u.gradient).sign();
        u.average("momentum0", u.setting("beta2"), u.gradient);
        u.parameter - (u.decay() + u.rate * direction)
    }),
};
