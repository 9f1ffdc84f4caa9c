//! How sizes are cut into parts.

/// A range cut into parts of whole units, as even as can be.
#[derive(Clone, Copy, Debug)]
pub(super) struct Partition {
    size: usize,
    unit: usize,
    pub(super) parts: usize,
}

impl Partition {
    /// At most `parts` parts; at least one, unless there is nothing.
    pub(super) fn new(size: usize, unit: usize, parts: usize) -> Partition {
        let unit = unit.max(1);
        Partition { size, unit, parts: size.div_ceil(unit).min(parts.max(1)) }
    }

    /// Parts of at most `most`, or of one unit.
    pub(super) fn at_most(size: usize, unit: usize, most: usize) -> Partition {
        let units = (most / unit.max(1)).max(1);
        Partition::new(size, unit, size.div_ceil(unit.max(1)).div_ceil(units))
    }

    /// Where a part begins and ends.
    pub(super) fn part(&self, i: usize) -> (usize, usize) {
        let units = self.size.div_ceil(self.unit);
        let (each, more) = (units / self.parts, units % self.parts);
        let at = |i: usize| ((each * i + more * i / self.parts) * self.unit).min(self.size);
        (at(i), at(i + 1))
    }

    /// The sizes of the parts.
    pub(super) fn sizes(self) -> impl Iterator<Item = usize> {
        (0..self.parts).map(move |i| self.part(i)).map(|(begin, end)| end - begin)
    }

    /// The size of the largest part.
    pub(super) fn most(&self) -> usize {
        (self.size.div_ceil(self.unit).div_ceil(self.parts.max(1)) * self.unit).min(self.size)
    }
}

/// Positions cut into blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocks {
    cut: Partition,
    /// Length of a row, if each block lies in one.
    row: Option<usize>,
    pub(super) count: usize,
    /// Positions of the largest block.
    pub(super) most: usize,
}

impl Blocks {
    /// `positions` positions in rows of `row`: blocks of at most `most`, made of whole units (of `unit` positions, or
    /// of rows), or each within a row if those are long; about `wanted` of them if that makes more.
    pub(super) fn new(positions: usize, row: usize, unit: Unit, most: usize, wanted: usize) -> Blocks {
        let unit = match unit {
            Unit::Any(unit) => unit,
            Unit::Rows(_) if row <= most => row,
            Unit::Within(unit) if row <= most => unit,
            Unit::Rows(unit) | Unit::Within(unit) => {
                let rows = positions.checked_div(row).unwrap_or(0);
                let parts = Partition::at_most(row, unit, most).parts.max(wanted.div_ceil(rows.max(1)));
                let cut = Partition::new(row, unit, parts);
                return Blocks { cut, row: Some(row), count: rows * cut.parts, most: cut.most() };
            }
        };
        let parts = Partition::at_most(positions, unit, most).parts.max(wanted);
        let cut = Partition::new(positions, unit, parts);
        Blocks { cut, row: None, count: cut.parts, most: cut.most() }
    }

    /// Whether each block lies in one row.
    pub(super) fn split(&self) -> bool {
        self.row.is_some()
    }

    /// The positions of a block.
    pub(super) fn block(&self, i: usize) -> (usize, usize) {
        let Some(row) = self.row else { return self.cut.part(i) };
        let start = i / self.cut.parts * row;
        let (begin, end) = self.cut.part(i % self.cut.parts);
        (start + begin, start + end)
    }
}

/// Where blocks of positions may begin.
#[derive(Clone, Copy, Debug)]
pub(super) enum Unit {
    /// At multiples.
    Any(usize),
    /// At rows, or inside of one at multiples.
    Rows(usize),
    /// At multiples, but inside of one row if rows are long.
    Within(usize),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_everything_once() {
        for size in 0..40 {
            for unit in 1..7 {
                for parts in 1..9 {
                    let cut = Partition::new(size, unit, parts);
                    let mut next = 0;
                    for i in 0..cut.parts {
                        let (begin, end) = cut.part(i);
                        assert!(begin == next && end > begin && begin % unit == 0);
                        assert!(end - begin <= cut.most());
                        next = end;
                    }
                    assert_eq!(next, size);
                    assert!(Partition::at_most(size, unit, parts).most() <= parts.max(unit));
                }
            }
        }
    }

    #[test]
    fn blocks_cover_every_position_once() {
        for row in 1..9 {
            for rows in 0..5 {
                for most in 1..20 {
                    for unit in [Unit::Any(2), Unit::Rows(2), Unit::Within(3)] {
                        for wanted in [1, 3, 30] {
                            let blocks = Blocks::new(row * rows, row, unit, most, wanted);
                            let mut next = 0;
                            for i in 0..blocks.count {
                                let (begin, end) = blocks.block(i);
                                assert!(begin == next && end > begin && end - begin <= blocks.most);
                                if blocks.split() {
                                    assert_eq!(begin / row, (end - 1) / row);
                                }
                                next = end;
                            }
                            assert_eq!(next, row * rows);
                        }
                    }
                }
            }
        }
    }
}
