//! Inspection of a loaded model: roles of constants, obstacles, gradients.

use ortrain_graph::{DType, Graph, Node, ValueId, ValueType, listed};
use ortrain_onnx::LoadedModel;
use ortrain_ops::passes::differentiate::{backpropagate_known, gradient_cuts, targets_of_node};
use ortrain_ops::passes::functions::{has_wrapped_nodes, unwrap_nodes};
use ortrain_ops::passes::infer::infer_known;
use ortrain_ops::passes::versions::upgrade_known;
use ortrain_ops::training::{
    ConstantUses, Judgement, about_guesses, find_stop, is_narrow, loss_problems, narrow_weights_note,
    probabilities_note, stop_candidates,
};
use ortrain_ops::{Placement, build};

use crate::model::adapted_parameters::AdaptedParameters;
use crate::model::classifiers::with_tensor_outputs;
use crate::model::computed_parameters::{constants_of_subgraphs, lift_from_subgraphs};
use crate::model::graph::infer_graph;
use crate::model::inspection::{
    Confidence, GradientStop, Inspection, NodeNote, ParameterInfo, ParameterRole, Scope,
};
use crate::model::obstacle::to_obstacle;
use crate::model::postprocessing;
use crate::suggest::hint_in;
use crate::{Error, Result};

/// Inspects a loaded model like [`inspect`], without a plan of a step. Errors of operators are errors.
///
/// # Errors
/// As [`inspect`]; also for errors of operators.
pub(crate) fn inspect_loaded(label: &str, model: &LoadedModel, scope: &Scope) -> Result<Inspection> {
    let looked = inspect_graph(label, model, scope)?;
    looked.failure.map_or(Ok(looked.inspection), Err)
}

/// Result of an inspection without a plan.
pub(crate) struct InspectionState {
    pub(crate) inspection: Inspection,
    /// Reason why the graph cannot be used at all.
    pub(crate) failure: Option<Error>,
    pub(crate) graph: Graph,
    /// Float values that the loss depends on.
    pub(crate) values: Vec<(String, ValueType)>,
}

/// Inspects a model without a plan of a step.
pub(crate) fn inspect_graph(label: &str, model: &LoadedModel, scope: &Scope) -> Result<InspectionState> {
    // Nodes after the requested values are irrelevant.
    let tensors = with_tensor_outputs(model);
    let model = tensors.as_ref().unwrap_or(model);
    let outputs = postprocessing::output_names(model);
    let requested = match scope {
        Scope::Outputs => outputs,
        Scope::FirstOutput => outputs.into_iter().take(1).collect(),
        Scope::Values(names) => names.iter().map(String::as_str).collect(),
    };
    let shorter = postprocessing::without_unsupported(model, &requested);
    let model = shorter.as_ref().unwrap_or(model);
    // Constants of subgraphs are parameters, too.
    let inner = constants_of_subgraphs(&model.proto);
    let lifted = if inner.is_empty() {
        None
    } else {
        let mut proto = model.proto.clone();
        let names: Vec<&str> = inner.iter().map(String::as_str).collect();
        lift_from_subgraphs(label, &mut proto, &names)?;
        Some(model.with_proto(proto))
    };
    let model = lifted.as_ref().unwrap_or(model);
    // The nodes of a body determine the roles of its constants; the gradients may be custom.
    let own_gradients = model.proto.graph.as_ref().is_some_and(has_wrapped_nodes);
    let written_out = own_gradients.then(|| {
        let mut model = model.clone();
        model.proto.graph.as_mut().map(unwrap_nodes);
        model
    });
    let plain = written_out.as_ref().unwrap_or(model);
    let raw = Graph::from_model(plain)
        .map_err(|source| postprocessing::add_advice(Error::graph(label, source), plain))?;
    let mut graph = raw.clone();
    let mut wrong = upgrade_known(&mut graph);
    wrong.extend(infer_known(&mut graph));
    let failure = match wrong.first() {
        None => None,
        Some(first) => {
            let strict = infer_graph(label, plain).err();
            Some(postprocessing::add_advice(
                strict.unwrap_or_else(|| Error::model(label, first.clone())),
                plain,
            ))
        }
    };
    let original = graph.clone();
    if own_gradients && failure.is_none() {
        graph = infer_graph(label, model)?;
    }
    let seeds = add_seeds(&mut graph, scope)?;
    let values: Vec<(String, ValueType)> =
        seeds.iter().map(|&(id, _)| (graph.name_of(id).to_owned(), graph.value(id).ty.clone())).collect();

    let (uses, adapters) = (ConstantUses::new(&original), AdaptedParameters::of(&model.proto));
    let mut inspection = Inspection::default();
    let mut candidates: Vec<(usize, ValueId)> = Vec::new();
    for name in constant_names(&raw) {
        let Some(id) = original.find(&name) else { continue };
        // Only tensors of known size can be trained (not strings or sparse tensors).
        let ValueType::Tensor(dtype, Some(shape)) = &original.value(id).ty else { continue };
        let Some(dims) = shape.concrete() else { continue };
        let dtype = *dtype;
        let Judgement { mut role, confidence, mut reason, nodes } =
            adapters.judge(&name, uses.classify(id, dtype, &dims));
        match graph.find(&name) {
            _ if role != ParameterRole::Trained => {}
            Some(id) => candidates.push((inspection.parameters.len(), id)),
            // Constants inside a node with a custom gradient are not values of the graph.
            None => {
                role = ParameterRole::Constant;
                reason = "it is part of an operator with a custom gradient".into();
            }
        }
        inspection.parameters.push(ParameterInfo {
            name,
            dtype,
            dims,
            role,
            confidence,
            reason,
            nodes,
            layer: None,
        });
    }
    collect_notes(&original, &mut inspection);
    inspection.warnings = loss_problems(&original, &[]);
    // If the first output is a class choice, the loss uses the logits by default.
    let outputs = values.iter().filter(|_| tensors.is_none()).filter_map(|(name, _)| original.find(name));
    inspection.warnings.extend(outputs.filter_map(|output| probabilities_note(&original, output)));
    inspection.obstacles = wrong.iter().map(|error| to_obstacle(error, label)).collect();
    inspection.obstacle = failure.as_ref().map(ToString::to_string);
    let weights: Vec<ValueId> = candidates.iter().map(|&(_, id)| id).collect();
    inspection.stop_candidates = stop_candidates(&graph, &weights);
    if failure.is_none() {
        trace_gradients(label, graph, &seeds, &candidates, &mut inspection);
    }
    let mut trained: Vec<(&mut ParameterInfo, ValueId)> = (inspection.parameters.iter_mut())
        .filter(|info| info.role == ParameterRole::Trained)
        .filter_map(|info| original.find(&info.name).map(|id| (info, id)))
        .collect();
    let narrow: Vec<(&str, DType)> = (trained.iter().map(|(info, _)| (info.name.as_str(), info.dtype)))
        .filter(|(_, dtype)| is_narrow(*dtype))
        .collect();
    inspection.warnings.extend(narrow_weights_note(&narrow, trained.len()));
    let guesses: Vec<(&str, &str)> = (trained.iter())
        .filter(|(info, _)| info.confidence == Confidence::Guess)
        .map(|(info, _)| (info.name.as_str(), info.reason.as_str()))
        .collect();
    inspection.about_guesses = about_guesses(&guesses);
    let ids: Vec<ValueId> = trained.iter().map(|&(_, id)| id).collect();
    for ((info, _), layer) in trained.iter_mut().zip(uses.layers(&ids)) {
        info.layer = layer;
    }
    Ok(InspectionState { inspection, failure, graph: original, values })
}

/// Determines the constants that a gradient reaches, and the nodes that stop it.
fn trace_gradients(
    label: &str,
    mut graph: Graph,
    seeds: &[(ValueId, ValueId)],
    candidates: &[(usize, ValueId)],
    inspection: &mut Inspection,
) {
    let targets: Vec<ValueId> = candidates.iter().map(|&(_, id)| id).collect();
    let to: Vec<ValueId> = seeds.iter().map(|&(id, _)| id).collect();
    let names = |graph: &Graph, ids: &[ValueId]| -> Vec<String> {
        ids.iter().map(|&id| graph.name_of(id).to_owned()).collect()
    };
    let mut blocked = Vec::new();
    for index in gradient_cuts(&graph, &to, &targets) {
        let node = &graph.nodes[index];
        let before = names(&graph, &targets_of_node(&graph, index, &targets));
        if let Some((values, operator)) = find_stop(&graph, node) {
            let values: Vec<String> = values.iter().map(|value| format!("{value:?}")).collect();
            let reason = format!("stop_gradients ends the gradient at {}", listed(&values));
            blocked.push((graph.node_label(node), operator, reason, before));
            continue;
        }
        let types: Vec<DType> = node.present_outputs().filter_map(|id| graph.value(id).ty.dtype()).collect();
        let reason = match types.iter().find(|dtype| !dtype.is_float()) {
            Some(dtype) if !types.iter().any(|dtype| dtype.is_float()) => {
                format!("its result is {dtype}, and only floats have gradients")
            }
            _ => "its derivative is zero almost everywhere".to_owned(),
        };
        blocked.push((graph.node_label(node), node.op_label(), reason, before));
    }
    let (gradients, stops) = match backpropagate_known(&mut graph, seeds, &targets) {
        Ok(result) => result,
        Err(error) => {
            inspection.obstacles.push(to_obstacle(&error, label));
            inspection.obstacle = Some(Error::model(label, error).to_string());
            return;
        }
    };
    // Constants behind an error would be trained otherwise: they keep their role.
    let mut error_targets: Vec<ValueId> = Vec::new();
    for stop in stops {
        let before = names(&graph, &stop.targets);
        match stop.error {
            Some(error) => {
                error_targets.extend(&stop.targets);
                let mut obstacle = to_obstacle(&error, label);
                let quoted: Vec<String> = before.iter().map(|name| format!("{name:?}")).collect();
                obstacle.fix = format!(
                    "leave the parameters that need its gradient out of requires_grad ({})",
                    listed(&quoted)
                );
                if stop.has_unknown_sizes {
                    obstacle.fix += ", or give the inputs of the model fixed sizes, which it may need";
                }
                obstacle.fix += ", or give it a custom gradient (docs/extending.md)";
                inspection.obstacles.push(obstacle);
                if inspection.obstacle.is_none() {
                    inspection.obstacle = Some(Error::model(label, error).to_string());
                }
            }
            None if blocked.iter().any(|(node, ..)| *node == stop.node) => {}
            None => {
                let reason = "it passes no gradient to its inputs".to_owned();
                blocked.push((stop.node, stop.operator, reason, before));
            }
        }
    }
    for (&(at, id), found) in candidates.iter().zip(gradients) {
        if !found && !error_targets.contains(&id) {
            inspection.parameters[at].role = ParameterRole::Constant;
            inspection.parameters[at].confidence = Confidence::Certain;
            inspection.parameters[at].reason = "no gradient of the loss reaches it".into();
        }
    }
    for (node, operator, reason, mut parameters) in blocked {
        parameters.retain(|name| {
            let mut infos = inspection.parameters.iter();
            infos.any(|info| info.name == *name && info.role == ParameterRole::Constant)
        });
        let fix =
            "nothing, if this is intended; otherwise give it a custom gradient (docs/extending.md), or compute the \
             loss from values before it (loss_input_names)"
                .to_owned();
        inspection.stops.push(GradientStop { node, operator, reason, parameters, fix });
    }
}

/// Adds notes about nodes that do not run as part of a program.
fn collect_notes(graph: &Graph, inspection: &mut Inspection) {
    for node in &graph.nodes {
        for (_, subgraph) in Graph::subgraphs(node) {
            collect_notes(subgraph, inspection);
        }
        let computed =
            !node.inputs.is_empty() && node.present_inputs().all(|id| graph.value(id).constant.is_some());
        let Some(op) = build(graph, node).ok().filter(|_| !computed) else { continue };
        let note = |text: &str| NodeNote {
            node: graph.node_label(node),
            operator: node.op_label(),
            what: text.to_owned(),
        };
        match op.placement() {
            Placement::Program | Placement::Composition | Placement::Yield => {}
            Placement::Host(_) => inspection.host_steps.push(note(
                "it runs on the host; programs after it are built when the shapes of its results are known",
            )),
            Placement::If { .. } => inspection.control_flow.push(note("one of its branches is run")),
            Placement::Repeat(_) => {
                inspection.control_flow.push(note("its body runs repeatedly and is not unrolled"));
            }
        }
    }
}

/// Returns the values where gradients start, each with a new value for its gradient.
fn add_seeds(graph: &mut Graph, scope: &Scope) -> Result<Vec<(ValueId, ValueId)>> {
    let values: Vec<ValueId> = match scope {
        Scope::Outputs => graph.outputs.clone(),
        Scope::FirstOutput => graph.outputs.iter().copied().take(1).collect(),
        Scope::Values(names) => {
            let find = |name: &String| {
                let missing =
                    || Error::Argument(format!("the model has no value {name:?}{}", hint_in(graph, name)));
                graph.find(name).ok_or_else(missing)
            };
            names.iter().map(find).collect::<Result<_>>()?
        }
    };
    let mut seeds = Vec::new();
    for id in values {
        let ty = graph.value(id).ty.clone();
        if matches!(&ty, ValueType::Tensor(dtype, _) if dtype.is_float()) {
            let seed = graph.add_value(&format!("{}_grad", graph.name_of(id)), ty);
            seeds.push((id, seed));
        }
    }
    Ok(seeds)
}

/// Returns the names of a graph's initializers, then of the outputs of its Constant nodes.
fn constant_names(graph: &Graph) -> Vec<String> {
    let producers = graph.producers();
    let initializers = graph
        .value_ids()
        .filter(|id| graph.value(*id).constant.is_some() && producers[id.0 as usize].is_none());
    let constant_nodes = graph.nodes.iter().filter(|node| node.inputs.is_empty());
    let constant_values = constant_nodes.flat_map(Node::present_outputs);
    initializers
        .chain(constant_values)
        .map(|id| graph.name_of(id).to_owned())
        .filter(|name| !name.is_empty())
        .collect()
}
