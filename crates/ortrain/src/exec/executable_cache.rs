//! Executables of a graph: specialized for input shapes, compiled and cached.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ortrain_graph::{Graph, Tensor, ValueId};
use ortrain_ops::training::label_error;
use ortrain_ops::{Role, Specialiser};
use ortrain_program::{
    Backend, Bindings, DeviceError, GradientMode, InputView, Interrupt, Memory, MemoryNeed, Observer,
    OutputSink, PASSES, PassLog, PlaneId, Precision, RunContext, RunError, Scalars, Schedule,
    ScheduleExecutor, Specialised, Workspace, describe_position,
};
use smallvec::SmallVec;

use crate::exec::trace::Trace;
use crate::{Error, Result};

/// A graph with its compiled schedules. Repeated runs do not allocate.
#[derive(Debug)]
pub(crate) struct ExecutableCache {
    specialiser: Specialiser,
    backend: Arc<dyn Backend>,
}

impl ExecutableCache {
    pub(crate) fn new(graph: Graph, roles: Vec<Role>, backend: Arc<dyn Backend>) -> ExecutableCache {
        ExecutableCache { specialiser: Specialiser::new(graph, roles).target(backend.target()), backend }
    }

    /// Sets the precision of inner products. The backend must have been created for it.
    pub(crate) fn with_precision(mut self, precision: Precision) -> ExecutableCache {
        self.specialiser = self.specialiser.precision(precision);
        self
    }

    /// Returns the executables of the same graph with other outputs.
    pub(crate) fn with_outputs(&self, outputs: Vec<ValueId>, backend: Arc<dyn Backend>) -> ExecutableCache {
        let specialiser = self.specialiser.with_outputs(outputs);
        ExecutableCache { specialiser, backend }
    }

    /// Returns the executables of another graph with the same inputs.
    pub(crate) fn with_graph(&self, graph: Graph) -> ExecutableCache {
        ExecutableCache { specialiser: self.specialiser.with_graph(graph), backend: self.backend.clone() }
    }

    /// Returns the executables of the same graph with planes for some inputs: see
    /// [`Specialiser::with_planes`].
    pub(crate) fn with_planes<'d>(
        &self,
        ranges: impl IntoIterator<Item = (usize, &'d [usize], PlaneId)>,
        backend: Arc<dyn Backend>,
    ) -> ExecutableCache {
        let specialiser = self.specialiser.with_planes(ranges);
        ExecutableCache { specialiser, backend }
    }

    /// Returns the executables of the same graph with the body of a node inlined: see
    /// [`Specialiser::inlined`].
    pub(crate) fn with_node_inlined(
        &self,
        node: usize,
        known: &dyn Fn(ValueId) -> Option<Tensor>,
        backend: Arc<dyn Backend>,
    ) -> Option<ExecutableCache> {
        let specialiser = self.specialiser.with_inlined_node(node, known)?;
        Some(ExecutableCache { specialiser, backend })
    }

    /// Returns the inputs that the caller passes, in order.
    pub(crate) fn user_inputs(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.specialiser.user_inputs()
    }

    pub(crate) fn graph(&self) -> &Graph {
        self.specialiser.graph()
    }

    /// Returns the schedules that have been run so far, the most recently used one last.
    pub(crate) fn schedules(&self) -> impl Iterator<Item = Arc<Schedule>> {
        let cached = self
            .specialiser
            .cached_schedules()
            .into_iter()
            .filter(|specialised| specialised.cached_executor().is_some());
        cached.map(|specialised| specialised.schedule().clone())
    }

    /// Returns the cached schedule for these inputs.
    fn cached_schedule(&self, inputs: &[InputView<'_>]) -> Option<Arc<Specialised>> {
        let dims: SmallVec<[&[usize]; 16]> = inputs.iter().map(|value| value.dims).collect();
        self.specialiser.find_cached(&dims, &|k| inputs[k].to_host().unwrap_or_default())
    }

    /// Returns the schedule for these inputs, planned now if it is not cached.
    pub(crate) fn schedule(&self, inputs: &[InputView<'_>]) -> Result<Arc<Specialised>> {
        if let Some(schedule) = self.cached_schedule(inputs) {
            return Ok(schedule);
        }
        let dims: SmallVec<[&[usize]; 16]> = inputs.iter().map(|value| value.dims).collect();
        let failed = RefCell::default();
        let schedule = self.specialiser.schedule_with(&dims, &|k| to_tensor(&inputs[k], &failed));
        match failed.take() {
            Some(error) => Err(RunError::Device(error).into()),
            None => schedule.map_err(|source| Error::Shapes(Box::new(source))),
        }
    }

    /// Returns the parts of planning for these inputs, in order, with their times. Plans everything again and
    /// discards the result.
    pub(crate) fn profile_planning(
        &self,
        work: &Workspace,
        inputs: &[InputView<'_>],
    ) -> Result<Vec<(&'static str, Duration)>> {
        let dims: SmallVec<[&[usize]; 16]> = inputs.iter().map(|value| value.dims).collect();
        let log = PassLog::new();
        let start = Instant::now();
        let failed = RefCell::default();
        let read = |k: usize| to_tensor(&inputs[k], &failed);
        let schedule = self.specialiser.schedule_logged(&dims, &read, log.clone());
        let schedule = Arc::new(schedule.map_err(|source| Error::Shapes(Box::new(source)))?);
        let planned = start.elapsed();
        let start = Instant::now();
        let runner = ScheduleExecutor::within(self.backend.clone(), schedule, work)?;
        let kernels = start.elapsed();
        drop(runner);
        let programs = log.programs();
        let records = || programs.iter().flatten();
        let pass = |name: &'static str| {
            (name, records().filter(|record| record.pass == name).map(|record| record.elapsed).sum())
        };
        let passes: Duration = records().map(|record| record.elapsed).sum();
        let parts = [("shapes and lowering", planned.saturating_sub(passes))].into_iter();
        Ok(parts.chain(PASSES.iter().map(|known| pass(known.name))).chain([("kernels", kernels)]).collect())
    }

    /// Returns the schedule and the memory need of a run on inputs of these shapes, without running it.
    pub(crate) fn plan(&self, work: &Workspace, dims: &[&[usize]]) -> Result<(Arc<Schedule>, MemoryNeed)> {
        let schedule = self.specialiser.schedule_of_shapes(dims);
        let schedule = schedule.map_err(|source| Error::Shapes(Box::new(source)))?.schedule().clone();
        ScheduleExecutor::check(&schedule, work)?;
        let need = ScheduleExecutor::within(self.backend.clone(), schedule.clone(), work)?.memory_need(work);
        Ok((schedule, need))
    }

    /// Returns the positions of inputs with values that decide shapes, as far as [`ExecutableCache::planned`]
    /// has found them.
    pub(crate) fn shape_deciding_inputs(&self) -> Vec<usize> {
        self.specialiser.shape_determining_inputs()
    }

    /// Runs on checked inputs. Allocates only for new shapes, and if a schedule has more than one program.
    pub(crate) fn run(
        &mut self,
        work: &mut Workspace,
        planes: &[&Memory],
        entry: GradientMode,
        scalars: Scalars,
        inputs: &[InputView<'_>],
        deliver: &mut OutputSink<'_>,
    ) -> Result<()> {
        self.run_traced(work, planes, (entry, scalars), None, inputs, deliver)
    }

    /// Runs on checked inputs and records all events in `trace`.
    pub(crate) fn run_traced(
        &mut self,
        work: &mut Workspace,
        planes: &[&Memory],
        (entry, scalars): (GradientMode, Scalars),
        trace: Option<&mut Trace>,
        inputs: &[InputView<'_>],
        deliver: &mut OutputSink<'_>,
    ) -> Result<()> {
        let runner = self.executor(work, inputs)?;
        let (bindings, observer) = (Bindings { planes }, trace.map(|trace| trace as &mut dyn Observer));
        let run =
            runner.run(RunContext::new(&bindings, work, entry, scalars).observed(observer), inputs, deliver);
        run.map_err(|error| self.explain(error))
    }

    /// Rewrites the error of a run in terms of the model.
    pub(crate) fn explain(&self, error: RunError) -> Error {
        let RunError::IndexOutOfRange { node, at, index, bound } = error else { return error.into() };
        match label_error(self.graph(), &node, &describe_position(&at), index, bound) {
            Some(sentence) => Error::Label { sentence, at, label: index, classes: bound },
            None => RunError::IndexOutOfRange { node, at, index, bound }.into(),
        }
    }

    /// Returns the executor for these inputs, compiled now if their shapes are new.
    pub(crate) fn executor(
        &mut self,
        work: &Workspace,
        inputs: &[InputView<'_>],
    ) -> Result<Arc<ScheduleExecutor>> {
        if let Some(schedule) =
            self.cached_schedule(inputs).filter(|schedule| schedule.cached_executor().is_some())
        {
            return self.compiled_executor(&schedule, work);
        }
        interruptible(work.interrupter(), || self.compiled_executor(&*self.schedule(inputs)?, work))
    }

    fn compiled_executor(&self, schedule: &Specialised, work: &Workspace) -> Result<Arc<ScheduleExecutor>> {
        schedule.executor(&self.backend, |schedule| {
            ScheduleExecutor::check(&schedule, work)?;
            let runner = ScheduleExecutor::within(self.backend.clone(), schedule, work)?;
            for program in runner.schedule().programs() {
                work.check(program, 0, 0)?;
            }
            Ok(runner)
        })
    }
}

/// Runs a preparation, and stops if the interrupt is triggered. Changes of state before the interrupt
/// persist.
///
/// ```
/// use ortrain::{Interrupt, interruptible};
///
/// assert_eq!(interruptible(Some(&Interrupt::new(|| true)), || Ok(7))?, 7, "it is done before it is asked");
/// # Ok::<(), ortrain::Error>(())
/// ```
///
/// # Errors
/// [`RunError::Interrupted`], and the errors of `work`.
pub fn interruptible<T>(interrupt: Option<&Interrupt>, work: impl FnOnce() -> Result<T>) -> Result<T> {
    ortrain_program::interruptible(interrupt.map(Interrupt::question), work)
}

/// Copies an input into a tensor. If its device fails, stores the error, and returns zeros.
fn to_tensor(value: &InputView<'_>, failed: &RefCell<Option<DeviceError>>) -> Tensor {
    let data = value.to_host().unwrap_or_else(|error| {
        failed.replace(Some(error));
        vec![0; value.byte_count()].into()
    });
    let data = data.into_owned().into();
    Tensor::new(value.dtype, value.dims.to_vec(), data).expect("the lengths were checked")
}
