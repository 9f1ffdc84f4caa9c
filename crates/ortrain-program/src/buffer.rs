//! Buffers: contiguous elements, and their location in memory.

use std::sync::Arc;

use ortrain_expr::DType;
use smallvec::SmallVec;

/// Index of a buffer in a [`crate::Program`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub u32);

/// Buffers of an instruction. Most instructions have at most eight.
pub type BufferIds = SmallVec<[BufferId; 8]>;

/// Substitution of buffers.
pub(crate) type BufferSubstitution<'a> = &'a dyn Fn(BufferId) -> BufferId;

/// Index of a plane: a block of state memory that a program is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PlaneId(pub u32);

/// Location of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BufferLocation {
    /// Work arena, at this byte offset. The memory plan assigns the offset.
    Work(usize),
    /// Plane, at this byte offset.
    Plane(PlaneId, usize),
    /// Constant of the program with this index.
    Constant(usize),
}

/// Contiguous sequence of elements.
#[derive(Clone, Debug)]
pub struct Buffer {
    /// Name of the value in the buffer, for dumps and messages.
    pub label: Arc<str>,
    /// Element type.
    pub dtype: DType,
    /// Number of elements.
    pub len: usize,
    /// Location of the elements.
    pub location: BufferLocation,
}

impl Buffer {
    /// Returns the size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }
}

/// Returns true if a buffer is in the work arena.
pub(crate) fn is_work(buffers: &[Buffer], id: BufferId) -> bool {
    matches!(buffers[id.0 as usize].location, BufferLocation::Work(_))
}

/// Adds a buffer in the work arena.
pub(crate) fn add_work(
    buffers: &mut Vec<Buffer>,
    label: impl Into<Arc<str>>,
    dtype: DType,
    len: usize,
) -> BufferId {
    buffers.push(Buffer { label: label.into(), dtype, len, location: BufferLocation::Work(0) });
    BufferId(buffers.len() as u32 - 1)
}

/// Returns a flag for each of `count` buffers: true if `ids` contains the buffer.
pub(crate) fn membership_flags(count: usize, ids: &[BufferId]) -> Vec<bool> {
    let mut flags = vec![false; count];
    ids.iter().for_each(|id| flags[id.0 as usize] = true);
    flags
}

/// Returns the items without duplicates, in ascending order.
pub(crate) fn distinct<T: Ord>(items: impl IntoIterator<Item = T>) -> SmallVec<[T; 8]> {
    let mut items: SmallVec<[T; 8]> = items.into_iter().collect();
    items.sort_unstable();
    items.dedup();
    items
}

/// Returns the alias class of each buffer: overlapping ranges of a plane have the same class.
pub(crate) fn alias_classes(buffers: &[Buffer]) -> Vec<usize> {
    alias_classes_of(buffers, 0..buffers.len())
}

/// Returns the alias classes of some buffers; other buffers are not compared.
pub(crate) fn alias_classes_of(buffers: &[Buffer], some: impl IntoIterator<Item = usize>) -> Vec<usize> {
    let mut cells: Vec<usize> = (0..buffers.len()).collect();
    let mut parts: Vec<(u32, usize, usize, usize)> = Vec::new();
    for k in some {
        let buffer = &buffers[k];
        if let BufferLocation::Plane(plane, offset) = buffer.location {
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

/// Returns true if two buffers share bytes, before the work arena is planned.
pub(crate) fn share_bytes(a: &Buffer, b: &Buffer) -> bool {
    match (a.location, b.location) {
        (BufferLocation::Plane(plane, at), BufferLocation::Plane(other, other_at)) => {
            plane == other && at < other_at + b.bytes() && other_at < at + a.bytes()
        }
        (BufferLocation::Constant(a), BufferLocation::Constant(b)) => a == b,
        (BufferLocation::Work(_), BufferLocation::Work(_)) => std::ptr::eq(a, b),
        _ => false,
    }
}
