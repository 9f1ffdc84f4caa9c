//! Decoding of packed integers: kernels read a quantized operand piece by piece, as floats in scratch memory.

use ortrain_expr::{QuantizedMatrix, QuantizedNumbers};

use crate::isa::{Isa, Level, PackedBlocks, Work};

/// Number of elements that a level decodes at once.
const GROUP: usize = QuantizedMatrix::GROUP;

/// Packed integers of an operand, among the buffers of a product.
#[derive(Clone, Copy, Debug)]
pub(super) struct QuantizedSlots {
    pub(super) matrix: QuantizedMatrix,
    /// Indices of the buffers of scales and of zero points.
    pub(super) scales: usize,
    pub(super) zero_points: Option<usize>,
}

impl QuantizedSlots {
    /// Returns the addresses of the integers and their blocks. `slot` is the buffer of the integers.
    pub(super) fn source(&self, slot: usize, bases: &[*mut u8]) -> QuantizedSource {
        QuantizedSource {
            matrix: self.matrix,
            bytes: bases[slot].cast_const(),
            scales: bases[self.scales].cast_const().cast(),
            zero_points: self.zero_points.map(|slot| bases[slot].cast_const().cast()),
        }
    }
}

/// Addresses of packed integers and of the scale and zero point of each block.
#[derive(Clone, Copy)]
pub(super) struct QuantizedSource {
    matrix: QuantizedMatrix,
    bytes: *const u8,
    scales: *const f32,
    zero_points: Option<*const f32>,
}

/// Numbers that the values of four bits stand for, before the scale, and the zero point of a matrix without a buffer of
/// zero points. Numbers of two bits repeat.
#[derive(Clone, Copy)]
pub(super) struct Numbers([f32; GROUP], f32);

impl Numbers {
    pub(super) fn of(matrix: &QuantizedMatrix) -> Numbers {
        match matrix.numbers {
            QuantizedNumbers::Distances { zero_point } => {
                let mask = u16::MAX >> (16 - matrix.bits);
                Numbers(std::array::from_fn(|i| f32::from(i as u16 & mask)), zero_point)
            }
            QuantizedNumbers::Table(numbers) => Numbers(numbers, 0.0),
        }
    }
}

impl QuantizedSource {
    /// Describes the blocks of a line from a block of the matrix on.
    pub(super) fn blocks_from<'a>(&self, first: usize, numbers: &'a Numbers) -> PackedBlocks<'a> {
        let QuantizedSource { matrix, bytes, scales, zero_points } = *self;
        let Numbers(table, zero_point) = numbers;
        let bytes_of_block = matrix.block * matrix.bits / 8;
        PackedBlocks {
            bits: matrix.bits,
            is_high_first: matrix.is_high_first,
            bytes: bytes.wrapping_add(first * bytes_of_block),
            blocks: matrix.blocks,
            block: matrix.block,
            numbers: table,
            scales: scales.wrapping_add(first),
            zero_points: zero_points.map_or(&raw const *zero_point, |at| at.wrapping_add(first)),
            zero_point_step: usize::from(zero_points.is_some()),
        }
    }
}

/// Rows of adjacent elements to decode.
#[derive(Clone, Copy)]
pub(super) struct DecodedRows {
    /// Position of the first element, and the step from row to row.
    pub(super) first: usize,
    pub(super) step: usize,
    /// Number of rows, and of elements of each row.
    pub(super) rows: usize,
    pub(super) len: usize,
}

struct Decode {
    source: QuantizedSource,
    rows: DecodedRows,
    to: *mut f32,
}

/// Decodes rows into adjacent rows at `to`.
///
/// # Safety
/// The positions are elements of the matrix, and elements of a row belong to one line. The addresses of the source are
/// valid for reads of the whole matrix. `to` is valid for writes of `rows * len` elements.
pub(super) unsafe fn decode(isa: Isa, source: QuantizedSource, rows: DecodedRows, to: *mut f32) {
    isa.run(Decode { source, rows, to });
}

impl Decode {
    /// Decodes `len` adjacent elements of one line from `first` on. `packed` describes the first element of the matrix.
    ///
    /// # Safety
    /// The contract of [`decode`].
    #[inline(always)]
    unsafe fn row<L: Level>(&self, packed: &PackedBlocks<'_>, first: usize, len: usize, to: *mut f32) {
        let whole = packed.block;
        let run = |position: usize, blocks: usize, block: usize, to: *mut f32| {
            let at = position / whole;
            let part = PackedBlocks {
                bytes: packed.bytes.wrapping_add(position * packed.bits / 8),
                scales: packed.scales.wrapping_add(at),
                zero_points: packed.zero_points.wrapping_add(at * packed.zero_point_step),
                blocks,
                block,
                ..*packed
            };
            // SAFETY: the contract of `decode`.
            unsafe { L::decode_blocks(&part, to) };
        };
        let end = first + len;
        let mut position = first;
        while position < end {
            let target = to.wrapping_add(position - first);
            if position.is_multiple_of(whole) && end - position >= whole {
                let blocks = (end - position) / whole;
                run(position, blocks, whole, target);
                position += blocks * whole;
                continue;
            }
            // A part of one block: whole groups, or a part of a group, which is decoded elsewhere.
            let block_end = (position - position % whole + whole).min(end);
            let (before, groups) = (position % GROUP, (block_end - position) / GROUP);
            if before == 0 && groups > 0 {
                run(position, 1, groups * GROUP, target);
                position += groups * GROUP;
                continue;
            }
            let mut group = [0.0; GROUP];
            run(position - before, 1, GROUP, group.as_mut_ptr());
            let count = (GROUP - before).min(block_end - position);
            let part = group.as_ptr().wrapping_add(before);
            // SAFETY: the contract of `decode`; the elements belong to the group.
            unsafe { std::ptr::copy_nonoverlapping(part, target, count) };
            position += count;
        }
    }
}

impl Work for Decode {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let DecodedRows { first, step, rows, len } = self.rows;
        let numbers = Numbers::of(&self.source.matrix);
        let packed = self.source.blocks_from(0, &numbers);
        for row in 0..rows {
            // SAFETY: the contract of `decode`.
            unsafe { self.row::<L>(&packed, first + row * step, len, self.to.wrapping_add(row * len)) };
        }
    }
}
