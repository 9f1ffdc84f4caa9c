//! Loops with unrolled iterations, and the same loops run one iteration after the other.

use std::sync::Arc;

use ortrain_graph::{Attrs, DType, Graph, Node, Tensor, ValueId, ValueType};
use ortrain_ops::passes::differentiate::backpropagate;
use ortrain_ops::passes::infer::infer;
use ortrain_ops::{Role, Specialiser};
use ortrain_program::{
    Backend, Bindings, GradientMode, InputView, RunContext, Scalars, ScheduleExecutor, Workspace,
};

use super::Report;

const STEPS: usize = 9;
const ROWS: usize = 5;
const WIDTH: usize = 33;

fn numbers(dims: &[usize], seed: f32) -> Tensor {
    let count = dims.iter().product::<usize>();
    let elements: Vec<f32> = (0..count).map(|k| (seed + k as f32 * 2.399_963).sin()).collect();
    Tensor::f32(dims, &elements)
}

fn push(graph: &mut Graph, op: &str, name: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId {
    let output = graph.add_value(name, ValueType::Unknown);
    let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
    graph.nodes.push(Node::new("", op, &inputs, &[Some(output)], attrs));
    output
}

/// Builds `h = drop(tanh(x w + h r)) * sigmoid(x w)`, and gradients of all inputs.
fn cell(inputs: &[Tensor]) -> Graph {
    let mut body = Graph::new("body");
    let ids: Vec<ValueId> =
        ["h", "x", "w", "r"].iter().map(|name| body.add_value(name, ValueType::Unknown)).collect();
    body.inputs.clone_from(&ids);
    let none = Attrs::new;
    let xw = push(&mut body, "MatMul", "xw", &[ids[1], ids[2]], none());
    let hr = push(&mut body, "MatMul", "hr", &[ids[0], ids[3]], none());
    let sum = push(&mut body, "Add", "sum", &[xw, hr], none());
    let tanh = push(&mut body, "Tanh", "tanh", &[sum], none());
    let ratio = body.add_constant("ratio", Tensor::f32(&[], &[0.25]));
    let training = body.add_constant("training", Tensor::filled(DType::Bool, &[], 1.0));
    let dropped = push(&mut body, "Dropout", "kept", &[tanh, ratio, training], none());
    let gate = push(&mut body, "Sigmoid", "gate", &[xw], none());
    let next = push(&mut body, "Mul", "next", &[dropped, gate], none());
    let out = push(&mut body, "Identity", "out", &[next], none());
    body.outputs = vec![next, out];

    let mut graph = Graph::new("test");
    graph.opsets.insert(String::new(), ortrain_ops::NEWEST_OPSET);
    for (name, tensor) in ["h0", "xs", "w0", "r0"].iter().zip(inputs) {
        let id = graph.add_value(name, ValueType::tensor(tensor.dtype(), tensor.dims()));
        graph.inputs.push(id);
    }
    let outputs: Vec<ValueId> =
        ["last", "all"].iter().map(|name| graph.add_value(name, ValueType::Unknown)).collect();
    let ports = |ids: &[ValueId]| ids.iter().copied().map(Some).collect::<Vec<_>>();
    let attrs = Attrs::new().with("num_scan_inputs", 1i64).with("body", body);
    let mut scan = Node::new("", "Scan", &ports(&graph.inputs), &ports(&outputs), attrs);
    scan.captures = 2;
    graph.nodes.push(scan);
    graph.outputs.clone_from(&outputs);
    infer(&mut graph).expect("valid");
    let seed = graph.add_constant("seed", numbers(&[STEPS, ROWS, WIDTH], 7.0));
    let targets = graph.inputs.clone();
    let gradients = backpropagate(&mut graph, &[(outputs[1], seed)], &targets).expect("it has gradients");
    graph.outputs.extend(gradients.into_iter().flatten());
    graph
}

/// Returns the number of segments of a schedule that unrolls loops of up to `nodes` nodes, and its results.
fn run(
    graph: &Graph,
    inputs: &[Tensor],
    backend: &Arc<dyn Backend>,
    nodes: usize,
) -> Result<(usize, Vec<Vec<u8>>), String> {
    let specialiser = Specialiser::new(graph.clone(), vec![Role::User; inputs.len()]).unrolled_nodes(nodes);
    let schedule = specialiser.schedule(inputs).map_err(|error| error.to_string())?;
    let segments = schedule.segments.len();
    let mut work = Workspace::new(backend.clone());
    let runner = ScheduleExecutor::new(backend.clone(), schedule.schedule().clone())
        .map_err(|error| error.to_string())?;
    let run_inputs: Vec<InputView<'_>> = inputs.iter().map(InputView::from).collect();
    let mut results = vec![Vec::new(); graph.outputs.len()];
    let (bindings, scalars) = (Bindings { planes: &[] }, Scalars { seed: 3, train_step: 1 });
    runner
        .run(
            RunContext::new(&bindings, &mut work, GradientMode::Overwrite, scalars),
            &run_inputs,
            &mut |k, value| {
                results[k] = value.to_tensor()?.data().to_vec();
                Ok(())
            },
        )
        .map_err(|error| error.to_string())?;
    Ok((segments, results))
}

/// Checks a Scan with random numbers, forward and backward: it is bit-identical with and without unrolling.
#[must_use]
pub fn agree(backend: &Arc<dyn Backend>) -> Report {
    let inputs = [
        numbers(&[ROWS, WIDTH], 1.0),
        numbers(&[STEPS, ROWS, 7], 2.0),
        numbers(&[7, WIDTH], 3.0),
        numbers(&[WIDTH, WIDTH], 4.0),
    ];
    let graph = cell(&inputs);
    let check = || {
        let (unrolled_segments, results) = run(&graph, &inputs, backend, 10_000)?;
        let (many_segments, others) = run(&graph, &inputs, backend, 0)?;
        if unrolled_segments != 1 || many_segments <= 2 {
            return Err(format!("{unrolled_segments} and {many_segments} segments"));
        }
        if results.len() == 6 && results == others { Ok(()) } else { Err("other bits".to_owned()) }
    };
    [check()].into_iter().collect()
}
