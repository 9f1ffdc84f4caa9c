//! Types and operators of scalars.

use crate::DType;

/// Type in which a scalar is computed. `f16` and `bf16` are computed as `F32`, narrow integers as the 32-bit integer of
/// the same signedness.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Type {
    /// 32-bit float.
    F32,
    /// 64-bit float.
    F64,
    /// 32-bit signed integer, wrapping.
    I32,
    /// 64-bit signed integer, wrapping.
    I64,
    /// 32-bit unsigned integer, wrapping.
    U32,
    /// 64-bit unsigned integer, wrapping.
    U64,
    /// Boolean.
    Bool,
}

impl Type {
    /// Returns the type in which elements of `dtype` are computed.
    #[must_use]
    pub fn of(dtype: DType) -> Type {
        match dtype {
            DType::F16 | DType::BF16 | DType::F32 => Type::F32,
            DType::F64 => Type::F64,
            DType::I8 | DType::I16 | DType::I32 => Type::I32,
            DType::I64 => Type::I64,
            DType::U8 | DType::U16 | DType::U32 | DType::Small(_) => Type::U32,
            DType::U64 => Type::U64,
            DType::Bool => Type::Bool,
        }
    }

    /// Returns the element type that stores all bits of a value.
    #[must_use]
    pub fn storage(self) -> DType {
        match self {
            Type::F32 => DType::F32,
            Type::F64 => DType::F64,
            Type::I32 => DType::I32,
            Type::I64 => DType::I64,
            Type::U32 => DType::U32,
            Type::U64 => DType::U64,
            Type::Bool => DType::Bool,
        }
    }

    /// Returns true if the type is a float.
    #[must_use]
    pub fn is_float(self) -> bool {
        matches!(self, Type::F32 | Type::F64)
    }
}

/// Function of one scalar. The result has the argument's type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum UnaryOp {
    /// Negation; wraps for integers.
    Neg,
    /// Absolute value; wraps for integers.
    Abs,
    /// -1, 0 or 1; NaN for NaN.
    Sign,
    /// Natural exponential.
    Exp,
    /// Natural logarithm.
    Log,
    /// Square root.
    Sqrt,
    /// `1 / sqrt(x)`.
    Rsqrt,
    /// Sine of radians.
    Sin,
    /// Cosine of radians.
    Cos,
    /// Inverse tangent, in radians.
    Atan,
    /// Gauss error function.
    Erf,
    /// Hyperbolic tangent.
    Tanh,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// Largest integer that is not greater than the argument.
    Floor,
    /// Nearest integer; of two, the even one. The sign of zero stays.
    Round,
    /// Logical negation.
    Not,
    /// Rounding to the nearest [`DType::F16`], for `F32` only: the value after a store and a load of that type.
    ToF16,
    /// Rounding to the nearest [`DType::BF16`], for `F32` only: the value after a store and a load of that type.
    ToBf16,
}

impl UnaryOp {
    /// Returns the function that rounds to a float narrower than `F32`; `None` for other types.
    #[must_use]
    pub fn rounding_to(dtype: DType) -> Option<UnaryOp> {
        match dtype {
            DType::F16 => Some(UnaryOp::ToF16),
            DType::BF16 => Some(UnaryOp::ToBf16),
            _ => None,
        }
    }
}

/// Function of two scalars of one type, with a result of that type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BinaryOp {
    /// Sum.
    Add,
    /// Difference.
    Sub,
    /// Product.
    Mul,
    /// Quotient. For integers truncated, and 0 if the divisor is 0.
    Div,
    /// Remainder with the sign of the dividend. For integers 0 if the divisor is 0.
    Rem,
    /// Power. For integers wrapping, and 0 for negative exponents unless the base is 1 or -1.
    Pow,
    /// Minimum; NaN if either argument is NaN.
    Min,
    /// Maximum; NaN if either argument is NaN.
    Max,
    /// Logical and; for integers bitwise.
    And,
    /// Logical or; for integers bitwise.
    Or,
    /// Logical exclusive or; for integers bitwise.
    Xor,
}

/// Comparison of two scalars of one type; false if either is NaN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CompareOp {
    /// Equal.
    Eq,
    /// Less.
    Lt,
    /// Less or equal.
    Le,
}

/// Combination of values over the reduced axes, in index order, from a neutral element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Sum, from 0.
    Sum,
    /// Product, from 1.
    Prod,
    /// Maximum, from the least value; NaN wins. Of zeros, any may be the result.
    Max,
    /// Minimum, from the greatest value; NaN wins. Of zeros, any may be the result.
    Min,
}
