//! Tests of reductions along rows and down columns.

use ortrain_expr::{
    Access, BinaryOp, Builder, DType, Inst, Load, Nest, OutOfRange, ReduceOp, Reduction, Reg, Type, UnaryOp,
};
use ortrain_kernels::{Isa, NestKernel, Order};
use proptest::prelude::*;

use crate::common::*;
use crate::maps::{buffers, random_dims, random_expr, without_gathered_strides};

const ORDERS: [Order; 3] = [Order::Auto, Order::Row, Order::Col];

/// Returns a nest with exact results: sums of integers, minima and maxima of any type.
fn random_reduction(random: &mut Random) -> Nest {
    let mut dims = random_dims(random);
    if dims.is_empty() {
        dims.push(random.pick(&[0, 1, 5, 100, 1500]));
    }
    let inner = 1 + random.below(dims.len());
    let outer_rank = dims.len() - inner;
    let inner_axes: Vec<usize> = (outer_rank..dims.len()).collect();
    let row_loads = random.below(3);
    let loads: Vec<Access> = (0..row_loads + random.below(3))
        .map(|i| {
            let dtype = random.pick(&DType::ALL);
            random_access(random, dtype, &dims, false, if i < row_loads { &inner_axes } else { &[] })
        })
        .collect();
    let mut b = Builder::new();
    // Values that are constant along a row, and all values.
    let mut row = vec![b.int(2)];
    let mut all_axes = row.clone();
    let mut reductions = Vec::new();
    for k in 0..random.below(4) {
        let count = random.below(8);
        random_expr(random, &mut b, &loads[..row_loads], outer_rank, &mut row, count);
        all_axes.extend(&row);
        let count = random.below(8);
        random_expr(random, &mut b, &loads, dims.len(), &mut all_axes, count);
        let numbers: Vec<Reg> = all_axes.iter().copied().filter(|&reg| b.ty(reg) != Type::Bool).collect();
        let value = random.pick(&numbers);
        let ty = b.ty(value);
        let ops: &[ReduceOp] = if ty.is_float() {
            &[ReduceOp::Max, ReduceOp::Min]
        } else {
            &[ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min]
        };
        reductions.push(Reduction { op: random.pick(ops), value });
        let as_type = if random.chance(80) { ty } else { Type::F64 };
        row.push(b.reduced(k, as_type));
    }
    let count = 1 + random.below(8);
    random_expr(random, &mut b, &loads[..row_loads], outer_rank, &mut row, count);
    all_axes.extend(&row);
    random_expr(random, &mut b, &loads, dims.len(), &mut all_axes, count);
    let mut stores = Vec::new();
    let mut outputs = Vec::new();
    for _ in 0..1 + random.below(3) {
        let dtype = random.pick(&DType::ALL);
        if random.chance(50) {
            outputs.push(random.pick(&row));
            stores.push(random_access(random, dtype, &dims, true, &inner_axes));
        } else {
            outputs.push(random.pick(&all_axes));
            stores.push(random_access(random, dtype, &dims, true, &[]));
            // A store of one element per row must not look like such a store by chance.
            if dims[outer_rank..].iter().all(|&dim| dim <= 1) {
                *outputs.last_mut().unwrap() = random.pick(&row);
            }
        }
    }
    let values: Vec<Reg> = reductions.iter().map(|reduction| reduction.value).collect();
    let (expr, value_regs) = b.finish_keeping(&outputs, &values);
    for (reduction, value) in reductions.iter_mut().zip(value_regs) {
        reduction.value = value;
    }
    without_gathered_strides(Nest {
        dims: dims.into_iter().collect(),
        inner,
        segments: None,
        loads: loads.into_iter().map(Load::Buffer).collect(),
        expr,
        reductions,
        stores,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn reductions_compute_what_the_reference_computes(seed: u64) {
        let mut random = Random(seed);
        let nest = random_reduction(&mut random);
        let (loads, outs) = buffers(&mut random, &nest);
        let expected = reference(&nest, &loads, &outs).unwrap();
        for isa in Isa::available() {
            for order in ORDERS {
                for threads in [1, 3] {
                    let got = run(&nest, isa, order, threads, &loads, &outs).unwrap();
                    for ((store, got), expected) in nest.stores.iter().zip(&got).zip(&expected) {
                        let what = format!(
                            "{:?}, {} reduced, {:?} {} {order:?} at {isa}",
                            nest.dims, nest.inner, nest.reductions, nest.expr
                        );
                        assert_same_but_zero_signs(store.dtype, got, expected, &what);
                    }
                }
            }
        }
    }
}

/// Returns a nest over `[outer, inner]`, or over the transposed memory.
fn nest_of_rows(
    (outer, inner): (usize, usize),
    transposed: bool,
    dtype: DType,
    build: impl Fn(&mut Builder) -> (Vec<Reduction>, Vec<Reg>, Vec<Reg>),
) -> Nest {
    let dims = [outer, inner];
    let mut b = Builder::new();
    let (mut reductions, per_row, per_element) = build(&mut b);
    let mut full = Access::contiguous(dtype, &dims);
    if transposed {
        full.strides = [1, outer as isize].into_iter().collect();
    }
    let row = Access { strides: [1, 0].into_iter().collect(), len: outer, ..full.clone() };
    let outputs = [per_row.clone(), per_element.clone()].concat();
    let values: Vec<Reg> = reductions.iter().map(|reduction| reduction.value).collect();
    let (expr, value_regs) = b.finish_keeping(&outputs, &values);
    for (reduction, value) in reductions.iter_mut().zip(value_regs) {
        reduction.value = value;
    }
    let stores =
        per_row.iter().map(|_| row.clone()).chain(per_element.iter().map(|_| full.clone())).collect();
    Nest {
        dims: dims.into_iter().collect(),
        inner: 1,
        segments: None,
        loads: vec![Load::Buffer(full)],
        expr,
        reductions,
        stores,
    }
}

fn softmax(b: &mut Builder, ty: Type) -> (Vec<Reduction>, Vec<Reg>, Vec<Reg>) {
    let x = b.load(0, ty);
    let largest = b.reduced(0, ty);
    let shifted = b.sub(x, largest);
    let e = b.unary(UnaryOp::Exp, shifted);
    let sum = b.reduced(1, ty);
    let y = b.div(e, sum);
    let log = b.unary(UnaryOp::Log, sum);
    let normaliser = b.add(log, largest);
    let reductions =
        vec![Reduction { op: ReduceOp::Max, value: x }, Reduction { op: ReduceOp::Sum, value: e }];
    (reductions, vec![normaliser], vec![y])
}

/// Mean, reciprocal deviation and the normalised row.
fn normalise(b: &mut Builder, ty: Type, n: usize) -> (Vec<Reduction>, Vec<Reg>, Vec<Reg>) {
    let x = b.load(0, ty);
    let scale = b.constant(ty, 1.0 / n as f64);
    let sum = b.reduced(0, ty);
    let mean = b.mul(sum, scale);
    let centred = b.sub(x, mean);
    let square = b.mul(centred, centred);
    let squares = b.reduced(1, ty);
    let variance = b.mul(squares, scale);
    let epsilon = b.constant(ty, 1e-5);
    let variance = b.add(variance, epsilon);
    let deviation = b.unary(UnaryOp::Sqrt, variance);
    let y = b.div(centred, deviation);
    let reductions =
        vec![Reduction { op: ReduceOp::Sum, value: x }, Reduction { op: ReduceOp::Sum, value: square }];
    (reductions, vec![mean, deviation], vec![y])
}

#[test]
fn softmax_and_normalisation_of_every_shape() {
    let shapes = [
        (0, 3),
        (1, 1),
        (5, 1),
        (3, 2),
        (100, 10),
        (7, 100),
        (70, 65),
        (3, 1000),
        (2, 5000),
        (1, 20_000),
        (600, 33),
        (300, 700),
    ];
    let mut random = Random(3);
    for shape in shapes {
        for transposed in [false, true] {
            for dtype in [DType::F32, DType::F64, DType::F16] {
                let ty = Type::of(dtype);
                let bound = match dtype {
                    DType::F64 => 1e-12,
                    DType::F32 => 2e-6,
                    _ => 1e-3,
                };
                let nests = [
                    nest_of_rows(shape, transposed, dtype, |b| softmax(b, ty)),
                    nest_of_rows(shape, transposed, dtype, |b| normalise(b, ty, shape.1)),
                ];
                for nest in nests {
                    let n = shape.0 * shape.1;
                    let mut load = vec![0; n * dtype.size()];
                    (0..n).for_each(|i| put(&mut load, dtype, i, ortrain_expr::Scalar::F64(random.unit())));
                    let outs: Vec<Vec<u8>> =
                        nest.stores.iter().map(|store| vec![0; store.len * dtype.size()]).collect();
                    let loads = [load];
                    let expected = reference(&nest, &loads, &outs).unwrap();
                    for isa in Isa::available() {
                        for order in ORDERS {
                            let got = run(&nest, isa, order, 2, &loads, &outs).unwrap();
                            for (got, expected) in got.iter().zip(&expected) {
                                let what = format!("{shape:?} {transposed} {dtype} {order:?} at {isa}");
                                assert_close(dtype, got, expected, bound, bound, &what);
                            }
                        }
                    }
                }
            }
        }
    }
}

fn sums(b: &mut Builder) -> (Vec<Reduction>, Vec<Reg>, Vec<Reg>) {
    let x = b.load(0, Type::F32);
    let square = b.mul(x, x);
    let (sum, squares) = (b.reduced(0, Type::F32), b.reduced(1, Type::F32));
    let reductions =
        vec![Reduction { op: ReduceOp::Sum, value: x }, Reduction { op: ReduceOp::Sum, value: square }];
    (reductions, vec![sum, squares], Vec::new())
}

#[test]
fn long_sums_are_exact_to_the_last_bits() {
    let mut random = Random(11);
    let shapes = [(1, 3_000_000), (3, 700_001), (40, 50_000), (64, 40_000), (1000, 2000), (5, 300_000)];
    for (outer, inner) in shapes {
        // All values are positive, so that the sum is as large as its terms together.
        let values: Vec<f32> = (0..outer * inner).map(|_| random.unit().abs() as f32).collect();
        for transposed in [false, true] {
            let nest = nest_of_rows((outer, inner), transposed, DType::F32, sums);
            let at = |o: usize, i: usize| {
                f64::from(values[if transposed { i * outer + o } else { o * inner + i }])
            };
            for isa in Isa::available() {
                for order in [Order::Row, Order::Col] {
                    let outs = vec![vec![0; outer * 4]; 2];
                    let got = run(&nest, isa, order, 2, &[bytes_of(&values)], &outs).unwrap();
                    let (sum, squares) = (floats(&got[0]), floats(&got[1]));
                    for o in 0..outer {
                        let expected: f64 = (0..inner).map(|i| at(o, i)).sum();
                        let expected_squares: f64 = (0..inner).map(|i| at(o, i).powi(2)).sum();
                        for (got, expected) in [(sum[o], expected), (squares[o], expected_squares)] {
                            let error = (f64::from(got) - expected).abs() / expected;
                            assert!(error < 1e-6, "{outer}x{inner} {transposed} {order:?}: {error:e} off");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn bits_do_not_depend_on_the_number_of_threads() {
    let mut random = Random(5);
    for (shape, transposed) in [
        ((1, 1_000_003), false),
        ((6, 200_000), false),
        ((500, 700), false),
        ((65, 60_000), true),
        ((3000, 900), true),
    ] {
        let load = f32_buffer(&mut random, shape.0 * shape.1);
        for build in
            [sums, |b: &mut Builder| softmax(b, Type::F32), |b: &mut Builder| normalise(b, Type::F32, 1000)]
        {
            let nest = nest_of_rows(shape, transposed, DType::F32, build);
            let outs: Vec<Vec<u8>> = nest.stores.iter().map(|store| vec![0; store.len * 4]).collect();
            for isa in Isa::available() {
                let single = run(&nest, isa, Order::Auto, 1, std::slice::from_ref(&load), &outs).unwrap();
                for threads in [2, 3, 7] {
                    let more =
                        run(&nest, isa, Order::Auto, threads, std::slice::from_ref(&load), &outs).unwrap();
                    assert!(single == more, "{shape:?} on {threads} threads at {isa}");
                }
            }
        }
    }
}

#[test]
fn empty_reductions_give_the_neutral_element() {
    for op in [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min] {
        for order in ORDERS {
            let nest = nest_of_rows((4, 0), false, DType::F32, |b| {
                let x = b.load(0, Type::F32);
                (vec![Reduction { op, value: x }], vec![b.reduced(0, Type::F32)], Vec::new())
            });
            let got = run(&nest, Isa::PORTABLE, order, 1, &[Vec::new()], &[vec![0xff; 16]]).unwrap();
            let expected = match op {
                ReduceOp::Sum => 0.0,
                ReduceOp::Prod => 1.0,
                ReduceOp::Max => f32::NEG_INFINITY,
                ReduceOp::Min => f32::INFINITY,
            };
            assert_eq!(floats(&got[0]), [expected; 4], "{op:?} {order:?}");
        }
    }
}

#[test]
fn row_stores_of_varying_values_are_rejected() {
    let nest =
        nest_of_rows((4, 3), false, DType::F32, |b| (Vec::new(), vec![b.load(0, Type::F32)], Vec::new()));
    for order in ORDERS {
        NestKernel::with_order(&nest, Isa::PORTABLE, order).expect_err("which one should it be?");
    }
}

#[test]
fn order_follows_the_memory_layout() {
    let order = |shape, transposed| {
        NestKernel::new(&nest_of_rows(shape, transposed, DType::F32, sums), Isa::detect().unwrap())
            .unwrap()
            .order()
    };
    assert_eq!(order((100, 1000), false), Order::Row);
    assert_eq!(order((100, 1000), true), Order::Col);
    assert_eq!(order((1000, 10), false), Order::Col, "short rows");
}

#[test]
fn guards_in_every_place_report_the_first_index() {
    // A label of each row selects an element; labels are checked per row, elements per element.
    let (outer, inner) = (3000, 50);
    let dims = [outer, inner];
    let mut b = Builder::new();
    let label = b.load(1, Type::I64);
    let label = b.guard(label, 50);
    let column = b.coordinate(1);
    let x = b.load(0, Type::I64);
    let x = b.guard(x, 1_000_000);
    let hit = b.compare(ortrain_expr::CompareOp::Eq, column, label);
    let zero = b.int(0);
    let picked = b.select(hit, x, zero);
    let result = b.reduced(0, Type::I64);
    let (expr, value_regs) = b.finish_keeping(&[result], &[picked]);
    let row =
        Access { strides: [1, 0].into_iter().collect(), len: outer, ..Access::contiguous(DType::I64, &dims) };
    let nest = Nest {
        dims: dims.into_iter().collect(),
        inner: 1,
        segments: None,
        loads: [Access::contiguous(DType::I64, &dims), row.clone()].map(Load::Buffer).to_vec(),
        expr,
        reductions: vec![Reduction { op: ReduceOp::Sum, value: value_regs[0] }],
        stores: vec![row],
    };
    let good: Vec<i64> = (0..(outer * inner) as i64).collect();
    let labels: Vec<i64> = (0..outer as i64).map(|i| i % 50).collect();
    let bytes = |values: &[i64]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let cases = [
        (None, None),
        (Some(2000), None),
        (None, Some(70_000)),
        (Some(1000), Some(70_000)),
        (Some(2999), Some(49_999)),
    ];
    for (bad_label, bad_element) in cases {
        let (mut x, mut labels) = (good.clone(), labels.clone());
        let mut expected = Ok(());
        let mut first = usize::MAX;
        if let Some(i) = bad_element {
            x[i] = -7;
            (expected, first) = (Err(OutOfRange { point: i, index: -7, bound: 1_000_000 }), i);
        }
        if let Some(i) = bad_label {
            labels[i] = 50;
            if i * inner < first {
                expected = Err(OutOfRange { point: i * inner, index: 50, bound: 50 });
            }
        }
        let loads = [bytes(&x), bytes(&labels)];
        for isa in Isa::available() {
            for order in ORDERS {
                for threads in [1, 3] {
                    let got = run(&nest, isa, order, threads, &loads, &[vec![0; outer * 8]]);
                    assert_eq!(got.as_ref().map(|_| ()), expected.as_ref().copied(), "{order:?}");
                    if let Ok(got) = got {
                        let expected: Vec<i64> = (0..outer).map(|i| good[i * inner + i % 50]).collect();
                        assert_eq!(got[0], bytes(&expected));
                    }
                }
            }
        }
    }
}

#[test]
fn running_statistics_are_updated_in_place() {
    // new = 0.9 old + 0.1 mean, where old is loaded and stored through equal accesses, for every partition of rows.
    for (outer, inner) in [(4, 100), (2, 2_000_000), (70, 20_000)] {
        for transposed in [false, true] {
            let mut nest = nest_of_rows((outer, inner), transposed, DType::F32, |b| {
                let x = b.load(0, Type::F32);
                let old = b.load(1, Type::F32);
                let sum = b.reduced(0, Type::F32);
                let scale = b.constant(Type::F32, 0.1 / inner as f64);
                let (mean, momentum) = (b.mul(sum, scale), b.constant(Type::F32, 0.9));
                let decayed = b.binary(BinaryOp::Mul, old, momentum);
                (vec![Reduction { op: ReduceOp::Sum, value: x }], vec![b.add(decayed, mean)], vec![x])
            });
            nest.loads.push(Load::Buffer(nest.stores[0].clone()));
            for isa in Isa::available() {
                let kernel = NestKernel::new(&nest, isa).unwrap();
                let pool = ortrain_kernels::Pool::new(3);
                let mut memory = Memory::new(kernel.scratch_bytes(3));
                let mut x = vec![3.0f32; outer * inner];
                let mut state: Vec<f32> = (0..outer).map(|i| i as f32).collect();
                let (x, state_at) = (x.as_mut_ptr().cast(), state.as_mut_ptr().cast());
                // SAFETY: equal accesses; the buffers belong to this test.
                unsafe { kernel.run(&[x, state_at, state_at, x], SCALARS, &pool, memory.scratch()) }.unwrap();
                for (i, &value) in state.iter().enumerate() {
                    assert!((value - (0.9 * i as f32 + 0.3)).abs() < 1e-4, "{outer}x{inner}: {i} is {value}");
                }
            }
        }
    }
}

/// A value of a row that the first store overwrites. The value is also used before and after the reduction, in rows and
/// in values that are stored once per row. All uses must read the old value.
#[test]
fn overwritten_row_values_are_read_first() {
    for (outer, inner) in [(7, 1), (5, 33), (4, 100), (40, 700), (70, 6000), (2, 900_000)] {
        let mut b = Builder::new();
        let (x, old) = (b.load(0, Type::F32), b.load(1, Type::F32));
        let product = b.mul(x, old);
        let sum = b.reduced(0, Type::F32);
        let (half, share) = (b.constant(Type::F32, 0.5), b.constant(Type::F32, 1.0 / inner as f64));
        let mean = b.mul(sum, share);
        let scaled = b.mul(old, half);
        let new = b.add(scaled, mean);
        let shifted = b.add(product, mean);
        let y = b.mul(shifted, old);
        let last = b.binary(BinaryOp::Sub, mean, old);
        let (expr, values) = b.finish_keeping(&[new, y, old, last], &[product]);
        let row = Access { dtype: DType::F32, offset: 0, strides: [1, 0].into_iter().collect(), len: outer };
        let plane = Access::contiguous(DType::F32, &[outer, inner]);
        let nest = Nest {
            dims: [outer, inner].into_iter().collect(),
            inner: 1,
            segments: None,
            loads: [plane.clone(), row.clone()].map(Load::Buffer).to_vec(),
            expr,
            reductions: vec![Reduction { op: ReduceOp::Sum, value: values[0] }],
            stores: vec![row.clone(), plane, row.clone(), row],
        };
        for (isa, order) in Isa::available().into_iter().flat_map(|isa| ORDERS.map(|order| (isa, order))) {
            let kernel = NestKernel::with_order(&nest, isa, order).unwrap();
            let results = [false, true].map(|in_place| {
                let pool = ortrain_kernels::Pool::new(2);
                let mut memory = Memory::new(kernel.scratch_bytes(2));
                let mut x: Vec<f32> = (0..outer * inner).map(|i| (i % 7) as f32 - 2.5).collect();
                let mut old: Vec<f32> = (0..outer).map(|i| 0.25 + i as f32).collect();
                let mut new = vec![0f32; outer];
                let mut y = vec![0f32; outer * inner];
                let [mut copy, mut last] = [new.clone(), new.clone()];
                let [x, old_at, new_at, y_at, copy_at, last_at] =
                    [&mut x, &mut old, &mut new, &mut y, &mut copy, &mut last].map(|v| v.as_mut_ptr().cast());
                let first = if in_place { old_at } else { new_at };
                let bases = [x, old_at, first, y_at, copy_at, last_at];
                // SAFETY: equal accesses; the buffers belong to this test.
                unsafe { kernel.run(&bases, SCALARS, &pool, memory.scratch()) }.unwrap();
                assert!((0..outer).all(|i| copy[i] == 0.25 + i as f32), "{outer}x{inner} at {isa}: {copy:?}");
                (if in_place { old } else { new }, y, copy, last)
            });
            assert!(results[0] == results[1], "{outer}x{inner} {order:?} at {isa}");
        }
    }
}

#[test]
fn maxima_and_minima_propagate_nan() {
    let mut values = vec![1.0f32; 2000];
    values[1234] = f32::NAN;
    for op in [ReduceOp::Max, ReduceOp::Min] {
        for order in ORDERS {
            let nest = nest_of_rows((2, 1000), false, DType::F32, |b| {
                let x = b.load(0, Type::F32);
                (vec![Reduction { op, value: x }], vec![b.push(Inst::Reduced(0), Type::F32)], Vec::new())
            });
            for isa in Isa::available() {
                let got = floats(&run(&nest, isa, order, 1, &[bytes_of(&values)], &[vec![0; 8]]).unwrap()[0]);
                assert!(got[0] == 1.0 && got[1].is_nan(), "{op:?} {order:?}: {got:?}");
            }
        }
    }
}

#[test]
fn columns_over_many_images() {
    // Sums over channels: the outer axis has long contiguous pieces, one for each image.
    for [images, channels, pixels] in [[3, 5, 2160], [2, 7, 200], [5, 3, 1000], [1, 4, 3000]] {
        let dims = [images, pixels, channels];
        let len = dims.iter().product::<usize>();
        let mut b = Builder::new();
        let x = b.load(0, Type::F32);
        let sum = b.reduced(0, Type::F32);
        let twice = b.add(sum, sum);
        let (expr, values) = b.finish_keeping(&[twice], &[x]);
        let load = Access {
            dtype: DType::F32,
            offset: 0,
            strides: [(channels * pixels) as isize, 1, pixels as isize].into_iter().collect(),
            len,
        };
        let mut store = Access::contiguous(DType::F32, &dims[..2]);
        store.strides.push(0);
        let nest = Nest {
            dims: dims.into_iter().collect(),
            inner: 1,
            segments: None,
            loads: vec![Load::Buffer(load)],
            expr,
            reductions: vec![Reduction { op: ReduceOp::Sum, value: values[0] }],
            stores: vec![store],
        };
        let loads = [bytes_of(&(0..len).map(|i| (i % 1000) as f32).collect::<Vec<f32>>())];
        let outs = [vec![0; images * pixels * 4]];
        let expected = reference(&nest, &loads, &outs).unwrap();
        for isa in Isa::available() {
            for order in ORDERS {
                let got = run(&nest, isa, order, 2, &loads, &outs).unwrap();
                let what = format!("{dims:?} {order:?} at {isa}");
                assert_same(DType::F32, &got[0], &expected[0], &what);
            }
        }
    }
}
