//! Inputs of runs: tensors, and memory with other writers.

use std::sync::Arc;

use ortrain::{DType, InputBytes, Lent, Memory, RunInput, Tensor};
use pyo3::prelude::*;

use crate::value::OrtValue;

/// Input or output of a model: a tensor, or a list of tensors for a sequence.
#[derive(FromPyObject)]
pub(crate) enum Feed {
    Tensor(Py<OrtValue>),
    Sequence(Vec<Py<OrtValue>>),
}

/// An input during a run: an immutable tensor, or memory with other writers.
pub(crate) enum SessionInput {
    Tensor(Tensor),
    Lent(DType, Vec<usize>, Arc<Memory>),
    Sequence(Vec<Tensor>),
}

impl SessionInput {
    pub(crate) fn of(feed: &Feed) -> PyResult<SessionInput> {
        Ok(match feed {
            Feed::Tensor(value) => SessionInput::of_value(value.get())?,
            Feed::Sequence(values) => SessionInput::Sequence(
                values.iter().map(|value| value.get().tensor()).collect::<PyResult<_>>()?,
            ),
        })
    }

    pub(crate) fn of_value(value: &OrtValue) -> PyResult<SessionInput> {
        Ok(match value.shared_memory() {
            Some(memory) => SessionInput::Lent(value.dtype(), value.dims().to_vec(), memory),
            None => SessionInput::Tensor(value.tensor()?),
        })
    }

    /// Returns an input of a step. Memory of this process is copied before any check.
    fn of_step(value: &OrtValue) -> PyResult<SessionInput> {
        match value.shared_memory().filter(|memory| memory.host().is_none()) {
            Some(memory) => Ok(SessionInput::Lent(value.dtype(), value.dims().to_vec(), memory)),
            None => Ok(SessionInput::Tensor(value.tensor()?)),
        }
    }

    /// Returns an input that a run copies. Floats on a device are copied there, and other values through the host,
    /// because their elements are checked before use.
    fn of_copied(value: &OrtValue) -> PyResult<SessionInput> {
        match SessionInput::of_step(value)? {
            SessionInput::Lent(dtype, ..) if !dtype.is_float() => Ok(SessionInput::Tensor(value.tensor()?)),
            input => Ok(input),
        }
    }

    /// Returns the input of a run, which is no sequence.
    pub(crate) fn run_input(&self) -> RunInput<'_> {
        match self {
            SessionInput::Tensor(tensor) => RunInput::from(tensor),
            SessionInput::Lent(dtype, dims, memory) => {
                RunInput { dtype: *dtype, dims, bytes: InputBytes::Device(memory) }
            }
            SessionInput::Sequence(_) => unreachable!("values of a run are tensors"),
        }
    }

    /// Returns the destination of an output.
    pub(crate) fn output_buffer(value: &OrtValue) -> PyResult<SessionInput> {
        Ok(SessionInput::Lent(value.dtype(), value.dims().to_vec(), value.memory()?))
    }

    pub(crate) fn lent(&self) -> Option<Lent<'_>> {
        match self {
            SessionInput::Lent(dtype, dims, memory) => Some(Lent { dtype: *dtype, dims, memory }),
            SessionInput::Tensor(_) | SessionInput::Sequence(_) => None,
        }
    }

    pub(crate) fn feed(&self) -> ortrain::Feed<'_> {
        match self {
            SessionInput::Tensor(tensor) => RunInput::from(tensor).into(),
            SessionInput::Sequence(tensors) => ortrain::Feed::Sequence(tensors),
            SessionInput::Lent(dtype, dims, memory) => Lent { dtype: *dtype, dims, memory }.into(),
        }
    }
}

/// Returns the inputs of a step. Memory on a device may be read in place.
pub(crate) fn step_inputs(values: &[Bound<'_, OrtValue>]) -> PyResult<Vec<SessionInput>> {
    values.iter().map(|value| SessionInput::of_step(value.get())).collect()
}

/// Returns inputs that a run copies.
pub(crate) fn copied_inputs(values: &[Bound<'_, OrtValue>]) -> PyResult<Vec<SessionInput>> {
    values.iter().map(|value| SessionInput::of_copied(value.get())).collect()
}

/// Result of a run: a tensor, or a list of tensors for a sequence.
#[derive(IntoPyObject)]
pub(crate) enum Fetched {
    Tensor(OrtValue),
    Sequence(Vec<OrtValue>),
}
