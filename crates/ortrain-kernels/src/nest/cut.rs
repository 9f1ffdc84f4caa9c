//! Partition of segments into tasks.
//!
//! A plane has segments of millions of elements and segments of one. Long segments are cut into pieces, and short ones
//! are combined, so that tasks take about the same time. Tasks run in waves: a segment that is read again after its
//! sums are known is then still in a cache. The partition depends on the nest only.

use std::ops::Range;

use ortrain_expr::{Nest, Segments};

use super::MIN_TASK_WORK;
use crate::tile::TileProgram;

/// Maximum number of tasks of very different lengths: enough for any number of cores.
const MAX_TASKS: usize = 512;
/// Work of a piece, in additions. Each stage of a wave begins with a piece for each thread, so a piece must take much
/// longer than the start of a thread. LAMB's step over 80 000 weights takes 2 % less time than with pieces of
/// `MIN_TASK_WORK`.
const PIECE: usize = 4 * MIN_TASK_WORK;
/// Overhead of a segment, in additions: values that are computed once for it, and calls.
const SEGMENT: usize = 2048;
/// Bytes of the long segments of a wave. They fit the private caches of cores, and take much longer than the start of
/// threads. On two cores LAMB's step over 25 million weights takes 10 % less time with 2 MiB than with 16 MiB.
const WAVE: usize = 2 << 20;
/// Maximum number of bytes of long segments for a single wave. They fit the shared cache, and more waves would cost
/// more synchronization: threads wait for each other at the end of each stage of a wave.
const ONE_WAVE: usize = 16 << 20;
/// Elements of a vector: the saved values of long segments are aligned to vectors.
const VECTOR: usize = 16;

/// Work of one thread at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Task {
    /// The segments `first..last`, each from beginning to end.
    Whole { first: usize, last: usize },
    /// A piece, by its index.
    Piece(usize),
}

/// Part of a long segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Index of its long segment.
    pub(super) long: usize,
    pub(super) begin: usize,
    pub(super) end: usize,
}

/// Segment that is cut into pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Long {
    pub(super) segment: usize,
    /// Its pieces are `first..last`.
    pub(super) first: usize,
    pub(super) last: usize,
    /// Number of elements of the segments before it in its wave.
    pub(super) before: usize,
}

/// Tasks that complete all of their stages before the next wave begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wave {
    pub(super) tasks: Range<usize>,
    /// Pieces among its tasks.
    pub(super) pieces: Range<usize>,
    /// Long segments of these pieces.
    pub(super) long: Range<usize>,
}

/// Tasks of a nest with segments.
#[derive(Debug)]
pub(super) struct Cut {
    pub(super) segments: Segments,
    /// True if an empty segment needs no work.
    pub(super) is_map: bool,
    /// In the order of segments.
    pub(super) tasks: Vec<Task>,
    pub(super) pieces: Vec<Piece>,
    pub(super) long: Vec<Long>,
    pub(super) waves: Vec<Wave>,
    /// Maximum number of elements of the long segments of a wave.
    pub(super) widest: usize,
    /// Number of elements of the longest segment that is not cut.
    pub(super) longest_whole: usize,
}

impl Cut {
    /// Creates the tasks of a tile program for a nest over segments.
    pub(super) fn new(segments: &Segments, nest: &Nest, tape: &TileProgram) -> Cut {
        let is_map = nest.inner == 0;
        let mut cut = Cut::of(segments, is_map, tape.cost, tape.tile);
        // A map reads its segments once, so it needs no waves.
        let along = nest.loaded().filter(|load| load.strides[1] != 0);
        let bytes = along.map(|load| load.dtype.size()).sum();
        cut.waves = cut.waves_of(if is_map { 0 } else { bytes });
        for wave in &cut.waves {
            let mut before = 0;
            for long in &mut cut.long[wave.long.clone()] {
                long.before = before;
                before += segments.range(long.segment).len().next_multiple_of(VECTOR);
            }
            cut.widest = cut.widest.max(before);
        }
        cut
    }

    /// Groups the tasks into waves. The long segments of a wave have about [`WAVE`] bytes, with `bytes` bytes for each
    /// element. All tasks are one wave if there are few bytes. A long segment is in one wave.
    fn waves_of(&self, bytes: usize) -> Vec<Wave> {
        let elements: usize = self.pieces.iter().map(|piece| piece.end - piece.begin).sum();
        let are_few = elements.saturating_mul(bytes) <= ONE_WAVE;
        let (mut waves, mut wave) = (Vec::new(), Wave { tasks: 0..0, pieces: 0..0, long: 0..0 });
        let mut held = 0usize;
        for (at, task) in self.tasks.iter().enumerate() {
            wave.tasks.end = at + 1;
            let Task::Piece(piece) = *task else { continue };
            let Piece { long, begin, end } = self.pieces[piece];
            (wave.pieces.end, wave.long.end) = (piece + 1, long + 1);
            held = held.saturating_add((end - begin).saturating_mul(bytes));
            if held >= WAVE && !are_few && piece + 1 == self.long[long].last {
                let next =
                    Wave { tasks: at + 1..at + 1, pieces: piece + 1..piece + 1, long: long + 1..long + 1 };
                waves.push(std::mem::replace(&mut wave, next));
                held = 0;
            }
        }
        if !wave.tasks.is_empty() {
            waves.push(wave);
        }
        waves
    }

    /// Cuts segments into tasks. A segment is cut only if it has more elements than a tile, and only between tiles. In
    /// a segment that fits a tile, the tile saves the values of the whole segment for the next stage.
    fn of(segments: &Segments, is_map: bool, cost: usize, tile: usize) -> Cut {
        let piece = (PIECE / cost).max(segments.elements() / MAX_TASKS).max(1).next_multiple_of(tile);
        let enough = piece.saturating_mul(cost);
        let mut cut = Cut {
            segments: segments.clone(),
            is_map,
            tasks: Vec::new(),
            pieces: Vec::new(),
            long: Vec::new(),
            waves: Vec::new(),
            widest: 0,
            longest_whole: 0,
        };
        // First segment that is not in a task yet, and the work of the segments from it on.
        let (mut first, mut work) = (0, 0usize);
        for (segment, range) in segments.iter().enumerate() {
            if range.len() <= piece {
                cut.longest_whole = cut.longest_whole.max(range.len());
                work = work.saturating_add(range.len().saturating_mul(cost)).saturating_add(SEGMENT);
                if work >= enough {
                    cut.whole(first, segment + 1);
                    (first, work) = (segment + 1, 0);
                }
                continue;
            }
            cut.whole(first, segment);
            (first, work) = (segment + 1, 0);
            let each = range.len().div_ceil(range.len().div_ceil(piece)).next_multiple_of(tile);
            let (long, first) = (cut.long.len(), cut.pieces.len());
            for begin in range.clone().step_by(each) {
                cut.tasks.push(Task::Piece(cut.pieces.len()));
                cut.pieces.push(Piece { long, begin, end: range.end.min(begin + each) });
            }
            cut.long.push(Long { segment, first, last: cut.pieces.len(), before: 0 });
        }
        cut.whole(first, segments.len());
        cut
    }

    fn whole(&mut self, first: usize, last: usize) {
        if first < last {
            self.tasks.push(Task::Whole { first, last });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns segments of these lengths, with a gap of one after each.
    fn segments(lengths: &[usize]) -> Segments {
        let mut start = 0;
        Segments::new(lengths.iter().map(|&length| {
            let range = start..start + length;
            start = range.end + 1;
            range
        }))
    }

    #[test]
    fn every_point_is_in_one_task() {
        const TILE: usize = 64;
        const COST: usize = 32;
        for lengths in [
            &[][..],
            &[0],
            &[0, 0, 7],
            &[1_000_000],
            &[3, 1_000_000, 0, 2049, 2048, 2047, 1, 5000],
            &[1; 3000],
            &[100_000, 64, 100_001],
        ] {
            let segments = segments(lengths);
            let cut = Cut::of(&segments, false, COST, TILE);
            let mut seen: Vec<(usize, usize, usize)> = Vec::new();
            for task in &cut.tasks {
                match *task {
                    Task::Whole { first, last } => {
                        assert!(first < last);
                        seen.extend(
                            (first..last).map(|k| (k, segments.range(k).start, segments.range(k).end)),
                        );
                    }
                    Task::Piece(k) => {
                        let Piece { long, begin, end } = cut.pieces[k];
                        let Long { segment, first, last, .. } = cut.long[long];
                        assert!((first..last).contains(&k) && begin < end);
                        assert!((begin - segments.range(segment).start).is_multiple_of(TILE));
                        seen.push((segment, begin, end));
                    }
                }
            }
            let mut next = seen.into_iter().peekable();
            for (k, range) in segments.iter().enumerate() {
                let mut at = range.start;
                while let Some((_, begin, end)) = next.next_if(|part| part.0 == k) {
                    assert_eq!(begin, at);
                    at = end;
                }
                assert_eq!(at, range.end, "segment {k} of {lengths:?}");
            }
            assert_eq!(next.next(), None);
        }
    }

    #[test]
    fn waves_follow_each_other() {
        const BYTES: usize = 16;
        let whole = WAVE / BYTES;
        let lengths = [5, whole / 2, 7, whole / 2, whole * 8, whole / 4, 1, 3];
        let cut = Cut::of(&segments(&lengths), false, 32, 64);
        let waves = cut.waves_of(BYTES);
        let long: Vec<_> = waves.iter().map(|wave| wave.long.clone()).collect();
        assert_eq!(long, [0..2, 2..3, 3..4]);
        for (before, after) in waves.iter().zip(&waves[1..]) {
            assert_eq!(before.tasks.end, after.tasks.start);
            assert_eq!(before.pieces.end, after.pieces.start);
        }
        assert_eq!(waves.iter().map(|wave| wave.tasks.len()).sum::<usize>(), cut.tasks.len());
        assert_eq!(waves.iter().map(|wave| wave.pieces.len()).sum::<usize>(), cut.pieces.len());
        // Few bytes are one wave; elements that are read once need no waves; no segments give no waves.
        assert_eq!(cut.waves_of(BYTES / 2).len(), 1);
        assert_eq!(cut.waves_of(0).len(), 1);
        assert_eq!(Cut::of(&segments(&[]), false, 32, 64).waves_of(BYTES), []);
    }

    #[test]
    fn tasks_have_enough_to_do() {
        // A thousand biases are a few tasks, and a segment that fits a tile is never cut.
        assert!(Cut::of(&segments(&[1; 1000]), false, 30, 64).tasks.len() < 50);
        assert_eq!(Cut::of(&segments(&[4000, 4001]), false, 1000, 4096).long, []);
        let cut = Cut::of(&segments(&[25_000_000]), true, 30, 512);
        assert!((MAX_TASKS / 2..=MAX_TASKS).contains(&cut.tasks.len()), "{}", cut.tasks.len());
    }
}
