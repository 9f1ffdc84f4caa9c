//! Optimizer steps on the parameters of a state.

mod divided;

use std::sync::Arc;

use ortrain_graph::{DType, Graph, ValueId, ValueType};
use ortrain_onnx::LoadedModel;
use ortrain_ops::Role;
use ortrain_ops::optimizers::{OptimizerSpec, SlotShape, expand_sequences};
use ortrain_ops::training::clips_gradients;
use ortrain_program::{GradientMode, InputView, OutputSink, PlaneId, Scalars, Workspace};
use rustc_hash::FxHashMap;

use crate::exec::executable_cache::ExecutableCache;
use crate::state::binding::{Planes, owned_role, sequence_role};
use crate::state::layout::{OwnedPlane, PlaneLayout, StateLayout, TensorLayout};
use crate::state::slots::RequiredSlots;
use crate::state::{OptimizerNeeds, OptimizerState};
use crate::train::learning_rate::check_rate;
use crate::train::optimizer_model::{Column, NumberInput, ParsedOptimizer, is_sequence, read_optimizer};
use crate::{CheckpointState, Error, ModelSource, Module, Result};
pub(crate) use divided::DividedOptimizer;

/// Settings table of a step.
#[derive(Debug, Default)]
struct Table {
    columns: Vec<Column>,
    bytes: Vec<u8>,
}

/// An optimizer model bound to a [`CheckpointState`].
///
/// The state owns the learning rate, the step counter and the moments. A second optimizer on the same state
/// therefore continues from them.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let (mut state, mut module, mut optimizer) = setup::training()?;
/// # let batch = setup::batch();
/// # let inputs = batch.each_ref().map(ortrain::InputView::from);
/// let before = state.parameter("fc2.bias")?.to_tensor()?;
/// module.train_step(&mut state, &inputs, &mut |_, _| Ok(()))?;
/// optimizer.step(&mut state, &module)?;
/// assert_ne!(state.parameter("fc2.bias")?.to_tensor()?, before);
/// assert_eq!(state.optimizer_step_count(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Optimizer {
    layout: Arc<StateLayout>,
    program: StepProgram,
    work: Workspace,
    /// Name, settings and groups in the model.
    spec: OptimizerSpec,
    /// True if the settings are constants of the model: ONNX Runtime's optimizers.
    in_model: bool,
    slots: Vec<RequiredSlots>,
    /// True if an ONNX Runtime optimizer clips the gradients by their norm.
    clips: bool,
}

/// Program of a step, and the inputs that are no sequences.
#[derive(Debug)]
struct StepProgram {
    runners: ExecutableCache,
    numbers: Vec<NumberInput>,
    table: Table,
}

/// Values of a step that follow from the values of all ranks.
#[derive(Clone, Debug, Default)]
struct RankSums {
    /// L2 norm of all gradients together.
    gradient_norm: f64,
    /// Sums over parameters: a row for each row of the settings.
    rows: Vec<Vec<f64>>,
}

/// Metadata of the gradients of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GradientInfo {
    /// Number of training steps in the sum.
    pub(crate) accumulated_steps: i64,
    /// Loss scale.
    pub(crate) loss_scale: f32,
}

/// Outcome of a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepOutcome {
    /// L2 norm of all gradients together, if the optimizer computes it.
    pub(crate) norm: Option<f64>,
    /// False if nothing changed because a gradient is NaN or infinite.
    pub(crate) updated: bool,
}

impl Optimizer {
    /// Creates an optimizer on a state. Missing slots are created with their initial values.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let artifacts = setup::artifacts()?;
    /// use ortrain::{ModelSource, Optimizer};
    ///
    /// let model = ModelSource::from_proto(&artifacts.optimizer_model.unwrap())?;
    /// let optimizer = Optimizer::new(model, &mut state, &module)?;
    /// assert_eq!(optimizer.learning_rate(&state)?, 0.001);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the model cannot be read, is no optimizer model, or the state has the slots of another optimizer.
    pub fn new(model: ModelSource, state: &mut CheckpointState, module: &Module) -> Result<Optimizer> {
        Optimizer::build(model, state, module, false)
    }

    /// Creates an optimizer that replaces another one on a state. Slots with the same name and shape are
    /// reused. Other slots start anew, and the settings are taken from the model.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// use ortrain::optim::{OptimizerSpec, optimizer_model};
    /// use ortrain::{DType, ModelSource, Optimizer};
    ///
    /// let lion = optimizer_model(&OptimizerSpec::new("Lion")?, &[DType::F32])?;
    /// let lion = ModelSource::from_proto(&lion)?;
    /// let error = Optimizer::new(lion.clone(), &mut state, &module).unwrap_err().to_string();
    /// assert!(error.contains("the state has the optimizer AdamW"), "{error}");
    /// let optimizer = Optimizer::replacing(lion, &mut state, &module)?;
    /// assert_eq!(optimizer.name(), "Lion");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the model cannot be read or is no optimizer model.
    pub fn replacing(model: ModelSource, state: &mut CheckpointState, module: &Module) -> Result<Optimizer> {
        Optimizer::build(model, state, module, true)
    }

    fn build(
        model: ModelSource,
        state: &mut CheckpointState,
        module: &Module,
        replace: bool,
    ) -> Result<Optimizer> {
        let label = model.label("the optimizer model");
        let ParsedOptimizer { mut graph, spec, in_model, is_spread, slots, columns } =
            read_optimizer(&label, &model.load()?)?;
        let layout = module.layout().clone();
        if state.shared_layout().is_none_or(|state_layout| *state_layout != layout) {
            return Err(Error::OtherState { what: "module" });
        }
        if columns.iter().any(|column| matches!(column, Column::Sum(_))) && state.owned().is_none() {
            let reason = "it needs sums of other ranks, but the state is not divided among ranks".into();
            return Err(Error::WrongModel { model: label, reason });
        }
        let declared = |id: &&ValueId| graph.name_of(**id) == "params";
        let declared = graph.inputs.iter().find(declared).and_then(|&id| graph.value(id).ty.dtype());
        if let (Some(declared), false) = (declared, in_model)
            && !layout.trainable.is_empty()
            && layout.trainable.iter().all(|plane| plane.dtype != declared)
        {
            let dtypes: Vec<String> = layout.trainable.iter().map(|plane| plane.dtype.to_string()).collect();
            return Err(Error::WrongModel {
                model: label,
                reason: format!(
                    "it is for parameters of {declared}, but {} are trained",
                    dtypes.join(" and ")
                ),
            });
        }
        let clips = clips_gradients(&graph);
        let before = state.optimizer().cloned();
        let needs = OptimizerNeeds { spec: &spec, in_model, slots: &slots };
        state.prepare_optimizer(&needs, replace)?;
        let build_optimizer = || {
            let optimizer = state.optimizer().ok_or(Error::OtherState { what: "optimizer" })?;
            let (roles, numbers) = match is_spread {
                false => {
                    let owned = state.owned().map(|owned| owned.as_slice());
                    roles_of_planes(&graph, &layout, owned, optimizer, &slots, in_model)?
                }
                true => roles_of_tensors(&label, &mut graph, &layout, optimizer, &slots)?,
            };
            let runners = ExecutableCache::new(graph, roles, module.backend().clone());
            // An update is short, and restoring it would require copies of all overwritten memory: it is not
            // interruptible.
            let work = Workspace::new(module.backend().clone());
            let parameters = optimizer.groups.len();
            let table = Table { columns, ..Table::default() };
            let program = StepProgram { runners, numbers, table };
            let new_optimizer = Optimizer { layout, program, work, spec, in_model, slots, clips };
            new_optimizer.check(&label, parameters)?;
            Ok(new_optimizer)
        };
        let result = build_optimizer();
        // On failure, the slots of the previous optimizer are restored.
        if result.is_err() {
            state.restore_optimizer(before);
        }
        result
    }

    /// Checks that a step can run on the parameters of the state.
    fn check(&self, label: &str, parameters: usize) -> Result<()> {
        if self.in_model {
            return Ok(());
        }
        let wrong = |reason: String| Error::WrongModel { model: label.to_owned(), reason };
        // A rank without a part of the parameters runs nothing.
        if parameters == 0 && !self.layout.trainable.is_empty() {
            return Ok(());
        }
        let StepProgram { runners, numbers, table } = &self.program;
        let table = [parameters, table.columns.len()];
        let dims: Vec<&[usize]> = (numbers.iter())
            .map(|number| if *number == NumberInput::Settings { &table[..] } else { &[1][..] })
            .collect();
        match runners.plan(&self.work, &dims) {
            Ok(_) => Ok(()),
            Err(Error::Shapes(source)) => Err(wrong(format!("it does not fit the parameters: {source}"))),
            Err(error) => Err(error),
        }
    }

    /// Updates the parameters with the gradients of a module. Returns the L2 norm of all gradients together,
    /// if the model clips them by it.
    ///
    /// The gradients remain unchanged, except that ONNX Runtime's optimizers replace them by the clipped
    /// ones.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// module.train_step(&mut state, &inputs, &mut |_, _| Ok(()))?;
    /// optimizer.step(&mut state, &module)?;
    /// assert_eq!(state.optimizer_step_count(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the state is nominal or belongs to another optimizer, no training step has run since
    /// [`Module::lazy_reset_grad`], or the run fails. [`Module::gradient_warning`] reports other probable
    /// mistakes before the step.
    pub fn step(&mut self, state: &mut CheckpointState, module: &Module) -> Result<Option<f64>> {
        let gradients =
            GradientInfo { accumulated_steps: module.accumulated_step_count().max(1), loss_scale: 1.0 };
        Ok(self.step_with(state, module, gradients)?.norm)
    }

    /// Runs [`Optimizer::step`] with metadata of the gradients.
    pub(crate) fn step_with(
        &mut self,
        state: &mut CheckpointState,
        module: &Module,
        gradients: GradientInfo,
    ) -> Result<StepOutcome> {
        module.check_state(state)?;
        if *module.layout() != self.layout {
            return Err(Error::OtherState { what: "optimizer" });
        }
        module.check_gradients()?;
        if self.slots.iter().any(|slot| self.planes_of(state, slot).is_empty()) {
            let needs = OptimizerNeeds { spec: &self.spec, in_model: self.in_model, slots: &self.slots };
            state.prepare_optimizer(&needs, false)?;
        }
        let norm = self.clips.then(|| module.gradient_norm(state)).transpose()?;
        let optimizer = optimizer_state(state)?;
        let step = optimizer.step.saturating_add(1);
        let planes = planes_of_step(&self.slots, (state, optimizer), module);
        let mut updated = [1_u8];
        let mut norm_bytes = [0_u8; 8];
        let mut has_norm = false;
        let settings = (!self.in_model).then_some(optimizer);
        self.program.run(
            &mut self.work,
            &planes,
            (optimizer, settings, step),
            gradients,
            &RankSums::default(),
            &mut |_, value| match (value.dtype, value.dims.iter().product::<usize>()) {
                (DType::Bool, 1) => value.copy_to(&mut updated),
                (DType::F64, 1) => {
                    has_norm = true;
                    value.copy_to(&mut norm_bytes)
                }
                _ => Ok(()),
            },
        )?;
        drop(planes);
        module.mark_gradients_used();
        let total_norm = has_norm.then(|| f64::from_le_bytes(norm_bytes));
        let updated =
            updated[0] != 0 && !(self.spec.loss_scale && total_norm.is_some_and(|norm| !norm.is_finite()));
        if updated {
            count_step(state, step);
        }
        Ok(StepOutcome { norm: norm.or(total_norm), updated })
    }

    /// Returns the planes of a slot in a state.
    fn planes_of<'a>(
        &self,
        state: &'a CheckpointState,
        slot: &RequiredSlots,
    ) -> &'a [Arc<ortrain_program::Memory>] {
        state.optimizer().map_or(&[], |optimizer| optimizer.slot_planes(&slot.slot.name))
    }

    /// Returns the name of the optimizer.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.spec.optimizer
    }

    /// Returns the current settings of the optimizer and its groups of parameters.
    ///
    /// # Errors
    /// If the state belongs to another optimizer.
    pub fn spec<'a>(&'a self, state: &'a CheckpointState) -> Result<&'a OptimizerSpec> {
        Ok(optimizer_state(state)?.spec.as_ref().unwrap_or(&self.spec))
    }

    /// Changes settings of the optimizer or of its groups, from the next step on. The state stores the
    /// settings, and checkpoints include them.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, _) = setup::training()?;
    /// use ortrain::optim::{Group, OptimizerSpec, optimizer_model};
    /// use ortrain::{DType, ModelSource, Optimizer};
    ///
    /// let mut spec = OptimizerSpec::new("AdamW")?;
    /// spec.groups.push(Group { parameters: vec!["fc2.bias".into()], ..Group::default() });
    /// let model = ModelSource::from_proto(&optimizer_model(&spec, &[DType::F32])?)?;
    /// let mut optimizer = Optimizer::replacing(model, &mut state, &module)?;
    /// optimizer.change(&mut state, |spec| {
    ///     spec.groups[0].settings.insert("weight_decay".into(), 0.0);
    /// })?;
    /// assert_eq!(optimizer.spec(&state)?.setting_of(Some(0), "weight_decay"), Some(0.0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the settings are constants of the optimizer model (ONNX Runtime's optimizers), or the change is
    /// invalid: a value out of range, another optimizer, other groups, or options that the model does not
    /// have.
    pub fn change(
        &mut self,
        state: &mut CheckpointState,
        change: impl FnOnce(&mut OptimizerSpec),
    ) -> Result<()> {
        let optimizer = state.optimizer_mut().ok_or(Error::OtherState { what: "optimizer" })?;
        let Some(spec) = &mut optimizer.spec else {
            return Err(Error::State(format!(
                "the settings of this {} are in its optimizer model and cannot change; generate artifacts with a \
                 parameter group (of all parameters, for example) to store them in the state",
                self.spec.optimizer
            )));
        };
        let mut changed = spec.clone();
        change(&mut changed);
        let same = changed.optimizer == spec.optimizer
            && changed.flags == spec.flags
            && changed.slots == spec.slots
            && changed.settings.keys().eq(spec.settings.keys())
            && changed.max_norm.is_some() == spec.max_norm.is_some()
            && changed.mean_of_gathered == spec.mean_of_gathered
            && changed
                .groups
                .iter()
                .map(|group| &group.parameters)
                .eq(spec.groups.iter().map(|g| &g.parameters));
        if !same {
            return Err(Error::Argument(
                "the values of settings can change; the sets of settings, options, slots and groups cannot, because \
                 they are in its optimizer model"
                    .into(),
            ));
        }
        if !changed.has_same_slot_shapes(spec) {
            return Err(Error::Argument(
                "the matrices that AdamW trains cannot change, because the shapes of slots depend on them; choose \
                 them when the artifacts are made".into(),
            ));
        }
        changed.check().map_err(|source| Error::Argument(source.to_string()))?;
        *spec = changed;
        Ok(())
    }

    /// Returns the learning rate of the next step; 0.001 unless it was set or loaded.
    ///
    /// # Errors
    /// If the state belongs to another optimizer.
    pub fn learning_rate(&self, state: &CheckpointState) -> Result<f32> {
        optimizer_state(state).map(|optimizer| optimizer.learning_rate)
    }

    /// Returns the number of completed steps, including steps before the state was saved and loaded.
    ///
    /// # Errors
    /// If the state belongs to another optimizer.
    pub fn step_count(&self, state: &CheckpointState) -> Result<i64> {
        optimizer_state(state).map(|optimizer| optimizer.step)
    }

    /// Sets the learning rate. A scheduler overwrites it at its next step.
    ///
    /// # Errors
    /// If the state belongs to another optimizer, or the rate is negative, infinite or NaN.
    pub fn set_learning_rate(&mut self, state: &mut CheckpointState, learning_rate: f32) -> Result<()> {
        check_rate("the learning rate", learning_rate)?;
        state.optimizer_mut().ok_or(Error::OtherState { what: "optimizer" })?.learning_rate = learning_rate;
        Ok(())
    }

    /// Returns the programs compiled so far, as text.
    #[must_use]
    pub fn dump(&self) -> String {
        let schedules: String =
            self.program.runners.schedules().map(|schedule| schedule.to_string() + "\n").collect();
        format!("{}\n{schedules}", self.program.runners.graph())
    }
}

fn optimizer_state(state: &CheckpointState) -> Result<&OptimizerState> {
    state.optimizer().ok_or(Error::OtherState { what: "optimizer" })
}

/// Returns the planes of a step: parameters, gradients, then each slot.
fn planes_of_step<'a>(
    slots: &[RequiredSlots],
    (state, optimizer): (&'a CheckpointState, &'a OptimizerState),
    module: &'a Module,
) -> Planes<'a> {
    let slots = slots.iter().flat_map(|slot| optimizer.slot_planes(&slot.slot.name));
    let planes = state.trainable_planes().iter().chain(module.gradient_planes()).chain(slots);
    planes.map(|plane| &**plane).collect()
}

/// Counts a step that has updated the parameters.
fn count_step(state: &mut CheckpointState, step: i64) {
    let Some(optimizer) = state.optimizer_mut() else { return };
    optimizer.step = step;
    if let Some(spec) = &mut optimizer.spec {
        let frozen = spec.groups.iter_mut().filter(|group| step <= group.frozen_steps);
        frozen.for_each(|group| group.skipped_steps = group.skipped_steps.saturating_add(1));
    }
}

impl StepProgram {
    /// Runs the program. `settings` is the optimizer state with the settings, unless they are in the model.
    fn run(
        &mut self,
        work: &mut Workspace,
        planes: &Planes<'_>,
        (optimizer, settings, step): (&OptimizerState, Option<&OptimizerState>, i64),
        gradients: GradientInfo,
        rank_sums: &RankSums,
        deliver: &mut OutputSink<'_>,
    ) -> Result<()> {
        if let Some(settings) = settings {
            self.table.fill(settings, step, rank_sums)?;
        }
        let rate = optimizer.learning_rate.to_le_bytes();
        let max_norm =
            optimizer.spec.as_ref().and_then(|spec| spec.max_norm).unwrap_or(f64::MAX).to_le_bytes();
        let (step_bytes, accumulated) = (step.to_le_bytes(), gradients.accumulated_steps.to_le_bytes());
        let (loss_scale, gradient_norm) =
            (gradients.loss_scale.to_le_bytes(), rank_sums.gradient_norm.to_le_bytes());
        let table_dims = [optimizer.groups.len(), self.table.columns.len()];
        let run_inputs: smallvec::SmallVec<[InputView<'_>; NumberInput::ALL.len()]> = (self.numbers.iter())
            .map(|number| {
                let scalar_dims: &[usize] = &[1];
                let (dtype, dims, bytes): (DType, &[usize], &[u8]) = match number {
                    NumberInput::LearningRate => (DType::F32, scalar_dims, &rate),
                    NumberInput::Step => (DType::I64, scalar_dims, &step_bytes),
                    NumberInput::GatheredSteps => (DType::I64, scalar_dims, &accumulated),
                    NumberInput::MaxNorm => (DType::F64, scalar_dims, &max_norm),
                    NumberInput::LossScale => (DType::F32, scalar_dims, &loss_scale),
                    NumberInput::Settings => (DType::F64, &table_dims, &self.table.bytes),
                    NumberInput::GradientNorm => (DType::F64, scalar_dims, &gradient_norm),
                };
                InputView { dtype, dims, bytes: bytes.into() }
            })
            .collect();
        let scalars = Scalars::default();
        self.runners.run(work, planes, GradientMode::Accumulate, scalars, &run_inputs, deliver)
    }
}

impl Table {
    /// Writes the settings of a step.
    fn fill(&mut self, optimizer: &OptimizerState, step: i64, rank_sums: &RankSums) -> Result<()> {
        let spec = optimizer.spec.as_ref().ok_or(Error::OtherState { what: "optimizer" })?;
        let width = self.columns.len() * size_of::<f64>();
        self.bytes.resize(optimizer.groups.len() * width, 0);
        let rows = self.bytes.chunks_exact_mut(width.max(1)).zip(&optimizer.groups);
        for (index, (row, group)) in rows.enumerate() {
            let group_spec = group.and_then(|group| spec.groups.get(group));
            for (cell, column) in row.as_chunks_mut::<8>().0.iter_mut().zip(&self.columns) {
                let value = match column {
                    Column::Lr => {
                        group_spec.and_then(|group| group.lr).map_or(0.0, |lr| lr * optimizer.schedule_factor)
                    }
                    Column::LrFactor => {
                        group_spec.map_or(1.0, |group| if group.lr.is_some() { 0.0 } else { group.lr_factor })
                    }
                    Column::SkippedSteps => match group_spec {
                        None => spec.skipped_steps as f64,
                        // Skipping all steps makes the group's own step 0: nothing changes.
                        Some(group) if step <= group.frozen_steps => step as f64,
                        Some(group) => group.skipped_steps as f64,
                    },
                    Column::Setting(name) => spec.setting_of(*group, name).ok_or_else(|| {
                        Error::State(format!("the optimizer of the state has no setting {name:?}"))
                    })?,
                    Column::Sum(sum) => rank_sums.rows.get(index).map_or(0.0, |sums| sums[*sum]),
                };
                *cell = value.to_le_bytes();
            }
        }
        Ok(())
    }
}

/// Returns the layouts of a sequence of an optimizer model, and the index of its first plane: parameters come
/// first, then gradients, then each slot.
fn planes_of_sequence<'a>(
    layout: &'a StateLayout,
    optimizer: &'a OptimizerState,
    slots: &[RequiredSlots],
    at: usize,
) -> Result<(&'a [PlaneLayout], usize)> {
    let first = at * layout.trainable.len();
    match at {
        0 | 1 => Ok((&layout.trainable, first)),
        at => {
            let slot = slots.get(at - 2).and_then(|slot| optimizer.slots.get(&slot.slot.name));
            slot.map(|slot| (slot.layout.as_slice(), first)).ok_or(Error::OtherState { what: "optimizer" })
        }
    }
}

/// Returns the position of a sequence among parameters, gradients and slots.
fn sequence_position(name: &str, slots: &[RequiredSlots]) -> Option<usize> {
    match name {
        "params" => Some(0),
        "gradients" => Some(1),
        name => slots.iter().position(|slot| slot.slot.name == name).map(|at| at + 2),
    }
}

/// Returns the roles of the inputs of a model over complete planes, and its number inputs.
fn roles_of_planes(
    graph: &Graph,
    layout: &StateLayout,
    owned: Option<&[OwnedPlane]>,
    optimizer: &OptimizerState,
    slots: &[RequiredSlots],
    in_model: bool,
) -> Result<(Vec<Role>, Vec<NumberInput>)> {
    let mut roles = Vec::with_capacity(graph.inputs.len());
    let mut numbers = Vec::new();
    let mut sequences = 0;
    for &id in &graph.inputs {
        let name = graph.name_of(id);
        if let (Some(number), false) = (NumberInput::of(name), is_sequence(graph, id)) {
            numbers.push(number);
            roles.push(Role::User);
            continue;
        }
        // Moments of ONNX Runtime's optimizers have different names in models and checkpoints.
        let at = if in_model { Some(sequences) } else { sequence_position(name, slots) };
        let at = at.ok_or(Error::OtherState { what: "optimizer" })?;
        let (planes, first) = planes_of_sequence(layout, optimizer, slots, at)?;
        roles.push(match owned {
            // Slots have memory for the owned part alone.
            Some(owned) => owned_role(owned, planes, at >= 2, first),
            None => sequence_role(planes, first),
        });
        sequences += 1;
    }
    Ok((roles, numbers))
}

/// Expands a model for each parameter, and returns the roles of its inputs and its number inputs.
fn roles_of_tensors(
    label: &str,
    graph: &mut Graph,
    layout: &StateLayout,
    optimizer: &OptimizerState,
    slots: &[RequiredSlots],
) -> Result<(Vec<Role>, Vec<NumberInput>)> {
    let tensors = |name: &str| {
        let at = sequence_position(name, slots)?;
        let (planes, first) = planes_of_sequence(layout, optimizer, slots, at).ok()?;
        let tensors = planes.iter().enumerate().flat_map(|(k, plane)| {
            let plane_id = PlaneId((first + k) as u32);
            let tensor_location = move |tensor: &TensorLayout| {
                let ty = ValueType::tensor(plane.dtype, &tensor.dims);
                (ty, Role::Plane(plane_id, tensor.offset))
            };
            plane.tensors.iter().map(tensor_location)
        });
        Some(tensors.collect::<Vec<(ValueType, Role)>>())
    };
    let count = layout.trainable.iter().map(|plane| plane.tensors.len()).sum();
    let types = |name: &str| Some(tensors(name)?.into_iter().map(|(ty, _)| ty).collect());
    let (_, members) =
        expand_sequences(graph, count, &types).map_err(|source| Error::model(label, source))?;
    let sequence_roles: FxHashMap<ValueId, Role> = ["params", "gradients"]
        .into_iter()
        .chain(slots.iter().map(|slot| slot.slot.name.as_str()))
        .flat_map(|name| {
            let of_sequence = members.iter().filter(move |member| &*member.sequence == name);
            of_sequence.zip(tensors(name).unwrap_or_default())
        })
        .map(|(member, (_, role))| (member.input, role))
        .collect();
    let mut roles = Vec::with_capacity(graph.inputs.len());
    let mut numbers = Vec::new();
    for &id in &graph.inputs {
        match (sequence_roles.get(&id), NumberInput::of(graph.name_of(id))) {
            (Some(role), _) => roles.push(role.clone()),
            (None, Some(number)) => {
                numbers.push(number);
                roles.push(Role::User);
            }
            (None, None) => return Err(Error::OtherState { what: "optimizer" }),
        }
    }
    Ok((roles, numbers))
}

/// Checks that a model is an optimizer model.
///
/// # Errors
/// As [`Optimizer::new`], without errors of the state.
pub(crate) fn check_optimizer_model(label: &str, model: &LoadedModel) -> Result<()> {
    read_optimizer(label, model).map(|_| ())
}

/// Returns the optimizer of an optimizer model.
///
/// # Errors
/// As [`check_optimizer_model`].
pub(crate) fn optimizer_of_model(label: &str, model: &LoadedModel) -> Result<OptimizerSpec> {
    read_optimizer(label, model).map(|read| read.spec)
}

/// Returns the graph of an element-wise optimizer model over complete planes, and its slots with one number
/// for each parameter. Returns `None` for other models.
pub(crate) fn graph_over_planes(label: &str, model: &LoadedModel) -> Option<(Graph, Vec<String>)> {
    let read = read_optimizer(label, model).ok().filter(|read| !read.in_model && !read.is_spread)?;
    let is_scalar = |slot: &&RequiredSlots| slot.shape().is_ok_and(|shape| shape == SlotShape::Scalar);
    let scalars = read.slots.iter().filter(is_scalar).map(|slot| slot.slot.name.clone()).collect();
    Some((read.graph, scalars))
}
