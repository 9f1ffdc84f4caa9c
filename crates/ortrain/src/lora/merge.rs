//! Adapters as parts of their weights.

use ortrain_graph::{Graph, Tensor, tensor_to_proto};
use ortrain_onnx::{GraphProto, ModelProto, TensorProto};
use ortrain_ops::training::{
    AdaptedLayer, AdapterTarget, Delta, adapted_layers, merge_weight, remove_groups, weight_readers,
};
use rustc_hash::{FxHashMap, FxHashSet};

use super::notes::clear_notes;
use super::{Prepared, adapter_error, take_out, target_of_layer};
use crate::{Error, ModelSource, Result};

/// Returns the first layer of each adapted weight, in the order of the layers.
pub(super) fn first_layers(layers: &[AdaptedLayer]) -> Vec<&AdaptedLayer> {
    let mut weights: FxHashSet<&str> = FxHashSet::default();
    layers.iter().filter(|layer| weights.insert(&layer.weight)).collect()
}

/// Checks that only layers of a removed adapter read a weight: its new value would change all other readers.
fn check_readers(prepared: &mut Prepared, weight: &str, layers: &[AdaptedLayer]) -> Result<()> {
    let mut readers = weight_readers(&prepared.typed, weight);
    readers.retain(|reader| !layers.iter().any(|layer| layer.value == *reader && layer.weight == weight));
    // Nodes of the adapter itself read the weight, too, and are removed already.
    let graph = prepared.graph()?;
    let outputs = graph.output.iter().map(|output| &output.name);
    let present: FxHashSet<&str> =
        graph.node.iter().flat_map(|node| &node.output).chain(outputs).map(String::as_str).collect();
    match readers.iter().find(|reader| present.contains(reader.as_str())) {
        None => Ok(()),
        Some(reader) => Err(Error::Argument(format!(
            "the weight {weight:?} is also read for {reader:?}, which has no adapter, so the adapter cannot be merged \
             into it"
        ))),
    }
}

/// Merged weight, with its differences from the exact sum of the weight and its adapters.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::ModelSource;
/// use ortrain::lora::{Base, LoraOptions, add, merge_with_errors};
///
/// let options = LoraOptions { base: Base::Int4, ..LoraOptions::default() };
/// let (model, _) = add(setup::MODEL.into(), &options)?;
/// let factors = [("default".to_owned(), 1.0)];
/// let (_, errors) = merge_with_errors(ModelSource::from_proto(&model)?, &factors)?;
/// assert_eq!((errors[0].weight.as_str(), errors[0].largest_error), ("fc1.weight_Q4", 0.0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct MergedWeight {
    /// Name of the weight.
    pub weight: String,
    /// Largest absolute difference of an element.
    pub largest_error: f64,
    /// Root of the mean of the squares of the differences.
    pub rms_error: f64,
}

/// Adds adapters to their weights, and removes their nodes: a plain model with the same results. `factors` are names of
/// adapters with a factor for each. Each element of a weight is rounded once.
///
/// A quantized weight is quantized again, with the same block size and the same kind of zero points. Blocks that the
/// adapters do not change keep their bits. A convolution with groups becomes a convolution without groups, because the
/// first factor of its adapter reads all channels.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::ModelSource;
/// use ortrain::lora::{LoraOptions, add, merge};
///
/// let (model, _) = add(setup::MODEL.into(), &LoraOptions::default())?;
/// let merged = merge(ModelSource::from_proto(&model)?, &[("default".to_owned(), 1.0)])?;
/// assert!(merged.graph.unwrap().initializer.iter().all(|tensor| !tensor.name.contains("lora")));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the model cannot be read, or has no such adapter. If a weight is also read by a node without the adapter, or if the
/// layout of a quantized weight is unknown.
pub fn merge(model: ModelSource, factors: &[(String, f64)]) -> Result<ModelProto> {
    Ok(merge_with_errors(model, factors)?.0)
}

/// Works like [`merge`], and also returns the error of each weight, in the order of the nodes.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::ModelSource;
/// use ortrain::lora::{LoraOptions, add, merge_with_errors};
///
/// let (model, _) = add(setup::MODEL.into(), &LoraOptions::default())?;
/// let (_, errors) = merge_with_errors(ModelSource::from_proto(&model)?, &[("default".to_owned(), 1.0)])?;
/// assert_eq!(errors[0].largest_error, 0.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`merge`].
pub fn merge_with_errors(
    model: ModelSource,
    factors: &[(String, f64)],
) -> Result<(ModelProto, Vec<MergedWeight>)> {
    let mut prepared = Prepared::new(model)?;
    let errors = merge_into(&mut prepared, factors)?;
    Ok((prepared.model.proto, errors))
}

fn merge_into(prepared: &mut Prepared, factors: &[(String, f64)]) -> Result<Vec<MergedWeight>> {
    let targets = prepared.targets()?;
    let mut parts: Vec<(AdapterTarget, Vec<(String, f64)>)> = Vec::new();
    for (name, factor) in factors {
        let layers = take_out(prepared, name)?;
        clear_notes(&mut prepared.model.proto, name, true);
        for layer in first_layers(&layers) {
            let target = target_of_layer(&prepared.label, &targets, layer)?;
            check_readers(prepared, &layer.weight, &layers)?;
            let part = (name.clone(), *factor);
            match parts.iter_mut().find(|(other, _)| other.weight == target.weight) {
                Some((_, parts)) => parts.push(part),
                None => parts.push((target.clone(), vec![part])),
            }
        }
    }
    let mut errors = Vec::new();
    for (target, adapters) in parts {
        let weight = &target.weight;
        let deltas: Vec<Delta> = adapters
            .iter()
            .map(|(name, factor)| delta(prepared, weight, name, *factor))
            .collect::<Result<_>>()?;
        let merged = merge_weight(&prepared.typed, &target, &deltas).map_err(adapter_error)?;
        if merged.is_ungrouped {
            let others = adapted_layers(prepared.graph()?);
            if let Some(other) = others.iter().find(|layer| layer.weight == *weight) {
                return Err(Error::Argument(format!(
                    "the convolution with the weight {weight:?} has groups and also the adapter {:?}; merge all of its \
                     adapters in one call",
                    other.adapter
                )));
            }
            remove_groups(prepared.graph()?, &target);
        }
        let constants = with_own_names(prepared.graph()?, weight, merged.constants);
        prepared.set_constants(constants)?;
        errors.push(MergedWeight {
            weight: weight.clone(),
            largest_error: merged.largest_error,
            rms_error: merged.rms_error,
        });
    }
    Ok(errors)
}

/// Returns an adapter of a weight with its factor.
fn delta(prepared: &Prepared, weight: &str, name: &str, factor: f64) -> Result<Delta> {
    let magnitude = prepared.magnitude(weight, name);
    if magnitude.is_some() && factor != 1.0 {
        return Err(Error::Argument(format!(
            "the adapter {name:?} has magnitudes (DoRA), which have no weight other than 1, got {factor}"
        )));
    }
    let scale = factor * prepared.scale(weight, name)?;
    Ok(Delta { factors: prepared.factors(weight, name)?, magnitude, scale })
}

/// Returns new values of constants by name. A constant that other nodes read, too, gets a new name for the nodes that read
/// the weight.
fn with_own_names(
    graph: &mut GraphProto,
    weight: &str,
    constants: Vec<(String, Tensor)>,
) -> FxHashMap<String, Tensor> {
    let mut values = FxHashMap::default();
    for (name, value) in constants {
        let reads = |inputs: &[String], name: &str| inputs.iter().any(|input| input == name);
        let is_shared = name != weight
            && graph.node.iter().any(|node| reads(&node.input, &name) && !reads(&node.input, weight));
        if !is_shared {
            values.insert(name, value);
            continue;
        }
        let own = format!("{name}.{weight}");
        for node in graph.node.iter_mut().filter(|node| reads(&node.input, weight)) {
            node.input.iter_mut().filter(|input| **input == name).for_each(|input| input.clone_from(&own));
        }
        graph.initializer.push(tensor_to_proto(&own, &value));
    }
    values
}

/// Returns the model before a merge: `adapted` without the merged adapters. `merged` is compared with the merge of
/// `adapted`, so that no later change of it is lost.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::ModelSource;
/// use ortrain::lora::{LoraOptions, add, merge, remove, unmerge};
///
/// let (model, _) = add(setup::MODEL.into(), &LoraOptions::default())?;
/// let adapted = || ModelSource::from_proto(&model);
/// let factors = [("default".to_owned(), 1.0)];
/// let merged = merge(adapted()?, &factors)?;
/// let base = unmerge(ModelSource::from_proto(&merged)?, adapted()?, &factors)?;
/// assert_eq!(base, remove(adapted()?, "default")?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`merge`], and if `merged` differs from the merge of `adapted`.
pub fn unmerge(merged: ModelSource, adapted: ModelSource, factors: &[(String, f64)]) -> Result<ModelProto> {
    let found = Prepared::new(merged)?;
    let mut base = Prepared::new(adapted.clone())?;
    let mut expected = Prepared::new(adapted)?;
    merge_into(&mut expected, factors)?;
    check_equal(&found, &expected)?;
    for (name, _) in factors {
        take_out(&mut base, name)?;
        clear_notes(&mut base.model.proto, name, false);
    }
    Ok(base.model.proto)
}

/// Checks that a merged model has the constants and nodes of the expected one.
fn check_equal(found: &Prepared, expected: &Prepared) -> Result<()> {
    let fail = |difference: String| {
        Err(Error::Argument(format!(
            "{} is not the merge of {}: {difference}; pass the model that was merged, with the same weights of its \
             adapters",
            found.label, expected.label
        )))
    };
    let content = |prepared: &Prepared, tensor: &TensorProto| {
        Graph::tensor_from_proto(&prepared.model, tensor)
            .map_err(|source| Error::graph(&prepared.label, source))
    };
    let (Some(graph), Some(merge)) = (&found.model.proto.graph, &expected.model.proto.graph) else {
        return fail("it has no graph".into());
    };
    let tensors: FxHashMap<&str, &TensorProto> =
        graph.initializer.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    for tensor in &merge.initializer {
        let Some(other) = tensors.get(tensor.name.as_str()) else {
            return fail(format!("it has no weight {:?}", tensor.name));
        };
        let [ours, merged] = [content(found, other)?, content(expected, tensor)?];
        if (ours.dims(), ours.dtype()) != (merged.dims(), merged.dtype()) {
            return fail(format!("the weight {:?} has another type or shape", tensor.name));
        }
        if ours.data() != merged.data() {
            return fail(format!("the weight {:?} has other bits", tensor.name));
        }
    }
    match merge.node.iter().zip(&graph.node).find(|(expected, found)| expected != found) {
        Some((node, _)) => fail(format!("the node of {:?} differs", node.output.join(", "))),
        None if merge.node.len() != graph.node.len() => fail("it has another number of nodes".into()),
        None => Ok(()),
    }
}
