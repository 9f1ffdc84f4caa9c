//! Conversion of errors to the exceptions of `ortrain.errors`.

use std::ffi::CString;

use ortrain::{DeviceError, Error, ErrorKind, Interrupt, RunError, interruptible};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::types::{PyAnyMethods, PyTuple};
use pyo3::{PyErr, PyResult, Python, import_exception};

import_exception!(ortrain.errors, AnomalyError);
import_exception!(ortrain.errors, DeviceLostError);
import_exception!(ortrain.errors, DeviceUnavailableError);
import_exception!(ortrain.errors, InvalidArgumentError);
import_exception!(ortrain.errors, OutOfRangeError);
import_exception!(ortrain.errors, InvalidModelError);
import_exception!(ortrain.errors, MemoryLimitError);
import_exception!(ortrain.errors, NoSuchFileError);
import_exception!(ortrain.errors, OrtrainError);
import_exception!(ortrain.errors, RankError);
import_exception!(ortrain.errors, UnsupportedError);

/// Returns an interrupt for pending signals. A run calls their handlers, and ends if a handler raises an
/// exception. Python stores the exception until the run has ended ([`raise`]).
pub(crate) fn signal_interrupt() -> Interrupt {
    Interrupt::new(|| {
        Python::attach(|py| match py.check_signals() {
            Ok(()) => false,
            Err(raised) => {
                raised.restore(py);
                true
            }
        })
    })
}

/// Runs work without side effects on the caller. The interpreter is released, and a signal ends the work.
pub(crate) fn detached<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> ortrain::Result<T> + Send,
) -> pyo3::PyResult<T> {
    py.detach(|| interruptible(Some(&signal_interrupt()), work)).map_err(raise)
}

/// Issues a warning for each sentence, attributed to the frame that is this number of Python frames above the
/// call.
pub(crate) fn warn(py: Python<'_>, sentences: &[String], frames: i32) -> PyResult<()> {
    if sentences.is_empty() {
        return Ok(());
    }
    let category = py.import("ortrain.errors")?.getattr("TrainingWarning")?;
    sentences.iter().try_for_each(|sentence| {
        let sentence = CString::new(sentence.as_str())?;
        PyErr::warn(py, &category, &sentence, frames)
    })
}

/// Returns the exception about memory for an output, with the name and the shape of the output.
fn output_exception(error: &Error) -> Option<PyErr> {
    let (name, dims) = match error {
        Error::Output { name, dims, .. } => (name, dims.as_ref()),
        Error::OutputOfUnknownShape { name } => (name, None),
        _ => return None,
    };
    let raised = InvalidArgumentError::new_err(error.to_string());
    Python::attach(|py| {
        let value = raised.value(py);
        value.setattr("output", name).ok()?;
        value.setattr("shape", dims.map(|dims| PyTuple::new(py, dims)).transpose().ok()?).ok()
    })?;
    Some(raised)
}

/// Converts an error of the core to an exception of its kind.
pub(crate) fn raise(error: Error) -> PyErr {
    let text = error.to_string();
    if matches!(error, Error::Run(RunError::Interrupted)) {
        let raised = Python::attach(PyErr::take);
        return raised.unwrap_or_else(|| PyKeyboardInterrupt::new_err(text));
    }
    if let Some(about) = output_exception(&error) {
        return about;
    }
    match error.kind() {
        ErrorKind::Anomaly => AnomalyError::new_err(text),
        ErrorKind::DeviceLost => DeviceLostError::new_err(text),
        ErrorKind::DeviceUnavailable => DeviceUnavailableError::new_err(text),
        ErrorKind::InvalidArgument => InvalidArgumentError::new_err(text),
        ErrorKind::InvalidModel => InvalidModelError::new_err(text),
        ErrorKind::NoSuchFile => NoSuchFileError::new_err(text),
        ErrorKind::MemoryLimit => MemoryLimitError::new_err(text),
        ErrorKind::NotImplemented => UnsupportedError::new_err(text),
        ErrorKind::Rank => RankError::new_err(text),
        _ => OrtrainError::new_err(text),
    }
}

/// Converts an error of a device to an exception.
pub(crate) fn device_exception(error: DeviceError) -> PyErr {
    raise(error.into())
}
