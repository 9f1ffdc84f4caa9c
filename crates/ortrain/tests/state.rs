//! State: planes, errors, files.
#![allow(clippy::unwrap_used)]

use ortrain::{
    ALIGNMENT, Checkpoint, CheckpointState, DType, ErrorKind, OptimizerValues, PlaneLayout, Property, Tensor,
};
use ortrain_checkpoint::{ModuleState, NamedTensor, NominalTensor};

fn state(trainable: &[(&str, Tensor)], frozen: &[(&str, Tensor)]) -> CheckpointState {
    let list = |items: &[(&str, Tensor)]| {
        items.iter().map(|(name, tensor)| NamedTensor::new(*name, tensor.clone())).collect()
    };
    let module = ModuleState::Full { trainable: list(trainable), frozen: list(frozen) };
    CheckpointState::from_checkpoint(Checkpoint { module, ..Checkpoint::default() }).unwrap()
}

#[test]
fn planes_are_sorted_aligned_and_padded_with_zeros() {
    let state = state(
        &[
            ("w2", Tensor::f32(&[65], &[2.0; 65])),
            ("h", Tensor::filled(DType::F16, &[3], 1.0)),
            ("w1", Tensor::f32(&[2, 2], &[1.0, 2.0, 3.0, 4.0])),
        ],
        &[("n", Tensor::i64(&[1], &[7])), ("f", Tensor::f32(&[], &[5.0]))],
    );
    let names: Vec<&str> = state.names().collect();
    assert_eq!(names, ["f", "h", "n", "w1", "w2"]);
    let layout = state.layout().unwrap();
    let of = |planes: &[PlaneLayout]| -> Vec<String> {
        let tensors = |plane: &PlaneLayout| -> Vec<String> {
            plane.tensors.iter().map(|tensor| format!("{}@{}", tensor.name, tensor.offset)).collect()
        };
        planes.iter().map(|plane| format!("{} {}: {:?}", plane.dtype, plane.bytes, tensors(plane))).collect()
    };
    assert_eq!(of(&layout.trainable), ["float16 256: [\"h@0\"]", "float32 768: [\"w1@0\", \"w2@256\"]"]);
    assert_eq!(of(&layout.frozen), ["float32 256: [\"f@0\"]", "int64 256: [\"n@0\"]"]);
    for (plane, memory) in layout.trainable.iter().zip(state.trainable_planes()) {
        let mut rest = memory.to_vec(0, memory.len()).unwrap();
        assert_eq!(rest.len(), plane.bytes);
        for tensor in &plane.tensors {
            assert_eq!(tensor.offset % ALIGNMENT, 0);
            let view = state.parameter(&tensor.name).unwrap();
            rest[tensor.offset..tensor.offset + view.byte_len()].fill(0);
        }
        assert!(rest.iter().all(|&byte| byte == 0));
    }
    assert_eq!(
        state.parameter("w1").unwrap().to_tensor().unwrap(),
        Tensor::f32(&[2, 2], &[1.0, 2.0, 3.0, 4.0])
    );
}

#[test]
fn step_counter_needs_no_slots() {
    let weight = || ("w".to_owned(), Tensor::f32(&[2], &[1.0, 2.0]), true);
    let counted = OptimizerValues { step: 3, train_step: 5, ..OptimizerValues::default() };
    let state = CheckpointState::from_values([weight()], counted).unwrap();
    assert_eq!((state.optimizer_step_count(), state.train_step_count()), (3, 5));
    let read = CheckpointState::from_bytes(state.to_bytes(true).unwrap()).unwrap();
    assert_eq!(read.optimizer_step_count(), 3);
    let fresh = CheckpointState::from_values([weight()], OptimizerValues::default()).unwrap();
    assert_eq!(fresh.optimizer_step_count(), 0);
}

#[test]
fn views_are_live_and_outlive_the_state() {
    let mut state = state(&[("w", Tensor::f32(&[2], &[1.0, 2.0]))], &[]);
    let view = state.parameter("w").unwrap();
    state.set_parameter("w", &Tensor::f32(&[2], &[3.0, 4.0])).unwrap();
    assert_eq!(view.to_tensor().unwrap(), Tensor::f32(&[2], &[3.0, 4.0]));
    view.memory.write(view.offset, &5.0_f32.to_le_bytes()).unwrap();
    assert_eq!(state.parameter("w").unwrap().to_tensor().unwrap(), Tensor::f32(&[2], &[5.0, 4.0]));
    drop(state);
    assert_eq!(view.to_tensor().unwrap(), Tensor::f32(&[2], &[5.0, 4.0]));
}

#[test]
fn setting_frozen_parameters_changes_generation() {
    let mut state = state(&[("w", Tensor::f32(&[1], &[1.0]))], &[("f", Tensor::f32(&[1], &[1.0]))]);
    state.set_parameter("w", &Tensor::f32(&[1], &[2.0])).unwrap();
    assert_eq!(state.generation(), 0);
    state.set_parameter("f", &Tensor::f32(&[1], &[2.0])).unwrap();
    assert_eq!(state.generation(), 1);
}

#[test]
fn errors_name_expected_types() {
    let mut state = state(&[("w", Tensor::f32(&[2], &[1.0, 2.0]))], &[]);
    let error = state.set_parameter("w", &Tensor::i64(&[3], &[1, 2, 3])).unwrap_err();
    assert_eq!(error.to_string(), "parameter \"w\" is float32[2], but a value of int64[3] was given");
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let error = state.parameter("v").unwrap_err();
    assert_eq!(error.to_string(), "there is no parameter \"v\" in the state");
    let error = state.parameter("W").unwrap_err();
    assert_eq!(error.to_string(), "there is no parameter \"W\" in the state; did you mean \"w\"?");
    let error = state.property("p").unwrap_err();
    assert_eq!(error.to_string(), "there is no property \"p\" in the state");
    let error = CheckpointState::load("/nonexistent/checkpoint").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoSuchFile);
    assert_eq!(error.to_string(), "there is no file /nonexistent/checkpoint");
}

#[test]
fn files_round_trip() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    let mut state = state(&[("w", Tensor::f32(&[2], &[1.0, 2.0]))], &[("f", Tensor::i64(&[1], &[3]))]);
    state.set_seed(11);
    state.set_property("epoch", Property::Int(4));
    state.save(&path, true).unwrap();
    let again = CheckpointState::load(&path).unwrap();
    assert_eq!(again.to_checkpoint(true).unwrap(), state.to_checkpoint(true).unwrap());
    assert_eq!(again.seed(), 11);
    assert_eq!(*again.property("epoch").unwrap(), Property::Int(4));
}

#[test]
fn nominal_state_has_only_names() {
    let nominal_tensor = |name: &str| NominalTensor { name: name.into(), dtype: DType::F32 };
    let module =
        ModuleState::Nominal { trainable: vec![nominal_tensor("w")], frozen: vec![nominal_tensor("f")] };
    let checkpoint = Checkpoint { module, ..Checkpoint::default() };
    let mut state = CheckpointState::from_checkpoint(checkpoint.clone()).unwrap();
    assert!(state.is_nominal() && state.contains("w") && state.len() == 2);
    for error in [
        state.parameter("w").unwrap_err(),
        state.set_parameter("w", &Tensor::f32(&[], &[0.0])).unwrap_err(),
        state.gradient("w").unwrap_err(),
        state.layout().unwrap_err(),
    ] {
        assert!(error.to_string().starts_with("the state is nominal"), "{error}");
        assert_eq!(error.kind(), ErrorKind::Fail);
    }
    assert_eq!(state.to_checkpoint(true).unwrap(), checkpoint);
}
