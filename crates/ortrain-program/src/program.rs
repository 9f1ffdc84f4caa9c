//! Programs: instructions over buffers, with a memory plan.

use std::ops::Range;

use ortrain_graph::Tensor;
use smallvec::SmallVec;

use crate::buffer::{Buffer, BufferId, Place, PlaneId, share_bytes};
use crate::cost::Cost;
use crate::gradient_modes::GradientMode;
use crate::instruction::Instruction;
use crate::instructions::Yield;
use crate::run_error::RunError;
use crate::scheduled::{FinalVersions, ScheduledInstruction};

/// The part of a program, or of a schedule, that a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// All of it. It has no [`Yield`].
    Whole,
    /// Everything before its [`Yield`].
    Before,
    /// Everything after its [`Yield`], in the workspace of the run before.
    After,
}

impl Part {
    /// The ends of a part, what it takes and what it gives, of something with these inputs and outputs.
    pub(crate) fn ends<'a, T>(
        self,
        [inputs, outputs]: [&'a [T]; 2],
        yielded: Option<&'a Yield<T>>,
    ) -> Result<[&'a [T]; 2], RunError> {
        match (self, yielded) {
            (Part::Whole, _) => Ok([inputs, outputs]),
            (Part::Before, Some(here)) => Ok([inputs, &here.outputs]),
            (Part::After, Some(here)) => Ok([&here.inputs, outputs]),
            (Part::Before | Part::After, None) => Err(RunError::NoYield),
        }
    }
}

/// What a program does with a plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaneUse {
    /// The plane.
    pub plane: PlaneId,
    /// How many of its bytes are needed.
    pub bytes: usize,
    /// The sizes of elements that are read and written there, and how far behind a multiple of the size they start.
    elements: SmallVec<[(usize, usize); 2]>,
    /// Whether instructions write to it.
    pub is_written: bool,
    /// Whether it is read or written before the caller takes over.
    pub is_early: bool,
}

impl PlaneUse {
    /// Adds to the uses of planes that of a buffer, if it lies in one.
    pub(crate) fn note(uses: &mut Vec<PlaneUse>, buffer: &Buffer, is_written: bool, is_early: bool) {
        let Place::Plane(plane, offset) = buffer.place else { return };
        let size = buffer.dtype.size();
        let at = uses.iter().position(|used| used.plane == plane).unwrap_or_else(|| {
            let elements = SmallVec::new();
            uses.push(PlaneUse { plane, bytes: 0, elements, is_written: false, is_early: false });
            uses.len() - 1
        });
        let used = &mut uses[at];
        used.bytes = used.bytes.max(offset + buffer.bytes());
        used.is_written |= is_written;
        used.is_early |= is_early;
        if !used.elements.contains(&(size, offset % size)) {
            used.elements.push((size, offset % size));
        }
    }

    /// Whether elements lie at multiples of their size if the plane starts at an address.
    pub(crate) fn fits(&self, address: usize) -> bool {
        self.elements.iter().all(|&(size, offset)| address.wrapping_add(offset).is_multiple_of(size))
    }
}

/// A compiled, immutable piece of work with a memory plan. Made by [`crate::ProgramBuilder`].
#[derive(Clone, Debug)]
pub struct Program {
    /// Its buffers.
    pub buffers: Vec<Buffer>,
    /// Its instructions, in order.
    pub instructions: Vec<ScheduledInstruction>,
    /// Its constants, the first element of each at a multiple of [`crate::ALIGNMENT`]. Those that nothing reads are empty.
    pub constants: Vec<Tensor>,
    /// Buffers to be filled before a run, in order.
    pub inputs: Vec<BufferId>,
    /// Buffers that hold the results after a run, in order.
    pub outputs: Vec<BufferId>,
    /// Bytes of the work arena: the peak.
    pub work_bytes: usize,
    /// For every plane that is used: how many bytes it must have.
    pub planes: Vec<PlaneUse>,
    /// What the buffers that are seen outside hold in the end.
    pub(crate) last_versions: FinalVersions,
}

impl Program {
    /// What the instructions of an entry cost together.
    #[must_use]
    pub fn cost(&self, entry: GradientMode) -> Cost {
        let mut total = Cost::default();
        self.entry(entry).for_each(|scheduled| total += scheduled.instruction.cost(self));
        total
    }

    /// Bytes of its constants.
    #[must_use]
    pub fn constant_bytes(&self) -> usize {
        self.constants.iter().map(|constant| constant.data().len()).sum()
    }

    /// A buffer.
    #[must_use]
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.0 as usize]
    }

    /// True if two buffers share bytes: they lie in the same memory, and one begins before the other ends.
    #[must_use]
    pub fn overlap(&self, a: BufferId, b: BufferId) -> bool {
        let [a, b] = [a, b].map(|id| self.buffer(id));
        match (a.place, b.place) {
            (Place::Work(start), Place::Work(other)) => {
                start < other + b.bytes() && other < start + a.bytes()
            }
            _ => share_bytes(a, b),
        }
    }

    /// Where the caller takes over, if it does: the place of the instruction, and what changes hands.
    #[must_use]
    pub fn yield_values(&self) -> Option<(usize, &Yield)> {
        self.instructions.iter().enumerate().find_map(|(at, scheduled)| match &scheduled.instruction {
            Instruction::Yield(yielded) => Some((at, yielded)),
            _ => None,
        })
    }

    /// The places of the instructions of a part.
    ///
    /// # Errors
    /// [`RunError::Yield`] when the program cannot be run in this part.
    pub fn part(&self, part: Part) -> Result<Range<usize>, RunError> {
        let end = self.instructions.len();
        let node = |at: usize| self.instructions[at].node.to_string();
        match (part, self.yield_values()) {
            (Part::Whole, None) => Ok(0..end),
            (Part::Before, Some((at, _))) => Ok(0..at),
            (Part::After, Some((at, _))) => Ok(at + 1..end),
            (Part::Whole, Some((at, _))) => Err(RunError::Yield { node: node(at) }),
            (Part::Before | Part::After, None) => Err(RunError::NoYield),
        }
    }

    /// The ends of a part: what it takes, and what it gives.
    pub(crate) fn ends(&self, part: Part) -> Result<[&[BufferId]; 2], RunError> {
        // A whole run, an iteration of a loop say, does not look for it.
        let yielded = if part == Part::Whole { None } else { self.yield_values() };
        part.ends([&self.inputs, &self.outputs], yielded.map(|(_, yielded)| yielded))
    }

    /// The instructions of an entry.
    pub fn entry(&self, entry: GradientMode) -> impl Iterator<Item = &ScheduledInstruction> {
        self.instructions.iter().filter(move |scheduled| scheduled.entries.contains(entry))
    }
}

impl Instruction {
    /// What it costs as an instruction of a program.
    #[must_use]
    pub fn cost(&self, program: &Program) -> Cost {
        self.cost_over(&program.buffers)
    }
}
