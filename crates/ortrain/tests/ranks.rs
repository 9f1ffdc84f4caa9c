//! Trainings on several ranks that are threads of one process.
#![allow(clippy::unwrap_used)]

#[expect(dead_code, unreachable_pub, reason = "examples of the documentation use all of it")]
mod setup {
    include!("../doc/setup.rs");
}

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use ortrain::classic::{CallOptions, TrainingParameters, TrainingSession};
use ortrain::distributed::{
    Collective, Communicator, Control, DataParallel, Pending, Strategy, ThreadCommunicator,
};
use ortrain::{ALIGNMENT, DType, Error, InputView, ModuleOptions, Result, Tensor};

const WEIGHTS: [&str; 4] = ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight"];
const OPTIMIZERS: [&str; 3] = ["SGDOptimizer", "AdamOptimizer", "LambOptimizer"];
/// Rows of the batch of all ranks together.
const ROWS: usize = 12;
const STEPS: usize = 5;
/// Maximum difference of weights after some steps, because float32 sums have another order.
const SUMS: f32 = 1e-5;

/// Allocator that records the largest allocation.
struct Largest;

static IS_RECORDED: AtomicBool = AtomicBool::new(false);
static LARGEST: AtomicUsize = AtomicUsize::new(0);

#[allow(unsafe_code)]
// SAFETY: every call is forwarded unchanged to the system's allocator.
unsafe impl GlobalAlloc for Largest {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if IS_RECORDED.load(Ordering::Relaxed) {
            LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        }
        // SAFETY: the caller's guarantees are the requirements of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Largest = Largest;

/// Settings of a training.
#[derive(Clone, Copy, Debug)]
struct Settings {
    optimizer: &'static str,
    strategy: Strategy,
    overlaps: bool,
    window: i64,
}

impl Settings {
    fn session(&self, ranks: Option<DataParallel>) -> TrainingSession {
        let mut parameters = TrainingParameters::new("loss").optimizer(self.optimizer).train(WEIGHTS);
        parameters.gradient_accumulation_steps = self.window;
        let model = setup::model_with_loss().unwrap();
        TrainingSession::on_ranks(model, &parameters, ModuleOptions::default(), ranks).unwrap()
    }
}

/// Returns the rows of a rank in the batch of a step.
fn batch(step: usize, rank: usize, size: usize) -> (Tensor, Tensor) {
    let rows = rank * ROWS / size..(rank + 1) * ROWS / size;
    let count = rows.len();
    let element = |row: usize, column: usize| ((step * 1000 + row * 64 + column) as f32 * 0.37).sin();
    let x: Vec<f32> = rows.clone().flat_map(|row| (0..64).map(move |column| element(row, column))).collect();
    let labels: Vec<i64> = rows.map(|row| ((step + row * 7) % 10) as i64).collect();
    (Tensor::f32(&[count, 64], &x), Tensor::i64(&[count], &labels))
}

fn run(session: &mut TrainingSession, (x, labels): &(Tensor, Tensor), is_update: bool) -> Result<f32> {
    let rate = Tensor::f32(&[1], &[0.005]);
    let feeds = [
        ("x", InputView::from(x)),
        ("labels", InputView::from(labels)),
        ("Learning_Rate", InputView::from(&rate)),
    ];
    let accumulate = CallOptions { only_execute_path_to_fetches: true, training_mode: None };
    let (fetches, options): (&[&str], _) = match is_update {
        true => (&["loss"], CallOptions::default()),
        false => (&["loss", "Group_Accumulated_Gradients"], accumulate),
    };
    Ok(session.run_tensors(&feeds, fetches, options)?[0].to_vec::<f32>()[0])
}

/// Returns the weights in one vector.
fn weights(session: &TrainingSession) -> Vec<f32> {
    let state = session.model_state(false).unwrap();
    state["full_precision"].values().flat_map(Tensor::to_vec::<f32>).collect()
}

/// Ends all ranks when a rank panics, so that no rank waits for it.
struct AbortOnPanic([ThreadCommunicator; 2]);

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.iter().for_each(|communicator| communicator.abort("a rank has panicked"));
        }
    }
}

/// Runs work on each rank in a thread of its own, and leaves the training afterwards.
fn on_ranks<T: Send>(size: usize, work: impl Fn(DataParallel) -> T + Sync) -> Vec<T> {
    let (control, data) = (ThreadCommunicator::create(size), ThreadCommunicator::create(size));
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = control
            .into_iter()
            .zip(data)
            .map(|(control, data)| {
                scope.spawn(move || {
                    let _guard = AbortOnPanic([control.clone(), data.clone()]);
                    let control = Arc::new(Control::new(Arc::new(control)));
                    let result = work(DataParallel::new(control.clone(), Arc::new(data), 0));
                    control.leave().unwrap();
                    result
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Trains and returns the weights.
fn train(settings: Settings, ranks: Option<DataParallel>) -> Vec<f32> {
    let (rank, size) = ranks.as_ref().map_or((0, 1), |ranks| (ranks.rank(), ranks.size()));
    let ranks =
        ranks.map(|ranks| ranks.overlapping(settings.overlaps).with_strategy(settings.strategy).unwrap());
    let mut session = settings.session(ranks);
    let window = settings.window as usize;
    for step in 0..STEPS * window {
        run(&mut session, &batch(step, rank, size), (step + 1) % window == 0).unwrap();
    }
    weights(&session)
}

#[test]
fn ranks_train_like_one_session() {
    for optimizer in OPTIMIZERS {
        for window in [1, 2] {
            let settings = Settings { optimizer, strategy: Strategy::AllReduce, overlaps: false, window };
            let expected = train(settings, None);
            for size in [2, 3, 4] {
                let mut first: Option<Vec<f32>> = None;
                for strategy in [Strategy::AllReduce, Strategy::Zero] {
                    for overlaps in [false, true] {
                        let settings = Settings { strategy, overlaps, ..settings };
                        let replicas = on_ranks(size, |ranks| train(settings, Some(ranks)));
                        assert!(
                            replicas.iter().all(|other| *other == replicas[0]),
                            "{settings:?}, {size} ranks"
                        );
                        let difference = |a: &[f32], b: &[f32]| {
                            a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
                        };
                        let off = difference(&replicas[0], &expected);
                        assert!(off < SUMS, "{settings:?}, {size} ranks: {off}");
                        // LAMB sums the norms of parts with ZeRO.
                        if optimizer != "LambOptimizer" {
                            let first = first.get_or_insert_with(|| replicas[0].clone());
                            assert!(difference(first, &replicas[0]) < SUMS, "{settings:?}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn failed_step_changes_no_rank() {
    let settings =
        Settings { optimizer: "AdamOptimizer", strategy: Strategy::AllReduce, overlaps: true, window: 2 };
    let results = on_ranks(2, |ranks| {
        let rank = ranks.rank();
        let mut session = settings.session(Some(ranks.overlapping(true)));
        let mut errors = Vec::new();
        for step in 0..4 {
            for attempt in 0..2 {
                let (x, mut labels) = batch(step, rank, 2);
                if attempt == 0 && rank == 1 {
                    labels = Tensor::i64(labels.dims(), &[99; ROWS / 2]);
                }
                let before = (session.state().unwrap(), session.accumulated_gradients().unwrap());
                let ran = run(&mut session, &(x, labels), step % 2 == 1);
                if attempt == 0 {
                    errors.push(ran.unwrap_err().to_string());
                    let after = (session.state().unwrap(), session.accumulated_gradients().unwrap());
                    assert_eq!(after, before, "rank {rank}, step {step}");
                } else {
                    ran.unwrap();
                }
            }
        }
        (errors, weights(&session))
    });
    assert!(results[0].0[0].starts_with("rank 1 of 2 failed in this step, so no rank has changed: node"));
    assert!(results[1].0[0].starts_with("node"), "{:?}", results[1].0);
    let undisturbed = on_ranks(2, |ranks| {
        let mut session = settings.session(Some(ranks.clone()));
        for step in 0..4 {
            run(&mut session, &batch(step, ranks.rank(), 2), step % 2 == 1).unwrap();
        }
        weights(&session)
    });
    assert_eq!(results[0].1, undisturbed[0]);
    assert_eq!(results[1].1, undisturbed[0]);
}

#[test]
fn ranks_with_different_weights_are_refused() {
    let errors = on_ranks(2, |ranks| {
        let mut parameters = TrainingParameters::new("loss").optimizer("SGDOptimizer").train(WEIGHTS);
        parameters.enable_grad_norm_clip = ranks.rank() == 0;
        let model = setup::model_with_loss().unwrap();
        let created = TrainingSession::on_ranks(model, &parameters, ModuleOptions::default(), Some(ranks));
        created.unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.starts_with("the options of rank 1 differ from the options of rank 0"), "{error}");
    }
    let errors = on_ranks(2, |ranks| {
        let settings =
            Settings { optimizer: "SGDOptimizer", strategy: Strategy::AllReduce, overlaps: false, window: 1 };
        let rank = ranks.rank();
        let mut session = settings.session(Some(ranks));
        let mut state = session.state().unwrap();
        if rank == 1 {
            let bias = state.get_mut("fc2.bias").unwrap();
            *bias = Tensor::f32(&[10], &[0.5; 10]);
        }
        session.load_state(&state, true).unwrap();
        run(&mut session, &batch(0, rank, 2), true).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.starts_with("the weights of rank 1 differ from the weights of rank 0"), "{error}");
    }
}

#[test]
fn moments_of_zero_are_parts_of_complete_moments() {
    let settings =
        Settings { optimizer: "AdamOptimizer", strategy: Strategy::Zero, overlaps: false, window: 1 };
    let (mut complete, mut lone) = (0, settings.session(None));
    for step in 0..3 {
        run(&mut lone, &batch(step, 0, 1), true).unwrap();
    }
    let state = lone.state().unwrap();
    // One process has complete moments only: a flat one is refused.
    let flat = Tensor::f32(&[960], &state["Moment_1_fc2.weight"].to_vec::<f32>());
    let flat = [("Moment_1_fc2.weight".to_owned(), flat)].into();
    assert!(lone.load_state(&flat, true).unwrap_err().to_string().contains("but a value of float32[960]"));
    let results = on_ranks(3, |ranks| {
        let rank = ranks.rank();
        let mut session = settings.session(Some(ranks.with_strategy(Strategy::Zero).unwrap()));
        session.load_state(&state, true).unwrap();
        let own = session.state().unwrap();
        for (name, value) in own.iter().filter(|(name, _)| name.starts_with("Moment_1_")) {
            let weight = &name["Moment_1_".len()..];
            let range = session.updated_elements(weight);
            let all = state[name].to_vec::<f32>();
            assert_eq!(value.to_vec::<f32>(), all[range], "{name} of rank {rank}");
        }
        run(&mut session, &batch(3, rank, 3), true).unwrap();
        let shared = session.shared_weights().unwrap();
        (session.memory().moments, own.len(), shared.into_keys().collect::<Vec<_>>(), weights(&session))
    });
    run(&mut lone, &batch(3, 0, 1), true).unwrap();
    complete += lone.memory().moments;
    let sum = results.iter().map(|result| result.0).sum::<usize>();
    assert!((complete..complete + 2 * 3 * ALIGNMENT).contains(&sum), "{sum} bytes of {complete}");
    assert!(results.iter().all(|result| result.1 < state.len() && result.3 == results[0].3));
    assert_eq!(results[0].2, ["fc1.weight"]);
    let pairs = results[0].3.iter().zip(weights(&lone));
    assert!(pairs.into_iter().all(|(a, b)| (a - b).abs() < SUMS));
}

/// Communicator of two ranks with the same values, which exchanges nothing.
#[derive(Debug)]
struct Mirror {
    device: &'static str,
}

struct Done;

impl Pending for Done {
    fn wait(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

impl Communicator for Mirror {
    fn rank(&self) -> usize {
        0
    }

    fn size(&self) -> usize {
        2
    }

    fn reaches(&self, device: &str) -> bool {
        device == self.device
    }

    fn allows_threads(&self) -> bool {
        true
    }

    fn start(&self, collective: Collective) -> Result<Box<dyn Pending>> {
        // The other rank gathers the same numbers. Of weights it has another part.
        if let Collective::AllGather { operand, counts } = collective
            && operand.dtype() == DType::I64
            && counts[0] == counts[1]
        {
            let own = operand.memory().to_vec(operand.offset(), operand.bytes() / 2)?;
            operand.memory().write(operand.offset() + own.len(), &own)?;
        }
        Ok(Box::new(Done))
    }

    fn group(&self, _: &[usize]) -> Result<Arc<dyn Communicator>> {
        Ok(Arc::new(Mirror { device: self.device }))
    }

    fn abort(&self, _: &str) {}
}

fn mirrored(device: &'static str) -> DataParallel {
    let control = Arc::new(Control::new(Arc::new(Mirror { device })));
    DataParallel::new(control, Arc::new(Mirror { device }), 0)
}

#[test]
fn warm_step_copies_no_plane() {
    for strategy in [Strategy::AllReduce, Strategy::Zero] {
        for overlaps in [false, true] {
            let ranks = mirrored("cpu").overlapping(overlaps).with_strategy(strategy).unwrap();
            let settings = Settings { optimizer: "AdamOptimizer", strategy, overlaps, window: 1 };
            let mut session = settings.session(Some(ranks));
            let batch = batch(0, 0, 2);
            for _ in 0..3 {
                run(&mut session, &batch, true).unwrap();
            }
            LARGEST.store(0, Ordering::Relaxed);
            IS_RECORDED.store(true, Ordering::Relaxed);
            run(&mut session, &batch, true).unwrap();
            IS_RECORDED.store(false, Ordering::Relaxed);
            let largest = LARGEST.load(Ordering::Relaxed);
            let plane = session.memory().gradients;
            assert!(4 * largest < plane, "{strategy:?}: {largest} bytes of a plane of {plane}");
        }
    }
}

#[test]
fn ranks_on_a_device_out_of_reach_are_refused() {
    let parameters = TrainingParameters::new("loss").optimizer("SGDOptimizer").train(WEIGHTS);
    let model = setup::model_with_loss().unwrap();
    let ranks = Some(mirrored("webgpu"));
    let refused = TrainingSession::on_ranks(model, &parameters, ModuleOptions::default(), ranks).unwrap_err();
    assert!(matches!(refused, Error::Unreachable { .. }));
    assert_eq!(
        refused.to_string(),
        "2 ranks cannot train on cpu: they exchange gradients in host memory only; train on the CPU, or start one \
         process"
    );
}
