//! Tests of bfloat16 products: exactness, rounding errors, infinities and NaN. Sizes are small, because the tests also
//! run under an emulator if the machine lacks a unit.

use ortrain_expr::{
    Access, Builder, ConvPass, ConvShape, DType, Load, Nest, Precision, Scalar, SlidingAxis, Type,
};
use ortrain_kernels::{Bf16Unit, ConvDesc, ConvKernel, GemmDesc, GemmKernel, Isa, Pool, Products};

use crate::common::*;

const ROUNDED: [Precision; 3] = [Precision::Bf16, Precision::Bf16x3, Precision::Bf16x6];

/// Returns an operand of a product: `rows` × `columns`, transposed in memory or not.
fn operand(dtype: DType, rows: usize, columns: usize, transposed: bool) -> Access {
    let mut access = Access::contiguous(dtype, &[rows, columns]);
    if transposed {
        access.strides = [1, rows as isize].into_iter().collect();
    }
    access
}

/// Returns an epilogue that only stores the product.
fn plain_epilogue(dtype: DType, dims: &[usize]) -> Nest {
    let mut b = Builder::new();
    let product = b.load(0, Type::of(dtype));
    Nest {
        dims: dims.iter().copied().collect(),
        inner: 0,
        segments: None,
        loads: vec![Load::Accumulator(dtype)],
        expr: b.finish(&[product]),
        reductions: Vec::new(),
        stores: vec![Access::contiguous(dtype, dims)],
    }
}

fn gemm([m, n, k]: [usize; 3], dtypes: [DType; 2], transposed: [bool; 2], products: Products) -> GemmDesc {
    GemmDesc {
        k,
        a: operand(dtypes[0], m, k, transposed[0]),
        b: operand(dtypes[1], k, n, transposed[1]),
        quantized: None,
        zero_points: [None, None],
        rounded_to: [None; 2],
        products,
        epilogue: plain_epilogue(if dtypes == [DType::F64; 2] { DType::F64 } else { DType::F32 }, &[m, n]),
    }
}

fn run_gemm(desc: &GemmDesc, isa: Isa, inputs: [&[u8]; 2]) -> Vec<f64> {
    let kernel = GemmKernel::new(desc, isa).unwrap();
    let store = &desc.epilogue.stores[0];
    let mut out = vec![0; store.len * store.dtype.size()];
    let mut memory = Memory::new(kernel.scratch_bytes(1));
    let mut inputs = inputs.map(<[u8]>::to_vec);
    let [a, b] = inputs.each_mut().map(Vec::as_mut_ptr);
    // SAFETY: buffers have the lengths of the accesses, and belong to this test.
    unsafe { kernel.run(&[a, b, out.as_mut_ptr()], SCALARS, &Pool::new(1), memory.scratch()) }.unwrap();
    (0..store.len).map(|i| get(&out, store.dtype, i).to_f64()).collect()
}

fn buffer_of(dtype: DType, values: &[f64]) -> Vec<u8> {
    let mut bytes = vec![0; values.len() * dtype.size()];
    (0..values.len()).for_each(|i| put(&mut bytes, dtype, i, Scalar::F64(values[i])));
    bytes
}

/// Computes the product of row-major matrices in f64.
fn multiply([m, n, k]: [usize; 3], a: &[f64], b: &[f64]) -> Vec<f64> {
    let sum = |i: usize, j: usize| (0..k).map(|p| a[i * k + p] * b[p * n + j]).sum();
    (0..m * n).map(|i| sum(i / n, i % n)).collect()
}

/// Returns the elements of a matrix in memory order.
fn in_memory_order(values: &[f64], rows: usize, transposed: bool) -> Vec<f64> {
    let columns = values.len() / rows;
    if !transposed {
        return values.to_vec();
    }
    (0..values.len()).map(|i| values[i % rows * columns + i / rows]).collect()
}

/// All products and sums of small integers are exact, so every element must be at its position.
#[test]
fn products_of_small_integers_are_exact() {
    let mut random = Random(11);
    let narrow = [DType::F32, DType::F16, DType::BF16];
    for sides in [
        [1, 1, 1],
        [1, 40, 33],
        [5, 3, 2],
        [16, 16, 32],
        [17, 15, 31],
        [32, 32, 32],
        [48, 40, 65],
        [20, 70, 33],
        [100, 35, 40],
    ] {
        let [m, n, k] = sides;
        for (transposed, dtypes) in [
            ([false, false], [DType::F32; 2]),
            ([false, true], [DType::F32; 2]),
            ([true, false], [DType::F32; 2]),
            ([true, true], [random.pick(&narrow), random.pick(&narrow)]),
        ] {
            let mut integers =
                |len: usize| -> Vec<f64> { (0..len).map(|_| random.below(17) as f64 - 8.0).collect() };
            let (a, b) = (integers(m * k), integers(k * n));
            let expected = multiply(sides, &a, &b);
            let a = buffer_of(dtypes[0], &in_memory_order(&a, m, transposed[0]));
            let b = buffer_of(dtypes[1], &in_memory_order(&b, k, transposed[1]));
            for precision in ROUNDED {
                for (isa, products) in machines_for(precision) {
                    let got = run_gemm(&gemm(sides, dtypes, transposed, products), isa, [&a, &b]);
                    let same = got.iter().zip(&expected).all(|(&got, &expected)| got == expected);
                    assert!(
                        same,
                        "{sides:?} {transposed:?} {dtypes:?} {products:?} at {isa}: {got:?}, not {expected:?}"
                    );
                }
            }
        }
    }
}

/// Sums are longer than a chunk, so that sums are added to sums.
#[test]
fn long_sums_of_integers_are_exact() {
    let mut random = Random(12);
    let sides = [24, 37, 1000];
    let [m, n, k] = sides;
    let mut integers = |len: usize| -> Vec<f64> { (0..len).map(|_| random.below(9) as f64 - 4.0).collect() };
    let (a, b) = (integers(m * k), integers(k * n));
    let expected = multiply(sides, &a, &b);
    let (a, b) = (buffer_of(DType::F32, &a), buffer_of(DType::F32, &b));
    for (isa, products) in machines_for(Precision::Bf16) {
        let got = run_gemm(&gemm(sides, [DType::F32; 2], [false; 2], products), isa, [&a, &b]);
        assert!(got.iter().zip(&expected).all(|(&got, &expected)| got == expected), "{products:?} at {isa}");
    }
}

/// Products have the terms of `Precision::split`: factors of 24 bits, sums of one product and zeros.
#[test]
fn products_sum_the_products_of_terms() {
    let mut random = Random(13);
    let (m, n, k) = (17, 18, 17);
    let mut factors = |len: usize| -> Vec<f32> { (0..len).map(|_| random.unit() as f32).collect() };
    let (x, y) = (factors(m), factors(n));
    // Each row of A and each column of B has one nonzero factor, at depth 5.
    let mut a = vec![0f32; m * k];
    let mut b = vec![0f32; k * n];
    (0..m).for_each(|i| a[i * k + 5] = x[i]);
    (0..n).for_each(|j| b[5 * n + j] = y[j]);
    for precision in ROUNDED {
        for (isa, products) in machines_for(precision) {
            let desc = gemm([m, n, k], [DType::F32; 2], [false; 2], products);
            let got = run_gemm(&desc, isa, [&bytes_of(&a), &bytes_of(&b)]);
            for (i, &got) in got.iter().enumerate() {
                let (left, right) = (precision.split(x[i / n]), precision.split(y[i % n]));
                let terms = precision.products().iter().rev();
                let sum: f64 = terms.map(|&(s, t)| f64::from(left[s]) * f64::from(right[t])).sum();
                let close = (got - sum).abs() <= 2f64.powi(-22) * sum.abs();
                assert!(close, "{products:?} at {isa}: {got} is not {sum}");
                assert!(precision != Precision::Bf16 || got == sum, "{got} of one term is not {sum}");
            }
        }
    }
}

/// Minimum and maximum root mean square of the errors of sums of 1024 products, relative to the root mean square of the
/// sums. Sums of f32 alone have errors of 2 to 7 · 10⁻⁷.
const ROOT_MEAN_SQUARES: [(Precision, f64, f64); 3] = [
    // Two factors, each with a uniform error up to 2⁻⁸: 2⁻⁸ / √3, less for factors in the upper half of their binade.
    (Precision::Bf16, 8e-4, 3e-3),
    // 2⁻⁸ of this error, and the product that is left out.
    (Precision::Bf16x3, 1e-6, 6e-6),
    // Error of sums in f32.
    (Precision::Bf16x6, 1e-8, 1.5e-6),
];

#[test]
fn errors_match_each_precision() {
    let mut random = Random(14);
    let sides = [20, 24, 1024];
    let [m, n, k] = sides;
    let mut factors =
        |len: usize| -> Vec<f64> { (0..len).map(|_| f64::from(random.unit() as f32)).collect() };
    let (a, b) = (factors(m * k), factors(k * n));
    let expected = multiply(sides, &a, &b);
    let size = expected.iter().map(|expected| expected * expected).sum::<f64>();
    let (a, b) = (buffer_of(DType::F32, &a), buffer_of(DType::F32, &b));
    for (precision, min_error, max_error) in ROOT_MEAN_SQUARES {
        for (isa, products) in machines_for(precision) {
            let got = run_gemm(&gemm(sides, [DType::F32; 2], [false; 2], products), isa, [&a, &b]);
            let off = got.iter().zip(&expected).map(|(&got, expected)| (got - expected).powi(2)).sum::<f64>();
            let error = (off / size).sqrt();
            println!("{precision} by {} at {isa}: {error:.2e}", products.unit);
            assert!((min_error..max_error).contains(&error), "{products:?} at {isa}: {error}");
        }
    }
}

/// Infinities and NaN meet zeros, small numbers and each other, in full blocks and at their edges.
#[test]
fn infinity_and_nan_equal_f32() {
    let (inf, nan) = (f64::INFINITY, f64::NAN);
    let largest = f64::from(f32::MAX);
    for sides in [[17, 17, 17], [32, 32, 40], [40, 50, 400]] {
        let [m, n, k] = sides;
        let mut random = Random(15);
        let mut factors =
            |len: usize| -> Vec<f64> { (0..len).map(|_| f64::from(random.unit() as f32)).collect() };
        let (mut a, mut b) = (factors(m * k), factors(k * n));
        a[2] = inf;
        a[3 * k + k - 1] = -inf;
        a[5 * k + 1] = nan;
        a[6 * k] = largest;
        b[7 * n + 4] = inf;
        b[2 * n + 6] = 0.0;
        b[(k - 1) * n + 9] = nan;
        b[11] = 0.75;
        let expected = multiply(sides, &a, &b);
        let (a, b) = (buffer_of(DType::F32, &a), buffer_of(DType::F32, &b));
        for precision in ROUNDED {
            for (isa, products) in machines_for(precision) {
                let got = run_gemm(&gemm(sides, [DType::F32; 2], [false; 2], products), isa, [&a, &b]);
                for (i, (&got, &expected)) in got.iter().zip(&expected).enumerate() {
                    let row = i / n;
                    // The largest number becomes infinite if it is rounded to one term.
                    let over = row == 6 && precision == Precision::Bf16;
                    let is_close = (got - expected).abs() <= 0.05 * (1.0 + expected.abs());
                    let same = got == expected || got.is_nan() && expected.is_nan() || is_close;
                    assert!(
                        same || over && !got.is_finite(),
                        "{sides:?} {products:?} at {isa}: {i} is {got}, not {expected}"
                    );
                }
            }
        }
    }
}

fn conv(
    pass: ConvPass,
    batch: usize,
    channels: [usize; 3],
    axes: &[SlidingAxis],
    dtype: DType,
    products: Products,
) -> ConvDesc {
    let [groups, channels_in, channels_out] = channels;
    let shape =
        ConvShape { pass, batch, groups, channels_in, channels_out, axes: axes.iter().copied().collect() };
    let [_, _, dims] = shape.operands();
    ConvDesc {
        shape,
        a: dtype,
        b: dtype,
        zero_points: [None; 2],
        products,
        epilogue: plain_epilogue(dtype, &dims),
    }
}

fn run_conv(desc: &ConvDesc, isa: Isa, inputs: &[Vec<u8>; 2]) -> Vec<f64> {
    let kernel = ConvKernel::new(desc, isa).unwrap();
    let store = &desc.epilogue.stores[0];
    let mut out = vec![0; store.len * store.dtype.size()];
    let mut memory = Memory::new(kernel.scratch_bytes(1));
    let mut inputs = inputs.clone();
    let [a, b] = inputs.each_mut().map(Vec::as_mut_ptr);
    // SAFETY: buffers have the lengths of the shape, and belong to this test.
    unsafe { kernel.run(&[a, b, out.as_mut_ptr()], SCALARS, &Pool::new(1), memory.scratch()) }.unwrap();
    (0..store.len).map(|i| get(&out, store.dtype, i).to_f64()).collect()
}

/// Small integers again: convolutions in f32 are exact, too.
#[test]
fn convolutions_of_small_integers_are_exact() {
    let mut random = Random(16);
    let axis = |input: usize, kernel: usize, stride: usize, dilation: usize, pad: isize| {
        let window = (dilation * (kernel - 1) + 1) as isize;
        let output = (input as isize + 2 * pad - window) as usize / stride + 1;
        SlidingAxis { input, output, kernel, stride, dilation, padding_before: pad }
    };
    for (batch, channels, axes) in [
        (2, [1, 20, 36], [axis(7, 3, 1, 1, 1); 2]),
        (1, [1, 40, 18], [axis(12, 1, 1, 1, 0); 2]),
        (3, [2, 17, 20], [axis(6, 3, 2, 1, 1), axis(5, 2, 1, 2, 1)]),
        (1, [1, 70, 33], [axis(9, 1, 2, 1, 0); 2]),
        // The stride is so long that each position of the input is a phase by itself: the general algorithm.
        (2, [1, 18, 20], [axis(34, 17, 17, 1, 0); 2]),
    ] {
        for pass in [ConvPass::Output, ConvPass::InputGradient, ConvPass::FilterGradient] {
            let plain = conv(pass, batch, channels, &axes, DType::F64, Products::F32);
            let [a, b, _] = plain.shape.operands().map(|dims| dims.iter().product::<usize>());
            let mut integers =
                |len: usize| -> Vec<f64> { (0..len).map(|_| random.below(9) as f64 - 4.0).collect() };
            let inputs = [integers(a), integers(b)];
            let [doubles, inputs] = [DType::F64, DType::F32]
                .map(|dtype| inputs.each_ref().map(|values| buffer_of(dtype, values)));
            let expected = run_conv(&plain, Isa::detect().unwrap(), &doubles);
            for precision in ROUNDED {
                for (isa, products) in machines_for(precision) {
                    let got =
                        run_conv(&conv(pass, batch, channels, &axes, DType::F32, products), isa, &inputs);
                    assert!(
                        got == expected,
                        "{:?} {products:?} at {isa}: {got:?}, not {expected:?}",
                        plain.shape
                    );
                }
            }
        }
    }
}

/// Factors of 24 bits are rounded in convolutions, too, and errors stay within the bounds.
#[test]
fn conv_errors_are_within_product_bounds() {
    let mut random = Random(17);
    let axis = SlidingAxis { input: 10, output: 10, kernel: 3, stride: 1, dilation: 1, padding_before: 1 };
    for pass in [ConvPass::Output, ConvPass::InputGradient, ConvPass::FilterGradient] {
        let plain = conv(pass, 2, [1, 24, 20], &[axis; 2], DType::F64, Products::F32);
        let [a, b, _] = plain.shape.operands().map(|dims| dims.iter().product::<usize>());
        let mut factors =
            |len: usize| -> Vec<f64> { (0..len).map(|_| f64::from(random.unit() as f32)).collect() };
        let inputs = [factors(a), factors(b)];
        let [doubles, inputs] =
            [DType::F64, DType::F32].map(|dtype| inputs.each_ref().map(|values| buffer_of(dtype, values)));
        let expected = run_conv(&plain, Isa::detect().unwrap(), &doubles);
        let size = expected.iter().map(|expected| expected * expected).sum::<f64>();
        for (precision, min_error, max_error) in ROOT_MEAN_SQUARES {
            for (isa, products) in machines_for(precision) {
                let got =
                    run_conv(&conv(pass, 2, [1, 24, 20], &[axis; 2], DType::F32, products), isa, &inputs);
                let off =
                    got.iter().zip(&expected).map(|(&got, &expected)| (got - expected).powi(2)).sum::<f64>();
                let error = (off / size).sqrt();
                assert!((min_error..max_error).contains(&error), "{pass:?} {products:?} at {isa}: {error}");
            }
        }
    }
}

#[test]
fn f64_operands_ignore_the_precision() {
    let mut random = Random(18);
    let sides = [20, 20, 20];
    let products = Products { precision: Precision::Bf16, unit: Bf16Unit::EMULATED };
    let desc = gemm(sides, [DType::F64; 2], [false; 2], products);
    let factors: Vec<f64> = (0..400).map(|_| random.unit()).collect();
    let bytes = buffer_of(DType::F64, &factors);
    let got = run_gemm(&desc, Isa::detect().unwrap(), [&bytes, &bytes]);
    for (got, expected) in got.iter().zip(multiply(sides, &factors, &factors)) {
        assert!((got - expected).abs() <= 1e-14 * (1.0 + expected.abs()), "{got} is not {expected}");
    }
}
