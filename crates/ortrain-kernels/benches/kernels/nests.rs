//! Cases of maps, reductions and scatter-add.

use ortrain_expr::{
    Access, BinaryOp, Builder, CompareOp, DType, Inst, Load, Nest, Precision, ReduceOp, Reduction, Reg,
    Scalar, Segments, Type, UnaryOp,
};
use ortrain_kernels::{NestKernel, ScatterDesc, ScatterKernel};

use crate::case::{Buffers, Case, SCALARS};

const F32: DType = DType::F32;

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for elements in [1 << 10, 1 << 15, 1 << 20, 1 << 23] {
        cases.push(map("add", elements, 2, 1.0, |b, x| vec![b.add(x[0], x[1])], 1));
    }
    for elements in [1 << 15, 1 << 20] {
        cases.push(map("gelu of a sum", elements, 2, 40.0, gelu, 1));
        for (name, op) in [
            ("exp", UnaryOp::Exp),
            ("log", UnaryOp::Log),
            ("tanh", UnaryOp::Tanh),
            ("sigmoid", UnaryOp::Sigmoid),
            ("erf", UnaryOp::Erf),
            ("sqrt", UnaryOp::Sqrt),
        ] {
            cases.push(map(name, elements, 1, 20.0, move |b, x| vec![b.unary(op, x[0])], 1));
        }
    }
    cases.push(dropout(&[1 << 20]));
    cases.push(dropout(&[8, 128, 1000]));
    for elements in [1 << 19, 1 << 23] {
        cases.push(packing(elements));
        cases.push(unpacking(elements));
    }
    for elements in [400_000, 25_000_000] {
        cases.push(adamw(elements));
    }
    let model = tensors_of_a_model(25_000_000);
    cases.push(adamw_of_segments(&model));
    cases.push(norms_of_segments(&model));
    let tiny: Vec<usize> = (0..2000).map(|k| 1 + k * 7 % 64).collect();
    cases.push(adamw(2000 * 64));
    cases.push(adamw_of_segments(&tiny));
    cases.push(norms_of_segments(&tiny));
    // The last shape is the attention of bert_mini: rows of all heads.
    for dims in [[64, 10], [1024, 1024], [4096, 128]] {
        cases.push(softmax(dims));
        cases.push(sum("row sums", dims, 1));
        cases.push(sum("column sums", dims, 0));
    }
    // Gradients of biases, in the second-level cache and beyond it.
    for dims in [[64, 512], [1024, 256], [8192, 1024]] {
        cases.push(sum("column sums", dims, 0));
    }
    // Statistics of the channels of images, as in BatchNormalization.
    cases.push(channels([8, 96, 24 * 24]));
    cases.push(channels([4, 64, 56 * 56]));
    cases.push(lstm_gates(16, 256));
    cases.push(gates_gradient(16, 256));
    for dims in [[1024, 256], [512, 500], [2000, 1000]] {
        cases.push(transposed(dims));
    }
    cases.push(scatter([1, 30_000, 1024, 768]));
    cases.push(scatter([64, 1000, 64, 1]));
    // Gradients of the tables of bert_mini, bert_base and gpt2_small6.
    cases.push(scatter([1, 8192, 1024, 256]));
    cases.push(scatter([1, 30_522, 256, 768]));
    cases.push(scatter([1, 8000, 1024, 384]));
    cases
}

/// Copies a matrix to its transpose.
fn transposed([rows, columns]: [usize; 2]) -> Case {
    let mut b = Builder::new();
    let x = b.load(0, Type::F32);
    let load = Access::contiguous(F32, &[rows, columns]);
    let store = Access { strides: [1, rows as isize].into_iter().collect(), ..load.clone() };
    let nest = Nest {
        dims: [rows, columns].into_iter().collect(),
        inner: 0,
        segments: None,
        loads: vec![Load::Buffer(load)],
        expr: b.finish(&[x]),
        reductions: Vec::new(),
        stores: vec![store],
    };
    case(format!("map transpose {rows}x{columns}"), 0.0, nest, false)
}

/// Returns the case of a nest; with `in_place` its stores overwrite its first loads.
pub(crate) fn case(name: String, flops: f64, nest: Nest, in_place: bool) -> Case {
    let sizes: Vec<usize> = nest.operands().map(|a| a.len * a.dtype.size()).collect();
    Case {
        name,
        flops,
        rate: 1.0,
        precision: Precision::F32,
        bytes: sizes.iter().sum::<usize>() as f64,
        compile: Box::new(move |isa, threads| {
            let kernel = NestKernel::new(&nest, isa).expect("valid nest");
            let loads = nest.loads.len();
            let mut sizes = sizes.clone();
            if in_place {
                sizes.truncate(loads);
            }
            let mut buffers = Buffers::new(&sizes, kernel.scratch_bytes(threads));
            let stores = nest.stores.len();
            Box::new(move |pool| {
                let mut bases = buffers.bases();
                if in_place {
                    bases.extend_from_within(..stores);
                }
                // SAFETY: buffers have the lengths of the accesses, and belong to this case.
                unsafe { kernel.run(&bases, SCALARS, pool, buffers.scratch()) }.expect("no guards");
            })
        }),
    }
}

/// Returns the case of an element-wise function; `work` is its arithmetic per element. Several results update the first
/// loads.
fn map(
    name: &str,
    elements: usize,
    loads: usize,
    work: f64,
    build: impl FnOnce(&mut Builder, &[Reg]) -> Vec<Reg>,
    stores: usize,
) -> Case {
    let mut b = Builder::new();
    let x: Vec<Reg> = (0..loads).map(|slot| b.load(slot, Type::F32)).collect();
    let outputs = build(&mut b, &x);
    let plane = Access::contiguous(F32, &[elements]);
    let nest = Nest {
        dims: [elements].into_iter().collect(),
        inner: 0,
        segments: None,
        loads: vec![Load::Buffer(plane.clone()); loads],
        expr: b.finish(&outputs),
        reductions: Vec::new(),
        stores: vec![plane; stores],
    };
    case(format!("map {name} {elements}"), work * elements as f64, nest, stores > 1)
}

/// Drops half of the elements, by random bits of the element's number, as `Dropout` does.
fn dropout(dims: &[usize]) -> Case {
    let mut b = Builder::new();
    let index = b.element_number(dims);
    let index = b.convert(index, Type::U64);
    let [key, stream] = [7, 8].map(|value| b.push(Inst::Const(Scalar::U64(value)), Type::U64));
    let bits = b.push(Inst::Random(key, stream, index), Type::U32);
    let low = b.constant(Type::U32, 256.0);
    let upper = b.div(bits, low);
    let float_value = b.convert(upper, Type::F32);
    let unit = b.constant(Type::F32, 1.0 / 16_777_216.0);
    let uniform = b.mul(float_value, unit);
    let [half, two, zero] = [0.5, 2.0, 0.0].map(|value| b.constant(Type::F32, value));
    let keep_mask = b.compare(CompareOp::Le, half, uniform);
    let x = b.load(0, Type::F32);
    let scaled = b.mul(x, two);
    let y = b.select(keep_mask, scaled, zero);
    let sizes: Vec<String> = dims.iter().map(ToString::to_string).collect();
    let nest = Nest {
        dims: dims.iter().copied().collect(),
        inner: 0,
        segments: None,
        loads: vec![Load::Buffer(Access::contiguous(DType::F32, dims))],
        expr: b.finish(&[y]),
        reductions: Vec::new(),
        stores: vec![Access::contiguous(DType::F32, dims)],
    };
    let flops = 20.0 * dims.iter().product::<usize>() as f64;
    case(format!("nest dropout {}", sizes.join("x")), flops, nest, false)
}

/// Packs a mask into bits, as programs save it for gradients: eight planes of booleans become one plane of bytes.
fn packing(elements: usize) -> Case {
    let mut b = Builder::new();
    let zero = b.constant(Type::F32, 0.0);
    let byte = (0..8).fold(zero, |sum, bit| {
        let (truth, value) = (b.load(bit, Type::Bool), b.constant(Type::F32, f64::from(1u8 << bit)));
        let value = b.select(truth, value, zero);
        b.add(sum, value)
    });
    let byte = b.convert(byte, Type::I32);
    let nest = Nest {
        dims: [elements / 8].into_iter().collect(),
        inner: 0,
        segments: None,
        loads: vec![Load::Buffer(Access::contiguous(DType::Bool, &[elements / 8])); 8],
        expr: b.finish(&[byte]),
        reductions: Vec::new(),
        stores: vec![Access::contiguous(DType::U8, &[elements / 8])],
    };
    case(format!("mask to bits {elements}"), 0.0, nest, false)
}

/// Unpacks bits into a mask.
fn unpacking(elements: usize) -> Case {
    let mut b = Builder::new();
    let (zero, mut rest) = (b.constant(Type::F32, 0.0), b.load(0, Type::F32));
    let mut truths = Vec::new();
    for bit in (0..8).rev() {
        let value = b.constant(Type::F32, f64::from(1u8 << bit));
        let truth = b.compare(CompareOp::Le, value, rest);
        let value = b.select(truth, value, zero);
        rest = b.sub(rest, value);
        truths.push(truth);
    }
    let nest = Nest {
        dims: [elements / 8].into_iter().collect(),
        inner: 0,
        segments: None,
        loads: vec![Load::Buffer(Access::contiguous(DType::U8, &[elements / 8]))],
        expr: b.finish(&truths),
        reductions: Vec::new(),
        stores: vec![Access::contiguous(DType::Bool, &[elements / 8]); 8],
    };
    case(format!("mask of bits {elements}"), 0.0, nest, false)
}

fn gelu(b: &mut Builder, x: &[Reg]) -> Vec<Reg> {
    let x = b.add(x[0], x[1]);
    let half = b.constant(Type::F32, 0.5);
    let (scale, one) = (b.constant(Type::F32, std::f64::consts::FRAC_1_SQRT_2), b.constant(Type::F32, 1.0));
    let scaled = b.mul(x, scale);
    let erf = b.unary(UnaryOp::Erf, scaled);
    let sum = b.add(erf, one);
    let halved = b.mul(x, half);
    vec![b.mul(halved, sum)]
}

/// Updates a parameter and two moments in place from a gradient.
fn adamw(elements: usize) -> Case {
    let build = |b: &mut Builder, x: &[Reg]| {
        let [p, m, v, g] = [x[0], x[1], x[2], x[3]];
        let mut constant = |value: f64| b.constant(Type::F32, value);
        let (beta1, rest1, beta2, rest2) = (constant(0.9), constant(0.1), constant(0.999), constant(0.001));
        let (rate, epsilon, decay) = (constant(1e-3), constant(1e-8), constant(1.0 - 1e-5));
        let (m, g1) = (b.mul(m, beta1), b.mul(g, rest1));
        let m = b.add(m, g1);
        let square = b.mul(g, g);
        let (v, g2) = (b.mul(v, beta2), b.mul(square, rest2));
        let v = b.add(v, g2);
        let root = b.unary(UnaryOp::Sqrt, v);
        let root = b.add(root, epsilon);
        let step = b.div(m, root);
        let step = b.mul(step, rate);
        let decayed = b.mul(p, decay);
        vec![b.sub(decayed, step), m, v]
    };
    map("AdamW", elements, 4, 14.0, build, 3)
}

/// Returns the lengths of 161 tensors that fill a plane, similar to a network for images: two of three are small.
fn tensors_of_a_model(elements: usize) -> Vec<usize> {
    const SMALL: [usize; 6] = [64, 128, 256, 512, 1024, 2048];
    const LARGE: [usize; 9] = [4096, 16_384, 36_864, 65_536, 147_456, 262_144, 589_824, 1_048_576, 2_359_296];
    let is_small = |k: usize| !k.is_multiple_of(3);
    let length = |k: usize| if is_small(k) { SMALL[k / 27 % 6] } else { LARGE[k / 3 * 2 % 9] };
    let sum = |small: bool| (0..161).filter(|&k| is_small(k) == small).map(length).sum::<usize>();
    let (small, large) = (sum(true), sum(false));
    let scaled = |k: usize| {
        let length = length(k);
        if is_small(k) { length } else { (elements - small) * (length / 64) / large * 64 }
    };
    let mut lengths: Vec<usize> = (0..161).map(scaled).collect();
    let rest = elements - lengths.iter().sum::<usize>();
    lengths[159] += rest;
    lengths
}

/// Returns segments of these lengths, each at a multiple of 256 bytes, and the length of their plane.
fn segments_of(lengths: &[usize]) -> (Segments, usize) {
    let mut end = 0;
    let segments = Segments::new(lengths.iter().map(|&length| {
        let start = end;
        end = (start + length).next_multiple_of(64);
        start..start + length
    }));
    (segments, end)
}

/// [`adamw`] with eight settings for each tensor, some of them with powers.
fn adamw_of_segments(lengths: &[usize]) -> Case {
    let (segments, len) = segments_of(lengths);
    let count = segments.len();
    let plane = Access { dtype: F32, offset: 0, strides: [0, 1].into_iter().collect(), len };
    let setting = |k: usize| Access {
        offset: k,
        strides: [8, 0].into_iter().collect(),
        len: 8 * count,
        ..plane.clone()
    };
    let mut b = Builder::new();
    let [p, m, v, g] = [0, 1, 2, 3].map(|slot| b.load(slot, Type::F32));
    let [rate, beta1, beta2, epsilon, decay, step, scale, more] =
        [4, 5, 6, 7, 8, 9, 10, 11].map(|slot| b.load(slot, Type::F32));
    let one = b.constant(Type::F32, 1.0);
    let (rest1, rest2) = (b.sub(one, beta1), b.sub(one, beta2));
    let [correction1, correction2] = [beta1, beta2].map(|beta| {
        let power = b.binary(BinaryOp::Pow, beta, step);
        b.sub(one, power)
    });
    let correction2 = b.unary(UnaryOp::Sqrt, correction2);
    let rate = b.mul(rate, scale);
    let decay = b.mul(decay, rate);
    let decay = b.sub(more, decay);
    let rate = b.mul(rate, correction2);
    let rate = b.div(rate, correction1);
    let (m, g1) = (b.mul(m, beta1), b.mul(g, rest1));
    let m = b.add(m, g1);
    let square = b.mul(g, g);
    let (v, g2) = (b.mul(v, beta2), b.mul(square, rest2));
    let v = b.add(v, g2);
    let root = b.unary(UnaryOp::Sqrt, v);
    let root = b.add(root, epsilon);
    let step = b.div(m, root);
    let step = b.mul(step, rate);
    let decayed = b.mul(p, decay);
    let p = b.sub(decayed, step);
    let nest = Nest {
        dims: [count, len].into_iter().collect(),
        inner: 0,
        segments: Some(segments),
        loads: (0..4).map(|_| plane.clone()).chain((0..8).map(setting)).map(Load::Buffer).collect(),
        expr: b.finish(&[p, m, v]),
        reductions: Vec::new(),
        stores: vec![plane; 3],
    };
    let elements = lengths.iter().sum::<usize>() as f64;
    let case = case(format!("map AdamW {count} segments of {len}"), 14.0 * elements, nest, true);
    Case { bytes: 7.0 * 4.0 * elements, ..case }
}

/// Sums of squares of two planes for each tensor.
fn norms_of_segments(lengths: &[usize]) -> Case {
    let (segments, len) = segments_of(lengths);
    let count = segments.len();
    let access = |strides: [isize; 2], offset: usize, len: usize| Access {
        dtype: F32,
        offset,
        strides: strides.into_iter().collect(),
        len,
    };
    let mut b = Builder::new();
    let squares = [0, 1].map(|slot| {
        let x = b.load(slot, Type::F32);
        b.mul(x, x)
    });
    let sums = [0, 1].map(|k| b.reduced(k, Type::F32));
    let (expr, values) = b.finish_keeping(&sums, &squares);
    let nest = Nest {
        dims: [count, len].into_iter().collect(),
        inner: 1,
        segments: Some(segments),
        loads: vec![Load::Buffer(access([0, 1], 0, len)); 2],
        expr,
        reductions: values.into_iter().map(|value| Reduction { op: ReduceOp::Sum, value }).collect(),
        stores: vec![access([2, 0], 0, 2 * count), access([2, 0], 1, 2 * count)],
    };
    let elements = lengths.iter().sum::<usize>() as f64;
    let case = case(format!("rows squares {count} segments of {len}"), 4.0 * elements, nest, false);
    Case { bytes: 2.0 * 4.0 * elements, ..case }
}

/// Returns the access to columns of a matrix `wide` elements wide, from column `first` on.
fn columns(rows: usize, wide: usize, first: usize) -> Access {
    let strides = [wide as isize, 1].into_iter().collect();
    Access { dtype: F32, offset: first, strides, len: rows * wide }
}

/// Step of an LSTM after its products: gates of data, state and bias, the new cell, and the new state.
fn lstm_gates(batch: usize, width: usize) -> Case {
    let dims = [batch, width];
    let mut b = Builder::new();
    let mut loads = Vec::new();
    let mut load = |b: &mut Builder, access: Access| {
        loads.push(Load::Buffer(access));
        b.load(loads.len() - 1, Type::F32)
    };
    let mut gate = |b: &mut Builder, k: usize, op: UnaryOp| {
        let [data, state] = [0; 2].map(|_| load(b, columns(batch, 4 * width, k * width)));
        let mut bias = Access::broadcast(F32, &[width], &dims);
        (bias.offset, bias.len) = (k * width, 4 * width);
        let bias = load(b, bias);
        let sum = b.add(data, bias);
        let sum = b.add(sum, state);
        b.unary(op, sum)
    };
    let (i, f) = (gate(&mut b, 0, UnaryOp::Sigmoid), gate(&mut b, 2, UnaryOp::Sigmoid));
    let (g, o) = (gate(&mut b, 3, UnaryOp::Tanh), gate(&mut b, 1, UnaryOp::Sigmoid));
    let before = load(&mut b, Access::contiguous(F32, &dims));
    let (old, new) = (b.mul(f, before), b.mul(i, g));
    let cell = b.add(old, new);
    let activated = b.unary(UnaryOp::Tanh, cell);
    let state = b.mul(o, activated);
    let mut stores = vec![Access::contiguous(F32, &dims); 2];
    stores.extend([0, 1, 2, 3].map(|k| columns(batch, 4 * width, k * width)));
    let expr = b.finish(&[state, cell, i, o, f, g]);
    let nest = Nest {
        dims: dims.into_iter().collect(),
        inner: 0,
        segments: None,
        loads,
        expr,
        reductions: Vec::new(),
        stores,
    };
    let name = format!("nest lstm gates {batch}x{width}");
    case(name, 113.0 * (batch * width) as f64, nest, false)
}

/// Gradient of [`gates`].
fn gates_gradient(batch: usize, width: usize) -> Case {
    let dims = [batch, width];
    let mut b = Builder::new();
    let mut loads = vec![Load::Buffer(Access::contiguous(F32, &dims)); 4];
    let [of_cell, of_state, cell, last] = [0, 1, 2, 3].map(|k| b.load(k, Type::F32));
    loads.extend([0, 1, 2, 3].map(|k| Load::Buffer(columns(batch, 4 * width, k * width))));
    let [i, o, f, g] = [4, 5, 6, 7].map(|k| b.load(k, Type::F32));
    let one = b.constant(Type::F32, 1.0);
    let of_sigmoid = |b: &mut Builder, value, y| {
        let rest = b.sub(one, y);
        let slope = b.mul(y, rest);
        b.mul(value, slope)
    };
    let of_tanh = |b: &mut Builder, value, y| {
        let square = b.mul(y, y);
        let slope = b.sub(one, square);
        b.mul(value, slope)
    };
    let activated = b.unary(UnaryOp::Tanh, cell);
    let of_o = b.mul(of_state, activated);
    let of_o = of_sigmoid(&mut b, of_o, o);
    let through = b.mul(of_state, o);
    let through = of_tanh(&mut b, through, activated);
    let of_new = b.add(of_cell, through);
    let of_g = b.mul(of_new, i);
    let of_g = of_tanh(&mut b, of_g, g);
    let of_f = b.mul(of_new, last);
    let of_f = of_sigmoid(&mut b, of_f, f);
    let of_i = b.mul(of_new, g);
    let of_i = of_sigmoid(&mut b, of_i, i);
    let of_last = b.mul(of_new, f);
    // Rows of the gradients have a gap after them.
    let mut stores = [0, 1, 2, 3].map(|k| columns(batch, 4 * width + 16, k * width)).to_vec();
    stores.push(Access::contiguous(F32, &dims));
    let expr = b.finish(&[of_i, of_o, of_f, of_g, of_last]);
    let nest = Nest {
        dims: dims.into_iter().collect(),
        inner: 0,
        segments: None,
        loads,
        expr,
        reductions: Vec::new(),
        stores,
    };
    let name = format!("nest lstm gates, back {batch}x{width}");
    case(name, 42.0 * (batch * width) as f64, nest, false)
}

fn softmax(dims: [usize; 2]) -> Case {
    let mut b = Builder::new();
    let x = b.load(0, Type::F32);
    let maximum = b.reduced(0, Type::F32);
    let shifted = b.sub(x, maximum);
    let e = b.unary(UnaryOp::Exp, shifted);
    let total = b.reduced(1, Type::F32);
    let result = b.div(e, total);
    let (expr, values) = b.finish_keeping(&[result], &[x, e]);
    let plane = Access::contiguous(F32, &dims);
    let nest = Nest {
        dims: dims.into_iter().collect(),
        inner: 1,
        segments: None,
        loads: vec![Load::Buffer(plane.clone())],
        expr,
        reductions: vec![
            Reduction { op: ReduceOp::Max, value: values[0] },
            Reduction { op: ReduceOp::Sum, value: values[1] },
        ],
        stores: vec![plane],
    };
    case(format!("nest softmax {}x{}", dims[0], dims[1]), 24.0 * (dims[0] * dims[1]) as f64, nest, false)
}

/// Sums over one axis of a matrix.
fn sum(name: &str, dims: [usize; 2], axis: usize) -> Case {
    let other_axis = 1 - axis;
    let mut load = Access::contiguous(F32, &dims);
    load.strides = [load.strides[other_axis], load.strides[axis]].into_iter().collect();
    let nest = sums(&[dims[other_axis], dims[axis]], 1, load, &[ReduceOp::Sum]);
    case(format!("nest {name} {}x{}", dims[0], dims[1]), (dims[0] * dims[1]) as f64, nest, false)
}

/// Sums and sums of squares of the channels of a batch of images.
fn channels(dims: [usize; 3]) -> Case {
    let [batch, channels, size] = dims;
    let mut load = Access::contiguous(F32, &dims);
    load.strides = [load.strides[1], load.strides[0], load.strides[2]].into_iter().collect();
    let nest = sums(&[channels, batch, size], 2, load, &[ReduceOp::Sum, ReduceOp::Sum]);
    let name = format!("nest channel statistics {batch}x{channels}x{size}");
    case(name, 3.0 * (batch * channels * size) as f64, nest, false)
}

/// Returns a nest of sums, and with two operations also of sums of squares, over the last `inner` axes.
fn sums(dims: &[usize], inner: usize, load: Access, ops: &[ReduceOp]) -> Nest {
    let mut b = Builder::new();
    let x = b.load(0, Type::F32);
    let square = b.binary(BinaryOp::Mul, x, x);
    let values = [x, square];
    let outputs: Vec<Reg> = (0..ops.len()).map(|k| b.reduced(k, Type::F32)).collect();
    let (expr, values) = b.finish_keeping(&outputs, &values[..ops.len()]);
    let outer_rank = dims.len() - inner;
    let mut store = Access::contiguous(F32, &dims[..outer_rank]);
    store.strides.extend(std::iter::repeat_n(0, inner));
    Nest {
        dims: dims.iter().copied().collect(),
        inner,
        segments: None,
        loads: vec![Load::Buffer(load)],
        expr,
        reductions: ops.iter().zip(values).map(|(&op, value)| Reduction { op, value }).collect(),
        stores: vec![store; ops.len()],
    }
}

fn scatter([outer, size, count, inner]: [usize; 4]) -> Case {
    let desc = ScatterDesc { outer, size, count, inner, dtype: F32, index: DType::I64, overwrites: false };
    let elements = outer * count * inner;
    Case {
        name: format!("scatter {outer}x{count}x{inner} into {size}"),
        flops: elements as f64,
        rate: 1.0,
        precision: Precision::F32,
        bytes: (3 * elements * F32.size() + count * 8) as f64,
        compile: Box::new(move |isa, _| {
            let kernel = ScatterKernel::new(desc, isa).expect("valid description");
            let mut buffers = Buffers::new(&[outer * size * inner * 4, elements * 4], 0);
            let mut indices: Vec<i64> = (0..count).map(|j| ((j * 7919) % size) as i64).collect();
            Box::new(move |pool| {
                let bases = buffers.bases();
                // SAFETY: buffers have the lengths of the description, and belong to this case.
                unsafe { kernel.run(bases[0], indices.as_mut_ptr().cast(), bases[1], pool) };
            })
        }),
    }
}
