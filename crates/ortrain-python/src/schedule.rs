//! Learning-rate schedules and schedulers.

use std::sync::{Arc, Mutex, PoisonError};

use ortrain::{ScheduleInput, Setting};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::error::raise;
use crate::gil::Exclusive;
use crate::records::ScheduleKind;
use crate::training::Optimizer;

/// A schedule. The core defines names, settings and formulas.
#[pyclass(frozen, module = "ortrain._ortrain")]
pub(crate) struct Schedule(pub(crate) ortrain::Schedule);

#[pymethods]
impl Schedule {
    #[new]
    fn new(name: &str, settings: Vec<(String, Bound<'_, PyAny>)>) -> PyResult<Schedule> {
        let settings = settings.into_iter().map(|(key, value)| {
            let value = setting(name, &key, &value)?;
            Ok((key, value))
        });
        let settings = settings.collect::<PyResult<_>>()?;
        ortrain::Schedule::from_settings(name, settings).map(Schedule).map_err(raise)
    }

    /// Parses a schedule.
    #[staticmethod]
    fn parse(text: &str) -> PyResult<Schedule> {
        text.parse().map(Schedule).map_err(raise)
    }

    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn text(&self) -> String {
        self.0.to_string()
    }

    fn warmup(&self) -> i64 {
        self.0.warmup()
    }

    fn span(&self) -> i64 {
        self.0.span()
    }

    /// Returns the value that a step requires besides the number of steps: `metric`, `factor`, or `None`.
    fn takes(&self) -> Option<&'static str> {
        match self.0.input() {
            ScheduleInput::Nothing => None,
            ScheduleInput::Metric => Some("metric"),
            ScheduleInput::Factor => Some("factor"),
        }
    }

    /// Returns the factor after `t` steps, with the factor `decided` from a metric or a function.
    fn factor(&self, t: i64, decided: f64) -> f64 {
        self.0.factor_with(t, decided)
    }
}

/// Converts a Python value to a setting.
fn setting(schedule: &str, name: &str, value: &Bound<'_, PyAny>) -> PyResult<Setting> {
    if let Ok(flag) = value.cast::<PyBool>() {
        return Ok(Setting::Flag(flag.is_true()));
    }
    if let Ok(inner) = value.cast::<Schedule>() {
        return Ok(Setting::Schedule(inner.get().0.clone()));
    }
    if let Ok(count) = value.extract() {
        return Ok(Setting::Count(count));
    }
    if let Ok(number) = value.extract() {
        return Ok(Setting::Number(number));
    }
    let wrong = |_| {
        let (kind, repr) = (value.get_type().name(), value.repr());
        let kind = kind.map_or_else(|_| "something else".to_owned(), |kind| kind.to_string());
        let text: String = repr.map_or_else(|_| String::new(), |representation| representation.to_string());
        let short_text: String = text.chars().take(60).collect();
        PyTypeError::new_err(format!(
            "{name} of {schedule} must be a number, a list of whole numbers or a schedule, got {short_text} ({kind})"
        ))
    };
    value.extract().map(Setting::Counts).map_err(wrong)
}

/// A schedule that controls the learning rate of an optimizer.
#[pyclass(frozen, module = "ortrain._ortrain")]
pub(crate) struct LrScheduler {
    state: Arc<Exclusive<ortrain::CheckpointState>>,
    scheduler: Mutex<ortrain::LrScheduler>,
}

#[pymethods]
impl LrScheduler {
    #[new]
    fn new(py: Python<'_>, optimizer: &Optimizer, schedule: &Schedule, lr: f32) -> PyResult<LrScheduler> {
        let state = optimizer.state.clone();
        let scheduler = state.enter(py, |state| ortrain::LrScheduler::new(state, schedule.0.clone(), lr))?;
        Ok(LrScheduler { state, scheduler: Mutex::new(scheduler) })
    }

    /// Restores the scheduler of the checkpoint.
    #[staticmethod]
    fn resume(py: Python<'_>, optimizer: &Optimizer) -> PyResult<LrScheduler> {
        let state = optimizer.state.clone();
        let scheduler = state.enter(py, |state| ortrain::LrScheduler::resume(state))?;
        Ok(LrScheduler { state, scheduler: Mutex::new(scheduler) })
    }

    /// Runs a step, with a metric or a factor if the schedule requires it.
    fn step(&self, py: Python<'_>, value: Option<f64>) -> PyResult<()> {
        self.state.enter(py, |state| {
            // The caller holds the lock of the state, so this lock is never contended.
            let mut scheduler = self.scheduler.lock().unwrap_or_else(PoisonError::into_inner);
            match value {
                None => scheduler.step(state),
                Some(value) => scheduler.step_with(state, value),
            }
        })
    }

    fn schedule(&self) -> Schedule {
        let scheduler = self.scheduler.lock().unwrap_or_else(PoisonError::into_inner);
        Schedule(scheduler.schedule().clone())
    }

    fn lr(&self) -> f32 {
        self.scheduler.lock().unwrap_or_else(PoisonError::into_inner).lr()
    }
}

/// Returns all schedules with their settings.
#[pyfunction]
pub(crate) fn schedule_kinds() -> Vec<ScheduleKind> {
    let kinds = ortrain::Schedule::kinds().iter();
    kinds.map(|&(name, settings)| ScheduleKind { name, settings: settings.to_vec() }).collect()
}

/// Returns the steps from 0 to the last one in a curve.
#[pyfunction]
pub(crate) fn curve_steps(last: i64) -> Vec<i64> {
    ortrain::curve_steps(last).to_vec()
}

/// Draws a curve as text.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "a list becomes a vector")]
pub(crate) fn draw_curve(factors: Vec<f64>, last: i64) -> String {
    ortrain::draw_curve(&factors, last)
}
