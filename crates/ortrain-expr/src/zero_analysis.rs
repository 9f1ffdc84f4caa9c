//! What is zero because something else is.

use crate::{BinaryOp, Inst, Nest, ReduceOp, Reg, UnaryOp};

/// For each register of a nest whether it is zero where some of its loads are. `sums` says whether these are zero in all
/// terms of a sum, which then is zero as well.
///
/// Zero times anything is zero: what an infinity would make of it is not asked for where nobody reads the other factor.
#[must_use]
pub fn zero_registers<O>(nest: &Nest<O>, is_zero: &[bool], sums: bool) -> Vec<bool> {
    let insts = nest.expr.insts();
    let mut zero = vec![false; insts.len()];
    // A reduction may stand before the value that it reduces.
    loop {
        let mut changed = false;
        for (k, (inst, _)) in insts.iter().enumerate() {
            let at = |reg: Reg| zero[usize::from(reg.0)];
            let found = match *inst {
                Inst::Const(value) => value.to_f64() == 0.0,
                Inst::Load(slot) => is_zero[usize::from(slot)],
                Inst::Reduced(k) => {
                    let reduction = &nest.reductions[usize::from(k)];
                    sums && reduction.op == ReduceOp::Sum && at(reduction.value)
                }
                Inst::Unary(op, a) => keeps_zero(op) && at(a),
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
            changed |= found && !zero[k];
            zero[k] = found;
        }
        if !changed {
            return zero;
        }
    }
}

/// Whether a function is zero at zero.
fn keeps_zero(op: UnaryOp) -> bool {
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
        | UnaryOp::ToF16
        | UnaryOp::ToBf16 => true,
        UnaryOp::Exp | UnaryOp::Log | UnaryOp::Rsqrt | UnaryOp::Cos | UnaryOp::Sigmoid | UnaryOp::Not => {
            false
        }
    }
}
