//! Notes on adapters in the metadata of a model.

use ortrain_onnx::{ModelProto, StringStringEntryProto};

use super::Init;
use crate::{Error, Result};

/// Metadata of a model with the method that took a part of its weights, after the adapter with this part was removed.
const REST: &str = "ortrain.lora_rest";

/// Note on an adapter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Note {
    /// Method of the initial values that changed the weights of the base.
    Init,
    /// Input with the weights of the adapter for each row.
    Rows,
}

impl Note {
    fn key(self, adapter: &str) -> String {
        let kind = match self {
            Note::Init => "ortrain.lora_init",
            Note::Rows => "ortrain.lora_rows",
        };
        format!("{kind}.{adapter}")
    }
}

/// Returns a note on an adapter.
pub(super) fn note<'m>(model: &'m ModelProto, kind: Note, adapter: &str) -> Option<&'m str> {
    let key = kind.key(adapter);
    model.metadata_props.iter().find(|entry| entry.key == key).map(|entry| entry.value.as_str())
}

/// Sets a note on an adapter; `None` removes it.
pub(super) fn set_note(model: &mut ModelProto, kind: Note, adapter: &str, value: Option<String>) {
    let key = kind.key(adapter);
    model.metadata_props.retain(|entry| entry.key != key);
    if let Some(value) = value {
        model.metadata_props.push(StringStringEntryProto { key, value });
    }
}

/// Notes the method that changed the weights of the base for an adapter.
pub(super) fn set_init(model: &mut ModelProto, adapter: &str, init: Init) {
    set_note(model, Note::Init, adapter, Some(init.name().to_owned()));
    model.metadata_props.retain(|entry| entry.key != REST);
}

/// Returns true if the weights of a model are the rest of a method, without the adapter with the other part.
pub(super) fn has_rest(model: &ModelProto, init: Init) -> bool {
    model.metadata_props.iter().any(|entry| entry.key == REST && entry.value == init.name())
}

/// Removes the notes on an adapter. If its part of the weights is lost, this is noted.
pub(super) fn clear_notes(model: &mut ModelProto, adapter: &str, is_merged: bool) {
    if let Some(init) = note(model, Note::Init, adapter).filter(|_| !is_merged).map(str::to_owned) {
        model.metadata_props.retain(|entry| entry.key != REST);
        model.metadata_props.push(StringStringEntryProto { key: REST.to_owned(), value: init });
    }
    set_note(model, Note::Init, adapter, None);
}

/// Checks that no adapter has weights by row, which changes of single adapters would ignore.
pub(super) fn check_without_rows(model: &ModelProto, label: &str, name: &str) -> Result<()> {
    match note(model, Note::Rows, name) {
        None => Ok(()),
        Some(input) => Err(Error::Argument(format!(
            "the adapter {name:?} of {label} has a weight for each row, from the input {input:?}; take the model before \
             with_row_adapters"
        ))),
    }
}

/// Notes that an adapter has weights by row.
pub(super) fn set_rows(model: &mut ModelProto, name: &str, input: &str) {
    set_note(model, Note::Rows, name, Some(input.to_owned()));
}
