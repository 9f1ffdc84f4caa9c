//! Binding of a model's inputs to planes of a state, by name.
//!
//! A plane is a block of memory for tensors of one element type.

use std::sync::Arc;

use ortrain_graph::{DType, Dim, Graph, Node, ValueId, ValueType};
use ortrain_ops::{PartTensor, PlanePart, Role};
use ortrain_program::{Memory, PlaneId};
use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;

use crate::state::gradient_names::{BUFFER_SUFFIX, RESET_FLAG, UPDATED_SUFFIX, parameter_of_gradient};
use crate::state::layout::{Entry, OwnedPlane, PlaneLayout, StateLayout, TensorLayout};
use crate::{CheckpointState, Error, Result};

/// References to planes, indexed by plane id.
pub(crate) type Planes<'a> = SmallVec<[&'a Memory; 32]>;

/// Returns the parameter in the name of a gradient, and its entry in the state.
///
/// Returns `None` if the state has no such parameter: a user input may have this name. Names with [`BUFFER_SUFFIX`] are
/// reserved, so their parameter is returned without an entry.
fn parse_gradient_name<'a, 'b>(
    name: &'a str,
    state: &'b CheckpointState,
) -> Option<(&'a str, Option<&'b Entry>)> {
    let parameter = parameter_of_gradient(name)?;
    let entry = state.entry(parameter);
    (entry.is_some() || name.ends_with(BUFFER_SUFFIX)).then_some((parameter, entry))
}

/// Returns true if an output of a training model is a gradient, or the signal of a gradient, instead of a result.
pub(crate) fn is_gradient(name: &str, state: &CheckpointState) -> bool {
    parse_gradient_name(name, state).is_some() || name.ends_with(UPDATED_SUFFIX)
}

/// Returns the planes of a module's programs, in the order trainable, frozen, gradients.
pub(crate) fn planes<'a>(state: &'a CheckpointState, gradients: &'a [Arc<Memory>]) -> Planes<'a> {
    let plane_chain = state.trainable_planes().iter().chain(state.frozen_planes()).chain(gradients);
    plane_chain.map(|plane| &**plane).collect()
}

/// Returns the role of an input that is a parameter: its position in [`planes`].
fn parameter_role(layout: &StateLayout, entry: &Entry) -> Role {
    let first = if entry.requires_grad { 0 } else { layout.trainable.len() };
    Role::Plane(PlaneId((first + entry.plane) as u32), entry.offset)
}

/// Returns the role of an input that is a gradient: its position in [`planes`].
fn gradient_role(layout: &StateLayout, entry: &Entry) -> Role {
    let first = layout.trainable.len() + layout.frozen.len();
    Role::Plane(PlaneId((first + entry.plane) as u32), entry.offset)
}

/// Returns the element range of a tensor in its plane.
fn element_range(tensor: &TensorLayout, dtype: DType) -> PartTensor {
    PartTensor { start: tensor.offset / dtype.size(), len: tensor.dims.iter().product() }
}

/// Returns the role of a sequence input with all planes of a layout. The ids of the planes start at `first`.
pub(crate) fn sequence_role(layout: &[PlaneLayout], first: usize) -> Role {
    let part = |(k, plane): (usize, &PlaneLayout)| PlanePart {
        dtype: plane.dtype,
        plane: PlaneId((first + k) as u32),
        offset: 0,
        len: plane.bytes / plane.dtype.size(),
        tensors: plane.tensors.iter().map(|tensor| element_range(tensor, plane.dtype)).collect(),
    };
    Role::Planes(layout.iter().enumerate().map(part).collect())
}

/// Returns the role of a sequence input with the parts of planes that a rank owns. With `is_slot` the planes have only
/// these parts. The ids of the planes start at `first`.
pub(crate) fn owned_role(owned: &[OwnedPlane], layout: &[PlaneLayout], is_slot: bool, first: usize) -> Role {
    let part = |(k, (own, plane)): (usize, (&OwnedPlane, &PlaneLayout))| {
        let (dtype, of_parameters) = (plane.dtype, own.layout.dtype);
        let len = own.layout.bytes / of_parameters.size();
        (len > 0).then(|| PlanePart {
            dtype,
            plane: PlaneId((first + k) as u32),
            offset: if is_slot { 0 } else { own.start * dtype.size() },
            len,
            tensors: own.layout.tensors.iter().map(|tensor| element_range(tensor, of_parameters)).collect(),
        })
    };
    Role::Planes(owned.iter().zip(layout).enumerate().filter_map(part).collect())
}

/// Binding of a graph's inputs to a state.
pub(crate) struct Bound {
    /// A role for each input of the graph.
    pub(crate) roles: Vec<Role>,
    /// Inputs that are parameters, in the graph's order.
    pub(crate) parameters: Vec<Arc<str>>,
}

/// Sets the parameter shapes of a nominal state from the inputs of a training model.
pub(crate) fn set_shapes_from(graph: &Graph, state: &mut CheckpointState) -> Result<()> {
    let inputs: FxHashMap<&str, ValueId> = graph.inputs.iter().map(|&id| (graph.name_of(id), id)).collect();
    state.set_shapes(|name| {
        let id = *inputs.get(name)?;
        graph.value(id).ty.shape()?.concrete()
    })
}

/// Binds the inputs of a model to a state, and sets the types of parameters to their types in the state.
pub(crate) fn bind(model: &str, graph: &mut Graph, state: &CheckpointState, training: bool) -> Result<Bound> {
    let mismatch = |reason: String| Error::Mismatch { model: model.to_owned(), reason };
    let layout = state.shared_layout().cloned().ok_or(Error::NominalState)?;
    let mut bound = Bound { roles: Vec::with_capacity(graph.inputs.len()), parameters: Vec::new() };
    let mut buffers: FxHashSet<Arc<str>> = FxHashSet::default();
    let used: FxHashSet<ValueId> = graph.nodes.iter().flat_map(Node::present_inputs).collect();
    let mut has_flag = false;
    for id in graph.inputs.clone() {
        let name: Arc<str> = graph.value(id).name.clone();
        let role = if let Some(entry) = state.entry(&name) {
            check_type(model, graph, id, entry, "")?;
            bound.parameters.push(name);
            parameter_role(&layout, entry)
        } else if training && &*name == RESET_FLAG {
            check_flag(model, graph, id)?;
            has_flag = true;
            Role::ResetFlag
        } else if let (true, Some((parameter, entry))) = (training, parse_gradient_name(&name, state)) {
            let entry = entry.ok_or_else(|| {
                mismatch(format!("input {name:?} holds the gradient of {parameter:?}, but the checkpoint has no such parameter"))
            })?;
            if !entry.requires_grad {
                return Err(mismatch(format!(
                    "input {name:?} holds the gradient of {parameter:?}, but that parameter is frozen in the checkpoint"
                )));
            }
            if buffers.contains(&entry.name) {
                return Err(mismatch(format!(
                    "two inputs hold the gradient of {parameter:?}; {name:?} is the second"
                )));
            }
            check_type(model, graph, id, entry, "the gradient of ")?;
            if !used.contains(&id) {
                return Err(mismatch(format!(
                    "input {name:?} should accumulate the gradient of {parameter:?}, but no node adds to it, so \
                     {parameter:?} would never be trained"
                )));
            }
            buffers.insert(entry.name.clone());
            gradient_role(&layout, entry)
        } else if name.ends_with(BUFFER_SUFFIX) {
            return Err(Error::WrongModel {
                model: model.to_owned(),
                reason: format!(
                    "it is a training model, with an input {name:?} for a gradient; give the evaluation model that was \
                     made together with it"
                ),
            });
        } else {
            Role::User
        };
        bound.roles.push(role);
    }
    if training {
        let parameters: FxHashSet<&Arc<str>> = bound.parameters.iter().collect();
        for entry in state.entries().iter().filter(|entry| entry.requires_grad) {
            let name = &entry.name;
            if !parameters.contains(name) {
                return Err(mismatch(format!(
                    "the checkpoint trains parameter {name:?}, but the model has no input of this name"
                )));
            }
            if !buffers.contains(name) {
                return Err(mismatch(format!(
                    "the checkpoint trains parameter {name:?}, but the model has no input {:?} for its gradient",
                    format!("{name}{BUFFER_SUFFIX}")
                )));
            }
        }
        if !buffers.is_empty() && !has_flag {
            return Err(Error::WrongModel {
                model: model.to_owned(),
                reason: format!("it accumulates gradients but has no input {RESET_FLAG:?} (bool[1])"),
            });
        }
    }
    Ok(bound)
}

/// Checks that the declared type of an input matches a parameter, and sets the exact type.
fn check_type(model: &str, graph: &mut Graph, id: ValueId, entry: &Entry, label: &str) -> Result<()> {
    let Some(dims) = &entry.dims else {
        return Err(Error::Mismatch {
            model: model.to_owned(),
            reason: format!(
                "the checkpoint is nominal, and no training model defines the shape of parameter {:?}",
                entry.name
            ),
        });
    };
    let fits = match &graph.value(id).ty {
        ValueType::Unknown => true,
        ValueType::Sequence(_) => false,
        ValueType::Tensor(dtype, shape) => {
            let same = |(declared, &size): (&Dim, &usize)| declared.known().is_none_or(|known| known == size);
            *dtype == entry.dtype
                && shape
                    .as_ref()
                    .is_none_or(|shape| shape.rank() == dims.len() && shape.iter().zip(dims).all(same))
        }
    };
    if !fits {
        return Err(Error::Mismatch {
            model: model.to_owned(),
            reason: format!(
                "{label}{:?} is {} in the model, but {}{dims:?} in the checkpoint; give the checkpoint that was made \
                 together with the model",
                entry.name,
                graph.value(id).ty,
                entry.dtype,
            ),
        });
    }
    graph.value_mut(id).ty = ValueType::tensor(entry.dtype, dims);
    Ok(())
}

fn check_flag(model: &str, graph: &mut Graph, id: ValueId) -> Result<()> {
    let flag = ValueType::tensor(DType::Bool, &[1]);
    match &graph.value(id).ty {
        ValueType::Unknown | ValueType::Tensor(DType::Bool, None) => {}
        ValueType::Tensor(DType::Bool, Some(shape))
            if shape.rank() == 1 && shape[0].known().is_none_or(|size| size == 1) => {}
        ty => {
            return Err(Error::WrongModel {
                model: model.to_owned(),
                reason: format!("input {RESET_FLAG:?} should be bool[1] but is {ty}"),
            });
        }
    }
    graph.value_mut(id).ty = flag;
    Ok(())
}
