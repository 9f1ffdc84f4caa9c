//! AdamW: Adam with decoupled weight decay.

use super::formula::Number;
use crate::families::optimizers::row::{BETAS, Optimizer, Range, Rule, Update, When, flag, setting, slot};

pub(super) const ADAMW: Optimizer = Optimizer {
    name: "AdamW",
    summary: "Adam with decoupled weight decay",
    source: "Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019; torch.optim.AdamW",
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
            0.01,
            Range::NotNegative,
            "decoupled weight decay (a step subtracts `lr * weight_decay * weight`)",
        ),
    ],
    flags: &[
        flag("amsgrad", false, "divide by the largest average of squares so far"),
        flag("bias_correction", true, "correct the bias of the averages towards zero"),
        flag("onnxruntime", false, "use the formula of onnxruntime's AdamWOptimizer"),
    ],
    learning_rate: 1e-3,
    average: None,
    update: Rule::Elements(update),
};

/// Updates and returns the two moments of Adam.
pub(super) fn update_moments<'a>(u: &mut Update<'a>, gradient: Number<'a>) -> (Number<'a>, Number<'a>) {
    let (beta1, beta2) = (u.setting("beta1"), u.setting("beta2"));
    (u.average("momentum0", beta1, gradient), u.average("momentum1", beta2, gradient * gradient))
}

/// Returns the second moment in the divisor of Adam: with `amsgrad`, the largest so far (Reddi et al., 2018).
pub(super) fn amsgrad_second_moment<'a>(u: &mut Update<'a>, second: Number<'a>) -> Number<'a> {
    match u.optional_slot("max_momentum1") {
        Some(largest) => u.store_slot("max_momentum1", largest.max(second)),
        None => second,
    }
}

/// Returns the step of Adam: rate times corrected first moment, divided by the root of the corrected second moment.
pub(super) fn adam_step<'a>(u: &mut Update<'a>, gradient: Number<'a>) -> Number<'a> {
    let (first, second) = update_moments(u, gradient);
    let second = amsgrad_second_moment(u, second);
    let (c1, c2) = (u.bias_correction(u.setting("beta1")), u.bias_correction(u.setting("beta2")));
    (u.rate / c1) * first / (second.sqrt() / c2.sqrt() + u.setting("eps"))
}

fn update<'a>(u: &mut Update<'a>) -> Number<'a> {
    match (u.flag("onnxruntime"), u.flag("bias_correction")) {
        (false, true) => u.parameter - (u.decay() + adam_step(u, u.gradient)),
        (false, false) => {
            let (first, second) = update_moments(u, u.gradient);
            let second = amsgrad_second_moment(u, second);
            u.parameter - (u.decay() + u.rate * first / (second.sqrt() + u.setting("eps")))
        }
        (true, corrected) => {
            let (first, second) = update_moments(u, u.gradient);
            let second = amsgrad_second_moment(u, second);
            let rate = match corrected {
                true => {
                    let (c1, c2) =
                        (u.bias_correction(u.setting("beta1")), u.bias_correction(u.setting("beta2")));
                    u.rate * c2.sqrt() / c1
                }
                false => u.rate,
            };
            let step = rate * first / (second.sqrt() + u.setting("eps"));
            // The decay applies to the weights after the step.
            u.parameter - (u.rate * u.setting("weight_decay") * (u.parameter - step) + step)
        }
    }
}
