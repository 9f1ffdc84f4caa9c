//! Normalizations over random combinations of attributes: gradients against central differences, every backend against
//! the reference evaluator, gradients in plain ONNX.

mod common;
#[path = "common/outcome.rs"]
mod outcome;

use common::every_level;
use ortrain_graph::{Attrs, DType, Tensor};
use ortrain_testkit::{Case, CaseBuilder, Fill, check_backend, check_gradient, check_standard};
use outcome::passes;
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

/// Sizes and attributes of a normalization of everything from an axis on.
#[derive(Clone, Debug)]
struct LayerConfig {
    dims: Vec<usize>,
    axis: i64,
    epsilon: f32,
    /// Without a mean.
    rms: bool,
    /// Which axes of scale and bias have one element only, and how many are left out at the front.
    ones: [[bool; 4]; 2],
    lead: [usize; 2],
    bias: bool,
    narrow_statistics: bool,
    dynamic: bool,
}

fn layer_config() -> impl Strategy<Value = LayerConfig> {
    let dims = prop::collection::vec(1..5usize, 1..5);
    let ones = any::<[[bool; 4]; 2]>();
    let flags = any::<[bool; 6]>();
    (dims, any::<usize>(), 0.02..0.5f32, ones, any::<[u8; 2]>(), flags).prop_map(
        |(dims, axis, epsilon, ones, lead, [rms, bias, narrow_statistics, dynamic, usual, from_end])| {
            let rank = dims.len();
            let axis = axis % rank;
            // Usually parameters have the shape that is normalized.
            let lead = if usual { [axis; 2] } else { lead.map(|lead| usize::from(lead) % (rank + 1)) };
            let ones = if usual { [[false; 4]; 2] } else { ones };
            let axis = if from_end { axis as i64 - rank as i64 } else { axis as i64 };
            LayerConfig { dims, axis, epsilon, rms, ones, lead, bias, narrow_statistics, dynamic }
        },
    )
}

impl LayerConfig {
    /// One node, whose result is multiplied with the data, so that the sums in its gradient do not cancel out; the
    /// statistics are results of the case, too.
    fn case(&self, dtype: DType) -> Case {
        let op = if self.rms { "RMSNormalization" } else { "LayerNormalization" };
        let mut b = CaseBuilder::new(op, &format!("{self:?}"));
        if self.dynamic {
            b = b.dynamic();
        }
        let x = b.input(dtype, &self.dims, &Fill::Positive);
        let mut b = b.fixed();
        let mut inputs = vec![Some(x)];
        for k in 0..if self.bias && !self.rms { 2 } else { 1 } {
            let size = |(&dim, one): (&usize, bool)| if one { 1 } else { dim };
            let dims: Vec<usize> = self.dims.iter().zip(self.ones[k]).map(size).skip(self.lead[k]).collect();
            inputs.push(Some(b.input(dtype, &dims, &Fill::Signed)));
        }
        let stash = if self.narrow_statistics { DType::BF16 } else { DType::F32 };
        let attrs = Attrs::new()
            .with("axis", self.axis)
            .with("epsilon", self.epsilon)
            .with("stash_type", i64::from(stash.to_onnx()));
        let y = b.node_with("", op, &inputs, if self.rms { 1 } else { 3 }, attrs);
        let mut results = vec![b.node("Mul", &[y[0], x], Attrs::new())];
        // Rounded to 8 bits they are no function that could be differentiated by differences.
        if !self.narrow_statistics {
            let to = Attrs::new().with("to", i64::from(dtype.to_onnx()));
            results.extend(y[1..].iter().map(|&value| b.node("Cast", &[value], to.clone())));
        }
        b.outputs(&results)
    }

    /// Whether plain ONNX can say the gradient: not if it is open whether a parameter is broadcast along the batch.
    fn has_known_sums(&self) -> bool {
        !self.dynamic || (0..2).all(|k| self.lead[k] > 0 || self.ones[k][0])
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

proptest! {
    #![proptest_config(runs(96))]

    #[test]
    fn layers_have_the_gradients_of_central_differences(config in layer_config()) {
        passes(check_gradient(&config.case(DType::F32)).map(|points| assert!(points > 0)))?;
    }

    #[test]
    fn layers_in_plain_onnx_are_the_same(config in layer_config()) {
        if config.has_known_sums() {
            passes(check_standard(&config.case(DType::F32)))?;
        }
    }

    #[test]
    fn every_backend_agrees_on_layers(config in layer_config(), dtype in 0..4usize) {
        let dtype = [DType::F32, DType::F64, DType::F16, DType::BF16][dtype];
        let gradients = matches!(dtype, DType::F32 | DType::F64);
        for backend in every_level() {
            passes(check_backend(&config.case(dtype), &backend, gradients))?;
        }
    }
}
