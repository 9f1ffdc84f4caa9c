//! Kinds of training files, and errors for a file of another kind than expected.

use std::path::Path;

use bytes::Bytes;
use ortrain_checkpoint::{Checkpoint, Error as CheckpointError, ModuleState, NamedTensor};
use ortrain_graph::{DType, Graph, ValueId, ValueType};
use ortrain_ops::Registry;
use rustc_hash::FxHashSet;

use crate::optim::OptimizerSpec;
use crate::parameter_binding::{BUFFER_SUFFIX, RESET_FLAG, parameter_of_gradient};
use crate::{
    CheckpointState, Confidence, Error, Inspection, ModelSource, ParameterInfo, ParameterRole, Result,
};

/// Kind of a file.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let artifacts = setup::artifacts()?;
/// use ortrain::{FileKind, ModelSource, Scope, inspect};
///
/// let of = |model: ModelSource| Ok::<FileKind, ortrain::Error>(inspect(model, &Scope::Outputs)?.kind);
/// assert_eq!(of(setup::MODEL.into())?, FileKind::ForwardModel);
/// assert_eq!(of(ModelSource::from_proto(&artifacts.training_model)?)?, FileKind::TrainingModel);
/// assert_eq!(of(artifacts.checkpoint_bytes()?.into())?.name(), "checkpoint");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FileKind {
    /// A model with its parameters inside; the source of artifacts.
    #[default]
    ForwardModel,
    /// Forward, loss and gradients: its parameters and their gradients are inputs.
    TrainingModel,
    /// Forward and loss: its parameters are inputs.
    EvalModel,
    /// An update of the parameters.
    OptimizerModel,
    /// The values of parameters, perhaps with the state of an optimizer.
    Checkpoint,
    /// Named tensors.
    Safetensors,
}

impl FileKind {
    /// Returns the name of the kind in reports.
    ///
    /// ```
    /// assert_eq!(ortrain::FileKind::TrainingModel.name(), "training model");
    /// ```
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            FileKind::ForwardModel => "forward model",
            FileKind::TrainingModel => "training model",
            FileKind::EvalModel => "evaluation model",
            FileKind::OptimizerModel => "optimizer model",
            FileKind::Checkpoint => "checkpoint",
            FileKind::Safetensors => "safetensors file",
        }
    }

    /// Returns the name with an article.
    pub(crate) fn name_with_article(self) -> String {
        let article = if matches!(self, FileKind::EvalModel | FileKind::OptimizerModel) { "an" } else { "a" };
        format!("{article} {}", self.name())
    }

    /// Returns the content and the consumer of the file, as the rest of a sentence.
    pub(crate) fn purpose(self) -> &'static str {
        match self {
            FileKind::ForwardModel => "generate_artifacts prepares it for training",
            FileKind::TrainingModel => {
                "forward, loss and gradients; a Module runs it with the checkpoint of the same artifacts"
            }
            FileKind::EvalModel => {
                "forward and loss, with parameters as inputs; a Module runs it with the training model of the same \
                 artifacts"
            }
            FileKind::OptimizerModel => {
                "it updates the parameters of a checkpoint; an Optimizer runs it on a Module"
            }
            FileKind::Checkpoint => "the values of parameters; CheckpointState.load_checkpoint reads it",
            FileKind::Safetensors => "named tensors; CheckpointState.load_safetensors reads it",
        }
    }

    /// Classifies a model by its inputs.
    pub(crate) fn of_graph(graph: &Graph) -> FileKind {
        let names: FxHashSet<&str> = graph.inputs.iter().map(|&id| graph.name_of(id)).collect();
        if ["learning_rate", "params", "gradients"].iter().all(|name| names.contains(name)) {
            FileKind::OptimizerModel
        } else if names.contains(RESET_FLAG) || names.iter().any(|name| name.ends_with(BUFFER_SUFFIX)) {
            FileKind::TrainingModel
        } else {
            let first = graph.outputs.first().map(|&id| &graph.value(id).ty);
            let is_scalar = first.and_then(|ty| ty.shape()).is_some_and(|shape| shape.rank() == 0);
            let weights = is_scalar && !weight_inputs(graph).is_empty();
            if weights { FileKind::EvalModel } else { FileKind::ForwardModel }
        }
    }

    /// Classifies bytes that are no model, by their header; `None` for all others.
    fn of_bytes(start: &[u8]) -> Option<FileKind> {
        let header = start.first_chunk().map(|len: &[u8; 8]| u64::from_le_bytes(*len));
        if start.get(4..8) == Some(b"ODTC") {
            Some(FileKind::Checkpoint)
        } else if start.get(8) == Some(&b'{') && header.is_some_and(|len| len < 1 << 32) {
            Some(FileKind::Safetensors)
        } else {
            None
        }
    }
}

/// Returns the float inputs of fixed size that are weights or running statistics of nodes.
fn weight_inputs(graph: &Graph) -> Vec<ValueId> {
    let fixed = |id: &ValueId| match &graph.value(*id).ty {
        ValueType::Tensor(dtype, Some(shape)) => {
            dtype.is_float()
                && shape.rank() > 0
                && shape.concrete().is_some()
                && graph.value(*id).constant.is_none()
        }
        _ => false,
    };
    let inputs: FxHashSet<ValueId> = graph.inputs.iter().copied().filter(|id| fixed(id)).collect();
    let mut weights = Vec::new();
    for node in &graph.nodes {
        let Some(definition) = Registry::standard().find(&node.domain, &node.op) else { continue };
        for &at in definition.weights.iter().chain(definition.statistics) {
            let id = node.inputs.get(at).copied().flatten().filter(|id| inputs.contains(id));
            weights.extend(id.filter(|id| !weights.contains(id)));
        }
    }
    weights
}

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

/// Returns the first bytes of a regular file, if it is readable.
fn read_header(path: &Path) -> Option<Vec<u8>> {
    use std::io::Read as _;

    // Reading a pipe would block, or lose these bytes for the next reader.
    if !std::fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut start = Vec::new();
    std::fs::File::open(path).ok()?.take(16).read_to_end(&mut start).ok()?;
    Some(start)
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

/// Returns the first names as a list, and the number of the others.
pub(crate) fn list_names<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    const SHOWN: usize = 3;
    let names: Vec<&str> = names.into_iter().collect();
    let quoted: Vec<String> = names.iter().take(SHOWN).map(|name| format!("{name:?}")).collect();
    match names.len().saturating_sub(SHOWN) {
        0 => quoted.join(", "),
        more => format!("{} and {more} more", quoted.join(", ")),
    }
}

/// Returns an error if the model is no training model, or belongs to another checkpoint.
pub(crate) fn check_training(model: &str, graph: &Graph, state: &CheckpointState) -> Result<()> {
    let trained: Vec<&str> =
        state.entries().iter().filter(|entry| entry.requires_grad).map(|entry| &*entry.name).collect();
    let names = || graph.inputs.iter().map(|&id| graph.name_of(id));
    if trained.is_empty()
        || names()
            .any(|name| parameter_of_gradient(name).is_some_and(|parameter| state.entry(parameter).is_some()))
    {
        return Ok(());
    }
    let accumulated: Vec<&str> = names().filter_map(|name| name.strip_suffix(BUFFER_SUFFIX)).collect();
    let wrong = |reason: String| Err(Error::WrongModel { model: model.to_owned(), reason });
    match FileKind::of_graph(graph) {
        FileKind::TrainingModel if accumulated.is_empty() => Ok(()),
        FileKind::TrainingModel => Err(Error::Mismatch {
            model: model.to_owned(),
            reason: format!(
                "the model trains {}, but the checkpoint trains {}; give the checkpoint that was made together with \
                 the model",
                list_names(accumulated.iter().copied()),
                list_names(trained.iter().copied())
            ),
        }),
        FileKind::OptimizerModel => wrong(
            "it is an optimizer model, which computes no gradients; give the training model that was made together with it \
             (training_model.onnx)"
                .into(),
        ),
        kind => {
            let parameters_are_inputs =
                kind == FileKind::EvalModel || names().any(|name| state.entry(name).is_some());
            wrong(if parameters_are_inputs {
                "it is an evaluation model, which computes no gradients; give the training model that was made together \
                 with it (training_model.onnx)"
                    .into()
            } else {
                "it is a forward model, which computes no gradients; give the training model that \
                 generate_artifacts makes from it (training_model.onnx)"
                    .into()
            })
        }
    }
}

/// Returns the reason why an evaluation model without an input for a parameter of the training model does not
/// fit.
pub(crate) fn missing_parameter_reason(graph: &Graph, missing: &str) -> String {
    const HELP: &str =
        "give the evaluation model that was made together with the training model (eval_model.onnx)";
    let constant = graph.find(missing).is_some_and(|id| graph.value(id).constant.is_some());
    match FileKind::of_graph(graph) {
        FileKind::OptimizerModel => {
            format!("it is an optimizer model, which does not run the forward pass; {HELP}")
        }
        FileKind::ForwardModel if constant => {
            format!("it is a forward model, with its own value of parameter {missing:?}; {HELP}")
        }
        _ => format!(
            "it has no input for parameter {missing:?} of the training model; give the one that was made together with the \
             training model"
        ),
    }
}

/// Returns an error if the source of artifacts is itself an artifact.
pub(crate) fn check_forward(model: &str, graph: &Graph) -> Result<()> {
    let kind = FileKind::of_graph(graph);
    match kind {
        FileKind::TrainingModel | FileKind::OptimizerModel => Err(Error::WrongModel {
            model: model.to_owned(),
            reason: format!(
                "it is {}, not a forward model; give the forward model from which it was made",
                kind.name_with_article()
            ),
        }),
        _ => Ok(()),
    }
}

/// Adds the actual kind of the file to the error for a file that is no checkpoint or no safetensors file.
pub(crate) fn add_file_kind(error: CheckpointError, path: &Path, expected: FileKind) -> Error {
    let is_other = matches!(
        (error.content(), expected),
        (CheckpointError::NotACheckpoint, FileKind::Checkpoint)
            | (CheckpointError::Safetensors(_), FileKind::Safetensors)
    );
    let actual = if is_other { kind_of_file(path) } else { None };
    actual.map_or(Error::Checkpoint(error), |kind| wrong_file(path.display().to_string(), kind, expected))
}

/// Adds the actual kind of the bytes to the error for bytes that are no checkpoint.
pub(crate) fn add_kind_of_bytes(error: CheckpointError, bytes: &Bytes) -> Error {
    let is_other = matches!(error.content(), CheckpointError::NotACheckpoint);
    let actual = if is_other { kind_of_model(ModelSource::Bytes(bytes.clone())) } else { None };
    actual.map_or(Error::Checkpoint(error), |kind| {
        wrong_file("the argument".to_owned(), kind, FileKind::Checkpoint)
    })
}

fn kind_of_file(path: &Path) -> Option<FileKind> {
    let start = read_header(path)?;
    FileKind::of_bytes(&start).or_else(|| kind_of_model(path.into()))
}

fn kind_of_model(source: ModelSource) -> Option<FileKind> {
    Some(FileKind::of_graph(&Graph::from_model(&source.load().ok()?).ok()?))
}

fn wrong_file(file: String, actual: FileKind, expected: FileKind) -> Error {
    let help = match (actual, expected) {
        (FileKind::Checkpoint, _) => "load_parameters and CheckpointState.load_checkpoint read checkpoints",
        (FileKind::ForwardModel, _) => "generate_artifacts makes a checkpoint of a forward model",
        (_, FileKind::Checkpoint) => {
            "give the file that generate_artifacts wrote beside it (checkpoint), or one that save_checkpoint wrote"
        }
        _ => "give a file that save_safetensors, or another library, wrote",
    };
    Error::WrongFile { file, found: actual.name_with_article(), expected: expected.name_with_article(), help }
}
