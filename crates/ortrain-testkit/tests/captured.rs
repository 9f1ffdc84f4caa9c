//! Every operator in a branch and in a loop body, with all inputs captured from the outer graph.
//!
//! Gradient rules need axes, pads, ranks and constant values. All of these must be known there as in the main
//! graph, so that models with subgraphs can be trained.

use std::sync::Arc;

use ortrain_graph::Tensor;
use ortrain_program::Reference;
use ortrain_testkit::suites::captured::{RANDOM, in_branch, in_scan_body};
use ortrain_testkit::{Case, cases, gradient_graph, run};

/// Computes the gradients of a case's inputs.
fn gradients(case: &Case) -> Result<Vec<Tensor>, String> {
    let graph = gradient_graph(case)?;
    Ok(run(&graph, &case.inputs, Arc::new(Reference))?.split_off(1))
}

/// Compares the gradients of all cases, except for some operators, with the gradients after their nodes are
/// moved to a subgraph.
#[track_caller]
fn check(wrap: impl Fn(&Case) -> Case, leave_out: &[&str]) {
    let mut failures = Vec::new();
    let mut compared = 0;
    for case in cases().into_iter().filter(|case| !leave_out.contains(&&*case.operator)) {
        let at = |message: String| format!("{} ({}): {message}", case.operator, case.name);
        let expected = gradients(&case).expect("the main graph has gradients");
        match gradients(&wrap(&case)) {
            Ok(actual) => {
                let numbers = |tensors: &[Tensor]| tensors.iter().map(Tensor::to_f64).collect::<Vec<_>>();
                let (actual, expected) = (numbers(&actual), numbers(&expected));
                let same = |(a, b): (&f64, &f64)| a == b || a.is_nan() && b.is_nan();
                compared += actual.len();
                if actual.len() != expected.len()
                    || actual.iter().flatten().count() != expected.iter().flatten().count()
                    || !actual.iter().flatten().zip(expected.iter().flatten()).all(same)
                {
                    failures.push(at(format!("{actual:?} instead of {expected:?}")));
                }
            }
            Err(error) => failures.push(at(error)),
        }
    }
    assert!(failures.is_empty(), "{} cases fail:\n{}", failures.len(), failures.join("\n"));
    assert!(compared > 300, "{compared}");
}

#[test]
fn a_branch_has_the_gradients_of_the_main_graph() {
    check(in_branch, &[]);
}

#[test]
fn a_body_has_the_gradients_of_the_main_graph() {
    check(in_scan_body, &RANDOM);
}
