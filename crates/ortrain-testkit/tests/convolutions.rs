//! Convolutions with random combinations of attributes: gradients against central differences, every backend
//! against the reference evaluator, gradients in plain ONNX.

mod common;
#[path = "common/outcome.rs"]
mod outcome;

use common::every_level;
use ortrain_graph::{DType, Tensor};
use ortrain_ops::{Role, Specialiser};
use ortrain_testkit::suites::convolutions::{check, config};
use ortrain_testkit::{check_gradient, check_standard};
use outcome::to_test_result;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn gradients_are_those_of_central_differences(config in config()) {
        for case in [config.conv(DType::F32), config.transposed(DType::F32)] {
            to_test_result(check_gradient(&case).map(|points| assert!(points > 0)))?;
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn gradients_in_plain_onnx_are_the_same(config in config()) {
        for case in [config.conv(DType::F32), config.transposed(DType::F32)] {
            to_test_result(check_standard(&case))?;
        }
    }

    #[test]
    fn every_backend_agrees(config in config(), dtype in 0..4usize) {
        let dtype = [DType::F32, DType::F64, DType::F16, DType::BF16][dtype];
        for backend in every_level() {
            to_test_result(check(&backend, &config, dtype))?;
        }
    }
}

/// Numbers for attributes, some of them extreme.
const WILD: [i64; 18] =
    [-1, 0, 0, 1, 1, 1, 1, 2, 2, 3, 5, 7, 1 << 20, 1 << 31, 1 << 40, 1 << 62, i64::MAX, i64::MIN];

/// List attributes, and replacements for their values.
fn changes() -> impl Strategy<Value = Vec<(usize, Vec<i64>)>> {
    prop::collection::vec(
        (0..LISTS.len(), prop::collection::vec(prop::sample::select(&WILD[..]), 1..7)),
        0..3,
    )
}

const LISTS: [&str; 7] =
    ["strides", "dilations", "pads", "kernel_shape", "output_padding", "output_shape", "group"];

/// Maximum number of elements in a test.
const MAX_ELEMENTS: usize = 1 << 16;

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any attributes give a result or an error: for shapes, instructions, gradients, and gradients in plain
    /// ONNX.
    #[test]
    fn wild_attributes_are_answered(config in config(), changes in changes(), transposed: bool, like_axes: bool) {
        let mut case = if transposed { config.transposed(DType::F32) } else { config.conv(DType::F32) };
        for (k, mut list) in changes {
            let name = LISTS[k];
            if like_axes {
                let fitting = config.rank() * if name == "pads" { 2 } else { 1 };
                list = list.iter().copied().cycle().take(fitting).collect();
            }
            let attrs = &mut case.graph.nodes[0].attrs;
            *attrs = match name {
                "group" => attrs.clone().with(name, list[0]),
                _ => attrs.clone().with(name, list),
            };
        }
        let mut graph = case.graph.clone();
        if ortrain_ops::passes::infer::infer(&mut graph).is_err() {
            return Ok(());
        }
        let roles = |graph: &ortrain_graph::Graph| vec![Role::User; graph.inputs.len()];
        let forward = Specialiser::new(graph.clone(), roles(&graph)).schedule(&case.inputs);
        let Ok(forward) = forward else { return Ok(()) };
        let program = forward.single_program().expect("one program");
        let dims: Vec<usize> = forward.slots[forward.outputs[0].0 as usize].ty.as_ref().expect("known").1.clone();
        prop_assert!(program.instructions.len() <= 1);
        if dims.iter().product::<usize>() > MAX_ELEMENTS {
            return Ok(());
        }
        let seed = graph.add_value("seed", ortrain_graph::ValueType::tensor(DType::F32, &dims));
        graph.inputs.push(seed);
        let (output, targets) = (graph.outputs[0], graph.inputs[..2].to_vec());
        let gradients = ortrain_ops::passes::differentiate::backpropagate(&mut graph, &[(output, seed)], &targets);
        let Ok(gradients) = gradients else { return Ok(()) };
        graph.outputs = gradients.into_iter().flatten().collect();
        let mut run_inputs = case.inputs.clone();
        run_inputs.push(Tensor::zeros(DType::F32, dims).expect("not too many"));
        let first_schedule = Specialiser::new(graph.clone(), roles(&graph)).schedule(&run_inputs);
        prop_assert!(first_schedule.is_ok(), "{:?}", first_schedule.err());
        if ortrain_ops::passes::decompose::standardise(&mut graph).is_ok() {
            let second_schedule = Specialiser::new(graph.clone(), roles(&graph)).schedule(&run_inputs);
            prop_assert!(second_schedule.is_ok(), "{:?}", second_schedule.err());
        }
    }
}
