//! The gradient of a sum, from all windows that cover an element.
//!
//! Rows of windows are first laid out over the elements. The gradient of a window is repeated once for each element of
//! the stride, with zeros around. Take the last window that begins at or before an element. The gradient of the window
//! `j` windows before is stored `j` strides before the element. These gradients are adjacent for adjacent elements,
//! with any stride. If a window covers only some elements of a stride, a mask selects them. Elements are not separated
//! and interleaved again, and rows that several rows of the target need are laid out once.

use std::marker::PhantomData;

use ortrain_expr::{DType, SlidingAxis, WindowPass};

use crate::isa::{Isa, Level, Work};
use crate::tile::number::Number;
use crate::window::engine::{Engine, Selected, WindowCandidate, with_float};
use crate::window::plan;
use crate::window::plan::{Buffers, Element, Part, Plan, computed_bytes, max_sources};

/// Number of elements that are computed at once.
const LANES: usize = 16;
/// Number of copies of a window's gradient that are written at once.
const SPLAT: usize = 8;
/// Maximum number of elements of the rows that are laid out at once. One row of the target may need `MAX_ROW_ELEMENTS` elements. At
/// most `TILE` elements of a row are computed at once.
const MAX_ELEMENTS: usize = 16 * 1024;
const MAX_ROW_ELEMENTS: usize = 64 * 1024;
const MAX_TILE_ELEMENTS: usize = 2048;
/// Maximum number of rows of windows in the plan, and maximum number of rows, and of windows along the last axis, over
/// an element.
const MAX_ROWS: usize = 256 * 1024;
const MAX_COVERING: usize = 256;

/// A window that may cover an element, by its distance from the last such window.
#[derive(Clone, Copy, Debug)]
struct Tap {
    /// Offset of its gradient in the layout, for the first element.
    offset: usize,
    /// `None` if the window covers all elements. Otherwise the begin of its mask among [`SumBackward::masks`].
    mask: Option<usize>,
}

/// Plan of the gradient over planes.
#[derive(Clone, Debug)]
pub(super) struct SumBackward {
    /// The rows of windows that cover each row of the target, in order, concatenated; and the begin for each row.
    covering: Vec<u32>,
    starts: Vec<u32>,
    /// In the order of windows.
    taps: Vec<Tap>,
    /// For each element of a tile: -1 if a window covers it, otherwise 0.
    masks: Vec<i32>,
    /// Elements of a tile: a multiple of the stride, and of whole vectors.
    tile: usize,
    /// Elements of a row's layout, and number of elements by which the layout begins before a tile.
    pitch: usize,
    leading_elements: isize,
    /// Maximum number of rows that are laid out at once.
    rows: usize,
    bytes: usize,
}

/// Gradient of a sum with overlapping windows. Sums for each element the gradients of the windows that cover it.
pub(super) fn candidate() -> WindowCandidate {
    WindowCandidate {
        name: "window.sum_backward",
        accepts: |request| request.plan.pass == WindowPass::SumGradient,
        preferences: &[],
        build: |request| {
            let &Plan { ref axes, dtype, target, width, .. } = request.plan;
            let covers = SumBackward::new(axes, dtype, target / width.max(1))?;
            let (tasks, scratch) = (request.plan.divide_into_rows(), covers.bytes);
            Some(Selected { engine: Box::new(covers), tasks, scratch })
        },
    }
}

impl Engine for SumBackward {
    fn compute_part(&self, plan: &Plan, isa: Isa, buffers: Buffers, part: Part) {
        with_float!(plan.dtype, S => Run::<S>::new(plan, self, buffers, part).run(isa));
    }
}

impl SumBackward {
    /// Plans the gradient of a sum over planes with `rows` rows, if the sizes are suitable.
    fn new(axes: &[SlidingAxis], dtype: DType, rows: usize) -> Option<SumBackward> {
        let (last, outer) = axes.split_last()?;
        let SlidingAxis { input, output, kernel, stride, dilation, padding_before: before } = *last;
        let max_sources_total =
            outer.iter().fold(1usize, |n, axis| n.saturating_mul(max_sources(axis, true)));
        if !dtype.is_float()
            || kernel == 0
            || output == 0
            || max_sources_total > MAX_COVERING
            || rows.checked_mul(max_sources_total)? > MAX_ROWS
        {
            return None;
        }
        let reach = (kernel - 1).checked_mul(dilation)?;
        let count = reach / stride + 1;
        if count > MAX_COVERING || stride > MAX_TILE_ELEMENTS / LANES {
            return None;
        }
        // Tiles begin at multiples of the stride, because all tiles share the masks of one tile.
        let step = if stride.is_multiple_of(LANES) { stride } else { stride * LANES };
        let tile = (MAX_TILE_ELEMENTS / step * step).min(input.next_multiple_of(LANES));
        let is_full_row = tile == input.next_multiple_of(LANES);
        debug_assert!(is_full_row || tile.is_multiple_of(stride), "masks repeat");
        let (mut taps, mut masks) = (Vec::new(), Vec::new());
        for j in (0..count).rev() {
            // Distance from the start of a window to the element.
            let max_reach =
                |x: usize| (x as isize + before).rem_euclid(stride as isize).unsigned_abs() + j * stride;
            let covers = |x: usize| max_reach(x).is_multiple_of(dilation) && max_reach(x) <= reach;
            let covered = (0..stride).filter(|&x| covers(x)).count();
            let offset = (count - 1 - j) * stride;
            if covered > 0 {
                taps.push(Tap { offset, mask: (covered < stride).then_some(masks.len()) });
            }
            if (1..stride).contains(&covered) {
                masks.extend((0..tile).map(|x| -i32::from(covers(x))));
            }
        }
        let pitch = tile + (count - 1) * stride;
        let lead = ((count - 1) * stride) as isize;
        let (mut covering, mut starts, mut span) = (Vec::new(), vec![0], 0);
        for row in 0..rows {
            let first = covering.len();
            covering.extend(plan::Rows::new(axes, true, row).map(|start| (start / output) as u32));
            starts.push(covering.len() as u32);
            if let (Some(low), Some(high)) = (covering[first..].first(), covering.last()) {
                span = span.max((high - low + 1) as usize);
            }
        }
        let outputs = outer.iter().fold(1usize, |n, axis| n.saturating_mul(axis.output));
        let rows = (MAX_ELEMENTS / pitch).min(outputs).max(span).max(1);
        if rows.checked_mul(pitch)? > MAX_ROW_ELEMENTS {
            return None;
        }
        let bytes = (rows * pitch + stride + LANES).next_multiple_of(LANES) * computed_bytes(dtype);
        Some(SumBackward { covering, starts, taps, masks, tile, pitch, leading_elements: lead, rows, bytes })
    }

    /// Returns the rows of windows that cover a row of the target.
    #[inline(always)]
    fn covering_rows(&self, row: usize) -> &[u32] {
        &self.covering[self.starts[row] as usize..self.starts[row + 1] as usize]
    }
}

/// Layout of the windows of a row.
#[derive(Clone, Copy)]
struct Layout {
    stride: usize,
    pitch: usize,
    /// The first element, relative to the start of window 0.
    low: isize,
    /// The windows over the layout: `first..end`.
    first: usize,
    end: usize,
}

/// A part of the gradient of a sum: rows `part.rows` of the planes.
pub(super) struct Run<'a, S> {
    plan: &'a Plan,
    covers: &'a SumBackward,
    buffers: Buffers,
    part: Part,
    stored: PhantomData<S>,
}

/// State of the loops over rows, by value: it stays in registers, and no store can change it.
#[derive(Clone, Copy)]
struct Rows<C, const TAPS: usize, const MASKED: bool> {
    /// The layouts of rows of windows, and the number of elements from one layout to the next.
    memory: *const C,
    pitch: usize,
    /// All taps, if their number is not `TAPS`.
    taps: *const Tap,
    count: usize,
    /// Offsets of the `TAPS` taps. With `MASKED` the first tap has the first mask.
    offsets: [usize; TAPS],
    masks: *const i32,
}

/// Loads the elements from `at` on, as zero where the mask is zero.
///
/// # Safety
/// `at` and `mask` are aligned, and valid for reads of [`LANES`] elements each.
#[inline(always)]
unsafe fn load_masked<C: Number>(at: *const C, mask: *const i32) -> [C; LANES] {
    // Plain loops without closures: code that is not inlined is not compiled for the level.
    // SAFETY: the caller's contract.
    unsafe {
        let mut values = at.cast::<[C; LANES]>().read();
        let mask = mask.cast::<[i32; LANES]>().read();
        for l in 0..LANES {
            values[l] = if mask[l] != 0 { values[l] } else { C::ZERO };
        }
        values
    }
}

impl<C: Number, const TAPS: usize, const MASKED: bool> Rows<C, TAPS, MASKED> {
    /// Adds the gradients at the taps `from..` of a row to the sums of [`LANES`] elements. `row` is the layout of the
    /// row for the element at `x` of the tile.
    ///
    /// # Safety
    /// The row has been laid out.
    #[inline(always)]
    unsafe fn add_row(self, row: *const C, x: usize, from: usize, mut sums: [C; LANES]) -> [C; LANES] {
        if TAPS > 0 {
            for j in from..TAPS {
                // SAFETY: the caller's contract.
                let values = unsafe { self.load_fixed_tap(row, x, j) };
                for l in 0..LANES {
                    sums[l] = sums[l].add(values[l]);
                }
            }
        } else {
            for j in from..self.count {
                // SAFETY: as above, and there are `count` taps.
                let values = unsafe { self.load_listed_tap(row, x, j) };
                for l in 0..LANES {
                    sums[l] = sums[l].add(values[l]);
                }
            }
        }
        sums
    }

    /// Returns the gradients at tap `j` of `TAPS` taps.
    ///
    /// # Safety
    /// As [`Rows::add`].
    #[inline(always)]
    unsafe fn load_fixed_tap(self, row: *const C, x: usize, j: usize) -> [C; LANES] {
        // SAFETY: the caller's contract.
        unsafe {
            let at = row.add(self.offsets[j]);
            if MASKED && j == 0 { load_masked(at, self.masks.add(x)) } else { at.cast::<[C; LANES]>().read() }
        }
    }

    /// Returns the gradients at tap `j`, for any number of taps.
    ///
    /// # Safety
    /// As [`Rows::add`], and there are more than `j` taps.
    #[inline(always)]
    unsafe fn load_listed_tap(self, row: *const C, x: usize, j: usize) -> [C; LANES] {
        // SAFETY: the caller's contract.
        unsafe {
            let Tap { offset, mask } = self.taps.add(j).read();
            let at = row.add(offset);
            match mask {
                Some(mask) => load_masked(at, self.masks.add(mask + x)),
                None => at.cast::<[C; LANES]>().read(),
            }
        }
    }

    /// Returns the sums of [`LANES`] elements at `x` of the tile, over rows of windows. The layouts begin with row
    /// `low`.
    ///
    /// # Safety
    /// The rows have been laid out.
    #[inline(always)]
    unsafe fn sum_rows(self, x: usize, rows: &[u32], low: u32) -> [C; LANES] {
        let row_address = |row: u32| self.memory.wrapping_add((row - low) as usize * self.pitch + x);
        let Some((&row, rows)) = rows.split_first() else { return [C::ZERO; LANES] };
        // SAFETY: the caller's contract, and there is at least one tap.
        let mut sums = unsafe {
            let first = if TAPS > 0 {
                self.load_fixed_tap(row_address(row), x, 0)
            } else {
                self.load_listed_tap(row_address(row), x, 0)
            };
            self.add_row(row_address(row), x, 1, first)
        };
        for &row in rows {
            // SAFETY: as above.
            sums = unsafe { self.add_row(row_address(row), x, 0, sums) };
        }
        sums
    }
}

impl<'a, S: Element> Run<'a, S> {
    pub(super) fn new(plan: &'a Plan, covers: &'a SumBackward, buffers: Buffers, part: Part) -> Self {
        Run { plan, covers, buffers, part, stored: PhantomData }
    }

    /// Returns a gradient as if it were added to zero, because sums begin with the first term.
    #[inline(always)]
    fn gradient_term(gradient: S) -> S::Computed {
        S::Computed::ZERO.add(gradient.decode())
    }

    /// Returns the layout of windows for the elements from `x` on.
    #[inline(always)]
    fn layout(&self, x: usize) -> Layout {
        let SlidingAxis { output, stride, padding_before: before, .. } = self.plan.last;
        let SumBackward { pitch, leading_elements: lead, .. } = *self.covers;
        let low = x as isize + before - lead;
        let first = low.div_euclid(stride as isize).max(0).unsigned_abs().min(output);
        let end = (low + pitch as isize).max(0).unsigned_abs().div_ceil(stride).clamp(first, output);
        Layout { stride, pitch, low, first, end }
    }

    /// Lays out a row of windows. The buffer has `left` windows from the first one on.
    ///
    /// # Safety
    /// The windows are valid for reads. `to` has capacity for a row, and for a stride and [`LANES`] elements after it.
    /// The elements after the row are laid out later or never.
    #[inline(always)]
    unsafe fn lay_out_row(from: *const S, left: usize, layout: Layout, to: *mut S::Computed) {
        let Layout { stride, pitch, low, first, end } = layout;
        let offset = |o: usize| (o * stride) as isize - low;
        let full_start = first + usize::from(first < end && offset(first) < 0);
        let clear = |start: isize, end: isize| {
            for i in start.clamp(0, pitch as isize)..end.clamp(0, pitch as isize) {
                // SAFETY: the row has this element.
                unsafe { to.offset(i).write(S::Computed::ZERO) };
            }
        };
        clear(0, offset(first));
        if full_start > first {
            // The window begins before the row.
            // SAFETY: the buffer has the window.
            let value = Self::gradient_term(unsafe { from.add(first).read_unaligned() });
            for i in 0..offset(full_start).min(pitch as isize) {
                // SAFETY: the row has this element.
                unsafe { to.offset(i).write(value) };
            }
        }
        let mut o = full_start;
        if stride <= 2 {
            // One vector at a time.
            while o < end && o + LANES / stride <= left {
                // SAFETY: enough windows are left, and after the row there is capacity for a vector.
                unsafe {
                    let to = to.offset(offset(o));
                    if stride == 1 {
                        let values = from.add(o).cast::<[S; LANES]>().read_unaligned();
                        let mut sums = [S::Computed::ZERO; LANES];
                        for l in 0..LANES {
                            sums[l] = Self::gradient_term(values[l]);
                        }
                        to.cast::<[S::Computed; LANES]>().write(sums);
                    } else {
                        let values = from.add(o).cast::<[S; LANES / 2]>().read_unaligned();
                        let mut sums = [S::Computed::ZERO; LANES];
                        for l in 0..LANES {
                            sums[l] = Self::gradient_term(values[l / 2]);
                        }
                        to.cast::<[S::Computed; LANES]>().write(sums);
                    }
                }
                o += LANES / stride;
            }
        }
        for o in o..end {
            // SAFETY: the buffer has the window, and after the row there is capacity for a stride.
            unsafe {
                let value = Self::gradient_term(from.add(o).read_unaligned());
                let to = to.offset(offset(o));
                for i in (0..stride).step_by(SPLAT) {
                    to.add(i).cast::<[S::Computed; SPLAT]>().write([value; SPLAT]);
                }
            }
        }
        clear(offset(end), pitch as isize);
    }

    /// Computes rows of the elements `x..x + tile` of a plane.
    #[inline(always)]
    fn compute_tile<const TAPS: usize, const MASKED: bool>(&self, plane: usize, x: usize) {
        let Plan { source, target, width, planes, ref last, .. } = *self.plan;
        let SumBackward { tile, pitch, rows: max_rows, ref taps, ref masks, .. } = *self.covers;
        let (mut row, end_row) = self.part.rows;
        let memory = self.buffers.scratch.cast::<S::Computed>();
        let rows = Rows::<S::Computed, TAPS, MASKED> {
            memory,
            pitch,
            taps: taps.as_ptr(),
            count: taps.len(),
            offsets: std::array::from_fn(|j| taps[j].offset),
            masks: masks.as_ptr(),
        };
        let layout = self.layout(x);
        // After the layouts there is capacity for a vector.
        let spare = memory.wrapping_add(max_rows * pitch).cast::<S>();
        let end = (self.part.planes.1 - 1) * target + end_row * width;
        let count = tile.min(width - x);
        while row < end_row {
            // Takes rows of the target while the rows of windows that cover them can be laid out at once.
            let (mut low, mut high, mut until) = (u32::MAX, 0, row);
            while until < end_row {
                let over = self.covers.covering_rows(until);
                if let (Some(&first), Some(&last)) = (over.first(), over.last()) {
                    let (new_low, new_high) = (low.min(first), high.max(last + 1));
                    if (new_high - new_low) as usize > max_rows {
                        break;
                    }
                    (low, high) = (new_low, new_high);
                }
                until += 1;
            }
            for (i, windows) in (low..high).enumerate() {
                let first = plane * source + windows as usize * last.output;
                let from = self.buffers.source.cast::<S>().wrapping_add(first);
                // SAFETY: the windows are in the buffer, and there is capacity for all layouts.
                unsafe { Self::lay_out_row(from, planes * source - first, layout, memory.add(i * pitch)) };
            }
            for row in row..until {
                let over = self.covers.covering_rows(row);
                let at = plane * target + row * width + x;
                // Elements that are written after a row are overwritten, unless there are several tiles.
                let capacity = if tile < width { count } else { end - at };
                let to = self.buffers.target.cast::<S>().wrapping_add(at);
                for i in (0..count).step_by(LANES) {
                    // SAFETY: the rows have been laid out.
                    let sums = unsafe { rows.sum_rows(i, over, low) };
                    let mut zeros = [S::encode(S::Computed::ZERO); LANES];
                    for l in 0..LANES {
                        zeros[l] = S::encode(sums[l]);
                    }
                    let is_full = capacity - i >= LANES;
                    let to = to.wrapping_add(i);
                    // A single store for both cases, so that the sums stay in registers.
                    let into = if is_full { to } else { spare };
                    // SAFETY: the target has these elements, and only this task uses them. A vector that exceeds the
                    // target is stored at `spare`, and only `room - i` of its elements are copied to the target.
                    unsafe {
                        into.cast::<[S; LANES]>().write_unaligned(zeros);
                        if !is_full {
                            let bytes = (capacity - i) * size_of::<S>();
                            spare.cast::<u8>().copy_to_nonoverlapping(to.cast(), bytes);
                        }
                    }
                }
            }
            row = until;
        }
    }
}

impl<S: Element> Run<'_, S> {
    /// Computes the part.
    pub(super) fn run(self, isa: Isa) {
        let taps = &self.covers.taps;
        let others = taps.get(1..).unwrap_or_default();
        let masked = taps.first().is_some_and(|tap| tap.mask.is_some());
        // The usual windows have specialised loops.
        match (taps.len(), masked, others.iter().any(|tap| tap.mask.is_some())) {
            (2, false, false) => isa.run(Loop::<S, 2, false>(self)),
            (2, true, false) => isa.run(Loop::<S, 2, true>(self)),
            (3, false, false) => isa.run(Loop::<S, 3, false>(self)),
            _ => isa.run(Loop::<S, 0, false>(self)),
        }
    }
}

/// A loop over planes. Each loop is a separate function, and so has all registers.
struct Loop<'a, S, const TAPS: usize, const MASKED: bool>(Run<'a, S>);

impl<S: Element, const TAPS: usize, const MASKED: bool> Work for Loop<'_, S, TAPS, MASKED> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let run = self.0;
        for plane in run.part.planes.0..run.part.planes.1 {
            for x in (0..run.plan.width).step_by(run.covers.tile) {
                run.compute_tile::<TAPS, MASKED>(plane, x);
            }
        }
    }
}
