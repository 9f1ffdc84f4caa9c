//! Helpers for the tests of operator families: graphs of a few nodes, run by the reference evaluator.

use std::sync::Arc;

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Tensor, ValueId, ValueType};
use ortrain_program::{
    Bindings, GradientMode, InputView, Memory, Reference, RunContext, RunError, Scalars, Schedule,
    ScheduleExecutor, Workspace,
};

use crate::passes::differentiate::backpropagate;
use crate::registry::{NEWEST_OPSET, Registry};
use crate::{Definition, Error, Role, Specialiser, passes};

/// Builds a graph with inputs of the types of the tensors, named `x0`, `x1`, ...
pub(crate) fn graph(inputs: &[&Tensor]) -> (Graph, Vec<ValueId>) {
    let mut graph = Graph::new("test");
    graph.opsets.insert(String::new(), NEWEST_OPSET);
    graph.opsets.insert("com.microsoft".into(), 1);
    let ids: Vec<ValueId> = inputs
        .iter()
        .enumerate()
        .map(|(k, tensor)| {
            graph.add_value(&format!("x{k}"), ValueType::tensor(tensor.dtype(), tensor.dims()))
        })
        .collect();
    graph.inputs.clone_from(&ids);
    (graph, ids)
}

/// Adds a node with outputs named after `name` and makes them outputs of the graph.
pub(crate) fn add(
    graph: &mut Graph,
    (domain, op): (&str, &str),
    name: &str,
    inputs: &[Option<ValueId>],
    outputs: usize,
    attrs: Attrs,
) -> Vec<ValueId> {
    let ids: Vec<ValueId> = (0..outputs)
        .map(|k| {
            let hint = if k == 0 { name.to_owned() } else { format!("{name}_{k}") };
            graph.add_value(&hint, ValueType::Unknown)
        })
        .collect();
    let ports: Vec<Option<ValueId>> = ids.iter().copied().map(Some).collect();
    let mut node = Node::new(domain, op, inputs, &ports, attrs);
    node.name = name.into();
    graph.nodes.push(node);
    graph.outputs.extend(&ids);
    ids
}

/// Builds a graph of one node in version `opset` of `ai.onnx` and upgrades it; every tensor is an input of the graph.
pub(crate) fn one_node_graph(
    opset: i64,
    op: (&str, &str),
    inputs: &[Option<&Tensor>],
    outputs: usize,
    attrs: Attrs,
) -> Result<Graph, Error> {
    let present: Vec<&Tensor> = inputs.iter().copied().flatten().collect();
    let (mut graph, ids) = graph(&present);
    graph.opsets.insert(String::new(), opset);
    let mut ids = ids.into_iter();
    let ports: Vec<Option<ValueId>> = inputs.iter().map(|input| input.and_then(|_| ids.next())).collect();
    add(&mut graph, op, "y", &ports, outputs, attrs);
    passes::versions::upgrade(&mut graph)?;
    passes::infer::infer(&mut graph)?;
    Ok(graph)
}

/// Writes a graph to a message and reads it again.
pub(crate) fn round_trip_through_file(graph: &Graph) -> Graph {
    let opset = |domain: &str, version: i64| {
        let domain = domain.to_owned();
        ortrain_onnx::OperatorSetIdProto { domain, version }
    };
    let model = ortrain_onnx::ModelProto {
        graph: Some(graph.to_proto()),
        opset_import: vec![opset("", NEWEST_OPSET), opset("com.microsoft", 1)],
        ..Default::default()
    };
    let model = ortrain_onnx::LoadedModel::from_proto(model, ortrain_onnx::ExternalData::none());
    let mut read = Graph::from_model(&model).expect("the graph can be read");
    passes::versions::upgrade(&mut read).expect("it is known");
    passes::infer::infer(&mut read).expect("the graph is valid");
    read
}

/// Reason why a graph did not run.
#[derive(Debug)]
pub(crate) enum Failure {
    Prepare(Error),
    Run(RunError),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::Prepare(error)
    }
}

/// Runs a graph bound to planes; `inputs` are the values of the graph's user inputs. Returns the schedule and the
/// results.
pub(crate) fn run_bound(
    graph: &Graph,
    roles: Vec<Role>,
    planes: &[&Memory],
    inputs: &[Tensor],
    scalars: Scalars,
) -> Result<(Arc<Schedule>, Vec<Tensor>), Failure> {
    run_specialised(&Specialiser::new(graph.clone(), roles), planes, inputs, scalars)
}

/// Runs a specialiser bound to planes, as [`run_bound`] runs a graph.
pub(crate) fn run_specialised(
    specialiser: &Specialiser,
    planes: &[&Memory],
    inputs: &[Tensor],
    scalars: Scalars,
) -> Result<(Arc<Schedule>, Vec<Tensor>), Failure> {
    let schedule = specialiser.schedule(inputs)?.schedule().clone();
    let mut work = Workspace::new(Arc::new(Reference));
    let runner = ScheduleExecutor::new(Arc::new(Reference), schedule.clone())
        .expect("the reference runs every instruction");
    let feeds: Vec<InputView<'_>> = inputs
        .iter()
        .map(|tensor| InputView {
            dtype: tensor.dtype(),
            dims: tensor.dims(),
            bytes: tensor.data()[..].into(),
        })
        .collect();
    let mut results: Vec<Option<Tensor>> = vec![None; specialiser.graph().outputs.len()];
    runner
        .run(
            RunContext::new(&Bindings { planes }, &mut work, GradientMode::Overwrite, scalars),
            &feeds,
            &mut |k, value| {
                results[k] = Some(value.to_tensor()?);
                Ok(())
            },
        )
        .map_err(Failure::Run)?;
    Ok((schedule, results.into_iter().map(|tensor| tensor.expect("every output is delivered")).collect()))
}

/// Runs a graph with user inputs only.
pub(crate) fn run_with(graph: &Graph, inputs: &[Tensor], scalars: Scalars) -> Result<Vec<Tensor>, Failure> {
    let roles = vec![Role::User; inputs.len()];
    Ok(run_bound(graph, roles, &[], inputs, scalars)?.1)
}

/// Runs a graph with user inputs only and default scalars.
pub(crate) fn run(graph: &Graph, inputs: &[Tensor]) -> Result<Vec<Tensor>, Failure> {
    run_with(graph, inputs, Scalars::default())
}

/// Builds a graph of one node at the newest version and runs it.
pub(crate) fn run_node(
    op: (&str, &str),
    inputs: &[Option<&Tensor>],
    outputs: usize,
    attrs: Attrs,
) -> Result<Vec<Tensor>, Failure> {
    let graph = one_node_graph(NEWEST_OPSET, op, inputs, outputs, attrs)?;
    let feeds: Vec<Tensor> = inputs.iter().copied().flatten().cloned().collect();
    run(&graph, &feeds)
}

/// Creates a float64 tensor.
pub(crate) fn f64s(dims: &[usize], elements: &[f64]) -> Tensor {
    Tensor::from_slice(DType::F64, dims, elements)
}

/// Creates a float64 tensor of distinct elements between -2 and 2 without a pattern.
pub(crate) fn generic_tensor(dims: &[usize], seed: u32) -> Tensor {
    let count = dims.iter().product::<usize>();
    let elements: Vec<f64> =
        (0..count).map(|k| 2.0 * (f64::from(seed) * 1.7 + k as f64 * 2.399_963).sin()).collect();
    f64s(dims, &elements)
}

/// Converts a tensor to another type.
pub(crate) fn cast_tensor(tensor: &Tensor, dtype: DType) -> Tensor {
    let ty = ortrain_expr::Type::of(dtype);
    let scalars: Vec<_> =
        tensor.to_f64().into_iter().map(|x| ortrain_expr::Scalar::from_f64(ty, x)).collect();
    let bytes = ortrain_expr::Scalar::to_bytes(dtype, &scalars);
    Tensor::new(dtype, tensor.dims().to_vec(), bytes.into()).expect("as long")
}

/// Asserts that tensors agree up to rounding: differences are relative to 1 or the larger number.
#[track_caller]
pub(crate) fn assert_close(got: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!((got.dtype(), got.dims()), (expected.dtype(), expected.dims()));
    for (k, (x, y)) in got.to_f64().into_iter().zip(expected.to_f64()).enumerate() {
        let equal = x == y || (x.is_nan() && y.is_nan());
        assert!(
            equal || (x - y).abs() <= tolerance * y.abs().max(1.0),
            "element {k} is {x}, not {y}\n{got:?}\n{expected:?}"
        );
    }
}

/// Builds the gradient graph with `weights[k]` as the gradient of output `k`. The gradients of the inputs `targets` are
/// its only outputs.
pub(crate) fn gradient_graph(forward: &Graph, weights: &[Option<Tensor>], targets: &[usize]) -> Graph {
    let mut graph = forward.clone();
    let seeds: Vec<(ValueId, ValueId)> = forward
        .outputs
        .iter()
        .zip(weights)
        .filter_map(|(&output, weights)| {
            let seed = graph.add_constant("seed", weights.clone()?);
            Some((output, seed))
        })
        .collect();
    let targets: Vec<ValueId> = targets.iter().map(|&k| graph.inputs[k]).collect();
    let gradients = backpropagate(&mut graph, &seeds, &targets).expect("it can be differentiated");
    graph.outputs = gradients.into_iter().map(|gradient| gradient.expect("a gradient arrives")).collect();
    graph.remove_unused();
    graph
}

/// Asserts that the gradients of float64 inputs agree with central differences of the weighted sum of the outputs in
/// `through`, at generic points and with generic weights.
#[track_caller]
pub(crate) fn check_gradients(forward: &Graph, inputs: &[Tensor], targets: &[usize], through: &[usize]) {
    const STEP: f64 = 1e-5;
    // Error of a central difference with this step in float64.
    const TOLERANCE: f64 = 1e-7;
    let outputs = run(forward, inputs).expect("the graph runs");
    let weights: Vec<Option<Tensor>> = outputs
        .iter()
        .enumerate()
        .map(|(k, output)| through.contains(&k).then(|| generic_tensor(output.dims(), 11 + k as u32)))
        .collect();
    let total = |inputs: &[Tensor]| -> f64 {
        let outputs = run(forward, inputs).expect("the graph runs");
        let term = |(output, weights): (&Tensor, &Option<Tensor>)| {
            let weights = weights.as_ref().map_or(Vec::new(), Tensor::to_f64);
            output.to_f64().into_iter().zip(weights).map(|(x, w)| x * w).sum::<f64>()
        };
        outputs.iter().zip(&weights).map(term).sum()
    };
    let gradients = run(&gradient_graph(forward, &weights, targets), inputs).expect("the gradient runs");
    for (&target, gradient) in targets.iter().zip(gradients) {
        let at = inputs[target].to_f64();
        let moved = |k: usize, by: f64| {
            let mut elements = at.clone();
            elements[k] += by;
            let mut inputs = inputs.to_vec();
            inputs[target] = f64s(inputs[target].dims(), &elements);
            total(&inputs)
        };
        let expected: Vec<f64> =
            (0..at.len()).map(|k| (moved(k, STEP) - moved(k, -STEP)) / (2.0 * STEP)).collect();
        assert_close(&gradient, &f64s(inputs[target].dims(), &expected), TOLERANCE);
    }
}

/// Asserts that a graph gives the same results after its decomposition into plain ONNX.
#[track_caller]
pub(crate) fn check_decomposition(graph: &Graph, inputs: &[Tensor], tolerance: f64) {
    let mut plain = graph.clone();
    passes::decompose::standardise(&mut plain).expect("the graph decomposes");
    let is_standard =
        |node: &Node| Registry::standard().find(&node.domain, &node.op).is_some_and(Definition::is_standard);
    assert!(plain.nodes.iter().all(is_standard), "{plain}");
    let (got, expected) =
        (run(&plain, inputs).expect("the decomposition runs"), run(graph, inputs).expect("the graph runs"));
    for (got, expected) in got.iter().zip(&expected) {
        assert_close(got, expected, tolerance);
    }
}

/// Asserts that a graph in the newest version has the same results after it is written for `opset` and read again.
#[track_caller]
pub(crate) fn check_downgrade(graph: &Graph, inputs: &[Tensor], opset: i64) -> Graph {
    let mut old = graph.clone();
    passes::versions::downgrade(&mut old, opset).expect("the graph can be written");
    let written = old.clone();
    passes::versions::upgrade(&mut old).expect("the graph can be read");
    let (got, expected) =
        (run(&old, inputs).expect("the graph runs"), run(graph, inputs).expect("the graph runs"));
    for (got, expected) in got.iter().zip(&expected) {
        assert_close(got, expected, 1e-6);
    }
    written
}

/// Asserts that a graph in the newest version has the same results after it is written in plain ONNX of `opset` and
/// read again.
#[track_caller]
pub(crate) fn check_decomposed(graph: &Graph, inputs: &[Tensor], opset: i64) -> Graph {
    let mut old = graph.clone();
    let refused = passes::decompose::standardise_known(&mut old, opset);
    assert!(refused.is_empty(), "{refused:?}");
    passes::versions::downgrade(&mut old, opset).expect("the graph can be written");
    let standard =
        |node: &Node| Registry::standard().find(&node.domain, &node.op).is_some_and(Definition::is_standard);
    let written = old.clone();
    passes::versions::upgrade(&mut old).expect("the graph can be read");
    assert!(old.nodes.iter().all(standard), "{old}");
    let (got, expected) =
        (run(&old, inputs).expect("the graph runs"), run(graph, inputs).expect("the graph runs"));
    for (got, expected) in got.iter().zip(&expected) {
        assert_close(got, expected, 1e-6);
    }
    written
}

/// Asserts the same for the gradients of inputs, with generic gradients of the outputs.
#[track_caller]
pub(crate) fn check_decomposed_gradients(forward: &Graph, inputs: &[Tensor], targets: &[usize], opset: i64) {
    let weights: Vec<Option<Tensor>> = run(forward, inputs)
        .expect("the graph runs")
        .iter()
        .map(|output| output.dtype().is_float().then(|| generic_tensor(output.dims(), 11)))
        .collect();
    check_decomposed(&gradient_graph(forward, &weights, targets), inputs, opset);
}

/// Returns the graph with symbols for the sizes of input `k` along `axes`.
pub(crate) fn with_symbolic_sizes(graph: &Graph, k: usize, axes: &[usize]) -> Graph {
    let mut graph = graph.clone();
    for node in graph.nodes.clone() {
        for output in node.present_outputs() {
            graph.value_mut(output).ty = ValueType::Unknown;
        }
    }
    let id = graph.inputs[k];
    if let ValueType::Tensor(_, Some(shape)) = &mut graph.value_mut(id).ty {
        for &axis in axes {
            shape[axis] = Dim::symbol(&format!("s{axis}"));
        }
    }
    passes::infer::infer(&mut graph).expect("valid");
    graph
}

/// Returns attributes with lists of integers.
pub(crate) fn ints(pairs: &[(&str, &[i64])]) -> Attrs {
    pairs.iter().fold(Attrs::new(), |attrs, &(name, values)| attrs.with(name, values))
}
