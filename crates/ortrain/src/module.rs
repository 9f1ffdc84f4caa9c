//! A model in training.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ortrain_expr::unstoppable;
use ortrain_graph::{DType, Graph, Tensor, ValueId};
use ortrain_onnx::{LARGEST_MESSAGE, LoadedModel};
use ortrain_ops::Role;
use ortrain_ops::passes::{infer::infer, updates::written, versions::upgrade};
use ortrain_ops::training::{classes_last_note, with_classes_last};
use ortrain_program::{
    ALIGNMENT, Backend, Bf16Fallback, Bindings, Deliver, Delivered, Given, GradientMode as ProgramEntry,
    HOST, ITERATION_LIMIT, Interrupt, LargeBuffer, Memory, MemoryNeed, OverLimit, PlaneId, Precision,
    RunContext, RunError, Scalars, Schedule, Workspace,
};

use crate::anomaly::{self, Again, Anomaly};
use crate::backend::limits_of;
use crate::class_axis;
use crate::executable_cache::{ExecutableCache, interruptible};
use crate::inputs::Signature;
use crate::io_binding::{described, is_read_in_place, whole_copy};
use crate::outputs::{Fill, check_destinations};
use crate::parameter_binding::{self, bind, is_gradient};
use crate::placement::Home;
use crate::profile::{Collector, Products};
use crate::state::{Entry, PlaneLayout, StateLayout};
use crate::step_inputs::StepInputs;
use crate::trace::Trace;
use crate::{
    CheckpointState, Destination, Error, Feed, Lent, ModelSource, ParameterView, Profile, ProfileOptions,
    Result, ValueInfo, default_backend, export, file_kind, over_limit, postprocessing,
};

/// How a [`Module`] is made.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let made = setup::artifacts()?;
/// use ortrain::{CheckpointState, ModelSource, Module, ModuleOptions, backend};
///
/// # let mut state = CheckpointState::from_bytes(made.checkpoint_bytes()?)?;
/// # let train = ModelSource::from_proto(&made.training_model)?;
/// let options = ModuleOptions::default().backend(backend("cpu", 2)?).memory_limit(64 << 20);
/// let module = Module::new(train, &mut state, None, options)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ModuleOptions {
    /// What runs it; [`default_backend`] unless given.
    pub backend: Option<Arc<dyn Backend>>,
    /// Most bytes that the module may take: see [`ModuleOptions::memory_limit`].
    pub memory_limit: Option<usize>,
    /// Most iterations of a loop; [`ITERATION_LIMIT`] unless given.
    pub iteration_limit: Option<u64>,
    /// How exactly inner products are computed: see [`ModuleOptions::precision`].
    pub precision: Precision,
    /// What may multiply bfloat16 where there is no AMX: see [`ModuleOptions::bf16_fallback`].
    pub bf16_fallback: Bf16Fallback,
    /// Who may end a step early: see [`ModuleOptions::interrupt`].
    pub interrupt: Option<Interrupt>,
    /// Whether a step that makes NaN or infinities fails: see [`ModuleOptions::detect_anomaly`].
    pub detect_anomaly: bool,
}

impl ModuleOptions {
    /// With this backend.
    ///
    /// ```
    /// use ortrain::{ModuleOptions, backend};
    ///
    /// let options = ModuleOptions::default().backend(backend("reference", 0)?);
    /// # assert!(options.backend.is_some());
    /// # Ok::<(), ortrain::Error>(())
    /// ```
    #[must_use]
    pub fn backend(mut self, backend: Arc<dyn Backend>) -> ModuleOptions {
        self.backend = Some(backend);
        self
    }

    /// With at most so many bytes for everything that a step reads and writes: the planes of the parameters (frozen ones
    /// and running statistics too) and of their gradients, the constants of its program, the arena of its values, the
    /// scratch of its kernels. All of these are known before a step; what would take more is refused before anything is
    /// allocated, by an error that names the largest buffers. Moments of an optimizer, and tensors of the caller, do not
    /// count.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let made = setup::artifacts()?;
    /// use ortrain::{CheckpointState, ErrorKind, ModelSource, Module, ModuleOptions};
    ///
    /// # let mut state = CheckpointState::from_bytes(made.checkpoint_bytes()?)?;
    /// # let train = ModelSource::from_proto(&made.training_model)?;
    /// let options = ModuleOptions::default().memory_limit(1000);
    /// let error = Module::new(train, &mut state, None, options).unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::MemoryLimit);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn memory_limit(mut self, bytes: usize) -> ModuleOptions {
        self.memory_limit = Some(bytes);
        self
    }

    /// With at most so many iterations of a loop ([`ITERATION_LIMIT`] unless given). A loop that still runs then is
    /// stopped by an error that names it.
    ///
    /// ```
    /// use ortrain::ModuleOptions;
    ///
    /// let options = ModuleOptions::default().iteration_limit(10_000);
    /// # assert_eq!(options.iteration_limit, Some(10_000));
    /// ```
    #[must_use]
    pub fn iteration_limit(mut self, iterations: u64) -> ModuleOptions {
        self.iteration_limit = Some(iterations);
        self
    }

    /// With inner products of this precision instead of [`Precision::F32`]: those of matrix products and convolutions, of
    /// the training model and of the evaluation model, whose sums are `float32`. Sums and everything else stay `float32`, and
    /// so do inputs, outputs, parameters and gradients. Products with short sides ([`Precision::of_product`]), and those of
    /// attention that runs as one instruction, are computed in `float32` all the same.
    ///
    /// AMX computes it, or what [`ModuleOptions::bf16_fallback`] allows; [`Module::bf16_unit`] says which.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let made = setup::artifacts()?;
    /// use ortrain::{Bf16Fallback, CheckpointState, ModelSource, Module, ModuleOptions, Precision};
    ///
    /// # let mut state = CheckpointState::from_bytes(made.checkpoint_bytes()?)?;
    /// # let train = ModelSource::from_proto(&made.training_model)?;
    /// let options = ModuleOptions::default().precision(Precision::Bf16).bf16_fallback(Bf16Fallback::Emulated);
    /// let module = Module::new(train, &mut state, None, options)?;
    /// assert_eq!(module.precision(), Precision::Bf16);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn precision(mut self, precision: Precision) -> ModuleOptions {
        self.precision = precision;
        self
    }

    /// With this instead of AMX, where a precision needs one and the machine has none. Without ([`Bf16Fallback::None`])
    /// that is an error: nothing is ever computed in another way than was asked for.
    ///
    /// ```
    /// use ortrain::{Bf16Fallback, ModuleOptions};
    ///
    /// let options = ModuleOptions::default().bf16_fallback(Bf16Fallback::Avx512Bf16);
    /// # assert_eq!(options.bf16_fallback, Bf16Fallback::Avx512Bf16);
    /// ```
    #[must_use]
    pub fn bf16_fallback(mut self, fallback: Bf16Fallback) -> ModuleOptions {
        self.bf16_fallback = fallback;
        self
    }

    /// With somebody who may end a step early. Every tenth of a second, between two instructions, it is asked; where it says
    /// so the step ends with [`RunError::Interrupted`], and the state is as it was. Gradients are, too, if the step
    /// should have added to them; if it should have replaced them ([`Module::lazy_reset_grad`]), they are zero, and the next
    /// step replaces them.
    ///
    /// To put gradients back, a step of more than a few hundredths of a second that adds to gradients other than zero keeps a
    /// copy of them, if the memory limit leaves room; without it such a step goes on to its end.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let made = setup::artifacts()?;
    /// # let mut state = ortrain::CheckpointState::from_bytes(made.checkpoint_bytes()?)?;
    /// # let train = ortrain::ModelSource::from_proto(&made.training_model)?;
    /// use std::sync::Arc;
    /// use std::sync::atomic::{AtomicBool, Ordering};
    ///
    /// use ortrain::{Interrupt, Module, ModuleOptions};
    ///
    /// let cancelled = Arc::new(AtomicBool::new(false));
    /// let asked = cancelled.clone();
    /// let interrupt = Interrupt::new(move || asked.load(Ordering::Relaxed));
    /// let module = Module::new(train, &mut state, None, ModuleOptions::default().interrupt(interrupt))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn interrupt(mut self, interrupt: Interrupt) -> ModuleOptions {
        self.interrupt = Some(interrupt);
        self
    }

    /// With steps that fail where they make NaN or infinities: after each training step the loss, the gradients and the
    /// running statistics are looked at, and the other results for NaN; after an evaluation step its results. If one is
    /// not finite, the state is put back as it was, the step is run again so that every value can be seen, and
    /// [`Error::Anomaly`] names the node, the tensor and the index that came first, in the forward or in the backward
    /// pass.
    ///
    /// A step takes a copy of the gradients and the frozen parameters then, and reads all of them. Off, the default, it
    /// costs nothing.
    ///
    /// ```
    /// use ortrain::ModuleOptions;
    ///
    /// let options = ModuleOptions::default().detect_anomaly(true);
    /// # assert!(options.detect_anomaly);
    /// ```
    #[must_use]
    pub fn detect_anomaly(mut self, detect: bool) -> ModuleOptions {
        self.detect_anomaly = detect;
        self
    }
}

/// The number of kinds of inputs that are read where they lie, for which programs are kept.
const KEPT: usize = 32;

/// Positions and shapes of inputs that are read where they lie.
type Places = Vec<(usize, Vec<usize>)>;

/// A model that runs: its programs, what it takes, what it gives.
#[derive(Debug)]
struct Phase {
    runners: ExecutableCache,
    /// Programs for inputs that are read where they lie. The newest are last.
    lent: Vec<(Places, ExecutableCache)>,
    /// Positions of inputs that nodes write to.
    written: Vec<usize>,
    signature: Signature,
    outputs: Vec<ValueInfo>,
    /// Labels with an open axis of classes: their shape at the first step decides.
    open_labels: Vec<String>,
    /// A sentence about each axis of classes that labels said.
    notes: Vec<String>,
}

/// A training model, and perhaps the evaluation model of the same parameters, bound to a [`CheckpointState`].
///
/// The parameters lie in the state, which every call is given; the module owns the accumulated gradients and its
/// compiled programs. Several modules may be made on one state.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let (mut state, mut module, mut optimizer) = setup::training()?;
/// # let batch = setup::batch();
/// # let inputs = batch.each_ref().map(ortrain::Given::from);
/// use ortrain::collect;
///
/// for _ in 0..3 {
///     let results = collect(|deliver| module.train_step(&mut state, &inputs, deliver))?;
///     assert!(results[0].to_vec::<f32>()[0].is_finite());
///     optimizer.step(&mut state, &module)?;
///     module.lazy_reset_grad();
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Module {
    layout: Arc<StateLayout>,
    gradients: Vec<Arc<Memory>>,
    /// Tells the state that this module lives.
    _state: Arc<()>,
    /// Parameters in the order of the training model's inputs.
    parameters: Vec<Arc<str>>,
    train: Phase,
    eval: Option<Phase>,
    eval_message: Option<LoadedModel>,
    /// Files of external data that the models were read from: what is written there is theirs no longer.
    read_from: Vec<PathBuf>,
    precision: Precision,
    backend: Arc<dyn Backend>,
    /// One for all programs.
    work: Workspace,
    accumulate: bool,
    /// Whether no train step has run yet.
    is_new: bool,
    /// Train steps whose gradients are summed now.
    gathered: i64,
    /// Whether an optimizer took a step with the gradients that there are.
    gradients_are_used: AtomicBool,
    /// Whether a train step changes frozen parameters: running statistics.
    updates_frozen: bool,
    /// Whether a step that makes NaN or infinities fails.
    detect_anomaly: bool,
    /// The sentences that [`Module::take_notes`] returned.
    told: Vec<String>,
    /// The trace of steps, where one is asked for.
    pub(crate) trace: Option<Trace>,
}

/// Reads a model into a graph of the newest versions.
pub(crate) fn graph_of(label: &str, model: &LoadedModel) -> Result<Graph> {
    let shorter = postprocessing::without(model, &postprocessing::outputs(model));
    let mut graph =
        Graph::from_model(shorter.as_ref().unwrap_or(model)).map_err(|source| Error::graph(label, source))?;
    upgrade(&mut graph).map_err(|source| Error::model(label, source))?;
    Ok(graph)
}

/// The same of a model that was loaded to run: programs read its constants where they lie.
pub(crate) fn graph_to_run(label: &str, model: &LoadedModel) -> Result<Graph> {
    let mut graph = graph_of(label, model)?;
    graph.align_constants(ALIGNMENT);
    Ok(graph)
}

/// The bytes that a module holds.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let (mut state, mut module, mut optimizer) = setup::training()?;
/// let memory = module.memory();
/// assert!(memory.parameters > memory.gradients, "the first layer is frozen");
/// assert_eq!(memory.work, 0, "no step was made yet");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Parameters, frozen ones and running statistics among them. They are the state's.
    pub parameters: usize,
    /// Gradients.
    pub gradients: usize,
    /// The arena for the values of a step: as large as the largest step so far needed.
    pub work: usize,
    /// Scratch of kernels.
    pub scratch: usize,
}

impl MemoryUse {
    /// All of it.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// let memory = module.memory();
    /// assert_eq!(memory.total(), memory.parameters + memory.gradients);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn total(&self) -> usize {
        self.parameters + self.gradients + self.work + self.scratch
    }
}

impl Phase {
    fn new(
        label: &str,
        mut graph: Graph,
        roles: Vec<Role>,
        trained: Option<&CheckpointState>,
        (backend, precision): (&Arc<dyn Backend>, Precision),
        open_labels: Vec<String>,
    ) -> Result<Phase> {
        infer(&mut graph).map_err(|source| Error::model(label, source))?;
        if let Some(state) = trained {
            // Gradients and flags are not results.
            let shown = |&id: &ValueId| !is_gradient(graph.name_of(id), state);
            graph.outputs = graph.outputs.iter().copied().filter(shown).collect();
        }
        if graph.outputs.is_empty() {
            let reason = "it has no outputs, not even a loss".to_owned();
            return Err(Error::WrongModel { model: label.to_owned(), reason });
        }
        let info = |id| ValueInfo::of(label, &graph, id);
        let outputs = graph.outputs.iter().copied().map(info).collect::<Result<_>>()?;
        let given = graph.inputs.iter().zip(&roles).filter(|(_, role)| **role == Role::User);
        let inputs = given.map(|(&id, _)| info(id)).collect::<Result<_>>()?;
        let signature = Signature::new(inputs);
        let runners = ExecutableCache::new(graph, roles, backend.clone()).precision(precision);
        let changed = written(runners.graph());
        let written = (runners.user_inputs().enumerate())
            .filter_map(|(k, id)| changed.contains(&id).then_some(k))
            .collect();
        Ok(Phase { runners, lent: Vec::new(), written, signature, outputs, open_labels, notes: Vec::new() })
    }

    /// Checks number, types and shapes of inputs.
    fn check(&mut self, given: &[Given<'_>]) -> Result<()> {
        let Err(error) = self.signature.check(given) else {
            self.open_labels.clear();
            return Ok(());
        };
        let described = given.iter().map(|value| (value.dtype, value.dims, value.bytes.len()));
        self.read_labels(error, &described.collect::<Vec<_>>())
    }

    /// [`Phase::check`] of values of which element type, shape and number of bytes are known.
    fn check_described(&mut self, given: &[(DType, &[usize], usize)]) -> Result<()> {
        let Err(error) = self.signature.check_described(given.iter().copied()) else {
            self.open_labels.clear();
            return Ok(());
        };
        self.read_labels(error, given)
    }

    /// Reads the axis of classes from the shape of labels that were refused, if it is open, and checks the inputs again.
    fn read_labels(&mut self, error: Error, given: &[(DType, &[usize], usize)]) -> Result<()> {
        let graph = self.runners.graph();
        let Some((changed, note)) = self.classes_last(&error, given) else {
            return Err(class_axis::explained(error, graph));
        };
        let info = |id| ValueInfo::of("", &changed, id);
        let inputs = self.runners.user_inputs().map(info).collect::<Result<_>>()?;
        let mut signature = Signature::new(inputs);
        signature.check_described(given.iter().copied())?;
        (self.runners, self.signature) = (self.runners.with_graph(changed), signature);
        self.lent.clear();
        self.notes.push(note);
        Ok(())
    }

    /// The graph with the classes of a loss on the last axis, and a sentence about that, if the labels that an error is
    /// about say so.
    fn classes_last(&self, error: &Error, given: &[(DType, &[usize], usize)]) -> Option<(Graph, String)> {
        let Error::Input { name, .. } = error else { return None };
        let graph = self.runners.graph();
        if !self.open_labels.contains(name) {
            return None;
        }
        let at = self.signature.infos.iter().position(|info| info.name == *name)?;
        let (labels, (_, dims, _)) = (graph.find(name)?, given.get(at)?);
        let mut changed = with_classes_last(graph, labels, dims)?;
        infer(&mut changed).ok()?;
        Some((changed, classes_last_note(graph, labels, dims)?))
    }

    /// The programs for inputs, of which some lie in planes behind the first `planes`.
    fn runners_of(
        &mut self,
        inputs: StepInputs<'_>,
        planes: usize,
        backend: &Arc<dyn Backend>,
    ) -> &mut ExecutableCache {
        if inputs.lent.is_empty() {
            return &mut self.runners;
        }
        let is_of = |key: &[(usize, Vec<usize>)]| {
            let same = |((at, dims), (other, lent)): (&(usize, Vec<usize>), &(usize, Lent<'_>))| {
                at == other && dims == lent.dims
            };
            key.len() == inputs.lent.len() && key.iter().zip(inputs.lent).all(same)
        };
        if let Some(at) = self.lent.iter().position(|(key, _)| is_of(key)) {
            return &mut self.lent[at].1;
        }
        if self.lent.len() == KEPT {
            self.lent.remove(0);
        }
        let place = |(number, (at, lent)): (usize, &(usize, Lent<'_>))| {
            (*at, lent.dims.to_vec(), PlaneId((planes + number) as u32))
        };
        let places: Vec<(usize, Vec<usize>, PlaneId)> = inputs.lent.iter().enumerate().map(place).collect();
        let runners = self
            .runners
            .with_planes(places.iter().map(|(at, dims, plane)| (*at, &**dims, *plane)), backend.clone());
        self.lent.push((places.into_iter().map(|(at, dims, _)| (at, dims)).collect(), runners));
        let last = self.lent.len() - 1;
        &mut self.lent[last].1
    }

    /// Checks places for results before a step on checked inputs. Whether every shape could be checked: one that depends
    /// on values is known when it was computed.
    fn check_outputs(
        &mut self,
        work: &Workspace,
        inputs: &[Given<'_>],
        outputs: &[Destination<'_>],
    ) -> Result<bool> {
        check_destinations(&self.outputs, outputs)?;
        let runner = self.runners.executor(work, inputs)?;
        let schedule = runner.schedule();
        let mut sure = true;
        for (slot, (info, output)) in schedule.outputs.iter().zip(self.outputs.iter().zip(outputs)) {
            match &schedule.slots[slot.0 as usize].ty {
                Some((dtype, dims)) => output.check(info, *dtype, dims)?,
                None => sure = false,
            }
        }
        Ok(sure)
    }
}

impl Module {
    /// A module of a training model on a state. `eval`, the evaluation model, is needed for [`Module::eval_step`] and
    /// [`Module::export_model_for_inferencing`].
    ///
    /// The inputs of the models are told apart by their names: parameters of the state; `<p>_grad.accumulation.buffer`
    /// (also `<p>_grad` and `<p>_grad.accumulation.out`), the gradient of parameter `p`; `lazy_reset_grad`; all others
    /// are given at each step, in the model's order.
    ///
    /// The gradients start at zero, and become those the state knows as the newest.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let made = setup::artifacts()?;
    /// use ortrain::{CheckpointState, Module, ModuleOptions};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # made.write(folder.path(), "")?;
    /// # let in_folder = |name: &str| folder.path().join(name);
    /// let mut state = CheckpointState::load(in_folder("checkpoint"))?;
    /// let module = Module::new(
    ///     in_folder("training_model.onnx").into(),
    ///     &mut state,
    ///     Some(in_folder("eval_model.onnx").into()),
    ///     ModuleOptions::default(),
    /// )?;
    /// assert!(module.has_eval_model());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When a model cannot be read or run, or does not fit the state.
    pub fn new(
        train: ModelSource,
        state: &mut CheckpointState,
        eval: Option<ModelSource>,
        options: ModuleOptions,
    ) -> Result<Module> {
        let interrupt = options.interrupt.clone();
        interruptible(interrupt.as_ref(), || Module::made(train, state, eval, options))
    }

    fn made(
        train: ModelSource,
        state: &mut CheckpointState,
        eval: Option<ModelSource>,
        options: ModuleOptions,
    ) -> Result<Module> {
        let (backend, precision) = (options.backend.map_or_else(default_backend, Ok)?, options.precision);
        let backend = backend.with_precision(precision, options.bf16_fallback)?;
        let computed = (&backend, precision);
        let label = train.label("the training model");
        let (train, mut read_from) = train.load_with_files(None)?;
        let mut graph = graph_to_run(&label, &train)?;
        let open_labels = class_axis::marked(&train.proto);
        drop(train);
        file_kind::check_training(&label, &graph, state)?;
        parameter_binding::shapes_from(&graph, state)?;
        let bound = bind(&label, &mut graph, state, true)?;
        let train = Phase::new(&label, graph, bound.roles, Some(state), computed, open_labels)?;

        let mut eval_message = None;
        let eval = match eval {
            None => None,
            Some(source) => {
                let label = source.label("the evaluation model");
                let (message, files) = source.load_with_files(Some(train.runners.graph()))?;
                read_from.extend(files);
                let mut graph = graph_to_run(&label, &message)?;
                let evaluated = bind(&label, &mut graph, state, false)?;
                let mut parameters = bound.parameters.iter();
                if let Some(missing) = parameters.find(|name| !evaluated.parameters.contains(name)) {
                    let reason = file_kind::lacks_parameter(&graph, missing);
                    return Err(Error::Mismatch { model: label, reason });
                }
                let open_labels = class_axis::marked(&message.proto);
                eval_message = Some(message);
                Some(Phase::new(&label, graph, evaluated.roles, None, computed, open_labels)?)
            }
        };
        let layout = state.shared_layout().cloned().ok_or(Error::NominalState)?;
        let is_frozen = |name| state.entry(name).is_some_and(|entry| !entry.requires_grad);
        let graph = train.runners.graph();
        let updates_frozen = written(graph).into_iter().any(|id| is_frozen(graph.name_of(id)));
        let work = Workspace::limited(backend.clone(), options.memory_limit, held(&layout))
            .iteration_limit(options.iteration_limit.unwrap_or(ITERATION_LIMIT))
            .interrupt(options.interrupt);
        check_planes(&layout, options.memory_limit)?;
        let gradients = Home::of(&backend).zeroed(&layout.trainable)?;
        unstoppable(|| state.move_for_module(&backend))?;
        state.set_gradients(gradients.clone());
        Ok(Module {
            layout,
            gradients,
            _state: state.modules().clone(),
            parameters: bound.parameters,
            train,
            eval,
            eval_message,
            read_from,
            precision,
            backend,
            work,
            accumulate: true,
            is_new: true,
            gathered: 0,
            gradients_are_used: AtomicBool::new(false),
            updates_frozen,
            detect_anomaly: options.detect_anomaly,
            told: Vec::new(),
            trace: None,
        })
    }

    /// Computes the outputs and the gradients. Gradients are added to those there are, or replace them in the first step
    /// after [`Module::lazy_reset_grad`]. Results come to `deliver` in the order of [`Module::outputs`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::Given::from);
    /// let mut loss = [0; 4];
    /// module.train_step(&mut state, &inputs, &mut |at, dtype, dims, value| {
    ///     assert_eq!((at, dtype, dims.len()), (0, ortrain::DType::F32, 0));
    ///     value.copy_to(&mut loss)
    /// })?;
    /// assert!(f32::from_le_bytes(loss) > 0.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the inputs do not fit, or the run fails; nothing has changed then.
    pub fn train_step(
        &mut self,
        state: &mut CheckpointState,
        inputs: &[Given<'_>],
        deliver: &mut Deliver<'_>,
    ) -> Result<()> {
        self.check_state(state)?;
        self.train.check(inputs)?;
        self.run_train(state, StepInputs::copied(inputs), deliver)
            .map_err(|error| self.with_limit_that_fits(error, inputs, true))?;
        self.count_train_step(state);
        Ok(())
    }

    /// Checks values for a step, and makes copies of those that the step does not read where they lie. `taken` are the
    /// addresses of memory that is written to meanwhile.
    pub(crate) fn copies(
        &mut self,
        state: &CheckpointState,
        feeds: &[Feed<'_>],
        taken: &[(usize, usize)],
        training: bool,
    ) -> Result<Vec<Option<Tensor>>> {
        self.check_state(state)?;
        // An anomaly is looked for by steps on the same values again.
        let stays_in_place = !self.detect_anomaly && self.backend.device() == HOST;
        let planes: Vec<(usize, usize)> = parameter_binding::planes(state, &self.gradients)
            .into_iter()
            .filter_map(Memory::host)
            .map(|plane| (plane.as_ptr().addr(), plane.as_ptr().addr() + plane.len()))
            .collect();
        let phase = self.phase_mut(training)?;
        phase.check_described(&described(feeds))?;
        let copy = |(k, feed): (usize, &Feed<'_>)| {
            let Feed::Lent(lent) = feed else { return Ok(None) };
            let written = planes.iter().chain(taken).copied();
            let stays = stays_in_place && !phase.written.contains(&k) && is_read_in_place(lent, written);
            if stays { Ok(None) } else { whole_copy(feed) }
        };
        feeds.iter().enumerate().map(copy).collect()
    }

    /// A train step on inputs that [`Module::copies`] has checked.
    pub(crate) fn train_step_on(
        &mut self,
        state: &mut CheckpointState,
        inputs: StepInputs<'_>,
        deliver: &mut Deliver<'_>,
    ) -> Result<()> {
        self.run_train(state, inputs, deliver)
            .map_err(|error| self.explained_with_copies(error, inputs, true))?;
        self.count_train_step(state);
        Ok(())
    }

    /// The phase for a kind of steps.
    fn phase_mut(&mut self, training: bool) -> Result<&mut Phase> {
        match training {
            true => Ok(&mut self.train),
            false => self.eval.as_mut().ok_or_else(|| no_eval_model("an evaluation step")),
        }
    }

    /// An error of a step, where the step takes more than the limit with what helps, as if all inputs had been copied.
    fn explained_with_copies(&self, error: Error, inputs: StepInputs<'_>, training: bool) -> Error {
        let Error::Run(RunError::OverLimit(_)) = &error else { return error };
        if inputs.lent.is_empty() {
            return self.with_limit_that_fits(error, inputs.given, training);
        }
        let copy = |(at, lent): &(usize, Lent<'_>)| Some((*at, whole_copy(&Feed::Lent(*lent)).ok()??));
        let copies: Vec<(usize, Tensor)> = inputs.lent.iter().filter_map(copy).collect();
        let mut all: Vec<Given<'_>> = inputs.given.to_vec();
        copies.iter().for_each(|(at, tensor)| all.insert(*at, Given::from(tensor)));
        self.with_limit_that_fits(error, &all, training)
    }

    /// A train step whose results go to memory of the caller, in the order of [`Module::outputs`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::Given::from);
    /// use ortrain::Destination;
    ///
    /// let mut loss = [0.0];
    /// module.train_step_into(&mut state, &inputs, &mut [Destination::f32(&[], &mut loss)])?;
    /// assert!(loss[0] > 0.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Module::train_step`]; when the number, the types or the shapes of `outputs` are not those of the results.
    /// Nothing has changed then, except perhaps what is in `outputs`.
    pub fn train_step_into(
        &mut self,
        state: &mut CheckpointState,
        inputs: &[Given<'_>],
        outputs: &mut [Destination<'_>],
    ) -> Result<()> {
        self.check_state(state)?;
        self.train.check(inputs)?;
        let sure = (self.train.check_outputs(&self.work, inputs, outputs))
            .map_err(|error| self.with_limit_that_fits(error, inputs, true))?;
        // Shapes that depend on values are known when the step is over; what it wrote is put back if they do not fit.
        let written = || self.gradients.iter().chain(state.frozen_planes());
        let before: Vec<(Arc<Memory>, Vec<u8>)> = if sure {
            Vec::new()
        } else {
            let copy = |plane: &Arc<Memory>| Ok((plane.clone(), plane.to_vec(0, plane.len())?));
            written().map(copy).collect::<Result<_>>()?
        };
        let mut fill = Fill::new(outputs);
        self.run_train(state, StepInputs::copied(inputs), &mut |k, dtype, dims, value| {
            fill.take(k, dtype, dims, value)
        })
        .map_err(|error| self.with_limit_that_fits(error, inputs, true))?;
        if let Err(error) = fill.finish(&self.train.outputs) {
            for (plane, bytes) in &before {
                plane.write(0, bytes)?;
            }
            return Err(error);
        }
        self.count_train_step(state);
        Ok(())
    }

    /// The shape of each result on inputs that [`Module::copies`] has checked; `None` for a shape that depends on values.
    pub(crate) fn output_shapes(
        &mut self,
        inputs: StepInputs<'_>,
        training: bool,
    ) -> Result<Vec<Option<Vec<usize>>>> {
        let planes = self.layout.trainable.len() + self.layout.frozen.len() + self.gradients.len();
        let phase = match training {
            true => &mut self.train,
            false => self.eval.as_mut().ok_or_else(|| no_eval_model("an evaluation step"))?,
        };
        let runners = phase.runners_of(inputs, planes, &self.backend);
        let runner = runners.executor(&self.work, inputs.given)?;
        let schedule = runner.schedule();
        let shape = |slot: &ortrain_program::SlotId| {
            schedule.slots[slot.0 as usize].ty.as_ref().map(|(_, dims)| dims.clone())
        };
        Ok(schedule.outputs.iter().map(shape).collect())
    }

    /// An error of a step; where the step takes more than the limit, it says what would be enough.
    fn with_limit_that_fits(&self, error: Error, inputs: &[Given<'_>], training: bool) -> Error {
        let Some(phase) = self.phase(training) else { return error };
        over_limit::explained(error, &phase.runners, &phase.signature, &self.work, inputs)
    }

    /// A train step that is not counted yet.
    fn run_train(
        &mut self,
        state: &CheckpointState,
        inputs: StepInputs<'_>,
        deliver: &mut Deliver<'_>,
    ) -> Result<()> {
        // The first step replaces gradients of zero: a training that is resumed has the bits of one that was not interrupted.
        let accumulates = self.accumulate && !(self.is_new && self.gradients_are_zero()?);
        let entry = if accumulates { ProgramEntry::Accumulate } else { ProgramEntry::Overwrite };
        let mut planes = parameter_binding::planes(state, &self.gradients);
        let gradients = planes.len() - self.gradients.len()..planes.len();
        self.work.disposable_planes(if accumulates { 0..0 } else { gradients });
        let scalars = scalars(state);
        if !self.detect_anomaly {
            let (how, trace) = ((entry, scalars), self.trace.as_mut());
            let runners = self.train.runners_of(inputs, planes.len(), &self.backend);
            planes.extend(inputs.memories());
            return runners.run_traced(&mut self.work, &planes, how, trace, inputs.given, deliver);
        }
        let inputs = inputs.given;
        // Frozen planes hold running statistics.
        let written = self.layout.trainable.len()..planes.len();
        let home = Home::of(&self.backend);
        let copies = written.clone().map(|k| home.copy(planes[k])).collect::<Result<Vec<Memory>>>()?;
        let mut seen = None;
        let outputs = &self.train.outputs;
        self.train.runners.run(
            &mut self.work,
            &planes,
            entry,
            scalars,
            inputs,
            &mut |k, dtype, dims, value| {
                if seen.is_none() {
                    seen = anomaly::of_result(k, &outputs[k].name, (dtype, dims), value)?;
                }
                deliver(k, dtype, dims, value)
            },
        )?;
        let seen = match seen {
            Some(seen) => Some(seen),
            None => anomaly::of_planes(&self.layout, &planes)?,
        };
        let Some(seen) = seen else { return Ok(()) };
        for (k, copy) in written.clone().zip(&copies) {
            planes[k].write(0, &copy.to_vec(0, copy.len())?)?;
        }
        let first = written.start;
        let again: parameter_binding::Planes<'_> = planes[..first].iter().copied().chain(&copies).collect();
        let (runners, backend, layout) = (&self.train.runners, &self.backend, &*self.layout);
        let again = Again { runners, backend, planes: &again, entry, scalars, inputs, layout };
        Err(Error::Anomaly(Box::new(Anomaly { seen, path: again.path()? })))
    }

    fn gradients_are_zero(&self) -> Result<bool> {
        for plane in &self.gradients {
            if !plane.is_zero()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Checks that the gradients are not those that [`Module::lazy_reset_grad`] has given up.
    pub(crate) fn check_gradients(&self) -> Result<()> {
        if self.accumulate || self.is_new {
            return Ok(());
        }
        Err(Error::State(
            "there are no gradients to step with: the module ran no training step since its gradients were reset; call \
             it in training mode before each step of the optimizer"
                .into(),
        ))
    }

    /// Train steps whose gradients are summed now.
    pub(crate) fn gathered_steps(&self) -> i64 {
        self.gathered
    }

    /// Notes that an optimizer took its step with the gradients that there are.
    pub(crate) fn use_gradients(&self) {
        self.gradients_are_used.store(true, Ordering::Relaxed);
    }

    /// Why a step of an optimizer would not do what is meant, if so: the gradients are all zero, for no training step ran
    /// yet, or the step before took the same.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::Given::from);
    /// assert!(module.doubt_of_gradients().is_some_and(|doubt| doubt.contains("no training step yet")));
    /// module.train_step(&mut state, &inputs, &mut |_, _, _, _| Ok(()))?;
    /// assert_eq!(module.doubt_of_gradients(), None);
    /// optimizer.step(&mut state, &module)?;
    /// assert!(module.doubt_of_gradients().is_some_and(|doubt| doubt.contains("the same gradients")));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn doubt_of_gradients(&self) -> Option<&'static str> {
        // A device that fails says so in the step.
        if self.is_new && self.gradients_are_zero().unwrap_or_default() {
            return Some("the module ran no training step yet, so all gradients are zero");
        }
        let used = self.gradients_are_used.load(Ordering::Relaxed);
        used.then_some("the step before took the same gradients")
    }

    /// Returns sentences about choices that the last steps made for the caller, and forgets them: an axis of classes that the
    /// labels of a first step said.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::Given::from);
    /// module.train_step(&mut state, &inputs, &mut |_, _, _, _| Ok(()))?;
    /// assert!(module.take_notes().is_empty(), "the scores have two axes");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn take_notes(&mut self) -> Vec<String> {
        let phases = std::iter::once(&mut self.train).chain(&mut self.eval);
        let mut notes: Vec<String> = phases.flat_map(|phase| std::mem::take(&mut phase.notes)).collect();
        // The training model and the evaluation model have the same scores.
        notes.retain(|note| !self.told.contains(note));
        self.told.extend(notes.iter().cloned());
        notes
    }

    fn count_train_step(&mut self, state: &mut CheckpointState) {
        self.gathered = if self.accumulate { self.gathered.saturating_add(1) } else { 1 };
        (self.accumulate, self.is_new) = (true, false);
        self.gradients_are_used.store(false, Ordering::Relaxed);
        state.advance_train_step();
        if self.updates_frozen {
            state.bump_generation();
        }
    }

    /// Computes the outputs of the evaluation model. Results come to `deliver` in the order of [`Module::outputs`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::Given::from);
    /// let results = ortrain::collect(|deliver| module.eval_step(&state, &inputs, deliver))?;
    /// assert!(results[0].dims().is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When there is no evaluation model, the inputs do not fit, or the run fails.
    pub fn eval_step(
        &mut self,
        state: &CheckpointState,
        inputs: &[Given<'_>],
        deliver: &mut Deliver<'_>,
    ) -> Result<()> {
        self.check_state(state)?;
        self.phase_mut(false)?.check(inputs)?;
        self.eval_step_on(state, StepInputs::copied(inputs), deliver)
    }

    /// An evaluation step on inputs that [`Module::copies`] has checked.
    pub(crate) fn eval_step_on(
        &mut self,
        state: &CheckpointState,
        inputs: StepInputs<'_>,
        deliver: &mut Deliver<'_>,
    ) -> Result<()> {
        let eval = self.eval.as_mut().ok_or_else(|| no_eval_model("an evaluation step"))?;
        let mut planes = parameter_binding::planes(state, &self.gradients);
        let (entry, scalars) = (ProgramEntry::Accumulate, scalars(state));
        if !self.detect_anomaly {
            let (how, trace) = ((entry, scalars), self.trace.as_mut());
            let runners = eval.runners_of(inputs, planes.len(), &self.backend);
            planes.extend(inputs.memories());
            let run = runners.run_traced(&mut self.work, &planes, how, trace, inputs.given, deliver);
            drop(planes);
            return run.map_err(|error| self.explained_with_copies(error, inputs, false));
        }
        let inputs = inputs.given;
        let mut seen = None;
        let outputs = &eval.outputs;
        let run = eval.runners.run_traced(
            &mut self.work,
            &planes,
            (entry, scalars),
            self.trace.as_mut(),
            inputs,
            &mut |k, dtype, dims, value| {
                if seen.is_none() {
                    seen = anomaly::of_result(k, &outputs[k].name, (dtype, dims), value)?;
                }
                deliver(k, dtype, dims, value)
            },
        );
        if let Err(error) = run {
            drop(planes);
            return Err(self.with_limit_that_fits(error, inputs, false));
        }
        let Some(eval) = &self.eval else { return Ok(()) };
        let Some(seen) = seen else { return Ok(()) };
        let (runners, backend, layout) = (&eval.runners, &self.backend, &*self.layout);
        let again = Again { runners, backend, planes: &planes, entry, scalars, inputs, layout };
        Err(Error::Anomaly(Box::new(Anomaly { seen, path: again.path()? })))
    }

    /// An evaluation step whose results go to memory of the caller, in the order of [`Module::outputs`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::Given::from);
    /// use ortrain::Destination;
    ///
    /// let mut loss = [0.0];
    /// module.eval_step_into(&state, &inputs, &mut [Destination::f32(&[], &mut loss)])?;
    /// assert!(loss[0] > 0.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Module::eval_step`]; when the number, the types or the shapes of `outputs` are not those of the results.
    pub fn eval_step_into(
        &mut self,
        state: &CheckpointState,
        inputs: &[Given<'_>],
        outputs: &mut [Destination<'_>],
    ) -> Result<()> {
        self.check_state(state)?;
        let eval = self.eval.as_mut().ok_or_else(|| no_eval_model("an evaluation step"))?;
        eval.check(inputs)?;
        eval.check_outputs(&self.work, inputs, outputs)?;
        let mut fill = Fill::new(outputs);
        self.eval_step(state, inputs, &mut |k, dtype, dims, value| fill.take(k, dtype, dims, value))?;
        fill.finish(self.outputs(false))
    }

    /// What a step on these inputs takes. Nothing is allocated for it yet; what is specialised during a run (programs
    /// behind functions on the host) does not count.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// use ortrain::{Given, Tensor};
    ///
    /// let mut of = |rows: usize| {
    ///     let (x, labels) = (Tensor::f32(&[rows, 64], &vec![0.0; rows * 64]), Tensor::i64(&[rows], &vec![0; rows]));
    ///     module.memory_need(&[Given::from(&x), Given::from(&labels)], true)
    /// };
    /// assert!(of(64)?.work > of(8)?.work);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Module::train_step`] or [`Module::eval_step`], whose step is not made.
    pub fn memory_need(&mut self, inputs: &[Given<'_>], training: bool) -> Result<MemoryNeed> {
        let phase = match training {
            true => &mut self.train,
            false => self.eval.as_mut().ok_or_else(|| no_eval_model("an evaluation step"))?,
        };
        phase.check(inputs)?;
        Ok(phase.runners.executor(&self.work, inputs)?.need(&self.work))
    }

    /// What a step on inputs of these shapes is and takes, without a step.
    pub(crate) fn planned(&self, dims: &[&[usize]], training: bool) -> Result<(Arc<Schedule>, MemoryNeed)> {
        let phase = match training {
            true => &self.train,
            false => self.eval.as_ref().ok_or_else(|| no_eval_model("an evaluation step"))?,
        };
        phase.runners.planned(&self.work, dims)
    }

    /// The inputs with values that decide shapes, as far as [`Module::planned`] has met them.
    pub(crate) fn inputs_behind_shapes(&self, training: bool) -> Vec<String> {
        let phase = if training { Some(&self.train) } else { self.eval.as_ref() };
        let positions = phase.map(|phase| phase.runners.inputs_behind_shapes()).unwrap_or_default();
        let names = self.input_names(training);
        positions.into_iter().filter_map(|k| names.get(k).map(|name| (*name).to_owned())).collect()
    }

    /// Runs steps and says where their time goes: instruction by instruction, beside what the machine could do at most.
    /// The results of the last step come to `deliver`; they have the bits of a step that is not profiled.
    ///
    /// These are real steps, but they change nothing: what a step writes (gradients, running statistics) is written to
    /// copies, which takes memory for the time of the profile. Parameters, gradients, running statistics, the count of
    /// train steps and a pending [`Module::lazy_reset_grad`] stay as they are.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::Given::from);
    /// use ortrain::ProfileOptions;
    ///
    /// let options = ProfileOptions::default().steps(2);
    /// let profile = module.profile(&state, &inputs, options, &mut |_, _, _, _| Ok(()))?;
    /// assert_eq!(profile.steps.len(), 2);
    /// assert!(profile.instructions.iter().any(|instruction| instruction.kind == "MatMul"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Module::train_step`] or [`Module::eval_step`].
    pub fn profile(
        &mut self,
        state: &CheckpointState,
        inputs: &[Given<'_>],
        options: ProfileOptions,
        deliver: &mut Deliver<'_>,
    ) -> Result<Profile> {
        self.check_state(state)?;
        let real = parameter_binding::planes(state, &self.gradients);
        let phase = match options.training {
            true => &mut self.train,
            false => self.eval.as_mut().ok_or_else(|| no_eval_model("an evaluation step"))?,
        };
        phase.check(inputs)?;
        let entry = if self.accumulate || !options.training {
            ProgramEntry::Accumulate
        } else {
            ProgramEntry::Overwrite
        };
        // Gradients are written, and so are frozen planes, where running statistics lie.
        let trainable = self.layout.trainable.len();
        let written = if options.training { trainable..real.len() } else { 0..0 };
        let home = Home::of(&self.backend);
        let copies = written.clone().map(|k| home.copy(real[k])).collect::<Result<Vec<_>>>()?;
        let mut planes: parameter_binding::Planes<'_> = real.iter().copied().collect();
        for (k, copy) in written.zip(&copies) {
            planes[k] = copy;
        }
        let bindings = Bindings { planes: &planes };
        let runner = phase.runners.executor(&self.work, inputs)?;
        let scalars = scalars(state);
        for _ in 0..options.warmup {
            let turn = RunContext::new(&bindings, &mut self.work, entry, scalars);
            runner.run(turn, inputs, &mut |_, _, _, _| Ok(()))?;
        }
        let mut collector = Collector::new();
        for step in 0..options.steps {
            let start = Instant::now();
            let last = step + 1 == options.steps;
            let mut results = |at: usize, dtype, dims: &[usize], value: Delivered<'_>| {
                if last { deliver(at, dtype, dims, value) } else { Ok(()) }
            };
            let turn =
                RunContext::new(&bindings, &mut self.work, entry, scalars).observed(Some(&mut collector));
            runner.run(turn, inputs, &mut results)?;
            collector.step(start, Instant::now());
        }
        let limits = limits_of(&*self.backend)?;
        let products = Products { precision: self.precision, bf16_unit: self.backend.bf16_unit() };
        let planning = phase.runners.planning(&self.work, inputs)?;
        Ok(collector.finish(limits, runner.need(&self.work), planning, products))
    }

    /// Says that the next train step shall replace the gradients and not add to them. Until then they stay as they are (unless
    /// a step is interrupted: [`ModuleOptions::interrupt`]).
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::Given::from);
    /// let mut step = |module: &mut ortrain::Module| module.train_step(&mut state, &inputs, &mut |_, _, _, _| Ok(()));
    /// let gradient = |module: &ortrain::Module| module.gradient("fc2.bias").unwrap().to_tensor();
    ///
    /// step(&mut module)?;
    /// let once = gradient(&module)?.to_vec::<f32>()[0];
    /// step(&mut module)?;
    /// assert_eq!(gradient(&module)?.to_vec::<f32>()[0], 2.0 * once);
    /// module.lazy_reset_grad();
    /// step(&mut module)?;
    /// assert_eq!(gradient(&module)?.to_vec::<f32>()[0], once);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn lazy_reset_grad(&mut self) {
        self.accumulate = false;
    }

    /// Adds the gradients of the next step to those that there are.
    pub(crate) fn keep_gradients(&mut self) {
        (self.accumulate, self.is_new) = (true, false);
    }

    fn phase(&self, training: bool) -> Option<&Phase> {
        if training { Some(&self.train) } else { self.eval.as_ref() }
    }

    /// Whether there is an evaluation model.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// assert!(module.has_eval_model());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn has_eval_model(&self) -> bool {
        self.eval.is_some()
    }

    /// How exactly inner products are computed: what [`ModuleOptions::precision`] said.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// assert_eq!(module.precision(), ortrain::Precision::F32);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// What multiplies bfloat16 here: `"amx"`, `"avx512_bf16"` or `"emulated"`; `None` for [`Precision::F32`] and on the
    /// reference.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// assert_eq!(module.bf16_unit(), None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn bf16_unit(&self) -> Option<&'static str> {
        self.backend.bf16_unit()
    }

    /// What a step must be given, in order. Empty for an evaluation model that is not there.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// let inputs: Vec<String> = module.inputs(true).iter().map(|info| format!("{}: {info}", info.name)).collect();
    /// assert_eq!(inputs, ["x: float32[batch, 64]", "labels: int64[batch]"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn inputs(&self, training: bool) -> &[ValueInfo] {
        self.phase(training).map_or(&[], |phase| &phase.signature.infos)
    }

    /// What a step delivers, in order. Empty for an evaluation model that is not there.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// let loss = &module.outputs(true)[0];
    /// assert_eq!(loss.to_string(), "float32[]");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn outputs(&self, training: bool) -> &[ValueInfo] {
        self.phase(training).map_or(&[], |phase| &phase.outputs)
    }

    /// The names of [`Module::inputs`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// assert_eq!(module.input_names(true), ["x", "labels"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn input_names(&self, training: bool) -> Vec<&str> {
        self.inputs(training).iter().map(|info| info.name.as_str()).collect()
    }

    /// The names of [`Module::outputs`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// assert_eq!(module.output_names(true).len(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn output_names(&self, training: bool) -> Vec<&str> {
        self.outputs(training).iter().map(|info| info.name.as_str()).collect()
    }

    /// The accumulated gradient of a parameter in this module; `None` if it is frozen or there is none of this name.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::Given::from);
    /// module.train_step(&mut state, &inputs, &mut |_, _, _, _| Ok(()))?;
    /// let gradient = module.gradient("fc2.bias").unwrap();
    /// assert!(gradient.to_tensor()?.to_vec::<f32>().iter().any(|element| *element != 0.0));
    /// assert!(module.gradient("fc1.bias").is_none(), "it is frozen");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn gradient(&self, name: &str) -> Option<ParameterView> {
        self.layout.trainable.iter().zip(&self.gradients).find_map(|(plane, memory)| {
            let at = plane.tensors.binary_search_by(|tensor| (*tensor.name).cmp(name)).ok()?;
            let tensor = &plane.tensors[at];
            Some(ParameterView {
                name: tensor.name.clone(),
                dtype: plane.dtype,
                dims: tensor.dims.clone(),
                requires_grad: true,
                memory: memory.clone(),
                offset: tensor.offset,
            })
        })
    }

    /// The planes of the gradients, which mirror those of the parameters that are trained.
    ///
    /// The mean with another worker's gradients, in place:
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::Given::from);
    /// # module.train_step(&mut state, &inputs, &mut |_, _, _, _| Ok(()))?;
    /// # let theirs = vec![0_u8; module.gradient_planes()[0].len()];
    /// # let before = module.gradient("fc2.bias").unwrap().to_tensor()?.to_vec::<f32>()[0];
    /// let plane = &module.gradient_planes()[0];
    /// let ours = plane.to_vec(0, plane.len())?;
    /// let float = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
    /// let mean: Vec<u8> = ours
    ///     .chunks_exact(4)
    ///     .zip(theirs.chunks_exact(4))
    ///     .flat_map(|(a, b)| ((float(a) + float(b)) / 2.0).to_le_bytes())
    ///     .collect();
    /// plane.write(0, &mean)?;
    /// # assert_eq!(module.gradient("fc2.bias").unwrap().to_tensor()?.to_vec::<f32>()[0], before / 2.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn gradient_planes(&self) -> &[Arc<Memory>] {
        &self.gradients
    }

    pub(crate) fn layout(&self) -> &Arc<StateLayout> {
        &self.layout
    }

    pub(crate) fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// The parameters of the training model, in the order of its inputs.
    fn packed<'a>(
        &'a self,
        state: &'a CheckpointState,
        trainable_only: bool,
    ) -> impl Iterator<Item = &'a Entry> {
        let known = self.parameters.iter().filter_map(|name| state.entry(name));
        known.filter(move |entry| entry.requires_grad || !trainable_only)
    }

    /// The number of elements of all parameters of the training model, or of those that are trained.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// assert_eq!(module.parameters_size(&state, true), 10 * 96 + 10);
    /// assert_eq!(module.parameters_size(&state, false), 10 * 96 + 10 + 96 * 64 + 96);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn parameters_size(&self, state: &CheckpointState, trainable_only: bool) -> usize {
        self.packed(state, trainable_only).map(Entry::elements).sum()
    }

    /// The parameters one after the other, without gaps, in the order of the training model's inputs.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// let buffer = module.copy_parameters_to_buffer(&state, true)?;
    /// assert_eq!(buffer.len(), 970);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When a parameter is not float32, or the state is nominal.
    pub fn copy_parameters_to_buffer(
        &self,
        state: &CheckpointState,
        trainable_only: bool,
    ) -> Result<Vec<f32>> {
        self.check_state(state)?;
        self.pack(state, trainable_only, |entry| state.memory_of(entry))
    }

    /// Replaces the parameters by what [`Module::copy_parameters_to_buffer`] returned. With all parameters given, this is
    /// also how a nominal state gets its values.
    ///
    /// A round of federated averaging, seen from the server:
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// let clients = [vec![1.0_f32; 970], vec![3.0; 970]];
    /// let mean: Vec<f32> = clients[0].iter().zip(&clients[1]).map(|(a, b)| (a + b) / 2.0).collect();
    /// module.copy_buffer_to_parameters(&mut state, &mean, true)?;
    /// assert_eq!(state.parameter("fc2.bias")?.to_tensor()?.to_vec::<f32>(), [2.0; 10]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the buffer has another length or a parameter is not float32; when the state is nominal, and only the
    /// parameters that are trained are given, or the model does not have all of its parameters.
    pub fn copy_buffer_to_parameters(
        &self,
        state: &mut CheckpointState,
        buffer: &[f32],
        trainable_only: bool,
    ) -> Result<()> {
        self.check_layout(state)?;
        if trainable_only {
            state.complete()?;
        }
        self.check_buffer(state, trainable_only, buffer)?;
        if state.is_nominal() {
            if let Some(entry) = state.entries().iter().find(|entry| !self.parameters.contains(&entry.name)) {
                return Err(Error::State(format!(
                    "the state is nominal and stays so: the training model has no parameter {:?}, so the buffer has no \
                     value for it",
                    entry.name
                )));
            }
            state.finish_nominal()?;
        }
        self.unpack(state, trainable_only, buffer, |entry| state.memory_of(entry))?;
        if !trainable_only {
            state.bump_generation();
        }
        state.start_slots()
    }

    /// The accumulated gradients one after the other, without gaps, in the order and with the length of
    /// [`Module::copy_parameters_to_buffer`] of the parameters that are trained: a copy.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::Given::from);
    /// module.train_step(&mut state, &inputs, &mut |_, _, _, _| Ok(()))?;
    /// let gradients = module.copy_gradients_to_buffer(&state)?;
    /// let norm = gradients.iter().map(|element| element * element).sum::<f32>().sqrt();
    /// assert!(norm > 0.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When a parameter is not float32, or the state is nominal.
    pub fn copy_gradients_to_buffer(&self, state: &CheckpointState) -> Result<Vec<f32>> {
        self.check_state(state)?;
        self.pack(state, true, |entry| &self.gradients[entry.plane])
    }

    /// Replaces the accumulated gradients by what [`Module::copy_gradients_to_buffer`] returned, or by a mean of several of
    /// those. A pending [`Module::lazy_reset_grad`] stays pending.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::Given::from);
    /// # module.train_step(&mut state, &inputs, &mut |_, _, _, _| Ok(()))?;
    /// let mut gradients = module.copy_gradients_to_buffer(&state)?;
    /// gradients.iter_mut().for_each(|element| *element = element.clamp(-0.01, 0.01));
    /// module.copy_buffer_to_gradients(&state, &gradients)?;
    /// optimizer.step(&mut state, &module)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the buffer has another length, a parameter is not float32, or the state is nominal.
    pub fn copy_buffer_to_gradients(&mut self, state: &CheckpointState, buffer: &[f32]) -> Result<()> {
        self.check_state(state)?;
        self.check_buffer(state, true, buffer)?;
        self.unpack(state, true, buffer, |entry| &self.gradients[entry.plane])?;
        Ok(())
    }

    /// The L2 norm of each parameter that is trained, and that of its accumulated gradient, in the order of their names.
    /// Sums are `f64`.
    ///
    /// A layer whose gradients are all zero is dead; one whose gradients are large beside its parameters explodes.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::Given::from);
    /// module.train_step(&mut state, &inputs, &mut |_, _, _, _| Ok(()))?;
    /// for norms in module.norms(&state)? {
    ///     assert!(norms.gradient > 0.0, "{} learns nothing", norms.name);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When the state is nominal or not the one the module was made on.
    pub fn norms(&self, state: &CheckpointState) -> Result<Vec<Norms>> {
        self.check_state(state)?;
        let trained = state.entries().iter().filter(|entry| entry.requires_grad);
        let norms = trained.map(|entry| {
            Ok(Norms {
                name: entry.name.to_string(),
                parameter: norm(entry, state.memory_of(entry))?,
                gradient: norm(entry, &self.gradients[entry.plane])?,
            })
        });
        norms.collect()
    }

    /// The L2 norm of all gradients together.
    pub(crate) fn gradient_norm(&self, state: &CheckpointState) -> Result<f64> {
        let trained = state.entries().iter().filter(|entry| entry.requires_grad);
        let squares = trained.map(|entry| Ok(norm(entry, &self.gradients[entry.plane])?.powi(2)));
        Ok(squares.sum::<Result<f64>>()?.sqrt())
    }

    /// What `memory` holds for each parameter, one after the other.
    fn pack<'a>(
        &'a self,
        state: &'a CheckpointState,
        trainable_only: bool,
        memory: impl Fn(&'a Entry) -> &'a Arc<Memory>,
    ) -> Result<Vec<f32>> {
        let mut buffer = vec![0.0_f32; self.parameters_size(state, trainable_only)];
        let mut rest = buffer.as_mut_slice();
        for entry in self.packed(state, trainable_only) {
            packable(entry)?;
            let (part, after) = rest.split_at_mut(entry.elements());
            memory(entry).read(entry.offset, bytemuck::cast_slice_mut(part))?;
            rest = after;
        }
        Ok(buffer)
    }

    /// That a buffer is one that [`Module::pack`] could have made.
    fn check_buffer(&self, state: &CheckpointState, trainable_only: bool, buffer: &[f32]) -> Result<()> {
        let expected = self.parameters_size(state, trainable_only);
        if buffer.len() != expected {
            return Err(Error::BufferLength { expected, found: buffer.len() });
        }
        self.packed(state, trainable_only).try_for_each(packable)
    }

    /// Writes a checked buffer to where `memory` holds each parameter.
    fn unpack<'a>(
        &'a self,
        state: &'a CheckpointState,
        trainable_only: bool,
        mut buffer: &[f32],
        memory: impl Fn(&'a Entry) -> &'a Arc<Memory>,
    ) -> Result<()> {
        for entry in self.packed(state, trainable_only) {
            let (part, after) = buffer.split_at(entry.elements());
            memory(entry).write(entry.offset, bytemuck::cast_slice(part))?;
            buffer = after;
        }
        Ok(())
    }

    /// Writes the evaluation model, cut down to the given outputs and with the parameters' current values inside.
    ///
    /// Everything else stays as it is in the evaluation model: names, operator sets, metadata, order. Any value of the
    /// graph can be an output, also an intermediate one. Inputs that nothing needs any more go.
    ///
    /// A model of more than 2 GiB has its weights, those of a frozen base too, in `<path>.data` beside it.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// use ortrain::{InferenceSession, SessionOptions};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("trained.onnx");
    /// module.export_model_for_inferencing(&state, &path, &["logits"])?;
    /// let session = InferenceSession::new(path.into(), SessionOptions::default())?;
    /// assert_eq!(session.outputs()[0].name, "logits");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// When there is no evaluation model, no output or an unknown one is named, or the file cannot be written.
    pub fn export_model_for_inferencing(
        &self,
        state: &CheckpointState,
        path: impl AsRef<Path>,
        graph_output_names: &[&str],
    ) -> Result<()> {
        self.export_with_external_data(state, path, graph_output_names, LARGEST_MESSAGE as u64)
    }

    /// [`Module::export_model_for_inferencing`] with another threshold: if the model would take more than `above` bytes, its
    /// weights lie in `<path>.data`, which belongs to it. (2 GiB are the most that an ONNX file can have.)
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// use ortrain::{InferenceSession, SessionOptions};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("trained.onnx");
    /// module.export_with_external_data(&state, &path, &["logits"], 0)?;
    /// assert!(folder.path().join("trained.onnx.data").exists());
    /// let session = InferenceSession::new(path.into(), SessionOptions::default())?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As there.
    pub fn export_with_external_data(
        &self,
        state: &CheckpointState,
        path: impl AsRef<Path>,
        graph_output_names: &[&str],
        above: u64,
    ) -> Result<()> {
        let (model, path) = (self.inference_model(state, graph_output_names)?, path.as_ref());
        let Some(data) = model.data_file_above(path, above)? else {
            return Ok(model.save_above(path, above)?);
        };
        let place = ortrain_files::resolved(&data);
        if let Some(file) =
            self.read_from.iter().find(|file| std::fs::canonicalize(&place).is_ok_and(|at| at == **file))
        {
            return Err(Error::Argument(format!(
                "the model cannot be exported to {}: its weights would replace {}, in which the models that are trained \
                 have theirs; export it under another name, or to another folder",
                path.display(),
                file.display()
            )));
        }
        Ok(model.save_above(path, above)?)
    }

    /// The model that [`Module::export_model_for_inferencing`] writes.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// let model = module.inference_model(&state, &["hidden"])?;
    /// let graph = model.proto.graph.unwrap();
    /// assert_eq!(graph.node.len(), 2, "the second layer is gone");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As there, but for the file.
    pub fn inference_model(
        &self,
        state: &CheckpointState,
        graph_output_names: &[&str],
    ) -> Result<LoadedModel> {
        self.check_state(state)?;
        let message = self.eval_message.as_ref().ok_or_else(|| no_eval_model("an export"))?;
        let eval = self.eval.as_ref().ok_or_else(|| no_eval_model("an export"))?;
        export::inference_model(message, eval.runners.graph(), state, graph_output_names)
    }

    /// The bytes that the module holds now.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::Given::from);
    /// module.train_step(&mut state, &inputs, &mut |_, _, _, _| Ok(()))?;
    /// assert!(module.memory().work > 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn memory(&self) -> MemoryUse {
        let bytes = |planes: &[PlaneLayout]| planes.iter().map(|plane| plane.bytes).sum::<usize>();
        MemoryUse {
            parameters: bytes(&self.layout.trainable) + bytes(&self.layout.frozen),
            gradients: bytes(&self.layout.trainable),
            work: self.work.arena().len(),
            scratch: self.work.scratch().len(),
        }
    }

    /// The graphs and the programs made so far, as text.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::Given::from);
    /// module.train_step(&mut state, &inputs, &mut |_, _, _, _| Ok(()))?;
    /// assert!(module.dump().contains("training"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn dump(&self) -> String {
        let mut out = String::new();
        for (name, phase) in [("training", Some(&self.train)), ("evaluation", self.eval.as_ref())] {
            let Some(phase) = phase else { continue };
            let _ = writeln!(out, "{name} {}", phase.runners.graph());
            let lent = phase.lent.iter().flat_map(|(_, runners)| runners.schedules());
            for schedule in phase.runners.schedules().chain(lent) {
                let _ = writeln!(out, "{name} {schedule}");
            }
        }
        out
    }

    /// An error if the state is nominal or has other parameters than the one the module was made on.
    pub(crate) fn check_state(&self, state: &CheckpointState) -> Result<()> {
        state.complete()?;
        self.check_layout(state)
    }

    fn check_layout(&self, state: &CheckpointState) -> Result<()> {
        match state.shared_layout() {
            Some(layout) if *layout == self.layout => state.check_device(self.backend.device()),
            _ => Err(Error::OtherState { what: "module" }),
        }
    }
}

/// What a call says that needs an evaluation model where there is none.
fn no_eval_model(call: &'static str) -> Error {
    Error::NoEvalModel { made: "module", call }
}

/// The norms of a parameter and of its gradient: see [`Module::norms`].
///
/// ```
/// let norms = ortrain::Norms { name: "fc2.bias".into(), parameter: 2.0, gradient: 0.01 };
/// println!("{}: a step of rate 0.1 changes it by {:.1e}", norms.name, 0.1 * norms.gradient / norms.parameter);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Norms {
    /// The parameter.
    pub name: String,
    /// Its L2 norm.
    pub parameter: f64,
    /// That of its accumulated gradient.
    pub gradient: f64,
}

/// The L2 norm of a parameter, or of its gradient, in a plane.
fn norm(entry: &Entry, plane: &Memory) -> Result<f64> {
    /// A multiple of every element's size.
    const PART: usize = 1 << 16;
    let bytes = entry.elements() * entry.dtype.size();
    let mut part = vec![0; PART.min(bytes)];
    let mut sum = 0.0;
    for at in (0..bytes).step_by(PART) {
        let part = &mut part[..PART.min(bytes - at)];
        plane.read(entry.offset + at, part)?;
        sum += match entry.dtype {
            DType::F32 => sum_of_squares(part, |bits: [u8; 4]| f64::from(f32::from_le_bytes(bits))),
            DType::F64 => sum_of_squares(part, f64::from_le_bytes),
            dtype => {
                let elements = Tensor::new(dtype, vec![part.len() / dtype.size()], part.to_vec().into());
                elements.iter().flat_map(Tensor::to_f64).map(|element| element.powi(2)).sum::<f64>()
            }
        };
    }
    Ok(sum.sqrt())
}

/// The sum of the squares of numbers: of sixteen sums side by side, for one sum waits for itself at each number.
fn sum_of_squares<const SIZE: usize>(bytes: &[u8], number: impl Fn([u8; SIZE]) -> f64) -> f64 {
    let mut sums = [0.0; 16];
    let add = |sum: &mut f64, bits: [u8; SIZE]| {
        let number = number(bits);
        *sum += number * number;
    };
    let (rows, rest) = bytes.as_chunks::<SIZE>().0.as_chunks::<16>();
    for row in rows {
        sums.iter_mut().zip(row).for_each(|(sum, &bits)| add(sum, bits));
    }
    sums.iter_mut().zip(rest).for_each(|(sum, &bits)| add(sum, bits));
    sums.iter().sum()
}

/// Bytes of parameters and gradients.
fn held(layout: &StateLayout) -> usize {
    let bytes = |planes: &[PlaneLayout]| planes.iter().map(|plane| plane.bytes).sum::<usize>();
    2 * bytes(&layout.trainable) + bytes(&layout.frozen)
}

/// An error if not even parameters and gradients are within a limit.
fn check_planes(layout: &StateLayout, limit: Option<usize>) -> Result<()> {
    let Some(limit) = limit.filter(|&limit| held(layout) > limit) else { return Ok(()) };
    let tensors = layout.trainable.iter().chain(&layout.frozen).flat_map(|plane| {
        plane.tensors.iter().map(|tensor| {
            let elements = tensor.dims.iter().product::<usize>();
            let bytes = elements * plane.dtype.size();
            LargeBuffer { label: tensor.name.to_string(), dtype: plane.dtype, elements, bytes }
        })
    });
    let mut largest: Vec<LargeBuffer> = tensors.collect();
    largest.sort_by_key(|tensor| std::cmp::Reverse(tensor.bytes));
    largest.truncate(5);
    let need = MemoryNeed { held: held(layout), ..MemoryNeed::default() };
    Err(RunError::OverLimit(Box::new(OverLimit { limit, need, largest })).into())
}

fn packable(entry: &Entry) -> Result<()> {
    if entry.dtype == DType::F32 {
        return Ok(());
    }
    Err(Error::Argument(format!(
        "parameter {:?} is {}, but a packed buffer holds float32 only; read the parameter itself",
        entry.name, entry.dtype
    )))
}

fn scalars(state: &CheckpointState) -> Scalars {
    Scalars { seed: state.seed().cast_unsigned(), train_step: state.train_step_count() }
}
