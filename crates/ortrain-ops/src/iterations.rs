//! Number of iterations of a loop, as far as the graph tells it.

use ortrain_graph::{Graph, Node, ValueId};

use crate::infer::normalize_axis;
use crate::op::Repetition;

/// Returns the number of iterations of a node's body, if known. `continues` is the condition after each iteration, if
/// it is always the same. Without a condition, the lengths of the scanned tensors give the number.
pub(crate) fn known_iteration_count(
    graph: &Graph,
    node: &Node,
    r: &Repetition,
    continues: Option<bool>,
) -> Option<u64> {
    if !r.conditional {
        let mut lengths = r.scanned.iter().enumerate().filter_map(|(s, along)| {
            let shape = graph.value(Repetition::own_input(node, r.carried + s)?).ty.shape()?;
            shape[normalize_axis(along.axis, shape.rank()).ok()?].known()
        });
        return lengths.next().map(|length| length as u64);
    }
    let limit = match Repetition::own_input(node, 0) {
        Some(id) => Some(u64::try_from(*graph.value(id).constant.as_ref()?.to_i64()?.first()?).unwrap_or(0)),
        None => None,
    };
    let begins = Repetition::own_input(node, 1).map_or(Some(true), |id| constant_flag(graph, id));
    match (limit, begins, continues) {
        (Some(0), ..) | (_, Some(false), _) => Some(0),
        (max_iterations, Some(true), Some(false)) => Some(max_iterations.unwrap_or(1).min(1)),
        (Some(max_iterations), Some(true), Some(true)) => Some(max_iterations),
        _ => None,
    }
}

pub(crate) fn constant_flag(graph: &Graph, id: ValueId) -> Option<bool> {
    match graph.value(id).constant.as_ref()?.to_i64()?.as_slice() {
        [one] => Some(*one != 0),
        _ => None,
    }
}
