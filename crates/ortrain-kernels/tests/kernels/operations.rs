//! Tests every operation, for every type for which it is defined, on edge cases.

use ortrain_expr::{
    Access, BinaryOp, Builder, CompareOp, DType, Inst, Load, Nest, Reg, RunScalar, Scalar, Type, UnaryOp,
};
use ortrain_kernels::{Isa, Order, vecmath};

use crate::common::*;

const TYPES: [DType; 7] =
    [DType::F32, DType::F64, DType::I32, DType::I64, DType::U32, DType::U64, DType::Bool];

const UNARY: [UnaryOp; 17] = [
    UnaryOp::Neg,
    UnaryOp::Abs,
    UnaryOp::Sign,
    UnaryOp::Exp,
    UnaryOp::Log,
    UnaryOp::Sqrt,
    UnaryOp::Rsqrt,
    UnaryOp::Sin,
    UnaryOp::Cos,
    UnaryOp::Atan,
    UnaryOp::Erf,
    UnaryOp::Tanh,
    UnaryOp::Sigmoid,
    UnaryOp::Floor,
    UnaryOp::Not,
    UnaryOp::ToF16,
    UnaryOp::ToBf16,
];

const BINARY: [BinaryOp; 11] = [
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
];

fn unary_is_defined(op: UnaryOp, ty: Type) -> bool {
    match op {
        UnaryOp::Not => ty == Type::Bool,
        UnaryOp::ToF16 | UnaryOp::ToBf16 => ty == Type::F32,
        UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Sign | UnaryOp::Floor => ty != Type::Bool,
        _ => ty.is_float(),
    }
}

fn binary_is_defined(op: BinaryOp, ty: Type) -> bool {
    match op {
        BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => !ty.is_float(),
        _ => ty != Type::Bool,
    }
}

/// Returns pairs of edge cases and of ordinary values, as two buffers.
fn pairs(dtype: DType) -> (Vec<u8>, Vec<u8>, usize) {
    let mut random = Random(7);
    let mut values: Vec<Scalar> = (0..40).map(|_| random.scalar(dtype)).collect();
    if dtype.is_float() {
        let edges = [
            0.0,
            -0.0,
            f64::NAN,
            f64::INFINITY,
            f64::NEG_INFINITY,
            1e-40,
            3.0,
            -3.0,
            0.5,
            2.5,
            -2.0,
            89.0,
            -104.0,
        ];
        values.extend(edges.map(Scalar::F64));
    } else {
        values.extend([0, 1, -1, 2, 3, -5, i64::MIN, i64::MAX, i64::from(i32::MIN)].map(Scalar::I64));
    }
    let n = values.len() * values.len();
    let (mut a, mut b) = (vec![0; n * dtype.size()], vec![0; n * dtype.size()]);
    for (i, &x) in values.iter().enumerate() {
        for (j, &y) in values.iter().enumerate() {
            put(&mut a, dtype, i * values.len() + j, x);
            put(&mut b, dtype, i * values.len() + j, y);
        }
    }
    (a, b, n)
}

fn check(expr: impl Fn(&mut Builder, Reg, Reg) -> Reg, dtype: DType, out: DType, bound: u64, what: &str) {
    let (a, b, n) = pairs(dtype);
    let mut builder = Builder::new();
    let ty = Type::of(dtype);
    let (x, y) = (builder.load(0, ty), builder.load(1, ty));
    let result = expr(&mut builder, x, y);
    let access = |dtype| Access::contiguous(dtype, &[n]);
    let nest = Nest {
        dims: [n].into_iter().collect(),
        inner: 0,
        segments: None,
        loads: vec![Load::Buffer(access(dtype)); 2],
        expr: builder.finish(&[result]),
        reductions: Vec::new(),
        stores: vec![access(out)],
    };
    let loads = [a, b];
    let outs = [vec![0xee; n * out.size()]];
    let expected = reference(&nest, &loads, &outs).unwrap();
    for isa in Isa::available() {
        let got = run(&nest, isa, Order::Auto, 1, &loads, &outs).unwrap();
        let what = format!("{what} of {dtype} at {isa}");
        if bound == 0 {
            assert_same(out, &got[0], &expected[0], &what);
        } else {
            for (i, (g, w)) in floats(&got[0]).into_iter().zip(floats(&expected[0])).enumerate() {
                let at = (get(&loads[0], dtype, i), get(&loads[1], dtype, i));
                assert!(ulp(g, w) <= bound, "{what}: ({}, {}) gives {g:e}, not {w:e}", at.0, at.1);
            }
        }
    }
}

#[test]
fn unary() {
    for op in UNARY {
        for dtype in TYPES.into_iter().filter(|&dtype| unary_is_defined(op, Type::of(dtype))) {
            let bound = match (op, dtype) {
                (UnaryOp::Exp, DType::F32) => vecmath::EXP_MAX_ULP,
                (UnaryOp::Log, DType::F32) => vecmath::LOG_MAX_ULP,
                (UnaryOp::Tanh, DType::F32) => vecmath::TANH_MAX_ULP,
                (UnaryOp::Sigmoid, DType::F32) => vecmath::SIGMOID_MAX_ULP,
                (UnaryOp::Erf, DType::F32) => vecmath::ERF_MAX_ULP,
                (UnaryOp::Rsqrt, DType::F32) => vecmath::RSQRT_MAX_ULP,
                (UnaryOp::Sin, DType::F32) => vecmath::SIN_MAX_ULP,
                (UnaryOp::Cos, DType::F32) => vecmath::COS_MAX_ULP,
                (UnaryOp::Atan, DType::F32) => vecmath::ATAN_MAX_ULP,
                _ => 0,
            };
            let build = |b: &mut Builder, x: Reg, _: Reg| b.unary(op, x);
            check(build, dtype, dtype, u64::from(bound), &format!("{op:?}"));
        }
    }
}

/// Returns f32 numbers around all numbers of `dtype`, a 16-bit float, and around the midpoints between them.
fn numbers_around_all(dtype: DType) -> Vec<u8> {
    let dropped = if dtype == DType::F16 { 13 } else { 16 };
    let deltas = [0i32, -1, 1].map(|delta| [delta, delta + (1 << (dropped - 1))]).concat();
    let mut bytes = Vec::new();
    for bits in 0..=u16::MAX {
        let Scalar::F32(value) = Scalar::read(dtype, &bits.to_le_bytes()) else { unreachable!() };
        for delta in &deltas {
            bytes.extend(value.to_bits().wrapping_add_signed(*delta).to_le_bytes());
        }
    }
    bytes
}

#[test]
fn rounding_equals_a_store_and_a_load() {
    for (op, narrow) in [(UnaryOp::ToF16, DType::F16), (UnaryOp::ToBf16, DType::BF16)] {
        let from = numbers_around_all(narrow);
        let n = from.len() / 4;
        let map = |op: Option<UnaryOp>, [from, to]: [DType; 2]| {
            let mut b = Builder::new();
            let x = b.load(0, Type::F32);
            let result = op.map_or(x, |op| b.unary(op, x));
            Nest {
                dims: [n].into_iter().collect(),
                inner: 0,
                segments: None,
                loads: vec![Load::Buffer(Access::contiguous(from, &[n]))],
                expr: b.finish(&[result]),
                reductions: Vec::new(),
                stores: vec![Access::contiguous(to, &[n])],
            }
        };
        let (short, long) = (vec![0; n * 2], vec![0; n * 4]);
        let known = reference(
            &map(Some(op), [DType::F32; 2]),
            std::slice::from_ref(&from),
            std::slice::from_ref(&long),
        );
        let known = known.unwrap().remove(0);
        for isa in Isa::available() {
            let run = |nest: &Nest<Access>, from: &[u8], to: &[u8]| {
                run(nest, isa, Order::Auto, 1, &[from.to_vec()], &[to.to_vec()]).unwrap().remove(0)
            };
            let stored = run(&map(None, [DType::F32, narrow]), &from, &short);
            let loaded = run(&map(None, [narrow, DType::F32]), &stored, &long);
            let rounded = run(&map(Some(op), [DType::F32; 2]), &from, &long);
            assert!(rounded == loaded, "{op:?} at {isa} is not what a store and a load make");
            assert_same(DType::F32, &rounded, &known, &format!("{op:?} at {isa}"));
        }
    }
}

#[test]
fn binary() {
    for op in BINARY {
        for dtype in TYPES.into_iter().filter(|&dtype| binary_is_defined(op, Type::of(dtype))) {
            let bound = if (op, dtype) == (BinaryOp::Pow, DType::F32) { vecmath::POW_MAX_ULP } else { 0 };
            let build = |b: &mut Builder, x: Reg, y: Reg| b.binary(op, x, y);
            check(build, dtype, dtype, u64::from(bound), &format!("{op:?}"));
        }
    }
}

#[test]
fn compare_and_select() {
    for op in [CompareOp::Eq, CompareOp::Lt, CompareOp::Le] {
        for dtype in TYPES {
            check(|b, x, y| b.compare(op, x, y), dtype, DType::Bool, 0, &format!("{op:?}"));
            let select = |b: &mut Builder, x, y| {
                let c = b.compare(op, x, y);
                b.select(c, x, y)
            };
            check(select, dtype, dtype, 0, &format!("select by {op:?}"));
        }
    }
}

#[test]
fn convert_load_and_store() {
    // Loads of every stored type, conversions between all compute types, stores of every type.
    for from in DType::ALL {
        for to in DType::ALL {
            let build = |b: &mut Builder, x: Reg, _: Reg| b.push(Inst::Convert(x), Type::of(to));
            check(build, from, to, 0, &format!("conversion to {to}"));
            // The same conversion, executed by the store.
            check(|_, x, _| x, from, to, 0, &format!("store as {to}"));
        }
    }
}

#[test]
fn loads_convert_types() {
    for from in DType::ALL {
        for ty in TYPES.map(Type::of) {
            check(|b, _, _| b.load(0, ty), from, from, 0, &format!("load as {ty:?}"));
        }
    }
}

#[test]
fn constants_coordinates_and_run_scalars() {
    let dims = [3usize, 1, 50, 7];
    let n: usize = dims.iter().product();
    for axis in 0..dims.len() {
        let mut b = Builder::new();
        let coordinate = b.coordinate(axis);
        let seed = b.run_scalar(RunScalar::Seed);
        let step = b.run_scalar(RunScalar::TrainStep);
        let (seed, step) = (b.convert(seed, Type::I64), b.convert(step, Type::I64));
        let seven = b.int(7);
        let sum = b.add(coordinate, step);
        let product = b.mul(seed, seven);
        let nest = Nest {
            dims: dims.into_iter().collect(),
            inner: 0,
            segments: None,
            loads: Vec::new(),
            expr: b.finish(&[coordinate, sum, product]),
            reductions: Vec::new(),
            stores: vec![Access::contiguous(DType::I64, &dims); 3],
        };
        let outs = vec![vec![0; n * 8]; 3];
        let expected = reference(&nest, &[], &outs).unwrap();
        for isa in Isa::available() {
            assert_eq!(
                run(&nest, isa, Order::Auto, 1, &[], &outs).unwrap(),
                expected,
                "axis {axis} at {isa}"
            );
        }
    }
}

/// Row-major element numbers, over all axes and over some, and similar sums that are no element numbers.
#[test]
fn element_numbers() {
    for dims in [[3, 5, 7], [1, 40, 33], [6, 1, 129], [300, 2, 1]] {
        let mut b = Builder::new();
        let axes = [0, 1, 2].map(|axis| b.coordinate(axis));
        let mut element_number = |parts: &[(usize, i64)]| {
            parts.iter().fold(b.int(0), |before, &(axis, size)| {
                let size = b.int(size);
                let scaled = b.mul(before, size);
                b.add(scaled, axes[axis])
            })
        };
        let [_, second, third] = dims.map(|dim| dim as i64);
        let numbers = [
            element_number(&[(0, 1), (1, second), (2, third)]),
            element_number(&[(0, 1), (1, second)]),
            element_number(&[(1, 1), (2, third)]),
            element_number(&[(0, 1), (2, third)]),
            element_number(&[(1, 1), (0, second)]),
            element_number(&[(0, 1), (1, second + 1), (2, third)]),
        ];
        let elements = dims.iter().product::<usize>();
        let nest = Nest {
            dims: dims.into_iter().collect(),
            inner: 0,
            segments: None,
            loads: Vec::new(),
            expr: b.finish(&numbers),
            reductions: Vec::new(),
            stores: vec![Access::contiguous(DType::I64, &dims); numbers.len()],
        };
        let outs = vec![vec![0; elements * 8]; numbers.len()];
        let expected = reference(&nest, &[], &outs).unwrap();
        for isa in Isa::available() {
            assert_eq!(run(&nest, isa, Order::Auto, 1, &[], &outs).unwrap(), expected, "{dims:?} at {isa}");
        }
    }
}

/// Consecutive numbers from any start, also with wrapping; other numbers; and varying streams and keys.
#[test]
fn random_bits_equal_the_reference() {
    for n in [1, 7, 31, 32, 33, 3000] {
        let mut b = Builder::new();
        let (seed, index) = (b.run_scalar(RunScalar::Seed), b.coordinate(0));
        let index = b.convert(index, Type::U64);
        let stream = b.constant(Type::U64, 12_345.0);
        let starts = [0, 1, 2, 3, 1 << 33, u64::MAX - 6, u64::MAX - n as u64];
        let mut bits: Vec<Reg> = starts
            .iter()
            .map(|&start| {
                let start = b.push(Inst::Const(Scalar::U64(start)), Type::U64);
                let index = b.add(index, start);
                b.push(Inst::Random(seed, stream, index), Type::U32)
            })
            .collect();
        let twice = b.add(index, index);
        let others =
            [(seed, stream, twice), (index, stream, index), (seed, index, index), (seed, index, stream)];
        bits.extend(others.map(|(key, stream, index)| b.push(Inst::Random(key, stream, index), Type::U32)));
        let nest = Nest {
            dims: [n].into_iter().collect(),
            inner: 0,
            segments: None,
            loads: Vec::new(),
            expr: b.finish(&bits),
            reductions: Vec::new(),
            stores: vec![Access::contiguous(DType::U32, &[n]); bits.len()],
        };
        let outs = vec![vec![0; n * 4]; bits.len()];
        let expected = reference(&nest, &[], &outs).unwrap();
        for isa in Isa::available() {
            assert_eq!(run(&nest, isa, Order::Auto, 1, &[], &outs).unwrap(), expected, "{n} at {isa}");
        }
    }
}

/// Divisors: one power of two, one other number, varying numbers, zero.
#[test]
fn unsigned_division() {
    let n = 100;
    let mut b = Builder::new();
    let x = b.load(0, Type::U32);
    let mut divisors: Vec<Reg> =
        [1.0, 256.0, 2_147_483_648.0, 3.0, 0.0].map(|by| b.constant(Type::U32, by)).to_vec();
    divisors.push(b.load(1, Type::U32));
    let quotients: Vec<Reg> = divisors.into_iter().map(|by| b.div(x, by)).collect();
    let nest = Nest {
        dims: [n].into_iter().collect(),
        inner: 0,
        segments: None,
        loads: vec![Load::Buffer(Access::contiguous(DType::U32, &[n])); 2],
        expr: b.finish(&quotients),
        reductions: Vec::new(),
        stores: vec![Access::contiguous(DType::U32, &[n]); quotients.len()],
    };
    let x: Vec<u8> = (0..n as u32).flat_map(|i| i.wrapping_mul(0x9E37_79B9).to_le_bytes()).collect();
    // All divisors but the last one are the same power of two.
    let by: Vec<u8> = (1..=n).flat_map(|i| if i < n { 16u32 } else { 5 }.to_le_bytes()).collect();
    let ins = [x, by];
    let outs = vec![vec![0; n * 4]; quotients.len()];
    let expected = reference(&nest, &ins, &outs).unwrap();
    for isa in Isa::available() {
        assert_eq!(run(&nest, isa, Order::Auto, 1, &ins, &outs).unwrap(), expected, "{isa}");
    }
}

#[test]
fn ill_typed_expressions_are_rejected() {
    let refuse = |build: &dyn Fn(&mut Builder) -> Reg| {
        let mut b = Builder::new();
        let result = build(&mut b);
        let nest = Nest {
            dims: [4].into_iter().collect(),
            inner: 0,
            segments: None,
            loads: vec![Load::Buffer(Access::contiguous(DType::F32, &[4]))],
            expr: b.finish(&[result]),
            reductions: Vec::new(),
            stores: vec![Access::contiguous(DType::F32, &[4])],
        };
        ortrain_kernels::NestKernel::new(&nest, Isa::PORTABLE).expect_err("it is wrong");
    };
    refuse(&|b| {
        let x = b.load(0, Type::Bool);
        b.push(Inst::Unary(UnaryOp::Exp, x), Type::Bool)
    });
    refuse(&|b| {
        let (x, y) = (b.load(0, Type::F32), b.int(1));
        b.push(Inst::Binary(BinaryOp::Add, x, y), Type::F32)
    });
    refuse(&|b| b.load(3, Type::F32));
    refuse(&|b| b.coordinate(1));
    refuse(&|b| b.reduced(0, Type::F32));
    refuse(&|b| {
        let x = b.load(0, Type::F32);
        b.load_at(0, x, Type::F32)
    });
}
