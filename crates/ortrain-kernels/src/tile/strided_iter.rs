//! Movement of one access through a part of the iteration space that has a linear, row-major index.

use smallvec::SmallVec;

/// Maximum number of axes after merging.
const MAX_RANK: usize = 16;

/// The axes of a part of the iteration space as one access sees them. Axes of size 1 are left out, and neighbouring
/// axes with one even stride are merged. Each access merges its own axes; all accesses share the linear index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StridedIter {
    dims: SmallVec<[Dim; 4]>,
    strides: SmallVec<[isize; 4]>,
}

/// The size of an axis. Many short rows compute their offsets, and a division would take longer than all the rest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Dim {
    size: usize,
    /// 2⁶⁴ divided by the size, rounded up.
    inverse: u64,
}

impl Dim {
    fn new(size: usize) -> Dim {
        // Sizes are larger than one, so divisors are never zero.
        Dim { size, inverse: (u64::MAX / (size as u64).max(2)).wrapping_add(1) }
    }

    /// Returns quotient and remainder.
    #[inline(always)]
    fn divide(self, dividend: usize) -> (usize, usize) {
        let quotient = if (dividend | self.size) >> 32 == 0 {
            // Exact for numbers of 32 bits: the inverse is less than one part in 2⁶⁴ too large.
            ((u128::from(self.inverse) * dividend as u128) >> 64) as usize
        } else {
            dividend / self.size
        };
        (quotient, dividend - quotient * self.size)
    }
}

impl StridedIter {
    /// Builds the iterator over axes of these sizes and strides.
    pub(crate) fn new(axes: impl IntoIterator<Item = (usize, isize)>) -> Result<StridedIter, String> {
        let mut walk = StridedIter { dims: SmallVec::new(), strides: SmallVec::new() };
        for (dim, stride) in axes {
            if dim == 1 {
                continue;
            }
            match (walk.dims.last_mut(), walk.strides.last_mut()) {
                (Some(outer), Some(step)) if Some(*step) == stride.checked_mul(dim as isize) => {
                    *outer = Dim::new(outer.size * dim);
                    *step = stride;
                }
                _ => {
                    walk.dims.push(Dim::new(dim));
                    walk.strides.push(stride);
                }
            }
        }
        if walk.dims.len() > MAX_RANK {
            return Err(format!("an access with {} axes that do not merge", walk.dims.len()));
        }
        Ok(walk)
    }

    /// Returns true if the access reads the same element at every index.
    pub(crate) fn is_constant(&self) -> bool {
        self.strides.iter().all(|&stride| stride == 0)
    }

    /// Returns the length of the pieces that are contiguous, index by index. `None` if there are no such pieces.
    pub(crate) fn contiguous_len(&self) -> Option<usize> {
        match (self.dims.as_slice(), self.strides.as_slice()) {
            ([_], [1]) => Some(usize::MAX),
            ([.., piece], [.., 1]) => Some(piece.size),
            _ => None,
        }
    }

    /// Returns the number of elements from one piece to the next, along the axis before the axis of the pieces.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "only generated machine code prefetches")
    )]
    pub(crate) fn piece_stride(&self) -> Option<isize> {
        self.strides.len().checked_sub(2).map(|before| self.strides[before])
    }

    /// Returns the period, if the access repeats cyclically.
    #[inline(always)]
    pub(crate) fn period(&self) -> Option<usize> {
        match (self.dims.as_slice(), self.strides.as_slice()) {
            ([_, period], [0, _]) => Some(period.size),
            _ => None,
        }
    }

    /// Returns the number of elements from the first element to the element of index `linear`.
    #[inline(always)]
    pub(crate) fn offset(&self, mut linear: usize) -> isize {
        match self.dims.len() {
            0 => 0,
            1 => linear as isize * self.strides[0],
            _ => {
                let mut offset = 0;
                for (dim, &stride) in self.dims[1..].iter().zip(&self.strides[1..]).rev() {
                    let (outer, index) = dim.divide(linear);
                    offset += index as isize * stride;
                    linear = outer;
                }
                // The first axis has no outer axis.
                offset + linear as isize * self.strides[0]
            }
        }
    }

    /// Calls `f(position, offset, len, stride)` for each evenly spaced piece of the indices `start..start + n`.
    /// `position` counts from `start`, and `offset` is the offset of the piece's first element.
    #[inline(always)]
    pub(crate) fn for_each_piece(
        &self,
        start: usize,
        n: usize,
        mut f: impl FnMut(usize, isize, usize, isize),
    ) {
        let rank = self.dims.len();
        if n == 0 {
            return;
        }
        if rank <= 1 {
            let stride = if rank == 0 { 0 } else { self.strides[0] };
            f(0, start as isize * stride, n, stride);
            return;
        }
        let (last, stride) = (self.dims[rank - 1], self.strides[rank - 1]);
        let dim = last.size;
        if rank == 2 {
            // Planes of small images are many short pieces.
            let (mut row, mut column) = last.divide(start);
            let mut position = 0;
            while position < n {
                let len = (dim - column).min(n - position);
                f(position, row as isize * self.strides[0] + column as isize * stride, len, stride);
                position += len;
                (row, column) = (row + 1, 0);
            }
            return;
        }
        let mut index = [0usize; MAX_RANK];
        let mut rest = start;
        let mut offset = 0;
        for k in (0..rank).rev() {
            (rest, index[k]) = self.dims[k].divide(rest);
            offset += index[k] as isize * self.strides[k];
        }
        let mut position = 0;
        loop {
            let len = (dim - index[rank - 1]).min(n - position);
            f(position, offset, len, stride);
            position += len;
            if position >= n {
                return;
            }
            // Back to the start of the last axis, and one step along the axes before it.
            offset -= index[rank - 1] as isize * stride;
            index[rank - 1] = 0;
            for k in (0..rank - 1).rev() {
                index[k] += 1;
                offset += self.strides[k];
                if index[k] < self.dims[k].size {
                    break;
                }
                offset -= self.strides[k] * self.dims[k].size as isize;
                index[k] = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reciprocal_division_is_exact() {
        let edges = |size: usize| [0, 1, size - 1, size, size + 1, 7 * size - 1, 7 * size];
        let ends = [u32::MAX as usize - 1, u32::MAX as usize, 1 << 32, (1 << 40) + 17];
        for size in (2..70).chain([192, 1000, 12544, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 33]) {
            let neighbors =
                ends.into_iter().map(|end| end / size * size).flat_map(|end| [end, end.max(1) - 1]);
            for dividend in edges(size).into_iter().chain(ends).chain(neighbors) {
                assert_eq!(
                    Dim::new(size).divide(dividend),
                    (dividend / size, dividend % size),
                    "{dividend} by {size}"
                );
            }
        }
    }

    #[test]
    fn adjacent_axes_merge() {
        let walk = |axes: &[(usize, isize)]| StridedIter::new(axes.iter().copied()).expect("few axes");
        assert_eq!(walk(&[(2, 12), (3, 4), (4, 1)]), walk(&[(24, 1)]));
        assert_eq!(walk(&[(1, 99), (4, 1)]), walk(&[(4, 1)]));
        assert!(walk(&[(3, 0), (4, 0)]).is_constant());
        assert_eq!(walk(&[(3, 0), (4, 1)]).period(), Some(4));
        assert_eq!(walk(&[(5, 1), (1, 7)]), walk(&[(5, 1)]));
    }

    #[test]
    fn pieces_cover_every_index_once() {
        let spaces: &[&[(usize, isize)]] =
            &[&[], &[(7, -2)], &[(3, 10), (4, 2)], &[(2, 1), (3, 100), (2, 0), (3, -7)], &[(4, 1), (5, 0)]];
        for axes in spaces {
            let walk = StridedIter::new(axes.iter().copied()).expect("few axes");
            let count: usize = axes.iter().map(|axis| axis.0).product();
            for start in 0..count {
                for n in 0..=count - start {
                    let mut next = 0;
                    walk.for_each_piece(start, n, |position, offset, len, stride| {
                        assert_eq!(position, next);
                        for i in 0..len {
                            assert_eq!(offset + i as isize * stride, walk.offset(start + position + i));
                        }
                        next += len;
                    });
                    assert_eq!(next, n);
                }
            }
        }
    }
}
