//! Adapters in PEFT's files: `adapter_model.safetensors` and `adapter_config.json`.

use std::fs;
use std::path::Path;

use ortrain_checkpoint::{NamedTensor, load_safetensors, save_safetensors};
use ortrain_files::Staged;
use ortrain_graph::{Tensor, tensor_to_proto};
use ortrain_onnx::ModelProto;
use ortrain_ops::training::{
    AdapterNames, AdapterTarget, FactorKind, LayerKind, adapted_layers, add_adapter, factor_name,
    find_adapter_targets, is_adapter_name, scale_name,
};
use rustc_hash::{FxHashMap, FxHashSet};
use serde_json::{Map, Value, json};

use super::selection::module_of;
use super::{Prepared, adapter_error, target_of};
use crate::suggest::hint;
use crate::{Error, ModelSource, Result};

const WEIGHTS_FILE: &str = "adapter_model.safetensors";
const PICKLE_FILE: &str = "adapter_model.bin";
const CONFIG_FILE: &str = "adapter_config.json";
/// Begin of the names of all tensors.
const MODULE_PREFIX: &str = "base_model.model.";

fn suffixes(kind: LayerKind) -> [&'static str; 2] {
    match kind {
        LayerKind::Embedding => [".lora_embedding_A", ".lora_embedding_B"],
        _ => [".lora_A.weight", ".lora_B.weight"],
    }
}

/// Saves the adapter `name` of a model as PEFT does: `adapter_model.safetensors` and `adapter_config.json` in a folder,
/// which is created. `modules` are names of modules for weights whose names differ from the modules of PyTorch.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::ModelSource;
/// use ortrain::lora::{LoraOptions, add, load_adapter, save_adapter};
///
/// let folder = tempfile::tempdir()?;
/// let (model, _) = add(setup::MODEL.into(), &LoraOptions::default())?;
/// save_adapter(ModelSource::from_proto(&model)?, folder.path(), "default", &[])?;
/// let again = load_adapter(setup::MODEL.into(), folder.path(), "default", &[])?;
/// assert_eq!(again, model);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the model cannot be read or has no such adapter, or if the files cannot be written.
pub fn save_adapter(
    model: ModelSource,
    folder: impl AsRef<Path>,
    name: &str,
    modules: &[(String, String)],
) -> Result<()> {
    let folder = folder.as_ref();
    let mut prepared = Prepared::new(model)?;
    let targets = find_adapter_targets(&prepared.typed);
    let adapted = adapted_layers(prepared.graph()?);
    let mut weights: Vec<&str> =
        adapted.iter().filter(|layer| layer.adapter == name).map(|layer| layer.weight.as_str()).collect();
    let mut seen: FxHashSet<&str> = FxHashSet::default();
    weights.retain(|weight| seen.insert(weight));
    if weights.is_empty() {
        let suggestion = hint(name, adapted.iter().map(|layer| layer.adapter.as_str()));
        return Err(Error::Argument(format!("{} has no adapter {name:?}{suggestion}", prepared.label)));
    }
    let mut tensors = Vec::new();
    let mut ranks: Vec<(String, usize, f64)> = Vec::new();
    for weight in weights {
        let target = target_of(&prepared.label, &targets, weight)?;
        let module = modules
            .iter()
            .find(|(known, _)| known == weight)
            .map_or_else(|| module_of(target), |(_, module)| module.clone());
        let mut rank = 0;
        for (kind, suffix) in [FactorKind::A, FactorKind::B].into_iter().zip(suffixes(target.kind)) {
            let tensor = prepared.constant(&factor_name(weight, kind, name))?;
            if kind == FactorKind::A {
                rank = tensor.dims().first().copied().unwrap_or(0);
            }
            tensors.push(NamedTensor { name: format!("{MODULE_PREFIX}{module}{suffix}"), tensor });
        }
        let scale = prepared.constant(&scale_name(weight, name))?.to_f64().first().copied().unwrap_or(1.0);
        ranks.push((module, rank, scale * rank as f64));
    }
    let config = serde_json::to_vec_pretty(&config_of(&ranks))
        .map_err(|error| Error::Argument(format!("{CONFIG_FILE} cannot be written: {error}")))?;
    fs::create_dir_all(folder).map_err(|source| file_error("create", folder, source))?;
    save_safetensors(&tensors, folder.join(WEIGHTS_FILE))?;
    write_file(&folder.join(CONFIG_FILE), &config).map_err(ortrain_checkpoint::Error::from)?;
    Ok(())
}

fn write_file(path: &Path, bytes: &[u8]) -> ortrain_files::Result<()> {
    let mut file = Staged::beside(path)?;
    file.append(bytes)?;
    file.sync()?;
    file.persist()
}

fn file_error(action: &'static str, path: &Path, source: std::io::Error) -> Error {
    Error::Checkpoint(ortrain_checkpoint::Error::Io { action, path: path.to_owned(), source })
}

/// Returns PEFT's description of an adapter with these modules, ranks and numerators of the scale.
fn config_of(modules: &[(String, usize, f64)]) -> Value {
    let (rank, alpha) = modules.first().map_or((0, 0.0), |(_, rank, alpha)| (*rank, *alpha));
    let number = |alpha: f64| if alpha.fract() == 0.0 { json!(alpha as i64) } else { json!(alpha) };
    let names: Vec<&str> = modules.iter().map(|(module, ..)| module.as_str()).collect();
    let other_ranks: Map<String, Value> = modules
        .iter()
        .filter(|(_, other, _)| *other != rank)
        .map(|(module, other, _)| (module.clone(), json!(other)))
        .collect();
    let other_alphas: Map<String, Value> = modules
        .iter()
        .filter(|(_, _, other)| *other != alpha)
        .map(|(module, _, other)| (module.clone(), number(*other)))
        .collect();
    json!({
        "alpha_pattern": other_alphas,
        "auto_mapping": null,
        "base_model_name_or_path": null,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": true,
        "lora_alpha": number(alpha),
        "lora_dropout": 0.0,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": other_ranks,
        "target_modules": names,
        "task_type": null,
        "use_dora": false,
        "use_rslora": false,
    })
}

/// Description of an adapter in a folder.
struct Config {
    rank: f64,
    alpha: f64,
    use_rslora: bool,
    rank_pattern: Vec<(String, f64)>,
    alpha_pattern: Vec<(String, f64)>,
}

impl Config {
    fn read(path: &Path) -> Result<Config> {
        let text = fs::read(path).map_err(|source| file_error("read", path, source))?;
        let fail = |reason: String| Error::Argument(format!("{}: {reason}", path.display()));
        let value: Value =
            serde_json::from_slice(&text).map_err(|error| fail(format!("no JSON: {error}")))?;
        let kind = value.get("peft_type").and_then(Value::as_str).unwrap_or_default();
        if kind != "LORA" {
            return Err(fail(format!("the adapter has the type {kind:?}, and only \"LORA\" can be loaded")));
        }
        for field in ["use_dora", "layer_replication", "use_qalora"] {
            if value.get(field).is_some_and(|value| !matches!(value, Value::Null | Value::Bool(false))) {
                return Err(fail(format!("{field} is not supported; train the adapter without it")));
            }
        }
        let number = |field: &str| {
            value
                .get(field)
                .and_then(Value::as_f64)
                .filter(|number| number.is_finite())
                .ok_or_else(|| fail(format!("{field} must be a number")))
        };
        let pattern = |field: &str| -> Vec<(String, f64)> {
            let entries = value.get(field).and_then(Value::as_object).into_iter().flatten();
            entries.filter_map(|(name, value)| Some((name.clone(), value.as_f64()?))).collect()
        };
        Ok(Config {
            rank: number("r")?,
            alpha: number("lora_alpha")?,
            use_rslora: value.get("use_rslora").and_then(Value::as_bool).unwrap_or(false),
            rank_pattern: pattern("rank_pattern"),
            alpha_pattern: pattern("alpha_pattern"),
        })
    }

    /// Returns the scale of a module.
    fn scale(&self, module: &str) -> f64 {
        let find = |patterns: &[(String, f64)], otherwise: f64| {
            let fits = |name: &str| {
                module.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
            };
            patterns.iter().find(|(name, _)| fits(name)).map_or(otherwise, |(_, number)| *number)
        };
        let rank = find(&self.rank_pattern, self.rank);
        find(&self.alpha_pattern, self.alpha) / if self.use_rslora { rank.sqrt() } else { rank }
    }
}

/// Adds an adapter of PEFT to a model, under a name. `modules` are names of modules for weights whose names differ from
/// the modules of PyTorch.
///
/// See [`save_adapter`] for an example.
///
/// # Errors
/// If the folder has no such files, or files that are damaged, or an adapter that is not LoRA. If a module is no layer
/// of the model, or its factors have other sizes. If a factor has numbers that are not finite.
pub fn load_adapter(
    model: ModelSource,
    folder: impl AsRef<Path>,
    name: &str,
    modules: &[(String, String)],
) -> Result<ModelProto> {
    let folder = folder.as_ref();
    if !is_adapter_name(name) {
        return Err(Error::Argument(format!(
            "the name of an adapter consists of letters, digits, \"_\" and \"-\", got {name:?}"
        )));
    }
    let path = folder.join(WEIGHTS_FILE);
    if !path.exists() && folder.join(PICKLE_FILE).exists() {
        return Err(Error::Argument(format!(
            "{} has its weights in {PICKLE_FILE}, a pickle that could run any code; save the adapter as safetensors \
             (save_pretrained with safe_serialization=True)",
            folder.display()
        )));
    }
    let tensors = load_safetensors(&path)?;
    let config = Config::read(&folder.join(CONFIG_FILE))?;
    let mut prepared = Prepared::new(model)?;
    let targets = find_adapter_targets(&prepared.typed);
    let factors = factors_by_module(&path, tensors)?;
    for (module, pair) in factors {
        let target = find_module(&prepared.label, &targets, &module, modules)?;
        let [a, b] = checked_factors(&path, &module, target, pair)?;
        let scale = config.scale(&module);
        let readers: Vec<&AdapterTarget> =
            targets.iter().filter(|other| other.weight == target.weight).collect();
        let graph = prepared.graph()?;
        for reader in readers {
            let names = AdapterNames { adapter: name.to_owned(), dropout: None };
            add_adapter(graph, reader, &names).map_err(adapter_error)?;
        }
        let scale = Tensor::scalar(target.dtype, scale);
        for (constant, tensor) in [
            (factor_name(&target.weight, FactorKind::A, name), a),
            (factor_name(&target.weight, FactorKind::B, name), b),
            (scale_name(&target.weight, name), scale),
        ] {
            graph.initializer.push(tensor_to_proto(&constant, &tensor));
        }
    }
    Ok(prepared.model.proto)
}

/// Factors of the modules, in the order of their names.
fn factors_by_module(path: &Path, tensors: Vec<NamedTensor>) -> Result<Vec<(String, [Option<Tensor>; 2])>> {
    let mut found: FxHashMap<String, [Option<Tensor>; 2]> = FxHashMap::default();
    let mut order = Vec::new();
    for NamedTensor { name, tensor } in tensors {
        let inner = name.strip_prefix(MODULE_PREFIX).unwrap_or(&name);
        let part = [LayerKind::Linear, LayerKind::Embedding].into_iter().find_map(|kind| {
            let at = suffixes(kind).iter().position(|suffix| inner.ends_with(suffix))?;
            Some((inner.strip_suffix(suffixes(kind)[at])?.to_owned(), at))
        });
        let Some((module, at)) = part else {
            return Err(Error::Argument(format!(
                "{} has a tensor {name:?}, which is no factor of an adapter (\"….lora_A.weight\")",
                path.display()
            )));
        };
        if !found.contains_key(&module) {
            order.push(module.clone());
        }
        found.entry(module).or_default()[at] = Some(tensor);
    }
    if order.is_empty() {
        return Err(Error::Argument(format!("{} has no factors of adapters", path.display())));
    }
    order.sort();
    Ok(order.into_iter().filter_map(|module| found.remove_entry(&module)).collect())
}

/// Returns the layer of a module: by the table, by the equal name, or by the only name with the same end.
fn find_module<'t>(
    label: &str,
    targets: &'t [AdapterTarget],
    module: &str,
    modules: &[(String, String)],
) -> Result<&'t AdapterTarget> {
    if let Some((weight, _)) = modules.iter().find(|(_, known)| known == module) {
        return target_of(label, targets, weight);
    }
    let names: Vec<String> = targets.iter().map(module_of).collect();
    if let Some(at) = names.iter().position(|name| name == module) {
        return Ok(&targets[at]);
    }
    let ends_with =
        |longer: &str, shorter: &str| longer.strip_suffix(shorter).is_some_and(|rest| rest.ends_with('.'));
    let mut similar: Vec<&AdapterTarget> = targets
        .iter()
        .zip(&names)
        .filter(|(_, name)| ends_with(name, module) || ends_with(module, name))
        .map(|(target, _)| target)
        .collect();
    similar.dedup_by(|a, b| a.weight == b.weight);
    match similar[..] {
        [only] => Ok(only),
        _ => {
            let suggestion = hint(module, names.iter().map(String::as_str));
            Err(Error::Argument(format!(
                "the adapter has the module {module:?}, but {label} has no such layer{suggestion}; if an exporter \
                 renamed the weight, give a table of modules"
            )))
        }
    }
}

/// Returns both factors in the type of a layer, after a check of their sizes and numbers.
fn checked_factors(
    path: &Path,
    module: &str,
    target: &AdapterTarget,
    pair: [Option<Tensor>; 2],
) -> Result<[Tensor; 2]> {
    let fail = |reason: String| {
        Err(Error::Argument(format!("{}: the adapter of {module:?} {reason}", path.display())))
    };
    let [Some(a), Some(b)] = pair else { return fail("has only one of its two factors".into()) };
    let rank = a.dims().first().copied().unwrap_or(0);
    let shapes = target.factor_shapes(rank).map_err(adapter_error)?;
    if a.dims() != shapes.a || b.dims() != shapes.b {
        return fail(format!(
            "has factors of the shapes {:?} and {:?}, but the weight {:?} needs {:?} and {:?}: it belongs to another \
             base",
            a.dims(),
            b.dims(),
            target.weight,
            shapes.a,
            shapes.b
        ));
    }
    for tensor in [&a, &b] {
        if !tensor.dtype().is_float() || tensor.to_f64().iter().any(|number| !number.is_finite()) {
            return fail("has numbers that are not finite".into());
        }
    }
    Ok([a, b].map(|tensor| tensor.converted(target.dtype)))
}
