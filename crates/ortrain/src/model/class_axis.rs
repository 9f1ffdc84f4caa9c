//! Labels with a symbolic class axis, as artifacts name them in their metadata, and errors about labels.

use ortrain_graph::Graph;
use ortrain_onnx::{ModelProto, StringStringEntryProto};
use ortrain_ops::training::label_readings;

use crate::Error;

/// Metadata key of an entry with the name of labels.
const METADATA_KEY: &str = "ortrain.class_axis_by_labels";

/// Notes in a model's metadata that the first labels of these names determine the class axis.
pub(crate) fn mark_labels(model: &mut ModelProto, labels: &[String]) {
    let entry = |name: &String| StringStringEntryProto { key: METADATA_KEY.to_owned(), value: name.clone() };
    model.metadata_props.extend(labels.iter().map(entry));
}

/// Returns the names that [`mark_labels`] noted.
pub(crate) fn marked_labels(model: &ModelProto) -> Vec<String> {
    model
        .metadata_props
        .iter()
        .filter(|entry| entry.key == METADATA_KEY)
        .map(|entry| entry.value.clone())
        .collect()
}

/// Removes the notes of [`mark_labels`], for a model without the loss.
pub(crate) fn remove_marks(model: &mut ModelProto) {
    model.metadata_props.retain(|entry| entry.key != METADATA_KEY);
}

/// Adds both readings of the scores to an error about labels that do not fit.
pub(crate) fn explain_readings(error: Error, graph: &Graph) -> Error {
    let Error::Input { name, expected, found, mut reason } = error else { return error };
    if let Some(readings) = label_readings(graph, &name) {
        reason += &readings;
    }
    Error::Input { name, expected, found, reason }
}
