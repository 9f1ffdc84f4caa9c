//! Normalizations over random combinations of attributes: gradients against central differences, every backend against
//! the reference evaluator, gradients in plain ONNX.

mod common;

use common::{every_level, passes};
use ortrain_graph::{Attrs, DType, Tensor};
use ortrain_testkit::{Case, CaseBuilder, Fill, check_backend, check_gradient, check_standard};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

/// Sizes and attributes.
#[derive(Clone, Debug)]
struct Config {
    dims: Vec<usize>,
    epsilon: f32,
    momentum: f32,
    training: bool,
    /// The operator of training graphs, whose statistics of the batch are results, too.
    internal: bool,
    dynamic: bool,
}

fn config() -> impl Strategy<Value = Config> {
    let space = prop::collection::vec(1..4usize, 0..4);
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    (0..5usize, 1..5usize, any::<bool>(), space, 0.02..0.5f32, 0.0..1.0f32, flags).prop_map(
        |(batch, channels, vector, space, epsilon, momentum, (training, internal, dynamic))| Config {
            dims: if vector && space.is_empty() {
                vec![batch]
            } else {
                [vec![batch, channels], space].concat()
            },
            epsilon,
            momentum,
            training,
            internal,
            dynamic,
        },
    )
}

impl Config {
    /// One node. Where `all` says so, everything it computes is a result; else the product of the batch and what it
    /// became, so that the sums in its gradient do not cancel out.
    fn case(&self, dtype: DType, all: bool) -> Case {
        let op = if self.internal { "BatchNormInternal" } else { "BatchNormalization" };
        let domain = if self.internal { "com.microsoft" } else { "" };
        let channels = [self.dims.get(1).copied().unwrap_or(1)];
        let mut b = CaseBuilder::new(op, &format!("{self:?}"));
        if self.dynamic {
            b = b.dynamic();
        }
        let x = b.input(dtype, &self.dims, &Fill::Positive);
        let mut b = b.fixed();
        let mut inputs = vec![x];
        inputs.extend((0..2).map(|_| b.input(dtype, &channels, &Fill::Signed)));
        for (fill, value) in [(Fill::Signed, 0.25), (Fill::Positive, 0.75)] {
            // In training no gradient arrives at them.
            inputs.push(if self.training {
                b.constant(Tensor::filled(dtype, &channels, value))
            } else {
                b.input(dtype, &channels, &fill)
            });
        }
        let attrs = Attrs::new()
            .with("epsilon", self.epsilon)
            .with("momentum", self.momentum)
            .with("training_mode", i64::from(self.training));
        let inputs: Vec<_> = inputs.into_iter().map(Some).collect();
        let outputs = match (self.training, self.internal) {
            (false, _) => 1,
            (true, false) => 3,
            (true, true) => 5,
        };
        let y = b.node_with(domain, op, &inputs, outputs, attrs);
        if all {
            return b.outputs(&y);
        }
        let product = b.node("Mul", &[y[0], x], Attrs::new());
        b.outputs(&[product])
    }
}

/// The same cases on every run: a sum that cancels out by chance would fail for its rounding.
fn runs(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        rng_seed: RngSeed::Fixed(50),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(runs(64))]

    #[test]
    fn gradients_are_those_of_central_differences(config in config()) {
        passes(check_gradient(&config.case(DType::F32, false)).map(|points| assert!(points > 0)))?;
    }
}

proptest! {
    #![proptest_config(runs(128))]

    #[test]
    fn gradients_in_plain_onnx_are_the_same(config in config()) {
        passes(check_standard(&config.case(DType::F32, false)))?;
    }

    #[test]
    fn every_backend_agrees(config in config(), dtype in 0..4usize) {
        let dtype = [DType::F32, DType::F64, DType::F16, DType::BF16][dtype];
        for backend in every_level() {
            passes(check_backend(&config.case(dtype, true), &backend, false))?;
            if matches!(dtype, DType::F32 | DType::F64) {
                passes(check_backend(&config.case(dtype, false), &backend, true))?;
            }
        }
    }
}
