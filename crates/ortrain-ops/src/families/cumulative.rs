//! Cumulative sums and products along an axis: `CumSum`, `CumProd`.
//!
//! CumSum-11, 14 (<https://onnx.ai/onnx/operators/onnx__CumSum.html>) and CumProd-26 of ONNX. `exclusive` excludes the
//! own element, `reverse` starts at the end. The axis must be known once all shapes are known.
//!
//! The lowering is a parallel scan: each pass combines every element with the element at a distance, and the distance
//! doubles from pass to pass. The number of passes is the logarithm of the length. Narrow floats are computed in
//! float32. For opsets before 26 CumProd is written as masked products.
//!
//! The gradient of a sum is a sum in the opposite direction. The gradient of a product uses the products between each
//! pair of elements, so that the gradient at a zero is the product of the other elements.

use ortrain_expr::{BinaryOp, CompareOp, Type};
use ortrain_graph::{Attrs, DType, Graph, Node, Shape, Tensor, ValueId};
use ortrain_program::BufferId;

use crate::OpError;
use crate::grad::Grad;
use crate::infer::{Infer, normalize_axis};
use crate::lower::{Lower, split_at_axis};
use crate::op::{Definition, Op, ValueRequirement};
use crate::rewrite::Rewrite;
use crate::support::formula::formula;

/// Cumulative sum or product. The inputs are the elements and the axis.
struct Cumulative {
    product: bool,
    exclusive: bool,
    reverse: bool,
}

impl Cumulative {
    fn read(node: &Node) -> Result<Cumulative, OpError> {
        let flag = |name: &str| Ok::<_, OpError>(node.attrs.int(name)?.unwrap_or(0) != 0);
        Ok(Cumulative {
            product: &*node.op == "CumProd",
            exclusive: flag("exclusive")?,
            reverse: flag("reverse")?,
        })
    }

    fn attrs(&self) -> Attrs {
        Attrs::new().with("exclusive", i64::from(self.exclusive)).with("reverse", i64::from(self.reverse))
    }

    /// Emits one pass over `[before, size, after]`. Each element is combined with the element `distance` before it
    /// (after it, if `reverse`). With `shifts` the element is replaced by that element instead, or by the neutral
    /// element beyond the end.
    fn pass(
        &self,
        cx: &mut Lower<'_>,
        (source, target): (BufferId, BufferId),
        (before, size, after): (usize, usize, usize),
        distance: usize,
        shifts: bool,
    ) -> Result<(), OpError> {
        let mut nest = cx.nest(&[before, size, after], 0);
        let dtype = cx.buffer_dtype(source);
        let ty = Type::of(dtype);
        let current = nest.load(source, cx.contiguous_access(source, &[before, size, after]));
        let b = &mut nest.b;
        let (outer, at, inner) = (b.coordinate(0), b.coordinate(1), b.coordinate(2));
        let (step, zero) = (b.int(distance as i64), b.int(0));
        let (sizes, afters) = (b.int(size as i64), b.int(after as i64));
        let (from, inside) = if self.reverse {
            let from = b.add(at, step);
            (from, b.compare(CompareOp::Lt, from, sizes))
        } else {
            let from = b.sub(at, step);
            (from, b.compare(CompareOp::Le, zero, from))
        };
        let line = b.mul(outer, sizes);
        let row = b.add(line, from);
        let start = b.mul(row, afters);
        let index = b.add(start, inner);
        let other = nest.gather(cx, source, index);
        let b = &mut nest.b;
        let (value, fallback) = if shifts {
            (other, b.constant(ty, if self.product { 1.0 } else { 0.0 }))
        } else {
            (b.binary(if self.product { BinaryOp::Mul } else { BinaryOp::Add }, current, other), current)
        };
        let result = b.select(inside, value, fallback);
        nest.store_contiguous(cx, target, result);
        cx.emit(nest.instruction())
    }

    /// Returns the gradient of the forward, inclusive product along the last axis of `x`; `g` is the gradient of the
    /// result.
    ///
    /// Gradient of element `i`: the sum over all `k >= i` of `g[k]` times the product of all elements up to `k` except
    /// `i`.
    fn forward_product_gradient(
        cx: &mut Grad<'_>,
        (x, g): (ValueId, ValueId),
        rank: usize,
        dtype: DType,
    ) -> ValueId {
        let number = |cx: &mut Grad<'_>, value: f64| cx.constant("number", Tensor::scalar(dtype, value));
        let scalar = |cx: &mut Grad<'_>, value: i64| cx.constant("index", Tensor::i64(&[], &[value]));
        let shape = cx.add("Shape", &[x], Attrs::new());
        let (last, zero, one) = (scalar(cx, rank as i64 - 1), scalar(cx, 0), scalar(cx, 1));
        let size = cx.add("Gather", &[shape, last], Attrs::new());
        let columns = cx.add("Range", &[zero, size, one], Attrs::new());
        let axis = cx.ints("axis", &[1]);
        let rows = cx.add("Unsqueeze", &[columns, axis], Attrs::new());
        let is_later = cx.add("Less", &[rows, columns], Attrs::new());
        let not_before = cx.add("LessOrEqual", &[rows, columns], Attrs::new());
        let (nothing, neutral) = (number(cx, 0.0), number(cx, 1.0));
        let between = cx.ints("between", &[rank as i64 - 1]);
        let spread = cx.add("Unsqueeze", &[x, between], Attrs::new());
        let masked = cx.add("Where", &[is_later, spread, neutral], Attrs::new());
        let columns_axis = scalar(cx, rank as i64);
        let products = cx.add("CumProd", &[masked, columns_axis], Attrs::new());
        let arriving = cx.add("Unsqueeze", &[g, between], Attrs::new());
        let values = [not_before, arriving, products, nothing];
        let counted = formula(cx, values, |[not_before, arriving, products, nothing]| {
            not_before.choose(arriving * products, nothing)
        });
        let columns_axis = cx.ints("columns", &[rank as i64]);
        let sum = cx.add("ReduceSum", &[counted, columns_axis], Attrs::new().with("keepdims", 0i64));
        let before = cx.add("CumProd", &[x, last], Attrs::new().with("exclusive", 1i64));
        cx.add("Mul", &[before, sum], Attrs::new())
    }

    /// Adds the gradient of a product. Reduces all cases to the forward, inclusive product along the last axis.
    fn product_gradient(&self, cx: &mut Grad<'_>, g: ValueId) -> Result<(), OpError> {
        let (x, axis) = (cx.input(0)?, cx.input(1)?);
        let rank = cx.shape(x).map(Shape::rank);
        let axis = cx.constant_of(axis).and_then(Tensor::to_i64).and_then(|axis| axis.first().copied());
        let (Some(rank), Some(axis)) = (rank, axis) else {
            return Err(OpError::unsupported("the gradient needs the rank of the input and a constant axis"));
        };
        let (axis, dtype) = (normalize_axis(axis, rank)?, cx.dtype(x)?);
        let mut perm: Vec<i64> = (0..rank as i64).collect();
        perm.swap(axis, rank - 1);
        let last = rank as i64 - 1;
        let transposed = |cx: &mut Grad<'_>, value: ValueId| match axis + 1 == rank {
            true => value,
            false => cx.add("Transpose", &[value], Attrs::new().with("perm", perm.clone())),
        };
        let flipped = |cx: &mut Grad<'_>, value: ValueId| {
            let bounds = [-1, i64::MIN, last, -1].map(|number| cx.ints("bound", &[number]));
            let [start, end, axes, steps] = bounds;
            cx.add("Slice", &[value, start, end, axes, steps], Attrs::new())
        };
        let moved = |cx: &mut Grad<'_>, value: ValueId, by: i64, filling: f64| {
            let mut pads = vec![0; 2 * rank];
            (pads[rank - 1], pads[2 * rank - 1]) = (by, -by);
            let pads = cx.ints("pads", &pads);
            let filling = cx.constant("filling", Tensor::scalar(dtype, filling));
            cx.add("Pad", &[value, pads, filling], Attrs::new())
        };
        let (mut elements, mut arriving) = (transposed(cx, x), transposed(cx, g));
        if self.reverse {
            (elements, arriving) = (flipped(cx, elements), flipped(cx, arriving));
        }
        if self.exclusive {
            elements = moved(cx, elements, 1, 1.0);
        }
        let mut gradient = Cumulative::forward_product_gradient(cx, (elements, arriving), rank, dtype);
        if self.exclusive {
            gradient = moved(cx, gradient, -1, 0.0);
        }
        if self.reverse {
            gradient = flipped(cx, gradient);
        }
        let gradient = transposed(cx, gradient);
        cx.set_grad(0, gradient);
        Ok(())
    }
}

impl Op for Cumulative {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 1)?;
        let dtype = cx.expect_dtype(0, "a number type", DType::is_number)?;
        cx.expect_dtype(1, "int32 or int64", |dtype| matches!(dtype, DType::I32 | DType::I64))?;
        if let Some(axis) = cx.constant(1).and_then(Tensor::to_i64) {
            let &[axis] = axis.as_slice() else {
                return Err(OpError::invalid(format!("the axis has {} elements; one is needed", axis.len())));
            };
            cx.shape(0).map(|shape| normalize_axis(axis, shape.rank())).transpose()?;
        }
        cx.set_output(0, dtype, cx.shape(0).cloned());
        Ok(())
    }

    fn needs_value(&self, k: usize, _: DType) -> ValueRequirement {
        if k == 1 { ValueRequirement::Always } else { ValueRequirement::Never }
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        if self.product {
            return self.product_gradient(cx, g);
        }
        let axis = cx.input(1)?;
        let other_end = Cumulative { reverse: !self.reverse, ..*self };
        let gradient = cx.add("CumSum", &[g, axis], other_end.attrs());
        cx.set_grad(0, gradient);
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let dims = cx.dims(0);
        let axis = cx.constant(1).and_then(Tensor::to_i64).and_then(|axis| axis.first().copied());
        let axis = axis
            .ok_or_else(|| OpError::unsupported("the axis must be a constant; it is computed at run time"))?;
        let space = split_at_axis(&dims, normalize_axis(axis, dims.len())?);
        let size = space.1;
        let mut passes: Vec<(usize, bool)> = Vec::new();
        passes.extend(self.exclusive.then_some((1, true)));
        let mut distance = 1;
        while distance < size {
            passes.push((distance, false));
            distance = distance.saturating_mul(2);
        }
        if passes.is_empty() {
            cx.alias(0, 0);
            return Ok(());
        }
        let wide = match cx.dtype(0) {
            DType::F16 | DType::BF16 => DType::F32,
            other => other,
        };
        let (mut source, output) = (cx.input(0), cx.output(0));
        for (k, &(distance, shifts)) in passes.iter().enumerate() {
            let target = match k + 1 == passes.len() {
                true => output,
                false => cx.alloc_temp(&format!("pass_{k}"), wide, dims.iter().product()),
            };
            self.pass(cx, (source, target), space, distance, shifts)?;
            source = target;
        }
        Ok(())
    }
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Cumulative::read(node)?))
}

/// Maximum length of an axis for which [`downgrade_product`] computes each result as a separate product. The number of
/// multiplied elements is the square of the length.
const MAX_PAIRWISE_LENGTH: usize = 256;

/// Writes the product in passes, as [`Cumulative::pass`] does. Each pass multiplies the elements by elements at a
/// distance, which doubles from pass to pass.
fn product_in_passes(
    rw: &mut Rewrite<'_>,
    of: &Cumulative,
    x: ValueId,
    (axis, rank): (usize, usize),
    size: usize,
) -> ValueId {
    let dtype = rw.dtype(x).unwrap_or(DType::F32);
    let wide = if matches!(dtype, DType::F16 | DType::BF16) { DType::F32 } else { dtype };
    let cast = |rw: &mut Rewrite<'_>, value: ValueId, to: DType| {
        rw.add("Cast", &[value], Attrs::new().with("to", i64::from(to.to_onnx())))
    };
    let mut product = if wide == dtype { x } else { cast(rw, x, wide) };
    let neutral = rw.constant("one", Tensor::scalar(wide, 1.0));
    let moved = |rw: &mut Rewrite<'_>, value: ValueId, by: usize| {
        let by = if of.reverse { -(by as i64) } else { by as i64 };
        let mut pads = vec![0; 2 * rank];
        (pads[axis], pads[rank + axis]) = (by, -by);
        let pads = rw.ints("pads", &pads);
        rw.add("Pad", &[value, pads, neutral], Attrs::new())
    };
    if of.exclusive {
        product = moved(rw, product, 1);
    }
    let mut distance = 1;
    while distance < size {
        let other = moved(rw, product, distance);
        product = rw.add("Mul", &[product, other], Attrs::new());
        distance *= 2;
    }
    if wide == dtype { product } else { cast(rw, product, dtype) }
}

/// Downgrades CumProd to opsets before 26: each result is a product of the input with ones in place of excluded
/// elements. Along long axes the product is written in passes.
fn downgrade_product(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() >= 26 {
        return Ok(());
    }
    let of = Cumulative::read(rw.node())?;
    let (x, axis) = (rw.required_input(0)?, rw.required_input(1)?);
    let axis = rw.constant_of(axis).and_then(Tensor::to_i64).and_then(|axis| axis.first().copied());
    let (Some(rank), Some(dtype), Some(axis)) = (rw.shape(x).map(Shape::rank), rw.dtype(x), axis) else {
        return Err(OpError::unsupported(
            "before opset 26, the rank of the input and the axis must be known",
        ));
    };
    let axis = normalize_axis(axis, rank)?;
    let size = rw.shape(x).and_then(|shape| shape[axis].known());
    if let Some(size) = size.filter(|&size| size > MAX_PAIRWISE_LENGTH) {
        let result = product_in_passes(rw, &of, x, (axis, rank), size);
        rw.replace_output(0, result);
        return Ok(());
    }
    let mut perm: Vec<i64> = (0..rank as i64).collect();
    perm.swap(axis, rank - 1);
    let perm = Attrs::new().with("perm", perm);
    let transposed = if axis + 1 == rank { x } else { rw.add("Transpose", &[x], perm.clone()) };
    let shape = rw.add("Shape", &[x], Attrs::new());
    let at = rw.ints("axis", &[axis as i64]);
    let size = rw.add("Gather", &[shape, at], Attrs::new().with("axis", 0i64));
    let columns = rw.count_up(size);
    let one = rw.ints("one", &[1]);
    let rows = rw.add("Unsqueeze", &[columns, one], Attrs::new());
    let (low, high) = if of.reverse { (rows, columns) } else { (columns, rows) };
    let counts = if of.exclusive {
        rw.add("Less", &[low, high], Attrs::new())
    } else {
        let after = rw.add("Less", &[high, low], Attrs::new());
        rw.add("Not", &[after], Attrs::new())
    };
    let between = rw.ints("between", &[rank as i64 - 1]);
    let spread = rw.add("Unsqueeze", &[transposed, between], Attrs::new());
    let neutral = rw.constant("one", Tensor::scalar(dtype, 1.0));
    let masked = rw.add("Where", &[counts, spread, neutral], Attrs::new());
    let last = rw.ints("last", &[rank as i64]);
    let mut result = rw.add("ReduceProd", &[masked, last], Attrs::new().with("keepdims", 0i64));
    if axis + 1 != rank {
        result = rw.add("Transpose", &[result], perm);
    }
    rw.replace_output(0, result);
    Ok(())
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "CumSum", &[11, 14], build),
        Definition::new("", "CumProd", &[26], build).downgrade(downgrade_product),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, assert_close, check_downgrade, check_gradients, f64s, generic_tensor, gradient_graph,
        one_node_graph, run, run_node,
    };

    fn attrs(exclusive: i64, reverse: i64) -> Attrs {
        Attrs::new().with("exclusive", exclusive).with("reverse", reverse)
    }

    /// Returns a graph with a constant axis.
    fn graph_of(op: &str, x: &Tensor, axis: i64, attrs: Attrs) -> Graph {
        let axis = Tensor::i64(&[], &[axis]);
        let mut graph =
            one_node_graph(NEWEST_OPSET, ("", op), &[Some(x), Some(&axis)], 1, attrs).expect("valid");
        let id = graph.inputs.pop().expect("the axis");
        graph.value_mut(id).constant = Some(axis);
        graph
    }

    #[test]
    fn all_directions_and_exclusive() {
        let x = Tensor::i64(&[5], &[2, 3, 5, 7, 11]);
        let get = |op: &str, exclusive: i64, reverse: i64| {
            let axis = Tensor::from_slice(DType::I32, &[], &[-1i32]);
            let got = run_node(("", op), &[Some(&x), Some(&axis)], 1, attrs(exclusive, reverse));
            got.expect("it runs").remove(0).to_i64().expect("integers")
        };
        assert_eq!(get("CumSum", 0, 0), [2, 5, 10, 17, 28]);
        assert_eq!(get("CumSum", 1, 0), [0, 2, 5, 10, 17]);
        assert_eq!(get("CumSum", 0, 1), [28, 26, 23, 18, 11]);
        assert_eq!(get("CumSum", 1, 1), [26, 23, 18, 11, 0]);
        assert_eq!(get("CumProd", 0, 0), [2, 6, 30, 210, 2310]);
        assert_eq!(get("CumProd", 1, 0), [1, 2, 6, 30, 210]);
        assert_eq!(get("CumProd", 0, 1), [2310, 1155, 385, 77, 11]);
        assert_eq!(get("CumProd", 1, 1), [1155, 385, 77, 11, 1]);
    }

    #[test]
    fn narrow_floats_accumulate_in_float32() {
        let ones = Tensor::filled(DType::F16, &[2050], 1.0);
        let graph = graph_of("CumSum", &ones, 0, Attrs::new());
        let got = run(&graph, &[ones]).expect("it runs").remove(0).to_f64();
        assert_eq!(got[2049], 2050.0, "2048 and 1 is 2048 in half precision");
    }

    /// The decomposition of a long product for older opsets has no matrix of all pairs of elements.
    #[test]
    fn long_products_are_written_in_passes() {
        for (dims, axis) in [(&[700][..], 0), (&[2, 300, 3], 1), (&[3, MAX_PAIRWISE_LENGTH + 1], -1)] {
            let count = dims.iter().product::<usize>();
            let near_one: Vec<f64> = (0..count).map(|k| 0.99 + 0.004 * ((k * 7) % 6) as f64).collect();
            let x = f64s(dims, &near_one);
            for (exclusive, reverse) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                let graph = graph_of("CumProd", &x, axis, attrs(exclusive, reverse));
                for opset in [9, 13, 18] {
                    let written = check_downgrade(&graph, std::slice::from_ref(&x), opset);
                    assert!(written.nodes.iter().all(|node| &*node.op != "Where"), "{written}");
                }
            }
        }
        let ones = Tensor::filled(DType::F16, &[2050], 1.0);
        check_downgrade(&graph_of("CumProd", &ones, 0, Attrs::new()), &[ones], 13);
    }

    #[test]
    fn gradients_and_downgrades() {
        for op in ["CumSum", "CumProd"] {
            for (dims, axis) in [(&[5][..], 0), (&[2, 4, 3], 1), (&[2, 3], -1), (&[3, 1], 1), (&[3, 2], 0)] {
                for (exclusive, reverse) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
                    let x = generic_tensor(dims, 5);
                    let graph = graph_of(op, &x, axis, attrs(exclusive, reverse));
                    check_gradients(&graph, std::slice::from_ref(&x), &[0], &[0]);
                    if op == "CumProd" {
                        check_downgrade(&graph, std::slice::from_ref(&x), 13);
                        check_downgrade(&graph, std::slice::from_ref(&x), 9);
                    }
                }
            }
        }
    }

    #[test]
    fn gradient_at_zero_is_product_of_others() {
        let x = f64s(&[4], &[2.0, 0.0, 3.0, 0.0]);
        let graph = graph_of("CumProd", &x, 0, Attrs::new());
        let ones = Tensor::filled(DType::F64, &[4], 1.0);
        let got = run(&gradient_graph(&graph, &[Some(ones)], &[0]), &[x]).expect("it runs").remove(0);
        // y = (a, ab, abc, abcd).
        assert_close(&got, &f64s(&[4], &[1.0, 2.0 + 6.0, 0.0, 0.0]), 0.0);
    }

    #[test]
    fn rejects_axis_out_of_range() {
        let x = generic_tensor(&[2, 3], 1);
        let axis = Tensor::i64(&[], &[2]);
        let failure =
            run_node(("", "CumSum"), &[Some(&x), Some(&axis)], 1, Attrs::new()).expect_err("refused");
        let Failure::Prepare(error) = failure else { panic!("{failure:?}") };
        assert!(error.to_string().contains("axis 2 is out of range for rank 2"), "{error}");
        assert!(error.to_string().contains("CumSum"), "{error}");
    }
}
