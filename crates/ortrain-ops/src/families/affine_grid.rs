//! Sampling coordinates from affine matrices: `AffineGrid`.
//!
//! AffineGrid-20 of ONNX (<https://onnx.ai/onnx/operators/onnx__AffineGrid.html>). Each pixel of an image, or voxel of
//! a volume, has coordinates between -1 and 1. These are multiplied by one matrix for each item of the batch. The
//! result is a grid for GridSample.
//!
//! The operator is a composition: a sum over the columns of the matrices, computed in float32 or wider. An axis of size
//! 1 has coordinate 0 if corners are aligned, as in PyTorch (the standard's reference divides by zero there).

use ortrain_graph::{DType, Dim, Graph, Node, Shape, Tensor, ValueId, ValueType};

use crate::OpError;
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::sample::Sample;
use crate::support::casts::arithmetic_dtype;
use crate::support::sizes::{
    Size, add_op, as_number, cast, dtype_of, range_positions, reshape_to, scalar_constant, shape_of,
    slice_axis, subtract_sizes,
};

const THETA: usize = 0;
const SIZE: usize = 1;

struct AffineGrid;

/// Returns the number of spatial axes, from the shape of the matrices.
fn axis_count(theta: &Shape) -> Result<usize, OpError> {
    let wrong = || {
        OpError::invalid(format!("input 0 (matrices) must have shape [N, 2, 3] or [N, 3, 4], got {theta}"))
    };
    let [_, rows, columns] = &theta[..] else { return Err(wrong()) };
    let axes = rows.known().or(columns.known().and_then(|columns| columns.checked_sub(1)));
    match axes {
        Some(axes @ (2 | 3)) if columns.known().is_none_or(|columns| columns == axes + 1) => Ok(axes),
        Some(_) => Err(wrong()),
        None => Err(OpError::unsupported("the shape of the matrices must be known; declare it in the model")),
    }
}

impl Op for AffineGrid {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 1)?;
        let dtype = cx.expect_dtype(THETA, "a float type", DType::is_float)?;
        cx.expect_dtype(SIZE, "int64", |dtype| dtype == DType::I64)?;
        if let Some(bad) = cx.ints(SIZE).and_then(|sizes| sizes.into_iter().find(|&size| size < 0)) {
            return Err(OpError::invalid(format!("sizes in input 1 must be at least 0, got {bad}")));
        }
        if let Some(shape) = cx.shape(SIZE).filter(|shape| shape.rank() != 1) {
            return Err(OpError::invalid(format!("input 1 (sizes) must be a vector, got shape {shape}")));
        }
        let Some(theta) = cx.shape(THETA) else {
            cx.set_output(0, dtype, None);
            return Ok(());
        };
        let axes = axis_count(theta)?;
        let sizes = cx.sizes(SIZE);
        let size_count = sizes.as_ref().map(Vec::len).or_else(|| cx.shape(SIZE)?.first()?.known());
        if let Some(actual) = size_count.filter(|&count| count != axes + 2) {
            return Err(OpError::invalid(format!(
                "input 1 has {actual} sizes; matrices of shape {theta} need sizes of N, C and {axes} spatial axes"
            )));
        }
        if let (Some(batch), Some(sizes)) = (theta[0].known(), &sizes)
            && let Some(other) = sizes[0].known().filter(|&other| other != batch)
        {
            return Err(OpError::invalid(format!(
                "input 0 has {batch} matrices, but input 1 has batch size {other}"
            )));
        }
        let size = |axis: usize| match &sizes {
            Some(sizes) => sizes[2 + axis].clone(),
            None => cx.unknown_dim(0, 1 + axis),
        };
        let shape: Shape = std::iter::once(theta[0].clone())
            .chain((0..axes).map(size))
            .chain(std::iter::once(Dim::Known(axes)))
            .collect();
        cx.set_output(0, dtype, Some(shape));
        Ok(())
    }
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let aligned = rw.attrs().int("align_corners")?.unwrap_or(0) != 0;
    let (theta, size) = (rw.required_input(THETA)?, rw.required_input(SIZE)?);
    let axes = axis_count(&shape_of(rw, theta, "the matrices")?)?;
    let dtype = dtype_of(rw, theta, "the matrices")?;
    let ty = arithmetic_dtype(dtype);
    let theta = cast(rw, theta, dtype, ty);
    let known = rw.constant_of(size).and_then(Tensor::to_i64);
    // One column of all matrices: `[N, 1, ..., 1, axes]`.
    let column = |rw: &mut Rewrite<'_>, k: usize| {
        let column = slice_axis(rw, theta, 2, k as i64, k as i64 + 1, 1);
        let mut shape = vec![Size::Number(1); axes + 2];
        (shape[0], shape[axes + 1]) = (Size::SameAxis, Size::Number(axes as i64));
        reshape_to(rw, column, &shape)
    };
    let mut sum: ValueId = column(rw, axes);
    for axis in 0..axes {
        let at = 2 + axis as i64;
        let count = match known.as_ref().and_then(|known| known.get(2 + axis)) {
            Some(&count) => Size::Number(count),
            None => Size::Value(slice_axis(rw, size, 0, at, at + 1, 1)),
        };
        // Coordinate: twice the distance from the middle, in steps, over the number of steps.
        let indices = range_positions(rw, count);
        let index_values = cast(rw, indices, DType::I64, ty);
        let two = scalar_constant(rw, ty, 2.0);
        let twice = add_op(rw, "Mul", &[index_values, two]);
        let steps = subtract_sizes(rw, count, Size::Number(1));
        let steps = as_number(rw, steps, ty);
        let from_middle = add_op(rw, "Sub", &[twice, steps]);
        let interval_count = if aligned {
            let one = scalar_constant(rw, ty, 1.0);
            add_op(rw, "Max", &[steps, one])
        } else {
            as_number(rw, count, ty)
        };
        let coordinates = add_op(rw, "Div", &[from_middle, interval_count]);
        let later_axes: Vec<i64> = (1..=(axes - axis) as i64).collect();
        let axis_coordinates = crate::support::sizes::insert_axes(rw, coordinates, &later_axes);
        // The first column belongs to the last axis.
        let column = column(rw, axes - 1 - axis);
        let product = add_op(rw, "Mul", &[axis_coordinates, column]);
        sum = add_op(rw, "Add", &[sum, product]);
    }
    let result = cast(rw, sum, ty, dtype);
    rw.replace_output(0, result);
    Ok(())
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    node.attrs.int("align_corners")?;
    Ok(Box::new(AffineGrid))
}

/// Decomposes the operator for opsets before 20.
fn downgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() < 20 { decompose(rw) } else { Ok(()) }
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![Definition::new("", "AffineGrid", &[20], build).composition(decompose).downgrade(downgrade).sample(
        |_| {
            let (theta, size) =
                (ValueType::tensor(DType::F32, &[1, 2, 3]), ValueType::tensor(DType::I64, &[4]));
            Sample { inputs: vec![Some(theta), Some(size)], ..Sample::default() }
        },
    )]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::Attrs;

    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, assert_close, check_decomposition, check_downgrade, check_gradients, f64s, generic_tensor,
        graph, one_node_graph, run, run_node,
    };

    const OP: (&str, &str) = ("", "AffineGrid");

    /// Computes the grid by the definition.
    fn expected(theta: &Tensor, size: &[usize], aligned: bool) -> Tensor {
        let axes = size.len() - 2;
        let position = |k: usize, count: usize| match aligned {
            true if count == 1 => 0.0,
            true => -1.0 + 2.0 * k as f64 / (count - 1) as f64,
            false => -1.0 + (2 * k + 1) as f64 / count as f64,
        };
        let elements = theta.to_f64();
        let points: usize = size[2..].iter().product();
        let mut result = Vec::new();
        for n in 0..size[0] {
            for point in 0..points {
                // The last axis comes first. The 1 for the translation comes last.
                let (mut rest, mut coordinates) = (point, Vec::new());
                for &count in size[2..].iter().rev() {
                    coordinates.push(position(rest % count, count));
                    rest /= count;
                }
                coordinates.push(1.0);
                for row in 0..axes {
                    let row = &elements[(n * axes + row) * (axes + 1)..][..axes + 1];
                    result.push(row.iter().zip(&coordinates).map(|(a, b)| a * b).sum());
                }
            }
        }
        let mut dims = vec![size[0]];
        dims.extend(&size[2..]);
        dims.push(axes);
        f64s(&dims, &result)
    }

    #[test]
    fn images_and_volumes() {
        for (size, aligned) in [
            (vec![2, 3, 4, 5], false),
            (vec![2, 3, 4, 5], true),
            (vec![1, 1, 2, 1, 3], true),
            (vec![1, 1, 2, 1, 3], false),
        ] {
            let axes = size.len() - 2;
            let theta = generic_tensor(&[size[0], axes, axes + 1], 1);
            let numbers: Vec<i64> = size.iter().map(|&size| size as i64).collect();
            let inputs = [theta.clone(), Tensor::i64(&[size.len()], &numbers)];
            let ports = [Some(&inputs[0]), Some(&inputs[1])];
            let attrs = Attrs::new().with("align_corners", i64::from(aligned));
            let graph = one_node_graph(NEWEST_OPSET, OP, &ports, 1, attrs).expect("valid");
            assert_close(
                &run(&graph, &inputs).expect("it runs")[0],
                &expected(&theta, &size, aligned),
                1e-15,
            );
            check_gradients(&graph, &inputs, &[0], &[0]);
            check_decomposition(&graph, &inputs, 0.0);
            assert_eq!(check_downgrade(&graph, &inputs, 20).nodes.len(), 1);
            check_downgrade(&graph, &inputs, 11);
        }
    }

    #[test]
    fn constant_sizes() {
        let theta = generic_tensor(&[2, 2, 3], 3);
        let (mut known, ids) = graph(&[&theta]);
        let size = known.add_constant("size", Tensor::i64(&[4], &[2, 1, 3, 2]));
        crate::testing::add(&mut known, OP, "y", &[Some(ids[0]), Some(size)], 1, Attrs::new());
        crate::passes::infer::infer(&mut known).expect("valid");
        let inputs = [theta.clone()];
        assert_close(
            &run(&known, &inputs).expect("it runs")[0],
            &expected(&theta, &[2, 1, 3, 2], false),
            1e-15,
        );
        check_gradients(&known, &inputs, &[0], &[0]);
    }

    #[test]
    fn rejects_mismatched_inputs() {
        for (theta, size, message) in [
            (vec![2, 2, 2], vec![2, 1, 3, 3], "must have shape [N, 2, 3] or [N, 3, 4], got [2, 2, 2]"),
            (vec![2, 2, 3], vec![2, 1, 3, 3, 3], "input 1 has 5 sizes"),
            (vec![2, 2, 3], vec![3, 1, 3, 3], "input 0 has 2 matrices, but input 1 has batch size 3"),
            (vec![2, 2, 3], vec![2, 1, -3, 3], "sizes in input 1 must be at least 0, got -3"),
        ] {
            let size = Tensor::i64(&[size.len()], &size);
            let failure = run_node(OP, &[Some(&generic_tensor(&theta, 1)), Some(&size)], 1, Attrs::new());
            let Failure::Prepare(error) = failure.expect_err("refused") else { panic!("prepared") };
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}
