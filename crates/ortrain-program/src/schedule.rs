//! Schedules: programs, host functions and control flow, in order, and what runs them.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use ortrain_expr::DType;
use ortrain_graph::Tensor;

use crate::interrupt::interruptible;
use crate::repeat::{self, Repeated};
use crate::run_context::RunContext;
use crate::{
    Backend, Bindings, Copied, Delivered, DeviceError, Executable, MemoryNeed, Part, PlaneId, Program,
    RunError, UnsupportedOnBackend, Workspace, Yield,
};

/// What a segment takes beside its instructions: copies, shapes, a call.
const SEGMENT_TICKS: u32 = 64;

/// A value that passes between segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SlotId(pub u32);

/// Where a value lies in a plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanePlace {
    /// The plane.
    pub plane: PlaneId,
    /// The first byte.
    pub offset: usize,
}

/// What is known of a slot before a run.
#[derive(Clone, Debug)]
pub struct SlotSpec {
    /// The name of the value.
    pub label: Arc<str>,
    /// Element type and shape, if they are known already.
    pub ty: Option<(DType, Vec<usize>)>,
    /// Its place, if it is part of the state. Programs reach it there by themselves.
    pub plane: Option<PlanePlace>,
}

/// A function that runs on the host, for what has no instruction: its results' shapes depend on values.
pub trait HostFunction: Send + Sync + fmt::Debug {
    /// The results.
    ///
    /// # Errors
    /// A sentence saying what is wrong with the inputs.
    fn call(&self, inputs: &[Tensor]) -> Result<Vec<Tensor>, String>;
}

/// Makes a schedule when the shapes of its inputs (and the values of those that reach a shape) are known.
pub trait Specialise: Send + Sync + fmt::Debug {
    /// The schedule for these inputs, from a cache where possible. It is one program as a rule; with sizes that are known
    /// now, an operator may be a function on the host instead.
    ///
    /// # Errors
    /// A sentence saying why there is none.
    fn specialise(&self, inputs: &[Tensor]) -> Result<Arc<Specialised>, String>;

    /// What it will be made of, for dumps.
    fn describe(&self) -> String;
}

/// A schedule for the shapes that it was made for, and what runs it: made ready by the first run, and kept with it.
#[derive(Debug)]
pub struct Specialised {
    schedule: Arc<Schedule>,
    runner: OnceLock<Arc<ScheduleExecutor>>,
}

impl Specialised {
    /// A schedule that nothing runs yet.
    #[must_use]
    pub fn new(schedule: Schedule) -> Specialised {
        Specialised { schedule: Arc::new(schedule), runner: OnceLock::new() }
    }

    /// The schedule.
    #[must_use]
    pub fn schedule(&self) -> &Arc<Schedule> {
        &self.schedule
    }

    /// What runs it, if it was made ready.
    #[must_use]
    pub fn ready(&self) -> Option<&Arc<ScheduleExecutor>> {
        self.runner.get()
    }

    /// What runs it on a backend: that which is kept, or what `make` makes. A runner of another backend than the first one is
    /// not kept.
    ///
    /// # Errors
    /// Those of `make`.
    pub fn executor<E>(
        &self,
        backend: &Arc<dyn Backend>,
        make: impl FnOnce(Arc<Schedule>) -> Result<ScheduleExecutor, E>,
    ) -> Result<Arc<ScheduleExecutor>, E> {
        if let Some(runner) = self.ready()
            && Arc::ptr_eq(&runner.backend, backend)
        {
            return Ok(runner.clone());
        }
        let made = Arc::new(make(self.schedule.clone())?);
        // Another thread may have been quicker: its runner is as good.
        let _ = self.runner.set(made.clone());
        Ok(made)
    }
}

impl std::ops::Deref for Specialised {
    type Target = Schedule;

    fn deref(&self) -> &Schedule {
        &self.schedule
    }
}

/// A segment with the values it takes and makes.
#[derive(Clone, Debug)]
pub struct SegmentNode {
    /// Values it needs, other than those in planes.
    pub inputs: Vec<SlotId>,
    /// Values it makes.
    pub outputs: Vec<SlotId>,
    /// What it does.
    pub segment: Segment,
}

/// Makes the schedule of a branch.
pub trait BranchSource: Send + Sync + fmt::Debug {
    /// The schedule.
    ///
    /// # Errors
    /// A sentence saying why there is none.
    fn schedule(&self) -> Result<Schedule, String>;
}

/// The schedule of a branch, made when it is asked for first: a branch that is never taken may contradict the shapes at
/// hand.
#[derive(Debug)]
pub struct Branch {
    source: Box<dyn BranchSource>,
    made: OnceLock<Result<Arc<Schedule>, String>>,
}

impl Branch {
    /// A branch whose schedule is not made yet.
    #[must_use]
    pub fn new(source: Box<dyn BranchSource>) -> Branch {
        Branch { source, made: OnceLock::new() }
    }

    /// The schedule, made now if it was not made before.
    ///
    /// # Errors
    /// The sentence of the branch's source.
    pub fn schedule(&self) -> Result<&Arc<Schedule>, String> {
        self.made.get_or_init(|| self.source.schedule().map(Arc::new)).as_ref().map_err(Clone::clone)
    }

    /// The schedule, if it was made before.
    #[must_use]
    pub fn made(&self) -> Option<&Arc<Schedule>> {
        self.made.get().and_then(|made| made.as_ref().ok())
    }
}

/// The two schedules of an `If`. Their inputs are those of the segment after the condition.
#[derive(Clone, Debug)]
pub struct Branches {
    /// Runs if the condition holds.
    pub then_branch: Arc<Branch>,
    /// Runs if not.
    pub else_branch: Arc<Branch>,
}

impl Branches {
    /// Both, with the names of the attributes that hold them.
    #[must_use]
    pub fn both(&self) -> [(&'static str, &Branch); 2] {
        [("then_branch", &self.then_branch), ("else_branch", &self.else_branch)]
    }
}

/// A schedule that is repeated.
pub type Repeat = repeat::Repeat<Schedule>;

/// A part of a schedule.
#[derive(Clone, Debug)]
pub enum Segment {
    /// Instructions on the backend, specialised already; with the shapes of their results.
    Program(Arc<Program>, Vec<Vec<usize>>),
    /// Instructions that are specialised when they are reached: their shapes depend on values computed before.
    Deferred(Arc<dyn Specialise>),
    /// A function on the host, with the node it came from.
    Host(Arc<dyn HostFunction>, Arc<str>),
    /// One of two schedules, by the first input (a `bool`); with the node it came from.
    If(Branches, Arc<str>),
    /// A schedule that is run again and again; with the node it came from.
    Repeat(Box<Repeat>, Arc<str>),
    /// The caller takes over: it is given the inputs and hands the outputs in. With the node it came from.
    Yield(Arc<str>),
}

/// The values that change hands where the caller of a schedule takes over: in a [`Segment::Yield`], or in the middle of
/// its only program, by an instruction.
pub type Handed = Yield<SlotId>;

/// Segments in order, and the values that pass between them.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    /// The values.
    pub slots: Vec<SlotSpec>,
    /// The segments.
    pub segments: Vec<SegmentNode>,
    /// Values given from outside, in order.
    pub inputs: Vec<SlotId>,
    /// Results, in order.
    pub outputs: Vec<SlotId>,
    /// What changes hands in the middle of a run, if anything does.
    pub handed: Option<Handed>,
}

impl Schedule {
    /// The only program, if the schedule is one program and nothing else.
    #[must_use]
    pub fn single(&self) -> Option<&Arc<Program>> {
        match self.segments.as_slice() {
            [SegmentNode { segment: Segment::Program(program, _), inputs, outputs }]
                if *inputs == self.inputs && *outputs == self.outputs =>
            {
                Some(program)
            }
            _ => None,
        }
    }

    /// The largest arena that any program known so far needs, in bytes.
    #[must_use]
    pub fn work_bytes(&self) -> usize {
        self.programs().iter().map(|program| program.work_bytes).max().unwrap_or(0)
    }

    /// The programs that are known already, those of bodies and of branches that were made among them.
    #[must_use]
    pub fn programs(&self) -> Vec<&Arc<Program>> {
        let mut programs = Vec::new();
        for node in &self.segments {
            match &node.segment {
                Segment::Program(program, _) => programs.push(program),
                Segment::If(branches, _) => {
                    let made = branches.both().into_iter().filter_map(|(_, branch)| branch.made());
                    programs.extend(made.flat_map(|schedule| schedule.programs()));
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
            write_inside(f, &inside)?;
        }
        Ok(())
    }
}

impl fmt::Display for Branches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, branch) in [("then", &self.then_branch), ("else", &self.else_branch)] {
            writeln!(f, "{name}")?;
            match branch.schedule() {
                Ok(schedule) => write_inside(f, &schedule.to_string())?,
                Err(message) => writeln!(f, "  cannot be taken: {message}")?,
            }
        }
        Ok(())
    }
}

/// Writes the lines of what is inside of something else.
fn write_inside(f: &mut fmt::Formatter<'_>, text: &str) -> fmt::Result {
    text.lines().try_for_each(|line| writeln!(f, "  {line}"))
}

/// A value given to a run: element type, shape and little-endian bytes.
#[derive(Clone, Copy, Debug)]
pub struct Given<'a> {
    /// The element type.
    pub dtype: DType,
    /// The shape.
    pub dims: &'a [usize],
    /// The elements, row-major.
    pub bytes: &'a [u8],
}

impl<'a> From<&'a Tensor> for Given<'a> {
    fn from(tensor: &'a Tensor) -> Given<'a> {
        Given { dtype: tensor.dtype(), dims: tensor.dims(), bytes: tensor.data() }
    }
}

/// Takes the results of a run: position, element type, shape, elements. An error of its ends the run.
pub type Deliver<'a> = dyn FnMut(usize, DType, &[usize], Delivered<'_>) -> Result<(), DeviceError> + 'a;

/// What a run keeps while its caller has taken over: see [`ScheduleExecutor::run_before`].
#[derive(Debug, Default)]
pub struct ForwardState {
    /// The values between segments. Those of a single program lie in the workspace.
    values: Vec<Option<Tensor>>,
    /// Their bytes.
    between: usize,
}

impl ForwardState {
    /// Bytes of the values that it keeps outside of the workspace.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.between
    }
}

/// The given values as tensors.
fn tensors_of(given: &[Given<'_>]) -> Vec<Tensor> {
    let tensor = |value: &Given<'_>| {
        let data = value.bytes.to_vec().into();
        Tensor::new(value.dtype, value.dims.to_vec(), data).expect("the caller's bytes fit its shape")
    };
    given.iter().map(tensor).collect()
}

/// The bytes of the elements of tensors.
fn bytes_of(tensors: &[Tensor]) -> usize {
    tensors.iter().map(|tensor| tensor.data().len()).sum()
}

/// Hands tensors to the caller.
fn deliver_all(results: &[Tensor], deliver: &mut Deliver<'_>) -> Result<(), RunError> {
    for (k, tensor) in results.iter().enumerate() {
        deliver(k, tensor.dtype(), tensor.dims(), Delivered::Tensor(tensor))?;
    }
    Ok(())
}

/// A program that is over the limit of a workspace, made to take as much less, or as near to that as recomputation gets.
fn fitted(work: &Workspace, program: &Program, scratch: usize) -> Option<Program> {
    let Err(RunError::OverLimit(over)) = work.check(program, scratch, 0) else { return None };
    let excess = over.need.total() - over.limit;
    Some(program.within(program.work_bytes.saturating_sub(excess)))
}

/// A schedule prepared for a backend.
#[derive(Debug)]
pub struct ScheduleExecutor {
    schedule: Arc<Schedule>,
    backend: Arc<dyn Backend>,
    prepared: Vec<Prepared>,
}

#[derive(Debug)]
enum Prepared {
    Program(Box<dyn Executable>),
    If([PreparedBranch; 2]),
    Repeat(Box<ScheduleExecutor>),
    /// There is nothing to prepare.
    Nothing,
}

/// A branch that is prepared when it is taken first.
type PreparedBranch = OnceLock<Result<Box<ScheduleExecutor>, String>>;

impl Repeated for ScheduleExecutor {
    fn single(&self) -> Option<&dyn Executable> {
        match (self.prepared.as_slice(), self.schedule.single()) {
            ([Prepared::Program(executable)], Some(_)) => Some(executable.as_ref()),
            _ => None,
        }
    }

    fn run_tensors(
        &self,
        turn: &mut RunContext<'_, '_>,
        given: Vec<Tensor>,
    ) -> Result<Vec<Tensor>, RunError> {
        let outside = turn.between;
        turn.between += bytes_of(&given);
        let results = self.run_counted(turn, given)?;
        turn.between = outside;
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
    /// Prepares every program that is specialised already.
    ///
    /// # Errors
    /// When the backend cannot run an instruction.
    pub fn new(
        backend: Arc<dyn Backend>,
        schedule: Arc<Schedule>,
    ) -> Result<ScheduleExecutor, UnsupportedOnBackend> {
        let prepare = |node: &SegmentNode| {
            Ok(match &node.segment {
                Segment::Program(program, _) => Prepared::Program(backend.compile(program.clone())?),
                Segment::Deferred(_) | Segment::Host(..) | Segment::Yield(_) => Prepared::Nothing,
                Segment::If(..) => Prepared::If(Default::default()),
                Segment::Repeat(repeat, _) => {
                    Prepared::Repeat(Box::new(ScheduleExecutor::new(backend.clone(), repeat.body.clone())?))
                }
            })
        };
        let prepared = schedule.segments.iter().map(prepare).collect::<Result<_, _>>()?;
        Ok(ScheduleExecutor { schedule, backend, prepared })
    }

    /// As [`ScheduleExecutor::new`], and within the limit of a workspace where that is possible: what a program would take beyond
    /// it is computed again instead of kept ([`Program::within`]). Results have the same bits.
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
            if let Prepared::Program(executable) = prepared
                && let Some(less) = fitted(work, executable.program(), executable.scratch_bytes())
                && let Segment::Program(program, _) =
                    &mut Arc::make_mut(&mut runner.schedule).segments[k].segment
            {
                *program = Arc::new(less);
                *prepared = Prepared::Program(runner.backend.compile(program.clone())?);
            }
        }
        Ok(runner)
    }

    /// Checks that the programs of a schedule that are known already can be run within the limit of a workspace, as they
    /// are or as [`ScheduleExecutor::within`] makes them. Nothing is compiled: kernels are made by the sizes of what they compute.
    ///
    /// # Errors
    /// [`RunError::OverLimit`].
    pub fn check(schedule: &Schedule, work: &Workspace) -> Result<(), RunError> {
        let programs = schedule.programs().into_iter();
        programs.filter_map(|program| fitted(work, program, 0)).try_for_each(|less| work.check(&less, 0, 0))
    }

    /// The runner of a branch, made ready now if it was not before.
    fn branch<'r>(
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

    /// What it runs.
    #[must_use]
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// The most that a run of one of its programs takes; those that are specialised late are not known yet. Branches are
    /// prepared for it, whether they were taken before or not; one that cannot be taken takes nothing.
    #[must_use]
    pub fn need(&self, work: &Workspace) -> MemoryNeed {
        let of = |(node, prepared): (&SegmentNode, &Prepared)| match (&node.segment, prepared) {
            (_, Prepared::Program(executable)) => {
                work.need(executable.program(), executable.scratch_bytes(), 0)
            }
            (Segment::If(branches, _), Prepared::If(prepared)) => {
                let both = branches.both().into_iter().zip(prepared);
                let runners = both.filter_map(|((_, branch), own)| self.branch(own, branch).ok());
                runners.map(|runner| runner.need(work)).max_by_key(MemoryNeed::total).unwrap_or_default()
            }
            (_, Prepared::Repeat(body)) => body.need(work),
            _ => MemoryNeed::default(),
        };
        let both = self.schedule.segments.iter().zip(&self.prepared);
        both.map(of).max_by_key(MemoryNeed::total).unwrap_or_default()
    }

    /// Runs an entry on the given values and hands every result to `deliver`. A schedule that is a single program
    /// allocates nothing once the workspace has grown to its size.
    ///
    /// # Errors
    /// [`RunError`]. If the schedule is a single program, state is then unchanged.
    ///
    /// # Panics
    /// When the number or the sizes of the given values are not those the schedule was made for.
    pub fn run(
        &self,
        turn: RunContext<'_, '_>,
        given: &[Given<'_>],
        deliver: &mut Deliver<'_>,
    ) -> Result<(), RunError> {
        self.run_part(turn, Part::Whole, ForwardState::default(), given, deliver).map(drop)
    }

    /// Runs an entry up to where the caller takes over, and hands what it is given to `deliver`. The rest of the run,
    /// [`ScheduleExecutor::run_after`], needs the workspace as it is then.
    ///
    /// # Errors
    /// [`RunError`]; [`RunError::NoYield`] when the caller never takes over.
    ///
    /// # Panics
    /// As [`ScheduleExecutor::run`].
    pub fn run_before(
        &self,
        turn: RunContext<'_, '_>,
        given: &[Given<'_>],
        deliver: &mut Deliver<'_>,
    ) -> Result<ForwardState, RunError> {
        self.run_part(turn, Part::Before, ForwardState::default(), given, deliver)
    }

    /// Runs the rest of what [`ScheduleExecutor::run_before`] began, in the same workspace, on what the caller hands in, and hands
    /// every result to `deliver`. Bindings, entry and scalars are to be those of the first part.
    ///
    /// # Errors
    /// As [`ScheduleExecutor::run`].
    ///
    /// # Panics
    /// When the number or the sizes of the values are not those the schedule was made for.
    pub fn run_after(
        &self,
        suspended: ForwardState,
        turn: RunContext<'_, '_>,
        taken: &[Given<'_>],
        deliver: &mut Deliver<'_>,
    ) -> Result<(), RunError> {
        self.run_part(turn, Part::After, suspended, taken, deliver).map(drop)
    }

    /// Runs a part on what it takes, after what was kept before it, and returns what is to be kept behind it.
    fn run_part(
        &self,
        mut turn: RunContext<'_, '_>,
        part: Part,
        ForwardState { mut values, between }: ForwardState,
        taken: &[Given<'_>],
        deliver: &mut Deliver<'_>,
    ) -> Result<ForwardState, RunError> {
        let Schedule { inputs, outputs, handed, .. } = &*self.schedule;
        let [takes, gives] = part.ends([inputs, outputs], handed.as_ref())?;
        turn.guarded(|turn| {
            if let Some(executable) = self.single() {
                self.run_single(turn, executable, part, taken, gives, deliver)?;
                return Ok(ForwardState::default());
            }
            let hands_over = |node: &SegmentNode| matches!(node.segment, Segment::Yield(_));
            let yielded = self.schedule.segments.iter().position(hands_over).ok_or(RunError::NoYield);
            let places = match part {
                Part::Whole => 0..self.prepared.len(),
                Part::Before => 0..yielded?,
                Part::After => yielded? + 1..self.prepared.len(),
            };
            let taken = tensors_of(taken);
            turn.between = between + bytes_of(&taken);
            self.put(&mut values, takes, taken);
            self.run_segments(turn, &mut values, places)?;
            deliver_all(&self.fetch_all(turn.bindings, &values, gives)?, deliver)?;
            Ok(ForwardState { values, between: turn.between })
        })
    }

    /// The element type and the shape of something that the caller was given when he took over, by its number.
    ///
    /// # Panics
    /// When the caller never takes over, or was given less.
    #[must_use]
    pub fn given<'s>(&'s self, suspended: &'s ForwardState, k: usize) -> (DType, &'s [usize]) {
        let slot = self.schedule.handed.as_ref().expect("the caller has taken over").outputs[k].0 as usize;
        match (suspended.values.get(slot), &self.schedule.slots[slot].ty) {
            (Some(Some(tensor)), _) => (tensor.dtype(), tensor.dims()),
            (_, Some((dtype, dims))) => (*dtype, dims),
            (_, None) => unreachable!("what was given has a shape"),
        }
    }

    /// Runs a part of the only program, which gives these values.
    fn run_single(
        &self,
        turn: &mut RunContext<'_, '_>,
        executable: &dyn Executable,
        part: Part,
        given: &[Given<'_>],
        slots: &[SlotId],
        deliver: &mut Deliver<'_>,
    ) -> Result<(), RunError> {
        let program = executable.program();
        let [inputs, outputs] = program.ends(part)?;
        for (&id, value) in inputs.iter().zip(given) {
            let buffer = program.buffer(id);
            assert_eq!(buffer.bytes(), value.bytes.len(), "bytes of {:?}", buffer.label);
        }
        turn.run(executable, part, given.iter().map(|value| value.bytes))?;
        let start = turn.start();
        let mut bytes = 0;
        for (k, (&id, slot)) in outputs.iter().zip(slots).enumerate() {
            let Some((dtype, dims)) = &self.schedule.slots[slot.0 as usize].ty else { continue };
            bytes += program.buffer(id).bytes();
            deliver(k, *dtype, dims, turn.result(program, id))?;
        }
        turn.copied(Copied::Outputs, bytes, start);
        Ok(())
    }

    /// As [`Repeated::run_tensors`], with tensors that are counted between the segments already.
    fn run_counted(
        &self,
        turn: &mut RunContext<'_, '_>,
        given: Vec<Tensor>,
    ) -> Result<Vec<Tensor>, RunError> {
        let outside = turn.between;
        let mut values = Vec::new();
        self.put(&mut values, &self.schedule.inputs, given);
        self.run_segments(turn, &mut values, 0..self.prepared.len())?;
        turn.between = outside;
        self.fetch_all(turn.bindings, &values, &self.schedule.outputs)
    }

    /// Puts tensors among the values between segments, of which there may be none yet.
    fn put(&self, values: &mut Vec<Option<Tensor>>, slots: &[SlotId], tensors: Vec<Tensor>) {
        values.resize(self.schedule.slots.len(), None);
        for (&slot, tensor) in slots.iter().zip(tensors) {
            values[slot.0 as usize] = Some(tensor);
        }
    }

    /// Some of the values between segments; what lies in planes is read there.
    fn fetch_all(
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
            let (Some((dtype, dims)), Some(place)) = (&spec.ty, spec.plane) else {
                unreachable!("{:?} is made before it is used", spec.label)
            };
            let bytes = dims.iter().product::<usize>() * dtype.size();
            let data = bindings.planes[place.plane.0 as usize].to_vec(place.offset, bytes)?;
            Ok(Tensor::new(*dtype, dims.clone(), data.into()).expect("planes hold whole tensors"))
        };
        slots.iter().map(fetch).collect()
    }

    /// What runs a late segment. A schedule that takes more memory than there may be is refused before it is made ready.
    fn runner_of(
        &self,
        late: &Specialised,
        turn: &RunContext<'_, '_>,
    ) -> Result<Arc<ScheduleExecutor>, RunError> {
        late.executor(&self.backend, |schedule| {
            for program in schedule.programs() {
                turn.work.check(program, 0, turn.between)?;
            }
            ScheduleExecutor::new(self.backend.clone(), schedule)
                .map_err(|error| RunError::Specialise(error.to_string()))
        })
    }

    /// Runs the segments at some places.
    fn run_segments(
        &self,
        turn: &mut RunContext<'_, '_>,
        values: &mut [Option<Tensor>],
        places: Range<usize>,
    ) -> Result<(), RunError> {
        for (node, prepared) in self.schedule.segments[places.clone()].iter().zip(&self.prepared[places]) {
            turn.work.watch.check(SEGMENT_TICKS)?;
            let inputs = self.fetch_all(turn.bindings, values, &node.inputs)?;
            let results = match (&node.segment, prepared) {
                (Segment::Program(_, shapes), Prepared::Program(executable)) => {
                    turn.tensors(executable.as_ref(), shapes, &inputs)?
                }
                (Segment::Deferred(late), _) => {
                    let specialised = late.specialise(&inputs).map_err(RunError::Specialise)?;
                    self.runner_of(&specialised, turn)?.run_counted(turn, inputs)?
                }
                (Segment::Host(function, label), _) => {
                    let start = turn.start();
                    let call = || function.call(&inputs).map_err(RunError::about(label));
                    let results = interruptible(turn.work.watch.question(), call)?;
                    if let (Some(observer), Some(start)) = (&mut turn.observer, start) {
                        observer.host(label, start, Instant::now());
                    }
                    results
                }
                (Segment::If(branches, label), Prepared::If(prepared)) => {
                    let (condition, captured) = inputs.split_first().expect("an If has a condition");
                    let holds = repeat::flag(condition).map_err(RunError::about(label))?;
                    let taken = usize::from(!holds);
                    let (name, branch) = branches.both()[taken];
                    let refused =
                        |message| RunError::Branch { node: label.to_string(), branch: name, message };
                    let runner = self.branch(&prepared[taken], branch).map_err(refused)?;
                    let results = runner.run_tensors(turn, captured.to_vec())?;
                    self.check_results(node, name, &results).map_err(RunError::about(label))?;
                    results
                }
                (Segment::Repeat(repeat, label), Prepared::Repeat(body)) => {
                    repeat.run(label, &**body, turn, &inputs)?
                }
                (Segment::Yield(label), _) => {
                    return Err(RunError::Yield { node: label.to_string() });
                }
                _ => unreachable!("every segment was prepared as what it is"),
            };
            for (&slot, tensor) in node.outputs.iter().zip(results) {
                turn.between += tensor.data().len();
                values[slot.0 as usize] = Some(tensor);
            }
        }
        Ok(())
    }

    /// Checks that the results of a branch have the shapes that what follows was made for.
    fn check_results(&self, node: &SegmentNode, branch: &str, results: &[Tensor]) -> Result<(), String> {
        for (slot, tensor) in node.outputs.iter().zip(results) {
            let spec = &self.schedule.slots[slot.0 as usize];
            let Some((dtype, dims)) = &spec.ty else { continue };
            if *dtype != tensor.dtype() || dims != tensor.dims() {
                return Err(format!(
                    "{branch} gives {:?} as {tensor:?}, but what follows was made for {dtype}{dims:?}",
                    spec.label
                ));
            }
        }
        Ok(())
    }
}
