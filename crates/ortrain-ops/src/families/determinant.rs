//! Determinant of square matrices: `Det`.
//!
//! Det-11 and 22 of ONNX (<https://onnx.ai/onnx/operators/onnx__Det.html>); 22 adds bfloat16. The operator is a
//! composition: unrolled Gaussian elimination with complete pivoting, computed in float32 or wider. The result is the
//! product of the pivots, with the sign of the permutation. A zero pivot is never a divisor.
//!
//! The gradient is therefore correct for singular matrices, too. It is the matrix of cofactors, which is zero only if
//! two pivots are zero. (PyTorch returns zeros.)
//!
//! Limits: the size of the matrices must be known, and at most 64.

use ortrain_graph::{Attrs, DType, Graph, Node, Shape, Tensor, ValueId};

use crate::OpError;
use crate::infer::Infer;
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::casts::arithmetic_dtype;
use crate::support::formula::formula;
use crate::support::sizes::{
    Size, add_op, cast, dtype_of, insert_axes, reduce_sum_axes, remove_axes, reshape_to, scalar_constant,
    shape_of,
};

/// Maximum size of a matrix: each step of the elimination consists of separate nodes.
const MAX_SIZE: usize = 64;

struct Det;

/// Returns the size of the matrices.
fn matrix_size(shape: &Shape) -> Result<Option<usize>, OpError> {
    let [.., rows, columns] = &shape[..] else {
        return Err(OpError::invalid(format!("input 0 must contain matrices, got shape {shape}")));
    };
    match (rows.known(), columns.known()) {
        (Some(rows), Some(columns)) if rows != columns => {
            Err(OpError::invalid(format!("input 0 must contain square matrices, got shape {shape}")))
        }
        (rows, columns) => Ok(rows.or(columns)),
    }
}

impl Op for Det {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(1, 1, 1)?;
        let dtype = cx.expect_dtype(0, "a float type", DType::is_float)?;
        let shape = cx.shape(0);
        if let Some(size) = shape.map(matrix_size).transpose()?.flatten().filter(|&size| size > MAX_SIZE) {
            return Err(OpError::unsupported(format!(
                "matrices of size {size} are not supported; the maximum size is {MAX_SIZE}"
            )));
        }
        cx.set_output(0, dtype, shape.map(|shape| shape[..shape.rank() - 2].iter().cloned().collect()));
        Ok(())
    }
}

/// Returns the number of inversions of the permutation `pivots` of row or column indices. `pivots` has shape
/// `[..., steps]`.
fn count_inversions(rw: &mut Rewrite<'_>, pivots: ValueId, rank: usize, size: usize) -> ValueId {
    let last = rank as i64 - 1;
    let (earlier, later) = (insert_axes(rw, pivots, &[last]), insert_axes(rw, pivots, &[last - 1]));
    // Element `[j, i]`: true if the index of step i is larger than the index of step j.
    let swapped = add_op(rw, "Less", &[later, earlier]);
    let is_later: Vec<u8> = (0..size * size).map(|k| u8::from(k % size > k / size)).collect();
    let is_later_mask = rw.constant("behind", Tensor::from_slice(DType::Bool, &[size, size], &is_later));
    let counted = add_op(rw, "And", &[swapped, is_later_mask]);
    let counted = cast(rw, counted, DType::Bool, DType::I64);
    reduce_sum_axes(rw, counted, &[last - 1, last])
}

fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let x = rw.required_input(0)?;
    let shape = shape_of(rw, x, "the matrices")?;
    let rank = shape.rank();
    let size = matrix_size(&shape)?.ok_or_else(|| {
        OpError::unsupported("the size of the matrices must be known; declare it in the model")
    })?;
    let dtype = dtype_of(rw, x, "the matrices")?;
    let ty = arithmetic_dtype(dtype);
    let (row_axis, column_axis) = (rank as i64 - 2, rank as i64 - 1);
    let reduce = |rw: &mut Rewrite<'_>, op: &str, value: ValueId, axes: &[i64], keep: bool| {
        let axes = rw.ints("axes", axes);
        rw.add(op, &[value, axes], Attrs::new().with("keepdims", i64::from(keep)))
    };
    let mut rest = cast(rw, x, dtype, ty);
    if size < 2 {
        // One element, or an empty product.
        let result = reduce(rw, "ReduceProd", rest, &[row_axis, column_axis], false);
        let result = cast(rw, result, ty, dtype);
        rw.replace_output(0, result);
        return Ok(());
    }
    let (zero, one, minus_one) =
        (scalar_constant(rw, ty, 0.0), scalar_constant(rw, ty, 1.0), scalar_constant(rw, ty, -1.0));
    let width = rw.constant("width", Tensor::i64(&[], &[size as i64]));
    let numbers: Vec<i64> = (0..size as i64).collect();
    let (rows, columns) = (Tensor::i64(&[size, 1], &numbers), Tensor::i64(&[1, size], &numbers));
    let (rows, columns) = (rw.constant("rows", rows), rw.constant("columns", columns));
    let mut flat = vec![Size::SameAxis; rank - 2];
    flat.push(Size::Number((size * size) as i64));

    // Mask of the elements in remaining rows and columns; `None`: all elements.
    let mut left: Option<ValueId> = None;
    let (mut pivots, mut pivot_rows, mut pivot_columns) = (Vec::new(), Vec::new(), Vec::new());
    for step in 0..size {
        let mut sizes = add_op(rw, "Abs", &[rest]);
        if let Some(left) = left {
            sizes = add_op(rw, "Where", &[left, sizes, minus_one]);
        }
        let sizes = reshape_to(rw, sizes, &flat);
        let attrs = Attrs::new().with("axis", -1i64).with("keepdims", 1i64);
        let at = rw.add("ArgMax", &[sizes], attrs);
        let p = add_op(rw, "Div", &[at, width]);
        let q = formula(rw, [at, p, width], |[at, p, width]| at - p * width);
        let (of_row, of_column) = (insert_axes(rw, p, &[column_axis]), insert_axes(rw, q, &[column_axis]));
        let (in_row, in_column) =
            (add_op(rw, "Equal", &[of_row, rows]), add_op(rw, "Equal", &[of_column, columns]));
        let chosen = add_op(rw, "Where", &[in_row, rest, zero]);
        let row = reduce(rw, "ReduceSum", chosen, &[row_axis], true);
        let chosen = add_op(rw, "Where", &[in_column, row, zero]);
        let pivot = reduce(rw, "ReduceSum", chosen, &[column_axis], true);
        pivots.push(pivot);
        pivot_rows.push(p);
        pivot_columns.push(q);
        if step + 1 == size {
            break;
        }
        let chosen = add_op(rw, "Where", &[in_column, rest, zero]);
        let column = reduce(rw, "ReduceSum", chosen, &[column_axis], true);
        // If the largest element is zero, all remaining elements are zero and nothing is eliminated.
        let product = formula(rw, [column, row, pivot, zero, one], |[column, row, pivot, zero, one]| {
            column * (row / pivot.equals(zero).choose(one, pivot))
        });
        let difference = add_op(rw, "Sub", &[rest, product]);
        let gone = add_op(rw, "Or", &[in_row, in_column]);
        let mut still = add_op(rw, "Not", &[gone]);
        if let Some(left) = left {
            still = add_op(rw, "And", &[left, still]);
        }
        rest = add_op(rw, "Where", &[still, difference, zero]);
        left = Some(still);
    }
    let joined =
        |rw: &mut Rewrite<'_>, parts: &[ValueId]| rw.add("Concat", parts, Attrs::new().with("axis", -1i64));
    let pivots = joined(rw, &pivots);
    let product = reduce(rw, "ReduceProd", pivots, &[column_axis], false);
    let product = remove_axes(rw, product, &[row_axis]);
    let orders = [pivot_rows, pivot_columns].map(|steps| {
        let order = joined(rw, &steps);
        count_inversions(rw, order, rank, size)
    });
    let swaps = add_op(rw, "Add", &orders);
    let two = rw.constant("two", Tensor::i64(&[], &[2]));
    let odd = formula(rw, [swaps, two], |[swaps, two]| swaps - swaps / two * two);
    let odd = cast(rw, odd, DType::I64, DType::Bool);
    let result = formula(rw, [odd, product], |[odd, product]| odd.choose(-product, product));
    let result = cast(rw, result, ty, dtype);
    rw.replace_output(0, result);
    Ok(())
}

fn build(_: &Graph, _: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Det))
}

/// Decomposes the operator for opsets before 11.
fn downgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() < 11 { decompose(rw) } else { Ok(()) }
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "Det", &[11, 22], build)
            .composition(decompose)
            .downgrade(downgrade)
            .later_types(&[(22, &[DType::BF16])]),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, assert_close, cast_tensor, check_decomposition, check_downgrade, check_gradients, f64s,
        generic_tensor, gradient_graph, one_node_graph, run, run_node,
    };

    const OP: (&str, &str) = ("", "Det");

    /// Computes a determinant by expansion along the first row.
    fn cofactor_determinant(matrix: &[f64], size: usize) -> f64 {
        if size == 0 {
            return 1.0;
        }
        let minor =
            |column: usize| cofactor_determinant(&remove_row_and_column(matrix, size, 0, column), size - 1);
        (0..size).map(|k| matrix[k] * minor(k) * if k % 2 == 0 { 1.0 } else { -1.0 }).sum()
    }

    /// Returns a matrix without one row and one column.
    fn remove_row_and_column(matrix: &[f64], size: usize, row: usize, column: usize) -> Vec<f64> {
        let is_retained = |&(k, _): &(usize, &f64)| k / size != row && k % size != column;
        matrix.iter().enumerate().filter(is_retained).map(|(_, &x)| x).collect()
    }

    #[test]
    fn determinants_and_their_gradients() {
        for dims in [vec![0, 0], vec![1, 1], vec![2, 2], vec![3, 2, 2], vec![2, 1, 4, 4], vec![5, 5]] {
            let size = dims[dims.len() - 1];
            let x = generic_tensor(&dims, 3);
            let each: Vec<f64> = match size {
                0 => vec![1.0],
                _ => {
                    x.to_f64().chunks(size * size).map(|matrix| cofactor_determinant(matrix, size)).collect()
                }
            };
            let graph = one_node_graph(NEWEST_OPSET, OP, &[Some(&x)], 1, Attrs::new()).expect("valid");
            let inputs = [x.clone()];
            let expected = f64s(&dims[..dims.len() - 2], &each);
            assert_close(&run(&graph, &inputs).expect("it runs")[0], &expected, 1e-13);
            check_gradients(&graph, &inputs, &[0], &[0]);
            check_decomposition(&graph, &inputs, 0.0);
            assert_eq!(check_downgrade(&graph, &inputs, 11).nodes.len(), 1);
            check_downgrade(&graph, &inputs, 9);
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let narrow = cast_tensor(&x, dtype);
                let got = run_node(OP, &[Some(&narrow)], 1, Attrs::new()).expect("it runs").remove(0);
                let tolerance = if dtype == DType::F32 { 1e-5 } else { 0.2 };
                assert_close(&got, &cast_tensor(&expected, dtype), tolerance);
            }
        }
        let empty = Tensor::filled(DType::F64, &[0, 3, 3], 1.0);
        assert_eq!(run_node(OP, &[Some(&empty)], 1, Attrs::new()).expect("it runs")[0].dims(), [0]);
    }

    /// The derivative is the matrix of cofactors, for any rank.
    #[test]
    fn singular_matrices_have_gradients() {
        for (size, matrix) in [
            (2, vec![1.0, 2.0, 2.0, 4.0]),
            (2, vec![0.0, 1.0, 0.0, 2.0]),
            (2, vec![0.0; 4]),
            (3, vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0]),
            (3, vec![0.0, 0.0, 3.0, 0.0, 0.0, 6.0, 0.0, 2.0, 9.0]),
            (3, vec![1.0, 2.0, 3.0, 2.0, 4.0, 6.0, -1.0, -2.0, -3.0]),
            (4, vec![1., 0., 0., 0., 0., 1., 0., 0., 0., 0., 1., 0., 0., 0., 0., 0.]),
        ] {
            let x = f64s(&[size, size], &matrix);
            let graph = one_node_graph(NEWEST_OPSET, OP, &[Some(&x)], 1, Attrs::new()).expect("valid");
            let gradient = gradient_graph(&graph, &[Some(f64s(&[], &[2.0]))], &[0]);
            let got = run(&gradient, &[x]).expect("it runs").remove(0);
            let cofactor = |k: usize| {
                let (row, column) = (k / size, k % size);
                let sign = if (row + column) % 2 == 0 { 2.0 } else { -2.0 };
                sign * cofactor_determinant(&remove_row_and_column(&matrix, size, row, column), size - 1)
            };
            let expected: Vec<f64> = (0..size * size).map(cofactor).collect();
            assert_close(&got, &f64s(&[size, size], &expected), 1e-12);
        }
    }

    #[test]
    fn large_matrices_and_nan() {
        let size = 24;
        let upper: Vec<f64> = (0..size * size)
            .map(|k| match (k / size).cmp(&(k % size)) {
                std::cmp::Ordering::Equal => -1.0 - 1.0 / (1 + k) as f64,
                std::cmp::Ordering::Less => (k as f64).sin(),
                std::cmp::Ordering::Greater => 0.0,
            })
            .collect();
        let expected: f64 = (0..size).map(|k| upper[k * size + k]).product();
        let got = run_node(OP, &[Some(&f64s(&[size, size], &upper))], 1, Attrs::new()).expect("it runs");
        assert_close(&got[0], &f64s(&[], &[expected]), 1e-12);
        let odd = f64s(&[2, 2], &[f64::NAN, 1.0, 2.0, 3.0]);
        assert!(run_node(OP, &[Some(&odd)], 1, Attrs::new()).expect("it runs")[0].to_f64()[0].is_nan());
    }

    #[test]
    fn rejects_invalid_shapes() {
        for (dims, message) in [
            (vec![3], "input 0 must contain matrices"),
            (vec![2, 3], "input 0 must contain square matrices"),
            (vec![65, 65], "the maximum size is 64"),
        ] {
            let failure =
                run_node(OP, &[Some(&generic_tensor(&dims, 1))], 1, Attrs::new()).expect_err("refused");
            let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}
