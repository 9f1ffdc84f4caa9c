//! Backend that repeats every run: launch by launch, as a recorded graph, and with the lanes in falling order. All runs
//! have the same bits.

use std::sync::Arc;

use ortrain_expr::Precision;
use ortrain_program::{
    AllocationError, Backend, Bf16Fallback, Bindings, BufferId, Executable, GradientMode, Memory, Observer,
    Program, RunError, RunPart, Scalars, Target, UnsupportedOnBackend, UnsupportedPrecision, Workspace,
};

use super::software::{Lanes, set_lanes};

/// Number of runs: by launches, by the graph that this run records, and by a replay.
const RUNS: usize = 3;

/// Backend that checks the runs of another one.
#[derive(Clone, Debug)]
pub(crate) struct Checked(pub(crate) Arc<dyn Backend>);

impl Backend for Checked {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn with_precision(
        &self,
        precision: Precision,
        fallback: Bf16Fallback,
    ) -> Result<Arc<dyn Backend>, UnsupportedPrecision> {
        Ok(Arc::new(Checked(self.0.with_precision(precision, fallback)?)))
    }

    fn bf16_unit(&self) -> Option<&'static str> {
        self.0.bf16_unit()
    }

    fn target(&self) -> Target {
        self.0.target()
    }

    fn device(&self) -> &str {
        self.0.device()
    }

    fn allocate(&self, bytes: usize, capacity: usize) -> Result<Memory, AllocationError> {
        self.0.allocate(bytes, capacity)
    }

    fn compile(&self, program: Arc<Program>) -> Result<Box<dyn Executable>, UnsupportedOnBackend> {
        Ok(Box::new(CheckedExecutable(self.0.compile(program)?)))
    }
}

#[derive(Debug)]
struct CheckedExecutable(Box<dyn Executable>);

/// Outcome of a run, and the memory after it.
type Outcome = (Result<(), RunError>, Vec<Vec<u8>>);

/// Memory that a run may change: the arena, then the planes.
fn contents(memories: &[&Memory]) -> Vec<Vec<u8>> {
    memories.iter().map(|memory| memory.to_vec(0, memory.len()).expect("the device works")).collect()
}

/// Reads a byte of the first memory that has one.
fn read_a_byte(memories: &[&Memory]) -> Result<(), RunError> {
    let first = memories.iter().find(|memory| !memory.is_empty());
    Ok(first.map_or(Ok(()), |memory| memory.read(0, &mut [0]))?)
}

impl Executable for CheckedExecutable {
    fn program(&self) -> &Program {
        self.0.program()
    }

    fn scratch_bytes(&self) -> usize {
        self.0.scratch_bytes()
    }

    fn host_inputs(&self) -> &[BufferId] {
        self.0.host_inputs()
    }

    fn run_observed(
        &self,
        bindings: &Bindings<'_>,
        work: &mut Workspace,
        entry: GradientMode,
        part: RunPart,
        scalars: Scalars,
        _: Option<&mut dyn Observer>,
    ) -> Result<(), RunError> {
        work.reserve(self.program().work_bytes, self.scratch_bytes())?;
        let planes: Vec<&Memory> =
            bindings.planes.iter().copied().filter(|memory| !memory.is_read_only()).collect();
        let before = contents(&[&[work.arena()], &planes[..]].concat());
        let mut results: Vec<Outcome> = Vec::new();
        for run in 0..RUNS {
            set_lanes(if run + 1 == RUNS { Lanes::Falling } else { Lanes::Rising });
            for (memory, bytes) in [&[work.arena()], &planes[..]].concat().iter().zip(&before) {
                memory.write(0, bytes).expect("the device works");
            }
            let outcome = self.0.run_observed(bindings, work, entry, part, scalars, None);
            // A fault is read with the next value.
            let outcome = outcome.and_then(|()| read_a_byte(&[&[work.arena()], &planes[..]].concat()));
            results.push((outcome, contents(&[&[work.arena()], &planes[..]].concat())));
        }
        set_lanes(Lanes::Rising);
        for (run, result) in results.iter().enumerate().skip(1) {
            assert!(result.0 == results[0].0, "run {run} ends otherwise: {:?}, {:?}", result.0, results[0].0);
            // After an error, the arena has no meaning.
            let from = usize::from(result.0.is_err());
            assert!(result.1[from..] == results[0].1[from..], "run {run} has other bits\n{}", self.program());
        }
        results.remove(0).0
    }
}
