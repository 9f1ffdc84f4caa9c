//! Cost of a training step, planned before artifacts exist.

use std::sync::Arc;

use ortrain_graph::{DType, Dim, Graph, ValueId, ValueType, byte_length};
use ortrain_onnx::{LoadedModel, ValueInfoProto};
use ortrain_ops::training::append_placeholder_loss;
use ortrain_program::{GradientMode, Program, Schedule, Segment};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::artifacts::files::Artifacts;
use crate::artifacts::generate_loaded;
use crate::artifacts::options::ArtifactOptions;
use crate::model::graph::message_graph;
use crate::model::inspection::{InspectOptions, StepCost};
use crate::model::postprocessing;
use crate::suggest::hint;
use crate::{CheckpointState, Error, Inspection, ModelSource, Module, ModuleOptions, ParameterRole, Result};

/// Returns the shapes of the inputs, as far as known.
pub(crate) fn input_shapes(
    label: &str,
    graph: &Graph,
    options: &InspectOptions,
) -> Result<Vec<(String, Option<Vec<usize>>)>> {
    let wrong = |text: String| Err(Error::Argument(text));
    let inputs: Vec<ValueId> =
        graph.inputs.iter().copied().filter(|&id| graph.value(id).constant.is_none()).collect();
    let described = || {
        let formatted = inputs.iter().map(|&id| format!("{}: {}", graph.name_of(id), graph.value(id).ty));
        formatted.collect::<Vec<_>>().join(", ")
    };
    let mut symbols: FxHashMap<&Dim, (usize, String)> = FxHashMap::default();
    for (name, shape) in &options.shapes {
        let Some(&id) = inputs.iter().find(|&&id| graph.name_of(id) == name) else {
            return wrong(format!(
                "{label} has no input {name:?}, whose shape is given; it has {}{}",
                described(),
                hint(name, inputs.iter().map(|&id| graph.name_of(id)))
            ));
        };
        let ValueType::Tensor(dtype, declared) = &graph.value(id).ty else {
            return wrong(format!("input {name:?} is no tensor, so it has no shape"));
        };
        byte_length(*dtype, shape).map_err(|error| Error::Argument(format!("input {name:?}: {error}")))?;
        let Some(declared) = declared else { continue };
        let ty = &graph.value(id).ty;
        if declared.rank() != shape.len() {
            return wrong(format!(
                "input {name:?} is {ty}, so the shape {shape:?} does not fit: its rank differs"
            ));
        }
        for (axis, (dim, &size)) in declared.iter().zip(shape).enumerate() {
            if dim.known().is_some_and(|known| known != size) {
                return wrong(format!(
                    "input {name:?} is {ty}, so the shape {shape:?} does not fit at axis {axis}"
                ));
            }
            if dim.known().is_none()
                && let Some((other, from)) = symbols.insert(dim, (size, format!("input {name:?}")))
                && other != size
            {
                return wrong(format!(
                    "{dim} is {other} in {from}, but {size} in the shape of input {name:?}"
                ));
            }
        }
    }
    if let Some(rows) = options.batch_size {
        if rows == 0 {
            return wrong("batch_size must be at least 1, got 0".into());
        }
        let first = |id: &ValueId| graph.value(*id).ty.shape().and_then(|shape| shape.first());
        let open: Vec<&Dim> = inputs.iter().filter_map(first).filter(|dim| dim.known().is_none()).collect();
        if open.is_empty() {
            return wrong(format!(
                "batch_size is {rows}, but no input of {label} has an open first axis; it has {}",
                described()
            ));
        }
        for dim in open {
            match symbols.get(dim) {
                Some((size, from)) if *size != rows => {
                    return wrong(format!("batch_size is {rows}, but {dim} is {size} in {from}"));
                }
                Some(_) => {}
                None => drop(symbols.insert(dim, (rows, "batch_size".into()))),
            }
        }
    }
    let mut shapes_by_name = Vec::with_capacity(inputs.len());
    for &id in &inputs {
        let name = graph.name_of(id);
        let argument = options.shapes.iter().find(|(known, _)| known == name).map(|(_, dims)| dims.clone());
        let size = |dim: &Dim| dim.known().or_else(|| symbols.get(dim).map(|&(size, _)| size));
        let inferred = || graph.value(id).ty.shape()?.iter().map(size).collect::<Option<Vec<usize>>>();
        shapes_by_name.push((name.to_owned(), argument.or_else(inferred)));
    }
    for (name, dims) in &shapes_by_name {
        let dtype = graph.find(name).and_then(|id| graph.value(id).ty.dtype()).unwrap_or(DType::F32);
        if let Some(dims) = dims {
            byte_length(dtype, dims).map_err(|error| Error::Argument(format!("input {name:?}: {error}")))?;
        }
    }
    Ok(shapes_by_name)
}

/// Generates artifacts with a placeholder for the loss.
pub(crate) fn build_artifacts(
    label: &str,
    mut model: LoadedModel,
    inspection: &Inspection,
    values: &[(String, ValueType)],
) -> Result<Artifacts> {
    let value_names: Vec<&str> = values.iter().map(|(name, _)| name.as_str()).collect();
    if let Some(shorter) = postprocessing::without_unsupported(&model, &value_names) {
        model = shorter;
    }
    let graph = message_graph(label, &mut model.proto)?;
    let loss = append_placeholder_loss(graph, values).expect("there is a value");
    let declared = ValueInfoProto { name: loss.clone(), ..ValueInfoProto::default() };
    let loss_info = graph.output.iter().find(|info| info.name == loss).cloned();
    graph.output = vec![loss_info.unwrap_or(declared)];
    let requires_grad = inspection.names(ParameterRole::Trained).map(str::to_owned).collect();
    let options = ArtifactOptions { requires_grad, ..ArtifactOptions::default() };
    generate_loaded(label, model, &options)
}

/// A plan of a step.
pub(crate) enum Plan {
    /// Cost, and nodes that are separate segments.
    Step(StepCost, FxHashSet<String>),
    /// A plan is impossible before a run: the values of these inputs decide shapes.
    Values(Vec<String>),
}

/// Plans a step on artifacts like a [`Module`].
pub(crate) fn plan_step(artifacts: Artifacts, inputs: Vec<(String, Vec<usize>)>) -> Result<Plan> {
    let mut state = CheckpointState::from_checkpoint(artifacts.checkpoint)?;
    let (train, eval) = (
        ModelSource::from_proto(&artifacts.training_model)?,
        ModelSource::from_proto(&artifacts.eval_model)?,
    );
    let module = Module::new(train, &mut state, Some(eval), ModuleOptions::default())?;

    let find = |name: &str| {
        let shape = inputs.iter().find(|(known, _)| known == name);
        shape.map(|(_, dims)| dims.as_slice()).ok_or_else(|| {
            Error::Argument(format!("the training model has an input {name:?} that the model does not have"))
        })
    };
    let dims =
        |training| module.input_names(training).iter().map(|name| find(name)).collect::<Result<Vec<_>>>();
    let (forward, step) = (module.plan(&dims(false)?, false), module.plan(&dims(true)?, true));
    let mut deciding_inputs = module.shape_deciding_inputs(true);
    let eval_inputs =
        module.shape_deciding_inputs(false).into_iter().filter(|name| !deciding_inputs.contains(name));
    deciding_inputs.extend(eval_inputs.collect::<Vec<_>>());
    // Planning uses zeros for values. A zero is no valid size. Indices of floats are different: the host
    // computes them during a step.
    let infos = || module.inputs(true).iter().chain(module.inputs(false));
    let sizes = infos().any(|info| !info.dtype.is_float() && deciding_inputs.contains(&info.name));
    if sizes || !deciding_inputs.is_empty() && (forward.is_err() || step.is_err()) {
        return Ok(Plan::Values(deciding_inputs));
    }
    let ((forward, forward_need), (step, need)) = (forward?, step?);
    let mut parts = ScheduleParts::default();
    parts.add(&step);
    let mut without = Vec::new();
    if parts.deferred_programs > 0 {
        without.push(format!(
            "{} programs after functions on the host, which are built during a run",
            parts.deferred_programs
        ));
    }
    if parts.repeats > 0 {
        without.push("all but one iteration of each loop".to_owned());
    }
    let flops = |schedule: &Schedule| {
        let of = |program: &Arc<Program>| program.cost(GradientMode::Overwrite).flops;
        schedule.programs().into_iter().map(of).fold(0u64, u64::saturating_add)
    };
    let memory = module.memory(&state);
    let cost = StepCost {
        forward_flops: flops(&forward),
        training_flops: flops(&step),
        parameters: memory.parameters,
        gradients: memory.gradients,
        moments: memory.gradients.saturating_mul(2),
        constants: need.constants,
        work: need.work,
        scratch: need.scratch,
        forward_work: forward_need.work,
        without,
        inputs,
    };
    parts.add(&forward);
    Ok(Plan::Step(cost, parts.labels))
}

/// Parts of a schedule besides programs.
#[derive(Default)]
struct ScheduleParts {
    /// Nodes that are separate segments.
    labels: FxHashSet<String>,
    /// Number of programs that are compiled during a run.
    deferred_programs: usize,
    repeats: usize,
}

impl ScheduleParts {
    fn add(&mut self, schedule: &Schedule) {
        for segment in &schedule.segments {
            match &segment.segment {
                Segment::Program(..) | Segment::Yield(_) => {}
                Segment::Deferred(_) => self.deferred_programs += 1,
                Segment::Host(_, label) => drop(self.labels.insert(label.to_string())),
                Segment::If(branches, label) => {
                    self.labels.insert(label.to_string());
                    // An invalid branch costs nothing.
                    for (_, branch) in branches.named_branches() {
                        if let Ok(schedule) = branch.schedule() {
                            self.add(schedule);
                        }
                    }
                }
                Segment::Repeat(repeat, label) => {
                    self.labels.insert(label.to_string());
                    self.repeats += 1;
                    self.add(&repeat.body);
                }
            }
        }
    }
}
