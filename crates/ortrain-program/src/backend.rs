//! What a backend is.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;

use ortrain_expr::Precision;
use rustc_hash::FxHashSet;

use crate::interrupt::Watch;
use crate::run_error::{LargeBuffer, MemoryNeed, OverLimit};
use crate::target::Target;
use crate::{
    AllocationError, Bindings, Buffer, BufferId, GradientMode, HOST, HostMemory, Interrupt, Memory, Part,
    Program, RunError, is_work,
};

/// Scalars that are the same for a whole run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scalars {
    /// The seed of random numbers.
    pub seed: u64,
    /// The number of train steps done so far.
    pub train_step: u64,
}

/// The memory of runs: an arena for values and scratch for kernels. One workspace serves any number of programs, one
/// after the other; it grows to the largest of them.
#[derive(Debug)]
pub struct Workspace {
    backend: Arc<dyn Backend>,
    arena: Memory,
    scratch: Memory,
    /// Most bytes that a run may take, with those that are held elsewhere.
    limit: Option<usize>,
    held: usize,
    /// Most iterations of a loop.
    pub(crate) iterations: u64,
    /// Inputs of the next run that its executable wants on the host.
    pub(crate) kept: Vec<(BufferId, Vec<u8>)>,
    /// Who may end a run early.
    pub(crate) watch: Watch,
}

/// How many iterations a loop may take where nobody says otherwise. What takes more is most likely endless.
pub const ITERATION_LIMIT: u64 = 1_000_000;

/// The most bytes that a value in a loop may take whose size grows from iteration to iteration, where no limit is set: a
/// value that doubles has them after a few dozen.
pub const MAX_GROWN: usize = 64 << 20;

/// The room of a workspace, as a multiple of the bytes that it was made for. Batches and sequences change in size; a workspace
/// that grows where it lies keeps the pages that it has, which the system takes longer to give than a program takes to plan.
/// There is no more room than is needed on systems that count addresses as memory.
const ROOM: usize = if cfg!(unix) { 4 } else { 1 };

impl Workspace {
    /// Nothing yet, for programs of a backend; and no limit.
    #[must_use]
    pub fn new(backend: Arc<dyn Backend>) -> Workspace {
        Workspace::limited(backend, None, 0)
    }

    /// Nothing yet. A run of more than `limit` bytes will be refused, `held` bytes (parameters and gradients) counted
    /// with it.
    #[must_use]
    pub fn limited(backend: Arc<dyn Backend>, limit: Option<usize>, held: usize) -> Workspace {
        Workspace {
            backend,
            arena: Memory::new(0),
            scratch: Memory::new(0),
            limit,
            held,
            iterations: ITERATION_LIMIT,
            kept: Vec::new(),
            watch: Watch::default(),
        }
    }

    /// Sets the bytes that its owner holds beside it now: see [`Workspace::limited`].
    pub fn hold(&mut self, bytes: usize) {
        self.held = bytes;
    }

    /// With another limit on the iterations of a loop than [`ITERATION_LIMIT`].
    #[must_use]
    pub fn iteration_limit(mut self, iterations: u64) -> Workspace {
        self.iterations = iterations;
        self
    }

    /// With somebody who may end a run early, between two instructions.
    #[must_use]
    pub fn interrupt(mut self, interrupt: Option<Interrupt>) -> Workspace {
        self.watch = Watch::new(interrupt);
        self
    }

    /// Planes whose content nobody needs if the next run does not end: they are then all zero.
    pub fn disposable_planes(&mut self, planes: Range<usize>) {
        self.watch.disposable = planes;
    }

    /// The most bytes that a value in a loop may take whose size grows from iteration to iteration: what a limit leaves, or
    /// [`MAX_GROWN`].
    pub(crate) fn most_grown(&self) -> usize {
        self.limit.unwrap_or(MAX_GROWN)
    }

    /// Called when a run begins.
    pub(crate) fn begin(&mut self) {
        let taken = self.held.saturating_add(self.arena.len());
        self.watch.begin(self.limit.map(|limit| limit.saturating_sub(taken)));
    }

    /// The interrupt of runs and of their preparation.
    #[must_use]
    pub fn interrupter(&self) -> Option<&Interrupt> {
        self.watch.interrupt.as_ref()
    }

    /// Who may end a run early, to be asked between two instructions; [`Workspace::watch_again`] takes it back.
    pub fn watch(&mut self) -> Watch {
        std::mem::take(&mut self.watch)
    }

    /// Takes back what [`Workspace::watch`] gave.
    pub fn watch_again(&mut self, watch: Watch) {
        self.watch = watch;
    }

    /// Checks that `between` bytes between the segments of a schedule are within the limit, whatever else a run takes.
    ///
    /// # Errors
    /// [`RunError::OverLimit`].
    pub fn check_between(&self, between: usize) -> Result<(), RunError> {
        let need = MemoryNeed { held: self.held, between, ..MemoryNeed::default() };
        self.check_need(need, Vec::new)
    }

    /// Makes room; allocates only if there is less than asked for. What the memory held is lost where it had to move.
    ///
    /// # Errors
    /// When the system does not give that much.
    pub fn reserve(&mut self, arena: usize, scratch: usize) -> Result<(), AllocationError> {
        for (memory, bytes) in [(&mut self.arena, arena), (&mut self.scratch, scratch)] {
            if memory.len() < bytes && !self.backend.grow(memory, bytes) {
                // The old one goes before the new one comes. Room is worth no error.
                *memory = Memory::new(0);
                let room = bytes.saturating_mul(ROOM);
                let allocate = |room| self.backend.allocate(bytes, room);
                *memory = allocate(room).or_else(|_| allocate(bytes))?;
            }
        }
        Ok(())
    }

    /// Returns true if [`Workspace::reserve`] would ask for memory.
    #[must_use]
    pub fn lacks(&self, arena: usize, scratch: usize) -> bool {
        self.arena.len() < arena || self.scratch.len() < scratch
    }

    /// What a run of a program takes. `between` is what lies between the segments of its schedule.
    #[must_use]
    pub fn need(&self, program: &Program, scratch: usize, between: usize) -> MemoryNeed {
        let (held, constants, work) = (self.held, program.constant_bytes(), program.work_bytes);
        MemoryNeed { held, constants, work, scratch, between }
    }

    /// Checks that a run of a program is within the limit. Nothing is allocated.
    ///
    /// # Errors
    /// [`RunError::OverLimit`].
    pub fn check(&self, program: &Program, scratch: usize, between: usize) -> Result<(), RunError> {
        self.check_need(self.need(program, scratch, between), || program.largest(LARGEST))
    }

    fn check_need(
        &self,
        need: MemoryNeed,
        largest: impl FnOnce() -> Vec<LargeBuffer>,
    ) -> Result<(), RunError> {
        match self.limit {
            Some(limit) if need.total() > limit => {
                Err(RunError::OverLimit(Box::new(OverLimit { limit, need, largest: largest() })))
            }
            _ => Ok(()),
        }
    }

    /// Makes room for a run of a program, if it is within the limit.
    ///
    /// # Errors
    /// [`RunError::OverLimit`] before anything is allocated, or [`RunError::Memory`].
    pub fn prepare(&mut self, program: &Program, scratch: usize, between: usize) -> Result<(), RunError> {
        self.check(program, scratch, between)?;
        let need = self.need(program, scratch, between);
        let (work, own) = (need.work.max(self.arena.len()), need.scratch.max(self.scratch.len()));
        if self.limit.is_some_and(|limit| MemoryNeed { work, scratch: own, ..need }.total() > limit) {
            // Larger programs ran here before: what they left is given back.
            (self.arena, self.scratch) = (Memory::new(0), Memory::new(0));
        }
        Ok(self.reserve(need.work, need.scratch)?)
    }

    /// Gives the inputs that were kept for a run: see [`Executable::host_inputs`].
    pub fn kept(&mut self) -> Vec<(BufferId, Vec<u8>)> {
        std::mem::take(&mut self.kept)
    }

    /// The backend that its memory comes from.
    #[must_use]
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
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

/// How many buffers an error names.
const LARGEST: usize = 5;

/// A program that cannot run on a backend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{node}: the {backend} backend cannot run this {instruction} instruction: {reason}")]
pub struct UnsupportedOnBackend {
    /// The backend.
    pub backend: &'static str,
    /// The node.
    pub node: String,
    /// The instruction.
    pub instruction: &'static str,
    /// Why not.
    pub reason: String,
}

/// What may multiply bfloat16 where a machine has no AMX. Nothing else is ever used in its place without being asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Bf16Fallback {
    /// Nothing: without AMX it is an error.
    #[default]
    None,
    /// AVX512-BF16. Without that it is an error.
    Avx512Bf16,
    /// Whatever is there: AVX512-BF16, or arithmetic in `f32` on rounded factors, which is slower than `f32` itself.
    Emulated,
}

impl Bf16Fallback {
    /// All of them.
    pub const ALL: [Bf16Fallback; 3] = [Bf16Fallback::None, Bf16Fallback::Avx512Bf16, Bf16Fallback::Emulated];

    /// The name that users give it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Bf16Fallback::None => "none",
            Bf16Fallback::Avx512Bf16 => "avx512_bf16",
            Bf16Fallback::Emulated => "emulated",
        }
    }
}

impl fmt::Display for Bf16Fallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that no [`Bf16Fallback`] has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no bf16_fallback {0:?}; there are \"none\", \"avx512_bf16\" and \"emulated\"")]
pub struct UnknownFallback(pub String);

impl FromStr for Bf16Fallback {
    type Err = UnknownFallback;

    fn from_str(name: &str) -> Result<Bf16Fallback, UnknownFallback> {
        let found = Bf16Fallback::ALL.into_iter().find(|fallback| fallback.name() == name);
        found.ok_or_else(|| UnknownFallback(name.to_owned()))
    }
}

/// A precision for which a backend has nothing that it may use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("precision \"{precision}\" {reason}")]
pub struct UnsupportedPrecision {
    /// The precision.
    pub precision: Precision,
    /// What it needs, what is there, and what helps.
    pub reason: String,
}

/// The limits of a machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Floating-point operations per second in f32 (a multiplication and an addition are two), from registers.
    pub flops: f64,
    /// The same of products in the precision that a backend was made for.
    pub product_flops: f64,
    /// Bytes per second that a loop of two loads and a store moves to and from memory beyond the caches.
    pub bandwidth: f64,
}

impl Limits {
    /// The least seconds in which so much work can be done: the longer of computing and of moving bytes.
    #[must_use]
    pub fn seconds(&self, flops: f64, bytes: f64) -> f64 {
        (flops / self.flops).max(bytes / self.bandwidth)
    }
}

/// Something that runs programs.
pub trait Backend: Send + Sync + std::fmt::Debug {
    /// Its name, as users write it.
    fn name(&self) -> &'static str;

    /// The device that planes and workspaces lie on.
    fn device(&self) -> &str {
        HOST
    }

    /// Memory of that device, all zero, which can grow to `room` bytes where it lies, if the device knows such memory.
    ///
    /// # Errors
    /// When the device does not give that much.
    fn allocate(&self, bytes: usize, room: usize) -> Result<Memory, AllocationError> {
        Ok(Memory::Host(HostMemory::with_room(bytes, room)?))
    }

    /// Makes memory of that device at least `bytes` bytes long where it lies: what is there stays, what comes to it is zero.
    /// Returns false, and changes nothing, if there is no room.
    fn grow(&self, memory: &mut Memory, bytes: usize) -> bool {
        memory.grow(bytes)
    }

    /// The limits of the machine, measured now; `None` where they are not known.
    fn limits(&self) -> Option<Limits> {
        None
    }

    /// This backend for programs of a precision, with what the machine has and `fallback` allows.
    ///
    /// # Errors
    /// When the machine has nothing that is allowed.
    fn with_precision(
        &self,
        precision: Precision,
        fallback: Bf16Fallback,
    ) -> Result<Arc<dyn Backend>, UnsupportedPrecision>;

    /// The name of what multiplies bfloat16 here; `None` where nothing was chosen, as for `f32`, or nothing is to be chosen.
    fn bf16_unit(&self) -> Option<&'static str>;

    /// The machine, as passes are to know it when they make programs for it.
    fn target(&self) -> Target;

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

    /// Inputs that a run reads on the host, beside the arena: the workspace keeps them for it.
    fn host_inputs(&self) -> &[BufferId] {
        &[]
    }

    /// Runs one entry. The inputs have been written to the arena of `work`; the outputs are there afterwards. Of a part,
    /// what it takes is there before, and what it gives afterwards. The workspace has been made large enough. An observer is
    /// told of every instruction; what is computed is the same.
    ///
    /// # Errors
    /// [`RunError`]; the planes are then unchanged.
    fn run_observed(
        &self,
        bindings: &Bindings<'_>,
        work: &mut Workspace,
        entry: GradientMode,
        part: Part,
        scalars: Scalars,
        observer: Option<&mut dyn Observer>,
    ) -> Result<(), RunError>;

    /// Runs one entry, whole and unobserved.
    ///
    /// # Errors
    /// As [`Executable::run_observed`].
    fn run(
        &self,
        bindings: &Bindings<'_>,
        work: &mut Workspace,
        entry: GradientMode,
        scalars: Scalars,
    ) -> Result<(), RunError> {
        self.run_observed(bindings, work, entry, Part::Whole, scalars, None)
    }
}

/// Told of everything that a run does, right after it was done.
pub trait Observer {
    /// An instruction of a program.
    fn instruction(&mut self, program: &Program, index: usize, start: Instant, end: Instant);

    /// A function on the host, by its node.
    fn host(&mut self, node: &str, start: Instant, end: Instant);

    /// Inputs copied into the arena, or results out of it.
    fn copied(&mut self, what: Copied, bytes: usize, start: Instant, end: Instant);
}

/// What was copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Copied {
    /// Inputs of a program.
    Inputs,
    /// Results of a program.
    Outputs,
}

impl Program {
    /// The largest buffers of its work arena, the largest first; of those that share bytes, one.
    #[must_use]
    pub fn largest(&self, count: usize) -> Vec<LargeBuffer> {
        let mut ids = self.inputs.clone();
        self.instructions.iter().for_each(|scheduled| {
            ids.extend(scheduled.instruction.reads());
            ids.extend(scheduled.instruction.writes());
        });
        let mut seen = FxHashSet::default();
        ids.retain(|&id| seen.insert(id) && is_work(&self.buffers, id));
        let mut used: Vec<&Buffer> = ids.into_iter().map(|id| self.buffer(id)).collect();
        used.sort_by_key(|buffer| std::cmp::Reverse(buffer.bytes()));
        let mut largest: Vec<&Buffer> = Vec::new();
        for buffer in used {
            if largest.len() < count && !largest.iter().any(|known| known.place == buffer.place) {
                largest.push(buffer);
            }
        }
        let describe = |buffer: &Buffer| LargeBuffer {
            label: buffer.label.to_string(),
            dtype: buffer.dtype,
            elements: buffer.len,
            bytes: buffer.bytes(),
        };
        largest.into_iter().map(describe).collect()
    }

    /// Checks that the planes that a part reads and writes are there and large enough; of those that somebody lends also that
    /// elements lie at multiples of their size, and that none of them which is written is read-only.
    ///
    /// # Errors
    /// [`RunError::Plane`], [`RunError::Unaligned`] and [`RunError::ReadOnly`].
    pub fn check_bindings(&self, bindings: &Bindings<'_>, part: Part) -> Result<(), RunError> {
        for used in self.planes.iter().filter(|used| part != Part::Before || used.is_early) {
            let plane = used.plane.0;
            let memory = bindings.planes.get(plane as usize);
            let found = memory.map_or(0, |memory| memory.len());
            let Some(memory) = memory.filter(|_| found >= used.bytes) else {
                return Err(RunError::Plane { plane, needed: used.bytes, found });
            };
            let Some(memory) = memory.host().filter(|memory| memory.is_lent()) else { continue };
            if !used.fits(memory.as_ptr().addr()) {
                return Err(RunError::Unaligned { plane });
            }
            if used.is_written && memory.is_read_only() {
                return Err(RunError::ReadOnly { plane });
            }
        }
        Ok(())
    }
}
