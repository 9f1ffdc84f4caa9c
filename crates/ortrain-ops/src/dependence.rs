//! Dependence of values on other values.

use ortrain_graph::{DType, Graph, ValueId};
use rustc_hash::FxHashSet;

/// Returns the values that depend on the values `on` through floats, including these values.
#[must_use]
pub fn dependent_values(graph: &Graph, on: &[ValueId]) -> FxHashSet<ValueId> {
    let is_float = |id: ValueId| graph.value(id).ty.dtype().is_some_and(DType::is_float);
    let mut dependent: FxHashSet<ValueId> = on.iter().copied().collect();
    for node in &graph.nodes {
        if node.present_inputs().any(|input| dependent.contains(&input)) {
            dependent.extend(node.present_outputs().filter(|&output| is_float(output)));
        }
    }
    dependent
}
