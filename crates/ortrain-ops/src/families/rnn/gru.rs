//! `GRU`, with the gates update z, reset r and new state n ("h"):
//!
//! ```text
//! z = f(x Wz' + h Rz' + biases)            r = f(x Wr' + h Rr' + biases)
//! n = g(x Wn' + (r * h) Rn' + biases)      or, with linear_before_reset, g(x Wn' + bias + r * (h Rn' + bias))
//! h := (1 - z) * n + z * h
//! ```

use ortrain_expr::{Builder, Reg};
use ortrain_graph::DType;

use super::steps::{
    Lengths, Matrix, Sizes, active_or_zero, alloc_factor, alloc_padded, alloc_temp, emit_input_gradients,
    emit_input_products, emit_plain_product, emit_product, emit_product_with_states, initial_state,
    load_state, load_sum, lower_empty, output_matrix, select_active, transpose_weights, zero_state_products,
};
use crate::OpError;
use crate::families::rnn::net::{Attributes, B, GradInputs, H0, LENGTHS, NetKind, R, X};
use crate::lower::{Lower, NestBuilder};

/// Indices of the gates.
const Z: usize = 0;
const RESET: usize = 1;
const NEW: usize = 2;

/// Destinations of the results of a step.
struct StepOutputs {
    values: Vec<(Matrix, OutputKind)>,
    gates: Option<Matrix>,
    hidden: usize,
}

/// Value to store: the carried state or the visible result.
#[derive(Clone, Copy, PartialEq)]
enum OutputKind {
    State,
    Seen,
}

impl StepOutputs {
    /// Stores `(1 - z) * n + z * before`, and the gates if the gradient needs them.
    fn store(
        &self,
        cx: &Lower<'_>,
        nest: &mut NestBuilder,
        [z, r, n]: [Reg; 3],
        before: Reg,
        active: Option<Reg>,
    ) {
        let ty = nest.b.ty(z);
        let one = nest.b.constant(ty, 1.0);
        let rest = nest.b.sub(one, z);
        let (new, old) = (nest.b.mul(rest, n), nest.b.mul(z, before));
        let h = nest.b.add(new, old);
        let state = select_active(nest, active, h, before);
        let output = active_or_zero(nest, active, h);
        for &(target, value) in &self.values {
            target.store(cx, nest, if value == OutputKind::State { state } else { output });
        }
        if let Some(gates) = self.gates {
            for (gate, value) in [(Z, z), (RESET, r), (NEW, n)] {
                gates.at_column(gate * self.hidden).store(cx, nest, value);
            }
        }
    }
}

pub(super) fn lower(attributes: &Attributes, cx: &mut Lower<'_>) -> Result<(), OpError> {
    let sizes = Sizes::from_context(NetKind::Gru, cx);
    let stored = cx.dtype(X);
    let (batch, hidden) = (sizes.batch, sizes.hidden);
    let lengths = Lengths::new(cx, LENGTHS, &sizes)?;
    // With `linear_before_reset`, the recurrent bias is added to the product with the state.
    let both: &[usize] = &[0, sizes.rows];
    let products = emit_input_products(cx, &sizes, (!attributes.linear_before_reset).then_some((B, both)))?;
    let biases = cx.has_input(B).then(|| Matrix::broadcast(cx.input(B)));
    let r = Matrix::rows(cx.input(R), hidden);
    let r = transpose_weights(cx, r, &sizes)?;
    let mut state = initial_state(cx, H0, &sizes);
    if sizes.steps == 0 {
        return lower_empty(cx, &[1], &[state], &sizes);
    }
    let from_zeros = zero_state_products(cx, &sizes, state)?;
    let (all_steps, last) = (output_matrix(cx, 0, hidden), output_matrix(cx, 1, hidden));
    let stored_gates = output_matrix(cx, 2, sizes.rows);
    for step in 0..sizes.steps {
        let row = step * batch;
        let is_last = step + 1 == sizes.steps;
        let output_row = all_steps.map(|row_output| row_output.at_row(row));
        // A state that equals the result needs no buffer of its own.
        let output_state = output_row.filter(|_| !lengths.are_present());
        let new_state =
            (!is_last && output_state.is_none()).then(|| alloc_factor(cx, "hidden", batch, hidden));
        let values = [
            new_state.map(|next| (next, OutputKind::State)),
            last.filter(|_| is_last).map(|last| (last, OutputKind::State)),
            output_row.map(|output| (output, OutputKind::Seen)),
        ];
        let targets = StepOutputs {
            values: values.into_iter().flatten().collect(),
            gates: stored_gates.map(|gates| gates.at_row(row)),
            hidden,
        };
        let input_products = products.at_row(row);
        if attributes.linear_before_reset {
            let from_state = match state {
                Some(h) => Some(emit_plain_product(cx, "gates", (batch, sizes.rows, hidden), h, r)?),
                None => from_zeros,
            };
            let recurrent = [from_state, biases.map(|biases| biases.at_column(sizes.rows))];
            let mut nest = cx.nest(&[batch, hidden], 0);
            let pairs = [Z, RESET, NEW].map(|gate| {
                let column = gate * hidden;
                let input_sum = load_sum(cx, &mut nest, &[Some(input_products), biases], column);
                (input_sum, load_sum(cx, &mut nest, &recurrent, column))
            });
            let [z, reset] = [Z, RESET].map(|gate| {
                let sum = nest.b.add(pairs[gate].0, pairs[gate].1);
                attributes.gate_activation(0).apply(&mut nest.b, sum, stored)
            });
            let part = nest.b.mul(reset, pairs[NEW].1);
            let sum = nest.b.add(pairs[NEW].0, part);
            let new = attributes.gate_activation(1).apply(&mut nest.b, sum, stored);
            let before = load_state(cx, &mut nest, state);
            let active = lengths.step_mask(cx, &mut nest, step);
            targets.store(cx, &mut nest, [z, reset, new], before, active);
            cx.emit(nest.instruction())?;
        } else {
            let gates = alloc_temp(cx, "gates", batch, 2 * hidden);
            let reset_state = alloc_factor(cx, "reset_state", batch, hidden);
            let apply = |cx: &Lower<'_>, nest: &mut NestBuilder, value: Reg| {
                let input_part = input_products.load(cx, nest);
                let sum = nest.b.add(input_part, value);
                let gate = attributes.gate_activation(0).apply(&mut nest.b, sum, stored);
                gates.store(cx, nest, gate);
            };
            let finish = |cx: &Lower<'_>, nest: &mut NestBuilder, value: Reg| {
                let input_part = input_products.at_column(NEW * hidden).load(cx, nest);
                let sum = nest.b.add(input_part, value);
                let new = attributes.gate_activation(1).apply(&mut nest.b, sum, stored);
                let [z, reset] = [Z, RESET].map(|gate| gates.at_column(gate * hidden).load(cx, nest));
                let before = load_state(cx, nest, state);
                let active = lengths.step_mask(cx, nest, step);
                targets.store(cx, nest, [z, reset, new], before, active);
            };
            match state {
                Some(h) => {
                    let shape = (batch, 2 * hidden, hidden);
                    emit_product(cx, shape, h, r, |cx, nest, value| apply(cx, nest, value))?;
                    let mut nest = cx.nest(&[batch, hidden], 0);
                    let reset = gates.at_column(RESET * hidden).load(cx, &mut nest);
                    let before = h.load(cx, &mut nest);
                    let value = nest.b.mul(reset, before);
                    reset_state.store(cx, &mut nest, value);
                    cx.emit(nest.instruction())?;
                    let r = r.at_column(NEW * hidden);
                    emit_product(cx, (batch, hidden, hidden), reset_state, r, |cx, nest, value| {
                        finish(cx, nest, value);
                    })?;
                }
                None => {
                    let mut nest = cx.nest(&[batch, 2 * hidden], 0);
                    let initial = load_state(cx, &mut nest, from_zeros);
                    apply(cx, &mut nest, initial);
                    cx.emit(nest.instruction())?;
                    let mut nest = cx.nest(&[batch, hidden], 0);
                    let of_new = from_zeros.map(|zeros| zeros.at_column(NEW * hidden));
                    let initial = load_state(cx, &mut nest, of_new);
                    finish(cx, &mut nest, initial);
                    cx.emit(nest.instruction())?;
                }
            }
        }
        state = output_state.or(new_state);
    }
    Ok(())
}

/// Emits the contribution of the state to the new gate, at all steps: (h Rn' + bias), or r * h, a factor of the gradient
/// of the weights. `first` is the initial state, `all_h` are the later ones.
fn emit_from_state(
    attributes: &Attributes,
    cx: &mut Lower<'_>,
    sizes: &Sizes,
    at: &GradInputs,
    (first, all_h): (Option<Matrix>, Matrix),
    all_gates: Matrix,
) -> Result<Matrix, OpError> {
    let (batch, hidden) = (sizes.batch, sizes.hidden);
    let r = Matrix::rows(cx.input(R), hidden);
    let from_state = alloc_factor(cx, "from_state", sizes.total_rows(), hidden);
    let bias = at.biases.filter(|&k| cx.has_input(k));
    let bias = bias.map(|k| Matrix::broadcast(cx.input(k)).at_column(sizes.rows + NEW * hidden));
    let later = batch * sizes.steps.saturating_sub(1);
    for (rows, from, states) in [(batch.min(sizes.total_rows()), 0, first), (later, batch, Some(all_h))] {
        let target = from_state.at_row(from);
        match states.filter(|_| attributes.linear_before_reset) {
            Some(states) => {
                let r = r.at_row(NEW * hidden).transposed();
                emit_product(cx, (rows, hidden, hidden), states, r, |cx, nest, mut value| {
                    if let Some(bias) = bias {
                        let bias = bias.load(cx, nest);
                        value = nest.b.add(value, bias);
                    }
                    target.store(cx, nest, value);
                })?;
            }
            None => {
                let mut nest = cx.nest(&[rows, hidden], 0);
                let value = if attributes.linear_before_reset {
                    load_state(cx, &mut nest, bias)
                } else {
                    let reset = all_gates.at_row(from).at_column(RESET * hidden).load(cx, &mut nest);
                    let state = load_state(cx, &mut nest, states);
                    nest.b.mul(reset, state)
                };
                target.store(cx, &mut nest, value);
                cx.emit(nest.instruction())?;
            }
        }
    }
    Ok(from_state)
}

/// Returns the gradients of the arguments of the update gate and of the new gate, and the part of `g` that reaches the
/// state before the step directly.
fn gate_gradients(
    attributes: &Attributes,
    b: &mut Builder,
    stored: DType,
    g: Reg,
    [z, new, before]: [Reg; 3],
) -> [Reg; 3] {
    let ty = b.ty(z);
    let one = b.constant(ty, 1.0);
    let difference = b.sub(before, new);
    let of_z = b.mul(g, difference);
    let slope = attributes.gate_activation(0).slope(b, z, stored);
    let of_z = b.mul(of_z, slope);
    let rest = b.sub(one, z);
    let of_new = b.mul(g, rest);
    let slope = attributes.gate_activation(1).slope(b, new, stored);
    let of_new = b.mul(of_new, slope);
    [of_z, of_new, b.mul(g, z)]
}

/// Emits the gradient of the recurrent weights, if it is needed.
fn emit_recurrent_gradient(
    attributes: &Attributes,
    cx: &mut Lower<'_>,
    sizes: &Sizes,
    of_state: Matrix,
    from_state: Matrix,
    states: (Option<Matrix>, Matrix),
) -> Result<(), OpError> {
    let hidden = sizes.hidden;
    if let Some(result) = output_matrix(cx, 2, hidden) {
        if attributes.linear_before_reset {
            emit_product_with_states(cx, sizes, (of_state, sizes.rows), states, result)?;
        } else {
            emit_product_with_states(cx, sizes, (of_state, 2 * hidden), states, result)?;
            let (left, target) = (of_state.at_column(NEW * hidden), result.at_row(NEW * hidden));
            let shape = (hidden, hidden, sizes.total_rows());
            emit_product(cx, shape, left.transposed(), from_state, |cx, nest, value| {
                target.store(cx, nest, value);
            })?;
        }
    }
    Ok(())
}

pub(super) fn lower_grad(attributes: &Attributes, cx: &mut Lower<'_>) -> Result<(), OpError> {
    let sizes = Sizes::from_context(NetKind::Gru, cx);
    let stored = cx.dtype(X);
    let (batch, hidden) = (sizes.batch, sizes.hidden);
    let at = GradInputs::from_kind(NetKind::Gru);
    let lengths = Lengths::new(cx, at.lengths, &sizes)?;
    let r = Matrix::rows(cx.input(R), hidden);
    let first = initial_state(cx, at.states.start, &sizes);
    let all_h = Matrix::rows(cx.input(at.hidden), hidden);
    let all_gates = Matrix::rows(cx.input(at.stored.start), sizes.rows);
    let of_all = initial_state(cx, at.incoming, &sizes);
    let mut of_next = initial_state(cx, at.incoming + 1, &sizes);
    let before_step = |step: usize| if step > 0 { Some(all_h.at_row((step - 1) * batch)) } else { first };

    let from_state = emit_from_state(attributes, cx, &sizes, &at, (first, all_h), all_gates)?;

    // The gradients of the arguments of the gates' activations, and of the products with the state. They differ in the
    // new gate if the reset gate is applied after the product.
    let of_input = alloc_padded(cx, "of_gates", sizes.total_rows(), sizes.rows);
    let of_state = if attributes.linear_before_reset {
        alloc_padded(cx, "of_products", sizes.total_rows(), sizes.rows)
    } else {
        of_input
    };
    for step in (0..sizes.steps).rev() {
        let row = step * batch;
        let result = if step > 0 {
            Some(alloc_temp(cx, "of_hidden", batch, hidden))
        } else {
            output_matrix(cx, 4, hidden)
        };
        let of_step = of_state.at_row(row);
        let direct_part = alloc_temp(cx, "of_hidden_kept", batch, hidden);
        let mut nest = cx.nest(&[batch, hidden], 0);
        let mut g = load_state(cx, &mut nest, of_next);
        if let Some(of_all) = of_all {
            let part = of_all.at_row(row).load(cx, &mut nest);
            g = nest.b.add(part, g);
        }
        let [z, reset, new] =
            [Z, RESET, NEW].map(|gate| all_gates.at_row(row).at_column(gate * hidden).load(cx, &mut nest));
        let before = load_state(cx, &mut nest, before_step(step));
        let active = lengths.step_mask(cx, &mut nest, step);
        let [of_z, of_new, direct] = gate_gradients(attributes, &mut nest.b, stored, g, [z, new, before]);
        let (of_z, of_new) =
            (active_or_zero(&mut nest, active, of_z), active_or_zero(&mut nest, active, of_new));
        of_input.at_row(row).at_column(Z * hidden).store(cx, &mut nest, of_z);
        of_input.at_row(row).at_column(NEW * hidden).store(cx, &mut nest, of_new);
        direct_part.store(cx, &mut nest, direct);
        let gate_slope = |nest: &mut NestBuilder, of_reset: Reg, reset: Reg| {
            let slope = attributes.gate_activation(0).slope(&mut nest.b, reset, stored);
            nest.b.mul(of_reset, slope)
        };
        let finish = |cx: &mut Lower<'_>, nest: &mut NestBuilder, value: Reg, partial: Matrix| {
            let partial_value = partial.load(cx, nest);
            let sum = nest.b.add(partial_value, value);
            let active = lengths.step_mask(cx, nest, step);
            let after = load_state(cx, nest, of_next);
            select_active(nest, active, sum, after)
        };
        if attributes.linear_before_reset {
            let reset_state = from_state.at_row(row).load(cx, &mut nest);
            let of_reset = nest.b.mul(of_new, reset_state);
            let of_reset = gate_slope(&mut nest, of_reset, reset);
            let of_recurrent = nest.b.mul(of_new, reset);
            of_input.at_row(row).at_column(RESET * hidden).store(cx, &mut nest, of_reset);
            for (gate, value) in [(Z, of_z), (RESET, of_reset), (NEW, of_recurrent)] {
                of_step.at_column(gate * hidden).store(cx, &mut nest, value);
            }
            cx.emit(nest.instruction())?;
            if let Some(result) = result {
                emit_product(cx, (batch, hidden, sizes.rows), of_step, r, |cx, nest, value| {
                    let value = finish(cx, nest, value, direct_part);
                    result.store(cx, nest, value);
                })?;
            }
        } else {
            // A separate factor: the product would otherwise write next to its own input.
            let new_gate = alloc_factor(cx, "of_new_gate", batch, hidden);
            new_gate.store(cx, &mut nest, of_new);
            cx.emit(nest.instruction())?;
            // The gradient of r * h has two parts, for r and for h.
            let sums = alloc_temp(cx, "of_hidden_reset", batch, hidden);
            let new_weights = r.at_row(NEW * hidden);
            emit_product(cx, (batch, hidden, hidden), new_gate, new_weights, |cx, nest, value| {
                let reset = all_gates.at_row(row).at_column(RESET * hidden).load(cx, nest);
                let before = load_state(cx, nest, before_step(step));
                let of_reset = nest.b.mul(value, before);
                let of_reset = gate_slope(nest, of_reset, reset);
                of_step.at_column(RESET * hidden).store(cx, nest, of_reset);
                let through = nest.b.mul(value, reset);
                let partial_value = direct_part.load(cx, nest);
                let sum = nest.b.add(partial_value, through);
                sums.store(cx, nest, sum);
            })?;
            if let Some(result) = result {
                emit_product(cx, (batch, hidden, 2 * hidden), of_step, r, |cx, nest, value| {
                    let value = finish(cx, nest, value, sums);
                    result.store(cx, nest, value);
                })?;
            }
        }
        of_next = result;
    }
    if sizes.steps == 0 {
        lower_empty(cx, &[4], &[of_next], &sizes)?;
    }
    emit_recurrent_gradient(attributes, cx, &sizes, of_state, from_state, (first, all_h))?;
    emit_input_gradients(cx, &sizes, of_input, of_state)
}
