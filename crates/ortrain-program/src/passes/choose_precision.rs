//! Chooses the precision of products. Products with enough work use the precision of the program, others use `f32`.

use std::sync::Arc;

use ortrain_expr::{DType, Precision};

use super::{Changed, Draft, Outcome, Target};
use crate::{Instruction, Operand};

pub(super) fn run(draft: &mut Draft, _: &Target) -> Outcome {
    let Draft { instructions, precision, .. } = draft;
    let is_double = |factor: &Operand| factor.access.dtype == DType::F64;
    let mut changes = 0;
    for scheduled in instructions.iter_mut().filter(|_| *precision != Precision::F32) {
        match &mut scheduled.instruction {
            Instruction::MatMul(m) if !is_double(&m.a) && !is_double(&m.b) => {
                let sides = [m.m, m.n, m.k];
                Arc::make_mut(m).precision = precision.for_product(sides);
            }
            Instruction::QuantizedMatMul(m) => {
                let sides = [m.m, m.n, m.k];
                Arc::make_mut(m).precision = precision.for_product(sides);
            }
            Instruction::Conv(c) if !is_double(&c.a) && !is_double(&c.b) => {
                let sides = c.shape.product_sides();
                Arc::make_mut(c).precision = precision.for_product(sides);
            }
            _ => {}
        }
        changes += usize::from(scheduled.instruction.precision() != Precision::F32);
    }
    Ok(Changed(changes))
}
