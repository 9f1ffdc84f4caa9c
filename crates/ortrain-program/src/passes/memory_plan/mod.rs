//! Memory plan: assigns an offset in the arena to every work buffer, before any allocation.

mod first_fit;

use std::cmp::Reverse;

use first_fit::{Block, place_blocks};
use ortrain_expr::Access;

use super::{Changed, Draft, Outcome, Target};
use crate::align;
use crate::error::ProgramError;
use crate::liveness::{LiveRange, Liveness, live_bytes};
use crate::operand::{loaded_buffers, stored_buffers};
use crate::{BufferId, BufferLocation, Nest, Operand, is_work};

pub(super) fn run(draft: &mut Draft, _: &Target) -> Outcome {
    plan(draft)?;
    Ok(Changed(
        draft.buffers.iter().filter(|buffer| matches!(buffer.location, BufferLocation::Work(_))).count(),
    ))
}

/// Returns the size of the arena that a draft needs.
pub(super) fn arena_size(draft: &Draft) -> Result<usize, ProgramError> {
    Ok(pack_program(draft)?.total)
}

/// Offsets of blocks, and the sharing of bytes between buffers.
struct PackedBlocks {
    /// For each buffer the first buffer that shares its bytes.
    group: Vec<usize>,
    blocks: Vec<Block>,
    offsets: Vec<usize>,
    total: usize,
}

/// Assigns every work buffer its offset, and the draft the size of its arena.
///
/// Buffers with overlapping live ranges never share bytes, unless an instruction may overwrite its operand at the
/// operand's last use. The blocks are packed in several orders. The order with the smallest arena is chosen, the first
/// one of equals. If the arena exceeds the peak of live bytes, variations of the best order are tried.
pub(super) fn plan(draft: &mut Draft) -> Result<(), ProgramError> {
    let PackedBlocks { group, blocks, offsets, total } = pack_program(draft)?;
    let Draft { buffers, work_bytes, .. } = draft;
    *work_bytes = total;
    for (block, offset) in blocks.iter().zip(offsets) {
        buffers[block.buffer].location = BufferLocation::Work(offset);
    }
    for k in 0..buffers.len() {
        if group[k] != k {
            buffers[k].location = buffers[group[k]].location;
        }
    }
    Ok(())
}

/// Packs the blocks of a program.
fn pack_program(draft: &Draft) -> Result<PackedBlocks, ProgramError> {
    let Draft { instructions, buffers, .. } = draft;
    let (group, liveness) = reuse_operand_bytes(draft);
    let mut blocks = Vec::new();
    for k in (0..buffers.len()).filter(|&k| group[k] == k && is_work(buffers, BufferId(k as u32))) {
        let Some(life) = liveness.live_range(k) else { continue };
        let size = buffers[k].bytes().max(1).checked_next_multiple_of(align(1));
        let size = size.filter(|&size| isize::try_from(size).is_ok());
        let size = size.ok_or_else(|| ProgramError::TooLarge { label: buffers[k].label.to_string() })?;
        blocks.push(Block { buffer: k, size, life });
    }
    let Some((offsets, total)) = pack_blocks(&blocks, instructions.len()) else {
        let largest = blocks.iter().max_by_key(|block| block.size).map_or(0, |block| block.buffer);
        return Err(ProgramError::TooLarge { label: buffers[largest].label.to_string() });
    };
    Ok(PackedBlocks { group, blocks, offsets, total })
}

/// Returns the instruction at the peak of live bytes.
pub(super) fn peak_position(draft: &Draft) -> Option<usize> {
    let Draft { instructions, buffers, .. } = draft;
    let (group, liveness) = reuse_operand_bytes(draft);
    let is_block = |&(k, _): &(usize, LiveRange)| group[k] == k && is_work(buffers, BufferId(k as u32));
    let blocks = liveness.iter().filter(is_block).map(|(k, life)| (life, buffers[k].bytes() as i128));
    let alive = live_bytes(instructions.len(), blocks);
    // Item 0 counts the bytes before the first instruction.
    (0..instructions.len()).max_by_key(|&at| (alive[at + 1], Reverse(at)))
}

/// Lets results reuse the bytes of operands at their last use. Returns for each buffer the first buffer that shares its
/// bytes, and the live ranges. The live range of the first buffer covers all sharers.
pub(super) fn reuse_operand_bytes(draft: &Draft) -> (Vec<usize>, Liveness) {
    let Draft { instructions, buffers, .. } = draft;
    let mut liveness = draft.liveness();
    let mut group: Vec<usize> = (0..buffers.len()).collect();
    for (index, scheduled) in instructions.iter().enumerate() {
        let Some(nest) = scheduled.instruction.flexible_nest() else { continue };
        let factors = scheduled.instruction.factor_buffers();
        let mut used: Vec<usize> = Vec::new();
        for &Operand { buffer: to, access: ref store } in &nest.stores {
            let target = to.0 as usize;
            let fresh = liveness.live_range(target).is_some_and(|life| life.first == index as isize)
                && group[target] == target;
            if !fresh || !is_work(buffers, to) {
                continue;
            }
            let reusable = nest.load_operands().find(|&load| {
                let from = load.buffer;
                let source = from.0 as usize;
                let root = group[source];
                let mut others = loaded_buffers(nest).chain(factors.iter().copied());
                is_work(buffers, from)
                    && reach_same_bytes(&load.access, store, &nest.dims)
                    && buffers[source].bytes() == buffers[target].bytes()
                    && liveness.live_range(root).is_some_and(|life| life.last == index as isize)
                    && !used.contains(&root)
                    && !stored_buffers(nest).any(|other| group[other.0 as usize] == root)
                    && !factors.contains(&from)
                    && !others.any(|other| other != from && group[other.0 as usize] == root)
                    && !has_other_reads(nest, load)
            });
            if let Some(from) = reusable {
                let root = group[from.buffer.0 as usize];
                group[target] = root;
                used.push(root);
                liveness.live_range(target).into_iter().for_each(|life| liveness.extend_to(root, life.last));
            }
        }
    }
    (group, liveness)
}

/// Returns true if a load and a store reach the same bytes at every point.
fn reach_same_bytes(load: &Access, store: &Access, dims: &[usize]) -> bool {
    let strides = dims.iter().zip(load.strides.iter().zip(&store.strides));
    load.offset == store.offset
        && load.dtype.size() == store.dtype.size()
        && strides.into_iter().all(|(&dim, (from, to))| dim == 1 || from == to)
}

/// Returns true if a nest reads a buffer through another access than `load`, so that overwriting it would change
/// results.
fn has_other_reads(nest: &Nest, load: &Operand) -> bool {
    nest.loads.iter().enumerate().any(|(slot, other)| {
        other
            .operand()
            .is_some_and(|other| other.buffer == load.buffer && (other != load || nest.is_gathered(slot)))
    })
}

/// Maximum number of blocks for which several orders are tried.
const MAX_BLOCKS_FOR_ALL_ORDERS: usize = 4096;
/// Number of variations of the best order.
const ORDER_VARIATIONS: usize = 24;

/// Returns an offset for each block, and the size of the arena. Returns `None` if the size exceeds the address space.
fn pack_blocks(blocks: &[Block], instructions: usize) -> Option<(Vec<usize>, usize)> {
    let length = |k: &usize| blocks[*k].life.last - blocks[*k].life.first + 1;
    let key = |order: usize, k: &usize| -> (Reverse<u128>, isize) {
        let (size, life) = (blocks[*k].size as u128, blocks[*k].life);
        match order {
            0 => (Reverse(size), 0),
            1 => (Reverse(size * length(k) as u128), 0),
            2 => (Reverse(length(k) as u128), life.first),
            _ => (Reverse(0), life.first),
        }
    };
    let bound = peak_live_bytes(blocks, instructions);
    let mut best: Option<(Vec<usize>, usize)> = None;
    let mut order: Vec<usize> = Vec::new();
    for which in 0..if blocks.len() > MAX_BLOCKS_FOR_ALL_ORDERS { 1 } else { 4 } {
        let mut indices: Vec<usize> = (0..blocks.len()).collect();
        indices.sort_by_key(|k| (key(which, k), Reverse(blocks[*k].size), *k));
        let Some(placement) = place_blocks(blocks, &indices) else { continue };
        if best.as_ref().is_none_or(|best| placement.1 < best.1) {
            (best, order) = (Some(placement), indices);
        }
        if best.as_ref().is_some_and(|best| best.1 as u128 <= bound) {
            return best;
        }
    }
    let mut latest = best.clone()?;
    for _ in 0..if blocks.len() > MAX_BLOCKS_FOR_ALL_ORDERS { 0 } else { ORDER_VARIATIONS } {
        // The block with the highest end is placed first in the next variation.
        let ends = |&k: &usize| latest.0[k] + blocks[k].size == latest.1;
        let Some(last) = order.iter().rposition(ends) else { break };
        order[..=last].rotate_right(1);
        // An order that exceeds the address space does not invalidate the other orders.
        let Some(placement) = place_blocks(blocks, &order) else { break };
        latest = placement;
        if best.as_ref().is_none_or(|best| latest.1 < best.1) {
            best = Some(latest.clone());
        }
        if latest.1 as u128 <= bound {
            break;
        }
    }
    best
}

/// Returns the peak of live bytes, a lower bound of every plan.
fn peak_live_bytes(blocks: &[Block], instructions: usize) -> u128 {
    let alive = live_bytes(instructions, blocks.iter().map(|block| (block.life, block.size as i128)));
    alive.into_iter().max().unwrap_or(0).unsigned_abs()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(size: usize, first: isize, last: isize) -> Block {
        Block { buffer: 0, size, life: LiveRange { first, last } }
    }

    fn check(blocks: &[Block], offsets: &[usize], total: usize) {
        for (i, a) in blocks.iter().enumerate() {
            assert!(offsets[i] + a.size <= total);
            for (j, b) in blocks.iter().enumerate().skip(i + 1) {
                let is_disjoint = offsets[i] + a.size <= offsets[j] || offsets[j] + b.size <= offsets[i];
                assert!(is_disjoint || !a.life.overlaps(b.life), "blocks {i} and {j} overlap");
            }
        }
    }

    #[test]
    fn simultaneously_live_blocks_are_disjoint() {
        let mut state = 1u64;
        let mut next = |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % n
        };
        for round in 0..200 {
            let blocks: Vec<Block> = (0..1 + next(40))
                .map(|_| {
                    let first = next(30) as isize - 1;
                    block(256 * (1 + next(1 + round % 20) as usize), first, first + next(12) as isize)
                })
                .collect();
            let (offsets, total) = pack_blocks(&blocks, 45).unwrap();
            check(&blocks, &offsets, total);
            assert!(total as u128 >= peak_live_bytes(&blocks, 45));
        }
    }

    #[test]
    fn other_orders_beat_the_size_order() {
        let blocks = [block(4, 2, 2), block(5, 5, 6), block(3, 2, 3), block(4, 3, 6)];
        let (_, by_size) = place_blocks(&blocks, &[1, 0, 3, 2]).unwrap();
        let (offsets, total) = pack_blocks(&blocks, 7).unwrap();
        check(&blocks, &offsets, total);
        assert_eq!((by_size, total), (12, 9));
        assert_eq!(total as u128, peak_live_bytes(&blocks, 7));
    }

    #[test]
    fn order_variations_close_gaps() {
        // Blocks of a tiled convolutional network: none of the plain orders packs them without a gap.
        let blocks = [
            block(24, -1, 1),
            block(64, 0, 2),
            block(64, 2, 4),
            block(32, 4, 14),
            block(48, 8, 15),
            block(48, 9, 17),
            block(12, 17, 19),
            block(18, 20, 27),
            block(72, 21, 28),
        ];
        let (offsets, total) = pack_blocks(&blocks, 30).unwrap();
        check(&blocks, &offsets, total);
        assert_eq!(total as u128, peak_live_bytes(&blocks, 30));
    }

    #[test]
    fn oversized_plans_are_rejected() {
        let blocks = [block(isize::MAX as usize, 0, 1), block(256, 0, 1)];
        assert!(pack_blocks(&blocks, 2).is_none());
    }
}
