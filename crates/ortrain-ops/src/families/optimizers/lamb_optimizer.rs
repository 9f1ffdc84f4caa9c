//! `LambOptimizer` of `com.microsoft`: LAMB that skips elements with results that are not finite.

use super::adam_optimizer::{ALPHA_BETA, LAMBDA, MOMENTS, bias_corrections, next_moments};
use crate::families::optimizers::row::{Optimizer, Range, Rule, setting};

pub(crate) const LAMB_OPTIMIZER: Optimizer = Optimizer {
    name: "LambOptimizer",
    summary: "Adam with a learning rate for each tensor, scaled by its norm",
    source: "com.microsoft LambOptimizer, version 1; You et al., Large Batch Optimization for Deep Learning, 2020",
    slots: &MOMENTS,
    settings: &[
        ALPHA_BETA[0],
        ALPHA_BETA[1],
        LAMBDA,
        setting("epsilon", 1e-6, Range::NotNegative, "added to the square root that divides a step"),
        setting(
            "do_bias_correction",
            0.0,
            Range::Finite,
            "1: correct the bias of the averages towards zero; 0: do not correct it",
        ),
        setting("ratio_min", f64::MIN, Range::Finite, "smallest trust ratio of a tensor"),
        setting("ratio_max", f64::MAX, Range::Finite, "largest trust ratio of a tensor"),
    ],
    flags: &[],
    learning_rate: 1e-3,
    average: None,
    update: Rule::Elements(|u| {
        let (first, second) = next_moments(u);
        let (c1, c2) = bias_corrections(u);
        // The root of the second correction is multiplied into scalars, so that each element takes one division.
        let share = c2.sqrt();
        let root = second.sqrt() + u.setting("epsilon") * share;
        let direction = u.setting("lambda") * u.parameter + first * (share / c1) / root;
        // A negative or NaN second moment gives a NaN direction, and an infinite second moment an infinite root. A
        // finite root is far too small to make a finite direction infinite. So one check of the sum finds all cases.
        let usable = (direction + root).is_finite();
        for (name, value) in [("Moment_1", first), ("Moment_2", second)] {
            u.store_slot(name, usable.select(value, u.slot(name)));
        }
        let direction = usable.select(direction, direction.like(0.0));
        let (weights, steps) = (u.parameter.norm(), direction.norm());
        let ratio = (weights / steps).max(u.setting("ratio_min")).min(u.setting("ratio_max"));
        let ratio = weights.greater_than(0.0).and(steps.greater_than(0.0)).select(ratio, ratio.like(1.0));
        let new = u.parameter - u.rate * ratio * direction;
        new.is_finite().select(new, u.parameter)
    }),
};
