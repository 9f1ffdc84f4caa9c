//! Hash of the weights beside which adapters were trained.

use ortrain_graph::Graph;
use ortrain_onnx::{ModelProto, StringStringEntryProto};
use sha1::{Digest, Sha1};

use crate::{CheckpointState, Error, Property, Result};

/// Key of the hash in the metadata of models and of safetensors files, and among the properties of a checkpoint.
pub(crate) const BASE_KEY: &str = "ortrain.base";

/// Returns the SHA-1 of the adapted weights in hexadecimal digits: of their types, shapes and elements. Names and the
/// order of the weights do not matter.
pub(crate) fn base_hash<'w>(graph: &Graph, weights: impl IntoIterator<Item = &'w str>) -> String {
    let mut names: Vec<&str> = weights.into_iter().collect();
    names.sort_unstable();
    names.dedup();
    let hash_of_weight = |name: &&str| {
        let weight = graph.value(graph.find(name)?).content()?;
        let mut digest = Sha1::new();
        digest.update(format!("{}{:?}", weight.dtype(), weight.dims()));
        digest.update(weight.data());
        Some(digest.finalize())
    };
    let mut hashes: Vec<_> = names.iter().filter_map(hash_of_weight).collect();
    hashes.sort_unstable();
    let mut digest = Sha1::new();
    hashes.iter().for_each(|hash| digest.update(hash));
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Stores the hash of the base in the metadata of a model.
pub(crate) fn set_base(proto: &mut ModelProto, hash: &str) {
    proto.metadata_props.retain(|entry| entry.key != BASE_KEY);
    proto.metadata_props.push(StringStringEntryProto { key: BASE_KEY.into(), value: hash.to_owned() });
}

/// Returns an error if a model and a checkpoint name different bases.
pub(crate) fn check_base(label: &str, proto: &ModelProto, state: &CheckpointState) -> Result<()> {
    let in_model = proto.metadata_props.iter().find(|entry| entry.key == BASE_KEY);
    match (in_model, state.property(BASE_KEY)) {
        (Some(model), Ok(Property::String(checkpoint))) if model.value != *checkpoint => {
            Err(Error::Mismatch {
                model: label.to_owned(),
                reason: format!(
                    "the adapters of the checkpoint were trained on a base with the hash {checkpoint}, and the base of \
                     the model has the hash {}; give the checkpoint that was made together with the model",
                    model.value
                ),
            })
        }
        _ => Ok(()),
    }
}
