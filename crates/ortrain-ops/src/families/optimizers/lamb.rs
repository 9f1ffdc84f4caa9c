//! LAMB: Adam with a learning rate per tensor, scaled by norms.

use super::adamw::update_moments;
use crate::families::optimizers::row::{BETAS, Optimizer, Range, Rule, flag, setting, slot};

pub(super) const LAMB: Optimizer = Optimizer {
    name: "LAMB",
    summary: "Adam with a learning rate for each tensor, scaled by its norm",
    source: "You et al., Large Batch Optimization for Deep Learning, 2020",
    slots: &[slot("momentum0"), slot("momentum1")],
    settings: &[
        BETAS[0],
        BETAS[1],
        setting("eps", 1e-6, Range::NotNegative, "added to the square root that divides a step"),
        setting(
            "weight_decay",
            0.01,
            Range::NotNegative,
            "factor of the weight in the direction of a step (`weight_decay * weight` is added)",
        ),
        setting("ratio_min", 0.0, Range::NotNegative, "smallest trust ratio of a tensor"),
        setting("ratio_max", f32::MAX as f64, Range::NotNegative, "largest trust ratio of a tensor"),
    ],
    flags: &[flag("bias_correction", true, "correct the bias of the averages towards zero")],
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
