//! LAMB: Adam with a learning rate per tensor, scaled by norms.

use super::adamw::update_moments;
use super::{BETAS, Optimizer, Range, Rule, flag, setting, slot};

pub(super) const LAMB: Optimizer = Optimizer {
    name: "LAMB",
    summary: "Adam with a rate for each tensor by its norm",
    source: "You et al., Large Batch Optimization for Deep Learning, 2020",
    slots: &[slot("momentum0"), slot("momentum1")],
    settings: &[
        BETAS[0],
        BETAS[1],
        setting("eps", 1e-6, Range::NotNegative, "what is added to the root that a step is divided by"),
        setting(
            "weight_decay",
            0.01,
            Range::NotNegative,
            "the factor of the weight that is added to its direction",
        ),
        setting("ratio_min", 0.0, Range::NotNegative, "the least trust ratio of a tensor"),
        setting("ratio_max", f32::MAX as f64, Range::NotNegative, "the largest trust ratio of a tensor"),
    ],
    flags: &[flag("bias_correction", true, "correct the averages for starting at zero")],
    learning_rate: 1e-3,
    average: None,
    update: Rule::Elements(|u| {
        let (mut first, mut second) = update_moments(u, u.gradient);
        if u.flag("bias_correction") {
            // Scalars are divided first, so that each element takes one division.
            let [by1, by2] = ["beta1", "beta2"].map(|beta| 1.0 / u.bias_correction(u.setting(beta)));
            first = first * by1;
            second = second * by2;
        }
        let adam = first / (second.sqrt() + u.setting("eps"));
        let direction = adam + u.setting("weight_decay") * u.parameter;
        let (weights, steps) = (u.parameter.norm(), direction.norm());
        let ratio = (weights / steps).max(u.setting("ratio_min")).min(u.setting("ratio_max"));
        let ratio = weights.greater_than(0.0).and(steps.greater_than(0.0)).select(ratio, u.constant(1.0));
        u.parameter - u.rate * ratio * direction
    }),
};
