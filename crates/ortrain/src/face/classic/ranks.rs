//! Training in one session on several ranks.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use ortrain_onnx::{ModelProto, encode};
use ortrain_program::{CommitGate, InterruptPoints, Memory, OutputSink, RunError};

use super::TrainingParameters;
use crate::distributed::{
    Bucket, CommunicationQueue, CommunicationTime, Communicator, Control, DataParallel, StepCall, StepKind,
};
use crate::exec::step_inputs::StepInputs;
use crate::face::classic::names::StatesByWeight;
use crate::{CheckpointState, Error, Module, ModuleOptions, Result};

/// Name of the weights in error messages.
pub(super) const WEIGHTS: &str = "weights";

/// Sums of gradients over the ranks, in buckets.
#[derive(Debug)]
pub(super) struct GradientSums {
    pub(super) buckets: Vec<Bucket>,
    /// Thread of sums during the backward pass; `None` if the sums follow the backward pass.
    pub(super) queue: Option<CommunicationQueue>,
    /// Number of started sums of the current update.
    pub(super) started: AtomicUsize,
    /// First error of a start in the backward pass.
    pub(super) failure: Mutex<Option<Error>>,
}

impl GradientSums {
    /// Starts the sums of further buckets, up to the first one for which `is_final` is false.
    fn start(&self, planes: &[Arc<Memory>], is_final: &dyn Fn(usize) -> bool) -> Result<()> {
        let Some(queue) = &self.queue else { return Ok(()) };
        let mut next = self.started.load(Ordering::Relaxed);
        while next < self.buckets.len() && is_final(next) {
            queue.start(self.buckets[next].sum(planes)?)?;
            next += 1;
            self.started.store(next, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Starts the sums that have not started yet, and waits for all of them. Adds the time.
    pub(super) fn finish(
        &self,
        data: &dyn Communicator,
        planes: &[Arc<Memory>],
        time: &mut CommunicationTime,
    ) -> Result<()> {
        let start = Instant::now();
        if let Some(error) = self.failure.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Err(error);
        }
        time.updates += 1;
        match &self.queue {
            Some(queue) => {
                self.start(planes, &|_| true)?;
                self.started.store(0, Ordering::Relaxed);
                time.total += queue.wait()?;
            }
            None => {
                self.buckets.iter().try_for_each(|bucket| data.run(bucket.sum(planes)?))?;
                time.total += start.elapsed();
            }
        }
        time.waited += start.elapsed();
        Ok(())
    }
}

/// Follower of a backward pass that starts the sum of each bucket when its gradients are final.
struct Overlap {
    sums: Arc<GradientSums>,
    planes: Vec<Arc<Memory>>,
    /// Index of the first gradient plane among the planes of the program.
    first_plane: usize,
    /// Position of the last instruction that writes to each bucket.
    last_writes: Vec<Option<usize>>,
}

impl Overlap {
    /// Starts the sums of the buckets that are final before the instruction at `at`.
    fn follow(&mut self, at: usize, points: &InterruptPoints) {
        if self.last_writes.is_empty() {
            let last = |bucket: &Bucket| points.last_write(self.first_plane + bucket.plane, &bucket.bytes());
            self.last_writes = self.sums.buckets.iter().map(last).collect();
        }
        self.start_final_buckets(at);
    }

    fn start_final_buckets(&mut self, at: usize) {
        let is_final = |bucket: usize| self.last_writes[bucket].is_none_or(|last| last < at);
        if let Err(error) = self.sums.start(&self.planes, &is_final) {
            self.sums.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
    }
}

/// Gate of a training step that waits until all ranks are ready for the step.
struct RankGate {
    control: Arc<Control>,
    call: StepCall,
    /// Fingerprint of the weights after a state was loaded.
    weights: Option<u64>,
    /// Error of the exchange: the gate of a run returns only its text.
    error: Arc<Mutex<Option<Error>>>,
    /// Sums during the backward pass.
    overlap: Option<Overlap>,
}

/// Fingerprints of the parts of a session that must be equal on all ranks.
#[derive(Debug)]
pub(super) struct Fingerprints {
    pub(super) model: u64,
    pub(super) options: u64,
    pub(super) optimizer: u64,
}

impl Fingerprints {
    /// Computes the fingerprints of the training model, the options of a session, and the optimizer model.
    pub(super) fn new(
        model: &ModelProto,
        parameters: &TrainingParameters,
        options: &ModuleOptions,
        optimizer: Option<&ModelProto>,
    ) -> Result<Fingerprints> {
        // Ranks may write models to different files, and continue from different parts of an optimizer state. The
        // optimizer model has the settings of the optimizer.
        let parameters = TrainingParameters {
            model_after_graph_transforms_path: None,
            model_with_gradient_graph_path: None,
            model_with_training_graph_path: None,
            initial_optimizer_state: StatesByWeight::new(),
            training_optimizer_name: String::new(),
            optimizer_attributes_map: BTreeMap::new(),
            optimizer_int_attributes_map: BTreeMap::new(),
            ..parameters.clone()
        };
        let numerics = (options.run.precision, options.detect_anomaly);
        Ok(Fingerprints {
            model: hash_of_bytes(&encode(model)?),
            options: hash_of_bytes(format!("{parameters:?} {numerics:?}").as_bytes()),
            optimizer: optimizer.map_or(Ok(0), |model| Ok::<u64, Error>(hash_of_bytes(&encode(model)?)))?,
        })
    }
}

fn hash_of_bytes(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(bytes);
    hasher.finish()
}

/// Bytes of a plane that are hashed at once.
const HASHED_BYTES: usize = 1 << 20;

/// Returns the hash of the parameters of a state.
pub(super) fn hash_of_parameters(state: &CheckpointState) -> Result<u64> {
    let mut hasher = DefaultHasher::new();
    for plane in state.trainable_planes().iter().chain(state.frozen_planes()) {
        for start in (0..plane.len()).step_by(HASHED_BYTES) {
            hasher.write(&plane.to_vec(start, HASHED_BYTES.min(plane.len() - start))?);
        }
    }
    Ok(hasher.finish())
}

impl CommitGate for RankGate {
    fn before_commit(&mut self) -> std::result::Result<(), RunError> {
        let mut agreed = self.control.ready(&self.call);
        if let (Ok(()), Some(weights)) = (&agreed, self.weights) {
            agreed = self.control.check_equal(&[(WEIGHTS, weights)]);
        }
        agreed.map_err(|error| {
            let refused = RunError::Refused(error.to_string());
            *self.error.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            refused
        })
    }

    fn follow(&mut self, at: usize, points: &InterruptPoints) {
        if let Some(overlap) = &mut self.overlap {
            overlap.follow(at, points);
        }
    }
}

/// States that a session has loaded.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Loads {
    pub(super) count: u64,
    /// True if the ranks have not yet compared the weights since the last load.
    pub(super) is_unchecked: bool,
}

/// Runs a training step. On several ranks, the step changes state after all ranks have agreed on the step.
pub(super) fn train_once(
    (ranks, loads, sums): (Option<&DataParallel>, &mut Loads, Option<&Arc<GradientSums>>),
    (module, state): (&mut Module, &mut CheckpointState),
    inputs: StepInputs<'_>,
    deliver: &mut OutputSink<'_>,
    (kind, learning_rate, loss_scale): (StepKind, f32, f32),
) -> Result<()> {
    let Some(ranks) = ranks else { return module.train_step_on(state, inputs, deliver) };
    let learning_rate = if kind == StepKind::Update { learning_rate } else { 0.0 };
    let train_step = state.train_step_count();
    let session = ranks.session();
    let call = StepCall { session, kind, train_step, learning_rate, loss_scale, loads: loads.count };
    let error = Arc::default();
    let weights = if loads.is_unchecked { Some(hash_of_parameters(state)?) } else { None };
    let overlap = sums.filter(|sums| kind == StepKind::Update && sums.queue.is_some()).map(|sums| Overlap {
        sums: Arc::clone(sums),
        planes: module.gradient_planes().to_vec(),
        first_plane: module.layout().trainable.len() + module.layout().frozen.len(),
        last_writes: Vec::new(),
    });
    let gate =
        RankGate { control: ranks.control().clone(), call, weights, error: Arc::clone(&error), overlap };
    let run = module.train_step_gated(state, inputs, deliver, Box::new(gate));
    match error.lock().unwrap_or_else(PoisonError::into_inner).take() {
        Some(error) => Err(error),
        None => {
            loads.is_unchecked &= run.is_err();
            run
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use ortrain_graph::DType;

    use super::*;
    use crate::distributed::{Collective, Pending};

    /// Network that finishes a collective when the test allows it.
    #[derive(Debug)]
    struct Delayed {
        allowed: Mutex<Receiver<()>>,
        finished: Sender<usize>,
    }

    struct Finished;

    impl Pending for Finished {
        fn wait(self: Box<Self>) -> Result<()> {
            Ok(())
        }
    }

    impl Communicator for Delayed {
        fn rank(&self) -> usize {
            0
        }

        fn size(&self) -> usize {
            2
        }

        fn reaches(&self, _: &str) -> bool {
            true
        }

        fn allows_threads(&self) -> bool {
            true
        }

        fn start(&self, collective: Collective) -> Result<Box<dyn Pending>> {
            self.allowed.lock().unwrap().recv().map_err(|error| Error::Communication(error.to_string()))?;
            self.finished.send(collective.operand().offset()).unwrap();
            Ok(Box::new(Finished))
        }

        fn group(&self, _: &[usize]) -> Result<Arc<dyn Communicator>> {
            Err(Error::Communication("there are no groups".into()))
        }

        fn abort(&self, _: &str) {}
    }

    /// Buckets start in their order when they are final, and a slow network delays no instruction.
    #[test]
    fn buckets_start_when_they_are_final() {
        let (allow, allowed) = channel();
        let (sender, finished) = channel();
        let network: Arc<dyn Communicator> =
            Arc::new(Delayed { allowed: Mutex::new(allowed), finished: sender });
        let part = |elements| Bucket { plane: 0, dtype: DType::F32, elements };
        let sums = Arc::new(GradientSums {
            buckets: vec![part(4..8), part(0..4), part(8..16)],
            queue: Some(CommunicationQueue::new(network.clone()).unwrap()),
            started: AtomicUsize::new(0),
            failure: Mutex::default(),
        });
        let planes = vec![Arc::new(Memory::new(64))];
        let last_writes = vec![Some(5), Some(2), Some(7)];
        let mut overlap = Overlap { sums: sums.clone(), planes: planes.clone(), first_plane: 0, last_writes };
        let mut started = Vec::new();
        for at in 0..8 {
            overlap.start_final_buckets(at);
            started.push(sums.started.load(Ordering::Relaxed));
        }
        // The second bucket is final after instruction 2, and waits for the first one. The third one is final after the
        // last instruction.
        assert_eq!(started, [0, 0, 0, 0, 0, 0, 2, 2]);
        assert!(finished.try_recv().is_err(), "no sum has finished");
        (0..3).for_each(|_| allow.send(()).unwrap());
        let mut time = CommunicationTime::default();
        sums.finish(&*network, &planes, &mut time).unwrap();
        assert_eq!(finished.try_iter().collect::<Vec<usize>>(), [16, 0, 32]);
        assert_eq!((sums.started.load(Ordering::Relaxed), time.updates), (0, 1));
        assert!(time.waited >= Duration::ZERO && time.hidden_share() <= 1.0);
    }

    #[test]
    fn failure_of_the_network_is_an_error_of_the_update() {
        let (allow, allowed) = channel();
        let (sender, _finished) = channel();
        drop(allow);
        let network: Arc<dyn Communicator> =
            Arc::new(Delayed { allowed: Mutex::new(allowed), finished: sender });
        let sums = GradientSums {
            buckets: vec![Bucket { plane: 0, dtype: DType::F32, elements: 0..4 }],
            queue: Some(CommunicationQueue::new(network.clone()).unwrap()),
            started: AtomicUsize::new(0),
            failure: Mutex::default(),
        };
        let planes = [Arc::new(Memory::new(64))];
        let failed = sums.finish(&*network, &planes, &mut CommunicationTime::default());
        assert!(matches!(failed, Err(Error::Communication(_))));
    }
}
