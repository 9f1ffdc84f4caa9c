//! Editor for a program's instructions. It keeps definitions, uses and live ranges up to date under insertion, removal
//! and replacement.

use std::sync::Arc;

use ortrain_expr::pause;
use smallvec::SmallVec;

use crate::align;
use crate::buffer::{Buffer, BufferId, BufferIds, is_work, membership_flags};
use crate::draft::Draft;
use crate::gradient_modes::GradientModes;
use crate::instruction::Instruction;
use crate::liveness::LiveBytesTree;
use crate::operand::{Load, Nest, stored_buffers};
use crate::rewrite::inline_nest::keep_results;
use crate::scheduled::ScheduledInstruction;
use crate::uses::{DefUse, PositionSet};
use crate::versions::Version;

/// Slots of each instruction: one for each gradient mode, because a rewrite can split an instruction by mode.
pub(crate) const SLOTS_PER_INSTRUCTION: usize = 2;

/// Separator of the node names of a merged instruction.
const NODE_SEPARATOR: &str = " + ";

/// Maximum number of node names of a merged instruction.
const MAX_NODES: usize = 4;
const MORE_NODES_MARK: &str = "…";

/// New contents of some slots; `None` empties a slot.
pub(crate) type Change = Vec<(usize, Option<ScheduledInstruction>)>;

/// Instructions in slots, with a free slot after each, and the uses of each buffer.
pub(crate) struct Editor<'a> {
    pub(crate) slots: Vec<Option<ScheduledInstruction>>,
    pub(crate) buffers: &'a [Buffer],
    uses: DefUse,
    is_input: Vec<bool>,
    is_output: Vec<bool>,
    alive: LiveBytesTree,
}

impl<'a> Editor<'a> {
    /// Takes the instructions out of a draft; [`Editor::finish`] returns them.
    pub(crate) fn new(draft: &'a mut Draft) -> Editor<'a> {
        let Draft { instructions, buffers, inputs, outputs, .. } = draft;
        let (instructions, buffers) = (std::mem::take(instructions), &buffers[..]);
        // Sizes are capped here. The memory plan rejects excessive sizes.
        let bytes = |buffer: &Buffer| buffer.len.saturating_mul(buffer.dtype.size()).min(1 << 48);
        let bytes = buffers.iter().map(|buffer| align(bytes(buffer))).collect();
        let mut uses = DefUse::new(buffers);
        for (at, scheduled) in instructions.iter().enumerate() {
            uses.add(SLOTS_PER_INSTRUCTION * at, &scheduled.instruction);
        }
        let mut work = Editor {
            slots: instructions.into_iter().flat_map(|scheduled| [Some(scheduled), None]).collect(),
            buffers,
            uses,
            is_input: membership_flags(buffers.len(), inputs),
            is_output: membership_flags(buffers.len(), outputs),
            alive: LiveBytesTree::default(),
        };
        let ranges = (0..buffers.len()).map(|k| work.live_range(BufferId(k as u32))).collect();
        work.alive = LiveBytesTree::new(work.slots.len(), bytes, ranges);
        work
    }

    /// Returns the live range of a buffer in the work arena, from its uses.
    fn live_range(&self, id: BufferId) -> Option<(usize, usize)> {
        if !is_work(self.buffers, id) {
            return None;
        }
        let (readers, writers) = (self.uses.readers(id), self.uses.writers(id));
        let first = if self.is_input(id) { Some(0) } else { writers.first() };
        let last = if self.is_output(id) {
            Some(self.slots.len().saturating_sub(1))
        } else {
            readers.last().max(writers.last())
        };
        first.zip(last)
    }

    /// Returns the number of slots.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Returns the current instructions, in order.
    pub(crate) fn finish(self) -> Vec<ScheduledInstruction> {
        self.slots.into_iter().flatten().collect()
    }

    /// Returns the peak of the live bytes.
    pub(crate) fn peak(&self) -> i64 {
        self.alive.peak()
    }

    /// Returns true if a buffer is an input of the program.
    pub(crate) fn is_input(&self, id: BufferId) -> bool {
        self.is_input[self.alias_class(id)]
    }

    /// Returns true if a buffer is an output of the program.
    pub(crate) fn is_output(&self, id: BufferId) -> bool {
        self.is_output[self.alias_class(id)]
    }

    /// Returns the positions that read a buffer.
    pub(crate) fn readers(&self, id: BufferId) -> &PositionSet {
        self.uses.readers(id)
    }

    /// Returns the positions that write a buffer.
    pub(crate) fn writers(&self, id: BufferId) -> &PositionSet {
        self.uses.writers(id)
    }

    pub(crate) fn instruction_at(&self, at: usize) -> Option<&Instruction> {
        self.slots[at].as_ref().map(|scheduled| &scheduled.instruction)
    }

    pub(crate) fn map_at(&self, at: usize) -> Option<&Nest> {
        self.instruction_at(at)?.as_map().filter(|map| map.segments.is_none())
    }

    pub(crate) fn alias_class(&self, id: BufferId) -> usize {
        self.uses.alias_class(id)
    }

    pub(crate) fn is_work(&self, id: BufferId) -> bool {
        is_work(self.buffers, id)
    }

    /// Replaces the instruction in a slot and returns the old one.
    pub(crate) fn replace_slot(
        &mut self,
        at: usize,
        new: Option<ScheduledInstruction>,
    ) -> Option<ScheduledInstruction> {
        pause();
        let mut touched = BufferIds::new();
        let old = self.slots[at].take();
        if let Some(old) = &old {
            self.uses.remove(at, &old.instruction);
            old.instruction.buffers(&mut |id, _| touched.push(BufferId(self.uses.alias_class(id) as u32)));
        }
        if let Some(new) = &new {
            self.uses.add(at, &new.instruction);
            new.instruction.buffers(&mut |id, _| touched.push(BufferId(self.uses.alias_class(id) as u32)));
        }
        self.slots[at] = new;
        touched.into_iter().for_each(|id| self.alive.set(id.0 as usize, self.live_range(id)));
        old
    }

    /// Applies a change and returns the change that reverts it.
    pub(crate) fn apply_change(&mut self, change: Change) -> Change {
        change.into_iter().map(|(at, new)| (at, self.replace_slot(at, new))).collect()
    }

    /// Applies a change, unless one of its instructions would then read another version of a buffer than recorded.
    /// Returns the change that reverts it.
    pub(crate) fn apply_change_if_sound(&mut self, change: Change) -> Option<Change> {
        let undo = self.apply_change(change);
        if undo.iter().all(|&(at, _)| self.reads_recorded_versions(at)) {
            return Some(undo);
        }
        self.revert_change(undo);
        None
    }

    pub(crate) fn revert_change(&mut self, undo: Change) {
        for (at, old) in undo.into_iter().rev() {
            self.replace_slot(at, old);
        }
    }

    /// Returns true if `set` has a position strictly between `from` and `to` with an instruction of the gradient modes
    /// `entries`.
    pub(crate) fn any_between(
        &self,
        set: &PositionSet,
        from: usize,
        to: usize,
        entries: GradientModes,
    ) -> bool {
        let runs = |at: usize| {
            let scheduled = self.slots[at].as_ref();
            scheduled.is_some_and(|scheduled| !scheduled.gradient_modes.and(entries).is_empty())
        };
        from + 1 < to && set.within(from + 1..to).any(runs)
    }

    /// Returns true if the buffers hold the same values at both positions, in runs of some gradient modes.
    pub(crate) fn is_unchanged_between(
        &self,
        reads: &[BufferId],
        from: usize,
        to: usize,
        entries: GradientModes,
    ) -> bool {
        reads.iter().all(|&id| !self.any_between(self.writers(id), from, to, entries))
    }

    /// Returns true if the instruction at a position reads its recorded versions.
    pub(crate) fn reads_recorded_versions(&self, at: usize) -> bool {
        let Some(scheduled) = &self.slots[at] else { return true };
        let stale = scheduled.versions.stale_buffer(scheduled.gradient_modes, |id, entry| {
            let runs = |&before: &usize| {
                self.slots[before].as_ref().is_some_and(|before| before.gradient_modes.contains(entry))
            };
            let writer = self.writers(id).within(0..at).rev().find(runs);
            let written = writer.and_then(|writer| {
                let versions = &self.slots[writer].as_ref()?.versions;
                versions.writes().find(|&(written, _)| self.alias_class(written) == self.alias_class(id))
            });
            written.map_or(Version::INITIAL, |(_, version)| version)
        });
        stale.is_none()
    }

    /// Returns true if no instruction between two positions reads or writes the buffers, in runs of some gradient
    /// modes.
    pub(crate) fn is_unused_between(
        &self,
        writes: &[BufferId],
        from: usize,
        to: usize,
        entries: GradientModes,
    ) -> bool {
        self.is_unchanged_between(writes, from, to, entries)
            && writes.iter().all(|&id| !self.any_between(self.readers(id), from, to, entries))
    }

    /// Returns true if an instruction is safe to run. A store may overlap only a load of the same operand. An
    /// instruction that can fail must not write state.
    pub(crate) fn is_valid(&self, instruction: &Instruction) -> bool {
        let Some(nest) = instruction.flexible_nest() else { return true };
        let factors = instruction.factor_buffers();
        for (k, store) in nest.stores.iter().enumerate() {
            let cell = self.alias_class(store.buffer);
            let overlaps = |id: BufferId| self.alias_class(id) == cell;
            if stored_buffers(nest).take(k).any(overlaps) || factors.iter().copied().any(overlaps) {
                return false;
            }
            for (slot, load) in nest.loads.iter().enumerate() {
                let Load::Buffer(from) = load else { continue };
                if overlaps(from.buffer) && (from != store || nest.is_gathered(slot)) {
                    return false;
                }
            }
        }
        !instruction.can_fail() || stored_buffers(nest).all(|id| self.is_work(id))
    }

    /// Returns the position of the only instruction that writes a work buffer.
    pub(crate) fn only_writer(&self, id: BufferId) -> Option<usize> {
        let writers = self.writers(id);
        writers.only().filter(|_| self.is_work(id))
    }

    pub(crate) fn producing_map(&self, id: BufferId) -> Option<Nest> {
        self.producing_map_and_result(id).map(|(map, result)| single_result_map(map, result))
    }

    /// Returns the map that computes a buffer, and the index of the buffer among its results.
    pub(crate) fn producing_map_and_result(&self, id: BufferId) -> Option<(&Nest, usize)> {
        let map = self.map_at(self.only_writer(id)?)?;
        Some((map, stored_buffers(map).position(|written| written == id)?))
    }
}

/// Returns the node names of two merged instructions. If exactly one of them can fail, only its node is named, because
/// messages quote it.
pub(crate) fn joined_node_name(first: &ScheduledInstruction, second: &ScheduledInstruction) -> Arc<str> {
    match (first.instruction.can_fail(), second.instruction.can_fail()) {
        (true, false) => return first.node.clone(),
        (false, true) => return second.node.clone(),
        _ if first.node == second.node => return first.node.clone(),
        _ => {}
    }
    if first.node.ends_with(MORE_NODES_MARK) {
        return first.node.clone();
    }
    join_node_names([&*first.node, &*second.node])
}

/// Splits a string of node names at [`NODE_SEPARATOR`]. A search for one character is faster than a search for the
/// whole separator.
fn split_node_names(mut nodes: &str) -> SmallVec<[&str; MAX_NODES + 1]> {
    let (mut each, mut from) = (SmallVec::new(), 0);
    while let Some(plus) = nodes[from..].find('+') {
        from += plus + 1;
        if let Some((first, rest)) =
            (nodes[..from - 1].strip_suffix(' ')).zip(nodes[from..].strip_prefix(' '))
        {
            each.push(first);
            (nodes, from) = (rest, 0);
        }
    }
    each.push(nodes);
    each
}

/// Joins the node names of merged instructions.
pub(crate) fn join_node_names<'a>(of: impl IntoIterator<Item = &'a str>) -> Arc<str> {
    let mut nodes: Vec<&str> = Vec::new();
    for node in of.into_iter().flat_map(split_node_names) {
        if nodes.len() <= MAX_NODES && !nodes.contains(&node) {
            nodes.push(node);
        }
    }
    if nodes.len() > MAX_NODES {
        nodes.truncate(MAX_NODES);
        nodes.push(MORE_NODES_MARK);
    }
    nodes.join(NODE_SEPARATOR).into()
}

/// Returns the part of a map that computes one result.
pub(crate) fn single_result_map(map: &Nest, result: usize) -> Nest {
    let stored: Vec<bool> = (0..map.stores.len()).map(|k| k == result).collect();
    keep_results(map, &stored).unwrap_or_else(|| map.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_names_are_split() {
        for names in ["", "a", "a + b", "a+b + c", "+", " + ", "a +b + ", "a + + b", "a + b + c + …"] {
            assert_eq!(split_node_names(names).as_slice(), names.split(NODE_SEPARATOR).collect::<Vec<_>>());
        }
    }
}
