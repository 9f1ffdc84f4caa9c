//! Matrix products: `MatMul`, `Gemm` and ONNX Runtime's `FusedMatMul`.
//!
//! Sources:
//!
//! - ONNX MatMul-1, 9, 13: NumPy's `matmul`.
//! - ONNX Gemm-7, 9, 11, 13: `alpha * A' B' + beta * C`.
//! - FusedMatMul of `com.microsoft`: `alpha * A' B'`, where `'` may move the first axis after the batch axes and
//!   transpose the last two axes. Its older name is `TransposeMatMul`.
//!
//! float16, bfloat16 and float32 are accumulated in float32, float64 in float64. Integers wrap.

use ortrain_expr::{Access, BinaryOp, ReduceOp, Strides, Type};
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId};
use ortrain_program::{BufferId, Operand};

use crate::OpError;
use crate::class::{Class, Traits};
use crate::grad::Grad;
use crate::infer::{Infer, broadcast};
use crate::lower::{Lower, NestBuilder};
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::gemm::Gemm;
use crate::support::rewritten_on_read::build_rewritten_on_read;

/// Product of two batches of matrices. `MatMul` is the case without a scale and transpositions.
struct MatMul {
    alpha: f32,
    trans_a: bool,
    trans_b: bool,
    /// For each factor, true if its first axis is a matrix axis: `[rows, batch.., columns]`. It is moved after the
    /// batch axes before the transposition, if the factor has three or more axes.
    trans_batch: [bool; 2],
}

/// Returns a shape with at least two axes: a vector on the left becomes a row, on the right a column.
fn as_matrix<T: Clone>(dims: &[T], left: bool, single: T) -> Vec<T> {
    match dims {
        [only] if left => vec![single, only.clone()],
        [only] => vec![only.clone(), single],
        _ => dims.to_vec(),
    }
}

/// Returns the axes of a factor with the batch axes first: with `moved`, the first axis is moved after them.
fn batch_axes_first<T: Clone>(dims: &[T], moved: bool) -> Vec<T> {
    let mut dims = dims.to_vec();
    if moved && dims.len() > 2 {
        let last = dims.len() - 1;
        dims[..last].rotate_left(1);
    }
    dims
}

/// Returns the permutation that moves the first axis after the batch axes, and its inverse.
fn batch_axes_permutations(rank: usize) -> [Vec<i64>; 2] {
    let axes: Vec<i64> = (0..rank as i64).collect();
    let to = batch_axes_first(&axes, true);
    let mut back = axes;
    back[..rank - 1].rotate_right(1);
    [to, back]
}

/// Returns the sizes of the last two axes, swapped if the factor is transposed.
fn matrix_sizes<T: Clone>(dims: &[T], transposed: bool) -> (T, T) {
    let (rows, columns) = (dims[dims.len() - 2].clone(), dims[dims.len() - 1].clone());
    if transposed { (columns, rows) } else { (rows, columns) }
}

impl Op for MatMul {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 2, 1)?;
        cx.expect_dtype(0, "a number type", DType::is_number)?;
        let dtype = cx.expect_same_dtype([0, 1])?;
        let (Some(a), Some(b)) = (cx.shape(0), cx.shape(1)) else {
            cx.set_output(0, dtype, None);
            return Ok(());
        };
        if a.rank() == 0 || b.rank() == 0 {
            return Err(OpError::invalid(format!(
                "shapes {a} and {b}: a scalar has no matrix product; use Mul"
            )));
        }
        let (left, right) =
            (batch_axes_first(a, self.trans_batch[0]), batch_axes_first(b, self.trans_batch[1]));
        let (left, right) = (as_matrix(&left, true, Dim::Known(1)), as_matrix(&right, false, Dim::Known(1)));
        let ((m, k), (l, n)) = (
            matrix_sizes(&left, self.trans_a && a.rank() > 1),
            matrix_sizes(&right, self.trans_b && b.rank() > 1),
        );
        if let (Some(k), Some(l)) = (k.known(), l.known())
            && k != l
        {
            return Err(OpError::invalid(format!(
                "shapes {a} and {b} do not fit: the left matrix has {k} columns, the right matrix has {l} rows"
            )));
        }
        let batch = |dims: &[Dim]| dims[..dims.len() - 2].iter().cloned().collect::<Shape>();
        let mut shape = broadcast(&batch(&left), &batch(&right))?;
        if a.rank() > 1 {
            shape.0.push(m);
        }
        if b.rank() > 1 {
            shape.0.push(n);
        }
        cx.set_output(0, dtype, Some(shape));
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let (a, b) = (cx.input(0)?, cx.input(1)?);
        let ranks = (cx.shape(a).map(Shape::rank), cx.shape(b).map(Shape::rank));
        let (Some(rank_a), Some(rank_b)) = ranks else {
            return Err(OpError::unsupported(
                "the ranks of both factors must be known to differentiate a product",
            ));
        };
        // Vectors become matrices temporarily.
        let axis = |cx: &mut Grad<'_>, value, axis: i64| {
            let axes = cx.ints("axis", &[axis]);
            cx.add("Unsqueeze", &[value, axes], Attrs::new())
        };
        let (mut left, mut right, mut grad) = (a, b, g);
        let moved = [self.trans_batch[0] && rank_a > 2, self.trans_batch[1] && rank_b > 2];
        for (moved, factor, rank) in [(moved[0], &mut left, rank_a), (moved[1], &mut right, rank_b)] {
            if moved {
                let [perm, _] = batch_axes_permutations(rank);
                *factor = cx.add("Transpose", &[*factor], Attrs::new().with("perm", perm));
            }
        }
        let (left_factor, right_factor) = (left, right);
        if rank_b == 1 {
            right = axis(cx, b, 1);
            grad = axis(cx, grad, -1);
        }
        if rank_a == 1 {
            left = axis(cx, a, 0);
            grad = axis(cx, grad, -2);
        }
        let (ta, tb) = (self.trans_a && rank_a > 1, self.trans_b && rank_b > 1);
        let flat = rank_a <= 2 && rank_b <= 2;
        for (k, input, value, rank) in [(0, a, left_factor, rank_a), (1, b, right_factor, rank_b)] {
            if !cx.needs_grad(k) {
                continue;
            }
            let known_shape =
                cx.shape(input).map(|shape| batch_axes_first(shape, moved[k]).into_iter().collect());
            let factor_shape: Shape = known_shape.unwrap_or_default();
            // dA = g B' and dB = A' g. A transposed factor swaps the operands.
            let (x, tx, y, ty) = match (k, ta, tb) {
                (0, false, _) => (grad, false, right, !tb),
                (0, true, _) => (right, tb, grad, true),
                (_, _, false) => (left, !ta, grad, false),
                _ => (grad, true, left, ta),
            };
            let last = |cx: &Grad<'_>, id| cx.shape(id).and_then(|shape| shape.last().and_then(Dim::known));
            let rows = if k == 1 && rank_b == 2 && !flat && !ta && !tb {
                last(cx, left).zip(last(cx, right))
            } else {
                None
            };
            let gradient = if flat {
                let product = add_gemm(cx, (x, tx), (y, ty), self.alpha);
                if rank == 2 {
                    product
                } else {
                    reduce_to_factor_shape(cx, product, (value, &factor_shape), rank)?
                }
            } else if let Some((inner, outer)) = rows {
                // One product over the rows of all batches, in place of a batch of products and a sum.
                let (shape_a, shape_g) =
                    (cx.ints("rows", &[-1, inner as i64]), cx.ints("rows", &[-1, outer as i64]));
                let rows_a = cx.add("Reshape", &[left, shape_a], Attrs::new());
                let rows_g = cx.add("Reshape", &[grad, shape_g], Attrs::new());
                add_gemm(cx, (rows_a, true), (rows_g, false), self.alpha)
            } else {
                let attrs = Attrs::new()
                    .with("transA", i64::from(tx))
                    .with("transB", i64::from(ty))
                    .with("alpha", self.alpha);
                let product = cx.add_in("com.microsoft", "FusedMatMul", &[x, y], attrs);
                reduce_to_factor_shape(cx, product, (value, &factor_shape), rank)?
            };
            let gradient = if moved[k] {
                let [_, perm] = batch_axes_permutations(rank);
                cx.add("Transpose", &[gradient], Attrs::new().with("perm", perm))
            } else {
                gradient
            };
            cx.set_grad(k, gradient);
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let dtype = cx.dtype(0);
        let (dims_a, dims_b) = (cx.dims(0), cx.dims(1));
        let strides = |k: usize, dims: &[usize]| {
            batch_axes_first(&Access::contiguous(dtype, dims).strides, self.trans_batch[k])
        };
        let (strides_a, strides_b) = (strides(0, &dims_a), strides(1, &dims_b));
        let (dims_a, dims_b) =
            (batch_axes_first(&dims_a, self.trans_batch[0]), batch_axes_first(&dims_b, self.trans_batch[1]));
        let (left, right) = (as_matrix(&dims_a, true, 1), as_matrix(&dims_b, false, 1));
        // The axis that makes a vector a matrix has size 1, so its stride is 0.
        let (strides_a, strides_b) = (as_matrix(&strides_a, true, 0), as_matrix(&strides_b, false, 0));
        let (ta, tb) = (self.trans_a && dims_a.len() > 1, self.trans_b && dims_b.len() > 1);
        let ((m, k), (_, n)) = (matrix_sizes(&left, ta), matrix_sizes(&right, tb));
        let (stack_a, stack_b) = (&left[..left.len() - 2], &right[..right.len() - 2]);
        let rank = stack_a.len().max(stack_b.len());
        let at = |stack: &[usize], axis: usize| {
            if axis + stack.len() < rank { 1 } else { stack[axis + stack.len() - rank] }
        };
        let batch: Vec<usize> = (0..rank)
            .map(|axis| if at(stack_a, axis) == 1 { at(stack_b, axis) } else { at(stack_a, axis) })
            .collect();
        let access = |dims: &[usize], strides: &[isize], transposed: bool| {
            let lead = rank + 2 - dims.len();
            let stretched = dims.iter().zip(strides).map(|(&dim, &stride)| if dim == 1 { 0 } else { stride });
            let mut strides: Strides = std::iter::repeat_n(0, lead).chain(stretched).collect();
            if transposed {
                strides.swap(rank, rank + 1);
            }
            Access { dtype, offset: 0, strides, len: dims.iter().product() }
        };
        let a = Operand { buffer: cx.input(0), access: access(&left, &strides_a, ta) };
        let b = Operand { buffer: cx.input(1), access: access(&right, &strides_b, tb) };
        let alpha = self.alpha;
        emit_product(cx, dtype, &batch, (m, n, k), a, b, |_, nest, value| {
            let alpha = nest.b.constant(nest.b.ty(value), f64::from(alpha));
            nest.b.mul(value, alpha)
        })
    }
}

/// Adds `alpha * X' Y'` of two matrices, each transposed or not.
fn add_gemm(cx: &mut Grad<'_>, (x, tx): (ValueId, bool), (y, ty): (ValueId, bool), alpha: f32) -> ValueId {
    let attrs = Attrs::new().with("alpha", alpha).with("transA", i64::from(tx)).with("transB", i64::from(ty));
    cx.add("Gemm", &[x, y], attrs)
}

/// Reduces the gradient of a factor to `factor_shape`. Broadcast batch axes are summed, and the axis that
/// made a vector a matrix is dropped.
fn reduce_to_factor_shape(
    cx: &mut Grad<'_>,
    product: ValueId,
    (value, factor_shape): (ValueId, &Shape),
    rank: usize,
) -> Result<ValueId, OpError> {
    let output = cx.output(0, "y");
    let Some(from) = cx.shape(output).cloned() else {
        return Err(OpError::unsupported(
            "the ranks of both factors must be known to differentiate a product",
        ));
    };
    let ranks =
        (cx.shape(cx.input(0)?).map_or(0, Shape::rank), cx.shape(cx.input(1)?).map_or(0, Shape::rank));
    let stack = from.rank() + usize::from(ranks.0 == 1) + usize::from(ranks.1 == 1) - 2;
    let own_stack = rank.max(2) - 2;
    let lead = stack - own_stack;
    let mut axes: Vec<i64> = (0..lead as i64).collect();
    let mut certain = true;
    for axis in 0..own_stack {
        let (small, large) = (&factor_shape[axis], &from[axis + lead]);
        if small.is_one() && !large.is_one() {
            axes.push((axis + lead) as i64);
        } else if small != large && small.known().is_none() {
            certain = false;
        }
    }
    if !certain {
        return cx.sum_to(product, value, product);
    }
    let mut value_grad = product;
    if !axes.is_empty() {
        let axes = cx.ints("axes", &axes);
        value_grad = cx.add("ReduceSum", &[value_grad, axes], Attrs::new().with("keepdims", 1i64));
    }
    if !axes.is_empty() && lead > 0 || rank == 1 {
        let shape = cx.shape_of(value);
        value_grad = cx.add("Reshape", &[value_grad, shape], Attrs::new());
    }
    Ok(value_grad)
}

/// Emits a product with the epilogue `finish`. The result is output 0, row-major over `batch + [m, n]`.
///
/// # Errors
/// Returns an error if the instruction is invalid.
fn emit_product(
    cx: &mut Lower<'_>,
    dtype: DType,
    batch: &[usize],
    (m, n, k): (usize, usize, usize),
    a: Operand,
    b: Operand,
    finish: impl FnOnce(&mut Lower<'_>, &mut NestBuilder, ortrain_expr::Reg) -> ortrain_expr::Reg,
) -> Result<(), OpError> {
    let dims: Vec<usize> = batch.iter().copied().chain([m, n]).collect();
    let output = cx.output(0);
    if dtype.is_float() {
        let accumulated = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let mut nest = cx.nest(&dims, 0);
        let value = nest.accumulator(accumulated);
        let value = finish(cx, &mut nest, value);
        nest.store_contiguous(cx, output, value);
        return cx.emit(nest.matmul((batch, m, n, k), a, b));
    }
    // Integers are summed in their own type. The matrix product instruction only has float accumulators.
    let space: Vec<usize> = dims.iter().copied().chain([k]).collect();
    let spread = |access: &Access, row: bool| {
        let mut strides: Strides = access.strides[..batch.len()].iter().copied().collect();
        let (first, second) = (access.strides[batch.len()], access.strides[batch.len() + 1]);
        strides.extend(if row { [first, 0, second] } else { [0, second, first] });
        strides
    };
    let mut nest = cx.nest(&space, 1);
    let x = nest.load_strided(cx, a.buffer, 0, &spread(&a.access, true));
    let y = nest.load_strided(cx, b.buffer, 0, &spread(&b.access, false));
    let term = nest.b.mul(x, y);
    let sum = nest.reduce(ReduceOp::Sum, term);
    let value = finish(cx, &mut nest, sum);
    nest.store_outer(cx, output, value);
    cx.emit(nest.instruction())
}

impl Op for Gemm {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(2, 3, 1)?;
        cx.expect_dtype(0, "a number type", DType::is_number)?;
        let dtype = cx.expect_same_dtype([0, 1, 2])?;
        for k in 0..2 {
            if let Some(shape) = cx.shape(k)
                && shape.rank() != 2
            {
                return Err(OpError::invalid(format!("input {k} has shape {shape}, expected a matrix")));
            }
        }
        let (Some(a), Some(b)) = (cx.shape(0), cx.shape(1)) else {
            cx.set_output(0, dtype, Some(cx.unknown_shape(0, 2)));
            return Ok(());
        };
        let ((m, k), (l, n)) = (matrix_sizes(a, self.trans_a), matrix_sizes(b, self.trans_b));
        if let (Some(k), Some(l)) = (k.known(), l.known())
            && k != l
        {
            return Err(OpError::invalid(format!(
                "shapes {a}{} and {b}{} do not fit: the left matrix has {k} columns, the right matrix has {l} rows",
                if self.trans_a { " (transposed)" } else { "" },
                if self.trans_b { " (transposed)" } else { "" },
            )));
        }
        let shape: Shape = [m, n].into_iter().collect();
        if let Some(c) = cx.shape(2) {
            let wide = broadcast(&shape, c)?;
            if wide.rank() != 2
                || wide
                    .iter()
                    .zip(shape.iter())
                    .any(|(x, y)| matches!((x.known(), y.known()), (Some(x), Some(y)) if x != y))
            {
                return Err(OpError::invalid(format!(
                    "C of shape {c} cannot be broadcast to the product's shape {shape}"
                )));
            }
        }
        cx.set_output(0, dtype, Some(shape));
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        let (a, b) = (cx.input(0)?, cx.input(1)?);
        let (ta, tb) = (self.trans_a, self.trans_b);
        if cx.needs_grad(0) {
            let gradient = if ta {
                add_gemm(cx, (b, tb), (g, true), self.alpha)
            } else {
                add_gemm(cx, (g, false), (b, !tb), self.alpha)
            };
            cx.set_grad(0, gradient);
        }
        if cx.needs_grad(1) {
            let gradient = if tb {
                add_gemm(cx, (g, true), (a, ta), self.alpha)
            } else {
                add_gemm(cx, (a, !ta), (g, false), self.alpha)
            };
            cx.set_grad(1, gradient);
        }
        if let (true, Some(c)) = (cx.needs_grad(2), cx.optional_input(2)) {
            let y = cx.output(0, "y");
            let mut gradient = cx.sum_to(g, c, y)?;
            if self.beta != 1.0 {
                let beta = cx.constant("beta", Tensor::scalar(cx.dtype(c)?, f64::from(self.beta)));
                gradient = cx.add("Mul", &[gradient, beta], Attrs::new());
            }
            cx.set_grad(2, gradient);
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let (dims_a, dims_b) = (cx.dims(0), cx.dims(1));
        let ((m, k), (_, n)) = (matrix_sizes(&dims_a, self.trans_a), matrix_sizes(&dims_b, self.trans_b));
        let dtype = cx.dtype(0);
        let operand = |buffer: BufferId, dims: &[usize], transposed: bool| {
            let mut operand = Operand::contiguous(buffer, dtype, dims);
            if transposed {
                operand.access.strides.swap(0, 1);
            }
            operand
        };
        let a = operand(cx.input(0), &dims_a, self.trans_a);
        let b = operand(cx.input(1), &dims_b, self.trans_b);
        let c = cx.has_input(2).then(|| (cx.input(2), cx.dims(2)));
        let (alpha, beta) = (f64::from(self.alpha), f64::from(self.beta));
        emit_product(cx, dtype, &[], (m, n, k), a, b, |_, nest, value| {
            // Integers are scaled in float64, because alpha and beta are floats.
            let ty = nest.b.ty(value);
            let scaled = |nest: &mut NestBuilder, value, factor: f64| {
                if factor == 1.0 {
                    return value;
                }
                let wide = if ty.is_float() { ty } else { Type::F64 };
                let x = nest.b.convert(value, wide);
                let factor = nest.b.constant(wide, factor);
                let product = nest.b.mul(x, factor);
                nest.b.convert(product, ty)
            };
            let mut total = scaled(nest, value, alpha);
            if let Some((buffer, dims)) = c
                && beta != 0.0
            {
                // The nest of an integer product has a third axis, the reduction.
                let mut to: Vec<usize> = nest.dims()[..2].to_vec();
                to.truncate(2);
                let mut access = Access::broadcast(dtype, &dims, &to);
                access.strides.resize(nest.dims().len(), 0);
                let old = nest.load(buffer, access);
                let old = scaled(nest, old, beta);
                total = nest.b.binary(BinaryOp::Add, total, old);
            }
            total
        })
    }
}

fn build_matmul(_: &Graph, _: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(MatMul { alpha: 1.0, trans_a: false, trans_b: false, trans_batch: [false; 2] }))
}

fn build_fused(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let flag = |name: &str| Ok::<_, OpError>(node.attrs.int(name)?.unwrap_or(0) != 0);
    Ok(Box::new(MatMul {
        alpha: node.attrs.float("alpha")?.unwrap_or(1.0),
        trans_a: flag("transA")?,
        trans_b: flag("transB")?,
        trans_batch: [flag("transBatchA")?, flag("transBatchB")?],
    }))
}

fn build_gemm(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Gemm::read(node)?))
}

/// Before opset 11 input C is required: adds a zero with `beta` 0.
fn downgrade_gemm(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.version() < 11 && rw.input(2).is_none() {
        let (a, b) = (rw.required_input(0)?, rw.required_input(1)?);
        let dtype = rw.dtype(a).ok_or_else(|| OpError::invalid("the type of input 0 is not known"))?;
        let zero = rw.constant("C", Tensor::zeros(dtype, vec![1]).expect("one element"));
        let attrs = rw.attrs().clone().with("beta", 0.0f32);
        rw.emit_same_op(&[Some(a), Some(b), Some(zero)], attrs);
    }
    Ok(())
}

/// Renames `TransposeMatMul` to `FusedMatMul`.
fn rename_to_fused_matmul(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let (inputs, attrs) = (rw.node().inputs.to_vec(), rw.attrs().clone());
    rw.emit_op("com.microsoft", "FusedMatMul", &inputs, attrs);
    Ok(())
}

/// Decomposes `FusedMatMul` into Transpose, MatMul and Mul.
fn decompose_fused(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let mut factors = [rw.required_input(0)?, rw.required_input(1)?];
    let dtype = rw.dtype(factors[0]).ok_or_else(|| OpError::invalid("the type of input 0 is not known"))?;
    let names = [("transA", "transBatchA"), ("transB", "transBatchB")];
    for (factor, (transposed, moved)) in factors.iter_mut().zip(names) {
        let flag = |name: &str| Ok::<_, OpError>(rw.attrs().int(name)?.unwrap_or(0) != 0);
        let (transposed, moved) = (flag(transposed)?, flag(moved)?);
        if !transposed && !moved {
            continue;
        }
        let rank = rw.shape(*factor).map(Shape::rank);
        let rank =
            rank.ok_or_else(|| OpError::unsupported("the rank of a transposed factor must be known"))?;
        let axes: Vec<i64> = (0..rank as i64).collect();
        let mut perm = batch_axes_first(&axes, moved);
        if transposed && rank > 1 {
            perm.swap(rank - 2, rank - 1);
        }
        if perm != axes {
            *factor = rw.add("Transpose", &[*factor], Attrs::new().with("perm", perm));
        }
    }
    let mut result = rw.add("MatMul", &factors, Attrs::new());
    let alpha = rw.attrs().float("alpha")?.unwrap_or(1.0);
    if alpha != 1.0 {
        let alpha = rw.constant("alpha", Tensor::scalar(dtype, f64::from(alpha)));
        result = rw.add("Mul", &[result, alpha], Attrs::new());
    }
    rw.replace_output(0, result);
    Ok(())
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "MatMul", &[1, 9, 13], build_matmul)
            .class(Class::MatrixProduct)
            .traits(Traits::UNBOUNDED)
            .weights(&[0, 1]),
        Definition::new("", "Gemm", &[7, 9, 11, 13], build_gemm)
            .class(Class::AffineProduct)
            .traits(Traits::UNBOUNDED)
            .downgrade(downgrade_gemm)
            .weights(&[0, 1, 2]),
        Definition::new("com.microsoft", "FusedMatMul", &[1], build_fused)
            .class(Class::ScaledProduct)
            .traits(Traits::UNBOUNDED)
            .decompose(decompose_fused),
        // No model has version 2, so each node counts as an older version and is upgraded.
        Definition::new("com.microsoft", "TransposeMatMul", &[1, 2], build_rewritten_on_read)
            .always_rewritten(rename_to_fused_matmul),
    ]
}

#[cfg(test)]
mod tests {
    use ortrain_graph::ValueType;

    use super::*;
    use crate::passes::infer::infer;
    use crate::testing::{add, check_gradients, f64s, generic_tensor, graph};

    /// One gradient graph fits batches of one and of two: it determines at run time which factor was broadcast.
    #[test]
    fn gradients_with_symbolic_batch_axes() {
        for (m, n) in [(2, 2), (1, 2), (2, 1), (1, 1)] {
            let inputs = [generic_tensor(&[m, 3, 2], 1), generic_tensor(&[4, n, 2, 3], 2)];
            let (mut product, ids) = graph(&[&inputs[0], &inputs[1]]);
            let shapes = [
                vec![Dim::symbol("m"), Dim::Known(3), Dim::Known(2)],
                vec![Dim::symbol("k"), Dim::symbol("n"), Dim::Known(2), Dim::Known(3)],
            ];
            for (&id, shape) in ids.iter().zip(shapes) {
                product.value_mut(id).ty = ValueType::Tensor(DType::F64, Some(shape.into_iter().collect()));
            }
            let ports = [Some(ids[0]), Some(ids[1])];
            add(&mut product, ("", "MatMul"), "y", &ports, 1, Attrs::new());
            infer(&mut product).expect("valid");
            check_gradients(&product, &inputs, &[0, 1], &[0]);
        }
        // A vector has no batch axes.
        let inputs = [f64s(&[2], &[0.5, -1.0]), generic_tensor(&[2, 2, 3], 3)];
        let (mut product, ids) = graph(&[&inputs[0], &inputs[1]]);
        add(&mut product, ("", "MatMul"), "y", &[Some(ids[0]), Some(ids[1])], 1, Attrs::new());
        infer(&mut product).expect("valid");
        check_gradients(&product, &inputs, &[0, 1], &[0]);
    }
}
