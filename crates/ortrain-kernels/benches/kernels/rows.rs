//! Cases with reductions along rows or channels: norms and their gradients, cross-entropy; and gathered rows.

use ortrain_expr::{
    Access, BinaryOp, Builder, CompareOp, DType, Load, Nest, ReduceOp, Reduction, Reg, Type, UnaryOp,
};

use crate::case::Case;
use crate::nests;

const F32: DType = DType::F32;

pub(crate) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    // bert_mini, bert_base and gpt2_small6: tokens of all sequences, width.
    for dims in [[1024, 256], [256, 768], [1024, 384]] {
        cases.push(layer_norm(dims));
        cases.push(layer_norm_gradient(dims));
        cases.push(layer_norm_weights(dims));
    }
    // mobilenetv2_96, mobilenetv2_224 and resnet18_224: batch, channels, positions.
    for dims in [[8, 96, 576], [4, 96, 12_544], [4, 64, 12_544], [4, 960, 49]] {
        cases.push(batch_norm(dims));
        cases.push(batch_norm_sums(dims));
        cases.push(batch_norm_gradient(dims));
    }
    // The complete operation, as in programs: images of mobilenetv2_96 from large to small.
    for dims in [[8, 96, 2304], [8, 144, 576], [8, 192, 144], [8, 576, 36], [8, 960, 9]] {
        cases.push(batch_norm_training(dims));
        cases.push(batch_norm_training_gradient(dims));
    }
    // mlp and gpt2_small6. The rows of the heads of bert_mini are among the cases of softmax.
    for dims in [[64, 10], [1024, 8000]] {
        cases.push(cross_entropy(dims));
        cases.push(cross_entropy_gradient(dims));
    }
    // Embeddings: indices, rows of the table, width.
    cases.push(gather([1024, 8192, 256]));
    cases.push(gather([256, 30_522, 768]));
    cases.push(gather([1024, 8000, 384]));
    cases
}

/// Builder of a nest. Loads are added where they are used.
struct Body {
    b: Builder,
    dims: Vec<usize>,
    loads: Vec<Access>,
    reductions: Vec<(ReduceOp, Reg)>,
}

impl Body {
    fn new(dims: &[usize]) -> Body {
        Body { b: Builder::new(), dims: dims.to_vec(), loads: Vec::new(), reductions: Vec::new() }
    }

    fn load(&mut self, access: Access) -> Reg {
        let ty = Type::of(access.dtype);
        self.loads.push(access);
        self.b.load(self.loads.len() - 1, ty)
    }

    /// Adds a load of all elements.
    fn load_plane(&mut self) -> Reg {
        let access = Access::contiguous(F32, &self.dims);
        self.load(access)
    }

    /// Adds a load with one element per position along some axes.
    fn load_along(&mut self, axes: &[usize], dtype: DType) -> Reg {
        let access = self.access_along(axes, dtype);
        self.load(access)
    }

    fn access_along(&self, axes: &[usize], dtype: DType) -> Access {
        let strides: Vec<usize> =
            (0..self.dims.len()).map(|axis| if axes.contains(&axis) { self.dims[axis] } else { 1 }).collect();
        Access::broadcast(dtype, &strides, &self.dims)
    }

    fn constant(&mut self, value: f64) -> Reg {
        self.b.constant(Type::F32, value)
    }

    fn reduce(&mut self, op: ReduceOp, value: Reg) -> Reg {
        self.reductions.push((op, value));
        self.b.reduced(self.reductions.len() - 1, Type::F32)
    }

    fn mean(&mut self, value: Reg, count: usize) -> Reg {
        let sum = self.reduce(ReduceOp::Sum, value);
        let part = self.constant(1.0 / count as f64);
        self.b.mul(sum, part)
    }

    /// Returns the finished case with `inner` reduced axes; `work` is its arithmetic per element.
    fn case(self, name: &str, work: f64, inner: usize, outputs: &[(Reg, Access)]) -> Case {
        let elements: usize = self.dims.iter().product();
        let results: Vec<Reg> = outputs.iter().map(|output| output.0).collect();
        let values: Vec<Reg> = self.reductions.iter().map(|reduction| reduction.1).collect();
        let (expr, values) = self.b.finish_keeping(&results, &values);
        let nest = Nest {
            inner,
            segments: None,
            loads: self.loads.into_iter().map(Load::Buffer).collect(),
            expr,
            reductions: self
                .reductions
                .iter()
                .zip(values)
                .map(|(&(op, _), value)| Reduction { op, value })
                .collect(),
            stores: outputs.iter().map(|output| output.1.clone()).collect(),
            dims: self.dims.into_iter().collect(),
        };
        nests::case(name.to_owned(), work * elements as f64, nest, false)
    }
}

/// Returns a name with sizes.
fn case_name(what: &str, dims: &[usize]) -> String {
    let sizes: Vec<String> = dims.iter().map(usize::to_string).collect();
    format!("nest {what} {}", sizes.join("x"))
}

fn layer_norm(dims: [usize; 2]) -> Case {
    let mut body = Body::new(&dims);
    let (x, scale, bias) = (body.load_plane(), body.load_along(&[1], F32), body.load_along(&[1], F32));
    let mean = body.mean(x, dims[1]);
    let distance = body.b.sub(x, mean);
    let square = body.b.mul(distance, distance);
    let variance = body.mean(square, dims[1]);
    let epsilon = body.constant(1e-5);
    let variance = body.b.add(variance, epsilon);
    let inverse = body.b.unary(UnaryOp::Rsqrt, variance);
    let normal = body.b.mul(distance, inverse);
    let scaled = body.b.mul(normal, scale);
    let y = body.b.add(scaled, bias);
    let plane = Access::contiguous(F32, &dims);
    body.case(&case_name("layer norm", &dims), 8.0, 1, &[(y, plane)])
}

/// Gradient of the input of the normalization.
fn layer_norm_gradient(dims: [usize; 2]) -> Case {
    let mut body = Body::new(&dims);
    let (x, dy, scale) = (body.load_plane(), body.load_plane(), body.load_along(&[1], F32));
    let (mean, inverse) = (body.load_along(&[0], F32), body.load_along(&[0], F32));
    let distance = body.b.sub(x, mean);
    let normal = body.b.mul(distance, inverse);
    let g = body.b.mul(dy, scale);
    let along = body.b.mul(g, normal);
    let (flat, tilt) = (body.mean(g, dims[1]), body.mean(along, dims[1]));
    let tilted = body.b.mul(normal, tilt);
    let rest = body.b.sub(g, flat);
    let rest = body.b.sub(rest, tilted);
    let dx = body.b.mul(rest, inverse);
    let plane = Access::contiguous(F32, &dims);
    body.case(&case_name("layer norm gradient", &dims), 9.0, 1, &[(dx, plane)])
}

/// Gradients of scale and bias: sums over rows.
fn layer_norm_weights([rows, width]: [usize; 2]) -> Case {
    let dims = [width, rows];
    let mut body = Body::new(&dims);
    let mut transposed = Access::contiguous(F32, &[rows, width]);
    transposed.strides.reverse();
    let (x, dy) = (body.load(transposed.clone()), body.load(transposed));
    let (mean, inverse) = (body.load_along(&[1], F32), body.load_along(&[1], F32));
    let distance = body.b.sub(x, mean);
    let normal = body.b.mul(distance, inverse);
    let along = body.b.mul(dy, normal);
    let (bias, scale) = (body.reduce(ReduceOp::Sum, dy), body.reduce(ReduceOp::Sum, along));
    let store = body.access_along(&[0], F32);
    body.case(
        &case_name("layer norm weights", &[rows, width]),
        5.0,
        1,
        &[(scale, store.clone()), (bias, store)],
    )
}

/// Normalization with known statistics, and Relu.
fn batch_norm(dims: [usize; 3]) -> Case {
    let mut body = Body::new(&dims);
    let (x, scale, shift) = (body.load_plane(), body.load_along(&[1], F32), body.load_along(&[1], F32));
    let scaled = body.b.mul(x, scale);
    let sum = body.b.add(scaled, shift);
    let zero = body.constant(0.0);
    let y = body.b.binary(BinaryOp::Max, sum, zero);
    let plane = Access::contiguous(F32, &dims);
    body.case(&case_name("batch norm and relu", &dims), 3.0, 0, &[(y, plane)])
}

/// Gradients of scale and bias, through Relu: sums of each channel.
fn batch_norm_sums([batch, channels, positions]: [usize; 3]) -> Case {
    let dims = [channels, batch, positions];
    let mut body = Body::new(&dims);
    let [x, dy, y] = [(); 3].map(|()| body.load(image([batch, channels, positions])));
    let (mean, inverse) = (body.load_along(&[0], F32), body.load_along(&[0], F32));
    let zero = body.constant(0.0);
    let passes = body.b.compare(CompareOp::Lt, zero, y);
    let g = body.b.select(passes, dy, zero);
    let distance = body.b.sub(x, mean);
    let normal = body.b.mul(distance, inverse);
    let along = body.b.mul(g, normal);
    let (bias, scale) = (body.reduce(ReduceOp::Sum, g), body.reduce(ReduceOp::Sum, along));
    let store = body.access_along(&[0], F32);
    let name = case_name("batch norm and relu weights", &[batch, channels, positions]);
    body.case(&name, 6.0, 2, &[(scale, store.clone()), (bias, store)])
}

/// Gradient of the input of the normalization, through Relu, from these sums.
fn batch_norm_gradient(dims: [usize; 3]) -> Case {
    let mut body = Body::new(&dims);
    let (x, dy, y) = (body.load_plane(), body.load_plane(), body.load_plane());
    let [a, b, c] = [(); 3].map(|()| body.load_along(&[1], F32));
    let zero = body.constant(0.0);
    let passes = body.b.compare(CompareOp::Lt, zero, y);
    let g = body.b.select(passes, dy, zero);
    let g = body.b.mul(g, a);
    let tilted = body.b.mul(x, b);
    let sum = body.b.add(g, tilted);
    let dx = body.b.add(sum, c);
    let plane = Access::contiguous(F32, &dims);
    body.case(&case_name("batch norm and relu gradient", &dims), 5.0, 0, &[(dx, plane)])
}

/// Returns the access to images, with channels as the first axis.
fn image([batch, channels, positions]: [usize; 3]) -> Access {
    let mut image = Access::contiguous(F32, &[batch, channels, positions]);
    image.strides.swap(0, 1);
    image
}

/// Statistics, normalization and Clip to 0..6, in one nest.
fn batch_norm_training(sizes: [usize; 3]) -> Case {
    let [batch, channels, positions] = sizes;
    let mut body = Body::new(&[channels, batch, positions]);
    let x = body.load(image(sizes));
    let (scale, shift) = (body.load_along(&[0], F32), body.load_along(&[0], F32));
    let mean = body.mean(x, batch * positions);
    let distance = body.b.sub(x, mean);
    let square = body.b.mul(distance, distance);
    let variance = body.mean(square, batch * positions);
    let epsilon = body.constant(1e-5);
    let variance = body.b.add(variance, epsilon);
    let inverse = body.b.unary(UnaryOp::Rsqrt, variance);
    let factor = body.b.mul(scale, inverse);
    let scaled = body.b.mul(distance, factor);
    let sum = body.b.add(scaled, shift);
    let (zero, six) = (body.constant(0.0), body.constant(6.0));
    let y = body.b.binary(BinaryOp::Max, sum, zero);
    let y = body.b.binary(BinaryOp::Min, y, six);
    let running = body.access_along(&[0], F32);
    let outputs = [(mean, running.clone()), (inverse, running), (sum, image(sizes)), (y, image(sizes))];
    body.case(&case_name("batch norm in training", &sizes), 10.0, 2, &outputs)
}

/// Gradients of scale, bias and input, through Clip, in one nest.
fn batch_norm_training_gradient(sizes: [usize; 3]) -> Case {
    let [batch, channels, positions] = sizes;
    let mut body = Body::new(&[channels, batch, positions]);
    let (dy, x) = (body.load(image(sizes)), body.load(image(sizes)));
    let [mean, inverse, scale] = [(); 3].map(|()| body.load_along(&[0], F32));
    let distance = body.b.sub(x, mean);
    let along = body.b.mul(dy, distance);
    let (flat, tilt) = (body.reduce(ReduceOp::Sum, dy), body.reduce(ReduceOp::Sum, along));
    let tilt = body.b.mul(tilt, inverse);
    let count = body.constant(1.0 / (batch * positions) as f64);
    let factor = body.b.mul(scale, inverse);
    let (level, slope) = (body.b.mul(flat, count), body.b.mul(tilt, inverse));
    let slope = body.b.mul(slope, count);
    let tilted = body.b.mul(distance, slope);
    let rest = body.b.sub(dy, level);
    let rest = body.b.sub(rest, tilted);
    let dx = body.b.mul(factor, rest);
    let running = body.access_along(&[0], F32);
    let outputs = [(tilt, running.clone()), (flat, running), (dx, image(sizes))];
    body.case(&case_name("batch norm in training, gradient", &sizes), 10.0, 2, &outputs)
}

/// Loss of each row, and the logarithm of its sum of exponentials.
fn cross_entropy(dims: [usize; 2]) -> Case {
    let mut body = Body::new(&dims);
    let (x, label) = (body.load_plane(), body.load_along(&[0], DType::I64));
    let maximum = body.reduce(ReduceOp::Max, x);
    let shifted = body.b.sub(x, maximum);
    let e = body.b.unary(UnaryOp::Exp, shifted);
    let total = body.reduce(ReduceOp::Sum, e);
    let label_index = body.b.coordinate(1);
    let its = body.b.compare(CompareOp::Eq, label_index, label);
    let zero = body.constant(0.0);
    let picked = body.b.select(its, x, zero);
    let score = body.reduce(ReduceOp::Sum, picked);
    let log = body.b.unary(UnaryOp::Log, total);
    let log = body.b.add(log, maximum);
    let loss = body.b.sub(log, score);
    let store = body.access_along(&[0], F32);
    body.case(&case_name("cross-entropy", &dims), 25.0, 1, &[(loss, store.clone()), (log, store)])
}

/// Softmax minus the one-hot label.
fn cross_entropy_gradient(dims: [usize; 2]) -> Case {
    let mut body = Body::new(&dims);
    let (x, log, label) = (body.load_plane(), body.load_along(&[0], F32), body.load_along(&[0], DType::I64));
    let shifted = body.b.sub(x, log);
    let share = body.b.unary(UnaryOp::Exp, shifted);
    let label_index = body.b.coordinate(1);
    let its = body.b.compare(CompareOp::Eq, label_index, label);
    let (one, zero) = (body.constant(1.0), body.constant(0.0));
    let less = body.b.select(its, one, zero);
    let rest = body.b.sub(share, less);
    let part = body.constant(1.0 / dims[0] as f64);
    let dx = body.b.mul(rest, part);
    let plane = Access::contiguous(F32, &dims);
    body.case(&case_name("cross-entropy gradient", &dims), 24.0, 0, &[(dx, plane)])
}

/// Gathered rows of a table. Indices are computed from floats, so that they are in range without a special buffer.
fn gather([count, rows, width]: [usize; 3]) -> Case {
    let dims = [count, width];
    let mut body = Body::new(&dims);
    let where_ = body.load_along(&[0], F32);
    // Floats are between 0.5 and 1.5.
    let (half, size) = (body.constant(0.5), body.constant(rows as f64 * 0.999));
    let share = body.b.sub(where_, half);
    let start_index = body.b.mul(share, size);
    let row = body.b.convert(start_index, Type::I64);
    let row = body.b.guard(row, rows as i64);
    let (step, column) = (body.b.int(width as i64), body.b.coordinate(1));
    let start = body.b.mul(row, step);
    let index = body.b.add(start, column);
    let mut table = Access::contiguous(F32, &dims);
    // The table is accessed by computed index only.
    table.strides.fill(0);
    table.len = rows * width;
    body.loads.push(table);
    let value = body.b.load_at(1, index, Type::F32);
    let plane = Access::contiguous(F32, &dims);
    let mut case = body.case(&format!("nest gather {count} of {rows}x{width}"), 0.0, 0, &[(value, plane)]);
    // Only the indexed rows are read.
    case.bytes = (4 * (2 * count * width + count)) as f64;
    case
}
