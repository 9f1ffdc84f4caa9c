//! Fusion: element-wise maps become part of what makes their operands, or of what reads their results.
//!
//! Two rewrites are made, each where it makes the program lighter ([`cost::weight`]) and raises no peak of memory:
//!
//! - *append*: a map goes on where its operand was made: behind another map, in the epilogue of a product or a
//!   convolution, behind the reductions of a row;
//! - *inline*: whatever reads a map's result computes it instead of loading it, in its own order of the space. A cheap
//!   map is computed by several readers, if they all do it, or by one that has loaded the operands already.
//!
//! Every pass goes over the instructions once, in order, so the same program is always fused in the same way.

mod attention;
mod cells;
mod embed;
mod late_sums;
mod lighter;
mod lives;
mod order;
mod panels;
mod slopes;
mod splice;
#[cfg(test)]
mod tests;

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

use crate::builder::align;
use crate::cost::weight;
use crate::instruction::only_moves;
use crate::operand::{only_result, read_by, written_by};
use crate::versions::{Version, Versions};
use crate::{
    Buffer, BufferId, Entries, Instruction, Load, MatMul, Nest, Place, ScheduledInstruction, is_work,
};
pub(crate) use attention::fuse_attention;
pub(crate) use cells::number_cells;
use embed::Embedding;
pub(crate) use embed::{copy, finish};
pub(crate) use late_sums::sum_late;
use lives::Lives;
pub(crate) use order::{order, remove_unused};
pub(crate) use panels::lay_panels;
use splice::{Link, append, inline};
pub(crate) use splice::{is_injective, with_constants};

/// A result with more readers than this is stored.
const MOST_READERS: usize = 8;

/// Places between which nothing is alive for long.
const CLOSE: usize = 16;

/// Places for each instruction: one for each entry, where several come up to the place of one.
const PLACES: usize = 2;

/// The peak of memory may rise by one part in so many: what is kept for each channel is no reason to do without.
const TRIFLE: i64 = 64;

/// Between the nodes of an instruction that was made of several.
const NODES: &str = " + ";

/// More nodes are not named.
const MOST_NODES: usize = 4;
const MORE_NODES: &str = "…";

/// True if axes of an instruction's nest may be split: those of products are what the product says.
fn may_split(instruction: &Instruction) -> bool {
    matches!(instruction, Instruction::Nest(_))
}

/// Fuses instructions. What is kept in place of other values gets buffers of its own.
pub(crate) fn fuse(
    instructions: &mut Vec<ScheduledInstruction>,
    buffers: &mut Vec<Buffer>,
    inputs: &[BufferId],
    outputs: &[BufferId],
) {
    let mut work = Fusion::new(std::mem::take(instructions), buffers, inputs, outputs);
    work.join_chains();
    let slopes = work.slopes();
    let slots = if slopes.is_empty() {
        work.join_all()
    } else {
        let mut slots = work.slots;
        slopes::apart(slopes, &mut slots, buffers);
        Fusion::new(slots.into_iter().flatten().collect(), buffers, inputs, outputs).join_all()
    };
    instructions.extend(slots.into_iter().flatten());
}

/// The nodes of two instructions that became one. Where one of them can fail, messages name that one.
fn joined(first: &ScheduledInstruction, second: &ScheduledInstruction) -> Arc<str> {
    match (first.instruction.can_fail(), second.instruction.can_fail()) {
        (true, false) => return first.node.clone(),
        (false, true) => return second.node.clone(),
        _ => {}
    }
    let mut nodes: Vec<&str> = first.node.split(NODES).collect();
    for node in second.node.split(NODES) {
        if !nodes.contains(&node) {
            nodes.push(node);
        }
    }
    if nodes.len() > MOST_NODES {
        nodes.truncate(MOST_NODES);
        nodes.push(MORE_NODES);
    }
    nodes.join(NODES).into()
}

/// What stands at some places after a rewrite.
type Change = Vec<(usize, Option<ScheduledInstruction>)>;

/// A rewrite and by how much it makes the program lighter.
struct Rewrite {
    gain: u64,
    /// Ways to do it, the best first.
    changes: SmallVec<[Change; 2]>,
}

/// Instructions while they are fused, and who reads and writes what.
struct Fusion<'a> {
    slots: Vec<Option<ScheduledInstruction>>,
    buffers: &'a [Buffer],
    /// Buffers that share bytes are one cell.
    cells: Vec<usize>,
    is_input: Vec<bool>,
    is_output: Vec<bool>,
    readers: Vec<BTreeSet<usize>>,
    writers: Vec<BTreeSet<usize>>,
    lives: Lives,
    lowest_peak: i64,
    /// How a buffer can be made of others by a map, where what makes it is no map any more.
    recipes: FxHashMap<BufferId, Recipe>,
}

/// How a buffer was made by a map that is gone, found out when somebody asks: few do.
struct Recipe {
    map: Rc<Nest>,
    versions: Rc<Versions>,
    result: usize,
    alone: OnceCell<Nest>,
}

/// A number for each buffer; parts of a plane that overlap have the same.
pub(crate) fn cells(buffers: &[Buffer]) -> Vec<usize> {
    let mut cells: Vec<usize> = (0..buffers.len()).collect();
    let mut parts: Vec<(u32, usize, usize, usize)> = Vec::new();
    for (k, buffer) in buffers.iter().enumerate() {
        if let Place::Plane(plane, offset) = buffer.place {
            parts.push((plane.0, offset, offset + buffer.bytes(), k));
        }
    }
    parts.sort_unstable();
    let mut open: Option<(u32, usize, usize)> = None;
    for (plane, from, to, k) in parts {
        match &mut open {
            Some((known, end, cell)) if *known == plane && from < *end => {
                cells[k] = *cell;
                *end = to.max(*end);
            }
            _ => open = Some((plane, to, k)),
        }
    }
    cells
}

impl<'a> Fusion<'a> {
    fn new(
        instructions: Vec<ScheduledInstruction>,
        buffers: &'a [Buffer],
        inputs: &[BufferId],
        outputs: &[BufferId],
    ) -> Fusion<'a> {
        // Absurd sizes are refused when they are placed.
        let bytes = |buffer: &Buffer| buffer.len.saturating_mul(buffer.dtype.size()).min(1 << 48);
        let bytes = buffers.iter().map(|buffer| align(bytes(buffer))).collect();
        let mut work = Fusion {
            slots: instructions.iter().flat_map(|_| [const { None }; PLACES]).collect(),
            buffers,
            cells: cells(buffers),
            is_input: vec![false; buffers.len()],
            is_output: vec![false; buffers.len()],
            readers: vec![BTreeSet::new(); buffers.len()],
            writers: vec![BTreeSet::new(); buffers.len()],
            lives: Lives::new(PLACES * instructions.len(), bytes),
            lowest_peak: i64::MAX,
            recipes: FxHashMap::default(),
        };
        for input in inputs {
            work.is_input[input.0 as usize] = true;
        }
        for output in outputs {
            work.is_output[output.0 as usize] = true;
        }
        for (at, scheduled) in instructions.into_iter().enumerate() {
            work.put(PLACES * at, Some(scheduled));
        }
        work
    }

    fn instruction(&self, at: usize) -> Option<&Instruction> {
        self.slots[at].as_ref().map(|scheduled| &scheduled.instruction)
    }

    fn map(&self, at: usize) -> Option<&Nest> {
        self.instruction(at)?.as_map().filter(|map| map.segments.is_none())
    }

    fn cell(&self, id: BufferId) -> usize {
        self.cells[id.0 as usize]
    }

    fn is_work(&self, id: BufferId) -> bool {
        is_work(self.buffers, id)
    }

    /// Puts an instruction into its place and returns what stood there.
    fn put(&mut self, at: usize, new: Option<ScheduledInstruction>) -> Option<ScheduledInstruction> {
        let mut touched: SmallVec<[usize; 16]> = SmallVec::new();
        let old = self.slots[at].take();
        if let Some(old) = &old {
            for id in old.instruction.reads() {
                let cell = self.cell(id);
                self.readers[cell].remove(&at);
                touched.push(cell);
            }
            for id in old.instruction.writes() {
                let cell = self.cell(id);
                self.writers[cell].remove(&at);
                touched.push(cell);
            }
        }
        if let Some(new) = &new {
            for id in new.instruction.reads() {
                let cell = self.cell(id);
                self.readers[cell].insert(at);
                touched.push(cell);
            }
            for id in new.instruction.writes() {
                let cell = self.cell(id);
                self.writers[cell].insert(at);
                touched.push(cell);
            }
        }
        self.slots[at] = new;
        touched.sort_unstable();
        touched.dedup();
        for cell in touched {
            let id = BufferId(cell as u32);
            if !self.is_work(id) {
                continue;
            }
            let (readers, writers) = (&self.readers[cell], &self.writers[cell]);
            let first = if self.is_input[cell] { Some(0) } else { writers.first().copied() };
            let last = if self.is_output[cell] {
                Some(self.slots.len().saturating_sub(1))
            } else {
                readers.last().max(writers.last()).copied()
            };
            self.lives.set(cell, first.zip(last));
        }
        old
    }

    /// Chains of maps become one. What is alive between close ones is no reason not to.
    fn join_chains(&mut self) {
        for at in 0..self.slots.len() {
            let Some(last) = self.end_of_chain(at) else { continue };
            if let Some(found) = self.inlined(at) {
                if last - at > CLOSE {
                    self.apply(found);
                } else if let Some(change) = found.changes.into_iter().next() {
                    self.put_sound(change);
                }
            }
        }
    }

    /// A map goes to where an operand is made, or to where its result is read.
    fn join_all(mut self) -> Vec<Option<ScheduledInstruction>> {
        let count = self.slots.len();
        // A map that needs the sums of its own operands follows them, while the row is in the cache. Then each goes to where
        // an operand is made, or to where its result is read, whichever is lighter.
        for only_sums in [true, false] {
            for at in 0..count {
                self.place(at, only_sums);
            }
        }
        for at in 0..count {
            if let Some(found) = self.inlined(at) {
                self.apply(found);
            }
        }
        for at in 0..count {
            if let Some(found) = self.recomputing(at) {
                self.apply(found);
            }
        }
        self.slots
    }

    /// Makes a rewrite, unless it raises the peak of memory by more than a trifle.
    fn apply(&mut self, rewrite: Rewrite) -> bool {
        rewrite.changes.into_iter().any(|change| self.make(change))
    }

    /// Puts all instructions of a change into their places and returns what stood there.
    fn put_all(&mut self, change: Change) -> Change {
        change.into_iter().map(|(at, new)| (at, self.put(at, new))).collect()
    }

    /// The same, unless one of them would read another version of a buffer than it was given.
    fn put_sound(&mut self, change: Change) -> Option<Change> {
        let undo = self.put_all(change);
        if undo.iter().all(|&(at, _)| self.reads_its_versions(at)) {
            return Some(undo);
        }
        self.take_back(undo);
        None
    }

    fn take_back(&mut self, undo: Change) {
        for (at, old) in undo.into_iter().rev() {
            self.put(at, old);
        }
    }

    fn make(&mut self, change: Change) -> bool {
        self.lowest_peak = self.lowest_peak.min(self.lives.peak());
        let Some(undo) = self.put_sound(change) else { return false };
        if self.lives.peak() > self.lowest_peak + self.lowest_peak / TRIFLE {
            self.take_back(undo);
            return false;
        }
        // A map that went behind something else can still be computed by who has its operands.
        for (_, old) in undo {
            let Some(ScheduledInstruction { instruction: Instruction::Nest(map), versions, .. }) = old else {
                continue;
            };
            if !map.is_map() {
                continue;
            }
            let (map, versions) = (Rc::new(map), Rc::new(versions));
            for (result, id) in written_by(&map).enumerate() {
                let is_made = self.is_work(id) && !self.writers[self.cell(id)].is_empty();
                if is_made && self.map_with(id).is_none() {
                    let (map, versions) = (map.clone(), versions.clone());
                    self.recipes.insert(id, Recipe { map, versions, result, alone: OnceCell::new() });
                }
            }
        }
        true
    }

    /// By how much changes, any one of which will do, make the program lighter, if they do.
    fn gain(&self, changes: SmallVec<[Change; 2]>) -> Option<Rewrite> {
        let weigh = |scheduled: &ScheduledInstruction| {
            weight(&scheduled.instruction, self.buffers).saturating_mul(scheduled.entries.count())
        };
        let (mut before, mut after) = (0u64, 0u64);
        for (at, new) in changes.first()? {
            before = before.saturating_add(self.slots[*at].as_ref().map_or(0, weigh));
            after = after.saturating_add(new.as_ref().map_or(0, weigh));
        }
        let gain = before.checked_sub(after).filter(|&gain| gain > 0)?;
        Some(Rewrite { gain, changes })
    }

    /// Whether instructions of some entries between two places are among these.
    fn between(&self, set: &BTreeSet<usize>, from: usize, to: usize, entries: Entries) -> bool {
        let runs = |at: &usize| {
            let scheduled = self.slots[*at].as_ref();
            scheduled.is_some_and(|scheduled| !scheduled.entries.and(entries).is_empty())
        };
        from + 1 < to && set.range(from + 1..to).any(runs)
    }

    /// Whether buffers hold the same at both places in runs of some entries.
    fn unchanged(&self, reads: &[BufferId], from: usize, to: usize, entries: Entries) -> bool {
        reads.iter().all(|&id| !self.between(&self.writers[self.cell(id)], from, to, entries))
    }

    /// Whether the buffers that the instruction at a place reads hold the versions that it was given.
    fn reads_its_versions(&self, at: usize) -> bool {
        let Some(scheduled) = &self.slots[at] else { return true };
        scheduled.versions.hold(scheduled.entries, |id, entry| {
            let runs = |&before: &&usize| {
                self.slots[*before].as_ref().is_some_and(|before| before.entries.contains(entry))
            };
            let writer = self.writers[self.cell(id)].range(..at).rev().find(runs);
            let written = writer.and_then(|&writer| {
                let versions = &self.slots[writer].as_ref()?.versions;
                versions.writes().find(|&(written, _)| self.cell(written) == self.cell(id))
            });
            written.map_or(Version::BEFORE, |(_, version)| version)
        })
    }

    /// Whether nobody between two places reads or writes the buffers in runs of some entries.
    fn untouched(&self, writes: &[BufferId], from: usize, to: usize, entries: Entries) -> bool {
        self.unchanged(writes, from, to, entries)
            && writes.iter().all(|&id| !self.between(&self.readers[self.cell(id)], from, to, entries))
    }

    /// True if an instruction can run: what it stores lies over no load but an equal one, and what can fail writes no state.
    fn is_sound(&self, instruction: &Instruction) -> bool {
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
    fn maker(&self, id: BufferId) -> Option<usize> {
        let writers = &self.writers[self.cell(id)];
        (self.is_work(id) && writers.len() == 1).then(|| writers.first().copied()).flatten()
    }

    // --- Append ---------------------------------------------------------------------------------------------------

    /// Lets the map at a place follow what makes its operands (sums alone, or anything) as long as there is something,
    /// unless it is lighter to have it computed by what reads its result.
    fn place(&mut self, at: usize, only_sums: bool) {
        while let Some(behind) = self.appended(at, only_sums) {
            // Behind sums, a map that reads the result can follow instead.
            let another = only_sums && self.is_read_by_a_map(at);
            let before = self.inlined(at).filter(|before| another || before.gain > behind.gain);
            if before.is_some_and(|before| self.apply(before)) || !self.apply(behind) {
                return;
            }
        }
    }

    fn is_read_by_a_map(&self, at: usize) -> bool {
        let Some(value) = self.map(at).and_then(only_result) else { return false };
        self.readers[self.cell(value)].iter().any(|&reader| self.map(reader).is_some())
    }

    /// The best way to let the map at a place follow what makes one of its operands: sums alone, or anything.
    fn appended(&self, at: usize, only_sums: bool) -> Option<Rewrite> {
        let map = self.map(at)?;
        let mut makers: SmallVec<[usize; 8]> = read_by(map).filter_map(|id| self.maker(id)).collect();
        makers.sort_unstable();
        makers.dedup();
        let needed = splice::least_loads(map);
        makers.retain(|maker| {
            *maker < at
                && self.instruction(*maker).is_some_and(|instruction| {
                    (!only_sums || instruction.is_reduction())
                        && needed <= splice::most_loads_behind(instruction)
                })
        });
        let mut best: Option<Rewrite> = None;
        for maker in makers {
            let Some(found) = self.append_to(maker, at) else { continue };
            if best.as_ref().is_none_or(|best| found.gain > best.gain) {
                best = Some(found);
            }
        }
        best
    }

    /// The map at a place (or, if it is of fewer entries than its operand, every map that reads it) behind a host.
    fn append_to(&self, maker: usize, at: usize) -> Option<Rewrite> {
        let (host, map) = (self.slots[maker].as_ref()?, self.slots[at].as_ref()?);
        if host.entries == map.entries {
            return self.append_all(maker, &[at]);
        }
        // A host whose only result is read by maps of different entries: no run makes it twice.
        let &[value] = host.instruction.writes().as_slice() else { return None };
        let readers = &self.readers[self.cell(value)];
        if !self.is_work(value) || self.is_output[self.cell(value)] {
            return None;
        }
        let mut seen = Entries::NONE;
        for &reader in readers {
            let entries = self.slots[reader].as_ref()?.entries;
            if reader < maker || !seen.and(entries).is_empty() {
                return None;
            }
            seen = seen.or(entries);
        }
        self.append_all(maker, &readers.iter().copied().collect::<Vec<_>>())
    }

    /// Maps behind a host. They stand where they stood, if the host's results are not needed before, or where the host
    /// stood, if their operands are there by then; where less memory is needed in between, if both will do.
    fn append_all(&self, maker: usize, followers: &[usize]) -> Option<Rewrite> {
        let host = self.slots[maker].as_ref()?;
        let nest = host.instruction.flexible_nest()?;
        let keeps = |id: BufferId| {
            let readers = &self.readers[self.cell(id)];
            let read_elsewhere = readers.iter().any(|reader| !followers.contains(reader));
            !self.is_work(id) || self.is_output[self.cell(id)] || read_elsewhere
        };
        let keep: Vec<bool> = written_by(nest).map(keeps).collect();
        let kept: Vec<BufferId> = written_by(nest).filter(|&id| keeps(id)).collect();
        if followers.len() > 1 && !kept.is_empty() || followers.len() > PLACES {
            return None;
        }
        let host_reads = host.instruction.reads();
        let room = maker.is_multiple_of(PLACES) && self.slots[maker + 1].is_none();
        let (mut up, mut down) = (room || followers.len() == 1, true);
        let mut merged = Vec::with_capacity(followers.len());
        for &at in followers {
            let (follower, map) = (self.slots[at].as_ref()?, self.map(at)?);
            let entries = follower.entries;
            let (made, others): (Vec<BufferId>, Vec<BufferId>) =
                read_by(map).partition(|&id| written_by(nest).any(|written| written == id));
            // What the host makes is taken from where it is made: nothing may have changed it on the way.
            let as_made = self.unchanged(&made, maker, at, entries);
            down &= as_made
                && self.unchanged(&host_reads, maker, at, entries)
                && self.untouched(&kept, maker, at, entries);
            up &= as_made
                && self.unchanged(&others, maker, at, entries)
                && self.untouched(&written_by(map).collect::<Vec<_>>(), maker, at, entries);
            if !down && !up {
                return None;
            }
            let instruction = links(&host.instruction, nest, map).into_iter().find_map(|link| {
                let merged = append(nest, map, link, &keep, may_split(&host.instruction))?;
                Some(host.instruction.with_nest(merged)).filter(|instruction| self.is_sound(instruction))
            })?;
            let entries = host.entries.and(entries);
            let versions =
                host.versions.followed_by(&follower.versions, entries)?.of_instruction(&instruction);
            merged.push(ScheduledInstruction {
                instruction,
                entries,
                node: joined(host, follower),
                versions,
            });
        }
        let mut changes = SmallVec::new();
        if down {
            let there = followers.iter().copied().zip(merged.iter().cloned().map(Some));
            changes.push([(maker, None)].into_iter().chain(there).collect());
        }
        if up {
            let gone = followers.iter().map(|&at| (at, None));
            let here = (maker..).zip(merged.into_iter().map(Some));
            changes.push(gone.chain(here).collect());
        }
        if changes.len() > 1 && self.is_smaller_above(maker, followers) {
            changes.swap(0, 1);
        }
        self.gain(changes)
    }

    /// Whether less memory is needed between a host and its followers if they come up than if the host goes down.
    fn is_smaller_above(&self, maker: usize, followers: &[usize]) -> bool {
        let bytes = |ids: &mut dyn Iterator<Item = BufferId>, alive: &dyn Fn(usize) -> bool| {
            let mut ids: Vec<BufferId> = ids.filter(|&id| self.is_work(id)).collect();
            ids.sort_unstable();
            ids.dedup();
            let alive = ids.into_iter().filter(|&id| alive(self.cell(id)));
            alive.fold(0usize, |sum, id| sum.saturating_add(self.buffers[id.0 as usize].bytes()))
        };
        let ends_by = |cell: usize, at: usize| {
            !self.is_output[cell] && self.readers[cell].last().is_none_or(|&last| last <= at)
        };
        let host = self.instruction(maker).map(Instruction::reads).unwrap_or_default();
        // What the host reads last would have to wait for it.
        let down = bytes(&mut host.into_iter(), &|cell| ends_by(cell, maker));
        let (mut made, mut freed) = (0usize, 0usize);
        for map in followers.iter().filter_map(|&at| self.map(at)) {
            made = made.saturating_add(bytes(&mut written_by(map), &|_| true));
            let last = followers.iter().copied().max().unwrap_or(maker);
            freed = freed.saturating_add(bytes(&mut read_by(map), &|cell| {
                ends_by(cell, last) && !self.writers[cell].contains(&maker)
            }));
        }
        made < down.saturating_add(freed)
    }

    // --- Inline ---------------------------------------------------------------------------------------------------

    /// The last reader of the result of the map at a place, if maps alone read it, of which no entry runs two.
    fn end_of_chain(&self, at: usize) -> Option<usize> {
        let value = only_result(self.map(at)?)?;
        let readers = &self.readers[self.cell(value)];
        let mut seen = Entries::NONE;
        for &reader in readers {
            let scheduled = self.slots[reader].as_ref()?;
            if !seen.and(scheduled.entries).is_empty() || scheduled.instruction.as_map().is_none() {
                return None;
            }
            seen = seen.or(scheduled.entries);
        }
        readers.last().copied().filter(|&last| last > at)
    }

    /// The map at a place computed by everyone who reads its result.
    fn inlined(&self, at: usize) -> Option<Rewrite> {
        let map = self.map(at)?;
        let value = only_result(map)?;
        let cell = self.cell(value);
        let readers = &self.readers[cell];
        if self.maker(value) != Some(at)
            || self.is_output[cell]
            || self.is_input[cell]
            || readers.is_empty()
            || readers.len() > MOST_READERS
        {
            return None;
        }
        let operands: SmallVec<[BufferId; 8]> = read_by(map).collect();
        let mut change: Change = vec![(at, None)];
        for &reader in readers {
            let scheduled = self.slots[reader].as_ref()?;
            if reader < at || !self.unchanged(&operands, at, reader, scheduled.entries) {
                return None;
            }
            let guest = self.slots[at].as_ref()?;
            let instruction = self.without_load(&scheduled.instruction, value, map)?;
            let versions = scheduled.versions.clone().reading_also(&guest.versions)?;
            let unchanged = (instruction, versions);
            let (instruction, versions) =
                self.recomputed(reader, &unchanged, Some(value)).unwrap_or(unchanged);
            let (node, versions) = (joined(guest, scheduled), versions.of_instruction(&instruction));
            change.push((
                reader,
                Some(ScheduledInstruction { instruction, node, versions, ..scheduled.clone() }),
            ));
        }
        self.gain(smallvec![change])
    }

    /// An instruction that computes a value instead of reading it.
    fn without_load(&self, instruction: &Instruction, value: BufferId, map: &Nest) -> Option<Instruction> {
        let mut instruction = instruction.clone();
        if instruction.factors().contains(&value) {
            instruction = reading_through(instruction, value, map)?;
        }
        loop {
            let nest = instruction.flexible_nest()?;
            let reads_it = |load: &Load| load.operand().is_some_and(|from| from.buffer == value);
            let Some(slot) = nest.loads.iter().position(reads_it) else { break };
            let nest = inline(nest, slot, map, may_split(&instruction))?;
            instruction = instruction.with_nest(nest);
        }
        self.is_sound(&instruction).then_some(instruction)
    }

    /// The map that makes a buffer of others, as it stands or as it was, and which versions it reads.
    fn recipe(&self, id: BufferId) -> Option<(Nest, Versions)> {
        let versions = || Some(self.slots[self.maker(id)?].as_ref()?.versions.clone());
        let gone = || {
            let Recipe { map, versions, result, alone } = self.recipes.get(&id)?;
            Some((alone.get_or_init(|| result_of(map, *result)).clone(), (**versions).clone()))
        };
        self.map_that_makes(id).zip(versions()).or_else(gone)
    }

    fn map_that_makes(&self, id: BufferId) -> Option<Nest> {
        self.map_with(id).map(|(map, result)| result_of(map, result))
    }

    /// The map that makes a buffer, and which of its results that is.
    fn map_with(&self, id: BufferId) -> Option<(&Nest, usize)> {
        let map = self.map(self.maker(id)?)?;
        Some((map, written_by(map).position(|written| written == id)?))
    }

    /// The instruction at a place after it has computed again what it can compute of what it loads anyway. Nobody will make
    /// `gone` any more.
    fn recomputed(
        &self,
        at: usize,
        as_it_is: &(Instruction, Versions),
        gone: Option<BufferId>,
    ) -> Option<(Instruction, Versions)> {
        let entries = self.slots[at].as_ref()?.entries;
        let mut best: Option<(Instruction, Versions)> = None;
        let mut known: Option<lighter::Known> = None;
        let mut tried: SmallVec<[BufferId; 8]> = SmallVec::new();
        loop {
            let (instruction, versions) = best.as_ref().unwrap_or(as_it_is);
            let nest = instruction.flexible_nest()?;
            let next = read_by(nest).find(|id| !tried.contains(id));
            let Some(id) = next else { return best };
            tried.push(id);
            let Some(maker) = self.maker(id).filter(|&maker| maker < at) else { continue };
            let gone_by = || self.recipes.get(&id).map(|recipe| (&*recipe.map, recipe.result));
            let Some(made_by) = self.map_with(id).or_else(gone_by) else { continue };
            let own = known.get_or_insert_with(|| lighter::Known::of(nest));
            if !instruction.factors().contains(&id)
                && own.is_no_lighter(instruction, id, made_by, self.buffers)
            {
                continue;
            }
            let Some((map, given)) = self.recipe(id) else { continue };
            let operands: SmallVec<[BufferId; 8]> = read_by(&map).collect();
            let there = |&id: &BufferId| {
                let is_made = self.is_input[self.cell(id)] || !self.writers[self.cell(id)].is_empty();
                Some(id) != gone && (!self.is_work(id) || is_made)
            };
            if !operands.iter().all(there)
                || !self.unchanged(&operands, maker, at, entries)
                || map.expr.can_fail()
            {
                continue;
            }
            let Some(lighter) = self.without_load(instruction, id, &map) else { continue };
            let given = given.of_instruction(&Instruction::Nest(map));
            if weight(&lighter, self.buffers) < weight(instruction, self.buffers)
                && let Some(versions) = versions.clone().reading_also(&given)
            {
                (best, known) = (Some((lighter, versions)), None);
            }
        }
    }

    /// The instruction at a place, if computing some of its operands again makes it lighter.
    fn recomputing(&self, at: usize) -> Option<Rewrite> {
        let scheduled = self.slots[at].as_ref()?;
        let as_it_is = (scheduled.instruction.clone(), scheduled.versions.clone());
        let (instruction, versions) = self.recomputed(at, &as_it_is, None)?;
        let versions = versions.of_instruction(&instruction);
        self.gain(smallvec![vec![(
            at,
            Some(ScheduledInstruction { instruction, versions, ..scheduled.clone() })
        )]])
    }
}

/// The part of a map that makes one result.
fn result_of(map: &Nest, result: usize) -> Nest {
    let keep: Vec<bool> = (0..map.stores.len()).map(|k| k == result).collect();
    splice::with_results(map, &keep).unwrap_or_else(|| map.clone())
}

/// The buffers by which the space of a map may be compared with that of an instruction: results first; then, for a map that
/// reads what is the same along a row, what both read.
fn links(instruction: &Instruction, host: &Nest, map: &Nest) -> Vec<Link> {
    let mut links = Vec::new();
    for (slot, id) in read_by(map).enumerate() {
        if let Some(result) = written_by(host).position(|written| written == id) {
            links.push(Link::Result(result, slot));
        }
    }
    if instruction.is_reduction() {
        for (slot, id) in read_by(map).enumerate() {
            let shared = read_by(host).enumerate().filter(|&(_, own)| own == id);
            links.extend(shared.map(|(own, _)| Link::Shared(own, slot)));
        }
    }
    links
}

/// A product that reads a factor through a map that does nothing but move elements.
fn reading_through(instruction: Instruction, value: BufferId, map: &Nest) -> Option<Instruction> {
    let Instruction::MatMul(mut product) = instruction else { return None };
    let [Load::Buffer(source)] = map.loads.as_slice() else { return None };
    if !only_moves(map) {
        return None;
    }
    let spaces = product.spaces();
    let MatMul { a, b, .. } = &mut *product;
    for (factor, dims) in [a, b].into_iter().zip(spaces) {
        if factor.buffer != value {
            continue;
        }
        if source.access.dtype != factor.access.dtype {
            return None;
        }
        let embedding = Embedding::new(&dims, &factor.access, map, &map.stores[0].access, false)?;
        let moved = embedding.access(&source.access);
        // Kernels pack lines of adjacent elements.
        let adjacent = |axis: usize| dims[axis] == 1 || moved.strides[axis] == 1;
        if !adjacent(dims.len() - 1) && !adjacent(dims.len() - 2) {
            return None;
        }
        *factor = source.with_access(moved);
    }
    Some(Instruction::MatMul(product))
}
