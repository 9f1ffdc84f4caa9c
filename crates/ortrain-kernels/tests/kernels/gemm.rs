//! Compares matrix products with sums in f64.

use std::iter::once;

use ortrain_expr::{
    Access, Builder, DType, Load, Nest, OutOfRange, Precision, QuantizedMatrix, QuantizedNumbers, Reg,
    Scalar, Strides, Type, UnaryOp,
};
use ortrain_kernels::{Compiler, GemmDesc, GemmKernel, Isa, KernelFilter, Pool, Products, QuantizedRight};
use proptest::prelude::*;

use crate::common::*;

/// Sizes of a product.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    batch: usize,
    m: usize,
    n: usize,
    k: usize,
}

impl Sizes {
    fn dims(self) -> [usize; 3] {
        [self.batch, self.m, self.n]
    }
}

fn strides(list: [usize; 3]) -> Strides {
    list.into_iter().map(|stride| stride as isize).collect()
}

/// Returns a `[batch, rows, columns]` operand, transposed in memory or not.
fn operand(dtype: DType, dims: [usize; 3], transposed: bool) -> Access {
    let [_, rows, columns] = dims;
    let mut access = Access::contiguous(dtype, &dims);
    if transposed {
        access.strides = strides([rows * columns, 1, rows]);
    }
    access
}

/// Returns an epilogue over the product, other loads and stores.
fn epilogue(
    dims: [usize; 3],
    double: bool,
    loads: Vec<Access>,
    stores: Vec<Access>,
    build: impl Fn(&mut Builder, Reg) -> Vec<Reg>,
) -> Nest {
    let (dtype, ty) = if double { (DType::F64, Type::F64) } else { (DType::F32, Type::F32) };
    let mut b = Builder::new();
    let product = b.load(0, ty);
    let outputs = build(&mut b, product);
    Nest {
        dims: dims.into_iter().collect(),
        inner: 0,
        segments: None,
        loads: once(Load::Accumulator(dtype)).chain(loads.into_iter().map(Load::Buffer)).collect(),
        expr: b.finish(&outputs),
        reductions: Vec::new(),
        stores,
    }
}

fn run_gemm<'a>(
    desc: &GemmDesc,
    compiler: impl Into<Compiler<'a>>,
    threads: usize,
    inputs: &[Vec<u8>],
    outs: &[Vec<u8>],
) -> Result<Vec<Vec<u8>>, OutOfRange> {
    let kernel = GemmKernel::new(desc, compiler).unwrap();
    let pool = Pool::new(threads);
    let mut memory = Memory::new(kernel.scratch_bytes(threads));
    let (mut inputs, mut outs) = (inputs.to_vec(), outs.to_vec());
    let bases: Vec<*mut u8> = inputs.iter_mut().chain(&mut outs).map(Vec::as_mut_ptr).collect();
    // SAFETY: buffers have the lengths of the accesses, and belong to this test.
    unsafe { kernel.run(&bases, SCALARS, &pool, memory.scratch()) }?;
    Ok(outs)
}

fn element(access: &Access, index: [usize; 3]) -> usize {
    let offset: isize = access.strides.iter().zip(index).map(|(&stride, i)| stride * i as isize).sum();
    (access.offset as isize + offset) as usize
}

/// Maximum number of multiplications of a test. Of larger products, a test checks the edges and some other elements.
const MAX_CHECKED_MULTIPLICATIONS: usize = 8_000_000;

/// Computes the product in f64, row-major, and the sums of magnitudes for error bounds; NaN marks elements that are not
/// checked.
fn product(desc: &GemmDesc, inputs: &[Vec<u8>]) -> (Vec<f64>, Vec<f64>) {
    let [batch, m, n] = desc.epilogue.dims.as_slice().try_into().unwrap();
    let (mut c, mut scale) = (Vec::new(), Vec::new());
    let decode = |access: &Access, bytes: &[u8]| -> Vec<f64> {
        (0..access.len).map(|i| get(bytes, access.dtype, i).to_f64()).collect()
    };
    let (a, b) = (decode(&desc.a, &inputs[0]), decode(&desc.b, &inputs[1]));
    let every = (batch * m * n * desc.k / MAX_CHECKED_MULTIPLICATIONS) | 1;
    for z in 0..batch {
        for i in 0..m {
            for j in 0..n {
                let edge = (i == 0 || i + 1 == m) && (j % 7 == 0 || j + 1 == n) || j + 1 == n && i % 7 == 0;
                if !edge && !(i * n + j).is_multiple_of(every) {
                    c.push(f64::NAN);
                    scale.push(f64::NAN);
                    continue;
                }
                let (mut sum, mut magnitude) = (0.0, 0.0);
                for p in 0..desc.k {
                    let term = a[element(&desc.a, [z, i, p])] * b[element(&desc.b, [z, p, j])];
                    sum += term;
                    magnitude += term.abs();
                }
                c.push(sum);
                scale.push(magnitude);
            }
        }
    }
    (c, scale)
}

fn random_buffer(random: &mut Random, access: &Access) -> Vec<u8> {
    let mut bytes = vec![0; access.len * access.dtype.size()];
    (0..access.len).for_each(|i| put(&mut bytes, access.dtype, i, Scalar::F64(random.unit())));
    bytes
}

/// Returns the filters that select each kernel of a description.
fn filters(desc: &GemmDesc, isa: Isa) -> Vec<KernelFilter> {
    kernel_filters("product.", isa, |filter| {
        GemmKernel::new(desc, Compiler::from(isa).with_kernels(filter)).unwrap().describe()
    })
}

/// Checks every kernel that supports a description.
fn check(desc: &GemmDesc, random: &mut Random, what: &str) {
    let store = &desc.epilogue.stores[0];
    let inputs = [random_buffer(random, &desc.a), random_buffer(random, &desc.b)];
    let outs = [vec![0xee; store.len * store.dtype.size()]];
    check_product(desc, product(desc, &inputs), &inputs, &outs, what);
}

/// Checks every kernel that supports a description against the product and the sums of magnitudes. The first of `outs`
/// is the result.
fn check_product(
    desc: &GemmDesc,
    (c, scale): (Vec<f64>, Vec<f64>),
    inputs: &[Vec<u8>],
    outs: &[Vec<u8>],
    what: &str,
) {
    let store = &desc.epilogue.stores[0];
    let dims: [usize; 3] = desc.epilogue.dims.as_slice().try_into().unwrap();
    let epsilon = match (store.dtype, desc.epilogue.loads[0].dtype()) {
        (DType::F64, DType::F64) => 1e-14,
        (DType::F16, _) => 1e-3 + max_relative_error(desc.products.precision),
        _ => max_relative_error(desc.products.precision),
    };
    for (isa, products) in machines_for(desc.products.precision) {
        let desc = &GemmDesc { products, ..desc.clone() };
        for filter in filters(desc, isa) {
            let compiler = Compiler::from(isa).with_kernels(&filter);
            let what = &format!("{what} by {:?}, {filter:?}", products.unit);
            let got = run_gemm(desc, compiler, 1, inputs, outs).unwrap();
            for threads in [2, 3] {
                let more = run_gemm(desc, compiler, threads, inputs, outs).unwrap();
                assert!(got == more, "{what}: {threads} threads change bits at {isa}");
            }
            let mut touched = vec![false; store.len];
            let [_, m, n] = dims;
            for flat in 0..c.len() {
                let index = [flat / n / m, flat / n % m, flat % n];
                let at = element(store, index);
                touched[at] = true;
                if c[flat].is_nan() {
                    continue;
                }
                let got = get(&got[0], store.dtype, at).to_f64();
                assert!(
                    (got - c[flat]).abs() <= epsilon * (1.0 + scale[flat]),
                    "{what} at {isa}: {index:?} is {got}, not {}",
                    c[flat]
                );
            }
            for (i, touched) in touched.iter().enumerate() {
                let size = store.dtype.size();
                let is_unwritten = got[0][i * size..(i + 1) * size].iter().all(|&byte| byte == 0xee);
                assert!(*touched || is_unwritten, "{what} at {isa}: wrote element {i}, which is none of C's");
            }
        }
    }
}

fn plain(sizes: Sizes, dtype: DType, ta: bool, tb: bool) -> GemmDesc {
    let Sizes { batch, m, n, k } = sizes;
    let out = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
    GemmDesc {
        k,
        a: operand(dtype, [batch, m, k], ta),
        b: operand(dtype, [batch, k, n], tb),
        quantized: None,
        zero_points: [None, None],
        rounded_to: [None; 2],
        products: Products::F32,
        epilogue: epilogue(
            sizes.dims(),
            dtype == DType::F64,
            Vec::new(),
            vec![Access::contiguous(out, &sizes.dims())],
            |_, product| vec![product],
        ),
    }
}

#[test]
fn transposes_types_and_sizes() {
    let sizes = [
        (1, 1, 1, 1),
        (1, 0, 5, 3),
        (1, 5, 0, 3),
        (2, 3, 4, 0),
        (0, 3, 4, 2),
        (3, 6, 16, 7),
        (1, 7, 17, 300),
        (1, 1, 100, 64),
        (1, 100, 1, 64),
        (2, 13, 33, 65),
        (1, 97, 35, 257),
        (1, 130, 530, 40),
        (1, 5, 600, 513),
        (1, 12, 40, 9),
    ];
    let mut random = Random(1);
    for (batch, m, n, k) in sizes {
        let sizes = Sizes { batch, m, n, k };
        for dtype in [DType::F32, DType::F64, DType::F16, DType::BF16] {
            for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
                check(&plain(sizes, dtype, ta, tb), &mut random, &format!("{sizes:?} {dtype} {ta} {tb}"));
                let mut desc = plain(sizes, dtype, ta, tb);
                desc.products.precision = random.pick(&Precision::ALL[1..]);
                check(&desc, &mut random, &format!("{sizes:?} {dtype} {ta} {tb}"));
            }
        }
    }
}

#[test]
fn large_products_are_cut_into_many_blocks() {
    let mut random = Random(2);
    // The last shapes: split-K, rows and columns a page apart, a larger B than is packed at a time.
    for (batch, m, n, k) in [
        (1, 300, 600, 700),
        (1, 600, 300, 300),
        (1, 64, 1100, 520),
        (1, 200, 200, 3000),
        (1, 64, 64, 5003),
        (2, 10, 100, 4100),
        (3, 20, 30, 2000),
        (1, 100, 100, 1024),
        (1, 40, 2048, 64),
        (3, 300, 70, 90),
        (1, 150, 2000, 1100),
    ] {
        let sizes = Sizes { batch, m, n, k };
        for (ta, tb) in [(false, true), (true, false)] {
            check(&plain(sizes, DType::F32, ta, tb), &mut random, &format!("{sizes:?} {ta} {tb}"));
        }
    }
}

/// Operands that are rounded at loading give the bits of copies in the narrow type, for every partition of a product.
#[test]
fn rounded_operands_equal_narrow_operands() {
    let mut random = Random(11);
    for (batch, m, n, k) in [
        (2, 3, 4, 0),
        (3, 6, 16, 7),
        (1, 7, 17, 300),
        (1, 1, 100, 64),
        (1, 100, 1, 128),
        (2, 13, 33, 65),
        (1, 97, 35, 257),
        (1, 5, 600, 513),
        (1, 12, 40, 9),
        (1, 64, 512, 784),
        (1, 40, 2048, 64),
        (1, 64, 64, 5003),
        (3, 300, 70, 90),
    ] {
        let sizes = Sizes { batch, m, n, k };
        for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
            let narrow = random.pick(&[DType::F16, DType::BF16]);
            let precision = random.pick(&Precision::ALL);
            let op = UnaryOp::rounding_to(narrow).unwrap();
            let wide = plain(sizes, DType::F32, ta, tb);
            let inputs = [&wide.a, &wide.b].map(|access| {
                let mut bytes = random_buffer(&mut random, access);
                for i in 0..access.len {
                    // Some values are subnormal or zero in the narrow type.
                    let size = random.pick(&[1.0, 1.0, 1.0, 2f64.powi(-12), 2f64.powi(-24), 2f64.powi(-40)]);
                    let value = get(&bytes, DType::F32, i).to_f64() * size;
                    put(&mut bytes, DType::F32, i, Scalar::F64(value));
                }
                bytes
            });
            let copies = inputs.each_ref().map(|bytes| {
                let mut copy = vec![0; bytes.len() / 2];
                for i in 0..copy.len() / 2 {
                    put(&mut copy, narrow, i, Scalar::unary(op, get(bytes, DType::F32, i)));
                }
                copy
            });
            let outs = [vec![0xee; batch * m * n * 4]];
            for rounds in [[true, false], [false, true], [true, true]] {
                for (isa, products) in machines_for(precision) {
                    let (mut rounded, mut stored) = (wide.clone(), wide.clone());
                    (rounded.products, stored.products) = (products, products);
                    rounded.rounded_to = rounds.map(|rounds| rounds.then_some(narrow));
                    let mut read = inputs.clone();
                    for (k, access) in [&mut stored.a, &mut stored.b].into_iter().enumerate() {
                        if rounds[k] {
                            access.dtype = narrow;
                            read[k].clone_from(&copies[k]);
                        }
                    }
                    for threads in [1, 2] {
                        let actual = run_gemm(&rounded, isa, threads, &inputs, &outs).unwrap();
                        let expected = run_gemm(&stored, isa, threads, &read, &outs).unwrap();
                        assert!(
                            actual == expected,
                            "{sizes:?} {ta} {tb}, {rounds:?} to {narrow}, {precision} at {isa}"
                        );
                    }
                }
            }
        }
    }
    let mut invalid = plain(Sizes { batch: 1, m: 2, n: 2, k: 2 }, DType::F64, false, false);
    invalid.rounded_to[1] = Some(DType::F16);
    let error = GemmKernel::new(&invalid, Isa::PORTABLE).unwrap_err();
    assert_eq!(error, "a matrix of type float64 cannot be rounded to float16");
}

#[test]
fn large_products_of_bfloat16_are_cut_into_many_blocks() {
    let mut random = Random(6);
    for (precision, (batch, m, n, k)) in [
        (Precision::Bf16, (1, 300, 600, 700)),
        (Precision::Bf16x3, (1, 64, 64, 5003)),
        (Precision::Bf16, (2, 30, 100, 4100)),
        (Precision::Bf16x6, (3, 300, 70, 90)),
        (Precision::Bf16, (1, 150, 2000, 1100)),
    ] {
        let mut desc = plain(Sizes { batch, m, n, k }, DType::F32, batch == 1, true);
        desc.products.precision = precision;
        check(&desc, &mut random, &format!("{precision} {batch} {m} {n} {k}"));
        desc.epilogue.stores[0].strides = strides([m * n, 1, m]);
        check(&desc, &mut random, &format!("{precision} {batch} {m} {n} {k}, turned"));
    }
}

#[test]
fn batches_may_share_a_matrix() {
    let mut random = Random(3);
    for (m, n, k) in [(5, 40, 30), (20, 300, 64), (160, 70, 90), (300, 33, 600)] {
        for (shared_a, shared_b) in [(true, false), (false, true), (true, true)] {
            for dtype in [DType::F32, DType::F16] {
                let mut desc = plain(Sizes { batch: 3, m, n, k }, dtype, false, shared_a);
                for (access, shared) in [(&mut desc.a, shared_a), (&mut desc.b, shared_b)] {
                    if shared {
                        access.strides[0] = 0;
                    }
                }
                check(&desc, &mut random, &format!("{m} {n} {k} {shared_a} {shared_b} {dtype}"));
            }
        }
    }
}

#[test]
fn results_may_be_transposed() {
    let mut random = Random(4);
    for (batch, m, n, k) in
        [(1, 1, 9, 5), (1, 40, 1, 70), (1, 33, 70, 20), (2, 130, 45, 300), (1, 60, 50, 2100)]
    {
        let sizes = Sizes { batch, m, n, k };
        for (ta, tb) in [(false, false), (false, true), (true, false), (true, true)] {
            let mut desc = plain(sizes, DType::F32, ta, tb);
            desc.epilogue.stores[0].strides = strides([m * n, 1, m]);
            check(&desc, &mut random, &format!("{sizes:?} {ta} {tb}"));
        }
    }
}

/// Weights that are much larger than the other operand; the lines of the last shapes are a page apart.
#[test]
fn small_m_products_with_many_columns() {
    let mut random = Random(7);
    for (batch, m, n, k) in
        [(1, 30, 150, 96), (1, 45, 1030, 97), (2, 62, 400, 801), (1, 125, 1300, 600), (1, 48, 200, 1024)]
    {
        let sizes = Sizes { batch, m, n, k };
        for (dtype, ta, tb, shared) in [
            (DType::F32, false, true, true),
            (DType::F32, true, true, false),
            (DType::F32, false, false, true),
            (DType::F32, true, false, false),
            (DType::F64, false, true, true),
            (DType::F64, false, false, false),
            (DType::BF16, false, true, false),
        ] {
            let mut desc = plain(sizes, dtype, ta, tb);
            if shared {
                desc.b.strides[0] = 0;
            }
            let what = format!("{sizes:?} {dtype} {ta} {tb} {shared}");
            check(&desc, &mut random, &what);
            desc.epilogue.stores[0].strides = strides([m * n, 1, m]);
            check(&desc, &mut random, &format!("{what}, turned"));
        }
    }
}

#[test]
fn batch_axes_merge_into_rows_or_columns() {
    let mut random = Random(5);
    for (batch, m, n, k) in [(3, 7, 40, 30), (4, 100, 33, 90), (2, 30, 200, 600)] {
        let sizes = Sizes { batch, m, n, k };
        // The batch continues the rows of A and C, or the columns of B and C. C is row-major, transposed, or has the
        // batch as inner axis.
        let layouts = [[m * n, n, 1], [m * n, 1, m], [m, 1, batch * m], [n, batch * n, 1]];
        for (c, shared_b) in layouts.into_iter().flat_map(|c| [(c, true), (c, false)]) {
            for dtype in [DType::F32, DType::F16] {
                let mut desc = plain(sizes, dtype, false, true);
                let shared = if shared_b { &mut desc.b } else { &mut desc.a };
                shared.strides[0] = 0;
                desc.epilogue.stores[0].strides = strides(c);
                check(&desc, &mut random, &format!("{sizes:?} {dtype} {c:?} {shared_b}"));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_strides(seed: u64) {
        let mut random = Random(seed);
        let size = |random: &mut Random, max_size: usize| 1 + random.below(max_size);
        let sizes = Sizes {
            batch: size(&mut random, 3),
            m: size(&mut random, 40),
            n: size(&mut random, 50),
            k: random.below(60),
        };
        let Sizes { batch, m, n, k } = sizes;
        let double = random.chance(30);
        let types: &[DType] = if double { &[DType::F64] } else { &[DType::F32, DType::F16, DType::BF16] };
        let (at, bt) = (random.pick(types), random.pick(types));
        let out = random.pick(&[DType::F32, DType::F64, DType::F16]);
        let store = random_access(&mut random, out, &sizes.dims(), true, &[]);
        let precision = random.pick(&Precision::ALL);
        let desc = GemmDesc {
            k,
            a: random_access(&mut random, at, &[batch, m, k], false, &[]),
            b: random_access(&mut random, bt, &[batch, k, n], false, &[]),
            quantized: None,
            zero_points: [None, None],
            rounded_to: [None; 2],
            products: Products { precision, ..Products::F32 },
            epilogue: epilogue(sizes.dims(), double, Vec::new(), vec![store], |_, product| vec![product]),
        };
        check(&desc, &mut random, &format!("{desc:?}"));
    }
}

#[test]
fn epilogues_support_all_nest_features() {
    // relu(alpha * A·B + bias) + beta * old, in place, and the product itself in half precision.
    let mut random = Random(9);
    let sizes = [
        (1, 1, 1),
        (10, 10, 4),
        (33, 70, 20),
        (100, 700, 33),
        (257, 9, 300),
        (64, 400, 200),
        (30, 40, 3000),
        (63, 4200, 130),
    ];
    for ((m, n, k), transposed) in sizes.into_iter().flat_map(|sizes| [(sizes, false), (sizes, true)]) {
        let dims = [1, m, n];
        let bias = Access::broadcast(DType::F32, &[n], &dims);
        let old = Access::contiguous(DType::F32, &dims);
        let half = Access::contiguous(DType::F16, &dims);
        let desc = GemmDesc {
            k,
            a: operand(DType::F32, [1, m, k], false),
            b: operand(DType::F32, [1, k, n], transposed),
            quantized: None,
            zero_points: [None, None],
            rounded_to: [None; 2],
            products: Products::F32,
            epilogue: epilogue(
                dims,
                false,
                vec![bias.clone(), old.clone()],
                vec![old.clone(), half],
                |b, product| {
                    let (alpha, beta) = (b.constant(Type::F32, 0.5), b.constant(Type::F32, 2.0));
                    let (bias, old) = (b.load(1, Type::F32), b.load(2, Type::F32));
                    let scaled = b.mul(product, alpha);
                    let sum = b.add(scaled, bias);
                    let zero = b.constant(Type::F32, 0.0);
                    let positive = b.binary(ortrain_expr::BinaryOp::Max, sum, zero);
                    let weighted = b.mul(old, beta);
                    let column = b.coordinate(2);
                    let column = b.convert(column, Type::F32);
                    let result = b.add(positive, weighted);
                    vec![b.add(result, column), product]
                },
            ),
        };
        let (a, b) = (random_buffer(&mut random, &desc.a), random_buffer(&mut random, &desc.b));
        let bias = random_buffer(&mut random, &bias);
        let old = random_buffer(&mut random, &old);
        let (c, _) = product(&desc, &[a.clone(), b.clone()]);
        for isa in Isa::available() {
            let kernel = GemmKernel::new(&desc, isa).unwrap();
            let mut results = Vec::new();
            for threads in 1..=3 {
                let mut memory = Memory::new(kernel.scratch_bytes(threads));
                let (mut a, mut b, mut bias) = (a.clone(), b.clone(), bias.clone());
                let (mut state, mut half) = (old.clone(), vec![0; m * n * 2]);
                let state_at = state.as_mut_ptr();
                let bases = [
                    a.as_mut_ptr(),
                    b.as_mut_ptr(),
                    bias.as_mut_ptr(),
                    state_at,
                    state_at,
                    half.as_mut_ptr(),
                ];
                // SAFETY: old and new C have equal accesses; the buffers belong to this test.
                unsafe { kernel.run(&bases, SCALARS, &Pool::new(threads), memory.scratch()) }.unwrap();
                results.push((state, half));
            }
            assert!(results[0] == results[1] && results[1] == results[2], "threads change bits");
            for (i, &c) in c.iter().enumerate() {
                let (bias, old) = (get(&bias, DType::F32, i % n).to_f64(), get(&old, DType::F32, i).to_f64());
                let expected = (0.5 * c + bias).max(0.0) + 2.0 * old + (i % n) as f64;
                let got = get(&results[0].0, DType::F32, i).to_f64();
                assert!(
                    c.is_nan() || (got - expected).abs() < 1e-4 * (1.0 + expected.abs()),
                    "{m} {n} {k}: {i} is {got}, not {expected}"
                );
                let half = get(&results[0].1, DType::F16, i).to_f64();
                assert!(
                    c.is_nan() || (half - c).abs() < 2e-2 + 1e-3 * c.abs(),
                    "{m} {n} {k}: {i} is {half}, not {c}"
                );
            }
        }
    }
}

#[test]
fn a_guard_in_an_epilogue_reports_the_first_index() {
    let (m, n, k) = (200, 600, 8);
    let dims = [1, m, n];
    let index = Access::contiguous(DType::I64, &dims);
    let desc = GemmDesc {
        k,
        a: operand(DType::F32, [1, m, k], false),
        b: operand(DType::F32, [1, k, n], false),
        quantized: None,
        zero_points: [None, None],
        rounded_to: [None; 2],
        products: Products::F32,
        epilogue: epilogue(
            dims,
            false,
            vec![index],
            vec![Access::contiguous(DType::F32, &dims)],
            |b, product| {
                let index = b.load(1, Type::I64);
                let index = b.guard(index, 5);
                let index = b.convert(index, Type::F32);
                vec![b.add(product, index)]
            },
        ),
    };
    let mut values = vec![0i64; m * n];
    for (i, at) in [(100_000, -1), (50_010, -2), (50_001, -3), (119_999, -4)] {
        values[i] = at;
    }
    let mut random = Random(1);
    let inputs = [
        random_buffer(&mut random, &desc.a),
        random_buffer(&mut random, &desc.b),
        values.iter().flat_map(|v| v.to_le_bytes()).collect(),
    ];
    for threads in 1..=3 {
        let got = run_gemm(&desc, Isa::detect().unwrap(), threads, &inputs, &[vec![0; m * n * 4]]);
        assert_eq!(got, Err(OutOfRange { point: 50_001, index: -3, bound: 5 }));
    }
}

#[test]
fn nan_times_zero_is_nan() {
    let desc = plain(Sizes { batch: 1, m: 2, n: 2, k: 2 }, DType::F32, false, false);
    let a = bytes_of(&[f32::NAN, 0.0, 1.0, 1.0]);
    let b = bytes_of(&[0.0, 0.0, f32::INFINITY, 1.0]);
    for isa in Isa::available() {
        let got = floats(&run_gemm(&desc, isa, 1, &[a.clone(), b.clone()], &[vec![0; 16]]).unwrap()[0]);
        assert!(got[0].is_nan() && got[1].is_nan() && got[2] == f32::INFINITY && got[3] == 1.0, "{got:?}");
    }
}

#[test]
fn invalid_descriptions_are_rejected() {
    let good = plain(Sizes { batch: 1, m: 4, n: 5, k: 6 }, DType::F32, false, false);
    let refuse = |change: &dyn Fn(&mut GemmDesc), what: &str| {
        let mut desc = good.clone();
        change(&mut desc);
        assert!(GemmKernel::new(&desc, Isa::PORTABLE).is_err(), "{what}");
    };
    GemmKernel::new(&good, Isa::PORTABLE).unwrap();
    refuse(&|desc| desc.k = 7, "A is too short");
    refuse(&|desc| desc.a.dtype = DType::I32, "integers");
    refuse(&|desc| desc.b.dtype = DType::F64, "two types");
    refuse(&|desc| desc.epilogue.loads[0] = Load::Accumulator(DType::F64), "the product is f32");
    refuse(&|desc| desc.epilogue.loads.clear(), "no product");
    refuse(&|desc| desc.epilogue.stores[0].len = 3, "C is too short");
    refuse(&|desc| desc.b.strides.truncate(2), "strides of another rank");
    refuse(
        &|desc| {
            desc.epilogue =
                epilogue([1, 4, 5], false, Vec::new(), desc.epilogue.stores.clone(), |b, product| {
                    let i = b.int(0);
                    let other = b.load_at(0, i, Type::F32);
                    let sum = b.add(product, other);
                    vec![b.unary(UnaryOp::Neg, sum)]
                });
        },
        "the product cannot be indexed",
    );
}

#[test]
fn an_epilogue_has_one_accumulator() {
    let mut desc = plain(Sizes { batch: 1, m: 4, n: 5, k: 6 }, DType::F32, false, false);
    let product = Load::Accumulator(DType::F32);
    let buffer = Load::Buffer(Access::contiguous(DType::F32, &[1, 4, 5]));
    desc.epilogue.loads = vec![product.clone(), buffer.clone()];
    GemmKernel::new(&desc, Isa::PORTABLE).unwrap();
    let it_is_the_product = "the accumulator of the epilogue must be the product, of type float32";
    for (loads, sentence) in [
        (vec![buffer.clone()], it_is_the_product),
        (vec![buffer.clone(), product.clone()], it_is_the_product),
        (vec![product.clone(), product.clone()], it_is_the_product),
        (vec![Load::Accumulator(DType::F64)], it_is_the_product),
        (vec![product.clone(), buffer, product], "accumulators must precede the loads of buffers"),
    ] {
        desc.epilogue.loads = loads;
        assert_eq!(GemmKernel::new(&desc, Isa::PORTABLE).unwrap_err(), sentence, "{:?}", desc.epilogue.loads);
    }
}

/// Returns a product with packed integers, its description with decoded elements in place of them, and its buffers: the
/// decoded elements, the integers, the scales and the zero points.
fn quantized(
    random: &mut Random,
    [m, n, k]: [usize; 3],
    matrix: QuantizedMatrix,
    has_lines_of_columns: bool,
    has_zero_points: bool,
) -> (GemmDesc, GemmDesc, [Vec<u8>; 4]) {
    let mut b = matrix.access(has_lines_of_columns);
    b.strides.insert(0, 0);
    let sizes = Sizes { batch: 1, m, n, k };
    let decoded = GemmDesc { b, ..plain(sizes, DType::F32, false, false) };
    let desc = GemmDesc { quantized: Some(QuantizedRight { matrix, has_zero_points }), ..decoded.clone() };
    let blocks = Access::contiguous(DType::F32, &[matrix.num_blocks()]);
    let bytes: Vec<u8> = (0..matrix.num_bytes()).map(|_| random.below(256) as u8).collect();
    let (scales, zero_points) = (random_buffer(random, &blocks), random_buffer(random, &blocks));
    let number = |buffer: &[u8], at: usize| get(buffer, DType::F32, at).to_f64() as f32;
    let mut elements = vec![0; 4 * matrix.len()];
    for position in 0..matrix.len() {
        let block = position / matrix.block;
        let integer = matrix.integer(bytes[position / matrix.integers_per_byte()], position);
        let zero_point = has_zero_points.then(|| number(&zero_points, block));
        let element = matrix.element(integer, number(&scales, block), zero_point);
        put(&mut elements, DType::F32, position, Scalar::F32(element));
    }
    (desc, decoded, [elements, bytes, scales, zero_points])
}

#[test]
fn packed_integers_are_multiplied_as_their_numbers() {
    let random = &mut Random(57);
    let table = QuantizedNumbers::Table(std::array::from_fn(|i| (i as f32 - 7.0) / 8.0));
    let distances = QuantizedNumbers::Distances { zero_point: 8.0 };
    let layouts = [
        (2, false, 16, distances),
        (2, true, 48, distances),
        (4, false, 32, distances),
        (4, true, 64, table),
        (4, false, 16, table),
        (8, false, 32, distances),
    ];
    // Few rows, few columns, whole panels, parts of blocks, chunks that begin inside of a block, whole registers.
    let sizes: [[usize; 3]; 10] = [
        [1, 40, 200],
        [3, 33, 64],
        [17, 5, 300],
        [30, 70, 31],
        [40, 130, 1000],
        [2, 600, 17],
        [1, 37, 208],
        [2, 3, 2048],
        [4, 9, 96],
        [29, 6, 112],
    ];
    for (bits, is_high_first, block, numbers) in layouts {
        for [m, n, k] in sizes {
            for has_lines_of_columns in [true, false] {
                let (lines, len) = if has_lines_of_columns { (n, k) } else { (k, n) };
                let blocks = len.div_ceil(block);
                let matrix = QuantizedMatrix { bits, is_high_first, block, blocks, lines, numbers };
                let has_zero_points = numbers == distances && random.chance(50);
                let (desc, decoded, [elements, bytes, scales, zero_points]) =
                    quantized(random, [m, n, k], matrix, has_lines_of_columns, has_zero_points);
                let a = random_buffer(random, &desc.a);
                let out = vec![0xee; 4 * m * n];
                let mut outs = vec![out, scales];
                if has_zero_points {
                    outs.push(zero_points);
                }
                let what = format!("{m}x{n}x{k} of {matrix:?}, lines of columns: {has_lines_of_columns}");
                for precision in [Precision::F32, Precision::Bf16x6] {
                    let products = Products { precision, ..Products::F32 };
                    let (desc, decoded) =
                        (GemmDesc { products, ..desc.clone() }, GemmDesc { products, ..decoded.clone() });
                    let expected = product(&decoded, &[a.clone(), elements.clone()]);
                    check_product(&desc, expected, &[a.clone(), bytes.clone()], &outs, &what);
                }
            }
        }
    }
}

#[test]
fn packed_integers_are_rounded_like_stored_elements() {
    let random = &mut Random(58);
    let numbers = QuantizedNumbers::Distances { zero_point: 8.0 };
    let matrix = QuantizedMatrix { bits: 4, is_high_first: false, block: 32, blocks: 3, lines: 50, numbers };
    let (desc, decoded, [elements, bytes, scales, _]) = quantized(random, [9, 50, 90], matrix, true, false);
    let a = random_buffer(random, &desc.a);
    for to in [DType::F16, DType::BF16] {
        let rounded_to = [None, Some(to)];
        for isa in Isa::available() {
            let run = |desc: &GemmDesc, b: &[u8], others: &[Vec<u8>]| {
                let desc = GemmDesc { rounded_to, ..desc.clone() };
                let outs: Vec<Vec<u8>> = once(vec![0; 4 * 9 * 50]).chain(others.iter().cloned()).collect();
                run_gemm(&desc, isa, 1, &[a.clone(), b.to_vec()], &outs).unwrap().swap_remove(0)
            };
            let (from_integers, from_elements) =
                (run(&desc, &bytes, std::slice::from_ref(&scales)), run(&decoded, &elements, &[]));
            for i in 0..9 * 50 {
                let [x, y] = [&from_integers, &from_elements].map(|c| get(c, DType::F32, i).to_f64());
                assert!((x - y).abs() <= 1e-5 * (1.0 + y.abs()), "{to} at {isa}: {x} and {y}");
            }
        }
    }
}

#[test]
fn faulty_packed_integers_are_refused() {
    let numbers = QuantizedNumbers::Distances { zero_point: 8.0 };
    let matrix = QuantizedMatrix { bits: 4, is_high_first: false, block: 32, blocks: 2, lines: 8, numbers };
    let (desc, ..) = quantized(&mut Random(1), [3, 8, 64], matrix, true, false);
    assert!(GemmKernel::new(&desc, Isa::PORTABLE).is_ok());
    for (faulty, part) in [
        (QuantizedMatrix { bits: 5, ..matrix }, "5 bits"),
        (QuantizedMatrix { block: 20, ..matrix }, "20"),
        (QuantizedMatrix { lines: 7, ..matrix }, "512 elements of 448 packed"),
    ] {
        let quantized = Some(QuantizedRight { matrix: faulty, has_zero_points: false });
        let error = GemmKernel::new(&GemmDesc { quantized, ..desc.clone() }, Isa::PORTABLE).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}
