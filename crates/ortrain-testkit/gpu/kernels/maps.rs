//! Tests of vectorized element-wise maps: their kernels load and store several elements at a time.

use ortrain_expr::{Access, Builder, DType, Dims, Precision, Type};
use ortrain_program::{BufferId, Load, Nest, Operand};

use super::test_program::TestProgramBuilder;

fn access(dtype: DType, dims: &[usize], offset: usize, strides: &[isize]) -> Access {
    let mut access = Access { dtype, offset, strides: strides.iter().copied().collect(), len: usize::MAX };
    access.len = access.position_range(dims).map_or(0, |(_, high)| high as usize + 1);
    access
}

/// Tests a map with three operands at an offset: a matrix, a vector with one element per row, and a vector with one
/// element per column.
fn map(dims: [usize; 2], offset: usize, is_transposed: bool) {
    let [rows, columns] = dims.map(|dim| dim as isize);
    let mut test = TestProgramBuilder::new(Precision::F32);
    let mut operand = |strides: [isize; 2]| {
        let access = access(DType::F32, &dims, offset, &strides);
        Operand { buffer: test.random(access.len), access }
    };
    let loads =
        [operand(if is_transposed { [1, rows] } else { [columns, 1] }), operand([1, 0]), operand([0, 1])];
    let mut b = Builder::new();
    let [x, row, column] = [0, 1, 2].map(|slot| b.load(slot, Type::F32));
    let at = b.coordinate(1);
    let at = b.convert(at, Type::F32);
    let hundredth = b.constant(Type::F32, 0.01);
    let at = b.mul(at, hundredth);
    let sum = b.add(x, row);
    let sum = b.add(sum, at);
    let product = b.mul(sum, column);
    let store = Operand::contiguous(test.result(dims[0] * dims[1]), DType::F32, &dims);
    let expr = b.finish(&[product]);
    let loads = loads.into_iter().map(Load::Buffer).collect();
    test.emit(Nest::elementwise(Dims::from_slice(&dims), loads, expr, vec![store]));
    test.finish().assert_agrees(&format!("a map over {dims:?} from {offset}, turned: {is_transposed}"));
}

#[test]
fn maps_of_any_layout() {
    for dims in [[512, 128], [300, 260], [1, 1 << 16], [520, 130], [700, 101]] {
        for offset in [0, 4, 3] {
            [false, true].into_iter().for_each(|is_transposed| map(dims, offset, is_transposed));
        }
    }
}

/// Tests rows with gaps. If `same` is true, the map also reads one element of the same buffer at every point.
#[test]
fn maps_with_remainders() {
    for (pitch, same) in [(257, false), (260, false), (256, true)] {
        let dims = [300, 256];
        let mut test = TestProgramBuilder::new(Precision::F32);
        let rows = access(DType::F32, &dims, 0, &[pitch, 1]);
        let len = rows.len;
        let x = test.random(len);
        let scalar = Access { len, ..access(DType::F32, &dims, 5, &[0, 0]) };
        let mut loads = vec![Load::Buffer(Operand { buffer: x, access: rows })];
        let mut b = Builder::new();
        let mut result = b.load(0, Type::F32);
        if same {
            loads.push(Load::Buffer(Operand { buffer: x, access: scalar }));
            let scalar_value = b.load(1, Type::F32);
            result = b.sub(result, scalar_value);
        }
        let store = Operand::contiguous(test.result(300 * 256), DType::F32, &dims);
        // Second reader of `x`, so that the result does not reuse the bytes of `x`.
        let copy = Operand::contiguous(test.result(len), DType::F32, &[len]);
        let nest = Nest::elementwise(Dims::from_slice(&dims), loads, b.finish(&[result]), vec![store]);
        test.emit(nest);
        let contiguous = Operand::contiguous(x, DType::F32, &[len]);
        test.emit(Nest::copy(&[len], contiguous, copy));
        test.finish().assert_agrees(&format!("rows of 256 every {pitch}"));
    }
}

/// Tests numbers that are stored in the narrow type `dtype` and read again. The offset may be unaligned to words.
fn narrow(dtype: DType, len: usize, offset: usize) {
    let mut test = TestProgramBuilder::new(Precision::F32);
    let x = test.random(len);
    let padded = test.builder.work("narrow", dtype, len + offset);
    let to = test.result(len);
    let mut emit = |from: (BufferId, DType, usize), to: (BufferId, DType, usize), factor: f64| {
        let mut b = Builder::new();
        let element = b.load(0, Type::of(from.1));
        let element = b.convert(element, Type::F32);
        let factor = b.constant(Type::F32, factor);
        let mut scaled = b.mul(element, factor);
        if to.1 == DType::Bool {
            // Small numbers are truncated to zero, which is false.
            scaled = b.convert(scaled, Type::I32);
        }
        let result = b.convert(scaled, Type::of(to.1));
        let operand = |(buffer, dtype, offset): (BufferId, DType, usize)| Operand {
            buffer,
            access: Access { len: len + offset, ..access(dtype, &[len], offset, &[1]) },
        };
        let nest = Nest::elementwise(
            Dims::from_slice(&[len]),
            vec![Load::Buffer(operand(from))],
            b.finish(&[result]),
            vec![operand(to)],
        );
        test.emit(nest);
    };
    emit((x, DType::F32, 0), (padded, dtype, offset), if dtype == DType::Bool { 2.0 } else { 100.0 });
    emit((padded, dtype, offset), (to, DType::F32, 0), 0.25);
    test.finish().assert_agrees(&format!("{len} of {dtype} from {offset}"));
}

#[test]
fn narrow_elements_by_words() {
    for dtype in [DType::F16, DType::BF16, DType::I8, DType::U8, DType::I16, DType::U16, DType::Bool] {
        for len in [4, 64, 1000, 1001] {
            [0, 4].into_iter().for_each(|offset| narrow(dtype, len, offset));
        }
        narrow(dtype, 64, 2);
    }
}

/// Tests in-place addition to a plane, with and without alignment to quads (four elements).
#[test]
fn planes_are_updated_by_quads() {
    for before in [0, 4, 1] {
        let len = 1 << 16;
        let mut test = TestProgramBuilder::new(Precision::F32);
        test.plane = vec![7.0; before];
        let x = test.random(len);
        let state = test.state(len);
        let contiguous = |id: BufferId| Operand::contiguous(id, DType::F32, &[len]);
        let mut b = Builder::new();
        let [x_value, old] = [0, 1].map(|slot| b.load(slot, Type::F32));
        let sum = b.add(x_value, old);
        let loads = vec![Load::Buffer(contiguous(x)), Load::Buffer(contiguous(state))];
        test.emit(Nest::elementwise(
            Dims::from_slice(&[len]),
            loads,
            b.finish(&[sum]),
            vec![contiguous(state)],
        ));
        test.finish().assert_agrees(&format!("a plane from element {before}"));
    }
}
