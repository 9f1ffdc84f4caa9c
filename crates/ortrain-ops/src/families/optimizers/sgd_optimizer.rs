//! `SGDOptimizer` of `com.microsoft`: plain gradient descent.

use crate::families::optimizers::row::{Optimizer, Rule};

pub(crate) const SGD_OPTIMIZER: Optimizer = Optimizer {
    name: "SGDOptimizer",
    summary: "plain gradient descent",
    source: "com.microsoft SGDOptimizer, version 1",
    slots: &[],
    settings: &[],
    flags: &[],
    learning_rate: 1e-3,
    average: None,
    update: Rule::Elements(|u| u.parameter - u.rate * u.gradient),
};
