//! Adapters of recurrent layers. The layer reads the sum of its weight and of the product of the factors:
//! `W[d] + scale * B[d] A[d]` for each direction `d`. The gates are blocks of rows of `B`.
//!
//! The layer with the result `y` gets the weight `y/adapted_W`, which takes the place of the result of other layers in
//! the names of the values: a copy of the weight is the base of the first adapter.

use ortrain_graph::{Graph, Node, ValueId};
use ortrain_onnx::GraphProto;

use super::names::split_base;
use super::targets::AdapterTarget;
use crate::Error;
use crate::class::Class;
use crate::registry::class_of;
use crate::support::low_rank::{copy_node, is_copy_of};

/// Inputs with weights, and their names.
pub(super) const WEIGHTS: [(usize, &str); 2] = [(1, "W"), (2, "R")];

/// Returns true for recurrent layers.
pub(super) fn is_recurrent(node: &Node) -> bool {
    matches!(class_of(node), Class::Recurrent { .. })
}

/// Returns the name of the sum of a weight and its adapters. `result` is the first result of the layer.
pub(super) fn adapted_weight(result: &str, weight: &str) -> String {
    format!("{result}/adapted_{weight}")
}

/// Returns true for names of [`adapted_weight`].
fn is_adapted_weight(value: &str) -> bool {
    WEIGHTS
        .iter()
        .any(|(_, weight)| value.strip_suffix(weight).is_some_and(|begin| begin.ends_with("/adapted_")))
}

/// Returns the weight without its adapters, from the value that a layer reads. `maker` returns the node of a value.
pub(super) fn innermost<'g>(
    graph: &Graph,
    mut read: ValueId,
    maker: impl Fn(ValueId) -> Option<&'g Node>,
) -> ValueId {
    while let Some(sum) = maker(read).filter(|node| class_of(node) == Class::Add) {
        match sum.present_inputs().find(|&input| split_base(graph.name_of(input)).is_some()) {
            Some(base) => read = base,
            None => break,
        }
    }
    read
}

/// Gives the weight of a layer a copy, which the first adapter can add to. Does nothing if there is a copy.
///
/// # Errors
/// Returns an error if the graph has no such layer.
pub(super) fn add_copy(graph: &mut GraphProto, target: &AdapterTarget) -> Result<(), Error> {
    if graph.node.iter().any(|node| node.output.first() == Some(&target.value)) {
        return Ok(());
    }
    let is_layer =
        |result: &str| WEIGHTS.iter().any(|(_, weight)| adapted_weight(result, weight) == target.value);
    let first_result = |outputs: &[String]| {
        outputs.iter().find(|output| !output.is_empty()).is_some_and(|output| is_layer(output))
    };
    let Some(at) = graph.node.iter().position(|node| first_result(&node.output)) else {
        return Err(Error::Adapter(format!(
            "{} is not a node of the main graph, and only such nodes get adapters",
            target.node
        )));
    };
    if let Some(input) = graph.node[at].input.get_mut(target.weight_input) {
        input.clone_from(&target.value);
    }
    graph.node.insert(at, copy_node(&target.read, &target.value));
    Ok(())
}

/// Removes the copy of a weight without adapters.
pub(super) fn remove_copy(graph: &mut GraphProto, value: &str) {
    if !is_adapted_weight(value) {
        return;
    }
    let Some(at) = graph.node.iter().position(|node| is_copy_of(node, value)) else { return };
    let weight = graph.node.remove(at).input.swap_remove(0);
    for input in graph.node.iter_mut().flat_map(|node| &mut node.input) {
        if input == value {
            input.clone_from(&weight);
        }
    }
}
