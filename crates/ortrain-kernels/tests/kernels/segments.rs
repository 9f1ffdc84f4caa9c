//! Tests of nests over segments of a plane.

use std::iter::repeat_n;
use std::ops::Range;

use ortrain_expr::{
    Access, BinaryOp, Builder, DType, Inst, Load, Nest, OutOfRange, ReduceOp, Reduction, Reg, Segments, Type,
    UnaryOp,
};
use ortrain_kernels::{Isa, NestKernel, Order, Pool};
use proptest::prelude::*;

use crate::common::*;
use crate::maps::{buffers, random_expr, without_gathered_strides};

/// Returns segments of random lengths, some with gaps between them, and the length of the plane.
fn random_segments(random: &mut Random) -> (Vec<Range<usize>>, usize) {
    let lengths: &[usize] = match random.below(5) {
        0 => &[0, 1, 2, 3],
        1 => &[1],
        // The long ones are cut.
        2 => &[0, 5, 64, 700, 9_000, 20_000],
        _ => &[0, 1, 7, 63, 64, 65, 100, 500],
    };
    let count = if random.chance(15) { random.below(150) } else { random.below(7) };
    let gaps = if random.chance(30) { 1 } else { 40 };
    let mut end = 0;
    let mut segments = Vec::new();
    for _ in 0..count {
        let start = end + random.below(gaps);
        end = start + random.pick(lengths);
        // Limits the time of the reference.
        end = if end > 40_000 { start + 1 } else { end };
        segments.push(start..end);
    }
    (segments, end + random.below(gaps))
}

/// Returns an access with these strides and a random offset.
fn access_at_random_offset(
    random: &mut Random,
    dtype: DType,
    dims: [usize; 2],
    strides: [isize; 2],
) -> Access {
    let mut access = Access { dtype, offset: 0, strides: strides.into_iter().collect(), len: 0 };
    let dims = dims.map(|dim| dim.max(1));
    let (low, high) = access.position_range(&dims).unwrap();
    access.offset = (random.below(3) as isize - low) as usize;
    access.len = (access.offset as isize + high) as usize + 1 + random.below(4);
    access
}

fn random_access_of_segments(random: &mut Random, dims: [usize; 2], along: bool, store: bool) -> Access {
    let dtype = random.pick(&DType::ALL);
    let len = dims[1].max(1) as isize;
    let strides = match (along, random.below(10)) {
        (true, 0) => [0, 2],
        (true, 1) => [0, -1],
        (true, 2) if dims[0] * dims[1] < 100_000 => [len, 1],
        (true, 3) if !store => [1, 1],
        (true, _) => [0, 1],
        (false, 0) if !store => [0, 0],
        (false, 1) => [-3, 0],
        (false, 2) => [64, 0],
        (false, 3) => [8, 0],
        (false, _) => [1, 0],
    };
    access_at_random_offset(random, dtype, dims, strides)
}

/// Returns a nest with exact results: sums of integers, minima and maxima of any type, or no reductions.
fn random_nest(random: &mut Random) -> Nest {
    let (segments, len) = random_segments(random);
    let dims = [segments.len(), len];
    let inner = random.below(2);
    let row_loads = random.below(3);
    let loads: Vec<Access> = (0..row_loads + random.below(3))
        .map(|k| random_access_of_segments(random, dims, k >= row_loads, false))
        .collect();
    let mut b = Builder::new();
    let mut row = vec![b.int(2)];
    let mut all_axes = row.clone();
    let mut reductions = Vec::new();
    for k in 0..if inner == 0 { 0 } else { random.below(4) } {
        let count = random.below(8);
        random_expr(random, &mut b, &loads[..row_loads], 1, &mut row, count);
        all_axes.extend(&row);
        let count = random.below(8);
        random_expr(random, &mut b, &loads, 2, &mut all_axes, count);
        let numbers: Vec<Reg> = all_axes.iter().copied().filter(|&reg| b.ty(reg) != Type::Bool).collect();
        let value = random.pick(&numbers);
        let ty = b.ty(value);
        let ops: &[ReduceOp] = if ty.is_float() {
            &[ReduceOp::Max, ReduceOp::Min]
        } else {
            &[ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min]
        };
        reductions.push(Reduction { op: random.pick(ops), value });
        row.push(b.reduced(k, ty));
    }
    let count = 1 + random.below(8);
    random_expr(random, &mut b, &loads[..row_loads], 1, &mut row, count);
    all_axes.extend(&row);
    let count = 1 + random.below(12);
    random_expr(random, &mut b, &loads, 2, &mut all_axes, count);
    let (mut stores, mut outputs) = (Vec::new(), Vec::new());
    for _ in 0..1 + random.below(3) {
        let along = inner == 0 || random.chance(50);
        outputs.push(random.pick(if along { &all_axes } else { &row }));
        stores.push(random_access_of_segments(random, dims, along, true));
    }
    let values: Vec<Reg> = reductions.iter().map(|reduction| reduction.value).collect();
    let (expr, values) = b.finish_keeping(&outputs, &values);
    reductions.iter_mut().zip(values).for_each(|(reduction, value)| reduction.value = value);
    for store in stores.iter_mut().filter(|store| store.strides[1] < 0) {
        // One element for each position, independent of the segment.
        store.strides[0] = 0;
    }
    without_gathered_strides(Nest {
        dims: dims.into_iter().collect(),
        inner,
        segments: Some(Segments::new(segments)),
        loads: loads.into_iter().map(Load::Buffer).collect(),
        expr,
        reductions,
        stores,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

    /// Compares complete buffers: elements outside of segments must not change.
    #[test]
    fn segments_compute_what_the_reference_computes(seed: u64) {
        let mut random = Random(seed);
        let nest = random_nest(&mut random);
        prop_assert_eq!(nest.validate(), None);
        let (loads, outs) = buffers(&mut random, &nest);
        let expected = reference(&nest, &loads, &outs).unwrap();
        for isa in Isa::available() {
            for threads in [1, 3] {
                let got = run(&nest, isa, Order::Auto, threads, &loads, &outs).unwrap();
                for ((store, got), expected) in nest.stores.iter().zip(&got).zip(&expected) {
                    let what = format!(
                        "{:?} of {:?}, {:?} {} at {isa}",
                        nest.segments, nest.dims, nest.reductions, nest.expr
                    );
                    assert_same(store.dtype, got, expected, &what);
                }
            }
        }
    }
}

const F32: DType = DType::F32;

fn access(dtype: DType, strides: [isize; 2], offset: usize, len: usize) -> Access {
    Access { dtype, offset, strides: strides.into_iter().collect(), len }
}

/// Returns segments with the lengths of tensors of a model, with gaps up to multiples of 64 elements.
fn segments_of_tensors(lengths: &[usize]) -> (Segments, usize) {
    let mut start = 0;
    let segments = Segments::new(lengths.iter().map(|&length| {
        let range = start..start + length;
        start = range.end.next_multiple_of(64);
        range
    }));
    (segments, start)
}

/// Returns the planes of several models: one tensor, tensors of all sizes, many tiny ones, some without elements.
fn segments_of_models() -> Vec<(Segments, usize)> {
    let tiny: Vec<usize> = (0..1000).map(|k| 1 + k * 7 % 64).collect();
    let mixed = [64, 0, 30_000, 1, 10_000, 70_001, 17, 0, 64, 6_536, 3, 1000];
    vec![
        segments_of_tensors(&[100_000]),
        segments_of_tensors(&mixed),
        segments_of_tensors(&tiny),
        segments_of_tensors(&[0, 0, 5, 0]),
    ]
}

/// Update in place, like AdamW, with two settings for each segment, some of them with powers.
fn adamw((segments, len): &(Segments, usize), dtype: DType) -> Nest {
    let ty = Type::of(dtype);
    let plane = access(dtype, [0, 1], 0, *len);
    let settings = |k: usize| access(F32, [8, 0], k, 8 * segments.len());
    let mut b = Builder::new();
    let [p, m, v, g] = [0, 1, 2, 3].map(|slot| b.load(slot, ty));
    let [rate, decay] = [4, 5].map(|slot| {
        let setting = b.load(slot, Type::F32);
        b.convert(setting, ty)
    });
    let [beta, one, two] = [0.9, 1.0, 2.0].map(|value| b.constant(ty, value));
    let power = b.binary(BinaryOp::Pow, beta, decay);
    let correction = b.sub(one, power);
    let step = b.div(rate, correction);
    let square = b.mul(g, g);
    let [m, v] = [(m, g), (v, square)].map(|(old, new)| {
        let difference = b.sub(new, old);
        let tenth = b.sub(one, beta);
        let change = b.mul(difference, tenth);
        b.add(old, change)
    });
    let root = b.unary(UnaryOp::Sqrt, v);
    let root = b.add(root, two);
    let change = b.div(m, root);
    let change = b.mul(change, step);
    let p = b.sub(p, change);
    Nest {
        dims: [segments.len(), *len].into_iter().collect(),
        inner: 0,
        segments: Some(segments.clone()),
        loads: repeat_n(plane.clone(), 4).chain([0, 3].map(settings)).map(Load::Buffer).collect(),
        expr: b.finish(&[p, m, v]),
        reductions: Vec::new(),
        stores: vec![plane; 3],
    }
}

/// Two dependent sums of each segment: the sum, and the sum of the squared differences to the mean. Both are stored,
/// and the plane is divided by the root of the second sum in place. A state of each segment is updated in place.
fn normalization((segments, len): &(Segments, usize), dtype: DType) -> Nest {
    let ty = Type::of(dtype);
    let (plane, count) = (access(dtype, [0, 1], 0, *len), segments.len());
    let table = |k: usize| access(F32, [2, 0], k, 2 * count);
    let state = access(dtype, [1, 0], 0, count);
    let mut b = Builder::new();
    let (x, state_now) = (b.load(0, ty), b.load(1, ty));
    let [sum, squares] = [0, 1].map(|k| b.reduced(k, ty));
    let thousandth = b.constant(ty, 0.001);
    let mean = b.mul(sum, thousandth);
    let shifted = b.mul(mean, state_now);
    let rest = b.sub(x, shifted);
    let square = b.mul(rest, rest);
    let one = b.constant(ty, 1.0);
    let more = b.add(squares, one);
    let scale = b.unary(UnaryOp::Rsqrt, more);
    let scaled = b.mul(x, scale);
    let next = b.add(state_now, scale);
    let (sums_out, squares_out) = (b.convert(sum, Type::F32), b.convert(squares, Type::F32));
    let (expr, values) = b.finish_keeping(&[scaled, next, sums_out, squares_out], &[x, square]);
    Nest {
        dims: [count, *len].into_iter().collect(),
        inner: 1,
        segments: Some(segments.clone()),
        loads: [plane.clone(), state.clone()].map(Load::Buffer).to_vec(),
        expr,
        reductions: values.into_iter().map(|value| Reduction { op: ReduceOp::Sum, value }).collect(),
        stores: vec![plane, state, table(0), table(1)],
    }
}

/// Update in place, like LAMB: a root and two divisions for each element, the sums of squares of their results and of
/// the plane, and a step length that depends on these sums.
fn lamb((segments, len): &(Segments, usize), dtype: DType) -> Nest {
    let ty = Type::of(dtype);
    let plane = access(dtype, [0, 1], 0, *len);
    let rates = access(F32, [1, 0], 0, segments.len());
    let mut b = Builder::new();
    let [p, m, v, g] = [0, 1, 2, 3].map(|slot| b.load(slot, ty));
    let rate = b.load(4, Type::F32);
    let rate = b.convert(rate, ty);
    let [tenth, one, two] = [0.1, 1.0, 2.0].map(|value| b.constant(ty, value));
    let square = b.mul(g, g);
    let [m, v] = [(m, g), (v, square)].map(|(old, new)| {
        let difference = b.sub(new, old);
        let change = b.mul(difference, tenth);
        b.add(old, change)
    });
    let root = b.unary(UnaryOp::Sqrt, v);
    let root = b.add(root, two);
    let step = b.div(m, root);
    // Another division, independent of the first one.
    let share = b.div(p, root);
    let direction = b.add(step, share);
    let squares = [p, direction].map(|value| b.mul(value, value));
    let [weights, steps] = [0, 1].map(|k| b.reduced(k, ty));
    let steps = b.add(steps, one);
    let ratio = b.div(weights, steps);
    let ratio = b.mul(ratio, rate);
    let change = b.mul(ratio, direction);
    let p = b.sub(p, change);
    let (expr, values) = b.finish_keeping(&[p, m, v], &squares);
    Nest {
        dims: [segments.len(), *len].into_iter().collect(),
        inner: 1,
        segments: Some(segments.clone()),
        loads: repeat_n(plane.clone(), 4).chain([rates]).map(Load::Buffer).collect(),
        expr,
        reductions: values.into_iter().map(|value| Reduction { op: ReduceOp::Sum, value }).collect(),
        stores: vec![plane; 3],
    }
}

/// Updates in place that all need the sum first. The last one reads a plane that the first one stores, and the first
/// one reads a plane that the second one stores.
fn chained_updates((segments, len): &(Segments, usize), dtype: DType) -> Nest {
    let ty = Type::of(dtype);
    let plane = access(dtype, [0, 1], 0, *len);
    let mut b = Builder::new();
    let [x, y, z] = [0, 1, 2].map(|slot| b.load(slot, ty));
    let (sum, half) = (b.reduced(0, ty), b.constant(ty, 0.5));
    let first = b.add(x, y);
    let second = b.mul(y, half);
    let change = b.mul(sum, x);
    let third = b.sub(z, change);
    let (expr, values) = b.finish_keeping(&[first, second, third], &[z]);
    Nest {
        dims: [segments.len(), *len].into_iter().collect(),
        inner: 1,
        segments: Some(segments.clone()),
        loads: repeat_n(plane.clone(), 3).map(Load::Buffer).collect(),
        expr,
        reductions: values.into_iter().map(|value| Reduction { op: ReduceOp::Max, value }).collect(),
        stores: vec![plane; 3],
    }
}

/// Runs a nest with its first `in_place` stores to its first loads. Further buffers belong to the other stores.
fn run_in_place(nest: &Nest, isa: Isa, threads: usize, in_place: usize, buffers: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let overlaps = |store: usize, load: usize| store < in_place && store == load;
    let kernel = NestKernel::in_place(nest, isa, &overlaps).unwrap();
    let pool = Pool::new(threads);
    let mut memory = Memory::new(kernel.scratch_bytes(threads));
    let mut buffers = buffers.to_vec();
    let mut bases: Vec<*mut u8> = buffers.iter_mut().map(Vec::as_mut_ptr).collect();
    let loads = nest.loads.len();
    let first: Vec<*mut u8> = bases[..in_place].to_vec();
    bases.splice(loads..loads, first);
    // SAFETY: buffers have the lengths of the accesses, and loads and stores of one buffer have equal accesses.
    unsafe { kernel.run(&bases, SCALARS, &pool, memory.scratch()) }.unwrap();
    buffers
}

fn numbers(random: &mut Random, dtype: DType, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len * dtype.size()];
    for k in 0..len {
        put(&mut bytes, dtype, k, ortrain_expr::Scalar::F64(random.unit()));
    }
    bytes
}

/// Asserts that elements of a plane outside of segments are unchanged.
#[track_caller]
fn assert_gaps_unchanged(segments: &Segments, dtype: DType, before: &[u8], after: &[u8]) {
    let mut start = 0;
    let ends = segments.iter().chain(std::iter::once(before.len() / dtype.size()..0));
    for range in ends {
        let gap = start * dtype.size()..range.start * dtype.size();
        assert_eq!(before[gap.clone()], after[gap], "in front of {range:?}");
        start = range.end;
    }
}

const FLOATS: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::BF16];

/// Checks a nest that updates its first three planes in place. Its results equal the reference on any number of
/// threads, and gaps do not change. `narrow` is the relative error of 16-bit floats. The absolute error near zero is
/// the relative error times `share`.
#[track_caller]
fn assert_updates_planes(
    segments: &Segments,
    nest: &Nest,
    dtype: DType,
    seed: u64,
    (narrow, share): (f64, f64),
) {
    let mut random = Random(seed);
    let lens = nest.load_operands().map(|load| (load.dtype, load.len));
    let before: Vec<Vec<u8>> = lens.map(|(dtype, len)| numbers(&mut random, dtype, len)).collect();
    let expected = reference(nest, &before, &before[..3]).unwrap();
    // Functions are exact to a few units in the last place.
    let relative = match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        _ => narrow,
    };
    for isa in Isa::available() {
        let single = run_in_place(nest, isa, 1, 3, &before);
        for (got, expected) in single.iter().zip(&expected) {
            assert_close(dtype, got, expected, relative, share * relative, &format!("{dtype} at {isa}"));
        }
        for (before, after) in before.iter().zip(&single).take(3) {
            assert_gaps_unchanged(segments, dtype, before, after);
        }
        for threads in [2, 4] {
            assert_eq!(run_in_place(nest, isa, threads, 3, &before), single, "{threads} at {isa}");
        }
    }
}

#[test]
fn a_map_updates_planes_in_place() {
    for model in segments_of_models() {
        for dtype in FLOATS {
            assert_updates_planes(&model.0, &adamw(&model, dtype), dtype, 9, (2e-2, 1e-4));
        }
    }
}

#[test]
fn saved_values_equal_recomputed_values() {
    // Planes of one task, planes of several waves, and a plane with a segment that is too long for saved values.
    let long =
        [segments_of_tensors(&[7, 600_000, 3, 500_000, 9]), segments_of_tensors(&[5, (4 << 20) + 1, 3000])];
    for model in segments_of_models().into_iter().chain(long) {
        // The reference takes long.
        let dtypes: &[DType] = if model.1 > 1 << 20 { &[F32] } else { &[F32, DType::F16, DType::F64] };
        for &dtype in dtypes {
            assert_updates_planes(&model.0, &lamb(&model, dtype), dtype, 11, (2e-3, 1.0));
        }
    }
}

#[test]
fn overwritten_planes_are_read_first() {
    for model in segments_of_models() {
        for dtype in FLOATS {
            let nest = chained_updates(&model, dtype);
            let mut random = Random(12);
            let before: Vec<Vec<u8>> =
                nest.load_operands().map(|load| numbers(&mut random, load.dtype, load.len)).collect();
            let expected = reference(&nest, &before, &before).unwrap();
            for isa in Isa::available() {
                for threads in [1, 3] {
                    let got = run_in_place(&nest, isa, threads, 3, &before);
                    for (k, (got, expected)) in got.iter().zip(&expected).enumerate() {
                        assert_same(dtype, got, expected, &format!("result {k}, {dtype} at {isa}"));
                    }
                }
            }
        }
    }
}

#[test]
fn sums_of_segments_are_the_same_on_any_threads() {
    // The segments of the last plane are so long that they run in several waves; the reference takes long.
    for model in
        segments_of_models().into_iter().chain([segments_of_tensors(&[7, 1_100_000, 3, 1_050_000, 9])])
    {
        let dtypes = if model.1 > 1 << 20 { &[DType::F64][..] } else { &FLOATS };
        for &dtype in dtypes {
            let nest = normalization(&model, dtype);
            let mut random = Random(10);
            let mut before: Vec<Vec<u8>> =
                nest.load_operands().map(|load| numbers(&mut random, load.dtype, load.len)).collect();
            let table = numbers(&mut random, F32, nest.stores[2].len);
            before.extend([table.clone(), table]);
            let outs = [before[0].clone(), before[1].clone(), before[2].clone(), before[3].clone()];
            let expected = reference(&nest, &before[..2], &outs).unwrap();
            for isa in Isa::available() {
                let single = run_in_place(&nest, isa, 1, 2, &before);
                for ((got, expected), store) in single.iter().zip(&expected).zip(&nest.stores) {
                    // Pairwise sums of this length are as exact as sums in f64, except for the last bit of narrow
                    // results.
                    let relative = if dtype == DType::F64 { 1e-12 } else { 1e-5 };
                    let relative =
                        if matches!(store.dtype, DType::F16 | DType::BF16) { 1e-2 } else { relative };
                    let what = format!("{dtype} at {isa}");
                    assert_close(store.dtype, got, expected, relative, relative, &what);
                }
                assert_gaps_unchanged(&model.0, dtype, &before[0], &single[0]);
                for threads in [2, 4] {
                    assert_eq!(run_in_place(&nest, isa, threads, 2, &before), single, "{threads} at {isa}");
                }
            }
        }
    }
}

#[test]
fn sums_of_long_segments_are_exact() {
    // One tenth, so often that a plain sum in f32 loses four digits.
    let len = 5_000_000;
    let segments = Segments::new([1..len, len..len + 3]);
    let plane = access(F32, [0, 1], 0, len + 3);
    let mut b = Builder::new();
    let (x, sum) = (b.load(0, Type::F32), b.reduced(0, Type::F32));
    let (expr, values) = b.finish_keeping(&[sum], &[x]);
    let nest = Nest {
        dims: [2, len + 3].into_iter().collect(),
        inner: 1,
        segments: Some(segments),
        loads: vec![Load::Buffer(plane)],
        expr,
        reductions: vec![Reduction { op: ReduceOp::Sum, value: values[0] }],
        stores: vec![access(F32, [1, 0], 0, 2)],
    };
    let values = bytes_of(&vec![0.1; len + 3]);
    for isa in Isa::available() {
        let got = floats(
            &run(&nest, isa, Order::Auto, 2, std::slice::from_ref(&values), &[vec![0; 8]]).unwrap()[0],
        );
        let exact = f64::from(0.1f32) * (len - 1) as f64;
        assert!((f64::from(got[0]) / exact - 1.0).abs() < 1e-6, "{} of {exact} at {isa}", got[0]);
        assert!((got[1] - 0.3).abs() < 1e-6);
    }
}

#[test]
fn first_failing_guard_of_segments_is_reported() {
    let model = segments_of_tensors(&[100, 0, 50_000, 30]);
    let (segments, len) = &model;
    let plane = access(DType::I64, [0, 1], 0, *len);
    let mut b = Builder::new();
    let x = b.load(0, Type::I64);
    let x = b.guard(x, 10);
    let nest = Nest {
        dims: [segments.len(), *len].into_iter().collect(),
        inner: 0,
        segments: Some(segments.clone()),
        loads: vec![Load::Buffer(plane.clone())],
        expr: b.finish(&[x]),
        reductions: Vec::new(),
        stores: vec![plane],
    };
    assert!(nest.expr.insts().iter().any(|(inst, _)| matches!(inst, Inst::Guard(..))));
    let mut values = vec![0i64; *len];
    // An invalid index in a gap, which is never read.
    values[101] = -7;
    let bytes = |values: &[i64]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let outs = [bytes(&values)];
    for isa in Isa::available() {
        assert!(run(&nest, isa, Order::Auto, 3, &[bytes(&values)], &outs).is_ok());
    }
    (values[40_000], values[20_000]) = (11, 12);
    for isa in Isa::available() {
        for threads in [1, 3] {
            let failure = run(&nest, isa, Order::Auto, threads, &[bytes(&values)], &outs).unwrap_err();
            assert_eq!(failure, OutOfRange { point: 2 * len + 20_000, index: 12, bound: 10 });
        }
    }
}

#[test]
fn invalid_segments_are_rejected() {
    let (segments, len) = segments_of_tensors(&[5, 6]);
    let mut nest = adamw(&(segments, len), F32);
    nest.dims[0] = 3;
    let fault = NestKernel::new(&nest, Isa::detect().unwrap()).unwrap_err();
    assert_eq!(fault, "2 segments, but the first axis has size 3");
}
