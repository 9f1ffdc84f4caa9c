//! Converts positions of maxima to window cells, if only gradients read them.
//!
//! A gradient over the same windows only needs the cell of each maximum in its window: one byte instead of the eight
//! bytes of a position. Positions with other readers are unchanged.

use std::sync::Arc;

use ortrain_expr::{DType, IndexKind};

use super::{Changed, Draft, Outcome, Target};
use crate::{BufferId, Instruction, ScheduledInstruction, Window};

/// Gives positions that only gradients of the same windows read the narrowest cell type.
pub(super) fn run(draft: &mut Draft, _: &Target) -> Outcome {
    let mut changes = 0;
    for at in 0..draft.instructions.len() {
        let Some((id, dtype)) = compactable_positions(draft, at) else { continue };
        draft.buffers[id.0 as usize].dtype = dtype;
        changes += 1;
        for scheduled in &mut draft.instructions {
            if let Instruction::Window(window) = &mut scheduled.instruction
                && let Some(index) = &mut Arc::make_mut(window).index
                && index.operand.buffer == id
            {
                index.kind = IndexKind::Cell;
                index.operand.access.dtype = dtype;
            }
        }
    }
    Ok(Changed(changes))
}

/// Returns the positions of a window and their cell type, if only gradients of the same windows read them.
fn compactable_positions(draft: &Draft, at: usize) -> Option<(BufferId, DType)> {
    let Draft { instructions, .. } = draft;
    let Instruction::Window(window) = &instructions[at].instruction else { return None };
    let Window { shape, index: Some(index), .. } = &**window else { return None };
    let id = index.operand.buffer;
    if draft.is_visible(id) || index.kind != IndexKind::Element {
        return None;
    }
    let others = |other: &ScheduledInstruction| match &other.instruction {
        Instruction::Window(w) if w.index.as_ref().is_some_and(|index| index.operand.buffer == id) => {
            (w.shape.planes, &w.shape.axes) == (shape.planes, &shape.axes)
                && ![w.source.buffer, w.target.buffer].contains(&id)
        }
        other => !other.reads().contains(&id) && !other.writes().contains(&id),
    };
    shape.cell_number_type().filter(|_| instructions.iter().all(others)).map(|dtype| (id, dtype))
}
