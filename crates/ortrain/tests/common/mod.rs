//! What the tests share: recorded artifacts, and values to give and take.
#![allow(dead_code, clippy::unwrap_used)]

use std::path::PathBuf;

use ortrain::{CheckpointState, DType, Delivered, Given, Module, ModuleOptions, Optimizer, Result, Tensor};

/// A file of a recorded run of onnxruntime-training 1.19.2.
pub(crate) fn recorded(case: &str, file: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/ort-1.19.2")).join(case).join(file)
}

pub(crate) fn given(tensor: &Tensor) -> Given<'_> {
    Given { dtype: tensor.dtype(), dims: tensor.dims(), bytes: tensor.data() }
}

pub(crate) fn tensor(dtype: DType, dims: &[usize], value: Delivered<'_>) -> Tensor {
    let mut bytes = vec![0; dims.iter().product::<usize>() * dtype.size()];
    value.copy_to(&mut bytes);
    Tensor::new(dtype, dims.to_vec(), bytes.into()).unwrap()
}

/// Runs a step and collects its results.
pub(crate) fn collect(run: impl FnOnce(&mut ortrain::Deliver<'_>) -> Result<()>) -> Result<Vec<Tensor>> {
    let mut results = Vec::new();
    run(&mut |_, dtype, dims, value| results.push(tensor(dtype, dims, value)))?;
    Ok(results)
}

pub(crate) fn state_of(case: &str) -> CheckpointState {
    CheckpointState::load(recorded(case, "checkpoint")).unwrap()
}

pub(crate) fn module_on(case: &str, state: &mut CheckpointState) -> Module {
    let train = recorded(case, "training_model.onnx").into();
    let eval = recorded(case, "eval_model.onnx").into();
    Module::new(train, state, Some(eval), ModuleOptions::default()).unwrap()
}

pub(crate) fn optimizer_on(case: &str, state: &mut CheckpointState, module: &Module) -> Optimizer {
    Optimizer::new(recorded(case, "optimizer_model.onnx").into(), state, module).unwrap()
}

/// Numbers that look random and are the same every time.
pub(crate) fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 * 2.0 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// A batch for the recorded perceptrons: 10 features, 5 classes.
pub(crate) fn batch(rows: usize, seed: u32) -> (Tensor, Tensor) {
    let x = Tensor::f32(&[rows, 10], &numbers(rows * 10, seed));
    let labels: Vec<i64> = (0..rows as i64).map(|row| (row + i64::from(seed)) % 5).collect();
    (x, Tensor::i64(&[rows], &labels))
}

/// One train step on a batch; its loss.
pub(crate) fn train(module: &mut Module, state: &mut CheckpointState, batch: &(Tensor, Tensor)) -> f32 {
    let inputs = [given(&batch.0), given(&batch.1)];
    collect(|deliver| module.train_step(state, &inputs, deliver)).unwrap()[0].to_vec::<f32>()[0]
}

/// The loss in evaluation.
pub(crate) fn evaluate(module: &mut Module, state: &CheckpointState, batch: &(Tensor, Tensor)) -> f32 {
    let inputs = [given(&batch.0), given(&batch.1)];
    collect(|deliver| module.eval_step(state, &inputs, deliver)).unwrap()[0].to_vec::<f32>()[0]
}

/// The accumulated gradient of a parameter.
pub(crate) fn gradient(module: &Module, name: &str) -> Vec<f32> {
    module.gradient(name).unwrap().to_tensor().to_vec()
}
