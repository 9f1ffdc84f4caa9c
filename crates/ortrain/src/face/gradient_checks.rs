//! Checks of the arguments and the result of a gradient model.

use ortrain_graph::{Graph, ValueId, ValueType};
use ortrain_ops::passes::decompose::RejectedNode;
use ortrain_ops::passes::differentiate::{dependent_values, no_path_error};
use ortrain_ops::{Definition, OpError, Registry};
use rustc_hash::FxHashSet;

use crate::face::gradient_nodes::{GRADIENT_SUFFIX, MessageIndex, NodeSelection, Seeds, is_plain};
use crate::model::file_kind::list_names;
use crate::model::obstacle::to_obstacle;
use crate::suggest::hint;
use crate::{Error, ErrorKind, Result};

/// Returns the names without duplicates, in order.
pub(crate) fn unique_names(names: &[String]) -> Vec<&str> {
    let mut unique = FxHashSet::default();
    names.iter().map(String::as_str).filter(|name| unique.insert(*name)).collect()
}

/// Checks that each name is the name of a value.
pub(crate) fn check_names(
    label: &str,
    message: &MessageIndex<'_>,
    names: &[&str],
    list_name: &str,
) -> Result<()> {
    let unknown: Vec<&&str> = names.iter().filter(|name| !message.has_value(name)).collect();
    if unknown.is_empty() {
        return Ok(());
    }
    let about: Vec<Option<String>> = unknown.iter().map(|name| suggest_value(message, name)).collect();
    let sentences: Vec<String> = (unknown.iter().zip(&about))
        .map(|(name, about)| format!("{name:?}{}", about.as_deref().unwrap_or_default()))
        .collect();
    let outputs = message.graph.output.iter().map(|info| info.name.as_str());
    let outputs = match about.contains(&None) {
        true => format!("; its outputs are {}", list_names(outputs)),
        false => String::new(),
    };
    let sentences = sentences.join(", ");
    Err(Error::Argument(format!("{list_name} names unknown values of {label}: {sentences}{outputs}")))
}

/// Suggests a value for an unknown name, as the end of a sentence.
pub(crate) fn suggest_value(message: &MessageIndex<'_>, name: &str) -> Option<String> {
    let node = message.graph.node.iter().find(|node| !name.is_empty() && node.name == name);
    if let Some(node) = node {
        let outputs: Vec<String> =
            node.output.iter().filter(|name| !name.is_empty()).map(|name| format!("{name:?}")).collect();
        return Some(format!("; a node has this name, and its output is {}", outputs.join(", ")));
    }
    Some(hint(name, message.value_names())).filter(|suggestion| !suggestion.is_empty())
}

/// Checks that the names of added values are unused.
pub(crate) fn check_unused_names(
    message: &MessageIndex<'_>,
    of: &[&str],
    wrt: &[&str],
    seeds: Seeds,
) -> Result<()> {
    if seeds == Seeds::Inputs
        && let Some(both) = of.iter().find(|name| wrt.contains(name))
    {
        return Err(Error::Argument(format!(
            "{both:?} is in both of and wrt, so an input and an output would be named \"{both}{GRADIENT_SUFFIX}\"; \
             leave it out of wrt, because its gradient is that input"
        )));
    }
    let seeded = if seeds == Seeds::Inputs { of } else { &[] };
    let mut names = seeded.iter().chain(wrt).map(|name| format!("{name}{GRADIENT_SUFFIX}"));
    names.find(|name| message.has_value(name)).map_or(Ok(()), |name| {
        Err(Error::Argument(format!(
            "the model has a value {name:?}, which is the name of a gradient; rename it"
        )))
    })
}

/// Checks that sources and targets are floats, and that each source depends on a target.
pub(crate) fn check_types(
    graph: &Graph,
    sources: &[ValueId],
    targets: &[ValueId],
    list_names: (&str, &str),
) -> Result<()> {
    let is_float =
        |id: ValueId| matches!(&graph.value(id).ty, ValueType::Tensor(dtype, _) if dtype.is_float());
    let mut wrong = Vec::new();
    for (ids, list_name) in [(sources, list_names.0), (targets, list_names.1)] {
        for &id in ids.iter().filter(|&&id| !is_float(id)) {
            let (name, ty) = (graph.name_of(id), &graph.value(id).ty);
            wrong.push(format!(
                "{name:?} is {ty}, and only floats have gradients; leave it out of {list_name}"
            ));
        }
    }
    if wrong.is_empty() {
        let reached = dependent_values(graph, targets);
        let names = |ids: &[ValueId]| -> Vec<String> {
            ids.iter().map(|&id| format!("{:?}", graph.name_of(id))).collect()
        };
        for &id in sources.iter().filter(|id| !reached.contains(id)) {
            // If nothing depends on a target, the error about the target suffices.
            if sources.iter().any(|id| reached.contains(id)) {
                wrong.push(format!(
                    "{:?} depends on none of {}; leave it out of {}",
                    graph.name_of(id),
                    names(targets).join(", "),
                    list_names.0
                ));
            }
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(Error::Argument(wrong.join("; "))) }
}

/// Returns the error for targets that no gradient reaches.
pub(crate) fn unreached_error(
    label: &str,
    graph: &Graph,
    sources: &[ValueId],
    targets: &[ValueId],
    list_names: (&str, &str),
) -> Error {
    let names: Vec<String> = sources.iter().map(|&id| format!("{:?}", graph.name_of(id))).collect();
    let sentence = |&target: &ValueId| {
        let reason = match no_path_error(graph, target, sources) {
            ortrain_ops::Error::NoPath { reason, .. } => reason,
            other => other.to_string(),
        };
        let name = graph.name_of(target);
        format!(
            "no gradient of {} reaches {name:?}: {reason}; leave it out of {}",
            names.join(", "),
            list_names.1
        )
    };
    let sentences: Vec<String> = targets.iter().map(sentence).collect();
    Error::Argument(format!("{label}: {}", sentences.join("; ")))
}

/// Returns an error if a node of the result cannot be expressed at the opset, or is not plain if `plain` is
/// true.
pub(crate) fn check_expressible(
    label: &str,
    graph: &Graph,
    message: &MessageIndex<'_>,
    selection: &NodeSelection,
    refused: &[RejectedNode],
    (plain, opset): (bool, i64),
) -> Result<()> {
    let added_values: FxHashSet<ValueId> =
        selection.nodes.iter().flat_map(|&index| graph.nodes[index].present_outputs()).collect();
    let wrong = refused.iter().filter(|refused| refused.outputs.iter().any(|id| added_values.contains(id)));
    let raise = format!(
        "raise the opset of the model, which is {opset}{}",
        if plain { ", or let gradients be operators of com.microsoft (plain=False)" } else { "" }
    );
    let fix = |error: &ortrain_ops::Error| match error {
        ortrain_ops::Error::Node { source: OpError::Unsupported(_), .. } => Some(raise.clone()),
        _ => None,
    };
    let wrong: Vec<(&ortrain_ops::Error, Option<String>)> =
        wrong.map(|refused| (&refused.error, fix(&refused.error))).collect();
    if !wrong.is_empty() {
        return Err(obstacles_error(label, wrong));
    }
    let added_nodes = selection.nodes.iter().map(|&index| &graph.nodes[index]);
    let foreign: Vec<String> = added_nodes
        .filter(|node| {
            let definition = Registry::standard().find(&node.domain, &node.op);
            plain && !definition.is_some_and(Definition::is_standard)
        })
        .map(|node| {
            format!("{} cannot be written in operators of ai.onnx at opset {opset}", graph.node_label(node))
        })
        .collect();
    if !foreign.is_empty() {
        return Err(Error::Argument(format!("{label}: {}; {raise}", foreign.join("; "))));
    }
    let original_nodes =
        message.graph.node.iter().enumerate().filter(|(index, _)| !selection.replaced.contains(index));
    let foreign: Vec<String> = original_nodes
        .filter(|(_, node)| plain && !is_plain(node))
        .map(|(_, node)| format!("{:?} ({}:{})", node.name, node.domain, node.op_type))
        .collect();
    if foreign.is_empty() {
        return Ok(());
    }
    Err(Error::Argument(format!(
        "{label} has nodes that operators of ai.onnx cannot express: {}; plain=False keeps them",
        foreign.join(", ")
    )))
}

/// Returns the error that lists all obstacles, each with its remedy.
pub(crate) fn obstacles_error(label: &str, wrong: Vec<(&ortrain_ops::Error, Option<String>)>) -> Error {
    let kind = wrong.first().map(|(error, _)| Error::model(label, (*error).clone()).kind());
    let obstacles = wrong.into_iter().map(|(error, fix)| {
        let mut obstacle = to_obstacle(error, label);
        obstacle.fix = fix.unwrap_or(obstacle.fix);
        obstacle
    });
    Error::Obstacles {
        model: label.to_owned(),
        kind: kind.unwrap_or(ErrorKind::InvalidModel),
        obstacles: obstacles.collect(),
    }
}
