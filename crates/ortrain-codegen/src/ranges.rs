//! Range analysis of integers: finds 64-bit integers that fit 32 bits.

use ortrain_expr::{Access, BinaryOp, DType, Inst, Nest, ReduceOp, Reg, Scalar, Type, UnaryOp};

use crate::repr::{Repr, repr_of};

/// Range of an integer register. The ranges of floats are not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) low: i128,
    pub(crate) high: i128,
}

impl Range {
    fn new(low: i128, high: i128) -> Range {
        Range { low, high }
    }

    /// Returns the range of all numbers of a type.
    pub(crate) fn of_type(ty: Type) -> Range {
        match ty {
            Type::Bool => Range::new(0, 1),
            Type::I32 => Range::new(i32::MIN.into(), i32::MAX.into()),
            Type::U32 => Range::new(0, u32::MAX.into()),
            Type::U64 => Range::new(0, u64::MAX.into()),
            Type::I64 | Type::F32 | Type::F64 => Range::new(i64::MIN.into(), i64::MAX.into()),
        }
    }

    /// Returns the range of all elements of a type.
    fn of_elements(dtype: DType) -> Range {
        match dtype {
            DType::I8 => Range::new(-128, 127),
            DType::U8 => Range::new(0, 255),
            DType::I16 => Range::new(i16::MIN.into(), i16::MAX.into()),
            DType::U16 => Range::new(0, u16::MAX.into()),
            other => Range::of_type(Type::of(other)),
        }
    }

    fn union(self, other: Range) -> Range {
        Range::new(self.low.min(other.low), self.high.max(other.high))
    }

    fn is_within(self, other: Range) -> bool {
        other.low <= self.low && self.high <= other.high
    }

    /// Returns the range if it fits the type without wrapping, or else the full range of the type.
    fn clamp_to_type(self, ty: Type) -> Range {
        let type_range = Range::of_type(ty);
        if self.is_within(type_range) { self } else { type_range }
    }

    fn corners(self, other: Range, f: impl Fn(i128, i128) -> i128) -> Range {
        let ends =
            [(self.low, other.low), (self.low, other.high), (self.high, other.low), (self.high, other.high)];
        let values = ends.map(|(a, b)| f(a, b));
        let (first, rest) = (values[0], &values[1..]);
        rest.iter().fold(Range::new(first, first), |union, &v| union.union(Range::new(v, v)))
    }

    /// Returns the printed type of a register with this range.
    pub(crate) fn repr(self, ty: Type) -> Repr {
        match ty {
            Type::I64 if self.is_within(Range::of_type(Type::I32)) => Repr::I32,
            other => repr_of(other),
        }
    }
}

/// Returns the ranges of the registers of a nest.
pub(crate) fn ranges<O: AsRef<Access>>(nest: &Nest<O>) -> Vec<Range> {
    let mut known_ranges: Vec<Range> = Vec::with_capacity(nest.expr.insts().len());
    let inner: i128 = nest.inner_dims().iter().map(|&dim| dim as i128).product();
    for &(inst, ty) in nest.expr.insts() {
        let range = if matches!(ty, Type::F32 | Type::F64) {
            Range::of_type(ty)
        } else {
            instruction_range(nest, inner, inst, ty, &known_ranges).clamp_to_type(ty)
        };
        known_ranges.push(range);
    }
    known_ranges
}

fn instruction_range<O: AsRef<Access>>(
    nest: &Nest<O>,
    inner: i128,
    inst: Inst,
    ty: Type,
    known_ranges: &[Range],
) -> Range {
    let of = |reg: Reg| known_ranges[usize::from(reg.0)];
    let type_range = Range::of_type(ty);
    let loaded = |slot: u16| Range::of_elements(nest.loads[usize::from(slot)].dtype()).clamp_to_type(ty);
    match inst {
        Inst::Const(value) => exact_range(value.convert(ty)),
        Inst::Load(slot) => loaded(slot),
        Inst::LoadAt(slot, _) => loaded(slot).union(Range::new(0, 0)),
        Inst::Coordinate(axis) => Range::new(0, (nest.dims[usize::from(axis)] as i128 - 1).max(0)),
        Inst::Run(_) | Inst::Random(..) => type_range,
        Inst::Reduced(k) => reduced(nest, usize::from(k), inner, known_ranges).unwrap_or(type_range),
        Inst::Unary(op, a) => unary(op, of(a)).unwrap_or(type_range),
        Inst::Binary(op, a, b) => binary(op, of(a), of(b)).unwrap_or(type_range),
        Inst::Compare(..) => Range::new(0, 1),
        Inst::Select(_, a, b) => of(a).union(of(b)),
        Inst::Convert(a) if nest.expr.ty(a).is_float() || ty == Type::Bool => type_range,
        Inst::Convert(a) => of(a),
        // After a failed check the run fails.
        Inst::Guard(a, bound) => {
            let high = of(a).high.min(of(bound).high - 1).max(0);
            Range::new(of(a).low.clamp(0, high), high)
        }
    }
}

fn exact_range(value: Scalar) -> Range {
    let value = match value {
        Scalar::U64(v) => i128::from(v),
        other => i128::from(other.to_i64()),
    };
    Range::new(value, value)
}

fn reduced<O>(nest: &Nest<O>, k: usize, inner: i128, known_ranges: &[Range]) -> Option<Range> {
    let reduction = &nest.reductions[k];
    let of = known_ranges.get(usize::from(reduction.value.0))?;
    match reduction.op {
        ReduceOp::Sum => {
            Some(Range::new(of.low.checked_mul(inner)?.min(0), of.high.checked_mul(inner)?.max(0)))
        }
        ReduceOp::Prod | ReduceOp::Max | ReduceOp::Min => None,
    }
}

fn unary(op: UnaryOp, a: Range) -> Option<Range> {
    Some(match op {
        UnaryOp::Neg => Range::new(-a.high, -a.low),
        UnaryOp::Abs if a.low >= 0 => a,
        UnaryOp::Abs => Range::new(0, a.high.max(-a.low)),
        UnaryOp::Sign => Range::new(-1, 1),
        UnaryOp::Floor | UnaryOp::Round => a,
        UnaryOp::Not => Range::new(0, 1),
        _ => return None,
    })
}

fn binary(op: BinaryOp, a: Range, b: Range) -> Option<Range> {
    let positive = a.low >= 0 && b.low >= 0;
    Some(match op {
        BinaryOp::Add => Range::new(a.low + b.low, a.high + b.high),
        BinaryOp::Sub => Range::new(a.low - b.high, a.high - b.low),
        BinaryOp::Mul => {
            let fits = |r: Range| r.low.abs().max(r.high.abs()) < 1 << 62;
            if !fits(a) || !fits(b) {
                return None;
            }
            a.corners(b, |x, y| x * y)
        }
        BinaryOp::Div if b.low > 0 => a.corners(b, |x, y| x / y),
        BinaryOp::Div => {
            let size = a.low.abs().max(a.high.abs());
            Range::new(-size, size)
        }
        BinaryOp::Rem => {
            let size = (b.low.abs().max(b.high.abs()) - 1).max(0).min(a.low.abs().max(a.high.abs()));
            Range::new(if a.low >= 0 { 0 } else { -size }, if a.high <= 0 { 0 } else { size })
        }
        BinaryOp::Min => Range::new(a.low.min(b.low), a.high.min(b.high)),
        BinaryOp::Max => Range::new(a.low.max(b.low), a.high.max(b.high)),
        BinaryOp::And if positive => Range::new(0, a.high.min(b.high)),
        BinaryOp::Or | BinaryOp::Xor if positive => {
            let bits = 128 - a.high.max(b.high).leading_zeros();
            Range::new(0, (1i128 << bits) - 1)
        }
        BinaryOp::And | BinaryOp::Or | BinaryOp::Xor | BinaryOp::Pow => return None,
    })
}

#[cfg(test)]
mod tests {
    use ortrain_expr::{Builder, Dims, Load};

    use super::*;

    fn of(build: impl FnOnce(&mut Builder) -> Reg) -> (Range, Repr) {
        let mut b = Builder::new();
        let result = build(&mut b);
        let expr = b.finish(&[result]);
        let ty = expr.ty(expr.outputs()[0]);
        let of_labels =
            Access { strides: [0, 0].into_iter().collect(), ..Access::contiguous(DType::I64, &[8]) };
        let nest =
            Nest::elementwise(Dims::from_slice(&[3, 70_000]), vec![Load::Buffer(of_labels)], expr, vec![]);
        let range = *ranges(&nest).last().expect("an instruction");
        (range, range.repr(ty))
    }

    #[test]
    fn ranges_follow_from_sizes() {
        let (range, repr) = of(|b| {
            let (row, column) = (b.coordinate(0), b.coordinate(1));
            let size = b.int(70_000);
            let start = b.mul(row, size);
            b.add(start, column)
        });
        assert_eq!((range, repr), (Range::new(0, 209_999), Repr::I32));
    }

    #[test]
    fn loads_are_pairs_until_checked() {
        let label = |b: &mut Builder| b.load(0, Type::I64);
        assert_eq!(of(label).1, Repr::I64);
        let checked = of(|b| {
            let label = label(b);
            b.guard(label, 10)
        });
        assert_eq!(checked, (Range::new(0, 9), Repr::I32));
    }

    /// A float keeps its type even if it is converted from a small integer. The range of an integer converted from it
    /// is unknown.
    #[test]
    fn floats_have_no_range() {
        let double = |b: &mut Builder| {
            let column = b.coordinate(1);
            b.convert(column, Type::F64)
        };
        assert_eq!(of(double), (Range::of_type(Type::F64), Repr::F64));
        let range = of(|b| {
            let value = double(b);
            b.convert(value, Type::I64)
        });
        assert_eq!(range, (Range::of_type(Type::I64), Repr::I64));
    }

    #[test]
    fn wrapping_loses_the_range() {
        let (range, repr) = of(|b| {
            let large = b.int(i64::MAX);
            let column = b.coordinate(1);
            b.add(large, column)
        });
        assert_eq!((range, repr), (Range::of_type(Type::I64), Repr::I64));
    }
}
