//! Ranks of a session.

use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex};

use super::ranks::{Fingerprints, GradientSums, WEIGHTS, hash_of_parameters};
use super::{CallOptions, FetchSource, TrainingSession};
use crate::Result;
use crate::distributed::{CommunicationQueue, CommunicationTime, DataParallel, StepCall, StepKind, buckets};

impl TrainingSession {
    /// Returns the ranks of a distributed training.
    #[must_use]
    pub fn ranks(&self) -> Option<&DataParallel> {
        self.ranks.as_ref()
    }

    /// Checks that the ranks can exchange the planes of the session and start alike, and selects the random numbers of
    /// this rank.
    pub(super) fn join_ranks(&mut self, fingerprints: Option<&Fingerprints>) -> Result<()> {
        let Some(ranks) = &self.ranks else { return Ok(()) };
        let planes = &self.module.layout().trainable;
        ranks.check(self.module.backend().device(), planes.iter().map(|plane| plane.dtype))?;
        self.module.rank = ranks.rank() as u64;
        let queue = (ranks.overlaps()).then(|| CommunicationQueue::new(ranks.data().clone())).transpose()?;
        self.sums = Some(Arc::new(GradientSums {
            buckets: buckets(self.module.layout(), &|name| self.module.gradient_position(name)),
            queue,
            started: AtomicUsize::new(0),
            failure: Mutex::default(),
        }));
        let Some(Fingerprints { model, options, optimizer }) = fingerprints else { return Ok(()) };
        let weights = hash_of_parameters(&self.checkpoint)?;
        let call = StepCall {
            session: ranks.session(),
            kind: StepKind::Start,
            train_step: 0,
            learning_rate: 0.0,
            loss_scale: 1.0,
            loads: 0,
        };
        ranks.control().ready(&call)?;
        let parts =
            [("models", *model), ("options", *options), ("optimizers", *optimizer), (WEIGHTS, weights)];
        ranks.control().check_equal(&parts)
    }

    /// Returns the time of the communication so far.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let session = setup::classic()?;
    /// assert!(session.communication_time().total.is_zero(), "there is one process");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn communication_time(&self) -> CommunicationTime {
        self.communication_time
    }

    /// Records that a state was loaded. The next step checks that all ranks have loaded the same weights.
    pub(super) fn count_load(&mut self) {
        self.loads.count += 1;
        self.loads.is_unchecked = self.ranks.is_some();
    }

    /// Runs work of a training step. If the work fails before the ranks have agreed on the step, all ranks receive the
    /// error. `outputs` are the indices of the fetched outputs, as far as they exist.
    pub(super) fn report_failure<T>(
        &mut self,
        options: CallOptions,
        mut outputs: impl Iterator<Item = usize>,
        work: impl FnOnce(&mut TrainingSession) -> Result<T>,
    ) -> Result<T> {
        let is_training = !options.only_execute_path_to_fetches
            || outputs.any(|at| {
                self.fetch_sources.get(at).is_some_and(|fetch| !matches!(fetch, FetchSource::Output(_)))
            });
        let control = match &self.ranks {
            Some(ranks) if is_training => ranks.control().clone(),
            _ => return work(self),
        };
        let before = control.exchange_count();
        let result = work(self);
        if let Err(error) = &result
            && control.exchange_count() == before
        {
            control.failed(&error.to_string())?;
        }
        result
    }
}
