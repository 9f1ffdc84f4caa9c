//! What a backend is.

use std::sync::Arc;

use crate::{Entry, Memory, OutOfMemory, Program};

/// Scalars that are the same for a whole run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scalars {
    /// The seed of random numbers.
    pub seed: u64,
    /// The number of train steps done so far.
    pub train_step: u64,
}

/// The planes a program runs on: index `k` is [`crate::PlaneId`] `k`.
#[derive(Clone, Copy, Debug)]
pub struct Bindings<'a> {
    /// The planes.
    pub planes: &'a [&'a Memory],
}

/// The memory of a run that outlives no run: an arena for values and scratch for kernels.
#[derive(Debug)]
pub struct Workspace {
    arena: Memory,
    scratch: Memory,
}

impl Default for Workspace {
    fn default() -> Workspace {
        Workspace { arena: Memory::new(0), scratch: Memory::new(0) }
    }
}

impl Workspace {
    /// Nothing yet.
    #[must_use]
    pub fn new() -> Workspace {
        Workspace::default()
    }

    /// Makes room; allocates only if there is less than asked for.
    ///
    /// # Errors
    /// When the system does not give that much.
    pub fn reserve(&mut self, arena: usize, scratch: usize) -> Result<(), OutOfMemory> {
        if self.arena.len() < arena {
            self.arena = Memory::try_new(arena)?;
        }
        if self.scratch.len() < scratch {
            self.scratch = Memory::try_new(scratch)?;
        }
        Ok(())
    }

    /// Where the program's inputs, values and outputs lie.
    #[must_use]
    pub fn arena(&self) -> &Memory {
        &self.arena
    }

    /// What kernels may use while they run.
    #[must_use]
    pub fn scratch(&self) -> &Memory {
        &self.scratch
    }
}

/// Why a run failed. Nothing was committed: state is as it was before the run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RunError {
    /// An index outside its range: a class label, a row of an embedding.
    #[error("{node}: index {index} is out of range for {bound} entries (0 to {})", .bound - 1)]
    IndexOutOfRange {
        /// The node.
        node: String,
        /// The index.
        index: i64,
        /// The number of entries.
        bound: i64,
    },
    /// A plane is smaller than the program needs, or absent.
    #[error("plane {plane} has {found} bytes but the program needs {needed}")]
    Plane {
        /// The plane.
        plane: u32,
        /// Bytes needed.
        needed: usize,
        /// Bytes there are.
        found: usize,
    },
    /// The memory that the plan asks for is not there.
    #[error("the step needs more memory than there is: {0}; a smaller batch needs less")]
    Memory(#[from] OutOfMemory),
    /// A host function failed.
    #[error("{node}: {message}")]
    Host {
        /// The node.
        node: String,
        /// What went wrong.
        message: String,
    },
    /// A program could not be specialised when its shapes became known.
    #[error("{0}")]
    Specialise(String),
}

/// A program that cannot run on a backend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{node}: the {backend} backend cannot run this {step} instruction: {reason}")]
pub struct UnsupportedOnBackend {
    /// The backend.
    pub backend: &'static str,
    /// The node.
    pub node: String,
    /// The instruction.
    pub step: &'static str,
    /// Why not.
    pub reason: String,
}

/// Something that runs programs.
pub trait Backend: Send + Sync + std::fmt::Debug {
    /// Its name, as users write it.
    fn name(&self) -> &'static str;

    /// Prepares a program. May allocate; runs do not.
    ///
    /// # Errors
    /// When an instruction cannot run here.
    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>, UnsupportedOnBackend>;
}

/// A program ready to run. Immutable: several threads may run it, each with its own workspace.
pub trait Executable: Send + Sync + std::fmt::Debug {
    /// The program.
    fn program(&self) -> &Program;

    /// How many bytes of scratch a run needs.
    fn scratch_bytes(&self) -> usize;

    /// Runs one entry. The inputs have been written to the arena of `work`; the outputs are there afterwards. The
    /// workspace has been made large enough.
    ///
    /// # Errors
    /// [`RunError`]; the planes are then unchanged.
    fn run(
        &self,
        bindings: &Bindings<'_>,
        work: &mut Workspace,
        entry: Entry,
        scalars: Scalars,
    ) -> Result<(), RunError>;
}

impl Program {
    /// Checks that the planes are there and large enough.
    ///
    /// # Errors
    /// [`RunError::Plane`].
    pub fn check_bindings(&self, bindings: &Bindings<'_>) -> Result<(), RunError> {
        for &(plane, needed) in &self.planes {
            let found = bindings.planes.get(plane.0 as usize).map_or(0, |memory| memory.len());
            if found < needed {
                return Err(RunError::Plane { plane: plane.0, needed, found });
            }
        }
        Ok(())
    }
}
