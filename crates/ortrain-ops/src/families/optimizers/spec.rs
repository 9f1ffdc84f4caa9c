//! Description of an optimizer: its name, its settings, and groups of parameters with other settings.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::OpError;
use crate::families::optimizers::row::{ADAMW, Optimizer, Slot, SlotShape, Start, When, is_finite_f32};

/// Optimizer with its settings. Optimizer models and checkpoints store it as text ([`OptimizerSpec::to_text`]).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OptimizerSpec {
    /// Name of a row of the table, or of a user-defined optimizer.
    pub optimizer: String,
    /// Learning rate of the first step, unless the caller sets another.
    pub learning_rate: f64,
    /// Settings of the row, and of the options of every optimizer, by name.
    #[serde(default)]
    pub settings: BTreeMap<String, f64>,
    /// Flags by name.
    #[serde(default)]
    pub flags: BTreeMap<String, bool>,
    /// Maximum global norm of the gradients. Gradients with a larger norm are scaled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_norm: Option<f64>,
    /// True if gradients are divided by the number of training steps that they were accumulated over.
    #[serde(default)]
    pub mean_of_gathered: bool,
    /// True if the gradients belong to a scaled loss. Each step gets the scale as an input, and changes nothing if the
    /// gradient norm is not finite.
    #[serde(default, skip_serializing_if = "is_false")]
    pub loss_scale: bool,
    /// True if a step returns the global norm of the gradients even without clipping by this norm.
    #[serde(default, skip_serializing_if = "is_false")]
    pub tells_norm: bool,
    /// Slots of the optimizer.
    #[serde(default)]
    pub slots: Vec<SlotSpec>,
    /// Groups of parameters with their own settings. Parameters without a group have the settings above.
    #[serde(default)]
    pub groups: Vec<Group>,
    /// Number of steps that did not change the parameters without a group so far.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skipped_steps: i64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
fn is_false(flag: &bool) -> bool {
    !flag
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
fn is_zero(count: &i64) -> bool {
    *count == 0
}

/// Group of parameters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// Names of the parameters.
    pub parameters: Vec<String>,
    /// Learning rate that a schedule scales, independent of the optimizer's learning rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lr: Option<f64>,
    /// Factor of the optimizer's learning rate, for a group without its own learning rate.
    #[serde(default = "default_factor")]
    pub lr_factor: f64,
    /// Last optimizer step in which the group is frozen; 0 if the group is trained from the start.
    #[serde(default)]
    pub frozen_steps: i64,
    /// Number of steps that did not change the group so far. The group's own step count excludes them.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skipped_steps: i64,
    /// Settings that differ from the optimizer's.
    #[serde(default)]
    pub settings: BTreeMap<String, f64>,
}

/// Learning rate of an optimizer without a default.
const DEFAULT_LEARNING_RATE: f32 = 0.001;

fn default_factor() -> f64 {
    1.0
}

impl Default for Group {
    fn default() -> Group {
        Group {
            parameters: Vec::new(),
            lr: None,
            lr_factor: 1.0,
            frozen_steps: 0,
            skipped_steps: 0,
            settings: BTreeMap::new(),
        }
    }
}

/// Slot as an optimizer model declares it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlotSpec {
    /// Name of the input of the optimizer model; also the name in checkpoints.
    pub name: String,
    /// Shape, as a name of [`SlotShape::name`].
    #[serde(default = "same")]
    pub shape: String,
    /// Value before the first step: `"zero"`, `"one"`, `"parameter"`, or the name of a setting.
    #[serde(default = "zero")]
    pub start: String,
}

fn same() -> String {
    SlotShape::Same.name().into()
}

fn zero() -> String {
    "zero".into()
}

impl SlotSpec {
    fn of(slot: &Slot) -> SlotSpec {
        let start = match slot.start {
            Start::Zero => "zero",
            Start::One => "one",
            Start::Parameter => "parameter",
            Start::Setting(name) => name,
        };
        SlotSpec { name: slot.name.into(), shape: slot.shape.name().into(), start: start.into() }
    }

    /// Creates a slot with the shape of the parameter and the start value zero.
    #[must_use]
    pub fn new(name: &str) -> SlotSpec {
        SlotSpec { name: name.into(), shape: same(), start: zero() }
    }
}

/// Slot with the exponential moving average of the weights.
pub(super) const EMA: &str = "ema";
/// Setting with the decay rate of the moving average.
pub(super) const EMA_DECAY: &str = "ema_decay";
/// Setting with the maximum absolute value of a gradient element.
pub(super) const MAX_VALUE: &str = "max_value";
/// Setting with the maximum norm of the gradient of one parameter.
pub(super) const MAX_NORM_PER_TENSOR: &str = "max_norm_per_tensor";
/// Setting with the maximum global norm of the gradients, for the parameters of a group.
pub(super) const MAX_NORM_CLIP: &str = "max_norm_clip";

/// Settings of the options that every optimizer has, with their valid values.
pub(super) const OPTIONS: [(&str, super::Range); 4] = [
    (MAX_NORM_CLIP, super::Range::Positive),
    (EMA_DECAY, super::Range::BelowOne),
    (MAX_VALUE, super::Range::Positive),
    (MAX_NORM_PER_TENSOR, super::Range::Positive),
];

/// Formats a number for a message, with an exponent if it has many digits.
fn format_number(value: f64) -> String {
    if value.is_finite() && value.abs() >= 1e16 { format!("{value:e}") } else { value.to_string() }
}

/// Returns the suffix of a message about a number that overflows float32.
fn float32_suffix(value: f64) -> &'static str {
    if value.is_finite() && !is_finite_f32(value) { " in float32" } else { "" }
}

impl OptimizerSpec {
    /// Creates the description of a row of the table, with its defaults.
    ///
    /// # Errors
    /// Returns an error if the table has no row with this name.
    pub fn new(name: &str) -> Result<OptimizerSpec, OpError> {
        find_row(name).map(OptimizerSpec::of_row)
    }

    /// Creates the description of a row, of the table or user-defined, with its defaults.
    #[must_use]
    pub fn of_row(row: &Optimizer) -> OptimizerSpec {
        let mut spec = OptimizerSpec {
            optimizer: row.name.into(),
            learning_rate: row.learning_rate,
            settings: row.settings.iter().map(|setting| (setting.name.into(), setting.default)).collect(),
            flags: row.flags.iter().map(|flag| (flag.name.into(), flag.default)).collect(),
            max_norm: None,
            mean_of_gathered: false,
            loss_scale: false,
            tells_norm: false,
            slots: Vec::new(),
            groups: Vec::new(),
            skipped_steps: 0,
        };
        spec.choose_slots(row);
        spec
    }

    /// Sets the slots of a user-defined optimizer, and adds the slot of the moving average if the option is set.
    pub(super) fn with_slots(mut self, slots: Vec<SlotSpec>) -> OptimizerSpec {
        self.slots = slots;
        self.add_average();
        self
    }

    fn add_average(&mut self) {
        if self.settings.contains_key(EMA_DECAY) {
            self.slots.push(SlotSpec { start: "parameter".into(), ..SlotSpec::new(EMA) });
        }
    }

    /// Creates the description of an optimizer without a row and without settings.
    #[must_use]
    pub fn of_model(name: &str, slots: Vec<SlotSpec>) -> OptimizerSpec {
        OptimizerSpec {
            optimizer: name.into(),
            learning_rate: f64::from(DEFAULT_LEARNING_RATE),
            settings: BTreeMap::new(),
            flags: BTreeMap::new(),
            max_norm: None,
            mean_of_gathered: false,
            loss_scale: false,
            tells_norm: false,
            slots,
            groups: Vec::new(),
            skipped_steps: 0,
        }
    }

    /// Sets the slots that the settings and flags require.
    fn choose_slots(&mut self, row: &Optimizer) {
        let needed = |slot: &&Slot| match slot.when {
            When::Always => true,
            When::Flag(name) => self.flags.get(name).copied().unwrap_or(false),
            When::Nonzero(name) => self.setting_values(name).any(|value| value != 0.0),
        };
        let slots: Vec<SlotSpec> = row.slots.iter().filter(needed).map(SlotSpec::of).collect();
        self.slots = slots;
        self.add_average();
    }

    /// Returns the values of a setting in the optimizer and in its groups.
    fn setting_values<'a>(&'a self, name: &'a str) -> impl Iterator<Item = f64> + 'a {
        let default_value = self.settings.get(name);
        default_value
            .into_iter()
            .chain(self.groups.iter().filter_map(move |group| group.settings.get(name)))
            .copied()
    }

    /// Checks the settings, sets the defaults of missing settings, and sets the slots.
    ///
    /// # Errors
    /// Returns an error if a setting is unknown or has an invalid value, or a parameter is in two groups.
    pub fn complete(self) -> Result<OptimizerSpec, OpError> {
        let row = find_row(&self.optimizer)?;
        self.complete_for(row)
    }

    /// Does the same as [`OptimizerSpec::complete`], for a row that may be user-defined.
    ///
    /// # Errors
    /// The same as [`OptimizerSpec::complete`].
    pub fn complete_for(mut self, row: &Optimizer) -> Result<OptimizerSpec, OpError> {
        for setting in row.settings {
            self.settings.entry(setting.name.into()).or_insert(setting.default);
        }
        for flag in row.flags {
            self.flags.entry(flag.name.into()).or_insert(flag.default);
        }
        self.check_for(Some(row))?;
        self.choose_slots(row);
        Ok(self)
    }

    /// Does the same as [`OptimizerSpec::complete`], and copies all settings into every group. A later change of the
    /// optimizer's settings then only affects parameters without a group.
    ///
    /// # Errors
    /// The same as [`OptimizerSpec::complete`].
    pub fn with_explicit_groups(self) -> Result<OptimizerSpec, OpError> {
        Ok(self.complete()?.with_group_settings())
    }

    /// Copies the optimizer's settings into every group that does not set them.
    pub(super) fn with_group_settings(mut self) -> OptimizerSpec {
        for group in &mut self.groups {
            for (name, &value) in &self.settings {
                group.settings.entry(name.clone()).or_insert(value);
            }
        }
        self
    }

    /// Checks names and values of all settings.
    ///
    /// # Errors
    /// The same as [`OptimizerSpec::complete`].
    pub fn check(&self) -> Result<(), OpError> {
        self.check_for(Optimizer::find(&self.optimizer))
    }

    fn check_for(&self, row: Option<&Optimizer>) -> Result<(), OpError> {
        let rate = |label: &str, value: f64| {
            let good = is_finite_f32(value) && value >= 0.0;
            let text = || {
                format!(
                    "{label} must be finite and at least 0{1}, got {0}",
                    format_number(value),
                    float32_suffix(value)
                )
            };
            if good { Ok(()) } else { Err(OpError::invalid(text())) }
        };
        rate("the learning rate", self.learning_rate)?;
        if let Some(norm) = self.max_norm.filter(|&norm| !(is_finite_f32(norm) && norm > 0.0)) {
            let (norm, kind) = (format_number(norm), float32_suffix(norm));
            return Err(OpError::invalid(format!(
                "max_norm must be a finite number above 0{kind}, got {norm}"
            )));
        }
        for name in self.flags.keys() {
            if row.is_some_and(|row| !row.flags.iter().any(|flag| flag.name == name)) {
                return Err(OpError::invalid(format!("{} has no flag {name:?}", self.optimizer)));
            }
        }
        self.check_settings(row, &self.settings, "")?;
        let mut owners: BTreeMap<&str, usize> = BTreeMap::new();
        for (k, group) in self.groups.iter().enumerate() {
            let suffix = format!(" of group {k}");
            self.check_settings(row, &group.settings, &suffix)?;
            rate(&format!("lr_factor{suffix}"), group.lr_factor)?;
            for (name, steps) in
                [("frozen_steps", group.frozen_steps), ("skipped_steps", group.skipped_steps)]
            {
                if steps < 0 {
                    return Err(OpError::invalid(format!("{name}{suffix} must be at least 0, got {steps}")));
                }
            }
            group.lr.map_or(Ok(()), |lr| rate(&format!("lr{suffix}"), lr))?;
            for name in &group.parameters {
                if let Some(first) = owners.insert(name, k) {
                    return Err(OpError::invalid(format!(
                        "parameter {name:?} is in groups {first} and {k}, but a parameter can be in one group only"
                    )));
                }
            }
        }
        Ok(())
    }

    fn check_settings(
        &self,
        row: Option<&Optimizer>,
        settings: &BTreeMap<String, f64>,
        suffix: &str,
    ) -> Result<(), OpError> {
        let option = |name: &str| OPTIONS.iter().find(|(known, _)| *known == name).map(|&(_, range)| range);
        for (name, &value) in settings {
            let range = match row {
                Some(row) => {
                    row.settings.iter().find(|setting| setting.name == name).map(|setting| setting.range)
                }
                // A user-defined optimizer only has the settings that the description sets for the optimizer.
                None => self.settings.contains_key(name).then_some(super::Range::Finite),
            };
            // An option that only a group sets would have no value for the other parameters.
            let option = option(name).filter(|_| self.settings.contains_key(name));
            let Some(range) = option.or(range) else {
                let known: Vec<&str> = match row {
                    Some(row) => row.settings.iter().map(|setting| setting.name).collect(),
                    None => self.settings.keys().map(String::as_str).collect(),
                };
                return Err(OpError::invalid(format!(
                    "{} has no setting {name:?}{suffix}; its settings are {}",
                    self.optimizer,
                    known.join(", ")
                )));
            };
            if !range.contains(value) {
                let (value, needed, kind) = (format_number(value), range.describe(), float32_suffix(value));
                return Err(OpError::invalid(format!("{name}{suffix} must be {needed}{kind}, got {value}")));
            }
        }
        Ok(())
    }

    /// Returns the averaged weights of a parameter in a group, from its values and its slots. `None` if the optimizer
    /// has no average.
    #[must_use]
    pub fn averaged_parameter(
        &self,
        group: Option<usize>,
        parameter: &[f64],
        slot: &dyn Fn(&str) -> Option<Vec<f64>>,
    ) -> Option<Vec<f64>> {
        if let Some(average) = slot(EMA) {
            return Some(average);
        }
        let row = Optimizer::find(&self.optimizer)?;
        let average = row.average?;
        let slots: BTreeMap<&str, Vec<f64>> =
            row.slots.iter().filter_map(|known| Some((known.name, slot(known.name)?))).collect();
        let setting = |name: &str| self.setting_of(group, name).unwrap_or(f64::NAN);
        let element = |(k, &value): (usize, &f64)| {
            // A slot with one number for the whole parameter has this number for each element.
            let slot = |name: &str| slots.get(name).and_then(|slot| slot.get(k).or(slot.first()).copied());
            average(value, &|name| slot(name).unwrap_or(f64::NAN), &setting)
        };
        Some(parameter.iter().enumerate().map(element).collect())
    }

    /// Returns the group of a parameter; `None` for a parameter without a group.
    #[must_use]
    pub fn group_of(&self, parameter: &str) -> Option<usize> {
        self.groups.iter().position(|group| group.parameters.iter().any(|name| name == parameter))
    }

    /// Returns true if the settings that determine slot shapes are equal in another description.
    #[must_use]
    pub fn has_same_slot_shapes(&self, other: &OptimizerSpec) -> bool {
        let by_adamw =
            self.slots.iter().any(|slot| SlotShape::from_name(&slot.shape) == Some(SlotShape::ByAdamW));
        let of = |spec: &OptimizerSpec| {
            let groups = (0..spec.groups.len()).map(Some).chain([None]);
            groups.map(|group| spec.setting_of(group, ADAMW)).collect::<Vec<_>>()
        };
        !by_adamw || of(self) == of(other)
    }

    /// Returns a setting of a group, or of the parameters without a group.
    #[must_use]
    pub fn setting_of(&self, group: Option<usize>, setting: &str) -> Option<f64> {
        let of_group = group.and_then(|group| self.groups.get(group)?.settings.get(setting));
        of_group.or_else(|| self.settings.get(setting)).copied()
    }

    /// Returns the names of settings that may differ between parameters, in the order of the optimizer model's inputs.
    #[must_use]
    pub fn columns(&self) -> Vec<&str> {
        let names = self.settings.keys().map(String::as_str);
        ["lr", "lr_factor", "skipped_steps"].into_iter().chain(names).collect()
    }

    /// Returns true if a step needs the global norm of the gradients.
    #[must_use]
    pub fn needs_norm(&self) -> bool {
        let is_returned = self.tells_norm || self.loss_scale;
        is_returned || self.max_norm.is_some() || self.settings.contains_key(MAX_NORM_CLIP)
    }

    /// Formats the description as JSON.
    ///
    /// # Panics
    /// Never: every field can be serialized.
    #[must_use]
    pub fn to_text(&self) -> String {
        serde_json::to_string(self).expect("every field can be serialized")
    }

    /// Parses the description from text.
    ///
    /// # Errors
    /// Returns an error if the text has another form than [`OptimizerSpec::to_text`] writes.
    pub fn from_text(text: &str) -> Result<OptimizerSpec, OpError> {
        serde_json::from_str(text).map_err(|source| {
            OpError::invalid(format!("the description of the optimizer is damaged: {source}"))
        })
    }
}

fn find_row(name: &str) -> Result<&'static Optimizer, OpError> {
    Optimizer::find(name).ok_or_else(|| {
        let known: Vec<&str> = super::OPTIMIZERS.iter().map(|row| row.name).collect();
        OpError::invalid(format!("unknown optimizer {name:?}; the optimizers are {}", known.join(", ")))
    })
}
