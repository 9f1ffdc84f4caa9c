//! Nodes written as other operators.

use ortrain_graph::{Attr, Graph, Node};

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
    let mut index = 0;
    while index < graph.nodes.len() {
        let Node { ref domain, ref op, .. } = graph.nodes[index];
        // Who is not known is refused by name when its types are inferred.
        if Registry::standard().find(domain, op).map_or(domain.is_empty(), Definition::is_standard) {
            crate::passes::infer::infer_node(graph, index)?;
            for attr in graph.nodes[index].attrs.0.values_mut() {
                if let Attr::Graph(subgraph) = attr {
                    standardise(subgraph)?;
                }
            }
            index += 1;
            continue;
        }
        if decompose_node(graph, index)?.is_none() {
            let node = &graph.nodes[index];
            let source = crate::OpError::unsupported("it has no decomposition into operators of ai.onnx");
            return Err(Error::at(graph, node, source));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::build;

    /// Every operator that ONNX does not have can be written in those it has, unless it changes something in place.
    #[test]
    fn what_onnx_does_not_have_can_be_written_in_it() {
        let in_place = |definition: &Definition| {
            definition.samples().iter().any(|graph| {
                let op = build(graph, &graph.nodes[0]).expect("a sample is valid");
                op.writes_state() || !op.in_place().is_empty()
            })
        };
        let (written, others): (Vec<&Definition>, Vec<&Definition>) = Registry::standard()
            .all()
            .into_iter()
            .filter(|definition| !definition.is_standard())
            .partition(|definition| definition.rewritten || definition.decompose.is_some());
        let lost: Vec<&str> = others
            .iter()
            .filter(|definition| !in_place(definition))
            .map(|definition| definition.name)
            .collect();
        assert!(lost.is_empty(), "{lost:?}");
        assert!(written.len() > 50 && others.len() > 3, "{} and {}", written.len(), others.len());
    }
}
