//! The session that runs a model.

use std::collections::HashMap;
use std::path::PathBuf;

use ortrain::{InputView, OutputTarget, SessionOptions, Value};
use pyo3::prelude::*;

use crate::error::raise;
use crate::gil::Exclusive;
use crate::inputs::{Argument, Requested, Returned, SessionInput, named_views};
use crate::model::Source;
use crate::records::{ModelMetadata, Precision, ValueDescription, describe_values};
use crate::run_options::{RunOptions, backend};
use crate::value::{OrtValue, Results};

/// A session that runs a model.
#[pyclass(frozen, module = "ortrain._ortrain")]
pub(crate) struct InferenceSession {
    session: Exclusive<ortrain::InferenceSession>,
}

impl InferenceSession {
    /// Runs `work` on the session, under its lock.
    pub(crate) fn with<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut ortrain::InferenceSession) -> ortrain::Result<R> + Send,
    ) -> PyResult<R> {
        self.session.enter(py, work)
    }
}

#[pymethods]
impl InferenceSession {
    #[new]
    #[pyo3(signature = (model, *, options, optimized_model=None))]
    fn new(
        py: Python<'_>,
        model: Source,
        options: &RunOptions,
        optimized_model: Option<PathBuf>,
    ) -> PyResult<InferenceSession> {
        let mut options = SessionOptions::from(options.run.clone());
        options.optimized_model = optimized_model;
        let session = py.detach(|| ortrain::InferenceSession::new(model.0, options)).map_err(raise)?;
        Ok(InferenceSession { session: Exclusive::new(session) })
    }

    /// Returns the name of the precision and the unit that multiplies bfloat16.
    fn precision(&self, py: Python<'_>) -> PyResult<Precision> {
        self.session.enter(py, |session| {
            Ok(Precision { name: session.precision().name(), bf16_unit: session.bf16_unit() })
        })
    }

    fn inputs(&self, py: Python<'_>) -> PyResult<Vec<ValueDescription>> {
        self.session.enter(py, |session| Ok(describe_values(session.inputs())))
    }

    fn outputs(&self, py: Python<'_>) -> PyResult<Vec<ValueDescription>> {
        self.session.enter(py, |session| Ok(describe_values(session.outputs())))
    }

    fn meta(&self, py: Python<'_>) -> PyResult<ModelMetadata> {
        self.session.enter(py, |session| Ok(session.meta().clone().into()))
    }

    /// Returns the initializers that a run may override.
    fn overridable(&self, py: Python<'_>) -> PyResult<Vec<ValueDescription>> {
        self.session.enter(py, |session| Ok(describe_values(session.overridable_initializers())))
    }

    /// Changes the device.
    fn set_device(&self, py: Python<'_>, device: &str, num_threads: usize) -> PyResult<()> {
        let backend = backend(device, num_threads)?;
        self.session.enter(py, |session| session.set_backend(&backend))
    }

    fn begin_trace(&self, py: Python<'_>) -> PyResult<()> {
        self.session.enter(py, |session| {
            session.begin_trace();
            Ok(())
        })
    }

    /// Returns the trace of runs as JSON.
    fn end_trace(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.session.enter(py, |session| Ok(session.end_trace()))
    }

    /// Runs the model and returns the outputs at the positions `only`, without computing others; by default,
    /// all outputs.
    #[pyo3(signature = (feeds, only))]
    fn run(
        &self,
        py: Python<'_>,
        feeds: HashMap<String, Argument>,
        only: Option<Vec<usize>>,
    ) -> PyResult<Vec<Returned>> {
        let owned_feeds = to_session_inputs(&feeds)?;
        let results = self.session.enter(py, |session| {
            let restricted = only.is_some();
            let output_indices = only.unwrap_or_else(|| (0..session.outputs().len()).collect());
            let mut requested: Vec<(usize, Option<OutputTarget<'_>>)> =
                output_indices.into_iter().map(|output| (output, None)).collect();
            run_requested(session, &named_views(&owned_feeds), &mut requested, restricted)
        })?;
        Ok(results.into_iter().flatten().collect())
    }

    /// Runs the model and writes outputs, by position, into the memory of their values. Outputs without a
    /// value are returned at their index. An output may overwrite the memory of an input. If the run fails,
    /// or an output does not fit, no value has changed.
    #[pyo3(signature = (feeds, outputs, *, restricted=true))]
    fn run_into(
        &self,
        py: Python<'_>,
        feeds: HashMap<String, Argument>,
        outputs: Vec<(usize, Option<Bound<'_, OrtValue>>)>,
        restricted: bool,
    ) -> PyResult<Vec<Option<Returned>>> {
        let owned_feeds = to_session_inputs(&feeds)?;
        let requested = Requested::new(&outputs)?;
        self.session.enter(py, |session| {
            run_requested(session, &named_views(&owned_feeds), &mut requested.targets(), restricted)
        })
    }
}

/// Extracts the inputs of a run.
fn to_session_inputs(feeds: &HashMap<String, Argument>) -> PyResult<Vec<(&str, SessionInput)>> {
    feeds.iter().map(|(name, feed)| Ok((name.as_str(), SessionInput::of(feed)?))).collect()
}

/// Runs a model and returns its results; `None` for results in memory of the caller. Tensors remain on a
/// device.
fn run_requested(
    session: &mut ortrain::InferenceSession,
    inputs: &[(&str, InputView<'_>)],
    requested: &mut [(usize, Option<OutputTarget<'_>>)],
    restricted: bool,
) -> ortrain::Result<Vec<Option<Returned>>> {
    let mut results = Results::default();
    let found =
        session.run_delivered(inputs, requested, restricted, &mut |at, value| results.store(at, value))?;
    let mut tensors = results.by_index();
    tensors.resize_with(found.len(), || None);
    let fetched = |(value, tensor): (Option<Value>, Option<OrtValue>)| match value {
        Some(Value::Tensor(tensor)) => Some(Returned::Tensor(OrtValue::of(tensor))),
        Some(Value::Sequence(several)) => {
            Some(Returned::Sequence(several.into_iter().map(OrtValue::of).collect()))
        }
        None => tensor.map(Returned::Tensor),
    };
    Ok(found.into_iter().zip(tensors).map(fetched).collect())
}
