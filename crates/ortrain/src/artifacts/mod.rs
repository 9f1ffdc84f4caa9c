//! Generation of training artifacts from a forward model, like onnxruntime-training's `generate_artifacts`,
//! which can also train on them.
//!
//! The evaluation model is an edit of the forward model's message: the loss is appended, and parameters
//! become inputs. The training model is the same graph with its gradients, at the operator versions of the
//! forward model.

pub(crate) mod batch;
pub(crate) mod batch_independence;
pub(crate) mod classifier_scores;
mod convert;
mod description;
pub(crate) mod files;
pub(crate) mod head;
mod losses;
pub(crate) mod options;
pub mod parts;
mod quantized;
pub(crate) mod training_model;
mod values;

use std::sync::Arc;

use ortrain_checkpoint::{Checkpoint, ModuleState, NamedTensor, NominalTensor};
use ortrain_graph::{DType, Graph, ValueType};
use ortrain_onnx::{GraphProto, LoadedModel, ModelProto, ValueInfoProto, visit_tensors_mut};
use ortrain_ops::passes::functions::{has_wrapped_nodes, unwrap_nodes};
use ortrain_ops::training::{
    adapted_layers, add_master_weights, is_narrow, loss_problems, narrow_weights_note, running_statistics,
    set_inference_mode,
};
use rustc_hash::FxHashSet;

use crate::artifacts::losses::{AppendedLosses, append_losses, first_output};
use crate::artifacts::training_model::{Value, training_model, unknown_value};
use crate::model::base_hash::{BASE_KEY, base_hash, set_base};
use crate::model::checks::check_forward;
use crate::model::computed_parameters::{constants_of_subgraphs, lift_from_subgraphs, make_initializers};
use crate::model::graph::{graph_for, infer_graph, message_graph, opset_of};
use crate::model::graph_inspection::inspect_loaded;
use crate::model::inspection::{ParameterRole, Scope};
use crate::model::origins::Origins;
use crate::model::source::make_internal;
use crate::model::stops::no_trained_weights_error;
use crate::model::{class_axis, postprocessing};
use crate::state::gradient_names::parameter_of_gradient;
use crate::suggest::hint;
use crate::train::optim::{OptimizerFunction, OptimizerSpec, optimizer_model_of_function};
use crate::train::optimizer::check_optimizer_model;
use crate::{Error, ModelSource, Result};

/// Statistics that BatchNormalization uses in training.
///
/// ```
/// use ortrain::artifacts::{ArtifactOptions, BatchNormMode};
///
/// let options = ArtifactOptions { batch_norm: BatchNormMode::Freeze, ..ArtifactOptions::default() };
/// assert_eq!(BatchNormMode::default(), BatchNormMode::Auto);
/// ```
#[doc(inline)]
pub use ortrain_ops::training::BatchNormMode;

#[doc(inline)]
pub use crate::artifacts::batch::open_batch;
#[doc(inline)]
pub use crate::artifacts::convert::{Conversion, convert_model};
#[doc(inline)]
pub use crate::artifacts::description::{Activation, DescribedOutput, ModelDescription, describe_model};
#[doc(inline)]
pub use crate::artifacts::files::{Artifacts, FileOptions};
#[doc(inline)]
pub use crate::artifacts::head::replace_head;
#[doc(inline)]
pub use crate::artifacts::options::{ArtifactOptions, OptimizerChoice};
pub use crate::artifacts::quantized::with_float_weights;
#[doc(inline)]
pub use crate::artifacts::values::result_names;

/// A loss. A loss with settings, or one of several, is a [`LossTerm`].
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::artifacts::{ArtifactOptions, Loss, generate};
///
/// let artifacts = generate(
///     setup::MODEL.into(),
///     ArtifactOptions {
///         requires_grad: vec!["fc2.weight".into()],
///         losses: vec![Loss::MSELoss.into()],
///         ..ArtifactOptions::default()
///     },
/// )?;
/// assert_eq!(artifacts.eval_model.graph.unwrap().input[1].name, "target");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_ops::training::Loss;

/// Settings of a loss.
///
/// ```
/// use ortrain::Tensor;
/// use ortrain::artifacts::{Loss, LossSettings, LossTerm, Reduction};
///
/// let settings = LossSettings {
///     reduction: Reduction::Sum,
///     weight: Some(Tensor::f32(&[3], &[1.0, 1.0, 20.0])),
///     ignore_index: Some(-100),
///     ..LossSettings::default()
/// };
/// let rare = LossTerm { settings, ..Loss::CrossEntropyLoss.into() };
/// ```
#[doc(inline)]
pub use ortrain_ops::training::LossSettings;

/// A loss with settings, or one of several losses with a common sum.
///
/// ```
/// use ortrain::artifacts::{Loss, LossTerm};
///
/// let near = LossTerm {
///     scores: Some("distance".into()),
///     target: Some("measured".into()),
///     factor: 0.5,
///     ..Loss::L1Loss.into()
/// };
/// assert_eq!(near.loss, Loss::L1Loss);
/// ```
#[doc(inline)]
pub use ortrain_ops::training::LossTerm;

/// Generator of unused value names.
///
/// ```
/// use ortrain::artifacts::{NameGenerator, OptimizerKind, OptimizerSettings, optimizer_model};
///
/// let mut names = NameGenerator::starting_after(7);
/// let model = optimizer_model(OptimizerKind::SGD, &OptimizerSettings::default(), &mut names, 17);
/// assert!(names.last() > 7);
/// ```
#[doc(inline)]
pub use ortrain_ops::training::NameGenerator;

/// Kind of optimizer.
///
/// ```
/// use ortrain::artifacts::{ArtifactOptions, OptimizerKind};
///
/// let options = ArtifactOptions { optimizer: Some(OptimizerKind::SGD.into()), ..ArtifactOptions::default() };
/// # assert!(options.optimizer.is_some());
/// ```
#[doc(inline)]
pub use ortrain_ops::training::OptimizerKind;

/// Formula of an AdamW step: onnxruntime-training's or PyTorch's.
///
/// ```
/// use ortrain::artifacts::{AdamFormula, OptimizerSettings};
///
/// // What torch.optim.AdamW does with its own defaults.
/// let settings = OptimizerSettings {
///     formula: AdamFormula::PyTorch,
///     epsilon: 1e-8,
///     weight_decay: 0.01,
///     ..OptimizerSettings::default()
/// };
/// assert_eq!(AdamFormula::from_name("pytorch"), Some(settings.formula));
/// ```
#[doc(inline)]
pub use ortrain_ops::training::AdamFormula;

/// Settings of an optimizer, including gradient clipping.
///
/// ```
/// use ortrain::artifacts::OptimizerSettings;
///
/// let settings =
///     OptimizerSettings { weight_decay: 0.01, max_norm: Some(1.0), ..OptimizerSettings::default() };
/// assert_eq!(settings.betas, (0.9, 0.999));
/// ```
#[doc(inline)]
pub use ortrain_ops::training::OptimizerSettings;

/// Reduction of the losses of all elements.
///
/// ```
/// use ortrain::artifacts::Reduction;
///
/// assert_eq!(Reduction::from_name("sum"), Some(Reduction::Sum));
/// assert_eq!(Reduction::default().name(), "mean");
/// ```
#[doc(inline)]
pub use ortrain_ops::training::Reduction;

/// Builds an optimizer model without other artifacts, for any parameters.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let (mut state, module, _) = setup::training()?;
/// use ortrain::artifacts::{NameGenerator, OptimizerKind, OptimizerSettings, optimizer_model};
/// use ortrain::{ModelSource, Optimizer};
///
/// let settings = OptimizerSettings { max_norm: Some(1.0), ..OptimizerSettings::default() };
/// let model = optimizer_model(OptimizerKind::AdamW, &settings, &mut NameGenerator::new(), 17);
/// let optimizer = Optimizer::new(ModelSource::from_proto(&model)?, &mut state, &module)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_ops::training::optimizer_model;

/// Builds the optimizer model of a description: ONNX Runtime's optimizer if it exists, otherwise plain ONNX.
///
/// ```
/// use ortrain::DType;
/// use ortrain::artifacts::{NameGenerator, optimizer_model_of_spec};
/// use ortrain::optim::OptimizerSpec;
///
/// let model = optimizer_model_of_spec(&OptimizerSpec::new("AdamW")?, &[DType::F32], &mut NameGenerator::new(), 17)?;
/// assert_eq!(model.graph.unwrap().node[0].op_type, "AdamWOptimizer");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[doc(inline)]
pub use ortrain_ops::training::optimizer_model_of_spec;

/// Oldest IR version in which an initializer need not be an input.
pub(crate) const SEPARATE_INITIALIZERS: i64 = 4;

/// Generates the artifacts of a training from a forward model.
///
/// The sum of two losses, one of them with settings, and an optimizer with custom settings:
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::Tensor;
/// use ortrain::artifacts::{
///     ArtifactOptions, Loss, LossSettings, LossTerm, OptimizerChoice, OptimizerKind, OptimizerSettings, generate,
/// };
///
/// # let model = setup::MODEL;
/// let classes = LossSettings {
///     weight: Some(Tensor::f32(&[10], &[1.0; 10])),
///     label_smoothing: 0.1,
///     ..LossSettings::default()
/// };
/// let small = LossTerm { target: Some("wanted".into()), factor: 0.01, ..Loss::MSELoss.into() };
/// let artifacts = generate(
///     model.into(),
///     ArtifactOptions {
///         requires_grad: vec!["fc2.weight".into(), "fc2.bias".into()],
///         losses: vec![LossTerm { settings: classes, ..Loss::CrossEntropyLoss.into() }, small],
///         optimizer: Some(OptimizerChoice::Kind(
///             OptimizerKind::AdamW,
///             OptimizerSettings { weight_decay: 0.01, max_norm: Some(1.0), ..OptimizerSettings::default() },
///         )),
///         ..ArtifactOptions::default()
///     },
/// )?;
/// let graph = artifacts.eval_model.graph.unwrap();
/// let inputs: Vec<&str> = graph.input.iter().map(|input| input.name.as_str()).collect();
/// assert_eq!(inputs, ["x", "labels", "wanted", "fc2.weight", "fc2.bias"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the model cannot be read or differentiated, or a name is unknown or occurs twice. If no parameter is
/// trained, although the model has trainable ones or an optimizer is requested.
#[allow(clippy::needless_pass_by_value, reason = "options are made for one call")]
pub fn generate(model: ModelSource, options: ArtifactOptions) -> Result<Artifacts> {
    let label = model.label("the model");
    generate_loaded(&label, model.load_for_gradients()?, &options)
}

/// Generates artifacts like [`generate`] from a loaded model.
pub(crate) fn generate_loaded(
    label: &str,
    model: LoadedModel,
    options: &ArtifactOptions,
) -> Result<Artifacts> {
    if let Ok(graph) = Graph::from_model(&model) {
        check_forward(label, &graph)?;
    }
    let layers = model.proto.graph.as_ref().map(adapted_layers).unwrap_or_default();
    let is_adapted = !layers.is_empty();
    let mut origins = Origins::default();
    let mut forward = to_self_contained_with_origins(label, model, &mut origins)?;
    let options = &classifier_scores::with_default_scores(label, &mut forward, options)?;
    let inner = constants_of_subgraphs(&forward.proto);
    let inner: Vec<&str> =
        options.parameters().filter(|name| inner.iter().any(|inner| inner == name)).collect();
    lift_from_subgraphs(label, &mut forward.proto, &inner)?;
    let opset = opset_of(&forward.proto);
    let needed = needed_values(message_graph(label, &mut forward.proto)?, options);
    let needed: Vec<&str> = needed.iter().map(String::as_str).collect();
    let statistics =
        updated_statistics(label, &mut forward, options.batch_norm, &options.trained_names(), &needed)?;
    let parameter_names: FxHashSet<&str> =
        options.parameters().chain(statistics.iter().map(String::as_str)).collect();
    let computable = make_initializers(label, &mut forward, &parameter_names, &statistics, &needed)?;
    let tail = postprocessing::remove_unsupported(message_graph(label, &mut forward.proto)?, &needed);
    let parameters = choose_parameters(label, &forward, options, &computable, &statistics)?;

    if options.master_weights {
        require_master_weights(label, message_graph(label, &mut forward.proto)?, &parameters.trainable)?;
    }

    // The loss derives the type of its target from the types of the forward model.
    let typed = infer_graph(label, &forward)?;
    check_input_names(&typed)?;
    let base = is_adapted.then(|| base_hash(&typed, layers.iter().map(|layer| layer.weight.as_str())));
    let mut names = NameGenerator::new();
    let graph = message_graph(label, &mut forward.proto)?;
    let AppendedLosses { sum: loss, compared, notes, open_labels } = match options.losses.is_empty() {
        true => {
            let sum = first_output(label, graph, options)?;
            AppendedLosses { sum, compared: Vec::new(), notes: Vec::new(), open_labels: Vec::new() }
        }
        false => append_losses(label, graph, &mut names, &typed, options, opset)?,
    };
    let forward_outputs: Vec<String> = graph.output.iter().map(|info| info.name.clone()).collect();
    let mut warnings = loss_problems(&typed, &compared);
    warnings.extend(notes);
    let additional = &options.additional_output_names;
    // A named loss follows the sum, unless it is the sum, or is among the other outputs.
    let term_names = options.losses.iter().filter_map(|term| term.name.as_ref());
    let output_names: Vec<String> =
        term_names.filter(|name| **name != loss && !additional.contains(name)).cloned().collect();
    let outputs: Vec<String> =
        std::iter::once(loss).chain(output_names).chain(additional.iter().cloned()).collect();

    let values = move_parameters_to_inputs(label, graph, &parameters)?;
    let trained = values.iter().filter(|(_, trained, _)| *trained);
    let narrow: Vec<(&str, DType)> = (trained.clone().map(|(name, _, value)| (&**name, value.dtype())))
        .filter(|(_, dtype)| is_narrow(*dtype))
        .collect();
    warnings.extend(narrow_weights_note(&narrow, trained.clone().count()));
    let trained: Vec<(Arc<str>, DType)> =
        trained.map(|(name, _, value)| (name.clone(), value.dtype())).collect();
    // The evaluation model has expanded bodies instead of custom-gradient nodes.
    let original_nodes = has_wrapped_nodes(graph).then(|| graph.node.clone());
    unwrap_nodes(graph);
    let typed =
        infer_graph(label, &forward).map_err(|error| explain_outputs(error, &forward_outputs, options))?;
    set_outputs(label, &mut forward.proto, &typed, &outputs)?;

    let mut plain = None;
    if let Some(nodes) = original_nodes {
        let graph = message_graph(label, &mut forward.proto)?;
        plain = Some(std::mem::replace(&mut graph.node, nodes));
        check_outputs(graph, &outputs)?;
    }
    let mut training_model =
        training_model(label, &forward, &outputs, (&values, &statistics), opset, options)?;
    let mut eval_model = forward.proto;
    for model in [&mut training_model, &mut eval_model] {
        class_axis::mark_labels(model, &open_labels);
        base.iter().for_each(|hash| set_base(model, hash));
    }
    if let (Some(nodes), Some(graph)) = (plain, &mut eval_model.graph) {
        graph.node = nodes;
    }
    if let Some(graph) = &mut eval_model.graph {
        tail.put_back(graph);
        unwrap_nodes(graph);
        set_inference_mode(graph);
    }
    let optimizer_model = match &options.optimizer {
        None => None,
        Some(choice) => Some(build_optimizer_model(choice, &trained, &mut names, opset)?),
    };
    let mut nominal_checkpoint = options.nominal_checkpoint.then(|| build_nominal_checkpoint(&values));
    let mut checkpoint = build_full_checkpoint(values);
    for checkpoint in std::iter::once(&mut checkpoint).chain(&mut nominal_checkpoint) {
        checkpoint.properties.extend(base.iter().map(|hash| (BASE_KEY.to_owned(), hash.clone().into())));
    }
    Ok(Artifacts {
        training_model,
        eval_model,
        optimizer_model,
        checkpoint,
        nominal_checkpoint,
        warnings,
        origins,
        is_adapted,
    })
}

/// Lets the model read trained weights of narrow floats through casts of float32 weights.
fn require_master_weights(label: &str, graph: &mut GraphProto, trainable: &FxHashSet<&str>) -> Result<()> {
    if add_master_weights(graph, trainable).map_err(|source| Error::graph(label, source))? == 0 {
        return Err(Error::Argument(
            "master_weights needs a trained weight of float16 or bfloat16, and there is none; leave master_weights out"
                .into(),
        ));
    }
    Ok(())
}

/// Checks that no input has a name that training models use for gradients.
fn check_input_names(typed: &Graph) -> Result<()> {
    let mut names = typed.inputs.iter().map(|&id| typed.name_of(id));
    match names.find(|name| parameter_of_gradient(name).is_some()) {
        None => Ok(()),
        Some(name) => Err(Error::Argument(format!(
            "input {name:?} of the model has a name that training models use for gradients; rename it"
        ))),
    }
}

/// Converts the parameters from initializers to inputs, in their order, and returns their values.
fn move_parameters_to_inputs(
    label: &str,
    graph: &mut GraphProto,
    parameters: &Parameters<'_>,
) -> Result<Vec<Value>> {
    let no_files = LoadedModel::from_proto(ModelProto::default(), Default::default());
    let mut values: Vec<Value> = Vec::new();
    for tensor in &graph.initializer {
        if let Some(requires_grad) = parameters.is_trained(&tensor.name) {
            let value = Graph::tensor_from_proto(&no_files, tensor);
            let value = value.map_err(|source| Error::graph(label, source))?;
            values.push((tensor.name.as_str().into(), requires_grad, value));
        }
    }
    graph.initializer.retain(|tensor| parameters.is_trained(&tensor.name).is_none());
    let declare =
        |(name, _, value): &Value| declare_value(name, ValueType::tensor(value.dtype(), value.dims()));
    graph.input.extend(values.iter().map(declare));
    Ok(values)
}

/// Builds the optimizer model for trained parameters.
fn build_optimizer_model(
    choice: &OptimizerChoice,
    trained: &[(Arc<str>, DType)],
    names: &mut NameGenerator,
    opset: i64,
) -> Result<ModelProto> {
    Ok(match choice {
        OptimizerChoice::Kind(OptimizerKind::AdamW, settings) if lacks_formula(settings) => {
            return Err(Error::Argument(
                "PyTorch's formula of AdamW always corrects the bias of the moments; use onnxruntime's formula \
                 without bias_correction"
                    .into(),
            ));
        }
        OptimizerChoice::Kind(kind, settings) => optimizer_model(*kind, settings, names, opset),
        OptimizerChoice::Described(spec) => build_described_optimizer(spec, None, trained, names, opset)?,
        OptimizerChoice::Function(function, spec) => {
            build_described_optimizer(spec, Some(function), trained, names, opset)?
        }
        OptimizerChoice::Model(model) => load_optimizer_model(model)?,
    })
}

/// Returns true if the settings of AdamW have no formula.
fn lacks_formula(settings: &OptimizerSettings) -> bool {
    settings.formula == AdamFormula::PyTorch && !settings.bias_correction
}

/// Checks that the outputs are not inside a custom-gradient node.
fn check_outputs(graph: &GraphProto, outputs: &[String]) -> Result<()> {
    let values = graph.input.iter().map(|info| &info.name);
    let values = values.chain(graph.initializer.iter().map(|tensor| &tensor.name));
    let values: FxHashSet<&String> = values.chain(graph.node.iter().flat_map(|node| &node.output)).collect();
    match outputs.iter().find(|name| !values.contains(name)) {
        None => Ok(()),
        Some(name) => Err(Error::Argument(format!(
            "{name:?} cannot be an output: an operator with a custom gradient computes it internally; make it an \
             output of the operator's function"
        ))),
    }
}

/// Returns the values that the loss and the other outputs depend on.
fn needed_values(graph: &GraphProto, options: &ArtifactOptions) -> Vec<String> {
    let outputs: Vec<String> = graph.output.iter().map(|info| info.name.clone()).collect();
    let mut values = options.additional_output_names.clone();
    if options.losses.is_empty() {
        values.extend(outputs.first().cloned());
    }
    for term in &options.losses {
        values.extend(term.scores.iter().chain(&term.target).cloned());
        if term.scores.is_none() {
            let input_names = &options.loss_input_names;
            values.extend(if input_names.is_empty() { &outputs } else { input_names }.iter().cloned());
        }
    }
    values
}

/// Adds a possible reason to an error after the losses were appended: the outputs do not fit the loss.
fn explain_outputs(error: Error, outputs: &[String], options: &ArtifactOptions) -> Error {
    let uses_all_outputs =
        options.loss_input_names.is_empty() && options.losses.iter().any(|term| term.scores.is_none());
    if !uses_all_outputs || outputs.len() < 2 {
        return error;
    }
    Error::Argument(format!(
        "{error}; the loss gets all outputs of the model ({}), so select its inputs with loss_input_names",
        outputs.join(", ")
    ))
}

/// Returns the message of an existing optimizer model.
fn load_optimizer_model(model: &ModelSource) -> Result<ModelProto> {
    let label = model.label("the optimizer model");
    let model = to_self_contained(&label, model.clone().load()?)?;
    check_optimizer_model(&label, &model)?;
    Ok(model.proto)
}

/// Returns the message of the optimizer model for a description.
fn build_described_optimizer(
    spec: &OptimizerSpec,
    function: Option<&OptimizerFunction>,
    trained: &[(Arc<str>, DType)],
    names: &mut NameGenerator,
    opset: i64,
) -> Result<ModelProto> {
    let argument = |source: ortrain_ops::OpError| Error::Argument(source.to_string());
    spec.check().map_err(argument)?;
    for (k, group) in spec.groups.iter().enumerate() {
        if group.parameters.is_empty() {
            return Err(Error::Argument(format!("group {k} of the optimizer has no parameters")));
        }
        let is_trained = |name: &String| trained.iter().any(|(trained, _)| **trained == **name);
        if let Some(name) = group.parameters.iter().find(|name| !is_trained(name)) {
            return Err(Error::Argument(format!(
                "group {k} of the optimizer names {name:?}, which is not trained{}",
                hint(name, trained.iter().map(|(name, _)| &**name))
            )));
        }
    }
    let mut dtypes: Vec<DType> = Vec::new();
    trained.iter().for_each(|&(_, dtype)| {
        if !dtypes.contains(&dtype) {
            dtypes.push(dtype);
        }
    });
    match function {
        Some(function) => optimizer_model_of_function(function, spec, &dtypes).map_err(argument),
        None => optimizer_model_of_spec(spec, &dtypes, names, opset).map_err(argument),
    }
}

/// Initializers that are parameters.
struct Parameters<'a> {
    trainable: FxHashSet<&'a str>,
    frozen: FxHashSet<&'a str>,
}

impl Parameters<'_> {
    /// Returns true for a trained parameter, false for a frozen one, `None` for other initializers.
    fn is_trained(&self, name: &str) -> Option<bool> {
        (self.trainable.contains(name).then_some(true))
            .or_else(|| self.frozen.contains(name).then_some(false))
    }
}

/// Returns the requested parameters, checked.
fn choose_parameters<'a>(
    label: &str,
    model: &LoadedModel,
    options: &'a ArtifactOptions,
    computable: &FxHashSet<Arc<str>>,
    statistics: &'a [String],
) -> Result<Parameters<'a>> {
    let frozen = options.frozen_params.iter().chain(statistics).map(String::as_str).collect();
    let parameters = Parameters { trainable: options.trained_names(), frozen };
    if parameters.trainable.is_empty() && options.input_gradients.is_empty() {
        // Artifacts of a model without parameters are possible: its loss is computed in both modes.
        if let Some(error) = model.proto.graph.as_ref().and_then(no_trained_weights_error) {
            return Err(error);
        }
        let optimized = options.optimizer.is_some();
        let inspection = inspect_loaded(label, model, &Scope::Outputs)?;
        if optimized || inspection.names(ParameterRole::Trained).next().is_some() {
            return Err(Error::Argument(
                "there are no parameters to train; name them in requires_grad".into(),
            ));
        }
    }
    if let Some(both) = options.requires_grad.iter().find(|name| parameters.frozen.contains(name.as_str())) {
        return Err(Error::Argument(format!("parameter {both:?} cannot be both trained and frozen")));
    }
    let graph = model.proto.graph.as_ref();
    let initializers: FxHashSet<&str> =
        graph.iter().flat_map(|graph| &graph.initializer).map(|tensor| tensor.name.as_str()).collect();
    let missing: Vec<String> = options
        .parameters()
        .filter(|name| !initializers.contains(name))
        .map(|name| {
            let nodes = graph.iter().flat_map(|graph| &graph.node);
            if !name.is_empty() && nodes.flat_map(|node| &node.output).any(|output| output == name) {
                format!("{name:?}, which is computed from the model's inputs")
            } else {
                format!(
                    "{name:?}{}",
                    hint(name, initializers.iter().copied().chain(computable.iter().map(|name| &**name)))
                )
            }
        })
        .collect();
    if !missing.is_empty() {
        return Err(Error::Argument(format!("{label} has no initializer {}", missing.join(", no "))));
    }
    let is_input =
        |name: &&String| graph.iter().flat_map(|graph| &graph.input).any(|info| info.name == **name);
    if let Some(name) = options.input_gradients.iter().find(|name| !is_input(name)) {
        return Err(Error::Argument(format!(
            "{label} has no input {name:?}, so it cannot return its gradient{}",
            hint(name, graph.iter().flat_map(|graph| &graph.input).map(|info| info.name.as_str()))
        )));
    }
    Ok(parameters)
}

/// Returns the running statistics that training updates, and moves the ones in subgraphs to the main graph.
pub(crate) fn updated_statistics(
    label: &str,
    model: &mut LoadedModel,
    mode: BatchNormMode,
    trained: &FxHashSet<&str>,
    needed: &[&str],
) -> Result<Vec<String>> {
    let graph = graph_for(label, model, needed)?;
    let statistics =
        running_statistics(&graph, mode, trained).map_err(|source| Error::model(label, source))?;
    let inner: Vec<&str> = statistics
        .iter()
        .filter(|statistic| statistic.inner)
        .map(|statistic| statistic.name.as_str())
        .collect();
    lift_from_subgraphs(label, &mut model.proto, &inner)?;
    Ok(statistics.into_iter().map(|statistic| statistic.name).collect())
}

/// Returns the model with embedded data. Its initializers are no longer listed as inputs.
pub(crate) fn to_self_contained(label: &str, model: LoadedModel) -> Result<LoadedModel> {
    to_self_contained_with_origins(label, model, &mut Origins::default())
}

/// Works like [`to_self_contained`], and records the origins of the data.
pub(crate) fn to_self_contained_with_origins(
    label: &str,
    mut model: LoadedModel,
    origins: &mut Origins,
) -> Result<LoadedModel> {
    let mut proto = std::mem::take(&mut model.proto);
    visit_tensors_mut(&mut proto, |tensor, _| -> Result<()> {
        if !tensor.external_data.is_empty() {
            let payload = model.tensor_payload(tensor)?;
            if let Some((file, offset)) = model.external_file(tensor)? {
                origins.record(&payload, file, offset);
            }
            make_internal(tensor, payload);
        } else {
            origins.record_own(&model, &tensor.raw_data);
        }
        Ok(())
    })?;
    let graph = message_graph(label, &mut proto)?;
    let initializers: FxHashSet<&str> = graph.initializer.iter().map(|tensor| tensor.name.as_str()).collect();
    graph.input.retain(|info| !initializers.contains(info.name.as_str()));
    proto.ir_version = proto.ir_version.max(SEPARATE_INITIALIZERS);
    Ok(model.with_proto(proto))
}

pub(crate) fn declare_value(name: &str, ty: ValueType) -> ValueInfoProto {
    let mut graph = Graph::new("");
    let id = graph.add_value(name, ty);
    graph.value_info(id)
}

/// Sets the outputs. Previous outputs remain declared.
fn set_outputs(label: &str, proto: &mut ModelProto, typed: &Graph, outputs: &[String]) -> Result<()> {
    let graph = message_graph(label, proto)?;
    let mut infos = Vec::with_capacity(outputs.len());
    for (k, name) in outputs.iter().enumerate() {
        if outputs[..k].contains(name) {
            return Err(Error::Argument(format!("{name:?} is named as an output twice")));
        }
        if parameter_of_gradient(name).is_some() {
            return Err(Error::Argument(format!(
                "{name:?} cannot be an output: names with this ending are reserved for gradients"
            )));
        }
        let id = typed.find(name).ok_or_else(|| unknown_value(typed, name, "an output"))?;
        infos.push(typed.value_info(id));
    }
    let outgoing = std::mem::replace(&mut graph.output, infos);
    // Inferred shapes are omitted: a reader that infers another shape would reject the file.
    let declared: FxHashSet<String> =
        graph.value_info.iter().map(|info| info.name.clone()).chain(outputs.iter().cloned()).collect();
    graph.value_info.extend(outgoing.into_iter().filter(|info| !declared.contains(&info.name)));
    Ok(())
}

pub(crate) fn build_full_checkpoint(values: Vec<Value>) -> Checkpoint {
    let (mut trainable, mut frozen) = (Vec::new(), Vec::new());
    for (name, requires_grad, tensor) in values {
        let list = if requires_grad { &mut trainable } else { &mut frozen };
        list.push(NamedTensor::new(&*name, tensor));
    }
    Checkpoint { module: ModuleState::Full { trainable, frozen }, ..Checkpoint::default() }
}

pub(crate) fn build_nominal_checkpoint(values: &[Value]) -> Checkpoint {
    let list = |trained: bool| {
        let selected = values.iter().filter(|(_, requires_grad, _)| *requires_grad == trained);
        selected
            .map(|(name, _, value)| NominalTensor { name: name.to_string(), dtype: value.dtype() })
            .collect()
    };
    Checkpoint {
        module: ModuleState::Nominal { trainable: list(true), frozen: list(false) },
        ..Checkpoint::default()
    }
}
