//! Programs: instructions over buffers, with a memory plan.

use std::ops::Range;

use ortrain_graph::Tensor;
use smallvec::SmallVec;

use crate::buffer::{Buffer, BufferId, BufferLocation, PlaneId, share_bytes};
use crate::cost::Cost;
use crate::gradient_modes::GradientMode;
use crate::instruction::Instruction;
use crate::instructions::Yield;
use crate::run_error::RunError;
use crate::scheduled::{FinalVersions, ScheduledInstruction};

/// Part of a program, or of a schedule, that a run executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RunPart {
    /// The whole program, which has no [`Yield`].
    Full,
    /// Everything before the [`Yield`].
    BeforeYield,
    /// Everything after the [`Yield`], in the workspace of the run of the part before it.
    AfterYield,
}

impl RunPart {
    /// Returns the inputs and outputs of the part. The arguments are the inputs and outputs of the whole program or
    /// schedule, and its [`Yield`].
    pub(crate) fn inputs_and_outputs<'a, T>(
        self,
        [inputs, outputs]: [&'a [T]; 2],
        yielded: Option<&'a Yield<T>>,
    ) -> Result<[&'a [T]; 2], RunError> {
        match (self, yielded) {
            (RunPart::Full, _) => Ok([inputs, outputs]),
            (RunPart::BeforeYield, Some(here)) => Ok([inputs, &here.outputs]),
            (RunPart::AfterYield, Some(here)) => Ok([&here.inputs, outputs]),
            (RunPart::BeforeYield | RunPart::AfterYield, None) => Err(RunError::NoYield),
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
    /// Size of the elements of each used buffer in the plane, and the offset of the buffer modulo this size.
    element_alignments: SmallVec<[(usize, usize); 2]>,
    /// True if an instruction writes to the plane.
    pub is_written: bool,
    /// True if the plane is read or written before the [`Yield`].
    pub is_early: bool,
}

impl PlaneUse {
    /// Adds the use of a buffer to the uses of planes, if the buffer is stored in a plane.
    pub(crate) fn record(uses: &mut Vec<PlaneUse>, buffer: &Buffer, is_written: bool, is_early: bool) {
        let BufferLocation::Plane(plane, offset) = buffer.location else { return };
        let size = buffer.dtype.size();
        let at = uses.iter().position(|used| used.plane == plane).unwrap_or_else(|| {
            let elements = SmallVec::new();
            uses.push(PlaneUse {
                plane,
                bytes: 0,
                element_alignments: elements,
                is_written: false,
                is_early: false,
            });
            uses.len() - 1
        });
        let used = &mut uses[at];
        used.bytes = used.bytes.max(offset + buffer.bytes());
        used.is_written |= is_written;
        used.is_early |= is_early;
        if !used.element_alignments.contains(&(size, offset % size)) {
            used.element_alignments.push((size, offset % size));
        }
    }

    /// Returns true if all elements are aligned to their size when the plane starts at `address`.
    pub(crate) fn is_aligned_at(&self, address: usize) -> bool {
        self.element_alignments
            .iter()
            .all(|&(size, offset)| address.wrapping_add(offset).is_multiple_of(size))
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
    pub(crate) final_versions: FinalVersions,
}

impl Program {
    /// Returns the total cost of the instructions of a gradient mode.
    #[must_use]
    pub fn cost(&self, entry: GradientMode) -> Cost {
        let mut total = Cost::default();
        self.instructions_in(entry).for_each(|scheduled| total += scheduled.instruction.cost(self));
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
    pub fn buffers_overlap(&self, a: BufferId, b: BufferId) -> bool {
        let [a, b] = [a, b].map(|id| self.buffer(id));
        match (a.location, b.location) {
            (BufferLocation::Work(start), BufferLocation::Work(other)) => {
                start < other + b.bytes() && other < start + a.bytes()
            }
            _ => share_bytes(a, b),
        }
    }

    /// Returns the position of the [`Yield`] instruction and its values, if the program has a [`Yield`].
    #[must_use]
    pub fn find_yield(&self) -> Option<(usize, &Yield)> {
        self.instructions.iter().enumerate().find_map(|(at, scheduled)| match &scheduled.instruction {
            Instruction::Yield(yielded) => Some((at, yielded)),
            _ => None,
        })
    }

    /// Returns the positions of the instructions of a part.
    ///
    /// # Errors
    /// [`RunError::Yield`] and [`RunError::NoYield`] when the program has no such part.
    pub fn part_positions(&self, part: RunPart) -> Result<Range<usize>, RunError> {
        let end = self.instructions.len();
        let node = |at: usize| self.instructions[at].node.to_string();
        match (part, self.find_yield()) {
            (RunPart::Full, None) => Ok(0..end),
            (RunPart::BeforeYield, Some((at, _))) => Ok(0..at),
            (RunPart::AfterYield, Some((at, _))) => Ok(at + 1..end),
            (RunPart::Full, Some((at, _))) => Err(RunError::Yield { node: node(at) }),
            (RunPart::BeforeYield | RunPart::AfterYield, None) => Err(RunError::NoYield),
        }
    }

    /// Returns the inputs and outputs of a part.
    pub(crate) fn inputs_and_outputs(&self, part: RunPart) -> Result<[&[BufferId]; 2], RunError> {
        // A run of the whole program, for example an iteration of a loop, skips the search.
        let yielded = if part == RunPart::Full { None } else { self.find_yield() };
        part.inputs_and_outputs([&self.inputs, &self.outputs], yielded.map(|(_, yielded)| yielded))
    }

    /// Returns the instructions of a gradient mode.
    pub fn instructions_in(&self, entry: GradientMode) -> impl Iterator<Item = &ScheduledInstruction> {
        self.instructions.iter().filter(move |scheduled| scheduled.gradient_modes.contains(entry))
    }
}

impl Instruction {
    /// Returns the cost of the instruction within a program.
    #[must_use]
    pub fn cost(&self, program: &Program) -> Cost {
        self.cost_over(&program.buffers)
    }
}
