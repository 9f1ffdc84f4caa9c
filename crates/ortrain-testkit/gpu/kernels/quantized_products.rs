//! Matrix products with packed integers.

use ortrain_expr::{DType, Precision, QuantizedMatrix, QuantizedNumbers};
use ortrain_graph::Tensor;
use ortrain_program::{Operand, QuantizedFactor, QuantizedMatMul};

use super::epilogue::EPILOGUES;
use super::test_program::{TestProgramBuilder, random_numbers};

/// Sizes of products, and of their blocks.
const SIZES: [([usize; 3], usize); 7] = [
    ([1, 1, 1], 16),
    ([1, 70, 200], 32),
    ([9, 33, 100], 48),
    ([33, 9, 64], 64),
    ([65, 70, 19], 16),
    ([127, 130, 40], 32),
    ([8, 40, 1500], 128),
];

#[test]
fn products_with_packed_integers() {
    let table = QuantizedNumbers::Table(std::array::from_fn(|i| (i as f32 - 7.5) / 8.0));
    for (at, (sides, block)) in SIZES.into_iter().enumerate() {
        for bits in [2, 4, 8] {
            for has_lines_of_columns in [true, false] {
                let precision = if (at + bits) % 3 == 0 { Precision::Bf16x3 } else { Precision::F32 };
                let mut test = TestProgramBuilder::new(precision);
                let [m, n, k] = sides;
                let (lines, len) = if has_lines_of_columns { (n, k) } else { (k, n) };
                let numbers = match bits == 4 && at % 2 == 0 {
                    true => table,
                    false => QuantizedNumbers::Distances { zero_point: (1 << (bits - 1)) as f32 },
                };
                let (is_high_first, blocks) = (at % 3 == 1, len.div_ceil(block));
                let matrix = QuantizedMatrix { bits, is_high_first, block, blocks, lines, numbers };
                let integers = random_numbers(at, matrix.num_bytes());
                let integers: Vec<u8> = integers.iter().map(|x| (x * 127.0 + 128.0) as u8).collect();
                let bytes = Tensor::from_slice(DType::U8, &[integers.len()], &integers).stored();
                let scales: Vec<f32> = random_numbers(at + 1, matrix.num_blocks());
                let scales = Tensor::f32(&[scales.len()], &scales).stored();
                let zero_points: Vec<f32> = random_numbers(at + 2, matrix.num_blocks());
                let zero_points = Tensor::f32(&[zero_points.len()], &zero_points).stored();
                let zero_points = test.builder.constant("zero points", &zero_points);
                let b = QuantizedFactor {
                    matrix,
                    has_lines_of_columns,
                    bytes: test.builder.constant("integers", &bytes),
                    scales: test.builder.constant("scales", &scales),
                    zero_points: (numbers != table && at % 2 == 1).then_some(zero_points),
                    rounded: [None, Some(DType::F16), Some(DType::BF16)][(at + bits / 2) % 3],
                };
                let a = Operand::contiguous(test.random(m * k), DType::F32, &[m, k]);
                let epilogue = EPILOGUES[at % 4].nest(&mut test, &[m, n]);
                let precision = precision.for_product(sides);
                let what = format!("{sides:?} of {matrix:?}, {precision}");
                test.emit(QuantizedMatMul { m, n, k, a, b, precision, epilogue });
                test.finish().assert_agrees(&what);
            }
        }
    }
}
