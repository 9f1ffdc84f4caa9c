//! Checks of learning rates, and the names of schedulers in checkpoints.

use crate::{Error, Result};

/// Checks that a learning rate is valid.
///
/// # Errors
/// If the rate is negative, infinite or NaN: a step would ascend, or destroy the parameters.
pub(crate) fn check_rate(label: &str, rate: f32) -> Result<()> {
    if rate.is_finite() && rate >= 0.0 {
        return Ok(());
    }
    Err(Error::Argument(format!("{label} must be finite and at least 0, got {rate}")))
}

/// Name of a [`LinearLRScheduler`] in checkpoints.
pub(crate) const LINEAR_KIND: &str = "linear";

pub(crate) fn no_optimizer() -> Error {
    Error::State("there is no optimizer on the state yet; make one before its scheduler".into())
}
