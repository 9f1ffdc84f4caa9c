//! States on a device without host pointers: results are bit-identical to the host; moves; failing devices.
#![allow(clippy::unwrap_used)]

#[expect(dead_code, unreachable_pub, reason = "examples of the documentation use all of it")]
mod setup {
    include!("../doc/setup.rs");
}

use std::collections::BTreeMap;
use std::sync::Arc;

use ortrain::classic::{CallOptions, TrainingParameters};
use ortrain::optim::{OPTIMIZERS, OptimizerSpec, optimizer_model};
use ortrain::{
    Backend, CheckpointState, DType, Error, ForwardBackward, ForwardBackwardOptions, InferenceSession,
    InputView, ModelSource, Module, ModuleOptions, Optimizer, RunError, RunOptions, SessionOptions, Tensor,
    TrainingSession, backend, collect,
};
use ortrain_testkit::Remote;

fn host() -> Arc<dyn Backend> {
    backend("reference", 0).unwrap()
}

fn remote() -> Arc<dyn Backend> {
    Arc::new(Remote::new())
}

fn on(backend: &Arc<dyn Backend>) -> ModuleOptions {
    RunOptions::default().backend(backend.clone()).into()
}

/// Creates a module with an evaluation model on a state.
fn module(state: &mut CheckpointState, backend: &Arc<dyn Backend>) -> ortrain::Result<Module> {
    let artifacts = setup::artifacts().unwrap();
    let eval = ModelSource::from_proto(&artifacts.eval_model).unwrap();
    Module::new(ModelSource::from_proto(&artifacts.training_model).unwrap(), state, Some(eval), on(backend))
}

fn optimizer(state: &mut CheckpointState, module: &Module) -> Optimizer {
    let model = setup::artifacts().unwrap().optimizer_model.unwrap();
    Optimizer::new(ModelSource::from_proto(&model).unwrap(), state, module).unwrap()
}

/// Runs a training step and an optimizer step; returns the loss.
fn step(state: &mut CheckpointState, module: &mut Module, optimizer: &mut Optimizer) -> Tensor {
    let batch = setup::batch();
    let inputs = batch.each_ref().map(InputView::from);
    let mut results = collect(|deliver| module.train_step(state, &inputs, deliver)).unwrap();
    optimizer.step(state, module).unwrap();
    module.lazy_reset_grad();
    results.remove(0)
}

fn parameters(state: &CheckpointState) -> BTreeMap<String, Tensor> {
    let views = state.parameters().unwrap();
    views.map(|view| (view.name.to_string(), view.to_tensor().unwrap())).collect()
}

#[test]
fn device_training_matches_host_and_resumes() {
    let run = |first: &Arc<dyn Backend>, then: &Arc<dyn Backend>| {
        let mut state = setup::state().unwrap();
        let mut module_there = module(&mut state, first).unwrap();
        let mut optimizer_there = optimizer(&mut state, &module_there);
        let mut losses: Vec<Tensor> =
            (0..3).map(|_| step(&mut state, &mut module_there, &mut optimizer_there)).collect();
        assert_eq!(state.device(), first.device());
        let batch = setup::batch();
        let inputs = batch.each_ref().map(InputView::from);
        losses.extend(collect(|deliver| module_there.eval_step(&state, &inputs, deliver)).unwrap());
        let packed = module_there.copy_parameters_to_buffer(&state, false).unwrap();
        losses.push(Tensor::f32(&[packed.len()], &packed));
        let mut state = CheckpointState::from_bytes(state.to_bytes(true).unwrap()).unwrap();
        assert_eq!(state.device(), "cpu", "files are loaded to the host");
        let mut module = module(&mut state, then).unwrap();
        let mut optimizer = optimizer(&mut state, &module);
        losses.extend((0..2).map(|_| step(&mut state, &mut module, &mut optimizer)));
        let buffer: Vec<f32> = packed.iter().map(|element| element * 0.5).collect();
        module.copy_buffer_to_parameters(&mut state, &buffer, false).unwrap();
        losses.push(step(&mut state, &mut module, &mut optimizer));
        (losses, parameters(&state), state.slots("fc2.weight").unwrap())
    };
    let expected = run(&host(), &host());
    for (first, then) in [(remote(), remote()), (remote(), host()), (host(), remote())] {
        assert_eq!(run(&first, &then), expected);
    }
}

#[test]
fn every_optimizer_steps_on_a_device() {
    // `LambOptimizer` and similar ones are for classic sessions only.
    for row in OPTIMIZERS.iter().filter(|row| OptimizerSpec::new(row.name).is_ok()) {
        let run = |backend: &Arc<dyn Backend>| {
            let mut spec = OptimizerSpec::new(row.name).unwrap();
            spec.max_norm = Some(0.1);
            let model = optimizer_model(&spec.complete().unwrap(), &[DType::F32]).unwrap();
            let mut state = setup::state().unwrap();
            let mut module = module(&mut state, backend).unwrap();
            let model = ModelSource::from_proto(&model).unwrap();
            let mut optimizer = Optimizer::replacing(model, &mut state, &module).unwrap();
            (0..2).for_each(|_| drop(step(&mut state, &mut module, &mut optimizer)));
            (parameters(&state), state.slots("fc2.weight").unwrap())
        };
        assert_eq!(run(&remote()), run(&host()), "{}", row.name);
    }
}

#[test]
fn existing_views_keep_their_memory() {
    let mut state = setup::state().unwrap();
    let before = parameters(&state);
    let (view, plane) = (state.parameter("fc2.bias").unwrap(), state.trainable_planes()[0].clone());
    let backend = remote();
    state.to(&backend).unwrap();
    assert_eq!((state.device(), &parameters(&state)), ("remote", &before));
    state.set_parameter("fc2.bias", &Tensor::f32(&[10], &[7.0; 10])).unwrap();
    assert_eq!(view.to_tensor().unwrap(), before["fc2.bias"]);
    assert!(plane.host().is_some() && state.trainable_planes()[0].host().is_none());
    let there = state.parameter("fc2.bias").unwrap();
    assert_eq!(there.to_tensor().unwrap().to_vec::<f32>(), [7.0; 10]);
    there.memory.write(there.offset + 4, &1.0_f32.to_le_bytes()).unwrap();
    assert_eq!(
        state.parameter("fc2.bias").unwrap().to_tensor().unwrap().to_vec::<f32>()[..3],
        [7.0, 1.0, 7.0]
    );
    state.to(&host()).unwrap();
    assert_eq!(
        state.parameter("fc2.bias").unwrap().to_tensor().unwrap().to_vec::<f32>()[..3],
        [7.0, 1.0, 7.0]
    );
}

#[test]
fn state_is_on_one_device() {
    let mut state = setup::state().unwrap();
    let mut first = module(&mut state, &host()).unwrap();
    let mut of_first = optimizer(&mut state, &first);
    let error = module(&mut state, &remote()).unwrap_err().to_string();
    assert!(
        error.contains("\"cpu\"") && error.contains("\"remote\"") && error.contains("CheckpointState::to"),
        "{error}"
    );
    assert_eq!(state.device(), "cpu");
    step(&mut state, &mut first, &mut of_first);
    // After an explicit move of the state, its module cannot be used.
    state.to(&remote()).unwrap();
    let batch = setup::batch();
    let inputs = batch.each_ref().map(InputView::from);
    let error = first.train_step(&mut state, &inputs, &mut |_, _| Ok(())).unwrap_err().to_string();
    assert!(error.contains("is on device \"remote\""), "{error}");
    let error = of_first.step(&mut state, &first).unwrap_err().to_string();
    assert!(error.contains("is on device \"remote\""), "{error}");
    state.to(&host()).unwrap();
    step(&mut state, &mut first, &mut of_first);
    drop((first, of_first));
    assert_eq!(module(&mut state, &remote()).map(|_| ()).map_err(|error| error.to_string()), Ok(()));
    assert_eq!(state.device(), "remote");
}

#[test]
fn allocation_failure_changes_nothing() {
    let mut state = setup::state().unwrap();
    let before = parameters(&state);
    for bytes in [0, 4096, 8192, 30_000] {
        let device = Remote::new();
        device.limit_memory(bytes);
        let backend: Arc<dyn Backend> = Arc::new(device.clone());
        let error = module(&mut state, &backend).unwrap_err();
        assert!(error.to_string().contains("bytes of memory"), "{error}");
        assert_eq!((state.device(), device.used()), ("cpu", 0), "{bytes} bytes");
        assert_eq!(parameters(&state), before);
        if bytes == 30_000 {
            // The state fits, but not its gradients.
            continue;
        }
        assert!(state.to(&backend).is_err());
        assert_eq!((state.device(), device.used()), ("cpu", 0), "{bytes} bytes");
    }
    let mut module = module(&mut state, &host()).unwrap();
    let mut optimizer = optimizer(&mut state, &module);
    step(&mut state, &mut module, &mut optimizer);
}

#[test]
fn lost_device_reports_every_call() {
    let device = Remote::new();
    let backend: Arc<dyn Backend> = Arc::new(device.clone());
    let mut state = setup::state().unwrap();
    let mut module = module(&mut state, &backend).unwrap();
    let mut optimizer = optimizer(&mut state, &module);
    step(&mut state, &mut module, &mut optimizer);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    state.save(&path, true).unwrap();
    let saved = std::fs::read(&path).unwrap();
    let batch = setup::batch();
    let inputs = batch.each_ref().map(InputView::from);
    module.train_step(&mut state, &inputs, &mut |_, _| Ok(())).unwrap();
    device.fail_all();
    let lost = |error: Error| match error {
        Error::Run(RunError::Device(error)) => assert_eq!(error.device, "remote"),
        error => panic!("{error}"),
    };
    lost(module.train_step(&mut state, &inputs, &mut |_, _| Ok(())).unwrap_err());
    lost(module.eval_step(&state, &inputs, &mut |_, _| Ok(())).unwrap_err());
    lost(optimizer.step(&mut state, &module).unwrap_err());
    lost(state.save(&path, true).unwrap_err());
    lost(state.to(&host()).unwrap_err());
    lost(state.slots("fc2.bias").unwrap_err());
    lost(state.set_parameter("fc2.bias", &Tensor::f32(&[10], &[0.0; 10])).unwrap_err());
    lost(module.copy_parameters_to_buffer(&state, false).unwrap_err());
    lost(state.parameter("fc2.bias").unwrap().to_tensor().unwrap_err());
    assert_eq!(std::fs::read(&path).unwrap(), saved, "the file is as it was");
    CheckpointState::load(&path).unwrap();
}

#[test]
fn other_interfaces_run_on_device() {
    let batch = setup::batch();
    let x = [InputView::from(&batch[0])];
    let faces = |backend: &Arc<dyn Backend>| {
        let mut results = Vec::new();
        let options = RunOptions::default().backend(backend.clone());
        let mut session = InferenceSession::new(setup::MODEL.into(), options.clone().into()).unwrap();
        results.extend(collect(|deliver| session.run(&x, deliver)).unwrap());

        let both = ForwardBackwardOptions::default().run(options);
        let both = ForwardBackward::new(setup::MODEL.into(), both).unwrap();
        let memories: Vec<_> = both.weights().iter().map(|weight| weight.to_memory().unwrap()).collect();
        let gradient_buffers: Vec<_> =
            both.weights().iter().map(|weight| weight.allocate_gradient().unwrap()).collect();
        let mut logits = Vec::new();
        let mut live = both
            .forward(&both.weight_views(&memories), &x, &mut |_, value| {
                logits.push(value.to_tensor()?);
                Ok(())
            })
            .unwrap();
        let gradient = [InputView::from(&logits[0])];
        let of_inputs = collect(|deliver| {
            both.backward(&mut live, &gradient, &mut both.gradient_targets(&gradient_buffers), deliver)
        });
        results.extend(of_inputs.unwrap());
        results.extend(gradient_buffers.iter().map(|buffer| {
            let bytes = buffer.to_vec(0, buffer.len()).unwrap();
            Tensor::new(DType::U8, vec![bytes.len()], bytes.into()).unwrap()
        }));

        let parameters = TrainingParameters::new("loss").optimizer("AdamOptimizer").train(["fc2.bias"]);
        let model = setup::model_with_loss().unwrap();
        let mut classic = ortrain::classic::TrainingSession::new(model, &parameters, on(backend)).unwrap();
        let rate = Tensor::f32(&[1], &[0.1]);
        let [x, labels] = batch.each_ref().map(InputView::from);
        let feeds = [("x", x), ("labels", labels), ("Learning_Rate", InputView::from(&rate))];
        for _ in 0..2 {
            results.extend(classic.run_tensors(&feeds, &[], CallOptions::default()).unwrap());
        }
        results.extend(classic.state().unwrap().into_values());

        let artifacts = setup::artifacts().unwrap();
        let mut session = TrainingSession::new(
            CheckpointState::from_checkpoint(artifacts.checkpoint.clone()).unwrap(),
            ModelSource::from_proto(&artifacts.training_model).unwrap(),
            Some(ModelSource::from_proto(&artifacts.eval_model).unwrap()),
            artifacts.optimizer_model.as_ref().map(|model| ModelSource::from_proto(model).unwrap()),
            on(backend),
        )
        .unwrap();
        for _ in 0..2 {
            results.extend(session.train_step(&[x, labels]).unwrap());
            session.optimizer_step().unwrap();
            session.lazy_reset_grad();
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trained.onnx");
        session.export_model_for_inferencing(&path, &["logits"]).unwrap();
        let mut exported = InferenceSession::new(path.into(), SessionOptions::default()).unwrap();
        results.extend(collect(|deliver| exported.run(&[x], deliver)).unwrap());
        results
    };
    let (expected, got) = (faces(&host()), faces(&remote()));
    assert!(expected.len() > 10);
    assert_eq!(got, expected);
}
