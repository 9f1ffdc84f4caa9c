//! Memory of a program on a device, and its recorded runs.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

use ortrain_codegen::{Binding, CudaC, GROUP_SIZE, Launch, Lowered, MemoryId};
use ortrain_program::{Bindings, DeviceError, GradientMode, Memory, Program, RunError, Workspace};

use crate::device::{Allocation, AllocationFailure, Constant, Device};
use crate::driver::{Address, Call, Function, Graph};
use crate::memory::CudaMemory;
use crate::queue::{Queue, Write};

/// Maximum number of bindings of a kernel.
const MAX_BINDINGS: usize = CudaC::CAPS.bindings as usize;

/// Maximum number of recorded runs of a program.
const MAX_RECORDED_RUNS: usize = 4;

/// Instructions of a run, in a gradient mode.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Selection {
    pub(crate) entry: GradientMode,
    pub(crate) positions: Range<usize>,
}

/// Key of a recorded run, which is replayed for an equal key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RunKey {
    pub(crate) selection: Selection,
    /// Addresses of arena, scratch and planes; zero for an unbound plane.
    memory: Vec<Address>,
    /// Writes to the arena that the run distributes.
    pub(crate) writes: Vec<Write>,
}

/// Run that can be repeated.
#[derive(Debug)]
struct RecordedRun {
    key: RunKey,
    /// Recorded work; `None` after a run launch by launch.
    graph: Option<Graph>,
}

/// Memory of a run: arena, scratch, or a plane of the program.
#[derive(Clone, Copy)]
struct RunMemory<'a> {
    memory: &'a Memory,
    /// Bytes that a run needs.
    bytes: usize,
    /// True if a run changes the memory.
    is_written: bool,
}

/// The memory of a run.
pub(crate) struct RunMemories<'a> {
    pub(crate) program: &'a Program,
    pub(crate) lowered: &'a Lowered,
    pub(crate) bindings: &'a Bindings<'a>,
    pub(crate) work: &'a Workspace,
}

impl RunMemories<'_> {
    /// Returns the memory of a run, by index; `None` for an unbound plane.
    fn iter(&self) -> impl Iterator<Item = Option<RunMemory<'_>>> {
        let arena = RunMemory { memory: self.work.arena(), bytes: self.program.work_bytes, is_written: true };
        let scratch =
            RunMemory { memory: self.work.scratch(), bytes: self.lowered.scratch, is_written: false };
        let planes = self.program.planes.iter().map(|used| {
            let memory = *self.bindings.planes.get(used.plane.0 as usize)?;
            let (bytes, is_written) = (used.bytes, used.is_written);
            (memory.len() >= bytes).then_some(RunMemory { memory, bytes, is_written })
        });
        [Some(arena), Some(scratch)].into_iter().chain(planes)
    }

    /// Returns true if another library owns one of the memories.
    pub(crate) fn has_adopted(&self, device: &Arc<Device>) -> bool {
        let is_adopted = |memory| CudaMemory::on(memory, device).is_some_and(CudaMemory::is_adopted);
        self.iter().flatten().any(|part| is_adopted(part.memory))
    }
}

/// Memory of a program on a device, created once and used by one run at a time.
#[derive(Debug)]
pub(crate) struct Resident {
    device: Arc<Device>,
    constants: Vec<Option<Arc<Constant>>>,
    tables: HashMap<Arc<[u32]>, Allocation>,
    empty: Allocation,
    /// Device copies of host memory for a run, by the index of the memory.
    copies: HashMap<usize, Allocation>,
    /// Key of the current run.
    pub(crate) key: RunKey,
    /// Bytes at each address of the current run. They cover all accesses of the program, or are zero.
    sizes: Vec<usize>,
    /// Recorded runs, the most recent one last.
    runs: Vec<RecordedRun>,
}

impl Resident {
    pub(crate) fn new(
        device: &Arc<Device>,
        program: &Program,
        lowered: &Lowered,
    ) -> Result<Resident, RunError> {
        let failed =
            |bytes: usize| move |failure: AllocationFailure| RunError::from(failure.error(device, bytes));
        let constant = |constant: &ortrain_graph::Tensor| {
            let bytes = constant.data().len();
            (bytes > 0).then(|| device.constant(constant).map_err(failed(bytes))).transpose()
        };
        let constants = program.constants.iter().map(constant).collect::<Result<_, _>>()?;
        let mut tables: HashMap<Arc<[u32]>, Allocation> = HashMap::new();
        for binding in lowered.launches.iter().flat_map(|launch| &launch.bindings) {
            if let Binding::Table(words) = binding
                && !tables.contains_key(words)
            {
                let bytes = bytemuck::cast_slice(words);
                tables.insert(words.clone(), device.allocate_with(bytes).map_err(failed(bytes.len()))?);
            }
        }
        Ok(Resident {
            device: device.clone(),
            constants,
            tables,
            empty: device.allocate_with(&[0; 256]).map_err(failed(256))?,
            copies: HashMap::new(),
            key: RunKey {
                selection: Selection { entry: GradientMode::Accumulate, positions: 0..0 },
                memory: Vec::new(),
                writes: Vec::new(),
            },
            sizes: Vec::new(),
            runs: Vec::new(),
        })
    }

    /// Sets the key of the current run, and copies host memory to the device.
    pub(crate) fn begin(&mut self, memories: &RunMemories<'_>, selection: Selection) -> Result<(), RunError> {
        self.key.selection = selection;
        self.key.memory.clear();
        self.sizes.clear();
        for (index, part) in memories.iter().enumerate() {
            let (address, size) = match part {
                Some(part) => self.address(index, part)?,
                // Planes that a part of a program does not use may be unbound.
                None => (0, 0),
            };
            self.key.memory.push(address);
            self.sizes.push(size);
        }
        Ok(())
    }

    /// Returns address and size of a memory on the device. Host memory is copied to the device first.
    fn address(&mut self, index: usize, part: RunMemory<'_>) -> Result<(Address, usize), RunError> {
        if part.bytes == 0 {
            return Ok((0, 0));
        }
        if let Some(memory) = CudaMemory::on(part.memory, &self.device) {
            let allocation = memory.allocation();
            return Ok((allocation.address, allocation.bytes));
        }
        if !self.copies.contains_key(&index) {
            let allocated = self.device.allocate(part.bytes);
            let failed = |failure: AllocationFailure| failure.error(&self.device, part.bytes);
            self.copies.insert(index, allocated.map_err(failed)?);
        }
        let Allocation { address, bytes, .. } = self.copies[&index];
        self.device.write(address, &part.memory.to_vec(0, part.bytes)?)?;
        Ok((address, bytes))
    }

    /// Takes the collected writes to the arena along with the run. Other writes are enqueued.
    pub(crate) fn take_writes(&mut self, queue: &mut Queue, memories: &RunMemories<'_>) -> Call<()> {
        let arena = self.key.memory[0];
        queue.flush_outside(arena..arena + memories.program.work_bytes as u64)?;
        self.key.writes.clear();
        self.key.writes.extend_from_slice(queue.writes());
        Ok(())
    }

    /// Returns true if a run with the key of the current run was remembered. That run becomes the most recent one.
    pub(crate) fn has_run_before(&mut self) -> bool {
        let Some(at) = self.runs.iter().position(|run| run.key == self.key) else { return false };
        self.runs[at..].rotate_left(1);
        true
    }

    /// Remembers the current run, in place of the run that was repeated least recently.
    pub(crate) fn remember_run(&mut self) {
        if self.runs.len() == MAX_RECORDED_RUNS {
            self.forget_run(0);
        }
        self.runs.push(RecordedRun { key: self.key.clone(), graph: None });
    }

    fn forget_run(&mut self, at: usize) {
        if let Some(graph) = self.runs.remove(at).graph
            && let Ok(_entered) = self.device.enter()
            && let Err(error) = graph.destroy()
        {
            self.device.fail(error, "cuGraphExecDestroy");
        }
    }

    /// Returns the graph of the most recent run.
    pub(crate) fn graph(&self) -> Option<&Graph> {
        self.runs.last()?.graph.as_ref()
    }

    /// Sets the graph of the most recent run.
    pub(crate) fn set_graph(&mut self, graph: Graph) {
        if let Some(run) = self.runs.last_mut() {
            run.graph = Some(graph);
        }
    }

    /// Enqueues a launch.
    ///
    /// # Safety
    /// The kernel is the one of the launch, and accesses only its bindings.
    pub(crate) unsafe fn launch(
        &self,
        queue: &Queue,
        program: &Program,
        launch: &Launch,
        function: Function,
    ) -> Call<()> {
        let mut addresses = [0; MAX_BINDINGS];
        for (address, binding) in addresses.iter_mut().zip(&launch.bindings) {
            *address = self.binding(queue, program, binding);
        }
        let addresses = &addresses[..launch.bindings.len()];
        let mut parameters: [*mut c_void; MAX_BINDINGS] = [std::ptr::null_mut(); MAX_BINDINGS];
        // SAFETY: the contract of this function; every binding has an address.
        unsafe { queue.stream.launch(function, launch.groups, GROUP_SIZE, addresses, &mut parameters) }
    }

    /// Returns the address of a binding.
    pub(crate) fn binding(&self, queue: &Queue, program: &Program, binding: &Binding) -> Address {
        match binding {
            &Binding::Bytes { memory, start, len } => {
                let (address, bytes) = self.memory(program, memory);
                // Memory that a part of a run does not use may be shorter.
                if start + len <= bytes { address + start as u64 } else { self.empty.address }
            }
            Binding::Run => queue.scalars(),
            Binding::Fault => queue.fault(),
            Binding::Table(words) => self.tables[words].address,
        }
    }

    /// Returns address and size of a memory.
    fn memory(&self, program: &Program, memory: MemoryId) -> (Address, usize) {
        let known = |at: usize| (self.key.memory[at], self.sizes[at]);
        match memory {
            MemoryId::Work => known(0),
            MemoryId::Scratch => known(1),
            // A constant without elements can be bound, because loads by computed index return zeros out of range.
            MemoryId::Constant(number) => self.constants[number]
                .as_ref()
                .map_or((0, 0), |constant| (constant.allocation.address, constant.allocation.bytes)),
            MemoryId::Plane(id) => {
                let at = program.planes.iter().position(|used| used.plane == id);
                at.map_or((0, 0), |at| known(2 + at))
            }
        }
    }

    /// Copies the changes of a run back to host memory.
    pub(crate) fn end(&self, memories: &RunMemories<'_>) -> Result<(), DeviceError> {
        for (index, part) in memories.iter().enumerate() {
            let Some(RunMemory { memory, bytes, is_written: true }) = part else { continue };
            if memory.host().is_some() && bytes > 0 {
                let mut content = vec![0; bytes];
                self.device.read(self.copies[&index].address, &mut content)?;
                memory.write(0, &content)?;
            }
        }
        Ok(())
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        while !self.runs.is_empty() {
            self.forget_run(0);
        }
    }
}
