//! Executables: programs as launches on a device.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ortrain_codegen::{
    Binding, CudaC, HostExecutable, KernelSource, Launch, Lowered, MemoryId, RUN_WORDS, Unsupported, lower,
    split_host_part,
};
use ortrain_program::{
    Bindings, BufferId, Executable, GradientMode, InterruptPoints, Observer, Program, RunError, RunPart,
    Scalars, UnsupportedOnBackend, Workspace, align,
};

use crate::device::Device;
use crate::driver::{Call, Event, Function};
use crate::failure::Failure;
use crate::kernels::KernelError;
use crate::lt::{Operands, Plan};
use crate::products::{Product, take_products};
use crate::queue::{DEFAULT_STREAM, Queue};
use crate::resident::{Resident, RunMemories, Selection};

/// Maximum bytes of a tensor in a kernel.
pub const TENSOR_BYTES: u64 = CudaC::CAPS.binding_bytes;
/// Name of the backend.
pub(crate) const BACKEND: &str = "cuda";

/// Program prepared for a device.
#[derive(Debug)]
pub(crate) struct CudaExecutable {
    parts: Parts,
    device: Arc<Device>,
    functions: Vec<Function>,
    marks: InterruptPoints,
    /// True if a product of the library writes to a plane.
    writes_unguarded: bool,
    /// Memory of the program on the device, created by the first run.
    resident: Mutex<Option<Resident>>,
}

/// Program as launches and products.
#[derive(Debug)]
struct Parts {
    /// Device part of the program.
    program: Arc<Program>,
    lowered: Lowered,
    /// Products of the library for products, with their positions.
    products: Vec<(Product, Plan)>,
    /// Offset of the temporary memory of products in scratch memory.
    workspace: usize,
    host: Option<HostExecutable>,
}

impl Parts {
    /// Splits a program, and lowers its device part. The library computes products of at least `min_library_product`
    /// multiplications.
    fn new(
        program: Arc<Program>,
        device: &Device,
        min_library_product: u64,
    ) -> Result<Parts, UnsupportedOnBackend> {
        let (program, host) = match split_host_part(&program, &CudaC) {
            Some((rest, part)) => {
                (Arc::new(rest), Some(HostExecutable::new(part, ortrain_cpu::host_backend())?))
            }
            None => (program, None),
        };
        let checked = host.as_ref().map_or(&[][..], HostExecutable::checked);
        let mut printed = (*program).clone();
        let plan = |product: &Product| {
            (product.multiplications() >= min_library_product).then(|| device.lt()?.plan(product)).flatten()
        };
        let products = take_products(&mut printed, checked, &plan);
        let mut lowered = lower(&printed, checked, &CudaC::CAPS, &CudaC).map_err(|unsupported| {
            let Unsupported { node, instruction, reason } = unsupported;
            UnsupportedOnBackend { backend: BACKEND, node, instruction, reason }
        })?;
        let is_complete = |launch: &Launch| {
            let at = launch.instruction as usize;
            products.iter().any(|(product, _)| product.position == at && product.is_complete)
        };
        lowered.launches.retain(|launch| !is_complete(launch));
        let workspace = align(lowered.scratch);
        if let Some(bytes) = products.iter().map(|(_, plan)| plan.workspace).max() {
            lowered.scratch = workspace + bytes;
        }
        Ok(Parts { program, lowered, products, workspace, host })
    }

    /// Describes the kernels of each instruction: the product of the library, or printed kernels by name.
    fn describe_kernels(&self) -> Vec<String> {
        let describe = |at: usize| {
            let product = self.products.iter().find(|(product, _)| product.position == at);
            let launches = self.lowered.launches.iter().filter(|launch| launch.instruction as usize == at);
            let names: Vec<&str> = launches.map(|launch| &*launch.kernel.name).collect();
            let parts = product.map(|(product, _)| product.describe()).into_iter();
            let printed = (!names.is_empty()).then(|| format!("printed: {}", names.join(", ")));
            parts.chain(printed).collect::<Vec<_>>().join("; ")
        };
        (0..self.program.instructions.len()).map(describe).collect()
    }
}

/// Describes the kernels of each instruction of a program, without compiling it.
pub(crate) fn describe_kernels(
    program: Arc<Program>,
    device: &Device,
    min_library_product: u64,
) -> Result<Vec<String>, UnsupportedOnBackend> {
    let _entered = device.enter().ok();
    Ok(Parts::new(program, device, min_library_product)?.describe_kernels())
}

impl CudaExecutable {
    pub(crate) fn new(
        program: Arc<Program>,
        device: Arc<Device>,
        min_library_product: u64,
    ) -> Result<CudaExecutable, UnsupportedOnBackend> {
        // A device that failed has no kernels. Runs report the failure.
        let entered = device.enter().ok();
        let parts = Parts::new(program, &device, min_library_product)?;
        let (program, lowered) = (&parts.program, &parts.lowered);
        let refused = |at: usize, reason: String| {
            let launch = lowered.launches.get(at).map_or(0, |launch| launch.instruction as usize);
            let scheduled = program.instructions.get(launch);
            UnsupportedOnBackend {
                backend: BACKEND,
                node: scheduled.map_or_else(String::new, |scheduled| scheduled.node.to_string()),
                instruction: scheduled.map_or("", |scheduled| scheduled.instruction.name()),
                reason,
            }
        };
        let kernels: Vec<&KernelSource> = lowered.launches.iter().map(|launch| &launch.kernel).collect();
        let functions = match entered {
            Some(_) => device.kernels.functions(&kernels),
            None => Ok(Vec::new()),
        };
        let functions = functions.map_err(|KernelError { kernel, reason }| refused(kernel, reason))?;
        let marks = InterruptPoints::from_program(program);
        let writes_unguarded = parts.products.iter().any(|(product, _)| product.writes_plane());
        Ok(CudaExecutable { parts, device, functions, marks, writes_unguarded, resident: Mutex::new(None) })
    }

    /// Returns the positions of instructions with guards that the host checks.
    fn checked(&self) -> &[usize] {
        self.parts.host.as_ref().map_or(&[], HostExecutable::checked)
    }

    /// Returns true if launches check a guard.
    fn has_guards(&self, selection: &Selection) -> bool {
        selection.positions.clone().any(|at| {
            let scheduled = &self.parts.program.instructions[at];
            scheduled.gradient_modes.contains(selection.entry)
                && scheduled.instruction.can_fail()
                && !self.checked().contains(&at)
        })
    }

    /// Returns the launches of a selection.
    fn launches<'e>(&'e self, selection: &'e Selection) -> impl Iterator<Item = (&'e Launch, Function)> {
        let functions = self.functions.iter().copied();
        self.parts.lowered.launches.iter().zip(functions).filter(move |(launch, _)| {
            let at = launch.instruction as usize;
            selection.positions.contains(&at)
                && self.parts.program.instructions[at].gradient_modes.contains(selection.entry)
        })
    }

    /// Enqueues the products and the launches of a selection, in the order of instructions.
    fn enqueue(&self, queue: &Queue, resident: &Resident, selection: &Selection) -> Result<(), Failure> {
        let mut products = self.parts.products.iter().filter(|(product, _)| {
            selection.positions.contains(&product.position)
                && self.parts.program.instructions[product.position].gradient_modes.contains(selection.entry)
        });
        let mut next = products.next();
        for (launch, function) in self.launches(selection) {
            while let Some((product, plan)) = next
                && product.position <= launch.instruction as usize
            {
                self.enqueue_product(queue, resident, product, plan)?;
                next = products.next();
            }
            self.device.counters.launches.fetch_add(1, Ordering::Relaxed);
            // SAFETY: the kernel was printed for these bindings, and accesses only them. Their memory is allocated;
            // freeing waits for the work of the device.
            unsafe { resident.launch(queue, &self.parts.program, launch, function) }?;
        }
        next.into_iter()
            .chain(products)
            .try_for_each(|(product, plan)| self.enqueue_product(queue, resident, product, plan))
    }

    /// Enqueues a product of the library.
    fn enqueue_product(
        &self,
        queue: &Queue,
        resident: &Resident,
        product: &Product,
        plan: &Plan,
    ) -> Result<(), Failure> {
        let Some(lt) = self.device.lt() else { return Ok(()) };
        self.device.counters.launches.fetch_add(1, Ordering::Relaxed);
        let address = |binding: &Binding| resident.binding(queue, &self.parts.program, binding);
        let workspace =
            Binding::Bytes { memory: MemoryId::Scratch, start: self.parts.workspace, len: plan.workspace };
        let operands = Operands {
            a: address(&product.a.memory),
            b: address(&product.b.memory),
            d: address(&product.d.memory),
            bias: product.bias.as_ref().map(address),
            workspace: address(&workspace),
        };
        // SAFETY: the plan was made for the product, and its memory is allocated; freeing waits for the work of the
        // device. The caller has locked the queue.
        Ok(unsafe { lt.enqueue(&queue.stream, plan, &operands) }?)
    }

    /// Enqueues the work of a run that precedes its launches.
    fn enqueue_preparation(&self, queue: &Queue, resident: &Resident) -> Call<()> {
        // SAFETY: the writes are to the arena of the run, which is allocated.
        unsafe { queue.distribute(&resident.key.writes) }
    }

    /// Enqueues all work of a run behind its upload.
    fn enqueue_run(&self, queue: &Queue, resident: &Resident) -> Result<(), Failure> {
        self.enqueue_preparation(queue, resident)?;
        self.enqueue(queue, resident, &resident.key.selection)
    }

    /// Submits a run: launch by launch for the first time with its key, as a recorded graph from then on.
    fn submit(&self, queue: &mut Queue, resident: &mut Resident, scalars: &[u8]) -> Result<(), RunError> {
        let failed = |error: Failure| self.device.fail(error, "a launch");
        if !resident.has_run_before() {
            self.upload(queue, scalars)?;
            self.enqueue_run(queue, resident).map_err(failed)?;
            resident.remember_run();
            return Ok(());
        }
        if resident.graph().is_none() {
            let recorded = queue.stream.capture(|| self.enqueue_run(queue, resident));
            let graph = recorded.map_err(|error| self.device.refusal(error, "the recording of a graph"))?;
            self.device.counters.graphs.fetch_add(1, Ordering::Relaxed);
            resident.set_graph(graph);
        }
        self.upload(queue, scalars)?;
        match resident.graph() {
            // SAFETY: the graph accesses the memory of its key, which is the memory of this run.
            Some(graph) => Ok(unsafe { queue.stream.replay(graph) }.map_err(|error| failed(error.into()))?),
            None => Ok(()),
        }
    }

    /// Enqueues the upload of a run: its scalars and the collected writes.
    fn upload(&self, queue: &mut Queue, scalars: &[u8]) -> Result<(), RunError> {
        self.device.counters.uploaded.fetch_add(scalars.len() as u64, Ordering::Relaxed);
        Ok(queue.upload_block(scalars).map_err(|error| self.device.fail(error, "the upload of a run"))?)
    }

    /// Runs each instruction by itself, and notifies an observer with its times by the clock of the device.
    fn run_timed(
        &self,
        queue: &mut Queue,
        resident: &Resident,
        scalars: &[u8],
        observer: &mut dyn Observer,
    ) -> Result<(), RunError> {
        self.upload(queue, scalars)?;
        let Selection { entry, positions } = resident.key.selection.clone();
        let ran: Vec<usize> = positions
            .filter(|&at| self.parts.program.instructions[at].gradient_modes.contains(entry))
            .collect();
        let start = Instant::now();
        let times = self.time_instructions(queue, resident, &ran);
        let times = times.map_err(|error| self.device.fail(error, "a timed launch"))?;
        let instant =
            |milliseconds: f32| start + Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3);
        for (&at, pair) in ran.iter().zip(times.windows(2)) {
            observer.instruction(&self.parts.program, at, instant(pair[0]), instant(pair[1].max(pair[0])));
        }
        Ok(())
    }

    /// Runs instructions, and returns the milliseconds from the start to the start of each, and to the end of the last.
    fn time_instructions(
        &self,
        queue: &Queue,
        resident: &Resident,
        ran: &[usize],
    ) -> Result<Vec<f32>, Failure> {
        self.enqueue_preparation(queue, resident)?;
        let events = (0..=ran.len()).map(|_| Event::new(true)).collect::<Call<Vec<_>>>()?;
        for (&at, event) in ran.iter().zip(&events) {
            event.record(&queue.stream)?;
            let selection = Selection { positions: at..at + 1, ..resident.key.selection };
            self.enqueue(queue, resident, &selection)?;
        }
        if let Some(last) = events.last() {
            last.record(&queue.stream)?;
        }
        queue.stream.wait()?;
        let times = events.iter().map(|event| events[0].milliseconds_until(event)).collect::<Call<_>>();
        events.into_iter().try_for_each(Event::destroy)?;
        Ok(times?)
    }
}

/// Returns the words of [`Binding::Run`].
fn run_words(scalars: Scalars, number: u32) -> [u32; RUN_WORDS] {
    let Scalars { seed, train_step } = scalars;
    [seed as u32, (seed >> 32) as u32, train_step as u32, (train_step >> 32) as u32, number]
}

impl Executable for CudaExecutable {
    fn program(&self) -> &Program {
        &self.parts.program
    }

    fn scratch_bytes(&self) -> usize {
        self.parts.lowered.scratch
    }

    fn kernels(&self) -> Vec<String> {
        self.parts.describe_kernels()
    }

    fn host_inputs(&self) -> &[BufferId] {
        self.parts.host.as_ref().map_or(&[], HostExecutable::inputs)
    }

    fn run_observed(
        &self,
        bindings: &Bindings<'_>,
        work: &mut Workspace,
        entry: GradientMode,
        part: RunPart,
        scalars: Scalars,
        observer: Option<&mut dyn Observer>,
    ) -> Result<(), RunError> {
        self.device.check()?;
        let positions = self.parts.program.part_positions(part)?;
        self.parts.program.check_bindings(bindings, part)?;
        work.reserve(self.parts.program.work_bytes, self.parts.lowered.scratch)?;
        // A run is submitted as a whole, so interrupts are checked only before.
        let mut watch = work.take_watch();
        let mut ran = positions
            .clone()
            .filter(|&at| self.parts.program.instructions[at].gradient_modes.contains(entry));
        let outcome = ran.try_for_each(|at| self.marks.check_before(at, bindings, &mut watch));
        work.restore_watch(watch);
        outcome?;
        if let Some(host) = self.parts.host.as_ref().filter(|_| part != RunPart::AfterYield) {
            let saved_inputs = work.take_saved_inputs();
            let ran = host.run(&self.parts.program, work, &saved_inputs, scalars);
            work.return_saved_inputs(saved_inputs);
            ran?;
        }
        let mut resident = self.resident.lock().unwrap_or_else(PoisonError::into_inner);
        let resident = match &mut *resident {
            Some(resident) => resident,
            none => none.insert(Resident::new(&self.device, &self.parts.program, &self.parts.lowered)?),
        };
        let memories =
            RunMemories { program: &self.parts.program, lowered: &self.parts.lowered, bindings, work };
        resident.begin(&memories, Selection { entry, positions })?;
        let has_guards = self.has_guards(&resident.key.selection);
        // Products of the library write even after a fault.
        let must_settle = |queue: &Queue| {
            (has_guards && queue.must_settle()) || (self.writes_unguarded && queue.may_have_failed())
        };
        if must_settle(&self.device.lock_queue()) {
            self.device.settle()?;
        }
        let _entered = self.device.enter()?;
        let mut queue = self.device.lock_queue();
        queue.wait_for_consumers();
        resident
            .take_writes(&mut queue, &memories)
            .map_err(|error| self.device.fail(error, "a copy to the device"))?;
        let number = queue.number_run();
        let words = run_words(scalars, number);
        match observer {
            Some(observer) => self.run_timed(&mut queue, resident, bytemuck::cast_slice(&words), observer)?,
            None => self.submit(&mut queue, resident, bytemuck::cast_slice(&words))?,
        }
        if has_guards {
            queue.remember_guards(number, &self.parts.program);
        }
        if memories.has_adopted(&self.device) {
            queue
                .order_before(DEFAULT_STREAM)
                .map_err(|error| self.device.fail(error, "the order of two streams"))?;
        }
        drop(queue);
        Ok(resident.end(&memories)?)
    }
}
