//! Training session: bit-identical to its parts, outputs in memory of the caller, and errors.
#![allow(clippy::unwrap_used)]

mod common;

use std::borrow::BorrowMut;

use common::{batch, module_on, optimizer_on, recorded, state_of, train};
use ortrain::artifacts::{ArtifactOptions, Loss, generate};
use ortrain::{
    CheckpointState, DType, ErrorKind, InferenceSession, InputView, LinearLRScheduler, ModelSource,
    ModuleOptions, OutputTarget, Result, SessionOptions, TargetBytes, Tensor, TrainingSession,
};
use ortrain_onnx::{LoadedModel, NodeProto};

const CASE: &str = "mlp_adamw_ce";

/// Models of a session.
#[derive(Clone, Copy)]
struct Models {
    eval: bool,
    optimizer: bool,
}

const ALL: Models = Models { eval: true, optimizer: true };

fn session_with<S: BorrowMut<CheckpointState>>(case: &str, state: S, models: Models) -> TrainingSession<S> {
    TrainingSession::new(
        state,
        recorded(case, "training_model.onnx").into(),
        models.eval.then(|| recorded(case, "eval_model.onnx").into()),
        models.optimizer.then(|| recorded(case, "optimizer_model.onnx").into()),
        ModuleOptions::default(),
    )
    .unwrap()
}

fn session_on(case: &str) -> TrainingSession {
    session_with(case, state_of(case), ALL)
}

fn inputs(batch: &(Tensor, Tensor)) -> [InputView<'_>; 2] {
    [InputView::from(&batch.0), InputView::from(&batch.1)]
}

fn loss_of(outputs: &[Tensor]) -> f32 {
    outputs[0].to_vec::<f32>()[0]
}

fn sentence<T: std::fmt::Debug>(result: Result<T>) -> (ErrorKind, String) {
    let error = result.unwrap_err();
    (error.kind(), error.to_string())
}

#[test]
fn session_matches_its_parts() {
    let mut state = state_of(CASE);
    let mut module = module_on(CASE, &mut state);
    let mut optimizer = optimizer_on(CASE, &mut state, &module);
    let mut session = session_on(CASE);

    let scheduler = LinearLRScheduler::new(&mut state, 2, 6, 0.05).unwrap();
    session.register_linear_lr_scheduler(2, 6, 0.05).unwrap();
    session.scheduler_step().unwrap();
    for step in 0..8 {
        let data = batch(8, step);
        for _ in 0..2 {
            let outputs = session.train_step(&inputs(&data)).unwrap();
            assert_eq!(loss_of(&outputs).to_bits(), train(&mut module, &mut state, &data).to_bits());
        }
        assert_eq!(session.learning_rate().unwrap(), optimizer.learning_rate(&state).unwrap());
        optimizer.step(&mut state, &module).unwrap();
        session.optimizer_step().unwrap();
        scheduler.step(&mut state).unwrap();
        session.scheduler_step().unwrap();
        module.lazy_reset_grad();
        session.lazy_reset_grad();
    }
    assert_eq!(session.state().to_bytes(true).unwrap(), state.to_bytes(true).unwrap());
    let data = batch(8, 9);
    let outputs = session.eval_step(&inputs(&data)).unwrap();
    assert_eq!(loss_of(&outputs), common::evaluate(&mut module, &state, &data));
}

#[test]
fn session_owns_or_borrows_state() {
    let mut state = state_of(CASE);
    let mut session = session_with(CASE, &mut state, ALL);
    session.train_step(&inputs(&batch(4, 1))).unwrap();
    session.optimizer_step().unwrap();
    session.state_mut().set_property("epoch", ortrain::Property::Int(1));
    session.into_state().set_seed(3);
    assert_eq!((state.train_step_count(), state.optimizer_step_count(), state.seed()), (1, 1, 3));

    let mut session = session_with(CASE, state, ALL);
    assert!(session.state().property("epoch").is_ok());
    session.set_seed(4);
    session.train_step(&inputs(&batch(4, 1))).unwrap();
    let (state, rest) = session.detach();
    assert_eq!((state.train_step_count(), state.seed()), (2, 4));
    // The optimizer, a pending reset and the scheduler are preserved.
    let mut session = rest.attach(Box::new(state));
    session.register_linear_lr_scheduler(0, 2, 0.5).unwrap();
    session.lazy_reset_grad();
    let (state, rest) = session.detach();
    let mut session = rest.attach(state);
    session.scheduler_step().unwrap();
    assert_eq!(session.learning_rate().unwrap(), 0.25);
    session.train_step(&inputs(&batch(4, 2))).unwrap();
    let mut fresh = session_with(CASE, state_of(CASE), ALL);
    let parameters = session.to_buffer(false).unwrap();
    fresh.from_buffer(&parameters, None).unwrap();
    fresh.train_step(&inputs(&batch(4, 2))).unwrap();
    let gradient = |module: &ortrain::Module| module.gradient("fc1.bias").unwrap().to_tensor().unwrap();
    assert_eq!(gradient(session.module()), gradient(fresh.module()), "the gradients were replaced");
    assert!(session.optimizer().is_some());
}

#[test]
fn rejects_other_state() {
    let (_, rest) = session_on(CASE).detach();
    let mut session = rest.attach(state_of("frozen_params"));
    let expected = "the state has other parameters than the state of this module";
    let message = sentence(session.train_step(&inputs(&batch(4, 1))));
    assert_eq!(message, (ErrorKind::InvalidArgument, expected.into()));
}

#[test]
fn outputs_are_written_to_targets() {
    let case = "mlp_adamw_clip_outputs";
    let (mut session, mut other) = (session_on(case), session_on(case));
    assert_eq!(session.output_names(true)[1..], ["logits", "a1"]);
    let names: Vec<&str> = session.outputs(true).iter().map(|info| info.name.as_str()).collect();
    assert_eq!(names, session.output_names(true));
    assert_eq!(session.inputs(false).len(), session.input_names(false).len());
    let data = batch(8, 1);
    let (mut loss, mut logits, mut a1) = ([f32::NAN; 1], [f32::NAN; 40], [f32::NAN; 192]);
    for training in [true, false] {
        let mut targets = [
            OutputTarget::f32(&[], &mut loss),
            OutputTarget::f32(&[8, 5], &mut logits),
            OutputTarget::f32(&[8, 24], &mut a1),
        ];
        let expected = if training {
            session.train_step_into(&inputs(&data), &mut targets).unwrap();
            other.train_step(&inputs(&data)).unwrap()
        } else {
            session.eval_step_into(&inputs(&data), &mut targets).unwrap();
            other.eval_step(&inputs(&data)).unwrap()
        };
        assert_eq!(expected[0].to_vec::<f32>(), loss);
        assert_eq!(expected[1].to_vec::<f32>(), logits);
        assert_eq!(expected[2].to_vec::<f32>(), a1);
    }
    session.optimizer_step().unwrap();
    other.optimizer_step().unwrap();
    assert_eq!(session.to_buffer(false).unwrap(), other.to_buffer(false).unwrap());
}

#[test]
fn rejects_mismatched_outputs_before_step() {
    let case = "mlp_adamw_clip_outputs";
    let mut session = session_on(case);
    let data = batch(8, 1);
    let loss_name = session.output_names(true)[0].to_owned();
    let (mut loss, mut logits, mut a1) = ([7.0], [7.0; 48], [7.0; 192]);
    let mut wide = [0_u8; 8];
    let narrow: &[usize] = &[6, 8];
    let expected = |text: &str| (ErrorKind::InvalidArgument, text.replace("LOSS", &loss_name));

    let mut single = [OutputTarget::f32(&[], &mut loss)];
    let message = sentence(session.train_step_into(&inputs(&data), &mut single));
    assert_eq!(message, expected("expected 3 output buffers (LOSS, logits, a1), got 1"));

    let mut targets = [
        OutputTarget::f32(&[], &mut loss),
        OutputTarget::f32(narrow, &mut logits),
        OutputTarget::f32(&[8, 24], &mut a1),
    ];
    let text = "output \"logits\" is float32[8, 5], but its buffer is float32[6, 8]";
    assert_eq!(sentence(session.train_step_into(&inputs(&data), &mut targets)), expected(text));
    assert_eq!(sentence(session.eval_step_into(&inputs(&data), &mut targets)), expected(text));

    targets[1].dims = &[8, 5];
    let text =
        "the buffer of output \"logits\" is declared as float32[8, 5] (160 bytes), but it has 192 bytes";
    assert_eq!(sentence(session.train_step_into(&inputs(&data), &mut targets)), expected(text));

    targets[0] = host_target(DType::F64, &[], &mut wide);
    let text = "output \"LOSS\" is float32[], but its buffer is float64[]";
    assert_eq!(sentence(session.train_step_into(&inputs(&data), &mut targets)), expected(text));

    targets[0] = host_target(DType::F32, &[usize::MAX, 2], &mut []);
    let (kind, text) = sentence(session.train_step_into(&inputs(&data), &mut targets));
    assert_eq!(kind, ErrorKind::InvalidArgument);
    assert!(text.contains("too large to address"), "{text}");

    assert_eq!(session.state().train_step_count(), 0);
    assert!(common::gradient(session.module(), "fc1.bias").iter().all(|&value| value == 0.0));
    assert!(logits.iter().chain(&a1).all(|&value| value == 7.0), "nothing was written");
}

fn host_target<'a>(dtype: DType, dims: &'a [usize], bytes: &'a mut [u8]) -> OutputTarget<'a> {
    OutputTarget { dtype, dims, bytes: TargetBytes::Host(bytes) }
}

/// A classifier with an additional output, the positions of nonzero inputs: its shape is data-dependent.
fn counting() -> (CheckpointState, ModelSource, ModelSource) {
    let mut proto = LoadedModel::load(recorded(CASE, "forward.onnx")).unwrap().proto;
    proto.graph.as_mut().unwrap().node.push(NodeProto {
        op_type: "NonZero".into(),
        input: vec!["x".into()],
        output: vec!["places".into()],
        ..NodeProto::default()
    });
    let artifacts = generate(
        ModelSource::from_proto(&proto).unwrap(),
        ArtifactOptions {
            requires_grad: vec!["fc1.weight".into(), "fc2.weight".into()],
            losses: vec![Loss::CrossEntropyLoss.into()],
            additional_output_names: vec!["places".into()],
            ..ArtifactOptions::default()
        },
    )
    .unwrap();
    let state = CheckpointState::from_bytes(artifacts.checkpoint_bytes().unwrap()).unwrap();
    let of = |proto| ModelSource::from_proto(proto).unwrap();
    (state, of(&artifacts.training_model), of(&artifacts.eval_model))
}

#[test]
fn writes_outputs_with_value_dependent_shapes() {
    let (state, train, eval) = counting();
    let mut session = TrainingSession::new(state, train, Some(eval), None, ModuleOptions::default()).unwrap();
    let mut elements = [0.0; 20];
    [elements[3], elements[14]] = [1.0, 2.0];
    let data = (Tensor::f32(&[2, 10], &elements), Tensor::i64(&[2], &[0, 1]));
    let mut loss = [0.0];
    let mut position_bytes = [0_u8; 32];
    let gradients = |session: &TrainingSession| {
        ["fc1.weight", "fc2.weight"].map(|name| common::gradient(session.module(), name))
    };
    session.train_step(&inputs(&data)).unwrap();
    let before = gradients(&session);

    let mut buffer = [0_u8; 48];
    let mut outputs = [OutputTarget::f32(&[], &mut loss), host_target(DType::I64, &[2, 3], &mut buffer)];
    let text = "output \"places\" is int64[2, 2], but its buffer is int64[2, 3]";
    let expected = (ErrorKind::InvalidArgument, text.to_owned());
    assert_eq!(sentence(session.train_step_into(&inputs(&data), &mut outputs)), expected);
    assert_eq!(sentence(session.eval_step_into(&inputs(&data), &mut outputs)), expected);
    assert_eq!(gradients(&session), before, "the step was taken back");
    assert_eq!(session.state().train_step_count(), 1);

    outputs[1] = host_target(DType::I64, &[2, 2], &mut position_bytes);
    session.train_step_into(&inputs(&data), &mut outputs).unwrap();
    let positions = bytemuck::pod_collect_to_vec::<u8, i64>(&position_bytes);
    assert_eq!(positions, [0, 1, 3, 4]);
    let doubled = before.map(|values| values.iter().map(|value| value * 2.0).collect::<Vec<f32>>());
    assert_eq!(gradients(&session), doubled);
}

#[test]
fn learning_rates_follow_the_schedule() {
    let mut session = session_on(CASE);
    assert_eq!(session.learning_rate().unwrap(), 0.001);
    session.set_learning_rate(0.5).unwrap();
    assert_eq!(session.learning_rate().unwrap(), 0.5);
    session.register_linear_lr_scheduler(2, 4, 0.1).unwrap();
    let mut rates = vec![session.learning_rate().unwrap()];
    for _ in 0..5 {
        session.optimizer_step().unwrap();
        session.scheduler_step().unwrap();
        session.scheduler_step().unwrap();
        rates.push(session.learning_rate().unwrap());
    }
    assert_eq!(rates, [0.1, 0.05, 0.1, 0.05, 0.0, 0.0]);
    let scheduler = session.state().to_checkpoint(true).unwrap().extras.scheduler.unwrap();
    assert_eq!((scheduler.warmup_steps, scheduler.total_steps, scheduler.step), (2, 4, 5));
}

#[test]
fn registered_scheduler_is_in_checkpoint() {
    let mut session = session_on(CASE);
    session.register_linear_lr_scheduler(3, 9, 0.25).unwrap();
    let extras = session.state().to_checkpoint(true).unwrap().extras;
    let scheduler = extras.scheduler.unwrap();
    assert_eq!((scheduler.warmup_steps, scheduler.total_steps, scheduler.step), (3, 9, 0));
    assert_eq!((scheduler.initial_learning_rate, extras.learning_rate), (0.25, Some(0.25)));
}

#[test]
fn reports_early_calls_and_missing_models() {
    let fail = |text: &str| (ErrorKind::Fail, text.to_owned());
    let data = batch(4, 1);
    let mut bare = session_with(CASE, state_of(CASE), Models { eval: false, optimizer: false });
    assert!(bare.optimizer().is_none());
    let none =
        |what: &str| fail(&format!("{what} needs an optimizer model, but the session was made without one"));
    assert_eq!(sentence(bare.optimizer_step()), none("an optimizer step"));
    assert_eq!(sentence(bare.learning_rate()), none("a learning rate"));
    assert_eq!(sentence(bare.set_learning_rate(0.1)), none("a learning rate"));
    assert_eq!(sentence(bare.register_linear_lr_scheduler(1, 2, 0.1)), none("a learning rate scheduler"));
    let unregistered = "no learning rate scheduler is registered; register one before a scheduler step";
    assert_eq!(sentence(bare.scheduler_step()), fail(unregistered));
    let no_eval =
        |what: &str| fail(&format!("{what} needs an evaluation model, but the session was made without one"));
    assert_eq!(sentence(bare.eval_step(&inputs(&data))), no_eval("an evaluation step"));
    assert_eq!(sentence(bare.eval_step_into(&inputs(&data), &mut [])), no_eval("an evaluation step"));
    assert_eq!(sentence(bare.export_model_for_inferencing("m.onnx", &["logits"])), no_eval("an export"));
    assert!(bare.input_names(false).is_empty() && bare.output_names(false).is_empty());
    bare.lazy_reset_grad();
    bare.train_step(&inputs(&data)).unwrap();

    let mut session = session_on(CASE);
    assert_eq!(sentence(session.scheduler_step()), fail(unregistered));
    session.register_linear_lr_scheduler(1, 2, 0.1).unwrap();
    assert_eq!(
        sentence(session.register_linear_lr_scheduler(1, 2, 0.1)),
        fail(
            "a learning rate scheduler is registered already; a session has one, so make another session on the same \
             state for another scheduler"
        )
    );
    assert_eq!(
        sentence(session.set_learning_rate(0.1)),
        fail(
            "the learning rate cannot be set: a learning rate scheduler is registered, which sets it at every \
             scheduler step"
        )
    );
    assert_eq!(
        sentence(session.train_step(&inputs(&data)[..1])),
        (ErrorKind::InvalidArgument, "expected 2 inputs (x, labels), got 1".into())
    );
}

#[test]
fn failed_construction_keeps_state() {
    let mut state = state_of(CASE);
    let mut session = session_with(CASE, &mut state, ALL);
    session.train_step(&inputs(&batch(4, 1))).unwrap();
    let state_gradient =
        |state: &CheckpointState| state.gradient("fc1.bias").unwrap().unwrap().to_tensor().unwrap();
    let gradient = state_gradient(session.state());
    drop(session);
    let attempt = |state: &mut CheckpointState, train: &str, eval: Option<&str>, optimizer: &str| {
        let file = |name: &str| ModelSource::from(recorded(CASE, name));
        let result = TrainingSession::new(
            state,
            file(train),
            eval.map(file),
            Some(file(optimizer)),
            ModuleOptions::default(),
        );
        sentence(result)
    };
    let (kind, text) = attempt(&mut state, "training_model.onnx", None, "eval_model.onnx");
    assert_eq!(kind, ErrorKind::InvalidModel);
    assert!(text.contains("the optimizer model"), "{text}");
    let (kind, _) = attempt(&mut state, "training_model.onnx", None, "nowhere.onnx");
    assert_eq!(kind, ErrorKind::NoSuchFile);
    // In C#, the third argument is the optimizer model; in C and C++, it is the evaluation model.
    let (kind, text) =
        attempt(&mut state, "training_model.onnx", Some("optimizer_model.onnx"), "optimizer_model.onnx");
    assert_eq!(kind, ErrorKind::InvalidModel);
    assert!(text.contains("the evaluation model"), "{text}");
    assert_eq!(state_gradient(&state), gradient);
}

#[test]
fn parameters_go_through_a_buffer() {
    let case = "frozen_params";
    let mut session = session_on(case);
    assert_eq!((session.parameters_size(true), session.parameters_size(false)), (125, 365));
    let (trainable, all_parameters) = (session.to_buffer(true).unwrap(), session.to_buffer(false).unwrap());
    assert_eq!((trainable.len(), all_parameters.len()), (125, 365));
    for (buffer, flag) in [
        (&trainable, None),
        (&trainable, Some(true)),
        (&all_parameters, None),
        (&all_parameters, Some(false)),
    ] {
        session.from_buffer(&[2.0; 365], None).unwrap();
        let doubled: Vec<f32> = buffer.iter().map(|value| value * 2.0).collect();
        session.from_buffer(&doubled, flag).unwrap();
        assert_eq!(session.to_buffer(buffer.len() == 125).unwrap(), doubled);
        if buffer.len() == 125 {
            let frozen = session.to_buffer(false).unwrap().into_iter().filter(|&value| value == 2.0).count();
            assert!(frozen >= 240, "frozen parameters stay");
        }
    }
    assert_eq!(
        sentence(session.from_buffer(&[0.0; 5], None)),
        (
            ErrorKind::InvalidArgument,
            "the buffer should have 365 elements (all parameters) or 125 (trained parameters), but it has 5"
                .into()
        )
    );
    let text = "the buffer should have 125 elements, but it has 365";
    assert_eq!(
        sentence(session.from_buffer(&all_parameters, Some(true))),
        (ErrorKind::InvalidArgument, text.into())
    );
}

#[test]
fn buffer_fills_nominal_state() {
    let case = "checkpoint_resume";
    let nominal = CheckpointState::load(recorded(case, "nominal_checkpoint")).unwrap();
    let mut session = session_with(case, nominal, ALL);
    let data = batch(4, 1);
    let (kind, text) = sentence(session.train_step(&inputs(&data)));
    assert_eq!(kind, ErrorKind::Fail);
    assert!(text.starts_with("the state is nominal"), "{text}");
    assert!(session.eval_step(&inputs(&data)).is_err());
    assert!(session.optimizer_step().is_err());
    assert!(session.to_buffer(false).is_err());
    assert_eq!(session.learning_rate().unwrap(), 0.001);
    session.set_learning_rate(0.1).unwrap();
    assert!(session.from_buffer(&vec![0.0; session.parameters_size(true)], Some(true)).is_err());

    let mut full = session_on(case);
    // Without frozen parameters, the length alone is ambiguous.
    session.from_buffer(&full.to_buffer(false).unwrap(), None).unwrap();
    full.set_learning_rate(0.1).unwrap();
    for session in [&mut session, &mut full] {
        session.train_step(&inputs(&data)).unwrap();
        session.optimizer_step().unwrap();
    }
    assert_eq!(session.to_buffer(false).unwrap(), full.to_buffer(false).unwrap());
}

#[test]
fn exports_models_loaded_from_bytes() {
    let bytes = |file: &str| ModelSource::from(std::fs::read(recorded(CASE, file)).unwrap());
    let mut session = TrainingSession::new(
        state_of(CASE),
        bytes("training_model.onnx"),
        Some(bytes("eval_model.onnx")),
        Some(bytes("optimizer_model.onnx")),
        ModuleOptions::default(),
    )
    .unwrap();
    session.train_step(&inputs(&batch(4, 1))).unwrap();
    session.optimizer_step().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.onnx");
    session.export_model_for_inferencing(&path, &["logits"]).unwrap();
    let exported = InferenceSession::new(path.into(), SessionOptions::default()).unwrap();
    assert_eq!(exported.outputs()[0].name, "logits");
}
