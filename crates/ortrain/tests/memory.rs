//! The memory of a step is known in advance, and can be limited.
#![allow(clippy::unwrap_used)]

mod common;

use common::{batch, recorded, run_input, state_of, train};
use ortrain::{
    CheckpointState, Error, ErrorKind, InferenceSession, Module, ModuleOptions, OverLimit, Result,
    SessionOptions, Tensor, collect,
};
use ortrain_program::RunError;

const CASE: &str = "mlp_adamw_ce";

fn module(state: &mut CheckpointState, limit: Option<usize>) -> Result<Module> {
    let mut options = ModuleOptions::default();
    options.run.memory_limit = limit;
    let [train, eval] = ["training_model.onnx", "eval_model.onnx"].map(|file| recorded(CASE, file).into());
    Module::new(train, state, Some(eval), options)
}

#[track_caller]
fn over_limit<T>(result: Result<T>) -> OverLimit {
    match result {
        Err(Error::Run(RunError::OverLimit(over)) | Error::StepOverLimit { over, .. }) => *over,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it was within the limit"),
    }
}

#[test]
fn memory_limit_is_exact() {
    let data = batch(48, 3);
    let inputs = [run_input(&data.0), run_input(&data.1)];
    let mut state = state_of(CASE);
    let mut free = module(&mut state, None).unwrap();
    let need = free.memory_need(&inputs, true).unwrap();
    assert_eq!(free.memory(&state).work, 0, "nothing is allocated yet");
    let loss = train(&mut free, &mut state, &data);
    let memory = free.memory(&state);
    assert_eq!(need.state, memory.parameters + memory.gradients);
    assert_eq!((need.work, need.scratch), (memory.work, memory.scratch));
    assert_eq!(need.total(), memory.total() + need.constants);

    let mut state = state_of(CASE);
    let mut enough = module(&mut state, Some(need.total())).unwrap();
    assert_eq!(train(&mut enough, &mut state, &data), loss);

    let mut state = state_of(CASE);
    // Recomputation reduces the need down to a minimum.
    let mut too_small = need.total();
    let min_limit = loop {
        let mut short = module(&mut state, Some(too_small - 1)).unwrap();
        let less = short.memory_need(&inputs, true).unwrap();
        if less.total() >= too_small {
            break less;
        }
        too_small = less.total();
    };
    let mut short = module(&mut state, Some(min_limit.total() - 1)).unwrap();
    let refused = short.train_step(&mut state, &inputs, &mut |_, _| Ok(()));
    let error = over_limit(refused);
    assert_eq!((error.limit, error.need.work), (min_limit.total() - 1, min_limit.work));
    assert_eq!(short.memory(&state).work, 0, "nothing was allocated");
    assert_eq!(state.train_step_count(), 0);
    // A smaller batch fits.
    train(&mut short, &mut state, &batch(8, 3));
}

#[test]
fn error_lists_largest_buffers() {
    let data = batch(1000, 3);
    let inputs = [run_input(&data.0), run_input(&data.1)];
    let mut state = state_of(CASE);
    let mut short = module(&mut state, Some(20_000)).unwrap();
    let result = short.train_step(&mut state, &inputs, &mut |_, _| Ok(()));
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::MemoryLimit);
    let text = error.to_string();
    for part in
        ["memory_limit is 20000", "(24000 float32, 96000 bytes)", " is enough; within the limit a batch of "]
    {
        assert!(text.contains(part), "{text}");
    }
}

#[test]
fn parameters_may_exceed_limit() {
    let mut state = state_of(CASE);
    let error = over_limit(module(&mut state, Some(1000)));
    assert_eq!(error.need.total(), error.need.state);
    assert_eq!(error.largest[0].label, "fc1.weight");
    assert!(error.to_string().ends_with("this model does not fit at any batch size"), "{error}");
}

/// Batches of two sizes alternate. Each fits by itself, but not while the arena of the larger one remains
/// allocated.
#[test]
fn oversized_arena_is_freed() {
    let session = |limit: Option<usize>| {
        let mut options = SessionOptions::default();
        options.run.memory_limit = limit;
        InferenceSession::new(recorded(CASE, "forward.onnx").into(), options).unwrap()
    };
    let inputs = [4, 300].map(|rows| Tensor::f32(&[rows, 10], &vec![0.5; rows * 10]));
    let mut free = session(None);
    let expected = inputs.each_ref().map(|x| collect(|deliver| free.run(&[run_input(x)], deliver)).unwrap());
    let mut min_bytes = 0;
    // Find the smallest limit at which the larger batch runs.
    for bits in (0..24).rev() {
        let tried = min_bytes + (1 << bits);
        let fails = session(Some(tried)).run(&[run_input(&inputs[1])], &mut |_, _| Ok(())).is_err();
        min_bytes = if fails { tried } else { min_bytes };
    }
    let mut limited = session(Some(min_bytes + 1));
    for _ in 0..3 {
        for (x, expected) in inputs.iter().zip(&expected) {
            assert_eq!(&collect(|deliver| limited.run(&[run_input(x)], deliver)).unwrap(), expected);
        }
    }
    over_limit(session(Some(min_bytes)).run(&[run_input(&inputs[1])], &mut |_, _| Ok(())));
}
