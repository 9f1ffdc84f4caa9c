//! Sizes of batches that a model has inside: shapes that are constants, and begin with the batch.

use ortrain_graph::{Graph, Node, Tensor, ValueId, tensor_to_proto};
use ortrain_onnx::{AttributeProto, AttributeType, NodeProto, TensorProto};
use rustc_hash::FxHashSet;

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

/// The nodes of a graph, whose types are known, that say a size of the batch where they could leave it open.
#[must_use]
pub fn fixed_batches(graph: &Graph, batch: usize) -> Vec<FixedBatch> {
    let mut given: FxHashSet<ValueId> = graph.inputs.iter().copied().collect();
    let mut found = Vec::new();
    for node in &graph.nodes {
        let data = node.inputs.first().copied().flatten();
        let open = opened(graph, node, batch, data.is_some_and(|id| given.contains(&id)));
        if node.present_inputs().any(|id| given.contains(&id)) || !open.is_empty() {
            given.extend(node.present_outputs());
        }
        for (input, open) in open {
            if let Some(output) = node.present_outputs().next() {
                let output = graph.name_of(output).to_owned();
                found.push(FixedBatch { output, node: graph.node_label(node), input, open });
            }
        }
    }
    found
}

/// The inputs of a node that say the size of the batch, with what opens each. Its first input may depend on inputs of the
/// model.
fn opened(graph: &Graph, node: &Node, batch: usize, depends: bool) -> Vec<(usize, OpenShape)> {
    if !node.domain.is_empty() {
        return Vec::new();
    }
    let at = |k: usize| node.inputs.get(k).copied().flatten();
    let content = |k: usize| at(k).and_then(|id| graph.value(id).content());
    let sizes = |k: usize| content(k)?.to_i64().filter(|sizes| sizes.first() == Some(&(batch as i64)));
    // Whether the data have the batch on their first axis.
    let shape = at(0).and_then(|id| graph.value(id).ty.shape());
    let has_batch = depends && shape.is_some_and(|shape| shape.rank() > 0 && shape[0].known() == Some(batch));
    match &*node.op {
        // A constant that is reshaped stays as it is.
        "Reshape" if depends => {
            let Some(mut shape) = sizes(1) else { return Vec::new() };
            let zero_is_a_size = node.attrs.int("allowzero").ok().flatten().unwrap_or(0) != 0;
            if !shape.contains(&-1) {
                shape[0] = -1;
            } else if has_batch && !zero_is_a_size {
                shape[0] = 0;
            } else {
                return Vec::new();
            }
            vec![(1, OpenShape::Shape(shape))]
        }
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
