//! Behaviour of the backend towards the driver: calls of a warm step, recorded runs, late faults, and failures.

mod common;
#[path = "../../ortrain-testkit/gpu/example.rs"]
mod example;

use std::collections::BTreeMap;
use std::sync::Arc;

use ortrain::artifacts::{Artifacts, OptimizerKind};
use ortrain::{
    CheckpointState, ErrorKind, InputView, ModelSource, Module, ModuleOptions, Optimizer, OutputView,
    RunOptions, Tensor, backend,
};
use ortrain_cuda::Cuda;
use ortrain_expr::{Builder, DType, Type};
use ortrain_program::{
    Backend, Bindings, BufferId, BufferLocation, Executable, GradientMode, GradientModes, Instruction, Load,
    Memory, Nest, Operand, PlaneId, Program, ProgramBuilder, RunError, Scalars, Workspace,
};

use common::software::{calls, set};
use common::{cuda, device, select_software};
use example::{WEIGHTS, artifacts};

const WORKS: &str = "the device works";

/// Training of the perceptron.
struct Training {
    state: CheckpointState,
    module: Module,
    optimizer: Optimizer,
}

impl Training {
    fn new(
        artifacts: &Artifacts,
        mut state: CheckpointState,
        backend: Arc<dyn Backend>,
    ) -> ortrain::Result<Training> {
        let source = |model| ModelSource::from_proto(model).expect("it fits in memory");
        let options = ModuleOptions::from(RunOptions::default().backend(backend));
        let module = Module::new(source(&artifacts.training_model), &mut state, None, options)?;
        let model = artifacts.optimizer_model.as_ref().expect("it was requested");
        let optimizer = Optimizer::new(source(model), &mut state, &module)?;
        Ok(Training { state, module, optimizer })
    }

    fn step(&mut self) -> ortrain::Result<f32> {
        let (x, labels) = (Tensor::f32(&[4, 64], &[0.25; 256]), Tensor::i64(&[4], &[1, 2, 3, 4]));
        let inputs = [InputView::from(&x), InputView::from(&labels)];
        let mut loss = [0; 4];
        let mut deliver = |_: usize, value: OutputView<'_>| value.copy_to(&mut loss);
        self.module.train_step(&mut self.state, &inputs, &mut deliver)?;
        self.optimizer.step(&mut self.state, &self.module)?;
        self.module.lazy_reset_grad();
        Ok(f32::from_le_bytes(loss))
    }
}

fn state_of(artifacts: &Artifacts) -> CheckpointState {
    CheckpointState::from_checkpoint(artifacts.checkpoint.clone()).expect("it can be read")
}

/// Calls that make a context current, around other calls.
fn is_entry(call: &str) -> bool {
    matches!(call, "cuCtxGetCurrent" | "cuCtxSetCurrent")
}

/// A warm step is one upload and one graph for the forward and backward pass, and for the optimizer, and the copy of the
/// loss that the caller reads. It allocates and compiles nothing.
#[test]
fn calls_of_a_warm_step() {
    let trained = artifacts("perceptron", &WEIGHTS, OptimizerKind::AdamW);
    let mut training = Training::new(&trained, state_of(&trained), device()).expect(WORKS);
    for _ in 0..4 {
        training.step().expect(WORKS);
    }
    let before = cuda().counts();
    calls();
    training.step().expect(WORKS);
    let step: Vec<String> = calls().into_iter().filter(|call| !is_entry(call)).collect();
    // Inputs and scalars go up, the graph runs, the loss is read; then the same for the optimizer, without a read.
    let upload = ["cuEventSynchronize", "cuMemcpyHtoDAsync_v2", "cuEventRecord", "cuGraphLaunch"];
    let read = ["cuMemcpyDtoHAsync_v2", "cuStreamSynchronize"];
    assert_eq!(step, [&upload[..], &read[..], &upload[..]].concat());
    let after = cuda().counts();
    assert_eq!(
        (after.allocations, after.bytes, after.compilations, after.graphs, after.launches),
        (before.allocations, before.bytes, before.compilations, before.graphs, before.launches)
    );
    assert_eq!(after.downloaded - before.downloaded, 4);
}

/// Program that adds the difference of two inputs to a plane. In one gradient mode the plane is replaced.
fn sum_program(len: usize) -> Arc<Program> {
    let mut b = ProgramBuilder::new();
    let [x, y] = ["x", "y"].map(|label| b.work(label, DType::F32, len));
    let plane = b.plane("w", DType::F32, len, PlaneId(0), 0);
    let contiguous = |id: BufferId| Operand::contiguous(id, DType::F32, &[len]);
    for (mode, reads_old) in [(GradientMode::Accumulate, true), (GradientMode::Overwrite, false)] {
        let mut expr = Builder::new();
        let [x_reg, y_reg] = [0, 1].map(|slot| expr.load(slot, Type::F32));
        let mut sum = expr.sub(x_reg, y_reg);
        let mut loads = vec![Load::Buffer(contiguous(x)), Load::Buffer(contiguous(y))];
        if reads_old {
            let old = expr.load(2, Type::F32);
            sum = expr.add(sum, old);
            loads.push(Load::Buffer(contiguous(plane)));
        }
        let dims = [len].into_iter().collect();
        let nest = Nest::elementwise(dims, loads, expr.finish(&[sum]), vec![contiguous(plane)]);
        b.emit(Instruction::from(nest), GradientModes::only(mode), &"node".into())
            .expect("the nest is valid");
    }
    Arc::new(b.finish_unfused(vec![x, y], vec![]).expect("it can be planned"))
}

/// Memory of a run of [`sum_program`].
struct Sums {
    work: Workspace,
    plane: Memory,
}

const LEN: usize = 100;

impl Sums {
    fn new(executable: &dyn Executable) -> Sums {
        let mut work = Workspace::new(device());
        work.reserve(executable.program().work_bytes, executable.scratch_bytes()).expect(WORKS);
        Sums { work, plane: device().allocate(4 * LEN, 4 * LEN).expect(WORKS) }
    }

    /// Writes inputs, the second one first if `swapped`, runs, and returns the last element of the plane. If `apart`, the
    /// inputs go to the device before the run, not with it.
    fn run(
        &mut self,
        executable: &dyn Executable,
        values: [f32; 2],
        mode: GradientMode,
        [swapped, apart]: [bool; 2],
    ) -> f32 {
        let program = executable.program();
        let mut inputs: Vec<(BufferId, f32)> = program.inputs.iter().copied().zip(values).collect();
        if swapped {
            inputs.reverse();
        }
        for (id, value) in inputs {
            let BufferLocation::Work(at) = program.buffer(id).location else {
                unreachable!("inputs are work")
            };
            self.work.arena().write(at, &value.to_le_bytes().repeat(LEN)).expect(WORKS);
        }
        if apart {
            self.work.arena().to_vec(0, 4).expect(WORKS);
        }
        let bindings = Bindings { planes: &[&self.plane] };
        executable.run(&bindings, &mut self.work, mode, Scalars::default()).expect(WORKS);
        let mut element = [0; 4];
        self.plane.read(4 * (LEN - 1), &mut element).expect(WORKS);
        f32::from_le_bytes(element)
    }
}

/// Runs that differ in gradient mode, memory, or order of inputs are recorded each for itself. More than four of them
/// replace each other.
#[test]
fn graphs_differ_by_mode_and_memory() {
    let program = sum_program(LEN);
    let executable = device().compile(program).expect("it can run");
    let mut memories: Vec<Sums> = (0..6).map(|_| Sums::new(&*executable)).collect();
    let mut expected = [0.0; 6];
    let mut number = 1.0;
    for round in 0..5 {
        for count in [1, 2, 6] {
            for (k, sums) in memories.iter_mut().take(count).enumerate() {
                for (mode, swapped) in [
                    (GradientMode::Accumulate, false),
                    (GradientMode::Accumulate, true),
                    (GradientMode::Overwrite, round % 2 == 0),
                ] {
                    number += 1.0;
                    let old = if mode == GradientMode::Accumulate { expected[k] } else { 0.0 };
                    expected[k] = old + number - 0.5;
                    let got = sums.run(&*executable, [number, 0.5], mode, [swapped, number % 3.0 == 0.0]);
                    assert_eq!(got, expected[k], "round {round}, memory {k}, {mode:?}, {swapped}");
                }
            }
        }
    }
    assert!(cuda().counts().graphs > 0);
}

/// Runs in one arena that write to two planes in turn.
#[test]
fn graphs_differ_by_plane() {
    let executable = device().compile(sum_program(LEN)).expect("it can run");
    let mut sums = Sums::new(&*executable);
    let mut other = device().allocate(4 * LEN, 4 * LEN).expect(WORKS);
    let mut expected = [0.0; 2];
    for round in 1..8u8 {
        for value in &mut expected {
            *value += f32::from(round) - 0.25;
            let values = [f32::from(round), 0.25];
            assert_eq!(sums.run(&*executable, values, GradientMode::Accumulate, [false; 2]), *value);
            std::mem::swap(&mut sums.plane, &mut other);
        }
    }
}

/// Recorded runs of the two parts of a program are told apart: the same addresses, another selection.
#[test]
fn graphs_differ_by_part() {
    use ortrain_program::{RunPart, Yield};
    let mut b = ProgramBuilder::new();
    let [x, y, z] = ["x", "y", "z"].map(|label| b.work(label, DType::F32, LEN));
    let contiguous = |id: BufferId| Operand::contiguous(id, DType::F32, &[LEN]);
    let nest = |from: BufferId, to: BufferId, squares: bool| {
        let mut expr = Builder::new();
        let x = expr.load(0, Type::F32);
        let value = if squares { expr.mul(x, x) } else { expr.add(x, x) };
        let dims = [LEN].into_iter().collect();
        Nest::elementwise(
            dims,
            vec![Load::Buffer(contiguous(from))],
            expr.finish(&[value]),
            vec![contiguous(to)],
        )
    };
    b.emit(Instruction::from(nest(x, y, false)), GradientModes::ALL, &"first".into()).expect("it is valid");
    let hand_over = Yield { outputs: vec![y], inputs: vec![] };
    b.emit(Instruction::Yield(hand_over), GradientModes::ALL, &"yield".into()).expect("it is valid");
    b.emit(Instruction::from(nest(y, z, true)), GradientModes::ALL, &"second".into()).expect("it is valid");
    let program = Arc::new(b.finish_unfused(vec![x], vec![z]).expect("it can be planned"));
    let executable = device().compile(program.clone()).expect("it can run");
    let mut work = Workspace::new(device());
    work.reserve(program.work_bytes, executable.scratch_bytes()).expect(WORKS);
    let at = |id: BufferId| match program.buffer(id).location {
        BufferLocation::Work(at) => at,
        _ => unreachable!("values are work"),
    };
    for round in 1..6 {
        work.arena().write(at(x), &(round as f32).to_le_bytes().repeat(LEN)).expect(WORKS);
        // A read sends the input to the device, so neither part takes a write along.
        work.arena().to_vec(at(x), 4).expect(WORKS);
        let doubled = 2.0 * round as f32;
        for (part, id, expected) in
            [(RunPart::BeforeYield, y, doubled), (RunPart::AfterYield, z, doubled * doubled)]
        {
            let bindings = Bindings { planes: &[] };
            let (mode, scalars) = (GradientMode::Accumulate, Scalars::default());
            executable.run_observed(&bindings, &mut work, mode, part, scalars, None).expect(WORKS);
            let bytes = work.arena().to_vec(at(id), 4).expect(WORKS);
            assert_eq!(bytes, expected.to_le_bytes());
        }
    }
}

/// Program that writes a table to a plane at indices that the device computes. `bad` shifts them out of range.
fn gather_program() -> Arc<Program> {
    let mut b = ProgramBuilder::new();
    let x = b.work("x", DType::I64, 4);
    let index = b.work("index", DType::I64, 4);
    let plane = b.plane("w", DType::F32, 4, PlaneId(0), 0);
    let dims = || [4].into_iter().collect();
    let mut expr = Builder::new();
    let loaded = expr.load(0, Type::I64);
    let one = expr.int(1);
    let next = expr.add(loaded, one);
    let of = |id: BufferId, dtype: DType| Operand::contiguous(id, dtype, &[4]);
    let loads = vec![Load::Buffer(of(x, DType::I64))];
    let nest = Nest::elementwise(dims(), loads, expr.finish(&[next]), vec![of(index, DType::I64)]);
    b.emit(Instruction::from(nest), GradientModes::ALL, &"next".into()).expect("the nest is valid");
    let mut expr = Builder::new();
    let at = expr.load(0, Type::I64);
    let at = expr.guard(at, 10);
    let value = expr.convert(at, Type::F32);
    let loads = vec![Load::Buffer(of(index, DType::I64))];
    let nest = Nest::elementwise(dims(), loads, expr.finish(&[value]), vec![of(plane, DType::F32)]);
    b.emit(Instruction::from(nest), GradientModes::ALL, &"a table".into()).expect("the nest is valid");
    Arc::new(b.finish_unfused(vec![x], vec![]).expect("it can be planned"))
}

/// An index out of range that the device finds is an error of the next read. Until then, no run changes a plane.
#[test]
fn faults_are_read_with_a_value() {
    let program = gather_program();
    let executable = device().compile(program.clone()).expect("it can run");
    let mut work = Workspace::new(device());
    work.reserve(program.work_bytes, executable.scratch_bytes()).expect(WORKS);
    let plane = device().allocate(16, 16).expect(WORKS);
    let mut run = |first: i64| {
        let BufferLocation::Work(at) = program.buffer(program.inputs[0]).location else {
            unreachable!("inputs are work")
        };
        let bytes: Vec<u8> = [first, 1, 2, 3].iter().flat_map(|value| value.to_le_bytes()).collect();
        work.arena().write(at, &bytes).expect(WORKS);
        executable.run(
            &Bindings { planes: &[&plane] },
            &mut work,
            GradientMode::Accumulate,
            Scalars::default(),
        )
    };
    let first = || plane.to_vec(0, 4).map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four bytes")));
    for round in 0..4 {
        run(0).expect(WORKS);
        assert_eq!(first(), Ok(1.0));
        run(12).expect("the fault is not known yet");
        run(4).expect("the fault is not known yet");
        let fault = RunError::from(first().expect_err("an index is out of range"));
        assert_eq!(fault.to_string(), "a table: index 13 in row 0 is out of range for 10 entries (0 to 9)");
        assert_eq!(first(), Ok(1.0), "round {round}: the plane has changed");
        run(5).expect(WORKS);
        assert_eq!(first(), Ok(6.0));
    }
    // A long series of runs without a read.
    for _ in 0..1000 {
        run(2).expect(WORKS);
    }
    assert_eq!(first(), Ok(3.0));
}

/// Every call of the driver can fail: the error has a type and a remedy, and the device can be opened again.
#[test]
fn failing_calls_are_errors() {
    let trained = artifacts("perceptron", &WEIGHTS, OptimizerKind::AdamW);
    let attempt = || -> Result<f32, String> {
        let device = Cuda::open("cuda").map_err(|error| error.to_string())?;
        let run = || -> ortrain::Result<f32> {
            let mut state = state_of(&trained);
            let before = state.to_bytes(true)?;
            let source = ModelSource::from_proto(&trained.training_model)?;
            let options = ModuleOptions::from(RunOptions::default().backend(Arc::new(device.clone())));
            let refused = Module::new(source, &mut state, None, options).err();
            if refused.is_some() && state.device() == "cpu" {
                assert!(state.to_bytes(true)? == before, "a refused module has changed the state");
            }
            refused.map_or(Ok(()), Err)?;
            let mut training = Training::new(&trained, state_of(&trained), Arc::new(device.clone()))?;
            (0..4).try_fold(0.0, |_, _| training.step())
        };
        run().map_err(|error| {
            let is_typed = matches!(
                error.kind(),
                ErrorKind::DeviceLost | ErrorKind::MemoryLimit | ErrorKind::NotImplemented
            );
            assert!(is_typed, "{:?}: {error}", error.kind());
            error.to_string()
        })
    };
    select_software();
    let expected = attempt().expect(WORKS);
    cuda().abandon();
    calls();
    attempt().expect(WORKS);
    let mut functions: BTreeMap<String, usize> = BTreeMap::new();
    for function in calls() {
        *functions.entry(function).or_default() += 1;
    }
    assert!(functions.len() > 20, "{functions:?}");
    let mut failed = 0;
    for (function, &count) in functions.iter().filter(|(function, _)| !function.starts_with("cuGetError")) {
        // Every allocation fails once.
        let is_allocation = function.contains("Alloc");
        let failing: Vec<usize> = if is_allocation { (1..=count).collect() } else { vec![1, 2, 5] };
        for call in failing {
            Cuda::open("cuda").expect(WORKS).abandon();
            // An unknown error, and a lack of memory.
            let codes = if function.starts_with("nvrtc") { [11, 1] } else { [999, 2] };
            for code in codes {
                set("SOFTWARE_CUDA_FAIL", &format!("{function}:{call}={code}"));
                let outcome = attempt();
                set("SOFTWARE_CUDA_FAIL", "");
                match outcome {
                    Ok(loss) => assert_eq!(loss, expected, "{function}"),
                    Err(message) => {
                        failed += 1;
                        assert!(message.contains(';'), "{function}: no remedy in {message:?}");
                    }
                }
            }
        }
    }
    assert!(failed > 50, "{failed} failures");
    Cuda::open("cuda").expect(WORKS).abandon();
    assert_eq!(attempt(), Ok(expected));
    let mut on_host =
        Training::new(&trained, state_of(&trained), backend("cpu", 0).expect("a processor")).expect("cpu");
    let loss = (0..4).fold(0.0, |_, _| on_host.step().expect("the processor works"));
    assert!((loss - expected).abs() < 1e-4);
}

/// A device without enough memory refuses the state, which stays where it is.
#[test]
fn too_large_state_is_refused() {
    let trained = artifacts("perceptron", &WEIGHTS, OptimizerKind::AdamW);
    cuda();
    for bytes in [20_000_000, 20_010_000, 20_040_000] {
        set("SOFTWARE_CUDA_MEMORY", &bytes.to_string());
        let mut state = state_of(&trained);
        let before = state.to_bytes(true).expect("it fits in memory");
        let moved = state.to(&device());
        if let Err(error) = moved {
            assert_eq!(error.kind(), ErrorKind::MemoryLimit, "{error}");
            assert!(error.to_string().contains("cannot allocate"), "{error}");
            assert_eq!(state.device(), "cpu");
        }
        assert!(state.to_bytes(true).expect("it can be read") == before);
    }
}
