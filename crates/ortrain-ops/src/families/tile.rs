//! Repetition along every axis.
//!
//! Tile-6, 13 of ONNX (<https://onnx.ai/onnx/operators/onnx__Tile.html>): axis `k` of the result repeats axis `k` of
//! the input `repeats[k]` times. The gradient sums over the copies.

use ortrain_expr::Access;
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape};

use crate::OpError;
use crate::class::Traits;
use crate::grad::Grad;
use crate::infer::Infer;
use crate::lower::Lower;
use crate::op::{Definition, Op};

struct Tile;

impl Op for Tile {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 1)?;
        let dtype = cx.dtype(0)?;
        cx.expect_dtype(1, "int64", |dtype| dtype == DType::I64)?;
        let repeats = cx.ints(1);
        let shape = match (cx.shape(0), &repeats) {
            (Some(shape), Some(repeats)) => {
                if repeats.len() != shape.rank() || repeats.iter().any(|&count| count < 0) {
                    return Err(OpError::invalid(format!(
                        "repeats {repeats:?} must have one number of at least 0 for each axis of the input shape \
                         {shape}"
                    )));
                }
                let dim = |(axis, (dim, &count)): (usize, (&Dim, &i64))| match (dim.known(), count) {
                    (_, 1) => Ok(dim.clone()),
                    (_, 0) => Ok(Dim::Known(0)),
                    (Some(size), count) => {
                        size.checked_mul(count as usize).map(Dim::Known).ok_or_else(|| {
                            OpError::invalid(format!(
                                "axis {axis} of {size} elements cannot be repeated \
                                 {count} times, which is too large"
                            ))
                        })
                    }
                    (None, _) => Ok(cx.unknown_dim(0, axis)),
                };
                Some(shape.iter().zip(repeats).enumerate().map(dim).collect::<Result<Shape, _>>()?)
            }
            (Some(shape), None) => Some(cx.unknown_shape(0, shape.rank())),
            (None, _) => {
                let rank = cx.shape(1).and_then(|shape| shape.first().and_then(Dim::known));
                rank.map(|rank| cx.unknown_shape(0, rank))
            }
        };
        cx.set_output(0, dtype, shape);
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let (x, repeats) = (cx.input(0)?, cx.input(1)?);
        let Some(rank) = cx.shape(x).map(Shape::rank) else {
            return Err(OpError::unsupported("the rank of its input must be known"));
        };
        if rank == 0 {
            cx.set_grad(0, g);
            return Ok(());
        }
        // Splits every axis into the number of copies and the size of one.
        let sizes = cx.shape_of(x);
        let column = cx.ints("column", &[-1, 1]);
        let pairs = [repeats, sizes].map(|numbers| cx.add("Reshape", &[numbers, column], Attrs::new()));
        let pairs = cx.add("Concat", &pairs, Attrs::new().with("axis", 1i64));
        let flat = cx.ints("flat", &[-1]);
        let shape = cx.add("Reshape", &[pairs, flat], Attrs::new());
        let copies = cx.add("Reshape", &[g, shape], Attrs::new().with("allowzero", 1i64));
        let axes: Vec<i64> = (0..rank as i64).map(|axis| 2 * axis).collect();
        let axes = cx.ints("axes", &axes);
        let gradient = cx.add("ReduceSum", &[copies, axes], Attrs::new().with("keepdims", 0i64));
        cx.set_grad(0, gradient);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let (dims, out) = (cx.dims(0), cx.out_dims(0));
        if dims == out {
            cx.alias(0, 0);
            return Ok(());
        }
        let input_strides = Access::contiguous(cx.dtype(0), &dims).strides;
        let (mut space, mut strides) = (Vec::new(), Vec::new());
        for ((&size, &out_size), &stride) in dims.iter().zip(&out).zip(&input_strides) {
            let copies = out_size.checked_div(size).unwrap_or(0);
            if copies != 1 {
                space.push(copies);
                strides.push(0);
            }
            space.push(size);
            strides.push(stride);
        }
        let (input, output) = (cx.input(0), cx.output(0));
        let mut nest = cx.nest(&space, 0);
        let value = nest.load_strided(cx, input, 0, &strides);
        nest.store_contiguous(cx, output, value);
        cx.emit(nest.instruction())
    }
}

fn build(_: &Graph, _: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Tile))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "Tile", &[6, 13], build)
            .traits(Traits::MOVES.and(Traits::SHAPED_BY_INPUTS))
            .inputs_without_gradient(&[1]),
    ]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::Tensor;

    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, assert_close, check_gradients, f64s, generic_tensor, one_node_graph, run_node,
    };

    const TILE: (&str, &str) = ("", "Tile");

    #[test]
    fn copies_along_every_axis() {
        let x = f64s(&[2, 2], &[1.0, 2.0, 3.0, 4.0]);
        let repeats = Tensor::i64(&[2], &[1, 2]);
        let got =
            run_node(TILE, &[Some(&x), Some(&repeats)], 1, Attrs::new()).expect("the graph runs").remove(0);
        assert_close(&got, &f64s(&[2, 4], &[1.0, 2.0, 1.0, 2.0, 3.0, 4.0, 3.0, 4.0]), 0.0);
        let none = Tensor::i64(&[2], &[3, 0]);
        let got =
            run_node(TILE, &[Some(&x), Some(&none)], 1, Attrs::new()).expect("the graph runs").remove(0);
        assert_eq!(got.dims(), [6, 0]);
    }

    #[test]
    fn gradients() {
        for (dims, repeats) in
            [(&[2, 3][..], &[2, 3][..]), (&[3], &[1]), (&[], &[]), (&[2, 1, 2], &[1, 4, 2])]
        {
            let inputs = [generic_tensor(dims, 1), Tensor::i64(&[repeats.len()], repeats)];
            let ports = [Some(&inputs[0]), Some(&inputs[1])];
            let graph = one_node_graph(NEWEST_OPSET, TILE, &ports, 1, Attrs::new()).expect("valid");
            check_gradients(&graph, &inputs, &[0], &[0]);
        }
    }

    #[test]
    fn rejects_mismatched_repeats() {
        for repeats in [&[2][..], &[1, -1], &[1, 1, 1]] {
            let repeats = Tensor::i64(&[repeats.len()], repeats);
            let failure =
                run_node(TILE, &[Some(&generic_tensor(&[2, 2], 1)), Some(&repeats)], 1, Attrs::new());
            let Failure::Prepare(error) = failure.expect_err("refused") else { panic!("prepared") };
            assert!(error.to_string().contains("each axis of the input shape [2, 2]"), "{error}");
        }
    }
}
