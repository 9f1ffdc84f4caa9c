//! Windows of 3×3 that move by one place, by Winograd's F(2×2, 3×3), which makes four results with sixteen
//! multiplications for each channel instead of thirty-six (S. Winograd, Arithmetic Complexity of Computations, 1980;
//! A. Lavin and S. Gray, Fast Algorithms for Convolutional Neural Networks, 2016).
//!
//! The result is covered by tiles of 2×2 places. What a tile sees, 4×4 places, becomes sixteen values for each channel,
//! and so does a filter's plane, both by sums, differences and halves alone, which cost little accuracy (see the test of
//! errors). Each of the sixteen is a product of matrices of its own: channels of the result by channels of a sum, by
//! tiles. The sixteen sums of a tile become its four results. In the gradient of the filter the sums run over tiles, and
//! the sixteen sums of two channels become the nine of a filter's plane.

mod filter;
mod result;
mod transform;

use ortrain_expr::{DType, SlidingAxis};

use super::ConvDesc;
pub(super) use filter::WinogradFilter;
pub(super) use result::Winograd;

/// Values of a tile, and of a filter's plane.
const POINTS: usize = 16;
/// Taps of a window.
const TAPS: usize = 9;
/// Tiles, or rows of a panel of weights, that are transformed at once.
const LANES: usize = 8;
/// Columns of tiles beyond which blocks of whole rows would be too large.
const WIDE: usize = 256;

/// The two axes, if windows are such, and images not too wide.
fn axes(desc: &ConvDesc) -> Option<[SlidingAxis; 2]> {
    let &[rows, cols] = desc.shape.axes.as_slice() else { return None };
    let plain = [rows, cols].iter().all(|axis| (axis.kernel, axis.stride, axis.dilation) == (3, 1, 1));
    let single = desc.a == DType::F32 && desc.b == DType::F32 && desc.shape.groups == 1;
    (plain && single && cols.input.max(cols.output) <= 2 * WIDE).then_some([rows, cols])
}
