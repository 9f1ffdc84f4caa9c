//! What the nets' lowerings share: matrices within buffers, products, states, and the gradients of weights.

use ortrain_expr::{Access, CompareOp, ReduceOp, Reg, Type};
use ortrain_graph::{DType, Tensor};
use ortrain_program::{BufferId, Operand};

use super::{Kind, R, X};
use crate::OpError;
use crate::lower::{Lower, NestBuilder};

/// The sizes of a node.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    pub(super) steps: usize,
    pub(super) batch: usize,
    pub(super) input: usize,
    pub(super) hidden: usize,
    /// Rows of the weights: gates times hidden.
    pub(super) rows: usize,
}

impl Sizes {
    pub(super) fn of(kind: Kind, cx: &Lower<'_>) -> Sizes {
        let (x, hidden) = (cx.dims(X), cx.dims(R)[2]);
        Sizes { steps: x[0], batch: x[1], input: x[2], hidden, rows: kind.gates() * hidden }
    }

    /// Rows of all steps.
    pub(super) fn all(&self) -> usize {
        self.steps * self.batch
    }
}

/// A matrix in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Matrix {
    buffer: BufferId,
    offset: usize,
    strides: [isize; 2],
}

impl Matrix {
    /// Rows of `width` elements, one after the other.
    pub(super) fn rows(buffer: BufferId, width: usize) -> Matrix {
        Matrix { buffer, offset: 0, strides: [width as isize, 1] }
    }

    /// A vector that is the same in every row.
    pub(super) fn broadcast(buffer: BufferId) -> Matrix {
        Matrix { buffer, offset: 0, strides: [0, 1] }
    }

    /// From another row on.
    pub(super) fn at_row(self, row: usize) -> Matrix {
        Matrix { offset: self.offset + row * self.strides[0] as usize, ..self }
    }

    /// From another column on.
    pub(super) fn at_column(self, column: usize) -> Matrix {
        Matrix { offset: self.offset + column * self.strides[1] as usize, ..self }
    }

    pub(super) fn transposed(self) -> Matrix {
        Matrix { strides: [self.strides[1], self.strides[0]], ..self }
    }

    pub(super) fn load(self, cx: &Lower<'_>, nest: &mut NestBuilder) -> Reg {
        nest.load_strided(cx, self.buffer, self.offset, &self.strides)
    }

    pub(super) fn store(self, cx: &Lower<'_>, nest: &mut NestBuilder, value: Reg) {
        nest.store_strided(cx, self.buffer, self.offset, self.strides.iter().copied().collect(), value);
    }

    fn operand(self, cx: &Lower<'_>) -> Operand {
        let access = Access {
            dtype: cx.buffer_dtype(self.buffer),
            offset: self.offset,
            strides: self.strides.iter().copied().collect(),
            len: cx.buffer_len(self.buffer),
        };
        Operand { buffer: self.buffer, access }
    }
}

/// The type that is computed in.
pub(super) fn wide(cx: &Lower<'_>) -> DType {
    if cx.dtype(X) == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Elements between the end of a row and the next, of matrices that are multiplied step by step: rows a multiple of a
/// page apart get into each other's way in the caches.
const GAP: usize = 16;

/// Steps and rows of a batch from which the weights of the state are turned, so that products read them as they lie.
pub(super) const TURNED: (usize, usize) = (16, 9);

/// The transpose of the weights of the state, `[hidden, rows]`: a matrix of its own where it is used often enough.
pub(super) fn turned(cx: &mut Lower<'_>, r: Matrix, sizes: &Sizes) -> Result<Matrix, OpError> {
    if sizes.steps < TURNED.0 || sizes.batch < TURNED.1 {
        return Ok(r.transposed());
    }
    let result = spaced(cx, "turned_weights", sizes.hidden, sizes.rows);
    // In the order of what is read: storing across rows is faster than loading across them.
    let mut nest = cx.nest(&[sizes.rows, sizes.hidden], 0);
    let value = r.load(cx, &mut nest);
    result.transposed().store(cx, &mut nest, value);
    cx.emit(nest.instruction())?;
    Ok(result)
}

/// A matrix of something in between, of the type that is computed in.
pub(super) fn temp(cx: &mut Lower<'_>, name: &str, rows: usize, width: usize) -> Matrix {
    let dtype = wide(cx);
    Matrix::rows(cx.temp(name, dtype, rows * width), width)
}

/// The same of the data's own type: a factor of a product.
pub(super) fn factor(cx: &mut Lower<'_>, name: &str, rows: usize, width: usize) -> Matrix {
    let dtype = cx.dtype(X);
    Matrix::rows(cx.temp(name, dtype, rows * width), width)
}

/// The same with a gap behind each row.
pub(super) fn spaced(cx: &mut Lower<'_>, name: &str, rows: usize, width: usize) -> Matrix {
    factor(cx, name, rows, width + GAP)
}

/// Emits `a b` (of `m x k` and `k x n`), of which `finish` makes the results.
pub(super) fn product<'a>(
    cx: &mut Lower<'a>,
    (m, n, k): (usize, usize, usize),
    a: Matrix,
    b: Matrix,
    finish: impl FnOnce(&mut Lower<'a>, &mut NestBuilder, Reg),
) -> Result<(), OpError> {
    let dtype = wide(cx);
    let mut nest = cx.nest(&[m, n], 0);
    let value = nest.accumulator(dtype);
    finish(cx, &mut nest, value);
    cx.emit(nest.matmul((&[], m, n, k), a.operand(cx), b.operand(cx)))
}

/// Emits `a b` as it is, and returns it. Of few rows it is stored from registers; whatever is added to it costs a pass
/// over it, and is better added where the product is read.
pub(super) fn plain_product(
    cx: &mut Lower<'_>,
    name: &str,
    (m, n, k): (usize, usize, usize),
    a: Matrix,
    b: Matrix,
) -> Result<Matrix, OpError> {
    let result = temp(cx, name, m, n);
    product(cx, (m, n, k), a, b, |cx, nest, value| result.store(cx, nest, value))?;
    Ok(result)
}

/// The sum of those matrices that are there from a column on, in order, in a nest; zero if there are none.
pub(super) fn sum_at(cx: &Lower<'_>, nest: &mut NestBuilder, terms: &[Option<Matrix>], column: usize) -> Reg {
    let mut sum = None;
    for term in terms.iter().flatten() {
        let value = term.at_column(column).load(cx, nest);
        sum = Some(match sum {
            Some(sum) => nest.b.add(sum, value),
            None => value,
        });
    }
    sum.unwrap_or_else(|| load_state(cx, nest, None))
}

/// The sum of the biases of data and of state, which an input has one after the other: the same in every row.
pub(super) fn sum_of_biases(
    cx: &mut Lower<'_>,
    input: usize,
    sizes: &Sizes,
) -> Result<Option<Matrix>, OpError> {
    if !cx.has(input) {
        return Ok(None);
    }
    let biases = Matrix::broadcast(cx.input(input));
    let dtype = wide(cx);
    let result = Matrix::broadcast(cx.temp("bias", dtype, sizes.rows));
    let mut nest = cx.nest(&[1, sizes.rows], 0);
    let sum = sum_at(cx, &mut nest, &[Some(biases), Some(biases.at_column(sizes.rows))], 0);
    result.store(cx, &mut nest, sum);
    cx.emit(nest.instruction())?;
    Ok(Some(result))
}

/// The lengths of sequences, if they are given.
#[derive(Clone, Copy)]
pub(super) struct Lengths(Option<BufferId>);

impl Lengths {
    /// Those in an input, after a check that they lie within the steps.
    pub(super) fn new(cx: &mut Lower<'_>, input: usize, sizes: &Sizes) -> Result<Lengths, OpError> {
        if !cx.has(input) {
            return Ok(Lengths(None));
        }
        cx.guard_up_to(input, sizes.steps)?;
        Ok(Lengths(Some(cx.input(input))))
    }

    /// Whether there are any.
    pub(super) fn are_given(self) -> bool {
        self.0.is_some()
    }

    /// Whether a step lies within a row's sequence, in a nest over `[batch, ..]`; `None`: it does in every row.
    pub(super) fn hold(self, cx: &Lower<'_>, nest: &mut NestBuilder, step: usize) -> Option<Reg> {
        let length = nest.load_strided(cx, self.0?, 0, &[1, 0]);
        let length = nest.b.convert(length, Type::I64);
        let step = nest.b.int(step as i64);
        Some(nest.b.compare(CompareOp::Lt, step, length))
    }
}

/// `yes` where a condition holds, if there is one.
pub(super) fn where_held(nest: &mut NestBuilder, held: Option<Reg>, yes: Reg, no: Reg) -> Reg {
    match held {
        Some(held) => nest.b.select(held, yes, no),
        None => yes,
    }
}

/// The same, and zero elsewhere.
pub(super) fn or_zero(nest: &mut NestBuilder, held: Option<Reg>, yes: Reg) -> Reg {
    let ty = nest.b.ty(yes);
    let zero = nest.b.constant(ty, 0.0);
    where_held(nest, held, yes, zero)
}

/// A state, or what stands for one; else zeros.
pub(super) fn load_state(cx: &Lower<'_>, nest: &mut NestBuilder, state: Option<Matrix>) -> Reg {
    match state {
        Some(state) => state.load(cx, nest),
        None => {
            let ty = Type::of(wide(cx));
            nest.b.constant(ty, 0.0)
        }
    }
}

/// A state that is given as an input, unless it is known to be zero.
pub(super) fn given_state(cx: &mut Lower<'_>, input: usize, sizes: &Sizes) -> Option<Matrix> {
    let is_zero = |state: &Tensor| state.to_f64().into_iter().all(|value| value == 0.0);
    let is_given = cx.has(input) && !cx.constant(input).is_some_and(is_zero);
    is_given.then(|| Matrix::rows(cx.input(input), sizes.hidden))
}

/// What a state of zeros adds to the gates of the first step, the same in every row: zeros, but no number where the weights
/// of the state hold infinity, or what is no number. `None` where a state is given, or the weights are known to be finite.
pub(super) fn from_zeros(
    cx: &mut Lower<'_>,
    sizes: &Sizes,
    state: Option<Matrix>,
) -> Result<Option<Matrix>, OpError> {
    let is_finite = |weights: &Tensor| weights.to_f64().into_iter().all(f64::is_finite);
    if state.is_some() || cx.constant(R).is_some_and(is_finite) {
        return Ok(None);
    }
    let dtype = wide(cx);
    let result = Matrix::broadcast(cx.temp("from_zeros", dtype, sizes.rows));
    let weights = Matrix::rows(cx.input(R), sizes.hidden);
    let mut nest = cx.nest(&[sizes.rows, sizes.hidden], 1);
    let weight = weights.load(cx, &mut nest);
    // What is zero times this: a product with a constant zero would be left out as zero.
    let term = nest.b.sub(weight, weight);
    let sum = nest.reduce(ReduceOp::Sum, term);
    Matrix { strides: [1, 0], ..result }.store(cx, &mut nest, sum);
    cx.emit(nest.instruction())?;
    Ok(Some(result))
}

/// An output of rows of `width` elements, if it is used.
pub(super) fn output(cx: &mut Lower<'_>, k: usize, width: usize) -> Option<Matrix> {
    cx.wants(k).then(|| Matrix::rows(cx.output(k), width))
}

/// The results where there are no steps: states as they were, `outputs[i]` being given `states[i]`, and the others empty.
pub(super) fn lower_nothing(
    cx: &mut Lower<'_>,
    outputs: &[usize],
    states: &[Option<Matrix>],
    sizes: &Sizes,
) -> Result<(), OpError> {
    for k in 0..cx.node().outputs.len() {
        if cx.wants(k) {
            cx.output(k);
        }
    }
    for (&k, &state) in outputs.iter().zip(states) {
        let Some(output) = output(cx, k, sizes.hidden) else { continue };
        let mut nest = cx.nest(&[sizes.batch, sizes.hidden], 0);
        let value = load_state(cx, &mut nest, state);
        output.store(cx, &mut nest, value);
        cx.emit(nest.instruction())?;
    }
    Ok(())
}

/// The products of the inputs with their weights, for all steps: `x W' + bias`, where the biases are sums of parts of
/// an input, given by their columns.
pub(super) fn input_products(
    cx: &mut Lower<'_>,
    sizes: &Sizes,
    biases: Option<(usize, &[usize])>,
) -> Result<Matrix, OpError> {
    let (x, w) = (Matrix::rows(cx.input(X), sizes.input), Matrix::rows(cx.input(super::W), sizes.input));
    let result = temp(cx, "input_products", sizes.all(), sizes.rows);
    let biases = biases.filter(|&(input, _)| cx.has(input));
    let biases = biases.map(|(input, parts)| (Matrix::broadcast(cx.input(input)), parts));
    let shape = (sizes.all(), sizes.rows, sizes.input);
    product(cx, shape, x, w.transposed(), |cx, nest, mut value| {
        for (bias, column) in biases.iter().flat_map(|(bias, parts)| parts.iter().map(move |&c| (bias, c))) {
            let part = bias.at_column(column).load(cx, nest);
            value = nest.b.add(value, part);
        }
        result.store(cx, nest, value);
    })?;
    Ok(result)
}

/// Emits `left' right` over the rows of all steps where `right` is the state before each step, `[rows of left, hidden]`:
/// the first step's state is another matrix. `left` is `[all rows, m]`.
pub(super) fn product_with_states(
    cx: &mut Lower<'_>,
    sizes: &Sizes,
    (left, m): (Matrix, usize),
    (first, hidden): (Option<Matrix>, Matrix),
    result: Matrix,
) -> Result<(), OpError> {
    let (n, batch) = (sizes.hidden, sizes.batch);
    let later = batch * sizes.steps.saturating_sub(1);
    // With one step there is no other part, and with no state none of the first.
    let parts: Vec<(Matrix, Matrix, usize)> = first
        .filter(|_| sizes.steps > 0)
        .map(|first| (left, first, batch))
        .into_iter()
        .chain((later > 0).then(|| (left.at_row(batch), hidden, later)))
        .collect();
    if parts.is_empty() {
        return zeros(cx, (m, n), result);
    }
    let mut sum: Option<Matrix> = None;
    for (index, &(left, right, rows)) in parts.iter().enumerate() {
        let target = if index + 1 == parts.len() { result } else { temp(cx, "first_step", m, n) };
        product(cx, (m, n, rows), left.transposed(), right, |cx, nest, mut value| {
            if let Some(sum) = sum {
                let before = sum.load(cx, nest);
                value = nest.b.add(before, value);
            }
            target.store(cx, nest, value);
        })?;
        sum = Some(target);
    }
    Ok(())
}

/// Fills a matrix with zeros.
pub(super) fn zeros(cx: &mut Lower<'_>, (m, n): (usize, usize), result: Matrix) -> Result<(), OpError> {
    let mut nest = cx.nest(&[m, n], 0);
    let ty = Type::of(wide(cx));
    let zero = nest.b.constant(ty, 0.0);
    result.store(cx, &mut nest, zero);
    cx.emit(nest.instruction())
}

/// The gradients of data, weights and biases, of those of the gates: `of_input` for all that is multiplied with data,
/// `of_state` for all that is multiplied with the state, both `[all rows, rows of the weights]`.
pub(super) fn input_gradients(
    cx: &mut Lower<'_>,
    sizes: &Sizes,
    of_input: Matrix,
    of_state: Matrix,
) -> Result<(), OpError> {
    if let Some(result) = output(cx, 0, sizes.input) {
        let w = Matrix::rows(cx.input(super::W), sizes.input);
        product(cx, (sizes.all(), sizes.input, sizes.rows), of_input, w, |cx, nest, value| {
            result.store(cx, nest, value);
        })?;
    }
    if let Some(result) = output(cx, 1, sizes.input) {
        let x = Matrix::rows(cx.input(X), sizes.input);
        let shape = (sizes.rows, sizes.input, sizes.all());
        product(cx, shape, of_input.transposed(), x, |cx, nest, value| {
            result.store(cx, nest, value);
        })?;
    }
    if let Some(result) = output(cx, 3, 2 * sizes.rows) {
        let (of_w, of_r) = (result, result.at_column(sizes.rows));
        // Both biases are added to the same sums, unless a gate stands between them.
        let parts: &[(Matrix, &[Matrix])] = if of_input == of_state {
            &[(of_input, &[of_w, of_r])]
        } else {
            &[(of_input, &[of_w]), (of_state, &[of_r])]
        };
        for &(gradient, targets) in parts {
            column_sums(cx, (sizes.all(), sizes.rows), targets, None, |cx, nest| {
                gradient.transposed().load(cx, nest)
            })?;
        }
    }
    Ok(())
}

/// Emits sums over the rows of what `term` computes in a nest over `[columns, rows]`, on top of a sum made before. All
/// of the results are the same.
pub(super) fn column_sums<'a>(
    cx: &mut Lower<'a>,
    (rows, columns): (usize, usize),
    results: &[Matrix],
    before: Option<Matrix>,
    term: impl FnOnce(&mut Lower<'a>, &mut NestBuilder) -> Reg,
) -> Result<(), OpError> {
    let mut nest = cx.nest(&[columns, rows], 1);
    let value = term(cx, &mut nest);
    let mut sum = nest.reduce(ReduceOp::Sum, value);
    if let Some(before) = before {
        let before = Matrix { strides: [before.strides[1], 0], ..before }.load(cx, &mut nest);
        sum = nest.b.add(before, sum);
    }
    for &result in results {
        Matrix { strides: [result.strides[1], 0], ..result }.store(cx, &mut nest, sum);
    }
    cx.emit(nest.instruction())
}
