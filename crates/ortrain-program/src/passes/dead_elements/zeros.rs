//! What is zero because something else is.

use ortrain_expr::{BinaryOp, Inst, ReduceOp, Reg, UnaryOp};

use crate::Nest;

/// For each register of a nest whether it is zero where some of its loads are. `sums` says whether these are zero in all
/// terms of a sum, which then is zero as well.
///
/// Zero times anything is zero: what an infinity would make of it is not asked for where nobody reads the other factor.
pub(super) fn zero_registers(nest: &Nest, is_zero: &[bool], sums: bool) -> Vec<bool> {
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
        | UnaryOp::Floor => true,
        UnaryOp::Exp | UnaryOp::Log | UnaryOp::Rsqrt | UnaryOp::Cos | UnaryOp::Sigmoid | UnaryOp::Not => {
            false
        }
    }
}

/// Whether results of a nest are the same at all points along its reduced axes, where its stores are.
pub(super) fn is_made_of_sums_alone(nest: &Nest) -> bool {
    let kept = nest.dims.len() - nest.inner;
    let stays = |strides: &[isize]| strides[kept..].iter().all(|&stride| stride == 0);
    let needed = nest.expr.needed_by(nest.expr.outputs());
    nest.reductions.iter().all(|reduction| reduction.op == ReduceOp::Sum)
        && nest.stores.iter().all(|store| stays(&store.access.strides))
        && nest.expr.insts().iter().zip(needed).filter(|&(_, needed)| needed).all(
            |((inst, _), _)| match *inst {
                Inst::Load(slot) => {
                    nest.loads[usize::from(slot)].access().is_some_and(|access| stays(&access.strides))
                }
                Inst::Coordinate(axis) => usize::from(axis) < kept,
                _ => true,
            },
        )
}
