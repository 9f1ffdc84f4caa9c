//! Linear models whose weights lie in attributes, written with the operators of ONNX in a message that is to be trained:
//! weights become initializers, which train, lie in checkpoints and are exported.
//!
//! A node `n` becomes what it is decomposed into. Its rows of weights are named `n/coefficients`, what is added
//! `n/intercepts`, and the weighted sums `n/scores`. A node without a name is called by its first output. Two rows that are each
//! other's negative, of which a binary classifier makes sigmoids, become one: two would not stay each other's negative
//! whatever is trained. Labels that are texts are looked up by a Gather, which the training model does without.

use std::collections::HashSet;

use ortrain_graph::{Graph, Node, ValueId};
use ortrain_onnx::proto::TensorProto;
use ortrain_onnx::{GraphProto, ModelProto, NodeProto, OperatorSetIdProto};

use crate::families::features::DOMAIN;
use crate::families::linear_model::{CLASSIFIER, Linear, PostTransform, REGRESSOR};
use crate::library::domain;
use crate::passes::decompose::decompose_node;
use crate::passes::infer::infer;
use crate::passes::versions::downgrade;
use crate::registry::{NEWEST_OPSET, Registry};
use crate::{Error, OpError};

/// The version of `ai.onnx` that a model of an older one is written in, so that every loss can be put behind it.
const OPSET: i64 = 13;

/// Element type of texts in messages.
const TEXT: i32 = 8;

fn is_linear(node: &NodeProto) -> bool {
    node.domain == DOMAIN && [CLASSIFIER, REGRESSOR].contains(&node.op_type.as_str())
}

/// The values that the linear models of a message make; none if it has no such model.
#[must_use]
pub fn results(model: &ModelProto) -> Vec<String> {
    let nodes = model.graph.iter().flat_map(|graph| &graph.node).filter(|node| is_linear(node));
    nodes.flat_map(|node| node.output.iter().filter(|name| !name.is_empty()).cloned()).collect()
}

/// Writes the linear models of a message with the operators of ONNX. `typed` is its graph, with types as far as they are
/// known.
///
/// # Errors
/// When a node contradicts itself, or asks for what is not supported.
pub fn write_out(model: &mut ModelProto, typed: &Graph) -> Result<(), Error> {
    let opset = raised(model);
    let Some(graph) = &mut model.graph else { return Ok(()) };
    let mut names = names_of(graph);
    let mut nodes = Vec::with_capacity(graph.node.len());
    for proto in std::mem::take(&mut graph.node) {
        let made = |node: &&Node| {
            node.present_outputs().any(|id| proto.output.iter().any(|name| *name == *typed.name_of(id)))
        };
        let node = typed.nodes.iter().find(made).filter(|_| is_linear(&proto));
        let Some(node) = node else {
            nodes.push(proto);
            continue;
        };
        let written = written(typed, node, opset, &mut names)?;
        nodes.extend(written.node);
        graph.initializer.extend(written.initializer);
    }
    graph.node = nodes;
    Ok(())
}

/// All names of values that a message has.
fn names_of(graph: &GraphProto) -> HashSet<String> {
    let mut names: HashSet<String> = graph.input.iter().map(|info| info.name.clone()).collect();
    names.extend(graph.initializer.iter().map(|tensor| tensor.name.clone()));
    names.extend(graph.node.iter().flat_map(|node| node.output.iter().cloned()));
    for subgraph in
        graph.node.iter().flat_map(|node| &node.attribute).filter_map(|attribute| attribute.g.as_deref())
    {
        names.extend(names_of(subgraph));
    }
    names
}

/// The version of `ai.onnx` that a message is written in, raised if it is old and all nodes mean the same in a newer one:
/// exporters state the oldest version that their few nodes need, often none at all.
fn raised(model: &mut ModelProto) -> i64 {
    let means_the_same = |graph: &GraphProto, own: i64| mean_the_same(graph, own, OPSET);
    let graph = model.graph.as_ref();
    // A set may be listed twice.
    let mut listed = HashSet::new();
    model.opset_import.retain(|set| listed.insert((domain(&set.domain).to_owned(), set.version)));
    let Some(set) = model.opset_import.iter_mut().find(|set| domain(&set.domain).is_empty()) else {
        model.opset_import.push(OperatorSetIdProto { domain: String::new(), version: OPSET });
        return OPSET;
    };
    if set.version < OPSET && graph.is_none_or(|graph| means_the_same(graph, set.version)) {
        set.version = OPSET;
    }
    set.version
}

fn mean_the_same(graph: &GraphProto, own: i64, other: i64) -> bool {
    graph.node.iter().all(|node| {
        let standard = domain(&node.domain).is_empty();
        let subgraphs = node
            .attribute
            .iter()
            .flat_map(|attribute| attribute.g.as_deref().into_iter().chain(&attribute.graphs));
        (!standard || Registry::standard().means_the_same("", &node.op_type, own, other))
            && subgraphs.into_iter().all(|graph| mean_the_same(graph, own, other))
    })
}

/// A node of a graph as a message of other nodes, all names new but those of its inputs and outputs.
fn written(typed: &Graph, node: &Node, opset: i64, names: &mut HashSet<String>) -> Result<GraphProto, Error> {
    let fail = |source: OpError| Error::at(typed, node, source);
    let linear = Linear::of(node).map_err(fail)?;
    let mut attrs = node.attrs.clone();
    if let Some(row) = other_row(&linear) {
        attrs = attrs.with("coefficients", row.0).with("intercepts", row.1);
    }
    let mut alone = Graph::new(&typed.name);
    alone.opsets.insert(String::new(), NEWEST_OPSET);
    alone.opsets.insert(DOMAIN.into(), 1);
    let copied = |graph: &mut Graph, port: &Option<ValueId>, typed_too: bool| {
        port.map(|id| {
            let ty = if typed_too { typed.value(id).ty.clone() } else { Default::default() };
            graph.add_value(typed.name_of(id), ty)
        })
    };
    let inputs: Vec<Option<ValueId>> =
        node.inputs.iter().map(|port| copied(&mut alone, port, true)).collect();
    alone.inputs = inputs.iter().copied().flatten().collect();
    let mut outputs: Vec<Option<ValueId>> =
        node.outputs.iter().map(|port| copied(&mut alone, port, false)).collect();

    let texts =
        attrs.strings("classlabels_strings").map_err(|error| fail(error.into()))?.map(<[String]>::to_vec);
    let mut looked_up = None;
    if let Some(texts) = texts.filter(|texts| !texts.is_empty()) {
        attrs.0.remove("classlabels_strings");
        attrs = attrs.with("classlabels_ints", (0..texts.len() as i64).collect::<Vec<_>>());
        if let Some(label) = outputs.first().copied().flatten() {
            let position = alone.add_value("position", Default::default());
            outputs[0] = Some(position);
            looked_up = Some((texts, label, position));
        }
    }
    alone.outputs = outputs.iter().copied().flatten().collect();
    let mut copy = Node::new(&node.domain, &node.op, &inputs, &outputs, attrs);
    copy.name = node.name.clone();
    if copy.name.is_empty() {
        copy.name = node.present_outputs().next().map_or("", |id| typed.name_of(id)).into();
    }
    let prefix = copy.name.clone();
    alone.nodes.push(copy);
    infer(&mut alone)?;
    decompose_node(&mut alone, 0)?;
    infer(&mut alone)?;
    downgrade(&mut alone, opset)?;

    // Inputs and outputs have names already; all others get new ones.
    let position = looked_up.as_ref().map(|(.., position)| *position);
    let mut given: HashSet<ValueId> = inputs.iter().chain(&outputs).copied().flatten().collect();
    given.extend(looked_up.as_ref().map(|(_, label, _)| *label));
    for id in alone.value_ids().filter(|&id| !given.contains(&id) || Some(id) == position) {
        let is_position = Some(id) == position;
        let mut name = if is_position { format!("{prefix}/position") } else { alone.name_of(id).to_owned() };
        while !names.insert(name.clone()) {
            name.push('_');
        }
        if name != alone.name_of(id) {
            alone.rename(id, &name);
        }
    }
    let mut message = alone.to_proto();
    if let Some((texts, label, position)) = looked_up {
        let mut classes = format!("{prefix}/classes");
        while !names.insert(classes.clone()) {
            classes.push('_');
        }
        message.node.push(NodeProto {
            name: format!("{prefix}/Gather"),
            op_type: "Gather".into(),
            input: vec![classes.clone(), alone.name_of(position).to_owned()],
            output: vec![alone.name_of(label).to_owned()],
            ..NodeProto::default()
        });
        message.initializer.push(TensorProto {
            name: classes,
            data_type: TEXT,
            dims: vec![texts.len() as i64],
            string_data: texts.into_iter().map(|text| text.into_bytes().into()).collect(),
            ..TensorProto::default()
        });
    }
    Ok(message)
}

/// The second of two rows, if the first is its negative and sigmoids are made of both.
fn other_row(linear: &Linear) -> Option<(Vec<f32>, Vec<f32>)> {
    if linear.rows != 2 || linear.post_transform != PostTransform::Logistic {
        return None;
    }
    let (first, second) = linear.coefficients.split_at(linear.coefficients.len() / 2);
    let opposite = |(a, b): (&f32, &f32)| *a == -*b;
    let holds = first.iter().zip(second).all(opposite) && linear.intercepts[0] == -linear.intercepts[1];
    holds.then(|| (second.to_vec(), vec![linear.intercepts[1]]))
}
