//! Ranges of buffer elements that an instruction accesses.
//!
//! A binding begins at the first accessed element, and kernels count from there. All steps of an unrolled sequence then
//! have the same kernel.

use std::ops::Range;

use ortrain_expr::Dims;
use ortrain_program::{BufferId, Instruction, MatMul, Nest, Operand};

/// Returns the elements of a buffer that an instruction accesses; `None` if it may access any element.
pub(crate) fn accessed_range(instruction: &Instruction, id: BufferId) -> Option<Range<usize>> {
    let mut total_range: Option<Range<usize>> = None;
    let mut add = |range: Range<usize>| {
        let known = total_range.get_or_insert(range.clone());
        *known = known.start.min(range.start)..known.end.max(range.end);
    };
    match instruction {
        Instruction::Nest(nest) => add_nest(nest, id, &mut add)?,
        Instruction::MatMul(m) => {
            let MatMul { batch, m: rows, n, k, a, b, epilogue, .. } = &**m;
            let space = |sizes: [usize; 2]| batch.iter().copied().chain(sizes).collect::<Dims>();
            for (factor, dims) in [(a, space([*rows, *k])), (b, space([*k, *n]))] {
                add_operand(factor, id, &dims, &mut add)?;
            }
            add_nest(epilogue, id, &mut add)?;
        }
        _ => return None,
    }
    total_range
}

/// Adds the elements of a buffer that a nest accesses. Returns `None` if they are unknown.
fn add_nest(nest: &Nest, id: BufferId, add: &mut dyn FnMut(Range<usize>)) -> Option<()> {
    if nest.segments.is_some() {
        return None;
    }
    let has = |operand: &&Operand| operand.buffer == id;
    for (slot, load) in nest.loads.iter().enumerate() {
        if load.operand().as_ref().is_some_and(has) && nest.is_gathered(slot) {
            return None;
        }
    }
    nest.operands().try_for_each(|operand| add_operand(operand, id, &nest.dims, add))
}

/// Adds the elements that an operand accesses over a space, if the operand is in the buffer.
fn add_operand(
    operand: &Operand,
    id: BufferId,
    dims: &[usize],
    add: &mut dyn FnMut(Range<usize>),
) -> Option<()> {
    if operand.buffer == id {
        // Operands that are constant along a row are accessed even if the row is empty.
        let dims: Dims = dims.iter().map(|&size| size.max(1)).collect();
        let (low, high) = operand.access.position_range(&dims)?;
        add(usize::try_from(low).ok()?..usize::try_from(high).ok()? + 1);
    }
    Some(())
}
