//! Schedulers: schedules that control the learning rate of the optimizer on a state.

use std::fmt;

use ortrain_checkpoint::Scheduler;

use crate::train::learning_rate::{LINEAR_KIND, check_rate, no_optimizer};
use crate::train::schedule::Setting;
use crate::train::schedule_text::ScheduleParser;
use crate::{CheckpointState, Error, Result, Schedule, ScheduleInput};

/// Keyword between a schedule and its memory in a checkpoint.
const MEMORY_KEYWORD: &str = "Memory";

/// A [`Schedule`] that sets the learning rate of the optimizer on a state.
///
/// It uses the step counter of the optimizer and has none of its own. Checkpoints of the state include the
/// schedule and its memory, and [`LrScheduler::resume`] continues bit for bit.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let (mut state, mut module, mut optimizer) = setup::training()?;
/// # let batch = setup::batch();
/// # let inputs = batch.each_ref().map(ortrain::InputView::from);
/// use ortrain::{CheckpointState, LrScheduler, Schedule};
///
/// let mut scheduler = LrScheduler::new(&mut state, Schedule::Exponential { gamma: 0.5 }, 1.0)?;
/// let mut rates = Vec::new();
/// for _ in 0..3 {
///     rates.push(optimizer.learning_rate(&state)?);
///     module.train_step(&mut state, &inputs, &mut |_, _| Ok(()))?;
///     optimizer.step(&mut state, &module)?;
///     scheduler.step(&mut state)?;
///     module.lazy_reset_grad();
/// }
/// assert_eq!(rates, [1.0, 0.5, 0.25]);
///
/// let later = CheckpointState::from_bytes(state.to_bytes(true)?)?;
/// assert_eq!(LrScheduler::resume(&later)?, scheduler);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct LrScheduler {
    schedule: Schedule,
    lr: f32,
    memory: Memory,
}

/// Memory of a schedule with metrics or factors as inputs.
#[derive(Clone, Debug, PartialEq)]
struct Memory {
    /// Last factor decided by a metric or a function, initially 1.
    decided: f64,
    /// Best metric so far.
    best: Option<f64>,
    /// Number of steps without improvement.
    bad: i64,
    /// Remaining cooldown steps.
    cooling: i64,
}

impl LrScheduler {
    /// Creates a scheduler of the optimizer on this state, and sets the learning rate for the current number
    /// of steps.
    ///
    /// `lr` is the base rate that the factors multiply. The factor of a metric or a function is 1 until the
    /// first step.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// use ortrain::LrScheduler;
    ///
    /// LrScheduler::new(&mut state, "OneCycle(total=100)".parse()?, 0.5)?;
    /// assert_eq!(optimizer.learning_rate(&state)?, 0.5 / 25.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the state has no optimizer, a setting is out of range, or a rate is negative, infinite or NaN.
    pub fn new(state: &mut CheckpointState, schedule: Schedule, lr: f32) -> Result<LrScheduler> {
        schedule.check()?;
        check_rate("the initial learning rate", lr)?;
        let memory = Memory { decided: 1.0, best: None, bad: 0, cooling: 0 };
        let scheduler = LrScheduler { schedule, lr, memory };
        scheduler.apply_rate(state)?;
        Ok(scheduler)
    }

    /// Restores the scheduler from the checkpoint of a state. The learning rate remains as saved, too.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// let none = ortrain::LrScheduler::resume(&state).unwrap_err();
    /// assert!(none.to_string().starts_with("the state has no schedule to resume"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the state has no optimizer state or no schedule, or the schedule is damaged.
    pub fn resume(state: &CheckpointState) -> Result<LrScheduler> {
        state.optimizer().ok_or_else(no_optimizer)?;
        let record = state.scheduler().ok_or_else(|| {
            Error::State(
                "the state has no schedule to resume; save it with its optimizer state while a scheduler exists, or \
                 make a new scheduler"
                    .into(),
            )
        })?;
        if record.kind == LINEAR_KIND {
            return Err(Error::State(format!(
                "the learning rates of this state came from a LinearLRScheduler; make it again, with \
                 warmup_step_count={}, total_step_count={}, initial_lr={}",
                record.warmup_steps, record.total_steps, record.initial_learning_rate
            )));
        }
        let damaged = |source: Error| {
            Error::State(format!("the schedule in the state is damaged; make a new scheduler: {source}"))
        };
        check_rate("the initial learning rate", record.initial_learning_rate).map_err(damaged)?;
        let (schedule, memory) = parse(&record.kind).map_err(damaged)?;
        Ok(LrScheduler { schedule, lr: record.initial_learning_rate, memory })
    }

    /// Sets the learning rate for the current number of optimizer steps.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// let mut scheduler = ortrain::LrScheduler::new(&mut state, "Linear(total=4)".parse()?, 1.0)?;
    /// module.train_step(&mut state, &inputs, &mut |_, _| Ok(()))?;
    /// optimizer.step(&mut state, &module)?;
    /// scheduler.step(&mut state)?;
    /// assert_eq!(optimizer.learning_rate(&state)?, 0.75);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the schedule requires a metric or the factor of a function, the state has no optimizer, or the rate
    /// would be infinite or NaN. Then the rate and the schedule remain unchanged.
    pub fn step(&mut self, state: &mut CheckpointState) -> Result<()> {
        let needed = match self.schedule.input() {
            ScheduleInput::Nothing => return self.apply_rate(state),
            ScheduleInput::Metric => "a metric",
            ScheduleInput::Factor => "the factor of a function",
        };
        Err(Error::Argument(format!("a step of {} needs {needed}, and none was given", self.schedule)))
    }

    /// Sets the learning rate from a metric, or from the factor of a function of the program.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// let schedule = "ReduceOnPlateau(factor=0.5, patience=1)".parse()?;
    /// let mut scheduler = ortrain::LrScheduler::new(&mut state, schedule, 1.0)?;
    /// let mut rates = Vec::new();
    /// for loss in [0.9, 0.8, 0.8, 0.8] {
    ///     scheduler.step_with(&mut state, loss)?;
    ///     rates.push(optimizer.learning_rate(&state)?);
    /// }
    /// assert_eq!(rates, [1.0, 1.0, 1.0, 0.5]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the schedule requires no value, the value is infinite or NaN, the factor is negative, or as
    /// [`LrScheduler::step`].
    pub fn step_with(&mut self, state: &mut CheckpointState, value: f64) -> Result<()> {
        let takes = self.schedule.input();
        if takes == ScheduleInput::Nothing {
            return Err(Error::Argument(format!("a step of {} takes no metric", self.schedule)));
        }
        let mut next = self.clone();
        if takes == ScheduleInput::Metric {
            if !value.is_finite() {
                return Err(Error::Argument(format!(
                    "the metric must be a finite number, got {value}; if it is a loss, the training has diverged"
                )));
            }
            next.memory.update_plateau(self.schedule_after_warmup(), value);
        } else if value.is_finite() && value >= 0.0 {
            next.memory.decided = value;
        } else {
            return Err(Error::Argument(format!(
                "the function of the schedule returned {value}, but a factor must be finite and at least 0"
            )));
        }
        next.apply_rate(state)?;
        *self = next;
        Ok(())
    }

    /// Returns the schedule.
    #[must_use]
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Returns the base rate that the factors multiply.
    #[must_use]
    pub fn lr(&self) -> f32 {
        self.lr
    }

    /// Returns the learning rate after `t` optimizer steps, assuming that the decision of a metric or a
    /// function remains. The product is computed in f64 and rounded once.
    #[must_use]
    pub fn rate(&self, t: i64) -> f32 {
        (f64::from(self.lr) * self.schedule.factor_with(t, self.memory.decided)) as f32
    }

    /// Returns the schedule after the warm-up.
    fn schedule_after_warmup(&self) -> &Schedule {
        match &self.schedule {
            Schedule::Warmup { then, .. } => then,
            schedule => schedule,
        }
    }

    /// Sets the learning rate, and records the scheduler in the state for its checkpoints.
    fn apply_rate(&self, state: &mut CheckpointState) -> Result<()> {
        let optimizer = state.optimizer_mut().ok_or_else(no_optimizer)?;
        let rate = self.rate(optimizer.step);
        if !rate.is_finite() {
            return Err(Error::Argument(format!(
                "{} makes the learning rate {rate} after {} steps, but a rate must be finite",
                self.schedule, optimizer.step
            )));
        }
        optimizer.learning_rate = rate;
        optimizer.schedule_factor = self.schedule.factor_with(optimizer.step, self.memory.decided);
        optimizer.initial_learning_rate = self.lr;
        let record = Scheduler {
            kind: self.to_text(),
            warmup_steps: self.schedule.warmup(),
            total_steps: self.schedule.total().unwrap_or(0),
            initial_learning_rate: self.lr,
            step: optimizer.step,
        };
        state.set_scheduler(record);
        Ok(())
    }

    /// Returns the schedule and its memory as text. Numbers round-trip exactly.
    fn to_text(&self) -> String {
        let Memory { decided, best, bad, cooling } = &self.memory;
        match self.schedule.input() {
            ScheduleInput::Nothing => self.schedule.to_string(),
            ScheduleInput::Metric | ScheduleInput::Factor => {
                let best = best.map_or(String::new(), |best| format!(", best={best:?}"));
                format!(
                    "{} {MEMORY_KEYWORD}(decided={decided:?}, bad={bad}, cooling={cooling}{best})",
                    self.schedule
                )
            }
        }
    }
}

impl fmt::Display for LrScheduler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LRScheduler({}, lr={})", self.schedule, self.lr)
    }
}

impl Memory {
    /// Runs a step of PyTorch's `ReduceLROnPlateau`.
    fn update_plateau(&mut self, schedule: &Schedule, metric: f64) {
        let Schedule::ReduceOnPlateau {
            factor,
            patience,
            threshold,
            cooldown,
            least: min_factor,
            maximize,
            absolute,
        } = *schedule
        else {
            return;
        };
        let better = self.best.is_none_or(|best| match (maximize, absolute) {
            (false, false) => metric < best * (1.0 - threshold),
            (false, true) => metric < best - threshold,
            (true, false) => metric > best * (1.0 + threshold),
            (true, true) => metric > best + threshold,
        });
        if better {
            (self.best, self.bad) = (Some(metric), 0);
        } else {
            self.bad = self.bad.saturating_add(1);
        }
        if self.cooling > 0 {
            (self.cooling, self.bad) = (self.cooling - 1, 0);
        }
        if self.bad > patience {
            self.decided = (self.decided * factor).max(min_factor);
            (self.cooling, self.bad) = (cooldown, 0);
        }
    }
}

/// Parses a schedule and its memory from the text in a checkpoint.
fn parse(text: &str) -> Result<(Schedule, Memory)> {
    let mut reader = ScheduleParser::new(text);
    let schedule = reader.schedule(0)?;
    let mut memory = Memory { decided: 1.0, best: None, bad: 0, cooling: 0 };
    if reader.is_done() && schedule.input() == ScheduleInput::Nothing {
        return Ok((schedule, memory));
    }
    reader.expect_word(MEMORY_KEYWORD)?;
    for (name, value) in reader.settings(0)? {
        match (name.as_str(), value) {
            ("decided", Setting::Number(number)) if number.is_finite() && number >= 0.0 => {
                memory.decided = number;
            }
            ("best", Setting::Number(number)) if number.is_finite() => memory.best = Some(number),
            ("bad", Setting::Count(count)) if count >= 0 => memory.bad = count,
            ("cooling", Setting::Count(count)) if count >= 0 => memory.cooling = count,
            (name, value) => {
                return Err(Error::Argument(format!("the memory of the schedule has {name}={value}")));
            }
        }
    }
    reader.expect_end()?;
    Ok((schedule, memory))
}

impl CheckpointState {
    /// Returns the learning-rate scheduler with its schedule as text; `None` without a scheduler.
    #[must_use]
    pub fn scheduler_text(&self) -> Option<String> {
        let record = self.scheduler()?;
        if record.kind == LINEAR_KIND {
            let Scheduler { warmup_steps, total_steps, initial_learning_rate, .. } = record;
            return Some(format!(
                "LinearLRScheduler(warmup_step_count={warmup_steps}, total_step_count={total_steps}, \
                 initial_lr={initial_learning_rate})"
            ));
        }
        let scheduler = LrScheduler::resume(self);
        Some(scheduler.map_or_else(|_| "damaged".into(), |scheduler| scheduler.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every truncated or modified text parses or returns an error.
    #[test]
    fn rejects_damaged_records() {
        let sound = "Warmup(steps=3, then=ReduceOnPlateau(factor=0.1, patience=10), start=0.0) \
                     Memory(decided=0.1, bad=2, cooling=1, best=-0.25)";
        let (schedule, memory) = parse(sound).unwrap();
        assert_eq!((schedule.warmup(), memory.bad, memory.best), (3, 2, Some(-0.25)));
        let mut refused = 0;
        for at in 0..sound.len() {
            for change in ["", "(", ")", "9", "-", "\u{e9}", "nan"] {
                let text = format!("{}{change}{}", &sound[..at], &sound[at + 1..]);
                refused += usize::from(parse(&text).is_err());
            }
            assert!(parse(&sound[..at]).is_err() || at == sound.len() - 1, "{}", &sound[..at]);
        }
        assert!(refused > sound.len());
    }
}
