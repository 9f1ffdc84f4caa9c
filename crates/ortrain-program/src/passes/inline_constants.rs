//! Inlines constants of one element into the expressions that load them.

use ortrain_expr::Scalar;

use super::{Changed, Draft, Outcome, Target};
use crate::rewrite::inline_nest::with_constants;
use crate::{BufferLocation, Load, Operand};

pub(super) fn run(draft: &mut Draft, _: &Target) -> Outcome {
    let Draft { instructions, buffers, constants, .. } = draft;
    let value = |load: &Load| {
        let Operand { buffer, access } = load.operand()?;
        let buffer = &buffers[buffer.0 as usize];
        let BufferLocation::Constant(index) = buffer.location else { return None };
        let is_constant = access.strides.iter().all(|&stride| stride == 0) && access.offset < buffer.len;
        let (at, size) = (access.offset * buffer.dtype.size(), buffer.dtype.size());
        is_constant.then(|| Scalar::read(buffer.dtype, &constants[index].data()[at..at + size]))
    };
    let mut changes = 0;
    for scheduled in instructions {
        let Some(nest) = scheduled.instruction.nest() else { continue };
        let values: Vec<Option<Scalar>> = nest.loads.iter().map(value).collect();
        let known = values.iter().filter(|value| value.is_some()).count();
        if known > 0
            && let Some(nest) = with_constants(nest, &values)
        {
            *scheduled = scheduled.with_nest(nest);
            changes += known;
        }
    }
    Ok(Changed(changes))
}
