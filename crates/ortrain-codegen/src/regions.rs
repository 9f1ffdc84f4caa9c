//! The memory of an instruction, as bindings hold it.

use ortrain_program::{ALIGNMENT, BufferId, Place, Program};

use crate::launch::{Caps, Home};

/// Bytes of a memory that are one binding, since buffers of an instruction share them.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    pub(crate) home: Home,
    pub(crate) start: usize,
    pub(crate) end: usize,
    /// True if elements narrower than a word are written.
    pub(crate) atomic: bool,
}

/// The memory of an instruction, cut into regions that share no bytes.
#[derive(Debug)]
pub(crate) struct Regions<'a> {
    pub(crate) program: &'a Program,
    pub(crate) regions: Vec<Region>,
}

/// The bytes of a buffer in its memory.
fn bytes_of(program: &Program, id: BufferId) -> (Home, usize, usize) {
    let buffer = program.buffer(id);
    let (home, start) = match buffer.place {
        Place::Work(at) => (Home::Work, at),
        Place::Plane(plane, at) => (Home::Plane(plane), at),
        Place::Constant(number) => (Home::Constant(number), 0),
    };
    (home, start, start + buffer.bytes())
}

impl<'a> Regions<'a> {
    /// The regions of buffers, of which some are written.
    pub(crate) fn new(
        program: &'a Program,
        buffers: &[(BufferId, bool)],
        caps: &Caps,
    ) -> Result<Regions<'a>, String> {
        let mut regions: Vec<Region> = Vec::new();
        for &(id, written) in buffers {
            let (home, start, end) = bytes_of(program, id);
            let buffer = program.buffer(id);
            if !start.is_multiple_of(buffer.dtype.size()) {
                return Err(format!("{:?} lies at byte {start}, inside of an element", buffer.label));
            }
            let (start, end) = (start / ALIGNMENT * ALIGNMENT, end.next_multiple_of(4));
            let atomic = written && buffer.dtype.size() < 4;
            let mut new = Region { home, start, end: end.max(start + 4), atomic };
            regions.retain(|old| {
                let meets = old.home == new.home && old.start < new.end && new.start < old.end;
                if meets {
                    new.start = new.start.min(old.start);
                    new.end = new.end.max(old.end);
                    new.atomic |= old.atomic;
                }
                !meets
            });
            let bytes = (new.end - new.start) as u64;
            if bytes > caps.binding_bytes {
                let most = caps.binding_bytes;
                return Err(format!(
                    "{:?} is bound with {bytes} bytes, and this device binds at most {most}",
                    buffer.label
                ));
            }
            regions.push(new);
        }
        Ok(Regions { program, regions })
    }

    /// The number of the region of a buffer.
    pub(crate) fn of(&self, id: BufferId) -> usize {
        let (home, start, end) = bytes_of(self.program, id);
        let holds = |region: &Region| region.home == home && region.start <= start && end <= region.end;
        self.regions.iter().position(holds).expect("every buffer of the instruction has a region")
    }

    /// The number of the first element of a buffer, counted from the start of its region.
    pub(crate) fn first(&self, id: BufferId) -> usize {
        let (_, first, _) = bytes_of(self.program, id);
        (first - self.regions[self.of(id)].start) / self.program.buffer(id).dtype.size()
    }
}
