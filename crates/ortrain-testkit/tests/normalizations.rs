//! Normalizations with random combinations of attributes: gradients against central differences, every
//! backend against the reference evaluator, gradients in plain ONNX.

mod common;
#[path = "common/outcome.rs"]
mod outcome;

use common::every_level;
use ortrain_graph::DType;
use ortrain_testkit::suites::normalizations::{check, check_layer, config, layer_config};
use ortrain_testkit::{check_gradient, check_standard};
use outcome::to_test_result;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

/// A fixed seed: a sum that cancels out by chance would fail because of rounding.
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
        to_test_result(check_gradient(&config.case(DType::F32, false)).map(|points| assert!(points > 0)))?;
    }
}

proptest! {
    #![proptest_config(runs(128))]

    #[test]
    fn gradients_in_plain_onnx_are_the_same(config in config()) {
        to_test_result(check_standard(&config.case(DType::F32, false)))?;
    }

    #[test]
    fn every_backend_agrees(config in config(), dtype in 0..4usize) {
        let dtype = [DType::F32, DType::F64, DType::F16, DType::BF16][dtype];
        for backend in every_level() {
            to_test_result(check(&backend, &config, dtype))?;
        }
    }
}

proptest! {
    #![proptest_config(runs(96))]

    #[test]
    fn layers_have_the_gradients_of_central_differences(config in layer_config()) {
        to_test_result(check_gradient(&config.case(DType::F32)).map(|points| assert!(points > 0)))?;
    }

    #[test]
    fn layers_in_plain_onnx_are_the_same(config in layer_config()) {
        if config.has_plain_gradient() {
            to_test_result(check_standard(&config.case(DType::F32)))?;
        }
    }

    #[test]
    fn every_backend_agrees_on_layers(config in layer_config(), dtype in 0..4usize) {
        let dtype = [DType::F32, DType::F64, DType::F16, DType::BF16][dtype];
        for backend in every_level() {
            to_test_result(check_layer(&backend, &config, dtype))?;
        }
    }
}
