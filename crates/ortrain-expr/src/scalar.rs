//! Reference semantics of scalars: slow and obvious code, the oracle for every kernel.

use std::fmt;
use std::hash::{Hash, Hasher};

use crate::{BinaryOp, CompareOp, DType, ReduceOp, Type, UnaryOp};

/// Arithmetic of `F32` values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Every type as declared: for constant folding, computations on the host and comparisons.
    Exact,
    /// `F32` as 64-bit float: the oracle for gradients.
    Widened,
}

/// Typed scalar. Equality and hash compare bits: NaN equals itself, and 0.0 differs from -0.0.
#[derive(Clone, Copy, Debug)]
pub enum Scalar {
    /// 32-bit float.
    F32(f32),
    /// 64-bit float.
    F64(f64),
    /// 32-bit signed integer.
    I32(i32),
    /// 64-bit signed integer.
    I64(i64),
    /// 32-bit unsigned integer.
    U32(u32),
    /// 64-bit unsigned integer.
    U64(u64),
    /// Boolean.
    Bool(bool),
}

impl PartialEq for Scalar {
    fn eq(&self, other: &Scalar) -> bool {
        self.ty() == other.ty() && self.bits() == other.bits()
    }
}

impl Eq for Scalar {}

impl Hash for Scalar {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.ty().hash(state);
        self.bits().hash(state);
    }
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scalar::F32(v) => write!(f, "{v:?}"),
            Scalar::F64(v) => write!(f, "{v:?}"),
            Scalar::I32(v) => write!(f, "{v}"),
            Scalar::I64(v) => write!(f, "{v}"),
            Scalar::U32(v) => write!(f, "{v}"),
            Scalar::U64(v) => write!(f, "{v}"),
            Scalar::Bool(v) => write!(f, "{v}"),
        }
    }
}

/// Applies a macro to the payloads of two scalars of the same numeric type.
macro_rules! numeric {
    ($a:expr, $b:expr, $op:ident, $f:ident) => {
        match ($a, $b) {
            (Scalar::F32(x), Scalar::F32(y)) => Scalar::F32($f!(float x, y)),
            (Scalar::F64(x), Scalar::F64(y)) => Scalar::F64($f!(float x, y)),
            (Scalar::I32(x), Scalar::I32(y)) => Scalar::I32($f!(int x, y)),
            (Scalar::I64(x), Scalar::I64(y)) => Scalar::I64($f!(int x, y)),
            (Scalar::U32(x), Scalar::U32(y)) => Scalar::U32($f!(int x, y)),
            (Scalar::U64(x), Scalar::U64(y)) => Scalar::U64($f!(int x, y)),
            (a, b) => unreachable!("{:?} of {a:?} and {b:?}: expressions are typed", $op),
        }
    };
}

impl Scalar {
    /// Returns the type.
    #[must_use]
    pub fn ty(self) -> Type {
        match self {
            Scalar::F32(_) => Type::F32,
            Scalar::F64(_) => Type::F64,
            Scalar::I32(_) => Type::I32,
            Scalar::I64(_) => Type::I64,
            Scalar::U32(_) => Type::U32,
            Scalar::U64(_) => Type::U64,
            Scalar::Bool(_) => Type::Bool,
        }
    }

    /// Returns the bits, zero-extended to 64.
    #[must_use]
    pub fn bits(self) -> u64 {
        match self {
            Scalar::F32(v) => u64::from(v.to_bits()),
            Scalar::F64(v) => v.to_bits(),
            Scalar::I32(v) => u64::from(v as u32),
            Scalar::I64(v) => v as u64,
            Scalar::U32(v) => u64::from(v),
            Scalar::U64(v) => v,
            Scalar::Bool(v) => u64::from(v),
        }
    }

    /// Converts `value` to `ty`.
    #[must_use]
    pub fn from_f64(ty: Type, value: f64) -> Scalar {
        Scalar::F64(value).convert(ty)
    }

    /// Returns the value as a 64-bit float (64-bit integers are rounded).
    #[must_use]
    pub fn to_f64(self) -> f64 {
        match self {
            Scalar::F32(v) => f64::from(v),
            Scalar::F64(v) => v,
            Scalar::I32(v) => f64::from(v),
            Scalar::I64(v) => v as f64,
            Scalar::U32(v) => f64::from(v),
            Scalar::U64(v) => v as f64,
            Scalar::Bool(v) => f64::from(u8::from(v)),
        }
    }

    /// Returns the value as a 64-bit integer: floats truncate and saturate, unsigned integers wrap.
    #[must_use]
    pub fn to_i64(self) -> i64 {
        match self {
            Scalar::F32(v) => v as i64,
            Scalar::F64(v) => v as i64,
            Scalar::I32(v) => i64::from(v),
            Scalar::I64(v) => v,
            Scalar::U32(v) => i64::from(v),
            Scalar::U64(v) => v as i64,
            Scalar::Bool(v) => i64::from(v),
        }
    }

    /// Converts the value as [`crate::Inst::Convert`] defines.
    #[must_use]
    pub fn convert(self, ty: Type) -> Scalar {
        match ty {
            Type::F32 => Scalar::F32(match self {
                Scalar::F32(v) => v,
                Scalar::I64(v) => v as f32,
                Scalar::U64(v) => v as f32,
                other => other.to_f64() as f32,
            }),
            Type::F64 => Scalar::F64(self.to_f64()),
            Type::I32 => Scalar::I32(match self {
                Scalar::F32(v) => v as i32,
                Scalar::F64(v) => v as i32,
                other => other.to_i64() as i32,
            }),
            Type::I64 => Scalar::I64(self.to_i64()),
            Type::U32 => Scalar::U32(match self {
                Scalar::F32(v) => v as u32,
                Scalar::F64(v) => v as u32,
                other => other.to_i64() as u32,
            }),
            Type::U64 => Scalar::U64(match self {
                Scalar::F32(v) => v as u64,
                Scalar::F64(v) => v as u64,
                other => other.to_i64() as u64,
            }),
            Type::Bool => Scalar::Bool(match self {
                Scalar::F32(v) => v != 0.0,
                Scalar::F64(v) => v != 0.0,
                other => other.bits() != 0,
            }),
        }
    }

    /// Computes `op(a)`.
    ///
    /// # Panics
    /// Panics if `op` is not defined for the type. Expressions are type-checked when they are built.
    #[must_use]
    pub fn unary(op: UnaryOp, a: Scalar) -> Scalar {
        match (op, a) {
            (UnaryOp::Not, Scalar::Bool(v)) => Scalar::Bool(!v),
            (UnaryOp::Neg, Scalar::I32(v)) => Scalar::I32(v.wrapping_neg()),
            (UnaryOp::Neg, Scalar::I64(v)) => Scalar::I64(v.wrapping_neg()),
            (UnaryOp::Neg, Scalar::U32(v)) => Scalar::U32(v.wrapping_neg()),
            (UnaryOp::Neg, Scalar::U64(v)) => Scalar::U64(v.wrapping_neg()),
            (UnaryOp::Abs, Scalar::I32(v)) => Scalar::I32(v.wrapping_abs()),
            (UnaryOp::Abs, Scalar::I64(v)) => Scalar::I64(v.wrapping_abs()),
            (UnaryOp::Sign, Scalar::I32(v)) => Scalar::I32(v.signum()),
            (UnaryOp::Sign, Scalar::I64(v)) => Scalar::I64(v.signum()),
            (UnaryOp::Sign, Scalar::U32(v)) => Scalar::U32(v.min(1)),
            (UnaryOp::Sign, Scalar::U64(v)) => Scalar::U64(v.min(1)),
            (UnaryOp::Abs | UnaryOp::Floor | UnaryOp::Round, Scalar::U32(_) | Scalar::U64(_))
            | (UnaryOp::Floor | UnaryOp::Round, Scalar::I32(_) | Scalar::I64(_))
            // Widened mode does not round, like a store of that mode.
            | (UnaryOp::ToF16 | UnaryOp::ToBf16, Scalar::F64(_)) => a,
            (UnaryOp::ToF16, Scalar::F32(v)) => Scalar::F32(half::f16::from_f32(v).to_f32()),
            (UnaryOp::ToBf16, Scalar::F32(v)) => Scalar::F32(half::bf16::from_f32(v).to_f32()),
            // Rounds the 64-bit result. For Neg, Abs and Sqrt this equals the 32-bit operation.
            (_, Scalar::F32(v)) => Scalar::F32(float_unary(op, f64::from(v)) as f32),
            (_, Scalar::F64(v)) => Scalar::F64(float_unary(op, v)),
            _ => unreachable!("{op:?} of {a:?}: expressions are typed"),
        }
    }

    /// Computes `op(a, b)`.
    ///
    /// # Panics
    /// Panics if `op` is not defined for the types. Expressions are type-checked when they are built.
    #[must_use]
    pub fn binary(op: BinaryOp, a: Scalar, b: Scalar) -> Scalar {
        macro_rules! add {
            (float $x:expr, $y:expr) => {
                $x + $y
            };
            (int $x:expr, $y:expr) => {
                $x.wrapping_add($y)
            };
        }
        macro_rules! sub {
            (float $x:expr, $y:expr) => {
                $x - $y
            };
            (int $x:expr, $y:expr) => {
                $x.wrapping_sub($y)
            };
        }
        macro_rules! mul {
            (float $x:expr, $y:expr) => {
                $x * $y
            };
            (int $x:expr, $y:expr) => {
                $x.wrapping_mul($y)
            };
        }
        macro_rules! div {
            (float $x:expr, $y:expr) => {
                $x / $y
            };
            (int $x:expr, $y:expr) => {
                if $y == 0 { 0 } else { $x.wrapping_div($y) }
            };
        }
        macro_rules! rem {
            (float $x:expr, $y:expr) => {
                $x % $y
            };
            (int $x:expr, $y:expr) => {
                if $y == 0 { 0 } else { $x.wrapping_rem($y) }
            };
        }
        macro_rules! min {
            (float $x:expr, $y:expr) => {
                if $x.is_nan() || $y.is_nan() {
                    $x + $y
                } else if $x <= $y {
                    $x
                } else {
                    $y
                }
            };
            (int $x:expr, $y:expr) => {
                $x.min($y)
            };
        }
        macro_rules! max {
            (float $x:expr, $y:expr) => {
                if $x.is_nan() || $y.is_nan() {
                    $x + $y
                } else if $x >= $y {
                    $x
                } else {
                    $y
                }
            };
            (int $x:expr, $y:expr) => {
                $x.max($y)
            };
        }
        match op {
            BinaryOp::Add => numeric!(a, b, op, add),
            BinaryOp::Sub => numeric!(a, b, op, sub),
            BinaryOp::Mul => numeric!(a, b, op, mul),
            BinaryOp::Div => numeric!(a, b, op, div),
            BinaryOp::Rem => numeric!(a, b, op, rem),
            BinaryOp::Min => numeric!(a, b, op, min),
            BinaryOp::Max => numeric!(a, b, op, max),
            BinaryOp::Pow => match (a, b) {
                (Scalar::F32(x), Scalar::F32(y)) => Scalar::F32(libm::pow(f64::from(x), f64::from(y)) as f32),
                (Scalar::F64(x), Scalar::F64(y)) => Scalar::F64(libm::pow(x, y)),
                (a, b) => Scalar::I64(integer_pow(a.to_i64(), b.to_i64())).convert(a.ty()),
            },
            BinaryOp::And | BinaryOp::Or | BinaryOp::Xor => match (a, b) {
                (Scalar::Bool(x), Scalar::Bool(y)) => Scalar::Bool(match op {
                    BinaryOp::And => x && y,
                    BinaryOp::Or => x || y,
                    _ => x != y,
                }),
                (Scalar::I32(x), Scalar::I32(y)) => Scalar::I32(bitwise(op, x, y)),
                (Scalar::I64(x), Scalar::I64(y)) => Scalar::I64(bitwise(op, x, y)),
                (Scalar::U32(x), Scalar::U32(y)) => Scalar::U32(bitwise(op, x, y)),
                (Scalar::U64(x), Scalar::U64(y)) => Scalar::U64(bitwise(op, x, y)),
                (a, b) => unreachable!("{op:?} of {a:?} and {b:?}: expressions are typed"),
            },
        }
    }

    /// Computes `a op b`.
    ///
    /// # Panics
    /// Panics if the types differ. Expressions are type-checked when they are built.
    #[must_use]
    pub fn compare(op: CompareOp, a: Scalar, b: Scalar) -> Scalar {
        macro_rules! by {
            ($x:expr, $y:expr) => {
                match op {
                    CompareOp::Eq => $x == $y,
                    CompareOp::Lt => $x < $y,
                    CompareOp::Le => $x <= $y,
                }
            };
        }
        Scalar::Bool(match (a, b) {
            (Scalar::F32(x), Scalar::F32(y)) => by!(x, y),
            (Scalar::F64(x), Scalar::F64(y)) => by!(x, y),
            (Scalar::I32(x), Scalar::I32(y)) => by!(x, y),
            (Scalar::I64(x), Scalar::I64(y)) => by!(x, y),
            (Scalar::U32(x), Scalar::U32(y)) => by!(x, y),
            (Scalar::U64(x), Scalar::U64(y)) => by!(x, y),
            (Scalar::Bool(x), Scalar::Bool(y)) => by!(x, y),
            (a, b) => unreachable!("{op:?} of {a:?} and {b:?}: expressions are typed"),
        })
    }

    /// Reads the elements of little-endian bytes.
    #[must_use]
    pub fn read_all(dtype: DType, bytes: &[u8]) -> Vec<Scalar> {
        bytes.chunks_exact(dtype.size()).map(|element| Scalar::read(dtype, element)).collect()
    }

    /// Returns the elements as little-endian bytes.
    #[must_use]
    pub fn to_bytes(dtype: DType, elements: &[Scalar]) -> Vec<u8> {
        let mut bytes = vec![0; elements.len() * dtype.size()];
        for (element, chunk) in elements.iter().zip(bytes.chunks_exact_mut(dtype.size())) {
            element.write(dtype, chunk);
        }
        bytes
    }

    /// Rounds the value as a store to `dtype` rounds it. Widened floats are unchanged.
    #[must_use]
    pub fn rounded_to(self, dtype: DType, mode: Mode) -> Scalar {
        if mode == Mode::Widened && dtype.is_float() {
            return self;
        }
        let mut bytes = [0; 8];
        self.write(dtype, &mut bytes);
        Scalar::read(dtype, &bytes)
    }

    /// Returns the least value that an element of type `dtype` can have, as a scalar of type `ty`.
    #[must_use]
    pub fn lowest_value_of(dtype: DType, ty: Type) -> Scalar {
        match dtype {
            DType::I8 => Scalar::from_f64(ty, f64::from(i8::MIN)),
            DType::I16 => Scalar::from_f64(ty, f64::from(i16::MIN)),
            _ => ReduceOp::Max.neutral(ty),
        }
    }

    /// Reads one little-endian element.
    ///
    /// # Panics
    /// Panics if there are fewer bytes than an element has.
    #[must_use]
    pub fn read(dtype: DType, bytes: &[u8]) -> Scalar {
        macro_rules! le {
            ($t:ty) => {
                <$t>::from_le_bytes(
                    bytes[..size_of::<$t>()].try_into().expect("the slice has the size of the type"),
                )
            };
        }
        match dtype {
            DType::F32 => Scalar::F32(le!(f32)),
            DType::F64 => Scalar::F64(le!(f64)),
            DType::F16 => Scalar::F32(half::f16::from_bits(le!(u16)).to_f32()),
            DType::BF16 => Scalar::F32(half::bf16::from_bits(le!(u16)).to_f32()),
            DType::I8 => Scalar::I32(i32::from(le!(i8))),
            DType::I16 => Scalar::I32(i32::from(le!(i16))),
            DType::I32 => Scalar::I32(le!(i32)),
            DType::I64 => Scalar::I64(le!(i64)),
            DType::U8 | DType::Small(_) => Scalar::U32(u32::from(bytes[0])),
            DType::U16 => Scalar::U32(u32::from(le!(u16))),
            DType::U32 => Scalar::U32(le!(u32)),
            DType::U64 => Scalar::U64(le!(u64)),
            DType::Bool => Scalar::Bool(bytes[0] != 0),
        }
    }

    /// Writes one element in little-endian order: floats round to nearest even, narrow integers wrap.
    ///
    /// # Panics
    /// Panics if there are fewer bytes than an element has.
    pub fn write(self, dtype: DType, bytes: &mut [u8]) {
        let value = self.convert(Type::of(dtype));
        macro_rules! put {
            ($v:expr) => {{
                let le = $v.to_le_bytes();
                bytes[..le.len()].copy_from_slice(&le);
            }};
        }
        match (dtype, value) {
            (DType::F16, Scalar::F32(v)) => put!(half::f16::from_f32(v)),
            (DType::BF16, Scalar::F32(v)) => put!(half::bf16::from_f32(v)),
            (DType::I8, Scalar::I32(v)) => put!((v as i8)),
            (DType::I16, Scalar::I32(v)) => put!((v as i16)),
            (DType::U8 | DType::Small(_), Scalar::U32(v)) => put!((v as u8)),
            (DType::U16, Scalar::U32(v)) => put!((v as u16)),
            (_, Scalar::F32(v)) => put!(v),
            (_, Scalar::F64(v)) => put!(v),
            (_, Scalar::I32(v)) => put!(v),
            (_, Scalar::I64(v)) => put!(v),
            (_, Scalar::U32(v)) => put!(v),
            (_, Scalar::U64(v)) => put!(v),
            (_, Scalar::Bool(v)) => bytes[0] = u8::from(v),
        }
    }
}

fn float_unary(op: UnaryOp, v: f64) -> f64 {
    match op {
        UnaryOp::Neg => -v,
        UnaryOp::Abs => v.abs(),
        UnaryOp::Sign if v == 0.0 || v.is_nan() => v,
        UnaryOp::Sign => v.signum(),
        UnaryOp::Exp => libm::exp(v),
        UnaryOp::Log => libm::log(v),
        UnaryOp::Sqrt => v.sqrt(),
        UnaryOp::Rsqrt => 1.0 / v.sqrt(),
        UnaryOp::Sin => libm::sin(v),
        UnaryOp::Cos => libm::cos(v),
        UnaryOp::Atan => libm::atan(v),
        UnaryOp::Erf => libm::erf(v),
        UnaryOp::Tanh => libm::tanh(v),
        UnaryOp::Sigmoid => 1.0 / (1.0 + libm::exp(-v)),
        UnaryOp::Floor => v.floor(),
        UnaryOp::Round => v.round_ties_even(),
        UnaryOp::Not | UnaryOp::ToF16 | UnaryOp::ToBf16 => {
            unreachable!("{op:?} of a double: expressions are typed")
        }
    }
}

fn bitwise<T>(op: BinaryOp, x: T, y: T) -> T
where
    T: std::ops::BitAnd<Output = T> + std::ops::BitOr<Output = T> + std::ops::BitXor<Output = T>,
{
    match op {
        BinaryOp::And => x & y,
        BinaryOp::Or => x | y,
        _ => x ^ y,
    }
}

fn integer_pow(base: i64, exponent: i64) -> i64 {
    match u32::try_from(exponent) {
        Ok(exponent) => base.wrapping_pow(exponent),
        Err(_) if base == 1 || (base == -1 && exponent % 2 == 0) => 1,
        Err(_) if base == -1 => -1,
        Err(_) => 0,
    }
}

impl ReduceOp {
    /// Returns the neutral element, the initial value of a reduction. Saturates to the least or greatest integer.
    #[must_use]
    pub fn neutral(self, ty: Type) -> Scalar {
        let value = match self {
            ReduceOp::Sum => 0.0,
            ReduceOp::Prod => 1.0,
            ReduceOp::Max => f64::NEG_INFINITY,
            ReduceOp::Min => f64::INFINITY,
        };
        Scalar::from_f64(ty, value)
    }

    /// Combines two values.
    #[must_use]
    pub fn combine(self, a: Scalar, b: Scalar) -> Scalar {
        let op = match self {
            ReduceOp::Sum => BinaryOp::Add,
            ReduceOp::Prod => BinaryOp::Mul,
            ReduceOp::Max => BinaryOp::Max,
            ReduceOp::Min => BinaryOp::Min,
        };
        Scalar::binary(op, a, b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks every 16-bit number, and the f32 numbers around the midpoint between it and the next one. Rounding must
    /// give the value that a load reads after a store.
    #[test]
    fn rounding_equals_a_store_and_a_load() {
        for (op, dtype, dropped) in [(UnaryOp::ToF16, DType::F16, 13), (UnaryOp::ToBf16, DType::BF16, 16)] {
            assert_eq!(UnaryOp::rounding_to(dtype), Some(op));
            for bits in 0..=u16::MAX {
                let Scalar::F32(number) = Scalar::read(dtype, &bits.to_le_bytes()) else { unreachable!() };
                for delta in [0, (1 << (dropped - 1)) - 1, 1 << (dropped - 1), (1 << (dropped - 1)) + 1] {
                    let value = Scalar::F32(f32::from_bits(number.to_bits().wrapping_add(delta)));
                    let mut bytes = [0; 2];
                    value.write(dtype, &mut bytes);
                    assert_eq!(Scalar::unary(op, value), Scalar::read(dtype, &bytes), "{op:?} of {value}");
                }
            }
        }
        assert_eq!(Scalar::unary(UnaryOp::ToF16, Scalar::F32(65520.0)), Scalar::F32(f32::INFINITY));
        assert_eq!(Scalar::unary(UnaryOp::ToF16, Scalar::F64(1e-30)), Scalar::F64(1e-30));
        assert_eq!(UnaryOp::rounding_to(DType::F32), None);
    }
}
