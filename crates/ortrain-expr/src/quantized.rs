//! Matrices of packed integers: bytes that hold several integers each, with a scale for each block of them.

use crate::DType;
use crate::nest::Access;

/// Numbers that the integers of a [`QuantizedMatrix`] stand for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum QuantizedNumbers {
    /// An integer stands for its distance from a zero point. The matrix has either one zero point, or a zero point for
    /// each block in a buffer.
    Distances {
        /// Zero point without a buffer of zero points.
        zero_point: f32,
    },
    /// An integer of four bits stands for a number of a table.
    Table([f32; 16]),
}

/// Layout of a matrix of packed integers, line by line.
///
/// A line consists of blocks of adjacent elements. Each block has a scale, and possibly a zero point. The element of
/// integer `q` is `(q - zero point) * scale` or `table[q] * scale`, in float32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QuantizedMatrix {
    /// Bits of an integer: 2, 4 or 8.
    pub bits: usize,
    /// True if the first of several integers in a byte has the highest bits.
    pub is_high_first: bool,
    /// Number of elements of a block: a multiple of [`QuantizedMatrix::GROUP`].
    pub block: usize,
    /// Number of blocks of a line.
    pub blocks: usize,
    /// Number of lines.
    pub lines: usize,
    /// Meaning of the integers.
    pub numbers: QuantizedNumbers,
}

impl QuantizedMatrix {
    /// Number of elements that kernels decode at once.
    pub const GROUP: usize = 16;

    /// Returns the number of elements of a line.
    #[must_use]
    pub fn line_len(&self) -> usize {
        self.block.saturating_mul(self.blocks)
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.line_len().saturating_mul(self.lines)
    }

    /// Returns true if the matrix has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of bytes.
    #[must_use]
    pub fn num_bytes(&self) -> usize {
        self.len() / self.integers_per_byte()
    }

    /// Returns the number of scales, and of zero points in a buffer.
    #[must_use]
    pub fn num_blocks(&self) -> usize {
        self.blocks.saturating_mul(self.lines)
    }

    /// Returns the number of integers of a byte.
    #[must_use]
    pub fn integers_per_byte(&self) -> usize {
        8 / self.bits
    }

    /// Returns the number of the lowest bit of element `position` inside its byte.
    #[must_use]
    pub fn shift(&self, position: usize) -> usize {
        let per_byte = self.integers_per_byte();
        let at = position % per_byte;
        self.bits * if self.is_high_first { per_byte - 1 - at } else { at }
    }

    /// Returns the integer of element `position` from its byte.
    #[must_use]
    pub fn integer(&self, byte: u8, position: usize) -> u8 {
        (byte >> self.shift(position)) & (u8::MAX >> (8 - self.bits))
    }

    /// Returns the element of an integer.
    #[must_use]
    pub fn element(&self, integer: u8, scale: f32, zero_point: Option<f32>) -> f32 {
        match self.numbers {
            QuantizedNumbers::Distances { zero_point: own } => {
                (f32::from(integer) - zero_point.unwrap_or(own)) * scale
            }
            QuantizedNumbers::Table(numbers) => numbers[usize::from(integer & 15)] * scale,
        }
    }

    /// Returns the elements as an access over `[line, element]`, or over `[element, line]` if `is_transposed`. The type
    /// of the access is the type of the decoded elements.
    #[must_use]
    pub fn access(&self, is_transposed: bool) -> Access {
        let mut access = Access::contiguous(DType::F32, &[self.lines, self.line_len()]);
        if is_transposed {
            access.strides.swap(0, 1);
        }
        access
    }

    /// Returns the first fault of the layout.
    #[must_use]
    pub fn validate(&self) -> Option<String> {
        let QuantizedMatrix { bits, block, .. } = *self;
        if !matches!(bits, 2 | 4 | 8) {
            return Some(format!("integers of {bits} bits are not supported"));
        }
        if block == 0 || !block.is_multiple_of(QuantizedMatrix::GROUP) {
            return Some(format!(
                "a block of {block} elements is not a multiple of {}",
                QuantizedMatrix::GROUP
            ));
        }
        let has_table = matches!(self.numbers, QuantizedNumbers::Table(_));
        (has_table && bits != 4).then(|| format!("integers of {bits} bits cannot select from a table of 16"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_of_a_byte_have_either_order() {
        let numbers = QuantizedNumbers::Distances { zero_point: 8.0 };
        let low_first =
            QuantizedMatrix { bits: 4, is_high_first: false, block: 16, blocks: 1, lines: 2, numbers };
        let high_first = QuantizedMatrix { is_high_first: true, ..low_first };
        assert_eq!([0, 1].map(|at| low_first.integer(0xa3, at)), [3, 10]);
        assert_eq!([0, 1].map(|at| high_first.integer(0xa3, at)), [10, 3]);
        let two = QuantizedMatrix { bits: 2, ..low_first };
        assert_eq!([0, 1, 2, 3].map(|at| two.integer(0b11_10_01_00, at)), [0, 1, 2, 3]);
        assert_eq!((low_first.num_bytes(), two.num_bytes(), low_first.num_blocks()), (16, 8, 2));
    }

    #[test]
    fn elements_are_scaled_distances_or_scaled_numbers_of_a_table() {
        let numbers = QuantizedNumbers::Distances { zero_point: 8.0 };
        let matrix =
            QuantizedMatrix { bits: 4, is_high_first: false, block: 32, blocks: 1, lines: 1, numbers };
        assert_eq!(matrix.element(10, 0.5, None), 1.0);
        assert_eq!(matrix.element(10, 0.5, Some(4.0)), 3.0);
        let table = std::array::from_fn(|i| i as f32 / 4.0);
        let table = QuantizedMatrix { numbers: QuantizedNumbers::Table(table), ..matrix };
        assert_eq!(table.element(2, 3.0, None), 1.5);
    }

    #[test]
    fn faulty_layouts_are_named() {
        let numbers = QuantizedNumbers::Table([0.0; 16]);
        let matrix =
            QuantizedMatrix { bits: 4, is_high_first: false, block: 32, blocks: 1, lines: 1, numbers };
        assert_eq!(matrix.validate(), None);
        let fault = |matrix: QuantizedMatrix| matrix.validate().unwrap_or_default();
        assert!(fault(QuantizedMatrix { bits: 3, ..matrix }).contains("3 bits"));
        assert!(fault(QuantizedMatrix { bits: 8, ..matrix }).contains("table"));
        assert!(fault(QuantizedMatrix { block: 24, ..matrix }).contains("24"));
    }
}
