//! Low-rank adapters (LoRA) on any model: training without gradients, moments and copies of the base.
//!
//! (E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.)
//!
//! [`add`] puts two small factors beside each selected weight. The adapter `name` of the weight `w` has the factors
//! `w.lora_A.name` and `w.lora_B.name` in PEFT's layout, and the number `w.lora_scale.name`. A model with adapters
//! trains its adapters by default, and its base is frozen. [`merge`] adds the adapters to their weights.

mod factors;
mod options;
mod peft;
mod selection;

use ortrain_graph::{Graph, Tensor, tensor_to_proto};
use ortrain_onnx::{GraphProto, LoadedModel, ModelProto, StringStringEntryProto};
use ortrain_ops::training::{
    AdapterNames, AdapterTarget, Confidence, FactorKind, FactorName, Judgement, LayerKind, ParameterRole,
    adapted_layers, add_adapter, add_delta, factor_name, find_adapter_targets, remove_adapter, scale_name,
};
use rustc_hash::{FxHashMap, FxHashSet};

pub use options::{Description, Init, LayerAdapter, LoraOptions, Targets};
pub use peft::{load_adapter, save_adapter};

use crate::artifacts::to_self_contained;
use crate::model::graph::{infer_graph, message_graph, opset_of};
use crate::suggest::hint;
use crate::{Error, ModelSource, Result};

/// Metadata of a model with the names of constants that are trained beside the adapters, one in each line.
const TRAIN_ALSO: &str = "ortrain.train_also";
/// First version of `ai.onnx` whose arithmetic broadcasts.
const MIN_OPSET: i64 = 7;

/// Model that was prepared for adapters.
struct Prepared {
    label: String,
    model: LoadedModel,
    typed: Graph,
}

impl Prepared {
    /// Loads a model with its data. Calls of model functions are inlined.
    fn new(model: ModelSource) -> Result<Prepared> {
        let label = model.label("the model");
        let mut model = to_self_contained(&label, model.load()?)?;
        let opset = opset_of(&model.proto);
        if opset < MIN_OPSET {
            return Err(Error::Argument(format!(
                "{label} has opset {opset}, and adapters need opset {MIN_OPSET}; convert the model first"
            )));
        }
        if !model.proto.functions.is_empty() {
            let inlined =
                Graph::from_model(&model).map_err(|source| Error::graph(&label, source))?.to_proto();
            let graph = message_graph(&label, &mut model.proto)?;
            *graph = GraphProto {
                name: std::mem::take(&mut graph.name),
                doc_string: std::mem::take(&mut graph.doc_string),
                metadata_props: std::mem::take(&mut graph.metadata_props),
                ..inlined
            };
            model.proto.functions.clear();
        }
        let typed = infer_graph(&label, &model)?;
        Ok(Prepared { label, model, typed })
    }

    fn graph(&mut self) -> Result<&mut GraphProto> {
        message_graph(&self.label, &mut self.model.proto)
    }

    /// Returns the value of a constant.
    fn constant(&self, name: &str) -> Result<Tensor> {
        let content = self.typed.find(name).and_then(|id| self.typed.value(id).content().cloned());
        content.ok_or_else(|| {
            Error::Argument(format!("{} has no constant {name:?}, which an adapter needs", self.label))
        })
    }
}

/// Adds an adapter to a model, which may have other adapters already. Returns the model and the adapted layers.
///
/// All adapted layers give the same results as before: one of the factors is zero.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::lora::{LoraOptions, Targets, add};
/// use ortrain::{ModelSource, ParameterRole, Scope, inspect};
///
/// let options = LoraOptions { rank: 4, targets: Targets::patterns(["fc1.weight"]), ..LoraOptions::default() };
/// let (model, description) = add(setup::MODEL.into(), &options)?;
/// assert_eq!(description.layers[0].weight, "fc1.weight");
/// let found = inspect(ModelSource::from_proto(&model)?, &Scope::Outputs)?;
/// let trained: Vec<&str> = found.names(ParameterRole::Trained).collect();
/// assert_eq!(trained, ["fc1.weight.lora_A.default", "fc1.weight.lora_B.default"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the model cannot be read, if an option is invalid, if no weight is selected, or if the rank does not fit a weight.
pub fn add(model: ModelSource, options: &LoraOptions) -> Result<(ModelProto, Description)> {
    options.check()?;
    let mut prepared = Prepared::new(model)?;
    let targets = selection::select(&prepared.label, &prepared.typed, options)?;
    let also = selection::train_also(&prepared.label, &prepared.typed, &options.train_also)?;
    let mut new: FxHashSet<String> = FxHashSet::default();
    let mut layers = Vec::new();
    let constants: FxHashMap<String, ()> =
        prepared.graph()?.initializer.iter().map(|tensor| (tensor.name.clone(), ())).collect();
    for (index, target) in targets.iter().enumerate() {
        let rank = options.rank;
        let shapes = target.factor_shapes(rank).map_err(adapter_error)?;
        let dropout = (options.dropout > 0.0 && target.kind != LayerKind::Embedding)
            .then(|| format!("lora_dropout.{}", options.name));
        let names = AdapterNames { adapter: options.name.clone(), dropout };
        let graph = prepared.graph()?;
        add_adapter(graph, target, &names).map_err(adapter_error)?;
        let parameters = shapes.a.iter().product::<usize>() + shapes.b.iter().product::<usize>();
        layers.push(LayerAdapter::new(target, &options.name, rank, parameters));
        let mut constant = |name: String, tensor: &dyn Fn() -> Tensor| -> Result<()> {
            if constants.contains_key(&name) {
                return Err(Error::Argument(format!("the model has a constant {name:?} already")));
            }
            if new.insert(name.clone()) {
                graph.initializer.push(tensor_to_proto(&name, &tensor()));
            }
            Ok(())
        };
        let adapter = &options.name;
        let [first, second] = factors::initial(target, &shapes, options, index as u64);
        constant(factor_name(&target.weight, FactorKind::A, adapter), &|| first.clone())?;
        constant(factor_name(&target.weight, FactorKind::B, adapter), &|| second.clone())?;
        constant(scale_name(&target.weight, adapter), &|| Tensor::scalar(target.dtype, options.scale()))?;
        if let Some(ratio) = &names.dropout {
            constant(ratio.clone(), &|| Tensor::scalar(target.dtype, options.dropout))?;
        }
    }
    write_train_also(&mut prepared.model.proto, also);
    let description = Description { layers };
    Ok((prepared.model.proto, description))
}

/// Returns the layers that [`add`] would adapt with these options, and the adapters that the model has.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::lora::{LoraOptions, inspect_adapters};
///
/// let (targets, adapters) = inspect_adapters(setup::MODEL.into(), &LoraOptions::default())?;
/// assert!(targets.layers.iter().all(|layer| layer.rank == 8) && adapters.layers.is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`add`].
pub fn inspect_adapters(model: ModelSource, options: &LoraOptions) -> Result<(Description, Description)> {
    options.check()?;
    let mut prepared = Prepared::new(model)?;
    let targets = selection::select(&prepared.label, &prepared.typed, options)?;
    let new = targets
        .iter()
        .map(|target| {
            let shapes = target.factor_shapes(options.rank).map_err(adapter_error)?;
            let parameters = shapes.a.iter().product::<usize>() + shapes.b.iter().product::<usize>();
            Ok(LayerAdapter::new(target, &options.name, options.rank, parameters))
        })
        .collect::<Result<_>>()?;
    let known = describe_adapters(&mut prepared)?;
    Ok((Description { layers: new }, known))
}

/// Returns the adapters of a model.
fn describe_adapters(prepared: &mut Prepared) -> Result<Description> {
    let adapted = adapted_layers(prepared.graph()?);
    let targets = find_adapter_targets(&prepared.typed);
    let mut layers = Vec::new();
    for layer in adapted {
        let Some(target) = targets.iter().find(|target| target.weight == layer.weight) else { continue };
        let [a, b] = [FactorKind::A, FactorKind::B]
            .map(|kind| prepared.constant(&factor_name(&layer.weight, kind, &layer.adapter)));
        let (a, b) = (a?, b?);
        let rank = a.dims().first().copied().unwrap_or(0);
        layers.push(LayerAdapter::new(target, &layer.adapter, rank, a.len() + b.len()));
    }
    Ok(Description { layers })
}

/// Returns a model without the adapter `name`: the base, and the other adapters.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::ModelSource;
/// use ortrain::lora::{LoraOptions, add, remove};
///
/// let (model, _) = add(setup::MODEL.into(), &LoraOptions::default())?;
/// let base = remove(ModelSource::from_proto(&model)?, "default")?;
/// assert!(base.graph.unwrap().initializer.iter().all(|tensor| !tensor.name.contains("lora")));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the model cannot be read, or has no such adapter.
pub fn remove(model: ModelSource, name: &str) -> Result<ModelProto> {
    let mut prepared = Prepared::new(model)?;
    take_out(&mut prepared, name)?;
    Ok(prepared.model.proto)
}

/// Removes the nodes and constants of an adapter. Returns the adapted weights.
fn take_out(prepared: &mut Prepared, name: &str) -> Result<Vec<String>> {
    let adapters: Vec<String> =
        adapted_layers(prepared.graph()?).into_iter().map(|layer| layer.adapter).collect();
    let removed = remove_adapter(prepared.graph()?, name);
    if removed.is_empty() {
        let suggestion = hint(name, adapters.iter().map(String::as_str));
        return Err(Error::Argument(format!("{} has no adapter {name:?}{suggestion}", prepared.label)));
    }
    let mut weights: Vec<String> = removed.into_iter().map(|layer| layer.weight).collect();
    let mut seen: FxHashSet<String> = FxHashSet::default();
    weights.retain(|weight| seen.insert(weight.clone()));
    let constants: FxHashSet<String> = weights
        .iter()
        .flat_map(|weight| {
            [
                factor_name(weight, FactorKind::A, name),
                factor_name(weight, FactorKind::B, name),
                scale_name(weight, name),
            ]
        })
        .chain([format!("lora_dropout.{name}")])
        .collect();
    prepared.graph()?.initializer.retain(|tensor| !constants.contains(&tensor.name));
    if adapted_layers(prepared.graph()?).is_empty() {
        prepared.model.proto.metadata_props.retain(|entry| entry.key != TRAIN_ALSO);
    }
    Ok(weights)
}

/// Adds adapters to their weights, and removes their nodes: a plain model with the same results. `factors` are names of
/// adapters with a factor for each. Each element of a weight is rounded once.
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
/// If the model cannot be read, has no such adapter, or has integers as an adapted weight.
pub fn merge(model: ModelSource, factors: &[(String, f64)]) -> Result<ModelProto> {
    let mut prepared = Prepared::new(model)?;
    let targets = find_adapter_targets(&prepared.typed);
    let mut weights: FxHashMap<String, Tensor> = FxHashMap::default();
    for (name, factor) in factors {
        let adapted = take_out(&mut prepared, name)?;
        for weight in adapted {
            let target = targets.iter().find(|target| target.weight == weight);
            let Some(target) = target else { continue };
            let constant = |kind| prepared.constant(&factor_name(&weight, kind, name));
            let (a, b) = (constant(FactorKind::A)?, constant(FactorKind::B)?);
            let scale = prepared.constant(&scale_name(&weight, name))?.to_f64().first().copied();
            let old = match weights.get(&weight) {
                Some(known) => known.clone(),
                None => prepared.constant(&weight)?,
            };
            let merged =
                add_delta(target, &old, (&a, &b), factor * scale.unwrap_or(1.0)).map_err(adapter_error)?;
            weights.insert(weight, merged);
        }
    }
    for tensor in &mut prepared.graph()?.initializer {
        if let Some(merged) = weights.remove(&tensor.name) {
            *tensor = tensor_to_proto(&tensor.name, &merged);
        }
    }
    if let Some(name) = weights.keys().next() {
        return Err(Error::Argument(format!(
            "{name:?} is the value of a node, not an initializer, so adapters cannot be merged into it"
        )));
    }
    Ok(prepared.model.proto)
}

/// Writes the names of constants that are trained beside the adapters.
fn write_train_also(proto: &mut ModelProto, names: Vec<String>) {
    let mut all = read_train_also(proto);
    all.extend(names.into_iter().filter(|name| !name.contains('\n')));
    all.sort();
    all.dedup();
    proto.metadata_props.retain(|entry| entry.key != TRAIN_ALSO);
    if !all.is_empty() {
        proto
            .metadata_props
            .push(StringStringEntryProto { key: TRAIN_ALSO.to_owned(), value: all.join("\n") });
    }
}

fn read_train_also(proto: &ModelProto) -> Vec<String> {
    let entry = proto.metadata_props.iter().find(|entry| entry.key == TRAIN_ALSO);
    entry.map_or_else(Vec::new, |entry| entry.value.split('\n').map(str::to_owned).collect())
}

/// Trained constants of a model with adapters.
pub(crate) struct TrainedByAdapters {
    also: FxHashSet<String>,
}

impl TrainedByAdapters {
    /// Returns `None` for a model without adapters.
    pub(crate) fn of(proto: &ModelProto) -> Option<TrainedByAdapters> {
        let graph = proto.graph.as_ref()?;
        (!adapted_layers(graph).is_empty())
            .then(|| TrainedByAdapters { also: read_train_also(proto).into_iter().collect() })
    }

    /// Changes the role of a constant: factors of adapters and constants beside them are trained, and the base is
    /// frozen.
    pub(crate) fn judge(&self, name: &str, judgement: &mut Judgement) {
        if FactorName::split(name).is_some() || self.also.contains(name) {
            judgement.role = ParameterRole::Trained;
            judgement.confidence = Confidence::Certain;
            judgement.reason = "it is trained by the adapters of the model".into();
        } else if judgement.role == ParameterRole::Trained {
            judgement.role = ParameterRole::Constant;
            judgement.confidence = Confidence::Certain;
            judgement.reason = "it belongs to the base of the adapters of the model, which is frozen".into();
        }
    }
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn adapter_error(error: ortrain_ops::Error) -> Error {
    Error::Argument(error.to_string())
}

/// Returns the target of a weight, or an error with the nearest name.
fn target_of<'t>(label: &str, targets: &'t [AdapterTarget], weight: &str) -> Result<&'t AdapterTarget> {
    targets.iter().find(|target| target.weight == weight).ok_or_else(|| {
        let suggestion = hint(weight, targets.iter().map(|target| target.weight.as_str()));
        Error::Argument(format!("{label} has no layer with the weight {weight:?}{suggestion}"))
    })
}
