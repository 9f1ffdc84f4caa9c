//! Checks of normalizations.

use ortrain_graph::Dim;

use crate::OpError;
use crate::infer::Infer;

/// Checks that input `k` broadcasts to input `x` without a change of the shape of `x`.
pub(crate) fn check_broadcasts(cx: &Infer<'_>, k: usize, x: usize) -> Result<(), OpError> {
    let (Some(small), Some(large)) = (cx.shape(k), cx.shape(x)) else { return Ok(()) };
    let fits = |(a, b): (&Dim, &Dim)| match (a.known(), b.known()) {
        (Some(a), Some(b)) => a == b || a == 1,
        _ => true,
    };
    if small.rank() > large.rank() || !small.iter().rev().zip(large.iter().rev()).all(fits) {
        return Err(OpError::invalid(format!(
            "input {k} has shape {small}, which does not broadcast to {large}, the shape of input {x}"
        )));
    }
    Ok(())
}
