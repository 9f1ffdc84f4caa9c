//! The examples of custom operators and gradients run unchanged.

#[allow(dead_code, reason = "tests do not print")]
#[path = "../examples/custom_gradient.rs"]
mod custom_gradient;
#[allow(dead_code, reason = "tests do not print")]
#[path = "../examples/custom_operator.rs"]
mod custom_operator;

fn falls(losses: &[f32]) -> bool {
    losses.iter().all(|loss| loss.is_finite()) && losses[losses.len() - 1] < 0.8 * losses[0]
}

#[test]
fn an_operator() {
    let folder = tempfile::tempdir().unwrap();
    let losses = custom_operator::train(&folder.path().join("trained.onnx")).unwrap();
    assert!(falls(&losses), "{losses:?}");
}

#[test]
fn a_gradient() {
    let folder = tempfile::tempdir().unwrap();
    let losses = custom_gradient::train(&folder.path().join("trained.onnx")).unwrap();
    assert!(falls(&losses), "{losses:?}");
}
