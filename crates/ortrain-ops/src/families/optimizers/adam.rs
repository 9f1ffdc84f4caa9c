//! Adam with an L2 penalty.

use super::adamw::adam_step;
use crate::families::optimizers::row::{BETAS, Optimizer, Range, Rule, When, flag, setting, slot};

pub(super) const ADAM: Optimizer = Optimizer {
    name: "Adam",
    summary: "rates from running averages of gradients and their squares, with an L2 penalty",
    source: "Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015; amsgrad: Reddi et al., 2018; torch.optim.Adam",
    slots: &[
        slot("momentum0"),
        slot("momentum1"),
        slot("max_momentum1").with_condition(When::Flag("amsgrad")),
    ],
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
    flags: &[flag("amsgrad", false, "divide by the largest average of squares so far")],
    learning_rate: 1e-3,
    average: None,
    update: Rule::Elements(|u| {
        let gradient = u.penalized_gradient();
        u.parameter - adam_step(u, gradient)
    }),
};
