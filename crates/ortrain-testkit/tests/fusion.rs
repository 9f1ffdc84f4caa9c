//! Fusion and the planner change no result, on random programs.

use std::sync::Arc;

use ortrain_expr::{Access, BinaryOp, Builder, DType, Nest, Reg, Type};
use ortrain_graph::Tensor;
use ortrain_program::{
    Backend, BufferId, Entries, Entry, Loop, PlaneId, Program, ProgramBuilder, Reference, ScatterAdd, Step,
};
use ortrain_testkit::programs::{Kinds, RandomProgram, Size, run_program};
use ortrain_testkit::tolerance;

const ALL: Kinds = Kinds { jumps: true, narrow: true, windows: true, size: Size::Small };
const ENTRIES: [Entry; 2] = [Entry::Accumulate, Entry::Overwrite];

/// By the reference evaluator, which gives every buffer memory of its own: bit for bit.
#[test]
fn fused_programs_mean_the_same() {
    let (mut instructions, mut fewer) = (0, 0);
    for seed in 0..1500 {
        let plain = Arc::new(RandomProgram::new(seed, ALL).finish(false));
        let fused = Arc::new(RandomProgram::new(seed, ALL).finish(true));
        for entry in ENTRIES {
            let want = run_program(&plain, &Reference, seed, entry);
            let got = run_program(&fused, &Reference, seed, entry);
            assert!(got == want, "seed {seed}, {entry:?}\n{plain}\n{fused}");
        }
        instructions += plain.instructions.len();
        fewer += plain.instructions.len() - fused.instructions.len();
    }
    // That there was something to see.
    assert!(5 * fewer > instructions, "{fewer} of {instructions} instructions were fused");
}

/// On the CPU, where buffers share bytes as the plan says.
#[test]
fn planned_programs_mean_the_same() {
    let kinds = Kinds { jumps: false, narrow: false, ..ALL };
    let cpu: Arc<dyn Backend> = Arc::new(ortrain_cpu::Cpu::new());
    for seed in 0..1500 {
        let plain = Arc::new(RandomProgram::new(seed, kinds).finish(false));
        let fused = Arc::new(RandomProgram::new(seed, kinds).finish(true));
        for entry in ENTRIES {
            let want = run_program(&plain, &Reference, seed, entry);
            let got = run_program(&fused, &*cpu, seed, entry);
            for (k, (got, want)) in got.iter().zip(&want).enumerate() {
                let numbers = |bytes: &[u8]| -> Vec<f64> {
                    bytes
                        .chunks_exact(4)
                        .map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]])))
                        .collect()
                };
                for (x, y) in numbers(got).into_iter().zip(numbers(want)) {
                    let close = (x - y).abs() <= tolerance::FLOAT32 * y.abs().max(1.0);
                    assert!(close, "seed {seed}, {entry:?}, result {k}: {x} is not {y}\n{plain}\n{fused}");
                }
            }
        }
    }
}

/// On the CPU, with images that are split: the same bits on any number of threads.
#[test]
fn threads_change_no_bit() {
    let kinds = Kinds { size: Size::Large, ..ALL };
    let cpu = ortrain_cpu::Cpu::new();
    let before = ortrain_cpu::Cpu::num_threads();
    let (mut convolutions, mut windows) = (0, 0);
    for seed in 0..120 {
        let program = Arc::new(RandomProgram::new(seed, kinds).finish(true));
        let count = |name: &str| program.instructions.iter().filter(|i| i.step.name() == name).count();
        convolutions += count("Conv");
        windows += count("Window");
        let outcomes = [1, 2, 3].map(|threads| {
            ortrain_cpu::Cpu::set_num_threads(threads);
            run_program(&program, &cpu, seed, Entry::Accumulate)
        });
        assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "seed {seed}\n{program}");
    }
    ortrain_cpu::Cpu::set_num_threads(before);
    // That there was something to split.
    assert!(convolutions > 20 && windows > 20, "{convolutions} convolutions, {windows} windows");
}

/// A map over `elements`, of one function of its loads.
fn map(
    b: &ProgramBuilder,
    reads: &[BufferId],
    to: BufferId,
    f: impl FnOnce(&mut Builder, &[Reg]) -> Reg,
) -> Step {
    let elements = b.buffer(to).len;
    let mut expr = Builder::new();
    let regs: Vec<Reg> = (0..reads.len()).map(|slot| expr.load(slot, Type::F32)).collect();
    let result = f(&mut expr, &regs);
    let whole = Access::contiguous(DType::F32, &[elements]);
    let nest = Nest {
        dims: [elements].into_iter().collect(),
        inner: 0,
        loads: vec![whole.clone(); reads.len()],
        expr: expr.finish(&[result]),
        reductions: Vec::new(),
        stores: vec![whole],
    };
    Step::Map(Loop { nest, reads: reads.to_vec(), writes: vec![to] })
}

/// The gradient of an embedding, and what becomes of it before it is gathered in a plane.
fn embedding(fused: bool, between: Option<BinaryOp>) -> Program {
    let (rows, width, count) = (9, 5, 7);
    let node: Arc<str> = "node".into();
    let mut b = ProgramBuilder::new();
    let source = b.work("source", DType::F32, count * width);
    let other = b.work("other", DType::F32, rows * width);
    let index = b.constant("index", &Tensor::i64(&[count], &[3, 0, -1, 3, 8, 3, 5]));
    let mut value = b.work("gradient", DType::F32, rows * width);
    let total = b.plane("total", DType::F32, rows * width, PlaneId(0), 0);
    let zeros = map(&b, &[], value, |b, _| b.constant(Type::F32, 0.0));
    let sums = ScatterAdd { outer: 1, rows, count, inner: width, source, index, target: value };
    let mut steps = vec![(zeros, Entries::ALL), (Step::ScatterAdd(sums), Entries::ALL)];
    if let Some(op) = between {
        let next = b.work("both", DType::F32, rows * width);
        steps.push((map(&b, &[other, value], next, |b, x| b.binary(op, x[0], x[1])), Entries::ALL));
        value = next;
    }
    let add = map(&b, &[total, value], total, |b, x| b.add(x[0], x[1]));
    steps.push((add, Entries::only(Entry::Accumulate)));
    steps.push((map(&b, &[value], total, |_, x| x[0]), Entries::only(Entry::Overwrite)));
    for (step, entries) in steps {
        b.step(step, entries, &node).expect("it is sound");
    }
    let inputs = vec![source, other];
    if fused { b.finish(inputs, Vec::new()) } else { b.finish_unfused(inputs, Vec::new()) }
        .expect("it is small")
}

/// Sums at rows go straight to where gradients are gathered, past additions alone.
#[test]
fn sums_at_rows_touch_no_other_row() {
    let entry_of = |program: &Program, entry| -> Vec<&str> {
        program.entry(entry).map(|instruction| instruction.step.name()).collect()
    };
    for (between, adding, putting) in [
        (None, vec!["ScatterAdd"], vec!["Map", "ScatterAdd"]),
        (Some(BinaryOp::Add), vec!["Map", "ScatterAdd"], vec!["Map", "ScatterAdd"]),
        (Some(BinaryOp::Mul), vec!["Map", "ScatterAdd", "Map"], vec!["Map", "ScatterAdd", "Map"]),
    ] {
        let plain = Arc::new(embedding(false, between));
        let fused = Arc::new(embedding(true, between));
        assert_eq!(entry_of(&fused, Entry::Accumulate), adding, "{fused}");
        assert_eq!(entry_of(&fused, Entry::Overwrite), putting, "{fused}");
        let cpu: &dyn Backend = &ortrain_cpu::Cpu::new();
        for (entry, backend) in
            ENTRIES.into_iter().flat_map(|entry| [(entry, &Reference as &dyn Backend), (entry, cpu)])
        {
            let want = run_program(&plain, &Reference, 1, entry);
            let got = run_program(&fused, backend, 1, entry);
            let numbers = |results: &[Vec<u8>]| -> Vec<f32> {
                let bytes = results.iter().flat_map(|bytes| bytes.chunks_exact(4));
                bytes.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            };
            for (x, y) in numbers(&got).into_iter().zip(numbers(&want)) {
                let close = f64::from((x - y).abs()) <= tolerance::FLOAT32 * f64::from(y.abs().max(1.0));
                assert!(close, "{between:?}, {entry:?}: {x} is not {y}\n{fused}");
            }
        }
    }
}
