//! Adadelta: steps in the unit of the weights.

use super::{Optimizer, Range, setting, slot};

pub(super) const ADADELTA: Optimizer = Optimizer {
    name: "Adadelta",
    source: "Zeiler, ADADELTA: An Adaptive Learning Rate Method, 2012; torch.optim.Adadelta",
    slots: &[slot("square_average"), slot("step_average")],
    settings: &[
        setting("rho", 0.9, Range::BelowOne),
        setting("eps", 1e-6, Range::NotNegative),
        setting("weight_decay", 0.0, Range::NotNegative),
    ],
    flags: &[],
    learning_rate: 1.0,
    update: |u| {
        let (gradient, rho, eps) = (u.penalized_gradient(), u.setting("rho"), u.setting("eps"));
        let squares = u.average("square_average", rho, gradient * gradient);
        let step = (u.slot("step_average") + eps).sqrt() / (squares + eps).sqrt() * gradient;
        u.average("step_average", rho, step * step);
        u.parameter - u.rate * step
    },
};
