//! Graph of a model, as training and sessions need it.

use ortrain_graph::Graph;
use ortrain_onnx::{GraphProto, LoadedModel, ModelProto};
use ortrain_ops::passes::infer::infer;
use ortrain_ops::passes::versions::upgrade;
use ortrain_program::ALIGNMENT;

use crate::model::postprocessing;
use crate::model::postprocessing::{add_advice, unsupported_nodes, without_unsupported};
use crate::{Error, Result};

/// Builds the graph of a model, with operators of the newest version.
pub(crate) fn graph_of(label: &str, model: &LoadedModel) -> Result<Graph> {
    let shorter = postprocessing::without_unsupported(model, &postprocessing::output_names(model));
    let mut graph =
        Graph::from_model(shorter.as_ref().unwrap_or(model)).map_err(|source| Error::graph(label, source))?;
    upgrade(&mut graph).map_err(|source| Error::model(label, source))?;
    Ok(graph)
}

/// Builds the graph of a model that was loaded for execution: programs read its constants in place.
pub(crate) fn graph_to_run(label: &str, model: &LoadedModel) -> Result<Graph> {
    let mut graph = graph_of(label, model)?;
    graph.align_constants(ALIGNMENT);
    Ok(graph)
}

/// Returns the graph of a model as written, without unsupported parts that `values` do not need.
///
/// # Errors
/// If the graph contradicts itself, or `values` need unsupported parts.
pub(crate) fn graph_for(label: &str, model: &LoadedModel, values: &[&str]) -> Result<Graph> {
    let shorter = without_unsupported(model, values);
    let model = shorter.as_ref().unwrap_or(model);
    if model.proto.graph.as_ref().is_some_and(|graph| unsupported_nodes(graph).contains(&true)) {
        graph_of(label, model).map_err(|error| add_advice(error, model))?;
    }
    Graph::from_model(model).map_err(|source| Error::graph(label, source))
}

/// Returns the graph of a message with all types.
pub(crate) fn infer_graph(label: &str, model: &LoadedModel) -> Result<Graph> {
    let mut graph = graph_of(label, model)?;
    infer(&mut graph).map_err(|source| Error::model(label, source))?;
    Ok(graph)
}

pub(crate) fn message_graph<'a>(label: &str, proto: &'a mut ModelProto) -> Result<&'a mut GraphProto> {
    let missing = || Error::WrongModel { model: label.to_owned(), reason: "it has no graph".into() };
    proto.graph.as_mut().ok_or_else(missing)
}

/// Returns the version of `ai.onnx` that a message imports.
pub(crate) fn opset_of(proto: &ModelProto) -> i64 {
    let main = proto.opset_import.iter().find(|set| set.domain.is_empty() || set.domain == "ai.onnx");
    main.map_or(1, |set| set.version)
}
