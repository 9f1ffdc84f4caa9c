//! Shapes that a decomposition computes: known sizes stay numbers, and others are computed at run time.

use ortrain_graph::{Attrs, DType, Dim, Shape, Tensor, ValueId};

use crate::OpError;
use crate::broadcast::ShapedNodeSink;
use crate::rewrite::Rewrite;

/// Size of an axis in a computed shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    /// Known number.
    Number(i64),
    /// Size of the same axis of the input, for a new shape.
    SameAxis,
    /// Vector of one int64.
    Value(ValueId),
}

impl Size {
    /// Returns the number, if known.
    pub(crate) fn scalar_constant(self) -> Option<i64> {
        match self {
            Size::Number(number) => Some(number),
            Size::SameAxis | Size::Value(_) => None,
        }
    }
}

/// Returns the shape of a value with a known rank.
///
/// # Errors
/// Returns an error if the rank is unknown.
pub(crate) fn shape_of(to: &impl ShapedNodeSink, value: ValueId, label: &str) -> Result<Shape, OpError> {
    to.known_shape(value).ok_or_else(|| {
        OpError::unsupported(format!("the rank of {label} must be known; declare its shape in the model"))
    })
}

/// Returns the element type of a value.
///
/// # Errors
/// Returns an error if the type is unknown.
pub(crate) fn dtype_of(rw: &Rewrite<'_>, value: ValueId, label: &str) -> Result<DType, OpError> {
    rw.dtype(value).ok_or_else(|| OpError::invalid(format!("the type of {label} is not known")))
}

/// Returns the size of an axis of an input of the node.
pub(crate) fn size_of(rw: &mut Rewrite<'_>, value: ValueId, axis: usize) -> Size {
    if let Some(size) = rw.shape(value).and_then(|shape| shape.get(axis)).and_then(Dim::known) {
        return Size::Number(size as i64);
    }
    let shape = rw.add("Shape", &[value], Attrs::new());
    let at = axis as i64;
    Size::Value(slice_axis(rw, shape, 0, at, at + 1, 1))
}

/// Converts a size to a vector of one element.
pub(crate) fn as_vector(rw: &mut Rewrite<'_>, size: Size) -> ValueId {
    match size {
        Size::Number(number) => rw.ints("size", &[number]),
        Size::Value(value) => value,
        Size::SameAxis => unreachable!("only a new shape has axes of unchanged size"),
    }
}

/// Combines two sizes with `on_numbers`, or with the operator `op`.
pub(crate) fn combine_sizes(
    rw: &mut Rewrite<'_>,
    op: &str,
    on_numbers: fn(i64, i64) -> i64,
    a: Size,
    b: Size,
) -> Size {
    match (a, b) {
        (Size::Number(a), Size::Number(b)) => Size::Number(on_numbers(a, b)),
        _ => {
            let (a, b) = (as_vector(rw, a), as_vector(rw, b));
            Size::Value(rw.add(op, &[a, b], Attrs::new()))
        }
    }
}

/// Returns the product of two sizes.
pub(crate) fn multiply_sizes(rw: &mut Rewrite<'_>, a: Size, b: Size) -> Size {
    match (a, b) {
        (Size::Number(1), other) | (other, Size::Number(1)) => other,
        _ => combine_sizes(rw, "Mul", i64::saturating_mul, a, b),
    }
}

/// Returns the sum of two sizes.
pub(crate) fn add_sizes(rw: &mut Rewrite<'_>, a: Size, b: Size) -> Size {
    match (a, b) {
        (Size::Number(0), other) | (other, Size::Number(0)) => other,
        _ => combine_sizes(rw, "Add", i64::saturating_add, a, b),
    }
}

/// Returns the difference of two sizes, which may be negative.
pub(crate) fn subtract_sizes(rw: &mut Rewrite<'_>, a: Size, b: Size) -> Size {
    combine_sizes(rw, "Sub", i64::saturating_sub, a, b)
}

/// Returns the quotient of two sizes; the second must not be 0.
pub(crate) fn divide_sizes(rw: &mut Rewrite<'_>, a: Size, b: Size) -> Size {
    match (a, b) {
        (_, Size::Number(1)) => a,
        _ => combine_sizes(rw, "Div", |a, b| a.checked_div(b).unwrap_or(0), a, b),
    }
}

/// Concatenates sizes to one vector.
pub(crate) fn concat_sizes(rw: &mut Rewrite<'_>, sizes: &[Size]) -> ValueId {
    let numbers: Option<Vec<i64>> = sizes.iter().map(|size| size.scalar_constant()).collect();
    if let Some(numbers) = numbers {
        return rw.ints("shape", &numbers);
    }
    let parts: Vec<ValueId> = sizes.iter().map(|&size| as_vector(rw, size)).collect();
    match parts[..] {
        [only] => only,
        _ => rw.add("Concat", &parts, Attrs::new().with("axis", 0i64)),
    }
}

/// Reshapes a value.
pub(crate) fn reshape_to(rw: &mut Rewrite<'_>, value: ValueId, sizes: &[Size]) -> ValueId {
    // In Reshape a 0 copies the axis or means an empty axis. If an axis may be empty, no axis is copied.
    let may_be_empty = |&size: &Size| matches!(size, Size::Value(_) | Size::Number(0));
    if !sizes.iter().any(may_be_empty) {
        let numbers: Vec<i64> = sizes.iter().map(|size| size.scalar_constant().unwrap_or(0)).collect();
        let shape = rw.ints("shape", &numbers);
        return rw.add("Reshape", &[value, shape], Attrs::new());
    }
    let old = sizes.contains(&Size::SameAxis).then(|| rw.add("Shape", &[value], Attrs::new()));
    let mut new_sizes = Vec::with_capacity(sizes.len());
    for (axis, &size) in sizes.iter().enumerate() {
        new_sizes.push(match (size, old) {
            (Size::SameAxis, Some(old)) => {
                Size::Value(slice_axis(rw, old, 0, axis as i64, axis as i64 + 1, 1))
            }
            _ => size,
        });
    }
    let shape = concat_sizes(rw, &new_sizes);
    rw.add("Reshape", &[value, shape], Attrs::new().with("allowzero", 1i64))
}

/// Permutes the axes of a value. Returns the value itself if the order does not change.
pub(crate) fn permute_axes(rw: &mut Rewrite<'_>, value: ValueId, order: &[usize]) -> ValueId {
    if order.iter().enumerate().all(|(k, &axis)| k == axis) {
        return value;
    }
    let perm: Vec<i64> = order.iter().map(|&axis| axis as i64).collect();
    rw.add("Transpose", &[value], Attrs::new().with("perm", perm))
}

/// Slices a value along an axis.
pub(crate) fn slice_axis(
    rw: &mut Rewrite<'_>,
    value: ValueId,
    axis: i64,
    from: i64,
    to: i64,
    step: i64,
) -> ValueId {
    let parts = [("starts", from), ("ends", to), ("axes", axis), ("steps", step)];
    let [starts, ends, axes, steps] = parts.map(|(name, number)| rw.ints(name, &[number]));
    rw.add("Slice", &[value, starts, ends, axes, steps], Attrs::new())
}

/// Slices a value along an axis, between sizes.
pub(crate) fn slice_between(
    rw: &mut Rewrite<'_>,
    value: ValueId,
    axis: i64,
    from: Size,
    to: Size,
) -> ValueId {
    let (from, to) = (as_vector(rw, from), as_vector(rw, to));
    let axes = rw.ints("axes", &[axis]);
    rw.add("Slice", &[value, from, to, axes], Attrs::new())
}

/// Inserts axes of size 1 at these positions of the result.
pub(crate) fn insert_axes(rw: &mut Rewrite<'_>, value: ValueId, axes: &[i64]) -> ValueId {
    if axes.is_empty() {
        return value;
    }
    let axes = rw.ints("axes", axes);
    rw.add("Unsqueeze", &[value, axes], Attrs::new())
}

/// Removes axes of size 1.
pub(crate) fn remove_axes(rw: &mut Rewrite<'_>, value: ValueId, axes: &[i64]) -> ValueId {
    if axes.is_empty() {
        return value;
    }
    let axes = rw.ints("axes", axes);
    rw.add("Squeeze", &[value, axes], Attrs::new())
}

/// Sums a value over axes, and removes these axes.
pub(crate) fn reduce_sum_axes(to: &mut impl ShapedNodeSink, value: ValueId, axes: &[i64]) -> ValueId {
    if axes.is_empty() {
        return value;
    }
    let axes = to.emit_ints("axes", axes);
    to.emit("ReduceSum", &[Some(value), Some(axes)], Attrs::new().with("keepdims", 0i64))
}

/// Maximum length of a constant list of positions. Longer lists are computed at run time, so that an arbitrary size in
/// a model does not allocate memory before.
pub(crate) const MAX_CONSTANT_POSITIONS: i64 = 1 << 20;

/// Returns the positions 0, 1, ... of an axis of this size, as a vector of int64.
pub(crate) fn axis_positions(rw: &mut Rewrite<'_>, size: Size) -> ValueId {
    if let Size::Number(count @ ..=MAX_CONSTANT_POSITIONS) = size {
        return rw.ints("positions", &(0..count).collect::<Vec<_>>());
    }
    let count = as_vector(rw, size);
    rw.count_up(count)
}

/// Returns [`positions`] for operators that are not written before opset 11: one Range node. Its length follows both
/// from sizes in graph inputs and from shapes.
pub(crate) fn range_positions(rw: &mut Rewrite<'_>, size: Size) -> ValueId {
    let Size::Value(count) = size else { return axis_positions(rw, size) };
    let count = remove_axes(rw, count, &[0]);
    let [from, step] = [0, 1].map(|k| rw.constant("count", Tensor::i64(&[], &[k])));
    add_op(rw, "Range", &[from, count, step])
}

/// Converts a size to a scalar of an element type.
pub(crate) fn as_number(rw: &mut Rewrite<'_>, size: Size, dtype: DType) -> ValueId {
    match size {
        Size::Number(count) => scalar_constant(rw, dtype, count as f64),
        other => {
            let count = as_vector(rw, other);
            cast(rw, count, DType::I64, dtype)
        }
    }
}

/// Adds a scalar constant.
pub(crate) fn scalar_constant(rw: &mut Rewrite<'_>, dtype: DType, value: f64) -> ValueId {
    rw.constant("number", Tensor::scalar(dtype, value))
}

/// Adds a node of `ai.onnx` without attributes.
pub(crate) fn add_op(rw: &mut Rewrite<'_>, op: &str, inputs: &[ValueId]) -> ValueId {
    rw.add(op, inputs, Attrs::new())
}

/// Converts a value to another type.
pub(crate) fn cast(rw: &mut Rewrite<'_>, value: ValueId, from: DType, target: DType) -> ValueId {
    crate::support::casts::cast(rw.patch().1, value, from, target)
}
