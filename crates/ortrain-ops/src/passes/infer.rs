//! Inference of the types and shapes of every value.

use ortrain_expr::Dims;
use ortrain_expr::pause;
use ortrain_graph::{Attr, Dim, Graph, ValueId, ValueType};
use rustc_hash::FxHashSet;

use crate::infer::Infer;
use crate::op::{Op, Placement};
use crate::registry::{Registry, build};
use crate::{Error, OpError};

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

/// Infers a graph of known types to which nodes were added. Existing types of results (such as gradients, which have
/// the types of their values) are binding.
///
/// # Errors
/// Returns the errors of [`infer`], and an error if a result has another shape than its existing one.
pub(crate) fn infer_added(graph: &mut Graph) -> Result<(), Error> {
    (0..graph.nodes.len())
        .try_for_each(|index| infer_with_authority(graph, index, ShapeAuthority::Binding).map(|_| ()))
}

/// Infers all types. Returns true if a declared shape or a branch contradicts an inferred shape.
fn infer_all(graph: &mut Graph) -> Result<bool, Error> {
    let mut contradicts = false;
    for index in 0..graph.nodes.len() {
        contradicts |= infer_noting_contradictions(graph, index)?;
    }
    Ok(contradicts)
}

/// Authority of the shapes that values have before inference.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ShapeAuthority {
    /// Declared by a file: advice.
    Advice,
    /// Binding.
    Binding,
}

/// Removes the shapes of all values that nodes produce, including values of subgraphs: a file declared them, or they
/// were inferred from other inputs. Shapes that cannot be inferred are kept; this concerns a few operators.
pub(crate) fn forget_shapes(graph: &mut Graph) {
    for index in 0..graph.nodes.len() {
        if Graph::subgraphs(&graph.nodes[index]).next().is_some() {
            forget_shapes_inside(graph, index);
        }
        let node = &graph.nodes[index];
        let known_definition = Registry::standard().find(&node.domain, &node.op);
        if known_definition.is_some_and(|definition| definition.has_declared_shape) {
            continue;
        }
        for id in node.outputs.clone().into_iter().flatten() {
            forget_shape(graph, id);
        }
    }
}

/// Removes the shapes of all values that nodes in subgraphs of a node produce.
fn forget_shapes_inside(graph: &mut Graph, index: usize) {
    let repeats = build(graph, &graph.nodes[index]).ok().map(|op| op.placement());
    let node = &mut graph.nodes[index];
    let captures = node.captures;
    for attr in node.attrs.0.values_mut() {
        let Attr::Graph(subgraph) = attr else { continue };
        forget_shapes(subgraph);
        // The iteration index and the condition keep their declared shapes: scalars, or vectors of one element.
        let formal_count = subgraph.inputs.len().saturating_sub(captures);
        let lead = match &repeats {
            Some(Placement::Repeat(repetition)) => repetition.leading_inputs().min(formal_count),
            _ => formal_count,
        };
        for k in lead..subgraph.inputs.len() {
            forget_shape(subgraph, subgraph.inputs[k]);
        }
    }
}

/// Removes the shape of a value, unless the value is a constant.
fn forget_shape(graph: &mut Graph, id: ValueId) {
    let value = graph.value_mut(id);
    if value.constant.is_some() {
        return;
    }
    if let ValueType::Tensor(dtype, _) = value.ty {
        value.ty = ValueType::Tensor(dtype, None);
    }
    value.sizes = None;
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

pub(crate) fn infer_node(graph: &mut Graph, index: usize) -> Result<(), Error> {
    infer_noting_contradictions(graph, index).map(|_| ())
}

/// Runs [`infer_node`] with an operator that was built before.
pub(crate) fn infer_with_op(graph: &mut Graph, index: usize, op: &dyn Op) -> Result<(), Error> {
    check_input_sizes(graph, index)?;
    infer_op(graph, index, op, ShapeAuthority::Advice).map(drop)
}

/// Runs [`infer_node`] for a part of a decomposed node: existing types of its results are the types of the decomposed
/// node, and binding.
pub(crate) fn infer_part(graph: &mut Graph, index: usize) -> Result<(), Error> {
    infer_with_authority(graph, index, ShapeAuthority::Binding).map(drop)
}

/// Runs [`infer_node`]. Returns true if a declared shape or a branch contradicts an inferred shape.
pub(crate) fn infer_noting_contradictions(graph: &mut Graph, index: usize) -> Result<bool, Error> {
    infer_with_authority(graph, index, ShapeAuthority::Advice)
}

fn infer_with_authority(graph: &mut Graph, index: usize, authority: ShapeAuthority) -> Result<bool, Error> {
    pause();
    check_input_sizes(graph, index)?;
    let op = build(graph, &graph.nodes[index])?;
    infer_op(graph, index, op.as_ref(), authority)
}

fn check_input_sizes(graph: &Graph, index: usize) -> Result<(), Error> {
    let node = &graph.nodes[index];
    let addressable = |id: ValueId| check_size_overflow(graph, id, &graph.value(id).ty);
    node.present_inputs().try_for_each(addressable).map_err(|source| Error::at(graph, node, source))
}

/// Infers the output types of a node with its operator.
fn infer_op(graph: &mut Graph, index: usize, op: &dyn Op, authority: ShapeAuthority) -> Result<bool, Error> {
    let node = &graph.nodes[index];
    let mut cx = Infer::new(graph, node);
    op.infer(&mut cx).map_err(|source| Error::at(graph, node, source))?;
    let (inferred_types, subgraphs, mut contradicts) = (cx.outputs, cx.subgraphs, cx.contradicts);
    let outputs = node.outputs.clone();
    for (attribute, subgraph) in subgraphs {
        graph.nodes[index].attrs.0.insert(attribute.to_owned(), Attr::Graph(Box::new(subgraph)));
    }
    for (port, inferred) in outputs.into_iter().zip(inferred_types) {
        let Some(id) = port else { continue };
        let both = merge_types(&graph.value(id).ty, inferred.ty.clone());
        contradicts |= both.is_err();
        let merged = match authority {
            ShapeAuthority::Binding => both,
            ShapeAuthority::Advice => both.or_else(|_| merge_advised(&graph.value(id).ty, inferred.ty)),
        };
        let merged = merged.map_err(|types| {
            let (declared, inferred) = *types;
            let message = format!("{:?} is declared as {declared} but is {inferred}", graph.name_of(id));
            Error::at(graph, &graph.nodes[index], OpError::Invalid(message))
        })?;
        check_size_overflow(graph, id, &merged)
            .map_err(|source| Error::at(graph, &graph.nodes[index], source))?;
        let value = graph.value_mut(id);
        value.ty = merged;
        value.sizes = inferred.sizes;
        value.derived_constant = inferred.content;
    }
    Ok(contradicts)
}

/// Maximum number of axes of a tensor, as in NumPy and onnxruntime. An expression supports fewer than 256 coordinates.
pub const MAX_AXES: usize = 64;

/// Checks the number of axes of a shape.
fn check_axis_count(graph: &Graph, id: ValueId, ty: &ValueType) -> Result<(), OpError> {
    match ty.shape() {
        Some(shape) if shape.rank() > MAX_AXES => Err(OpError::unsupported(format!(
            "{:?} has {} axes (shape {shape}), at most {MAX_AXES} are supported; remove axes of size 1 or merge \
             axes with Reshape",
            graph.name_of(id),
            shape.rank()
        ))),
        _ => Ok(()),
    }
}

/// Checks the inputs and initializers of the graph.
fn check_inputs(graph: &Graph) -> Result<(), Error> {
    let constants = graph.value_ids().filter(|&id| graph.value(id).constant.is_some());
    for id in graph.inputs.iter().copied().chain(constants) {
        check_axis_count(graph, id, &graph.value(id).ty).map_err(|error| Error::Graph(error.to_string()))?;
    }
    Ok(())
}

/// Checks that the product of sizes does not overflow. All later code may therefore multiply them.
fn check_size_overflow(graph: &Graph, id: ValueId, ty: &ValueType) -> Result<(), OpError> {
    check_axis_count(graph, id, ty)?;
    let ValueType::Tensor(dtype, Some(shape)) = ty else { return Ok(()) };
    let dims: Option<Dims> = shape.iter().map(Dim::known).collect();
    let Some(dims) = dims else { return Ok(()) };
    let outcome = ortrain_graph::byte_length(*dtype, &dims);
    outcome.map(|_| ()).map_err(|error| OpError::invalid(format!("{:?}: {error}", graph.name_of(id))))
}

/// Merges a declared and an inferred type. A declared shape that contradicts the inferred shape is ignored.
///
/// # Errors
/// Returns both types if their element types contradict each other.
pub(crate) fn merge_advised(
    declared: &ValueType,
    inferred: ValueType,
) -> Result<ValueType, Box<(ValueType, ValueType)>> {
    match (declared, &inferred) {
        (ValueType::Tensor(a, Some(_)), ValueType::Tensor(b, Some(_))) if a == b => {
            Ok(merge_types(declared, inferred.clone()).unwrap_or(inferred))
        }
        _ => merge_types(declared, inferred),
    }
}

/// Merges two types of one value: each may have information that the other does not have.
///
/// # Errors
/// Returns both types if they contradict each other.
pub(crate) fn merge_types(
    declared: &ValueType,
    inferred: ValueType,
) -> Result<ValueType, Box<(ValueType, ValueType)>> {
    match (declared, &inferred) {
        (ValueType::Unknown, _) => Ok(inferred),
        (_, ValueType::Unknown) => Ok(declared.clone()),
        (ValueType::Tensor(a, from), ValueType::Tensor(b, to)) if a == b => match (from, to) {
            (_, None) => Ok(declared.clone()),
            (None, _) => Ok(inferred),
            (Some(from), Some(to)) if from.rank() == to.rank() => {
                let contradiction = from
                    .iter()
                    .zip(to.iter())
                    .any(|(x, y)| matches!((x.known(), y.known()), (Some(x), Some(y)) if x != y));
                if contradiction {
                    return Err(Box::new((declared.clone(), inferred)));
                }
                let dims = from.iter().zip(to.iter()).map(|(x, y)| {
                    if y.known().is_some() {
                        y
                    } else if x.known().is_some() {
                        x
                    } else {
                        y
                    }
                });
                Ok(ValueType::Tensor(*a, Some(dims.cloned().collect())))
            }
            _ => Err(Box::new((declared.clone(), inferred))),
        },
        (ValueType::Sequence(a), ValueType::Sequence(b)) if a == b => Ok(inferred),
        _ => Err(Box::new((declared.clone(), inferred))),
    }
}

#[cfg(test)]
mod tests {
    use ortrain_graph::{Attrs, DType, Tensor, ValueType};

    use super::*;
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
