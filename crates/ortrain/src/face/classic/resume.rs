//! Resumable values besides the state: accumulated gradients, running statistics, and the number of runs.

use std::collections::BTreeMap;

use ortrain_graph::Tensor;

use super::{TrainingSession, copy_planes, is_same_type};
use crate::suggest::hint;
use crate::{Error, Result};

impl TrainingSession {
    /// Returns the gradients accumulated so far for the next update, by weight; empty between accumulation
    /// windows.
    ///
    /// # Errors
    /// If the gradients are on a device, and the device fails.
    pub fn accumulated_gradients(&self) -> Result<BTreeMap<String, Tensor>> {
        match self.in_window {
            true => self.gradients(),
            false => Ok(BTreeMap::new()),
        }
    }

    /// Sets the accumulated gradients of all trained weights; with an empty map, the next run begins a
    /// window.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut session = setup::classic()?;
    /// let sums = session.accumulated_gradients()?;
    /// session.load_accumulated_gradients(&sums)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If a weight is missing or unknown, a sum has another type or shape, or every run makes an update. Then
    /// nothing has changed.
    pub fn load_accumulated_gradients(&mut self, sums: &BTreeMap<String, Tensor>) -> Result<()> {
        if sums.is_empty() {
            self.in_window = false;
            return Ok(());
        }
        if self.runs_per_update <= 1 {
            return Err(Error::State(
                "sums of gradients need accumulation, but gradient_accumulation_steps is 1: every run is an update".into(),
            ));
        }
        let now = self.gradients()?;
        check_values("the sum of the gradients of weight", &now, sums, true)?;
        for (name, sum) in sums {
            if let Some(gradient) = self.module.gradient(name) {
                gradient.memory.write(gradient.offset, sum.data())?;
            }
        }
        self.module.accumulate_next();
        self.in_window = true;
        self.frozen_before_window =
            self.low_precision.map(|_| copy_planes(self.checkpoint.frozen_planes())).transpose()?;
        Ok(())
    }

    /// Returns the running statistics that runs update, by name.
    ///
    /// # Errors
    /// If the state is damaged.
    pub fn running_statistics(&self) -> Result<BTreeMap<String, Tensor>> {
        let frozen = self.checkpoint.entries().iter().filter(|entry| !entry.requires_grad);
        let value = |name: &str| Ok((name.to_owned(), self.checkpoint.parameter(name)?.to_tensor()?));
        frozen.map(|entry| value(&entry.name)).collect()
    }

    /// Sets some or all running statistics.
    ///
    /// # Errors
    /// If a name is unknown, or a value has another type or shape. Then nothing has changed.
    pub fn load_running_statistics(&mut self, values: &BTreeMap<String, Tensor>) -> Result<()> {
        check_values("the running statistic", &self.running_statistics()?, values, false)?;
        values.iter().try_for_each(|(name, value)| self.checkpoint.set_parameter(name, value))
    }

    /// Returns the number of runs that computed gradients. Together with the seed, it determines the next
    /// Dropout masks.
    #[must_use]
    pub fn train_steps(&self) -> u64 {
        self.checkpoint.train_step_count()
    }

    /// Sets the number of runs that computed gradients.
    pub fn set_train_steps(&mut self, count: u64) {
        self.checkpoint.set_train_step_count(count);
    }

    fn gradients(&self) -> Result<BTreeMap<String, Tensor>> {
        let gradients =
            self.weights.iter().filter_map(|weight| Some((weight, self.module.gradient(weight)?)));
        gradients.map(|(weight, gradient)| Ok((weight.clone(), gradient.to_tensor()?))).collect()
    }
}

/// Checks new values against the current ones. With `require_all`, a missing value is an error.
fn check_values(
    label: &str,
    now: &BTreeMap<String, Tensor>,
    values: &BTreeMap<String, Tensor>,
    require_all: bool,
) -> Result<()> {
    if let Some(missing) = now.keys().find(|name| require_all && !values.contains_key(*name)) {
        return Err(Error::State(format!("{label} {missing:?} is missing")));
    }
    for (name, value) in values {
        let Some(current) = now.get(name) else {
            let suggestion = hint(name, now.keys().map(String::as_str));
            return Err(Error::State(format!("{label} {name:?} is not known{suggestion}")));
        };
        if !is_same_type(current, value) {
            return Err(Error::State(format!(
                "{label} {name:?} is {}{:?}, but a value of {}{:?} was given",
                current.dtype(),
                current.dims(),
                value.dtype(),
                value.dims()
            )));
        }
    }
    Ok(())
}
