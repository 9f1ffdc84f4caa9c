//! Products of matrices.

use ortrain_expr::{Access, BinaryOp, Builder, DType, Nest, Type};
use ortrain_kernels::{GemmDesc, GemmKernel};

use crate::case::{Buffers, Case, SCALARS};

/// A product: batch, m, n, k, and which operands are transposed in memory.
#[derive(Clone, Copy)]
struct Product {
    dims: [usize; 4],
    transposed: (bool, bool),
    dtype: DType,
    /// One B for the whole batch.
    shared: bool,
    /// Bias and Relu behind the product.
    epilogue: bool,
}

pub(crate) fn cases() -> Vec<Case> {
    let nn = (false, false);
    let nt = (false, true);
    let tn = (true, false);
    let plain = |what: &str, dims: [usize; 4], transposed| {
        case(what, Product { dims, transposed, dtype: DType::F32, shared: false, epilogue: false })
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
        shared: false,
        epilogue: false,
    };
    cases.push(case("square", double));
    // A perceptron of 784-512-256-10 at batch 64: forward, gradient of the input, gradient of the weight.
    for (inputs, outputs) in [(784, 512), (512, 256), (256, 10)] {
        let product = Product {
            dims: [1, 64, outputs, inputs],
            transposed: nt,
            dtype: DType::F32,
            shared: false,
            epilogue: true,
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
    cases.push(plain("tiny", [256, 16, 16, 16], nn));
    cases.push(plain("tiny", [1, 8, 8, 8], nn));
    let product = Product {
        dims: [16, 32, 256, 256],
        transposed: nn,
        dtype: DType::F32,
        shared: true,
        epilogue: false,
    };
    cases.push(case("one B", product));
    cases.push(plain("pointwise", [8, 96, 576, 24], nn));
    cases.push(plain("pointwise", [8, 320, 9, 960], nn));
    cases.push(plain("pointwise", [4, 512, 49, 512], nn));
    cases
}

fn case(what: &str, product: Product) -> Case {
    let Product { dims: [batch, m, n, k], transposed: (ta, tb), dtype, shared, epilogue } = product;
    let letter = |transposed| if transposed { 'T' } else { 'N' };
    let size = dtype.size();
    let b_elements = if shared { k * n } else { batch * k * n };
    let elements = [batch * m * k, b_elements, batch * m * n];
    let bytes = elements.map(|elements| elements * size);
    let batches = if batch > 1 { format!("{batch}x") } else { String::new() };
    Case {
        name: format!("gemm {}{} {dtype} {what} {batches}{m}x{n}x{k}", letter(ta), letter(tb)),
        flops: 2.0 * (batch * m * n * k) as f64,
        // Half as many doubles fit into a register.
        rate: 4.0 / size as f64,
        bytes: bytes.iter().sum::<usize>() as f64,
        compile: Box::new(move |isa, threads| {
            let desc = GemmDesc {
                k,
                a: operand(dtype, [batch, m, k], ta, false),
                b: operand(dtype, [batch, k, n], tb, shared),
                epilogue: nest(dtype, [batch, m, n], epilogue),
            };
            let kernel = GemmKernel::new(&desc, isa).expect("a good description");
            let bias = if epilogue { n * size } else { 0 };
            let sizes = [bytes[0], bytes[1], bias, bytes[2]];
            let mut buffers = Buffers::new(&sizes, kernel.scratch_bytes(threads));
            Box::new(move |pool| {
                let mut bases = buffers.bases();
                if !epilogue {
                    bases.remove(2);
                }
                // SAFETY: buffers are as long as the accesses say, and belong to this case.
                let result = unsafe { kernel.run(&bases, SCALARS, pool, buffers.scratch()) };
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

/// The product as it is, or with bias and Relu.
fn nest(dtype: DType, dims: [usize; 3], epilogue: bool) -> Nest {
    let mut b = Builder::new();
    let mut result = b.load(0, Type::of(dtype));
    let mut loads = vec![Access::contiguous(dtype, &dims)];
    if epilogue {
        loads.push(Access::broadcast(dtype, &[dims[2]], &dims));
        let bias = b.load(1, Type::of(dtype));
        let sum = b.add(result, bias);
        let zero = b.constant(Type::of(dtype), 0.0);
        result = b.binary(BinaryOp::Max, sum, zero);
    }
    Nest {
        dims: dims.into_iter().collect(),
        inner: 0,
        loads,
        expr: b.finish(&[result]),
        reductions: Vec::new(),
        stores: vec![Access::contiguous(dtype, &dims)],
    }
}
