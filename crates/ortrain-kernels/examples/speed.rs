#![allow(clippy::print_stdout, clippy::unwrap_used)]
use ortrain_expr::*;
use ortrain_kernels::*;
use std::time::Instant;
fn time(mut f: impl FnMut()) -> f64 {
    f();
    let mut best = f64::MAX;
    let start = Instant::now();
    while start.elapsed().as_secs_f64() < 0.3 {
        let t = Instant::now();
        f();
        best = best.min(t.elapsed().as_secs_f64());
    }
    best
}
fn mem(bytes: usize) -> Scratch {
    let l = std::alloc::Layout::from_size_align(bytes.max(64), 64).unwrap();
    Scratch::new(unsafe { std::alloc::alloc(l) }, bytes)
}
fn gemm(isa: Isa, pool: &Pool, m: usize, n: usize, k: usize, ta: bool, tb: bool, relu: bool) {
    let mut b = Builder::new();
    let p = b.load(0, Type::F32);
    let z = b.constant(Type::F32, 0.0);
    let out = if relu { b.binary(BinaryOp::Max, p, z) } else { p };
    let dims = [m, n];
    let mut a = Access::contiguous(DType::F32, &[m, k]);
    if ta {
        a.strides = [1, m as isize].into_iter().collect();
    }
    let mut bb = Access::contiguous(DType::F32, &[k, n]);
    if tb {
        bb.strides = [1, k as isize].into_iter().collect();
    }
    let desc = GemmDesc {
        k,
        a,
        b: bb,
        epilogue: Nest {
            dims: dims.into_iter().collect(),
            inner: 0,
            loads: vec![Access::contiguous(DType::F32, &dims)],
            expr: b.finish(&[out]),
            reductions: vec![],
            stores: vec![Access::contiguous(DType::F32, &dims)],
        },
    };
    let kernel = GemmKernel::new(&desc, isa).unwrap();
    let s = mem(kernel.scratch_bytes(pool.num_threads()));
    let (mut x, mut y, mut c) = (vec![0.1f32; m * k], vec![0.1f32; k * n], vec![0f32; m * n]);
    let bases = [x.as_mut_ptr().cast(), y.as_mut_ptr().cast(), c.as_mut_ptr().cast()];
    let t = time(|| unsafe { kernel.run(&bases, RunScalars::default(), pool, s).unwrap() });
    println!(
        "gemm {isa} t{} {m}x{n}x{k} {}{}{}: {:.1} us {:.1} GF/s",
        pool.num_threads(),
        if ta { 'T' } else { 'N' },
        if tb { 'T' } else { 'N' },
        if relu { " relu" } else { "" },
        t * 1e6,
        2.0 * (m * n * k) as f64 / t / 1e9
    );
}
fn nest(name: &str, nest: &Nest, isa: Isa, pool: &Pool, elements: usize) {
    let kernel = NestKernel::new(nest, isa).unwrap();
    let s = mem(kernel.scratch_bytes(pool.num_threads()));
    let mut bufs: Vec<Vec<u8>> = nest
        .loads
        .iter()
        .chain(&nest.stores)
        .map(|a| {
            let mut v = vec![0u8; a.len * a.dtype.size()];
            if a.dtype == DType::F32 {
                for c in v.chunks_exact_mut(4) {
                    c.copy_from_slice(&0.3f32.to_le_bytes());
                }
            }
            v
        })
        .collect();
    let bases: Vec<*mut u8> = bufs.iter_mut().map(|b| b.as_mut_ptr()).collect();
    let t = time(|| unsafe { kernel.run(&bases, RunScalars::default(), pool, s).unwrap() });
    println!(
        "{name} {isa} t{} {:?}: {:.2} us, {:.3} ns/el",
        pool.num_threads(),
        kernel.order(),
        t * 1e6,
        t * 1e9 / elements as f64
    );
}
fn map(n: usize, f: impl Fn(&mut Builder, Reg) -> Reg) -> Nest {
    let mut b = Builder::new();
    let x = b.load(0, Type::F32);
    let y = f(&mut b, x);
    let a = Access::contiguous(DType::F32, &[n]);
    Nest {
        dims: [n].into_iter().collect(),
        inner: 0,
        loads: vec![a.clone()],
        expr: b.finish(&[y]),
        reductions: vec![],
        stores: vec![a],
    }
}
fn softmax(outer: usize, inner: usize) -> Nest {
    let mut b = Builder::new();
    let x = b.load(0, Type::F32);
    let m = b.reduced(0, Type::F32);
    let d = b.sub(x, m);
    let e = b.unary(UnaryOp::Exp, d);
    let s = b.reduced(1, Type::F32);
    let y = b.div(e, s);
    let (expr, v) = b.finish_keeping(&[y], &[x, e]);
    let a = Access::contiguous(DType::F32, &[outer, inner]);
    Nest {
        dims: [outer, inner].into_iter().collect(),
        inner: 1,
        loads: vec![a.clone()],
        expr,
        reductions: vec![
            Reduction { op: ReduceOp::Max, value: v[0] },
            Reduction { op: ReduceOp::Sum, value: v[1] },
        ],
        stores: vec![a],
    }
}
fn sum(dims: &[usize], lead: bool) -> Nest {
    let mut b = Builder::new();
    let x = b.load(0, Type::F32);
    let s = b.reduced(0, Type::F32);
    let (expr, v) = b.finish_keeping(&[s], &[x]);
    let (o, i) = (dims[0], dims[1]);
    let a = if lead {
        Access { dtype: DType::F32, offset: 0, strides: [1, o as isize].into_iter().collect(), len: o * i }
    } else {
        Access::contiguous(DType::F32, dims)
    };
    let st = Access { dtype: DType::F32, offset: 0, strides: [1, 0].into_iter().collect(), len: o };
    Nest {
        dims: dims.iter().copied().collect(),
        inner: 1,
        loads: vec![a],
        expr,
        reductions: vec![Reduction { op: ReduceOp::Sum, value: v[0] }],
        stores: vec![st],
    }
}
fn main() {
    let filter = std::env::args().nth(1).unwrap_or_default();
    for threads in [1, 2] {
        let pool = Pool::new(threads);
        for isa in Isa::available() {
            if filter.is_empty() || filter == "gemm" {
                for (m, n, k) in [
                    (1024, 1024, 1024),
                    (64, 512, 784),
                    (64, 10, 512),
                    (128, 128, 128),
                    (1, 1024, 1024),
                    (8, 1024, 1024),
                    (512, 784, 64),
                    (2048, 64, 64),
                    (32, 32, 32),
                ] {
                    for (ta, tb) in [(false, false), (false, true), (true, false)] {
                        gemm(isa, &pool, m, n, k, ta, tb, false);
                    }
                }
                gemm(isa, &pool, 64, 512, 784, false, true, true);
                gemm(isa, &pool, 1024, 1024, 64, false, true, true);
                gemm(isa, &pool, 1024, 1024, 64, false, true, false);
            }
            if filter.is_empty() || filter == "nest" {
                for n in [10, 1000, 100_000, 4_000_000] {
                    nest(
                        &format!("relu {n}"),
                        &map(n, |b, x| {
                            let z = b.constant(Type::F32, 0.0);
                            b.binary(BinaryOp::Max, x, z)
                        }),
                        isa,
                        &pool,
                        n,
                    );
                }
                for op in [
                    UnaryOp::Exp,
                    UnaryOp::Log,
                    UnaryOp::Tanh,
                    UnaryOp::Sigmoid,
                    UnaryOp::Erf,
                    UnaryOp::Sqrt,
                    UnaryOp::Floor,
                ] {
                    nest(&format!("{op:?}"), &map(100_000, |b, x| b.unary(op, x)), isa, &pool, 100_000);
                }
                nest("pow", &map(100_000, |b, x| b.binary(BinaryOp::Pow, x, x)), isa, &pool, 100_000);
                for (o, i) in [(64, 10), (4096, 10), (4096, 20), (1024, 100), (1024, 1000), (128, 10_000)] {
                    nest(&format!("softmax {o}x{i}"), &softmax(o, i), isa, &pool, o * i);
                }
                for (o, i) in [(1, 10_000_000), (1000, 1000), (64, 10)] {
                    nest(&format!("row sum {o}x{i}"), &sum(&[o, i], false), isa, &pool, o * i);
                }
                for (o, i) in [(512, 64), (10, 64), (1000, 1000), (64, 100_000)] {
                    nest(&format!("col sum {o}x{i}"), &sum(&[o, i], true), isa, &pool, o * i);
                }
            }
        }
    }
}
