//! Weights of the adapters of a model: their scales are multiplied, and the original scales are kept in the metadata.

use std::collections::{BTreeMap, BTreeSet};

use ortrain_graph::Tensor;
use ortrain_onnx::ModelProto;
use ortrain_ops::training::{AdaptedLayer, adapted_layers, scale_name};
use rustc_hash::FxHashMap;

use super::merge::first_layers;
use super::{Prepared, no_adapter_error};
use crate::model::adapted_parameters::{AdapterWeight, adapter_weight, set_adapter_weight};
use crate::{Error, ModelSource, Result};

/// Returns a model in which each adapter has a weight: the factor of its contribution. Adapters without a weight in
/// `weights` get 0, and are switched off: they have no effect, and are not trained. The factors stay as they are, and
/// a weight of 1 restores the bits of the model.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::ModelSource;
/// use ortrain::lora::{LoraOptions, activate, active, add};
///
/// let (model, _) = add(setup::MODEL.into(), &LoraOptions::default())?;
/// let halved = activate(ModelSource::from_proto(&model)?, &[("default".to_owned(), 0.5)])?;
/// assert_eq!(active(ModelSource::from_proto(&halved)?)?, [("default".to_owned(), 0.5)]);
/// assert_eq!(activate(ModelSource::from_proto(&halved)?, &[("default".to_owned(), 1.0)])?, model);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the model cannot be read, or has no adapter of a name. If a weight is not a finite float32, or an adapter with
/// magnitudes (DoRA) gets a weight other than 1.
pub fn activate(model: ModelSource, weights: &[(String, f64)]) -> Result<ModelProto> {
    let mut prepared = Prepared::new(model)?;
    let layers = adapted_layers(prepared.graph()?);
    for (name, weight) in weights {
        if !layers.iter().any(|layer| layer.adapter == *name) {
            return Err(no_adapter_error(&prepared.label, name, &layers));
        }
        if !(*weight as f32).is_finite() {
            return Err(Error::Argument(format!(
                "the weight of the adapter {name:?} must be a finite float32, got {weight}"
            )));
        }
    }
    let mut scales: FxHashMap<String, Tensor> = FxHashMap::default();
    for name in names(&layers) {
        let weight =
            weights.iter().rev().find(|(other, _)| *other == name).map_or(0.0, |(_, weight)| *weight);
        let of_adapter: Vec<AdaptedLayer> =
            layers.iter().filter(|layer| layer.adapter == name).cloned().collect();
        let mut originals = BTreeMap::new();
        for layer in first_layers(&of_adapter) {
            if weight != 1.0 && prepared.magnitude(&layer.weight, &name).is_some() {
                return Err(Error::Argument(format!(
                    "the adapter {name:?} has magnitudes (DoRA), which have no weight other than 1, got {weight}"
                )));
            }
            let original = original_scale(&prepared, &layer.weight, &name)?;
            let constant = scale_name(&layer.weight, &name);
            let dtype = prepared.constant(&constant)?.dtype();
            scales.insert(constant, Tensor::scalar(dtype, original * weight));
            originals.insert(layer.weight.clone(), original);
        }
        let note = (weight != 1.0).then_some(AdapterWeight { weight, scales: originals });
        set_adapter_weight(&mut prepared.model.proto, &name, note.as_ref());
    }
    prepared.set_constants(scales)?;
    Ok(prepared.model.proto)
}

/// Returns the adapters of a model with their weights, in alphabetical order.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::ModelSource;
/// use ortrain::lora::{LoraOptions, active, add};
///
/// let (model, _) = add(setup::MODEL.into(), &LoraOptions::default())?;
/// assert_eq!(active(ModelSource::from_proto(&model)?)?, [("default".to_owned(), 1.0)]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the model cannot be read.
pub fn active(model: ModelSource) -> Result<Vec<(String, f64)>> {
    let mut prepared = Prepared::new(model)?;
    let names = names(&adapted_layers(prepared.graph()?));
    let weight = |name: &String| adapter_weight(&prepared.model.proto, name).map_or(1.0, |note| note.weight);
    Ok(names.into_iter().map(|name| (name.clone(), weight(&name))).collect())
}

/// Returns the names of the adapters in alphabetical order, which no change of the file affects.
pub(super) fn names(layers: &[AdaptedLayer]) -> Vec<String> {
    let names: BTreeSet<&String> = layers.iter().map(|layer| &layer.adapter).collect();
    names.into_iter().cloned().collect()
}

/// Returns the scale of an adapter with the weight 1.
pub(super) fn original_scale(prepared: &Prepared, weight: &str, adapter: &str) -> Result<f64> {
    let note = adapter_weight(&prepared.model.proto, adapter);
    match note.and_then(|note| note.scales.get(weight).copied()) {
        Some(scale) => Ok(scale),
        None => prepared.scale(weight, adapter),
    }
}
