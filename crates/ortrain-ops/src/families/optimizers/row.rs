//! Row of the table of optimizers: slots, settings and the formula of a step.

use std::collections::BTreeMap;

use ortrain_graph::ValueId;

use super::formula::Number;
use super::tensors::TensorBuilder;

/// Row of the table: one optimizer.
pub struct Optimizer {
    /// Name, as in Python.
    pub name: &'static str,
    /// Short description of the optimizer.
    pub summary: &'static str,
    /// Paper or class with the formula.
    pub source: &'static str,
    /// State of each parameter between steps.
    pub slots: &'static [Slot],
    /// Settings that each group of parameters can override. The learning rate is not among them.
    pub settings: &'static [Setting],
    /// Variants of the formula, with their defaults.
    pub flags: &'static [Flag],
    /// Default learning rate.
    pub learning_rate: f64,
    /// Function of the averaged weights, element by element, if the result of training is an average and not the
    /// weights.
    pub average: Option<Average>,
    /// Formula of a step.
    pub update: Rule,
}

/// New parameter, and new slots by name.
pub type StepResult = (ValueId, Vec<(String, ValueId)>);

/// Formula of a step of one parameter.
#[derive(Clone, Copy)]
pub enum Rule {
    /// Element-wise formula, with optional sums over the parameter. Returns the new parameter, and stores new slot
    /// values in the [`Update`].
    Elements(for<'a> fn(&mut Update<'a>) -> Number<'a>),
    /// Formula over whole tensors.
    Tensors {
        /// Scalars of the step by name.
        numbers: for<'a> fn(&Update<'a>) -> Vec<(&'static str, Number<'a>)>,
        /// Function that returns the new parameter, and the new slots by name.
        step: fn(&mut TensorBuilder<'_>) -> StepResult,
    },
}

/// Function that computes an element of averaged weights from the element of the parameter, slots and settings.
pub type Average = fn(parameter: f64, slot: &dyn Fn(&str) -> f64, setting: &dyn Fn(&str) -> f64) -> f64;

/// Slot: state that an optimizer stores for each parameter between steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Name, also in checkpoints.
    pub name: &'static str,
    /// Shape, derived from the shape of the parameter.
    pub shape: SlotShape,
    /// Value before the first step.
    pub start: Start,
    /// Condition under which the optimizer has the slot.
    pub when: When,
}

/// Shape of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotShape {
    /// Shape of the parameter.
    Same,
    /// One number for the whole parameter.
    Scalar,
    /// One number for each row of a matrix, or of each matrix in a batch. Empty for a vector.
    Rows,
    /// One number for each column of a matrix. Empty for a vector.
    Columns,
    /// Shape of the parameter if it has one axis or none. Empty for a matrix.
    Vectors,
    /// Shape of the parameter. Empty for matrices in groups with `adamw` 0.
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

    /// Returns the name in files.
    #[must_use]
    pub fn name(self) -> &'static str {
        SlotShape::ALL.iter().find(|(shape, _)| *shape == self).map_or("", |(_, name)| name)
    }

    /// Returns the shape with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<SlotShape> {
        SlotShape::ALL.iter().find(|(_, known)| *known == name).map(|&(shape, _)| shape)
    }

    /// Returns the dimensions of the slot for a parameter with these dimensions, and the settings of its group.
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
            SlotShape::ByAdamW if rank == 2 && setting(ADAMW).unwrap_or(0.0) == 0.0 => vec![0],
            SlotShape::Same | SlotShape::Vectors | SlotShape::ByAdamW => parameter.to_vec(),
        }
    }
}

/// Value of a slot before the first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Zeros.
    Zero,
    /// Ones.
    One,
    /// Copy of the parameter at the creation of the optimizer state.
    Parameter,
    /// Value of a setting of the parameter's group.
    Setting(&'static str),
}

/// Condition under which an optimizer has a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Always.
    Always,
    /// If this flag is set.
    Flag(&'static str),
    /// If this setting is not zero in at least one group.
    Nonzero(&'static str),
}

/// Creates an unconditional slot with the shape of the parameter and the start value zero.
pub(super) const fn slot(name: &'static str) -> Slot {
    Slot { name, shape: SlotShape::Same, start: Start::Zero, when: When::Always }
}

impl Slot {
    pub(super) const fn scalar(mut self) -> Slot {
        self.shape = SlotShape::Scalar;
        self
    }

    pub(super) const fn with_shape(mut self, shape: SlotShape) -> Slot {
        self.shape = shape;
        self
    }

    pub(super) const fn with_start(mut self, start: Start) -> Slot {
        self.start = start;
        self
    }

    pub(super) const fn with_condition(mut self, when: When) -> Slot {
        self.when = when;
        self
    }
}

/// Numeric setting of an optimizer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setting {
    /// Name.
    pub name: &'static str,
    /// Default value.
    pub default: f64,
    /// Valid values.
    pub range: Range,
    /// Short description.
    pub meaning: &'static str,
}

/// Variant of a formula.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flag {
    /// Name.
    pub name: &'static str,
    /// Default value.
    pub default: bool,
    /// Short description of the variant with the flag set.
    pub meaning: &'static str,
}

/// Valid values of a setting. All are finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Range {
    /// From 0 to below 1: the decay rate of an average.
    BelowOne,
    /// Between 0 and 1, both excluded.
    Inside,
    /// 0 or more.
    NotNegative,
    /// More than 0.
    Positive,
    /// Any number.
    Finite,
}

/// Returns true for a number that is finite in float32, and for the largest of float64, which means no bound.
pub(super) fn is_finite_f32(value: f64) -> bool {
    (value as f32).is_finite() || value.abs() == f64::MAX
}

impl Range {
    /// Returns true if a number is in the range and finite in float32, the type of settings in models and states.
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

    /// Returns a description of the valid values.
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

pub(super) const fn setting(
    name: &'static str,
    default: f64,
    range: Range,
    meaning: &'static str,
) -> Setting {
    Setting { name, default, range, meaning }
}

pub(super) const fn flag(name: &'static str, default: bool, meaning: &'static str) -> Flag {
    Flag { name, default, meaning }
}

/// Decay rates of the two moments of Adam.
pub(super) const BETAS: [Setting; 2] = [
    setting("beta1", 0.9, Range::BelowOne, "decay rate of the average of gradients"),
    setting("beta2", 0.999, Range::BelowOne, "decay rate of the average of squared gradients"),
];

/// Step of one parameter while its formula is built.
pub struct Update<'a> {
    /// Parameter before the step.
    pub parameter: Number<'a>,
    /// Gradient of the parameter, after clipping.
    pub gradient: Number<'a>,
    /// Learning rate of the parameter.
    pub rate: Number<'a>,
    /// Step count, from 1 on.
    pub step: Number<'a>,
    pub(super) settings: BTreeMap<String, Number<'a>>,
    pub(super) flags: BTreeMap<&'static str, bool>,
    pub(super) slots: BTreeMap<String, Number<'a>>,
    pub(super) new_slots: BTreeMap<String, Number<'a>>,
}

impl<'a> Update<'a> {
    /// Returns a setting of the parameter's group.
    ///
    /// # Panics
    /// Panics if the row has no setting with this name.
    #[must_use]
    pub fn setting(&self, name: &str) -> Number<'a> {
        self.settings[name]
    }

    /// Returns the value of a flag.
    ///
    /// # Panics
    /// Panics if the row has no flag with this name.
    #[must_use]
    pub fn flag(&self, name: &str) -> bool {
        self.flags[name]
    }

    /// Returns the value of a slot before the step, if the optimizer has the slot.
    #[must_use]
    pub fn optional_slot(&self, name: &str) -> Option<Number<'a>> {
        self.slots.get(name).copied()
    }

    /// Returns the value of a slot before the step.
    ///
    /// # Panics
    /// Panics if the optimizer does not have the slot.
    #[must_use]
    pub fn slot(&self, name: &str) -> Number<'a> {
        self.slots[name]
    }

    /// Stores the new value of a slot, and returns it.
    ///
    /// # Panics
    /// Panics if the optimizer does not have the slot.
    pub fn store_slot(&mut self, name: &str, value: Number<'a>) -> Number<'a> {
        assert!(self.slots.contains_key(name), "an optimizer stores only its own slots");
        self.new_slots.insert(name.to_owned(), value);
        value
    }

    /// Stores and returns a moving average of a slot: `factor * slot + (1 - factor) * new`.
    pub fn average(&mut self, slot: &str, factor: Number<'a>, new: Number<'a>) -> Number<'a> {
        let value = self.slot(slot).blend(factor, new);
        self.store_slot(slot, value)
    }

    /// Returns a constant.
    #[must_use]
    pub fn constant(&self, value: f64) -> Number<'a> {
        self.step.like(value)
    }

    /// Returns `1 - factor^step`, the bias correction of a moving average that started at zero.
    #[must_use]
    pub fn bias_correction(&self, factor: Number<'a>) -> Number<'a> {
        1.0 - factor.pow(self.step)
    }

    /// Returns the gradient with an L2 penalty, `gradient + weight_decay * parameter`.
    #[must_use]
    pub fn penalized_gradient(&self) -> Number<'a> {
        self.gradient + self.setting("weight_decay") * self.parameter
    }

    /// Returns the decoupled weight decay, `rate * weight_decay * parameter`. Formulas add it to the step, so that the
    /// parameter is rounded once.
    #[must_use]
    pub fn decay(&self) -> Number<'a> {
        self.rate * self.setting("weight_decay") * self.parameter
    }
}

/// Setting of groups with matrices that AdamW trains.
pub(super) const ADAMW: &str = "adamw";

/// Opset of optimizer models. The operators of formulas have the same meaning in all later versions of `ai.onnx`.
pub(super) const OPSET: i64 = 17;
