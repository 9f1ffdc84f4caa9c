//! Schedule-free AdamW: the gradients are computed at a point between the weights of the steps and their average.

use crate::families::optimizers::row::{BETAS, Optimizer, Range, Rule, Start, setting, slot};

/// Row of the optimizer. The weights in the state are `y`, the point of the gradients. The slot `z` has the weights of
/// the steps. The result of training is the average `x = (y - (1 - beta1) z) / beta1`.
pub(super) const SCHEDULE_FREE_ADAMW: Optimizer = Optimizer {
    name: "ScheduleFreeAdamW",
    summary: "AdamW that averages its weights and needs no learning rate schedule",
    source: "Defazio et al., The Road Less Scheduled, 2024, algorithm 1",
    slots: &[
        slot("z").with_start(Start::Parameter),
        slot("momentum1"),
        slot("largest_rate").scalar(),
        slot("weight_sum").scalar(),
    ],
    settings: &[
        setting(
            "beta1",
            0.9,
            Range::Inside,
            "weight of the average in the point at which gradients are computed",
        ),
        BETAS[1],
        setting("eps", 1e-8, Range::NotNegative, "added to the square root that divides a step"),
        setting(
            "weight_decay",
            0.0,
            Range::NotNegative,
            "factor of the weight in the direction of a step (`weight_decay * weight` is added)",
        ),
        setting(
            "warmup_steps",
            0.0,
            Range::NotNegative,
            "number of steps over which the learning rate rises",
        ),
        setting("r", 0.0, Range::Finite, "exponent of the step in the weights of the average"),
        setting(
            "weight_lr_power",
            2.0,
            Range::Finite,
            "exponent of the largest learning rate in the weights of the average",
        ),
    ],
    flags: &[],
    learning_rate: 2.5e-3,
    average: Some(|y, slot, setting| {
        let beta1 = setting("beta1");
        (y - (1.0 - beta1) * slot("z")) / beta1
    }),
    update: Rule::Elements(|u| {
        let (beta1, beta2, y) = (u.setting("beta1"), u.setting("beta2"), u.parameter);
        let warmup = u.setting("warmup_steps");
        let rising = (u.step / warmup.max(u.constant(1.0))).min(u.constant(1.0));
        let rate = u.rate * rising * u.bias_correction(beta2).sqrt();
        let largest = u.store_slot("largest_rate", u.slot("largest_rate").max(rate));
        let weight = u.step.pow(u.setting("r")) * largest.pow(u.setting("weight_lr_power"));
        let sum = u.store_slot("weight_sum", u.slot("weight_sum") + weight);
        let share = sum.equals(0.0).select(u.constant(0.0), weight / sum);
        let second = u.average("momentum1", beta2, u.gradient * u.gradient);
        let direction = u.gradient / (second.sqrt() + u.setting("eps")) + u.setting("weight_decay") * y;
        let z = u.slot("z");
        u.store_slot("z", z - rate * direction);
        y.blend(1.0 - share, z) + rate * (beta1 * (1.0 - share) - 1.0) * direction
    }),
};
