//! Products by cuBLASLt, of every size that the library supports, on the software driver.

mod common;

use std::sync::Arc;

use ortrain_expr::{Access, Builder, DType, Dims, Precision, Reg, Type, UnaryOp};
use ortrain_program::{
    Backend, Bindings, BufferId, BufferLocation, GradientMode, GradientModes, Instruction, Load, MatMul,
    Nest, Operand, Program, ProgramBuilder, Reference, Scalars, Workspace,
};
use ortrain_testkit::programs::{Kinds, Size};
use ortrain_testkit::suites::{self, Report, captured, sequences};
use ortrain_testkit::tolerance;

use common::checked::Checked;
use common::cuda;

/// Returns the device, with all products by the library.
fn library() -> Arc<dyn Backend> {
    Arc::new(cuda().clone().with_min_library_product(0))
}

fn passes(report: &Report) {
    report.passes();
}

#[test]
fn cases_with_products() {
    passes(&suites::cases(&(Arc::new(Checked(library())) as Arc<dyn Backend>)));
}

#[test]
fn layers_with_products() {
    let backend: Arc<dyn Backend> = Arc::new(Checked(library()));
    // A loop and its unrolled form have the same bits only if both or neither use the library.
    for agree in [captured::agree, sequences::agree] {
        passes(&agree(&backend));
    }
}

#[test]
fn planned_programs_with_products() {
    let backend: Arc<dyn Backend> = Arc::new(Checked(library()));
    let kinds = Kinds {
        jumps: false,
        narrow: false,
        windows: false,
        parts: true,
        updates: true,
        segments: false,
        size: Size::Small,
    };
    passes(&suites::random_programs(&backend, kinds, 0..60));
}

/// Layout of a factor: row-major, or transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Rows,
    Columns,
}

/// Returns an operand over `batch + [rows, columns]`.
fn operand(
    buffer: BufferId,
    dtype: DType,
    batch: &[usize],
    [rows, columns]: [usize; 2],
    order: Order,
) -> Operand {
    let dims: Vec<usize> = batch.iter().copied().chain([rows, columns]).collect();
    let mut access = Access::contiguous(dtype, &dims);
    if order == Order::Columns {
        let last = dims.len() - 1;
        (access.strides[last - 1], access.strides[last]) = (1, rows as isize);
    }
    Operand { buffer, access }
}

const SIDES: [usize; 3] = [5, 7, 9];
const BATCH: usize = 3;

/// Builds a program of one product, with an epilogue of the accumulator, the old value of the result if it is read, and
/// a vector.
fn program(
    dtype: DType,
    orders: [Order; 2],
    reads_old: bool,
    epilogue: impl FnOnce(&mut Builder, [Reg; 3]) -> Reg,
) -> Arc<Program> {
    let ([m, n, k], batch) = (SIDES, [BATCH]);
    let mut b = ProgramBuilder::new();
    let [left, right, to, bias] =
        [BATCH * m * k, BATCH * k * n, BATCH * m * n, n].map(|len| b.work("x", dtype, len));
    let ty = Type::of(dtype);
    let mut expr = Builder::new();
    let regs = [0, 1, 2].map(|slot| expr.load(slot, ty));
    let result = epilogue(&mut expr, regs);
    let dims: Dims = [BATCH, m, n].into_iter().collect();
    let whole = operand(to, dtype, &batch, [m, n], Order::Rows);
    let vector = Access { strides: [0, 0, 1].into_iter().collect(), ..Access::contiguous(dtype, &[n]) };
    let vector = Operand { buffer: bias, access: vector };
    let old = if reads_old { whole.clone() } else { vector.clone() };
    let loads = vec![Load::Accumulator(dtype), Load::Buffer(old), Load::Buffer(vector)];
    let product = MatMul {
        batch: batch.into_iter().collect(),
        m,
        n,
        k,
        a: operand(left, dtype, &batch, [m, k], orders[0]),
        b: operand(right, dtype, &batch, [k, n], orders[1]),
        rounded: [None; 2],
        precision: Precision::F32,
        epilogue: Nest::elementwise(dims, loads, expr.finish(&[result]), vec![whole]),
    };
    b.emit(Instruction::from(product), GradientModes::ALL, &"node".into()).expect("the product is valid");
    Arc::new(b.finish_unfused(vec![left, right, to, bias], vec![to]).expect("it can be planned"))
}

/// Runs a program, and returns its result and the description of its kernel.
fn run(program: &Arc<Program>, backend: &Arc<dyn Backend>) -> (Vec<f64>, Vec<String>) {
    let executable = backend.compile(program.clone()).expect("it can run");
    let mut work = Workspace::new(backend.clone());
    work.reserve(program.work_bytes, executable.scratch_bytes()).expect("enough memory");
    for (seed, &id) in program.inputs.iter().enumerate() {
        let buffer = program.buffer(id);
        let values = (0..buffer.len).map(|k| ((k * 37 + seed * 11) % 23) as f64 / 8.0 - 1.4);
        let bytes: Vec<u8> = match buffer.dtype {
            DType::F64 => values.flat_map(f64::to_le_bytes).collect(),
            _ => values.flat_map(|value| (value as f32).to_le_bytes()).collect(),
        };
        let BufferLocation::Work(at) = buffer.location else { unreachable!("inputs are work") };
        work.arena().write(at, &bytes).expect("the device works");
    }
    let bindings = Bindings { planes: &[] };
    executable.run(&bindings, &mut work, GradientMode::Accumulate, Scalars::default()).expect("it runs");
    let result = program.buffer(program.outputs[0]);
    let BufferLocation::Work(at) = result.location else { unreachable!("results are work") };
    let bytes = work.arena().to_vec(at, result.bytes()).expect("the device works");
    let numbers =
        ortrain_expr::Scalar::read_all(result.dtype, &bytes).into_iter().map(ortrain_expr::Scalar::to_f64);
    (numbers.collect(), executable.kernels())
}

/// Compares a program with the reference evaluator, and returns the description of its kernel.
fn checked_kernel(program: &Arc<Program>) -> String {
    let reference: Arc<dyn Backend> = Arc::new(Reference);
    let (expected, _) = run(program, &reference);
    let (got, kernels) = run(program, &library());
    for (got, expected) in got.iter().zip(&expected) {
        assert!(
            (got - expected).abs() <= tolerance::FLOAT32 * expected.abs().max(1.0),
            "{got} {expected}\n{program}"
        );
    }
    kernels.concat()
}

/// The library computes scaling, bias and accumulation. Other epilogues become a map over the product, or stay printed.
#[test]
fn epilogues_are_recognized() {
    let all = [Order::Rows, Order::Columns];
    for orders in all.into_iter().flat_map(|a| all.map(|b| [a, b])) {
        let plain = program(DType::F32, orders, true, |_, [sum, ..]| sum);
        assert_eq!(checked_kernel(&plain), "cuBLASLt: 3 of 5x7x9", "{orders:?}");
    }
    let rows = [Order::Rows; 2];
    let scaled = |e: &mut Builder, [sum, old, bias]: [Reg; 3]| {
        let factor = e.constant(Type::F32, 0.5);
        let scaled = e.mul(sum, factor);
        let total = e.add(scaled, old);
        e.add(total, bias)
    };
    assert_eq!(checked_kernel(&program(DType::F32, rows, true, scaled)), "cuBLASLt: 3 of 5x7x9");
    let accumulated = |e: &mut Builder, [sum, old, _]: [Reg; 3]| e.add(old, sum);
    assert_eq!(checked_kernel(&program(DType::F64, rows, true, accumulated)), "cuBLASLt: 3 of 5x7x9");
    let activated = |e: &mut Builder, [sum, _, bias]: [Reg; 3]| {
        let total = e.add(sum, bias);
        e.unary(UnaryOp::Tanh, total)
    };
    let kernel = checked_kernel(&program(DType::F32, rows, false, activated));
    assert!(kernel.starts_with("cuBLASLt: 3 of 5x7x9, then a map; printed: k"), "{kernel}");
    let product_of_both = |e: &mut Builder, [sum, old, _]: [Reg; 3]| e.mul(sum, old);
    let kernel = checked_kernel(&program(DType::F32, rows, true, product_of_both));
    assert!(kernel.starts_with("printed: k"), "{kernel}");
    let with_bias = |e: &mut Builder, [sum, _, bias]: [Reg; 3]| e.add(sum, bias);
    let kernel = checked_kernel(&program(DType::F64, rows, false, with_bias));
    assert!(kernel.starts_with("cuBLASLt: 3 of 5x7x9, then a map"), "{kernel}");
}

/// Small products stay with their epilogues by default.
#[test]
fn small_products_are_printed() {
    let plain = program(DType::F32, [Order::Rows; 2], true, |_, [sum, ..]| sum);
    let backend: Arc<dyn Backend> = Arc::new(cuda().clone());
    let (_, kernels) = run(&plain, &backend);
    assert!(kernels[0].starts_with("printed: k"), "{kernels:?}");
}
