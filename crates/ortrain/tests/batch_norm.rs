//! BatchNormalization in artifacts: used statistics, updated statistics, and their storage.
#![allow(clippy::unwrap_used)]

mod common;

use common::{batch, evaluate, gradient, numbers, run_input, train};
use ortrain::artifacts::{ArtifactOptions, Artifacts, BatchNormMode, Loss, OptimizerKind, generate};
use ortrain::{
    CheckpointState, DType, ErrorKind, InferenceSession, ModelSource, Module, ModuleOptions, Optimizer,
    RunOptions, SessionOptions, Tensor, backend, collect,
};
use ortrain_graph::{Attrs, Dim, Graph, Node, ValueId, ValueType};
use ortrain_onnx::{GraphProto, ModelProto, OperatorSetIdProto, encode};

/// A normalization with statistics of the batch.
const INTERNAL: &str = "BatchNormInternal";
const HIDDEN: usize = 4;
const MOMENTUM: f32 = 0.75;
const STATISTICS: [&str; 4] = ["one.mean", "one.var", "two.mean", "two.var"];
const PARAMETERS: [&str; 6] = ["w1", "one.scale", "one.bias", "two.scale", "two.bias", "w2"];

/// Builder of models.
struct ModelBuilder {
    graph: Graph,
    opset: i64,
}

impl ModelBuilder {
    fn new() -> ModelBuilder {
        let mut graph = Graph::new("graph");
        let x = graph.add_value(
            "x",
            ValueType::Tensor(DType::F32, Some([Dim::symbol("n"), 10.into()].into_iter().collect())),
        );
        graph.inputs.push(x);
        ModelBuilder { graph, opset: 17 }
    }

    fn weight(&mut self, name: &str, dims: &[usize], seed: u32) -> ValueId {
        let count = dims.iter().product();
        self.graph.add_constant(name, Tensor::f32(dims, &numbers(count, seed)))
    }

    fn node(&mut self, op: &str, name: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId {
        let y = self.graph.add_value(name, ValueType::Unknown);
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        let mut node = Node::new("", op, &inputs, &[Some(y)], attrs);
        node.name = format!("{op}_{name}").into();
        self.graph.nodes.push(node);
        y
    }

    /// Scale, bias, mean and variance; the variance is positive.
    fn parameters(&mut self, name: &str, seed: u32) -> [ValueId; 4] {
        let mut parameter =
            |suffix: &str, k: u32| self.weight(&format!("{name}.{suffix}"), &[HIDDEN], seed + k);
        let [scale, bias, mean] = [("scale", 0), ("bias", 1), ("mean", 2)].map(|(s, k)| parameter(s, k));
        let var: Vec<f32> = numbers(HIDDEN, seed + 3).iter().map(|x| x.abs() + 0.5).collect();
        let var = self.graph.add_constant(&format!("{name}.var"), Tensor::f32(&[HIDDEN], &var));
        [scale, bias, mean, var]
    }

    fn norm(&mut self, name: &str, x: ValueId, parameters: [ValueId; 4]) -> ValueId {
        let attrs = Attrs::new().with("momentum", MOMENTUM);
        self.node("BatchNormalization", name, &[&[x][..], &parameters].concat(), attrs)
    }

    /// `scores = y w2`
    fn finish(mut self, y: ValueId) -> ModelProto {
        let w = self.weight("w2", &[HIDDEN, 5], 90);
        let scores = self.node("MatMul", "scores", &[y, w], Attrs::new());
        let dims = [Dim::symbol("n"), 5.into()].into_iter().collect();
        self.graph.value_mut(scores).ty = ValueType::Tensor(DType::F32, Some(dims));
        self.graph.outputs.push(scores);
        ModelProto {
            ir_version: 8,
            opset_import: vec![OperatorSetIdProto { domain: String::new(), version: self.opset }],
            graph: Some(self.graph.to_proto()),
            ..ModelProto::default()
        }
    }

    fn hidden(&mut self) -> ValueId {
        let w = self.weight("w1", &[10, HIDDEN], 1);
        self.node("MatMul", "h", &[self.graph.inputs[0], w], Attrs::new())
    }
}

/// Two normalizations in sequence.
fn two_normalizations() -> ModelProto {
    two_normalizations_with("Relu")
}

fn two_normalizations_with(activation: &str) -> ModelProto {
    let mut builder = ModelBuilder::new();
    let h = builder.hidden();
    let first = builder.parameters("one", 10);
    let a = builder.norm("a", h, first);
    let active = builder.node(activation, "r", &[a], Attrs::new());
    let two = builder.parameters("two", 20);
    let b = builder.norm("b", active, two);
    builder.finish(b)
}

fn names(list: &[&str]) -> Vec<String> {
    list.iter().map(|&name| name.to_owned()).collect()
}

fn source(model: &ModelProto) -> ModelSource {
    encode(model).unwrap().into()
}

fn options(trained: &[&str], batch_norm: BatchNormMode) -> ArtifactOptions {
    ArtifactOptions {
        requires_grad: names(trained),
        losses: vec![Loss::CrossEntropyLoss.into()],
        optimizer: Some(OptimizerKind::SGD.into()),
        batch_norm,
        ..ArtifactOptions::default()
    }
}

fn generate_artifacts(model: &ModelProto, trained: &[&str], batch_norm: BatchNormMode) -> Artifacts {
    generate(source(model), options(trained, batch_norm)).unwrap()
}

fn generation_error(model: &ModelProto, options: ArtifactOptions) -> (ErrorKind, String) {
    let error = generate(source(model), options).expect_err("it is refused");
    (error.kind(), error.to_string())
}

struct Run {
    state: CheckpointState,
    module: Module,
    optimizer: Optimizer,
}

impl Run {
    fn new(artifacts: &Artifacts) -> Run {
        Run::on(artifacts, artifacts.checkpoint_bytes().unwrap(), ModuleOptions::default())
    }

    fn on(artifacts: &Artifacts, checkpoint: Vec<u8>, options: ModuleOptions) -> Run {
        let mut state = CheckpointState::from_bytes(checkpoint).unwrap();
        let (train, eval) = (source(&artifacts.training_model), source(&artifacts.eval_model));
        let module = Module::new(train, &mut state, Some(eval), options).unwrap();
        let optimizer =
            Optimizer::new(source(artifacts.optimizer_model.as_ref().unwrap()), &mut state, &module).unwrap();
        Run { state, module, optimizer }
    }

    fn value(&self, name: &str) -> Vec<f32> {
        self.state.parameter(name).unwrap().to_tensor().unwrap().to_vec()
    }

    fn values(&self, names: &[&str]) -> Vec<Vec<f32>> {
        names.iter().map(|name| self.value(name)).collect()
    }

    fn step(&mut self, data: &(Tensor, Tensor)) -> f32 {
        let loss = train(&mut self.module, &mut self.state, data);
        self.optimizer.step(&mut self.state, &self.module).unwrap();
        self.module.lazy_reset_grad();
        loss
    }
}

fn inputs(graph: Option<&GraphProto>) -> Vec<String> {
    graph.unwrap().input.iter().map(|info| info.name.clone()).collect()
}

fn ops(model: &ModelProto) -> Vec<&str> {
    model.graph.as_ref().unwrap().node.iter().map(|node| node.op_type.as_str()).collect()
}

fn count(model: &ModelProto, op: &str) -> usize {
    ops(model).into_iter().filter(|&found| found == op).count()
}

/// Computes mean and variance of each column.
fn columns(rows: &[f64], width: usize) -> (Vec<f64>, Vec<f64>) {
    let n = (rows.len() / width) as f64;
    let column = |c: usize| rows.iter().skip(c).step_by(width);
    let mean: Vec<f64> = (0..width).map(|c| column(c).sum::<f64>() / n).collect();
    let var = (0..width).map(|c| column(c).map(|x| (x - mean[c]).powi(2)).sum::<f64>() / n).collect();
    (mean, var)
}

/// Computes the hidden values of a batch, before the first normalization.
fn hidden(x: &Tensor, w: &[f32]) -> Vec<f64> {
    let x = x.to_f64();
    let row = |r: usize| (0..HIDDEN).map(move |c| (r, c));
    (0..x.len() / 10)
        .flat_map(row)
        .map(|(r, c)| (0..10).map(|k| x[10 * r + k] * f64::from(w[k * HIDDEN + c])).sum())
        .collect()
}

#[track_caller]
fn assert_blended(new: &[f32], old: &[f32], batch: &[f64]) {
    for ((new, old), batch) in new.iter().zip(old).zip(batch) {
        let expected = f64::from(MOMENTUM) * f64::from(*old) + (1.0 - f64::from(MOMENTUM)) * batch;
        assert!((f64::from(*new) - expected).abs() < 1e-6, "{new} for {expected}");
    }
}

#[test]
fn updated_statistics_are_parameters() {
    let artifacts = generate_artifacts(&two_normalizations(), &PARAMETERS, BatchNormMode::Auto);
    let parameters = [
        "w1",
        "one.scale",
        "one.bias",
        "one.mean",
        "one.var",
        "two.scale",
        "two.bias",
        "two.mean",
        "two.var",
        "w2",
    ];
    let train_inputs = inputs(artifacts.training_model.graph.as_ref());
    assert_eq!(train_inputs[..12], [&["x", "labels"][..], &parameters].concat(), "in the order of the model");
    assert_eq!(inputs(artifacts.eval_model.graph.as_ref()), train_inputs[..12]);
    let run = Run::new(&artifacts);
    for name in parameters {
        let frozen = STATISTICS.contains(&name);
        assert_eq!(run.state.parameter(name).unwrap().requires_grad, !frozen, "{name}");
    }
    assert_eq!(run.module.parameters_size(&run.state, false), 10 * HIDDEN + 8 * HIDDEN + 5 * HIDDEN);
    // Naming them changes nothing.
    let mut named_options = options(&PARAMETERS, BatchNormMode::Auto);
    named_options.frozen_params = names(&STATISTICS);
    let named_artifacts = generate(source(&two_normalizations()), named_options).unwrap();
    assert_eq!(named_artifacts.training_model, artifacts.training_model);
    assert_eq!(named_artifacts.eval_model, artifacts.eval_model);
    assert_eq!(named_artifacts.checkpoint, artifacts.checkpoint);
}

#[test]
fn training_updates_running_statistics() {
    let artifacts = generate_artifacts(&two_normalizations(), &PARAMETERS, BatchNormMode::Auto);
    let mut run = Run::new(&artifacts);
    let data = batch(6, 1);
    let before = run.values(&STATISTICS);
    let generation = run.state.generation();
    let evaluated = evaluate(&mut run.module, &run.state, &data);
    assert_eq!(run.values(&STATISTICS), before, "evaluation changes nothing");
    assert_eq!(run.state.generation(), generation);
    let w = run.value("w1");
    let trained = train(&mut run.module, &mut run.state, &data);
    assert!((trained - evaluated).abs() > 1e-3, "{trained} and {evaluated}");
    let (mean, var) = columns(&hidden(&data.0, &w), HIDDEN);
    assert_blended(&run.value("one.mean"), &before[0], &mean);
    assert_blended(&run.value("one.var"), &before[1], &var);
    assert_ne!(run.values(&STATISTICS)[2..], before[2..]);
    assert!(run.state.generation() > generation);
    assert_ne!(evaluate(&mut run.module, &run.state, &data), evaluated, "evaluation uses what was updated");
}

#[test]
fn gradients_are_those_of_finite_differences() {
    let artifacts = generate_artifacts(&two_normalizations_with("Tanh"), &PARAMETERS, BatchNormMode::Auto);
    let mut run = Run::new(&artifacts);
    let data = batch(7, 2);
    run.module.lazy_reset_grad();
    train(&mut run.module, &mut run.state, &data);
    let gradients = PARAMETERS.map(|name| common::gradient(&run.module, name));
    for (name, found) in PARAMETERS.into_iter().zip(gradients) {
        let view = run.state.parameter(name).unwrap();
        for at in [0, found.len() - 1] {
            let value = view.to_tensor().unwrap().to_vec::<f32>()[at];
            let mut loss_at = |value: f32| {
                view.memory.write(view.offset + 4 * at, &value.to_le_bytes()).unwrap();
                f64::from(train(&mut run.module, &mut run.state, &data))
            };
            let step = 4e-3;
            let slope = (loss_at(value + step) - loss_at(value - step)) / (2.0 * f64::from(step));
            loss_at(value);
            assert!((slope - f64::from(found[at])).abs() < 2e-3, "{name}[{at}]: {slope} and {}", found[at]);
        }
    }
}

#[test]
fn untrained_normalization_is_unchanged() {
    // Only the second normalization is trained.
    let artifacts = generate_artifacts(&two_normalizations(), &["two.bias", "w2"], BatchNormMode::Auto);
    assert_eq!(count(&artifacts.training_model, "BatchNormInternal"), 1);
    assert_eq!(count(&artifacts.training_model, "BatchNormalization"), 1);
    let mut run = Run::new(&artifacts);
    assert!(run.state.parameter("one.mean").is_err(), "it is a constant of the models");
    let before = run.values(&STATISTICS[2..]);
    run.step(&batch(6, 3));
    assert_ne!(run.values(&STATISTICS[2..]), before);

    // Without trained normalizations, training and evaluation compute the same.
    let artifacts = generate_artifacts(&two_normalizations(), &["w1", "w2"], BatchNormMode::Auto);
    assert_eq!(count(&artifacts.training_model, "BatchNormInternal"), 0);
    let mut run = Run::new(&artifacts);
    let data = batch(6, 3);
    let evaluated = evaluate(&mut run.module, &run.state, &data);
    assert_eq!(train(&mut run.module, &mut run.state, &data), evaluated);
}

#[test]
fn mode_applies_to_all_normalizations() {
    let model = two_normalizations();
    let frozen = generate_artifacts(&model, &PARAMETERS, BatchNormMode::Freeze);
    let mut run = Run::new(&frozen);
    assert_eq!(run.module.parameters_size(&run.state, false), 10 * HIDDEN + 4 * HIDDEN + 5 * HIDDEN);
    let data = batch(6, 4);
    let evaluated = evaluate(&mut run.module, &run.state, &data);
    assert_eq!(train(&mut run.module, &mut run.state, &data), evaluated);
    let bias = common::gradient(&run.module, "one.bias");
    assert!(bias.iter().any(|&g| g != 0.0), "its scale and bias are trained all the same");

    let trained = generate_artifacts(&model, &["w2"], BatchNormMode::Train);
    let mut run = Run::new(&trained);
    let before = run.values(&STATISTICS);
    run.step(&data);
    for (new, old) in run.values(&STATISTICS).iter().zip(&before) {
        assert_ne!(new, old);
    }

    // Named frozen statistics are stored in the checkpoint and remain unchanged.
    let mut freeze_options = options(&PARAMETERS, BatchNormMode::Freeze);
    freeze_options.frozen_params = names(&STATISTICS);
    let mut run = Run::new(&generate(source(&model), freeze_options).unwrap());
    let before = run.values(&STATISTICS);
    let generation = run.state.generation();
    run.step(&data);
    assert_eq!(run.values(&STATISTICS), before);
    assert_eq!(run.state.generation(), generation);
}

#[test]
fn model_training_mode_is_ignored() {
    let plain = two_normalizations();
    let mut training = plain.clone();
    for node in &mut training.graph.as_mut().unwrap().node {
        if node.op_type == "BatchNormalization" {
            let mode = ortrain_onnx::AttributeProto {
                name: "training_mode".into(),
                i: 1,
                r#type: ortrain_onnx::AttributeType::Int.into(),
                ..Default::default()
            };
            node.attribute.push(mode);
            let name = node.output[0].clone();
            node.output.extend([format!("{name}.mean"), format!("{name}.var")]);
        }
    }
    let data = batch(6, 5);
    for (trained, mode) in [
        (&PARAMETERS[..], BatchNormMode::Auto),
        (&PARAMETERS[..], BatchNormMode::Freeze),
        (&["w1", "w2"], BatchNormMode::Auto),
    ] {
        let artifacts = [&plain, &training].map(|model| generate_artifacts(model, trained, mode));
        let eval = &artifacts[1].eval_model;
        for node in
            eval.graph.as_ref().unwrap().node.iter().filter(|node| node.op_type == "BatchNormalization")
        {
            assert_eq!(node.output.len(), 1, "in inference there is nothing but the result");
            assert!(node.attribute.iter().all(|attr| attr.name != "training_mode" || attr.i == 0));
        }
        let losses = artifacts.map(|artifacts| {
            let mut run = Run::new(&artifacts);
            let first = [run.step(&data), run.step(&data)];
            (first, evaluate(&mut run.module, &run.state, &data))
        });
        assert_eq!(losses[0], losses[1]);
    }
}

#[test]
fn outputs_with_new_statistics() {
    // Outputs that depend on the new running statistics use them in training, and the old ones in evaluation.
    let mut model = two_normalizations();
    let graph = model.graph.as_mut().unwrap();
    let norm = graph.node.iter_mut().find(|node| node.op_type == "BatchNormalization").unwrap();
    norm.attribute.push(ortrain_onnx::AttributeProto {
        name: "training_mode".into(),
        i: 1,
        r#type: ortrain_onnx::AttributeType::Int.into(),
        ..Default::default()
    });
    norm.output.extend(["new_mean".to_owned(), "new_var".to_owned()]);
    for (mode, updates) in [(BatchNormMode::Auto, true), (BatchNormMode::Freeze, false)] {
        let mut options = options(&PARAMETERS, mode);
        options.frozen_params = names(&STATISTICS);
        options.additional_output_names = names(&["new_mean"]);
        let mut run = Run::new(&generate(source(&model), options).unwrap());
        let before = run.value("one.mean");
        let data = batch(6, 6);
        let inputs = [run_input(&data.0), run_input(&data.1)];
        let results = collect(|deliver| run.module.train_step(&mut run.state, &inputs, deliver)).unwrap();
        assert_eq!(results[1].to_vec::<f32>(), run.value("one.mean"));
        assert_eq!(run.value("one.mean") != before, updates);
        let results = collect(|deliver| run.module.eval_step(&run.state, &inputs, deliver)).unwrap();
        assert_eq!(results[1].to_vec::<f32>(), run.value("one.mean"));
    }
}

#[test]
fn statistics_survive_save_load_export() {
    let artifacts = generate_artifacts(&two_normalizations(), &PARAMETERS, BatchNormMode::Auto);
    let mut run = Run::new(&artifacts);
    let data = [batch(6, 7), batch(9, 8)];
    run.step(&data[0]);
    run.step(&data[1]);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoint");
    run.state.save(&path, true).unwrap();
    let mut again = Run::on(&artifacts, std::fs::read(&path).unwrap(), ModuleOptions::default());
    assert_eq!(again.values(&STATISTICS), run.values(&STATISTICS));
    assert_eq!(again.step(&data[0]).to_bits(), run.step(&data[0]).to_bits());
    assert_eq!(again.values(&STATISTICS), run.values(&STATISTICS));

    let exported = run.module.inference_model(&run.state, &["scores"]).unwrap();
    let bytes = encode(&exported.proto).unwrap();
    let exported_names: Vec<&str> = exported
        .proto
        .graph
        .as_ref()
        .unwrap()
        .initializer
        .iter()
        .map(|tensor| tensor.name.as_str())
        .collect();
    assert!(STATISTICS.iter().all(|name| exported_names.contains(name)), "{exported_names:?}");
    let mut session = InferenceSession::new(bytes.into(), SessionOptions::default()).unwrap();
    let x = [run_input(&data[0].0)];
    let scores = collect(|deliver| session.run(&x, deliver)).unwrap()[0].to_f64();
    let labels = data[0].1.to_vec::<i64>();
    let loss = |(row, &label): (&[f64], &i64)| {
        row.iter().map(|score| score.exp()).sum::<f64>().ln() - row[label as usize]
    };
    let mean = scores.chunks(5).zip(&labels).map(loss).sum::<f64>() / labels.len() as f64;
    let evaluated = f64::from(evaluate(&mut run.module, &run.state, &data[0]));
    assert!((mean - evaluated).abs() < 1e-5, "{mean} and {evaluated}");
}

#[test]
fn failed_or_empty_step_keeps_statistics() {
    let artifacts = generate_artifacts(&two_normalizations(), &PARAMETERS, BatchNormMode::Auto);
    for name in ["cpu", "reference"] {
        let options = ModuleOptions::from(RunOptions::default().backend(backend(name, 1).unwrap()));
        let mut run = Run::on(&artifacts, artifacts.checkpoint_bytes().unwrap(), options);
        let before = run.values(&STATISTICS);
        let x = Tensor::f32(&[3, 10], &numbers(30, 1));
        let labels = Tensor::i64(&[3], &[0, 1, 5]);
        let outcome =
            run.module.train_step(&mut run.state, &[run_input(&x), run_input(&labels)], &mut |_, _| Ok(()));
        assert_eq!(outcome.expect_err("there is no class 5").kind(), ErrorKind::InvalidArgument);
        assert_eq!(run.values(&STATISTICS), before);
        let loss = train(&mut run.module, &mut run.state, &batch(0, 1));
        assert!(loss.is_nan());
        assert_eq!(run.values(&STATISTICS), before);
        for name in PARAMETERS {
            assert!(common::gradient(&run.module, name).iter().all(|&g| g == 0.0), "{name}");
        }
    }
}

#[test]
fn same_bits_at_every_thread_count() {
    let artifacts = generate_artifacts(&two_normalizations(), &PARAMETERS, BatchNormMode::Auto);
    let bits = |threads: usize| {
        let options = ModuleOptions::from(RunOptions::default().backend(backend("cpu", threads).unwrap()));
        let mut run = Run::on(&artifacts, artifacts.checkpoint_bytes().unwrap(), options);
        let losses: Vec<u32> = (0..3).map(|seed| run.step(&batch(20_000, seed)).to_bits()).collect();
        let values: Vec<Vec<u32>> = [&STATISTICS[..], &PARAMETERS]
            .concat()
            .iter()
            .map(|name| run.value(name).into_iter().map(f32::to_bits).collect())
            .collect();
        (losses, values)
    };
    let expected = bits(1);
    assert!(bits(2) == expected && bits(3) == expected);
}

#[test]
fn shared_statistics_update_in_order() {
    let mut builder = ModelBuilder::new();
    let h = builder.hidden();
    let parameters = builder.parameters("one", 10);
    let a = builder.norm("a", h, parameters);
    let b = builder.norm("b", a, parameters);
    let artifacts = generate_artifacts(&builder.finish(b), &["one.scale", "w2"], BatchNormMode::Auto);
    let mut run = Run::new(&artifacts);
    let [before, scale, bias, w] = ["one.mean", "one.scale", "one.bias", "w1"]
        .map(|name| run.state.parameter(name).map(|p| p.to_tensor().unwrap().to_vec::<f32>()));
    assert!(bias.is_err() && w.is_err(), "constants of the models");
    let (before, scale) = (before.unwrap(), scale.unwrap());
    let data = batch(8, 9);
    run.step(&data);
    // The input of the second one is the output of the first one: its bias is the mean of each column.
    let (h, bias) = (hidden(&data.0, &numbers(10 * HIDDEN, 1)), numbers(HIDDEN, 11));
    let (mean, _) = columns(&h, HIDDEN);
    let bias: Vec<f64> = bias.into_iter().map(f64::from).collect();
    let first: Vec<f32> =
        before.iter().zip(&mean).map(|(&old, &new)| MOMENTUM * old + (1.0 - MOMENTUM) * new as f32).collect();
    assert_eq!(scale.len(), HIDDEN);
    assert_blended(&run.value("one.mean"), &first, &bias);
}

/// Builds a constant vector with the length of a row of `h`. `h` is trained, but no gradient reaches it from
/// the vector.
fn gradient_free_vector(builder: &mut ModelBuilder, how: &str, value: f32, h: ValueId) -> ValueId {
    let name = |part: &str| format!("{how}.{value}.{part}");
    let scalar = builder.graph.add_constant(&name("number"), Tensor::f32(&[], &[value]));
    let cast = |dtype: DType| Attrs::new().with("to", i64::from(dtype.to_onnx()));
    let columns = Attrs::new().with("start", 1i64).with("end", 2i64);
    let shape = builder.node("Shape", &name("shape"), &[h], columns);
    let reduce_attrs = Attrs::new().with("axes", vec![0i64]).with("keepdims", 0i64);
    match how {
        // The current PyTorch exporter writes `affine=False` like this.
        "like" => {
            let like = builder.node("CastLike", &name("like"), &[scalar, h], Attrs::new());
            builder.node("Expand", &name("vector"), &[like, shape], Attrs::new())
        }
        "filled" => {
            let value = Attrs::new().with("value", Tensor::f32(&[1], &[value]));
            builder.node("ConstantOfShape", &name("vector"), &[shape], value)
        }
        "whole" => {
            let row_max = builder.node("ReduceMax", &name("max"), &[h], reduce_attrs);
            let integers = builder.node("Cast", &name("whole"), &[row_max], cast(DType::I32));
            builder.node("Cast", &name("vector"), &[integers], cast(DType::F32))
        }
        "chosen" => {
            let row_max = builder.node("ReduceMax", &name("max"), &[h], reduce_attrs);
            let above = builder.node("Greater", &name("above"), &[row_max, scalar], Attrs::new());
            builder.node("Where", &name("vector"), &[above, scalar, scalar], Attrs::new())
        }
        "sign" => {
            let row_max = builder.node("ReduceMax", &name("max"), &[h], reduce_attrs);
            builder.node("Sign", &name("vector"), &[row_max], Attrs::new())
        }
        _ => unreachable!("{how}"),
    }
}

#[test]
fn normalizations_without_gradient_are_not_trained() {
    for how in ["like", "filled", "whole", "chosen", "sign"] {
        let mut builder = ModelBuilder::new();
        let h = builder.hidden();
        let [_, _, mean, var] = builder.parameters("one", 10);
        let (scale, bias) = (
            gradient_free_vector(&mut builder, how, 1.0, h),
            gradient_free_vector(&mut builder, how, 0.0, h),
        );
        let a = builder.norm("a", h, [scale, bias, mean, var]);
        // A regular normalization after it keeps its mode.
        let two = builder.parameters("two", 20);
        let b = builder.norm("b", a, two);
        let model = builder.finish(b);
        let artifacts =
            generate_artifacts(&model, &["w1", "w2", "two.scale", "two.bias"], BatchNormMode::Auto);
        assert_eq!(count(&artifacts.training_model, INTERNAL), 1, "{how}");
        let input_names = inputs(artifacts.training_model.graph.as_ref());
        let updated: Vec<&str> =
            STATISTICS.into_iter().filter(|name| input_names.contains(&(*name).to_owned())).collect();
        assert_eq!(updated, ["two.mean", "two.var"], "{how}");
        let mut run = Run::new(&artifacts);
        assert!(run.step(&batch(8, 3)).is_finite(), "{how}");
        let frozen = generate_artifacts(&model, &["w1", "w2"], BatchNormMode::Auto);
        assert_eq!(count(&frozen.training_model, INTERNAL), 0, "{how}");
        let all_modes = generate_artifacts(&model, &["w1", "w2"], BatchNormMode::Train);
        assert_eq!(count(&all_modes.training_model, INTERNAL), 2, "{how}");
    }
}

/// A scale that is computed from a parameter is trained if a gradient reaches the parameter.
#[test]
fn computed_scales_with_gradient_are_trained() {
    for how in ["Identity", "Mul", "Expand", "CastLike", "Where"] {
        let mut builder = ModelBuilder::new();
        let h = builder.hidden();
        let [_, bias, mean, var] = builder.parameters("one", 10);
        let dims: &[usize] = if how == "Expand" { &[] } else { &[HIDDEN] };
        let gain = builder.weight("gain", dims, 30);
        let none = Attrs::new;
        let two = builder.graph.add_constant("number", Tensor::f32(&[], &[2.0]));
        let columns = Attrs::new().with("start", 1i64).with("end", 2i64);
        let scale = match how {
            "Identity" => builder.node("Identity", "scaled", &[gain], none()),
            "Mul" => builder.node("Mul", "scaled", &[gain, two], none()),
            "Expand" => {
                let shape = builder.node("Shape", "shape", &[h], columns);
                builder.node("Expand", "scaled", &[gain, shape], none())
            }
            "CastLike" => builder.node("CastLike", "scaled", &[gain, h], none()),
            _ => {
                let above = builder.node("Greater", "above", &[gain, two], none());
                builder.node("Where", "scaled", &[above, two, gain], none())
            }
        };
        let a = builder.norm("a", h, [scale, bias, mean, var]);
        let model = builder.finish(a);
        let artifacts = generate_artifacts(&model, &["gain"], BatchNormMode::Auto);
        assert_eq!(count(&artifacts.training_model, INTERNAL), 1, "{how}");
        let artifacts = generate_artifacts(&model, &["w1"], BatchNormMode::Auto);
        assert_eq!(count(&artifacts.training_model, INTERNAL), 0, "{how}");
    }
}

/// Weights standardized by a normalization (`F.batch_norm` of PyTorch) with computed statistics, followed by
/// a regular normalization.
fn standardized(trained: bool) -> (ModelProto, Vec<&'static str>) {
    let mut builder = ModelBuilder::new();
    let w = builder.weight("w1", &[HIDDEN, 10], 1);
    let gain = builder.weight("gain", &[HIDDEN], 30);
    let zeros = builder.graph.add_constant("zeros", Tensor::f32(&[HIDDEN], &[0.0; HIDDEN]));
    let shape = builder.graph.add_constant("rows", Tensor::i64(&[3], &[1, HIDDEN as i64, 10]));
    let back = builder.graph.add_constant("back", Tensor::i64(&[2], &[HIDDEN as i64, 10]));
    let rows = builder.node("Reshape", "reshaped", &[w, shape], Attrs::new());
    let axes = || Attrs::new().with("axes", vec![1i64]);
    let mean = builder.node("ReduceMean", "row.mean", &[w], axes().with("keepdims", 1i64));
    let centred = builder.node("Sub", "centred", &[w, mean], Attrs::new());
    let square = builder.node("Mul", "square", &[centred, centred], Attrs::new());
    let var = builder.node("ReduceMean", "row.var", &[square], axes().with("keepdims", 0i64));
    let flat = builder.graph.add_constant("flat", Tensor::i64(&[1], &[-1]));
    let mean = builder.node("Reshape", "row.flat", &[mean, flat], Attrs::new());
    let normal = builder.norm("standard", rows, [gain, zeros, mean, var]);
    let normal = builder.node("Reshape", "normal", &[normal, back], Attrs::new());
    let transposed = builder.node("Transpose", "turned", &[normal], Attrs::new());
    let h = builder.node("MatMul", "h", &[builder.graph.inputs[0], transposed], Attrs::new());
    let first = builder.parameters("one", 10);
    let a = builder.norm("a", h, first);
    let mut names = vec!["gain", "one.scale", "one.bias", "w2"];
    names.extend(trained.then_some("w1"));
    (builder.finish(a), names)
}

/// Statistics of a weight are computed in training as in the model, and its gradient passes through them. A
/// regular normalization uses the statistics of the batch.
#[test]
fn computed_statistics_are_used_unchanged() {
    for trained in [true, false] {
        let (model, names) = standardized(trained);
        let artifacts = generate_artifacts(&model, &names, BatchNormMode::Auto);
        assert_eq!(count(&artifacts.training_model, INTERNAL), 1, "trained: {trained}");
        let input_names = inputs(artifacts.training_model.graph.as_ref());
        assert!(
            input_names.contains(&"one.mean".to_owned()) && input_names.contains(&"one.var".to_owned()),
            "{input_names:?}"
        );
        assert!(!input_names.iter().any(|name| name.starts_with("row.")), "{input_names:?}");
        let data = batch(16, 3);
        let loss_with = |name: &str, at: usize, step: f32| {
            let mut run = Run::new(&artifacts);
            if !name.is_empty() {
                let old = run.state.parameter(name).unwrap().to_tensor().unwrap();
                let mut values: Vec<f32> = old.to_vec();
                values[at] += step;
                run.state.set_parameter(name, &Tensor::f32(old.dims(), &values)).unwrap();
            }
            let loss = train(&mut run.module, &mut run.state, &data);
            (loss, run)
        };
        let (_, run) = loss_with("", 0, 0.0);
        let targets = if trained { vec!["gain", "w1"] } else { vec!["gain"] };
        for name in targets {
            for (at, &got) in gradient(&run.module, name).iter().enumerate().step_by(3) {
                let step = 1e-2;
                let slope = (loss_with(name, at, step).0 - loss_with(name, at, -step).0) / (2.0 * step);
                assert!((got - slope).abs() < 2e-3, "{name} at {at}: {got}, the difference says {slope}");
            }
        }
    }
}

#[test]
fn rejects_statistics_without_storage() {
    let model = two_normalizations();
    let (kind, message) = generation_error(&model, options(&["w2", "two.mean"], BatchNormMode::Auto));
    assert_eq!(kind, ErrorKind::InvalidModel);
    assert!(
        message.contains("\"two.mean\" cannot be trained by gradients")
            && message.contains("BatchNormalization_b"),
        "{message}"
    );
    let (_, message) = generation_error(&model, options(&["w2", "two.mean"], BatchNormMode::Freeze));
    assert!(message.contains("cannot be trained by gradients"), "{message}");

    // Statistics that the model computes from its inputs.
    let mut builder = ModelBuilder::new();
    let h = builder.hidden();
    let parameters = builder.parameters("one", 10);
    let axes = builder.graph.add_constant("axes", Tensor::i64(&[1], &[0]));
    let mean = builder.node(
        "ReduceMean",
        "computed",
        &[h],
        Attrs::new().with("axes", vec![0i64]).with("keepdims", 0i64),
    );
    let _ = axes;
    let a = builder.norm("a", h, [parameters[0], parameters[1], mean, parameters[3]]);
    let model = builder.finish(a);
    let (kind, message) = generation_error(&model, options(&["one.scale"], BatchNormMode::Train));
    assert_eq!(kind, ErrorKind::NotImplemented);
    assert!(
        message.contains(
            "training would update its running statistics, but \"computed\" is not constant in the model; \
             train with batch_norm=\"auto\" or \"freeze\", which do not update computed statistics"
        ),
        "{message}"
    );
    generate_artifacts(&model, &["one.scale", "w1"], BatchNormMode::Freeze);
    for trained in [&["w1"][..], &["one.scale"], &["one.scale", "w1"]] {
        let artifacts = generate_artifacts(&model, trained, BatchNormMode::Auto);
        assert_eq!(count(&artifacts.training_model, INTERNAL), 0, "{trained:?}");
    }

    // Statistics that are inputs of the model.
    let mut maker = ModelBuilder::new();
    let h = maker.hidden();
    let [scale, bias, _, var] = maker.parameters("one", 10);
    let mean = maker.graph.add_value("given", ValueType::tensor(DType::F32, &[HIDDEN]));
    maker.graph.inputs.push(mean);
    let a = maker.norm("a", h, [scale, bias, mean, var]);
    let (_, message) = generation_error(&maker.finish(a), options(&["one.scale"], BatchNormMode::Auto));
    assert!(
        message.contains(
            "training would update its running statistics, but \"given\" is not constant in the model; make it an \
             initializer, or train with batch_norm=\"freeze\""
        ),
        "{message}"
    );

    // An initializer that is also a bias: the running mean becomes a separate initializer.
    let mut maker = ModelBuilder::new();
    let h = maker.hidden();
    let [scale, bias, _, var] = maker.parameters("one", 10);
    let a = maker.norm("a", h, [scale, bias, bias, var]);
    let model = maker.finish(a);
    for trained in ["one.scale", "one.bias"] {
        let mut run = Run::new(&generate_artifacts(&model, &[trained], BatchNormMode::Auto));
        let (parameter, mean) = (run.value(trained), run.value("one.bias/statistic"));
        run.step(&batch(6, 1));
        assert_ne!(run.value(trained), parameter);
        assert_ne!(run.value("one.bias/statistic"), mean);
    }
    generate_artifacts(&model, &["one.scale"], BatchNormMode::Freeze);

    // An initializer that represents two statistics.
    let mut maker = ModelBuilder::new();
    let h = maker.hidden();
    let [scale, bias, _, var] = maker.parameters("one", 10);
    let a = maker.norm("a", h, [scale, bias, var, var]);
    let (_, message) = generation_error(&maker.finish(a), options(&["one.scale"], BatchNormMode::Auto));
    assert!(message.contains("uses the same value"), "{message}");
}

#[test]
fn statistics_may_be_computed_from_constants() {
    // Shared by an Identity, as some exporters write equal initializers: each normalization gets its own
    // copy.
    let mut builder = ModelBuilder::new();
    let h = builder.hidden();
    let first = builder.parameters("one", 10);
    let a = builder.norm("a", h, first);
    let [scale, bias, _, var] = builder.parameters("two", 20);
    let mean = builder.node("Identity", "two.copy", &[first[2]], Attrs::new());
    let b = builder.norm("b", a, [scale, bias, mean, var]);
    let artifacts = generate_artifacts(&builder.finish(b), &PARAMETERS, BatchNormMode::Auto);
    assert_eq!(count(&artifacts.eval_model, "Identity"), 0);
    let mut run = Run::new(&artifacts);
    assert_eq!(run.value("one.mean"), run.value("two.copy"));
    run.step(&batch(6, 2));
    assert_ne!(run.value("one.mean"), run.value("two.copy"));
    assert!(run.state.parameter("two.mean").is_err());
}

/// `x w1`, normalized if its sum is positive, otherwise doubled. The statistics belong to the branch.
fn branching() -> ModelProto {
    let mut builder = ModelBuilder::new();
    let h = builder.hidden();
    let normalization_inputs =
        [h, builder.weight("one.scale", &[HIDDEN], 10), builder.weight("one.bias", &[HIDDEN], 11)];
    let sum = builder.node("ReduceSum", "sum", &[h], Attrs::new().with("keepdims", 0i64));
    let zero = builder.graph.add_constant("zero", Tensor::f32(&[], &[0.0]));
    let condition = builder.node("Less", "condition", &[zero, sum], Attrs::new());
    let branch = |normalized: bool| {
        let mut graph = Graph::new("branch");
        let inputs: Vec<ValueId> = normalization_inputs
            .iter()
            .map(|&id| graph.add_value(builder.graph.name_of(id), ValueType::Unknown))
            .collect();
        graph.inputs.clone_from(&inputs);
        let mut inner = ModelBuilder { graph, opset: 17 };
        let y = if normalized {
            let mean = inner.weight("one.mean", &[HIDDEN], 12);
            let var = Tensor::f32(&[HIDDEN], &[1.0; HIDDEN]);
            let var = inner.node("Constant", "one.var", &[], Attrs::new().with("value", var));
            inner.norm("then", inputs[0], [inputs[1], inputs[2], mean, var])
        } else {
            inner.node("Add", "else", &[inputs[0], inputs[0]], Attrs::new())
        };
        inner.graph.outputs.push(y);
        inner.graph
    };
    let attrs = Attrs::new().with("then_branch", branch(true)).with("else_branch", branch(false));
    let y = builder.node("If", "chosen", &[&[condition][..], &normalization_inputs].concat(), attrs);
    builder.graph.nodes.last_mut().unwrap().captures = normalization_inputs.len();
    builder.finish(y)
}

#[test]
fn statistics_in_branches() {
    let artifacts =
        generate_artifacts(&branching(), &["w1", "one.scale", "one.bias", "w2"], BatchNormMode::Auto);
    let mut run = Run::new(&artifacts);
    let w = run.value("w1");
    let statistics = ["one.mean", "one.var"];
    let mut branch_counts = [0, 0];
    for seed in 0..6 {
        let data = batch(5, seed);
        let before = run.values(&statistics);
        train(&mut run.module, &mut run.state, &data);
        let h = hidden(&data.0, &w);
        let positive = h.iter().sum::<f64>() > 0.0;
        branch_counts[usize::from(positive)] += 1;
        if positive {
            let (mean, var) = columns(&h, HIDDEN);
            assert_blended(&run.value("one.mean"), &before[0], &mean);
            assert_blended(&run.value("one.var"), &before[1], &var);
        } else {
            assert_eq!(run.values(&statistics), before);
        }
        let after = run.values(&statistics);
        evaluate(&mut run.module, &run.state, &data);
        assert_eq!(run.values(&statistics), after);
    }
    assert!(branch_counts[0] > 0 && branch_counts[1] > 0, "{branch_counts:?}");
    run.module.inference_model(&run.state, &["scores"]).unwrap();
}

#[test]
fn statistics_of_every_element_of_a_row() {
    // In opset 7, `spatial=0` requests statistics of every element. A row has one axis here, so they are
    // column statistics.
    let mut builder = ModelBuilder::new();
    builder.opset = 7;
    let h = builder.hidden();
    let first = builder.parameters("one", 10);
    let attrs = Attrs::new().with("momentum", MOMENTUM).with("spatial", 0i64);
    let a = builder.node("BatchNormalization", "a", &[&[h][..], &first].concat(), attrs);
    let mut options = options(&["one.scale", "w2"], BatchNormMode::Auto);
    options.losses = vec![Loss::MSELoss.into()];
    let mut run = Run::new(&generate(source(&builder.finish(a)), options).unwrap());
    let before = run.values(&STATISTICS[..2]);
    let data = (batch(6, 2).0, Tensor::f32(&[6, 5], &numbers(30, 3)));
    train(&mut run.module, &mut run.state, &data);
    let (mean, var) = columns(&hidden(&data.0, &numbers(10 * HIDDEN, 1)), HIDDEN);
    assert_blended(&run.value("one.mean"), &before[0], &mean);
    assert_blended(&run.value("one.var"), &before[1], &var);
}
