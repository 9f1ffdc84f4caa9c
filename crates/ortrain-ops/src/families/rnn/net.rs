//! Recurrent layers: kinds, inputs, attributes.

use ortrain_graph::{DType, Dim, Node, Shape};

use crate::OpError;
use crate::families::rnn::activation::{Activation, Clipped};
use crate::infer::Infer;

/// Kind of recurrent net.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NetKind {
    Rnn,
    Gru,
    Lstm,
}

impl NetKind {
    pub(super) fn from_node(node: &Node) -> NetKind {
        match &*node.op {
            op if op.starts_with("LSTM") || op == DYNAMIC_QUANTIZE_LSTM => NetKind::Lstm,
            op if op.starts_with("GRU") => NetKind::Gru,
            _ => NetKind::Rnn,
        }
    }

    pub(super) fn gate_count(self) -> usize {
        match self {
            NetKind::Rnn => 1,
            NetKind::Gru => 3,
            NetKind::Lstm => 4,
        }
    }

    pub(super) fn default_activations(self) -> &'static [Activation] {
        match self {
            NetKind::Rnn => &[Activation::Tanh],
            NetKind::Gru => &[Activation::Sigmoid, Activation::Tanh],
            NetKind::Lstm => &[Activation::Sigmoid, Activation::Tanh, Activation::Tanh],
        }
    }

    /// Returns the operator that also computes the values for the gradient, if the kind has one.
    pub(super) fn training_operator(self) -> Option<&'static str> {
        match self {
            NetKind::Rnn => None,
            NetKind::Gru => Some("GRUTraining"),
            NetKind::Lstm => Some("LSTMTraining"),
        }
    }

    /// Returns the inputs that are states: the hidden state, and the cell state.
    pub(super) fn state_inputs(self) -> std::ops::Range<usize> {
        if self == NetKind::Lstm { 5..7 } else { 5..6 }
    }
}

/// LSTM with integer weights.
pub(super) const DYNAMIC_QUANTIZE_LSTM: &str = "DynamicQuantizeLSTM";

/// Inputs of the forward operators.
pub(super) const X: usize = 0;

pub(super) const W: usize = 1;

pub(super) const R: usize = 2;

pub(super) const B: usize = 3;

pub(super) const LENGTHS: usize = 4;

pub(super) const H0: usize = 5;

pub(super) const C0: usize = 6;

pub(super) const P: usize = 7;

/// Attributes of a node.
#[derive(Clone, Debug)]
pub(super) struct Attributes {
    pub(super) kind: NetKind,
    /// Forward, reverse, or both.
    pub(super) directions: Vec<Direction>,
    pub(super) hidden_size: Option<usize>,
    /// Activations of all directions.
    pub(super) activations: Vec<Activation>,
    pub(super) clip: Option<f64>,
    /// LSTM: the forget gate is one minus the input gate.
    pub(super) input_forget: bool,
    /// GRU: the reset gate is applied after the product with the state.
    pub(super) linear_before_reset: bool,
    /// True if the batch axis is the first.
    pub(super) batch_first: bool,
    /// True if the gates are along the last axis of the weights.
    pub(super) gates_last: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Forward,
    Reverse,
}

impl Attributes {
    pub(super) fn read(node: &Node) -> Result<Attributes, OpError> {
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
            gates_last: *node.op == *DYNAMIC_QUANTIZE_LSTM,
        })
    }

    /// Returns the attributes of the direction at an index.
    pub(super) fn of_direction(&self, index: usize) -> Attributes {
        let count = self.kind.default_activations().len();
        Attributes {
            directions: vec![self.directions[index]],
            activations: self.activations[index * count..(index + 1) * count].to_vec(),
            ..self.clone()
        }
    }

    /// Returns the hidden size: the attribute, or the size of an axis of the recurrent weights.
    pub(super) fn hidden_size(&self, r: Option<&Shape>) -> Result<usize, OpError> {
        let columns = if self.gates_last { 1 } else { 2 };
        self.hidden_size.or_else(|| r.and_then(|shape| shape[columns].known())).ok_or_else(|| {
            OpError::unsupported("the hidden size is not known; give the attribute hidden_size")
        })
    }

    /// Returns true if the node is run without a decomposition.
    pub(super) fn is_plain(&self) -> bool {
        self.directions == [Direction::Forward] && !self.batch_first
    }

    /// Returns the activation of a gate.
    pub(super) fn gate_activation(&self, k: usize) -> Clipped {
        Clipped { activation: self.activations[k], clip: self.clip }
    }

    /// Returns the activation of the cell state, which is not clipped.
    pub(super) fn cell_activation(&self) -> Clipped {
        Clipped { activation: self.activations[2], clip: None }
    }

    /// # Errors
    /// Returns an error if a slope cannot be computed from the values.
    pub(super) fn check_slopes(&self) -> Result<(), OpError> {
        match self.activations.iter().find(|activation| !activation.has_slope_from_value()) {
            None => Ok(()),
            Some(other) => Err(OpError::unsupported(format!(
                "the gradient of the activation {other:?} is not supported, because its values are equal on both \
                 sides of 0; use an alpha of at least 0"
            ))),
        }
    }

    /// Checks the inputs and infers the sizes.
    pub(super) fn infer_sizes(
        &self,
        cx: &Infer<'_>,
        x: usize,
        w: usize,
        r: usize,
    ) -> Result<InferredSizes, OpError> {
        cx.expect_dtype(x, "a float type", DType::is_float)?;
        let rank = |k: usize, expected: usize, axes: &str| match cx.shape(k) {
            Some(shape) if shape.rank() != expected => {
                Err(OpError::invalid(format!("input {k} has shape {shape}, expected {axes}")))
            }
            _ => Ok(()),
        };
        rank(x, 3, if self.batch_first { "[batch, steps, input]" } else { "[steps, batch, input]" })?;
        let weight_axes = if self.gates_last {
            ["[directions, input, gates * hidden]", "[directions, hidden, gates * hidden]"]
        } else {
            ["[directions, gates * hidden, input]", "[directions, gates * hidden, hidden]"]
        };
        rank(w, 3, weight_axes[0])?;
        rank(r, 3, weight_axes[1])?;
        let size = |k: usize, axis: usize| cx.shape(k).map(|shape| shape[axis].clone());
        let hidden = self.hidden_size(cx.shape(r))?;
        let (steps, batch) = if self.batch_first { (1, 0) } else { (0, 1) };
        let unknown = |k: usize, axis: usize| size(x, k).unwrap_or_else(|| cx.unknown_dim(0, axis));
        let sizes = InferredSizes {
            steps: unknown(steps, 0),
            batch: unknown(batch, 2),
            input: size(x, 2).or_else(|| size(w, if self.gates_last { 1 } else { 2 })),
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
        let weight_shape = |columns: Dim| -> [Dim; 3] {
            if self.gates_last {
                [directions.into(), columns, rows.into()]
            } else {
                [directions.into(), rows.into(), columns]
            }
        };
        check_shape(cx, w, &weight_shape(width))?;
        check_shape(cx, r, &weight_shape(hidden.into()))?;
        Ok(sizes)
    }

    /// Returns the shape of a value of all steps and directions.
    pub(super) fn sequence_shape(&self, sizes: &InferredSizes, last: Dim) -> Shape {
        let (steps, batch, directions) =
            (sizes.steps.clone(), sizes.batch.clone(), Dim::from(self.directions.len()));
        let axes = if self.batch_first {
            [batch, steps, directions, last]
        } else {
            [steps, directions, batch, last]
        };
        axes.into_iter().collect()
    }

    /// Checks biases, lengths, states and peepholes, and infers the results of all steps and the final states.
    pub(super) fn infer_results(
        &self,
        cx: &mut Infer<'_>,
        dtype: DType,
        sizes: &InferredSizes,
    ) -> Result<(), OpError> {
        let (directions, hidden) = (Dim::from(self.directions.len()), Dim::from(sizes.hidden));
        let rows = self.kind.gate_count() * sizes.hidden;
        check_shape(cx, B, &[directions.clone(), (2 * rows).into()])?;
        check_lengths(cx, LENGTHS, &sizes.batch)?;
        let batch = sizes.batch.clone();
        let state = if self.batch_first {
            [batch, directions.clone(), hidden.clone()]
        } else {
            [directions.clone(), batch, hidden.clone()]
        };
        for k in self.kind.state_inputs() {
            check_shape(cx, k, &state)?;
        }
        if self.kind == NetKind::Lstm {
            check_shape(cx, P, &[directions, (3 * sizes.hidden).into()])?;
        }
        cx.set_output(0, dtype, Some(self.sequence_shape(sizes, hidden)));
        for k in 1..=self.kind.state_inputs().len() {
            cx.set_output(k, dtype, Some(state.iter().cloned().collect()));
        }
        Ok(())
    }
}

/// Input indices of a gradient operator.
pub(super) struct GradInputs {
    pub(super) biases: Option<usize>,
    pub(super) lengths: usize,
    pub(super) states: std::ops::Range<usize>,
    pub(super) hidden: usize,
    /// Other values that the forward pass stores: cell states and gates, or gates.
    pub(super) stored: std::ops::Range<usize>,
    /// Gradients of the results, then of the states.
    pub(super) incoming: usize,
    pub(super) peepholes: Option<usize>,
}

impl GradInputs {
    pub(super) fn from_kind(kind: NetKind) -> GradInputs {
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

    pub(super) fn count(&self) -> usize {
        self.peepholes.unwrap_or(self.incoming + self.states.len()) + 1
    }
}

/// Maximum hidden size: the recurrent weights of a larger net do not fit in any memory.
pub(super) const MAX_HIDDEN: usize = 1 << 24;

/// Maximum number of steps: the instructions of 65536 steps take one to two gigabytes.
pub(super) const MAX_STEPS: usize = 1 << 16;

/// Inferred sizes of a node.
pub(super) struct InferredSizes {
    pub(super) steps: Dim,
    pub(super) batch: Dim,
    pub(super) input: Option<Dim>,
    pub(super) hidden: usize,
}

/// Checks the shape of input `k`, if the input is present and its shape is known.
pub(super) fn check_shape(cx: &Infer<'_>, k: usize, expected: &[Dim]) -> Result<(), OpError> {
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
pub(super) fn check_lengths(cx: &Infer<'_>, k: usize, batch: &Dim) -> Result<(), OpError> {
    if cx.has_input(k) {
        cx.expect_dtype(k, "an integer type", |dtype| matches!(dtype, DType::I32 | DType::I64))?;
        check_shape(cx, k, std::slice::from_ref(batch))?;
    }
    Ok(())
}
