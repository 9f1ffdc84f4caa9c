//! Description of a convolution.

use ortrain_expr::{ConvShape, DType, Nest};

use crate::gemm::Products;

/// A convolution, or the gradient of one.
#[derive(Clone, Debug)]
pub struct ConvDesc {
    /// The computed pass, and the sizes.
    pub shape: ConvShape,
    /// Element type of operand A ([`ConvShape::operands`]).
    pub a: DType,
    /// Element type of operand B.
    pub b: DType,
    /// Zero points of operands of bytes, which are of the type of the operand: their number for A (1) and for B (1, or
    /// the number of channels of the result).
    pub zero_points: [Option<usize>; 2],
    /// Precision and instructions of the products inside of sums.
    pub products: Products,
    /// Computation on the result, over the dimensions of the result. The result is the accumulator of this nest: an
    /// `F32`, an `F64` if both operands are `F64`, or an `I32` of bytes.
    pub epilogue: Nest,
}
