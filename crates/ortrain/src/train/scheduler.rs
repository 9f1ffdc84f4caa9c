//! The linear learning-rate scheduler of onnxruntime-training.

use ortrain_checkpoint::Scheduler;

use crate::train::learning_rate::{LINEAR_KIND, check_rate, no_optimizer};
use crate::{CheckpointState, Error, Result};

/// A learning rate that rises linearly from zero during a warm-up, then falls linearly to zero:
///
/// ```text
/// factor(t) = t / max(1, warmup)                          for t < warmup
///           = max(0, (total - t) / max(1, total - warmup)) after it
/// ```
///
/// where `t` is the number of completed optimizer steps; the scheduler has no counter of its own.
/// (onnxruntime-training 1.19.2 swaps the two counts in Python; this formula follows its documentation.)
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let (mut state, mut module, mut optimizer) = setup::training()?;
/// # let batch = setup::batch();
/// # let inputs = batch.each_ref().map(ortrain::InputView::from);
/// use ortrain::LinearLRScheduler;
///
/// let scheduler = LinearLRScheduler::new(&mut state, 2, 4, 1.0)?;
/// let mut rates = Vec::new();
/// for _ in 0..5 {
///     rates.push(optimizer.learning_rate(&state)?);
///     module.train_step(&mut state, &inputs, &mut |_, _| Ok(()))?;
///     optimizer.step(&mut state, &module)?;
///     scheduler.step(&mut state)?;
///     module.lazy_reset_grad();
/// }
/// assert_eq!(rates, [0.0, 0.5, 1.0, 0.5, 0.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct LinearLRScheduler {
    warmup_step_count: i64,
    total_step_count: i64,
}

impl LinearLRScheduler {
    /// Creates a scheduler of the optimizer on this state. Sets the initial learning rate and runs one
    /// [`LinearLRScheduler::step`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// use ortrain::LinearLRScheduler;
    ///
    /// let scheduler = LinearLRScheduler::new(&mut state, 0, 10, 0.1)?;
    /// assert_eq!(optimizer.learning_rate(&state)?, 0.1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the state has no optimizer, a count is negative, the warm-up is longer than the total, or the rate
    /// is negative, infinite or NaN.
    pub fn new(
        state: &mut CheckpointState,
        warmup_step_count: i64,
        total_step_count: i64,
        initial_lr: f32,
    ) -> Result<LinearLRScheduler> {
        let scheduler = LinearLRScheduler::register(state, warmup_step_count, total_step_count, initial_lr)?;
        scheduler.step(state)?;
        Ok(scheduler)
    }

    /// Creates a scheduler without a first step: until a step, the learning rate is the initial one.
    pub(crate) fn register(
        state: &mut CheckpointState,
        warmup_step_count: i64,
        total_step_count: i64,
        initial_lr: f32,
    ) -> Result<LinearLRScheduler> {
        let optimizer = state.optimizer_mut().ok_or_else(no_optimizer)?;
        if warmup_step_count < 0 || total_step_count < 0 {
            return Err(Error::Argument(format!(
                "warmup_step_count and total_step_count must be at least 0, got {warmup_step_count} and \
                 {total_step_count}"
            )));
        }
        if warmup_step_count > total_step_count {
            return Err(Error::Argument(format!(
                "a warm-up of {warmup_step_count} steps is longer than the training of {total_step_count}; \
                 warmup_step_count comes first (onnxruntime-training 1.19.2, and scripts for it, have the opposite \
                 order)"
            )));
        }
        check_rate("the initial learning rate", initial_lr)?;
        optimizer.initial_learning_rate = initial_lr;
        optimizer.learning_rate = initial_lr;
        optimizer.schedule_factor = 1.0;
        let scheduler = LinearLRScheduler { warmup_step_count, total_step_count };
        scheduler.record(state)?;
        Ok(scheduler)
    }

    /// Sets the learning rate for the current number of optimizer steps.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// let scheduler = ortrain::LinearLRScheduler::new(&mut state, 4, 8, 1.0)?;
    /// module.train_step(&mut state, &inputs, &mut |_, _| Ok(()))?;
    /// optimizer.step(&mut state, &module)?;
    /// scheduler.step(&mut state)?;
    /// assert_eq!(optimizer.learning_rate(&state)?, 0.25);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the state has no optimizer.
    pub fn step(&self, state: &mut CheckpointState) -> Result<()> {
        let optimizer = state.optimizer_mut().ok_or_else(no_optimizer)?;
        let factor = self.factor(optimizer.step);
        optimizer.learning_rate = optimizer.initial_learning_rate * factor;
        optimizer.schedule_factor = factor.into();
        self.record(state)
    }

    /// Records the scheduler in the state, for its checkpoints.
    fn record(&self, state: &mut CheckpointState) -> Result<()> {
        let optimizer = state.optimizer().ok_or_else(no_optimizer)?;
        let record = Scheduler {
            kind: LINEAR_KIND.into(),
            warmup_steps: self.warmup_step_count,
            total_steps: self.total_step_count,
            initial_learning_rate: optimizer.initial_learning_rate,
            step: optimizer.step,
        };
        state.set_scheduler(record);
        Ok(())
    }

    /// Returns the factor after `step` optimizer steps.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// let scheduler = ortrain::LinearLRScheduler::new(&mut state, 2, 4, 0.1)?;
    /// let factors: Vec<f32> = (0..6).map(|step| scheduler.factor(step)).collect();
    /// assert_eq!(factors, [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn factor(&self, step: i64) -> f32 {
        let (warmup, total) = (self.warmup_step_count, self.total_step_count);
        if step < warmup {
            return step as f32 / warmup.max(1) as f32;
        }
        (total.saturating_sub(step) as f32 / total.saturating_sub(warmup).max(1) as f32).max(0.0)
    }
}
