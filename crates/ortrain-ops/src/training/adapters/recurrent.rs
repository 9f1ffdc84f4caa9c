//! Adapters of recurrent layers. The layer reads the sum of its weight and of the product of the factors:
//! `W[d] + scale * B[d] A[d]` for each direction `d`. The gates are blocks of rows of `B`.
//!
//! The layer with the result `y` gets the weight `y/adapted_W`, which takes the place of the result of other layers in
//! the names of the values: a copy of the weight is the base of the first adapter.

use ortrain_graph::{Graph, Node, ValueId};
use ortrain_onnx::GraphProto;

use super::names::split_base;
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

/// Weight of a recurrent layer.
pub(super) struct RecurrentWeight<'a> {
    /// Label of the node in messages.
    pub(super) node: &'a str,
    /// Name of the weight, and of the sum of the weight and its adapters.
    pub(super) read: &'a str,
    pub(super) value: &'a str,
    /// Index of the input.
    pub(super) input: usize,
}

/// Gives the weight of a layer a copy, the base of the first adapter. Does nothing if there is a copy.
///
/// # Errors
/// Returns an error if the graph has no such layer.
pub(super) fn add_copy(graph: &mut GraphProto, weight: &RecurrentWeight<'_>) -> Result<(), Error> {
    if graph.node.iter().any(|node| node.output.first().is_some_and(|output| output == weight.value)) {
        return Ok(());
    }
    let is_layer =
        |result: &str| WEIGHTS.iter().any(|(_, letter)| adapted_weight(result, letter) == weight.value);
    let first_result = |outputs: &[String]| {
        outputs.iter().find(|output| !output.is_empty()).is_some_and(|output| is_layer(output))
    };
    let Some(at) = graph.node.iter().position(|node| first_result(&node.output)) else {
        return Err(Error::Adapter(format!(
            "{} is not a node of the main graph, and only such nodes get adapters",
            weight.node
        )));
    };
    if let Some(input) = graph.node[at].input.get_mut(weight.input) {
        weight.value.clone_into(input);
    }
    graph.node.insert(at, copy_node(weight.read, weight.value));
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
