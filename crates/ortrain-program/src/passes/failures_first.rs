//! Puts instructions that can fail, and what they need, before those that write state: a step that fails has changed nothing.

use ortrain_expr::{Builder, DType, Type};

use super::Changed;
use crate::draft::Draft;
use crate::error::ProgramError;
use crate::operand::written_by;
use crate::rewrite::splice;
use crate::scheduled::NewVersions;
use crate::target::Target;
use crate::versions::Versions;
use crate::{Buffer, BufferId, Instruction, Load, Nest, Operand, Place, ScheduledInstruction, is_work};

/// Orders instructions so that nothing that can fail comes after a write to state: first what failing instructions
/// need and they themselves, then the rest. Within each part the order stays. What the rest reads of a buffer that is
/// updated in the first part is copied before the update.
pub(super) fn run(draft: &mut Draft, _: &Target) -> Result<Changed, ProgramError> {
    let Draft { instructions, buffers, .. } = draft;
    let writes_state =
        |i: &ScheduledInstruction| i.instruction.writes().iter().any(|&id| !is_work(buffers, id));
    let Some(last_failing) = instructions.iter().rposition(|i| i.instruction.can_fail()) else {
        return Ok(Changed(0));
    };
    if !instructions[..last_failing].iter().any(writes_state) {
        return Ok(Changed(0));
    }
    let moved = instructions[..last_failing].iter().filter(|i| writes_state(i)).count();
    let mut early = vec![false; instructions.len()];
    let mut wanted: Vec<bool> = vec![false; buffers.len()];
    // What is written early has been read, and written before, by then.
    let mut updated: Vec<bool> = vec![false; buffers.len()];
    for (index, scheduled) in instructions.iter().enumerate().rev() {
        let (reads, writes) = (scheduled.instruction.reads(), scheduled.instruction.writes());
        let produces = writes.iter().any(|&id| is_work(buffers, id) && wanted[id.0 as usize]);
        // State alone waits for its turn; it gets a copy of what is updated.
        let precedes = writes.iter().any(|&id| is_work(buffers, id))
            && reads.iter().chain(&writes).any(|&id| updated[id.0 as usize]);
        if scheduled.instruction.can_fail() || produces || precedes {
            early[index] = true;
            reads.iter().for_each(|id| wanted[id.0 as usize] = true);
            let work = writes.iter().filter(|&&id| is_work(buffers, id));
            work.for_each(|id| updated[id.0 as usize] = true);
        }
    }
    let (mut first, mut rest) = (Vec::new(), Vec::new());
    for (mut scheduled, early) in std::mem::take(instructions).into_iter().zip(early) {
        if early && let Some(late) = without_state(&mut scheduled, buffers) {
            rest.push(late);
        }
        if early { first.push(scheduled) } else { rest.push(scheduled) }
    }
    copy_before_updates(&mut first, &mut rest, buffers);
    instructions.extend(first.into_iter().chain(rest));
    Ok(Changed(moved))
}

/// Lets later instructions read copies of the buffers that earlier ones update before they come.
fn copy_before_updates(
    first: &mut Vec<ScheduledInstruction>,
    rest: &mut [ScheduledInstruction],
    buffers: &mut Vec<Buffer>,
) {
    let mut new_versions = NewVersions::after(first.iter().chain(rest.iter()));
    for ScheduledInstruction { instruction, entries, versions, .. } in rest {
        for id in instruction.reads() {
            let Some(version) = versions.read_everywhere(id, *entries) else { continue };
            let wrote = |scheduled: &ScheduledInstruction| scheduled.versions.written(id);
            let Some(made) = first.iter().rposition(|other| wrote(other) == Some(version)) else { continue };
            let is_updated = first[made + 1..].iter().any(|other| wrote(other).is_some());
            if !is_updated || !is_work(buffers, id) || instruction.writes().contains(&id) {
                continue;
            }
            let Buffer { label, dtype, len, .. } = buffers[id.0 as usize].clone();
            let copy = BufferId(buffers.len() as u32);
            buffers.push(Buffer { label, dtype, len, place: Place::Work(0) });
            let copied = new_versions.next();
            first.insert(
                made + 1,
                ScheduledInstruction {
                    instruction: Instruction::Nest(copy_of(id, copy, dtype, len)),
                    versions: Versions::of_map((id, version), (copy, copied)),
                    ..first[made].clone()
                },
            );
            instruction.rename(&|read| if read == id { copy } else { read }, &|written| written);
            *versions = versions.clone().with_read(copy, copied).of_instruction(instruction);
        }
    }
}

/// The map that copies a buffer.
fn copy_of(from: BufferId, to: BufferId, dtype: DType, len: usize) -> Nest {
    let mut b = Builder::new();
    let element = b.load(0, Type::of(dtype));
    Nest {
        dims: [len].into_iter().collect(),
        inner: 0,
        segments: None,
        loads: vec![Load::Buffer(Operand::whole(from, dtype, &[len]))],
        expr: b.finish(&[element]),
        reductions: Vec::new(),
        stores: vec![Operand::whole(to, dtype, &[len])],
    }
}

/// Takes the writes to state out of an instruction that makes something else as well; what makes them comes later.
fn without_state(scheduled: &mut ScheduledInstruction, buffers: &[Buffer]) -> Option<ScheduledInstruction> {
    let nest = scheduled.instruction.nest()?;
    let own: Vec<bool> = written_by(nest).map(|id| is_work(buffers, id)).collect();
    let state: Vec<bool> = own.iter().map(|own| !own).collect();
    if !own.contains(&true) {
        return None;
    }
    let (early, late) = (splice::with_results(nest, &own)?, splice::with_results(nest, &state)?);
    let late = scheduled.instruction.with_nest(late);
    let late = ScheduledInstruction {
        versions: scheduled.versions.of_instruction(&late),
        instruction: late,
        ..scheduled.clone()
    };
    scheduled.instruction = scheduled.instruction.with_nest(early);
    scheduled.versions = scheduled.versions.of_instruction(&scheduled.instruction);
    Some(late)
}
