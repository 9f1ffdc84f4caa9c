//! Every operator in a branch and in a loop body, with all inputs captured from the outer graph.

use std::sync::Arc;

use ortrain_graph::{Attrs, DType, Graph, Node, Tensor, ValueId, ValueType};
use ortrain_program::Backend;

use super::Report;
use crate::{Case, cases, gradient_graph, run, tolerance};

/// Operators that draw other random numbers in a body than in the main graph.
pub const RANDOM: [&str; 1] = ["Dropout"];

/// Splits a case into an outer graph of its inputs and constants, and a subgraph of its nodes that captures
/// them.
fn split_subgraph(case: &Case) -> (Graph, Graph, Vec<ValueId>) {
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

/// Wraps the nodes of a case in an operator, which has a new first input.
fn wrap_nodes(case: &Case, op: &str, input: &Tensor, attrs: impl FnOnce(Graph, ValueType) -> Attrs) -> Case {
    let (mut graph, inside, captured) = split_subgraph(case);
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

/// Returns the case with its nodes in both branches of an If.
#[must_use]
pub fn in_branch(case: &Case) -> Case {
    let holds = Tensor::filled(DType::Bool, &[], 1.0);
    wrap_nodes(case, "If", &holds, |branch, _| {
        Attrs::new().with("then_branch", branch.clone()).with("else_branch", branch)
    })
}

/// Returns the case with its nodes in the only iteration of a Scan. Its results have an additional axis.
#[must_use]
pub fn in_scan_body(case: &Case) -> Case {
    wrap_nodes(case, "Scan", &Tensor::i64(&[1], &[0]), |mut body, slice| {
        let slice = body.add_value("slice", slice);
        body.inputs.insert(0, slice);
        Attrs::new().with("num_scan_inputs", 1i64).with("body", body)
    })
}

/// Computes the gradients of a case on a backend.
fn gradients(case: &Case, backend: &Arc<dyn Backend>) -> Result<Vec<f64>, String> {
    let graph = gradient_graph(case)?;
    let results = run(&graph, &case.inputs, backend.clone())?;
    Ok(results[1..].iter().flat_map(Tensor::to_f64).collect())
}

/// Compares the gradients of every case in a branch and in a body with the gradients in the main graph.
#[must_use]
pub fn agree(backend: &Arc<dyn Backend>) -> Report {
    let check = |case: &Case, wrapped: &Case| {
        let (expected, actual) = (gradients(case, backend)?, gradients(wrapped, backend)?);
        let largest =
            expected.iter().filter(|x| x.is_finite()).fold(1e-3f64, |maximum, x| maximum.max(x.abs()));
        let is_close = |(a, b): (&f64, &f64)| {
            a == b || a.is_nan() && b.is_nan() || (a - b).abs() <= tolerance::FLOAT32 * largest
        };
        match expected.len() == actual.len() && expected.iter().zip(&actual).all(is_close) {
            true => Ok(()),
            false => Err(format!("{} ({}): {actual:?} instead of {expected:?}", case.operator, wrapped.name)),
        }
    };
    let outcomes = cases().into_iter().flat_map(|case| {
        let body = (!RANDOM.contains(&&*case.operator)).then(|| in_scan_body(&case));
        [Some(in_branch(&case)), body].map(|wrapped| wrapped.map(|wrapped| check(&case, &wrapped)))
    });
    outcomes.flatten().collect()
}
