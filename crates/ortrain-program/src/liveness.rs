//! Liveness: from where to where each value of a program is needed, and how many bytes that takes.

/// The first and the last place at which a value is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Life {
    pub(crate) first: isize,
    pub(crate) last: isize,
}

impl Life {
    /// A life at some places, if there are any.
    pub(crate) fn over(places: impl IntoIterator<Item = isize>) -> Option<Life> {
        places.into_iter().fold(None, |life: Option<Life>, at| {
            let Life { first, last } = life.unwrap_or(Life { first: at, last: at });
            Some(Life { first: first.min(at), last: last.max(at) })
        })
    }

    /// The life of both.
    pub(crate) fn hull(self, other: Life) -> Life {
        Life { first: self.first.min(other.first), last: self.last.max(other.last) }
    }

    /// Whether both are needed at some place.
    pub(crate) fn meets(self, other: Life) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// The lives of numbered values: buffers, or versions of them.
#[derive(Clone, Debug)]
pub(crate) struct Liveness(Vec<Option<Life>>);

impl Liveness {
    /// So many values that nobody needs yet.
    pub(crate) fn new(count: usize) -> Liveness {
        Liveness(vec![None; count])
    }

    /// Says that a value is needed at a place.
    pub(crate) fn touch(&mut self, value: usize, at: isize) {
        let life = self.0[value].get_or_insert(Life { first: at, last: at });
        *life = life.hull(Life { first: at, last: at });
    }

    /// The life of a value, if anybody needs it.
    pub(crate) fn life(&self, value: usize) -> Option<Life> {
        self.0[value]
    }

    /// All lives, by the numbers of the values.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, Life)> + '_ {
        self.0.iter().enumerate().filter_map(|(value, life)| Some((value, (*life)?)))
    }
}

/// How much is alive at each of the places `-1..=end`, given lives with what they take. The first number is that of place -1.
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

/// The most that is alive at any of some positions while lives change: what begins and ends at each position, and sums of
/// that from the first position on, in a segment tree.
#[derive(Debug, Default)]
pub(crate) struct AliveTree {
    leaves: usize,
    /// For each node the sum of its positions, and the largest sum of the first of them, none included.
    sums: Vec<(i64, i64)>,
    /// For each buffer the positions it is counted at.
    ranges: Vec<Option<(usize, usize)>>,
    bytes: Vec<usize>,
}

impl AliveTree {
    /// Buffers of so many bytes that are alive over these of so many positions, both ends included.
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

    /// The most bytes alive at any position.
    pub(crate) fn peak(&self) -> i64 {
        self.sums[1].1
    }

    /// Says that a buffer is alive from the first to the last position given, both included, or never.
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
