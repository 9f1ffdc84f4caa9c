//! Models of classifiers as exporters of tables write them: weights that lie in attributes, labels and maps among the
//! outputs. What is made of them before anything is trained or looked into.

use ortrain_graph::{DType, Graph};
use ortrain_onnx::LoadedModel;
use ortrain_ops::passes::{infer::infer_known, linear_models, versions::upgrade_known};
use ortrain_ops::training::{default_scores, outputs_as_tensors, starts_with_choice, whole_of};

use crate::artifacts::{ArtifactOptions, message_graph};
use crate::{Error, Result, postprocessing};

/// The graph that some values of a model need, with types as far as they are known.
fn typed(model: &LoadedModel, values: &[&str]) -> Option<Graph> {
    let shorter = postprocessing::without(model, values);
    let mut graph = Graph::from_model(shorter.as_ref().unwrap_or(model)).ok()?;
    upgrade_known(&mut graph);
    infer_known(&mut graph);
    Some(graph)
}

/// Writes weights that lie in attributes as initializers.
pub(crate) fn write_out_weights(label: &str, model: &mut LoadedModel) -> Result<()> {
    let results = linear_models::results(&model.proto);
    if results.is_empty() {
        return Ok(());
    }
    let results: Vec<&str> = results.iter().map(String::as_str).collect();
    // What is wrong with the graph is said where all of it is read.
    let Some(graph) = typed(model, &results) else { return Ok(()) };
    let mut proto = std::mem::take(&mut model.proto);
    let outcome = linear_models::write_out(&mut proto, &graph);
    model.proto = proto;
    outcome.map_err(|source| Error::model(label, source))
}

/// The model with tensors as outputs, if its first output is a choice; `None` of others.
pub(crate) fn with_tensors(model: &LoadedModel) -> Option<LoadedModel> {
    model.proto.graph.as_ref().filter(|graph| starts_with_choice(graph))?;
    let mut proto = model.proto.clone();
    outputs_as_tensors(proto.graph.as_mut()?).then(|| model.with_proto(proto))
}

/// The options with the values that losses are put on where nobody said it and the first output of the model is a choice:
/// the probabilities that come with it, or the logits that they are made of.
pub(crate) fn by_default(
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
    let chosen = outputs_as_tensors(message_graph(label, &mut proto)?);
    model.proto = proto;
    let Some(graph) = chosen.then(|| typed(model, &postprocessing::outputs(model))).flatten() else {
        return Ok(options);
    };
    let is_float = |id: &ortrain_graph::ValueId| graph.value(*id).ty.dtype().is_some_and(DType::is_float);
    let floats: Vec<_> = graph.outputs.iter().copied().filter(is_float).collect();
    if let Some(scores) = whole_of(&graph, &floats) {
        // One output is a whole of its own.
        let scores = if let [one] = floats[..] { one } else { scores };
        let message = message_graph(label, &mut model.proto)?;
        for term in options.losses.iter_mut().filter(|term| term.scores.is_none()) {
            let found = default_scores(message, &graph, scores, term.loss);
            term.scores = Some(found.map_err(|source| Error::model(label, source))?);
        }
    }
    Ok(options)
}
