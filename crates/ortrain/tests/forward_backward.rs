//! Forward and backward pass as two calls: bit-identical to the joint step, any number of live passes,
//! memory, errors.
#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;

use common::{Workload, batch, module_on, recorded, run_input, state_of};
use ortrain::artifacts::BatchNormMode;
use ortrain::{
    Backend, CheckpointState, DType, ErrorKind, ForwardBackward, ForwardBackwardOptions, InputBytes,
    InputView, LiveForward, Memory, ModelSource, Module, ModuleOptions, Result, RunOptions, TargetBytes,
    Tensor, backend, collect,
};

/// Returns a model with loss and embedded weights, from the models of a training.
fn with_loss(module: &Module, state: &CheckpointState) -> ModelSource {
    let loss = module.outputs(true)[0].name.clone();
    ModelSource::from_proto(&module.inference_model(state, &[&loss]).unwrap().proto).unwrap()
}

/// Weights in memory of the caller, and buffers for their gradients.
struct CallerMemory {
    weights: Vec<Arc<Memory>>,
    gradient_buffers: Vec<Arc<Memory>>,
}

impl CallerMemory {
    fn new(both: &ForwardBackward) -> CallerMemory {
        let weights = both.weights().iter().map(|weight| weight.to_memory().unwrap()).collect();
        let gradient_buffers =
            both.weights().iter().map(|weight| weight.allocate_gradient().unwrap()).collect();
        CallerMemory { weights, gradient_buffers }
    }

    fn forward(
        &self,
        both: &ForwardBackward,
        inputs: &[InputView<'_>],
    ) -> Result<(LiveForward, Vec<Tensor>)> {
        let mut live = None;
        let outputs = collect(|deliver| {
            live = Some(both.forward(&both.weight_views(&self.weights), inputs, deliver)?);
            Ok(())
        })?;
        Ok((live.unwrap(), outputs))
    }

    fn backward(
        &self,
        both: &ForwardBackward,
        live: &mut LiveForward,
        seeds: &[Tensor],
    ) -> Result<Vec<Tensor>> {
        let seeds: Vec<InputView<'_>> = seeds.iter().map(run_input).collect();
        collect(|deliver| {
            both.backward(live, &seeds, &mut both.gradient_targets(&self.gradient_buffers), deliver)
        })
    }

    /// Returns the gradient of each weight.
    fn gradients(&self, both: &ForwardBackward) -> Vec<Vec<u8>> {
        both.weights()
            .iter()
            .zip(&self.gradient_buffers)
            .map(|(weight, buffer)| buffer.to_vec(0, weight.initial.data().len()).unwrap())
            .collect()
    }
}

fn ones(tensor: &Tensor) -> Tensor {
    Tensor::filled(tensor.dtype(), tensor.dims(), 1.0)
}

/// Compares some steps of both variants. The second batch has another number of rows.
fn same_bits(net: &mut Workload, options: ForwardBackwardOptions, module: ModuleOptions, name: &str) {
    let train = ModelSource::from_proto(&net.artifacts.training_model).unwrap();
    let eval = ModelSource::from_proto(&net.artifacts.eval_model).unwrap();
    let mut joint = Module::new(train, &mut net.state, Some(eval), module).unwrap();
    let trained: Vec<&String> = net.trained.iter().collect();
    let options = options.weights(trained.into_iter().cloned()).inputs(Vec::<String>::new());
    let both = ForwardBackward::new(with_loss(&joint, &net.state), options).unwrap();
    let hands = CallerMemory::new(&both);
    for seed in 0..3 {
        let (x, labels) = net.batch(seed);
        let inputs = [run_input(&x), run_input(&labels)];
        let expected = collect(|deliver| joint.train_step(&mut net.state, &inputs, deliver)).unwrap();
        let (mut live, got) = hands.forward(&both, &inputs).unwrap();
        assert_eq!(got[0].data(), expected[0].data(), "{name}: loss of step {seed}");
        hands.backward(&both, &mut live, &[ones(&got[0])]).unwrap();
        for (weight, got) in both.weights().iter().zip(hands.gradients(&both)) {
            let expected = joint.gradient(&weight.name).unwrap().to_tensor().unwrap();
            assert_eq!(&got[..], &expected.data()[..], "{name}: gradient of {} in step {seed}", weight.name);
        }
        for (statistic, memory) in both.statistics() {
            let expected = net.state.parameter(&statistic.name).unwrap().to_tensor().unwrap();
            let got = memory.to_vec(0, statistic.initial.data().len()).unwrap();
            assert_eq!(&got[..], &expected.data()[..], "{name}: statistic {} of step {seed}", statistic.name);
        }
        joint.lazy_reset_grad();
    }
}

#[test]
fn two_calls_match_joint_step() {
    for name in ["lenet", "mobilenetv2_96"] {
        let options = || ForwardBackwardOptions::default().training(BatchNormMode::Auto);
        same_bits(&mut Workload::new(name, 2), options(), ModuleOptions::default(), name);
    }
    let seeded = |net: &mut Workload| net.state.set_seed(11);
    let mut net = Workload::with_dropout("lenet", 3);
    seeded(&mut net);
    let options = ForwardBackwardOptions::default().training(BatchNormMode::Auto).seed(11);
    same_bits(&mut net, options, ModuleOptions::default(), "dropout");
}

#[test]
fn memory_limit_preserves_results() {
    let mut net = Workload::new("mobilenetv2_96", 4);
    let both = {
        let train = ModelSource::from_proto(&net.artifacts.training_model).unwrap();
        let eval = ModelSource::from_proto(&net.artifacts.eval_model).unwrap();
        let joint = Module::new(train, &mut net.state, Some(eval), ModuleOptions::default()).unwrap();
        let options =
            ForwardBackwardOptions::default().training(BatchNormMode::Auto).inputs(Vec::<String>::new());
        ForwardBackward::new(with_loss(&joint, &net.state), options.weights(net.trained.clone())).unwrap()
    };
    let (x, labels) = net.batch(1);
    let (live, _) = CallerMemory::new(&both).forward(&both, &[run_input(&x), run_input(&labels)]).unwrap();
    let weights: usize = both.weights().iter().map(|weight| 2 * weight.initial.data().len()).sum();
    let limit = weights + live.bytes() * 8 / 10 + (1 << 20);
    drop(live);
    let options = ForwardBackwardOptions::default()
        .training(BatchNormMode::Auto)
        .run(RunOptions::default().memory_limit(limit));
    same_bits(&mut net, options, ModuleOptions::default(), "within a limit");
}

fn perceptron(options: ForwardBackwardOptions) -> (CheckpointState, Module, ForwardBackward) {
    let mut state = state_of("mlp_adamw_ce");
    let module = module_on("mlp_adamw_ce", &mut state);
    let both = ForwardBackward::new(with_loss(&module, &state), options).unwrap();
    (state, module, both)
}

#[test]
fn live_passes_of_other_sizes_end_in_any_order() {
    let (mut state, mut module, both) = perceptron(ForwardBackwardOptions::default());
    let hands = CallerMemory::new(&both);
    let batches = [batch(4, 1), batch(7, 2)];
    let expected: Vec<Vec<Vec<u8>>> = batches
        .iter()
        .map(|(x, labels)| {
            module.lazy_reset_grad();
            collect(|deliver| module.train_step(&mut state, &[run_input(x), run_input(labels)], deliver))
                .unwrap();
            let gradient = |name: &str| module.gradient(name).unwrap().to_tensor().unwrap().data().to_vec();
            both.weights().iter().map(|weight| gradient(&weight.name)).collect()
        })
        .collect();
    for order in [[0, 1], [1, 0]] {
        let mut live: Vec<LiveForward> = batches
            .iter()
            .map(|(x, labels)| hands.forward(&both, &[run_input(x), run_input(labels)]).unwrap().0)
            .collect();
        assert_eq!(both.live_bytes(), live[0].bytes() + live[1].bytes());
        for k in order {
            let of_x = hands.backward(&both, &mut live[k], &[Tensor::f32(&[], &[1.0])]).unwrap();
            assert_eq!(of_x[0].dims(), batches[k].0.dims());
            assert_eq!(hands.gradients(&both), expected[k], "pass {k} of {order:?}");
        }
        drop(live);
        assert_eq!(both.live_bytes(), 0);
    }
}

#[test]
fn dropped_passes_free_memory() {
    let (_, _, both) = perceptron(ForwardBackwardOptions::default());
    let hands = CallerMemory::new(&both);
    let (x, labels) = batch(8, 3);
    for _ in 0..1000 {
        hands.forward(&both, &[run_input(&x), run_input(&labels)]).unwrap();
    }
    assert_eq!(both.live_bytes(), 0);
    assert!(hands.weights.iter().all(|memory| Arc::strong_count(memory) == 1), "nothing keeps the weights");
    let live: Vec<LiveForward> =
        (0..20).map(|_| hands.forward(&both, &[run_input(&x), run_input(&labels)]).unwrap().0).collect();
    assert_eq!(both.live_bytes(), live.iter().map(LiveForward::bytes).sum::<usize>());
    drop(live);
    assert_eq!(both.live_bytes(), 0);
}

#[test]
fn evaluation_matches_model() {
    let (state, mut module, both) = perceptron(ForwardBackwardOptions::default());
    let hands = CallerMemory::new(&both);
    let (x, labels) = batch(5, 4);
    let inputs = [run_input(&x), run_input(&labels)];
    let expected = collect(|deliver| module.eval_step(&state, &inputs, deliver)).unwrap();
    let got = collect(|deliver| both.evaluate(&both.weight_views(&hands.weights), &inputs, deliver)).unwrap();
    assert_eq!(got[0].data(), expected[0].data());
    // Other weights give another loss.
    hands.weights[0].write(0, &1.0_f32.to_le_bytes()).unwrap();
    let other =
        collect(|deliver| both.evaluate(&both.weight_views(&hands.weights), &inputs, deliver)).unwrap();
    assert_ne!(got[0].data(), other[0].data());
}

#[test]
fn rejects_invalid_buffers_without_changes() {
    let (_, _, both) = perceptron(ForwardBackwardOptions::default());
    let hands = CallerMemory::new(&both);
    let (x, labels) = batch(4, 1);
    let inputs = [run_input(&x), run_input(&labels)];
    let weights = both.weight_views(&hands.weights);
    let message = |error: ortrain::Error| {
        assert!(matches!(error.kind(), ErrorKind::InvalidArgument | ErrorKind::Fail), "{error}");
        error.to_string()
    };
    let nothing = &mut |_: usize, _: ortrain::OutputView<'_>| Ok(());
    let error = message(both.forward(&weights[1..], &inputs, nothing).unwrap_err());
    assert!(error.starts_with("expected 4 tensors, one for each weight"), "{error}");
    let mut wrong = weights.clone();
    wrong[0].dims = &[3];
    let error = message(both.forward(&wrong, &inputs, nothing).unwrap_err());
    assert!(error.contains("but it is float32[3]"), "{error}");
    let small = Arc::new(Memory::new(4));
    wrong[0] = InputView { bytes: InputBytes::Memory(&small), ..weights[0] };
    let error = message(both.forward(&wrong, &inputs, nothing).unwrap_err());
    assert!(error.contains("but it is 4 bytes"), "{error}");

    let (mut live, outputs) = hands.forward(&both, &inputs).unwrap();
    let gradient_of_ones = ones(&outputs[0]);
    for (seeds, expected) in [
        (vec![], "expected 1 gradients, one for each float output"),
        (vec![gradient_of_ones.clone(), gradient_of_ones.clone()], ", got 2"),
        (vec![Tensor::f32(&[2], &[1.0; 2])], "is float32[2], but the output is float32[]"),
        (vec![Tensor::filled(DType::F64, &[], 1.0)], "is float64[], but the output is float32[]"),
    ] {
        let error = message(hands.backward(&both, &mut live, &seeds).unwrap_err());
        assert!(error.contains(expected), "{error}");
        assert!(hands.gradient_buffers.iter().all(|buffer| buffer.is_zero().unwrap()), "{error}");
    }
    // Gradient buffers that overlap weights, or another gradient.
    let bytes = |k: &usize| both.weights()[*k].initial.data().len();
    let (smallest, biggest) = ((0..4).min_by_key(bytes).unwrap(), (0..4).max_by_key(bytes).unwrap());
    for (at, there) in [
        (0, &hands.weights[0]),
        (smallest, &hands.weights[biggest]),
        (smallest, &hands.gradient_buffers[biggest]),
    ] {
        let mut shared = both.gradient_targets(&hands.gradient_buffers);
        shared[at].bytes = TargetBytes::Memory(there);
        let error = message(
            both.backward(&mut live, &[run_input(&gradient_of_ones)], &mut shared, nothing).unwrap_err(),
        );
        assert!(error.contains("share memory; give each gradient its own memory"), "{error}");
    }
    hands.backward(&both, &mut live, std::slice::from_ref(&gradient_of_ones)).unwrap();
    let error =
        message(hands.backward(&both, &mut live, std::slice::from_ref(&gradient_of_ones)).unwrap_err());
    assert!(error.contains("has run already; run the model forward again"), "{error}");
    let (_, _, other) = perceptron(ForwardBackwardOptions::default());
    let (mut foreign, _) = CallerMemory::new(&other).forward(&other, &inputs).unwrap();
    let error = message(hands.backward(&both, &mut foreign, &[gradient_of_ones]).unwrap_err());
    assert!(error.contains("forward pass"), "{error}");
}

#[test]
fn rejects_unknown_names() {
    let model = || ModelSource::from(recorded("mlp_adamw_ce", "forward.onnx"));
    let refused =
        |options: ForwardBackwardOptions| ForwardBackward::new(model(), options).unwrap_err().to_string();
    let default = ForwardBackwardOptions::default;
    let weights = ForwardBackward::new(model(), default()).unwrap();
    let first = weights.weights()[0].name.clone();
    let misspelled = format!("{first}s");
    let error = refused(default().weights([misspelled.as_str()]));
    assert!(error.contains(&format!("no initializer {misspelled:?}")) && error.contains(&first), "{error}");
    let error = refused(default().weights([first.as_str(), first.as_str()]));
    assert!(error.contains("is named twice"), "{error}");
    let error = refused(default().inputs(["nothing like that"]));
    assert!(error.contains("no input \"nothing like that\", so it cannot return its gradient"), "{error}");
    let error = refused(default().weights(Vec::<String>::new()).inputs(Vec::<String>::new()));
    assert!(error.contains("has no gradient"), "{error}");
}

#[test]
fn live_passes_count_towards_the_limit() {
    let (_, _, free) = perceptron(ForwardBackwardOptions::default());
    let (x, labels) = batch(64, 1);
    let inputs = [run_input(&x), run_input(&labels)];
    let (live, _) = CallerMemory::new(&free).forward(&free, &inputs).unwrap();
    let weights: usize = free.weights().iter().map(|weight| 2 * weight.initial.data().len()).sum();
    let limit = weights + live.bytes() * 5 / 2 + (1 << 16);
    let (_, _, both) =
        perceptron(ForwardBackwardOptions::default().run(RunOptions::default().memory_limit(limit)));
    let hands = CallerMemory::new(&both);
    let mut live = Vec::new();
    let error = loop {
        match hands.forward(&both, &inputs) {
            Ok((pass, _)) => live.push(pass),
            Err(error) => break error,
        }
        assert!(live.len() < 1000, "no limit is kept");
    };
    assert_eq!(error.kind(), ErrorKind::MemoryLimit, "{error}");
    let expected = format!("belong to {} forward passes without a backward pass", live.len());
    assert!(error.to_string().contains(&expected), "{error}");
    live.pop();
    hands.forward(&both, &inputs).unwrap();
}

/// A function on the host in the middle: the passes are schedules of several segments.
#[test]
fn host_functions_and_control_flow_in_both_passes() {
    for name in ["cpu", "reference"] {
        let backend: Arc<dyn Backend> = backend(name, 0).unwrap();
        let options = ForwardBackwardOptions::default().run(RunOptions::default().backend(backend));
        let both = ForwardBackward::new(common::branching(), options).unwrap();
        assert_eq!(both.weights().iter().map(|weight| weight.name.as_str()).collect::<Vec<_>>(), ["w"]);
        let hands = CallerMemory::new(&both);
        for sign in [1.0_f32, -1.0] {
            let x = Tensor::f32(&[4], &[sign, 0.0, 2.0 * sign, 0.0]);
            let (mut live, outputs) = hands.forward(&both, &[run_input(&x)]).unwrap();
            // If the sum of x is positive, x w is doubled, otherwise negated; then the nonzero elements are
            // selected.
            let factor = if sign > 0.0 { 2.0 } else { -1.0 };
            let expected = [3.0 * sign * factor, 5.0 * 2.0 * sign * factor];
            assert_eq!(outputs[0].to_vec::<f32>(), expected);
            let seeds = [Tensor::f32(&[2], &[1.0, 10.0])];
            let of_x = hands.backward(&both, &mut live, &seeds).unwrap();
            assert_eq!(of_x[0].to_vec::<f32>(), [3.0 * factor, 0.0, 50.0 * factor, 0.0]);
            let of_w: Vec<f32> = bytemuck::pod_collect_to_vec(&hands.gradients(&both)[0]);
            assert_eq!(of_w, [sign * factor, 0.0, 20.0 * sign * factor, 0.0]);
        }
    }
}

#[test]
fn training_model_requires_two_calls() {
    let (_, _, both) = perceptron(ForwardBackwardOptions::default());
    let source = ModelSource::from_proto(&both.training_model().unwrap()).unwrap();
    let mut session = ortrain::InferenceSession::new(source, ortrain::SessionOptions::default()).unwrap();
    let (x, labels) = batch(4, 1);
    let hands = CallerMemory::new(&both);
    let weights: Vec<Tensor> = both.weights().iter().map(|weight| weight.initial.clone()).collect();
    let inputs: Vec<InputView<'_>> = [&x, &labels].into_iter().chain(&weights).map(run_input).collect();
    let error = session.run(&inputs, &mut |_, _| Ok(())).unwrap_err().to_string();
    assert!(error.contains("returns to the caller"), "{error}");
    drop(hands);
}
