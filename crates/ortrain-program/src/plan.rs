//! The memory planner: where every work buffer lies, decided before anything is allocated.

use crate::builder::align;
use crate::{Buffer, BufferId, Instruction, Place, ProgramError, Step};

/// First and last instruction (inputs are there before the first) at which a buffer holds something needed.
#[derive(Clone, Copy)]
struct Life {
    first: isize,
    last: isize,
}

/// Gives every work buffer its offset and returns the size of the arena.
///
/// Buffers whose lives overlap never share bytes, except where a map may overwrite what it reads last. Larger buffers
/// are placed first, each as low as it fits.
pub(crate) fn plan(
    buffers: &mut [Buffer],
    instructions: &[Instruction],
    inputs: &[BufferId],
    outputs: &[BufferId],
) -> Result<usize, ProgramError> {
    let mut lives: Vec<Option<Life>> = vec![None; buffers.len()];
    let mut touch = |id: BufferId, at: isize| {
        let life = lives[id.0 as usize].get_or_insert(Life { first: at, last: at });
        life.first = life.first.min(at);
        life.last = life.last.max(at);
    };
    for &input in inputs {
        touch(input, -1);
    }
    for (index, instruction) in instructions.iter().enumerate() {
        for id in instruction.step.reads().into_iter().chain(instruction.step.writes()) {
            touch(id, index as isize);
        }
    }
    for &output in outputs {
        touch(output, instructions.len() as isize);
    }

    // Buffers that share their bytes, by the first of them.
    let mut group: Vec<usize> = (0..buffers.len()).collect();
    for (index, instruction) in instructions.iter().enumerate() {
        let Step::Map(map) = &instruction.step else { continue };
        for (store, &to) in map.nest.stores.iter().zip(&map.writes) {
            let target = to.0 as usize;
            let fresh =
                lives[target].is_some_and(|life| life.first == index as isize) && group[target] == target;
            if !fresh || !matches!(buffers[target].place, Place::Work(_)) {
                continue;
            }
            let reusable = map.nest.loads.iter().zip(&map.reads).find(|&(load, &from)| {
                let source = from.0 as usize;
                let root = group[source];
                matches!(buffers[source].place, Place::Work(_))
                    && load.strides == store.strides
                    && load.offset == store.offset
                    && buffers[source].bytes() == buffers[target].bytes()
                    && load.dtype.size() == store.dtype.size()
                    && lives[root].is_some_and(|life| life.last == index as isize)
                    && !map.reads.iter().any(|&other| other != from && group[other.0 as usize] == root)
                    && !reads_otherwise(map, from, load)
            });
            if let Some((_, &from)) = reusable {
                let root = group[from.0 as usize];
                group[target] = root;
                let last = lives[target].map_or(0, |life| life.last);
                if let Some(life) = &mut lives[root] {
                    life.last = life.last.max(last);
                }
            }
        }
    }

    let mut roots: Vec<usize> = (0..buffers.len())
        .filter(|&k| group[k] == k && lives[k].is_some() && matches!(buffers[k].place, Place::Work(_)))
        .collect();
    roots.sort_by_key(|&k| (std::cmp::Reverse(buffers[k].bytes()), k));
    let mut placed: Vec<(usize, usize, Life)> = Vec::new();
    let mut total = 0usize;
    for k in roots {
        let life = lives[k].expect("filtered");
        let size = align(buffers[k].bytes().max(1));
        let mut busy: Vec<(usize, usize)> = placed
            .iter()
            .filter(|(_, _, other)| other.first <= life.last && life.first <= other.last)
            .map(|&(start, end, _)| (start, end))
            .collect();
        busy.sort_unstable();
        let mut offset = 0;
        for (start, end) in busy {
            if offset + size <= start {
                break;
            }
            offset = offset.max(end);
        }
        let end = offset
            .checked_add(size)
            .filter(|&end| isize::try_from(end).is_ok())
            .ok_or_else(|| ProgramError::TooLarge { label: buffers[k].label.to_string() })?;
        placed.push((offset, end, life));
        total = total.max(end);
        buffers[k].place = Place::Work(offset);
    }
    for k in 0..buffers.len() {
        if group[k] != k {
            buffers[k].place = buffers[group[k]].place;
        }
    }
    Ok(total)
}

/// Whether a map reads a buffer in another way than by `load`, so that overwriting it would be seen.
fn reads_otherwise(map: &crate::Loop, buffer: BufferId, load: &ortrain_expr::Access) -> bool {
    map.nest.loads.iter().zip(&map.reads).enumerate().any(|(slot, (access, &id))| {
        id == buffer
            && (access != load
                || map.nest.expr.insts().iter().any(
                    |(inst, _)| matches!(inst, ortrain_expr::Inst::LoadAt(s, _) if usize::from(*s) == slot),
                ))
    })
}
