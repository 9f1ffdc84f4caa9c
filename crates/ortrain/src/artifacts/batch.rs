//! Generalizes a model for batches of one size to batches of any size.

use ortrain_graph::{Dim, Graph, Tensor, ValueType, tensor_to_proto};
use ortrain_onnx::{GraphProto, LoadedModel, ModelProto, NodeProto};
use ortrain_ops::passes::infer::infer;
use ortrain_ops::training::{
    FixedBatch, OpenShape, batch_shape_nodes, find_fixed_batches, first_slice_nodes, set_inference_mode,
};
use rustc_hash::FxHashSet;

use crate::artifacts::batch_independence::{BATCH_COUNT, find_dependence};
use crate::artifacts::{declare_value, to_self_contained};
use crate::model::graph::{graph_of, infer_graph, message_graph};
use crate::{Error, ModelSource, Result};

/// Name of the symbolic batch axis.
const BATCH_SYMBOL: &str = "batch";
/// Batch sizes, besides the size of the model, for which all shapes are checked. One is a prime, so that no
/// other size is a multiple of it by chance.
const CHECKED_BATCH_SIZES: [usize; 2] = [7, 11];

/// Returns the model with a symbolic batch size. The first axis of an input becomes `batch` if it has the
/// same size as the first axis of the first input. Shapes inside the model that repeat this size follow it.
/// These nodes inside the model can be adapted:
///
/// - a Reshape to a constant shape with the batch in any position;
/// - an Expand or ConstantOfShape with a shape that begins with the batch;
/// - constants with equal rows, if they are broadcast or concatenated with a value that has the batch axis;
/// - zero initial states of a recurrent layer.
///
/// A model with a symbolic batch is returned unchanged. If the model runs on random inputs, each
/// row of a larger batch is compared with the result of the original model.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::artifacts::open_batch;
/// use ortrain::{InferenceSession, ModelSource, SessionOptions};
///
/// let open = open_batch(setup::MODEL.into())?;
/// let session = InferenceSession::new(ModelSource::from_proto(&open)?, SessionOptions::default())?;
/// assert_eq!(session.inputs()[0].to_string(), "float32[batch, 64]");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the model cannot be read, its first input has no axes, or a node inside depends on the batch size: the
/// error names the node.
pub fn open_batch(model: ModelSource) -> Result<ModelProto> {
    let label = model.label("the model");
    let mut loaded = to_self_contained(&label, model.load()?)?;
    let typed = infer_graph(&label, &loaded)?;
    let first = typed.inputs.first().map(|&id| (typed.name_of(id).to_owned(), typed.value(id).ty.clone()));
    let wrong = |reason: String| Error::WrongModel { model: label.clone(), reason };
    let Some((name, ty)) = first else { return Err(wrong("it has no inputs, so no batch".into())) };
    let Some(axis) = ty.shape().and_then(|shape| shape.first().cloned()) else {
        return Err(wrong(format!("its first input {name:?} is {ty}, so it has no first axis for a batch")));
    };
    let Some(batch) = axis.known() else { return Ok(loaded.proto) };
    let opened: FxHashSet<String> = (typed.inputs.iter())
        .filter(|&&id| {
            let shape = typed.value(id).ty.shape();
            shape.is_some_and(|shape| shape.first().and_then(Dim::known) == Some(batch))
        })
        .map(|&id| typed.name_of(id).to_owned())
        .collect();
    let fixed_model = loaded.clone();
    let graph = message_graph(&label, &mut loaded.proto)?;
    // These declarations hold for one batch size only.
    graph.value_info.clear();
    let outputs: Vec<String> = graph.output.iter().map(|info| info.name.clone()).collect();
    for info in &mut graph.output {
        info.r#type = None;
    }
    let other_sizes: Vec<usize> = CHECKED_BATCH_SIZES.into_iter().filter(|&size| size != batch).collect();
    let mut original = with_batch(&label, &loaded, &typed, &opened, batch)?;
    let mut other = with_batch(&label, &loaded, &typed, &opened, other_sizes[0])?;
    let fixed = find_fixed_batches(&mut original, &mut other, batch, other_sizes[0]);
    let graph = message_graph(&label, &mut loaded.proto)?;
    for (index, fix) in fixed.iter().enumerate() {
        apply_fix(graph, fix, index, &name).ok_or_else(|| {
            wrong(format!(
                "{} has the batch size {batch} in an attribute; raise the opset of the model to 13",
                fix.node
            ))
        })?;
    }
    let sized = |size: usize| {
        let mut graph = with_batch(&label, &loaded, &typed, &opened, size)?;
        let done = infer(&mut graph).map_err(|source| Error::model(&label, source));
        done.map_err(|error| wrong(batch_dependence_error(batch, &error.to_string())))?;
        Ok::<Graph, Error>(graph)
    };
    let before = sized(batch)?;
    for &size in &other_sizes {
        let after = sized(size)?;
        check_shapes(&before, &after, &outputs, batch).map_err(&wrong)?;
    }
    // As in inference: a BatchNormalization in training mode mixes rows on purpose.
    let run = |model: &LoadedModel, size: usize| {
        let mut model = model.clone();
        set_inference_mode(message_graph(&label, &mut model.proto)?);
        with_batch(&label, &model, &typed, &opened, size)
    };
    let (single, together) = (run(&fixed_model, batch)?, run(&loaded, BATCH_COUNT * batch)?);
    if let Some(reason) = find_dependence(single, together, &opened, batch)? {
        return Err(wrong(batch_dependence_error(batch, &reason)));
    }
    let graph = message_graph(&label, &mut loaded.proto)?;
    set_first_axes(graph, &typed, &opened, &Dim::symbol(BATCH_SYMBOL));
    let again = infer_graph(&label, &loaded)?;
    let graph = message_graph(&label, &mut loaded.proto)?;
    for info in &mut graph.output {
        if let Some(id) = again.find(&info.name) {
            *info = again.value_info(id);
        }
    }
    Ok(loaded.proto)
}

fn batch_dependence_error(batch: usize, reason: &str) -> String {
    format!(
        "a node depends on the batch size {batch}: {reason}; make its shape follow the batch (an element 0 or -1 in \
         the shape of a Reshape), or export the model with an open first axis (dynamic_axes, dynamic_shapes)"
    )
}

/// Returns the graph for a batch size.
fn with_batch(
    label: &str,
    model: &LoadedModel,
    typed: &Graph,
    opened: &FxHashSet<String>,
    size: usize,
) -> Result<Graph> {
    let mut sized = model.clone();
    let graph = message_graph(label, &mut sized.proto)?;
    set_first_axes(graph, typed, opened, &Dim::Known(size));
    graph_of(label, &sized)
}

/// Checks that the first axis of each output follows the batch, if its size equals it. Also checks that the
/// batch can be separated from the other factors of an axis.
fn check_shapes(
    before: &Graph,
    after: &Graph,
    outputs: &[String],
    batch: usize,
) -> std::result::Result<(), String> {
    let dims = |graph: &Graph, name: &str| {
        let id = graph.find(name)?;
        match &graph.value(id).ty {
            ValueType::Tensor(_, Some(shape)) => shape.concrete(),
            _ => None,
        }
    };
    let is_unchanged = |name: &str| {
        dims(before, name).is_some_and(|dims| dims.first() == Some(&batch))
            && dims(before, name) == dims(after, name)
    };
    let producer_label = |graph: &Graph, name: &str| {
        let id = graph.find(name)?;
        let node = graph.nodes.iter().find(|node| node.present_outputs().any(|output| output == id))?;
        Some(graph.node_label(node))
    };
    for name in outputs {
        let (Some(was), Some(is)) = (dims(before, name), dims(after, name)) else { continue };
        let Some(axis) = (0..was.len()).find(|&axis| is.get(axis) != Some(&was[axis])) else { continue };
        if was.len() == is.len() && was[axis] != batch && (axis != 0 || was.len() == 1) {
            let node = producer_label(before, name).unwrap_or_default();
            let reason = format!("{node} merges the batch with other axes in axis {axis} of output {name:?}");
            return Err(batch_dependence_error(batch, &reason));
        }
    }
    let Some(output) = outputs.iter().find(|name| batch > 1 && is_unchanged(name)) else { return Ok(()) };
    // Finds the node with an input that follows the batch and an output that does not.
    let follows = |name: &str| dims(before, name) != dims(after, name);
    let node = before.nodes.iter().find(|node| {
        node.present_inputs().any(|id| follows(before.name_of(id)))
            && node.present_outputs().any(|id| is_unchanged(before.name_of(id)))
    });
    let culprit = node.map_or_else(|| format!("output {output:?}"), |node| before.node_label(node));
    Err(batch_dependence_error(batch, &format!("{culprit} has the same shape for every batch size")))
}

/// Sets the first axis of inputs to a size or a symbol.
fn set_first_axes(graph: &mut GraphProto, typed: &Graph, opened: &FxHashSet<String>, size: &Dim) {
    for info in graph.input.iter_mut().filter(|info| opened.contains(&info.name)) {
        let ty = typed.find(&info.name).map(|id| typed.value(id).ty.clone());
        if let Some(ValueType::Tensor(dtype, Some(shape))) = ty {
            let shape = std::iter::once(size).chain(shape.iter().skip(1)).cloned().collect();
            *info = declare_value(&info.name, ValueType::Tensor(dtype, Some(shape)));
        }
    }
}

/// Replaces an input of a node so that its shape follows the batch. Returns `None` if the message has no such
/// input.
fn apply_fix(graph: &mut GraphProto, fix: &FixedBatch, index: usize, first_input: &str) -> Option<()> {
    let at = graph.node.iter().position(|node| node.output.contains(&fix.output))?;
    graph.node[at].input.get(fix.input)?;
    let value_name = |suffix: &str| format!("open_batch/{index}/{suffix}");
    match &fix.open {
        OpenShape::Omitted => graph.node[at].input[fix.input].clear(),
        OpenShape::Shape(shape) => {
            graph
                .initializer
                .push(tensor_to_proto(&value_name("shape"), &Tensor::i64(&[shape.len()], shape)));
            graph.node[at].input[fix.input] = value_name("shape");
        }
        OpenShape::FirstSlice(axis) => {
            let (first, zero) =
                first_slice_nodes(&graph.node[at].input[fix.input], *axis, &value_name("first"));
            graph.initializer.push(zero);
            graph.node[at].input[fix.input] = value_name("first");
            graph.node.insert(at, first);
        }
        OpenShape::RepeatedRows(rest) => {
            let (first, zero) = first_slice_nodes(&graph.node[at].input[fix.input], 0, &value_name("first"));
            let (mut added, constants) = batch_shape_nodes(first_input, rest, &value_name("shape"));
            graph.initializer.push(zero);
            graph.initializer.extend(constants);
            added.push(first);
            added.push(NodeProto {
                op_type: "Expand".into(),
                name: value_name("rows"),
                input: vec![value_name("first"), value_name("shape")],
                output: vec![value_name("rows")],
                ..NodeProto::default()
            });
            graph.node[at].input[fix.input] = value_name("rows");
            graph.node.splice(at..at, added);
        }
        OpenShape::BatchThen(rest) => {
            let (added, constants) = batch_shape_nodes(first_input, rest, &value_name("shape"));
            graph.initializer.extend(constants);
            graph.node[at].input[fix.input] = value_name("shape");
            graph.node.splice(at..at, added);
        }
    }
    Some(())
}
