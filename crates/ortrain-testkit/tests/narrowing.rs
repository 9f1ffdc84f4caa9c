//! Computation is narrowed to the used part of a result.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

mod common;

use std::sync::Arc;

use common::every_level;
use ortrain_graph::{Graph, Tensor, ValueId};
use ortrain_program::{GradientMode, Instruction, Precision, Program, Reference};
use ortrain_testkit::suites::narrowing::{BATCH, Config, INNER, Selection, TOKENS, agree, configs};
use ortrain_testkit::{
    check_gradient, check_second_order, compile_with_precision, gradient_graph, run, tolerance,
};

/// Returns true if the layer before the selection is computed for a few tokens only.
fn computes_selected_tokens(selection: &Selection) -> bool {
    !matches!(selection, Selection::All | Selection::Slice(0, 6))
}

fn program(graph: Graph, inputs: &[Tensor]) -> Arc<Program> {
    compile_with_precision(graph, inputs, Precision::F32).unwrap()
}

/// Returns the floating-point operations of a case, forward and backward.
fn flops(config: &Config) -> [u64; 2] {
    let case = config.case();
    let programs =
        [program(case.graph.clone(), &case.inputs), program(gradient_graph(&case).unwrap(), &case.inputs)];
    programs.map(|program| program.cost(GradientMode::Accumulate).flops)
}

#[test]
fn layer_is_computed_for_selection_only() {
    let full_flops = flops(&Config { selection: Selection::All, dropped: true });
    for config in configs().into_iter().filter(|config| config.selection != Selection::All && config.dropped)
    {
        let some = flops(&config);
        // Gradients of rows that are selected twice are row sums: their zeros are not known.
        let passes = if config.selection == Selection::Some(vec![1, 1]) { 1 } else { 2 };
        for (some, full) in some.into_iter().zip(full_flops).take(passes) {
            // Keys and values are computed for all tokens: at most a third of the products' operations.
            let is_less_than_half = some * 2 < full;
            assert_eq!(
                is_less_than_half,
                computes_selected_tokens(&config.selection),
                "{config:?}: {some} of {full}"
            );
        }
    }
}

/// Attention remains a single instruction, for the required queries only, and no buffer holds other tokens.
#[test]
fn attention_keeps_required_queries_only() {
    let small_cases = [(Selection::One(0), 1), (Selection::One(-1), 1), (Selection::Slice(4, 7), 3)];
    for ((selection, expected_queries), dropped) in
        small_cases.into_iter().flat_map(|small| [(small.clone(), false), (small, true)])
    {
        let config = Config { selection, dropped };
        let case = config.case();
        let backward = program(gradient_graph(&case).unwrap(), &case.inputs);
        let queries: Vec<usize> = backward
            .instructions
            .iter()
            .filter_map(|i| match &i.instruction {
                Instruction::Attention(a) => Some(a.queries),
                _ => None,
            })
            .collect();
        assert_eq!(queries, [expected_queries; 2], "{config:?}\n{backward}");
        let inner = backward
            .instructions
            .iter()
            .flat_map(|i| i.instruction.writes())
            .map(|id| backward.buffer(id).len);
        assert_eq!(inner.filter(|&len| len == BATCH * TOKENS * INNER).count(), 0, "{config:?}\n{backward}");
    }
}

/// Gradients in float64 agree with central differences.
#[test]
fn gradients_are_those_of_differences() {
    for selection in [Selection::One(-1), Selection::Some(vec![2, 3, 4]), Selection::Sentence(1)] {
        check_gradient(&Config { selection, dropped: true }.case()).unwrap();
    }
    check_second_order(&Config { selection: Selection::One(0), dropped: false }.case()).unwrap();
}

/// Every kernel level agrees with the reference evaluator, forward and backward.
#[test]
fn backends_agree() {
    every_level().iter().for_each(|backend| agree(backend).passes());
}

/// Results equal the results of the same graph with every value as an output.
#[test]
fn results_are_unchanged() {
    for config in configs() {
        let case = config.case();
        let mut graph = gradient_graph(&case).unwrap();
        let reference = || Arc::new(Reference) as Arc<dyn ortrain_program::Backend>;
        let got = run(&graph, &case.inputs, reference()).unwrap();
        let values: Vec<ValueId> =
            graph.nodes.iter().flat_map(|node| node.outputs.iter().flatten().copied()).collect();
        for id in values {
            if !graph.outputs.contains(&id) {
                graph.outputs.push(id);
            }
        }
        let expected = run(&graph, &case.inputs, reference()).unwrap();
        for (k, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let (got, expected) = (got.to_f64(), expected.to_f64());
            let scale = expected.iter().fold(1e-3f64, |scale, value| scale.max(value.abs()));
            for (got, expected) in got.iter().zip(&expected) {
                assert!(
                    (got - expected).abs() <= tolerance::FLOAT32 * scale,
                    "{config:?}: result {k}: {got}, not {expected}"
                );
            }
        }
    }
}
