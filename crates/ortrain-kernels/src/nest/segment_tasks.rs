//! Partition of the segments of a nest into tasks for threads.
//!
//! Segments, for example the parameters in a plane, have between one and millions of elements. Long segments are cut
//! into pieces, and short ones are combined, so that tasks take about the same time.
//!
//! Some nests read a segment once for its sums, and again to use the sums. Tasks therefore run in waves, which are
//! small enough that the second read finds the segment in a cache. The partition depends on the nest only.

use std::ops::Range;

use ortrain_expr::{Nest, Segments};

use crate::tile::TileProgram;

/// Work of one task, in additions: enough to be worth waking a thread, but small enough for an even distribution.
pub(super) const MIN_TASK_WORK: usize = 64 * 1024;

/// Approximate maximum number of pieces: enough for any number of cores. With more elements, pieces become longer.
const MAX_TASKS: usize = 512;
/// Approximate work of a piece, in additions. Each stage of a wave wakes the threads, so a piece must take much longer
/// than the start of a thread. LAMB's step over 80 000 weights takes 2 % less time than with pieces of `MIN_TASK_WORK`.
const PIECE_WORK: usize = 4 * MIN_TASK_WORK;
/// Overhead of a segment, in additions: calls, and values that are computed once per segment.
const SEGMENT_OVERHEAD: usize = 2048;
/// Minimum number of bytes of the long segments of a wave: fits the private caches of cores, but takes much longer than
/// the start of threads. On two cores LAMB's step over 25 million weights takes 10 % less time with 2 MiB than with
/// 16 MiB.
const WAVE_BYTES: usize = 2 << 20;
/// Maximum number of bytes of long segments for a single wave. They fit the shared cache, and more waves would cost
/// more synchronization: threads wait for each other at the end of each stage of a wave.
const MAX_SINGLE_WAVE_BYTES: usize = 16 << 20;
/// Number of elements of a vector. The saved values of each long segment begin at a multiple of this number.
const VECTOR_LANES: usize = 16;

/// Work of one thread at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Task {
    /// The undivided segments `first..last`.
    Whole { first: usize, last: usize },
    /// The piece with this index.
    Piece(usize),
}

/// Part of a long segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Index of its long segment.
    pub(super) long_segment: usize,
    pub(super) begin: usize,
    pub(super) end: usize,
}

/// Segment that is cut into pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LongSegment {
    pub(super) segment: usize,
    /// The pieces of the segment are `first..last`.
    pub(super) first: usize,
    pub(super) last: usize,
    /// Number of elements of the long segments before this one in the wave, each rounded up to [`VECTOR_LANES`].
    pub(super) elements_before: usize,
}

/// Tasks that complete all of their stages before the next wave begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wave {
    pub(super) tasks: Range<usize>,
    /// Pieces among the tasks.
    pub(super) pieces: Range<usize>,
    /// Long segments that the pieces are parts of.
    pub(super) long_segments: Range<usize>,
}

/// Tasks of a nest with segments.
#[derive(Debug)]
pub(super) struct SegmentTasks {
    pub(super) segments: Segments,
    /// True if the nest has no reductions: an empty segment then needs no work.
    pub(super) is_map: bool,
    /// Tasks in the order of segments.
    pub(super) tasks: Vec<Task>,
    pub(super) pieces: Vec<Piece>,
    pub(super) long_segments: Vec<LongSegment>,
    pub(super) waves: Vec<Wave>,
    /// Maximum number of elements of the long segments of a wave.
    pub(super) max_wave_elements: usize,
    /// Number of elements of the longest undivided segment.
    pub(super) max_undivided_segment: usize,
}

impl SegmentTasks {
    /// Creates the tasks of a tile program for a nest over segments.
    pub(super) fn new(segments: &Segments, nest: &Nest, tape: &TileProgram) -> SegmentTasks {
        let is_map = nest.inner == 0;
        let mut tasks = SegmentTasks::from_segments(segments, is_map, tape.cost, tape.tile);
        // A map reads its segments once, so it needs no waves.
        let along = nest.load_operands().filter(|load| load.strides[1] != 0);
        let bytes = along.map(|load| load.dtype.size()).sum();
        tasks.waves = tasks.group_into_waves(if is_map { 0 } else { bytes });
        for wave in &tasks.waves {
            let mut before = 0;
            for long in &mut tasks.long_segments[wave.long_segments.clone()] {
                long.elements_before = before;
                before += segments.range(long.segment).len().next_multiple_of(VECTOR_LANES);
            }
            tasks.max_wave_elements = tasks.max_wave_elements.max(before);
        }
        tasks
    }

    /// Groups the tasks into waves. A wave ends after the long segment that completes [`WAVE_BYTES`] bytes, with
    /// `bytes` bytes per element. Up to [`MAX_SINGLE_WAVE_BYTES`] bytes, all tasks are in one wave.
    fn group_into_waves(&self, bytes: usize) -> Vec<Wave> {
        let elements: usize = self.pieces.iter().map(|piece| piece.end - piece.begin).sum();
        let fits_one_wave = elements.saturating_mul(bytes) <= MAX_SINGLE_WAVE_BYTES;
        let (mut waves, mut wave) = (Vec::new(), Wave { tasks: 0..0, pieces: 0..0, long_segments: 0..0 });
        let mut wave_bytes = 0usize;
        for (at, task) in self.tasks.iter().enumerate() {
            wave.tasks.end = at + 1;
            let Task::Piece(piece) = *task else { continue };
            let Piece { long_segment: long, begin, end } = self.pieces[piece];
            (wave.pieces.end, wave.long_segments.end) = (piece + 1, long + 1);
            wave_bytes = wave_bytes.saturating_add((end - begin).saturating_mul(bytes));
            if wave_bytes >= WAVE_BYTES && !fits_one_wave && piece + 1 == self.long_segments[long].last {
                let next = Wave {
                    tasks: at + 1..at + 1,
                    pieces: piece + 1..piece + 1,
                    long_segments: long + 1..long + 1,
                };
                waves.push(std::mem::replace(&mut wave, next));
                wave_bytes = 0;
            }
        }
        if !wave.tasks.is_empty() {
            waves.push(wave);
        }
        waves
    }

    /// Cuts or combines segments into tasks. A segment is cut only if it has more elements than a tile, and only
    /// between tiles. If a segment fits a tile, the tile saves the values of the whole segment for the next stage.
    fn from_segments(segments: &Segments, is_map: bool, cost: usize, tile: usize) -> SegmentTasks {
        let piece = (PIECE_WORK / cost).max(segments.num_points() / MAX_TASKS).max(1).next_multiple_of(tile);
        let enough = piece.saturating_mul(cost);
        let mut grouped = SegmentTasks {
            segments: segments.clone(),
            is_map,
            tasks: Vec::new(),
            pieces: Vec::new(),
            long_segments: Vec::new(),
            waves: Vec::new(),
            max_wave_elements: 0,
            max_undivided_segment: 0,
        };
        // First segment that is not in a task yet, and the work from this segment to the current one.
        let (mut first, mut work) = (0, 0usize);
        for (segment, range) in segments.iter().enumerate() {
            if range.len() <= piece {
                grouped.max_undivided_segment = grouped.max_undivided_segment.max(range.len());
                work = work.saturating_add(range.len().saturating_mul(cost)).saturating_add(SEGMENT_OVERHEAD);
                if work >= enough {
                    grouped.push_undivided_segments(first, segment + 1);
                    (first, work) = (segment + 1, 0);
                }
                continue;
            }
            grouped.push_undivided_segments(first, segment);
            (first, work) = (segment + 1, 0);
            let each = range.len().div_ceil(range.len().div_ceil(piece)).next_multiple_of(tile);
            let (long, first) = (grouped.long_segments.len(), grouped.pieces.len());
            for begin in range.clone().step_by(each) {
                grouped.tasks.push(Task::Piece(grouped.pieces.len()));
                grouped.pieces.push(Piece { long_segment: long, begin, end: range.end.min(begin + each) });
            }
            grouped.long_segments.push(LongSegment {
                segment,
                first,
                last: grouped.pieces.len(),
                elements_before: 0,
            });
        }
        grouped.push_undivided_segments(first, segments.len());
        grouped
    }

    fn push_undivided_segments(&mut self, first: usize, last: usize) {
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
            let tasks = SegmentTasks::from_segments(&segments, false, COST, TILE);
            let mut visited: Vec<(usize, usize, usize)> = Vec::new();
            for task in &tasks.tasks {
                match *task {
                    Task::Whole { first, last } => {
                        assert!(first < last);
                        visited.extend(
                            (first..last).map(|k| (k, segments.range(k).start, segments.range(k).end)),
                        );
                    }
                    Task::Piece(k) => {
                        let Piece { long_segment: long, begin, end } = tasks.pieces[k];
                        let LongSegment { segment, first, last, .. } = tasks.long_segments[long];
                        assert!((first..last).contains(&k) && begin < end);
                        assert!((begin - segments.range(segment).start).is_multiple_of(TILE));
                        visited.push((segment, begin, end));
                    }
                }
            }
            let mut next = visited.into_iter().peekable();
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
    fn waves_are_consecutive() {
        const BYTES: usize = 16;
        let wave_elements = WAVE_BYTES / BYTES;
        let lengths =
            [5, wave_elements / 2, 7, wave_elements / 2, wave_elements * 8, wave_elements / 4, 1, 3];
        let tasks = SegmentTasks::from_segments(&segments(&lengths), false, 32, 64);
        let waves = tasks.group_into_waves(BYTES);
        let long: Vec<_> = waves.iter().map(|wave| wave.long_segments.clone()).collect();
        assert_eq!(long, [0..2, 2..3, 3..4]);
        for (before, after) in waves.iter().zip(&waves[1..]) {
            assert_eq!(before.tasks.end, after.tasks.start);
            assert_eq!(before.pieces.end, after.pieces.start);
        }
        assert_eq!(waves.iter().map(|wave| wave.tasks.len()).sum::<usize>(), tasks.tasks.len());
        assert_eq!(waves.iter().map(|wave| wave.pieces.len()).sum::<usize>(), tasks.pieces.len());
        // Few bytes, and elements that are read once (0 bytes), need one wave. No segments need no wave.
        assert_eq!(tasks.group_into_waves(BYTES / 2).len(), 1);
        assert_eq!(tasks.group_into_waves(0).len(), 1);
        assert_eq!(SegmentTasks::from_segments(&segments(&[]), false, 32, 64).group_into_waves(BYTES), []);
    }

    #[test]
    fn tasks_are_large_enough() {
        // A thousand segments of one element become a few tasks, and a segment that fits a tile is never cut.
        assert!(SegmentTasks::from_segments(&segments(&[1; 1000]), false, 30, 64).tasks.len() < 50);
        assert_eq!(
            SegmentTasks::from_segments(&segments(&[4000, 4001]), false, 1000, 4096).long_segments,
            []
        );
        let tasks = SegmentTasks::from_segments(&segments(&[25_000_000]), true, 30, 512);
        assert!((MAX_TASKS / 2..=MAX_TASKS).contains(&tasks.tasks.len()), "{}", tasks.tasks.len());
    }
}
