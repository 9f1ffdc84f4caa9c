//! The head of a classifier: the layer that computes the scores of the classes.

use ortrain_graph::{Graph, Node, ValueId};

use crate::Error;
use crate::class::{Class, Traits};
use crate::registry::{class_of, has_traits};

/// Last layer of a classifier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// Label of the node in messages.
    pub node: String,
    /// Name of the weights.
    pub weight: String,
    /// Axis of the weights with the classes.
    pub axis: usize,
    /// Name of the bias; its last axis contains the classes.
    pub bias: Option<String>,
    /// Number of classes.
    pub classes: usize,
}

fn input(node: &Node, k: usize) -> Option<ValueId> {
    node.inputs.get(k).copied().flatten()
}

/// Returns the head before a value of a graph: a Gemm, a MatMul with or without an Add, or a Conv of kernel size 1.
///
/// Its weights must be constant and have no other use. A softmax, a sigmoid, or a global pooling may follow the head.
///
/// # Errors
/// Returns an error if there is no such head, or if the weights are computed or shared. The message names the node.
pub fn find_head(graph: &Graph, output: ValueId) -> Result<Head, Error> {
    let maker =
        |value: ValueId| graph.nodes.iter().rev().find(|node| node.present_outputs().any(|id| id == value));
    let is_constant = |value: ValueId| graph.value(value).constant.is_some();
    let mut value = output;
    loop {
        let Some(node) = maker(value) else {
            return Err(Error::Head(format!(
                "{:?} has no head: there is no layer between {:?} and it",
                graph.name_of(output),
                graph.name_of(value)
            )));
        };
        let (first, second) = (input(node, 0), input(node, 1));
        match (class_of(node), first, second) {
            (Class::AffineProduct, Some(_), Some(weight)) if is_constant(weight) => {
                let is_transposed = node.attrs.int("transB").ok().flatten().unwrap_or(0) != 0;
                return check_head(graph, node, (weight, usize::from(!is_transposed)), input(node, 2));
            }
            (Class::Convolution, Some(_), Some(weight)) if is_constant(weight) => {
                let dims = graph.value(weight).constant.as_ref().map_or(&[][..], |tensor| tensor.dims());
                let grouped = node.attrs.int("group").ok().flatten().unwrap_or(1) != 1;
                if grouped || dims.iter().skip(2).any(|&cells| cells != 1) {
                    return Err(no_head_error(graph, output, node));
                }
                return check_head(graph, node, (weight, 0), input(node, 2));
            }
            (Class::MatrixProduct, Some(_), Some(weight)) if is_constant(weight) => {
                return check_head(graph, node, (weight, 1), None);
            }
            (Class::Add, Some(first), Some(second)) if is_constant(first) != is_constant(second) => {
                let (product, bias) = if is_constant(first) { (second, first) } else { (first, second) };
                let weight = maker(product)
                    .filter(|node| class_of(node) == Class::MatrixProduct)
                    .and_then(|node| input(node, 1));
                let Some(weight) = weight.filter(|&weight| is_constant(weight)) else {
                    return Err(no_head_error(graph, output, node));
                };
                return check_head(graph, node, (weight, 1), Some(bias));
            }
            (_, Some(first), _) if has_traits(node, Traits::FOLLOWS_HEAD) => value = first,
            _ => return Err(no_head_error(graph, output, node)),
        }
    }
}

fn no_head_error(graph: &Graph, output: ValueId, node: &Node) -> Error {
    Error::Head(format!(
        "{:?} is computed by {}, which is not a head; name the result of a Gemm, a MatMul (with an Add), or a Conv \
         with a kernel of size 1, with constant weights",
        graph.name_of(output),
        graph.node_label(node)
    ))
}

/// Builds a head of these weights and checks them.
fn check_head(
    graph: &Graph,
    node: &Node,
    (weight, axis): (ValueId, usize),
    bias: Option<ValueId>,
) -> Result<Head, Error> {
    let label = graph.node_label(node);
    let dims_of = |id: ValueId| graph.value(id).constant.as_ref().map(|tensor| tensor.dims().to_vec());
    let name = |id: ValueId| graph.name_of(id).to_owned();
    let Some(classes) = dims_of(weight).and_then(|dims| (dims.len() >= 2).then(|| dims[axis])) else {
        return Err(Error::Head(format!(
            "{label} has weights {:?} without an axis of classes",
            name(weight)
        )));
    };
    for id in [Some(weight), bias].into_iter().flatten() {
        let readers = graph.nodes.iter().flat_map(Node::present_inputs).filter(|&read| read == id).count();
        if readers > 1 || graph.outputs.contains(&id) {
            return Err(Error::Head(format!(
                "{label} shares {:?} with other nodes: a new head would change them, too",
                name(id)
            )));
        }
    }
    let bias = match bias {
        None => None,
        Some(id) => match dims_of(id) {
            Some(dims) if dims.last() == Some(&classes) && dims.iter().product::<usize>() == classes => {
                Some(name(id))
            }
            // A single number for all classes is not replaced.
            Some(dims) if dims.iter().product::<usize>() == 1 => None,
            _ => {
                return Err(Error::Head(format!(
                    "{label} adds {:?}, which is not a bias with one element for each class",
                    name(id)
                )));
            }
        },
    };
    Ok(Head { node: label, weight: name(weight), axis, bias, classes })
}
