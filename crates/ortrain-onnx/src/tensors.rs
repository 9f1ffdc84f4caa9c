//! Traversal of all tensors of a model.

use crate::{AttributeProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto};

/// Role of a tensor in the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TensorRole {
    /// Initializer of a graph or subgraph.
    Initializer,
    /// Values or indices of a sparse initializer.
    SparseInitializer,
    /// Tensor in an attribute, for example of a Constant node.
    Attribute,
}

/// Calls `visit` with every tensor of `model`: initializers and attributes of its graph, of all subgraphs, functions
/// and training graphs.
///
/// # Errors
///
/// Stops at the first error of `visit`, and returns it.
pub fn visit_tensors_mut<E>(
    model: &mut ModelProto,
    mut visit: impl FnMut(&mut TensorProto, TensorRole) -> Result<(), E>,
) -> Result<(), E> {
    let visit = &mut visit;
    let training = model.training_info.iter_mut();
    let graphs = training.flat_map(|info| [info.initialization.as_mut(), info.algorithm.as_mut()]);
    for graph in model.graph.iter_mut().chain(graphs.flatten()) {
        in_graph(graph, visit)?;
    }
    model.functions.iter_mut().try_for_each(|function| {
        function.attribute_proto.iter_mut().try_for_each(|attribute| in_attribute(attribute, visit))?;
        in_nodes(&mut function.node, visit)
    })
}

type Visit<'a, E> = &'a mut dyn FnMut(&mut TensorProto, TensorRole) -> Result<(), E>;

fn in_graph<E>(graph: &mut GraphProto, visit: Visit<'_, E>) -> Result<(), E> {
    for tensor in &mut graph.initializer {
        visit(tensor, TensorRole::Initializer)?;
    }
    for tensor in &mut graph.sparse_initializer {
        in_sparse(tensor, TensorRole::SparseInitializer, visit)?;
    }
    in_nodes(&mut graph.node, visit)
}

fn in_nodes<E>(nodes: &mut [NodeProto], visit: Visit<'_, E>) -> Result<(), E> {
    let mut attributes = nodes.iter_mut().flat_map(|node| &mut node.attribute);
    attributes.try_for_each(|attribute| in_attribute(attribute, visit))
}

fn in_attribute<E>(attribute: &mut AttributeProto, visit: Visit<'_, E>) -> Result<(), E> {
    for tensor in attribute.t.as_deref_mut().into_iter().chain(&mut attribute.tensors) {
        visit(tensor, TensorRole::Attribute)?;
    }
    for tensor in attribute.sparse_tensor.as_deref_mut().into_iter().chain(&mut attribute.sparse_tensors) {
        in_sparse(tensor, TensorRole::Attribute, visit)?;
    }
    for graph in attribute.g.as_deref_mut().into_iter().chain(&mut attribute.graphs) {
        in_graph(graph, visit)?;
    }
    Ok(())
}

fn in_sparse<E>(tensor: &mut SparseTensorProto, role: TensorRole, visit: Visit<'_, E>) -> Result<(), E> {
    tensor.values.iter_mut().chain(&mut tensor.indices).try_for_each(|tensor| visit(tensor, role))
}
