//! Classifier models from exporters of tabular libraries: weights in attributes, labels and maps among the
//! outputs. They are converted before training or inspection.

use ortrain_graph::{DType, Graph};
use ortrain_onnx::LoadedModel;
use ortrain_ops::passes::{infer::infer_known, linear_models, versions::upgrade_known};
use ortrain_ops::training::{common_source, default_scores, replace_outputs_by_tensors, starts_with_label};

use crate::artifacts::{ArtifactOptions, message_graph};
use crate::{Error, Result, postprocessing};

/// Returns the subgraph that some values of a model need, with all types that can be inferred.
fn typed_subgraph(model: &LoadedModel, values: &[&str]) -> Option<Graph> {
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

/// Returns the options with default scores for losses without scores, if the first output of the model is a
/// class choice. The scores are the probabilities beside the choice, or their logits.
pub(crate) fn with_default_scores(
    label: &str,
    model: &mut LoadedModel,
    options: &ArtifactOptions,
) -> Result<ArtifactOptions> {
    let mut options = options.clone();
    let open = |options: &ArtifactOptions| options.losses.iter().any(|term| term.scores.is_none());
    if !options.loss_input_names.is_empty() || !open(&options) {
        return Ok(options);
    }
    let mut proto = std::mem::take(&mut model.proto);
    let replaced = replace_outputs_by_tensors(message_graph(label, &mut proto)?);
    model.proto = proto;
    let Some(graph) = replaced.then(|| typed_subgraph(model, &postprocessing::output_names(model))).flatten()
    else {
        return Ok(options);
    };
    let is_float = |id: &ortrain_graph::ValueId| graph.value(*id).ty.dtype().is_some_and(DType::is_float);
    let floats: Vec<_> = graph.outputs.iter().copied().filter(is_float).collect();
    if let Some(scores) = common_source(&graph, &floats) {
        // A single float output needs no other.
        let scores = if let [one] = floats[..] { one } else { scores };
        let message = message_graph(label, &mut model.proto)?;
        for term in options.losses.iter_mut().filter(|term| term.scores.is_none()) {
            let scores_name = default_scores(message, &graph, scores, term.loss);
            term.scores = Some(scores_name.map_err(|source| Error::model(label, source))?);
        }
    }
    Ok(options)
}
