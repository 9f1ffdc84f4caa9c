//! Nodes written as other operators.

use ortrain_graph::{Attr, Graph, Node, ValueId};

use crate::Error;
use crate::op::Definition;
use crate::registry::Registry;
use crate::rewrite::Rewrite;

/// Replaces the node at `index` by its decomposition, if it has one. Returns how many nodes came in its place.
///
/// # Errors
/// When the decomposition cannot express the node.
pub(crate) fn decompose_node(graph: &mut Graph, index: usize) -> Result<Option<usize>, Error> {
    let node = graph.nodes[index].clone();
    let Some(rewrite) = Registry::standard().find(&node.domain, &node.op).and_then(|d| d.decompose) else {
        return Ok(None);
    };
    let mut rw = Rewrite::new(graph, &node, i64::MAX);
    rewrite(&mut rw).map_err(|source| Error::at(graph, &node, source))?;
    let patch = rw.into_patch();
    let count = patch.nodes.len();
    patch.apply(graph, &[index]);
    Ok(Some(count))
}

/// Standardise: replaces every operator that is not one of `ai.onnx` by its decomposition, so that any runtime of plain
/// ONNX can run the graph and its subgraphs. Types must have been inferred; those of new values are inferred on the way.
///
/// # Errors
/// When an operator has no decomposition, or it cannot express a node.
pub fn standardise(graph: &mut Graph) -> Result<(), Error> {
    standardise_or(graph, &mut |_, _, error| Err(error))
}

/// As [`standardise`], as far as it goes: nodes that cannot be written as operators of `ai.onnx` stay as they are. Returns
/// each of these with why.
pub fn standardise_known(graph: &mut Graph) -> Vec<Refused> {
    refusing(|refuse| standardise_or(graph, refuse))
}

/// A node that cannot be rewritten, and stays as it is.
#[derive(Clone, Debug)]
pub struct Refused {
    /// What it makes.
    pub outputs: Vec<ValueId>,
    /// Why it cannot be rewritten.
    pub error: Error,
}

/// What is done about a node of a graph that cannot be rewritten: an error ends the pass.
pub(crate) type Refuse<'a> = dyn FnMut(&Graph, &Node, Error) -> Result<(), Error> + 'a;

/// All nodes that a pass refuses.
pub(crate) fn refusing(pass: impl FnOnce(&mut Refuse<'_>) -> Result<(), Error>) -> Vec<Refused> {
    let mut refused = Vec::new();
    let mut note = |_: &Graph, node: &Node, error: Error| {
        refused.push(Refused { outputs: node.present_outputs().collect(), error });
        Ok(())
    };
    pass(&mut note).expect("every refusal is noted");
    refused
}

fn standardise_or(graph: &mut Graph, refuse: &mut Refuse<'_>) -> Result<(), Error> {
    let mut index = 0;
    while index < graph.nodes.len() {
        let Node { ref domain, ref op, .. } = graph.nodes[index];
        // Who is not known is refused by name when its types are inferred.
        let outcome =
            if Registry::standard().find(domain, op).map_or(domain.is_empty(), Definition::is_standard) {
                crate::passes::infer::infer_node(graph, index).and_then(|_| {
                    let subgraphs = graph.nodes[index].attrs.0.values_mut();
                    subgraphs
                        .filter_map(|attr| match attr {
                            Attr::Graph(subgraph) => Some(subgraph),
                            _ => None,
                        })
                        .try_for_each(|subgraph| standardise(subgraph))
                })
            } else {
                match decompose_node(graph, index) {
                    Ok(Some(_)) => continue,
                    Ok(None) => {
                        let source =
                            crate::OpError::unsupported("it has no decomposition into operators of ai.onnx");
                        Err(Error::at(graph, &graph.nodes[index], source))
                    }
                    Err(error) => Err(error),
                }
            };
        if let Err(error) = outcome {
            refuse(graph, &graph.nodes[index], error)?;
        }
        index += 1;
    }
    Ok(())
}
