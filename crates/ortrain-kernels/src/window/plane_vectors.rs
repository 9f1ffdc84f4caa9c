//! All windows of a plane as one line.
//!
//! The elements of a plane are first laid out in blocks, with explicit padding: one block for each combination of
//! remainders of the positions modulo the strides. In a block, the elements under a cell of adjacent windows are
//! adjacent, and the distance from row to row is constant. So the windows of a plane form one line: under cell `k`,
//! window `i` has the element `offset(k) + i`. Between rows, some entries of the line belong to no window; their
//! results are dropped. There is no work per row, which would dominate for short rows.

use std::marker::PhantomData;

use ortrain_expr::{DType, SlidingAxis, WindowPass};
use smallvec::SmallVec;

use super::per_window::{LANES, combine, split_pairs};
use crate::isa::{Isa, Level, Work};
use crate::tile::number::Number;
use crate::window::engine::{Engine, Request, Selected, WindowCandidate, run_forward};
use crate::window::plan::{
    Buffers, Element, MAX_AXES, Part, Plan, Positions, computed_bytes, steps_to_cover,
};

/// Maximum number of elements of the blocks. Also limits the entries of the line.
const MAX_ELEMENTS: usize = 32 * 1024;
/// Maximum number of cells of a window.
const MAX_CELLS: usize = 256;
/// Minimum number of windows of a plane.
const MIN_WINDOWS: usize = 4;
/// Marks a row that no window covers.
const NONE: u32 = u32::MAX;

/// A cell of the window.
#[derive(Clone, Copy, Debug)]
struct Cell {
    /// Offset of the first window's element among the blocks.
    offset: usize,
    /// Distance of the cell from the start of the window, in units of positions.
    window_offset: i32,
}

/// The elements of a row that are copied into one block.
#[derive(Clone, Copy, Debug)]
struct Phase {
    /// Position of the first element in the row.
    first: usize,
    /// Destination of the first element, relative to the begin of the row among the blocks.
    to: usize,
    count: usize,
}

/// Layout of a plane.
#[derive(Clone, Debug)]
pub(super) struct PlaneVectors {
    /// Entries of the line, in whole vectors.
    line_len: usize,
    /// Elements of all blocks.
    blocks: usize,
    cells: Vec<Cell>,
    /// Begin of each row of the source among the blocks.
    rows: Vec<u32>,
    /// The phases of a row, and the distance between positions of the same phase.
    phases: SmallVec<[Phase; 4]>,
    step: usize,
    /// True if the elements of both phases alternate, beginning with the first phase.
    phases_alternate: bool,
    /// True if rows fill the blocks: elements that are written after a row are overwritten by the next row.
    rows_fill_blocks: bool,
    /// For each row of the target: entry of its first window, and start of that window in the plane of the source.
    starts: Vec<(usize, i64)>,
    /// For each entry the first cell inside of the input, as [`Cell::behind`]. -1 without such a cell. Empty if no
    /// positions are needed.
    inside: Vec<i32>,
    bytes: usize,
}

/// Layout along an axis.
struct AxisLayout {
    axis: SlidingAxis,
    /// Remainders of the positions under cells.
    remainders: SmallVec<[usize; 4]>,
    /// Elements along the axis in a block.
    pitch: usize,
    /// Elements of a block, and of the source, from one position to the next.
    block_stride: usize,
    source_stride: usize,
}

impl AxisLayout {
    /// Returns the index of a padded position's remainder, and its quotient by the stride. Returns `None` if no block
    /// has the position.
    fn block_position(&self, position: usize) -> Option<(usize, usize)> {
        let stride = self.axis.stride;
        let remainder = self.remainders.binary_search(&(position % stride)).ok()?;
        Some((remainder, position / stride)).filter(|&(_, shift)| shift < self.pitch)
    }
}

/// Calls `f` with every index of a space, in row-major order.
fn for_each_index(dims: &[usize], mut f: impl FnMut(&[usize])) {
    if dims.contains(&0) {
        return;
    }
    let mut at: SmallVec<[usize; MAX_AXES]> = dims.iter().map(|_| 0).collect();
    loop {
        f(&at);
        let Some(k) = (0..dims.len()).rev().find(|&k| at[k] + 1 < dims[k]) else { return };
        at[k] += 1;
        at[k + 1..].fill(0);
    }
}

/// Vectors of windows over a whole plane. The plane is laid out first, as `row_vectors` does with rows. For planes that
/// fit into a cache.
pub(super) fn candidate() -> WindowCandidate {
    WindowCandidate {
        name: "window.plane_vectors",
        accepts: |request| request.is_forward() && request.plan.divide_into_rows().parts == 1,
        preferences: &[has_many_windows],
        build: |request| {
            let Plan { pass, ref axes, dtype, ref positions, .. } = *request.plan;
            let layout = PlaneVectors::new(pass, axes, dtype, positions)?;
            let (tasks, scratch) = (request.plan.divide_into_rows(), layout.bytes);
            Some(Selected { engine: Box::new(layout), tasks, scratch })
        },
    }
}

/// Few windows do not fill a vector.
fn has_many_windows(request: &Request<'_>) -> bool {
    request.shape.plane_outputs() >= MIN_WINDOWS
}

impl Engine for PlaneVectors {
    fn compute_part(&self, plan: &Plan, isa: Isa, buffers: Buffers, part: Part) {
        run_forward!(self, plan, isa, buffers, part);
    }
}

/// Layout of a plane along all axes.
struct PlaneLayout {
    axes: SmallVec<[AxisLayout; MAX_AXES]>,
    /// Elements of a block, with the elements that whole vectors read after its end.
    padded_block: usize,
}

impl PlaneLayout {
    fn new(axes: &[SlidingAxis]) -> PlaneLayout {
        let mut layouts: SmallVec<[AxisLayout; MAX_AXES]> = SmallVec::new();
        let (mut block, mut source) = (1usize, 1usize);
        for &axis in axes.iter().rev() {
            let reach = |k: usize| k.saturating_mul(axis.dilation);
            let pitch = axis.output.saturating_add(reach(axis.kernel - 1) / axis.stride);
            let mut remainders: SmallVec<[usize; 4]> =
                (0..axis.kernel).map(|k| reach(k) % axis.stride).collect();
            remainders.sort_unstable();
            remainders.dedup();
            layouts.push(AxisLayout { axis, remainders, pitch, block_stride: block, source_stride: source });
            block = block.saturating_mul(pitch);
            source *= axis.input;
        }
        layouts.reverse();
        let padded_block = block.saturating_add(LANES).next_multiple_of(LANES);
        PlaneLayout { axes: layouts, padded_block }
    }

    /// Returns the number of elements of all blocks.
    fn blocks(&self) -> usize {
        let count = self.axes.iter().fold(1usize, |n, axis| n * axis.remainders.len());
        self.padded_block.saturating_mul(count)
    }

    /// Returns the number of entries from the first window to the last one.
    fn entries(&self) -> usize {
        let steps = self.axes.iter().map(|l| (l.axis.output - 1).saturating_mul(l.block_stride));
        steps.fold(1usize, usize::saturating_add)
    }

    /// Returns the index of a block, and the index of an element in the block, from remainders and quotients along some
    /// axes.
    fn element(&self, at: impl Iterator<Item = (usize, usize)>) -> (usize, usize) {
        self.axes.iter().zip(at).fold((0, 0), |(block, element), (l, (remainder, shift))| {
            (block * l.remainders.len() + remainder, element + shift * l.block_stride)
        })
    }

    /// Returns the cells of a window, or `None` if a position exceeds 32 bits.
    fn cells(&self, positions: &Positions) -> Option<Vec<Cell>> {
        let kernel: SmallVec<[usize; MAX_AXES]> = self.axes.iter().map(|l| l.axis.kernel).collect();
        let mut cells = Vec::new();
        for_each_index(&kernel, |at| {
            let position = |k: usize| {
                let SlidingAxis { stride, dilation, .. } = self.axes[k].axis;
                let reach = at[k] * dilation;
                (self.axes[k].remainders.binary_search(&(reach % stride)).unwrap_or(0), reach / stride)
            };
            let (block, element) = self.element((0..at.len()).map(position));
            let along = |k: usize| at[k].saturating_mul(positions.units[k]);
            let from_start = (0..at.len()).map(along).fold(positions.base, usize::saturating_add);
            cells.push((block * self.padded_block + element, from_start));
        });
        let cell =
            |(offset, from_start)| Some(Cell { offset, window_offset: i32::try_from(from_start).ok()? });
        cells.into_iter().map(cell).collect()
    }

    /// Returns the begin of each row of the source among the blocks.
    fn rows(&self) -> Option<Vec<u32>> {
        let (last, outer) = self.axes.split_last()?;
        let mut rows = Vec::new();
        let sizes: SmallVec<[usize; MAX_AXES]> = outer.iter().map(|l| l.axis.input).collect();
        for_each_index(&sizes, |at| {
            let padded = |k: usize| usize::try_from(at[k] as isize + outer[k].axis.padding_before).ok();
            let coordinates: Option<SmallVec<[(usize, usize); MAX_AXES]>> =
                (0..at.len()).map(|k| outer[k].block_position(padded(k)?)).collect();
            rows.push(coordinates.map_or(NONE, |coordinates| {
                let (block, element) = self.element(coordinates.into_iter());
                (block * last.remainders.len() * self.padded_block + element) as u32
            }));
        });
        Some(rows)
    }

    /// Returns the phases of a row. If the elements of two phases alternate, the phase of the first element is first, and
    /// the flag is true.
    fn phases(&self) -> Option<(SmallVec<[Phase; 4]>, bool)> {
        let last = self.axes.last()?;
        let SlidingAxis { input, stride: step, padding_before: before, .. } = last.axis;
        let mut phases: SmallVec<[Phase; 4]> = SmallVec::new();
        for (j, &remainder) in last.remainders.iter().enumerate() {
            let start_offset = before - remainder as isize;
            let end = steps_to_cover(input as isize + start_offset, step).min(last.pitch);
            let low = steps_to_cover(start_offset, step).min(end);
            // Without elements the first position is not used.
            let first = usize::try_from((low * step) as isize - start_offset).unwrap_or(0);
            phases.push(Phase { first, to: j * self.padded_block + low, count: end - low });
        }
        let mut alternate = false;
        if let ([a, b], 2) = (phases.as_mut_slice(), step) {
            if b.first < a.first {
                std::mem::swap(a, b);
            }
            alternate = b.first == a.first + 1 && a.count > 0 && b.count > 0;
        }
        Some((phases, alternate))
    }

    /// Returns true if no element of a row is padding, and no row is padding.
    fn is_full(&self, rows: &[u32]) -> bool {
        let Some((last, outer)) = self.axes.split_last() else { return false };
        let own_rows: usize = outer.iter().map(|l| l.pitch * l.remainders.len()).product();
        let SlidingAxis { input, stride, padding_before: before, .. } = last.axis;
        let is_full_phase = |&remainder: &usize| {
            let start_offset = before - remainder as isize;
            start_offset <= 0 && steps_to_cover(input as isize + start_offset, stride) >= last.pitch
        };
        rows.iter().filter(|&&row| row != NONE).count() == own_rows
            && last.remainders.iter().all(is_full_phase)
    }

    /// Returns, for each row of the target, the entry of its first window, and the start of that window in the source.
    /// `inside` receives the first cell over the input for each entry, unless it is empty.
    fn starts(&self, positions: &Positions, inside: &mut [i32]) -> Option<Vec<(usize, i64)>> {
        let (last, outer) = self.axes.split_last()?;
        let mut starts = Vec::new();
        let sizes: SmallVec<[usize; MAX_AXES]> = outer.iter().map(|l| l.axis.output).collect();
        for_each_index(&sizes, |at| {
            let start: usize = (0..at.len()).map(|k| at[k] * outer[k].block_stride).sum();
            let origin = |l: &AxisLayout, o: usize| {
                ((o * l.axis.stride) as isize - l.axis.padding_before) as i64 * l.source_stride as i64
            };
            let begin = (0..at.len()).map(|k| origin(&outer[k], at[k])).sum::<i64>() + origin(last, 0);
            starts.push((start, begin));
            if inside.is_empty() {
                return;
            }
            let first = |k: usize, o: usize| {
                let cells = self.axes[k].axis.cells_over_input(o);
                (!cells.is_empty()).then(|| (cells.start * positions.units[k]) as i32)
            };
            let row_offset: Option<i32> = (0..at.len()).map(|k| first(k, at[k])).sum();
            for x in 0..last.axis.output {
                let column_start = first(outer.len(), x);
                inside[start + x] = row_offset
                    .zip(column_start)
                    .map_or(-1, |(rows, column_start)| rows + column_start + positions.base as i32);
            }
        });
        Some(starts)
    }
}

impl PlaneVectors {
    /// Plans the layout of a plane, if the sizes are suitable.
    fn new(
        pass: WindowPass,
        axes: &[SlidingAxis],
        dtype: DType,
        positions: &Positions,
    ) -> Option<PlaneVectors> {
        let product = |size: &dyn Fn(&SlidingAxis) -> usize| {
            axes.iter().fold(1usize, |n, axis| n.saturating_mul(size(axis)))
        };
        let (inputs, outputs) = (product(&|axis| axis.input), product(&|axis| axis.output));
        let cells = product(&|axis| axis.kernel);
        if !dtype.is_float() || cells == 0 || cells > MAX_CELLS || inputs == 0 {
            return None;
        }
        if outputs > MAX_ELEMENTS || inputs > 4 * MAX_ELEMENTS {
            return None;
        }
        let layout = PlaneLayout::new(axes);
        let (blocks, entries) = (layout.blocks(), layout.entries());
        if blocks > MAX_ELEMENTS || entries > 2 * outputs + 4 * LANES {
            return None;
        }
        let line_len = entries.next_multiple_of(LANES);
        let rows = layout.rows()?;
        let (phases, phases_alternate) = layout.phases()?;
        let index = pass == WindowPass::Max && positions.are_needed();
        let mut inside = vec![-1; if index { line_len } else { 0 }];
        let starts = layout.starts(positions, &mut inside)?;
        let elements = blocks + line_len;
        Some(PlaneVectors {
            line_len,
            blocks,
            cells: layout.cells(positions)?,
            rows_fill_blocks: layout.is_full(&rows),
            rows,
            phases,
            step: layout.axes.last()?.axis.stride,
            phases_alternate,
            starts,
            inside,
            bytes: elements * computed_bytes(dtype) + if index { line_len * size_of::<i32>() } else { 0 },
        })
    }
}

/// Planes of a maximum (`MAX`), with positions (`INDEX`) or without, or of a sum.
pub(super) struct Run<'a, S: Element, const MAX: bool, const INDEX: bool> {
    plan: &'a Plan,
    planes: &'a PlaneVectors,
    buffers: Buffers,
    part: Part,
    stored: PhantomData<S>,
}

impl<'a, S: Element, const MAX: bool, const INDEX: bool> Run<'a, S, MAX, INDEX> {
    pub(super) fn new(plan: &'a Plan, planes: &'a PlaneVectors, buffers: Buffers, part: Part) -> Self {
        Run { plan, planes, buffers, part, stored: PhantomData }
    }

    /// Returns the number of elements of the source from `at` on.
    #[inline(always)]
    fn remaining_elements(&self, at: *const S) -> usize {
        let bytes = self.plan.planes * self.plan.source * size_of::<S>();
        (bytes - (at.addr() - self.buffers.source.addr())) / size_of::<S>()
    }

    /// Lays out a row of the source.
    #[inline(always)]
    fn lay_out_row(&self, row: *const S, to: *mut S::Computed) {
        let PlaneVectors { step, phases_alternate: paired, rows_fill_blocks: full, ref phases, .. } =
            *self.planes;
        // Number of elements that are copied as whole vectors. Includes the last, partial vector if the row fills its
        // block and the source has enough elements.
        let vectors = |from: *const S, count: usize, span: usize| {
            let more = count.next_multiple_of(LANES);
            if full && more * span <= self.remaining_elements(from) { more } else { count - count % LANES }
        };
        if paired {
            let (a, b) = (phases[0], phases[1]);
            let from = row.wrapping_add(a.first);
            let (to_a, to_b) = (to.wrapping_add(a.to), to.wrapping_add(b.to));
            let count = a.count.min(b.count);
            let full_vectors = vectors(from, count, 2);
            // SAFETY: all positions are inside of the source, and both blocks have these elements.
            unsafe { split_pairs(from, (full_vectors, count), to_a, to_b) };
            for (phase, to) in [(a, to_a), (b, to_b)] {
                for j in count..phase.count {
                    // SAFETY: the position is inside of the row, and the block has this element.
                    unsafe { to.add(j).write(row.add(phase.first + 2 * j).read_unaligned().decode()) };
                }
            }
            return;
        }
        for phase in phases {
            let (from, to) = (row.wrapping_add(phase.first), to.wrapping_add(phase.to));
            let mut done = 0;
            if step == 1 {
                done = vectors(from, phase.count, 1);
                for j in (0..done).step_by(LANES) {
                    // SAFETY: all positions are inside of the source, and the block has these elements.
                    unsafe {
                        let elements = from.add(j).cast::<[S; LANES]>().read_unaligned();
                        let elements: [S::Computed; LANES] = std::array::from_fn(|l| elements[l].decode());
                        to.add(j).cast::<[S::Computed; LANES]>().write_unaligned(elements);
                    }
                }
            }
            for j in done..phase.count {
                // SAFETY: the position is inside of the row, and the block has this element.
                unsafe { to.add(j).write(from.add(j * step).read_unaligned().decode()) };
            }
        }
    }

    /// Computes all windows of the plane that is laid out at `memory`.
    #[inline(always)]
    fn compute_windows(&self, memory: *mut S::Computed) {
        let PlaneVectors { line_len: line_capacity, blocks, ref cells, ref inside, .. } = *self.planes;
        let results = memory.wrapping_add(blocks);
        let positions = results.wrapping_add(line_capacity).cast::<i32>();
        let first = if MAX { S::LOWEST } else { S::Computed::ZERO };
        for i in 0..line_capacity {
            // SAFETY: there are `line_capacity` results.
            unsafe { results.add(i).write(first) };
        }
        if INDEX {
            // SAFETY: `inside` and the positions have `line_capacity` elements, and do not overlap.
            unsafe { positions.copy_from_nonoverlapping(inside.as_ptr(), line_capacity) };
        }
        for i in (0..line_capacity).step_by(LANES) {
            // Values that are loaded from memory make this vector code; values that are computed here or outside do
            // not.
            let mut at = [0; LANES];
            // SAFETY: results and positions have `line_capacity` elements, a multiple of LANES.
            let mut values = unsafe {
                if INDEX {
                    at = positions.add(i).cast::<[i32; LANES]>().read_unaligned();
                }
                results.add(i).cast::<[S::Computed; LANES]>().read_unaligned()
            };
            for cell in cells {
                // SAFETY: the block of the cell has an element for every entry of the line, and a vector after the last
                // one.
                let next =
                    unsafe { memory.add(cell.offset + i).cast::<[S::Computed; LANES]>().read_unaligned() };
                combine::<S, MAX, INDEX>(&mut values, &mut at, next, cell.window_offset);
            }
            // SAFETY: results and positions have `line_capacity` elements.
            unsafe {
                results.add(i).cast::<[S::Computed; LANES]>().write_unaligned(values);
                if INDEX {
                    positions.add(i).cast::<[i32; LANES]>().write_unaligned(at);
                }
            }
        }
    }

    /// Writes the results of a plane.
    #[inline(always)]
    fn store_plane(&self, memory: *mut S::Computed, plane: usize) {
        let PlaneVectors { line_len: line_capacity, blocks, ref starts, .. } = *self.planes;
        let Plan { width, source, target, last, .. } = *self.plan;
        let results = memory.wrapping_add(blocks);
        let positions = results.wrapping_add(line_capacity).cast::<i32>();
        let nowhere = (plane * source) as i64;
        for (row, &(start, origin)) in starts.iter().enumerate() {
            let first = plane * target + row * width;
            let to = self.buffers.target.cast::<S>().wrapping_add(first);
            let results = results.wrapping_add(start);
            for x in 0..width {
                // SAFETY: the plane has this window, and only this task uses the plane.
                unsafe { to.add(x).write_unaligned(S::encode(results.add(x).read())) };
            }
            if INDEX {
                let positions = (positions.wrapping_add(start).cast_const(), width);
                let windows = (nowhere, nowhere + origin, last.stride);
                // SAFETY: as above, for the positions.
                unsafe {
                    self.plan.positions.write(self.buffers.index, first, positions, windows);
                };
            }
        }
    }
}

impl<S: Element, const MAX: bool, const INDEX: bool> Work for Run<'_, S, MAX, INDEX> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let PlaneVectors { blocks, ref rows, .. } = *self.planes;
        let memory = self.buffers.scratch.cast::<S::Computed>();
        let padding = if MAX { S::LOWEST } else { S::Computed::ZERO };
        // Padding has the same positions in every plane.
        for i in 0..blocks {
            // SAFETY: the scratch memory has the blocks.
            unsafe { memory.add(i).write(padding) };
        }
        let input = self.plan.last.input;
        for plane in self.part.planes.0..self.part.planes.1 {
            let from = self.buffers.source.cast::<S>().wrapping_add(plane * self.plan.source);
            for (row, &to) in rows.iter().enumerate() {
                if to != NONE {
                    self.lay_out_row(from.wrapping_add(row * input), memory.wrapping_add(to as usize));
                }
            }
            self.compute_windows(memory);
            self.store_plane(memory, plane);
        }
    }
}
