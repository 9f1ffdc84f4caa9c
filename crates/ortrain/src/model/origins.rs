//! Files and offsets of initializers in external data, so that an unchanged frozen base need not be written
//! again.

use std::fs;
use std::path::{Component, Path, PathBuf};

use bytes::Bytes;
use ortrain_onnx::proto::tensor_proto::DataLocation;
use ortrain_onnx::{EXTERNAL_FROM, GraphProto, ModelProto, StringStringEntryProto, TensorProto};
use rustc_hash::{FxHashMap, FxHashSet};

/// Payloads from files of external data, identified by their memory, which this struct keeps alive.
///
/// A tensor with the same memory therefore still has the bytes of the file, even after edits of the message
/// or graph.
#[derive(Clone, Debug, Default)]
pub(crate) struct Origins {
    payloads: FxHashMap<(usize, usize), Origin>,
    /// All files that were read, even if their data is no longer used.
    files: FxHashSet<PathBuf>,
}

#[derive(Clone, Debug)]
struct Origin {
    _payload: Bytes,
    /// Canonical path, with all links resolved.
    file: PathBuf,
    offset: u64,
}

fn payload_key(payload: &Bytes) -> (usize, usize) {
    (payload.as_ptr().addr(), payload.len())
}

impl Origins {
    /// Records that a payload starts at an offset of a file.
    pub(crate) fn record(&mut self, payload: &Bytes, file: PathBuf, offset: u64) {
        // Small payloads remain in the messages.
        if payload.len() >= EXTERNAL_FROM {
            let origin = Origin { _payload: payload.clone(), file: file.clone(), offset };
            self.payloads.insert(payload_key(payload), origin);
        }
        self.files.insert(file);
    }

    /// Returns true if the trained model has data in the file at this path.
    pub(crate) fn reads_file(&self, path: &Path) -> bool {
        fs::canonicalize(path).is_ok_and(|path| self.files.contains(&path))
    }

    /// Makes initializers refer to their original files, if these are in the folder or below. Returns true if
    /// any initializer came from another file.
    pub(crate) fn reference_files(&self, models: &mut [ModelProto], folder: &Path) -> bool {
        let mut elsewhere = false;
        let Ok(folder) = fs::canonicalize(folder) else { return elsewhere };
        for graph in graphs(models) {
            for tensor in &mut graph.initializer {
                let Some(origin) = self.payloads.get(&payload_key(&tensor.raw_data)) else { continue };
                match relative_location(&folder, &origin.file) {
                    Some(location) => set_location(tensor, &location, origin.offset),
                    None => elsewhere = true,
                }
            }
        }
        elsewhere
    }
}

fn graphs(models: &mut [ModelProto]) -> impl Iterator<Item = &mut GraphProto> {
    models.iter_mut().filter_map(|model| model.graph.as_mut())
}

/// Returns the location of a file relative to `folder`, if it is inside and every reader understands its
/// name.
fn relative_location(folder: &Path, file: &Path) -> Option<String> {
    let parts = file.strip_prefix(folder).ok()?.components();
    let texts = parts.map(|part| match part {
        Component::Normal(text) => text.to_str().filter(|text| !text.contains(['\\', ':'])),
        _ => None,
    });
    Some(texts.collect::<Option<Vec<&str>>>()?.join("/"))
}

/// Replaces the data of a tensor by its location.
fn set_location(tensor: &mut TensorProto, location: &str, offset: u64) {
    let entry = |key: &str, value: String| StringStringEntryProto { key: key.to_owned(), value };
    let payload = std::mem::take(&mut tensor.raw_data);
    tensor.data_location = DataLocation::External.into();
    tensor.external_data = vec![
        entry("location", location.to_owned()),
        entry("offset", offset.to_string()),
        entry("length", payload.len().to_string()),
    ];
}
