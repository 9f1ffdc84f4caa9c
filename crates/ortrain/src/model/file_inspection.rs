//! Inspection of checkpoints, safetensors files and models of artifacts.

use ortrain_checkpoint::{Checkpoint, ModuleState, NamedTensor};
use ortrain_graph::{DType, Graph, ValueType};
use rustc_hash::FxHashSet;

use crate::model::file_kind::{FileKind, read_header, weight_inputs};
use crate::state::gradient_names::{BUFFER_SUFFIX, RESET_FLAG};
use crate::train::optim::OptimizerSpec;
use crate::{Confidence, Inspection, ModelSource, ParameterInfo, ParameterRole, Result};

/// Inspects a source that is no model but identifies itself by its header.
pub(crate) fn inspect_other(source: &ModelSource) -> Result<Option<Inspection>> {
    let mut optimizer = None;
    let mut checkpoint = |content: Checkpoint| {
        let text = content.extras.optimizer.as_deref();
        // Training reports a damaged description; inspection ignores it.
        optimizer = text.and_then(|text| OptimizerSpec::from_text(text).ok());
        (FileKind::Checkpoint, checkpoint_infos(content))
    };
    let (kind, parameters) = match source {
        ModelSource::WithOperators(source, _) | ModelSource::WithChanges(source, _) => {
            return inspect_other(source);
        }
        ModelSource::Bytes(bytes) | ModelSource::BytesIn(bytes, _) => match FileKind::of_bytes(bytes) {
            None => return Ok(None),
            Some(FileKind::Checkpoint) => checkpoint(ortrain_checkpoint::read(bytes.clone())?),
            Some(kind) => (kind, tensor_infos(ortrain_checkpoint::read_safetensors(bytes.clone())?)),
        },
        ModelSource::Path(path) => match read_header(path).as_deref().and_then(FileKind::of_bytes) {
            None => return Ok(None),
            Some(FileKind::Checkpoint) => checkpoint(ortrain_checkpoint::load(path)?),
            Some(kind) => (kind, tensor_infos(ortrain_checkpoint::load_safetensors(path)?)),
        },
    };
    Ok(Some(Inspection { kind, parameters, optimizer, ..Inspection::default() }))
}

fn parameter(name: String, dtype: DType, dims: Vec<usize>, trained: bool, reason: &str) -> ParameterInfo {
    let role = if trained { ParameterRole::Trained } else { ParameterRole::Constant };
    let confidence = Confidence::Certain;
    ParameterInfo {
        name,
        dtype,
        dims,
        role,
        confidence,
        reason: reason.to_owned(),
        nodes: Vec::new(),
        layer: None,
    }
}

fn tensor_infos(tensors: Vec<NamedTensor>) -> Vec<ParameterInfo> {
    let info = |NamedTensor { name, tensor }| {
        parameter(name, tensor.dtype(), tensor.dims().to_vec(), false, "a tensor of the file")
    };
    tensors.into_iter().map(info).collect()
}

fn checkpoint_infos(checkpoint: Checkpoint) -> Vec<ParameterInfo> {
    let reason = |trained| if trained { "it is trained" } else { "it is frozen, or a running statistic" };
    match checkpoint.module {
        ModuleState::Full { trainable, frozen } => {
            let all = trainable.into_iter().map(|tensor| (tensor, true));
            let all = all.chain(frozen.into_iter().map(|tensor| (tensor, false)));
            let info = |(NamedTensor { name, tensor }, trained)| {
                parameter(name, tensor.dtype(), tensor.dims().to_vec(), trained, reason(trained))
            };
            all.map(info).collect()
        }
        ModuleState::Nominal { trainable, frozen } => {
            let all = trainable.into_iter().map(|tensor| (tensor, true));
            let all = all.chain(frozen.into_iter().map(|tensor| (tensor, false)));
            let reason = "the checkpoint is nominal: shape and value are not stored";
            all.map(|(tensor, trained)| parameter(tensor.name, tensor.dtype, Vec::new(), trained, reason))
                .collect()
        }
    }
}

/// Inspects a model of artifacts: its parameters are inputs.
pub(crate) fn inspect_artifact(kind: FileKind, graph: &Graph) -> Inspection {
    let mut inspection = Inspection { kind, inputs: described_inputs(graph), ..Inspection::default() };
    let accumulated: FxHashSet<&str> =
        graph.inputs.iter().filter_map(|&id| graph.name_of(id).strip_suffix(BUFFER_SUFFIX)).collect();
    let weights = if kind == FileKind::EvalModel { weight_inputs(graph) } else { Vec::new() };
    for &id in &graph.inputs {
        let name = graph.name_of(id);
        let reason = if accumulated.contains(name) {
            "the model accumulates its gradient"
        } else if weights.contains(&id) {
            "it is an input with its value in a checkpoint"
        } else {
            continue;
        };
        if let ValueType::Tensor(dtype, Some(shape)) = &graph.value(id).ty
            && let Some(dims) = shape.concrete()
        {
            inspection.parameters.push(parameter(name.to_owned(), *dtype, dims, true, reason));
        }
    }
    let parameter_names: FxHashSet<&str> =
        inspection.parameters.iter().map(|info| info.name.as_str()).collect();
    inspection.inputs.retain(|(name, _)| {
        !parameter_names.contains(name.as_str()) && name != RESET_FLAG && !name.ends_with(BUFFER_SUFFIX)
    });
    inspection
}

/// Returns the inputs of a model that are no initializers, with their types.
pub(crate) fn described_inputs(graph: &Graph) -> Vec<(String, String)> {
    let inputs = graph.inputs.iter().filter(|&&id| graph.value(id).constant.is_none());
    inputs.map(|&id| (graph.name_of(id).to_owned(), graph.value(id).ty.to_string())).collect()
}
