//! What instructions read and write: buffers, and how they reach into them.

use std::borrow::Cow;

use ortrain_expr::{Access, DType, Dims, Inst};

use crate::buffer::{Buffer, BufferId};

/// A buffer and how an instruction reaches into it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Where it lies.
    pub buffer: BufferId,
    /// Where its elements are.
    pub access: Access,
}

/// An expression over a space of indices, with the buffers that it reads and writes.
pub type Nest = ortrain_expr::Nest<Operand>;

/// What a [`Nest`] reads: a buffer, or what the instruction has made that the nest finishes.
pub type Load = ortrain_expr::Load<Operand>;

impl Operand {
    /// A whole buffer, row-major.
    #[must_use]
    pub fn whole(buffer: BufferId, dtype: DType, dims: &[usize]) -> Operand {
        Operand { buffer, access: Access::contiguous(dtype, dims) }
    }

    /// The same buffer reached in another way.
    #[must_use]
    pub fn with_access(&self, access: Access) -> Operand {
        Operand { buffer: self.buffer, access }
    }

    /// The fault of an access that is not one to its buffer.
    pub(crate) fn validate(&self, buffers: &[Buffer]) -> Option<String> {
        let (buffer, access) = (&buffers[self.buffer.0 as usize], &self.access);
        ((access.len, access.dtype) != (buffer.len, buffer.dtype)).then(|| {
            format!(
                "an access of {} {} to {:?} of {} {}",
                access.len, access.dtype, buffer.label, buffer.len, buffer.dtype
            )
        })
    }

    /// The fault of an access that leaves its buffer, which is that of `what`, over a space.
    pub(crate) fn overrun(&self, dims: &[usize], what: &str) -> Option<String> {
        let (low, high) = self.access.reach(dims)?;
        let len = self.access.len;
        (low < 0 || high >= len as isize).then(|| format!("elements {low}..={high} of {what} of {len}"))
    }
}

impl AsRef<Access> for Operand {
    fn as_ref(&self) -> &Access {
        &self.access
    }
}

/// How an instruction uses a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// It reads it.
    Read,
    /// It writes it.
    Write,
    /// It adds to what the buffer holds.
    Update,
}

impl Use {
    /// True if the instruction sees what the buffer holds.
    #[must_use]
    pub fn reads(self) -> bool {
        matches!(self, Use::Read | Use::Update)
    }

    /// True if the buffer holds something else afterwards.
    #[must_use]
    pub fn writes(self) -> bool {
        matches!(self, Use::Write | Use::Update)
    }
}

/// The buffers that the loads of a nest read, in order.
pub(crate) fn read_by(nest: &Nest) -> impl Iterator<Item = BufferId> {
    nest.loaded().map(|operand| operand.buffer)
}

/// The buffers that the stores of a nest write, in order.
pub(crate) fn written_by(nest: &Nest) -> impl DoubleEndedIterator<Item = BufferId> + ExactSizeIterator {
    nest.stores.iter().map(|operand| operand.buffer)
}

/// The buffer that a nest of one store writes.
pub(crate) fn only_result(nest: &Nest) -> Option<BufferId> {
    match nest.stores.as_slice() {
        [store] => Some(store.buffer),
        _ => None,
    }
}

/// Calls a function with each buffer of a nest, and how the nest uses it.
pub(crate) fn nest_buffers(nest: &Nest, each: &mut dyn FnMut(BufferId, Use)) {
    read_by(nest).for_each(|id| each(id, Use::Read));
    written_by(nest).for_each(|id| each(id, Use::Write));
}

/// The same with buffers that may be changed.
pub(crate) fn nest_buffers_mut(nest: &mut Nest, each: &mut dyn FnMut(&mut BufferId, Use)) {
    nest.loaded_mut().for_each(|operand| each(&mut operand.buffer, Use::Read));
    nest.stores.iter_mut().for_each(|operand| each(&mut operand.buffer, Use::Write));
}

/// Whether a nest only moves elements: its one result is a load.
pub(crate) fn only_moves(nest: &Nest) -> bool {
    matches!(nest.expr.insts(), [(Inst::Load(0), _)]) && matches!(nest.loads.as_slice(), [Load::Buffer(_)])
}

/// The space of the matrices of a batch, given their sizes.
pub(crate) fn matrices(batch: &[usize], sizes: [usize; 2]) -> Dims {
    batch.iter().copied().chain(sizes).collect()
}

/// How a load reaches its values: an accumulator is what a host has made, row-major over the space.
pub(crate) fn access_of<'a>(load: &'a Load, dims: &[usize]) -> Cow<'a, Access> {
    match load {
        Load::Buffer(operand) => Cow::Borrowed(&operand.access),
        Load::Accumulator(dtype) => Cow::Owned(Access::contiguous(*dtype, dims)),
    }
}
