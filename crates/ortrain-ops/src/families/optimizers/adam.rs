//! Adam with an L2 penalty.

use super::adamw::adam_step;
use super::{BETAS, Optimizer, Range, When, setting, slot};

pub(super) const ADAM: Optimizer = Optimizer {
    name: "Adam",
    source: "Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015; amsgrad: Reddi et al., 2018; torch.optim.Adam",
    slots: &[slot("momentum0"), slot("momentum1"), slot("max_momentum1").when(When::Flag("amsgrad"))],
    settings: &[
        BETAS[0],
        BETAS[1],
        setting("eps", 1e-8, Range::NotNegative),
        setting("weight_decay", 0.0, Range::NotNegative),
    ],
    flags: &[("amsgrad", false)],
    learning_rate: 1e-3,
    update: |u| {
        let gradient = u.penalized_gradient();
        u.parameter - adam_step(u, gradient)
    },
};
