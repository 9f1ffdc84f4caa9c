//! Saving of models to bytes and files.

use std::collections::HashMap;
use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use ortrain_files::{Staged, flush_folder, lock_folder, resolved, sibling_path, sweep, sweep_waiting};
use prost::Message as _;

use crate::payload::{element_bits, is_external, stored_bytes, stored_size, tensor_payload};
use crate::proto::tensor_proto::{DataLocation, DataType};
use crate::tensors::{TensorRole, visit_tensors_mut};
use crate::{ExternalData, LoadedModel, ModelProto, OnnxError, StringStringEntryProto, TensorProto};

/// Maximum number of bytes of a protobuf message that readers accept.
pub const LARGEST_MESSAGE: usize = i32::MAX as usize;

/// Minimum number of bytes of an initializer that moves to a data file. Smaller initializers often determine shapes,
/// which some readers need before they open other files.
pub const EXTERNAL_FROM: usize = 1024;

/// Alignment of external tensors in bytes. Tensors of at least `LARGE` bytes are aligned to a page, so that they can be
/// mapped.
const ALIGNMENT: u64 = 64;
const PAGE: u64 = 4096;
const LARGE: usize = 1 << 20;

/// Encodes a model as one protobuf message, with fields in the order of their numbers. Equal messages give equal bytes.
///
/// # Errors
///
/// [`OnnxError::TooLarge`] if the message exceeds 2 GiB.
pub fn encode(model: &ModelProto) -> Result<Vec<u8>, OnnxError> {
    let size = model.encoded_len();
    if size > LARGEST_MESSAGE {
        return Err(OnnxError::TooLarge { size });
    }
    Ok(model.encode_to_vec())
}

/// Returns the number of bytes of a model as one protobuf message, without its external data.
pub fn message_size(model: &ModelProto) -> usize {
    model.encoded_len()
}

/// Returns the number of bytes of a model with its external data. The external data is not read.
fn total_size(message: &mut ModelProto) -> Result<u64, OnnxError> {
    let mut size = message.encoded_len() as u64;
    visit_tensors_mut(message, |tensor, _| {
        size += if is_external(tensor) { stored_size(tensor)? as u64 } else { 0 };
        Ok::<(), OnnxError>(())
    })?;
    Ok(size)
}

/// Writes a message unchanged. External data that it refers to must already exist.
///
/// The file is written beside `path`, flushed to the disk and renamed. At every moment, `path` is the old file or the
/// new one.
///
/// # Errors
///
/// Fails if the message is larger than 2 GiB, or if the file cannot be written.
pub fn save(model: &ModelProto, path: impl AsRef<Path>) -> Result<(), OnnxError> {
    let path = path.as_ref();
    // A killed save with a data file may have left a temporary file.
    sweep(&resolved(&data_beside(path)?));
    Ok(written(&encode(model)?, path)?.persist()?)
}

/// Options for the external data of models to be written.
#[derive(Debug, Clone, Copy)]
pub struct DataFile<'a> {
    /// Path of the data file, in the folder of the models.
    pub path: &'a Path,
    /// Number of bytes of a model above which its initializers move to the data file; at most [`LARGEST_MESSAGE`].
    pub above: u64,
    /// Minimum number of bytes of an initializer that moves to the data file; usually [`EXTERNAL_FROM`].
    pub from: usize,
    /// True if tensors with external data keep it. The written models then look for it beside themselves. Otherwise,
    /// this data is stored in the message or in the data file.
    pub is_appended: bool,
}

/// Model to be written.
#[derive(Debug, Clone, Copy)]
pub struct ToWrite<'a> {
    /// ONNX message of the model.
    pub model: &'a ModelProto,
    /// Source of its external data.
    pub external: &'a ExternalData,
    /// Path of the model.
    pub path: &'a Path,
}

/// Models and their shared external data, written beside their destinations by [`stage`].
///
/// The files are removed unless [`StagedModels::persist`] moves them to their destinations.
#[derive(Debug)]
pub struct StagedModels {
    models: Vec<Staged>,
    data: Option<StagedData>,
    /// Destination of the external data, if there is any.
    data_destination: PathBuf,
}

#[derive(Debug)]
struct StagedData {
    file: Staged,
    /// True if the data file can have a temporary name in the folder of the models.
    can_wait: bool,
    /// Temporary name of the data file.
    waiting: PathBuf,
    /// Models that refer to the temporary name.
    models: Vec<Staged>,
}

/// Writes models beside their destinations and flushes them. Initializers that leave the messages are written to one
/// data file, in which data shared by several models occurs once.
///
/// Offsets in the data file are multiples of 64, and multiples of 4096 for tensors of at least 1 MiB.
///
/// # Errors
///
/// Fails if external data cannot be read, if a message would exceed 2 GiB, or if a file cannot be written.
pub fn stage(models: &[ToWrite<'_>], data: &DataFile<'_>) -> Result<StagedModels, OnnxError> {
    // Invalid paths fail before any other work.
    models.iter().try_for_each(|model| named(model.path).map(drop))?;
    let mut messages: Vec<ModelProto> = models.iter().map(|model| model.model.clone()).collect();
    let data_destination = resolved(data.path);
    let mut outside = false;
    for message in &mut messages {
        let size = if data.is_appended { message_size(message) as u64 } else { total_size(message)? };
        outside |= size > data.above;
    }
    if !outside {
        // A killed save of a larger model may have left a temporary data file.
        sweep(&data_destination);
        let staged = messages.iter_mut().zip(models).map(|(message, model)| {
            if !data.is_appended {
                visit_tensors_mut(message, |tensor, _| take_in(tensor, model.external))?;
            }
            written(&encode(message)?, model.path)
        });
        let models = staged.collect::<Result<_, _>>()?;
        return Ok(StagedModels { models, data: None, data_destination });
    }

    let location = named(data.path)?;
    let mode_source = models.first().map_or(data.path, |model| model.path);
    let mut side = Side::new(Staged::beside_like(data.path, mode_source)?, data.path);
    for (message, model) in messages.iter_mut().zip(models) {
        visit_tensors_mut(message, |tensor, role| {
            if data.is_appended && is_external(tensor) {
                return Ok(());
            }
            // Few readers look for external data in attributes.
            if role != TensorRole::Initializer {
                return take_in(tensor, model.external);
            }
            match movable(tensor, model.external, data.from)? {
                None => take_in(tensor, model.external),
                Some(payload) => {
                    let entries = side.put(tensor, &payload)?;
                    clear(tensor);
                    tensor.data_location = DataLocation::External.into();
                    tensor.external_data = vec![entry("location", location.to_owned())];
                    tensor.external_data.extend(entries);
                    Ok(())
                }
            }
        })?;
    }
    let Some(file) = side.finished()? else {
        // All data is small or belongs to constants of nodes.
        let staged =
            messages.iter().zip(models).map(|(message, model)| written(&encode(message)?, model.path));
        let models = staged.collect::<Result<_, _>>()?;
        return Ok(StagedModels { models, data: None, data_destination });
    };
    staged_with_data(models, messages, data, file, data_destination)
}

/// Finishes [`stage`]: writes models that refer to the finished data file.
fn staged_with_data(
    models: &[ToWrite<'_>],
    mut messages: Vec<ModelProto>,
    data: &DataFile<'_>,
    file: Staged,
    data_destination: PathBuf,
) -> Result<StagedModels, OnnxError> {
    let location = named(data.path)?;
    let waiting = sibling_path(data.path, &format!("{:08x}", a_number()));
    let (mut at_destination, mut at_waiting) = (Vec::new(), Vec::new());
    for (message, model) in messages.iter_mut().zip(models) {
        let inside = |error| match error {
            OnnxError::TooLarge { size } => OnnxError::TooLargeInside { path: model.path.to_owned(), size },
            error => error,
        };
        at_destination.push(written(&encode(message).map_err(inside)?, model.path)?);
        let name = named(&waiting)?;
        visit_tensors_mut(message, |tensor, _| {
            let locations = tensor.external_data.iter_mut().filter(|entry| entry.key == "location");
            locations
                .filter(|entry| entry.value == location)
                .for_each(|entry| name.clone_into(&mut entry.value));
            Ok::<(), OnnxError>(())
        })?;
        at_waiting.push(written(&encode(message).map_err(inside)?, model.path)?);
    }
    let can_wait = file.destination() == data.path;
    let data = Some(StagedData { file, can_wait, waiting, models: at_waiting });
    Ok(StagedModels { models: at_destination, data, data_destination })
}

impl StagedModels {
    /// Replaces the old files. At every moment, each model finds its own data.
    ///
    /// If older data exists, the new data first gets a temporary name, and models that refer to this name replace the
    /// old models. Then a hard link gives the data its final name, and models that refer to the final name follow.
    /// Finally, the temporary name is removed.
    ///
    /// On a file system without hard links, the data keeps its temporary name. If the data's destination is a link to
    /// another folder, the old models refer to the new data for a moment.
    ///
    /// # Errors
    ///
    /// Fails if the operating system reports an error.
    pub fn persist(self) -> Result<(), OnnxError> {
        let StagedModels { models, data, data_destination } = self;
        if let Some(StagedData { mut file, can_wait, waiting, models: at_waiting }) = data {
            let _one_at_a_time = lock_folder(&data_destination);
            if !can_wait || !data_destination.exists() {
                file.rename(&data_destination)?;
                file.keep();
                flush_folder(&data_destination)?;
                persist_all(models)?;
            } else {
                file.rename(&waiting)?;
                flush_folder(&waiting)?;
                // The first placed model needs the data file.
                file.keep();
                persist_all(at_waiting)?;
                if !file.link_to_destination()? {
                    return Ok(());
                }
                flush_folder(&data_destination)?;
                persist_all(models)?;
                // A file that cannot be removed is swept by the next save.
                let _ = fs::remove_file(&waiting);
            }
        } else {
            persist_all(models)?;
        }
        sweep_waiting(&data_destination);
        Ok(())
    }
}

fn persist_all(files: Vec<Staged>) -> Result<(), OnnxError> {
    Ok(files.into_iter().try_for_each(Staged::persist)?)
}

/// Returns a number that other saves, in this or another process, are unlikely to use.
fn a_number() -> u32 {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.subsec_nanos());
    let mixed = (COUNTER.fetch_add(1, Ordering::Relaxed) << 16) ^ std::process::id().rotate_left(20) ^ now;
    mixed.wrapping_mul(0x9e37_79b1)
}

/// Writes and flushes a file beside its destination.
fn written(bytes: &[u8], path: &Path) -> Result<Staged, OnnxError> {
    let mut file = Staged::beside(path)?;
    file.append(bytes)?;
    file.sync()?;
    Ok(file)
}

/// Returns the path of the data file of one model.
fn data_beside(path: &Path) -> Result<PathBuf, OnnxError> {
    Ok(path.with_file_name(format!("{}.data", named(path)?)))
}

/// Returns the name of a file. Locations are texts, so that a name that is not UTF-8 is an error.
fn named(path: &Path) -> Result<&str, OnnxError> {
    let name = path.file_name().and_then(|name| name.to_str());
    name.ok_or_else(|| OnnxError::FileName { path: path.to_owned() })
}

impl LoadedModel {
    /// Saves the model as one file that needs no other file. External data is stored in the message.
    ///
    /// The file is written beside `path`, flushed to the disk and renamed. At every moment, `path` is the old file or
    /// the new one.
    ///
    /// # Errors
    ///
    /// Fails if external data cannot be read, if the message is larger than 2 GiB, or if the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), OnnxError> {
        let mut model = self.proto.clone();
        visit_tensors_mut(&mut model, |tensor, _| take_in(tensor, self.external()))?;
        save(&model, path)
    }

    /// Saves the model with the data of every initializer of at least `threshold` bytes in a data file. Its path is
    /// the model's path with `.data` appended. An old data file is replaced. Other external data is stored in the
    /// message.
    ///
    /// [`stage`] and [`StagedModels::persist`] describe the steps.
    ///
    /// # Errors
    ///
    /// Fails if external data cannot be read, if the message would exceed 2 GiB, or if a file cannot be written.
    pub fn save_with_external_data(&self, path: impl AsRef<Path>, threshold: usize) -> Result<(), OnnxError> {
        self.save_as(path.as_ref(), 0, threshold)
    }

    /// Saves the model as one file of at most `above` bytes. A larger model is saved like
    /// [`LoadedModel::save_with_external_data`] with a threshold of [`EXTERNAL_FROM`]. One file can hold at most
    /// [`LARGEST_MESSAGE`] bytes.
    ///
    /// # Errors
    ///
    /// Fails like [`LoadedModel::save_with_external_data`].
    pub fn save_above(&self, path: impl AsRef<Path>, above: u64) -> Result<(), OnnxError> {
        self.save_as(path.as_ref(), above, EXTERNAL_FROM)
    }

    /// Returns the path of the data file that [`LoadedModel::save_above`] writes, if there is one.
    ///
    /// # Errors
    ///
    /// Fails if the path does not end in a file name, or if the model has data of unknown size.
    pub fn data_file_above(&self, path: impl AsRef<Path>, above: u64) -> Result<Option<PathBuf>, OnnxError> {
        let data = data_beside(path.as_ref())?;
        let size = total_size(&mut self.proto.clone())?;
        Ok((size > above.min(LARGEST_MESSAGE as u64)).then_some(data))
    }

    fn save_as(&self, path: &Path, above: u64, from: usize) -> Result<(), OnnxError> {
        let data = data_beside(path)?;
        let model = ToWrite { model: &self.proto, external: self.external(), path };
        let above = above.min(LARGEST_MESSAGE as u64);
        let data = DataFile { path: &data, above, from, is_appended: false };
        stage(&[model], &data)?.persist()
    }
}

/// Data file that is being written.
struct Side<'a> {
    file: BufWriter<Staged>,
    path: &'a Path,
    length: u64,
    /// Offsets of payloads that are ranges of the messages' buffers, by address and length.
    ranges: HashMap<(usize, usize), u64>,
    /// Payloads decoded from typed fields and their offsets, by name.
    converted: HashMap<String, (Bytes, u64)>,
}

impl<'a> Side<'a> {
    fn new(file: Staged, path: &'a Path) -> Side<'a> {
        let file = BufWriter::with_capacity(1 << 16, file);
        Side { file, path, length: 0, ranges: HashMap::new(), converted: HashMap::new() }
    }

    /// Stores a payload, and returns its `offset` and `length` entries. A payload that is already stored is not written
    /// again.
    fn put(
        &mut self,
        tensor: &TensorProto,
        payload: &Bytes,
    ) -> Result<[StringStringEntryProto; 2], OnnxError> {
        let range = (payload.as_ptr().addr(), payload.len());
        let is_range = !tensor.raw_data.is_empty();
        let known = match self.converted.get(&tensor.name) {
            _ if is_range => self.ranges.get(&range).copied(),
            Some((stored, start)) if stored == payload => Some(*start),
            _ => None,
        };
        let start = match known {
            Some(start) => start,
            None => {
                let start = self.append(payload)?;
                if is_range {
                    self.ranges.insert(range, start);
                } else if !is_external(tensor) {
                    self.converted.insert(tensor.name.clone(), (payload.clone(), start));
                }
                start
            }
        };
        Ok([entry("offset", start.to_string()), entry("length", payload.len().to_string())])
    }

    fn append(&mut self, payload: &Bytes) -> Result<u64, OnnxError> {
        let start = self.length.next_multiple_of(if payload.len() >= LARGE { PAGE } else { ALIGNMENT });
        let padding = &mut io::Read::take(io::repeat(0), start - self.length);
        let done = io::copy(padding, &mut self.file).and_then(|_| self.file.write_all(payload));
        done.map_err(|error| OnnxError::Write { path: self.path.to_owned(), error })?;
        self.length = start + payload.len() as u64;
        Ok(start)
    }

    /// Flushes and returns the file, or returns `None` if it is empty.
    fn finished(self) -> Result<Option<Staged>, OnnxError> {
        let path = self.path;
        let failed = |error| OnnxError::Write { path: path.to_owned(), error };
        let mut file = self.file.into_inner().map_err(|error| failed(error.into_error()))?;
        if self.length == 0 {
            return Ok(None);
        }
        file.sync()?;
        Ok(Some(file))
    }
}

/// Returns the data of an initializer that moves to the data file, or `None` if it stays in the message.
fn movable(tensor: &TensorProto, external: &ExternalData, from: usize) -> Result<Option<Bytes>, OnnxError> {
    let is_fixed_size = DataType::try_from(tensor.data_type).ok().and_then(element_bits).is_some();
    let payload = if is_fixed_size {
        tensor_payload(tensor, external)?
    } else if is_external(tensor) {
        stored_bytes(tensor, external)?
    } else {
        tensor.raw_data.clone()
    };
    Ok((!payload.is_empty() && payload.len() >= from).then_some(payload))
}

/// Stores external data in the message.
fn take_in(tensor: &mut TensorProto, external: &ExternalData) -> Result<(), OnnxError> {
    if is_external(tensor) {
        let payload = stored_bytes(tensor, external)?;
        clear(tensor);
        tensor.raw_data = payload;
    }
    Ok(())
}

/// Removes the data of a tensor from every field.
fn clear(tensor: &mut TensorProto) {
    tensor.raw_data = Bytes::new();
    tensor.float_data = Vec::new();
    tensor.int32_data = Vec::new();
    tensor.int64_data = Vec::new();
    tensor.double_data = Vec::new();
    tensor.uint64_data = Vec::new();
    tensor.data_location = DataLocation::Default.into();
    tensor.external_data = Vec::new();
}

fn entry(key: &str, value: String) -> StringStringEntryProto {
    StringStringEntryProto { key: key.to_owned(), value }
}
