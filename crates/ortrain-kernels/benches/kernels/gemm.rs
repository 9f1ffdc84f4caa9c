//! Cases of matrix products.

use ortrain_expr::{
    Access, BinaryOp, Builder, DType, Load, Nest, Precision, QuantizedMatrix, QuantizedNumbers, Type, UnaryOp,
};
use ortrain_kernels::{Bf16Unit, GemmDesc, GemmKernel, Products, QuantizedRight};

use crate::case::{Buffers, Case, SCALARS};

/// Matrix product: batch, m, n, k, and the operands that are transposed in memory.
#[derive(Clone, Copy)]
struct Product {
    dims: [usize; 4],
    transposed: (bool, bool),
    dtype: DType,
    precision: Precision,
    /// True if the whole batch shares one B.
    shared: bool,
    epilogue: Epilogue,
}

/// Epilogue of a product.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Epilogue {
    /// The product is stored.
    Nothing,
    /// The product is stored transposed, as the gradient of a weight that is used transposed.
    Transpose,
    /// The product is added, transposed, to the old value.
    TransposeAndAdd,
    /// Bias and Relu.
    Relu,
    /// Bias and residual connection.
    Residual,
    /// Bias and Gelu, with its slope.
    Gelu,
}

pub(crate) fn cases() -> Vec<Case> {
    let nn = (false, false);
    let nt = (false, true);
    let tn = (true, false);
    let plain = |what: &str, dims: [usize; 4], transposed| {
        case(
            what,
            Product {
                dims,
                transposed,
                dtype: DType::F32,
                precision: Precision::F32,
                shared: false,
                epilogue: Epilogue::Nothing,
            },
        )
    };
    let mut cases = Vec::new();
    for size in [64, 128, 256, 512, 1024] {
        cases.push(plain("square", [1, size, size, size], nn));
    }
    for size in [512, 1024] {
        cases.push(plain("square", [1, size, size, size], nt));
        cases.push(plain("square", [1, size, size, size], tn));
    }
    let double = Product {
        dims: [1, 512, 512, 512],
        transposed: nn,
        dtype: DType::F64,
        precision: Precision::F32,
        shared: false,
        epilogue: Epilogue::Nothing,
    };
    cases.push(case("square", double));
    // A perceptron of 784-512-256-10 at batch 64: forward, gradient of the input, gradient of the weight.
    for (inputs, outputs) in [(784, 512), (512, 256), (256, 10)] {
        let product = Product {
            dims: [1, 64, outputs, inputs],
            transposed: nt,
            dtype: DType::F32,
            precision: Precision::F32,
            shared: false,
            epilogue: Epilogue::Relu,
        };
        cases.push(case("mlp forward", product));
        cases.push(plain("mlp input gradient", [1, 64, inputs, outputs], nn));
        cases.push(plain("mlp weight gradient", [1, outputs, inputs, 64], tn));
    }
    cases.push(plain("few rows", [1, 1, 1024, 1024], nt));
    cases.push(plain("few rows", [1, 4, 1024, 1024], nn));
    cases.push(plain("few rows", [1, 16, 1024, 1024], nt));
    cases.push(plain("few columns", [1, 1024, 10, 1024], nn));
    cases.push(plain("few columns", [1, 4096, 16, 64], nn));
    cases.push(plain("long sums", [1, 64, 64, 50_000], tn));
    cases.push(plain("long sums", [1, 10, 256, 8192], tn));
    cases.push(plain("long sums", [1, 32, 16, 20_000], nt));
    cases.push(plain("short sums", [1, 512, 512, 49], nn));
    cases.push(plain("short sums", [1, 1024, 1024, 16], nn));
    // Heads of attention; the same weights over a batch; 1x1 convolutions.
    cases.push(plain("heads", [32, 128, 128, 64], nt));
    cases.push(plain("heads", [32, 128, 64, 128], nn));
    cases.push(plain("heads", [24, 256, 256, 64], nt));
    cases.push(plain("heads", [24, 256, 64, 256], nn));
    cases.push(plain("tiny", [256, 16, 16, 16], nn));
    cases.push(plain("tiny", [1, 8, 8, 8], nn));
    let product = Product {
        dims: [16, 32, 256, 256],
        transposed: nn,
        dtype: DType::F32,
        precision: Precision::F32,
        shared: true,
        epilogue: Epilogue::Nothing,
    };
    cases.push(case("one B", product));
    cases.push(plain("pointwise", [8, 96, 576, 24], nn));
    cases.push(plain("pointwise", [8, 320, 9, 960], nn));
    cases.push(plain("pointwise", [4, 512, 49, 512], nn));
    cases.extend(network_cases());
    cases.extend(bf16_cases());
    cases
}

/// Returns products in bfloat16, by the best unit of the machine.
fn bf16_cases() -> Vec<Case> {
    let (nn, nt, tn) = ((false, false), (false, true), (true, false));
    let shapes = [
        ("square", [1, 1024, 1024, 1024], nn),
        ("square", [1, 256, 256, 256], nn),
        ("bert_mini up", [1, 1024, 1024, 256], nt),
        ("bert_mini up, to weight", [1, 256, 1024, 1024], tn),
        ("heads", [32, 128, 128, 64], nt),
    ];
    let cases = Precision::ALL[1..].iter().flat_map(|&precision| shapes.map(|shape| (precision, shape)));
    let case = |(precision, (what, dims, transposed))| {
        case(
            what,
            Product {
                dims,
                transposed,
                dtype: DType::F32,
                precision,
                shared: false,
                epilogue: Epilogue::Nothing,
            },
        )
    };
    cases.map(case).collect()
}

/// Returns products of networks, as in their programs.
fn network_cases() -> Vec<Case> {
    let layer = |what: &str, dims: [usize; 4], transposed: (bool, bool), after| {
        let shared = dims[0] > 1;
        case(
            what,
            Product {
                dims,
                transposed,
                dtype: DType::F32,
                precision: Precision::F32,
                shared,
                epilogue: after,
            },
        )
    };
    let (nn, nt, tn) = ((false, false), (false, true), (true, false));
    let mut cases = Vec::new();
    for (what, batch, length, width) in [("bert_mini", 8, 128, 256), ("gpt2_small6", 4, 256, 384)] {
        let (tokens, wide) = (batch * length, 4 * width);
        let name = |part: &str| format!("{what} {part}");
        cases.push(layer(&name("in"), [batch, length, width, width], nt, Epilogue::Nothing));
        cases.push(layer(&name("out"), [batch, length, width, width], nt, Epilogue::Residual));
        cases.push(layer(&name("up"), [batch, length, wide, width], nt, Epilogue::Gelu));
        cases.push(layer(&name("down"), [batch, length, width, wide], nt, Epilogue::Residual));
        cases.push(layer(&name("in, to input"), [batch, length, width, width], nn, Epilogue::Nothing));
        cases.push(layer(&name("down, to input"), [batch, length, wide, width], nn, Epilogue::Nothing));
        cases.push(layer(&name("up, to input"), [batch, length, width, wide], nn, Epilogue::Nothing));
        cases.push(layer(&name("in, to weight"), [1, width, width, tokens], tn, Epilogue::Transpose));
        cases.push(layer(&name("up, to weight"), [1, width, wide, tokens], tn, Epilogue::Transpose));
        cases.push(layer(&name("down, to weight"), [1, wide, width, tokens], tn, Epilogue::Transpose));
        cases.push(layer(
            &name("down, to weight, adding"),
            [1, wide, width, tokens],
            tn,
            Epilogue::TransposeAndAdd,
        ));
    }
    cases.push(layer("gpt2_small6 words", [4, 256, 8000, 384], nt, Epilogue::Nothing));
    cases.push(layer("gpt2_small6 words, to input", [4, 256, 384, 8000], nn, Epilogue::Nothing));
    cases.push(layer("gpt2_small6 words, to weight", [1, 384, 8000, 1024], tn, Epilogue::Transpose));
    cases.push(layer("bert_base in", [2, 128, 768, 768], nt, Epilogue::Nothing));
    cases.push(layer("bert_base out", [2, 128, 768, 768], nt, Epilogue::Residual));
    cases.push(layer("bert_base up", [2, 128, 3072, 768], nt, Epilogue::Gelu));
    cases.push(layer("bert_base down", [2, 128, 768, 3072], nt, Epilogue::Residual));
    cases.push(layer("bert_base in, to input", [2, 128, 768, 768], nn, Epilogue::Nothing));
    cases.push(layer("bert_base up, to input", [2, 128, 768, 3072], nn, Epilogue::Nothing));
    cases.push(layer("bert_base down, to input", [2, 128, 3072, 768], nn, Epilogue::Nothing));
    cases.push(layer("bert_base down, to weight", [1, 3072, 768, 256], tn, Epilogue::Transpose));
    for (m, n, k, transposed) in [(1024, 8, 256, nn), (1024, 256, 8, nn), (256, 8, 1024, tn)] {
        cases.push(layer("bert_mini_lora8", [1, m, n, k], transposed, Epilogue::Nothing));
    }
    for (inputs, outputs) in [(800, 120), (120, 84), (84, 10)] {
        cases.push(layer("lenet forward", [1, 64, outputs, inputs], nt, Epilogue::Relu));
        cases.push(layer("lenet, to input", [1, 64, inputs, outputs], nn, Epilogue::Nothing));
        cases.push(layer("lenet, to weight", [1, outputs, inputs, 64], tn, Epilogue::Nothing));
    }
    cases.push(layer("lstm inputs", [1, 1024, 1024, 128], nt, Epilogue::Relu));
    cases.push(layer("lstm to inputs", [1, 1024, 128, 1024], nn, Epilogue::Nothing));
    cases.push(layer("lstm to weight", [1, 1024, 128, 1024], tn, Epilogue::Nothing));
    cases.push(layer("lstm to weight", [1, 1024, 256, 1008], tn, Epilogue::Nothing));
    cases.push(layer("lstm step", [1, 16, 1024, 256], nn, Epilogue::Nothing));
    cases.push(case_in_panels("lstm step", [16, 1024, 256]));
    cases.push(layer("lstm step back", [1, 16, 256, 1024], nn, Epilogue::Nothing));
    cases.push(case_in_panels("lstm step back", [16, 256, 1024]));
    for rows in [1, 32, 512] {
        cases.push(layer("decoder", [1, rows, 4096, 4096], nt, Epilogue::Nothing));
        cases.push(quantized_case([rows, 4096, 4096], 4, true));
        cases.push(quantized_case([rows, 4096, 4096], 4, false));
    }
    for rows in [4, 8, 16, 64] {
        cases.push(quantized_case([rows, 4096, 4096], 4, true));
    }
    cases
}

fn case(what: &str, product: Product) -> Case {
    let Product { dims: [batch, m, n, k], transposed: (ta, tb), dtype, precision, shared, epilogue: after } =
        product;
    let letter = |transposed| if transposed { 'T' } else { 'N' };
    let size = dtype.size();
    let b_elements = if shared { k * n } else { batch * k * n };
    let elements = [batch * m * k, b_elements, batch * m * n];
    let bytes = elements.map(|elements| elements * size);
    let batches = if batch > 1 { format!("{batch}x") } else { String::new() };
    let type_label = if precision == Precision::F32 { dtype.to_string() } else { precision.to_string() };
    Case {
        name: format!("gemm {}{} {type_label} {what} {batches}{m}x{n}x{k}", letter(ta), letter(tb)),
        flops: 2.0 * (batch * m * n * k) as f64,
        // A double takes the space of two floats in a register.
        rate: 4.0 / size as f64,
        precision,
        bytes: bytes.iter().sum::<usize>() as f64,
        compile: Box::new(move |isa, threads| {
            let desc = GemmDesc {
                k,
                a: operand(dtype, [batch, m, k], ta, false),
                b: operand(dtype, [batch, k, n], tb, shared),
                quantized: None,
                zero_points: [None, None],
                rounded_to: [None; 2],
                products: Products { precision, unit: Bf16Unit::detect(isa) },
                epilogue: nest(dtype, [batch, m, n], after),
            };
            let kernel = GemmKernel::new(&desc, isa).expect("valid description");
            let others = desc.epilogue.operands().map(|access| access.len * access.dtype.size());
            let sizes: Vec<usize> = bytes[..2].iter().copied().chain(others).collect();
            let mut buffers = Buffers::new(&sizes, kernel.scratch_bytes(threads));
            Box::new(move |pool| {
                let mut bases = buffers.bases();
                if after == Epilogue::TransposeAndAdd {
                    bases[3] = bases[2];
                }
                // SAFETY: buffers have the lengths of the accesses, and belong to this case.
                let result = unsafe { kernel.run(&bases, SCALARS, pool, buffers.scratch()) };
                result.expect("no guards");
            })
        }),
    }
}

/// Elements of a block of packed integers.
const BLOCK: usize = 32;

/// Returns a product with packed integers. The lines of the integers are columns of B, or rows of B.
fn quantized_case([m, n, k]: [usize; 3], bits: usize, has_lines_of_columns: bool) -> Case {
    let (lines, len) = if has_lines_of_columns { (n, k) } else { (k, n) };
    let matrix = QuantizedMatrix {
        bits,
        is_high_first: false,
        block: BLOCK,
        blocks: len / BLOCK,
        lines,
        numbers: QuantizedNumbers::Distances { zero_point: 8.0 },
    };
    let desc = GemmDesc {
        k,
        a: operand(DType::F32, [1, m, k], false, false),
        b: {
            let mut access = matrix.access(has_lines_of_columns);
            access.strides.insert(0, 0);
            access
        },
        quantized: Some(QuantizedRight { matrix, has_zero_points: false }),
        zero_points: [None, None],
        rounded_to: [None; 2],
        products: Products::F32,
        epilogue: nest(DType::F32, [1, m, n], Epilogue::Nothing),
    };
    let sizes = [4 * m * k, matrix.num_bytes(), 4 * m * n, 4 * matrix.num_blocks()];
    let lines = if has_lines_of_columns { "columns" } else { "rows" };
    Case {
        name: format!("gemm quantized, {bits} bits, lines of {lines} {m}x{n}x{k}"),
        flops: 2.0 * (m * n * k) as f64,
        rate: 1.0,
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

/// Columns of a panel.
const PANEL: usize = 16;

/// Returns a product of few rows with a matrix that is stored in panels: for each panel, k rows of its columns.
fn case_in_panels(what: &str, [m, n, k]: [usize; 3]) -> Case {
    let elements = [m * k, k * n, m * n];
    let dims = [n / PANEL, m, PANEL];
    let access = |len: usize, strides: [usize; 3]| Access {
        dtype: DType::F32,
        len,
        offset: 0,
        strides: strides.iter().map(|&stride| stride as isize).collect(),
    };
    let desc = GemmDesc {
        k,
        a: access(m * k, [0, k, 1]),
        b: access(k * n, [k * PANEL, PANEL, 1]),
        quantized: None,
        zero_points: [None, None],
        rounded_to: [None; 2],
        products: Products::F32,
        epilogue: Nest {
            stores: vec![access(m * n, [PANEL, n, 1])],
            ..nest(DType::F32, [dims[0], m, PANEL], Epilogue::Nothing)
        },
    };
    Case {
        name: format!("gemm NN f32 {what}, in panels {m}x{n}x{k}"),
        flops: 2.0 * (m * n * k) as f64,
        rate: 1.0,
        precision: Precision::F32,
        bytes: elements.iter().sum::<usize>() as f64 * 4.0,
        compile: Box::new(move |isa, threads| {
            let kernel = GemmKernel::new(&desc, isa).expect("valid description");
            let mut buffers =
                Buffers::new(&elements.map(|elements| 4 * elements), kernel.scratch_bytes(threads));
            Box::new(move |pool| {
                // SAFETY: buffers have the lengths of the accesses, and belong to this case.
                let result = unsafe { kernel.run(&buffers.bases(), SCALARS, pool, buffers.scratch()) };
                result.expect("no guards");
            })
        }),
    }
}

fn operand(dtype: DType, dims: [usize; 3], transposed: bool, shared: bool) -> Access {
    let [_, rows, columns] = dims;
    let mut access = Access::contiguous(dtype, &dims);
    if transposed {
        (access.strides[1], access.strides[2]) = (1, rows as isize);
    }
    if shared {
        access.strides[0] = 0;
        access.len = rows * columns;
    }
    access
}

fn nest(dtype: DType, dims: [usize; 3], after: Epilogue) -> Nest {
    let ty = Type::of(dtype);
    let mut b = Builder::new();
    let mut result = b.load(0, ty);
    let mut loads = vec![Load::Accumulator(dtype)];
    let mut stores = vec![Access::contiguous(dtype, &dims)];
    let mut others = Vec::new();
    if matches!(after, Epilogue::Relu | Epilogue::Residual | Epilogue::Gelu) {
        loads.push(Load::Buffer(Access::broadcast(dtype, &[dims[2]], &dims)));
        let bias = b.load(1, ty);
        result = b.add(result, bias);
    }
    match after {
        Epilogue::Nothing => {}
        Epilogue::Transpose | Epilogue::TransposeAndAdd => {
            stores = vec![operand(dtype, dims, true, false)];
            if after == Epilogue::TransposeAndAdd {
                loads.push(Load::Buffer(stores[0].clone()));
                let old = b.load(1, ty);
                result = b.add(old, result);
            }
        }
        Epilogue::Relu => {
            let zero = b.constant(ty, 0.0);
            result = b.binary(BinaryOp::Max, result, zero);
        }
        Epilogue::Residual => {
            loads.push(Load::Buffer(stores[0].clone()));
            let around = b.load(2, ty);
            result = b.add(around, result);
        }
        Epilogue::Gelu => {
            let [root, one, half] = [2f64.sqrt(), 1.0, 0.5].map(|value| b.constant(ty, value));
            let x = result;
            let scaled = b.binary(BinaryOp::Div, x, root);
            let erf = b.unary(UnaryOp::Erf, scaled);
            let twice = b.add(erf, one);
            let product = b.mul(x, twice);
            result = b.mul(product, half);
            // The slope, as the gradient of Erf.
            let square = b.mul(scaled, scaled);
            let below = b.unary(UnaryOp::Neg, square);
            let exponential = b.unary(UnaryOp::Exp, below);
            let factor = b.constant(ty, std::f64::consts::FRAC_2_SQRT_PI);
            let slope = b.mul(exponential, factor);
            let slope = b.mul(x, slope);
            let slope = b.binary(BinaryOp::Div, slope, root);
            others = vec![b.add(twice, slope)];
            stores = vec![stores[0].clone(); 2];
        }
    }
    others.push(result);
    Nest {
        dims: dims.into_iter().collect(),
        inner: 0,
        segments: None,
        loads,
        expr: b.finish(&others),
        reductions: Vec::new(),
        stores,
    }
}
