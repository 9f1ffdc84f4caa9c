//! Conversion of a model for inference: another version of the operators, float16.

use ortrain_graph::DType;
use ortrain_onnx::{LoadedModel, OperatorSetIdProto};
use ortrain_ops::passes::infer::infer;
use ortrain_ops::passes::mixed_precision::narrow_values;
use ortrain_ops::passes::versions::downgrade;
use ortrain_ops::{NEWEST_OPSET, OLDEST_OPSET};

use crate::artifacts::{SEPARATE_INITIALIZERS, to_self_contained};
use crate::model::graph::{infer_graph, opset_of};
use crate::{Error, ModelSource, Result};

/// First versions of `ai.onnx` with the version of the file format that was released with them, newest first.
/// (`docs/Versioning.md` of ONNX.)
const FORMATS: &[(i64, i64)] =
    &[(28, 14), (25, 13), (24, 12), (23, 11), (21, 10), (19, 9), (15, 8), (12, 7), (11, 6), (10, 5)];

/// Changes of [`convert_model`].
///
/// ```
/// use ortrain::artifacts::Conversion;
///
/// let conversion = Conversion { opset: Some(13), ..Conversion::default() };
/// assert!(!conversion.float16);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Conversion {
    /// Version of `ai.onnx`; `None` keeps the version of the model.
    pub opset: Option<i64>,
    /// True to store the weights as float16 and to compute in it. Inputs and outputs remain float32.
    pub float16: bool,
}

/// Converts a model for inference. Without changes, the message of the model is returned with its external data.
///
/// Names of inputs, outputs and weights remain. Calls of model functions are inlined.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::artifacts::{Conversion, convert_model};
///
/// let conversion = Conversion { opset: Some(13), float16: true };
/// let model = convert_model(setup::MODEL.into(), conversion)?.proto;
/// assert_eq!(model.opset_import[0].version, 13);
/// assert_eq!(model.graph.unwrap().node.last().unwrap().op_type, "Cast");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the model cannot be read, the version is unknown, or a node cannot be expressed in it.
pub fn convert_model(model: ModelSource, conversion: Conversion) -> Result<LoadedModel> {
    let label = model.label("the model");
    let loaded = to_self_contained(&label, model.load()?)?;
    if conversion.opset.is_none() && !conversion.float16 {
        return Ok(loaded);
    }
    let opset = conversion.opset.unwrap_or_else(|| opset_of(&loaded.proto));
    if !(OLDEST_OPSET..=NEWEST_OPSET).contains(&opset) {
        return Err(Error::Argument(format!(
            "the opset must be from {OLDEST_OPSET} to {NEWEST_OPSET}, got {opset}"
        )));
    }
    let fail = |source| Error::model(&label, source);
    let mut graph = infer_graph(&label, &loaded)?;
    if conversion.float16 {
        narrow_values(&mut graph, DType::F16).map_err(fail)?;
        graph.remove_unused();
        infer(&mut graph).map_err(fail)?;
    }
    downgrade(&mut graph, opset).map_err(fail)?;

    let mut proto = loaded.proto.clone();
    proto.functions.clear();
    proto.opset_import.retain(|set| !set.domain.is_empty() && set.domain != "ai.onnx");
    proto.opset_import.insert(0, OperatorSetIdProto { domain: String::new(), version: opset });
    if conversion.opset.is_some() {
        let format = FORMATS.iter().find(|&&(first, _)| first <= opset);
        proto.ir_version = format.map_or(SEPARATE_INITIALIZERS, |&(_, format)| format);
    }
    let metadata = proto.graph.take().unwrap_or_default();
    let converted = graph.to_proto();
    proto.graph = Some(ortrain_onnx::GraphProto {
        name: metadata.name,
        doc_string: metadata.doc_string,
        metadata_props: metadata.metadata_props,
        ..converted
    });
    Ok(loaded.with_proto(proto))
}
