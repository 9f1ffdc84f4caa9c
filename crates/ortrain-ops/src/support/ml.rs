//! Inputs of operators of ai.onnx.ml.

use crate::OpError;
use crate::infer::Infer;

/// Domain of the operators of classical machine learning.
pub(crate) const ML_DOMAIN: &str = "ai.onnx.ml";

/// Checks that input 0 is a vector `[features]` or a matrix `[batch, features]`. Returns the number of features, if
/// known.
pub(crate) fn feature_count(cx: &Infer<'_>) -> Result<Option<usize>, OpError> {
    let Some(shape) = cx.shape(0) else { return Ok(None) };
    match shape.rank() {
        1 | 2 => Ok(shape[shape.rank() - 1].known()),
        _ => Err(OpError::invalid(format!(
            "input 0 has shape {shape}; [features] or [batch, features] is needed"
        ))),
    }
}
