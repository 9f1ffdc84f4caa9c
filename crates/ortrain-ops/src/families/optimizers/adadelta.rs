//! Adadelta: steps in the unit of the weights.

use crate::families::optimizers::row::{Optimizer, Range, Rule, setting, slot};

pub(super) const ADADELTA: Optimizer = Optimizer {
    name: "Adadelta",
    summary: "rates from running averages of squared gradients and squared steps",
    source: "Zeiler, ADADELTA: An Adaptive Learning Rate Method, 2012; torch.optim.Adadelta",
    slots: &[slot("square_average"), slot("step_average")],
    settings: &[
        setting("rho", 0.9, Range::BelowOne, "decay rate of both averages"),
        setting("eps", 1e-6, Range::NotNegative, "added to both averages before their square roots"),
        setting(
            "weight_decay",
            0.0,
            Range::NotNegative,
            "factor of an L2 penalty (`weight_decay * weight` is added to the gradient)",
        ),
    ],
    flags: &[],
    learning_rate: 1.0,
    average: None,
    update: Rule::Elements(|u| {
        let (gradient, rho, eps) = (u.penalized_gradient(), u.setting("rho"), u.setting("eps"));
        let squares = u.average("square_average", rho, gradient * gradient);
        let step = (u.slot("step_average") + eps).sqrt() / (squares + eps).sqrt() * gradient;
        u.average("step_average", rho, step * step);
        u.parameter - u.rate * step
    }),
};
