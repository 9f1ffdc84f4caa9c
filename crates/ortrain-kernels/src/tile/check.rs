//! Checks of the nests that become tile programs.

use ortrain_expr::{BinaryOp, Inst, Nest, Reg, Scalar, Type, UnaryOp};

/// Checks that the expression is well typed, and that the nest runs without reads or writes out of bounds.
pub(super) fn check(nest: &Nest) -> Result<(), String> {
    if let Some(fault) = nest.validate() {
        return Err(fault);
    }
    let expr = &nest.expr;
    let insts = expr.insts();
    for (i, &(inst, ty)) in insts.iter().enumerate() {
        let error = |what: &str| Err(format!("instruction {i} ({inst:?} as {ty:?}): {what}"));
        if inst.operands().any(|reg| usize::from(reg.0) >= i) {
            return error("an operand is computed later");
        }
        let of = |reg: Reg| expr.ty(reg);
        match inst {
            Inst::Load(slot) | Inst::LoadAt(slot, _) if usize::from(slot) >= nest.loads.len() => {
                return error("no such load");
            }
            Inst::LoadAt(_, index) if of(index) != Type::I64 => return error("the index is not i64"),
            Inst::Coordinate(axis) if usize::from(axis) >= nest.dims.len() => return error("no such axis"),
            Inst::Coordinate(_) | Inst::Guard(..) if ty != Type::I64 => {
                return error("the result must be i64");
            }
            Inst::Run(_) if ty != Type::U64 => return error("the result must be u64"),
            Inst::Compare(..) if ty != Type::Bool => return error("the result must be bool"),
            Inst::Random(..) if ty != Type::U32 => return error("the result must be u32"),
            Inst::Reduced(k) if usize::from(k) >= nest.reductions.len() => return error("no such reduction"),
            Inst::Unary(_, a) if of(a) != ty => return error("the operand has another type"),
            Inst::Unary(op, _) => {
                let fits = match op {
                    UnaryOp::Not => ty == Type::Bool,
                    UnaryOp::ToF16 | UnaryOp::ToBf16 => ty == Type::F32,
                    UnaryOp::Neg | UnaryOp::Abs | UnaryOp::Sign | UnaryOp::Floor | UnaryOp::Round => {
                        ty != Type::Bool
                    }
                    _ => ty.is_float(),
                };
                if !fits {
                    return error("not defined for the type");
                }
            }
            Inst::Binary(_, a, b) if of(a) != ty || of(b) != ty => {
                return error("an operand has another type");
            }
            Inst::Binary(op, ..) => {
                let fits = match op {
                    BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => !ty.is_float(),
                    _ => ty != Type::Bool,
                };
                if !fits {
                    return error("not defined for the type");
                }
            }
            Inst::Compare(_, a, b) if of(a) != of(b) => return error("operands of two types"),
            Inst::Select(c, a, b) if of(c) != Type::Bool || of(a) != ty || of(b) != ty => {
                return error("an operand has another type");
            }
            Inst::Guard(a, b) if of(a) != Type::I64 || of(b) != Type::I64 => {
                return error("an operand is not i64");
            }
            Inst::Random(a, b, c) if [a, b, c].iter().any(|&reg| of(reg) != Type::U64) => {
                return error("an operand is not u64");
            }
            Inst::Const(value) if matches!(value, Scalar::Bool(_)) != (ty == Type::Bool) => {
                return error("a constant has another type");
            }
            _ => {}
        }
    }
    if expr
        .outputs()
        .iter()
        .chain(nest.reductions.iter().map(|r| &r.value))
        .any(|reg| usize::from(reg.0) >= insts.len())
    {
        return Err("a result is not computed".to_owned());
    }
    for (k, reduction) in nest.reductions.iter().enumerate() {
        if expr.ty(reduction.value) == Type::Bool {
            return Err(format!("reduction {k} reduces booleans"));
        }
        let needed = expr.dependencies_of(&[reduction.value]);
        let later = |inst: Inst| matches!(inst, Inst::Reduced(other) if usize::from(other) >= k);
        if insts.iter().zip(&needed).any(|(&(inst, _), &needed)| needed && later(inst)) {
            return Err(format!("reduction {k} depends on a later reduction"));
        }
    }
    if nest.inner == 0 && !nest.reductions.is_empty() {
        return Err("a reduction needs a reduced axis".to_owned());
    }
    let outer_rank = nest.dims.len() - nest.inner;
    for (i, store) in nest.stores.iter().enumerate() {
        let (outer, inner) = store.strides.split_at(outer_rank);
        let per_row = inner.iter().all(|&stride| stride == 0);
        let stored = if per_row { nest.outer_dims() } else { &nest.dims };
        if nest.segments.is_some() {
            // `Nest::validate` has checked the accesses of segments.
            continue;
        }
        let twice = outer.iter().zip(&nest.dims).any(|(&stride, &dim)| stride == 0 && dim > 1);
        if twice && !stored.contains(&0) {
            return Err(format!("store {i} writes several results to one element"));
        }
    }
    Ok(())
}
