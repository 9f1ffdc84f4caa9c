//! Convolutions and the gradients of their operands.

use ortrain_expr::{Access, Builder, ConvPass, ConvShape, DType, Nest, SlidingAxis, Type};
use ortrain_kernels::{ConvDesc, ConvKernel};

use crate::case::{Buffers, Case, SCALARS};

/// A convolution of square images: `[groups, channels in, channels out]` are channels of a group.
#[derive(Clone, Copy)]
struct Layer {
    name: &'static str,
    batch: usize,
    channels: [usize; 3],
    size: usize,
    kernel: usize,
    stride: usize,
    pad: usize,
    dilation: usize,
}

pub(crate) fn cases() -> Vec<Case> {
    let layer = |name, batch, channels, size, kernel, stride, pad| Layer {
        name,
        batch,
        channels,
        size,
        kernel,
        stride,
        pad,
        dilation: 1,
    };
    let depthwise = |name, channels, size, stride| layer(name, 8, [channels, 1, 1], size, 3, stride, 1);
    let layers = [
        layer("resnet first", 4, [1, 3, 64], 224, 7, 2, 3),
        layer("resnet", 4, [1, 64, 64], 56, 3, 1, 1),
        layer("resnet", 4, [1, 64, 128], 56, 3, 2, 1),
        layer("resnet", 4, [1, 64, 128], 56, 1, 2, 0),
        layer("resnet", 4, [1, 128, 128], 28, 3, 1, 1),
        layer("resnet", 4, [1, 256, 256], 14, 3, 1, 1),
        layer("resnet", 4, [1, 256, 512], 14, 3, 2, 1),
        layer("resnet", 4, [1, 512, 512], 7, 3, 1, 1),
        layer("mobilenet first", 8, [1, 3, 32], 96, 3, 2, 1),
        layer("mobilenet", 8, [1, 16, 96], 48, 1, 1, 0),
        layer("mobilenet", 8, [1, 96, 24], 24, 1, 1, 0),
        layer("mobilenet", 8, [1, 144, 24], 24, 1, 1, 0),
        layer("mobilenet", 8, [1, 32, 192], 12, 1, 1, 0),
        layer("mobilenet", 8, [1, 384, 64], 6, 1, 1, 0),
        layer("mobilenet", 8, [1, 96, 576], 6, 1, 1, 0),
        layer("mobilenet", 8, [1, 960, 160], 3, 1, 1, 0),
        layer("mobilenet", 8, [1, 320, 1280], 3, 1, 1, 0),
        depthwise("depthwise", 32, 48, 1),
        depthwise("depthwise", 96, 48, 2),
        depthwise("depthwise", 144, 24, 1),
        depthwise("depthwise", 144, 24, 2),
        depthwise("depthwise", 192, 12, 1),
        depthwise("depthwise", 384, 6, 1),
        depthwise("depthwise", 576, 6, 2),
        depthwise("depthwise", 960, 3, 1),
        layer("lenet", 64, [1, 1, 16], 28, 5, 1, 2),
        layer("lenet", 64, [1, 16, 32], 14, 5, 1, 0),
        Layer { dilation: 2, ..layer("dilated", 2, [1, 64, 64], 32, 3, 1, 2) },
        layer("grouped", 2, [8, 16, 16], 28, 3, 1, 1),
        layer("patches", 2, [1, 3, 192], 224, 16, 16, 0),
    ];
    let passes = [ConvPass::Output, ConvPass::InputGradient, ConvPass::FilterGradient];
    layers.iter().flat_map(|&layer| passes.map(|pass| case(layer, pass))).collect()
}

fn case(layer: Layer, pass: ConvPass) -> Case {
    let Layer {
        name,
        batch,
        channels: [groups, channels_in, channels_out],
        size,
        kernel,
        stride,
        pad,
        dilation,
    } = layer;
    let output = (size + 2 * pad - dilation * (kernel - 1) - 1) / stride + 1;
    let axis = SlidingAxis { input: size, output, kernel, stride, dilation, before: pad as isize };
    let axes = [axis; 2].into_iter().collect();
    let shape = ConvShape { pass, batch, groups, channels_in, channels_out, axes };
    // Products with padding need not be made.
    let inside = (0..output)
        .flat_map(|o| (0..kernel).map(move |k| (o, k)))
        .filter(|&(o, k)| axis.input_at(o, k).is_some())
        .count();
    let bytes = shape.operands().map(|dims| dims.iter().product::<usize>() * 4);
    let letter = match pass {
        ConvPass::Output => "y",
        ConvPass::InputGradient => "dx",
        ConvPass::FilterGradient => "dw",
    };
    let channels = if groups > 1 {
        format!("{groups}x{channels_in}-{channels_out}")
    } else {
        format!("{channels_in}-{channels_out}")
    };
    Case {
        name: format!("conv {letter} {name} {batch}x{channels} {size}x{size} k{kernel} s{stride}"),
        flops: 2.0 * (batch * groups * channels_in * channels_out * inside * inside) as f64,
        rate: 1.0,
        bytes: bytes.iter().sum::<usize>() as f64,
        compile: Box::new(move |isa, threads| {
            let [_, _, dims] = shape.operands();
            let mut b = Builder::new();
            let result = b.load(0, Type::F32);
            let plane = Access::contiguous(DType::F32, &dims);
            let epilogue = Nest {
                dims,
                inner: 0,
                loads: vec![plane.clone()],
                expr: b.finish(&[result]),
                reductions: Vec::new(),
                stores: vec![plane],
            };
            let desc = ConvDesc { shape: shape.clone(), a: DType::F32, b: DType::F32, epilogue };
            let kernel = ConvKernel::new(&desc, isa).expect("a good description");
            let mut buffers = Buffers::new(&bytes, kernel.scratch_bytes(threads));
            Box::new(move |pool| {
                let bases = buffers.bases();
                // SAFETY: buffers are as long as the shape says, and belong to this case.
                let result = unsafe { kernel.run(&bases, SCALARS, pool, buffers.scratch()) };
                result.expect("no guards");
            })
        }),
    }
}
