//! Products and convolutions of bytes.

use ortrain_expr::{
    Access, BinaryOp, Builder, ConvPass, ConvShape, DType, Load, Nest, Precision, SlidingAxis, Type, UnaryOp,
};
use ortrain_kernels::{ConvDesc, ConvKernel, GemmDesc, GemmKernel, Products};

use crate::case::{Buffers, Case, SCALARS};

/// Sides of the weights of products, and numbers of rows.
const SIDES: [usize; 2] = [1024, 4096];
const ROWS: [usize; 3] = [1, 32, 512];
/// Convolutions: channels of the image and of the result, size of the window and of the image.
const CONVOLUTIONS: [[usize; 4]; 4] =
    [[3, 64, 7, 112], [64, 64, 3, 56], [128, 128, 3, 28], [256, 512, 1, 14]];

pub(crate) fn cases() -> Vec<Case> {
    let products = SIDES.into_iter().flat_map(|side| ROWS.map(|rows| product([rows, side, side])));
    products.chain(CONVOLUTIONS.map(convolution)).collect()
}

/// Multiplications of bytes for each multiplication of floats, on machines with instructions for bytes.
const RATE: f64 = 4.0;

/// Returns an epilogue that stores the sums.
fn store(dims: &[usize]) -> Nest {
    let mut b = Builder::new();
    let sum = b.load(0, Type::I32);
    Nest::elementwise(
        dims.iter().copied().collect(),
        vec![Load::Accumulator(DType::I32)],
        b.finish(&[sum]),
        vec![Access::contiguous(DType::I32, dims)],
    )
}

/// Returns an epilogue that scales the sums, and rounds them to bytes.
fn requantize(dims: &[usize]) -> Nest {
    let mut b = Builder::new();
    let sum = b.load(0, Type::I32);
    let [scale, zero, low, high] = [0.01, 128.0, 0.0, 255.0].map(|number| b.constant(Type::F32, number));
    let x = b.convert(sum, Type::F32);
    let x = b.mul(x, scale);
    let x = b.unary(UnaryOp::Round, x);
    let x = b.add(x, zero);
    let x = b.binary(BinaryOp::Max, x, low);
    let x = b.binary(BinaryOp::Min, x, high);
    let x = b.convert(x, Type::U32);
    Nest::elementwise(
        dims.iter().copied().collect(),
        vec![Load::Accumulator(DType::I32)],
        b.finish(&[x]),
        vec![Access::contiguous(DType::U8, dims)],
    )
}

fn product([m, n, k]: [usize; 3]) -> Case {
    let sizes = [m * k, k * n, 4 * m * n, 1];
    let desc = GemmDesc {
        k,
        a: Access::contiguous(DType::U8, &[m, k]),
        b: Access::contiguous(DType::I8, &[k, n]),
        quantized: None,
        zero_points: [Some(Access::broadcast(DType::U8, &[1, 1], &[m, k])), None],
        rounded_to: [None; 2],
        products: Products::F32,
        epilogue: store(&[m, n]),
    };
    Case {
        name: format!("bytes gemm {m}x{n}x{k}"),
        flops: 2.0 * (m * n * k) as f64,
        rate: RATE,
        precision: Precision::F32,
        bytes: sizes.iter().sum::<usize>() as f64,
        compile: Box::new(move |isa, threads| {
            let kernel = GemmKernel::new(&desc, isa).expect("valid description");
            let mut buffers = Buffers::new(&sizes, kernel.scratch_bytes(threads));
            Box::new(move |pool| {
                // SAFETY: buffers have the lengths of the accesses, and belong to this case.
                let result = unsafe { kernel.run(&buffers.bases(), SCALARS, pool, buffers.scratch()) };
                result.expect("no guards");
            })
        }),
    }
}

fn convolution([channels_in, channels_out, kernel, size]: [usize; 4]) -> Case {
    let pad = kernel / 2;
    let output = size + 2 * pad - kernel + 1;
    let axis =
        SlidingAxis { input: size, output, kernel, stride: 1, dilation: 1, padding_before: pad as isize };
    let axes = [axis; 2].into_iter().collect();
    let shape = ConvShape { pass: ConvPass::Output, batch: 1, groups: 1, channels_in, channels_out, axes };
    let [a, b, result] = shape.operands().map(|dims| dims.iter().product::<usize>());
    let sizes = [a, b, result, 1];
    Case {
        name: format!("bytes conv {channels_in}-{channels_out} {size}x{size} k{kernel}"),
        flops: 2.0 * (result * b / channels_out) as f64,
        rate: RATE,
        precision: Precision::F32,
        bytes: sizes.iter().sum::<usize>() as f64,
        compile: Box::new(move |isa, threads| {
            let desc = ConvDesc {
                epilogue: requantize(&shape.output_dims()),
                shape: shape.clone(),
                a: DType::U8,
                b: DType::I8,
                zero_points: [Some(1), None],
                products: Products::F32,
            };
            let kernel = ConvKernel::new(&desc, isa).expect("valid description");
            let mut buffers = Buffers::new(&sizes, kernel.scratch_bytes(threads));
            Box::new(move |pool| {
                // SAFETY: buffers have the lengths of the shape, and belong to this case.
                let result = unsafe { kernel.run(&buffers.bases(), SCALARS, pool, buffers.scratch()) };
                result.expect("no guards");
            })
        }),
    }
}
