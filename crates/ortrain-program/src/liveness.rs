//! Liveness: the live range of each value of a program, and the number of live bytes.

/// Live range: first and last position at which a value is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Life {
    pub(crate) first: isize,
    pub(crate) last: isize,
}

impl Life {
    /// Returns the smallest live range that covers these positions, or `None` without positions.
    pub(crate) fn over(places: impl IntoIterator<Item = isize>) -> Option<Life> {
        places.into_iter().fold(None, |life: Option<Life>, at| {
            let Life { first, last } = life.unwrap_or(Life { first: at, last: at });
            Some(Life { first: first.min(at), last: last.max(at) })
        })
    }

    /// Returns the smallest live range that covers both.
    pub(crate) fn hull(self, other: Life) -> Life {
        Life { first: self.first.min(other.first), last: self.last.max(other.last) }
    }

    /// Returns true if the two live ranges overlap.
    pub(crate) fn meets(self, other: Life) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// Live ranges of numbered values: buffers, or versions of buffers.
#[derive(Clone, Debug)]
pub(crate) struct Liveness(Vec<Option<Life>>);

impl Liveness {
    /// Creates `count` values without uses.
    pub(crate) fn new(count: usize) -> Liveness {
        Liveness(vec![None; count])
    }

    /// Extends the live range of a value to a position.
    pub(crate) fn touch(&mut self, value: usize, at: isize) {
        let life = self.0[value].get_or_insert(Life { first: at, last: at });
        *life = life.hull(Life { first: at, last: at });
    }

    /// Returns the live range of a value, if the value has uses.
    pub(crate) fn life(&self, value: usize) -> Option<Life> {
        self.0[value]
    }

    /// Returns all live ranges with the indices of the values.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, Life)> + '_ {
        self.0.iter().enumerate().filter_map(|(value, life)| Some((value, (*life)?)))
    }
}

/// Returns the live bytes at each of the positions `-1..=end`, for live ranges with sizes. The first item belongs to
/// position -1.
pub(crate) fn alive(end: usize, lives: impl IntoIterator<Item = (Life, i128)>) -> Vec<i128> {
    let mut sums = vec![0i128; end + 3];
    for (life, bytes) in lives {
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
pub(crate) struct AliveTree {
    leaves: usize,
    /// For each node the sum over its positions, and its largest prefix sum (0 for the empty prefix).
    sums: Vec<(i64, i64)>,
    /// Counted live range of each buffer.
    ranges: Vec<Option<(usize, usize)>>,
    bytes: Vec<usize>,
}

impl AliveTree {
    /// Creates the tree for buffers of `bytes` bytes with inclusive `ranges` over `positions` positions.
    pub(crate) fn new(positions: usize, bytes: Vec<usize>, ranges: Vec<Option<(usize, usize)>>) -> AliveTree {
        let leaves = (positions.max(1) + 1).next_power_of_two();
        let mut tree = AliveTree { leaves, sums: vec![(0, 0); 2 * leaves], ranges, bytes };
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
        let ((left, most), (right, more)) = (self.sums[2 * node], self.sums[2 * node + 1]);
        self.sums[node] = (left + right, most.max(left + more));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_alive_is_counted_at_every_place() {
        let life = |first, last| Life { first, last };
        let lives = [(life(-1, 0), 5), (life(1, 2), 7), (life(0, 3), 2)];
        assert_eq!(alive(3, lives), [5, 7, 9, 9, 2]);
        assert_eq!(alive(0, []), [0, 0]);
    }

    #[test]
    fn lives_reach_from_the_first_to_the_last_place() {
        let mut lives = Liveness::new(3);
        [4, 1, 2].into_iter().for_each(|at| lives.touch(1, at));
        assert_eq!(lives.iter().collect::<Vec<_>>(), [(1, Life { first: 1, last: 4 })]);
        assert_eq!(Life::over([]), None);
        assert_eq!(Life::over([3, -1]), Some(Life { first: -1, last: 3 }));
        assert!(Life { first: 0, last: 2 }.meets(Life { first: 2, last: 3 }));
        assert!(!Life { first: 0, last: 1 }.meets(Life { first: 2, last: 3 }));
    }

    #[test]
    fn the_peak_of_no_instructions_is_that_of_what_is_handed_on() {
        assert_eq!(AliveTree::new(0, vec![5, 3], vec![Some((0, 0)), None]).peak(), 5);
        assert_eq!(AliveTree::new(0, Vec::new(), Vec::new()).peak(), 0);
    }

    #[test]
    fn the_peak_is_that_of_the_positions() {
        let bytes = vec![5, 7, 11, 2];
        let mut ranges = [None, Some((1, 3)), None, None];
        let mut lives = AliveTree::new(6, bytes.clone(), ranges.to_vec());
        assert_eq!(lives.peak(), 7);
        for (buffer, range) in [
            (0, Some((0, 2))),
            (1, Some((2, 5))),
            (2, Some((3, 3))),
            (1, Some((4, 5))),
            (3, Some((0, 5))),
            (2, None),
        ] {
            lives.set(buffer, range);
            ranges[buffer] = range;
            let alive = |at: usize| {
                let at = |range: &Option<(usize, usize)>| range.is_some_and(|(a, b)| a <= at && at <= b);
                ranges.iter().zip(&bytes).filter(|(range, _)| at(range)).map(|(_, &bytes)| bytes as i64).sum()
            };
            assert_eq!(Some(lives.peak()), (0..6).map(alive).max());
        }
    }
}
