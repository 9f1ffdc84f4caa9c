//! Checks of cases.

use std::sync::Arc;

use ortrain_expr::{Mode, Precision, Scalar};
use ortrain_graph::{Attrs, DType, Graph, Node, Tensor, ValueId, ValueType};
use ortrain_ops::{Definition, Registry, Role, Specialiser, passes};
use ortrain_program::{
    Backend, Bindings, GradientMode, InputView, Program, RunContext, Scalars, Schedule, ScheduleExecutor,
    Workspace, reference,
};

use crate::{Case, tolerance};

/// Maximum number of elements per input at which the difference is computed; larger inputs are sampled
/// evenly.
const POINTS_PER_INPUT: usize = 24;

fn specialise(graph: Graph, inputs: &[Tensor], precision: Precision) -> Result<Arc<Schedule>, String> {
    let roles = vec![Role::User; graph.inputs.len()];
    let specialiser = Specialiser::new(graph, roles).precision(precision);
    let schedule = specialiser.schedule(inputs).map_err(|error| error.to_string())?;
    Ok(schedule.schedule().clone())
}

fn compile_single_program(graph: Graph, inputs: &[Tensor]) -> Result<Arc<Program>, String> {
    compile_with_precision(graph, inputs, Precision::F32)
}

/// Compiles a graph into a program, with a precision of inner products.
///
/// # Errors
/// The error of the graph, or an error if the schedule has more than one program.
pub fn compile_with_precision(
    graph: Graph,
    inputs: &[Tensor],
    precision: Precision,
) -> Result<Arc<Program>, String> {
    let schedule = specialise(graph, inputs, precision)?;
    schedule.single_program().cloned().ok_or_else(|| "the graph is not a single program".to_owned())
}

/// Runs a case on a backend.
///
/// # Errors
/// The error of the graph or of the backend.
pub fn run(graph: &Graph, inputs: &[Tensor], backend: Arc<dyn Backend>) -> Result<Vec<Tensor>, String> {
    run_with_precision(graph, inputs, backend, Precision::F32)
}

/// Runs a case like [`run`], with a precision of inner products.
///
/// # Errors
/// As [`run`].
pub fn run_with_precision(
    graph: &Graph,
    inputs: &[Tensor],
    backend: Arc<dyn Backend>,
    precision: Precision,
) -> Result<Vec<Tensor>, String> {
    let schedule = specialise(graph.clone(), inputs, precision)?;
    let mut work = Workspace::new(backend.clone());
    let runner = ScheduleExecutor::new(backend, schedule).map_err(|error| error.to_string())?;
    let run_inputs: Vec<InputView<'_>> = inputs
        .iter()
        .map(|tensor| InputView {
            dtype: tensor.dtype(),
            dims: tensor.dims(),
            bytes: tensor.data()[..].into(),
        })
        .collect();
    let mut results = Vec::new();
    let bindings = Bindings { planes: &[] };
    runner
        .run(
            RunContext::new(&bindings, &mut work, GradientMode::Overwrite, Scalars::default()),
            &run_inputs,
            &mut |_, value| {
                results.push(value.to_tensor()?);
                Ok(())
            },
        )
        .map_err(|error| error.to_string())?;
    Ok(results)
}

/// Returns the elements of tensors; floats as `f64`.
fn widen(inputs: &[Tensor]) -> Vec<Vec<Scalar>> {
    let elements = |tensor: &Tensor| {
        let elements = Scalar::read_all(tensor.dtype(), tensor.data());
        if !tensor.dtype().is_float() {
            return elements;
        }
        elements.into_iter().map(|element| Scalar::F64(element.to_f64())).collect()
    };
    inputs.iter().map(elements).collect()
}

fn evaluate(program: &Program, inputs: &[Vec<Scalar>]) -> Result<Vec<Vec<f64>>, String> {
    let results =
        reference::evaluate(program, Mode::Widened, inputs, Scalars::default()).map_err(|e| e.to_string())?;
    Ok(results.into_iter().map(|elements| elements.into_iter().map(Scalar::to_f64).collect()).collect())
}

/// Terms of a loss.
#[derive(Clone, Copy, PartialEq)]
enum LossTerms {
    Results,
    /// Squares of the results: the gradients depend on the results.
    Squares,
}

/// Returns fixed weights with sums that are exact in float32, too: constant subexpressions are folded in
/// their own type.
fn weights(shape_source: &Tensor) -> Tensor {
    let weights: Vec<f64> =
        (0..shape_source.len()).map(|k| (20 + 4 * ((k * 7 + 3) % 11)) as f64 / 64.0).collect();
    crate::case::tensor(shape_source.dtype(), shape_source.dims(), &weights)
}

/// Adds a loss that depends on every float result with different weights: a sum of products with fixed
/// numbers.
fn with_loss(case: &Case, of: LossTerms) -> Result<(Graph, ValueId), String> {
    let mut graph = case.graph.clone();
    passes::infer::infer(&mut graph).map_err(|error| error.to_string())?;
    // The weights need the concrete shapes of the results.
    let shapes = run(&case.graph, &case.inputs, Arc::new(ortrain_program::Reference))?;
    let mut parts = Vec::new();
    for (&output, result) in case.graph.outputs.iter().zip(&shapes) {
        if !result.dtype().is_float() {
            continue;
        }
        let weights = graph.add_constant("weights", weights(result));
        let add = |graph: &mut Graph, op: &str, inputs: &[ValueId], attrs: Attrs| {
            let out = graph.add_value("loss_part", ValueType::Unknown);
            let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
            graph.nodes.push(Node::new("", op, &inputs, &[Some(out)], attrs));
            out
        };
        let mut weighed = add(&mut graph, "Mul", &[output, weights], Attrs::new());
        if of == LossTerms::Squares {
            weighed = add(&mut graph, "Mul", &[weighed, output], Attrs::new());
        }
        parts.push(add(&mut graph, "ReduceSum", &[weighed], Attrs::new().with("keepdims", 0i64)));
    }
    let loss = graph.add_value("loss", ValueType::Unknown);
    let inputs: Vec<Option<ValueId>> = parts.into_iter().map(Some).collect();
    graph.nodes.push(Node::new("", "Sum", &inputs, &[Some(loss)], Attrs::new()));
    graph.outputs = vec![loss];
    passes::infer::infer(&mut graph).map_err(|error| error.to_string())?;
    Ok((graph, loss))
}

/// Returns the graph of a case with a loss and the gradients of its float inputs as outputs.
fn differentiated(case: &Case, of: LossTerms) -> Result<(Graph, Graph, Vec<usize>), String> {
    let (forward, loss) = with_loss(case, of)?;
    let mut graph = forward.clone();
    let floats: Vec<usize> = (0..case.inputs.len()).filter(|&k| case.inputs[k].dtype().is_float()).collect();
    let targets: Vec<ValueId> = floats.iter().map(|&k| graph.inputs[k]).collect();
    let gradients = passes::differentiate::differentiate(&mut graph, loss, &targets)
        .map_err(|error| error.to_string())?;
    graph.outputs = [vec![loss], gradients].concat();
    Ok((forward, graph, floats))
}

/// Returns the graph of a case with a loss; its outputs are the loss and the gradients of the float inputs.
///
/// # Errors
/// If the case is not differentiable.
pub fn gradient_graph(case: &Case) -> Result<Graph, String> {
    differentiated(case, LossTerms::Results).map(|(_, graph, _)| graph)
}

/// Compares the gradients of a case with central differences, both in float64. Returns the number of compared
/// points.
///
/// # Errors
/// The first point that differs, or the error that prevented the check.
pub fn check_gradient(case: &Case) -> Result<usize, String> {
    check_gradient_after(case, |_| {})
}

/// Runs [`check_gradient`] after a change of the gradient graph, to verify that the check can fail.
///
/// # Errors
/// The first point that differs, or the error that prevented the check.
pub fn check_gradient_after(case: &Case, change: impl FnOnce(&mut Graph)) -> Result<usize, String> {
    let at = |message: String| format!("{} ({}): {message}", case.operator, case.name);
    let (forward, mut graph, floats) = differentiated(case, LossTerms::Results).map_err(at)?;
    change(&mut graph);
    let loss = compile_single_program(forward, &case.inputs).map_err(at)?;
    let gradient = compile_single_program(graph, &case.inputs).map_err(at)?;
    let actual = evaluate(&gradient, &widen(&case.inputs)).map_err(at)?;
    let value = |inputs: &[Vec<Scalar>]| Ok(evaluate(&loss, inputs)?[0][0]);
    compare(&case.inputs, &floats, &actual[1..], value).map_err(at)
}

/// Compares second-order gradients with central differences, in float64. Returns the number of compared
/// points.
///
/// The function is the weighted sum of the gradients of squares. The second backward pass must not stop a
/// gradient silently.
///
/// # Errors
/// The first point that differs, or the error that prevented the check.
pub fn check_second_order(case: &Case) -> Result<usize, String> {
    let at = |message: String| format!("{} ({}): {message}", case.operator, case.name);
    let (_, mut graph, floats) = differentiated(case, LossTerms::Squares).map_err(at)?;
    graph.outputs.remove(0);
    let mut second = graph.clone();
    let weights: Vec<Tensor> = floats.iter().map(|&k| weights(&case.inputs[k])).collect();
    let seeds: Vec<(ValueId, ValueId)> = graph
        .outputs
        .iter()
        .zip(&weights)
        .map(|(&gradient, weights)| (gradient, second.add_constant("seed", weights.clone())))
        .collect();
    let targets: Vec<ValueId> = floats.iter().map(|&k| graph.inputs[k]).collect();
    let gradients = passes::differentiate::backpropagate(&mut second, &seeds, &targets);
    let gradients = gradients.map_err(|error| at(error.to_string()))?;
    second.outputs = gradients.iter().copied().flatten().collect();
    second.remove_unused();

    let first = compile_single_program(graph, &case.inputs).map_err(at)?;
    let inputs = widen(&case.inputs);
    let mut arrived = if second.outputs.is_empty() {
        Vec::new()
    } else {
        let second = compile_single_program(second, &case.inputs).map_err(at)?;
        evaluate(&second, &inputs).map_err(at)?
    }
    .into_iter();
    let zeros = |&k: &usize| vec![0.0; inputs[k].len()];
    let actual: Vec<Vec<f64>> = floats
        .iter()
        .zip(&gradients)
        .map(|(k, gradient)| gradient.and_then(|_| arrived.next()).unwrap_or_else(|| zeros(k)))
        .collect();
    let value = |inputs: &[Vec<Scalar>]| {
        let gradients = evaluate(&first, inputs)?;
        let product = |(gradient, weights): (&Vec<f64>, &Tensor)| -> f64 {
            gradient.iter().zip(weights.to_f64()).map(|(g, w)| g * w).sum()
        };
        Ok(gradients.iter().zip(&weights).map(product).sum())
    };
    compare(&case.inputs, &floats, &actual, value).map_err(at)
}

/// Compares gradients with central differences of a function.
fn compare(
    inputs: &[Tensor],
    targets: &[usize],
    actual: &[Vec<f64>],
    value: impl Fn(&[Vec<Scalar>]) -> Result<f64, String>,
) -> Result<usize, String> {
    let inputs = widen(inputs);
    let mut points = 0;
    for (gradient, &k) in actual.iter().zip(targets) {
        let len = inputs[k].len();
        if gradient.len() != len {
            return Err(format!("the gradient of input {k} has {} elements, not {len}", gradient.len()));
        }
        for index in (0..len).step_by(len.div_ceil(POINTS_PER_INPUT).max(1)) {
            let shifted_value = |step: f64| -> Result<f64, String> {
                let mut inputs = inputs.clone();
                inputs[k][index] = Scalar::F64(inputs[k][index].to_f64() + step);
                value(&inputs)
            };
            let up = shifted_value(tolerance::STEP)?;
            let down = shifted_value(-tolerance::STEP)?;
            let expected = (up - down) / (2.0 * tolerance::STEP);
            let gap = (gradient[index] - expected).abs() / expected.abs().max(1.0);
            // Written so that NaN fails.
            if gap.is_nan() || gap > tolerance::GRADIENT {
                return Err(format!(
                    "the gradient of input {k} at element {index} is {} but the difference says {expected}",
                    gradient[index]
                ));
            }
            points += 1;
        }
    }
    Ok(points)
}

fn tolerance_of(dtype: DType, float32: f64) -> f64 {
    match dtype {
        DType::F16 => tolerance::FLOAT16.max(float32),
        DType::BF16 => tolerance::BFLOAT16.max(float32),
        DType::F32 | DType::F64 => float32,
        _ => 0.0,
    }
}

/// Compares a backend with the reference evaluator (in float64) on a case: results and, with `gradients`,
/// also the gradients.
///
/// # Errors
/// The first tensor that differs.
pub fn check_backend(case: &Case, backend: &Arc<dyn Backend>, gradients: bool) -> Result<(), String> {
    check_backend_at(case, backend, gradients, Precision::F32, tolerance::FLOAT32)
}

/// Runs [`check_backend`] with a precision of inner products and a tolerance for float32 results.
///
/// # Errors
/// As [`check_backend`].
pub fn check_backend_at(
    case: &Case,
    backend: &Arc<dyn Backend>,
    gradients: bool,
    precision: Precision,
    tolerance: f64,
) -> Result<(), String> {
    let on = backend.name();
    let at = |message: String| format!("{} ({}) on {on} in {precision}: {message}", case.operator, case.name);
    let mut graphs = vec![case.graph.clone()];
    if gradients {
        let mut graph = differentiated(case, LossTerms::Results).map_err(at)?.1;
        // The loss is excluded: its terms may nearly cancel, which leaves only rounding errors. They were
        // compared individually.
        graph.outputs.remove(0);
        graphs.push(graph);
    }
    for graph in graphs {
        let program = compile_with_precision(graph.clone(), &case.inputs, precision).map_err(at)?;
        let expected = evaluate(&program, &widen(&case.inputs)).map_err(at)?;
        let actual = run_with_precision(&graph, &case.inputs, backend.clone(), precision).map_err(at)?;
        for (k, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
            let largest = expected.iter().fold(0.0f64, |scale, v| scale.max(v.abs()));
            let scale = if largest == 0.0 { tolerance::MIN_ZERO_MAGNITUDE } else { largest.max(1e-6) };
            for (index, (&got, &reference)) in actual.to_f64().iter().zip(expected).enumerate() {
                let same = (got.is_nan() && reference.is_nan())
                    || got == reference
                    || (got - reference).abs() <= tolerance_of(actual.dtype(), tolerance) * scale;
                if !same {
                    return Err(at(format!("output {k} at element {index} is {got}, not {reference}")));
                }
            }
        }
    }
    Ok(())
}

/// Compares the gradients of a case with their decomposition into plain ONNX, on the reference evaluator.
///
/// # Errors
/// The first tensor that differs, or the reason why a decomposition does not exist.
pub fn check_standard(case: &Case) -> Result<(), String> {
    let at = |message: String| format!("{} ({}): {message}", case.operator, case.name);
    let graph = gradient_graph(case).map_err(at)?;
    let mut plain = graph.clone();
    passes::decompose::standardise(&mut plain).map_err(|error| at(error.to_string()))?;
    let is_standard =
        |node: &Node| Registry::standard().find(&node.domain, &node.op).is_some_and(Definition::is_standard);
    if let Some(node) = plain.nodes.iter().find(|node| !is_standard(node)) {
        return Err(at(format!("{} is left", node.op_label())));
    }
    let reference = || Arc::new(ortrain_program::Reference) as Arc<dyn Backend>;
    let expected = run(&graph, &case.inputs, reference()).map_err(at)?;
    let actual = run(&plain, &case.inputs, reference()).map_err(at)?;
    for (k, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
        let scale = expected.to_f64().iter().fold(1e-6f64, |scale, v| scale.max(v.abs()));
        let is_close = |(a, b): (&f64, &f64)| {
            a == b || (a - b).abs() <= tolerance::FLOAT32 * scale || a.is_nan() && b.is_nan()
        };
        let same =
            actual.dims() == expected.dims() && actual.to_f64().iter().zip(&expected.to_f64()).all(is_close);
        if !same {
            return Err(at(format!("output {k} is {actual:?}, not {expected:?}")));
        }
    }
    Ok(())
}
