//! `RNN`: `h = f(x W' + h R' + biases)`.

use super::steps::{
    Lengths, Matrix, Sizes, active_or_zero, alloc_factor, alloc_padded, alloc_temp, emit_input_gradients,
    emit_input_products, emit_product, emit_product_with_states, initial_state, load_state, lower_empty,
    output_matrix, select_active, transpose_weights, zero_state_products,
};
use crate::OpError;
use crate::families::rnn::net::{Attributes, B, GradInputs, H0, LENGTHS, NetKind, R, X};
use crate::lower::{Lower, NestBuilder};

pub(super) fn lower(attributes: &Attributes, cx: &mut Lower<'_>) -> Result<(), OpError> {
    let sizes = Sizes::from_context(NetKind::Rnn, cx);
    let stored = cx.dtype(X);
    let lengths = Lengths::new(cx, LENGTHS, &sizes)?;
    let products = emit_input_products(cx, &sizes, Some((B, &[0, sizes.rows])))?;
    let r = Matrix::rows(cx.input(R), sizes.hidden);
    let r = transpose_weights(cx, r, &sizes)?;
    let mut state = initial_state(cx, H0, &sizes);
    if sizes.steps == 0 {
        return lower_empty(cx, &[1], &[state], &sizes);
    }
    let from_zeros = zero_state_products(cx, &sizes, state)?;
    let (all_steps, last) = (output_matrix(cx, 0, sizes.hidden), output_matrix(cx, 1, sizes.hidden));
    for step in 0..sizes.steps {
        let row = step * sizes.batch;
        let is_last = step + 1 == sizes.steps;
        let next = (!is_last).then(|| alloc_factor(cx, "hidden", sizes.batch, sizes.hidden));
        let finish = |cx: &mut Lower<'_>, nest: &mut NestBuilder, value| {
            let input_part = products.at_row(row).load(cx, nest);
            let sum = nest.b.add(input_part, value);
            let h = attributes.gate_activation(0).apply(&mut nest.b, sum, stored);
            let active = lengths.step_mask(cx, nest, step);
            let before = load_state(cx, nest, state);
            let new_state = select_active(nest, active, h, before);
            let output = active_or_zero(nest, active, h);
            for (target, value) in [
                (next, new_state),
                (last.filter(|_| is_last), new_state),
                (all_steps.map(|row_output| row_output.at_row(row)), output),
            ] {
                if let Some(target) = target {
                    target.store(cx, nest, value);
                }
            }
        };
        match state {
            Some(h) => {
                emit_product(cx, (sizes.batch, sizes.hidden, sizes.hidden), h, r, finish)?;
            }
            None => {
                let mut nest = cx.nest(&[sizes.batch, sizes.hidden], 0);
                let initial = load_state(cx, &mut nest, from_zeros);
                finish(cx, &mut nest, initial);
                cx.emit(nest.instruction())?;
            }
        }
        state = next;
    }
    Ok(())
}

pub(super) fn lower_grad(attributes: &Attributes, cx: &mut Lower<'_>) -> Result<(), OpError> {
    let sizes = Sizes::from_context(NetKind::Rnn, cx);
    let stored = cx.dtype(X);
    let at = GradInputs::from_kind(NetKind::Rnn);
    let lengths = Lengths::new(cx, at.lengths, &sizes)?;
    let r = Matrix::rows(cx.input(R), sizes.hidden);
    let first = initial_state(cx, at.states.start, &sizes);
    let hidden = Matrix::rows(cx.input(at.hidden), sizes.hidden);
    let of_all = initial_state(cx, at.incoming, &sizes);
    let mut of_next = initial_state(cx, at.incoming + 1, &sizes);
    // Gradient of the argument of the activation.
    let gates = alloc_padded(cx, "gates", sizes.total_rows(), sizes.rows);
    for step in (0..sizes.steps).rev() {
        let row = step * sizes.batch;
        let mut nest = cx.nest(&[sizes.batch, sizes.hidden], 0);
        let mut g = load_state(cx, &mut nest, of_next);
        if let Some(of_all) = of_all {
            let part = of_all.at_row(row).load(cx, &mut nest);
            g = nest.b.add(part, g);
        }
        let h = hidden.at_row(row).load(cx, &mut nest);
        let slope = attributes.gate_activation(0).slope(&mut nest.b, h, stored);
        let gate = nest.b.mul(g, slope);
        let active = lengths.step_mask(cx, &mut nest, step);
        let gate = active_or_zero(&mut nest, active, gate);
        gates.at_row(row).store(cx, &mut nest, gate);
        cx.emit(nest.instruction())?;
        let result = if step > 0 {
            Some(alloc_temp(cx, "of_hidden", sizes.batch, sizes.hidden))
        } else {
            output_matrix(cx, 4, sizes.hidden)
        };
        if let Some(result) = result {
            let shape = (sizes.batch, sizes.hidden, sizes.rows);
            emit_product(cx, shape, gates.at_row(row), r, |cx, nest, value| {
                let active = lengths.step_mask(cx, nest, step);
                let after = load_state(cx, nest, of_next);
                let value = select_active(nest, active, value, after);
                result.store(cx, nest, value);
            })?;
        }
        of_next = result;
    }
    if sizes.steps == 0 {
        lower_empty(cx, &[4], &[of_next], &sizes)?;
    }
    if let Some(result) = output_matrix(cx, 2, sizes.hidden) {
        emit_product_with_states(cx, &sizes, (gates, sizes.rows), (first, hidden), result)?;
    }
    emit_input_gradients(cx, &sizes, gates, gates)
}
