//! Gather of rows by index, and its gradient, a scatter-add.
//!
//! Sources: ONNX Gather-1, 11, 13; `GatherGrad` and `ShrunkenGather` of `com.microsoft`. The inputs of `GatherGrad` are
//! the shape of the data, the indices, and the gradient of the gathered rows; the gradients of equal indices are added.
//! `ShrunkenGather` is a Gather with no more result rows than data rows.
//!
//! Negative indices count from the end. Any other index out of range is an error of the run, and nothing is committed.
//! float16 and bfloat16 are summed in float32. This module also has the helpers that other gathers and scatters share.

use ortrain_expr::Type;
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId};
use ortrain_program::{Instruction, ScatterAdd};

use crate::OpError;
use crate::class::{Class, Traits};
use crate::grad::Grad;
use crate::infer::{Infer, normalize_axis};
use crate::lower::{Lower, split_at_axis};
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::rows::{
    check_indices, constant_row_stride, convert_to_accumulation, emit_copy, emit_fill, guard_indices,
    wrap_negative_index,
};

/// Gather: row `index[j]` of an axis for each `j`.
struct Gather {
    axis: i64,
}

/// Gradient of [`Gather`].
struct GatherGrad {
    axis: i64,
}

/// Returns the shape of the gathered result.
fn gathered_shape(data: &Shape, indices: &Shape, axis: usize) -> Shape {
    data[..axis].iter().chain(indices.iter()).chain(&data[axis + 1..]).cloned().collect()
}

impl Op for Gather {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 1)?;
        let dtype = cx.dtype(0)?;
        let axis = cx.shape(0).map(|data| normalize_axis(self.axis, data.rank())).transpose()?;
        check_indices(cx, 1, axis.and_then(|axis| cx.shape(0).map(|data| &data[axis])))?;
        let (Some(data), Some(axis), Some(indices)) = (cx.shape(0), axis, cx.shape(1)) else {
            cx.set_output(0, dtype, None);
            return Ok(());
        };
        cx.set_output(0, dtype, Some(gathered_shape(data, indices, axis)));
        // Propagates sizes through chains of Shape, Gather, Concat and Reshape.
        if let (DType::I64, 1, Some(sizes), true, Some(picked)) =
            (dtype, data.rank(), cx.sizes(0), indices.rank() <= 1, cx.constant(1).and_then(Tensor::to_i64))
        {
            let count = sizes.len() as i64;
            let pick = |index: i64| {
                let normal = if index < 0 { index + count } else { index };
                usize::try_from(normal).ok().and_then(|at| sizes.get(at).cloned())
            };
            cx.set_output_sizes(0, picked.into_iter().map(pick).collect());
        }
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let (data, indices) = (cx.input(0)?, cx.input(1)?);
        let shape = cx.shape_of(data);
        let attrs = Attrs::new().with("axis", self.axis);
        let gradient = cx.add_in("com.microsoft", "GatherGrad", &[shape, indices, g], attrs);
        cx.set_grad(0, gradient);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let dims = cx.dims(0);
        let axis = normalize_axis(self.axis, dims.len())?;
        let (before, rows, after) = split_at_axis(&dims, axis);
        let count: usize = cx.dims(1).iter().product();
        let (data, indices, output) = (cx.input(0), cx.input(1), cx.output(0));
        if let Some((first, step)) = constant_row_stride(cx, 1, rows) {
            let mut nest = cx.nest(&[before, count, after], 0);
            let strides = [(rows * after) as isize, step * after as isize, 1];
            let value = nest.load_strided(cx, data, first * after, &strides);
            nest.store_contiguous(cx, output, value);
            return cx.emit(nest.instruction());
        }
        guard_indices(cx, 1, rows)?;
        let mut nest = cx.nest(&[before, count, after], 0);
        let loaded = nest.load_strided(cx, indices, 0, &[0, 1, 0]);
        let index = nest.b.convert(loaded, Type::I64);
        let row = wrap_negative_index(&mut nest.b, index, rows);
        let (outer, inner) = (nest.b.coordinate(0), nest.b.coordinate(2));
        let (rows, after) = (nest.b.int(rows as i64), nest.b.int(after as i64));
        let start = nest.b.mul(outer, rows);
        let row = nest.b.add(start, row);
        let start = nest.b.mul(row, after);
        let at = nest.b.add(start, inner);
        let value = nest.gather(cx, data, at);
        nest.store_contiguous(cx, output, value);
        cx.emit(nest.instruction())
    }
}

impl Op for GatherGrad {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 3, 1)?;
        cx.expect_dtype(0, "int64", |dtype| dtype == DType::I64)?;
        let dtype = cx.expect_dtype(2, "a float type", DType::is_float)?;
        let shape: Option<Shape> = cx.sizes(0).map(|sizes| sizes.into_iter().collect());
        let Some(shape) = shape else {
            check_indices(cx, 1, None)?;
            let rank = cx.shape(0).and_then(|shape| shape.first().and_then(Dim::known));
            cx.set_output(0, dtype, rank.map(|rank| cx.unknown_shape(0, rank)));
            return Ok(());
        };
        let axis = normalize_axis(self.axis, shape.rank())?;
        check_indices(cx, 1, Some(&shape[axis]))?;
        if let (Some(indices), Some(g)) = (cx.shape(1), cx.shape(2)) {
            let expected = gathered_shape(&shape, indices, axis);
            let differ =
                |(a, b): (&Dim, &Dim)| matches!((a.known(), b.known()), (Some(a), Some(b)) if a != b);
            if g.rank() != expected.rank() || g.iter().zip(expected.iter()).any(differ) {
                return Err(OpError::invalid(format!(
                    "the gradient has shape {g}, but indices of shape {indices} gather rows of shape {expected}"
                )));
            }
        }
        cx.set_output(0, dtype, Some(shape));
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let dims = cx.out_dims(0);
        let (outer, rows, inner) = split_at_axis(&dims, normalize_axis(self.axis, dims.len())?);
        let count: usize = cx.dims(1).iter().product();
        let constant = cx.constant(1).and_then(Tensor::to_i64);
        if count == rows && constant.is_some_and(|indices| indices.into_iter().eq(0..rows as i64)) {
            // The indices are the identity permutation.
            cx.alias(0, 2);
            return Ok(());
        }
        guard_indices(cx, 1, rows)?;
        let output = cx.output(0);
        let gradient = cx.input(2);
        if let Some((first, step)) = constant_row_stride(cx, 1, rows).filter(|&(_, step)| step != 0) {
            // No row occurs twice, so no sum is necessary.
            emit_fill(cx, output, 0.0)?;
            let mut nest = cx.nest(&[outer, count, inner], 0);
            let value = nest.load_broadcast(gradient, cx.dtype(2), &[outer, count, inner]);
            let strides = [(rows * inner) as isize, step * inner as isize, 1];
            nest.store_strided(cx, output, first * inner, strides.into_iter().collect(), value);
            return cx.emit(nest.instruction());
        }
        let source = convert_to_accumulation(cx, gradient, "wide_source")?;
        let dtype = cx.buffer_dtype(source);
        let narrow = cx.buffer_dtype(output) != dtype;
        let target = if narrow { cx.alloc_temp("wide", dtype, cx.buffer_len(output)) } else { output };
        emit_fill(cx, target, 0.0)?;
        let sums = {
            let [source, index, target] = [source, cx.input(1), target].map(|buffer| cx.flat_operand(buffer));
            ScatterAdd { outer, rows, count, inner, source, index, target, overwrites: false }
        };
        cx.emit(Instruction::from(sums))?;
        if narrow {
            emit_copy(cx, target, output)?;
        }
        Ok(())
    }
}

/// Decomposes into a ScatterElements that adds to zeros. The indices are expanded over the elements of the rows.
fn decompose_grad(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (shape, indices, g) = (rw.required_input(0)?, rw.required_input(1)?, rw.required_input(2)?);
    let rank =
        rw.node().outputs.first().copied().flatten().and_then(|output| rw.shape(output)).map(Shape::rank);
    let (Some(rank), Some(dtype)) = (rank, rw.dtype(g)) else {
        return Err(OpError::unsupported("the rank and the type of the gathered tensor must be known"));
    };
    let axis = normalize_axis(rw.attrs().int("axis")?.unwrap_or(0), rank)?;
    if rw.version() < SCATTER_ADD_OPSET {
        return decompose_grad_as_product(rw, axis, dtype);
    }
    let zeros = Attrs::new().with("value", Tensor::filled(dtype, &[1], 0.0));
    let zeros = rw.add("ConstantOfShape", &[shape], zeros);
    // The indices as one axis, at the position of the gathered axis.
    let count = rw.add("Size", &[indices], Attrs::new());
    let one = rw.ints("one_axis", &[1]);
    let count = rw.add("Reshape", &[count, one], Attrs::new());
    let slice = |rw: &mut Rewrite<'_>, from: usize, to: usize| -> ValueId {
        let (from, to) = (rw.ints("from", &[from as i64]), rw.ints("to", &[to as i64]));
        rw.add("Slice", &[shape, from, to], Attrs::new())
    };
    let mut parts = Vec::new();
    if axis > 0 {
        parts.push(slice(rw, 0, axis));
    }
    parts.push(count);
    if axis + 1 < rank {
        parts.push(slice(rw, axis + 1, rank));
    }
    let rows = rw.add("Concat", &parts, Attrs::new().with("axis", 0i64));
    let updates = rw.add("Reshape", &[g, rows], Attrs::new());
    let mut lying = vec![1; rank];
    lying[axis] = -1;
    let lying = rw.ints("lying", &lying);
    let indices = rw.add("Reshape", &[indices, lying], Attrs::new());
    let indices = rw.add("Expand", &[indices, rows], Attrs::new());
    let attrs = Attrs::new().with("axis", axis as i64).with("reduction", "add");
    let result = rw.add("ScatterElements", &[zeros, indices, updates], attrs);
    rw.replace_output(0, result);
    Ok(())
}

/// First opset with the scatter reduction `add`.
const SCATTER_ADD_OPSET: i64 = 16;

/// Decomposes `GatherGrad` for older opsets into a product of a one-hot matrix of the indices with the gradient.
///
/// An infinite gradient makes NaN of the rows that it does not belong to.
fn decompose_grad_as_product(rw: &mut Rewrite<'_>, axis: usize, dtype: DType) -> Result<(), OpError> {
    let (shape, indices, g) = (rw.required_input(0)?, rw.required_input(1)?, rw.required_input(2)?);
    let output = rw.node().present_outputs().next();
    let sizes = output.and_then(|output| rw.shape(output)).cloned();
    let sizes: Vec<Dim> = sizes.iter().flat_map(|shape| shape.iter().cloned()).collect();
    let (line, row) = (rw.ints("line", &[-1]), rw.ints("row", &[1, -1]));
    let at = rw.add("Reshape", &[indices, line], Attrs::new());
    let at = rw.add("Reshape", &[at, row], Attrs::new());
    let size = match sizes[axis].known() {
        Some(size) => rw.ints("size", &[size as i64]),
        None => {
            let axis = rw.ints("axis", &[axis as i64]);
            rw.add("Gather", &[shape, axis], Attrs::new().with("axis", 0i64))
        }
    };
    let column = rw.ints("column", &[-1, 1]);
    let rows = match sizes[axis].known() {
        Some(size) => rw.ints("rows", &(0..size as i64).collect::<Vec<i64>>()),
        None => rw.count_up(size),
    };
    let rows = rw.add("Reshape", &[rows, column], Attrs::new());
    let at = rw.add("Cast", &[at], Attrs::new().with("to", i64::from(DType::I64.to_onnx())));
    let normalized = rw.add("Add", &[at, size], Attrs::new());
    let hit = rw.add("Equal", &[rows, at], Attrs::new());
    let normalized_hit = rw.add("Equal", &[rows, normalized], Attrs::new());
    let hit = rw.add("Or", &[hit, normalized_hit], Attrs::new());
    let ones = rw.add("Cast", &[hit], Attrs::new().with("to", i64::from(dtype.to_onnx())));
    // Three axes: the product of the axes before the rows, the number of indices, and the product of the axes after the
    // rows.
    let product = |rw: &mut Rewrite<'_>, from: usize, to: usize| -> ValueId {
        let known: Option<Vec<usize>> = sizes[from..to].iter().map(Dim::known).collect();
        if let Some(known) = known {
            return rw.ints("product", &[known.iter().product::<usize>() as i64]);
        }
        let (from, to) = (rw.ints("from", &[from as i64]), rw.ints("to", &[to as i64]));
        let part = rw.add("Slice", &[shape, from, to], Attrs::new());
        rw.add("ReduceProd", &[part], Attrs::new().with("keepdims", 1i64))
    };
    let before = product(rw, 0, axis);
    let later = product(rw, axis + 1, sizes.len());
    let count = rw.add("Size", &[indices], Attrs::new());
    let one = rw.ints("one_axis", &[1]);
    let count = rw.add("Reshape", &[count, one], Attrs::new());
    let blocks = rw.add("Concat", &[before, count, later], Attrs::new().with("axis", 0i64));
    let updates = rw.add("Reshape", &[g, blocks], Attrs::new().with("allowzero", 1i64));
    let summed = rw.add("MatMul", &[ones, updates], Attrs::new());
    let result = rw.add("Reshape", &[summed, shape], Attrs::new().with("allowzero", 1i64));
    rw.replace_output(0, result);
    Ok(())
}

/// Decomposes `ShrunkenGather` into Gather. The operator only adds the promise that the result has no more rows than
/// the input.
fn decompose_shrunken(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let inputs = rw.node().inputs.to_vec();
    rw.emit_op("", "Gather", &inputs, rw.attrs().clone());
    Ok(())
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Gather { axis: node.attrs.int("axis")?.unwrap_or(0) }))
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "Gather", &[1, 11, 13], build)
            .class(Class::Lookup)
            .traits(Traits::PREPARES.and(Traits::TAKES_PARTS))
            .inputs_without_gradient(&[1])
            .weights(&[0]),
        Definition::new("com.microsoft", "ShrunkenGather", &[1], build)
            .composition(decompose_shrunken)
            .weights(&[0]),
        Definition::new("com.microsoft", "GatherGrad", &[1], |_, node| {
            Ok(Box::new(GatherGrad { axis: node.attrs.int("axis")?.unwrap_or(0) }))
        })
        .differentiated_as(decompose_grad),
    ]
}

#[cfg(test)]
mod tests {
    use ortrain_program::RunError;

    use super::*;
    use crate::testing::{
        Failure, add, check_decomposed_gradients, check_decomposition, check_gradients, generic_tensor,
        graph, one_node_graph, run, run_node,
    };

    const NEWEST: i64 = crate::NEWEST_OPSET;
    const GATHER: (&str, &str) = ("", "Gather");
    const GRAD: (&str, &str) = ("com.microsoft", "GatherGrad");

    fn axis(axis: i64) -> Attrs {
        Attrs::new().with("axis", axis)
    }

    /// Opsets without a scatter that adds.
    #[test]
    fn gradients_before_scatter_reduction() {
        let x = generic_tensor(&[3, 4, 2], 1);
        let indices = Tensor::i64(&[2, 2], &[1, -1, 0, 1]);
        for along in 0..3 {
            let gathered =
                one_node_graph(NEWEST, GATHER, &[Some(&x), Some(&indices)], 1, axis(along)).expect("valid");
            for opset in [15, 13, 9, 7] {
                check_decomposed_gradients(&gathered, &[x.clone(), indices.clone()], &[0], opset);
            }
        }
    }

    #[test]
    fn rows_along_every_axis() {
        let x = Tensor::f32(&[2, 3], &[0., 1., 2., 10., 11., 12.]);
        let indices = Tensor::i64(&[2, 2], &[1, -1, 0, -2]);
        let got = run_node(GATHER, &[Some(&x), Some(&indices)], 1, axis(0)).expect("it runs");
        assert_eq!(got[0].dims(), [2, 2, 3]);
        assert_eq!(got[0].to_f64(), [10., 11., 12., 10., 11., 12., 0., 1., 2., 0., 1., 2.]);
        let got = run_node(GATHER, &[Some(&x), Some(&indices)], 1, axis(-1)).expect("it runs");
        assert_eq!(got[0].dims(), [2, 2, 2]);
        assert_eq!(got[0].to_f64(), [1., 2., 0., 1., 11., 12., 10., 11.]);
        let scalar = Tensor::from_slice(DType::I32, &[], &[-1i32]);
        let got = run_node(GATHER, &[Some(&x), Some(&scalar)], 1, axis(1)).expect("it runs");
        assert_eq!((got[0].dims(), got[0].to_f64()), (&[2][..], vec![2., 12.]));
    }

    #[test]
    fn gathers_every_dtype_bit_exactly() {
        let indices = Tensor::i64(&[2], &[2, 0]);
        for dtype in DType::ALL {
            let bytes: Vec<u8> = (0..3 * dtype.size())
                .map(|k| if dtype == DType::Bool { (k % 2) as u8 } else { k as u8 + 1 })
                .collect();
            let x = Tensor::new(dtype, vec![3], bytes.clone().into()).expect("three elements");
            let got = run_node(GATHER, &[Some(&x), Some(&indices)], 1, Attrs::new()).expect("it runs");
            let size = dtype.size();
            assert_eq!(got[0].data()[..size], bytes[2 * size..], "{dtype}");
            assert_eq!(got[0].data()[size..], bytes[..size], "{dtype}");
        }
    }

    #[test]
    fn out_of_range_indices_fail() {
        let x = generic_tensor(&[3, 2], 1);
        for bad in [3, -4] {
            let indices = Tensor::i64(&[2], &[0, bad]);
            let failure =
                run_node(GATHER, &[Some(&x), Some(&indices)], 1, Attrs::new()).expect_err("outside");
            let Failure::Run(RunError::IndexOutOfRange { node, at, index, bound }) = failure else {
                panic!("{failure:?}")
            };
            assert!(node.contains("Gather"), "{node}");
            assert_eq!((at, index, bound), (vec![1], bad, 3));
            let (mut gradient, ids) = graph(&[&indices, &generic_tensor(&[2, 2], 2)]);
            let shape = gradient.add_constant("shape", Tensor::i64(&[2], &[3, 2]));
            add(&mut gradient, GRAD, "dx", &[Some(shape), Some(ids[0]), Some(ids[1])], 1, Attrs::new());
            let failure =
                run(&gradient, &[indices.clone(), generic_tensor(&[2, 2], 2)]).expect_err("outside");
            assert!(
                matches!(failure, Failure::Run(RunError::IndexOutOfRange { bound: 3, .. })),
                "{failure:?}"
            );

            // Constant indices fail before the run.
            let (mut graph, ids) = graph(&[&x]);
            let indices = graph.add_constant("indices", indices);
            add(&mut graph, GATHER, "y", &[Some(ids[0]), Some(indices)], 1, Attrs::new());
            let failure = run(&graph, std::slice::from_ref(&x)).expect_err("outside");
            let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
            assert!(error.to_string().contains("is out of range for an axis of 3"), "{error}");
        }
    }

    #[test]
    fn propagates_sizes() {
        let (mut graph, ids) = graph(&[&generic_tensor(&[2, 3], 3)]);
        graph.value_mut(ids[0]).ty = ortrain_graph::ValueType::Tensor(
            DType::F64,
            Some([Dim::symbol("N"), Dim::Known(3)].into_iter().collect()),
        );
        let sizes = add(&mut graph, ("", "Shape"), "sizes", &[Some(ids[0])], 1, Attrs::new())[0];
        let (one, both) = (
            graph.add_constant("one", Tensor::i64(&[], &[-2])),
            graph.add_constant("both", Tensor::i64(&[2], &[1, 0])),
        );
        let first = add(&mut graph, GATHER, "first", &[Some(sizes), Some(one)], 1, Attrs::new())[0];
        let swapped = add(&mut graph, GATHER, "swapped", &[Some(sizes), Some(both)], 1, Attrs::new())[0];
        crate::passes::infer::infer(&mut graph).expect("it is right");
        assert_eq!(graph.value(first).sizes, Some(vec![Dim::symbol("N")]));
        assert_eq!(graph.value(swapped).sizes, Some(vec![Dim::Known(3), Dim::symbol("N")]));
    }

    #[test]
    fn gradients() {
        let indices = Tensor::i64(&[2, 2], &[1, -1, 0, 1]);
        for k in 0..3 {
            let inputs = [generic_tensor(&[2, 3, 2], 4), indices.clone()];
            let ports = [Some(&inputs[0]), Some(&inputs[1])];
            let graph = one_node_graph(NEWEST, GATHER, &ports, 1, axis(k)).expect("it is read");
            check_gradients(&graph, &inputs, &[0], &[0]);
        }
        let inputs = [generic_tensor(&[3], 5), Tensor::i64(&[], &[-1])];
        let ports = [Some(&inputs[0]), Some(&inputs[1])];
        let graph = one_node_graph(NEWEST, GATHER, &ports, 1, axis(0)).expect("it is read");
        check_gradients(&graph, &inputs, &[0], &[0]);
    }

    #[test]
    fn float16_gradients_accumulate_in_float32() {
        // In half precision 2048 + 1 is 2048.
        let count = 2049;
        let g = Tensor::filled(DType::F16, &[count], 1.0);
        let (shape, indices) = (Tensor::i64(&[1], &[1]), Tensor::i64(&[count], &vec![0; count]));
        let got =
            run_node(GRAD, &[Some(&shape), Some(&indices), Some(&g)], 1, Attrs::new()).expect("it runs");
        assert_eq!(got[0].to_f64(), [2048.0], "the exact sum, rounded once");
        let g = Tensor::filled(DType::F16, &[count + 1], 1.0);
        let indices = Tensor::i64(&[count + 1], &vec![0; count + 1]);
        let got =
            run_node(GRAD, &[Some(&shape), Some(&indices), Some(&g)], 1, Attrs::new()).expect("it runs");
        assert_eq!(got[0].to_f64(), [2050.0]);
    }

    #[test]
    fn gradient_decomposes_into_plain_onnx() {
        for k in 0..3i64 {
            let (mut graph, ids) = graph(&[&Tensor::i64(&[2, 2], &[0; 4]), &generic_tensor(&[1], 0)]);
            let shape = graph.add_constant("shape", Tensor::i64(&[3], &[3, 2, 4]));
            let mut dims = vec![3, 2, 4];
            dims.splice(k as usize..=k as usize, [2, 2]);
            let g = generic_tensor(&dims, 6);
            graph.value_mut(ids[1]).ty = ortrain_graph::ValueType::tensor(DType::F64, &dims);
            add(&mut graph, GRAD, "y", &[Some(shape), Some(ids[0]), Some(ids[1])], 1, axis(k));
            crate::passes::infer::infer(&mut graph).expect("it is right");
            check_decomposition(&graph, &[Tensor::i64(&[2, 2], &[1, -1, 0, 1]), g], 1e-12);
        }
    }

    #[test]
    fn shrunken_gather_equals_gather() {
        let (x, indices) = (generic_tensor(&[4, 3], 1), Tensor::i64(&[2], &[2, -2]));
        let ports = [Some(&x), Some(&indices)];
        let op = ("com.microsoft", "ShrunkenGather");
        for axis in [axis(0), axis(1)] {
            let expected = run_node(GATHER, &ports, 1, axis.clone()).expect("it runs");
            assert_eq!(run_node(op, &ports, 1, axis.clone()).expect("it runs"), expected);
            let graph = one_node_graph(NEWEST, op, &ports, 1, axis).expect("valid");
            let inputs = [x.clone(), indices.clone()];
            check_gradients(&graph, &inputs, &[0], &[0]);
            check_decomposition(&graph, &inputs, 0.0);
        }
    }
}
