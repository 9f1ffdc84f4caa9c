//! Updates of state in a graph.

use ortrain_graph::{Attrs, DType, Graph, Node, Tensor, ValueId, ValueType};

/// Appends a node that overwrites a state value with `value`.
pub(crate) fn add_state_update(graph: &mut Graph, state: ValueId, value: ValueId) {
    let name = format!("{}_update", graph.name_of(state));
    let overwrite = graph.add_constant("overwrite", Tensor::filled(DType::Bool, &[1], 1.0));
    let done = graph.add_value(&name, ValueType::tensor(DType::Bool, &[1]));
    let inputs = [state, value, overwrite].map(Some);
    let mut node = Node::new("com.microsoft", "InPlaceAccumulatorV2", &inputs, &[Some(done)], Attrs::new());
    node.name = name.into();
    graph.nodes.push(node);
}
