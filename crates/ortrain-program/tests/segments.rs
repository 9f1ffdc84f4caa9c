//! Nests over segments of a plane: results, cost, invalid nests, and no changes by passes.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

use std::ops::Range;
use std::sync::Arc;

use ortrain_expr::{Access, Builder, DType, Mode, ReduceOp, Reduction, Reg, Scalar, Segments, Type, UnaryOp};
use ortrain_program::reference::evaluate;
use ortrain_program::{
    BufferId, Cost, GradientModes, Instruction, Load, Nest, Operand, Program, ProgramBuilder, ProgramError,
    RunPart, Scalars,
};

/// Three segments of a plane, one of them empty, with gaps.
const SEGMENTS: [Range<usize>; 3] = [1..4, 5..5, 6..8];
const LEN: usize = 9;

fn access(strides: [isize; 2], offset: usize, len: usize) -> Access {
    Access { dtype: DType::F32, offset, strides: strides.into_iter().collect(), len }
}

fn plane() -> Access {
    access([0, 1], 0, LEN)
}

/// Returns an operand with the access of [`plane`].
fn in_plane(buffer: BufferId) -> Operand {
    Operand { buffer, access: plane() }
}

fn node() -> Arc<str> {
    "node".into()
}

/// Returns a nest with load `k` of operand `loads[k]`. The closure receives the register of each load.
fn nest(
    inner: usize,
    loads: Vec<Operand>,
    stores: Vec<Operand>,
    f: impl FnOnce(&mut Builder, &[Reg]) -> (Vec<Reg>, Vec<(ReduceOp, Reg)>),
) -> Nest {
    let mut b = Builder::new();
    let regs: Vec<Reg> = (0..loads.len()).map(|slot| b.load(slot, Type::F32)).collect();
    let (results, reductions) = f(&mut b, &regs);
    let values: Vec<Reg> = reductions.iter().map(|reduction| reduction.1).collect();
    let (expr, values) = b.finish_keeping(&results, &values);
    let reductions = reductions.iter().zip(values).map(|(&(op, _), value)| Reduction { op, value }).collect();
    Nest {
        dims: [SEGMENTS.len(), LEN].into_iter().collect(),
        inner,
        segments: Some(Segments::new(SEGMENTS)),
        loads: loads.into_iter().map(Load::Buffer).collect(),
        expr,
        reductions,
        stores,
    }
}

/// Returns `x = x * rate` in place. Each segment has two settings; the second one is its rate.
fn scaled(x: BufferId, settings: BufferId) -> Nest {
    let rates = Operand { buffer: settings, access: access([2, 0], 1, 6) };
    nest(0, vec![in_plane(x), rates], vec![in_plane(x)], |b, x| (vec![b.mul(x[0], x[1])], vec![]))
}

fn floats(values: &[f32]) -> Vec<Scalar> {
    values.iter().map(|&value| Scalar::F32(value)).collect()
}

fn run(program: &Program, inputs: &[&[f32]]) -> Vec<Vec<f32>> {
    let inputs: Vec<Vec<Scalar>> = inputs.iter().map(|values| floats(values)).collect();
    let results = evaluate(program, Mode::Exact, &inputs, Scalars::default()).unwrap();
    results.iter().map(|values| values.iter().map(|value| value.to_f64() as f32).collect()).collect()
}

const PLANE: [f32; LEN] = [10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0, 17.0, 18.0];
const SETTINGS: [f32; 6] = [0.0, 2.0, 0.0, 3.0, 0.0, 5.0];

#[test]
fn segments_use_their_settings_and_gaps_are_unchanged() {
    let mut b = ProgramBuilder::new();
    let (x, settings) = (b.work("x", DType::F32, LEN), b.work("settings", DType::F32, 6));
    b.emit(Instruction::from(scaled(x, settings)), GradientModes::ALL, &node()).unwrap();
    let program = b.finish(vec![x, settings], vec![x]).unwrap();
    let expected = [10.0, 22.0, 24.0, 26.0, 14.0, 15.0, 80.0, 85.0, 18.0];
    assert_eq!(run(&program, &[&PLANE, &SETTINGS]), [expected]);
    // Both loads and the store access only elements of the segments.
    assert_eq!(program.instructions[0].instruction.cost(&program), Cost { flops: 5, bytes: 4 * (5 + 3 + 5) });
    assert!(program.to_string().contains("3 segments of 9  (5 flops, 52 bytes)"), "{program}");
}

#[test]
fn reductions_are_over_the_points_of_a_segment() {
    let mut b = ProgramBuilder::new();
    let (x, y) = (b.work("x", DType::F32, LEN), b.work("y", DType::F32, LEN));
    let (sums, maxima) = (b.work("sums", DType::F32, 6), b.work("most", DType::F32, 3));
    let column = |k: usize| Operand { buffer: sums, access: access([2, 0], k, 6) };
    let largest = Operand { buffer: maxima, access: access([1, 0], 0, 3) };
    let row = nest(1, vec![in_plane(x)], vec![in_plane(y), column(0), column(1), largest], |b, x| {
        let sum = b.reduced(0, Type::F32);
        let rest = b.sub(x[0], sum);
        let (second, maximum) = (b.reduced(1, Type::F32), b.reduced(2, Type::F32));
        let reductions = vec![(ReduceOp::Sum, x[0]), (ReduceOp::Sum, rest), (ReduceOp::Max, x[0])];
        (vec![rest, sum, second, maximum], reductions)
    });
    b.emit(Instruction::from(row), GradientModes::ALL, &node()).unwrap();
    let program = b.finish(vec![x, y], vec![y, sums, maxima]).unwrap();
    let results = run(&program, &[&PLANE, &[-1.0; LEN]]);
    assert_eq!(results[0], [-1.0, -25.0, -24.0, -23.0, -1.0, -1.0, -17.0, -16.0, -1.0]);
    assert_eq!(results[1], [36.0, -72.0, 0.0, 0.0, 33.0, -33.0]);
    assert_eq!(results[2], [13.0, f32::NEG_INFINITY, 17.0], "an empty segment gives what there is at first");
    // A difference and two sums per point, and a comparison.
    let cost = program.instructions[0].instruction.cost(&program);
    assert_eq!(cost, Cost { flops: 4 * 5, bytes: 4 * (5 + 5 + 6 + 3) });
}

/// Returns the error for an instruction over four buffers: `plane`, `table` (eight elements per segment, and eight
/// more), `tail` (a part of the plane), and `other`.
fn rejection_message(instruction: impl FnOnce([BufferId; 4]) -> Instruction) -> Option<String> {
    let mut b = ProgramBuilder::new();
    let plane = b.plane("plane", DType::F32, LEN, ortrain_program::PlaneId(0), 0);
    let tail = b.plane("tail", DType::F32, LEN - 4, ortrain_program::PlaneId(0), 16);
    let table = b.work("table", DType::F32, 32);
    let other = b.work("other", DType::F32, LEN);
    match b.emit(instruction([plane, table, tail, other]), GradientModes::ALL, &node()) {
        Ok(()) => None,
        Err(ProgramError::Faulty { fault, .. }) => Some(fault),
        Err(other) => Some(other.to_string()),
    }
}

#[test]
fn conflicting_stores_and_loads_are_rejected() {
    let column = |k: usize| access([8, 0], k, 32);
    // Columns of a table do not overlap. An equal access reaches the same element at each point.
    let row = |load: Access, store: Access, [read, written]: [usize; 2]| {
        rejection_message(|buffers| {
            let load = Operand { buffer: buffers[read], access: load };
            let store = Operand { buffer: buffers[written], access: store };
            Instruction::from(nest(1, vec![load], vec![store], |_, x| (vec![x[0]], vec![])))
        })
    };
    assert_eq!(row(column(0), column(1), [1, 1]), None);
    assert_eq!(row(column(1), column(1), [1, 1]), None);
    assert_eq!(row(plane(), plane(), [0, 0]), None);
    assert_eq!(row(plane(), plane(), [0, 3]), None);
    let needs = |from: &str, to: &str| {
        Some(format!(
            "load 0 of {from:?} can read elements that are stored to {to:?}; it needs the access of the \
                      store"
        ))
    };
    assert_eq!(row(column(0), column(8), [1, 1]), needs("table", "table"), "the next segment's");
    assert_eq!(row(access([0, 0], 2, LEN), plane(), [0, 0]), needs("plane", "plane"));
    assert_eq!(row(access([1, 0], 0, LEN - 4), plane(), [2, 0]), needs("tail", "plane"));
    let two = |first: Access, second: Access, [a, b]: [usize; 2]| {
        rejection_message(|buffers| {
            let load = Operand { buffer: buffers[1], access: column(5) };
            let stores = [(a, first), (b, second)].map(|(k, access)| Operand { buffer: buffers[k], access });
            Instruction::from(nest(1, vec![load], stores.to_vec(), |_, x| (vec![x[0]; 2], vec![])))
        })
    };
    assert_eq!(two(column(0), column(1), [1, 1]), None);
    assert_eq!(two(plane(), plane(), [0, 3]), None);
    let twice = Some("stores to \"plane\" can overlap stores to \"plane\"".to_owned());
    assert_eq!(two(plane(), plane(), [0, 0]), twice);
}

#[test]
fn segments_allow_one_reduced_axis() {
    let refused = |inner: usize| {
        rejection_message(|[plane, _, _, other]| {
            let (from, to) = (in_plane(plane), in_plane(other));
            Instruction::from(nest(inner, vec![from], vec![to], |_, x| (vec![x[0]], vec![])))
        })
    };
    assert_eq!((refused(0), refused(1)), (None, None));
    assert_eq!(refused(2).as_deref(), Some("segments allow at most 1 reduced axis, got 2"));
}

/// Returns `to = f(from)`, element by element.
fn map(from: BufferId, to: BufferId, f: impl FnOnce(&mut Builder, Reg) -> Reg) -> Instruction {
    let mut b = Builder::new();
    let x = b.load(0, Type::F32);
    let y = f(&mut b, x);
    let contiguous = |id: BufferId| Operand::contiguous(id, DType::F32, &[LEN]);
    Instruction::from(Nest {
        dims: [LEN].into_iter().collect(),
        inner: 0,
        segments: None,
        loads: vec![Load::Buffer(contiguous(from))],
        expr: b.finish(&[y]),
        reductions: Vec::new(),
        stores: vec![contiguous(to)],
    })
}

/// Builds a map, a scaling of segments, and a map that reads both, which would fuse without segments. Then two sums
/// over segments, one of them unused.
fn chain(finish: fn(ProgramBuilder, Vec<BufferId>, Vec<BufferId>) -> Program) -> Program {
    let mut b = ProgramBuilder::new();
    let [x, y, z] = ["x", "y", "z"].map(|name| b.work(name, DType::F32, LEN));
    let (settings, unread) = (b.work("settings", DType::F32, 6), b.work("unread", DType::F32, 3));
    let sums = b.work("sums", DType::F32, 3);
    b.emit(map(x, y, |b, x| b.unary(UnaryOp::Neg, x)), GradientModes::ALL, &node()).unwrap();
    b.emit(Instruction::from(scaled(y, settings)), GradientModes::ALL, &node()).unwrap();
    b.emit(map(y, z, |b, y| b.mul(y, y)), GradientModes::ALL, &node()).unwrap();
    let stores = [unread, sums].map(|buffer| Operand { buffer, access: access([1, 0], 0, 3) });
    let row = nest(1, vec![in_plane(z)], stores.to_vec(), |b, x| {
        let (sum, maximum) = (b.reduced(0, Type::F32), b.reduced(1, Type::F32));
        (vec![maximum, sum], vec![(ReduceOp::Sum, x[0]), (ReduceOp::Max, x[0])])
    });
    b.emit(Instruction::from(row), GradientModes::ALL, &node()).unwrap();
    b.emit(map(z, z, |b, z| b.add(z, z)), GradientModes::ALL, &node()).unwrap();
    finish(b, vec![x, settings], vec![z, sums])
}

#[test]
fn passes_preserve_segments() {
    let fused = chain(|b, inputs, outputs| b.finish(inputs, outputs).unwrap());
    let plain = chain(|b, inputs, outputs| b.finish_unfused(inputs, outputs).unwrap());
    let segments = |program: &Program| {
        let nests = program.instructions.iter().filter_map(|scheduled| scheduled.instruction.nest());
        nests.map(|nest| nest.segments.is_some()).collect::<Vec<_>>()
    };
    assert_eq!(segments(&fused), [false, true, false, true, false], "{fused}");
    // The unused result is not stored.
    assert_eq!(fused.instructions[3].instruction.writes().len(), 1);
    assert_eq!(fused.part_positions(RunPart::Full).unwrap().len(), 5);
    let inputs: [&[f32]; 2] = [&PLANE, &SETTINGS];
    assert_eq!(run(&fused, &inputs), run(&plain, &inputs));
    assert_eq!(run(&fused, &inputs)[1], [484.0 + 576.0 + 676.0, 0.0, 6400.0 + 7225.0]);
}
