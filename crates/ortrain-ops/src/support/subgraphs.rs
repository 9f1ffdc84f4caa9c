//! Subgraphs of nodes: access, captured inputs, errors.

use ortrain_graph::{Attrs, DType, Graph, Node, Tensor, ValueId, ValueType};

use crate::OpError;
use crate::grad::gradient_dtype;
use crate::infer::Infer;
use crate::type_merge::merge_advised;

pub(crate) fn subgraph_error(error: crate::Error) -> OpError {
    OpError::Subgraph(Box::new(error))
}

/// Adds a node that copies a value, and returns the copy.
pub(crate) fn add_copy(graph: &mut Graph, id: ValueId) -> ValueId {
    let copy = graph.add_value("copy", ValueType::Unknown);
    graph.nodes.push(Node::new("", "Identity", &[Some(id)], &[Some(copy)], Attrs::new()));
    copy
}

/// Returns a subgraph of a node.
pub(crate) fn subgraph<'a>(node: &'a Node, attribute: &str) -> Result<&'a Graph, OpError> {
    Ok(Attrs::required(attribute, node.attrs.graph(attribute)?)?)
}

/// Sets the types of the captured inputs of a subgraph to the types of the outer values. Also copies known contents and
/// sizes.
pub(crate) fn set_capture_types(cx: &Infer<'_>, attribute: &str, graph: &mut Graph) -> Result<(), OpError> {
    let node = cx.node();
    let (explicit_count, formal) = (node.inputs.len() - node.captures, graph.inputs.len() - node.captures);
    let captured: Vec<ValueId> = graph.inputs.iter().skip(formal).copied().collect();
    for (k, id) in captured.into_iter().enumerate() {
        let ty = merge_advised(&graph.value(id).ty, cx.ty(explicit_count + k).clone()).map_err(|types| {
            let (inner, outer) = *types;
            let name = graph.name_of(id);
            OpError::invalid(format!("{attribute} uses {name:?} as {inner}, but it is {outer}"))
        })?;
        let value = graph.value_mut(id);
        value.ty = ty;
        value.constant = cx.constant(explicit_count + k).cloned();
        // `constant` is cleared in this subgraph after type inference. Gradients and decompositions still read
        // `derived_constant`.
        value.derived_constant = value.constant.clone();
        value.sizes = cx.sizes(explicit_count + k);
    }
    Ok(())
}

/// Clears the constants that were folded during type inference: their nodes are still in the graph.
pub(crate) fn clear_folded(graph: &mut Graph) {
    let outputs: Vec<ValueId> = graph.nodes.iter().flat_map(Node::present_outputs).collect();
    for id in outputs.into_iter().chain(graph.inputs.clone()) {
        graph.value_mut(id).constant = None;
    }
}

/// Returns true if nodes or outputs of a graph use a value.
pub(crate) fn is_used(graph: &Graph, id: ValueId) -> bool {
    graph.outputs.contains(&id)
        || graph.nodes.iter().any(|node| node.present_inputs().any(|input| input == id))
}

/// Adds a gradient of zeros for a value.
pub(crate) fn zeros_like(graph: &mut Graph, input: ValueId) -> ValueId {
    let name = graph.name_of(input).to_owned();
    let dtype = graph.value(input).ty.dtype().map_or(DType::F32, gradient_dtype);
    let shape = graph.add_value(&format!("{name}_shape"), ValueType::Unknown);
    let zeros = graph.add_value(&format!("{name}_grad"), ValueType::Unknown);
    graph.nodes.push(Node::new("", "Shape", &[Some(input)], &[Some(shape)], Attrs::new()));
    let value = Tensor::filled(dtype, &[1], 0.0);
    let attrs = Attrs::new().with("value", value);
    graph.nodes.push(Node::new("", "ConstantOfShape", &[Some(shape)], &[Some(zeros)], attrs));
    zeros
}

/// Attribute with the graph that is repeated.
pub(crate) const BODY: &str = "body";
