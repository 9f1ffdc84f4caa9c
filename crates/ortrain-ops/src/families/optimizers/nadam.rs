//! NAdam: Adam with Nesterov's momentum.

use super::adamw::update_moments;
use crate::families::optimizers::row::{BETAS, Optimizer, Range, Rule, Start, flag, setting, slot};

pub(super) const NADAM: Optimizer = Optimizer {
    name: "NAdam",
    summary: "Adam with Nesterov's momentum",
    source: "Dozat, Incorporating Nesterov Momentum into Adam, 2016; torch.optim.NAdam",
    slots: &[slot("momentum0"), slot("momentum1"), slot("mu_product").scalar().with_start(Start::One)],
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
        setting(
            "momentum_decay",
            4e-3,
            Range::NotNegative,
            "rate at which the momentum rises to its full value",
        ),
    ],
    flags: &[flag(
        "decoupled_weight_decay",
        false,
        "subtract weight decay from the weights instead of adding it to the gradients",
    )],
    learning_rate: 2e-3,
    average: None,
    update: Rule::Elements(|u| {
        let (decay, gradient) = match u.flag("decoupled_weight_decay") {
            true => (u.decay(), u.gradient),
            false => (u.constant(0.0), u.penalized_gradient()),
        };
        let (beta1, momentum_decay) = (u.setting("beta1"), u.setting("momentum_decay"));
        let warmed = |step| beta1 * (1.0 - 0.5 * u.constant(0.96).pow(step * momentum_decay));
        let (current, next) = (warmed(u.step), warmed(u.step + 1.0));
        let product = u.store_slot("mu_product", u.slot("mu_product") * current);
        let (first, second) = update_moments(u, gradient);
        let root = (second / u.bias_correction(u.setting("beta2"))).sqrt() + u.setting("eps");
        let of_gradient = u.rate * (1.0 - current) / (1.0 - product);
        let of_moment = u.rate * next / (1.0 - product * next);
        u.parameter - (decay + (of_gradient * gradient + of_moment * first) / root)
    }),
};
