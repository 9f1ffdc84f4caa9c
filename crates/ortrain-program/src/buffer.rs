//! Buffers: runs of elements, and where they lie.

use std::sync::Arc;

use ortrain_expr::DType;
use smallvec::SmallVec;

/// A buffer of a [`crate::Program`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub u32);

/// Buffers of an instruction: most have few.
pub type BufferIds = SmallVec<[BufferId; 8]>;

/// Other buffers in place of some.
pub(crate) type Renaming<'a> = &'a dyn Fn(BufferId) -> BufferId;

/// A plane of the state a program is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PlaneId(pub u32);

/// The place of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// In the work arena, at this byte. The planner decides it.
    Work(usize),
    /// In a plane, at this byte.
    Plane(PlaneId, usize),
    /// The program's constant of this number.
    Constant(usize),
}

/// A contiguous run of elements.
#[derive(Clone, Debug)]
pub struct Buffer {
    /// The name of the value it holds, for dumps and messages.
    pub label: Arc<str>,
    /// The element type.
    pub dtype: DType,
    /// The number of elements.
    pub len: usize,
    /// Its place.
    pub place: Place,
}

impl Buffer {
    /// Its size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }
}

/// True if a buffer lies in the work arena.
pub(crate) fn is_work(buffers: &[Buffer], id: BufferId) -> bool {
    matches!(buffers[id.0 as usize].place, Place::Work(_))
}

/// Adds a buffer of the work arena.
pub(crate) fn add_work(
    buffers: &mut Vec<Buffer>,
    label: impl Into<Arc<str>>,
    dtype: DType,
    len: usize,
) -> BufferId {
    buffers.push(Buffer { label: label.into(), dtype, len, place: Place::Work(0) });
    BufferId(buffers.len() as u32 - 1)
}

/// For each of so many buffers whether it is one of these.
pub(crate) fn flags(count: usize, ids: &[BufferId]) -> Vec<bool> {
    let mut flags = vec![false; count];
    ids.iter().for_each(|id| flags[id.0 as usize] = true);
    flags
}

/// The different ones among some items, in ascending order.
pub(crate) fn distinct<T: Ord>(items: impl IntoIterator<Item = T>) -> SmallVec<[T; 8]> {
    let mut items: SmallVec<[T; 8]> = items.into_iter().collect();
    items.sort_unstable();
    items.dedup();
    items
}

/// A number for each buffer; parts of a plane that overlap have the same.
pub(crate) fn cells(buffers: &[Buffer]) -> Vec<usize> {
    cells_of(buffers, 0..buffers.len())
}

/// The same for some buffers; the others are not looked at.
pub(crate) fn cells_of(buffers: &[Buffer], some: impl IntoIterator<Item = usize>) -> Vec<usize> {
    let mut cells: Vec<usize> = (0..buffers.len()).collect();
    let mut parts: Vec<(u32, usize, usize, usize)> = Vec::new();
    for k in some {
        let buffer = &buffers[k];
        if let Place::Plane(plane, offset) = buffer.place {
            parts.push((plane.0, offset, offset + buffer.bytes(), k));
        }
    }
    parts.sort_unstable();
    let mut open: Option<(u32, usize, usize)> = None;
    for (plane, from, to, k) in parts {
        match &mut open {
            Some((known, end, cell)) if *known == plane && from < *end => {
                cells[k] = *cell;
                *end = to.max(*end);
            }
            _ => open = Some((plane, to, k)),
        }
    }
    cells
}

/// True if two buffers have bytes in common before any is placed in the arena.
pub(crate) fn share_bytes(a: &Buffer, b: &Buffer) -> bool {
    match (a.place, b.place) {
        (Place::Plane(plane, at), Place::Plane(other, other_at)) => {
            plane == other && at < other_at + b.bytes() && other_at < at + a.bytes()
        }
        (Place::Constant(a), Place::Constant(b)) => a == b,
        (Place::Work(_), Place::Work(_)) => std::ptr::eq(a, b),
        _ => false,
    }
}
