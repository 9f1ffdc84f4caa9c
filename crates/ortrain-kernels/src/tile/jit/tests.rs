//! Results have the same bits with and without machine code.

use std::sync::Arc;

use ortrain_expr::{
    Access, BinaryOp, Builder, CompareOp, DType, Load, Nest, ReduceOp, Reduction, Reg, Segments, Type,
    UnaryOp,
};
use proptest::prelude::*;

use super::codegen::emit_interleaved;
use super::encoder::Encoder;
use super::function::{MAX_CACHED_FUNCTIONS, get_or_assemble};
use super::ir::{Effect, VectorInst, VectorProgram};
use super::order::ValueOrder;
use super::x86_64::{Code, Target};
use crate::isa::{Isa, Kind as Level};
use crate::tile::op::Kind;
use crate::tile::{Compiler, ExecContext, Failure, LoopOrder, LoopPlan, PairwiseSum, TileProgram};
use crate::{NestKernel, Pool, RunScalars, Scratch};

/// Lengths around the sizes of a vector, a round and two rounds, and one length of several tiles. A single element
/// would be a uniform value, without tiles.
const LENGTHS: [usize; 12] = [2, 7, 8, 15, 16, 17, 33, 63, 64, 65, 200, 2500];

const UNARY: [UnaryOp; 13] = [
    UnaryOp::Neg,
    UnaryOp::Abs,
    UnaryOp::Sign,
    UnaryOp::Floor,
    UnaryOp::Exp,
    UnaryOp::Log,
    UnaryOp::Sqrt,
    UnaryOp::Rsqrt,
    UnaryOp::Erf,
    UnaryOp::Tanh,
    UnaryOp::Sigmoid,
    UnaryOp::ToF16,
    UnaryOp::ToBf16,
];
const BINARY: [BinaryOp; 6] =
    [BinaryOp::Add, BinaryOp::Sub, BinaryOp::Mul, BinaryOp::Div, BinaryOp::Min, BinaryOp::Max];

fn levels() -> Vec<Isa> {
    Isa::available().into_iter().filter(|&isa| isa != Isa::PORTABLE).collect()
}

/// Returns true if all tile operations of a program are machine code.
fn is_all_machine_code(tape: &TileProgram) -> bool {
    let natives = |list: &[crate::tile::op::Op]| {
        list.iter().all(|op| op.is_uniform || matches!(op.kind, Kind::Native(_)))
    };
    tape.stages.iter().all(|stage| natives(&stage.body))
}

/// Runs a nest over one axis as one row. Returns the stored values, and the bits of the totals.
fn run(tape: &TileProgram, loads: &[Vec<f32>], stores: usize, n: usize) -> (Vec<Vec<f32>>, Vec<u64>) {
    // Margins on both sides detect writes out of bounds.
    const MARK: f32 = 12345.0;
    let mut loads = loads.to_vec();
    let mut results: Vec<Vec<f32>> = (0..stores).map(|_| vec![MARK; n + 32]).collect();
    let mut bases: Vec<*mut u8> = loads.iter_mut().map(|load| load.as_mut_ptr().cast()).collect();
    // SAFETY: each buffer has a margin of 16 elements before the results.
    bases.extend(results.iter_mut().map(|store| unsafe { store.as_mut_ptr().add(16) }.cast::<u8>()));
    let mut frame = vec![0u128; tape.frame.div_ceil(16) + 4];
    let at = frame.as_mut_ptr().cast::<u8>();
    let at = at.wrapping_add(at.align_offset(64));
    let scalars = RunScalars { seed: 1, train_step: 2 };
    let site = ExecContext { program: tape, bases: &bases, scalars, frame: at, product: std::ptr::null() };
    let mut totals = Vec::new();
    // SAFETY: the frame has the size of the program's frame, the buffers have `n` elements, and operations run in
    // order.
    unsafe {
        at.cast::<Failure>().write(Failure::NONE);
        site.run(&tape.per_run, 0, 0, tape.tile);
        for stage in &tape.stages {
            site.run(&stage.pre, 0, 0, tape.tile.min(n));
            for total in &stage.reductions {
                (*site.register_ptr::<PairwiseSum>(total.state)).reset();
            }
            for (start, count) in tape.tiles(0, n) {
                site.run(&stage.body, 0, start, count);
            }
            for total in &stage.reductions {
                let result = (*site.register_ptr::<PairwiseSum>(total.state)).result(total.op, total.ty);
                site.register_ptr::<u64>(total.result).write(result);
                totals.push(result);
            }
        }
        site.run(&tape.post, 0, 0, 1);
    }
    for store in &results {
        let outside = store[..16].iter().chain(&store[16 + n..]);
        assert!(outside.into_iter().all(|&value| value == MARK), "written outside of {n} elements");
    }
    (results.into_iter().map(|store| store[16..16 + n].to_vec()).collect(), totals)
}

/// Compares a nest with and without machine code at every level. Returns true if all tile operations were machine code.
fn check(nest: &Nest, loads: &[Vec<f32>], what: &str) -> bool {
    let n = nest.dims[0];
    let mut is_complete = true;
    for isa in levels() {
        let drive = if nest.inner == 0 { LoopOrder::Map } else { LoopOrder::Row };
        let plan = LoopPlan { nest, loop_order: drive, outer_axes: &[], tile_axes: &[0] };
        let (tape, plain) = (
            TileProgram::new(&plan, isa).expect("good"),
            TileProgram::new(&plan, Compiler::without_machine_code(isa)).expect("good"),
        );
        assert!(
            !plain.stages.iter().any(|stage| stage.body.iter().any(|op| matches!(op.kind, Kind::Native(_))))
        );
        is_complete &= is_all_machine_code(&tape);
        let (actual, totals) = run(&tape, loads, nest.stores.len(), n);
        let (expected, expected_totals) = run(&plain, loads, nest.stores.len(), n);
        for (k, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
            for (i, (a, b)) in actual.iter().zip(expected).enumerate() {
                let same = a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                assert!(same, "{what}, {isa}, {n} elements: result {k}[{i}] is {a:e}, without code {b:e}");
            }
        }
        for (k, (a, b)) in totals.iter().zip(&expected_totals).enumerate() {
            let [a, b] = [a, b].map(|&bits| f32::from_bits(bits as u32));
            assert!(
                a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(),
                "{what}, {isa}: total {k} {a:e}, {b:e}"
            );
        }
    }
    is_complete
}

/// Segments of any length and at any offset, in place, with their own sums and settings.
#[test]
fn segments_match_the_interpreter() {
    let lengths: Vec<usize> = LENGTHS.into_iter().chain([0, 1, 60_000, 3, 50_000, 40_000]).collect();
    let mut end = 1;
    let segments = Segments::new(lengths.iter().map(|&length| {
        let start = end;
        end = start + length + length % 3;
        start..start + length
    }));
    let (count, len) = (lengths.len(), end);
    let access = |strides: [isize; 2], offset: usize, len: usize| Access {
        dtype: DType::F32,
        offset,
        strides: strides.into_iter().collect(),
        len,
    };
    let (plane, setting) = (access([0, 1], 0, len), |k: usize| access([8, 0], k, 8 * count));
    for inner in [0, 1] {
        let mut b = Builder::new();
        let [x, y, rate, decay] = [0, 1, 2, 3].map(|slot| b.load(slot, Type::F32));
        let factor = b.mul(rate, decay);
        let power = b.unary(UnaryOp::Exp, factor);
        let change = b.mul(y, power);
        let mut result = b.sub(x, change);
        let square = b.mul(change, change);
        let mut results = Vec::new();
        if inner == 1 {
            let sum = b.reduced(0, Type::F32);
            let root = b.unary(UnaryOp::Sqrt, sum);
            result = b.div(result, root);
            results.push(sum);
        }
        results.insert(0, result);
        let values: Vec<Reg> = if inner == 1 { vec![square] } else { Vec::new() };
        let (expr, values) = b.finish_keeping(&results, &values);
        let mut stores = vec![plane.clone(), setting(7)];
        stores.truncate(1 + inner);
        let nest = Nest {
            dims: [count, len].into_iter().collect(),
            inner,
            segments: Some(segments.clone()),
            loads: [plane.clone(), plane.clone(), setting(0), setting(5)].map(Load::Buffer).to_vec(),
            expr,
            reductions: values.into_iter().map(|value| Reduction { op: ReduceOp::Sum, value }).collect(),
            stores,
        };
        for isa in levels() {
            let run = |compiler: Compiler<'_>| {
                let kernel = NestKernel::new(&nest, compiler).expect("good");
                let (mut x, mut y) = (numbers(len, 1), numbers(len, 2));
                let mut table = numbers(8 * count, 3);
                let bases = [&mut x, &mut y, &mut table].map(|buffer| buffer.as_mut_ptr().cast::<u8>());
                let mut bases = vec![bases[0], bases[1], bases[2], bases[2], bases[0], bases[2]];
                bases.truncate(5 + inner);
                let mut scratch = vec![0u128; kernel.scratch_bytes(2).div_ceil(16) + 4];
                let at = scratch.as_mut_ptr().cast::<u8>();
                let at = at.wrapping_add(at.align_offset(64));
                let scratch = Scratch::new(at, kernel.scratch_bytes(2));
                // SAFETY: buffers have the lengths of their accesses. A buffer that is both loaded and stored has equal
                // accesses, or separate columns.
                unsafe { kernel.run(&bases, RunScalars::default(), &Pool::new(2), scratch) }
                    .expect("no guards");
                [x, table].concat()
            };
            let (actual, expected) = (run(isa.into()), run(Compiler::without_machine_code(isa)));
            for (i, (a, b)) in actual.iter().zip(&expected).enumerate() {
                let same = a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                assert!(same, "{inner} reduced, {isa}: element {i} is {a:e}, without code {b:e}");
            }
        }
    }
}

/// Values that each row has once are read directly, at any alignment, with more pointers than registers hold.
#[test]
fn per_row_values_match_the_interpreter() {
    const ROWS: usize = 3;
    const SINGLES: usize = 11;
    for n in [2, 15, 16, 49, 200] {
        let mut b = Builder::new();
        let x = b.load(0, Type::F32);
        let singles: Vec<_> = (1..=SINGLES).map(|slot| b.load(slot, Type::F32)).collect();
        // The product of two uniform values is uniform, too.
        let factor = b.mul(singles[0], singles[1]);
        let mut value = b.mul(x, factor);
        for (k, &single) in singles.iter().enumerate() {
            let op = BINARY[k % BINARY.len()];
            value = if k % 2 == 0 { b.binary(op, value, single) } else { b.binary(op, single, value) };
        }
        let plane = Access::contiguous(DType::F32, &[ROWS, n]);
        // Two elements from row to row, at an address that is not aligned for numbers.
        let single = |k: usize| Access {
            dtype: DType::F32,
            offset: k,
            strides: [2, 0].into_iter().collect(),
            len: SINGLES + 2 * ROWS,
        };
        let loads =
            std::iter::once(plane.clone()).chain((0..SINGLES).map(single)).map(Load::Buffer).collect();
        let dims = [ROWS, n].into_iter().collect();
        let (expr, stores) = (b.finish(&[value]), vec![plane]);
        let nest = Nest { dims, inner: 0, segments: None, loads, expr, reductions: Vec::new(), stores };
        let plan = LoopPlan { nest: &nest, loop_order: LoopOrder::Map, outer_axes: &[0], tile_axes: &[1] };
        let x = numbers(ROWS * n, 1);
        let per_row = numbers(SINGLES + 2 * ROWS, 2);
        let bytes: Vec<u8> = [0].into_iter().chain(per_row.iter().flat_map(|v| v.to_ne_bytes())).collect();
        let result = |tape: &TileProgram| {
            let (mut x, mut bytes, mut result) = (x.clone(), bytes.clone(), vec![0f32; ROWS * n]);
            let mut bases = vec![x.as_mut_ptr().cast::<u8>()];
            bases.extend((0..SINGLES).map(|_| bytes[1..].as_mut_ptr()));
            bases.push(result.as_mut_ptr().cast());
            let mut frame = vec![0u128; tape.frame.div_ceil(16) + 4];
            let at = frame.as_mut_ptr().cast::<u8>();
            let at = at.wrapping_add(at.align_offset(64));
            let scalars = RunScalars { seed: 1, train_step: 2 };
            let site =
                ExecContext { program: tape, bases: &bases, scalars, frame: at, product: std::ptr::null() };
            // SAFETY: as in `run`.
            unsafe {
                at.cast::<Failure>().write(Failure::NONE);
                site.run(&tape.per_run, 0, 0, tape.tile);
                for row in 0..ROWS {
                    for (start, count) in tape.tiles(0, n) {
                        site.run(&tape.stages[0].body, row, start, count);
                    }
                }
            }
            result
        };
        for isa in levels() {
            let (tape, plain) = (
                TileProgram::new(&plan, isa).expect("good"),
                TileProgram::new(&plan, Compiler::without_machine_code(isa)).expect("good"),
            );
            assert!(
                tape.stages[0].body.iter().all(|op| matches!(op.kind, Kind::Native(_))),
                "loads of their own"
            );
            for (i, (a, b)) in result(&tape).into_iter().zip(result(&plain)).enumerate() {
                let same = a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
                assert!(same, "{isa}, {n} elements: [{i}] is {a:e}, without code {b:e}");
            }
        }
    }
}

/// Returns special numbers of every kind, and many numbers of moderate size.
fn numbers(n: usize, seed: u32) -> Vec<f32> {
    const SPECIAL: [f32; 16] = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MIN_POSITIVE,
        1e-45,
        -1e-40,
        f32::MAX,
        f32::MIN,
        88.9,
        -103.5,
        0.925,
        0.625,
    ];
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    };
    let mut next_number = || {
        let bits = next();
        match bits % 8 {
            0 => SPECIAL[(bits >> 8) as usize % SPECIAL.len()],
            1 => f32::from_bits(next()),
            _ => (next() as f32 / u32::MAX as f32 - 0.5) * 12.0,
        }
    };
    (0..n).map(|_| next_number()).collect()
}

fn nest(n: usize, loads: usize, build: impl FnOnce(&mut Builder, &[Reg]) -> Vec<Reg>) -> Nest {
    let mut b = Builder::new();
    let x: Vec<Reg> = (0..loads).map(|slot| b.load(slot, Type::F32)).collect();
    let outputs = build(&mut b, &x);
    let plane = Access::contiguous(DType::F32, &[n]);
    Nest {
        dims: [n].into_iter().collect(),
        inner: 0,
        segments: None,
        loads: vec![Load::Buffer(plane.clone()); loads],
        stores: vec![plane; outputs.len()],
        expr: b.finish(&outputs),
        reductions: Vec::new(),
    }
}

#[test]
fn every_operation_matches_the_interpreter() {
    for n in LENGTHS {
        let loads = [numbers(n, 1), numbers(n, 2), numbers(n, 3)];
        for op in UNARY {
            let nest = nest(n, 1, |b, x| vec![b.unary(op, x[0])]);
            assert!(check(&nest, &loads[..1], &format!("{op:?}")), "no code for {op:?}");
        }
        let rounded = nest(n, 1, |b, x| vec![b.unary(UnaryOp::Round, x[0])]);
        assert!(check(&rounded, &loads[..1], "rounding"), "no code for rounding");
        for (from, to) in [(Type::I32, Type::U32), (Type::U32, Type::I32)] {
            for scale in [1.0, 1e3, 1e8, 1e9, 1e10] {
                let integers = nest(n, 1, |b, x| {
                    let scale = b.constant(Type::F32, scale);
                    let scaled = b.mul(x[0], scale);
                    let integer = b.convert(scaled, from);
                    let other = b.convert(integer, to);
                    vec![b.convert(integer, Type::F32), b.convert(other, Type::F32)]
                });
                let what = format!("{from:?} of numbers times {scale}");
                assert!(check(&integers, &loads[..1], &what), "no code for {what}");
            }
        }
        for op in BINARY {
            let two = nest(n, 2, |b, x| vec![b.binary(op, x[0], x[1])]);
            assert!(check(&two, &loads[..2], &format!("{op:?}")), "no code for {op:?}");
            for constant in [0.0, -0.0, 1.5, f64::NAN] {
                let right = nest(n, 1, |b, x| {
                    let constant = b.constant(Type::F32, constant);
                    vec![b.binary(op, x[0], constant), b.binary(op, constant, x[0])]
                });
                assert!(check(&right, &loads[..1], &format!("{op:?} with {constant}")));
            }
        }
        for op in [CompareOp::Eq, CompareOp::Lt, CompareOp::Le] {
            for join in [BinaryOp::And, BinaryOp::Or, BinaryOp::Xor] {
                let nest = nest(n, 3, |b, x| {
                    let one = b.compare(op, x[0], x[1]);
                    let other = b.compare(op, x[1], x[2]);
                    let both = b.binary(join, one, other);
                    vec![b.select(both, x[0], x[2]), b.convert(both, Type::F32)]
                });
                assert!(check(&nest, &loads, &format!("{op:?} {join:?}")), "no code for {op:?}");
            }
        }
    }
}

/// Bytes become numbers, and numbers become bytes: inside of a range, or as the lowest bits of an integer.
#[test]
fn bytes_match_the_interpreter() {
    for n in LENGTHS {
        let loads = [numbers(n, 6), numbers(n, 7)];
        for (dtype, low, high) in [(DType::U8, 0.0, 255.0), (DType::I8, -128.0, 127.0)] {
            let integer = Type::of(dtype);
            let mut bytes = nest(n, 1, |b, x| {
                let byte = b.load(1, integer);
                let number = b.convert(byte, Type::F32);
                let scaled = b.mul(number, x[0]);
                let [low, high] = [low, high].map(|limit| b.constant(Type::F32, limit));
                let capped = b.binary(BinaryOp::Min, scaled, high);
                let clamped = b.binary(BinaryOp::Max, capped, low);
                vec![number, b.convert(clamped, integer), b.convert(scaled, integer), byte]
            });
            let plane = Access::contiguous(dtype, &[n]);
            bytes.loads.push(Load::Buffer(plane.clone()));
            bytes.stores[1..].fill(plane);
            check(&bytes, &loads, &format!("{dtype}"));
            for isa in levels().into_iter().filter(|isa| Target::resources(isa.kind()).has_bytes) {
                let plan =
                    LoopPlan { nest: &bytes, loop_order: LoopOrder::Map, outer_axes: &[], tile_axes: &[0] };
                assert!(is_all_machine_code(&TileProgram::new(&plan, isa).expect("good")), "{dtype}");
            }
        }
    }
}

#[test]
fn truth_values_cross_group_boundaries() {
    for n in LENGTHS {
        let loads = [numbers(n, 4), numbers(n, 5)];
        // Groups do not support sines, so the condition of the selection leaves one group and is read by another.
        let nest = nest(n, 2, |b, x| {
            let test = b.compare(CompareOp::Lt, x[0], x[1]);
            let chosen = b.select(test, x[0], x[1]);
            let sine = b.unary(UnaryOp::Sin, chosen);
            let not = b.unary(UnaryOp::Not, test);
            let selected = b.select(not, sine, x[0]);
            vec![b.add(selected, chosen)]
        });
        assert!(!check(&nest, &loads, "truths"));
    }
}

#[test]
fn folds_match_the_interpreter() {
    for n in LENGTHS {
        for op in [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min] {
            for loads in [vec![numbers(n, 6)], vec![numbers(n, 7).iter().map(|x| x.sin()).collect()]] {
                let mut b = Builder::new();
                let x = b.load(0, Type::F32);
                let square = b.mul(x, x);
                let (first, second) = (b.reduced(0, Type::F32), b.reduced(1, Type::F32));
                let shifted = b.sub(x, first);
                let result = b.mul(shifted, second);
                let (expr, values) = b.finish_keeping(&[result], &[x, square]);
                let plane = Access::contiguous(DType::F32, &[n]);
                let nest = Nest {
                    dims: [n].into_iter().collect(),
                    inner: 1,
                    segments: None,
                    loads: vec![Load::Buffer(plane.clone())],
                    stores: vec![plane],
                    expr,
                    reductions: values.into_iter().map(|value| Reduction { op, value }).collect(),
                };
                assert!(check(&nest, &loads, &format!("fold {op:?}")), "no code for {op:?}");
            }
        }
    }
}

#[test]
fn spilled_values_match_the_interpreter() {
    // A sum with all terms computed before the first addition.
    let n = 100;
    for terms in [10, 40, 100] {
        let nest = nest(n, 2, |b, x| {
            let terms: Vec<Reg> = (0..terms)
                .map(|k| {
                    let factor = b.constant(Type::F32, f64::from(k) + 0.5);
                    let product = b.mul(x[0], factor);
                    b.unary(UnaryOp::Abs, product)
                })
                .collect();
            let sum = terms.iter().copied().reduce(|a, c| b.add(a, c)).expect("some");
            // Uses each term once more, from the last one on.
            let total = terms.iter().rev().fold(sum, |a, &c| {
                let product = b.mul(a, x[1]);
                b.sub(c, product)
            });
            vec![total]
        });
        check(&nest, &[numbers(n, 8), numbers(n, 9)], &format!("{terms} terms"));
    }
}

/// Nests with `live` values that are computed before the first is used again, in reverse order: one stores the result,
/// and one sums it.
fn nests_with_live_values(live: u32, n: usize) -> [Nest; 2] {
    let build = |b: &mut Builder, x: Reg| {
        let live_values: Vec<Reg> = (0..live)
            .map(|k| {
                let factor = b.constant(Type::F32, f64::from(k) + 0.5);
                b.mul(x, factor)
            })
            .collect();
        let sum = live_values.iter().fold(x, |a, &c| b.add(a, c));
        live_values.iter().rev().fold(sum, |a, &c| {
            let half = b.constant(Type::F32, 0.5);
            let a = b.mul(a, half);
            b.sub(c, a)
        })
    };
    let map = nest(n, 1, |b, x| vec![build(b, x[0])]);
    let mut b = Builder::new();
    let x = b.load(0, Type::F32);
    let (value, sum) = (build(&mut b, x), b.reduced(0, Type::F32));
    let result = b.add(x, sum);
    let (expr, values) = b.finish_keeping(&[result], &[value]);
    let reductions = values.into_iter().map(|value| Reduction { op: ReduceOp::Sum, value }).collect();
    let row = Nest { inner: 1, expr, reductions, ..map.clone() };
    [map, row]
}

#[test]
fn register_pressure_matches_the_interpreter() {
    for n in LENGTHS {
        for live in [1, 3, 4, 6, 8, 12, 16, 30, 60, 100] {
            for nest in nests_with_live_values(live, n) {
                check(&nest, &[numbers(n, 10)], &format!("{live} values at once"));
            }
        }
    }
}

/// Vector instructions with the live ranges of [`nests_with_live_values`].
fn program_with_live_values(live: u32, level: Level) -> VectorProgram {
    let mut lanes = VectorProgram::new(level, Target::resources(level).has_scale);
    let x = lanes.push(VectorInst::Memory(0));
    let values: Vec<_> = (0..live)
        .map(|k| {
            let factor = lanes.push(VectorInst::Constant((k as f32 + 0.5).to_bits()));
            lanes.binary(BinaryOp::Mul, x, factor).expect("known")
        })
        .collect();
    let sum = values.iter().fold(x, |a, &c| lanes.binary(BinaryOp::Add, a, c).expect("known"));
    let last = values.iter().rev().fold(sum, |a, &c| lanes.binary(BinaryOp::Sub, c, a).expect("known"));
    lanes.effects.push(Effect::Memory(1, last));
    lanes
}

/// Generates code for every level, even for a level that the machine does not have.
#[test]
fn interleaving_depends_on_live_values() {
    let fits = |lanes: &VectorProgram, abreast| {
        emit_interleaved::<Target>(&ValueOrder::new(lanes), abreast).is_some()
    };
    let numbers = |level| if level == Level::Avx512 { &[2, 1][..] } else { &[4, 2, 1] };
    for (level, live, limit) in [
        (Level::Avx2, 2, 4),
        (Level::Avx2, 8, 2),
        (Level::Avx2, 30, 1),
        (Level::Avx512, 2, 2),
        (Level::Avx512, 12, 2),
        (Level::Avx512, 60, 1),
    ] {
        let lanes = program_with_live_values(live, level);
        for &abreast in numbers(level) {
            assert_eq!(
                fits(&lanes, abreast),
                abreast <= limit,
                "{live} values, {abreast} vectors, {level:?}"
            );
        }
    }
    for level in [Level::Avx2, Level::Avx512] {
        assert!(!fits(&program_with_live_values(100, level), 1), "more than the stack is for");
        // Common functions run with the maximum number of interleaved vectors.
        for op in [UnaryOp::Exp, UnaryOp::Log, UnaryOp::Tanh, UnaryOp::Sigmoid, UnaryOp::Erf] {
            let mut lanes = VectorProgram::new(level, Target::resources(level).has_scale);
            let x = lanes.push(VectorInst::Memory(0));
            let y = lanes.unary(op, x).expect("known");
            lanes.effects.push(Effect::Memory(1, y));
            assert!(fits(&lanes, numbers(level)[0]), "{op:?}, {level:?}");
        }
    }
}

/// Instructions that multiply callers' elements by a constant.
fn product_program(factor: f32, level: Level) -> VectorProgram {
    let mut lanes = VectorProgram::new(level, Target::resources(level).has_scale);
    let [x, factor] =
        [VectorInst::Memory(0), VectorInst::Constant(factor.to_bits())].map(|lane| lanes.push(lane));
    let product = lanes.binary(BinaryOp::Mul, x, factor).expect("lanes have a product");
    lanes.effects.push(Effect::Memory(1, product));
    lanes.prefetch_steps.extend([None, None]);
    lanes
}

#[test]
fn equal_programs_share_code() {
    let of = |factor: f32, level: Level| get_or_assemble(product_program(factor, level)).expect("few values");
    let first = of(2.0, Level::Avx2);
    assert!(Arc::ptr_eq(&first, &of(2.0, Level::Avx2)));
    let mut stepping = product_program(2.0, Level::Avx2);
    stepping.prefetch_steps[0] = Some(4096);
    let stepping = get_or_assemble(stepping).expect("few values");
    for other in [of(3.0, Level::Avx2), of(2.0, Level::Avx512), stepping] {
        assert!(!Arc::ptr_eq(&first, &other));
    }
    // Evicted code is compiled again.
    (0..=MAX_CACHED_FUNCTIONS).for_each(|k| drop(of(4.0 + k as f32, Level::Avx2)));
    let second = of(2.0, Level::Avx2);
    assert!(!Arc::ptr_eq(&first, &second));
    let bytes = |code: &Code| {
        let mut bytes = Vec::new();
        code.append_to(&mut bytes, |slot| slot);
        bytes
    };
    assert_eq!(bytes(&first), bytes(&second));
}

/// Comparisons of coordinates with one number, in both orders and along every axis.
#[test]
fn coordinate_comparisons_match() {
    let dims = [3, 7, 40];
    let n: usize = dims.iter().product();
    for axis in 0..3 {
        for op in [CompareOp::Eq, CompareOp::Lt, CompareOp::Le] {
            for constant in [-1, 0, 1, 2, 5, 39, 40, i64::MIN, i64::MAX] {
                let mut b = Builder::new();
                let (x, index) = (b.load(0, Type::F32), b.coordinate(axis));
                let operand = b.load(1, Type::I64);
                let (before, after) = (b.compare(op, index, operand), b.compare(op, operand, index));
                let zero = b.constant(Type::F32, 0.0);
                let outputs = [before, after].map(|truth| b.select(truth, x, zero));
                let plane = Access::contiguous(DType::F32, &dims);
                let single = Access { strides: [0; 3].into_iter().collect(), len: 1, ..plane.clone() };
                let nest = Nest {
                    dims: dims.into_iter().collect(),
                    inner: 0,
                    segments: None,
                    loads: [plane.clone(), Access { dtype: DType::I64, ..single }].map(Load::Buffer).to_vec(),
                    stores: vec![plane.clone(), plane],
                    expr: b.finish(&outputs),
                    reductions: Vec::new(),
                };
                let compare = |a: i64, b: i64| match op {
                    CompareOp::Eq => a == b,
                    CompareOp::Lt => a < b,
                    CompareOp::Le => a <= b,
                };
                let x: Vec<f32> = (0..n).map(|i| i as f32 + 1.0).collect();
                let operands: Vec<f32> =
                    [constant as u32, (constant >> 32) as u32].into_iter().map(f32::from_bits).collect();
                for isa in Isa::available() {
                    let plan = LoopPlan {
                        nest: &nest,
                        loop_order: LoopOrder::Map,
                        outer_axes: &[],
                        tile_axes: &[0, 1, 2],
                    };
                    let tape = TileProgram::new(&plan, isa).expect("good");
                    let ops = tape.stages.iter().flat_map(|stage| &stage.body);
                    assert!(!ops.clone().any(|op| matches!(op.kind, Kind::Coordinate { .. })));
                    let (actual, _) = run(&tape, &[x.clone(), operands.clone()], 2, n);
                    for i in 0..n {
                        let index = (i / dims[axis + 1..].iter().product::<usize>() % dims[axis]) as i64;
                        let expected = [compare(index, constant), compare(constant, index)];
                        let expected_values = expected.map(|truth| if truth { x[i] } else { 0.0 });
                        assert_eq!(
                            [actual[0][i], actual[1][i]],
                            expected_values,
                            "{op:?} {constant}, axis {axis}, {isa}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn more_buffers_than_pointers() {
    let (n, count) = (50, 60);
    let nest = nest(n, count, |b, x| {
        let sum = x.iter().copied().reduce(|a, c| b.add(a, c)).expect("some");
        x.iter().take(30).map(|&x| b.mul(x, sum)).collect()
    });
    let loads: Vec<Vec<f32>> = (0..count).map(|seed| numbers(n, seed as u32)).collect();
    check(&nest, &loads, "many buffers");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Random expressions with values that are used several times.
    #[test]
    fn random_expressions(
        steps in prop::collection::vec((0u8..28, any::<u16>(), any::<u16>(), any::<u16>()), 1..40),
        n in 1usize..150,
        seed in any::<u32>(),
    ) {
        let nest = nest(n, 3, |b, x| {
            let mut values = x.to_vec();
            let mut truths: Vec<Reg> = vec![b.compare(CompareOp::Lt, x[0], x[1])];
            for (what, i, j, k) in steps {
                let value = |index: u16, values: &[Reg]| values[usize::from(index) % values.len()];
                let (p, q) = (value(i, &values), value(j, &values));
                match what {
                    0..13 => values.push(b.unary(UNARY[usize::from(what)], p)),
                    13..19 => values.push(b.binary(BINARY[usize::from(what) - 13], p, q)),
                    19 => truths.push(b.compare(CompareOp::Le, p, q)),
                    20 => {
                        let (left, other) = (value(i, &truths), value(j, &truths));
                        truths.push(b.binary(BinaryOp::Xor, left, other));
                    }
                    21 => {
                        let truth = value(k, &truths);
                        values.push(b.select(truth, p, q));
                    }
                    22 => {
                        let truth = value(i, &truths);
                        values.push(b.convert(truth, Type::F32));
                    }
                    23 => values.push(b.constant(Type::F32, f64::from(i) / 1000.0)),
                    24 => values.push(b.unary(UnaryOp::Sin, p)),
                    25 => values.push(b.unary(UnaryOp::Round, p)),
                    26 => {
                        let integer = b.convert(p, if j % 2 == 0 { Type::I32 } else { Type::U32 });
                        values.push(b.convert(integer, Type::F32));
                    }
                    _ => {
                        let product = b.mul(p, q);
                        let third = value(k, &values);
                        values.push(b.add(product, third));
                    }
                }
            }
            let last = values.len() - 1;
            vec![values[last], values[last / 2], values[last / 3]]
        });
        check(&nest, &[numbers(n, seed), numbers(n, seed ^ 1), numbers(n, seed ^ 2)], "random");
    }
}
