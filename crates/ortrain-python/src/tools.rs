//! Running a model, preparing one for training, looking inside one.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use ortrain::artifacts::{ArtifactOptions, BatchNormMode, Loss, OptimizerKind, generate};
use ortrain::{Backend, Bytes, Error, ModelSource, SessionOptions, Stage, Tensor};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyTuple};

use crate::door::Door;
use crate::error::{InvalidArgumentError, raise};
use crate::value::{OrtValue, Results, described, given};

/// A path, or the bytes of a model.
pub(crate) struct Source(pub(crate) ModelSource);

impl<'py> FromPyObject<'_, 'py> for Source {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Source> {
        Ok(Source(if object.is_instance_of::<PyBytes>() {
            ModelSource::Bytes(Bytes::from_owner(object.extract::<PyBackedBytes>()?))
        } else {
            ModelSource::Path(object.extract::<PathBuf>()?)
        }))
    }
}

/// The backend that a user names: `cpu`, `cpu:0` or `reference`.
pub(crate) fn backend(device: &str, num_threads: usize) -> PyResult<Arc<dyn Backend>> {
    let name = if device == "cpu:0" { "cpu" } else { device };
    ortrain::backend(name, num_threads).map_err(raise)
}

/// A model that runs.
#[pyclass(frozen, module = "ortrain._ortrain")]
pub(crate) struct InferenceSession {
    session: Door<ortrain::InferenceSession>,
}

#[pymethods]
impl InferenceSession {
    #[new]
    #[pyo3(signature = (model, *, device, num_threads, memory_limit))]
    fn new(
        py: Python<'_>,
        model: Source,
        device: &str,
        num_threads: usize,
        memory_limit: Option<usize>,
    ) -> PyResult<InferenceSession> {
        let mut options = SessionOptions::default().backend(backend(device, num_threads)?);
        options.memory_limit = memory_limit;
        let session = py.detach(|| ortrain::InferenceSession::new(model.0, options)).map_err(raise)?;
        Ok(InferenceSession { session: Door::new(session) })
    }

    fn inputs<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let infos = self.session.pass(py, |session| Ok(session.inputs().to_vec()))?;
        infos.iter().map(|info| described(py, info)).collect()
    }

    fn outputs<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let infos = self.session.pass(py, |session| Ok(session.outputs().to_vec()))?;
        infos.iter().map(|info| described(py, info)).collect()
    }

    fn run(&self, py: Python<'_>, feeds: HashMap<String, Py<OrtValue>>) -> PyResult<Vec<OrtValue>> {
        let mut feeds: HashMap<String, Tensor> =
            feeds.into_iter().map(|(name, value)| (name, value.get().tensor.clone())).collect();
        self.session.pass(py, |session| {
            let names: Vec<&str> = session.inputs().iter().map(|info| info.name.as_str()).collect();
            let mut inputs = Vec::with_capacity(names.len());
            for &name in &names {
                let missing = || Error::Argument(format!("no value was given for input {name:?}"));
                inputs.push(feeds.remove(name).ok_or_else(missing)?);
            }
            if let Some(name) = feeds.keys().min() {
                let names = names.join(", ");
                return Err(Error::Argument(format!("the model has no input {name:?}; it has {names}")));
            }
            let mut results = Results::default();
            session
                .run(&given(&inputs), &mut |at, dtype, dims, value| results.take(at, dtype, dims, value))?;
            Ok(results.values())
        })
    }
}

/// Writes the files of a training.
#[pyfunction]
#[pyo3(signature = (
    model, *, requires_grad, frozen_params, loss, optimizer, directory, prefix, additional_output_names,
    nominal_checkpoint, loss_input_names, batch_norm
))]
pub(crate) fn generate_artifacts(
    py: Python<'_>,
    model: Source,
    requires_grad: Vec<String>,
    frozen_params: Vec<String>,
    loss: Option<&str>,
    optimizer: Option<&str>,
    directory: PathBuf,
    prefix: &str,
    additional_output_names: Vec<String>,
    nominal_checkpoint: bool,
    loss_input_names: Vec<String>,
    batch_norm: &str,
) -> PyResult<()> {
    let batch_norm = match batch_norm {
        "auto" => BatchNormMode::Auto,
        "train" => BatchNormMode::Train,
        "freeze" => BatchNormMode::Freeze,
        other => return Err(unknown("batch_norm", other)),
    };
    let loss = loss.map(|name| match name {
        "MSELoss" => Ok(Loss::MSELoss),
        "CrossEntropyLoss" => Ok(Loss::CrossEntropyLoss),
        "BCEWithLogitsLoss" => Ok(Loss::BCEWithLogitsLoss),
        "L1Loss" => Ok(Loss::L1Loss),
        other => Err(unknown("loss", other)),
    });
    let optimizer = optimizer.map(|name| match name {
        "AdamW" => Ok(OptimizerKind::AdamW),
        "SGD" => Ok(OptimizerKind::SGD),
        other => Err(unknown("optimizer", other)),
    });
    let options = ArtifactOptions {
        requires_grad,
        frozen_params,
        loss: loss.transpose()?,
        optimizer: optimizer.transpose()?,
        additional_output_names,
        nominal_checkpoint,
        loss_input_names,
        batch_norm,
        ..ArtifactOptions::default()
    };
    py.detach(|| generate(model.0, options)?.write(directory, prefix)).map_err(raise)
}

/// One stage of a model as text.
#[pyfunction]
pub(crate) fn dump(
    py: Python<'_>,
    model: Source,
    stage: &str,
    shapes: HashMap<String, Vec<usize>>,
) -> PyResult<String> {
    let stage = match stage {
        "graph" => Stage::Graph,
        "gradient" => Stage::Gradient,
        "program" => Stage::Program,
        other => return Err(unknown("stage", other)),
    };
    let shapes: Vec<(String, Vec<usize>)> = shapes.into_iter().collect();
    py.detach(|| ortrain::dump(model.0, stage, &shapes)).map_err(raise)
}

fn unknown(what: &str, name: &str) -> PyErr {
    InvalidArgumentError::new_err(format!("there is no {what} {name:?}"))
}
