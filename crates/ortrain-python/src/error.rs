//! Errors as the exceptions of `ortrain.errors`.

use std::ffi::CString;

use ortrain::{Error, ErrorKind, Interrupt, RunError, interruptible};
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
import_exception!(ortrain.errors, UnsupportedError);

/// Signals that have arrived: a run asks for their handlers to be called, and ends when one of them raises an exception.
/// The exception waits where Python keeps the one that is being raised, until the run has ended ([`raise`]).
pub(crate) fn signals() -> Interrupt {
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

/// Does work that changes nothing of the caller's, with the interpreter released, until a signal ends it.
pub(crate) fn detached<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> ortrain::Result<T> + Send,
) -> pyo3::PyResult<T> {
    py.detach(|| interruptible(Some(&signals()), work)).map_err(raise)
}

/// Warns of each of these sentences, at a number of frames of Python above this call.
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

/// The exception about memory for an output, which says which output it is and which shape it has.
fn about_output(error: &Error) -> Option<PyErr> {
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

/// An error of the core as an exception of its kind.
pub(crate) fn raise(error: Error) -> PyErr {
    let text = error.to_string();
    if matches!(error, Error::Run(RunError::Interrupted)) {
        let raised = Python::attach(PyErr::take);
        return raised.unwrap_or_else(|| PyKeyboardInterrupt::new_err(text));
    }
    if let Some(about) = about_output(&error) {
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
        _ => OrtrainError::new_err(text),
    }
}
