//! State of a training, and its memory planes.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use ortrain_checkpoint::{
    Checkpoint, Extras, Layout, ModuleState, NamedTensor, NominalTensor, OptimizerGroup, ParameterState,
    Property, SaveOptions, Scheduler,
};
use ortrain_graph::{DType, Tensor, byte_length};
use ortrain_ops::optimizers::OptimizerSpec;
use ortrain_program::{Backend, Memory, align};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::backend::prefault;
use crate::file_kind::{add_file_kind, add_kind_of_bytes};
use crate::placement::Placement;
use crate::slots::{RequiredSlots, Slot, SlotStorage, Slots, other_optimizer_error};
use crate::state_layout::{Entry, OwnedPlane, PlaneLayout, StateLayout, TensorLayout};
use crate::suggest::hint;
use crate::{Error, FileKind, Result};

/// Name of the only optimizer-state group that ONNX Runtime knows. Slots of optimizers that ONNX Runtime
/// lacks have the optimizer's name as a prefix. ONNX Runtime then rejects them instead of reading them as its
/// own moments.
const ONNXRUNTIME_GROUP: &str = "group0";
/// Default learning rate of an optimizer.
const DEFAULT_LEARNING_RATE: f32 = 0.001;

/// A view of a parameter or of its gradient.
///
/// `memory` is the live plane: the next step uses all values written there. It remains valid after the state
/// and all modules are dropped.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let mut state = setup::state()?;
/// let bias = state.parameter("fc2.bias")?;
/// assert_eq!((bias.dims.as_slice(), bias.requires_grad), (&[10][..], true));
/// // Written where it lies, all of it to 1.
/// bias.memory.write(bias.offset, &1.0_f32.to_le_bytes().repeat(10))?;
/// assert_eq!(bias.to_tensor()?.to_vec::<f32>(), [1.0; 10]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct ParameterView {
    /// The name of the parameter.
    pub name: Arc<str>,
    /// The element type.
    pub dtype: DType,
    /// The shape.
    pub dims: Vec<usize>,
    /// True if the parameter is trained. Views of frozen parameters are read-only by convention.
    pub requires_grad: bool,
    /// Plane of the tensor.
    pub memory: Arc<Memory>,
    /// Offset of the first byte.
    pub offset: usize,
}

impl ParameterView {
    /// Returns the number of bytes of the elements.
    #[must_use]
    pub fn byte_len(&self) -> usize {
        self.dims.iter().product::<usize>() * self.dtype.size()
    }

    /// Copies the current elements.
    ///
    /// # Errors
    /// If the elements are on a device, and the device fails.
    ///
    /// # Panics
    /// If the caller constructed an inconsistent view.
    pub fn to_tensor(&self) -> Result<Tensor> {
        let data = self.memory.to_vec(self.offset, self.byte_len())?;
        Ok(Tensor::new(self.dtype, self.dims.clone(), data.into()).expect("planes contain complete tensors"))
    }
}

/// Initial slots and counters of an optimizer: see [`CheckpointState::from_values`].
///
/// ```
/// assert_eq!(ortrain::OptimizerValues::default().step, 0);
/// ```
#[derive(Clone, Debug, Default)]
pub struct OptimizerValues {
    /// Number of optimizer steps.
    pub step: i64,
    /// Number of training steps of modules, with or without an optimizer step.
    pub train_step: u64,
    /// Learning rate, if known.
    pub learning_rate: Option<f32>,
    /// Slots by parameter, then by name (`momentum0`, `momentum1`). Without slots, an optimizer creates its
    /// own, and continues the counters.
    pub slots: BTreeMap<String, BTreeMap<String, Tensor>>,
}

/// Optimizer state between steps.
#[derive(Clone, Debug)]
pub(crate) struct OptimizerState {
    pub(crate) step: i64,
    pub(crate) initial_learning_rate: f32,
    pub(crate) learning_rate: f32,
    /// False if the file has no learning rate: files of ONNX Runtime only have the rate before any schedule.
    has_rate: bool,
    /// Current schedule factor for groups with their own learning rates.
    pub(crate) schedule_factor: f64,
    /// Settings and groups; `None` for ONNX Runtime's optimizers, which have them in their models.
    pub(crate) spec: Option<OptimizerSpec>,
    pub(crate) slots: Slots,
    /// True if slots must be initialized from parameter values that a nominal state does not have yet.
    has_uninitialized_slots: bool,
    /// Group of each trained parameter, in plane order.
    pub(crate) groups: Vec<Option<usize>>,
}

impl OptimizerState {
    /// Returns the planes of a slot.
    pub(crate) fn slot_planes(&self, name: &str) -> &[Arc<Memory>] {
        self.slots.get(name).map_or(&[], |slot| &slot.planes)
    }

    /// Returns the name of the optimizer, and the names of its slots.
    fn identity(&self) -> (&str, Vec<&str>) {
        let slots = self.slots.names();
        let name = match (&self.spec, slots.as_slice()) {
            (Some(spec), _) => &spec.optimizer,
            (None, ["momentum0"]) => "SGD",
            (None, _) => "AdamW",
        };
        (name, slots)
    }
}

/// Returns the group of each trained parameter, in plane order.
fn groups_of(spec: &OptimizerSpec, layout: &StateLayout) -> Vec<Option<usize>> {
    let groups = spec.groups.iter().enumerate();
    let owners: FxHashMap<&str, usize> =
        groups.flat_map(|(k, group)| group.parameters.iter().map(move |name| (name.as_str(), k))).collect();
    let tensors = layout.trainable.iter().flat_map(|plane| &plane.tensors);
    tensors.map(|tensor| owners.get(&*tensor.name).copied()).collect()
}

/// Returns the prefix of slot names in files.
fn slot_prefix(spec: &OptimizerSpec) -> String {
    format!("{}.", spec.optimizer)
}

/// Requirements of an optimizer model.
pub(crate) struct OptimizerNeeds<'a> {
    /// Name, settings and groups.
    pub(crate) spec: &'a OptimizerSpec,
    /// True if the settings are constants of the model: ONNX Runtime's optimizers.
    pub(crate) in_model: bool,
    pub(crate) slots: &'a [RequiredSlots],
}

/// State of a training: parameters, optimizer state, properties, and the random seed.
///
/// The state owns the memory of all of these. Trained parameters are in one plane per element type, frozen
/// ones in another. Moments of an optimizer are in planes that mirror the trainable ones. The order is sorted
/// by name, independent of the file; see [`CheckpointState::layout`]. Planes never move.
///
/// A *nominal* state has names and types but no values. The values are loaded all at once from a file
/// ([`CheckpointState::load_parameters`], [`CheckpointState::load_safetensors`]). After a [`crate::Module`]
/// has determined the shapes, a buffer is also possible ([`crate::Module::copy_buffer_to_parameters`]).
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let mut state = setup::state()?;
/// use ortrain::{CheckpointState, Tensor};
///
/// state.set_parameter("fc2.bias", &Tensor::f32(&[10], &[0.1; 10]))?;
/// state.set_property("epoch", 3);
/// let again = CheckpointState::from_bytes(state.to_bytes(false)?)?;
/// assert_eq!(again.parameter("fc2.bias")?.to_tensor()?.to_vec::<f32>(), [0.1; 10]);
/// assert_eq!(again.property("epoch")?, &3.into());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct CheckpointState {
    /// Sorted by name.
    entries: Vec<Entry>,
    nominal: bool,
    layout: Option<Arc<StateLayout>>,
    trainable: Vec<Arc<Memory>>,
    frozen: Vec<Arc<Memory>>,
    /// Location of the planes.
    home: Placement,
    /// Reference count that all modules of the state share.
    modules: Arc<()>,
    generation: u64,
    /// Gradient planes of the newest module.
    gradients: Vec<Arc<Memory>>,
    optimizer: Option<OptimizerState>,
    /// Parts of the trainable planes with optimizer slots on this rank, if ranks divide the slots.
    owned: Option<Arc<Vec<OwnedPlane>>>,
    /// Other optimizer groups of a file, which optimizers do not use.
    other_groups: Vec<OptimizerGroup>,
    properties: BTreeMap<String, Property>,
    seed: Option<i64>,
    train_step: u64,
    scheduler: Option<Scheduler>,
}

impl CheckpointState {
    /// Loads a checkpoint file.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut state = setup::state()?;
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("checkpoint");
    /// # state.save(&path, false)?;
    /// let state = ortrain::CheckpointState::load(path)?;
    /// assert_eq!(state.len(), 4);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the file does not exist, or is no valid checkpoint.
    pub fn load(path: impl AsRef<Path>) -> Result<CheckpointState> {
        let path = path.as_ref();
        let checkpoint = ortrain_checkpoint::load(path)
            .map_err(|error| add_file_kind(error, path, FileKind::Checkpoint))?;
        CheckpointState::from_checkpoint(checkpoint)
    }

    /// Loads the bytes of a checkpoint file, for example from [`CheckpointState::to_bytes`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut state = setup::state()?;
    /// let state = ortrain::CheckpointState::from_bytes(state.to_bytes(true)?)?;
    /// assert_eq!(state.len(), 4);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If they are no valid checkpoint, or its tensors are in a file beside it.
    pub fn from_bytes(bytes: impl Into<Bytes>) -> Result<CheckpointState> {
        let bytes = bytes.into();
        let checkpoint =
            ortrain_checkpoint::read(bytes.clone()).map_err(|error| add_kind_of_bytes(error, &bytes))?;
        CheckpointState::from_checkpoint(checkpoint)
    }

    /// Creates a state from the content of a checkpoint.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let artifacts = setup::artifacts()?;
    /// let state = ortrain::CheckpointState::from_checkpoint(artifacts.checkpoint)?;
    /// assert!(!state.is_nominal());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If a tensor exceeds the address space.
    pub fn from_checkpoint(checkpoint: Checkpoint) -> Result<CheckpointState> {
        let Checkpoint { module, optimizer_groups, properties, extras } = checkpoint;
        let nominal = module.is_nominal();
        let mut values: Vec<(Entry, Option<Tensor>)> = Vec::new();
        let mut add = |name: String, dtype, dims, requires_grad, value| {
            values
                .push((Entry { name: name.into(), dtype, requires_grad, dims, plane: 0, offset: 0 }, value));
        };
        match module {
            ModuleState::Full { trainable, frozen } => {
                for (requires_grad, list) in [(true, trainable), (false, frozen)] {
                    for NamedTensor { name, tensor } in list {
                        add(name, tensor.dtype(), Some(tensor.dims().to_vec()), requires_grad, Some(tensor));
                    }
                }
            }
            ModuleState::Nominal { trainable, frozen } => {
                for (requires_grad, list) in [(true, trainable), (false, frozen)] {
                    for NominalTensor { name, dtype } in list {
                        add(name, dtype, None, requires_grad, None);
                    }
                }
            }
        }
        let mut unique: FxHashSet<Arc<str>> = FxHashSet::default();
        values.retain(|(entry, _)| unique.insert(entry.name.clone()));
        values.sort_by(|(a, _), (b, _)| a.name.cmp(&b.name));
        let (entries, tensors): (Vec<Entry>, Vec<Option<Tensor>>) = values.into_iter().unzip();

        let read = |text: &str| {
            let spec = OptimizerSpec::from_text(text)?;
            spec.check().map(|()| spec)
        };
        let spec = extras.optimizer.as_deref().map(read).transpose();
        let spec =
            spec.map_err(|source| Error::State(format!("the optimizer of the checkpoint: {source}")))?;
        let prefix = spec.as_ref().map(slot_prefix).unwrap_or_default();
        let mut optimizer = None;
        let mut other_groups = Vec::new();
        for mut stored in optimizer_groups {
            if stored.name == ONNXRUNTIME_GROUP && optimizer.is_none() {
                for moment in stored.states.iter_mut().flat_map(|state| &mut state.moments) {
                    if let Some(name) = moment.name.strip_prefix(&prefix) {
                        moment.name = name.to_owned();
                    }
                }
                optimizer = Some(OptimizerState {
                    step: stored.step,
                    initial_learning_rate: stored.initial_learning_rate,
                    learning_rate: extras.learning_rate.unwrap_or(DEFAULT_LEARNING_RATE),
                    has_rate: extras.learning_rate.is_some(),
                    schedule_factor: extras
                        .schedule_factor
                        .filter(|factor| factor.is_finite())
                        .unwrap_or(1.0),
                    spec: spec.clone(),
                    slots: Slots::Stored(stored.states),
                    has_uninitialized_slots: false,
                    groups: Vec::new(),
                });
            } else {
                other_groups.push(stored);
            }
        }
        let mut state = CheckpointState {
            entries,
            nominal,
            layout: None,
            home: Placement::default(),
            modules: Arc::default(),
            trainable: Vec::new(),
            frozen: Vec::new(),
            generation: 0,
            gradients: Vec::new(),
            owned: None,
            optimizer,
            other_groups,
            properties,
            seed: extras.seed,
            train_step: extras.train_step.and_then(|step| u64::try_from(step).ok()).unwrap_or(0),
            scheduler: extras.scheduler,
        };
        if !nominal {
            state.allocate()?;
            state.trainable.iter().chain(&state.frozen).for_each(|plane| prefault(plane));
            for (entry, tensor) in state.entries.iter().zip(&tensors) {
                let tensor = tensor.as_ref().expect("full states have every value");
                state.memory_of(entry).write(entry.offset, tensor.data())?;
            }
        }
        Ok(state)
    }

    /// Creates a state from values: name, value, and true for a trained parameter. AdamW or SGD continues
    /// from `optimizer`.
    ///
    /// ```
    /// use ortrain::{CheckpointState, OptimizerValues, Tensor};
    ///
    /// let weight = || Tensor::f32(&[2], &[1.0, 2.0]);
    /// let slots = [("momentum0".to_owned(), weight()), ("momentum1".to_owned(), weight())];
    /// let optimizer = OptimizerValues {
    ///     step: 3,
    ///     train_step: 3,
    ///     learning_rate: Some(0.1),
    ///     slots: [("w".to_owned(), slots.into())].into(),
    /// };
    /// let state = CheckpointState::from_values([("w".to_owned(), weight(), true)], optimizer)?;
    /// assert_eq!(state.optimizer_step_count(), 3);
    /// # Ok::<(), ortrain::Error>(())
    /// ```
    ///
    /// # Errors
    /// If two parameters have the same name, or a slot belongs to no trained parameter or has another shape.
    pub fn from_values(
        parameters: impl IntoIterator<Item = (String, Tensor, bool)>,
        optimizer: OptimizerValues,
    ) -> Result<CheckpointState> {
        let (mut trainable, mut frozen) = (Vec::new(), Vec::new());
        let mut shapes: FxHashMap<String, Option<Vec<usize>>> = FxHashMap::default();
        for (name, tensor, is_trained) in parameters {
            let shape = is_trained.then(|| tensor.dims().to_vec());
            if shapes.insert(name.clone(), shape).is_some() {
                return Err(Error::State(format!("there are two parameters {name:?}")));
            }
            if is_trained { &mut trainable } else { &mut frozen }.push(NamedTensor::new(name, tensor));
        }
        let mut states = Vec::new();
        for (parameter, slots) in optimizer.slots {
            let Some(Some(shape)) = shapes.get(&parameter) else {
                return Err(Error::State(format!(
                    "there are slots of {parameter:?}, which is no trained parameter"
                )));
            };
            if let Some((slot, tensor)) = slots.iter().find(|(_, tensor)| tensor.dims() != shape.as_slice()) {
                return Err(Error::State(format!(
                    "slot {slot:?} of {parameter:?} has the shape {:?}, but the parameter has {shape:?}",
                    tensor.dims()
                )));
            }
            let moments = slots.into_iter().map(|(name, tensor)| NamedTensor::new(name, tensor)).collect();
            states.push(ParameterState { parameter, moments });
        }
        let rate = optimizer.learning_rate;
        let group = OptimizerGroup {
            name: ONNXRUNTIME_GROUP.into(),
            step: optimizer.step,
            initial_learning_rate: rate.unwrap_or(DEFAULT_LEARNING_RATE),
            states,
        };
        CheckpointState::from_checkpoint(Checkpoint {
            module: ModuleState::Full { trainable, frozen },
            optimizer_groups: match group.states.is_empty() && group.step == 0 {
                true => Vec::new(),
                false => vec![group],
            },
            properties: BTreeMap::new(),
            extras: Extras {
                learning_rate: rate,
                train_step: Some(i64::try_from(optimizer.train_step).unwrap_or(i64::MAX)),
                ..Extras::default()
            },
        })
    }

    /// Determines the layout and allocates zeroed planes. All shapes must be known.
    fn allocate(&mut self) -> Result<()> {
        let mut layout = StateLayout::default();
        for entry in &mut self.entries {
            let dims = entry.dims.clone().unwrap_or_default();
            let bytes = byte_length(entry.dtype, &dims)
                .map_err(|source| Error::Argument(format!("parameter {:?}: {source}", entry.name)))?;
            let planes = if entry.requires_grad { &mut layout.trainable } else { &mut layout.frozen };
            entry.plane = planes.iter().position(|plane| plane.dtype == entry.dtype).unwrap_or_else(|| {
                planes.push(PlaneLayout { dtype: entry.dtype, bytes: 0, tensors: Vec::new() });
                planes.len() - 1
            });
            let plane = &mut planes[entry.plane];
            entry.offset = plane.bytes;
            plane.bytes = isize::try_from(plane.bytes)
                .ok()
                .and_then(|used| used.checked_add_unsigned(bytes)?.checked_add_unsigned(crate::ALIGNMENT))
                .map(|_| align(plane.bytes + bytes))
                .ok_or_else(|| Error::Argument("the parameters are larger than can be addressed".into()))?;
            plane.tensors.push(TensorLayout { name: entry.name.clone(), dims, offset: entry.offset });
        }
        self.trainable = self.home.allocate_planes(&layout.trainable)?;
        self.frozen = self.home.allocate_planes(&layout.frozen)?;
        self.layout = Some(Arc::new(layout));
        Ok(())
    }

    /// Writes a checkpoint file. An existing file is replaced only after the new file is complete. With
    /// `include_optimizer_state`, it includes the moments, the step counters, the learning rate and the
    /// scheduler, if an optimizer exists.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("checkpoint");
    /// optimizer.step(&mut state, &module)?;
    /// state.save(&path, true)?;
    /// assert_eq!(ortrain::CheckpointState::load(&path)?.optimizer_step_count(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>, include_optimizer_state: bool) -> Result<()> {
        Ok(ortrain_checkpoint::save(&self.to_checkpoint(include_optimizer_state)?, path, Layout::State)?)
    }

    /// Saves like [`CheckpointState::save`] with another threshold: tensors of more than `above` bytes in
    /// total are stored in `<path>.data`, which belongs to the checkpoint. (`save` uses 1800 MiB, as
    /// onnxruntime-training does.)
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let state = setup::state()?;
    /// # let folder = tempfile::tempdir()?;
    /// let path = folder.path().join("checkpoint");
    /// state.save_with_external_data(&path, false, 0)?;
    /// assert!(folder.path().join("checkpoint.data").exists());
    /// assert_eq!(ortrain::CheckpointState::load(&path)?.len(), state.len());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn save_with_external_data(
        &self,
        path: impl AsRef<Path>,
        include_optimizer_state: bool,
        above: u64,
    ) -> Result<()> {
        let options = SaveOptions::new(Layout::State).external_above(above);
        Ok(ortrain_checkpoint::save(&self.to_checkpoint(include_optimizer_state)?, path, options)?)
    }

    /// Returns the bytes that [`CheckpointState::save`] writes, for example to send them.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// assert!(state.to_bytes(true)?.len() > state.to_bytes(false)?.len(), "moments take room");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the bytes exceed the 2 GiB limit of a buffer.
    pub fn to_bytes(&self, include_optimizer_state: bool) -> Result<Vec<u8>> {
        Ok(ortrain_checkpoint::encode(&self.to_checkpoint(include_optimizer_state)?, Layout::State)?)
    }

    /// Copies the state into plain data.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut state = setup::state()?;
    /// state.set_property("epoch", 3);
    /// let checkpoint = state.to_checkpoint(false)?;
    /// assert_eq!(checkpoint.properties["epoch"], 3.into());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the state is on a device, and the device fails.
    pub fn to_checkpoint(&self, include_optimizer_state: bool) -> Result<Checkpoint> {
        let of = |requires_grad: bool| {
            self.entries.iter().filter(move |entry| entry.requires_grad == requires_grad)
        };
        let module = if self.nominal {
            let list = |requires_grad| {
                of(requires_grad)
                    .map(|entry| NominalTensor { name: entry.name.to_string(), dtype: entry.dtype })
                    .collect()
            };
            ModuleState::Nominal { trainable: list(true), frozen: list(false) }
        } else {
            let list = |requires_grad| {
                of(requires_grad)
                    .map(|entry| Ok(NamedTensor::new(&*entry.name, self.view(entry).to_tensor()?)))
                    .collect::<Result<_>>()
            };
            ModuleState::Full { trainable: list(true)?, frozen: list(false)? }
        };
        let mut optimizer_groups = Vec::new();
        let mut extras = Extras {
            seed: self.seed,
            train_step: (self.train_step > 0).then(|| i64::try_from(self.train_step).unwrap_or(i64::MAX)),
            ..Extras::default()
        };
        if include_optimizer_state && !self.nominal {
            optimizer_groups.clone_from(&self.other_groups);
            if let Some(optimizer) = &self.optimizer {
                let mut states = optimizer.slots.stored(&self.entries)?;
                if let Some(spec) = &optimizer.spec {
                    let prefix = slot_prefix(spec);
                    let moments = states.iter_mut().flat_map(|state| &mut state.moments);
                    moments.for_each(|moment| moment.name.insert_str(0, &prefix));
                }
                optimizer_groups.push(OptimizerGroup {
                    name: ONNXRUNTIME_GROUP.into(),
                    step: optimizer.step,
                    initial_learning_rate: optimizer.initial_learning_rate,
                    states,
                });
                extras.learning_rate = Some(optimizer.learning_rate);
                extras.scheduler.clone_from(&self.scheduler);
                extras.optimizer = optimizer.spec.as_ref().map(OptimizerSpec::to_text);
                extras.schedule_factor = Some(optimizer.schedule_factor)
                    .filter(|factor| optimizer.spec.is_some() && *factor != 1.0);
            }
        }
        Ok(Checkpoint { module, optimizer_groups, properties: self.properties.clone(), extras })
    }

    /// Returns true if the parameter values have not been loaded.
    #[must_use]
    pub fn is_nominal(&self) -> bool {
        self.nominal
    }

    /// Returns the names of all parameters, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> + '_ {
        self.entries.iter().map(|entry| &*entry.name)
    }

    /// Returns the number of parameters.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns true if there are no parameters.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns true if a parameter has this name.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.entry(name).is_some()
    }

    /// Returns true if a parameter is trained; also for a nominal state.
    ///
    /// # Errors
    /// If no parameter has this name.
    pub fn requires_grad(&self, name: &str) -> Result<bool> {
        self.find_entry(name).map(|entry| entry.requires_grad)
    }

    /// Returns the element type of a parameter, and its shape if known; also for a nominal state.
    ///
    /// # Errors
    /// If no parameter has this name.
    pub fn type_of(&self, name: &str) -> Result<(DType, Option<&[usize]>)> {
        self.find_entry(name).map(|entry| (entry.dtype, entry.dims.as_deref()))
    }

    /// Returns views of all parameters, sorted by name.
    ///
    /// # Errors
    /// If the state is nominal.
    pub fn parameters(&self) -> Result<impl ExactSizeIterator<Item = ParameterView> + '_> {
        self.require_values()?;
        Ok(self.entries.iter().map(|entry| self.view(entry)))
    }

    /// Returns a view of a parameter.
    ///
    /// # Errors
    /// If no parameter has this name, or the state is nominal.
    pub fn parameter(&self, name: &str) -> Result<ParameterView> {
        let entry = self.find_entry(name)?;
        self.require_values()?;
        Ok(self.view(entry))
    }

    /// Replaces the value of a parameter. Shape and type must match.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut state = setup::state()?;
    /// use ortrain::Tensor;
    ///
    /// state.set_parameter("fc2.bias", &Tensor::f32(&[10], &[0.5; 10]))?;
    /// let error = state.set_parameter("fc2.bias", &Tensor::f32(&[5], &[0.5; 5])).unwrap_err();
    /// assert_eq!(error.to_string(), r#"parameter "fc2.bias" is float32[10], but a value of float32[5] was given"#);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If no parameter has this name, the value has another shape or type, or the state is nominal.
    pub fn set_parameter(&mut self, name: &str, value: &Tensor) -> Result<()> {
        let entry = self.entry_for(name, value)?;
        self.memory_of(entry).write(entry.offset, value.data())?;
        self.generation += u64::from(!entry.requires_grad);
        Ok(())
    }

    /// Returns the gradient of a parameter in the newest module on this state: `None` for frozen parameters,
    /// and before the first module.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// assert_eq!(state.gradient("fc2.bias")?.unwrap().dims, [10]);
    /// assert!(state.gradient("fc1.bias")?.is_none(), "it is frozen");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If no parameter has this name, or the state is nominal.
    pub fn gradient(&self, name: &str) -> Result<Option<ParameterView>> {
        let entry = self.find_entry(name)?;
        self.require_values()?;
        let planes = if entry.requires_grad { self.gradients.as_slice() } else { &[] };
        Ok(planes.get(entry.plane).map(|plane| view_in_plane(entry, plane)))
    }

    /// Returns a property.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut state = setup::state()?;
    /// use ortrain::Property;
    ///
    /// state.set_property("best", 0.25_f32);
    /// assert_eq!(state.property("best")?, &Property::Float(0.25));
    /// assert!(state.property("worst").is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If no property has this name.
    pub fn property(&self, name: &str) -> Result<&Property> {
        self.properties.get(name).ok_or_else(|| Error::UnknownProperty {
            name: name.to_owned(),
            hint: hint(name, self.properties.keys().map(String::as_str)),
        })
    }

    /// Sets or replaces a property: an integer, a float, or a text.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut state = setup::state()?;
    /// state.set_property("epoch", 3);
    /// state.set_property("best", 0.25_f32);
    /// state.set_property("name", "digits");
    /// assert_eq!(state.properties().len(), 3);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_property(&mut self, name: impl Into<String>, value: impl Into<Property>) {
        self.properties.insert(name.into(), value.into());
    }

    /// Returns all properties, sorted by name.
    #[must_use]
    pub fn properties(&self) -> &BTreeMap<String, Property> {
        &self.properties
    }

    /// Returns the random seed; the default is 0.
    #[must_use]
    pub fn seed(&self) -> i64 {
        self.seed.unwrap_or(0)
    }

    /// Sets the random seed. Together with the number of training steps, it determines all random numbers.
    pub fn set_seed(&mut self, seed: i64) {
        self.seed = Some(seed);
    }

    /// Copies the optimizer slots of a parameter, by name. The result is empty for frozen parameters, and
    /// before an optimizer exists.
    ///
    /// # Errors
    /// If no parameter has this name.
    pub fn slots(&self, name: &str) -> Result<BTreeMap<String, Tensor>> {
        let entry = self.find_entry(name)?;
        let Some(optimizer) = &self.optimizer else { return Ok(BTreeMap::new()) };
        Ok(optimizer.slots.of(entry)?.into_iter().map(|slot| (slot.name, slot.tensor)).collect())
    }

    /// Returns the averaged weights of a parameter: the moving average of an optimizer with `ema_decay`, or
    /// the average of a schedule-free optimizer.
    ///
    /// The result is a copy with the type and shape of the parameter. For a frozen parameter, it is the
    /// value.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, module, _) = setup::training()?;
    /// use ortrain::optim::{OptimizerSpec, optimizer_model};
    /// use ortrain::{DType, ModelSource, Optimizer};
    ///
    /// let mut spec = OptimizerSpec::new("SGD")?;
    /// spec.settings.insert("ema_decay".into(), 0.999);
    /// let model = ModelSource::from_proto(&optimizer_model(&spec, &[DType::F32])?)?;
    /// let optimizer = Optimizer::replacing(model, &mut state, &module)?;
    /// assert_eq!(state.average("fc2.bias")?, state.parameter("fc2.bias")?.to_tensor()?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If no parameter has this name, the state is nominal, or the optimizer keeps no average.
    pub fn average(&self, name: &str) -> Result<Tensor> {
        let entry = self.find_entry(name)?;
        self.require_values()?;
        let value = self.view(entry).to_tensor()?;
        if !entry.requires_grad {
            return Ok(value);
        }
        let none = || {
            Error::State(
                "the optimizer has no average of the weights; set ema_decay when the artifacts are made, or use \
                 ScheduleFreeAdamW"
                    .into(),
            )
        };
        let optimizer = self.optimizer.as_ref().ok_or_else(none)?;
        let spec = optimizer.spec.as_ref().ok_or_else(none)?;
        let slots = self.slots(name)?;
        let slot = |name: &str| slots.get(name).map(Tensor::to_f64);
        let average =
            spec.averaged_parameter(spec.group_of(name), &value.to_f64(), &slot).ok_or_else(none)?;
        Ok(Tensor::from_f64(value.dtype(), value.dims().to_vec(), &average))
    }

    /// Returns a state with the averages ([`CheckpointState::average`]) instead of the trained weights, and
    /// without optimizer. Use it for evaluation, export, or a checkpoint.
    ///
    /// # Errors
    /// If the state is nominal, or the optimizer keeps no average.
    pub fn averaged(&self) -> Result<CheckpointState> {
        let mut checkpoint = self.to_checkpoint(false)?;
        if let ModuleState::Full { trainable, .. } = &mut checkpoint.module {
            for parameter in trainable {
                parameter.tensor = self.average(&parameter.name)?;
            }
        }
        CheckpointState::from_checkpoint(checkpoint)
    }

    /// Returns the number of training steps on this state, with or without an optimizer step.
    #[must_use]
    pub fn train_step_count(&self) -> u64 {
        self.train_step
    }

    /// Returns the number of optimizer steps; 0 before an optimizer exists.
    #[must_use]
    pub fn optimizer_step_count(&self) -> i64 {
        self.optimizer.as_ref().map_or(0, |optimizer| optimizer.step)
    }

    /// Returns the learning rate of the next optimizer step; `None` before an optimizer exists.
    #[must_use]
    pub fn learning_rate(&self) -> Option<f32> {
        self.optimizer.as_ref().map(|optimizer| optimizer.learning_rate)
    }

    /// Returns the layout of the planes.
    ///
    /// # Errors
    /// If the state is nominal and no module has determined the shapes yet.
    pub fn layout(&self) -> Result<&StateLayout> {
        self.layout.as_deref().ok_or(Error::NominalState)
    }

    /// Returns the planes of the trained parameters, in the order of [`StateLayout::trainable`].
    #[must_use]
    pub fn trainable_planes(&self) -> &[Arc<Memory>] {
        &self.trainable
    }

    /// Returns the planes of the frozen parameters, in the order of [`StateLayout::frozen`].
    #[must_use]
    pub fn frozen_planes(&self) -> &[Arc<Memory>] {
        &self.frozen
    }

    /// Returns the device of parameters and slots: `"cpu"` for the memory of this process.
    #[must_use]
    pub fn device(&self) -> &str {
        self.home.device()
    }

    /// Moves parameters and slots to the device of a backend. The first module for a device does this
    /// automatically.
    ///
    /// Existing views and planes keep their values, but are no longer part of the state. Modules on the
    /// previous device cannot be used until the state is moved back.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let mut state = setup::state()?;
    /// state.to(&ortrain::backend("reference", 0)?)?;
    /// assert_eq!(state.device(), "cpu", "the reference evaluator computes in the memory of this process");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the device has too little memory, or fails: the state remains on its current device.
    pub fn to(&mut self, backend: &Arc<dyn Backend>) -> Result<()> {
        if self.device() == backend.device() {
            return Ok(());
        }
        let placement = Placement::of(backend);
        let (trainable, frozen) =
            (placement.copy_planes(&self.trainable)?, placement.copy_planes(&self.frozen)?);
        let slots = match self.optimizer.as_ref().map(|optimizer| &optimizer.slots) {
            Some(Slots::Planes(slots)) => {
                let moved =
                    |slot: &Slot| Ok(Slot { planes: placement.copy_planes(&slot.planes)?, ..slot.clone() });
                Some(Slots::Planes(slots.iter().map(moved).collect::<Result<_>>()?))
            }
            _ => None,
        };
        (self.trainable, self.frozen, self.home) = (trainable, frozen, placement);
        if let (Some(optimizer), Some(slots)) = (&mut self.optimizer, slots) {
            optimizer.slots = slots;
        }
        Ok(())
    }

    /// Returns a version number of the frozen parameters. It grows if they are set, or updated by a training
    /// step (running statistics). Values derived from frozen parameters are then stale.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    // Interface for modules and optimizers.

    pub(crate) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub(crate) fn entry(&self, name: &str) -> Option<&Entry> {
        let at = self.entries.binary_search_by(|entry| (*entry.name).cmp(name)).ok()?;
        Some(&self.entries[at])
    }

    fn find_entry(&self, name: &str) -> Result<&Entry> {
        self.entry(name).ok_or_else(|| self.unknown_parameter(name))
    }

    /// Returns the error for an unknown parameter name.
    pub(crate) fn unknown_parameter(&self, name: &str) -> Error {
        Error::UnknownParameter { name: name.to_owned(), hint: hint(name, self.names()) }
    }

    /// Returns the parameter with this name, after a check of the value's shape and type.
    fn entry_for(&self, name: &str, value: &Tensor) -> Result<&Entry> {
        self.require_values()?;
        self.check_value(name, value)
    }

    /// Returns the parameter with this name, after a check of the value's type, and shape if known. Supports
    /// nominal states.
    pub(crate) fn check_value(&self, name: &str, value: &Tensor) -> Result<&Entry> {
        let entry = self.find_entry(name)?;
        let dims = entry.dims.as_deref().unwrap_or(value.dims());
        if entry.dtype == value.dtype() && dims == value.dims() {
            return Ok(entry);
        }
        Err(Error::ParameterMismatch {
            name: name.to_owned(),
            expected_dtype: entry.dtype,
            expected_dims: dims.to_vec(),
            found_dtype: value.dtype(),
            found_dims: value.dims().to_vec(),
        })
    }

    /// Returns the element type of a parameter; also for a nominal state.
    pub(crate) fn dtype_of(&self, name: &str) -> Result<DType> {
        self.find_entry(name).map(|entry| entry.dtype)
    }

    /// Returns an error if the state is nominal.
    pub(crate) fn require_values(&self) -> Result<()> {
        if self.nominal { Err(Error::NominalState) } else { Ok(()) }
    }

    pub(crate) fn shared_layout(&self) -> Option<&Arc<StateLayout>> {
        self.layout.as_ref()
    }

    pub(crate) fn memory_of(&self, entry: &Entry) -> &Arc<Memory> {
        if entry.requires_grad { &self.trainable[entry.plane] } else { &self.frozen[entry.plane] }
    }

    pub(crate) fn view(&self, entry: &Entry) -> ParameterView {
        view_in_plane(entry, self.memory_of(entry))
    }

    /// Returns the reference count that all modules of the state share.
    pub(crate) fn modules(&self) -> &Arc<()> {
        &self.modules
    }

    /// Checks that the planes are on the device of a module.
    pub(crate) fn check_device(&self, device: &str) -> Result<()> {
        if self.device() == device {
            return Ok(());
        }
        Err(Error::State(format!(
            "the state is on device {:?}, but the module was made for {device:?}; move the state back \
             (CheckpointState::to) or make a module for {:?}",
            self.device(),
            self.device()
        )))
    }

    /// Moves the planes to the device of a new module.
    pub(crate) fn move_for_module(&mut self, backend: &Arc<dyn Backend>) -> Result<()> {
        if self.device() != backend.device() && Arc::strong_count(&self.modules) > 1 {
            return Err(Error::State(format!(
                "the state is on device {:?} with a module, but the new module is for {:?}; drop the existing \
                 module, or move the state first (CheckpointState::to)",
                self.device(),
                backend.device()
            )));
        }
        self.to(backend)
    }

    pub(crate) fn set_gradients(&mut self, planes: Vec<Arc<Memory>>) {
        self.gradients = planes;
    }

    /// Returns the gradient planes of the newest module.
    pub(crate) fn newest_gradients(&self) -> &[Arc<Memory>] {
        &self.gradients
    }

    pub(crate) fn set_train_step_count(&mut self, count: u64) {
        self.train_step = count;
    }

    pub(crate) fn advance_train_step(&mut self) {
        self.train_step += 1;
    }

    pub(crate) fn bump_generation(&mut self) {
        self.generation += 1;
    }

    /// Sets the parameter shapes of a nominal state. Shapes that `dims` does not know remain unknown.
    pub(crate) fn set_shapes(&mut self, dims: impl Fn(&str) -> Option<Vec<usize>>) -> Result<()> {
        if self.layout.is_some() {
            return Ok(());
        }
        for entry in &mut self.entries {
            entry.dims = dims(&entry.name);
        }
        self.allocate()
    }

    /// Converts a nominal state into a full one; the caller writes the values afterwards. `dims` yields the
    /// shapes of all parameters in name order, and is used if no training model has determined them.
    pub(crate) fn make_full(&mut self, mut dims: impl FnMut() -> Option<Vec<usize>>) -> Result<()> {
        if self.layout.is_none() {
            self.entries.iter_mut().for_each(|entry| entry.dims = dims());
            if let Err(error) = self.allocate() {
                self.entries.iter_mut().for_each(|entry| entry.dims = None);
                return Err(error);
            }
        }
        self.mark_full()
    }

    /// Marks a nominal state as full. Returns an error if the shape of a parameter is unknown.
    pub(crate) fn mark_full(&mut self) -> Result<()> {
        if let Some(entry) = self.entries.iter().find(|entry| entry.dims.is_none()) {
            return Err(Error::State(format!(
                "the state stays nominal: its training model has no parameter {:?}; load the parameters before a \
                 module is made",
                entry.name
            )));
        }
        self.nominal = false;
        Ok(())
    }

    pub(crate) fn optimizer(&self) -> Option<&OptimizerState> {
        self.optimizer.as_ref()
    }

    pub(crate) fn optimizer_mut(&mut self) -> Option<&mut OptimizerState> {
        self.optimizer.as_mut()
    }

    /// Returns the bytes of the optimizer's slots in planes.
    pub(crate) fn slot_bytes(&self) -> usize {
        let slots = match self.optimizer.as_ref().map(|optimizer| &optimizer.slots) {
            Some(Slots::Planes(slots)) => slots.as_slice(),
            _ => &[],
        };
        slots.iter().flat_map(|slot| &slot.planes).map(|plane| plane.len()).sum()
    }

    /// Returns the parts of the trainable planes with optimizer slots on this rank.
    pub(crate) fn owned(&self) -> Option<&Arc<Vec<OwnedPlane>>> {
        self.owned.as_ref()
    }

    /// Returns the range of elements of a parameter that this rank updates.
    pub(crate) fn owned_range(&self, name: &str) -> Range<usize> {
        let Some(entry) = self.entry(name) else { return 0..0 };
        let Some(owned) = &self.owned else { return 0..entry.elements() };
        let part = owned.get(entry.plane).and_then(|plane| {
            let tensor = plane.layout.tensors.iter().find(|tensor| tensor.name == entry.name)?;
            let size = plane.layout.dtype.size();
            let start = plane.start + tensor.offset / size - entry.offset / size;
            Some(start..start + tensor.dims.iter().product::<usize>())
        });
        part.unwrap_or_default()
    }

    /// Restricts the slots of a new optimizer to parts of the trainable planes.
    pub(crate) fn set_owned(&mut self, owned: Option<Arc<Vec<OwnedPlane>>>) {
        self.owned = owned;
    }

    pub(crate) fn scheduler(&self) -> Option<&Scheduler> {
        self.scheduler.as_ref()
    }

    pub(crate) fn set_scheduler(&mut self, scheduler: Scheduler) {
        self.scheduler = Some(scheduler);
    }

    /// Creates the slots that an optimizer model requires for every trainable parameter, from the file or
    /// with initial values. With `replace`, matching slots of another optimizer are reused.
    ///
    /// # Errors
    /// If the state has another optimizer, or a slot of the file is missing or has another shape.
    pub(crate) fn prepare_optimizer(&mut self, needs: &OptimizerNeeds<'_>, replace: bool) -> Result<()> {
        let mut layout = self.layout.clone().ok_or(Error::NominalState)?;
        if let Some(owned) = &self.owned {
            let trainable = owned.iter().map(|plane| plane.layout.clone()).collect();
            layout = Arc::new(StateLayout { trainable, frozen: Vec::new() });
        }
        let unstarted = self.nominal;
        let Some(existing) = &self.optimizer else {
            let ground = SlotStorage {
                layout: &layout,
                entries: &self.entries,
                trained: &self.trainable,
                spec: needs.spec,
                home: &self.home,
            };
            let slots = needs.slots.iter().map(|slot| ground.create(slot)).collect::<Result<Vec<Slot>>>()?;
            let learning_rate = needs.spec.learning_rate as f32;
            self.optimizer = Some(OptimizerState {
                step: 0,
                initial_learning_rate: learning_rate,
                learning_rate,
                has_rate: true,
                schedule_factor: 1.0,
                spec: (!needs.in_model).then(|| needs.spec.clone()),
                slots: Slots::Planes(slots),
                has_uninitialized_slots: unstarted,
                groups: groups_of(needs.spec, &layout),
            });
            return Ok(());
        };
        // A step counter without slots fits any optimizer.
        let bare = existing.spec.is_none() && existing.slots.names().is_empty();
        let same = if bare { Ok(()) } else { self.check_optimizer(existing, needs) };
        let is_other = same.is_err();
        if let (Err(error), false) = (&same, replace) {
            return Err(Error::State(error.to_string()));
        }
        // Settings that were changed during the training take precedence over the settings of the model.
        let mut spec = match &existing.spec {
            Some(spec) if same.is_ok() => spec.clone(),
            _ => needs.spec.clone(),
        };
        let ground = SlotStorage {
            layout: &layout,
            entries: &self.entries,
            trained: &self.trainable,
            spec: &spec,
            home: &self.home,
        };
        let mut anew = 0;
        let mut slots = Vec::with_capacity(needs.slots.len());
        for required in needs.slots {
            let reusable = match &existing.slots {
                // Matching slots of another optimizer are shared; missing ones start anew.
                Slots::Planes(slots) => {
                    let fits = |slot: &&Slot| *slot.name == required.slot.name && ground.fits(slot, required);
                    Ok(slots.iter().find(fits).cloned())
                }
                Slots::Stored(_) if bare => Ok(None),
                Slots::Stored(stored) => ground.restore(required, stored).map(Some),
            };
            slots.push(match reusable {
                Ok(Some(slot)) => slot,
                Err(error) if !replace => return Err(error),
                Ok(None) | Err(_) => {
                    anew += 1;
                    ground.create(required)?
                }
            });
        }
        if (same.is_err() || bare) && anew > 0 {
            // Bias correction of averages that start anew begins with the first step.
            spec.skipped_steps = existing.step;
            spec.groups.iter_mut().for_each(|group| group.skipped_steps = existing.step);
        }
        if let (true, Slots::Planes(existing_slots)) = (needs.in_model, &existing.slots) {
            let slot_names: Vec<Arc<str>> = slots.iter().map(|slot| slot.name.clone()).collect();
            slots.extend(existing_slots.iter().filter(|slot| !slot_names.contains(&slot.name)).cloned());
        }
        if let Some(optimizer) = &mut self.optimizer {
            optimizer.slots = Slots::Planes(slots);
            if !std::mem::replace(&mut optimizer.has_rate, true) || is_other {
                optimizer.learning_rate = needs.spec.learning_rate as f32;
            }
            if is_other {
                (optimizer.initial_learning_rate, optimizer.schedule_factor) = (optimizer.learning_rate, 1.0);
            }
            optimizer.spec = (!needs.in_model).then_some(spec);
            optimizer.groups = optimizer.spec.as_ref().map_or_else(Vec::new, |spec| groups_of(spec, &layout));
            optimizer.has_uninitialized_slots |= unstarted;
        }
        Ok(())
    }

    /// Checks that the optimizer of the state matches an optimizer model.
    fn check_optimizer(&self, existing: &OptimizerState, needs: &OptimizerNeeds<'_>) -> Result<()> {
        let (name, mut slots) = existing.identity();
        let mut required_names: Vec<&str> = needs.slots.iter().map(|slot| slot.slot.name.as_str()).collect();
        // Files store them sorted.
        slots.sort_unstable();
        required_names.sort_unstable();
        let same = match &existing.spec {
            // AdamW of ONNX Runtime reports a missing moment itself; its SGD would drop one.
            None if needs.in_model => slots.iter().all(|slot| required_names.contains(slot)),
            None => name == needs.spec.optimizer && slots == required_names,
            Some(spec) => {
                spec.optimizer == needs.spec.optimizer
                    && slots == required_names
                    && spec.flags == needs.spec.flags
                    && spec.settings.keys().eq(needs.spec.settings.keys())
                    && spec.max_norm.is_some() == needs.spec.max_norm.is_some()
                    || needs.in_model && spec.optimizer == needs.spec.optimizer && slots == required_names
            }
        };
        if same {
            Ok(())
        } else {
            Err(other_optimizer_error((name, &slots), (&needs.spec.optimizer, needs.slots)))
        }
    }

    /// Restores the optimizer state from before [`CheckpointState::prepare_optimizer`].
    pub(crate) fn restore_optimizer(&mut self, before: Option<OptimizerState>) {
        self.optimizer = before;
    }

    /// Initializes slots from parameter values, after a nominal state has loaded them.
    pub(crate) fn initialize_slots(&mut self) -> Result<()> {
        let Some(optimizer) = self.optimizer.as_mut().filter(|optimizer| optimizer.has_uninitialized_slots)
        else {
            return Ok(());
        };
        optimizer.has_uninitialized_slots = false;
        if let (Some(spec), Slots::Planes(slots)) = (&optimizer.spec, &optimizer.slots) {
            for slot in slots {
                let start = spec.slots.iter().find(|known| *known.name == *slot.name);
                let start = start.map_or("zero", |known| &known.start);
                slot.initialize(start, &self.entries, &self.trainable, spec)?;
            }
        }
        Ok(())
    }
}

/// Returns a view of a parameter, or of its counterpart in a mirrored plane.
pub(crate) fn view_in_plane(entry: &Entry, plane: &Arc<Memory>) -> ParameterView {
    debug_assert!(entry.offset + entry.bytes() <= plane.len(), "the plane has the layout of the state");
    ParameterView {
        name: entry.name.clone(),
        dtype: entry.dtype,
        dims: entry.dims.clone().unwrap_or_default(),
        requires_grad: entry.requires_grad,
        memory: plane.clone(),
        offset: entry.offset,
    }
}
