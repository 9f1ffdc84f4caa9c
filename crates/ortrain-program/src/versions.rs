//! Versions of buffers: which write an instruction reads.
//!
//! A buffer that is updated in place holds one value after another. Before any pass runs, every write gets a number, and
//! every read the number of the write that it sees. Passes carry these numbers along with the instructions that they
//! merge, split and move; afterwards [`check`] goes through the program once and compares. A pass that lets an
//! instruction read a value from before or after the one it was given is then an error, never a wrong number.

use smallvec::SmallVec;

use crate::fuse::cells;
use crate::{Buffer, BufferId, Entries, Entry, Instruction, Place, ProgramError, ScheduledInstruction};

/// The number of a write. A buffer holds version 0 until something writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version(u32);

/// What a read sees in each entry; nothing in entries that the instruction does not belong to.
type Seen = [Option<Version>; ENTRIES.len()];

const ENTRIES: [Entry; 2] = [Entry::Accumulate, Entry::Overwrite];

/// A version that is the same in every entry.
fn always(version: Version) -> Seen {
    [Some(version); ENTRIES.len()]
}

/// The versions that an instruction was given to read, and those that it makes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Versions {
    reads: SmallVec<[(BufferId, Seen); 4]>,
    writes: SmallVec<[(BufferId, Version); 2]>,
}

impl Versions {
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

    fn seen(&self, id: BufferId) -> Option<&Seen> {
        self.reads.iter().find(|(read, _)| *read == id).map(|(_, seen)| seen)
    }

    /// The version of a buffer that is read, if it is the same in all of some entries.
    pub(crate) fn read_everywhere(&self, id: BufferId, entries: Entries) -> Option<Version> {
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
    pub(crate) fn followed_by(&self, follower: &Versions, entries: Entries) -> Option<Versions> {
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
    pub(crate) fn rename(
        &mut self,
        read: &impl Fn(BufferId) -> BufferId,
        write: &impl Fn(BufferId) -> BufferId,
    ) {
        self.reads.iter_mut().for_each(|(id, _)| *id = read(*id));
        self.writes.iter_mut().for_each(|(id, _)| *id = write(*id));
    }

    /// Whether every version that is read is there, by what `current` says of a buffer in an entry.
    pub(crate) fn hold(&self, entries: Entries, current: impl Fn(BufferId, Entry) -> Version) -> bool {
        self.stale(entries, current).is_none()
    }

    /// A buffer that holds another version than the one that is read.
    fn stale(&self, entries: Entries, current: impl Fn(BufferId, Entry) -> Version) -> Option<BufferId> {
        let stale = |&(id, seen): &(BufferId, Seen)| {
            entries_of(entries)
                .any(|entry| seen[entry].is_some_and(|seen| seen != current(id, ENTRIES[entry])))
                .then_some(id)
        };
        self.reads.iter().find_map(stale)
    }
}

/// The numbers of some entries.
fn entries_of(entries: Entries) -> impl Iterator<Item = usize> {
    (0..ENTRIES.len()).filter(move |&entry| entries.contains(ENTRIES[entry]))
}

impl Version {
    /// What a buffer holds before anything is written to it.
    pub(crate) const BEFORE: Version = Version(0);
}

/// Numbers for writes that passes add.
#[derive(Debug)]
pub(crate) struct NewVersions(u32);

impl NewVersions {
    /// Numbers that none of these instructions has.
    pub(crate) fn after<'a>(instructions: impl IntoIterator<Item = &'a ScheduledInstruction>) -> NewVersions {
        let writes = instructions.into_iter().flat_map(|scheduled| &scheduled.versions.writes);
        NewVersions(writes.map(|(_, version)| version.0).max().unwrap_or(0))
    }

    /// The next number.
    pub(crate) fn next(&mut self) -> Version {
        self.0 += 1;
        Version(self.0)
    }
}

/// What the buffers that are seen outside of a program hold in the end.
#[derive(Clone, Debug, Default)]
pub(crate) struct FinalVersions(Vec<(BufferId, Seen)>);

/// Versions that the buffers hold while instructions are gone through in order.
struct Current<'a> {
    cells: &'a [usize],
    of_cells: Vec<Seen>,
}

impl<'a> Current<'a> {
    fn new(cells: &'a [usize]) -> Current<'a> {
        Current { cells, of_cells: vec![always(Version::BEFORE); cells.len()] }
    }

    fn of(&self, id: BufferId) -> Seen {
        self.of_cells[self.cells[id.0 as usize]]
    }

    fn in_entry(&self, id: BufferId, entry: Entry) -> Version {
        self.of(id)[entry as usize].unwrap_or(Version::BEFORE)
    }

    fn write(&mut self, id: BufferId, version: Version, entries: Entries) {
        let seen = &mut self.of_cells[self.cells[id.0 as usize]];
        entries_of(entries).for_each(|entry| seen[entry] = Some(version));
    }
}

/// Numbers the writes of a program as it was put together, and says to every instruction which ones it reads.
pub(crate) fn number(
    instructions: &mut [ScheduledInstruction],
    buffers: &[Buffer],
    outputs: &[BufferId],
) -> FinalVersions {
    let cells = cells(buffers);
    let mut current = Current::new(&cells);
    for (at, ScheduledInstruction { instruction, entries, versions, .. }) in
        instructions.iter_mut().enumerate()
    {
        let read = |id: BufferId| {
            let mut seen = Seen::default();
            entries_of(*entries).for_each(|entry| seen[entry] = current.of(id)[entry]);
            (id, seen)
        };
        let mut reads = instruction.reads();
        reads.sort_unstable();
        reads.dedup();
        let version = Version(at as u32 + 1);
        let mut writes = instruction.writes();
        writes.sort_unstable();
        writes.dedup();
        *versions = Versions {
            reads: reads.into_iter().map(read).collect(),
            writes: writes.iter().map(|&id| (id, version)).collect(),
        };
        writes.iter().for_each(|&id| current.write(id, version, *entries));
    }
    let is_state = |id: &BufferId| matches!(buffers[id.0 as usize].place, Place::Plane(..));
    let state = (0..buffers.len()).map(|k| BufferId(k as u32)).filter(is_state);
    let seen_outside = state.chain(outputs.iter().copied());
    FinalVersions(seen_outside.map(|id| (id, current.of(id))).collect())
}

/// An instruction, by its place, or the end of the program, and the buffer of which it would read another version.
pub(crate) struct Stale {
    pub(crate) at: Option<usize>,
    pub(crate) buffer: BufferId,
}

impl Stale {
    /// The error that says so.
    pub(crate) fn error(&self, instructions: &[ScheduledInstruction], buffers: &[Buffer]) -> ProgramError {
        let label = &buffers[self.buffer.0 as usize].label;
        match self.at.and_then(|at| instructions.get(at)) {
            Some(ScheduledInstruction { instruction, node, .. }) => ProgramError::Faulty {
                node: node.to_string(),
                instruction: instruction.name(),
                fault: format!("a read of {label:?} from before or after the update that it was given"),
            },
            None => ProgramError::LostUpdate { label: label.to_string() },
        }
    }
}

/// Checks that every instruction, and whoever looks at the buffers in the end, reads the versions that they were given.
pub(crate) fn check(
    instructions: &[ScheduledInstruction],
    buffers: &[Buffer],
    FinalVersions(last): &FinalVersions,
) -> Result<(), Stale> {
    let cells = cells(buffers);
    let mut current = Current::new(&cells);
    for (at, ScheduledInstruction { instruction, entries, versions, .. }) in instructions.iter().enumerate() {
        // A buffer whose version nobody has noted is as bad as one of another version.
        let unknown = instruction.reads().into_iter().find(|&id| versions.seen(id).is_none());
        let unknown =
            unknown.or_else(|| instruction.writes().into_iter().find(|&id| versions.written(id).is_none()));
        let stale = versions.stale(*entries, |id, entry| current.in_entry(id, entry));
        if let Some(buffer) = unknown.or(stale) {
            return Err(Stale { at: Some(at), buffer });
        }
        versions.writes.iter().for_each(|&(id, version)| current.write(id, version, *entries));
    }
    match last.iter().find(|(id, seen)| current.of(*id) != *seen) {
        Some(&(buffer, _)) => Err(Stale { at: None, buffer }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ortrain_expr::{Builder, DType, Type};

    use super::*;
    use crate::{Load, Nest, Operand, PlaneId};

    const N: usize = 8;

    /// Buffers, and maps that add up what they read.
    #[derive(Default)]
    struct Sketch {
        buffers: Vec<Buffer>,
        instructions: Vec<ScheduledInstruction>,
    }

    impl Sketch {
        fn buffer(&mut self, label: &str, place: Place) -> BufferId {
            self.buffers.push(Buffer { label: label.into(), dtype: DType::F32, len: N, place });
            BufferId(self.buffers.len() as u32 - 1)
        }

        fn map(&mut self, reads: &[BufferId], to: BufferId, entries: Entries) {
            let mut b = Builder::new();
            let mut sum = b.constant(Type::F32, 1.0);
            for slot in 0..reads.len() {
                let x = b.load(slot, Type::F32);
                sum = b.add(sum, x);
            }
            let whole = |id: BufferId| Operand::whole(id, DType::F32, &[N]);
            let nest = Nest {
                dims: [N].into_iter().collect(),
                inner: 0,
                segments: None,
                loads: reads.iter().map(|&id| Load::Buffer(whole(id))).collect(),
                expr: b.finish(&[sum]),
                reductions: Vec::new(),
                stores: vec![whole(to)],
            };
            let instruction = Instruction::Nest(nest);
            let node: Arc<str> = format!("node {}", self.instructions.len()).into();
            self.instructions.push(ScheduledInstruction {
                instruction,
                entries,
                node,
                versions: Versions::default(),
            });
        }

        fn fault(&self, last: &FinalVersions) -> Option<String> {
            let stale = check(&self.instructions, &self.buffers, last).err()?;
            Some(stale.error(&self.instructions, &self.buffers).to_string())
        }
    }

    /// A value that is read, updated, and read again.
    fn updated() -> (Sketch, FinalVersions) {
        let mut s = Sketch::default();
        let [x, before, after] = ["x", "before", "after"].map(|label| s.buffer(label, Place::Work(0)));
        s.map(&[], x, Entries::ALL);
        s.map(&[x], before, Entries::ALL);
        s.map(&[x], x, Entries::ALL);
        s.map(&[x], after, Entries::ALL);
        let last = number(&mut s.instructions, &s.buffers, &[before, after]);
        (s, last)
    }

    #[test]
    fn a_program_as_it_was_put_together_is_sound() {
        let (s, last) = updated();
        assert_eq!(s.fault(&last), None);
    }

    #[test]
    fn a_reader_that_passes_an_update_is_found() {
        for (one, other, node) in [(1, 2, "node 1"), (2, 3, "node 3")] {
            let (mut s, last) = updated();
            s.instructions.swap(one, other);
            let want = format!(
                "{node} was lowered to a faulty Map instruction: a read of \"x\" from before or after the update that it was \
                 given"
            );
            assert_eq!(s.fault(&last), Some(want));
        }
    }

    #[test]
    fn an_instruction_that_makes_what_another_reads_is_missed() {
        let (mut s, last) = updated();
        s.instructions.remove(2);
        assert!(s.fault(&last).is_some());
    }

    #[test]
    fn the_last_update_stays_the_last() {
        let mut s = Sketch::default();
        let state = s.buffer("state", Place::Plane(PlaneId(0), 0));
        let [x, y] = ["x", "y"].map(|label| s.buffer(label, Place::Work(0)));
        s.map(&[x], state, Entries::ALL);
        s.map(&[y], state, Entries::ALL);
        let last = number(&mut s.instructions, &s.buffers, &[]);
        assert_eq!(s.fault(&last), None);
        s.instructions.swap(0, 1);
        let want = "\"state\" would not hold the last of its updates at the end of the program";
        assert_eq!(s.fault(&last).as_deref(), Some(want));
    }

    #[test]
    fn parts_of_a_plane_that_overlap_are_one() {
        let mut s = Sketch::default();
        let whole = s.buffer("whole", Place::Plane(PlaneId(0), 0));
        let half = s.buffer("half", Place::Plane(PlaneId(0), 4 * N / 2));
        let x = s.buffer("x", Place::Work(0));
        s.map(&[x], half, Entries::ALL);
        s.map(&[whole], x, Entries::ALL);
        let last = number(&mut s.instructions, &s.buffers, &[x]);
        assert_eq!(s.fault(&last), None);
        s.instructions.swap(0, 1);
        assert!(s.fault(&last).is_some());
    }

    /// Each entry sees its own updates.
    #[test]
    fn entries_are_apart() {
        let mut s = Sketch::default();
        let [x, y] = ["x", "y"].map(|label| s.buffer(label, Place::Work(0)));
        s.map(&[], x, Entries::ALL);
        s.map(&[x], x, Entries::only(Entry::Accumulate));
        s.map(&[x], y, Entries::only(Entry::Overwrite));
        let last = number(&mut s.instructions, &s.buffers, &[x, y]);
        assert_eq!(s.fault(&last), None);
        // They do not run in one entry, so their order does not matter.
        s.instructions.swap(1, 2);
        assert_eq!(s.fault(&last), None);
        s.instructions.swap(0, 1);
        assert!(s.fault(&last).is_some());
    }

    /// A map that reads a result of another one as it is after an update is not joined with it.
    #[test]
    fn what_is_updated_in_between_is_not_taken_from_where_it_is_made() {
        let (s, _) = updated();
        let [maker, reader] = [&s.instructions[0], &s.instructions[3]].map(|i| &i.versions);
        assert!(maker.followed_by(reader, Entries::ALL).is_none());
        let [maker, reader] = [&s.instructions[0], &s.instructions[1]].map(|i| &i.versions);
        assert!(maker.followed_by(reader, Entries::ALL).is_some());
        // Nor can an instruction see a buffer both before and after an update.
        let [before, after] = [&s.instructions[1], &s.instructions[3]].map(|i| &i.versions);
        assert!(before.clone().reading_also(after).is_none());
    }
}
