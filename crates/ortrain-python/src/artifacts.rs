//! Generation of training artifacts and of their parts.

use std::path::PathBuf;

use ortrain::artifact_parts;
use ortrain::artifacts::{
    AdamFormula, ArtifactOptions, BatchNormMode, FileOptions, Loss, LossSettings, LossTerm, NameGenerator,
    OptimizerChoice, OptimizerKind, OptimizerSettings, Reduction, generate,
};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{InvalidArgumentError, detached, raise};
use crate::model::{Source, encode_graph};
use crate::optim::{OwnOptimizer, spec_of};
use crate::records::{LossFragment, ModelDescription};
use crate::value::OrtValue;

/// A loss, as Python describes it.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Term {
    loss: String,
    reduction: String,
    weight: Option<Py<OrtValue>>,
    pos_weight: Option<Py<OrtValue>>,
    ignore_index: Option<i64>,
    class_axis: Option<i64>,
    label_smoothing: f32,
    sample_weight: Option<String>,
    stable: bool,
    soft: bool,
    scores: Option<String>,
    target: Option<String>,
    factor: f32,
    name: Option<String>,
}

impl Term {
    pub(crate) fn read(self) -> PyResult<LossTerm> {
        let loss = match self.loss.as_str() {
            "MSELoss" => Loss::MSELoss,
            "CrossEntropyLoss" => Loss::CrossEntropyLoss,
            "BCEWithLogitsLoss" => Loss::BCEWithLogitsLoss,
            "L1Loss" => Loss::L1Loss,
            other => return Err(unknown_name_error("loss", other)),
        };
        let tensor = |value: Option<Py<OrtValue>>| value.map(|value| value.get().tensor()).transpose();
        let settings = LossSettings {
            reduction: Reduction::from_name(&self.reduction)
                .ok_or_else(|| unknown_name_error("reduction", &self.reduction))?,
            weight: tensor(self.weight)?,
            pos_weight: tensor(self.pos_weight)?,
            ignore_index: self.ignore_index,
            class_axis: self.class_axis,
            label_smoothing: self.label_smoothing,
            sample_weight: self.sample_weight,
            stable: self.stable,
            soft: self.soft,
        };
        Ok(LossTerm {
            loss,
            settings,
            scores: self.scores,
            target: self.target,
            factor: self.factor,
            name: self.name,
        })
    }
}

/// Returns the nodes of a loss.
#[pyfunction]
pub(crate) fn loss_fragment(
    py: Python<'_>,
    model: Source,
    term: Term,
    target_is_there: bool,
    last: u64,
) -> PyResult<LossFragment> {
    let term = term.read()?;
    let fragment = detached(py, || artifact_parts::loss(model.0, &term, target_is_there, last))?;
    let model = encode_graph(py, fragment.graph)?.unbind();
    Ok(LossFragment { model, output: fragment.output, last: fragment.last })
}

/// Describes the inputs and outputs of a model, with the scores of each output.
#[pyfunction]
pub(crate) fn describe_model(py: Python<'_>, model: Source) -> PyResult<ModelDescription> {
    Ok(detached(py, || ortrain::artifacts::describe_model(model.0))?.into())
}

/// Returns the names of the float results of a model's nodes.
#[pyfunction]
pub(crate) fn result_names(py: Python<'_>, model: Source) -> PyResult<Vec<String>> {
    detached(py, || ortrain::artifacts::result_names(model.0))
}

/// Converts a model for inference, and writes it to a file.
#[pyfunction]
pub(crate) fn convert_model(
    py: Python<'_>,
    model: Source,
    path: PathBuf,
    opset: Option<i64>,
    float16: bool,
    external_data: bool,
) -> PyResult<()> {
    let above = if external_data { 0 } else { u64::MAX };
    detached(py, || {
        let conversion = ortrain::artifacts::Conversion { opset, float16 };
        Ok(ortrain::artifacts::convert_model(model.0, conversion)?.save_above(path, above)?)
    })
}

/// Returns a model with a new head, as a message.
#[pyfunction]
pub(crate) fn replace_head<'py>(
    py: Python<'py>,
    model: Source,
    classes: usize,
    output: Option<&str>,
    seed: u64,
) -> PyResult<Bound<'py, PyBytes>> {
    let encoded = detached(py, || {
        let model_proto = ortrain::artifacts::replace_head(model.0, classes, output, seed)?;
        Ok(ortrain::encode_model(&model_proto)?)
    });
    Ok(PyBytes::new(py, &encoded?))
}

/// Returns a model for batches of any size, as a message.
#[pyfunction]
pub(crate) fn open_batch<'py>(py: Python<'py>, model: Source) -> PyResult<Bound<'py, PyBytes>> {
    let encoded = detached(py, || Ok(ortrain::encode_model(&ortrain::artifacts::open_batch(model.0)?)?));
    Ok(PyBytes::new(py, &encoded?))
}

/// Returns a quantized model with float weights, as a message. Returns `None` for a model without quantized weights.
#[pyfunction]
pub(crate) fn with_float_weights<'py>(
    py: Python<'py>,
    model: Source,
) -> PyResult<Option<Bound<'py, PyBytes>>> {
    let encoded = detached(py, || {
        let model = ortrain::artifacts::with_float_weights(model.0)?;
        Ok(model.map(|model| ortrain::encode_model(&model)).transpose()?)
    });
    Ok(encoded?.map(|bytes| PyBytes::new(py, &bytes)))
}

/// Returns an optimizer model as a message, and the last number in a generated name.
#[pyfunction]
#[pyo3(signature = (optimizer, *, betas, epsilon, weight_decay, bias_correction, formula, opset, last))]
pub(crate) fn optimizer_model<'py>(
    py: Python<'py>,
    optimizer: &str,
    betas: (f32, f32),
    epsilon: f32,
    weight_decay: f32,
    bias_correction: bool,
    formula: &str,
    opset: i64,
    last: u64,
) -> PyResult<(Bound<'py, PyBytes>, u64)> {
    let formula = AdamFormula::from_name(formula).ok_or_else(|| unknown_name_error("formula", formula))?;
    let settings =
        OptimizerSettings { betas, epsilon, weight_decay, bias_correction, formula, max_norm: None };
    let mut names = NameGenerator::starting_after(last);
    let model = ortrain::artifacts::optimizer_model(optimizer_of(optimizer)?, &settings, &mut names, opset);
    Ok((
        PyBytes::new(py, &ortrain::encode_model(&model).map_err(|source| raise(source.into()))?),
        names.last(),
    ))
}

/// Returns the training model and the evaluation model, as messages, for a model with the loss as its first
/// output.
#[pyfunction]
#[pyo3(signature = (model, *, requires_grad, input_gradients, frozen_params, additional_output_names, batch_norm))]
pub(crate) fn training_models<'py>(
    py: Python<'py>,
    model: Source,
    requires_grad: Vec<String>,
    input_gradients: Vec<String>,
    frozen_params: Vec<String>,
    additional_output_names: Vec<String>,
    batch_norm: &str,
) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)> {
    let options = ArtifactOptions {
        requires_grad,
        input_gradients,
        frozen_params,
        additional_output_names,
        batch_norm: batch_norm_of(batch_norm)?,
        ..ArtifactOptions::default()
    };
    let generated = detached(py, || generate(model.0, options))?;
    let bytes = |model| {
        Ok::<_, PyErr>(PyBytes::new(
            py,
            &ortrain::encode_model(model).map_err(|source| raise(source.into()))?,
        ))
    };
    Ok((bytes(&generated.training_model)?, bytes(&generated.eval_model)?))
}

/// Writes a checkpoint of the initializers of two messages.
#[pyfunction]
pub(crate) fn save_checkpoint(
    py: Python<'_>,
    trainable: Source,
    frozen: Source,
    path: PathBuf,
    only_names: bool,
) -> PyResult<()> {
    py.detach(|| artifact_parts::save_checkpoint(trainable.0, frozen.0, path, only_names)).map_err(raise)
}

/// Returns the parameters of a checkpoint as initializers of a message.
#[pyfunction]
pub(crate) fn checkpoint_initializers(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyBytes>> {
    encode_graph(py, py.detach(|| artifact_parts::checkpoint_initializers(path)).map_err(raise)?)
}

pub(crate) fn batch_norm_of(name: &str) -> PyResult<BatchNormMode> {
    match name {
        "auto" => Ok(BatchNormMode::Auto),
        "train" => Ok(BatchNormMode::Train),
        "freeze" => Ok(BatchNormMode::Freeze),
        other => Err(unknown_name_error("batch_norm", other)),
    }
}

fn optimizer_of(name: &str) -> PyResult<OptimizerKind> {
    match name {
        "AdamW" => Ok(OptimizerKind::AdamW),
        "SGD" => Ok(OptimizerKind::SGD),
        other => Err(unknown_name_error("optimizer", other)),
    }
}

/// Settings of an optimizer, as a dictionary.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Settings {
    betas: (f32, f32),
    eps: f32,
    weight_decay: f32,
    bias_correction: bool,
    formula: String,
    max_norm: Option<f32>,
}

impl Settings {
    fn read(self) -> PyResult<OptimizerSettings> {
        let Settings { betas, eps: epsilon, weight_decay, bias_correction, formula, max_norm } = self;
        let formula =
            AdamFormula::from_name(&formula).ok_or_else(|| unknown_name_error("formula", &formula))?;
        Ok(OptimizerSettings { betas, epsilon, weight_decay, bias_correction, formula, max_norm })
    }
}

/// Generates and writes the artifacts of a training. Returns warnings about possible mistakes.
#[pyfunction]
#[pyo3(signature = (
    model, *, requires_grad, frozen_params, losses, optimizer, optimizer_model, directory, prefix,
    additional_output_names, nominal_checkpoint, loss_input_names, batch_norm, external_above, optimizer_settings,
    embed=false, data_folder=None, master_weights=false, optimizer_spec=None, own_optimizer=None
))]
pub(crate) fn generate_artifacts(
    py: Python<'_>,
    model: Source,
    requires_grad: Vec<String>,
    frozen_params: Vec<String>,
    losses: Vec<Term>,
    optimizer: Option<&str>,
    optimizer_model: Option<Source>,
    directory: PathBuf,
    prefix: &str,
    additional_output_names: Vec<String>,
    nominal_checkpoint: bool,
    loss_input_names: Vec<String>,
    batch_norm: &str,
    external_above: Option<u64>,
    optimizer_settings: Option<Settings>,
    embed: bool,
    data_folder: Option<PathBuf>,
    master_weights: bool,
    optimizer_spec: Option<&str>,
    own_optimizer: Option<OwnOptimizer>,
) -> PyResult<Vec<String>> {
    let losses = losses.into_iter().map(Term::read).collect::<PyResult<_>>()?;
    let spec = optimizer_spec.map(spec_of).transpose().map_err(raise)?;
    let optimizer = match (spec, own_optimizer, optimizer_model, optimizer) {
        (Some(spec), Some(own), ..) => Some(OptimizerChoice::Function(Box::new(own.0), Box::new(spec))),
        (Some(spec), None, ..) => Some(spec.into()),
        (None, _, Some(model), _) => Some(model.0.into()),
        (None, _, None, Some(kind)) => {
            let settings = optimizer_settings.map(Settings::read).transpose()?.unwrap_or_default();
            Some(OptimizerChoice::Kind(optimizer_of(kind)?, settings))
        }
        (None, _, None, None) => None,
    };
    let options = ArtifactOptions {
        requires_grad,
        frozen_params,
        losses,
        optimizer,
        additional_output_names,
        nominal_checkpoint,
        loss_input_names,
        batch_norm: batch_norm_of(batch_norm)?,
        master_weights,
        ..ArtifactOptions::default()
    };
    let defaults = FileOptions::default();
    let files = FileOptions {
        prefix: prefix.to_owned(),
        external_above: external_above.unwrap_or(defaults.external_above),
        embed,
        data_folder,
    };
    detached(py, || {
        let artifacts = generate(model.0, options)?;
        artifacts.write_with(directory, &files)?;
        Ok(artifacts.warnings)
    })
}

pub(crate) fn unknown_name_error(kind: &str, name: &str) -> PyErr {
    InvalidArgumentError::new_err(format!("there is no {kind} {name:?}"))
}
