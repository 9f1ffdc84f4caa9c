//! Liveness: the live range of each value of a program, and the number of live bytes.

/// Live range: first and last position at which a value is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LiveRange {
    pub(crate) first: isize,
    pub(crate) last: isize,
}

impl LiveRange {
    /// Returns the smallest live range that covers these positions, or `None` without positions.
    pub(crate) fn covering(positions: impl IntoIterator<Item = isize>) -> Option<LiveRange> {
        positions.into_iter().fold(None, |life: Option<LiveRange>, at| {
            let LiveRange { first, last } = life.unwrap_or(LiveRange { first: at, last: at });
            Some(LiveRange { first: first.min(at), last: last.max(at) })
        })
    }

    /// Returns the smallest live range that covers both.
    pub(crate) fn hull(self, other: LiveRange) -> LiveRange {
        LiveRange { first: self.first.min(other.first), last: self.last.max(other.last) }
    }

    /// Returns true if the two live ranges overlap.
    pub(crate) fn overlaps(self, other: LiveRange) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// Live ranges of numbered values: buffers, or versions of buffers.
#[derive(Clone, Debug)]
pub(crate) struct Liveness(Vec<Option<LiveRange>>);

impl Liveness {
    /// Creates `count` values without uses.
    pub(crate) fn new(count: usize) -> Liveness {
        Liveness(vec![None; count])
    }

    /// Extends the live range of a value to a position.
    pub(crate) fn extend_to(&mut self, value: usize, at: isize) {
        let life = self.0[value].get_or_insert(LiveRange { first: at, last: at });
        *life = life.hull(LiveRange { first: at, last: at });
    }

    /// Returns the live range of a value, if the value has uses.
    pub(crate) fn live_range(&self, value: usize) -> Option<LiveRange> {
        self.0[value]
    }

    /// Returns all live ranges with the indices of the values.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, LiveRange)> + '_ {
        self.0.iter().enumerate().filter_map(|(value, life)| Some((value, (*life)?)))
    }
}

/// Returns the live bytes at each of the positions `-1..=end`, for live ranges with sizes. The first item belongs to
/// position -1.
pub(crate) fn live_bytes(end: usize, ranges: impl IntoIterator<Item = (LiveRange, i128)>) -> Vec<i128> {
    let mut sums = vec![0i128; end + 3];
    for (life, bytes) in ranges {
        sums[(life.first + 1) as usize] += bytes;
        sums[(life.last + 2) as usize] -= bytes;
    }
    let mut sum = 0;
    for bytes in &mut sums {
        sum += *bytes;
        *bytes = sum;
    }
    sums.truncate(end + 2);
    sums
}

/// Peak of the live bytes under changing live ranges. A segment tree holds prefix sums of the bytes that begin and end
/// at each position.
#[derive(Debug, Default)]
pub(crate) struct LiveBytesTree {
    leaves: usize,
    /// For each node the sum over its positions, and its largest prefix sum (0 for the empty prefix).
    sums: Vec<(i64, i64)>,
    /// Counted live range of each buffer.
    ranges: Vec<Option<(usize, usize)>>,
    bytes: Vec<usize>,
}

impl LiveBytesTree {
    /// Creates the tree for buffers of `bytes` bytes with inclusive `ranges` over `positions` positions.
    pub(crate) fn new(
        positions: usize,
        bytes: Vec<usize>,
        ranges: Vec<Option<(usize, usize)>>,
    ) -> LiveBytesTree {
        let leaves = (positions.max(1) + 1).next_power_of_two();
        let mut tree = LiveBytesTree { leaves, sums: vec![(0, 0); 2 * leaves], ranges, bytes };
        for (range, &bytes) in tree.ranges.iter().zip(&tree.bytes) {
            let Some((first, last)) = *range else { continue };
            tree.sums[leaves + first].0 += bytes as i64;
            tree.sums[leaves + last + 1].0 -= bytes as i64;
        }
        tree.sums[leaves..].iter_mut().for_each(|(sum, largest)| *largest = (*sum).max(0));
        (1..leaves).rev().for_each(|node| tree.join(node));
        tree
    }

    /// Returns the maximum of the live bytes over all positions.
    pub(crate) fn peak(&self) -> i64 {
        self.sums[1].1
    }

    /// Sets the live range of a buffer, both ends included. `None` means that the buffer is never live.
    pub(crate) fn set(&mut self, buffer: usize, range: Option<(usize, usize)>) {
        let old = std::mem::replace(&mut self.ranges[buffer], range);
        let (begin, end) = (|range: (usize, usize)| range.0, |range: (usize, usize)| range.1 + 1);
        let bytes = self.bytes[buffer] as i64;
        for (old, new, bytes) in
            [(old.map(begin), range.map(begin), bytes), (old.map(end), range.map(end), -bytes)]
        {
            if old != new {
                old.into_iter().for_each(|at| self.add(at, -bytes));
                new.into_iter().for_each(|at| self.add(at, bytes));
            }
        }
    }

    fn add(&mut self, at: usize, bytes: i64) {
        let mut node = self.leaves + at;
        let sum = self.sums[node].0 + bytes;
        self.sums[node] = (sum, sum.max(0));
        while node > 1 {
            node /= 2;
            self.join(node);
        }
    }

    fn join(&mut self, node: usize) {
        let ((left, left_max), (right, more)) = (self.sums[2 * node], self.sums[2 * node + 1]);
        self.sums[node] = (left + right, left_max.max(left + more));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn live_bytes_count_every_position() {
        let life = |first, last| LiveRange { first, last };
        let ranges = [(life(-1, 0), 5), (life(1, 2), 7), (life(0, 3), 2)];
        assert_eq!(live_bytes(3, ranges), [5, 7, 9, 9, 2]);
        assert_eq!(live_bytes(0, []), [0, 0]);
    }

    #[test]
    fn live_ranges_cover_all_uses() {
        let mut liveness = Liveness::new(3);
        [4, 1, 2].into_iter().for_each(|at| liveness.extend_to(1, at));
        assert_eq!(liveness.iter().collect::<Vec<_>>(), [(1, LiveRange { first: 1, last: 4 })]);
        assert_eq!(LiveRange::covering([]), None);
        assert_eq!(LiveRange::covering([3, -1]), Some(LiveRange { first: -1, last: 3 }));
        assert!(LiveRange { first: 0, last: 2 }.overlaps(LiveRange { first: 2, last: 3 }));
        assert!(!LiveRange { first: 0, last: 1 }.overlaps(LiveRange { first: 2, last: 3 }));
    }

    #[test]
    fn peak_without_instructions() {
        assert_eq!(LiveBytesTree::new(0, vec![5, 3], vec![Some((0, 0)), None]).peak(), 5);
        assert_eq!(LiveBytesTree::new(0, Vec::new(), Vec::new()).peak(), 0);
    }

    #[test]
    fn peak_is_the_maximum_over_positions() {
        let bytes = vec![5, 7, 11, 2];
        let mut ranges = [None, Some((1, 3)), None, None];
        let mut tree = LiveBytesTree::new(6, bytes.clone(), ranges.to_vec());
        assert_eq!(tree.peak(), 7);
        for (buffer, range) in [
            (0, Some((0, 2))),
            (1, Some((2, 5))),
            (2, Some((3, 3))),
            (1, Some((4, 5))),
            (3, Some((0, 5))),
            (2, None),
        ] {
            tree.set(buffer, range);
            ranges[buffer] = range;
            let alive = |at: usize| {
                let at = |range: &Option<(usize, usize)>| range.is_some_and(|(a, b)| a <= at && at <= b);
                ranges.iter().zip(&bytes).filter(|(range, _)| at(range)).map(|(_, &bytes)| bytes as i64).sum()
            };
            assert_eq!(Some(tree.peak()), (0..6).map(alive).max());
        }
    }
}
