//! Checks that the scores of a loss fit the loss.
//!
//! These scores do not fit:
//! - results of a softmax or a sigmoid, for a loss on logits;
//! - logits, for a loss on log-probabilities;
//! - discrete choices, which have no gradient.

use ortrain_graph::{Graph, Node, Shape, ValueId};

use super::{Loss, LossTerm};
use crate::Error;
use crate::class::{Class, Traits};
use crate::registry::{class_of, has_traits};

/// Maximum number of nodes (biases and changes of shape) from the scores to their product.
const MAX_LAYERS_OF_HEAD: usize = 8;

/// Returns the first producer of a value that is not a pass-through node, and the output of this producer.
fn find_origin(graph: &Graph, mut value: ValueId) -> Option<(&Node, ValueId)> {
    // Nodes are in topological order, so one backward sweep meets all producers.
    for node in graph.nodes.iter().rev() {
        if !node.present_outputs().any(|output| output == value) {
            continue;
        }
        let first = node.inputs.first().copied().flatten();
        match first {
            Some(first) if has_traits(node, Traits::KEEPS_SCORES) => {
                value = first;
            }
            _ => return Some((node, value)),
        }
    }
    None
}

/// Function from the scores of a loss to an output of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// The output is the scores.
    Identity,
    /// Probabilities of classes that exclude each other.
    Softmax,
    /// Logarithms of these probabilities.
    LogSoftmax,
    /// Probabilities of classes that do not exclude each other.
    Sigmoid,
    /// The position of an extreme, which has no gradient.
    Choice,
}

impl Activation {
    /// Returns the name in the Python API.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Activation::Identity => "identity",
            Activation::Softmax => "softmax",
            Activation::LogSoftmax => "log_softmax",
            Activation::Sigmoid => "sigmoid",
            Activation::Choice => "choice",
        }
    }
}

/// Returns the scores of an output, and the function that computes the output from them. The scores of a softmax or a
/// sigmoid are its input: the logits. All other outputs are their own scores.
#[must_use]
pub fn find_scores(graph: &Graph, output: ValueId) -> (Activation, ValueId) {
    let Some((node, _)) = find_origin(graph, output) else { return (Activation::Identity, output) };
    let activation = match class_of(node) {
        Class::Softmax { log: false } => Activation::Softmax,
        Class::Softmax { log: true } => Activation::LogSoftmax,
        Class::Sigmoid { hard: false } => Activation::Sigmoid,
        Class::Choice => return (Activation::Choice, output),
        _ => return (Activation::Identity, output),
    };
    match node.inputs.first().copied().flatten() {
        Some(logits) => (activation, logits),
        None => (Activation::Identity, output),
    }
}

/// Returns the name of the first input of a node.
fn first_input_name<'a>(graph: &'a Graph, node: &Node) -> Option<&'a str> {
    node.inputs.first().copied().flatten().map(|id| graph.name_of(id))
}

/// Returns the problem with the scores of a loss on logits, if there is a problem.
fn logits_problem(graph: &Graph, loss: Loss, scores: ValueId) -> Option<String> {
    let (node, _) = find_origin(graph, scores)?;
    let class = class_of(node);
    let contents = match class {
        Class::Softmax { log: false } => "probabilities",
        Class::Softmax { log: true } => "logarithms of probabilities",
        Class::Sigmoid { .. } => "numbers from 0 to 1",
        _ => return None,
    };
    let effect = match (loss, class) {
        (Loss::CrossEntropyLoss, Class::Softmax { log: true }) => {
            "the loss is the same as that of the logits, and the softmax is computed twice"
        }
        (Loss::CrossEntropyLoss, Class::Softmax { log: false }) => {
            "the softmax is computed twice, gradients are small, and the loss does not approach zero"
        }
        (Loss::CrossEntropyLoss, _) => "their softmax is nearly uniform, and the loss does not approach zero",
        _ => "the sigmoid is computed from values that are not logits, and the loss does not approach zero",
    };
    let mut sentence = format!(
        "{} takes logits, but {:?} contains {contents} from {}: {effect}",
        loss.label(),
        graph.name_of(scores),
        graph.node_label(node)
    );
    if let Some(logits) = first_input_name(graph, node) {
        sentence += &format!("; name {logits:?} instead (loss_input_names, or the scores of the loss)");
    }
    Some(sentence)
}

/// Returns the problem with the scores of a loss on log-probabilities, if there is a problem.
fn log_probabilities_problem(graph: &Graph, scores: ValueId) -> Option<String> {
    let (node, _) = find_origin(graph, scores)?;
    let helps = match class_of(node) {
        Class::Softmax { log: false } | Class::Sigmoid { hard: false } => "add a Log after it",
        _ if has_traits(node, Traits::UNBOUNDED) => {
            "add a LogSoftmax after it, or use SoftmaxCrossEntropyLoss"
        }
        // A weight plus an unbounded value is a logit with a bias. Other sums may be logarithms.
        Class::Add => {
            let is_constant = |id: ValueId| graph.value(id).constant.is_some() || graph.inputs.contains(&id);
            let other = node.present_inputs().find(|&id| !is_constant(id))?;
            let (maker, _) = find_origin(graph, other)?;
            if node.present_inputs().all(|id| id == other || is_constant(id))
                && has_traits(maker, Traits::UNBOUNDED)
            {
                "add a LogSoftmax after it, or use SoftmaxCrossEntropyLoss"
            } else {
                return None;
            }
        }
        _ => return None,
    };
    Some(format!(
        "the negative log-likelihood takes logarithms of probabilities, but {:?} comes from {}; {helps}",
        graph.name_of(scores),
        graph.node_label(node)
    ))
}

/// Returns the problems with the losses of a model with known types: its own loss nodes, and the appended `terms`. Each
/// is one sentence with a remedy.
#[must_use]
pub fn loss_problems(graph: &Graph, terms: &[(Loss, ValueId)]) -> Vec<String> {
    let mut problems: Vec<String> = Vec::new();
    let of_nodes = graph.nodes.iter().filter_map(|node| {
        let scores = node.inputs.first().copied().flatten()?;
        match class_of(node) {
            Class::LabelLoss { of_logits: true } => logits_problem(graph, Loss::CrossEntropyLoss, scores),
            Class::LabelLoss { of_logits: false } => log_probabilities_problem(graph, scores),
            _ => None,
        }
    });
    problems.extend(of_nodes);
    for &(loss, scores) in terms {
        if let Loss::CrossEntropyLoss | Loss::BCEWithLogitsLoss = loss {
            problems
                .extend(logits_problem(graph, loss, scores).filter(|sentence| !problems.contains(sentence)));
        }
    }
    problems
}

/// Returns the error text for a class label out of range. Returns `None` if the node that messages call `label` is not
/// a loss for class labels.
#[must_use]
pub fn label_error(graph: &Graph, label: &str, position: &str, index: i64, classes: i64) -> Option<String> {
    let node = graph
        .nodes
        .iter()
        .find(|node| has_traits(node, Traits::READS_LABELS) && graph.node_label(node) == label)?;
    let ignored = node.attrs.int("ignore_index").ok().flatten();
    let ignored =
        ignored.map_or_else(String::new, |ignored| format!(" and is not the ignore_index, {ignored}"));
    Some(format!(
        "{label}: label {index}{position} is not one of the {classes} classes (0 to {}){ignored}",
        classes - 1
    ))
}

/// Checks that a gradient flows back from the scores of a loss.
///
/// # Errors
/// Returns an error if `ArgMax`, `ArgMin` or `Hardmax` computes the scores. The message names the input of that node.
pub fn check_scores(graph: &Graph, term: &LossTerm, scores: ValueId) -> Result<(), Error> {
    let Some((node, _)) = find_origin(graph, scores) else { return Ok(()) };
    if class_of(node) != Class::Choice {
        return Ok(());
    }
    let mut sentence = format!(
        "{} of {:?} has no gradient: it is selected by {}",
        term.loss.label(),
        graph.name_of(scores),
        graph.node_label(node)
    );
    if let Some(chosen_from) = first_input_name(graph, node) {
        sentence += &format!("; name {chosen_from:?} instead (loss_input_names, or the scores of the loss)");
    }
    Err(Error::Loss(sentence))
}

/// Returns the class axis of scores `[batch, sequence, classes]` and the reason as a part of a sentence; `None` for
/// axis 1. Language models and taggers have such scores.
///
/// Axis 1 cannot be the class axis in these cases:
/// - its size is unknown and the size of the last axis is known;
/// - `labels` have the shape of the scores without the last axis;
/// - only the last axis has the length of the class `weights`;
/// - the scores are named `logits` and are a product with a weight: the outputs of a product are the last axis.
#[must_use]
pub fn class_axis_of_tokens(
    graph: &Graph,
    scores: ValueId,
    labels: Option<&Shape>,
    weights: Option<usize>,
) -> Option<(usize, String)> {
    let shape = graph.value(scores).ty.shape()?;
    let last = shape.rank().checked_sub(1).filter(|&last| last > 1)?;
    let is_open = shape[1].known().is_none() && shape[last].known().is_some();
    if let Some(labels) = labels {
        let fits = |axis: usize| {
            let rest = shape.iter().enumerate().filter(|&(at, _)| at != axis).map(|(_, dim)| dim);
            labels.rank() == last && labels.iter().zip(rest).all(|(a, b)| a == b)
        };
        if fits(last) && !fits(1) {
            return Some((last, format!("its labels are {labels}")));
        }
    }
    let [second, classes] = [1, last].map(|axis| shape[axis].known());
    if weights.is_some() && weights == classes && weights != second {
        return Some((last, "its size equals the size of the loss weight".into()));
    }
    if is_open {
        return Some((last, "axis 1 has no fixed size".into()));
    }
    let is_head = graph.name_of(scores).to_ascii_lowercase().contains("logits");
    (is_head && ends_in_product(graph, scores)).then(|| (last, "it is a product with a weight".into()))
}

/// Returns true if a value is the product with a constant matrix, possibly plus a bias.
fn ends_in_product(graph: &Graph, value: ValueId) -> bool {
    let is_constant = |id: Option<ValueId>| id.is_some_and(|id| graph.value(id).constant.is_some());
    let producers = graph.producers();
    let makes = |id: ValueId| producers[id.0 as usize].map(|at| &graph.nodes[at]);
    let mut at = value;
    for _ in 0..MAX_LAYERS_OF_HEAD {
        let Some(node) = makes(at).filter(|node| node.domain.is_empty()) else { return false };
        let [first, second] = [0, 1].map(|input| node.inputs.get(input).copied().flatten());
        match class_of(node) {
            Class::MatrixProduct => {
                // PyTorch's exporter emits a Transpose of the weights.
                let moved = second.and_then(makes).filter(|maker| class_of(maker) == Class::Transpose);
                return is_constant(second) || moved.is_some_and(|maker| is_constant(maker.inputs[0]));
            }
            Class::Add if is_constant(second) => at = first.unwrap_or(at),
            Class::Add if is_constant(first) => at = second.unwrap_or(at),
            _ if has_traits(node, Traits::KEEPS_SCORES) => at = first.unwrap_or(at),
            _ => return false,
        }
    }
    false
}

/// Returns a sentence with the name of the logits, if a softmax or a sigmoid computes the output.
#[must_use]
pub fn probabilities_note(graph: &Graph, output: ValueId) -> Option<String> {
    let (node, _) = find_origin(graph, output)?;
    if !matches!(class_of(node), Class::Softmax { .. } | Class::Sigmoid { hard: false }) {
        return None;
    }
    let logits = first_input_name(graph, node)?;
    Some(format!(
        "{:?} is computed by {}: a loss that takes logits (CrossEntropyLoss, BCEWithLogitsLoss) needs {logits:?} \
         (loss_input_names)",
        graph.name_of(output),
        graph.node_label(node)
    ))
}
