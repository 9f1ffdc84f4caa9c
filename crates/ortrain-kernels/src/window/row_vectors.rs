//! Vectors of windows along the last axis.
//!
//! With a stride of 2, the elements under cell `k` of adjacent windows are two apart, and at the ends of a row some are
//! in the padding. So rows of the source are first laid out as lines: one line for each remainder of the position
//! modulo the stride, with explicit padding. In a line, the elements under a cell of adjacent windows are adjacent.
//! Lines that the next row of windows needs too are cached.

use std::marker::PhantomData;

use ortrain_expr::{DType, SlidingAxis, WindowPass};

use super::per_window::{LANES, combine, split_pairs};
use crate::isa::{Isa, Level, Work};
use crate::tile::number::Number;
use crate::window::engine::{Engine, Request, Selected, WindowCandidate, run_forward};
use crate::window::plan::{
    Buffers, Element, Part, Plan, Positions, Rows, computed_bytes, max_sources, steps_to_cover,
};

/// Maximum number of rows that a window covers.
const MAX_ROWS: usize = 32;
/// Maximum number of elements of the cached lines, and of the lines of one row.
const MAX_CACHED_ELEMENTS: usize = 32 * 1024;
const MAX_LINE_ELEMENTS: usize = 4 * 1024;
/// Maximum number of windows of a tile.
const MAX_TILE_WINDOWS: usize = 2048;
/// Maximum number of cells along the last axis.
const MAX_CELLS: usize = 1024;
/// Minimum number of windows of a row.
const MIN_WINDOWS: usize = 4;

/// A cell of the window along the last axis.
#[derive(Clone, Copy, Debug)]
struct Cell {
    /// Offset of the element for the tile's first window, among a row's lines.
    offset: usize,
    /// Distance of the cell from the start of the window, in units of positions.
    window_offset: i32,
}

/// Layout of rows along the last axis.
#[derive(Clone, Debug)]
pub(super) struct RowVectors {
    /// Maximum number of windows of a tile.
    tile: usize,
    /// Elements of one line: enough for a tile of whole vectors and the reach of the cells.
    line: usize,
    /// Reach of the cells in a line.
    reach: usize,
    /// First source position of each line of a row, for window 0. One step of the window moves the position by `step`.
    firsts: Vec<isize>,
    step: usize,
    cells: Vec<Cell>,
    /// Number of cached rows: the rows that a window covers.
    rows: usize,
    /// For each window, rounded up to whole vectors: the first cell inside of the input along the last axis, as
    /// [`Cell::behind`]. -1 without such a cell. Empty if no positions are needed.
    inside: Vec<i32>,
    bytes: usize,
}

/// Vectors of windows along the last axis. Rows are first laid out as lines, with padding, and separated by the
/// remainder of the position modulo the stride. Adjacent windows then read adjacent elements. For large planes.
pub(super) fn candidate() -> WindowCandidate {
    WindowCandidate {
        name: "window.row_vectors",
        accepts: |request| request.is_forward(),
        preferences: &[has_long_rows],
        build: |request| {
            let Plan { pass, ref axes, dtype, ref positions, .. } = *request.plan;
            let layout = RowVectors::new(pass, axes, dtype, positions)?;
            let (tasks, scratch) = (request.plan.divide_into_rows(), layout.bytes);
            Some(Selected { engine: Box::new(layout), tasks, scratch })
        },
    }
}

/// Short rows do not fill a vector.
fn has_long_rows(request: &Request<'_>) -> bool {
    request.plan.last.output >= MIN_WINDOWS
}

impl Engine for RowVectors {
    fn compute_part(&self, plan: &Plan, isa: Isa, buffers: Buffers, part: Part) {
        run_forward!(self, plan, isa, buffers, part);
    }
}

impl RowVectors {
    /// Plans the layout of rows, if the sizes are suitable.
    fn new(
        pass: WindowPass,
        axes: &[SlidingAxis],
        dtype: DType,
        positions: &Positions,
    ) -> Option<RowVectors> {
        let last = axes.last()?;
        let SlidingAxis { input, output, kernel, stride, dilation, padding_before: before } = *last;
        let forward = matches!(pass, WindowPass::Max | WindowPass::Sum);
        if !forward || !dtype.is_float() || kernel == 0 || kernel > MAX_CELLS || kernel > 64 + 4 * input {
            return None;
        }
        // Positions relative to the start of the window must fit into 32 bits.
        let (mut reach, mut size) = (0usize, 1usize);
        for axis in axes.iter().rev() {
            let kernel_reach =
                axis.kernel.saturating_sub(1).saturating_mul(axis.dilation).saturating_mul(size);
            reach = reach.saturating_add(kernel_reach);
            size = size.saturating_mul(axis.input);
        }
        if i32::try_from(reach).is_err() {
            return None;
        }
        let cell_offset = |k: usize| k * dilation;
        let unit = *positions.units.last()?;
        let last_cell = cell_offset(kernel - 1) / stride;
        // Remainders of the positions under cells.
        let mut remainders: Vec<usize> = (0..kernel).map(|k| cell_offset(k) % stride).collect();
        remainders.sort_unstable();
        remainders.dedup();
        let lines = remainders.len();
        let outer = &axes[..axes.len() - 1];
        let rows = outer.iter().fold(1usize, |n, axis| n.saturating_mul(max_sources(axis, false)));
        if rows > MAX_ROWS {
            return None;
        }
        let line_capacity = MAX_LINE_ELEMENTS.min(MAX_CACHED_ELEMENTS / rows.max(1)) / lines;
        let tile = (line_capacity.checked_sub(last_cell)? / LANES * LANES)
            .min(MAX_TILE_WINDOWS)
            .min(output.next_multiple_of(LANES));
        if tile == 0 {
            return None;
        }
        let line = tile + last_cell;
        let cell = |k: usize| Cell {
            offset: remainders.binary_search(&(cell_offset(k) % stride)).unwrap_or(0) * line
                + cell_offset(k) / stride,
            window_offset: (k * unit) as i32,
        };
        let cells = (0..kernel).map(cell).collect();
        let firsts = remainders.iter().map(|&remainder| remainder as isize - before).collect();
        let index = pass == WindowPass::Max && positions.are_needed();
        let inside = if index {
            let first = |o: usize| {
                let cells = if o < output { last.cells_over_input(o) } else { 0..0 };
                if cells.is_empty() { -1 } else { (cells.start * unit) as i32 }
            };
            (0..output.next_multiple_of(LANES)).map(first).collect()
        } else {
            Vec::new()
        };
        let elements = rows * lines * line + tile;
        let bytes = elements * computed_bytes(dtype) + if index { tile * size_of::<i32>() } else { 0 };
        Some(RowVectors { tile, line, reach: last_cell, firsts, step: stride, cells, rows, inside, bytes })
    }
}

/// A part of a maximum (`MAX`), with positions (`INDEX`) or without, or of a sum.
pub(super) struct Run<'a, S: Element, const MAX: bool, const INDEX: bool> {
    plan: &'a Plan,
    lines: &'a RowVectors,
    buffers: Buffers,
    part: Part,
    stored: PhantomData<S>,
}

/// The cached rows.
struct RowCache {
    rows: [usize; MAX_ROWS],
    next: usize,
}

const NONE: usize = usize::MAX;

/// The rows that the windows of a row of the target cover.
struct CoveredRows<T> {
    count: usize,
    lines: [*const T; MAX_ROWS],
    /// Distance of the cells over each row from the start of the windows, in units of positions.
    window_offsets: [i32; MAX_ROWS],
}

/// The windows `q..q + count` of a row of the target, in a plane.
#[derive(Clone, Copy)]
struct Tile {
    plane: usize,
    row: usize,
    q: isize,
    count: usize,
}

impl<'a, S: Element, const MAX: bool, const INDEX: bool> Run<'a, S, MAX, INDEX> {
    pub(super) fn new(plan: &'a Plan, lines: &'a RowVectors, buffers: Buffers, part: Part) -> Self {
        Run { plan, lines, buffers, part, stored: PhantomData }
    }

    /// Returns the number of positions of the source along the last axis.
    #[inline(always)]
    fn source_width(&self) -> usize {
        self.plan.last.input
    }

    /// Returns the number of elements of the source from `at` on.
    #[inline(always)]
    fn remaining_elements(&self, at: *const S) -> usize {
        let bytes = self.plan.planes * self.plan.source * size_of::<S>();
        (bytes - (at.addr() - self.buffers.source.addr())) / size_of::<S>()
    }

    /// Lays out a row: writes `len` elements of each line, for the windows from `q` on.
    #[inline(always)]
    fn lay_out_row(&self, row: *const S, to: *mut S::Computed, q: isize, len: usize) {
        let RowVectors { step, line, ref firsts, .. } = *self.lines;
        let padding = if MAX { S::LOWEST } else { S::Computed::ZERO };
        let width = self.source_width() as isize;
        // Range of elements inside of the row, for a line that begins at position `first`.
        let inside = |first: isize| {
            let low = steps_to_cover(-first, step).min(len);
            (low, steps_to_cover(width - first, step).clamp(low, len))
        };
        let pad = |to: *mut S::Computed, start: usize, end: usize| {
            for j in start..end {
                // SAFETY: a line has `len` elements.
                unsafe { to.add(j).write(padding) };
            }
        };
        let at = |first: isize, j: usize| row.wrapping_offset(first + (j * step) as isize);
        // Rounds up to whole vectors if the source has enough elements. Elements after the row are overwritten.
        let rounded = |from: *const S, start: usize, end: usize, span: usize| {
            let count = (end - start).next_multiple_of(LANES).min(len - start);
            if end > start && (count - 1) * span + span <= self.remaining_elements(from) {
                count
            } else {
                end - start
            }
        };
        if step == 2 && firsts.len() == 2 {
            // Both lines at once: a pair of elements is adjacent.
            let (first_even, first_odd) = (firsts[0] + q * 2, firsts[1] + q * 2);
            let ((even, even_end), (odd, odd_end)) = (inside(first_even), inside(first_odd));
            let (evens, odds) = (to, to.wrapping_add(line));
            let start = even.max(odd);
            let end = even_end.min(odd_end).max(start);
            let from = at(first_even, start);
            let count = rounded(from, start, end, 2);
            let (to_even, to_odd) = (evens.wrapping_add(start), odds.wrapping_add(start));
            let full_vectors = count - count % LANES;
            // SAFETY: all positions are inside of the source, and both lines have these elements.
            unsafe { split_pairs(from, (full_vectors, count), to_even, to_odd) };
            // One of the two lines may begin earlier or end later.
            let ends = |line: *mut S::Computed, first: isize, low: usize, high: usize| {
                pad(line, 0, low);
                let rest = |from: usize, to: usize| {
                    for j in from..to {
                        // SAFETY: the position is inside of the row, and the line has this element.
                        unsafe { line.add(j).write(at(first, j).read_unaligned().decode()) };
                    }
                };
                rest(low, start.min(high));
                rest(end.max(low), high);
                pad(line, high, len);
            };
            ends(evens, first_even, even, even_end);
            ends(odds, first_odd, odd, odd_end);
            return;
        }
        for (k, first) in firsts.iter().enumerate() {
            let to = to.wrapping_add(k * line);
            let first = first + q * step as isize;
            let (start, end) = inside(first);
            let from = at(first, start);
            if step == 1 {
                for j in 0..rounded(from, start, end, 1) {
                    // SAFETY: the position is inside of the source, and the line has this element.
                    unsafe { to.add(start + j).write(from.add(j).read_unaligned().decode()) };
                }
            } else {
                for j in 0..end - start {
                    // SAFETY: the position is inside of the row, and the line has this element.
                    unsafe { to.add(start + j).write(from.add(j * step).read_unaligned().decode()) };
                }
            }
            pad(to, 0, start);
            pad(to, end, len);
        }
    }

    /// Returns the lines of the row that starts at element `start` of a plane, with `len` elements each, from window
    /// `q` on. The lines are in place, in the cache, or laid out now. `used` marks the cached rows that must stay.
    #[inline(always)]
    fn row_lines(
        &self,
        plane: *const S,
        start: usize,
        (q, len): (isize, usize),
        cache: &mut RowCache,
        used: &mut u32,
    ) -> *const S::Computed {
        let RowVectors { step, rows, line, ref firsts, .. } = *self.lines;
        let row = plane.wrapping_add(start);
        if S::PLAIN && step == 1 && firsts.len() == 1 {
            // In place, if the row needs no padding.
            let first = firsts[0] + q;
            if first >= 0 && first + len as isize <= self.source_width() as isize {
                return row.wrapping_offset(first).cast();
            }
        }
        let memory = self.buffers.scratch.cast::<S::Computed>();
        let at = |slot: usize| memory.wrapping_add(slot * firsts.len() * line);
        for slot in 0..rows {
            if cache.rows[slot] == start {
                *used |= 1 << slot;
                return at(slot);
            }
        }
        while *used & (1 << cache.next) != 0 {
            cache.next = (cache.next + 1) % rows;
        }
        let slot = cache.next;
        cache.next = (slot + 1) % rows;
        cache.rows[slot] = start;
        *used |= 1 << slot;
        self.lay_out_row(row, at(slot), q, len);
        at(slot)
    }

    /// Finds or lays out the rows that the windows of a tile cover.
    #[inline(always)]
    fn find_covered_rows(&self, tile: Tile, cache: &mut RowCache, covered: &mut CoveredRows<S::Computed>) {
        let plan = self.plan;
        let len = tile.count.next_multiple_of(LANES) + self.lines.reach;
        let plane = self.buffers.source.cast::<S>().wrapping_add(tile.plane * plan.source);
        let mut used = 0;
        covered.count = 0;
        let mut rows = Rows::new(&plan.axes, false, tile.row);
        loop {
            let window_offset = if INDEX { rows.offset_from_window(&plan.positions) as i32 } else { 0 };
            let Some(start) = rows.next() else { break };
            covered.lines[covered.count] = self.row_lines(plane, start, (tile.q, len), cache, &mut used);
            covered.window_offsets[covered.count] = window_offset;
            covered.count += 1;
        }
    }

    /// Returns the results of a tile, and the positions of its maxima. Positions are relative to the start of their
    /// window, and -1 if nothing was found.
    #[inline(always)]
    fn result_buffers(&self) -> (*mut S::Computed, *mut i32) {
        let RowVectors { rows, line, tile, ref firsts, .. } = *self.lines;
        let results = self.buffers.scratch.cast::<S::Computed>().wrapping_add(rows * firsts.len() * line);
        (results, results.wrapping_add(tile).cast())
    }

    /// Combines the elements under `cells` with the results of `capacity` windows.
    #[inline(always)]
    fn combine_cells(
        covered: &CoveredRows<S::Computed>,
        cells: &[Cell],
        capacity: usize,
        results: *mut S::Computed,
        found: *mut i32,
    ) {
        let mut start = 0;
        while start < capacity {
            // Values that are loaded from memory make this vector code; values that are computed here do not.
            let (to, positions) = (results.wrapping_add(start), found.wrapping_add(start));
            let mut at = [0; LANES];
            // SAFETY: results and positions have `capacity` elements, a multiple of LANES.
            let mut values = unsafe {
                if INDEX {
                    at = positions.cast::<[i32; LANES]>().read_unaligned();
                }
                to.cast::<[S::Computed; LANES]>().read_unaligned()
            };
            for r in 0..covered.count {
                let (row, window_offset) = (covered.lines[r].wrapping_add(start), covered.window_offsets[r]);
                for cell in cells {
                    // SAFETY: the lines have an element for each of these windows and each cell.
                    let next =
                        unsafe { row.add(cell.offset).cast::<[S::Computed; LANES]>().read_unaligned() };
                    combine::<S, MAX, INDEX>(&mut values, &mut at, next, window_offset + cell.window_offset);
                }
            }
            // SAFETY: as above.
            unsafe {
                to.cast::<[S::Computed; LANES]>().write_unaligned(values);
                if INDEX {
                    positions.cast::<[i32; LANES]>().write_unaligned(at);
                }
            }
            start += LANES;
        }
    }

    /// Computes a tile.
    #[inline(always)]
    fn compute_tile(&self, tile: Tile, cache: &mut RowCache, covered: &mut CoveredRows<S::Computed>) {
        let plan = self.plan;
        let RowVectors { ref cells, ref inside, .. } = *self.lines;
        let Tile { plane, row, q, count } = tile;
        self.find_covered_rows(tile, cache, covered);
        let capacity = count.next_multiple_of(LANES);
        let (results, positions) = self.result_buffers();
        let start = if MAX { S::LOWEST } else { S::Computed::ZERO };
        for i in 0..capacity {
            // SAFETY: results have capacity for a tile of whole vectors.
            unsafe { results.add(i).write(start) };
        }
        if INDEX {
            // The first cell inside of the input, for any element under it.
            let inside = &inside[q.unsigned_abs()..][..capacity];
            let window_offset = covered.window_offsets[0];
            for (i, &cell) in inside.iter().enumerate() {
                let first = if cell < 0 || covered.count == 0 { -1 } else { cell + window_offset };
                // SAFETY: as above.
                unsafe { positions.add(i).write(first) };
            }
        }
        Self::combine_cells(covered, cells, capacity, results, positions);
        let first = plane * plan.target + row * plan.width;
        let target = self.buffers.target.cast::<S>().wrapping_add(first);
        let target = target.wrapping_offset(q);
        for i in 0..count {
            // SAFETY: the windows are at positions inside of the row, and only this task uses the row.
            unsafe { target.add(i).write_unaligned(S::encode(results.add(i).read())) };
        }
        if INDEX {
            let step = plan.last.stride;
            let nowhere = (plane * plan.source) as i64;
            let origin = if plan.positions.are_cell_numbers() { 0 } else { self.row_origin(row) as i64 };
            let start = nowhere + origin + q as i64 * step as i64 - plan.last.padding_before as i64;
            let windows = first.wrapping_add_signed(q);
            // SAFETY: as above, for the positions.
            unsafe {
                plan.positions.write(self.buffers.index, windows, (positions, count), (nowhere, start, step));
            };
        }
    }

    /// Returns the start of the windows of a row in the plane, without the last axis. May be outside of the plane.
    #[inline(always)]
    fn row_origin(&self, row: usize) -> isize {
        let axes = &self.plan.axes;
        let (mut rest, mut stride) = (row, axes[axes.len() - 1].input);
        let mut origin = 0;
        for axis in axes[..axes.len() - 1].iter().rev() {
            let at = if rest < axis.output { rest } else { rest % axis.output };
            origin += ((at * axis.stride) as isize - axis.padding_before) * stride as isize;
            rest = if rest < axis.output { 0 } else { rest / axis.output };
            stride *= axis.input;
        }
        origin
    }
}

impl<S: Element, const MAX: bool, const INDEX: bool> Work for Run<'_, S, MAX, INDEX> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let (tile, end) = (self.lines.tile, self.plan.width as isize);
        let plain = S::PLAIN && self.lines.step == 1 && self.lines.firsts.len() == 1;
        let mut cache = RowCache { rows: [NONE; MAX_ROWS], next: 0 };
        let mut covered =
            CoveredRows { count: 0, lines: [std::ptr::null(); MAX_ROWS], window_offsets: [0; MAX_ROWS] };
        for plane in self.part.planes.0..self.part.planes.1 {
            let mut q = 0;
            while q < end {
                let mut count = (end - q).unsigned_abs().min(tile);
                // A tile of whole vectors may be read in place.
                if plain && count > 4 * LANES {
                    count -= count % LANES;
                }
                for slot in 0..self.lines.rows {
                    cache.rows[slot] = NONE;
                }
                for row in self.part.rows.0..self.part.rows.1 {
                    self.compute_tile(Tile { plane, row, q, count }, &mut cache, &mut covered);
                }
                q += count as isize;
            }
        }
    }
}
