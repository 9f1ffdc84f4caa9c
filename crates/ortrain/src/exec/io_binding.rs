//! Inputs and outputs of a run by name, optionally in memory of the caller.

use std::sync::Arc;

use ortrain_graph::{DType, Tensor, byte_length};
use ortrain_program::{Memory, RunInput};

use crate::{Lent, Result, Value};

/// A value for an input of a run: see [`InferenceSession::run_bound`](crate::InferenceSession::run_bound).
///
/// ```
/// use std::sync::Arc;
///
/// use ortrain::{DType, Feed, RunInput, Lent, Memory, Tensor};
///
/// let x = Tensor::f32(&[2], &[1.0, 2.0]);
/// let copied = Feed::from(RunInput::from(&x));
/// let memory = Arc::new(Memory::new(8));
/// let read_where_it_lies = Feed::from(Lent { dtype: DType::F32, dims: &[2], memory: &memory });
/// # drop((copied, read_where_it_lies));
/// ```
#[derive(Clone, Copy, Debug)]
pub enum Feed<'a> {
    /// A tensor, or bytes of the caller.
    Tensor(RunInput<'a>),
    /// Shared memory that others may write to. Floats may be read in place during the run. Other types are
    /// copied at the start of the run, since indices are checked before use.
    Lent(Lent<'a>),
    /// A sequence of tensors.
    Sequence(&'a [Tensor]),
}

impl<'a> From<RunInput<'a>> for Feed<'a> {
    fn from(input: RunInput<'a>) -> Feed<'a> {
        Feed::Tensor(input)
    }
}

impl<'a> From<Lent<'a>> for Feed<'a> {
    fn from(lent: Lent<'a>) -> Feed<'a> {
        Feed::Lent(lent)
    }
}

impl<'a> From<&'a Value> for Feed<'a> {
    fn from(value: &'a Value) -> Feed<'a> {
        match value {
            Value::Tensor(tensor) => Feed::Tensor(RunInput::from(tensor)),
            Value::Sequence(tensors) => Feed::Sequence(tensors),
        }
    }
}

impl Feed<'_> {
    /// Returns the element type and the shape, as messages show them.
    pub(crate) fn describe(&self) -> String {
        let tensor = |dtype: DType, dims: &[usize]| format!("{dtype}{dims:?}");
        match self {
            Feed::Tensor(input) => tensor(input.dtype, input.dims),
            Feed::Lent(lent) => tensor(lent.dtype, lent.dims),
            Feed::Sequence(several) => format!("a sequence of {}", several.len()),
        }
    }
}

/// A requested output of a run: see [`InferenceSession::run_bound`](crate::InferenceSession::run_bound).
///
/// ```
/// let first = ortrain::Fetch { output: 0, into: None };
/// # assert!(first.into.is_none());
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Fetch<'a> {
    /// Index among [`InferenceSession::outputs`](crate::InferenceSession::outputs).
    pub output: usize,
    /// Destination memory; without memory, the result is a [`Value`].
    pub into: Option<Lent<'a>>,
}

/// Minimum bytes of a value that is read in place. Copying a smaller value costs less than preparing a
/// program for it, and a small value may decide shapes.
const MIN_IN_PLACE_BYTES: usize = 4096;

/// Alignment of memory on a device in bytes. Kernels and libraries assume it.
pub(crate) const DEVICE_ALIGN: usize = 256;

/// Returns true if a run may read a value in place: aligned floats of sufficient size that the run does not
/// overwrite.
pub(crate) fn is_read_in_place(lent: &Lent<'_>, mut written: impl Iterator<Item = (usize, usize)>) -> bool {
    let bytes = byte_length(lent.dtype, lent.dims).unwrap_or(usize::MAX);
    let input_span = memory_span(lent.memory, bytes);
    let fits = is_aligned(lent.memory, lent.dtype) && lent.dtype.is_float() && bytes >= MIN_IN_PLACE_BYTES;
    fits && !written.any(|other| spans_overlap(input_span, other))
}

/// Returns true if programs can access elements of a type in the memory.
pub(crate) fn is_aligned(memory: &Memory, dtype: DType) -> bool {
    match memory {
        Memory::Host(memory) => memory.as_ptr().addr().is_multiple_of(dtype.size()),
        Memory::Device(memory) => memory.address().is_none_or(|address| address.is_multiple_of(DEVICE_ALIGN)),
    }
}

/// Returns the address ranges of the output buffers.
pub(crate) fn output_spans<'a>(fetches: &'a [Fetch<'_>]) -> impl Iterator<Item = (usize, usize)> + 'a {
    fetches.iter().filter_map(|fetch| {
        let into = fetch.into.as_ref()?;
        Some(memory_span(into.memory, byte_length(into.dtype, into.dims).unwrap_or(usize::MAX)))
    })
}

/// Copies a tensor. Returns `None` for a sequence.
pub(crate) fn copy_tensor(feed: &Feed<'_>) -> Result<Option<Tensor>> {
    let (dtype, dims, bytes) = match feed {
        Feed::Tensor(input) => (input.dtype, input.dims, input.to_host()?.into_owned()),
        Feed::Lent(lent) => {
            let Ok(bytes) = byte_length(lent.dtype, lent.dims) else { return Ok(None) };
            (lent.dtype, lent.dims, lent.memory.to_vec(0, bytes)?)
        }
        Feed::Sequence(_) => return Ok(None),
    };
    Ok(Tensor::new(dtype, dims.to_vec(), bytes.into()).ok())
}

/// Returns the element type, shape and number of bytes of each tensor.
pub(crate) fn describe_feeds<'a>(feeds: &[Feed<'a>]) -> Vec<(DType, &'a [usize], usize)> {
    let of = |feed: &Feed<'a>| match feed {
        Feed::Tensor(input) => Some((input.dtype, input.dims, input.byte_count())),
        Feed::Lent(lent) => {
            let (have, need) = (lent.memory.len(), byte_length(lent.dtype, lent.dims).unwrap_or(usize::MAX));
            Some((lent.dtype, lent.dims, have.min(need)))
        }
        Feed::Sequence(_) => None,
    };
    feeds.iter().filter_map(of).collect()
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
