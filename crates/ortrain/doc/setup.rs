// Setup of the documentation examples: a perceptron with 64 inputs and 10 classes. Its second layer is
// trained, the first one is frozen.

use ortrain::artifacts::{ArtifactOptions, Artifacts, Loss, OptimizerKind, generate};
use ortrain::{
    CheckpointState, ModelSource, Module, ModuleOptions, Optimizer, Result, Tensor, TrainingSession,
};

pub const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/perceptron.onnx");

pub fn artifacts() -> Result<Artifacts> {
    let options = ArtifactOptions {
        requires_grad: ["fc2.weight", "fc2.bias"].map(String::from).into(),
        frozen_params: ["fc1.weight", "fc1.bias"].map(String::from).into(),
        losses: vec![Loss::CrossEntropyLoss.into()],
        optimizer: Some(OptimizerKind::AdamW.into()),
        nominal_checkpoint: true,
        ..ArtifactOptions::default()
    };
    generate(MODEL.into(), options)
}

pub fn state() -> Result<CheckpointState> {
    CheckpointState::from_checkpoint(artifacts()?.checkpoint)
}

/// The training, evaluation and optimizer models.
fn models(artifacts: &Artifacts) -> Result<(ModelSource, Option<ModelSource>, Option<ModelSource>)> {
    Ok((
        ModelSource::from_proto(&artifacts.training_model)?,
        Some(ModelSource::from_proto(&artifacts.eval_model)?),
        artifacts.optimizer_model.as_ref().map(ModelSource::from_proto).transpose()?,
    ))
}

pub fn training() -> Result<(CheckpointState, Module, Optimizer)> {
    let generated = artifacts()?;
    let (train, eval, optimizer) = models(&generated)?;
    let mut state = CheckpointState::from_checkpoint(generated.checkpoint)?;
    let module = Module::new(train, &mut state, eval, ModuleOptions::default())?;
    let optimizer = Optimizer::new(optimizer.expect("it was asked for"), &mut state, &module)?;
    Ok((state, module, optimizer))
}

pub fn session() -> Result<TrainingSession> {
    session_on(state()?)
}

pub fn session_on(state: CheckpointState) -> Result<TrainingSession> {
    let (train, eval, optimizer) = models(&artifacts()?)?;
    TrainingSession::new(state, train, eval, optimizer, ModuleOptions::default())
}

/// Two rows and their labels.
pub fn batch() -> [Tensor; 2] {
    [Tensor::f32(&[2, 64], &[0.5; 128]), Tensor::i64(&[2], &[3, 4])]
}

/// The perceptron with its loss and the outputs `loss` and `logits`.
pub fn model_with_loss() -> Result<ModelSource> {
    let mut model = ortrain::decode_model(std::fs::read(MODEL).expect("it comes with the package"))?;
    let eval_graph = artifacts()?.eval_model.graph.expect("it has a graph");
    let graph = model.graph.as_mut().expect("it has a graph");
    let name = &eval_graph.output[0].name;
    let node = eval_graph.node.iter().find(|node| node.output.contains(name)).expect("a node makes the loss");
    let mut node = node.clone();
    node.output[0] = "loss".into();
    graph.node.push(node);
    graph
        .input
        .push(eval_graph.input.iter().find(|input| input.name == "labels").expect("it is given").clone());
    let mut loss = eval_graph.output[0].clone();
    loss.name = "loss".into();
    graph.output.insert(0, loss);
    ModelSource::from_proto(&model)
}

pub fn classic() -> Result<ortrain::classic::TrainingSession> {
    let parameters =
        ortrain::classic::TrainingParameters::new("loss").optimizer("AdamOptimizer").train(["fc2.bias"]);
    ortrain::classic::TrainingSession::new(model_with_loss()?, &parameters, ModuleOptions::default())
}
