//! Replacement of a classifier's head, for other classes.

use std::sync::Arc;

use ortrain_expr::random_bits;
use ortrain_graph::{Graph, Tensor, tensor_to_proto};
use ortrain_onnx::{GraphProto, ModelProto};
use ortrain_ops::passes::{infer::infer, versions::upgrade};
use ortrain_ops::training::{Head, find_head};

use crate::artifacts::to_self_contained;
use crate::model::graph::{infer_graph, message_graph};
use crate::{Error, ModelSource, Result};

/// Random streams of weights and bias.
const RANDOM_STREAMS: [u64; 2] = [0, 1];

/// Returns the model with a new last layer for `classes` scores. Weights and bias are uniform from
/// `-1 / sqrt(n)` to `1 / sqrt(n)`, where `n` is the number of inputs of each score (as in
/// `torch.nn.Linear`).
///
/// Names remain, and so do the nodes after the scores. The layer is the last one before `output` (default:
/// the first output of the model): a Gemm, a MatMul with or without an Add, or a Conv with a 1x1 kernel. A
/// softmax or a global pooling may follow the layer.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::artifacts::replace_head;
///
/// let model = replace_head(setup::MODEL.into(), 4, None, 0)?;
/// let bias = model.graph.unwrap().initializer.into_iter().find(|tensor| tensor.name == "fc2.bias");
/// assert_eq!(bias.unwrap().dims, [4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the model cannot be read, does not end in such a layer, or shares its weights. If a later node only
/// fits the old number of classes.
pub fn replace_head(
    model: ModelSource,
    classes: usize,
    output: Option<&str>,
    seed: u64,
) -> Result<ModelProto> {
    let label = model.label("the model");
    if classes == 0 {
        return Err(Error::Argument("the number of classes must be at least 1, got 0".into()));
    }
    let mut loaded = to_self_contained(&label, model.load()?)?;
    let typed = infer_graph(&label, &loaded)?;
    let value = match output {
        Some(name) => typed.find(name),
        None => typed.outputs.first().copied(),
    };
    let value = value.ok_or_else(|| {
        let name = output.unwrap_or_default();
        Error::Argument(format!("the model has no value {name:?}, whose head is to be replaced"))
    })?;
    let head = find_head(&typed, value).map_err(|source| Error::model(&label, source))?;
    let graph = message_graph(&label, &mut loaded.proto)?;
    for (name, axis, stream) in head_tensors(&typed, &head) {
        let old = typed.find(&name).and_then(|id| typed.value(id).constant.clone());
        let Some(old) = old else { continue };
        let mut dims = old.dims().to_vec();
        dims[axis] = classes;
        let drawn = Tensor::f32(&dims, &draw_uniform(&dims, input_count(&typed, &head), seed, stream))
            .converted(old.dtype());
        replace_constant(graph, &name, &drawn);
    }
    // These declarations describe results of the old head.
    graph.value_info.clear();
    for info in &mut graph.output {
        info.r#type = None;
    }
    let mut again = Graph::from_model(&loaded).map_err(|source| Error::graph(&label, source))?;
    let error_message =
        |source| Error::Argument(incompatible_classes_message(&head, classes, &Error::model(&label, source)));
    upgrade(&mut again).map_err(error_message)?;
    infer(&mut again).map_err(error_message)?;
    let graph = message_graph(&label, &mut loaded.proto)?;
    for info in &mut graph.output {
        if let Some(id) = again.find(&info.name) {
            *info = again.value_info(id);
        }
    }
    Ok(loaded.proto)
}

fn incompatible_classes_message(head: &Head, classes: usize, error: &Error) -> String {
    format!(
        "the nodes after {} fit its {} classes, but not {classes}: {error}; name the scores as an output of the \
         model, and rebuild the rest",
        head.node, head.classes
    )
}

/// Returns the tensors of a head, each with its class axis and random stream.
fn head_tensors(typed: &Graph, head: &Head) -> Vec<(Arc<str>, usize, u64)> {
    let mut tensors: Vec<(Arc<str>, usize, u64)> =
        vec![(head.weight.as_str().into(), head.axis, RANDOM_STREAMS[0])];
    if let Some(bias) = &head.bias {
        let rank =
            typed.find(bias).and_then(|id| typed.value(id).constant.as_ref()).map_or(1, |t| t.dims().len());
        tensors.push((bias.as_str().into(), rank.max(1) - 1, RANDOM_STREAMS[1]));
    }
    tensors
}

/// Returns the number of inputs of each score.
fn input_count(typed: &Graph, head: &Head) -> usize {
    let weight = typed.find(&head.weight).and_then(|id| typed.value(id).constant.as_ref());
    weight.map_or(1, |weight| (weight.len() / head.classes.max(1)).max(1))
}

/// Draws numbers from `-1 / sqrt(terms)` to `1 / sqrt(terms)`. A seed gives the same numbers on every
/// machine.
fn draw_uniform(dims: &[usize], terms: usize, seed: u64, stream: u64) -> Vec<f32> {
    let bound = 1.0 / (terms as f32).sqrt();
    let unit = |index: u64| (random_bits(seed, stream, index) >> 8) as f32 / (1 << 24) as f32;
    (0..dims.iter().product::<usize>() as u64).map(|index| bound * (2.0 * unit(index) - 1.0)).collect()
}

/// Replaces a constant of a message: an initializer or the value of a Constant node.
fn replace_constant(graph: &mut GraphProto, name: &str, tensor: &Tensor) {
    graph.node.retain(|node| !(node.input.is_empty() && node.output.iter().any(|output| output == name)));
    graph.initializer.retain(|known| known.name != name);
    graph.initializer.push(tensor_to_proto(name, tensor));
}
