//! Inputs of runs: tensors, and memory with other writers.

use std::sync::Arc;

use ortrain::{DType, InputView, Memory, OutputTarget, Tensor};
use pyo3::prelude::*;

use crate::value::OrtValue;

/// Argument of a run: a tensor, or a list of tensors for a sequence.
#[derive(FromPyObject)]
pub(crate) enum Argument {
    Tensor(Py<OrtValue>),
    Sequence(Vec<Py<OrtValue>>),
}

/// Result of a run: a tensor, or a list of tensors for a sequence.
#[derive(IntoPyObject)]
pub(crate) enum Returned {
    Tensor(OrtValue),
    Sequence(Vec<OrtValue>),
}

/// An input during a run: an immutable tensor, a memory with other writers, or a sequence.
pub(crate) enum SessionInput {
    Tensor(Tensor),
    Memory(ValueMemory),
    Sequence(Vec<Tensor>),
}

/// Memory of a value during a run: element type, shape and elements.
pub(crate) struct ValueMemory {
    pub(crate) dtype: DType,
    pub(crate) dims: Vec<usize>,
    pub(crate) memory: Arc<Memory>,
}

impl ValueMemory {
    /// Returns the memory of a value, in this process.
    pub(crate) fn of(value: &OrtValue) -> PyResult<ValueMemory> {
        Ok(ValueMemory::new(value, value.memory()?))
    }

    /// Returns the memory of a value: on the device if it is there, otherwise in this process.
    pub(crate) fn on_device(value: &OrtValue, device: &str) -> PyResult<ValueMemory> {
        match value.shared_memory().filter(|memory| memory.device() == device) {
            Some(memory) => Ok(ValueMemory::new(value, memory)),
            None => ValueMemory::of(value),
        }
    }

    fn new(value: &OrtValue, memory: Arc<Memory>) -> ValueMemory {
        ValueMemory { dtype: value.dtype(), dims: value.dims().to_vec(), memory }
    }

    pub(crate) fn input(&self) -> InputView<'_> {
        InputView::in_memory(self.dtype, &self.dims, &self.memory)
    }

    pub(crate) fn target(&self) -> OutputTarget<'_> {
        OutputTarget::in_memory(self.dtype, &self.dims, &self.memory)
    }
}

impl SessionInput {
    pub(crate) fn of(argument: &Argument) -> PyResult<SessionInput> {
        Ok(match argument {
            Argument::Tensor(value) => SessionInput::of_value(value.get())?,
            Argument::Sequence(values) => SessionInput::Sequence(
                values.iter().map(|value| value.get().tensor()).collect::<PyResult<_>>()?,
            ),
        })
    }

    pub(crate) fn of_value(value: &OrtValue) -> PyResult<SessionInput> {
        Ok(match value.shared_memory() {
            Some(memory) => SessionInput::Memory(ValueMemory::new(value, memory)),
            None => SessionInput::Tensor(value.tensor()?),
        })
    }

    /// Returns an input of a step. Memory of this process is copied before any check.
    fn of_step(value: &OrtValue) -> PyResult<SessionInput> {
        match value.shared_memory().filter(|memory| memory.host().is_none()) {
            Some(memory) => Ok(SessionInput::Memory(ValueMemory::new(value, memory))),
            None => Ok(SessionInput::Tensor(value.tensor()?)),
        }
    }

    /// Returns an input that a run copies. Floats on a device are copied there, and other values through the host,
    /// because their elements are checked before use.
    fn of_copied(value: &OrtValue) -> PyResult<SessionInput> {
        match SessionInput::of_step(value)? {
            SessionInput::Memory(memory) if !memory.dtype.is_float() => {
                Ok(SessionInput::Tensor(value.tensor()?))
            }
            input => Ok(input),
        }
    }

    /// Returns the input as an argument of the core.
    pub(crate) fn view(&self) -> InputView<'_> {
        match self {
            SessionInput::Tensor(tensor) => InputView::from(tensor),
            SessionInput::Sequence(tensors) => InputView::from(&tensors[..]),
            SessionInput::Memory(memory) => memory.input(),
        }
    }
}

/// Returns inputs as arguments of the core.
pub(crate) fn views(inputs: &[SessionInput]) -> Vec<InputView<'_>> {
    inputs.iter().map(SessionInput::view).collect()
}

/// Returns named inputs as arguments of the core.
pub(crate) fn named_views<'a>(inputs: &'a [(&'a str, SessionInput)]) -> Vec<(&'a str, InputView<'a>)> {
    inputs.iter().map(|(name, input)| (*name, input.view())).collect()
}

/// Requested outputs by index, with memory for an output if the caller gives a value.
pub(crate) struct Requested(Vec<(usize, Option<ValueMemory>)>);

impl Requested {
    pub(crate) fn new(outputs: &[(usize, Option<Bound<'_, OrtValue>>)]) -> PyResult<Requested> {
        let memory = |(at, value): &(usize, Option<Bound<'_, OrtValue>>)| {
            Ok((*at, value.as_ref().map(|value| ValueMemory::of(value.get())).transpose()?))
        };
        Ok(Requested(outputs.iter().map(memory).collect::<PyResult<_>>()?))
    }

    pub(crate) fn targets(&self) -> Vec<(usize, Option<OutputTarget<'_>>)> {
        self.0.iter().map(|(at, memory)| (*at, memory.as_ref().map(ValueMemory::target))).collect()
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
