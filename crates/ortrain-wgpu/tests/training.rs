//! Trainings on the software driver beside the same on the CPU, from one checkpoint.

use std::sync::{Arc, OnceLock};

use ortrain::artifacts::{ArtifactOptions, Artifacts, Loss, OptimizerKind, generate};
use ortrain::{
    Backend, CheckpointState, Given, ModelSource, Module, ModuleOptions, Optimizer, Tensor, backend, collect,
};
use ortrain_wgpu::{Adapter, Wgpu};

const STEPS: usize = 20;
/// Losses of a device and of the CPU after so many steps differ by rounding in another order of sums.
const LOSS: f32 = 1e-4;

fn device() -> Arc<dyn Backend> {
    static DEVICE: OnceLock<Arc<dyn Backend>> = OnceLock::new();
    let open = || Wgpu::open(Adapter::Software).unwrap_or_else(|error| panic!("{error}"));
    DEVICE.get_or_init(|| Arc::new(open())).clone()
}

fn cpu() -> Arc<dyn Backend> {
    backend("cpu", 0).expect("there is a processor")
}

/// The artifacts of an example, all weights of which are trained.
fn artifacts(name: &str, weights: &[&str]) -> Artifacts {
    let path = format!("{}/../../examples/{name}.onnx", env!("CARGO_MANIFEST_DIR"));
    let options = ArtifactOptions {
        requires_grad: weights.iter().map(|&weight| weight.to_owned()).collect(),
        losses: vec![Loss::CrossEntropyLoss.into()],
        optimizer: Some(OptimizerKind::SGD.into()),
        ..ArtifactOptions::default()
    };
    generate(path.as_str().into(), options).expect("it can be trained")
}

/// Steps of a training on a backend: their losses.
fn train(
    made: &Artifacts,
    state: &mut CheckpointState,
    backend: &Arc<dyn Backend>,
    batches: &[[Tensor; 2]],
) -> Vec<f32> {
    let source = |model| ModelSource::from_proto(model).expect("it is small");
    let options = ModuleOptions::default().backend(backend.clone());
    let mut module = Module::new(source(&made.training_model), state, None, options).expect("it can run");
    let model = made.optimizer_model.as_ref().expect("it was asked for");
    let mut optimizer = Optimizer::new(source(model), state, &module).expect("it fits");
    optimizer.set_learning_rate(state, 0.05).expect("it is a rate");
    let step = |batch: &[Tensor; 2]| {
        let inputs = batch.each_ref().map(Given::from);
        let results = collect(|deliver| module.train_step(state, &inputs, deliver)).expect("it runs");
        optimizer.step(state, &module).expect("it runs");
        module.lazy_reset_grad();
        results[0].to_vec::<f32>()[0]
    };
    batches.iter().map(step).collect()
}

/// Batches that look random and are the same every time.
fn batches(dims: &[usize], count: usize) -> Vec<[Tensor; 2]> {
    let elements: usize = dims.iter().product();
    let batch = |k: usize| {
        let x: Vec<f32> = (0..elements).map(|i| ((i * 31 + k * 17) as f32 * 0.37).sin()).collect();
        let labels: Vec<i64> = (0..dims[0]).map(|row| ((row * 7 + k) % 10) as i64).collect();
        [Tensor::f32(dims, &x), Tensor::i64(&[dims[0]], &labels)]
    };
    (0..count).map(batch).collect()
}

fn state_of(made: &Artifacts) -> CheckpointState {
    CheckpointState::from_checkpoint(made.checkpoint.clone()).expect("it is whole")
}

#[test]
fn a_perceptron_trains_as_on_the_processor() {
    let made = artifacts("perceptron", &["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]);
    let batches = batches(&[16, 64], STEPS);
    let run = |backend: &Arc<dyn Backend>| {
        let mut state = state_of(&made);
        let losses = train(&made, &mut state, backend, &batches);
        assert_eq!(state.device(), backend.device());
        (losses, state.to_bytes(true).expect("it is small"))
    };
    let ((want, _), (got, bytes)) = (run(&cpu()), run(&device()));
    for (step, (want, got)) in want.iter().zip(&got).enumerate() {
        assert!((want - got).abs() <= LOSS, "step {step}: {got}, but {want} on the processor");
    }
    assert!(want[STEPS - 1].is_finite());
    assert!(run(&device()).1 == bytes, "another run has other bits");

    // After some steps on one the checkpoint goes on on the other; on one device it has the bits of a run without a stop.
    for (first, then) in [(device(), cpu()), (cpu(), device()), (device(), device())] {
        let mut state = state_of(&made);
        let mut losses = train(&made, &mut state, &first, &batches[..5]);
        let file = state.to_bytes(true).expect("it is small");
        let mut state = CheckpointState::from_bytes(file).expect("it is a checkpoint");
        losses.extend(train(&made, &mut state, &then, &batches[5..]));
        for (step, (want, got)) in want.iter().zip(&losses).enumerate() {
            assert!((want - got).abs() <= LOSS, "step {step}: {got}, but {want} on the processor");
        }
        if first.device() == then.device() {
            assert!(state.to_bytes(true).expect("it is small") == bytes, "a resumed run has other bits");
        }
    }
}

#[test]
fn a_label_out_of_range_changes_nothing() {
    let made = artifacts("perceptron", &["fc2.weight", "fc2.bias"]);
    let mut state = state_of(&made);
    let source = |model| ModelSource::from_proto(model).expect("it is small");
    let x = Tensor::f32(&[3, 64], &[0.5; 192]);
    let labels = Tensor::i64(&[3], &[1, 2, 10]);
    let inputs = [Given::from(&x), Given::from(&labels)];
    let error = |backend: Arc<dyn Backend>, state: &mut CheckpointState| {
        let options = ModuleOptions::default().backend(backend);
        let mut module = Module::new(source(&made.training_model), state, None, options).expect("it can run");
        let failed = module.train_step(state, &inputs, &mut |_, _, _, _| Ok(()));
        let gradients = module.gradient_planes()[0].is_zero().expect("it can be read");
        (failed.map_err(|error| error.to_string()), gradients)
    };
    let (want, got) = (error(cpu(), &mut state), error(device(), &mut state));
    assert_eq!(got, want);
    assert!(want.0.is_err() && want.1);
}
