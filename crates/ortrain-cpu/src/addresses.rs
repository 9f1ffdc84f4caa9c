//! From buffers to addresses.

use ortrain_program::{Bindings, BufferId, HostMemory, Memory, Place, Program, Workspace};
use smallvec::SmallVec;

/// Memory that a run of this backend was given.
///
/// # Panics
/// When it lies on a device: whoever moves a state checks its backend.
pub(crate) fn on_host(memory: &Memory) -> &HostMemory {
    memory.host().expect("programs of the CPU run on memory of this process")
}

/// The addresses of an instruction's buffers. Instructions of more buffers than this cost an allocation.
pub(crate) type Bases = SmallVec<[*mut u8; 64]>;

/// Where the buffers of a program lie in one run.
///
/// The planner keeps every buffer inside its memory and the caller has checked the sizes of planes and workspace, so
/// each address is the start of as many bytes as the buffer has.
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

    pub(crate) fn of(&self, id: BufferId) -> *mut u8 {
        let (memory, offset) = match self.program.buffer(id).place {
            Place::Work(offset) => (self.work.arena(), offset),
            Place::Plane(plane, offset) => (self.bindings.planes[plane.0 as usize], offset),
            // Nobody writes there: the builder refuses that.
            Place::Constant(number) => {
                return self.program.constants[number].data().as_ptr().cast_mut();
            }
        };
        on_host(memory).as_ptr().wrapping_add(offset)
    }

    pub(crate) fn all(&self, ids: impl IntoIterator<Item = BufferId>) -> Bases {
        ids.into_iter().map(|id| self.of(id)).collect()
    }
}
