//! Winograd's convolution F(2×2, 3×3), for windows of 3×3 with stride 1. It computes four results with sixteen
//! multiplications for each channel instead of thirty-six (S. Winograd, Arithmetic Complexity of Computations, 1980; A.
//! Lavin and S. Gray, Fast Algorithms for Convolutional Neural Networks, 2016).
//!
//! The result is covered by tiles of 2×2 positions. The 4×4 positions that a tile sees become sixteen values for each
//! channel, and so does a filter's plane. Both transforms use only sums, differences and halves, which cost little
//! accuracy (see the test of errors). Each of the sixteen is a separate matrix product: channels of the result by
//! channels of a sum, by tiles. The sixteen sums of a tile become its four results. In the gradient of the filter the
//! sums run over tiles, and the sixteen sums of two channels become the nine elements of a filter's plane.
//!
//! A tile mixes elements that only some of its results see. So the operands are scanned first. If an operand has an
//! infinite, NaN or huge element, another engine computes the convolution. There each such element affects only the
//! results that see it.

pub(super) mod filter;
pub(super) mod result;
mod shared;
mod transform;

use std::sync::atomic::{AtomicBool, Ordering};

use super::padding_fixup::{MagnitudeScan, SCAN_PIECE};
use crate::isa::Isa;
use crate::pool::Pool;
use crate::scratch::BaseAddresses;

/// Names of the candidates. Their engines support only moderate elements, and are no alternative for other ones.
pub(super) const NAMES: [&str; 2] = [result::NAME, filter::NAME];

/// Smallest magnitude that is huge: below it no transformed product overflows.
const HUGE_MAGNITUDE: f32 = (1u64 << 48) as f32;

/// Returns true if an operand has elements that another engine must process: infinite, NaN or huge ones. `sizes` are the
/// numbers of elements of the operands.
pub(super) fn has_unsupported_elements(
    isa: Isa,
    sizes: [usize; 2],
    bases: &[*mut u8],
    pool: &Pool,
    workers: usize,
) -> bool {
    let odd = AtomicBool::new(false);
    let pieces = sizes.map(|size| size.div_ceil(SCAN_PIECE));
    let operands = BaseAddresses(bases);
    pool.run(pieces[0] + pieces[1], workers, &|piece, _| {
        let operands = &{ operands };
        let (operand, piece) = if piece < pieces[0] { (0, piece) } else { (1, piece - pieces[0]) };
        let len = SCAN_PIECE.min(sizes[operand] - piece * SCAN_PIECE);
        let from = operands.0[operand].cast::<f32>().wrapping_add(piece * SCAN_PIECE).cast_const();
        if isa.run(MagnitudeScan { from, len, threshold_bits: HUGE_MAGNITUDE.to_bits() }) {
            odd.store(true, Ordering::Relaxed);
        }
    });
    odd.into_inner()
}
