//! Instructions in order of execution, and the check that each reads its recorded versions.

use std::sync::Arc;

use crate::buffer::{Buffer, BufferId, BufferLocation, alias_classes, distinct};
use crate::error::ProgramError;
use crate::gradient_modes::{GradientMode, GradientModes};
use crate::instruction::Instruction;
use crate::operand::Nest;
use crate::versions::{ReadVersions, Version, Versions, mode_indices, same_in_all_modes};

/// Instruction with its gradient modes and the node that it was lowered from.
#[derive(Clone, Debug)]
pub struct ScheduledInstruction {
    /// Instruction.
    pub instruction: Instruction,
    /// Gradient modes that run the instruction.
    pub gradient_modes: GradientModes,
    /// Name of the node, for messages.
    pub node: Arc<str>,
    /// Version of each buffer that the instruction reads and writes.
    pub(crate) versions: Versions,
}

impl ScheduledInstruction {
    /// Returns the nests of a group one by one, or else the instruction itself.
    #[must_use]
    pub fn split_group(&self) -> Vec<ScheduledInstruction> {
        match &self.instruction {
            Instruction::NestGroup(group) => {
                let nest =
                    |nest: &Arc<Nest>| self.with_instruction(Instruction::Nest(nest.clone()), &self.versions);
                group.nests.iter().map(nest).collect()
            }
            _ => vec![self.clone()],
        }
    }

    /// Returns another instruction with the same gradient modes and node. It takes the versions of its own buffers.
    pub(crate) fn with_instruction(
        &self,
        instruction: Instruction,
        versions: &Versions,
    ) -> ScheduledInstruction {
        let versions = versions.restrict_to(&instruction);
        ScheduledInstruction {
            instruction,
            versions,
            gradient_modes: self.gradient_modes,
            node: self.node.clone(),
        }
    }

    /// Returns the instruction with another nest over the same buffers.
    pub(crate) fn with_nest(&self, nest: Nest) -> ScheduledInstruction {
        self.with_instruction(self.instruction.with_nest(nest), &self.versions)
    }
}

/// Generator of version numbers for writes that passes add.
#[derive(Debug)]
pub(crate) struct VersionCounter(u32);

impl VersionCounter {
    /// Starts after the largest number of these instructions.
    pub(crate) fn after<'a>(
        instructions: impl IntoIterator<Item = &'a ScheduledInstruction>,
    ) -> VersionCounter {
        let writes = instructions.into_iter().flat_map(|scheduled| scheduled.versions.writes());
        VersionCounter(writes.map(|(_, version)| version.0).max().unwrap_or(0))
    }

    /// Returns the next number.
    pub(crate) fn next(&mut self) -> Version {
        self.0 += 1;
        Version(self.0)
    }
}

/// Versions of the externally visible buffers at the end of a program.
#[derive(Clone, Debug, Default)]
pub(crate) struct FinalVersions(Vec<(BufferId, ReadVersions)>);

/// Current versions of the buffers during a walk over the instructions.
struct CurrentVersions<'a> {
    classes: &'a [usize],
    by_class: Vec<ReadVersions>,
}

impl<'a> CurrentVersions<'a> {
    fn new(cells: &'a [usize]) -> CurrentVersions<'a> {
        CurrentVersions { classes: cells, by_class: vec![same_in_all_modes(Version::INITIAL); cells.len()] }
    }

    fn of(&self, id: BufferId) -> ReadVersions {
        self.by_class[self.classes[id.0 as usize]]
    }

    fn write(&mut self, id: BufferId, version: Version, entries: GradientModes) {
        let versions = &mut self.by_class[self.classes[id.0 as usize]];
        mode_indices(entries).for_each(|entry| versions[entry] = Some(version));
    }
}

/// Numbers the writes of a newly built program, and records for every instruction the versions that it reads.
pub(crate) fn number_versions(
    instructions: &mut [ScheduledInstruction],
    buffers: &[Buffer],
    outputs: &[BufferId],
) -> FinalVersions {
    let cells = alias_classes(buffers);
    let mut current = CurrentVersions::new(&cells);
    for (at, ScheduledInstruction { instruction, gradient_modes: entries, versions, .. }) in
        instructions.iter_mut().enumerate()
    {
        let read = |id: BufferId| {
            let mut read_versions = ReadVersions::default();
            mode_indices(*entries).for_each(|entry| read_versions[entry] = current.of(id)[entry]);
            (id, read_versions)
        };
        let [reads, writes] = [instruction.reads(), instruction.writes()].map(distinct);
        let version = Version(at as u32 + 1);
        let written = writes.iter().map(|&id| (id, version));
        *versions = Versions::new(reads.into_iter().map(read), written);
        writes.iter().for_each(|&id| current.write(id, version, *entries));
    }
    let is_state = |id: &BufferId| matches!(buffers[id.0 as usize].location, BufferLocation::Plane(..));
    let state = (0..buffers.len()).map(|k| BufferId(k as u32)).filter(is_state);
    let externally_visible = state.chain(outputs.iter().copied());
    FinalVersions(externally_visible.map(|id| (id, current.of(id))).collect())
}

/// Checks that every instruction, and every reader after the program, sees the recorded versions.
pub(crate) fn check_versions(
    instructions: &[ScheduledInstruction],
    buffers: &[Buffer],
    FinalVersions(last): &FinalVersions,
) -> Result<(), ProgramError> {
    let label = |id: BufferId| &buffers[id.0 as usize].label;
    let cells = alias_classes(buffers);
    let mut current = CurrentVersions::new(&cells);
    for ScheduledInstruction { instruction, gradient_modes: entries, node, versions } in instructions {
        // A buffer without a recorded version is as wrong as a stale buffer.
        let unknown = versions.unversioned_buffer(instruction);
        let read_version =
            |id: BufferId, entry: GradientMode| current.of(id)[entry as usize].unwrap_or(Version::INITIAL);
        let stale = versions.stale_buffer(*entries, read_version);
        if let Some(id) = unknown.or(stale) {
            let label = label(id);
            let fault = format!("it reads {label:?} before or after the expected update");
            return Err(ProgramError::faulty(node, instruction, fault));
        }
        versions.writes().for_each(|(id, version)| current.write(id, version, *entries));
    }
    match last.iter().find(|(id, read_version)| current.of(*id) != *read_version) {
        Some(&(id, _)) => Err(ProgramError::LostUpdate { label: label(id).to_string() }),
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

    /// Buffers, and maps that add their operands.
    #[derive(Default)]
    struct Sketch {
        buffers: Vec<Buffer>,
        instructions: Vec<ScheduledInstruction>,
    }

    impl Sketch {
        fn buffer(&mut self, label: &str, location: BufferLocation) -> BufferId {
            self.buffers.push(Buffer { label: label.into(), dtype: DType::F32, len: N, location });
            BufferId(self.buffers.len() as u32 - 1)
        }

        fn map(&mut self, reads: &[BufferId], to: BufferId, entries: GradientModes) {
            let mut b = Builder::new();
            let mut sum = b.constant(Type::F32, 1.0);
            for slot in 0..reads.len() {
                let x = b.load(slot, Type::F32);
                sum = b.add(sum, x);
            }
            let contiguous = |id: BufferId| Operand::contiguous(id, DType::F32, &[N]);
            let nest = Nest {
                dims: [N].into_iter().collect(),
                inner: 0,
                segments: None,
                loads: reads.iter().map(|&id| Load::Buffer(contiguous(id))).collect(),
                expr: b.finish(&[sum]),
                reductions: Vec::new(),
                stores: vec![contiguous(to)],
            };
            let instruction = Instruction::from(nest);
            let node: Arc<str> = format!("node {}", self.instructions.len()).into();
            self.instructions.push(ScheduledInstruction {
                instruction,
                gradient_modes: entries,
                node,
                versions: Versions::default(),
            });
        }

        fn validate(&self, last: &FinalVersions) -> Option<String> {
            check_versions(&self.instructions, &self.buffers, last).err().map(|error| error.to_string())
        }
    }

    /// Returns a program that reads a value, updates it, and reads it again.
    fn update_in_place_program() -> (Sketch, FinalVersions) {
        let mut s = Sketch::default();
        let [x, before, after] =
            ["x", "before", "after"].map(|label| s.buffer(label, BufferLocation::Work(0)));
        s.map(&[], x, GradientModes::ALL);
        s.map(&[x], before, GradientModes::ALL);
        s.map(&[x], x, GradientModes::ALL);
        s.map(&[x], after, GradientModes::ALL);
        let last = number_versions(&mut s.instructions, &s.buffers, &[before, after]);
        (s, last)
    }

    #[test]
    fn new_program_is_valid() {
        let (s, last) = update_in_place_program();
        assert_eq!(s.validate(&last), None);
    }

    #[test]
    fn read_moved_across_an_update_is_detected() {
        for (first, other, node) in [(1, 2, "node 1"), (2, 3, "node 3")] {
            let (mut s, last) = update_in_place_program();
            s.instructions.swap(first, other);
            let expected = format!(
                "{node} was lowered to an invalid Map instruction: it reads \"x\" before or after the expected update"
            );
            assert_eq!(s.validate(&last), Some(expected));
        }
    }

    #[test]
    fn missing_producer_is_detected() {
        let (mut s, last) = update_in_place_program();
        s.instructions.remove(2);
        assert!(s.validate(&last).is_some());
    }

    #[test]
    fn reordered_state_updates_are_detected() {
        let mut s = Sketch::default();
        let state = s.buffer("state", BufferLocation::Plane(PlaneId(0), 0));
        let [x, y] = ["x", "y"].map(|label| s.buffer(label, BufferLocation::Work(0)));
        s.map(&[x], state, GradientModes::ALL);
        s.map(&[y], state, GradientModes::ALL);
        let last = number_versions(&mut s.instructions, &s.buffers, &[]);
        assert_eq!(s.validate(&last), None);
        s.instructions.swap(0, 1);
        let expected = "\"state\" would not have its last value at the end of the program";
        assert_eq!(s.validate(&last).as_deref(), Some(expected));
    }

    #[test]
    fn overlapping_plane_parts_share_versions() {
        let mut s = Sketch::default();
        let full = s.buffer("whole", BufferLocation::Plane(PlaneId(0), 0));
        let half = s.buffer("half", BufferLocation::Plane(PlaneId(0), 4 * N / 2));
        let x = s.buffer("x", BufferLocation::Work(0));
        s.map(&[x], half, GradientModes::ALL);
        s.map(&[full], x, GradientModes::ALL);
        let last = number_versions(&mut s.instructions, &s.buffers, &[x]);
        assert_eq!(s.validate(&last), None);
        s.instructions.swap(0, 1);
        assert!(s.validate(&last).is_some());
    }

    /// Each gradient mode sees its own updates.
    #[test]
    fn gradient_modes_are_independent() {
        let mut s = Sketch::default();
        let [x, y] = ["x", "y"].map(|label| s.buffer(label, BufferLocation::Work(0)));
        s.map(&[], x, GradientModes::ALL);
        s.map(&[x], x, GradientModes::only(GradientMode::Accumulate));
        s.map(&[x], y, GradientModes::only(GradientMode::Overwrite));
        let last = number_versions(&mut s.instructions, &s.buffers, &[x, y]);
        assert_eq!(s.validate(&last), None);
        // The two instructions never run in the same mode, so their order does not matter.
        s.instructions.swap(1, 2);
        assert_eq!(s.validate(&last), None);
        s.instructions.swap(0, 1);
        assert!(s.validate(&last).is_some());
    }

    /// A map that reads an updated result is not fused with the instruction that computes the result before the update.
    #[test]
    fn updated_value_is_not_fused() {
        let (s, _) = update_in_place_program();
        let [maker, reader] = [&s.instructions[0], &s.instructions[3]].map(|i| &i.versions);
        assert!(maker.merge_consumer(reader, GradientModes::ALL).is_none());
        let [maker, reader] = [&s.instructions[0], &s.instructions[1]].map(|i| &i.versions);
        assert!(maker.merge_consumer(reader, GradientModes::ALL).is_some());
        // An instruction cannot see a buffer both before and after an update.
        let [before, after] = [&s.instructions[1], &s.instructions[3]].map(|i| &i.versions);
        assert!(before.clone().merge_reads(after).is_none());
    }
}
