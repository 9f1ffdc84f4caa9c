//! Evenly strided ranges of buffer elements, and slices of index spaces that access them.

use ortrain_expr::{Access, Builder, Dims, Inst, Strides};
use smallvec::{SmallVec, smallvec};

use crate::Nest;

/// Minimum ratio between an axis and its slice. Narrowing splits a contiguous nest into pieces, which must pay.
const MIN_GAIN: usize = 2;

/// Elements of a buffer with an index that, modulo `period`, is in `start..start + len`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StridedRange {
    period: usize,
    start: usize,
    len: usize,
}

impl StridedRange {
    /// Returns the empty range of a buffer of `len` elements.
    pub(super) fn empty(len: usize) -> StridedRange {
        StridedRange { period: len.max(1), start: 0, len: 0 }
    }

    /// Returns the range of all elements of a buffer of `len` elements.
    pub(super) fn full(len: usize) -> StridedRange {
        let period = len.max(1);
        StridedRange { period, start: 0, len: period }
    }

    pub(super) fn is_empty(self) -> bool {
        self.len == 0
    }

    pub(super) fn is_full(self) -> bool {
        self.len == self.period
    }

    /// Returns true if the range contains all elements of another range.
    pub(super) fn contains(self, other: StridedRange) -> bool {
        let same = self.period == other.period
            && self.start <= other.start
            && other.start + other.len <= self.start + self.len;
        other.is_empty() || self.is_full() || same
    }

    /// Returns true if the two ranges provably have no common element.
    pub(super) fn is_disjoint_from(self, other: StridedRange) -> bool {
        let is_disjoint = self.period == other.period
            && (self.start + self.len <= other.start || other.start + other.len <= self.start);
        self.is_empty() || other.is_empty() || is_disjoint
    }

    /// Returns the smallest range that contains both ranges, in a buffer of `len` elements.
    pub(super) fn hull(self, other: StridedRange, len: usize) -> StridedRange {
        if self.contains(other) {
            return self;
        }
        if other.contains(self) {
            return other;
        }
        if self.period != other.period {
            return StridedRange::full(len);
        }
        let start = self.start.min(other.start);
        StridedRange { start, len: (self.start + self.len).max(other.start + other.len) - start, ..self }
    }

    /// Returns a range that contains all elements that an access reaches over a space.
    pub(super) fn reached_by(access: &Access, dims: &[usize]) -> StridedRange {
        let full = StridedRange::full(access.len);
        let mut first = access.offset as isize;
        let mut axes: SmallVec<[(usize, usize); 6]> = SmallVec::new();
        for (&dim, &stride) in dims.iter().zip(&access.strides) {
            // Reductions over empty rows exist too, so a dimension may be 0.
            if dim > 1 && stride != 0 {
                first += (stride * (dim as isize - 1)).min(0);
                axes.push((stride.unsigned_abs(), dim));
            }
        }
        axes.sort_unstable();
        let Ok(first) = usize::try_from(first) else { return full };
        let mut best = full;
        let mut extent = 1usize;
        for k in 0..=axes.len() {
            // Steps along the axes from `k` on preserve the position within the period.
            let period = axes.get(k).map_or(access.len, |&(stride, _)| stride);
            let fits = extent < period
                && first % period + extent <= period
                && access.len.is_multiple_of(period)
                && axes[k..].iter().all(|&(stride, _)| stride.is_multiple_of(period));
            if fits && (extent as u128) * (best.period as u128) < (best.len as u128) * (period as u128) {
                best = StridedRange { period, start: first % period, len: extent };
            }
            let Some(&(stride, dim)) = axes.get(k) else { break };
            extent = extent.saturating_add(stride.saturating_mul(dim - 1));
        }
        best
    }

    /// Returns the number of elements of the range in a buffer of `len` elements.
    pub(super) fn count(self, len: usize) -> usize {
        len / self.period * self.len
    }

    /// Returns the access in a compacted buffer that holds only the elements of the range.
    pub(super) fn compact(self, access: &Access, dims: &[usize]) -> Access {
        let &StridedRange { period, start, len } = &self;
        let step = |(&dim, &stride): (&usize, &isize)| {
            if dim > 1 && stride.unsigned_abs().is_multiple_of(period) {
                stride / period as isize * len as isize
            } else {
                stride
            }
        };
        // The stride of an axis of size 1 is irrelevant.
        let strides: Strides = dims.iter().zip(&access.strides).map(step).collect();
        let offset = access.offset / period * len + access.offset % period - start;
        Access { offset, strides, len: self.count(access.len), ..*access }
    }
}

/// Slice of an axis: `count` indices from `start` on, in every `period` indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AxisSlice {
    pub(super) axis: usize,
    pub(super) period: usize,
    pub(super) start: usize,
    pub(super) count: usize,
}

impl AxisSlice {
    fn is_worthwhile(&self) -> bool {
        self.count * MIN_GAIN <= self.period
    }
}

/// Part of a space: the points in all of the slices, sorted by axis. Without slices all points.
pub(super) type AxisSlices = SmallVec<[AxisSlice; 2]>;

/// Returns the fraction of a space's points that are in the slices.
pub(super) fn remaining_fraction(cuts: &AxisSlices) -> f64 {
    cuts.iter().map(|slice| slice.count as f64 / slice.period as f64).product()
}

/// Returns a part of a space that contains both parts.
pub(super) fn hull(a: &AxisSlices, b: &AxisSlices) -> AxisSlices {
    let both = |x: &AxisSlice| {
        let y = b.iter().find(|y| (y.axis, y.period) == (x.axis, x.period))?;
        let from = x.start.min(y.start);
        Some(AxisSlice { start: from, count: (x.start + x.count).max(y.start + y.count) - from, ..*x })
    };
    a.iter().filter_map(both).filter(AxisSlice::is_worthwhile).collect()
}

/// Returns a part of a space that contains all points at which an access reaches a range.
pub(super) fn reaching_slices(dims: &[usize], access: &Access, band: StridedRange) -> AxisSlices {
    let mut cuts = AxisSlices::new();
    if band.is_full() {
        return cuts;
    }
    let mut inside: SmallVec<[(usize, usize, usize); 6]> = SmallVec::new();
    for (axis, (&dim, &stride)) in dims.iter().zip(&access.strides).enumerate() {
        if dim < 2 || stride == 0 || stride.unsigned_abs().is_multiple_of(band.period) {
            continue;
        }
        let Ok(stride) = usize::try_from(stride) else { return cuts };
        // An axis of the space may cover several periods.
        let turn = if band.period.is_multiple_of(stride) { band.period / stride } else { dim };
        inside.push((stride, axis, if dim.is_multiple_of(turn) { turn.min(dim) } else { dim }));
    }
    inside.sort_unstable();
    let reach = |axes: &[(usize, usize, usize)]| -> usize {
        axes.iter().fold(0, |sum, &(stride, _, turn)| sum.saturating_add(stride.saturating_mul(turn - 1)))
    };
    // Current position within the period.
    let mut at = access.offset % band.period;
    if at.saturating_add(reach(&inside)) >= band.period {
        return cuts;
    }
    let (start, end) = (band.start, band.start + band.len);
    while let Some((stride, axis, turn)) = inside.pop() {
        let rest = reach(&inside);
        // Index i reaches the elements at + i * stride ..= at + i * stride + rest.
        let from = start.saturating_sub(at + rest).div_ceil(stride);
        let to = if end > at { (end - at).div_ceil(stride).min(turn) } else { 0 };
        if from >= to {
            // The access reaches no element of the range: its reader reads zeros or unwritten elements.
            return AxisSlices::new();
        }
        cuts.push(AxisSlice { axis, period: turn, start: from, count: to - from });
        at += from * stride;
        if to - from > 1 {
            break;
        }
    }
    cuts.retain(|slice| slice.is_worthwhile());
    cuts.sort_unstable_by_key(|slice| slice.axis);
    cuts
}

/// Space that is narrowed to slices of its axes.
pub(super) struct NarrowedSpace {
    axes: Vec<Axis>,
}

/// Narrowed axis.
struct Axis {
    /// Original index of the first remaining index.
    from: usize,
    /// Replacement axes: sizes, and step in original indices.
    parts: SmallVec<[(usize, usize); 2]>,
}

impl NarrowedSpace {
    pub(super) fn new(dims: &[usize], cuts: &AxisSlices) -> NarrowedSpace {
        let narrowed = |(axis, &dim): (usize, &usize)| {
            let Some(&AxisSlice { period: turn, start: from, count, .. }) =
                cuts.iter().find(|slice| slice.axis == axis)
            else {
                return Axis { from: 0, parts: smallvec![(dim, 1)] };
            };
            let parts = if turn == dim {
                smallvec![(count, 1)]
            } else if count == 1 {
                smallvec![(dim / turn, turn)]
            } else {
                smallvec![(dim / turn, turn), (count, 1)]
            };
            Axis { from, parts }
        };
        NarrowedSpace { axes: dims.iter().enumerate().map(narrowed).collect() }
    }

    pub(super) fn dims(&self) -> Dims {
        self.axes.iter().flat_map(|axis| &axis.parts).map(|&(size, _)| size).collect()
    }

    /// Returns the number of axes that replace the last `count` axes.
    pub(super) fn replacement_axis_count(&self, count: usize) -> usize {
        self.axes.iter().rev().take(count).map(|axis| axis.parts.len()).sum()
    }

    /// Returns an access to the same elements over the narrowed space.
    pub(super) fn access(&self, access: &Access) -> Access {
        let mut new_access = Access { strides: Strides::new(), ..*access };
        let mut offset = access.offset as isize;
        for (axis, &stride) in self.axes.iter().zip(&access.strides) {
            offset += axis.from as isize * stride;
            new_access.strides.extend(axis.parts.iter().map(|&(_, step)| step as isize * stride));
        }
        new_access.offset = usize::try_from(offset).expect("an access stays inside its buffer");
        new_access
    }

    /// Returns an original index along `axis` as an affine function: the constant, and for each replacement axis its
    /// position and its step.
    pub(super) fn index(&self, axis: usize) -> (usize, impl Iterator<Item = (usize, usize)>) {
        let first: usize = self.axes[..axis].iter().map(|axis| axis.parts.len()).sum();
        let steps = self.axes[axis].parts.iter().enumerate().map(move |(k, &(_, step))| (first + k, step));
        (self.axes[axis].from, steps)
    }

    /// Returns a nest over the narrowed space.
    pub(super) fn nest(&self, nest: &Nest) -> Nest {
        let mut b = Builder::new();
        let regs = b.copy(&nest.expr, |b, inst, ty| {
            let Inst::Coordinate(axis) = inst else { return b.push(inst, ty) };
            let (from, steps) = self.index(usize::from(axis));
            let mut sum = b.int(from as i64);
            for (axis, step) in steps {
                let (index, step) = (b.coordinate(axis), b.int(step as i64));
                let scaled = b.mul(index, step);
                sum = b.add(sum, scaled);
            }
            sum
        });
        let (expr, reductions) = b.finish_copy(&nest.expr, &nest.reductions, &regs);
        let narrowed = nest.map_operands(|operand| operand.with_access(self.access(&operand.access)));
        Nest {
            dims: self.dims(),
            inner: self.replacement_axis_count(nest.inner),
            expr,
            reductions,
            ..narrowed
        }
    }
}

#[cfg(test)]
mod tests {
    use ortrain_expr::DType;

    use super::*;

    const TOKENS: [usize; 3] = [8, 128, 256];
    const LEN: usize = 8 * 128 * 256;

    fn access(offset: usize, strides: &[isize]) -> Access {
        Access { dtype: DType::F32, offset, strides: strides.iter().copied().collect(), len: LEN }
    }

    fn first_token() -> StridedRange {
        StridedRange { period: 128 * 256, start: 0, len: 256 }
    }

    #[test]
    fn ranges_of_accesses() {
        let tokens = StridedRange::reached_by(&access(0, &[32768, 256, 1]), &TOKENS);
        assert!(tokens.is_full());
        let first = StridedRange::reached_by(&access(0, &[32768, 0, 1]), &[8, 1, 256]);
        assert_eq!(first, first_token());
        let last = StridedRange::reached_by(&access(127 * 256, &[32768, 1]), &[8, 256]);
        assert_eq!(last, StridedRange { start: 127 * 256, ..first_token() });
        // Negative strides.
        let some = StridedRange::reached_by(&access(6 * 256, &[32768, -256, 1]), &[8, 3, 256]);
        assert_eq!(some, StridedRange { start: 4 * 256, len: 3 * 256, ..first_token() });
        // One image of several: the period is the whole buffer.
        let sentence = StridedRange::reached_by(&access(32768, &[256, 1]), &[128, 256]);
        assert_eq!(sentence, StridedRange { period: LEN, start: 32768, len: 32768 });
        // Every other row of a matrix, without the ends of the rows.
        let odd = StridedRange::reached_by(&access(256, &[512, 1]), &[512, 200]);
        assert_eq!(odd, StridedRange { period: 512, start: 256, len: 200 });
    }

    #[test]
    fn hulls_of_ranges() {
        let (first, last) = (first_token(), StridedRange { start: 127 * 256, ..first_token() });
        assert!(first.hull(last, LEN).is_full());
        assert_eq!(first.hull(StridedRange::empty(LEN), LEN), first);
        assert_eq!(StridedRange::empty(LEN).hull(first, LEN), first);
        let second = StridedRange { start: 256, ..first };
        let both = first.hull(second, LEN);
        assert_eq!(both, StridedRange { len: 512, ..first });
        assert!(both.contains(first) && both.contains(second) && !first.contains(both));
        assert!(first.hull(StridedRange { period: 512, start: 0, len: 256 }, LEN).is_full());
        assert!(first.is_disjoint_from(second) && !both.is_disjoint_from(second));
        assert!(
            first.is_disjoint_from(StridedRange::empty(LEN))
                && !first.is_disjoint_from(StridedRange::full(LEN))
        );
    }

    #[test]
    fn slices_that_reach_a_range() {
        let slices = |axis, period, start, count| -> AxisSlices {
            smallvec![AxisSlice { axis, period, start, count }]
        };
        let second = StridedRange { start: 256, ..first_token() };
        let contiguous = access(0, &[32768, 256, 1]);
        assert_eq!(reaching_slices(&TOKENS, &contiguous, second), slices(1, 128, 1, 1));
        // All tokens of all sentences as rows of one matrix.
        assert_eq!(reaching_slices(&[1024, 256], &access(0, &[256, 1]), second), slices(0, 128, 1, 1));
        // Tokens split into two axes.
        let split = reaching_slices(&[8, 4, 32, 256], &access(0, &[32768, 8192, 256, 1]), second);
        let expected: AxisSlices = smallvec![
            AxisSlice { axis: 1, period: 4, start: 0, count: 1 },
            AxisSlice { axis: 2, period: 32, start: 1, count: 1 }
        ];
        assert_eq!(split, expected);
        // An access that begins at the second token.
        assert_eq!(
            reaching_slices(&[8, 127, 256], &access(256, &[32768, 256, 1]), second),
            slices(1, 127, 0, 1)
        );
        // Slices of rows. A slice of more than half of an axis is not used.
        let columns = StridedRange { period: 256, start: 64, len: 64 };
        assert_eq!(reaching_slices(&TOKENS, &contiguous, columns), slices(2, 256, 64, 64));
        assert_eq!(
            reaching_slices(&TOKENS, &contiguous, StridedRange { len: 129, ..columns }),
            AxisSlices::new()
        );
        // Accesses that cross the period, or have negative strides, are not narrowed.
        assert_eq!(
            reaching_slices(&[8, 128, 256], &access(256, &[32768, 255, 1]), second),
            AxisSlices::new()
        );
        assert_eq!(reaching_slices(&[127, 256], &access(127 * 256, &[-256, 1]), second), AxisSlices::new());
    }

    #[test]
    fn space_narrowed_along_two_axes() {
        let cuts: AxisSlices = smallvec![
            AxisSlice { axis: 0, period: 128, start: 3, count: 2 },
            AxisSlice { axis: 1, period: 256, start: 8, count: 4 }
        ];
        let narrowed = NarrowedSpace::new(&[1024, 256], &cuts);
        assert_eq!(narrowed.dims().as_slice(), [8, 2, 4]);
        let narrowed_access = narrowed.access(&access(0, &[256, 1]));
        assert_eq!(
            (narrowed_access.offset, narrowed_access.strides.as_slice()),
            (3 * 256 + 8, &[32768, 256, 1][..])
        );
        assert_eq!((narrowed.replacement_axis_count(1), narrowed.replacement_axis_count(2)), (1, 3));
        let (from, steps) = narrowed.index(0);
        assert_eq!((from, steps.collect::<Vec<_>>()), (3, vec![(0, 128), (1, 1)]));
    }

    #[test]
    fn compacted_buffer() {
        let band = StridedRange { start: 512, len: 512, ..first_token() };
        let inside = access(768, &[32768, 0, 1]);
        let compacted = band.compact(&inside, &[8, 1, 256]);
        assert_eq!(
            (compacted.offset, compacted.strides.as_slice(), compacted.len),
            (256, &[512, 0, 1][..], 4096)
        );
    }
}
