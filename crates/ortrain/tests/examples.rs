//! The examples of custom operators and gradients run unchanged.

#[allow(dead_code, reason = "tests do not print")]
#[path = "../examples/custom_gradient.rs"]
mod custom_gradient;
#[allow(dead_code, reason = "tests do not print")]
#[path = "../examples/custom_operator.rs"]
mod custom_operator;

fn decreases(losses: &[f32]) -> bool {
    losses.iter().all(|loss| loss.is_finite()) && losses[losses.len() - 1] < 0.8 * losses[0]
}

#[test]
fn custom_operator_trains() {
    let folder = tempfile::tempdir().unwrap();
    let losses = custom_operator::train(&folder.path().join("trained.onnx")).unwrap();
    assert!(decreases(&losses), "{losses:?}");
}

#[test]
fn custom_gradient_trains() {
    let folder = tempfile::tempdir().unwrap();
    let losses = custom_gradient::train(&folder.path().join("trained.onnx")).unwrap();
    assert!(decreases(&losses), "{losses:?}");
}
