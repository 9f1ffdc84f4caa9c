//! Indices of nonzero elements: `NonZero`.
//!
//! NonZero-9 and 13 of ONNX: NumPy's `nonzero` as one int64 tensor of shape `[rank, count]`. A scalar gives
//! `[0, count]`. NaN counts as nonzero. The count depends on values, so the operator runs on the host, and its
//! consumers are compiled when the count is known. The operator has no gradient.

use std::sync::Arc;

use ortrain_graph::{DType, Dim, Graph, Node, Shape, Tensor};
use ortrain_program::HostFunction;

use crate::OpError;
use crate::infer::Infer;
use crate::op::{Definition, Op, Placement};

struct NonZero;

impl Op for NonZero {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        cx.dtype(0)?;
        if let Some(dims) = cx.shape(0).and_then(Shape::concrete) {
            check_size(&dims).map_err(OpError::unsupported)?;
        }
        let rank = cx.shape(0).map_or_else(|| cx.unknown_dim(0, 0), |shape| Dim::Known(shape.rank()));
        let shape: Shape = [rank, cx.unknown_dim(0, 1)].into_iter().collect();
        cx.set_output(0, DType::I64, Some(shape));
        Ok(())
    }

    fn placement(&self) -> Placement {
        Placement::Host(Arc::new(NonZeroHost))
    }
}

/// Maximum number of input elements. Their indices need up to half a gigabyte for each axis.
const MAX_ELEMENTS: usize = 1 << 26;

fn check_size(dims: &[usize]) -> Result<(), String> {
    let count = dims.iter().try_fold(1usize, |count, &dim| count.checked_mul(dim));
    if count.is_some_and(|count| count <= MAX_ELEMENTS) {
        return Ok(());
    }
    Err(format!(
        "an input of shape {dims:?} is too large, at most {MAX_ELEMENTS} elements are supported. Use Where to \
         choose between values without indices, or Slice to split the input"
    ))
}

/// Host function that finds the indices.
#[derive(Debug)]
struct NonZeroHost;

impl HostFunction for NonZeroHost {
    fn call(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>, String> {
        let [input] = inputs else {
            return Err(format!("expected one tensor, got {}", inputs.len()));
        };
        let dims = input.dims();
        check_size(dims)?;
        let nonzero_indices: Vec<usize> =
            input.to_f64().iter().enumerate().filter(|&(_, &x)| x != 0.0).map(|(at, _)| at).collect();
        let mut indices = Vec::with_capacity(dims.len() * nonzero_indices.len());
        let mut step: usize = dims.iter().product();
        for &dim in dims {
            // With an axis of size 0 no index exists.
            step = step.checked_div(dim).unwrap_or(0);
            indices.extend(nonzero_indices.iter().map(|at| (at / step % dim) as i64));
        }
        Ok(vec![Tensor::i64(&[dims.len(), nonzero_indices.len()], &indices)])
    }
}

fn build(_: &Graph, _: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(NonZero))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![Definition::new("", "NonZero", &[9, 13], build).inputs_without_gradient(&[0])]
}

#[cfg(test)]
mod tests {
    use super::*;
    use ortrain_graph::{Attrs, ValueId};

    use crate::testing::{add, graph, run, run_node};

    #[track_caller]
    fn indices(input: &Tensor) -> Tensor {
        run_node(("", "NonZero"), &[Some(input)], 1, Attrs::new()).expect("the graph runs").remove(0)
    }

    #[test]
    fn finds_indices_in_row_major_order() {
        let x = Tensor::f32(&[2, 3], &[0.0, 1.0, f32::NAN, -2.0, -0.0, 0.5]);
        assert_eq!(indices(&x), Tensor::i64(&[2, 4], &[0, 0, 1, 1, 1, 2, 0, 2]));
        let flags = Tensor::from_slice(DType::Bool, &[3], &[0u8, 1, 1]);
        assert_eq!(indices(&flags), Tensor::i64(&[1, 2], &[1, 2]));
        assert_eq!(indices(&Tensor::i64(&[2, 2], &[0; 4])), Tensor::i64(&[2, 0], &[]));
        assert_eq!(indices(&Tensor::f32(&[0, 3], &[])), Tensor::i64(&[2, 0], &[]));
        assert_eq!(indices(&Tensor::f32(&[], &[4.0])), Tensor::i64(&[0, 1], &[]));
    }

    #[test]
    fn consumers_are_compiled_for_the_count() {
        // x[nonzero(mask)] by Gather, then a map, a reduction, and a ConstantOfShape with a computed shape.
        let (mask, x) = (Tensor::f32(&[4], &[0.0; 4]), Tensor::f32(&[4, 2], &[0.0; 8]));
        let (mut graph, ids) = graph(&[&mask, &x]);
        let add_single = |graph: &mut Graph, op: &str, name: &str, inputs: &[ValueId], attrs: Attrs| {
            let inputs: Vec<_> = inputs.iter().copied().map(Some).collect();
            add(graph, ("", op), name, &inputs, 1, attrs)[0]
        };
        let doubled = add_single(&mut graph, "Add", "doubled", &[ids[1], ids[1]], Attrs::new());
        let indices = add_single(&mut graph, "NonZero", "found", &[ids[0]], Attrs::new());
        let flat = graph.add_constant("flat", Tensor::i64(&[1], &[-1]));
        let rows = add_single(&mut graph, "Reshape", "rows", &[indices, flat], Attrs::new());
        let picked = add_single(&mut graph, "Gather", "picked", &[doubled, rows], Attrs::new());
        let sum = add_single(&mut graph, "ReduceSum", "sum", &[picked], Attrs::new().with("keepdims", 0i64));
        let shape = add_single(&mut graph, "Shape", "shape", &[rows], Attrs::new());
        let filled = add_single(&mut graph, "ConstantOfShape", "filled", &[shape], Attrs::new());
        graph.outputs = vec![picked, sum, filled];
        let x = Tensor::f32(&[4, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
        for (mask, expected) in [
            ([0.0, 1.0, 0.0, 1.0], &[6.0, 8.0, 14.0, 16.0][..]),
            ([1.0, 0.0, 0.0, 0.0], &[2.0, 4.0]),
            ([0.0; 4], &[]),
        ] {
            let got = run(&graph, &[Tensor::f32(&[4], &mask), x.clone()]).expect("the graph runs");
            let expected_f32: Vec<f32> = expected.iter().map(|&x| x as f32).collect();
            assert_eq!(got[0], Tensor::f32(&[expected.len() / 2, 2], &expected_f32));
            assert_eq!(got[1].to_f64(), [expected.iter().sum::<f64>()]);
            assert_eq!(got[2].dims(), [expected.len() / 2]);
        }
    }

    #[test]
    fn constants_are_folded() {
        let x = Tensor::f32(&[2], &[0.0; 2]);
        let (mut graph, ids) = graph(&[&x]);
        let mask = graph.add_constant("mask", Tensor::f32(&[3], &[1.0, 0.0, 2.0]));
        let indices = add(&mut graph, ("", "NonZero"), "found", &[Some(mask)], 1, Attrs::new())[0];
        let shape = add(&mut graph, ("", "Shape"), "shape", &[Some(indices)], 1, Attrs::new())[0];
        let y = add(&mut graph, ("", "Expand"), "y", &[Some(ids[0]), Some(shape)], 1, Attrs::new())[0];
        graph.outputs = vec![y];
        let schedule = crate::Specialiser::new(graph.clone(), vec![crate::Role::User]);
        let schedule = schedule.schedule(std::slice::from_ref(&x)).expect("it compiles");
        assert!(schedule.single_program().is_some(), "{}", schedule.schedule());
        assert_eq!(run(&graph, &[x]).expect("the graph runs")[0].dims(), [1, 2]);
    }
}
