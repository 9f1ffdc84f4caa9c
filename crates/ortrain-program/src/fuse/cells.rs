//! Positions of maxima as numbers of cells.
//!
//! A gradient that knows where the windows lie needs of each maximum only which cell of its window it was: a byte in place
//! of the eight of a position. Positions that anything else reads stay what they are.

use ortrain_expr::DType;

use crate::{Buffer, BufferId, Instruction, ScheduledInstruction, Window, is_work};

/// Gives positions that only gradients of the same windows read the narrowest type.
pub(crate) fn number_cells(
    instructions: &[ScheduledInstruction],
    buffers: &mut [Buffer],
    inputs: &[BufferId],
    outputs: &[BufferId],
) {
    for scheduled in instructions {
        let Instruction::Window(Window { shape, index: Some(index), .. }) = &scheduled.instruction else {
            continue;
        };
        let index = *index;
        let seen = inputs.contains(&index) || outputs.contains(&index);
        if seen || !is_work(buffers, index) || buffers[index.0 as usize].dtype != DType::I64 {
            continue;
        }
        let others = |instruction: &Instruction| match instruction {
            Instruction::Window(w) if w.index == Some(index) => {
                (w.shape.planes, &w.shape.axes) == (shape.planes, &shape.axes)
                    && ![w.source, w.target].contains(&index)
            }
            instruction => !instruction.reads().contains(&index) && !instruction.writes().contains(&index),
        };
        if let Some(dtype) = shape.cell_numbers()
            && instructions.iter().all(|other| others(&other.instruction))
        {
            buffers[index.0 as usize].dtype = dtype;
        }
    }
}
