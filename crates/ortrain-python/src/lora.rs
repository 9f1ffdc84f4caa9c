//! Low-rank adapters.

use std::path::PathBuf;

use ortrain::lora::{
    Base, Bias, Description, Init, LayerAdapter, LoraOptions, Targets, activate, active, adapters, add,
    add_by_reference, add_to_file, inspect, load_adapter, load_adapter_to_file, merge_with_errors, remove,
    save_adapter, unmerge, with_row_adapters,
};
use ortrain::{ModelSource, Result, encode_model};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::artifacts::unknown_name_error;
use crate::error::detached;
use crate::model::Source;

/// Adapter of one layer.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct AdaptedLayer {
    adapter: String,
    weight: String,
    node: String,
    kind: &'static str,
    inputs: usize,
    outputs: usize,
    rank: usize,
    parameters: usize,
    bytes: usize,
}

fn records(description: Description) -> Vec<AdaptedLayer> {
    let record = |layer: LayerAdapter| AdaptedLayer {
        adapter: layer.adapter,
        weight: layer.weight,
        node: layer.node,
        kind: layer.kind,
        inputs: layer.inputs,
        outputs: layer.outputs,
        rank: layer.rank,
        parameters: layer.parameters,
        bytes: layer.bytes,
    };
    description.layers.into_iter().map(record).collect()
}

/// Options of a new adapter, as Python describes them.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct AdapterOptions {
    rank: usize,
    alpha: Option<f64>,
    targets: Option<Vec<String>>,
    exclude: Vec<String>,
    dropout: f64,
    init: String,
    use_rslora: bool,
    use_dora: bool,
    bias: String,
    train_also: Vec<String>,
    base: String,
    name: String,
    seed: u64,
}

impl AdapterOptions {
    fn read(self) -> PyResult<LoraOptions> {
        let AdapterOptions {
            rank,
            alpha,
            targets,
            exclude,
            dropout,
            init,
            use_rslora,
            use_dora,
            bias,
            train_also,
            base,
            name,
            seed,
        } = self;
        Ok(LoraOptions {
            rank,
            alpha,
            targets: targets.map_or(Targets::Auto, Targets::Patterns),
            exclude,
            dropout,
            init: Init::from_name(&init).ok_or_else(|| unknown_name_error("init", &init))?,
            use_rslora,
            use_dora,
            bias: Bias::from_name(&bias).ok_or_else(|| unknown_name_error("bias", &bias))?,
            train_also,
            base: Base::from_name(&base).ok_or_else(|| unknown_name_error("base", &base))?,
            name,
            seed,
        })
    }
}

/// Adds an adapter to a model. Returns the model as a message, and the adapted layers.
#[pyfunction]
pub(crate) fn add_adapter<'py>(
    py: Python<'py>,
    model: Source,
    options: AdapterOptions,
) -> PyResult<(Bound<'py, PyBytes>, Vec<AdaptedLayer>)> {
    let options = options.read()?;
    let (encoded, description) = detached(py, || {
        let (model, description) = add(model.0, &options)?;
        Ok((encode_model(&model)?, description))
    })?;
    Ok((PyBytes::new(py, &encoded), records(description)))
}

/// Adds an adapter to a model, and writes it to a file. Returns the adapted layers.
#[pyfunction]
pub(crate) fn add_adapter_to_file(
    py: Python<'_>,
    model: Source,
    options: AdapterOptions,
    output: PathBuf,
    embed: bool,
) -> PyResult<Vec<AdaptedLayer>> {
    let options = options.read()?;
    Ok(records(detached(py, || add_to_file(model.0, &options, output, embed))?))
}

/// Adds an adapter to a model. Returns a message that refers to the files of the base, and their folder; `None` instead
/// of the folder for a model without files.
#[pyfunction]
pub(crate) fn add_adapter_by_reference<'py>(
    py: Python<'py>,
    model: Source,
    options: AdapterOptions,
) -> PyResult<InFolder<'py>> {
    let options = options.read()?;
    let model = detached(py, || Ok(add_by_reference(model.0, &options)?.0))?;
    Ok(message_and_folder(py, model))
}

/// Returns a model with adapters as a message that refers to the files of the base, and their folder; `None` for a model
/// without adapters.
#[pyfunction]
pub(crate) fn base_by_reference<'py>(py: Python<'py>, model: Source) -> PyResult<Option<InFolder<'py>>> {
    let model = detached(py, || ortrain::lora::base_by_reference(model.0))?;
    Ok(model.map(|model| message_and_folder(py, model)))
}

type InFolder<'py> = (Bound<'py, PyBytes>, Option<PathBuf>);

fn message_and_folder(py: Python<'_>, model: ModelSource) -> InFolder<'_> {
    match model {
        ModelSource::BytesIn(bytes, folder) => (PyBytes::new(py, &bytes), Some(folder)),
        ModelSource::Bytes(bytes) => (PyBytes::new(py, &bytes), None),
        other => unreachable!("the core returns bytes, got {other:?}"),
    }
}

/// Returns the layers that would get an adapter.
#[pyfunction]
pub(crate) fn adapter_targets(
    py: Python<'_>,
    model: Source,
    options: AdapterOptions,
) -> PyResult<Vec<AdaptedLayer>> {
    let options = options.read()?;
    Ok(records(detached(py, || inspect(model.0, &options))?))
}

/// Returns the adapters of a model.
#[pyfunction]
pub(crate) fn present_adapters(py: Python<'_>, model: Source) -> PyResult<Vec<AdaptedLayer>> {
    Ok(records(detached(py, || adapters(model.0))?))
}

/// Returns a model without an adapter, as a message.
#[pyfunction]
pub(crate) fn remove_adapter<'py>(
    py: Python<'py>,
    model: Source,
    name: &str,
) -> PyResult<Bound<'py, PyBytes>> {
    message(py, || Ok(encode_model(&remove(model.0, name)?)?))
}

/// Name, largest error and root-mean-square error of a merged weight.
type MergeErrors = (String, f64, f64);

/// Returns a model with merged adapters, as a message, and the name, the largest error and the root-mean-square error of
/// each weight.
#[pyfunction]
pub(crate) fn merge_adapters(
    py: Python<'_>,
    model: Source,
    factors: Vec<(String, f64)>,
) -> PyResult<(Bound<'_, PyBytes>, Vec<MergeErrors>)> {
    let (encoded, errors) = detached(py, || {
        let (model, errors) = merge_with_errors(model.0, &factors)?;
        Ok((encode_model(&model)?, errors))
    })?;
    let errors =
        errors.into_iter().map(|error| (error.weight, error.largest_error, error.rms_error)).collect();
    Ok((PyBytes::new(py, &encoded), errors))
}

/// Returns a model before the merge of adapters, as a message.
#[pyfunction]
pub(crate) fn unmerge_adapters(
    py: Python<'_>,
    merged: Source,
    adapted: Source,
    factors: Vec<(String, f64)>,
) -> PyResult<Bound<'_, PyBytes>> {
    message(py, || Ok(encode_model(&unmerge(merged.0, adapted.0, &factors)?)?))
}

/// Sets the weights of the adapters of a model. Returns the model as a message.
#[pyfunction]
pub(crate) fn activate_adapters(
    py: Python<'_>,
    model: Source,
    weights: Vec<(String, f64)>,
) -> PyResult<Bound<'_, PyBytes>> {
    message(py, || Ok(encode_model(&activate(model.0, &weights)?)?))
}

/// Returns the adapters of a model with their weights.
#[pyfunction]
pub(crate) fn active_adapters(py: Python<'_>, model: Source) -> PyResult<Vec<(String, f64)>> {
    detached(py, || active(model.0))
}

/// Returns a model with weights of adapters for each row as an input, as a message.
#[pyfunction]
pub(crate) fn row_adapters(
    py: Python<'_>,
    model: Source,
    adapters: Vec<String>,
) -> PyResult<Bound<'_, PyBytes>> {
    message(py, || Ok(encode_model(&with_row_adapters(model.0, &adapters)?)?))
}

/// Saves an adapter in PEFT's files.
#[pyfunction]
pub(crate) fn save_peft(
    py: Python<'_>,
    model: Source,
    folder: PathBuf,
    name: &str,
    modules: Vec<(String, String)>,
) -> PyResult<()> {
    detached(py, || save_adapter(model.0, folder, name, &modules))
}

/// Adds an adapter from PEFT's files to a model, and returns the model as a message.
#[pyfunction]
pub(crate) fn load_peft<'py>(
    py: Python<'py>,
    model: Source,
    folder: PathBuf,
    name: &str,
    modules: Vec<(String, String)>,
    check_base: bool,
) -> PyResult<Bound<'py, PyBytes>> {
    message(py, || Ok(encode_model(&load_adapter(model.0, folder, name, &modules, check_base)?)?))
}

/// Adds an adapter from PEFT's files to a model, and writes it to a file.
#[pyfunction]
pub(crate) fn load_peft_to_file(
    py: Python<'_>,
    model: Source,
    folder: PathBuf,
    name: &str,
    modules: Vec<(String, String)>,
    check_base: bool,
    output: PathBuf,
    embed: bool,
) -> PyResult<()> {
    detached(py, || load_adapter_to_file(model.0, folder, name, &modules, check_base, output, embed))
}

fn message(py: Python<'_>, encode: impl FnOnce() -> Result<Vec<u8>> + Send) -> PyResult<Bound<'_, PyBytes>> {
    Ok(PyBytes::new(py, &detached(py, encode)?))
}
