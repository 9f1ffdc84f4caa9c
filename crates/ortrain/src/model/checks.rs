//! Errors for a model of another kind than expected.

use ortrain_graph::Graph;

use crate::model::file_kind::{FileKind, list_names};
use crate::state::gradient_names::{BUFFER_SUFFIX, parameter_of_gradient};
use crate::{CheckpointState, Error, Result};

/// Returns an error if the model is no training model, or belongs to another checkpoint.
pub(crate) fn check_training(model: &str, graph: &Graph, state: &CheckpointState) -> Result<()> {
    let trained: Vec<&str> =
        state.entries().iter().filter(|entry| entry.requires_grad).map(|entry| &*entry.name).collect();
    let names = || graph.inputs.iter().map(|&id| graph.name_of(id));
    if trained.is_empty()
        || names()
            .any(|name| parameter_of_gradient(name).is_some_and(|parameter| state.entry(parameter).is_some()))
    {
        return Ok(());
    }
    let accumulated: Vec<&str> = names().filter_map(|name| name.strip_suffix(BUFFER_SUFFIX)).collect();
    let wrong = |reason: String| Err(Error::WrongModel { model: model.to_owned(), reason });
    match FileKind::of_graph(graph) {
        FileKind::TrainingModel if accumulated.is_empty() => Ok(()),
        FileKind::TrainingModel => Err(Error::Mismatch {
            model: model.to_owned(),
            reason: format!(
                "the model trains {}, but the checkpoint trains {}; give the checkpoint that was made together with \
                 the model",
                list_names(accumulated.iter().copied()),
                list_names(trained.iter().copied())
            ),
        }),
        FileKind::OptimizerModel => wrong(
            "it is an optimizer model, which computes no gradients; give the training model that was made together with it \
             (training_model.onnx)"
                .into(),
        ),
        kind => {
            let parameters_are_inputs =
                kind == FileKind::EvalModel || names().any(|name| state.entry(name).is_some());
            wrong(if parameters_are_inputs {
                "it is an evaluation model, which computes no gradients; give the training model that was made together \
                 with it (training_model.onnx)"
                    .into()
            } else {
                "it is a forward model, which computes no gradients; give the training model that \
                 generate_artifacts makes from it (training_model.onnx)"
                    .into()
            })
        }
    }
}

/// Returns the reason why an evaluation model without an input for a parameter of the training model does not
/// fit.
pub(crate) fn missing_parameter_reason(graph: &Graph, missing: &str) -> String {
    const HELP: &str =
        "give the evaluation model that was made together with the training model (eval_model.onnx)";
    let constant = graph.find(missing).is_some_and(|id| graph.value(id).constant.is_some());
    match FileKind::of_graph(graph) {
        FileKind::OptimizerModel => {
            format!("it is an optimizer model, which does not run the forward pass; {HELP}")
        }
        FileKind::ForwardModel if constant => {
            format!("it is a forward model, with its own value of parameter {missing:?}; {HELP}")
        }
        _ => format!(
            "it has no input for parameter {missing:?} of the training model; give the one that was made together with the \
             training model"
        ),
    }
}

/// Returns an error if the source of artifacts is itself an artifact.
pub(crate) fn check_forward(model: &str, graph: &Graph) -> Result<()> {
    let kind = FileKind::of_graph(graph);
    match kind {
        FileKind::TrainingModel | FileKind::OptimizerModel => Err(Error::WrongModel {
            model: model.to_owned(),
            reason: format!(
                "it is {}, not a forward model; give the forward model from which it was made",
                kind.name_with_article()
            ),
        }),
        _ => Ok(()),
    }
}
