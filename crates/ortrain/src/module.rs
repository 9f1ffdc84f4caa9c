//! Training and evaluation of a model.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ortrain_expr::unstoppable;
use ortrain_graph::{DType, Graph, Tensor, ValueId};
use ortrain_onnx::{LARGEST_MESSAGE, LoadedModel};
use ortrain_ops::Role;
use ortrain_ops::passes::{infer::infer, updates::written_inputs};
use ortrain_ops::training::{classes_last_note, with_classes_last};
use ortrain_program::{
    Backend, Bf16Fallback, Bindings, CommitGate, Deliver, Delivered, GradientMode as ProgramEntry,
    ITERATION_LIMIT, Interrupt, LargeBuffer, Memory, MemoryNeed, OverLimit, PlaneId, Precision, RunContext,
    RunError, RunInput, Scalars, Schedule, Workspace,
};

use crate::anomaly::{self, Replay};
use crate::backend::limits_of;
use crate::executable_cache::{ExecutableCache, interruptible};
use crate::gradient_names::{UPDATED_SUFFIX, parameter_of_gradient};
use crate::inputs::Signature;
use crate::io_binding::{copy_tensor, describe_feeds, is_read_in_place, memory_span};
use crate::model_checks::{check_training, missing_parameter_reason};
use crate::model_graph::graph_to_run;
use crate::not_finite::Anomaly;
use crate::outputs::{OutputWriter, check_destinations};
use crate::parameter_binding::{self, bind, is_gradient};
use crate::placement::Placement;
use crate::profile::{Collector, ProductMode};
use crate::state_layout::{Entry, PlaneLayout, StateLayout};
use crate::step_inputs::{StepInputs, split_inputs};
use crate::trace::Trace;
use crate::{
    CheckpointState, Destination, Error, Feed, Lent, ModelSource, ParameterView, Profile, ProfileOptions,
    Result, ValueInfo, class_axis, default_backend, export, over_limit,
};

/// Options of a [`Module`].
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let artifacts = setup::artifacts()?;
/// use ortrain::{CheckpointState, ModelSource, Module, ModuleOptions, backend};
///
/// # let mut state = CheckpointState::from_bytes(artifacts.checkpoint_bytes()?)?;
/// # let train = ModelSource::from_proto(&artifacts.training_model)?;
/// let options = ModuleOptions::default().backend(backend("cpu", 2)?).memory_limit(64 << 20);
/// let module = Module::new(train, &mut state, None, options)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ModuleOptions {
    /// Backend; the default is [`default_backend`].
    pub backend: Option<Arc<dyn Backend>>,
    /// Memory limit of the module in bytes: see [`ModuleOptions::memory_limit`].
    pub memory_limit: Option<usize>,
    /// Maximum iterations of a loop; the default is [`ITERATION_LIMIT`].
    pub iteration_limit: Option<u64>,
    /// Precision of inner products: see [`ModuleOptions::precision`].
    pub precision: Precision,
    /// Alternative to AMX for bfloat16 products: see [`ModuleOptions::bf16_fallback`].
    pub bf16_fallback: Bf16Fallback,
    /// Interrupt that can end a step early: see [`ModuleOptions::interrupt`].
    pub interrupt: Option<Interrupt>,
    /// True if a step that produces NaN or infinities must fail: see [`ModuleOptions::detect_anomaly`].
    pub detect_anomaly: bool,
}

impl ModuleOptions {
    /// Sets the backend.
    #[must_use]
    pub fn backend(mut self, backend: Arc<dyn Backend>) -> ModuleOptions {
        self.backend = Some(backend);
        self
    }

    /// Sets the memory limit in bytes for everything that a step reads and writes.
    ///
    /// The limit covers all parameters (also frozen ones and running statistics), their gradients, the
    /// constants of the program, the arena of its values, and kernel scratch. All of these are known before a
    /// step. A step that would exceed the limit is rejected before any allocation, with an error that names
    /// the largest buffers. Optimizer state and tensors of the caller do not count.
    #[must_use]
    pub fn memory_limit(mut self, bytes: usize) -> ModuleOptions {
        self.memory_limit = Some(bytes);
        self
    }

    /// Sets the maximum iterations of a loop (default: [`ITERATION_LIMIT`]). A loop that exceeds it stops
    /// with an error that names the loop.
    #[must_use]
    pub fn iteration_limit(mut self, iterations: u64) -> ModuleOptions {
        self.iteration_limit = Some(iterations);
        self
    }

    /// Sets the precision of inner products in the training and evaluation model (default:
    /// [`Precision::F32`]).
    ///
    /// It applies to matrix products and convolutions that sum in `float32`. Sums and all other operations
    /// remain `float32`, and so do inputs, outputs, parameters and gradients. Products with short sides
    /// ([`Precision::of_product`]) and the products of fused attention are always computed in `float32`.
    ///
    /// The products run on AMX, or on the alternative that [`ModuleOptions::bf16_fallback`] allows.
    /// [`Module::bf16_unit`] returns the choice.
    #[must_use]
    pub fn precision(mut self, precision: Precision) -> ModuleOptions {
        self.precision = precision;
        self
    }

    /// Sets the alternative to AMX for a precision that needs AMX on a machine without it. With
    /// [`Bf16Fallback::None`], that is an error: the precision is never changed silently.
    #[must_use]
    pub fn bf16_fallback(mut self, fallback: Bf16Fallback) -> ModuleOptions {
        self.bf16_fallback = fallback;
        self
    }

    /// Sets an interrupt that can end a step early. It is polled every tenth of a second, between two
    /// instructions.
    ///
    /// An interrupted step ends with [`RunError::Interrupted`], and the state is unchanged. If the step would
    /// have accumulated gradients, they are unchanged, too. If it would have replaced them
    /// ([`Module::lazy_reset_grad`]), they are zero, and the next step replaces them.
    ///
    /// To restore gradients, a step that takes more than a few hundredths of a second and accumulates into
    /// nonzero gradients keeps a copy of them, if the memory limit permits. Otherwise the step cannot be
    /// interrupted.
    #[must_use]
    pub fn interrupt(mut self, interrupt: Interrupt) -> ModuleOptions {
        self.interrupt = Some(interrupt);
        self
    }

    /// Makes steps fail if they produce NaN or infinities.
    ///
    /// After each training step, the loss, the gradients and the running statistics are checked, and the
    /// other results for NaN. After an evaluation step, its results are checked. If a check fails, the state
    /// is restored, and the step runs again with all values visible. [`Error::Anomaly`] then names the first
    /// node, tensor and index, in the forward or backward pass.
    ///
    /// A step then copies the gradients and the frozen parameters, and reads all of them. If disabled, the
    /// default, there is no cost.
    #[must_use]
    pub fn detect_anomaly(mut self, detect: bool) -> ModuleOptions {
        self.detect_anomaly = detect;
        self
    }
}

/// Difference between the random seeds of two neighboring ranks: the odd number closest to 2^64 divided by the golden
/// ratio, so that seeds of different ranks and small seeds of users differ.
const RANK_SEED_STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Capacity of the cache of programs for inputs that are read in place.
const MAX_IN_PLACE_VARIANTS: usize = 32;

/// Positions and shapes of inputs that are read in place.
type InPlaceInputs = Vec<(usize, Vec<usize>)>;

/// An executable model: its programs, inputs and outputs.
#[derive(Debug)]
struct Phase {
    executables: ExecutableCache,
    /// Programs for inputs that are read in place, the newest last.
    in_place_executables: Vec<(InPlaceInputs, ExecutableCache)>,
    /// Positions of inputs that nodes update in place.
    written_inputs: Vec<usize>,
    signature: Signature,
    outputs: Vec<ValueInfo>,
    /// Labels with a symbolic class axis: their shape at the first step determines it.
    open_labels: Vec<String>,
    /// A sentence about each class axis that labels determined.
    notes: Vec<String>,
}

/// A training model, and optionally the evaluation model of the same parameters, bound to a
/// [`CheckpointState`].
///
/// The state owns the parameters, and every call receives it. The module owns the accumulated gradients and
/// its compiled programs. Several modules may share a state.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let (mut state, mut module, mut optimizer) = setup::training()?;
/// # let batch = setup::batch();
/// # let inputs = batch.each_ref().map(ortrain::RunInput::from);
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
    /// Guard that counts the live modules of the state.
    _state: Arc<()>,
    /// Parameters in the order of the training model's inputs.
    parameters: Vec<Arc<str>>,
    train: Phase,
    eval: Option<Phase>,
    eval_message: Option<LoadedModel>,
    /// External-data files of the models: an export must not overwrite them.
    external_files: Vec<PathBuf>,
    precision: Precision,
    backend: Arc<dyn Backend>,
    /// Workspace that all programs share.
    work: Workspace,
    accumulate: bool,
    /// True before the first training step.
    is_new: bool,
    /// Number of training steps in the accumulated gradients.
    accumulated_steps: i64,
    /// True if an optimizer has stepped with the current gradients.
    gradients_are_used: AtomicBool,
    /// True if a training step updates frozen parameters: running statistics.
    updates_frozen: bool,
    /// True if a step that produces NaN or infinities must fail.
    detect_anomaly: bool,
    /// Sentences that [`Module::take_notes`] has returned.
    returned_notes: Vec<String>,
    /// Index of the rank in a distributed training, which selects the random numbers.
    pub(crate) rank: u64,
    /// Trace of steps, if enabled.
    pub(crate) trace: Option<Trace>,
}

/// Memory use of a module in bytes.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let (mut state, mut module, mut optimizer) = setup::training()?;
/// let memory = module.memory(&state);
/// assert!(memory.parameters > memory.gradients, "the first layer is frozen");
/// assert_eq!(memory.moments, 2 * memory.gradients, "AdamW has two moments");
/// assert_eq!(memory.work, 0, "no step was made yet");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Parameters, including frozen ones and running statistics. The state owns them.
    pub parameters: usize,
    /// Gradients.
    pub gradients: usize,
    /// Slots of the optimizer, which the state owns. With ZeRO these are the slots of this rank.
    pub moments: usize,
    /// Arena for the values of a step, with the size for the largest step so far.
    pub work: usize,
    /// Scratch of kernels.
    pub scratch: usize,
}

impl MemoryUse {
    /// Returns the sum. [`ModuleOptions::memory_limit`] limits the sum without the moments.
    #[must_use]
    pub fn total(&self) -> usize {
        self.parameters + self.gradients + self.moments + self.work + self.scratch
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
            let is_visible = |&id: &ValueId| !is_gradient(graph.name_of(id), state);
            graph.outputs = graph.outputs.iter().copied().filter(is_visible).collect();
        }
        if graph.outputs.is_empty() {
            let reason = "it has no outputs, not even a loss".to_owned();
            return Err(Error::WrongModel { model: label.to_owned(), reason });
        }
        let info = |id| ValueInfo::of(label, &graph, id);
        let outputs = graph.outputs.iter().copied().map(info).collect::<Result<_>>()?;
        let user_inputs = graph.inputs.iter().zip(&roles).filter(|(_, role)| **role == Role::User);
        let inputs = user_inputs.map(|(&id, _)| info(id)).collect::<Result<_>>()?;
        let signature = Signature::new(inputs);
        let runners = ExecutableCache::new(graph, roles, backend.clone()).with_precision(precision);
        let changed = written_inputs(runners.graph());
        let written_inputs = (runners.user_inputs().enumerate())
            .filter_map(|(k, id)| changed.contains(&id).then_some(k))
            .collect();
        Ok(Phase {
            executables: runners,
            in_place_executables: Vec::new(),
            written_inputs,
            signature,
            outputs,
            open_labels,
            notes: Vec::new(),
        })
    }

    /// Checks number, types and shapes of inputs.
    fn check(&mut self, inputs: &[RunInput<'_>]) -> Result<()> {
        let Err(error) = self.signature.check(inputs) else {
            self.open_labels.clear();
            return Ok(());
        };
        let described = inputs.iter().map(|value| (value.dtype, value.dims, value.byte_count()));
        self.infer_class_axis(error, &described.collect::<Vec<_>>())
    }

    /// Checks inputs like [`Phase::check`], from element type, shape and number of bytes.
    fn check_described(&mut self, inputs: &[(DType, &[usize], usize)]) -> Result<()> {
        let Err(error) = self.signature.check_described(inputs.iter().copied()) else {
            self.open_labels.clear();
            return Ok(());
        };
        self.infer_class_axis(error, inputs)
    }

    /// Determines the symbolic class axis from the shape of rejected labels, and checks the inputs again.
    fn infer_class_axis(
        &mut self,
        error: Error,
        signature_inputs: &[(DType, &[usize], usize)],
    ) -> Result<()> {
        let graph = self.executables.graph();
        let Some((changed, note)) = self.classes_last(&error, signature_inputs) else {
            return Err(class_axis::explain_readings(error, graph));
        };
        let info = |id| ValueInfo::of("", &changed, id);
        let inputs = self.executables.user_inputs().map(info).collect::<Result<_>>()?;
        let mut signature = Signature::new(inputs);
        signature.check_described(signature_inputs.iter().copied())?;
        (self.executables, self.signature) = (self.executables.with_graph(changed), signature);
        self.in_place_executables.clear();
        self.notes.push(note);
        Ok(())
    }

    /// Returns the graph with the classes of a loss on the last axis, and a note, if the labels in an error
    /// require it.
    fn classes_last(&self, error: &Error, inputs: &[(DType, &[usize], usize)]) -> Option<(Graph, String)> {
        let Error::Input { name, .. } = error else { return None };
        let graph = self.executables.graph();
        if !self.open_labels.contains(name) {
            return None;
        }
        let at = self.signature.infos.iter().position(|info| info.name == *name)?;
        let (labels, (_, dims, _)) = (graph.find(name)?, inputs.get(at)?);
        let mut changed = with_classes_last(graph, labels, dims)?;
        infer(&mut changed).ok()?;
        Some((changed, classes_last_note(graph, labels, dims)?))
    }

    /// Returns the programs for inputs. Inputs that are read in place use the planes after the first
    /// `planes`.
    fn executables_for(
        &mut self,
        inputs: StepInputs<'_>,
        planes: usize,
        backend: &Arc<dyn Backend>,
    ) -> &mut ExecutableCache {
        if inputs.in_place.is_empty() {
            return &mut self.executables;
        }
        let is_of = |key: &[(usize, Vec<usize>)]| {
            let same = |((at, dims), (other, lent)): (&(usize, Vec<usize>), &(usize, Lent<'_>))| {
                at == other && dims == lent.dims
            };
            key.len() == inputs.in_place.len() && key.iter().zip(inputs.in_place).all(same)
        };
        if let Some(at) = self.in_place_executables.iter().position(|(key, _)| is_of(key)) {
            return &mut self.in_place_executables[at].1;
        }
        if self.in_place_executables.len() == MAX_IN_PLACE_VARIANTS {
            self.in_place_executables.remove(0);
        }
        let locate = |(index, (at, lent)): (usize, &(usize, Lent<'_>))| {
            (*at, lent.dims.to_vec(), PlaneId((planes + index) as u32))
        };
        let in_place_inputs: Vec<(usize, Vec<usize>, PlaneId)> =
            inputs.in_place.iter().enumerate().map(locate).collect();
        let runners = self.executables.with_planes(
            in_place_inputs.iter().map(|(at, dims, plane)| (*at, &**dims, *plane)),
            backend.clone(),
        );
        self.in_place_executables
            .push((in_place_inputs.into_iter().map(|(at, dims, _)| (at, dims)).collect(), runners));
        let last = self.in_place_executables.len() - 1;
        &mut self.in_place_executables[last].1
    }

    /// Checks output buffers before a step on checked inputs. Returns true if every shape was checked: a
    /// data-dependent shape is known only afterwards.
    fn check_outputs(
        &mut self,
        work: &Workspace,
        inputs: &[RunInput<'_>],
        outputs: &[Destination<'_>],
    ) -> Result<bool> {
        check_destinations(&self.outputs, outputs)?;
        let runner = self.executables.executor(work, inputs)?;
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
    /// Creates a module of a training model on a state. `eval`, the evaluation model, is required for
    /// [`Module::eval_step`] and [`Module::export_model_for_inferencing`].
    ///
    /// The inputs of the models are classified by their names:
    ///
    /// - parameters of the state;
    /// - `<p>_grad.accumulation.buffer` (also `<p>_grad` and `<p>_grad.accumulation.out`), the gradient of
    ///   parameter `p`;
    /// - `lazy_reset_grad`;
    /// - all others are inputs of each step, in the model's order.
    ///
    /// The gradients start at zero, and become the current gradients of the state.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let artifacts = setup::artifacts()?;
    /// use ortrain::{CheckpointState, Module, ModuleOptions};
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # artifacts.write(folder.path(), "")?;
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
    /// If a model cannot be read or run, or does not fit the state.
    pub fn new(
        train: ModelSource,
        state: &mut CheckpointState,
        eval: Option<ModelSource>,
        options: ModuleOptions,
    ) -> Result<Module> {
        let interrupt = options.interrupt.clone();
        interruptible(interrupt.as_ref(), || Module::build(train, state, eval, options))
    }

    fn build(
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
        let open_labels = class_axis::marked_labels(&train.proto);
        drop(train);
        check_training(&label, &graph, state)?;
        parameter_binding::set_shapes_from(&graph, state)?;
        let bound = bind(&label, &mut graph, state, true)?;
        let train = Phase::new(&label, graph, bound.roles, Some(state), computed, open_labels)?;

        let mut eval_message = None;
        let eval = match eval {
            None => None,
            Some(source) => {
                let label = source.label("the evaluation model");
                let (message, files) = source.load_with_files(Some(train.executables.graph()))?;
                read_from.extend(files);
                let mut graph = graph_to_run(&label, &message)?;
                let evaluated = bind(&label, &mut graph, state, false)?;
                let mut parameters = bound.parameters.iter();
                if let Some(missing) = parameters.find(|name| !evaluated.parameters.contains(name)) {
                    let reason = missing_parameter_reason(&graph, missing);
                    return Err(Error::Mismatch { model: label, reason });
                }
                let open_labels = class_axis::marked_labels(&message.proto);
                eval_message = Some(message);
                Some(Phase::new(&label, graph, evaluated.roles, None, computed, open_labels)?)
            }
        };
        let layout = state.shared_layout().cloned().ok_or(Error::NominalState)?;
        let is_frozen = |name| state.entry(name).is_some_and(|entry| !entry.requires_grad);
        let graph = train.executables.graph();
        let updates_frozen = written_inputs(graph).into_iter().any(|id| is_frozen(graph.name_of(id)));
        let work = Workspace::with_limit(
            backend.clone(),
            options.memory_limit,
            parameter_and_gradient_bytes(&layout),
        )
        .iteration_limit(options.iteration_limit.unwrap_or(ITERATION_LIMIT))
        .interrupt(options.interrupt);
        check_planes(&layout, options.memory_limit)?;
        let gradients = Placement::of(&backend).allocate_planes(&layout.trainable)?;
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
            external_files: read_from,
            precision,
            backend,
            work,
            accumulate: true,
            is_new: true,
            accumulated_steps: 0,
            gradients_are_used: AtomicBool::new(false),
            updates_frozen,
            detect_anomaly: options.detect_anomaly,
            returned_notes: Vec::new(),
            rank: 0,
            trace: None,
        })
    }

    /// Computes the outputs and the gradients. Gradients accumulate, except that the first step after
    /// [`Module::lazy_reset_grad`] replaces them. Results are passed to `deliver` in the order of
    /// [`Module::outputs`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::RunInput::from);
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
    /// If the inputs do not fit, or the run fails; then nothing has changed.
    pub fn train_step(
        &mut self,
        state: &mut CheckpointState,
        inputs: &[RunInput<'_>],
        deliver: &mut Deliver<'_>,
    ) -> Result<()> {
        self.check_state(state)?;
        self.train.check(inputs)?;
        self.run_train(state, StepInputs::all_copied(inputs), deliver)
            .map_err(|error| self.add_sufficient_limit(error, inputs, true))?;
        self.count_train_step(state);
        Ok(())
    }

    /// Runs [`Module::train_step`] on inputs that may lie on the module's device, where large floats are read in place.
    ///
    /// A program that is recorded on a device is recorded for each set of addresses, and the last four are kept. So give
    /// batches in few memories, in turn.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// use std::sync::Arc;
    ///
    /// use ortrain::{DType, Feed, Lent, Memory, RunInput, Tensor};
    ///
    /// let (x, labels) = (Arc::new(Memory::new(16 * 64 * 4)), Tensor::i64(&[16], &[0; 16]));
    /// let x = Lent { dtype: DType::F32, dims: &[16, 64], memory: &x };
    /// let feeds = [Feed::from(x), Feed::from(RunInput::from(&labels))];
    /// let results = ortrain::collect(|deliver| module.train_step_bound(&mut state, &feeds, deliver))?;
    /// assert!(results[0].to_vec::<f32>()[0] > 0.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Module::train_step`].
    pub fn train_step_bound(
        &mut self,
        state: &mut CheckpointState,
        feeds: &[Feed<'_>],
        deliver: &mut Deliver<'_>,
    ) -> Result<()> {
        let copies = self.copy_inputs(state, feeds, &[], true)?;
        let (copied, lent) = split_inputs(feeds, &copies);
        self.train_step_on(state, StepInputs { copied_values: &copied, in_place: &lent }, deliver)
    }

    /// Checks the inputs of a step, and copies the inputs that the step cannot read in place. `output_spans` are the
    /// addresses of memory that is written during the step.
    pub(crate) fn copy_inputs(
        &mut self,
        state: &CheckpointState,
        feeds: &[Feed<'_>],
        output_spans: &[(usize, usize)],
        training: bool,
    ) -> Result<Vec<Option<Tensor>>> {
        self.check_state(state)?;
        // Anomaly detection repeats the step on the same values.
        let stays_in_place = !self.detect_anomaly;
        let backend = self.backend.clone();
        let planes: Vec<(usize, usize)> = parameter_binding::planes(state, &self.gradients)
            .into_iter()
            .map(|plane| memory_span(plane, plane.len()))
            .collect();
        let phase = self.phase_mut(training)?;
        phase.check_described(&describe_feeds(feeds))?;
        let copy = |(k, feed): (usize, &Feed<'_>)| {
            let Feed::Lent(lent) = feed else { return Ok(None) };
            let written_spans = planes.iter().chain(output_spans).copied();
            let is_in_place = stays_in_place
                && lent.memory.device() == backend.device()
                && !phase.written_inputs.contains(&k)
                && is_read_in_place(lent, written_spans);
            if is_in_place { Ok(None) } else { copy_tensor(feed) }
        };
        feeds.iter().enumerate().map(copy).collect()
    }

    /// Runs a training step on inputs that [`Module::copy_inputs`] has checked.
    pub(crate) fn train_step_on(
        &mut self,
        state: &mut CheckpointState,
        inputs: StepInputs<'_>,
        deliver: &mut Deliver<'_>,
    ) -> Result<()> {
        self.run_train(state, inputs, deliver)
            .map_err(|error| self.explain_with_copies(error, inputs, true))?;
        self.count_train_step(state);
        Ok(())
    }

    /// Runs [`Module::train_step_on`]. The gate is asked before the step changes state. If it refuses, nothing has changed.
    pub(crate) fn train_step_gated(
        &mut self,
        state: &mut CheckpointState,
        inputs: StepInputs<'_>,
        deliver: &mut Deliver<'_>,
        mut gate: Box<dyn CommitGate>,
    ) -> Result<()> {
        if self.commits_within_run(inputs)? {
            self.work.set_gate(Some(gate));
            let run = self.train_step_on(state, inputs, deliver);
            self.work.set_gate(None);
            return run;
        }
        // Later segments of the run may fail, so the gate is asked after the run.
        let before = self.copy_written_planes(state)?;
        let run = self
            .run_train(state, inputs, deliver)
            .map_err(|error| self.explain_with_copies(error, inputs, true))
            .and_then(|()| Ok(gate.before_commit()?));
        if run.is_err() {
            before.iter().try_for_each(|(plane, bytes)| plane.write(0, bytes))?;
            return run;
        }
        self.count_train_step(state);
        Ok(())
    }

    /// Copies the planes that a training step writes: gradients and frozen parameters.
    fn copy_written_planes(&self, state: &CheckpointState) -> Result<Vec<(Arc<Memory>, Vec<u8>)>> {
        let copy = |plane: &Arc<Memory>| Ok((plane.clone(), plane.to_vec(0, plane.len())?));
        self.gradients.iter().chain(state.frozen_planes()).map(copy).collect()
    }

    /// Returns true if nothing can fail in a step after its first write to state.
    fn commits_within_run(&mut self, inputs: StepInputs<'_>) -> Result<bool> {
        if self.detect_anomaly {
            return Ok(false);
        }
        let planes = self.layout.trainable.len() + self.layout.frozen.len() + self.gradients.len();
        let runners = self.train.executables_for(inputs, planes, &self.backend);
        let executor = runners.executor(&self.work, inputs.copied_values);
        let executor = executor.map_err(|error| self.explain_with_copies(error, inputs, true))?;
        Ok(executor.schedule().single_program().is_some())
    }

    /// Returns the training or the evaluation phase.
    fn phase_mut(&mut self, training: bool) -> Result<&mut Phase> {
        match training {
            true => Ok(&mut self.train),
            false => self.eval.as_mut().ok_or_else(|| no_eval_model("an evaluation step")),
        }
    }

    /// Explains an error of a step. The advice for a memory-limit error assumes that all inputs were copied.
    fn explain_with_copies(&self, error: Error, inputs: StepInputs<'_>, training: bool) -> Error {
        let Error::Run(RunError::OverLimit(_)) = &error else { return error };
        if inputs.in_place.is_empty() {
            return self.add_sufficient_limit(error, inputs.copied_values, training);
        }
        let copy = |(at, lent): &(usize, Lent<'_>)| Some((*at, copy_tensor(&Feed::Lent(*lent)).ok()??));
        let copies: Vec<(usize, Tensor)> = inputs.in_place.iter().filter_map(copy).collect();
        let mut all_inputs: Vec<RunInput<'_>> = inputs.copied_values.to_vec();
        copies.iter().for_each(|(at, tensor)| all_inputs.insert(*at, RunInput::from(tensor)));
        self.add_sufficient_limit(error, &all_inputs, training)
    }

    /// Runs a training step and writes the results to memory of the caller, in the order of
    /// [`Module::outputs`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::RunInput::from);
    /// use ortrain::Destination;
    ///
    /// let mut loss = [0.0];
    /// module.train_step_into(&mut state, &inputs, &mut [Destination::f32(&[], &mut loss)])?;
    /// assert!(loss[0] > 0.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Module::train_step`]; also if number, types or shapes of `outputs` do not match the results. Then
    /// nothing has changed, except possibly the contents of `outputs`.
    pub fn train_step_into(
        &mut self,
        state: &mut CheckpointState,
        inputs: &[RunInput<'_>],
        outputs: &mut [Destination<'_>],
    ) -> Result<()> {
        self.check_state(state)?;
        self.train.check(inputs)?;
        let sure = (self.train.check_outputs(&self.work, inputs, outputs))
            .map_err(|error| self.add_sufficient_limit(error, inputs, true))?;
        // Data-dependent shapes are known after the step; if they do not fit, written memory is restored.
        let before = if sure { Vec::new() } else { self.copy_written_planes(state)? };
        let mut fill = OutputWriter::new(outputs);
        self.run_train(state, StepInputs::all_copied(inputs), &mut |k, dtype, dims, value| {
            fill.write(k, dtype, dims, value)
        })
        .map_err(|error| self.add_sufficient_limit(error, inputs, true))?;
        if let Err(error) = fill.finish(&self.train.outputs) {
            before.iter().try_for_each(|(plane, bytes)| plane.write(0, bytes))?;
            return Err(error);
        }
        self.count_train_step(state);
        Ok(())
    }

    /// Returns the shape of each result on inputs that [`Module::copies`] has checked; `None` for a
    /// data-dependent shape.
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
        let runners = phase.executables_for(inputs, planes, &self.backend);
        let runner = runners.executor(&self.work, inputs.copied_values)?;
        let schedule = runner.schedule();
        let shape = |slot: &ortrain_program::SlotId| {
            schedule.slots[slot.0 as usize].ty.as_ref().map(|(_, dims)| dims.clone())
        };
        Ok(schedule.outputs.iter().map(shape).collect())
    }

    /// Adds a sufficient limit to a memory-limit error of a step.
    fn add_sufficient_limit(&self, error: Error, inputs: &[RunInput<'_>], training: bool) -> Error {
        let Some(phase) = self.phase(training) else { return error };
        over_limit::explain(error, &phase.executables, &phase.signature, &self.work, inputs)
    }

    /// Runs a training step without counting it.
    fn run_train(
        &mut self,
        state: &CheckpointState,
        inputs: StepInputs<'_>,
        deliver: &mut Deliver<'_>,
    ) -> Result<()> {
        // The first step overwrites zero gradients, so that resumed and uninterrupted training are
        // bit-identical.
        let accumulates = self.accumulate && !(self.is_new && self.gradients_are_zero()?);
        let entry = if accumulates { ProgramEntry::Accumulate } else { ProgramEntry::Overwrite };
        let mut planes = parameter_binding::planes(state, &self.gradients);
        let gradients = planes.len() - self.gradients.len()..planes.len();
        self.work.disposable_planes(if accumulates { 0..0 } else { gradients });
        let scalars = scalars(state, self.rank);
        if !self.detect_anomaly {
            let (how, trace) = ((entry, scalars), self.trace.as_mut());
            let runners = self.train.executables_for(inputs, planes.len(), &self.backend);
            planes.extend(inputs.in_place_memories());
            return runners.run_traced(&mut self.work, &planes, how, trace, inputs.copied_values, deliver);
        }
        let inputs = inputs.copied_values;
        // Frozen planes include running statistics.
        let written_range = self.layout.trainable.len()..planes.len();
        let placement = Placement::of(&self.backend);
        let copies = written_range
            .clone()
            .map(|k| placement.copy_plane(planes[k]))
            .collect::<Result<Vec<Memory>>>()?;
        let mut finding = None;
        let outputs = &self.train.outputs;
        self.train.executables.run(
            &mut self.work,
            &planes,
            entry,
            scalars,
            inputs,
            &mut |k, dtype, dims, value| {
                if finding.is_none() {
                    finding = anomaly::check_result(k, &outputs[k].name, (dtype, dims), value)?;
                }
                deliver(k, dtype, dims, value)
            },
        )?;
        let finding = match finding {
            Some(finding) => Some(finding),
            None => anomaly::check_planes(&self.layout, &planes)?,
        };
        let Some(finding) = finding else { return Ok(()) };
        for (k, copy) in written_range.clone().zip(&copies) {
            planes[k].write(0, &copy.to_vec(0, copy.len())?)?;
        }
        let first = written_range.start;
        let again: parameter_binding::Planes<'_> = planes[..first].iter().copied().chain(&copies).collect();
        let (runners, backend, layout) = (&self.train.executables, &self.backend, &*self.layout);
        let again = Replay {
            executables: runners,
            backend,
            planes: &again,
            gradient_mode: entry,
            scalars,
            inputs,
            layout,
        };
        Err(Error::Anomaly(Box::new(Anomaly { finding, path: again.trace_origin()? })))
    }

    fn gradients_are_zero(&self) -> Result<bool> {
        for plane in &self.gradients {
            if !plane.is_zero()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Checks that the gradients have not been discarded by [`Module::lazy_reset_grad`].
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

    /// Returns the number of training steps in the accumulated gradients.
    pub(crate) fn accumulated_step_count(&self) -> i64 {
        self.accumulated_steps
    }

    /// Records that an optimizer has stepped with the current gradients.
    pub(crate) fn mark_gradients_used(&self) {
        self.gradients_are_used.store(true, Ordering::Relaxed);
    }

    /// Returns the reason if an optimizer step would probably be a mistake. Either all gradients are zero
    /// since no training step has run, or the previous step used the same gradients.
    #[must_use]
    pub fn gradient_warning(&self) -> Option<&'static str> {
        // The step itself reports a device failure.
        if self.is_new && self.gradients_are_zero().unwrap_or_default() {
            return Some("the module ran no training step yet, so all gradients are zero");
        }
        let used = self.gradients_are_used.load(Ordering::Relaxed);
        used.then_some("the previous step used the same gradients")
    }

    /// Returns and clears sentences about automatic choices of the last steps: a class axis that the labels
    /// of a first step determined.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::RunInput::from);
    /// module.train_step(&mut state, &inputs, &mut |_, _, _, _| Ok(()))?;
    /// assert!(module.take_notes().is_empty(), "the scores have two axes");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn take_notes(&mut self) -> Vec<String> {
        let phases = std::iter::once(&mut self.train).chain(&mut self.eval);
        let mut notes: Vec<String> = phases.flat_map(|phase| std::mem::take(&mut phase.notes)).collect();
        // The training model and the evaluation model have the same scores.
        notes.retain(|note| !self.returned_notes.contains(note));
        self.returned_notes.extend(notes.iter().cloned());
        notes
    }

    fn count_train_step(&mut self, state: &mut CheckpointState) {
        self.accumulated_steps = if self.accumulate { self.accumulated_steps.saturating_add(1) } else { 1 };
        (self.accumulate, self.is_new) = (true, false);
        self.gradients_are_used.store(false, Ordering::Relaxed);
        state.advance_train_step();
        if self.updates_frozen {
            state.bump_generation();
        }
    }

    /// Computes the outputs of the evaluation model, and passes them to `deliver` in the order of
    /// [`Module::outputs`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::RunInput::from);
    /// let results = ortrain::collect(|deliver| module.eval_step(&state, &inputs, deliver))?;
    /// assert!(results[0].dims().is_empty());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If there is no evaluation model, the inputs do not fit, or the run fails.
    pub fn eval_step(
        &mut self,
        state: &CheckpointState,
        inputs: &[RunInput<'_>],
        deliver: &mut Deliver<'_>,
    ) -> Result<()> {
        self.check_state(state)?;
        self.phase_mut(false)?.check(inputs)?;
        self.eval_step_on(state, StepInputs::all_copied(inputs), deliver)
    }

    /// Runs [`Module::eval_step`] on inputs that may lie on the module's device: see [`Module::train_step_bound`].
    ///
    /// # Errors
    /// As [`Module::eval_step`].
    pub fn eval_step_bound(
        &mut self,
        state: &CheckpointState,
        feeds: &[Feed<'_>],
        deliver: &mut Deliver<'_>,
    ) -> Result<()> {
        let copies = self.copy_inputs(state, feeds, &[], false)?;
        let (copied, lent) = split_inputs(feeds, &copies);
        self.eval_step_on(state, StepInputs { copied_values: &copied, in_place: &lent }, deliver)
    }

    /// Runs an evaluation step on inputs that [`Module::copy_inputs`] has checked.
    pub(crate) fn eval_step_on(
        &mut self,
        state: &CheckpointState,
        inputs: StepInputs<'_>,
        deliver: &mut Deliver<'_>,
    ) -> Result<()> {
        let eval = self.eval.as_mut().ok_or_else(|| no_eval_model("an evaluation step"))?;
        let mut planes = parameter_binding::planes(state, &self.gradients);
        let (entry, scalars) = (ProgramEntry::Accumulate, scalars(state, self.rank));
        if !self.detect_anomaly {
            let (how, trace) = ((entry, scalars), self.trace.as_mut());
            let runners = eval.executables_for(inputs, planes.len(), &self.backend);
            planes.extend(inputs.in_place_memories());
            let run = runners.run_traced(&mut self.work, &planes, how, trace, inputs.copied_values, deliver);
            drop(planes);
            return run.map_err(|error| self.explain_with_copies(error, inputs, false));
        }
        let inputs = inputs.copied_values;
        let mut finding = None;
        let outputs = &eval.outputs;
        let run = eval.executables.run_traced(
            &mut self.work,
            &planes,
            (entry, scalars),
            self.trace.as_mut(),
            inputs,
            &mut |k, dtype, dims, value| {
                if finding.is_none() {
                    finding = anomaly::check_result(k, &outputs[k].name, (dtype, dims), value)?;
                }
                deliver(k, dtype, dims, value)
            },
        );
        if let Err(error) = run {
            drop(planes);
            return Err(self.add_sufficient_limit(error, inputs, false));
        }
        let Some(eval) = &self.eval else { return Ok(()) };
        let Some(finding) = finding else { return Ok(()) };
        let (runners, backend, layout) = (&eval.executables, &self.backend, &*self.layout);
        let again = Replay {
            executables: runners,
            backend,
            planes: &planes,
            gradient_mode: entry,
            scalars,
            inputs,
            layout,
        };
        Err(Error::Anomaly(Box::new(Anomaly { finding, path: again.trace_origin()? })))
    }

    /// Runs an evaluation step and writes the results to memory of the caller, in the order of
    /// [`Module::outputs`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::RunInput::from);
    /// use ortrain::Destination;
    ///
    /// let mut loss = [0.0];
    /// module.eval_step_into(&state, &inputs, &mut [Destination::f32(&[], &mut loss)])?;
    /// assert!(loss[0] > 0.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Module::eval_step`]; also if number, types or shapes of `outputs` do not match the results.
    pub fn eval_step_into(
        &mut self,
        state: &CheckpointState,
        inputs: &[RunInput<'_>],
        outputs: &mut [Destination<'_>],
    ) -> Result<()> {
        self.check_state(state)?;
        let eval = self.eval.as_mut().ok_or_else(|| no_eval_model("an evaluation step"))?;
        eval.check(inputs)?;
        eval.check_outputs(&self.work, inputs, outputs)?;
        let mut fill = OutputWriter::new(outputs);
        self.eval_step(state, inputs, &mut |k, dtype, dims, value| fill.write(k, dtype, dims, value))?;
        fill.finish(self.outputs(false))
    }

    /// Returns the memory need of a step on these inputs, without allocating it. Programs that are
    /// specialized during a run (after functions on the host) do not count.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// use ortrain::{RunInput, Tensor};
    ///
    /// let mut of = |rows: usize| {
    ///     let (x, labels) = (Tensor::f32(&[rows, 64], &vec![0.0; rows * 64]), Tensor::i64(&[rows], &vec![0; rows]));
    ///     module.memory_need(&[RunInput::from(&x), RunInput::from(&labels)], true)
    /// };
    /// assert!(of(64)?.work > of(8)?.work);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Module::train_step`] or [`Module::eval_step`], without the errors of the run.
    pub fn memory_need(&mut self, inputs: &[RunInput<'_>], training: bool) -> Result<MemoryNeed> {
        let phase = match training {
            true => &mut self.train,
            false => self.eval.as_mut().ok_or_else(|| no_eval_model("an evaluation step"))?,
        };
        phase.check(inputs)?;
        Ok(phase.executables.executor(&self.work, inputs)?.memory_need(&self.work))
    }

    /// Returns the schedule and the memory need of a step on inputs of these shapes, without running it.
    pub(crate) fn plan(&self, dims: &[&[usize]], training: bool) -> Result<(Arc<Schedule>, MemoryNeed)> {
        let phase = match training {
            true => &self.train,
            false => self.eval.as_ref().ok_or_else(|| no_eval_model("an evaluation step"))?,
        };
        phase.executables.plan(&self.work, dims)
    }

    /// Returns the inputs with values that decide shapes, as far as [`Module::planned`] has found them.
    pub(crate) fn shape_deciding_inputs(&self, training: bool) -> Vec<String> {
        let phase = if training { Some(&self.train) } else { self.eval.as_ref() };
        let positions = phase.map(|phase| phase.executables.shape_deciding_inputs()).unwrap_or_default();
        let names = self.input_names(training);
        positions.into_iter().filter_map(|k| names.get(k).map(|name| (*name).to_owned())).collect()
    }

    /// Profiles steps: the time of each instruction, beside the limit of the machine. The results of the last
    /// step are passed to `deliver`; they are bit-identical to a step without profile.
    ///
    /// These are real steps, but they change nothing: outputs of a step in place (gradients, running
    /// statistics) are written to copies, which take memory during the profile. Parameters, gradients,
    /// running statistics, the number of training steps and a pending [`Module::lazy_reset_grad`] remain
    /// unchanged.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::RunInput::from);
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
        inputs: &[RunInput<'_>],
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
        // Gradients are written, and so are frozen planes with running statistics.
        let trainable = self.layout.trainable.len();
        let written_range = if options.training { trainable..real.len() } else { 0..0 };
        let placement = Placement::of(&self.backend);
        let copies =
            written_range.clone().map(|k| placement.copy_plane(real[k])).collect::<Result<Vec<_>>>()?;
        let mut planes: parameter_binding::Planes<'_> = real.iter().copied().collect();
        for (k, copy) in written_range.zip(&copies) {
            planes[k] = copy;
        }
        let bindings = Bindings { planes: &planes };
        let runner = phase.executables.executor(&self.work, inputs)?;
        let scalars = scalars(state, self.rank);
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
        let products = ProductMode { precision: self.precision, bf16_unit: self.backend.bf16_unit() };
        let planning = phase.executables.profile_planning(&self.work, inputs)?;
        Ok(collector.finish(limits, runner.memory_need(&self.work), planning, products))
    }

    /// Makes the next training step replace the gradients instead of accumulating. Until then they remain
    /// (unless a step is interrupted: [`ModuleOptions::interrupt`]).
    pub fn lazy_reset_grad(&mut self) {
        self.accumulate = false;
    }

    /// Makes the next step accumulate into the current gradients.
    pub(crate) fn accumulate_next(&mut self) {
        (self.accumulate, self.is_new) = (true, false);
    }

    fn phase(&self, training: bool) -> Option<&Phase> {
        if training { Some(&self.train) } else { self.eval.as_ref() }
    }

    /// Returns true if the module has an evaluation model.
    #[must_use]
    pub fn has_eval_model(&self) -> bool {
        self.eval.is_some()
    }

    /// Returns the precision of inner products, as set by [`ModuleOptions::precision`].
    #[must_use]
    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// Returns the unit that multiplies bfloat16: `"amx"`, `"avx512_bf16"` or `"emulated"`; `None` for
    /// [`Precision::F32`] and on the reference.
    #[must_use]
    pub fn bf16_unit(&self) -> Option<&'static str> {
        self.backend.bf16_unit()
    }

    /// Returns the inputs of a step, in order. Empty without an evaluation model if `training` is false.
    #[must_use]
    pub fn inputs(&self, training: bool) -> &[ValueInfo] {
        self.phase(training).map_or(&[], |phase| &phase.signature.infos)
    }

    /// Returns the outputs of a step, in order. Empty without an evaluation model if `training` is false.
    #[must_use]
    pub fn outputs(&self, training: bool) -> &[ValueInfo] {
        self.phase(training).map_or(&[], |phase| &phase.outputs)
    }

    /// Returns the names of [`Module::inputs`].
    #[must_use]
    pub fn input_names(&self, training: bool) -> Vec<&str> {
        self.inputs(training).iter().map(|info| info.name.as_str()).collect()
    }

    /// Returns the names of [`Module::outputs`].
    #[must_use]
    pub fn output_names(&self, training: bool) -> Vec<&str> {
        self.outputs(training).iter().map(|info| info.name.as_str()).collect()
    }

    /// Returns the accumulated gradient of a parameter in this module; `None` for a frozen or unknown
    /// parameter.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::RunInput::from);
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

    /// Returns the planes of the gradients, which mirror the planes of the trained parameters.
    ///
    /// To average with another worker's gradients, in place:
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::RunInput::from);
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

    /// Returns the position of the node that computes the gradient of a parameter in the training graph.
    pub(crate) fn gradient_position(&self, name: &str) -> usize {
        let graph = self.train.executables.graph();
        let completes = |node: &ortrain_graph::Node| {
            node.present_outputs().any(|id| {
                let output = graph.name_of(id);
                output.ends_with(UPDATED_SUFFIX) && parameter_of_gradient(output) == Some(name)
            })
        };
        // The node that adds the gradient to the sum so far may be at the end of the graph.
        let Some(adds) = graph.nodes.iter().find(|node| completes(node)) else { return graph.nodes.len() };
        let is_input = |id| adds.present_inputs().any(|input| input == id);
        graph.nodes.iter().rposition(|node| node.present_outputs().any(is_input)).unwrap_or(0)
    }

    /// Returns true if a training step updates frozen parameters: running statistics.
    pub(crate) fn updates_frozen(&self) -> bool {
        self.updates_frozen
    }

    pub(crate) fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// Returns the parameters of the training model, in the order of its inputs.
    fn packed_entries<'a>(
        &'a self,
        state: &'a CheckpointState,
        trainable_only: bool,
    ) -> impl Iterator<Item = &'a Entry> {
        let entries = self.parameters.iter().filter_map(|name| state.entry(name));
        entries.filter(move |entry| entry.requires_grad || !trainable_only)
    }

    /// Returns the number of elements of all parameters of the training model, or of the trained ones.
    #[must_use]
    pub fn parameters_size(&self, state: &CheckpointState, trainable_only: bool) -> usize {
        self.packed_entries(state, trainable_only).map(Entry::elements).sum()
    }

    /// Concatenates the parameters, in the order of the training model's inputs.
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
    /// If a parameter is not float32, or the state is nominal.
    pub fn copy_parameters_to_buffer(
        &self,
        state: &CheckpointState,
        trainable_only: bool,
    ) -> Result<Vec<f32>> {
        self.check_state(state)?;
        self.pack(state, trainable_only, |entry| state.memory_of(entry))
    }

    /// Replaces the parameters by a buffer of [`Module::copy_parameters_to_buffer`]. A buffer of all
    /// parameters also gives a nominal state its values.
    ///
    /// A round of federated averaging on the server:
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
    /// If the buffer has another length or a parameter is not float32. If the state is nominal, and the
    /// buffer has trained parameters only, or the model does not have all parameters.
    pub fn copy_buffer_to_parameters(
        &self,
        state: &mut CheckpointState,
        buffer: &[f32],
        trainable_only: bool,
    ) -> Result<()> {
        self.check_layout(state)?;
        if trainable_only {
            state.require_values()?;
        }
        self.check_buffer(state, trainable_only, buffer)?;
        if state.is_nominal() {
            if let Some(entry) = state.entries().iter().find(|entry| !self.parameters.contains(&entry.name)) {
                return Err(Error::State(format!(
                    "the state stays nominal: the training model has no parameter {:?}, so the buffer has no value \
                     for it",
                    entry.name
                )));
            }
            state.mark_full()?;
        }
        self.unpack(state, trainable_only, buffer, |entry| state.memory_of(entry))?;
        if !trainable_only {
            state.bump_generation();
        }
        state.initialize_slots()
    }

    /// Copies the accumulated gradients into one buffer, in the order and with the length of
    /// [`Module::copy_parameters_to_buffer`] for the trained parameters.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::RunInput::from);
    /// module.train_step(&mut state, &inputs, &mut |_, _, _, _| Ok(()))?;
    /// let gradients = module.copy_gradients_to_buffer(&state)?;
    /// let norm = gradients.iter().map(|element| element * element).sum::<f32>().sqrt();
    /// assert!(norm > 0.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If a parameter is not float32, or the state is nominal.
    pub fn copy_gradients_to_buffer(&self, state: &CheckpointState) -> Result<Vec<f32>> {
        self.check_state(state)?;
        self.pack(state, true, |entry| &self.gradients[entry.plane])
    }

    /// Replaces the accumulated gradients by a buffer of [`Module::copy_gradients_to_buffer`], or by a mean
    /// of several. A pending [`Module::lazy_reset_grad`] remains pending.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::RunInput::from);
    /// # module.train_step(&mut state, &inputs, &mut |_, _, _, _| Ok(()))?;
    /// let mut gradients = module.copy_gradients_to_buffer(&state)?;
    /// gradients.iter_mut().for_each(|element| *element = element.clamp(-0.01, 0.01));
    /// module.copy_buffer_to_gradients(&state, &gradients)?;
    /// optimizer.step(&mut state, &module)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the buffer has another length, a parameter is not float32, or the state is nominal.
    pub fn copy_buffer_to_gradients(&mut self, state: &CheckpointState, buffer: &[f32]) -> Result<()> {
        self.check_state(state)?;
        self.check_buffer(state, true, buffer)?;
        self.unpack(state, true, buffer, |entry| &self.gradients[entry.plane])?;
        Ok(())
    }

    /// Returns the L2 norms of each trained parameter and of its accumulated gradient, in name order. Sums
    /// are `f64`.
    ///
    /// A layer with zero gradients is dead; a layer with gradients that are large relative to its parameters
    /// explodes.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::RunInput::from);
    /// module.train_step(&mut state, &inputs, &mut |_, _, _, _| Ok(()))?;
    /// for norms in module.norms(&state)? {
    ///     assert!(norms.gradient > 0.0, "{} learns nothing", norms.name);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the state is nominal or belongs to another module.
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

    /// Returns the L2 norm of all gradients together.
    pub(crate) fn gradient_norm(&self, state: &CheckpointState) -> Result<f64> {
        let trained = state.entries().iter().filter(|entry| entry.requires_grad);
        let squares = trained.map(|entry| Ok(norm(entry, &self.gradients[entry.plane])?.powi(2)));
        Ok(squares.sum::<Result<f64>>()?.sqrt())
    }

    /// Concatenates the values of the parameters in `memory`.
    fn pack<'a>(
        &'a self,
        state: &'a CheckpointState,
        trainable_only: bool,
        memory: impl Fn(&'a Entry) -> &'a Arc<Memory>,
    ) -> Result<Vec<f32>> {
        let mut buffer = vec![0.0_f32; self.parameters_size(state, trainable_only)];
        let mut rest = buffer.as_mut_slice();
        for entry in self.packed_entries(state, trainable_only) {
            check_packable(entry)?;
            let (part, after) = rest.split_at_mut(entry.elements());
            memory(entry).read(entry.offset, bytemuck::cast_slice_mut(part))?;
            rest = after;
        }
        Ok(buffer)
    }

    /// Checks that a buffer has the length of a result of [`Module::pack`].
    fn check_buffer(&self, state: &CheckpointState, trainable_only: bool, buffer: &[f32]) -> Result<()> {
        let expected = self.parameters_size(state, trainable_only);
        if buffer.len() != expected {
            return Err(Error::BufferLength { expected, found: buffer.len() });
        }
        self.packed_entries(state, trainable_only).try_for_each(check_packable)
    }

    /// Writes a checked buffer to the parameters in `memory`.
    fn unpack<'a>(
        &'a self,
        state: &'a CheckpointState,
        trainable_only: bool,
        mut buffer: &[f32],
        memory: impl Fn(&'a Entry) -> &'a Arc<Memory>,
    ) -> Result<()> {
        for entry in self.packed_entries(state, trainable_only) {
            let (part, after) = buffer.split_at(entry.elements());
            memory(entry).write(entry.offset, bytemuck::cast_slice(part))?;
            buffer = after;
        }
        Ok(())
    }

    /// Writes the evaluation model with only these outputs and with the current parameter values as
    /// initializers.
    ///
    /// Everything else remains as in the evaluation model: names, operator sets, metadata, order. Any value
    /// of the graph can be an output, also an intermediate one. Unused inputs are removed.
    ///
    /// A model of more than 2 GiB stores its weights, also the weights of a frozen base, in `<path>.data`
    /// beside it.
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
    /// If there is no evaluation model, no output or an unknown one is named, or the file cannot be written.
    pub fn export_model_for_inferencing(
        &self,
        state: &CheckpointState,
        path: impl AsRef<Path>,
        graph_output_names: &[&str],
    ) -> Result<()> {
        self.export_with_external_data(state, path, graph_output_names, LARGEST_MESSAGE as u64)
    }

    /// Exports like [`Module::export_model_for_inferencing`] with another threshold: a model of more than
    /// `above` bytes stores its weights in `<path>.data`, which belongs to it. (An ONNX file has at most 2
    /// GiB.)
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
    /// As [`Module::export_model_for_inferencing`].
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
        let data_path = ortrain_files::resolved(&data);
        if let Some(file) = self
            .external_files
            .iter()
            .find(|file| std::fs::canonicalize(&data_path).is_ok_and(|at| at == **file))
        {
            return Err(Error::Argument(format!(
                "the model cannot be exported to {}: its weights would replace {}, which has the weights of the \
                 training models; export it under another name, or to another folder",
                path.display(),
                file.display()
            )));
        }
        Ok(model.save_above(path, above)?)
    }

    /// Returns the model that [`Module::export_model_for_inferencing`] writes.
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
    /// As [`Module::export_model_for_inferencing`], without the errors of the file.
    pub fn inference_model(
        &self,
        state: &CheckpointState,
        graph_output_names: &[&str],
    ) -> Result<LoadedModel> {
        self.check_state(state)?;
        let message = self.eval_message.as_ref().ok_or_else(|| no_eval_model("an export"))?;
        let eval = self.eval.as_ref().ok_or_else(|| no_eval_model("an export"))?;
        export::inference_model(message, eval.executables.graph(), state, graph_output_names)
    }

    /// Returns the current memory use of the module and of the optimizer of its state.
    #[must_use]
    pub fn memory(&self, state: &CheckpointState) -> MemoryUse {
        let bytes = |planes: &[PlaneLayout]| planes.iter().map(|plane| plane.bytes).sum::<usize>();
        MemoryUse {
            parameters: bytes(&self.layout.trainable) + bytes(&self.layout.frozen),
            gradients: bytes(&self.layout.trainable),
            moments: state.slot_bytes(),
            work: self.work.arena().len(),
            scratch: self.work.scratch().len(),
        }
    }

    /// Returns the graphs and the programs compiled so far, as text.
    #[must_use]
    pub fn dump(&self) -> String {
        let mut out = String::new();
        for (name, phase) in [("training", Some(&self.train)), ("evaluation", self.eval.as_ref())] {
            let Some(phase) = phase else { continue };
            let _ = writeln!(out, "{name} {}", phase.executables.graph());
            let lent = phase.in_place_executables.iter().flat_map(|(_, runners)| runners.schedules());
            for schedule in phase.executables.schedules().chain(lent) {
                let _ = writeln!(out, "{name} {schedule}");
            }
        }
        out
    }

    /// Returns an error if the state is nominal or has other parameters than the state of the module.
    pub(crate) fn check_state(&self, state: &CheckpointState) -> Result<()> {
        state.require_values()?;
        self.check_layout(state)
    }

    fn check_layout(&self, state: &CheckpointState) -> Result<()> {
        match state.shared_layout() {
            Some(layout) if *layout == self.layout => state.check_device(self.backend.device()),
            _ => Err(Error::OtherState { what: "module" }),
        }
    }
}

/// Returns the error of a call that requires an evaluation model.
fn no_eval_model(call: &'static str) -> Error {
    Error::NoEvalModel { object: "module", call }
}

/// The norms of a parameter and of its gradient: see [`Module::norms`].
///
/// ```
/// let norms = ortrain::Norms { name: "fc2.bias".into(), parameter: 2.0, gradient: 0.01 };
/// println!("{}: a step of rate 0.1 changes it by {:.1e}", norms.name, 0.1 * norms.gradient / norms.parameter);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Norms {
    /// Name of the parameter.
    pub name: String,
    /// L2 norm of the parameter.
    pub parameter: f64,
    /// L2 norm of its accumulated gradient.
    pub gradient: f64,
}

/// Computes the L2 norm of a parameter, or of its gradient, in a plane.
fn norm(entry: &Entry, plane: &Memory) -> Result<f64> {
    /// Chunk size in bytes; a multiple of every element size.
    const CHUNK_BYTES: usize = 1 << 16;
    let bytes = entry.elements() * entry.dtype.size();
    let mut part = [0; CHUNK_BYTES];
    let mut sum = 0.0;
    for at in (0..bytes).step_by(CHUNK_BYTES) {
        let part = &mut part[..CHUNK_BYTES.min(bytes - at)];
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

/// Sums the squares of numbers in sixteen accumulators, since a single accumulator would be bound by latency.
fn sum_of_squares<const SIZE: usize>(bytes: &[u8], to_f64: impl Fn([u8; SIZE]) -> f64) -> f64 {
    let mut sums = [0.0; 16];
    let add = |sum: &mut f64, bits: [u8; SIZE]| {
        let value = to_f64(bits);
        *sum += value * value;
    };
    let (rows, rest) = bytes.as_chunks::<SIZE>().0.as_chunks::<16>();
    for row in rows {
        sums.iter_mut().zip(row).for_each(|(sum, &bits)| add(sum, bits));
    }
    sums.iter_mut().zip(rest).for_each(|(sum, &bits)| add(sum, bits));
    sums.iter().sum()
}

/// Returns the bytes of parameters and gradients.
fn parameter_and_gradient_bytes(layout: &StateLayout) -> usize {
    let bytes = |planes: &[PlaneLayout]| planes.iter().map(|plane| plane.bytes).sum::<usize>();
    2 * bytes(&layout.trainable) + bytes(&layout.frozen)
}

/// Returns an error if the parameters and gradients alone exceed the limit.
fn check_planes(layout: &StateLayout, limit: Option<usize>) -> Result<()> {
    let Some(limit) = limit.filter(|&limit| parameter_and_gradient_bytes(layout) > limit) else {
        return Ok(());
    };
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
    let need = MemoryNeed { state: parameter_and_gradient_bytes(layout), ..MemoryNeed::default() };
    Err(RunError::OverLimit(Box::new(OverLimit { limit, need, largest })).into())
}

fn check_packable(entry: &Entry) -> Result<()> {
    if entry.dtype == DType::F32 {
        return Ok(());
    }
    Err(Error::Argument(format!(
        "parameter {:?} is {}, but a packed buffer holds float32 only; read the parameter itself",
        entry.name, entry.dtype
    )))
}

fn scalars(state: &CheckpointState, rank: u64) -> Scalars {
    let seed = state.seed().cast_unsigned().wrapping_add(rank.wrapping_mul(RANK_SEED_STEP));
    Scalars { seed, train_step: state.train_step_count() }
}
