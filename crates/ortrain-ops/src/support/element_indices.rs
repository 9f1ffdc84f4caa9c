//! Indices of elements and slices, as GatherElements and GatherND have them.

use ortrain_expr::{Reg, Type};
use ortrain_graph::{Attrs, DType, Dim, Shape, ValueId};

use crate::OpError;
use crate::grad::Grad;
use crate::infer::{Infer, normalize_axis};
use crate::lower::{Lower, NestBuilder};
use crate::support::rows::{ScatterRows, guard_index, guard_indices, has_elements, wrap_negative_index};

/// Checks the shapes of the data and of the element indices along an axis. Returns the axis, counted from the front.
pub(crate) fn check_elements(data: &Shape, indices: Option<&Shape>, axis: i64) -> Result<usize, OpError> {
    let axis = normalize_axis(axis, data.rank())?;
    let Some(indices) = indices else { return Ok(axis) };
    let fits = |k: usize| match (indices[k].known(), data[k].known()) {
        (Some(count), Some(size)) => k == axis || count <= size,
        _ => true,
    };
    if indices.rank() != data.rank() || !(0..data.rank()).all(fits) {
        return Err(OpError::invalid(format!(
            "indices of shape {indices} do not fit data of shape {data}, axis {axis}"
        )));
    }
    Ok(axis)
}

/// Returns the flat index in `dims` of the nest's coordinates, with `row` as the coordinate along `axis`.
pub(crate) fn flat_index(nest: &mut NestBuilder, dims: &[usize], axis: usize, row: Reg) -> Reg {
    let mut at = nest.b.int(0);
    for (k, &size) in dims.iter().enumerate() {
        let size = nest.b.int(size as i64);
        let position = if k == axis { row } else { nest.b.coordinate(k) };
        let scaled = nest.b.mul(at, size);
        at = nest.b.add(scaled, position);
    }
    at
}

/// Computes the flat indices of elements in data of shape `dims`. Input `k` has the indices along `axis`.
pub(crate) fn compute_element_indices(
    cx: &mut Lower<'_>,
    k: usize,
    dims: &[usize],
    axis: usize,
) -> Result<ScatterRows, OpError> {
    let index_dims = cx.dims(k);
    guard_indices(cx, k, dims[axis])?;
    let count = index_dims.iter().product();
    let index_buffer = cx.alloc_temp("place", DType::I64, count);
    let indices = cx.input(k);
    let mut nest = cx.nest(&index_dims, 0);
    let loaded = nest.load(indices, cx.contiguous_access(indices, &index_dims));
    let index = nest.b.convert(loaded, Type::I64);
    let row = wrap_negative_index(&mut nest.b, index, dims[axis]);
    let at = flat_index(&mut nest, dims, axis, row);
    nest.store_contiguous(cx, index_buffer, at);
    cx.emit(nest.instruction())?;
    Ok(ScatterRows { row_indices: index_buffer, rows: dims.iter().product(), count, inner: 1 })
}

/// Adds the gradient of the data that elements were gathered from.
pub(crate) fn add_elements_gradient(
    cx: &mut Grad<'_>,
    g: ValueId,
    data: ValueId,
    indices: ValueId,
    axis: i64,
) -> ValueId {
    let shape = cx.shape_of(data);
    cx.add_in("com.microsoft", "GatherElementsGrad", &[g, shape, indices], Attrs::new().with("axis", axis))
}

/// Checks that the shape of input `k` can equal the required shape.
pub(crate) fn check_compatible_shape(
    cx: &Infer<'_>,
    k: usize,
    required: Option<&Shape>,
) -> Result<(), OpError> {
    let (Some(actual), Some(required)) = (cx.shape(k), required) else { return Ok(()) };
    let differ = |(a, b): (&Dim, &Dim)| matches!((a.known(), b.known()), (Some(a), Some(b)) if a != b);
    if actual.rank() != required.rank() || actual.iter().zip(required.iter()).any(differ) {
        return Err(OpError::invalid(format!("input {k} must have the shape {required}, got {actual}")));
    }
    Ok(())
}

/// Checks the shapes of the data and the coordinates, and returns the shape of the result.
pub(crate) fn infer_slices_shape(data: &Shape, indices: &Shape, batch: i64) -> Result<Shape, OpError> {
    let wrong = |what: &str| {
        OpError::invalid(format!(
            "indices of shape {indices} for data of shape {data}, batch_dims {batch}: {what}"
        ))
    };
    let batch_dims = usize::try_from(batch).ok().filter(|&batch| batch < data.rank().min(indices.rank()));
    let Some(batch) = batch_dims else { return Err(wrong("both must have more axes than batch_dims")) };
    let Some(depth) = indices.iter().last().and_then(Dim::known) else {
        return Err(OpError::unsupported("the size of the last axis of the indices must be known"));
    };
    if depth == 0 || batch + depth > data.rank() {
        return Err(wrong(
            "the last axis of the indices must have one coordinate for each indexed axis, and at least one",
        ));
    }
    let differ = |(a, b): (&Dim, &Dim)| matches!((a.known(), b.known()), (Some(a), Some(b)) if a != b);
    if data.iter().zip(indices.iter()).take(batch).any(differ) {
        return Err(wrong("the batch axes differ"));
    }
    if has_elements(indices) && data[batch..batch + depth].contains(&Dim::Known(0)) {
        return Err(wrong("an indexed axis is empty, but the indices are not"));
    }
    let index_axes = indices.iter().take(indices.rank() - 1);
    Ok(index_axes.chain(&data[batch + depth..]).cloned().collect())
}

/// Computes the row that each coordinate vector of input `k` selects. The axes of the batch and the coordinates count
/// as one axis of rows. Makes the run fail if a coordinate is out of range.
pub(crate) fn compute_slice_indices(
    cx: &mut Lower<'_>,
    k: usize,
    dims: &[usize],
    batch: usize,
) -> Result<ScatterRows, OpError> {
    let index_dims = cx.dims(k);
    let depth = index_dims.last().copied().unwrap_or(1);
    let per_batch: usize = index_dims[batch..index_dims.len() - 1].iter().product();
    let batches: usize = dims[..batch].iter().product();
    let count = batches * per_batch;
    let index_buffer = cx.alloc_temp("place", DType::I64, count);
    let indices = cx.input(k);
    let mut nest = cx.nest(&[batches, per_batch], 0);
    let mut at = nest.b.coordinate(0);
    for (d, &size) in dims[batch..batch + depth].iter().enumerate() {
        let loaded = nest.load_strided(cx, indices, d, &[(per_batch * depth) as isize, depth as isize]);
        let index = nest.b.convert(loaded, Type::I64);
        let row = wrap_negative_index(&mut nest.b, index, size);
        let row = guard_index(&mut nest.b, index, row, size);
        let size = nest.b.int(size as i64);
        let scaled = nest.b.mul(at, size);
        at = nest.b.add(scaled, row);
    }
    nest.store_contiguous(cx, index_buffer, at);
    cx.emit(nest.instruction())?;
    let rows = dims[..batch + depth].iter().product();
    Ok(ScatterRows { row_indices: index_buffer, rows, count, inner: dims[batch + depth..].iter().product() })
}
