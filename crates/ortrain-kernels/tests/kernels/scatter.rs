//! Tests of scatter: adding to, or writing, rows selected by indices.

use ortrain_expr::{BinaryOp, DType, Scalar};
use ortrain_kernels::{Isa, Pool, ScatterDesc, ScatterKernel};

use crate::common::*;

fn index_bytes(dtype: DType, indices: &[i64]) -> Vec<u8> {
    let mut bytes = vec![0; indices.len() * dtype.size()];
    indices.iter().enumerate().for_each(|(i, &index)| put(&mut bytes, dtype, i, Scalar::I64(index)));
    bytes
}

fn run_scatter(
    desc: ScatterDesc,
    isa: Isa,
    threads: usize,
    out: &[u8],
    indices: &[u8],
    src: &[u8],
) -> Vec<u8> {
    let kernel = ScatterKernel::new(desc, isa).unwrap();
    let mut out = out.to_vec();
    // SAFETY: buffers have the description's shapes.
    unsafe { kernel.run(out.as_mut_ptr(), indices.as_ptr(), src.as_ptr(), &Pool::new(threads)) };
    out
}

#[test]
fn sums_are_in_index_order() {
    let types = [DType::F32, DType::F64, DType::F16, DType::BF16, DType::I32, DType::I64];
    check(&types, false);
}

#[test]
fn last_write_wins() {
    let types = [DType::F32, DType::F64, DType::F16, DType::I64, DType::U8, DType::I16, DType::Bool];
    check(&types, true);
}

/// Compares the kernel with a scalar loop over many shapes. `last` selects writing instead of adding.
fn check(types: &[DType], last: bool) {
    let mut random = Random(4);
    for (outer, size, count, inner) in [
        (1, 1, 1, 1),
        (2, 5, 30, 3),
        (1, 10, 400, 130),
        (3, 4, 100, 64),
        (1, 7, 0, 5),
        (1, 0, 4, 5),
        (0, 3, 4, 5),
        (4, 3, 50, 0),
        (1, 50, 3000, 700),
    ] {
        for &dtype in types {
            for index in [DType::I32, DType::I64] {
                let desc = ScatterDesc { outer, size, count, inner, dtype, index, overwrites: last };
                let indices: Vec<i64> =
                    (0..count).map(|_| random.below(2 * size + 3) as i64 - size as i64 - 1).collect();
                let fill = |random: &mut Random, n: usize| {
                    let mut bytes = vec![0; n * dtype.size()];
                    (0..n).for_each(|i| put(&mut bytes, dtype, i, Scalar::F64(random.unit() * 100.0)));
                    bytes
                };
                let out = fill(&mut random, outer * size * inner);
                let src = fill(&mut random, outer * count * inner);
                let mut expected = out.clone();
                for o in 0..outer {
                    for (j, &at) in indices.iter().enumerate() {
                        let at = if at < 0 { at + size as i64 } else { at };
                        if at < 0 || at >= size as i64 {
                            continue;
                        }
                        for i in 0..inner {
                            let to = (o * size + at as usize) * inner + i;
                            let from = get(&src, dtype, (o * count + j) * inner + i);
                            let sum = |to: Scalar| Scalar::binary(BinaryOp::Add, to, from);
                            let result = if last { from } else { sum(get(&expected, dtype, to)) };
                            put(&mut expected, dtype, to, result);
                        }
                    }
                }
                let indices = index_bytes(index, &indices);
                for isa in Isa::available() {
                    for threads in 1..=3 {
                        let got = run_scatter(desc, isa, threads, &out, &indices, &src);
                        assert!(got == expected, "{desc:?} on {threads} threads at {isa}");
                    }
                }
            }
        }
    }
}

#[test]
fn unsupported_types_are_rejected() {
    let (dtype, index) = (DType::F32, DType::I64);
    let good = ScatterDesc { outer: 1, size: 2, count: 3, inner: 4, dtype, index, overwrites: false };
    ScatterKernel::new(good, Isa::PORTABLE).unwrap();
    for desc in [
        ScatterDesc { dtype: DType::Bool, ..good },
        ScatterDesc { index: DType::F32, ..good },
        ScatterDesc { outer: usize::MAX, ..good },
    ] {
        ScatterKernel::new(desc, Isa::PORTABLE).unwrap_err();
    }
}
