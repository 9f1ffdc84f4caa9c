//! Frozen records that calls return to Python. The classes of the package with the same fields document them.

use std::collections::BTreeMap;

use ortrain::{DType, Dim, Gradient, MemoryUse, ModelMeta, PlaneLayout, Runs, ValueInfo};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::value::type_name;

/// Size of an axis: a number, or the name of an unknown size.
#[derive(Clone, FromPyObject, IntoPyObject)]
pub(crate) enum Size {
    Known(usize),
    Symbol(String),
}

/// Input or output of a model. The type has the notation of onnxruntime.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct ValueDescription {
    name: String,
    r#type: String,
    shape: Vec<Size>,
}

#[pymethods]
impl ValueDescription {
    #[new]
    fn new(name: String, r#type: String, shape: Vec<Size>) -> ValueDescription {
        ValueDescription { name, r#type, shape }
    }
}

impl From<&ValueInfo> for ValueDescription {
    fn from(info: &ValueInfo) -> ValueDescription {
        let size = |dim: &Dim| match dim {
            Dim::Known(size) => Size::Known(*size),
            Dim::Symbol(name) => Size::Symbol(name.to_string()),
        };
        let element = type_name(info.dtype);
        let r#type = if info.sequence { format!("seq({element})") } else { element };
        let shape = info.shape.iter().flatten().map(size).collect();
        ValueDescription { name: info.name.clone(), r#type, shape }
    }
}

/// Describes the inputs or outputs of a model.
pub(crate) fn describe_values(infos: &[ValueInfo]) -> Vec<ValueDescription> {
    infos.iter().map(ValueDescription::from).collect()
}

/// Metadata of a model.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct ModelMetadata {
    producer_name: String,
    graph_name: String,
    domain: String,
    description: String,
    graph_description: String,
    version: i64,
    custom_metadata_map: BTreeMap<String, String>,
}

impl From<ModelMeta> for ModelMetadata {
    fn from(meta: ModelMeta) -> ModelMetadata {
        let ModelMeta { producer_name, graph_name, domain, description, graph_description, version, custom } =
            meta;
        ModelMetadata {
            producer_name,
            graph_name,
            domain,
            description,
            graph_description,
            version,
            custom_metadata_map: custom,
        }
    }
}

/// Name of a precision, and the unit that multiplies bfloat16.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct Precision {
    pub(crate) name: &'static str,
    pub(crate) bf16_unit: Option<&'static str>,
}

/// Memory of a module and of the optimizer of its state, in bytes.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct MemoryBytes {
    parameters: usize,
    gradients: usize,
    moments: usize,
    work: usize,
    scratch: usize,
}

impl From<MemoryUse> for MemoryBytes {
    fn from(memory: MemoryUse) -> MemoryBytes {
        let MemoryUse { parameters, gradients, moments, work, scratch } = memory;
        MemoryBytes { parameters, gradients, moments, work, scratch }
    }
}

/// Result of a step of an optimizer: the reason if the step is probably a mistake, and the norm of the gradients if they
/// are clipped.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct Update {
    pub(crate) warning: Option<&'static str>,
    pub(crate) norm: Option<f64>,
}

/// Name, norm and gradient norm of a trained parameter.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct ParameterNorms {
    name: String,
    parameter: f64,
    gradient: f64,
}

impl From<ortrain::Norms> for ParameterNorms {
    fn from(norms: ortrain::Norms) -> ParameterNorms {
        ParameterNorms { name: norms.name, parameter: norms.parameter, gradient: norms.gradient }
    }
}

/// Quantized tensor of a model.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct QuantizedTensor {
    name: String,
    node: String,
    dtype: String,
    axis: Option<i64>,
    block_size: Option<i64>,
    shape: Vec<usize>,
    scale: Vec<f64>,
    zero_point: Vec<f64>,
    low: Vec<f64>,
    high: Vec<f64>,
    smallest: Option<f64>,
    largest: Option<f64>,
    clipped: Option<f64>,
}

impl From<ortrain::QuantizedTensor> for QuantizedTensor {
    fn from(tensor: ortrain::QuantizedTensor) -> QuantizedTensor {
        let (low, high) = tensor.range.into_iter().unzip();
        let weight = tensor.weight;
        QuantizedTensor {
            name: tensor.name,
            node: tensor.node,
            dtype: tensor.dtype.to_string(),
            axis: tensor.axis,
            block_size: tensor.block_size,
            shape: tensor.scale.dims().to_vec(),
            scale: tensor.scale.to_f64(),
            zero_point: tensor.zero_point,
            low,
            high,
            smallest: weight.map(|weight| weight.smallest),
            largest: weight.map(|weight| weight.largest),
            clipped: weight.map(|weight| weight.clipped),
        }
    }
}

/// Names of loaded, missing and unexpected parameters.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct LoadReport {
    loaded: Vec<String>,
    missing: Vec<String>,
    unexpected: Vec<String>,
}

impl From<ortrain::LoadReport> for LoadReport {
    fn from(report: ortrain::LoadReport) -> LoadReport {
        LoadReport { loaded: report.loaded, missing: report.missing, unexpected: report.unexpected }
    }
}

/// Position of a tensor in a plane, in elements.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct PlaneTensor {
    name: String,
    shape: Vec<usize>,
    offset: usize,
}

/// Tensors of one element type in one memory.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct Plane {
    dtype: &'static str,
    size: usize,
    tensors: Vec<PlaneTensor>,
}

impl From<&PlaneLayout> for Plane {
    fn from(layout: &PlaneLayout) -> Plane {
        let element = layout.dtype.size();
        let tensors = layout.tensors.iter().map(|tensor| PlaneTensor {
            name: tensor.name.to_string(),
            shape: tensor.dims.clone(),
            offset: tensor.offset / element,
        });
        Plane { dtype: layout.dtype.name(), size: layout.bytes / element, tensors: tensors.collect() }
    }
}

/// Planes of trained and of frozen parameters.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct StateLayout {
    pub(crate) trainable: Vec<Plane>,
    pub(crate) frozen: Vec<Plane>,
}

/// Profile of one instruction. Times are in seconds.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct Instruction {
    node: String,
    kind: &'static str,
    shapes: String,
    kernel: String,
    calls: usize,
    total: f64,
    min: f64,
    median: f64,
    flops: u64,
    bytes: u64,
    bound: f64,
}

impl From<&ortrain::InstructionProfile> for Instruction {
    fn from(profile: &ortrain::InstructionProfile) -> Instruction {
        let [total, min, median, bound] =
            [profile.total, profile.min, profile.median, profile.bound].map(|time| time.as_secs_f64());
        Instruction {
            node: profile.node.clone(),
            kind: profile.kind,
            shapes: profile.shapes.clone(),
            kernel: profile.kernel.clone(),
            calls: profile.calls,
            total,
            min,
            median,
            flops: profile.flops,
            bytes: profile.bytes,
            bound,
        }
    }
}

/// Time of the sums of gradients over ranks, in seconds.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct CommunicationTime {
    pub(crate) updates: u64,
    pub(crate) total: f64,
    pub(crate) waited: f64,
}

/// A device of this machine.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct DeviceInfo {
    name: String,
    kind: &'static str,
    description: String,
    driver: String,
    memory: Option<u64>,
    plane_bytes: Option<u64>,
    tensor_bytes: Option<u64>,
}

impl From<ortrain::DeviceInfo> for DeviceInfo {
    fn from(device: ortrain::DeviceInfo) -> DeviceInfo {
        let ortrain::DeviceInfo {
            name, kind, description, driver, memory, plane_bytes, tensor_bytes, ..
        } = device;
        DeviceInfo { name, kind, description, driver, memory, plane_bytes, tensor_bytes }
    }
}

/// An operator with its execution, its gradient and the types of its inputs.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct OperatorInfo {
    domain: &'static str,
    name: &'static str,
    standard: bool,
    versions: Vec<i64>,
    runs: &'static str,
    gradient: &'static str,
    gradient_inputs: Vec<usize>,
    types: Vec<Vec<&'static str>>,
    variadic: bool,
}

impl From<ortrain::OperatorInfo> for OperatorInfo {
    fn from(info: ortrain::OperatorInfo) -> OperatorInfo {
        let runs = match info.runs {
            Runs::Row => "row",
            Runs::Instructions => "instructions",
            Runs::Decomposition => "decomposition",
            Runs::Host => "host",
            Runs::ControlFlow => "control flow",
        };
        let (gradient, gradient_inputs) = match info.gradient {
            Gradient::Full => ("full", Vec::new()),
            Gradient::Partial(inputs) => ("partial", inputs),
            Gradient::Zero => ("zero", Vec::new()),
            Gradient::None => ("none", Vec::new()),
        };
        let names = |types: Vec<DType>| types.into_iter().map(DType::name).collect();
        OperatorInfo {
            domain: info.domain,
            name: info.name,
            standard: info.standard,
            versions: info.versions.to_vec(),
            runs,
            gradient,
            gradient_inputs,
            types: info.types.into_iter().map(names).collect(),
            variadic: info.variadic,
        }
    }
}

/// A row of the table of optimizers.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct OptimizerRow {
    name: &'static str,
    summary: &'static str,
    source: &'static str,
    learning_rate: f64,
    slots: Vec<&'static str>,
    settings: Vec<OptimizerSetting>,
    flags: Vec<OptimizerFlag>,
}

/// A number that changes an optimizer.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct OptimizerSetting {
    name: &'static str,
    default: f64,
    values: &'static str,
    meaning: &'static str,
}

/// A choice that changes an optimizer.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct OptimizerFlag {
    name: &'static str,
    default: bool,
    meaning: &'static str,
}

impl From<&'static ortrain::optim::Optimizer> for OptimizerRow {
    fn from(row: &'static ortrain::optim::Optimizer) -> OptimizerRow {
        let slots = row.slots.iter().map(|slot| slot.name);
        let settings = row.settings.iter().map(|setting| OptimizerSetting {
            name: setting.name,
            default: setting.default,
            values: setting.range.describe(),
            meaning: setting.meaning,
        });
        let flags = row.flags.iter().map(|flag| OptimizerFlag {
            name: flag.name,
            default: flag.default,
            meaning: flag.meaning,
        });
        OptimizerRow {
            name: row.name,
            summary: row.summary,
            source: row.source,
            learning_rate: row.learning_rate,
            slots: slots.collect(),
            settings: settings.collect(),
            flags: flags.collect(),
        }
    }
}

/// A kind of schedule, with its settings and their defaults.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct ScheduleKind {
    pub(crate) name: &'static str,
    pub(crate) settings: Vec<(&'static str, Option<&'static str>)>,
}

/// Nodes of a loss, as a message, with the name of the loss and the last number in a generated name.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
pub(crate) struct LossFragment {
    pub(crate) model: Py<PyBytes>,
    pub(crate) output: String,
    pub(crate) last: u64,
}

/// An output of a model, with the scores that a loss compares instead of it.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct DescribedOutput {
    output: ValueDescription,
    activation: &'static str,
    scores: ValueDescription,
    class_axis: usize,
}

/// Inputs and outputs of a model.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
pub(crate) struct ModelDescription {
    inputs: Vec<ValueDescription>,
    outputs: Vec<DescribedOutput>,
}

impl From<ortrain::artifacts::ModelDescription> for ModelDescription {
    fn from(found: ortrain::artifacts::ModelDescription) -> ModelDescription {
        let outputs = found.outputs.iter().map(|described| DescribedOutput {
            output: ValueDescription::from(&described.output),
            activation: described.activation.name(),
            scores: ValueDescription::from(&described.scores),
            class_axis: described.class_axis,
        });
        ModelDescription { inputs: describe_values(&found.inputs), outputs: outputs.collect() }
    }
}

/// A constant of a model with its role in training.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct ParameterInfo {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    role: &'static str,
    confidence: &'static str,
    reason: String,
    nodes: Vec<String>,
    layer: Option<usize>,
}

impl From<&ortrain::ParameterInfo> for ParameterInfo {
    fn from(info: &ortrain::ParameterInfo) -> ParameterInfo {
        ParameterInfo {
            name: info.name.clone(),
            dtype: info.dtype.name(),
            shape: info.dims.clone(),
            role: info.role.name(),
            confidence: info.confidence.name(),
            reason: info.reason.clone(),
            nodes: info.nodes.clone(),
            layer: info.layer,
        }
    }
}

/// An obstacle to training.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct Obstacle {
    node: Option<String>,
    operator: Option<String>,
    what: String,
    fix: String,
}

impl From<&ortrain::Obstacle> for Obstacle {
    fn from(obstacle: &ortrain::Obstacle) -> Obstacle {
        let ortrain::Obstacle { node, operator, what, fix, .. } = obstacle.clone();
        Obstacle { node, operator, what, fix }
    }
}

/// A node that passes no gradient back.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct GradientStop {
    node: String,
    operator: String,
    reason: String,
    parameters: Vec<String>,
    fix: String,
}

impl From<&ortrain::GradientStop> for GradientStop {
    fn from(stop: &ortrain::GradientStop) -> GradientStop {
        let ortrain::GradientStop { node, operator, reason, parameters, fix, .. } = stop.clone();
        GradientStop { node, operator, reason, parameters, fix }
    }
}

/// A value at which PyTorch may pass no gradient.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct StopCandidate {
    value: String,
    reason: String,
}

impl From<&ortrain::StopCandidate> for StopCandidate {
    fn from(candidate: &ortrain::StopCandidate) -> StopCandidate {
        StopCandidate { value: candidate.value.clone(), reason: candidate.reason.clone() }
    }
}

/// A node that does not run as a part of one program.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct NodeNote {
    node: String,
    operator: String,
    what: String,
}

impl From<&ortrain::NodeNote> for NodeNote {
    fn from(note: &ortrain::NodeNote) -> NodeNote {
        let ortrain::NodeNote { node, operator, what, .. } = note.clone();
        NodeNote { node, operator, what }
    }
}

/// Operations and memory of a planned training step.
#[pyclass(frozen, get_all, skip_from_py_object, module = "ortrain._ortrain")]
#[derive(Clone)]
pub(crate) struct StepCost {
    inputs: Vec<(String, Vec<usize>)>,
    forward_flops: u64,
    training_flops: u64,
    parameters: usize,
    gradients: usize,
    moments: usize,
    constants: usize,
    work: usize,
    scratch: usize,
    forward_work: usize,
    without: Vec<String>,
}

impl From<&ortrain::StepCost> for StepCost {
    fn from(cost: &ortrain::StepCost) -> StepCost {
        StepCost {
            inputs: cost.inputs.clone(),
            forward_flops: cost.forward_flops,
            training_flops: cost.training_flops,
            parameters: cost.parameters,
            gradients: cost.gradients,
            moments: cost.moments,
            constants: cost.constants,
            work: cost.work,
            scratch: cost.scratch,
            forward_work: cost.forward_work,
            without: cost.without.clone(),
        }
    }
}
