//! From a model to bytes and files.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use bytes::Bytes;
use prost::Message as _;

use crate::external::folder_of;
use crate::payload::{element_size, is_external, stored_bytes, tensor_payload};
use crate::proto::tensor_proto::{DataLocation, DataType};
use crate::tensors::{TensorRole, visit_tensors_mut};
use crate::{LoadedModel, ModelProto, OnnxError, StringStringEntryProto, TensorProto};

/// The largest protobuf message that its readers accept.
const MAX_MESSAGE: usize = i32::MAX as usize;

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
    if size > MAX_MESSAGE {
        return Err(OnnxError::TooLarge { size });
    }
    Ok(model.encode_to_vec())
}

/// Writes a message as it is; external data it refers to must be there already.
///
/// The file is written beside, flushed to the disk and renamed: at every moment `path` is the old file or the new one.
///
/// # Errors
///
/// The message is larger than 2 GiB, or the file cannot be written.
pub fn save(model: &ModelProto, path: impl AsRef<Path>) -> Result<(), OnnxError> {
    stage(model, path)?.place()
}

/// A model that lies on the disk beside its place, and vanishes unless it is placed there. Made by [`stage`].
#[derive(Debug)]
pub struct StagedModel(Pending);

/// The first and longer half of [`save`]: writes a message beside its place and flushes it.
///
/// # Errors
///
/// As [`save`].
pub fn stage(model: &ModelProto, path: impl AsRef<Path>) -> Result<StagedModel, OnnxError> {
    let bytes = encode(model)?;
    Pending::write(path.as_ref(), |file| file.write_all(&bytes)).map(StagedModel)
}

impl StagedModel {
    /// The other half of [`save`]: replaces what is there.
    ///
    /// # Errors
    ///
    /// The operating system refuses.
    pub fn place(self) -> Result<(), OnnxError> {
        self.0.rename()
    }
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
        visit_tensors_mut(&mut model, |tensor, _| self.take_in(tensor))?;
        save(&model, path)
    }

    /// Saves the model with the data of every initializer of at least `threshold` bytes in a file beside it, named as
    /// the model with `.data` appended, and replaced if it is there. Other external data is taken into the model.
    ///
    /// Offsets are multiples of 64, those of tensors of a MiB and more multiples of 4096. Both files are written beside
    /// and flushed before the first is renamed; only between the two renames can the old model meet the new data.
    ///
    /// # Errors
    ///
    /// External data cannot be read, what stays in the message is larger than 2 GiB, or a file cannot be written.
    pub fn save_with_external_data(&self, path: impl AsRef<Path>, threshold: usize) -> Result<(), OnnxError> {
        let path = path.as_ref();
        let name = path.file_name().ok_or_else(|| OnnxError::FileName { path: path.to_owned() })?;
        // Locations are texts; a name that is none could not be found again.
        let name = name.to_str().ok_or_else(|| OnnxError::FileName { path: path.to_owned() })?;
        let location = format!("{name}.data");
        let data_path = path.with_file_name(&location);

        let mut model = self.proto.clone();
        let mut offset = 0_u64;
        let mut fault = None;
        let data = Pending::write(&data_path, |file| {
            let result = visit_tensors_mut(&mut model, |tensor, role| {
                if role != TensorRole::Initializer {
                    return self.take_in(tensor).map_err(Stop::Model);
                }
                let Some(payload) = self.movable(tensor, threshold).map_err(Stop::Model)? else {
                    return self.take_in(tensor).map_err(Stop::Model);
                };
                let start = offset.next_multiple_of(if payload.len() >= LARGE { PAGE } else { ALIGNMENT });
                io::copy(&mut io::Read::take(io::repeat(0), start - offset), file).map_err(Stop::File)?;
                file.write_all(&payload).map_err(Stop::File)?;
                offset = start + payload.len() as u64;
                clear(tensor);
                tensor.data_location = DataLocation::External.into();
                tensor.external_data = vec![
                    entry("location", location.clone()),
                    entry("offset", start.to_string()),
                    entry("length", payload.len().to_string()),
                ];
                Ok(())
            });
            match result {
                Ok(()) => Ok(()),
                Err(Stop::File(error)) => Err(error),
                Err(Stop::Model(error)) => {
                    fault = Some(error);
                    Err(io::Error::other("the model"))
                }
            }
        });
        if let Some(error) = fault {
            return Err(error);
        }
        let data = data?;
        let bytes = encode(&model)?;
        let message = Pending::write(path, |file| file.write_all(&bytes))?;
        if offset > 0 {
            data.rename()?;
        }
        message.rename()
    }

    /// The data of an initializer that goes to the side file.
    fn movable(&self, tensor: &TensorProto, threshold: usize) -> Result<Option<Bytes>, OnnxError> {
        let number = DataType::try_from(tensor.data_type).ok().and_then(element_size).is_some();
        let payload = if number {
            tensor_payload(tensor, self.external())?
        } else if is_external(tensor) {
            stored_bytes(tensor, self.external())?
        } else {
            tensor.raw_data.clone()
        };
        Ok((!payload.is_empty() && payload.len() >= threshold).then_some(payload))
    }

    /// Makes external data internal.
    fn take_in(&self, tensor: &mut TensorProto) -> Result<(), OnnxError> {
        if is_external(tensor) {
            let payload = stored_bytes(tensor, self.external())?;
            clear(tensor);
            tensor.raw_data = payload;
        }
        Ok(())
    }
}

enum Stop {
    File(io::Error),
    Model(OnnxError),
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

/// A file that is written and flushed, but not yet under its name; removed if it never gets there.
#[derive(Debug)]
struct Pending {
    temporary: PathBuf,
    target: PathBuf,
    renamed: bool,
}

impl Pending {
    fn write(
        target: &Path,
        content: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
    ) -> Result<Self, OnnxError> {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let name = target.file_name().ok_or_else(|| OnnxError::FileName { path: target.to_owned() })?;
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}-{}.tmp", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed)));
        let failed = |error| OnnxError::Write { path: target.to_owned(), error };

        if target.is_dir() {
            return Err(failed(io::ErrorKind::IsADirectory.into()));
        }
        let temporary = target.with_file_name(hidden);
        let opened = OpenOptions::new().write(true).create_new(true).open(&temporary);
        let file = opened.map_err(|error| {
            let folder = folder_of(target);
            failed(match error.kind() {
                io::ErrorKind::NotFound if !folder.exists() => io::Error::new(
                    io::ErrorKind::NotFound,
                    format!("there is no folder {}, and none is made", folder.display()),
                ),
                _ => error,
            })
        })?;
        let pending = Self { temporary, target: target.to_owned(), renamed: false };
        let mut file = BufWriter::with_capacity(1 << 16, file);
        content(&mut file)
            .and_then(|()| file.into_inner().map_err(io::IntoInnerError::into_error))
            .and_then(|file| file.sync_all())
            .map_err(failed)?;
        Ok(pending)
    }

    fn rename(mut self) -> Result<(), OnnxError> {
        let failed = |error| OnnxError::Write { path: self.target.clone(), error };
        std::fs::rename(&self.temporary, &self.target).map_err(failed)?;
        self.renamed = true;
        // The new name is a change of the folder; elsewhere folders cannot be flushed.
        #[cfg(unix)]
        File::open(folder_of(&self.target)).and_then(|folder| folder.sync_all()).map_err(failed)?;
        Ok(())
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.renamed {
            // Nothing more can be done about a leftover.
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}
