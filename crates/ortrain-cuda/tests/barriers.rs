//! Every barrier of a kernel matters: without it, the orders of the lanes give different results.

mod common;

use std::sync::Arc;

use ortrain_cuda::Cuda;
use ortrain_expr::{Builder, DType, Dims, Precision, ReduceOp, Reduction, Type};
use ortrain_program::{
    Backend, Bindings, BufferLocation, GradientMode, GradientModes, Instruction, Load, MatMul, Nest, Operand,
    Program, ProgramBuilder, Scalars, Workspace,
};

use common::select_software;
use common::software::{Lanes, set_lanes};

/// Environment variable with the barrier that each kernel loses.
const DROPPED: &str = "SOFTWARE_NVRTC_DROP_BARRIER";

/// Builds a program of a tiled product.
fn product() -> Arc<Program> {
    let [m, n, k] = [40, 50, 20];
    let mut b = ProgramBuilder::new();
    let [left, right, to] = [m * k, k * n, m * n].map(|len| b.work("x", DType::F32, len));
    let mut expr = Builder::new();
    let sum = expr.load(0, Type::F32);
    let loads = vec![Load::Accumulator(DType::F32)];
    let stores = vec![Operand::contiguous(to, DType::F32, &[m, n])];
    let product = MatMul {
        batch: Dims::new(),
        m,
        n,
        k,
        a: Operand::contiguous(left, DType::F32, &[m, k]),
        b: Operand::contiguous(right, DType::F32, &[k, n]),
        rounded: [None; 2],
        precision: Precision::F32,
        epilogue: Nest::elementwise([m, n].into_iter().collect(), loads, expr.finish(&[sum]), stores),
    };
    b.emit(Instruction::from(product), GradientModes::ALL, &"node".into()).expect("the product is valid");
    Arc::new(b.finish_unfused(vec![left, right], vec![to]).expect("it can be planned"))
}

/// Builds a program that subtracts from rows their sums, and the sums of the differences: two dependent reductions.
fn rows() -> Arc<Program> {
    let [count, size] = [6, 300];
    let mut b = ProgramBuilder::new();
    let [from, to] = [count * size; 2].map(|len| b.work("x", DType::F32, len));
    let mut expr = Builder::new();
    let x = expr.load(0, Type::F32);
    let first = expr.reduced(0, Type::F32);
    let difference = expr.sub(x, first);
    let sum = expr.reduced(1, Type::F32);
    let rest = expr.sub(difference, sum);
    let (expr, values) = expr.finish_keeping(&[rest], &[x, difference]);
    let operations = [ReduceOp::Sum, ReduceOp::Sum];
    let nest = Nest {
        dims: [count, size].into_iter().collect(),
        inner: 1,
        segments: None,
        loads: vec![Load::Buffer(Operand::contiguous(from, DType::F32, &[count, size]))],
        expr,
        reductions: operations.into_iter().zip(values).map(|(op, value)| Reduction { op, value }).collect(),
        stores: vec![Operand::contiguous(to, DType::F32, &[count, size])],
    };
    b.emit(Instruction::from(nest), GradientModes::ALL, &"node".into()).expect("the nest is valid");
    Arc::new(b.finish_unfused(vec![from], vec![to]).expect("it can be planned"))
}

/// Returns the result of a program with the lanes in both orders; `None` if lanes left a barrier to others.
fn results(program: &Arc<Program>) -> Option<[Vec<u8>; 2]> {
    let backend: Arc<dyn Backend> =
        Arc::new(Cuda::open("cuda").expect("it was open before").with_min_library_product(u64::MAX));
    let executable = backend.compile(program.clone()).expect("it can run");
    let run = |lanes: Lanes| {
        set_lanes(lanes);
        let mut work = Workspace::new(backend.clone());
        work.reserve(program.work_bytes, executable.scratch_bytes()).ok()?;
        for (seed, &id) in program.inputs.iter().enumerate() {
            let BufferLocation::Work(at) = program.buffer(id).location else {
                unreachable!("inputs are work")
            };
            let value = |k: usize| ((k * 37 + seed * 11) % 101) as f32 / 16.0 - 3.0;
            let bytes: Vec<u8> = (0..program.buffer(id).len).flat_map(|k| value(k).to_le_bytes()).collect();
            work.arena().write(at, &bytes).ok()?;
        }
        let (mode, scalars) = (GradientMode::Accumulate, Scalars::default());
        executable.run(&Bindings { planes: &[] }, &mut work, mode, scalars).ok()?;
        let to = program.buffer(program.outputs[0]);
        let BufferLocation::Work(at) = to.location else { unreachable!("results are work") };
        work.arena().to_vec(at, to.bytes()).ok()
    };
    Some([run(Lanes::Rising)?, run(Lanes::Falling)?])
}

/// Drops a barrier of all kernels that are compiled from now on, or none.
fn drop_barrier(number: Option<usize>) {
    // SAFETY: the test has one thread, and the compiler reads the variable between two calls.
    unsafe { std::env::set_var(DROPPED, number.map_or_else(String::new, |number| number.to_string())) };
    // A new device compiles its kernels again.
    Cuda::open("cuda").expect("it was open before").abandon();
}

#[test]
fn kernels_without_a_barrier_are_found() {
    select_software();
    for (name, program, barriers) in [("a product", product(), 3), ("two reductions", rows(), 17)] {
        let [expected, falling] = results(&program).expect("the device works");
        assert!(expected == falling);
        // There is no barrier behind the last one.
        for number in 0..=barriers {
            drop_barrier(Some(number));
            let is_right =
                results(&program).is_some_and(|both| both.iter().all(|result| *result == expected));
            assert_eq!(is_right, number == barriers, "{name} without barrier {number}");
        }
        drop_barrier(None);
    }
}
