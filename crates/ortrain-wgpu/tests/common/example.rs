//! Artifacts of the examples.

use ortrain::artifacts::{ArtifactOptions, Artifacts, Loss, OptimizerKind, generate};

/// The weights of the perceptron.
pub(crate) const WEIGHTS: [&str; 4] = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"];

/// The artifacts of an example, all weights of which are trained.
pub(crate) fn artifacts(name: &str, weights: &[&str], optimizer: OptimizerKind) -> Artifacts {
    let path = format!("{}/../../examples/{name}.onnx", env!("CARGO_MANIFEST_DIR"));
    let options = ArtifactOptions {
        requires_grad: weights.iter().map(|&weight| weight.to_owned()).collect(),
        losses: vec![Loss::CrossEntropyLoss.into()],
        optimizer: Some(optimizer.into()),
        ..ArtifactOptions::default()
    };
    generate(path.as_str().into(), options).expect("it can be trained")
}
