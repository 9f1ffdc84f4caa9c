//! `LSTM`, with the gates input i, output o, forget f and cell c:
//!
//! ```text
//! i = f(x Wi' + h Ri' + Pi * C + biases)       C := f * C + i * c
//! f = f(x Wf' + h Rf' + Pf * C + biases)       o = f(x Wo' + h Ro' + Po * C + biases)
//! c = g(x Wc' + h Rc' + biases)                h := o * h(C)
//! ```

use super::steps::{
    Lengths, Matrix, Sizes, active_or_zero, alloc_factor, alloc_padded, alloc_temp, compute_dtype,
    emit_bias_sum, emit_column_sums, emit_input_gradients, emit_input_products, emit_plain_product,
    emit_product, emit_product_with_states, fill_zeros, initial_state, load_state, load_sum, lower_empty,
    output_matrix, select_active, transpose_weights, zero_state_products,
};
use crate::OpError;
use crate::families::rnn::net::{Attributes, B, C0, GradInputs, H0, LENGTHS, NetKind, P, R, X};
use crate::lower::{Lower, NestBuilder};

/// Indices of the gates.
const I: usize = 0;
const O: usize = 1;
const F: usize = 2;
const C: usize = 3;

/// Gates of the peephole weights, in their order.
const PEEPHOLE_GATES: [usize; 3] = [I, O, F];

pub(super) fn lower(attributes: &Attributes, cx: &mut Lower<'_>) -> Result<(), OpError> {
    let sizes = Sizes::from_context(NetKind::Lstm, cx);
    let stored = cx.dtype(X);
    let (batch, hidden) = (sizes.batch, sizes.hidden);
    let lengths = Lengths::new(cx, LENGTHS, &sizes)?;
    let products = emit_input_products(cx, &sizes, None)?;
    let bias = emit_bias_sum(cx, B, &sizes)?;
    let r = Matrix::rows(cx.input(R), hidden);
    let r = transpose_weights(cx, r, &sizes)?;
    let peepholes = cx.has_input(P).then(|| Matrix::broadcast(cx.input(P)));
    let (mut h, mut c) = (initial_state(cx, H0, &sizes), initial_state(cx, C0, &sizes));
    if sizes.steps == 0 {
        return lower_empty(cx, &[1, 2], &[h, c], &sizes);
    }
    let from_zeros = zero_state_products(cx, &sizes, h)?;
    let results = [output_matrix(cx, 0, hidden), output_matrix(cx, 3, hidden)];
    let finals = [output_matrix(cx, 1, hidden), output_matrix(cx, 2, hidden)];
    let stored_gates = output_matrix(cx, 4, sizes.rows);
    for step in 0..sizes.steps {
        let row = step * batch;
        let is_last = step + 1 == sizes.steps;
        let from_state = match h {
            Some(h) => Some(emit_plain_product(cx, "gates", (batch, sizes.rows, hidden), h, r)?),
            None => from_zeros,
        };
        let [all_h, all_c] = results.map(|outputs| outputs.map(|output| output.at_row(row)));
        // States that equal the results need no buffers of their own.
        let output_h = all_h.filter(|_| !lengths.are_present());
        let output_c = all_c.filter(|_| compute_dtype(cx) == cx.dtype(X));
        let new_h = (!is_last && output_h.is_none()).then(|| alloc_factor(cx, "hidden", batch, hidden));
        let new_c = (!is_last && output_c.is_none()).then(|| alloc_temp(cx, "cell", batch, hidden));
        let mut nest = cx.nest(&[batch, hidden], 0);
        let before = (load_state(cx, &mut nest, h), load_state(cx, &mut nest, c));
        let argument = |cx: &mut Lower<'_>, nest: &mut NestBuilder, gate: usize, cell| {
            let terms = [Some(products.at_row(row)), bias, from_state];
            let sum = load_sum(cx, nest, &terms, gate * hidden);
            match peepholes.filter(|_| gate != C) {
                Some(peepholes) => {
                    let at = PEEPHOLE_GATES.iter().position(|&other| other == gate).unwrap_or(0);
                    let weight = peepholes.at_column(at * hidden).load(cx, nest);
                    let part = nest.b.mul(weight, cell);
                    nest.b.add(sum, part)
                }
                None => sum,
            }
        };
        let i = argument(cx, &mut nest, I, before.1);
        let i = attributes.gate_activation(0).apply(&mut nest.b, i, stored);
        let f = if attributes.input_forget {
            let ty = nest.b.ty(i);
            let one = nest.b.constant(ty, 1.0);
            nest.b.sub(one, i)
        } else {
            let f = argument(cx, &mut nest, F, before.1);
            attributes.gate_activation(0).apply(&mut nest.b, f, stored)
        };
        let g = argument(cx, &mut nest, C, before.1);
        let g = attributes.gate_activation(1).apply(&mut nest.b, g, stored);
        let (old, new) = (nest.b.mul(f, before.1), nest.b.mul(i, g));
        let cell = nest.b.add(old, new);
        let o = argument(cx, &mut nest, O, cell);
        let o = attributes.gate_activation(0).apply(&mut nest.b, o, stored);
        let activated = attributes.cell_activation().apply(&mut nest.b, cell, stored);
        let value = nest.b.mul(o, activated);
        let active = lengths.step_mask(cx, &mut nest, step);
        let after = (
            select_active(&mut nest, active, value, before.0),
            select_active(&mut nest, active, cell, before.1),
        );
        let value = active_or_zero(&mut nest, active, value);
        let [final_h, final_c] = finals.map(|last| last.filter(|_| is_last));
        for (target, value) in [
            (new_h, after.0),
            (new_c, after.1),
            (final_h, after.0),
            (final_c, after.1),
            (all_h, value),
            (all_c, after.1),
        ] {
            if let Some(target) = target {
                target.store(cx, &mut nest, value);
            }
        }
        if let Some(gates) = stored_gates {
            for (gate, value) in [(I, i), (O, o), (F, f), (C, g)] {
                gates.at_row(row).at_column(gate * hidden).store(cx, &mut nest, value);
            }
        }
        cx.emit(nest.instruction())?;
        (h, c) = (output_h.or(new_h), output_c.or(new_c));
    }
    Ok(())
}

pub(super) fn lower_grad(attributes: &Attributes, cx: &mut Lower<'_>) -> Result<(), OpError> {
    let sizes = Sizes::from_context(NetKind::Lstm, cx);
    let stored = cx.dtype(X);
    let (batch, hidden) = (sizes.batch, sizes.hidden);
    let at = GradInputs::from_kind(NetKind::Lstm);
    let lengths = Lengths::new(cx, at.lengths, &sizes)?;
    let r = Matrix::rows(cx.input(R), hidden);
    let peepholes = at.peepholes.filter(|&k| cx.has_input(k)).map(|k| Matrix::broadcast(cx.input(k)));
    let first_h = initial_state(cx, at.states.start, &sizes);
    let first_c = initial_state(cx, at.states.start + 1, &sizes);
    let all_h = Matrix::rows(cx.input(at.hidden), hidden);
    let all_gates = Matrix::rows(cx.input(at.stored.start + 1), sizes.rows);
    let all_c = if cx.has_input(at.stored.start) {
        Matrix::rows(cx.input(at.stored.start), hidden)
    } else {
        return Err(OpError::invalid("the input of the cell states at all steps is missing"));
    };
    let of_all = initial_state(cx, at.incoming, &sizes);
    let mut of_h = initial_state(cx, at.incoming + 1, &sizes);
    let mut of_c = initial_state(cx, at.incoming + 2, &sizes);
    // Gradients of the arguments of the gates' activations.
    let gates = alloc_padded(cx, "of_gates", sizes.total_rows(), sizes.rows);
    for step in (0..sizes.steps).rev() {
        let row = step * batch;
        let [before_h, before_c] = if step > 0 {
            [4, 5].map(|_| Some(alloc_temp(cx, "of_state", batch, hidden)))
        } else {
            [output_matrix(cx, 4, hidden), output_matrix(cx, 5, hidden)]
        };
        let mut nest = cx.nest(&[batch, hidden], 0);
        let of_cell = load_state(cx, &mut nest, of_c);
        let mut g = load_state(cx, &mut nest, of_h);
        if let Some(of_all) = of_all {
            let part = of_all.at_row(row).load(cx, &mut nest);
            g = nest.b.add(part, g);
        }
        let [i, o, f, c] =
            [I, O, F, C].map(|gate| all_gates.at_row(row).at_column(gate * hidden).load(cx, &mut nest));
        let cell = all_c.at_row(row).load(cx, &mut nest);
        let last = if step > 0 { Some(all_c.at_row(row - batch)) } else { first_c };
        let last = load_state(cx, &mut nest, last);
        let weight = |cx: &mut Lower<'_>, nest: &mut NestBuilder, k: usize| {
            peepholes.map(|peepholes| peepholes.at_column(k * hidden).load(cx, nest))
        };
        let weights = [0, 1, 2].map(|k| weight(cx, &mut nest, k));
        let b = &mut nest.b;
        let activated = attributes.cell_activation().apply(b, cell, stored);
        let of_o = b.mul(g, activated);
        let slope = attributes.gate_activation(0).slope(b, o, stored);
        let of_o = b.mul(of_o, slope);
        let slope = attributes.cell_activation().slope(b, activated, stored);
        let through = b.mul(g, o);
        let through = b.mul(through, slope);
        let mut of_new = b.add(of_cell, through);
        if let Some(weight) = weights[1] {
            let part = b.mul(of_o, weight);
            of_new = b.add(of_new, part);
        }
        let of_g = b.mul(of_new, i);
        let slope = attributes.gate_activation(1).slope(b, c, stored);
        let of_g = b.mul(of_g, slope);
        let (of_i, of_f) = if attributes.input_forget {
            // The forget gate is one minus the input gate.
            let difference = b.sub(c, last);
            let ty = b.ty(c);
            (b.mul(of_new, difference), b.constant(ty, 0.0))
        } else {
            let of_f = b.mul(of_new, last);
            let slope = attributes.gate_activation(0).slope(b, f, stored);
            (b.mul(of_new, c), b.mul(of_f, slope))
        };
        let slope = attributes.gate_activation(0).slope(b, i, stored);
        let of_i = b.mul(of_i, slope);
        let mut of_last = b.mul(of_new, f);
        for (gate, weight) in [(of_i, weights[0]), (of_f, weights[2])] {
            if let Some(weight) = weight {
                let part = b.mul(gate, weight);
                of_last = b.add(of_last, part);
            }
        }
        let active = lengths.step_mask(cx, &mut nest, step);
        for (gate, value) in [(I, of_i), (O, of_o), (F, of_f), (C, of_g)] {
            let value = active_or_zero(&mut nest, active, value);
            gates.at_row(row).at_column(gate * hidden).store(cx, &mut nest, value);
        }
        if let Some(target) = before_c {
            let value = select_active(&mut nest, active, of_last, of_cell);
            target.store(cx, &mut nest, value);
        }
        cx.emit(nest.instruction())?;
        if let Some(target) = before_h {
            emit_product(cx, (batch, hidden, sizes.rows), gates.at_row(row), r, |cx, nest, value| {
                let active = lengths.step_mask(cx, nest, step);
                let after = load_state(cx, nest, of_h);
                let value = select_active(nest, active, value, after);
                target.store(cx, nest, value);
            })?;
        }
        (of_h, of_c) = (before_h, before_c);
    }
    if sizes.steps == 0 {
        lower_empty(cx, &[4, 5], &[of_h, of_c], &sizes)?;
    }
    if let Some(result) = output_matrix(cx, 2, hidden) {
        emit_product_with_states(cx, &sizes, (gates, sizes.rows), (first_h, all_h), result)?;
    }
    if let Some(result) = output_matrix(cx, 6, 3 * hidden) {
        emit_peephole_gradients(cx, &sizes, gates, (first_c, all_c), result)?;
    }
    emit_input_gradients(cx, &sizes, gates, gates)
}

/// Emits the gradients of the peephole weights: sums over rows of the gradient of a gate times the cell state. This is
/// the cell state before the step, or after the step for the output gate.
fn emit_peephole_gradients(
    cx: &mut Lower<'_>,
    sizes: &Sizes,
    gates: Matrix,
    (first, total): (Option<Matrix>, Matrix),
    result: Matrix,
) -> Result<(), OpError> {
    let (batch, hidden) = (sizes.batch, sizes.hidden);
    for (k, gate) in PEEPHOLE_GATES.into_iter().enumerate() {
        let gate_rows = gates.at_column(gate * hidden);
        let target = result.at_column(k * hidden);
        let later = sizes.total_rows() - batch.min(sizes.total_rows());
        let parts: Vec<(Matrix, Matrix, usize)> = if gate == O {
            vec![(gate_rows, total, sizes.total_rows())]
        } else {
            let first = first.filter(|_| sizes.steps > 0).map(|first| (gate_rows, first, batch));
            first.into_iter().chain((later > 0).then(|| (gate_rows.at_row(batch), total, later))).collect()
        };
        if parts.is_empty() {
            fill_zeros(cx, (1, hidden), target)?;
        }
        let mut sum: Option<Matrix> = None;
        for (index, &(gate, state, rows)) in parts.iter().enumerate() {
            let to = if index + 1 == parts.len() { target } else { alloc_temp(cx, "first_step", 1, hidden) };
            emit_column_sums(cx, (rows, hidden), &[to], sum, |cx, nest| {
                let (gate, state) = (gate.transposed().load(cx, nest), state.transposed().load(cx, nest));
                nest.b.mul(gate, state)
            })?;
            sum = Some(to);
        }
    }
    Ok(())
}
