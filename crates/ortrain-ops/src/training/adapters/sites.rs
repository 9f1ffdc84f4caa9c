//! Layers of a graph that have adapters.

use ortrain_onnx::{GraphProto, NodeProto};
use rustc_hash::FxHashSet;

use super::names::{FactorKind, FactorName, norm_value, site_prefix, split_base};
use super::recurrent::remove_copy;
use crate::support::low_rank::PARTS;
use crate::support::row_weights::ROW_PARTS;

/// Layer with an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdaptedLayer {
    /// Name of the adapter.
    pub adapter: String,
    /// Name of the adapted weight.
    pub weight: String,
    /// Result of the layer with all adapters.
    pub value: String,
    /// Result without this adapter.
    base: String,
}

/// Returns the layers with adapters, in the order of the nodes. A layer with several adapters is repeated.
#[must_use]
pub fn adapted_layers(graph: &GraphProto) -> Vec<AdaptedLayer> {
    let outputs = graph.node.iter().flat_map(|node| &node.output);
    let sites =
        outputs.filter_map(|output| split_base(output).map(|(root, adapter)| (output, root, adapter)));
    sites
        .filter_map(|(base, root, adapter)| {
            let prefix = site_prefix(root, adapter);
            let is_part = |node: &&NodeProto| node.output.iter().any(|output| is_part_of(&prefix, output));
            let inputs = graph.node.iter().filter(is_part).flat_map(|node| &node.input);
            let weight = inputs.filter_map(|input| FactorName::split(input)).find_map(|name| {
                (name.kind == FactorKind::A && name.adapter == adapter).then(|| name.weight.to_owned())
            })?;
            let (adapter, value) = (adapter.to_owned(), root.to_owned());
            Some(AdaptedLayer { adapter, weight, value, base: base.clone() })
        })
        .collect()
}

/// Returns true if a graph has an adapter. Its factors are initializers, or inputs.
#[must_use]
pub fn has_adapters(graph: &GraphProto) -> bool {
    let initializers = graph.initializer.iter().map(|tensor| &tensor.name);
    initializers
        .chain(graph.input.iter().map(|input| &input.name))
        .any(|name| FactorName::split(name).is_some())
}

/// Returns true if a value lies between the factors and the sum of an adapter.
fn is_part_of(prefix: &str, value: &str) -> bool {
    value.strip_prefix(prefix).is_some_and(|rest| PARTS.contains(&rest) || ROW_PARTS.contains(&rest))
}

/// Returns the values of adapters without a gradient.
#[must_use]
pub fn adapter_stops(graph: &GraphProto) -> Vec<String> {
    let outputs: FxHashSet<&str> =
        graph.node.iter().flat_map(|node| &node.output).map(String::as_str).collect();
    let sites = outputs.iter().filter_map(|output| split_base(output));
    let mut norms: Vec<String> = sites
        .map(|(root, adapter)| norm_value(root, adapter))
        .filter(|norm| outputs.contains(norm.as_str()))
        .collect();
    norms.sort();
    norms
}

/// Removes the nodes of an adapter. The constants remain. Returns the layers that had the adapter.
pub fn remove_adapter(graph: &mut GraphProto, adapter: &str) -> Vec<AdaptedLayer> {
    let layers: Vec<AdaptedLayer> =
        adapted_layers(graph).into_iter().filter(|layer| layer.adapter == adapter).collect();
    for layer in &layers {
        let prefix = site_prefix(&layer.value, adapter);
        let is_part = |values: &[String]| values.iter().any(|value| is_part_of(&prefix, value));
        let is_last = |node: &NodeProto| is_part(&node.input) && !is_part(&node.output);
        let result =
            graph.node.iter().find(|node| is_last(node)).and_then(|node| node.output.first().cloned());
        graph.node.retain(|node| !is_last(node) && !is_part(&node.output));
        let Some(result) = result else { continue };
        for output in graph.node.iter_mut().flat_map(|node| &mut node.output) {
            if *output == layer.base {
                output.clone_from(&result);
            }
        }
        remove_copy(graph, &layer.value);
    }
    layers
}
