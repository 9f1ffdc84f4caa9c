//! Operators of training graphs for recurrent nets, written in plain ONNX: Scans over the steps, forward and backward,
//! with the formulas of the kernels in this folder. Products with the data and gradients of weights run over all steps
//! at once.

use ortrain_graph::{DType, ValueId};

use super::direction::zero_state;
use super::scan_builder::{
    LstmStep, MatrixEmitter, ScanBuilder, compare_with_lengths, emit_lstm_step, step_indices,
};
use crate::OpError;
use crate::families::rnn::net::{Attributes, B, GradInputs, LENGTHS, NetKind, P, R, W, X};
use crate::rewrite::Rewrite;

/// Inputs of the node, without the axis of directions.
struct NetInputs {
    kind: NetKind,
    dtype: DType,
    hidden: usize,
    input: usize,
    x: ValueId,
    w: ValueId,
    r: ValueId,
    /// Mask of the steps within each sequence, `[steps, batch, 1]`.
    active: Option<ValueId>,
    /// Initial states, `[batch, hidden]`.
    states: Vec<ValueId>,
    peepholes: Option<ValueId>,
}

impl NetInputs {
    fn from_rewrite(
        rw: &mut Rewrite<'_>,
        attributes: &Attributes,
        lengths: Option<usize>,
        states: std::ops::Range<usize>,
        peepholes: Option<usize>,
    ) -> Result<NetInputs, OpError> {
        let [x, w, r] = [rw.required_input(X)?, rw.required_input(W)?, rw.required_input(R)?];
        let dtype = rw.dtype(x).ok_or_else(|| OpError::invalid("the type of the data is not known"))?;
        let known =
            |rw: &Rewrite<'_>, k: usize| rw.input(k).and_then(|id| rw.shape(id)).and_then(|s| s[2].known());
        let hidden = attributes.hidden_size.or_else(|| known(rw, R));
        let (Some(hidden), Some(input)) = (hidden, known(rw, W).or_else(|| known(rw, X))) else {
            return Err(OpError::unsupported("the sizes of the weights are not known"));
        };
        let mut first = Vec::new();
        for k in states {
            first.push(match rw.input(k) {
                Some(state) => state,
                None => zero_state(rw, x, hidden, dtype),
            });
        }
        let active = lengths.and_then(|k| rw.input(k)).map(|lengths| {
            let steps = step_indices(rw, x);
            compare_with_lengths(rw, "Less", steps, lengths)
        });
        let peepholes = peepholes.and_then(|k| rw.input(k));
        let mut out = MatrixEmitter { emit: rw.patch().1, dtype };
        let [w, r] = [w, r].map(|weights| out.squeeze(weights, 0));
        let states = first.into_iter().map(|state| out.squeeze(state, 0)).collect();
        let peepholes = peepholes.map(|weights| out.squeeze(weights, 0));
        Ok(NetInputs { kind: attributes.kind, dtype, hidden, input, x, w, r, active, states, peepholes })
    }

    fn emitter<'a>(&self, rw: &'a mut Rewrite<'_>) -> MatrixEmitter<'a, ortrain_graph::Patch> {
        MatrixEmitter { emit: rw.patch().1, dtype: self.dtype }
    }

    /// Returns the state before each step, `[steps, 1, batch, hidden]`: the initial state, then the states after each
    /// step except the last.
    fn states_before(&self, rw: &mut Rewrite<'_>, first: ValueId, after: ValueId) -> ValueId {
        let mut out = self.emitter(rw);
        let after = out.squeeze(after, 1);
        let first = out.unsqueeze(first, 0);
        let states = out.concat(&[first, after], 0);
        out.slice(states, 0, 0, -1)
    }

    fn rows(&self) -> usize {
        self.kind.gate_count() * self.hidden
    }
}

/// Decomposes `LSTMTraining` and `GRUTraining`.
pub(super) fn decompose_training(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let attributes = Attributes::read(rw.node())?;
    let net = NetInputs::from_rewrite(
        rw,
        &attributes,
        Some(LENGTHS),
        attributes.kind.state_inputs(),
        (attributes.kind == NetKind::Lstm).then_some(P),
    )?;
    let (hidden, rows) = (net.hidden, net.rows());
    let biases = rw.input(B);
    let mut out = net.emitter(rw);
    let (wt, rt) = (out.transposed(net.w), out.transposed(net.r));
    let mut products = out.matmul(net.x, wt);
    // With `linear_before_reset`, the recurrent bias is added to the product with the state.
    let mut reset_bias = None;
    if let Some(biases) = biases {
        let biases = out.squeeze(biases, 0);
        let [of_input, of_state] = out.column_groups(biases, rows);
        products = out.add(products, of_input);
        if attributes.kind == NetKind::Gru && attributes.linear_before_reset {
            reset_bias = Some(of_state);
        } else {
            products = out.add(products, of_state);
        }
    }
    let mut steps = ScanBuilder::new("forward", net.dtype);
    let states: Vec<ValueId> =
        net.states.iter().zip(["h", "c"]).map(|(&first, name)| steps.add_carried(name, first)).collect();
    let input_part = steps.add_scanned("x", products);
    let active = net.active.map(|mask| steps.add_scanned("held", mask));
    let r = steps.add_captured("r", rt);
    let (next, collected) = match attributes.kind {
        NetKind::Lstm => {
            let peepholes = net.peepholes.map(|weights| steps.add_captured("p", weights));
            let mut step = steps.emitter();
            let [h, c] = [states[0], states[1]];
            let sums = step.matmul(h, r);
            let sums = step.add(input_part, sums);
            let LstmStep { gates, cell, hidden: value } =
                emit_lstm_step(&mut step, &attributes, hidden, sums, c, peepholes)?;
            let (state, cell) = (step.select_active(active, value, h), step.select_active(active, cell, c));
            let value = step.active_or_zero(active, value);
            let gates = step.concat(&gates, 1);
            (vec![state, cell], vec![value, cell, gates])
        }
        NetKind::Gru => {
            let bias_input = reset_bias.map(|bias| steps.add_captured("rb", bias));
            let h = states[0];
            let mut step = steps.emitter();
            let [xz, xr, xn] = step.column_groups(input_part, hidden);
            let (z, reset, n) = if attributes.linear_before_reset {
                let sums = step.matmul(h, r);
                let sums = step.add_optional(sums, bias_input);
                let [hz, hr, hn] = step.column_groups(sums, hidden);
                let (z, reset) = (step.add(xz, hz), step.add(xr, hr));
                let (z, reset) = (
                    step.emit_activation(attributes.gate_activation(0), z)?,
                    step.emit_activation(attributes.gate_activation(0), reset)?,
                );
                let part = step.mul(reset, hn);
                (z, reset, step.add(xn, part))
            } else {
                let gates = step.slice(r, 1, 0, 2 * hidden as i64);
                let sums = step.matmul(h, gates);
                let [hz, hr] = step.column_groups(sums, hidden);
                let (z, reset) = (step.add(xz, hz), step.add(xr, hr));
                let (z, reset) = (
                    step.emit_activation(attributes.gate_activation(0), z)?,
                    step.emit_activation(attributes.gate_activation(0), reset)?,
                );
                let state = step.mul(reset, h);
                let weights = step.column_group(r, 2, hidden);
                let part = step.matmul(state, weights);
                (z, reset, step.add(xn, part))
            };
            let n = step.emit_activation(attributes.gate_activation(1), n)?;
            let rest = step.one_minus(z);
            let (new, old) = (step.mul(rest, n), step.mul(z, h));
            let value = step.add(new, old);
            let state = step.select_active(active, value, h);
            let value = step.active_or_zero(active, value);
            let gates = step.concat(&[z, reset, n], 1);
            (vec![state], vec![value, gates])
        }
        NetKind::Rnn => return Err(OpError::unsupported("its gradient needs only its results")),
    };
    let results = steps.finish(rw, &next, &collected);
    let (last, stacked) = results.split_at(next.len());
    let mut out = net.emitter(rw);
    let unsqueezed: Vec<ValueId> = stacked.iter().map(|&value| out.unsqueeze(value, 1)).collect();
    let last: Vec<ValueId> = last.iter().map(|&state| out.unsqueeze(state, 0)).collect();
    let outputs = unsqueezed[..1].iter().chain(&last).chain(&unsqueezed[1..]);
    for (k, &value) in outputs.enumerate() {
        rw.replace_output(k, value);
    }
    Ok(())
}

/// Results of the backward steps: the gradients of the initial states, of the input products, and of the products with
/// the states, `[steps, batch, gates * hidden]`. The last two are often the same value.
struct BackwardResults {
    of_states: Vec<ValueId>,
    of_input: ValueId,
    of_state: ValueId,
}

/// Decomposes `RNNGrad`, `GRUGrad` and `LSTMGrad`.
pub(super) fn decompose_grad(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let attributes = Attributes::read(rw.node())?;
    attributes.check_slopes()?;
    let at = GradInputs::from_kind(attributes.kind);
    let net = NetInputs::from_rewrite(rw, &attributes, Some(at.lengths), at.states.clone(), at.peepholes)?;
    let (hidden, rows) = (net.hidden, net.rows());
    let all_h = rw.required_input(at.hidden)?;
    let before = net.states_before(rw, net.states[0], all_h);

    let mut of_last = Vec::new();
    for k in at.incoming + 1..=at.incoming + net.states.len() {
        let arriving = rw.input(k);
        let mut out = net.emitter(rw);
        of_last.push(match arriving {
            Some(arriving) => out.squeeze(arriving, 0),
            None => out.zeros_like(net.states[0]),
        });
    }
    let of_all = rw.input(at.incoming);
    let of_all = of_all.map(|g| net.emitter(rw).squeeze(g, 1));

    let mut steps = ScanBuilder::new("backward", net.dtype).reversed();
    let states: Vec<ValueId> =
        of_last.iter().zip(["of_h", "of_c"]).map(|(&first, name)| steps.add_carried(name, first)).collect();
    let of_all = of_all.map(|g| steps.add_scanned("of_y", g));
    let active = net.active.map(|mask| steps.add_scanned("held", mask));
    let arriving = IncomingGradients { states, of_all, active };
    let BackwardResults { of_states, of_input, of_state } = match attributes.kind {
        NetKind::Rnn => {
            let all_states = net.emitter(rw).squeeze(all_h, 1);
            let y = steps.add_scanned("y", all_states);
            let r = steps.add_captured("r", net.r);
            let mut step = steps.emitter();
            let g = step.add_optional(arriving.states[0], arriving.of_all);
            let gate = step.emit_activation_gradient(g, attributes.gate_activation(0), y)?;
            let gate = step.active_or_zero(active, gate);
            let through = step.matmul(gate, r);
            let of_h = step.select_active(active, through, arriving.states[0]);
            let results = steps.finish(rw, &[of_h], &[gate]);
            BackwardResults { of_states: vec![results[0]], of_input: results[1], of_state: results[1] }
        }
        NetKind::Gru => emit_gru_backward(rw, &attributes, &net, steps, &arriving, before)?,
        NetKind::Lstm => {
            let [cells, gates] =
                [rw.required_input(at.stored.start)?, rw.required_input(at.stored.start + 1)?];
            emit_lstm_backward(rw, &attributes, &net, steps, &arriving, [cells, gates])?
        }
    };

    let gates_result = (attributes.kind == NetKind::Gru && !attributes.linear_before_reset)
        .then(|| rw.required_input(at.stored.start));
    let stored_gates = gates_result.transpose()?;
    let mut out = net.emitter(rw);
    let mut results: Vec<Option<ValueId>> = vec![Some(out.matmul(of_input, net.w))];
    let weights =
        |out: &mut MatrixEmitter<'_, ortrain_graph::Patch>, g: (ValueId, usize), x: (ValueId, usize)| {
            let (g, x) = (out.flatten_steps(g.0, g.1), out.flatten_steps(x.0, x.1));
            let g = out.transposed(g);
            out.matmul(g, x)
        };
    let of_w = weights(&mut out, (of_input, rows), (net.x, net.input));
    results.push(Some(out.unsqueeze(of_w, 0)));
    let of_r = match stored_gates {
        Some(gates) => {
            let of_gates = out.slice(of_state, -1, 0, 2 * hidden as i64);
            let of_gates = weights(&mut out, (of_gates, 2 * hidden), (before, hidden));
            let squeezed_gates = out.squeeze(gates, 1);
            let reset = out.column_group(squeezed_gates, 1, hidden);
            let state = out.mul(reset, before);
            let of_new = out.column_group(of_state, 2, hidden);
            let of_new = weights(&mut out, (of_new, hidden), (state, hidden));
            out.concat(&[of_gates, of_new], 0)
        }
        None => weights(&mut out, (of_state, rows), (before, hidden)),
    };
    results.push(Some(out.unsqueeze(of_r, 0)));
    let biases = [of_input, of_state].map(|g| out.sum_steps_and_batch(g));
    let biases = out.concat(&biases, 0);
    results.push(Some(out.unsqueeze(biases, 0)));
    for state in of_states {
        results.push(Some(out.unsqueeze(state, 0)));
    }
    if attributes.kind == NetKind::Lstm && rw.has_output(results.len()) {
        let cells = rw.required_input(at.stored.start)?;
        let cells_before = net.states_before(rw, net.states[1], cells);
        let mut out = net.emitter(rw);
        let cells = out.squeeze(cells, 1);
        let of_gates: [ValueId; 4] = out.column_groups(of_input, hidden);
        let of_weights: Vec<ValueId> = of_gates
            .into_iter()
            .zip([cells_before, cells, cells_before])
            .map(|(g, cells)| {
                let parts = out.mul(g, cells);
                out.sum_steps_and_batch(parts)
            })
            .collect();
        let of_weights = out.concat(&of_weights, 0);
        results.push(Some(out.unsqueeze(of_weights, 0)));
    }
    for (k, result) in results.into_iter().enumerate() {
        if let Some(result) = result {
            rw.replace_output(k, result);
        }
    }
    Ok(())
}

/// Gradients that arrive at a step.
struct IncomingGradients {
    /// Gradients of the states after the step.
    states: Vec<ValueId>,
    /// Gradient of the step's result.
    of_all: Option<ValueId>,
    active: Option<ValueId>,
}

fn emit_gru_backward(
    rw: &mut Rewrite<'_>,
    attributes: &Attributes,
    net: &NetInputs,
    mut steps: ScanBuilder,
    arriving: &IncomingGradients,
    before: ValueId,
) -> Result<BackwardResults, OpError> {
    let (hidden, active) = (net.hidden, arriving.active);
    let at = GradInputs::from_kind(NetKind::Gru);
    let (stored_gates, biases) = (rw.required_input(at.stored.start)?, at.biases.and_then(|k| rw.input(k)));
    let mut out = net.emitter(rw);
    let squeezed_gates = out.squeeze(stored_gates, 1);
    let gates = steps.add_scanned("gates", squeezed_gates);
    let state = steps.add_scanned("before", before);
    let r = steps.add_captured("r", net.r);
    // The state's contribution to the new gate, at all steps.
    let recurrent = if attributes.linear_before_reset {
        let weights = out.slice(net.r, 0, 2 * hidden as i64, 3 * hidden as i64);
        let weights = out.transposed(weights);
        let mut product = out.matmul(before, weights);
        if let Some(biases) = biases {
            let biases = out.squeeze(biases, 0);
            let bias = out.column_group(biases, 5, hidden);
            product = out.add(product, bias);
        }
        Some(steps.add_scanned("taken", product))
    } else {
        None
    };
    let after = arriving.states[0];
    let mut step = steps.emitter();
    let g = step.add_optional(after, arriving.of_all);
    let [z, reset, n] = step.column_groups(gates, hidden);
    let difference = step.sub(state, n);
    let of_z = step.mul(g, difference);
    let of_z = step.emit_activation_gradient(of_z, attributes.gate_activation(0), z)?;
    let rest = step.one_minus(z);
    let of_new = step.mul(g, rest);
    let of_new = step.emit_activation_gradient(of_new, attributes.gate_activation(1), n)?;
    let direct = step.mul(g, z);
    let (of_z, of_new) = (step.active_or_zero(active, of_z), step.active_or_zero(active, of_new));
    let (of_input, of_state, of_h) = if let Some(recurrent_part) = recurrent {
        let of_reset = step.mul(of_new, recurrent_part);
        let of_reset = step.emit_activation_gradient(of_reset, attributes.gate_activation(0), reset)?;
        let of_recurrent = step.mul(of_new, reset);
        let of_input = step.concat(&[of_z, of_reset, of_new], 1);
        let of_state = step.concat(&[of_z, of_reset, of_recurrent], 1);
        let through = step.matmul(of_state, r);
        (of_input, Some(of_state), step.add(direct, through))
    } else {
        let weights = step.slice(r, 0, 2 * hidden as i64, 3 * hidden as i64);
        let of_product = step.matmul(of_new, weights);
        let of_reset = step.mul(of_product, state);
        let of_reset = step.emit_activation_gradient(of_reset, attributes.gate_activation(0), reset)?;
        let gates = step.concat(&[of_z, of_reset], 1);
        let weights = step.slice(r, 0, 0, 2 * hidden as i64);
        let (through, by_reset) = (step.matmul(gates, weights), step.mul(of_product, reset));
        let sum = step.add(direct, by_reset);
        (step.concat(&[gates, of_new], 1), None, step.add(sum, through))
    };
    let of_h = step.select_active(active, of_h, after);
    let collected: Vec<ValueId> = std::iter::once(of_input).chain(of_state).collect();
    let results = steps.finish(rw, &[of_h], &collected);
    let of_state = results.get(2).copied().unwrap_or(results[1]);
    Ok(BackwardResults { of_states: vec![results[0]], of_input: results[1], of_state })
}

fn emit_lstm_backward(
    rw: &mut Rewrite<'_>,
    attributes: &Attributes,
    net: &NetInputs,
    mut steps: ScanBuilder,
    arriving: &IncomingGradients,
    [cells, gates]: [ValueId; 2],
) -> Result<BackwardResults, OpError> {
    let (hidden, active) = (net.hidden, arriving.active);
    let before = net.states_before(rw, net.states[1], cells);
    let mut out = net.emitter(rw);
    let [cells, gates] = [cells, gates].map(|value| out.squeeze(value, 1));
    let gates = steps.add_scanned("gates", gates);
    let cell = steps.add_scanned("cell", cells);
    let last = steps.add_scanned("before", before);
    let r = steps.add_captured("r", net.r);
    let peepholes = net.peepholes.map(|weights| steps.add_captured("p", weights));
    let (after_h, after_c) = (arriving.states[0], arriving.states[1]);
    let mut step = steps.emitter();
    let peepholes: Option<[ValueId; 3]> = peepholes.map(|weights| step.column_groups(weights, hidden));
    let g = step.add_optional(after_h, arriving.of_all);
    let [i, o, f, c] = step.column_groups(gates, hidden);
    let activated = step.emit_activation(attributes.cell_activation(), cell)?;
    let of_o = step.mul(g, activated);
    let of_o = step.emit_activation_gradient(of_o, attributes.gate_activation(0), o)?;
    let through = step.mul(g, o);
    let through = step.emit_activation_gradient(through, attributes.cell_activation(), activated)?;
    let mut of_new = step.add(after_c, through);
    if let Some([_, weight, _]) = peepholes {
        let part = step.mul(of_o, weight);
        of_new = step.add(of_new, part);
    }
    let of_g = step.mul(of_new, i);
    let of_g = step.emit_activation_gradient(of_g, attributes.gate_activation(1), c)?;
    let (of_i, of_f) = if attributes.input_forget {
        // The forget gate is one minus the input gate.
        let difference = step.sub(c, last);
        (step.mul(of_new, difference), step.zeros_like(f))
    } else {
        let of_f = step.mul(of_new, last);
        (step.mul(of_new, c), step.emit_activation_gradient(of_f, attributes.gate_activation(0), f)?)
    };
    let of_i = step.emit_activation_gradient(of_i, attributes.gate_activation(0), i)?;
    let mut of_last = step.mul(of_new, f);
    if let Some([weight_i, _, weight_f]) = peepholes {
        for (gate, weight) in [(of_i, weight_i), (of_f, weight_f)] {
            let part = step.mul(gate, weight);
            of_last = step.add(of_last, part);
        }
    }
    let of_gates = step.concat(&[of_i, of_o, of_f, of_g], 1);
    let of_gates = step.active_or_zero(active, of_gates);
    let of_h = step.matmul(of_gates, r);
    let of_h = step.select_active(active, of_h, after_h);
    let of_c = step.select_active(active, of_last, after_c);
    let results = steps.finish(rw, &[of_h, of_c], &[of_gates]);
    Ok(BackwardResults { of_states: results[..2].to_vec(), of_input: results[2], of_state: results[2] })
}
