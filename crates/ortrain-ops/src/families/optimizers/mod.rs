//! Optimizers: one row each.
//!
//! A row is a name, the slots that it keeps for each parameter, its settings with defaults and ranges, and the formula of
//! a step. Everything else follows from the row: the optimizer model in plain ONNX, checkpoints, Python's classes, the
//! table of `docs/optimizers.md`, and the tests. A step of the formula is one instruction over all parameters of an
//! element type.

mod adadelta;
mod adafactor;
mod adagrad;
mod adam;
mod adam_optimizer;
mod adamax;
mod adamw;
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
mod schedule_free;
mod sgd;
mod sgd_optimizer;
mod spec;
mod spread;
mod tensors;

use std::collections::BTreeMap;

use formula::Number;
use ortrain_graph::ValueId;
use tensors::Tensors;

pub use function::OptimizerFunction;
pub use map_tensors::{Bound, bind, bound_of, is_elementwise};
pub(crate) use map_tensors::{DOMAIN, definitions};
pub(crate) use model::described;
pub use model::{description, optimizer_model, optimizer_model_of_function, optimizer_model_of_row};
pub(crate) use nodes::definitions as definitions_of_nodes;
pub use spec::{Group, OptimizerSpec, SlotSpec};
pub use spread::{Member, spread};

/// Every optimizer of the table, by name.
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

/// The optimizers of `com.microsoft` that update one parameter with one node, by their operators' names.
pub const OPTIMIZERS_OF_NODES: &[&Optimizer] =
    &[&adam_optimizer::ADAM_OPTIMIZER, &lamb_optimizer::LAMB_OPTIMIZER, &sgd_optimizer::SGD_OPTIMIZER];

/// A row of the table: one optimizer.
pub struct Optimizer {
    /// The name, as in Python.
    pub name: &'static str,
    /// The optimizer in a few words.
    pub summary: &'static str,
    /// The paper or the class that the formula is of.
    pub source: &'static str,
    /// Numbers that it keeps between steps.
    pub slots: &'static [Slot],
    /// Settings, which each group of parameters may have otherwise. The learning rate is not among them.
    pub settings: &'static [Setting],
    /// Choices that the formula is written for, with their defaults.
    pub flags: &'static [Flag],
    /// The learning rate where none is given.
    pub learning_rate: f64,
    /// The average of the weights that the optimizer trains for, element by element, if it is another one than they are.
    pub average: Option<Average>,
    /// The formula of a step.
    pub update: Rule,
}

/// The new parameter, and the new slots by name.
pub type Stepped = (ValueId, Vec<(String, ValueId)>);

/// The formula of a step of one parameter.
#[derive(Clone, Copy)]
pub enum Rule {
    /// Of each element, perhaps with sums over the parameter: the new parameter, from the old one; slots are kept by
    /// [`Update::keep`].
    Elements(for<'a> fn(&mut Update<'a>) -> Number<'a>),
    /// Of whole tensors.
    Tensors {
        /// Numbers of the step by name.
        numbers: for<'a> fn(&Update<'a>) -> Vec<(&'static str, Number<'a>)>,
        /// The new parameter, and the new slots by name.
        step: fn(&mut Tensors<'_>) -> Stepped,
    },
}

/// An element of averaged weights, from the element of the parameter, of slots, and settings.
pub type Average = fn(parameter: f64, slot: &dyn Fn(&str) -> f64, setting: &dyn Fn(&str) -> f64) -> f64;

impl Optimizer {
    /// The row of a name.
    #[must_use]
    pub fn find(name: &str) -> Option<&'static Optimizer> {
        OPTIMIZERS.iter().chain(OPTIMIZERS_OF_NODES).copied().find(|row| row.name == name)
    }
}

/// A slot: a value that an optimizer keeps for each parameter between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The name, also in checkpoints.
    pub name: &'static str,
    /// Its shape, from that of the parameter.
    pub shape: SlotShape,
    /// Its value before the first step.
    pub start: Start,
    /// The condition of its being there.
    pub when: When,
}

/// The shape of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotShape {
    /// The shape of the parameter.
    Same,
    /// One number for the whole parameter.
    Scalar,
    /// One number for each row of a matrix (or of several along first axes); none for a vector.
    Rows,
    /// One number for each column of a matrix; none for a vector.
    Columns,
    /// The shape of the parameter, if it has one axis or none; nothing for a matrix.
    Vectors,
    /// The shape of the parameter, except for matrices of groups whose setting `adamw` is 0: nothing.
    ByAdamW,
}

impl SlotShape {
    const ALL: [(SlotShape, &'static str); 6] = [
        (SlotShape::Same, "same"),
        (SlotShape::Scalar, "scalar"),
        (SlotShape::Rows, "rows"),
        (SlotShape::Columns, "columns"),
        (SlotShape::Vectors, "vectors"),
        (SlotShape::ByAdamW, "by_adamw"),
    ];

    /// Its name in files.
    #[must_use]
    pub fn name(self) -> &'static str {
        SlotShape::ALL.iter().find(|(shape, _)| *shape == self).map_or("", |(_, name)| name)
    }

    /// By its name.
    #[must_use]
    pub fn of(name: &str) -> Option<SlotShape> {
        SlotShape::ALL.iter().find(|(_, known)| *known == name).map(|&(shape, _)| shape)
    }

    /// The shape of the slot of a parameter of this shape, whose group has these settings.
    #[must_use]
    pub fn dims(self, parameter: &[usize], setting: &dyn Fn(&str) -> Option<f64>) -> Vec<usize> {
        let rank = parameter.len();
        let with_one = |axis: usize| {
            let mut dims = parameter.to_vec();
            dims[axis] = 1;
            dims
        };
        match self {
            SlotShape::Scalar => Vec::new(),
            SlotShape::Rows | SlotShape::Columns if rank < 2 => vec![0],
            SlotShape::Rows => with_one(rank - 1),
            SlotShape::Columns => with_one(rank - 2),
            SlotShape::Vectors if rank > 1 => vec![0],
            SlotShape::ByAdamW if rank == 2 && setting(spec::ADAMW).unwrap_or(0.0) == 0.0 => vec![0],
            SlotShape::Same | SlotShape::Vectors | SlotShape::ByAdamW => parameter.to_vec(),
        }
    }
}

/// The value of a slot before the first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Zeros.
    Zero,
    /// Ones.
    One,
    /// The parameter as it is when the optimizer is made.
    Parameter,
    /// A setting of the parameter's group.
    Setting(&'static str),
}

/// The condition under which an optimizer has a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Always.
    Always,
    /// If this flag is set.
    Flag(&'static str),
    /// If some group has another number than zero as this setting.
    Nonzero(&'static str),
}

/// A slot that is always there, has the shape of the parameter, and starts at zero.
const fn slot(name: &'static str) -> Slot {
    Slot { name, shape: SlotShape::Same, start: Start::Zero, when: When::Always }
}

impl Slot {
    const fn scalar(mut self) -> Slot {
        self.shape = SlotShape::Scalar;
        self
    }

    const fn shaped(mut self, shape: SlotShape) -> Slot {
        self.shape = shape;
        self
    }

    const fn starts(mut self, start: Start) -> Slot {
        self.start = start;
        self
    }

    const fn when(mut self, when: When) -> Slot {
        self.when = when;
        self
    }
}

/// A setting of an optimizer: a number.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setting {
    /// The name.
    pub name: &'static str,
    /// Its value where none is given.
    pub default: f64,
    /// The values that make sense.
    pub range: Range,
    /// Its meaning in a few words.
    pub meaning: &'static str,
}

/// A choice that a formula is written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flag {
    /// The name.
    pub name: &'static str,
    /// Its value where none is given.
    pub default: bool,
    /// Its meaning in a few words, if it is set.
    pub meaning: &'static str,
}

/// The values that a setting may have; all are finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Range {
    /// From 0 to below 1: the decay rate of an average.
    BelowOne,
    /// Between 0 and 1, neither of them.
    Inside,
    /// 0 or more.
    NotNegative,
    /// More than 0.
    Positive,
    /// Any number.
    Finite,
}

/// True for a number that is finite in float32, and for the largest of float64, which stands for no bound.
pub(super) fn is_finite_f32(value: f64) -> bool {
    (value as f32).is_finite() || value.abs() == f64::MAX
}

impl Range {
    /// True if a number is in the range and is a float32, the type of settings in models and states.
    #[must_use]
    pub fn contains(self, value: f64) -> bool {
        is_finite_f32(value)
            && match self {
                Range::BelowOne => (0.0..1.0).contains(&value),
                Range::Inside => value > 0.0 && value < 1.0,
                Range::NotNegative => value >= 0.0,
                Range::Positive => value > 0.0,
                Range::Finite => true,
            }
    }

    /// Its values in words.
    #[must_use]
    pub fn describe(self) -> &'static str {
        match self {
            Range::BelowOne => "a number from 0 to below 1",
            Range::Inside => "a number between 0 and 1",
            Range::NotNegative => "a finite number that is not negative",
            Range::Positive => "a finite number above 0",
            Range::Finite => "a finite number",
        }
    }
}

const fn setting(name: &'static str, default: f64, range: Range, meaning: &'static str) -> Setting {
    Setting { name, default, range, meaning }
}

const fn flag(name: &'static str, default: bool, meaning: &'static str) -> Flag {
    Flag { name, default, meaning }
}

/// The decay rates of the two moments of Adam.
const BETAS: [Setting; 2] = [
    setting("beta1", 0.9, Range::BelowOne, "decay rate of the average of gradients"),
    setting("beta2", 0.999, Range::BelowOne, "decay rate of the average of squared gradients"),
];

/// One step of one parameter while its formula is written.
pub struct Update<'a> {
    /// The parameter before the step.
    pub parameter: Number<'a>,
    /// Its gradient, clipped where that is asked for.
    pub gradient: Number<'a>,
    /// The learning rate of the parameter.
    pub rate: Number<'a>,
    /// The number of the step, from 1 on.
    pub step: Number<'a>,
    settings: BTreeMap<String, Number<'a>>,
    flags: BTreeMap<&'static str, bool>,
    slots: BTreeMap<String, Number<'a>>,
    kept: BTreeMap<String, Number<'a>>,
}

impl<'a> Update<'a> {
    /// A setting of the parameter's group.
    ///
    /// # Panics
    /// When the row has no such setting.
    #[must_use]
    pub fn setting(&self, name: &str) -> Number<'a> {
        self.settings[name]
    }

    /// A choice.
    ///
    /// # Panics
    /// When the row has no such flag.
    #[must_use]
    pub fn flag(&self, name: &str) -> bool {
        self.flags[name]
    }

    /// The value of a slot before the step, where the optimizer has it.
    #[must_use]
    pub fn slot_if_any(&self, name: &str) -> Option<Number<'a>> {
        self.slots.get(name).copied()
    }

    /// The value of a slot before the step.
    ///
    /// # Panics
    /// When the optimizer does not have it.
    #[must_use]
    pub fn slot(&self, name: &str) -> Number<'a> {
        self.slots[name]
    }

    /// Keeps the value of a slot for the next step, and returns it.
    ///
    /// # Panics
    /// When the optimizer does not have it.
    pub fn keep(&mut self, name: &str, value: Number<'a>) -> Number<'a> {
        assert!(self.slots.contains_key(name), "a row keeps its own slots");
        self.kept.insert(name.to_owned(), value);
        value
    }

    /// Keeps a moving average: `factor * slot + (1 - factor) * new`.
    pub fn average(&mut self, slot: &str, factor: Number<'a>, new: Number<'a>) -> Number<'a> {
        let value = self.slot(slot).blend(factor, new);
        self.keep(slot, value)
    }

    /// A constant.
    #[must_use]
    pub fn number(&self, value: f64) -> Number<'a> {
        self.step.like(value)
    }

    /// `1 - factor^step`: what an average that started at zero is divided by.
    #[must_use]
    pub fn correction(&self, factor: Number<'a>) -> Number<'a> {
        1.0 - factor.pow(self.step)
    }

    /// The gradient with the weight decay of an L2 penalty, `gradient + weight_decay * parameter`.
    #[must_use]
    pub fn penalized_gradient(&self) -> Number<'a> {
        self.gradient + self.setting("weight_decay") * self.parameter
    }

    /// The part of the parameter that weight decay apart from the gradient takes, `rate * weight_decay * parameter`. It is
    /// added to the step, so that the parameter is rounded once.
    #[must_use]
    pub fn decay(&self) -> Number<'a> {
        self.rate * self.setting("weight_decay") * self.parameter
    }
}

#[cfg(test)]
mod tests;
