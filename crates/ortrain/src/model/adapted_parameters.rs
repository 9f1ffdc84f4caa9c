//! Roles of the constants of a model with adapters: the adapters are trained, and their base is frozen.

use std::collections::BTreeMap;

use ortrain_onnx::{ModelProto, StringStringEntryProto};
use ortrain_ops::training::{Confidence, FactorName, Judgement, ParameterRole, adapted_layers};
use rustc_hash::FxHashSet;
use serde_json::{Value, json};

/// Metadata of a model with the names of constants that are trained beside the adapters, one in each line.
const TRAIN_ALSO: &str = "ortrain.train_also";
/// Begin of the metadata with the selection of biases that are trained beside an adapter: its name, and their names, one
/// in each line.
const BIAS: &str = "ortrain.lora_bias.";
/// Begin of the metadata with the weight of an adapter, if it is not 1, and the scales of its layers with the weight 1.
const WEIGHT: &str = "ortrain.lora_weight.";

/// Trained constants of a model with adapters.
pub(crate) struct AdaptedParameters {
    has_adapters: bool,
    also: FxHashSet<String>,
    /// Adapters with the weight 0.
    inactive: FxHashSet<String>,
}

impl AdaptedParameters {
    pub(crate) fn of(proto: &ModelProto) -> AdaptedParameters {
        AdaptedParameters {
            has_adapters: proto.graph.as_ref().is_some_and(|graph| !adapted_layers(graph).is_empty()),
            also: train_also(proto).chain(biases(proto)).map(str::to_owned).collect(),
            inactive: inactive(proto),
        }
    }

    /// Returns the judgement of a constant of the model, from the judgement by its use. A model without adapters keeps
    /// the latter.
    pub(crate) fn judge(&self, name: &str, by_use: Judgement) -> Judgement {
        if !self.has_adapters {
            return by_use;
        }
        let factor = FactorName::split(name);
        let (role, reason) = if factor.is_some_and(|factor| self.inactive.contains(factor.adapter)) {
            (ParameterRole::Constant, "its adapter is switched off")
        } else if factor.is_some() || self.also.contains(name) {
            (ParameterRole::Trained, "it is trained by the adapters of the model")
        } else if by_use.role == ParameterRole::Trained {
            (ParameterRole::Constant, "it belongs to the base of the adapters of the model, which is frozen")
        } else {
            return by_use;
        };
        Judgement { role, confidence: Confidence::Certain, reason: reason.into(), ..by_use }
    }
}

/// Adds names of constants that are trained beside the adapters.
pub(crate) fn add_train_also(proto: &mut ModelProto, names: Vec<String>) {
    let mut all: Vec<String> = train_also(proto).map(str::to_owned).collect();
    all.extend(names.into_iter().filter(|name| !name.contains('\n')));
    all.sort();
    all.dedup();
    clear_train_also(proto);
    if !all.is_empty() {
        let (key, value) = (TRAIN_ALSO.to_owned(), all.join("\n"));
        proto.metadata_props.push(StringStringEntryProto { key, value });
    }
}

/// Removes the names of constants that are trained beside the adapters.
pub(crate) fn clear_train_also(proto: &mut ModelProto) {
    proto.metadata_props.retain(|entry| entry.key != TRAIN_ALSO);
}

fn train_also(proto: &ModelProto) -> impl Iterator<Item = &str> {
    let entry = proto.metadata_props.iter().find(|entry| entry.key == TRAIN_ALSO);
    entry.into_iter().flat_map(|entry| entry.value.split('\n'))
}

/// Returns the constants that are trained as biases of adapters.
fn biases(proto: &ModelProto) -> impl Iterator<Item = &str> {
    let notes = proto.metadata_props.iter().filter(|entry| entry.key.starts_with(BIAS));
    notes.flat_map(|entry| entry.value.split('\n').skip(1))
}

/// Returns the adapter with trained biases, if the model has one.
pub(crate) fn biased_adapter(proto: &ModelProto) -> Option<&str> {
    proto.metadata_props.iter().find_map(|entry| entry.key.strip_prefix(BIAS))
}

/// Returns the selection of the biases of an adapter, and their names.
pub(crate) fn bias_note<'m>(
    proto: &'m ModelProto,
    adapter: &str,
) -> (&'m str, impl Iterator<Item = &'m str>) {
    let note = proto.metadata_props.iter().find(|entry| entry.key.strip_prefix(BIAS) == Some(adapter));
    let mut lines = note.map_or("", |entry| &entry.value).split('\n');
    (lines.next().unwrap_or_default(), lines)
}

/// Sets the selection of the biases of an adapter, and their names; `None` removes them.
pub(crate) fn set_bias_note(proto: &mut ModelProto, adapter: &str, note: Option<(&str, Vec<String>)>) {
    let key = format!("{BIAS}{adapter}");
    proto.metadata_props.retain(|entry| entry.key != key);
    if let Some((selection, names)) = note {
        let lines = names.iter().map(String::as_str).filter(|name| !name.contains('\n'));
        let value = std::iter::once(selection).chain(lines).collect::<Vec<_>>().join("\n");
        proto.metadata_props.push(StringStringEntryProto { key, value });
    }
}

/// Weight of an adapter.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct AdapterWeight {
    /// Factor of the scales.
    pub(crate) weight: f64,
    /// Scale of each adapted weight of the model, before it is multiplied.
    pub(crate) scales: BTreeMap<String, f64>,
}

/// Returns the weight of an adapter; `None` for 1.
pub(crate) fn adapter_weight(proto: &ModelProto, adapter: &str) -> Option<AdapterWeight> {
    let entry = proto.metadata_props.iter().find(|entry| entry.key.strip_prefix(WEIGHT) == Some(adapter))?;
    let note: Value = serde_json::from_str(&entry.value).ok()?;
    let scales = note.get("scales")?.as_object()?;
    let scales = scales.iter().filter_map(|(name, scale)| Some((name.clone(), scale.as_f64()?))).collect();
    Some(AdapterWeight { weight: note.get("weight")?.as_f64()?, scales })
}

/// Sets the weight of an adapter; `None` is 1.
pub(crate) fn set_adapter_weight(proto: &mut ModelProto, adapter: &str, weight: Option<&AdapterWeight>) {
    let key = format!("{WEIGHT}{adapter}");
    proto.metadata_props.retain(|entry| entry.key != key);
    if let Some(AdapterWeight { weight, scales }) = weight {
        let value = json!({"weight": weight, "scales": scales}).to_string();
        proto.metadata_props.push(StringStringEntryProto { key, value });
    }
}

/// Returns the adapters with the weight 0.
fn inactive(proto: &ModelProto) -> FxHashSet<String> {
    let names = proto.metadata_props.iter().filter_map(|entry| entry.key.strip_prefix(WEIGHT));
    let is_inactive = |name: &&str| adapter_weight(proto, name).is_some_and(|note| note.weight == 0.0);
    names.filter(is_inactive).map(str::to_owned).collect()
}
