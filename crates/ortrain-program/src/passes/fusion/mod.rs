//! Fusion: element-wise maps merge with the producers of their operands, or with the consumers of their results.
//!
//! There are two rewrites. Each is applied if it lowers the weight of the program ([`weight`]) and does not raise the
//! peak of memory:
//!
//! - *append*: a map merges into the producer of its operand: into another map, into the epilogue of a product or a
//!   convolution, or into the reductions of a row;
//! - *inline*: consumers of a map's result compute it instead of loading it, in their own order of the space. A cheap
//!   map is inlined into all of its consumers, or into one that already loads the operands.
//!
//! Every sweep visits the instructions once, in order, so the result is deterministic.

mod recompute_filter;
#[cfg(test)]
mod tests;

use std::cell::{Cell, OnceCell};
use std::ops::{Deref, DerefMut};
use std::rc::Rc;
use std::sync::Arc;

use ortrain_expr::{DType, UnaryOp};
use rustc_hash::FxHashMap;
use smallvec::{SmallVec, smallvec};

use super::Changed;
use crate::buffer::{BufferIds, distinct};
use crate::draft::Draft;
use crate::editor::{Change, Editor, SLOTS_PER_INSTRUCTION, joined_node_name, single_result_map};
use crate::error::ProgramError;
use crate::operand::{loaded_buffers, only_moves_elements, single_result, stored_buffers};
use crate::rewrite::index_map::Embedding;
use crate::rewrite::inline_nest::{self, Link, append, inline};
use crate::target::{FusionWeights, Target};
use crate::versions::Versions;
use crate::weight::weight;
use crate::{BufferId, GradientModes, Instruction, Load, MatMul, Nest, ScheduledInstruction};

/// Maximum number of readers of an inlined result.
const MAX_READERS: usize = 8;

/// Maximum distance in slots for a short live range.
const MAX_CLOSE_DISTANCE: usize = 16;

/// Divisor for the tolerated increase of the peak. Small values, for example one per channel, must not prevent fusion.
const PEAK_TOLERANCE_DIVISOR: i64 = 64;

/// Returns true if axes of an instruction's nest may be split. The axes of products and convolutions are fixed.
fn may_split(instruction: &Instruction) -> bool {
    matches!(instruction, Instruction::Nest(_))
}

/// Merges chains of maps. Between close maps, live bytes are ignored.
pub(super) fn fuse_chains(draft: &mut Draft, target: &Target) -> Result<Changed, ProgramError> {
    let mut work = Fusion::new(draft, target);
    work.merge_chains();
    let (instructions, changes) = work.finish();
    draft.instructions = instructions;
    Ok(changes)
}

/// Merges maps with producers of operands or with consumers of results.
pub(super) fn run(draft: &mut Draft, target: &Target) -> Result<Changed, ProgramError> {
    let mut work = Fusion::new(draft, target);
    work.merge_all();
    let (instructions, changes) = work.finish();
    draft.instructions = instructions;
    Ok(changes)
}

/// Rewrite, with the weight that it saves.
struct Rewrite {
    gain: u64,
    /// Alternative changes, the best first. All have the same new instructions, in one order.
    changes: SmallVec<[Change; 2]>,
    /// Weights of the new instructions.
    weights: SmallVec<[u64; 2]>,
}

/// State of the fusion.
struct Fusion<'a> {
    editor: Editor<'a>,
    weights: FusionWeights,
    /// Cached weight of the instruction in each slot.
    weight_at: Vec<Cell<Option<u64>>>,
    lowest_peak: i64,
    /// Maps that compute buffers with a producer that is no longer a map.
    recipes: FxHashMap<BufferId, Recipe>,
    changes: usize,
}

impl<'a> Deref for Fusion<'a> {
    type Target = Editor<'a>;

    fn deref(&self) -> &Editor<'a> {
        &self.editor
    }
}

impl DerefMut for Fusion<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.editor
    }
}

/// Removed map that computes a buffer. Its single-result part is computed on demand, because few are used.
struct Recipe {
    map: Arc<Nest>,
    versions: Rc<Versions>,
    result: usize,
    single_result: OnceCell<Nest>,
}

impl<'a> Fusion<'a> {
    fn new(draft: &'a mut Draft, target: &Target) -> Fusion<'a> {
        let editor = Editor::new(draft);
        Fusion {
            weight_at: vec![Cell::new(None); editor.len()],
            editor,
            weights: target.weights,
            lowest_peak: i64::MAX,
            recipes: FxHashMap::default(),
            changes: 0,
        }
    }

    /// Returns the instructions and the number of changes.
    fn finish(self) -> (Vec<ScheduledInstruction>, Changed) {
        (self.editor.finish(), Changed(self.changes))
    }

    /// Merges chains of maps. Between close maps, live bytes are ignored.
    fn merge_chains(&mut self) {
        for at in 0..self.slots.len() {
            let Some(last) = self.last_chain_reader(at) else { continue };
            if let Some(new_change) = self.inline_into_readers(at) {
                if last - at > MAX_CLOSE_DISTANCE {
                    self.apply(new_change);
                } else if let Some(change) = new_change.changes.into_iter().next()
                    && self.apply_weighted_change(change, &new_change.weights).is_some()
                {
                    self.changes += 1;
                }
            }
        }
    }

    /// Merges maps with producers of operands or with consumers of results.
    fn merge_all(&mut self) {
        let count = self.slots.len();
        // First, maps that need sums of their own operands follow these sums, while the row is in the cache. Then each
        // map merges with a producer or with its consumers: the rewrite that saves more weight.
        for only_sums in [true, false] {
            for at in 0..count {
                self.place_map(at, only_sums);
            }
        }
        for at in 0..count {
            if let Some(new_change) = self.inline_into_readers(at) {
                self.apply(new_change);
            }
        }
        for at in 0..count {
            if let Some(new_change) = self.recompute_rewrite(at) {
                self.apply(new_change);
            }
        }
    }

    /// Applies a rewrite, unless it raises the peak of memory beyond the tolerance. Returns true if it was applied.
    fn apply(&mut self, rewrite: Rewrite) -> bool {
        let Rewrite { changes, weights, .. } = rewrite;
        changes.into_iter().any(|change| self.apply_within_peak(change, &weights))
    }

    fn apply_within_peak(&mut self, change: Change, weights: &[u64]) -> bool {
        self.lowest_peak = self.lowest_peak.min(self.peak());
        let Some(undo) = self.apply_weighted_change(change, weights) else { return false };
        if self.peak() > self.lowest_peak + self.lowest_peak / PEAK_TOLERANCE_DIVISOR {
            undo.iter().for_each(|(at, _)| self.weight_at[*at].set(None));
            self.revert_change(undo);
            return false;
        }
        self.changes += 1;
        // Instructions that have the operands of a merged map can still compute its result.
        for (_, old) in undo {
            let Some(ScheduledInstruction { instruction: Instruction::Nest(map), versions, .. }) = old else {
                continue;
            };
            if !map.is_map() {
                continue;
            }
            let versions = Rc::new(versions);
            for (result, id) in stored_buffers(&map).enumerate() {
                let is_computed = self.is_work(id) && !self.writers(id).is_empty();
                if is_computed && self.producing_map_and_result(id).is_none() {
                    let (map, versions) = (map.clone(), versions.clone());
                    self.recipes.insert(id, Recipe { map, versions, result, single_result: OnceCell::new() });
                }
            }
        }
        true
    }

    /// Applies a change with known weights, unless an instruction would read another version of a buffer than recorded.
    /// Returns the change that reverts it.
    fn apply_weighted_change(&mut self, change: Change, weights: &[u64]) -> Option<Change> {
        let new = change.iter().filter(|(_, new)| new.is_some()).map(|(at, _)| *at);
        let new: SmallVec<[(usize, u64); 2]> = new.zip(weights.iter().copied()).collect();
        let undo = self.apply_change_if_sound(change)?;
        undo.iter().for_each(|(at, _)| self.weight_at[*at].set(None));
        new.into_iter().for_each(|(at, weight)| self.weight_at[at].set(Some(weight)));
        Some(undo)
    }

    /// Returns the weight of an instruction over all of its gradient modes.
    fn weigh(&self, scheduled: &ScheduledInstruction) -> u64 {
        weight(&scheduled.instruction, self.buffers, &self.weights)
            .saturating_mul(scheduled.gradient_modes.count())
    }

    /// Returns a rewrite with the saved weight, if alternative changes save any. All alternatives save the same.
    fn rewrite_if_lighter(&self, changes: SmallVec<[Change; 2]>) -> Option<Rewrite> {
        let (mut before, mut weights) = (0u64, SmallVec::new());
        for (at, new) in changes.first()? {
            let known = &self.weight_at[*at];
            let old =
                known.get().unwrap_or_else(|| self.slots[*at].as_ref().map_or(0, |old| self.weigh(old)));
            known.set(Some(old));
            before = before.saturating_add(old);
            weights.extend(new.as_ref().map(|new| self.weigh(new)));
        }
        let gain = before.checked_sub(weights.iter().copied().fold(0, u64::saturating_add))?;
        (gain > 0).then_some(Rewrite { gain, changes, weights })
    }

    // --- Append ---------------------------------------------------------------------------------------------------

    /// Repeatedly appends the map at a position to producers of its operands (only to sums if `only_sums`). If inlining
    /// the map into its consumers saves more, the map is inlined instead.
    fn place_map(&mut self, at: usize, only_sums: bool) {
        while let Some(appended) = self.best_append(at, only_sums) {
            // After sums, a consuming map can follow instead.
            let another = only_sums && self.is_read_by_a_map(at);
            let before = self.inline_into_readers(at).filter(|before| another || before.gain > appended.gain);
            if before.is_some_and(|before| self.apply(before)) || !self.apply(appended) {
                return;
            }
        }
    }

    fn is_read_by_a_map(&self, at: usize) -> bool {
        let Some(value) = self.map_at(at).and_then(single_result) else { return false };
        self.readers(value).iter().any(|reader| self.map_at(reader).is_some())
    }

    /// Returns the best rewrite that appends the map at a position to a producer of an operand, only to sums if
    /// `only_sums`.
    fn best_append(&self, at: usize, only_sums: bool) -> Option<Rewrite> {
        let map = self.map_at(at)?;
        let mut makers = distinct(loaded_buffers(map).filter_map(|id| self.only_writer(id)));
        let needed = inline_nest::count_loads(map);
        makers.retain(|maker| {
            *maker < at
                && self.instruction_at(*maker).is_some_and(|instruction| {
                    (!only_sums || instruction.is_reduction())
                        && needed <= inline_nest::max_loads_after(instruction)
                })
        });
        let mut best: Option<Rewrite> = None;
        for maker in makers {
            let Some(change) = self.append_map_to(maker, at) else { continue };
            if best.as_ref().is_none_or(|best| change.gain > best.gain) {
                best = Some(change);
            }
        }
        best
    }

    /// Returns the rewrite that appends the map at a position to a host. If the map has fewer gradient modes than the
    /// host, every map that reads the host's result is appended.
    fn append_map_to(&self, maker: usize, at: usize) -> Option<Rewrite> {
        let (host, map) = (self.slots[maker].as_ref()?, self.slots[at].as_ref()?);
        if host.gradient_modes == map.gradient_modes {
            return self.append_maps_to(maker, &[at]);
        }
        // The maps that read the only result of the host have different modes: no run computes the host twice.
        let &[value] = host.instruction.writes().as_slice() else { return None };
        let readers = self.readers(value);
        if !self.is_work(value) || self.is_output(value) {
            return None;
        }
        let mut modes = GradientModes::NONE;
        for reader in readers.iter() {
            let entries = self.slots[reader].as_ref()?.gradient_modes;
            if reader < maker || !modes.and(entries).is_empty() {
                return None;
            }
            modes = modes.or(entries);
        }
        self.append_maps_to(maker, &readers.iter().collect::<SmallVec<[usize; 4]>>())
    }

    /// Returns the rewrite that appends maps to a host. The merged instruction is at the maps' positions if the host's
    /// results are not needed earlier. It is at the host's position if the maps' operands are available there. If both
    /// are possible, the alternative with less memory is first.
    fn append_maps_to(&self, maker: usize, followers: &[usize]) -> Option<Rewrite> {
        let host = self.slots[maker].as_ref()?;
        let nest = host.instruction.flexible_nest()?;
        let keeps = |id: BufferId| {
            let readers = self.readers(id);
            let read_elsewhere = readers.iter().any(|reader| !followers.contains(&reader));
            !self.is_work(id) || self.is_output(id) || read_elsewhere
        };
        let is_retained: Vec<bool> = stored_buffers(nest).map(keeps).collect();
        let retained_buffers: BufferIds = stored_buffers(nest)
            .zip(&is_retained)
            .filter(|&(_, &keeps_store)| keeps_store)
            .map(|(id, _)| id)
            .collect();
        if followers.len() > 1 && !retained_buffers.is_empty() || followers.len() > SLOTS_PER_INSTRUCTION {
            return None;
        }
        let host_reads = host.instruction.reads();
        let has_slot = maker.is_multiple_of(SLOTS_PER_INSTRUCTION) && self.slots[maker + 1].is_none();
        let (mut up, mut down) = (has_slot || followers.len() == 1, true);
        let mut merged = Vec::with_capacity(followers.len());
        for &at in followers {
            let (follower, map) = (self.slots[at].as_ref()?, self.map_at(at)?);
            let entries = follower.gradient_modes;
            let (written_buffers, others): (BufferIds, BufferIds) =
                loaded_buffers(map).partition(|&id| stored_buffers(nest).any(|written| written == id));
            // The results of the host are used from registers, so they must not change in between.
            let is_current = self.is_unchanged_between(&written_buffers, maker, at, entries);
            down &= is_current
                && self.is_unchanged_between(&host_reads, maker, at, entries)
                && self.is_unused_between(&retained_buffers, maker, at, entries);
            up &= is_current
                && self.is_unchanged_between(&others, maker, at, entries)
                && self.is_unused_between(&stored_buffers(map).collect::<BufferIds>(), maker, at, entries);
            if !down && !up {
                return None;
            }
            let instruction = space_links(&host.instruction, nest, map).into_iter().find_map(|link| {
                let merged = append(nest, map, link, &is_retained, may_split(&host.instruction))?;
                Some(host.instruction.with_nest(merged)).filter(|instruction| self.is_valid(instruction))
            })?;
            let entries = host.gradient_modes.and(entries);
            let versions =
                host.versions.merge_consumer(&follower.versions, entries)?.restrict_to(&instruction);
            let node = joined_node_name(host, follower);
            merged.push(ScheduledInstruction { instruction, gradient_modes: entries, node, versions });
        }
        let mut changes = SmallVec::new();
        if down {
            let follower_changes = followers.iter().copied().zip(merged.iter().cloned().map(Some));
            changes.push([(maker, None)].into_iter().chain(follower_changes).collect());
        }
        if up {
            let removed = followers.iter().map(|&at| (at, None));
            let maker_changes = (maker..).zip(merged.into_iter().map(Some));
            changes.push(removed.chain(maker_changes).collect());
        }
        if changes.len() > 1 && self.is_smaller_at_host(maker, followers) {
            changes.swap(0, 1);
        }
        self.rewrite_if_lighter(changes)
    }

    /// Returns true if moving the followers up to the host needs less memory than moving the host down.
    fn is_smaller_at_host(&self, maker: usize, followers: &[usize]) -> bool {
        let bytes = |ids: &mut dyn Iterator<Item = BufferId>, alive: &dyn Fn(BufferId) -> bool| {
            let alive = distinct(ids.filter(|&id| self.is_work(id))).into_iter().filter(|&id| alive(id));
            alive.fold(0usize, |sum, id| sum.saturating_add(self.buffers[id.0 as usize].bytes()))
        };
        let ends_by = |id: BufferId, at: usize| {
            !self.is_output(id) && self.readers(id).last().is_none_or(|last| last <= at)
        };
        let host = self.instruction_at(maker).map(Instruction::reads).unwrap_or_default();
        // Operands with their last use in the host would stay live.
        let down = bytes(&mut host.into_iter(), &|id| ends_by(id, maker));
        let (mut allocated, mut freed) = (0usize, 0usize);
        for map in followers.iter().filter_map(|&at| self.map_at(at)) {
            allocated = allocated.saturating_add(bytes(&mut stored_buffers(map), &|_| true));
            let last = followers.iter().copied().max().unwrap_or(maker);
            freed = freed.saturating_add(bytes(&mut loaded_buffers(map), &|id| {
                ends_by(id, last) && !self.writers(id).contains(maker)
            }));
        }
        allocated < down.saturating_add(freed)
    }

    // --- Inline ---------------------------------------------------------------------------------------------------

    /// Returns the last reader of the map's result, if only maps read it, at most one in each gradient mode.
    fn last_chain_reader(&self, at: usize) -> Option<usize> {
        let value = single_result(self.map_at(at)?)?;
        let readers = self.readers(value);
        let mut modes = GradientModes::NONE;
        for reader in readers.iter() {
            let scheduled = self.slots[reader].as_ref()?;
            if !modes.and(scheduled.gradient_modes).is_empty() || scheduled.instruction.as_map().is_none() {
                return None;
            }
            modes = modes.or(scheduled.gradient_modes);
        }
        readers.last().filter(|&last| last > at)
    }

    /// Returns the rewrite that inlines the map at a position into all readers of its result.
    fn inline_into_readers(&self, at: usize) -> Option<Rewrite> {
        let map = self.map_at(at)?;
        let value = single_result(map)?;
        let readers = self.readers(value);
        if self.only_writer(value) != Some(at)
            || self.is_output(value)
            || self.is_input(value)
            || readers.is_empty()
            || readers.len() > MAX_READERS
        {
            return None;
        }
        let operands: SmallVec<[BufferId; 8]> = loaded_buffers(map).collect();
        let mut change: Change = vec![(at, None)];
        for reader in readers.iter() {
            let scheduled = self.slots[reader].as_ref()?;
            if reader < at || !self.is_unchanged_between(&operands, at, reader, scheduled.gradient_modes) {
                return None;
            }
            let guest = self.slots[at].as_ref()?;
            let instruction = self.compute_instead_of_load(&scheduled.instruction, value, map)?;
            let versions = scheduled.versions.clone().merge_reads(&guest.versions)?;
            let unchanged = (instruction, versions);
            let (instruction, versions) =
                self.recompute_operands(reader, &unchanged, Some(value)).unwrap_or(unchanged);
            let joined =
                ScheduledInstruction { node: joined_node_name(guest, scheduled), ..scheduled.clone() };
            change.push((reader, Some(joined.with_instruction(instruction, &versions))));
        }
        self.rewrite_if_lighter(smallvec![change])
    }

    /// Returns an instruction that computes a value instead of loading it.
    fn compute_instead_of_load(
        &self,
        instruction: &Instruction,
        value: BufferId,
        map: &Nest,
    ) -> Option<Instruction> {
        let mut instruction = instruction.clone();
        if instruction.factor_buffers().contains(&value) {
            instruction = read_factor_through(instruction, value, map)?;
        }
        loop {
            let nest = instruction.flexible_nest()?;
            let reads_it = |load: &Load| load.operand().is_some_and(|from| from.buffer == value);
            let Some(slot) = nest.loads.iter().position(reads_it) else { break };
            let nest = inline(nest, slot, map, may_split(&instruction))?;
            instruction = instruction.with_nest(nest);
        }
        self.is_valid(&instruction).then_some(instruction)
    }

    /// Returns the map that computes a buffer, current or removed, and the versions that it reads.
    fn find_recipe(&self, id: BufferId) -> Option<(Nest, Versions)> {
        let versions = || Some(self.slots[self.only_writer(id)?].as_ref()?.versions.clone());
        let is_obsolete = || {
            let Recipe { map, versions, result, single_result: is_single_result } = self.recipes.get(&id)?;
            Some((
                is_single_result.get_or_init(|| single_result_map(map, *result)).clone(),
                (**versions).clone(),
            ))
        };
        self.producing_map(id).zip(versions()).or_else(is_obsolete)
    }

    /// Returns the instruction at a position after profitable recomputations from its other loads. `obsolete` is a buffer
    /// that loses its producer.
    fn recompute_operands(
        &self,
        at: usize,
        as_it_is: &(Instruction, Versions),
        obsolete: Option<BufferId>,
    ) -> Option<(Instruction, Versions)> {
        let entries = self.slots[at].as_ref()?.gradient_modes;
        if inline_nest::has_too_many_loads(as_it_is.0.flexible_nest()?) {
            return None;
        }
        let mut best: Option<(Instruction, Versions)> = None;
        let mut own_numbers = recompute_filter::ValueNumbers::new();
        let mut tried: SmallVec<[BufferId; 8]> = SmallVec::new();
        loop {
            let (instruction, versions) = best.as_ref().unwrap_or(as_it_is);
            let nest = instruction.flexible_nest()?;
            let next = loaded_buffers(nest).find(|id| !tried.contains(id));
            let Some(id) = next else { return best };
            tried.push(id);
            let Some(maker) = self.only_writer(id).filter(|&maker| maker < at) else { continue };
            let gone_by = || self.recipes.get(&id).map(|recipe| (&*recipe.map, recipe.result));
            let Some(producer) = self.producing_map_and_result(id).or_else(gone_by) else { continue };
            let machine = (self.buffers, &self.weights);
            if !instruction.factor_buffers().contains(&id)
                && recompute_filter::cannot_save_weight(instruction, &own_numbers, id, producer, machine)
            {
                continue;
            }
            let Some((map, recipe_versions)) = self.find_recipe(id) else { continue };
            let operands: SmallVec<[BufferId; 8]> = loaded_buffers(&map).collect();
            let is_available = |&id: &BufferId| {
                let is_defined = self.is_input(id) || !self.writers(id).is_empty();
                Some(id) != obsolete && (!self.is_work(id) || is_defined)
            };
            if !operands.iter().all(is_available)
                || !self.is_unchanged_between(&operands, maker, at, entries)
                || map.expr.can_fail()
            {
                continue;
            }
            let Some(lighter) = self.compute_instead_of_load(instruction, id, &map) else { continue };
            let recipe_versions = recipe_versions.restrict_to(&Instruction::from(map));
            if weight(&lighter, self.buffers, &self.weights)
                < weight(instruction, self.buffers, &self.weights)
                && let Some(versions) = versions.clone().merge_reads(&recipe_versions)
            {
                best = Some((lighter, versions));
                own_numbers = recompute_filter::ValueNumbers::new();
            }
        }
    }

    /// Returns the rewrite of the instruction at a position, if recomputation of some operands saves weight.
    fn recompute_rewrite(&self, at: usize) -> Option<Rewrite> {
        let scheduled = self.slots[at].as_ref()?;
        let as_it_is = (scheduled.instruction.clone(), scheduled.versions.clone());
        let (instruction, versions) = self.recompute_operands(at, &as_it_is, None)?;
        self.rewrite_if_lighter(smallvec![vec![(
            at,
            Some(scheduled.with_instruction(instruction, &versions))
        )]])
    }
}

/// Returns the buffers that can relate the space of a map to the space of a host. Results come first. For a map that
/// reads values that are constant along a row, buffers that both read follow.
fn space_links(instruction: &Instruction, host: &Nest, map: &Nest) -> Vec<Link> {
    let mut links = Vec::new();
    for (slot, id) in loaded_buffers(map).enumerate() {
        if let Some(result) = stored_buffers(host).position(|written| written == id) {
            links.push(Link::Result(result, slot));
        }
    }
    if instruction.is_reduction() {
        for (slot, id) in loaded_buffers(map).enumerate() {
            let shared = loaded_buffers(host).enumerate().filter(|&(_, host_slot)| host_slot == id);
            links.extend(shared.map(|(host_slot, _)| Link::Shared(host_slot, slot)));
        }
    }
    links
}

/// Returns a product that reads a factor through a map that only moves elements. If the map narrows the type, the
/// product rounds the factor.
fn read_factor_through(instruction: Instruction, value: BufferId, map: &Nest) -> Option<Instruction> {
    let Instruction::MatMul(mut product) = instruction else { return None };
    let [Load::Buffer(source)] = map.loads.as_slice() else { return None };
    if !only_moves_elements(map) {
        return None;
    }
    let spaces = product.spaces();
    let MatMul { a, b, rounded, .. } = Arc::make_mut(&mut product);
    for ((factor, rounded), dims) in [a, b].into_iter().zip(rounded).zip(spaces) {
        if factor.buffer != value {
            continue;
        }
        let (from, to) = (source.access.dtype, factor.access.dtype);
        if from != to {
            let narrows = from == DType::F32 && UnaryOp::rounding_to(to).is_some();
            *rounded = Some(to).filter(|_| narrows);
            (*rounded)?;
        }
        let embedding = Embedding::new(&dims, &factor.access, map, &map.stores[0].access, false)?;
        let access = embedding.access(&source.access);
        // Kernels pack rows or columns of adjacent elements.
        let adjacent = |axis: usize| dims[axis] == 1 || access.strides[axis] == 1;
        if !adjacent(dims.len() - 1) && !adjacent(dims.len() - 2) {
            return None;
        }
        *factor = source.with_access(access);
    }
    Some(Instruction::MatMul(product))
}
