//! Classifier models of tabular libraries: weights in attributes become initializers, a choice of classes becomes a tensor.

use ortrain_graph::Graph;
use ortrain_onnx::LoadedModel;
use ortrain_ops::passes::infer::infer_known;
use ortrain_ops::passes::linear_models;
use ortrain_ops::passes::versions::upgrade_known;
use ortrain_ops::training::{replace_outputs_by_tensors, starts_with_label};

use crate::model::postprocessing;
use crate::{Error, Result};

/// Returns the subgraph that some values of a model need, with all types that can be inferred.
pub(crate) fn typed_subgraph(model: &LoadedModel, values: &[&str]) -> Option<Graph> {
    let shorter = postprocessing::without_unsupported(model, values);
    let mut graph = Graph::from_model(shorter.as_ref().unwrap_or(model)).ok()?;
    upgrade_known(&mut graph);
    infer_known(&mut graph);
    Some(graph)
}

/// Converts weights in attributes to initializers.
pub(crate) fn attributes_to_initializers(label: &str, model: &mut LoadedModel) -> Result<()> {
    let results = linear_models::linear_outputs(&model.proto);
    if results.is_empty() {
        return Ok(());
    }
    let results: Vec<&str> = results.iter().map(String::as_str).collect();
    // Errors of the graph are reported when the complete graph is read.
    let Some(graph) = typed_subgraph(model, &results) else { return Ok(()) };
    let mut proto = std::mem::take(&mut model.proto);
    let outcome = linear_models::convert_linear_models(&mut proto, &graph);
    model.proto = proto;
    outcome.map_err(|source| Error::model(label, source))
}

/// Returns the model with tensors as outputs if its first output is a class choice, otherwise `None`.
pub(crate) fn with_tensor_outputs(model: &LoadedModel) -> Option<LoadedModel> {
    model.proto.graph.as_ref().filter(|graph| starts_with_label(graph))?;
    let mut proto = model.proto.clone();
    replace_outputs_by_tensors(proto.graph.as_mut()?).then(|| model.with_proto(proto))
}
