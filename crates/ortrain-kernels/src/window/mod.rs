//! Pooling: the largest element or the sum under windows that slide over planes, and the gradients of both.
//!
//! Six ways of computing it, chosen by the sizes:
//!
//! - `plane_vectors`: all windows of a plane side by side in vectors, after the plane was laid out as `row_vectors` does with rows.
//!   For planes that a cache holds.
//! - `row_vectors`: windows along the last axis side by side in vectors. The lines they read are laid out first, padded and
//!   parted by the remainder of the position modulo the stride, so that what adjacent windows read is adjacent. For large
//!   planes.
//! - `per_window`: window by window, over the cells inside the input. For integers, for few windows along the last axis, and
//!   for sizes that no line holds.
//! - `nonoverlapping`: gradients where at most one window covers an element: of each element, whether the one over it had its
//!   maximum there.
//! - `sum_backward`: the gradient of a sum where windows overlap: of each element, what arrives at the windows that cover it.
//! - `max_backward`: the gradient of a maximum where windows overlap, which follows positions, or the numbers of cells in their
//!   windows.
//!
//! All give the same bits: maxima are exact, and sums are made in the order that [`ortrain_expr::WindowPass`] names.

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
use crate::scratch::{Bases, Scratch};
use crate::tile::number::{Bf16, F16, Number, Stored};
use max_backward::Spread;
use nonoverlapping::Apart;
use plane_vectors::Planes;
use row_vectors::Lines;
use sum_backward::Covers;

/// A pooling. What it means is said at [`WindowShape`]; results have the type of what is read.
#[derive(Clone, Debug)]
pub struct WindowDesc {
    /// What is computed, and the sizes.
    pub shape: WindowShape,
    /// Type of what is read and written: any but `Bool`.
    pub dtype: DType,
    /// The positions that a maximum writes, if it does, and that its gradient reads: how they are said, and their type. Sums
    /// have none.
    pub index: Option<(IndexKind, DType)>,
}

/// Most axes that a window slides along; axes with a single position do not count.
const AXES: usize = 8;
/// Elements of a task, about.
const MIN_TASK_WORK: usize = 16 * 1024;
/// Planes from which on a task has whole planes.
const PLANES: usize = 16;

/// A compiled [`WindowDesc`].
#[derive(Clone, Debug)]
pub struct WindowKernel {
    plan: Plan,
    dtype: DType,
    isa: Isa,
    tasks: Tasks,
    /// Scratch memory of a worker.
    scratch: usize,
}

/// The sizes, and how they are gone through.
#[derive(Clone, Debug)]
struct Plan {
    pass: WindowPass,
    planes: usize,
    axes: Axes,
    /// The last axis, and the positions of the target along it.
    last: SlidingAxis,
    width: usize,
    /// Elements of a plane that is read and of one that is written.
    source: usize,
    target: usize,
    positions: Positions,
    way: Algorithm,
}

/// How positions of maxima are counted.
#[derive(Clone, Debug)]
struct Positions {
    /// How they are said, and their type; `None` where none are wanted.
    index: Option<(IndexKind, DType)>,
    /// What one cell further along an axis adds: elements of the input, or, where cells have numbers, as many of these.
    units: SmallVec<[usize; 4]>,
    /// The number of the cell that lies over the input along the axes where nothing slides.
    base: usize,
}

impl Positions {
    /// Of the windows of a shape, along the axes that are no `trivial` ones.
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
                base += axis.cells(0).start * unit;
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

    fn wanted(&self) -> bool {
        self.index.is_some()
    }

    /// Their type, where some are wanted.
    fn dtype(&self) -> Option<DType> {
        self.index.map(|(_, dtype)| dtype)
    }

    /// Whether they are numbers of cells.
    #[inline(always)]
    fn numbered(&self) -> bool {
        matches!(self.index, Some((IndexKind::Cell, _)))
    }

    /// Writes those of `count` adjacent windows, from element `first` of the buffer on. They were found relative to the
    /// starts of the windows, the first of which lies at `start` of the whole source and the next a `step` further;
    /// those that are less than 0 were not found, and are `nowhere`.
    ///
    /// # Safety
    /// `found` is valid for reads of `count` elements, the buffer has them, and they are the caller's alone.
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
    Planes(Planes),
    Lines(Lines),
    Cells,
    Apart(Apart),
    Covers(Covers),
    Spread(Spread),
}

/// How the work is cut: by shapes alone.
#[derive(Clone, Copy, Debug)]
struct Tasks {
    /// Planes of a task, if `parts` is 1.
    planes: usize,
    /// Parts of a plane.
    parts: usize,
    /// Rows of the target (elements for [`Algorithm::Spread`], steps for [`Packing::Apart`]) of a part.
    rows: usize,
}

/// An element of a pooling.
trait Element: Stored<Computed: Number> {
    /// The least value, as it is computed.
    const LOWEST: Self::Computed;
    /// Whether elements are stored as they are computed.
    const PLAIN: bool;
    /// What sums are kept in.
    type Sum: Element<Computed = Self::Computed>;
}

macro_rules! elements {
    ($($t:ty: $least:expr, $plain:expr, $sum:ty;)*) => {$(
        impl Element for $t {
            const LOWEST: Self::Computed = $least;
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

/// Evaluates an expression with `$s` as the [`Element`] of a type that is listed.
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

/// The same with any type that is pooled.
macro_rules! with_element {
    ($dtype:expr, $s:ident => $e:expr) => {
        with_one_of!(
            $dtype,
            $s => $e,
            [
                F32: f32, F64: f64, F16: F16, BF16: Bf16,
                I8: i8, I16: i16, I32: i32, I64: i64, U8: u8, U16: u16, U32: u32, U64: u64
            ],
            other => unreachable!("pooling of {other}: checked when compiled")
        )
    };
}

/// The same of the ways that floats alone go.
macro_rules! with_float {
    ($dtype:expr, $s:ident => $e:expr) => {
        with_one_of!(
            $dtype,
            $s => $e,
            [F32: f32, F64: f64, F16: F16, BF16: Bf16],
            other => unreachable!("{other} goes this way: chosen for floats alone")
        )
    };
}

/// Bytes of an element as it is computed.
fn computed_bytes(dtype: DType) -> usize {
    dtype.size().max(4)
}

/// Positions along an axis: `first`, then every `step`.
#[derive(Clone, Copy, Debug, Default)]
struct Progression {
    first: usize,
    step: usize,
    count: usize,
    /// Cells of the window before the first, where it is cells that are gone through.
    skipped: usize,
}

/// The positions of the source that position `t` of the target depends on, along an axis, ascending.
#[inline(always)]
fn sources(axis: &SlidingAxis, gradient: bool, t: usize) -> Progression {
    if gradient { windows_over(axis, t) } else { cells_under(axis, t) }
}

/// How many steps it takes to go a distance, the last one perhaps too far. None where it lies behind.
#[inline(always)]
fn steps(distance: isize, step: usize) -> usize {
    let distance = distance.max(0).unsigned_abs();
    // Divisions take longer than everything else on the way to a short row.
    match step {
        1 => distance,
        2 => distance.div_ceil(2),
        step => distance.div_ceil(step),
    }
}

/// The input positions under the window at output position `o`.
#[inline(always)]
fn cells_under(axis: &SlidingAxis, o: usize) -> Progression {
    let start = (o * axis.stride) as isize - axis.before;
    let end = steps(axis.input as isize - start, axis.dilation).min(axis.kernel);
    let first = steps(-start, axis.dilation).min(end);
    let position = start.wrapping_add((first * axis.dilation) as isize) as usize;
    Progression { first: position, step: axis.dilation, count: end - first, skipped: first }
}

/// The output positions whose window covers input position `i`.
#[inline(always)]
fn windows_over(axis: &SlidingAxis, i: usize) -> Progression {
    let SlidingAxis { output, kernel, stride, dilation, before, .. } = *axis;
    let none = Progression::default();
    // Distance from the start of window 0.
    let Ok(far) = usize::try_from(i as isize + before) else { return none };
    if kernel == 0 || output == 0 {
        return none;
    }
    let reach = (kernel - 1) * dilation;
    let low = steps(far as isize - reach as isize, stride);
    let end = steps(far as isize + 1, stride).min(output);
    // Every how many windows a cell falls on the position.
    let step = if dilation == 1 { 1 } else { dilation / common_divisor(stride, dilation) };
    let first =
        (low..end.min(low.saturating_add(step))).find(|o| (far - o * stride).is_multiple_of(dilation));
    match first {
        Some(first) => Progression { first, step, count: (end - first).div_ceil(step), skipped: 0 },
        None => none,
    }
}

/// The most positions of the source that one of the target can depend on, along an axis.
fn most_sources(axis: &SlidingAxis, gradient: bool) -> usize {
    let SlidingAxis { input, output, kernel, stride, dilation, .. } = *axis;
    if gradient {
        // Of the windows that reach a position, every so many have a cell on it.
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

/// The rows of the source that a row of the target depends on, in order: the starts of lines along the last axis,
/// counted from the start of the plane.
#[derive(Clone, Copy)]
struct Rows {
    axes: usize,
    along: [Progression; AXES],
    /// Elements of the source from one position of an axis to the next.
    strides: [usize; AXES],
    at: [usize; AXES],
    done: bool,
}

impl Rows {
    /// The rows that row `row` of the target depends on.
    #[inline(always)]
    fn new(axes: &[SlidingAxis], gradient: bool, row: usize) -> Rows {
        let outer = axes.len() - 1;
        let mut rows = Rows {
            axes: outer,
            along: [Progression::default(); AXES],
            strides: [0; AXES],
            at: [0; AXES],
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

    /// How far the cells over the row that comes next lie behind the start of the window but for the last axis, counted
    /// as positions are.
    #[inline(always)]
    fn behind(&self, positions: &Positions) -> usize {
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
    /// Memory of the worker.
    scratch: *mut u8,
}

/// The part of the target that a task has: rows (elements for [`Algorithm::Spread`], steps for [`Packing::Apart`]) of some planes.
#[derive(Clone, Copy)]
struct Part {
    planes: (usize, usize),
    rows: (usize, usize),
}

impl WindowKernel {
    /// Compiles a pooling.
    ///
    /// # Errors
    /// When it is not defined for the type, sizes or positions cannot be counted, or the window slides along too many
    /// axes.
    pub fn new(desc: &WindowDesc, isa: Isa) -> Result<WindowKernel, String> {
        let WindowDesc { ref shape, dtype, index } = *desc;
        let pass = shape.pass;
        if dtype == DType::Bool {
            return Err(format!("pooling of {dtype}"));
        }
        if let Some(fault) = shape.validate() {
            return Err(fault);
        }
        match (pass, index) {
            (WindowPass::Sum | WindowPass::SumGradient, Some(_)) => {
                return Err("sums have no positions".to_owned());
            }
            (WindowPass::MaxGradient, None) => {
                return Err("the gradient of a maximum needs the positions".to_owned());
            }
            (_, Some((kind, dtype))) if !shape.has_positions(kind, dtype) => {
                return Err(format!("positions of type {dtype} for such windows"));
            }
            _ => {}
        }
        // A window with one cell, over one position: nothing slides.
        let trivial = |axis: &SlidingAxis| axis.input == 1 && axis.output == 1 && axis.cells(0).len() == 1;
        let mut axes: Axes = shape.axes.iter().filter(|axis| !trivial(axis)).copied().collect();
        if axes.is_empty() {
            axes.push(SlidingAxis { input: 1, output: 1, kernel: 1, stride: 1, dilation: 1, before: 0 });
        }
        if axes.len() > AXES {
            return Err(format!("a window over {} axes, {AXES} are the most", axes.len()));
        }
        let mut positions = Positions::new(index, &shape.axes, trivial);
        let gradient = matches!(pass, WindowPass::MaxGradient | WindowPass::SumGradient);
        // A single window as large as the plane: its cells have the order of the elements.
        let whole = |axis: &SlidingAxis| {
            axis.output == 1 && axis.kernel == axis.input && axis.dilation == 1 && axis.before == 0
        };
        if gradient && shape.axes.iter().all(whole) {
            let all = shape.inputs();
            axes = Axes::from_slice(&[SlidingAxis { input: all, kernel: all, ..axes[0] }]);
            positions.units = SmallVec::from_slice(&[1]);
        }
        let (planes, last) = (shape.planes, axes[axes.len() - 1]);
        let (inputs, outputs) = (shape.inputs(), shape.outputs());
        let (source, target) = if gradient { (outputs, inputs) } else { (inputs, outputs) };
        let width = if gradient { last.input } else { last.output };
        let too_large = || "tensors that are too large to count".to_owned();
        if [source, target].iter().any(|n| n.checked_mul(planes).and_then(|n| n.checked_mul(8)).is_none()) {
            return Err(too_large());
        }
        if planes * target == 0 {
            // Nothing is written.
            let way = Algorithm::Cells;
            let plan = Plan { pass, planes, axes, last, width, source, target, positions, way };
            let tasks = Tasks { planes: 1, parts: 1, rows: 0 };
            return Ok(WindowKernel { plan, dtype, isa, tasks, scratch: 0 });
        }
        let mut apart = if gradient { Apart::new(pass, &axes, dtype, &positions, target) } else { None };
        // Whether all cells lie over the input.
        let inside = |axis: &SlidingAxis| {
            axis.output > 0 && [0, axis.output - 1].iter().all(|&o| axis.cells(o) == (0..axis.kernel))
        };
        let own =
            index.is_none() || index == Some((IndexKind::Cell, DType::U8)) && shape.axes.iter().all(inside);
        let (way, tasks, scratch) = if let Some(apart) = apart.take_if(|_| own) {
            let (tasks, scratch) = (apart.tasks(planes, target), apart.scratch());
            (Algorithm::Apart(apart), tasks, scratch)
        } else if pass == WindowPass::MaxGradient {
            let spread = Spread::new(dtype, shape, &positions);
            let tasks = spread.tasks(planes, source, target);
            let scratch = spread.scratch(&tasks);
            match apart {
                // A whole plane is looked at.
                Some(apart) if tasks.parts == 1 => {
                    let apart = apart.or(spread, scratch);
                    let scratch = apart.scratch();
                    (Algorithm::Apart(apart), tasks, scratch)
                }
                _ => (Algorithm::Spread(spread), tasks, scratch),
            }
        } else {
            let tasks = by_rows(planes, &axes, gradient, width, target);
            let covers = if gradient { Covers::new(&axes, dtype, target / width.max(1)) } else { None };
            let whole = if tasks.parts == 1 { Planes::new(pass, &axes, dtype, &positions) } else { None };
            if let Some(planes) = whole {
                let scratch = planes.scratch();
                (Algorithm::Planes(planes), tasks, scratch)
            } else if let Some(covers) = covers {
                let scratch = covers.scratch();
                (Algorithm::Covers(covers), tasks, scratch)
            } else if let Some(lines) = Lines::new(pass, &axes, dtype, &positions) {
                let scratch = lines.scratch();
                (Algorithm::Lines(lines), tasks, scratch)
            } else {
                (Algorithm::Cells, tasks, 0)
            }
        };
        let plan = Plan { pass, planes, axes, last, width, source, target, positions, way };
        let scratch = scratch.next_multiple_of(Scratch::ALIGN);
        Ok(WindowKernel { plan, dtype, isa, tasks, scratch })
    }

    /// Bytes of scratch memory that a run on so many threads can use. It needs what one thread can use.
    #[must_use]
    pub fn scratch_bytes(&self, threads: usize) -> usize {
        self.scratch.saturating_mul(threads)
    }

    /// Pools. Allocates nothing, and gives the same bits on any number of threads.
    ///
    /// Of the gradient of a maximum `index` is what is read. Positions that lie outside their plane receive nothing.
    ///
    /// # Safety
    /// `source` and `target` are the starts of buffers of [`WindowShape::operands`] elements of the description's
    /// type, `index` (where there are positions; else it is not looked at) that of as many of their type as there are
    /// output elements. They are valid for reads, and what is written for writes, until the run is over; any alignment will
    /// do. What is written overlaps nothing else, and nobody else touches it; nobody writes what is read. `scratch` is
    /// as [`Scratch::new`] says.
    ///
    /// # Panics
    /// When there is less scratch memory than one thread needs.
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
        let Tasks { planes: whole, parts, rows } = self.tasks;
        let last = match self.plan.way {
            Algorithm::Apart(ref apart) => apart.steps(),
            Algorithm::Spread(_) => elements,
            _ => self.plan.target_rows(),
        };
        let pointers = [source.cast_mut(), index, target];
        let bases = Bases(&pointers);
        let (memory, limit) = match self.scratch {
            0 => (None, usize::MAX),
            each => {
                let parts = scratch.part(0, each, pool);
                (Some(parts), parts.workers)
            }
        };
        let tasks = if parts == 1 { planes.div_ceil(whole) } else { planes * parts };
        pool.run(tasks, limit, &|task, worker| {
            let [source, index, target] = *{ bases }.0 else { unreachable!("three buffers") };
            let scratch = memory.map_or(std::ptr::null_mut(), |memory| memory.of(worker));
            let buffers = Buffers { source: source.cast_const(), index, target, scratch };
            let part = if parts == 1 {
                Part { planes: (task * whole, ((task + 1) * whole).min(planes)), rows: (0, last) }
            } else {
                let (plane, part) = (task / parts, task % parts);
                Part { planes: (plane, plane + 1), rows: (part * rows, ((part + 1) * rows).min(last)) }
            };
            self.part(buffers, part);
        });
    }

    /// Computes a part of the target. The contract of [`WindowKernel::run`] holds, and the part is this task's alone.
    fn part(&self, buffers: Buffers, part: Part) {
        let (plan, isa) = (&self.plan, self.isa);
        macro_rules! laid {
            ($way:ident, $laid:ident) => {
                with_float!(self.dtype, S => match (plan.pass, plan.positions.wanted()) {
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
        // What goes element by element gains nothing from vectors.
        match &plan.way {
            Algorithm::Planes(planes) => laid!(plane_vectors, planes),
            Algorithm::Lines(lines) => laid!(row_vectors, lines),
            Algorithm::Cells if plan.pass == WindowPass::Max => with_element!(self.dtype, S => {
                portable::enter(per_window::Run::<S, true>::new(plan, buffers, part));
            }),
            Algorithm::Cells => with_element!(self.dtype, S => {
                portable::enter(per_window::Run::<S, false>::new(plan, buffers, part));
            }),
            Algorithm::Apart(apart) => {
                with_float!(self.dtype, S => nonoverlapping::Run::<S>::new(plan, apart, buffers, part).run(isa));
            }
            Algorithm::Covers(covers) => {
                with_float!(self.dtype, S => sum_backward::Run::<S>::new(plan, covers, buffers, part).run(isa));
            }
            Algorithm::Spread(spread) => with_element!(self.dtype, S => {
                portable::enter(max_backward::Run::<S>::new(plan, spread, buffers, part));
            }),
        }
    }
}

impl Plan {
    #[inline(always)]
    fn gradient(&self) -> bool {
        matches!(self.pass, WindowPass::MaxGradient | WindowPass::SumGradient)
    }

    /// Rows of a plane of the target.
    fn target_rows(&self) -> usize {
        self.target.checked_div(self.width).unwrap_or(0)
    }
}

/// Cuts planes into rows if they are few, and puts small ones together.
fn by_rows(planes: usize, axes: &[SlidingAxis], gradient: bool, width: usize, target: usize) -> Tasks {
    // Elements read for one that is written, at most.
    let cells = axes.iter().fold(1usize, |n, axis| n.saturating_mul(most_sources(axis, gradient)));
    let work = target.saturating_mul(cells);
    let rows = target / width.max(1);
    if planes < PLANES && work > MIN_TASK_WORK {
        let per_row = width.saturating_mul(cells).max(1);
        let rows_of_part = (MIN_TASK_WORK / per_row).max(1);
        return Tasks { planes: 1, parts: rows.div_ceil(rows_of_part), rows: rows_of_part };
    }
    Tasks { planes: (MIN_TASK_WORK / work.max(1)).clamp(1, planes.max(1)), parts: 1, rows }
}
