//! The difference between training and inference.
//!
//! Two operators behave differently. Dropout drops elements only in training. BatchNormalization uses the statistics of
//! the batch in training and updates the running statistics, which inference uses.

use ortrain_graph::{Attr, DType, Graph, Node, Tensor, ValueId, ValueType};
use ortrain_onnx::{GraphProto, NodeProto};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::Registry;
use crate::class::Class;
use crate::families::batch_norm::{convert_to_inference, convert_to_internal};
use crate::families::dropout::fnv1a64;
use crate::passes::differentiate::backpropagate_known;
use crate::passes::infer::{infer, infer_known};
use crate::passes::versions::upgrade;
use crate::registry::class_of;
use crate::registry::normalize_domain;
use crate::support::state_update::add_state_update;
use crate::{Error, OpError};

/// Statistics that the BatchNormalization nodes of a training model use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BatchNormMode {
    /// Batch statistics if scale or bias is trained; these nodes update the running statistics. Other nodes use the
    /// running statistics without updates. Statistics that the model computes (for example, of standardized weights)
    /// are used directly.
    #[default]
    Auto,
    /// Batch statistics everywhere, with updates of the running statistics.
    Train,
    /// Running statistics everywhere, without updates.
    Freeze,
}

pub(super) fn is_dropout(domain: &str, op: &str) -> bool {
    let definition = Registry::standard().find(normalize_domain(domain), op);
    definition.is_some_and(|definition| definition.class == Class::Dropout)
}

pub(super) fn is_batch_norm(domain: &str, op: &str) -> bool {
    let definition = Registry::standard().find(normalize_domain(domain), op);
    definition.is_some_and(|definition| !definition.statistics.is_empty())
}

/// Converts a model's message to inference mode, for every export mode: Dropout is the identity, and statistics are the
/// running statistics. Outputs for new running statistics return the old ones.
pub fn set_inference_mode(graph: &mut GraphProto) {
    let mut used: FxHashSet<String> = graph.output.iter().map(|info| info.name.clone()).collect();
    collect_used_names(graph, &mut used);
    let mut nodes = Vec::with_capacity(graph.node.len());
    for mut node in std::mem::take(&mut graph.node) {
        for attribute in &mut node.attribute {
            attribute.g.iter_mut().for_each(|graph| set_inference_mode(graph));
            attribute.graphs.iter_mut().for_each(set_inference_mode);
        }
        if is_dropout(&node.domain, &node.op_type)
            && let Some(training_mode) = node.input.get_mut(2)
        {
            training_mode.clear();
        }
        let mut input_statistics = Vec::new();
        if is_batch_norm(&node.domain, &node.op_type) {
            if let Some(mode) = node.attribute.iter_mut().find(|attr| attr.name == "training_mode") {
                mode.i = 0;
            }
            // Outputs 1 and 2; before opset 14 also 3 and 4, which indicate training.
            let statistics = node.output.drain(1.min(node.output.len())..).enumerate();
            input_statistics = statistics
                .filter(|(_, name)| used.contains(name))
                .map(|(k, name)| (node.input.get(3 + k % 2).cloned().unwrap_or_default(), name))
                .collect();
        }
        nodes.push(node);
        nodes.extend(input_statistics.into_iter().map(|(input, output)| NodeProto {
            op_type: "Identity".into(),
            input: vec![input],
            output: vec![output],
            ..NodeProto::default()
        }));
    }
    graph.node = nodes;
}

/// Adds the names that nodes use, including subgraphs.
fn collect_used_names(graph: &GraphProto, names: &mut FxHashSet<String>) {
    for node in &graph.node {
        names.extend(node.input.iter().filter(|name| !name.is_empty()).cloned());
        for attribute in &node.attribute {
            for subgraph in attribute.g.as_deref().into_iter().chain(&attribute.graphs) {
                names.extend(subgraph.output.iter().map(|info| info.name.clone()));
                collect_used_names(subgraph, names);
            }
        }
    }
}

/// Minimum opset with a training flag of Dropout.
const DROPOUT_FLAG_SINCE: i64 = 12;

/// Converts a graph (of the newest versions, to be written at `opset`) to training mode.
///
/// Every Dropout drops elements, even if the model was exported for inference. A Dropout with a computed flag keeps the
/// flag. Before opset 12 Dropout has no training flag, and stays the identity.
///
/// Every BatchNormalization uses the statistics that `mode` selects; `trained` contains the names of the trained
/// values. With batch statistics it updates the running statistics, `statistics` ([`running_statistics`]), which are
/// inputs of the graph.
///
/// # Errors
/// Returns an error if a running statistic is not an input, or if it cannot be updated through its intermediate nodes.
pub fn set_training_mode(
    graph: &mut Graph,
    opset: i64,
    mode: BatchNormMode,
    trained: &FxHashSet<&str>,
    statistics: &FxHashSet<&str>,
) -> Result<(), Error> {
    let inputs = |names: &FxHashSet<&str>| -> FxHashSet<ValueId> {
        graph.inputs.iter().copied().filter(|&id| names.contains(graph.name_of(id))).collect()
    };
    let (trained, statistics) = (inputs(trained), inputs(statistics));
    let untouched = parameters_without_gradient(graph, mode, &trained);
    let settings = ModeSettings { dropout: opset >= DROPOUT_FLAG_SINCE, mode, untouched };
    settings.apply(graph, trained, &statistics, false)
}

/// Converts the BatchNormalizations of a graph to training mode, as [`set_training_mode`] with batch statistics. Dropout is
/// unchanged.
///
/// # Errors
/// Returns the errors of [`set_training_mode`].
pub fn use_batch_statistics(graph: &mut Graph, statistics: &FxHashSet<&str>) -> Result<(), Error> {
    let statistics =
        graph.inputs.iter().copied().filter(|&id| statistics.contains(graph.name_of(id))).collect();
    let settings =
        ModeSettings { dropout: false, mode: BatchNormMode::Train, untouched: FxHashSet::default() };
    settings.apply(graph, FxHashSet::default(), &statistics, false)
}

struct ModeSettings {
    dropout: bool,
    mode: BatchNormMode,
    untouched: FxHashSet<ValueId>,
}

impl ModeSettings {
    fn apply(
        &self,
        graph: &mut Graph,
        mut trained: FxHashSet<ValueId>,
        statistics: &FxHashSet<ValueId>,
        inner: bool,
    ) -> Result<(), Error> {
        let mut index = 0;
        while index < graph.nodes.len() {
            let node = &graph.nodes[index];
            let reached = node.present_inputs().any(|id| trained.contains(&id));
            // Names of outer values must not be used in a subgraph.
            let prefix = match node.present_outputs().next() {
                Some(output) if inner => format!("{}_", graph.name_of(output)),
                _ => String::new(),
            };
            if self.dropout && is_dropout(&node.domain, &node.op) {
                enable_dropout(graph, index, &prefix);
                if inner {
                    set_seed(graph, index);
                }
            } else if is_batch_norm(&node.domain, &node.op) {
                let is_stored = |k: usize| {
                    let input = node.inputs.get(k).copied().flatten();
                    input.is_some_and(|id| statistics.contains(&reshaped_source(graph, id).unwrap_or(id)))
                };
                let is_trained =
                    |id: ValueId| trained.contains(&id) && (inner || !self.untouched.contains(&id));
                // In an explicit mode everything is updated; other cases were reported before.
                let stored = self.mode != BatchNormMode::Auto || is_stored(3) && is_stored(4);
                if stored && uses_batch_statistics(self.mode, node, is_trained) {
                    convert_to_internal(graph, index, &prefix);
                    update_through_views(graph, index, inner)?;
                } else {
                    index += convert_to_inference(graph, index);
                }
            } else {
                let inputs = node.inputs.clone();
                let mut attrs = std::mem::take(&mut graph.nodes[index].attrs);
                for attr in attrs.0.values_mut() {
                    if let Attr::Graph(subgraph) = attr {
                        let inside = captured_inputs(&inputs, subgraph, &trained);
                        let stored = captured_inputs(&inputs, subgraph, statistics);
                        self.apply(subgraph, inside, &stored, true)?;
                    }
                }
                graph.nodes[index].attrs = attrs;
            }
            if reached {
                trained.extend(graph.nodes[index].present_outputs());
            }
            index += 1;
        }
        Ok(())
    }
}

/// Returns true if a BatchNormalization uses batch statistics.
fn uses_batch_statistics(mode: BatchNormMode, node: &Node, is_trained: impl Fn(ValueId) -> bool) -> bool {
    let is_trained = |k: usize| node.inputs.get(k).copied().flatten().is_some_and(&is_trained);
    match mode {
        BatchNormMode::Auto => is_trained(1) || is_trained(2),
        BatchNormMode::Train => true,
        BatchNormMode::Freeze => false,
    }
}

/// Returns the input of a Reshape, through which an old node with `spatial=0` reads its statistics.
fn reshaped_source(graph: &Graph, id: ValueId) -> Option<ValueId> {
    let maker = graph.nodes.iter().find(|node| node.present_outputs().any(|output| output == id))?;
    maker.inputs.first().copied().flatten().filter(|_| class_of(maker) == Class::Reshape)
}

/// Returns the scales and biases of BatchNormalizations that are computed from trained values through paths without a
/// gradient, such as ones of the type and shape of the input. They are not trained.
fn parameters_without_gradient(
    graph: &Graph,
    mode: BatchNormMode,
    trained: &FxHashSet<ValueId>,
) -> FxHashSet<ValueId> {
    let mut untouched = FxHashSet::default();
    if mode != BatchNormMode::Auto {
        return untouched;
    }
    let mut dependent = trained.clone();
    let mut candidates: Vec<ValueId> = Vec::new();
    for node in &graph.nodes {
        if is_batch_norm(&node.domain, &node.op) {
            let parameters = node.inputs.iter().take(3).skip(1).copied().flatten();
            candidates.extend(parameters.filter(|id| dependent.contains(id) && !trained.contains(id)));
        }
        if node.present_inputs().any(|id| dependent.contains(&id)) {
            dependent.extend(node.present_outputs());
        }
    }
    if candidates.is_empty() {
        return untouched;
    }
    let mut typed = graph.clone();
    // Invalid graphs are reported elsewhere.
    if upgrade(&mut typed).is_err() {
        return untouched;
    }
    infer_known(&mut typed);
    let in_typed = |id: ValueId| typed.find(graph.name_of(id));
    let targets: FxHashSet<ValueId> = trained.iter().filter_map(|&id| in_typed(id)).collect();
    let mut paths = GradientPaths::new(&typed, targets);
    untouched
        .extend(candidates.into_iter().filter(|&id| in_typed(id).is_some_and(|id| !paths.reach_target(id))));
    untouched
}

/// Search for gradient paths to some values.
struct GradientPaths<'a> {
    graph: &'a Graph,
    targets: FxHashSet<ValueId>,
    makers: Vec<Option<usize>>,
    /// Values without a gradient path.
    dead: FxHashSet<ValueId>,
}

impl GradientPaths<'_> {
    fn new(graph: &Graph, targets: FxHashSet<ValueId>) -> GradientPaths<'_> {
        GradientPaths { graph, targets, makers: graph.producers(), dead: FxHashSet::default() }
    }

    /// Returns true if the gradient of a value reaches a target.
    fn reach_target(&mut self, value: ValueId) -> bool {
        let mut visited: FxHashSet<ValueId> = FxHashSet::default();
        let mut open = vec![value];
        while let Some(id) = open.pop() {
            if self.targets.contains(&id) {
                return true;
            }
            if self.dead.contains(&id) || !visited.insert(id) {
                continue;
            }
            if let Some(maker) = self.makers[id.0 as usize] {
                open.extend(inputs_with_gradients(self.graph, maker));
            }
        }
        self.dead.extend(visited);
        false
    }
}

/// Returns the inputs of a node that get a gradient, through differentiation of this node. If this fails, returns every
/// float input.
fn inputs_with_gradients(graph: &Graph, index: usize) -> Vec<ValueId> {
    let node = &graph.nodes[index];
    // A value of unknown type may be float.
    let may_be_float = |id: ValueId| graph.value(id).ty.dtype().is_none_or(DType::is_float);
    if !node.present_outputs().any(may_be_float) {
        return Vec::new();
    }
    let mut inputs: Vec<ValueId> = node.present_inputs().filter(|&id| may_be_float(id)).collect();
    inputs.sort_unstable();
    inputs.dedup();
    if node.captures > 0 {
        return inputs;
    }
    let mut single = Graph::new("node");
    single.opsets.clone_from(&graph.opsets);
    let mut copies: FxHashMap<ValueId, ValueId> = FxHashMap::default();
    for id in node.present_inputs().chain(node.present_outputs()) {
        copies.entry(id).or_insert_with(|| {
            let value = graph.value(id);
            let copy = single.add_value(&value.name, value.ty.clone());
            single.value_mut(copy).constant = value.content().cloned();
            copy
        });
    }
    let ports = |ports: &[Option<ValueId>]| ports.iter().map(|port| port.map(|id| copies[&id])).collect();
    let copy = Node { inputs: ports(&node.inputs), outputs: ports(&node.outputs), ..node.clone() };
    single.inputs = node.present_inputs().map(|id| copies[&id]).collect();
    single.nodes.push(copy);
    let outputs: Vec<ValueId> = node.present_outputs().map(|id| copies[&id]).collect();
    if infer(&mut single).is_err() {
        return inputs;
    }
    let floats = outputs.into_iter().filter(|&id| single.value(id).ty.dtype().is_some_and(DType::is_float));
    let seeds: Vec<ValueId> = floats.collect();
    let seeds: Vec<(ValueId, ValueId)> =
        seeds.into_iter().map(|id| (id, single.add_value("arriving", single.value(id).ty.clone()))).collect();
    let targets: Vec<ValueId> = inputs.iter().map(|id| copies[id]).collect();
    match backpropagate_known(&mut single, &seeds, &targets) {
        Ok((known, stops)) if stops.iter().all(|stop| stop.error.is_none()) => {
            inputs.into_iter().zip(known).filter(|(_, known)| *known).map(|(id, _)| id).collect()
        }
        _ => inputs,
    }
}

/// Returns the inputs of a subgraph that represent outer values: the last inputs of its node.
fn captured_inputs(
    inputs: &[Option<ValueId>],
    subgraph: &Graph,
    candidates: &FxHashSet<ValueId>,
) -> FxHashSet<ValueId> {
    let pairs = subgraph.inputs.iter().rev().zip(inputs.iter().rev());
    pairs.filter(|(_, outer)| outer.is_some_and(|id| candidates.contains(&id))).map(|(&id, _)| id).collect()
}

fn enable_dropout(graph: &mut Graph, index: usize, prefix: &str) {
    let flag = graph.nodes[index].inputs.get(2).copied().flatten();
    if flag.is_some_and(|flag| graph.value(flag).constant.is_none()) {
        return;
    }
    let on = graph.add_constant(&format!("{prefix}training_mode"), Tensor::filled(DType::Bool, &[], 1.0));
    let inputs = &mut graph.nodes[index].inputs;
    inputs.resize(3, None);
    inputs[2] = Some(on);
}

/// Sets the seed of a Dropout in a branch, if it has none. The branch is recomputed for its gradient, and a runtime
/// that draws random numbers on the fly (such as onnxruntime) reproduces them only with equal seeds.
fn set_seed(graph: &mut Graph, index: usize) {
    let node = &graph.nodes[index];
    let output = node.present_outputs().next().filter(|_| !node.attrs.0.contains_key("seed"));
    if let Some(output) = output {
        // 31 bits, which no runtime truncates.
        let seed = fnv1a64(graph.name_of(output).bytes()) >> 33;
        graph.nodes[index].attrs.0.insert("seed".to_owned(), Attr::Int(seed.cast_signed()));
    }
}

/// Adds nodes that update running statistics with another shape (of an old node with `spatial=0`), because the node
/// cannot update them itself.
fn update_through_views(graph: &mut Graph, index: usize, inner: bool) -> Result<(), Error> {
    for (output, input) in [(1, 3), (2, 4)] {
        let node = &graph.nodes[index];
        let port = |ports: &[Option<ValueId>], k: usize| ports.get(k).copied().flatten();
        let (new, old) = (port(&node.outputs, output), port(&node.inputs, input));
        let (Some(new), Some(old)) = (new, old) else { continue };
        if graph.inputs.contains(&old) {
            continue;
        }
        let Some(state) = reshaped_source(graph, old).filter(|id| !inner && graph.inputs.contains(id)) else {
            let message =
                "its running statistics cannot be updated in place; train with batch_norm=\"freeze\"";
            return Err(Error::at(graph, &graph.nodes[index], OpError::unsupported(message)));
        };
        let mut add = |op: &str, inputs: &[ValueId], name: &str| {
            let name = format!("{}_{name}", graph.name_of(state));
            let updated = graph.add_value(&name, ValueType::Unknown);
            let ports: Vec<Option<ValueId>> = inputs.iter().copied().map(Some).collect();
            graph.nodes.push(Node::new("", op, &ports, &[Some(updated)], ortrain_graph::Attrs::new()));
            updated
        };
        let shape = add("Shape", &[state], "shape");
        let value = add("Reshape", &[new, shape], "new");
        add_state_update(graph, state, value);
    }
    Ok(())
}

/// Running statistic that training updates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningStatistic {
    /// Name of the value: an initializer, or computed only from constants.
    pub name: String,
    /// True if the statistic belongs to a subgraph.
    pub inner: bool,
}

/// Origin of a value.
#[derive(Clone, Debug)]
enum Origin {
    /// Constant.
    Constant(RunningStatistic),
    /// Input of every step, or computed from one.
    Varying,
}

/// Use of a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConstantUse {
    Mean,
    Variance,
    Other,
}

/// Result of the search in a graph and its subgraphs.
#[derive(Default)]
struct FoundStatistics {
    updated: Vec<(RunningStatistic, String)>,
    uses: FxHashMap<String, Vec<(ConstantUse, String)>>,
}

/// Returns the running statistics of a model (as it was read, of any version) that training updates, in the order of
/// its nodes. `trained` contains the names of the trained values.
///
/// # Errors
/// Returns an error if a running statistic would be trained, if an updated statistic is not constant in the model, or
/// if it has other uses.
pub fn running_statistics(
    graph: &Graph,
    mode: BatchNormMode,
    trained: &FxHashSet<&str>,
) -> Result<Vec<RunningStatistic>, Error> {
    let mut statistics = FoundStatistics::default();
    let dependent =
        graph.value_ids().filter(|&id| trained.contains(graph.name_of(id))).collect::<FxHashSet<_>>();
    let search =
        StatisticsSearch { mode, trained, untouched: parameters_without_gradient(graph, mode, &dependent) };
    search.search_graph(graph, &FxHashMap::default(), dependent, false, &mut statistics)?;
    let mut names: FxHashSet<&str> = FxHashSet::default();
    let mut result = Vec::new();
    for (statistic, node) in &statistics.updated {
        if !names.insert(&statistic.name) {
            continue;
        }
        let uses = statistics.uses.get(&statistic.name).map_or(&[][..], Vec::as_slice);
        let node_use = uses.iter().find(|(_, label)| label == node).map(|(kind, _)| *kind);
        if let Some((_, other)) = uses.iter().find(|(kind, _)| node_use != Some(*kind)) {
            return Err(Error::Graph(format!(
                "training would update {:?}, the running statistics of {node}, but {other} uses the same value \
                 otherwise. Give each node its own initializer (some exporters share equal ones), or train with \
                 batch_norm=\"freeze\"",
                statistic.name
            )));
        }
        result.push(statistic.clone());
    }
    Ok(result)
}

struct StatisticsSearch<'a> {
    mode: BatchNormMode,
    trained: &'a FxHashSet<&'a str>,
    untouched: FxHashSet<ValueId>,
}

impl StatisticsSearch<'_> {
    fn search_graph(
        &self,
        graph: &Graph,
        captured: &FxHashMap<ValueId, Origin>,
        mut dependent: FxHashSet<ValueId>,
        inner: bool,
        statistics: &mut FoundStatistics,
    ) -> Result<(), Error> {
        // Constants, and values that nodes compute only from constants.
        let mut origins = captured.clone();
        for id in graph.value_ids().filter(|&id| graph.value(id).constant.is_some()) {
            origins.insert(id, constant_origin(graph, id, inner));
        }
        for node in &graph.nodes {
            // Values that depend on trained values vary.
            let is_constant =
                |id| matches!(origins.get(&id), Some(Origin::Constant(_))) && !dependent.contains(&id);
            let all_constant = node.captures == 0 && node.present_inputs().all(is_constant);
            for id in node.present_outputs() {
                let origin = if all_constant { constant_origin(graph, id, inner) } else { Origin::Varying };
                origins.insert(id, origin);
            }
        }
        let makers = graph.producers();
        // Values that depend on inputs of the graph; in a subgraph every value may.
        let mut fed: FxHashSet<ValueId> = graph.inputs.iter().copied().collect();
        for node in &graph.nodes {
            if node.present_inputs().any(|id| fed.contains(&id)) {
                fed.extend(node.present_outputs());
            }
        }
        // True for a normalization with computed statistics, or of a weight: it has no running statistics.
        let is_computed = |node: &Node| {
            let port = |k: usize| node.inputs.get(k).copied().flatten();
            let varies = |id: ValueId| {
                makers[id.0 as usize].is_some() && !matches!(origins.get(&id), Some(Origin::Constant(_)))
            };
            port(0).is_some_and(|id| !inner && !fed.contains(&id))
                || [3, 4].into_iter().filter_map(port).any(varies)
        };
        for node in &graph.nodes {
            let label = graph.node_label(node);
            let norm = is_batch_norm(&node.domain, &node.op);
            let is_trained =
                |id: ValueId| dependent.contains(&id) && (inner || !self.untouched.contains(&id));
            let batch = norm
                && uses_batch_statistics(self.mode, node, is_trained)
                && !(self.mode == BatchNormMode::Auto && is_computed(node));
            let input_count = node.inputs.len() - node.captures;
            for (k, port) in node.inputs[..input_count].iter().enumerate() {
                let Some(id) = *port else { continue };
                let kind = match k {
                    3 if norm => ConstantUse::Mean,
                    4 if norm => ConstantUse::Variance,
                    _ => ConstantUse::Other,
                };
                let Some(Origin::Constant(value)) = origins.get(&id) else {
                    if batch && kind != ConstantUse::Other {
                        let help = if makers[id.0 as usize].is_some() {
                            "train with batch_norm=\"auto\" or \"freeze\", which do not update computed statistics"
                        } else {
                            "make it an initializer, or train with batch_norm=\"freeze\""
                        };
                        let message = format!(
                            "training would update its running statistics, but {:?} is not constant in the model; {help}",
                            graph.name_of(id)
                        );
                        return Err(Error::at(graph, node, OpError::unsupported(message)));
                    }
                    continue;
                };
                if kind != ConstantUse::Other && self.trained.contains(value.name.as_str()) {
                    return Err(Error::Graph(format!(
                        "{:?} cannot be trained by gradients: it contains the running statistics of {label}, which \
                         training updates itself; remove it from the trained parameters",
                        value.name
                    )));
                }
                if batch && kind != ConstantUse::Other {
                    statistics.updated.push((value.clone(), label.clone()));
                }
                // A value that is computed from constants counts at the uses of the results.
                let is_constant = |id| matches!(origins.get(&id), Some(Origin::Constant(_)));
                if norm || !node.present_outputs().any(is_constant) {
                    self.record_use(graph, &origins, &makers, id, (kind, &label), statistics);
                }
            }
            if node.present_inputs().any(|id| dependent.contains(&id)) {
                dependent.extend(node.present_outputs());
            }
            for (_, subgraph) in Graph::subgraphs(node) {
                let inside = captured_inputs(&node.inputs, subgraph, &dependent);
                let pairs = subgraph.inputs.iter().rev().zip(node.inputs[input_count..].iter().rev());
                let outer = pairs
                    .filter_map(|(&id, outer)| Some((id, origins.get(&(*outer)?).cloned()?)))
                    .collect::<FxHashMap<_, _>>();
                self.search_graph(subgraph, &outer, inside, true, statistics)?;
            }
        }
        Ok(())
    }

    /// Records a use of a constant, and of the constants from which it is computed. A statistic gets a separate value,
    /// so it has no other uses.
    fn record_use(
        &self,
        graph: &Graph,
        origins: &FxHashMap<ValueId, Origin>,
        makers: &[Option<usize>],
        id: ValueId,
        (kind, label): (ConstantUse, &str),
        statistics: &mut FoundStatistics,
    ) {
        if let Some(Origin::Constant(value)) = origins.get(&id) {
            let uses = statistics.uses.entry(value.name.clone()).or_default();
            // Uses by one node are adjacent.
            if uses.iter().rev().take_while(|(_, node)| node == label).any(|(known, _)| *known == kind) {
                return;
            }
            uses.push((kind, label.to_owned()));
        }
        if let (ConstantUse::Other, Some(index)) = (kind, makers[id.0 as usize]) {
            for input in graph.nodes[index].present_inputs() {
                self.record_use(graph, origins, makers, input, (kind, label), statistics);
            }
        }
    }
}

fn constant_origin(graph: &Graph, id: ValueId, inner: bool) -> Origin {
    Origin::Constant(RunningStatistic { name: graph.name_of(id).to_owned(), inner })
}

#[cfg(test)]
mod tests {
    use ortrain_graph::Attrs;
    use ortrain_onnx::{AttributeProto, ValueInfoProto};

    use super::*;

    fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
        let strings = |list: &[&str]| list.iter().map(|&name| name.to_owned()).collect();
        NodeProto {
            op_type: op.into(),
            input: strings(inputs),
            output: strings(outputs),
            ..NodeProto::default()
        }
    }

    #[test]
    fn inference_disables_dropout_and_uses_running_statistics() {
        let mut normalization =
            node("BatchNormalization", &["a", "scale", "bias", "mean", "var"], &["y", "new_mean", "new_var"]);
        normalization.attribute.push(AttributeProto {
            name: "training_mode".into(),
            i: 1,
            ..AttributeProto::default()
        });
        let dropout = node("Dropout", &["x", "ratio", "training"], &["a", "mask"]);
        let mut graph = GraphProto { node: vec![dropout, normalization], ..GraphProto::default() };
        set_inference_mode(&mut graph);
        assert_eq!(graph.node[0].input, ["x", "ratio", ""]);
        assert_eq!(graph.node[1].attribute[0].i, 0);
        assert_eq!(graph.node[1].output, ["y"]);
    }

    #[test]
    fn outputs_mark_training_before_opset_14() {
        // Output 1 is an output of the graph, output 4 is used in a branch.
        let inputs = ["a", "scale", "bias", "mean", "var"];
        let norm =
            node("BatchNormalization", &inputs, &["y", "new_mean", "new_var", "saved_mean", "saved_var"]);
        let mut branch = node("If", &["condition"], &["z"]);
        branch.attribute.push(AttributeProto {
            name: "then_branch".into(),
            g: Some(Box::new(GraphProto {
                node: vec![node("Neg", &["saved_var"], &["inner"])],
                ..GraphProto::default()
            })),
            ..AttributeProto::default()
        });
        let output = ValueInfoProto { name: "new_mean".into(), ..ValueInfoProto::default() };
        let mut graph =
            GraphProto { node: vec![norm, branch], output: vec![output], ..GraphProto::default() };
        set_inference_mode(&mut graph);
        let expected = [
            node("BatchNormalization", &inputs, &["y"]),
            node("Identity", &["mean"], &["new_mean"]),
            node("Identity", &["var"], &["saved_var"]),
        ];
        assert_eq!(graph.node[..3], expected);
        assert_eq!(graph.node.len(), 4);
    }

    #[test]
    fn training_mode_includes_branches() {
        let mut branch = Graph::new("branch");
        let x = branch.add_value("x", ValueType::tensor(DType::F32, &[4]));
        let y = branch.add_value("y", ValueType::Unknown);
        branch.inputs = vec![x];
        branch.outputs = vec![y];
        branch.nodes.push(Node::new("", "Dropout", &[Some(x)], &[Some(y)], Attrs::new()));
        let mut graph = Graph::new("");
        let [condition, x] = ["condition", "x"].map(|name| graph.add_value(name, ValueType::Unknown));
        let z = graph.add_value("z", ValueType::Unknown);
        let attrs = Attrs::new().with("then_branch", branch.clone()).with("else_branch", branch);
        let mut node = Node::new("", "If", &[Some(condition), Some(x)], &[Some(z)], attrs);
        node.captures = 1;
        graph.nodes.push(node);
        let none = FxHashSet::default();
        set_training_mode(&mut graph, 17, BatchNormMode::Auto, &none, &none).expect("it trains");
        for (_, branch) in Graph::subgraphs(&graph.nodes[0]) {
            let flag = branch.nodes[0].inputs[2].expect("it is on");
            assert_eq!(branch.name_of(flag), "y_training_mode");
            assert!(branch.nodes[0].attrs.int("seed").is_ok_and(|seed| seed.is_some()));
        }
    }

    #[test]
    fn training_enables_dropout() {
        let mut graph = Graph::new("");
        let x = graph.add_value("x", ValueType::tensor(DType::F32, &[4]));
        let y = graph.add_value("y", ValueType::Unknown);
        graph.nodes.push(Node::new("", "Dropout", &[Some(x)], &[Some(y)], Attrs::new()));
        let none = FxHashSet::default();
        set_training_mode(&mut graph, 11, BatchNormMode::Auto, &none, &none).expect("it trains");
        assert_eq!(graph.nodes[0].inputs.len(), 1, "before opset 12 a Dropout cannot be on");
        set_training_mode(&mut graph, 12, BatchNormMode::Auto, &none, &none).expect("it trains");
        let flag = graph.nodes[0].inputs[2].expect("it is on");
        assert_eq!(graph.value(flag).constant, Some(Tensor::filled(DType::Bool, &[], 1.0)));
        assert_eq!(graph.nodes[0].inputs[1], None, "the ratio is what the model says");
    }
}
