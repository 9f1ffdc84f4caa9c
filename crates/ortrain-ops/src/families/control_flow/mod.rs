//! Control flow: `If`, `Loop` and `Scan`.
//!
//! The inputs of a node are the operator's own inputs, followed by the outer values that its subgraphs use
//! ([`Node::captures`]). The last inputs of every subgraph are exactly these outer values, in this order. The subgraphs
//! of a gradient recompute the values of the forward subgraph that they need, or get them as inputs.

mod branch;
mod common_type;
mod growing_loop;
mod repeat;
mod residuals;
mod scan_8;
#[cfg(test)]
mod tests;

use crate::op::Definition;

pub(crate) fn definitions() -> Vec<Definition> {
    let mut all = branch::definitions();
    all.extend(repeat::definitions());
    all
}
