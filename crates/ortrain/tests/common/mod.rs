//! Shared test utilities: recorded artifacts, inputs and outputs.
#![allow(dead_code, clippy::unwrap_used)]

use std::path::PathBuf;

use ortrain::artifacts::{ArtifactOptions, Artifacts, Loss, OptimizerKind, generate};
use ortrain::{
    Bytes, CheckpointState, DType, InputView, ModelSource, Module, ModuleOptions, Optimizer, Tensor, collect,
};
use ortrain_onnx::LoadedModel;
use ortrain_onnx::proto::{
    GraphProto, NodeProto, ValueInfoProto, tensor_shape_proto::dimension::Value, type_proto,
};

/// Returns the path of a file recorded with onnxruntime-training 1.19.2.
pub(crate) fn recorded(case: &str, file: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/data/ort-1.19.2")).join(case).join(file)
}

pub(crate) fn run_input(tensor: &Tensor) -> InputView<'_> {
    InputView::from(tensor)
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

/// Returns deterministic pseudo-random numbers.
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

/// Returns a batch for the recorded perceptrons: 10 features, 5 classes.
pub(crate) fn batch(rows: usize, seed: u32) -> (Tensor, Tensor) {
    let x = Tensor::f32(&[rows, 10], &numbers(rows * 10, seed));
    let labels: Vec<i64> = (0..rows as i64).map(|row| (row + i64::from(seed)) % 5).collect();
    (x, Tensor::i64(&[rows], &labels))
}

/// Runs a training step on a batch and returns its loss.
pub(crate) fn train(module: &mut Module, state: &mut CheckpointState, batch: &(Tensor, Tensor)) -> f32 {
    let inputs = [run_input(&batch.0), run_input(&batch.1)];
    collect(|deliver| module.train_step(state, &inputs, deliver)).unwrap()[0].to_vec::<f32>()[0]
}

/// Returns the loss in evaluation.
pub(crate) fn evaluate(module: &mut Module, state: &CheckpointState, batch: &(Tensor, Tensor)) -> f32 {
    let inputs = [run_input(&batch.0), run_input(&batch.1)];
    collect(|deliver| module.eval_step(state, &inputs, deliver)).unwrap()[0].to_vec::<f32>()[0]
}

/// Returns the accumulated gradient of a parameter.
pub(crate) fn gradient(module: &Module, name: &str) -> Vec<f32> {
    module.gradient(name).unwrap().to_tensor().unwrap().to_vec()
}

/// A network of `benches/workloads` with random weights and a batch size, ready for training.
pub(crate) struct Workload {
    pub(crate) state: CheckpointState,
    pub(crate) module: Module,
    pub(crate) optimizer: Optimizer,
    /// Trained parameters.
    pub(crate) trained: Vec<String>,
    pub(crate) artifacts: Artifacts,
    input: Vec<usize>,
    classes: usize,
}

/// Returns the axis sizes of a value, which must all be declared.
fn sizes(info: &mut ValueInfoProto) -> Vec<&mut i64> {
    let Some(type_proto::Value::TensorType(tensor)) = info.r#type.as_mut().unwrap().value.as_mut() else {
        panic!("{} is no tensor", info.name)
    };
    let dims = tensor.shape.as_mut().unwrap().dim.iter_mut();
    dims.map(|dim| match dim.value.as_mut() {
        Some(Value::DimValue(size)) => size,
        other => panic!("a size is {other:?}"),
    })
    .collect()
}

impl Workload {
    /// Creates a network for batches of `rows` images. Weights have He initialization; normalizations start
    /// as in the file.
    pub(crate) fn new(name: &str, rows: usize) -> Workload {
        Workload::with_graph_change(name, rows, |_| {})
    }

    /// Creates the network with a Dropout after each activation.
    pub(crate) fn with_dropout(name: &str, rows: usize) -> Workload {
        Workload::with_graph_change(name, rows, |graph| {
            for mut node in std::mem::take(&mut graph.node) {
                let output = node.output[0].clone();
                let is_activation = node.op_type == "Relu";
                if is_activation {
                    node.output[0] += "/all";
                }
                let original_output = node.output[0].clone();
                graph.node.push(node);
                if is_activation {
                    let (input, output) = (vec![original_output], vec![output]);
                    let op_type = "Dropout".to_owned();
                    graph.node.push(NodeProto { op_type, input, output, ..NodeProto::default() });
                }
            }
        })
    }

    fn with_graph_change(name: &str, rows: usize, change: impl FnOnce(&mut GraphProto)) -> Workload {
        let path = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../benches/workloads"))
            .join(format!("{name}.onnx"));
        let mut proto = LoadedModel::load(path).unwrap().proto;
        let graph = proto.graph.as_mut().unwrap();
        graph.value_info.clear();
        for info in graph.input.iter_mut().chain(&mut graph.output) {
            *sizes(info)[0] = rows as i64;
        }
        let read = |info: &mut ValueInfoProto| sizes(info).into_iter().map(|size| *size as usize).collect();
        let input: Vec<usize> = read(&mut graph.input[0]);
        let output: Vec<usize> = read(&mut graph.output[0]);
        let mut trained = Vec::new();
        for (seed, tensor) in (1..).zip(&mut graph.initializer) {
            // Statistics are not trained.
            if !tensor.name.contains(".running_") {
                trained.push(tensor.name.clone());
            }
            if tensor.doc_string.starts_with("fill ") {
                let dims: Vec<usize> = tensor.dims.iter().map(|&size| size as usize).collect();
                let count: usize = dims.iter().product();
                // Uniform numbers between -1 and 1 have the variance 1/3.
                let scale = (6.0 / dims[1..].iter().product::<usize>() as f32).sqrt();
                let values: Vec<f32> = numbers(count, seed).iter().map(|value| value * scale).collect();
                tensor.raw_data = Bytes::from(bytemuck::cast_slice::<f32, u8>(&values).to_vec());
            }
        }
        change(graph);
        let artifacts = generate(
            ModelSource::from_proto(&proto).unwrap(),
            ArtifactOptions {
                requires_grad: trained.clone(),
                losses: vec![Loss::CrossEntropyLoss.into()],
                optimizer: Some(OptimizerKind::AdamW.into()),
                ..ArtifactOptions::default()
            },
        )
        .unwrap();
        let mut state = CheckpointState::from_bytes(artifacts.checkpoint_bytes().unwrap()).unwrap();
        let train = ModelSource::from_proto(&artifacts.training_model).unwrap();
        let module = Module::new(train, &mut state, None, ModuleOptions::default()).unwrap();
        let optimizer = ModelSource::from_proto(artifacts.optimizer_model.as_ref().unwrap()).unwrap();
        let optimizer = Optimizer::new(optimizer, &mut state, &module).unwrap();
        Workload { state, module, optimizer, trained, artifacts, input, classes: output[1] }
    }

    /// Returns a batch of noise.
    pub(crate) fn batch(&self, seed: u32) -> (Tensor, Tensor) {
        let rows = self.input[0];
        let labels: Vec<i64> = (0..rows).map(|row| ((row + seed as usize) % self.classes) as i64).collect();
        let x = Tensor::f32(&self.input, &numbers(self.input.iter().product(), seed));
        (x, Tensor::i64(&[rows], &labels))
    }
}

/// `y = Gather(If(sum(x) > 0, 2 z, -z), indices of nonzero z)` with `z = x w`: a branch, and a function on
/// the host.
pub(crate) fn branching() -> ModelSource {
    use ortrain_graph::{Dim, Graph, Shape, ValueType};
    use ortrain_onnx::proto::{
        AttributeProto, ModelProto, OperatorSetIdProto, attribute_proto::AttributeType,
    };

    let info = |name: &str, dtype: DType, dims: Vec<Dim>| {
        let mut graph = Graph::new("");
        let id = graph.add_value(name, ValueType::Tensor(dtype, Some(dims.into_iter().collect::<Shape>())));
        graph.value_info(id)
    };
    let node = |op: &str, inputs: &[&str], output: &str| NodeProto {
        op_type: op.into(),
        input: inputs.iter().map(|name| (*name).to_owned()).collect(),
        output: vec![output.into()],
        ..NodeProto::default()
    };
    let branch = |name: &str, inner: NodeProto| {
        let output = vec![info(&inner.output[0], DType::F32, vec![Dim::Known(4)])];
        let graph = GraphProto { name: name.into(), node: vec![inner], output, ..GraphProto::default() };
        let mut attribute =
            AttributeProto { name: name.into(), g: Some(Box::new(graph)), ..Default::default() };
        attribute.set_type(AttributeType::Graph);
        attribute
    };
    let choice = NodeProto {
        attribute: vec![
            branch("then_branch", node("Add", &["z", "z"], "doubled")),
            branch("else_branch", node("Neg", &["z"], "negated")),
        ],
        ..node("If", &["holds"], "chosen")
    };
    let constant = |name: &str, tensor: &Tensor| ortrain_graph::tensor_to_proto(name, tensor);
    let graph = GraphProto {
        name: "branching".into(),
        node: vec![
            node("Mul", &["x", "w"], "z"),
            node("ReduceSum", &["x", "first"], "sum"),
            node("Greater", &["sum", "zero"], "holds"),
            choice,
            node("NonZero", &["z"], "places"),
            node("Squeeze", &["places", "first"], "flat"),
            node("Gather", &["chosen", "flat"], "y"),
        ],
        input: vec![info("x", DType::F32, vec![Dim::Known(4)])],
        output: vec![info("y", DType::F32, vec![Dim::symbol("found")])],
        initializer: vec![
            constant("w", &Tensor::f32(&[4], &[3.0, 4.0, 5.0, 6.0])),
            constant("first", &Tensor::i64(&[1], &[0])),
            constant("zero", &Tensor::f32(&[1], &[0.0])),
        ],
        ..GraphProto::default()
    };
    let opset = OperatorSetIdProto { version: 17, ..Default::default() };
    let model =
        ModelProto { ir_version: 8, graph: Some(graph), opset_import: vec![opset], ..ModelProto::default() };
    ModelSource::from_proto(&model).unwrap()
}

/// Returns the optimizer of every row of the table, with every option and a separate group for the parameter
/// `first`.
pub(crate) fn optimizers(first: &str) -> Vec<(String, ModelSource)> {
    use ortrain::optim::{Group, OPTIMIZERS, OptimizerSpec, optimizer_model};
    let described = |row: &&'static ortrain::optim::Optimizer| {
        let mut spec = OptimizerSpec::of_row(row);
        if let Some(momentum) = spec.settings.get_mut("momentum") {
            *momentum = 0.9;
        }
        for (name, value) in [("max_value", 0.5), ("max_norm_per_tensor", 0.7), ("ema_decay", 0.9)] {
            spec.settings.insert(name.into(), value);
        }
        spec.max_norm = Some(1.0);
        spec.mean_of_gathered = true;
        spec.groups = vec![Group { parameters: vec![first.into()], lr_factor: 0.5, ..Group::default() }];
        let model = optimizer_model(&spec, &[DType::F32]).unwrap();
        (row.name.to_owned(), ModelSource::from_proto(&model).unwrap())
    };
    OPTIMIZERS.iter().map(described).collect()
}
