//! Cases of convolutions and of the gradients of their operands.

use ortrain_expr::{
    Access, BinaryOp, Builder, CompareOp, ConvPass, ConvShape, DType, Load, Nest, Precision, SlidingAxis,
    Type,
};
use ortrain_kernels::{Bf16Unit, ConvDesc, ConvKernel, Products};

use crate::case::{Buffers, Case, SCALARS};

/// Convolution of square images: `[groups, channels in, channels out]` are channels of a group.
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

/// Epilogue of the result in a network.
#[derive(Clone, Copy, PartialEq)]
enum Epilogue {
    /// The result is stored.
    Plain,
    /// Bias for each channel, then Relu.
    Bias,
    /// Shift and scale for each channel, then clipping to 0..6.
    Clip,
    /// Selection of the elements at which another tensor is between 0 and 6.
    Mask,
    /// Selection of the elements at which another tensor, shifted and scaled for each channel, is between 0 and 6.
    Norm,
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
        layer("mobilenet first", 4, [1, 3, 32], 224, 3, 2, 1),
        layer("mobilenet", 8, [1, 16, 96], 48, 1, 1, 0),
        layer("mobilenet", 8, [1, 96, 24], 24, 1, 1, 0),
        layer("mobilenet", 8, [1, 144, 24], 24, 1, 1, 0),
        layer("mobilenet", 8, [1, 32, 192], 12, 1, 1, 0),
        layer("mobilenet", 8, [1, 384, 64], 6, 1, 1, 0),
        layer("mobilenet", 8, [1, 96, 576], 6, 1, 1, 0),
        layer("mobilenet", 8, [1, 960, 160], 3, 1, 1, 0),
        layer("mobilenet", 8, [1, 320, 1280], 3, 1, 1, 0),
        layer("mobilenet", 8, [1, 32, 16], 48, 1, 1, 0),
        layer("mobilenet", 8, [1, 96, 16], 48, 1, 1, 0),
        layer("mobilenet", 8, [1, 960, 320], 3, 1, 1, 0),
        layer("mobilenet large", 4, [1, 16, 96], 112, 1, 1, 0),
        layer("mobilenet large", 4, [1, 144, 24], 56, 1, 1, 0),
        layer("mobilenet large", 4, [1, 384, 64], 14, 1, 1, 0),
        layer("mobilenet large", 4, [1, 160, 960], 7, 1, 1, 0),
        layer("depthwise large", 4, [32, 1, 1], 112, 3, 1, 1),
        layer("depthwise large", 4, [96, 1, 1], 112, 3, 2, 1),
        layer("depthwise large", 4, [144, 1, 1], 56, 3, 1, 1),
        layer("depthwise large", 4, [144, 1, 1], 56, 3, 2, 1),
        layer("depthwise large", 4, [192, 1, 1], 28, 3, 1, 1),
        layer("depthwise large", 4, [576, 1, 1], 14, 3, 1, 1),
        layer("depthwise large", 4, [960, 1, 1], 7, 3, 1, 1),
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
    let plain = layers
        .iter()
        .flat_map(|&layer| passes.map(|pass| case(layer, pass, Epilogue::Plain, Precision::F32)));
    // Epilogues of networks.
    let tails = [
        (layer("lenet", 64, [1, 1, 16], 28, 5, 1, 2), ConvPass::Output, Epilogue::Bias),
        (layer("lenet", 64, [1, 16, 32], 14, 5, 1, 0), ConvPass::Output, Epilogue::Bias),
        (layer("mobilenet", 8, [1, 32, 16], 48, 1, 1, 0), ConvPass::InputGradient, Epilogue::Norm),
        (layer("mobilenet", 8, [1, 96, 24], 24, 1, 1, 0), ConvPass::InputGradient, Epilogue::Norm),
        (layer("mobilenet", 8, [1, 144, 24], 24, 1, 1, 0), ConvPass::InputGradient, Epilogue::Norm),
        (layer("mobilenet", 8, [1, 192, 32], 12, 1, 1, 0), ConvPass::InputGradient, Epilogue::Norm),
        (layer("mobilenet", 8, [1, 576, 96], 6, 1, 1, 0), ConvPass::InputGradient, Epilogue::Mask),
        (layer("mobilenet", 8, [1, 960, 160], 3, 1, 1, 0), ConvPass::InputGradient, Epilogue::Mask),
        (layer("mobilenet", 8, [1, 960, 320], 3, 1, 1, 0), ConvPass::InputGradient, Epilogue::Mask),
        (layer("mobilenet large", 4, [1, 16, 96], 112, 1, 1, 0), ConvPass::Output, Epilogue::Clip),
        (layer("mobilenet large", 4, [1, 24, 144], 56, 1, 1, 0), ConvPass::Output, Epilogue::Clip),
        (layer("mobilenet large", 4, [1, 32, 192], 28, 1, 1, 0), ConvPass::Output, Epilogue::Clip),
        (layer("mobilenet large", 4, [1, 96, 576], 14, 1, 1, 0), ConvPass::Output, Epilogue::Clip),
        (layer("mobilenet large", 4, [1, 160, 960], 7, 1, 1, 0), ConvPass::Output, Epilogue::Clip),
        (layer("depthwise large", 4, [144, 1, 1], 56, 3, 1, 1), ConvPass::Output, Epilogue::Clip),
        (layer("depthwise large", 4, [192, 1, 1], 28, 3, 1, 1), ConvPass::Output, Epilogue::Clip),
        (layer("depthwise large", 4, [576, 1, 1], 14, 3, 1, 1), ConvPass::Output, Epilogue::Clip),
        (layer("mobilenet large", 4, [1, 144, 24], 56, 1, 1, 0), ConvPass::InputGradient, Epilogue::Norm),
        (layer("mobilenet large", 4, [1, 192, 32], 28, 1, 1, 0), ConvPass::InputGradient, Epilogue::Norm),
        (layer("mobilenet large", 4, [1, 576, 96], 14, 1, 1, 0), ConvPass::InputGradient, Epilogue::Norm),
        (depthwise("depthwise", 32, 48, 1), ConvPass::InputGradient, Epilogue::Norm),
        (depthwise("depthwise", 96, 48, 2), ConvPass::InputGradient, Epilogue::Norm),
        (depthwise("depthwise", 144, 24, 1), ConvPass::InputGradient, Epilogue::Norm),
        (depthwise("depthwise", 192, 12, 1), ConvPass::InputGradient, Epilogue::Norm),
        (depthwise("depthwise", 960, 3, 1), ConvPass::InputGradient, Epilogue::Mask),
    ];
    let network = layer("network", 8, [1, 64, 64], 28, 3, 1, 1);
    let precision_passes =
        Precision::ALL[1..].iter().flat_map(|&precision| passes.map(|pass| (precision, pass)));
    let rounded = precision_passes.map(|(precision, pass)| case(network, pass, Epilogue::Plain, precision));
    let tails = tails.map(|(layer, pass, tail)| case(layer, pass, tail, Precision::F32));
    plain.chain(tails).chain(rounded).collect()
}

fn epilogue(shape: &ConvShape, tail: Epilogue) -> Nest {
    let [_, _, dims] = shape.operands();
    let plane = Access::contiguous(DType::F32, &dims);
    let channel = Access {
        dtype: DType::F32,
        offset: 0,
        strides: (0..dims.len()).map(|axis| isize::from(axis == 1)).collect(),
        len: dims[1],
    };
    let mut b = Builder::new();
    let result = b.load(0, Type::F32);
    let (zero, six) = (b.constant(Type::F32, 0.0), b.constant(Type::F32, 6.0));
    let (value, others) = match tail {
        Epilogue::Plain => (result, vec![]),
        Epilogue::Bias => {
            let bias = b.load(1, Type::F32);
            let sum = b.add(result, bias);
            (b.binary(BinaryOp::Max, sum, zero), vec![channel])
        }
        Epilogue::Clip => {
            let [mean, scale, shift] = [1, 2, 3].map(|slot| b.load(slot, Type::F32));
            let centered = b.binary(BinaryOp::Sub, result, mean);
            let scaled = b.mul(centered, scale);
            let sum = b.add(scaled, shift);
            let above = b.binary(BinaryOp::Max, sum, zero);
            (b.binary(BinaryOp::Min, above, six), vec![channel.clone(), channel.clone(), channel])
        }
        Epilogue::Mask | Epilogue::Norm => {
            let mut other = b.load(1, Type::F32);
            let mut others = vec![plane.clone()];
            if tail == Epilogue::Norm {
                let [mean, scale, shift] = [2, 3, 4].map(|slot| b.load(slot, Type::F32));
                other = b.binary(BinaryOp::Sub, other, mean);
                other = b.mul(other, scale);
                other = b.add(other, shift);
                others.extend([channel.clone(), channel.clone(), channel]);
            }
            let (below, above) =
                (b.compare(CompareOp::Le, other, six), b.compare(CompareOp::Le, zero, other));
            let both = b.binary(BinaryOp::And, above, below);
            (b.select(both, result, zero), others)
        }
    };
    let others = others.into_iter().map(Load::Buffer);
    Nest {
        dims,
        inner: 0,
        segments: None,
        loads: std::iter::once(Load::Accumulator(DType::F32)).chain(others).collect(),
        expr: b.finish(&[value]),
        reductions: Vec::new(),
        stores: vec![plane],
    }
}

fn case(layer: Layer, pass: ConvPass, tail: Epilogue, precision: Precision) -> Case {
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
    let axis = SlidingAxis { input: size, output, kernel, stride, dilation, padding_before: pad as isize };
    let axes = [axis; 2].into_iter().collect();
    let shape = ConvShape { pass, batch, groups, channels_in, channels_out, axes };
    // Products with padding are not necessary.
    let inside = (0..output)
        .flat_map(|o| (0..kernel).map(move |k| (o, k)))
        .filter(|&(o, k)| axis.input_at(o, k).is_some())
        .count();
    let nest = epilogue(&shape, tail);
    let [a, b, _] = shape.operands().map(|dims| dims.iter().product::<usize>() * 4);
    let others = nest.operands().map(|access| access.len * 4);
    let bytes: Vec<usize> = [a, b].into_iter().chain(others).collect();
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
    let with = match tail {
        Epilogue::Plain => "",
        Epilogue::Bias => " +bias",
        Epilogue::Clip => " +clip",
        Epilogue::Mask => " +mask",
        Epilogue::Norm => " +norm",
    };
    let precision_label = if precision == Precision::F32 { String::new() } else { format!(" {precision}") };
    Case {
        name: format!(
            "conv {letter}{precision_label} {name} {batch}x{channels} {size}x{size} k{kernel} s{stride}{with}"
        ),
        flops: 2.0 * (batch * groups * channels_in * channels_out * inside * inside) as f64,
        rate: 1.0,
        precision,
        bytes: bytes.iter().sum::<usize>() as f64,
        compile: Box::new(move |isa, threads| {
            let desc = ConvDesc {
                shape: shape.clone(),
                a: DType::F32,
                b: DType::F32,
                zero_points: [None; 2],
                products: Products { precision, unit: Bf16Unit::detect(isa) },
                epilogue: nest.clone(),
            };
            let kernel = ConvKernel::new(&desc, isa).expect("valid description");
            let mut buffers = Buffers::new(&bytes, kernel.scratch_bytes(threads));
            Box::new(move |pool| {
                let bases = buffers.bases();
                // SAFETY: buffers have the lengths of the shape, and belong to this case.
                let result = unsafe { kernel.run(&bases, SCALARS, pool, buffers.scratch()) };
                result.expect("no guards");
            })
        }),
    }
}
