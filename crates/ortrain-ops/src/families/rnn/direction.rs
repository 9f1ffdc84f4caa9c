//! Decomposition of other directions, layouts and missing states into the form that is run: the forward direction, with
//! the axis of steps first and with initial states.

use ortrain_graph::{Attr, Attrs, Node, Tensor, ValueId};

use crate::OpError;
use crate::families::rnn::net::{Attributes, B, Direction, LENGTHS, NetKind, P, R, W, X};
use crate::rewrite::Rewrite;
use crate::support::sizes::slice_axis;

/// Returns true if a node is differentiated through its decomposition.
pub(super) fn is_composition(node: &Node) -> bool {
    let has = |k: usize| node.inputs.get(k).copied().flatten().is_some();
    let plain = Attributes::read(node).is_ok_and(|attributes| attributes.is_plain());
    !plain || !NetKind::from_node(node).state_inputs().all(has)
}

/// Swaps the first two axes of a value.
fn swap_first_axes(rw: &mut Rewrite<'_>, value: ValueId) -> ValueId {
    rw.add("Transpose", &[value], Attrs::new().with("perm", vec![1, 0, 2]))
}

/// Reverses sequences, `[steps, batch, ..]`.
pub(super) fn reverse_sequences(rw: &mut Rewrite<'_>, value: ValueId, lengths: Option<ValueId>) -> ValueId {
    match lengths {
        Some(lengths) => {
            let attrs = Attrs::new().with("batch_axis", 1i64).with("time_axis", 0i64);
            rw.add("ReverseSequence", &[value, lengths], attrs)
        }
        None => slice_axis(rw, value, 0, -1, i64::MIN, -1),
    }
}

pub(super) fn decompose(rw: &mut Rewrite<'_>) -> Result<(), OpError> {
    let attributes = Attributes::read(rw.node())?;
    let kind = attributes.kind;
    let [mut x, w, r] = [rw.required_input(X)?, rw.required_input(W)?, rw.required_input(R)?];
    let dtype = rw.dtype(x).ok_or_else(|| OpError::invalid("the type of the data is not known"))?;
    if attributes.batch_first {
        x = swap_first_axes(rw, x);
    }
    let lengths = rw.input(LENGTHS);
    let long_lengths = lengths.map(|lengths| {
        let to = i64::from(ortrain_graph::DType::I64.to_onnx());
        rw.add("Cast", &[lengths], Attrs::new().with("to", to))
    });
    let hidden = attributes.hidden_size(rw.shape(r))?;
    let gate_activations = kind.default_activations().len();
    let mut results: Vec<Vec<ValueId>> = Vec::new();
    let states = kind.state_inputs();
    for (index, &direction) in attributes.directions.iter().enumerate() {
        let of_direction = |rw: &mut Rewrite<'_>, value: ValueId| {
            let index = index as i64;
            if attributes.directions.len() == 1 {
                value
            } else {
                slice_axis(rw, value, 0, index, index + 1, 1)
            }
        };
        let data = match direction {
            Direction::Forward => x,
            Direction::Reverse => reverse_sequences(rw, x, long_lengths),
        };
        let mut inputs: Vec<Option<ValueId>> =
            vec![Some(data), Some(of_direction(rw, w)), Some(of_direction(rw, r))];
        inputs.push(rw.input(B).map(|bias| of_direction(rw, bias)));
        inputs.push(lengths);
        for k in states.clone() {
            let state = match rw.input(k) {
                Some(state) => {
                    let state = if attributes.batch_first { swap_first_axes(rw, state) } else { state };
                    of_direction(rw, state)
                }
                None => zero_state(rw, data, hidden, dtype),
            };
            inputs.push(Some(state));
        }
        if kind == NetKind::Lstm {
            inputs.push(rw.input(P).map(|weights| of_direction(rw, weights)));
        }
        while inputs.last() == Some(&None) {
            inputs.pop();
        }
        let mut attrs = rw.attrs().clone();
        attrs.0.remove("layout");
        attrs = attrs.with("direction", "forward").with("hidden_size", hidden as i64);
        for (name, list) in activations_of_direction(rw.attrs(), gate_activations, index)? {
            attrs.0.remove(name);
            if let Some(list) = list {
                attrs.0.insert(name.to_owned(), list);
            }
        }
        let op = rw.node().op.clone();
        let mut outputs = rw.add_node("", &op, &inputs, 1 + states.len(), attrs);
        if direction == Direction::Reverse {
            outputs[0] = reverse_results(rw, outputs[0], long_lengths);
        }
        results.push(outputs);
    }
    for k in 0..=states.len() {
        if !rw.has_output(k) {
            continue;
        }
        let parts: Vec<ValueId> = results.iter().map(|outputs| outputs[k]).collect();
        let mut value = match parts[..] {
            [only] => only,
            _ => rw.add("Concat", &parts, Attrs::new().with("axis", i64::from(k == 0))),
        };
        if attributes.batch_first {
            let order = if k == 0 { vec![2, 0, 1, 3] } else { vec![1, 0, 2] };
            value = rw.add("Transpose", &[value], Attrs::new().with("perm", order));
        }
        rw.replace_output(k, value);
    }
    Ok(())
}

/// Restores the order of the data in the results of a reversed direction, `[steps, 1, batch, hidden]`.
pub(super) fn reverse_results(rw: &mut Rewrite<'_>, value: ValueId, lengths: Option<ValueId>) -> ValueId {
    if lengths.is_none() {
        return reverse_sequences(rw, value, None);
    }
    let axis = rw.ints("axis", &[1]);
    let flat = rw.add("Squeeze", &[value, axis], Attrs::new());
    let reversed = reverse_sequences(rw, flat, lengths);
    rw.add("Unsqueeze", &[reversed, axis], Attrs::new())
}

/// Returns a state of zeros: `[1, batch, hidden]`.
pub(super) fn zero_state(
    rw: &mut Rewrite<'_>,
    data: ValueId,
    hidden: usize,
    dtype: ortrain_graph::DType,
) -> ValueId {
    let batch = rw.shape(data).and_then(|shape| shape[1].known());
    if let Some(batch) = batch {
        return rw.constant("no_state", Tensor::filled(dtype, &[1, batch, hidden], 0.0));
    }
    let shape = rw.add("Shape", &[data], Attrs::new());
    let batch = slice_axis(rw, shape, 0, 1, 2, 1);
    let (one, hidden) = (rw.ints("one", &[1]), rw.ints("hidden", &[hidden as i64]));
    let shape = rw.add("Concat", &[one, batch, hidden], Attrs::new().with("axis", 0i64));
    let zero = Tensor::filled(dtype, &[1], 0.0);
    rw.add("ConstantOfShape", &[shape], Attrs::new().with("value", zero))
}

/// Returns the activations of one direction with their parameters. A node lists them for all directions in sequence.
fn activations_of_direction(
    attrs: &Attrs,
    count: usize,
    index: usize,
) -> Result<[(&'static str, Option<Attr>); 3], OpError> {
    let names = attrs.strings("activations")?;
    let [alphas, betas] = ["activation_alpha", "activation_beta"].map(|name| attrs.floats(name));
    let (alphas, betas) = (alphas?.unwrap_or_default(), betas?.unwrap_or_default());
    let Some(names) = names else {
        return Ok([("activations", None), ("activation_alpha", None), ("activation_beta", None)]);
    };
    let range = index * count..(index + 1) * count;
    let parameters = |takes: fn(&str) -> bool, list: &[f32]| {
        let before = names[..range.start].iter().filter(|name| takes(name)).count();
        let used_count = names[range.clone()].iter().filter(|name| takes(name)).count();
        let list: Vec<f32> = list.iter().copied().skip(before).take(used_count).collect();
        (!list.is_empty()).then_some(Attr::Floats(list))
    };
    Ok([
        ("activations", Some(Attr::Strings(names[range.clone()].to_vec()))),
        ("activation_alpha", parameters(super::activation::has_alpha, alphas)),
        ("activation_beta", parameters(super::activation::has_beta, betas)),
    ])
}
