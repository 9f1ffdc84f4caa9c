//! Sizes, positions and parts of a pooling, as its algorithms need them.

use ortrain_expr::{DType, IndexKind, SlidingAxis, WindowPass};
use smallvec::SmallVec;

use crate::tile::number::{Bf16, F16, Number, Stored};

/// Maximum number of axes that a window slides along. Axes with a single position do not count.
pub(super) const MAX_AXES: usize = 8;

/// Approximate number of elements of a task.
pub(super) const MIN_TASK_WORK: usize = 16 * 1024;

/// Minimum number of planes for tasks with whole planes.
pub(super) const MIN_UNDIVIDED_PLANES: usize = 16;

/// Sizes of a pooling.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) pass: WindowPass,
    pub(super) dtype: DType,
    pub(super) planes: usize,
    pub(super) axes: Axes,
    /// The last axis, and the positions of the target along it.
    pub(super) last: SlidingAxis,
    pub(super) width: usize,
    /// Elements of a plane of the source, and of a plane of the target.
    pub(super) source: usize,
    pub(super) target: usize,
    pub(super) positions: Positions,
}

/// Encoding of the positions of maxima.
#[derive(Clone, Debug)]
pub(super) struct Positions {
    /// Kind and type of the positions; `None` if no positions are needed.
    pub(super) index: Option<(IndexKind, DType)>,
    /// Increment from a cell to the next along each axis: elements of the input, or cells if positions are numbers of
    /// cells.
    pub(super) units: SmallVec<[usize; 4]>,
    /// Number of the cell over the input, along the axes without sliding.
    pub(super) base: usize,
}

impl Positions {
    /// Builds the encoding for the windows of a shape, along the axes that are not `trivial`.
    pub(super) fn new(
        index: Option<(IndexKind, DType)>,
        axes: &[SlidingAxis],
        trivial: impl Fn(&SlidingAxis) -> bool,
    ) -> Positions {
        let numbered = matches!(index, Some((IndexKind::Cell, _)));
        let (mut units, mut base) = (SmallVec::new(), 0);
        let (mut cells, mut elements) = (1usize, 1usize);
        for axis in axes.iter().rev() {
            let unit = if numbered { cells } else { elements.saturating_mul(axis.dilation) };
            if !trivial(axis) {
                units.push(unit);
            } else if numbered {
                base += axis.cells_over_input(0).start * unit;
            }
            cells = cells.saturating_mul(axis.kernel);
            elements = elements.saturating_mul(axis.input);
        }
        if units.is_empty() {
            units.push(1);
        }
        units.reverse();
        Positions { index, units, base }
    }

    pub(super) fn are_needed(&self) -> bool {
        self.index.is_some()
    }

    /// Returns the type of the positions, if positions are needed.
    pub(super) fn dtype(&self) -> Option<DType> {
        self.index.map(|(_, dtype)| dtype)
    }

    /// Returns true if positions are numbers of cells.
    #[inline(always)]
    pub(super) fn are_cell_numbers(&self) -> bool {
        matches!(self.index, Some((IndexKind::Cell, _)))
    }

    /// Writes the positions of `count` adjacent windows, from element `first` of the buffer on. `found` has positions
    /// relative to the starts of the windows. The first window starts at `start` of the whole source, and each next one
    /// `step` later. A negative position was not found, and becomes `nowhere`.
    ///
    /// # Safety
    /// `found` is valid for reads of `count` elements. The buffer has `count` elements from `first` on, and only the
    /// caller uses them.
    #[inline(always)]
    pub(super) unsafe fn write(
        &self,
        index: *mut u8,
        first: usize,
        (found, count): (*const i32, usize),
        (nowhere, start, step): (i64, i64, usize),
    ) {
        macro_rules! each {
            ($t:ty, $i:ident, $found:ident => $position:expr) => {{
                let index = index.cast::<$t>().wrapping_add(first);
                for $i in 0..count {
                    // SAFETY: the caller's contract.
                    unsafe {
                        let $found = found.add($i).read();
                        index.add($i).write_unaligned($position);
                    }
                }
            }};
        }
        match self.dtype() {
            Some(DType::U8) => each!(u8, i, found => found as u8),
            Some(DType::U16) => each!(u16, i, found => found as u16),
            _ => each!(i64, i, found => {
                let position = start + (i * step) as i64 + i64::from(found);
                if found < 0 { nowhere } else { position }
            }),
        }
    }
}

pub(super) type Axes = SmallVec<[SlidingAxis; 4]>;

/// Division of the work, by shapes alone.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tasks {
    /// Planes of a task, if `parts` is 1.
    pub(super) planes: usize,
    /// Parts of a plane.
    pub(super) parts: usize,
    /// Rows of a part, as [`super::engine::Engine::rows`] counts them.
    pub(super) rows: usize,
}

/// An element type of a pooling.
pub(super) trait Element: Stored<Computed: Number> {
    /// The smallest value of the compute type.
    const LOWEST: Self::Computed;
    /// True if the storage type is the compute type.
    const PLAIN: bool;
    /// Type of partial sums.
    type Sum: Element<Computed = Self::Computed>;
}

macro_rules! elements {
    ($($t:ty: $lowest:expr, $plain:expr, $sum:ty;)*) => {$(
        impl Element for $t {
            const LOWEST: Self::Computed = $lowest;
            const PLAIN: bool = $plain;
            type Sum = $sum;
        }
    )*};
}

elements! {
    f32: f32::NEG_INFINITY, true, f32;
    f64: f64::NEG_INFINITY, true, f64;
    F16: f32::NEG_INFINITY, false, f32;
    Bf16: f32::NEG_INFINITY, false, f32;
    i8: i8::MIN as i32, false, i8;
    i16: i16::MIN as i32, false, i16;
    i32: i32::MIN, true, i32;
    i64: i64::MIN, true, i64;
    u8: 0, false, u8;
    u16: 0, false, u16;
    u32: 0, true, u32;
    u64: 0, true, u64;
}

/// Returns the bytes of an element in its compute type.
pub(super) fn computed_bytes(dtype: DType) -> usize {
    dtype.size().max(4)
}

/// Positions along an axis: `first`, then every `step`.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Progression {
    pub(super) first: usize,
    pub(super) step: usize,
    pub(super) count: usize,
    /// Number of cells of the window before the first one, if these are positions of cells.
    pub(super) skipped: usize,
}

/// Returns the positions of the source that position `t` of the target depends on, along an axis, in ascending order.
#[inline(always)]
pub(super) fn sources(axis: &SlidingAxis, gradient: bool, t: usize) -> Progression {
    if gradient { windows_over(axis, t) } else { cells_under(axis, t) }
}

/// Returns the number of steps that cover a distance; the last step may exceed it. Returns zero for a negative
/// distance.
#[inline(always)]
pub(super) fn steps_to_cover(distance: isize, step: usize) -> usize {
    let distance = distance.max(0).unsigned_abs();
    // Divisions would take longer than the other work for a short row.
    match step {
        1 => distance,
        2 => distance.div_ceil(2),
        step => distance.div_ceil(step),
    }
}

/// Returns the input positions under the window at output position `o`.
#[inline(always)]
pub(super) fn cells_under(axis: &SlidingAxis, o: usize) -> Progression {
    let start = (o * axis.stride) as isize - axis.padding_before;
    let end = steps_to_cover(axis.input as isize - start, axis.dilation).min(axis.kernel);
    let first = steps_to_cover(-start, axis.dilation).min(end);
    let position = start.wrapping_add((first * axis.dilation) as isize) as usize;
    Progression { first: position, step: axis.dilation, count: end - first, skipped: first }
}

/// Returns the output positions of the windows that cover input position `i`.
#[inline(always)]
pub(super) fn windows_over(axis: &SlidingAxis, i: usize) -> Progression {
    let SlidingAxis { output, kernel, stride, dilation, padding_before: before, .. } = *axis;
    let none = Progression::default();
    // Distance from the start of window 0.
    let Ok(end_index) = usize::try_from(i as isize + before) else { return none };
    if kernel == 0 || output == 0 {
        return none;
    }
    let reach = (kernel - 1) * dilation;
    let low = steps_to_cover(end_index as isize - reach as isize, stride);
    let end = steps_to_cover(end_index as isize + 1, stride).min(output);
    // One in `step` windows has a cell on the position.
    let step = if dilation == 1 { 1 } else { dilation / common_divisor(stride, dilation) };
    let first =
        (low..end.min(low.saturating_add(step))).find(|o| (end_index - o * stride).is_multiple_of(dilation));
    match first {
        Some(first) => Progression { first, step, count: (end - first).div_ceil(step), skipped: 0 },
        None => none,
    }
}

/// Returns the maximum number of positions of the source that a position of the target can depend on, along an axis.
pub(super) fn max_sources(axis: &SlidingAxis, gradient: bool) -> usize {
    let SlidingAxis { input, output, kernel, stride, dilation, .. } = *axis;
    if gradient {
        // Among the windows that reach a position, one in `step` has a cell on it.
        let step = stride / common_divisor(stride, dilation);
        (kernel.saturating_sub(1) / step + 1).min(output)
    } else {
        kernel.min(input)
    }
    .max(1)
}

pub(super) fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// The rows of the source that a row of the target depends on, in order. Yields the starts of lines along the last
/// axis, counted from the start of the plane.
#[derive(Clone, Copy)]
pub(super) struct Rows {
    pub(super) axes: usize,
    pub(super) along: [Progression; MAX_AXES],
    /// Elements of the source from one position of an axis to the next.
    pub(super) strides: [usize; MAX_AXES],
    pub(super) at: [usize; MAX_AXES],
    pub(super) done: bool,
}

impl Rows {
    /// Returns the rows that row `row` of the target depends on.
    #[inline(always)]
    pub(super) fn new(axes: &[SlidingAxis], gradient: bool, row: usize) -> Rows {
        let outer = axes.len() - 1;
        let mut rows = Rows {
            axes: outer,
            along: [Progression::default(); MAX_AXES],
            strides: [0; MAX_AXES],
            at: [0; MAX_AXES],
            done: false,
        };
        let sides =
            |axis: &SlidingAxis| if gradient { (axis.output, axis.input) } else { (axis.input, axis.output) };
        let mut stride = sides(&axes[outer]).0;
        let mut rest = row;
        let mut k = outer;
        while k > 0 {
            k -= 1;
            let (source, target) = sides(&axes[k]);
            let at = if k == 0 { rest } else { rest % target };
            rows.along[k] = sources(&axes[k], gradient, at);
            rows.strides[k] = stride;
            rows.done |= rows.along[k].count == 0;
            if k > 0 {
                rest /= target;
            }
            stride *= source;
        }
        rows
    }

    /// Returns the offset of the next row's cells from the start of the window, without the last axis, in units of
    /// positions.
    #[inline(always)]
    pub(super) fn offset_from_window(&self, positions: &Positions) -> usize {
        let along = |k: usize| (self.along[k].skipped + self.at[k]) * positions.units[k];
        (0..self.axes).map(along).sum::<usize>() + positions.base
    }
}

impl Iterator for Rows {
    type Item = usize;

    #[inline(always)]
    fn next(&mut self) -> Option<usize> {
        if self.done {
            return None;
        }
        let mut start = 0;
        self.done = true;
        for k in 0..self.axes {
            let Progression { first, step, .. } = self.along[k];
            start += (first + self.at[k] * step) * self.strides[k];
        }
        let mut k = self.axes;
        while k > 0 && self.done {
            k -= 1;
            self.at[k] += 1;
            self.done = self.at[k] == self.along[k].count;
            if self.done {
                self.at[k] = 0;
            }
        }
        Some(start)
    }
}

/// The buffers of a task.
#[derive(Clone, Copy)]
pub(super) struct Buffers {
    pub(super) source: *const u8,
    pub(super) index: *mut u8,
    pub(super) target: *mut u8,
    /// Scratch memory of the worker.
    pub(super) scratch: *mut u8,
}

/// The part of the target that a task computes: rows (elements for `Algorithm::MaxBackward`, steps for
/// `Algorithm::NonOverlapping`) of some planes.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub(super) planes: (usize, usize),
    pub(super) rows: (usize, usize),
}

impl Plan {
    /// Divides planes into rows if there are few planes, and combines small planes.
    pub(super) fn divide_into_rows(&self) -> Tasks {
        let &Plan { pass, planes, ref axes, width, target, .. } = self;
        let gradient = matches!(pass, WindowPass::MaxGradient | WindowPass::SumGradient);
        // Maximum number of elements that are read for one written element.
        let cells = axes.iter().fold(1usize, |n, axis| n.saturating_mul(max_sources(axis, gradient)));
        let work = target.saturating_mul(cells);
        let rows = target / width.max(1);
        if planes < MIN_UNDIVIDED_PLANES && work > MIN_TASK_WORK {
            let per_row = width.saturating_mul(cells).max(1);
            let rows_of_part = (MIN_TASK_WORK / per_row).max(1);
            return Tasks { planes: 1, parts: rows.div_ceil(rows_of_part), rows: rows_of_part };
        }
        Tasks { planes: (MIN_TASK_WORK / work.max(1)).clamp(1, planes.max(1)), parts: 1, rows }
    }

    #[inline(always)]
    pub(super) fn is_gradient(&self) -> bool {
        matches!(self.pass, WindowPass::MaxGradient | WindowPass::SumGradient)
    }

    /// Returns the number of rows of a plane of the target.
    pub(super) fn target_rows(&self) -> usize {
        self.target.checked_div(self.width).unwrap_or(0)
    }
}
