//! Adapters in PEFT's files: `adapter_model.safetensors` and `adapter_config.json`.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use ortrain_checkpoint::{NamedTensor, load_safetensors, load_safetensors_metadata, save_safetensors_with};
use ortrain_files::Staged;
use ortrain_graph::Tensor;
use ortrain_onnx::ModelProto;
use ortrain_ops::training::{
    AdaptedLayer, AdapterForm, AdapterTarget, FactorKind, FactorName, LayerKind, adapted_layers, add_adapter,
    factor_name, is_adapter_name, scale_name,
};
use rustc_hash::FxHashMap;
use serde_json::{Map, Value, json};

use super::activate::original_scale;
use super::merge::first_layers;
use super::notes::{Note, has_rest, note, set_init};
use super::selection::module_of;
use super::{
    Bias, Init, LoraOptions, Prepared, adapter_error, biases, no_adapter_error, principal, target_of,
    target_of_layer,
};
use crate::model::base_hash::{BASE_KEY, base_hash};
use crate::model::graph::opset_of;
use crate::suggest::hint;
use crate::{Error, ModelSource, Result};

const WEIGHTS_FILE: &str = "adapter_model.safetensors";
const PICKLE_FILE: &str = "adapter_model.bin";
const CONFIG_FILE: &str = "adapter_config.json";
/// Begin of the names of all tensors.
const MODULE_PREFIX: &str = "base_model.model.";
/// End of the name of the magnitudes of a module (DoRA).
const MAGNITUDE_SUFFIX: &str = ".lora_magnitude_vector";

fn suffixes(kind: LayerKind) -> [&'static str; 2] {
    match kind {
        LayerKind::Embedding => [".lora_embedding_A", ".lora_embedding_B"],
        _ => [".lora_A.weight", ".lora_B.weight"],
    }
}

/// Saves the adapter `name` of a model in a folder, in PEFT's files `adapter_model.safetensors` and
/// `adapter_config.json`. The folder is created. `modules` has pairs of a weight and the module of PyTorch, for weights
/// with other names than their modules.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::ModelSource;
/// use ortrain::lora::{LoraOptions, add, save_adapter};
///
/// let folder = tempfile::tempdir()?;
/// let (model, _) = add(setup::MODEL.into(), &LoraOptions::default())?;
/// save_adapter(ModelSource::from_proto(&model)?, folder.path(), "default", &[])?;
/// assert!(folder.path().join("adapter_config.json").exists());
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
    let targets = prepared.targets()?;
    check_table(&prepared.label, &targets, modules)?;
    let adapted = adapted_layers(prepared.graph()?);
    let layers: Vec<AdaptedLayer> = adapted.iter().filter(|layer| layer.adapter == name).cloned().collect();
    if layers.is_empty() {
        return Err(no_adapter_error(&prepared.label, name, &adapted));
    }
    let mut tensors = Vec::new();
    let mut saved: Vec<SavedModule> = Vec::new();
    let mut use_dora = false;
    for layer in first_layers(&layers) {
        let weight = &layer.weight;
        let target = target_of_layer(&prepared.label, &targets, layer)?;
        let module = modules
            .iter()
            .find(|(known, _)| known == weight)
            .map_or_else(|| module_of(target), |(_, module)| module.clone());
        let factors = prepared.factors(weight, name)?;
        let rank = target.rank_of(&factors[0]);
        for (tensor, suffix) in factors.into_iter().zip(suffixes(target.kind)) {
            tensors.push(NamedTensor { name: format!("{MODULE_PREFIX}{module}{suffix}"), tensor });
        }
        if let Some(magnitude) = prepared.magnitude(weight, name) {
            let name = format!("{MODULE_PREFIX}{module}{MAGNITUDE_SUFFIX}");
            tensors.push(NamedTensor { name, tensor: with_dims(&magnitude, magnitude_dims(target)) });
            use_dora = true;
        }
        let alpha = rounded(original_scale(&prepared, weight, name)? * rank as f64);
        saved.push(SavedModule { name: module, rank, alpha });
    }
    let (bias, names) = biases::selected(&prepared.model.proto, name);
    for NamedTensor { name, tensor } in biases::to_peft(&prepared.typed, &targets, &layers, &names, modules)?
    {
        tensors.push(NamedTensor { name: format!("{MODULE_PREFIX}{name}"), tensor });
    }
    let init = note(&prepared.model.proto, Note::Init, name);
    let method = Method { use_dora, init, bias };
    let config = serde_json::to_vec_pretty(&config_of(&saved, &method))
        .map_err(|error| Error::Argument(format!("{CONFIG_FILE} cannot be written: {error}")))?;
    fs::create_dir_all(folder).map_err(|source| file_error("create", folder, source))?;
    let base = base_hash(&prepared.typed, layers.iter().map(|layer| layer.weight.as_str()));
    // A single entry: the order of several would change from file to file.
    let metadata = [(BASE_KEY.to_owned(), base)].into();
    save_safetensors_with(&tensors, metadata, folder.join(WEIGHTS_FILE))?;
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

/// Returns PEFT's sizes of the magnitudes of a layer.
fn magnitude_dims(target: &AdapterTarget) -> Vec<usize> {
    match target.kind {
        LayerKind::Convolution => {
            let ones = target.window.iter().map(|_| 1);
            [1, target.outputs].into_iter().chain(ones).collect()
        }
        _ => vec![target.outputs],
    }
}

/// Returns the same elements with other sizes.
fn with_dims(tensor: &Tensor, dims: Vec<usize>) -> Tensor {
    Tensor::from_f64(tensor.dtype(), dims, &tensor.to_f64())
}

/// Module of a saved adapter, with its rank and the numerator of its scale.
struct SavedModule {
    name: String,
    rank: usize,
    alpha: f64,
}

/// Form of a saved adapter.
struct Method<'m> {
    use_dora: bool,
    /// Method of the initial values, if it changed the base.
    init: Option<&'m str>,
    bias: Bias,
}

/// Returns the nearest integer to a numerator that differs from it by the rounding of the scale to float32 only.
fn rounded(alpha: f64) -> f64 {
    let nearest = alpha.round();
    if (alpha - nearest).abs() <= f64::from(f32::EPSILON) * nearest.abs() { nearest } else { alpha }
}

/// Returns PEFT's description of an adapter with these modules.
fn config_of(modules: &[SavedModule], method: &Method<'_>) -> Value {
    let (rank, alpha) = modules.first().map_or((0, 0.0), |module| (module.rank, module.alpha));
    let number = |alpha: f64| if alpha.fract() == 0.0 { json!(alpha as i64) } else { json!(alpha) };
    let names: Vec<&str> = modules.iter().map(|module| module.name.as_str()).collect();
    let other_ranks: Map<String, Value> = modules
        .iter()
        .filter(|module| module.rank != rank)
        .map(|module| (module.name.clone(), json!(module.rank)))
        .collect();
    let other_alphas: Map<String, Value> = modules
        .iter()
        .filter(|module| module.alpha != alpha)
        .map(|module| (module.name.clone(), number(module.alpha)))
        .collect();
    json!({
        "alpha_pattern": other_alphas,
        "auto_mapping": null,
        "base_model_name_or_path": null,
        "bias": method.bias.name(),
        "fan_in_fan_out": false,
        "inference_mode": true,
        "init_lora_weights": method.init.map_or(json!(true), |init| json!(init)),
        "lora_alpha": number(alpha),
        "lora_dropout": 0.0,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": rank,
        "rank_pattern": other_ranks,
        "target_modules": names,
        "task_type": null,
        "use_dora": method.use_dora,
        "use_rslora": false,
    })
}

/// Fields of the description without an effect on the results of an adapter with known factors.
const FIELDS_WITHOUT_EFFECT: [&str; 26] = [
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "lora_dropout",
    "lora_ga_config",
    "loftq_config",
    "megatron_config",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
    "init_lora_weights",
    "bias",
];

/// Initial values for which PEFT changes the weights of the base, and which other machines cannot repeat.
const UNKNOWN_CHANGES_OF_THE_BASE: [&str; 4] = ["pissa_niter", "corda", "loftq", "lora_ga"];

/// Description of an adapter in a folder.
struct Config {
    alpha: f64,
    use_rslora: bool,
    use_dora: bool,
    alpha_pattern: Vec<(String, f64)>,
    /// Method of the initial values, if it changes the base.
    init: Option<Init>,
    bias: Bias,
}

impl Config {
    fn read(path: &Path) -> Result<Config> {
        let text = fs::read(path).map_err(|source| file_error("read", path, source))?;
        let fail = |reason: String| Error::Argument(format!("{}: {reason}", path.display()));
        let value: Value =
            serde_json::from_slice(&text).map_err(|error| fail(format!("it is no JSON: {error}")))?;
        let Value::Object(fields) = value else { return Err(fail("it is no JSON object".into())) };
        let kind = fields.get("peft_type").unwrap_or(&Value::Null);
        if kind != "LORA" {
            return Err(fail(format!("the adapter has the type {kind}, and only \"LORA\" can be loaded")));
        }
        check_effects(&fields).map_err(&fail)?;
        let alpha = fields.get("lora_alpha").and_then(Value::as_f64);
        let alpha = alpha.ok_or_else(|| fail("lora_alpha must be a number".into()))?;
        let flag = |field: &str| match fields.get(field) {
            None | Some(Value::Null) => Ok(false),
            Some(Value::Bool(value)) => Ok(*value),
            Some(other) => Err(fail(format!("{field} must be true or false, got {other}"))),
        };
        let (use_rslora, use_dora) = (flag("use_rslora")?, flag("use_dora")?);
        let mut alpha_pattern = Vec::new();
        for (name, value) in fields.get("alpha_pattern").and_then(Value::as_object).into_iter().flatten() {
            let is_plain = |sign: char| sign.is_alphanumeric() || matches!(sign, '.' | '_' | '-');
            let alpha = value.as_f64().filter(|_| name.chars().all(is_plain));
            let alpha = alpha.ok_or_else(|| {
                fail(format!(
                    "alpha_pattern must have numbers by the names of modules, got {name:?}: {value}"
                ))
            })?;
            alpha_pattern.push((name.clone(), alpha));
        }
        let init = fields.get("init_lora_weights").and_then(Value::as_str);
        let init =
            init.and_then(|name| Init::from_name(&name.to_lowercase())).filter(|init| init.changes_base());
        let bias = fields.get("bias").and_then(Value::as_str).and_then(Bias::from_name).unwrap_or_default();
        Ok(Config { alpha, use_rslora, use_dora, alpha_pattern, init, bias })
    }

    /// Returns the scale of a module with factors of a rank.
    fn scale(&self, module: &str, rank: usize) -> f64 {
        let fits =
            |name: &str| module.strip_suffix(name).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'));
        let alpha =
            self.alpha_pattern.iter().find(|(name, _)| fits(name)).map_or(self.alpha, |(_, alpha)| *alpha);
        let rank = rank as f64;
        alpha / if self.use_rslora { rank.sqrt() } else { rank }
    }
}

/// Checks that each field of a description has an effect that is known and supported. Empty fields have none.
fn check_effects(fields: &Map<String, Value>) -> std::result::Result<(), String> {
    for (field, value) in fields {
        let is_empty = match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(list) => list.is_empty(),
            Value::Object(entries) => entries.is_empty(),
            _ => false,
        };
        let is_supported = match (field.as_str(), value) {
            _ if is_empty => true,
            ("lora_alpha" | "use_rslora" | "use_dora" | "alpha_pattern", _) => true,
            ("bias", Value::String(bias)) => Bias::from_name(bias).is_some(),
            ("init_lora_weights", Value::String(init)) => {
                !UNKNOWN_CHANGES_OF_THE_BASE.iter().any(|name| init.to_lowercase().starts_with(name))
            }
            (name, _) => FIELDS_WITHOUT_EFFECT.contains(&name),
        };
        if !is_supported {
            return Err(match field.as_str() {
                "init_lora_weights" => format!(
                    "the weights of the base were changed for {field} = {value}; save the adapter with \
                     path_initial_model_for_weight_conversion, so that it fits the original base"
                ),
                _ => format!("{field} = {value} is not supported; supported are LoRA, rsLoRA and DoRA"),
            });
        }
    }
    Ok(())
}

/// Checks that each weight of a table of modules is one of a layer.
fn check_table(label: &str, targets: &[AdapterTarget], modules: &[(String, String)]) -> Result<()> {
    modules.iter().try_for_each(|(weight, _)| target_of(label, targets, weight).map(drop))
}

/// Adds an adapter in PEFT's files to a model, under a name. `modules` has the pairs of [`save_adapter`]. A file of
/// [`save_adapter`] has the hash of the adapted weights, and `check_base` compares it with the weights of the model. An
/// adapter of [`Init::Pissa`] or [`Init::Olora`] fits the rest of the weights: a model with the original weights gets the
/// rest, as PEFT does it, and the hash is not compared.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::ModelSource;
/// use ortrain::lora::{LoraOptions, add, load_adapter, save_adapter};
///
/// let folder = tempfile::tempdir()?;
/// let (model, _) = add(setup::MODEL.into(), &LoraOptions::default())?;
/// save_adapter(ModelSource::from_proto(&model)?, folder.path(), "default", &[])?;
/// assert_eq!(load_adapter(setup::MODEL.into(), folder.path(), "default", &[], true)?, model);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the folder has no such files, or files that are damaged, or an adapter that is not LoRA. If a module is no layer
/// of the model, or its factors have other sizes. If a factor has numbers that are not finite. If the adapter was
/// trained on other weights.
pub fn load_adapter(
    model: ModelSource,
    folder: impl AsRef<Path>,
    name: &str,
    modules: &[(String, String)],
    check_base: bool,
) -> Result<ModelProto> {
    let mut prepared = Prepared::new(model)?;
    load_into(&mut prepared, folder.as_ref(), name, modules, check_base)?;
    Ok(prepared.model.proto)
}

/// Adds an adapter in PEFT's files to a prepared model.
pub(super) fn load_into(
    prepared: &mut Prepared,
    folder: &Path,
    name: &str,
    modules: &[(String, String)],
    check_base: bool,
) -> Result<()> {
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
    let mut tensors = load_safetensors(&path)?;
    let config = Config::read(&folder.join(CONFIG_FILE))?;
    let biases = take_biases(&mut tensors, config.bias);
    let targets = prepared.targets()?;
    check_table(&prepared.label, &targets, modules)?;
    let mut constants = Vec::new();
    let mut rests: FxHashMap<String, Tensor> = FxHashMap::default();
    let init = config.init.filter(|init| !has_rest(&prepared.model.proto, *init));
    let opset = opset_of(&prepared.model.proto);
    for factors in factors_by_module(&path, tensors, config.use_dora)? {
        let of_kind: Vec<&AdapterTarget> = targets
            .iter()
            .filter(|target| (target.kind == LayerKind::Embedding) == factors.is_embedding)
            .collect();
        let target = find_module(&prepared.label, &of_kind, &factors.module, modules)?;
        let CheckedFactors { a, b, magnitude } = checked_factors(&path, &factors, target)?;
        let rank = target.rank_of(&a);
        let form = AdapterForm {
            adapter: name.to_owned(),
            dropout: None,
            rank,
            has_magnitude: magnitude.is_some(),
            opset,
        };
        let graph = prepared.graph()?;
        for reader in targets.iter().filter(|other| other.has_form_of(target)) {
            add_adapter(graph, reader, &form).map_err(adapter_error)?;
        }
        let scale = config.scale(&factors.module, rank);
        if let Some(init) = init.filter(|&init| principal::takes_weight(target, init)) {
            let options =
                LoraOptions { rank, alpha: Some(scale * rank as f64), init, ..LoraOptions::default() };
            rests.insert(
                target.weight.clone(),
                principal::rest(&prepared.label, &prepared.typed, &targets, target, &options)?,
            );
        }
        let scale = Tensor::scalar(target.dtype, scale);
        if let Some(magnitude) = magnitude {
            constants.push((factor_name(&target.weight, FactorKind::Magnitude, name), magnitude));
        }
        constants.push((factor_name(&target.weight, FactorKind::A, name), a));
        constants.push((factor_name(&target.weight, FactorKind::B, name), b));
        constants.push((scale_name(&target.weight, name), scale));
    }
    if check_base && config.init.is_none() {
        let weights =
            constants.iter().filter_map(|(name, _)| FactorName::split(name)).map(|name| name.weight);
        check_hash(&prepared.label, &path, &base_hash(&prepared.typed, weights))?;
    }
    prepared.add_constants(constants)?;
    prepared.set_constants(rests)?;
    if config.bias != Bias::None {
        let all: Vec<&AdapterTarget> = targets.iter().collect();
        let Prepared { label, model, typed, .. } = &mut *prepared;
        let find = |module: &str| find_module(label, &all, module, modules).cloned();
        let values = biases::load(label, &mut model.proto, typed, (name, config.bias), biases, find)?;
        prepared.set_constants(values)?;
    }
    if let Some(init) = config.init {
        set_init(&mut prepared.model.proto, name, init);
    }
    Ok(())
}

/// Returns an error if a file names another base than the hash.
fn check_hash(label: &str, path: &Path, hash: &str) -> Result<()> {
    match load_safetensors_metadata(path)?.get(BASE_KEY) {
        Some(of_file) if of_file != hash => Err(Error::Argument(format!(
            "{}: the adapter was trained on weights with the hash {of_file}, and the weights of {label} have the hash \
             {hash}; give its own base, or switch off check_base if both are forms of one base",
            path.display()
        ))),
        _ => Ok(()),
    }
}

/// Takes the biases out of the tensors of a file: pairs of a module and a bias.
fn take_biases(tensors: &mut Vec<NamedTensor>, bias: Bias) -> Vec<(String, Tensor)> {
    let mut biases = Vec::new();
    if bias != Bias::None {
        tensors.retain(|NamedTensor { name, tensor }| {
            let module = biases::module_of_bias(name.strip_prefix(MODULE_PREFIX).unwrap_or(name));
            biases.extend(module.map(|module| (module.to_owned(), tensor.clone())));
            module.is_none()
        });
    }
    biases
}

/// Factors of a module, as far as a file has them.
struct ModuleFactors {
    module: String,
    is_embedding: bool,
    pair: [Option<Tensor>; 2],
    magnitude: Option<Tensor>,
}

/// Returns the factors of the modules, in the order of their names.
fn factors_by_module(path: &Path, tensors: Vec<NamedTensor>, use_dora: bool) -> Result<Vec<ModuleFactors>> {
    let fail = |reason: String| Err(Error::Argument(format!("{}: {reason}", path.display())));
    let mut found: BTreeMap<(String, bool), [Option<Tensor>; 2]> = BTreeMap::new();
    let mut magnitudes: BTreeMap<String, Tensor> = BTreeMap::new();
    for NamedTensor { name, tensor } in tensors {
        let inner = name.strip_prefix(MODULE_PREFIX).unwrap_or(&name);
        if let Some(module) = inner.strip_suffix(MAGNITUDE_SUFFIX).filter(|_| use_dora) {
            magnitudes.insert(module.to_owned(), tensor);
            continue;
        }
        let part = [LayerKind::Linear, LayerKind::Embedding].into_iter().find_map(|kind| {
            let at = suffixes(kind).iter().position(|suffix| inner.ends_with(suffix))?;
            let module = inner.strip_suffix(suffixes(kind)[at])?.to_owned();
            Some(((module, kind == LayerKind::Embedding), at))
        });
        let Some((key, at)) = part else {
            return fail(format!(
                "{name:?} is no factor of an adapter; its name must end with \".lora_A.weight\", or with another \
                 factor of LoRA"
            ));
        };
        found.entry(key).or_default()[at] = Some(tensor);
    }
    if found.is_empty() {
        return fail("it has no factors of adapters".into());
    }
    let mut modules = Vec::new();
    for ((module, is_embedding), pair) in found {
        let magnitude = magnitudes.remove(&module);
        if use_dora && magnitude.is_none() {
            return fail(format!("the adapter of {module:?} has no magnitudes, though use_dora is true"));
        }
        modules.push(ModuleFactors { module, is_embedding, pair, magnitude });
    }
    match magnitudes.keys().next() {
        Some(module) => fail(format!("the adapter of {module:?} has magnitudes, but no factors")),
        None => Ok(modules),
    }
}

/// Returns the layer of a module: by the table, by the equal name, or by the only name with the same end.
fn find_module<'t>(
    label: &str,
    targets: &[&'t AdapterTarget],
    module: &str,
    modules: &[(String, String)],
) -> Result<&'t AdapterTarget> {
    let names: Vec<String> = targets.iter().map(|target| module_of(target)).collect();
    let ends_with =
        |longer: &str, shorter: &str| longer.strip_suffix(shorter).is_some_and(|rest| rest.ends_with('.'));
    let by_table = modules.iter().find(|(_, known)| known == module).map(|(weight, _)| weight);
    let mut similar: Vec<&AdapterTarget> = match by_table {
        Some(weight) => targets.iter().copied().filter(|target| target.weight == *weight).collect(),
        None => targets
            .iter()
            .zip(&names)
            .filter(|(_, name)| *name == module)
            .map(|(target, _)| *target)
            .collect(),
    };
    if similar.is_empty() {
        let is_similar = |name: &String| ends_with(name, module) || ends_with(module, name);
        similar = targets
            .iter()
            .zip(&names)
            .filter(|(_, name)| is_similar(name))
            .map(|(target, _)| *target)
            .collect();
    }
    similar.dedup_by(|a, b| a.weight == b.weight);
    match similar[..] {
        [only] => Ok(only),
        _ => {
            let suggestion = hint(module, names.iter().map(String::as_str));
            Err(Error::Argument(format!(
                "the adapter has the module {module:?}, but {label} has no such layer{suggestion}; if an exporter \
                 renamed the weight, give its module in modules"
            )))
        }
    }
}

/// Factors of a layer, in its element type.
struct CheckedFactors {
    a: Tensor,
    b: Tensor,
    magnitude: Option<Tensor>,
}

/// Returns the factors in the type of a layer, after a check of their sizes and numbers.
fn checked_factors(path: &Path, factors: &ModuleFactors, target: &AdapterTarget) -> Result<CheckedFactors> {
    let fail = |reason: String| {
        Err(Error::Argument(format!("{}: the adapter of {:?} {reason}", path.display(), factors.module)))
    };
    let [Some(a), Some(b)] = &factors.pair else { return fail("has only one of its two factors".into()) };
    let rank = target.rank_of(a);
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
    let magnitude = factors.magnitude.as_ref();
    if let Some(magnitude) = magnitude.filter(|magnitude| magnitude.dims() != magnitude_dims(target)) {
        return fail(format!(
            "has magnitudes of the shape {:?}, but the weight {:?} needs {:?}: it belongs to another base",
            magnitude.dims(),
            target.weight,
            magnitude_dims(target)
        ));
    }
    for tensor in [Some(a), Some(b), magnitude].into_iter().flatten() {
        if !tensor.dtype().is_float() || tensor.to_f64().iter().any(|number| !number.is_finite()) {
            return fail("has numbers that are not finite".into());
        }
    }
    let lengths = magnitude.map(|tensor| with_dims(&tensor.converted(target.dtype), vec![target.outputs]));
    Ok(CheckedFactors { a: a.converted(target.dtype), b: b.converted(target.dtype), magnitude: lengths })
}
