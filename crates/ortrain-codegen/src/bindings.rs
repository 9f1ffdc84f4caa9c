//! Memory bindings of an instruction.

use std::cell::Cell;

use ortrain_program::{ALIGNMENT, BufferId, BufferLocation, Instruction, Program};
use rustc_hash::FxHashMap;

use crate::binding_range::accessed_range;
use crate::launch::{Caps, MemoryId};

/// Byte range of a memory that is one binding. Buffers of an instruction can share it.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    pub(crate) memory: MemoryId,
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// True if elements narrower than a word are written.
    pub(crate) atomic: bool,
}

/// Memory of an instruction, split into disjoint regions.
#[derive(Debug)]
pub(crate) struct Regions<'a> {
    pub(crate) program: &'a Program,
    pub(crate) regions: Vec<Region>,
    /// True once a kernel exceeded the number of bindings of the device.
    pub(crate) exceeds_bindings: Cell<bool>,
    /// Accessed bytes of each buffer.
    spans: FxHashMap<BufferId, (MemoryId, usize, usize)>,
}

/// Returns the bytes of a buffer in its memory.
fn buffer_bytes(program: &Program, id: BufferId) -> (MemoryId, usize, usize) {
    let buffer = program.buffer(id);
    let (home, start) = match buffer.location {
        BufferLocation::Work(at) => (MemoryId::Work, at),
        BufferLocation::Plane(plane, at) => (MemoryId::Plane(plane), at),
        BufferLocation::Constant(number) => (MemoryId::Constant(number), 0),
    };
    (home, start, start + buffer.bytes())
}

/// Returns the bytes of a buffer that an instruction accesses.
fn reached_bytes(program: &Program, instruction: &Instruction, id: BufferId) -> (MemoryId, usize, usize) {
    let (home, start, end) = buffer_bytes(program, id);
    let size = program.buffer(id).dtype.size();
    match accessed_range(instruction, id) {
        Some(elements) => (home, start + elements.start * size, start + elements.end * size),
        None => (home, start, end),
    }
}

impl<'a> Regions<'a> {
    /// Creates the regions of the buffers of an instruction.
    pub(crate) fn new(
        program: &'a Program,
        instruction: &Instruction,
        caps: &Caps,
    ) -> Result<Regions<'a>, String> {
        let mut buffers: Vec<(BufferId, bool)> = Vec::new();
        instruction.buffers(&mut |id, used| buffers.push((id, used.writes())));
        let mut regions: Vec<Region> = Vec::new();
        let mut spans: FxHashMap<BufferId, (MemoryId, usize, usize)> = FxHashMap::default();
        for (id, written) in buffers {
            let &mut (home, start, end) =
                spans.entry(id).or_insert_with(|| reached_bytes(program, instruction, id));
            let buffer = program.buffer(id);
            if !start.is_multiple_of(buffer.dtype.size()) {
                return Err(format!(
                    "{:?} starts at byte {start}, which is not a multiple of the element size",
                    buffer.label
                ));
            }
            let (start, end) = (start / ALIGNMENT * ALIGNMENT, end.next_multiple_of(4));
            let atomic = written && buffer.dtype.size() < 4;
            let mut new = Region { memory: home, start, end: end.max(start + 4), atomic };
            regions.retain(|old| {
                let overlaps = old.memory == new.memory && old.start < new.end && new.start < old.end;
                if overlaps {
                    new.start = new.start.min(old.start);
                    new.end = new.end.max(old.end);
                    new.atomic |= old.atomic;
                }
                !overlaps
            });
            let bytes = (new.end - new.start) as u64;
            // Kernels count elements, and words, with 32-bit signed integers.
            let count = bytes / buffer.dtype.size().min(4) as u64;
            if count > i32::MAX as u64 {
                return Err(format!(
                    "{:?} needs a binding of {count} elements, but kernels count at most {}",
                    buffer.label,
                    i32::MAX
                ));
            }
            if bytes > caps.binding_bytes {
                let limit = caps.binding_bytes;
                return Err(format!(
                    "{:?} needs a binding of {bytes} bytes, but this device allows at most {limit}",
                    buffer.label
                ));
            }
            regions.push(new);
        }
        Ok(Regions { program, regions, exceeds_bindings: Cell::new(false), spans })
    }

    /// Merges the two regions with the smallest gap in a memory. Returns false if no memory has two regions, or if the
    /// result is too large for the device.
    pub(crate) fn merge_nearest(&mut self, caps: &Caps) -> bool {
        self.exceeds_bindings.set(false);
        self.regions.sort_by_key(|region| (region.memory, region.start));
        let same_memory = |k: &usize| self.regions[*k].memory == self.regions[k + 1].memory;
        let gap = |k: &usize| self.regions[k + 1].start - self.regions[*k].end;
        let Some(at) = (0..self.regions.len().saturating_sub(1)).filter(same_memory).min_by_key(gap) else {
            return false;
        };
        let second = self.regions.remove(at + 1);
        let first = &mut self.regions[at];
        (first.end, first.atomic) = (second.end, first.atomic | second.atomic);
        (first.end - first.start) as u64 <= caps.binding_bytes
    }

    /// Returns the index of the region of a buffer.
    pub(crate) fn region_of(&self, id: BufferId) -> usize {
        let (home, start, end) = self.spans[&id];
        let holds = |region: &Region| region.memory == home && region.start <= start && end <= region.end;
        self.regions.iter().position(holds).expect("every buffer of the instruction has a region")
    }

    /// Returns the index of the first element of a buffer, relative to the start of its region. It is negative if the
    /// element is before the region.
    pub(crate) fn first_element(&self, id: BufferId) -> isize {
        let (_, first, _) = buffer_bytes(self.program, id);
        (first as isize - self.regions[self.region_of(id)].start as isize)
            / self.program.buffer(id).dtype.size() as isize
    }
}
