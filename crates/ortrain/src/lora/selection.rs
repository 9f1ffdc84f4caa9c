//! Selection of the layers that get adapters.

use glob::Pattern;
use ortrain_graph::Graph;
use ortrain_ops::training::{AdapterTarget, LayerKind, find_head_target};

use super::{LoraOptions, Targets};
use crate::suggest::hint;
use crate::{Error, Result};

/// Returns the selected layers of all layers that can have adapters, in the order of the nodes.
pub(super) fn select(
    label: &str,
    graph: &Graph,
    all: &[AdapterTarget],
    options: &LoraOptions,
) -> Result<Vec<AdapterTarget>> {
    let mut selected: Vec<AdapterTarget> = match &options.targets {
        Targets::Auto => {
            let output = graph.outputs.first().copied();
            let head = output.and_then(|output| find_head_target(graph, output, all));
            let is_head = |target: &AdapterTarget| head.is_some_and(|head| all[head].weight == target.weight);
            let is_layer = |target: &&AdapterTarget| target.kind == LayerKind::Linear && !is_head(target);
            all.iter().filter(is_layer).cloned().collect()
        }
        Targets::Patterns(patterns) => {
            for pattern in patterns {
                if !all.iter().any(|target| matches(pattern, target)) {
                    return Err(unknown(label, "targets", pattern, all));
                }
            }
            let is_named = |target: &&AdapterTarget| patterns.iter().any(|pattern| matches(pattern, target));
            all.iter().filter(is_named).cloned().collect()
        }
    };
    for pattern in &options.exclude {
        if !all.iter().any(|target| matches(pattern, target)) {
            return Err(unknown(label, "exclude", pattern, all));
        }
    }
    selected.retain(|target| !options.exclude.iter().any(|pattern| matches(pattern, target)));
    if selected.is_empty() {
        let names: Vec<String> = all.iter().take(5).map(|target| format!("{:?}", target.weight)).collect();
        let advice = if names.is_empty() {
            "it has no layers with constant weights".to_owned()
        } else {
            format!("name some of its weights as targets, such as {}", names.join(", "))
        };
        return Err(Error::Argument(format!("no layer of {label} gets an adapter; {advice}")));
    }
    Ok(selected)
}

fn unknown(label: &str, option: &str, pattern: &str, all: &[AdapterTarget]) -> Error {
    let suggestion = hint(pattern, all.iter().flat_map(|target| [target.weight.as_str(), &target.node_name]));
    Error::Argument(format!(
        "{option} names {pattern:?}, but {label} has no layer with such a weight or node{suggestion}"
    ))
}

/// Returns the name of the module of a layer, in PyTorch's notation. Exporters name weights after modules, or nodes.
pub(super) fn module_of(target: &AdapterTarget) -> String {
    if let Some(module) = &target.module {
        return module.clone();
    }
    let weight = &target.weight;
    let stem = without_suffixes(weight);
    let is_generated = stem.contains("::") || !stem.contains(|sign: char| sign.is_ascii_alphabetic());
    // The two weights of a recurrent layer must have different names.
    let is_recurrent = target.kind == LayerKind::Recurrent;
    if !is_generated {
        return if is_recurrent { weight.clone() } else { stem.to_owned() };
    }
    let path = target.node_name.trim_start_matches('/');
    let module = path.rsplit_once('/').map_or(path, |(module, _)| module).replace('/', ".");
    if is_recurrent { format!("{module}.weight_{}", target.weight_input) } else { module }
}

/// Returns the name of a module from the name of its weight. Quantizers append `_Q4`, `_Bnb4` or `_quantized`, and builders
/// of models append the operator.
fn without_suffixes(weight: &str) -> &str {
    let stem = ["_quantized", "_Bnb4"].iter().find_map(|suffix| weight.strip_suffix(suffix));
    let stem = stem.unwrap_or(weight);
    let stem = match stem.rsplit_once("_Q") {
        Some((stem, bits)) if bits.starts_with(|sign: char| sign.is_ascii_digit()) => stem,
        _ => stem,
    };
    let stem = stem.strip_suffix(".weight").or_else(|| stem.strip_suffix(".qweight")).unwrap_or(stem);
    match stem.rsplit_once('.') {
        Some((module, operator)) if operator.starts_with(|sign: char| sign.is_ascii_uppercase()) => module,
        _ => stem,
    }
}

/// Returns true if a pattern names the weight, the node or the module of a layer, in full or by its last parts.
fn matches(pattern: &str, target: &AdapterTarget) -> bool {
    let module = module_of(target);
    let compiled = Pattern::new(pattern).ok();
    [target.weight.as_str(), &target.node_name, &module].iter().any(|name| {
        let is_end =
            name.strip_suffix(pattern).is_some_and(|rest| rest.is_empty() || rest.ends_with(['.', '/']));
        is_end || compiled.as_ref().is_some_and(|compiled| compiled.matches(name))
    })
}

/// Returns the constants that patterns name.
pub(super) fn train_also(label: &str, graph: &Graph, patterns: &[String]) -> Result<Vec<String>> {
    let is_float = |id| {
        let constant = graph.value(id).content();
        constant.is_some_and(|constant| constant.dtype().is_float())
    };
    let constants: Vec<&str> =
        graph.value_ids().filter(|&id| is_float(id)).map(|id| graph.name_of(id)).collect();
    let mut names = Vec::new();
    for pattern in patterns {
        let compiled = Pattern::new(pattern).ok();
        let fits = |name: &&&str| {
            **name == pattern || compiled.as_ref().is_some_and(|compiled| compiled.matches(name))
        };
        let found: Vec<String> = constants.iter().filter(fits).map(|&name| name.to_owned()).collect();
        if found.is_empty() {
            let suggestion = hint(pattern, constants.iter().copied());
            return Err(Error::Argument(format!(
                "train_also names {pattern:?}, but {label} has no such constant of floats{suggestion}"
            )));
        }
        names.extend(found);
    }
    Ok(names)
}
