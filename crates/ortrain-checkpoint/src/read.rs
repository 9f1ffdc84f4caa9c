//! Reading of untrusted bytes.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use bytes::Bytes;
use ortrain_graph::{DType, Tensor, byte_length};
use planus::ReadAsRoot;

use crate::generated::ortrain::checkpoint as format;
use crate::{
    Checkpoint, Error, Extras, ModuleState, NamedTensor, NominalTensor, OptimizerGroup, ParameterState,
    Property, Result, Scheduler, disk, trailer,
};

/// Version of the format.
pub(crate) const VERSION: i32 = 2;
/// Bytes 4 to 7 of every checkpoint.
pub(crate) const IDENTIFIER: [u8; 4] = *b"ODTC";
/// `external_data_offset` of a tensor that is not in the `.data` file.
pub(crate) const INLINE: i64 = -1;

/// Maximum ratio of referenced bytes to file bytes. A normal file refers to each byte once. Sharing of names is common;
/// sharing that could fill the memory is an attack.
const OVERLAP: u64 = 16;
/// Bytes charged for an entry of a list, in addition to its own bytes.
const ENTRY: usize = 64;

/// Reads a checkpoint from a buffer. Tensors are ranges of the buffer.
///
/// # Errors
/// Fails if the buffer is not a valid checkpoint, or if its tensors are in a `.data` file
/// ([`Error::ExternalFromBuffer`]).
#[allow(clippy::needless_pass_by_value, reason = "the checkpoint shares the buffer")]
pub fn read(bytes: Bytes) -> Result<Checkpoint> {
    read_with(&bytes, |_| Err(Error::ExternalFromBuffer))
}

/// Reads the checkpoint at a path, and its `<path>.data` if there is one. Both files are read completely, and tensors
/// are ranges of them.
///
/// Another process may [`save`](crate::save) to the path at the same time. The result is then the old checkpoint or the
/// new one, never a mixture of their files. This does not hold for saves of onnxruntime-training, because
/// their `.data` files have no checksum.
///
/// # Errors
/// Fails if the file does not exist, cannot be read, or is not a valid checkpoint. [`Error::InFile`] wraps errors of
/// the content.
pub fn load(path: impl AsRef<Path>) -> Result<Checkpoint> {
    load_by(path.as_ref(), || {})
}

/// Maximum number of attempts to find the `.data` file of an unchanged checkpoint.
///
/// The first attempt can fail because a save moves the file at this moment; the second one then finds it. If the
/// checkpoint was replaced and restored in between, the third attempt finds it.
const LOOKS: usize = 4;

/// Like [`load`], but calls `between_reads` each time the first of two files has been read.
pub(crate) fn load_by(path: &Path, mut between_reads: impl FnMut()) -> Result<Checkpoint> {
    let mut bytes = disk::read(path)?;
    let mut looks = 0;
    loop {
        let checkpoint = read_with(&bytes, |written| {
            between_reads();
            load_side(path, written)
        });
        looks += 1;
        if let Err(Error::ExternalDamaged { .. } | Error::ExternalMissing { .. }) = checkpoint {
            // A save may have replaced both files after the first one was read. Then the new pair counts.
            let now = disk::read(path)?;
            if now != bytes {
                (bytes, looks) = (now, 0);
                continue;
            }
            if looks < LOOKS {
                continue;
            }
        }
        return checkpoint
            .map_err(|source| Error::InFile { path: path.to_owned(), source: Box::new(source) });
    }
}

/// Length and CRC-32 of the `.data` file. Checkpoints of onnxruntime-training do not record them.
pub(crate) struct SideSum {
    pub(crate) length: u64,
    pub(crate) checksum: u32,
}

/// Returns the path of the `.data` file of a checkpoint.
pub(crate) fn side_path(path: &Path) -> std::path::PathBuf {
    disk::with_suffix(path, ".data")
}

/// Returns the path of a new `.data` file while its checkpoint is being replaced.
///
/// If [`side_path`] is a symbolic link, the file is beside the target of the link.
pub(crate) fn waiting_side_path(path: &Path, checksum: u32) -> std::path::PathBuf {
    ortrain_files::sibling_path(&ortrain_files::resolved(&side_path(path)), &format!("{checksum:08x}"))
}

fn load_side(path: &Path, written: Option<SideSum>) -> Result<Bytes> {
    let at = side_path(path);
    let missing = |error| match error {
        Error::Missing { path } => Error::ExternalMissing { path },
        error => error,
    };
    let Some(written) = written else { return disk::read(&at).map_err(missing) };
    let matches =
        |data: &Bytes| data.len() as u64 == written.length && crc32fast::hash(data) == written.checksum;
    let side_error = match disk::read(&at) {
        Ok(data) if matches(&data) => return Ok(data),
        Ok(_) => Error::ExternalDamaged { path: at },
        Err(error) => missing(error),
    };
    // If a save was stopped between its last two renames, the right file still has its waiting name.
    match disk::read(&waiting_side_path(path, written.checksum)) {
        Ok(waiting) if matches(&waiting) => Ok(waiting),
        _ => Err(side_error),
    }
}

fn read_with(file: &Bytes, side: impl FnOnce(Option<SideSum>) -> Result<Bytes>) -> Result<Checkpoint> {
    if file.is_empty() {
        return Err(Error::Empty);
    }
    if file.get(4..8) != Some(&IDENTIFIER) {
        // A safetensors file starts with the length of its JSON header.
        let safetensors = file.get(8) == Some(&b'{');
        return Err(if safetensors { Error::LooksLikeSafetensors } else { Error::NotACheckpoint });
    }
    let (body, has_trailer) = trailer::split(file)?;
    let root = format::CheckpointRef::read_as_root(body)?;
    let extras = root.extras()?;
    let wants_trailer = extras.map_or(Ok(false), |extras| extras.has_trailer())?;
    if wants_trailer && !has_trailer {
        return Err(Error::NoTrailer);
    }
    let version = root.version()?;
    if version != VERSION {
        return Err(Error::Version(version));
    }
    let module = root.module_state()?.ok_or(Error::NoPart("module state"))?;
    let side = if module.has_external_data()? {
        let written = match extras {
            Some(extras) => extras.data_length()?.zip(extras.data_checksum()?),
            None => None,
        };
        Some(side(written.map(|(length, checksum)| SideSum { length, checksum }))?)
    } else {
        None
    };

    let length = body.len() as u64 + side.as_ref().map_or(0, |side| side.len() as u64);
    let mut reader = Reader { file, side, length, budget: length.saturating_mul(OVERLAP) };
    Ok(Checkpoint {
        module: reader.module(module)?,
        optimizer_groups: reader.groups(root)?,
        properties: reader.properties(root)?,
        extras: extras.map_or_else(|| Ok(Extras::default()), |extras| reader.extras(extras))?,
    })
}

struct Reader<'a> {
    file: &'a Bytes,
    side: Option<Bytes>,
    /// Number of bytes of both files.
    length: u64,
    /// Number of bytes that may still be referenced.
    budget: u64,
}

type Tensors<'a> = planus::Vector<'a, planus::Result<format::TensorRef<'a>>>;

impl Reader<'_> {
    fn charge(&mut self, bytes: usize) -> Result<()> {
        self.budget =
            self.budget.checked_sub(bytes as u64).ok_or(Error::Overlapping { length: self.length })?;
        Ok(())
    }

    fn name(&mut self, name: Option<&str>, what: &'static str) -> Result<String> {
        let name = name.ok_or(Error::Unnamed(what))?;
        self.charge(ENTRY + name.len())?;
        Ok(name.to_owned())
    }

    fn module(&mut self, module: format::ModuleStateRef<'_>) -> Result<ModuleState> {
        let trainable =
            module.requires_grad_params()?.ok_or(Error::NoPart("list of trainable parameters"))?;
        let frozen = module.frozen_params()?.ok_or(Error::NoPart("list of frozen parameters"))?;
        let mut names = HashSet::new();
        Ok(if module.is_nominal_state()? {
            let trainable = self.tensors(trainable, &mut names, Self::nominal)?;
            ModuleState::Nominal { trainable, frozen: self.tensors(frozen, &mut names, Self::nominal)? }
        } else {
            let trainable = self.tensors(trainable, &mut names, Self::tensor)?;
            ModuleState::Full { trainable, frozen: self.tensors(frozen, &mut names, Self::tensor)? }
        })
    }

    /// Reads the tensors of a list. If a name repeats, the first tensor counts.
    fn tensors<T>(
        &mut self,
        tensors: Tensors<'_>,
        names: &mut HashSet<String>,
        mut read: impl FnMut(&mut Self, String, format::TensorRef<'_>) -> Result<T>,
    ) -> Result<Vec<T>> {
        let mut list = Vec::new();
        for tensor in tensors {
            let tensor = tensor?;
            let name = self.name(tensor.name()?, "tensor")?;
            if names.insert(name.clone()) {
                list.push(read(self, name, tensor)?);
            }
        }
        Ok(list)
    }

    fn nominal(&mut self, name: String, tensor: format::TensorRef<'_>) -> Result<NominalTensor> {
        let dtype = dtype(&name, tensor.data_type()?)?;
        Ok(NominalTensor { name, dtype })
    }

    fn tensor(&mut self, name: String, tensor: format::TensorRef<'_>) -> Result<NamedTensor> {
        let dtype = dtype(&name, tensor.data_type()?)?;
        let dims = match tensor.dims()? {
            Some(stored) => {
                self.charge(stored.len().saturating_mul(size_of::<i64>()))?;
                let dims: Option<Vec<usize>> = stored.iter().map(|dim| usize::try_from(dim).ok()).collect();
                dims.ok_or_else(|| Error::BadDims { name: name.clone(), dims: stored.iter().collect() })?
            }
            None => Vec::new(),
        };
        let offset = tensor.external_data_offset()?;
        let data = if offset == INLINE {
            let raw = tensor.raw_data()?.unwrap_or_default();
            self.file.slice_ref(raw)
        } else {
            let Some(side) = &self.side else { return Err(Error::ExternalUnannounced { name }) };
            let length = match byte_length(dtype, &dims) {
                Ok(length) => length,
                Err(source) => return Err(Error::Tensor { name, source }),
            };
            let range = usize::try_from(offset)
                .ok()
                .and_then(|start| Some(start..start.checked_add(length)?))
                .filter(|range| range.end <= side.len());
            let Some(range) = range else {
                return Err(Error::ExternalRange { name, offset, length, size: side.len() });
            };
            side.slice(range)
        };
        self.charge(data.len())?;
        match Tensor::new(dtype, dims, data) {
            Ok(tensor) => Ok(NamedTensor { name, tensor }),
            Err(source) => Err(Error::Tensor { name, source }),
        }
    }

    fn groups(&mut self, root: format::CheckpointRef<'_>) -> Result<Vec<OptimizerGroup>> {
        let mut groups = Vec::new();
        let mut names = HashSet::new();
        for group in root.optimizer_groups()?.into_iter().flatten() {
            let group = group?;
            let name = self.name(group.group_name()?, "optimizer group")?;
            if !names.insert(name.clone()) {
                continue;
            }
            let step = group.step()?;
            let initial_learning_rate = group.initial_learning_rate()?.unwrap_or_default();
            let mut states = Vec::new();
            let mut parameters = HashSet::new();
            for state in group.optimizer_states()?.into_iter().flatten() {
                let state = state?;
                let parameter = self.name(state.param_name()?, "parameter's optimizer state")?;
                if !parameters.insert(parameter.clone()) {
                    continue;
                }
                let moments = match state.momentums()? {
                    Some(moments) => self.tensors(moments, &mut HashSet::new(), Self::tensor)?,
                    None => Vec::new(),
                };
                states.push(ParameterState { parameter, moments });
            }
            groups.push(OptimizerGroup { name, step, initial_learning_rate, states });
        }
        Ok(groups)
    }

    fn properties(&mut self, root: format::CheckpointRef<'_>) -> Result<BTreeMap<String, Property>> {
        let mut properties = BTreeMap::new();
        let Some(bag) = root.property_bag()? else { return Ok(properties) };
        for property in bag.ints()?.into_iter().flatten() {
            let property = property?;
            let name = self.name(property.name()?, "property")?;
            properties.entry(name).or_insert(Property::Int(property.value()?));
        }
        for property in bag.floats()?.into_iter().flatten() {
            let property = property?;
            let name = self.name(property.name()?, "property")?;
            properties.entry(name).or_insert(Property::Float(property.value()?.unwrap_or_default()));
        }
        for property in bag.strings()?.into_iter().flatten() {
            let property = property?;
            let name = self.name(property.name()?, "property")?;
            let value = property.value()?.unwrap_or_default();
            self.charge(value.len())?;
            properties.entry(name).or_insert_with(|| Property::String(value.to_owned()));
        }
        Ok(properties)
    }

    fn extras(&mut self, extras: format::ExtrasRef<'_>) -> Result<Extras> {
        let scheduler = match extras.scheduler()? {
            Some(scheduler) => Some(Scheduler {
                kind: self.name(scheduler.kind()?, "scheduler")?,
                warmup_steps: scheduler.warmup_steps()?,
                total_steps: scheduler.total_steps()?,
                initial_learning_rate: scheduler.initial_learning_rate()?.unwrap_or_default(),
                step: scheduler.step()?,
            }),
            None => None,
        };
        let optimizer = match extras.optimizer()? {
            Some(text) => Some(self.name(Some(text), "optimizer")?),
            None => None,
        };
        Ok(Extras {
            learning_rate: extras.learning_rate()?,
            scheduler,
            seed: extras.seed()?,
            train_step: extras.train_step()?,
            optimizer,
            schedule_factor: extras.schedule_factor()?,
        })
    }
}

/// Returns the element type for a number of ONNX's `TensorProto.DataType`. Checkpoints hold only types with arithmetic.
fn dtype(name: &str, code: i32) -> Result<DType> {
    if let Some(dtype) = DType::from_onnx(code).filter(|dtype| !dtype.is_small()) {
        return Ok(dtype);
    }
    let dtype = match code {
        8 => return Err(Error::Strings { name: name.to_owned() }),
        0 => "UNDEFINED",
        14 => "COMPLEX64",
        15 => "COMPLEX128",
        17 => "FLOAT8E4M3FN",
        18 => "FLOAT8E4M3FNUZ",
        19 => "FLOAT8E5M2",
        20 => "FLOAT8E5M2FNUZ",
        21 => "UINT4",
        22 => "INT4",
        23 => "FLOAT4E2M1",
        24 => "FLOAT8E8M0",
        _ => return Err(Error::UnsupportedType { name: name.to_owned(), dtype: format!("number {code}") }),
    };
    Err(Error::UnsupportedType { name: name.to_owned(), dtype: dtype.to_owned() })
}
