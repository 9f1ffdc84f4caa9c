//! Training sessions on the device, compared with the CPU. Their optimizers clip by norms in float64.

#[expect(dead_code, unreachable_pub, reason = "examples of the documentation use all of it")]
mod setup {
    include!("../../ortrain/doc/setup.rs");
}

use std::sync::Arc;

use ortrain::classic::{CallOptions, TrainingParameters, TrainingSession};
use ortrain::{Backend, InputView, ModuleOptions, RunOptions, Tensor, backend};

const WEIGHTS: [&str; 4] = ["fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight"];
const ROWS: usize = 20;
/// Tolerance for the state on a device and on the CPU, which sum in different orders.
const STATE_TOLERANCE: f64 = 1e-5;

/// Returns all numbers of the state after some steps.
fn trained(optimizer: &str, backend: Arc<dyn Backend>) -> Vec<f64> {
    let parameters = TrainingParameters::new("loss").optimizer(optimizer).train(WEIGHTS);
    let model = setup::model_with_loss().expect("it has a loss");
    let options = ModuleOptions::from(RunOptions::default().backend(backend));
    let mut session = TrainingSession::new(model, &parameters, options).expect("it trains");
    let x: Vec<f32> = (0..ROWS * 64).map(|k| (k as f32 * 0.37).sin()).collect();
    let labels: Vec<i64> = (0..ROWS).map(|row| (row * 7 % 10) as i64).collect();
    let (x, labels) = (Tensor::f32(&[ROWS, 64], &x), Tensor::i64(&[ROWS], &labels));
    let rate = Tensor::f32(&[1], &[0.01]);
    let feeds = [
        ("x", InputView::from(&x)),
        ("labels", InputView::from(&labels)),
        ("Learning_Rate", InputView::from(&rate)),
    ];
    for _ in 0..3 {
        session.run_tensors(&feeds, &["loss"], CallOptions::default()).expect("it runs");
    }
    session.state().expect("it can be read").into_values().flat_map(|tensor| tensor.to_f64()).collect()
}

#[test]
fn classic_optimizers_step_as_on_the_processor() {
    for optimizer in ["SGDOptimizer", "AdamOptimizer", "LambOptimizer"] {
        let expected = trained(optimizer, backend("cpu", 1).expect("there is a processor"));
        let got = trained(optimizer, crate::common::device());
        assert_eq!(got.len(), expected.len());
        for (got, expected) in got.iter().zip(&expected) {
            assert!(
                (got - expected).abs() <= STATE_TOLERANCE,
                "{optimizer}: {got}, but {expected} on the processor"
            );
        }
    }
}
