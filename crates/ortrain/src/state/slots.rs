//! Optimizer slots: per-parameter state of an optimizer between steps.
//!
//! A slot has its own planes, one for each trainable plane of the state, with tensors in the same order.

use std::sync::Arc;

use ortrain_checkpoint::{NamedTensor, ParameterState};
use ortrain_graph::{DType, Tensor};
use ortrain_ops::optimizers::{OptimizerSpec, SlotShape, SlotSpec};
use ortrain_program::{Memory, align};

use crate::state::layout::{Entry, PlaneLayout, TensorLayout};
use crate::state::placement::Placement;
use crate::{Error, Result, StateLayout};

/// A slot in planes.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub(crate) name: Arc<str>,
    pub(crate) shape: SlotShape,
    /// Layout of each plane; there is one for each trainable plane.
    pub(crate) layout: Vec<PlaneLayout>,
    pub(crate) planes: Vec<Arc<Memory>>,
}

/// The slots of an optimizer.
#[derive(Clone, Debug)]
pub(crate) enum Slots {
    /// Content of a file, until an optimizer determines the required slots.
    Stored(Vec<ParameterState>),
    /// Slots in planes.
    Planes(Vec<Slot>),
}

/// A slot that an optimizer model requires.
#[derive(Clone, Debug)]
pub(crate) struct RequiredSlots {
    pub(crate) slot: SlotSpec,
    /// Element type; `None` for the moments of ONNX Runtime's optimizers: their type follows from the
    /// parameter.
    pub(crate) dtype: Option<DType>,
}

impl RequiredSlots {
    /// Returns the shape of the slot.
    pub(crate) fn shape(&self) -> Result<SlotShape> {
        SlotShape::from_name(&self.slot.shape).ok_or_else(|| {
            let SlotSpec { name, shape, .. } = &self.slot;
            Error::State(format!("slot {name:?} of the optimizer has the unknown shape {shape:?}"))
        })
    }

    /// Returns the element type of the slot for parameters of a type.
    fn dtype_for(&self, parameter: DType) -> DType {
        self.dtype.unwrap_or(if parameter == DType::F64 { DType::F64 } else { DType::F32 })
    }
}

impl Slot {
    /// Creates a zeroed slot for every trainable parameter.
    fn new(
        required: &RequiredSlots,
        trainable: &[PlaneLayout],
        spec: &OptimizerSpec,
        placement: &Placement,
    ) -> Result<Slot> {
        let shape = required.shape()?;
        let layout = (trainable.iter())
            .map(|plane| slot_layout(shape, required.dtype_for(plane.dtype), plane, spec))
            .collect::<Option<Vec<PlaneLayout>>>()
            .ok_or_else(|| Error::State("the optimizer needs more memory than can be addressed".into()))?;
        let planes = placement.allocate_planes(&layout)?;
        Ok(Slot { name: required.slot.name.as_str().into(), shape, layout, planes })
    }

    /// Returns the slot of a parameter: its type, its layout and its plane.
    fn find(&self, entry: &Entry) -> Option<(DType, &TensorLayout, &Arc<Memory>)> {
        let (layout, plane) = (self.layout.get(entry.plane)?, self.planes.get(entry.plane)?);
        let at = layout.tensors.binary_search_by(|tensor| tensor.name.cmp(&entry.name)).ok()?;
        Some((layout.dtype, &layout.tensors[at], plane))
    }

    /// Copies the slot of a parameter.
    pub(crate) fn tensor(&self, entry: &Entry) -> Result<Option<Tensor>> {
        let Some((dtype, tensor, plane)) = self.find(entry) else { return Ok(None) };
        let bytes = tensor.dims.iter().product::<usize>() * dtype.size();
        let data = plane.to_vec(tensor.offset, bytes)?;
        Ok(Some(
            Tensor::new(dtype, tensor.dims.clone(), data.into()).expect("planes contain complete tensors"),
        ))
    }

    /// Copies the slot of a parameter with its name.
    fn named_tensor(&self, entry: &Entry) -> Result<Option<NamedTensor>> {
        Ok(self.tensor(entry)?.map(|tensor| NamedTensor::new(&*self.name, tensor)))
    }

    /// Writes the slot of a parameter.
    pub(crate) fn write(&self, entry: &Entry, value: &Tensor) -> Result<()> {
        let Some((_, tensor, plane)) = self.find(entry) else { return Ok(()) };
        Ok(plane.write(tensor.offset, value.data())?)
    }

    /// Sets the slots of all parameters to their initial values.
    pub(crate) fn initialize(
        &self,
        start: &str,
        entries: &[Entry],
        trained: &[Arc<Memory>],
        spec: &OptimizerSpec,
    ) -> Result<()> {
        if start == "zero" {
            return Ok(());
        }
        for entry in entries.iter().filter(|entry| entry.requires_grad) {
            let Some((dtype, tensor, plane)) = self.find(entry) else { continue };
            let count = tensor.dims.iter().product::<usize>();
            if start == "parameter" {
                if count != entry.elements() {
                    return Err(Error::State(format!(
                        "slot {:?} of the optimizer starts as a copy of the parameter, but it has shape {:?}, and \
                         parameter {:?} has {} elements",
                        self.name,
                        tensor.dims,
                        entry.name,
                        entry.elements()
                    )));
                }
                let start_bytes = trained[entry.plane].to_vec(entry.offset, entry.bytes())?;
                if dtype == entry.dtype {
                    plane.write(tensor.offset, &start_bytes)?;
                } else {
                    let start_value = Tensor::new(entry.dtype, vec![count], start_bytes.into());
                    let start_tensor = start_value
                        .map_err(|source| Error::State(format!("slot {:?}: {source}", self.name)))?;
                    plane.write(
                        tensor.offset,
                        Tensor::from_f64(dtype, vec![count], &start_tensor.to_f64()).data(),
                    )?;
                }
                continue;
            }
            let value = match start {
                "one" => 1.0,
                setting => spec.setting_of(spec.group_of(&entry.name), setting).ok_or_else(|| {
                    Error::State(format!(
                        "slot {:?} of the optimizer starts at {setting:?}, which is not a setting of the optimizer",
                        self.name
                    ))
                })?,
            };
            if value != 0.0 {
                plane.write(tensor.offset, Tensor::filled(dtype, &[count], value).data())?;
            }
        }
        Ok(())
    }
}

/// Returns the layout of a slot for a plane of parameters; `None` if its size overflows the address space.
fn slot_layout(
    shape: SlotShape,
    dtype: DType,
    plane: &PlaneLayout,
    spec: &OptimizerSpec,
) -> Option<PlaneLayout> {
    let mut bytes = 0_usize;
    let mut tensors = Vec::with_capacity(plane.tensors.len());
    for tensor in &plane.tensors {
        let group = spec.group_of(&tensor.name);
        let dims = shape.dims(&tensor.dims, &|setting| spec.setting_of(group, setting));
        let offset = match shape {
            SlotShape::Same => (tensor.offset / plane.dtype.size()).checked_mul(dtype.size())?,
            // Contiguous, as a vector with an element for each parameter.
            SlotShape::Scalar => bytes,
            _ => align(bytes),
        };
        bytes = dims.iter().product::<usize>().checked_mul(dtype.size())?.checked_add(offset)?;
        tensors.push(TensorLayout { name: tensor.name.clone(), dims, offset });
    }
    let bytes = match shape {
        SlotShape::Same => (plane.bytes / plane.dtype.size()).checked_mul(dtype.size())?,
        _ => bytes,
    };
    isize::try_from(bytes).ok()?.checked_add_unsigned(crate::ALIGNMENT)?;
    Some(PlaneLayout { dtype, bytes: align(bytes), tensors })
}

/// Joins names for a sentence.
fn join_names<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.collect();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

impl Slots {
    /// Returns the slot with this name, if slots are in planes.
    pub(crate) fn get(&self, name: &str) -> Option<&Slot> {
        match self {
            Slots::Planes(slots) => slots.iter().find(|slot| *slot.name == *name),
            Slots::Stored(_) => None,
        }
    }

    /// Returns the names of the slots.
    pub(crate) fn names(&self) -> Vec<&str> {
        match self {
            Slots::Planes(slots) => slots.iter().map(|slot| &*slot.name).collect(),
            Slots::Stored(states) => {
                let first = states.first().into_iter().flat_map(|state| &state.moments);
                first.map(|moment| moment.name.as_str()).collect()
            }
        }
    }

    /// Copies the slots of all trained parameters.
    pub(crate) fn stored(&self, entries: &[Entry]) -> Result<Vec<ParameterState>> {
        if let Slots::Stored(states) = self {
            return Ok(states.clone());
        }
        let state = |entry: &Entry| {
            Ok(ParameterState { parameter: entry.name.to_string(), moments: self.of(entry)? })
        };
        entries.iter().filter(|entry| entry.requires_grad).map(state).collect()
    }

    /// Copies the slots of one parameter.
    pub(crate) fn of(&self, entry: &Entry) -> Result<Vec<NamedTensor>> {
        match self {
            Slots::Stored(states) => {
                let state = states.iter().find(|state| *state.parameter == *entry.name);
                Ok(state.map_or_else(Vec::new, |state| state.moments.clone()))
            }
            Slots::Planes(slots) => {
                slots.iter().filter_map(|slot| slot.named_tensor(entry).transpose()).collect()
            }
        }
    }
}

/// Parts of a state that slots depend on.
pub(crate) struct SlotStorage<'a> {
    pub(crate) layout: &'a StateLayout,
    pub(crate) entries: &'a [Entry],
    pub(crate) trained: &'a [Arc<Memory>],
    pub(crate) spec: &'a OptimizerSpec,
    pub(crate) home: &'a Placement,
}

impl SlotStorage<'_> {
    /// Creates a slot with its initial values.
    pub(crate) fn create(&self, required: &RequiredSlots) -> Result<Slot> {
        let slot = Slot::new(required, &self.layout.trainable, self.spec, self.home)?;
        slot.initialize(&required.slot.start, self.entries, self.trained, self.spec)?;
        Ok(slot)
    }

    /// Returns true if a slot meets a requirement.
    pub(crate) fn fits(&self, slot: &Slot, required: &RequiredSlots) -> bool {
        let dtypes = self.layout.trainable.iter().map(|plane| required.dtype_for(plane.dtype));
        required.shape().is_ok_and(|shape| shape == slot.shape)
            && dtypes.eq(slot.layout.iter().map(|plane| plane.dtype))
    }

    /// Creates a slot with values from a file.
    ///
    /// # Errors
    /// If a value is missing, or has another type or shape.
    pub(crate) fn restore(&self, required: &RequiredSlots, stored: &[ParameterState]) -> Result<Slot> {
        let slot = Slot::new(required, &self.layout.trainable, self.spec, self.home)?;
        let name = &*slot.name;
        for entry in self.entries.iter().filter(|entry| entry.requires_grad) {
            let state = stored.iter().find(|state| *state.parameter == *entry.name).ok_or_else(|| {
                Error::State(format!(
                    "the optimizer state of the checkpoint lacks parameter {:?}",
                    entry.name
                ))
            })?;
            let value = state.moments.iter().find(|moment| moment.name == name).ok_or_else(|| {
                Error::State(format!(
                    "the optimizer state of the checkpoint lacks {name:?} of parameter {:?}; it was made by another \
                     optimizer, whose slots are {}",
                    entry.name,
                    join_names(state.moments.iter().map(|moment| moment.name.as_str()))
                ))
            })?;
            let Some((dtype, tensor, _)) = slot.find(entry) else { continue };
            if value.tensor.dtype() != dtype || value.tensor.dims() != tensor.dims {
                let of_parameter = match slot.shape {
                    SlotShape::Same => format!("the parameter is {}{:?}", entry.dtype, tensor.dims),
                    _ => format!("the optimizer needs {dtype}{:?}", tensor.dims),
                };
                return Err(Error::State(format!(
                    "{name:?} of parameter {:?} is {}{:?} in the checkpoint, but {of_parameter}",
                    entry.name,
                    value.tensor.dtype(),
                    value.tensor.dims(),
                )));
            }
            slot.write(entry, &value.tensor)?;
        }
        Ok(slot)
    }
}

/// Returns the error for a state with the slots of another optimizer.
pub(crate) fn other_optimizer_error(existing: (&str, &[&str]), required: (&str, &[RequiredSlots])) -> Error {
    let keeps: Vec<&str> = required
        .1
        .iter()
        .map(|slot| slot.slot.name.as_str())
        .filter(|name| existing.1.contains(name))
        .collect();
    let offer = match keeps.as_slice() {
        [] => "replace it (Optimizer::replacing, Optimizer(..., replace=True) in Python): every slot starts anew".into(),
        keeps => format!(
            "replace it (Optimizer::replacing, Optimizer(..., replace=True) in Python), which keeps {} where its shape \
             fits",
            keeps.join(", ")
        ),
    };
    Error::State(format!(
        "the state has the optimizer {} with the slots {}, but the optimizer model is for {} with the slots {}; \
         give the optimizer model of the former, or {offer}",
        existing.0,
        join_names(existing.1.iter().copied()),
        required.0,
        join_names(required.1.iter().map(|slot| slot.slot.name.as_str())),
    ))
}
