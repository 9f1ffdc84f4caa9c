//! Every operator that differentiation emits has an equivalent decomposition into plain ONNX.

use ortrain_testkit::{cases, check_standard};

#[test]
fn gradients_in_plain_onnx_are_the_same() {
    let failures: Vec<String> = cases().iter().filter_map(|case| check_standard(case).err()).collect();
    assert!(failures.is_empty(), "{} cases fail:\n{}", failures.len(), failures.join("\n"));
}

/// Shape computations are folded when a program is compiled: no Shape, Gather or Concat remains.
#[test]
fn shape_computations_disappear() {
    let case = cases().into_iter().find(|case| case.name == "to a shape computed from the input's");
    let case = case.expect("the case is in the list");
    assert!(case.graph.nodes.len() >= 4, "the graph computes a shape");
    let roles = vec![ortrain_ops::Role::User; case.graph.inputs.len()];
    let schedule =
        ortrain_ops::Specialiser::new(case.graph, roles).schedule(&case.inputs).expect("it is made");
    let program = schedule.single_program().expect("one program");
    assert!(program.instructions.is_empty(), "{program}");
}
