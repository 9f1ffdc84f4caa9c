//! Operator knowledge for training artifacts: losses, optimizer models, the difference between training and inference,
//! and gradient accumulation.
//!
//! Generated names follow onnxruntime-training's `generate_artifacts`: `onnx::<token>::<n>`, where `n` counts from 1
//! for each set of artifacts ([`NameGenerator`]).

use ortrain_graph::{Attrs, DType, Graph, Node, Tensor, ValueId, ValueType, listed, tensor_to_proto};
use ortrain_onnx::{
    AttributeProto, AttributeType, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, ValueInfoProto,
};

use crate::class::Class;
use crate::optimizers::{self, OptimizerSpec};
use crate::registry::class_of;
use crate::{Error, OpError, build};

mod adapters;
mod arithmetic;
mod batch;
mod class_axis;
mod classifier;
mod head;
mod losses;
mod master_weights;
mod modes;
mod one_graph;
mod parameters;
mod quantized_tensors;
mod quantized_weights;
mod scores;
mod shared_initializers;
mod stop_gradients;
mod training_mode;
mod updates;

pub use crate::passes::gradient_stops::find_stop;
pub use adapters::{
    AdaptedLayer, AdapterForm, AdapterTarget, Delta, FactorKind, FactorName, FactorShapes, LayerKind,
    MergedWeight, QuantizedWeight, RowAxis, RowForm, WeightFormat, adapted_layers, adapter_stops,
    add_adapter, add_delta, add_row_columns, factor_name, find_adapter_targets, find_head_target,
    has_adapters, is_adapter_name, layer_bias, merge_weight, quantize_weight, remove_adapter, remove_groups,
    row_lengths, scale_name, split_fused_products, weigh_rows, weight_matrix, weight_readers,
};
pub use batch::{FixedBatch, OpenShape, batch_shape_nodes, find_fixed_batches, first_slice_nodes};
pub use class_axis::{classes_last_note, is_class_axis_open, label_readings, with_classes_last};
pub use classifier::{common_source, default_scores, replace_outputs_by_tensors, starts_with_label};
pub use head::{Head, find_head};
pub use losses::{
    Loss, LossSettings, LossTerm, Reduction, append_loss, append_placeholder_loss, append_sum,
    default_target, rename_value,
};
pub(crate) use master_weights::master_weight_node;
pub use master_weights::{add_master_weights, is_narrow, narrow_weights_note, remove_master_weights};
pub use modes::{
    BatchNormMode, RunningStatistic, running_statistics, set_inference_mode, set_training_mode,
    use_batch_statistics,
};
pub use one_graph::{
    ACCUMULATED, ALL_FINITE, GRADIENT_NORM, LOSS_SCALE, Updates, append_scaled_loss, default_trained,
    find_node_optimizer, has_shared_counter,
};
pub use parameters::{Confidence, ConstantUses, Judgement, ParameterRole, about_guesses};
pub use quantized_tensors::{QuantizedTensor, WeightNumbers, quantized_tensors};
pub use quantized_weights::{add_float_weights, has_quantized_inputs, remove_float_weights};
pub use scores::{
    Activation, check_scores, class_axis_of_tokens, find_scores, label_error, loss_problems,
    probabilities_note,
};
pub use shared_initializers::separate_initializers;
pub use stop_gradients::{StopCandidate, stop_candidates, stop_gradients, stopped_values};
pub use training_mode::{
    TRAINING_MODE, choose_statistics, count_batch_norm_modes, free_training_mode, share_training_mode,
};
pub use updates::append_updates;

const MICROSOFT: &str = "com.microsoft";
/// Operator at which a graph yields to its caller.
const YIELD: &str = "YieldOp";
/// Operator that scales gradients so that their norm is at most an attribute of the node.
const CLIP: &str = "InplaceClipGradNorm";
/// IR version of optimizer models, the version of onnxruntime-training 1.19.2.
const OPTIMIZER_IR_VERSION: i64 = 10;

/// Kind of optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OptimizerKind {
    /// Adam with decoupled weight decay.
    AdamW,
    /// Plain stochastic gradient descent.
    SGD,
}

/// Formula of a step of [`OptimizerKind::AdamW`]. `m` and `v` are the moments after step `t`, `b1` and `b2` their decay
/// rates, `w` is a weight and `d` the weight decay:
///
/// ```text
/// OnnxRuntime:  w -= rate * sqrt(1 - b2^t) / (1 - b1^t) * m / (sqrt(v) + epsilon);        then w -= rate * d * w
/// PyTorch:      w -= rate * d * w;  then w -= rate / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + epsilon)
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AdamFormula {
    /// Formula of onnxruntime-training, and of transformers before 4.0: epsilon is added before the correction of the
    /// second moment, and weights decay after the step (`adam_mode` 1 of `AdamWOptimizer`).
    #[default]
    OnnxRuntime,
    /// Formula of `torch.optim.AdamW`: epsilon is added after the correction, and weights decay before the step
    /// (`adam_mode` 0). This formula requires the correction.
    PyTorch,
}

impl AdamFormula {
    /// Returns the attribute of the operator.
    fn mode(self) -> i64 {
        match self {
            AdamFormula::OnnxRuntime => 1,
            AdamFormula::PyTorch => 0,
        }
    }

    /// Returns the name in the Python API.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            AdamFormula::OnnxRuntime => "onnxruntime",
            AdamFormula::PyTorch => "pytorch",
        }
    }

    /// Returns the formula of a name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<AdamFormula> {
        [AdamFormula::OnnxRuntime, AdamFormula::PyTorch].into_iter().find(|known| known.name() == name)
    }
}

/// Settings of an optimizer. The defaults are the defaults of onnxruntime-training's blocks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OptimizerSettings {
    /// Decay rates of the two moments of [`OptimizerKind::AdamW`].
    pub betas: (f32, f32),
    /// Term that is added to the root of the second moment.
    pub epsilon: f32,
    /// Weight decay.
    pub weight_decay: f32,
    /// True if the moments are corrected for their start at zero.
    pub bias_correction: bool,
    /// Formula of [`OptimizerKind::AdamW`].
    pub formula: AdamFormula,
    /// Maximum norm of the gradients of all parameters. Gradients with a larger norm are scaled down.
    pub max_norm: Option<f32>,
}

impl Default for OptimizerSettings {
    fn default() -> OptimizerSettings {
        OptimizerSettings {
            betas: (0.9, 0.999),
            epsilon: 1e-6,
            weight_decay: 0.0,
            bias_correction: true,
            formula: AdamFormula::OnnxRuntime,
            max_norm: None,
        }
    }
}

/// Generator of names. The same calls give the same names, independently of other sets of artifacts.
#[derive(Debug, Default)]
pub struct NameGenerator(u64);

impl NameGenerator {
    /// Creates a generator that starts at 1.
    #[must_use]
    pub fn new() -> NameGenerator {
        NameGenerator::default()
    }

    /// Creates a generator that continues after `last`.
    #[must_use]
    pub fn starting_after(last: u64) -> NameGenerator {
        NameGenerator(last)
    }

    /// Returns the last number; 0 before the first.
    #[must_use]
    pub fn last(&self) -> u64 {
        self.0
    }

    fn next(&mut self, token: &str) -> String {
        self.0 += 1;
        format!("onnx::{token}::{}", self.0)
    }
}

fn attribute(name: &str, kind: AttributeType) -> AttributeProto {
    let mut attribute = AttributeProto { name: name.to_owned(), ..AttributeProto::default() };
    attribute.set_type(kind);
    attribute
}

fn int_attribute(name: &str, value: i64) -> AttributeProto {
    AttributeProto { i: value, ..attribute(name, AttributeType::Int) }
}

fn ints_attribute(name: &str, values: Vec<i64>) -> AttributeProto {
    AttributeProto { ints: values, ..attribute(name, AttributeType::Ints) }
}

fn float_attribute(name: &str, value: f32) -> AttributeProto {
    AttributeProto { f: value, ..attribute(name, AttributeType::Float) }
}

fn text_attribute(name: &str, value: &'static str) -> AttributeProto {
    AttributeProto { s: value.as_bytes().into(), ..attribute(name, AttributeType::String) }
}

/// Builds the declaration of a value of a type.
fn declare_value(name: &str, ty: &ValueType) -> ValueInfoProto {
    let mut graph = Graph::new("");
    let id = graph.add_value(name, ty.clone());
    graph.value_info(id)
}

/// Appender of nodes to a graph message.
struct GraphAppender<'a> {
    graph: &'a mut GraphProto,
    names: &'a mut NameGenerator,
}

impl GraphAppender<'_> {
    /// Appends a node with one output. The name of the output is generated before the name of the node.
    fn node(&mut self, op: &str, inputs: &[&str], attributes: Vec<AttributeProto>) -> String {
        let output = self.names.next(&format!("{}_output", op.to_lowercase()));
        self.append_node("", op, inputs, vec![output.clone()], attributes);
        output
    }

    fn append_node(
        &mut self,
        domain: &str,
        op: &str,
        inputs: &[&str],
        outputs: Vec<String>,
        attributes: Vec<AttributeProto>,
    ) {
        let name = self.names.next(op);
        self.graph.node.push(NodeProto {
            name,
            op_type: op.to_owned(),
            domain: domain.to_owned(),
            input: inputs.iter().map(|&input| input.to_owned()).collect(),
            output: outputs,
            attribute: attributes,
            ..NodeProto::default()
        });
    }

    fn constant(&mut self, token: &str, tensor: &Tensor) -> String {
        let name = self.names.next(token);
        self.graph.initializer.push(tensor_to_proto(&name, tensor));
        name
    }
}

/// Gradient accumulation of one parameter.
#[derive(Clone, Debug)]
pub struct Accumulation<'a> {
    /// Name of the node.
    pub node: String,
    /// Input that holds the accumulated gradient.
    pub buffer: ValueId,
    /// Gradient to add.
    pub gradient: ValueId,
    /// Name of the output that signals completion.
    pub updated: &'a str,
}

/// Appends the nodes that accumulate gradients in place. `reset` is the flag that makes them overwrite. Returns their
/// outputs.
pub fn append_accumulators(
    graph: &mut Graph,
    reset: ValueId,
    gradients: &[Accumulation<'_>],
) -> Vec<ValueId> {
    let append = |item: &Accumulation<'_>| {
        let updated = graph.add_value(item.updated, ValueType::tensor(DType::Bool, &[1]));
        let inputs = [Some(item.buffer), Some(item.gradient), Some(reset)];
        let mut node = Node::new(MICROSOFT, "InPlaceAccumulatorV2", &inputs, &[Some(updated)], Attrs::new());
        node.name = item.node.as_str().into();
        graph.nodes.push(node);
        updated
    };
    gradients.iter().map(append).collect()
}

/// Appends the point at which a graph yields its outputs to its caller, who returns the gradients of the outputs at
/// `differentiable`. These outputs must be floats. Returns them, each with its gradient, `<output>_grad`.
pub fn append_yield(graph: &mut Graph, differentiable: &[usize]) -> Vec<(ValueId, ValueId)> {
    let outputs = graph.outputs.clone();
    let mut seeds = Vec::with_capacity(differentiable.len());
    for &k in differentiable {
        let name = format!("{}_grad", graph.name_of(outputs[k]));
        let ty = graph.value(outputs[k]).ty.clone();
        seeds.push((outputs[k], graph.add_value(&name, ty)));
    }
    let remaining = (0..outputs.len()).filter(|k| !differentiable.contains(k)).map(|k| k as i64);
    let non_differentiable: Vec<i64> = remaining.collect();
    let full_shape: Vec<i64> = differentiable.iter().map(|&k| k as i64).collect();
    let mut attrs = Attrs::new().with("full_shape_outputs", full_shape);
    if !non_differentiable.is_empty() {
        attrs = attrs.with("non_differentiable_outputs", non_differentiable);
    }
    let inputs: Vec<Option<ValueId>> = outputs.into_iter().map(Some).collect();
    let gradients: Vec<Option<ValueId>> = seeds.iter().map(|&(_, gradient)| Some(gradient)).collect();
    let mut node = Node::new(MICROSOFT, YIELD, &inputs, &gradients, attrs);
    node.name = YIELD.into();
    graph.nodes.push(node);
    seeds
}

/// Returns the values that a graph yields to its caller, and the positions of the differentiable ones.
#[must_use]
pub fn find_yield(graph: &Graph) -> Option<(Vec<ValueId>, Vec<usize>)> {
    let node = graph.nodes.iter().find(|node| &*node.domain == MICROSOFT && &*node.op == YIELD)?;
    let non_differentiable = node.attrs.ints("non_differentiable_outputs").ok().flatten().unwrap_or_default();
    let inputs: Vec<ValueId> = node.present_inputs().collect();
    let differentiable = (0..inputs.len()).filter(|&k| !non_differentiable.contains(&(k as i64))).collect();
    Some((inputs, differentiable))
}

/// Builds the message of an optimizer model.
#[must_use]
pub fn optimizer_model(
    kind: OptimizerKind,
    settings: &OptimizerSettings,
    names: &mut NameGenerator,
    opset: i64,
) -> ModelProto {
    let sequence = ValueType::Sequence(DType::F32);
    let mut graph = GraphProto { name: "graph".into(), ..GraphProto::default() };
    let scalar = |name: &str, dtype| declare_value(name, &ValueType::tensor(dtype, &[1]));
    graph.input = vec![scalar("learning_rate", DType::F32), scalar("step", DType::I64)];
    let sequences = ["params", "gradients", "first_order_moments", "second_order_moments"];
    let moments = match kind {
        OptimizerKind::AdamW => 2,
        OptimizerKind::SGD => 1,
    };
    graph.input.extend(sequences[..2 + moments].iter().map(|name| declare_value(name, &sequence)));

    let mut append = GraphAppender { graph: &mut graph, names };
    let gradients = match settings.max_norm {
        None => "gradients".to_owned(),
        Some(max_norm) => {
            let clipped = append.names.next("clip_grad_norm_output");
            let outputs = vec![clipped.clone()];
            append.append_node(
                MICROSOFT,
                CLIP,
                &["gradients"],
                outputs,
                vec![float_attribute("max_norm", max_norm)],
            );
            append.graph.value_info.push(declare_value(&clipped, &sequence));
            clipped
        }
    };
    let updated = match kind {
        OptimizerKind::AdamW => {
            let updated = append.names.next("adamw.updated_flag");
            let inputs = [
                "learning_rate",
                "step",
                "params",
                &gradients,
                "first_order_moments",
                "second_order_moments",
            ];
            let attributes = vec![
                int_attribute("adam_mode", settings.formula.mode()),
                float_attribute("alpha", settings.betas.0),
                float_attribute("beta", settings.betas.1),
                int_attribute("correct_bias", i64::from(settings.bias_correction)),
                float_attribute("epsilon", settings.epsilon),
                float_attribute("weight_decay", settings.weight_decay),
            ];
            append.append_node(MICROSOFT, "AdamWOptimizer", &inputs, vec![updated.clone()], attributes);
            updated
        }
        OptimizerKind::SGD => {
            let updated = append.names.next("update_completed");
            let inputs = ["learning_rate", "params", &gradients];
            append.append_node(MICROSOFT, "SGDOptimizerV2", &inputs, vec![updated.clone()], vec![]);
            updated
        }
    };
    graph.output = vec![scalar(&updated, DType::Bool)];
    let import = |domain: &str, version| OperatorSetIdProto { domain: domain.to_owned(), version };
    ModelProto {
        ir_version: OPTIMIZER_IR_VERSION,
        producer_name: "orttraining".into(),
        opset_import: vec![import(MICROSOFT, 1), import("", opset)],
        graph: Some(graph),
        ..ModelProto::default()
    }
}

fn is_sequence(graph: &Graph, id: ValueId) -> bool {
    matches!(graph.value(id).ty, ValueType::Sequence(_))
}

/// Returns true if nodes of a graph or of its subgraphs use sequences.
fn uses_sequences(graph: &Graph) -> bool {
    graph.nodes.iter().any(|node| {
        node.present_inputs().chain(node.present_outputs()).any(|id| is_sequence(graph, id))
            || Graph::subgraphs(node).any(|(_, inner)| uses_sequences(inner))
    })
}

/// Checks that sequences of tensors are used in a supported way: changed in place, and by only one node.
///
/// # Errors
/// Returns an error for the first node that creates a sequence, changes a sequence with other uses, or has one in a
/// subgraph.
pub fn check_sequences(graph: &Graph) -> Result<(), Error> {
    for node in &graph.nodes {
        let fail = |text: String| Err(Error::at(graph, node, OpError::unsupported(text)));
        if Graph::subgraphs(node).any(|(_, inner)| uses_sequences(inner)) {
            return fail("sequences of tensors cannot be used in subgraphs".into());
        }
        if !node.present_inputs().chain(node.present_outputs()).any(|id| is_sequence(graph, id)) {
            continue;
        }
        let op = build(graph, node)?;
        for (port, output) in node.outputs.iter().enumerate() {
            let Some(id) = output.filter(|&id| is_sequence(graph, id)) else { continue };
            if !op.in_place_outputs().iter().any(|&(known, _)| known == port) {
                return fail(format!(
                    "it creates the sequence {:?}, but sequences of tensors are supported only as inputs and \
                     in-place updates",
                    graph.name_of(id)
                ));
            }
        }
        for &(_, port) in op.in_place_outputs() {
            let Some(id) = node.inputs.get(port).copied().flatten().filter(|&id| is_sequence(graph, id))
            else {
                continue;
            };
            let by_nodes =
                graph.nodes.iter().flat_map(Node::present_inputs).filter(|&input| input == id).count();
            if by_nodes > 1 || graph.outputs.contains(&id) {
                return fail(format!(
                    "it changes the sequence {:?} in place, which is also used elsewhere",
                    graph.name_of(id)
                ));
            }
        }
    }
    Ok(())
}

/// Returns the graph input that stores a sequence: the sequence itself, or the input that nodes changed in place.
///
/// # Errors
/// Returns an error if a node between them is invalid.
pub fn sequence_input(graph: &Graph, mut sequence: ValueId) -> Result<Option<ValueId>, Error> {
    while !graph.inputs.contains(&sequence) {
        let makes = |node: &&Node| node.present_outputs().any(|output| output == sequence);
        let Some(node) = graph.nodes.iter().find(makes) else { return Ok(None) };
        let op = build(graph, node)?;
        let port = node.outputs.iter().position(|output| *output == Some(sequence));
        let before = op.in_place_outputs().iter().find(|(output, _)| Some(*output) == port);
        match before.and_then(|&(_, input)| node.inputs.get(input).copied().flatten()) {
            Some(input) => sequence = input,
            None => return Ok(None),
        }
    }
    Ok(Some(sequence))
}

/// Returns true for an optimizer model that clips the gradients by their norm.
#[must_use]
pub fn clips_gradients(graph: &Graph) -> bool {
    graph.nodes.iter().any(|node| class_of(node) == Class::GradientClip)
}

/// Returns true for a graph with at least one optimizer of ONNX Runtime.
#[must_use]
pub fn uses_onnxruntime_optimizer(graph: &Graph) -> bool {
    graph.nodes.iter().any(|node| matches!(class_of(node), Class::OptimizerStep { .. }))
}

/// Returns the number of moments per parameter of the optimizer of an optimizer model.
///
/// # Errors
/// Returns an error if the graph does not have exactly one optimizer.
pub fn moment_count(graph: &Graph) -> Result<usize, Error> {
    let optimizers: Vec<(&Node, usize)> = graph
        .nodes
        .iter()
        .filter_map(|node| match class_of(node) {
            Class::OptimizerStep { moments } => Some((node, moments)),
            _ => None,
        })
        .collect();
    match optimizers.as_slice() {
        [(_, moments)] => Ok(*moments),
        [] => Err(Error::Graph(
            "an optimizer model needs a node that updates the parameters (AdamWOptimizer or SGDOptimizerV2), but it \
             has none"
                .into(),
        )),
        many => {
            let nodes: Vec<String> = many.iter().map(|(node, _)| graph.node_label(node)).collect();
            Err(Error::Graph(format!("an optimizer model needs one optimizer, but it has {}", listed(&nodes))))
        }
    }
}

/// Returns the specification of the optimizer of a model with one of ONNX Runtime's optimizers, from the attributes of
/// its nodes.
///
/// # Errors
/// Returns an error if the graph does not have exactly one optimizer.
pub fn onnxruntime_optimizer(graph: &Graph) -> Result<OptimizerSpec, Error> {
    moment_count(graph)?;
    let graph_error = |source: OpError| Error::Graph(source.to_string());
    let float = |node: &Node, name: &str, default: f32| {
        let value = node.attrs.float(name).ok().flatten();
        // The shortest decimal number that rounds to the attribute is the intended value.
        value.unwrap_or(default).to_string().parse::<f64>().unwrap_or(f64::NAN)
    };
    let find = |class: Class| graph.nodes.iter().find(|node| class_of(node) == class);
    let mut spec = match find(Class::OptimizerStep { moments: 2 }) {
        None => OptimizerSpec::new("SGD").map_err(graph_error)?,
        Some(node) => {
            let mut spec = OptimizerSpec::new("AdamW").map_err(graph_error)?;
            let int = |name: &str, default| node.attrs.int(name).ok().flatten().unwrap_or(default);
            spec.flags.insert("onnxruntime".into(), int("adam_mode", 0) == 1);
            spec.flags.insert("bias_correction".into(), int("correct_bias", 1) != 0);
            for (setting, name, default) in [
                ("beta1", "alpha", 0.9),
                ("beta2", "beta", 0.999),
                ("eps", "epsilon", 1e-8),
                ("weight_decay", "weight_decay", 1e-2),
            ] {
                spec.settings.insert(setting.into(), float(node, name, default));
            }
            spec
        }
    };
    spec.max_norm = find(Class::GradientClip).map(|node| float(node, "max_norm", 1.0));
    Ok(spec)
}

/// Returns the settings of the optimizer of ONNX Runtime that is equivalent to a specification, if any.
#[must_use]
pub fn as_onnxruntime_optimizer(spec: &OptimizerSpec) -> Option<(OptimizerKind, OptimizerSettings)> {
    let plain = OptimizerSpec::new(&spec.optimizer).ok()?;
    // Options are settings that the row does not have.
    if !spec.groups.is_empty() || spec.mean_of_gathered || !spec.settings.keys().eq(plain.settings.keys()) {
        return None;
    }
    let flag = |name: &str| spec.flags.get(name).copied().unwrap_or(false);
    let setting = |name: &str| spec.settings.get(name).copied().unwrap_or(0.0);
    let max_norm = spec.max_norm.map(|norm| norm as f32);
    match spec.optimizer.as_str() {
        "SGD" => {
            let plain = setting("momentum") == 0.0 && setting("weight_decay") == 0.0;
            plain
                .then(|| (OptimizerKind::SGD, OptimizerSettings { max_norm, ..OptimizerSettings::default() }))
        }
        "AdamW" => {
            let formula = if flag("onnxruntime") { AdamFormula::OnnxRuntime } else { AdamFormula::PyTorch };
            let corrected = flag("bias_correction");
            let has_form = !flag("amsgrad") && (corrected || formula == AdamFormula::OnnxRuntime);
            let settings = OptimizerSettings {
                betas: (setting("beta1") as f32, setting("beta2") as f32),
                epsilon: setting("eps") as f32,
                weight_decay: setting("weight_decay") as f32,
                bias_correction: corrected,
                max_norm,
                formula,
            };
            has_form.then_some((OptimizerKind::AdamW, settings))
        }
        _ => None,
    }
}

/// Builds the optimizer model of a specification, for trained parameters of these element types. It uses an optimizer
/// of ONNX Runtime if there is an equivalent one, otherwise plain ONNX.
///
/// # Errors
/// Returns an error if the specification does not fit its optimizer ([`OptimizerSpec::check`]).
pub fn optimizer_model_of_spec(
    spec: &OptimizerSpec,
    dtypes: &[DType],
    names: &mut NameGenerator,
    opset: i64,
) -> Result<ModelProto, OpError> {
    let spec = spec.clone().with_explicit_groups()?;
    match as_onnxruntime_optimizer(&spec) {
        None => optimizers::optimizer_model(&spec, dtypes),
        Some((kind, settings)) => {
            let mut model = optimizer_model(kind, &settings, names, opset);
            model.metadata_props.push(optimizers::description_entry(&spec));
            Ok(model)
        }
    }
}

#[cfg(test)]
mod tests {
    use ortrain_graph::Dim;

    use super::*;

    fn scores(dims: &[Dim]) -> ValueType {
        ValueType::Tensor(DType::F32, Some(dims.iter().cloned().collect()))
    }

    #[test]
    fn names_continue_from_loss_to_optimizer() {
        let mut graph = GraphProto::default();
        let mut names = NameGenerator::new();
        let ty = scores(&[Dim::symbol("batch"), 5.into()]);
        let loss = append_loss(
            &mut graph,
            &mut names,
            Loss::CrossEntropyLoss,
            &LossSettings::default(),
            "y",
            &ty,
            None,
            17,
        )
        .expect("it exists");
        assert_eq!(loss, "onnx::loss::2");
        let settings = OptimizerSettings { max_norm: Some(1.0), ..OptimizerSettings::default() };
        let model = optimizer_model(OptimizerKind::AdamW, &settings, &mut names, 17);
        let graph = model.graph.expect("it has a graph");
        assert_eq!(graph.node[0].output, ["onnx::clip_grad_norm_output::5"]);
        assert_eq!(graph.output[0].name, "onnx::adamw.updated_flag::7");
    }

    #[test]
    fn an_optimizer_model_has_one_optimizer() {
        let mut graph = Graph::new("");
        assert!(moment_count(&graph).is_err());
        graph.nodes.push(Node::new(MICROSOFT, "SGDOptimizerV2", &[], &[], Attrs::new()));
        assert_eq!(moment_count(&graph).expect("there is one"), 1);
        graph.nodes.push(Node::new(MICROSOFT, "AdamWOptimizer", &[], &[], Attrs::new()));
        let error = moment_count(&graph).expect_err("there are two").to_string();
        assert!(error.starts_with("an optimizer model needs one optimizer, but it has"), "{error}");
    }
}
