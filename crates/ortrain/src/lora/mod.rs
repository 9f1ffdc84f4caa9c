//! Low-rank adapters (LoRA) on any model: training without gradients, moments and copies of the base.
//!
//! (E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021.)
//!
//! [`add`] puts two small factors beside each selected weight. The adapter `name` of the weight `w` has the factors
//! `w.lora_A.name` and `w.lora_B.name` in PEFT's layout, and the number `w.lora_scale.name`. A model with adapters
//! trains its adapters by default, and its base is frozen. [`merge`] adds the adapters to their weights.

mod activate;
mod base;
mod biases;
mod decompose;
mod factors;
mod files;
mod merge;
mod notes;
mod options;
mod peft;
mod principal;
mod rows;
mod selection;

use std::collections::HashSet;

use ortrain_graph::{Graph, Tensor, tensor_to_proto};
use ortrain_onnx::{GraphProto, LoadedModel, ModelProto, NodeProto, visit_tensors_mut};
use ortrain_ops::training::{
    AdaptedLayer, AdapterForm, AdapterTarget, FactorKind, LayerKind, adapted_layers, add_adapter,
    factor_name, find_adapter_targets, remove_adapter, row_lengths, scale_name, split_fused_products,
};
use rustc_hash::{FxHashMap, FxHashSet};

pub use activate::{activate, active};
pub use files::{add_by_reference, add_to_file, base_by_reference, load_adapter_to_file};
pub use merge::{MergedWeight, merge, merge_with_errors, unmerge};
use notes::{check_without_rows, clear_notes, set_init};
pub use options::{Base, Bias, Description, Init, LayerAdapter, LoraOptions, Targets};
pub use peft::{load_adapter, save_adapter};
use principal::Principal;
pub use rows::with_row_adapters;

use crate::artifacts::to_self_contained_with_origins;
use crate::model::adapted_parameters::{add_train_also, clear_train_also, set_adapter_weight, set_bias_note};
use crate::model::graph::{infer_graph, message_graph, opset_of};
use crate::model::origins::Origins;
use crate::suggest::hint;
use crate::{Error, ModelSource, Result};

/// First version of `ai.onnx` with broadcasting in arithmetic operators.
const MIN_OPSET: i64 = 7;
/// First version of `ai.onnx` in which the ratio of a dropout is an input.
const MIN_OPSET_OF_DROPOUT: i64 = 12;
/// Begin of the name of the ratio of the dropout of an adapter.
const DROPOUT_PREFIX: &str = "lora_dropout.";

/// Model that was prepared for adapters.
struct Prepared {
    label: String,
    model: LoadedModel,
    typed: Graph,
    /// Files from which the constants were read.
    origins: Origins,
}

impl Prepared {
    /// Loads a model with its data. Calls of model functions are inlined.
    fn new(model: ModelSource) -> Result<Prepared> {
        let label = model.label("the model");
        Prepared::of(label, model.load()?)
    }

    /// Works like [`Prepared::new`] with mapped files, so that the base takes no memory of its own.
    fn mapped(model: ModelSource) -> Result<Prepared> {
        let label = model.label("the model");
        Prepared::of(label, model.load_mapped()?)
    }

    fn of(label: String, mut model: LoadedModel) -> Result<Prepared> {
        let mut verified = HashSet::default();
        let mut proto = std::mem::take(&mut model.proto);
        visit_tensors_mut(&mut proto, |tensor, _| model.verify_external_file(tensor, &mut verified))?;
        let model = model.with_proto(proto);
        let mut origins = Origins::default();
        let mut model = to_self_contained_with_origins(&label, model, &mut origins)?;
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
        split_fused_products(message_graph(&label, &mut model.proto)?, opset);
        let typed = infer_graph(&label, &model)?;
        Ok(Prepared { label, model, typed, origins })
    }

    fn graph(&mut self) -> Result<&mut GraphProto> {
        message_graph(&self.label, &mut self.model.proto)
    }

    /// Returns the layers that can have adapters, with the modules that an exporter wrote.
    fn targets(&mut self) -> Result<Vec<AdapterTarget>> {
        let mut targets = find_adapter_targets(&self.typed);
        let graph = self.graph()?;
        let modules: FxHashMap<&str, &str> = graph
            .node
            .iter()
            .filter_map(|node| Some((node.output.first()?.as_str(), module_of_node(node)?)))
            .collect();
        for target in &mut targets {
            target.module = modules.get(target.value.as_str()).map(|&module| module.to_owned());
        }
        Ok(targets)
    }

    /// Adds constants. A constant that two layers share is listed twice.
    ///
    /// # Errors
    /// If the model has a value of the name of a constant.
    fn add_constants(&mut self, constants: Vec<(String, Tensor)>) -> Result<()> {
        let mut new: FxHashSet<String> = FxHashSet::default();
        for (name, tensor) in constants {
            if self.typed.find(&name).is_some() {
                return Err(Error::Argument(format!(
                    "{} has a value {name:?} already; give the adapter another name",
                    self.label
                )));
            }
            if new.insert(name.clone()) {
                self.graph()?.initializer.push(tensor_to_proto(&name, &tensor));
            }
        }
        Ok(())
    }

    /// Replaces constants: initializers, and values of nodes without inputs, which become initializers.
    fn set_constants(&mut self, mut values: FxHashMap<String, Tensor>) -> Result<()> {
        let graph = self.graph()?;
        for tensor in &mut graph.initializer {
            if let Some(value) = values.remove(&tensor.name) {
                *tensor = tensor_to_proto(&tensor.name, &value);
            }
        }
        graph.node.retain(|node| {
            let value = match node.output.as_slice() {
                [output] if node.input.is_empty() => values.remove(output).map(|value| (output, value)),
                _ => None,
            };
            if let Some((output, value)) = &value {
                graph.initializer.push(tensor_to_proto(output, value));
            }
            value.is_none()
        });
        Ok(())
    }

    /// Returns the factors of an adapter of a weight.
    fn factors(&self, weight: &str, adapter: &str) -> Result<[Tensor; 2]> {
        let [a, b] =
            [FactorKind::A, FactorKind::B].map(|kind| self.constant(&factor_name(weight, kind, adapter)));
        Ok([a?, b?])
    }

    /// Returns the magnitudes of an adapter of a weight (DoRA), if it has some.
    fn magnitude(&self, weight: &str, adapter: &str) -> Option<Tensor> {
        let id = self.typed.find(&factor_name(weight, FactorKind::Magnitude, adapter))?;
        self.typed.value(id).content().cloned()
    }

    /// Returns the factor of the product of the factors.
    fn scale(&self, weight: &str, adapter: &str) -> Result<f64> {
        let name = scale_name(weight, adapter);
        let scale = self.constant(&name)?.to_f64();
        scale.first().copied().ok_or_else(|| {
            Error::Argument(format!("{}: the scale {name:?} of an adapter is empty", self.label))
        })
    }

    /// Returns the value of a constant.
    fn constant(&self, name: &str) -> Result<Tensor> {
        let content = self.typed.find(name).and_then(|id| self.typed.value(id).content().cloned());
        content.ok_or_else(|| {
            Error::Argument(format!("{} has no constant {name:?}, which an adapter needs", self.label))
        })
    }
}

/// Returns the path of the module of a node, which the second exporter of PyTorch writes as the last but one scope of a
/// list such as `['', 'encoder', 'encoder.q', 'linear']`.
fn module_of_node(node: &NodeProto) -> Option<&str> {
    let scopes = node.metadata_props.iter().find(|entry| entry.key == "pkg.torch.onnx.name_scopes")?;
    let module = scopes.value.trim_end_matches(']').rsplit(", ").nth(1)?;
    let module = module.trim_start_matches('[').trim_matches('\'');
    (!module.is_empty()).then_some(module)
}

/// Adds an adapter to a model, which may have other adapters already. Returns the model and the adapted layers.
///
/// The model gives the same results as before: one of the two factors is zero. With [`Init::Pissa`] and [`Init::Olora`]
/// the results differ by rounding errors, because the weights of the model give up the part that the factors take.
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
    let description = add_to(&mut prepared, options)?;
    Ok((prepared.model.proto, description))
}

/// Adds an adapter to a prepared model.
fn add_to(prepared: &mut Prepared, options: &LoraOptions) -> Result<Description> {
    let targets = selected_targets(prepared, options)?;
    let targets = quantize_base(prepared, targets, options)?;
    principal::check(&prepared.label, &prepared.typed, &targets, options)?;
    let also = selection::train_also(&prepared.label, &prepared.typed, &options.train_also)?;
    let opset = opset_of(&prepared.model.proto);
    if options.dropout > 0.0 && opset < MIN_OPSET_OF_DROPOUT {
        return Err(Error::Argument(format!(
            "dropout needs opset {MIN_OPSET_OF_DROPOUT}, and {} has opset {opset}; convert the model first",
            prepared.label
        )));
    }
    let adapter = &options.name;
    let ratio = format!("{DROPOUT_PREFIX}{adapter}");
    let mut constants: Vec<(String, Tensor)> = Vec::new();
    let mut rests: FxHashMap<String, Tensor> = FxHashMap::default();
    for (index, target) in targets.iter().enumerate() {
        let has_dropout =
            options.dropout > 0.0 && !matches!(target.kind, LayerKind::Embedding | LayerKind::Recurrent);
        let form = AdapterForm {
            adapter: adapter.clone(),
            dropout: has_dropout.then(|| ratio.clone()),
            rank: options.rank,
            has_magnitude: options.use_dora,
            opset,
        };
        add_adapter(prepared.graph()?, target, &form).map_err(adapter_error)?;
        if has_dropout {
            constants.push((ratio.clone(), Tensor::scalar(target.dtype, options.dropout)));
        }
        if targets[..index].iter().any(|other| other.weight == target.weight) {
            continue;
        }
        let mut weight = prepared.constant(&target.weight)?;
        let [a, b] = if principal::takes_weight(target, options.init) {
            let Principal { factors, rest } = principal::split(target, &weight, options)?;
            rests.insert(target.weight.clone(), rest.clone());
            weight = rest;
            factors
        } else {
            let shapes = target.factor_shapes(options.rank).map_err(adapter_error)?;
            factors::initial(target, &shapes, options, index as u64)
        };
        if options.use_dora {
            let lengths = row_lengths(target, &weight, (&a, &b), options.scale()).map_err(adapter_error)?;
            let lengths = Tensor::from_f64(target.dtype, vec![lengths.len()], &lengths);
            constants.push((factor_name(&target.weight, FactorKind::Magnitude, adapter), lengths));
        }
        constants.push((factor_name(&target.weight, FactorKind::A, adapter), a));
        constants.push((factor_name(&target.weight, FactorKind::B, adapter), b));
        constants.push((scale_name(&target.weight, adapter), Tensor::scalar(target.dtype, options.scale())));
    }
    prepared.add_constants(constants)?;
    if !rests.is_empty() {
        prepared.set_constants(rests)?;
        set_init(&mut prepared.model.proto, adapter, options.init);
    }
    let Prepared { label, model, typed, .. } = &mut *prepared;
    biases::select(label, &mut model.proto, typed, &targets, adapter, options.bias)?;
    add_train_also(&mut prepared.model.proto, also);
    describe_targets(&targets, options)
}

/// Quantizes the weights of the selected layers. Returns the layers of the new model.
fn quantize_base(
    prepared: &mut Prepared,
    targets: Vec<AdapterTarget>,
    options: &LoraOptions,
) -> Result<Vec<AdapterTarget>> {
    let Some(format) = options.base.format() else { return Ok(targets) };
    let model = (&mut prepared.model.proto, &prepared.typed);
    let base::QuantizedBase { values, constants } = base::quantize(&prepared.label, model, &targets, format)?;
    prepared.add_constants(constants)?;
    prepared.typed = infer_graph(&prepared.label, &prepared.model)?;
    let all = prepared.targets()?;
    let find = |value: &String| all.iter().find(|target| target.value == *value).cloned();
    values.iter().map(find).collect::<Option<Vec<AdapterTarget>>>().ok_or_else(|| {
        Error::Argument(format!(
            "a layer of {} is no layer after the quantization of its weight; exclude it",
            prepared.label
        ))
    })
}

/// Returns the layers that [`add`] would adapt with these options.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::lora::{LoraOptions, inspect};
///
/// let found = inspect(setup::MODEL.into(), &LoraOptions::default())?;
/// assert!(found.layers.iter().all(|layer| layer.rank == 8));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`add`].
pub fn inspect(model: ModelSource, options: &LoraOptions) -> Result<Description> {
    options.check()?;
    let mut prepared = Prepared::new(model)?;
    describe_targets(&selected_targets(&mut prepared, options)?, options)
}

/// Returns the selected layers, after a check of the rank and of shared weights.
fn selected_targets(prepared: &mut Prepared, options: &LoraOptions) -> Result<Vec<AdapterTarget>> {
    let all = prepared.targets()?;
    let targets = selection::select(&prepared.label, &prepared.typed, &all, options)?;
    for target in &targets {
        target.check_rank(options.rank).map_err(adapter_error)?;
        target.factor_shapes(options.rank).map_err(adapter_error)?;
        let is_other_form =
            |other: &&AdapterTarget| other.weight == target.weight && !other.has_form_of(target);
        if let Some(other) = targets.iter().find(is_other_form) {
            return Err(Error::Argument(format!(
                "{} and {} read the weight {:?} in different forms, so it cannot have one adapter for both; exclude \
                 one of them by the name of its node",
                target.node, other.node, target.weight
            )));
        }
    }
    Ok(targets)
}

fn describe_targets(targets: &[AdapterTarget], options: &LoraOptions) -> Result<Description> {
    let layer = |target: &AdapterTarget| {
        let shapes = target.factor_shapes(options.rank).map_err(adapter_error)?;
        let magnitude = if options.use_dora { target.outputs } else { 0 };
        let parameters = shapes.a.iter().product::<usize>() + shapes.b.iter().product::<usize>() + magnitude;
        Ok(LayerAdapter::new(target, &options.name, options.rank, parameters))
    };
    Ok(Description { layers: targets.iter().map(layer).collect::<Result<_>>()? })
}

/// Returns the adapters of a model, by layer.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::ModelSource;
/// use ortrain::lora::{LoraOptions, adapters, add};
///
/// let (model, description) = add(setup::MODEL.into(), &LoraOptions::default())?;
/// assert_eq!(adapters(ModelSource::from_proto(&model)?)?, description);
/// assert!(adapters(setup::MODEL.into())?.layers.is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the model cannot be read.
pub fn adapters(model: ModelSource) -> Result<Description> {
    let mut prepared = Prepared::new(model)?;
    let adapted = adapted_layers(prepared.graph()?);
    let targets = prepared.targets()?;
    let mut layers = Vec::new();
    for layer in adapted {
        let target = target_of_layer(&prepared.label, &targets, &layer)?;
        let [a, b] = prepared.factors(&layer.weight, &layer.adapter)?;
        let rank = target.rank_of(&a);
        let magnitude = prepared.magnitude(&layer.weight, &layer.adapter).map_or(0, |lengths| lengths.len());
        layers.push(LayerAdapter::new(target, &layer.adapter, rank, a.len() + b.len() + magnitude));
    }
    Ok(Description { layers })
}

/// Returns a model without the adapter `name`: the base, and the other adapters. After [`Init::Pissa`] and
/// [`Init::Olora`] the weights of the base lack the part that the adapter took.
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
    clear_notes(&mut prepared.model.proto, name, false);
    Ok(prepared.model.proto)
}

/// Removes the nodes and constants of an adapter. Returns the layers that had the adapter.
fn take_out(prepared: &mut Prepared, name: &str) -> Result<Vec<AdaptedLayer>> {
    check_without_rows(&prepared.model.proto, &prepared.label, name)?;
    let adapted = adapted_layers(prepared.graph()?);
    let layers = remove_adapter(prepared.graph()?, name);
    if layers.is_empty() {
        return Err(no_adapter_error(&prepared.label, name, &adapted));
    }
    let mut constants: FxHashSet<String> = FxHashSet::default();
    constants.insert(format!("{DROPOUT_PREFIX}{name}"));
    for AdaptedLayer { weight, .. } in &layers {
        constants.insert(factor_name(weight, FactorKind::A, name));
        constants.insert(factor_name(weight, FactorKind::B, name));
        constants.insert(factor_name(weight, FactorKind::Magnitude, name));
        constants.insert(scale_name(weight, name));
    }
    prepared.graph()?.initializer.retain(|tensor| !constants.contains(&tensor.name));
    set_bias_note(&mut prepared.model.proto, name, None);
    set_adapter_weight(&mut prepared.model.proto, name, None);
    if adapted_layers(prepared.graph()?).is_empty() {
        clear_train_also(&mut prepared.model.proto);
    }
    Ok(layers)
}

fn no_adapter_error(label: &str, name: &str, adapted: &[AdaptedLayer]) -> Error {
    let mut names: Vec<String> = adapted.iter().map(|layer| format!("{:?}", layer.adapter)).collect();
    names.sort();
    names.dedup();
    let present = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
    Error::Argument(format!("{label} has no adapter {name:?}; its adapters: {present}"))
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn adapter_error(error: ortrain_ops::Error) -> Error {
    Error::Argument(error.to_string())
}

/// Returns the target of an adapted layer.
fn target_of_layer<'t>(
    label: &str,
    targets: &'t [AdapterTarget],
    layer: &AdaptedLayer,
) -> Result<&'t AdapterTarget> {
    targets.iter().find(|target| target.is_layer_of(layer)).ok_or_else(|| {
        Error::Argument(format!(
            "{label}: the node of {:?} was changed after it got the adapter {:?}, so it is no layer with the weight {:?}",
            layer.value, layer.adapter, layer.weight
        ))
    })
}

/// Returns the target of a weight, or an error with the nearest name.
fn target_of<'t>(label: &str, targets: &'t [AdapterTarget], weight: &str) -> Result<&'t AdapterTarget> {
    targets.iter().find(|target| target.weight == weight).ok_or_else(|| {
        let suggestion = hint(weight, targets.iter().map(|target| target.weight.as_str()));
        Error::Argument(format!("{label} has no layer with the weight {weight:?}{suggestion}"))
    })
}
