//! Last uses of bytes, during scheduling of instructions.

use rustc_hash::FxHashMap;

use crate::buffer::{Buffer, BufferId, BufferLocation, alias_classes_of};
use crate::operand::Use;

/// Range of used bytes, with the first positions at which they can be read and written again.
#[derive(Debug)]
struct UsedRange {
    from: usize,
    to: usize,
    read_from: usize,
    written_from: usize,
}

/// Ranges of bytes that instructions use, before the work arena is planned.
#[derive(Debug)]
pub(crate) struct LastUses<'a> {
    buffers: &'a [Buffer],
    classes: Vec<usize>,
    ranges_by_class: FxHashMap<usize, Vec<UsedRange>>,
}

impl<'a> LastUses<'a> {
    /// Starts without uses. Only the buffers `some` are tracked.
    pub(crate) fn new(buffers: &'a [Buffer], some: impl IntoIterator<Item = BufferId>) -> LastUses<'a> {
        let cells = alias_classes_of(buffers, some.into_iter().map(|id| id.0 as usize));
        LastUses { buffers, classes: cells, ranges_by_class: FxHashMap::default() }
    }

    /// Returns the alias class of a buffer, and the range of its bytes within the class.
    fn byte_range(&self, id: BufferId) -> (usize, usize, usize) {
        let (k, buffer) = (id.0 as usize, &self.buffers[id.0 as usize]);
        match buffer.location {
            BufferLocation::Plane(_, at) => (self.classes[k], at, at + buffer.bytes()),
            BufferLocation::Work(_) | BufferLocation::Constant(_) => (self.classes[k], 0, 1),
        }
    }

    /// Returns the first position at which a buffer can be used: after all instructions that must use its bytes
    /// earlier.
    pub(crate) fn earliest_position(&self, id: BufferId, used: Use) -> usize {
        let (cell, from, to) = self.byte_range(id);
        let spans = self.ranges_by_class.get(&cell).into_iter().flatten();
        let meeting = spans.filter(|span| span.from < to && from < span.to);
        meeting.map(|span| if used.writes() { span.written_from } else { span.read_from }).max().unwrap_or(0)
    }

    /// Records the use of a buffer at a position.
    pub(crate) fn record(&mut self, id: BufferId, used: Use, at: usize) {
        let (cell, from, to) = self.byte_range(id);
        let spans = self.ranges_by_class.entry(cell).or_default();
        let known = spans.iter().position(|span| (span.from, span.to) == (from, to));
        let known = known.unwrap_or_else(|| {
            spans.push(UsedRange { from, to, read_from: 0, written_from: 0 });
            spans.len() - 1
        });
        let span = &mut spans[known];
        span.written_from = span.written_from.max(at + 1);
        if used.writes() {
            span.read_from = span.read_from.max(at + 1);
        }
    }
}
