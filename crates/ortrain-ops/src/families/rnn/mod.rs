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
enum Kind {
    Rnn,
    Gru,
    Lstm,
}

impl Kind {
    fn of(node: &Node) -> Kind {
        match &*node.op {
            op if op.starts_with("LSTM") => Kind::Lstm,
            op if op.starts_with("GRU") => Kind::Gru,
            _ => Kind::Rnn,
        }
    }

    fn gates(self) -> usize {
        match self {
            Kind::Rnn => 1,
            Kind::Gru => 3,
            Kind::Lstm => 4,
        }
    }

    fn activations(self) -> &'static [Activation] {
        match self {
            Kind::Rnn => &[Activation::Tanh],
            Kind::Gru => &[Activation::Sigmoid, Activation::Tanh],
            Kind::Lstm => &[Activation::Sigmoid, Activation::Tanh, Activation::Tanh],
        }
    }

    /// Returns the operator that also computes the values for the gradient, if the kind has one.
    fn training(self) -> Option<&'static str> {
        match self {
            Kind::Rnn => None,
            Kind::Gru => Some("GRUTraining"),
            Kind::Lstm => Some("LSTMTraining"),
        }
    }

    /// Returns the inputs that are states: the hidden state, and the cell state.
    fn states(self) -> std::ops::Range<usize> {
        if self == Kind::Lstm { 5..7 } else { 5..6 }
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
    kind: Kind,
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
        let (kind, attrs) = (Kind::of(node), &node.attrs);
        let directions = match attrs.string("direction")?.unwrap_or("forward") {
            "forward" => vec![Direction::Forward],
            "reverse" => vec![Direction::Reverse],
            "bidirectional" => vec![Direction::Forward, Direction::Reverse],
            other => {
                return Err(OpError::invalid(format!(
                    "direction is {other:?}; it must be forward, reverse or bidirectional"
                )));
            }
        };
        let hidden_size = attrs.int("hidden_size")?.map(|size| {
            usize::try_from(size)
                .ok()
                .filter(|&size| size > 0)
                .ok_or_else(|| OpError::invalid(format!("hidden_size is {size}; it must be positive")))
        });
        if let Some(Ok(size)) = hidden_size
            && size > MAX_HIDDEN
        {
            return Err(OpError::unsupported(format!("hidden_size is {size}; {MAX_HIDDEN} is the largest")));
        }
        let clip = attrs.float("clip")?.map(f64::from);
        if let Some(clip) = clip
            && (clip.is_nan() || clip <= 0.0)
        {
            return Err(OpError::invalid(format!("clip is {clip}; it must be positive")));
        }
        let batch_first = match attrs.int("layout")?.unwrap_or(0) {
            0 => false,
            1 => true,
            other => return Err(OpError::invalid(format!("layout is {other}; it must be 0 or 1"))),
        };
        Ok(Attributes {
            kind,
            hidden_size: hidden_size.transpose()?,
            activations: Activation::read_all(attrs, &kind.activations().repeat(directions.len()))?,
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
    fn gate(&self, k: usize) -> Clipped {
        Clipped { activation: self.activations[k], clip: self.clip }
    }

    /// Returns the activation of the cell state, which is not clipped.
    fn of_cell(&self) -> Clipped {
        Clipped { activation: self.activations[2], clip: None }
    }

    /// # Errors
    /// Returns an error if a slope cannot be computed from the values.
    fn check_slopes(&self) -> Result<(), OpError> {
        match self.activations.iter().find(|activation| !activation.has_slope()) {
            None => Ok(()),
            Some(other) => Err(OpError::unsupported(format!(
                "the activation {other:?} takes the same values on both sides of its kink, so it has no gradient here; \
                 use one with an alpha of zero or more"
            ))),
        }
    }

    /// Checks the inputs and infers the sizes.
    fn infer(&self, cx: &Infer<'_>, x: usize, w: usize, r: usize) -> Result<Found, OpError> {
        cx.dtype_where(x, "a float type", DType::is_float)?;
        let rank = |k: usize, wanted: usize, axes: &str| match cx.shape(k) {
            Some(shape) if shape.rank() != wanted => {
                Err(OpError::invalid(format!("input {k} has shape {shape}; {axes} is needed")))
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
        let found = Found {
            steps: unknown(steps, 0),
            batch: unknown(batch, 2),
            input: size(x, 2).or_else(|| size(w, 2)),
            hidden,
        };
        if hidden > MAX_HIDDEN {
            let message =
                format!("the hidden size is {hidden}, by the shape of R; {MAX_HIDDEN} is the largest");
            return Err(OpError::unsupported(message));
        }
        if let Some(steps) = found.steps.known()
            && steps > MAX_STEPS
        {
            return Err(OpError::unsupported(format!(
                "the sequences have {steps} steps; {MAX_STEPS} are the most, as each is computed by instructions of \
                 its own; give longer ones in parts, each with the states at the end of the part before"
            )));
        }
        let (directions, rows) = (self.directions.len(), self.kind.gates() * hidden);
        let width = found.input.clone().unwrap_or_else(|| Dim::symbol("input"));
        expect(cx, w, &[directions.into(), rows.into(), width])?;
        expect(cx, r, &[directions.into(), rows.into(), hidden.into()])?;
        Ok(found)
    }
}

/// Maximum hidden size: the recurrent weights of a larger net do not fit in any memory.
const MAX_HIDDEN: usize = 1 << 24;

/// Maximum number of steps: the instructions of 65536 steps take one to two gigabytes.
const MAX_STEPS: usize = 1 << 16;

/// Inferred sizes of a node.
struct Found {
    steps: Dim,
    batch: Dim,
    input: Option<Dim>,
    hidden: usize,
}

/// Checks the shape of input `k`, if the input is present and its shape is known.
fn expect(cx: &Infer<'_>, k: usize, wanted: &[Dim]) -> Result<(), OpError> {
    let Some(shape) = cx.shape(k).filter(|_| cx.has(k)) else { return Ok(()) };
    let fits = |(found, wanted): (&Dim, &Dim)| match (found.known(), wanted.known()) {
        (Some(found), Some(wanted)) => found == wanted,
        _ => true,
    };
    if shape.rank() == wanted.len() && shape.iter().zip(wanted).all(fits) {
        return Ok(());
    }
    let wanted: Shape = wanted.iter().cloned().collect();
    Err(OpError::invalid(format!("input {k} has shape {shape}; {wanted} is needed")))
}

/// Checks the lengths of sequences.
fn expect_lengths(cx: &Infer<'_>, k: usize, batch: &Dim) -> Result<(), OpError> {
    if cx.has(k) {
        cx.dtype_where(k, "an integer type", |dtype| matches!(dtype, DType::I32 | DType::I64))?;
        expect(cx, k, std::slice::from_ref(batch))?;
    }
    Ok(())
}

/// Forward pass of a recurrent net: the ordinary operator or the operator of training graphs.
struct Recurrent {
    attributes: Attributes,
}

impl Op for Recurrent {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let own = &self.attributes;
        let (kind, training) = (own.kind, cx.node().op.ends_with("Training"));
        let (inputs, outputs) = match kind {
            Kind::Rnn => (6, 2),
            Kind::Gru => (6, if training { 3 } else { 2 }),
            Kind::Lstm => (8, if training { 5 } else { 3 }),
        };
        cx.arity(3, inputs, outputs)?;
        if training && !own.is_plain() {
            return Err(OpError::unsupported(
                "only the forward direction, with steps in front, is trained as one node",
            ));
        }
        let dtype = cx.same_dtype(
            [X, W, R, B, H0].into_iter().chain((inputs > C0).then_some(C0)).chain((inputs > P).then_some(P)),
        )?;
        let found = own.infer(cx, X, W, R)?;
        let (directions, hidden) = (Dim::from(own.directions.len()), Dim::from(found.hidden));
        let rows = kind.gates() * found.hidden;
        expect(cx, B, &[directions.clone(), (2 * rows).into()])?;
        expect_lengths(cx, LENGTHS, &found.batch)?;
        let state: Vec<Dim> = if own.batch_first {
            vec![found.batch.clone(), directions.clone(), hidden.clone()]
        } else {
            vec![directions.clone(), found.batch.clone(), hidden.clone()]
        };
        for k in kind.states() {
            expect(cx, k, &state)?;
        }
        if kind == Kind::Lstm {
            expect(cx, P, &[directions.clone(), (3 * found.hidden).into()])?;
        }
        let all = |last: Dim| -> Shape {
            if own.batch_first {
                [found.batch.clone(), found.steps.clone(), directions.clone(), last].into_iter().collect()
            } else {
                [found.steps.clone(), directions.clone(), found.batch.clone(), last].into_iter().collect()
            }
        };
        cx.output(0, dtype, Some(all(hidden.clone())));
        for k in 1..=kind.states().len() {
            cx.output(k, dtype, Some(state.iter().cloned().collect()));
        }
        match kind {
            Kind::Lstm => {
                cx.output(3, dtype, Some(all(hidden)));
                cx.output(4, dtype, Some(all(rows.into())));
            }
            Kind::Gru => cx.output(2, dtype, Some(all(rows.into()))),
            Kind::Rnn => {}
        }
        Ok(())
    }

    fn grad(&self, cx: &mut Grad<'_>) -> Result<(), OpError> {
        let own = &self.attributes;
        let states = own.kind.states().len();
        let arriving: Vec<_> = (0..=states).map(|k| cx.output_grad(k)).collect();
        if (states + 1..5).any(|k| cx.output_grad(k).is_some()) {
            return Err(OpError::unsupported(
                "gradients that arrive at the gates and states that are kept for the gradient are not passed on",
            ));
        }
        if arriving.iter().all(Option::is_none) {
            return Ok(());
        }
        own.check_slopes()?;
        if let Some(training) = own.kind.training() {
            cx.change_node(|graph, index| {
                let node = &mut graph.nodes[index];
                (node.domain, node.op) = (MICROSOFT.into(), training.into());
                node.attrs.0.remove("layout");
            });
        }
        let kept = match own.kind {
            Kind::Rnn => vec![Some(cx.output(0, "hidden"))],
            Kind::Gru => vec![Some(cx.output(0, "hidden")), Some(cx.output(2, "zrh"))],
            Kind::Lstm => {
                let [hidden, cells, gates] =
                    [(0, "hidden"), (3, "all_cell_states"), (4, "iofc")].map(|(k, name)| cx.output(k, name));
                vec![Some(hidden), Some(cells), Some(gates)]
            }
        };
        let mut inputs: Vec<_> = [X, W, R].map(|k| cx.optional_input(k)).to_vec();
        if own.kind == Kind::Gru {
            inputs.push(cx.optional_input(B));
        }
        inputs.push(cx.optional_input(LENGTHS));
        inputs.extend(own.kind.states().map(|k| cx.optional_input(k)));
        inputs.extend(kept);
        inputs.extend(arriving);
        inputs.extend(cx.optional_input(P).map(Some));
        // Inputs of the forward node, in the order of the gradient's results.
        let of: Vec<usize> = [X, W, R, B].into_iter().chain(own.kind.states()).chain([P]).collect();
        let wanted: Vec<bool> = of.iter().map(|&k| cx.wants(k)).collect();
        let mut attrs = cx.node().attrs.clone();
        attrs.0.remove("layout");
        let op = match own.kind {
            Kind::Rnn => "RNNGrad",
            Kind::Gru => "GRUGrad",
            Kind::Lstm => "LSTMGrad",
        };
        let gradients = cx.add_wanted(MICROSOFT, op, &inputs, &wanted, attrs);
        for (k, gradient) in of.into_iter().zip(gradients) {
            if let Some(gradient) = gradient {
                cx.give(k, gradient);
            }
        }
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        if !self.attributes.is_plain() {
            return cx.lower_decomposition();
        }
        match self.attributes.kind {
            Kind::Rnn => simple::lower(&self.attributes, cx),
            Kind::Gru => gru::lower(&self.attributes, cx),
            Kind::Lstm => lstm::lower(&self.attributes, cx),
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
    kept: std::ops::Range<usize>,
    /// Gradients of the results, then of the states.
    arriving: usize,
    peepholes: Option<usize>,
}

impl GradInputs {
    fn of(kind: Kind) -> GradInputs {
        match kind {
            Kind::Rnn => GradInputs {
                biases: None,
                lengths: 3,
                states: 4..5,
                hidden: 5,
                kept: 6..6,
                arriving: 6,
                peepholes: None,
            },
            Kind::Gru => GradInputs {
                biases: Some(3),
                lengths: 4,
                states: 5..6,
                hidden: 6,
                kept: 7..8,
                arriving: 8,
                peepholes: None,
            },
            Kind::Lstm => GradInputs {
                biases: None,
                lengths: 3,
                states: 4..6,
                hidden: 6,
                kept: 7..9,
                arriving: 9,
                peepholes: Some(12),
            },
        }
    }

    fn count(&self) -> usize {
        self.peepholes.unwrap_or(self.arriving + self.states.len()) + 1
    }
}

impl Op for RecurrentGrad {
    fn infer(&self, cx: &mut Infer<'_>) -> Result<(), OpError> {
        let own = &self.attributes;
        let at = GradInputs::of(own.kind);
        let states = own.kind.states().len();
        let outputs = 4 + states + usize::from(own.kind == Kind::Lstm);
        cx.arity(3, at.count(), outputs)?;
        if !own.is_plain() {
            return Err(OpError::unsupported(
                "only the forward direction, with steps in front, is trained as one node",
            ));
        }
        for k in [Some(at.hidden), own.kind.training().map(|_| at.kept.end - 1)].into_iter().flatten() {
            if !cx.has(k) {
                return Err(OpError::invalid(format!("input {k} is left out but is needed")));
            }
        }
        let floats = (0..at.count()).filter(|&k| k != at.lengths);
        let dtype = cx.same_dtype(floats)?;
        let found = own.infer(cx, X, W, R)?;
        let (one, hidden) = (Dim::Known(1), Dim::from(found.hidden));
        let rows = own.kind.gates() * found.hidden;
        expect_lengths(cx, at.lengths, &found.batch)?;
        let all = |last: Dim| [found.steps.clone(), one.clone(), found.batch.clone(), last];
        let state = [one.clone(), found.batch.clone(), hidden.clone()];
        expect(cx, at.hidden, &all(hidden.clone()))?;
        for k in at.kept.clone() {
            let last = if k + 1 == at.kept.end { rows.into() } else { hidden.clone() };
            expect(cx, k, &all(last))?;
        }
        expect(cx, at.arriving, &all(hidden.clone()))?;
        for k in at.states.clone().chain(at.arriving + 1..=at.arriving + states) {
            expect(cx, k, &state)?;
        }
        if let Some(k) = at.biases {
            expect(cx, k, &[one.clone(), (2 * rows).into()])?;
        }
        if let Some(k) = at.peepholes {
            expect(cx, k, &[one.clone(), (3 * found.hidden).into()])?;
        }
        for k in [X, W, R] {
            cx.output(k, dtype, cx.shape(k).cloned());
        }
        cx.output(3, dtype, Some([one.clone(), (2 * rows).into()].into_iter().collect()));
        for k in 4..4 + states {
            cx.output(k, dtype, Some(state.iter().cloned().collect()));
        }
        cx.output(4 + states, dtype, Some([one, (3 * found.hidden).into()].into_iter().collect()));
        Ok(())
    }

    fn lower(&self, cx: &mut Lower<'_>) -> Result<(), OpError> {
        self.attributes.check_slopes()?;
        match self.attributes.kind {
            Kind::Rnn => simple::lower_grad(&self.attributes, cx),
            Kind::Gru => gru::lower_grad(&self.attributes, cx),
            Kind::Lstm => lstm::lower_grad(&self.attributes, cx),
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
fn a_width(_: &Definition) -> Sample {
    Sample::of(Attrs::new().with("hidden_size", 2i64))
}

/// Sample of a net with one step, one sequence, input size 1 and hidden size 2: X, W and R.
fn a_net(definition: &Definition) -> Sample {
    let rows = 2 * if definition.name == "GRUTraining" { Kind::Gru } else { Kind::Lstm }.gates();
    let dims = [[1, 1, 1], [1, rows, 1], [1, rows, 2]];
    let inputs = dims.map(|dims| Some(ValueType::tensor(DType::F32, &dims))).to_vec();
    Sample { inputs, ..a_width(definition) }
}

/// Sample of the gradient of a net with two steps, two sequences, input size 2 and hidden size 2.
fn a_gradient(definition: &Definition) -> Sample {
    let kind = match definition.name {
        "RNNGrad" => Kind::Rnn,
        "GRUGrad" => Kind::Gru,
        _ => Kind::Lstm,
    };
    let (at, rows) = (GradInputs::of(kind), 2 * kind.gates());
    let dims = |k: usize| match k {
        X => vec![2, 2, 2],
        W | R => vec![1, rows, 2],
        k if at.biases == Some(k) => vec![1, 2 * rows],
        k if at.peepholes == Some(k) => vec![1, 6],
        k if at.kept.contains(&k) && k + 1 == at.kept.end => vec![2, 1, 2, rows],
        k if k == at.hidden || k == at.arriving || at.kept.contains(&k) => vec![2, 1, 2, 2],
        _ => vec![1, 2, 2],
    };
    let ty = |k| (k != at.lengths).then(|| ValueType::tensor(DType::F32, &dims(k)));
    Sample { inputs: (0..at.count()).map(ty).collect(), ..a_width(definition) }
}

pub(crate) fn definitions() -> Vec<Definition> {
    const WEIGHTS: &[usize] = &[W, R, B, P];
    const BFLOAT16: &[(i64, &[DType])] = &[(22, &[DType::BF16])];
    let plain = ["RNN", "GRU", "LSTM"].map(|name| {
        Definition::new("", name, &[1, 7, 14, 22], build)
            .decompose(direction::decompose)
            .composition_where(direction::is_composition)
            .weights(WEIGHTS)
            .sample(a_width)
            .later_types(BFLOAT16)
    });
    let training = ["GRUTraining", "LSTMTraining"]
        .map(|name| Definition::new(MICROSOFT, name, &[1], build).weights(WEIGHTS).sample(a_net))
        .map(|definition| definition.differentiated_as(onnx_decomposition::decompose_training));
    let gradients = ["RNNGrad", "GRUGrad", "LSTMGrad"].map(|name| {
        Definition::new(MICROSOFT, name, &[1], build_grad)
            .differentiated_as(onnx_decomposition::decompose_grad)
            .sample(a_gradient)
    });
    plain.into_iter().chain(training).chain(gradients).collect()
}
