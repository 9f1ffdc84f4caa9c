//! Sizes and costs that the passes of Winograd share.

use ortrain_expr::{DType, SlidingAxis};

use crate::conv::desc::ConvDesc;
use crate::conv::engine::Request;
use crate::gemm::levels::Real;

/// Number of values of a tile, and of a filter's plane.
pub(super) const POINTS: usize = 16;

/// Number of taps of a window.
pub(super) const TAPS: usize = 9;

/// Number of tiles, or of rows of a panel of weights, that are transformed at once.
pub(super) const LANES: usize = 8;

/// Costs of the transforms, relative to a multiplication of all [`POINTS`] values: for a tile and a channel of the
/// tensor with tiles, for a tile and a channel of the other tensor, and for a filter's plane. They were measured with
/// multiplications of [`LANES`] values at once. Wider vectors speed up transforms less than multiplications.
pub(super) struct Costs(pub(super) [usize; 3]);

impl Costs {
    /// Returns true if tiles are surely less work than sums. `channels`: channels of the tensor with tiles; `others`: channels
    /// of the other tensor. Panels of products have `columns` columns.
    pub(super) fn favour_tiles(
        &self,
        tiles: usize,
        positions: usize,
        [channels, others]: [usize; 2],
        columns: usize,
    ) -> bool {
        let wider = columns.div_ceil(2 * LANES);
        let [of_channel, of_other, of_filter] = self.0.map(|cost| cost * wider);
        // `None` if the costs overflow.
        let costs = || {
            let planes = channels.checked_mul(others)?;
            let multiplied = tiles.checked_mul(planes + of_channel * channels + of_other * others)?;
            let spent = multiplied.checked_add(of_filter * planes)?;
            let plain = (positions.checked_mul(TAPS)? / POINTS).checked_mul(planes)?;
            Some(planes * positions > 0 && spent <= plain)
        };
        costs().unwrap_or(false)
    }
}

/// Returns the step from row to row for rows of at least `elements` elements. An odd number of cache lines avoids cache
/// conflicts between rows.
pub(super) fn row_pitch(elements: usize) -> usize {
    elements.div_ceil(16) / 2 * 2 * 16 + 16
}

/// Returns true if Winograd's algorithm supports the operands and windows of a request.
pub(super) fn is_supported<T: Real>(request: &Request<'_>) -> bool {
    T::BYTES == 4 && request.multiplies_unchanged::<f32>() && supported_axes(request.desc).is_some()
}

/// Returns the two axes, if Winograd's algorithm supports the windows and images are not too wide.
pub(super) fn supported_axes(desc: &ConvDesc) -> Option<[SlidingAxis; 2]> {
    let &[rows, cols] = desc.shape.axes.as_slice() else { return None };
    let plain = [rows, cols].iter().all(|axis| (axis.kernel, axis.stride, axis.dilation) == (3, 1, 1));
    let single = desc.a == DType::F32 && desc.b == DType::F32 && desc.shape.groups == 1;
    (plain && single && cols.input.max(cols.output) <= 2 * MAX_TILE_COLUMNS).then_some([rows, cols])
}

/// Maximum number of columns of tiles. With more, blocks of whole rows would be too large.
pub(super) const MAX_TILE_COLUMNS: usize = 256;
