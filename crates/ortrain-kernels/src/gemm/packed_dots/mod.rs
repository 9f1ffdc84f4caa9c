//! Dot products of few rows with lines of packed integers, which are decoded in registers.
//!
//! The order of the lanes of a register differs from the order of the elements, because one shift then unpacks a
//! register of integers. The rows are rearranged once into the same order.

#[cfg(target_arch = "x86_64")]
mod avx512;
mod block;

use block::parts;
pub(super) use block::{LANES, MAX_ROWS, PackedDots};

use crate::isa::{Isa, Kind};

/// Returns true if the level decodes integers in registers.
pub(super) fn has_packed_dots(isa: Isa) -> bool {
    match isa.kind() {
        #[cfg(target_arch = "x86_64")]
        Kind::Avx512 => true,
        _ => false,
    }
}

/// Returns the element of a group that each lane of a register holds.
pub(super) fn order_of_lanes(bits: usize, is_high_first: bool) -> [usize; LANES] {
    std::array::from_fn(|lane| match bits {
        // Lanes alternate between two words of eight integers.
        4 => lane % 2 * 8 + ((lane / 2) ^ usize::from(is_high_first)),
        _ => lane,
    })
}

/// Rearranges rows of `k` elements: the rows of a part follow each other register by register, in the order of the lanes.
pub(super) fn rearrange(rows: &[f32], k: usize, order: &[usize; LANES], to: &mut [f32]) {
    for (first, count) in parts(rows.len() / k) {
        let part = first * k..(first + count) * k;
        let to = to[part.clone()].as_chunks_mut::<LANES>().0;
        for (m, row) in rows[part].chunks_exact(k).enumerate() {
            for (group, to) in row.as_chunks::<LANES>().0.iter().zip(to.iter_mut().skip(m).step_by(count)) {
                *to = order.map(|at| group[at]);
            }
        }
    }
}

/// Computes the dot products of all rows and lines.
///
/// # Safety
/// The rows and the blocks of all lines are valid for reads, and the destination is valid for writes. The level
/// [has](has_packed_dots) the method.
pub(super) unsafe fn multiply(isa: Isa, dots: &PackedDots<'_>) {
    match isa.kind() {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller's contract; the level has the features.
        Kind::Avx512 => unsafe { avx512::multiply(dots) },
        kind => unreachable!("the level {kind:?} decodes no integers in registers"),
    }
}
