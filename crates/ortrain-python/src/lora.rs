//! Low-rank adapters.

use std::path::PathBuf;

use ortrain::lora::{
    Bias, Description, Init, LayerAdapter, LoraOptions, Targets, activate, active, adapters, add, inspect,
    load_adapter, merge, remove, save_adapter, with_row_adapters,
};
use ortrain::{Result, encode_model};
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

/// Returns a model with merged adapters, as a message.
#[pyfunction]
pub(crate) fn merge_adapters(
    py: Python<'_>,
    model: Source,
    factors: Vec<(String, f64)>,
) -> PyResult<Bound<'_, PyBytes>> {
    message(py, || Ok(encode_model(&merge(model.0, &factors)?)?))
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
) -> PyResult<Bound<'py, PyBytes>> {
    message(py, || Ok(encode_model(&load_adapter(model.0, folder, name, &modules)?)?))
}

fn message(py: Python<'_>, encode: impl FnOnce() -> Result<Vec<u8>> + Send) -> PyResult<Bound<'_, PyBytes>> {
    Ok(PyBytes::new(py, &detached(py, encode)?))
}
