//! Layout of the memory planes of a state.

use std::sync::Arc;

use ortrain_graph::DType;

/// Location of a tensor in its plane.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let mut state = setup::state()?;
/// let plane = &state.layout()?.trainable[0];
/// let second = &plane.tensors[1];
/// assert_eq!((&*second.name, second.dims.as_slice()), ("fc2.weight", &[10, 96][..]));
/// assert_eq!(second.offset, ortrain::ALIGNMENT);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorLayout {
    /// The name of the parameter.
    pub name: Arc<str>,
    /// The shape.
    pub dims: Vec<usize>,
    /// Offset of the first byte, a multiple of [`crate::ALIGNMENT`].
    pub offset: usize,
}

/// Layout of a plane. The padding between tensors is always zero.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let mut state = setup::state()?;
/// let plane = &state.layout()?.trainable[0];
/// assert_eq!((plane.dtype, plane.tensors.len()), (ortrain::DType::F32, 2));
/// assert_eq!(plane.bytes % ortrain::ALIGNMENT, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaneLayout {
    /// The element type of all tensors of the plane.
    pub dtype: DType,
    /// Size of the plane in bytes, including padding.
    pub bytes: usize,
    /// The tensors, sorted by name.
    pub tensors: Vec<TensorLayout>,
}

/// Layout of a state: a plane per element type for trained parameters, and a plane per element type for
/// frozen ones.
///
/// The order of the element types is the order of their first appearance among the parameters, sorted by
/// name. Planes of gradients and moments have the same layout as the trainable planes, with the same offsets.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let mut state = setup::state()?;
/// let layout = state.layout()?;
/// assert_eq!((layout.trainable.len(), layout.frozen.len()), (1, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct StateLayout {
    /// Planes of trained parameters.
    pub trainable: Vec<PlaneLayout>,
    /// Planes of frozen parameters.
    pub frozen: Vec<PlaneLayout>,
}

/// A parameter of the state.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) name: Arc<str>,
    pub(crate) dtype: DType,
    pub(crate) requires_grad: bool,
    /// `None` if the state is nominal and no model has determined the shape yet.
    pub(crate) dims: Option<Vec<usize>>,
    /// Index among the trainable or frozen planes.
    pub(crate) plane: usize,
    pub(crate) offset: usize,
}

impl Entry {
    pub(crate) fn elements(&self) -> usize {
        self.dims.as_ref().map_or(0, |dims| dims.iter().product())
    }

    pub(crate) fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }
}

/// Part of a trainable plane that one rank updates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OwnedPlane {
    /// First element in the plane.
    pub(crate) start: usize,
    /// Layout of the part. A tensor across a boundary has one axis, with its elements in the part.
    pub(crate) layout: PlaneLayout,
}
