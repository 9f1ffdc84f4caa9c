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

/// Part of a program, or of a schedule, that a run executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// The whole program, which has no [`Yield`].
    Whole,
    /// Everything before the [`Yield`].
    Before,
    /// Everything after the [`Yield`], in the workspace of the run before it.
    After,
}

impl Part {
    /// Returns the inputs and outputs of a part of a program or schedule with these `inputs` and `outputs`.
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

/// Use of a plane by a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlaneUse {
    /// Plane.
    pub plane: PlaneId,
    /// Number of bytes of the plane that the program needs.
    pub bytes: usize,
    /// Sizes of the elements that are read and written in the plane, with their start offset modulo the size.
    elements: SmallVec<[(usize, usize); 2]>,
    /// True if an instruction writes to the plane.
    pub is_written: bool,
    /// True if the plane is read or written before the [`Yield`].
    pub is_early: bool,
}

impl PlaneUse {
    /// Adds the use of a buffer to the uses of planes, if the buffer is stored in a plane.
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

    /// Returns true if all elements are aligned to their size when the plane starts at `address`.
    pub(crate) fn fits(&self, address: usize) -> bool {
        self.elements.iter().all(|&(size, offset)| address.wrapping_add(offset).is_multiple_of(size))
    }
}

/// Compiled, immutable program with a memory plan, built by [`crate::ProgramBuilder`].
#[derive(Clone, Debug)]
pub struct Program {
    /// Buffers.
    pub buffers: Vec<Buffer>,
    /// Instructions, in order of execution.
    pub instructions: Vec<ScheduledInstruction>,
    /// Constants. The first element of each is aligned to [`crate::ALIGNMENT`]; constants without a reader are empty.
    pub constants: Vec<Tensor>,
    /// Buffers that the caller fills before a run, in order.
    pub inputs: Vec<BufferId>,
    /// Buffers that hold the results after a run, in order.
    pub outputs: Vec<BufferId>,
    /// Bytes of the work arena: the peak of the memory plan.
    pub work_bytes: usize,
    /// Used planes, each with the number of bytes that it must have.
    pub planes: Vec<PlaneUse>,
    /// Versions of the externally visible buffers at the end of the program.
    pub(crate) last_versions: FinalVersions,
}

impl Program {
    /// Returns the total cost of the instructions of a gradient mode.
    #[must_use]
    pub fn cost(&self, entry: GradientMode) -> Cost {
        let mut total = Cost::default();
        self.entry(entry).for_each(|scheduled| total += scheduled.instruction.cost(self));
        total
    }

    /// Returns the number of bytes of the constants.
    #[must_use]
    pub fn constant_bytes(&self) -> usize {
        self.constants.iter().map(|constant| constant.data().len()).sum()
    }

    /// Returns a buffer.
    #[must_use]
    pub fn buffer(&self, id: BufferId) -> &Buffer {
        &self.buffers[id.0 as usize]
    }

    /// Returns true if two buffers share bytes: they are in the same memory, and their ranges overlap.
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

    /// Returns the position of the [`Yield`] instruction and its values, if the program has a [`Yield`].
    #[must_use]
    pub fn yield_values(&self) -> Option<(usize, &Yield)> {
        self.instructions.iter().enumerate().find_map(|(at, scheduled)| match &scheduled.instruction {
            Instruction::Yield(yielded) => Some((at, yielded)),
            _ => None,
        })
    }

    /// Returns the positions of the instructions of a part.
    ///
    /// # Errors
    /// [`RunError::Yield`] and [`RunError::NoYield`] when the program has no such part.
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

    /// Returns the inputs and outputs of a part.
    pub(crate) fn ends(&self, part: Part) -> Result<[&[BufferId]; 2], RunError> {
        // A run of the whole program, for example an iteration of a loop, skips the search.
        let yielded = if part == Part::Whole { None } else { self.yield_values() };
        part.ends([&self.inputs, &self.outputs], yielded.map(|(_, yielded)| yielded))
    }

    /// Returns the instructions of a gradient mode.
    pub fn entry(&self, entry: GradientMode) -> impl Iterator<Item = &ScheduledInstruction> {
        self.instructions.iter().filter(move |scheduled| scheduled.entries.contains(entry))
    }
}

impl Instruction {
    /// Returns the cost of the instruction within a program.
    #[must_use]
    pub fn cost(&self, program: &Program) -> Cost {
        self.cost_over(&program.buffers)
    }
}
