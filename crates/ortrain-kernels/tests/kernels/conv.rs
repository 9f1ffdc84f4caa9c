//! Compares convolutions with sums in f64 that follow the definition literally.

use ortrain_expr::{
    Access, BinaryOp, Builder, ConvPass, ConvShape, DType, Load, Nest, OutOfRange, Precision, Scalar,
    SlidingAxis, Type, flat_index_of,
};
use ortrain_kernels::{Compiler, ConvDesc, ConvKernel, Isa, KernelFilter, Pool, Products};
use proptest::prelude::*;

use crate::common::*;

const PASSES: [ConvPass; 3] = [ConvPass::Output, ConvPass::InputGradient, ConvPass::FilterGradient];

/// Returns an axis in which the output covers the padded input, as usual.
fn axis(input: usize, kernel: usize, stride: usize, dilation: usize, pads: [isize; 2]) -> SlidingAxis {
    let padded = input as isize + pads[0] + pads[1];
    let window = (dilation * (kernel.max(1) - 1) + 1) as isize;
    let output = if padded < window { 0 } else { (padded - window) as usize / stride + 1 };
    SlidingAxis { input, output, kernel, stride, dilation, padding_before: pads[0] }
}

fn shape(pass: ConvPass, batch: usize, channels: [usize; 3], axes: &[SlidingAxis]) -> ConvShape {
    let [groups, channels_in, channels_out] = channels;
    ConvShape { pass, batch, groups, channels_in, channels_out, axes: axes.iter().copied().collect() }
}

/// Computes the sums, row-major, and the sums of magnitudes for error bounds.
fn convolve(desc: &ConvDesc, inputs: &[Vec<u8>]) -> (Vec<f64>, Vec<f64>) {
    let ConvShape { pass, batch, groups, channels_in, channels_out, ref axes } = desc.shape;
    let [_, _, dims] = desc.shape.operands();
    let decode = |dtype: DType, bytes: &[u8]| -> Vec<f64> {
        (0..bytes.len() / dtype.size()).map(|i| get(bytes, dtype, i).to_f64()).collect()
    };
    let (a, b) = (decode(desc.a, &inputs[0]), decode(desc.b, &inputs[1]));
    let count = dims.iter().product();
    let (mut sums, mut scale) = (vec![0.0; count], vec![0.0; count]);
    let outputs: Vec<usize> = axes.iter().map(|axis| axis.output).collect();
    let kernels: Vec<usize> = axes.iter().map(|axis| axis.kernel).collect();
    let inputs: Vec<usize> = axes.iter().map(|axis| axis.input).collect();
    let planes = [&inputs, &outputs, &kernels].map(|sizes| sizes.iter().product::<usize>());
    let mut triples = Vec::new();
    for output in indices(&outputs) {
        for cell in indices(&kernels) {
            let input_indices =
                axes.iter().zip(&output).zip(&cell).map(|((axis, &o), &k)| axis.input_at(o, k));
            if let Some(input) = input_indices.collect::<Option<Vec<_>>>() {
                triples.push((
                    flat_index_of(&inputs, &input),
                    flat_index_of(&outputs, &output),
                    flat_index_of(&kernels, &cell),
                ));
            }
        }
    }
    for head in indices(&[batch, groups, channels_in, channels_out]) {
        let [n, g, c, m] = head.try_into().unwrap();
        let x = ((n * groups + g) * channels_in + c) * planes[0];
        let y = ((n * groups + g) * channels_out + m) * planes[1];
        let w = ((g * channels_out + m) * channels_in + c) * planes[2];
        for (input, output, cell) in &triples {
            let (x, y, w) = (x + input, y + output, w + cell);
            let (first, second, to) = match pass {
                ConvPass::Output => (x, w, y),
                ConvPass::InputGradient => (y, w, x),
                ConvPass::FilterGradient => (y, x, w),
            };
            let term = a[first] * b[second];
            sums[to] += term;
            scale[to] += term.abs();
        }
    }
    (sums, scale)
}

fn run_conv<'a>(
    desc: &ConvDesc,
    compiler: impl Into<Compiler<'a>>,
    threads: usize,
    inputs: &[Vec<u8>],
    outs: &[Vec<u8>],
) -> Result<Vec<Vec<u8>>, OutOfRange> {
    let kernel = ConvKernel::new(desc, compiler).unwrap();
    let pool = Pool::new(threads);
    let mut memory = Memory::new(kernel.scratch_bytes(threads));
    let (mut inputs, mut outs) = (inputs.to_vec(), outs.to_vec());
    let bases: Vec<*mut u8> = inputs.iter_mut().chain(&mut outs).map(Vec::as_mut_ptr).collect();
    // SAFETY: buffers have the lengths of the shapes, and belong to this test.
    unsafe { kernel.run(&bases, SCALARS, &pool, memory.scratch()) }?;
    Ok(outs)
}

fn random_tensor(random: &mut Random, dtype: DType, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len * dtype.size()];
    (0..len).for_each(|i| put(&mut bytes, dtype, i, Scalar::F64(random.unit())));
    bytes
}

fn operands(desc: &ConvDesc, random: &mut Random) -> [Vec<u8>; 2] {
    let [a, b, _] = desc.shape.operands();
    [random_tensor(random, desc.a, a.iter().product()), random_tensor(random, desc.b, b.iter().product())]
}

/// Returns a description with an epilogue that only stores the result.
fn plain(shape: ConvShape, [a, b]: [DType; 2], store: Option<Access>) -> ConvDesc {
    let [_, _, dims] = shape.operands();
    let (dtype, ty) = if a == DType::F64 { (DType::F64, Type::F64) } else { (DType::F32, Type::F32) };
    let mut builder = Builder::new();
    let result = builder.load(0, ty);
    let epilogue = Nest {
        inner: 0,
        segments: None,
        loads: vec![Load::Accumulator(dtype)],
        expr: builder.finish(&[result]),
        reductions: Vec::new(),
        stores: vec![store.unwrap_or_else(|| Access::contiguous(dtype, &dims))],
        dims,
    };
    ConvDesc { shape, a, b, zero_points: [None; 2], products: Products::F32, epilogue }
}

/// Returns the filters that select each kernel of a description.
fn filters(desc: &ConvDesc, isa: Isa) -> Vec<KernelFilter> {
    kernel_filters("conv.", isa, |filter| {
        ConvKernel::new(desc, Compiler::from(isa).with_kernels(filter)).unwrap().describe()
    })
}

/// Checks every kernel that supports a description.
fn check(desc: &ConvDesc, random: &mut Random, what: &str) {
    let store = &desc.epilogue.stores[0];
    let inputs = operands(desc, random);
    let outs = [vec![0xee; store.len * store.dtype.size()]];
    let (sums, scale) = convolve(desc, &inputs);
    let epsilon = match (store.dtype, desc.epilogue.loads[0].dtype()) {
        (DType::F64, DType::F64) => 1e-14,
        (DType::F16, _) => 1e-3 + max_relative_error(desc.products.precision),
        _ => max_relative_error(desc.products.precision),
    };
    for (isa, products) in machines_for(desc.products.precision) {
        let desc = &ConvDesc { products, ..desc.clone() };
        for filter in filters(desc, isa) {
            let compiler = Compiler::from(isa).with_kernels(&filter);
            let what = &format!("{what} by {:?}, {filter:?}", products.unit);
            let got = run_conv(desc, compiler, 1, &inputs, &outs).unwrap();
            for threads in [2, 3] {
                let more = run_conv(desc, compiler, threads, &inputs, &outs).unwrap();
                assert!(got == more, "{what}: {threads} threads change bits at {isa}");
            }
            let mut touched = vec![false; store.len];
            for (i, index) in indices(&desc.epilogue.dims).into_iter().enumerate() {
                let offset: isize =
                    store.strides.iter().zip(&index).map(|(&stride, &i)| stride * i as isize).sum();
                let at = (store.offset as isize + offset) as usize;
                touched[at] = true;
                let got = get(&got[0], store.dtype, at).to_f64();
                assert!(
                    (got - sums[i]).abs() <= epsilon * (1.0 + scale[i]),
                    "{what} at {isa}: {index:?} is {got}, not {}",
                    sums[i]
                );
            }
            for (i, touched) in touched.iter().enumerate() {
                let size = store.dtype.size();
                let is_unwritten = got[0][i * size..(i + 1) * size].iter().all(|&byte| byte == 0xee);
                assert!(
                    *touched || is_unwritten,
                    "{what} at {isa}: wrote element {i}, which is none of the result's"
                );
            }
        }
    }
}

fn check_passes(batch: usize, channels: [usize; 3], axes: &[SlidingAxis], random: &mut Random) {
    for pass in PASSES {
        let shape = shape(pass, batch, channels, axes);
        check(&plain(shape.clone(), [DType::F32; 2], None), random, &format!("{shape:?}"));
    }
}

fn square(input: usize, kernel: usize, stride: usize, pad: isize) -> [SlidingAxis; 2] {
    [axis(input, kernel, stride, 1, [pad; 2]); 2]
}

/// Returns layers of networks, but smaller; some have more than one block of depths, rows or columns.
fn networks() -> Vec<(usize, [usize; 3], [SlidingAxis; 2])> {
    vec![
        (2, [1, 1, 6], square(14, 5, 1, 2)),
        (3, [1, 6, 16], square(14, 5, 1, 0)),
        (1, [1, 3, 20], square(32, 7, 2, 3)),
        (2, [1, 33, 40], square(12, 3, 1, 1)),
        (1, [1, 40, 20], square(13, 3, 2, 1)),
        (3, [1, 64, 130], square(7, 3, 1, 1)),
        (5, [1, 70, 70], square(3, 1, 1, 0)),
        (2, [1, 24, 36], square(16, 1, 1, 0)),
        (2, [1, 24, 36], square(9, 1, 2, 0)),
        (1, [1, 300, 7], square(4, 1, 1, 0)),
        (2, [4, 6, 10], square(8, 3, 1, 1)),
        (2, [20, 1, 1], square(12, 3, 1, 1)),
        (2, [20, 1, 1], square(12, 3, 2, 1)),
        (3, [33, 1, 1], square(3, 3, 1, 1)),
        (2, [5, 1, 1], square(48, 3, 2, 1)),
        // Rows of a few vectors and a remainder, of one vector, of less; rows in fours, twos and ones.
        (2, [5, 1, 1], square(19, 3, 1, 1)),
        (3, [6, 1, 1], [axis(30, 3, 1, 1, [1, 1]), axis(5, 3, 1, 1, [1, 1])]),
        (2, [3, 1, 1], [axis(3, 3, 1, 1, [1, 1]), axis(70, 3, 1, 1, [0, 2])]),
        (1, [4, 1, 2], [axis(10, 3, 1, 1, [2, 0]), axis(8, 3, 1, 1, [1, 1])]),
        (2, [66, 1, 1], [axis(17, 3, 1, 1, [1, 1]), axis(16, 3, 1, 1, [1, 1])]),
        (2, [3, 1, 1], [axis(21, 3, 2, 1, [1, 1]), axis(38, 3, 2, 1, [0, 1])]),
        (1, [3, 1, 1], [axis(9, 3, 1, 1, [1, 1]), axis(17000, 3, 1, 1, [1, 1])]),
        // Many columns, with windows that are packed once, in parts.
        (4, [1, 20, 100], square(14, 1, 1, 0)),
        (5, [1, 5, 230], square(13, 2, 1, 0)),
        (1, [7, 1, 2], square(11, 5, 1, 2)),
        (2, [7, 2, 1], square(11, 3, 3, 0)),
        // Sums over enough positions to be divided into parts.
        (9, [1, 9, 20], square(14, 3, 1, 1)),
        (9, [1, 2, 6], square(14, 5, 1, 2)),
        // Few channels of wide rows: vectors beyond a row, several blocks of an image, rows and columns with gaps.
        (2, [1, 5, 16], square(28, 5, 1, 2)),
        (1, [1, 3, 24], square(47, 3, 1, 1)),
        (2, [1, 4, 8], [axis(40, 3, 2, 2, [3, 1]), axis(31, 5, 1, 1, [0, 2])]),
        (1, [1, 8, 16], [axis(1, 1, 1, 1, [0, 0]), axis(130, 7, 1, 1, [3, 3])]),
        // Two tasks, of 15 and 14 channels: two steps of 8 and one of 14.
        (1, [1, 29, 16], square(16, 3, 1, 1)),
        (3, [2, 20, 17], square(20, 1, 1, 0)),
        // Rows longer than a block, distant taps, many phases.
        (1, [1, 3, 5], [axis(2, 2, 1, 1, [0, 0]), axis(700, 9, 1, 1, [4, 4])]),
        (1, [1, 3, 15], [axis(2, 2, 1, 1, [0, 0]), axis(1400, 9, 2, 1, [4, 4])]),
        (1, [1, 3, 5], [axis(90, 2, 1, 40, [0, 0]), axis(9, 3, 1, 1, [1, 1])]),
        (1, [1, 2, 40], square(48, 12, 12, 0)),
        (1, [1, 2, 3], square(40, 33, 1, 0)),
    ]
}

#[test]
fn layers_of_networks() {
    let mut random = Random(1);
    for (batch, channels, axes) in networks() {
        check_passes(batch, channels, &axes, &mut random);
    }
}

/// Rows of positions that do not fill vectors, with any number of channels; windows that extend into the padding.
#[test]
fn narrow_rows() {
    let mut random = Random(4);
    for cols in 1..=15 {
        for (k, channels) in [4, 7, 8, 9, 15, 16, 17, 31, 32, 40].into_iter().enumerate() {
            let (pad, stride) = [(0, 1), (2, 1), (1, 2), (4, 1)][(cols + k) % 4];
            let sides = [5, cols].map(|count| axis((count - 1) * stride + 5, 5, stride, 1, [pad; 2]));
            let others = random.pick(&[1, 3, 11]);
            check_passes(1 + k % 3, [1, others, channels], &sides, &mut random);
            check_passes(1 + k % 3, [1, channels, others], &sides, &mut random);
        }
    }
}

#[test]
fn sizes_zero_and_one() {
    let mut random = Random(2);
    let single = axis(1, 1, 1, 1, [0, 0]);
    check_passes(1, [1, 1, 1], &[single], &mut random);
    check_passes(1, [1, 1, 1], &[single, single], &mut random);
    check_passes(0, [1, 2, 3], &square(5, 3, 1, 1), &mut random);
    check_passes(2, [0, 2, 3], &square(5, 3, 1, 1), &mut random);
    check_passes(2, [1, 0, 3], &square(5, 3, 1, 1), &mut random);
    check_passes(2, [1, 3, 0], &square(5, 3, 1, 1), &mut random);
    check_passes(2, [3, 1, 1], &square(5, 0, 1, 1), &mut random);
    check_passes(2, [1, 3, 2], &square(5, 0, 1, 1), &mut random);
    // A kernel that is larger than the padded image: no output.
    check_passes(2, [1, 3, 2], &square(2, 5, 1, 1), &mut random);
    check_passes(2, [3, 1, 1], &square(2, 5, 1, 1), &mut random);
    // No input, only padding.
    check_passes(2, [1, 3, 2], &square(0, 3, 1, 2), &mut random);
    check_passes(2, [3, 1, 1], &square(0, 3, 1, 2), &mut random);
    // Output beyond the input, and input that no window covers.
    for before in [-7, -2, 0, 3, 20] {
        for stride in 1..4 {
            let end =
                SlidingAxis { input: 5, output: 9, kernel: 2, stride, dilation: 2, padding_before: before };
            check_passes(2, [1, 2, 3], &[end, single, end], &mut random);
            check_passes(2, [2, 1, 1], &[end, end], &mut random);
        }
    }
}

#[test]
fn windows_outside_the_input() {
    let mut random = Random(3);
    let distant = SlidingAxis {
        input: 4,
        output: 3,
        kernel: 3,
        stride: 1,
        dilation: 1_000_000_000,
        padding_before: 1_000_000_001,
    };
    check_passes(2, [1, 2, 2], &[distant], &mut random);
    check_passes(2, [2, 1, 1], &[distant, distant], &mut random);
    let wide = SlidingAxis { stride: 1 << 40, ..distant };
    check_passes(2, [1, 2, 2], &[wide, distant], &mut random);
    check_passes(2, [3, 1, 1], &[wide, distant], &mut random);
}

fn any_axis(random: &mut Random) -> SlidingAxis {
    let pads = [random.below(5), random.below(5)].map(|pad| pad as isize);
    let (kernel, stride, dilation) = (1 + random.below(5), 1 + random.below(3), 1 + random.below(3));
    let mut axis = axis(1 + random.below(12), kernel, stride, dilation, pads);
    if random.chance(10) {
        axis.output = random.below(9);
    }
    if random.chance(10) {
        axis.padding_before = random.below(12) as isize - 6;
    }
    axis
}

fn any_desc(random: &mut Random) -> ConvDesc {
    let rank = random.pick(&[1, 2, 2, 2, 3]);
    let axes: Vec<SlidingAxis> = (0..rank).map(|_| any_axis(random)).collect();
    let max_size = [40, 12, 4][rank - 1];
    let channels = match random.below(4) {
        0 => [1 + random.below(40), 1, 1],
        1 => [1 + random.below(3), 1 + random.below(4), 1 + random.below(4)],
        _ => [1, 1 + random.below(max_size), 1 + random.below(max_size)],
    };
    let shape = shape(random.pick(&PASSES), random.below(4), channels, &axes);
    let double = random.chance(20);
    let narrow = random.chance(20);
    let types: &[DType] = match (double, narrow) {
        (true, _) => &[DType::F64],
        (false, false) => &[DType::F32],
        (false, true) => &[DType::F32, DType::F16, DType::BF16],
    };
    let dtypes = [random.pick(types), random.pick(types)];
    let [_, _, dims] = shape.operands();
    let out = random.pick(&[DType::F32, DType::F32, DType::F64, DType::F16]);
    let store = random.chance(40).then(|| random_access(random, out, &dims, true, &[]));
    let mut desc = plain(shape, dtypes, store);
    desc.products.precision = random.pick(&Precision::ALL);
    desc
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_shape(seed: u64) {
        let mut random = Random(seed);
        let desc = any_desc(&mut random);
        check(&desc, &mut random, &format!("{desc:?}"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Many channels, which are divided unevenly between tasks.
    #[test]
    fn many_channels(seed: u64) {
        let mut random = Random(seed);
        let kernel = random.pick(&[1, 3, 3, 5]);
        let (side, max_channels) = random.pick(&[(2, 400), (4, 200), (8, 100), (14, 50)]);
        let ends = [0, 1].map(|_| 1 + random.below(kernel)).map(|pad| pad as isize - 1);
        let axes = [axis(side, kernel, 1, 1, ends), axis(side, kernel, random.pick(&[1, 1, 2]), 1, ends)];
        let channel_limit = if kernel == 5 { max_channels / 2 } else { max_channels };
        let channels = [1, channel_limit / 4 + random.below(channel_limit), channel_limit / 8 + random.below(channel_limit / 2)];
        let shape = shape(random.pick(&PASSES), 1 + random.below(3), channels, &axes);
        let mut desc = plain(shape, [DType::F32; 2], None);
        desc.products.precision = random.pick(&Precision::ALL);
        check(&desc, &mut random, &format!("{desc:?}"));
    }

    /// Windows of 3×3 over many channels, computed by Winograd: few and many positions, odd sizes, images that share a
    /// block, padding of any size at both ends, or none.
    #[test]
    fn transformed_tiles(seed: u64) {
        let mut random = Random(seed);
        let (side, max_channels) = random.pick(&[(4, 160), (8, 100), (15, 60), (33, 32)]);
        let mut length = || {
            let input = 3 + random.below(side);
            let [low, high] = [0, 1].map(|_| random.below(5) as isize - 1);
            axis(input, 3, 1, 1, [low, high])
        };
        let axes = [length(), length()];
        let channels = [1, max_channels / 2 + random.below(max_channels), max_channels / 2 + random.below(max_channels)];
        let shape = shape(random.pick(&PASSES), 1 + random.below(4), channels, &axes);
        check(&plain(shape.clone(), [DType::F32; 2], None), &mut random, &format!("{shape:?}"));
    }
}

/// Root mean square of the errors of sums over 2304 terms, relative to the root mean square of the results. Plain sums
/// of 1024 terms in f32 have the same error.
const TRANSFORMED_RMS: f64 = 6e-7;

#[test]
fn transformed_tiles_are_as_accurate_as_sums() {
    let mut random = Random(4);
    for (pass, channels, size) in [
        (ConvPass::Output, [1, 256, 48], 12),
        (ConvPass::InputGradient, [1, 48, 256], 12),
        (ConvPass::FilterGradient, [1, 48, 48], 48),
    ] {
        let desc = plain(shape(pass, 1, channels, &square(size, 3, 1, 1)), [DType::F32; 2], None);
        let inputs = operands(&desc, &mut random);
        let (sums, _) = convolve(&desc, &inputs);
        let outs = [vec![0; sums.len() * 4]];
        for isa in Isa::available() {
            let got = run_conv(&desc, isa, 1, &inputs, &outs).unwrap();
            let square = |x: f64| x * x;
            let error: f64 = sums
                .iter()
                .enumerate()
                .map(|(i, sum)| square(get(&got[0], DType::F32, i).to_f64() - sum))
                .sum();
            let size: f64 = sums.iter().map(|&sum| square(sum)).sum();
            let rms = (error / size).sqrt();
            assert!(rms < TRANSFORMED_RMS, "{pass:?} at {isa}: {rms:e}");
        }
    }
}

/// Runs a description on operands with one element that is infinite or NaN. This element must reach exactly the results
/// with a product of it in their sum. Padding has no products, so zero times infinity never occurs.
fn check_nonfinite(
    desc: &ConvDesc,
    (operand, at, odd): (usize, usize, f32),
    random: &mut Random,
    what: &str,
) {
    let mut inputs = operands(desc, random);
    put(&mut inputs[operand], [desc.a, desc.b][operand], at, Scalar::F64(odd.into()));
    let (sums, scale) = convolve(desc, &inputs);
    let store = &desc.epilogue.stores[0];
    let epsilon = max_relative_error(desc.products.precision);
    for (isa, products) in machines_for(desc.products.precision) {
        let desc = &ConvDesc { products, ..desc.clone() };
        let outs = [vec![0; store.len * store.dtype.size()]];
        let got = run_conv(desc, isa, 1, &inputs, &outs).unwrap();
        assert!(
            got == run_conv(desc, isa, 2, &inputs, &outs).unwrap(),
            "{what}: threads change bits at {isa}"
        );
        for (i, (&sum, scale)) in sums.iter().zip(&scale).enumerate() {
            let got = get(&got[0], store.dtype, i).to_f64();
            let close = (got - sum).abs() <= epsilon * (1.0 + scale);
            let same = got == sum || got.is_nan() && sum.is_nan();
            assert!(
                close || same,
                "{what}: {odd} at {at} of operand {operand}, at {isa} by {:?}: {i} is {got}, not {sum}",
                products.unit
            );
        }
    }
}

#[test]
fn nan_reaches_the_sums_that_contain_it() {
    let mut random = Random(5);
    let layers = networks().into_iter().chain([(2, [1, 48, 48], square(16, 3, 1, 1))]);
    for (batch, channels, axes) in layers {
        for pass in PASSES {
            let shape = shape(pass, batch, channels, &axes);
            let what = format!("{shape:?}");
            let mut desc = plain(shape, [DType::F32; 2], None);
            for operand in [0, 1] {
                let len = desc.shape.operands()[operand].iter().product::<usize>();
                desc.products.precision = random.pick(&[Precision::F32, Precision::F32, Precision::Bf16x3]);
                for (at, odd) in [(0, f32::NAN), (random.below(len), f32::INFINITY)] {
                    check_nonfinite(&desc, (operand, at, odd), &mut random, &what);
                }
            }
        }
    }
}

/// Sums of tiles with one huge element.
#[test]
fn huge_values_reach_the_sums_that_contain_them() {
    let mut random = Random(5);
    for pass in PASSES {
        let desc = plain(shape(pass, 2, [1, 48, 48], &square(16, 3, 1, 1)), [DType::F32; 2], None);
        for operand in [0, 1] {
            let len = desc.shape.operands()[operand].iter().product::<usize>();
            check_nonfinite(&desc, (operand, random.below(len), f32::MAX), &mut random, &format!("{pass:?}"));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nan_in_any_shape(seed: u64) {
        let mut random = Random(seed);
        let mut desc = any_desc(&mut random);
        desc.epilogue = plain(desc.shape.clone(), [desc.a, desc.b], None).epilogue;
        let operand = random.below(2);
        let len = desc.shape.operands()[operand].iter().product::<usize>();
        if len > 0 {
            let odd = random.pick(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]);
            let at = random.below(len);
            check_nonfinite(&desc, (operand, at, odd), &mut random, &format!("{desc:?}"));
        }
    }
}

/// An epilogue that reads the buffer that it overwrites, for sums of which some are computed twice.
#[test]
fn nan_in_in_place_epilogues() {
    let mut random = Random(11);
    for (batch, channels, axes) in [
        (2, [1, 5, 7], square(9, 3, 1, 1)),
        (2, [19, 1, 1], square(9, 3, 2, 1)),
        (9, [1, 20, 15], square(15, 5, 1, 2)),
    ] {
        for pass in PASSES {
            let shape = shape(pass, batch, channels, &axes);
            let [_, _, dims] = shape.operands();
            let count = dims.iter().product();
            let mut b = Builder::new();
            let (result, old) = (b.load(0, Type::F32), b.load(1, Type::F32));
            let sum = b.add(result, old);
            let access = Access::contiguous(DType::F32, &dims);
            let epilogue = Nest {
                inner: 0,
                segments: None,
                loads: vec![Load::Accumulator(DType::F32), Load::Buffer(access.clone())],
                expr: b.finish(&[sum]),
                reductions: Vec::new(),
                stores: vec![access],
                dims,
            };
            let desc = ConvDesc {
                shape,
                a: DType::F32,
                b: DType::F32,
                zero_points: [None; 2],
                products: Products::F32,
                epilogue,
            };
            for operand in [0, 1] {
                let mut inputs = operands(&desc, &mut random);
                put(&mut inputs[operand], DType::F32, 0, Scalar::F32(f32::NAN));
                let (sums, _) = convolve(&desc, &inputs);
                let kernel = ConvKernel::new(&desc, Isa::detect().unwrap()).unwrap();
                let mut memory = Memory::new(kernel.scratch_bytes(2));
                let [a, b] = &mut inputs[..] else { unreachable!("two operands") };
                let mut state = bytes_of(&vec![1.0; count]);
                let at = state.as_mut_ptr();
                // SAFETY: the old and the new state have equal accesses; the buffers belong to this test.
                unsafe {
                    kernel.run(
                        &[a.as_mut_ptr(), b.as_mut_ptr(), at, at],
                        SCALARS,
                        &Pool::new(2),
                        memory.scratch(),
                    )
                }
                .unwrap();
                for (i, (got, sum)) in floats(&state).iter().zip(&sums).enumerate() {
                    let expected = (sum + 1.0) as f32;
                    let same = got.is_nan() && expected.is_nan() || (got - expected).abs() < 1e-3;
                    assert!(same, "{pass:?} {channels:?}, operand {operand}: {i} is {got}, not {expected}");
                }
            }
        }
    }
}

/// `relu(result * 0.5 + bias[channel]) + 2 * old`, in place, and the result itself in half precision.
fn desc_with_full_epilogue(shape: ConvShape) -> ConvDesc {
    let [_, _, dims] = shape.operands();
    let f32 = Access::contiguous(DType::F32, &dims);
    let strides = (0..dims.len()).map(|axis| isize::from(axis == 1)).collect();
    let bias = Access { dtype: DType::F32, offset: 0, strides, len: dims[1] };
    let mut b = Builder::new();
    let result = b.load(0, Type::F32);
    let (alpha, beta) = (b.constant(Type::F32, 0.5), b.constant(Type::F32, 2.0));
    let (shift, old) = (b.load(1, Type::F32), b.load(2, Type::F32));
    let scaled = b.mul(result, alpha);
    let sum = b.add(scaled, shift);
    let zero = b.constant(Type::F32, 0.0);
    let positive = b.binary(BinaryOp::Max, sum, zero);
    let weighted = b.mul(old, beta);
    let sum = b.add(positive, weighted);
    let column = b.coordinate(dims.len() - 1);
    let column = b.convert(column, Type::F32);
    let sum = b.add(sum, column);
    let epilogue = Nest {
        inner: 0,
        segments: None,
        loads: vec![Load::Accumulator(DType::F32), Load::Buffer(bias), Load::Buffer(f32.clone())],
        expr: b.finish(&[sum, result]),
        reductions: Vec::new(),
        stores: vec![f32, Access::contiguous(DType::F16, &dims)],
        dims,
    };
    ConvDesc {
        shape,
        a: DType::F32,
        b: DType::F32,
        zero_points: [None; 2],
        products: Products::F32,
        epilogue,
    }
}

#[test]
fn epilogues_support_all_nest_features() {
    let mut random = Random(9);
    for (batch, channels, axes) in [
        (2, [1, 5, 7], square(9, 3, 1, 1)),
        (3, [1, 9, 40], square(6, 3, 2, 1)),
        (9, [1, 20, 33], square(3, 1, 1, 0)),
        (2, [3, 2, 4], square(20, 3, 1, 1)),
        (2, [19, 1, 1], square(9, 3, 2, 1)),
        (2, [19, 1, 1], square(12, 3, 1, 1)),
        // Whole images, of long planes and of short ones; short planes with gaps in a block.
        (9, [1, 20, 15], square(15, 1, 1, 0)),
        (17, [1, 3, 9], square(7, 3, 1, 1)),
        (8, [1, 40, 70], square(6, 1, 1, 0)),
    ] {
        for pass in PASSES {
            let desc = desc_with_full_epilogue(shape(pass, batch, channels, &axes));
            let dims = &desc.epilogue.dims;
            let count: usize = dims.iter().product();
            let (plane, width) = (dims[2..].iter().product::<usize>(), dims[dims.len() - 1]);
            let [a, b] = operands(&desc, &mut random);
            let bias = random_tensor(&mut random, DType::F32, dims[1]);
            let old = random_tensor(&mut random, DType::F32, count);
            let (sums, _) = convolve(&desc, &[a.clone(), b.clone()]);
            for isa in Isa::available() {
                let kernel = ConvKernel::new(&desc, isa).unwrap();
                let mut results = Vec::new();
                for threads in 1..=3 {
                    let mut memory = Memory::new(kernel.scratch_bytes(threads));
                    let (mut a, mut b, mut bias) = (a.clone(), b.clone(), bias.clone());
                    let (mut state, mut half) = (old.clone(), vec![0; count * 2]);
                    let at = state.as_mut_ptr();
                    let bases =
                        [a.as_mut_ptr(), b.as_mut_ptr(), bias.as_mut_ptr(), at, at, half.as_mut_ptr()];
                    // SAFETY: the old and the new state have equal accesses; the buffers belong to this test.
                    unsafe { kernel.run(&bases, SCALARS, &Pool::new(threads), memory.scratch()) }.unwrap();
                    results.push((state, half));
                }
                assert!(results[0] == results[1] && results[1] == results[2], "threads change bits");
                for (i, &sum) in sums.iter().enumerate() {
                    let bias = get(&bias, DType::F32, i / plane % dims[1]).to_f64();
                    let old = get(&old, DType::F32, i).to_f64();
                    let expected = (0.5 * sum + bias).max(0.0) + 2.0 * old + (i % width) as f64;
                    let got = get(&results[0].0, DType::F32, i).to_f64();
                    assert!(
                        (got - expected).abs() < 1e-4 * (1.0 + expected.abs()),
                        "{pass:?} {i}: {got}, not {expected}"
                    );
                    let half = get(&results[0].1, DType::F16, i).to_f64();
                    assert!((half - sum).abs() < 2e-2 + 1e-3 * sum.abs(), "{pass:?} {i}: {half}, not {sum}");
                }
            }
        }
    }
}

#[test]
fn a_guard_in_an_epilogue_reports_the_first_index() {
    let shape = shape(ConvPass::Output, 2, [1, 3, 50], &square(40, 3, 1, 1));
    let [_, _, dims] = shape.operands();
    let count: usize = dims.iter().product();
    let mut b = Builder::new();
    let result = b.load(0, Type::F32);
    let index = b.load(1, Type::I64);
    let index = b.guard(index, 5);
    let index = b.convert(index, Type::F32);
    let sum = b.add(result, index);
    let epilogue = Nest {
        inner: 0,
        segments: None,
        loads: vec![Load::Accumulator(DType::F32), Load::Buffer(Access::contiguous(DType::I64, &dims))],
        expr: b.finish(&[sum]),
        reductions: Vec::new(),
        stores: vec![Access::contiguous(DType::F32, &dims)],
        dims,
    };
    let desc = ConvDesc {
        shape,
        a: DType::F32,
        b: DType::F32,
        zero_points: [None; 2],
        products: Products::F32,
        epilogue,
    };
    let mut values = vec![0i64; count];
    for (i, at) in [(100_000, -1), (50_010, -2), (50_001, -3), (119_999, -4)] {
        values[i] = at;
    }
    let [a, b] = operands(&desc, &mut Random(1));
    let inputs = [a, b, values.iter().flat_map(|v| v.to_le_bytes()).collect()];
    for threads in 1..=3 {
        let got = run_conv(&desc, Isa::detect().unwrap(), threads, &inputs, &[vec![0; count * 4]]);
        assert_eq!(got, Err(OutOfRange { point: 50_001, index: -3, bound: 5 }));
    }
}

#[test]
fn invalid_descriptions_are_rejected() {
    let good = plain(shape(ConvPass::Output, 1, [1, 2, 3], &square(5, 3, 1, 1)), [DType::F32; 2], None);
    let refuse = |change: &dyn Fn(&mut ConvDesc), what: &str| {
        let mut desc = good.clone();
        change(&mut desc);
        assert!(ConvKernel::new(&desc, Isa::PORTABLE).is_err(), "{what}");
    };
    ConvKernel::new(&good, Isa::PORTABLE).unwrap();
    refuse(&|desc| desc.a = DType::I32, "integers");
    refuse(&|desc| desc.b = DType::F64, "two types");
    refuse(&|desc| desc.epilogue.loads[0] = Load::Accumulator(DType::F64), "the result is f32");
    refuse(&|desc| desc.epilogue.loads.clear(), "no result");
    refuse(&|desc| desc.epilogue.stores[0].len = 3, "the store is too short");
    refuse(&|desc| desc.shape.batch = 2, "an epilogue over another space");
    refuse(&|desc| desc.shape.axes[0].dilation = usize::MAX / 2, "positions that overflow");
}

#[test]
fn an_epilogue_has_one_accumulator() {
    let shape = shape(ConvPass::Output, 1, [1, 2, 3], &square(5, 3, 1, 1));
    let [_, _, dims] = shape.operands();
    let mut desc = plain(shape, [DType::F32; 2], None);
    let result = Load::Accumulator(DType::F32);
    let buffer = Load::Buffer(Access::contiguous(DType::F32, &dims));
    desc.epilogue.loads = vec![result.clone(), buffer.clone()];
    ConvKernel::new(&desc, Isa::PORTABLE).unwrap();
    let it_is_the_result = "the accumulator of the epilogue must be the result, of type float32";
    for (loads, sentence) in [
        (vec![buffer.clone()], it_is_the_result),
        (vec![buffer.clone(), result.clone()], it_is_the_result),
        (vec![result.clone(), result.clone()], it_is_the_result),
        (vec![Load::Accumulator(DType::F64)], it_is_the_result),
        (vec![result.clone(), buffer, result], "accumulators must precede the loads of buffers"),
    ] {
        desc.epilogue.loads = loads;
        assert_eq!(ConvKernel::new(&desc, Isa::PORTABLE).unwrap_err(), sentence, "{:?}", desc.epilogue.loads);
    }
}
