//! Constant folding: values that depend only on constants and shapes are computed once, through lowering and the
//! reference evaluator.

use std::sync::Arc;

use ortrain_expr::{Mode, Scalar};
use ortrain_graph::{Graph, Node, Tensor, ValueId, ValueType};
use ortrain_program::{HostFunction, ProgramBuilder, Scalars, reference};

use crate::lower::{Lower, ValueBuffers};
use crate::op::Placement;
use crate::registry::build;
use crate::{Error, OpError};

/// Maximum number of elements of a folded result: the evaluator is slow.
const MAX_FOLDED_ELEMENTS: usize = 1 << 20;

/// Maximum number of elements of a folded matrix if the node only moves elements. Products read larger matrices through
/// strides, and a second copy would use memory.
const MAX_MOVED_ELEMENTS: usize = 1 << 14;

/// Computes the outputs of a node if its inputs are constant or its outputs are known sizes.
///
/// # Errors
/// Returns an error if the node cannot be lowered or if its evaluation fails (for example, an index out of range).
pub(crate) fn fold_node(graph: &mut Graph, index: usize) -> Result<(), Error> {
    for id in graph.nodes[index].outputs.clone().into_iter().flatten() {
        let value = graph.value(id);
        let (Some(sizes), ValueType::Tensor(dtype, Some(shape))) = (&value.sizes, &value.ty) else {
            continue;
        };
        let known: Option<Vec<i64>> = sizes.iter().map(|dim| dim.known().map(|size| size as i64)).collect();
        if let (Some(known), Some(dims), ortrain_graph::DType::I64) = (known, shape.concrete(), *dtype)
            && dims.iter().product::<usize>() == known.len()
        {
            graph.value_mut(id).constant = Some(Tensor::i64(&dims, &known));
        }
    }
    let is_constant = |id: ValueId| graph.value(id).constant.is_some();
    let node = &graph.nodes[index];
    if node.present_outputs().all(is_constant)
        || !node.present_inputs().all(is_constant)
        || node.captures > 0
        || Graph::subgraphs(node).next().is_some()
    {
        return Ok(());
    }
    let node = node.clone();
    let op = build(graph, &node)?;
    if let Placement::Host(function) = op.placement() {
        return fold_host(graph, &node, function.as_ref());
    }
    let mut elements = 0usize;
    for id in node.present_outputs() {
        match graph.value(id).ty.shape().and_then(ortrain_graph::Shape::concrete) {
            Some(dims) => elements = elements.saturating_add(dims.iter().product()),
            None => return Ok(()),
        }
    }
    if elements > MAX_FOLDED_ELEMENTS {
        return Ok(());
    }
    if !matches!(op.placement(), Placement::Program) || crate::families::is_random(&node.domain, &node.op) {
        return Ok(());
    }
    let label: Arc<str> = graph.node_label(&node).into();
    let mut builder = ProgramBuilder::new();
    let mut values = ValueBuffers::default();
    let mut cx = Lower { graph, node: &node, builder: &mut builder, values: &mut values, label };
    op.lower(&mut cx).map_err(|source| Error::at(graph, &node, source))?;
    let ids: Vec<_> = node.present_outputs().collect();
    let outputs: Vec<_> = ids.iter().filter_map(|id| values.buffers.get(id).copied()).collect();
    if outputs.len() != ids.len() {
        return Ok(());
    }
    let is_matrix = |id: &ValueId| graph.value(*id).ty.shape().is_some_and(|s| s.rank() == 2);
    if elements > MAX_MOVED_ELEMENTS && builder.only_moves_elements() && ids.iter().all(is_matrix) {
        return Ok(());
    }
    let program = builder.finish(Vec::new(), outputs)?;
    let results = reference::evaluate(&program, Mode::Exact, &[], Scalars::default())
        .map_err(|error| Error::at(graph, &node, OpError::Invalid(error.to_string())))?;
    for (id, elements) in ids.into_iter().zip(results) {
        let ValueType::Tensor(dtype, Some(shape)) = &graph.value(id).ty else { continue };
        let Some(dims) = shape.concrete() else { continue };
        let data = Scalar::to_bytes(*dtype, &elements);
        let tensor = Tensor::new(*dtype, dims, data.into()).expect("the evaluator fills the inferred shape");
        graph.value_mut(id).constant = Some(tensor);
    }
    Ok(())
}

/// Calls a host function with constant inputs.
fn fold_host(graph: &mut Graph, node: &Node, function: &dyn HostFunction) -> Result<(), Error> {
    let inputs: Vec<Tensor> =
        node.present_inputs().filter_map(|id| graph.value(id).constant.clone()).collect();
    if inputs.iter().map(Tensor::len).sum::<usize>() > MAX_FOLDED_ELEMENTS {
        return Ok(());
    }
    let results =
        function.call(&inputs).map_err(|message| Error::at(graph, node, OpError::Invalid(message)))?;
    for (port, tensor) in node.outputs.iter().zip(results) {
        let Some(id) = *port else { continue };
        let value = graph.value_mut(id);
        value.ty = ValueType::tensor(tensor.dtype(), tensor.dims());
        value.constant = Some(tensor);
    }
    Ok(())
}
