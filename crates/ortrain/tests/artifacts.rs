//! Artifacts: equality with recorded ones, training on them, and errors.
#![allow(clippy::unwrap_used)]

mod common;

use common::{numbers, recorded, run_input};
use ortrain::artifacts::{
    ArtifactOptions, Artifacts, Loss, OptimizerChoice, OptimizerKind, OptimizerSettings, generate,
};
use ortrain::{
    CheckpointState, DType, Dim, ErrorKind, InferenceSession, ModelSource, Module, ModuleOptions, Optimizer,
    SessionOptions, Stage, Tensor, collect, dump,
};
use ortrain_onnx::{ExternalData, GraphProto, LoadedModel, ModelProto, NodeProto};

fn names(list: &[&str]) -> Vec<String> {
    list.iter().map(|&name| name.to_owned()).collect()
}

const PARAMETERS: [&str; 4] = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"];

fn options(loss: Loss, optimizer: OptimizerKind) -> ArtifactOptions {
    ArtifactOptions {
        requires_grad: names(&PARAMETERS),
        losses: vec![loss.into()],
        optimizer: Some(optimizer.into()),
        ..ArtifactOptions::default()
    }
}

fn recorded_model(case: &str, file: &str) -> ModelProto {
    LoadedModel::load(recorded(case, file)).unwrap().proto
}

/// Nodes with attributes in a canonical order: their order has no meaning.
fn nodes(graph: &GraphProto) -> Vec<NodeProto> {
    let mut nodes = graph.node.clone();
    for node in &mut nodes {
        node.attribute.sort_by(|a, b| a.name.cmp(&b.name));
    }
    nodes
}

fn assert_same(case: &str, actual: &ModelProto, expected: &ModelProto) {
    assert_eq!(actual.ir_version, expected.ir_version, "{case}");
    assert_eq!(actual.producer_name, expected.producer_name, "{case}");
    assert_eq!(actual.opset_import, expected.opset_import, "{case}");
    let (actual_graph, expected_graph) = (actual.graph.as_ref().unwrap(), expected.graph.as_ref().unwrap());
    assert_eq!(actual_graph.name, expected_graph.name, "{case}");
    assert_eq!(actual_graph.input, expected_graph.input, "{case}");
    assert_eq!(actual_graph.output, expected_graph.output, "{case}");
    assert_eq!(nodes(actual_graph), nodes(expected_graph), "{case}");
    let names = |graph: &GraphProto| graph.initializer.iter().map(|t| t.name.clone()).collect::<Vec<_>>();
    assert_eq!(names(actual_graph), names(expected_graph), "{case}");
}

#[test]
fn models_equal_recorded_models() {
    use Loss::{BCEWithLogitsLoss, CrossEntropyLoss, L1Loss, MSELoss};
    use OptimizerKind::{AdamW, SGD};
    let clipped = OptimizerSettings {
        betas: (0.85, 0.99),
        epsilon: 1e-8,
        weight_decay: 0.05,
        max_norm: Some(0.25),
        ..OptimizerSettings::default()
    };
    let cases = [
        ("mlp_adamw_ce", options(CrossEntropyLoss, AdamW)),
        ("mlp_sgd_mse", options(MSELoss, SGD)),
        ("mlp_bce_logits", options(BCEWithLogitsLoss, AdamW)),
        ("mlp_l1", options(L1Loss, SGD)),
        (
            "frozen_params",
            ArtifactOptions {
                requires_grad: names(&["fc2.weight", "fc2.bias"]),
                frozen_params: names(&["fc1.weight"]),
                ..options(CrossEntropyLoss, AdamW)
            },
        ),
        (
            "mlp_adamw_clip_outputs",
            ArtifactOptions {
                additional_output_names: names(&["logits", "a1"]),
                optimizer: Some(OptimizerChoice::Kind(AdamW, clipped)),
                ..options(CrossEntropyLoss, AdamW)
            },
        ),
    ];
    for (case, options) in cases {
        let artifacts = generate(recorded(case, "forward.onnx").into(), options).unwrap();
        assert_same(case, &artifacts.eval_model, &recorded_model(case, "eval_model.onnx"));
        assert_same(case, &artifacts.optimizer_model.unwrap(), &recorded_model(case, "optimizer_model.onnx"));
        let expected = recorded_model(case, "training_model.onnx");
        assert_eq!(artifacts.training_model.opset_import, expected.opset_import, "{case}");
        assert_eq!(artifacts.training_model.ir_version, expected.ir_version, "{case}");
        let (found, expected_graph) = (artifacts.training_model.graph.unwrap(), expected.graph.unwrap());
        assert_eq!(found.input, expected_graph.input, "{case}");
        assert_eq!(found.output, expected_graph.output, "{case}");
        assert_eq!(
            artifacts.checkpoint,
            ortrain_checkpoint::load(recorded(case, "checkpoint")).unwrap(),
            "{case}"
        );
    }
}

/// Runs one step on artifacts; returns the loss and the gradients.
fn step(
    train: ModelSource,
    checkpoint: &[u8],
    inputs: &[Tensor],
    parameters: &[&str],
) -> (f32, Vec<Vec<f64>>) {
    let mut state = CheckpointState::from_bytes(checkpoint.to_vec()).unwrap();
    let mut module = Module::new(train, &mut state, None, ModuleOptions::default()).unwrap();
    let inputs: Vec<_> = inputs.iter().map(run_input).collect();
    let loss = collect(|deliver| module.train_step(&mut state, &inputs, deliver)).unwrap()[0].to_f64()[0];
    let gradients =
        parameters.iter().map(|name| module.gradient(name).unwrap().to_tensor().unwrap().to_f64());
    (loss as f32, gradients.collect())
}

#[test]
fn training_models_match_recorded_results() {
    let cases = [
        ("mlp_adamw_ce", Loss::CrossEntropyLoss, 5),
        ("mlp_sgd_mse", Loss::MSELoss, 5),
        ("mlp_bce_logits", Loss::BCEWithLogitsLoss, 3),
        ("mlp_l1", Loss::L1Loss, 3),
    ];
    for (case, loss, width) in cases {
        let artifacts =
            generate(recorded(case, "forward.onnx").into(), options(loss, OptimizerKind::SGD)).unwrap();
        let x = Tensor::f32(&[6, 10], &numbers(60, 1));
        let target = if loss == Loss::CrossEntropyLoss {
            Tensor::i64(&[6], &[0, 1, 2, 3, 4, 0])
        } else {
            let target: Vec<f32> = numbers(6 * width, 2).iter().map(|value| value.abs()).collect();
            Tensor::f32(&[6, width], &target)
        };
        let inputs = [x, target];
        let bytes = artifacts.checkpoint_bytes().unwrap();
        let ours =
            step(ModelSource::from_proto(&artifacts.training_model).unwrap(), &bytes, &inputs, &PARAMETERS);
        let theirs = step(recorded(case, "training_model.onnx").into(), &bytes, &inputs, &PARAMETERS);
        assert!((ours.0 - theirs.0).abs() <= 1e-6 * theirs.0.abs(), "{case}: {} and {}", ours.0, theirs.0);
        for (a, b) in ours.1.iter().flatten().zip(theirs.1.iter().flatten()) {
            assert!((a - b).abs() < 1e-6, "{case}: {a} and {b}");
        }
    }
}

#[test]
fn generation_is_deterministic() {
    let make = || {
        let build =
            generate(recorded("mlp_l1", "forward.onnx").into(), options(Loss::MSELoss, OptimizerKind::AdamW));
        build.unwrap().training_model
    };
    assert_eq!(make(), make());
}

#[test]
fn reports_impossible_artifacts() {
    let sentence = |change: &dyn Fn(&mut ArtifactOptions)| {
        let mut options = options(Loss::CrossEntropyLoss, OptimizerKind::AdamW);
        change(&mut options);
        let source: ModelSource = std::fs::read(recorded("mlp_adamw_ce", "forward.onnx")).unwrap().into();
        let error = generate(source, options).unwrap_err();
        (error.kind(), error.to_string())
    };
    let argument = |text: &str| (ErrorKind::InvalidArgument, text.to_owned());
    assert_eq!(
        sentence(&|options| options.requires_grad.clear()),
        argument("there are no parameters to train; name them in requires_grad")
    );
    assert_eq!(
        sentence(&|options| options.requires_grad.push("FC1.bias".into())),
        argument("the model has no initializer \"FC1.bias\"; did you mean \"fc1.bias\"?")
    );
    assert_eq!(
        sentence(&|options| options.frozen_params.push("fc1.bias".into())),
        argument("parameter \"fc1.bias\" cannot be both trained and frozen")
    );
    assert_eq!(
        sentence(&|options| options.additional_output_names.push("nothing".into())),
        argument("the model has no value \"nothing\" to use as an output")
    );
    assert_eq!(
        sentence(&|options| options.loss_input_names = names(&["nothing"])),
        argument("the model has no value \"nothing\" to use as an input of the loss")
    );
    let (_, not_scalar) = sentence(&|options| options.losses.clear());
    assert!(not_scalar.contains("the loss must be one float, but \"logits\" is"), "{not_scalar}");
    let (_, unreachable) = sentence(&|options| {
        options.losses = vec![Loss::L1Loss.into()];
        options.loss_input_names = names(&["h1"]);
    });
    assert!(unreachable.contains("\"fc2.weight\" cannot be trained"), "{unreachable}");
}

#[test]
fn initializers_may_be_listed_as_inputs() {
    let mut proto = recorded_model("mlp_adamw_ce", "forward.onnx");
    let expected = recorded_model("mlp_adamw_ce", "eval_model.onnx");
    proto.ir_version = 3;
    let of_parameters = expected.graph.as_ref().unwrap().input[2..].to_vec();
    proto.graph.as_mut().unwrap().input.splice(0..0, of_parameters);
    let source = ModelSource::from_proto(&proto).unwrap();
    let artifacts = generate(source, options(Loss::CrossEntropyLoss, OptimizerKind::AdamW)).unwrap();
    assert_eq!(artifacts.eval_model.graph.unwrap().input, expected.graph.unwrap().input);
    assert_eq!(artifacts.eval_model.ir_version, 4);
}

fn int64s(name: &str, values: &[i64]) -> ortrain_onnx::proto::TensorProto {
    ortrain_graph::tensor_to_proto(name, &Tensor::i64(&[values.len()], values))
}

/// `scores = x w + b`, with two computed parameters: `w` is 0.25 everywhere, `b` a constant that a node
/// unsqueezes.
fn computed_parameters() -> ModelProto {
    use ortrain_onnx::{AttributeProto, AttributeType};
    let node = |op: &str, inputs: &[&str], outputs: &[&str], attribute: Option<(&str, Tensor)>| NodeProto {
        op_type: op.into(),
        input: names(inputs),
        output: names(outputs),
        attribute: attribute
            .into_iter()
            .map(|(name, tensor)| AttributeProto {
                name: name.into(),
                r#type: AttributeType::Tensor.into(),
                t: Some(Box::new(ortrain_graph::tensor_to_proto("", &tensor))),
                ..AttributeProto::default()
            })
            .collect(),
        ..NodeProto::default()
    };
    let mut proto = linear_proto(DType::F32);
    let graph = proto.graph.as_mut().unwrap();
    graph.initializer = vec![int64s("w.shape", &[2, 3]), int64s("axes", &[0])];
    graph.node = vec![
        node("Add", &["xw", "b"], &["scores"], None),
        node("MatMul", &["x", "w"], &["xw"], None),
        node("ConstantOfShape", &["w.shape"], &["w"], Some(("value", Tensor::f32(&[1], &[0.25])))),
        node("Constant", &[], &["row"], Some(("value", Tensor::f32(&[3], &[0.5, -0.5, 1.0])))),
        node("Unsqueeze", &["row", "axes"], &["b"], None),
    ];
    proto
}

/// A value computed from constants alone becomes a parameter on request, as if it were an initializer.
#[test]
fn computed_constants_may_be_parameters() {
    let options = |train: &[&str], freeze: &[&str]| ArtifactOptions {
        requires_grad: names(train),
        frozen_params: names(freeze),
        losses: vec![Loss::MSELoss.into()],
        optimizer: Some(OptimizerKind::AdamW.into()),
        ..ArtifactOptions::default()
    };
    let (w, b) = (Tensor::filled(DType::F32, &[2, 3], 0.25), Tensor::f32(&[1, 3], &[0.5, -0.5, 1.0]));
    let mut plain = computed_parameters();
    let graph = plain.graph.as_mut().unwrap();
    graph.node.truncate(2);
    graph.initializer =
        vec![ortrain_graph::tensor_to_proto("w", &w), ortrain_graph::tensor_to_proto("b", &b)];
    let make = |proto: &ModelProto, options| generate(ModelSource::from_proto(proto).unwrap(), options);
    for (train, freeze) in [(["w"], ["b"]), (["b"], ["w"])] {
        let artifacts = make(&computed_parameters(), options(&train, &freeze)).unwrap();
        let expected = make(&plain, options(&train, &freeze)).unwrap();
        assert_eq!(artifacts.checkpoint, expected.checkpoint);
        assert_eq!(artifacts.eval_model, expected.eval_model);
        assert_eq!(artifacts.training_model, expected.training_model);
        assert_eq!(artifacts.optimizer_model, expected.optimizer_model);
    }

    // If only one of them is requested, the other one and the shared inputs remain.
    let mut proto = computed_parameters();
    proto.graph.as_mut().unwrap().initializer.push(int64s("unused", &[1]));
    let partial = make(&proto, options(&["w"], &[])).unwrap();
    let eval = partial.eval_model.graph.as_ref().unwrap();
    let operators: Vec<&str> = eval.node.iter().map(|node| node.op_type.as_str()).collect();
    assert_eq!(operators[..4], ["Add", "MatMul", "Constant", "Unsqueeze"]);
    let initializers: Vec<&str> = eval.initializer.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(initializers[..2], ["axes", "unused"]);
    let (x, target) = (Tensor::f32(&[2, 2], &numbers(4, 1)), Tensor::f32(&[2, 3], &numbers(6, 2)));
    let train = ModelSource::from_proto(&partial.training_model).unwrap();
    let ours = step(train, &partial.checkpoint_bytes().unwrap(), &[x.clone(), target.clone()], &["w"]);
    let plain_artifacts = make(&plain, options(&["w"], &[])).unwrap();
    let train = ModelSource::from_proto(&plain_artifacts.training_model).unwrap();
    assert_eq!(ours, step(train, &plain_artifacts.checkpoint_bytes().unwrap(), &[x, target], &["w"]));

    let refused = |train: &[&str], freeze: &[&str]| {
        make(&computed_parameters(), options(train, freeze)).unwrap_err().to_string()
    };
    assert_eq!(
        refused(&["w", "row"], &["b"]),
        "parameter \"b\" is computed from parameter \"row\" and would no longer follow it; name only one of them"
    );
    assert_eq!(
        refused(&["xw"], &[]),
        "the model has no initializer \"xw\", which is computed from the model's inputs"
    );
    assert_eq!(refused(&["W"], &[]), "the model has no initializer \"W\"; did you mean \"w\"?");
}

#[test]
fn other_types_than_float32_train_as_well() {
    for dtype in [DType::F64, DType::F16] {
        for loss in [Loss::MSELoss, Loss::L1Loss, Loss::BCEWithLogitsLoss, Loss::CrossEntropyLoss] {
            let artifacts = generate(
                linear(dtype),
                ArtifactOptions {
                    requires_grad: names(&["w"]),
                    losses: vec![loss.into()],
                    optimizer: Some(OptimizerKind::AdamW.into()),
                    ..ArtifactOptions::default()
                },
            )
            .unwrap();
            let target = if loss == Loss::CrossEntropyLoss {
                Tensor::i64(&[2], &[0, 1])
            } else {
                Tensor::filled(dtype, &[2, 3], 0.75)
            };
            let train = ModelSource::from_proto(&artifacts.training_model).unwrap();
            let bytes = artifacts.checkpoint_bytes().unwrap();
            let x = Tensor::filled(dtype, &[2, 2], 1.0);
            let inputs = [x, target];
            let (value, gradients) = step(train.clone(), &bytes, &inputs, &["w"]);
            assert!(value.is_finite() && value > 0.0, "{dtype} {loss:?}: {value}");
            assert!(gradients[0].iter().any(|&value| value != 0.0), "{dtype} {loss:?}");

            let mut state = CheckpointState::from_bytes(bytes).unwrap();
            let mut module = Module::new(train, &mut state, None, ModuleOptions::default()).unwrap();
            let optimizer = ModelSource::from_proto(&artifacts.optimizer_model.unwrap()).unwrap();
            let mut optimizer = Optimizer::new(optimizer, &mut state, &module).unwrap();
            optimizer.set_learning_rate(&mut state, 0.05).unwrap();
            let inputs: Vec<_> = inputs.iter().map(run_input).collect();
            let train = |state: &mut CheckpointState, module: &mut Module| {
                collect(|deliver| module.train_step(state, &inputs, deliver)).unwrap()[0].to_f64()[0]
            };
            let before = train(&mut state, &mut module);
            optimizer.step(&mut state, &module).unwrap();
            let after = train(&mut state, &mut module);
            assert!(after < before, "{dtype} {loss:?}: from {before} to {after}");
        }
    }
}

/// `scores = x w`, with `x` `[batch, 2]` and `w` `[2, 3]`.
fn linear(dtype: DType) -> ModelSource {
    ModelSource::from_proto(&linear_proto(dtype)).unwrap()
}

fn linear_proto(dtype: DType) -> ModelProto {
    use ortrain_graph::{Attrs, Graph, Node, Shape, ValueType};
    let mut graph = Graph::new("linear");
    let rows =
        |columns: usize| Some([Dim::symbol("batch"), Dim::from(columns)].into_iter().collect::<Shape>());
    let x = graph.add_value("x", ValueType::Tensor(dtype, rows(2)));
    let w = graph.add_constant("w", Tensor::filled(dtype, &[2, 3], 0.25));
    let scores = graph.add_value("scores", ValueType::Tensor(dtype, rows(3)));
    graph.nodes.push(Node::new("", "MatMul", &[Some(x), Some(w)], &[Some(scores)], Attrs::new()));
    graph.inputs = vec![x];
    graph.outputs = vec![scores];
    let opset = ortrain_onnx::OperatorSetIdProto { domain: String::new(), version: 17 };
    ModelProto {
        ir_version: 8,
        opset_import: vec![opset],
        graph: Some(graph.to_proto()),
        ..ModelProto::default()
    }
}

#[test]
fn files_are_written_and_train() {
    let folder = tempfile::tempdir().unwrap();
    let artifacts: Artifacts = generate(
        recorded("mlp_sgd_mse", "forward.onnx").into(),
        ArtifactOptions { nominal_checkpoint: true, ..options(Loss::MSELoss, OptimizerKind::SGD) },
    )
    .unwrap();
    artifacts.write(folder.path(), "a_").unwrap();
    let mut files: Vec<String> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    assert_eq!(
        files,
        [
            "a_checkpoint",
            "a_eval_model.onnx",
            "a_nominal_checkpoint",
            "a_optimizer_model.onnx",
            "a_training_model.onnx"
        ]
    );
    let at = |name: &str| folder.path().join(name);
    let mut state = CheckpointState::load(at("a_checkpoint")).unwrap();
    let train = at("a_training_model.onnx").into();
    let eval = at("a_eval_model.onnx").into();
    let mut module = Module::new(train, &mut state, Some(eval), ModuleOptions::default()).unwrap();
    let mut optimizer = Optimizer::new(at("a_optimizer_model.onnx").into(), &mut state, &module).unwrap();
    optimizer.set_learning_rate(&mut state, 0.1).unwrap();
    let (x, target) = (Tensor::f32(&[4, 10], &numbers(40, 1)), Tensor::f32(&[4, 5], &numbers(20, 2)));
    let inputs = [run_input(&x), run_input(&target)];
    let mut losses = Vec::new();
    for _ in 0..10 {
        let loss = collect(|deliver| module.train_step(&mut state, &inputs, deliver)).unwrap();
        losses.push(loss[0].to_f64()[0]);
        optimizer.step(&mut state, &module).unwrap();
        module.lazy_reset_grad();
    }
    assert!(losses.windows(2).all(|pair| pair[1] < pair[0]), "{losses:?}");
    let missing = artifacts.write(at("nowhere"), "").unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NoSuchFile);
}

#[test]
fn every_stage_can_be_printed() {
    let forward = || ModelSource::from(recorded("mlp_sgd_mse", "eval_model.onnx"));
    let graph = dump(forward(), Stage::Graph, &[]).unwrap();
    assert!(graph.contains("h1: float32[batch, 24] = Gemm("), "{graph}");
    let train = || ModelSource::from(recorded("mlp_sgd_mse", "training_model.onnx"));
    let program = dump(train(), Stage::Program, &[("x".into(), vec![3, 10])]).unwrap();
    assert!(program.contains("peak work"), "{program}");
    assert!(program.contains("float32[72]"), "3 rows of 24: {program}");
    // Gradient of a model with embedded weights.
    let mut state = CheckpointState::load(recorded("mlp_sgd_mse", "checkpoint")).unwrap();
    let module = Module::new(train(), &mut state, Some(forward()), ModuleOptions::default()).unwrap();
    let loss = &module.output_names(false)[..1];
    let model = ModelSource::from_proto(&module.inference_model(&state, loss).unwrap().proto).unwrap();
    let gradient = dump(model, Stage::Gradient, &[]).unwrap();
    assert!(gradient.contains("output   fc1.weight_grad: float32[10, 24]"), "{gradient}");
    let error = dump(train(), Stage::Program, &[("y".into(), vec![3])]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn forward_model_runs() {
    let mut session = InferenceSession::new(linear(DType::F32), SessionOptions::default()).unwrap();
    assert_eq!(session.inputs()[0].to_string(), "float32[batch, 2]");
    let x = Tensor::f32(&[1, 2], &[1.0, 2.0]);
    let results = collect(|deliver| session.run(&[run_input(&x)], deliver)).unwrap();
    assert_eq!(results[0], Tensor::f32(&[1, 3], &[0.75; 3]));
    LoadedModel::from_bytes(vec![], ExternalData::none()).unwrap_err();
}
