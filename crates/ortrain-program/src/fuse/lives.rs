//! How many bytes are alive at each instruction while instructions are rewritten.

/// Sums over ranges of positions, and the largest of them: a segment tree.
#[derive(Debug)]
pub(super) struct Lives {
    leaves: usize,
    /// For each node what was added to all of its positions, and the largest sum below it (its own included).
    added: Vec<i64>,
    largest: Vec<i64>,
    /// For each buffer the positions it is counted at.
    ranges: Vec<Option<(usize, usize)>>,
    bytes: Vec<usize>,
}

impl Lives {
    /// Nothing alive at any of `positions`; `bytes` are the sizes of the buffers.
    pub(super) fn new(positions: usize, bytes: Vec<usize>) -> Lives {
        let leaves = positions.max(1).next_power_of_two();
        Lives {
            leaves,
            added: vec![0; 2 * leaves],
            largest: vec![0; 2 * leaves],
            ranges: vec![None; bytes.len()],
            bytes,
        }
    }

    /// The most bytes alive at any position.
    pub(super) fn peak(&self) -> i64 {
        self.largest[1]
    }

    /// Says that a buffer is alive from the first to the last position given, both included, or never.
    pub(super) fn set(&mut self, buffer: usize, range: Option<(usize, usize)>) {
        if self.ranges[buffer] == range {
            return;
        }
        let bytes = self.bytes[buffer] as i64;
        if let Some((first, last)) = self.ranges[buffer] {
            self.add(1, 0, self.leaves, first, last + 1, -bytes);
        }
        if let Some((first, last)) = range {
            self.add(1, 0, self.leaves, first, last + 1, bytes);
        }
        self.ranges[buffer] = range;
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
    fn the_peak_is_that_of_the_positions() {
        let bytes = vec![5, 7, 11, 2];
        let mut lives = Lives::new(6, bytes.clone());
        let mut ranges = [None; 4];
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
