//! Types and values in printed code.

use ortrain_expr::Type;

/// Type of a printed value. Storage-only types are not included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Repr {
    /// 32-bit float.
    F32,
    /// 32-bit signed integer; also a 64-bit integer that provably fits.
    I32,
    /// 32-bit unsigned integer.
    U32,
    /// Boolean.
    Bool,
    /// 64-bit signed integer: a pair of words in a language without it. Library functions compute with it.
    I64,
    /// 64-bit unsigned integer, like [`Repr::I64`].
    U64,
    /// 64-bit float: a pair of words with its bits in a language without it. Library functions compute with it.
    F64,
    /// Two 32-bit floats, `NAME.x` and `NAME.y`. Sums, and products with a float, are written as for scalars.
    F32x2,
    /// Four 32-bit floats, with `NAME.z` and `NAME.w` in addition.
    F32x4,
}

impl Repr {
    /// Returns the type of `count` floats: 2 or 4.
    ///
    /// # Panics
    /// For any other count.
    #[must_use]
    pub fn floats(count: usize) -> Repr {
        match count {
            2 => Repr::F32x2,
            4 => Repr::F32x4,
            _ => unreachable!("vectors of floats have 2 or 4 elements, got {count}"),
        }
    }

    /// Returns the bytes of a value in a shared array.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Repr::F32x4 => 16,
            Repr::I64 | Repr::U64 | Repr::F64 | Repr::F32x2 => 8,
            _ => 4,
        }
    }

    /// Returns true for an integer of 64 bits.
    #[must_use]
    pub fn is_pair(self) -> bool {
        matches!(self, Repr::I64 | Repr::U64)
    }
}

/// Returns the printed type of a type with unknown range.
pub(crate) fn repr_of(ty: Type) -> Repr {
    match ty {
        Type::F32 => Repr::F32,
        Type::F64 => Repr::F64,
        Type::I32 => Repr::I32,
        Type::I64 => Repr::I64,
        Type::U32 => Repr::U32,
        Type::U64 => Repr::U64,
        Type::Bool => Repr::Bool,
    }
}

/// Returns a type with this printed type.
pub(crate) fn type_of(repr: Repr) -> Type {
    match repr {
        Repr::F32 | Repr::F32x2 | Repr::F32x4 => Type::F32,
        Repr::I32 => Type::I32,
        Repr::U32 => Type::U32,
        Repr::Bool => Type::Bool,
        Repr::I64 => Type::I64,
        Repr::U64 => Type::U64,
        Repr::F64 => Type::F64,
    }
}

/// Printed value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Value {
    pub(crate) text: String,
    pub(crate) repr: Repr,
}

impl Value {
    pub(crate) fn new(text: impl Into<String>, repr: Repr) -> Value {
        Value { text: text.into(), repr }
    }
}

/// Returns the word of a value that is stored in one word.
pub(crate) fn word_of(value: &Value) -> String {
    let text = &value.text;
    match value.repr {
        Repr::F32 => format!("bits_of({text})"),
        Repr::I32 => format!("bits_of_int({text})"),
        _ => text.clone(),
    }
}
