//! Adamax: Adam with the largest gradient in place of the second moment.

use crate::families::optimizers::row::{BETAS, Optimizer, Range, Rule, setting, slot};

pub(super) const ADAMAX: Optimizer = Optimizer {
    name: "Adamax",
    summary: "Adam with the largest gradient instead of the average of squares",
    source: "Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015, section 7.1; torch.optim.Adamax",
    slots: &[slot("momentum0"), slot("largest_gradient")],
    settings: &[
        BETAS[0],
        BETAS[1],
        setting("eps", 1e-8, Range::NotNegative, "added to the absolute value of a gradient"),
        setting(
            "weight_decay",
            0.0,
            Range::NotNegative,
            "factor of an L2 penalty (`weight_decay * weight` is added to the gradient)",
        ),
    ],
    flags: &[],
    learning_rate: 2e-3,
    average: None,
    update: Rule::Elements(|u| {
        let (gradient, beta1) = (u.penalized_gradient(), u.setting("beta1"));
        let first = u.average("momentum0", beta1, gradient);
        let before = u.setting("beta2") * u.slot("largest_gradient");
        let largest = u.store_slot("largest_gradient", before.max(gradient.abs() + u.setting("eps")));
        u.parameter - u.rate / u.bias_correction(beta1) * first / largest
    }),
};
