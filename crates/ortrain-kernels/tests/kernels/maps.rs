//! Tests of maps over random spaces, strides and expressions.

use ortrain_expr::{
    Access, BinaryOp, Builder, CompareOp, DType, Inst, Load, Nest, OutOfRange, Reg, RunScalar, Scalar, Type,
    UnaryOp,
};
use ortrain_kernels::{Isa, NestKernel, Order, Pool};
use proptest::prelude::*;

use crate::common::*;

const TYPES: [Type; 7] = [Type::F32, Type::F64, Type::I32, Type::I64, Type::U32, Type::U64, Type::Bool];

pub(crate) fn random_dims(random: &mut Random) -> Vec<usize> {
    let rank = random.below(5);
    let mut dims: Vec<usize> = (0..rank).map(|_| random.pick(&[1, 2, 3, 4, 5, 7, 8])).collect();
    if random.chance(50)
        && let Some(dim) = dims.last_mut()
    {
        *dim = random.pick(&[1, 16, 17, 63, 64, 65, 130, 700]);
    }
    if random.chance(4) && rank > 0 {
        let axis = random.below(rank);
        dims[axis] = 0;
    }
    dims
}

/// Returns an expression with exact results: without elementary functions.
pub(crate) fn random_expr(
    random: &mut Random,
    b: &mut Builder,
    loads: &[Access],
    rank: usize,
    regs: &mut Vec<Reg>,
    count: usize,
) {
    let start = regs.len();
    let mut tries = 0;
    while regs.len() < start + count && tries < 20 * count {
        tries += 1;
        let ty = random.pick(&TYPES);
        let of = |b: &Builder, ty: Type, random: &mut Random, regs: &[Reg]| {
            let fitting: Vec<Reg> = regs.iter().copied().filter(|&reg| b.ty(reg) == ty).collect();
            (!fitting.is_empty()).then(|| random.pick(&fitting))
        };
        let reg = match random.below(12) {
            0 => {
                let value = random.scalar(if ty.is_float() { DType::F64 } else { DType::I64 });
                Some(b.push(Inst::Const(value.convert(ty)), ty))
            }
            1 if !loads.is_empty() => {
                let slot = random.below(loads.len());
                let ty = if random.chance(70) { Type::of(loads[slot].dtype) } else { ty };
                Some(b.load(slot, ty))
            }
            2 if !loads.is_empty() => of(b, Type::I64, random, regs).map(|index| {
                let slot = random.below(loads.len());
                b.load_at(slot, index, Type::of(loads[slot].dtype))
            }),
            3 if rank > 0 => Some(b.coordinate(random.below(rank))),
            4 => Some(b.run_scalar(RunScalar::Seed)),
            5 => of(b, ty, random, regs).map(|x| {
                let op = match ty {
                    Type::Bool => UnaryOp::Not,
                    Type::F32 | Type::F64 => random.pick(&[
                        UnaryOp::Neg,
                        UnaryOp::Abs,
                        UnaryOp::Sign,
                        UnaryOp::Floor,
                        UnaryOp::Sqrt,
                    ]),
                    _ => random.pick(&[UnaryOp::Neg, UnaryOp::Abs, UnaryOp::Sign, UnaryOp::Floor]),
                };
                b.push(Inst::Unary(op, x), ty)
            }),
            6..=7 => of(b, ty, random, regs).zip(of(b, ty, random, regs)).map(|(x, y)| {
                let op = match ty {
                    Type::Bool => random.pick(&[BinaryOp::And, BinaryOp::Or, BinaryOp::Xor]),
                    Type::F32 | Type::F64 => random.pick(&[
                        BinaryOp::Add,
                        BinaryOp::Sub,
                        BinaryOp::Mul,
                        BinaryOp::Div,
                        BinaryOp::Rem,
                        BinaryOp::Min,
                        BinaryOp::Max,
                    ]),
                    _ => random.pick(&[
                        BinaryOp::Add,
                        BinaryOp::Sub,
                        BinaryOp::Mul,
                        BinaryOp::Div,
                        BinaryOp::Rem,
                        BinaryOp::Pow,
                        BinaryOp::Min,
                        BinaryOp::Max,
                        BinaryOp::And,
                        BinaryOp::Or,
                        BinaryOp::Xor,
                    ]),
                };
                b.push(Inst::Binary(op, x, y), ty)
            }),
            8 => of(b, ty, random, regs).zip(of(b, ty, random, regs)).map(|(x, y)| {
                let op = random.pick(&[CompareOp::Eq, CompareOp::Lt, CompareOp::Le]);
                b.push(Inst::Compare(op, x, y), Type::Bool)
            }),
            9 => of(b, Type::Bool, random, regs)
                .zip(of(b, ty, random, regs).zip(of(b, ty, random, regs)))
                .map(|(c, (x, y))| b.push(Inst::Select(c, x, y), ty)),
            10 if !regs.is_empty() => Some(b.push(Inst::Convert(random.pick(regs)), ty)),
            11 => {
                let index = of(b, Type::U64, random, regs);
                index
                    .zip(of(b, Type::U64, random, regs))
                    .map(|(i, s)| b.push(Inst::Random(i, s, i), Type::U32))
            }
            _ => None,
        };
        regs.extend(reg);
    }
}

fn random_map(random: &mut Random) -> Nest {
    let dims = random_dims(random);
    let loads: Vec<Access> = (0..random.below(4))
        .map(|_| {
            let dtype = random.pick(&DType::ALL);
            random_access(random, dtype, &dims, false, &[])
        })
        .collect();
    let mut b = Builder::new();
    let mut regs = vec![b.int(3)];
    let count = 1 + random.below(25);
    random_expr(random, &mut b, &loads, dims.len(), &mut regs, count);
    let outputs: Vec<Reg> = (0..1 + random.below(3)).map(|_| random.pick(&regs)).collect();
    let stores = outputs
        .iter()
        .map(|_| {
            let dtype = random.pick(&DType::ALL);
            random_access(random, dtype, &dims, true, &[])
        })
        .collect();
    without_gathered_strides(Nest {
        dims: dims.into_iter().collect(),
        inner: 0,
        segments: None,
        loads: loads.into_iter().map(Load::Buffer).collect(),
        expr: b.finish(&outputs),
        reductions: Vec::new(),
        stores,
    })
}

/// Returns the nest with zero strides for gathered loads.
pub(crate) fn without_gathered_strides(mut nest: Nest) -> Nest {
    for slot in 0..nest.loads.len() {
        if nest.is_gathered(slot)
            && let Some(access) = nest.loads[slot].operand_mut()
        {
            access.strides.fill(0);
        }
    }
    nest
}

pub(crate) fn buffers(random: &mut Random, nest: &Nest) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let loads = nest.load_operands().map(|a| buffer(random, a.dtype, a.len)).collect();
    let outs = nest.stores.iter().map(|a| buffer(random, a.dtype, a.len)).collect();
    (loads, outs)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn maps_compute_what_the_reference_computes(seed: u64) {
        let mut random = Random(seed);
        let nest = random_map(&mut random);
        let (loads, outs) = buffers(&mut random, &nest);
        let expected = reference(&nest, &loads, &outs).unwrap();
        for isa in Isa::available() {
            let got = run(&nest, isa, Order::Auto, 1, &loads, &outs).unwrap();
            for ((store, got), expected) in nest.stores.iter().zip(&got).zip(&expected) {
                assert_same(store.dtype, got, expected, &format!("{:?} {} at {isa}", nest.dims, nest.expr));
            }
        }
    }
}

fn map(n: usize, loads: Vec<Access>, stores: Vec<Access>, build: impl Fn(&mut Builder) -> Vec<Reg>) -> Nest {
    let mut b = Builder::new();
    let outputs = build(&mut b);
    Nest {
        dims: [n].into_iter().collect(),
        inner: 0,
        segments: None,
        loads: loads.into_iter().map(Load::Buffer).collect(),
        expr: b.finish(&outputs),
        reductions: Vec::new(),
        stores,
    }
}

#[test]
fn maps_of_every_size() {
    for n in (0..70).chain([127, 128, 129, 1023, 1024, 1025, 2049, 5000]) {
        let access = Access::contiguous(DType::F32, &[n]);
        let nest = map(n, vec![access.clone()], vec![access], |b| {
            let x = b.load(0, Type::F32);
            let three = b.constant(Type::F32, 3.0);
            let y = b.mul(x, three);
            vec![b.add(y, x)]
        });
        let mut random = Random(n as u64);
        let (loads, outs) = buffers(&mut random, &nest);
        let expected = reference(&nest, &loads, &outs).unwrap();
        for isa in Isa::available() {
            let got = run(&nest, isa, Order::Auto, 2, &loads, &outs).unwrap();
            assert_same(DType::F32, &got[0], &expected[0], &format!("{n} elements at {isa}"));
        }
    }
}

#[test]
fn signed_bytes_become_large_unsigned_integers() {
    let n = 1024;
    let accesses = [DType::I8, DType::F32].map(|dtype| Access::contiguous(dtype, &[n]));
    let [load, store] = accesses;
    let nest = map(n, vec![load], vec![store], |b| vec![b.load(0, Type::U32)]);
    let mut random = Random(1);
    let (loads, outs) = buffers(&mut random, &nest);
    let expected = reference(&nest, &loads, &outs).unwrap();
    for isa in Isa::available() {
        let got = run(&nest, isa, Order::Auto, 1, &loads, &outs).unwrap();
        assert_same(DType::F32, &got[0], &expected[0], &format!("{isa}"));
    }
}

#[test]
fn maps_run_in_place() {
    let n = 100_000;
    let access = Access::contiguous(DType::F32, &[n]);
    let nest = map(n, vec![access.clone()], vec![access], |b| {
        let x = b.load(0, Type::F32);
        vec![b.add(x, x)]
    });
    for isa in Isa::available() {
        let kernel = NestKernel::new(&nest, isa).unwrap();
        let pool = Pool::new(3);
        let mut memory = Memory::new(kernel.scratch_bytes(3));
        let mut values: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let base = values.as_mut_ptr().cast();
        // SAFETY: both accesses are equal, and the buffer belongs to this test.
        unsafe { kernel.run(&[base, base], SCALARS, &pool, memory.scratch()) }.unwrap();
        assert!(values.iter().enumerate().all(|(i, &v)| v == 2.0 * i as f32), "{isa}");
    }
}

#[test]
fn first_failing_guard_is_reported() {
    let n = 300_000;
    let access = Access::contiguous(DType::I64, &[n]);
    let nest = map(n, vec![access.clone()], vec![access], |b| {
        let x = b.load(0, Type::I64);
        let first = b.guard(x, 1000);
        let twice = b.add(first, first);
        // The same index fails here too, but later.
        vec![b.guard(twice, 10_000)]
    });
    for bad in [vec![], vec![0], vec![299_999, 123_456], vec![5, 299_999], vec![150_000, 149_999, 200_000]] {
        let mut index = vec![0i64; n];
        for &i in &bad {
            index[i] = -(i as i64) - 1;
        }
        let load: Vec<u8> = index.iter().flat_map(|i| i.to_le_bytes()).collect();
        let expected = match bad.iter().min() {
            None => Ok(()),
            Some(&i) => Err(OutOfRange { point: i, index: -(i as i64) - 1, bound: 1000 }),
        };
        for isa in Isa::available() {
            for threads in 1..=3 {
                let got =
                    run(&nest, isa, Order::Auto, threads, std::slice::from_ref(&load), &[vec![0; n * 8]]);
                assert_eq!(got.map(|_| ()), expected, "{bad:?} on {threads} threads");
            }
        }
    }
}

#[test]
fn unused_guards_are_checked() {
    let access = Access::contiguous(DType::I64, &[5]);
    let nest = map(5, vec![access.clone()], vec![access], |b| {
        let x = b.load(0, Type::I64);
        b.guard(x, 3);
        vec![x]
    });
    let load: Vec<u8> = [0i64, 1, 2, 3, 4].iter().flat_map(|i| i.to_le_bytes()).collect();
    let got = run(&nest, Isa::PORTABLE, Order::Auto, 1, &[load], &[vec![0; 40]]);
    assert_eq!(got, Err(OutOfRange { point: 3, index: 3, bound: 3 }));
}

#[test]
fn stores_to_the_same_element_are_rejected() {
    let nest = map(
        5,
        vec![Access::contiguous(DType::F32, &[5])],
        vec![Access { strides: [0].into_iter().collect(), ..Access::contiguous(DType::F32, &[5]) }],
        |b| vec![b.load(0, Type::F32)],
    );
    NestKernel::new(&nest, Isa::PORTABLE).expect_err("five results for one element");
}

#[test]
fn less_scratch_memory_means_fewer_threads() {
    let n = 200_000;
    let access = Access::contiguous(DType::F32, &[n]);
    let nest = map(n, vec![access.clone()], vec![access], |b| {
        let x = b.load(0, Type::F32);
        vec![b.unary(UnaryOp::Exp, x)]
    });
    let kernel = NestKernel::new(&nest, Isa::detect().unwrap()).unwrap();
    let pool = Pool::new(4);
    let mut random = Random(1);
    let mut load = f32_buffer(&mut random, n);
    let mut results = Vec::new();
    for threads in 1..=4 {
        let mut memory = Memory::new(kernel.scratch_bytes(threads));
        let mut out = vec![0u8; n * 4];
        // SAFETY: buffers of the accesses' lengths.
        unsafe { kernel.run(&[load.as_mut_ptr(), out.as_mut_ptr()], SCALARS, &pool, memory.scratch()) }
            .unwrap();
        results.push(out);
    }
    assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
}

#[test]
fn maps_without_axes() {
    let nest = Nest {
        dims: [].into_iter().collect(),
        inner: 0,
        segments: None,
        loads: vec![Load::Buffer(Access::contiguous(DType::F32, &[]))],
        expr: {
            let mut b = Builder::new();
            let x = b.load(0, Type::F32);
            let y = b.push(Inst::Const(Scalar::F32(2.0)), Type::F32);
            let z = b.mul(x, y);
            b.finish(&[z])
        },
        reductions: Vec::new(),
        stores: vec![Access::contiguous(DType::F32, &[])],
    };
    let got = run(&nest, Isa::PORTABLE, Order::Auto, 1, &[bytes_of(&[21.0])], &[bytes_of(&[0.0])]).unwrap();
    assert_eq!(floats(&got[0]), [42.0]);
}

#[test]
fn overwritten_values_are_read_first() {
    // new = scale[channel] * old in place, and a copy of the old value elsewhere, with both orders of the stores.
    for [images, channels, pixels] in [[1, 1, 5], [2, 3, 70], [4, 16, 300], [3, 40, 1500]] {
        let dims = [images, channels, pixels];
        let len = dims.iter().product::<usize>();
        let mut b = Builder::new();
        let (old, scale) = (b.load(0, Type::F32), b.load(1, Type::F32));
        let new = b.mul(old, scale);
        let contiguous = Access::contiguous(DType::F32, &dims);
        let channel =
            Access { dtype: DType::F32, offset: 0, strides: [0, 1, 0].into_iter().collect(), len: channels };
        let nest = Nest {
            dims: dims.into_iter().collect(),
            inner: 0,
            segments: None,
            loads: [contiguous.clone(), channel].map(Load::Buffer).to_vec(),
            expr: b.finish(&[new, old]),
            reductions: Vec::new(),
            stores: vec![contiguous.clone(), contiguous],
        };
        for isa in Isa::available() {
            let kernel = NestKernel::new(&nest, isa).unwrap();
            let pool = Pool::new(2);
            let mut memory = Memory::new(kernel.scratch_bytes(2));
            let mut values: Vec<f32> = (0..len).map(|i| i as f32).collect();
            let mut scales: Vec<f32> = (0..channels).map(|i| 2.0 + i as f32).collect();
            let mut copy = vec![0.0f32; len];
            let at = values.as_mut_ptr().cast();
            let bases = [at, scales.as_mut_ptr().cast(), at, copy.as_mut_ptr().cast()];
            // SAFETY: equal accesses; the buffers belong to this test.
            unsafe { kernel.run(&bases, SCALARS, &pool, memory.scratch()) }.unwrap();
            for i in 0..len {
                assert_eq!(copy[i], i as f32, "{dims:?} at {isa}");
                assert_eq!(values[i], i as f32 * scales[i / pixels % channels], "{dims:?} at {isa}");
            }
        }
    }
}

/// Compares a nest with the reference at every level, on one thread and on two.
fn compare(nest: &Nest, loads: &[Vec<u8>], what: &str) {
    let outs: Vec<Vec<u8>> = nest.stores.iter().map(|a| vec![0x55; a.len * a.dtype.size()]).collect();
    let expected = reference(nest, loads, &outs).unwrap();
    for isa in Isa::available() {
        for threads in 1..=2 {
            let got = run(nest, isa, Order::Auto, threads, loads, &outs).unwrap();
            for ((store, got), expected) in nest.stores.iter().zip(&got).zip(&expected) {
                assert_same(store.dtype, got, expected, &format!("{what} at {isa}"));
            }
        }
    }
}

#[test]
fn rows_are_gathered_by_index() {
    let (rows, table_rows) = (40, 9);
    for dtype in [DType::F32, DType::F16, DType::I64] {
        for (width, offset) in [(1, 0), (17, 5), (128, 0), (128, 3), (700, 0), (2500, 1)] {
            let mut b = Builder::new();
            let (row, column, size) = (b.load(0, Type::I64), b.coordinate(1), b.int(width));
            let first = b.mul(row, size);
            let at = b.add(first, column);
            // Also the other order of the sum, and an index that is not the index of a row: every element separately.
            let same = b.add(column, first);
            let twice = b.add(at, column);
            let values = [at, same, twice].map(|index| b.load_at(1, index, Type::of(dtype)));
            let dims = [rows, width as usize];
            let len = table_rows * dims[1] + offset;
            let nest = Nest {
                dims: dims.into_iter().collect(),
                inner: 0,
                segments: None,
                loads: [
                    Access {
                        strides: [1, 0].into_iter().collect(),
                        ..Access::contiguous(DType::I64, &[rows])
                    },
                    Access { dtype, offset, strides: [0, 0].into_iter().collect(), len },
                ]
                .map(Load::Buffer)
                .to_vec(),
                expr: b.finish(&values),
                reductions: Vec::new(),
                stores: vec![Access::contiguous(dtype, &dims); 3],
            };
            let mut random = Random(width as u64);
            // Rows in range, partly out of range, and out of range.
            let bad_indices =
                [-1, -2, table_rows as i64 - 1, table_rows as i64, i64::MAX / width, i64::MIN / width];
            let index =
                (0..rows).map(|i| bad_indices.get(i).copied().unwrap_or(random.below(table_rows) as i64));
            let index: Vec<u8> = index.flat_map(i64::to_le_bytes).collect();
            let loads = [index, buffer(&mut random, dtype, len)];
            compare(&nest, &loads, &format!("{dtype}, rows of {width} behind {offset}"));
        }
    }
}

#[test]
fn rows_with_gaps() {
    // More buffers than machine code has registers, and rows around the length of a tile.
    for (rows, width, gap) in [(16, 256, 16), (3, 200, 1), (20, 256, 768), (5, 1024, 8), (4, 1100, 9)] {
        let dims = [rows, width];
        let column = |first: usize| Access {
            dtype: DType::F32,
            offset: first,
            strides: [(width + gap) as isize, 1].into_iter().collect(),
            len: rows * (width + gap),
        };
        let mut b = Builder::new();
        let x: Vec<Reg> = (0..10).map(|k| b.load(k, Type::F32)).collect();
        let sums: Vec<Reg> = x.windows(2).map(|pair| b.add(pair[0], pair[1])).collect();
        let nest = Nest {
            dims: dims.into_iter().collect(),
            inner: 0,
            segments: None,
            loads: (0..10).map(|k| Load::Buffer(column(k % (gap + 1)))).collect(),
            expr: b.finish(&sums),
            reductions: Vec::new(),
            stores: (0..sums.len()).map(|k| column(k % (gap + 1))).collect(),
        };
        let mut random = Random(width as u64);
        let (loads, _) = buffers(&mut random, &nest);
        compare(&nest, &loads, &format!("{rows} rows of {width}, {gap} apart"));
    }
}

/// Copies from a buffer with adjacent elements along one axis to a buffer with adjacent elements along another axis,
/// between other axes and with gaps.
#[test]
fn matrices_are_transposed() {
    let sizes = [7, 8, 9, 15, 16, 17, 40, 131];
    for (lines, len) in sizes.into_iter().flat_map(|lines| sizes.map(|len| (lines, len))) {
        for (dtype, gap, outer) in [(DType::F32, 0, 1), (DType::F32, 3, 5), (DType::F64, 1, 2)] {
            let dims = [outer, lines, len];
            let (across, down) = ((lines + gap) as isize, (len + gap) as isize);
            let access = |strides: [isize; 3], each: usize| Access {
                dtype,
                offset: gap,
                strides: strides.into_iter().collect(),
                len: gap + outer * each,
            };
            let load = access([across * down, down, 1], (across * down) as usize);
            let store = access([across * down, 1, across], (across * down) as usize);
            let mut b = Builder::new();
            let x = b.load(0, Type::of(dtype));
            let nest = Nest {
                dims: dims.into_iter().collect(),
                inner: 0,
                segments: None,
                loads: vec![Load::Buffer(load)],
                expr: b.finish(&[x]),
                reductions: Vec::new(),
                stores: vec![store],
            };
            let mut random = Random((lines * len) as u64);
            let (loads, outs) = buffers(&mut random, &nest);
            let expected = reference(&nest, &loads, &outs).unwrap();
            for isa in Isa::available() {
                let got = run(&nest, isa, Order::Auto, 2, &loads, &outs).unwrap();
                assert_same(dtype, &got[0], &expected[0], &format!("{dims:?} {dtype} at {isa}"));
            }
        }
    }
}

#[test]
fn accumulators_are_rejected() {
    let access = Access::contiguous(DType::F32, &[5]);
    let mut nest = map(5, Vec::new(), vec![access.clone()], |b| vec![b.load(0, Type::F32)]);
    let (buffer, accumulator) = (Load::Buffer(access), Load::Accumulator(DType::F32));
    let message = "a nest without a product cannot have accumulators";
    for (loads, sentence) in [
        (vec![accumulator.clone()], message),
        (vec![accumulator.clone(), buffer.clone()], message),
        (vec![buffer, accumulator], "accumulators must precede the loads of buffers"),
    ] {
        nest.loads = loads;
        assert_eq!(NestKernel::new(&nest, Isa::PORTABLE).unwrap_err(), sentence, "{:?}", nest.loads);
    }
}
