//! Models with gradients: adds nodes to a model that compute the gradients of some values with respect to
//! others.
//!
//! The ONNX message of the model is edited: its nodes, inputs, outputs and initializers remain. A node is
//! replaced by an equivalent one if a gradient needs an output that the node does not have (the mask of a
//! Dropout). With [`GradientOptions::plain`], nodes of other domains than `ai.onnx` are replaced as well.

use std::collections::BTreeSet;
use std::path::Path;

use bytes::Bytes;
use ortrain_files::Staged;
use ortrain_graph::{DType, Graph, ValueId, ValueType, tensor_to_proto};
use ortrain_onnx::proto::TensorProto;
use ortrain_onnx::{
    GraphProto, LoadedModel, ModelProto, NodeProto, OperatorSetIdProto, ValueInfoProto, encode, tensor_dims,
};
use ortrain_ops::passes::{
    decompose::standardise_known,
    differentiate::{backpropagate, backpropagate_known, constant_node, dependent_values, ones_like},
    functions::{is_custom_gradient, unwrap_gradients, unwrap_nodes},
    infer::{infer, infer_known},
    versions::{downgrade_known, upgrade, upgrade_known},
};
use rustc_hash::FxHashSet;

use crate::artifacts::{SEPARATE_INITIALIZERS, declare_value};
use crate::face::gradient_checks::{
    check_expressible, check_names, check_types, check_unused_names, obstacles_error, unique_names,
    unreached_error,
};
use crate::face::gradient_nodes::{
    GRADIENT_SUFFIX, MessageIndex, NodeOrder, NodeSelection, NodeSource, Seeds, imports_standard, is_standard,
};
use crate::model::computed_parameters::{constants_of_subgraphs, lift_from_subgraphs};
use crate::model::file_kind::list_names;
use crate::model::graph::{message_graph, opset_of};
use crate::model::node_inputs::{collect_inputs, needed_nodes_and_values};
use crate::model::postprocessing;
use crate::model::source::embed_external_data;
use crate::{Error, ModelChanges, ModelSource, Result};

/// Name of the model in messages of a builder.
const MODEL_LABEL: &str = "the model";

/// Version of `ai.onnx` for the gradients of a model that does not import `ai.onnx`.
const DEFAULT_OPSET: i64 = 17;

/// Values to differentiate, and the operators of the result.
///
/// ```
/// use ortrain::gradient::GradientOptions;
///
/// let options = GradientOptions { of: vec!["loss".into()], wrt: vec!["w".into()], ..Default::default() };
/// assert!(options.plain, "nothing but operators of ai.onnx");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GradientOptions {
    /// Values to differentiate: floats that depend on at least one value of `wrt`.
    pub of: Vec<String>,
    /// Values to differentiate with respect to: initializers, inputs, results of nodes. Each is a float, and
    /// at least one value of `of` depends on it.
    pub wrt: Vec<String>,
    /// True to use only operators of `ai.onnx`, so that every ONNX runtime runs the model. Otherwise,
    /// gradients use ONNX Runtime's own operators (`com.microsoft`) if available, as in a training model.
    pub plain: bool,
}

impl Default for GradientOptions {
    fn default() -> GradientOptions {
        GradientOptions { of: Vec::new(), wrt: Vec::new(), plain: true }
    }
}

/// Returns `model` with additional outputs `<x>_grad`: the gradients of the sum of all elements of `of` with
/// respect to `wrt`. They follow the other outputs, sorted by name.
///
/// Each gradient has the element type and the shape of its value. For a loss of one element, the sum is the
/// loss. Nodes, names, initializers and metadata of the model remain, and the gradients use the model's opset
/// (7 or newer). Functions of the model are inlined, and external data is embedded.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::gradient::{GradientOptions, grad};
///
/// let options = GradientOptions {
///     of: vec!["logits".into()],
///     wrt: vec!["x".into(), "fc2.weight".into()],
///     ..GradientOptions::default()
/// };
/// let graph = grad(setup::MODEL.into(), &options)?.graph.unwrap();
/// let outputs: Vec<&str> = graph.output.iter().map(|output| output.name.as_str()).collect();
/// assert_eq!(outputs, ["logits", "fc2.weight_grad", "x_grad"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the model cannot be read, a name is unknown, or a value is no float. If a value of `wrt` has no
/// gradient, or a value of `of` does not depend on `wrt`.
///
/// If an operator between them has no gradient, or its gradient cannot be expressed at the model's opset: the
/// error lists all obstacles with their nodes.
#[allow(clippy::needless_pass_by_value, reason = "a source is made for one call")]
pub fn grad(model: ModelSource, options: &GradientOptions) -> Result<ModelProto> {
    differentiate_source(model, options, Seeds::Ones)
}

/// Returns `model` with vector-Jacobian products: each value `y` of `of` adds an input `<y>_grad` of its type
/// and shape, after the other inputs. The outputs are the same as for [`grad`].
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::gradient::{GradientOptions, vjp};
/// use ortrain::{InferenceSession, ModelSource, SessionOptions};
///
/// let options = GradientOptions {
///     of: vec!["logits".into()],
///     wrt: vec!["x".into()],
///     ..GradientOptions::default()
/// };
/// let model = ModelSource::from_proto(&vjp(setup::MODEL.into(), &options)?)?;
/// let session = InferenceSession::new(model, SessionOptions::default())?;
/// let inputs: Vec<&str> = session.inputs().iter().map(|input| input.name.as_str()).collect();
/// assert_eq!(inputs, ["x", "logits_grad"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`grad`]; also if a value is in both `of` and `wrt`: its input and its output would have the same name.
#[allow(clippy::needless_pass_by_value, reason = "a source is made for one call")]
pub fn vjp(model: ModelSource, options: &GradientOptions) -> Result<ModelProto> {
    differentiate_source(model, options, Seeds::Inputs)
}

/// Builder that adds the gradients of a loss to a model, as onnxruntime-training's `GradientGraphBuilder`
/// does.
///
/// The initial gradient is `<loss>_grad`: ones of the shape of the loss. The outputs `<x>_grad` for each `x`
/// follow the outputs of the model, sorted by name.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::gradient::GradientGraph;
///
/// # let eval_model = ortrain::encode_model(&setup::artifacts()?.eval_model)?;
/// # let loss = setup::artifacts()?.eval_model.graph.unwrap().output[0].name.clone();
/// let (y, x) = (vec![loss.clone()], vec!["fc2.weight".into()]);
/// let mut builder = GradientGraph::new(eval_model.into(), y, x, &loss, true)?;
/// builder.build()?;
/// let model = ortrain::decode_model(builder.model().clone())?;
/// assert_eq!(model.graph.unwrap().output[1].name, "fc2.weight_grad");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct GradientGraph {
    source: Bytes,
    y: Vec<String>,
    x: Vec<String>,
    loss: String,
    plain: bool,
    stops: Vec<String>,
    built: Option<Bytes>,
}

/// Names of the two lists in messages of a [`GradientGraph`].
const BUILDER_LIST_NAMES: (&str, &str) = ("y_node_arg_names", "x_node_arg_names");

impl GradientGraph {
    /// Creates a builder for a model. `y` are results to differentiate, `x` are the values to differentiate
    /// with respect to.
    ///
    /// `loss` is the element of `y` at which gradients start. It must depend on the other elements of `y`.
    /// Without `x`, the model remains unchanged.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use ortrain::gradient::GradientGraph;
    ///
    /// let model = std::fs::read(setup::MODEL)?;
    /// let wrong = GradientGraph::new(model.into(), vec!["logit".into()], vec!["x".into()], "logits", true);
    /// assert!(wrong.unwrap_err().to_string().ends_with("did you mean \"logits\"?"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the bytes are no model, or a name is unknown.
    pub fn new(
        model: Bytes,
        mut y: Vec<String>,
        mut x: Vec<String>,
        loss: &str,
        plain: bool,
    ) -> Result<GradientGraph> {
        // Callers may pass sets, and the model must not depend on their order.
        y.sort_unstable();
        x.sort_unstable();
        let mut loaded = ModelSource::Bytes(model.clone()).load_for_gradients()?;
        let inner = constants_of_subgraphs(&loaded.proto);
        let message = MessageIndex::new(message_graph(MODEL_LABEL, &mut loaded.proto)?);
        check_names(MODEL_LABEL, &message, &unique_names(&y), BUILDER_LIST_NAMES.0)?;
        let outer: Vec<&str> =
            unique_names(&x).into_iter().filter(|name| !inner.iter().any(|inner| inner == name)).collect();
        check_names(MODEL_LABEL, &message, &outer, BUILDER_LIST_NAMES.1)?;
        check_names(MODEL_LABEL, &message, &[loss], "loss_node_arg_name")?;
        Ok(GradientGraph {
            source: model,
            y,
            x,
            loss: loss.to_owned(),
            plain,
            stops: Vec::new(),
            built: None,
        })
    }

    /// Adds values that pass no gradient: names and patterns of [`ModelChanges::stop_gradients`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use ortrain::gradient::GradientGraph;
    ///
    /// let model = ortrain::Bytes::from(std::fs::read(setup::MODEL)?);
    /// let (y, x) = (vec!["logits".into()], vec!["x".into()]);
    /// let builder = GradientGraph::new(model, y, x, "logits", true)?;
    /// let error = builder.stop_gradients(vec!["hidden".into()])?.build().unwrap_err();
    /// assert!(error.to_string().contains("where stop_gradients ends the gradient"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If no node computes a float value of this name.
    pub fn stop_gradients(mut self, values: Vec<String>) -> Result<GradientGraph> {
        self.stops.extend(values);
        self.source().load_for_gradients()?;
        Ok(self)
    }

    fn source(&self) -> ModelSource {
        let changes = ModelChanges::default().stop_gradients(self.stops.iter().cloned());
        ModelSource::Bytes(self.source.clone()).with_changes(changes)
    }

    /// Adds the gradients.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use ortrain::gradient::GradientGraph;
    ///
    /// let model = ortrain::Bytes::from(std::fs::read(setup::MODEL)?);
    /// let (y, x) = (vec!["logits".into()], vec!["x".into()]);
    /// let mut builder = GradientGraph::new(model.clone(), y, x, "logits", true)?;
    /// assert_eq!(*builder.model(), model);
    /// builder.build()?;
    /// assert_ne!(*builder.model(), model);
    /// assert!(builder.build().is_err(), "the gradients are there");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`grad`]; also if it was called before, or if the gradient of a value of `y` is undefined.
    pub fn build(&mut self) -> Result<()> {
        if self.built.is_some() {
            return Err(Error::State(
                "build() was called before; make another GradientGraphBuilder for other gradients".into(),
            ));
        }
        if self.x.is_empty() {
            self.built = Some(self.source.clone());
            return Ok(());
        }
        let mut model = self.source().load_for_gradients()?;
        self.check_seeds(message_graph(MODEL_LABEL, &mut model.proto)?)?;
        let options = GradientOptions { of: vec![self.loss.clone()], wrt: self.x.clone(), plain: self.plain };
        let with_gradients = gradient_model(MODEL_LABEL, model, &options, Seeds::Ones, BUILDER_LIST_NAMES)?;
        self.built = Some(encode(&with_gradients).map_err(Error::from)?.into());
        Ok(())
    }

    /// Checks that the loss defines the gradients of all values of `y`.
    fn check_seeds(&self, graph: &GraphProto) -> Result<()> {
        let (y, loss) = (unique_names(&self.y), self.loss.as_str());
        if !y.contains(&loss) {
            let x: Vec<String> = unique_names(&self.x).into_iter().map(|name| format!("{name:?}")).collect();
            return Err(Error::Argument(match y.as_slice() {
                [] => format!(
                    "y_node_arg_names is empty, so no gradient reaches {}; name the loss {loss:?} in it",
                    x.join(", ")
                ),
                [first, ..] => format!(
                    "\"{first}{GRADIENT_SUFFIX}\", the initial gradient of {first:?} in y_node_arg_names, is \
                     undefined: the loss {loss:?} is not in y_node_arg_names; name it there, or {first:?} as the \
                     loss"
                ),
            }));
        }
        let (_, needed) = needed_nodes_and_values(graph, &[loss]);
        y.into_iter().find(|name| !needed.contains(*name)).map_or(Ok(()), |name| {
            Err(Error::Argument(format!(
                "\"{name}{GRADIENT_SUFFIX}\", the initial gradient of {name:?} in y_node_arg_names, is undefined: \
                 the loss {loss:?} does not depend on it; leave it out, or use ortrain.gradient.vjp, where initial \
                 gradients are inputs"
            )))
        })
    }

    /// Returns the model: the original one before [`GradientGraph::build`], with gradients afterwards.
    #[must_use]
    pub fn model(&self) -> &Bytes {
        self.built.as_ref().unwrap_or(&self.source)
    }

    /// Writes [`GradientGraph::model`] to a file.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use ortrain::gradient::GradientGraph;
    ///
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("gradient.onnx");
    /// let model = std::fs::read(setup::MODEL)?;
    /// let builder = GradientGraph::new(model.clone().into(), vec![], vec![], "logits", true)?;
    /// builder.save(&path)?;
    /// assert_eq!(std::fs::read(&path)?, model);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let write = || {
            let mut file = Staged::beside(path.as_ref())?;
            file.append(self.model())?;
            file.sync()?;
            file.persist()
        };
        write().map_err(|error| Error::Onnx(error.into()))
    }
}

fn differentiate_source(source: ModelSource, options: &GradientOptions, seeds: Seeds) -> Result<ModelProto> {
    let label = source.label("the model");
    gradient_model(&label, source.load_for_gradients()?, options, seeds, ("of", "wrt"))
}

/// Returns the model with its gradients. `list_names` are the names of the two lists in error messages.
fn gradient_model(
    label: &str,
    model: LoadedModel,
    options: &GradientOptions,
    seeds: Seeds,
    list_names: (&str, &str),
) -> Result<ModelProto> {
    let mut model = embed_external_data(model)?;
    let (of, wrt) = (unique_names(&options.of), unique_names(&options.wrt));
    if of.is_empty() {
        return Err(Error::Argument(format!(
            "the list {} is empty; name the values to differentiate",
            list_names.0
        )));
    }
    if wrt.is_empty() {
        return Err(Error::Argument(format!(
            "the list {} is empty; name the values to differentiate with respect to",
            list_names.1
        )));
    }
    let inner = constants_of_subgraphs(&model.proto);
    let inner: Vec<&str> =
        wrt.iter().copied().filter(|name| inner.iter().any(|inner| inner == name)).collect();
    lift_from_subgraphs(label, &mut model.proto, &inner)?;
    let message = MessageIndex::new(message_graph(label, &mut model.proto)?);
    check_names(label, &message, &of, list_names.0)?;
    check_names(label, &message, &wrt, list_names.1)?;
    check_unused_names(&message, &of, &wrt, seeds)?;

    let opset = if imports_standard(&model.proto) { opset_of(&model.proto) } else { DEFAULT_OPSET };
    let mut graph = forward_graph(label, &model, &of, &wrt)?;
    let find = |graph: &Graph, name: &&str| graph.find(name).expect("it is a value of the message");
    let sources: Vec<ValueId> = of.iter().map(|name| find(&graph, name)).collect();
    let targets: Vec<ValueId> = wrt.iter().map(|name| find(&graph, name)).collect();
    check_types(&graph, &sources, &targets, list_names)?;
    let seeded = add_seeds(&mut graph, &sources, &targets, seeds);
    let gradients = add_gradients(label, &mut graph, (&sources, &targets), &seeded, list_names)?;

    let fail = |source| Error::model(label, source);
    unwrap_gradients(&mut graph).map_err(fail)?;
    infer(&mut graph).map_err(fail)?;
    let mut refused = if options.plain { standardise_known(&mut graph, opset) } else { Vec::new() };
    refused.extend(downgrade_known(&mut graph, opset));

    let initializers = !(1..SEPARATE_INITIALIZERS).contains(&model.proto.ir_version);
    // Custom-gradient nodes are expanded into their bodies from here on.
    unwrap_nodes(message_graph(label, &mut model.proto)?);
    let message = MessageIndex::new(message_graph(label, &mut model.proto)?);
    let selection = NodeSelection::new(&graph, &message, &gradients, options.plain);
    check_expressible(label, &graph, &message, &selection, &refused, (options.plain, opset))?;
    let inputs: &[(ValueId, ValueId)] = if seeds == Seeds::Inputs { &seeded } else { &[] };
    let results: Vec<(ValueId, ValueId)> = targets.into_iter().zip(gradients).collect();
    let result_graph = build_graph(&graph, &message, &selection, inputs, results, initializers);

    let mut proto = model.proto;
    proto.functions.clear();
    proto.opset_import = imported_opsets(&proto, &result_graph, opset);
    proto.graph = Some(result_graph);
    Ok(proto)
}

/// Returns the typed graph of the model with operators of the newest version. Initializers in `wrt` become
/// inputs of the graph.
fn forward_graph(label: &str, model: &LoadedModel, of: &[&str], wrt: &[&str]) -> Result<Graph> {
    let requested: Vec<&str> = of.iter().chain(wrt).copied().collect();
    // Nodes after the requested values are irrelevant.
    let shorter = postprocessing::without_unsupported(model, &requested);
    let model = shorter.as_ref().unwrap_or(model);
    let mut proto = model.proto.clone();
    let mut names = Vec::new();
    if let Some(graph) = &mut proto.graph {
        let varied: Vec<TensorProto> =
            graph.initializer.extract_if(.., |tensor| wrt.contains(&tensor.name.as_str())).collect();
        for tensor in varied {
            graph.input.retain(|info| info.name != tensor.name);
            let dtype = DType::from_onnx(tensor.data_type).unwrap_or(DType::F32);
            let dims = tensor_dims(&tensor).map_err(Error::from)?;
            graph.input.push(declare_value(&tensor.name, ValueType::tensor(dtype, &dims)));
        }
        collect_names(graph, &mut names);
    }
    let mut graph = Graph::from_model(&model.with_proto(proto))
        .map_err(|source| postprocessing::add_advice(Error::graph(label, source), model))?;
    // Reserves all names of the message, also in subgraphs, so that new values do not use them.
    for name in names {
        if graph.find(&name).is_none() {
            graph.add_value(&name, ValueType::Unknown);
        }
    }
    let requested_ids = requested.iter().filter_map(|name| graph.find(name));
    let missing_outputs: Vec<ValueId> = requested_ids.filter(|id| !graph.outputs.contains(id)).collect();
    graph.outputs.extend(missing_outputs);
    let raw = graph.clone();
    let outcome = upgrade(&mut graph).and_then(|()| infer(&mut graph));
    let Err(first) = outcome else { return Ok(graph) };
    let mut graph = raw;
    let mut wrong = upgrade_known(&mut graph);
    wrong.extend(infer_known(&mut graph));
    if wrong.is_empty() {
        wrong.push(first);
    }
    Err(postprocessing::add_advice(
        obstacles_error(label, wrong.iter().map(|error| (error, None)).collect()),
        model,
    ))
}

/// Collects the names of all values of a graph and its subgraphs, except for the bodies of custom-gradient
/// nodes.
fn collect_names(graph: &GraphProto, names: &mut Vec<String>) {
    names.extend(graph.input.iter().map(|info| info.name.clone()));
    names.extend(graph.initializer.iter().map(|tensor| tensor.name.clone()));
    for node in &graph.node {
        names.extend(node.output.iter().filter(|name| !name.is_empty()).cloned());
        if is_custom_gradient(node) {
            continue;
        }
        for attribute in &node.attribute {
            let subgraphs = attribute.g.as_deref().into_iter().chain(&attribute.graphs);
            subgraphs.for_each(|graph| collect_names(graph, names));
        }
    }
}

/// Adds an initial gradient for each source, and returns pairs of source and initial gradient.
fn add_seeds(
    graph: &mut Graph,
    sources: &[ValueId],
    targets: &[ValueId],
    seeds: Seeds,
) -> Vec<(ValueId, ValueId)> {
    let mut seeded = Vec::with_capacity(sources.len());
    for &source in sources {
        let name = format!("{}{GRADIENT_SUFFIX}", graph.name_of(source));
        let seed = match seeds {
            Seeds::Inputs => {
                let seed = graph.add_value(&name, graph.value(source).ty.clone());
                graph.inputs.push(seed);
                seed
            }
            Seeds::Ones => {
                // A source with a dependent source gets further gradients. If it is also a target, its
                // gradient is their sum, which needs the name `name`, so the ones get another name.
                let dependents = dependent_values(graph, &[source]);
                let has_more = sources.iter().any(|other| *other != source && dependents.contains(other));
                let start = if has_more && targets.contains(&source) { format!("{name}/ones") } else { name };
                ones_like(graph, source, &start)
            }
        };
        seeded.push((source, seed));
    }
    seeded
}

/// Adds the gradients of all targets. The error lists all obstacles.
fn add_gradients(
    label: &str,
    graph: &mut Graph,
    (sources, targets): (&[ValueId], &[ValueId]),
    seeded: &[(ValueId, ValueId)],
    argument_names: (&str, &str),
) -> Result<Vec<ValueId>> {
    let before = graph.clone();
    let failure = match backpropagate(graph, seeded, targets) {
        Ok(gradients) => {
            let missing: Vec<ValueId> = targets
                .iter()
                .zip(&gradients)
                .filter(|(_, gradient)| gradient.is_none())
                .map(|(&id, _)| id)
                .collect();
            if missing.is_empty() {
                return Ok(gradients.into_iter().flatten().collect());
            }
            return Err(unreached_error(label, &before, sources, &missing, argument_names));
        }
        Err(error) => error,
    };
    let (_, stops) = backpropagate_known(&mut before.clone(), seeded, targets)
        .map_err(|source| Error::model(label, source))?;
    let mut wrong = Vec::new();
    for stop in &stops {
        if let Some(error) = &stop.error {
            let through: Vec<&str> = stop.targets.iter().map(|&id| before.name_of(id)).collect();
            let mut fix = format!(
                "leave the values that need its gradient out of {} ({})",
                argument_names.1,
                list_names(through)
            );
            if stop.has_unknown_sizes {
                fix += ", or give the inputs of the model fixed sizes, which it may need";
            }
            wrong.push((error, Some(fix)));
        }
    }
    if wrong.is_empty() {
        wrong.push((&failure, None));
    }
    Err(obstacles_error(label, wrong))
}

/// Builds the graph of the result: the message's graph with the selected nodes, and with the gradients as
/// outputs. `inputs` and `results` are pairs of a value and its gradient.
fn build_graph(
    graph: &Graph,
    message: &MessageIndex<'_>,
    selection: &NodeSelection,
    inputs: &[(ValueId, ValueId)],
    mut results: Vec<(ValueId, ValueId)>,
    initializers: bool,
) -> GraphProto {
    let mut output_graph = message.graph.clone();
    let mut nodes: Vec<NodeProto> = Vec::new();
    for &id in &selection.constants {
        let tensor = graph.value(id).constant.as_ref().expect("it is a constant");
        let tensor = tensor_to_proto(graph.name_of(id), tensor);
        if initializers {
            output_graph.initializer.push(tensor);
        } else {
            nodes.push(constant_node(graph.name_of(id), &tensor));
        }
    }
    let mut order = NodeOrder::new(graph, selection);
    for (index, node) in message.graph.node.iter().enumerate() {
        if selection.replaced.contains(&index) {
            node.output.iter().for_each(|name| order.place_producer(name));
        } else {
            let mut names = FxHashSet::default();
            collect_inputs(node, &mut names);
            let mut names: Vec<String> = names.into_iter().collect();
            names.sort_unstable();
            names.iter().for_each(|name| order.place_producer(name));
            order.nodes.push(NodeSource::Message(index));
        }
    }
    selection.nodes.iter().for_each(|&index| order.place_node(index));

    let mut full_graph = graph.to_proto();
    let mut declared: FxHashSet<&str> = message.inputs_and_initializers.clone();
    let graph_outputs = message.graph.output.iter().chain(&message.graph.value_info);
    declared.extend(graph_outputs.map(|info| info.name.as_str()));
    results.sort_by(|a, b| graph.name_of(a.1).cmp(graph.name_of(b.1)));
    for placed in &order.nodes {
        match *placed {
            NodeSource::Message(index) => nodes.push(message.graph.node[index].clone()),
            NodeSource::Graph(index) => {
                nodes.push(std::mem::take(&mut full_graph.node[index]));
                for id in graph.nodes[index].present_outputs() {
                    let result = results.iter().any(|&(_, gradient)| gradient == id);
                    let has_type = graph.value(id).ty.dtype().is_some();
                    if has_type && !result && declared.insert(graph.name_of(id)) {
                        output_graph.value_info.push(graph.value_info(id));
                    }
                }
            }
        }
    }
    output_graph.node = nodes;
    output_graph.input.extend(inputs.iter().map(|&(source, seed)| gradient_declaration(graph, source, seed)));
    output_graph
        .output
        .extend(results.iter().map(|&(target, gradient)| gradient_declaration(graph, target, gradient)));
    output_graph
}

/// Returns the declaration of a gradient, with the type of its value.
fn gradient_declaration(graph: &Graph, value: ValueId, gradient: ValueId) -> ValueInfoProto {
    ValueInfoProto { name: graph.name_of(gradient).to_owned(), ..graph.value_info(value) }
}

/// Returns the operator sets that the result uses, in the versions of the model.
fn imported_opsets(proto: &ModelProto, graph: &GraphProto, opset: i64) -> Vec<OperatorSetIdProto> {
    let mut used = BTreeSet::new();
    collect_domains(graph, &mut used);
    let mut sets: Vec<OperatorSetIdProto> = Vec::new();
    for set in &proto.opset_import {
        let domain = if is_standard(&set.domain) { "" } else { &set.domain };
        if domain.is_empty() || used.contains(domain) {
            used.remove(domain);
            sets.push(set.clone());
        }
    }
    for domain in used {
        let version = if domain.is_empty() { opset } else { 1 };
        sets.push(OperatorSetIdProto { domain: domain.to_owned(), version });
    }
    sets
}

fn collect_domains<'a>(graph: &'a GraphProto, used: &mut BTreeSet<&'a str>) {
    for node in &graph.node {
        used.insert(if is_standard(&node.domain) { "" } else { &node.domain });
        for attribute in &node.attribute {
            let subgraphs = attribute.g.as_deref().into_iter().chain(&attribute.graphs);
            subgraphs.for_each(|graph| collect_domains(graph, used));
        }
    }
}

#[cfg(test)]
mod tests {
    use ortrain_graph::{Attrs, Node, Tensor};

    use super::*;
    use crate::ErrorKind;
    use crate::{DType, encode_model};

    /// Builds a chain of operators: node `n0` computes `v0` from `x`, `n1` computes `v1` from `v0`, and so on. `Mul`
    /// multiplies by the initializer `w`, other operators have one input.
    fn chain(ops: &[&str], opset: i64, ir_version: i64) -> ModelSource {
        let mut graph = Graph::new("chain");
        let ty = ValueType::tensor(DType::F32, &[2, 3]);
        let x = graph.add_value("x", ty.clone());
        graph.inputs.push(x);
        let w = graph.add_constant("w", Tensor::filled(DType::F32, &[2, 3], 2.0));
        let mut last = x;
        for (k, op) in ops.iter().enumerate() {
            let inputs: &[Option<ValueId>] =
                if *op == "Mul" { &[Some(last), Some(w)] } else { &[Some(last)] };
            let output = graph.add_value(&format!("v{k}"), ty.clone());
            let mut node = Node::new("", op, inputs, &[Some(output)], Attrs::new());
            node.name = format!("n{k}").into();
            graph.nodes.push(node);
            last = output;
        }
        graph.outputs.push(last);
        let mut proto = graph.to_proto();
        if ir_version < SEPARATE_INITIALIZERS {
            proto.input.push(declare_value("w", ty));
        }
        let opset_import = vec![OperatorSetIdProto { domain: String::new(), version: opset }];
        let model = ModelProto { ir_version, opset_import, graph: Some(proto), ..ModelProto::default() };
        ModelSource::from(encode_model(&model).expect("it is small"))
    }

    fn options(of: &[&str], wrt: &[&str]) -> GradientOptions {
        let list = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        GradientOptions { of: list(of), wrt: list(wrt), plain: true }
    }

    #[test]
    fn original_nodes_come_first() {
        let model =
            grad(chain(&["Mul", "Tanh"], 17, 8), &options(&["v1"], &["x", "w"])).expect("it has gradients");
        let graph = model.graph.expect("there is one");
        let names: Vec<&str> = graph.node[..2].iter().map(|node| node.name.as_str()).collect();
        assert_eq!(names, ["n0", "n1"]);
        let outputs: Vec<&str> = graph.output.iter().map(|info| info.name.as_str()).collect();
        assert_eq!(outputs, ["v1", "w_grad", "x_grad"]);
        assert_eq!(model.opset_import.len(), 1);
        assert!(graph.node.iter().all(|node| node.domain.is_empty()));
    }

    /// In IR version 3, each initializer is also an input: new constants are computed by nodes.
    #[test]
    fn ir_version_3_gets_no_initializers() {
        let model =
            grad(chain(&["Mul", "Sigmoid"], 9, 3), &options(&["v1"], &["w"])).expect("it has gradients");
        let graph = model.graph.expect("there is one");
        let initializers: Vec<&str> = graph.initializer.iter().map(|tensor| tensor.name.as_str()).collect();
        assert_eq!((model.ir_version, initializers), (3, vec!["w"]));
        assert!(graph.node.iter().any(|node| node.op_type == "Constant"));
    }

    /// The error lists every unknown operator.
    #[test]
    fn lists_all_obstacles() {
        let error = grad(chain(&["Mul", "Strange", "Odd"], 17, 8), &options(&["v2"], &["w"]));
        let error = error.expect_err("the operators are unknown");
        assert_eq!(error.kind(), ErrorKind::NotImplemented);
        let Error::Obstacles { obstacles, .. } = &error else { panic!("{error}") };
        let operators: Vec<_> = obstacles.iter().filter_map(|found| found.operator.as_deref()).collect();
        assert_eq!(operators, ["Odd", "Strange"]);
        assert!(error.to_string().starts_with("the model: 2 obstacles: "), "{error}");
    }

    /// Nodes that the gradient does not need may be unknown, and remain.
    #[test]
    fn unneeded_unknown_nodes_remain() {
        let model =
            grad(chain(&["Mul", "Strange"], 17, 8), &options(&["v0"], &["w"])).expect("it is not needed");
        assert_eq!(model.graph.expect("there is one").node[1].op_type, "Strange");
    }

    #[test]
    fn rejects_unknown_and_used_names() {
        let fails = |of: &[&str], wrt: &[&str]| {
            vjp(chain(&["Mul"], 17, 8), &options(of, wrt)).expect_err("refused").to_string()
        };
        assert_eq!(fails(&[], &["w"]), "the list of is empty; name the values to differentiate");
        assert_eq!(
            fails(&["v0"], &[]),
            "the list wrt is empty; name the values to differentiate with respect to"
        );
        assert_eq!(
            fails(&["n0"], &["w"]),
            r#"of names unknown values of the model: "n0"; a node has this name, and its output is "v0""#
        );
        assert!(fails(&["v0"], &["v0"]).starts_with(r#""v0" is in both of and wrt"#));
    }
}
