//! Context of a run of a schedule, and its results.

use std::time::Instant;

use ortrain_graph::{DType, Tensor};

use crate::{
    AllocationError, Bindings, BufferId, BufferLocation, Copied, DeviceError, Executable, GradientMode,
    InputBytes, Memory, Observer, Program, RunError, RunPart, Scalars, Workspace,
};

/// Bytes of an input that are copied between two checks for an interrupt.
const INPUT_CHUNK_BYTES: usize = 32 << 20;

/// Bytes of a copy between two memories per chunk.
const COPY_CHUNK_BYTES: usize = 4 << 10;

/// Result of a run, which must be copied before the next run.
#[derive(Clone, Copy, Debug)]
pub enum Delivered<'a> {
    /// Bytes of the arena or of a plane, from an offset.
    Memory(&'a Memory, usize),
    /// A tensor.
    Tensor(&'a Tensor),
}

impl Delivered<'_> {
    /// Copies the elements into `bytes`, which has their length.
    ///
    /// # Errors
    /// When the elements are on a device, and the device fails.
    pub fn copy_to(&self, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.copy_part(0, bytes)
    }

    /// Copies the elements (`bytes` bytes) to the beginning of a memory that is possibly shared.
    ///
    /// # Errors
    /// When one of the memories is on a device, and the device fails.
    ///
    /// # Panics
    /// When the elements do not fit, or the memory is read-only.
    pub fn write_to(&self, memory: &Memory, bytes: usize) -> Result<(), DeviceError> {
        match self {
            Delivered::Tensor(tensor) => memory.write(0, &tensor.data()[..bytes]),
            Delivered::Memory(..) => {
                // Chunks fit into a cache. No Rust reference to either memory exists.
                let mut piece = [0; COPY_CHUNK_BYTES];
                for from in (0..bytes).step_by(COPY_CHUNK_BYTES) {
                    let piece = &mut piece[..COPY_CHUNK_BYTES.min(bytes - from)];
                    self.copy_part(from, piece)?;
                    memory.write(from, piece)?;
                }
                Ok(())
            }
        }
    }

    /// Copies the elements to a tensor in host memory.
    ///
    /// # Errors
    /// When the elements are on a device, and the device fails.
    ///
    /// # Panics
    /// When the number of elements differs from the shape. Results are delivered with their shape.
    pub fn to_tensor(&self, dtype: DType, dims: &[usize]) -> Result<Tensor, DeviceError> {
        let mut bytes = vec![0; dims.iter().product::<usize>() * dtype.size()];
        self.copy_to(&mut bytes)?;
        Ok(Tensor::new(dtype, dims.to_vec(), bytes.into()).expect("the bytes are those of the shape"))
    }

    /// Copies the elements (`bytes` bytes) within their memory; a copy on a device is asynchronous.
    ///
    /// # Errors
    /// When memory for the copy is not available, or the device fails.
    pub fn copy(&self, bytes: usize) -> Result<Memory, AllocationError> {
        match self {
            Delivered::Memory(memory, offset) => memory.copy(*offset, bytes),
            Delivered::Tensor(tensor) => {
                let copy = Memory::try_new(bytes)?;
                copy.write(0, &tensor.data()[..bytes])?;
                Ok(copy)
            }
        }
    }

    /// Returns true if the elements are on a device, so that a read waits for the device.
    #[must_use]
    pub fn is_on_device(&self) -> bool {
        matches!(self, Delivered::Memory(memory, _) if memory.host().is_none())
    }

    /// Copies part of the elements, from byte `from`.
    pub(crate) fn copy_part(&self, from: usize, bytes: &mut [u8]) -> Result<(), DeviceError> {
        match self {
            Delivered::Memory(memory, offset) => memory.read(offset + from, bytes),
            Delivered::Tensor(tensor) => {
                bytes.copy_from_slice(&tensor.data()[from..from + bytes.len()]);
                Ok(())
            }
        }
    }
}

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
                InputBytes::Device(memory) => self.work.arena().copy_from(offset, memory, count)?,
                InputBytes::Host(bytes) => self.write_input(offset, bytes)?,
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
    pub(crate) fn result<'m>(&'m self, program: &'m Program, id: BufferId) -> Delivered<'m> {
        match program.buffer(id).location {
            BufferLocation::Work(offset) => Delivered::Memory(self.work.arena(), offset),
            BufferLocation::Plane(plane, offset) => {
                Delivered::Memory(self.bindings.planes[plane.0 as usize], offset)
            }
            BufferLocation::Constant(number) => Delivered::Tensor(&program.constants[number]),
        }
    }

    /// Runs a program on tensors and returns its results as tensors.
    pub(crate) fn run_on_tensors(
        &mut self,
        executable: &dyn Executable,
        shapes: &[Vec<usize>],
        inputs: &[Tensor],
    ) -> Result<Vec<Tensor>, RunError> {
        self.run(executable, RunPart::Full, inputs.iter().map(|tensor| tensor.data()[..].into()))?;
        let start = self.start_timer();
        let program = executable.program();
        let result = |(&id, dims): (&BufferId, &Vec<usize>)| -> Result<Tensor, RunError> {
            let buffer = program.buffer(id);
            let data = match self.result(program, id) {
                Delivered::Memory(memory, offset) => memory.to_vec(offset, buffer.bytes())?.into(),
                Delivered::Tensor(tensor) => tensor.data().clone(),
            };
            Ok(Tensor::new(buffer.dtype, dims.clone(), data).expect("shapes were inferred for this program"))
        };
        let results: Vec<Tensor> =
            program.outputs.iter().zip(shapes).map(result).collect::<Result<_, _>>()?;
        let bytes = results.iter().map(|tensor| tensor.data().len()).sum();
        self.record_copy(Copied::Outputs, bytes, start);
        Ok(results)
    }
}
