//! Graphs of a training in one session: forward pass, gradients, updates.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use ortrain_checkpoint::Checkpoint;
use ortrain_graph::{DType, Dim, Graph, Tensor, ValueId, ValueType, tensor_to_proto};
use ortrain_onnx::{
    DataFile, EXTERNAL_FROM, ExternalData, LARGEST_MESSAGE, LoadedModel, ModelProto, ToWrite, stage,
};
use ortrain_ops::optimizers::{
    DividedModels, Group, Optimizer, OptimizerSpec, Range, divided_models, optimizer_model,
};
use ortrain_ops::passes::{
    differentiate::differentiate, functions::unwrap_nodes, infer::infer, mixed_precision::mixed_precision,
    versions::upgrade,
};
use ortrain_ops::training::{
    BatchNormMode, TRAINING_MODE, Updates, add_master_weights, append_scaled_loss, append_updates,
    choose_statistics, count_batch_norm_modes, default_trained, find_node_optimizer, free_training_mode,
    has_shared_counter, is_narrow, share_training_mode, use_batch_statistics,
};
use rustc_hash::FxHashSet;

use super::TrainingParameters;
use crate::artifacts::training_model::{Value, gather_gradients, training_message};
use crate::artifacts::{build_full_checkpoint, declare_value, to_self_contained, updated_statistics};
use crate::distributed::{DataParallel, Strategy};
use crate::face::classic::names::LOW_PRECISION_SUFFIX;
use crate::model::checks::check_forward;
use crate::model::computed_parameters::make_initializers;
use crate::model::graph::{infer_graph, message_graph, opset_of};
use crate::state::gradient_names::parameter_of_gradient;
use crate::suggest::hint;
use crate::{Error, ModelMeta, ModelSource, Result};

/// Version of `ai.onnx` in which all operators support bfloat16, including Conv and pooling.
const BF16_OPSET: i64 = 22;
/// Version in which BatchNormalization supports float32 running statistics with float16 values.
const F16_OPSET: i64 = 15;
/// Oldest version with Where.
const WHERE_OPSET: i64 = 9;
/// Suffix of the name of a gradient output.
pub(super) const GRADIENT_SUFFIX: &str = "_grad";
/// Suffix of the name of a gradient output in a module's graph; gradients with other suffixes are
/// accumulated.
const GRADIENT_OUTPUT_SUFFIX: &str = "_grad/output";
/// Per-weight setting with the maximum norm of all gradients.
const MAX_NORM_CLIP: &str = "max_norm_clip";
/// Oldest IR version in which an initializer is intentionally also an input.
const MIN_IR_OPTIONAL_INPUTS: i64 = 4;

/// Parts of a session.
pub(super) struct SessionParts {
    pub(super) train: ModelProto,
    pub(super) eval: ModelProto,
    pub(super) checkpoint: Checkpoint,
    /// Trained weights, sorted.
    pub(super) weights: Vec<String>,
    /// Outputs of the model, in order.
    pub(super) outputs: Vec<String>,
    /// Optional inputs of the model with their default values.
    pub(super) defaults: Vec<(String, Tensor)>,
    /// Models of the optimizer's step, if there is an optimizer.
    pub(super) optimizer: Option<OptimizerModels>,
    /// Node outputs with their types.
    pub(super) node_outputs: BTreeMap<String, DType>,
    pub(super) meta: ModelMeta,
}

/// Models of an optimizer's step.
pub(super) enum OptimizerModels {
    /// Every rank updates all parameters.
    Full(Box<ModelProto>),
    /// Each rank updates a part of the parameters.
    Divided(Box<DividedModels>),
}

impl OptimizerModels {
    /// Returns the model of the update.
    pub(super) fn update(&self) -> &ModelProto {
        match self {
            OptimizerModels::Full(model) => model,
            OptimizerModels::Divided(models) => &models.update,
        }
    }
}

/// Reads a model and builds the graphs of its training, on one rank or several.
pub(super) fn build(
    source: ModelSource,
    parameters: &TrainingParameters,
    ranks: Option<&DataParallel>,
) -> Result<SessionParts> {
    let label = source.label("the model");
    let model = source.load_for_gradients()?;
    if let Ok(graph) = Graph::from_model(&model) {
        check_forward(&label, &graph)?;
    }
    check_counts(parameters)?;
    let meta = ModelMeta::of(&model.proto);
    let optional = optional_inputs(&model);
    let mut forward = to_self_contained(&label, model)?;
    let opset_of_model = opset_of(&forward.proto);
    let opset = match parameters.mixed_precision {
        Some(DType::BF16) => opset_of_model.max(BF16_OPSET),
        Some(_) => opset_of_model.max(F16_OPSET),
        None => opset_of_model,
    };
    let graph = message_graph(&label, &mut forward.proto)?;
    let outputs: Vec<String> = graph.output.iter().map(|info| info.name.clone()).collect();
    let loss = check_loss(graph, &parameters.loss_output_name)?;
    let weights = trained_weights(graph, parameters, &loss)?;
    let initializer_names: FxHashSet<String> =
        graph.initializer.iter().map(|tensor| tensor.name.clone()).collect();
    check_optimizer(parameters, &weights, &initializer_names)?;
    let mut defaults = move_optional_inputs(graph, &optional, &weights)?;
    let normalizations = count_batch_norm_modes(graph, opset_of_model);
    defaults.extend(share_mode_input(graph, &weights, normalizations.0 > 0)?);
    let statistics = find_statistics(&label, &mut forward, normalizations, &weights, &outputs, &loss)?;
    if parameters.mixed_precision.is_some() {
        let trained: FxHashSet<&str> = weights.iter().map(String::as_str).collect();
        let graph = message_graph(&label, &mut forward.proto)?;
        add_master_weights(graph, &trained).map_err(|source| Error::graph(&label, source))?;
    }
    if parameters.mixed_precision.is_some() {
        check_float32(message_graph(&label, &mut forward.proto)?, &weights)?;
    }
    let transformed = parameters.model_after_graph_transforms_path.as_ref().map(|_| forward.proto.clone());
    let values = move_values_to_inputs(&label, &mut forward, &weights, &statistics)?;
    let graph = message_graph(&label, &mut forward.proto)?;
    unwrap_nodes(graph);
    let typed = infer_graph(&label, &forward)?;
    check_names(&typed, &weights)?;
    check_scalar(&typed, &loss)?;

    // Forward graph.
    let fail = |source| Error::model(&label, source);
    let mut forward_graph = Graph::from_model(&forward).map_err(|source| Error::graph(&label, source))?;
    upgrade(&mut forward_graph).map_err(fail)?;
    infer(&mut forward_graph).map_err(fail)?;
    let id_of = |graph: &Graph, name: &str| {
        graph.find(name).ok_or_else(|| {
            Error::Argument(format!("the model has no value {name:?} after its operators are upgraded"))
        })
    };
    if let Some(narrow) = parameters.mixed_precision {
        let loss = id_of(&forward_graph, &loss)?;
        let copies = weights
            .iter()
            .map(|name| Ok((id_of(&forward_graph, name)?, format!("{name}{LOW_PRECISION_SUFFIX}"))))
            .collect::<Result<_>>()?;
        mixed_precision(&mut forward_graph, narrow, loss, &copies).map_err(fail)?;
    }
    let eval = training_message(
        &label,
        &forward.proto,
        evaluation_graph(&label, &forward_graph)?,
        opset.max(WHERE_OPSET),
    )?;

    // Gradients.
    let mut graph = forward_graph;
    let loss = id_of(&graph, &loss)?;
    let targets = weights.iter().map(|name| id_of(&graph, name)).collect::<Result<Vec<ValueId>>>()?;
    let own_outputs = graph.outputs.clone();
    graph.outputs.push(loss);
    graph.remove_unused();
    let names: FxHashSet<&str> = statistics.iter().map(String::as_str).collect();
    if !names.is_empty() {
        use_batch_statistics(&mut graph, &names).map_err(fail)?;
        infer(&mut graph).map_err(fail)?;
    }
    let root = if parameters.mixed_precision.is_some() { append_scaled_loss(&mut graph, loss) } else { loss };
    let gradients = differentiate(&mut graph, root, &targets).map_err(fail)?;
    graph.outputs = own_outputs;
    let produced = (graph.nodes.iter().flat_map(ortrain_graph::Node::present_outputs))
        .filter_map(|id| Some((graph.name_of(id).to_owned(), graph.value(id).ty.dtype()?)))
        .collect();
    let optimizer = build_optimizer(parameters, &weights, &values, ranks)?;
    write_model_files(
        &label,
        parameters,
        &forward.proto,
        transformed,
        (&graph, opset),
        &GraphConstants { values: &values, defaults: &defaults },
        (&targets, &gradients),
    )?;
    if parameters.set_gradients_as_graph_outputs {
        append_gradient_outputs(&mut graph, &weights, &gradients);
    }
    let first = graph.outputs.len();
    gather_gradients(&mut graph, &targets, &gradients, first)?;
    let train = training_message(&label, &forward.proto, graph, opset)?;
    Ok(SessionParts {
        train,
        eval,
        checkpoint: build_full_checkpoint(values),
        weights,
        outputs,
        defaults,
        optimizer,
        node_outputs: produced,
        meta,
    })
}

/// Adds an output for the gradient of each weight.
fn append_gradient_outputs(graph: &mut Graph, weights: &[String], gradients: &[ValueId]) {
    for (name, &gradient) in weights.iter().zip(gradients) {
        let ty = graph.value(gradient).ty.clone();
        let output = graph.add_value(&format!("{name}{GRADIENT_OUTPUT_SUFFIX}"), ty);
        let (inputs, outputs) = ([Some(gradient)], [Some(output)]);
        graph.nodes.push(ortrain_graph::Node::new("", "Identity", &inputs, &outputs, Default::default()));
        graph.outputs.push(output);
    }
}

/// Returns the graph of runs that only compute outputs.
fn evaluation_graph(label: &str, forward: &Graph) -> Result<Graph> {
    let mut graph = forward.clone();
    graph.remove_unused();
    if let Some(mode) = graph.find(TRAINING_MODE) {
        choose_statistics(&mut graph, mode);
        infer(&mut graph).map_err(|source| Error::model(label, source))?;
    }
    Ok(graph)
}

/// Connects the input `training_mode` to Dropout and to the statistics of an evaluation. Returns the input
/// with its default value if it is new.
fn share_mode_input(
    graph: &mut ortrain_onnx::GraphProto,
    weights: &[String],
    normalizes_batches: bool,
) -> Result<Option<(String, Tensor)>> {
    let own_type = graph.input.iter().find(|info| info.name == TRAINING_MODE).map(dtype_of_input);
    let is_used = graph.output.iter().map(|info| &info.name).chain(weights).any(|name| name == TRAINING_MODE);
    if own_type.is_none() && !is_used {
        free_training_mode(graph);
    }
    let is_shared = share_training_mode(graph) || normalizes_batches;
    match own_type {
        _ if !is_shared => Ok(None),
        Some(Some(DType::Bool)) => Ok(None),
        None if !is_used => {
            graph.input.push(declare_value(TRAINING_MODE, ValueType::tensor(DType::Bool, &[])));
            Ok(Some((TRAINING_MODE.into(), Tensor::scalar(DType::Bool, 1.0))))
        }
        _ => Err(Error::Argument(format!(
            "value {TRAINING_MODE:?} of the model is not a bool input, but its Dropout or BatchNormalization needs \
             an input of this name; rename the value"
        ))),
    }
}

/// Returns the declared element type of an input.
fn dtype_of_input(info: &ortrain_onnx::ValueInfoProto) -> Option<DType> {
    use ortrain_onnx::proto::type_proto::Value as Declared;
    match info.r#type.as_ref()?.value.as_ref()? {
        Declared::TensorType(tensor) => DType::from_onnx(tensor.elem_type),
        _ => None,
    }
}

/// Checks the numeric parameters.
fn check_counts(parameters: &TrainingParameters) -> Result<()> {
    let steps = parameters.gradient_accumulation_steps;
    if steps < 1 {
        return Err(Error::Argument(format!("gradient_accumulation_steps must be at least 1, got {steps}")));
    }
    match parameters.mixed_precision {
        Some(dtype) if !is_narrow(dtype) => {
            Err(Error::Argument(format!("mixed precision must be float16 or bfloat16, got {dtype}")))
        }
        _ => Ok(()),
    }
}

/// Checks that the weights of a mixed-precision training are float32.
fn check_float32(graph: &ortrain_onnx::GraphProto, weights: &[String]) -> Result<()> {
    let wide = graph.initializer.iter().find(|tensor| {
        weights.contains(&tensor.name) && DType::from_onnx(tensor.data_type) == Some(DType::F64)
    });
    match wide {
        Some(tensor) => Err(Error::Argument(format!(
            "mixed precision is for models of float32, and weight {:?} is float64; train it without use_mixed_precision",
            tensor.name
        ))),
        None => Ok(()),
    }
}

/// Returns initializers that are intentionally also inputs.
fn optional_inputs(model: &LoadedModel) -> Vec<String> {
    let Some(graph) = model.proto.graph.as_ref().filter(|_| model.proto.ir_version >= MIN_IR_OPTIONAL_INPUTS)
    else {
        return Vec::new();
    };
    let initializers: FxHashSet<&str> = graph.initializer.iter().map(|tensor| tensor.name.as_str()).collect();
    let inputs = graph.input.iter().map(|info| info.name.clone());
    inputs.filter(|name| initializers.contains(name.as_str())).collect()
}

/// Returns the name of the loss, checked.
fn check_loss(graph: &ortrain_onnx::GraphProto, loss: &str) -> Result<String> {
    let is_computed = graph.node.iter().flat_map(|node| &node.output).any(|output| output == loss);
    if is_computed && !loss.is_empty() {
        return Ok(loss.to_owned());
    }
    let outputs: Vec<&str> = graph.output.iter().map(|info| info.name.as_str()).collect();
    let suggestion = hint(loss, graph.node.iter().flat_map(|node| &node.output).map(String::as_str));
    let output_list = outputs.join(", ");
    Err(Error::State(match loss {
        "" => format!("loss_output_name is empty; the outputs of the model are {output_list}"),
        _ => format!(
            "no node computes the loss {loss:?}{suggestion}; the outputs of the model are {output_list}"
        ),
    }))
}

/// Returns the trained weights, sorted.
fn trained_weights(
    graph: &ortrain_onnx::GraphProto,
    parameters: &TrainingParameters,
    loss: &str,
) -> Result<Vec<String>> {
    let dtype_of = |name: &str| {
        let tensor = graph.initializer.iter().find(|tensor| tensor.name == name)?;
        DType::from_onnx(tensor.data_type)
    };
    let mut used: FxHashSet<String> = FxHashSet::default();
    graph.node.iter().for_each(|node| crate::model::node_inputs::collect_inputs(node, &mut used));
    let mut weights: Vec<String> = if parameters.weights_to_train.is_empty() {
        default_trained(graph, loss, &parameters.immutable_weights)
    } else {
        parameters.weights_to_train.iter().cloned().collect()
    };
    weights.retain(|name| !parameters.weights_not_to_train.contains(name));
    weights.sort();
    for name in &weights {
        if dtype_of(name).is_some() {
            continue;
        }
        if graph.input.iter().any(|info| info.name == *name) {
            return Err(Error::Argument(format!(
                "weight {name:?} is an input of the model; only initializers can be trained"
            )));
        }
        let suggestion = hint(name, graph.initializer.iter().map(|tensor| tensor.name.as_str()));
        return Err(Error::Argument(format!("the model has no initializer {name:?} to train{suggestion}")));
    }
    // Only floats have gradients.
    weights.retain(|name| dtype_of(name).is_some_and(DType::is_float));
    // An initializer without consumers has no gradient.
    weights.retain(|name| used.contains(name));
    if weights.is_empty() {
        return Err(Error::Argument(format!(
            "the model has no weight to train: the loss {loss:?} depends on no trainable float initializer"
        )));
    }
    Ok(weights)
}

/// Checks that the optimizer is known, and has settings for every weight.
fn check_optimizer(
    parameters: &TrainingParameters,
    weights: &[String],
    initializers: &FxHashSet<String>,
) -> Result<()> {
    let name = &parameters.training_optimizer_name;
    if name.is_empty() {
        return Ok(());
    }
    let row = find_node_optimizer(name).ok_or_else(|| {
        let known: Vec<&str> = ortrain_ops::optimizers::NODE_OPTIMIZERS.iter().map(|row| row.name).collect();
        Error::State(format!(
            "training_optimizer_name {name:?} is not an optimizer of this session; there are {}{}",
            known.join(", "),
            hint(name, known.iter().copied())
        ))
    })?;
    for weight in weights {
        let missing = |map: &str| {
            Error::State(format!(
                "{map} has no entry for the trained weight {weight:?}; add one, {{}} for the default settings of \
                 {name}"
            ))
        };
        let floats = (parameters.optimizer_attributes_map.get(weight))
            .ok_or_else(|| missing("optimizer_attributes_map"))?;
        let ints = (parameters.optimizer_int_attributes_map.get(weight))
            .ok_or_else(|| missing("optimizer_int_attributes_map"))?;
        // SGD has no settings; as in onnxruntime, settings of other optimizers are ignored.
        if row.settings.is_empty() {
            continue;
        }
        for setting in floats.keys().chain(ints.keys()) {
            if setting != MAX_NORM_CLIP && !row.settings.iter().any(|known| known.name == setting) {
                let known = row.settings.iter().map(|known| known.name).chain([MAX_NORM_CLIP]);
                return Err(Error::Argument(format!(
                    "{name} has no setting {setting:?} (for weight {weight:?}){}; its settings are {}",
                    hint(setting, known.clone()),
                    known.collect::<Vec<_>>().join(", ")
                )));
            }
        }
    }
    let maps =
        parameters.optimizer_attributes_map.keys().chain(parameters.optimizer_int_attributes_map.keys());
    let unknown_weight = maps
        .chain(parameters.initial_optimizer_state.keys())
        .find(|name| !initializers.contains(*name) && *name != super::names::SHARED_KEY);
    match unknown_weight {
        Some(strange) => Err(Error::Argument(format!(
            "the optimizer has settings for {strange:?}, which is not an initializer of the model{}",
            hint(strange, weights.iter().map(String::as_str))
        ))),
        None => Ok(()),
    }
}

/// Converts optional initializers to inputs, unless they are trained. Returns their values.
fn move_optional_inputs(
    graph: &mut ortrain_onnx::GraphProto,
    optional: &[String],
    weights: &[String],
) -> Result<Vec<(String, Tensor)>> {
    let mut defaults = Vec::new();
    for name in optional.iter().filter(|name| !weights.contains(name)) {
        let Some(at) = graph.initializer.iter().position(|tensor| tensor.name == *name) else { continue };
        let tensor = graph.initializer.remove(at);
        let empty = LoadedModel::from_proto(ModelProto::default(), Default::default());
        let value =
            Graph::tensor_from_proto(&empty, &tensor).map_err(|source| Error::graph("the model", source))?;
        graph.input.push(declare_value(name, ValueType::tensor(value.dtype(), value.dims())));
        defaults.push((name.clone(), value));
    }
    Ok(defaults)
}

/// Returns the running statistics that a training updates. Only models exported for training have them.
fn find_statistics(
    label: &str,
    forward: &mut LoadedModel,
    normalizations: (usize, usize),
    weights: &[String],
    outputs: &[String],
    loss: &str,
) -> Result<Vec<String>> {
    match normalizations {
        (0, _) => return Ok(Vec::new()),
        (_, 0) => {}
        (training, inference) => {
            return Err(Error::Argument(format!(
                "{training} BatchNormalizations of the model use statistics of the batch (training_mode 1) and {inference} do \
                 not; export it with all of them in one mode"
            )));
        }
    }
    let trained: FxHashSet<&str> = weights.iter().map(String::as_str).collect();
    let needed: Vec<&str> = outputs.iter().map(String::as_str).chain([loss]).collect();
    let statistics = updated_statistics(label, forward, BatchNormMode::Train, &trained, &needed)?;
    let statistic_names: FxHashSet<&str> = statistics.iter().map(String::as_str).collect();
    make_initializers(label, forward, &statistic_names, &statistics, &needed)?;
    Ok(statistics)
}

/// Converts weights and statistics to inputs. Returns their values.
fn move_values_to_inputs(
    label: &str,
    forward: &mut LoadedModel,
    weights: &[String],
    statistics: &[String],
) -> Result<Vec<Value>> {
    let graph = message_graph(label, &mut forward.proto)?;
    let empty = LoadedModel::from_proto(ModelProto::default(), Default::default());
    let mut values: Vec<Value> = Vec::new();
    for tensor in &graph.initializer {
        let trained = weights.contains(&tensor.name);
        if trained || statistics.contains(&tensor.name) {
            let value =
                Graph::tensor_from_proto(&empty, tensor).map_err(|source| Error::graph(label, source))?;
            values.push((tensor.name.as_str().into(), trained, value));
        }
    }
    let moved: FxHashSet<Arc<str>> = values.iter().map(|(name, ..)| name.clone()).collect();
    graph.initializer.retain(|tensor| !moved.contains(tensor.name.as_str()));
    graph.input.extend(
        values
            .iter()
            .map(|(name, _, value)| declare_value(name, ValueType::tensor(value.dtype(), value.dims()))),
    );
    Ok(values)
}

/// Checks that no value of the model has the name of a gradient.
fn check_names(typed: &Graph, weights: &[String]) -> Result<()> {
    let gradient =
        weights.iter().map(|name| format!("{name}{GRADIENT_SUFFIX}")).find(|name| typed.find(name).is_some());
    let outer = typed.inputs.iter().chain(&typed.outputs).map(|&id| typed.name_of(id));
    let conflict = gradient
        .or_else(|| outer.into_iter().find(|name| parameter_of_gradient(name).is_some()).map(Into::into));
    match conflict {
        None => Ok(()),
        Some(name) => Err(Error::Argument(format!(
            "value {name:?} of the model has a name that is reserved for gradients; give the forward model, or \
             rename the value"
        ))),
    }
}

/// Checks that the loss has one element.
fn check_scalar(typed: &Graph, loss: &str) -> Result<()> {
    let Some(id) = typed.find(loss) else { return Ok(()) };
    let ty = &typed.value(id).ty;
    let is_single = |dim: &Dim| dim.known() == Some(1);
    let fits =
        ty.dtype().is_some_and(DType::is_float) && ty.shape().is_none_or(|shape| shape.iter().all(is_single));
    match fits {
        true => Ok(()),
        false => Err(Error::Argument(format!(
            "the loss {loss:?} is {ty}, but it must be one float number; reduce it (ReduceMean)"
        ))),
    }
}

/// Returns the settings of one weight.
fn weight_settings(row: &Optimizer, parameters: &TrainingParameters, weight: &str) -> BTreeMap<String, f64> {
    // Attributes are float32, and so are the defaults of the optimizer.
    let finite = |name: &str, value: f32| match value {
        // An infinite bound means no bound.
        value if value.is_infinite() && name.starts_with("ratio_") => f64::MAX.copysign(f64::from(value)),
        value => f64::from(value),
    };
    let mut settings: BTreeMap<String, f64> = row
        .settings
        .iter()
        .map(|setting| (setting.name.to_owned(), finite(setting.name, setting.default as f32)))
        .collect();
    if row.settings.is_empty() {
        return settings;
    }
    settings.insert(MAX_NORM_CLIP.into(), 1.0);
    let floats = parameters.optimizer_attributes_map.get(weight).into_iter().flatten();
    settings.extend(floats.map(|(name, &value)| (name.clone(), finite(name, value))));
    let ints = parameters.optimizer_int_attributes_map.get(weight).into_iter().flatten();
    settings.extend(ints.map(|(name, &value)| (name.clone(), value as f64)));
    settings
}

/// Returns the optimizer, and the model of its step.
fn build_optimizer(
    parameters: &TrainingParameters,
    weights: &[String],
    values: &[Value],
    ranks: Option<&DataParallel>,
) -> Result<Option<OptimizerModels>> {
    let Some(row) = find_node_optimizer(&parameters.training_optimizer_name) else { return Ok(None) };
    let clips = parameters.enable_grad_norm_clip;
    let mut spec = OptimizerSpec::of_row(row);
    spec.mean_of_gathered = parameters.gradient_accumulation_steps > 1 || ranks.is_some();
    spec.loss_scale = parameters.mixed_precision.is_some();
    spec.tells_norm = clips;
    if clips && !row.settings.is_empty() {
        spec.settings.insert(MAX_NORM_CLIP.into(), 1.0);
    }
    for weight in weights {
        let mut settings = weight_settings(row, parameters, weight);
        settings.retain(|name, _| spec.settings.contains_key(name));
        let ranges = row.settings.iter().map(|setting| (setting.name, setting.range));
        for (name, range) in ranges.chain([(MAX_NORM_CLIP, Range::Positive)]) {
            if let Some(value) = settings.get(name).filter(|value| !range.contains(**value)) {
                return Err(Error::Argument(format!(
                    "{name} of weight {weight:?} must be {}, got {value}",
                    range.describe()
                )));
            }
        }
        for (name, values) in [("weight_decay_mode", [0.0, 1.0]), ("do_bias_correction", [0.0, 1.0])] {
            if let Some(value) = settings.get(name).filter(|value| !values.contains(value)) {
                return Err(Error::Argument(format!(
                    "{name} of weight {weight:?} must be 0 or 1, got {value}"
                )));
            }
        }
        spec.groups.push(Group { parameters: vec![weight.clone()], settings, ..Group::default() });
    }
    check_shared_settings(row, &spec)?;
    let argument = |source: ortrain_ops::OpError| Error::Argument(source.to_string());
    spec.check().map_err(argument)?;
    let mut dtypes: Vec<DType> =
        values.iter().filter(|(_, trained, _)| *trained).map(|(_, _, value)| value.dtype()).collect();
    dtypes.sort_unstable();
    dtypes.dedup();
    Ok(Some(match ranks.map(DataParallel::strategy) {
        Some(Strategy::Zero) => {
            OptimizerModels::Divided(Box::new(divided_models(row, &spec, &dtypes).map_err(argument)?))
        }
        _ => OptimizerModels::Full(Box::new(optimizer_model(&spec, &dtypes).map_err(argument)?)),
    }))
}

/// Returns the original bound: the largest number represents infinity.
fn original_bound(value: f64) -> f64 {
    if value.abs() == f64::MAX { f64::INFINITY.copysign(value) } else { value }
}

/// Checks the settings that an optimizer node shares among all weights.
fn check_shared_settings(row: &Optimizer, spec: &OptimizerSpec) -> Result<()> {
    /// Maximum number of weights of an optimizer node.
    const MAX_WEIGHTS: usize = 1024;
    if !has_shared_counter(row.name) {
        return Ok(());
    }
    if spec.groups.len() > MAX_WEIGHTS {
        return Err(Error::State(format!(
            "{} updates at most {MAX_WEIGHTS} weights, and {} are trained",
            row.name,
            spec.groups.len()
        )));
    }
    for name in ["ratio_min", "ratio_max", "do_bias_correction"] {
        let mut values =
            spec.groups.iter().filter_map(|group| Some((&group.parameters, *group.settings.get(name)?)));
        let Some((_, first)) = values.next() else { continue };
        if let Some((other, value)) = values.find(|(_, value)| value.to_bits() != first.to_bits()) {
            return Err(Error::Argument(format!(
                "{name} of {} must be the same for all weights, but it is {} for one and {} for {:?}",
                row.name,
                original_bound(first),
                original_bound(value),
                other[0]
            )));
        }
    }
    Ok(())
}

/// Initializers that are inputs of a graph.
struct GraphConstants<'a> {
    /// Weights and running statistics.
    values: &'a [Value],
    /// Optional inputs.
    defaults: &'a [(String, Tensor)],
}

/// Writes the requested model files.
fn write_model_files(
    label: &str,
    parameters: &TrainingParameters,
    forward: &ModelProto,
    transformed: Option<ModelProto>,
    (graph, opset): (&Graph, i64),
    &GraphConstants { values, defaults }: &GraphConstants<'_>,
    (targets, gradients): (&[ValueId], &[ValueId]),
) -> Result<()> {
    // In a training graph, only Dropout reads the input.
    let is_read = |id: ValueId| graph.nodes.iter().any(|node| node.present_inputs().any(|input| input == id));
    let unread = defaults.iter().map(|(name, _)| name.as_str()).filter(|name| *name == TRAINING_MODE);
    let unread = unread.filter(|name| graph.find(name).is_some_and(|id| !is_read(id))).last();
    let constants = || {
        let values = values.iter().map(|(name, _, value)| (&**name, value));
        let defaults = defaults.iter().map(|(name, value)| (name.as_str(), value));
        values.chain(defaults.filter(|(name, _)| Some(*name) != unread))
    };
    if let (Some(path), Some(mut proto)) = (&parameters.model_after_graph_transforms_path, transformed) {
        let graph = message_graph(label, &mut proto)?;
        let initializer_names: FxHashSet<String> =
            graph.initializer.iter().map(|tensor| tensor.name.clone()).collect();
        let missing = constants().filter(|(name, _)| !initializer_names.contains(*name));
        graph.initializer.extend(missing.map(|(name, value)| tensor_to_proto(name, value)));
        graph.input.retain(|info| Some(info.name.as_str()) != unread);
        write_model_file(path, &proto)?;
    }
    if parameters.model_with_gradient_graph_path.is_none()
        && parameters.model_with_training_graph_path.is_none()
    {
        return Ok(());
    }
    let mut graph = graph.clone();
    for (name, value) in constants() {
        if let Some(id) = graph.find(name) {
            graph.value_mut(id).constant = Some(value.clone());
            graph.inputs.retain(|&input| input != id);
        }
    }
    if let Some(id) = unread.and_then(|name| graph.find(name)) {
        graph.inputs.retain(|&input| input != id);
    }
    if parameters.set_gradients_as_graph_outputs {
        graph.outputs.extend(gradients);
    }
    if let Some(path) = &parameters.model_with_gradient_graph_path {
        write_model_file(path, &training_message(label, forward, graph.clone(), opset)?)?;
    }
    if let Some(path) = &parameters.model_with_training_graph_path {
        let row = find_node_optimizer(&parameters.training_optimizer_name);
        let pairs: Vec<(ValueId, ValueId)> = targets.iter().copied().zip(gradients.iter().copied()).collect();
        let settings = |row: &Optimizer| {
            targets.iter().map(|&id| weight_settings(row, parameters, graph.name_of(id))).collect::<Vec<_>>()
        };
        let updates = Updates {
            optimizer: row.map(|row| row.name),
            rate: parameters.lr_params_feed_name.clone(),
            settings: row.map(settings).unwrap_or_default(),
            norm: parameters.enable_grad_norm_clip,
            copies: parameters.mixed_precision,
            accumulated: parameters.gradient_accumulation_steps,
        };
        append_updates(&mut graph, &pairs, &updates)
            .map_err(|source| Error::Argument(format!("the training graph cannot be written: {source}")))?;
        write_model_file(path, &training_message(label, forward, graph, opset)?)?;
    }
    Ok(())
}

/// Writes a model. If it exceeds the limit of one file, its weights are stored in a file beside it.
fn write_model_file(path: &Path, proto: &ModelProto) -> Result<()> {
    let external = ExternalData::none();
    let mut data = path.as_os_str().to_owned();
    data.push(".data");
    let data = DataFile {
        path: Path::new(&data),
        above: LARGEST_MESSAGE as u64,
        from: EXTERNAL_FROM,
        is_appended: false,
    };
    let staged = stage(&[ToWrite { model: proto, external: &external, path }], &data)?;
    Ok(staged.persist()?)
}
