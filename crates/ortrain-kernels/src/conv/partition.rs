//! Division of sizes into parts.

/// A range divided into parts of whole units, as evenly as possible.
#[derive(Clone, Copy, Debug)]
pub(super) struct Partition {
    size: usize,
    unit: usize,
    pub(super) parts: usize,
}

impl Partition {
    /// Divides `size` into at most `parts` parts, and into at least one part unless `size` is zero.
    pub(super) fn new(size: usize, unit: usize, parts: usize) -> Partition {
        let unit = unit.max(1);
        Partition { size, unit, parts: size.div_ceil(unit).min(parts.max(1)) }
    }

    /// Divides `size` into parts of at most `max_size`, or of one unit.
    pub(super) fn with_max_size(size: usize, unit: usize, max_size: usize) -> Partition {
        let units = (max_size / unit.max(1)).max(1);
        Partition::new(size, unit, size.div_ceil(unit.max(1)).div_ceil(units))
    }

    /// Returns the begin and the end of a part.
    pub(super) fn part(&self, i: usize) -> (usize, usize) {
        let units = self.size.div_ceil(self.unit);
        let (each, more) = (units / self.parts, units % self.parts);
        let at = |i: usize| ((each * i + more * i / self.parts) * self.unit).min(self.size);
        (at(i), at(i + 1))
    }

    /// Returns the sizes of the parts.
    pub(super) fn sizes(self) -> impl Iterator<Item = usize> {
        (0..self.parts).map(move |i| self.part(i)).map(|(begin, end)| end - begin)
    }

    /// Returns the size of the largest part.
    pub(super) fn max_size(&self) -> usize {
        (self.size.div_ceil(self.unit).div_ceil(self.parts.max(1)) * self.unit).min(self.size)
    }
}

/// Positions divided into blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blocks {
    partition: Partition,
    /// Length of a row, if each block is inside of one row.
    row: Option<usize>,
    pub(super) count: usize,
    /// Number of positions of the largest block.
    pub(super) max_positions: usize,
}

impl Blocks {
    /// Divides `positions` positions, in rows of `row`, into blocks of at most `max_size` positions. A block consists of
    /// whole units: of `unit` positions, of rows, or inside of one row if rows are long. Makes about `min_blocks` blocks
    /// if that is more.
    pub(super) fn new(
        positions: usize,
        row: usize,
        unit: BlockUnit,
        max_size: usize,
        min_blocks: usize,
    ) -> Blocks {
        let unit = match unit {
            BlockUnit::Any(unit) => unit,
            BlockUnit::Rows(_) if row <= max_size => row,
            BlockUnit::Within(unit) if row <= max_size => unit,
            BlockUnit::Rows(unit) | BlockUnit::Within(unit) => {
                let rows = positions.checked_div(row).unwrap_or(0);
                let parts =
                    Partition::with_max_size(row, unit, max_size).parts.max(min_blocks.div_ceil(rows.max(1)));
                let row_partition = Partition::new(row, unit, parts);
                return Blocks {
                    partition: row_partition,
                    row: Some(row),
                    count: rows * row_partition.parts,
                    max_positions: row_partition.max_size(),
                };
            }
        };
        let parts = Partition::with_max_size(positions, unit, max_size).parts.max(min_blocks);
        let position_partition = Partition::new(positions, unit, parts);
        Blocks {
            partition: position_partition,
            row: None,
            count: position_partition.parts,
            max_positions: position_partition.max_size(),
        }
    }

    /// Returns true if each block is inside of one row.
    pub(super) fn is_split_by_rows(&self) -> bool {
        self.row.is_some()
    }

    /// Returns the positions of a block.
    pub(super) fn block(&self, i: usize) -> (usize, usize) {
        let Some(row) = self.row else { return self.partition.part(i) };
        let start = i / self.partition.parts * row;
        let (begin, end) = self.partition.part(i % self.partition.parts);
        (start + begin, start + end)
    }
}

/// Allowed begins of blocks of positions.
#[derive(Clone, Copy, Debug)]
pub(super) enum BlockUnit {
    /// At multiples of the unit.
    Any(usize),
    /// At rows, or at multiples inside of one row.
    Rows(usize),
    /// At multiples, but each block inside of one row if rows are long.
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
                    let partition = Partition::new(size, unit, parts);
                    let mut next = 0;
                    for i in 0..partition.parts {
                        let (begin, end) = partition.part(i);
                        assert!(begin == next && end > begin && begin % unit == 0);
                        assert!(end - begin <= partition.max_size());
                        next = end;
                    }
                    assert_eq!(next, size);
                    assert!(Partition::with_max_size(size, unit, parts).max_size() <= parts.max(unit));
                }
            }
        }
    }

    #[test]
    fn blocks_cover_every_position_once() {
        for row in 1..9 {
            for rows in 0..5 {
                for max_size in 1..20 {
                    for unit in [BlockUnit::Any(2), BlockUnit::Rows(2), BlockUnit::Within(3)] {
                        for target_count in [1, 3, 30] {
                            let blocks = Blocks::new(row * rows, row, unit, max_size, target_count);
                            let mut next = 0;
                            for i in 0..blocks.count {
                                let (begin, end) = blocks.block(i);
                                assert!(begin == next && end > begin && end - begin <= blocks.max_positions);
                                if blocks.is_split_by_rows() {
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
