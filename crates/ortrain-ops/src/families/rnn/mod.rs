//! Recurrent nets: `RNN`, `GRU`, `LSTM`, `DynamicQuantizeLSTM` ([`dynamic_quantize_lstm`]), and the operators of
//! training graphs, `GRUTraining`, `LSTMTraining`, `RNNGrad`, `GRUGrad` and `LSTMGrad`.
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
mod dynamic_quantize_lstm;
mod gru;
mod lstm;
mod net;
mod onnx_decomposition;
mod scan_builder;
mod simple;
mod steps;
#[cfg(test)]
mod tests;

use ortrain_graph::{Attrs, DType, Dim, Graph, Node, ValueType};

use crate::OpError;
use crate::class::Class;
use crate::families::rnn::net::{
    Attributes, B, C0, GradInputs, H0, LENGTHS, NetKind, P, R, W, X, check_lengths, check_shape,
};
use crate::grad::Grad;
use crate::infer::Infer;
use crate::lower::Lower;
use crate::op::{Definition, Op};
use crate::sample::Sample;

const MICROSOFT: &str = "com.microsoft";

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
        attributes.infer_results(cx, dtype, &sizes)?;
        let gates = attributes.sequence_shape(&sizes, (kind.gate_count() * sizes.hidden).into());
        match kind {
            NetKind::Lstm => {
                cx.set_output(3, dtype, Some(attributes.sequence_shape(&sizes, sizes.hidden.into())));
                cx.set_output(4, dtype, Some(gates));
            }
            NetKind::Gru => cx.set_output(2, dtype, Some(gates)),
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
    let plain = [("RNN", &[H0][..]), ("GRU", &[H0]), ("LSTM", &[H0, C0])].map(|(name, states)| {
        Definition::new("", name, &[1, 7, 14, 22], build)
            .class(Class::Recurrent { states })
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
    let quantized = [dynamic_quantize_lstm::definition()];
    plain.into_iter().chain(training).chain(gradients).chain(quantized).collect()
}
