//! Scattered sums of rows: few and many indices, rows with several indices and rows without an index.

use ortrain_expr::{DType, Precision};
use ortrain_graph::Tensor;
use ortrain_program::{Operand, ScatterAdd};

use super::test_program::TestProgramBuilder;

fn scatter([outer, rows, count, inner]: [usize; 4], indices: &[i64], last: bool) {
    for wide in [true, false] {
        let mut m = TestProgramBuilder::new(Precision::F32);
        let target = m.state(outer * rows * inner);
        let source = m.random(outer * count * inner);
        let numbers: Vec<i64> = (0..count).map(|k| indices[k % indices.len()]).collect();
        let narrow: Vec<i32> = numbers.iter().map(|&index| index as i32).collect();
        let tensor = if wide {
            Tensor::i64(&[count], &numbers)
        } else {
            Tensor::from_slice(DType::I32, &[count], &narrow)
        };
        let index = m.builder.constant("indices", &tensor);
        m.emit(ScatterAdd {
            target: Operand::contiguous(target, DType::F32, &[outer * rows * inner]),
            source: Operand::contiguous(source, DType::F32, &[outer * count * inner]),
            index: Operand::contiguous(index, tensor.dtype(), &[count]),
            outer,
            rows,
            count,
            inner,
            overwrites: last,
        });
        m.finish().assert_agrees(&format!("{outer} {rows} {count} {inner}, last: {last}, wide: {wide}"));
    }
}

#[test]
fn indexed_rows_are_written() {
    let mixed = [3, -1, 0, 3, 5, 3, -7, 1, -4];
    for last in [false, true] {
        for count in [1, 2, 31, 32, 33, 100, 700] {
            scatter([1, 7, count, 5], &mixed, last);
            scatter([2, 7, count, 1], &mixed, last);
        }
        // One row for all indices, and a separate row for each index.
        scatter([1, 9, 300, 3], &[4], last);
        scatter([1, 300, 300, 2], &(0..300).map(|k| (k * 7) % 300).collect::<Vec<_>>(), last);
        // More rows than indices.
        scatter([1, 1000, 40, 4], &[999, 0, -1, 500], last);
    }
}
