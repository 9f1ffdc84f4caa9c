//! The choice of reductions that whole groups make, and of the parts that they are cut into. It depends on sizes alone, so that results have the
//! same bits on every device.

use ortrain_expr::{Access, Inst, Type};
use ortrain_program::Nest;

use crate::dialect::GROUP;

/// Rows of so few elements are reduced by one invocation each.
const SHORT: usize = 32;
/// Rows that keep a device busy with a group each.
const BUSY: usize = 128;
/// Elements of a part of a long row.
const PART: usize = 16_384;
/// Columns that keep a device busy with an invocation each.
const MANY: usize = 1 << 16;
/// Groups that columns are cut for.
const WANTED: usize = 512;
/// Columns of a tile, at most and at least.
const WIDTHS: [usize; 2] = [64, 8];

/// The parts of the rows of a nest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReductionStrategy {
    /// Rows that lie side by side and that a group has at once; 1 where elements of a row are neighbours.
    pub(crate) width: usize,
    /// The number of parts of a row.
    pub(crate) count: usize,
    /// Elements of a part; the last one may have fewer.
    pub(crate) elements: usize,
}

impl ReductionStrategy {
    /// Invocations that share a row.
    pub(crate) fn slices(self) -> usize {
        GROUP as usize / self.width
    }
}

/// The way in which groups make the reductions of a nest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReductionKind {
    /// Rows side by side, or parts of rows, with what they give in scratch.
    Parts(ReductionStrategy),
    /// Some invocations of a group for each row.
    Rows,
}

impl ReductionKind {
    /// The way for a nest; `None` where one invocation for each row is as good.
    pub(crate) fn of(nest: &Nest) -> Option<ReductionKind> {
        let rows: usize = nest.outer_dims().iter().product();
        let size: usize = nest.inner_dims().iter().product();
        let has_truths =
            || nest.reductions.iter().any(|reduction| nest.expr.ty(reduction.value) == Type::Bool);
        if size <= SHORT || nest.segments.is_some() || nest.reductions.is_empty() || has_truths() {
            return None;
        }
        if !lies_in_columns(nest) {
            let is_long = rows < BUSY && size > PART;
            let cut = ReductionStrategy { width: 1, count: size.div_ceil(PART), elements: PART };
            return Some(if is_long { ReductionKind::Parts(cut) } else { ReductionKind::Rows });
        }
        (rows < MANY).then(|| ReductionKind::Parts(columns(rows, size)))
    }
}

/// The parts of so many columns.
fn columns(count: usize, size: usize) -> ReductionStrategy {
    let [most, least] = WIDTHS;
    let width = count.next_power_of_two().clamp(least, most);
    let slices = GROUP as usize / width;
    let parts = (WANTED / count.div_ceil(width)).min(size / (8 * slices)).max(1);
    let elements = size.div_ceil(parts).next_multiple_of(slices);
    ReductionStrategy { width, count: size.div_ceil(elements), elements }
}

/// True if neighbours in memory, in what reductions read most of, are elements of different rows.
fn lies_in_columns(nest: &Nest) -> bool {
    let values: Vec<_> = nest.reductions.iter().map(|reduction| reduction.value).collect();
    let needed = nest.expr.needed_by(&values);
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
    let kept = nest.outer_dims().len();
    // Groups have neighbours along the last axis that they do not reduce.
    let across = nest.outer_dims().iter().zip(&access.strides).filter_map(step).next_back();
    let along =
        nest.inner_dims().iter().zip(&access.strides[kept..]).filter_map(step).filter(|&step| step > 0);
    match (across, along.min()) {
        (Some(across), Some(along)) => across != 0 && across < along,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_columns() {
        assert_eq!(columns(64, 64), ReductionStrategy { width: 64, count: 2, elements: 32 });
        assert_eq!(columns(10, 40), ReductionStrategy { width: 16, count: 1, elements: 48 });
        for count in [1, 9, 63, 65, 1000, 60_000] {
            for size in (33..5000).step_by(7) {
                let ReductionStrategy { width, count: parts, elements } = columns(count, size);
                assert!((parts - 1) * elements < size && size <= parts * elements, "{count} {size}");
                assert!(elements.is_multiple_of(GROUP as usize / width));
            }
        }
    }
}
