//! Matrix products and convolutions of bytes.

use ortrain_expr::{Access, Builder, ConvPass, ConvShape, DType, Dims, Precision, SlidingAxis, Type};
use ortrain_graph::Tensor;
use ortrain_program::{IntegerProduct, IntegerShape, Load, Nest, Operand};

use super::test_program::{TestProgramBuilder, random_numbers};

/// Types of the factors.
const TYPES: [[DType; 2]; 2] = [[DType::U8, DType::I8], [DType::I8, DType::U8]];

/// Adds a constant of random bytes.
fn bytes(test: &mut TestProgramBuilder, dtype: DType, dims: &[usize]) -> Operand {
    let count = dims.iter().product();
    let numbers = random_numbers(count + dims.len(), count);
    let values: Vec<u8> = numbers.iter().map(|x| (x * 127.0 + 128.0) as u8).collect();
    let tensor = Tensor::from_slice(dtype, dims, &values).stored();
    Operand::contiguous(test.builder.constant("bytes", &tensor), dtype, dims)
}

/// Returns an epilogue that stores the scaled sums.
fn scaled(test: &mut TestProgramBuilder, dims: &[usize]) -> Nest {
    let store = Operand::contiguous(test.result(dims.iter().product()), DType::F32, dims);
    let mut b = Builder::new();
    let sum = b.load(0, Type::I32);
    let (sum, scale) = (b.convert(sum, Type::F32), b.constant(Type::F32, 0.125));
    let scaled = b.mul(sum, scale);
    let loads = vec![Load::Accumulator(DType::I32)];
    Nest::elementwise(Dims::from_slice(dims), loads, b.finish(&[scaled]), vec![store])
}

#[test]
fn products_of_bytes() {
    for (at, [batch, m, n, k]) in [[1, 1, 1, 1], [2, 33, 17, 40], [1, 5, 130, 300]].into_iter().enumerate() {
        for types in TYPES {
            let mut test = TestProgramBuilder::new(Precision::F32);
            let (a, mut b) =
                (bytes(&mut test, types[0], &[batch, m, k]), bytes(&mut test, types[1], &[n, k]));
            b.access.strides = [0, 1, k as isize].into_iter().collect();
            let (mut rows, mut columns) =
                (bytes(&mut test, types[0], &[m]), bytes(&mut test, types[1], &[n]));
            rows.access.strides = [0, 1, 0].into_iter().collect();
            columns.access.strides = [0, 0, 1].into_iter().collect();
            let zero_points = [(at != 1).then_some(rows), (at > 0).then_some(columns)];
            let epilogue = scaled(&mut test, &[batch, m, n]);
            let shape = IntegerShape::Matrices { batch: [batch].into_iter().collect(), m, n, k };
            test.emit(IntegerProduct { shape, a, b, zero_points, epilogue });
            test.finish().assert_agrees(&format!("{batch}x{m}x{n}x{k} of {types:?}"));
        }
    }
}

#[test]
fn convolutions_of_bytes() {
    let axis = |input, kernel, stride, dilation, before: usize| SlidingAxis {
        input,
        output: (input + 2 * before - (kernel - 1) * dilation - 1) / stride + 1,
        kernel,
        stride,
        dilation,
        padding_before: before as isize,
    };
    let cases = [
        ([1, 1, 3, 5], vec![axis(9, 3, 1, 1, 1), axis(8, 3, 2, 1, 1)]),
        ([2, 2, 4, 3], vec![axis(7, 2, 1, 2, 2), axis(6, 1, 1, 1, 0)]),
        ([1, 1, 2, 4], vec![axis(20, 5, 2, 1, 2)]),
    ];
    for (at, ([batch, groups, channels_in, channels_out], axes)) in cases.into_iter().enumerate() {
        for types in TYPES {
            let axes = axes.iter().copied().collect();
            let shape = ConvShape { pass: ConvPass::Output, batch, groups, channels_in, channels_out, axes };
            let [image, filter, result] = shape.operands();
            let mut test = TestProgramBuilder::new(Precision::F32);
            let (a, b) = (bytes(&mut test, types[0], &image), bytes(&mut test, types[1], &filter));
            let of_filter = if at % 2 == 0 { 1 } else { groups * channels_out };
            let zero_points =
                [(0, 1), (1, of_filter)].map(|(side, count)| Some(bytes(&mut test, types[side], &[count])));
            let what = format!("{shape:?} of {types:?}");
            let epilogue = scaled(&mut test, &result);
            test.emit(IntegerProduct { shape: IntegerShape::Windows(shape), a, b, zero_points, epilogue });
            test.finish().assert_agrees(&what);
        }
    }
}

/// Faulty products are refused when they are emitted.
#[test]
fn faulty_products_of_bytes_are_refused() {
    let mut test = TestProgramBuilder::new(Precision::F32);
    let (a, b) = (bytes(&mut test, DType::U8, &[4, 6]), bytes(&mut test, DType::I8, &[6, 5]));
    let epilogue = scaled(&mut test, &[4, 5]);
    let shape = |k| IntegerShape::Matrices { batch: Dims::new(), m: 4, n: 5, k };
    let sound = IntegerProduct { shape: shape(6), a, b, zero_points: [None, None], epilogue };
    let zero_point = |test: &mut TestProgramBuilder, dtype, strides: [isize; 2]| {
        let operand = bytes(test, dtype, &[6]);
        let access = Access { strides: strides.into_iter().collect(), ..operand.access.clone() };
        [Some(operand.with_access(access)), None]
    };
    let zeros = zero_point(&mut test, DType::I8, [0, 0]);
    let along = zero_point(&mut test, DType::U8, [0, 1]);
    let float = Operand::contiguous(test.random(24), DType::F32, &[4, 6]);
    let faulty = [
        (IntegerProduct { shape: shape(7), ..sound.clone() }, "of a factor of 24"),
        (IntegerProduct { a: float, ..sound.clone() }, "a factor of type float32"),
        (
            IntegerProduct { zero_points: zeros, ..sound.clone() },
            "zero points of type int8 for a factor of type uint8",
        ),
        (
            IntegerProduct { zero_points: along, ..sound.clone() },
            "the access to the zero points does not fit",
        ),
    ];
    for (product, part) in faulty {
        let error = test.refusal(product);
        assert!(error.contains(part), "{error}");
    }
    test.emit(sound);
}
