//! Losses of a training model: which values they compare, and their sum.

use ortrain_graph::{DType, Graph, Tensor, ValueId};
use ortrain_onnx::GraphProto;
use ortrain_ops::training::{
    Loss, LossTerm, NameGenerator, append_loss, append_sum, check_scores, class_axis_of_tokens,
    default_target, is_class_axis_open, rename_value,
};

use super::options::ArtifactOptions;
use crate::artifacts::training_model::unknown_value;
use crate::{Error, Result};

pub(super) fn first_output(label: &str, graph: &GraphProto, options: &ArtifactOptions) -> Result<String> {
    if let Some(name) = options.loss_input_names.first() {
        return Err(Error::Argument(format!("loss_input_names has {name:?}, but there is no loss")));
    }
    let missing = || Error::WrongModel {
        model: label.to_owned(),
        reason: "it has no output to use as the loss".into(),
    };
    graph.output.first().map(|info| info.name.clone()).ok_or_else(missing)
}

/// Losses that were appended to a model.
pub(super) struct AppendedLosses {
    /// Name of the sum of the losses.
    pub(super) sum: String,
    /// Losses, each with its scores.
    pub(super) compared: Vec<(Loss, ValueId)>,
    /// A sentence about each inferred class axis.
    pub(super) notes: Vec<String>,
    /// Labels with a symbolic class axis: their shape at the first step determines it.
    pub(super) open_labels: Vec<String>,
}

/// Appends the losses to the model.
pub(super) fn append_losses(
    label: &str,
    graph: &mut GraphProto,
    names: &mut NameGenerator,
    typed: &Graph,
    options: &ArtifactOptions,
    opset: i64,
) -> Result<AppendedLosses> {
    let (mut terms, mut compared, mut notes) = (Vec::new(), Vec::new(), Vec::new());
    let mut open_labels = Vec::new();
    let mut dtype = DType::F32;
    // Targets of earlier losses are no outputs of the model.
    let forward: Vec<String> = graph.output.iter().map(|info| info.name.clone()).collect();
    let mut selected = Vec::new();
    for term in &options.losses {
        let (scores, target) = match &term.scores {
            Some(scores) => (scores.clone(), None),
            None => loss_inputs(&forward, options)?,
        };
        selected.push((term, scores, term.target.clone().or(target)));
    }
    // Terms with different scores have separate targets, unless they name one.
    let shared = |term: &LossTerm, scores: &str| {
        let mut rivals = selected.iter().filter(|(other, _, target)| {
            target.is_none() && default_target(other.loss) == default_target(term.loss)
        });
        rivals.all(|(_, other, _)| other == scores)
    };
    for (term, scores, target) in &selected {
        let default_name = || format!("{}_{scores}", default_target(term.loss));
        let target = target.clone().or_else(|| (!shared(term, scores)).then(default_name));
        let id = typed.find(scores).ok_or_else(|| unknown_value(typed, scores, "an input of the loss"))?;
        check_scores(typed, term, id).map_err(|source| Error::model(label, source))?;
        compared.push((term.loss, id));
        let ty = &typed.value(id).ty;
        dtype = ty.dtype().unwrap_or(dtype);
        let (loss, mut settings) = (term.loss, term.settings.clone());
        if loss == Loss::CrossEntropyLoss && settings.class_axis.is_none() {
            let labels = target.as_deref().and_then(|target| typed.find(target));
            let labels = labels.and_then(|labels| typed.value(labels).ty.shape());
            let weights = settings.weight.as_ref().map(Tensor::len);
            if let Some((axis, reason)) = class_axis_of_tokens(typed, id, labels, weights) {
                settings.class_axis = Some(axis as i64);
                notes.push(format!(
                    "the class axis of {scores:?} ({ty}) is assumed to be {axis}, the last one, because {reason}; \
                     confirm it with class_axis={axis}, or set class_axis=1"
                ));
            } else if labels.is_none()
                && settings.label_smoothing == 0.0
                && ty.shape().is_some_and(is_class_axis_open)
            {
                open_labels.push(target.clone().unwrap_or_else(|| default_target(loss).to_owned()));
            }
        }
        let appended = append_loss(graph, names, loss, &settings, scores, ty, target.as_deref(), opset);
        let mut output = appended.map_err(|source| Error::model(label, source))?;
        if let Some(name) = &term.name {
            if !rename_value(graph, &output, name) {
                return Err(Error::Argument(format!(
                    "a loss cannot be named {name:?}: the name must not be empty or the name of another value"
                )));
            }
            output.clone_from(name);
        }
        terms.push((output, term.factor));
    }
    let sum = append_sum(graph, names, &terms, dtype).expect("there is a loss");
    Ok(AppendedLosses { sum, compared, notes, open_labels })
}

/// Returns the names of the scores and, if given, of the target.
fn loss_inputs(forward: &[String], options: &ArtifactOptions) -> Result<(String, Option<String>)> {
    let names = if options.loss_input_names.is_empty() { forward } else { &options.loss_input_names };
    match names {
        [scores] => Ok((scores.clone(), None)),
        [scores, target] => Ok((scores.clone(), Some(target.clone()))),
        _ => Err(Error::Argument(format!(
            "a loss takes scores and an optional target, got {} values ({}); choose them with loss_input_names",
            names.len(),
            names.join(", ")
        ))),
    }
}
