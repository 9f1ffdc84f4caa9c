//! Dead-code elimination: removes unused instructions and unused results.

use super::{Changed, Draft, Outcome, Target};
use crate::buffer::membership_flags;
use crate::operand::stored_buffers;
use crate::rewrite::inline_nest::keep_results;
use crate::{BufferId, is_work};

pub(super) fn run(draft: &mut Draft, _: &Target) -> Outcome {
    Ok(Changed(remove_unused(draft)))
}

/// Removes unused instructions and unused results. Instructions that write state or can fail stay.
pub(crate) fn remove_unused(draft: &mut Draft) -> usize {
    let Draft { instructions, buffers, outputs, .. } = draft;
    let mut changes = 0;
    let mut needed = membership_flags(buffers.len(), outputs);
    let mut is_used = vec![false; instructions.len()];
    for (index, scheduled) in instructions.iter_mut().enumerate().rev() {
        let instruction = &scheduled.instruction;
        let is_required = |id: BufferId| !is_work(buffers, id) || needed[id.0 as usize];
        is_used[index] = instruction.has_side_effects() || instruction.writes().into_iter().any(is_required);
        if !is_used[index] {
            continue;
        }
        if let Some(nest) = instruction.nest()
            && nest.stores.len() > 1
        {
            let results: Vec<bool> = stored_buffers(nest).map(is_required).collect();
            if let Some(fewer) = keep_results(nest, &results) {
                *scheduled = scheduled.with_nest(fewer);
                changes += 1;
            }
        }
        for id in scheduled.instruction.reads() {
            needed[id.0 as usize] = true;
        }
    }
    changes += is_used.iter().filter(|used| !*used).count();
    let mut flags = is_used.into_iter();
    instructions.retain(|_| flags.next() == Some(true));
    changes
}
