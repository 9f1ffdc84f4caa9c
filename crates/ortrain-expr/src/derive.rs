//! The symbolic derivative of an expression.

use crate::{BinaryOp, Builder, CompareOp, Expr, Inst, Reg, UnaryOp};

/// `2 / sqrt(pi)`, the slope of the error function at 0.
const ERF_SLOPE: f64 = std::f64::consts::FRAC_2_SQRT_PI;

/// Returns the derivative of an expression with one result with respect to load `slot`, times an incoming gradient.
///
/// If `expr` has loads `0..inputs`, the derivative has the same loads and two more. Load `inputs` is the result of
/// `expr` (so that it is not computed again), load `inputs + 1` is the incoming gradient. Kinks follow PyTorch: the
/// branch not taken gets a selected zero, ties of minimum and maximum share equally, and `0 ** 0` has slope 0. Returns
/// `None` if the derivative is zero everywhere.
#[must_use]
pub fn derive(expr: &Expr, inputs: usize, slot: usize) -> Option<Expr> {
    let insts = expr.insts();
    let output = expr.outputs()[0];
    let output_ty = expr.ty(output);
    if !output_ty.is_float() {
        return None;
    }

    // Registers on the differentiable paths from the load to the result.
    let mut live = vec![false; insts.len()];
    for (i, &(inst, ty)) in insts.iter().enumerate() {
        live[i] = ty.is_float()
            && match inst {
                Inst::Load(s) => usize::from(s) == slot,
                Inst::Unary(UnaryOp::Sign | UnaryOp::Floor | UnaryOp::Round, _) => false,
                Inst::Select(_, a, b) => live[usize::from(a.0)] || live[usize::from(b.0)],
                Inst::Unary(..) | Inst::Binary(..) | Inst::Convert(_) => {
                    inst.operands().any(|r| live[usize::from(r.0)])
                }
                _ => false,
            };
    }
    if !live[usize::from(output.0)] {
        return None;
    }

    let mut b = Builder::new();
    // The registers of the forward expression; the result is loaded. `finish` drops the registers that the derivative
    // does not use.
    let mut forward: Vec<Reg> = Vec::with_capacity(insts.len());
    for (i, &(inst, ty)) in insts.iter().enumerate() {
        let at = |reg: Reg| forward[usize::from(reg.0)];
        let reg = match inst {
            Inst::Load(_) | Inst::Const(_) => b.push(inst, ty),
            _ if i == usize::from(output.0) => b.load(inputs, ty),
            _ => b.push(inst.map_operands(at), ty),
        };
        forward.push(reg);
    }

    let mut adjoint: Vec<Option<Reg>> = vec![None; insts.len()];
    adjoint[usize::from(output.0)] = Some(b.load(inputs + 1, output_ty));
    let mut result = None;
    for (i, &(inst, ty)) in insts.iter().enumerate().rev() {
        let (Some(g), true) = (adjoint[i], live[i]) else { continue };
        let at = |reg: Reg| forward[usize::from(reg.0)];
        let y = forward[i];
        let wants = |reg: Reg| live[usize::from(reg.0)];
        let mut give = |b: &mut Builder, to: Reg, value: Reg| {
            let entry = &mut adjoint[usize::from(to.0)];
            *entry = Some(match *entry {
                Some(sum) => b.add(sum, value),
                None => value,
            });
        };
        match inst {
            Inst::Load(_) => result = Some(g),
            Inst::Unary(op, a) => {
                let x = at(a);
                let value = match op {
                    UnaryOp::Neg => b.unary(UnaryOp::Neg, g),
                    // Straight-through, like the gradient of a Cast: the slope of rounding is 1.
                    UnaryOp::ToF16 | UnaryOp::ToBf16 => g,
                    UnaryOp::Abs => {
                        let sign = b.unary(UnaryOp::Sign, x);
                        b.mul(g, sign)
                    }
                    UnaryOp::Exp => b.mul(g, y),
                    UnaryOp::Log => b.div(g, x),
                    UnaryOp::Sqrt => {
                        let two = b.constant(ty, 2.0);
                        let twice = b.mul(y, two);
                        b.div(g, twice)
                    }
                    UnaryOp::Rsqrt => {
                        let half = b.constant(ty, -0.5);
                        let square = b.mul(y, y);
                        let cube = b.mul(square, y);
                        let slope = b.mul(cube, half);
                        b.mul(g, slope)
                    }
                    UnaryOp::Sin => {
                        let slope = b.unary(UnaryOp::Cos, x);
                        b.mul(g, slope)
                    }
                    UnaryOp::Cos => {
                        let slope = b.unary(UnaryOp::Sin, x);
                        let value = b.mul(g, slope);
                        b.unary(UnaryOp::Neg, value)
                    }
                    UnaryOp::Atan => {
                        let one = b.constant(ty, 1.0);
                        let square = b.mul(x, x);
                        let below = b.add(one, square);
                        b.div(g, below)
                    }
                    UnaryOp::Erf => {
                        let square = b.mul(x, x);
                        let minus = b.unary(UnaryOp::Neg, square);
                        let bell = b.unary(UnaryOp::Exp, minus);
                        let slope = b.constant(ty, ERF_SLOPE);
                        let scaled = b.mul(bell, slope);
                        b.mul(g, scaled)
                    }
                    UnaryOp::Tanh => {
                        let one = b.constant(ty, 1.0);
                        let square = b.mul(y, y);
                        let slope = b.sub(one, square);
                        b.mul(g, slope)
                    }
                    UnaryOp::Sigmoid => {
                        let one = b.constant(ty, 1.0);
                        let rest = b.sub(one, y);
                        let slope = b.mul(y, rest);
                        b.mul(g, slope)
                    }
                    UnaryOp::Sign | UnaryOp::Floor | UnaryOp::Round | UnaryOp::Not => {
                        unreachable!("not on a live path")
                    }
                };
                give(&mut b, a, value);
            }
            Inst::Binary(op, p, q) => {
                let (x, z) = (at(p), at(q));
                let (dx, dz) = binary_gradients(&mut b, op, g, (x, z, y), (wants(p), wants(q)));
                if let Some(value) = dx {
                    give(&mut b, p, value);
                }
                if let Some(value) = dz {
                    give(&mut b, q, value);
                }
            }
            Inst::Select(c, p, q) => {
                let zero = b.constant(ty, 0.0);
                if wants(p) {
                    let value = b.select(at(c), g, zero);
                    give(&mut b, p, value);
                }
                if wants(q) {
                    let value = b.select(at(c), zero, g);
                    give(&mut b, q, value);
                }
            }
            Inst::Convert(a) => {
                let value = b.convert(g, insts[usize::from(a.0)].1);
                give(&mut b, a, value);
            }
            _ => unreachable!("not on a live path"),
        }
    }
    result.map(|reg| b.finish(&[reg]))
}

/// Returns the gradients of both operands of a binary function, each if required.
fn binary_gradients(
    b: &mut Builder,
    op: BinaryOp,
    g: Reg,
    (x, z, y): (Reg, Reg, Reg),
    (needs_x, needs_z): (bool, bool),
) -> (Option<Reg>, Option<Reg>) {
    let ty = b.ty(g);
    let zero = b.constant(ty, 0.0);
    let dx = needs_x.then(|| match op {
        BinaryOp::Add | BinaryOp::Sub | BinaryOp::Rem => g,
        BinaryOp::Mul => b.mul(g, z),
        BinaryOp::Div => b.div(g, z),
        BinaryOp::Pow => {
            let one = b.constant(ty, 1.0);
            let less = b.sub(z, one);
            let power = b.binary(BinaryOp::Pow, x, less);
            let slope = b.mul(power, z);
            let value = b.mul(g, slope);
            let flat = b.compare(CompareOp::Eq, z, zero);
            b.select(flat, zero, value)
        }
        BinaryOp::Min => selected_gradient(b, g, x, z),
        BinaryOp::Max => selected_gradient(b, g, z, x),
        BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => unreachable!("not on a live path"),
    });
    let dz = needs_z.then(|| match op {
        BinaryOp::Add => g,
        BinaryOp::Sub => b.unary(UnaryOp::Neg, g),
        BinaryOp::Mul => b.mul(g, x),
        BinaryOp::Div => {
            let part = b.div(g, z);
            let value = b.mul(part, y);
            b.unary(UnaryOp::Neg, value)
        }
        BinaryOp::Rem => {
            // x - y is z times the truncated quotient.
            let multiple = b.sub(x, y);
            let quotient = b.div(multiple, z);
            let value = b.mul(g, quotient);
            b.unary(UnaryOp::Neg, value)
        }
        BinaryOp::Pow => {
            let log = b.unary(UnaryOp::Log, x);
            let slope = b.mul(y, log);
            let value = b.mul(g, slope);
            let at_zero = b.compare(CompareOp::Eq, x, zero);
            let upward = b.compare(CompareOp::Le, zero, z);
            let flat = b.binary(BinaryOp::And, at_zero, upward);
            b.select(flat, zero, value)
        }
        BinaryOp::Min => selected_gradient(b, g, z, x),
        BinaryOp::Max => selected_gradient(b, g, x, z),
        BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => unreachable!("not on a live path"),
    });
    (dx, dz)
}

/// Returns the gradient of the operand that is selected where `low < high`: all of it there, half of it at ties.
fn selected_gradient(b: &mut Builder, g: Reg, low: Reg, high: Reg) -> Reg {
    let ty = b.ty(g);
    let (zero, half) = (b.constant(ty, 0.0), b.constant(ty, 0.5));
    let halved = b.mul(g, half);
    let chosen = b.compare(CompareOp::Lt, low, high);
    let tied = b.compare(CompareOp::Eq, low, high);
    let lone = b.select(chosen, g, zero);
    b.select(tied, halved, lone)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expr::Evaluation;
    use crate::{Mode, RunScalar, Scalar, Type};

    /// Maximum relative difference between the derivative and a central difference in f64: the error of the difference.
    const DIFFERENCE_TOLERANCE: f64 = 1e-7;
    const STEP: f64 = 1e-6;

    struct Loads<'a>(&'a [f64]);

    impl Evaluation for Loads<'_> {
        fn load(&mut self, slot: usize) -> Scalar {
            Scalar::F64(self.0[slot])
        }
        fn load_at(&mut self, _: usize, _: i64) -> Scalar {
            unreachable!()
        }
        fn coordinate(&mut self, _: usize) -> i64 {
            0
        }
        fn run_scalar(&mut self, _: RunScalar) -> u64 {
            0
        }
        fn reduced(&mut self, _: usize) -> Scalar {
            unreachable!()
        }
    }

    fn eval(expr: &Expr, loads: &[f64]) -> f64 {
        expr.evaluate(Mode::Exact, &mut Loads(loads)).expect("nothing is guarded")[0].to_f64()
    }

    fn check_against_differences(points: &[[f64; 2]], build: impl Fn(&mut Builder, Reg, Reg) -> Reg) {
        let mut b = Builder::new();
        let (x, z) = (b.load(0, Type::F64), b.load(1, Type::F64));
        let y = build(&mut b, x, z);
        let expr = b.finish(&[y]);
        for point in points {
            for slot in 0..2 {
                let y = eval(&expr, point);
                let got = derive(&expr, 2, slot).map_or(0.0, |d| eval(&d, &[point[0], point[1], y, 1.0]));
                let (mut up, mut down) = (*point, *point);
                up[slot] += STEP;
                down[slot] -= STEP;
                let expected = (eval(&expr, &up) - eval(&expr, &down)) / (2.0 * STEP);
                let gap = (got - expected).abs() / expected.abs().max(1.0);
                assert!(gap < DIFFERENCE_TOLERANCE, "{expr} at {point:?}, load {slot}: {got} but {expected}");
            }
        }
    }

    const POINTS: [[f64; 2]; 4] = [[0.7, 1.3], [1.9, 0.4], [0.2, 2.5], [3.1, 1.1]];

    #[test]
    fn unary_functions() {
        use UnaryOp::{
            Abs, Atan, Cos, Erf, Exp, Floor, Log, Neg, Round, Rsqrt, Sigmoid, Sign, Sin, Sqrt, Tanh,
        };
        for op in [Neg, Abs, Sign, Exp, Log, Sqrt, Rsqrt, Sin, Cos, Atan, Erf, Tanh, Sigmoid, Floor, Round] {
            check_against_differences(&POINTS, |b, x, _| b.unary(op, x));
            // As part of a larger expression, in which the function's value is not the result.
            check_against_differences(&POINTS, |b, x, z| {
                let inner = b.unary(op, x);
                b.mul(inner, z)
            });
        }
    }

    #[test]
    fn rounding_lets_gradients_through() {
        for (op, rounded) in [(UnaryOp::ToF16, 0.099_975_586), (UnaryOp::ToBf16, 0.100_097_656)] {
            let mut b = Builder::new();
            let (x, z) = (b.load(0, Type::F32), b.load(1, Type::F32));
            let factor = b.unary(op, x);
            let y = b.mul(factor, z);
            let expr = b.finish(&[y]);
            let at = |slot| {
                let slope = derive(&expr, 2, slot).expect("it depends on both");
                eval(&slope, &[0.1, 3.0, 0.0, 1.0])
            };
            assert_eq!((at(0), at(1)), (3.0, f64::from(rounded as f32)), "{op:?}");
        }
    }

    #[test]
    fn binary_functions() {
        use BinaryOp::{Add, Div, Max, Min, Mul, Pow, Rem, Sub};
        for op in [Add, Sub, Mul, Div, Pow, Min, Max, Rem] {
            check_against_differences(&POINTS, |b, x, z| b.binary(op, x, z));
            check_against_differences(&POINTS, |b, x, z| {
                let inner = b.binary(op, x, z);
                b.binary(op, inner, x)
            });
        }
    }

    #[test]
    fn selection_does_not_leak_nan() {
        let mut b = Builder::new();
        let x = b.load(0, Type::F64);
        let zero = b.constant(Type::F64, 0.0);
        let positive = b.compare(CompareOp::Lt, zero, x);
        let log = b.unary(UnaryOp::Log, x);
        let y = b.select(positive, log, zero);
        let expr = b.finish(&[y]);
        let d = derive(&expr, 1, 0).expect("it depends on x");
        assert_eq!(eval(&d, &[2.0, 0.0, 1.0]), 0.5);
        // In the branch not taken, the outgoing gradient is a selected zero divided by x.
        assert_eq!(eval(&d, &[-2.0, 0.0, 1.0]), 0.0);
    }

    #[test]
    fn power_at_zero() {
        let mut b = Builder::new();
        let (x, z) = (b.load(0, Type::F64), b.load(1, Type::F64));
        let y = b.binary(BinaryOp::Pow, x, z);
        let expr = b.finish(&[y]);
        let (dx, dz) = (derive(&expr, 2, 0).expect("base"), derive(&expr, 2, 1).expect("exponent"));
        assert_eq!(eval(&dx, &[0.0, 0.0, 1.0, 1.0]), 0.0);
        assert_eq!(eval(&dz, &[0.0, 2.0, 0.0, 1.0]), 0.0);
    }
}
