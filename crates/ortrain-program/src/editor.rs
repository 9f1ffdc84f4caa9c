//! Instructions in places that can be edited: who uses which buffer, and what is alive, stay right as instructions come, go
//! and change.

use std::sync::Arc;

use ortrain_expr::pause;
use smallvec::SmallVec;

use crate::align;
use crate::buffer::{Buffer, BufferId, BufferIds, flags, is_work};
use crate::draft::Draft;
use crate::gradient_modes::GradientModes;
use crate::instruction::Instruction;
use crate::liveness::AliveTree;
use crate::operand::{Load, Nest, written_by};
use crate::rewrite::inline_nest::with_results;
use crate::scheduled::ScheduledInstruction;
use crate::uses::{Places, Uses};
use crate::versions::Version;

/// Places for each instruction: one for each entry, where several come up to the place of one.
pub(crate) const PLACES: usize = 2;

/// Between the nodes of an instruction that was made of several.
const NODES: &str = " + ";

/// More nodes are not named.
const MAX_NODES: usize = 4;
const MORE_NODES: &str = "…";

/// New instructions for some places; `None` empties a place.
pub(crate) type Change = Vec<(usize, Option<ScheduledInstruction>)>;

/// Instructions in places, with room behind each, and who uses which buffer.
pub(crate) struct Editor<'a> {
    pub(crate) slots: Vec<Option<ScheduledInstruction>>,
    pub(crate) buffers: &'a [Buffer],
    uses: Uses,
    is_input: Vec<bool>,
    is_output: Vec<bool>,
    alive: AliveTree,
}

impl<'a> Editor<'a> {
    /// The instructions of a draft, which are taken out of it: [`Editor::finish`] gives them back.
    pub(crate) fn new(draft: &'a mut Draft) -> Editor<'a> {
        let Draft { instructions, buffers, inputs, outputs, .. } = draft;
        let (instructions, buffers) = (std::mem::take(instructions), &buffers[..]);
        // Absurd sizes are refused when they are placed.
        let bytes = |buffer: &Buffer| buffer.len.saturating_mul(buffer.dtype.size()).min(1 << 48);
        let bytes = buffers.iter().map(|buffer| align(bytes(buffer))).collect();
        let mut uses = Uses::new(buffers);
        for (at, scheduled) in instructions.iter().enumerate() {
            uses.add(PLACES * at, &scheduled.instruction);
        }
        let mut work = Editor {
            slots: instructions.into_iter().flat_map(|scheduled| [Some(scheduled), None]).collect(),
            buffers,
            uses,
            is_input: flags(buffers.len(), inputs),
            is_output: flags(buffers.len(), outputs),
            alive: AliveTree::default(),
        };
        let lives = (0..buffers.len()).map(|k| work.life(BufferId(k as u32))).collect();
        work.alive = AliveTree::new(work.slots.len(), bytes, lives);
        work
    }

    /// From where to where a buffer of the arena is alive, by who uses it.
    fn life(&self, id: BufferId) -> Option<(usize, usize)> {
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

    /// The number of places.
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// The instructions that are there now, in order.
    pub(crate) fn finish(self) -> Vec<ScheduledInstruction> {
        self.slots.into_iter().flatten().collect()
    }

    /// The most bytes that are alive at any place.
    pub(crate) fn peak(&self) -> i64 {
        self.alive.peak()
    }

    /// Whether a buffer is given from outside.
    pub(crate) fn is_input(&self, id: BufferId) -> bool {
        self.is_input[self.cell(id)]
    }

    /// Whether a buffer is wanted outside.
    pub(crate) fn is_output(&self, id: BufferId) -> bool {
        self.is_output[self.cell(id)]
    }

    /// The places at which a buffer is read.
    pub(crate) fn readers(&self, id: BufferId) -> &Places {
        self.uses.readers(id)
    }

    /// The places at which a buffer is written.
    pub(crate) fn writers(&self, id: BufferId) -> &Places {
        self.uses.writers(id)
    }

    pub(crate) fn instruction(&self, at: usize) -> Option<&Instruction> {
        self.slots[at].as_ref().map(|scheduled| &scheduled.instruction)
    }

    pub(crate) fn map(&self, at: usize) -> Option<&Nest> {
        self.instruction(at)?.as_map().filter(|map| map.segments.is_none())
    }

    pub(crate) fn cell(&self, id: BufferId) -> usize {
        self.uses.cell(id)
    }

    pub(crate) fn is_work(&self, id: BufferId) -> bool {
        is_work(self.buffers, id)
    }

    /// Puts an instruction into its place and returns what stood there.
    pub(crate) fn put(
        &mut self,
        at: usize,
        new: Option<ScheduledInstruction>,
    ) -> Option<ScheduledInstruction> {
        pause();
        let mut touched = BufferIds::new();
        let old = self.slots[at].take();
        if let Some(old) = &old {
            self.uses.remove(at, &old.instruction);
            old.instruction.buffers(&mut |id, _| touched.push(BufferId(self.uses.cell(id) as u32)));
        }
        if let Some(new) = &new {
            self.uses.add(at, &new.instruction);
            new.instruction.buffers(&mut |id, _| touched.push(BufferId(self.uses.cell(id) as u32)));
        }
        self.slots[at] = new;
        touched.into_iter().for_each(|id| self.alive.set(id.0 as usize, self.life(id)));
        old
    }

    /// Puts all instructions of a change into their places and returns what stood there.
    pub(crate) fn put_all(&mut self, change: Change) -> Change {
        change.into_iter().map(|(at, new)| (at, self.put(at, new))).collect()
    }

    /// The same, unless one of them would read another version of a buffer than it was given.
    pub(crate) fn put_sound(&mut self, change: Change) -> Option<Change> {
        let undo = self.put_all(change);
        if undo.iter().all(|&(at, _)| self.reads_its_versions(at)) {
            return Some(undo);
        }
        self.take_back(undo);
        None
    }

    pub(crate) fn take_back(&mut self, undo: Change) {
        for (at, old) in undo.into_iter().rev() {
            self.put(at, old);
        }
    }

    /// Whether instructions of some entries between two places are among these.
    pub(crate) fn between(&self, set: &Places, from: usize, to: usize, entries: GradientModes) -> bool {
        let runs = |at: usize| {
            let scheduled = self.slots[at].as_ref();
            scheduled.is_some_and(|scheduled| !scheduled.entries.and(entries).is_empty())
        };
        from + 1 < to && set.within(from + 1..to).any(runs)
    }

    /// Whether buffers hold the same at both places in runs of some entries.
    pub(crate) fn unchanged(
        &self,
        reads: &[BufferId],
        from: usize,
        to: usize,
        entries: GradientModes,
    ) -> bool {
        reads.iter().all(|&id| !self.between(self.writers(id), from, to, entries))
    }

    /// Whether the buffers that the instruction at a place reads hold the versions that it was given.
    pub(crate) fn reads_its_versions(&self, at: usize) -> bool {
        let Some(scheduled) = &self.slots[at] else { return true };
        let stale = scheduled.versions.stale(scheduled.entries, |id, entry| {
            let runs = |&before: &usize| {
                self.slots[before].as_ref().is_some_and(|before| before.entries.contains(entry))
            };
            let writer = self.writers(id).within(0..at).rev().find(runs);
            let written = writer.and_then(|writer| {
                let versions = &self.slots[writer].as_ref()?.versions;
                versions.writes().find(|&(written, _)| self.cell(written) == self.cell(id))
            });
            written.map_or(Version::BEFORE, |(_, version)| version)
        });
        stale.is_none()
    }

    /// Whether nobody between two places reads or writes the buffers in runs of some entries.
    pub(crate) fn untouched(
        &self,
        writes: &[BufferId],
        from: usize,
        to: usize,
        entries: GradientModes,
    ) -> bool {
        self.unchanged(writes, from, to, entries)
            && writes.iter().all(|&id| !self.between(self.readers(id), from, to, entries))
    }

    /// True if an instruction can run: what it stores lies over no load but an equal one, and what can fail writes no state.
    pub(crate) fn is_sound(&self, instruction: &Instruction) -> bool {
        let Some(nest) = instruction.flexible_nest() else { return true };
        let factors = instruction.factors();
        for (k, store) in nest.stores.iter().enumerate() {
            let cell = self.cell(store.buffer);
            let overlaps = |id: BufferId| self.cell(id) == cell;
            if written_by(nest).take(k).any(overlaps) || factors.iter().copied().any(overlaps) {
                return false;
            }
            for (slot, load) in nest.loads.iter().enumerate() {
                let Load::Buffer(from) = load else { continue };
                if overlaps(from.buffer) && (from != store || nest.is_gathered(slot)) {
                    return false;
                }
            }
        }
        !instruction.can_fail() || written_by(nest).all(|id| self.is_work(id))
    }

    /// The only instruction that writes a work buffer.
    pub(crate) fn maker(&self, id: BufferId) -> Option<usize> {
        let writers = self.writers(id);
        writers.only().filter(|_| self.is_work(id))
    }

    pub(crate) fn map_that_makes(&self, id: BufferId) -> Option<Nest> {
        self.map_with(id).map(|(map, result)| result_of(map, result))
    }

    /// The map that makes a buffer, and which of its results that is.
    pub(crate) fn map_with(&self, id: BufferId) -> Option<(&Nest, usize)> {
        let map = self.map(self.maker(id)?)?;
        Some((map, written_by(map).position(|written| written == id)?))
    }
}

/// The nodes of two instructions that became one. Where one of them can fail, messages name that one.
pub(crate) fn joined(first: &ScheduledInstruction, second: &ScheduledInstruction) -> Arc<str> {
    match (first.instruction.can_fail(), second.instruction.can_fail()) {
        (true, false) => return first.node.clone(),
        (false, true) => return second.node.clone(),
        _ if first.node == second.node => return first.node.clone(),
        _ => {}
    }
    if first.node.ends_with(MORE_NODES) {
        return first.node.clone();
    }
    node_names([&*first.node, &*second.node])
}

/// The nodes between [`NODES`]. To look for one character of that is faster than to look for all of it.
fn each_node(mut nodes: &str) -> SmallVec<[&str; MAX_NODES + 1]> {
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

/// The nodes of instructions that became one.
pub(crate) fn node_names<'a>(of: impl IntoIterator<Item = &'a str>) -> Arc<str> {
    let mut nodes: Vec<&str> = Vec::new();
    for node in of.into_iter().flat_map(each_node) {
        if nodes.len() <= MAX_NODES && !nodes.contains(&node) {
            nodes.push(node);
        }
    }
    if nodes.len() > MAX_NODES {
        nodes.truncate(MAX_NODES);
        nodes.push(MORE_NODES);
    }
    nodes.join(NODES).into()
}

/// The part of a map that makes one result.
pub(crate) fn result_of(map: &Nest, result: usize) -> Nest {
    let keep: Vec<bool> = (0..map.stores.len()).map(|k| k == result).collect();
    with_results(map, &keep).unwrap_or_else(|| map.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_told_apart() {
        for names in ["", "a", "a + b", "a+b + c", "+", " + ", "a +b + ", "a + + b", "a + b + c + …"] {
            assert_eq!(each_node(names).as_slice(), names.split(NODES).collect::<Vec<_>>());
        }
    }
}
