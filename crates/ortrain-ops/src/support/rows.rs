//! Rows of tensors by index: checks, copies, scatters.

use ortrain_expr::{Builder, CompareOp, Reg, Type};
use ortrain_graph::{DType, Dim, Shape, Tensor};
use ortrain_program::{BufferId, Instruction, ScatterAdd};

use crate::OpError;
use crate::infer::Infer;
use crate::lower::Lower;

/// Converts an index that may be negative (counted from the end) to an index counted from the start.
pub(crate) fn wrap_negative_index(b: &mut Builder, index: Reg, rows: usize) -> Reg {
    let (zero, rows) = (b.int(0), b.int(rows as i64));
    let negative = b.compare(CompareOp::Lt, index, zero);
    let wrapped = b.add(index, rows);
    b.select(negative, wrapped, index)
}

/// Makes the run fail if an index in input `k` is outside `-rows..rows`. The message shows the index as the input has
/// it.
pub(crate) fn guard_indices(cx: &mut Lower<'_>, k: usize, rows: usize) -> Result<(), OpError> {
    if cx.constant(k).is_some() {
        // Inference has checked the constant indices.
        return Ok(());
    }
    let (dims, strides) = cx.guarded_space(k);
    let buffer = cx.input(k);
    let mut nest = cx.nest(&dims, 0);
    let loaded = nest.load_strided(cx, buffer, 0, &strides);
    let index = nest.b.convert(loaded, Type::I64);
    let normal = wrap_negative_index(&mut nest.b, index, rows);
    guard_index(&mut nest.b, index, normal, rows);
    cx.emit(nest.instruction())
}

/// Returns `row` with a check that makes the run fail if `row` is out of range. `row` was computed from `index`. The
/// message shows `index` if `row` is negative.
pub(crate) fn guard_index(b: &mut Builder, index: Reg, row: Reg, rows: usize) -> Reg {
    let zero = b.int(0);
    let below = b.compare(CompareOp::Lt, row, zero);
    let shown = b.select(below, index, row);
    b.guard(shown, rows as i64)
}

/// Returns the first row and the step from row to row, if the indices in input `k` are constant and have one step.
pub(crate) fn constant_row_stride(cx: &Lower<'_>, k: usize, rows: usize) -> Option<(usize, isize)> {
    let indices = cx.constant(k).and_then(Tensor::to_i64)?;
    let from_front = |index: i64| if index < 0 { index + rows as i64 } else { index };
    let mut picked = indices.into_iter().map(from_front);
    let (first, second) = (picked.next()?, picked.next());
    let step = second.map_or(1, |second| second - first);
    let mut last = second;
    let even = picked.all(|row| last.replace(row).is_some_and(|last| row - last == step));
    even.then(|| Some((usize::try_from(first).ok()?, isize::try_from(step).ok()?))).flatten()
}

/// Target rows of a scatter: source row `j` of `count` is written to row `row_indices[j]` of `rows`. Each row has
/// `inner` elements.
#[derive(Clone, Copy)]
pub(crate) struct ScatterRows {
    pub(crate) row_indices: BufferId,
    pub(crate) rows: usize,
    pub(crate) count: usize,
    pub(crate) inner: usize,
}

/// Adds rows of `source` to rows of `target`, a buffer of the same type.
pub(crate) fn scatter_add(
    cx: &mut Lower<'_>,
    scatter_rows: &ScatterRows,
    source: BufferId,
    target: BufferId,
) -> Result<(), OpError> {
    emit_scatter(cx, scatter_rows, source, target, false)
}

/// Overwrites rows of `target`, a buffer of the same type, by rows of `source`. Of several rows with equal index the
/// last is written.
pub(crate) fn scatter_overwrite(
    cx: &mut Lower<'_>,
    scatter_rows: &ScatterRows,
    source: BufferId,
    target: BufferId,
) -> Result<(), OpError> {
    emit_scatter(cx, scatter_rows, source, target, true)
}

/// Emits the scatter instruction, which adds or overwrites (`last`).
pub(crate) fn emit_scatter(
    cx: &mut Lower<'_>,
    scatter_rows: &ScatterRows,
    source: BufferId,
    target: BufferId,
    last: bool,
) -> Result<(), OpError> {
    let &ScatterRows { row_indices, rows, count, inner } = scatter_rows;
    let outer = 1;
    let [source, index, target] = [source, row_indices, target].map(|buffer| cx.flat_operand(buffer));
    cx.emit(Instruction::from(ScatterAdd {
        outer,
        rows,
        count,
        inner,
        source,
        index,
        target,
        overwrites: last,
    }))
}

/// Writes `to`, or zeros, plus the scattered rows of `source` into `target`. float16 and bfloat16 are summed in
/// float32.
pub(crate) fn emit_scatter_sum(
    cx: &mut Lower<'_>,
    scatter_rows: &ScatterRows,
    source: BufferId,
    to: Option<BufferId>,
    target: BufferId,
) -> Result<(), OpError> {
    let source = convert_to_accumulation(cx, source, "wide_source")?;
    let dtype = cx.buffer_dtype(source);
    let narrow = cx.buffer_dtype(target) != dtype;
    let sum = if narrow { cx.alloc_temp("wide", dtype, cx.buffer_len(target)) } else { target };
    match to {
        Some(data) => emit_copy(cx, data, sum)?,
        None => emit_fill(cx, sum, 0.0)?,
    }
    scatter_add(cx, scatter_rows, source, sum)?;
    if narrow { emit_copy(cx, sum, target) } else { Ok(()) }
}

/// Returns true if the shape is known and has elements.
pub(crate) fn has_elements(shape: &Shape) -> bool {
    shape.concrete().is_some_and(|dims| !dims.contains(&0))
}

/// Checks the type of the indices, and the range `-rows..rows` if the indices are constant.
pub(crate) fn check_indices(cx: &Infer<'_>, k: usize, rows: Option<&Dim>) -> Result<(), OpError> {
    cx.expect_dtype(k, "int32 or int64", |dtype| matches!(dtype, DType::I32 | DType::I64))?;
    if rows.and_then(Dim::known) == Some(0) && cx.shape(k).is_some_and(has_elements) {
        return Err(OpError::invalid("the indexed axis is empty, but the indices are not"));
    }
    let (Some(rows), Some(indices)) = (rows.and_then(Dim::known), cx.constant(k).and_then(Tensor::to_i64))
    else {
        return Ok(());
    };
    let rows = rows as i64;
    match indices.into_iter().find(|index| !(-rows..rows).contains(index)) {
        Some(index) => Err(OpError::invalid(format!("index {index} is out of range for an axis of {rows}"))),
        None => Ok(()),
    }
}

/// Returns the accumulation type for elements of type `dtype`.
pub(crate) fn accumulation_dtype(dtype: DType) -> DType {
    match dtype {
        DType::F16 | DType::BF16 => DType::F32,
        DType::Bool => DType::I32,
        other => other,
    }
}

/// Converts a buffer to its accumulation type. Returns the buffer itself if the types are equal.
pub(crate) fn convert_to_accumulation(
    cx: &mut Lower<'_>,
    buffer: BufferId,
    name: &str,
) -> Result<BufferId, OpError> {
    let dtype = accumulation_dtype(cx.buffer_dtype(buffer));
    if dtype == cx.buffer_dtype(buffer) {
        return Ok(buffer);
    }
    let len = cx.buffer_len(buffer);
    let wide = cx.alloc_temp(name, dtype, len);
    emit_copy(cx, buffer, wide)?;
    Ok(wide)
}

/// Copies the elements of a buffer to another, converted to the type of the target.
pub(crate) fn emit_copy(cx: &mut Lower<'_>, from: BufferId, to: BufferId) -> Result<(), OpError> {
    let mut nest = cx.nest(&[cx.buffer_len(from)], 0);
    let value = nest.load_strided(cx, from, 0, &[1]);
    nest.store_contiguous(cx, to, value);
    cx.emit(nest.instruction())
}

/// Fills a buffer with one value.
pub(crate) fn emit_fill(cx: &mut Lower<'_>, buffer: BufferId, value: f64) -> Result<(), OpError> {
    let mut nest = cx.nest(&[cx.buffer_len(buffer)], 0);
    let value = nest.b.constant(Type::of(cx.buffer_dtype(buffer)), value);
    nest.store_contiguous(cx, buffer, value);
    cx.emit(nest.instruction())
}
