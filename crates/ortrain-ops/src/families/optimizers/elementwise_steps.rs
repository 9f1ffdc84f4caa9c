//! Optimizer models that compute a step element by element.

use ortrain_graph::{Graph, ValueType};

use crate::families::optimizers::map_tensors::{DOMAIN, MAP, ValueKind, read_map};
use crate::passes::node::LOWERING_PASSES;

/// Returns true if every step of a bound graph is computed element by element.
///
/// The graph must have operators of the newest versions and known types. `is_scalar` returns true for slots with one
/// number for each parameter.
#[must_use]
pub fn is_elementwise(graph: &Graph, is_scalar: &dyn Fn(&str) -> bool) -> bool {
    graph.nodes.iter().filter(|node| &*node.domain == DOMAIN && &*node.op == MAP).all(|node| {
        let Ok(map) = read_map(node) else { return false };
        let kinds = node.inputs.iter().enumerate().map(|(k, input)| {
            let id = (*input)?;
            Some(match &graph.value(id).ty {
                _ if map.column(k).is_some() => ValueKind::setting(),
                ValueType::Sequence(dtype) if is_scalar(graph.name_of(id)) => ValueKind::PerTensor(*dtype),
                ValueType::Sequence(dtype) => ValueKind::Element(*dtype),
                ty => ValueKind::Global(ty.dtype()?),
            })
        });
        let kinds: Option<Vec<ValueKind>> = kinds.collect();
        kinds.is_some_and(|kinds| map.compile_for(LOWERING_PASSES, &kinds).is_ok())
    })
}
