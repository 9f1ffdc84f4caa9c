//! Interleaving of the phases of a block into rows of the result.

use super::epilogue::Epilogue;
use super::im2col::Patches;
use super::padding_fixup::RunSettings;
use crate::conv::rect::Rect;
use crate::gemm::levels::Real;
use crate::isa::{Level, Work};

/// The phases that form a row of the result.
#[derive(Debug)]
struct RowPhases {
    /// Linear position within the spread of the outer axes, and position within the spread of rows.
    outer: usize,
    row: usize,
    /// Position within the spread of columns, and index of the phase.
    phases: Vec<(usize, usize)>,
}

/// The phases of all rows.
#[derive(Debug)]
pub(super) struct PhaseTable(Vec<RowPhases>);

impl PhaseTable {
    pub(super) fn new(patches: &Patches) -> PhaseTable {
        let mut strands: Vec<RowPhases> = Vec::new();
        for (index, phase) in patches.phases.iter().enumerate() {
            let coordinates = patches.outer.iter().zip(&phase.outer);
            let outer = coordinates.fold(0, |linear, (axis, &coordinate)| linear * axis.spread + coordinate);
            match strands.iter_mut().find(|strand| strand.outer == outer && strand.row == phase.row) {
                Some(strand) => strand.phases.push((phase.col, index)),
                None => strands.push(RowPhases { outer, row: phase.row, phases: vec![(phase.col, index)] }),
            }
        }
        PhaseTable(strands)
    }

    /// Returns the phases of the rows at a position within the spread. Without phases the rows are zero.
    fn phases(&self, outer: usize, row: usize) -> &[(usize, usize)] {
        let strand = self.0.iter().find(|strand| strand.outer == outer && strand.row == row);
        strand.map_or(&[], |strand| &strand.phases)
    }
}

/// Conversion of a block of all phases into a block of the result.
pub(super) struct PhaseInterleaver<'a> {
    pub(super) patches: &'a Patches,
    pub(super) phase_table: &'a PhaseTable,
    pub(super) epilogue: &'a Epilogue,
    /// True if the block is inside of one row.
    pub(super) is_split_by_rows: bool,
    /// Elements from phase to phase and from channel to channel of the block.
    pub(super) phase: usize,
    pub(super) pitch: usize,
}

impl PhaseInterleaver<'_> {
    /// Interleaves the phases of some channels at the positions `begin..end`, and runs the epilogue over the result.
    ///
    /// # Safety
    /// As [`Epilogue::run`]. `block` has the values of all phases. `line` has capacity for the result of one piece,
    /// unless [`Epilogue::is_direct`].
    pub(super) unsafe fn run<T: Real>(
        &self,
        bases: &[*mut u8],
        settings: RunSettings,
        channels: (usize, usize),
        (begin, end): (usize, usize),
        block: *const T,
        line: *mut T,
        frame: *mut u8,
    ) {
        let &PhaseInterleaver {
            patches,
            phase_table: strands,
            epilogue: finish,
            is_split_by_rows: split,
            phase,
            pitch,
        } = self;
        let (high, wide) = (&patches.rows, &patches.cols);
        let x = if split { begin % wide.count } else { 0 };
        let cols = if split { end - begin } else { wide.count };
        let xs = (x * wide.spread, ((x + cols) * wide.spread).min(wide.result));
        let mut col = 0;
        patches.for_each_piece(begin, end, |piece| {
            patches.for_each_outer_index(piece.outer, |outer, index| {
                // A part of one row, or whole rows.
                let is_full_row = xs == (0, wide.result);
                let ys = (piece.row * high.spread, ((piece.row + piece.rows) * high.spread).min(high.result));
                let rows_per_copy = if is_full_row { ys.1 - ys.0 } else { 1 };
                for y in (ys.0..ys.1).step_by(rows_per_copy) {
                    let count = rows_per_copy * (xs.1 - xs.0);
                    let position = (index * high.result + y) * wide.result + xs.0;
                    let rect = Rect { image: piece.image, channels, positions: (position, count) };
                    let (to, step) = if finish.is_direct() {
                        (finish.target::<T>(bases, rect), finish.plane)
                    } else {
                        (line, count)
                    };
                    finish.program.isa.run(Interleave {
                        patches,
                        strands,
                        phase,
                        pitch,
                        outer,
                        block: block.wrapping_add(col),
                        channels: channels.1,
                        first: piece.row,
                        ys: (y, y + rows_per_copy),
                        xs,
                        cols,
                        to,
                        step,
                    });
                    if !finish.is_direct() {
                        // SAFETY: the caller's contract.
                        unsafe { finish.run(bases, settings, frame, rect, to, step) };
                    }
                }
            });
            col += piece.rows * cols;
        });
    }
}

/// Interleaves a block's phases into rows of the result.
struct Interleave<'a, T: 'static> {
    patches: &'a Patches,
    strands: &'a PhaseTable,
    phase: usize,
    pitch: usize,
    /// Position within the spread of the outer axes.
    outer: usize,
    /// First position of a piece, in the first phase and the first channel.
    block: *const T,
    channels: usize,
    /// The piece's first row of positions, its positions in a row, and the rows and columns of the result.
    first: usize,
    cols: usize,
    ys: (usize, usize),
    xs: (usize, usize),
    /// Destination of the first element, and step from channel to channel.
    to: *mut T,
    step: usize,
}

impl<T: Real> Work for Interleave<'_, T> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let (tall, spread) = (self.patches.rows.spread, self.patches.cols.spread);
        let count = self.xs.1 - self.xs.0;
        for y in self.ys.0..self.ys.1 {
            let phases = self.strands.phases(self.outer, y % tall);
            let from = self.block.wrapping_add((y / tall - self.first) * self.cols);
            for channel in 0..self.channels {
                let to = self.to.wrapping_add(channel * self.step + (y - self.ys.0) * count);
                let of = |phase: usize| from.wrapping_add(phase * self.phase + channel * self.pitch);
                // SAFETY: the block has all positions of all phases, and the result has these elements.
                unsafe {
                    if let (&[(0, phase)], 1) = (phases, spread) {
                        std::ptr::copy_nonoverlapping(of(phase).cast::<u8>(), to.cast(), count * T::BYTES);
                        continue;
                    }
                    if let (&[(0, even), (1, odd)], 2) = (phases, spread) {
                        let (even, odd) = (of(even), of(odd));
                        for i in 0..count / 2 {
                            to.add(2 * i).write_unaligned(even.add(i).read());
                            to.add(2 * i + 1).write_unaligned(odd.add(i).read());
                        }
                        if !count.is_multiple_of(2) {
                            to.add(count - 1).write_unaligned(even.add(count / 2).read());
                        }
                        continue;
                    }
                    if phases.len() < spread {
                        for i in 0..count {
                            to.add(i).write_unaligned(T::ZERO);
                        }
                    }
                    for &(index, phase) in phases {
                        let from = of(phase);
                        for (i, at) in (index..count).step_by(spread).enumerate() {
                            to.add(at).write_unaligned(from.add(i).read());
                        }
                    }
                }
            }
        }
    }
}
