//! Strategy for reductions by whole groups, and the split of rows into parts. It depends on sizes alone, so that
//! results have the same bits on every device.

use ortrain_expr::{Access, Inst, Type};
use ortrain_program::Nest;

use crate::dialect::GROUP_SIZE;

/// Maximum length of rows that single invocations reduce.
const MAX_THREAD_ROW: usize = 32;
/// Minimum number of rows that keep a device busy with one group each.
const MIN_BUSY_ROWS: usize = 128;
/// Number of elements of a part of a long row.
const PART_ELEMENTS: usize = 16_384;
/// Minimum number of columns that keep a device busy with one invocation each.
const MIN_BUSY_COLUMNS: usize = 1 << 16;
/// Target number of groups for the split of columns.
const TARGET_GROUPS: usize = 512;
/// Maximum and minimum number of columns of a tile.
const TILE_WIDTHS: [usize; 2] = [64, 8];

/// Split of the rows of a nest into parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReductionStrategy {
    /// Number of adjacent rows that a group reduces together; 1 if elements of a row are adjacent.
    pub(crate) width: usize,
    /// Number of parts of a row.
    pub(crate) count: usize,
    /// Number of elements of a part; the last part may have fewer.
    pub(crate) elements: usize,
}

impl ReductionStrategy {
    /// Returns the number of invocations that share a row.
    pub(crate) fn slices(self) -> usize {
        GROUP_SIZE as usize / self.width
    }
}

/// Kind of a reduction by groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReductionKind {
    /// Adjacent rows, or parts of rows, with partial results in scratch memory.
    Parts(ReductionStrategy),
    /// Rows, each reduced by several invocations of a group.
    Rows,
}

impl ReductionKind {
    /// Returns the kind for a nest; `None` if one invocation per row is as fast.
    pub(crate) fn for_nest(nest: &Nest) -> Option<ReductionKind> {
        let rows: usize = nest.outer_dims().iter().product();
        let size: usize = nest.inner_dims().iter().product();
        let has_truths =
            || nest.reductions.iter().any(|reduction| nest.expr.ty(reduction.value) == Type::Bool);
        if size <= MAX_THREAD_ROW || nest.segments.is_some() || nest.reductions.is_empty() || has_truths() {
            return None;
        }
        if !is_column_major(nest) {
            let is_long = rows < MIN_BUSY_ROWS && size > PART_ELEMENTS;
            let strategy =
                ReductionStrategy { width: 1, count: size.div_ceil(PART_ELEMENTS), elements: PART_ELEMENTS };
            return Some(if is_long { ReductionKind::Parts(strategy) } else { ReductionKind::Rows });
        }
        (rows < MIN_BUSY_COLUMNS).then(|| ReductionKind::Parts(split_columns(rows, size)))
    }
}

/// Returns the split for `count` columns of `size` elements.
fn split_columns(count: usize, size: usize) -> ReductionStrategy {
    let [max_width, min_width] = TILE_WIDTHS;
    let width = count.next_power_of_two().clamp(min_width, max_width);
    let slices = GROUP_SIZE as usize / width;
    let parts = (TARGET_GROUPS / count.div_ceil(width)).min(size / (8 * slices)).max(1);
    let elements = size.div_ceil(parts).next_multiple_of(slices);
    ReductionStrategy { width, count: size.div_ceil(elements), elements }
}

/// Returns true if adjacent elements of the largest operand of the reductions belong to different rows.
fn is_column_major(nest: &Nest) -> bool {
    let values: Vec<_> = nest.reductions.iter().map(|reduction| reduction.value).collect();
    let needed = nest.expr.dependencies_of(&values);
    let insts = nest.expr.insts().iter().zip(needed).filter(|(_, needed)| *needed);
    let read = insts.filter_map(|((inst, _), _)| match *inst {
        Inst::Load(slot) => nest.loads[usize::from(slot)].access(),
        _ => None,
    });
    let covered = |access: &&Access| -> usize {
        let axes = nest.dims.iter().zip(&access.strides);
        axes.map(|(&dim, &stride)| if stride == 0 { 1 } else { dim }).product()
    };
    let Some(access) = read.max_by_key(covered) else { return false };
    let step = |(&dim, &stride): (&usize, &isize)| (dim > 1).then_some(stride.unsigned_abs());
    let outer_rank = nest.outer_dims().len();
    // Adjacent invocations are adjacent along the last unreduced axis.
    let across = nest.outer_dims().iter().zip(&access.strides).filter_map(step).next_back();
    let along =
        nest.inner_dims().iter().zip(&access.strides[outer_rank..]).filter_map(step).filter(|&step| step > 0);
    match (across, along.min()) {
        (Some(across), Some(along)) => across != 0 && across < along,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_split() {
        assert_eq!(split_columns(64, 64), ReductionStrategy { width: 64, count: 2, elements: 32 });
        assert_eq!(split_columns(10, 40), ReductionStrategy { width: 16, count: 1, elements: 48 });
        for count in [1, 9, 63, 65, 1000, 60_000] {
            for size in (33..5000).step_by(7) {
                let ReductionStrategy { width, count: parts, elements } = split_columns(count, size);
                assert!((parts - 1) * elements < size && size <= parts * elements, "{count} {size}");
                assert!(elements.is_multiple_of(GROUP_SIZE as usize / width));
            }
        }
    }
}
