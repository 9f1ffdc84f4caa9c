//! Factors an expression into late loads and a slope: a derivative as a product.

use crate::{BinaryOp, Builder, Expr, Inst, Reg, Scalar, UnaryOp};

/// Dependence of a register on the late register.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Dependence {
    /// Does not depend on late loads.
    Independent,
    /// Is the late register multiplied by an independent factor.
    Linear,
    Other,
}

/// Splits an expression of one result into a slope and a product `late register * slope`. Returns `None` if the result
/// is no such product. The late register depends on late loads only. The slope depends on other loads only, at least
/// one.
///
/// `late` has true for each load that arrives late. The product reads the slope as load `slot`. A sum of products with
/// the same late register has one slope: `g * a + g * b` has the slope `a + b` in `g`.
#[must_use]
pub fn split_derivative(expr: &Expr, late: &[bool], slot: usize) -> Option<(Expr, Expr)> {
    let arriving = find_late_factor(expr, late)?;
    Some((slope_of(expr, late, arriving), product_with(expr, arriving, slot)))
}

/// Returns for each register true if it depends on one of the loads.
fn dependent_registers(expr: &Expr, loads: &[bool]) -> Vec<bool> {
    let mut dependent: Vec<bool> = Vec::with_capacity(expr.insts().len());
    for (inst, _) in expr.insts() {
        let is_dependent = matches!(*inst, Inst::Load(slot) if loads[usize::from(slot)]);
        dependent.push(is_dependent || inst.operands().any(|reg| dependent[usize::from(reg.0)]));
    }
    dependent
}

/// Returns the last register that depends on late loads only and of which the result is a multiple. The factor depends
/// on no late load, but on another load.
fn find_late_factor(expr: &Expr, late: &[bool]) -> Option<Reg> {
    let early: Vec<bool> = late.iter().map(|late| !late).collect();
    let (from_late, from_early) = (dependent_registers(expr, late), dependent_registers(expr, &early));
    let candidates = (0..expr.insts().len()).rev().filter(|&k| from_late[k] && !from_early[k]);
    let mut factor = candidates.map(|k| Reg(k as u16)).filter(|&reg| is_multiple(expr, &from_late, reg));
    factor.next().filter(|_| from_early[usize::from(expr.outputs()[0].0)])
}

/// Returns true if the result is the register times a factor that does not depend on late loads.
fn is_multiple(expr: &Expr, from_late: &[bool], of: Reg) -> bool {
    use Dependence::{Independent, Linear, Other};
    let mut shares: Vec<Dependence> = Vec::with_capacity(from_late.len());
    for (k, (inst, _)) in expr.insts().iter().enumerate() {
        let share = |reg: Reg| shares[usize::from(reg.0)];
        shares.push(match *inst {
            _ if k == usize::from(of.0) => Linear,
            _ if !from_late[k] => Independent,
            Inst::Unary(UnaryOp::Neg, a) => share(a),
            Inst::Binary(op, a, b) => match (op, share(a), share(b)) {
                (BinaryOp::Add | BinaryOp::Sub, Linear, Linear)
                | (BinaryOp::Mul | BinaryOp::Div, Linear, Independent)
                | (BinaryOp::Mul, Independent, Linear) => Linear,
                _ => Other,
            },
            _ => Other,
        });
    }
    shares[usize::from(expr.outputs()[0].0)] == Linear
}

/// Returns the result for `arriving = 1`.
fn slope_of(expr: &Expr, late: &[bool], arriving: Reg) -> Expr {
    let from_late = dependent_registers(expr, late);
    let mut b = Builder::new();
    let mut regs: Vec<Reg> = Vec::with_capacity(from_late.len());
    for (k, &(inst, ty)) in expr.insts().iter().enumerate() {
        let is_late_register = matches!(inst, Inst::Load(slot) if late[usize::from(slot)])
            || (k < usize::from(arriving.0) && from_late[k]);
        let reg = match inst.map_operands(|reg| regs[usize::from(reg.0)]) {
            // The late registers from which `arriving` is computed are not needed.
            _ if k == usize::from(arriving.0) || is_late_register => {
                b.push(Inst::Const(Scalar::from_f64(ty, 1.0)), ty)
            }
            other => b.fold(other, ty),
        };
        regs.push(reg);
    }
    b.finish(&[regs[usize::from(expr.outputs()[0].0)]])
}

/// Returns the expression `arriving * load(slot)`.
fn product_with(expr: &Expr, arriving: Reg, slot: usize) -> Expr {
    let mut b = Builder::new();
    for &(inst, ty) in &expr.insts()[..=usize::from(arriving.0)] {
        b.push(inst, ty);
    }
    let slope = b.load(slot, expr.ty(arriving));
    let product = b.mul(arriving, slope);
    b.finish(&[product])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Type;

    #[test]
    fn late_factor_is_split_off() {
        let mut b = Builder::new();
        let [g, x, y] = [0, 1, 2].map(|slot| b.load(slot, Type::F32));
        let arriving = b.unary(UnaryOp::Neg, g);
        let [left, right] = [x, y].map(|factor| b.mul(arriving, factor));
        let sum = b.add(left, right);
        let (slope, product) = split_derivative(&b.finish(&[sum]), &[true, false, false], 3).unwrap();
        let text = |expr: &Expr| expr.insts().iter().map(|&(inst, _)| inst).collect::<Vec<_>>();
        let (load, add) = (Inst::Load, Inst::Binary(BinaryOp::Add, Reg(0), Reg(1)));
        assert_eq!(text(&slope), [load(1), load(2), add]);
        let (neg, mul) = (Inst::Unary(UnaryOp::Neg, Reg(0)), Inst::Binary(BinaryOp::Mul, Reg(1), Reg(2)));
        assert_eq!(text(&product), [load(0), neg, load(3), mul]);
    }

    #[test]
    fn sums_have_no_slope() {
        let mut b = Builder::new();
        let [g, x] = [0, 1].map(|slot| b.load(slot, Type::F32));
        let sum = b.add(g, x);
        assert!(split_derivative(&b.finish(&[sum]), &[true, false], 2).is_none());
    }
}
