//! Programs: instructions over buffers, with a memory plan.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use ortrain_expr::DType;
use ortrain_graph::Tensor;
use rustc_hash::FxHashSet;
use smallvec::SmallVec;

use crate::versions::FinalVersions;
use crate::{Cost, HandOver, Instruction, RunError, ScheduledInstruction};

/// A buffer of a [`Program`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub u32);

/// A plane of the state a program is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PlaneId(pub u32);

/// Where a buffer lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// In the work arena, at this byte. The planner decides it.
    Work(usize),
    /// In a plane, at this byte.
    Plane(PlaneId, usize),
    /// The program's constant of this number.
    Constant(usize),
}

/// A contiguous run of elements.
#[derive(Clone, Debug)]
pub struct Buffer {
    /// The name of the value it holds, for dumps and messages.
    pub label: Arc<str>,
    /// The element type.
    pub dtype: DType,
    /// The number of elements.
    pub len: usize,
    /// Where it lies.
    pub place: Place,
}

impl Buffer {
    /// Its size in bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.len * self.dtype.size()
    }
}

/// Whether a buffer lies in the work arena.
pub(crate) fn is_work(buffers: &[Buffer], id: BufferId) -> bool {
    matches!(buffers[id.0 as usize].place, Place::Work(_))
}

/// A set of entries: ways to run a program that share its plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Entries(u8);

/// One way to run a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Entry {
    /// Gradients are added to what the buffers hold. Also the entry of programs that have only one.
    Accumulate,
    /// Gradients replace what the buffers hold.
    Overwrite,
}

impl Entries {
    /// Every entry.
    pub const ALL: Entries = Entries(0b11);

    /// No entry.
    pub const NONE: Entries = Entries(0);

    /// One entry.
    #[must_use]
    pub fn only(entry: Entry) -> Entries {
        Entries(1 << entry as u8)
    }

    /// Whether an entry belongs to the set.
    #[must_use]
    pub fn contains(self, entry: Entry) -> bool {
        self.0 & (1 << entry as u8) != 0
    }

    /// The entries in both.
    #[must_use]
    pub fn and(self, other: Entries) -> Entries {
        Entries(self.0 & other.0)
    }

    /// The entries in either.
    #[must_use]
    pub fn or(self, other: Entries) -> Entries {
        Entries(self.0 | other.0)
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// How many there are.
    pub(crate) fn count(self) -> u64 {
        u64::from(self.0.count_ones())
    }
}

/// The part of a program, or of a schedule, that a run is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// All of it. It has no [`HandOver`].
    Whole,
    /// Everything before its [`HandOver`].
    Before,
    /// Everything after its [`HandOver`], in the workspace of the run before.
    After,
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
#[derive(Debug)]
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
    pub fn cost(&self, entry: Entry) -> Cost {
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

    /// Where the caller takes over, if it does: the place of the instruction, and what changes hands.
    #[must_use]
    pub fn hand_over(&self) -> Option<(usize, &HandOver)> {
        self.instructions.iter().enumerate().find_map(|(at, scheduled)| match &scheduled.instruction {
            Instruction::HandOver(hand_over) => Some((at, hand_over)),
            _ => None,
        })
    }

    /// The places of the instructions of a part.
    ///
    /// # Errors
    /// [`RunError::HandOver`] when the program cannot be run in this part.
    pub fn part(&self, part: Part) -> Result<Range<usize>, RunError> {
        let end = self.instructions.len();
        match (part, self.hand_over()) {
            (Part::Whole, None) => Ok(0..end),
            (Part::Before, Some((at, _))) => Ok(0..at),
            (Part::After, Some((at, _))) => Ok(at + 1..end),
            (Part::Whole, Some((at, _))) => {
                Err(RunError::HandOver { node: self.instructions[at].node.to_string() })
            }
            (Part::Before | Part::After, None) => Err(RunError::NoHandOver),
        }
    }

    /// The instructions of an entry.
    pub fn entry(&self, entry: Entry) -> impl Iterator<Item = &ScheduledInstruction> {
        self.instructions.iter().filter(move |scheduled| scheduled.entries.contains(entry))
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "program: {} instructions, {} buffers, work {} bytes, constants {} bytes",
            self.instructions.len(),
            self.buffers.len(),
            self.work_bytes,
            self.constant_bytes()
        )?;
        let Cost { flops, bytes } = self.cost(Entry::Accumulate);
        writeln!(f, "  a run takes {flops} flops and moves at least {bytes} bytes")?;
        for PlaneUse { plane, bytes, .. } in &self.planes {
            writeln!(f, "  plane {}: {bytes} bytes", plane.0)?;
        }
        let used: FxHashSet<BufferId> = self
            .instructions
            .iter()
            .flat_map(|i| i.instruction.reads().into_iter().chain(i.instruction.writes()))
            .chain(self.inputs.iter().chain(&self.outputs).copied())
            .collect();
        for (k, buffer) in self.buffers.iter().enumerate() {
            let id = BufferId(k as u32);
            if !used.contains(&id) {
                continue;
            }
            let place = match buffer.place {
                Place::Work(offset) => format!("work@{offset}"),
                Place::Plane(plane, offset) => format!("plane{}@{offset}", plane.0),
                Place::Constant(number) => format!("const{number}"),
            };
            let role = match (self.inputs.contains(&id), self.outputs.contains(&id)) {
                (true, _) => "  input",
                (_, true) => "  output",
                _ => "",
            };
            writeln!(f, "  b{k}: {}[{}] {place} {:?}{role}", buffer.dtype, buffer.len, buffer.label)?;
        }
        for (k, scheduled) in self.instructions.iter().enumerate() {
            let when = match scheduled.entries {
                Entries::ALL => "",
                other if other.contains(Entry::Overwrite) => " (overwrite)",
                _ => " (accumulate)",
            };
            let list =
                |ids: &[BufferId]| ids.iter().map(|id| format!("b{}", id.0)).collect::<Vec<_>>().join(", ");
            write!(
                f,
                "  {k:3} {:10} {} <- {}{when}",
                scheduled.instruction.name(),
                list(&scheduled.instruction.writes()),
                list(&scheduled.instruction.reads())
            )?;
            write!(f, "  {}", scheduled.instruction.shapes())?;
            let Cost { flops, bytes } = scheduled.instruction.cost(self);
            write!(f, "  ({flops} flops, {bytes} bytes)")?;
            writeln!(f, "  # {}", scheduled.node)?;
            if let Some(nest) = scheduled.instruction.nest() {
                for (i, reduction) in nest.reductions.iter().enumerate() {
                    writeln!(f, "        reduce {i}: {:?} of %{}", reduction.op, reduction.value.0)?;
                }
                writeln!(f, "        {}", nest.expr)?;
            }
            if let Instruction::Attention(attention) = &scheduled.instruction {
                for part in attention.parts() {
                    writeln!(f, "        {}: {}", part.name, part.nest.expr)?;
                }
            }
        }
        Ok(())
    }
}
