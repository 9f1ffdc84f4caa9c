//! Fusion and the planner preserve all results of random programs.

use std::sync::Arc;

use ortrain_cpu::Cpu;
use ortrain_expr::{
    BinaryOp, Builder, CompareOp, DType, Inst, Precision, Reg, RunScalar, SlidingAxis, Type, UnaryOp,
    WindowPass, WindowShape,
};
use ortrain_graph::Tensor;
use ortrain_kernels::TileMode;
use ortrain_program::{
    Backend, BufferId, GradientMode, GradientModes, Instruction, Load, MatMul, Nest, Operand, PlaneId,
    Program, ProgramBuilder, Reference, ScatterAdd, Window, WindowIndex,
};
use ortrain_testkit::programs::{Kinds, RandomProgram, Size, numbers, reference, run_program};
use ortrain_testkit::suites::random_programs;
use ortrain_testkit::tolerance;

mod common;

const ALL: Kinds = Kinds {
    jumps: true,
    narrow: true,
    windows: true,
    parts: true,
    updates: false,
    segments: false,
    size: Size::Small,
};
const ENTRIES: [GradientMode; 2] = [GradientMode::Accumulate, GradientMode::Overwrite];

/// Returns true if results are equal except for the sign of zeros. A skipped product of a negative number and
/// zero is not a negative zero.
fn results_equal(got: &[Vec<u8>], expected: &[Vec<u8>]) -> bool {
    let same = |(got, expected): (&Vec<u8>, &Vec<u8>)| {
        let are_numbers = got.len() == expected.len() && got.len().is_multiple_of(4);
        got == expected || are_numbers && numbers(got).eq(numbers(expected))
    };
    got.len() == expected.len() && got.iter().zip(expected).all(same)
}

/// On the reference evaluator, with separate memory for every buffer: bit-identical, except for the sign of
/// zeros.
#[test]
fn fused_programs_mean_the_same() {
    let (mut instructions, mut fewer, mut rounded, mut factors) = (0, 0, 0, 0);
    for seed in 0..1500 {
        let plain = Arc::new(RandomProgram::new(seed, ALL).finish(false));
        let fused = Arc::new(RandomProgram::new(seed, ALL).finish(true));
        for entry in ENTRIES {
            let expected = run_program(&plain, &reference(), seed, entry);
            let got = run_program(&fused, &reference(), seed, entry);
            assert!(results_equal(&got, &expected), "seed {seed}, {entry:?}\n{plain}\n{fused}");
        }
        instructions += plain.instructions.len();
        // An instruction with mostly zero results may become two: zeros, and the nonzero part.
        fewer += plain.instructions.len().saturating_sub(fused.instructions.len());
        for instruction in fused.instructions.iter().map(|scheduled| &scheduled.instruction) {
            let rounds =
                |(inst, _): &(Inst, Type)| matches!(inst, Inst::Unary(UnaryOp::ToF16 | UnaryOp::ToBf16, _));
            rounded +=
                usize::from(instruction.nest().is_some_and(|nest| nest.expr.insts().iter().any(rounds)));
            factors += usize::from(matches!(instruction, Instruction::MatMul(m) if m.rounded != [None; 2]));
        }
    }
    // The test covered some fusions.
    assert!(5 * fewer > instructions, "{fewer} of {instructions} instructions were fused");
    assert!(rounded > 100 && factors > 100, "{rounded} expressions round, and {factors} products");
}

/// Returns true if float32 results differ by no more than sums in another order.
fn results_close(got: &[Vec<u8>], expected: &[Vec<u8>]) -> bool {
    let close = |(x, y): (f64, f64)| (x - y).abs() <= tolerance::FLOAT32 * y.abs().max(1.0);
    let is_close = |(got, expected): (&Vec<u8>, &Vec<u8>)| {
        got.len() == expected.len() && numbers(got).zip(numbers(expected)).all(close)
    };
    got.len() == expected.len() && got.iter().zip(expected).all(is_close)
}

/// On the reference evaluator and on the CPU, with and without a memory limit: reads before an in-place
/// update see the old image, reads after it the new one. Sums that are accumulated directly into their target
/// have another order.
#[test]
fn reads_see_correct_update() {
    let kinds = Kinds { updates: true, jumps: false, narrow: false, ..ALL };
    let cpu: Arc<dyn Backend> = Arc::new(Cpu::new().unwrap());
    let mut updates = 0;
    for seed in 0..3000 {
        let plain = Arc::new(RandomProgram::new(seed, kinds).finish(false));
        let fused = Arc::new(RandomProgram::new(seed, kinds).finish(true));
        let little = Arc::new(fused.within(fused.work_bytes * 2 / 3));
        for entry in ENTRIES {
            let expected = run_program(&plain, &reference(), seed, entry);
            for (program, backend) in [(&fused, &reference()), (&fused, &cpu), (&little, &cpu)] {
                let got = run_program(program, backend, seed, entry);
                assert!(results_close(&got, &expected), "seed {seed}, {entry:?}\n{plain}\n{program}");
            }
        }
        updates += fused.instructions.iter().filter(|i| i.instruction.name() == "ScatterAdd").count();
    }
    // The test covered some updates.
    assert!(updates > 300, "{updates} updates");
}

/// Passes preserve segments that are updated in place, and reads before and after the update.
#[test]
fn segments_are_preserved() {
    let kinds = Kinds { segments: true, jumps: false, narrow: false, ..ALL };
    let cpu: Arc<dyn Backend> = Arc::new(Cpu::new().unwrap());
    let (mut maps, mut rows) = (0, 0);
    for seed in 0..2000 {
        let plain = Arc::new(RandomProgram::new(seed, kinds).finish(false));
        let fused = Arc::new(RandomProgram::new(seed, kinds).finish(true));
        let little = Arc::new(fused.within(fused.work_bytes * 2 / 3));
        for entry in ENTRIES {
            let expected = run_program(&plain, &reference(), seed, entry);
            let same = run_program(&fused, &reference(), seed, entry);
            assert!(results_equal(&same, &expected), "seed {seed}, {entry:?}\n{plain}\n{fused}");
            for program in [&fused, &little] {
                let got = run_program(program, &cpu, seed, entry);
                assert!(results_close(&got, &expected), "seed {seed}, {entry:?}\n{plain}\n{program}");
            }
        }
        for instruction in fused.instructions.iter().map(|scheduled| &scheduled.instruction) {
            if instruction.nest().is_some_and(|nest| nest.segments.is_some()) {
                *(if instruction.name() == "Map" { &mut maps } else { &mut rows }) += 1;
            }
        }
    }
    // The test covered some segments.
    assert!(maps > 300 && rows > 300, "{maps} maps, {rows} rows");
}

/// On the CPU, where buffers share memory according to the plan.
#[test]
fn planned_programs_mean_the_same() {
    let kinds = Kinds { jumps: false, narrow: false, ..ALL };
    let cpu: Arc<dyn Backend> = Arc::new(Cpu::new().unwrap());
    random_programs(&cpu, kinds, 0..1500).passes();
}

/// On the CPU, with images that are split: bit-identical at every thread count.
#[test]
fn threads_change_no_bit() {
    let kinds = Kinds { size: Size::Large, segments: true, ..ALL };
    let cpu: Arc<dyn Backend> = Arc::new(Cpu::new().unwrap());
    let before = Cpu::num_threads();
    let (mut convolutions, mut windows) = (0, 0);
    for seed in 0..140 {
        let program = Arc::new(RandomProgram::new(seed, kinds).finish(true));
        let count = |name: &str| program.instructions.iter().filter(|i| i.instruction.name() == name).count();
        convolutions += count("Conv");
        windows += count("Window");
        let outcomes = [1, 2, 3].map(|threads| {
            Cpu::set_num_threads(threads);
            run_program(&program, &cpu, seed, GradientMode::Accumulate)
        });
        assert!(outcomes.iter().all(|outcome| *outcome == outcomes[0]), "seed {seed}\n{program}");
    }
    Cpu::set_num_threads(before);
    // The test covered some splits.
    assert!(convolutions > 20 && windows > 20, "{convolutions} convolutions, {windows} windows");
}

/// The interpreter of tile programs and the machine code compute the same bits.
#[test]
fn interpreter_and_machine_code_agree() {
    let kinds = Kinds { size: Size::Large, segments: true, ..ALL };
    let modes = [TileMode::MachineCode, TileMode::Interpreter];
    for isa in ortrain_kernels::Isa::available() {
        let backends = modes.map(|mode| Arc::new(Cpu::with_isa(isa).with_mode(mode)) as Arc<dyn Backend>);
        for seed in 0..60 {
            let program = Arc::new(RandomProgram::new(seed, kinds).finish(true));
            for entry in ENTRIES {
                let [compiled, interpreted] =
                    backends.each_ref().map(|backend| run_program(&program, backend, seed, entry));
                assert_eq!(compiled, interpreted, "seed {seed}, {isa}, {entry:?}\n{program}");
            }
        }
    }
}

/// Builds a map over `elements`, with one function of its loads.
fn map(
    b: &ProgramBuilder,
    reads: &[BufferId],
    to: BufferId,
    f: impl FnOnce(&mut Builder, &[Reg]) -> Reg,
) -> Instruction {
    let elements = b.buffer(to).len;
    let mut expr = Builder::new();
    let regs: Vec<Reg> = (0..reads.len()).map(|slot| expr.load(slot, Type::F32)).collect();
    let result = f(&mut expr, &regs);
    let contiguous = |id: BufferId| Operand::contiguous(id, DType::F32, &[elements]);
    Instruction::from(Nest {
        dims: [elements].into_iter().collect(),
        inner: 0,
        segments: None,
        loads: reads.iter().map(|&id| Load::Buffer(contiguous(id))).collect(),
        expr: expr.finish(&[result]),
        reductions: Vec::new(),
        stores: vec![contiguous(to)],
    })
}

/// Builds the gradient of an embedding, and an operation on it before its accumulation in a plane.
fn embedding(fused: bool, operation: Option<BinaryOp>) -> Program {
    let (rows, width, count) = (9, 5, 7);
    let node: Arc<str> = "node".into();
    let mut b = ProgramBuilder::new();
    let source = b.work("source", DType::F32, count * width);
    let other = b.work("other", DType::F32, rows * width);
    let index = b.constant("index", &Tensor::i64(&[count], &[3, 0, -1, 3, 8, 3, 5]));
    let mut value = b.work("gradient", DType::F32, rows * width);
    let total = b.plane("total", DType::F32, rows * width, PlaneId(0), 0);
    let zeros = map(&b, &[], value, |b, _| b.constant(Type::F32, 0.0));
    let sums = ScatterAdd {
        outer: 1,
        rows,
        count,
        inner: width,
        source: Operand::contiguous(source, DType::F32, &[count * width]),
        index: Operand::contiguous(index, DType::I64, &[count]),
        target: Operand::contiguous(value, DType::F32, &[rows * width]),
        overwrites: false,
    };
    let mut steps = vec![(zeros, GradientModes::ALL), (Instruction::from(sums), GradientModes::ALL)];
    if let Some(op) = operation {
        let next = b.work("both", DType::F32, rows * width);
        steps.push((map(&b, &[other, value], next, |b, x| b.binary(op, x[0], x[1])), GradientModes::ALL));
        value = next;
    }
    let add = map(&b, &[total, value], total, |b, x| b.add(x[0], x[1]));
    steps.push((add, GradientModes::only(GradientMode::Accumulate)));
    steps.push((map(&b, &[value], total, |_, x| x[0]), GradientModes::only(GradientMode::Overwrite)));
    for (instruction, entries) in steps {
        b.emit(instruction, entries, &node).expect("it is valid");
    }
    let inputs = vec![source, other];
    if fused { b.finish(inputs, Vec::new()) } else { b.finish_unfused(inputs, Vec::new()) }
        .expect("it fits in memory")
}

/// Row sums are accumulated directly into gradients, except across operations other than additions.
#[test]
fn row_sums_touch_no_other_row() {
    let entry_of = |program: &Program, entry| -> Vec<&str> {
        program.instructions_in(entry).map(|scheduled| scheduled.instruction.name()).collect()
    };
    for (operation, adding, putting) in [
        (None, vec!["ScatterAdd"], vec!["Map", "ScatterAdd"]),
        (Some(BinaryOp::Add), vec!["Map", "ScatterAdd"], vec!["Map", "ScatterAdd"]),
        (Some(BinaryOp::Mul), vec!["Map", "ScatterAdd", "Map"], vec!["Map", "ScatterAdd", "Map"]),
    ] {
        let plain = Arc::new(embedding(false, operation));
        let fused = Arc::new(embedding(true, operation));
        assert_eq!(entry_of(&fused, GradientMode::Accumulate), adding, "{fused}");
        assert_eq!(entry_of(&fused, GradientMode::Overwrite), putting, "{fused}");
        let cpu: Arc<dyn Backend> = Arc::new(Cpu::new().unwrap());
        for (entry, backend) in
            ENTRIES.into_iter().flat_map(|entry| [(entry, reference()), (entry, cpu.clone())])
        {
            let plain_results = run_program(&plain, &reference(), 1, entry);
            let got = run_program(&fused, &backend, 1, entry);
            let [actual, expected] =
                [&got, &plain_results].map(|results| results.iter().flat_map(|bytes| numbers(bytes)));
            for (x, y) in actual.zip(expected) {
                let close = (x - y).abs() <= tolerance::FLOAT32 * y.abs().max(1.0);
                assert!(close, "{operation:?}, {entry:?}: {x} is not {y}\n{fused}");
            }
        }
    }
}

/// Layers of products with dropout, and their backward pass. Dropout only stores a mask.
struct DropoutNet {
    b: ProgramBuilder,
    rows: usize,
    columns: usize,
    node: Arc<str>,
}

impl DropoutNet {
    /// Emits the product of `a` with a square factor, or with its transpose, and an epilogue that reads or
    /// creates a mask.
    fn product(&mut self, a: BufferId, factor: BufferId, mask: BufferId, forward: Option<u64>) -> BufferId {
        let (rows, columns) = (self.rows, self.columns);
        let result = self.b.work("product", DType::F32, rows * columns);
        let contiguous = |id: BufferId, dtype| Operand::contiguous(id, dtype, &[rows, columns]);
        let mut factor = Operand::contiguous(factor, DType::F32, &[columns, columns]);
        let mut e = Builder::new();
        let (product, zero) = (e.load(0, Type::F32), e.constant(Type::F32, 0.0));
        let (mut loads, mut stores) =
            (vec![Load::Accumulator(DType::F32)], vec![contiguous(result, DType::F32)]);
        let dropped = if let Some(stream) = forward {
            let [i, j] = [e.coordinate(0), e.coordinate(1)];
            let width = e.int(columns as i64);
            let first = e.mul(i, width);
            let at = e.add(first, j);
            let at = e.convert(at, Type::U64);
            let (key, stream) = (e.run_scalar(RunScalar::Seed), e.int(stream as i64));
            let stream = e.convert(stream, Type::U64);
            let random = e.push(ortrain_expr::Inst::Random(key, stream, at), Type::U32);
            let limit = e.constant(Type::U32, f64::from(3u32 << 30));
            stores.push(contiguous(mask, DType::Bool));
            e.compare(CompareOp::Lt, random, limit)
        } else {
            factor.access.strides.reverse();
            loads.push(Load::Buffer(contiguous(mask, DType::Bool)));
            e.load(1, Type::Bool)
        };
        let value = e.select(dropped, product, zero);
        let outputs = if forward.is_some() { vec![value, dropped] } else { vec![value] };
        let expr = e.finish(&outputs);
        let dims = [rows, columns].into_iter().collect();
        let epilogue = Nest { dims, inner: 0, segments: None, loads, expr, reductions: Vec::new(), stores };
        let instruction = MatMul {
            batch: [].into_iter().collect(),
            m: rows,
            n: columns,
            k: columns,
            a: contiguous(a, DType::F32),
            b: factor,
            rounded: [None; 2],
            precision: Precision::F32,
            epilogue,
        };
        self.b.emit(Instruction::from(instruction), GradientModes::ALL, &self.node).expect("it is valid");
        result
    }
}

fn dropout_program(fused: bool, rows: usize, columns: usize) -> Program {
    const LAYERS: u64 = 4;
    let mut net = DropoutNet { b: ProgramBuilder::new(), rows, columns, node: "node".into() };
    let x = net.b.work("x", DType::F32, rows * columns);
    let factor = net.b.work("factor", DType::F32, columns * columns);
    let mut value = x;
    let mut masks = Vec::new();
    for layer in 0..LAYERS {
        let mask = net.b.work("mask", DType::Bool, rows * columns);
        value = net.product(value, factor, mask, Some(layer));
        masks.push(mask);
    }
    for mask in masks.into_iter().rev() {
        value = net.product(value, factor, mask, None);
    }
    let (inputs, outputs) = (vec![x, factor], vec![value]);
    if fused { net.b.finish(inputs, outputs) } else { net.b.finish_unfused(inputs, outputs) }
        .expect("it fits in memory")
}

/// Masks that are stored as bits for the backward pass are restored exactly, for any length, at every level
/// and thread count.
#[test]
fn bit_masks_are_restored() {
    let before = Cpu::num_threads();
    for (rows, columns) in [(64, 64), (67, 63), (71, 65), (300, 97), (1031, 123)] {
        let plain = Arc::new(dropout_program(false, rows, columns));
        let fused = Arc::new(dropout_program(true, rows, columns));
        let bits = (rows * columns).div_ceil(8);
        let packed = |buffer: &&ortrain_program::Buffer| buffer.dtype == DType::U8 && buffer.len == bits;
        assert!(fused.buffers.iter().filter(packed).count() >= 2, "{fused}");
        assert!(fused.work_bytes < plain.work_bytes, "{} of {}", fused.work_bytes, plain.work_bytes);
        if rows * columns < 10_000 {
            let [expected, got] = [&plain, &fused]
                .map(|program| run_program(program, &reference(), 5, GradientMode::Accumulate));
            assert!(got == expected, "{rows} by {columns}");
        }
        for backend in common::every_level() {
            let outcomes = [1, 2, 3].map(|threads| {
                Cpu::set_num_threads(threads);
                [&plain, &fused].map(|program| run_program(program, &backend, 5, GradientMode::Accumulate))
            });
            for [expected, got] in &outcomes {
                assert!(got == expected, "{rows} by {columns}");
                assert_eq!(got, &outcomes[0][1], "{rows} by {columns}");
            }
        }
    }
    Cpu::set_num_threads(before);
}

/// Builds a max pooling and its gradient.
fn pooling(fused: bool, planes: usize, axes: &[SlidingAxis]) -> Program {
    let node: Arc<str> = "node".into();
    let mut b = ProgramBuilder::new();
    let shape = |pass| WindowShape { pass, planes, axes: axes.iter().copied().collect() };
    let [inputs, outputs] = shape(WindowPass::Max).operands();
    let [source, source_gradient] = ["source", "back"].map(|name| b.work(name, DType::F32, inputs));
    let [gradient, target] = ["gradient", "target"].map(|name| b.work(name, DType::F32, outputs));
    let index = b.work("positions", DType::I64, outputs);
    for (pass, source, target) in
        [(WindowPass::Max, source, target), (WindowPass::MaxGradient, gradient, source_gradient)]
    {
        let contiguous = |id: BufferId| Operand::contiguous(id, b.buffer(id).dtype, &[b.buffer(id).len]);
        let (source, target) = (contiguous(source), contiguous(target));
        let index = Some(WindowIndex::with_element_positions(contiguous(index)));
        let instruction = Instruction::from(Window { shape: shape(pass), source, index, target });
        b.emit(instruction, GradientModes::ALL, &node).expect("it is valid");
    }
    let (inputs, outputs) = (vec![source, gradient], vec![target, source_gradient]);
    if fused { b.finish(inputs, outputs) } else { b.finish_unfused(inputs, outputs) }
        .expect("it fits in memory")
}

/// The gradient of max pooling by cell index is bit-identical to the one by position, on every backend.
#[test]
fn cell_indices_match_positions() {
    let axis = |input, [kernel, stride, dilation, before, after]: [usize; 5]| {
        let output = (input + before + after - (kernel - 1) * dilation - 1) / stride + 1;
        SlidingAxis { input, output, kernel, stride, dilation, padding_before: before as isize }
    };
    for (planes, axes, dtype) in [
        (5, vec![axis(13, [3, 2, 1, 1, 1]), axis(17, [3, 2, 1, 1, 1])], DType::U8),
        (3, vec![axis(8, [2, 2, 1, 0, 0]), axis(9, [2, 2, 1, 0, 1])], DType::U8),
        (2, vec![axis(11, [2, 1, 3, 1, 2]), axis(40, [5, 3, 2, 4, 4])], DType::U8),
        (4, vec![axis(1, [3, 1, 1, 1, 1]), axis(23, [4, 1, 1, 2, 1])], DType::U8),
        (2, vec![axis(5, [2, 1, 1, 1, 0]), axis(7, [3, 2, 1, 1, 1]), axis(9, [3, 1, 1, 1, 1])], DType::U8),
        (2, vec![axis(30, [17, 2, 1, 8, 8]), axis(31, [16, 1, 1, 8, 8])], DType::U16),
        (2, vec![axis(4, [2, 1, 1, 3, 3]), axis(20, [2, 1, 1, 3, 3])], DType::I64),
    ] {
        let (plain, fused) =
            (Arc::new(pooling(false, planes, &axes)), Arc::new(pooling(true, planes, &axes)));
        let position_dtype =
            fused.buffers.iter().find(|buffer| &*buffer.label == "positions").map(|b| b.dtype);
        assert_eq!(position_dtype, Some(dtype), "{fused}");
        let expected = run_program(&plain, &reference(), 3, GradientMode::Accumulate);
        let backends = common::every_level().into_iter().chain([Arc::new(Reference) as Arc<dyn Backend>]);
        for backend in backends {
            for program in [&plain, &fused] {
                assert!(run_program(program, &backend, 3, GradientMode::Accumulate) == expected, "{program}");
            }
        }
    }
}
