//! Recurrent nets: `RNN`, `GRU`, `LSTM`, and the operators of training graphs, `GRUTraining`, `LSTMTraining`,
//! `RNNGrad`, `GRUGrad` and `LSTMGrad`.
//!
//! Sources: ONNX RNN, GRU and LSTM of versions 7, 14, 22 (<https://onnx.ai/onnx/operators/onnx__LSTM.html> and so on;
//! GRU and LSTM without `layout` before 14), and ONNX Runtime's training operators of `com.microsoft` version 1.
//! `RNNGrad` follows their pattern, but onnxruntime-training does not have it. `LSTMGrad` has an additional input for
//! peepholes.
//!
//! Data is `[steps, batch, input]`, weights are `[directions, gates * hidden, input]` and `[directions, gates * hidden,
//! hidden]`, and both biases are one tensor, `[directions, 2 * gates * hidden]`. The order of the gates is i, o, f, c
//! (LSTM) and z, r, h (GRU). With lengths of sequences, results after the end of a sequence are zero, and its state
//! keeps the value at the end. `clip` limits the arguments of gates.
//!
//! The lowering supports the forward direction with the axis of steps first: the input products are one matrix product
//! for all steps, and a step is a product with the state and a map. Other forms are decomposed into it ([`direction`]).
//! In the gradient, too, only operations that depend on the previous step run step by step: gradients of weights and
//! inputs are products over all steps. The operators of training graphs have a decomposition into plain ONNX
//! ([`onnx_decomposition`]), which gradients of gradients use.

mod activation;
mod direction;
mod gru;
mod lstm;
mod onnx_decomposition;
mod simple;
mod steps;
#[cfg(test)]
mod tests;

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, Shape, ValueType};

use self::activation::{Activation, Clipped};
use crate::OpError;
use crate::grad::Grad;
use crate::infer::Infer;
use crate::introspect::Sample;
use crate::lower::Lower;
use crate::op::{Definition, Op};

const MICROSOFT: &str = "com.microsoft";

/// Kind of recurrent net.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NetKind {
    Rnn,
    Gru,
    Lstm,
}

impl NetKind {
    fn from_node(node: &Node) -> NetKind {
        match &*node.op {
            op if op.starts_with("LSTM") => NetKind::Lstm,
            op if op.starts_with("GRU") => NetKind::Gru,
            _ => NetKind::Rnn,
        }
    }

    fn gate_count(self) -> usize {
        match self {
            NetKind::Rnn => 1,
            NetKind::Gru => 3,
            NetKind::Lstm => 4,
        }
    }

    fn default_activations(self) -> &'static [Activation] {
        match self {
            NetKind::Rnn => &[Activation::Tanh],
            NetKind::Gru => &[Activation::Sigmoid, Activation::Tanh],
            NetKind::Lstm => &[Activation::Sigmoid, Activation::Tanh, Activation::Tanh],
        }
    }

    /// Returns the operator that also computes the values for the gradient, if the kind has one.
    fn training_operator(self) -> Option<&'static str> {
        match self {
            NetKind::Rnn => None,
            NetKind::Gru => Some("GRUTraining"),
            NetKind::Lstm => Some("LSTMTraining"),
        }
    }

    /// Returns the inputs that are states: the hidden state, and the cell state.
    fn state_inputs(self) -> std::ops::Range<usize> {
        if self == NetKind::Lstm { 5..7 } else { 5..6 }
    }
}

/// Inputs of the forward operators.
const X: usize = 0;
const W: usize = 1;
const R: usize = 2;
const B: usize = 3;
const LENGTHS: usize = 4;
const H0: usize = 5;
const C0: usize = 6;
const P: usize = 7;

/// Attributes of a node.
#[derive(Clone, Debug)]
struct Attributes {
    kind: NetKind,
    /// Forward, reverse, or both.
    directions: Vec<Direction>,
    hidden_size: Option<usize>,
    /// Activations of all directions.
    activations: Vec<Activation>,
    clip: Option<f64>,
    /// LSTM: the forget gate is one minus the input gate.
    input_forget: bool,
    /// GRU: the reset gate is applied after the product with the state.
    linear_before_reset: bool,
    /// True if the batch axis is the first.
    batch_first: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Forward,
    Reverse,
}

impl Attributes {
    fn read(node: &Node) -> Result<Attributes, OpError> {
        let (kind, attrs) = (NetKind::from_node(node), &node.attrs);
        let directions = match attrs.string("direction")?.unwrap_or("forward") {
            "forward" => vec![Direction::Forward],
            "reverse" => vec![Direction::Reverse],
            "bidirectional" => vec![Direction::Forward, Direction::Reverse],
            other => {
                return Err(OpError::invalid(format!(
                    "direction must be forward, reverse or bidirectional, got {other:?}"
                )));
            }
        };
        let hidden_size = attrs.int("hidden_size")?.map(|size| {
            usize::try_from(size)
                .ok()
                .filter(|&size| size > 0)
                .ok_or_else(|| OpError::invalid(format!("hidden_size must be positive, got {size}")))
        });
        if let Some(Ok(size)) = hidden_size
            && size > MAX_HIDDEN
        {
            return Err(OpError::unsupported(format!(
                "hidden_size must be at most {MAX_HIDDEN}, got {size}"
            )));
        }
        let clip = attrs.float("clip")?.map(f64::from);
        if let Some(clip) = clip
            && (clip.is_nan() || clip <= 0.0)
        {
            return Err(OpError::invalid(format!("clip must be positive, got {clip}")));
        }
        let batch_first = match attrs.int("layout")?.unwrap_or(0) {
            0 => false,
            1 => true,
            other => return Err(OpError::invalid(format!("layout must be 0 or 1, got {other}"))),
        };
        Ok(Attributes {
            kind,
            hidden_size: hidden_size.transpose()?,
            activations: Activation::parse_all(attrs, &kind.default_activations().repeat(directions.len()))?,
            directions,
            clip,
            input_forget: attrs.int("input_forget")?.unwrap_or(0) != 0,
            linear_before_reset: attrs.int("linear_before_reset")?.unwrap_or(0) != 0,
            batch_first,
        })
    }

    /// Returns true if the node is run without a decomposition.
    fn is_plain(&self) -> bool {
        self.directions == [Direction::Forward] && !self.batch_first
    }

    /// Returns the activation of a gate.
    fn gate_activation(&self, k: usize) -> Clipped {
        Clipped { activation: self.activations[k], clip: self.clip }
    }

    /// Returns the activation of the cell state, which is not clipped.
    fn cell_activation(&self) -> Clipped {
        Clipped { activation: self.activations[2], clip: None }
    }

    /// # Errors
    /// Returns an error if a slope cannot be computed from the values.
    fn check_slopes(&self) -> Result<(), OpError> {
        match self.activations.iter().find(|activation| !activation.has_slope_from_value()) {
            None => Ok(()),
            Some(other) => Err(OpError::unsupported(format!(
                "the gradient of the activation {other:?} is not supported, because its values are equal on both \
                 sides of 0; use an alpha of at least 0"
            ))),
        }
    }

    /// Checks the inputs and infers the sizes.
    fn infer_sizes(&self, cx: &Infer<'_>, x: usize, w: usize, r: usize) -> Result<InferredSizes, OpError> {
        cx.expect_dtype(x, "a float type", DType::is_float)?;
        let rank = |k: usize, expected: usize, axes: &str| match cx.shape(k) {
            Some(shape) if shape.rank() != expected => {
                Err(OpError::invalid(format!("input {k} has shape {shape}, expected {axes}")))
            }
            _ => Ok(()),
        };
        rank(x, 3, if self.batch_first { "[batch, steps, input]" } else { "[steps, batch, input]" })?;
        rank(w, 3, "[directions, gates * hidden, input]")?;
        rank(r, 3, "[directions, gates * hidden, hidden]")?;
        let size = |k: usize, axis: usize| cx.shape(k).map(|shape| shape[axis].clone());
        let hidden =
            self.hidden_size.or_else(|| size(r, 2).and_then(|dim| dim.known())).ok_or_else(|| {
                OpError::unsupported("the hidden size is not known; give the attribute hidden_size")
            })?;
        let (steps, batch) = if self.batch_first { (1, 0) } else { (0, 1) };
        let unknown = |k: usize, axis: usize| size(x, k).unwrap_or_else(|| cx.unknown_dim(0, axis));
        let sizes = InferredSizes {
            steps: unknown(steps, 0),
            batch: unknown(batch, 2),
            input: size(x, 2).or_else(|| size(w, 2)),
            hidden,
        };
        if hidden > MAX_HIDDEN {
            let message =
                format!("the hidden size must be at most {MAX_HIDDEN}, got {hidden} from the shape of R");
            return Err(OpError::unsupported(message));
        }
        if let Some(steps) = sizes.steps.known()
            && steps > MAX_STEPS
        {
            return Err(OpError::unsupported(format!(
                "sequences of {steps} steps are too long, at most {MAX_STEPS} steps are supported. Split longer \
                 sequences, and start each part with the final states of the previous part"
            )));
        }
        let (directions, rows) = (self.directions.len(), self.kind.gate_count() * hidden);
        let width = sizes.input.clone().unwrap_or_else(|| Dim::symbol("input"));
        check_shape(cx, w, &[directions.into(), rows.into(), width])?;
        check_shape(cx, r, &[directions.into(), rows.into(), hidden.into()])?;
        Ok(sizes)
    }
}

/// Maximum hidden size: the recurrent weights of a larger net do not fit in any memory.
const MAX_HIDDEN: usize = 1 << 24;

/// Maximum number of steps: the instructions of 65536 steps take one to two gigabytes.
const MAX_STEPS: usize = 1 << 16;

/// Inferred sizes of a node.
struct InferredSizes {
    steps: Dim,
    batch: Dim,
    input: Option<Dim>,
    hidden: usize,
}

/// Checks the shape of input `k`, if the input is present and its shape is known.
fn check_shape(cx: &Infer<'_>, k: usize, expected: &[Dim]) -> Result<(), OpError> {
    let Some(shape) = cx.shape(k).filter(|_| cx.has_input(k)) else { return Ok(()) };
    let fits = |(actual_dim, expected_dim): (&Dim, &Dim)| match (actual_dim.known(), expected_dim.known()) {
        (Some(actual_size), Some(expected_size)) => actual_size == expected_size,
        _ => true,
    };
    if shape.rank() == expected.len() && shape.iter().zip(expected).all(fits) {
        return Ok(());
    }
    let expected_shape: Shape = expected.iter().cloned().collect();
    Err(OpError::invalid(format!("input {k} has shape {shape}, expected {expected_shape}")))
}

/// Checks the lengths of sequences.
fn check_lengths(cx: &Infer<'_>, k: usize, batch: &Dim) -> Result<(), OpError> {
    if cx.has_input(k) {
        cx.expect_dtype(k, "an integer type", |dtype| matches!(dtype, DType::I32 | DType::I64))?;
        check_shape(cx, k, std::slice::from_ref(batch))?;
    }
    Ok(())
}

/// Forward pass of a recurrent net: the ordinary operator or the operator of training graphs.
struct Recurrent {
    attributes: Attributes,
}

impl Op for Recurrent {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let attributes = &self.attributes;
        let (kind, training) = (attributes.kind, cx.node().op.ends_with("Training"));
        let (inputs, outputs) = match kind {
            NetKind::Rnn => (6, 2),
            NetKind::Gru => (6, if training { 3 } else { 2 }),
            NetKind::Lstm => (8, if training { 5 } else { 3 }),
        };
        cx.check_arity(3, inputs, outputs)?;
        if training && !attributes.is_plain() {
            return Err(OpError::unsupported(
                "one training node supports only the forward direction with layout 0",
            ));
        }
        let dtype = cx.expect_same_dtype(
            [X, W, R, B, H0].into_iter().chain((inputs > C0).then_some(C0)).chain((inputs > P).then_some(P)),
        )?;
        let sizes = attributes.infer_sizes(cx, X, W, R)?;
        let (directions, hidden) = (Dim::from(attributes.directions.len()), Dim::from(sizes.hidden));
        let rows = kind.gate_count() * sizes.hidden;
        check_shape(cx, B, &[directions.clone(), (2 * rows).into()])?;
        check_lengths(cx, LENGTHS, &sizes.batch)?;
        let state: Vec<Dim> = if attributes.batch_first {
            vec![sizes.batch.clone(), directions.clone(), hidden.clone()]
        } else {
            vec![directions.clone(), sizes.batch.clone(), hidden.clone()]
        };
        for k in kind.state_inputs() {
            check_shape(cx, k, &state)?;
        }
        if kind == NetKind::Lstm {
            check_shape(cx, P, &[directions.clone(), (3 * sizes.hidden).into()])?;
        }
        let sequence_shape = |last: Dim| -> Shape {
            if attributes.batch_first {
                [sizes.batch.clone(), sizes.steps.clone(), directions.clone(), last].into_iter().collect()
            } else {
                [sizes.steps.clone(), directions.clone(), sizes.batch.clone(), last].into_iter().collect()
            }
        };
        cx.set_output(0, dtype, Some(sequence_shape(hidden.clone())));
        for k in 1..=kind.state_inputs().len() {
            cx.set_output(k, dtype, Some(state.iter().cloned().collect()));
        }
        match kind {
            NetKind::Lstm => {
                cx.set_output(3, dtype, Some(sequence_shape(hidden)));
                cx.set_output(4, dtype, Some(sequence_shape(rows.into())));
            }
            NetKind::Gru => cx.set_output(2, dtype, Some(sequence_shape(rows.into()))),
            NetKind::Rnn => {}
        }
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let attributes = &self.attributes;
        let states = attributes.kind.state_inputs().len();
        let arriving: Vec<_> = (0..=states).map(|k| cx.output_grad(k)).collect();
        if (states + 1..5).any(|k| cx.output_grad(k).is_some()) {
            return Err(OpError::unsupported(
                "gradients of the gates and states that are stored for the backward pass are not supported",
            ));
        }
        if arriving.iter().all(Option::is_none) {
            return Ok(());
        }
        attributes.check_slopes()?;
        if let Some(training) = attributes.kind.training_operator() {
            cx.replace_node(|graph, index| {
                let node = &mut graph.nodes[index];
                (node.domain, node.op) = (MICROSOFT.into(), training.into());
                node.attrs.0.remove("layout");
            });
        }
        let saved_outputs = match attributes.kind {
            NetKind::Rnn => vec![Some(cx.output(0, "hidden"))],
            NetKind::Gru => vec![Some(cx.output(0, "hidden")), Some(cx.output(2, "zrh"))],
            NetKind::Lstm => {
                let [hidden, cells, gates] =
                    [(0, "hidden"), (3, "all_cell_states"), (4, "iofc")].map(|(k, name)| cx.output(k, name));
                vec![Some(hidden), Some(cells), Some(gates)]
            }
        };
        let mut inputs: Vec<_> = [X, W, R].map(|k| cx.optional_input(k)).to_vec();
        if attributes.kind == NetKind::Gru {
            inputs.push(cx.optional_input(B));
        }
        inputs.push(cx.optional_input(LENGTHS));
        inputs.extend(attributes.kind.state_inputs().map(|k| cx.optional_input(k)));
        inputs.extend(saved_outputs);
        inputs.extend(arriving);
        inputs.extend(cx.optional_input(P).map(Some));
        // Inputs of the forward node, in the order of the gradient's results.
        let of: Vec<usize> =
            [X, W, R, B].into_iter().chain(attributes.kind.state_inputs()).chain([P]).collect();
        let needed: Vec<bool> = of.iter().map(|&k| cx.needs_grad(k)).collect();
        let mut attrs = cx.node().attrs.clone();
        attrs.0.remove("layout");
        let op = match attributes.kind {
            NetKind::Rnn => "RNNGrad",
            NetKind::Gru => "GRUGrad",
            NetKind::Lstm => "LSTMGrad",
        };
        let gradients = cx.add_node_with_optional_outputs(MICROSOFT, op, &inputs, &needed, attrs);
        for (k, gradient) in of.into_iter().zip(gradients) {
            if let Some(gradient) = gradient {
                cx.set_grad(k, gradient);
            }
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        if !self.attributes.is_plain() {
            return cx.lower_decomposition();
        }
        match self.attributes.kind {
            NetKind::Rnn => simple::lower(&self.attributes, cx),
            NetKind::Gru => gru::lower(&self.attributes, cx),
            NetKind::Lstm => lstm::lower(&self.attributes, cx),
        }
    }
}

/// Gradient of [`Recurrent`].
struct RecurrentGrad {
    attributes: Attributes,
}

/// Input indices of a gradient operator.
struct GradInputs {
    biases: Option<usize>,
    lengths: usize,
    states: std::ops::Range<usize>,
    hidden: usize,
    /// Other values that the forward pass stores: cell states and gates, or gates.
    stored: std::ops::Range<usize>,
    /// Gradients of the results, then of the states.
    incoming: usize,
    peepholes: Option<usize>,
}

impl GradInputs {
    fn from_kind(kind: NetKind) -> GradInputs {
        match kind {
            NetKind::Rnn => GradInputs {
                biases: None,
                lengths: 3,
                states: 4..5,
                hidden: 5,
                stored: 6..6,
                incoming: 6,
                peepholes: None,
            },
            NetKind::Gru => GradInputs {
                biases: Some(3),
                lengths: 4,
                states: 5..6,
                hidden: 6,
                stored: 7..8,
                incoming: 8,
                peepholes: None,
            },
            NetKind::Lstm => GradInputs {
                biases: None,
                lengths: 3,
                states: 4..6,
                hidden: 6,
                stored: 7..9,
                incoming: 9,
                peepholes: Some(12),
            },
        }
    }

    fn count(&self) -> usize {
        self.peepholes.unwrap_or(self.incoming + self.states.len()) + 1
    }
}

impl Op for RecurrentGrad {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let attributes = &self.attributes;
        let at = GradInputs::from_kind(attributes.kind);
        let states = attributes.kind.state_inputs().len();
        let outputs = 4 + states + usize::from(attributes.kind == NetKind::Lstm);
        cx.check_arity(3, at.count(), outputs)?;
        if !attributes.is_plain() {
            return Err(OpError::unsupported(
                "one training node supports only the forward direction with layout 0",
            ));
        }
        for k in [Some(at.hidden), attributes.kind.training_operator().map(|_| at.stored.end - 1)]
            .into_iter()
            .flatten()
        {
            if !cx.has_input(k) {
                return Err(OpError::invalid(format!("input {k} is missing")));
            }
        }
        let floats = (0..at.count()).filter(|&k| k != at.lengths);
        let dtype = cx.expect_same_dtype(floats)?;
        let sizes = attributes.infer_sizes(cx, X, W, R)?;
        let (one, hidden) = (Dim::Known(1), Dim::from(sizes.hidden));
        let rows = attributes.kind.gate_count() * sizes.hidden;
        check_lengths(cx, at.lengths, &sizes.batch)?;
        let sequence_shape = |last: Dim| [sizes.steps.clone(), one.clone(), sizes.batch.clone(), last];
        let state = [one.clone(), sizes.batch.clone(), hidden.clone()];
        check_shape(cx, at.hidden, &sequence_shape(hidden.clone()))?;
        for k in at.stored.clone() {
            let last = if k + 1 == at.stored.end { rows.into() } else { hidden.clone() };
            check_shape(cx, k, &sequence_shape(last))?;
        }
        check_shape(cx, at.incoming, &sequence_shape(hidden.clone()))?;
        for k in at.states.clone().chain(at.incoming + 1..=at.incoming + states) {
            check_shape(cx, k, &state)?;
        }
        if let Some(k) = at.biases {
            check_shape(cx, k, &[one.clone(), (2 * rows).into()])?;
        }
        if let Some(k) = at.peepholes {
            check_shape(cx, k, &[one.clone(), (3 * sizes.hidden).into()])?;
        }
        for k in [X, W, R] {
            cx.set_output(k, dtype, cx.shape(k).cloned());
        }
        cx.set_output(3, dtype, Some([one.clone(), (2 * rows).into()].into_iter().collect()));
        for k in 4..4 + states {
            cx.set_output(k, dtype, Some(state.iter().cloned().collect()));
        }
        cx.set_output(4 + states, dtype, Some([one, (3 * sizes.hidden).into()].into_iter().collect()));
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        self.attributes.check_slopes()?;
        match self.attributes.kind {
            NetKind::Rnn => simple::lower_grad(&self.attributes, cx),
            NetKind::Gru => gru::lower_grad(&self.attributes, cx),
            NetKind::Lstm => lstm::lower_grad(&self.attributes, cx),
        }
    }
}

fn build(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(Recurrent { attributes: Attributes::read(node)? }))
}

fn build_grad(_: &Graph, node: &Node) -> Result<Box<dyn Op>, OpError> {
    Ok(Box::new(RecurrentGrad { attributes: Attributes::read(node)? }))
}

/// Sample with the attribute that is required if the shapes of the weights are unknown.
fn hidden_size_sample(_: &Definition) -> Sample {
    Sample::of(Attrs::new().with("hidden_size", 2i64))
}

/// Sample of a net with one step, one sequence, input size 1 and hidden size 2: X, W and R.
fn net_sample(definition: &Definition) -> Sample {
    let rows = 2 * if definition.name == "GRUTraining" { NetKind::Gru } else { NetKind::Lstm }.gate_count();
    let dims = [[1, 1, 1], [1, rows, 1], [1, rows, 2]];
    let inputs = dims.map(|dims| Some(ValueType::tensor(DType::F32, &dims))).to_vec();
    Sample { inputs, ..hidden_size_sample(definition) }
}

/// Sample of the gradient of a net with two steps, two sequences, input size 2 and hidden size 2.
fn gradient_sample(definition: &Definition) -> Sample {
    let kind = match definition.name {
        "RNNGrad" => NetKind::Rnn,
        "GRUGrad" => NetKind::Gru,
        _ => NetKind::Lstm,
    };
    let (at, rows) = (GradInputs::from_kind(kind), 2 * kind.gate_count());
    let dims = |k: usize| match k {
        X => vec![2, 2, 2],
        W | R => vec![1, rows, 2],
        k if at.biases == Some(k) => vec![1, 2 * rows],
        k if at.peepholes == Some(k) => vec![1, 6],
        k if at.stored.contains(&k) && k + 1 == at.stored.end => vec![2, 1, 2, rows],
        k if k == at.hidden || k == at.incoming || at.stored.contains(&k) => vec![2, 1, 2, 2],
        _ => vec![1, 2, 2],
    };
    let ty = |k| (k != at.lengths).then(|| ValueType::tensor(DType::F32, &dims(k)));
    Sample { inputs: (0..at.count()).map(ty).collect(), ..hidden_size_sample(definition) }
}

pub(crate) fn definitions() -> Vec<Definition> {
    const WEIGHTS: &[usize] = &[W, R, B, P];
    const BFLOAT16: &[(i64, &[DType])] = &[(22, &[DType::BF16])];
    let plain = ["RNN", "GRU", "LSTM"].map(|name| {
        Definition::new("", name, &[1, 7, 14, 22], build)
            .decompose(direction::decompose)
            .composition_where(direction::is_composition)
            .weights(WEIGHTS)
            .sample(hidden_size_sample)
            .later_types(BFLOAT16)
    });
    let training = ["GRUTraining", "LSTMTraining"]
        .map(|name| Definition::new(MICROSOFT, name, &[1], build).weights(WEIGHTS).sample(net_sample))
        .map(|definition| definition.differentiated_as(onnx_decomposition::decompose_training));
    let gradients = ["RNNGrad", "GRUGrad", "LSTMGrad"].map(|name| {
        Definition::new(MICROSOFT, name, &[1], build_grad)
            .differentiated_as(onnx_decomposition::decompose_grad)
            .sample(gradient_sample)
    });
    plain.into_iter().chain(training).chain(gradients).collect()
}
