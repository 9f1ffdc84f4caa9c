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
mod plan;
mod plane_vectors;
mod row_vectors;
mod sum_backward;

use ortrain_expr::{DType, IndexKind, SlidingAxis, WindowPass, WindowShape};
use smallvec::SmallVec;

use crate::isa::{Isa, portable};
use crate::pool::Pool;
use crate::scratch::{BaseAddresses, Scratch};
use crate::tile::number::{Bf16, F16};
use crate::window::plan::{
    Axes, Buffers, MAX_AXES, MIN_TASK_WORK, MIN_UNDIVIDED_PLANES, Part, Plan, Positions, Tasks, max_sources,
};
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

/// A compiled [`WindowDesc`].
#[derive(Clone, Debug)]
pub struct WindowKernel {
    plan: Plan,
    algorithm: Algorithm,
    dtype: DType,
    isa: Isa,
    tasks: Tasks,
    /// Bytes of scratch memory of a worker.
    scratch: usize,
}

#[derive(Clone, Debug)]
enum Algorithm {
    PlaneVectors(PlaneVectors),
    RowVectors(RowVectors),
    PerWindow,
    NonOverlapping(NonOverlapping),
    SumBackward(SumBackward),
    MaxBackward(MaxBackward),
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

impl WindowKernel {
    /// Returns the name of the algorithm.
    #[must_use]
    pub fn describe(&self) -> &'static str {
        match self.algorithm {
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
            let plan = Plan { pass, planes, axes, last, width, source, target, positions };
            let tasks = Tasks { planes: 1, parts: 1, rows: 0 };
            return Ok(WindowKernel { plan, algorithm: selected, dtype, isa, tasks, scratch: 0 });
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
        let plan = Plan { pass, planes, axes, last, width, source, target, positions };
        let scratch = scratch.next_multiple_of(Scratch::ALIGN);
        Ok(WindowKernel { plan, algorithm: selected, dtype, isa, tasks, scratch })
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
        let last = match self.algorithm {
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
        match &self.algorithm {
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
