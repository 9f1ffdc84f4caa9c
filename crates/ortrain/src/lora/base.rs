//! Quantization of the weights that get adapters (QLoRA).
//!
//! (T. Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023.)

use ortrain_graph::{Graph, Tensor};
use ortrain_onnx::{GraphProto, ModelProto, OperatorSetIdProto};
use ortrain_ops::training::{AdapterTarget, FactorName, WeightFormat, quantize_weight, weight_readers};
use rustc_hash::FxHashSet;

use crate::model::graph::{message_graph, opset_of};
use crate::{Error, Result};

/// Layers and constants of a model with quantized weights.
pub(super) struct QuantizedBase {
    /// Result of each layer.
    pub(super) values: Vec<String>,
    /// New constants.
    pub(super) constants: Vec<(String, Tensor)>,
}

/// Quantizes the weights of the selected linear layers, one at a time, and changes their nodes. The new constants are not
/// added. Weights that other nodes read, and weights of integers, stay as they are.
pub(super) fn quantize(
    label: &str,
    (proto, typed): (&mut ModelProto, &Graph),
    targets: &[AdapterTarget],
    format: WeightFormat,
) -> Result<QuantizedBase> {
    let opset = opset_of(proto);
    add_import(proto, format.domain());
    let graph = message_graph(label, proto)?;
    let mut values: Vec<String> = targets.iter().map(|target| target.value.clone()).collect();
    let mut constants = Vec::new();
    let mut visited: FxHashSet<&str> = FxHashSet::default();
    let adapted: FxHashSet<&str> = typed
        .value_ids()
        .filter_map(|id| FactorName::split(typed.name_of(id)).map(|name| name.weight))
        .collect();
    for target in targets.iter().filter(|target| target.can_be_quantized()) {
        let weight = target.weight.as_str();
        if !visited.insert(weight) {
            continue;
        }
        let layers: Vec<usize> = (0..targets.len()).filter(|&at| targets[at].weight == weight).collect();
        if adapted.contains(weight) {
            return Err(Error::Argument(format!(
                "the weight {weight:?} has an adapter already, so it cannot be quantized to {}; quantize with the first \
                 adapter, or merge the present one",
                format.name()
            )));
        }
        let is_layer = |reader: &String| layers.iter().any(|&at| targets[at].value == *reader);
        if weight_readers(typed, weight).iter().all(is_layer) {
            let of_weight: Vec<&AdapterTarget> = layers.iter().map(|&at| &targets[at]).collect();
            let new = quantize_layers(graph, typed, &of_weight, (format, opset))?;
            constants.extend(new.constants);
            for (&at, value) in layers.iter().zip(new.values) {
                values[at] = value;
            }
        }
    }
    if constants.is_empty() {
        return Err(Error::Argument(format!(
            "the base {:?} needs linear layers whose weights are matrices of floats that no other node reads, and no \
             selected layer of {label} has one; select such layers, or use the base \"keep\"",
            format.name()
        )));
    }
    Ok(QuantizedBase { values, constants })
}

/// Quantizes the weight of some layers.
fn quantize_layers(
    graph: &mut GraphProto,
    typed: &Graph,
    layers: &[&AdapterTarget],
    form: (WeightFormat, i64),
) -> Result<QuantizedBase> {
    let weight = &layers[0].weight;
    let content = typed.find(weight).and_then(|id| typed.value(id).content());
    let content = content.ok_or_else(|| Error::Argument(format!("the weight {weight:?} is no constant")))?;
    let new =
        quantize_weight(graph, layers, content, form).map_err(|error| Error::Argument(error.to_string()))?;
    Ok(QuantizedBase { values: new.values, constants: new.constants })
}

/// Adds the import of a domain of operators.
fn add_import(proto: &mut ModelProto, domain: &str) {
    if !domain.is_empty() && !proto.opset_import.iter().any(|set| set.domain == domain) {
        proto.opset_import.push(OperatorSetIdProto { domain: domain.to_owned(), version: 1 });
    }
}
