//! Sizes of batches that a model has inside: shapes that are constants, and count the batch.

use ortrain_graph::{Graph, Node, Tensor, ValueId, tensor_to_proto};
use ortrain_onnx::{AttributeProto, AttributeType, NodeProto, TensorProto};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::passes::infer::{forget_shapes, infer_node};

/// What takes the place of a constant that says the size of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpenShape {
    /// This shape, which leaves the size to what is reshaped.
    Shape(Vec<i64>),
    /// The size of the batch, and then these.
    Behind(Vec<i64>),
    /// Nothing: the input is left out, and is zero then.
    LeftOut,
}

/// An input of a node that says the size of a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FixedBatch {
    /// The first result of the node, by which it is found.
    pub output: String,
    /// The node, as messages name it.
    pub node: String,
    /// Which input.
    pub input: usize,
    /// What opens it.
    pub open: OpenShape,
}

/// A size that counts the batch together with other axes: `outer` elements lie in front of the batch, `inner` behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Share {
    outer: usize,
    inner: usize,
}

/// The batch alone on its axis.
const ALONE: Share = Share { outer: 1, inner: 1 };

/// The nodes of a graph, whose types are known, that say a size of the batch where they could leave it open. `other` is the
/// same graph for batches of `size`, without types: those of what follows the batch are found on the way.
#[must_use]
pub fn fixed_batches(graph: &Graph, other: &mut Graph, batch: usize, size: usize) -> Vec<FixedBatch> {
    forget_shapes(other);
    let mut given: FxHashSet<ValueId> = graph.inputs.iter().copied().collect();
    let mut shares = FxHashMap::default();
    let mut found = Vec::new();
    for (index, node) in graph.nodes.iter().enumerate() {
        let data = node.inputs.first().copied().flatten();
        let depends = data.is_some_and(|id| given.contains(&id));
        let shape = node.inputs.get(1).copied().flatten();
        let open = if node.domain.is_empty() && matches!(&*node.op, "Reshape" | "Flatten") {
            let constant = depends && shape.is_some_and(|id| !given.contains(&id));
            let opened = reshaped(graph, other, node, (batch, size), &mut shares);
            opened.filter(|_| constant).map(|shape| (1, OpenShape::Shape(shape))).into_iter().collect()
        } else {
            opened(graph, node, batch, depends)
        };
        if node.present_inputs().any(|id| given.contains(&id)) || !open.is_empty() {
            given.extend(node.present_outputs());
        }
        for (input, open) in open {
            let constant = match &open {
                OpenShape::Shape(shape) => Some(shape.clone()),
                OpenShape::Behind(rest) => Some([&[size as i64], &rest[..]].concat()),
                OpenShape::LeftOut => None,
            };
            let constant =
                constant.map(|shape| other.add_constant("open", Tensor::i64(&[shape.len()], &shape)));
            other.nodes[index].inputs[input] = constant;
            if let Some(output) = node.present_outputs().next() {
                let output = graph.name_of(output).to_owned();
                found.push(FixedBatch { output, node: graph.node_label(node), input, open });
            }
        }
        // What is wrong for another size is said when everything is opened.
        let _ = infer_node(other, index);
    }
    found
}

/// The shape of a Reshape that leaves the batch open, if the node says a size of it; notes sizes that the batch shares.
fn reshaped(
    graph: &Graph,
    other: &Graph,
    node: &Node,
    (batch, size): (usize, usize),
    shares: &mut FxHashMap<usize, Share>,
) -> Option<Vec<i64>> {
    let at = |k: usize| node.inputs.get(k).copied().flatten();
    let dims = |graph: &Graph, id: Option<ValueId>| graph.value(id?).ty.shape()?.concrete();
    let said = at(1).and_then(|id| elements(graph, id));
    let zero_is_a_size = node.attrs.int("allowzero").ok().flatten().unwrap_or(0) != 0;
    let before = dims(graph, at(0));
    let (Some(before), Some(after), Some(grown)) =
        (&before, dims(graph, node.present_outputs().next()), dims(other, at(0)))
    else {
        // Other sizes are open: the batch is looked for in front alone.
        let mut shape = said.filter(|sizes| sizes.first() == Some(&(batch as i64)))?;
        let data = at(0).and_then(|id| graph.value(id).ty.shape());
        let has_batch = data.is_some_and(|shape| shape.first().is_some_and(|dim| dim.known() == Some(batch)));
        if !shape.contains(&-1) {
            shape[0] = -1;
        } else if has_batch && !zero_is_a_size {
            shape[0] = 0;
        } else {
            return None;
        }
        return Some(shape);
    };
    let mut axes = (0..before.len()).filter(|&axis| grown.get(axis) != Some(&before[axis]));
    let (axis, None) = (axes.next()?, axes.next()) else { return None };
    if before.len() != grown.len() || before[axis] * size != grown[axis] * batch {
        return None;
    }
    let share = if before[axis] == batch { ALONE } else { *shares.get(&before[axis])? };
    let outer = before[..axis].iter().product::<usize>() * share.outer;
    let hint = said.as_ref().and_then(|said| said.iter().position(|&size| size == -1));
    let (place, share) = place(&after, outer, batch, hint)?;
    if share != ALONE {
        shares.insert(after[place], share);
    }
    let follows = said.as_ref().is_none_or(|said| match said[place] {
        0 => !zero_is_a_size && grown.get(place) != before.get(place),
        -1 => said
            .iter()
            .enumerate()
            .all(|(k, &size)| size != 0 || zero_is_a_size || grown.get(k) == before.get(k)),
        _ => false,
    });
    let open = |k: usize| if k == place { -1 } else { after[k] as i64 };
    (!follows).then(|| (0..after.len()).map(open).collect())
}

/// The axis of a shape that the batch goes to, and what it shares it with: `outer` elements lie in front of the batch, and
/// the axis `hint` is the one that is not said.
fn place(dims: &[usize], outer: usize, batch: usize, hint: Option<usize>) -> Option<(usize, Share)> {
    let mut found = Vec::new();
    let mut before = 1;
    for (axis, &size) in dims.iter().enumerate() {
        if before != 0 && outer % before == 0 {
            let front = outer / before;
            if size != 0 && front != 0 && size % (front * batch) == 0 {
                found.push((axis, Share { outer: front, inner: size / (front * batch) }));
            }
        }
        before *= size;
    }
    // A batch of one could be part of several axes. Of a matrix the rows count it, and elsewhere what lies behind it is
    // counted with it (the heads of an attention).
    let alone = found.iter().find(|(_, share)| *share == ALONE);
    let hinted = || found.iter().find(|(axis, _)| Some(*axis) == hint);
    let usual = || if dims.len() == 2 { found.first() } else { found.last() };
    alone.or_else(hinted).or_else(usual).copied()
}

/// The elements of a value that depends on no input: a constant, or sizes that were computed of constants.
fn elements(graph: &Graph, id: ValueId) -> Option<Vec<i64>> {
    let value = graph.value(id);
    match value.content() {
        Some(content) => content.to_i64(),
        None => value.sizes.as_ref()?.iter().map(|size| size.known().map(|size| size as i64)).collect(),
    }
}

/// The inputs of a node that say the size of the batch in front, with what opens each. Its first input may depend on inputs
/// of the model.
fn opened(graph: &Graph, node: &Node, batch: usize, depends: bool) -> Vec<(usize, OpenShape)> {
    if !node.domain.is_empty() {
        return Vec::new();
    }
    let at = |k: usize| node.inputs.get(k).copied().flatten();
    let content = |k: usize| at(k).and_then(|id| graph.value(id).content());
    let sizes = |k: usize| elements(graph, at(k)?).filter(|sizes| sizes.first() == Some(&(batch as i64)));
    // Whether the data have the batch on their first axis.
    let shape = at(0).and_then(|id| graph.value(id).ty.shape());
    let has_batch = depends && shape.is_some_and(|shape| shape.rank() > 0 && shape[0].known() == Some(batch));
    match &*node.op {
        "Expand" => match sizes(1) {
            Some(shape) if batch > 1 || !has_batch => vec![(1, OpenShape::Behind(shape[1..].to_vec()))],
            Some(mut shape) => {
                // One broadcasts to any batch.
                shape[0] = 1;
                vec![(1, OpenShape::Shape(shape))]
            }
            None => Vec::new(),
        },
        "ConstantOfShape" if batch > 1 => match sizes(0) {
            Some(shape) => vec![(0, OpenShape::Behind(shape[1..].to_vec()))],
            None => Vec::new(),
        },
        // First states of zeros, [directions, batch, width], are the default.
        "RNN" | "GRU" | "LSTM" => [5, 6]
            .into_iter()
            .filter(|&k| {
                let is_state = k == 5 || &*node.op == "LSTM";
                is_state
                    && content(k).is_some_and(|state| {
                        state.dims().get(1) == Some(&batch)
                            && state.to_f64().iter().all(|&element| element == 0.0)
                    })
            })
            .map(|k| (k, OpenShape::LeftOut))
            .collect(),
        _ => Vec::new(),
    }
}

/// Nodes, and their constants, that make a shape called `result`: the size of the first axis of a value, and then `rest`.
#[must_use]
pub fn sizes_behind_first(value: &str, rest: &[i64], result: &str) -> (Vec<NodeProto>, Vec<TensorProto>) {
    let named = |what: &str| format!("{result}/{what}");
    let node = |op: &str, inputs: Vec<String>, output: String| NodeProto {
        op_type: op.into(),
        name: output.clone(),
        input: inputs,
        output: vec![output],
        ..NodeProto::default()
    };
    let axis = AttributeProto {
        name: "axis".into(),
        r#type: AttributeType::Int as i32,
        i: 0,
        ..AttributeProto::default()
    };
    let concat = node("Concat", vec![named("first"), named("rest")], result.to_owned());
    let nodes = vec![
        node("Shape", vec![value.to_owned()], named("sizes")),
        node("Gather", vec![named("sizes"), named("zero")], named("first")),
        NodeProto { attribute: vec![axis], ..concat },
    ];
    let constants = vec![
        tensor_to_proto(&named("zero"), &Tensor::i64(&[1], &[0])),
        tensor_to_proto(&named("rest"), &Tensor::i64(&[rest.len()], rest)),
    ];
    (nodes, constants)
}
