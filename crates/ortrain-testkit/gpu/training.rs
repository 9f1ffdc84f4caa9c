//! Training on the device, compared with the CPU, from one checkpoint.

use std::sync::Arc;

use ortrain::artifacts::{Artifacts, OptimizerKind};
use ortrain::optim::{Group, OPTIMIZERS, OptimizerSpec, optimizer_model};
use ortrain::{
    Backend, CheckpointState, DType, InputView, ModelSource, Module, ModuleOptions, Optimizer, RunOptions,
    Tensor, backend, collect,
};

use super::example::{WEIGHTS, artifacts};
use super::workload;
use crate::common::device;

const STEPS: usize = 20;
/// Maximum norm for clipped gradients, below the norm of the first step.
const MAX_NORM: f64 = 1.0;
/// Tolerance for losses on a device and on the CPU, which sum in different orders.
const LOSS_TOLERANCE: f32 = 1e-4;

fn cpu() -> Arc<dyn Backend> {
    backend("cpu", 0).expect("there is a processor")
}

/// Trains on a backend and returns the losses.
fn train(
    artifacts: &Artifacts,
    state: &mut CheckpointState,
    backend: &Arc<dyn Backend>,
    batches: &[[Tensor; 2]],
) -> Vec<f32> {
    let source = |model| ModelSource::from_proto(model).expect("it fits in memory");
    let options = ModuleOptions::from(RunOptions::default().backend(backend.clone()));
    let mut module =
        Module::new(source(&artifacts.training_model), state, None, options).expect("it can run");
    let model = artifacts.optimizer_model.as_ref().expect("it was requested");
    let mut optimizer = Optimizer::new(source(model), state, &module).expect("it fits");
    optimizer.set_learning_rate(state, 0.05).expect("valid learning rate");
    let step = |batch: &[Tensor; 2]| {
        let inputs = batch.each_ref().map(InputView::from);
        let results = collect(|deliver| module.train_step(state, &inputs, deliver)).expect("it runs");
        optimizer.step(state, &module).expect("it runs");
        module.lazy_reset_grad();
        results[0].to_vec::<f32>()[0]
    };
    batches.iter().map(step).collect()
}

/// Returns deterministic pseudorandom batches.
pub(crate) fn batches(dims: &[usize], count: usize) -> Vec<[Tensor; 2]> {
    let elements: usize = dims.iter().product();
    let batch = |k: usize| {
        let x: Vec<f32> = (0..elements).map(|i| ((i * 31 + k * 17) as f32 * 0.37).sin()).collect();
        let labels: Vec<i64> = (0..dims[0]).map(|row| ((row * 7 + k) % 10) as i64).collect();
        [Tensor::f32(dims, &x), Tensor::i64(&[dims[0]], &labels)]
    };
    (0..count).map(batch).collect()
}

/// Loads the state of artifacts.
pub(crate) fn state_of(artifacts: &Artifacts) -> CheckpointState {
    CheckpointState::from_checkpoint(artifacts.checkpoint.clone()).expect("it can be read")
}

#[test]
fn a_perceptron_trains_as_on_the_processor() {
    for optimizer in [OptimizerKind::SGD, OptimizerKind::AdamW] {
        trains_as_on_the_processor(&artifacts("perceptron", &WEIGHTS, optimizer));
    }
}

#[test]
fn lenet_trains_as_on_the_processor() {
    let weights = |dims: &[i64]| {
        let scale = (2.0 / dims[1..].iter().product::<i64>().max(1) as f32).sqrt();
        let elements = 0..dims.iter().product::<i64>();
        elements.flat_map(|i| (scale * (i as f32 * 0.61).sin()).to_le_bytes()).collect()
    };
    train_and_compare(&workload::artifacts_of("lenet", weights, true), &batches(&[4, 1, 28, 28], STEPS));
}

fn trains_as_on_the_processor(artifacts: &Artifacts) {
    train_and_compare(artifacts, &batches(&[16, 64], STEPS));
}

/// Compares twenty steps on the processor and on the device, and steps that continue on the other one.
fn train_and_compare(artifacts: &Artifacts, batches: &[[Tensor; 2]]) {
    let run = |backend: &Arc<dyn Backend>| {
        let mut state = state_of(artifacts);
        let losses = train(artifacts, &mut state, backend, batches);
        assert_eq!(state.device(), backend.device());
        (losses, state.to_bytes(true).expect("it fits in memory"))
    };
    let ((expected, _), (got, bytes)) = (run(&cpu()), run(&device()));
    for (step, (expected, got)) in expected.iter().zip(&got).enumerate() {
        assert!(
            (expected - got).abs() <= LOSS_TOLERANCE,
            "step {step}: {got}, but {expected} on the processor"
        );
    }
    assert!(expected[STEPS - 1].is_finite());
    assert!(run(&device()).1 == bytes, "another run has other bits");

    // A checkpoint from one device continues on the other. On one device, the result has the bits of an uninterrupted
    // run.
    for (first, then) in [(device(), cpu()), (cpu(), device()), (device(), device())] {
        let mut state = state_of(artifacts);
        let mut losses = train(artifacts, &mut state, &first, &batches[..5]);
        let file = state.to_bytes(true).expect("it fits in memory");
        let mut state = CheckpointState::from_bytes(file).expect("it is a checkpoint");
        losses.extend(train(artifacts, &mut state, &then, &batches[5..]));
        for (step, (expected, got)) in expected.iter().zip(&losses).enumerate() {
            assert!(
                (expected - got).abs() <= LOSS_TOLERANCE,
                "step {step}: {got}, but {expected} on the processor"
            );
        }
        if first.device() == then.device() {
            assert!(
                state.to_bytes(true).expect("it fits in memory") == bytes,
                "a resumed run has other bits"
            );
        }
    }
}

/// The host converts the settings of a row to float32 numbers. Norms are float64 sums, which the device computes with
/// integer arithmetic.
#[test]
fn every_optimizer_steps_as_on_the_processor() {
    for row in OPTIMIZERS.iter().filter(|row| OptimizerSpec::new(row.name).is_ok()) {
        let [unclipped, clipped] = [None, Some(MAX_NORM)].map(|max_norm| {
            let mut spec = OptimizerSpec::new(row.name).expect("it is a row");
            spec.groups =
                vec![Group { parameters: vec!["fc1.bias".into()], lr_factor: 0.5, ..Group::default() }];
            spec.max_norm = max_norm;
            steps_as_on_the_processor(row.name, spec)
        });
        assert!(row.name != "SGD" || unclipped != clipped, "gradients are no longer than {MAX_NORM}");
    }
}

/// Returns the weights after some steps on the processor, and compares them with the weights on the device.
fn steps_as_on_the_processor(name: &str, spec: OptimizerSpec) -> Vec<Vec<f32>> {
    let max_norm = spec.max_norm;
    let mut trained = artifacts("perceptron", &WEIGHTS, OptimizerKind::SGD);
    let model =
        optimizer_model(&spec.complete().expect("it is valid"), &[DType::F32]).expect("it fits in memory");
    trained.optimizer_model = Some(model);
    let run = |backend: &Arc<dyn Backend>| {
        let mut state = state_of(&trained);
        train(&trained, &mut state, backend, &batches(&[16, 64], 4));
        let weights = state.parameters().expect("it can be read");
        weights.map(|view| view.to_tensor().expect("it can be read").to_vec::<f32>()).collect::<Vec<_>>()
    };
    let expected = run(&cpu());
    for (expected, got) in expected.iter().flatten().zip(run(&device()).iter().flatten()) {
        assert!(
            (expected - got).abs() <= LOSS_TOLERANCE,
            "{name}, norm {max_norm:?}: {got}, but {expected} on the processor"
        );
    }
    expected
}

/// Large writes are split into pieces, and the device consumes each piece before the next.
#[test]
fn large_memory_stores_its_bytes() {
    const BYTES: usize = 40 << 20;
    let memory = device().allocate(BYTES, BYTES).expect("it is not much");
    let bytes: Vec<u8> = (0..BYTES).map(|k| (k % 251) as u8).collect();
    memory.write(0, &bytes).expect("the device works");
    memory.write(3, &[7; 6]).expect("the device works");
    let read = memory.to_vec(0, BYTES).expect("the device works");
    assert_eq!(read[..3], bytes[..3]);
    assert_eq!(read[3..9], [7; 6]);
    assert!(read[9..] == bytes[9..]);
    let copy = memory.copy(12, BYTES - 13).expect("enough memory");
    assert!(copy.to_vec(0, BYTES - 13).expect("the device works") == read[12..BYTES - 1]);
}

/// An excessive allocation is an error, and the device stays usable.
#[test]
fn too_much_memory_is_an_error() {
    let error = device().allocate(1 << 60, 1 << 60).expect_err("that is too much").to_string();
    assert!(
        error.starts_with(&format!(
            "the device {:?} cannot allocate 1152921504606846976 bytes",
            device().device()
        )),
        "{error}"
    );
}

#[test]
fn a_label_out_of_range_changes_nothing() {
    let trained = artifacts("perceptron", &["fc2.weight", "fc2.bias"], OptimizerKind::SGD);
    let mut state = state_of(&trained);
    let source = |model| ModelSource::from_proto(model).expect("it fits in memory");
    let x = Tensor::f32(&[3, 64], &[0.5; 192]);
    let labels = Tensor::i64(&[3], &[1, 2, 10]);
    let inputs = [InputView::from(&x), InputView::from(&labels)];
    let error = |backend: Arc<dyn Backend>, state: &mut CheckpointState| {
        let options = ModuleOptions::from(RunOptions::default().backend(backend));
        let mut module =
            Module::new(source(&trained.training_model), state, None, options).expect("it can run");
        let failed = module.train_step(state, &inputs, &mut |_, _| Ok(()));
        let gradients = module.gradient_planes()[0].is_zero().expect("it can be read");
        (failed.map_err(|error| error.to_string()), gradients)
    };
    let (expected, got) = (error(cpu(), &mut state), error(device(), &mut state));
    assert_eq!(got, expected);
    assert!(expected.0.is_err() && expected.1);
}
