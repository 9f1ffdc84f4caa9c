//! Addresses of buffers in one run.

use ortrain_program::{Bindings, BufferId, BufferLocation, HostMemory, Memory, Program, Workspace};
use smallvec::SmallVec;

/// Returns the host memory of a run of this backend.
///
/// # Panics
/// Panics if the memory is on a device. Code that moves a state checks its backend.
pub(crate) fn host_memory(memory: &Memory) -> &HostMemory {
    memory.host().expect("programs of the CPU run on memory of this process")
}

/// Addresses of an instruction's buffers. More buffers than this cost an allocation.
pub(crate) type Bases = SmallVec<[*mut u8; 64]>;

/// Addresses of the buffers of a program in one run.
///
/// The planner keeps every buffer inside its memory, and the caller has checked the sizes of planes and workspace. At
/// each address, all bytes of the buffer are therefore inside the memory.
pub(crate) struct Addresses<'a> {
    program: &'a Program,
    bindings: &'a Bindings<'a>,
    work: &'a Workspace,
}

impl<'a> Addresses<'a> {
    pub(crate) fn new(
        program: &'a Program,
        bindings: &'a Bindings<'a>,
        work: &'a Workspace,
    ) -> Addresses<'a> {
        Addresses { program, bindings, work }
    }

    pub(crate) fn address_of(&self, id: BufferId) -> *mut u8 {
        let (memory, offset) = match self.program.buffer(id).location {
            BufferLocation::Work(offset) => (self.work.arena(), offset),
            BufferLocation::Plane(plane, offset) => (self.bindings.planes[plane.0 as usize], offset),
            // Constants are never written: the builder rejects such programs.
            BufferLocation::Constant(number) => {
                return self.program.constants[number].data().as_ptr().cast_mut();
            }
        };
        host_memory(memory).as_ptr().wrapping_add(offset)
    }

    pub(crate) fn addresses_of(&self, ids: impl IntoIterator<Item = BufferId>) -> Bases {
        ids.into_iter().map(|id| self.address_of(id)).collect()
    }
}
