//! Reading and writing of checkpoints.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use ortrain_checkpoint::{
    Checkpoint, Extras, Layout, ModuleState, NamedTensor, NominalTensor, OptimizerGroup, ParameterState,
    SaveOptions,
};
use ortrain_graph::{Tensor, byte_length};
use ortrain_ops::optimizers::OptimizerSpec;
use ortrain_program::align;
use rustc_hash::{FxHashMap, FxHashSet};

use super::{
    CheckpointState, DEFAULT_LEARNING_RATE, ONNXRUNTIME_GROUP, OptimizerState, OptimizerValues, slot_prefix,
};
use crate::exec::backend::prefault;
use crate::model::file_kind::{add_file_kind, add_kind_of_bytes};
use crate::state::layout::{Entry, PlaneLayout, StateLayout, TensorLayout};
use crate::state::placement::Placement;
use crate::state::slots::Slots;
use crate::{Error, FileKind, Result};

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
    pub(super) fn allocate(&mut self) -> Result<()> {
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
}
