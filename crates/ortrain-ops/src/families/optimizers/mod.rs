//! Table of optimizers, one row each.
//!
//! A row has a name, the slots for each parameter, the settings with defaults and ranges, and the formula of a step.
//! Everything else is derived from the row: the optimizer model in plain ONNX, checkpoints, Python's classes, the table
//! of `docs/optimizers.md`, and the tests. A step of the formula is one instruction over all parameters of an element
//! type.

mod adadelta;
mod adafactor;
mod adagrad;
mod adam;
mod adam_optimizer;
mod adamax;
mod adamw;
mod divided_step;
mod elementwise_steps;
pub mod formula;
mod function;
mod lamb;
mod lamb_optimizer;
mod lars;
mod lion;
mod map_tensors;
mod model;
mod muon;
mod nadam;
mod nodes;
mod radam;
mod rmsprop;
mod row;
mod schedule_free;
mod sequence_expansion;
mod sgd;
mod sgd_optimizer;
mod spec;
mod tensors;

pub use divided_step::{DividedModels, divided_models, sum_input};
pub use elementwise_steps::is_elementwise;
pub use function::OptimizerFunction;
pub(crate) use lamb_optimizer::LAMB_OPTIMIZER;
pub use map_tensors::{BoundInputs, bind, bind_with_slots, bound_inputs};
pub(crate) use map_tensors::{DOMAIN, definitions};
pub(crate) use model::description_entry;
pub use model::{optimizer_model, optimizer_model_of_function, optimizer_model_of_row, read_description};
pub(crate) use nodes::definitions as definitions_of_nodes;
pub use row::{
    Average, Flag, Optimizer, Range, Rule, Setting, Slot, SlotShape, Start, StepResult, Update, When,
};
pub use sequence_expansion::{SequenceTensor, expand_sequences};
pub(crate) use sgd_optimizer::SGD_OPTIMIZER;
pub use spec::{Group, OptimizerSpec, SlotSpec};

/// Optimizers of the table, by name.
pub const OPTIMIZERS: &[&Optimizer] = &[
    &adadelta::ADADELTA,
    &adafactor::ADAFACTOR,
    &adagrad::ADAGRAD,
    &adam::ADAM,
    &adamax::ADAMAX,
    &adamw::ADAMW,
    &lamb::LAMB,
    &lars::LARS,
    &lion::LION,
    &muon::MUON,
    &nadam::NADAM,
    &radam::RADAM,
    &rmsprop::RMSPROP,
    &schedule_free::SCHEDULE_FREE_ADAMW,
    &sgd::SGD,
];

/// Optimizers of `com.microsoft` that update one parameter with one node, by operator name.
pub const NODE_OPTIMIZERS: &[&Optimizer] =
    &[&adam_optimizer::ADAM_OPTIMIZER, &LAMB_OPTIMIZER, &SGD_OPTIMIZER];

impl Optimizer {
    /// Returns the row with this name.
    #[must_use]
    pub fn find(name: &str) -> Option<&'static Optimizer> {
        OPTIMIZERS.iter().chain(NODE_OPTIMIZERS).copied().find(|row| row.name == name)
    }
}

#[cfg(test)]
mod tests;
