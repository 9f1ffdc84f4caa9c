//! State of a training in one session, as dictionaries.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::ops::Range;

use ortrain_graph::{DType, Tensor};
use ortrain_ops::optimizers::Optimizer as Row;
use ortrain_ops::training::{find_node_optimizer, has_shared_counter};

use super::TrainingSession;
use crate::face::classic::names::{LOW_PRECISION_SUFFIX, SHARED_KEY, StatesByWeight};
use crate::state::OptimizerState;
use crate::suggest::hint;
use crate::{Error, Result};

/// Step counter that all weights share.
const SHARED_COUNTER: &str = "Step";
/// Step counter of one weight.
const WEIGHT_COUNTER: &str = "Update_Count";

/// A value of the state.
enum StateValue {
    Weight(String),
    /// Low-precision copy of a weight.
    Copy(String),
    Slot(String, &'static str),
    /// Counter of a weight; `None` for the shared one.
    Count(Option<String>),
}

impl TrainingSession {
    fn optimizer_row(&self) -> Option<&'static Row> {
        find_node_optimizer(self.optimizer.as_ref()?.optimizer().name())
    }

    /// Returns every value of the state by its name in [`TrainingSession::state`]. Of a divided optimizer state, these
    /// are the values of this rank.
    fn state_values(&self) -> BTreeMap<String, StateValue> {
        let mut values = self.state_values_of_all_ranks();
        values.retain(|_, value| match value {
            StateValue::Slot(weight, _) | StateValue::Count(Some(weight)) => {
                !self.checkpoint.owned_range(weight).is_empty()
            }
            _ => true,
        });
        values
    }

    /// Returns every value of the state on all ranks together, by its name.
    fn state_values_of_all_ranks(&self) -> BTreeMap<String, StateValue> {
        let mut entries = BTreeMap::new();
        let row = self.optimizer_row();
        for weight in &self.weights {
            entries.insert(weight.clone(), StateValue::Weight(weight.clone()));
            if self.low_precision.is_some() {
                entries.insert(format!("{weight}{LOW_PRECISION_SUFFIX}"), StateValue::Copy(weight.clone()));
            }
            let Some(row) = row else { continue };
            for slot in row.slots {
                entries
                    .insert(format!("{}_{weight}", slot.name), StateValue::Slot(weight.clone(), slot.name));
            }
            if !row.slots.is_empty() && !has_shared_counter(row.name) {
                entries.insert(format!("{WEIGHT_COUNTER}_{weight}"), StateValue::Count(Some(weight.clone())));
            }
        }
        if row.is_some_and(|row| has_shared_counter(row.name)) {
            entries.insert(SHARED_COUNTER.into(), StateValue::Count(None));
        }
        entries
    }

    /// Copies the weights, their optimizer state, and their low-precision copies, by name.
    ///
    /// # Errors
    /// If the state is damaged.
    pub fn state(&self) -> Result<BTreeMap<String, Tensor>> {
        self.state_values()
            .into_iter()
            .map(|(name, state_value)| Ok((name, self.value_of(&state_value)?)))
            .collect()
    }

    fn value_of(&self, value: &StateValue) -> Result<Tensor> {
        match value {
            StateValue::Weight(weight) => self.checkpoint.parameter(weight)?.to_tensor(),
            StateValue::Copy(weight) => {
                let narrow = self.low_precision.unwrap_or(DType::F16);
                Ok(self.checkpoint.parameter(weight)?.to_tensor()?.converted(narrow))
            }
            StateValue::Slot(weight, slot) => {
                let optimizer = self.optimizer_state()?;
                let entry =
                    self.checkpoint.entry(weight).ok_or_else(|| self.checkpoint.unknown_parameter(weight))?;
                let slot_value = optimizer.slots.get(slot).map(|slot| slot.tensor(entry)).transpose()?;
                slot_value.flatten().ok_or(Error::OtherState { what: "optimizer" })
            }
            StateValue::Count(weight) => {
                let optimizer = self.optimizer_state()?;
                Ok(Tensor::i64(&[1], &[count_of(optimizer, weight.as_deref())]))
            }
        }
    }

    /// Returns the type and the shape of a value for all ranks together.
    fn type_of(&self, value: &StateValue) -> Result<(DType, Vec<usize>)> {
        match value {
            StateValue::Slot(weight, slot) => {
                let weight = self.checkpoint.parameter(weight)?;
                let slot = self.optimizer_state()?.slots.get(slot);
                let plane = self.checkpoint.entry(&weight.name).map_or(0, |entry| entry.plane);
                let dtype = slot.and_then(|slot| slot.layout.get(plane)).map(|layout| layout.dtype);
                Ok((dtype.ok_or(Error::OtherState { what: "optimizer" })?, weight.dims))
            }
            _ => {
                let value = self.value_of(value)?;
                Ok((value.dtype(), value.dims().to_vec()))
            }
        }
    }

    /// Returns the shape of each weight that several ranks share: it has a part of the optimizer state on each of them.
    /// Empty if the optimizer state is not divided.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let session = setup::classic()?;
    /// assert!(session.shared_weights()?.is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the state is damaged.
    pub fn shared_weights(&self) -> Result<BTreeMap<String, Vec<usize>>> {
        let mut shared = BTreeMap::new();
        for weight in &self.weights {
            let (owned, dims) =
                (self.checkpoint.owned_range(weight), self.checkpoint.parameter(weight)?.dims);
            if !owned.is_empty() && owned.len() < dims.iter().product() {
                shared.insert(weight.clone(), dims);
            }
        }
        Ok(shared)
    }

    /// Returns the range of elements of a weight that this rank updates: all elements, if the optimizer state is not
    /// divided.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let session = setup::classic()?;
    /// assert_eq!(session.updated_elements("fc2.bias"), 0..10);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn updated_elements(&self, weight: &str) -> Range<usize> {
        self.checkpoint.owned_range(weight)
    }

    fn optimizer_state(&self) -> Result<&OptimizerState> {
        self.checkpoint.optimizer().ok_or(Error::OtherState { what: "optimizer" })
    }

    /// Returns the weights under `full_precision`, and optionally their low-precision copies under
    /// `mixed_precision`.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let session = setup::classic()?;
    /// assert_eq!(session.model_state(false)?["full_precision"]["fc2.bias"].dims(), [10]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the state is damaged.
    pub fn model_state(&self, include_mixed_precision_weights: bool) -> Result<StatesByWeight> {
        let of = |variant: fn(String) -> StateValue| -> Result<BTreeMap<String, Tensor>> {
            let weights = self.weights.iter();
            weights.map(|weight| Ok((weight.clone(), self.value_of(&variant(weight.clone()))?))).collect()
        };
        let mut states = StatesByWeight::from([("full_precision".to_owned(), of(StateValue::Weight)?)]);
        if include_mixed_precision_weights {
            let copies = if self.low_precision.is_some() { of(StateValue::Copy)? } else { BTreeMap::new() };
            states.insert("mixed_precision".into(), copies);
        }
        Ok(states)
    }

    /// Returns the optimizer state of each weight: `Moment_1`, `Moment_2`, `Update_Count`. LAMB has its
    /// counter, `Step`, under `shared_optimizer_state`. Another session can start from it
    /// ([`TrainingParameters::initial_optimizer_state`]).
    ///
    /// [`TrainingParameters::initial_optimizer_state`]: super::TrainingParameters::initial_optimizer_state
    ///
    /// # Errors
    /// If the state is damaged.
    pub fn optimizer_states(&self) -> Result<StatesByWeight> {
        let mut states = StatesByWeight::new();
        for state_value in self.state_values().values() {
            let (outer, inner) = match state_value {
                StateValue::Weight(_) | StateValue::Copy(_) => continue,
                StateValue::Slot(weight, slot) => (weight.as_str(), *slot),
                StateValue::Count(Some(weight)) => (weight.as_str(), WEIGHT_COUNTER),
                StateValue::Count(None) => (SHARED_KEY, SHARED_COUNTER),
            };
            states.entry(outer.to_owned()).or_default().insert(inner.to_owned(), self.value_of(state_value)?);
        }
        Ok(states)
    }

    /// Sets some or all values of the state, by their names in [`TrainingSession::state`]. With `strict`, an
    /// unknown name is an error; otherwise it is ignored.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut session = setup::classic()?;
    /// let state = session.state()?;
    /// session.load_state(&state, true)?;
    /// assert_eq!(session.state()?, state);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If a name is unknown, or a value has another type or shape. Then nothing has changed.
    pub fn load_state(&mut self, values: &BTreeMap<String, Tensor>, strict: bool) -> Result<()> {
        let mut entries = self.state_values_of_all_ranks();
        if let Some(unknown) = values.keys().find(|name| strict && !entries.contains_key(*name)) {
            let suggestion = hint(unknown, entries.keys().map(String::as_str));
            return Err(Error::State(format!("the session has no state {unknown:?}{suggestion}")));
        }
        let selected: Vec<(&String, StateValue, &Tensor)> =
            values.iter().filter_map(|(name, value)| Some((name, entries.remove(name)?, value))).collect();
        self.set_values(
            &selected
                .iter()
                .map(|(name, state_value, value)| (name.as_str(), state_value, *value))
                .collect::<Vec<_>>(),
        )?;
        self.count_load();
        Ok(())
    }

    /// Sets the optimizer state, in the format of [`TrainingSession::optimizer_states`].
    pub(super) fn start_from(&mut self, states: &StatesByWeight) -> Result<()> {
        let mut entries = self.state_values_of_all_ranks();
        let mut selected: Vec<(String, StateValue, &Tensor)> = Vec::new();
        for (outer, state) in states {
            for (inner, value) in state {
                let name = if outer == SHARED_KEY { inner.clone() } else { format!("{inner}_{outer}") };
                let state_value = entries.remove(&name).filter(|state_value| {
                    !matches!(state_value, StateValue::Weight(_) | StateValue::Copy(_))
                });
                let state_value = state_value.ok_or_else(|| {
                    Error::State(format!(
                        "cannot start from {inner:?} of {outer:?}: the optimizer has no such state"
                    ))
                })?;
                selected.push((name, state_value, value));
            }
        }
        self.set_values(
            &selected
                .iter()
                .map(|(name, state_value, value)| (name.as_str(), state_value, *value))
                .collect::<Vec<_>>(),
        )
    }

    /// Sets all of the values, or none on error.
    fn set_values(&mut self, assignments: &[(&str, &StateValue, &Tensor)]) -> Result<()> {
        let mut counts: BTreeMap<Option<String>, i64> = BTreeMap::new();
        for (name, state_value, value) in assignments {
            let (dtype, dims) = self.type_of(state_value)?;
            let elements = dims.iter().product();
            let is_part = matches!(state_value, StateValue::Slot(weight, _)
                if value.dims() == [self.checkpoint.owned_range(weight).len()]
                    && self.checkpoint.owned_range(weight).len() < elements);
            if dtype != value.dtype() || (dims != value.dims() && !is_part) {
                return Err(Error::State(format!(
                    "{name:?} is {dtype}{dims:?}, but a value of {}{:?} was given",
                    value.dtype(),
                    value.dims()
                )));
            }
            if let StateValue::Count(weight) = state_value {
                let count = value.to_i64().and_then(|counts| counts.first().copied()).unwrap_or_default();
                if count < 1 {
                    return Err(Error::State(format!(
                        "{name:?} must be at least 1, its value before the first step, got {count}"
                    )));
                }
                counts.insert(weight.clone(), count);
            }
        }
        for (name, state_value, value) in assignments {
            let StateValue::Copy(weight) = state_value else { continue };
            let master = assignments.iter().find_map(|(_, state_value, value)| match state_value {
                StateValue::Weight(other) if other == weight => Some((*value).clone()),
                _ => None,
            });
            let master = match master {
                Some(master) => master,
                None => self.checkpoint.parameter(weight)?.to_tensor()?,
            };
            if master.converted(value.dtype()).data() != value.data() {
                return Err(Error::State(format!(
                    "{name:?} is a copy of {weight:?}, and the new values differ from it; set {weight:?}"
                )));
            }
        }
        for (_, state_value, value) in assignments {
            match state_value {
                StateValue::Weight(weight) => self.checkpoint.set_parameter(weight, value)?,
                StateValue::Slot(weight, slot) => {
                    let entry = self
                        .checkpoint
                        .entry(weight)
                        .ok_or_else(|| self.checkpoint.unknown_parameter(weight))?;
                    if let Some(slot) = self.optimizer_state()?.slots.get(slot) {
                        let owned = self.checkpoint.owned_range(weight);
                        slot.write(entry, &part_of(value, &owned))?;
                    }
                }
                StateValue::Copy(_) | StateValue::Count(_) => {}
            }
        }
        if let Some(optimizer) = self.checkpoint.optimizer_mut() {
            set_counts(optimizer, &counts);
        }
        Ok(())
    }
}

/// Returns a range of elements of a value; the value itself if it has no other elements.
fn part_of<'a>(value: &'a Tensor, range: &Range<usize>) -> Cow<'a, Tensor> {
    if value.dims().iter().product::<usize>() == range.len() {
        return Cow::Borrowed(value);
    }
    let size = value.dtype().size();
    let data = value.data().slice(range.start * size..range.end * size);
    Cow::Owned(Tensor::new(value.dtype(), vec![range.len()], data).expect("the range has this many elements"))
}

/// Returns the counter of a weight, or the shared one: the number of steps plus one.
fn count_of(optimizer: &OptimizerState, weight: Option<&str>) -> i64 {
    let spec = optimizer.spec.as_ref();
    let skipped = spec.and_then(|spec| {
        let group = spec.group_of(weight?)?;
        spec.groups.get(group).map(|group| group.skipped_steps)
    });
    (optimizer.step - skipped.unwrap_or(0)).saturating_add(1)
}

/// Sets counters. The optimizer's step count is the maximum over the weights; the others skipped some steps.
fn set_counts(optimizer: &mut OptimizerState, counts: &BTreeMap<Option<String>, i64>) {
    if counts.is_empty() {
        return;
    }
    if let Some(&count) = counts.get(&None) {
        optimizer.step = count - 1;
        return;
    }
    let before = optimizer.step;
    let Some(spec) = &mut optimizer.spec else { return };
    let steps: Vec<i64> = (spec.groups.iter())
        .map(|group| {
            let own_count = group.parameters.first().and_then(|name| counts.get(&Some(name.clone())));
            own_count.map_or(before - group.skipped_steps, |count| count - 1)
        })
        .collect();
    let max_steps = steps.iter().copied().max().unwrap_or(before);
    optimizer.step = max_steps;
    spec.groups.iter_mut().zip(steps).for_each(|(group, steps)| group.skipped_steps = max_steps - steps);
}
