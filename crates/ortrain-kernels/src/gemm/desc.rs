//! Description of a product.

use ortrain_expr::{Access, DType, Nest, Precision, QuantizedMatrix};

use super::arithmetic::Arithmetic;
use super::tiles::Tiles;
use crate::isa::Bf16Unit;

/// Precision and unit of the products inside of sums, for operands in f32 or narrower. Sums are always in f32.
///
/// With [`Precision::F32`] operands are multiplied as they are, without a unit. Otherwise each operand is represented
/// as a sum of one, two or three bfloat16 numbers, which a [`Bf16Unit`] multiplies. The error of a product, relative to
/// the magnitudes of the operands, is at most about 2⁻⁷, 2⁻¹⁵ or 2⁻²⁴. Numbers below the normal range may count as
/// zero. Infinities and NaN give the product of the operands rounded to bfloat16.
///
/// Each element of an operand is rounded once per block of the result, so bfloat16 pays only if elements are used
/// often; see [`Precision::of_product`]. Operands in f64 are always multiplied in f64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Products {
    /// Precision of the factors.
    pub precision: Precision,
    /// Unit that multiplies, unless the precision is [`Precision::F32`].
    pub unit: Bf16Unit,
}

impl Products {
    /// Operands are multiplied as they are.
    pub const F32: Products = Products { precision: Precision::F32, unit: Bf16Unit::EMULATED };

    /// Returns the bfloat16 tiles for products of operands of these types, if the precision needs them.
    pub(super) fn bf16_tiles<T: Arithmetic>(self, dtypes: [DType; 2]) -> Option<Tiles> {
        let rounded = self.precision != Precision::F32 && T::IS_F32;
        rounded.then(|| Tiles::new(self.precision, self.unit, dtypes))
    }
}

/// Packed integers in place of the elements of B.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedRight {
    /// Layout of the integers.
    pub matrix: QuantizedMatrix,
    /// True if each block has a zero point in a buffer.
    pub has_zero_points: bool,
}

impl QuantizedRight {
    /// Returns the first fault of the layout, or of the access to its decoded elements.
    pub(super) fn fault(&self, b: &Access) -> Option<String> {
        let fits = |is_transposed: bool| {
            let whole = self.matrix.access(is_transposed);
            let axes = b.strides.len().saturating_sub(whole.strides.len());
            let is_shared = b.strides[..axes].iter().all(|&stride| stride == 0);
            is_shared
                && b.strides[axes..] == whole.strides[..]
                && (b.dtype, b.offset, b.len) == (whole.dtype, whole.offset, whole.len)
        };
        self.matrix.validate().or_else(|| {
            let len = self.matrix.len();
            (!fits(false) && !fits(true)).then(|| {
                format!(
                    "the access {:?} to {} elements of {len} packed integers",
                    b.strides.as_slice(),
                    b.len
                )
            })
        })
    }
}

/// Matrix product, or a batch of matrix products.
///
/// The space is the space of the epilogue: batch axes, then m, then n. Transposed operands are expressed by strides.
#[derive(Clone, Debug)]
pub struct GemmDesc {
    /// Length of the sums.
    pub k: usize,
    /// A, over the batch axes, m and k.
    pub a: Access,
    /// B, over the batch axes, k and n. If B is quantized, the access describes its decoded elements, of type `F32`.
    pub b: Access,
    /// Packed integers of B.
    pub quantized: Option<QuantizedRight>,
    /// Zero points of operands of bytes: over the space of the operand, constant along k, and of its type.
    pub zero_points: [Option<Access>; 2],
    /// 16-bit float to which the elements of each operand (then `F32`) are rounded before the multiplication. The
    /// results equal the results for an operand stored in that type.
    pub rounded_to: [Option<DType>; 2],
    /// Precision and unit of the products inside of the sums.
    pub products: Products,
    /// Epilogue. Its accumulator is the product: an `F32`, an `F64` if both operands are, or an `I32` of bytes.
    pub epilogue: Nest,
}
