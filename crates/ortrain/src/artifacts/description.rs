//! Inputs of a model, and the values that a loss can compare with targets.

use ortrain_graph::{DType, Graph, ValueId};
use ortrain_ops::training::{class_axis_of_tokens, find_scores};

use crate::artifacts::to_self_contained;
use crate::exec::inputs::ValueInfo;
use crate::model::classifiers::with_tensor_outputs;
use crate::model::graph::infer_graph;
use crate::{ModelSource, Result};

/// Function from the scores of a loss to an output of the model.
///
/// ```
/// use ortrain::artifacts::Activation;
///
/// assert_eq!(Activation::LogSoftmax.name(), "log_softmax");
/// ```
#[doc(inline)]
pub use ortrain_ops::training::Activation;

/// Output of a model, and the scores that a loss compares instead of it.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::artifacts::describe_model;
///
/// let output = &describe_model(setup::MODEL.into())?.outputs[0];
/// assert_eq!((output.scores.name.as_str(), output.class_axis), ("logits", 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct DescribedOutput {
    /// The output.
    pub output: ValueInfo,
    /// Function from the scores to the output.
    pub activation: Activation,
    /// The logits of a softmax or a sigmoid; otherwise the output.
    pub scores: ValueInfo,
    /// Class axis of the scores in a cross-entropy: 1, or the last axis of a model of sequences.
    pub class_axis: usize,
}

/// Inputs and outputs of a model.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::artifacts::describe_model;
///
/// let found = describe_model(setup::MODEL.into())?;
/// assert_eq!((found.inputs.len(), found.outputs.len()), (1, 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct ModelDescription {
    /// Inputs without an initializer.
    pub inputs: Vec<ValueInfo>,
    /// Outputs that are tensors.
    pub outputs: Vec<DescribedOutput>,
}

/// Describes the inputs and outputs of a model, with the scores of each output.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::artifacts::{Activation, describe_model};
///
/// let found = describe_model(setup::MODEL.into())?;
/// assert_eq!(found.inputs[0].to_string(), "float32[batch, 64]");
/// assert_eq!(found.outputs[0].activation, Activation::Identity);
/// assert_eq!(found.outputs[0].scores.name, "logits");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the model cannot be read, or the type of an input or output cannot be inferred.
pub fn describe_model(model: ModelSource) -> Result<ModelDescription> {
    let label = model.label("the model");
    let loaded = to_self_contained(&label, model.load()?)?;
    let loaded = with_tensor_outputs(&loaded).unwrap_or(loaded);
    let graph = infer_graph(&label, &loaded)?;
    let inputs =
        graph.inputs.iter().map(|&id| ValueInfo::of(&label, &graph, id)).collect::<Result<Vec<_>>>()?;
    let outputs = graph.outputs.iter().map(|&id| describe_output(&label, &graph, id));
    Ok(ModelDescription { inputs, outputs: outputs.collect::<Result<Vec<_>>>()? })
}

fn describe_output(label: &str, graph: &Graph, id: ValueId) -> Result<DescribedOutput> {
    let is_float = graph.value(id).ty.dtype().is_some_and(DType::is_float);
    let (activation, scores) = if is_float { find_scores(graph, id) } else { (Activation::Choice, id) };
    let class_axis = class_axis_of_tokens(graph, scores, None, None).map_or(1, |(axis, _)| axis);
    Ok(DescribedOutput {
        output: ValueInfo::of_tensor_or_sequence(label, graph, id)?,
        activation,
        scores: ValueInfo::of_tensor_or_sequence(label, graph, scores)?,
        class_axis,
    })
}
