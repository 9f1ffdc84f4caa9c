//! Execution of programs on the device and on the reference evaluator.

use std::sync::Arc;

use ortrain_program::{
    Backend, Bindings, BufferId, BufferLocation, GradientMode, Program, Reference, RunError, Scalars,
    Workspace,
};

pub(crate) use crate::common::device;

/// Returns the device and the reference evaluator.
pub(crate) fn both() -> [Arc<dyn Backend>; 2] {
    [device(), Arc::new(Reference)]
}

/// Runs a program and returns the bytes of its results.
pub(crate) fn run(
    program: &Arc<Program>,
    backend: Arc<dyn Backend>,
    inputs: &[Vec<u8>],
) -> Result<Vec<Vec<u8>>, RunError> {
    let executable = backend.compile(program.clone()).expect("it can run");
    let mut work = Workspace::new(backend);
    work.reserve(program.work_bytes, executable.scratch_bytes()).expect("a little memory");
    work.arena().write(0, &vec![0xa5; program.work_bytes])?;
    let location = |id: &BufferId| match program.buffer(*id).location {
        BufferLocation::Work(offset) => offset,
        _ => unreachable!("inputs and results are work"),
    };
    for (id, bytes) in program.inputs.iter().zip(inputs) {
        work.arena().write(location(id), bytes)?;
    }
    executable.run(
        &Bindings { planes: &[] },
        &mut work,
        GradientMode::Overwrite,
        Scalars { seed: 7, train_step: 3 },
    )?;
    let read = |id: &BufferId| Ok(work.arena().to_vec(location(id), program.buffer(*id).bytes())?);
    program.outputs.iter().map(read).collect()
}
