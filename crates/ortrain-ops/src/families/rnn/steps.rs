//! Common parts of the lowerings of recurrent nets: matrices in buffers, products, states, and the gradients of
//! weights.

use ortrain_expr::{Access, CompareOp, ReduceOp, Reg, Type};
use ortrain_graph::{DType, Tensor};
use ortrain_program::{BufferId, Operand};

use crate::OpError;
use crate::families::rnn::net::{NetKind, R, W, X};
use crate::lower::{Lower, NestBuilder};

/// Sizes of a node.
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
    pub(super) fn from_context(kind: NetKind, cx: &Lower<'_>) -> Sizes {
        let (x, hidden) = (cx.dims(X), cx.dims(R)[2]);
        Sizes { steps: x[0], batch: x[1], input: x[2], hidden, rows: kind.gate_count() * hidden }
    }

    /// Returns the number of rows of all steps.
    pub(super) fn total_rows(&self) -> usize {
        self.steps * self.batch
    }
}

/// Matrix in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Matrix {
    buffer: BufferId,
    offset: usize,
    strides: [isize; 2],
}

impl Matrix {
    /// Creates a matrix of contiguous rows of `width` elements.
    pub(super) fn rows(buffer: BufferId, width: usize) -> Matrix {
        Matrix { buffer, offset: 0, strides: [width as isize, 1] }
    }

    /// Creates a matrix with the same vector in every row.
    pub(super) fn broadcast(buffer: BufferId) -> Matrix {
        Matrix { buffer, offset: 0, strides: [0, 1] }
    }

    /// Returns the submatrix from `row` on.
    pub(super) fn at_row(self, row: usize) -> Matrix {
        Matrix { offset: self.offset + row * self.strides[0] as usize, ..self }
    }

    /// Returns the submatrix from `column` on.
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

/// Returns the compute type.
pub(super) fn compute_dtype(cx: &Lower<'_>) -> DType {
    if cx.dtype(X) == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Padding elements after each row, for matrices that are multiplied step by step. Without them, rows at a distance of
/// a multiple of a page cause cache conflicts.
const ROW_PADDING: usize = 16;

/// Minimum numbers of steps and of batch rows for a transposed copy of the recurrent weights. Products read the copy
/// contiguously.
pub(super) const TRANSPOSE_THRESHOLD: (usize, usize) = (16, 9);

/// Returns the transposed recurrent weights, `[hidden, rows]`: a copy if it is used often enough, otherwise a view.
pub(super) fn transpose_weights(cx: &mut Lower<'_>, r: Matrix, sizes: &Sizes) -> Result<Matrix, OpError> {
    if sizes.steps < TRANSPOSE_THRESHOLD.0 || sizes.batch < TRANSPOSE_THRESHOLD.1 {
        return Ok(r.transposed());
    }
    let result = alloc_padded(cx, "turned_weights", sizes.hidden, sizes.rows);
    // In the order of the source: strided stores are faster than strided loads.
    let mut nest = cx.nest(&[sizes.rows, sizes.hidden], 0);
    let value = r.load(cx, &mut nest);
    result.transposed().store(cx, &mut nest, value);
    cx.emit(nest.instruction())?;
    Ok(result)
}

/// Allocates an intermediate matrix of the compute type.
pub(super) fn alloc_temp(cx: &mut Lower<'_>, name: &str, rows: usize, width: usize) -> Matrix {
    let dtype = compute_dtype(cx);
    Matrix::rows(cx.alloc_temp(name, dtype, rows * width), width)
}

/// Allocates an intermediate matrix of the data type, for a factor of a product.
pub(super) fn alloc_factor(cx: &mut Lower<'_>, name: &str, rows: usize, width: usize) -> Matrix {
    let dtype = cx.dtype(X);
    Matrix::rows(cx.alloc_temp(name, dtype, rows * width), width)
}

/// Allocates an intermediate matrix of the data type with padding after each row.
pub(super) fn alloc_padded(cx: &mut Lower<'_>, name: &str, rows: usize, width: usize) -> Matrix {
    alloc_factor(cx, name, rows, width + ROW_PADDING)
}

/// Emits `a b` (of `m x k` and `k x n`) with the epilogue `finish`.
pub(super) fn emit_product<'a>(
    cx: &mut Lower<'a>,
    (m, n, k): (usize, usize, usize),
    a: Matrix,
    b: Matrix,
    finish: impl FnOnce(&mut Lower<'a>, &mut NestBuilder, Reg),
) -> Result<(), OpError> {
    let dtype = compute_dtype(cx);
    let mut nest = cx.nest(&[m, n], 0);
    let value = nest.accumulator(dtype);
    finish(cx, &mut nest, value);
    cx.emit(nest.matmul((&[], m, n, k), a.operand(cx), b.operand(cx)))
}

/// Emits `a b` without an epilogue, and returns it. A product of few rows is stored from registers. An epilogue would
/// need a second pass over it, so the readers of the product add their terms themselves.
pub(super) fn emit_plain_product(
    cx: &mut Lower<'_>,
    name: &str,
    (m, n, k): (usize, usize, usize),
    a: Matrix,
    b: Matrix,
) -> Result<Matrix, OpError> {
    let result = alloc_temp(cx, name, m, n);
    emit_product(cx, (m, n, k), a, b, |cx, nest, value| result.store(cx, nest, value))?;
    Ok(result)
}

/// Sums the present matrices, in order, from a column on; zero if all are absent.
pub(super) fn load_sum(
    cx: &Lower<'_>,
    nest: &mut NestBuilder,
    terms: &[Option<Matrix>],
    column: usize,
) -> Reg {
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

/// Emits the sum of the biases of data and of state, which an input holds in sequence: the same in every row.
pub(super) fn emit_bias_sum(
    cx: &mut Lower<'_>,
    input: usize,
    sizes: &Sizes,
) -> Result<Option<Matrix>, OpError> {
    if !cx.has_input(input) {
        return Ok(None);
    }
    let biases = Matrix::broadcast(cx.input(input));
    let dtype = compute_dtype(cx);
    let result = Matrix::broadcast(cx.alloc_temp("bias", dtype, sizes.rows));
    let mut nest = cx.nest(&[1, sizes.rows], 0);
    let sum = load_sum(cx, &mut nest, &[Some(biases), Some(biases.at_column(sizes.rows))], 0);
    result.store(cx, &mut nest, sum);
    cx.emit(nest.instruction())?;
    Ok(Some(result))
}

/// Lengths of the sequences, if present.
#[derive(Clone, Copy)]
pub(super) struct Lengths(Option<BufferId>);

impl Lengths {
    /// Reads the lengths from an input, and checks that they are within the number of steps.
    pub(super) fn new(cx: &mut Lower<'_>, input: usize, sizes: &Sizes) -> Result<Lengths, OpError> {
        if !cx.has_input(input) {
            return Ok(Lengths(None));
        }
        cx.guard_range(input, sizes.steps)?;
        Ok(Lengths(Some(cx.input(input))))
    }

    /// Returns true if there are lengths.
    pub(super) fn are_present(self) -> bool {
        self.0.is_some()
    }

    /// Emits a condition, in a nest over `[batch, ..]`: true if the step is within the row's sequence. Returns `None`
    /// if this holds in every row.
    pub(super) fn step_mask(self, cx: &Lower<'_>, nest: &mut NestBuilder, step: usize) -> Option<Reg> {
        let length = nest.load_strided(cx, self.0?, 0, &[1, 0]);
        let length = nest.b.convert(length, Type::I64);
        let step = nest.b.int(step as i64);
        Some(nest.b.compare(CompareOp::Lt, step, length))
    }
}

/// Selects `yes` if the condition is true or absent, else `no`.
pub(super) fn select_active(nest: &mut NestBuilder, active: Option<Reg>, yes: Reg, no: Reg) -> Reg {
    match active {
        Some(active) => nest.b.select(active, yes, no),
        None => yes,
    }
}

/// Selects `yes` if the condition is true or absent, else zero.
pub(super) fn active_or_zero(nest: &mut NestBuilder, active: Option<Reg>, yes: Reg) -> Reg {
    let ty = nest.b.ty(yes);
    let zero = nest.b.constant(ty, 0.0);
    select_active(nest, active, yes, zero)
}

/// Loads a state or a replacement; zeros if it is absent.
pub(super) fn load_state(cx: &Lower<'_>, nest: &mut NestBuilder, state: Option<Matrix>) -> Reg {
    match state {
        Some(state) => state.load(cx, nest),
        None => {
            let ty = Type::of(compute_dtype(cx));
            nest.b.constant(ty, 0.0)
        }
    }
}

/// Returns the initial state from an input, unless it is absent or known to be zero.
pub(super) fn initial_state(cx: &mut Lower<'_>, input: usize, sizes: &Sizes) -> Option<Matrix> {
    let is_zero = |state: &Tensor| state.to_f64().into_iter().all(|value| value == 0.0);
    let has_state = cx.has_input(input) && !cx.constant(input).is_some_and(is_zero);
    has_state.then(|| Matrix::rows(cx.input(input), sizes.hidden))
}

/// Emits the contribution of a zero state to the gates of the first step, the same in every row. It is zero, or NaN if
/// a recurrent weight is infinite or NaN. Returns `None` if there is a state, or if the weights are known to be finite.
pub(super) fn zero_state_products(
    cx: &mut Lower<'_>,
    sizes: &Sizes,
    state: Option<Matrix>,
) -> Result<Option<Matrix>, OpError> {
    let is_finite = |weights: &Tensor| weights.to_f64().into_iter().all(f64::is_finite);
    if state.is_some() || cx.constant(R).is_some_and(is_finite) {
        return Ok(None);
    }
    let dtype = compute_dtype(cx);
    let result = Matrix::broadcast(cx.alloc_temp("from_zeros", dtype, sizes.rows));
    let weights = Matrix::rows(cx.input(R), sizes.hidden);
    let mut nest = cx.nest(&[sizes.rows, sizes.hidden], 1);
    let weight = weights.load(cx, &mut nest);
    // Equals zero times the weight: a product with a constant zero would be simplified to zero.
    let term = nest.b.sub(weight, weight);
    let sum = nest.reduce(ReduceOp::Sum, term);
    Matrix { strides: [1, 0], ..result }.store(cx, &mut nest, sum);
    cx.emit(nest.instruction())?;
    Ok(Some(result))
}

/// Returns an output with rows of `width` elements, if it is used.
pub(super) fn output_matrix(cx: &mut Lower<'_>, k: usize, width: usize) -> Option<Matrix> {
    cx.has_output(k).then(|| Matrix::rows(cx.output(k), width))
}

/// Emits the results for zero steps: `outputs[i]` becomes `states[i]`, and the others are empty.
pub(super) fn lower_empty(
    cx: &mut Lower<'_>,
    outputs: &[usize],
    states: &[Option<Matrix>],
    sizes: &Sizes,
) -> Result<(), OpError> {
    for k in 0..cx.node().outputs.len() {
        if cx.has_output(k) {
            cx.output(k);
        }
    }
    for (&k, &state) in outputs.iter().zip(states) {
        let Some(output) = output_matrix(cx, k, sizes.hidden) else { continue };
        let mut nest = cx.nest(&[sizes.batch, sizes.hidden], 0);
        let value = load_state(cx, &mut nest, state);
        output.store(cx, &mut nest, value);
        cx.emit(nest.instruction())?;
    }
    Ok(())
}

/// Emits the products of the inputs with their weights, for all steps: `x W' + bias`. The bias is a sum of parts of an
/// input, which start at the columns in `biases`.
pub(super) fn emit_input_products(
    cx: &mut Lower<'_>,
    sizes: &Sizes,
    biases: Option<(usize, &[usize])>,
) -> Result<Matrix, OpError> {
    let (x, w) = (Matrix::rows(cx.input(X), sizes.input), Matrix::rows(cx.input(W), sizes.input));
    let result = alloc_temp(cx, "input_products", sizes.total_rows(), sizes.rows);
    let biases = biases.filter(|&(input, _)| cx.has_input(input));
    let biases = biases.map(|(input, parts)| (Matrix::broadcast(cx.input(input)), parts));
    let shape = (sizes.total_rows(), sizes.rows, sizes.input);
    emit_product(cx, shape, x, w.transposed(), |cx, nest, mut value| {
        for (bias, column) in biases.iter().flat_map(|(bias, parts)| parts.iter().map(move |&c| (bias, c))) {
            let part = bias.at_column(column).load(cx, nest);
            value = nest.b.add(value, part);
        }
        result.store(cx, nest, value);
    })?;
    Ok(result)
}

/// Emits `left' right` over the rows of all steps. `right` is the state before each step, `[rows of left, hidden]`; the
/// state of the first step is another matrix. `left` is `[all rows, m]`.
pub(super) fn emit_product_with_states(
    cx: &mut Lower<'_>,
    sizes: &Sizes,
    (left, m): (Matrix, usize),
    (first, hidden): (Option<Matrix>, Matrix),
    result: Matrix,
) -> Result<(), OpError> {
    let (n, batch) = (sizes.hidden, sizes.batch);
    let later = batch * sizes.steps.saturating_sub(1);
    // A single step has no second part, and without an initial state there is no first part.
    let parts: Vec<(Matrix, Matrix, usize)> = first
        .filter(|_| sizes.steps > 0)
        .map(|first| (left, first, batch))
        .into_iter()
        .chain((later > 0).then(|| (left.at_row(batch), hidden, later)))
        .collect();
    if parts.is_empty() {
        return fill_zeros(cx, (m, n), result);
    }
    let mut sum: Option<Matrix> = None;
    for (index, &(left, right, rows)) in parts.iter().enumerate() {
        let target = if index + 1 == parts.len() { result } else { alloc_temp(cx, "first_step", m, n) };
        emit_product(cx, (m, n, rows), left.transposed(), right, |cx, nest, mut value| {
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
pub(super) fn fill_zeros(cx: &mut Lower<'_>, (m, n): (usize, usize), result: Matrix) -> Result<(), OpError> {
    let mut nest = cx.nest(&[m, n], 0);
    let ty = Type::of(compute_dtype(cx));
    let zero = nest.b.constant(ty, 0.0);
    result.store(cx, &mut nest, zero);
    cx.emit(nest.instruction())
}

/// Emits the gradients of data, weights and biases from the gradients of the gates. `of_input` belongs to the products
/// with the data, `of_state` to the products with the state. Both are `[all rows, rows of the weights]`.
pub(super) fn emit_input_gradients(
    cx: &mut Lower<'_>,
    sizes: &Sizes,
    of_input: Matrix,
    of_state: Matrix,
) -> Result<(), OpError> {
    if let Some(result) = output_matrix(cx, 0, sizes.input) {
        let w = Matrix::rows(cx.input(W), sizes.input);
        emit_product(cx, (sizes.total_rows(), sizes.input, sizes.rows), of_input, w, |cx, nest, value| {
            result.store(cx, nest, value);
        })?;
    }
    if let Some(result) = output_matrix(cx, 1, sizes.input) {
        let x = Matrix::rows(cx.input(X), sizes.input);
        let shape = (sizes.rows, sizes.input, sizes.total_rows());
        emit_product(cx, shape, of_input.transposed(), x, |cx, nest, value| {
            result.store(cx, nest, value);
        })?;
    }
    if let Some(result) = output_matrix(cx, 3, 2 * sizes.rows) {
        let (of_w, of_r) = (result, result.at_column(sizes.rows));
        // Both biases are added to the same sums, unless a gate separates them.
        let parts: &[(Matrix, &[Matrix])] = if of_input == of_state {
            &[(of_input, &[of_w, of_r])]
        } else {
            &[(of_input, &[of_w]), (of_state, &[of_r])]
        };
        for &(gradient, targets) in parts {
            emit_column_sums(cx, (sizes.total_rows(), sizes.rows), targets, None, |cx, nest| {
                gradient.transposed().load(cx, nest)
            })?;
        }
    }
    Ok(())
}

/// Emits the sums over rows of `term`, in a nest over `[columns, rows]`, plus the sum `before`. All `results` get the
/// same values.
pub(super) fn emit_column_sums<'a>(
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
