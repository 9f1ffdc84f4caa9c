//! A device that is lost during training: each later call reports it, and training continues from the file of the last
//! checkpoint.

mod common;
#[path = "../../ortrain-testkit/gpu/example.rs"]
mod example;

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;

use ortrain::artifacts::{Artifacts, OptimizerKind};
use ortrain::{
    Backend, CheckpointState, Error, ErrorKind, InputView, ModelSource, Module, ModuleOptions, Optimizer,
    RunOptions, Tensor, backend, collect,
};
use ortrain_wgpu::Wgpu;

use common::wgpu;
use example::{WEIGHTS, artifacts};

/// Number of steps before the last checkpoint.
const SAVED_STEPS: usize = 2;
/// Maximum number of steps. Another thread destroys the device long before.
const MAX_STEPS: usize = 100_000;

struct Training {
    state: CheckpointState,
    module: Module,
    optimizer: Optimizer,
}

impl Training {
    fn new(artifacts: &Artifacts, mut state: CheckpointState, backend: Arc<dyn Backend>) -> Training {
        let source = |model| ModelSource::from_proto(model).expect("it fits in memory");
        let options = ModuleOptions::from(RunOptions::default().backend(backend));
        let module =
            Module::new(source(&artifacts.training_model), &mut state, None, options).expect("it can run");
        let model = artifacts.optimizer_model.as_ref().expect("it was requested");
        let optimizer = Optimizer::new(source(model), &mut state, &module).expect("it fits");
        Training { state, module, optimizer }
    }

    fn step(&mut self) -> ortrain::Result<f32> {
        let (x, labels) = (Tensor::f32(&[4, 64], &[0.25; 256]), Tensor::i64(&[4], &[1, 2, 3, 4]));
        let inputs = [InputView::from(&x), InputView::from(&labels)];
        let results = collect(|deliver| self.module.train_step(&mut self.state, &inputs, deliver))?;
        self.optimizer.step(&mut self.state, &self.module)?;
        self.module.lazy_reset_grad();
        Ok(results[0].to_vec::<f32>()[0])
    }
}

fn assert_lost(what: &str, error: &Error, name: &str) {
    assert_eq!(error.kind(), ErrorKind::DeviceLost, "{what}: {error}");
    assert!(error.to_string().contains(name), "{what}: {error}");
}

#[test]
fn a_device_is_lost_while_steps_run() {
    let trained = artifacts("perceptron", &WEIGHTS, OptimizerKind::AdamW);
    let name = wgpu().device().to_owned();
    let folder = tempfile::tempdir().expect("there is a folder for files");
    let file = folder.path().join("checkpoint");
    let state = CheckpointState::from_checkpoint(trained.checkpoint.clone()).expect("it can be read");
    let mut training = Training::new(&trained, state, Arc::new(wgpu().clone()));
    for _ in 0..SAVED_STEPS {
        training.step().expect("the device works");
    }
    training.state.save(&file, true).expect("enough memory");
    let saved = std::fs::read(&file).expect("it was written");
    let expected = training.step().expect("the device works");

    let (tell, signal) = channel();
    let ends = thread::spawn(move || {
        signal.recv().expect("steps run");
        wgpu().destroy();
    });
    let mut failure = None;
    for step in 0..MAX_STEPS {
        if step == 2 {
            tell.send(()).expect("the thread waits");
        }
        if let Err(error) = training.step() {
            failure = Some(error);
            break;
        }
    }
    ends.join().expect("it ends the device");
    assert_lost("the step", &failure.expect("the device was ended"), &name);
    for _ in 0..2 {
        assert_lost("a later step", &training.step().expect_err("it is lost"), &name);
    }
    let Training { mut state, module, optimizer } = training;
    assert_lost("bytes", &state.to_bytes(true).expect_err("it is lost"), &name);
    assert_lost("a file", &state.save(&file, true).expect_err("it is lost"), &name);
    assert_lost("a move", &state.to(&backend("cpu", 0).expect("cpu")).expect_err("it is lost"), &name);
    drop((state, module, optimizer));

    // The file is unchanged, and training continues here and on the reopened device.
    assert!(std::fs::read(&file).expect("it is still there") == saved);
    let reopened = Wgpu::open(&name, true).expect("the driver is still there");
    let others: [Arc<dyn Backend>; 2] =
        [Arc::new(reopened), backend("cpu", 0).expect("there is a processor")];
    for other in others {
        let state = CheckpointState::load(&file).expect("it can be read");
        let mut training = Training::new(&trained, state, other);
        assert!((training.step().expect("it works") - expected).abs() <= 1e-5);
    }
}
