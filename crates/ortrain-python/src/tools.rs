//! Inference, artifact generation, and inspection of models.

use std::collections::HashMap;
use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use ortrain::artifacts::{
    AdamFormula, ArtifactOptions, BatchNormMode, Loss, LossSettings, LossTerm, NameGenerator,
    OptimizerChoice, OptimizerKind, OptimizerSettings, Reduction, generate,
};
use ortrain::{
    Backend, Bytes, DType, Fetch, FunctionProto, Gradient, InputBytes, InspectOptions, Lent, Memory,
    ModelSource, ModuleOptions, OperatorInfo, RunInput, Runs, Scope, SessionOptions, Stage, Tensor, Value,
    artifact_parts,
};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyTuple};

use crate::cuda_packages::search_packages_for;
use crate::error::{InvalidArgumentError, detached, raise, signal_interrupt};
use crate::gil::Exclusive;
use crate::optim::{OwnOptimizer, spec_of};
use crate::value::{OrtValue, Results, describe_info};

/// Custom operators and gradients.
#[pyclass(module = "ortrain._ortrain")]
pub(crate) struct OperatorLibrary {
    library: ortrain::OperatorLibrary,
}

#[pymethods]
impl OperatorLibrary {
    #[new]
    fn new() -> OperatorLibrary {
        OperatorLibrary { library: ortrain::OperatorLibrary::new() }
    }

    fn add_function(&mut self, function: &[u8]) -> PyResult<()> {
        self.library.add_function(decode_function(function)?).map_err(raise)
    }

    #[pyo3(signature = (domain, operator, node, function))]
    fn add_gradient(
        &mut self,
        domain: &str,
        operator: &str,
        node: Option<&str>,
        function: &[u8],
    ) -> PyResult<()> {
        let function = decode_function(function)?;
        let outcome = match node {
            Some(node) => self.library.add_node_gradient(node, domain, operator, function),
            None => self.library.add_gradient(domain, operator, function),
        };
        outcome.map_err(raise)
    }
}

fn decode_function(function: &[u8]) -> PyResult<FunctionProto> {
    ortrain::decode_function(function.to_vec())
        .map_err(|source| InvalidArgumentError::new_err(source.to_string()))
}

/// Changes of a model before its use.
#[pyclass(module = "ortrain._ortrain")]
pub(crate) struct ModelChanges {
    changes: ortrain::ModelChanges,
}

#[pymethods]
impl ModelChanges {
    #[new]
    fn new() -> ModelChanges {
        ModelChanges { changes: ortrain::ModelChanges::default() }
    }

    fn initializer(&mut self, name: String, value: &Bound<'_, OrtValue>) -> PyResult<()> {
        self.changes.initializers.push((name, value.get().tensor()?));
        Ok(())
    }

    fn size(&mut self, name: String, size: usize) {
        self.changes.sizes.push((name, size));
    }

    fn stop_gradients(&mut self, values: Vec<String>) {
        self.changes.stops.extend(values);
    }

    fn size_of_denotation(&mut self, denotation: String, size: usize) {
        self.changes.sizes_by_denotation.push((denotation, size));
    }
}

/// A path, the bytes of a model, or a pair of bytes and the folder of external data. It may be paired with
/// custom operators or changes.
pub(crate) struct Source(pub(crate) ModelSource);

impl<'py> FromPyObject<'_, 'py> for Source {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<Source> {
        if let Ok((bytes, folder)) = object.extract::<(PyBackedBytes, PathBuf)>() {
            return Ok(Source(ModelSource::BytesIn(Bytes::from_owner(bytes), folder)));
        }
        if let Ok((Source(model), changed)) = object.extract::<(Source, PyRef<'_, ModelChanges>)>() {
            return Ok(Source(model.with_changes(changed.changes.clone())));
        }
        if let Ok(pair) = object.cast::<PyTuple>() {
            let (Source(model), operators) = pair.extract::<(Source, PyRef<'_, OperatorLibrary>)>()?;
            return Ok(Source(model.with_operators(&operators.library)));
        }
        Ok(Source(if object.is_instance_of::<PyBytes>() {
            ModelSource::Bytes(Bytes::from_owner(object.extract::<PyBackedBytes>()?))
        } else {
            ModelSource::Path(object.extract::<PathBuf>()?)
        }))
    }
}

/// Returns the backend of a device name.
pub(crate) fn backend(device: &str, num_threads: usize) -> PyResult<Arc<dyn Backend>> {
    search_packages_for(device);
    ortrain::backend(device, num_threads).map_err(raise)
}

/// Builds the options of a module from Python arguments.
pub(crate) fn module_options(
    device: &str,
    num_threads: usize,
    memory_limit: Option<usize>,
    iteration_limit: Option<u64>,
    precision: &str,
    bf16_fallback: &str,
    detect_anomaly: bool,
) -> PyResult<ModuleOptions> {
    let session =
        session_options(device, num_threads, memory_limit, iteration_limit, precision, bf16_fallback)?;
    let mut options = ModuleOptions::default();
    (options.backend, options.interrupt) = (session.backend, session.interrupt);
    (options.memory_limit, options.iteration_limit) = (session.memory_limit, session.iteration_limit);
    (options.precision, options.bf16_fallback) = (session.precision, session.bf16_fallback);
    options.detect_anomaly = detect_anomaly;
    Ok(options)
}

/// Builds the options of a session from Python arguments.
pub(crate) fn session_options(
    device: &str,
    num_threads: usize,
    memory_limit: Option<usize>,
    iteration_limit: Option<u64>,
    precision: &str,
    bf16_fallback: &str,
) -> PyResult<SessionOptions> {
    let mut options = SessionOptions::default().backend(backend(device, num_threads)?);
    options.memory_limit = memory_limit;
    options.iteration_limit = iteration_limit;
    options.precision = parse_name(precision)?;
    options.bf16_fallback = parse_name(bf16_fallback)?;
    options.interrupt = Some(signal_interrupt());
    Ok(options)
}

/// Parses a name.
fn parse_name<T: FromStr<Err: Display>>(name: &str) -> PyResult<T> {
    name.parse().map_err(|unknown: T::Err| InvalidArgumentError::new_err(unknown.to_string()))
}

/// Input or output of a model: a tensor, or a list of tensors for a sequence.
#[derive(FromPyObject)]
enum Feed {
    Tensor(Py<OrtValue>),
    Sequence(Vec<Py<OrtValue>>),
}

/// An input during a run: an immutable tensor, or memory with other writers.
pub(crate) enum SessionInput {
    Tensor(Tensor),
    Lent(DType, Vec<usize>, Arc<Memory>),
    Sequence(Vec<Tensor>),
}

impl SessionInput {
    fn of(feed: &Feed) -> PyResult<SessionInput> {
        Ok(match feed {
            Feed::Tensor(value) => SessionInput::of_value(value.get())?,
            Feed::Sequence(values) => SessionInput::Sequence(
                values.iter().map(|value| value.get().tensor()).collect::<PyResult<_>>()?,
            ),
        })
    }

    pub(crate) fn of_value(value: &OrtValue) -> PyResult<SessionInput> {
        Ok(match value.shared_memory() {
            Some(memory) => SessionInput::Lent(value.dtype(), value.dims().to_vec(), memory),
            None => SessionInput::Tensor(value.tensor()?),
        })
    }

    /// Returns an input of a step. Memory of this process is copied before any check.
    fn of_step(value: &OrtValue) -> PyResult<SessionInput> {
        match value.shared_memory().filter(|memory| memory.host().is_none()) {
            Some(memory) => Ok(SessionInput::Lent(value.dtype(), value.dims().to_vec(), memory)),
            None => Ok(SessionInput::Tensor(value.tensor()?)),
        }
    }

    /// Returns an input that a run copies. Floats on a device are copied there, and other values through the host,
    /// because their elements are checked before use.
    fn of_copied(value: &OrtValue) -> PyResult<SessionInput> {
        match SessionInput::of_step(value)? {
            SessionInput::Lent(dtype, ..) if !dtype.is_float() => Ok(SessionInput::Tensor(value.tensor()?)),
            input => Ok(input),
        }
    }

    /// Returns the input of a run, which is no sequence.
    pub(crate) fn run_input(&self) -> RunInput<'_> {
        match self {
            SessionInput::Tensor(tensor) => RunInput::from(tensor),
            SessionInput::Lent(dtype, dims, memory) => {
                RunInput { dtype: *dtype, dims, bytes: InputBytes::Device(memory) }
            }
            SessionInput::Sequence(_) => unreachable!("values of a run are tensors"),
        }
    }

    /// Returns the destination of an output.
    fn output_buffer(value: &OrtValue) -> PyResult<SessionInput> {
        Ok(SessionInput::Lent(value.dtype(), value.dims().to_vec(), value.memory()?))
    }

    fn lent(&self) -> Option<Lent<'_>> {
        match self {
            SessionInput::Lent(dtype, dims, memory) => Some(Lent { dtype: *dtype, dims, memory }),
            SessionInput::Tensor(_) | SessionInput::Sequence(_) => None,
        }
    }

    pub(crate) fn feed(&self) -> ortrain::Feed<'_> {
        match self {
            SessionInput::Tensor(tensor) => RunInput::from(tensor).into(),
            SessionInput::Sequence(tensors) => ortrain::Feed::Sequence(tensors),
            SessionInput::Lent(dtype, dims, memory) => Lent { dtype: *dtype, dims, memory }.into(),
        }
    }
}

/// Returns the inputs of a step. Memory on a device may be read in place.
pub(crate) fn step_inputs(values: &[Bound<'_, OrtValue>]) -> PyResult<Vec<SessionInput>> {
    values.iter().map(|value| SessionInput::of_step(value.get())).collect()
}

/// Returns inputs that a run copies.
pub(crate) fn copied_inputs(values: &[Bound<'_, OrtValue>]) -> PyResult<Vec<SessionInput>> {
    values.iter().map(|value| SessionInput::of_copied(value.get())).collect()
}

#[derive(IntoPyObject)]
enum Fetched {
    Tensor(OrtValue),
    Sequence(Vec<OrtValue>),
}

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
    #[pyo3(signature = (
        model, *, device, num_threads, memory_limit, iteration_limit, precision, bf16_fallback,
        optimized_model=None
    ))]
    fn new(
        py: Python<'_>,
        model: Source,
        device: &str,
        num_threads: usize,
        memory_limit: Option<usize>,
        iteration_limit: Option<u64>,
        precision: &str,
        bf16_fallback: &str,
        optimized_model: Option<PathBuf>,
    ) -> PyResult<InferenceSession> {
        let mut options =
            session_options(device, num_threads, memory_limit, iteration_limit, precision, bf16_fallback)?;
        options.optimized_model = optimized_model;
        let session = py.detach(|| ortrain::InferenceSession::new(model.0, options)).map_err(raise)?;
        Ok(InferenceSession { session: Exclusive::new(session) })
    }

    /// Returns the name of the precision and the unit that multiplies bfloat16.
    fn precision(&self, py: Python<'_>) -> PyResult<(&'static str, Option<&'static str>)> {
        self.session.enter(py, |session| Ok((session.precision().name(), session.bf16_unit())))
    }

    fn inputs<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let infos = self.session.enter(py, |session| Ok(session.inputs().to_vec()))?;
        infos.iter().map(|info| describe_info(py, info)).collect()
    }

    fn outputs<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let infos = self.session.enter(py, |session| Ok(session.outputs().to_vec()))?;
        infos.iter().map(|info| describe_info(py, info)).collect()
    }

    fn meta<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let meta = self.session.enter(py, |session| Ok(session.meta().clone()))?;
        let texts =
            [meta.producer_name, meta.graph_name, meta.domain, meta.description, meta.graph_description];
        (texts, meta.version, meta.custom).into_pyobject(py)
    }

    /// Returns the initializers that a run may override.
    fn overridable<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyTuple>>> {
        let infos = self.session.enter(py, |session| Ok(session.overridable_initializers().to_vec()))?;
        infos.iter().map(|info| describe_info(py, info)).collect()
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
        feeds: HashMap<String, Feed>,
        only: Option<Vec<usize>>,
    ) -> PyResult<Vec<Fetched>> {
        let owned_feeds = to_session_inputs(&feeds)?;
        let results = self.session.enter(py, |session| {
            let restricted = only.is_some();
            let output_indices = only.unwrap_or_else(|| (0..session.outputs().len()).collect());
            let fetches: Vec<Fetch<'_>> =
                output_indices.into_iter().map(|output| Fetch { output, into: None }).collect();
            run_fetches(session, &named_feeds(&owned_feeds), &fetches, restricted)
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
        feeds: HashMap<String, Feed>,
        outputs: Vec<(usize, Option<Bound<'_, OrtValue>>)>,
        restricted: bool,
    ) -> PyResult<Vec<Option<Fetched>>> {
        let owned_feeds = to_session_inputs(&feeds)?;
        let to_buffer = |(at, value): &(usize, Option<Bound<'_, OrtValue>>)| {
            Ok((*at, value.as_ref().map(|value| SessionInput::output_buffer(value.get())).transpose()?))
        };
        let buffers: Vec<(usize, Option<SessionInput>)> =
            outputs.iter().map(to_buffer).collect::<PyResult<_>>()?;
        self.session.enter(py, |session| {
            let buffers = buffers.iter();
            let fetches: Vec<Fetch<'_>> = buffers
                .map(|(output, buffer)| Fetch {
                    output: *output,
                    into: buffer.as_ref().and_then(SessionInput::lent),
                })
                .collect();
            run_fetches(session, &named_feeds(&owned_feeds), &fetches, restricted)
        })
    }
}

/// Extracts the inputs of a run.
fn to_session_inputs(feeds: &HashMap<String, Feed>) -> PyResult<Vec<(&str, SessionInput)>> {
    feeds.iter().map(|(name, feed)| Ok((name.as_str(), SessionInput::of(feed)?))).collect()
}

fn named_feeds<'a>(inputs: &'a [(&'a str, SessionInput)]) -> Vec<(&'a str, ortrain::Feed<'a>)> {
    inputs.iter().map(|(name, input)| (*name, input.feed())).collect()
}

/// Runs a model and returns its results; `None` for results in memory of the caller. Tensors remain on a
/// device.
fn run_fetches(
    session: &mut ortrain::InferenceSession,
    feeds: &[(&str, ortrain::Feed<'_>)],
    fetches: &[Fetch<'_>],
    restricted: bool,
) -> ortrain::Result<Vec<Option<Fetched>>> {
    let mut results = Results::default();
    let found = session.run_delivered(feeds, fetches, restricted, &mut |at, dtype, dims, value| {
        results.store(at, dtype, dims, value)
    })?;
    let mut tensors = results.by_index();
    tensors.resize_with(found.len(), || None);
    let fetched = |(value, tensor): (Option<Value>, Option<OrtValue>)| match value {
        Some(Value::Tensor(tensor)) => Some(Fetched::Tensor(OrtValue::of(tensor))),
        Some(Value::Sequence(several)) => {
            Some(Fetched::Sequence(several.into_iter().map(OrtValue::of).collect()))
        }
        None => tensor.map(Fetched::Tensor),
    };
    Ok(found.into_iter().zip(tensors).map(fetched).collect())
}

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

/// Encodes a graph as the bytes of a model message.
fn encode_graph(py: Python<'_>, graph: ortrain::GraphProto) -> PyResult<Bound<'_, PyBytes>> {
    let model = ortrain::ModelProto { graph: Some(graph), ..ortrain::ModelProto::default() };
    Ok(PyBytes::new(py, &ortrain::encode_model(&model).map_err(|source| raise(source.into()))?))
}

/// Returns the nodes of a loss as a message, the name of the loss, and the last number in a generated name.
#[pyfunction]
pub(crate) fn loss_fragment<'py>(
    py: Python<'py>,
    model: Source,
    term: Term,
    target_is_there: bool,
    last: u64,
) -> PyResult<(Bound<'py, PyBytes>, String, u64)> {
    let term = term.read()?;
    let fragment = detached(py, || artifact_parts::loss(model.0, &term, target_is_there, last))?;
    Ok((encode_graph(py, fragment.graph)?, fragment.output, fragment.last))
}

/// Returns declarations of values with types inferred from the model, as a message.
#[pyfunction]
pub(crate) fn declarations<'py>(
    py: Python<'py>,
    model: Source,
    names: Vec<String>,
) -> PyResult<Bound<'py, PyBytes>> {
    encode_graph(py, detached(py, || artifact_parts::declarations(model.0, &names))?)
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
    master_weights=false, optimizer_spec=None, own_optimizer=None
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
    detached(py, || {
        let artifacts = generate(model.0, options)?;
        match external_above {
            None => artifacts.write(directory, prefix)?,
            Some(above) => artifacts.write_with_external_data(directory, prefix, above)?,
        }
        Ok(artifacts.warnings)
    })
}

/// Inspects a model. Returns the report as JSON, as short text and as complete text. With `strict`, errors of
/// its operators are raised.
#[pyfunction]
#[pyo3(signature = (model, values, first_output, *, strict, batch_size, shapes))]
pub(crate) fn inspect(
    py: Python<'_>,
    model: Source,
    values: Vec<String>,
    first_output: bool,
    strict: bool,
    batch_size: Option<usize>,
    shapes: Vec<(String, Vec<usize>)>,
) -> PyResult<(String, String, String)> {
    let scope = match (values.is_empty(), first_output) {
        (false, _) => Scope::Values(values),
        (true, true) => Scope::FirstOutput,
        (true, false) => Scope::Outputs,
    };
    let mut options = InspectOptions::default();
    options.batch_size = batch_size;
    options.shapes = shapes;
    let inspection = detached(py, || match strict {
        true => ortrain::inspect_strictly(model.0, &scope),
        false => ortrain::inspect_with(model.0, &scope, &options),
    })?;
    Ok((inspection.to_json(), inspection.to_string(), format!("{inspection:#}")))
}

/// Returns every operator: domain, name, true for standard ONNX, versions, kind of execution, kind of
/// gradient. Then the inputs of a partial gradient, the types of its inputs, and true if the last input may
/// be repeated.
#[pyfunction]
#[allow(clippy::type_complexity, reason = "the fields of a record")]
pub(crate) fn operators(
    py: Python<'_>,
) -> Vec<(
    &'static str,
    &'static str,
    bool,
    &'static [i64],
    &'static str,
    (&'static str, Vec<usize>),
    Vec<Vec<&'static str>>,
    bool,
)> {
    let described = |info: OperatorInfo| {
        let runs = match info.runs {
            Runs::Row => "row",
            Runs::Instructions => "instructions",
            Runs::Decomposition => "decomposition",
            Runs::Host => "host",
            Runs::ControlFlow => "control flow",
        };
        let gradient = match info.gradient {
            Gradient::Full => ("full", Vec::new()),
            Gradient::Partial(inputs) => ("partial", inputs),
            Gradient::Zero => ("zero", Vec::new()),
            Gradient::None => ("none", Vec::new()),
        };
        let names = |types: Vec<DType>| types.into_iter().map(DType::name).collect();
        let types = info.types.into_iter().map(names).collect();
        (info.domain, info.name, info.standard, info.versions, runs, gradient, types, info.variadic)
    };
    py.detach(ortrain::operators).into_iter().map(described).collect()
}

/// Returns one stage of a model as text.
#[pyfunction]
pub(crate) fn dump(
    py: Python<'_>,
    model: Source,
    stage: &str,
    shapes: HashMap<String, Vec<usize>>,
) -> PyResult<String> {
    let stage = Stage::from_name(stage).map_err(raise)?;
    if stage == Stage::CudaKernels {
        search_packages_for("cuda");
    }
    let shapes: Vec<(String, Vec<usize>)> = shapes.into_iter().collect();
    detached(py, || ortrain::dump(model.0, stage, &shapes))
}

fn unknown_name_error(kind: &str, name: &str) -> PyErr {
    InvalidArgumentError::new_err(format!("there is no {kind} {name:?}"))
}
