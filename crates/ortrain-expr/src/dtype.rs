//! Element types.

use std::fmt;

use crate::small::SmallType;

/// Type of the elements of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE 754 single precision.
    F32,
    /// Unsigned 8-bit integer.
    U8,
    /// Signed 8-bit integer.
    I8,
    /// Unsigned 16-bit integer.
    U16,
    /// Signed 16-bit integer.
    I16,
    /// Signed 32-bit integer.
    I32,
    /// Signed 64-bit integer.
    I64,
    /// Boolean, one byte, 0 or 1.
    Bool,
    /// IEEE 754 half precision.
    F16,
    /// IEEE 754 double precision.
    F64,
    /// Unsigned 32-bit integer.
    U32,
    /// Unsigned 64-bit integer.
    U64,
    /// bfloat16: the upper half of a single-precision number.
    BF16,
    /// Type without arithmetic; programs store the code of each element as a byte.
    Small(SmallType),
}

impl DType {
    /// All element types with arithmetic.
    pub const ALL: [DType; 13] = [
        DType::F32,
        DType::U8,
        DType::I8,
        DType::U16,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::Bool,
        DType::F16,
        DType::F64,
        DType::U32,
        DType::U64,
        DType::BF16,
    ];

    /// Returns the element type with this number in ONNX's `TensorProto.DataType`, if the type is supported.
    #[must_use]
    pub fn from_onnx(code: i32) -> Option<DType> {
        let small = SmallType::ALL.into_iter().map(DType::Small);
        DType::ALL.into_iter().chain(small).find(|dtype| dtype.to_onnx() == code)
    }

    /// Returns the name of an unsupported ONNX element type, by its number in `TensorProto.DataType`.
    #[must_use]
    pub fn unsupported_name(code: i32) -> Option<&'static str> {
        Some(match code {
            8 => "string",
            14 => "complex64",
            15 => "complex128",
            _ => return None,
        })
    }

    /// Returns the number of the type in ONNX's `TensorProto.DataType`.
    #[must_use]
    pub fn to_onnx(self) -> i32 {
        match self {
            DType::F32 => 1,
            DType::U8 => 2,
            DType::I8 => 3,
            DType::U16 => 4,
            DType::I16 => 5,
            DType::I32 => 6,
            DType::I64 => 7,
            DType::Bool => 9,
            DType::F16 => 10,
            DType::F64 => 11,
            DType::U32 => 12,
            DType::U64 => 13,
            DType::BF16 => 16,
            DType::Small(small) => small as i32,
        }
    }

    /// Returns the type that programs move instead of a type without arithmetic; other types stay.
    #[must_use]
    pub fn stored(self) -> DType {
        if self.is_small() { DType::U8 } else { self }
    }

    /// Returns true if the type has no arithmetic.
    #[must_use]
    pub fn is_small(self) -> bool {
        matches!(self, DType::Small(_))
    }

    /// Returns the size of an element in memory, in bytes.
    #[must_use]
    pub fn size(self) -> usize {
        match self {
            DType::U8 | DType::I8 | DType::Bool | DType::Small(_) => 1,
            DType::U16 | DType::I16 | DType::F16 | DType::BF16 => 2,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F64 | DType::I64 | DType::U64 => 8,
        }
    }

    /// Returns NumPy's name of the type (`bfloat16` as in `ml_dtypes`).
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            DType::F32 => "float32",
            DType::U8 => "uint8",
            DType::I8 => "int8",
            DType::U16 => "uint16",
            DType::I16 => "int16",
            DType::I32 => "int32",
            DType::I64 => "int64",
            DType::Bool => "bool",
            DType::F16 => "float16",
            DType::F64 => "float64",
            DType::U32 => "uint32",
            DType::U64 => "uint64",
            DType::BF16 => "bfloat16",
            DType::Small(small) => small.name(),
        }
    }

    /// Returns true for floats and integers with arithmetic (`bool` is not a number).
    #[must_use]
    pub fn is_number(self) -> bool {
        self.is_float() || self.is_integer()
    }

    /// Returns true if values of this type can have a gradient.
    #[must_use]
    pub fn is_float(self) -> bool {
        matches!(self, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
    }

    /// Returns true if the type is a signed or unsigned integer with arithmetic (`bool` is not).
    #[must_use]
    pub fn is_integer(self) -> bool {
        !self.is_float() && !self.is_small() && self != DType::Bool
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_round_trip() {
        for dtype in DType::ALL.into_iter().chain(SmallType::ALL.map(DType::Small)) {
            assert_eq!(DType::from_onnx(dtype.to_onnx()), Some(dtype));
        }
        assert_eq!(DType::from_onnx(8), None, "strings are not tensors of numbers");
    }
}
