//! Definitions and uses: the instructions that write each buffer, and the instructions that read it.

use std::collections::BTreeSet;
use std::ops::Range;

use either::Either;
use smallvec::SmallVec;

use crate::buffer::{Buffer, BufferId, alias_classes};
use crate::instruction::Instruction;
use crate::scheduled::ScheduledInstruction;

/// Maximum number of positions in a vector. Longer lists are trees, with logarithmic insertion and removal.
const MAX_VECTOR_LEN: usize = 128;

/// Positions in a program, in ascending order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PositionSet {
    Vector(SmallVec<[usize; 4]>),
    Tree(BTreeSet<usize>),
}

impl Default for PositionSet {
    fn default() -> PositionSet {
        PositionSet::Vector(SmallVec::new())
    }
}

impl PositionSet {
    fn insert(&mut self, at: usize) {
        match self {
            PositionSet::Vector(positions) => {
                if let Err(index) = positions.binary_search(&at) {
                    positions.insert(index, at);
                }
                if positions.len() > MAX_VECTOR_LEN {
                    *self = PositionSet::Tree(positions.iter().copied().collect());
                }
            }
            PositionSet::Tree(positions) => drop(positions.insert(at)),
        }
    }

    fn remove(&mut self, at: usize) {
        match self {
            PositionSet::Vector(positions) => {
                if let Ok(index) = positions.binary_search(&at) {
                    positions.remove(index);
                }
            }
            PositionSet::Tree(positions) => drop(positions.remove(&at)),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            PositionSet::Vector(positions) => positions.len(),
            PositionSet::Tree(positions) => positions.len(),
        }
    }

    pub(crate) fn contains(&self, at: usize) -> bool {
        match self {
            PositionSet::Vector(positions) => positions.binary_search(&at).is_ok(),
            PositionSet::Tree(positions) => positions.contains(&at),
        }
    }

    pub(crate) fn first(&self) -> Option<usize> {
        self.iter().next()
    }

    pub(crate) fn last(&self) -> Option<usize> {
        self.iter().next_back()
    }

    /// Returns the position if there is exactly one.
    pub(crate) fn only(&self) -> Option<usize> {
        self.first().filter(|_| self.len() == 1)
    }

    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = usize> + Clone + '_ {
        match self {
            PositionSet::Vector(positions) => Either::Left(positions.iter().copied()),
            PositionSet::Tree(positions) => Either::Right(positions.iter().copied()),
        }
    }

    /// Returns the positions in a range.
    pub(crate) fn within(&self, range: Range<usize>) -> impl DoubleEndedIterator<Item = usize> + '_ {
        match self {
            PositionSet::Vector(positions) => {
                let index = |at: usize| positions.partition_point(|&position| position < at);
                let (first, end) = (index(range.start), index(range.end));
                Either::Left(positions[first..end.max(first)].iter().copied())
            }
            PositionSet::Tree(positions) => {
                Either::Right(positions.range(range.start..range.end.max(range.start)).copied())
            }
        }
    }
}

/// Writers and readers of each buffer of a program. Buffers that share bytes form one alias class.
#[derive(Clone, Debug)]
pub(crate) struct DefUse {
    alias_classes: Vec<usize>,
    writers: Vec<PositionSet>,
    readers: Vec<PositionSet>,
}

impl DefUse {
    /// Creates the definitions and uses of a program without instructions.
    pub(crate) fn new(buffers: &[Buffer]) -> DefUse {
        let none = || vec![PositionSet::default(); buffers.len()];
        DefUse { alias_classes: alias_classes(buffers), writers: none(), readers: none() }
    }

    /// Collects the definitions and uses of instructions.
    pub(crate) fn from_instructions(buffers: &[Buffer], instructions: &[ScheduledInstruction]) -> DefUse {
        let mut uses = DefUse::new(buffers);
        instructions.iter().enumerate().for_each(|(at, scheduled)| uses.add(at, &scheduled.instruction));
        uses
    }

    /// Adds the uses of an instruction at a position.
    pub(crate) fn add(&mut self, at: usize, instruction: &Instruction) {
        let DefUse { alias_classes: cells, writers, readers } = self;
        instruction.buffers(&mut |id, used| {
            let cell = cells[id.0 as usize];
            if used.reads() {
                readers[cell].insert(at);
            }
            if used.writes() {
                writers[cell].insert(at);
            }
        });
    }

    /// Removes the uses of an instruction at a position.
    pub(crate) fn remove(&mut self, at: usize, instruction: &Instruction) {
        let DefUse { alias_classes: cells, writers, readers } = self;
        instruction.buffers(&mut |id, _| {
            let cell = cells[id.0 as usize];
            readers[cell].remove(at);
            writers[cell].remove(at);
        });
    }

    /// Returns the alias class of a buffer: the index of the class's first buffer.
    pub(crate) fn alias_class(&self, id: BufferId) -> usize {
        self.alias_classes[id.0 as usize]
    }

    /// Returns the positions that write a buffer.
    pub(crate) fn writers(&self, id: BufferId) -> &PositionSet {
        &self.writers[self.alias_class(id)]
    }

    /// Returns the positions that read a buffer.
    pub(crate) fn readers(&self, id: BufferId) -> &PositionSet {
        &self.readers[self.alias_class(id)]
    }
}
