//! Training in one session: bit-identical results at every thread count, the size of its programs, and
//! memory.

#[expect(dead_code, unreachable_pub, reason = "examples of the documentation use all of it")]
mod setup {
    include!("../doc/setup.rs");
}

use ortrain::classic::{CallOptions, TrainingParameters, TrainingSession};
use std::sync::Arc;

use ortrain::{DType, InputView, Memory, ModuleOptions, OutputTarget, Tensor, backend};

const WEIGHTS: [&str; 4] = ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight"];
/// Rows of a batch, sufficient for several threads.
const ROWS: usize = 2_000;

fn session(optimizer: &str, weights: &[&str], narrow: Option<DType>) -> TrainingSession {
    let mut parameters = TrainingParameters::new("loss").optimizer(optimizer).train(weights.iter().copied());
    parameters.mixed_precision = narrow;
    let model = setup::model_with_loss().expect("it has a loss");
    TrainingSession::new(model, &parameters, ModuleOptions::default()).expect("it trains")
}

/// Runs some steps and returns the state.
fn run_steps(session: &mut TrainingSession, scale: f32) -> Vec<(String, Tensor)> {
    let x: Vec<f32> = (0..ROWS * 64).map(|k| (k as f32 * 0.37).sin()).collect();
    let labels: Vec<i64> = (0..ROWS).map(|row| (row * 7 % 10) as i64).collect();
    let (x, labels) = (Tensor::f32(&[ROWS, 64], &x), Tensor::i64(&[ROWS], &labels));
    let (rate, scale) = (Tensor::f32(&[1], &[0.01]), Tensor::f32(&[1], &[scale]));
    let mut feeds = vec![
        ("x", InputView::from(&x)),
        ("labels", InputView::from(&labels)),
        ("Learning_Rate", InputView::from(&rate)),
    ];
    if let Some(name) = session.loss_scale_input_name() {
        feeds.push((name, InputView::from(&scale)));
    }
    for _ in 0..3 {
        session.run_tensors(&feeds, &["loss"], CallOptions::default()).expect("it runs");
    }
    session.state().expect("it is whole").into_iter().collect()
}

#[test]
fn same_bits_at_every_thread_count() {
    for optimizer in ["SGDOptimizer", "AdamOptimizer", "LambOptimizer"] {
        for narrow in [None, Some(DType::F16), Some(DType::BF16)] {
            let run = |threads: usize| {
                backend("cpu", threads).expect("there is a CPU");
                run_steps(&mut session(optimizer, &WEIGHTS, narrow), 1024.0)
            };
            let expected = run(1);
            for threads in [1, 2, 3] {
                assert_eq!(
                    expected,
                    run(threads),
                    "{optimizer}, {narrow:?}: {threads} threads differ from one"
                );
            }
        }
    }
}

/// Counts the instructions of the optimizer's programs in a dump. The optimizer is its last part.
fn instructions_of_update(session: &TrainingSession) -> usize {
    let dump = session.dump();
    let optimizer = dump.rfind("\ngraph").map_or("", |at| &dump[at..]);
    optimizer.lines().filter(|line| line.contains(" <- ")).count()
}

#[test]
fn update_size_is_independent_of_weight_count() {
    for optimizer in ["SGDOptimizer", "AdamOptimizer", "LambOptimizer"] {
        let count = |weights: &[&str]| {
            let mut session = session(optimizer, weights, None);
            run_steps(&mut session, 1.0);
            instructions_of_update(&session)
        };
        let (two, four) = (count(&WEIGHTS[2..]), count(&WEIGHTS));
        assert!(two > 0, "the dump shows the update");
        assert_eq!(two, four, "{optimizer}");
    }
}

#[test]
fn mixed_precision_needs_no_extra_memory() {
    let memory = |narrow: Option<DType>| {
        let mut session = session("AdamOptimizer", &WEIGHTS, narrow);
        run_steps(&mut session, 1024.0);
        session.memory().total()
    };
    let (wide, narrow) = (memory(None), memory(Some(DType::F16)));
    assert!(narrow <= wide, "{narrow} bytes in float16, {wide} in float32");
}

#[test]
fn non_finite_step_changes_nothing() {
    for optimizer in ["SGDOptimizer", "AdamOptimizer", "LambOptimizer"] {
        let mut session = session(optimizer, &WEIGHTS, Some(DType::F16));
        let before: Vec<(String, Tensor)> = session.state().expect("it is whole").into_iter().collect();
        assert_eq!(run_steps(&mut session, 2f32.powi(40)), before, "{optimizer}");
        assert_ne!(run_steps(&mut session, 1024.0), before, "{optimizer} goes on");
    }
}

/// A batch in memory of the caller, and the same batch as tensors.
struct Batch {
    memory: Arc<Memory>,
    x: Tensor,
    labels: Tensor,
}

const DIMS: [usize; 2] = [ROWS, 64];

impl Batch {
    fn new() -> Batch {
        let x: Vec<f32> = (0..ROWS * 64).map(|k| (k as f32 * 0.37).sin()).collect();
        let labels: Vec<i64> = (0..ROWS).map(|row| (row * 7 % 10) as i64).collect();
        let (x, labels) = (Tensor::f32(&DIMS, &x), Tensor::i64(&[ROWS], &labels));
        let memory = Arc::new(Memory::new(x.data().len()));
        memory.write(0, x.data()).expect("it is there");
        Batch { memory, x, labels }
    }

    /// Returns the feeds of a run, with `x` in place or as a tensor.
    fn feeds<'a>(
        &'a self,
        in_place: bool,
        rate: &'a Tensor,
        scale: &'a Tensor,
    ) -> Vec<(&'a str, InputView<'a>)> {
        let shared = InputView::in_memory(DType::F32, &DIMS, &self.memory);
        vec![
            ("x", if in_place { shared } else { InputView::from(&self.x) }),
            ("labels", InputView::from(&self.labels)),
            ("Learning_Rate", InputView::from(rate)),
            ("loss_scale_input", InputView::from(scale)),
        ]
    }
}

#[test]
fn run_reads_inputs_in_place() {
    let batch = Batch::new();
    let (rate, scale) = (Tensor::f32(&[1], &[0.01]), Tensor::f32(&[1], &[1024.0]));
    let restricted = CallOptions { only_execute_path_to_fetches: true, ..CallOptions::default() };
    for narrow in [None, Some(DType::F16)] {
        let run = |in_place: bool| {
            let mut session = session("AdamOptimizer", &WEIGHTS, narrow);
            let name = session.loss_scale_input_name();
            let mut feeds = batch.feeds(in_place, &rate, &scale);
            match (name, feeds.last_mut()) {
                (Some(name), Some(last)) => last.0 = name,
                _ => feeds.truncate(3),
            }
            let mut outputs = Vec::new();
            for options in [CallOptions::default(), restricted, CallOptions::default()] {
                outputs.extend(
                    session.run_bound(&feeds, &mut [(0, None), (1, None)], options).expect("it runs"),
                );
            }
            let work = session.memory().work;
            ((outputs, session.state().expect("it is whole")), work)
        };
        let ((results, work), (expected, with_copies)) = (run(true), run(false));
        assert_eq!(results, expected, "{narrow:?}");
        // In float16, the copy shares memory with later values.
        if narrow.is_none() {
            let bytes = batch.x.data().len();
            assert!(work + bytes <= with_copies, "{work} and {bytes} are above {with_copies}");
        }
    }
}

#[test]
fn written_inputs_are_copied() {
    let batch = Batch::new();
    let (rate, scale) = (Tensor::f32(&[1], &[0.01]), Tensor::f32(&[1], &[1.0]));
    let mut session = session("SGDOptimizer", &WEIGHTS, None);
    let feeds = &batch.feeds(true, &rate, &scale)[..3];
    let expected = session.run_bound(feeds, &mut [(1, None)], CallOptions::default()).expect("it runs");
    // The logits overwrite the memory of the inputs.
    let dims = [ROWS, 10];
    let target = OutputTarget::in_memory(DType::F32, &dims, &batch.memory);
    let restricted = CallOptions { only_execute_path_to_fetches: true, ..CallOptions::default() };
    let logits = session.run_bound(feeds, &mut [(1, None)], restricted).expect("it runs");
    assert_ne!(logits, expected, "the weights have changed");
    session.run_bound(feeds, &mut [(1, Some(target))], restricted).expect("it runs");
    let original = batch.memory.to_vec(0, ROWS * 10 * 4).expect("it is there");
    assert_eq!(logits[0].as_ref().map(|tensor| tensor.data().to_vec()), Some(original));
}

#[test]
fn training_resumes_within_window() {
    let make = || {
        let mut parameters = TrainingParameters::new("loss").optimizer("AdamOptimizer").train(WEIGHTS);
        parameters.gradient_accumulation_steps = 3;
        let model = setup::model_with_loss().expect("it has a loss");
        TrainingSession::new(model, &parameters, ModuleOptions::default()).expect("it trains")
    };
    let batch = Batch::new();
    let (rate, scale) = (Tensor::f32(&[1], &[0.01]), Tensor::f32(&[1], &[1.0]));
    let feeds = &batch.feeds(false, &rate, &scale)[..3];
    let gathers = CallOptions { only_execute_path_to_fetches: true, ..CallOptions::default() };
    let run = |session: &mut TrainingSession, steps: std::ops::Range<usize>| {
        for step in steps {
            let updates = step % 3 == 2;
            let name = if updates { "loss" } else { "Group_Accumulated_Gradients" };
            let output =
                session.outputs().iter().position(|output| output.name == name).expect("it is there");
            let options = if updates { CallOptions::default() } else { gathers };
            session.run_bound(feeds, &mut [(output, None)], options).expect("it runs");
        }
    };
    let mut uninterrupted = make();
    run(&mut uninterrupted, 0..7);
    for stop in 1..7 {
        let mut first = make();
        run(&mut first, 0..stop);
        let mut second = make();
        second.load_state(&first.state().expect("it is whole"), true).expect("it fits");
        second
            .load_accumulated_gradients(&first.accumulated_gradients().expect("it is there"))
            .expect("it fits");
        second.set_train_steps(first.train_steps());
        assert_eq!(first.accumulated_gradients().expect("it is there").is_empty(), stop % 3 == 0);
        run(&mut second, stop..7);
        assert_eq!(
            second.state().expect("it is whole"),
            uninterrupted.state().expect("it is whole"),
            "after {stop}"
        );
        assert_eq!(
            second.accumulated_gradients().expect("it is there"),
            uninterrupted.accumulated_gradients().expect("it is there")
        );
    }
}

#[test]
fn rejects_invalid_accumulated_gradients() {
    let mut session = session("SGDOptimizer", &WEIGHTS[..1], None);
    let sums = |name: &str, len: usize| [(name.to_owned(), Tensor::f32(&[len], &vec![0.0; len]))].into();
    let refused = |session: &mut TrainingSession, sums| {
        session.load_accumulated_gradients(&sums).err().map(|error| error.to_string())
    };
    let every =
        "sums of gradients need accumulation, but gradient_accumulation_steps is 1: every run is an update";
    assert_eq!(refused(&mut session, sums("fc1.bias", 96)).as_deref(), Some(every));
    let mut parameters = TrainingParameters::new("loss").optimizer("SGDOptimizer").train(["fc1.bias"]);
    parameters.gradient_accumulation_steps = 2;
    let model = setup::model_with_loss().expect("it has a loss");
    let mut session = TrainingSession::new(model, &parameters, ModuleOptions::default()).expect("it trains");
    let of = "the sum of the gradients of weight";
    let shape = format!("{of} \"fc1.bias\" is float32[96], but a value of float32[95] was given");
    assert_eq!(refused(&mut session, sums("fc1.bias", 95)), Some(shape));
    assert_eq!(refused(&mut session, sums("fc2.bias", 10)), Some(format!("{of} \"fc1.bias\" is missing")));
    assert_eq!(refused(&mut session, sums("fc1.bias", 96)), None);
}
