//! Pooling with random combinations of attributes: gradients against central differences, every backend
//! against the reference evaluator, gradients in plain ONNX, and extreme attributes.

mod common;
#[path = "common/outcome.rs"]
mod outcome;

use common::every_level;
use ortrain_graph::{DType, Shape, Tensor, ValueType};
use ortrain_ops::{Role, Specialiser};
use ortrain_testkit::suites::poolings::{AVERAGE, GLOBAL, MAX, check, config};
use ortrain_testkit::{check_gradient, check_standard};
use outcome::to_test_result;
use proptest::prelude::*;
use proptest::sample::select;

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn gradients_are_those_of_central_differences(config in config()) {
        for op in [MAX, AVERAGE, GLOBAL[0], GLOBAL[1]] {
            to_test_result(check_gradient(&config.case(op, DType::F32, 1)).map(|points| assert!(points > 0)))?;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn gradients_in_plain_onnx_are_the_same(config in config()) {
        for op in [MAX, AVERAGE, GLOBAL[0], GLOBAL[1]] {
            to_test_result(check_standard(&config.case(op, DType::F32, 1)))?;
        }
    }

    #[test]
    fn every_backend_agrees(config in config(), dtype in select(DType::ALL.to_vec())) {
        for backend in every_level() {
            to_test_result(check(&backend, &config, dtype))?;
        }
    }
}

/// Numbers for attributes, some of them extreme.
const WILD: [i64; 18] =
    [-1, 0, 0, 1, 1, 1, 1, 2, 2, 3, 5, 7, 1 << 20, 1 << 31, 1 << 40, 1 << 62, i64::MAX, i64::MIN];

const LISTS: [&str; 4] = ["strides", "dilations", "pads", "kernel_shape"];

/// Maximum number of elements in a test.
const MAX_ELEMENTS: usize = 1 << 16;

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any attributes give a result or an error, never a panic: for shapes, instructions, gradients, and
    /// gradients in plain ONNX.
    #[test]
    fn wild_attributes_are_answered(
        config in config(),
        max: bool,
        changes in prop::collection::vec((0..LISTS.len(), prop::collection::vec(select(&WILD[..]), 1..7)), 0..3),
        like_axes: bool,
    ) {
        let mut case = config.case(if max { MAX } else { AVERAGE }, DType::F32, 1);
        for (k, mut list) in changes {
            let name = LISTS[k];
            if like_axes {
                let fitting = config.rank() * if name == "pads" { 2 } else { 1 };
                list = list.iter().copied().cycle().take(fitting).collect();
            }
            let attrs = &mut case.graph.nodes[0].attrs;
            *attrs = attrs.clone().with(name, list);
        }
        let mut graph = case.graph.clone();
        if ortrain_ops::passes::infer::infer(&mut graph).is_err() {
            return Ok(());
        }
        // Infers the dimensions of the result from the actual dimensions of the input.
        let mut forward_graph = case.graph.clone();
        forward_graph.value_mut(forward_graph.inputs[0]).ty = ValueType::tensor(DType::F32, case.inputs[0].dims());
        if ortrain_ops::passes::infer::infer(&mut forward_graph).is_err() {
            return Ok(());
        }
        let dims = forward_graph.value(forward_graph.outputs[0]).ty.shape().and_then(Shape::concrete).expect("all are given");
        if dims.iter().product::<usize>() > MAX_ELEMENTS {
            return Ok(());
        }
        let roles = |graph: &ortrain_graph::Graph| vec![Role::User; graph.inputs.len()];
        let forward = Specialiser::new(graph.clone(), roles(&graph)).schedule(&case.inputs);
        prop_assert!(forward.is_ok(), "{:?}", forward.err());
        let seed = graph.add_value("seed", ValueType::tensor(DType::F32, &dims));
        graph.inputs.push(seed);
        let (output, targets) = (graph.outputs[0], [graph.inputs[0]]);
        let gradients = ortrain_ops::passes::differentiate::backpropagate(&mut graph, &[(output, seed)], &targets);
        let Ok(gradients) = gradients else { return Ok(()) };
        graph.outputs = gradients.into_iter().flatten().collect();
        let mut run_inputs = case.inputs.clone();
        run_inputs.push(Tensor::zeros(DType::F32, dims).expect("not too many"));
        // With known sizes, a successful inference guarantees a schedule; otherwise, sizes may be too large.
        let all_known = config.has_known_sizes();
        let first_schedule = Specialiser::new(graph.clone(), roles(&graph)).schedule(&run_inputs);
        prop_assert!(first_schedule.is_ok() || !all_known, "{:?}", first_schedule.err());
        if ortrain_ops::passes::decompose::standardise(&mut graph).is_ok() {
            let second_schedule = Specialiser::new(graph.clone(), roles(&graph)).schedule(&run_inputs);
            prop_assert!(second_schedule.is_ok() || !all_known, "{:?}", second_schedule.err());
        }
    }
}
