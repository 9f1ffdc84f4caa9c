//! Operands of instructions: buffers with an access.

use std::borrow::Cow;

use ortrain_expr::{Access, DType, Dims, Inst};

use crate::buffer::{Buffer, BufferId};

/// Buffer with the access of an instruction to it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Operand {
    /// Buffer.
    pub buffer: BufferId,
    /// Positions of the elements in the buffer.
    pub access: Access,
}

/// Expression over an index space, with the buffers that it reads and writes.
pub type Nest = ortrain_expr::Nest<Operand>;

/// Source of a [`Nest`]: a buffer, or the accumulator of the instruction if the nest is its epilogue.
pub type Load = ortrain_expr::Load<Operand>;

impl Operand {
    /// Returns an operand for a whole buffer, row-major.
    #[must_use]
    pub fn contiguous(buffer: BufferId, dtype: DType, dims: &[usize]) -> Operand {
        Operand { buffer, access: Access::contiguous(dtype, dims) }
    }

    /// Returns the operand with another access to the same buffer.
    #[must_use]
    pub fn with_access(&self, access: Access) -> Operand {
        Operand { buffer: self.buffer, access }
    }

    /// Returns a fault if the length or type of the access differs from the buffer.
    pub(crate) fn validate(&self, buffers: &[Buffer]) -> Option<String> {
        let (buffer, access) = (&buffers[self.buffer.0 as usize], &self.access);
        ((access.len, access.dtype) != (buffer.len, buffer.dtype)).then(|| {
            format!(
                "the access has {} {} elements, but {:?} has {} {}",
                access.len, access.dtype, buffer.label, buffer.len, buffer.dtype
            )
        })
    }

    /// Returns a fault if the access leaves its buffer over the space `dims`. `what` names the operand in the message.
    pub(crate) fn bounds_fault(&self, dims: &[usize], what: &str) -> Option<String> {
        let (low, high) = self.access.position_range(dims)?;
        let len = self.access.len;
        (low < 0 || high >= len as isize).then(|| format!("elements {low}..={high} of {what} of {len}"))
    }
}

impl AsRef<Access> for Operand {
    fn as_ref(&self) -> &Access {
        &self.access
    }
}

/// Use of a buffer by an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// The instruction reads the buffer.
    Read,
    /// The instruction overwrites the buffer.
    Write,
    /// The instruction adds to the contents of the buffer.
    Update,
}

impl Use {
    /// Returns true if the instruction sees the previous contents of the buffer.
    #[must_use]
    pub fn reads(self) -> bool {
        matches!(self, Use::Read | Use::Update)
    }

    /// Returns true if the instruction changes the contents of the buffer.
    #[must_use]
    pub fn writes(self) -> bool {
        matches!(self, Use::Write | Use::Update)
    }
}

/// Returns the buffers that the loads of a nest read, in order.
pub(crate) fn loaded_buffers(nest: &Nest) -> impl Iterator<Item = BufferId> {
    nest.load_operands().map(|operand| operand.buffer)
}

/// Returns the buffers that the stores of a nest write, in order.
pub(crate) fn stored_buffers(nest: &Nest) -> impl DoubleEndedIterator<Item = BufferId> + ExactSizeIterator {
    nest.stores.iter().map(|operand| operand.buffer)
}

/// Returns the buffer that a nest with a single store writes.
pub(crate) fn single_result(nest: &Nest) -> Option<BufferId> {
    match nest.stores.as_slice() {
        [store] => Some(store.buffer),
        _ => None,
    }
}

/// Calls `each` with each buffer of a nest and its use.
pub(crate) fn nest_buffers(nest: &Nest, each: &mut dyn FnMut(BufferId, Use)) {
    loaded_buffers(nest).for_each(|id| each(id, Use::Read));
    stored_buffers(nest).for_each(|id| each(id, Use::Write));
}

/// Calls `each` with each mutable buffer of a nest and its use.
pub(crate) fn nest_buffers_mut(nest: &mut Nest, each: &mut dyn FnMut(&mut BufferId, Use)) {
    nest.load_operands_mut().for_each(|operand| each(&mut operand.buffer, Use::Read));
    nest.stores.iter_mut().for_each(|operand| each(&mut operand.buffer, Use::Write));
}

/// Returns true if a nest only moves elements: its only result is a load.
pub(crate) fn only_moves_elements(nest: &Nest) -> bool {
    matches!(nest.expr.insts(), [(Inst::Load(0), _)]) && matches!(nest.loads.as_slice(), [Load::Buffer(_)])
}

/// Returns the dimensions of a batch of matrices of these sizes.
pub(crate) fn batched_matrix_dims(batch: &[usize], sizes: [usize; 2]) -> Dims {
    batch.iter().copied().chain(sizes).collect()
}

/// Returns the access of a load. An accumulator is computed by the host instruction, row-major over the space.
pub(crate) fn load_access<'a>(load: &'a Load, dims: &[usize]) -> Cow<'a, Access> {
    match load {
        Load::Buffer(operand) => Cow::Borrowed(&operand.access),
        Load::Accumulator(dtype) => Cow::Owned(Access::contiguous(*dtype, dims)),
    }
}
