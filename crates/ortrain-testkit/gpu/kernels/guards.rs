//! Group kernels, which must store nothing after a failed guard.

use ortrain_expr::{Access, Builder, DType, Dims, Precision, ReduceOp, Reduction, Type};
use ortrain_program::{Load, MatMul, Nest, Operand};

use super::epilogue::Epilogue;
use super::test_program::TestProgramBuilder;

/// Adds a load by indices, one of which is out of range.
fn add_failing_guard(builder: &mut TestProgramBuilder) {
    let index = builder.input(vec![1.0, 2.0, 10.0, 11.0]);
    let table = builder.random(10);
    let mut b = Builder::new();
    let at = b.load(0, Type::F32);
    let at = b.convert(at, Type::I64);
    let at = b.guard(at, 10);
    let loaded = b.load_at(1, at, Type::F32);
    let contiguous = Operand::contiguous(builder.result(4), DType::F32, &[4]);
    let none = Access { dtype: DType::F32, offset: 0, strides: [0].into_iter().collect(), len: 10 };
    let loads = vec![
        Load::Buffer(Operand::contiguous(index, DType::F32, &[4])),
        Load::Buffer(Operand { buffer: table, access: none }),
    ];
    builder.emit(Nest::elementwise(Dims::from_slice(&[4]), loads, b.finish(&[loaded]), vec![contiguous]));
}

#[test]
fn failed_guard_stops_products() {
    for [m, n, k] in [[40, 50, 20], [3, 40, 100], [40, 40, 1000]] {
        let mut builder = TestProgramBuilder::new(Precision::F32);
        add_failing_guard(&mut builder);
        let [a, b] = [[m, k], [k, n]]
            .map(|dims| Operand::contiguous(builder.random(dims[0] * dims[1]), DType::F32, &dims));
        let epilogue = Epilogue::Accumulated.nest(&mut builder, &[m, n]);
        let (batch, precision) = (Dims::new(), Precision::F32);
        builder.emit(MatMul { batch, m, n, k, a, b, rounded: [None; 2], precision, epilogue });
        builder.finish().assert_changes_nothing();
    }
}

/// Sums of rows, then the rows minus their sums, both stored in planes.
#[test]
fn failed_guard_stops_reductions() {
    for ([rows, size], strides) in [([5, 100], [100, 1]), ([40, 100], [1, 40]), ([2, 40_000], [40_000, 1])] {
        for with_rows in [false, true] {
            let mut builder = TestProgramBuilder::new(Precision::F32);
            add_failing_guard(&mut builder);
            let len = rows * size;
            let strides = strides.into_iter().collect();
            let access = Access { dtype: DType::F32, offset: 0, strides, len };
            let from = Operand { buffer: builder.random(len), access: access.clone() };
            let strides = [1, 0].into_iter().collect();
            let sums = Access { dtype: DType::F32, offset: 0, strides, len: rows };
            let mut b = Builder::new();
            let x = b.load(0, Type::F32);
            let sum = b.reduced(0, Type::F32);
            let rest = b.sub(x, sum);
            let mut results = vec![sum];
            let mut stores = vec![Operand { buffer: builder.state(rows), access: sums }];
            if with_rows {
                results.push(rest);
                stores.push(Operand { buffer: builder.state(len), access });
            }
            let (expr, values) = b.finish_keeping(&results, &[x]);
            builder.emit(Nest {
                dims: Dims::from_slice(&[rows, size]),
                inner: 1,
                segments: None,
                loads: vec![Load::Buffer(from)],
                expr,
                reductions: vec![Reduction { op: ReduceOp::Sum, value: values[0] }],
                stores,
            });
            builder.finish().assert_changes_nothing();
        }
    }
}
