//! `RNN`: `h = f(x W' + h R' + biases)`.

use super::steps::{
    Lengths, Matrix, Sizes, factor, from_zeros, given_state, input_gradients, input_products, load_state,
    lower_nothing, or_zero, output, product, product_with_states, spaced, temp, turned, where_held,
};
use super::{Attributes, B, GradInputs, H0, Kind, LENGTHS, R, X};
use crate::OpError;
use crate::lower::{Lower, NestBuilder};

pub(super) fn lower(own: &Attributes, cx: &mut Lower<'_>) -> Result<(), OpError> {
    let sizes = Sizes::of(Kind::Rnn, cx);
    let stored = cx.dtype(X);
    let lengths = Lengths::new(cx, LENGTHS, &sizes)?;
    let products = input_products(cx, &sizes, Some((B, &[0, sizes.rows])))?;
    let r = Matrix::rows(cx.input(R), sizes.hidden);
    let r = turned(cx, r, &sizes)?;
    let mut state = given_state(cx, H0, &sizes);
    if sizes.steps == 0 {
        return lower_nothing(cx, &[1], &[state], &sizes);
    }
    let from_zeros = from_zeros(cx, &sizes, state)?;
    let (all, last) = (output(cx, 0, sizes.hidden), output(cx, 1, sizes.hidden));
    for step in 0..sizes.steps {
        let row = step * sizes.batch;
        let is_last = step + 1 == sizes.steps;
        let next = (!is_last).then(|| factor(cx, "hidden", sizes.batch, sizes.hidden));
        let finish = |cx: &mut Lower<'_>, nest: &mut NestBuilder, value| {
            let given = products.at_row(row).load(cx, nest);
            let sum = nest.b.add(given, value);
            let h = own.gate(0).apply(&mut nest.b, sum, stored);
            let held = lengths.hold(cx, nest, step);
            let before = load_state(cx, nest, state);
            let kept = where_held(nest, held, h, before);
            let seen = or_zero(nest, held, h);
            for (target, value) in
                [(next, kept), (last.filter(|_| is_last), kept), (all.map(|all| all.at_row(row)), seen)]
            {
                if let Some(target) = target {
                    target.store(cx, nest, value);
                }
            }
        };
        match state {
            Some(h) => {
                product(cx, (sizes.batch, sizes.hidden, sizes.hidden), h, r, finish)?;
            }
            None => {
                let mut nest = cx.nest(&[sizes.batch, sizes.hidden], 0);
                let nothing = load_state(cx, &mut nest, from_zeros);
                finish(cx, &mut nest, nothing);
                cx.emit(nest.instruction())?;
            }
        }
        state = next;
    }
    Ok(())
}

pub(super) fn lower_grad(own: &Attributes, cx: &mut Lower<'_>) -> Result<(), OpError> {
    let sizes = Sizes::of(Kind::Rnn, cx);
    let stored = cx.dtype(X);
    let at = GradInputs::of(Kind::Rnn);
    let lengths = Lengths::new(cx, at.lengths, &sizes)?;
    let r = Matrix::rows(cx.input(R), sizes.hidden);
    let first = given_state(cx, at.states.start, &sizes);
    let hidden = Matrix::rows(cx.input(at.hidden), sizes.hidden);
    let of_all = given_state(cx, at.arriving, &sizes);
    let mut of_next = given_state(cx, at.arriving + 1, &sizes);
    // Gradient of the argument of the activation.
    let gates = spaced(cx, "gates", sizes.all(), sizes.rows);
    for step in (0..sizes.steps).rev() {
        let row = step * sizes.batch;
        let mut nest = cx.nest(&[sizes.batch, sizes.hidden], 0);
        let mut g = load_state(cx, &mut nest, of_next);
        if let Some(of_all) = of_all {
            let part = of_all.at_row(row).load(cx, &mut nest);
            g = nest.b.add(part, g);
        }
        let h = hidden.at_row(row).load(cx, &mut nest);
        let slope = own.gate(0).slope(&mut nest.b, h, stored);
        let gate = nest.b.mul(g, slope);
        let held = lengths.hold(cx, &mut nest, step);
        let gate = or_zero(&mut nest, held, gate);
        gates.at_row(row).store(cx, &mut nest, gate);
        cx.emit(nest.instruction())?;
        let result = if step > 0 {
            Some(temp(cx, "of_hidden", sizes.batch, sizes.hidden))
        } else {
            output(cx, 4, sizes.hidden)
        };
        if let Some(result) = result {
            let shape = (sizes.batch, sizes.hidden, sizes.rows);
            product(cx, shape, gates.at_row(row), r, |cx, nest, value| {
                let held = lengths.hold(cx, nest, step);
                let after = load_state(cx, nest, of_next);
                let value = where_held(nest, held, value, after);
                result.store(cx, nest, value);
            })?;
        }
        of_next = result;
    }
    if sizes.steps == 0 {
        lower_nothing(cx, &[4], &[of_next], &sizes)?;
    }
    if let Some(result) = output(cx, 2, sizes.hidden) {
        product_with_states(cx, &sizes, (gates, sizes.rows), (first, hidden), result)?;
    }
    input_gradients(cx, &sizes, gates, gates)
}
