//! Context of a run of a schedule, and its results.

use std::time::Instant;

use ortrain_graph::Tensor;

use crate::output_view::{Elements, ResultType};
use crate::{
    Bindings, BufferId, BufferLocation, Copied, Executable, GradientMode, InputBytes, Observer, Program,
    RunError, RunPart, Scalars, Workspace,
};

/// Bytes of an input that are copied between two checks for an interrupt.
const INPUT_CHUNK_BYTES: usize = 32 << 20;

/// Context of a run of a schedule: planes, workspace, gradient mode, scalars and observer.
pub struct RunContext<'a, 'o> {
    pub(crate) bindings: &'a Bindings<'a>,
    pub(crate) work: &'a mut Workspace,
    pub(crate) entry: GradientMode,
    pub(crate) scalars: Scalars,
    pub(crate) observer: Option<&'o mut dyn Observer>,
    /// Bytes of the values between segments.
    pub(crate) intermediate_bytes: usize,
}

impl<'a, 'o> RunContext<'a, 'o> {
    /// Creates the context of a run in a gradient mode, with planes and a workspace.
    pub fn new(
        bindings: &'a Bindings<'a>,
        work: &'a mut Workspace,
        entry: GradientMode,
        scalars: Scalars,
    ) -> RunContext<'a, 'o> {
        RunContext { bindings, work, entry, scalars, observer: None, intermediate_bytes: 0 }
    }

    /// Adds an observer, which is notified of every operation of the run.
    #[must_use]
    pub fn observed(self, observer: Option<&'o mut dyn Observer>) -> RunContext<'a, 'o> {
        RunContext { observer, ..self }
    }

    /// Runs a closure and restores the state if the closure fails.
    pub(crate) fn run_with_rollback<T>(
        &mut self,
        run: impl FnOnce(&mut Self) -> Result<T, RunError>,
    ) -> Result<T, RunError> {
        self.work.begin();
        let outcome = run(self);
        self.work.watch.end(self.bindings, outcome.is_err())?;
        outcome
    }

    pub(crate) fn start_timer(&self) -> Option<Instant> {
        self.observer.is_some().then(Instant::now)
    }

    pub(crate) fn record_copy(&mut self, what: Copied, bytes: usize, start: Option<Instant>) {
        if let (Some(observer), Some(start)) = (&mut self.observer, start) {
            observer.copied(what, bytes, start, Instant::now());
        }
    }

    /// Writes an input to the arena.
    fn write_input(&mut self, offset: usize, bytes: &[u8]) -> Result<(), RunError> {
        // The first writes to fresh memory take seconds for gigabytes, so interrupts are checked between chunks.
        for (chunk, piece) in bytes.chunks(INPUT_CHUNK_BYTES).enumerate() {
            if chunk > 0 {
                self.work.watch.check(u32::MAX)?;
            }
            self.work.arena().write(offset + chunk * INPUT_CHUNK_BYTES, piece)?;
        }
        Ok(())
    }

    /// Runs a part of a program on its inputs. The results are in the arena afterwards.
    pub(crate) fn run<'v>(
        &mut self,
        executable: &dyn Executable,
        part: RunPart,
        inputs: impl Iterator<Item = InputBytes<'v>>,
    ) -> Result<(), RunError> {
        let program = executable.program();
        let [takes, _] = program.inputs_and_outputs(part)?;
        // The second part reads values that the first part left in the workspace.
        if part != RunPart::AfterYield {
            self.work.prepare(program, executable.scratch_bytes(), self.intermediate_bytes)?;
        }
        // Inputs saved by a run that failed before its start are stale.
        self.work.saved_inputs.clear();
        let start = self.start_timer();
        let mut copied = 0;
        for (&id, input) in takes.iter().zip(inputs) {
            let count = program.buffer(id).bytes();
            if executable.host_inputs().contains(&id) {
                self.work.saved_inputs.save(id, &input.to_host(count)?);
            }
            let BufferLocation::Work(offset) = program.buffer(id).location else { continue };
            copied += count;
            match input {
                InputBytes::Memory(memory) => self.work.arena().copy_from(offset, memory, count)?,
                InputBytes::Host(bytes) => self.write_input(offset, bytes)?,
                InputBytes::Sequence(_) => unreachable!("programs have no sequences as inputs"),
            }
        }
        self.record_copy(Copied::Inputs, copied, start);
        // Reborrow: the next program needs the observer again.
        let mut observer = self.observer.as_mut().map(|observer| &mut **observer as &mut dyn Observer);
        if let Some(observer) = &mut observer {
            observer.begins(executable);
        }
        executable.run_observed(self.bindings, self.work, self.entry, part, self.scalars, observer)
    }

    /// Returns a result of a program after a run, without a copy.
    pub(crate) fn result<'m>(&'m self, program: &'m Program, id: BufferId) -> Elements<'m> {
        match program.buffer(id).location {
            BufferLocation::Work(offset) => Elements::Memory(self.work.arena(), offset),
            BufferLocation::Plane(plane, offset) => {
                Elements::Memory(self.bindings.planes[plane.0 as usize], offset)
            }
            BufferLocation::Constant(number) => Elements::Tensor(&program.constants[number]),
        }
    }

    /// Runs a program on tensors and returns its results as tensors.
    pub(crate) fn run_on_tensors(
        &mut self,
        executable: &dyn Executable,
        types: &[ResultType],
        inputs: &[Tensor],
    ) -> Result<Vec<Tensor>, RunError> {
        self.run(executable, RunPart::Full, inputs.iter().map(|tensor| tensor.data()[..].into()))?;
        let start = self.start_timer();
        let program = executable.program();
        let result = |(&id, (dtype, dims)): (&BufferId, &ResultType)| -> Result<Tensor, RunError> {
            let buffer = program.buffer(id);
            let data = match self.result(program, id) {
                Elements::Memory(memory, offset) => memory.to_vec(offset, buffer.bytes())?.into(),
                Elements::Tensor(tensor) => tensor.data().clone(),
            };
            Ok(Tensor::new(*dtype, dims.clone(), data).expect("types were inferred for this program"))
        };
        let results: Vec<Tensor> = program.outputs.iter().zip(types).map(result).collect::<Result<_, _>>()?;
        let bytes = results.iter().map(|tensor| tensor.data().len()).sum();
        self.record_copy(Copied::Outputs, bytes, start);
        Ok(results)
    }
}
