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

/// How much is alive at each of some positions while lives change: sums over ranges and the largest of them, in a segment tree.
#[derive(Debug, Default)]
pub(crate) struct AliveTree {
    leaves: usize,
    /// For each node what was added to all of its positions, and the largest sum below it (its own included).
    added: Vec<i64>,
    largest: Vec<i64>,
    /// For each buffer the positions it is counted at.
    ranges: Vec<Option<(usize, usize)>>,
    bytes: Vec<usize>,
}

impl AliveTree {
    /// Buffers of so many bytes that are alive over these of so many positions, both ends included.
    pub(crate) fn new(positions: usize, bytes: Vec<usize>, ranges: Vec<Option<(usize, usize)>>) -> AliveTree {
        let leaves = positions.max(1).next_power_of_two();
        let life = |(first, last)| Life { first: first as isize, last: last as isize };
        let taken = |(range, &n): (&Option<(usize, usize)>, &usize)| Some((range.map(life)?, n as i128));
        let alive = alive(leaves, ranges.iter().zip(&bytes).filter_map(taken));
        let mut largest = vec![0; 2 * leaves];
        largest[leaves..].iter_mut().zip(&alive[1..]).for_each(|(largest, &alive)| *largest = alive as i64);
        for node in (1..leaves).rev() {
            largest[node] = largest[2 * node].max(largest[2 * node + 1]);
        }
        AliveTree { leaves, added: vec![0; 2 * leaves], largest, ranges, bytes }
    }

    /// The most bytes alive at any position.
    pub(crate) fn peak(&self) -> i64 {
        self.largest[1]
    }

    /// Says that a buffer is alive from the first to the last position given, both included, or never.
    pub(crate) fn set(&mut self, buffer: usize, range: Option<(usize, usize)>) {
        if self.ranges[buffer] == range {
            return;
        }
        let bytes = self.bytes[buffer] as i64;
        let old = std::mem::replace(&mut self.ranges[buffer], range);
        let changed = match (old, range) {
            // Most lives become longer or shorter at their end.
            (Some((first, old)), Some((same, new))) if first == same => {
                let bytes = if old < new { bytes } else { -bytes };
                [Some((old.min(new) + 1, old.max(new), bytes)), None]
            }
            _ => [
                old.map(|(first, last)| (first, last, -bytes)),
                range.map(|(first, last)| (first, last, bytes)),
            ],
        };
        for (first, last, bytes) in changed.into_iter().flatten() {
            self.add(1, 0, self.leaves, first, last + 1, bytes);
        }
    }

    fn add(&mut self, node: usize, from: usize, to: usize, first: usize, end: usize, bytes: i64) {
        if end <= from || to <= first {
            return;
        }
        if first <= from && to <= end {
            self.added[node] += bytes;
            self.largest[node] += bytes;
            return;
        }
        let middle = usize::midpoint(from, to);
        self.add(2 * node, from, middle, first, end, bytes);
        self.add(2 * node + 1, middle, to, first, end, bytes);
        self.largest[node] = self.added[node] + self.largest[2 * node].max(self.largest[2 * node + 1]);
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
