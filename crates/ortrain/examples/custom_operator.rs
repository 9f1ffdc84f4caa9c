//! A custom operator as an ONNX function: a perceptron with the activation x * sigmoid(slope * x).
//!
//! ```text
//! cargo run -p ortrain --example custom_operator
//! ```

use std::io::Write as _;
use std::path::Path;

use ortrain::artifacts::{ArtifactOptions, Loss, OptimizerKind, generate};
use ortrain::{
    AttributeProto, AttributeType, CheckpointState, FunctionProto, InferenceSession, InputView, ModelProto,
    ModelSource, Module, ModuleOptions, NodeProto, OperatorLibrary, OperatorSetIdProto, Optimizer,
    SessionOptions, Tensor, collect, decode_model,
};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let folder = tempfile::tempdir()?;
    for (step, loss) in (1..).zip(train(&folder.path().join("trained.onnx"))?) {
        writeln!(std::io::stdout(), "step {step:2}  loss {loss:.4}")?;
    }
    Ok(())
}

fn texts(names: &[&str]) -> Vec<String> {
    names.iter().map(|&name| name.to_owned()).collect()
}

fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    NodeProto { op_type: op.into(), input: texts(inputs), output: texts(outputs), ..NodeProto::default() }
}

fn float(name: &str, value: f32) -> AttributeProto {
    let mut attribute = AttributeProto { name: name.into(), f: value, ..AttributeProto::default() };
    attribute.set_type(AttributeType::Float);
    attribute
}

/// The operator. Its gradient is derived by differentiating its body.
fn library() -> Result<OperatorLibrary, Failure> {
    // The value of the call's attribute.
    let mut slope = node("Constant", &[], &["slope"]);
    slope.attribute = vec![AttributeProto { ref_attr_name: "slope".into(), ..float("value_float", 0.0) }];
    let function = FunctionProto {
        name: "Gate".into(),
        domain: "examples".into(),
        input: texts(&["x"]),
        output: texts(&["y"]),
        // Attributes with default values; attributes without default belong in `attribute`.
        attribute_proto: vec![float("slope", 1.0)],
        node: vec![
            slope,
            node("Mul", &["x", "slope"], &["steep"]),
            node("Sigmoid", &["steep"], &["gate"]),
            node("Mul", &["x", "gate"], &["y"]),
        ],
        opset_import: vec![OperatorSetIdProto { domain: String::new(), version: 17 }],
        ..FunctionProto::default()
    };
    let mut library = OperatorLibrary::new();
    library.add_function(function)?;
    Ok(library)
}

/// A perceptron with the operator instead of Relu.
fn model() -> Result<ModelProto, Failure> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/perceptron.onnx");
    let mut model = decode_model(std::fs::read(file)?)?;
    let graph = model.graph.as_mut().ok_or("it has a graph")?;
    graph.node[1].domain = "examples".into();
    graph.node[1].op_type = "Gate".into();
    graph.node[1].attribute = vec![float("slope", 1.702)];
    model.opset_import.push(OperatorSetIdProto { domain: "examples".into(), version: 1 });
    Ok(model)
}

/// Trains the model on random images and exports it. Returns the losses. The class of an image is the index
/// of the largest of its first ten pixels.
pub(crate) fn train(exported: &Path) -> Result<Vec<f32>, Failure> {
    let library = library()?;
    let options = ArtifactOptions {
        requires_grad: texts(&["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]),
        losses: vec![Loss::CrossEntropyLoss.into()],
        optimizer: Some(OptimizerKind::AdamW.into()),
        ..ArtifactOptions::default()
    };
    // Only this call needs the library: the generated models have plain nodes.
    let artifacts = generate(ModelSource::from_proto(&model()?)?.with_operators(&library), options)?;
    let optimizer = artifacts.optimizer_model.as_ref().ok_or("it was asked for")?;

    let mut state = CheckpointState::from_checkpoint(artifacts.checkpoint)?;
    let train = ModelSource::from_proto(&artifacts.training_model)?;
    let eval = ModelSource::from_proto(&artifacts.eval_model)?;
    let mut module = Module::new(train, &mut state, Some(eval), ModuleOptions::default())?;
    let mut optimizer = Optimizer::new(ModelSource::from_proto(optimizer)?, &mut state, &module)?;

    let (x, labels) = images();
    let inputs = [InputView::from(&x), InputView::from(&labels)];
    let mut losses = Vec::new();
    for _ in 0..30 {
        let results = collect(|deliver| module.train_step(&mut state, &inputs, deliver))?;
        losses.push(results[0].to_vec::<f32>()[0]);
        optimizer.step(&mut state, &module)?;
        module.lazy_reset_grad();
    }
    module.export_model_for_inferencing(&state, exported, &["logits"])?;
    // The exported model does not need it either.
    InferenceSession::new(exported.into(), SessionOptions::default())?;
    Ok(losses)
}

/// 32 images of 64 pixels, and their classes.
fn images() -> (Tensor, Tensor) {
    let mut seed = 1_u32;
    let mut next = || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (seed >> 8) as f32 / (1 << 24) as f32
    };
    let pixels: Vec<f32> = (0..32 * 64).map(|_| next()).collect();
    let largest = |image: &[f32]| (0..10).max_by(|&a, &b| image[a].total_cmp(&image[b])).unwrap_or(0);
    let labels: Vec<i64> = pixels.chunks(64).map(|image| largest(image) as i64).collect();
    (Tensor::f32(&[32, 64], &pixels), Tensor::i64(&[32], &labels))
}
