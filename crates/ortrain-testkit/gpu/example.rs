//! Artifacts of the example models.

use ortrain::artifacts::{ArtifactOptions, Artifacts, Loss, OptimizerKind, generate};

/// Parameters of the perceptron.
pub(crate) const WEIGHTS: [&str; 4] = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"];

/// Generates the artifacts of an example with these trained parameters.
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
