//! Trained biases beside an adapter, as in PEFT: of the adapted layers, or of all layers.

use ortrain_checkpoint::NamedTensor;
use ortrain_graph::{Graph, Tensor, ValueId};
use ortrain_onnx::ModelProto;
use ortrain_ops::training::{
    AdaptedLayer, AdapterTarget, ConstantUses, ParameterRole, find_adapter_targets, layer_bias,
};
use rustc_hash::FxHashMap;

use super::options::Bias;
use super::selection::module_of;
use crate::model::adapted_parameters::{bias_note, biased_adapter, set_bias_note};
use crate::{Error, Result};

/// End of the names of biases in PyTorch.
const SUFFIX: &str = ".bias";
/// End of the names of the biases of adapted layers in PEFT's files.
const ADAPTED_SUFFIX: &str = ".base_layer.bias";

/// Notes the biases that are trained beside an adapter.
///
/// # Errors
/// If another adapter of the model has trained biases.
pub(super) fn select(
    label: &str,
    model: &mut ModelProto,
    graph: &Graph,
    adapted: &[AdapterTarget],
    adapter: &str,
    bias: Bias,
) -> Result<()> {
    let mut names: Vec<String> = match bias {
        Bias::None => return Ok(()),
        Bias::LoraOnly => adapted.iter().filter_map(|target| layer_bias(graph, target)).collect(),
        Bias::All => {
            let uses = ConstantUses::new(graph);
            let is_named = |id: &ValueId| {
                let name = graph.name_of(*id);
                let constant = graph.value(*id).content();
                (name == "bias" || name.ends_with(SUFFIX))
                    && constant.is_some_and(|constant| {
                        uses.classify(*id, constant.dtype(), constant.dims()).role == ParameterRole::Trained
                    })
            };
            let named = graph.value_ids().filter(is_named).map(|id| graph.name_of(id).to_owned());
            let of_layers = find_adapter_targets(graph);
            named.chain(of_layers.iter().filter_map(|target| layer_bias(graph, target))).collect()
        }
    };
    names.sort();
    names.dedup();
    set(label, model, adapter, bias, names)
}

fn set(label: &str, model: &mut ModelProto, adapter: &str, bias: Bias, names: Vec<String>) -> Result<()> {
    if let Some(other) = biased_adapter(model) {
        return Err(Error::Argument(format!(
            "the biases of {label} are trained beside the adapter {other:?} already; only one adapter can have bias={:?}",
            bias.name()
        )));
    }
    set_bias_note(model, adapter, Some((bias.name(), names)));
    Ok(())
}

/// Returns the biases that are trained beside an adapter, and how they were selected.
pub(super) fn selected(model: &ModelProto, adapter: &str) -> (Bias, Vec<String>) {
    let (bias, names) = bias_note(model, adapter);
    (Bias::from_name(bias).unwrap_or_default(), names.map(str::to_owned).collect())
}

/// Returns the biases of an adapter, by PEFT's names without the prefix.
pub(super) fn to_peft(
    graph: &Graph,
    targets: &[AdapterTarget],
    layers: &[AdaptedLayer],
    names: &[String],
    modules: &[(String, String)],
) -> Result<Vec<NamedTensor>> {
    let mut modules_of_biases: FxHashMap<String, String> = FxHashMap::default();
    for target in targets {
        let Some(bias) = layer_bias(graph, target) else { continue };
        let table = modules.iter().find(|(weight, _)| *weight == target.weight);
        let module = table.map_or_else(|| module_of(target), |(_, module)| module.clone());
        let is_adapted = layers.iter().any(|layer| target.is_layer_of(layer));
        let suffix = if is_adapted { ADAPTED_SUFFIX } else { SUFFIX };
        modules_of_biases.entry(bias).or_insert(module + suffix);
    }
    let tensor = |name: &String| {
        let constant = graph.find(name).and_then(|id| graph.value(id).content());
        let tensor = constant.ok_or_else(|| Error::Argument(format!("the model has no bias {name:?}")))?;
        let tensor = Tensor::from_f64(tensor.dtype(), vec![tensor.len()], &tensor.to_f64());
        Ok(NamedTensor { name: modules_of_biases.remove(name).unwrap_or_else(|| name.clone()), tensor })
    };
    names.iter().map(tensor).collect()
}

/// Returns the module of a bias in PEFT's files.
pub(super) fn module_of_bias(name: &str) -> Option<&str> {
    name.strip_suffix(ADAPTED_SUFFIX).or_else(|| name.strip_suffix(SUFFIX))
}

/// Notes the biases of an adapter in PEFT's files, which are pairs of a module and a bias. Returns their values by constant.
///
/// # Errors
/// If the model has no such bias, or the bias has another size or numbers that are not finite.
pub(super) fn load(
    label: &str,
    model: &mut ModelProto,
    graph: &Graph,
    (adapter, bias): (&str, Bias),
    biases: Vec<(String, Tensor)>,
    find: impl Fn(&str) -> Result<AdapterTarget>,
) -> Result<FxHashMap<String, Tensor>> {
    let mut values: FxHashMap<String, Tensor> = FxHashMap::default();
    for (module, tensor) in biases {
        let named = format!("{module}{SUFFIX}");
        let by_layer = || find(&module).ok().and_then(|target| layer_bias(graph, &target));
        let name = if graph.find(&named).is_some() { named } else { by_layer().unwrap_or(named) };
        let old = graph.find(&name).and_then(|id| graph.value(id).content()).ok_or_else(|| {
            Error::Argument(format!(
                "the adapter has a bias of the module {module:?}, but {label} has no such bias; if an exporter renamed \
                 the weight, give its module in modules"
            ))
        })?;
        let fail =
            |reason: String| Err(Error::Argument(format!("the bias of the module {module:?} {reason}")));
        if old.len() != tensor.len() {
            return fail(format!(
                "has {} numbers, but {name:?} has {}: it belongs to another base",
                tensor.len(),
                old.len()
            ));
        }
        let numbers = tensor.to_f64();
        if !tensor.dtype().is_float() || numbers.iter().any(|number| !number.is_finite()) {
            return fail("has numbers that are not finite".into());
        }
        values.insert(name, Tensor::from_f64(old.dtype(), old.dims().to_vec(), &numbers));
    }
    let mut names: Vec<String> = values.keys().cloned().collect();
    names.sort();
    set(label, model, adapter, bias, names)?;
    Ok(values)
}
