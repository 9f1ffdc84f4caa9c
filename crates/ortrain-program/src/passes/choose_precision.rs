//! Says how exactly the factors of products are taken: those that are worth less than `f32` get the precision of the program.

use ortrain_expr::{DType, Precision};

use super::{Changed, Draft, Outcome, Target};
use crate::{Instruction, Operand};

pub(super) fn run(draft: &mut Draft, _: &Target) -> Outcome {
    let Draft { instructions, precision, .. } = draft;
    let is_double = |factor: &Operand| factor.access.dtype == DType::F64;
    let mut changes = 0;
    for scheduled in instructions {
        match &mut scheduled.instruction {
            Instruction::MatMul(m) if !is_double(&m.a) && !is_double(&m.b) => {
                m.precision = precision.of_product([m.m, m.n, m.k]);
            }
            Instruction::Conv(c) if !is_double(&c.a) && !is_double(&c.b) => {
                c.precision = precision.of_product(c.shape.product_sides());
            }
            _ => {}
        }
        changes += usize::from(scheduled.instruction.precision() != Precision::F32);
    }
    Ok(Changed(changes))
}
