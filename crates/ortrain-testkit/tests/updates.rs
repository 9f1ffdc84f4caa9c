//! Buffers that are updated in place: every read sees the value that the graph defines, forward and backward.
//!
//! A scatter copies its data and adds to the copy; so do the gradients of `TopK` and `Gather`. Fusion may
//! move readers of the data and of the result, but never past the update.

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
        let mut alone: Graph = graph.clone();
        (alone.inputs, alone.nodes) = (Vec::new(), vec![node.clone()]);
        alone.outputs = node.present_outputs().collect();
        let mut given = Vec::new();
        for id in node.present_inputs().filter(|id| graph.value(*id).content().is_none()) {
            if !alone.inputs.contains(&id) {
                let tensor = values[id.0 as usize].clone().unwrap();
                alone.value_mut(id).ty = ortrain_graph::ValueType::tensor(tensor.dtype(), tensor.dims());
                alone.inputs.push(id);
                given.push(tensor);
            }
        }
        let made = run(&alone, &given, Arc::new(Reference)).unwrap();
        for (id, tensor) in alone.outputs.iter().zip(made) {
            values[id.0 as usize] = Some(tensor);
        }
    }
    graph.outputs.iter().map(|id| values[id.0 as usize].clone().unwrap()).collect()
}

/// Nodes after an update, with the old and the new value as inputs.
type Readers = fn(&mut CaseBuilder, ValueId, ValueId) -> Vec<ValueId>;

const READERS: [(&str, Readers); 4] = [
    ("the product of both", |b, d, s| vec![b.node("Mul", &[s, d], Attrs::new())]),
    ("the product of both, and the result", |b, d, s| {
        vec![b.node("Mul", &[s, d], Attrs::new()), b.node("Neg", &[s], Attrs::new())]
    }),
    ("both, and the sum of both", |b, d, s| vec![d, s, b.node("Add", &[d, s], Attrs::new())]),
    ("functions of both, and of these", |b, d, s| {
        let (one, other) = (b.node("Sigmoid", &[d], Attrs::new()), b.node("Tanh", &[s], Attrs::new()));
        vec![b.node("Mul", &[one, other], Attrs::new()), b.node("Sub", &[other, d], Attrs::new())]
    }),
];

/// Returns scatters of some kinds, on data that an element-wise operator computes.
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

/// Returns values with a selection, where the gradient is added at some rows, and with other readers.
fn parts_beside_others() -> Vec<Case> {
    let beside: [(&str, &[&str]); 4] =
        [("PRelu", &["PRelu"]), ("Log", &["Log"]), ("Sinh and Relu", &["Sinh", "Relu"]), ("Exp", &["Exp"])];
    let mut cases = Vec::new();
    for (name, others) in beside {
        for taken in ["TopK", "Gather", "GatherElements", "GatherND"] {
            let mut b = CaseBuilder::new(taken, &format!("beside {name}"));
            let x = b.float(&[4, 5], &Fill::Positive);
            let t = b.node("Softplus", &[x], Attrs::new());
            let mut outputs = Vec::new();
            for &other in others {
                let inputs = if other == "PRelu" { vec![t, t] } else { vec![t] };
                outputs.push(b.node(other, &inputs, Attrs::new()));
            }
            let part = match taken {
                "TopK" => {
                    let k = b.ints(&[2]);
                    b.node_with("", "TopK", &[Some(t), Some(k)], 2, Attrs::new())[0]
                }
                "GatherElements" => {
                    let index = b.constant(Tensor::i64(&[2, 5], &[0, 3, 1, 2, 0, 3, 1, 1, 0, 2]));
                    b.node(taken, &[t, index], Attrs::new())
                }
                _ => {
                    let index = b.constant(Tensor::i64(&[3, 1], &[2, 0, 2]));
                    b.node(taken, &[t, index], Attrs::new())
                }
            };
            outputs.insert(0, part);
            cases.push(b.outputs(&outputs));
        }
    }
    cases
}

fn assert_close(got: &[Tensor], want: &[Tensor], case: &Case) {
    assert_eq!(got.len(), want.len());
    for (k, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(got.dims(), want.dims());
        assert_eq!(got.dtype(), DType::F32);
        for (x, y) in got.to_f64().iter().zip(want.to_f64()) {
            let close = (x - y).abs() <= tolerance::FLOAT32 * y.abs().max(1.0);
            assert!(close, "{} ({}), output {k}: {x} is not {y}", case.operator, case.name);
        }
    }
}

#[test]
fn values_are_read_as_the_graph_says() {
    let cpu: Arc<dyn Backend> = Arc::new(ortrain_cpu::Cpu::new().unwrap());
    for case in scatters().into_iter().chain(parts_beside_others()) {
        let want = node_by_node(&case);
        for backend in [Arc::new(Reference) as Arc<dyn Backend>, cpu.clone()] {
            assert_close(&run(&case.graph, &case.inputs, backend).unwrap(), &want, &case);
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
    // The test covered some points.
    assert!(points > 500, "{points} points");
}
