//! Inspection of a model before training: trained and frozen constants with the reasons, obstacles, cost of a
//! step.

use ortrain_graph::{DType, Graph, Node, ValueId, ValueType, listed};
use ortrain_onnx::LoadedModel;
use ortrain_ops::passes::{
    differentiate::{backpropagate_known, gradient_cuts, targets_of_node},
    functions::{has_wrapped_nodes, unwrap_nodes},
    infer::infer_known,
    versions::upgrade_known,
};
use ortrain_ops::training::{
    ConstantUses, Judgement, about_guesses, find_stop, is_narrow, loss_problems, narrow_weights_note,
    probabilities_note, stop_candidates,
};
use ortrain_ops::{Placement, build};

use crate::artifacts::infer_graph;
use crate::computed_parameters::{constants_of_subgraphs, lift_from_subgraphs};
use crate::file_kind::{described_inputs, inspect_artifact, inspect_other};
use crate::optim::OptimizerSpec;
use crate::optimizer::optimizer_of_model;
use crate::step_cost::{Plan, build_artifacts, input_shapes, plan_step};
use crate::suggest::hint_in;
use crate::{Error, FileKind, InspectOptions, ModelSource, Result, StepCost};
use crate::{classifier_scores, postprocessing};

/// Role of a model's constant in training.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{ParameterRole, Scope, inspect};
///
/// # let convnet = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/convnet.onnx");
/// let found = inspect(convnet.into(), &Scope::Outputs)?;
/// let statistics: Vec<&str> = found.names(ParameterRole::Statistic).take(2).collect();
/// assert_eq!(statistics, ["block1.mean", "block1.var"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_ops::training::{Confidence, ParameterRole};

/// A constant of a model.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{Confidence, ParameterInfo, ParameterRole, Scope, inspect};
///
/// let found = inspect(setup::MODEL.into(), &Scope::Outputs)?;
/// let ParameterInfo { name, dims, role, confidence, reason, nodes, layer, .. } = &found.parameters[0];
/// assert_eq!((name.as_str(), dims.as_slice()), ("fc1.weight", &[96, 64][..]));
/// assert_eq!((*role, *confidence), (ParameterRole::Trained, Confidence::Certain));
/// assert_eq!(reason, r#"it is a weight of node "fc1" (Gemm)"#);
/// assert_eq!((nodes.as_slice(), *layer), (&["fc1".to_owned()][..], Some(2)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParameterInfo {
    /// Name of the constant.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub dims: Vec<usize>,
    /// Role by default.
    pub role: ParameterRole,
    /// Strength of the evidence for the role.
    pub confidence: Confidence,
    /// Reason for the role, as a part of a sentence.
    pub reason: String,
    /// Names of the nodes that use the constant; for a node without a name, the name of its first output.
    pub nodes: Vec<String>,
    /// Layer of a trained constant, counted from the end: 1 is the last layer.
    ///
    /// A layer is a node with weights (a convolution, a product, a normalization, an embedding, a recurrent
    /// layer), together with constants that are added to or multiplied with its results. Layers are in node
    /// order. A constant of several layers belongs to the last of them.
    pub layer: Option<usize>,
}

/// A reason why a model cannot be trained.
///
/// ```
/// use ortrain::{ModelProto, ModelSource, Obstacle, Scope, inspect};
///
/// # fn unknown() -> ModelProto {
/// #     use ortrain::GraphProto;
/// #     use ortrain_onnx::{NodeProto, OperatorSetIdProto, ValueInfoProto};
/// #     let output = vec![ValueInfoProto { name: "y".into(), ..ValueInfoProto::default() }];
/// #     let node = NodeProto { op_type: "Unheard".into(), output: vec!["y".into()], ..NodeProto::default() };
/// #     let opset_import = vec![OperatorSetIdProto { domain: String::new(), version: 17 }];
/// #     let graph = Some(GraphProto { node: vec![node], output, ..GraphProto::default() });
/// #     ModelProto { graph, opset_import, ..ModelProto::default() }
/// # }
/// // A model with an operator that nobody knows.
/// let found = inspect(ModelSource::from_proto(&unknown())?, &Scope::Outputs)?;
/// let Obstacle { operator, what, fix, .. } = &found.obstacles[0];
/// assert_eq!(operator.as_deref(), Some("Unheard"));
/// assert!(what.contains("not supported") && fix.contains("operators"));
/// # Ok::<(), ortrain::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Obstacle {
    /// Node, as messages name it, if the obstacle is a node.
    pub node: Option<String>,
    /// Operator of the node.
    pub operator: Option<String>,
    /// Description of the obstacle.
    pub what: String,
    /// Remedy.
    pub fix: String,
}

/// A node that passes no gradient to its inputs.
///
/// ```
/// use ortrain::{GradientStop, Scope, inspect};
///
/// # let convnet = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/convnet.onnx");
/// let found = inspect(convnet.into(), &Scope::Outputs)?;
/// let nodes: Vec<&str> = found.stops.iter().map(|stop: &GradientStop| stop.node.as_str()).collect();
/// assert!(nodes.is_empty(), "a gradient reaches everything");
/// # Ok::<(), ortrain::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GradientStop {
    /// Node, as messages name it.
    pub node: String,
    /// Operator of the node.
    pub operator: String,
    /// Reason.
    pub reason: String,
    /// Constants that are therefore not trained: no gradient reaches them on another path.
    pub parameters: Vec<String>,
    /// Remedy, if the stop is not intended.
    pub fix: String,
}

/// A value at which PyTorch may have stopped the gradient: `detach` and `no_grad` leave no trace in a file.
///
/// ```
/// use ortrain::{Scope, StopCandidate, inspect};
///
/// # let convnet = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/convnet.onnx");
/// let found = inspect(convnet.into(), &Scope::Outputs)?;
/// let values: Vec<&StopCandidate> = found.stop_candidates.iter().collect();
/// assert!(values.is_empty(), "no result decides about others");
/// # Ok::<(), ortrain::Error>(())
/// ```
#[doc(inline)]
pub use ortrain_ops::training::StopCandidate;

/// A node that is not part of a single program.
///
/// ```
/// use ortrain::{NodeNote, Scope, inspect};
///
/// # let convnet = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/convnet.onnx");
/// let found = inspect(convnet.into(), &Scope::Outputs)?;
/// let notes: Vec<&NodeNote> = found.host_steps.iter().chain(&found.control_flow).collect();
/// assert!(notes.is_empty(), "a step is one program");
/// # Ok::<(), ortrain::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NodeNote {
    /// Node, as messages name it.
    pub node: String,
    /// Operator of the node.
    pub operator: String,
    /// Execution of the node.
    pub what: String,
}

/// Findings about a model before training.
///
/// The text of an inspection is a short report; with `{:#}` it has every tensor and every node:
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{Scope, inspect};
///
/// let found = inspect(setup::MODEL.into(), &Scope::Outputs)?;
/// assert_eq!(found.obstacle, None);
/// assert!(found.to_string().contains("trained: 4 tensors, 7,210 elements, 28.8 kB\n"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Inspection {
    /// Kind of the file. Files other than forward models only have `parameters` and `inputs`.
    pub kind: FileKind,
    /// Inputs of a run, each with its type.
    pub inputs: Vec<(String, String)>,
    /// Initializers of the model in its order, then initializers of subgraphs, then the values of Constant
    /// nodes.
    pub parameters: Vec<ParameterInfo>,
    /// Reason why the model cannot be trained as it is: the error of artifact generation.
    pub obstacle: Option<String>,
    /// All obstacles, with their remedies.
    pub obstacles: Vec<Obstacle>,
    /// Nodes between constants and the loss that pass no gradient. This may be intended.
    pub stops: Vec<GradientStop>,
    /// Values at which PyTorch may have stopped the gradient, with the reasons.
    pub stop_candidates: Vec<StopCandidate>,
    /// Possible mistakes, each with the value to name instead: an output that is no logit, or a loss in the
    /// model on unsuitable values.
    pub warnings: Vec<String>,
    /// A sentence about trained constants that may be no parameters.
    pub about_guesses: Option<String>,
    /// Nodes that run on the host.
    pub host_steps: Vec<NodeNote>,
    /// Nodes that choose or repeat subgraphs.
    pub control_flow: Vec<NodeNote>,
    /// Inputs with unknown shapes that a plan of a step requires, each with its type.
    pub open_inputs: Vec<(String, String)>,
    /// Inputs with values that decide shapes: a step cannot be planned before a run.
    pub value_inputs: Vec<String>,
    /// Cost of a training step, if all shapes are known.
    pub step: Option<StepCost>,
    /// The optimizer with its settings and groups, for an optimizer model or a checkpoint with optimizer
    /// settings.
    pub optimizer: Option<OptimizerSpec>,
}

impl Inspection {
    /// Returns the names of the constants with a role, in the model's order.
    pub fn names(&self, role: ParameterRole) -> impl Iterator<Item = &str> {
        self.parameters.iter().filter(move |info| info.role == role).map(|info| info.name.as_str())
    }
}

/// Values that the loss depends on.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{ParameterRole, Scope, inspect};
///
/// // A loss of the hidden layer does not reach the second one.
/// let found = inspect(setup::MODEL.into(), &Scope::Values(vec!["hidden".into()]))?;
/// let trained: Vec<&str> = found.names(ParameterRole::Trained).collect();
/// assert_eq!(trained, ["fc1.weight", "fc1.bias"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// All outputs of the model.
    #[default]
    Outputs,
    /// The first output.
    FirstOutput,
    /// These values.
    Values(Vec<String>),
}

/// Inspects a model and determines which constants would be trained.
///
/// Trained are floats that reach the loss through differentiable operators, unless the exporter computed them
/// from data or by a formula. Not trained are
///
/// - running statistics, and the mean, variance or deviation of a normalization that is written as
///   arithmetic;
/// - constants of element-wise preprocessing of an input before the first layer: a mean, a scale;
/// - tables of sines of positions, the frequencies that positions are multiplied by, and constants that are
///   only combined with integers;
/// - ones and zeros that an exporter wrote for a normalization without scale and bias, and initial states of
///   recurrent layers with equal values;
/// - one-element tensors that a program filled, then updated in part, concatenated or selected from;
/// - tables of counts, grid points, strides, box sizes, coordinates that a small network turns into a bias;
/// - attention masks that are added to scores before the softmax, one filter for all channels, the vectors of
///   a power iteration;
/// - scalars in arithmetic (an epsilon, an exponent). A one-element constant is trained in three cases: it is
///   a weight input of a node, it is the bias of one output, or its name indicates a parameter. Such a name
///   has a word (`bias`, `logit_scale`) or a path of attributes (`blocks.0.gate`), as exporters name
///   parameters.
///
/// The report gives a reason and the strength of the evidence for each constant; `requires_grad` of artifacts
/// overrides the choice.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{ParameterRole, Scope, inspect};
///
/// let found = inspect(setup::MODEL.into(), &Scope::Outputs)?;
/// let trained: Vec<&str> = found.names(ParameterRole::Trained).collect();
/// assert_eq!(trained, ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the file cannot be read, or a value of the scope does not exist. Errors of operators are part of the
/// report.
pub fn inspect(model: ModelSource, scope: &Scope) -> Result<Inspection> {
    inspect_with(model, scope, &InspectOptions::default())
}

/// Inspects a model like [`inspect`], and plans a training step of a [`Module`](crate::Module) for inputs of
/// these shapes.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{InspectOptions, Scope, inspect_with};
///
/// let open = inspect_with(setup::MODEL.into(), &Scope::Outputs, &InspectOptions::default())?;
/// assert_eq!(open.open_inputs, [("x".to_owned(), "float32[batch, 64]".to_owned())]);
/// let options = InspectOptions::default().shape("x", &[8, 64]);
/// let found = inspect_with(setup::MODEL.into(), &Scope::Outputs, &options)?;
/// println!("{} bytes", found.step.unwrap().total());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`inspect`]; also if the shapes do not fit the model.
pub fn inspect_with(model: ModelSource, scope: &Scope, options: &InspectOptions) -> Result<Inspection> {
    let label = model.label("the model");
    if let Some(found) = inspect_other(&model)? {
        check_default_options(&label, found.kind, scope, options)?;
        return Ok(found);
    }
    let model = model.load_for_gradients()?;
    if let Ok(graph) = Graph::from_model(&model) {
        let kind = FileKind::of_graph(&graph);
        if kind != FileKind::ForwardModel && *scope == Scope::Outputs && *options == InspectOptions::default()
        {
            let optimizer =
                (kind == FileKind::OptimizerModel).then(|| optimizer_of_model(&label, &model)).transpose()?;
            return Ok(Inspection { optimizer, ..inspect_artifact(kind, &graph) });
        }
        if matches!(kind, FileKind::TrainingModel | FileKind::OptimizerModel) {
            check_default_options(&label, kind, scope, options)?;
        }
    }
    let InspectionState { mut inspection, graph, values, .. } = inspect_graph(&label, &model, scope)?;
    inspection.inputs = described_inputs(&graph);
    let shapes = input_shapes(&label, &graph, options)?;
    for (name, dims) in &shapes {
        if dims.is_none() {
            let ty = graph.find(name).map_or_else(String::new, |id| graph.value(id).ty.to_string());
            inspection.open_inputs.push((name.clone(), ty));
        }
    }
    let shapes: Option<Vec<(String, Vec<usize>)>> =
        shapes.into_iter().map(|(name, dims)| Some((name, dims?))).collect();
    if inspection.obstacles.is_empty() && !values.is_empty() {
        // Artifacts support symbolic sizes, too: an error of their generation is an obstacle for every size.
        let artifacts = build_artifacts(&label, model, &inspection, &values);
        let planned =
            artifacts.and_then(|generated| shapes.map(|shapes| plan_step(generated, shapes)).transpose());
        match planned {
            Ok(None) => {}
            Ok(Some(Plan::Values(inputs))) => inspection.value_inputs = inputs,
            Ok(Some(Plan::Step(step, scheduled))) => {
                for note in &mut inspection.control_flow {
                    if !scheduled.contains(&note.node) {
                        note.what =
                            "it is inlined: its branch is known, or its iterations are unrolled".into();
                    }
                }
                inspection.step = Some(step);
            }
            Err(error) => {
                let text = error.to_string();
                inspection.obstacles.push(match &error {
                    Error::Model { source, .. } | Error::Shapes(source) => to_obstacle(source, &label),
                    _ => Obstacle { node: None, operator: None, what: text.clone(), fix: DEFAULT_FIX.into() },
                });
                inspection.obstacle = Some(text);
            }
        }
    }
    Ok(inspection)
}

/// Returns an error if the scope or options require a forward model.
fn check_default_options(label: &str, kind: FileKind, scope: &Scope, options: &InspectOptions) -> Result<()> {
    if *scope == Scope::Outputs && *options == InspectOptions::default() {
        return Ok(());
    }
    Err(Error::WrongModel {
        model: label.to_owned(),
        reason: format!(
            "it is {}, but loss_input_names, batch_size and shapes are for forward models; give the forward model \
             from which it was made",
            kind.name_with_article()
        ),
    })
}

/// Inspects a loaded model like [`inspect`], without a plan of a step. Errors of operators are errors.
///
/// # Errors
/// As [`inspect`]; also for errors of operators.
pub(crate) fn inspect_loaded(label: &str, model: &LoadedModel, scope: &Scope) -> Result<Inspection> {
    let looked = inspect_graph(label, model, scope)?;
    looked.failure.map_or(Ok(looked.inspection), Err)
}

/// Inspects a model like [`inspect`], but errors of operators are errors.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{Scope, inspect_strictly};
///
/// assert!(inspect_strictly(setup::MODEL.into(), &Scope::Outputs)?.obstacles.is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`inspect`]; also for errors of operators.
#[doc(hidden)]
pub fn inspect_strictly(model: ModelSource, scope: &Scope) -> Result<Inspection> {
    let label = model.label("the model");
    inspect_loaded(&label, &model.load_for_gradients()?, scope)
}

/// General remedy.
const DEFAULT_FIX: &str = "change the model so that the error does not occur";

/// Result of an inspection without a plan.
struct InspectionState {
    inspection: Inspection,
    /// Reason why the graph cannot be used at all.
    failure: Option<Error>,
    graph: Graph,
    /// Float values that the loss depends on.
    values: Vec<(String, ValueType)>,
}

/// Inspects a model without a plan of a step.
fn inspect_graph(label: &str, model: &LoadedModel, scope: &Scope) -> Result<InspectionState> {
    // Nodes after the requested values are irrelevant.
    let tensors = classifier_scores::with_tensor_outputs(model);
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

    let uses = ConstantUses::new(&original);
    let mut inspection = Inspection::default();
    let mut candidates: Vec<(usize, ValueId)> = Vec::new();
    for name in constant_names(&raw) {
        let Some(id) = original.find(&name) else { continue };
        // Only tensors of known size can be trained (not strings or sparse tensors).
        let ValueType::Tensor(dtype, Some(shape)) = &original.value(id).ty else { continue };
        let Some(dims) = shape.concrete() else { continue };
        let dtype = *dtype;
        let Judgement { mut role, confidence, mut reason, nodes } = uses.classify(id, dtype, &dims);
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

/// Returns all obstacles as one sentence.
pub(crate) fn join_obstacles(obstacles: &[Obstacle]) -> String {
    let parts: Vec<String> =
        obstacles.iter().map(|obstacle| format!("{}; {}", obstacle.what, obstacle.fix)).collect();
    match parts.as_slice() {
        [one] => one.clone(),
        all => format!("{} obstacles: {}", all.len(), all.join(". ")),
    }
}

/// Converts an error into an obstacle of a report.
pub(crate) fn to_obstacle(error: &ortrain_ops::Error, label: &str) -> Obstacle {
    use ortrain_ops::{Error as Wrong, OpError};

    let (mut node, mut operator) = (None, None);
    let fix = match error {
        Wrong::UnknownOperators { list } => {
            operator = list.first().and_then(|text| text.split(' ').next()).map(str::to_owned);
            "export the model without it (`python -m ortrain operators` lists all operators), or define it as a \
             function of the model or of an operator library (docs/extending.md)"
                .to_owned()
        }
        Wrong::Opset { oldest, newest, .. } => format!(
            "convert the model to an opset from {oldest} to {newest}, as onnx.version_converter does, or export it anew"
        ),
        Wrong::TooOld { oldest, .. } => {
            format!("raise the opset of the model: onnx.version_converter.convert_version(model, {oldest})")
        }
        Wrong::Node { node: of, source, .. } => {
            node = Some(of.clone());
            operator = of.rsplit(" (").next().and_then(|text| text.strip_suffix(')')).map(str::to_owned);
            match source {
                OpError::Unsupported(_) => {
                    "export the model without this feature, or use another operator".to_owned()
                }
                OpError::Program(_) => "make the shapes smaller".to_owned(),
                _ => format!(
                    "correct the node; onnx.checker.check_model(model, full_check=True) gives details about {label}"
                ),
            }
        }
        Wrong::Function { .. } | Wrong::Call { .. } => {
            "correct the function or the call, or inline it: onnx.inliner.inline_local_functions(model)"
                .to_owned()
        }
        _ => DEFAULT_FIX.to_owned(),
    };
    Obstacle { node, operator, what: error.to_string(), fix }
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
