use ortrain_graph::{Attr, Attrs, DType, Graph, Tensor};

use super::steps::TRANSPOSE_THRESHOLD;
use crate::NEWEST_OPSET;
use crate::families::rnn::net::{Attributes, MAX_STEPS, NetKind};
use crate::testing::{
    assert_close, cast_tensor, check_decomposition, check_gradients, f64s, generic_tensor, gradient_graph,
    one_node_graph, run, run_node,
};

const STEPS: usize = 3;
const BATCH: usize = 2;
const INPUT: usize = 2;
const HIDDEN: usize = 3;
/// Tolerance of sums of a few products in float64.
const ROUNDING: f64 = 1e-12;

/// Node with its inputs.
#[derive(Clone)]
struct Case {
    kind: NetKind,
    attrs: Attrs,
    directions: usize,
    batch_first: bool,
    /// X, W, R, B, lengths, hidden state, cell state, peepholes.
    inputs: Vec<Option<Tensor>>,
}

impl Case {
    fn new(kind: NetKind) -> Case {
        Case::with_direction(kind, "forward")
    }

    /// Creates a case with small weights, so that gates stay between their limits.
    fn with_direction(kind: NetKind, direction: &str) -> Case {
        let directions = if direction == "bidirectional" { 2 } else { 1 };
        let rows = kind.gate_count() * HIDDEN;
        let small = |dims: &[usize], seed| {
            let elements: Vec<f64> = generic_tensor(dims, seed).to_f64().iter().map(|x| 0.4 * x).collect();
            Some(f64s(dims, &elements))
        };
        let attrs = Attrs::new().with("hidden_size", HIDDEN as i64).with("direction", direction);
        let inputs = vec![
            small(&[STEPS, BATCH, INPUT], 1),
            small(&[directions, rows, INPUT], 2),
            small(&[directions, rows, HIDDEN], 3),
            None,
            None,
        ];
        Case { kind, attrs, directions, batch_first: false, inputs }.with_all_inputs()
    }

    fn with_all_inputs(mut self) -> Case {
        let count = if self.kind == NetKind::Lstm { 8 } else { 6 };
        self.inputs.resize(count, None);
        self
    }

    fn with_biases(mut self) -> Case {
        self.inputs[3] = Some(generic_tensor(&[self.directions, 2 * self.kind.gate_count() * HIDDEN], 4));
        self
    }

    fn with_lengths(mut self, lengths: &[i64]) -> Case {
        self.inputs[4] = Some(cast_tensor(&Tensor::i64(&[lengths.len()], lengths), DType::I32));
        self
    }

    fn with_states(mut self) -> Case {
        for k in self.kind.state_inputs() {
            self.inputs[k] = Some(generic_tensor(&[self.directions, BATCH, HIDDEN], k as u32));
        }
        self
    }

    fn with_peepholes(mut self) -> Case {
        self.inputs[7] = Some(generic_tensor(&[self.directions, 3 * HIDDEN], 8));
        self
    }

    fn with(mut self, name: &str, value: impl Into<Attr>) -> Case {
        self.attrs = self.attrs.with(name, value);
        self
    }

    fn with_activations(mut self, names: &[&str], alphas: &[f32], betas: &[f32]) -> Case {
        let names = names.iter().map(|&name| name.to_owned()).collect();
        self.attrs.0.insert("activations".into(), Attr::Strings(names));
        self.attrs =
            self.attrs.with("activation_alpha", alphas.to_vec()).with("activation_beta", betas.to_vec());
        self
    }

    fn batch_first(mut self) -> Case {
        self.batch_first = true;
        for k in [Some(0), Some(5), (self.kind == NetKind::Lstm).then_some(6)].into_iter().flatten() {
            self.inputs[k] = self.inputs[k].as_ref().map(swap_first_axes);
        }
        self.with("layout", 1i64)
    }

    fn op(&self) -> (&'static str, &'static str) {
        match self.kind {
            NetKind::Rnn => ("", "RNN"),
            NetKind::Gru => ("", "GRU"),
            NetKind::Lstm => ("", "LSTM"),
        }
    }

    fn outputs(&self) -> usize {
        if self.kind == NetKind::Lstm { 3 } else { 2 }
    }

    fn graph(&self) -> Graph {
        let inputs: Vec<Option<&Tensor>> = self.inputs.iter().map(Option::as_ref).collect();
        one_node_graph(NEWEST_OPSET, self.op(), &inputs, self.outputs(), self.attrs.clone()).expect("valid")
    }

    fn present_inputs(&self) -> Vec<Tensor> {
        self.inputs.iter().flatten().cloned().collect()
    }

    /// Returns the positions, among the present inputs, of inputs with gradients.
    fn differentiable_inputs(&self) -> Vec<usize> {
        self.present_inputs()
            .iter()
            .enumerate()
            .filter(|(_, x)| x.dtype().is_float())
            .map(|(k, _)| k)
            .collect()
    }
}

/// Swaps the first two of three axes.
fn swap_first_axes(tensor: &Tensor) -> Tensor {
    let (dims, elements) = (tensor.dims(), tensor.to_f64());
    let mut result = vec![0.0; elements.len()];
    for a in 0..dims[0] {
        for b in 0..dims[1] {
            for c in 0..dims[2] {
                result[(b * dims[0] + a) * dims[2] + c] = elements[(a * dims[1] + b) * dims[2] + c];
            }
        }
    }
    f64s(&[dims[1], dims[0], dims[2]], &result)
}

/// Formulas of the standard, element by element, for one row of the batch and one direction.
struct Cell<'a> {
    case: &'a Case,
    direction: usize,
    row: usize,
}

impl Cell<'_> {
    fn value_at(&self, k: usize, index: usize) -> f64 {
        self.case.inputs[k].as_ref().map_or(0.0, |tensor| tensor.to_f64()[index])
    }

    fn attr(&self, name: &str) -> i64 {
        self.case.attrs.int(name).expect("an integer").unwrap_or(0)
    }

    fn activation(&self, k: usize, x: f64) -> f64 {
        let defaults: &[&str] = match self.case.kind {
            NetKind::Rnn => &["Tanh"],
            NetKind::Gru => &["Sigmoid", "Tanh"],
            NetKind::Lstm => &["Sigmoid", "Tanh", "Tanh"],
        };
        let names: Vec<String> = match self.case.attrs.strings("activations").expect("a list") {
            Some(names) => names.to_vec(),
            None => defaults.repeat(self.case.directions).iter().map(|&name| name.to_owned()).collect(),
        };
        let at = self.direction * defaults.len() + k;
        let one = ["Elu", "LeakyRelu", "ThresholdedRelu"];
        let two = ["Affine", "HardSigmoid", "ScaledTanh"];
        let count = |list: &[&str]| names[..at].iter().filter(|name| list.contains(&name.as_str())).count();
        let alphas = self.case.attrs.floats("activation_alpha").expect("a list").unwrap_or_default();
        let betas = self.case.attrs.floats("activation_beta").expect("a list").unwrap_or_default();
        let alpha = alphas.get(count(&one) + count(&two)).map_or(f64::NAN, |&x| f64::from(x));
        let beta = betas.get(count(&two)).map_or(f64::NAN, |&x| f64::from(x));
        match names[at].as_str() {
            "Affine" => alpha * x + beta,
            "Elu" if x < 0.0 => alpha * x.exp_m1(),
            "HardSigmoid" => (alpha * x + beta).clamp(0.0, 1.0),
            "LeakyRelu" if x < 0.0 => alpha * x,
            "Elu" | "LeakyRelu" => x,
            "Relu" => x.max(0.0),
            "ScaledTanh" => alpha * (beta * x).tanh(),
            "Sigmoid" => 1.0 / (1.0 + (-x).exp()),
            "Softplus" => x.exp().ln_1p(),
            "Softsign" => x / (1.0 + x.abs()),
            "Tanh" => x.tanh(),
            "ThresholdedRelu" if x > alpha => x,
            "ThresholdedRelu" => 0.0,
            other => panic!("{other}"),
        }
    }

    fn clipped(&self, x: f64) -> f64 {
        let clip = self.case.attrs.float("clip").expect("a float");
        clip.map_or(x, |clip| x.clamp(-f64::from(clip), f64::from(clip)))
    }

    /// Returns `x W'` for a row of the weights, with its bias.
    fn data_sum(&self, step: usize, row: usize) -> f64 {
        let rows = self.case.kind.gate_count() * HIDDEN;
        let x = |k| {
            let at = if self.case.batch_first { self.row * STEPS + step } else { step * BATCH + self.row };
            self.value_at(0, at * INPUT + k)
        };
        let w = |k| self.value_at(1, (self.direction * rows + row) * INPUT + k);
        (0..INPUT).map(|k| x(k) * w(k)).sum::<f64>() + self.value_at(3, self.direction * 2 * rows + row)
    }

    /// Returns `h R'` for a row of the weights, with its bias.
    fn state_sum(&self, h: &[f64], row: usize) -> f64 {
        let rows = self.case.kind.gate_count() * HIDDEN;
        let r = |k| self.value_at(2, (self.direction * rows + row) * HIDDEN + k);
        (0..HIDDEN).map(|k| h[k] * r(k)).sum::<f64>()
            + self.value_at(3, (self.direction * 2 + 1) * rows + row)
    }

    fn step(&self, step: usize, h: &[f64], c: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let sum = |gate: usize, k: usize| {
            self.data_sum(step, gate * HIDDEN + k) + self.state_sum(h, gate * HIDDEN + k)
        };
        let units = 0..HIDDEN;
        match self.case.kind {
            NetKind::Rnn => {
                (units.map(|k| self.activation(0, self.clipped(sum(0, k)))).collect(), c.to_vec())
            }
            NetKind::Gru => {
                let gate = |gate| {
                    let value = |k| self.activation(0, self.clipped(sum(gate, k)));
                    (0..HIDDEN).map(value).collect::<Vec<f64>>()
                };
                let (z, r) = (gate(0), gate(1));
                let reset: Vec<f64> = units.clone().map(|k| r[k] * h[k]).collect();
                let new = |k: usize| {
                    let row = 2 * HIDDEN + k;
                    let state = if self.attr("linear_before_reset") != 0 {
                        r[k] * self.state_sum(h, row)
                    } else {
                        self.state_sum(&reset, row)
                    };
                    self.activation(1, self.clipped(self.data_sum(step, row) + state))
                };
                (units.map(|k| (1.0 - z[k]) * new(k) + z[k] * h[k]).collect(), c.to_vec())
            }
            NetKind::Lstm => {
                let peephole =
                    |gate: usize, k: usize| self.value_at(7, self.direction * 3 * HIDDEN + gate * HIDDEN + k);
                let unit = |k: usize| {
                    let i = self.activation(0, self.clipped(sum(0, k) + peephole(0, k) * c[k]));
                    let f = if self.attr("input_forget") != 0 {
                        1.0 - i
                    } else {
                        self.activation(0, self.clipped(sum(2, k) + peephole(2, k) * c[k]))
                    };
                    let g = self.activation(1, self.clipped(sum(3, k)));
                    let cell = f * c[k] + i * g;
                    let o = self.activation(0, self.clipped(sum(1, k) + peephole(1, k) * cell));
                    (o * self.activation(2, cell), cell)
                };
                units.map(unit).unzip()
            }
        }
    }

    /// Returns the results of all steps, and the last states.
    fn run(&self) -> (Vec<Vec<f64>>, Vec<f64>, Vec<f64>) {
        let reverse = match self.case.attrs.string("direction").expect("a text") {
            Some("reverse") => true,
            Some("bidirectional") => self.direction == 1,
            _ => false,
        };
        let length =
            self.case.inputs[4].as_ref().map_or(STEPS, |lengths| lengths.to_f64()[self.row] as usize);
        let state = |k: usize| -> Vec<f64> {
            let at = if self.case.batch_first {
                self.row * self.case.directions + self.direction
            } else {
                self.direction * BATCH + self.row
            };
            (0..HIDDEN).map(|unit| self.value_at(k, at * HIDDEN + unit)).collect()
        };
        let mut h = state(5);
        let mut c = if self.case.kind == NetKind::Lstm { state(6) } else { vec![0.0; HIDDEN] };
        let mut hidden_states = vec![vec![0.0; HIDDEN]; STEPS];
        for index in 0..length {
            let step = if reverse { length - 1 - index } else { index };
            (h, c) = self.step(step, &h, &c);
            hidden_states[step].clone_from(&h);
        }
        (hidden_states, h, c)
    }
}

/// Returns the results of the formulas.
fn expected_results(case: &Case) -> Vec<Tensor> {
    let d = case.directions;
    let (mut y, mut states) = (vec![0.0; STEPS * d * BATCH * HIDDEN], vec![vec![0.0; d * BATCH * HIDDEN]; 2]);
    for direction in 0..d {
        for row in 0..BATCH {
            let (sequence, h, c) = Cell { case, direction, row }.run();
            for (step, values) in sequence.iter().enumerate() {
                let at = if case.batch_first {
                    (row * STEPS + step) * d + direction
                } else {
                    (step * d + direction) * BATCH + row
                };
                y[at * HIDDEN..(at + 1) * HIDDEN].copy_from_slice(values);
            }
            let at = if case.batch_first { row * d + direction } else { direction * BATCH + row };
            states[0][at * HIDDEN..(at + 1) * HIDDEN].copy_from_slice(&h);
            states[1][at * HIDDEN..(at + 1) * HIDDEN].copy_from_slice(&c);
        }
    }
    let (sequence_dims, state) = if case.batch_first {
        ([BATCH, STEPS, d, HIDDEN], [BATCH, d, HIDDEN])
    } else {
        ([STEPS, d, BATCH, HIDDEN], [d, BATCH, HIDDEN])
    };
    let states = states[..case.outputs() - 1].iter().map(|values| f64s(&state, values));
    std::iter::once(f64s(&sequence_dims, &y)).chain(states).collect()
}

/// Attributes and optional inputs of every kind, separately and combined.
fn cases() -> Vec<(String, Case)> {
    let mut cases = Vec::new();
    for kind in [NetKind::Rnn, NetKind::Gru, NetKind::Lstm] {
        let mut add = |name: &str, case: Case| cases.push((format!("{kind:?} {name}"), case));
        let full = |direction| Case::with_direction(kind, direction).with_biases().with_states();
        add("with nothing more", Case::new(kind));
        add("with biases", Case::new(kind).with_biases());
        add("with states", Case::new(kind).with_states());
        add("with all", full("forward"));
        add("reverse", full("reverse"));
        add("reverse without states", Case::with_direction(kind, "reverse"));
        add("bidirectional", full("bidirectional"));
        add("bidirectional without states", Case::with_direction(kind, "bidirectional"));
        add("with lengths", full("forward").with_lengths(&[3, 1]));
        add("with lengths of nothing", full("forward").with_lengths(&[0, 2]));
        add("reverse with lengths", full("reverse").with_lengths(&[2, 3]));
        add("bidirectional with lengths", full("bidirectional").with_lengths(&[1, 3]));
        add("batch first, with lengths", full("bidirectional").with_lengths(&[1, 3]).batch_first());
        add("batch first", full("bidirectional").batch_first());
        add("batch first without states", Case::with_direction(kind, "bidirectional").batch_first());
        add("clipped", full("forward").with("clip", 0.7f32));
        let count = kind.default_activations().len();
        let names = ["HardSigmoid", "Softsign", "Affine"];
        add(
            "with other activations",
            full("forward").with_activations(&names[..count], &[0.3, 0.8], &[0.4, 0.1]),
        );
        let names = ["Softplus", "LeakyRelu", "Elu", "Sigmoid", "ScaledTanh", "ThresholdedRelu"];
        add(
            "with an activation for each direction",
            full("bidirectional").with_activations(&names[..2 * count], &[0.2, 0.7, 1.2, 0.1], &[0.8]),
        );
        let names = ["Relu", "Relu", "Relu"];
        add("rectified", full("forward").with_activations(&names[..count], &[], &[]));
    }
    for kind in [NetKind::Gru, NetKind::Lstm] {
        let (name, option) = match kind {
            NetKind::Gru => ("Gru with a linear part before the reset", "linear_before_reset"),
            _ => ("Lstm with coupled gates", "input_forget"),
        };
        let case = Case::new(kind).with(option, 1i64);
        cases.push((name.to_owned(), case.clone()));
        cases.push((format!("{name}, biases and states"), case.clone().with_biases().with_states()));
        let lengths = case.with_biases().with_states().with_lengths(&[1, 2]);
        cases.push((format!("{name}, and lengths"), lengths));
    }
    let peepholes = |direction| {
        Case::with_direction(NetKind::Lstm, direction).with_biases().with_states().with_peepholes()
    };
    cases.push(("Lstm with peepholes".into(), peepholes("forward")));
    cases.push(("Lstm with peepholes, no states".into(), Case::new(NetKind::Lstm).with_peepholes()));
    cases.push(("Lstm with peepholes and lengths".into(), peepholes("forward").with_lengths(&[2, 3])));
    let coupled = peepholes("bidirectional").with("input_forget", 1i64);
    cases.push(("Lstm with peepholes and coupled gates".into(), coupled));
    cases
}

#[test]
fn results_equal_formulas() {
    for (name, case) in cases() {
        let got = run(&case.graph(), &case.present_inputs()).unwrap_or_else(|e| panic!("{name}: {e:?}"));
        for (got, expected) in got.iter().zip(&expected_results(&case)) {
            assert_close(got, expected, ROUNDING);
        }
    }
}

#[track_caller]
fn check_gradients_of(kind: NetKind) {
    for (name, case) in cases().into_iter().filter(|(_, case)| case.kind == kind) {
        // Shown on failure.
        eprintln!("{name}");
        let every: Vec<usize> = (0..case.outputs()).collect();
        check_gradients(&case.graph(), &case.present_inputs(), &case.differentiable_inputs(), &every);
        for output in every {
            check_gradients(&case.graph(), &case.present_inputs(), &[0, 1, 2], &[output]);
        }
    }
}

#[test]
fn rnn_gradients_equal_central_differences() {
    check_gradients_of(NetKind::Rnn);
}

#[test]
fn gru_gradients_equal_central_differences() {
    check_gradients_of(NetKind::Gru);
}

#[test]
fn lstm_gradients_equal_central_differences() {
    check_gradients_of(NetKind::Lstm);
}

#[test]
fn one_step_and_zero_steps() {
    for kind in [NetKind::Rnn, NetKind::Gru, NetKind::Lstm] {
        for steps in [0, 1] {
            let mut case = Case::new(kind).with_biases().with_states();
            case.inputs[0] = Some(generic_tensor(&[steps, BATCH, INPUT], 1));
            let graph = case.graph();
            let got = run(&graph, &case.present_inputs()).expect("the graph runs");
            assert_eq!(got[0].dims(), [steps, 1, BATCH, HIDDEN]);
            if steps == 0 {
                assert_eq!(Some(&got[1]), case.inputs[5].as_ref());
            } else {
                assert_eq!(got[0].data(), got[1].data());
            }
            let every: Vec<usize> = (0..case.outputs()).collect();
            check_gradients(&graph, &case.present_inputs(), &case.differentiable_inputs()[1..], &every);
        }
    }
}

/// Returns rows of a batch, which is the middle axis.
fn rows_of(tensor: &Tensor, rows: std::ops::Range<usize>) -> Tensor {
    let &[first, batch, last] = tensor.dims() else { panic!("three axes") };
    let elements = tensor.to_f64();
    let row = |k: usize, row: usize| &elements[(k * batch + row) * last..][..last];
    let selected: Vec<f64> =
        (0..first).flat_map(|k| rows.clone().flat_map(move |r| row(k, r))).copied().collect();
    f64s(&[first, rows.len(), last], &selected)
}

/// Long sequences in large batches use a transposed copy of the recurrent weights; batches of few rows do not.
#[test]
fn transposed_weights_give_equal_results() {
    let (steps, batch, small_batch) =
        (TRANSPOSE_THRESHOLD.0 + 1, 4 * TRANSPOSE_THRESHOLD.1, TRANSPOSE_THRESHOLD.1 - 1);
    let gru = Case::new(NetKind::Gru).with("linear_before_reset", 1i64);
    for (case, with_lengths) in
        [Case::new(NetKind::Rnn), Case::new(NetKind::Gru), gru, Case::new(NetKind::Lstm)]
            .into_iter()
            .flat_map(|case| [(case.clone(), false), (case, true)])
    {
        let lengths: Vec<i64> = (0..batch).map(|row| (row % (steps + 1)) as i64).collect();
        let mut full = case.with_biases();
        full.inputs[0] = Some(generic_tensor(&[steps, batch, INPUT], 1));
        for k in full.kind.state_inputs() {
            full.inputs[k] = Some(generic_tensor(&[1, batch, HIDDEN], 5 + k as u32));
        }
        if with_lengths {
            full = full.with_lengths(&lengths);
        }
        let expected = run(&full.graph(), &full.present_inputs()).expect("the graph runs");
        for start in (0..batch).step_by(small_batch) {
            let rows = start..(start + small_batch).min(batch);
            let mut part = full.clone();
            for k in std::iter::once(0).chain(full.kind.state_inputs()) {
                part.inputs[k] = full.inputs[k].as_ref().map(|tensor| rows_of(tensor, rows.clone()));
            }
            if with_lengths {
                part = part.with_lengths(&lengths[rows.clone()]);
            }
            let got = run(&part.graph(), &part.present_inputs()).expect("the graph runs");
            for (got, expected) in got.iter().zip(&expected) {
                let dims: Vec<usize> = expected.dims().iter().copied().filter(|&dim| dim != 1).collect();
                let dims = if dims.len() == 2 { vec![1, dims[0], dims[1]] } else { dims };
                let expected = rows_of(&f64s(&dims, &expected.to_f64()), rows.clone());
                assert_close(&f64s(expected.dims(), &got.to_f64()), &expected, ROUNDING);
            }
        }
    }
}

#[test]
fn narrow_floats_are_computed_in_float32() {
    for (kind, dtype) in
        [(NetKind::Lstm, DType::F16), (NetKind::Gru, DType::BF16), (NetKind::Rnn, DType::F32)]
    {
        let mut case = Case::with_direction(kind, "bidirectional").with_biases().with_states();
        let expected = expected_results(&case);
        for input in case.inputs.iter_mut().flatten() {
            *input = cast_tensor(input, dtype);
        }
        let got = run(&case.graph(), &case.present_inputs()).expect("the graph runs");
        let tolerance = if dtype == DType::F32 { 1e-5 } else { 3e-2 };
        for (got, expected) in got.iter().zip(&expected) {
            assert_eq!(got.dtype(), dtype);
            assert_close(&cast_tensor(got, DType::F64), expected, tolerance);
        }
    }
}

/// Gates are stored in the type of the data, so a value at the clip limit is stored rounded.
#[test]
fn clipped_gradients_of_narrow_floats_are_precise() {
    // A few rounding errors of gates, relative to the largest element of a gradient.
    const TOLERANCES: [(DType, f64); 2] = [(DType::F16, 4e-3), (DType::BF16, 3e-2)];
    for kind in [NetKind::Rnn, NetKind::Gru, NetKind::Lstm] {
        for (dtype, tolerance) in TOLERANCES {
            for clip in [0.1f32, 0.3, 0.7] {
                let mut narrow =
                    Case::with_direction(kind, "forward").with_biases().with_states().with("clip", clip);
                for input in narrow.inputs.iter_mut().flatten() {
                    *input = cast_tensor(input, dtype);
                }
                let mut wide = narrow.clone();
                for input in wide.inputs.iter_mut().flatten() {
                    *input = cast_tensor(input, DType::F64);
                }
                let weights: Vec<Option<Tensor>> = run(&wide.graph(), &wide.present_inputs())
                    .expect("the graph runs")
                    .iter()
                    .enumerate()
                    .map(|(k, result)| {
                        Some(cast_tensor(&generic_tensor(result.dims(), 30 + k as u32), dtype))
                    })
                    .collect();
                let widened: Vec<Option<Tensor>> =
                    weights.iter().flatten().map(|weight| Some(cast_tensor(weight, DType::F64))).collect();
                let expected_gradient =
                    gradient_graph(&wide.graph(), &widened, &wide.differentiable_inputs());
                let gradient = gradient_graph(&narrow.graph(), &weights, &narrow.differentiable_inputs());
                let expected = run(&expected_gradient, &wide.present_inputs()).expect("the gradient runs");
                let got = run(&gradient, &narrow.present_inputs()).expect("the gradient runs");
                for (got, expected) in got.iter().zip(&expected) {
                    let largest =
                        expected.to_f64().iter().fold(0.0_f64, |largest, value| largest.max(value.abs()));
                    assert_close(&cast_tensor(got, DType::F64), expected, tolerance * largest.max(1.0));
                }
            }
        }
    }
}

#[test]
fn rejects_mismatched_inputs() {
    let message = |case: &Case| {
        let inputs: Vec<Option<&Tensor>> = case.inputs.iter().map(Option::as_ref).collect();
        match run_node(case.op(), &inputs, case.outputs(), case.attrs.clone()) {
            Err(crate::testing::Failure::Prepare(error)) => error.to_string(),
            Err(crate::testing::Failure::Run(error)) => error.to_string(),
            Ok(_) => panic!("the graph runs"),
        }
    };
    let lstm = || Case::new(NetKind::Lstm);
    let with = |k: usize, tensor: Tensor| {
        let mut case = lstm();
        case.inputs[k] = Some(tensor);
        case
    };
    for (case, expected) in [
        (with(0, generic_tensor(&[3, 2], 0)), "input 0 has shape [3, 2], expected [steps, batch, input]"),
        (with(1, generic_tensor(&[1, 12, 5], 0)), "input 1 has shape [1, 12, 5], expected [1, 12, 2]"),
        (with(2, generic_tensor(&[1, 9, 3], 0)), "input 2 has shape [1, 9, 3], expected [1, 12, 3]"),
        (with(3, generic_tensor(&[1, 12], 0)), "input 3 has shape [1, 12], expected [1, 24]"),
        (with(5, generic_tensor(&[2, 2, 3], 0)), "input 5 has shape [2, 2, 3], expected [1, 2, 3]"),
        (with(7, generic_tensor(&[1, 3], 0)), "input 7 has shape [1, 3], expected [1, 9]"),
        (with(4, generic_tensor(&[2], 0)), "input 4 is of type float64, expected an integer type"),
        (lstm().with_lengths(&[4, 1]), "4"),
        (lstm().with_lengths(&[-1, 1]), "-1"),
        (lstm().with("direction", "sideways"), "got \"sideways\""),
        (lstm().with("layout", 2i64), "layout must be 0 or 1, got 2"),
        (lstm().with("clip", -1.0f32), "clip must be positive, got -1"),
        (lstm().with("hidden_size", 0i64), "hidden_size must be positive, got 0"),
        (lstm().with("hidden_size", 1i64 << 40), "hidden_size must be at most 16777216, got 1099511627776"),
        (lstm().with("hidden_size", 4i64), "expected [1, 16, 2]"),
        (lstm().with_activations(&["Tanh"], &[], &[]), "activations names 1 functions, expected 3"),
        (lstm().with_activations(&["Tanh", "Tanh", "Cosine"], &[], &[]), "\"Cosine\" is unknown"),
    ] {
        let message = message(&case);
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn rejects_too_many_steps() {
    let expected = "sequences of 65537 steps are too long, at most 65536 steps are supported. Split longer \
         sequences, and start each part with the final states of the previous part";
    for kind in [NetKind::Rnn, NetKind::Gru, NetKind::Lstm] {
        for direction in ["forward", "bidirectional"] {
            let mut case = Case::with_direction(kind, direction);
            let mut data = |steps: usize| {
                case.inputs[0] = Some(generic_tensor(&[steps, BATCH, INPUT], 1));
                let inputs: Vec<Option<&Tensor>> = case.inputs.iter().map(Option::as_ref).collect();
                one_node_graph(NEWEST_OPSET, case.op(), &inputs, case.outputs(), case.attrs.clone())
            };
            let message = data(MAX_STEPS + 1).expect_err("refused").to_string();
            assert!(message.contains(expected), "{message}");
            assert!(data(MAX_STEPS).is_ok());
        }
    }
}

#[test]
fn non_monotonic_activations_have_no_gradient() {
    let case = Case::new(NetKind::Rnn).with_states().with_activations(&["LeakyRelu"], &[-0.5], &[]);
    let graph = case.graph();
    assert!(run(&graph, &case.present_inputs()).is_ok());
    let seeds = vec![(graph.outputs[0], graph.outputs[0])];
    let error = crate::passes::differentiate::backpropagate(&mut graph.clone(), &seeds, &graph.inputs[..1]);
    let message = error.expect_err("refused").to_string();
    assert!(message.contains("LeakyRelu") && message.contains("alpha of at least 0"), "{message}");
}

#[test]
fn computes_only_required_gradients() {
    // Neither the gradient of the data nor the gradients of states.
    let case = Case::new(NetKind::Lstm).with_biases().with_states();
    let weights = [Some(generic_tensor(&[STEPS, 1, BATCH, HIDDEN], 5)), None, None];
    let gradient = gradient_graph(&case.graph(), &weights, &[1]);
    let node = gradient.nodes.iter().find(|node| &*node.op == "LSTMGrad").expect("there is one");
    assert_eq!(node.present_outputs().count(), 1);
}

/// Builds the gradient of all floats through all results.
fn gradient_of(case: &Case) -> Graph {
    let results = run(&case.graph(), &case.present_inputs()).expect("the graph runs");
    let weights: Vec<Option<Tensor>> = results
        .iter()
        .enumerate()
        .map(|(k, result)| Some(generic_tensor(result.dims(), 30 + k as u32)))
        .collect();
    gradient_graph(&case.graph(), &weights, &case.differentiable_inputs())
}

#[test]
fn training_operators_decompose_into_plain_onnx() {
    for (name, case) in cases() {
        eprintln!("{name}");
        check_decomposition(&gradient_of(&case), &case.present_inputs(), ROUNDING);
    }
    // Zero steps, and a gradient of the last states only.
    for kind in [NetKind::Rnn, NetKind::Gru, NetKind::Lstm] {
        let mut case = Case::new(kind).with_biases().with_states();
        case.inputs[0] = Some(generic_tensor(&[0, BATCH, INPUT], 1));
        check_decomposition(&gradient_of(&case), &case.present_inputs(), ROUNDING);
        let case = Case::new(kind).with_states();
        let mut weights = vec![None; case.outputs()];
        weights[1] = Some(generic_tensor(&[1, BATCH, HIDDEN], 7));
        check_decomposition(
            &gradient_graph(&case.graph(), &weights, &[1, 2]),
            &case.present_inputs(),
            ROUNDING,
        );
    }
}

#[test]
fn stored_gates_decompose_into_plain_onnx() {
    for (name, case) in cases().into_iter().filter(|(_, case)| case.kind != NetKind::Rnn) {
        let forward = Attributes::read(&case.graph().nodes[0]).expect("valid");
        if !forward.is_plain() || case.inputs[5].is_none() {
            continue;
        }
        eprintln!("{name}");
        let inputs: Vec<Option<&Tensor>> = case.inputs.iter().map(Option::as_ref).collect();
        let (op, outputs) = if case.kind == NetKind::Lstm { ("LSTMTraining", 5) } else { ("GRUTraining", 3) };
        let graph = one_node_graph(NEWEST_OPSET, ("com.microsoft", op), &inputs, outputs, case.attrs.clone());
        let graph = graph.expect("valid");
        let (got, expected) = (run(&graph, &case.present_inputs()), expected_results(&case));
        for (got, expected) in got.expect("the graph runs").iter().zip(&expected) {
            assert_close(got, expected, ROUNDING);
        }
        let mut graph = graph;
        if case.inputs[4].is_some() {
            // Gates after the end of a sequence are undefined.
            graph.outputs.pop();
        }
        check_decomposition(&graph, &case.present_inputs(), ROUNDING);
    }
}

#[test]
fn gradients_of_gradients() {
    for kind in [NetKind::Rnn, NetKind::Gru, NetKind::Lstm] {
        let full = || Case::new(kind).with_biases().with_states();
        let mut cases =
            vec![full(), full().with_lengths(&[3, 1]), Case::with_direction(kind, "bidirectional")];
        match kind {
            NetKind::Gru => cases.push(full().with("linear_before_reset", 1i64)),
            NetKind::Lstm => cases.push(full().with_peepholes()),
            NetKind::Rnn => {}
        }
        for case in cases {
            let penalty = gradient_of(&case);
            check_gradients(&penalty, &case.present_inputs(), &[0, 1, 2], &[0, 1, 2]);
        }
    }
}
