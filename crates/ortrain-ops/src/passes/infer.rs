//! Inference of the types and shapes of every value.

use ortrain_graph::{Graph, ValueId, ValueType};
use rustc_hash::FxHashSet;

use crate::Error;
use crate::passes::node::{check_axis_count, forget_shapes, infer_noting_contradictions};
use crate::registry::Registry;

/// Infers the types and shapes of all values, in order. A declared element type is checked against the inferred type. A
/// declared shape is advice: it adds information that inference does not find, and is never an error.
///
/// # Errors
/// Returns an error for the first node that contradicts its operator's definition, or its declared element type.
pub fn infer(graph: &mut Graph) -> Result<(), Error> {
    check_inputs(graph)?;
    let first = match infer_all(graph) {
        Ok(false) => return Ok(()),
        Ok(true) => Ok(graph.clone()),
        Err(error) => Err(error),
    };
    // Either a declared shape or the graph itself is wrong.
    forget_shapes(graph);
    match (infer_all(graph), first) {
        (Ok(_), _) => Ok(()),
        (Err(_), Ok(advised)) => {
            *graph = advised;
            Ok(())
        }
        // The error remains without declared shapes; the message with declared shapes is more precise.
        (Err(error), Err(first)) => Err(if are_of_same_node(&error, &first) { first } else { error }),
    }
}

fn are_of_same_node(a: &Error, b: &Error) -> bool {
    matches!((a, b), (Error::Node { node: a, .. }, Error::Node { node: b, .. }) if a == b)
}

/// Infers all types. Returns true if a declared shape or a branch contradicts an inferred shape.
fn infer_all(graph: &mut Graph) -> Result<bool, Error> {
    let mut contradicts = false;
    for index in 0..graph.nodes.len() {
        contradicts |= infer_noting_contradictions(graph, index)?;
    }
    Ok(contradicts)
}

/// Runs [`infer`] as far as possible: values that depend on an unknown or invalid node are skipped if they cannot be
/// determined. Returns all errors, one for each node.
pub fn infer_known(graph: &mut Graph) -> Vec<Error> {
    let (first, contradicts) = infer_all_known(graph);
    if first.is_empty() && !contradicts {
        return first;
    }
    // The shapes that a file declares may be wrong.
    forget_shapes(graph);
    let errors = infer_all_known(graph).0;
    let first_error =
        |error: Error| first.iter().find(|first| are_of_same_node(first, &error)).cloned().unwrap_or(error);
    errors.into_iter().map(first_error).collect()
}

fn infer_all_known(graph: &mut Graph) -> (Vec<Error>, bool) {
    let mut errors: Vec<Error> = check_inputs(graph).err().into_iter().collect();
    let mut contradicts = false;
    let mut uncertain: FxHashSet<ValueId> = FxHashSet::default();
    for index in 0..graph.nodes.len() {
        let node = &graph.nodes[index];
        let known = Registry::standard().find(&node.domain, &node.op).is_some();
        let is_uncertain = node.present_inputs().any(|id| uncertain.contains(&id));
        let outcome = if known { infer_noting_contradictions(graph, index) } else { Ok(false) };
        contradicts |= matches!(outcome, Ok(true));
        let untyped = |id: &ValueId| matches!(graph.value(*id).ty, ValueType::Unknown);
        match outcome {
            Ok(_) if known && !is_uncertain => {}
            Ok(_) => uncertain.extend(graph.nodes[index].present_outputs().filter(untyped)),
            Err(error) => {
                uncertain.extend(graph.nodes[index].present_outputs());
                if !is_uncertain {
                    errors.push(error);
                }
            }
        }
    }
    (errors, contradicts)
}

/// Checks the inputs and initializers of the graph.
fn check_inputs(graph: &Graph) -> Result<(), Error> {
    let constants = graph.value_ids().filter(|&id| graph.value(id).constant.is_some());
    for id in graph.inputs.iter().copied().chain(constants) {
        check_axis_count(graph, id, &graph.value(id).ty).map_err(|error| Error::Graph(error.to_string()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use ortrain_graph::{Attrs, DType, Tensor, ValueType};

    use super::*;
    use crate::infer::MAX_AXES;
    use crate::testing::{Failure, add, check_gradients, f64s, graph, run};

    const TOO_MANY_AXES: usize = MAX_AXES + 1;

    /// Returns the error for a result with too many axes, for constant and for computed values.
    fn error_message(op: &str, inputs: &[Tensor], attrs: &Attrs, constant: bool) -> String {
        let x: Vec<&Tensor> = inputs.iter().collect();
        let (mut graph_of_node, ids) = graph(&x);
        let ports: Vec<Option<ValueId>> = ids
            .iter()
            .zip(inputs)
            .map(|(&id, tensor)| {
                let is_data = tensor.dtype().is_float() || !constant;
                Some(if is_data { id } else { graph_of_node.add_constant("known", tensor.clone()) })
            })
            .collect();
        add(&mut graph_of_node, ("", op), "y", &ports, 1, attrs.clone());
        match infer(&mut graph_of_node) {
            Err(error) => error.to_string(),
            Ok(()) => match run(&graph_of_node, inputs) {
                Err(Failure::Prepare(error)) => error.to_string(),
                Err(Failure::Run(error)) => error.to_string(),
                Ok(_) => panic!("{op} runs"),
            },
        }
    }

    #[test]
    fn rejects_results_with_too_many_axes() {
        let x = Tensor::f32(&[3], &[1.0, 2.0, 3.0]);
        let new: Vec<i64> = (1..TOO_MANY_AXES as i64).collect();
        let ones: Vec<i64> = std::iter::once(3).chain(vec![1; TOO_MANY_AXES - 1]).collect();
        let front: Vec<i64> = vec![1; TOO_MANY_AXES - 1].into_iter().chain([3]).collect();
        let shape = |sizes: &[i64]| Tensor::i64(&[sizes.len()], sizes);
        let at = Tensor::i64(&[1; TOO_MANY_AXES], &[0]);
        for (op, inputs) in [
            ("Unsqueeze", vec![x.clone(), shape(&new)]),
            ("Reshape", vec![x.clone(), shape(&ones)]),
            ("Expand", vec![x.clone(), shape(&front)]),
            ("Gather", vec![x.clone(), at]),
            ("ConstantOfShape", vec![shape(&ones)]),
            (
                "OneHot",
                vec![
                    Tensor::i64(&[1; MAX_AXES], &[0]),
                    Tensor::i64(&[], &[2]),
                    Tensor::f32(&[2], &[0.0, 1.0]),
                ],
            ),
        ] {
            for constant in [true, false] {
                if constant && op == "OneHot" {
                    continue;
                }
                let message = error_message(op, &inputs, &Attrs::new(), constant);
                let expected =
                    if op == "Gather" && !constant { "\"x1\" has 65 axes" } else { "has 65 axes (shape [" };
                assert!(message.contains(expected), "{op}: {message}");
                assert!(
                    message.contains("), at most 64 are supported; remove axes of size 1 or merge axes"),
                    "{op}: {message}"
                );
                assert!(message.contains(op) || message.contains("\"x1\""), "{op}: {message}");
            }
        }
    }

    #[test]
    fn accepts_maximum_axes() {
        let x = Tensor::f32(&[3], &[1.0, 2.0, 3.0]);
        let new: Vec<i64> = (1..MAX_AXES as i64).collect();
        let (mut valid, ids) = graph(&[&x]);
        let new = valid.add_constant("new", Tensor::i64(&[new.len()], &new));
        let y = add(&mut valid, ("", "Unsqueeze"), "y", &[Some(ids[0]), Some(new)], 1, Attrs::new());
        let y = add(&mut valid, ("", "Relu"), "z", &[Some(y[0])], 1, Attrs::new());
        valid.outputs = y;
        infer(&mut valid).expect("the graph is valid");
        let got = run(&valid, std::slice::from_ref(&x)).expect("the graph runs");
        assert_eq!(got[0].dims().len(), MAX_AXES);
        assert_eq!(got[0].to_f64(), [1.0, 2.0, 3.0]);
    }

    #[test]
    fn rejects_inputs_with_too_many_axes() {
        let wide = Tensor::f32(&[1; TOO_MANY_AXES], &[1.0]);
        let (mut with_input, _) = graph(&[&wide]);
        let message = infer(&mut with_input).expect_err("too many").to_string();
        assert!(message.starts_with("\"x0\" has 65 axes (shape [1, 1, "), "{message}");
        let (mut with_constant, _) = graph(&[]);
        with_constant.add_constant("w", wide);
        let message = infer(&mut with_constant).expect_err("too many").to_string();
        assert!(message.starts_with("\"w\" has 65 axes (shape [1, 1, "), "{message}");
        let errors = infer_known(&mut with_constant);
        assert_eq!(errors.len(), 1, "{errors:?}");
    }

    #[test]
    fn declared_shapes_are_advice() {
        // The declared number of nonzero elements is five, which contradicts the following nodes.
        let (x, w) = (f64s(&[3], &[0.0, 1.0, 2.0]), f64s(&[2], &[3.0, 4.0]));
        for declared in [&[1, 5][..], &[7], &[1, 2]] {
            let (mut graph, ids) = graph(&[&x, &w]);
            let indices = add(&mut graph, ("", "NonZero"), "found", &[Some(ids[0])], 1, Attrs::new())[0];
            graph.value_mut(indices).ty = ValueType::tensor(DType::I64, declared);
            let to = Attrs::new().with("to", i64::from(DType::F64.to_onnx()));
            let floats = add(&mut graph, ("", "Cast"), "number", &[Some(indices)], 1, to)[0];
            let product =
                add(&mut graph, ("", "Mul"), "y", &[Some(floats), Some(ids[1])], 1, Attrs::new())[0];
            let negative = add(&mut graph, ("", "Neg"), "z", &[Some(ids[1])], 1, Attrs::new())[0];
            graph.value_mut(negative).ty = ValueType::tensor(DType::F64, &[4]);
            graph.outputs = vec![product, negative];
            assert!(infer_known(&mut graph.clone()).is_empty());
            infer(&mut graph).expect("shapes are advice");
            assert_eq!(graph.value(negative).ty, ValueType::tensor(DType::F64, &[2]));
            let inputs = [x.clone(), w.clone()];
            let got = run(&graph, &inputs).expect("the graph runs");
            assert_eq!(got, [f64s(&[1, 2], &[3.0, 8.0]), f64s(&[2], &[-3.0, -4.0])]);
            check_gradients(&graph, &inputs, &[1], &[0, 1]);
        }
    }

    #[test]
    fn declared_element_types_are_checked() {
        let x = Tensor::f32(&[1], &[1.0]);
        let (mut graph, ids) = graph(&[&x]);
        let y = add(&mut graph, ("", "Neg"), "y", &[Some(ids[0])], 1, Attrs::new())[0];
        graph.value_mut(y).ty = ValueType::tensor(DType::I64, &[1]);
        let message = infer(&mut graph).expect_err("refused").to_string();
        assert!(message.ends_with("\"y\" is declared as int64[1] but is float32[1]"), "{message}");
    }
}
