//! Interface of backends.

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
    AllocationError, Bindings, Buffer, BufferId, CommitGate, GradientMode, HOST, HostMemory, Interrupt,
    Memory, Program, RunError, RunPart, is_work,
};

/// Scalars that are constant during a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scalars {
    /// Seed of random numbers.
    pub seed: u64,
    /// Number of completed train steps.
    pub train_step: u64,
}

/// Memory of runs: an arena for values, and scratch for kernels. One workspace serves any number of programs, one after
/// the other. It grows to the largest of them.
#[derive(Debug)]
pub struct Workspace {
    backend: Arc<dyn Backend>,
    arena: Memory,
    scratch: Memory,
    /// Memory limit of a run in bytes, including memory that is held elsewhere.
    limit: Option<usize>,
    outside_bytes: usize,
    /// Maximum number of iterations of a loop.
    pub(crate) iterations: u64,
    /// Copies of inputs of the next run that its executable reads on the host.
    pub(crate) saved_inputs: SavedInputs,
    /// Interrupt state of the run.
    pub(crate) watch: Watch,
}

/// Copies of inputs that a run reads on the host.
#[derive(Debug, Default)]
pub struct SavedInputs {
    copies: Vec<(BufferId, Vec<u8>)>,
    /// Number of copies for the run; the memory of the others is reused.
    used: usize,
}

impl SavedInputs {
    /// Forgets all copies, and keeps their memory.
    pub(crate) fn clear(&mut self) {
        self.used = 0;
    }

    /// Copies an input.
    pub(crate) fn save(&mut self, id: BufferId, bytes: &[u8]) {
        if self.used == self.copies.len() {
            self.copies.push((id, Vec::new()));
        }
        let (of, copy) = &mut self.copies[self.used];
        *of = id;
        copy.clear();
        copy.extend_from_slice(bytes);
        self.used += 1;
    }

    /// Returns the copy of an input.
    #[must_use]
    pub fn get(&self, id: BufferId) -> Option<&[u8]> {
        let (_, bytes) = self.copies[..self.used].iter().find(|(known, _)| *known == id)?;
        Some(bytes)
    }
}

/// Default limit on the iterations of a loop. More iterations probably mean an endless loop.
pub const ITERATION_LIMIT: u64 = 1_000_000;

/// Maximum bytes of a value in a loop that grows from iteration to iteration, without a memory limit. A value that
/// doubles reaches this size after a few dozen iterations.
pub const MAX_GROWING_BYTES: usize = 64 << 20;

/// Reserved address space of a workspace, as a multiple of its initial bytes. Batches and sequences vary in size, and a
/// workspace that grows in place keeps its pages. Allocation of new pages takes longer than the planning of a program.
/// The factor is 1 on systems that count address space as memory.
const RESERVE_FACTOR: usize = if cfg!(unix) { 4 } else { 1 };

impl Workspace {
    /// Creates an empty workspace for programs of a backend, without a limit.
    #[must_use]
    pub fn new(backend: Arc<dyn Backend>) -> Workspace {
        Workspace::with_limit(backend, None, 0)
    }

    /// Creates an empty workspace with a limit. A run of more than `limit` bytes is an error. The `outside` bytes
    /// (parameters and gradients) count too.
    #[must_use]
    pub fn with_limit(backend: Arc<dyn Backend>, limit: Option<usize>, outside: usize) -> Workspace {
        Workspace {
            backend,
            arena: Memory::new(0),
            scratch: Memory::new(0),
            limit,
            outside_bytes: outside,
            iterations: ITERATION_LIMIT,
            saved_inputs: SavedInputs::default(),
            watch: Watch::default(),
        }
    }

    /// Sets the bytes that the owner holds besides the workspace: see [`Workspace::limited`].
    pub fn set_outside_bytes(&mut self, bytes: usize) {
        self.outside_bytes = bytes;
    }

    /// Sets the limit on the iterations of a loop, instead of [`ITERATION_LIMIT`].
    #[must_use]
    pub fn iteration_limit(mut self, iterations: u64) -> Workspace {
        self.iterations = iterations;
        self
    }

    /// Sets the interrupt, which ends runs early between two instructions.
    #[must_use]
    pub fn interrupt(mut self, interrupt: Option<Interrupt>) -> Workspace {
        self.watch = Watch::new(interrupt);
        self
    }

    /// Sets the gate of the next run. A later run has no gate.
    pub fn set_gate(&mut self, gate: Option<Box<dyn CommitGate>>) {
        self.watch.set_gate(gate);
    }

    /// Marks planes without needed content if the next run fails: they are then cleared to zero.
    pub fn disposable_planes(&mut self, planes: Range<usize>) {
        self.watch.disposable = planes;
    }

    /// Returns the maximum bytes of a value in a loop that grows from iteration to iteration: the memory limit, or
    /// [`MAX_GROWING_BYTES`].
    pub(crate) fn max_growing_bytes(&self) -> usize {
        self.limit.unwrap_or(MAX_GROWING_BYTES)
    }

    /// Begins a run.
    pub(crate) fn begin(&mut self) {
        let used = self.outside_bytes.saturating_add(self.arena.len());
        self.watch.begin(self.limit.map(|limit| limit.saturating_sub(used)));
    }

    /// Returns the interrupt of runs and of their preparation.
    #[must_use]
    pub fn interrupter(&self) -> Option<&Interrupt> {
        self.watch.interrupt.as_ref()
    }

    /// Takes the interrupt state out of the workspace, for checks between instructions. [`Workspace::restore_watch`]
    /// returns it.
    pub fn take_watch(&mut self) -> Watch {
        std::mem::take(&mut self.watch)
    }

    /// Puts the interrupt state of [`Workspace::watch`] back.
    pub fn restore_watch(&mut self, watch: Watch) {
        self.watch = watch;
    }

    /// Checks that `intermediate_bytes` bytes between the segments of a schedule are within the limit, without other memory of a
    /// run.
    ///
    /// # Errors
    /// [`RunError::OverLimit`].
    pub fn check_intermediates(&self, intermediate_bytes: usize) -> Result<(), RunError> {
        let need = MemoryNeed {
            state: self.outside_bytes,
            intermediates: intermediate_bytes,
            ..MemoryNeed::default()
        };
        self.check_need(need, Vec::new)
    }

    /// Grows the memory to these sizes if it is smaller. The content is lost if the memory must move.
    ///
    /// # Errors
    /// When the system does not provide the memory.
    pub fn reserve(&mut self, arena: usize, scratch: usize) -> Result<(), AllocationError> {
        for (memory, bytes) in [(&mut self.arena, arena), (&mut self.scratch, scratch)] {
            if memory.len() < bytes && !self.backend.grow(memory, bytes) {
                // The old memory is freed before the new allocation. If the reserved space fails, the bare size is
                // allocated.
                *memory = Memory::new(0);
                let capacity = bytes.saturating_mul(RESERVE_FACTOR);
                let allocate = |capacity| self.backend.allocate(bytes, capacity);
                *memory = allocate(capacity).or_else(|_| allocate(bytes))?;
            }
        }
        Ok(())
    }

    /// Returns true if [`Workspace::reserve`] would allocate memory.
    #[must_use]
    pub fn needs_allocation(&self, arena: usize, scratch: usize) -> bool {
        self.arena.len() < arena || self.scratch.len() < scratch
    }

    /// Returns the memory requirement of a run of a program. `intermediate_bytes` counts the bytes between the segments of its
    /// schedule.
    #[must_use]
    pub fn memory_need(&self, program: &Program, scratch: usize, intermediate_bytes: usize) -> MemoryNeed {
        let (outside, constants, work) = (self.outside_bytes, program.constant_bytes(), program.work_bytes);
        MemoryNeed { state: outside, constants, work, scratch, intermediates: intermediate_bytes }
    }

    /// Checks that a run of a program is within the limit. Nothing is allocated.
    ///
    /// # Errors
    /// [`RunError::OverLimit`].
    pub fn check(
        &self,
        program: &Program,
        scratch: usize,
        intermediate_bytes: usize,
    ) -> Result<(), RunError> {
        self.check_need(self.memory_need(program, scratch, intermediate_bytes), || {
            program.largest_buffers(MAX_NAMED_BUFFERS)
        })
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

    /// Reserves memory for a run of a program, if the run is within the limit.
    ///
    /// # Errors
    /// [`RunError::OverLimit`] before any allocation, or [`RunError::Memory`].
    pub fn prepare(
        &mut self,
        program: &Program,
        scratch: usize,
        intermediate_bytes: usize,
    ) -> Result<(), RunError> {
        self.check(program, scratch, intermediate_bytes)?;
        let need = self.memory_need(program, scratch, intermediate_bytes);
        let (work, scratch_bytes) = (need.work.max(self.arena.len()), need.scratch.max(self.scratch.len()));
        if self.limit.is_some_and(|limit| MemoryNeed { work, scratch: scratch_bytes, ..need }.total() > limit)
        {
            // Larger programs ran here before: their memory is freed.
            (self.arena, self.scratch) = (Memory::new(0), Memory::new(0));
        }
        Ok(self.reserve(need.work, need.scratch)?)
    }

    /// Takes the inputs that were saved for a run: see [`Executable::host_inputs`].
    pub fn take_saved_inputs(&mut self) -> SavedInputs {
        std::mem::take(&mut self.saved_inputs)
    }

    /// Returns taken inputs, so that later runs reuse their memory.
    pub fn return_saved_inputs(&mut self, mut saved: SavedInputs) {
        saved.clear();
        self.saved_inputs = saved;
    }

    /// Returns the backend that allocates the memory.
    #[must_use]
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// Returns the memory of the program's inputs, values and outputs.
    #[must_use]
    pub fn arena(&self) -> &Memory {
        &self.arena
    }

    /// Returns the temporary memory of kernels.
    #[must_use]
    pub fn scratch(&self) -> &Memory {
        &self.scratch
    }
}

/// Number of buffers in an error message.
const MAX_NAMED_BUFFERS: usize = 5;

/// Error for a program that cannot run on a backend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{node}: the {backend} backend cannot run this {instruction} instruction: {reason}")]
pub struct UnsupportedOnBackend {
    /// Name of the backend.
    pub backend: &'static str,
    /// Node.
    pub node: String,
    /// Name of the instruction.
    pub instruction: &'static str,
    /// Reason.
    pub reason: String,
}

/// Error for a device name without a device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no device {device:?} here: {reason}; {remedy}")]
pub struct NoDevice {
    /// Name.
    pub device: String,
    /// Reason.
    pub reason: String,
    /// Remedy.
    pub remedy: String,
}

/// Replacement for AMX in bfloat16 products. A replacement is used only on request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Bf16Fallback {
    /// No replacement: a machine without AMX is an error.
    #[default]
    None,
    /// AVX512-BF16. A machine without AVX512-BF16 is an error.
    Avx512Bf16,
    /// AVX512-BF16 if available, or else `f32` arithmetic on rounded factors, which is slower than plain `f32`.
    Emulated,
}

impl Bf16Fallback {
    /// All variants.
    pub const ALL: [Bf16Fallback; 3] = [Bf16Fallback::None, Bf16Fallback::Avx512Bf16, Bf16Fallback::Emulated];

    /// Returns the name in the user interface.
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

/// Error for a name that is no [`Bf16Fallback`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown bf16_fallback {0:?}; expected one of \"none\", \"avx512_bf16\" and \"emulated\"")]
pub struct UnknownFallback(pub String);

impl FromStr for Bf16Fallback {
    type Err = UnknownFallback;

    fn from_str(name: &str) -> Result<Bf16Fallback, UnknownFallback> {
        let parsed = Bf16Fallback::ALL.into_iter().find(|fallback| fallback.name() == name);
        parsed.ok_or_else(|| UnknownFallback(name.to_owned()))
    }
}

/// Error for a precision that the backend does not support on this machine.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("precision \"{precision}\" {reason}")]
pub struct UnsupportedPrecision {
    /// Precision.
    pub precision: Precision,
    /// Requirement, available hardware, and remedy.
    pub reason: String,
}

/// Limits of a machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Floating-point operations per second in f32, from registers. A multiplication and an addition count as two.
    pub flops: f64,
    /// Floating-point operations per second of products in the backend's precision.
    pub product_flops: f64,
    /// Bytes per second between the processor and memory beyond the caches, in a loop of two loads and a store.
    pub bandwidth: f64,
}

impl Limits {
    /// Returns the minimum seconds for this work: the maximum of arithmetic time and memory time.
    #[must_use]
    pub fn seconds(&self, flops: f64, bytes: f64) -> f64 {
        (flops / self.flops).max(bytes / self.bandwidth)
    }
}

/// Backend: compiles programs for a device.
pub trait Backend: Send + Sync + std::fmt::Debug {
    /// Returns the name in the user interface.
    fn name(&self) -> &'static str;

    /// Returns the device of planes and workspaces.
    fn device(&self) -> &str {
        HOST
    }

    /// Allocates zeroed memory on the device. It can grow in place to `capacity` bytes, if the device supports this.
    ///
    /// # Errors
    /// When the device cannot provide the memory.
    fn allocate(&self, bytes: usize, capacity: usize) -> Result<Memory, AllocationError> {
        Ok(Memory::Host(HostMemory::with_capacity(bytes, capacity)?))
    }

    /// Grows memory of the device in place to at least `bytes` bytes. Old content stays; new bytes are zero. Returns
    /// false, and changes nothing, if the reserved space is too small.
    fn grow(&self, memory: &mut Memory, bytes: usize) -> bool {
        memory.grow(bytes)
    }

    /// Measures the limits of the machine; `None` if they are unknown.
    fn limits(&self) -> Option<Limits> {
        None
    }

    /// Returns this backend for programs of a precision, on the hardware of the machine that `fallback` allows.
    ///
    /// # Errors
    /// When the machine has no allowed hardware.
    fn with_precision(
        &self,
        precision: Precision,
        fallback: Bf16Fallback,
    ) -> Result<Arc<dyn Backend>, UnsupportedPrecision>;

    /// Returns the name of the hardware unit for bfloat16 products; `None` without a choice, for example for `f32`.
    fn bf16_unit(&self) -> Option<&'static str>;

    /// Returns the description of the machine for passes.
    fn target(&self) -> Target;

    /// Compiles a program. Compilation may allocate; runs do not.
    ///
    /// # Errors
    /// When an instruction is not supported.
    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>, UnsupportedOnBackend>;
}

/// Compiled program. It is immutable: several threads may run it, each with its own workspace.
pub trait Executable: Send + Sync + std::fmt::Debug {
    /// Returns the program.
    fn program(&self) -> &Program;

    /// Returns the scratch bytes of a run.
    fn scratch_bytes(&self) -> usize;

    /// Returns the description of the kernel of each instruction, in order. Empty if the backend chooses no kernels.
    fn kernels(&self) -> Vec<String> {
        Vec::new()
    }

    /// Returns inputs that a run reads on the host, in addition to the arena. The workspace saves copies of them.
    fn host_inputs(&self) -> &[BufferId] {
        &[]
    }

    /// Runs one gradient mode. The caller has prepared the workspace and written the inputs of the part to its arena;
    /// the outputs are there afterwards. The observer is notified of every instruction and does not change the results.
    ///
    /// # Errors
    /// [`RunError`]; the planes are then unchanged.
    fn run_observed(
        &self,
        bindings: &Bindings<'_>,
        work: &mut Workspace,
        entry: GradientMode,
        part: RunPart,
        scalars: Scalars,
        observer: Option<&mut dyn Observer>,
    ) -> Result<(), RunError>;

    /// Runs the whole program in one gradient mode, without an observer.
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
        self.run_observed(bindings, work, entry, RunPart::Full, scalars, None)
    }
}

/// Observer of a run, which is notified right after each operation.
pub trait Observer {
    /// Receives an executable before its run, for the descriptions of its [kernels](Executable::kernels).
    fn begins(&mut self, executable: &dyn Executable) {
        let _ = executable;
    }

    /// Receives an instruction of a program.
    fn instruction(&mut self, program: &Program, index: usize, start: Instant, end: Instant);

    /// Receives a host function, by its node.
    fn host(&mut self, node: &str, start: Instant, end: Instant);

    /// Receives a copy of inputs into the arena, or of results out of it.
    fn copied(&mut self, what: Copied, bytes: usize, start: Instant, end: Instant);
}

/// Kind of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Copied {
    /// Inputs of a program.
    Inputs,
    /// Results of a program.
    Outputs,
}

impl Program {
    /// Returns the largest buffers of the work arena, in descending order. Of buffers with the same bytes only one is
    /// listed.
    #[must_use]
    pub fn largest_buffers(&self, count: usize) -> Vec<LargeBuffer> {
        let mut ids = self.inputs.clone();
        self.instructions.iter().for_each(|scheduled| {
            ids.extend(scheduled.instruction.reads());
            ids.extend(scheduled.instruction.writes());
        });
        let mut visited = FxHashSet::default();
        ids.retain(|&id| visited.insert(id) && is_work(&self.buffers, id));
        let mut used: Vec<&Buffer> = ids.into_iter().map(|id| self.buffer(id)).collect();
        used.sort_by_key(|buffer| std::cmp::Reverse(buffer.bytes()));
        let mut largest: Vec<&Buffer> = Vec::new();
        for buffer in used {
            if largest.len() < count && !largest.iter().any(|known| known.location == buffer.location) {
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

    /// Checks that the planes of a part exist and are large enough. Borrowed planes must also be aligned, and writable
    /// if the program writes them.
    ///
    /// # Errors
    /// [`RunError::Plane`], [`RunError::Unaligned`] and [`RunError::ReadOnly`].
    pub fn check_bindings(&self, bindings: &Bindings<'_>, part: RunPart) -> Result<(), RunError> {
        for used in self.planes.iter().filter(|used| part != RunPart::BeforeYield || used.is_early) {
            let plane = used.plane.0;
            let memory = bindings.planes.get(plane as usize);
            let available = memory.map_or(0, |memory| memory.len());
            let Some(memory) = memory.filter(|_| available >= used.bytes) else {
                return Err(RunError::Plane { plane, needed: used.bytes, found: available });
            };
            let Some(memory) = memory.host().filter(|memory| memory.is_borrowed()) else { continue };
            if !used.is_aligned_at(memory.as_ptr().addr()) {
                return Err(RunError::Unaligned { plane });
            }
            if used.is_written && memory.is_read_only() {
                return Err(RunError::ReadOnly { plane });
            }
        }
        Ok(())
    }
}
