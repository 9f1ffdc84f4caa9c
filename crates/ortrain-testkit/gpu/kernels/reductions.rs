//! Reductions of rows and of columns.

use ortrain_expr::{
    Access, Builder, CompareOp, DType, Dims, Precision, ReduceOp, Reduction, Reg, Type, UnaryOp,
};
use ortrain_program::{BufferId, Load, Nest, Operand};

use super::test_program::{TestProgramBuilder, random_numbers};

/// Space with reduced trailing axes, and the strides of a tensor in it.
#[derive(Clone, Debug)]
struct Space {
    dims: Vec<usize>,
    inner: usize,
    strides: Vec<isize>,
}

/// Returns rows with adjacent elements.
fn rows(count: usize, size: usize) -> Space {
    Space { dims: vec![count, size], inner: 1, strides: vec![size as isize, 1] }
}

/// Returns rows that are columns in memory.
fn columns(count: usize, size: usize) -> Space {
    Space { dims: vec![count, size], inner: 1, strides: vec![1, count as isize] }
}

/// Returns the channels of images, reduced over images and positions.
fn channels(images: usize, count: usize, positions: usize) -> Space {
    let (channels, size) = (count as isize, positions as isize);
    Space { dims: vec![count, images, positions], inner: 2, strides: vec![size, channels * size, 1] }
}

/// Returns the channels of images in channels-last layout, reduced over images and positions.
fn channels_last(images: usize, count: usize, positions: usize) -> Space {
    let (channels, size) = (count as isize, positions as isize);
    Space { dims: vec![count, images, positions], inner: 2, strides: vec![1, channels * size, channels] }
}

impl Space {
    fn count(&self) -> usize {
        self.dims[..self.dims.len() - self.inner].iter().product()
    }

    fn elements(&self) -> usize {
        self.dims.iter().product()
    }

    fn all(&self, buffer: BufferId) -> Operand {
        let strides = self.strides.iter().copied().collect();
        Operand { buffer, access: Access { dtype: DType::F32, offset: 0, strides, len: self.elements() } }
    }

    /// Returns an operand with one element per row.
    fn once(&self, buffer: BufferId) -> Operand {
        let mut strides: Vec<isize> = vec![0; self.dims.len()];
        strides[0] = 1;
        let strides = strides.into_iter().collect();
        Operand { buffer, access: Access { dtype: DType::F32, offset: 0, strides, len: self.count() } }
    }

    fn nest(&self, loads: Vec<Operand>, expression: Expression, stores: Vec<Operand>) -> Nest {
        let Expression { builder, reductions, results } = expression;
        let values: Vec<Reg> = reductions.iter().map(|(_, value)| *value).collect();
        let (expr, values) = builder.finish_keeping(&results, &values);
        let operations = reductions.iter().map(|(op, _)| *op);
        Nest {
            dims: Dims::from_slice(&self.dims),
            inner: self.inner,
            segments: None,
            loads: loads.into_iter().map(Load::Buffer).collect(),
            expr,
            reductions: operations.zip(values).map(|(op, value)| Reduction { op, value }).collect(),
            stores,
        }
    }
}

/// Expression of a nest.
#[derive(Default)]
struct Expression {
    builder: Builder,
    reductions: Vec<(ReduceOp, Reg)>,
    results: Vec<Reg>,
}

impl Expression {
    /// Adds a reduction and returns its result.
    fn reduced(&mut self, op: ReduceOp, value: Reg) -> Reg {
        self.reductions.push((op, value));
        let ty = self.builder.ty(value);
        self.builder.reduced(self.reductions.len() - 1, ty)
    }
}

/// Returns numbers with NaN and infinities in some rows.
fn special(space: &Space) -> Vec<f32> {
    let mut values = random_numbers(space.elements(), space.elements());
    let count = space.count();
    let last: isize =
        space.dims.iter().zip(&space.strides).map(|(&dim, &stride)| (dim as isize - 1) * stride).sum();
    let step = space.strides[0];
    let at = |row: usize, from_end: isize| {
        let end = last - (count - 1 - row) as isize * step;
        let inner = space.strides[space.strides.len() - 1];
        (end - from_end * inner).unsigned_abs()
    };
    if count > 3 {
        values[at(1, 0)] = f32::NAN;
        values[at(2, 1)] = f32::INFINITY;
        values[at(2, 3)] = f32::NEG_INFINITY;
        values[at(3, 2)] = f32::NEG_INFINITY;
    }
    values
}

/// Tests sum, maximum, minimum, product, and a count of elements.
fn statistics(space: &Space, values: Vec<f32>) {
    let mut test = TestProgramBuilder::new(Precision::F32);
    let x = test.input(values);
    let mut expression = Expression::default();
    let element = expression.builder.load(0, Type::F32);
    let half = expression.builder.constant(Type::F32, 0.5);
    let is_larger = expression.builder.compare(CompareOp::Lt, half, element);
    let count_one = expression.builder.convert(is_larger, Type::I32);
    // A product that is exact in any order.
    let signs = [-1.0, 1.0].map(|sign| expression.builder.constant(Type::F32, sign));
    let factor = expression.builder.select(is_larger, signs[0], signs[1]);
    let reductions = [
        (ReduceOp::Sum, element),
        (ReduceOp::Max, element),
        (ReduceOp::Min, element),
        (ReduceOp::Prod, factor),
        (ReduceOp::Sum, count_one),
    ];
    let results: Vec<Reg> = reductions.iter().map(|&(op, value)| expression.reduced(op, value)).collect();
    expression.results =
        results.into_iter().map(|result| expression.builder.convert(result, Type::F32)).collect();
    let stores = (0..5).map(|_| space.once(test.result(space.count()))).collect();
    test.emit(space.nest(vec![space.all(x)], expression, stores));
    test.finish().assert_agrees(&format!("statistics of {space:?}"));
}

/// Tests sums of 64-bit integers: pairs of words.
fn wide_sums(space: &Space) {
    let mut test = TestProgramBuilder::new(Precision::F32);
    let x = test.random(space.elements());
    let mut expression = Expression::default();
    let element = expression.builder.load(0, Type::F32);
    let large = expression.builder.constant(Type::F32, 1e15);
    let value = expression.builder.mul(element, large);
    let value = expression.builder.convert(value, Type::I64);
    let [sum, maximum] = [ReduceOp::Sum, ReduceOp::Max].map(|op| expression.reduced(op, value));
    expression.results = [sum, maximum]
        .map(|sum| {
            let sum = expression.builder.convert(sum, Type::F32);
            expression.builder.div(sum, large)
        })
        .to_vec();
    let stores = (0..2).map(|_| space.once(test.result(space.count()))).collect();
    test.emit(space.nest(vec![space.all(x)], expression, stores));
    test.finish().assert_agrees(&format!("wide sums of {space:?}"));
}

/// Tests the softmax, and the logarithm of its sum: the second reduction depends on the first.
fn softmax(space: &Space) {
    let mut test = TestProgramBuilder::new(Precision::F32);
    let x = test.random(space.elements());
    let mut expression = Expression::default();
    let element = expression.builder.load(0, Type::F32);
    let maximum = expression.reduced(ReduceOp::Max, element);
    let less = expression.builder.sub(element, maximum);
    let power = expression.builder.unary(UnaryOp::Exp, less);
    let total = expression.reduced(ReduceOp::Sum, power);
    let share = expression.builder.div(power, total);
    let log = expression.builder.unary(UnaryOp::Log, total);
    expression.results = vec![share, expression.builder.add(log, maximum)];
    let stores = vec![space.all(test.result(space.elements())), space.once(test.result(space.count()))];
    test.emit(space.nest(vec![space.all(x)], expression, stores));
    test.finish().assert_agrees(&format!("the softmax of {space:?}"));
}

/// Tests rows minus their mean, in place or not, and running statistics that are updated in place.
fn centered(space: &Space, in_place: bool) {
    let mut test = TestProgramBuilder::new(Precision::F32);
    let x = match in_place {
        true => test.state(space.elements()),
        false => test.random(space.elements()),
    };
    let running = test.state(space.count());
    let to = if in_place { x } else { test.result(space.elements()) };
    let mut expression = Expression::default();
    let element = expression.builder.load(0, Type::F32);
    let old = expression.builder.load(1, Type::F32);
    let total = expression.reduced(ReduceOp::Sum, element);
    let size = expression.builder.constant(Type::F32, (space.elements() / space.count()) as f64);
    let mean = expression.builder.div(total, size);
    // The previous value is part of both results.
    let shifted = expression.builder.add(mean, old);
    let result = expression.builder.sub(element, shifted);
    expression.results = vec![result, shifted];
    let (full, once) = (space.all(x), space.once(running));
    test.emit(space.nest(vec![full, once.clone()], expression, vec![space.all(to), once]));
    test.finish().assert_agrees(&format!("{space:?} without means, in place: {in_place}"));
}

fn test_all(space: &Space) {
    statistics(space, special(space));
    softmax(space);
    wide_sums(space);
    [false, true].into_iter().for_each(|in_place| centered(space, in_place));
}

#[test]
fn rows_of_any_size() {
    for size in [31, 32, 33, 127, 128, 129, 257, 512, 513, 1000, 1025] {
        for count in [1, 5, 130] {
            test_all(&rows(count, size));
        }
    }
}

/// Parts of 16 384 elements.
#[test]
fn long_rows() {
    for (count, size) in [(1, 16_384), (1, 16_385), (4, 16_640), (5, 50_000), (127, 16_390)] {
        test_all(&rows(count, size));
    }
    test_all(&channels(8, 6, 3000));
}

#[test]
fn columns_of_any_size() {
    for size in [33, 64, 100, 513, 2000] {
        for count in [2, 7, 8, 9, 63, 64, 65, 130] {
            test_all(&columns(count, size));
        }
    }
}

#[test]
fn channels_of_images() {
    for (images, count, positions) in [(3, 5, 20), (40, 70, 9), (2, 64, 49), (9, 33, 100)] {
        test_all(&channels(images, count, positions));
        test_all(&channels_last(images, count, positions));
    }
}
