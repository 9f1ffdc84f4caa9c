//! Building blocks of artifacts, for callers that add nodes of their own between them: `ortrain.onnxblock` in
//! Python.
//!
//! All functions take and return ONNX messages, so any ONNX editor can change the model in between.

use std::path::Path;

use ortrain_checkpoint::{Checkpoint, Layout, ModuleState, NamedTensor};
use ortrain_graph::{Graph, Tensor, tensor_to_proto};
use ortrain_onnx::{GraphProto, LoadedModel, ModelProto};
use ortrain_ops::training::{NameGenerator, append_loss};

use crate::artifacts::{LossTerm, build_full_checkpoint, build_nominal_checkpoint, to_self_contained};
use crate::model::graph::{infer_graph, message_graph, opset_of};
use crate::suggest::hint_in;
use crate::{Error, ModelSource, Result};

/// Nodes that a block adds to a model.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::artifacts::{Loss, LossTerm};
/// use ortrain::artifact_parts;
///
/// let term = LossTerm { scores: Some("logits".into()), ..Loss::CrossEntropyLoss.into() };
/// let fragment = artifact_parts::loss(setup::MODEL.into(), &term, false, 0)?;
/// let outputs: Vec<&str> = fragment.graph.node.iter().flat_map(|node| &node.output).map(String::as_str).collect();
/// assert!(outputs.contains(&fragment.output.as_str()));
/// assert_eq!(fragment.graph.input[0].name, "labels");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Fragment {
    /// Nodes, initializers and inputs to append to the model.
    pub graph: GraphProto,
    /// The name of the result.
    pub output: String,
    /// Last number used in generated names.
    pub last: u64,
}

/// Builds the nodes of a loss. `model` only has to contain the scores, for example as an input.
///
/// If `target_is_there`, the target is a value of the final model; otherwise it becomes an input. Numbers in
/// generated names continue after `last`. The factor of the term is not used.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::artifacts::{Loss, LossTerm};
/// use ortrain::artifact_parts;
///
/// let term = LossTerm { scores: Some("logits".into()), ..Loss::MSELoss.into() };
/// let first = artifact_parts::loss(setup::MODEL.into(), &term, false, 0)?;
/// // A second one compares the same target, and its names go on behind those of the first.
/// let term = LossTerm { loss: Loss::L1Loss, ..term };
/// let second = artifact_parts::loss(setup::MODEL.into(), &term, true, first.last)?;
/// assert!(second.graph.input.is_empty());
/// assert_ne!(first.output, second.output);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the loss cannot compare these scores, or the model cannot be read.
pub fn loss(model: ModelSource, term: &LossTerm, target_is_there: bool, last: u64) -> Result<Fragment> {
    let label = model.label("the model");
    let model = to_self_contained(&label, model.load()?)?;
    let typed = infer_graph(&label, &model)?;
    let scores = term.scores.as_deref().unwrap_or_default();
    let id = typed.find(scores).ok_or_else(|| {
        let suggestion = hint_in(&typed, scores);
        Error::Argument(format!("the model has no value {scores:?}, which the loss compares{suggestion}"))
    })?;
    let mut names = NameGenerator::starting_after(last);
    let mut graph = GraphProto::default();
    let (target, ty) = (term.target.as_deref(), &typed.value(id).ty);
    let opset = opset_of(&model.proto);
    let output = append_loss(&mut graph, &mut names, term.loss, &term.settings, scores, ty, target, opset)
        .map_err(|source| Error::model(&label, source))?;
    if target_is_there {
        graph.input.clear();
    }
    Ok(Fragment { graph, output, last: names.last() })
}

/// Returns declarations of values with the types inferred from the model. Values of unknown type are omitted.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// let graph = ortrain::artifact_parts::declarations(setup::MODEL.into(), &["hidden".into(), "nothing".into()])?;
/// assert_eq!(graph.value_info.len(), 1);
/// assert_eq!(graph.value_info[0].name, "hidden");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the model cannot be read.
pub fn declarations(model: ModelSource, names: &[String]) -> Result<GraphProto> {
    let label = model.label("the model");
    let typed = infer_graph(&label, &to_self_contained(&label, model.load()?)?)?;
    let typed_value = |name: &String| typed.find(name).filter(|&id| typed.value(id).ty.dtype().is_some());
    let value_info = names.iter().filter_map(typed_value).map(|id| typed.value_info(id)).collect();
    Ok(GraphProto { value_info, ..GraphProto::default() })
}

/// Returns the initializers of a message, in order.
fn initializers(label: &str, model: ModelSource) -> Result<Vec<(String, Tensor)>> {
    let mut model = to_self_contained(label, model.load()?)?;
    let tensors = std::mem::take(&mut message_graph(label, &mut model.proto)?.initializer);
    let none = LoadedModel::from_proto(ModelProto::default(), Default::default());
    let read = |tensor| {
        let value = Graph::tensor_from_proto(&none, &tensor).map_err(|source| Error::graph(label, source))?;
        Ok((tensor.name, value))
    };
    tensors.into_iter().map(read).collect()
}

/// Writes a checkpoint of the parameters in two messages, as their initializers. With `only_names`, the
/// checkpoint is nominal.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{CheckpointState, GraphProto, ModelProto, ModelSource, artifact_parts};
///
/// let folder = tempfile::tempdir()?;
/// let path = folder.path().join("checkpoint");
/// // All initializers of one model are trained; another one has none.
/// let none = ModelProto { graph: Some(GraphProto::default()), ..ModelProto::default() };
/// artifact_parts::save_checkpoint(setup::MODEL.into(), ModelSource::from_proto(&none)?, &path, false)?;
/// assert!(CheckpointState::load(&path)?.requires_grad("fc1.weight")?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If a name occurs twice, a tensor cannot be read, or the file cannot be written.
pub fn save_checkpoint(
    trainable: ModelSource,
    frozen: ModelSource,
    path: impl AsRef<Path>,
    only_names: bool,
) -> Result<()> {
    let mut values = Vec::new();
    for (model, requires_grad) in [(trainable, true), (frozen, false)] {
        for (name, value) in initializers("the parameters", model)? {
            values.push((name.as_str().into(), requires_grad, value));
        }
    }
    let checkpoint =
        if only_names { build_nominal_checkpoint(&values) } else { build_full_checkpoint(values) };
    Ok(ortrain_checkpoint::save(&checkpoint, path, Layout::Artifacts)?)
}

/// Returns the parameters of a checkpoint as the initializers of a message.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let artifacts = setup::artifacts()?;
/// # let folder = tempfile::tempdir()?;
/// # artifacts.write(folder.path(), "")?;
/// let graph = ortrain::artifact_parts::checkpoint_initializers(folder.path().join("checkpoint"))?;
/// let names: Vec<&str> = graph.initializer.iter().map(|tensor| tensor.name.as_str()).collect();
/// assert_eq!(names, ["fc2.weight", "fc2.bias", "fc1.weight", "fc1.bias"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the file cannot be read, or the checkpoint is nominal: it has no values.
pub fn checkpoint_initializers(path: impl AsRef<Path>) -> Result<GraphProto> {
    let path = path.as_ref();
    let Checkpoint { module, .. } = ortrain_checkpoint::load(path)?;
    let ModuleState::Full { trainable, frozen } = module else {
        return Err(Error::Argument(format!(
            "{} is a nominal checkpoint: it holds the names of the parameters, but not their values",
            path.display()
        )));
    };
    let proto = |NamedTensor { name, tensor }: &NamedTensor| tensor_to_proto(name, tensor);
    Ok(GraphProto {
        initializer: trainable.iter().chain(&frozen).map(proto).collect(),
        ..GraphProto::default()
    })
}
