//! Every operator that the differentiation emits has a decomposition into plain ONNX that computes the same.

use ortrain_testkit::{cases, check_standard};

#[test]
fn gradients_in_plain_onnx_are_the_same() {
    let failures: Vec<String> = cases().iter().filter_map(|case| check_standard(case).err()).collect();
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
