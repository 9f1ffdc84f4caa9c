//! One run of a schedule, and what it delivers.

use std::time::Instant;

use ortrain_graph::{DType, Tensor};

use crate::{
    AllocationError, Bindings, BufferId, Copied, DeviceError, Executable, GradientMode, Memory, Observer,
    Part, Place, Program, RunError, Scalars, Workspace,
};

/// Bytes of an input that are copied between two questions whether the run goes on.
const COPIED_AT_ONCE: usize = 32 << 20;

/// Bytes that are copied at once from memory to memory.
const PIECE: usize = 4 << 10;

/// A result of a run, to be copied out before the next one.
#[derive(Clone, Copy, Debug)]
pub enum Delivered<'a> {
    /// Bytes of the arena or of a plane, from an offset on.
    Memory(&'a Memory, usize),
    /// A tensor.
    Tensor(&'a Tensor),
}

impl Delivered<'_> {
    /// Copies the elements; `bytes` has their length.
    ///
    /// # Errors
    /// When they lie on a device, and that fails.
    pub fn copy_to(&self, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.copy_part(0, bytes)
    }

    /// Copies the elements, so many bytes, to the beginning of a memory that others may read and write.
    ///
    /// # Errors
    /// When one of both lies on a device, and that fails.
    ///
    /// # Panics
    /// When they do not fit, or nobody may write there.
    pub fn write_to(&self, memory: &Memory, bytes: usize) -> Result<(), DeviceError> {
        match self {
            Delivered::Tensor(tensor) => memory.write(0, &tensor.data()[..bytes]),
            Delivered::Memory(..) => {
                // In pieces that stay in a cache: no Rust reference into either memory exists.
                let mut piece = [0; PIECE];
                for from in (0..bytes).step_by(PIECE) {
                    let piece = &mut piece[..PIECE.min(bytes - from)];
                    self.copy_part(from, piece)?;
                    memory.write(from, piece)?;
                }
                Ok(())
            }
        }
    }

    /// A copy of the elements as a tensor of this process.
    ///
    /// # Errors
    /// When they lie on a device, and that fails.
    ///
    /// # Panics
    /// When the elements are not those of the shape: a result comes with its own.
    pub fn to_tensor(&self, dtype: DType, dims: &[usize]) -> Result<Tensor, DeviceError> {
        let mut bytes = vec![0; dims.iter().product::<usize>() * dtype.size()];
        self.copy_to(&mut bytes)?;
        Ok(Tensor::new(dtype, dims.to_vec(), bytes.into()).expect("the bytes are those of the shape"))
    }

    /// A copy of the elements, so many bytes, that stays where they are: on a device nobody waits for it.
    ///
    /// # Errors
    /// When there is no memory for it, or the device fails.
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

    /// True if the elements lie on a device, so that to read them is to wait for it.
    #[must_use]
    pub fn is_on_device(&self) -> bool {
        matches!(self, Delivered::Memory(memory, _) if memory.host().is_none())
    }

    /// Copies some of the bytes of the elements, from the given one on.
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

/// One run of a schedule: what it runs on.
pub struct RunContext<'a, 'o> {
    pub(crate) bindings: &'a Bindings<'a>,
    pub(crate) work: &'a mut Workspace,
    pub(crate) entry: GradientMode,
    pub(crate) scalars: Scalars,
    pub(crate) observer: Option<&'o mut dyn Observer>,
    /// Bytes of the values between segments.
    pub(crate) between: usize,
}

impl<'a, 'o> RunContext<'a, 'o> {
    /// A run of an entry on planes, in the memory of a workspace.
    pub fn new(
        bindings: &'a Bindings<'a>,
        work: &'a mut Workspace,
        entry: GradientMode,
        scalars: Scalars,
    ) -> RunContext<'a, 'o> {
        RunContext { bindings, work, entry, scalars, observer: None, between: 0 }
    }

    /// The same, and an observer is told of everything that it does.
    #[must_use]
    pub fn observed(self, observer: Option<&'o mut dyn Observer>) -> RunContext<'a, 'o> {
        RunContext { observer, ..self }
    }

    /// Runs something that is put back if it is broken off.
    pub(crate) fn guarded<T>(
        &mut self,
        run: impl FnOnce(&mut Self) -> Result<T, RunError>,
    ) -> Result<T, RunError> {
        self.work.begin();
        let outcome = run(self);
        self.work.watch.end(self.bindings, outcome.is_err())?;
        outcome
    }

    pub(crate) fn start(&self) -> Option<Instant> {
        self.observer.is_some().then(Instant::now)
    }

    pub(crate) fn copied(&mut self, what: Copied, bytes: usize, start: Option<Instant>) {
        if let (Some(observer), Some(start)) = (&mut self.observer, start) {
            observer.copied(what, bytes, start, Instant::now());
        }
    }

    /// Runs a part of a program on the elements of what it takes; what it makes is in the arena.
    pub(crate) fn run<'v>(
        &mut self,
        executable: &dyn Executable,
        part: Part,
        taken: impl Iterator<Item = &'v [u8]>,
    ) -> Result<(), RunError> {
        let program = executable.program();
        let [takes, _] = program.ends(part)?;
        // The second part finds in the workspace what the first one left there.
        if part != Part::After {
            self.work.prepare(program, executable.scratch_bytes(), self.between)?;
        }
        // Those of a run that ended before it began are of no use any more.
        self.work.kept.clear();
        let start = self.start();
        let mut copied = 0;
        for (&id, bytes) in takes.iter().zip(taken) {
            if executable.host_inputs().contains(&id) {
                self.work.kept.push((id, bytes.to_vec()));
            }
            if let Place::Work(offset) = program.buffer(id).place {
                // The first writes to memory take seconds for gigabytes.
                for (number, piece) in bytes.chunks(COPIED_AT_ONCE).enumerate() {
                    if number > 0 {
                        self.work.watch.check(u32::MAX)?;
                    }
                    self.work.arena().write(offset + number * COPIED_AT_ONCE, piece)?;
                }
                copied += bytes.len();
            }
        }
        self.copied(Copied::Inputs, copied, start);
        // A new reference for each program: the observer stays for the next one.
        let observer = self.observer.as_mut().map(|observer| &mut **observer as &mut dyn Observer);
        executable.run_observed(self.bindings, self.work, self.entry, part, self.scalars, observer)
    }

    /// A result of a program after a run, where it lies.
    pub(crate) fn result<'m>(&'m self, program: &'m Program, id: BufferId) -> Delivered<'m> {
        match program.buffer(id).place {
            Place::Work(offset) => Delivered::Memory(self.work.arena(), offset),
            Place::Plane(plane, offset) => Delivered::Memory(self.bindings.planes[plane.0 as usize], offset),
            Place::Constant(number) => Delivered::Tensor(&program.constants[number]),
        }
    }

    /// Runs a program on tensors.
    pub(crate) fn tensors(
        &mut self,
        executable: &dyn Executable,
        shapes: &[Vec<usize>],
        inputs: &[Tensor],
    ) -> Result<Vec<Tensor>, RunError> {
        self.run(executable, Part::Whole, inputs.iter().map(|tensor| &tensor.data()[..]))?;
        let start = self.start();
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
        self.copied(Copied::Outputs, bytes, start);
        Ok(results)
    }
}
