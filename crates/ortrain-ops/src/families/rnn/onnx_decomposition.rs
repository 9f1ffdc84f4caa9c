//! Operators of training graphs for recurrent nets, written in plain ONNX: Scans over the steps, forward and backward,
//! with the formulas of the kernels in this folder. Products with the data and gradients of weights run over all steps
//! at once.

use ortrain_expr::{Builder, Reg, Type};
use ortrain_graph::{Attrs, DType, Graph, Tensor, ValueId, ValueType};

use super::activation::Clipped;
use super::direction::no_state;
use super::{Attributes, B, GradInputs, Kind, LENGTHS, P, R, W, X};
use crate::OpError;
use crate::onnx_decomposition::{NodeSink, emit_as_onnx};
use crate::rewrite::Rewrite;

/// Emitter of operators on matrices `[batch, columns]`, and on matrices of all steps, `[steps, batch, columns]`.
struct Words<'a, E: NodeSink> {
    emit: &'a mut E,
    dtype: DType,
}

impl<E: NodeSink> Words<'_, E> {
    fn node(&mut self, op: &str, inputs: &[ValueId], attrs: Attrs) -> ValueId {
        let inputs: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
        self.emit.emit(op, &inputs, attrs)
    }

    fn ints(&mut self, values: &[i64]) -> ValueId {
        self.emit.emit_constant(Tensor::i64(&[values.len()], values))
    }

    fn number(&mut self, value: f64) -> ValueId {
        self.emit.emit_constant(Tensor::scalar(self.dtype, value))
    }

    fn pair(&mut self, op: &str, a: ValueId, b: ValueId) -> ValueId {
        self.node(op, &[a, b], Attrs::new())
    }

    fn add(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.pair("Add", a, b)
    }

    fn sub(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.pair("Sub", a, b)
    }

    fn mul(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.pair("Mul", a, b)
    }

    fn product(&mut self, a: ValueId, b: ValueId) -> ValueId {
        self.pair("MatMul", a, b)
    }

    /// Emits `1 - a`.
    fn rest(&mut self, a: ValueId) -> ValueId {
        let one = self.number(1.0);
        self.sub(one, a)
    }

    fn added(&mut self, a: ValueId, b: Option<ValueId>) -> ValueId {
        b.map_or(a, |b| self.add(a, b))
    }

    /// Selects `yes` within the sequences and `no` after their ends; `yes` everywhere without lengths.
    fn where_held(&mut self, held: Option<ValueId>, yes: ValueId, no: ValueId) -> ValueId {
        held.map_or(yes, |held| self.node("Where", &[held, yes, no], Attrs::new()))
    }

    fn or_zero(&mut self, held: Option<ValueId>, value: ValueId) -> ValueId {
        if held.is_none() {
            return value;
        }
        let zero = self.number(0.0);
        self.where_held(held, value, zero)
    }

    fn zeros_like(&mut self, value: ValueId) -> ValueId {
        let shape = self.node("Shape", &[value], Attrs::new());
        let zero = Tensor::filled(self.dtype, &[1], 0.0);
        self.node("ConstantOfShape", &[shape], Attrs::new().with("value", zero))
    }

    fn slice(&mut self, value: ValueId, axis: i64, from: i64, to: i64) -> ValueId {
        let [starts, ends, axes] = [from, to, axis].map(|number| self.ints(&[number]));
        self.node("Slice", &[value, starts, ends, axes], Attrs::new())
    }

    /// Slices part `index` of adjacent groups of columns.
    fn part(&mut self, value: ValueId, index: usize, width: usize) -> ValueId {
        let from = (index * width) as i64;
        self.slice(value, -1, from, from + width as i64)
    }

    fn parts<const N: usize>(&mut self, value: ValueId, width: usize) -> [ValueId; N] {
        std::array::from_fn(|index| self.part(value, index, width))
    }

    fn concat(&mut self, parts: &[ValueId], axis: i64) -> ValueId {
        self.node("Concat", parts, Attrs::new().with("axis", axis))
    }

    fn squeeze(&mut self, value: ValueId, axis: i64) -> ValueId {
        let axes = self.ints(&[axis]);
        self.pair("Squeeze", value, axes)
    }

    fn unsqueeze(&mut self, value: ValueId, axis: i64) -> ValueId {
        let axes = self.ints(&[axis]);
        self.pair("Unsqueeze", value, axes)
    }

    fn transposed(&mut self, matrix: ValueId) -> ValueId {
        self.node("Transpose", &[matrix], Attrs::new().with("perm", vec![1i64, 0]))
    }

    /// Concatenates the matrices of all steps along the rows.
    fn flat(&mut self, value: ValueId, columns: usize) -> ValueId {
        let shape = self.ints(&[-1, columns as i64]);
        self.pair("Reshape", value, shape)
    }

    /// Sums over steps and batch.
    fn sums(&mut self, value: ValueId) -> ValueId {
        let axes = self.ints(&[0, 1]);
        self.node("ReduceSum", &[value, axes], Attrs::new().with("keepdims", 0i64))
    }

    /// Emits a function of one number as nodes.
    fn function(&mut self, x: ValueId, f: impl FnOnce(&mut Builder, Reg) -> Reg) -> Result<ValueId, OpError> {
        let mut b = Builder::new();
        let given = b.load(0, Type::of(self.dtype));
        let result = f(&mut b, given);
        emit_as_onnx(&b.finish(&[result]), self.dtype, self.emit, |_, _| x)
    }

    fn applied(&mut self, activation: Clipped, x: ValueId) -> Result<ValueId, OpError> {
        let stored = self.dtype;
        self.function(x, |b, x| activation.apply(b, x, stored))
    }

    /// Multiplies a gradient by the slope of an activation at the result `y`.
    fn behind(&mut self, g: ValueId, activation: Clipped, y: ValueId) -> Result<ValueId, OpError> {
        let stored = self.dtype;
        let slope = self.function(y, |b, y| activation.slope(b, y, stored))?;
        Ok(self.mul(g, slope))
    }
}

/// The body of a Scan over the steps, with its inputs.
struct Steps {
    body: Graph,
    dtype: DType,
    carried: Vec<ValueId>,
    scanned: Vec<(ValueId, ValueId)>,
    captured: Vec<(ValueId, ValueId)>,
    /// True if the last step comes first.
    reversed: bool,
}

impl Steps {
    fn words(&mut self) -> Words<'_, Graph> {
        Words { emit: &mut self.body, dtype: self.dtype }
    }

    /// Adds a carried state with the initial value `outside`.
    fn carries(&mut self, name: &str, outside: ValueId) -> ValueId {
        self.carried.push(outside);
        let inside = self.body.add_value(name, ValueType::Unknown);
        self.body.inputs.push(inside);
        inside
    }

    /// Adds a scanned value: each step reads its slice. All states must be added before.
    fn scans(&mut self, name: &str, outside: ValueId) -> ValueId {
        let inside = self.body.add_value(name, ValueType::Unknown);
        self.scanned.push((outside, inside));
        inside
    }

    /// Adds a value that is the same at all steps.
    fn captures(&mut self, name: &str, outside: ValueId) -> ValueId {
        let inside = self.body.add_value(name, ValueType::Unknown);
        self.captured.push((outside, inside));
        inside
    }

    /// Adds the Scan; returns the last states, then the collected values.
    fn finish(mut self, rw: &mut Rewrite<'_>, states: &[ValueId], collected: &[ValueId]) -> Vec<ValueId> {
        let inner = self.scanned.iter().chain(&self.captured).map(|&(_, inside)| inside);
        self.body.inputs.extend(inner);
        self.body.outputs = states.iter().chain(collected).copied().collect();
        // An output must be a separate value: not an input, and not another output.
        let mut seen = self.body.inputs.clone();
        for k in 0..self.body.outputs.len() {
            let output = self.body.outputs[k];
            if seen.contains(&output) {
                let copy = self.body.emit("Identity", &[Some(output)], Attrs::new());
                self.body.outputs[k] = copy;
            }
            seen.push(self.body.outputs[k]);
        }
        let (_, patch) = rw.patch();
        let prefix = format!("{}{}/", patch.prefix(), if self.reversed { "backward" } else { "forward" });
        self.body.name = prefix.clone();
        for id in self.body.value_ids() {
            let name = format!("{prefix}{}", self.body.name_of(id));
            self.body.rename(id, &name);
        }
        let direction = |count: usize| vec![i64::from(self.reversed); count];
        let attrs = Attrs::new()
            .with("num_scan_inputs", self.scanned.len() as i64)
            .with("scan_input_directions", direction(self.scanned.len()))
            .with("scan_output_directions", direction(collected.len()))
            .with("body", self.body);
        let outside = self.scanned.iter().chain(&self.captured).map(|&(outside, _)| outside);
        let inputs: Vec<Option<ValueId>> = self.carried.iter().copied().chain(outside).map(Some).collect();
        let results = patch.node_with_outputs("", "Scan", &inputs, states.len() + collected.len(), attrs);
        patch.nodes.last_mut().expect("just added").captures = self.captured.len();
        results
    }
}

/// Inputs of the node, without the axis of directions.
struct Net {
    kind: Kind,
    dtype: DType,
    hidden: usize,
    input: usize,
    x: ValueId,
    w: ValueId,
    r: ValueId,
    /// Mask of the steps within each sequence, `[steps, batch, 1]`.
    held: Option<ValueId>,
    /// Initial states, `[batch, hidden]`.
    states: Vec<ValueId>,
    peepholes: Option<ValueId>,
}

impl Net {
    fn of(
        rw: &mut Rewrite<'_>,
        own: &Attributes,
        lengths: Option<usize>,
        states: std::ops::Range<usize>,
        peepholes: Option<usize>,
    ) -> Result<Net, OpError> {
        let [x, w, r] = [rw.required(X)?, rw.required(W)?, rw.required(R)?];
        let dtype = rw.dtype(x).ok_or_else(|| OpError::invalid("the type of the data is not known"))?;
        let known =
            |rw: &Rewrite<'_>, k: usize| rw.input(k).and_then(|id| rw.shape(id)).and_then(|s| s[2].known());
        let hidden = own.hidden_size.or_else(|| known(rw, R));
        let (Some(hidden), Some(input)) = (hidden, known(rw, W).or_else(|| known(rw, X))) else {
            return Err(OpError::unsupported("the sizes of the weights are not known"));
        };
        let mut first = Vec::new();
        for k in states {
            first.push(match rw.input(k) {
                Some(state) => state,
                None => no_state(rw, x, hidden, dtype),
            });
        }
        let held = lengths.and_then(|k| rw.input(k)).map(|lengths| {
            let shape = rw.add("Shape", &[x], Attrs::new().with("end", 1i64));
            let steps = rw.count_up(shape);
            let mut out = Words { emit: rw.patch().1, dtype };
            let to = i64::from(DType::I64.to_onnx());
            let lengths = out.node("Cast", &[lengths], Attrs::new().with("to", to));
            let steps = out.unsqueeze(steps, 1);
            let held = out.pair("Less", steps, lengths);
            out.unsqueeze(held, 2)
        });
        let peepholes = peepholes.and_then(|k| rw.input(k));
        let mut out = Words { emit: rw.patch().1, dtype };
        let [w, r] = [w, r].map(|weights| out.squeeze(weights, 0));
        let states = first.into_iter().map(|state| out.squeeze(state, 0)).collect();
        let peepholes = peepholes.map(|weights| out.squeeze(weights, 0));
        Ok(Net { kind: own.kind, dtype, hidden, input, x, w, r, held, states, peepholes })
    }

    fn words<'a>(&self, rw: &'a mut Rewrite<'_>) -> Words<'a, ortrain_graph::Patch> {
        Words { emit: rw.patch().1, dtype: self.dtype }
    }

    fn steps(&self, reversed: bool) -> Steps {
        Steps {
            body: Graph::new("steps"),
            dtype: self.dtype,
            carried: Vec::new(),
            scanned: Vec::new(),
            captured: Vec::new(),
            reversed,
        }
    }

    /// Returns the state before each step, `[steps, 1, batch, hidden]`: the initial state, then the states after each
    /// step except the last.
    fn before(&self, rw: &mut Rewrite<'_>, first: ValueId, after: ValueId) -> ValueId {
        let mut out = self.words(rw);
        let after = out.squeeze(after, 1);
        let first = out.unsqueeze(first, 0);
        let all = out.concat(&[first, after], 0);
        out.slice(all, 0, 0, -1)
    }

    fn rows(&self) -> usize {
        self.kind.gates() * self.hidden
    }
}

/// Decomposes `LSTMTraining` and `GRUTraining`.
pub(super) fn decompose_training(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let own = Attributes::read(rw.node())?;
    let net = Net::of(rw, &own, Some(LENGTHS), own.kind.states(), (own.kind == Kind::Lstm).then_some(P))?;
    let (hidden, rows) = (net.hidden, net.rows());
    let biases = rw.input(B);
    let mut out = net.words(rw);
    let (wt, rt) = (out.transposed(net.w), out.transposed(net.r));
    let mut products = out.product(net.x, wt);
    // With `linear_before_reset`, the recurrent bias is added to the product with the state.
    let mut behind = None;
    if let Some(biases) = biases {
        let biases = out.squeeze(biases, 0);
        let [of_input, of_state] = out.parts(biases, rows);
        products = out.add(products, of_input);
        if own.kind == Kind::Gru && own.linear_before_reset {
            behind = Some(of_state);
        } else {
            products = out.add(products, of_state);
        }
    }
    let mut steps = net.steps(false);
    let states: Vec<ValueId> =
        net.states.iter().zip(["h", "c"]).map(|(&first, name)| steps.carries(name, first)).collect();
    let given = steps.scans("x", products);
    let held = net.held.map(|held| steps.scans("held", held));
    let r = steps.captures("r", rt);
    let (next, collected) = match own.kind {
        Kind::Lstm => {
            let peepholes = net.peepholes.map(|weights| steps.captures("p", weights));
            let mut step = steps.words();
            let [h, c] = [states[0], states[1]];
            let sums = step.product(h, r);
            let sums = step.add(given, sums);
            let [mut i, mut o, mut f, g] = step.parts(sums, hidden);
            let peepholes: Option<[ValueId; 3]> = peepholes.map(|weights| step.parts(weights, hidden));
            if let Some([of_i, _, of_f]) = peepholes {
                let [by_i, by_f] = [of_i, of_f].map(|weights| step.mul(weights, c));
                (i, f) = (step.add(i, by_i), step.add(f, by_f));
            }
            let i = step.applied(own.gate(0), i)?;
            let f = if own.input_forget { step.rest(i) } else { step.applied(own.gate(0), f)? };
            let g = step.applied(own.gate(1), g)?;
            let (old, new) = (step.mul(f, c), step.mul(i, g));
            let cell = step.add(old, new);
            if let Some([_, of_o, _]) = peepholes {
                let by_o = step.mul(of_o, cell);
                o = step.add(o, by_o);
            }
            let o = step.applied(own.gate(0), o)?;
            let seen = step.applied(own.of_cell(), cell)?;
            let value = step.mul(o, seen);
            let (state, cell) = (step.where_held(held, value, h), step.where_held(held, cell, c));
            let value = step.or_zero(held, value);
            let gates = step.concat(&[i, o, f, g], 1);
            (vec![state, cell], vec![value, cell, gates])
        }
        Kind::Gru => {
            let behind = behind.map(|bias| steps.captures("rb", bias));
            let h = states[0];
            let mut step = steps.words();
            let [xz, xr, xn] = step.parts(given, hidden);
            let (z, reset, n) = if own.linear_before_reset {
                let sums = step.product(h, r);
                let sums = step.added(sums, behind);
                let [hz, hr, hn] = step.parts(sums, hidden);
                let (z, reset) = (step.add(xz, hz), step.add(xr, hr));
                let (z, reset) = (step.applied(own.gate(0), z)?, step.applied(own.gate(0), reset)?);
                let part = step.mul(reset, hn);
                (z, reset, step.add(xn, part))
            } else {
                let gates = step.slice(r, 1, 0, 2 * hidden as i64);
                let sums = step.product(h, gates);
                let [hz, hr] = step.parts(sums, hidden);
                let (z, reset) = (step.add(xz, hz), step.add(xr, hr));
                let (z, reset) = (step.applied(own.gate(0), z)?, step.applied(own.gate(0), reset)?);
                let state = step.mul(reset, h);
                let weights = step.part(r, 2, hidden);
                let part = step.product(state, weights);
                (z, reset, step.add(xn, part))
            };
            let n = step.applied(own.gate(1), n)?;
            let rest = step.rest(z);
            let (new, old) = (step.mul(rest, n), step.mul(z, h));
            let value = step.add(new, old);
            let state = step.where_held(held, value, h);
            let value = step.or_zero(held, value);
            let gates = step.concat(&[z, reset, n], 1);
            (vec![state], vec![value, gates])
        }
        Kind::Rnn => return Err(OpError::unsupported("its gradient needs nothing but its results")),
    };
    let results = steps.finish(rw, &next, &collected);
    let (last, all) = results.split_at(next.len());
    let mut out = net.words(rw);
    let all: Vec<ValueId> = all.iter().map(|&value| out.unsqueeze(value, 1)).collect();
    let last: Vec<ValueId> = last.iter().map(|&state| out.unsqueeze(state, 0)).collect();
    let outputs = all[..1].iter().chain(&last).chain(&all[1..]);
    for (k, &value) in outputs.enumerate() {
        rw.output(k, value);
    }
    Ok(())
}

/// Results of the backward steps: the gradients of the initial states, of the input products, and of the products with
/// the states, `[steps, batch, gates * hidden]`. The last two are often the same value.
struct Backward {
    of_states: Vec<ValueId>,
    of_input: ValueId,
    of_state: ValueId,
}

/// Decomposes `RNNGrad`, `GRUGrad` and `LSTMGrad`.
pub(super) fn decompose_grad(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let own = Attributes::read(rw.node())?;
    own.check_slopes()?;
    let at = GradInputs::of(own.kind);
    let net = Net::of(rw, &own, Some(at.lengths), at.states.clone(), at.peepholes)?;
    let (hidden, rows) = (net.hidden, net.rows());
    let all_h = rw.required(at.hidden)?;
    let before = net.before(rw, net.states[0], all_h);

    let mut of_last = Vec::new();
    for k in at.arriving + 1..=at.arriving + net.states.len() {
        let arriving = rw.input(k);
        let mut out = net.words(rw);
        of_last.push(match arriving {
            Some(arriving) => out.squeeze(arriving, 0),
            None => out.zeros_like(net.states[0]),
        });
    }
    let of_all = rw.input(at.arriving);
    let of_all = of_all.map(|g| net.words(rw).squeeze(g, 1));

    let mut steps = net.steps(true);
    let states: Vec<ValueId> =
        of_last.iter().zip(["of_h", "of_c"]).map(|(&first, name)| steps.carries(name, first)).collect();
    let of_all = of_all.map(|g| steps.scans("of_y", g));
    let held = net.held.map(|held| steps.scans("held", held));
    let arriving = Arriving { states, of_all, held };
    let Backward { of_states, of_input, of_state } = match own.kind {
        Kind::Rnn => {
            let all = net.words(rw).squeeze(all_h, 1);
            let y = steps.scans("y", all);
            let r = steps.captures("r", net.r);
            let mut step = steps.words();
            let g = step.added(arriving.states[0], arriving.of_all);
            let gate = step.behind(g, own.gate(0), y)?;
            let gate = step.or_zero(held, gate);
            let through = step.product(gate, r);
            let of_h = step.where_held(held, through, arriving.states[0]);
            let results = steps.finish(rw, &[of_h], &[gate]);
            Backward { of_states: vec![results[0]], of_input: results[1], of_state: results[1] }
        }
        Kind::Gru => gru(rw, &own, &net, steps, &arriving, before)?,
        Kind::Lstm => {
            let [cells, gates] = [rw.required(at.kept.start)?, rw.required(at.kept.start + 1)?];
            lstm(rw, &own, &net, steps, &arriving, [cells, gates])?
        }
    };

    let kept = (own.kind == Kind::Gru && !own.linear_before_reset).then(|| rw.required(at.kept.start));
    let kept = kept.transpose()?;
    let mut out = net.words(rw);
    let mut results: Vec<Option<ValueId>> = vec![Some(out.product(of_input, net.w))];
    let weights = |out: &mut Words<'_, ortrain_graph::Patch>, g: (ValueId, usize), x: (ValueId, usize)| {
        let (g, x) = (out.flat(g.0, g.1), out.flat(x.0, x.1));
        let g = out.transposed(g);
        out.product(g, x)
    };
    let of_w = weights(&mut out, (of_input, rows), (net.x, net.input));
    results.push(Some(out.unsqueeze(of_w, 0)));
    let of_r = match kept {
        Some(kept) => {
            let of_gates = out.slice(of_state, -1, 0, 2 * hidden as i64);
            let of_gates = weights(&mut out, (of_gates, 2 * hidden), (before, hidden));
            let kept = out.squeeze(kept, 1);
            let reset = out.part(kept, 1, hidden);
            let state = out.mul(reset, before);
            let of_new = out.part(of_state, 2, hidden);
            let of_new = weights(&mut out, (of_new, hidden), (state, hidden));
            out.concat(&[of_gates, of_new], 0)
        }
        None => weights(&mut out, (of_state, rows), (before, hidden)),
    };
    results.push(Some(out.unsqueeze(of_r, 0)));
    let biases = [of_input, of_state].map(|g| out.sums(g));
    let biases = out.concat(&biases, 0);
    results.push(Some(out.unsqueeze(biases, 0)));
    for state in of_states {
        results.push(Some(out.unsqueeze(state, 0)));
    }
    if own.kind == Kind::Lstm && rw.has_output(results.len()) {
        let cells = rw.required(at.kept.start)?;
        let cells_before = net.before(rw, net.states[1], cells);
        let mut out = net.words(rw);
        let cells = out.squeeze(cells, 1);
        let of_gates: [ValueId; 4] = out.parts(of_input, hidden);
        let of_weights: Vec<ValueId> = of_gates
            .into_iter()
            .zip([cells_before, cells, cells_before])
            .map(|(g, cells)| {
                let parts = out.mul(g, cells);
                out.sums(parts)
            })
            .collect();
        let of_weights = out.concat(&of_weights, 0);
        results.push(Some(out.unsqueeze(of_weights, 0)));
    }
    for (k, result) in results.into_iter().enumerate() {
        if let Some(result) = result {
            rw.output(k, result);
        }
    }
    Ok(())
}

/// Gradients that arrive at a step.
struct Arriving {
    /// Gradients of the states after the step.
    states: Vec<ValueId>,
    /// Gradient of the step's result.
    of_all: Option<ValueId>,
    held: Option<ValueId>,
}

fn gru(
    rw: &mut Rewrite<'_>,
    own: &Attributes,
    net: &Net,
    mut steps: Steps,
    arriving: &Arriving,
    before: ValueId,
) -> Result<Backward, OpError> {
    let (hidden, held) = (net.hidden, arriving.held);
    let at = GradInputs::of(Kind::Gru);
    let (kept, biases) = (rw.required(at.kept.start)?, at.biases.and_then(|k| rw.input(k)));
    let mut out = net.words(rw);
    let kept = out.squeeze(kept, 1);
    let gates = steps.scans("gates", kept);
    let state = steps.scans("before", before);
    let r = steps.captures("r", net.r);
    // The state's contribution to the new gate, at all steps.
    let taken = if own.linear_before_reset {
        let weights = out.slice(net.r, 0, 2 * hidden as i64, 3 * hidden as i64);
        let weights = out.transposed(weights);
        let mut taken = out.product(before, weights);
        if let Some(biases) = biases {
            let biases = out.squeeze(biases, 0);
            let bias = out.part(biases, 5, hidden);
            taken = out.add(taken, bias);
        }
        Some(steps.scans("taken", taken))
    } else {
        None
    };
    let after = arriving.states[0];
    let mut step = steps.words();
    let g = step.added(after, arriving.of_all);
    let [z, reset, n] = step.parts(gates, hidden);
    let difference = step.sub(state, n);
    let of_z = step.mul(g, difference);
    let of_z = step.behind(of_z, own.gate(0), z)?;
    let rest = step.rest(z);
    let of_new = step.mul(g, rest);
    let of_new = step.behind(of_new, own.gate(1), n)?;
    let kept = step.mul(g, z);
    let (of_z, of_new) = (step.or_zero(held, of_z), step.or_zero(held, of_new));
    let (of_input, of_state, of_h) = if let Some(taken) = taken {
        let of_reset = step.mul(of_new, taken);
        let of_reset = step.behind(of_reset, own.gate(0), reset)?;
        let of_taken = step.mul(of_new, reset);
        let of_input = step.concat(&[of_z, of_reset, of_new], 1);
        let of_state = step.concat(&[of_z, of_reset, of_taken], 1);
        let through = step.product(of_state, r);
        (of_input, Some(of_state), step.add(kept, through))
    } else {
        let weights = step.slice(r, 0, 2 * hidden as i64, 3 * hidden as i64);
        let of_product = step.product(of_new, weights);
        let of_reset = step.mul(of_product, state);
        let of_reset = step.behind(of_reset, own.gate(0), reset)?;
        let gates = step.concat(&[of_z, of_reset], 1);
        let weights = step.slice(r, 0, 0, 2 * hidden as i64);
        let (through, by_reset) = (step.product(gates, weights), step.mul(of_product, reset));
        let sum = step.add(kept, by_reset);
        (step.concat(&[gates, of_new], 1), None, step.add(sum, through))
    };
    let of_h = step.where_held(held, of_h, after);
    let collected: Vec<ValueId> = std::iter::once(of_input).chain(of_state).collect();
    let results = steps.finish(rw, &[of_h], &collected);
    let of_state = results.get(2).copied().unwrap_or(results[1]);
    Ok(Backward { of_states: vec![results[0]], of_input: results[1], of_state })
}

fn lstm(
    rw: &mut Rewrite<'_>,
    own: &Attributes,
    net: &Net,
    mut steps: Steps,
    arriving: &Arriving,
    [cells, gates]: [ValueId; 2],
) -> Result<Backward, OpError> {
    let (hidden, held) = (net.hidden, arriving.held);
    let before = net.before(rw, net.states[1], cells);
    let mut out = net.words(rw);
    let [cells, gates] = [cells, gates].map(|value| out.squeeze(value, 1));
    let gates = steps.scans("gates", gates);
    let cell = steps.scans("cell", cells);
    let last = steps.scans("before", before);
    let r = steps.captures("r", net.r);
    let peepholes = net.peepholes.map(|weights| steps.captures("p", weights));
    let (after_h, after_c) = (arriving.states[0], arriving.states[1]);
    let mut step = steps.words();
    let peepholes: Option<[ValueId; 3]> = peepholes.map(|weights| step.parts(weights, hidden));
    let g = step.added(after_h, arriving.of_all);
    let [i, o, f, c] = step.parts(gates, hidden);
    let seen = step.applied(own.of_cell(), cell)?;
    let of_o = step.mul(g, seen);
    let of_o = step.behind(of_o, own.gate(0), o)?;
    let through = step.mul(g, o);
    let through = step.behind(through, own.of_cell(), seen)?;
    let mut of_new = step.add(after_c, through);
    if let Some([_, weight, _]) = peepholes {
        let part = step.mul(of_o, weight);
        of_new = step.add(of_new, part);
    }
    let of_g = step.mul(of_new, i);
    let of_g = step.behind(of_g, own.gate(1), c)?;
    let (of_i, of_f) = if own.input_forget {
        // The forget gate is one minus the input gate.
        let difference = step.sub(c, last);
        (step.mul(of_new, difference), step.zeros_like(f))
    } else {
        let of_f = step.mul(of_new, last);
        (step.mul(of_new, c), step.behind(of_f, own.gate(0), f)?)
    };
    let of_i = step.behind(of_i, own.gate(0), i)?;
    let mut of_last = step.mul(of_new, f);
    if let Some([weight_i, _, weight_f]) = peepholes {
        for (gate, weight) in [(of_i, weight_i), (of_f, weight_f)] {
            let part = step.mul(gate, weight);
            of_last = step.add(of_last, part);
        }
    }
    let of_gates = step.concat(&[of_i, of_o, of_f, of_g], 1);
    let of_gates = step.or_zero(held, of_gates);
    let of_h = step.product(of_gates, r);
    let of_h = step.where_held(held, of_h, after_h);
    let of_c = step.where_held(held, of_last, after_c);
    let results = steps.finish(rw, &[of_h, of_c], &[of_gates]);
    Ok(Backward { of_states: results[..2].to_vec(), of_input: results[2], of_state: results[2] })
}
