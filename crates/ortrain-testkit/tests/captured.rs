//! Every operator in a branch and in the body of a loop, with all that it reads captured from outside.
//!
//! What a rule of a gradient asks for (axes, pads, ranks, the elements of a constant) is known there as it is in the main
//! graph, so that a model can be trained wherever its nodes stand.

use std::sync::Arc;

use ortrain_graph::{Attrs, DType, Graph, Node, Tensor, ValueId, ValueType};
use ortrain_program::Reference;
use ortrain_testkit::{Case, cases, gradient_graph, run};

/// Operators that draw other random numbers in a body than in the main graph.
const RANDOM: [&str; 1] = ["Dropout"];

/// The nodes of a case as a subgraph, and a graph of its inputs and constants, which the subgraph captures.
fn outside_and_inside(case: &Case) -> (Graph, Graph, Vec<ValueId>) {
    let mut inside = case.graph.clone();
    let mut outside = Graph::new(&case.name);
    outside.opsets.clone_from(&case.graph.opsets);
    let constants: Vec<ValueId> =
        inside.value_ids().filter(|&id| inside.value(id).constant.is_some()).collect();
    inside.inputs.extend(&constants);
    let mut captured = Vec::new();
    for &id in &inside.inputs.clone() {
        let value = inside.value_mut(id);
        captured.push(match value.constant.take() {
            Some(tensor) => outside.add_constant(&value.name, tensor),
            None => {
                let input = outside.add_value(&value.name, value.ty.clone());
                outside.inputs.push(input);
                input
            }
        });
    }
    (outside, inside, captured)
}

/// The case with an operator around its nodes, which reads an input of its own, put in front of the others.
fn around(case: &Case, op: &str, input: &Tensor, attrs: impl FnOnce(Graph, ValueType) -> Attrs) -> Case {
    let (mut graph, inside, captured) = outside_and_inside(case);
    let count = inside.outputs.len();
    let ty = ValueType::tensor(input.dtype(), &input.dims()[input.dims().len().min(1)..]);
    let attrs = attrs(inside, ty);
    let first = graph.add_value("first", ValueType::tensor(input.dtype(), input.dims()));
    graph.inputs.insert(0, first);
    let ports: Vec<Option<ValueId>> =
        std::iter::once(first).chain(captured.iter().copied()).map(Some).collect();
    graph.outputs = (0..count).map(|k| graph.add_value(&format!("out{k}"), ValueType::Unknown)).collect();
    let outputs: Vec<Option<ValueId>> = graph.outputs.iter().copied().map(Some).collect();
    let mut node = Node::new("", op, &ports, &outputs, attrs);
    node.captures = captured.len();
    graph.nodes.push(node);
    let inputs = std::iter::once(input.clone()).chain(case.inputs.iter().cloned()).collect();
    Case { operator: case.operator.clone(), name: format!("{} in {op}", case.name), graph, inputs }
}

fn in_a_branch(case: &Case) -> Case {
    let holds = Tensor::filled(DType::Bool, &[], 1.0);
    around(case, "If", &holds, |branch, _| {
        Attrs::new().with("then_branch", branch.clone()).with("else_branch", branch)
    })
}

/// In the only iteration of a Scan, whose results have one axis more.
fn in_a_body(case: &Case) -> Case {
    around(case, "Scan", &Tensor::i64(&[1], &[0]), |mut body, slice| {
        let slice = body.add_value("slice", slice);
        body.inputs.insert(0, slice);
        Attrs::new().with("num_scan_inputs", 1i64).with("body", body)
    })
}

/// The gradients of a case's inputs.
fn gradients(case: &Case) -> Result<Vec<Tensor>, String> {
    let graph = gradient_graph(case)?;
    Ok(run(&graph, &case.inputs, Arc::new(Reference))?.split_off(1))
}

/// Compares the gradients of all cases but those of some operators with what they are when their nodes are in a subgraph.
#[track_caller]
fn check(wrap: impl Fn(&Case) -> Case, leave_out: &[&str]) {
    let mut failures = Vec::new();
    let mut compared = 0;
    for case in cases().into_iter().filter(|case| !leave_out.contains(&&*case.operator)) {
        let at = |message: String| format!("{} ({}): {message}", case.operator, case.name);
        let want = gradients(&case).expect("the main graph has gradients");
        match gradients(&wrap(&case)) {
            Ok(found) => {
                let numbers = |tensors: &[Tensor]| tensors.iter().map(Tensor::to_f64).collect::<Vec<_>>();
                let (found, want) = (numbers(&found), numbers(&want));
                let same = |(a, b): (&f64, &f64)| a == b || a.is_nan() && b.is_nan();
                compared += found.len();
                if found.len() != want.len()
                    || found.iter().flatten().count() != want.iter().flatten().count()
                    || !found.iter().flatten().zip(want.iter().flatten()).all(same)
                {
                    failures.push(at(format!("{found:?} instead of {want:?}")));
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
    check(in_a_branch, &[]);
}

#[test]
fn a_body_has_the_gradients_of_the_main_graph() {
    check(in_a_body, &RANDOM);
}
