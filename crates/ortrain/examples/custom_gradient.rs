//! A custom gradient: a perceptron with second-layer weights of -1 and 1, which the straight-through gradient
//! of Sign can train.
//!
//! ```text
//! cargo run -p ortrain --example custom_gradient
//! ```

use std::io::Write as _;
use std::path::Path;

use ortrain::artifacts::{ArtifactOptions, Loss, OptimizerKind, generate};
use ortrain::{
    CheckpointState, FunctionProto, InferenceSession, InputView, ModelProto, ModelSource, Module,
    ModuleOptions, NodeProto, OperatorLibrary, OperatorSetIdProto, Optimizer, SessionOptions, Tensor,
    collect, decode_model,
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

/// The gradient of Sign is zero. This custom gradient passes the output gradient through.
fn library() -> Result<OperatorLibrary, Failure> {
    let function = FunctionProto {
        name: "StraightThrough".into(),
        domain: "examples".into(),
        // The operator's input, its output, the gradient of its output.
        input: texts(&["x", "y", "dy"]),
        // Gradient of its input.
        output: texts(&["dx"]),
        node: vec![node("Identity", &["dy"], &["dx"])],
        opset_import: vec![OperatorSetIdProto { domain: String::new(), version: 17 }],
        ..FunctionProto::default()
    };
    let mut library = OperatorLibrary::new();
    library.add_gradient("", "Sign", function)?;
    Ok(library)
}

/// A perceptron that uses the signs of its second-layer weights.
fn model() -> Result<ModelProto, Failure> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/perceptron.onnx");
    let mut model = decode_model(std::fs::read(file)?)?;
    let graph = model.graph.as_mut().ok_or("it has a graph")?;
    graph.node[2].input[1] = "fc2.sign".into();
    graph.node.insert(2, node("Sign", &["fc2.weight"], &["fc2.sign"]));
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
