//! Stochastic gradient descent with momentum.

use crate::families::optimizers::row::{Optimizer, Range, Rule, When, flag, setting, slot};

pub(super) const SGD: Optimizer = Optimizer {
    name: "SGD",
    summary: "stochastic gradient descent with optional momentum",
    source: "Sutskever et al., On the importance of initialization and momentum in deep learning, 2013; torch.optim.SGD",
    slots: &[slot("momentum0").with_condition(When::Nonzero("momentum"))],
    settings: &[
        setting("momentum", 0.0, Range::NotNegative, "factor of the previous velocity"),
        setting(
            "dampening",
            0.0,
            Range::Finite,
            "share of each gradient after the first that is not added to the velocity",
        ),
        setting(
            "weight_decay",
            0.0,
            Range::NotNegative,
            "factor of an L2 penalty (`weight_decay * weight` is added to the gradient)",
        ),
    ],
    flags: &[flag("nesterov", false, "use Nesterov's momentum")],
    learning_rate: 1e-3,
    average: None,
    update: Rule::Elements(|u| {
        let (gradient, momentum) = (u.penalized_gradient(), u.setting("momentum"));
        let Some(velocity) = u.optional_slot("momentum0") else { return u.parameter - u.rate * gradient };
        // The first gradient is not damped.
        let fresh = u.step.equals(1.0).select(u.constant(1.0), 1.0 - u.setting("dampening"));
        let velocity = u.store_slot("momentum0", momentum * velocity + fresh * gradient);
        let direction = if u.flag("nesterov") { gradient + momentum * velocity } else { velocity };
        u.parameter - u.rate * direction
    }),
};
