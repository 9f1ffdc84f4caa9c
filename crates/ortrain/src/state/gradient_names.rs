//! Names of gradients in training models.

/// Name of the flag input of a training model: true if gradients are overwritten instead of accumulated.
pub(crate) const RESET_FLAG: &str = "lazy_reset_grad";

/// Suffix of the input with the accumulated gradient of a parameter.
pub(crate) const BUFFER_SUFFIX: &str = "_grad.accumulation.buffer";

/// Suffix of the output that signals an accumulated gradient.
pub(crate) const UPDATED_SUFFIX: &str = "_grad.accumulation.out";

/// Suffix of the name of a gradient.
pub(crate) const GRADIENT_SUFFIX: &str = "_grad";

/// Returns the parameter name in the name of a gradient.
pub(crate) fn parameter_of_gradient(name: &str) -> Option<&str> {
    [BUFFER_SUFFIX, UPDATED_SUFFIX, GRADIENT_SUFFIX].iter().find_map(|suffix| name.strip_suffix(suffix))
}
