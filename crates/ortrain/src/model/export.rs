//! Conversion of an evaluation model to an inference model, as an edit of the original message.

use indexmap::IndexSet;
use ortrain_graph::{Graph, tensor_to_proto};
use ortrain_onnx::{GraphProto, LoadedModel, ValueInfoProto};
use ortrain_ops::training::{remove_float_weights, remove_master_weights};
use rustc_hash::FxHashSet;

use crate::model::class_axis;
use crate::model::node_inputs::needed_nodes_and_values;
use crate::suggest::hint_in;
use crate::{CheckpointState, Error, Result};

/// Returns the model with these outputs and the parameter values as initializers. Nodes and inputs that the
/// outputs do not need are removed.
pub(crate) fn inference_model(
    message: &LoadedModel,
    inferred: &Graph,
    state: &CheckpointState,
    outputs: &[&str],
) -> Result<LoadedModel> {
    if outputs.is_empty() {
        return Err(Error::Argument("an inference model needs at least one output; name it".into()));
    }
    let mut proto = message.proto.clone();
    class_axis::remove_marks(&mut proto);
    let Some(graph) = proto.graph.as_mut() else {
        return Err(Error::WrongModel {
            model: "the evaluation model".into(),
            reason: "it has no graph".into(),
        });
    };

    let mut infos = Vec::with_capacity(outputs.len());
    for name in outputs.iter().copied().collect::<IndexSet<&str>>() {
        infos.push(output_declaration(graph, inferred, name)?);
    }
    graph.output = infos;

    let (keep, needed) = needed_nodes_and_values(graph, outputs);
    let mut keep_flags = keep.into_iter();
    graph.node.retain(|_| keep_flags.next() == Some(true));
    graph.initializer.retain(|tensor| needed.contains(&tensor.name));
    graph
        .sparse_initializer
        .retain(|sparse| sparse.values.as_ref().is_some_and(|values| needed.contains(&values.name)));

    for info in graph.input.iter().filter(|info| needed.contains(&info.name)) {
        if let Some(entry) = state.entry(&info.name) {
            graph.initializer.push(tensor_to_proto(&info.name, &state.view(entry).to_tensor()?));
        }
    }
    // An input that was requested as an output passes through.
    graph.input.retain(|info| state.entry(&info.name).is_none() && needed.contains(&info.name));
    remove_master_weights(graph).map_err(|source| Error::graph("the evaluation model", source))?;
    remove_float_weights(graph).map_err(|source| Error::graph("the evaluation model", source))?;
    let available: FxHashSet<&str> =
        graph.node.iter().flat_map(|node| node.output.iter().map(String::as_str)).collect();
    graph.value_info.retain(|info| available.contains(info.name.as_str()));
    graph.quantization_annotation.retain(|annotation| needed.contains(&annotation.tensor_name));
    Ok(message.with_proto(proto))
}

/// Returns the declaration of a value from the message, or else the inferred one.
fn output_declaration(graph: &GraphProto, inferred: &Graph, name: &str) -> Result<ValueInfoProto> {
    let unknown = || {
        let suggestion = hint_in(inferred, name);
        Error::Argument(format!(
            "the evaluation model has no value {name:?} that could be an output{suggestion}"
        ))
    };
    let mut declared = graph.output.iter().chain(&graph.input).chain(&graph.value_info);
    if let Some(info) = declared.find(|info| info.name == name) {
        return Ok(info.clone());
    }
    let is_computed = graph.node.iter().any(|node| node.output.iter().any(|output| output == name))
        || graph.initializer.iter().any(|tensor| tensor.name == name);
    if !is_computed || name.is_empty() {
        return Err(unknown());
    }
    Ok(inferred.find(name).map_or_else(
        || ValueInfoProto { name: name.to_owned(), ..ValueInfoProto::default() },
        |id| inferred.value_info(id),
    ))
}
