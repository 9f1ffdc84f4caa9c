//! Decomposition: rewrites nodes to other operators.

use ortrain_expr::pause;
use ortrain_graph::{Attr, Graph, Node, ValueId};

use crate::Error;
use crate::op::Definition;
use crate::passes::node::rewrite_node;
use crate::registry::{NEWEST_OPSET, Registry};

/// Replaces every operator outside of `ai.onnx` by its decomposition, so that any runtime of plain ONNX can run the
/// graph and its subgraphs. Types must have been inferred; types of new values are inferred by this function.
///
/// # Errors
/// Returns an error if an operator has no decomposition, or if the decomposition cannot express a node.
pub fn standardise(graph: &mut Graph) -> Result<(), Error> {
    standardise_for(graph, NEWEST_OPSET, &mut |_, _, error| Err(error))
}

/// Applies [`standardise`] with operators that exist in version `target`, as far as possible: nodes without an
/// equivalent are unchanged. Returns each of these nodes with the reason.
pub fn standardise_known(graph: &mut Graph, target: i64) -> Vec<RejectedNode> {
    collect_rejected(|refuse| standardise_for(graph, target, refuse))
}

/// Node that cannot be rewritten and is unchanged.
#[derive(Clone, Debug)]
pub struct RejectedNode {
    /// Outputs of the node.
    pub outputs: Vec<ValueId>,
    /// Reason why the node cannot be rewritten.
    pub error: Error,
}

/// Handler of a node that cannot be rewritten: an error ends the pass.
pub(crate) type RejectHandler<'a> = dyn FnMut(&Graph, &Node, Error) -> Result<(), Error> + 'a;

/// Runs a pass and returns all nodes that it could not rewrite.
pub(crate) fn collect_rejected(
    pass: impl FnOnce(&mut RejectHandler<'_>) -> Result<(), Error>,
) -> Vec<RejectedNode> {
    let mut refused = Vec::new();
    let mut note = |_: &Graph, node: &Node, error: Error| {
        refused.push(RejectedNode { outputs: node.present_outputs().collect(), error });
        Ok(())
    };
    pass(&mut note).expect("every error is collected");
    refused
}

fn standardise_for(graph: &mut Graph, target: i64, refuse: &mut RejectHandler<'_>) -> Result<(), Error> {
    let mut index = 0;
    while index < graph.nodes.len() {
        pause();
        let Node { ref domain, ref op, .. } = graph.nodes[index];
        let definition = Registry::standard().find(domain, op);
        // Unknown operators are reported by name when their types are inferred.
        let standard = definition.map_or(domain.is_empty(), Definition::is_standard);
        let rewrite = match definition {
            Some(definition) if standard => definition
                .decomposed_before
                .filter(|&(version, _)| target < version)
                .map(|(_, rewrite)| rewrite),
            Some(definition) => definition.decompose,
            None => None,
        };
        let rewritten = rewrite.map_or(Ok(0), |rewrite| rewrite_node(graph, index, rewrite, target));
        let outcome = match rewritten {
            Ok(0) if standard => crate::passes::node::infer_node(graph, index).and_then(|_| {
                let subgraphs = graph.nodes[index].attrs.0.values_mut();
                subgraphs
                    .filter_map(|attr| match attr {
                        Attr::Graph(subgraph) => Some(subgraph),
                        _ => None,
                    })
                    .try_for_each(|subgraph| standardise_for(subgraph, target, &mut |_, _, error| Err(error)))
            }),
            Ok(0) => {
                let source = crate::OpError::unsupported("it has no decomposition into operators of ai.onnx");
                Err(Error::at(graph, &graph.nodes[index], source))
            }
            Ok(_) => continue,
            Err(error) => Err(error),
        };
        if let Err(error) = outcome {
            refuse(graph, &graph.nodes[index], error)?;
        }
        index += 1;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::Placement;
    use crate::registry::build;

    /// Every operator outside of ONNX has a decomposition into ONNX operators. The exceptions change a value in place
    /// or yield to the caller, and no operator of ONNX does this.
    #[test]
    fn extensions_decompose_into_onnx() {
        let in_place = |definition: &Definition| {
            definition.samples().iter().any(|graph| {
                let op = build(graph, &graph.nodes[0]).expect("a sample is valid");
                op.writes_state()
                    || !op.in_place_outputs().is_empty()
                    || matches!(op.placement(), Placement::Yield)
            })
        };
        let (written, missing): (Vec<&Definition>, Vec<&Definition>) = Registry::standard()
            .file_definitions()
            .into_iter()
            .filter(|definition| !definition.is_standard())
            .partition(|definition| definition.is_always_rewritten || definition.decompose.is_some());
        let lost: Vec<&str> = missing
            .iter()
            .filter(|definition| !in_place(definition))
            .map(|definition| definition.name)
            .collect();
        assert!(lost.is_empty(), "{lost:?}");
        assert!(written.len() > 50 && missing.len() > 3, "{} and {}", written.len(), missing.len());
    }
}
