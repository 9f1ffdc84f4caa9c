//! Host parts of programs, as executables.

use std::sync::{Arc, Mutex, PoisonError};

use ortrain_program::{
    Backend, Bindings, BufferId, BufferLocation, Executable, GradientMode, Program, RunError, SavedInputs,
    Scalars, UnsupportedOnBackend, Workspace,
};

use crate::host_prologue::HostPart;

/// Host part of a program, compiled for a backend of the host.
#[derive(Debug)]
pub struct HostExecutable {
    executable: Box<dyn Executable>,
    inputs: Vec<BufferId>,
    results: Vec<BufferId>,
    /// Positions of instructions with guards that the host checks.
    checked: Vec<usize>,
    /// Workspace of the host part, for one run at a time.
    work: Mutex<Workspace>,
}

impl HostExecutable {
    /// Compiles a host part.
    ///
    /// # Errors
    /// When the backend does not support an instruction.
    pub fn new(part: HostPart, backend: Arc<dyn Backend>) -> Result<HostExecutable, UnsupportedOnBackend> {
        let HostPart { program, inputs, results, checked } = part;
        let executable = backend.compile(Arc::new(program))?;
        Ok(HostExecutable { executable, inputs, results, checked, work: Mutex::new(Workspace::new(backend)) })
    }

    /// Returns the inputs of the whole program that the host part reads.
    #[must_use]
    pub fn inputs(&self) -> &[BufferId] {
        &self.inputs
    }

    /// Returns the positions of the instructions of the device part with guards that the host checks.
    #[must_use]
    pub fn checked(&self) -> &[usize] {
        &self.checked
    }

    /// Computes the results of the host part, and writes them to the arena of a run of the device part `rest`. Inputs
    /// without a saved copy are read from the arena.
    ///
    /// # Errors
    /// When a guard fails, or when the device fails.
    pub fn run(
        &self,
        rest: &Program,
        work: &Workspace,
        saved_inputs: &SavedInputs,
        scalars: Scalars,
    ) -> Result<(), RunError> {
        let mut work_memory = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        let program = self.executable.program();
        work_memory.prepare(program, self.executable.scratch_bytes(), 0)?;
        for (&id, &input) in self.inputs.iter().zip(&program.inputs) {
            let (BufferLocation::Work(from), BufferLocation::Work(to)) =
                (rest.buffer(id).location, program.buffer(input).location)
            else {
                continue;
            };
            match saved_inputs.get(id) {
                Some(bytes) => work_memory.arena().write(to, bytes)?,
                None => {
                    work_memory.arena().write(to, &work.arena().to_vec(from, rest.buffer(id).bytes())?)?;
                }
            }
        }
        self.executable.run(&Bindings { planes: &[] }, &mut work_memory, GradientMode::Overwrite, scalars)?;
        for (&id, &output) in self.results.iter().zip(&program.outputs) {
            let buffer = program.buffer(output);
            let bytes = match buffer.location {
                BufferLocation::Work(from) => work_memory.arena().to_vec(from, buffer.bytes())?,
                BufferLocation::Constant(number) => program.constants[number].data().to_vec(),
                BufferLocation::Plane(..) => continue,
            };
            if let BufferLocation::Work(to) = rest.buffer(id).location {
                work.arena().write(to, &bytes)?;
            }
        }
        Ok(())
    }
}
