//! Programs with input values, run on the device and on the reference evaluator.

use std::sync::{Arc, OnceLock};

use ortrain_expr::{DType, Precision};
use ortrain_program::{
    Backend, Bf16Fallback, Bindings, BufferId, BufferLocation, GradientMode, GradientModes, Instruction,
    PlaneId, Program, ProgramBuilder, Reference, RunError, Scalars, Workspace,
};
use ortrain_testkit::programs::numbers;
use ortrain_testkit::tolerance;

use crate::common;

const WORKS: &str = "the device works";

/// Returns the device with support for any precision.
fn device() -> Arc<dyn Backend> {
    static DEVICE: OnceLock<Arc<dyn Backend>> = OnceLock::new();
    let emulated = || common::device().with_precision(Precision::Bf16x6, Bf16Fallback::Emulated);
    DEVICE.get_or_init(|| emulated().expect("it rounds what it loads")).clone()
}

/// Returns pseudorandom numbers in -1..1.
pub(crate) fn random_numbers(seed: usize, count: usize) -> Vec<f32> {
    let bits =
        |k: usize| (k as u32).wrapping_mul(0x9e37_79b9).wrapping_add(seed as u32).wrapping_mul(0x85eb_ca6b);
    (0..count).map(|k| ((bits(k) ^ (bits(k) >> 15)) >> 8) as f32 / (1u32 << 23) as f32 - 1.0).collect()
}

/// Program under construction, with values of its inputs.
#[derive(Default)]
pub(crate) struct TestProgramBuilder {
    pub(crate) builder: ProgramBuilder,
    inputs: Vec<(BufferId, Vec<f32>)>,
    outputs: Vec<BufferId>,
    /// Values of the plane so far.
    pub(crate) plane: Vec<f32>,
}

/// Program with the values of its inputs and of its plane.
pub(crate) struct TestProgram {
    program: Arc<Program>,
    inputs: Vec<Vec<f32>>,
    plane: Vec<f32>,
}

impl TestProgramBuilder {
    pub(crate) fn new(precision: Precision) -> TestProgramBuilder {
        TestProgramBuilder {
            builder: ProgramBuilder::new().with_precision(precision),
            ..TestProgramBuilder::default()
        }
    }

    pub(crate) fn input(&mut self, values: Vec<f32>) -> BufferId {
        let id = self.builder.work("x", DType::F32, values.len());
        self.inputs.push((id, values));
        id
    }

    /// Adds `count` random input values.
    pub(crate) fn random(&mut self, count: usize) -> BufferId {
        self.input(random_numbers(self.inputs.len() * 77 + count, count))
    }

    pub(crate) fn result(&mut self, len: usize) -> BufferId {
        let id = self.builder.work("y", DType::F32, len);
        self.outputs.push(id);
        id
    }

    /// Adds a part of the plane.
    pub(crate) fn state(&mut self, len: usize) -> BufferId {
        let at = 4 * self.plane.len();
        self.plane.extend(random_numbers(self.plane.len() + 5, len));
        self.builder.plane("w", DType::F32, len, PlaneId(0), at)
    }

    pub(crate) fn emit(&mut self, instruction: impl Into<Instruction>) {
        self.builder.emit(instruction.into(), GradientModes::ALL, &"node".into()).expect("it is valid");
    }

    /// Returns the error of a faulty instruction.
    pub(crate) fn refusal(&mut self, instruction: impl Into<Instruction>) -> String {
        let outcome = self.builder.emit(instruction.into(), GradientModes::ALL, &"node".into());
        outcome.expect_err("it is faulty").to_string()
    }

    pub(crate) fn finish(self) -> TestProgram {
        let ids = self.inputs.iter().map(|(id, _)| *id).collect();
        let program = self.builder.finish_unfused(ids, self.outputs).expect("it can be planned");
        let inputs = self.inputs.into_iter().map(|(_, values)| values).collect();
        TestProgram { program: Arc::new(program), inputs, plane: self.plane }
    }
}

impl TestProgram {
    /// Runs the program and returns the bytes of its results, and of the plane afterwards.
    fn run(&self, backend: &Arc<dyn Backend>) -> (Result<Vec<Vec<u8>>, RunError>, Vec<u8>) {
        let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let program = &self.program;
        let capacity = (4 * self.plane.len()).max(4);
        let plane = backend.allocate(capacity, capacity).expect("a little memory");
        plane.write(0, &bytes(&self.plane)).expect(WORKS);
        let executable = backend.compile(program.clone()).expect("it can run");
        let mut work = Workspace::new(backend.clone());
        work.reserve(program.work_bytes, executable.scratch_bytes()).expect("a little memory");
        work.arena().write(0, &vec![0xa5; program.work_bytes]).expect(WORKS);
        for (&id, values) in program.inputs.iter().zip(&self.inputs) {
            if let BufferLocation::Work(offset) = program.buffer(id).location {
                work.arena().write(offset, &bytes(values)).expect(WORKS);
            }
        }
        let planes = Bindings { planes: &[&plane] };
        let outcome = executable.run(&planes, &mut work, GradientMode::Overwrite, Scalars::default());
        let read = |&id: &BufferId| match program.buffer(id).location {
            // A read may report a failed guard.
            BufferLocation::Work(offset) => Ok(work.arena().to_vec(offset, program.buffer(id).bytes())?),
            _ => unreachable!("results are work"),
        };
        let results = outcome.and_then(|()| program.outputs.iter().map(read).collect());
        (results, plane.to_vec(0, 4 * self.plane.len()).expect(WORKS))
    }

    /// Returns the results, then the plane, of a run without an error.
    fn run_successfully(&self, backend: &Arc<dyn Backend>) -> Vec<Vec<u8>> {
        let (results, plane) = self.run(backend);
        results.expect("it runs").into_iter().chain([plane]).collect()
    }

    /// Checks that a run fails with the error of the reference evaluator, and does not change the plane.
    pub(crate) fn assert_changes_nothing(&self) {
        let [expected, got] =
            [Arc::new(Reference) as Arc<dyn Backend>, device()].map(|backend| self.run(&backend));
        let message = |result: Result<Vec<Vec<u8>>, RunError>| result.err().map(|error| error.to_string());
        assert!(expected.0.is_err());
        assert_eq!(message(got.0), message(expected.0));
        assert_eq!(
            numbers(&got.1).collect::<Vec<f64>>(),
            self.plane.iter().map(|&v| f64::from(v)).collect::<Vec<f64>>()
        );
    }

    /// Checks the results of the device, and that a second run has the same bits.
    pub(crate) fn assert_agrees(&self, what: &str) {
        let expected = self.run_successfully(&(Arc::new(Reference) as Arc<dyn Backend>));
        let [got, second] = [(); 2].map(|()| self.run_successfully(&device()));
        assert!(got == second, "{what}: two runs differ");
        for (k, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let largest = numbers(expected)
                .filter(|expected| expected.is_finite())
                .fold(1.0f64, |maximum, expected| maximum.max(expected.abs()));
            for (at, (got, expected)) in numbers(got).zip(numbers(expected)).enumerate() {
                let is_same = got == expected || (got.is_nan() && expected.is_nan());
                let is_close = is_same || (got - expected).abs() <= tolerance::FLOAT32 * largest;
                assert!(is_close, "{what}: element {at} of result {k} is {got}, and not {expected}");
            }
        }
    }
}
