//! Zero analysis: the values of a nest that are zero because some of its loads are zero.

use crate::{BinaryOp, Inst, Nest, ReduceOp, Reg, UnaryOp};

/// Returns for each register of a nest true if the register is zero where the loads in `is_zero` are zero. If `sums` is
/// true, these loads are zero in all terms of a sum, and the sum is zero as well.
///
/// Zero times any factor counts as zero, although an infinite factor would give NaN: callers use the result to skip the
/// reads of the other factor.
#[must_use]
pub fn zero_registers<O>(nest: &Nest<O>, is_zero: &[bool], sums: bool) -> Vec<bool> {
    let insts = nest.expr.insts();
    let mut zero = vec![false; insts.len()];
    // An instruction may read a reduction before the instruction of the reduced value.
    loop {
        let mut changed = false;
        for (k, (inst, _)) in insts.iter().enumerate() {
            let at = |reg: Reg| zero[usize::from(reg.0)];
            let is_zero_inst = match *inst {
                Inst::Const(value) => value.to_f64() == 0.0,
                Inst::Load(slot) => is_zero[usize::from(slot)],
                Inst::Reduced(k) => {
                    let reduction = &nest.reductions[usize::from(k)];
                    sums && reduction.op == ReduceOp::Sum && at(reduction.value)
                }
                Inst::Unary(op, a) => maps_zero_to_zero(op) && at(a),
                Inst::Binary(op, a, b) => match op {
                    BinaryOp::Mul | BinaryOp::And => at(a) || at(b),
                    BinaryOp::Div | BinaryOp::Rem => at(a),
                    BinaryOp::Add
                    | BinaryOp::Sub
                    | BinaryOp::Min
                    | BinaryOp::Max
                    | BinaryOp::Or
                    | BinaryOp::Xor => at(a) && at(b),
                    BinaryOp::Pow => false,
                },
                Inst::Select(condition, yes, no) => at(no) && (at(yes) || at(condition)),
                Inst::Convert(a) => at(a),
                Inst::LoadAt(..)
                | Inst::Coordinate(_)
                | Inst::Run(_)
                | Inst::Compare(..)
                | Inst::Guard(..)
                | Inst::Random(..) => false,
            };
            changed |= is_zero_inst && !zero[k];
            zero[k] = is_zero_inst;
        }
        if !changed {
            return zero;
        }
    }
}

/// Returns true if the function maps zero to zero.
fn maps_zero_to_zero(op: UnaryOp) -> bool {
    match op {
        UnaryOp::Neg
        | UnaryOp::Abs
        | UnaryOp::Sign
        | UnaryOp::Sqrt
        | UnaryOp::Sin
        | UnaryOp::Atan
        | UnaryOp::Erf
        | UnaryOp::Tanh
        | UnaryOp::Floor
        | UnaryOp::Round
        | UnaryOp::ToF16
        | UnaryOp::ToBf16 => true,
        UnaryOp::Exp | UnaryOp::Log | UnaryOp::Rsqrt | UnaryOp::Cos | UnaryOp::Sigmoid | UnaryOp::Not => {
            false
        }
    }
}
