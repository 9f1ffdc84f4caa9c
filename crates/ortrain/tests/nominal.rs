//! A nominal state loads its values from a file: all at once or not at all.
#![allow(clippy::unwrap_used)]

mod common;

use std::fs;
use std::path::Path;

use common::{batch, gradient, module_on, optimizer_on, recorded, state_of, train};
use ortrain::{
    Checkpoint, CheckpointState, DType, ErrorKind, LoadReport, Module, ModuleOptions, Result, Tensor,
};
use ortrain_checkpoint::{Layout, ModuleState, NamedTensor, NominalTensor, save, save_safetensors};
use rustc_hash::FxHashMap;

const CASE: &str = "mlp_adamw_ce";

/// Returns the state of the recorded classifier without its values.
fn nominal() -> CheckpointState {
    let ModuleState::Full { trainable, frozen } = state_of(CASE).to_checkpoint(false).unwrap().module else {
        panic!("values are there")
    };
    let names = |list: Vec<NamedTensor>| {
        list.into_iter()
            .map(|tensor| NominalTensor { name: tensor.name, dtype: tensor.tensor.dtype() })
            .collect()
    };
    let module = ModuleState::Nominal { trainable: names(trainable), frozen: names(frozen) };
    CheckpointState::from_checkpoint(Checkpoint { module, ..Checkpoint::default() }).unwrap()
}

fn values(state: &CheckpointState) -> Vec<NamedTensor> {
    let view = |name: &str| NamedTensor::new(name, state.parameter(name).unwrap().to_tensor().unwrap());
    state.names().map(view).collect()
}

/// Loads parameters in one of two ways, from a file with these tensors.
fn load(
    state: &mut CheckpointState,
    tensors: &[NamedTensor],
    strict: bool,
    safe: bool,
) -> Result<LoadReport> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("parameters");
    if safe {
        save_safetensors(tensors, &path).unwrap();
        return state.load_safetensors(&path, &FxHashMap::default(), strict);
    }
    // The state determines which parameters are trained, not the file.
    let module = ModuleState::Full { trainable: Vec::new(), frozen: tensors.to_vec() };
    save(&Checkpoint { module, ..Checkpoint::default() }, &path, Layout::State).unwrap();
    state.load_parameters(&path, strict)
}

/// Every order of events ends in the same run, bit-identical to a state that was never nominal.
#[test]
fn loaded_values_train() {
    let mut full = state_of(CASE);
    let expected = values(&full);
    let mut module = module_on(CASE, &mut full);
    let mut optimizer = optimizer_on(CASE, &mut full, &module);
    let batch = batch(4, 1);
    let loss = train(&mut module, &mut full, &batch);
    optimizer.step(&mut full, &module).unwrap();
    let end = full.to_bytes(true).unwrap();

    for safe in [false, true] {
        for module_first in [false, true] {
            let mut state = nominal();
            let mut early_module = module_first.then(|| {
                let module = module_on(CASE, &mut state);
                let optimizer = optimizer_on(CASE, &mut state, &module);
                (module, optimizer)
            });
            let report = load(&mut state, &expected, true, safe).unwrap();
            assert_eq!(report.loaded, state.names().collect::<Vec<_>>());
            assert!(report.is_complete() && !state.is_nominal());
            assert_eq!(values(&state), expected);
            assert!(state.requires_grad("fc1.weight").unwrap(), "as the state said");
            let (module, optimizer) = early_module.get_or_insert_with(|| {
                let module = module_on(CASE, &mut state);
                let optimizer = optimizer_on(CASE, &mut state, &module);
                (module, optimizer)
            });
            assert!(gradient(module, "fc1.weight").iter().all(|&element| element == 0.0));
            assert!((optimizer.learning_rate(&state).unwrap() - 0.001).abs() < f32::EPSILON);
            assert_eq!(train(module, &mut state, &batch).to_bits(), loss.to_bits());
            optimizer.step(&mut state, module).unwrap();
            // Parameters, moments, step and rate.
            assert!(
                state.to_bytes(true).unwrap() == end,
                "safetensors: {safe}, module first: {module_first}"
            );
        }
    }
}

/// A file without all parameters is rejected, even if not strict, and the state can still load them.
#[test]
fn rejects_incomplete_files() {
    let expected = values(&state_of(CASE));
    for (module_first, safe, strict) in [false, true]
        .into_iter()
        .flat_map(|a| [false, true].map(|b| [false, true].map(|c| (a, b, c))))
        .flatten()
    {
        let mut state = nominal();
        let module = module_first.then(|| module_on(CASE, &mut state));
        let before = state.to_checkpoint(true).unwrap();
        let layout = state.layout().ok().cloned();
        let error = load(&mut state, &expected[..2], strict, safe).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        let text = error.to_string();
        let lacks = r#"it lacks "fc2.bias", "fc2.weight""#;
        if strict {
            let end = format!(
                "does not have the parameters of the state: {lacks}; without strict, the matching parameters are \
                 loaded"
            );
            assert!(text.ends_with(&end), "{text}");
        } else {
            assert!(text.starts_with("the state stays nominal: "), "{text}");
            assert!(text.ends_with(&format!("does not have all of its parameters: {lacks}")), "{text}");
        }
        assert!(state.is_nominal());
        assert_eq!(state.to_checkpoint(true).unwrap(), before);
        assert_eq!(state.layout().ok(), layout.as_ref());

        let with_extra = [&expected[..], &[NamedTensor::new("head", Tensor::f32(&[1], &[0.0]))]].concat();
        let result = load(&mut state, &with_extra, strict, safe);
        assert_eq!(result.is_ok(), !strict);
        assert_eq!(state.is_nominal(), strict);
        if !strict {
            assert_eq!(result.unwrap().unexpected, ["head"]);
            assert_eq!(values(&state), expected);
        }
        drop(module);
    }
}

#[test]
fn types_and_shapes_are_those_of_checkpoint_and_model() {
    let expected = values(&state_of(CASE));
    let with = |name: &str, tensor: Tensor| {
        let mut tensors = expected.clone();
        tensors.iter_mut().find(|one| one.name == name).unwrap().tensor = tensor;
        tensors
    };
    let fails = |state: &mut CheckpointState, tensors: &[NamedTensor], sentence: &str| {
        let before = state.to_checkpoint(true).unwrap();
        assert_eq!(load(state, tensors, true, true).unwrap_err().to_string(), sentence);
        assert!(state.is_nominal());
        assert_eq!(state.to_checkpoint(true).unwrap(), before);
    };
    // The checkpoint determines the type, and the model determines the shape.
    let mut state = nominal();
    let long = with("fc2.bias", Tensor::i64(&[5], &[0; 5]));
    // Without a model, the message shows the shape of the value.
    fails(&mut state, &long, "parameter \"fc2.bias\" is float32[5], but a value of int64[5] was given");
    let _module = module_on(CASE, &mut state);
    let wide = with("fc2.bias", Tensor::f32(&[6], &[0.0; 6]));
    fails(&mut state, &wide, "parameter \"fc2.bias\" is float32[5], but a value of float32[6] was given");
    load(&mut state, &expected, true, true).unwrap();

    // Without a model, the file determines the shapes; a later model must agree.
    let mut state = nominal();
    load(&mut state, &wide, true, true).unwrap();
    assert_eq!(state.parameter("fc2.bias").unwrap().dims, [6]);
    let train = recorded(CASE, "training_model.onnx").into();
    let error = Module::new(train, &mut state, None, ModuleOptions::default()).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("\"fc2.bias\" is float32[5] in the model, but float32[6] in the checkpoint; give"),
        "{error}"
    );

    // Narrower floats are widened, as for a full state.
    let mut state = nominal();
    load(&mut state, &with("fc2.bias", Tensor::filled(DType::F16, &[5], 1.5)), true, false).unwrap();
    assert_eq!(state.parameter("fc2.bias").unwrap().to_tensor().unwrap(), Tensor::f32(&[5], &[1.5; 5]));
}

/// After a module has determined the layout, other parameters have no memory.
#[test]
fn rejects_parameters_missing_in_model() {
    let spare = NamedTensor::new("spare", Tensor::f32(&[2], &[1.0, 2.0]));
    let expected = [&values(&state_of(CASE))[..], std::slice::from_ref(&spare)].concat();
    let state = || {
        let ModuleState::Nominal { trainable, .. } = nominal().to_checkpoint(false).unwrap().module else {
            panic!()
        };
        let frozen = vec![NominalTensor { name: "spare".into(), dtype: DType::F32 }];
        let module = ModuleState::Nominal { trainable, frozen };
        CheckpointState::from_checkpoint(Checkpoint { module, ..Checkpoint::default() }).unwrap()
    };
    let mut late = state();
    let _module = module_on(CASE, &mut late);
    assert_eq!(
        load(&mut late, &expected, true, false).unwrap_err().to_string(),
        "the state stays nominal: its training model has no parameter \"spare\"; load the parameters before a \
         module is made"
    );
    assert!(late.is_nominal());

    let mut early = state();
    load(&mut early, &expected, true, false).unwrap();
    assert_eq!(early.parameter("spare").unwrap().to_tensor().unwrap(), spare.tensor);
    let mut module = module_on(CASE, &mut early);
    train(&mut module, &mut early, &batch(4, 1));
}

#[test]
fn rejects_loading_nominal_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("nominal");
    fs::write(&path, nominal().to_bytes(true).unwrap()).unwrap();
    let mut state = nominal();
    let error = state.load_parameters(&path, false).unwrap_err();
    assert!(error.to_string().ends_with("it has the names of parameters but not their values"), "{error}");
    assert!(state.is_nominal());
    let missing = state.load_safetensors(Path::new("/nonexistent"), &FxHashMap::default(), true).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NoSuchFile);
}

/// Slots that start from parameter values, or from their average, are initialized when the values are loaded.
#[test]
fn slots_start_from_loaded_values() {
    use ortrain::optim::{OptimizerSpec, optimizer_model};
    use ortrain::{ModelSource, Optimizer};

    let mut spec = OptimizerSpec::new("ScheduleFreeAdamW").unwrap();
    spec.settings.insert("ema_decay".into(), 0.9);
    let model = ModelSource::from_proto(&optimizer_model(&spec, &[DType::F32]).unwrap()).unwrap();
    let trained = |state: &mut CheckpointState, late: Option<&CheckpointState>| {
        let train_model = recorded(CASE, "training_model.onnx").into();
        let mut module = Module::new(train_model, state, None, ModuleOptions::default()).unwrap();
        let mut optimizer = Optimizer::new(model.clone(), state, &module).unwrap();
        if let Some(source) = late {
            let values = module.copy_parameters_to_buffer(source, false).unwrap();
            module.copy_buffer_to_parameters(state, &values, false).unwrap();
        }
        for step in 0..3 {
            train(&mut module, state, &batch(4, step));
            optimizer.step(state, &module).unwrap();
            module.lazy_reset_grad();
        }
        let names: Vec<String> = state.names().map(str::to_owned).collect();
        let of = |name: &String| (state.average(name).unwrap(), state.slots(name).unwrap());
        names.iter().map(of).collect::<Vec<_>>()
    };
    let (mut full, mut late) = (state_of(CASE), nominal());
    assert_eq!(trained(&mut late, Some(&state_of(CASE))), trained(&mut full, None));
}
