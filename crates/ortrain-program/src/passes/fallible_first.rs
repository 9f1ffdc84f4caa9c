//! Moves instructions that can fail, with their dependencies, before instructions that write state. A failing step then
//! changes nothing.

use super::{Changed, Draft, Outcome, Target};
use crate::buffer::add_work;
use crate::operand::stored_buffers;
use crate::rewrite::inline_nest::keep_results;
use crate::scheduled::VersionCounter;
use crate::versions::Versions;
use crate::{Buffer, Instruction, Nest, Operand, ScheduledInstruction, is_work};

/// Orders instructions so that nothing that can fail follows a write to state. Instructions that can fail and their
/// dependencies come first, and the order within each part is preserved. If the first part updates a buffer that the
/// rest reads, the old value is copied before.
pub(super) fn run(draft: &mut Draft, _: &Target) -> Outcome {
    let Draft { instructions, buffers, .. } = draft;
    let writes_state =
        |i: &ScheduledInstruction| i.instruction.writes().iter().any(|&id| !is_work(buffers, id));
    let last_failing = instructions.iter().rposition(|i| i.instruction.can_fail()).unwrap_or(0);
    let moved_count = instructions[..last_failing].iter().filter(|i| writes_state(i)).count();
    if moved_count == 0 {
        return Ok(Changed(0));
    }
    let mut early = vec![false; instructions.len()];
    let mut required = vec![false; buffers.len()];
    // Buffers that early instructions write: earlier reads and writes of these buffers must come before.
    let mut updated = vec![false; buffers.len()];
    for (index, scheduled) in instructions.iter().enumerate().rev() {
        let (reads, writes) = (scheduled.instruction.reads(), scheduled.instruction.writes());
        let produces = writes.iter().any(|&id| is_work(buffers, id) && required[id.0 as usize]);
        // Instructions that only write state are not moved; they read copies of updated buffers.
        let precedes = writes.iter().any(|&id| is_work(buffers, id))
            && reads.iter().chain(&writes).any(|&id| updated[id.0 as usize]);
        if scheduled.instruction.can_fail() || produces || precedes {
            early[index] = true;
            reads.iter().for_each(|id| required[id.0 as usize] = true);
            let work = writes.iter().filter(|&&id| is_work(buffers, id));
            work.for_each(|id| updated[id.0 as usize] = true);
        }
    }
    let (mut first, mut rest) = (Vec::new(), Vec::new());
    for (mut scheduled, early) in std::mem::take(instructions).into_iter().zip(early) {
        if early && let Some(late) = split_off_state_writes(&mut scheduled, buffers) {
            rest.push(late);
        }
        if early { first.push(scheduled) } else { rest.push(scheduled) }
    }
    copy_before_updates(&mut first, &mut rest, buffers);
    instructions.extend(first.into_iter().chain(rest));
    Ok(Changed(moved_count))
}

/// Lets later instructions read copies of the buffers that earlier instructions update.
fn copy_before_updates(
    first: &mut Vec<ScheduledInstruction>,
    rest: &mut [ScheduledInstruction],
    buffers: &mut Vec<Buffer>,
) {
    let mut new_versions = VersionCounter::after(first.iter().chain(rest.iter()));
    for ScheduledInstruction { instruction, gradient_modes: entries, versions, .. } in rest {
        for id in instruction.reads() {
            let Some(version) = versions.common_read_version(id, *entries) else { continue };
            let wrote = |scheduled: &ScheduledInstruction| scheduled.versions.written_version(id);
            let Some(writer) = first.iter().rposition(|other| wrote(other) == Some(version)) else {
                continue;
            };
            let is_updated = first[writer + 1..].iter().any(|other| wrote(other).is_some());
            if !is_updated || !is_work(buffers, id) || instruction.writes().contains(&id) {
                continue;
            }
            let Buffer { label, dtype, len, .. } = buffers[id.0 as usize].clone();
            let (copy, copied) = (add_work(buffers, label, dtype, len), new_versions.next());
            let [from, to] = [id, copy].map(|id| Operand::contiguous(id, dtype, &[len]));
            let map = Instruction::from(Nest::copy(&[len], from, to));
            let of_copy = Versions::for_map((id, version), (copy, copied));
            first.insert(writer + 1, first[writer].with_instruction(map, &of_copy));
            instruction.substitute_buffers(&|read| if read == id { copy } else { read }, &|written| written);
            *versions = versions.clone().with_read(copy, copied).restrict_to(instruction);
        }
    }
}

/// Removes the writes to state from an instruction that also has other results. Returns an instruction with only these
/// writes, which runs later.
fn split_off_state_writes(
    scheduled: &mut ScheduledInstruction,
    buffers: &[Buffer],
) -> Option<ScheduledInstruction> {
    let nest = scheduled.instruction.nest()?;
    let is_work_store: Vec<bool> = stored_buffers(nest).map(|id| is_work(buffers, id)).collect();
    let state: Vec<bool> = is_work_store.iter().map(|is_work_buffer| !is_work_buffer).collect();
    if !is_work_store.contains(&true) {
        return None;
    }
    let (early, late) = (keep_results(nest, &is_work_store)?, keep_results(nest, &state)?);
    let late = scheduled.with_nest(late);
    *scheduled = scheduled.with_nest(early);
    Some(late)
}
