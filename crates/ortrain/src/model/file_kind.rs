//! Kinds of training files, and errors for a file of another kind than expected.

use std::path::Path;

use bytes::Bytes;
use ortrain_checkpoint::Error as CheckpointError;
use ortrain_graph::{Graph, ValueId, ValueType};
use ortrain_ops::Registry;
use rustc_hash::FxHashSet;

use crate::state::gradient_names::{BUFFER_SUFFIX, RESET_FLAG};
use crate::{Error, ModelSource};

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
    pub(crate) fn of_bytes(start: &[u8]) -> Option<FileKind> {
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
pub(crate) fn weight_inputs(graph: &Graph) -> Vec<ValueId> {
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

/// Returns the first bytes of a regular file, if it is readable.
pub(crate) fn read_header(path: &Path) -> Option<Vec<u8>> {
    use std::io::Read as _;

    // Reading a pipe would block, or lose these bytes for the next reader.
    if !std::fs::metadata(path).ok()?.is_file() {
        return None;
    }
    let mut start = Vec::new();
    std::fs::File::open(path).ok()?.take(16).read_to_end(&mut start).ok()?;
    Some(start)
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
