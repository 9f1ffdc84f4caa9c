//! Schedules (programs, host functions and control flow, in order) and their executor.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use ortrain_expr::DType;
use ortrain_graph::Tensor;

use crate::input_view::InputView;
use crate::interrupt::interruptible;
use crate::output_view::{OutputSink, OutputView, ResultType};
use crate::repeat::{self, RepeatedBody};
use crate::run_context::RunContext;
use crate::{
    Backend, Bindings, Copied, DeviceError, Executable, MemoryNeed, PlaneId, Program, RunError, RunPart,
    UnsupportedOnBackend, Workspace, Yield,
};

/// Work of a segment besides its instructions: copies, shapes, a call.
const SEGMENT_TICKS: u32 = 64;

/// Index of a value that passes between segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);

/// Location of a value in a plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneLocation {
    /// Plane.
    pub plane: PlaneId,
    /// Offset of the first byte.
    pub offset: usize,
}

/// Properties of a slot that are known before a run.
#[derive(Clone, Debug)]
pub struct SlotSpec {
    /// Name of the value.
    pub label: Arc<str>,
    /// Element type and shape, if known before the run.
    pub ty: Option<(DType, Vec<usize>)>,
    /// Location of a value that belongs to the state. Programs access the value there directly.
    pub plane: Option<PlaneLocation>,
}

/// Function that runs on the host, for an operator without an instruction: the shapes of its results depend on values.
pub trait HostFunction: Send + Sync + fmt::Debug {
    /// Computes the results.
    ///
    /// # Errors
    /// A sentence about the fault of the inputs.
    fn call(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>, String>;
}

/// Factory of schedules that depend on the shapes of their inputs, and on the values of inputs that determine a shape.
pub trait Specialise: Send + Sync + fmt::Debug {
    /// Returns the schedule for these inputs, from a cache if possible. The schedule is usually a single program. With
    /// known sizes, an operator can also become a host function.
    ///
    /// # Errors
    /// A sentence about the reason.
    fn specialise(&self, inputs: &[Tensor]) -> Result<Arc<Specialised>, String>;

    /// Describes the source of the schedules, for dumps.
    fn describe(&self) -> String;
}

/// Schedule for particular shapes, with its executor, which the first run prepares and caches.
#[derive(Debug)]
pub struct Specialised {
    schedule: Arc<Schedule>,
    cached: OnceLock<Arc<ScheduleExecutor>>,
}

impl Specialised {
    /// Creates the schedule without an executor.
    #[must_use]
    pub fn new(schedule: Schedule) -> Specialised {
        Specialised { schedule: Arc::new(schedule), cached: OnceLock::new() }
    }

    /// Returns the schedule.
    #[must_use]
    pub fn schedule(&self) -> &Arc<Schedule> {
        &self.schedule
    }

    /// Returns the cached executor, if the schedule was prepared.
    #[must_use]
    pub fn cached_executor(&self) -> Option<&Arc<ScheduleExecutor>> {
        self.cached.get()
    }

    /// Returns the cached executor, or the one that `make` builds. Only executors of the first backend are cached.
    ///
    /// # Errors
    /// The errors of `make`.
    pub fn executor<E>(
        &self,
        backend: &Arc<dyn Backend>,
        make: impl FnOnce(Arc<Schedule>) -> Result<ScheduleExecutor, E>,
    ) -> Result<Arc<ScheduleExecutor>, E> {
        if let Some(runner) = self.cached_executor()
            && Arc::ptr_eq(&runner.backend, backend)
        {
            return Ok(runner.clone());
        }
        let new_executor = Arc::new(make(self.schedule.clone())?);
        // If another thread was faster, its executor stays cached.
        let _ = self.cached.set(new_executor.clone());
        Ok(new_executor)
    }
}

impl std::ops::Deref for Specialised {
    type Target = Schedule;

    fn deref(&self) -> &Schedule {
        &self.schedule
    }
}

/// Segment with its input and output values.
#[derive(Clone, Debug)]
pub struct SegmentNode {
    /// Input values, except values in planes.
    pub inputs: Vec<SlotId>,
    /// Output values.
    pub outputs: Vec<SlotId>,
    /// Segment.
    pub segment: Segment,
}

/// Source of the schedule of a branch.
pub trait BranchSource: Send + Sync + fmt::Debug {
    /// Builds the schedule.
    ///
    /// # Errors
    /// A sentence about the reason.
    fn schedule(&self) -> Result<Schedule, String>;
}

/// Lazily built schedule of a branch. An unused branch may contradict the current shapes.
#[derive(Debug)]
pub struct Branch {
    source: Box<dyn BranchSource>,
    built: OnceLock<Result<Arc<Schedule>, String>>,
}

impl Branch {
    /// Creates a branch without a built schedule.
    #[must_use]
    pub fn new(source: Box<dyn BranchSource>) -> Branch {
        Branch { source, built: OnceLock::new() }
    }

    /// Returns the schedule, and builds it on the first call.
    ///
    /// # Errors
    /// The message of the branch's source.
    pub fn schedule(&self) -> Result<&Arc<Schedule>, String> {
        self.built.get_or_init(|| self.source.schedule().map(Arc::new)).as_ref().map_err(Clone::clone)
    }

    /// Returns the schedule, if it is built.
    #[must_use]
    pub fn built_schedule(&self) -> Option<&Arc<Schedule>> {
        self.built.get().and_then(|executor| executor.as_ref().ok())
    }
}

/// Branches of an `If`. Their inputs are the inputs of the segment after the condition.
#[derive(Clone, Debug)]
pub struct Branches {
    /// Branch for a true condition.
    pub then_branch: Arc<Branch>,
    /// Branch for a false condition.
    pub else_branch: Arc<Branch>,
}

impl Branches {
    /// Returns both branches, with the names of their attributes.
    #[must_use]
    pub fn named_branches(&self) -> [(&'static str, &Branch); 2] {
        [("then_branch", &self.then_branch), ("else_branch", &self.else_branch)]
    }
}

/// Repeated schedule: the body of a loop or scan.
pub type Repeat = repeat::Repeat<Schedule>;

/// Segment of a schedule.
#[derive(Clone, Debug)]
pub enum Segment {
    /// Program with known shapes, and the element types and shapes of its results.
    Program(Arc<Program>, Vec<ResultType>),
    /// Program with shapes that depend on computed values. It is specialised when the run reaches it.
    Deferred(Arc<dyn Specialise>),
    /// Host function, with its node.
    Host(Arc<dyn HostFunction>, Arc<str>),
    /// One of two schedules, chosen by the first input (a `bool`); with its node.
    If(Branches, Arc<str>),
    /// Repeated schedule, with its node.
    Repeat(Box<Repeat>, Arc<str>),
    /// Yield to the caller, who receives the inputs and supplies the outputs; with its node.
    Yield(Arc<str>),
}

/// Values that a schedule exchanges with its caller: in a [`Segment::Yield`], or in the yield instruction of its only
/// program.
pub type YieldSlots = Yield<SlotId>;

/// Segments in order, and the values that pass between them.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    /// Values.
    pub slots: Vec<SlotSpec>,
    /// Segments.
    pub segments: Vec<SegmentNode>,
    /// Input values, in order.
    pub inputs: Vec<SlotId>,
    /// Output values, in order.
    pub outputs: Vec<SlotId>,
    /// Values that are exchanged with the caller in the middle of a run, if the schedule has a yield.
    pub yield_slots: Option<YieldSlots>,
}

impl Schedule {
    /// Returns the program, if the schedule consists of a single program.
    #[must_use]
    pub fn single_program(&self) -> Option<&Arc<Program>> {
        match self.segments.as_slice() {
            [SegmentNode { segment: Segment::Program(program, _), inputs, outputs }]
                if *inputs == self.inputs && *outputs == self.outputs =>
            {
                Some(program)
            }
            _ => None,
        }
    }

    /// Returns the largest arena size of the known programs, in bytes.
    #[must_use]
    pub fn work_bytes(&self) -> usize {
        self.programs().iter().map(|program| program.work_bytes).max().unwrap_or(0)
    }

    /// Returns the known programs, including programs of loop bodies and of built branches.
    #[must_use]
    pub fn programs(&self) -> Vec<&Arc<Program>> {
        let mut programs = Vec::new();
        for node in &self.segments {
            match &node.segment {
                Segment::Program(program, _) => programs.push(program),
                Segment::If(branches, _) => {
                    let executors = branches
                        .named_branches()
                        .into_iter()
                        .filter_map(|(_, branch)| branch.built_schedule());
                    programs.extend(executors.flat_map(|schedule| schedule.programs()));
                }
                Segment::Repeat(repeat, _) => programs.extend(repeat.body.programs()),
                Segment::Deferred(_) | Segment::Host(..) | Segment::Yield(_) => {}
            }
        }
        programs
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = |ids: &[SlotId]| {
            let names: Vec<String> =
                ids.iter().map(|id| format!("{:?}", self.slots[id.0 as usize].label)).collect();
            names.join(", ")
        };
        let (count, bytes) = (self.segments.len(), self.work_bytes());
        writeln!(f, "schedule: {count} segments, peak work {bytes} bytes")?;
        for (k, SegmentNode { inputs, outputs, segment }) in self.segments.iter().enumerate() {
            let (kind, label, inside) = match segment {
                Segment::Program(program, _) => ("program".into(), None, program.to_string()),
                Segment::Deferred(late) => {
                    ("program, specialised when it is reached".into(), None, late.describe())
                }
                Segment::Host(_, label) => ("host".into(), Some(label), String::new()),
                Segment::Yield(label) => ("hand-over".into(), Some(label), String::new()),
                Segment::If(branches, label) => ("if".into(), Some(label), branches.to_string()),
                Segment::Repeat(repeat, label) => (repeat.to_string(), Some(label), repeat.body.to_string()),
            };
            let label = label.map_or(String::new(), |label| format!("  # {label}"));
            let (from, to) = (names(inputs), names(outputs));
            writeln!(f, "segment {k}: {kind} ({from}) -> ({to}){label}")?;
            write_indented(f, &inside)?;
        }
        Ok(())
    }
}

impl fmt::Display for Branches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, branch) in [("then", &self.then_branch), ("else", &self.else_branch)] {
            writeln!(f, "{name}")?;
            match branch.schedule() {
                Ok(schedule) => write_indented(f, &schedule.to_string())?,
                Err(message) => writeln!(f, "  cannot run: {message}")?,
            }
        }
        Ok(())
    }
}

/// Writes the indented lines of a nested description.
fn write_indented(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    text.lines().try_for_each(|line| writeln!(f, "  {line}"))
}

/// State of a run between its forward and backward part: see [`ScheduleExecutor::run_before_yield`].
#[derive(Debug, Default)]
pub struct ForwardState {
    /// Values between segments. A single program stores its values in the workspace.
    values: Vec<Option<Tensor>>,
    /// Bytes of the values.
    intermediate_bytes: usize,
}

impl ForwardState {
    /// Returns the bytes of the values outside of the workspace.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.intermediate_bytes
    }
}

/// Copies the inputs to tensors.
fn to_tensors(inputs: &[InputView<'_>]) -> Result<Vec<Tensor>, DeviceError> {
    let tensor = |value: &InputView<'_>| {
        let data = value.to_host()?.into_owned().into();
        let tensor = Tensor::new(value.dtype, value.dims.to_vec(), data);
        Ok(tensor.expect("the caller's bytes fit its shape"))
    };
    inputs.iter().map(tensor).collect()
}

/// Returns the total bytes of the tensors.
fn total_bytes(tensors: &[Tensor]) -> usize {
    tensors.iter().map(|tensor| tensor.data().len()).sum()
}

/// Delivers tensors to the caller.
fn deliver_all(results: &[Tensor], deliver: &mut OutputSink<'_>) -> Result<(), RunError> {
    for (k, tensor) in results.iter().enumerate() {
        deliver(k, OutputView::from(tensor))?;
    }
    Ok(())
}

/// Returns a variant of a program that exceeds the memory limit of a workspace. Recomputation lowers its arena to the
/// limit, or as close to the limit as possible. Returns `None` if the program is within the limit.
fn recompute_within_limit(work: &Workspace, program: &Program, scratch: usize) -> Option<Program> {
    let Err(RunError::OverLimit(over)) = work.check(program, scratch, 0) else { return None };
    let excess = over.need.total() - over.limit;
    Some(program.within(program.work_bytes.saturating_sub(excess)))
}

/// Schedule prepared for a backend.
#[derive(Debug)]
pub struct ScheduleExecutor {
    schedule: Arc<Schedule>,
    backend: Arc<dyn Backend>,
    prepared: Vec<PreparedSegment>,
}

#[derive(Debug)]
enum PreparedSegment {
    Program(Box<dyn Executable>),
    If([PreparedBranch; 2]),
    Repeat(Box<ScheduleExecutor>),
    /// Segment without preparation.
    Nothing,
}

/// Lazily prepared branch.
type PreparedBranch = OnceLock<Result<Box<ScheduleExecutor>, String>>;

impl RepeatedBody for ScheduleExecutor {
    fn single_executable(&self) -> Option<&dyn Executable> {
        match (self.prepared.as_slice(), self.schedule.single_program()) {
            ([PreparedSegment::Program(executable)], Some(_)) => Some(executable.as_ref()),
            _ => None,
        }
    }

    fn run_tensors(
        &self,
        turn: &mut RunContext<'_, '_>,
        inputs: Vec<Tensor>,
    ) -> Result<Vec<Tensor>, RunError> {
        let outside = turn.intermediate_bytes;
        turn.intermediate_bytes += total_bytes(&inputs);
        let results = self.run_counted(turn, inputs)?;
        turn.intermediate_bytes = outside;
        Ok(results)
    }

    fn input(&self, k: usize) -> (&str, Option<&(DType, Vec<usize>)>) {
        let spec = &self.schedule.slots[self.schedule.inputs[k].0 as usize];
        (&spec.label, spec.ty.as_ref())
    }

    fn output_type(&self, k: usize) -> Option<&(DType, Vec<usize>)> {
        self.schedule.slots[self.schedule.outputs[k].0 as usize].ty.as_ref()
    }
}

impl ScheduleExecutor {
    /// Prepares all programs with known shapes.
    ///
    /// # Errors
    /// When the backend does not support an instruction.
    pub fn new(
        backend: Arc<dyn Backend>,
        schedule: Arc<Schedule>,
    ) -> Result<ScheduleExecutor, UnsupportedOnBackend> {
        let prepare = |node: &SegmentNode| {
            Ok(match &node.segment {
                Segment::Program(program, _) => PreparedSegment::Program(backend.compile(program.clone())?),
                Segment::Deferred(_) | Segment::Host(..) | Segment::Yield(_) => PreparedSegment::Nothing,
                Segment::If(..) => PreparedSegment::If(Default::default()),
                Segment::Repeat(repeat, _) => PreparedSegment::Repeat(Box::new(ScheduleExecutor::new(
                    backend.clone(),
                    repeat.body.clone(),
                )?)),
            })
        };
        let prepared = schedule.segments.iter().map(prepare).collect::<Result<_, _>>()?;
        Ok(ScheduleExecutor { schedule, backend, prepared })
    }

    /// Prepares a schedule within the limit of a workspace, if possible. A program above the limit recomputes values
    /// instead of storing them ([`Program::within`]). Results are bitwise equal.
    ///
    /// # Errors
    /// As [`ScheduleExecutor::new`].
    pub fn within(
        backend: Arc<dyn Backend>,
        schedule: Arc<Schedule>,
        work: &Workspace,
    ) -> Result<ScheduleExecutor, UnsupportedOnBackend> {
        let mut runner = ScheduleExecutor::new(backend, schedule)?;
        for (k, prepared) in runner.prepared.iter_mut().enumerate() {
            if let PreparedSegment::Program(executable) = prepared
                && let Some(less) =
                    recompute_within_limit(work, executable.program(), executable.scratch_bytes())
                && let Segment::Program(program, _) =
                    &mut Arc::make_mut(&mut runner.schedule).segments[k].segment
            {
                *program = Arc::new(less);
                *prepared = PreparedSegment::Program(runner.backend.compile(program.clone())?);
            }
        }
        Ok(runner)
    }

    /// Checks that the known programs of a schedule fit the limit of a workspace, as they are or after
    /// [`ScheduleExecutor::within`]. Nothing is compiled: the sizes of the values determine the kernels.
    ///
    /// # Errors
    /// [`RunError::OverLimit`].
    pub fn check(schedule: &Schedule, work: &Workspace) -> Result<(), RunError> {
        let programs = schedule.programs().into_iter();
        programs
            .filter_map(|program| recompute_within_limit(work, program, 0))
            .try_for_each(|less| work.check(&less, 0, 0))
    }

    /// Returns the executor of a branch, and prepares it on the first call.
    fn branch_executor<'r>(
        &self,
        prepared: &'r PreparedBranch,
        branch: &Branch,
    ) -> Result<&'r ScheduleExecutor, String> {
        let prepare = || {
            let runner = ScheduleExecutor::new(self.backend.clone(), branch.schedule()?.clone());
            runner.map(Box::new).map_err(|error| error.to_string())
        };
        prepared.get_or_init(prepare).as_deref().map_err(Clone::clone)
    }

    /// Returns the schedule.
    #[must_use]
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Returns the maximum memory requirement of its programs. Programs with deferred shapes are not included. All
    /// valid branches are prepared and included; invalid branches need no memory.
    #[must_use]
    pub fn memory_need(&self, work: &Workspace) -> MemoryNeed {
        let of = |(node, prepared): (&SegmentNode, &PreparedSegment)| match (&node.segment, prepared) {
            (_, PreparedSegment::Program(executable)) => {
                work.memory_need(executable.program(), executable.scratch_bytes(), 0)
            }
            (Segment::If(branches, _), PreparedSegment::If(prepared)) => {
                let both = branches.named_branches().into_iter().zip(prepared);
                let runners = both
                    .filter_map(|((_, branch), branch_slot)| self.branch_executor(branch_slot, branch).ok());
                runners
                    .map(|runner| runner.memory_need(work))
                    .max_by_key(MemoryNeed::total)
                    .unwrap_or_default()
            }
            (_, PreparedSegment::Repeat(body)) => body.memory_need(work),
            _ => MemoryNeed::default(),
        };
        let both = self.schedule.segments.iter().zip(&self.prepared);
        both.map(of).max_by_key(MemoryNeed::total).unwrap_or_default()
    }

    /// Runs a gradient mode on the inputs and passes every result to `deliver`. A schedule that is a single program
    /// allocates nothing once the workspace has grown to its size.
    ///
    /// # Errors
    /// [`RunError`]. If the schedule is a single program, state is then unchanged.
    ///
    /// # Panics
    /// When the number or the sizes of the inputs differ from the schedule.
    pub fn run(
        &self,
        turn: RunContext<'_, '_>,
        inputs: &[InputView<'_>],
        deliver: &mut OutputSink<'_>,
    ) -> Result<(), RunError> {
        self.run_part(turn, RunPart::Full, ForwardState::default(), inputs, deliver).map(drop)
    }

    /// Runs a gradient mode up to the yield, and passes the yielded values to `deliver`. The rest of the run,
    /// [`ScheduleExecutor::run_after_yield`], needs the unchanged workspace.
    ///
    /// # Errors
    /// [`RunError`]; [`RunError::NoYield`] when the schedule has no yield.
    ///
    /// # Panics
    /// As [`ScheduleExecutor::run`].
    pub fn run_before_yield(
        &self,
        turn: RunContext<'_, '_>,
        inputs: &[InputView<'_>],
        deliver: &mut OutputSink<'_>,
    ) -> Result<ForwardState, RunError> {
        self.run_part(turn, RunPart::BeforeYield, ForwardState::default(), inputs, deliver)
    }

    /// Runs the rest of a run that [`ScheduleExecutor::run_before_yield`] began, in the same workspace. `received` are the
    /// values that the caller supplies. Every result is passed to `deliver`. Bindings, gradient mode and scalars must
    /// equal the first part's.
    ///
    /// # Errors
    /// As [`ScheduleExecutor::run`].
    ///
    /// # Panics
    /// When the number or the sizes of the values differ from the schedule.
    pub fn run_after_yield(
        &self,
        suspended: ForwardState,
        turn: RunContext<'_, '_>,
        received: &[InputView<'_>],
        deliver: &mut OutputSink<'_>,
    ) -> Result<(), RunError> {
        self.run_part(turn, RunPart::AfterYield, suspended, received, deliver).map(drop)
    }

    /// Runs a part on its inputs and the state of the previous part. Returns the state for the next part.
    fn run_part(
        &self,
        mut turn: RunContext<'_, '_>,
        part: RunPart,
        ForwardState { mut values, intermediate_bytes: between }: ForwardState,
        caller_inputs: &[InputView<'_>],
        deliver: &mut OutputSink<'_>,
    ) -> Result<ForwardState, RunError> {
        let Schedule { inputs, outputs, yield_slots: handed, .. } = &*self.schedule;
        let [takes, gives] = part.inputs_and_outputs([inputs, outputs], handed.as_ref())?;
        turn.run_with_rollback(|turn| {
            if let Some(executable) = self.single_executable() {
                self.run_single(turn, executable, part, caller_inputs, gives, deliver)?;
                return Ok(ForwardState::default());
            }
            let hands_over = |node: &SegmentNode| matches!(node.segment, Segment::Yield(_));
            let yielded = self.schedule.segments.iter().position(hands_over).ok_or(RunError::NoYield);
            let positions = match part {
                RunPart::Full => 0..self.prepared.len(),
                RunPart::BeforeYield => 0..yielded?,
                RunPart::AfterYield => yielded? + 1..self.prepared.len(),
            };
            let received_tensors = to_tensors(caller_inputs)?;
            turn.intermediate_bytes = between + total_bytes(&received_tensors);
            self.store_values(&mut values, takes, received_tensors);
            self.run_segments(turn, &mut values, positions)?;
            deliver_all(&self.fetch_values(turn.bindings, &values, gives)?, deliver)?;
            Ok(ForwardState { values, intermediate_bytes: turn.intermediate_bytes })
        })
    }

    /// Returns the element type and the shape of the yielded value with index `k`.
    ///
    /// # Panics
    /// When the schedule has no yield, or fewer yielded values.
    #[must_use]
    pub fn yielded_type<'s>(&'s self, suspended: &'s ForwardState, k: usize) -> (DType, &'s [usize]) {
        let slot =
            self.schedule.yield_slots.as_ref().expect("the caller has taken over").outputs[k].0 as usize;
        match (suspended.values.get(slot), &self.schedule.slots[slot].ty) {
            (Some(Some(tensor)), _) => (tensor.dtype(), tensor.dims()),
            (_, Some((dtype, dims))) => (*dtype, dims),
            (_, None) => unreachable!("the input has a shape"),
        }
    }

    /// Runs a part of the only program, and delivers its results, which belong to `slots`.
    fn run_single(
        &self,
        turn: &mut RunContext<'_, '_>,
        executable: &dyn Executable,
        part: RunPart,
        run_inputs: &[InputView<'_>],
        slots: &[SlotId],
        deliver: &mut OutputSink<'_>,
    ) -> Result<(), RunError> {
        let program = executable.program();
        let [inputs, outputs] = program.inputs_and_outputs(part)?;
        for (&id, value) in inputs.iter().zip(run_inputs) {
            let buffer = program.buffer(id);
            assert_eq!(buffer.bytes(), value.byte_count(), "bytes of {:?}", buffer.label);
        }
        turn.run(executable, part, run_inputs.iter().map(|input| input.bytes))?;
        let start = turn.start_timer();
        let mut bytes = 0;
        for (k, (&id, slot)) in outputs.iter().zip(slots).enumerate() {
            let Some((dtype, dims)) = &self.schedule.slots[slot.0 as usize].ty else { continue };
            bytes += program.buffer(id).bytes();
            deliver(k, OutputView::new(*dtype, dims, turn.result(program, id)))?;
        }
        turn.record_copy(Copied::Outputs, bytes, start);
        Ok(())
    }

    /// Runs as [`Repeated::run_tensors`], with input tensors that are already counted as bytes between the segments.
    fn run_counted(
        &self,
        turn: &mut RunContext<'_, '_>,
        inputs: Vec<Tensor>,
    ) -> Result<Vec<Tensor>, RunError> {
        let outside = turn.intermediate_bytes;
        let mut values = Vec::new();
        self.store_values(&mut values, &self.schedule.inputs, inputs);
        self.run_segments(turn, &mut values, 0..self.prepared.len())?;
        turn.intermediate_bytes = outside;
        self.fetch_values(turn.bindings, &values, &self.schedule.outputs)
    }

    /// Stores tensors among the values between segments. `values` may be empty.
    fn store_values(&self, values: &mut Vec<Option<Tensor>>, slots: &[SlotId], tensors: Vec<Tensor>) {
        values.resize(self.schedule.slots.len(), None);
        for (&slot, tensor) in slots.iter().zip(tensors) {
            values[slot.0 as usize] = Some(tensor);
        }
    }

    /// Returns some of the values between segments; values in planes are copied from there.
    fn fetch_values(
        &self,
        bindings: &Bindings<'_>,
        values: &[Option<Tensor>],
        slots: &[SlotId],
    ) -> Result<Vec<Tensor>, RunError> {
        let fetch = |&slot: &SlotId| -> Result<Tensor, RunError> {
            if let Some(tensor) = &values[slot.0 as usize] {
                return Ok(tensor.clone());
            }
            let spec = &self.schedule.slots[slot.0 as usize];
            let (Some((dtype, dims)), Some(plane)) = (&spec.ty, spec.plane) else {
                unreachable!("{:?} is made before it is used", spec.label)
            };
            let bytes = dims.iter().product::<usize>() * dtype.size();
            let data = bindings.planes[plane.plane.0 as usize].to_vec(plane.offset, bytes)?;
            Ok(Tensor::new(*dtype, dims.clone(), data.into()).expect("planes hold whole tensors"))
        };
        slots.iter().map(fetch).collect()
    }

    /// Returns the executor of a deferred segment. A schedule above the memory limit is rejected before it is prepared.
    fn deferred_executor(
        &self,
        late: &Specialised,
        turn: &RunContext<'_, '_>,
    ) -> Result<Arc<ScheduleExecutor>, RunError> {
        late.executor(&self.backend, |schedule| {
            for program in schedule.programs() {
                turn.work.check(program, 0, turn.intermediate_bytes)?;
            }
            ScheduleExecutor::new(self.backend.clone(), schedule)
                .map_err(|error| RunError::Specialise(error.to_string()))
        })
    }

    /// Runs a range of segments.
    fn run_segments(
        &self,
        turn: &mut RunContext<'_, '_>,
        values: &mut [Option<Tensor>],
        positions: Range<usize>,
    ) -> Result<(), RunError> {
        for (node, prepared) in
            self.schedule.segments[positions.clone()].iter().zip(&self.prepared[positions])
        {
            turn.work.watch.check(SEGMENT_TICKS)?;
            let inputs = self.fetch_values(turn.bindings, values, &node.inputs)?;
            let results = match (&node.segment, prepared) {
                (Segment::Program(_, types), PreparedSegment::Program(executable)) => {
                    turn.run_on_tensors(executable.as_ref(), types, &inputs)?
                }
                (Segment::Deferred(late), _) => {
                    let specialised = late.specialise(&inputs).map_err(RunError::Specialise)?;
                    self.deferred_executor(&specialised, turn)?.run_counted(turn, inputs)?
                }
                (Segment::Host(function, label), _) => {
                    let start = turn.start_timer();
                    let call = || function.call(&inputs).map_err(RunError::host_error(label));
                    let results = interruptible(turn.work.watch.question(), call)?;
                    if let (Some(observer), Some(start)) = (&mut turn.observer, start) {
                        observer.host(label, start, Instant::now());
                    }
                    results
                }
                (Segment::If(branches, label), PreparedSegment::If(prepared)) => {
                    let (condition, captured) = inputs.split_first().expect("an If has a condition");
                    let holds = repeat::read_condition(condition).map_err(RunError::host_error(label))?;
                    let branch_index = usize::from(!holds);
                    let (name, branch) = branches.named_branches()[branch_index];
                    let refused =
                        |message| RunError::Branch { node: label.to_string(), branch: name, message };
                    let runner = self.branch_executor(&prepared[branch_index], branch).map_err(refused)?;
                    let results = runner.run_tensors(turn, captured.to_vec())?;
                    self.check_results(node, name, &results).map_err(RunError::host_error(label))?;
                    results
                }
                (Segment::Repeat(repeat, label), PreparedSegment::Repeat(body)) => {
                    repeat.run(label, &**body, turn, &inputs)?
                }
                (Segment::Yield(label), _) => {
                    return Err(RunError::Yield { node: label.to_string() });
                }
                _ => unreachable!("every segment was prepared for its kind"),
            };
            for (&slot, tensor) in node.outputs.iter().zip(results) {
                turn.intermediate_bytes += tensor.data().len();
                values[slot.0 as usize] = Some(tensor);
            }
        }
        Ok(())
    }

    /// Checks that the results of a branch have the shapes that later segments expect.
    fn check_results(&self, node: &SegmentNode, branch: &str, results: &[Tensor]) -> Result<(), String> {
        for (slot, tensor) in node.outputs.iter().zip(results) {
            let spec = &self.schedule.slots[slot.0 as usize];
            let Some((dtype, dims)) = &spec.ty else { continue };
            if *dtype != tensor.dtype() || dims != tensor.dims() {
                return Err(format!(
                    "{branch} returns {:?} as {tensor:?}, but later nodes expect {dtype}{dims:?}",
                    spec.label
                ));
            }
        }
        Ok(())
    }
}
