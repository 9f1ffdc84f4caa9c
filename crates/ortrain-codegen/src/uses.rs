//! Definitions and uses: which instructions write each buffer, and which read it.

use std::ops::Range;

use smallvec::SmallVec;

use crate::buffer::{Buffer, BufferId, Place};
use crate::instruction::Instruction;

/// Places in a program, in ascending order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Places(SmallVec<[usize; 4]>);

impl Places {
    fn insert(&mut self, at: usize) {
        if let Err(index) = self.0.binary_search(&at) {
            self.0.insert(index, at);
        }
    }

    fn remove(&mut self, at: usize) {
        if let Ok(index) = self.0.binary_search(&at) {
            self.0.remove(index);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn contains(&self, at: usize) -> bool {
        self.0.binary_search(&at).is_ok()
    }

    pub(crate) fn first(&self) -> Option<usize> {
        self.0.first().copied()
    }

    pub(crate) fn last(&self) -> Option<usize> {
        self.0.last().copied()
    }

    /// The only place, if it is one.
    pub(crate) fn only(&self) -> Option<usize> {
        self.first().filter(|_| self.len() == 1)
    }

    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = usize> + Clone + '_ {
        self.0.iter().copied()
    }

    /// The places in a range.
    pub(crate) fn within(&self, range: Range<usize>) -> impl DoubleEndedIterator<Item = usize> + '_ {
        let index = |at: usize| self.0.partition_point(|&place| place < at);
        let (first, end) = (index(range.start), index(range.end));
        self.0[first..end.max(first)].iter().copied()
    }
}

/// Who writes and who reads each buffer of a program. Buffers that share bytes are one cell.
#[derive(Clone, Debug)]
pub(crate) struct Uses {
    cells: Vec<usize>,
    writers: Vec<Places>,
    readers: Vec<Places>,
}

impl Uses {
    /// Those of a program without instructions.
    pub(crate) fn new(buffers: &[Buffer]) -> Uses {
        let none = || vec![Places::default(); buffers.len()];
        Uses { cells: cells(buffers), writers: none(), readers: none() }
    }

    /// Those of instructions, by their places.
    pub(crate) fn of<'a>(
        buffers: &[Buffer],
        instructions: impl IntoIterator<Item = &'a Instruction>,
    ) -> Uses {
        let mut uses = Uses::new(buffers);
        instructions.into_iter().enumerate().for_each(|(at, instruction)| uses.add(at, instruction));
        uses
    }

    /// Takes in an instruction at a place. Calls `touched` with each cell that it uses.
    pub(crate) fn add(&mut self, at: usize, instruction: &Instruction) {
        let Uses { cells, writers, readers } = self;
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

    /// Forgets an instruction that stood at a place.
    pub(crate) fn remove(&mut self, at: usize, instruction: &Instruction) {
        let Uses { cells, writers, readers } = self;
        instruction.buffers(&mut |id, _| {
            let cell = cells[id.0 as usize];
            readers[cell].remove(at);
            writers[cell].remove(at);
        });
    }

    /// The number of the cell that a buffer belongs to: that of its first buffer.
    pub(crate) fn cell(&self, id: BufferId) -> usize {
        self.cells[id.0 as usize]
    }

    /// Who writes a buffer.
    pub(crate) fn writers(&self, id: BufferId) -> &Places {
        &self.writers[self.cell(id)]
    }

    /// Who reads a buffer.
    pub(crate) fn readers(&self, id: BufferId) -> &Places {
        &self.readers[self.cell(id)]
    }
}

