//! Low-rank adapters (LoRA) of a model: two small factors beside each adapted weight.
//!
//! The adapter `name` of the weight `w` consists of three constants: `w.lora_A.name` with the shape `[rank, inputs]`,
//! `w.lora_B.name` with the shape `[outputs, rank]`, and the number `w.lora_scale.name`. The factors have PEFT's layout.
//! A layer with the result `y` gets the result `y/lora.name/base`, and a sum has the result `y`.

mod biases;
mod formats;
mod merge;
mod names;
mod recurrent;
mod rows;
mod sites;
mod stored;
mod targets;
mod weights;

use ortrain_onnx::GraphProto;
use rustc_hash::FxHashSet;

pub use biases::layer_bias;
pub use formats::{QuantizedWeight, WeightFormat, quantize_weight, split_fused_products};
pub use merge::{Delta, MergedWeight, merge_weight, remove_groups};
pub use names::{FactorKind, FactorName, factor_name, is_adapter_name, scale_name};
use recurrent::RecurrentWeight;
pub use rows::{RowAxis, RowForm, add_row_columns, weigh_rows};
pub use sites::{AdaptedLayer, adapted_layers, adapter_stops, has_adapters, remove_adapter};
pub use targets::{AdapterTarget, LayerKind, find_adapter_targets, find_head_target, weight_readers};
pub use weights::{FactorShapes, add_delta, row_lengths, weight_matrix};

use crate::Error;
use crate::support::low_rank::{Magnitude, Site, adapter_nodes};

/// Form of an adapter at one layer.
#[derive(Clone, Debug)]
pub struct AdapterForm {
    /// Name of the adapter.
    pub adapter: String,
    /// Name of the scalar with the ratio of the dropout; `None` for no dropout.
    pub dropout: Option<String>,
    /// Rank.
    pub rank: usize,
    /// True if the rows of the adapted weight have trained magnitudes (DoRA).
    pub has_magnitude: bool,
    /// Version of `ai.onnx` of the graph.
    pub opset: i64,
}

/// Adds the nodes of an adapter to a layer. The constants are not added.
///
/// # Errors
/// Returns an error if the graph has no node with the result of the layer, or if the layer has an adapter of this name.
/// Also if it has another adapter, and one of both has magnitudes.
pub fn add_adapter(graph: &mut GraphProto, target: &AdapterTarget, form: &AdapterForm) -> Result<(), Error> {
    let adapter = &form.adapter;
    let root = names::root_of(&target.value);
    let prefix = names::site_prefix(root, adapter);
    let base = names::base_value(root, adapter);
    if target.kind == LayerKind::Recurrent {
        let weight = RecurrentWeight {
            node: &target.node,
            read: &target.read,
            value: &target.value,
            input: target.weight_input,
        };
        recurrent::add_copy(graph, &weight)?;
    }
    let known: FxHashSet<&str> =
        graph.node.iter().flat_map(|node| &node.output).map(String::as_str).collect();
    if known.contains(base.as_str()) {
        return Err(Error::Adapter(format!(
            "{} has an adapter {adapter:?} already; give the new adapter another name",
            target.node
        )));
    }
    let others =
        known.iter().filter_map(|value| names::split_base(value)).filter(|(other, _)| *other == root);
    for (_, other) in others {
        let has_magnitude = known.contains(names::norm_value(root, other).as_str());
        if has_magnitude || form.has_magnitude {
            return Err(Error::Adapter(format!(
                "{} has the adapter {other:?}, and an adapter with magnitudes (DoRA) must be the only one of its layer; \
                 merge or remove the other one",
                target.node
            )));
        }
    }
    let at = graph.node.iter().position(|node| node.output.first() == Some(&target.value));
    let Some(at) = at else {
        return Err(Error::Adapter(format!(
            "{} is not a node of the main graph, and only such nodes get adapters",
            target.node
        )));
    };
    let lengths = factor_name(&target.weight, FactorKind::Magnitude, adapter);
    let magnitude = if form.has_magnitude {
        target.check_magnitude()?;
        Some(Magnitude {
            lengths: &lengths,
            weight: &target.read,
            dims: &target.dims,
            has_outputs_last: target.has_outputs_last,
            bias: target.bias.as_deref(),
            rank: form.rank,
        })
    } else {
        None
    };
    let layer = target.layer(&graph.node[at]);
    graph.node[at].output[0].clone_from(&base);
    let site = Site {
        x: &target.input,
        base: &base,
        y: &target.value,
        a: &factor_name(&target.weight, FactorKind::A, adapter),
        b: &factor_name(&target.weight, FactorKind::B, adapter),
        scale: &scale_name(&target.weight, adapter),
        dropout: form.dropout.as_deref(),
        magnitude,
        prefix: &prefix,
        opset: form.opset,
    };
    let nodes = adapter_nodes(&layer, &site);
    graph.node.splice(at + 1..at + 1, nodes);
    Ok(())
}
