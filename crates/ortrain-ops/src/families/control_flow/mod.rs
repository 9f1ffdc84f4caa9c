//! Control flow: `If`, `Loop` and `Scan`.
//!
//! The inputs of a node are the operator's own inputs, followed by the outer values that its subgraphs use
//! ([`Node::captures`]). The last inputs of every subgraph are exactly these outer values, in this order. The subgraphs
//! of a gradient recompute the values of the forward subgraph that they need, or get them as inputs.

mod branch;
mod growing_loop;
mod repeat;
mod scan_8;
#[cfg(test)]
mod tests;

use ortrain_graph::{Attrs, DType, Graph, Node, Tensor, ValueId, ValueType};

use crate::OpError;
use crate::infer::Infer;
use crate::op::Definition;
use crate::passes::decompose::decompose_node;
use crate::passes::fold::fold_node;
use crate::passes::infer::{infer_noting_contradictions, merge_advised};
use crate::registry;

/// Attribute with the graph that is repeated.
const BODY: &str = "body";

pub(crate) fn definitions() -> Vec<Definition> {
    let mut all = branch::definitions();
    all.extend(repeat::definitions());
    all
}

fn subgraph_error(error: crate::Error) -> OpError {
    OpError::Subgraph(Box::new(error))
}

/// Adds a node that copies a value, and returns the copy.
fn add_copy(graph: &mut Graph, id: ValueId) -> ValueId {
    let copy = graph.add_value("copy", ValueType::Unknown);
    graph.nodes.push(Node::new("", "Identity", &[Some(id)], &[Some(copy)], Attrs::new()));
    copy
}

/// Returns a subgraph of a node.
pub(super) fn subgraph<'a>(node: &'a Node, attribute: &str) -> Result<&'a Graph, OpError> {
    Ok(Attrs::required(attribute, node.attrs.graph(attribute)?)?)
}

/// Sets the types of the captured inputs of a subgraph to the types of the outer values. Also copies known contents and
/// sizes.
pub(super) fn set_capture_types(cx: &Infer<'_>, attribute: &str, graph: &mut Graph) -> Result<(), OpError> {
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

/// Infers the types of a subgraph with typed inputs. Returns true if a declared shape or a branch contradicts the
/// inferred types.
pub(super) fn infer_nodes(graph: &mut Graph) -> Result<bool, OpError> {
    let mut contradicts = false;
    for index in 0..graph.nodes.len() {
        contradicts |= infer_noting_contradictions(graph, index).map_err(subgraph_error)?;
        fold_node(graph, index).map_err(subgraph_error)?;
    }
    Ok(contradicts)
}

/// Clears the constants that were folded during type inference: their nodes are still in the graph.
pub(crate) fn clear_folded(graph: &mut Graph) {
    let outputs: Vec<ValueId> = graph.nodes.iter().flat_map(Node::present_outputs).collect();
    for id in outputs.into_iter().chain(graph.inputs.clone()) {
        graph.value_mut(id).constant = None;
    }
}

/// Returns true if nodes or outputs of a graph use a value.
pub(super) fn is_used(graph: &Graph, id: ValueId) -> bool {
    graph.outputs.contains(&id)
        || graph.nodes.iter().any(|node| node.present_inputs().any(|input| input == id))
}

/// Replaces nodes that update state by nodes without updates. A branch that is recomputed for its gradient must not
/// update its state a second time.
fn remove_updates(graph: &mut Graph) -> Result<(), OpError> {
    let mut index = 0;
    while index < graph.nodes.len() {
        let node = &graph.nodes[index];
        let op = registry::build(graph, node).map_err(subgraph_error)?;
        let updated: Vec<usize> = op.state_updates().iter().map(|&(output, _)| output).collect();
        if updated.is_empty() {
            index += 1;
            continue;
        }
        let used = |id: ValueId| {
            graph.outputs.contains(&id)
                || graph.nodes.iter().any(|node| node.present_inputs().any(|input| input == id))
        };
        let unused: Vec<usize> = updated
            .into_iter()
            .filter(|&k| node.outputs.get(k).copied().flatten().is_some_and(|id| !used(id)))
            .collect();
        for k in unused {
            graph.nodes[index].outputs[k] = None;
        }
        // The nodes of the replacement are checked in turn.
        if decompose_node(graph, index).map_err(subgraph_error)?.is_none() {
            index += 1;
        }
    }
    Ok(())
}

/// Adds zeros of the shape and type of a value.
fn zeros_like(graph: &mut Graph, input: ValueId) -> ValueId {
    let name = graph.name_of(input).to_owned();
    let dtype = graph.value(input).ty.dtype().unwrap_or(DType::F32);
    let shape = graph.add_value(&format!("{name}_shape"), ValueType::Unknown);
    let zeros = graph.add_value(&format!("{name}_grad"), ValueType::Unknown);
    graph.nodes.push(Node::new("", "Shape", &[Some(input)], &[Some(shape)], Attrs::new()));
    let value = Tensor::filled(dtype, &[1], 0.0);
    let attrs = Attrs::new().with("value", value);
    graph.nodes.push(Node::new("", "ConstantOfShape", &[Some(shape)], &[Some(zeros)], attrs));
    zeros
}
