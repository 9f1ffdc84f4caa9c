//! First fit: the lowest free offset for each block, among blocks with overlapping live ranges.

use crate::liveness::LiveRange;

/// Number of instructions per span. Blocks with short live ranges are indexed by their spans.
const SPAN_INSTRUCTIONS: usize = 64;

/// Maximum number of spans of a short live range.
const MAX_SHORT_SPANS: usize = 4;

/// Maximum number of placed blocks per chunk.
const MAX_CHUNK_LEN: usize = 256;

/// Bytes to place in the arena.
pub(super) struct Block {
    pub(super) buffer: usize,
    pub(super) size: usize,
    pub(super) life: LiveRange,
}

/// Block at its offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Placed {
    start: usize,
    end: usize,
    life: LiveRange,
}

/// Placed blocks that follow each other by offset, with a summary that lets a search pass over all of them.
#[derive(Debug)]
struct Chunk {
    /// In ascending order of the start. Never empty.
    placed: Vec<Placed>,
    max_end: usize,
    /// Largest gap between a block and the end of all blocks before it.
    max_gap: usize,
    /// Latest start and earliest end of the live ranges. Every block is alive between them.
    latest_first: isize,
    earliest_last: isize,
    /// Positions at which any block is alive.
    hull: LiveRange,
}

impl Chunk {
    fn new(placed: Vec<Placed>) -> Chunk {
        let life = placed[0].life;
        let (earliest_last, latest_first) = (life.last, life.first);
        let mut chunk = Chunk { placed, max_end: 0, max_gap: 0, earliest_last, latest_first, hull: life };
        chunk.summarize();
        chunk
    }

    fn summarize(&mut self) {
        let Placed { life, end, .. } = self.placed[0];
        (self.max_end, self.max_gap, self.hull) = (end, 0, life);
        (self.earliest_last, self.latest_first) = (life.last, life.first);
        for &Placed { start, end, life } in &self.placed[1..] {
            self.max_gap = self.max_gap.max(start.saturating_sub(self.max_end));
            self.max_end = self.max_end.max(end);
            self.earliest_last = self.earliest_last.min(life.last);
            self.latest_first = self.latest_first.max(life.first);
            self.hull = self.hull.hull(life);
        }
    }

    fn insert(&mut self, block: Placed) {
        let at = self.placed.partition_point(|other| *other < block);
        self.placed.insert(at, block);
        self.summarize();
    }

    /// Returns true if every live range of the chunk overlaps a live range.
    fn is_alive_during(&self, life: LiveRange) -> bool {
        self.latest_first <= life.last && life.first <= self.earliest_last
    }
}

/// Placed blocks with long live ranges, in ascending order of the start.
#[derive(Debug, Default)]
struct LongLived(Vec<Chunk>);

impl LongLived {
    fn insert(&mut self, block: Placed) {
        let chunks = &mut self.0;
        let at = chunks.partition_point(|chunk| chunk.placed[0] <= block).saturating_sub(1);
        let Some(chunk) = chunks.get_mut(at) else { return chunks.push(Chunk::new(vec![block])) };
        chunk.insert(block);
        if chunk.placed.len() > MAX_CHUNK_LEN {
            let upper = chunk.placed.split_off(MAX_CHUNK_LEN / 2);
            chunk.summarize();
            chunks.insert(at + 1, Chunk::new(upper));
        }
    }
}

/// Search for the lowest free offset. It visits occupied bytes in ascending order of their start.
struct Search {
    size: usize,
    offset: usize,
}

impl Search {
    /// Returns true if the block fits before occupied bytes that start here.
    fn fits_before(&self, start: usize) -> bool {
        start >= self.offset && start - self.offset >= self.size
    }

    /// Returns the lowest offset that no neighbour occupies. `short` are neighbours in ascending order.
    fn run(mut self, life: LiveRange, short: &[(usize, usize)], long: &LongLived) -> usize {
        let mut short = short.iter().copied().peekable();
        for chunk in &long.0 {
            if !chunk.hull.overlaps(life) || chunk.max_end <= self.offset {
                continue;
            }
            // A gap that is too small in the chunk alone is too small beside other blocks, too.
            let is_full = chunk.is_alive_during(life) && chunk.max_gap < self.size;
            let visited = if is_full { &chunk.placed[..1] } else { &chunk.placed[..] };
            for placed in visited.iter().filter(|placed| placed.life.overlaps(life)) {
                while let Some((start, end)) = short.next_if(|(start, _)| *start <= placed.start) {
                    if self.fits_before(start) {
                        return self.offset;
                    }
                    self.offset = self.offset.max(end);
                }
                if self.fits_before(placed.start) {
                    return self.offset;
                }
                self.offset = self.offset.max(placed.end);
            }
            if is_full {
                self.offset = self.offset.max(chunk.max_end);
            }
        }
        for (start, end) in short {
            if self.fits_before(start) {
                break;
            }
            self.offset = self.offset.max(end);
        }
        self.offset
    }
}

/// Places blocks in this order, each at the lowest free offset. Returns the offsets and the size of the arena, or `None`
/// if the size exceeds the address space.
pub(super) fn place_blocks(blocks: &[Block], order: &[usize]) -> Option<(Vec<usize>, usize)> {
    let mut offsets = vec![0; blocks.len()];
    let mut total = 0usize;
    let spans = |life: LiveRange| {
        (life.first + 1).unsigned_abs() / SPAN_INSTRUCTIONS
            ..=(life.last + 1).unsigned_abs() / SPAN_INSTRUCTIONS
    };
    let last = blocks.iter().map(|block| *spans(block.life).end()).max().unwrap_or(0);
    // Short live ranges by span, long ones in one list.
    let mut short: Vec<Vec<Placed>> = vec![Vec::new(); last + 1];
    let mut long = LongLived::default();
    let mut neighbors: Vec<(usize, usize)> = Vec::new();
    for &k in order {
        let Block { size, life, .. } = blocks[k];
        neighbors.clear();
        let alive = short[spans(life)].iter().flatten().filter(|other| life.overlaps(other.life));
        neighbors.extend(alive.map(|other| (other.start, other.end)));
        neighbors.sort_unstable();
        let start = Search { size, offset: 0 }.run(life, &neighbors, &long);
        let end = start.checked_add(size).filter(|&end| isize::try_from(end).is_ok())?;
        let placed = Placed { start, end, life };
        if spans(life).count() <= MAX_SHORT_SPANS {
            short[spans(life)].iter_mut().for_each(|span| span.push(placed));
        } else {
            long.insert(placed);
        }
        offsets[k] = start;
        total = total.max(end);
    }
    Some((offsets, total))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Places blocks by a comparison with every placed block.
    fn place_blocks_one_by_one(blocks: &[Block], order: &[usize]) -> Vec<usize> {
        let mut offsets = vec![0; blocks.len()];
        for (done, &k) in order.iter().enumerate() {
            let alive = order[..done].iter().filter(|&&other| blocks[other].life.overlaps(blocks[k].life));
            let occupied: Vec<_> =
                alive.map(|&other| (offsets[other], offsets[other] + blocks[other].size)).collect();
            let is_free = |start: usize| {
                occupied.iter().all(|&(from, end)| end <= start || start + blocks[k].size <= from)
            };
            let candidates = occupied.iter().map(|&(_, end)| end).filter(|&start| is_free(start));
            offsets[k] = if is_free(0) { 0 } else { candidates.min().unwrap() };
        }
        offsets
    }

    #[test]
    fn offsets_are_the_lowest_free_ones() {
        let mut state = 7u64;
        let mut next = |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % n) as isize
        };
        // Few and many blocks; equal and different sizes; short and long live ranges.
        for round in 0..12u64 {
            let count = if round < 8 { 200 } else { 2 * MAX_CHUNK_LEN as u64 + 200 };
            let blocks: Vec<Block> = (0..count)
                .map(|_| {
                    let (first, length) =
                        (next(1000) - 1, if round % 2 == 0 { next(2000) } else { next(300) });
                    let size = 1 + next(1 + 10 * (round % 3)).unsigned_abs();
                    Block { buffer: 0, size, life: LiveRange { first, last: first + length } }
                })
                .collect();
            let order: Vec<usize> = (0..blocks.len()).collect();
            let (offsets, _) = place_blocks(&blocks, &order).unwrap();
            assert_eq!(offsets, place_blocks_one_by_one(&blocks, &order), "round {round}");
        }
    }
}
