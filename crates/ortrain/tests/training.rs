//! Module, optimizer, scheduler and export on recorded artifacts.
#![allow(clippy::unwrap_used)]

mod common;

use common::{
    batch, evaluate, gradient, module_on, numbers, optimizer_on, recorded, run_input, state_of, train,
};
use ortrain::{
    Checkpoint, CheckpointState, ErrorKind, InferenceSession, LinearLRScheduler, Module, ModuleOptions,
    Optimizer, OptimizerValues, SessionOptions, Tensor, collect,
};
use ortrain_checkpoint::{ModuleState, NamedTensor};

const CASE: &str = "mlp_adamw_ce";
const NAMES: [&str; 4] = ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight"];

#[test]
fn training_reduces_loss() {
    let mut state = state_of(CASE);
    let mut module = module_on(CASE, &mut state);
    let mut optimizer = optimizer_on(CASE, &mut state, &module);
    assert_eq!(module.input_names(true), ["x", "labels"]);
    assert_eq!(module.output_names(true), ["onnx::loss::2"]);
    assert_eq!(optimizer.learning_rate(&state).unwrap(), 0.001);
    optimizer.set_learning_rate(&mut state, 0.05).unwrap();
    let data = batch(16, 3);
    let first = train(&mut module, &mut state, &data);
    assert_eq!(first, evaluate(&mut module, &state, &data));
    for _ in 0..40 {
        optimizer.step(&mut state, &module).unwrap();
        module.lazy_reset_grad();
        train(&mut module, &mut state, &data);
    }
    let last = evaluate(&mut module, &state, &data);
    assert!(last < first / 4.0, "from {first} to {last}");
    assert_eq!(state.train_step_count(), 41);
    assert_eq!(state.optimizer_step_count(), 40);
}

#[test]
fn optimizer_resumes_from_step_counter() {
    let stored = state_of(CASE);
    let values =
        NAMES.map(|name| (name.to_owned(), stored.parameter(name).unwrap().to_tensor().unwrap(), true));
    let counted = OptimizerValues { step: 3, ..OptimizerValues::default() };
    let mut state = CheckpointState::from_values(values, counted).unwrap();
    let mut module = module_on(CASE, &mut state);
    let mut optimizer = optimizer_on(CASE, &mut state, &module);
    let data = batch(16, 3);
    let first = train(&mut module, &mut state, &data);
    optimizer.step(&mut state, &module).unwrap();
    assert_eq!(state.optimizer_step_count(), 4);
    assert!(evaluate(&mut module, &state, &data) < first);
}

#[test]
fn gradients_are_those_of_finite_differences() {
    let mut state = state_of(CASE);
    let mut module = module_on(CASE, &mut state);
    let data = batch(8, 5);
    train(&mut module, &mut state, &data);
    for name in NAMES {
        let computed = gradient(&module, name);
        let view = state.parameter(name).unwrap();
        for at in [0, computed.len() / 2, computed.len() - 1] {
            let value = view.to_tensor().unwrap().to_vec::<f32>()[at];
            let mut loss_at = |value: f32| {
                view.memory.write(view.offset + 4 * at, &value.to_le_bytes()).unwrap();
                f64::from(evaluate(&mut module, &state, &data))
            };
            let step = 1e-2;
            let slope = (loss_at(value + step) - loss_at(value - step)) / (2.0 * f64::from(step));
            loss_at(value);
            assert!(
                (slope - f64::from(computed[at])).abs() < 1e-3,
                "{name}[{at}]: {slope} and {}",
                computed[at]
            );
        }
    }
}

#[test]
fn gradients_add_up_until_they_are_reset() {
    let mut state = state_of(CASE);
    let mut module = module_on(CASE, &mut state);
    let name = "fc2.bias";
    assert!(gradient(&module, name).iter().all(|&value| value == 0.0));
    let (first, second) = (batch(4, 1), batch(4, 2));
    train(&mut module, &mut state, &first);
    let of_first = gradient(&module, name);
    train(&mut module, &mut state, &second);
    let of_both = gradient(&module, name);
    module.lazy_reset_grad();
    assert_eq!(gradient(&module, name), of_both, "the flag alone changes nothing");
    train(&mut module, &mut state, &second);
    let of_second = gradient(&module, name);
    for ((a, b), both) in of_first.iter().zip(&of_second).zip(&of_both) {
        assert!((a + b - both).abs() < 1e-6);
    }
    train(&mut module, &mut state, &second);
    let doubled: Vec<f32> = of_second.iter().map(|value| value * 2.0).collect();
    assert_eq!(gradient(&module, name), doubled, "after one step the gradients add up again");
}

#[test]
fn gradients_go_through_a_buffer() {
    let case = "frozen_params";
    let (mut state, mut other) = (state_of(case), state_of(case));
    let (mut module, mut second) = (module_on(case, &mut state), module_on(case, &mut other));
    let (a, b) = (batch(4, 1), batch(4, 2));
    train(&mut module, &mut state, &a);
    train(&mut second, &mut other, &b);
    let buffers = [&module, &second].map(|module| module.copy_gradients_to_buffer(&state).unwrap());
    assert_eq!(buffers[0].len(), module.parameters_size(&state, true));
    // The order of gradients is the order of parameters.
    let parameters = module.copy_parameters_to_buffer(&state, true).unwrap();
    for name in state.names().filter(|name| state.requires_grad(name).unwrap()) {
        let values: Vec<f32> = state.parameter(name).unwrap().to_tensor().unwrap().to_vec();
        let at = parameters.windows(values.len()).position(|window| window == values).unwrap();
        assert_eq!(gradient(&module, name), buffers[0][at..at + values.len()], "{name}");
    }

    let sum: Vec<f32> = buffers[0].iter().zip(&buffers[1]).map(|(a, b)| a + b).collect();
    module.copy_buffer_to_gradients(&state, &sum).unwrap();
    train(&mut second, &mut other, &a);
    let added = second.copy_gradients_to_buffer(&other).unwrap();
    assert_eq!(module.copy_gradients_to_buffer(&state).unwrap(), sum);
    assert!(added.iter().zip(&sum).all(|(a, b)| (a - b).abs() < 1e-6), "as if it were accumulated");
    module.lazy_reset_grad();
    module.copy_buffer_to_gradients(&state, &sum).unwrap();
    train(&mut module, &mut state, &a);
    assert_eq!(module.copy_gradients_to_buffer(&state).unwrap(), buffers[0], "the reset was still pending");

    let error = module.copy_buffer_to_gradients(&state, &[0.0; 3]).unwrap_err();
    assert_eq!(error.to_string(), format!("the buffer should have {} elements, but it has 3", sum.len()));
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let other_state = state_of(CASE);
    assert!(module.copy_gradients_to_buffer(&other_state).is_err());
    assert!(module.copy_buffer_to_gradients(&other_state, &sum).is_err());
}

#[test]
fn modules_have_separate_gradients() {
    let mut state = state_of(CASE);
    let mut first = module_on(CASE, &mut state);
    let data = batch(4, 1);
    train(&mut first, &mut state, &data);
    let state_gradient = |state: &CheckpointState| -> Vec<f32> {
        state.gradient("fc1.bias").unwrap().unwrap().to_tensor().unwrap().to_vec()
    };
    assert_eq!(state_gradient(&state), gradient(&first, "fc1.bias"));
    let mut second = module_on(CASE, &mut state);
    assert!(
        state_gradient(&state).iter().all(|&value| value == 0.0),
        "the newest module's gradients are the state's"
    );
    let mut optimizer = optimizer_on(CASE, &mut state, &first);
    optimizer.step(&mut state, &first).unwrap();
    // The parameters are shared.
    assert_eq!(evaluate(&mut first, &state, &data), train(&mut second, &mut state, &data));
    assert_eq!(state_gradient(&state), gradient(&second, "fc1.bias"));
    assert_ne!(gradient(&first, "fc1.bias"), gradient(&second, "fc1.bias"));
    let view = second.gradient("fc1.bias").unwrap();
    drop((first, second, state));
    assert!(view.to_tensor().unwrap().to_vec::<f32>().iter().any(|&value| value != 0.0));
}

#[test]
fn inputs_are_checked() {
    let mut state = state_of(CASE);
    let mut module = module_on(CASE, &mut state);
    let (x, labels) = batch(4, 1);
    let mut sentence = |inputs: &[Tensor]| {
        let inputs: Vec<_> = inputs.iter().map(run_input).collect();
        let error = module.train_step(&mut state, &inputs, &mut |_, _| Ok(())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        error.to_string()
    };
    assert_eq!(sentence(std::slice::from_ref(&x)), "expected 2 inputs (x, labels), got 1");
    assert_eq!(
        sentence(&[labels.clone(), x.clone()]),
        "input \"x\" must be float32[batch, 10], got int64[4]: the element types differ"
    );
    assert_eq!(
        sentence(&[Tensor::f32(&[4, 9], &[0.0; 36]), labels.clone()]),
        "input \"x\" must be float32[batch, 10], got float32[4, 9]: axis 1 should be 10 but is 9"
    );
    assert_eq!(
        sentence(&[Tensor::f32(&[40], &[0.0; 40]), labels]),
        "input \"x\" must be float32[batch, 10], got float32[40]: it should have 2 axes but has 1"
    );
    assert_eq!(
        sentence(&[x.clone(), Tensor::i64(&[3], &[0, 1, 2])]),
        "input \"labels\" must be int64[batch], got int64[3]: axis 0 is 3, but \"batch\" is 4 in input \"x\""
    );
    let out_of_range = sentence(&[x, Tensor::i64(&[4], &[0, 1, 2, 5])]);
    assert!(out_of_range.contains("label 5 in row 3 is not one of the 5 classes (0 to 4)"), "{out_of_range}");
}

#[test]
fn failed_step_changes_nothing() {
    let mut state = state_of(CASE);
    let mut module = module_on(CASE, &mut state);
    train(&mut module, &mut state, &batch(4, 1));
    let before: Vec<Vec<f32>> = NAMES.iter().map(|name| gradient(&module, name)).collect();
    module.lazy_reset_grad();
    let (x, _) = batch(4, 2);
    let labels = Tensor::i64(&[4], &[0, -7, 2, 3]);
    let inputs = [run_input(&x), run_input(&labels)];
    module.train_step(&mut state, &inputs, &mut |_, _| Ok(())).unwrap_err();
    let after: Vec<Vec<f32>> = NAMES.iter().map(|name| gradient(&module, name)).collect();
    assert_eq!(before, after);
    assert_eq!(state.train_step_count(), 1);
    // The requested reset is still pending.
    train(&mut module, &mut state, &batch(4, 1));
    assert_eq!(before, NAMES.iter().map(|name| gradient(&module, name)).collect::<Vec<_>>());
}

#[test]
fn empty_batch_has_no_gradient() {
    let mut state = state_of(CASE);
    let mut module = module_on(CASE, &mut state);
    assert!(train(&mut module, &mut state, &batch(0, 1)).is_nan());
    for name in NAMES {
        assert!(gradient(&module, name).iter().all(|&value| value == 0.0), "{name}");
    }
    assert!(evaluate(&mut module, &state, &batch(0, 1)).is_nan());
}

/// Returns the recorded checkpoint with changed tensors.
fn changed(change: impl FnOnce(&mut Vec<NamedTensor>, &mut Vec<NamedTensor>)) -> CheckpointState {
    let mut checkpoint = state_of(CASE).to_checkpoint(false).unwrap();
    let ModuleState::Full { trainable, frozen } = &mut checkpoint.module else { panic!("it is full") };
    change(trainable, frozen);
    CheckpointState::from_checkpoint(checkpoint).unwrap()
}

#[test]
fn model_and_checkpoint_must_belong_together() {
    let sentence = |mut state: CheckpointState| {
        let source = std::fs::read(recorded(CASE, "training_model.onnx")).unwrap().into();
        let error = Module::new(source, &mut state, None, ModuleOptions::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidModel);
        error.to_string()
    };
    assert_eq!(
        sentence(changed(|trainable, _| {
            trainable.retain(|tensor| tensor.name != "fc1.bias");
        })),
        "the training model does not fit the checkpoint: input \"fc1.bias_grad.accumulation.buffer\" holds the gradient \
         of \"fc1.bias\", but the checkpoint has no such parameter"
    );
    assert_eq!(
        sentence(changed(|trainable, _| trainable.push(NamedTensor::new("more", Tensor::f32(&[1], &[0.0]))))),
        "the training model does not fit the checkpoint: the checkpoint trains parameter \"more\", but the model \
         has no input of this name"
    );
    assert_eq!(
        sentence(changed(|trainable, frozen| frozen.push(trainable.remove(0)))),
        "the training model does not fit the checkpoint: input \"fc1.bias_grad.accumulation.buffer\" holds the gradient \
         of \"fc1.bias\", but that parameter is frozen in the checkpoint"
    );
    assert_eq!(
        sentence(changed(|trainable, _| {
            trainable.retain(|tensor| tensor.name != "fc2.bias");
            trainable.push(NamedTensor::new("fc2.bias", Tensor::f32(&[6], &[0.0; 6])));
        })),
        "the training model does not fit the checkpoint: \"fc2.bias\" is float32[5] in the model, but float32[6] in the \
         checkpoint; give the checkpoint that was made together with the model"
    );
    // A frozen parameter that the model does not have is allowed.
    let mut state = changed(|_, frozen| frozen.push(NamedTensor::new("more", Tensor::f32(&[1], &[0.0]))));
    module_on(CASE, &mut state);
}

#[test]
fn another_state_is_refused() {
    let mut state = state_of(CASE);
    let mut module = module_on(CASE, &mut state);
    let mut optimizer = optimizer_on(CASE, &mut state, &module);
    let mut other = state_of("mlp_l1");
    let (x, labels) = batch(4, 1);
    let inputs = [run_input(&x), run_input(&labels)];
    let error = module.train_step(&mut other, &inputs, &mut |_, _| Ok(())).unwrap_err();
    assert_eq!(error.to_string(), "the state has other parameters than the state of this module");
    optimizer.step(&mut other, &module).unwrap_err();
}

#[test]
fn distinguishes_missing_file_from_wrong_model() {
    let mut state = state_of(CASE);
    let missing =
        Module::new("/nonexistent.onnx".into(), &mut state, None, ModuleOptions::default()).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NoSuchFile);
    let module = module_on(CASE, &mut state);
    let source = recorded(CASE, "eval_model.onnx").into();
    let wrong = Optimizer::new(source, &mut state, &module).unwrap_err();
    assert_eq!(wrong.kind(), ErrorKind::InvalidModel);
    assert!(wrong.to_string().contains("needs a node that updates the parameters"), "{wrong}");
    let mut module =
        Module::new(recorded(CASE, "training_model.onnx").into(), &mut state, None, ModuleOptions::default())
            .unwrap();
    assert!(module.input_names(false).is_empty());
    let error = module.eval_step(&state, &[], &mut |_, _| Ok(())).unwrap_err();
    assert_eq!(
        error.to_string(),
        "an evaluation step needs an evaluation model, but the module was made without one"
    );
}

#[test]
fn optimizers_share_state() {
    let mut state = state_of(CASE);
    let mut module = module_on(CASE, &mut state);
    let mut first = optimizer_on(CASE, &mut state, &module);
    first.set_learning_rate(&mut state, 0.25).unwrap();
    train(&mut module, &mut state, &batch(4, 1));
    first.step(&mut state, &module).unwrap();
    let mut second = optimizer_on(CASE, &mut state, &module);
    assert_eq!(second.learning_rate(&state).unwrap(), 0.25);

    // The file restores everything: continuing with or without it is equivalent.
    let bytes = state.to_bytes(true).unwrap();
    let mut resumed = CheckpointState::from_bytes(bytes).unwrap();
    let mut resumed_module = module_on(CASE, &mut resumed);
    let mut resumed_optimizer = optimizer_on(CASE, &mut resumed, &resumed_module);
    assert_eq!(resumed_optimizer.learning_rate(&resumed).unwrap(), 0.25);
    module.lazy_reset_grad();
    train(&mut module, &mut state, &batch(4, 2));
    train(&mut resumed_module, &mut resumed, &batch(4, 2));
    second.step(&mut state, &module).unwrap();
    resumed_optimizer.step(&mut resumed, &resumed_module).unwrap();
    assert_eq!(resumed.to_checkpoint(true).unwrap(), state.to_checkpoint(true).unwrap());
    assert_eq!(resumed.optimizer_step_count(), 2);
}

#[test]
fn scheduler_follows_documentation() {
    let mut state = state_of(CASE);
    let no_optimizer = LinearLRScheduler::new(&mut state, 2, 10, 0.1).unwrap_err();
    assert_eq!(no_optimizer.kind(), ErrorKind::Fail);
    let module = module_on(CASE, &mut state);
    let mut optimizer = optimizer_on(CASE, &mut state, &module);
    let scheduler = LinearLRScheduler::new(&mut state, 2, 10, 0.1).unwrap();
    let mut rates = vec![optimizer.learning_rate(&state).unwrap()];
    for _ in 0..11 {
        optimizer.step(&mut state, &module).unwrap();
        scheduler.step(&mut state).unwrap();
        scheduler.step(&mut state).unwrap();
        rates.push(optimizer.learning_rate(&state).unwrap());
    }
    let expected: Vec<f32> = [0.0, 0.5, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0, 0.0]
        .iter()
        .map(|f| 0.1 * f)
        .collect();
    assert_eq!(rates, expected);
}

#[test]
fn parameters_pack_in_the_order_of_the_model() {
    let mut state = state_of(CASE);
    let module = module_on(CASE, &mut state);
    assert_eq!(module.parameters_size(&state, false), 389);
    let packed = module.copy_parameters_to_buffer(&state, true).unwrap();
    let first: Vec<f32> = state.parameter("fc1.weight").unwrap().to_tensor().unwrap().to_vec();
    assert_eq!(packed[..240], first, "the model's first parameter, not the first by name");
    let other = numbers(389, 9);
    module.copy_buffer_to_parameters(&mut state, &other, false).unwrap();
    assert_eq!(module.copy_parameters_to_buffer(&state, false).unwrap(), other);
    let error = module.copy_buffer_to_parameters(&mut state, &other[1..], false).unwrap_err();
    assert_eq!(error.to_string(), "the buffer should have 389 elements, but it has 388");
}

#[test]
fn buffer_fills_nominal_state() {
    let case = "checkpoint_resume";
    let mut full = state_of(case);
    let mut full_module = module_on(case, &mut full);
    let packed = full_module.copy_parameters_to_buffer(&full, false).unwrap();

    let path = recorded(case, "nominal_checkpoint");
    let mut state = CheckpointState::load(path).unwrap();
    assert!(state.is_nominal());
    let mut module = module_on(case, &mut state);
    let mut optimizer = optimizer_on(case, &mut state, &module);
    assert_eq!(module.parameters_size(&state, false), 389);
    let (x, labels) = batch(4, 1);
    let inputs = [run_input(&x), run_input(&labels)];
    let error = module.train_step(&mut state, &inputs, &mut |_, _| Ok(())).unwrap_err();
    assert!(error.to_string().starts_with("the state is nominal"), "{error}");
    optimizer.step(&mut state, &module).unwrap_err();
    module.copy_buffer_to_parameters(&mut state, &packed, true).unwrap_err();
    module.copy_buffer_to_parameters(&mut state, &packed, false).unwrap();
    assert!(!state.is_nominal());
    let data = batch(4, 1);
    assert_eq!(train(&mut module, &mut state, &data), train(&mut full_module, &mut full, &data));
    optimizer.step(&mut state, &module).unwrap();
    assert_eq!(optimizer.learning_rate(&state).unwrap(), 0.001);
}

#[test]
fn exported_model_equals_evaluation() {
    let folder = tempfile::tempdir().unwrap();
    let mut state = state_of(CASE);
    let mut module = module_on(CASE, &mut state);
    let mut optimizer = optimizer_on(CASE, &mut state, &module);
    let data = batch(6, 1);
    train(&mut module, &mut state, &data);
    optimizer.step(&mut state, &module).unwrap();

    let path = folder.path().join("inference.onnx");
    module.export_model_for_inferencing(&state, &path, &["logits", "a1"]).unwrap();
    let mut session = InferenceSession::new(path.into(), SessionOptions::default()).unwrap();
    let names = |infos: &[ortrain::ValueInfo]| infos.iter().map(|info| info.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(session.inputs()), ["x"]);
    assert_eq!(names(session.outputs()), ["logits", "a1"]);
    let logits =
        collect(|deliver| session.run(&[run_input(&data.0)], deliver)).unwrap().remove(0).to_vec::<f32>();
    let labels: Vec<i64> = data.1.to_vec();
    let loss: f64 = logits
        .chunks(5)
        .zip(&labels)
        .map(|(row, &label)| {
            let sum: f64 = row.iter().map(|&value| f64::from(value).exp()).sum();
            sum.ln() - f64::from(row[label as usize])
        })
        .sum::<f64>()
        / labels.len() as f64;
    let evaluated = f64::from(evaluate(&mut module, &state, &data));
    assert!((loss - evaluated).abs() < 1e-5, "{loss} and {evaluated}");

    let none = module.inference_model(&state, &[]).unwrap_err();
    assert_eq!(none.to_string(), "an inference model needs at least one output; name it");
    let unknown = module.inference_model(&state, &["nothing"]).unwrap_err();
    assert_eq!(unknown.to_string(), "the evaluation model has no value \"nothing\" that could be an output");
}

#[test]
fn frozen_parameters_are_unchanged() {
    let case = "frozen_params";
    let mut state = state_of(case);
    let mut module = module_on(case, &mut state);
    let mut optimizer = optimizer_on(case, &mut state, &module);
    let before = state.parameter("fc1.weight").unwrap().to_tensor().unwrap();
    train(&mut module, &mut state, &batch(4, 1));
    optimizer.step(&mut state, &module).unwrap();
    assert_eq!(state.parameter("fc1.weight").unwrap().to_tensor().unwrap(), before);
    assert!(module.gradient("fc1.weight").is_none());
    assert!(state.gradient("fc1.weight").unwrap().is_none());
    assert_eq!(module.parameters_size(&state, true), 125);
}

#[test]
fn empty_checkpoint_trains_nothing() {
    let mut state = CheckpointState::from_checkpoint(Checkpoint::default()).unwrap();
    let source = recorded(CASE, "training_model.onnx").into();
    Module::new(source, &mut state, None, ModuleOptions::default()).unwrap_err();
}

/// Slots of a damaged file, or of another model, are rejected by name, and the state remains unchanged.
#[test]
fn rejects_mismatched_slots() {
    use ortrain::optim::{OptimizerSpec, optimizer_model};
    use ortrain::{DType, ModelSource};

    let case = "mlp_adamw_ce";
    let lion = optimizer_model(&OptimizerSpec::new("Lion").unwrap(), &[DType::F32]).unwrap();
    let lion = ModelSource::from_proto(&lion).unwrap();
    let mut state = common::state_of(case);
    let mut module = common::module_on(case, &mut state);
    let mut optimizer = Optimizer::new(lion.clone(), &mut state, &module).unwrap();
    common::train(&mut module, &mut state, &common::batch(4, 1));
    optimizer.step(&mut state, &module).unwrap();
    let refused = |change: &dyn Fn(&mut ortrain::Checkpoint)| {
        let mut checkpoint = state.to_checkpoint(true).unwrap();
        change(&mut checkpoint);
        let mut damaged = match CheckpointState::from_checkpoint(checkpoint) {
            Ok(damaged) => damaged,
            Err(error) => return error.to_string(),
        };
        let module = common::module_on(case, &mut damaged);
        Optimizer::new(lion.clone(), &mut damaged, &module).unwrap_err().to_string()
    };
    let shape = refused(&|checkpoint| {
        checkpoint.optimizer_groups[0].states[0].moments[0].tensor = Tensor::f32(&[1], &[0.0]);
    });
    assert!(
        shape.contains("\"momentum0\" of parameter") && shape.contains("float32[1] in the checkpoint"),
        "{shape}"
    );
    let missing = refused(&|checkpoint| {
        checkpoint.optimizer_groups[0].states.remove(0);
    });
    assert!(missing.contains("the optimizer state of the checkpoint lacks parameter"), "{missing}");
    let text = refused(&|checkpoint| checkpoint.extras.optimizer = Some("{".into()));
    assert!(
        text.contains("the optimizer of the checkpoint: the description of the optimizer is damaged"),
        "{text}"
    );
    let value = refused(&|checkpoint| {
        let mut spec = OptimizerSpec::new("Lion").unwrap();
        spec.settings.insert("beta1".into(), 1.0);
        checkpoint.extras.optimizer = Some(spec.to_text());
    });
    assert!(value.contains("beta1 must be a number from 0 to below 1, got 1"), "{value}");
    let other = refused(&|checkpoint| {
        checkpoint.extras.optimizer = Some(OptimizerSpec::new("SGD").unwrap().to_text());
    });
    assert!(other.contains("the state has the optimizer SGD"), "{other}");
}
