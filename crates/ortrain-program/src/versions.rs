//! Versions of buffers: the write that each read refers to.
//!
//! A buffer that is updated in place holds several values over time. Before any pass runs, every write gets a number,
//! and every read records the number of the write that it sees. Passes carry these numbers along with the instructions
//! that they merge, split and move. Afterwards, a check walks the program once and compares the numbers. A pass
//! that lets an instruction read an earlier or later value is then an error, and never a wrong result.

use smallvec::SmallVec;

use crate::buffer::{BufferId, BufferSubstitution, distinct};
use crate::gradient_modes::{GradientMode, GradientModes};
use crate::instruction::Instruction;

/// Number of a write. A buffer has version 0 until its first write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version(pub(crate) u32);

/// Version that a read sees in each gradient mode; `None` in modes that the instruction does not belong to.
pub(crate) type ReadVersions = [Option<Version>; MODES.len()];

const MODES: [GradientMode; 2] = [GradientMode::Accumulate, GradientMode::Overwrite];

/// Returns a version that is the same in every gradient mode.
pub(crate) fn same_in_all_modes(version: Version) -> ReadVersions {
    [Some(version); MODES.len()]
}

/// Versions that an instruction reads, and versions that it writes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Versions {
    reads: SmallVec<[(BufferId, ReadVersions); 4]>,
    writes: SmallVec<[(BufferId, Version); 2]>,
}

impl Versions {
    /// Creates versions from the reads, per gradient mode, and the writes.
    pub(crate) fn new(
        reads: impl IntoIterator<Item = (BufferId, ReadVersions)>,
        writes: impl IntoIterator<Item = (BufferId, Version)>,
    ) -> Versions {
        Versions { reads: reads.into_iter().collect(), writes: writes.into_iter().collect() }
    }

    /// Returns the versions of an instruction with one read buffer and one written buffer. The read version is the same
    /// in every gradient mode.
    pub(crate) fn for_map(read: (BufferId, Version), write: (BufferId, Version)) -> Versions {
        Versions::default().with_read(read.0, read.1).with_write(write.0, write.1)
    }

    /// Returns the version of a buffer that the instruction writes.
    pub(crate) fn written_version(&self, id: BufferId) -> Option<Version> {
        self.writes.iter().find(|(written, _)| *written == id).map(|&(_, version)| version)
    }

    /// Returns the written buffers with their versions.
    pub(crate) fn writes(&self) -> impl Iterator<Item = (BufferId, Version)> {
        self.writes.iter().copied()
    }

    pub(crate) fn read_versions(&self, id: BufferId) -> Option<&ReadVersions> {
        self.reads.iter().find(|(read, _)| *read == id).map(|(_, versions)| versions)
    }

    /// Returns the version of a buffer that is read, if it is the same in all of `entries`.
    pub(crate) fn common_read_version(&self, id: BufferId, entries: GradientModes) -> Option<Version> {
        let read_versions = self.read_versions(id)?;
        let mut versions = mode_indices(entries).map(|entry| read_versions[entry]);
        let first = versions.next()??;
        versions.all(|version| version == Some(first)).then_some(first)
    }

    /// Returns versions with only the read of one buffer.
    pub(crate) fn only_read_of(&self, id: BufferId) -> Versions {
        Versions::default().with_read_of(id, self)
    }

    /// Returns a buffer that an instruction reads or writes without a recorded version.
    pub(crate) fn unversioned_buffer(&self, instruction: &Instruction) -> Option<BufferId> {
        let read = distinct(self.reads.iter().map(|&(id, _)| id));
        let written = distinct(self.writes.iter().map(|&(id, _)| id));
        let is_unknown = |known: &[BufferId], id: &BufferId| known.binary_search(id).is_err();
        let unknown = instruction.reads().into_iter().find(|id| is_unknown(&read, id));
        unknown.or_else(|| instruction.writes().into_iter().find(|id| is_unknown(&written, id)))
    }

    /// Returns the versions of an instruction that merges others. No merged instruction reads a result of another.
    pub(crate) fn merge_independent<'a>(versions: impl IntoIterator<Item = &'a Versions>) -> Versions {
        let mut together = Versions::default();
        for one in versions {
            together.reads.extend_from_slice(&one.reads);
            together.writes.extend_from_slice(&one.writes);
        }
        together.reads.sort_unstable_by_key(|&(id, _)| id);
        together.reads.dedup();
        together
    }

    /// Adds a read of a buffer. Returns true if it is compatible with the recorded read of the same buffer.
    fn add_read(&mut self, id: BufferId, versions: ReadVersions) -> bool {
        let Some((_, known)) = self.reads.iter_mut().find(|(read, _)| *read == id) else {
            self.reads.push((id, versions));
            return true;
        };
        known.iter_mut().zip(versions).all(|(known, new)| match (*known, new) {
            (Some(known), Some(new)) => known == new,
            (None, new) => {
                *known = new;
                true
            }
            (Some(_), None) => true,
        })
    }

    /// Adds all reads of another instruction. Returns `None` if the two read different versions of a buffer.
    #[must_use]
    pub(crate) fn merge_reads(mut self, other: &Versions) -> Option<Versions> {
        other.reads.iter().all(|&(id, versions)| self.add_read(id, versions)).then_some(self)
    }

    /// Returns the versions of an instruction fused with its consumer, which takes the results directly. Returns `None`
    /// if the two read different versions of a buffer, or if the consumer reads another version of a result than the
    /// first instruction writes.
    pub(crate) fn merge_consumer(&self, follower: &Versions, entries: GradientModes) -> Option<Versions> {
        let mut both = self.clone();
        for &(id, versions) in &follower.reads {
            let fits = match self.written_version(id) {
                Some(written) => mode_indices(entries)
                    .all(|entry| versions[entry].is_none_or(|version| version == written)),
                None => both.add_read(id, versions),
            };
            if !fits {
                return None;
            }
        }
        both.writes.retain(|(id, _)| follower.written_version(*id).is_none());
        both.writes.extend_from_slice(&follower.writes);
        Some(both)
    }

    /// Returns the versions of only the buffers that an instruction reads and writes.
    #[must_use]
    pub(crate) fn restrict_to(&self, instruction: &Instruction) -> Versions {
        let (reads, writes) = (instruction.reads(), instruction.writes());
        Versions {
            reads: self.reads.iter().copied().filter(|(id, _)| reads.contains(id)).collect(),
            writes: self.writes.iter().copied().filter(|(id, _)| writes.contains(id)).collect(),
        }
    }

    /// Adds or replaces the read of a buffer. The version is the same in every gradient mode.
    #[must_use]
    pub(crate) fn with_read(mut self, id: BufferId, version: Version) -> Versions {
        self.reads.retain(|(read, _)| *read != id);
        self.reads.push((id, same_in_all_modes(version)));
        self
    }

    /// Adds or replaces the write of a buffer.
    #[must_use]
    pub(crate) fn with_write(mut self, id: BufferId, version: Version) -> Versions {
        self.writes.retain(|(written, _)| *written != id);
        self.writes.push((id, version));
        self
    }

    /// Adds or replaces the read of a buffer by the read of another instruction.
    #[must_use]
    pub(crate) fn with_read_of(mut self, id: BufferId, other: &Versions) -> Versions {
        self.reads.retain(|(read, _)| *read != id);
        self.reads.extend(other.read_versions(id).map(|&versions| (id, versions)));
        self
    }

    /// Replaces the read buffers and the written buffers.
    pub(crate) fn substitute_buffers(&mut self, read: BufferSubstitution<'_>, write: BufferSubstitution<'_>) {
        self.reads.iter_mut().for_each(|(id, _)| *id = read(*id));
        self.writes.iter_mut().for_each(|(id, _)| *id = write(*id));
    }

    /// Returns a read buffer if its current version differs from the recorded version.
    pub(crate) fn stale_buffer(
        &self,
        entries: GradientModes,
        current: impl Fn(BufferId, GradientMode) -> Version,
    ) -> Option<BufferId> {
        let stale = |&(id, versions): &(BufferId, ReadVersions)| {
            mode_indices(entries)
                .any(|entry| versions[entry].is_some_and(|versions| versions != current(id, MODES[entry])))
                .then_some(id)
        };
        self.reads.iter().find_map(stale)
    }
}

/// Returns the indices of some gradient modes.
pub(crate) fn mode_indices(entries: GradientModes) -> impl Iterator<Item = usize> {
    (0..MODES.len()).filter(move |&entry| entries.contains(MODES[entry]))
}

impl Version {
    /// Version of a buffer before its first write.
    pub(crate) const INITIAL: Version = Version(0);
}
