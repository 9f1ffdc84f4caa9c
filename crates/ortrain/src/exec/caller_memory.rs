//! Inputs and other values in memory of the caller.

use std::sync::Arc;

use ortrain_graph::{DType, Tensor, byte_length};
use ortrain_program::{InputBytes, InputView, Memory};

use crate::{Result, Value};

impl<'a> From<&'a Value> for InputView<'a> {
    fn from(value: &'a Value) -> InputView<'a> {
        match value {
            Value::Tensor(tensor) => InputView::from(tensor),
            Value::Sequence(tensors) => InputView::from(&tensors[..]),
        }
    }
}

/// Returns the element type and the shape of an input, as messages show them.
pub(crate) fn describe_input(input: &InputView<'_>) -> String {
    match input.bytes {
        InputBytes::Sequence(tensors) => format!("a sequence of {}", tensors.len()),
        InputBytes::Host(_) | InputBytes::Memory(_) => format!("{}{:?}", input.dtype, input.dims),
    }
}

/// Minimum bytes of a value that is read in place. Copying a smaller value costs less than preparing a
/// program for it, and a small value may decide shapes.
const MIN_IN_PLACE_BYTES: usize = 4096;

/// Alignment of memory on a device in bytes. Kernels and libraries assume it.
pub(crate) const DEVICE_ALIGN: usize = 256;

/// Returns true if a run may read an input in place: aligned floats of sufficient size in a memory that the run does
/// not overwrite.
pub(crate) fn is_read_in_place(
    input: &InputView<'_>,
    mut written: impl Iterator<Item = (usize, usize)>,
) -> bool {
    let Some(memory) = input.memory() else { return false };
    let bytes = byte_length(input.dtype, input.dims).unwrap_or(usize::MAX);
    let input_span = memory_span(memory, bytes);
    let fits = is_aligned(memory, input.dtype) && input.dtype.is_float() && bytes >= MIN_IN_PLACE_BYTES;
    fits && !written.any(|other| spans_overlap(input_span, other))
}

/// Returns true if programs can access elements of a type in the memory.
pub(crate) fn is_aligned(memory: &Memory, dtype: DType) -> bool {
    match memory {
        Memory::Host(memory) => memory.as_ptr().addr().is_multiple_of(dtype.size()),
        Memory::Device(memory) => memory.address().is_none_or(|address| address.is_multiple_of(DEVICE_ALIGN)),
    }
}

/// Copies a tensor. Returns `None` for a sequence.
pub(crate) fn copy_tensor(input: &InputView<'_>) -> Result<Option<Tensor>> {
    if input.is_sequence() {
        return Ok(None);
    }
    let bytes = input.to_host()?.into_owned();
    Ok(Tensor::new(input.dtype, input.dims.to_vec(), bytes.into()).ok())
}

/// Returns the element type, shape and number of bytes of each tensor.
pub(crate) fn describe_tensors<'a>(inputs: &[InputView<'a>]) -> Vec<(DType, &'a [usize], usize)> {
    let tensors = inputs.iter().filter(|input| !input.is_sequence());
    tensors.map(|input| (input.dtype, input.dims, input.byte_count())).collect()
}

/// Returns the address range of a value in memory of the caller. Memory on a device without addresses counts as one
/// byte, at the address of its handle.
pub(crate) fn memory_span(memory: &Memory, bytes: usize) -> (usize, usize) {
    let (start, bytes) = match memory {
        Memory::Host(memory) => (memory.as_ptr().addr(), bytes),
        Memory::Device(memory) => match memory.address() {
            Some(address) => (address, bytes),
            None => (Arc::as_ptr(memory).addr(), bytes.min(1)),
        },
    };
    (start, start.saturating_add(bytes))
}

/// Returns true if two spans share a byte.
pub(crate) fn spans_overlap(a: (usize, usize), b: (usize, usize)) -> bool {
    a.0.max(b.0) < a.1.min(b.1)
}
