//! Functions, guards and special numbers on the device, compared with the reference evaluator.

use std::sync::Arc;

use ortrain_expr::{BinaryOp, Builder, CompareOp, DType, Reg, Scalar, Type, UnaryOp};
use ortrain_program::{
    Backend, BufferId, GradientModes, Instruction, Load, Nest, Operand, Program, ProgramBuilder, Reference,
};

use super::programs::{both, device, run};

/// Builds a program of one map over inputs of these types. The closure returns the results with their types.
fn map(inputs: &[DType], len: usize, f: impl FnOnce(&mut Builder, &[Reg]) -> Vec<(Reg, DType)>) -> Program {
    let mut expr = Builder::new();
    let regs: Vec<Reg> = inputs.iter().enumerate().map(|(k, &d)| expr.load(k, Type::of(d))).collect();
    let results = f(&mut expr, &regs);
    let mut b = ProgramBuilder::new();
    let input_ids: Vec<BufferId> = inputs.iter().map(|&dtype| b.work("x", dtype, len)).collect();
    let result_ids: Vec<BufferId> = results.iter().map(|&(_, dtype)| b.work("y", dtype, len)).collect();
    let operand = |(&id, &dtype): (&BufferId, &DType)| Operand::contiguous(id, dtype, &[len]);
    let types: Vec<DType> = results.iter().map(|&(_, dtype)| dtype).collect();
    let nest = Nest::elementwise(
        [len].into_iter().collect(),
        input_ids.iter().zip(inputs).map(operand).map(Load::Buffer).collect(),
        expr.finish(&results.iter().map(|&(reg, _)| reg).collect::<Vec<_>>()),
        result_ids.iter().zip(&types).map(operand).collect(),
    );
    b.emit(Instruction::from(nest), GradientModes::ALL, &"node".into()).expect("the map is valid");
    b.finish(input_ids, result_ids).expect("it can be planned")
}

/// Returns floats of all magnitudes and both signs, and special values.
fn floats() -> Vec<f32> {
    let special = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        0.5,
        -2.5,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MAX,
        f32::MIN,
        f32::MIN_POSITIVE,
        88.7,
        -87.3,
        -103.0,
        1e-30,
        2_147_483_648.0,
        -9.3e18,
        16_777_216.0,
    ];
    special.into_iter().chain((0..=u32::MAX).step_by(0x0007_fff1).map(f32::from_bits)).collect()
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Returns the distance of two numbers in representable floats. Subnormal numbers count as zeros, because drivers may
/// flush them.
fn ulp_distance(a: f32, b: f32) -> u64 {
    if a.is_nan() && b.is_nan() || a == b {
        return 0;
    }
    if a.abs() <= 2.0 * f32::MIN_POSITIVE && b.abs() <= 2.0 * f32::MIN_POSITIVE {
        return 0;
    }
    if a.is_nan() || b.is_nan() {
        return u64::MAX;
    }
    let ordered =
        |x: f32| i64::from((x.to_bits() & 0x7fff_ffff) as i32) * if x.is_sign_negative() { -1 } else { 1 };
    ordered(a).abs_diff(ordered(b))
}

/// Replaces subnormal numbers by zeros, as some drivers do.
fn flush_subnormals(values: &[f32]) -> Vec<f32> {
    values.iter().map(|&value| if value.is_subnormal() { 0.0f32.copysign(value) } else { value }).collect()
}

/// Compares a function of floats with the reference evaluator. Unless it is `exact` for every operand, subnormal
/// operands may be flushed to zero.
fn assert_agrees(
    name: &str,
    (max_distance, exact): (u64, bool),
    inputs: &[Vec<f32>],
    f: impl FnOnce(&mut Builder, &[Reg]) -> Reg,
) {
    let len = inputs[0].len();
    let program = map(&vec![DType::F32; inputs.len()], len, |b, regs| vec![(f(b, regs), DType::F32)]);
    let program = Arc::new(program);
    let results = |backend: Arc<dyn Backend>, inputs: &[Vec<f32>]| {
        let bytes: Vec<Vec<u8>> = inputs.iter().map(|values| bytes_of(values)).collect();
        let result = run(&program, backend, &bytes).expect("no guard fails").remove(0);
        Scalar::read_all(DType::F32, &result).into_iter().map(|x| x.to_f64() as f32).collect::<Vec<f32>>()
    };
    let [got, expected] = both().map(|backend| results(backend, inputs));
    let inputs_flushed: Vec<Vec<f32>> = inputs.iter().map(|values| flush_subnormals(values)).collect();
    let expected_flushed =
        if exact { expected.clone() } else { results(Arc::new(Reference), &inputs_flushed) };
    for k in 0..len {
        let arguments: Vec<f32> = inputs.iter().map(|values| values[k]).collect();
        let distance = ulp_distance(got[k], expected[k]).min(ulp_distance(got[k], expected_flushed[k]));
        assert!(
            distance <= max_distance,
            "{name} of {arguments:?} is {}, not {}: {distance} floats apart",
            got[k],
            expected[k]
        );
    }
}

/// Error bounds in representable floats, and true if the bound also holds for subnormal operands. The bounds are those
/// of the CPU's vector code, plus one or two for quotients and square roots, which drivers need not round correctly.
#[test]
fn functions_of_one_number() {
    let functions = [
        (UnaryOp::Neg, 0, true),
        (UnaryOp::Abs, 0, true),
        (UnaryOp::Sign, 0, true),
        (UnaryOp::Floor, 0, false),
        (UnaryOp::Round, 0, false),
        (UnaryOp::ToF16, 0, true),
        (UnaryOp::ToBf16, 0, true),
        (UnaryOp::Exp, 2, false),
        (UnaryOp::Log, 3, true),
        (UnaryOp::Sqrt, 1, false),
        (UnaryOp::Rsqrt, 2, false),
        (UnaryOp::Sin, 2, false),
        (UnaryOp::Cos, 2, false),
        (UnaryOp::Atan, 3, false),
        (UnaryOp::Erf, 2, false),
        (UnaryOp::Tanh, 2, false),
        (UnaryOp::Sigmoid, 3, false),
    ];
    for (op, max_distance, exact) in functions {
        assert_agrees(&format!("{op:?}"), (max_distance, exact), &[floats()], |b, regs| b.unary(op, regs[0]));
    }
}

#[test]
fn functions_of_two_numbers() {
    let floats_list = floats();
    let len = floats_list.len();
    let other: Vec<f32> = (0..len).map(|k| floats_list[(k * 7919 + 13) % len]).collect();
    let exponents: Vec<f32> = (0..len).map(|k| (k % 41) as f32 * 0.37 - 7.0).collect();
    let small: Vec<f32> = (0..len).map(|k| 0.01 + (k % 997) as f32 * 0.013).collect();
    let functions = [
        (BinaryOp::Add, 0, false),
        (BinaryOp::Mul, 0, false),
        (BinaryOp::Div, 2, false),
        (BinaryOp::Rem, 0, true),
        (BinaryOp::Min, 0, false),
        (BinaryOp::Max, 0, false),
        (BinaryOp::Pow, 4, true),
    ];
    for (op, max_distance, exact) in functions {
        let f = |b: &mut Builder, regs: &[Reg]| b.binary(op, regs[0], regs[1]);
        assert_agrees(&format!("{op:?}"), (max_distance, exact), &[floats_list.clone(), other.clone()], f);
        assert_agrees(&format!("{op:?}"), (max_distance, exact), &[small.clone(), exponents.clone()], f);
        assert_agrees(
            &format!("{op:?}"),
            (max_distance, exact),
            &[floats_list.clone(), exponents.clone()],
            f,
        );
    }
}

/// Returns 64-bit integers of unknown range: pairs of words.
fn integers() -> Vec<i64> {
    let mut values =
        vec![0, 1, -1, 2, -2, 3, 7, -7, 1 << 31, -(1 << 31), (1 << 32) - 1, 1 << 32, i64::MAX, i64::MIN];
    let mut bits = 0x9e37_79b9_7f4a_7c15u64;
    for k in 0..400 {
        bits = bits.wrapping_mul(0xd129_42bf_3f4d_c0a5).rotate_left(23) ^ k;
        values.push(bits as i64 >> (k % 60));
    }
    values
}

#[test]
fn integers_equal_the_reference() {
    let ops = [
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
    let a = integers();
    let len = a.len();
    let b: Vec<i64> = (0..len).map(|k| a[(k * 131 + 5) % len]).collect();
    let bytes = |dtype: DType, values: &[i64]| {
        Scalar::to_bytes(
            dtype,
            &values.iter().map(|&v| Scalar::I64(v).convert(Type::of(dtype))).collect::<Vec<_>>(),
        )
    };
    for dtype in [DType::I64, DType::U64, DType::I32, DType::U32, DType::I16, DType::U8] {
        let program = Arc::new(map(&[dtype, dtype], len, |e, regs| {
            let (x, y) = (regs[0], regs[1]);
            let mut results: Vec<(Reg, DType)> = ops.iter().map(|&op| (e.binary(op, x, y), dtype)).collect();
            for op in [CompareOp::Eq, CompareOp::Lt, CompareOp::Le] {
                results.push((e.compare(op, x, y), DType::Bool));
            }
            for op in [UnaryOp::Abs, UnaryOp::Sign, UnaryOp::Neg] {
                results.push((e.unary(op, x), dtype));
            }
            for to in [DType::F32, DType::I64, DType::U64, DType::I32, DType::U32, DType::Bool] {
                results.push((e.convert(x, Type::of(to)), to));
            }
            results
        }));
        let inputs = [bytes(dtype, &a), bytes(dtype, &b)];
        let [got, expected] = both().map(|backend| run(&program, backend, &inputs).expect("no guard fails"));
        for (k, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let size = program.buffer(program.outputs[k]).dtype.size();
            let at = got.chunks(size).zip(expected.chunks(size)).position(|(got, expected)| got != expected);
            assert!(at.is_none(), "{dtype}, result {k} of {} and {}", a[at.unwrap_or(0)], b[at.unwrap_or(0)]);
        }
    }
}

/// Conversions of floats to integers of every size equal the reference.
#[test]
fn floats_become_integers() {
    let values = floats();
    let types = [DType::I64, DType::U64, DType::I32, DType::U32, DType::Bool];
    let program = Arc::new(map(&[DType::F32], values.len(), |b, regs| {
        types.iter().map(|&to| (b.convert(regs[0], Type::of(to)), to)).collect()
    }));
    let inputs = [bytes_of(&values)];
    let [got, expected] = both().map(|backend| run(&program, backend, &inputs).expect("no guard"));
    for (dtype, (got, expected)) in types.iter().zip(got.iter().zip(&expected)) {
        let at = got
            .chunks(dtype.size())
            .zip(expected.chunks(dtype.size()))
            .position(|(got, expected)| got != expected);
        assert!(at.is_none(), "{} as {dtype}", values[at.unwrap_or(0)]);
    }
}

/// The error names the smallest point with a failed guard, and nothing is stored.
#[test]
fn a_guard_that_fails_names_its_point() {
    let labels = |faults: &[(usize, i64)]| {
        let mut labels: Vec<i64> = (0..1000).map(|k| k % 10).collect();
        faults.iter().for_each(|&(at, label)| labels[at] = label);
        labels.iter().flat_map(|label| label.to_le_bytes()).collect::<Vec<u8>>()
    };
    let program = Arc::new(map(&[DType::I64], 1000, |b, regs| {
        let checked = b.guard(regs[0], 10);
        let value = b.convert(checked, Type::F32);
        vec![(value, DType::F32)]
    }));
    for faults in [&[(999, 10)][..], &[(700, -1), (300, 11)], &[(0, i64::MIN)], &[(5, 1 << 33)]] {
        let inputs = [labels(faults)];
        let [got, expected] = both().map(|backend| run(&program, backend, &inputs));
        assert_eq!(got, expected);
        assert!(got.is_err());
    }
    let inputs = [labels(&[])];
    assert_eq!(run(&program, device(), &inputs), run(&program, Arc::new(Reference), &inputs));
}

/// Random bits are equal on all backends.
#[test]
fn random_bits_are_the_same() {
    let program = Arc::new(map(&[DType::U64], 500, |b, regs| {
        let seed = b.run_scalar(ortrain_expr::RunScalar::Seed);
        let step = b.run_scalar(ortrain_expr::RunScalar::TrainStep);
        let bits = b.push(ortrain_expr::Inst::Random(seed, step, regs[0]), Type::U32);
        vec![(bits, DType::U32)]
    }));
    let indices: Vec<u8> = (0..500u64).flat_map(|k| (k * 0x1_0000_0003).to_le_bytes()).collect();
    let inputs = [indices];
    assert_eq!(run(&program, device(), &inputs), run(&program, Arc::new(Reference), &inputs));
}
