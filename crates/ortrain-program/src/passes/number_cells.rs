//! Makes positions of maxima numbers of cells, where gradients alone read them.
//!
//! A gradient that knows where the windows lie needs of each maximum only which cell of its window it was: a byte in place
//! of the eight of a position. Positions that anything else reads stay what they are.

use ortrain_expr::{DType, IndexKind};

use super::{Changed, Draft, Outcome, Target};
use crate::{Buffer, BufferId, Instruction, ScheduledInstruction, Window, is_work};

/// Gives positions that only gradients of the same windows read the narrowest type.
pub(super) fn run(draft: &mut Draft, _: &Target) -> Outcome {
    let Draft { instructions, buffers, inputs, outputs, .. } = draft;
    let mut changes = 0;
    for at in 0..instructions.len() {
        let Some((id, dtype)) = numbered_by(&instructions[at].instruction, instructions, buffers) else {
            continue;
        };
        if inputs.contains(&id) || outputs.contains(&id) {
            continue;
        }
        buffers[id.0 as usize].dtype = dtype;
        changes += 1;
        for scheduled in instructions.iter_mut() {
            if let Instruction::Window(Window { index: Some(index), .. }) = &mut scheduled.instruction
                && index.operand.buffer == id
            {
                index.kind = IndexKind::Cell;
                index.operand.access.dtype = dtype;
            }
        }
    }
    Ok(Changed(changes))
}

/// The positions of a window, if only gradients of the same windows read them, and the type of numbers of cells.
fn numbered_by(
    instruction: &Instruction,
    instructions: &[ScheduledInstruction],
    buffers: &[Buffer],
) -> Option<(BufferId, DType)> {
    let Instruction::Window(Window { shape, index: Some(index), .. }) = instruction else { return None };
    let id = index.operand.buffer;
    if !is_work(buffers, id) || index.kind != IndexKind::Element {
        return None;
    }
    let others = |other: &ScheduledInstruction| match &other.instruction {
        Instruction::Window(w) if w.index.as_ref().is_some_and(|index| index.operand.buffer == id) => {
            (w.shape.planes, &w.shape.axes) == (shape.planes, &shape.axes)
                && ![w.source.buffer, w.target.buffer].contains(&id)
        }
        other => !other.reads().contains(&id) && !other.writes().contains(&id),
    };
    shape.cell_numbers().filter(|_| instructions.iter().all(others)).map(|dtype| (id, dtype))
}
