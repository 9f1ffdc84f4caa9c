//! Convolutions.

use ortrain_expr::{ConvPass, ConvShape, DType, Precision, SlidingAxis};
use ortrain_program::{Conv, Operand};

use super::epilogue::{EPILOGUES, Epilogue};
use super::test_program::TestProgramBuilder;

/// Tests a convolution: the shape contains images, groups, and input and output channels per group.
fn convolution(
    pass: ConvPass,
    shape: [usize; 4],
    axes: &[SlidingAxis],
    precision: Precision,
    finish: Epilogue,
) {
    let [batch, groups, channels_in, channels_out] = shape;
    let axes = axes.iter().copied().collect();
    let shape = ConvShape { pass, batch, groups, channels_in, channels_out, axes };
    let [a_dims, b_dims, dims] = shape.operands();
    let mut builder = TestProgramBuilder::new(precision);
    let [a, b] = [a_dims, b_dims]
        .map(|dims| Operand::contiguous(builder.random(dims.iter().product()), DType::F32, &dims));
    let epilogue = finish.nest(&mut builder, &dims);
    let precision = precision.for_product(shape.product_sides());
    let what = format!("{shape:?} {precision} {finish:?}");
    builder.emit(Conv { shape, a, b, precision, epilogue });
    builder.finish().assert_agrees(&what);
}

const PASSES: [ConvPass; 3] = [ConvPass::Output, ConvPass::InputGradient, ConvPass::FilterGradient];

/// Returns an axis of sliding windows.
fn axis(
    input: usize,
    kernel: usize,
    [stride, dilation]: [usize; 2],
    before: isize,
    after: isize,
) -> SlidingAxis {
    let span = input as isize + before + after - ((kernel - 1) * dilation) as isize - 1;
    let output = span.max(0).unsigned_abs() / stride + 1;
    SlidingAxis { input, output, kernel, stride, dilation, padding_before: before }
}

#[test]
fn convolutions_of_every_pass() {
    let adjacent = [axis(9, 3, [1, 1], 1, 1), axis(10, 3, [1, 1], 1, 1)];
    let strided = [axis(11, 3, [2, 1], 1, 2), axis(12, 2, [1, 3], 0, 1)];
    let point = [axis(6, 1, [1, 1], 0, 0), axis(7, 1, [1, 1], 0, 0)];
    let line = [axis(40, 5, [3, 2], 4, 4)];
    let space = [axis(4, 2, [1, 1], 1, 0), axis(5, 3, [2, 1], 1, 1), axis(3, 1, [1, 1], 0, 0)];
    let cropped = [axis(9, 3, [1, 1], -1, 1), axis(8, 2, [2, 1], 0, -1)];
    for (at, (shape, axes)) in [
        ([2, 1, 33, 40], &adjacent[..]),
        ([3, 1, 9, 65], &strided[..]),
        ([2, 1, 64, 63], &point[..]),
        ([4, 1, 17, 9], &line[..]),
        ([2, 2, 10, 12], &adjacent[..]),
        ([1, 3, 20, 7], &strided[..]),
        ([2, 5, 1, 1], &adjacent[..]),
        ([2, 2, 3, 4], &strided[..]),
        ([1, 1, 3, 34], &adjacent[..]),
        ([2, 1, 12, 1], &adjacent[..]),
        ([2, 1, 9, 10], &space[..]),
        ([2, 1, 10, 11], &cropped[..]),
    ]
    .into_iter()
    .enumerate()
    {
        for pass in PASSES {
            convolution(pass, shape, axes, Precision::F32, EPILOGUES[at % 4]);
        }
    }
}

#[test]
fn rounded_convolutions() {
    let axes = [axis(6, 3, [1, 1], 1, 1), axis(7, 3, [2, 1], 1, 1)];
    for precision in [Precision::Bf16, Precision::Bf16x3, Precision::Bf16x6] {
        for pass in PASSES {
            convolution(pass, [2, 1, 33, 20], &axes, precision, Epilogue::Store);
        }
    }
}

/// Gradients of filters: long sums over images and positions.
#[test]
fn long_gradients_of_filters() {
    let axes = [axis(20, 3, [1, 1], 1, 1), axis(21, 3, [1, 1], 1, 1)];
    for shape in [[4, 1, 9, 12], [3, 6, 1, 1], [5, 1, 3, 8]] {
        convolution(ConvPass::FilterGradient, shape, &axes, Precision::F32, Epilogue::Accumulated);
    }
}
