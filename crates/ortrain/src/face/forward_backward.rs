//! Forward and backward pass of a model as two calls, with weights that the caller owns.
//!
//! Both passes are one program with a suspension point ([`ortrain_program::Yield`]). Activations are stored
//! where the step of a [`Module`](crate::Module) would store them, and the results are bit-identical.

mod passes;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ortrain_graph::{DType, Graph, Node, ValueId, ValueType};
use ortrain_onnx::ModelProto;
use ortrain_ops::Role;
use ortrain_ops::passes::differentiate::{backpropagate, backpropagate_known, no_path_error, random_nodes};
use ortrain_ops::passes::functions::unwrap_gradients;
use ortrain_ops::passes::infer::infer;
use ortrain_ops::training::{
    Accumulation, BatchNormMode, append_accumulators, append_yield, find_yield, running_statistics,
    set_training_mode,
};
use ortrain_program::{
    Backend, ForwardState, InputView, Memory, PlaneId, RunError, Scalars, ScheduleExecutor, Workspace,
};
use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use crate::artifacts::training_model::training_message;
use crate::artifacts::updated_statistics;
use crate::exec::executable_cache::{ExecutableCache, interruptible};
use crate::exec::inputs::Signature;
use crate::exec::over_limit;
use crate::exec::run_options::RunOptions;
use crate::face::gradient_options::{ForwardBackwardOptions, Weight};
use crate::face::inference_session::Parts;
use crate::model::checks::check_forward;
use crate::model::computed_parameters::{constants_of_subgraphs, lift_from_subgraphs};
use crate::model::graph::{graph_to_run, opset_of};
use crate::model::postprocessing;
use crate::state::placement::Placement;
use crate::suggest::hint;
use crate::{Error, InferenceSession, ModelSource, OutputTarget, Result, ValueInfo};

/// Maximum number of idle workspaces in the pool.
const MAX_IDLE_PASSES: usize = 4;

/// Number of planes that are bound without an allocation.
const INLINE_PLANES: usize = 512;

/// References to planes, indexed by plane id.
type Planes<'a> = SmallVec<[&'a Memory; INLINE_PLANES]>;

/// Resources that finished passes leave for later passes.
#[derive(Debug, Default)]
struct Pool {
    idle: Mutex<Vec<PassState>>,
    /// Bytes in the workspaces of live forward passes, and the number of these passes.
    live: AtomicUsize,
    passes: AtomicUsize,
}

/// Resources of a forward pass that are live until its backward pass.
#[derive(Debug)]
struct PassState {
    work: Workspace,
    weights: Vec<Arc<Memory>>,
    forward_state: ForwardState,
    executor: Option<Arc<ScheduleExecutor>>,
    scalars: Scalars,
    /// Contribution of the pass to the bytes of live passes.
    bytes: usize,
}

impl Pool {
    fn lock_idle(&self) -> MutexGuard<'_, Vec<PassState>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the resources of a pass to the pool.
    fn recycle(&self, mut pass: PassState) {
        self.live.fetch_sub(std::mem::take(&mut pass.bytes), Ordering::Relaxed);
        self.passes.fetch_sub(1, Ordering::Relaxed);
        pass.weights.clear();
        pass.forward_state = ForwardState::default();
        pass.executor = None;
        let mut idle = self.lock_idle();
        if idle.len() < MAX_IDLE_PASSES {
            idle.push(pass);
        }
    }
}

/// A forward pass that waits for its backward pass. Dropping it frees the activations.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let both = ortrain::ForwardBackward::new(setup::MODEL.into(), Default::default())?;
/// # let memories = both.weights().iter().map(|weight| weight.to_memory()).collect::<ortrain::Result<Vec<_>>>()?;
/// # let weights: Vec<ortrain::InputView<'_>> = both.weight_views(&memories);
/// # let batch = setup::batch();
/// # let x = [ortrain::InputView::from(&batch[0])];
/// let live = both.forward(&weights, &x, &mut |_, _| Ok(()))?;
/// assert!(live.bytes() > 0);
/// drop(live);
/// assert_eq!(both.live_bytes(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct LiveForward {
    /// `None` after its backward pass.
    pass: Option<PassState>,
    pool: Arc<Pool>,
}

impl LiveForward {
    /// Returns the bytes of its activations.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.pass.as_ref().map_or(0, |pass| pass.bytes)
    }
}

impl Drop for LiveForward {
    fn drop(&mut self) {
        if let Some(pass) = self.pass.take() {
            self.pool.recycle(pass);
        }
    }
}

/// Executables for shapes seen so far.
#[derive(Debug)]
struct Prepared {
    executables: ExecutableCache,
    signature: Signature,
    /// Target of planning: an empty workspace of the same limit.
    planning_workspace: Workspace,
}

impl Prepared {
    /// Checks the inputs and returns their executor.
    fn executor(&mut self, inputs: &[InputView<'_>]) -> Result<Arc<ScheduleExecutor>> {
        self.signature.check(inputs)?;
        let cached = self.executables.executor(&self.planning_workspace, inputs);
        cached.map_err(|error| {
            over_limit::explain(error, &self.executables, &self.signature, &self.planning_workspace, inputs)
        })
    }
}

/// Source graphs of the exported models of a [`ForwardBackward`].
#[derive(Debug)]
struct Graphs {
    /// Training graph without gradient accumulators.
    training: Graph,
    evaluation: Graph,
    opset: i64,
    model: ModelProto,
}

/// A model with its forward and backward pass as two calls. Each call receives the weights.
///
/// A forward pass computes the outputs of the model. The backward pass receives their gradients and computes
/// the gradients of inputs and weights. In between, a [`LiveForward`] owns the activations. Any number of
/// other passes may run in the meantime.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let batch = setup::batch();
/// use ortrain::{ForwardBackward, ForwardBackwardOptions, InputView, Tensor, collect};
///
/// let both = ForwardBackward::new(setup::MODEL.into(), ForwardBackwardOptions::default())?;
/// let memories = both.weights().iter().map(|weight| weight.to_memory()).collect::<Result<Vec<_>, _>>()?;
/// let rooms = both.weights().iter().map(|weight| weight.allocate_gradient()).collect::<Result<Vec<_>, _>>()?;
/// let (weights, mut gradients) = (both.weight_views(&memories), both.gradient_targets(&rooms));
///
/// let mut live = None;
/// let logits = collect(|deliver| {
///     live = Some(both.forward(&weights, &[InputView::from(&batch[0])], deliver)?);
///     Ok(())
/// })?;
/// let seed = Tensor::f32(logits[0].dims(), &vec![1.0; logits[0].len()]);
/// let of_x =
///     collect(|deliver| both.backward(live.as_mut().unwrap(), &[InputView::from(&seed)], &mut gradients, deliver))?;
/// assert_eq!(of_x[0].dims(), batch[0].dims());
/// assert!(!rooms[0].is_zero()?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ForwardBackward {
    label: String,
    weights: Vec<Weight>,
    statistics: Vec<(Weight, Arc<Memory>)>,
    inputs: Vec<ValueInfo>,
    outputs: Vec<ValueInfo>,
    /// Indices of the outputs with gradients.
    differentiable: Vec<usize>,
    /// Indices of the inputs with gradients.
    input_gradients: Vec<usize>,
    /// Names of all gradients.
    names: Vec<String>,
    training: Mutex<Prepared>,
    /// `None` for an imported training graph.
    evaluation: Option<Mutex<Prepared>>,
    graphs: Option<Box<Graphs>>,
    pool: Arc<Pool>,
    backend: Arc<dyn Backend>,
    run: RunOptions,
    /// Bytes of the weights and their gradients, which the memory limit covers.
    parameter_bytes: usize,
    seed: u64,
    /// Nodes of a forward pass that draw random numbers.
    random_nodes: Vec<String>,
    passes: AtomicU64,
}

/// Returns the weights that the outputs depend on, without running statistics if the model is trained: these update
/// themselves.
fn default_weights(label: &str, graph: &Graph, is_trained: bool) -> Result<Vec<String>> {
    let mut names = find_reached_weights(label, graph)?;
    if is_trained {
        // Ambiguous statistics are reported later.
        let statistics = running_statistics(graph, BatchNormMode::Train, &FxHashSet::default());
        let moved: FxHashSet<String> =
            statistics.unwrap_or_default().into_iter().map(|statistic| statistic.name).collect();
        names.retain(|name| !moved.contains(name));
    }
    Ok(names)
}

/// Returns the indices of the outputs with gradients.
fn float_outputs(label: &str, outputs: &[ValueInfo]) -> Result<Vec<usize>> {
    let floats: Vec<usize> = (0..outputs.len()).filter(|&k| outputs[k].dtype.is_float()).collect();
    if floats.is_empty() {
        let descriptions: Vec<String> =
            outputs.iter().map(|info| format!("{:?} is {info}", info.name)).collect();
        let reason =
            format!("it has no float output, so there are no gradients: {}", descriptions.join(", "));
        return Err(Error::WrongModel { model: label.to_owned(), reason });
    }
    Ok(floats)
}

/// Returns the roles of the inputs of a graph: user inputs, then planes, then the flag that resets gradients.
fn roles_of_inputs(graph: &Graph, users: usize, planes: usize) -> Vec<Role> {
    let role = |k: usize| match k.checked_sub(users) {
        None => Role::User,
        Some(k) if k < planes => Role::Plane(PlaneId(k as u32), 0),
        Some(_) => Role::ResetFlag,
    };
    (0..graph.inputs.len()).map(role).collect()
}

/// Stores the initial values of running statistics in memory of the backend.
fn allocate_statistics(
    backend: &Arc<dyn Backend>,
    statistics: Vec<Weight>,
) -> Result<Vec<(Weight, Arc<Memory>)>> {
    let placement = Placement::of(backend);
    let allocate = |weight: Weight| {
        let memory = placement.allocate(weight.initial.data().len()).map_err(RunError::from)?;
        memory.write(0, weight.initial.data())?;
        Ok((weight, Arc::new(memory)))
    };
    statistics.into_iter().map(allocate).collect()
}

/// Gradients of inputs and weights.
#[derive(Default)]
struct FoundGradients {
    /// Indices of the inputs with a gradient.
    input_gradients: Vec<usize>,
    /// Gradients of these inputs.
    results: Vec<ValueId>,
    of_weights: Vec<ValueId>,
}

impl FoundGradients {
    /// Separates the gradients of targets: the selected inputs, then the weights. An input without a gradient is an
    /// error only if the caller named it.
    fn new(
        targets: &[ValueId],
        gradients: &[Option<ValueId>],
        selected_inputs: &[usize],
        are_named: bool,
        without: impl Fn(ValueId) -> Error,
    ) -> Result<FoundGradients> {
        let mut found = FoundGradients::default();
        for (at, (&target, gradient)) in targets.iter().zip(gradients).enumerate() {
            match (gradient, selected_inputs.get(at)) {
                (Some(gradient), Some(&input)) => {
                    found.input_gradients.push(input);
                    found.results.push(*gradient);
                }
                (Some(gradient), None) => found.of_weights.push(*gradient),
                (None, Some(_)) if !are_named => {}
                (None, _) => return Err(without(target)),
            }
        }
        Ok(found)
    }
}

impl ForwardBackward {
    /// Prepares the two passes of a model. The model has outputs; a loss is not required.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use ortrain::{ForwardBackward, ForwardBackwardOptions};
    ///
    /// let options = ForwardBackwardOptions::default().weights(["fc2.weight", "fc2.bias"]).inputs(Vec::<&str>::new());
    /// let both = ForwardBackward::new(setup::MODEL.into(), options)?;
    /// assert_eq!(both.gradient_names(), ["fc2.weight_grad", "fc2.bias_grad"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the model cannot be read, differentiated or run; a name is unknown or occurs twice; or no gradient
    /// reaches a named value.
    pub fn new(model: ModelSource, options: ForwardBackwardOptions) -> Result<ForwardBackward> {
        let interrupt = options.run.interrupt.clone();
        interruptible(interrupt.as_ref(), || ForwardBackward::build(model, options))
    }

    fn build(model: ModelSource, options: ForwardBackwardOptions) -> Result<ForwardBackward> {
        let label = model.label("the model");
        let run = options.run;
        let backend = run.open_backend()?;
        let mut model = model.load_for_gradients()?;
        let opset = opset_of(&model.proto);
        let names = match &options.weights {
            Some(names) => names.clone(),
            None => default_weights(&label, &graph_to_run(&label, &model)?, options.training.is_some())?,
        };
        check_unique(&names)?;
        let inner = constants_of_subgraphs(&model.proto);
        let inner = names.iter().map(String::as_str).filter(|name| inner.iter().any(|inner| inner == name));
        lift_from_subgraphs(&label, &mut model.proto, &inner.collect::<Vec<_>>())?;
        let statistics = match options.training {
            Some(mode) => {
                let outputs = postprocessing::output_names(&model);
                let outputs: Vec<String> = outputs.into_iter().map(str::to_owned).collect();
                let outputs: Vec<&str> = outputs.iter().map(String::as_str).collect();
                let trained = names.iter().map(String::as_str).collect();
                updated_statistics(&label, &mut model, mode, &trained, &outputs)?
            }
            None => Vec::new(),
        };

        let fail = |source| Error::model(&label, source);
        let mut graph = graph_to_run(&label, &model)?;
        check_forward(&label, &graph)?;
        let user_inputs = graph.inputs.clone();
        let mut to_inputs = |names: &[String]| -> Result<Vec<Weight>> {
            names.iter().map(|name| initializer_to_input(&label, &mut graph, name)).collect()
        };
        let (weights, statistics) = (to_inputs(&names)?, to_inputs(&statistics)?);
        infer(&mut graph).map_err(fail)?;
        if graph.outputs.is_empty() {
            return Err(Error::WrongModel { model: label, reason: "it has no outputs".into() });
        }
        let info = |id: &ValueId| ValueInfo::of(&label, &graph, *id);
        let inputs = user_inputs.iter().map(info).collect::<Result<Vec<_>>>()?;
        let outputs = graph.outputs.iter().map(info).collect::<Result<Vec<_>>>()?;
        let evaluation = graph.clone();
        if let Some(mode) = options.training {
            let trained = names.iter().map(String::as_str).collect();
            let updated = statistics.iter().map(|weight| weight.name.as_str()).collect();
            set_training_mode(&mut graph, opset, mode, &trained, &updated).map_err(fail)?;
            infer(&mut graph).map_err(fail)?;
        }

        let random = random_nodes(&graph);
        // The forward pass ends after the outputs.
        let differentiable = float_outputs(&label, &outputs)?;
        let seeds = append_yield(&mut graph, &differentiable);
        let selected_inputs = inputs_with_gradients(&label, &inputs, options.inputs.as_deref())?;
        let mut targets: Vec<ValueId> = selected_inputs.iter().map(|&k| user_inputs[k]).collect();
        targets.extend(weights.iter().filter_map(|weight| graph.find(&weight.name)));
        let gradients = backpropagate(&mut graph, &seeds, &targets).map_err(fail)?;
        let from: Vec<ValueId> = seeds.iter().map(|&(value, _)| value).collect();
        let without = |target: ValueId| fail(no_path_error(&graph, target, &from));
        let FoundGradients { input_gradients, results, of_weights } =
            FoundGradients::new(&targets, &gradients, &selected_inputs, options.inputs.is_some(), without)?;
        if results.is_empty() && of_weights.is_empty() {
            return Err(Error::Argument(format!(
                "{label} has no gradient: no weight is named, and its outputs depend on no float input"
            )));
        }
        graph.outputs = results.iter().chain(&of_weights).copied().collect();
        let names = graph.outputs.iter().map(|&id| graph.name_of(id).to_owned()).collect();
        let training_graph = graph.clone();

        // Gradients of weights are written to buffers of the caller. Gradients of inputs have varying sizes
        // and are delivered.
        graph.outputs = results;
        let buffers = accumulate_into_inputs(&mut graph, &weights, &of_weights);
        unwrap_gradients(&mut graph).map_err(fail)?;
        infer(&mut graph).map_err(fail)?;
        let planes = weights.len() + statistics.len() + buffers;
        let roles = |graph: &Graph| roles_of_inputs(graph, user_inputs.len(), planes);
        let bytes = |weight: &Weight| weight.initial.data().len();
        let parameter_bytes =
            2 * weights.iter().map(bytes).sum::<usize>() + statistics.iter().map(bytes).sum::<usize>();
        let prepared = |graph: Graph, roles: Vec<Role>| {
            Mutex::new(Prepared {
                executables: ExecutableCache::new(graph, roles, backend.clone())
                    .with_precision(run.precision),
                signature: Signature::new(inputs.clone()),
                planning_workspace: run.workspace(&backend, parameter_bytes),
            })
        };
        let (roles_of_training, roles_of_evaluation) = (roles(&graph), roles(&evaluation));
        Ok(ForwardBackward {
            training: prepared(graph, roles_of_training),
            evaluation: Some(prepared(evaluation.clone(), roles_of_evaluation)),
            graphs: Some(Box::new(Graphs {
                training: training_graph,
                evaluation,
                opset,
                model: model.proto,
            })),
            names,
            weights,
            statistics: allocate_statistics(&backend, statistics)?,
            inputs,
            outputs,
            differentiable,
            input_gradients,
            label,
            pool: Arc::default(),
            backend: backend.clone(),
            run: run.clone(),
            parameter_bytes,
            seed: options.seed.cast_unsigned(),
            random_nodes: random,
            passes: AtomicU64::new(0),
        })
    }

    /// Prepares the two passes of the training graph of a session. The graph must have a YieldOp
    /// ([`ForwardBackward::training_model`]).
    ///
    /// It has no weights: forward passes receive all inputs, and backward passes deliver all outputs.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use ortrain::{ForwardBackward, ForwardBackwardOptions, InferenceSession, ModelSource, SessionOptions};
    ///
    /// let model = ForwardBackward::new(setup::MODEL.into(), ForwardBackwardOptions::default())?.training_model()?;
    /// let session = InferenceSession::new(ModelSource::from_proto(&model)?, SessionOptions::default())?;
    /// let both = ForwardBackward::of_session(&session)?;
    /// assert_eq!((both.inputs().len(), both.weights().len()), (5, 0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the model of the session has no YieldOp.
    pub fn of_session(session: &InferenceSession) -> Result<ForwardBackward> {
        let Parts { label, graph, backend, run } = session.session_parts();
        let (yield_inputs, yield_outputs) = find_yield(graph).ok_or_else(|| Error::WrongModel {
            model: label.to_owned(),
            reason: "it has no YieldOp, the end of the forward pass; a training graph of ForwardBackward needs one".into(),
        })?;
        let info = |id: &ValueId| ValueInfo::of(label, graph, *id);
        let inputs = graph.inputs.iter().map(info).collect::<Result<Vec<_>>>()?;
        let outputs = yield_inputs.iter().map(info).collect::<Result<Vec<_>>>()?;
        let roles = vec![Role::User; graph.inputs.len()];
        let prepared = Prepared {
            executables: ExecutableCache::new(graph.clone(), roles, backend.clone())
                .with_precision(run.precision),
            signature: Signature::new(inputs.clone()),
            planning_workspace: run.workspace(backend, 0),
        };
        Ok(ForwardBackward {
            label: label.to_owned(),
            weights: Vec::new(),
            statistics: Vec::new(),
            inputs,
            outputs,
            differentiable: yield_outputs,
            input_gradients: Vec::new(),
            names: graph.outputs.iter().map(|&id| graph.name_of(id).to_owned()).collect(),
            training: Mutex::new(prepared),
            evaluation: None,
            graphs: None,
            pool: Arc::default(),
            backend: backend.clone(),
            run: run.clone(),
            parameter_bytes: 0,
            seed: 0,
            random_nodes: random_nodes(graph),
            passes: AtomicU64::new(0),
        })
    }

    /// Returns the weights, in the order in which calls expect them.
    #[must_use]
    pub fn weights(&self) -> &[Weight] {
        &self.weights
    }

    /// Returns views of weights in memories, one for each weight, as arguments of calls.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// let both = ortrain::ForwardBackward::new(setup::MODEL.into(), Default::default())?;
    /// let memories = both.weights().iter().map(|weight| weight.to_memory()).collect::<Result<Vec<_>, _>>()?;
    /// assert_eq!(both.weight_views(&memories)[0].dims, [96, 64]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn weight_views<'a>(&'a self, memories: &'a [Arc<Memory>]) -> Vec<InputView<'a>> {
        let view = |(weight, memory): (&'a Weight, &'a Arc<Memory>)| {
            InputView::in_memory(weight.initial.dtype(), weight.initial.dims(), memory)
        };
        self.weights.iter().zip(memories).map(view).collect()
    }

    /// Returns targets for the gradients of weights in memories, one for each weight, as arguments of calls.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// let both = ortrain::ForwardBackward::new(setup::MODEL.into(), Default::default())?;
    /// let memories =
    ///     both.weights().iter().map(|weight| weight.allocate_gradient()).collect::<Result<Vec<_>, _>>()?;
    /// assert_eq!(both.gradient_targets(&memories)[0].dims, [96, 64]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn gradient_targets<'a>(&'a self, memories: &'a [Arc<Memory>]) -> Vec<OutputTarget<'a>> {
        let target = |(weight, memory): (&'a Weight, &'a Arc<Memory>)| {
            OutputTarget::in_memory(weight.initial.dtype(), weight.initial.dims(), memory)
        };
        self.weights.iter().zip(memories).map(target).collect()
    }

    /// Returns the running statistics that forward passes update, with their memory. They exist only with
    /// [`ForwardBackwardOptions::training`].
    pub fn statistics(&self) -> impl Iterator<Item = (&Weight, &Arc<Memory>)> {
        self.statistics.iter().map(|(weight, memory)| (weight, memory))
    }

    /// Returns the inputs of the model, in order.
    #[must_use]
    pub fn inputs(&self) -> &[ValueInfo] {
        &self.inputs
    }

    /// Returns the outputs of the model, in order.
    #[must_use]
    pub fn outputs(&self) -> &[ValueInfo] {
        &self.outputs
    }

    /// Returns the outputs with gradients as inputs of a backward pass: the float outputs, in order.
    pub fn differentiable_outputs(&self) -> impl Iterator<Item = &ValueInfo> {
        self.differentiable.iter().map(|&k| &self.outputs[k])
    }

    /// Returns the inputs with gradients that a backward pass computes, in order.
    pub fn differentiable_inputs(&self) -> impl Iterator<Item = &ValueInfo> {
        self.input_gradients.iter().map(|&k| &self.inputs[k])
    }

    /// Returns the names of all gradients: first of inputs, then of weights.
    #[must_use]
    pub fn gradient_names(&self) -> Vec<&str> {
        self.names.iter().map(String::as_str).collect()
    }

    /// Returns the bytes of the activations of all live forward passes.
    #[must_use]
    pub fn live_bytes(&self) -> usize {
        self.pool.live.load(Ordering::Relaxed)
    }

    /// Returns the training graph as a model: the forward pass, a `YieldOp` of `com.microsoft`, and the
    /// backward pass.
    ///
    /// The `YieldOp` maps the outputs to their gradients. Weights are inputs after the inputs of the model;
    /// the outputs are the gradients.
    ///
    /// # Errors
    /// If the graph cannot be expressed at the model's opset.
    pub fn training_model(&self) -> Result<ModelProto> {
        let Graphs { training, opset, model, .. } = self.graphs()?;
        training_message(&self.label, model, training.clone(), *opset)
    }

    /// Returns the evaluation graph as a model. Weights are inputs after the inputs of the model.
    ///
    /// # Errors
    /// If the graph cannot be expressed at the model's opset.
    pub fn evaluation_model(&self) -> Result<ModelProto> {
        let Graphs { evaluation, opset, model, .. } = self.graphs()?;
        training_message(&self.label, model, evaluation.clone(), *opset)
    }

    /// Returns the nodes that draw random numbers in a forward pass, as messages name them. Without such
    /// nodes, forward passes are deterministic.
    #[must_use]
    pub fn random_nodes(&self) -> &[String] {
        &self.random_nodes
    }

    /// Returns the graphs and the programs compiled so far, as text.
    #[must_use]
    pub fn dump(&self) -> String {
        let mut out = String::new();
        let training = std::iter::once(("training", &self.training));
        for (name, prepared) in
            training.chain(self.evaluation.iter().map(|prepared| ("evaluation", prepared)))
        {
            let prepared = lock_prepared(prepared);
            out += &format!("{name} {}\n", prepared.executables.graph());
            for schedule in prepared.executables.schedules() {
                out += &format!("{name} {schedule}\n");
            }
        }
        out
    }

    fn graphs(&self) -> Result<&Graphs> {
        self.graphs.as_deref().ok_or_else(|| self.no_model_error())
    }

    /// Returns the error of a call that needs the original model of a training graph.
    fn no_model_error(&self) -> Error {
        Error::Argument(format!(
            "{} is a training graph, which cannot be evaluated; evaluate the model from which it was made",
            self.label
        ))
    }

    /// Returns the device of the passes: `"cpu"` is this process.
    #[must_use]
    pub fn device(&self) -> &str {
        self.backend.device()
    }

    /// Allocates zeroed memory for the gradient of a weight on the [device](ForwardBackward::device), for a
    /// backward pass to write in place. [`Weight::room`] is host memory, to which gradients are copied.
    ///
    /// # Errors
    /// If the device cannot allocate the memory.
    pub fn allocate_gradient_on_device(&self, weight: &Weight) -> Result<Arc<Memory>> {
        let memory = Placement::of(&self.backend).allocate(weight.initial.data().len());
        Ok(Arc::new(memory.map_err(RunError::from)?))
    }
}

fn lock_prepared(prepared: &Mutex<Prepared>) -> MutexGuard<'_, Prepared> {
    prepared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the float initializers that a gradient of the outputs reaches, in the order of the model.
fn find_reached_weights(label: &str, graph: &Graph) -> Result<Vec<String>> {
    let mut graph = graph.clone();
    let fail = |source| Error::model(label, source);
    infer(&mut graph).map_err(fail)?;
    let is_float = |graph: &Graph, id: ValueId| graph.value(id).ty.dtype().is_some_and(DType::is_float);
    let node_outputs: FxHashSet<ValueId> = graph.nodes.iter().flat_map(Node::present_outputs).collect();
    let floats: Vec<ValueId> = graph
        .value_ids()
        .filter(|&id| {
            graph.value(id).constant.is_some() && is_float(&graph, id) && !node_outputs.contains(&id)
        })
        .collect();
    let differentiable: Vec<usize> =
        (0..graph.outputs.len()).filter(|&k| is_float(&graph, graph.outputs[k])).collect();
    let seeds = append_yield(&mut graph, &differentiable);
    let names: Vec<String> = floats.iter().map(|&id| graph.name_of(id).to_owned()).collect();
    let (reached, _) = backpropagate_known(&mut graph, &seeds, &floats).map_err(fail)?;
    Ok(names.into_iter().zip(reached).filter_map(|(name, reached)| reached.then_some(name)).collect())
}

fn check_unique(names: &[String]) -> Result<()> {
    let mut unique = FxHashSet::default();
    match names.iter().find(|name| !unique.insert(*name)) {
        None => Ok(()),
        Some(name) => Err(Error::Argument(format!("weight {name:?} is named twice"))),
    }
}

/// Converts an initializer into an input of the graph.
fn initializer_to_input(label: &str, graph: &mut Graph, name: &str) -> Result<Weight> {
    let constants = |graph: &Graph| -> Vec<String> {
        let ids = graph.value_ids().filter(|&id| graph.value(id).constant.is_some());
        ids.map(|id| graph.name_of(id).to_owned()).collect()
    };
    let constant = graph.find(name).filter(|&id| !graph.inputs.contains(&id));
    let Some((id, initial)) = constant.and_then(|id| Some((id, graph.value(id).constant.clone()?))) else {
        let known = constants(graph);
        return Err(Error::Argument(format!(
            "{label} has no initializer {name:?}{}",
            hint(name, known.iter().map(String::as_str))
        )));
    };
    if !initial.dtype().is_float() {
        return Err(Error::Argument(format!(
            "weight {name:?} is {}{:?}, but only floats have gradients",
            initial.dtype(),
            initial.dims()
        )));
    }
    let value = graph.value_mut(id);
    value.constant = None;
    value.ty = ValueType::tensor(initial.dtype(), initial.dims());
    graph.inputs.push(id);
    Ok(Weight { name: name.to_owned(), initial })
}

/// Returns the indices of the inputs that require gradients.
fn inputs_with_gradients(label: &str, inputs: &[ValueInfo], names: Option<&[String]>) -> Result<Vec<usize>> {
    let Some(names) = names else {
        return Ok((0..inputs.len()).filter(|&k| inputs[k].dtype.is_float()).collect());
    };
    let position = |name: &String| {
        let Some(k) = inputs.iter().position(|info| info.name == *name) else {
            let known = inputs.iter().map(|info| info.name.as_str());
            return Err(Error::Argument(format!(
                "{label} has no input {name:?}, so it cannot return its gradient{}",
                hint(name, known)
            )));
        };
        if !inputs[k].dtype.is_float() {
            return Err(Error::Argument(format!(
                "input {name:?} is {}, but only floats have gradients",
                inputs[k]
            )));
        }
        Ok(k)
    };
    let mut indices = names.iter().map(position).collect::<Result<Vec<usize>>>()?;
    indices.sort_unstable();
    indices.dedup();
    Ok(indices)
}

/// Accumulates the gradients of weights into new inputs of the graph, which are bound to planes. Returns
/// their number.
fn accumulate_into_inputs(graph: &mut Graph, weights: &[Weight], gradients: &[ValueId]) -> usize {
    let mut buffers = Vec::with_capacity(gradients.len());
    for weight in weights {
        let ty = ValueType::tensor(weight.initial.dtype(), weight.initial.dims());
        let id =
            graph.add_value(&format!("{}{}", weight.name, crate::state::gradient_names::BUFFER_SUFFIX), ty);
        graph.inputs.push(id);
        buffers.push(id);
    }
    let reset =
        graph.add_value(crate::state::gradient_names::RESET_FLAG, ValueType::tensor(DType::Bool, &[1]));
    graph.inputs.push(reset);
    let updated: Vec<String> = weights
        .iter()
        .map(|weight| format!("{}{}", weight.name, crate::state::gradient_names::UPDATED_SUFFIX))
        .collect();
    let accumulations: Vec<Accumulation<'_>> = (0..gradients.len())
        .map(|k| Accumulation {
            node: graph.unused_name(&format!("GradientAccumulator{k}")).to_string(),
            buffer: buffers[k],
            gradient: gradients[k],
            updated: &updated[k],
        })
        .collect();
    append_accumulators(graph, reset, &accumulations);
    buffers.len()
}
