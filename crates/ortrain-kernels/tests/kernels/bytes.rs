//! Compares products of bytes with sums of integers.

use ortrain_expr::{Access, Builder, ConvPass, ConvShape, DType, Load, Nest, SlidingAxis, Strides, Type};
use ortrain_kernels::{
    Compiler, ConvDesc, ConvKernel, GemmDesc, GemmKernel, Isa, KernelFilter, Pool, Products,
};

use crate::common::*;

/// Types of the operands of a product.
const TYPES: [[DType; 2]; 4] =
    [[DType::U8, DType::I8], [DType::I8, DType::I8], [DType::U8, DType::U8], [DType::I8, DType::U8]];

/// Zero points of an operand.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ZeroPoint {
    None,
    OfMatrix,
    OfLine,
}

/// Returns the access to the matrices `[batch, rows, columns]`, transposed in memory or not.
fn matrices(dtype: DType, dims: [usize; 3], is_transposed: bool) -> Access {
    let [_, rows, columns] = dims;
    let mut access = Access::contiguous(dtype, &dims);
    if is_transposed {
        access.strides = [rows * columns, 1, rows].into_iter().map(|step| step as isize).collect();
    }
    access
}

/// Returns an epilogue that stores the sums as integers, or scaled as floats.
fn epilogue(dims: &[usize], out: DType) -> Nest {
    let mut b = Builder::new();
    let sum = b.load(0, Type::I32);
    let result = if out == DType::I32 { sum } else { b.convert(sum, Type::F32) };
    Nest {
        dims: dims.iter().copied().collect(),
        inner: 0,
        segments: None,
        loads: vec![Load::Accumulator(DType::I32)],
        expr: b.finish(&[result]),
        reductions: Vec::new(),
        stores: vec![Access::contiguous(out, dims)],
    }
}

fn random_bytes(random: &mut Random, len: usize) -> Vec<u8> {
    (0..len).map(|_| random.below(256) as u8).collect()
}

fn number(dtype: DType, byte: u8) -> i64 {
    if dtype == DType::I8 { i64::from(byte.cast_signed()) } else { i64::from(byte) }
}

fn position(access: &Access, index: [usize; 3]) -> usize {
    let steps = access.strides.iter().zip(index).map(|(&stride, i)| stride * i as isize);
    (access.offset as isize + steps.sum::<isize>()) as usize
}

#[test]
fn products_of_bytes_are_exact() {
    let sizes = [
        [1, 1, 1, 1],
        [1, 0, 5, 3],
        [2, 3, 4, 0],
        [3, 6, 16, 7],
        [1, 1, 300, 640],
        [2, 13, 33, 65],
        [1, 97, 35, 257],
        [1, 130, 530, 40],
        [1, 4, 70, 90],
        [3, 3, 130, 66],
        [2, 20, 65, 301],
        [1, 32, 1100, 100],
        [1, 40, 40, 3000],
        [2, 300, 200, 700],
    ];
    let mut random = Random(5);
    for (case, [batch, m, n, k]) in sizes.into_iter().enumerate() {
        for (variant, [a, b]) in TYPES.into_iter().enumerate() {
            let layouts = [(case + variant) % 2 == 0, (case + variant) % 3 == 0];
            let kinds = [ZeroPoint::None, ZeroPoint::OfMatrix, ZeroPoint::OfLine];
            let kinds = [kinds[(case + variant) % 3], kinds[(case + 2 * variant + 1) % 3]];
            let spaces = [[batch, m, k], [batch, k, n]];
            let accesses = [matrices(a, spaces[0], layouts[0]), matrices(b, spaces[1], layouts[1])];
            let zero_points = [0, 1].map(|side| {
                let lines = [m, n][side];
                let step: Strides = match kinds[side] {
                    ZeroPoint::None => return None,
                    ZeroPoint::OfMatrix => [0, 0, 0].into_iter().collect(),
                    ZeroPoint::OfLine if side == 0 => [0, 1, 0].into_iter().collect(),
                    ZeroPoint::OfLine => [0, 0, 1].into_iter().collect(),
                };
                let len = if kinds[side] == ZeroPoint::OfLine { lines } else { 1 };
                Some(Access { dtype: [a, b][side], offset: 0, strides: step, len })
            });
            let out = if variant % 2 == 0 { DType::I32 } else { DType::F32 };
            let dims = [batch, m, n];
            let desc = GemmDesc {
                k,
                a: accesses[0].clone(),
                b: accesses[1].clone(),
                quantized: None,
                zero_points: zero_points.clone(),
                rounded_to: [None; 2],
                products: Products::F32,
                epilogue: epilogue(&dims, out),
            };
            let mut inputs: Vec<Vec<u8>> =
                accesses.iter().map(|access| random_bytes(&mut random, access.len)).collect();
            let result = vec![0xee; batch * m * n * 4];
            let zeros: Vec<Vec<u8>> =
                zero_points.iter().flatten().map(|access| random_bytes(&mut random, access.len)).collect();
            let mut outs: Vec<Vec<u8>> = Vec::new();
            let kernel_of = |isa: Isa, filter: &KernelFilter| {
                GemmKernel::new(&desc, Compiler::from(isa).with_kernels(filter)).unwrap()
            };
            let machines = Isa::available().into_iter().flat_map(|isa| {
                let filters = kernel_filters("product.", isa, |filter| kernel_of(isa, filter).describe());
                filters.into_iter().flat_map(move |filter| [(isa, filter.clone(), 1), (isa, filter, 3)])
            });
            for (isa, filter, threads) in machines {
                let kernel = kernel_of(isa, &filter);
                let name = kernel.describe();
                assert!(
                    ["product.byte_tiles", "product.few_byte_rows"]
                        .iter()
                        .any(|known| name.starts_with(known)),
                    "{name}"
                );
                let mut memory = Memory::new(kernel.scratch_bytes(threads));
                let (mut out, mut zeros) = (result.clone(), zeros.clone());
                let bases: Vec<*mut u8> =
                    inputs.iter_mut().chain([&mut out]).chain(&mut zeros).map(Vec::as_mut_ptr).collect();
                // SAFETY: buffers have the lengths of the accesses, and belong to this test.
                unsafe { kernel.run(&bases, SCALARS, &Pool::new(threads), memory.scratch()) }.unwrap();
                outs.push(out);
            }
            assert!(outs.iter().all(|out| *out == outs[0]), "levels and threads give the same bits");
            let mut of_side = zeros.iter();
            let zeros = zero_points.map(|access| access.map(|access| (of_side.next().unwrap(), access)));
            let distance = |side: usize, index: [usize; 3]| {
                let access = &accesses[side];
                let zero = zeros[side]
                    .as_ref()
                    .map_or(0, |(bytes, of_zeros)| number(of_zeros.dtype, bytes[position(of_zeros, index)]));
                number(access.dtype, inputs[side][position(access, index)]) - zero
            };
            let every = (batch * m * n * k / 2_000_000) | 1;
            for flat in (0..batch * m * n).step_by(every) {
                let [z, i, j] = [flat / n / m, flat / n % m, flat % n];
                let sum: i64 = (0..k).map(|p| distance(0, [z, i, p]) * distance(1, [z, p, j])).sum();
                let got = get(&outs[0], out, flat).to_f64();
                assert!(
                    got == f64::from(sum as f32) || got == sum as f64,
                    "{dims:?} x {k} of {a} and {b}, {kinds:?}: element {flat} is {got}, not {sum}"
                );
            }
        }
    }
}

#[test]
fn zero_points_of_floats_or_along_sums_are_refused() {
    let dims = [1, 2, 3];
    let desc = |dtype: DType, zero: DType, strides: [isize; 3]| {
        let accumulator = if dtype == DType::F32 { DType::F32 } else { DType::I32 };
        let mut nest = epilogue(&dims, accumulator);
        if dtype == DType::F32 {
            let mut b = Builder::new();
            let sum = b.load(0, Type::F32);
            nest.expr = b.finish(&[sum]);
            nest.loads = vec![Load::Accumulator(DType::F32)];
        }
        let zero = Access { dtype: zero, offset: 0, strides: strides.into_iter().collect(), len: 4 };
        GemmDesc {
            k: 4,
            a: matrices(dtype, [1, 2, 4], false),
            b: matrices(dtype, [1, 4, 3], false),
            quantized: None,
            zero_points: [Some(zero), None],
            rounded_to: [None; 2],
            products: Products::F32,
            epilogue: nest,
        }
    };
    for (desc, part) in [
        (desc(DType::F32, DType::F32, [0, 0, 0]), "only matrices of bytes have zero points"),
        (desc(DType::U8, DType::I8, [0, 0, 0]), "zero points of type int8 for elements of type uint8"),
        (desc(DType::U8, DType::U8, [0, 0, 1]), "a step of 1 along the sums"),
        (desc(DType::U8, DType::U8, [0, 4, 0]), "elements 0..=4 of a buffer of 4"),
    ] {
        let error = GemmKernel::new(&desc, Isa::PORTABLE).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

fn axis(input: usize, kernel: usize, stride: usize, dilation: usize, padding: [isize; 2]) -> SlidingAxis {
    let padded = input as isize + padding[0] + padding[1];
    let reach = ((kernel - 1) * dilation + 1) as isize;
    let output = usize::try_from(padded - reach).map_or(0, |rest| rest / stride + 1);
    SlidingAxis { input, output, kernel, stride, dilation, padding_before: padding[0] }
}

/// Sizes of a convolution: images, groups, channels of the image and of the result, axes.
type ConvCase = ([usize; 4], Vec<SlidingAxis>);

fn conv_cases() -> Vec<ConvCase> {
    vec![
        ([1, 1, 1, 1], vec![axis(1, 1, 1, 1, [0, 0])]),
        ([2, 1, 3, 40], vec![axis(13, 3, 1, 1, [1, 1]), axis(17, 3, 1, 1, [1, 1])]),
        ([1, 1, 64, 33], vec![axis(7, 1, 1, 1, [0, 0]), axis(7, 1, 1, 1, [0, 0])]),
        ([1, 1, 20, 16], vec![axis(14, 1, 2, 1, [0, 0]), axis(15, 1, 2, 1, [0, 0])]),
        ([1, 2, 5, 7], vec![axis(12, 3, 2, 1, [1, 0]), axis(9, 2, 3, 2, [2, 1])]),
        ([3, 4, 2, 3], vec![axis(10, 5, 1, 2, [4, 4]), axis(6, 3, 2, 1, [1, 1])]),
        ([1, 1, 6, 70], vec![axis(40, 7, 2, 1, [3, 3]), axis(40, 7, 2, 1, [3, 3])]),
        ([2, 1, 9, 5], vec![axis(50, 4, 1, 1, [0, 3])]),
        ([1, 1, 3, 4], vec![axis(4, 2, 1, 1, [0, 1]), axis(5, 3, 2, 1, [1, 1]), axis(6, 2, 1, 1, [0, 0])]),
        ([1, 1, 3, 4], vec![axis(8, 3, 1, 1, [-2, 1]), axis(8, 3, 1, 1, [0, -1])]),
        ([1, 1, 300, 20], vec![axis(5, 3, 1, 1, [1, 1]), axis(5, 3, 1, 1, [1, 1])]),
        ([1, 1, 2, 3], vec![axis(2, 5, 1, 1, [0, 0])]),
        ([0, 1, 2, 3], vec![axis(4, 2, 1, 1, [0, 0])]),
        ([1, 1, 0, 3], vec![axis(4, 2, 1, 1, [0, 0])]),
        ([1, 1, 2, 0], vec![axis(4, 2, 1, 1, [0, 0])]),
    ]
}

#[test]
fn convolutions_of_bytes_are_exact() {
    let mut random = Random(9);
    for (case, ([batch, groups, channels_in, channels_out], axes)) in conv_cases().into_iter().enumerate() {
        let shape = ConvShape {
            pass: ConvPass::Output,
            batch,
            groups,
            channels_in,
            channels_out,
            axes: axes.iter().copied().collect(),
        };
        let [a_dims, b_dims, dims] = shape.operands();
        for (variant, [a, b]) in TYPES.into_iter().enumerate() {
            let all = groups * channels_out;
            let zero_points =
                [[None, None], [Some(1), None], [Some(1), Some(1)], [None, Some(all)]][(case + variant) % 4];
            let zero_points = zero_points.map(|count| count.filter(|&count| count > 0));
            let out = if variant % 2 == 0 { DType::I32 } else { DType::F32 };
            let desc = ConvDesc {
                shape: shape.clone(),
                a,
                b,
                zero_points,
                products: Products::F32,
                epilogue: epilogue(&dims, out),
            };
            let len = |dims: &[usize]| dims.iter().product::<usize>();
            let mut inputs =
                [random_bytes(&mut random, len(&a_dims)), random_bytes(&mut random, len(&b_dims))];
            let mut zeros = zero_points.map(|count| count.map(|count| random_bytes(&mut random, count)));
            let mut outs: Vec<Vec<u8>> = Vec::new();
            for (isa, threads) in Isa::available().into_iter().flat_map(|isa| [(isa, 1), (isa, 3)]) {
                let kernel = ConvKernel::new(&desc, isa).unwrap();
                assert_eq!(kernel.describe(), "conv.byte_tiles");
                let mut memory = Memory::new(kernel.scratch_bytes(threads));
                let mut result = vec![0xee; len(&dims) * 4];
                let bases: Vec<*mut u8> = inputs
                    .iter_mut()
                    .chain([&mut result])
                    .chain(zeros.iter_mut().flatten())
                    .map(Vec::as_mut_ptr)
                    .collect();
                // SAFETY: buffers have the lengths of the tensors, and belong to this test.
                unsafe { kernel.run(&bases, SCALARS, &Pool::new(threads), memory.scratch()) }.unwrap();
                outs.push(result);
            }
            assert!(outs.iter().all(|out| *out == outs[0]), "levels and threads give the same bits");
            let positions: usize = axes.iter().map(|axis| axis.output).product();
            let plane: usize = axes.iter().map(|axis| axis.input).product();
            let cells: usize = axes.iter().map(|axis| axis.kernel).product();
            for flat in 0..len(&dims) {
                let (at, channel, image) = (flat % positions, flat / positions % all, flat / positions / all);
                let mut rest = at;
                let mut index = vec![0; axes.len()];
                for (index, axis) in index.iter_mut().zip(&axes).rev() {
                    *index = rest % axis.output;
                    rest /= axis.output;
                }
                let zero = |side: usize, channel: usize| {
                    zeros[side].as_ref().map_or(0, |bytes| {
                        number([a, b][side], bytes[if bytes.len() > 1 { channel } else { 0 }])
                    })
                };
                let mut sum = 0;
                for (c, cell) in (0..channels_in).flat_map(|c| (0..cells).map(move |cell| (c, cell))) {
                    let Some(element) = SlidingAxis::element_under_cell(&axes, &index, cell) else {
                        continue;
                    };
                    let mut rest = cell;
                    let is_inside = axes.iter().zip(&index).rev().all(|(axis, &o)| {
                        let k = rest % axis.kernel;
                        rest /= axis.kernel;
                        axis.input_at(o, k).is_some()
                    });
                    if !is_inside {
                        continue;
                    }
                    let x = (image * groups * channels_in + channel / channels_out * channels_in + c) * plane;
                    let x = number(a, inputs[0][x + element]) - zero(0, 0);
                    let w =
                        number(b, inputs[1][(channel * channels_in + c) * cells + cell]) - zero(1, channel);
                    sum += x * w;
                }
                let got = get(&outs[0], out, flat).to_f64();
                assert!(
                    got == f64::from(sum as f32) || got == sum as f64,
                    "case {case} of {a} and {b}, {zero_points:?}: element {flat} is {got}, not {sum}"
                );
            }
        }
    }
}

#[test]
fn zero_points_of_convolutions_are_checked() {
    let axes = [axis(4, 2, 1, 1, [0, 0])];
    let shape = |pass| ConvShape {
        pass,
        batch: 1,
        groups: 1,
        channels_in: 2,
        channels_out: 3,
        axes: axes.into_iter().collect(),
    };
    let desc = |dtype, pass, zero_points| {
        let shape = shape(pass);
        let [_, _, dims] = shape.operands();
        let epilogue = epilogue(&dims, DType::I32);
        ConvDesc { shape, a: dtype, b: dtype, zero_points, products: Products::F32, epilogue }
    };
    for (desc, part) in [
        (desc(DType::F32, ConvPass::Output, [Some(1), None]), "only tensors of bytes have zero points"),
        (desc(DType::U8, ConvPass::Output, [Some(2), None]), "2 zero points of an operand, expected 1 or 1"),
        (desc(DType::U8, ConvPass::Output, [None, Some(2)]), "2 zero points of an operand, expected 1 or 3"),
        (desc(DType::U8, ConvPass::InputGradient, [None; 2]), "no gradient of bytes"),
    ] {
        let error = ConvKernel::new(&desc, Isa::PORTABLE).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}
