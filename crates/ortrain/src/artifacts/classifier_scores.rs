//! Classifier models from exporters of tabular libraries: weights in attributes, labels and maps among the
//! outputs. They are converted before training or inspection.

use ortrain_graph::DType;
use ortrain_onnx::LoadedModel;
use ortrain_ops::training::{common_source, default_scores, replace_outputs_by_tensors};

use crate::artifacts::options::ArtifactOptions;
use crate::model::classifiers::typed_subgraph;
use crate::model::graph::message_graph;
use crate::model::postprocessing;
use crate::{Error, Result};

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
