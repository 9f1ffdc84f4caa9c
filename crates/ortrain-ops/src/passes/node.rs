//! Passes over one node: inference of its types, constant folding, decomposition. Operators use them for the nodes of their
//! subgraphs and of their decompositions.

use std::sync::Arc;

use ortrain_expr::{Access, Dims, Mode, Scalar, pause};
use ortrain_graph::{Attr, Dim, Graph, Node, Tensor, ValueId, ValueType};
use ortrain_program::{BufferId, HostFunction, Instruction, Load, ProgramBuilder, Scalars, reference};

use crate::infer::{Infer, MAX_AXES, SubgraphPasses};
use crate::lower::{Lower, LoweringPasses, ValueBuffers};
use crate::op::{Op, Placement, RewriteFn};
use crate::registry::{NEWEST_OPSET, Registry, build};
use crate::rewrite::Rewrite;
use crate::type_merge::{merge_advised, merge_types};
use crate::{Error, OpError};

/// Passes for the inference of types.
const SUBGRAPH_PASSES: SubgraphPasses = SubgraphPasses { infer: infer_nodes, forget_shapes };

/// Passes for the lowering.
pub(crate) const LOWERING_PASSES: LoweringPasses =
    LoweringPasses { infer: infer_nodes, lower_node, lower_decomposition };

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
    let is_large = elements > MAX_FOLDED_ELEMENTS;
    if !matches!(op.placement(), Placement::Program)
        || crate::support::random::is_random(&node.domain, &node.op)
    {
        return Ok(());
    }
    let label: Arc<str> = graph.node_label(&node).into();
    let mut builder = ProgramBuilder::new();
    let mut values = ValueBuffers::default();
    let mut cx = Lower {
        passes: LOWERING_PASSES,
        graph,
        node: &node,
        builder: &mut builder,
        values: &mut values,
        label,
    };
    match op.lower(&mut cx) {
        // The lowering of the whole graph reports the error.
        Err(_) if is_large => return Ok(()),
        outcome => outcome.map_err(|source| Error::at(graph, &node, source))?,
    }
    let ids: Vec<_> = node.present_outputs().collect();
    let outputs: Vec<_> = ids.iter().filter_map(|id| values.buffers.get(id).copied()).collect();
    if outputs.len() != ids.len() {
        return Ok(());
    }
    let shared: Option<Vec<Tensor>> = outputs
        .iter()
        .zip(&ids)
        .map(|(&buffer, &id)| part_of_constant(graph, &builder, buffer, id))
        .collect();
    if let Some(shared) = shared {
        ids.into_iter().zip(shared).for_each(|(id, tensor)| graph.value_mut(id).constant = Some(tensor));
        return Ok(());
    }
    if is_large {
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

/// Returns the content of the buffer of value `id`, if its elements are adjacent in a constant. The bytes are shared.
fn part_of_constant(
    graph: &Graph,
    builder: &ProgramBuilder,
    buffer: BufferId,
    id: ValueId,
) -> Option<Tensor> {
    let ValueType::Tensor(dtype, Some(shape)) = &graph.value(id).ty else { return None };
    let dims = shape.concrete()?;
    let (source, start) = match builder.constant_of(buffer) {
        Some(tensor) => (tensor, 0),
        None if builder.only_moves_elements() => {
            let mut writers =
                builder.instructions().filter(|instruction| instruction.writes().contains(&buffer));
            let (Some(Instruction::Nest(nest)), None) = (writers.next(), writers.next()) else { return None };
            let ([Load::Buffer(load)], [store]) = (nest.loads.as_slice(), nest.stores.as_slice()) else {
                return None;
            };
            let row_major = Access::contiguous(store.access.dtype, &nest.dims);
            let is_row_major = |access: &Access| {
                let strides = access.strides.iter().zip(&row_major.strides);
                access.dtype == row_major.dtype
                    && nest.dims.iter().zip(strides).all(|(&size, (stride, own))| size == 1 || stride == own)
            };
            let is_whole = (store.access.offset, store.access.len) == (0, row_major.len);
            if !is_whole || !is_row_major(&load.access) || !is_row_major(&store.access) {
                return None;
            }
            (builder.constant_of(load.buffer)?, load.access.offset)
        }
        None => return None,
    };
    let start = start * source.dtype().size();
    let end = start + ortrain_graph::byte_length(dtype.stored(), &dims).ok()?;
    let data = (end <= source.data().len()).then(|| source.data().slice(start..end))?;
    Tensor::new(*dtype, dims, data).ok()
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

/// Authority of the shapes that values have before inference.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ShapeAuthority {
    /// Declared by a file: advice.
    Advice,
    /// Binding.
    Binding,
}

/// Infers a graph of known types to which nodes were added. Existing types of results (such as gradients, which have
/// the types of their values) are binding.
///
/// # Errors
/// Returns the errors of [`infer`], and an error if a result has another shape than its existing one.
pub(crate) fn infer_added(graph: &mut Graph) -> Result<(), Error> {
    (0..graph.nodes.len())
        .try_for_each(|index| infer_with_authority(graph, index, ShapeAuthority::Binding).map(|_| ()))
}

/// Removes the shapes of all values that nodes produce, including values of subgraphs: a file declared them, or they
/// were inferred from other inputs. Shapes that cannot be inferred are kept; this concerns a few operators.
pub(crate) fn forget_shapes(graph: &mut Graph) {
    for index in 0..graph.nodes.len() {
        if Graph::subgraphs(&graph.nodes[index]).next().is_some() {
            forget_shapes_inside(graph, index);
        }
        let node = &graph.nodes[index];
        let known_definition = Registry::standard().find(&node.domain, &node.op);
        if known_definition.is_some_and(|definition| definition.has_declared_shape) {
            continue;
        }
        for id in node.outputs.clone().into_iter().flatten() {
            forget_shape(graph, id);
        }
    }
}

/// Removes the shapes of all values that nodes in subgraphs of a node produce.
fn forget_shapes_inside(graph: &mut Graph, index: usize) {
    let repeats = build(graph, &graph.nodes[index]).ok().map(|op| op.placement());
    let node = &mut graph.nodes[index];
    let captures = node.captures;
    for attr in node.attrs.0.values_mut() {
        let Attr::Graph(subgraph) = attr else { continue };
        forget_shapes(subgraph);
        // The iteration index and the condition keep their declared shapes: scalars, or vectors of one element.
        let formal_count = subgraph.inputs.len().saturating_sub(captures);
        let lead = match &repeats {
            Some(Placement::Repeat(repetition)) => repetition.leading_inputs().min(formal_count),
            _ => formal_count,
        };
        for k in lead..subgraph.inputs.len() {
            forget_shape(subgraph, subgraph.inputs[k]);
        }
    }
}

/// Removes the shape of a value, unless the value is a constant.
fn forget_shape(graph: &mut Graph, id: ValueId) {
    let value = graph.value_mut(id);
    if value.constant.is_some() {
        return;
    }
    if let ValueType::Tensor(dtype, _) = value.ty {
        value.ty = ValueType::Tensor(dtype, None);
    }
    value.sizes = None;
}

pub(crate) fn infer_node(graph: &mut Graph, index: usize) -> Result<(), Error> {
    infer_noting_contradictions(graph, index).map(|_| ())
}

/// Runs [`infer_node`] with an operator that was built before.
pub(crate) fn infer_with_op(graph: &mut Graph, index: usize, op: &dyn Op) -> Result<(), Error> {
    check_input_sizes(graph, index)?;
    infer_op(graph, index, op, ShapeAuthority::Advice).map(drop)
}

/// Runs [`infer_node`] for a part of a decomposed node: existing types of its results are the types of the decomposed
/// node, and binding.
pub(crate) fn infer_part(graph: &mut Graph, index: usize) -> Result<(), Error> {
    infer_with_authority(graph, index, ShapeAuthority::Binding).map(drop)
}

/// Runs [`infer_node`]. Returns true if a declared shape or a branch contradicts an inferred shape.
pub(crate) fn infer_noting_contradictions(graph: &mut Graph, index: usize) -> Result<bool, Error> {
    infer_with_authority(graph, index, ShapeAuthority::Advice)
}

fn infer_with_authority(graph: &mut Graph, index: usize, authority: ShapeAuthority) -> Result<bool, Error> {
    pause();
    check_input_sizes(graph, index)?;
    let op = build(graph, &graph.nodes[index])?;
    infer_op(graph, index, op.as_ref(), authority)
}

fn check_input_sizes(graph: &Graph, index: usize) -> Result<(), Error> {
    let node = &graph.nodes[index];
    let addressable = |id: ValueId| check_size_overflow(graph, id, &graph.value(id).ty);
    node.present_inputs().try_for_each(addressable).map_err(|source| Error::at(graph, node, source))
}

/// Infers the output types of a node with its operator.
fn infer_op(graph: &mut Graph, index: usize, op: &dyn Op, authority: ShapeAuthority) -> Result<bool, Error> {
    let node = &graph.nodes[index];
    let mut cx = Infer::new(graph, node, SUBGRAPH_PASSES);
    op.infer(&mut cx).map_err(|source| Error::at(graph, node, source))?;
    let (inferred_types, subgraphs, mut contradicts) = (cx.outputs, cx.subgraphs, cx.contradicts);
    let outputs = node.outputs.clone();
    for (attribute, subgraph) in subgraphs {
        graph.nodes[index].attrs.0.insert(attribute.to_owned(), Attr::Graph(Box::new(subgraph)));
    }
    for (port, inferred) in outputs.into_iter().zip(inferred_types) {
        let Some(id) = port else { continue };
        let both = merge_types(&graph.value(id).ty, inferred.ty.clone());
        contradicts |= both.is_err();
        let merged = match authority {
            ShapeAuthority::Binding => both,
            ShapeAuthority::Advice => both.or_else(|_| merge_advised(&graph.value(id).ty, inferred.ty)),
        };
        let merged = merged.map_err(|types| {
            let (declared, inferred) = *types;
            let message = format!("{:?} is declared as {declared} but is {inferred}", graph.name_of(id));
            Error::at(graph, &graph.nodes[index], OpError::Invalid(message))
        })?;
        check_size_overflow(graph, id, &merged)
            .map_err(|source| Error::at(graph, &graph.nodes[index], source))?;
        let value = graph.value_mut(id);
        value.ty = merged;
        value.sizes = inferred.sizes;
        value.derived_constant = inferred.content;
    }
    Ok(contradicts)
}

/// Checks the number of axes of a shape.
pub(crate) fn check_axis_count(graph: &Graph, id: ValueId, ty: &ValueType) -> Result<(), OpError> {
    match ty.shape() {
        Some(shape) if shape.rank() > MAX_AXES => Err(OpError::unsupported(format!(
            "{:?} has {} axes (shape {shape}), at most {MAX_AXES} are supported; remove axes of size 1 or merge \
             axes with Reshape",
            graph.name_of(id),
            shape.rank()
        ))),
        _ => Ok(()),
    }
}

/// Checks that the product of sizes does not overflow. All later code may therefore multiply them.
fn check_size_overflow(graph: &Graph, id: ValueId, ty: &ValueType) -> Result<(), OpError> {
    check_axis_count(graph, id, ty)?;
    let ValueType::Tensor(dtype, Some(shape)) = ty else { return Ok(()) };
    let dims: Option<Dims> = shape.iter().map(Dim::known).collect();
    let Some(dims) = dims else { return Ok(()) };
    let outcome = ortrain_graph::byte_length(*dtype, &dims);
    outcome.map(|_| ()).map_err(|error| OpError::invalid(format!("{:?}: {error}", graph.name_of(id))))
}

/// Replaces the node at `index` by its decomposition, if it has one. Returns the number of new nodes.
///
/// # Errors
/// Returns an error if the decomposition cannot express the node.
pub(crate) fn decompose_node(graph: &mut Graph, index: usize) -> Result<Option<usize>, Error> {
    let node = &graph.nodes[index];
    let Some(rewrite) = Registry::standard().find(&node.domain, &node.op).and_then(|d| d.decompose) else {
        return Ok(None);
    };
    rewrite_node(graph, index, rewrite, NEWEST_OPSET).map(Some)
}

/// Rewrites the node at `index` for a version of `ai.onnx`. Returns the number of new nodes: 0 if the node is
/// unchanged.
pub(crate) fn rewrite_node(
    graph: &mut Graph,
    index: usize,
    rewrite: RewriteFn,
    version: i64,
) -> Result<usize, Error> {
    let node = graph.nodes[index].clone();
    let mut rw = Rewrite::new(graph, &node, version);
    rewrite(&mut rw).map_err(|source| Error::at(graph, &node, source))?;
    let patch = rw.into_patch();
    let count = patch.nodes.len();
    if count > 0 {
        patch.apply(graph, &[index]);
    }
    Ok(count)
}

/// Infers the types of a subgraph with typed inputs. Returns true if a declared shape or a branch contradicts the
/// inferred types.
pub(crate) fn infer_nodes(graph: &mut Graph) -> Result<bool, Error> {
    let mut contradicts = false;
    for index in 0..graph.nodes.len() {
        contradicts |= infer_noting_contradictions(graph, index)?;
        fold_node(graph, index)?;
    }
    Ok(contradicts)
}

/// Replaces nodes that update state by nodes without updates. A branch that is recomputed for its gradient must not
/// update its state a second time.
pub(crate) fn remove_updates(graph: &mut Graph) -> Result<(), Error> {
    let mut index = 0;
    while index < graph.nodes.len() {
        let node = &graph.nodes[index];
        let op = build(graph, node)?;
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
        if decompose_node(graph, index)?.is_none() {
            index += 1;
        }
    }
    Ok(())
}

/// Lowers the node of a context.
///
/// # Errors
/// Returns an error if the node cannot be lowered.
fn lower_node(cx: &mut Lower<'_>) -> Result<(), OpError> {
    let op = build(cx.graph, cx.node).map_err(|error| OpError::Subgraph(Box::new(error)))?;
    op.lower(cx)
}

/// Lowers the decomposition of a node.
///
/// # Errors
/// Returns an error if the operator has no decomposition, or if a node of it cannot be lowered.
fn lower_decomposition(cx: &mut Lower<'_>) -> Result<(), OpError> {
    let mut graph = cx.graph.clone();
    let index = graph.nodes.iter().position(|node| node.outputs == cx.node.outputs);
    let index = index.expect("the node is one of its graph");
    let nested = |error: Error| OpError::Subgraph(Box::new(error));
    let count = decompose_node(&mut graph, index).map_err(nested)?.ok_or_else(|| {
        OpError::unsupported("it can be read and written, but running it is not supported yet")
    })?;
    for at in index..index + count {
        infer_node(&mut graph, at).map_err(nested)?;
        fold_node(&mut graph, at).map_err(nested)?;
        let node = graph.nodes[at].clone();
        if node.present_outputs().all(|id| graph.value(id).constant.is_some()) {
            continue;
        }
        let mut inner = Lower {
            passes: cx.passes,
            graph: &graph,
            node: &node,
            builder: cx.builder,
            values: cx.values,
            label: cx.label.clone(),
        };
        lower_node(&mut inner)?;
    }
    // The next decomposition assigns the same ids to its own values.
    let is_original = |id: &ValueId| (id.0 as usize) < cx.graph.value_count();
    cx.values.buffers.retain(|id, _| is_original(id));
    cx.values.sequences.retain(|id, _| is_original(id));
    // A result that became constant still needs its buffer.
    for id in cx.node.present_outputs() {
        if let (None, Some(tensor)) = (cx.values.buffers.get(&id), &graph.value(id).constant) {
            let buffer = cx.builder.constant(graph.name_of(id), tensor);
            cx.values.buffers.insert(id, buffer);
        }
    }
    Ok(())
}
