//! `AdamOptimizer` of `com.microsoft`: Adam with decoupled weight decay, before or after the step.

use super::formula::Number;
use crate::families::optimizers::row::{Optimizer, Range, Rule, Setting, Slot, Update, setting, slot};

/// Decay rates of the two moments.
pub(super) const ALPHA_BETA: [Setting; 2] = [
    setting("alpha", 0.9, Range::BelowOne, "decay rate of the average of gradients"),
    setting("beta", 0.999, Range::BelowOne, "decay rate of the average of squared gradients"),
];
pub(super) const LAMBDA: Setting =
    setting("lambda", 0.0, Range::NotNegative, "weight decay, the factor of the weight in a step");
/// Slots of the two moments.
pub(super) const MOMENTS: [Slot; 2] = [slot("Moment_1"), slot("Moment_2")];

pub(super) const ADAM_OPTIMIZER: Optimizer = Optimizer {
    name: "AdamOptimizer",
    summary: "Adam with weight decay before or after the step",
    source: "com.microsoft AdamOptimizer, version 1",
    slots: &MOMENTS,
    settings: &[
        ALPHA_BETA[0],
        ALPHA_BETA[1],
        LAMBDA,
        setting("epsilon", 1e-8, Range::NotNegative, "added to the square root that divides a step"),
        setting(
            "do_bias_correction",
            1.0,
            Range::Finite,
            "1: correct the bias of the averages towards zero; 0: do not correct it",
        ),
        setting(
            "weight_decay_mode",
            0.0,
            Range::Finite,
            "0: decay the weight before the step, and add epsilon to the corrected root; 1: decay the weight after \
             the step, and add epsilon to the uncorrected root",
        ),
    ],
    flags: &[],
    learning_rate: 1e-3,
    average: None,
    update: Rule::Elements(update),
};

/// Returns the two moments after a step.
pub(super) fn next_moments<'a>(u: &mut Update<'a>) -> (Number<'a>, Number<'a>) {
    let (alpha, beta, gradient) = (u.setting("alpha"), u.setting("beta"), u.gradient);
    (u.slot("Moment_1").blend(alpha, gradient), u.slot("Moment_2").blend(beta, gradient * gradient))
}

/// Returns the bias corrections of the two moments; 1 without bias correction.
pub(super) fn bias_corrections<'a>(u: &Update<'a>) -> (Number<'a>, Number<'a>) {
    let corrected = u.setting("do_bias_correction").equals(0.0);
    let one = u.constant(1.0);
    let correction = |factor| corrected.select(one, u.bias_correction(factor));
    (correction(u.setting("alpha")), correction(u.setting("beta")))
}

fn update<'a>(u: &mut Update<'a>) -> Number<'a> {
    let (first, second) = next_moments(u);
    u.store_slot("Moment_1", first);
    u.store_slot("Moment_2", second);
    let (c1, c2) = bias_corrections(u);
    let (after, one) = (u.setting("weight_decay_mode").equals(1.0), u.constant(1.0));
    // Scalars select the mode, so that one formula serves both modes and no element is computed twice.
    let (size, share) = (u.rate / c1, c2.sqrt());
    let size = after.select(size * share, size);
    let root = second.sqrt() * after.select(one, 1.0 / share);
    let step = size * first / (root + u.setting("epsilon"));
    let decaying = u.parameter - after.select(one, one.like(0.0)) * step;
    u.parameter - (u.rate * u.setting("lambda") * decaying + step)
}
