//! Buffers that are updated in place: every read sees the value that the graph defines, forward and backward.
//!
//! A scatter copies its data and updates the copy in place. The gradients of `TopK` and `Gather` do the same.
//! Fusion may move readers of the data and of the result, but never past the update.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

use std::sync::Arc;

use ortrain_graph::{Attrs, DType, Graph, Tensor, ValueId};
use ortrain_program::{Backend, Reference};
use ortrain_testkit::{Case, CaseBuilder, Fill, check_backend, check_gradient, run, tolerance};

/// Computes the outputs of a case node by node, each in a separate program.
fn node_by_node(case: &Case) -> Vec<Tensor> {
    let graph = &case.graph;
    let mut values: Vec<Option<Tensor>> = vec![None; graph.value_count()];
    for (id, tensor) in graph.inputs.iter().zip(&case.inputs) {
        values[id.0 as usize] = Some(tensor.clone());
    }
    for node in &graph.nodes {
        let mut single_node: Graph = graph.clone();
        (single_node.inputs, single_node.nodes) = (Vec::new(), vec![node.clone()]);
        single_node.outputs = node.present_outputs().collect();
        let mut node_inputs = Vec::new();
        for id in node.present_inputs().filter(|id| graph.value(*id).content().is_none()) {
            if !single_node.inputs.contains(&id) {
                let tensor = values[id.0 as usize].clone().unwrap();
                single_node.value_mut(id).ty =
                    ortrain_graph::ValueType::tensor(tensor.dtype(), tensor.dims());
                single_node.inputs.push(id);
                node_inputs.push(tensor);
            }
        }
        let outputs = run(&single_node, &node_inputs, Arc::new(Reference)).unwrap();
        for (id, tensor) in single_node.outputs.iter().zip(outputs) {
            values[id.0 as usize] = Some(tensor);
        }
    }
    graph.outputs.iter().map(|id| values[id.0 as usize].clone().unwrap()).collect()
}

/// Function that adds nodes after an update. The nodes read the values before and after the update.
type Readers = fn(&mut CaseBuilder, ValueId, ValueId) -> Vec<ValueId>;

const READERS: [(&str, Readers); 4] = [
    ("the product of both", |b, d, s| vec![b.node("Mul", &[s, d], Attrs::new())]),
    ("the product of both, and the result", |b, d, s| {
        vec![b.node("Mul", &[s, d], Attrs::new()), b.node("Neg", &[s], Attrs::new())]
    }),
    ("both, and the sum of both", |b, d, s| vec![d, s, b.node("Add", &[d, s], Attrs::new())]),
    ("functions of both, and of these", |b, d, s| {
        let (first, other) = (b.node("Sigmoid", &[d], Attrs::new()), b.node("Tanh", &[s], Attrs::new()));
        vec![b.node("Mul", &[first, other], Attrs::new()), b.node("Sub", &[other, d], Attrs::new())]
    }),
];

/// Returns cases of scatters for each reduction and each set of readers. An element-wise operator computes the data.
fn scatters() -> Vec<Case> {
    let mut cases = Vec::new();
    for reduction in ["none", "add", "mul"] {
        for (readers, read) in READERS {
            for by_element in [false, true] {
                let operator = if by_element { "ScatterElements" } else { "ScatterND" };
                let mut b = CaseBuilder::new(operator, &format!("{reduction}, {readers}"));
                let x = b.float(&[4, 3], &Fill::Signed);
                let updates = b.float(&[2, 3], &Fill::Signed);
                let d = b.node("Sigmoid", &[x], Attrs::new());
                let index = if by_element {
                    Tensor::i64(&[2, 3], &[0, 3, 1, 2, 0, 3])
                } else {
                    Tensor::i64(&[2, 1], &[3, 1])
                };
                let index = b.constant(index);
                let attrs = Attrs::new().with("reduction", reduction);
                let s = b.node(operator, &[d, index, updates], attrs);
                let outputs = read(&mut b, d, s);
                cases.push(b.outputs(&outputs));
            }
        }
    }
    cases
}

/// Returns cases in which a value has a selection (`TopK` or a gather) and element-wise operators as readers. The
/// gradient of the selection is added to some elements of the value's gradient.
fn parts_beside_others() -> Vec<Case> {
    let neighbors: [(&str, &[&str]); 4] =
        [("PRelu", &["PRelu"]), ("Log", &["Log"]), ("Sinh and Relu", &["Sinh", "Relu"]), ("Exp", &["Exp"])];
    let mut cases = Vec::new();
    for (name, others) in neighbors {
        for op in ["TopK", "Gather", "GatherElements", "GatherND"] {
            let mut b = CaseBuilder::new(op, &format!("beside {name}"));
            let x = b.float(&[4, 5], &Fill::Positive);
            let t = b.node("Softplus", &[x], Attrs::new());
            let mut outputs = Vec::new();
            for &other in others {
                let inputs = if other == "PRelu" { vec![t, t] } else { vec![t] };
                outputs.push(b.node(other, &inputs, Attrs::new()));
            }
            let part = match op {
                "TopK" => {
                    let k = b.ints(&[2]);
                    b.node_with("", "TopK", &[Some(t), Some(k)], 2, Attrs::new())[0]
                }
                "GatherElements" => {
                    let index = b.constant(Tensor::i64(&[2, 5], &[0, 3, 1, 2, 0, 3, 1, 1, 0, 2]));
                    b.node(op, &[t, index], Attrs::new())
                }
                _ => {
                    let index = b.constant(Tensor::i64(&[3, 1], &[2, 0, 2]));
                    b.node(op, &[t, index], Attrs::new())
                }
            };
            outputs.insert(0, part);
            cases.push(b.outputs(&outputs));
        }
    }
    cases
}

fn assert_close(got: &[Tensor], expected: &[Tensor], case: &Case) {
    assert_eq!(got.len(), expected.len());
    for (k, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!(got.dims(), expected.dims());
        assert_eq!(got.dtype(), DType::F32);
        for (x, y) in got.to_f64().iter().zip(expected.to_f64()) {
            let close = (x - y).abs() <= tolerance::FLOAT32 * y.abs().max(1.0);
            assert!(close, "{} ({}), output {k}: {x} is not {y}", case.operator, case.name);
        }
    }
}

#[test]
fn updated_values_equal_the_graph() {
    let cpu: Arc<dyn Backend> = Arc::new(ortrain_cpu::Cpu::new().unwrap());
    for case in scatters().into_iter().chain(parts_beside_others()) {
        let expected = node_by_node(&case);
        for backend in [Arc::new(Reference) as Arc<dyn Backend>, cpu.clone()] {
            assert_close(&run(&case.graph, &case.inputs, backend).unwrap(), &expected, &case);
        }
    }
}

#[test]
fn gradients_go_through_every_reader() {
    let cpu: Arc<dyn Backend> = Arc::new(ortrain_cpu::Cpu::new().unwrap());
    let mut points = 0;
    for case in scatters().into_iter().chain(parts_beside_others()) {
        points += check_gradient(&case).unwrap();
        check_backend(&case, &cpu, true).unwrap();
    }
    // The check compared enough points.
    assert!(points > 500, "{points} points");
}
