//! Scatter: writes elements or slices at indices, or combines them with the elements of the data.
//!
//! ScatterElements-11, 13, 16, 18 (<https://onnx.ai/onnx/operators/onnx__ScatterElements.html>), Scatter-9 (its older
//! name) and ScatterND-11, 13, 16, 18 (<https://onnx.ai/onnx/operators/onnx__ScatterND.html>) of ONNX, with the
//! reductions `none`, `add`, `mul`, `max` and `min`. Negative indices count from the end. An index out of range fails
//! the run, and nothing is committed. ONNX leaves duplicate indices with `none` undefined; here the last update wins,
//! as in onnxruntime.
//!
//! Gradients:
//! - `none`: the gradient of the data is 0 at written positions. Updates that were overwritten get 0, too.
//! - `mul`: each factor gets the product of the other factors, including zeros.
//! - `max` and `min`: data and updates that are equal to the result share the gradient equally.
//!
//! Products and extremes compare every update with every element (for ScatterElements, only along the axis).

use ortrain_expr::{BinaryOp, CompareOp, ReduceOp, Type};
use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, Tensor, ValueId};
use rustc_hash::FxHashSet;

use crate::OpError;
use crate::class::Class;
use crate::grad::Grad;
use crate::infer::{Infer, normalize_axis};
use crate::lower::{Lower, split_at_axis};
use crate::op::{Definition, Op};
use crate::rewrite::Rewrite;
use crate::support::element_indices::{
    check_compatible_shape, check_elements, compute_element_indices, compute_slice_indices, flat_index,
    infer_slices_shape,
};
use crate::support::formula::formula;
use crate::support::rewritten_on_read::build_rewritten_on_read;
use crate::support::rows::{
    ScatterRows, check_indices, emit_copy, emit_scatter_sum, guard_indices, scatter_overwrite,
    wrap_negative_index,
};

/// Target of the indices.
#[derive(Clone, Copy)]
enum IndexForm {
    /// Elements, by an index along an axis.
    Elements { axis: i64 },
    /// Slices, by coordinates along the first axes.
    Slices,
}

/// Combination of an update with the present element.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reduction {
    None,
    Add,
    Mul,
    Max,
    Min,
}

struct Scatter {
    form: IndexForm,
    reduction: Reduction,
}

impl Scatter {
    fn scatter_positions(&self, cx: &mut Lower<'_>, dims: &[usize]) -> Result<ScatterRows, OpError> {
        match self.form {
            IndexForm::Elements { axis } => {
                compute_element_indices(cx, 1, dims, normalize_axis(axis, dims.len())?)
            }
            IndexForm::Slices => compute_slice_indices(cx, 1, dims, 0),
        }
    }

    /// Writes the updates to a copy of the data, in their order.
    fn overwrite(&self, cx: &mut Lower<'_>, rows: &ScatterRows) -> Result<(), OpError> {
        let (data, updates, output) = (cx.input(0), cx.input(2), cx.output(0));
        emit_copy(cx, data, output)?;
        scatter_overwrite(cx, rows, updates, output)
    }

    /// Combines each element with its updates, through a search over the indices.
    fn combine(&self, cx: &mut Lower<'_>, dims: &[usize]) -> Result<(), OpError> {
        let (op, reduce) = match self.reduction {
            Reduction::Max => (BinaryOp::Max, ReduceOp::Max),
            Reduction::Min => (BinaryOp::Min, ReduceOp::Min),
            _ => (BinaryOp::Mul, ReduceOp::Prod),
        };
        let (data, updates, output) = (cx.input(0), cx.input(2), cx.output(0));
        let (mut nest, old, update, hit) = match self.form {
            IndexForm::Elements { axis } => {
                let axis = normalize_axis(axis, dims.len())?;
                let update_dims = cx.dims(1);
                guard_indices(cx, 1, dims[axis])?;
                let space: Vec<usize> = dims.iter().copied().chain([update_dims[axis]]).collect();
                let mut nest = cx.nest(&space, 1);
                let mut data_access = cx.contiguous_access(data, dims);
                data_access.strides.push(0);
                let old = nest.load(data, data_access);
                // The update at the same coordinates except along the axis, if it exists.
                let along = nest.b.coordinate(dims.len());
                let at = flat_index(&mut nest, &update_dims, axis, along);
                let indices = cx.input(1);
                let loaded = nest.gather(cx, indices, at);
                let index = nest.b.convert(loaded, Type::I64);
                let row = wrap_negative_index(&mut nest.b, index, dims[axis]);
                let coordinate = nest.b.coordinate(axis);
                let mut hit = nest.b.compare(CompareOp::Eq, coordinate, row);
                for (k, (&update_size, &size)) in update_dims.iter().zip(dims).enumerate() {
                    if k != axis && update_size < size {
                        let (coordinate, end) = (nest.b.coordinate(k), nest.b.int(update_size as i64));
                        let inside = nest.b.compare(CompareOp::Lt, coordinate, end);
                        hit = nest.b.binary(BinaryOp::And, hit, inside);
                    }
                }
                let update = nest.gather(cx, updates, at);
                (nest, old, update, hit)
            }
            IndexForm::Slices => {
                let rows = self.scatter_positions(cx, dims)?;
                let inner = rows.inner as isize;
                let mut nest = cx.nest(&[rows.rows, rows.inner, rows.count], 1);
                let old = nest.load_strided(cx, data, 0, &[inner, 1, 0]);
                let update_row = nest.load_strided(cx, rows.row_indices, 0, &[0, 0, 1]);
                let coordinate = nest.b.coordinate(0);
                let hit = nest.b.compare(CompareOp::Eq, coordinate, update_row);
                let update = nest.load_strided(cx, updates, 0, &[0, 1, inner]);
                (nest, old, update, hit)
            }
        };
        // Other updates count as the element itself, or as a factor of 1.
        let neutral = match self.reduction {
            Reduction::Mul => nest.b.constant(nest.b.ty(old), 1.0),
            _ => old,
        };
        let counted = nest.b.select(hit, update, neutral);
        let total = nest.reduce(reduce, counted);
        let result = nest.b.binary(op, old, total);
        nest.store_outer(cx, output, result);
        cx.emit(nest.instruction())
    }
}

impl Op for Scatter {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        cx.check_arity(3, 3, 1)?;
        let dtype = cx.expect_same_dtype([0, 2])?;
        if self.reduction != Reduction::None && dtype == DType::Bool {
            return Err(OpError::invalid("elements of type bool cannot be combined"));
        }
        let data = cx.shape(0).cloned();
        match self.form {
            IndexForm::Elements { axis } => {
                let axis = data.as_ref().map(|data| check_elements(data, cx.shape(1), axis)).transpose()?;
                check_indices(cx, 1, axis.and_then(|axis| data.as_ref().map(|data| &data[axis])))?;
                check_compatible_shape(cx, 2, cx.shape(1))?;
            }
            IndexForm::Slices => {
                cx.expect_dtype(1, "int64", |dtype| dtype == DType::I64)?;
                if let (Some(data), Some(indices)) = (&data, cx.shape(1)) {
                    let expected = infer_slices_shape(data, indices, 0)?;
                    check_compatible_shape(cx, 2, Some(&expected))?;
                }
            }
        }
        cx.set_output(0, dtype, data);
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let Some(g) = cx.output_grad(0) else { return Ok(()) };
        match self.reduction {
            Reduction::None => {
                if cx.needs_grad(0) {
                    let updates = cx.input(2)?;
                    let dtype = cx.dtype(updates)?;
                    let shape = cx.shape_of(updates);
                    let zero = Attrs::new().with("value", Tensor::filled(dtype, &[1], 0.0));
                    let zeros = cx.add("ConstantOfShape", &[shape], zero);
                    let masked_gradient = self.scatter_at_indices(cx, g, zeros, "none")?;
                    cx.set_grad(0, masked_gradient);
                }
                if cx.needs_grad(2) {
                    let mut gathered = self.gather_at_indices(cx, g)?;
                    if let Some(is_last) = self.last_update_mask(cx)? {
                        let zero = Tensor::scalar(cx.dtype(cx.input(2)?)?, 0.0);
                        let zero = cx.constant("zero", zero);
                        gathered = cx.add("Where", &[is_last, gathered, zero], Attrs::new());
                    }
                    cx.set_grad(2, gathered);
                }
                Ok(())
            }
            Reduction::Add => {
                cx.set_grad(0, g);
                if cx.needs_grad(2) {
                    let gathered = self.gather_at_indices(cx, g)?;
                    cx.set_grad(2, gathered);
                }
                Ok(())
            }
            Reduction::Mul => self.product_gradient(cx, g),
            Reduction::Max | Reduction::Min => self.extreme_gradient(cx, g),
        }
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        let dims = cx.dims(0);
        match self.reduction {
            Reduction::None => {
                let rows = self.scatter_positions(cx, &dims)?;
                self.overwrite(cx, &rows)
            }
            Reduction::Add => {
                let rows = self.scatter_positions(cx, &dims)?;
                let (data, updates, output) = (cx.input(0), cx.input(2), cx.output(0));
                emit_scatter_sum(cx, &rows, updates, Some(data), output)
            }
            _ => self.combine(cx, &dims),
        }
    }
}

impl Scatter {
    /// Returns true if the indices are constant and distinct.
    fn has_distinct_indices(&self, cx: &Grad<'_>) -> Result<bool, OpError> {
        let (data, indices) = (cx.input(0)?, cx.input(1)?);
        let Some(tensor) = cx.constant_of(indices) else { return Ok(false) };
        let (Some(values), dims) = (tensor.to_i64(), tensor.dims()) else { return Ok(false) };
        let rank = cx.shape(data).map(Shape::rank);
        // A negative index may equal a positive one, which cannot be checked if the size of the axis is unknown.
        let from_front = |index: i64, axis: usize| {
            let size = cx.shape(data).and_then(|shape| shape.get(axis)).and_then(Dim::known);
            if index >= 0 { Some(index) } else { size.map(|size| index + size as i64) }
        };
        let mut positions: FxHashSet<Vec<i64>> = FxHashSet::default();
        Ok(match self.form {
            IndexForm::Elements { axis } => {
                let Some(axis) = rank.map(|rank| normalize_axis(axis, rank)).transpose()? else {
                    return Ok(false);
                };
                let (_, size, after) = split_at_axis(dims, axis);
                values.iter().enumerate().all(|(k, &index)| {
                    let line = k / (size * after) * after + k % after;
                    from_front(index, axis).is_some_and(|row| positions.insert(vec![line as i64, row]))
                })
            }
            IndexForm::Slices => {
                let width = dims.last().copied().unwrap_or(1).max(1);
                values.chunks(width).all(|index_vector| {
                    let coordinates =
                        index_vector.iter().enumerate().map(|(axis, &index)| from_front(index, axis));
                    coordinates
                        .collect::<Option<Vec<i64>>>()
                        .is_some_and(|position| positions.insert(position))
                })
            }
        })
    }

    /// Emits a mask of the updates that are not overwritten by a later update. It scatters and gathers the indices of
    /// the updates. Returns `None` if no update is overwritten.
    fn last_update_mask(&self, cx: &mut Grad<'_>) -> Result<Option<ValueId>, OpError> {
        if self.has_distinct_indices(cx)? {
            return Ok(None);
        }
        let (data, updates) = (cx.input(0)?, cx.input(2)?);
        let number = |cx: &mut Grad<'_>, value: i64| cx.constant("number", Tensor::i64(&[], &[value]));
        let (zero, one) = (number(cx, 0), number(cx, 1));
        let count = cx.add("Size", &[updates], Attrs::new());
        let numbers = cx.add("Range", &[zero, count, one], Attrs::new());
        let shape = cx.shape_of(updates);
        let numbers = cx.add("Reshape", &[numbers, shape], Attrs::new());
        let no_update = Scatter::filled_like(cx, data, DType::I64, -1.0);
        let last = self.scatter_at_indices(cx, no_update, numbers, "none")?;
        let last = self.gather_at_indices(cx, last)?;
        Ok(Some(cx.add("Equal", &[last, numbers], Attrs::new())))
    }

    /// Gathers the elements of `value` at the indices.
    fn gather_at_indices(&self, cx: &mut Grad<'_>, value: ValueId) -> Result<ValueId, OpError> {
        let indices = cx.input(1)?;
        Ok(match self.form {
            IndexForm::Elements { axis } => {
                cx.add("GatherElements", &[value, indices], Attrs::new().with("axis", axis))
            }
            IndexForm::Slices => cx.add("GatherND", &[value, indices], Attrs::new()),
        })
    }

    /// Scatters `updates` into `data` at the indices.
    fn scatter_at_indices(
        &self,
        cx: &mut Grad<'_>,
        data: ValueId,
        updates: ValueId,
        reduction: &str,
    ) -> Result<ValueId, OpError> {
        let indices = cx.input(1)?;
        let attrs =
            if reduction == "none" { Attrs::new() } else { Attrs::new().with("reduction", reduction) };
        Ok(match self.form {
            IndexForm::Elements { axis } => {
                cx.add("ScatterElements", &[data, indices, updates], attrs.with("axis", axis))
            }
            IndexForm::Slices => cx.add("ScatterND", &[data, indices, updates], attrs),
        })
    }

    /// Fills a tensor of the shape of `like` with one value.
    fn filled_like(cx: &mut Grad<'_>, like: ValueId, dtype: DType, value: f64) -> ValueId {
        let shape = cx.shape_of(like);
        let value = Attrs::new().with("value", Tensor::filled(dtype, &[1], value));
        cx.add("ConstantOfShape", &[shape], value)
    }

    /// Computes the gradient of a product. The gradient of the data contains the updates of the element; the gradient
    /// of an update contains the data and the other updates. The product of the others is the product of all nonzero
    /// updates, divided by the update itself if it is nonzero. It is 0 if another update is zero.
    fn product_gradient(&self, cx: &mut Grad<'_>, g: ValueId) -> Result<(), OpError> {
        let (data, updates) = (cx.input(0)?, cx.input(2)?);
        let dtype = cx.dtype(data)?;
        if cx.needs_grad(0) {
            let ones = Scatter::filled_like(cx, data, dtype, 1.0);
            let factors = self.scatter_at_indices(cx, ones, updates, "mul")?;
            let gradient = cx.add("Mul", &[g, factors], Attrs::new());
            cx.set_grad(0, gradient);
        }
        if cx.needs_grad(2) {
            let number = |cx: &mut Grad<'_>, value: f64| cx.constant("number", Tensor::scalar(dtype, value));
            let (zero, one) = (number(cx, 0.0), number(cx, 1.0));
            let is_zero = cx.add("Equal", &[updates, zero], Attrs::new());
            let present = cx.add("Where", &[is_zero, one, updates], Attrs::new());
            let ones = Scatter::filled_like(cx, data, dtype, 1.0);
            let product = self.scatter_at_indices(cx, ones, present, "mul")?;
            let product = self.gather_at_indices(cx, product)?;
            let counted = cx.add("Cast", &[is_zero], Attrs::new().with("to", i64::from(dtype.to_onnx())));
            let none = Scatter::filled_like(cx, data, dtype, 0.0);
            let zeros = self.scatter_at_indices(cx, none, counted, "add")?;
            let zeros = self.gather_at_indices(cx, zeros)?;
            // Number of zeros among the others.
            let others_zero = cx.add("Sub", &[zeros, counted], Attrs::new());
            let values = [others_zero, product, present, zero];
            let other_products = formula(cx, values, |[others_zero, product, present, zero]| {
                others_zero.equals(zero).choose(product / present, zero)
            });
            let arriving = cx.add("Mul", &[g, data], Attrs::new());
            let arriving = self.gather_at_indices(cx, arriving)?;
            let gradient = cx.add("Mul", &[arriving, other_products], Attrs::new());
            cx.set_grad(2, gradient);
        }
        Ok(())
    }

    /// Computes the gradient of an extreme: an equal share for data and updates that are equal to the result.
    fn extreme_gradient(&self, cx: &mut Grad<'_>, g: ValueId) -> Result<(), OpError> {
        let (data, updates, y) = (cx.input(0)?, cx.input(2)?, cx.output(0, "y"));
        let dtype = cx.dtype(data)?;
        let cast = Attrs::new().with("to", i64::from(dtype.to_onnx()));
        let is_data = cx.add("Equal", &[data, y], Attrs::new());
        let result = self.gather_at_indices(cx, y)?;
        let chosen = cx.add("Equal", &[updates, result], Attrs::new());
        let data_marks = cx.add("Cast", &[is_data], cast.clone());
        let marks = cx.add("Cast", &[chosen], cast);
        let ties = self.scatter_at_indices(cx, data_marks, marks, "add")?;
        let share = cx.add("Div", &[g, ties], Attrs::new());
        let zero = cx.constant("zero", Tensor::scalar(dtype, 0.0));
        if cx.needs_grad(0) {
            let gradient = cx.add("Where", &[is_data, share, zero], Attrs::new());
            cx.set_grad(0, gradient);
        }
        if cx.needs_grad(2) {
            let share = self.gather_at_indices(cx, share)?;
            let gradient = cx.add("Where", &[chosen, share, zero], Attrs::new());
            cx.set_grad(2, gradient);
        }
        Ok(())
    }
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    let reduction = match node.attrs.string("reduction")?.unwrap_or("none") {
        "none" => Reduction::None,
        "add" => Reduction::Add,
        "mul" => Reduction::Mul,
        "max" => Reduction::Max,
        "min" => Reduction::Min,
        other => return Err(OpError::invalid(format!("reduction {other:?} is not defined"))),
    };
    let form = match &*node.op {
        "ScatterND" => IndexForm::Slices,
        _ => IndexForm::Elements { axis: node.attrs.int("axis")?.unwrap_or(0) },
    };
    Ok(Box::new(Scatter { form, reduction }))
}

/// Checks versions: combinations came with opset 16, extremes with 18. Before opset 11 the operator has another name.
fn downgrade(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let version = rw.version();
    let reduction = rw.attrs().string("reduction")?.map(ToOwned::to_owned);
    let oldest = match reduction.as_deref() {
        Some("add" | "mul") => 16,
        Some("max" | "min") => 18,
        _ => 9,
    };
    if version < oldest {
        return Err(OpError::unsupported(match reduction {
            Some(reduction) => format!("the reduction {reduction:?} needs opset {oldest} or newer"),
            None => format!("it needs opset {oldest} or newer"),
        }));
    }
    let mut attrs = rw.attrs().clone();
    attrs.0.remove("reduction");
    let inputs = rw.node().inputs.to_vec();
    if version < 11 && &*rw.node().op == "ScatterElements" {
        rw.emit_op("", "Scatter", &inputs, attrs);
    } else if version < 16 && reduction.is_some() {
        rw.emit_same_op(&inputs, attrs);
    }
    Ok(())
}

/// Decomposes sums for opsets before 16, which cannot add several updates at one position. For elements, every update
/// is compared with every position along the axis. For slices, updates are multiplied by a one-hot matrix of their
/// coordinates.
fn decompose_sum(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    if rw.attrs().string("reduction")? != Some("add") {
        return Ok(());
    }
    let (data, indices, updates) = (rw.required_input(0)?, rw.required_input(1)?, rw.required_input(2)?);
    let (Some(rank), Some(dtype)) = (rw.shape(data).map(Shape::rank), rw.dtype(data)) else { return Ok(()) };
    let summed = if &*rw.node().op == "ScatterElements" {
        let axis = normalize_axis(rw.attrs().int("axis")?.unwrap_or(0), rank)?;
        sum_elements(rw, axis, rank, dtype)
    } else {
        let Some(width) = rw.shape(indices).and_then(|shape| shape.iter().last()).and_then(Dim::known) else {
            return Ok(());
        };
        sum_slices(rw, (data, indices, updates), width, rank, dtype)
    };
    let result = rw.add("Add", &[data, summed], Attrs::new());
    rw.replace_output(0, result);
    Ok(())
}

/// First opset with an operator that writes elements at positions.
const SCATTER_SINCE: i64 = 9;

/// Sums the updates of each element of the data; updates have indices along an axis.
fn sum_elements(rw: &mut Rewrite<'_>, axis: usize, rank: usize, dtype: DType) -> ValueId {
    let inputs: Vec<ValueId> = rw.node().present_inputs().collect();
    let (data, indices, updates) = (inputs[0], inputs[1], inputs[2]);
    let zero = rw.constant("zero", Tensor::scalar(dtype, 0.0));
    let single = rw.version() >= SCATTER_SINCE
        && rw.shape(indices).and_then(|shape| shape.get(axis)).and_then(Dim::known) == Some(1);
    if single {
        // One update along the axis: no position is written twice.
        let zeros = rw.add("Shape", &[data], Attrs::new());
        let zeros = rw.add("Expand", &[zero, zeros], Attrs::new());
        return rw.add("ScatterElements", &[zeros, indices, updates], Attrs::new().with("axis", axis as i64));
    }
    let size = rw.size_along(data, axis);
    let positions = match rw.constant_of(size).and_then(Tensor::to_i64) {
        Some(size) => rw.ints("places", &(0..size[0]).collect::<Vec<i64>>()),
        None => rw.count_up(size),
    };
    let mut axis_shape = vec![1; rank + 1];
    axis_shape[axis] = -1;
    let shape_input = rw.ints("lying", &axis_shape);
    let reshaped = rw.add("Reshape", &[positions, shape_input], Attrs::new());
    let at = rw.ints("axis", &[axis as i64]);
    let indices = rw.add("Cast", &[indices], Attrs::new().with("to", i64::from(DType::I64.to_onnx())));
    let from_end = rw.add("Add", &[indices, size], Attrs::new());
    let [indices, from_end, each] =
        [indices, from_end, updates].map(|value| rw.add("Unsqueeze", &[value, at], Attrs::new()));
    let hit = rw.add("Equal", &[indices, reshaped], Attrs::new());
    let hit_from_end = rw.add("Equal", &[from_end, reshaped], Attrs::new());
    let hit = rw.add("Or", &[hit, hit_from_end], Attrs::new());
    let picked = rw.add("Where", &[hit, each, zero], Attrs::new());
    let over = rw.ints("updates", &[axis as i64 + 1]);
    let summed = rw.add("ReduceSum", &[picked, over], Attrs::new().with("keepdims", 0i64));
    let sizes = |value: ValueId| -> Option<Vec<Dim>> {
        let shape = rw.shape(value)?;
        Some(shape.iter().enumerate().filter(|&(k, _)| k != axis).map(|(_, dim)| dim.clone()).collect())
    };
    if sizes(data).is_some() && sizes(data) == sizes(updates) {
        return summed;
    }
    // Updates may cover only the first elements along the other axes.
    let data_shape = rw.add("Shape", &[data], Attrs::new());
    let part = rw.add("Shape", &[summed], Attrs::new());
    let after = rw.add("Sub", &[data_shape, part], Attrs::new());
    let before = rw.ints("before", &vec![0; rank]);
    let pads = rw.add("Concat", &[before, after], Attrs::new().with("axis", 0i64));
    rw.add("Pad", &[summed, pads, zero], Attrs::new())
}

/// Sums the updates of each slice of the data; each update has `width` coordinates.
fn sum_slices(
    rw: &mut Rewrite<'_>,
    (data, indices, updates): (ValueId, ValueId, ValueId),
    width: usize,
    rank: usize,
    dtype: DType,
) -> ValueId {
    let data_shape = rw.add("Shape", &[data], Attrs::new());
    let part = |rw: &mut Rewrite<'_>, from: usize, to: usize| -> ValueId {
        let (from, to) = (rw.ints("from", &[from as i64]), rw.ints("to", &[to as i64]));
        rw.add("Slice", &[data_shape, from, to], Attrs::new())
    };
    let product = |rw: &mut Rewrite<'_>, from: usize, to: usize| -> ValueId {
        if from == to {
            return rw.ints("one", &[1]);
        }
        let part = part(rw, from, to);
        rw.add("ReduceProd", &[part], Attrs::new().with("keepdims", 1i64))
    };
    let lead = part(rw, 0, width);
    let strides: Vec<ValueId> = (0..width).map(|k| product(rw, k + 1, width)).collect();
    let strides = rw.add("Concat", &strides, Attrs::new().with("axis", 0i64));
    let (zero, line) = (rw.ints("zero", &[0]), rw.ints("line", &[-1]));
    let steps = formula(rw, [indices, zero, lead, strides], |[indices, zero, lead, strides]| {
        indices.is_less(zero).choose(indices + lead, indices) * strides
    });
    let last = rw.ints("last", &[-1]);
    let at = rw.add("ReduceSum", &[steps, last], Attrs::new().with("keepdims", 0i64));
    let at = rw.add("Reshape", &[at, line], Attrs::new());
    let (slices, size) = (product(rw, 0, width), product(rw, width, rank));
    let flags = rw.constant("flags", Tensor::from_f64(dtype, vec![2], &[0.0, 1.0]));
    let ones = rw.add("OneHot", &[at, slices, flags], Attrs::new().with("axis", 0i64));
    let count = rw.add("Shape", &[at], Attrs::new());
    let blocks = rw.add("Concat", &[count, size], Attrs::new().with("axis", 0i64));
    let updates = rw.add("Reshape", &[updates, blocks], Attrs::new().with("allowzero", 1i64));
    let summed = rw.add("MatMul", &[ones, updates], Attrs::new());
    rw.add("Reshape", &[summed, data_shape], Attrs::new().with("allowzero", 1i64))
}

fn upgrade_scatter(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let inputs = rw.node().inputs.to_vec();
    rw.emit_op("", "ScatterElements", &inputs, rw.attrs().clone());
    Ok(())
}

pub(crate) fn definitions() -> Vec<Definition> {
    vec![
        Definition::new("", "ScatterElements", &[11, 13, 16, 18], build)
            .class(Class::Write { filled: &[0, 2] })
            .inputs_without_gradient(&[1])
            .downgrade(downgrade)
            .decomposed_before(16, decompose_sum),
        Definition::new("", "ScatterND", &[11, 13, 16, 18], build)
            .class(Class::Write { filled: &[0, 2] })
            .inputs_without_gradient(&[1])
            .downgrade(downgrade)
            .decomposed_before(16, decompose_sum),
        // Deprecated in 11: from this opset on only the other name is written.
        Definition::new("", "Scatter", &[9, 11], build_rewritten_on_read)
            .class(Class::Write { filled: &[0, 2] })
            .inputs_without_gradient(&[1])
            .always_rewritten(upgrade_scatter),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::NEWEST_OPSET;
    use crate::testing::{
        Failure, assert_close, cast_tensor, check_decomposed, check_downgrade, check_gradients, f64s,
        generic_tensor, gradient_graph, one_node_graph, run, run_node,
    };

    const ELEMENTS: (&str, &str) = ("", "ScatterElements");
    const ND: (&str, &str) = ("", "ScatterND");

    fn reduction(name: &str) -> Attrs {
        Attrs::new().with("reduction", name)
    }

    /// Before opset 16 updates are compared with positions, or are a factor of a product.
    #[test]
    fn sums_before_opset_16() {
        let data = generic_tensor(&[3, 4], 1);
        for (dims, at, axis) in [
            (vec![3, 2], vec![0, 0, -1, 2, 3, -4], 1i64),
            (vec![2, 4], vec![0, 0, -1, 2, 1, 0, 2, -3], 0),
            (vec![2, 2], vec![0, 0, -1, 2], 0),
            (vec![3, 1], vec![1, -1, 0], 1),
        ] {
            let (indices, updates) = (Tensor::i64(&dims, &at), generic_tensor(&dims, 2));
            let ports = [Some(&data), Some(&indices), Some(&updates)];
            let attrs = reduction("add").with("axis", axis);
            let sums = one_node_graph(NEWEST_OPSET, ELEMENTS, &ports, 1, attrs).expect("valid");
            for opset in [15, 13, 11] {
                check_decomposed(&sums, &[data.clone(), indices.clone(), updates.clone()], opset);
            }
        }
        for (indices, updates) in [
            (Tensor::i64(&[3, 1], &[0, -1, 0]), generic_tensor(&[3, 4], 3)),
            (Tensor::i64(&[2, 2, 2], &[0, 1, 2, -1, 0, 1, -3, -3]), generic_tensor(&[2, 2], 4)),
        ] {
            let ports = [Some(&data), Some(&indices), Some(&updates)];
            let sums = one_node_graph(NEWEST_OPSET, ND, &ports, 1, reduction("add")).expect("valid");
            for opset in [15, 13, 11] {
                check_decomposed(&sums, &[data.clone(), indices.clone(), updates.clone()], opset);
            }
        }
    }

    #[test]
    fn scattered_elements() {
        let data = f64s(&[2, 3], &[1., 2., 3., 4., 5., f64::INFINITY]);
        let (indices, updates) = (Tensor::i64(&[2, 1], &[-3, 2]), f64s(&[2, 1], &[10., 20.]));
        let ports = [Some(&data), Some(&indices), Some(&updates)];
        let get =
            |attrs: Attrs| run_node(ELEMENTS, &ports, 1, attrs).expect("the graph runs").remove(0).to_f64();
        let end = f64::INFINITY;
        assert_eq!(get(Attrs::new().with("axis", 1i64)), [10., 2., 3., 4., 5., 20.]);
        assert_eq!(get(reduction("add").with("axis", -1i64)), [11., 2., 3., 4., 5., end]);
        assert_eq!(get(reduction("mul").with("axis", 1i64)), [10., 2., 3., 4., 5., end]);
        assert_eq!(get(reduction("max").with("axis", 1i64)), [10., 2., 3., 4., 5., end]);
        assert_eq!(get(reduction("min").with("axis", 1i64)), [1., 2., 3., 4., 5., 20.]);

        let flags = Tensor::from_slice(DType::Bool, &[3], &[1u8, 0, 1]);
        let (indices, updates) =
            (Tensor::i64(&[2], &[0, 1]), Tensor::from_slice(DType::Bool, &[2], &[0u8, 1]));
        let got = run_node(ELEMENTS, &[Some(&flags), Some(&indices), Some(&updates)], 1, Attrs::new());
        assert_eq!(got.expect("the graph runs")[0].to_f64(), [0., 1., 1.]);
    }

    #[test]
    fn several_updates_of_one_element() {
        let data = Tensor::from_slice(DType::I32, &[3], &[2i32, 3, 5]);
        let (indices, updates) =
            (Tensor::i64(&[3, 1], &[1, -2, 0]), Tensor::from_slice(DType::I32, &[3], &[7i32, 4, -1]));
        for (name, expected) in
            [("add", [1, 14, 5]), ("mul", [-2, 84, 5]), ("max", [2, 7, 5]), ("min", [-1, 3, 5])]
        {
            let got = run_node(ND, &[Some(&data), Some(&indices), Some(&updates)], 1, reduction(name));
            assert_eq!(got.expect("the graph runs")[0].to_i64(), Some(expected.to_vec()), "{name}");
            let flat = Tensor::i64(&[3], &[1, -2, 0]);
            let got = run_node(ELEMENTS, &[Some(&data), Some(&flat), Some(&updates)], 1, reduction(name));
            assert_eq!(got.expect("the graph runs")[0].to_i64(), Some(expected.to_vec()), "{name}");
        }
    }

    /// Later reads see the last write. A written position keeps nothing of its old value, including the sign of a zero.
    #[test]
    fn last_of_several_updates_wins() {
        let at = Tensor::i64(&[1], &[1]);
        let got = run_node(
            ELEMENTS,
            &[Some(&f64s(&[2], &[1.0, 2.0])), Some(&at), Some(&f64s(&[1], &[-0.0]))],
            1,
            Attrs::new(),
        );
        assert!(got.expect("the graph runs")[0].to_f64()[1].is_sign_negative());
        for dtype in [DType::F32, DType::F64, DType::F16, DType::I64, DType::I32, DType::U8, DType::Bool] {
            let numbers = |values: &[f64]| cast_tensor(&f64s(&[values.len()], values), dtype);
            let (data, updates) = (numbers(&[1., 0., 1., 0.]), numbers(&[0., 1., 0., 1., 0.]));
            let flat = Tensor::i64(&[5], &[2, 3, -1, 0, 2]);
            let got = run_node(ELEMENTS, &[Some(&data), Some(&flat), Some(&updates)], 1, Attrs::new());
            assert_eq!(got.expect("the graph runs")[0].to_f64(), [1., 0., 0., 0.], "{dtype}");
            let column = Tensor::i64(&[5, 1], &[2, 3, -1, 0, 2]);
            let got = run_node(ND, &[Some(&data), Some(&column), Some(&updates)], 1, Attrs::new());
            assert_eq!(got.expect("the graph runs")[0].to_f64(), [1., 0., 0., 0.], "{dtype}");
        }
    }

    /// Constant indices: no check for duplicates is emitted if they are distinct.
    #[test]
    fn gradients_of_constant_indices() {
        for (indices, distinct) in [(vec![2i64, 0], true), (vec![-1, 2], false), (vec![1, 1], false)] {
            for op in [ELEMENTS, ND] {
                let at = Tensor::i64(if op == ND { &[2, 1] } else { &[2] }, &indices);
                let inputs = [generic_tensor(&[3], 3), generic_tensor(&[2], 4)];
                let (mut graph, ids) = crate::testing::graph(&[&inputs[0], &inputs[1]]);
                let at = graph.add_constant("at", at);
                let ports = [Some(ids[0]), Some(at), Some(ids[1])];
                crate::testing::add(&mut graph, op, "y", &ports, 1, Attrs::new());
                crate::passes::infer::infer(&mut graph).expect("valid");
                check_gradients(&graph, &inputs, &[0, 1], &[0]);
                let gradient = gradient_graph(&graph, &[Some(generic_tensor(&[3], 5))], &[0, 1]);
                let asks = gradient.nodes.iter().any(|node| &*node.op == "Range");
                assert_eq!(asks, !distinct, "{indices:?}\n{gradient}");
            }
        }
    }

    #[test]
    fn gradients() {
        for name in ["none", "add", "mul", "max", "min"] {
            // Indices with duplicates.
            let second = 2;
            let cases = [
                (ELEMENTS, vec![3, 2], Tensor::i64(&[2, 2], &[2, 1, second, -1]), vec![2, 2], 0i64),
                (ELEMENTS, vec![2, 3], Tensor::i64(&[1, 2], &[-1, second]), vec![1, 2], 1),
                (ND, vec![3, 2], Tensor::i64(&[2, 1], &[2, second]), vec![2, 2], 0),
                (ND, vec![3, 2], Tensor::i64(&[2, 2], &[2, 1, second, -1]), vec![2], 0),
            ];
            for (op, data, indices, updates, axis) in cases {
                let inputs = [generic_tensor(&data, 3), indices, generic_tensor(&updates, 4)];
                let ports = [Some(&inputs[0]), Some(&inputs[1]), Some(&inputs[2])];
                let attrs = if op == ND { reduction(name) } else { reduction(name).with("axis", axis) };
                let graph = one_node_graph(NEWEST_OPSET, op, &ports, 1, attrs).expect("valid");
                check_gradients(&graph, &inputs, &[0, 2], &[0]);
            }
        }
    }

    #[test]
    fn zeros_and_ties() {
        let gradients = |name: &str, data: &[f64], indices: &[i64], updates: &[f64]| {
            let inputs = [
                f64s(&[data.len()], data),
                Tensor::i64(&[indices.len()], indices),
                f64s(&[updates.len()], updates),
            ];
            let ports = [Some(&inputs[0]), Some(&inputs[1]), Some(&inputs[2])];
            let graph = one_node_graph(NEWEST_OPSET, ELEMENTS, &ports, 1, reduction(name)).expect("valid");
            let ones = Tensor::filled(DType::F64, &[data.len()], 1.0);
            let got = run(&gradient_graph(&graph, &[Some(ones)], &[0, 2]), &inputs).expect("the graph runs");
            (got[0].to_f64(), got[1].to_f64())
        };
        assert_eq!(gradients("mul", &[2.0, 5.0], &[0, 0], &[0.0, 3.0]), (vec![0.0, 1.0], vec![6.0, 0.0]));
        assert_eq!(gradients("mul", &[2.0, 5.0], &[0, 0], &[0.0, 0.0]), (vec![0.0, 1.0], vec![0.0, 0.0]));
        let thirds = (vec![1.0 / 3.0, 1.0], vec![1.0 / 3.0, 1.0 / 3.0]);
        assert_eq!(gradients("max", &[4.0, 5.0], &[0, 0], &[4.0, 4.0]), thirds);
        assert_eq!(gradients("min", &[4.0, 5.0], &[0, 1], &[3.0, 5.0]), (vec![0.0, 0.5], vec![1.0, 0.5]));
        // An overwritten element gets a zero gradient, even if it is infinite.
        let over = gradients("none", &[f64::INFINITY, 5.0], &[0], &[3.0]);
        assert_eq!(over, (vec![0.0, 1.0], vec![1.0]));
    }

    #[test]
    fn older_versions() {
        let inputs = [generic_tensor(&[3], 1), Tensor::i64(&[2], &[2, 0]), generic_tensor(&[2], 2)];
        let ports = [Some(&inputs[0]), Some(&inputs[1]), Some(&inputs[2])];
        let old = one_node_graph(9, ("", "Scatter"), &ports, 1, Attrs::new()).expect("the node is valid");
        assert_eq!(&*old.nodes[0].op, "ScatterElements");
        let written = check_downgrade(&old, &inputs, 9);
        assert_eq!(&*written.nodes[0].op, "Scatter");
        check_downgrade(&old, &inputs, 11);
        for (name, oldest) in [("add", 16), ("mul", 16), ("max", 18), ("min", 18)] {
            let graph = one_node_graph(NEWEST_OPSET, ELEMENTS, &ports, 1, reduction(name)).expect("valid");
            check_downgrade(&graph, &inputs, oldest);
            let error =
                crate::passes::versions::downgrade(&mut graph.clone(), oldest - 1).expect_err("refused");
            assert!(error.to_string().contains(&format!("needs opset {oldest} or newer")), "{error}");
        }
    }

    #[test]
    fn rejects_mismatched_inputs() {
        let data = generic_tensor(&[2, 3], 1);
        let cases = [
            (
                ELEMENTS,
                Tensor::i64(&[2, 1], &[0; 2]),
                generic_tensor(&[1, 2], 2),
                Attrs::new(),
                "input 2 must have the shape [2, 1]",
            ),
            (ELEMENTS, Tensor::i64(&[2], &[0; 2]), generic_tensor(&[2], 2), Attrs::new(), "do not fit data"),
            (
                ND,
                Tensor::i64(&[2, 1], &[0; 2]),
                generic_tensor(&[2], 2),
                Attrs::new(),
                "input 2 must have the shape [2, 3], got [2]",
            ),
            (
                ND,
                Tensor::i64(&[1, 3], &[0; 3]),
                generic_tensor(&[1], 2),
                Attrs::new(),
                "one coordinate for each indexed axis",
            ),
            (
                ND,
                Tensor::i64(&[1, 1], &[0]),
                generic_tensor(&[1, 3], 2),
                reduction("mean"),
                "reduction \"mean\" is not defined",
            ),
        ];
        for (op, indices, updates, attrs, message) in cases {
            let failure = run_node(op, &[Some(&data), Some(&indices), Some(&updates)], 1, attrs);
            let Failure::Prepare(error) = failure.expect_err("refused") else { panic!("prepared") };
            assert!(error.to_string().contains(message), "{error}");
        }
    }

    #[test]
    fn narrow_sums_are_computed_in_float32() {
        let count = 2050;
        let data = Tensor::filled(DType::F16, &[1], 0.0);
        let (indices, updates) =
            (Tensor::i64(&[count], &vec![0; count]), Tensor::filled(DType::F16, &[count], 1.0));
        let got = run_node(ELEMENTS, &[Some(&data), Some(&indices), Some(&updates)], 1, reduction("add"));
        assert_close(&got.expect("the graph runs")[0], &Tensor::filled(DType::F16, &[1], 2050.0), 0.0);
    }
}
