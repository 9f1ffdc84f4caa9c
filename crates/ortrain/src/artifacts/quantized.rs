//! Models from quantizers: their weights as floats that are trained.

use ortrain_onnx::{GraphProto, ModelProto};
use ortrain_ops::training::{adapted_layers, add_float_weights, has_quantized_inputs};

use crate::artifacts::to_self_contained;
use crate::model::graph::{infer_graph, message_graph};
use crate::{Error, ModelSource, Result};

/// Converts the integer weights of a quantized model to floats.
///
/// Nodes of `QuantizeLinear` compute the integers of each weight. A model without quantized weights gives `None`.
/// A model with adapters gives `None`, too: its base is frozen.
///
/// The results of the model stay the same. An export for inference has the integers again, and the nodes and the names
/// of the quantized model. Integers with the name `x_quantized` become the weight `x`.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::artifacts::with_float_weights;
///
/// // The example has float weights already.
/// assert!(with_float_weights(setup::MODEL.into())?.is_none());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the model cannot be read.
pub fn with_float_weights(model: ModelSource) -> Result<Option<ModelProto>> {
    let label = model.label("the model");
    let loaded = model.load()?;
    let is_trained = |graph: &GraphProto| has_quantized_inputs(graph) && adapted_layers(graph).is_empty();
    if !loaded.proto.graph.as_ref().is_some_and(is_trained) {
        return Ok(None);
    }
    let mut loaded = to_self_contained(&label, loaded)?;
    let typed = infer_graph(&label, &loaded)?;
    let graph = message_graph(&label, &mut loaded.proto)?;
    let names = add_float_weights(&typed, graph).map_err(|source| Error::graph(&label, source))?;
    Ok((!names.is_empty()).then_some(loaded.proto))
}
