//! Sizes and names of tensors.

use ortrain::DType;
use pyo3::prelude::*;

use crate::error::InvalidArgumentError;

/// Returns the number of bytes of a tensor.
pub(crate) fn byte_length(dtype: DType, dims: &[usize]) -> PyResult<usize> {
    // Zeros are excluded from the product, so that other sizes of an empty shape are still checked.
    let sizes = dims.iter().filter(|&&size| size != 0);
    let bytes = sizes.copied().try_fold(dtype.size(), usize::checked_mul);
    let bytes = bytes.filter(|&bytes| isize::try_from(bytes).is_ok()).ok_or_else(|| {
        InvalidArgumentError::new_err(format!("{} is too large to address", shape_name(dtype, dims)))
    })?;
    Ok(if dims.contains(&0) { 0 } else { bytes })
}

/// Formats a type with a shape, for errors.
pub(crate) fn shape_name(dtype: DType, dims: &[usize]) -> String {
    format!("{dtype}{dims:?}")
}
