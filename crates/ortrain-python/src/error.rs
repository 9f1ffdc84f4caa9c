//! Errors as the exceptions of `ortrain.errors`.

use ortrain::{Error, ErrorKind};
use pyo3::{PyErr, import_exception};

import_exception!(ortrain.errors, InvalidArgumentError);
import_exception!(ortrain.errors, InvalidModelError);
import_exception!(ortrain.errors, MemoryLimitError);
import_exception!(ortrain.errors, NoSuchFileError);
import_exception!(ortrain.errors, OrtrainError);
import_exception!(ortrain.errors, UnsupportedError);

/// An error of the core as an exception of its kind.
pub(crate) fn raise(error: Error) -> PyErr {
    let text = error.to_string();
    match error.kind() {
        ErrorKind::InvalidArgument => InvalidArgumentError::new_err(text),
        ErrorKind::InvalidModel => InvalidModelError::new_err(text),
        ErrorKind::NoSuchFile => NoSuchFileError::new_err(text),
        ErrorKind::MemoryLimit => MemoryLimitError::new_err(text),
        ErrorKind::NotImplemented => UnsupportedError::new_err(text),
        _ => OrtrainError::new_err(text),
    }
}
