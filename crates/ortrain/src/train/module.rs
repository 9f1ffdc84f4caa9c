//! Training and evaluation of a model.

pub(crate) mod buffers;
mod evaluation;
pub(crate) mod export;
mod planning;
mod quantization;
mod training;

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ortrain_expr::unstoppable;
use ortrain_graph::{DType, Graph, ValueId};
use ortrain_onnx::LoadedModel;
use ortrain_ops::Role;
use ortrain_ops::passes::{infer::infer, updates::written_inputs};
use ortrain_ops::training::{classes_last_note, with_classes_last};
use ortrain_program::{
    Backend, InputView, LargeBuffer, Memory, MemoryNeed, OverLimit, PlaneId, Precision, RunError, Scalars,
    Workspace,
};

use crate::exec::executable_cache::{ExecutableCache, interruptible};
use crate::exec::inputs::Signature;
use crate::exec::outputs::check_all_targets;
use crate::exec::run_options::RunOptions;
use crate::exec::step_inputs::StepInputs;
use crate::exec::trace::Trace;
use crate::model::base_hash::check_base;
use crate::model::checks::{check_training, missing_parameter_reason};
use crate::model::class_axis;
use crate::model::graph::graph_to_run;
use crate::model::origins::Origins;
use crate::model::source::FilesRead;
use crate::state::binding::{self, bind, is_gradient};
use crate::state::gradient_names::{UPDATED_SUFFIX, parameter_of_gradient};
use crate::state::layout::{PlaneLayout, StateLayout};
use crate::state::placement::Placement;
use crate::{CheckpointState, Error, ModelSource, OutputTarget, ParameterView, Result, ValueInfo};

/// Options of a [`Module`]: the options of its runs, and the check for NaN and infinities.
///
/// ```
/// use ortrain::{ModuleOptions, RunOptions};
///
/// let options = ModuleOptions::from(RunOptions::default().memory_limit(64 << 20)).detect_anomaly(true);
/// assert_eq!(options.run.memory_limit, Some(64 << 20));
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ModuleOptions {
    /// Options of the runs.
    pub run: RunOptions,
    /// True if a step that produces NaN or infinities must fail: see [`ModuleOptions::detect_anomaly`].
    pub detect_anomaly: bool,
}

impl From<RunOptions> for ModuleOptions {
    fn from(run: RunOptions) -> ModuleOptions {
        ModuleOptions { run, ..ModuleOptions::default() }
    }
}

impl ModuleOptions {
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
/// # let inputs = batch.each_ref().map(ortrain::InputView::from);
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
    /// Files of the models' external data. An export must not overwrite them, and refers to the files of a base.
    origins: Origins,
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
    /// Returns the sum. [`RunOptions::memory_limit`](crate::RunOptions::memory_limit) limits the sum without the moments.
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
    fn check(&mut self, inputs: &[InputView<'_>]) -> Result<()> {
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
            let same = |((at, dims), (other, input)): (&(usize, Vec<usize>), &(usize, InputView<'_>))| {
                at == other && dims == input.dims
            };
            key.len() == inputs.in_place.len() && key.iter().zip(inputs.in_place).all(same)
        };
        if let Some(at) = self.in_place_executables.iter().position(|(key, _)| is_of(key)) {
            return &mut self.in_place_executables[at].1;
        }
        if self.in_place_executables.len() == MAX_IN_PLACE_VARIANTS {
            self.in_place_executables.remove(0);
        }
        let locate = |(index, (at, input)): (usize, &(usize, InputView<'_>))| {
            (*at, input.dims.to_vec(), PlaneId((planes + index) as u32))
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
        inputs: &[InputView<'_>],
        outputs: &[OutputTarget<'_>],
    ) -> Result<bool> {
        check_all_targets(&self.outputs, outputs)?;
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
        let interrupt = options.run.interrupt.clone();
        interruptible(interrupt.as_ref(), || Module::build(train, state, eval, options))
    }

    fn build(
        train: ModelSource,
        state: &mut CheckpointState,
        eval: Option<ModelSource>,
        options: ModuleOptions,
    ) -> Result<Module> {
        let ModuleOptions { run, detect_anomaly } = options;
        let (backend, precision) = (run.open_backend()?, run.precision);
        let computed = (&backend, precision);
        let label = train.label("the training model");
        let mut files = FilesRead::default();
        let train = train.load_with_files(None, &mut files)?;
        let mut graph = graph_to_run(&label, &train)?;
        let open_labels = class_axis::marked_labels(&train.proto);
        check_base(&label, &train.proto, state)?;
        drop(train);
        check_training(&label, &graph, state)?;
        binding::set_shapes_from(&graph, state)?;
        let bound = bind(&label, &mut graph, state, true)?;
        let train = Phase::new(&label, graph, bound.roles, Some(state), computed, open_labels)?;

        let mut eval_message = None;
        let eval = match eval {
            None => None,
            Some(source) => {
                let label = source.label("the evaluation model");
                let message = source.load_with_files(Some(train.executables.graph()), &mut files)?;
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
        let work = run.workspace(&backend, parameter_and_gradient_bytes(&layout));
        check_planes(&layout, run.memory_limit)?;
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
            origins: files.origins,
            precision,
            backend,
            work,
            accumulate: true,
            is_new: true,
            accumulated_steps: 0,
            gradients_are_used: AtomicBool::new(false),
            updates_frozen,
            detect_anomaly,
            returned_notes: Vec::new(),
            rank: 0,
            trace: None,
        })
    }

    /// Returns the training or the evaluation phase.
    fn phase_mut(&mut self, training: bool) -> Result<&mut Phase> {
        match training {
            true => Ok(&mut self.train),
            false => self.eval.as_mut().ok_or_else(|| no_eval_model("an evaluation step")),
        }
    }

    /// Returns and clears sentences about automatic choices of the last steps: a class axis that the labels
    /// of a first step determined.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// module.train_step(&mut state, &inputs, &mut |_, _| Ok(()))?;
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
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// module.train_step(&mut state, &inputs, &mut |_, _| Ok(()))?;
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
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// # module.train_step(&mut state, &inputs, &mut |_, _| Ok(()))?;
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

fn scalars(state: &CheckpointState, rank: u64) -> Scalars {
    let seed = state.seed().cast_unsigned().wrapping_add(rank.wrapping_mul(RANK_SEED_STEP));
    Scalars { seed, train_step: state.train_step_count() }
}

/// Returns the error of a call that requires an evaluation model.
fn no_eval_model(call: &'static str) -> Error {
    Error::NoEvalModel { object: "module", call }
}

/// Returns the bytes of parameters and gradients.
fn parameter_and_gradient_bytes(layout: &StateLayout) -> usize {
    let bytes = |planes: &[PlaneLayout]| planes.iter().map(|plane| plane.bytes).sum::<usize>();
    2 * bytes(&layout.trainable) + bytes(&layout.frozen)
}
