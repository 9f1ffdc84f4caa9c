//! Files and offsets of initializers that lie on the disk already, so that a frozen base need not be written again.

use std::fs;
use std::path::{Component, Path, PathBuf};

use bytes::Bytes;
use ortrain_onnx::proto::tensor_proto::DataLocation;
use ortrain_onnx::{EXTERNAL_FROM, GraphProto, ModelProto, StringStringEntryProto, TensorProto};
use rustc_hash::{FxHashMap, FxHashSet};

/// Payloads that were read from files of external data. A payload is known by its memory, which stays as long as this
/// does: whatever was done to a message or graph in between, a tensor that still has these bytes has those of the file.
#[derive(Clone, Debug, Default)]
pub(crate) struct Origins {
    payloads: FxHashMap<(usize, usize), Origin>,
    /// All files that anything was read from, whatever became of it.
    files: FxHashSet<PathBuf>,
}

#[derive(Clone, Debug)]
struct Origin {
    _payload: Bytes,
    /// With all links followed.
    file: PathBuf,
    offset: u64,
}

fn key(payload: &Bytes) -> (usize, usize) {
    (payload.as_ptr().addr(), payload.len())
}

impl Origins {
    /// Notes that a payload begins at an offset of a file.
    pub(crate) fn note(&mut self, payload: &Bytes, file: PathBuf, offset: u64) {
        // What is small stays in messages.
        if payload.len() >= EXTERNAL_FROM {
            let origin = Origin { _payload: payload.clone(), file: file.clone(), offset };
            self.payloads.insert(key(payload), origin);
        }
        self.files.insert(file);
    }

    /// Whether the model that is trained has data in the file that a path leads to.
    pub(crate) fn read_from(&self, path: &Path) -> bool {
        fs::canonicalize(path).is_ok_and(|path| self.files.contains(&path))
    }

    /// Lets the initializers of models name the files that they came from, where those lie in the folder or below. Returns
    /// whether any came from another file.
    pub(crate) fn name_files(&self, models: &mut [ModelProto], folder: &Path) -> bool {
        let mut elsewhere = false;
        let Ok(folder) = fs::canonicalize(folder) else { return elsewhere };
        for graph in graphs(models) {
            for tensor in &mut graph.initializer {
                let Some(origin) = self.payloads.get(&key(&tensor.raw_data)) else { continue };
                match location(&folder, &origin.file) {
                    Some(location) => name(tensor, &location, origin.offset),
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

/// How a model in `folder` names a file, if it lies there or below and every reader understands its name.
fn location(folder: &Path, file: &Path) -> Option<String> {
    let parts = file.strip_prefix(folder).ok()?.components();
    let texts = parts.map(|part| match part {
        Component::Normal(text) => text.to_str().filter(|text| !text.contains(['\\', ':'])),
        _ => None,
    });
    Some(texts.collect::<Option<Vec<&str>>>()?.join("/"))
}

/// Replaces the data of a tensor by the place where it lies.
fn name(tensor: &mut TensorProto, location: &str, offset: u64) {
    let entry = |key: &str, value: String| StringStringEntryProto { key: key.to_owned(), value };
    let payload = std::mem::take(&mut tensor.raw_data);
    tensor.data_location = DataLocation::External.into();
    tensor.external_data = vec![
        entry("location", location.to_owned()),
        entry("offset", offset.to_string()),
        entry("length", payload.len().to_string()),
    ];
}
