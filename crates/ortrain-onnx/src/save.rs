//! From a model to bytes and files.

use std::collections::HashMap;
use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use ortrain_files::{Staged, beside, flush_folder, lock_folder, resolved, sweep, sweep_waiting};
use prost::Message as _;

use crate::payload::{element_size, is_external, stored_bytes, stored_size, tensor_payload};
use crate::proto::tensor_proto::{DataLocation, DataType};
use crate::tensors::{TensorRole, visit_tensors_mut};
use crate::{ExternalData, LoadedModel, ModelProto, OnnxError, StringStringEntryProto, TensorProto};

/// The largest protobuf message that its readers accept, in bytes.
pub const LARGEST_MESSAGE: usize = i32::MAX as usize;

/// Initializers of fewer bytes stay in the message when others leave it: shapes are made of them, which some readers
/// want to know before they look for other files.
pub const EXTERNAL_FROM: usize = 1024;

/// Offsets of external tensors are multiples of this, and those of large ones of a page, so that they can be mapped.
const ALIGNMENT: u64 = 64;
const PAGE: u64 = 4096;
const LARGE: usize = 1 << 20;

/// The bytes of a model as one protobuf message, fields in the order of their numbers: equal messages, equal bytes.
///
/// # Errors
///
/// [`OnnxError::TooLarge`] when there are more than 2 GiB of them.
pub fn encode(model: &ModelProto) -> Result<Vec<u8>, OnnxError> {
    let size = model.encoded_len();
    if size > LARGEST_MESSAGE {
        return Err(OnnxError::TooLarge { size });
    }
    Ok(model.encode_to_vec())
}

/// The bytes that a model takes as one protobuf message, without its external data.
pub fn message_size(model: &ModelProto) -> usize {
    model.encoded_len()
}

/// The bytes that a model takes with its external data, which is only looked at.
fn whole_size(message: &mut ModelProto) -> Result<u64, OnnxError> {
    let mut size = message.encoded_len() as u64;
    visit_tensors_mut(message, |tensor, _| {
        size += if is_external(tensor) { stored_size(tensor)? as u64 } else { 0 };
        Ok::<(), OnnxError>(())
    })?;
    Ok(size)
}

/// Writes a message as it is; external data it refers to must be there already.
///
/// The file is written beside, flushed to the disk and renamed: at every moment `path` is the old file or the new one.
///
/// # Errors
///
/// The message is larger than 2 GiB, or the file cannot be written.
pub fn save(model: &ModelProto, path: impl AsRef<Path>) -> Result<(), OnnxError> {
    let path = path.as_ref();
    // One with a second file may have been killed here.
    sweep(&resolved(&data_beside(path)?));
    Ok(written(&encode(model)?, path)?.place()?)
}

/// The external data of models that are written: where it goes, and when.
#[derive(Debug, Clone, Copy)]
pub struct DataFile<'a> {
    /// The file, in the folder of the models.
    pub path: &'a Path,
    /// Initializers go there if a model would take more bytes than these without it; [`LARGEST_MESSAGE`] at most.
    pub above: u64,
    /// Initializers of fewer bytes stay in the message: [`EXTERNAL_FROM`].
    pub from: usize,
    /// Whether tensors that have external data keep it, which is then where their model will look for it. Otherwise it is
    /// taken in, or goes to the file with all other.
    pub keep: bool,
}

/// A model to be written.
#[derive(Debug, Clone, Copy)]
pub struct ToWrite<'a> {
    /// The message.
    pub model: &'a ModelProto,
    /// The folder of its external data.
    pub external: &'a ExternalData,
    /// The file.
    pub path: &'a Path,
}

/// Models, and the external data that they share, on the disk beside their places. They vanish unless they are placed
/// there. Made by [`stage`].
#[derive(Debug)]
pub struct StagedModels {
    models: Vec<Staged>,
    data: Option<StagedData>,
    /// The place of external data, if there is any.
    data_place: PathBuf,
}

#[derive(Debug)]
struct StagedData {
    file: Staged,
    /// Whether it can wait for its place in the folder of the models.
    can_wait: bool,
    /// The name under which it waits.
    waiting: PathBuf,
    /// The models that look for it there.
    models: Vec<Staged>,
}

/// Writes models beside their places and flushes them, and beside them the initializers that they do not hold themselves:
/// one file, in which what several models have lies once.
///
/// Offsets in it are multiples of 64, those of tensors of a MiB and more multiples of 4096.
///
/// # Errors
///
/// External data cannot be read, what stays in a message is larger than 2 GiB, or a file cannot be written.
pub fn stage(models: &[ToWrite<'_>], data: &DataFile<'_>) -> Result<StagedModels, OnnxError> {
    // What is no place for a file is found before the work.
    models.iter().try_for_each(|model| named(model.path).map(drop))?;
    let mut messages: Vec<ModelProto> = models.iter().map(|model| model.model.clone()).collect();
    let data_place = resolved(data.path);
    let mut outside = false;
    for message in &mut messages {
        let size = if data.keep { message_size(message) as u64 } else { whole_size(message)? };
        outside |= size > data.above;
    }
    if !outside {
        // A larger one may have been killed here.
        sweep(&data_place);
        let staged = messages.iter_mut().zip(models).map(|(message, model)| {
            if !data.keep {
                visit_tensors_mut(message, |tensor, _| take_in(tensor, model.external))?;
            }
            written(&encode(message)?, model.path)
        });
        let models = staged.collect::<Result<_, _>>()?;
        return Ok(StagedModels { models, data: None, data_place });
    }

    let location = named(data.path)?;
    let like = models.first().map_or(data.path, |model| model.path);
    let mut side = Side::new(Staged::beside_like(data.path, like)?, data.path);
    for (message, model) in messages.iter_mut().zip(models) {
        visit_tensors_mut(message, |tensor, role| {
            if data.keep && is_external(tensor) {
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
        // All of it is small, or constants of nodes.
        let staged =
            messages.iter().zip(models).map(|(message, model)| written(&encode(message)?, model.path));
        let models = staged.collect::<Result<_, _>>()?;
        return Ok(StagedModels { models, data: None, data_place });
    };
    staged_with_data(models, messages, data, file, data_place)
}

/// The end of [`stage`]: the models, which name a file that is written.
fn staged_with_data(
    models: &[ToWrite<'_>],
    mut messages: Vec<ModelProto>,
    data: &DataFile<'_>,
    file: Staged,
    data_place: PathBuf,
) -> Result<StagedModels, OnnxError> {
    let location = named(data.path)?;
    let waiting = beside(data.path, &format!("{:08x}", a_number()));
    let (mut at_place, mut at_waiting) = (Vec::new(), Vec::new());
    for (message, model) in messages.iter_mut().zip(models) {
        let inside = |error| match error {
            OnnxError::TooLarge { size } => OnnxError::TooLargeInside { path: model.path.to_owned(), size },
            error => error,
        };
        at_place.push(written(&encode(message).map_err(inside)?, model.path)?);
        let name = named(&waiting)?;
        visit_tensors_mut(message, |tensor, _| {
            let ours = tensor.external_data.iter_mut().filter(|entry| entry.key == "location");
            ours.filter(|entry| entry.value == location).for_each(|entry| name.clone_into(&mut entry.value));
            Ok::<(), OnnxError>(())
        })?;
        at_waiting.push(written(&encode(message).map_err(inside)?, model.path)?);
    }
    let can_wait = file.destination() == data.path;
    let data = Some(StagedData { file, can_wait, waiting, models: at_waiting });
    Ok(StagedModels { models: at_place, data, data_place })
}

impl StagedModels {
    /// Replaces what is there. At every moment, each model that is there finds the data that belongs to it: where older
    /// data has to make way, the new data waits under a name of its own, which the new models know; it gets its place as a
    /// second name, then the models know that one, and the first one goes.
    ///
    /// Where files cannot have two names, the data stays under the first one. Where the data's place is a link that leads
    /// to another folder, the old models meet the new data for a moment.
    ///
    /// # Errors
    ///
    /// The operating system refuses.
    pub fn place(self) -> Result<(), OnnxError> {
        let StagedModels { models, data, data_place } = self;
        if let Some(StagedData { mut file, can_wait, waiting, models: at_waiting }) = data {
            let _one_at_a_time = lock_folder(&data_place);
            if !can_wait || !data_place.exists() {
                file.rename(&data_place)?;
                file.keep();
                flush_folder(&data_place)?;
                place_all(models)?;
            } else {
                file.rename(&waiting)?;
                flush_folder(&waiting)?;
                // From the first of them on it is needed.
                file.keep();
                place_all(at_waiting)?;
                if !file.link_to_place()? {
                    return Ok(());
                }
                flush_folder(&data_place)?;
                place_all(models)?;
                // What cannot be removed is swept by the next one.
                let _ = fs::remove_file(&waiting);
            }
        } else {
            place_all(models)?;
        }
        sweep_waiting(&data_place);
        Ok(())
    }
}

fn place_all(files: Vec<Staged>) -> Result<(), OnnxError> {
    Ok(files.into_iter().try_for_each(Staged::place)?)
}

/// A number that no other save has, here or in another process.
fn a_number() -> u32 {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.subsec_nanos());
    let mixed = (COUNTER.fetch_add(1, Ordering::Relaxed) << 16) ^ std::process::id().rotate_left(20) ^ now;
    mixed.wrapping_mul(0x9e37_79b1)
}

/// A finished file, flushed, beside its place.
fn written(bytes: &[u8], path: &Path) -> Result<Staged, OnnxError> {
    let mut file = Staged::beside(path)?;
    file.append(bytes)?;
    file.sync()?;
    Ok(file)
}

/// The file with the data of one model.
fn data_beside(path: &Path) -> Result<PathBuf, OnnxError> {
    Ok(path.with_file_name(format!("{}.data", named(path)?)))
}

/// The name of a file. Locations are texts; a name that is none could not be found again.
fn named(path: &Path) -> Result<&str, OnnxError> {
    let name = path.file_name().and_then(|name| name.to_str());
    name.ok_or_else(|| OnnxError::FileName { path: path.to_owned() })
}

impl LoadedModel {
    /// Saves the model as one file that needs no other: external data is taken in.
    ///
    /// The file is written beside, flushed to the disk and renamed: at every moment `path` is the old file or the new
    /// one.
    ///
    /// # Errors
    ///
    /// External data cannot be read, the message is larger than 2 GiB, or the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<(), OnnxError> {
        let mut model = self.proto.clone();
        visit_tensors_mut(&mut model, |tensor, _| take_in(tensor, self.external()))?;
        save(&model, path)
    }

    /// Saves the model with the data of every initializer of at least `threshold` bytes in a file beside it, named as
    /// the model with `.data` appended, and replaced if it is there. Other external data is taken into the model.
    ///
    /// How: see [`stage`] and [`StagedModels::place`].
    ///
    /// # Errors
    ///
    /// External data cannot be read, what stays in the message is larger than 2 GiB, or a file cannot be written.
    pub fn save_with_external_data(&self, path: impl AsRef<Path>, threshold: usize) -> Result<(), OnnxError> {
        self.save_as(path.as_ref(), 0, threshold)
    }

    /// Saves the model as one file, if that takes no more than `above` bytes, and otherwise as
    /// [`LoadedModel::save_with_external_data`] does, with initializers of at least [`EXTERNAL_FROM`] bytes outside.
    /// [`LARGEST_MESSAGE`] is the most that one file can hold.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn save_above(&self, path: impl AsRef<Path>, above: u64) -> Result<(), OnnxError> {
        self.save_as(path.as_ref(), above, EXTERNAL_FROM)
    }

    /// The second file that [`LoadedModel::save_above`] writes, if it writes one.
    ///
    /// # Errors
    ///
    /// The path does not end in a file name, or the model has data of unknown size.
    pub fn data_file_above(&self, path: impl AsRef<Path>, above: u64) -> Result<Option<PathBuf>, OnnxError> {
        let data = data_beside(path.as_ref())?;
        let size = whole_size(&mut self.proto.clone())?;
        Ok((size > above.min(LARGEST_MESSAGE as u64)).then_some(data))
    }

    fn save_as(&self, path: &Path, above: u64, from: usize) -> Result<(), OnnxError> {
        let data = data_beside(path)?;
        let model = ToWrite { model: &self.proto, external: self.external(), path };
        let above = above.min(LARGEST_MESSAGE as u64);
        let data = DataFile { path: &data, above, from, keep: false };
        stage(&[model], &data)?.place()
    }
}

/// A file of external data while it is written.
struct Side<'a> {
    file: BufWriter<Staged>,
    path: &'a Path,
    length: u64,
    /// Where payloads lie that are ranges of the messages' buffers, by address and length.
    ranges: HashMap<(usize, usize), u64>,
    /// Where payloads lie that were put together from typed fields, by name.
    made: HashMap<String, (Bytes, u64)>,
}

impl<'a> Side<'a> {
    fn new(file: Staged, path: &'a Path) -> Side<'a> {
        let file = BufWriter::with_capacity(1 << 16, file);
        Side { file, path, length: 0, ranges: HashMap::new(), made: HashMap::new() }
    }

    /// The place of a payload in the file. What is there already, from another model, is not written again.
    fn put(
        &mut self,
        tensor: &TensorProto,
        payload: &Bytes,
    ) -> Result<[StringStringEntryProto; 2], OnnxError> {
        let range = (payload.as_ptr().addr(), payload.len());
        let is_range = !tensor.raw_data.is_empty();
        let known = match self.made.get(&tensor.name) {
            _ if is_range => self.ranges.get(&range).copied(),
            Some((made, start)) if made == payload => Some(*start),
            _ => None,
        };
        let start = match known {
            Some(start) => start,
            None => {
                let start = self.append(payload)?;
                if is_range {
                    self.ranges.insert(range, start);
                } else if !is_external(tensor) {
                    self.made.insert(tensor.name.clone(), (payload.clone(), start));
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

    /// The flushed file; `None` if there is nothing in it.
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

/// The data of an initializer that goes to the side file.
fn movable(tensor: &TensorProto, external: &ExternalData, from: usize) -> Result<Option<Bytes>, OnnxError> {
    let number = DataType::try_from(tensor.data_type).ok().and_then(element_size).is_some();
    let payload = if number {
        tensor_payload(tensor, external)?
    } else if is_external(tensor) {
        stored_bytes(tensor, external)?
    } else {
        tensor.raw_data.clone()
    };
    Ok((!payload.is_empty() && payload.len() >= from).then_some(payload))
}

/// Makes external data internal.
fn take_in(tensor: &mut TensorProto, external: &ExternalData) -> Result<(), OnnxError> {
    if is_external(tensor) {
        let payload = stored_bytes(tensor, external)?;
        clear(tensor);
        tensor.raw_data = payload;
    }
    Ok(())
}

/// Forgets a tensor's data, wherever it is.
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
