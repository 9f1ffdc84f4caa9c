//! Training models: gradients, and their accumulation.

use std::sync::Arc;

use ortrain_graph::{DType, Graph, Tensor, ValueId, ValueType};
use ortrain_onnx::{LoadedModel, ModelProto, OperatorSetIdProto};
use ortrain_ops::passes::differentiate::{differentiate, values_with_gradient};
use ortrain_ops::passes::functions::unwrap_gradients;
use ortrain_ops::passes::infer::infer;
use ortrain_ops::passes::versions::{downgrade, upgrade};
use ortrain_ops::training::{Accumulation, append_accumulators, set_training_mode};

use crate::artifacts::options::ArtifactOptions;
use crate::model::stops::no_trained_weights_error;
use crate::state::gradient_names::{BUFFER_SUFFIX, RESET_FLAG, UPDATED_SUFFIX};
use crate::suggest::hint_in;
use crate::{Error, Result};

/// Operator sets that onnxruntime-training's training models import in addition to the sets of the forward
/// model.
pub(crate) const TRAINING_OPSETS: [(&str, i64); 7] = [
    ("ai.onnx.ml", 5),
    ("ai.onnx.training", 1),
    ("ai.onnx.preview.training", 1),
    ("com.microsoft", 1),
    ("com.microsoft.experimental", 1),
    ("com.microsoft.nchwc", 1),
    ("org.pytorch.aten", 1),
];

/// Builds the message of the training model.
pub(crate) fn training_model(
    label: &str,
    forward: &LoadedModel,
    outputs: &[String],
    (values, statistics): (&[Value], &[String]),
    opset: i64,
    options: &ArtifactOptions,
) -> Result<ModelProto> {
    let fail = |source| Error::model(label, source);
    let mut graph = Graph::from_model(forward).map_err(|source| Error::graph(label, source))?;
    upgrade(&mut graph).map_err(fail)?;
    graph.remove_unused();
    let mut targets: Vec<&str> =
        values.iter().filter(|(_, trained, _)| *trained).map(|(name, ..)| &**name).collect();
    let trained = targets.iter().copied().collect();
    let statistics = statistics.iter().map(String::as_str).collect();
    set_training_mode(&mut graph, opset, options.batch_norm, &trained, &statistics).map_err(fail)?;
    targets.extend(options.input_gradients.iter().map(String::as_str));
    infer(&mut graph).map_err(fail)?;

    let find =
        |graph: &Graph, name: &str| graph.find(name).ok_or_else(|| unknown_value(graph, name, "a parameter"));
    let targets = targets.iter().map(|name| find(&graph, name)).collect::<Result<Vec<ValueId>>>()?;
    let loss = find(&graph, &outputs[0])?;
    let reached = values_with_gradient(&graph, &[loss]);
    if !targets.iter().any(|target| reached.contains(target))
        && let Some(error) = forward.proto.graph.as_ref().and_then(no_trained_weights_error)
    {
        return Err(error);
    }
    let gradients = differentiate(&mut graph, loss, &targets).map_err(fail)?;

    gather_gradients(&mut graph, &targets, &gradients, outputs.len())?;
    training_message(label, &forward.proto, graph, opset)
}

/// Adds inputs for accumulated gradients, and the accumulation nodes. `first` is the index in the name of the
/// first node.
pub(crate) fn gather_gradients(
    graph: &mut Graph,
    targets: &[ValueId],
    gradients: &[ValueId],
    first: usize,
) -> Result<()> {
    let updated: Vec<String> =
        targets.iter().map(|&target| format!("{}{UPDATED_SUFFIX}", graph.name_of(target))).collect();
    let mut buffers = Vec::with_capacity(targets.len());
    for &target in targets {
        let name = format!("{}{BUFFER_SUFFIX}", graph.name_of(target));
        let ty = graph.value(target).ty.clone();
        buffers.push(new_input(graph, &name, ty)?);
    }
    let reset = new_input(graph, RESET_FLAG, ValueType::tensor(DType::Bool, &[1]))?;
    let accumulations: Vec<Accumulation<'_>> = (0..targets.len())
        .map(|k| Accumulation {
            node: format!("GradientAccumulator{}", k + first),
            buffer: buffers[k],
            gradient: gradients[k],
            updated: &updated[k],
        })
        .collect();
    let done = append_accumulators(graph, reset, &accumulations);
    graph.outputs.extend(done);
    Ok(())
}

/// Converts a graph with gradients, in the newest operator versions, to a message with the metadata of the
/// forward model.
pub(crate) fn training_message(
    label: &str,
    forward: &ModelProto,
    mut graph: Graph,
    opset: i64,
) -> Result<ModelProto> {
    let fail = |source| Error::model(label, source);
    unwrap_gradients(&mut graph).map_err(fail)?;
    infer(&mut graph).map_err(fail)?;
    downgrade(&mut graph, opset).map_err(fail)?;

    let mut proto = forward.clone();
    proto.metadata_props.clear();
    proto.functions.clear();
    let import = |(domain, version): (&str, i64)| OperatorSetIdProto { domain: domain.to_owned(), version };
    let of_forward =
        forward.opset_import.iter().map(|set| (set.domain.as_str(), set.version)).filter(|(domain, _)| {
            !domain.is_empty()
                && *domain != "ai.onnx"
                && TRAINING_OPSETS.iter().all(|(known, _)| known != domain)
        });
    proto.opset_import =
        std::iter::once(("", opset)).chain(TRAINING_OPSETS).chain(of_forward).map(import).collect();
    proto.graph = Some(graph.to_proto());
    Ok(proto)
}

/// Adds an input with an unused name.
pub(crate) fn new_input(graph: &mut Graph, name: &str, ty: ValueType) -> Result<ValueId> {
    if graph.find(name).is_some() {
        return Err(Error::Argument(format!(
            "value {name:?} of the model has a name that the training model needs; rename it"
        )));
    }
    let id = graph.add_value(name, ty);
    graph.inputs.push(id);
    Ok(id)
}

pub(crate) fn unknown_value(graph: &Graph, name: &str, role: &str) -> Error {
    Error::Argument(format!("the model has no value {name:?} to use as {role}{}", hint_in(graph, name)))
}

/// A parameter or running statistic: its name, true if it is trained, and its value.
pub(crate) type Value = (Arc<str>, bool, Tensor);
