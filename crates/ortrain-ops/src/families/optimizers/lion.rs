//! Lion: the sign of a momentum.

use super::{Optimizer, Range, setting, slot};

pub(super) const LION: Optimizer = Optimizer {
    name: "Lion",
    source: "Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, program 1",
    slots: &[slot("momentum0")],
    settings: &[
        setting("beta1", 0.9, Range::BelowOne),
        setting("beta2", 0.99, Range::BelowOne),
        setting("weight_decay", 0.0, Range::NotNegative),
    ],
    flags: &[],
    learning_rate: 1e-4,
    update: |u| {
        let direction = u.slot("momentum0").blend(u.setting("beta1"), u.gradient).sign();
        u.average("momentum0", u.setting("beta2"), u.gradient);
        u.decayed_parameter() - u.rate * direction
    },
};
