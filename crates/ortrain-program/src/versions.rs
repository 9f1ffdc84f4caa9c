//! Versions of buffers: which write an instruction reads.
//!
//! A buffer that is updated in place holds one value after another. Before any pass runs, every write gets a number, and
//! every read the number of the write that it sees. Passes carry these numbers along with the instructions that they
//! merge, split and move; afterwards a check goes through the program once and compares. A pass that lets an
//! instruction read a value from before or after the one it was given is then an error, never a wrong number.

use smallvec::SmallVec;

use crate::buffer::{BufferId, Renaming, distinct};
use crate::gradient_modes::{GradientMode, GradientModes};
use crate::instruction::Instruction;

/// The number of a write. A buffer holds version 0 until something writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version(pub(crate) u32);

/// What a read sees in each entry; nothing in entries that the instruction does not belong to.
pub(crate) type Seen = [Option<Version>; ENTRIES.len()];

const ENTRIES: [GradientMode; 2] = [GradientMode::Accumulate, GradientMode::Overwrite];

/// A version that is the same in every entry.
pub(crate) fn always(version: Version) -> Seen {
    [Some(version); ENTRIES.len()]
}

/// The versions that an instruction was given to read, and those that it makes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Versions {
    reads: SmallVec<[(BufferId, Seen); 4]>,
    writes: SmallVec<[(BufferId, Version); 2]>,
}

impl Versions {
    /// What is read in each entry, and what is made.
    pub(crate) fn new(
        reads: impl IntoIterator<Item = (BufferId, Seen)>,
        writes: impl IntoIterator<Item = (BufferId, Version)>,
    ) -> Versions {
        Versions { reads: reads.into_iter().collect(), writes: writes.into_iter().collect() }
    }

    /// Those of an instruction that makes one buffer of another one, which holds the same in every entry.
    pub(crate) fn of_map(read: (BufferId, Version), write: (BufferId, Version)) -> Versions {
        Versions::default().with_read(read.0, read.1).with_write(write.0, write.1)
    }

    /// The version of a buffer that it makes.
    pub(crate) fn written(&self, id: BufferId) -> Option<Version> {
        self.writes.iter().find(|(written, _)| *written == id).map(|&(_, version)| version)
    }

    /// What it makes.
    pub(crate) fn writes(&self) -> impl Iterator<Item = (BufferId, Version)> {
        self.writes.iter().copied()
    }

    pub(crate) fn seen(&self, id: BufferId) -> Option<&Seen> {
        self.reads.iter().find(|(read, _)| *read == id).map(|(_, seen)| seen)
    }

    /// The version of a buffer that is read, if it is the same in all of some entries.
    pub(crate) fn read_everywhere(&self, id: BufferId, entries: GradientModes) -> Option<Version> {
        let seen = self.seen(id)?;
        let mut versions = entries_of(entries).map(|entry| seen[entry]);
        let first = versions.next()??;
        versions.all(|version| version == Some(first)).then_some(first)
    }

    /// What it reads of one buffer.
    pub(crate) fn read_of(&self, id: BufferId) -> Versions {
        Versions::default().with_read_of(id, self)
    }

    /// Adds what another instruction reads of a buffer. Says whether both can be read at once.
    /// A buffer that an instruction reads or writes, and whose version is not among these.
    pub(crate) fn unknown(&self, instruction: &Instruction) -> Option<BufferId> {
        let read = distinct(self.reads.iter().map(|&(id, _)| id));
        let written = distinct(self.writes.iter().map(|&(id, _)| id));
        let is_unknown = |known: &[BufferId], id: &BufferId| known.binary_search(id).is_err();
        let unknown = instruction.reads().into_iter().find(|id| is_unknown(&read, id));
        unknown.or_else(|| instruction.writes().into_iter().find(|id| is_unknown(&written, id)))
    }

    /// The versions of an instruction that is made of others, none of which reads what another one writes.
    pub(crate) fn of_all<'a>(all: impl IntoIterator<Item = &'a Versions>) -> Versions {
        let mut together = Versions::default();
        for one in all {
            together.reads.extend_from_slice(&one.reads);
            together.writes.extend_from_slice(&one.writes);
        }
        together.reads.sort_unstable_by_key(|&(id, _)| id);
        together.reads.dedup();
        together
    }

    fn add_read(&mut self, id: BufferId, seen: Seen) -> bool {
        let Some((_, known)) = self.reads.iter_mut().find(|(read, _)| *read == id) else {
            self.reads.push((id, seen));
            return true;
        };
        known.iter_mut().zip(seen).all(|(known, new)| match (*known, new) {
            (Some(known), Some(new)) => known == new,
            (None, new) => {
                *known = new;
                true
            }
            (Some(_), None) => true,
        })
    }

    /// Adds all that another instruction reads. `None` where the two see different versions of a buffer.
    #[must_use]
    pub(crate) fn reading_also(mut self, other: &Versions) -> Option<Versions> {
        other.reads.iter().all(|&(id, seen)| self.add_read(id, seen)).then_some(self)
    }

    /// Those of an instruction and of another one that follows it at once and takes the results of the first from where
    /// they are made. `None` where the two see different versions of a buffer, or the second one sees another version of
    /// a result than the first makes.
    pub(crate) fn followed_by(&self, follower: &Versions, entries: GradientModes) -> Option<Versions> {
        let mut both = self.clone();
        for &(id, seen) in &follower.reads {
            let fits = match self.written(id) {
                Some(made) => entries_of(entries).all(|entry| seen[entry].is_none_or(|seen| seen == made)),
                None => both.add_read(id, seen),
            };
            if !fits {
                return None;
            }
        }
        both.writes.retain(|(id, _)| follower.written(*id).is_none());
        both.writes.extend_from_slice(&follower.writes);
        Some(both)
    }

    /// The versions of the buffers that an instruction reads and writes.
    #[must_use]
    pub(crate) fn of_instruction(&self, instruction: &Instruction) -> Versions {
        let (reads, writes) = (instruction.reads(), instruction.writes());
        Versions {
            reads: self.reads.iter().copied().filter(|(id, _)| reads.contains(id)).collect(),
            writes: self.writes.iter().copied().filter(|(id, _)| writes.contains(id)).collect(),
        }
    }

    /// The same with a buffer of a single version read in place of another one, or beside what is read.
    #[must_use]
    pub(crate) fn with_read(mut self, id: BufferId, version: Version) -> Versions {
        self.reads.retain(|(read, _)| *read != id);
        self.reads.push((id, always(version)));
        self
    }

    /// The same with another version made of a buffer.
    #[must_use]
    pub(crate) fn with_write(mut self, id: BufferId, version: Version) -> Versions {
        self.writes.retain(|(written, _)| *written != id);
        self.writes.push((id, version));
        self
    }

    /// The same with a buffer read as another instruction reads it.
    #[must_use]
    pub(crate) fn with_read_of(mut self, id: BufferId, other: &Versions) -> Versions {
        self.reads.retain(|(read, _)| *read != id);
        self.reads.extend(other.seen(id).map(|&seen| (id, seen)));
        self
    }

    /// Puts other buffers in place of those that are read and written.
    pub(crate) fn rename(&mut self, read: Renaming<'_>, write: Renaming<'_>) {
        self.reads.iter_mut().for_each(|(id, _)| *id = read(*id));
        self.writes.iter_mut().for_each(|(id, _)| *id = write(*id));
    }

    /// A buffer that holds another version than the one that is read.
    pub(crate) fn stale(
        &self,
        entries: GradientModes,
        current: impl Fn(BufferId, GradientMode) -> Version,
    ) -> Option<BufferId> {
        let stale = |&(id, seen): &(BufferId, Seen)| {
            entries_of(entries)
                .any(|entry| seen[entry].is_some_and(|seen| seen != current(id, ENTRIES[entry])))
                .then_some(id)
        };
        self.reads.iter().find_map(stale)
    }
}

/// The numbers of some entries.
pub(crate) fn entries_of(entries: GradientModes) -> impl Iterator<Item = usize> {
    (0..ENTRIES.len()).filter(move |&entry| entries.contains(ENTRIES[entry]))
}

impl Version {
    /// What a buffer holds before anything is written to it.
    pub(crate) const BEFORE: Version = Version(0);
}
