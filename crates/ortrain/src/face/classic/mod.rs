//! Training in one session: each run computes the model, its gradients, and an update of the weights.
//!
//! The session has the names and the behavior of `onnxruntime.TrainingSession`: it is created from a forward
//! model with a loss and [`TrainingParameters`]. It is implemented with [`Module`](crate::Module) and
//! [`Optimizer`](crate::Optimizer).

mod graphs;
mod layout;
mod names;
mod parameters;
mod ranks;
mod resume;
mod running;
mod session_optimizer;
mod session_ranks;
mod update;

use std::collections::BTreeMap;
use std::sync::Arc;

use ortrain_graph::{DType, Dim, Tensor};
use ortrain_ops::training::{ACCUMULATED, ALL_FINITE, GRADIENT_NORM, LOSS_SCALE, TRAINING_MODE};
use ortrain_program::{InputView, Memory, OutputSink};

pub use names::StatesByWeight;
pub use parameters::TrainingParameters;

use crate::distributed::{CommunicationTime, DataParallel};
use crate::exec::outputs::{Targets, check_requested};
use crate::exec::trace::Trace;
use crate::suggest::hint;
use crate::{
    CheckpointState, Error, MemoryUse, ModelMeta, ModelSource, Module, ModuleOptions, Result, ValueInfo,
};
use graphs::{GRADIENT_SUFFIX, OptimizerModels, SessionParts};
use ranks::{Fingerprints, GradientSums, Loads};
use session_optimizer::{AdasumCopies, SessionOptimizer};

/// Options of one call of [`TrainingSession::run_tensors`] and its kin.
///
/// ```
/// use ortrain::classic::CallOptions;
///
/// let evaluation = CallOptions { only_execute_path_to_fetches: true, training_mode: Some(false) };
/// assert_ne!(evaluation, CallOptions::default());
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallOptions {
    /// True to compute only the requested results: no weight changes.
    pub only_execute_path_to_fetches: bool,
    /// Default of the input `training_mode` for this run. If true, Dropout drops elements. An evaluation run
    /// then also normalizes by statistics of its batch, if the model leaves this open.
    pub training_mode: Option<bool>,
}

/// A result of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
enum FetchSource {
    /// Output of the model, by index.
    Output(usize),
    /// Gradient of a weight, by index.
    Gradient(usize),
    Accumulated,
    Norm,
    AllFinite,
}

/// A model, its gradients and its optimizer in a single `run` function.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let mut session = setup::classic()?;
/// # let batch = setup::batch();
/// use ortrain::classic::CallOptions;
/// use ortrain::{InputView, Tensor};
///
/// let rate = Tensor::f32(&[1], &[0.1]);
/// let feeds = [("x", InputView::from(&batch[0])), ("labels", InputView::from(&batch[1])), ("Learning_Rate", InputView::from(&rate))];
/// let mut losses = Vec::new();
/// for _ in 0..5 {
///     let results = session.run_tensors(&feeds, &["loss"], CallOptions::default())?;
///     losses.push(results[0].to_vec::<f32>()[0]);
/// }
/// assert!(losses[4] < losses[0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TrainingSession {
    checkpoint: CheckpointState,
    module: Module,
    optimizer: Option<SessionOptimizer>,
    /// Trained weights, sorted.
    weights: Vec<String>,
    /// Optional inputs with their default values.
    defaults: Vec<(String, Tensor)>,
    /// Name of the learning-rate input.
    learning_rate_name: String,
    /// Type of the forward pass, if it differs from the type of the weights.
    low_precision: Option<DType>,
    /// Number of runs per update, for gradient accumulation.
    runs_per_update: i64,
    /// True if gradients are outputs.
    outputs_gradients: bool,
    inputs: Vec<ValueInfo>,
    overridable: Vec<ValueInfo>,
    outputs: Vec<ValueInfo>,
    /// Source of each output.
    fetch_sources: Vec<FetchSource>,
    /// Node outputs with their types.
    node_outputs: BTreeMap<String, DType>,
    meta: ModelMeta,
    /// Contents of the frozen planes at the start of the accumulation window, if a step may have to be
    /// undone.
    frozen_before_window: Option<Vec<Vec<u8>>>,
    /// True during an accumulation window.
    in_window: bool,
    /// Ranks of a distributed training.
    ranks: Option<DataParallel>,
    loads: Loads,
    /// Sums of gradients over the ranks.
    sums: Option<Arc<GradientSums>>,
    communication_time: CommunicationTime,
    /// Memory of updates by Adasum.
    adasum_copies: Option<AdasumCopies>,
}

/// Returns true if two tensors have the same type and shape.
fn is_same_type(a: &Tensor, b: &Tensor) -> bool {
    a.dtype() == b.dtype() && a.dims() == b.dims()
}

fn value_info(name: &str, dtype: DType, dims: &[usize]) -> ValueInfo {
    let shape = dims.iter().copied().map(Dim::from).collect();
    ValueInfo { name: name.into(), dtype, shape: Some(shape), sequence: false }
}

impl TrainingSession {
    /// Creates a session of a forward model.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use ortrain::ModuleOptions;
    /// use ortrain::classic::{TrainingParameters, TrainingSession};
    ///
    /// let parameters = TrainingParameters::new("loss").optimizer("SGDOptimizer").train(["fc2.weight", "fc2.bias"]);
    /// let session = TrainingSession::new(setup::model_with_loss()?, &parameters, ModuleOptions::default())?;
    /// let inputs: Vec<&str> = session.inputs().iter().map(|input| input.name.as_str()).collect();
    /// assert_eq!(inputs, ["x", "labels", "Learning_Rate"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the model cannot be read or differentiated, or the parameters name unknown values.
    pub fn new(
        model: ModelSource,
        parameters: &TrainingParameters,
        options: ModuleOptions,
    ) -> Result<TrainingSession> {
        TrainingSession::on_ranks(model, parameters, options, None)
    }

    /// Creates a session that trains together with the sessions of other ranks: each update uses the mean of the
    /// gradients of all ranks. All ranks pass the same model and parameters.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use std::sync::Arc;
    ///
    /// use ortrain::ModuleOptions;
    /// use ortrain::classic::{CallOptions, TrainingParameters, TrainingSession};
    /// use ortrain::distributed::{Control, DataParallel, ThreadCommunicator};
    ///
    /// fn train(control: ThreadCommunicator, data: ThreadCommunicator) -> ortrain::Result<Vec<u8>> {
    ///     let ranks = DataParallel::new(Arc::new(Control::new(Arc::new(control))), Arc::new(data), 0);
    ///     let parameters = TrainingParameters::new("loss").optimizer("SGDOptimizer").train(["fc2.bias"]);
    ///     let (model, options) = (setup::model_with_loss().unwrap(), ModuleOptions::default());
    ///     let mut session = TrainingSession::on_ranks(model, &parameters, options, Some(ranks))?;
    ///     let batch = setup::batch();
    ///     let rate = ortrain::Tensor::f32(&[1], &[0.1]);
    ///     let feeds = [("x", (&batch[0]).into()), ("labels", (&batch[1]).into()), ("Learning_Rate", (&rate).into())];
    ///     session.run_tensors(&feeds, &["loss"], CallOptions::default())?;
    ///     Ok(session.state()?["fc2.bias"].data().to_vec())
    /// }
    /// let (control, data) = (ThreadCommunicator::create(2), ThreadCommunicator::create(2));
    /// let threads: Vec<_> = control.into_iter().zip(data).map(|(a, b)| std::thread::spawn(|| train(a, b))).collect();
    /// let weights: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect();
    /// assert_eq!(weights[0], weights[1]);
    /// ```
    ///
    /// # Errors
    /// As [`TrainingSession::new`]; also if the ranks cannot exchange the gradients of the weights.
    pub fn on_ranks(
        model: ModelSource,
        parameters: &TrainingParameters,
        options: ModuleOptions,
        ranks: Option<DataParallel>,
    ) -> Result<TrainingSession> {
        let SessionParts {
            train,
            eval,
            checkpoint,
            weights,
            outputs,
            defaults,
            optimizer,
            node_outputs,
            meta,
        } = graphs::build(model, parameters, ranks.as_ref())?;
        let optimizer_model = optimizer.as_ref().map(OptimizerModels::update);
        let fingerprints = (ranks.is_some())
            .then(|| Fingerprints::new(&train, parameters, &options, optimizer_model))
            .transpose()?;
        let mut checkpoint = CheckpointState::from_checkpoint(checkpoint)?;
        let (train, eval) = (ModelSource::from_proto(&train)?, ModelSource::from_proto(&eval)?);
        let module = Module::new(train, &mut checkpoint, Some(eval), options)?;
        let optimizer = optimizer
            .map(|models| SessionOptimizer::new(&models, &mut checkpoint, &module, ranks.as_ref()))
            .transpose()?;
        let rate = parameters.lr_params_feed_name.clone();
        let is_default = |name: &str| defaults.iter().any(|(known, _)| known == name);
        let (overridable, mut inputs): (Vec<ValueInfo>, Vec<ValueInfo>) =
            module.inputs(true).iter().cloned().partition(|input| is_default(&input.name));
        if optimizer.is_some() {
            if inputs.iter().chain(&overridable).any(|input| input.name == rate) {
                return Err(Error::Argument(format!(
                    "input {rate:?} of the model has the name of the learning rate; set lr_params_feed_name to \
                     another name"
                )));
            }
            inputs.push(value_info(&rate, DType::F32, &[1]));
        }
        let mut session = TrainingSession {
            checkpoint,
            module,
            optimizer,
            weights,
            defaults,
            learning_rate_name: rate,
            low_precision: parameters.mixed_precision,
            runs_per_update: parameters.gradient_accumulation_steps,
            outputs_gradients: parameters.set_gradients_as_graph_outputs,
            inputs,
            overridable,
            outputs: Vec::new(),
            fetch_sources: Vec::new(),
            node_outputs,
            meta,
            frozen_before_window: None,
            in_window: false,
            ranks,
            loads: Loads::default(),
            sums: None,
            communication_time: CommunicationTime::default(),
            adasum_copies: None,
        };
        session.list_outputs(outputs.len(), parameters.enable_grad_norm_clip);
        session.start_from(&parameters.initial_optimizer_state)?;
        session.join_ranks(fingerprints.as_ref())?;
        Ok(session)
    }

    /// Lists the outputs of the model, then the outputs of the training.
    fn list_outputs(&mut self, of_model: usize, norm: bool) {
        let infos = self.module.outputs(true);
        self.outputs = infos[..of_model].to_vec();
        self.fetch_sources = (0..of_model).map(FetchSource::Output).collect();
        if self.outputs_gradients {
            for (at, (weight, output)) in self.weights.iter().zip(&infos[of_model..]).enumerate() {
                self.outputs.push(ValueInfo { name: format!("{weight}{GRADIENT_SUFFIX}"), ..output.clone() });
                self.fetch_sources.push(FetchSource::Gradient(at));
            }
        }
        let mut gradient_outputs = Vec::new();
        if self.runs_per_update > 1 {
            gradient_outputs.push((FetchSource::Accumulated, value_info(ACCUMULATED, DType::Bool, &[])));
        }
        if self.optimizer.is_some() && (norm || self.low_precision.is_some()) {
            gradient_outputs.push((FetchSource::Norm, value_info(GRADIENT_NORM, DType::F32, &[])));
        }
        if self.optimizer.is_some() && self.low_precision.is_some() {
            gradient_outputs.push((FetchSource::AllFinite, value_info(ALL_FINITE, DType::Bool, &[])));
        }
        for (fetch, info) in gradient_outputs {
            self.fetch_sources.push(fetch);
            self.outputs.push(info);
        }
    }

    /// Returns the required inputs of a run, in order: the inputs of the model, the loss scale in mixed
    /// precision, and the learning rate if there is an optimizer.
    #[must_use]
    pub fn inputs(&self) -> &[ValueInfo] {
        &self.inputs
    }

    /// Returns the optional inputs of a run: initializers that are also inputs of the model, and
    /// `training_mode`.
    #[must_use]
    pub fn overridable_initializers(&self) -> &[ValueInfo] {
        &self.overridable
    }

    /// Returns the possible results of a run, in order.
    #[must_use]
    pub fn outputs(&self) -> &[ValueInfo] {
        &self.outputs
    }

    /// Returns the names of the trained weights, sorted.
    #[must_use]
    pub fn weights(&self) -> &[String] {
        &self.weights
    }

    /// Returns the name of the loss-scale input, in mixed precision.
    #[must_use]
    pub fn loss_scale_input_name(&self) -> Option<&'static str> {
        self.low_precision.map(|_| LOSS_SCALE)
    }

    /// Returns true if this value is a float32 output of a node.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let session = setup::classic()?;
    /// assert!(session.is_output_fp32_node("logits")?);
    /// assert!(session.is_output_fp32_node("x").is_err(), "it is given");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the value is no node output.
    pub fn is_output_fp32_node(&self, name: &str) -> Result<bool> {
        let of_training = self
            .outputs
            .iter()
            .zip(&self.fetch_sources)
            .find(|(output, fetch)| output.name == name && !matches!(fetch, FetchSource::Output(_)));
        match (self.node_outputs.get(name), of_training) {
            (Some(dtype), _) | (None, Some((ValueInfo { dtype, .. }, _))) => Ok(*dtype == DType::F32),
            (None, None) => Err(Error::State(format!(
                "no node computes {name:?}{}",
                hint(name, self.node_outputs.keys().map(String::as_str))
            ))),
        }
    }

    /// Returns the weights and the associated state, for checkpoints.
    #[must_use]
    pub fn checkpoint(&self) -> &CheckpointState {
        &self.checkpoint
    }

    /// Returns the metadata of the model.
    #[must_use]
    pub fn meta(&self) -> &ModelMeta {
        &self.meta
    }

    /// Starts to record a trace of runs, until [`TrainingSession::end_trace`].
    pub fn begin_trace(&mut self) {
        self.module.trace = Some(Trace::new());
    }

    /// Stops recording and returns the trace as a list of events in the Chrome trace format (JSON); `None` if
    /// no trace was recorded.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut session = setup::classic()?;
    /// assert_eq!(session.end_trace(), None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn end_trace(&mut self) -> Option<String> {
        self.module.trace.take().map(|trace| trace.to_json())
    }

    /// Sets the random seed of Dropout.
    pub fn set_seed(&mut self, seed: i64) {
        self.checkpoint.set_seed(seed);
    }

    /// Returns the module that computes outputs and gradients.
    #[must_use]
    pub fn module(&self) -> &Module {
        &self.module
    }

    /// Returns the current memory use.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let session = setup::classic()?;
    /// let memory = session.memory();
    /// assert_eq!(memory.moments, 2 * memory.gradients, "Adam has two moments");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn memory(&self) -> MemoryUse {
        self.module.memory(&self.checkpoint)
    }

    /// Returns the graphs and the programs compiled so far, as text.
    #[must_use]
    pub fn dump(&self) -> String {
        let optimizer = self.optimizer.as_ref().map(|optimizer| optimizer.optimizer().dump());
        self.module.dump() + &optimizer.unwrap_or_default()
    }

    /// Runs the model, its gradients and the update of the weights. Passes the results with these names to
    /// `deliver`, in this order; without names, all results.
    ///
    /// With [`CallOptions::only_execute_path_to_fetches`], only the results are computed. Then no weight
    /// changes. Gradients are accumulated if a result requires them and an update takes several runs.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut session = setup::classic()?;
    /// # let batch = setup::batch();
    /// # let rate = ortrain::Tensor::f32(&[1], &[0.1]);
    /// use ortrain::InputView;
    /// use ortrain::classic::CallOptions;
    ///
    /// let feeds = [("x", InputView::from(&batch[0])), ("labels", InputView::from(&batch[1])), ("Learning_Rate", InputView::from(&rate))];
    /// let before = session.state()?;
    /// let only = CallOptions { only_execute_path_to_fetches: true, ..CallOptions::default() };
    /// session.run(&feeds, &["logits"], only, &mut |_, value| {
    ///     assert_eq!(value.dims, [2, 10]);
    ///     Ok(())
    /// })?;
    /// assert_eq!(session.state()?, before);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If an input is missing or does not fit, a name is unknown, or the run fails. Then nothing has changed.
    pub fn run(
        &mut self,
        feeds: &[(&str, InputView<'_>)],
        fetches: &[&str],
        options: CallOptions,
        deliver: &mut OutputSink<'_>,
    ) -> Result<()> {
        let position = |name: &&str| self.outputs.iter().position(|output| output.name == **name);
        let known: Vec<usize> = fetches.iter().filter_map(position).collect();
        self.report_failure(options, known.into_iter(), |session| {
            let output_indices = session.fetch_indices(fetches)?;
            session.run_fetches(feeds, &mut [], &output_indices, options, deliver)
        })
    }

    /// Runs like [`TrainingSession::run`], and returns the results as tensors.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut session = setup::classic()?;
    /// # let batch = setup::batch();
    /// # let rate = ortrain::Tensor::f32(&[1], &[0.1]);
    /// # use ortrain::InputView;
    /// # use ortrain::classic::CallOptions;
    /// # let feeds = [("x", InputView::from(&batch[0])), ("labels", InputView::from(&batch[1])), ("Learning_Rate", InputView::from(&rate))];
    /// let results = session.run_tensors(&feeds, &[], CallOptions::default())?;
    /// assert_eq!(results.len(), session.outputs().len());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`TrainingSession::run`].
    pub fn run_tensors(
        &mut self,
        feeds: &[(&str, InputView<'_>)],
        fetches: &[&str],
        options: CallOptions,
    ) -> Result<Vec<Tensor>> {
        let count = if fetches.is_empty() { self.outputs.len() } else { fetches.len() };
        let mut results: Vec<Option<Tensor>> = vec![None; count];
        self.run(feeds, fetches, options, &mut |at, value| {
            results[at] = Some(value.to_tensor()?);
            Ok(())
        })?;
        Ok(results.into_iter().map(|tensor| tensor.expect("every result is delivered completely")).collect())
    }

    /// Runs like [`TrainingSession::run`] on values in memory of the caller. Results are identified by their
    /// output index.
    ///
    /// Results are written to memory of the caller, or returned if a fetch has no memory. Floats in memory of
    /// the caller are read in place.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut session = setup::classic()?;
    /// # let batch = setup::batch();
    /// # let rate = ortrain::Tensor::f32(&[1], &[0.1]);
    /// # use ortrain::InputView;
    /// # use ortrain::classic::CallOptions;
    /// # let feeds = [("x", InputView::from(&batch[0])), ("labels", InputView::from(&batch[1])), ("Learning_Rate", InputView::from(&rate))];
    /// use std::sync::Arc;
    ///
    /// use ortrain::{DType, Memory, OutputTarget};
    ///
    /// let memory = Arc::new(Memory::new(4));
    /// let loss = OutputTarget::in_memory(DType::F32, &[], &memory);
    /// let results = session.run_bound(&feeds, &mut [(0, Some(loss))], CallOptions::default())?;
    /// assert!(results[0].is_none() && !memory.is_zero()?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`TrainingSession::run`]; also if a result has another type or shape than its memory, or two
    /// results overlap. Then nothing has changed.
    pub fn run_bound(
        &mut self,
        feeds: &[(&str, InputView<'_>)],
        outputs: &mut Targets<'_>,
        options: CallOptions,
    ) -> Result<Vec<Option<Tensor>>> {
        let indices: Vec<usize> = outputs.iter().map(|(output, _)| *output).collect();
        self.report_failure(options, indices.into_iter(), |session| {
            session.run_bound_unreported(feeds, outputs, options)
        })
    }

    /// Runs as [`TrainingSession::run_bound`], but other ranks do not learn of an error: the caller reports it, or makes
    /// another attempt.
    ///
    /// # Errors
    /// As [`TrainingSession::run_bound`].
    #[doc(hidden)]
    pub fn run_bound_unreported(
        &mut self,
        feeds: &[(&str, InputView<'_>)],
        outputs: &mut Targets<'_>,
        options: CallOptions,
    ) -> Result<Vec<Option<Tensor>>> {
        check_requested(&self.outputs, outputs)?;
        let indices: Vec<usize> = outputs.iter().map(|(output, _)| *output).collect();
        let mut results: Vec<Option<Tensor>> = vec![None; outputs.len()];
        self.run_fetches(feeds, outputs, &indices, options, &mut |at, value| {
            results[at] = Some(value.to_tensor()?);
            Ok(())
        })?;
        Ok(results)
    }
}

/// Copies the contents of planes.
fn copy_planes(planes: &[Arc<Memory>]) -> Result<Vec<Vec<u8>>> {
    planes.iter().map(|plane| Ok(plane.to_vec(0, plane.len())?)).collect()
}

/// Restores the contents of planes.
fn restore_planes(planes: &[Arc<Memory>], contents: &[Vec<u8>]) -> Result<()> {
    planes.iter().zip(contents).try_for_each(|(plane, bytes)| Ok(plane.write(0, bytes)?))
}

/// Returns the inputs of a module in its order, with defaults for missing ones.
fn order_inputs<'a>(
    infos: &[ValueInfo],
    defaults: &'a [(String, Tensor)],
    feeds: &[(&str, InputView<'a>)],
    options: CallOptions,
) -> Result<Vec<InputView<'a>>> {
    const FLAGS: [&[u8]; 2] = [&[0], &[1]];
    let value = |input: &ValueInfo| {
        if let Some((_, feed)) = feeds.iter().find(|(name, _)| *name == input.name) {
            return Ok(*feed);
        }
        if let (TRAINING_MODE, Some(mode)) = (input.name.as_str(), options.training_mode) {
            return Ok(InputView { dtype: DType::Bool, dims: &[], bytes: FLAGS[usize::from(mode)].into() });
        }
        let default = defaults.iter().find(|(name, _)| *name == input.name);
        let missing = || Error::Argument(format!("no value was given for input {:?}", input.name));
        default.map(|(_, tensor)| InputView::from(tensor)).ok_or_else(missing)
    };
    infos.iter().map(value).collect()
}

/// Checks that results have the shapes of their targets. `shapes` are the shapes of the module's
/// results; the first `of_model` ones are outputs of the model.
fn check_shapes(
    requested: &Targets<'_>,
    outputs: &[ValueInfo],
    sources: &[FetchSource],
    of_model: usize,
    shapes: &[Option<Vec<usize>>],
) -> Result<()> {
    for (output, target) in requested {
        let Some(target) = target else { continue };
        let dims = match sources[*output] {
            FetchSource::Output(at) => shapes.get(at).cloned().flatten(),
            FetchSource::Gradient(at) => shapes.get(of_model + at).cloned().flatten(),
            _ => Some(Vec::new()),
        };
        let info = &outputs[*output];
        let dims = dims.ok_or_else(|| Error::OutputOfUnknownShape { name: info.name.clone() })?;
        target.check(info, info.dtype, &dims)?;
    }
    Ok(())
}
