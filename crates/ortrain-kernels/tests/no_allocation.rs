//! Tests that a run allocates nothing, on any thread.
#![allow(clippy::unwrap_used, reason = "a test that fails may panic")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use ortrain_expr::{
    Access, Builder, DType, IndexKind, Load, Nest, Precision, ReduceOp, Reduction, Segments, SlidingAxis,
    Type, UnaryOp, WindowPass, WindowShape,
};
use ortrain_kernels::{
    Bf16Unit, GemmDesc, GemmKernel, Isa, NestKernel, Pool, Products, RunScalars, ScatterDesc, ScatterKernel,
    Scratch, WindowDesc, WindowKernel,
};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn memory(bytes: usize) -> Scratch {
    let layout = Layout::from_size_align(bytes.max(1), Scratch::ALIGN).unwrap();
    // SAFETY: the layout is not empty. The memory is never freed; this is a test.
    Scratch::new(unsafe { std::alloc::alloc(layout) }, bytes)
}

fn assert_no_allocation(what: &str, run: &dyn Fn()) {
    // The first run starts the threads, which allocate at their start.
    run();
    std::thread::sleep(std::time::Duration::from_millis(20));
    for _ in 0..3 {
        let before = ALLOCATIONS.load(Ordering::SeqCst);
        run();
        let allocations = ALLOCATIONS.load(Ordering::SeqCst) - before;
        assert_eq!(allocations, 0, "{what} allocates");
    }
}

fn softmax(outer: usize, inner: usize, transposed: bool) -> Nest {
    let mut b = Builder::new();
    let x = b.load(0, Type::F32);
    let largest = b.reduced(0, Type::F32);
    let shifted = b.sub(x, largest);
    let e = b.unary(UnaryOp::Exp, shifted);
    let sum = b.reduced(1, Type::F32);
    let y = b.div(e, sum);
    let (expr, values) = b.finish_keeping(&[y, sum], &[x, e]);
    let mut access = Access::contiguous(DType::F32, &[outer, inner]);
    if transposed {
        access.strides = [1, outer as isize].into_iter().collect();
    }
    let row = Access { strides: [1, 0].into_iter().collect(), len: outer, ..access.clone() };
    Nest {
        dims: [outer, inner].into_iter().collect(),
        inner: 1,
        segments: None,
        loads: vec![Load::Buffer(access.clone())],
        expr,
        reductions: vec![
            Reduction { op: ReduceOp::Max, value: values[0] },
            Reduction { op: ReduceOp::Sum, value: values[1] },
        ],
        stores: vec![access, row],
    }
}

/// Softmax over segments, the first of which is cut into pieces.
fn softmax_of_segments(outer: usize, inner: usize) -> Nest {
    let longest = outer * inner / 2;
    let rest = (0..outer - 1).map(|k| longest + k * (inner / 2)..longest + k * (inner / 2) + inner / 3);
    let mut nest = softmax(outer, inner, false);
    nest.dims[1] = outer * inner;
    nest.segments = Some(Segments::new(std::iter::once(0..longest).chain(rest)));
    // The planes; sums follow.
    nest.operands_mut().take(2).for_each(|plane| plane.strides[0] = 0);
    nest
}

// A single test, because the counter counts for the whole process.
#[test]
fn runs_allocate_nothing() {
    let pool = Pool::new(3);
    for isa in Isa::available() {
        for (outer, inner, transposed) in [
            (300, 1000, false),
            (2, 1_000_000, false),
            (64, 50_000, true),
            (5000, 100, true),
            (3000, 10, false),
        ] {
            for nest in [softmax(outer, inner, transposed), softmax_of_segments(outer, inner)] {
                let kernel = NestKernel::new(&nest, isa).unwrap();
                let mut x = vec![0.5f32; outer * inner];
                let mut y = x.clone();
                let mut sums = vec![0.0f32; outer];
                let bases = [x.as_mut_ptr().cast(), y.as_mut_ptr().cast(), sums.as_mut_ptr().cast()];
                let scratch = memory(kernel.scratch_bytes(3));
                assert_no_allocation("a nest", &|| {
                    // SAFETY: buffers of the accesses' lengths.
                    unsafe { kernel.run(&bases, RunScalars::default(), &pool, scratch) }.unwrap();
                });
            }
        }

        let (m, n, k) = (200, 300, 400);
        let dims = [m, n];
        let precisions = [Precision::F32, Precision::Bf16x3];
        for (plain, precision) in precisions.into_iter().flat_map(|p| [(true, p), (false, p)]) {
            let mut b = Builder::new();
            let product = b.load(0, Type::F32);
            let result = if plain { product } else { b.unary(UnaryOp::Tanh, product) };
            let desc = GemmDesc {
                k,
                a: Access::contiguous(DType::F32, &[m, k]),
                b: Access::contiguous(DType::F32, &[k, n]),
                quantized: None,
                zero_points: [None, None],
                rounded_to: [None; 2],
                products: Products { precision, unit: Bf16Unit::detect(isa) },
                epilogue: Nest {
                    dims: dims.into_iter().collect(),
                    inner: 0,
                    segments: None,
                    loads: vec![Load::Accumulator(DType::F32)],
                    expr: b.finish(&[result]),
                    reductions: Vec::new(),
                    stores: vec![Access::contiguous(DType::F32, &dims)],
                },
            };
            let kernel = GemmKernel::new(&desc, isa).unwrap();
            let (mut x, mut y, mut z) = (vec![0.1f32; m * k], vec![0.1f32; k * n], vec![0.0f32; m * n]);
            let bases = [x.as_mut_ptr().cast(), y.as_mut_ptr().cast(), z.as_mut_ptr().cast()];
            let scratch = memory(kernel.scratch_bytes(3));
            assert_no_allocation("a product", &|| {
                // SAFETY: buffers of the accesses' lengths.
                unsafe { kernel.run(&bases, RunScalars::default(), &pool, scratch) }.unwrap();
            });
        }

        let desc = ScatterDesc {
            outer: 2,
            size: 10,
            count: 100,
            inner: 500,
            dtype: DType::F32,
            index: DType::I64,
            overwrites: false,
        };
        let kernel = ScatterKernel::new(desc, isa).unwrap();
        let out = vec![0.0f32; 2 * 10 * 500];
        let (indices, src) = (vec![3i64; 100], vec![1.0f32; 2 * 100 * 500]);
        let at = out.as_ptr() as usize;
        assert_no_allocation("a scatter", &|| {
            let (indices, src) = (indices.as_ptr().cast(), src.as_ptr().cast());
            // SAFETY: buffers of the description's shapes; no other code reads `out` during the run.
            unsafe { kernel.run(at as *mut u8, indices, src, &pool) };
        });

        for (pass, index) in [
            (WindowPass::Max, Some((IndexKind::Element, DType::I64))),
            (WindowPass::Max, Some((IndexKind::Cell, DType::U8))),
            (WindowPass::MaxGradient, Some((IndexKind::Element, DType::I64))),
            (WindowPass::MaxGradient, Some((IndexKind::Cell, DType::U8))),
            (WindowPass::Sum, None),
            (WindowPass::SumGradient, None),
        ] {
            let axis =
                SlidingAxis { input: 40, output: 20, kernel: 3, stride: 2, dilation: 1, padding_before: 1 };
            for dtype in [DType::F32, DType::F16, DType::I8] {
                let shape = WindowShape { pass, planes: 30, axes: [axis; 2].into_iter().collect() };
                let [source, target] = shape.operands().map(|elements| vec![0u8; elements * dtype.size()]);
                let positions = vec![0i64; 30 * 20 * 20];
                let kernel = WindowKernel::new(&WindowDesc { shape, dtype, index }, isa).unwrap();
                let scratch = memory(kernel.scratch_bytes(3));
                let (index, target) = (positions.as_ptr() as usize, target.as_ptr() as usize);
                assert_no_allocation("a pooling", &|| {
                    // SAFETY: buffers of the description's shapes; no other code reads the written buffers during the
                    // run.
                    unsafe {
                        kernel.run(source.as_ptr(), index as *mut u8, target as *mut u8, &pool, scratch);
                    };
                });
            }
        }
    }
}
