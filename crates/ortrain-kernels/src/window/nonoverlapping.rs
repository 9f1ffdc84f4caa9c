//! Gradients of pooling with windows that do not overlap: at most one window covers an element.
//!
//! Every element is written once: the gradient of the window over it if the maximum was there, otherwise zero. Vector
//! instructions compare the cell number of each element with the cell number of its window's maximum. Nothing is zeroed
//! first, and no addition waits for an earlier one. The gradient of a sum is computed in the same way, but every cell
//! of a window receives the gradient.

use std::marker::PhantomData;

use ortrain_expr::{DType, IndexKind, SlidingAxis, WindowPass};

use super::max_backward::{self, MaxBackward};
use crate::isa::{Isa, Level, Work, portable};
use crate::tile::number::Number;
use crate::window::engine::{Engine, Request, Selected, WindowCandidate, with_float};
use crate::window::plan::{
    Buffers, Element, MIN_TASK_WORK, MIN_UNDIVIDED_PLANES, Part, Plan, Positions, Rows, Tasks,
    computed_bytes, windows_over,
};

/// Number of elements that are computed at once.
const LANES: usize = 16;
/// Number of windows that are read at once if each covers a pair of elements.
const QUARTER: usize = LANES / 4;
/// Number of copies of a window's value that are written at once.
const SPLAT: usize = 8;
/// Maximum number of rows of a plane, because rows are planned one by one.
const MAX_ROWS: usize = 256 * 1024;
/// Maximum number of elements of a row, and maximum stride.
const MAX_WIDTH: usize = 64 * 1024;
/// Marks a row that no window covers.
const NO_WINDOWS: u32 = u32::MAX;
/// Cell number that no window has.
const NO_NUMBER: i32 = i32::MIN;

/// Rows of the target that are computed at once.
#[derive(Clone, Copy, Debug)]
struct Step {
    /// Start of the first row in the plane, and number of rows: one or two.
    start: u32,
    rows: u32,
    /// Start of the row of windows over these rows, or [`NO_WINDOWS`].
    windows: u32,
    /// Cell number of each row, along all axes but the last.
    numbers: [i32; 2],
}

/// Arrangement of the windows along the last axis.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
enum WindowArrangement {
    /// A single window.
    Single = 0,
    /// Each window covers a pair of elements, from the first element of the row on.
    Pairs,
    /// Windows are expanded over the elements first.
    Expanded,
}

/// Plan of the gradient over planes.
#[derive(Clone, Debug)]
pub(super) struct NonOverlapping {
    steps: Vec<Step>,
    /// Cell number of each element of a row along the last axis, or [`NO_NUMBER`] if no window covers the element. The
    /// number of the row is added to it. The length is rounded up to whole vectors.
    cells: Vec<i32>,
    along: WindowArrangement,
    /// Plan for planes with positions outside of their windows, if there may be such positions.
    fallback: Option<MaxBackward>,
    /// Elements of each of the two lines with expanded windows.
    line_len: usize,
    bytes: usize,
    /// Bytes of scratch memory for `fallback`.
    fallback_bytes: usize,
}

/// Gradients if at most one window covers an element. Tests for each element if the window over it had its maximum
/// there.
pub(super) fn candidate() -> WindowCandidate {
    WindowCandidate {
        name: "window.nonoverlapping",
        accepts: |request| !request.is_forward(),
        preferences: &[],
        build: |request| {
            let &Plan { pass, ref axes, dtype, ref positions, planes, source, target, .. } = request.plan;
            let kernel = NonOverlapping::new(pass, axes, dtype, positions, target)?;
            let (kernel, tasks) = if has_positions_of_cells(request) {
                let tasks = kernel.tasks(planes, target);
                (kernel, tasks)
            } else {
                // The fallback needs tasks with whole planes.
                let spread = MaxBackward::new(dtype, request.shape, positions);
                let tasks = spread.tasks(planes, source, target);
                let scratch = spread.scratch(&tasks);
                if tasks.parts > 1 {
                    return None;
                }
                (kernel.with_fallback(spread, scratch), tasks)
            };
            let scratch = kernel.bytes.max(kernel.fallback_bytes);
            Some(Selected { engine: Box::new(kernel), tasks, scratch })
        },
    }
}

/// Returns true if there are no positions, or if every position is a cell over the input.
fn has_positions_of_cells(request: &Request<'_>) -> bool {
    let inside = |axis: &SlidingAxis| {
        axis.output > 0 && [0, axis.output - 1].iter().all(|&o| axis.cells_over_input(o) == (0..axis.kernel))
    };
    let index = request.plan.positions.index;
    index.is_none() || index == Some((IndexKind::Cell, DType::U8)) && request.shape.axes.iter().all(inside)
}

impl Engine for NonOverlapping {
    /// Returns the number of steps of a plane.
    fn rows(&self, _: &Plan) -> usize {
        self.steps.len()
    }

    fn compute_part(&self, plan: &Plan, isa: Isa, buffers: Buffers, part: Part) {
        with_float!(plan.dtype, S => Run::<S>::new(plan, self, buffers, part).run(isa));
    }
}

impl NonOverlapping {
    /// Plans the gradient of a maximum or of a sum over planes of `target` elements, if windows do not overlap. Maxima
    /// must have cell numbers, because comparisons of bytes are faster than comparisons of positions.
    fn new(
        pass: WindowPass,
        axes: &[SlidingAxis],
        dtype: DType,
        positions: &Positions,
        target: usize,
    ) -> Option<NonOverlapping> {
        let is_disjoint = |axis: &SlidingAxis| {
            let reach = axis.kernel.saturating_sub(1).saturating_mul(axis.dilation);
            axis.kernel > 0 && (axis.output <= 1 || reach < axis.stride)
        };
        let last = *axes.last()?;
        let rows = target.checked_div(last.input)?;
        let fits = i32::try_from(target).is_ok() && rows <= MAX_ROWS && last.input <= MAX_WIDTH;
        if !(pass == WindowPass::SumGradient || positions.are_cell_numbers()) || !dtype.is_float() || !fits {
            return None;
        }
        if !axes.iter().all(is_disjoint) || axes.iter().any(|axis| axis.output == 0) {
            return None;
        }
        let along = match last {
            SlidingAxis { output: 1, .. } => WindowArrangement::Single,
            SlidingAxis { stride: 2, padding_before: 0, .. } => WindowArrangement::Pairs,
            SlidingAxis { stride: ..=MAX_WIDTH, .. } => WindowArrangement::Expanded,
            _ => return None,
        };
        let sum = pass == WindowPass::SumGradient;
        // All cells of a sum's window receive the gradient, so all of them have number 0.
        let of_cell = |axis: &SlidingAxis, unit: usize, i: usize| {
            let over = windows_over(axis, i);
            let from_start = i as isize + axis.padding_before - (over.first * axis.stride) as isize;
            let cell = from_start.unsigned_abs() / axis.dilation;
            (over.count > 0).then_some(if sum { 0 } else { cell * unit })
        };
        let unit = |k: usize| if sum { 0 } else { positions.units[k] };
        let row = |row: usize| {
            let windows = Rows::new(axes, true, row).next()?;
            let (mut rest, mut window) = (row, if sum { 0 } else { positions.base });
            for (k, axis) in axes[..axes.len() - 1].iter().enumerate().rev() {
                window += of_cell(axis, unit(k), rest % axis.input)?;
                rest /= axis.input;
            }
            let windows = u32::try_from(windows).ok().filter(|&windows| windows != NO_WINDOWS)?;
            Some((windows, i32::try_from(window).ok()?))
        };
        let mut steps: Vec<Step> = Vec::new();
        for r in 0..rows {
            let (windows, window) = row(r).unwrap_or((NO_WINDOWS, 0));
            match steps.last_mut() {
                Some(Step { rows: rows @ 1, windows: same, numbers, .. }) if *same == windows => {
                    (*rows, numbers[1]) = (2, window);
                }
                _ => steps.push(Step {
                    start: (r * last.input) as u32,
                    rows: 1,
                    windows,
                    numbers: [window; 2],
                }),
            }
        }
        let cells = (0..last.input.next_multiple_of(LANES)).map(|x| {
            let column_cell = if x < last.input { of_cell(&last, unit(axes.len() - 1), x) } else { None };
            column_cell.and_then(|own| i32::try_from(own).ok()).unwrap_or(NO_NUMBER)
        });
        let capacity = last.input.next_multiple_of(LANES) + 2 * last.stride.min(MAX_WIDTH) + SPLAT;
        let capacity =
            if matches!(along, WindowArrangement::Expanded) { capacity.next_multiple_of(LANES) } else { 0 };
        let written = last.input.next_multiple_of(LANES);
        let bytes = capacity * (computed_bytes(dtype) + size_of::<i32>()) + written * dtype.size();
        Some(NonOverlapping {
            steps,
            cells: cells.collect(),
            along,
            fallback: None,
            line_len: capacity,
            bytes,
            fallback_bytes: 0,
        })
    }

    /// Adds a plan for positions outside of their windows. If a part has such positions, `spread` recomputes its
    /// planes, with `scratch` bytes of memory.
    fn with_fallback(mut self, spread: MaxBackward, scratch: usize) -> NonOverlapping {
        (self.fallback, self.fallback_bytes) = (Some(spread), scratch);
        self
    }

    /// Divides planes of `target` elements if there are few planes, and combines small planes.
    fn tasks(&self, planes: usize, target: usize) -> Tasks {
        let steps = self.steps.len();
        if planes < MIN_UNDIVIDED_PLANES && target > MIN_TASK_WORK {
            let rows = (MIN_TASK_WORK * steps / target).max(1);
            return Tasks { planes: 1, parts: steps.div_ceil(rows), rows };
        }
        Tasks { planes: (MIN_TASK_WORK / target.max(1)).clamp(1, planes.max(1)), parts: 1, rows: steps }
    }
}

/// Storage type of cell numbers.
pub(super) trait Cell: Copy {
    fn position_number(self) -> i32;
}

impl Cell for u8 {
    #[inline(always)]
    fn position_number(self) -> i32 {
        i32::from(self)
    }
}

impl Cell for u16 {
    #[inline(always)]
    fn position_number(self) -> i32 {
        i32::from(self)
    }
}

/// A sum has no cell numbers.
impl Cell for () {
    #[inline(always)]
    fn position_number(self) -> i32 {
        0
    }
}

/// A row of windows: gradient and cell number of each window.
#[derive(Clone, Copy)]
struct Windows<S, I> {
    gradient: *const S,
    index: *const I,
}

impl<S: Element, I: Cell> Windows<S, I> {
    /// Returns the gradient of a window, added to zero (so -0 becomes 0), and the cell number of its maximum.
    ///
    /// # Safety
    /// The row has window `o`.
    #[inline(always)]
    unsafe fn at(self, o: usize) -> (S::Computed, i32) {
        // SAFETY: the caller's contract.
        unsafe {
            let gradient = self.gradient.add(o).read_unaligned().decode();
            (S::Computed::ZERO.add(gradient), self.index.add(o).read_unaligned().position_number())
        }
    }
}

/// State of the loops over rows, by value: it stays in registers, and no store can change it.
#[derive(Clone, Copy)]
struct Row<S: Element> {
    last: SlidingAxis,
    /// [`NonOverlapping::cells`], and the number of vectors in it.
    cells: *const i32,
    vectors: usize,
    along: WindowArrangement,
    /// The lines with windows expanded over the elements: gradients and numbers. They begin a stride before the first
    /// element.
    values: *mut S::Computed,
    numbers: *mut i32,
    /// Capacity for a row of whole vectors.
    row_buffer: *mut S,
}

impl<S: Element> Row<S> {
    /// Expands a row of windows over the elements.
    ///
    /// # Safety
    /// The windows are valid for reads, and only this task uses the lines.
    #[inline(always)]
    unsafe fn expand<I: Cell>(self, windows: Windows<S, I>) {
        let SlidingAxis { input, output, stride, padding_before: before, .. } = self.last;
        for o in 0..output {
            let at = (o * stride) as isize - before;
            if at <= -(stride as isize) {
                continue;
            }
            if at >= input as isize {
                break;
            }
            let at = at.wrapping_add_unsigned(stride).unsigned_abs();
            // SAFETY: the row has the window. The window begins in the row, or less than a stride before it. The lines
            // have a stride before the row, and a stride and [`SPLAT`] elements after it.
            unsafe {
                let (value, window) = windows.at(o);
                for i in (0..stride).step_by(SPLAT) {
                    self.values.add(at + i).cast::<[S::Computed; SPLAT]>().write_unaligned([value; SPLAT]);
                    self.numbers.add(at + i).cast::<[i32; SPLAT]>().write_unaligned([window; SPLAT]);
                }
            }
        }
    }

    /// Returns the gradients and the numbers of the windows over the elements `x..x + LANES` of a row.
    ///
    /// # Safety
    /// The windows are valid for reads, and so are the windows after the row that whole vectors read. With
    /// [`WindowArrangement::Expanded`] the windows have been expanded.
    #[inline(always)]
    unsafe fn load_windows<I: Cell>(
        self,
        windows: Windows<S, I>,
        x: usize,
    ) -> ([S::Computed; LANES], [i32; LANES]) {
        // Plain loops without closures: code that is not inlined is not compiled for the level.
        let (mut values, mut numbers) = ([S::Computed::ZERO; LANES], [0; LANES]);
        match self.along {
            WindowArrangement::Single => {
                // SAFETY: the caller's contract.
                let (value, window) = unsafe { windows.at(0) };
                (values, numbers) = ([value; LANES], [window; LANES]);
            }
            WindowArrangement::Pairs => {
                // In quarters of vectors, because the elements are widened.
                for part in 0..2 {
                    let o = x / 2 + part * QUARTER;
                    // SAFETY: the caller's contract.
                    let (gradient, index) = unsafe {
                        (
                            windows.gradient.add(o).cast::<[S; QUARTER]>().read_unaligned(),
                            windows.index.add(o).cast::<[I; QUARTER]>().read_unaligned(),
                        )
                    };
                    for l in 0..2 * QUARTER {
                        values[part * 2 * QUARTER + l] = S::Computed::ZERO.add(gradient[l / 2].decode());
                        numbers[part * 2 * QUARTER + l] = index[l / 2].position_number();
                    }
                }
            }
            WindowArrangement::Expanded => {
                let at = self.last.stride + x;
                // SAFETY: the lines have capacity for a row of whole vectors from the first element on.
                unsafe {
                    values = self.values.add(at).cast::<[S::Computed; LANES]>().read_unaligned();
                    numbers = self.numbers.add(at).cast::<[i32; LANES]>().read_unaligned();
                }
            }
        }
        (values, numbers)
    }

    /// Writes `R` rows of the target under the same windows. `firsts` are the cell numbers of the rows. If positions
    /// may be outside of their windows (`ASTRAY`), `positions` counts the elements that were their window's maximum.
    ///
    /// # Safety
    /// - The windows are as [`Row::load_windows`] requires.
    /// - The rows are valid for writes, and so are the elements after the last row that whole vectors write.
    /// - Only this task uses these elements, and the elements after the last row are written later.
    #[inline(always)]
    unsafe fn write_rows<I: Cell, const ASTRAY: bool, const R: usize>(
        self,
        windows: Windows<S, I>,
        firsts: [i32; R],
        to: *mut S,
        positions: &mut [i32; LANES],
    ) {
        // From the end: elements that are written after a row are the beginning of the next row.
        let mut vector = self.vectors;
        while vector > 0 {
            vector -= 1;
            let x = vector * LANES;
            // SAFETY: the windows and the elements are valid by the caller's contract, and `cells` has whole vectors.
            unsafe {
                let cells = self.cells.add(x).cast::<[i32; LANES]>().read_unaligned();
                let (values, numbers) = self.load_windows(windows, x);
                for (r, &first) in firsts.iter().enumerate() {
                    let mut of_row = [S::encode(S::Computed::ZERO); LANES];
                    for l in 0..LANES {
                        let hit = numbers[l] == cells[l].wrapping_add(first);
                        of_row[l] = S::encode(if hit { values[l] } else { S::Computed::ZERO });
                        if ASTRAY {
                            positions[l] += i32::from(hit);
                        }
                    }
                    to.add(r * self.last.input + x).cast::<[S; LANES]>().write_unaligned(of_row);
                }
            }
        }
    }

    /// Writes one row element by element, at the end of the buffers.
    ///
    /// # Safety
    /// The windows of the row are valid for reads. The row is valid for writes, and only this task uses it.
    #[inline(never)]
    unsafe fn write_row_scalar<I: Cell>(
        self,
        windows: Windows<S, I>,
        first: i32,
        to: *mut S,
        positions: &mut [i32; LANES],
    ) {
        let SlidingAxis { input, output, stride, padding_before: before, .. } = self.last;
        for x in 0..input {
            // SAFETY: `cells` and the row have element `x`. If its cell has a number, the row of windows has window
            // `o`.
            unsafe {
                let cell = self.cells.add(x).read();
                let mut value = S::Computed::ZERO;
                if cell != NO_NUMBER {
                    let o = if output == 1 { 0 } else { (x as isize + before).unsigned_abs() / stride };
                    let (arrives, window) = windows.at(o);
                    if window == cell.wrapping_add(first) {
                        value = arrives;
                        positions[0] += 1;
                    }
                }
                to.add(x).write_unaligned(S::encode(value));
            }
        }
    }
}

/// A part of the gradient of a maximum or a sum: steps `part.rows` of the planes.
pub(super) struct Run<'a, S> {
    plan: &'a Plan,
    kernel: &'a NonOverlapping,
    buffers: Buffers,
    part: Part,
    stored: PhantomData<S>,
}

impl<'a, S: Element> Run<'a, S> {
    pub(super) fn new(plan: &'a Plan, kernel: &'a NonOverlapping, buffers: Buffers, part: Part) -> Self {
        Run { plan, kernel, buffers, part, stored: PhantomData }
    }

    /// Computes all planes of the part.
    #[inline(always)]
    fn compute_planes<I: Cell, const ASTRAY: bool>(&self, along: WindowArrangement) {
        let Plan { source, target, width, planes, last, .. } = *self.plan;
        let NonOverlapping { ref steps, ref cells, line_len: line_capacity, .. } = *self.kernel;
        let (first_plane, end_plane) = self.part.planes;
        let values = self.buffers.scratch.cast::<S::Computed>();
        let numbers = values.wrapping_add(line_capacity).cast::<i32>();
        for i in 0..line_capacity {
            // Elements that no window covers are read, too.
            // SAFETY: the lines have `line_capacity` elements, and only this task uses them.
            unsafe {
                values.add(i).write(S::Computed::ZERO);
                numbers.add(i).write(-1);
            }
        }
        let vectors = cells.len() / LANES;
        let written = numbers.wrapping_add(line_capacity).cast();
        let row =
            Row::<S> { last, cells: cells.as_ptr(), vectors, along, values, numbers, row_buffer: written };
        let steps = &steps[self.part.rows.0..self.part.rows.1];
        let of_part = steps.last().map_or(0, |last| last.start as usize + last.rows as usize * width);
        let end = (end_plane - 1) * target + of_part;
        let read = if matches!(along, WindowArrangement::Pairs) { cells.len() / 2 } else { 1 };
        // True if whole vectors fit into the buffers after a step of a plane.
        let fits = |plane: usize, step: &Step| {
            let windows = if step.windows == NO_WINDOWS { 0 } else { step.windows as usize };
            let step_end = step.start as usize + (step.rows as usize - 1) * width + cells.len();
            plane * target + step_end <= end && plane * source + windows + read <= planes * source
        };
        // Whole vectors fit in every plane of the part that at least `others - 1` planes follow.
        let others = 1 + cells.len().div_ceil(target).max(read.div_ceil(source));
        let mut positions = [0; LANES];
        for plane in first_plane..end_plane {
            let to = self.buffers.target.cast::<S>().wrapping_add(plane * target);
            let gradient = self.buffers.source.cast::<S>().wrapping_add(plane * source);
            let index = self.buffers.index.cast::<I>().cast_const().wrapping_add(plane * source);
            let ample = if plane + others <= end_plane {
                steps.len()
            } else {
                steps.iter().position(|step| !fits(plane, step)).unwrap_or(steps.len())
            };
            let mut down = NO_WINDOWS;
            for &Step { start: at, rows, windows, numbers } in &steps[..ample] {
                let to = to.wrapping_add(at as usize);
                if windows == NO_WINDOWS {
                    // SAFETY: the target has these rows, and only this task uses them.
                    unsafe { write_zeros(to, rows as usize * width) };
                    continue;
                }
                let first = windows as usize;
                let of_row =
                    Windows { gradient: gradient.wrapping_add(first), index: index.wrapping_add(first) };
                // SAFETY: the windows are in the buffers. There is capacity after the rows, and rows are written in
                // order.
                unsafe {
                    if matches!(along, WindowArrangement::Expanded) && down != windows {
                        row.expand(of_row);
                        down = windows;
                    }
                    if rows == 2 {
                        row.write_rows::<I, ASTRAY, 2>(of_row, numbers, to, &mut positions);
                    } else {
                        row.write_rows::<I, ASTRAY, 1>(of_row, [numbers[0]], to, &mut positions);
                    }
                }
            }
            for step in &steps[ample..] {
                let to = to.wrapping_add(step.start as usize);
                if step.windows == NO_WINDOWS {
                    // SAFETY: as above.
                    unsafe { write_zeros(to, step.rows as usize * width) };
                    continue;
                }
                let first = step.windows as usize;
                let of_row =
                    Windows { gradient: gradient.wrapping_add(first), index: index.wrapping_add(first) };
                let is_inside = plane * source + first + read <= planes * source;
                if matches!(along, WindowArrangement::Expanded) {
                    // SAFETY: the windows are in the buffers.
                    unsafe { row.expand(of_row) };
                }
                for (r, &first) in step.numbers.iter().enumerate().take(step.rows as usize) {
                    let to = to.wrapping_add(r * width);
                    // SAFETY: as above. A row is first written to `row.row_buffer`.
                    unsafe {
                        if is_inside {
                            row.write_rows::<I, ASTRAY, 1>(of_row, [first], row.row_buffer, &mut positions);
                            let bytes = width * size_of::<S>();
                            row.row_buffer.cast::<u8>().copy_to_nonoverlapping(to.cast(), bytes);
                        } else {
                            row.write_row_scalar(of_row, first, to, &mut positions);
                        }
                    }
                }
            }
        }
        let plane_elements = source * (end_plane - first_plane);
        if ASTRAY
            && positions.iter().map(|&position| position as u32 as usize).sum::<usize>() < plane_elements
        {
            self.recompute_planes();
        }
    }

    /// Recomputes all planes of the part with the fallback: a position is outside of its window.
    #[cold]
    #[inline(never)]
    fn recompute_planes(&self) {
        if let Some(spread) = &self.kernel.fallback {
            let part = Part { rows: (0, self.plan.target), ..self.part };
            portable::enter(max_backward::Run::<S>::new(self.plan, spread, self.buffers, part));
        }
    }

    /// Computes the part.
    pub(super) fn run(self, isa: Isa) {
        match (self.plan.positions.dtype(), self.kernel.fallback.is_some()) {
            (None, _) => self.run_loop::<(), false>(isa),
            (Some(DType::U8), false) => self.run_loop::<u8, false>(isa),
            (Some(DType::U8), true) => self.run_loop::<u8, true>(isa),
            _ => self.run_loop::<u16, true>(isa),
        }
    }

    fn run_loop<I: Cell, const ASTRAY: bool>(self, isa: Isa) {
        match self.kernel.along {
            WindowArrangement::Single => {
                isa.run(Loop::<S, I, ASTRAY, { WindowArrangement::Single as u8 }>(self, PhantomData));
            }
            WindowArrangement::Pairs => {
                isa.run(Loop::<S, I, ASTRAY, { WindowArrangement::Pairs as u8 }>(self, PhantomData));
            }
            WindowArrangement::Expanded => {
                isa.run(Loop::<S, I, ASTRAY, { WindowArrangement::Expanded as u8 }>(self, PhantomData));
            }
        }
    }
}

/// A loop over planes for one arrangement. Each loop is compiled as a separate function, which can use all registers.
struct Loop<'a, S, I, const ASTRAY: bool, const ALONG: u8>(Run<'a, S>, PhantomData<I>);

impl<S: Element, I: Cell, const ASTRAY: bool, const ALONG: u8> Work for Loop<'_, S, I, ASTRAY, ALONG> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let alongs = [WindowArrangement::Single, WindowArrangement::Pairs, WindowArrangement::Expanded];
        self.0.compute_planes::<I, ASTRAY>(alongs[usize::from(ALONG)]);
    }
}

/// Writes zeros.
///
/// # Safety
/// `to` is valid for writes of `count` elements.
#[inline(always)]
unsafe fn write_zeros<S: Element>(to: *mut S, count: usize) {
    for i in 0..count {
        // SAFETY: the caller's contract.
        unsafe { to.add(i).write_unaligned(S::encode(S::Computed::ZERO)) };
    }
}
