//! Grids of quantized weights: scale, zero point and integers of a block of floats, as onnxruntime's quantizers choose
//! them.
//!
//! Sources: `MatMulNBitsQuantizer`, `MatMulBnb4Quantizer` and `quantize_data` of the package `onnxruntime.quantization`.
//! The arithmetic is float32, in their order, so that bytes and scales are equal.

use ortrain_graph::{DType, Tensor};

use crate::support::quantization_grid::integer_range;

/// Bounds between neighbors of the 16 numbers of 4-bit normal floats: number `i` is between bounds `i - 1` and `i`.
const NF4_BOUNDS: [f32; 15] = [
    -0.848_096_4,
    -0.610_632_9,
    -0.459_995_27,
    -0.339_679_43,
    -0.234_607_4,
    -0.137_911_73,
    -0.045_525_018,
    0.039_790_15,
    0.120_255_25,
    0.203_521_25,
    0.292_013_77,
    0.389_312_54,
    0.501_663_4,
    0.642_786_9,
    0.861_478_4,
];

/// Bounds between neighbors of the absolute values of 4-bit floats, and the codes in the order of their values.
const FP4_BOUNDS: [f32; 7] =
    [0.002_604_17, 0.085_937_5, 0.208_333_33, 0.291_666_67, 0.416_666_7, 0.583_333, 0.833_333_3];
const FP4_CODES: [u8; 8] = [0b000, 0b001, 0b110, 0b111, 0b100, 0b101, 0b010, 0b011];
/// Bit of the sign of a 4-bit float.
const FP4_SIGN: u8 = 0b1000;

/// Numbers of the 4-bit floats of bitsandbytes: sign, two bits of an exponent, one bit of a fraction.
pub(crate) const FP4: [f64; 16] = [
    0.0,
    5.208_333e-3,
    0.666_666_67,
    1.0,
    0.333_333_33,
    0.5,
    0.166_666_67,
    0.25,
    -0.0,
    -5.208_333e-3,
    -0.666_666_67,
    -1.0,
    -0.333_333_33,
    -0.5,
    -0.166_666_67,
    -0.25,
];

/// Numbers of 4-bit normal floats: quantiles of a normal distribution.
pub(crate) const NF4: [f64; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// Table of 4-bit numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NumberTable {
    /// 4-bit floats.
    Fp4,
    /// 4-bit normal floats.
    Nf4,
}

impl NumberTable {
    /// Returns the number of each code, as float32.
    pub(crate) fn numbers(self) -> [f64; 16] {
        let table = match self {
            NumberTable::Nf4 => NF4,
            NumberTable::Fp4 => FP4,
        };
        table.map(|number| f64::from(number as f32))
    }

    /// Returns the code of the nearest number. `x` is from -1 to 1.
    fn code(self, x: f32) -> u8 {
        match self {
            NumberTable::Nf4 => NF4_BOUNDS.partition_point(|&bound| x > bound) as u8,
            NumberTable::Fp4 => {
                let sign = if x < 0.0 { FP4_SIGN } else { 0 };
                FP4_CODES[FP4_BOUNDS.partition_point(|&bound| x.abs() > bound)] + sign
            }
        }
    }

    /// Returns the largest absolute value of a block, and the codes of its elements.
    pub(crate) fn quantize(self, block: &[f32]) -> (f32, Vec<u8>) {
        let largest = block.iter().fold(0.0_f32, |largest, x| largest.max(x.abs()));
        let reciprocal = if largest == 0.0 { 0.0 } else { 1.0 / largest };
        (largest, block.iter().map(|x| self.code(x * reciprocal)).collect())
    }
}

/// Block of a grid of unsigned integers.
pub(crate) struct UnsignedBlock {
    /// Scale as float32.
    pub(crate) scale: f32,
    pub(crate) zero_point: u8,
    pub(crate) codes: Vec<u8>,
}

/// Returns a number rounded to a float type.
fn rounded(dtype: DType, number: f32) -> f32 {
    if dtype == DType::F32 {
        return number;
    }
    Tensor::scalar(dtype, f64::from(number)).to_f64()[0] as f32
}

/// Quantizes a block to unsigned integers of 2, 4 or 8 bits. Without a zero point, the middle of the integers means zero,
/// and the element of the largest absolute value becomes the integer 0. `dtype` is the type of the scale.
pub(crate) fn quantize_unsigned(
    block: &[f32],
    bits: usize,
    has_zero_point: bool,
    dtype: DType,
) -> UnsignedBlock {
    let (middle, largest_code) = ((1u16 << (bits - 1)) as u8, ((1u16 << bits) - 1) as u8);
    let low = block.iter().copied().fold(f32::INFINITY, f32::min);
    let high = block.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let (scale, zero_point) = if has_zero_point {
        let (low, high) = (low.min(0.0), high.max(0.0));
        let scale = (high - low) / f32::from(largest_code);
        let zero = if scale == 0.0 { low } else { 0.0 - low / scale };
        (scale, zero.clamp(0.0, f32::from(largest_code)).round() as u8)
    } else {
        let largest = if high.abs() > low.abs() { high } else { low };
        (-largest / f32::from(middle), middle)
    };
    // The quantizer converts weights of bfloat16 to float32 before, and rounds their scales afterwards.
    let step = if dtype == DType::BF16 { scale } else { rounded(dtype, scale) };
    let reciprocal = if step == 0.0 { 0.0 } else { 1.0 / step };
    let code = |x: &f32| {
        let position = (x * reciprocal + f32::from(zero_point)).round();
        position.clamp(0.0, f32::from(largest_code)) as u8
    };
    UnsignedBlock { scale, zero_point, codes: block.iter().map(code).collect() }
}

/// Grid of the integers of a type.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinearGrid {
    /// Range of the integers that the scale is chosen for.
    low: f64,
    high: f64,
    /// Range of all integers.
    range: (f64, f64),
    has_zero_point: bool,
}

impl LinearGrid {
    /// Returns the grid of an element type; `None` for types other than integers of up to 16 bits.
    pub(crate) fn new(dtype: DType, has_zero_point: bool) -> Option<LinearGrid> {
        let range = integer_range(dtype).filter(|_| dtype != DType::I32)?;
        let is_symmetric = !has_zero_point && matches!(dtype, DType::I8 | DType::I16);
        let low = if is_symmetric { -range.1 } else { range.0 };
        Some(LinearGrid { low, high: range.1, range, has_zero_point })
    }

    /// Returns the scale and the zero point for elements in a range. `dtype` is the type of the scale.
    pub(crate) fn scale(&self, least: f64, greatest: f64, dtype: DType) -> (f64, f64) {
        let (mut least, mut greatest) = (least.min(0.0), greatest.max(0.0));
        if !self.has_zero_point && self.low < 0.0 {
            greatest = greatest.max(-least);
            least = -greatest;
        } else if !self.has_zero_point {
            least = 0.0;
        }
        let scale = (greatest - least) / (self.high - self.low);
        if scale < smallest_normal(dtype) {
            return (1.0, 0.0);
        }
        let zero_point = if self.has_zero_point { (self.low - least / scale).round_ties_even() } else { 0.0 };
        (Tensor::scalar(dtype, scale).to_f64()[0], zero_point)
    }

    /// Returns the integer of an element.
    pub(crate) fn integer(&self, x: f32, scale: f64, zero_point: f64) -> f64 {
        let position = f64::from((x / scale as f32).round_ties_even()) + zero_point;
        position.clamp(self.range.0, self.range.1)
    }
}

/// Returns the smallest normal number of a float type.
fn smallest_normal(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => f64::from(half::f16::MIN_POSITIVE),
        DType::F64 => f64::MIN_POSITIVE,
        _ => f64::from(f32::MIN_POSITIVE),
    }
}

/// Writes integers of a few bits into a row of bytes, the lowest bits first.
pub(crate) fn write_code(row: &mut [u8], at: usize, bits: usize, code: u8) {
    let shift = at * bits % 8;
    let mask = (((1u16 << bits) - 1) as u8) << shift;
    let byte = &mut row[at * bits / 8];
    *byte = *byte & !mask | code << shift & mask;
}

/// Reads an integer that [`write_code`] wrote.
pub(crate) fn read_code(row: &[u8], at: usize, bits: usize) -> u8 {
    row[at * bits / 8] >> (at * bits % 8) & ((1u16 << bits) - 1) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_tables_are_the_nearest_numbers() {
        let (largest, codes) = NumberTable::Nf4.quantize(&[-2.0, -0.0, 0.0, 0.2, 2.0]);
        assert_eq!((largest, codes), (2.0, vec![0, 7, 7, 8, 15]));
        let (largest, codes) = NumberTable::Fp4.quantize(&[-1.0, 0.5, 0.25, 0.0, 1.0]);
        assert_eq!((largest, codes), (1.0, vec![0b1011, 0b101, 0b111, 0, 0b011]));
    }

    #[test]
    fn largest_element_of_a_symmetric_block_is_exact() {
        let block = quantize_unsigned(&[1.0, -4.0, 0.25, 3.9], 4, false, DType::F32);
        assert_eq!((block.scale, block.zero_point, block.codes), (0.5, 8, vec![10, 0, 9, 15]));
        let zeros = quantize_unsigned(&[0.0; 4], 4, false, DType::F32);
        assert_eq!((zeros.scale, zeros.codes), (0.0, vec![8; 4]));
    }

    #[test]
    fn zero_is_exact_with_a_zero_point() {
        let block = quantize_unsigned(&[-1.0, 0.0, 2.0], 4, true, DType::F32);
        assert_eq!((block.zero_point, block.codes), (5, vec![0, 5, 15]));
        let grid = LinearGrid::new(DType::U8, true).expect("integers");
        let (scale, zero_point) = grid.scale(-1.0, 2.0, DType::F32);
        assert_eq!(grid.integer(0.0, scale, zero_point), 85.0);
    }

    #[test]
    fn codes_share_bytes() {
        let mut row = [0xff_u8; 2];
        write_code(&mut row, 1, 4, 0x2);
        assert_eq!((row, read_code(&row, 1, 4), read_code(&row, 3, 4)), ([0x2f, 0xff], 2, 15));
    }
}
