//! Writing in a fixed order. The old file survives every failure.

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use ortrain_files::{Staged, flush_folder, lock_folder, sweep, sweep_waiting};
use ortrain_graph::DType;
use planus::{Builder, Offset};

use crate::generated::ortrain::checkpoint as format;
use crate::read::{IDENTIFIER, INLINE, SideSum, VERSION, side_path, waiting_side_path};
use crate::{
    Checkpoint, Error, Extras, ModuleState, NamedTensor, NominalTensor, OptimizerGroup, Property, Result,
    disk, trailer,
};

/// Number of tensor bytes above which [`save`] moves tensors to `<path>.data`: 1800 MiB, as in onnxruntime-training
/// 1.19.2.
pub const EXTERNAL_ABOVE: u64 = 1800 << 20;

/// Maximum length in bytes that `FlatBuffers` verifiers accept.
const LARGEST: u64 = i32::MAX as u64;
/// Alignment of tensors in the `.data` file, in bytes.
const ALIGNMENT: u64 = 4;
/// Number of bytes of the offset of the root and the identifier.
const HEADER: usize = 8;
/// Upper bound of the bytes of a table, without its names and data.
const TABLE: u64 = 128;

/// Layout of a file, after one of onnxruntime-training's two writers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Layout of `generate_artifacts`: lists in input order, and no list of optimizer groups or properties if it would
    /// be empty. If there is a `.data` file, tensors of less than 64 bytes stay in the checkpoint.
    Artifacts,
    /// Layout of `CheckpointState.save_checkpoint`: every list sorted by name, and a list of optimizer groups even if
    /// it is empty. If there is a `.data` file, it contains every tensor.
    State,
}

impl Layout {
    /// Returns true if a tensor of this size moves to the `.data` file, provided that there is one.
    fn moves_out(self, bytes: usize) -> bool {
        match self {
            Layout::Artifacts => bytes >= 64,
            Layout::State => true,
        }
    }
}

/// Options of [`save`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SaveOptions {
    /// Order of lists, and presence of empty ones.
    pub layout: Layout,
    /// Number of tensor bytes above which tensors move to `<path>.data`. The default is [`EXTERNAL_ABOVE`].
    pub external_above: u64,
}

impl SaveOptions {
    /// Returns the default options for a layout.
    #[must_use]
    pub fn new(layout: Layout) -> SaveOptions {
        SaveOptions { layout, external_above: EXTERNAL_ABOVE }
    }

    /// Returns these options with another threshold for the `.data` file.
    #[must_use]
    pub fn external_above(self, bytes: u64) -> SaveOptions {
        SaveOptions { external_above: bytes, ..self }
    }
}

impl From<Layout> for SaveOptions {
    fn from(layout: Layout) -> SaveOptions {
        SaveOptions::new(layout)
    }
}

/// Encodes a checkpoint as one file with all tensors inside.
///
/// Equal checkpoints and layouts give equal bytes. If `encode` made `bytes` with a layout, then `encode(&read(bytes)?,
/// layout)` reproduces them.
///
/// # Errors
/// Fails if a name occurs twice, or if the file would exceed 2 GiB.
pub fn encode(checkpoint: &Checkpoint, layout: Layout) -> Result<Vec<u8>> {
    let plan = Plan::new(checkpoint, layout)?;
    Ok(plan.build(None)?.parts().concat())
}

/// Writes a checkpoint to a path.
///
/// The new file is written beside the destination and then renamed. After a failure of any kind, the old file is still
/// complete. Folders are not created.
///
/// Above [`SaveOptions::external_above`], tensors move to `<path>.data`. Two files cannot be replaced at once. The new
/// `.data` file therefore has the temporary name `<path>.data.<checksum>` while the checkpoint is replaced, and is
/// renamed last. [`load`](crate::load) finds the file under either name, at every moment. onnxruntime-training knows
/// only the final name and should not read during such a save. A `.data` file that is no longer needed is not removed.
///
/// # Errors
/// Fails if a name occurs twice, if the checkpoint without its moved tensors would exceed 2 GiB, or if the operating
/// system reports an error.
pub fn save(checkpoint: &Checkpoint, path: impl AsRef<Path>, options: impl Into<SaveOptions>) -> Result<()> {
    stage(checkpoint, path, options)?.persist()
}

/// Checkpoint written beside its destination by [`stage`].
///
/// The files are removed unless [`StagedCheckpoint::persist`] moves them to their destination.
#[derive(Debug)]
pub struct StagedCheckpoint {
    path: PathBuf,
    main: Staged,
    /// `.data` file, its checksum, and the content of the checkpoint that refers to it.
    side: Option<(Staged, u32, Vec<u8>)>,
}

/// Writes a checkpoint beside its destination and flushes it. This is the first and longer half of [`save`].
///
/// # Errors
/// Fails like [`save`].
pub fn stage(
    checkpoint: &Checkpoint,
    path: impl AsRef<Path>,
    options: impl Into<SaveOptions>,
) -> Result<StagedCheckpoint> {
    let (path, options) = (path.as_ref().to_owned(), options.into());
    let mut plan = Plan::new(checkpoint, options.layout)?;
    let side = if plan.tensors().map(|tensor| tensor.data.len() as u64).sum::<u64>() > options.external_above
    {
        plan.move_out(options.layout);
        Some(plan.write_side(&path)?)
    } else {
        // A killed save of a larger checkpoint may have left a temporary `.data` file.
        sweep(&ortrain_files::resolved(&side_path(&path)));
        None
    };
    let buffer = plan.build(side.as_ref().map(|(_, sum)| sum))?;

    let mut main = Staged::beside(&path)?;
    for part in buffer.parts() {
        main.append(part)?;
    }
    main.sync()?;
    let side = match side {
        None => None,
        Some((mut side, sum)) => {
            side.sync()?;
            Some((side, sum.checksum, buffer.parts().concat()))
        }
    };
    Ok(StagedCheckpoint { path, main, side })
}

impl StagedCheckpoint {
    /// Replaces the old files. This is the second half of [`save`].
    ///
    /// # Errors
    /// Fails if the operating system reports an error.
    pub fn persist(self) -> Result<()> {
        let StagedCheckpoint { path, mut main, side } = self;
        let Some((mut side, checksum, content)) = side else { return Ok(main.persist()?) };
        let (destination, side_destination) = (main.destination().to_owned(), side.destination().to_owned());
        let _one_at_a_time = lock_folder(&destination);
        let waiting = waiting_side_path(&path, checksum);
        let is_waiting = waiting.exists();
        side.rename(&waiting)?;
        if is_waiting {
            // The current checkpoint may refer to this file, if its tensors are the same.
            side.keep();
        }
        flush_folder(&waiting)?;
        main.rename(&destination)?;
        // From here on, the new checkpoint is in place and needs its tensors under one of their names.
        main.keep();
        side.keep();
        flush_folder(&destination)?;
        if disk::read(&path).is_ok_and(|current| current != content) {
            // Another save has already replaced the checkpoint: one without a `.data` file, or one that did not see the
            // lock.
            return Ok(());
        }
        side.rename(&side_destination)?;
        flush_folder(&side_destination)?;
        sweep_waiting(&side_destination);
        Ok(())
    }
}

/// Finished file in three parts, without copies.
struct Buffer {
    builder: Builder,
    header: [u8; HEADER],
    trailer: [u8; trailer::LENGTH],
}

impl Buffer {
    /// Wraps a finished builder.
    fn new(builder: Builder) -> Buffer {
        let header = header(builder.as_slice());
        let trailer = trailer::trailer([&header, &builder.as_slice()[HEADER..]]);
        Buffer { builder, header, trailer }
    }

    fn parts(&self) -> [&[u8]; 3] {
        [&self.header, &self.builder.as_slice()[HEADER..], &self.trailer]
    }
}

/// Returns the first bytes of a finished buffer: the offset of the root, then the identifier.
///
/// planus 1.3.0 swaps the two (planus-org/planus#377). This function corrects the order, and accepts the correct one
/// too.
pub(crate) fn header(finished: &[u8]) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header.copy_from_slice(&finished[..HEADER]);
    let [a, b, c, d, offset @ ..] = header;
    if offset != IDENTIFIER {
        debug_assert_eq!([a, b, c, d], IDENTIFIER, "bytes 0 to 3 or 4 to 7 are the identifier");
        // The offset counts from its own position, which moves from byte 4 to byte 0.
        let offset = u32::from_le_bytes(offset) + 4;
        header[..4].copy_from_slice(&offset.to_le_bytes());
        header[4..].copy_from_slice(&IDENTIFIER);
    }
    header
}

/// Tensor to be written.
struct Entry<'a> {
    name: &'a str,
    dtype: DType,
    dims: &'a [usize],
    data: &'a [u8],
    /// Offset in the `.data` file, if the tensor is stored there.
    offset: Option<u64>,
}

impl<'a> Entry<'a> {
    fn full(tensor: &'a NamedTensor) -> Entry<'a> {
        let NamedTensor { name, tensor } = tensor;
        Entry { name, dtype: tensor.dtype(), dims: tensor.dims(), data: tensor.data(), offset: None }
    }

    fn nominal(tensor: &'a NominalTensor) -> Entry<'a> {
        Entry { name: &tensor.name, dtype: tensor.dtype, dims: &[], data: &[], offset: None }
    }

    fn estimate(&self) -> u64 {
        let inside = if self.offset.is_some() { 0 } else { self.data.len() };
        TABLE + (self.name.len() + size_of_val(self.dims) + inside) as u64
    }

    fn build(&self, builder: &mut Builder) -> Offset<format::Tensor> {
        let data = self.offset.is_none().then(|| builder.create_vector(self.data));
        let dims: Vec<i64> = self.dims.iter().map(|&dim| dim as i64).collect();
        let offset = self.offset.map_or(INLINE, |offset| offset as i64);
        format::Tensor::create(builder, self.name, (), dims, self.dtype.to_onnx(), data, (), offset)
    }
}

/// Optimizer state of a group, in the order of the file.
struct Group<'a> {
    group: &'a OptimizerGroup,
    states: Vec<(&'a str, Vec<Entry<'a>>)>,
}

/// Checkpoint in the order of the file.
struct Plan<'a> {
    checkpoint: &'a Checkpoint,
    trainable: Vec<Entry<'a>>,
    frozen: Vec<Entry<'a>>,
    groups: Option<Vec<Group<'a>>>,
}

impl<'a> Plan<'a> {
    fn new(checkpoint: &'a Checkpoint, layout: Layout) -> Result<Plan<'a>> {
        let (mut trainable, mut frozen): (Vec<_>, Vec<_>) = match &checkpoint.module {
            ModuleState::Full { trainable, frozen } => {
                (trainable.iter().map(Entry::full).collect(), frozen.iter().map(Entry::full).collect())
            }
            ModuleState::Nominal { trainable, frozen } => {
                (trainable.iter().map(Entry::nominal).collect(), frozen.iter().map(Entry::nominal).collect())
            }
        };
        distinct("parameters", trainable.iter().chain(&frozen).map(|entry| entry.name))?;
        let mut groups = Vec::new();
        distinct("optimizer groups", checkpoint.optimizer_groups.iter().map(|group| &*group.name))?;
        for group in &checkpoint.optimizer_groups {
            distinct("optimizer states of a group", group.states.iter().map(|state| &*state.parameter))?;
            let mut states = Vec::new();
            for state in &group.states {
                let moments: Vec<_> = state.moments.iter().map(Entry::full).collect();
                distinct("moments of a parameter", moments.iter().map(|entry| entry.name))?;
                states.push((&*state.parameter, moments));
            }
            groups.push(Group { group, states });
        }
        if layout == Layout::State {
            trainable.sort_by_key(|entry| entry.name);
            frozen.sort_by_key(|entry| entry.name);
            groups.sort_by_key(|group| &group.group.name);
            for (_, moments) in groups.iter_mut().flat_map(|group| &mut group.states) {
                moments.sort_by_key(|entry| entry.name);
            }
            groups.iter_mut().for_each(|group| group.states.sort_by_key(|&(parameter, _)| parameter));
        }
        let groups = (layout == Layout::State || !groups.is_empty()).then_some(groups);
        Ok(Plan { checkpoint, trainable, frozen, groups })
    }

    /// Iterates over all tensors, in the order of the file.
    fn tensors(&self) -> impl Iterator<Item = &Entry<'a>> {
        let states = self.groups.iter().flatten().flat_map(|group| &group.states);
        self.trainable.iter().chain(&self.frozen).chain(states.flat_map(|(_, moments)| moments))
    }

    /// Assigns tensors their offsets in the `.data` file.
    fn move_out(&mut self, layout: Layout) {
        let states = self.groups.iter_mut().flatten().flat_map(|group| &mut group.states);
        let tensors =
            self.trainable.iter_mut().chain(&mut self.frozen).chain(states.flat_map(|(_, moments)| moments));
        let mut end = 0u64;
        for tensor in tensors.filter(|tensor| layout.moves_out(tensor.data.len())) {
            let start = end.next_multiple_of(ALIGNMENT);
            tensor.offset = Some(start);
            end = start + tensor.data.len() as u64;
        }
    }

    /// Writes the `.data` file of the checkpoint at `path`, beside its destination.
    fn write_side(&self, path: &Path) -> Result<(Staged, SideSum)> {
        // Checked first, so that a checkpoint that is too large fails before its tensors are written.
        self.check_size()?;
        let mut file = Staged::beside_like(&side_path(path), path)?;
        let mut hasher = crc32fast::Hasher::new();
        let mut length = 0;
        for tensor in self.tensors() {
            let Some(start) = tensor.offset else { continue };
            let padding = &[0; ALIGNMENT as usize][..(start - length) as usize];
            for bytes in [padding, tensor.data] {
                hasher.update(bytes);
                file.append(bytes)?;
            }
            length = start + tensor.data.len() as u64;
        }
        Ok((file, SideSum { length, checksum: hasher.finalize() }))
    }

    /// Returns an upper bound of the buffer's size in bytes.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the bound exceeds 2 GiB.
    fn check_size(&self) -> Result<u64> {
        let tensors: u64 = self.tensors().map(Entry::estimate).sum();
        let states = self.groups.iter().flatten().flat_map(|group| &group.states);
        let states: u64 = states.map(|(parameter, _)| TABLE + parameter.len() as u64).sum();
        let groups: u64 =
            self.groups.iter().flatten().map(|group| TABLE + group.group.name.len() as u64).sum();
        let properties: u64 = self.checkpoint.properties.iter().map(property_estimate).sum();
        let Extras { scheduler, optimizer, .. } = &self.checkpoint.extras;
        let scheduler = scheduler.as_ref().map_or(0, |scheduler| scheduler.kind.len() as u64);
        let extras = scheduler + optimizer.as_ref().map_or(0, |text| text.len() as u64);
        let bytes = 8 * TABLE + tensors + states + groups + properties + extras + trailer::LENGTH as u64;
        if bytes > LARGEST { Err(Error::TooLarge { bytes }) } else { Ok(bytes) }
    }

    /// Builds the `FlatBuffers` buffer.
    fn build(&self, side: Option<&SideSum>) -> Result<Buffer> {
        let mut builder = Builder::with_capacity(self.check_size()? as usize);
        let nominal = self.checkpoint.module.is_nominal();
        let [trainable, frozen] =
            [&self.trainable, &self.frozen].map(|list| build_tensors(&mut builder, list));
        let module = format::ModuleState::create(&mut builder, trainable, frozen, nominal, side.is_some());
        let groups = self.groups.as_ref().map(|groups| {
            let groups: Vec<_> = groups.iter().map(|group| group.build(&mut builder)).collect();
            builder.create_vector(groups)
        });
        let properties =
            (!self.checkpoint.properties.is_empty()).then(|| self.build_properties(&mut builder));
        let extras = build_extras(&mut builder, &self.checkpoint.extras, side);
        let root = format::Checkpoint::create(&mut builder, VERSION, module, groups, properties, extras);
        builder.finish(root, Some(IDENTIFIER));
        Ok(Buffer::new(builder))
    }

    fn build_properties(&self, builder: &mut Builder) -> Offset<format::PropertyBag> {
        let (mut ints, mut floats, mut strings) = (Vec::new(), Vec::new(), Vec::new());
        for (name, value) in &self.checkpoint.properties {
            match value {
                Property::Int(value) => ints.push(format::IntProperty::create(builder, name, value)),
                Property::Float(value) => floats.push(format::FloatProperty::create(builder, name, value)),
                Property::String(value) => strings.push(format::StringProperty::create(builder, name, value)),
            }
        }
        format::PropertyBag::create(builder, ints, floats, strings)
    }
}

impl Group<'_> {
    fn build(&self, builder: &mut Builder) -> Offset<format::OptimizerGroup> {
        let states: Vec<_> = self
            .states
            .iter()
            .map(|(parameter, moments)| {
                let moments = build_tensors(builder, moments);
                format::ParameterOptimizerState::create(builder, parameter, moments)
            })
            .collect();
        let OptimizerGroup { name, step, initial_learning_rate, .. } = self.group;
        format::OptimizerGroup::create(builder, name, step, initial_learning_rate, states)
    }
}

fn build_tensors(builder: &mut Builder, tensors: &[Entry<'_>]) -> Offset<[Offset<format::Tensor>]> {
    let tensors: Vec<_> = tensors.iter().map(|tensor| tensor.build(builder)).collect();
    builder.create_vector(tensors)
}

fn build_extras(builder: &mut Builder, extras: &Extras, side: Option<&SideSum>) -> Offset<format::Extras> {
    let scheduler = extras.scheduler.as_ref().map(|scheduler| {
        format::Scheduler::create(
            builder,
            &scheduler.kind,
            scheduler.warmup_steps,
            scheduler.total_steps,
            scheduler.initial_learning_rate,
            scheduler.step,
        )
    });
    let (length, checksum) = side.map(|side| (side.length, side.checksum)).unzip();
    format::Extras::create(
        builder,
        true,
        length,
        checksum,
        extras.learning_rate,
        scheduler,
        extras.seed,
        extras.train_step,
        extras.optimizer.as_deref(),
        extras.schedule_factor,
    )
}

fn property_estimate((name, value): (&String, &Property)) -> u64 {
    let value = if let Property::String(value) = value { value.len() } else { 0 };
    TABLE + (name.len() + value) as u64
}

/// Returns an error if a name occurs twice.
fn distinct<'a>(what: &'static str, names: impl Iterator<Item = &'a str>) -> Result<()> {
    let mut unique = HashSet::new();
    for name in names {
        if !unique.insert(name) {
            return Err(Error::DuplicateName { what, name: name.to_owned() });
        }
    }
    Ok(())
}
