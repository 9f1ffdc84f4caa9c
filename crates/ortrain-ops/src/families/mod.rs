//! The operators, one file per family, and the one list of them.

mod elementwise;
mod matmul;
pub(crate) mod shape;

use crate::op::Definition;

/// Every operator.
pub(crate) fn definitions() -> Vec<Definition> {
    [elementwise::definitions(), matmul::definitions(), shape::definitions()].into_iter().flatten().collect()
}

/// Whether an operator's derivative is zero almost everywhere.
pub(crate) fn has_zero_derivative(domain: &str, name: &str) -> bool {
    elementwise::is_flat(domain, name)
}

/// Whether an operator gives another result on every run.
pub(crate) fn draws_random_numbers(domain: &str, name: &str) -> bool {
    domain.is_empty() && name == "Dropout"
}
