//! Files and offsets of initializers, so that an unchanged frozen base need not be written again.

use std::fs;
use std::path::{Component, Path, PathBuf};

use bytes::Bytes;
use ortrain_onnx::proto::tensor_proto::DataLocation;
use ortrain_onnx::{
    DataFile, EXTERNAL_FROM, ExternalData, GraphProto, LARGEST_MESSAGE, LoadedModel, ModelProto, OnnxError,
    StringStringEntryProto, TensorProto, ToWrite, checksum_of, message_size, stage,
};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::{Error, Result};

/// Payloads from files, identified by their memory, which this struct keeps alive.
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

/// Writes a model in which unchanged initializers refer to their original files, if these are in `folder` or below. Other
/// initializers are written into the model, or to `<path>.data` if the model would exceed 2 GiB. `folder` is the folder
/// where the reader of the model looks for files, by default the folder of the model.
///
/// # Errors
/// If a file cannot be read or written.
pub(crate) fn write_with_references(
    model: ModelProto,
    origins: &Origins,
    path: &Path,
    folder: Option<&Path>,
) -> Result<()> {
    let destination = ortrain_files::resolved(path);
    let replaced = fs::canonicalize(&destination).ok();
    let mut models = [model];
    let folder = folder.unwrap_or(ortrain_files::folder(&destination));
    origins.reference_base(&mut models, folder, replaced.as_deref())?;
    let [model] = &models;
    let mut name = destination.clone().into_os_string();
    name.push(".data");
    let data = PathBuf::from(name);
    if message_size(model) > LARGEST_MESSAGE
        && let Some(file) = origins.file_at(&data)
    {
        return Err(Error::Argument(format!(
            "the model cannot be written to {}: its other weights would replace {}, which has the weights of its base; \
             write it under another name, or to another folder",
            path.display(),
            file.display()
        )));
    }
    let external = ExternalData::none();
    let models = [ToWrite { model, external: &external, path }];
    let above = LARGEST_MESSAGE as u64;
    let data = DataFile { path: &data, above, from: EXTERNAL_FROM, is_appended: true };
    Ok(stage(&models, &data)?.persist()?)
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

    /// Records that a model has data in a file.
    pub(crate) fn record_file(&mut self, file: PathBuf) {
        self.files.insert(file);
    }

    /// Returns a file that is also at another path.
    pub(crate) fn file_at(&self, path: &Path) -> Option<&Path> {
        fs::canonicalize(path).ok().and_then(|path| self.files.get(&path)).map(PathBuf::as_path)
    }

    /// Records a payload that is a range of the model's own file, which is mapped.
    pub(crate) fn record_own(&mut self, model: &LoadedModel, payload: &Bytes) {
        if payload.len() >= EXTERNAL_FROM
            && let Some((file, offset)) = model.own_file(payload)
        {
            self.record(payload, file.to_owned(), offset);
        }
    }

    /// Returns true if the model has data in the file at this path.
    pub(crate) fn reads_file(&self, path: &Path) -> bool {
        self.file_at(path).is_some()
    }

    /// Returns the folder of the files that payloads come from, if it is a single folder.
    pub(crate) fn folder(&self) -> Option<&Path> {
        let mut folders = self.payloads.values().map(|origin| ortrain_files::folder(&origin.file));
        let first = folders.next()?;
        folders.all(|folder| folder == first).then_some(first)
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
                    Some(location) => set_location(tensor, &location, origin.offset, None),
                    None => elsewhere = true,
                }
            }
        }
        elsewhere
    }

    /// Works like [`Origins::reference_files`], and adds the checksums of the files. `replaced` is a file that the models
    /// will replace, so that they cannot refer to it.
    ///
    /// # Errors
    /// If a file cannot be read.
    pub(crate) fn reference_base(
        &self,
        models: &mut [ModelProto],
        folder: &Path,
        replaced: Option<&Path>,
    ) -> Result<bool> {
        let mut elsewhere = false;
        let Ok(folder) = fs::canonicalize(folder) else { return Ok(elsewhere) };
        let mut found: FxHashMap<&Path, Option<(String, String)>> = FxHashMap::default();
        for graph in graphs(models) {
            for tensor in &mut graph.initializer {
                let Some(origin) = self.payloads.get(&payload_key(&tensor.raw_data)) else { continue };
                let file = origin.file.as_path();
                if !found.contains_key(file) {
                    let location = relative_location(&folder, file).filter(|_| replaced != Some(file));
                    let unreadable = |error| OnnxError::Read { path: file.to_owned(), error };
                    let checksum = |location| Ok((location, checksum_of(file).map_err(unreadable)?));
                    found.insert(file, location.map(checksum).transpose().map_err(|error: OnnxError| error)?);
                }
                match &found[file] {
                    Some((location, checksum)) => {
                        set_location(tensor, location, origin.offset, Some(checksum));
                    }
                    None => elsewhere = true,
                }
            }
        }
        Ok(elsewhere)
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
fn set_location(tensor: &mut TensorProto, location: &str, offset: u64, checksum: Option<&str>) {
    let entry = |key: &str, value: String| StringStringEntryProto { key: key.to_owned(), value };
    let payload = std::mem::take(&mut tensor.raw_data);
    tensor.data_location = DataLocation::External.into();
    tensor.external_data = vec![
        entry("location", location.to_owned()),
        entry("offset", offset.to_string()),
        entry("length", payload.len().to_string()),
    ];
    tensor.external_data.extend(checksum.map(|checksum| entry("checksum", checksum.to_owned())));
}
