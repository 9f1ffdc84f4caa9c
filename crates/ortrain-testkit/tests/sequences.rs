//! Reversed sequences that are only partly used.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

mod common;

use std::sync::Arc;

use common::every_level;
use ortrain_graph::{Graph, ValueId};
use ortrain_program::Reference;
use ortrain_testkit::suites::sequences::{self, LENGTHS, PARTS, recurrent_cases, reversed_slice};
use ortrain_testkit::{Case, check_gradient, gradient_graph, run, tolerance};

/// Returns the same graph with every value as an output: no value can be omitted or fused.
fn with_all_outputs(graph: &Graph) -> Graph {
    let mut graph = graph.clone();
    let values: Vec<ValueId> = graph.nodes.iter().flat_map(ortrain_graph::Node::present_outputs).collect();
    let more: Vec<ValueId> = values.into_iter().filter(|id| !graph.outputs.contains(id)).collect();
    graph.outputs.extend(more);
    graph
}

/// Checks that results are the same with every value as an output, forward and backward.
fn check_with_all_outputs(case: &Case) {
    let reference = || Arc::new(Reference) as Arc<dyn ortrain_program::Backend>;
    for graph in [case.graph.clone(), gradient_graph(case).unwrap()] {
        let got = run(&graph, &case.inputs, reference()).unwrap();
        let expected = run(&with_all_outputs(&graph), &case.inputs, reference()).unwrap();
        for (k, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let (got, expected) = (got.to_f64(), expected.to_f64());
            let scale = expected.iter().fold(1e-3f64, |scale, value| scale.max(value.abs()));
            let is_close =
                got.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= tolerance::FLOAT32 * scale);
            assert!(is_close, "{} ({}): result {k} is {got:?}, not {expected:?}", case.operator, case.name);
        }
    }
}

#[test]
fn parts_along_every_axis() {
    for lengths in LENGTHS {
        for (time_axis, sliced, part) in [
            (0, 0, PARTS[0]),
            (0, 0, PARTS[3]),
            (0, 1, (1, 2, 1)),
            (0, 2, (1, 2, 1)),
            (1, 1, PARTS[0]),
            (1, 0, (1, 3, 1)),
            (1, 2, (0, 1, 1)),
        ] {
            let case = reversed_slice(lengths, part, time_axis, sliced);
            check_with_all_outputs(&case);
            check_gradient(&case).unwrap();
        }
    }
}

#[test]
fn recurrent_layers_with_lengths() {
    for case in recurrent_cases() {
        check_with_all_outputs(&case);
        check_gradient(&case).unwrap();
    }
}

#[test]
fn backends_agree() {
    for backend in every_level().into_iter().chain([Arc::new(Reference) as _]) {
        sequences::agree(&backend).passes();
    }
}
