//! Nest groups: results, cost, and invalid groups.

#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

use std::sync::Arc;

use ortrain_expr::{Builder, DType, Mode, Reg, Scalar, Type};
use ortrain_program::reference::evaluate;
use ortrain_program::{
    BufferId, Cost, GradientModes, Instruction, Load, Nest, NestGroup, Operand, PlaneId, ProgramBuilder,
    Scalars,
};

const LEN: usize = 4;

/// Returns a map from whole buffers to another buffer.
fn map(from: &[BufferId], to: BufferId, f: impl FnOnce(&mut Builder, &[Reg]) -> Reg) -> Arc<Nest> {
    let contiguous = |id: BufferId| Operand::contiguous(id, DType::F32, &[LEN]);
    let mut b = Builder::new();
    let regs: Vec<Reg> = (0..from.len()).map(|slot| b.load(slot, Type::F32)).collect();
    let result = f(&mut b, &regs);
    let loads = from.iter().map(|&id| Load::Buffer(contiguous(id))).collect();
    let dims = [LEN].into_iter().collect();
    Arc::new(Nest::elementwise(dims, loads, b.finish(&[result]), vec![contiguous(to)]))
}

fn negated(from: BufferId, to: BufferId) -> Arc<Nest> {
    map(&[from], to, |b, x| {
        let zero = b.constant(Type::F32, 0.0);
        b.sub(zero, x[0])
    })
}

fn group(nests: Vec<Arc<Nest>>) -> Instruction {
    Instruction::from(NestGroup { nests })
}

#[test]
fn grouped_nests_compute_their_own_results() {
    let mut b = ProgramBuilder::new();
    let [x, y, z] = ["x", "y", "z"].map(|label| b.work(label, DType::F32, LEN));
    let doubled = map(&[x], z, |b, x| b.add(x[0], x[0]));
    b.emit(group(vec![negated(x, y), doubled]), GradientModes::ALL, &"node".into()).unwrap();
    let program = b.finish(vec![x], vec![y, z]).unwrap();
    let inputs = [[1.0, 2.0, 3.0, 4.0].map(Scalar::F32).to_vec()];
    let results = evaluate(&program, Mode::Exact, &inputs, Scalars::default()).unwrap();
    assert_eq!(results[0], [-1.0, -2.0, -3.0, -4.0].map(Scalar::F32));
    assert_eq!(results[1], [2.0, 4.0, 6.0, 8.0].map(Scalar::F32));
    // An operand of both nests counts as one read.
    let cost = program.instructions[0].instruction.cost(&program);
    assert_eq!(cost, Cost { flops: 2 * LEN as u64, bytes: 4 * 3 * LEN as u64 });
    let text = program.to_string();
    assert!(
        text.contains("NestGroup") && text.contains("2 nests") && text.contains("b2 <- b0  [4]"),
        "{text}"
    );
    let [first, second] = &program.instructions[0].split_group()[..] else { panic!("two parts") };
    assert_eq!([first, second].map(|part| part.instruction.writes()[0]), [y, z]);
}

/// Function that builds the nests of a group from four buffers.
type Nests = fn([BufferId; 4]) -> Vec<Arc<Nest>>;

/// Returns the error for a group over two work buffers and two overlapping parts of a plane.
fn rejection_message(nests: Nests) -> Option<String> {
    let mut b = ProgramBuilder::new();
    let [x, y] = ["x", "y"].map(|label| b.work(label, DType::F32, LEN));
    let [v, w] = [("v", 0), ("w", 8)].map(|(label, at)| b.plane(label, DType::F32, LEN, PlaneId(0), at));
    b.emit(group(nests([x, y, v, w])), GradientModes::ALL, &"the node".into())
        .err()
        .map(|error| error.to_string())
}

#[test]
fn dependent_nests_are_rejected() {
    assert_eq!(rejection_message(|[x, y, v, _]| vec![negated(x, y), negated(x, v)]), None);
    // A nest may write a buffer that it reads, and several nests may read the same buffer.
    assert_eq!(rejection_message(|[x, y, v, _]| vec![negated(v, v), negated(x, x), negated(y, y)]), None);
    let cases: [(Nests, &str); 5] = [
        (|[x, y, v, _]| vec![negated(x, y), negated(y, v)], "\"y\""),
        (|[x, y, v, _]| vec![negated(y, v), negated(x, y)], "\"y\""),
        (|[x, y, ..]| vec![negated(x, y), negated(x, y)], "\"y\""),
        (|[x, _, v, w]| vec![negated(x, v), negated(x, w)], "\"w\""),
        (|[x, y, v, _]| vec![negated(v, v), negated(x, x), negated(x, y)], "\"x\""),
    ];
    for (nests, label) in cases {
        let error = rejection_message(nests).unwrap();
        assert!(error.contains("the node") && error.contains(label) && error.contains("stores"), "{error}");
    }
}

#[test]
fn fallible_nests_are_rejected() {
    let error = rejection_message(|[x, y, ..]| {
        let guarded = map(&[x], y, |b, x| {
            let index = b.convert(x[0], Type::I64);
            let index = b.guard(index, LEN as i64);
            b.convert(index, Type::F32)
        });
        vec![guarded]
    });
    assert!(error.unwrap().contains("can fail"));
}

#[test]
fn out_of_bounds_nests_are_rejected() {
    let error = rejection_message(|[x, y, ..]| {
        let mut nest = Arc::unwrap_or_clone(negated(x, y));
        nest.dims[0] += 1;
        vec![negated(x, x), Arc::new(nest)]
    });
    assert!(error.unwrap().contains("elements 0..=4 of a buffer of 4"));
}
