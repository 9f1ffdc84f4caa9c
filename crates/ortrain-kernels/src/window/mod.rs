//! Pooling: the largest element or the sum under windows that slide over planes, and the gradients of both.
//!
//! The sizes select one of six algorithms:
//!
//! - `plane_vectors`: vectors of windows over a whole plane. The plane is laid out first, as `row_vectors` does with
//!   rows. For planes that fit into a cache.
//! - `row_vectors`: vectors of windows along the last axis. Rows are first laid out as lines, with padding, and
//!   separated by the remainder of the position modulo the stride. Adjacent windows then read adjacent elements. For
//!   large planes.
//! - `per_window`: window by window, over the cells inside of the input. For integers, for few windows along the last
//!   axis, and for sizes that fit no line.
//! - `nonoverlapping`: gradients if at most one window covers an element. Tests for each element if the window over it
//!   had its maximum there.
//! - `sum_backward`: the gradient of a sum with overlapping windows. Sums for each element the gradients of the windows
//!   that cover it.
//! - `max_backward`: the gradient of a maximum with overlapping windows. Follows positions, or the numbers of cells in
//!   their windows.
//!
//! All algorithms give the same bits: maxima are exact, and sums have the order that [`ortrain_expr::WindowPass`]
//! defines.

mod max_backward;
mod nonoverlapping;
mod per_window;
mod plane_vectors;
mod row_vectors;
mod sum_backward;

use ortrain_expr::{DType, IndexKind, SlidingAxis, WindowPass, WindowShape};
use smallvec::SmallVec;

use crate::isa::{Isa, portable};
use crate::pool::Pool;
use crate::scratch::{BaseAddresses, Scratch};
use crate::tile::number::{Bf16, F16, Number, Stored};
use max_backward::MaxBackward;
use nonoverlapping::NonOverlapping;
use plane_vectors::PlaneVectors;
use row_vectors::RowVectors;
use sum_backward::SumBackward;

/// A pooling, as [`WindowShape`] defines it. Results have the type of the source.
#[derive(Clone, Debug)]
pub struct WindowDesc {
    /// The computed pass, and the sizes.
    pub shape: WindowShape,
    /// Type of source and target: any type except `Bool`.
    pub dtype: DType,
    /// Kind and type of the positions that a maximum writes, if it writes positions, and that its gradient reads.
    /// `None` for sums.
    pub index: Option<(IndexKind, DType)>,
}

/// Maximum number of axes that a window slides along. Axes with a single position do not count.
const MAX_AXES: usize = 8;
/// Approximate number of elements of a task.
const MIN_TASK_WORK: usize = 16 * 1024;
/// Minimum number of planes for tasks with whole planes.
const MIN_UNDIVIDED_PLANES: usize = 16;

/// A compiled [`WindowDesc`].
#[derive(Clone, Debug)]
pub struct WindowKernel {
    plan: Plan,
    dtype: DType,
    isa: Isa,
    tasks: Tasks,
    /// Bytes of scratch memory of a worker.
    scratch: usize,
}

/// Sizes and algorithm of a pooling.
#[derive(Clone, Debug)]
struct Plan {
    pass: WindowPass,
    planes: usize,
    axes: Axes,
    /// The last axis, and the positions of the target along it.
    last: SlidingAxis,
    width: usize,
    /// Elements of a plane of the source, and of a plane of the target.
    source: usize,
    target: usize,
    positions: Positions,
    algorithm: Algorithm,
}

/// Encoding of the positions of maxima.
#[derive(Clone, Debug)]
struct Positions {
    /// Kind and type of the positions; `None` if no positions are needed.
    index: Option<(IndexKind, DType)>,
    /// Increment from a cell to the next along each axis: elements of the input, or cells if positions are numbers of
    /// cells.
    units: SmallVec<[usize; 4]>,
    /// Number of the cell over the input, along the axes without sliding.
    base: usize,
}

impl Positions {
    /// Builds the encoding for the windows of a shape, along the axes that are not `trivial`.
    fn new(
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

    fn are_needed(&self) -> bool {
        self.index.is_some()
    }

    /// Returns the type of the positions, if positions are needed.
    fn dtype(&self) -> Option<DType> {
        self.index.map(|(_, dtype)| dtype)
    }

    /// Returns true if positions are numbers of cells.
    #[inline(always)]
    fn are_cell_numbers(&self) -> bool {
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
    unsafe fn write(
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

type Axes = SmallVec<[SlidingAxis; 4]>;

#[derive(Clone, Debug)]
enum Algorithm {
    PlaneVectors(PlaneVectors),
    RowVectors(RowVectors),
    PerWindow,
    NonOverlapping(NonOverlapping),
    SumBackward(SumBackward),
    MaxBackward(MaxBackward),
}

/// Division of the work, by shapes alone.
#[derive(Clone, Copy, Debug)]
struct Tasks {
    /// Planes of a task, if `parts` is 1.
    planes: usize,
    /// Parts of a plane.
    parts: usize,
    /// Rows of the target (elements for [`Algorithm::MaxBackward`], steps for [`Algorithm::NonOverlapping`]) of a part.
    rows: usize,
}

/// An element type of a pooling.
trait Element: Stored<Computed: Number> {
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

/// Evaluates an expression with `$s` as the [`Element`] of a listed type.
macro_rules! with_one_of {
    ($dtype:expr, $s:ident => $e:expr, [$($variant:ident: $t:ty),*], $other:ident => $fault:expr) => {
        match $dtype {
            $(DType::$variant => {
                type $s = $t;
                $e
            })*
            $other => $fault,
        }
    };
}

/// Evaluates an expression with `$s` as the [`Element`] of any type that is pooled.
macro_rules! with_element {
    ($dtype:expr, $s:ident => $e:expr) => {
        with_one_of!(
            $dtype,
            $s => $e,
            [
                F32: f32, F64: f64, F16: F16, BF16: Bf16,
                I8: i8, I16: i16, I32: i32, I64: i64, U8: u8, U16: u16, U32: u32, U64: u64
            ],
            other => unreachable!("pooling of {other}: rejected at compile time")
        )
    };
}

/// Evaluates an expression with `$s` as the [`Element`] of a float type, for algorithms that only support floats.
macro_rules! with_float {
    ($dtype:expr, $s:ident => $e:expr) => {
        with_one_of!(
            $dtype,
            $s => $e,
            [F32: f32, F64: f64, F16: F16, BF16: Bf16],
            other => unreachable!("{other}: this path is only for floats")
        )
    };
}

/// Returns the bytes of an element in its compute type.
fn computed_bytes(dtype: DType) -> usize {
    dtype.size().max(4)
}

/// Positions along an axis: `first`, then every `step`.
#[derive(Clone, Copy, Debug, Default)]
struct Progression {
    first: usize,
    step: usize,
    count: usize,
    /// Number of cells of the window before the first one, if these are positions of cells.
    skipped: usize,
}

/// Returns the positions of the source that position `t` of the target depends on, along an axis, in ascending order.
#[inline(always)]
fn sources(axis: &SlidingAxis, gradient: bool, t: usize) -> Progression {
    if gradient { windows_over(axis, t) } else { cells_under(axis, t) }
}

/// Returns the number of steps that cover a distance; the last step may exceed it. Returns zero for a negative
/// distance.
#[inline(always)]
fn steps_to_cover(distance: isize, step: usize) -> usize {
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
fn cells_under(axis: &SlidingAxis, o: usize) -> Progression {
    let start = (o * axis.stride) as isize - axis.padding_before;
    let end = steps_to_cover(axis.input as isize - start, axis.dilation).min(axis.kernel);
    let first = steps_to_cover(-start, axis.dilation).min(end);
    let position = start.wrapping_add((first * axis.dilation) as isize) as usize;
    Progression { first: position, step: axis.dilation, count: end - first, skipped: first }
}

/// Returns the output positions of the windows that cover input position `i`.
#[inline(always)]
fn windows_over(axis: &SlidingAxis, i: usize) -> Progression {
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
fn max_sources(axis: &SlidingAxis, gradient: bool) -> usize {
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

fn common_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// The rows of the source that a row of the target depends on, in order. Yields the starts of lines along the last
/// axis, counted from the start of the plane.
#[derive(Clone, Copy)]
struct Rows {
    axes: usize,
    along: [Progression; MAX_AXES],
    /// Elements of the source from one position of an axis to the next.
    strides: [usize; MAX_AXES],
    at: [usize; MAX_AXES],
    done: bool,
}

impl Rows {
    /// Returns the rows that row `row` of the target depends on.
    #[inline(always)]
    fn new(axes: &[SlidingAxis], gradient: bool, row: usize) -> Rows {
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
    fn offset_from_window(&self, positions: &Positions) -> usize {
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
struct Buffers {
    source: *const u8,
    index: *mut u8,
    target: *mut u8,
    /// Scratch memory of the worker.
    scratch: *mut u8,
}

/// The part of the target that a task computes: rows (elements for [`Algorithm::MaxBackward`], steps for
/// [`Algorithm::NonOverlapping`]) of some planes.
#[derive(Clone, Copy)]
struct Part {
    planes: (usize, usize),
    rows: (usize, usize),
}

impl WindowKernel {
    /// Returns the name of the algorithm.
    #[must_use]
    pub fn describe(&self) -> &'static str {
        match self.plan.algorithm {
            Algorithm::PlaneVectors(_) => "vectors of the windows of a plane",
            Algorithm::RowVectors(_) => "vectors of windows along the last axis",
            Algorithm::PerWindow => "one window at a time",
            Algorithm::NonOverlapping(_) => "gradient of windows that do not overlap",
            Algorithm::SumBackward(_) => "gradient of sums",
            Algorithm::MaxBackward(_) => "gradient of maxima, added at their positions",
        }
    }

    /// Compiles a pooling.
    ///
    /// # Errors
    /// If the pooling is not defined for the type, if sizes or positions overflow, or if the window slides along too
    /// many axes.
    pub fn new(desc: &WindowDesc, isa: Isa) -> Result<WindowKernel, String> {
        let WindowDesc { ref shape, dtype, index } = *desc;
        let pass = shape.pass;
        if dtype == DType::Bool {
            return Err(format!("pooling of {dtype} is not supported"));
        }
        if let Some(fault) = shape.validate() {
            return Err(fault);
        }
        match (pass, index) {
            (WindowPass::Sum | WindowPass::SumGradient, Some(_)) => {
                return Err("a sum cannot have positions".to_owned());
            }
            (WindowPass::MaxGradient, None) => {
                return Err("the gradient of a maximum needs the positions".to_owned());
            }
            (_, Some((kind, dtype))) if !shape.has_positions(kind, dtype) => {
                return Err(format!("positions of type {dtype} are not supported for these windows"));
            }
            _ => {}
        }
        // A window with one cell, over one position, does not slide.
        let trivial =
            |axis: &SlidingAxis| axis.input == 1 && axis.output == 1 && axis.cells_over_input(0).len() == 1;
        let mut axes: Axes = shape.axes.iter().filter(|axis| !trivial(axis)).copied().collect();
        if axes.is_empty() {
            axes.push(SlidingAxis {
                input: 1,
                output: 1,
                kernel: 1,
                stride: 1,
                dilation: 1,
                padding_before: 0,
            });
        }
        if axes.len() > MAX_AXES {
            return Err(format!("a window has {} axes, but at most {MAX_AXES} are supported", axes.len()));
        }
        let mut positions = Positions::new(index, &shape.axes, trivial);
        let gradient = matches!(pass, WindowPass::MaxGradient | WindowPass::SumGradient);
        // A single window as large as the plane: its cells have the order of the elements.
        let is_full_window = |axis: &SlidingAxis| {
            axis.output == 1 && axis.kernel == axis.input && axis.dilation == 1 && axis.padding_before == 0
        };
        if gradient && shape.axes.iter().all(is_full_window) {
            let plane_len = shape.plane_inputs();
            axes = Axes::from_slice(&[SlidingAxis { input: plane_len, kernel: plane_len, ..axes[0] }]);
            positions.units = SmallVec::from_slice(&[1]);
        }
        let (planes, last) = (shape.planes, axes[axes.len() - 1]);
        let (inputs, outputs) = (shape.plane_inputs(), shape.plane_outputs());
        let (source, target) = if gradient { (outputs, inputs) } else { (inputs, outputs) };
        let width = if gradient { last.input } else { last.output };
        let too_large = || "the tensors are too large to count".to_owned();
        if [source, target].iter().any(|n| n.checked_mul(planes).and_then(|n| n.checked_mul(8)).is_none()) {
            return Err(too_large());
        }
        if planes * target == 0 {
            // Nothing is written.
            let selected = Algorithm::PerWindow;
            let plan =
                Plan { pass, planes, axes, last, width, source, target, positions, algorithm: selected };
            let tasks = Tasks { planes: 1, parts: 1, rows: 0 };
            return Ok(WindowKernel { plan, dtype, isa, tasks, scratch: 0 });
        }
        let mut non_overlapping_kernel =
            if gradient { NonOverlapping::new(pass, &axes, dtype, &positions, target) } else { None };
        // True if all cells are over the input.
        let inside = |axis: &SlidingAxis| {
            axis.output > 0
                && [0, axis.output - 1].iter().all(|&o| axis.cells_over_input(o) == (0..axis.kernel))
        };
        let is_fast =
            index.is_none() || index == Some((IndexKind::Cell, DType::U8)) && shape.axes.iter().all(inside);
        let (selected, tasks, scratch) = if let Some(non_overlapping_kernel) =
            non_overlapping_kernel.take_if(|_| is_fast)
        {
            let (tasks, scratch) =
                (non_overlapping_kernel.tasks(planes, target), non_overlapping_kernel.scratch());
            (Algorithm::NonOverlapping(non_overlapping_kernel), tasks, scratch)
        } else if pass == WindowPass::MaxGradient {
            let spread = MaxBackward::new(dtype, shape, &positions);
            let tasks = spread.tasks(planes, source, target);
            let scratch = spread.scratch(&tasks);
            match non_overlapping_kernel {
                // This fallback needs tasks with whole planes.
                Some(non_overlapping_kernel) if tasks.parts == 1 => {
                    let non_overlapping_kernel = non_overlapping_kernel.with_fallback(spread, scratch);
                    let scratch = non_overlapping_kernel.scratch();
                    (Algorithm::NonOverlapping(non_overlapping_kernel), tasks, scratch)
                }
                _ => (Algorithm::MaxBackward(spread), tasks, scratch),
            }
        } else {
            let tasks = divide_into_rows(planes, &axes, gradient, width, target);
            let covers = if gradient { SumBackward::new(&axes, dtype, target / width.max(1)) } else { None };
            let plane_kernel =
                if tasks.parts == 1 { PlaneVectors::new(pass, &axes, dtype, &positions) } else { None };
            if let Some(planes) = plane_kernel {
                let scratch = planes.scratch();
                (Algorithm::PlaneVectors(planes), tasks, scratch)
            } else if let Some(covers) = covers {
                let scratch = covers.scratch();
                (Algorithm::SumBackward(covers), tasks, scratch)
            } else if let Some(lines) = RowVectors::new(pass, &axes, dtype, &positions) {
                let scratch = lines.scratch();
                (Algorithm::RowVectors(lines), tasks, scratch)
            } else {
                (Algorithm::PerWindow, tasks, 0)
            }
        };
        let plan = Plan { pass, planes, axes, last, width, source, target, positions, algorithm: selected };
        let scratch = scratch.next_multiple_of(Scratch::ALIGN);
        Ok(WindowKernel { plan, dtype, isa, tasks, scratch })
    }

    /// Returns the bytes of scratch memory that a run on `threads` threads can use. A run requires the bytes of one
    /// thread.
    #[must_use]
    pub fn scratch_bytes(&self, threads: usize) -> usize {
        self.scratch.saturating_mul(threads)
    }

    /// Pools. Allocates nothing, and the result has the same bits on any number of threads.
    ///
    /// The gradient of a maximum reads `index`. Positions outside of their plane receive nothing.
    ///
    /// # Safety
    /// - `source` and `target` are the starts of buffers of [`WindowShape::operands`] elements of the description's
    ///   type.
    /// - With positions, `index` is the start of a buffer with a position for each output element, of the type of
    ///   positions. Without positions, `index` is not accessed.
    /// - Until the run is over, all buffers are valid for reads, and the written buffers for writes. They may have any
    ///   alignment.
    /// - A written buffer overlaps no other buffer, and nothing else accesses it. Nothing writes a buffer that is read.
    /// - `scratch` is as [`Scratch::new`] requires.
    ///
    /// # Panics
    /// If there is less scratch memory than one thread needs.
    pub unsafe fn run(
        &self,
        source: *const u8,
        index: *mut u8,
        target: *mut u8,
        pool: &Pool,
        scratch: Scratch,
    ) {
        let Plan { planes, target: elements, .. } = self.plan;
        if planes * elements == 0 {
            return;
        }
        let Tasks { planes: planes_per_task, parts, rows } = self.tasks;
        let last = match self.plan.algorithm {
            Algorithm::NonOverlapping(ref kernel) => kernel.steps(),
            Algorithm::MaxBackward(_) => elements,
            _ => self.plan.target_rows(),
        };
        let pointers = [source.cast_mut(), index, target];
        let bases = BaseAddresses(&pointers);
        let (memory, limit) = match self.scratch {
            0 => (None, usize::MAX),
            each => {
                let parts = scratch.split(0, each, pool);
                (Some(parts), parts.workers)
            }
        };
        let tasks = if parts == 1 { planes.div_ceil(planes_per_task) } else { planes * parts };
        pool.run(tasks, limit, &|task, worker| {
            let [source, index, target] = *{ bases }.0 else { unreachable!("three buffers") };
            let scratch = memory.map_or(std::ptr::null_mut(), |memory| memory.worker_part(worker));
            let buffers = Buffers { source: source.cast_const(), index, target, scratch };
            let part = if parts == 1 {
                Part {
                    planes: (task * planes_per_task, ((task + 1) * planes_per_task).min(planes)),
                    rows: (0, last),
                }
            } else {
                let (plane, part) = (task / parts, task % parts);
                Part { planes: (plane, plane + 1), rows: (part * rows, ((part + 1) * rows).min(last)) }
            };
            self.compute_part(buffers, part);
        });
    }

    /// Computes a part of the target. Requires the contract of [`WindowKernel::run`], and that no other task uses the
    /// part.
    fn compute_part(&self, buffers: Buffers, part: Part) {
        let (plan, isa) = (&self.plan, self.isa);
        macro_rules! laid {
            ($way:ident, $laid:ident) => {
                with_float!(self.dtype, S => match (plan.pass, plan.positions.are_needed()) {
                    (WindowPass::Max, true) => {
                        isa.run($way::Run::<S, true, true>::new(plan, $laid, buffers, part))
                    }
                    (WindowPass::Max, false) => {
                        isa.run($way::Run::<S, true, false>::new(plan, $laid, buffers, part))
                    }
                    _ => isa.run($way::Run::<S, false, false>::new(plan, $laid, buffers, part)),
                })
            };
        }
        // Algorithms that go element by element gain nothing from vectors.
        match &plan.algorithm {
            Algorithm::PlaneVectors(planes) => laid!(plane_vectors, planes),
            Algorithm::RowVectors(lines) => laid!(row_vectors, lines),
            Algorithm::PerWindow if plan.pass == WindowPass::Max => with_element!(self.dtype, S => {
                portable::enter(per_window::Run::<S, true>::new(plan, buffers, part));
            }),
            Algorithm::PerWindow => with_element!(self.dtype, S => {
                portable::enter(per_window::Run::<S, false>::new(plan, buffers, part));
            }),
            Algorithm::NonOverlapping(kernel) => {
                with_float!(self.dtype, S => nonoverlapping::Run::<S>::new(plan, kernel, buffers, part).run(isa));
            }
            Algorithm::SumBackward(covers) => {
                with_float!(self.dtype, S => sum_backward::Run::<S>::new(plan, covers, buffers, part).run(isa));
            }
            Algorithm::MaxBackward(spread) => with_element!(self.dtype, S => {
                portable::enter(max_backward::Run::<S>::new(plan, spread, buffers, part));
            }),
        }
    }
}

impl Plan {
    #[inline(always)]
    fn is_gradient(&self) -> bool {
        matches!(self.pass, WindowPass::MaxGradient | WindowPass::SumGradient)
    }

    /// Returns the number of rows of a plane of the target.
    fn target_rows(&self) -> usize {
        self.target.checked_div(self.width).unwrap_or(0)
    }
}

/// Divides planes into rows if there are few planes, and combines small planes.
fn divide_into_rows(
    planes: usize,
    axes: &[SlidingAxis],
    gradient: bool,
    width: usize,
    target: usize,
) -> Tasks {
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
