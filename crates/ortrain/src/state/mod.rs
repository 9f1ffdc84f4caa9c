//! State of a training, and its memory planes.

pub(crate) mod binding;
mod checkpoint;
pub(crate) mod gradient_names;
pub(crate) mod layout;
pub(crate) mod load_report;
mod optimizer;
pub(crate) mod placement;
pub(crate) mod slots;
pub(crate) mod weights_io;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use ortrain_checkpoint::{OptimizerGroup, Property, Scheduler};
use ortrain_graph::{DType, Tensor};
use ortrain_ops::optimizers::OptimizerSpec;
use ortrain_program::{Backend, Memory};
use rustc_hash::FxHashMap;

use crate::state::layout::{Entry, OwnedPlane, StateLayout};
use crate::state::placement::Placement;
use crate::state::slots::{RequiredSlots, Slot, Slots};
use crate::suggest::hint;
use crate::{Error, Result};

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
