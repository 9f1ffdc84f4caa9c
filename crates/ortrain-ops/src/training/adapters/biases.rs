//! Biases of layers.

use ortrain_graph::{Graph, ValueId};

use super::targets::AdapterTarget;
use crate::class::Class;
use crate::registry::class_of;

/// Returns the name of the constant that a layer adds to its result: the bias of its operator, or the other operand of the
/// sum that reads the result.
#[must_use]
pub fn layer_bias(graph: &Graph, target: &AdapterTarget) -> Option<String> {
    let is_bias = |id: ValueId| {
        let constant = graph.value(id).content();
        constant.is_some_and(|constant| constant.dtype().is_float() && constant.len() == target.outputs)
    };
    let of_operator = target.bias.as_deref().and_then(|bias| graph.find(bias)).filter(|&id| is_bias(id));
    let of_sum = || {
        let result = graph.find(target.root())?;
        let mut readers =
            graph.nodes.iter().filter(|node| node.present_inputs().any(|input| input == result));
        let sum = readers.next().filter(|node| class_of(node) == Class::Add)?;
        let has_others = readers.next().is_some() || graph.outputs.contains(&result);
        sum.present_inputs().find(|&id| is_bias(id) && !has_others)
    };
    of_operator.or_else(of_sum).map(|id| graph.name_of(id).to_owned())
}
