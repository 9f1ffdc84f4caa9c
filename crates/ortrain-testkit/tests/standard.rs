//! Every operator that the differentiation emits has a decomposition into plain ONNX that computes the same.

use std::sync::Arc;

use ortrain_program::Reference;
use ortrain_testkit::{cases, gradient_graph, run, tolerance};

#[test]
fn gradients_in_plain_onnx_are_the_same() {
    let mut failures = Vec::new();
    for case in cases() {
        let label = format!("{} ({})", case.operator, case.name);
        let graph = gradient_graph(&case).expect("the case can be differentiated");
        let mut plain = graph.clone();
        if let Err(error) = ortrain_ops::passes::decompose::standardise(&mut plain) {
            failures.push(format!("{label}: {error}"));
            continue;
        }
        assert!(plain.nodes.iter().all(|node| node.domain.is_empty()), "{label}");
        let expected = run(&graph, &case.inputs, Arc::new(Reference)).expect("the gradient graph runs");
        match run(&plain, &case.inputs, Arc::new(Reference)) {
            Err(error) => failures.push(format!("{label}: {error}")),
            Ok(found) => {
                for (k, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    let scale = expected.to_f64().iter().fold(1e-6f64, |scale, v| scale.max(v.abs()));
                    let near = |(a, b): (&f64, &f64)| {
                        (a - b).abs() <= tolerance::FLOAT32 * scale || a.is_nan() && b.is_nan()
                    };
                    let same = found.dims() == expected.dims()
                        && found.to_f64().iter().zip(&expected.to_f64()).all(near);
                    if !same {
                        failures.push(format!("{label}: output {k} is {found:?}, not {expected:?}"));
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{} cases fail:\n{}", failures.len(), failures.join("\n"));
}

/// Shapes that are computed from shapes are numbers when a program is made: nothing is left of Shape, Gather, Concat.
#[test]
fn shape_computations_disappear() {
    let case = cases().into_iter().find(|case| case.name == "to a shape computed from the input's");
    let case = case.expect("the case is in the list");
    assert!(case.graph.nodes.len() >= 4, "the graph computes a shape");
    let roles = vec![ortrain_ops::Role::User; case.graph.inputs.len()];
    let schedule =
        ortrain_ops::Specialiser::new(case.graph, roles).schedule(&case.inputs).expect("it is made");
    let program = schedule.single().expect("one program");
    assert!(program.instructions.is_empty(), "{program}");
}
