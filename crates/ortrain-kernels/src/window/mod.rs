//! Pooling: the largest element or the sum under windows that slide over planes, and the gradients of both.
//!
//! The sizes select one of several algorithms, each in its own file. [`candidates`] lists them.
//!
//! All algorithms give the same bits: maxima are exact, and sums have the order that [`ortrain_expr::WindowPass`]
//! defines.

mod engine;
mod max_backward;
mod nonoverlapping;
mod per_window;
mod plan;
mod plane_vectors;
mod row_vectors;
mod sum_backward;

use ortrain_expr::{DType, IndexKind, SlidingAxis, WindowPass, WindowShape};
use smallvec::SmallVec;

use crate::candidates::choose;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::scratch::{BaseAddresses, Scratch};
use crate::tile::Compiler;
use crate::window::engine::{Request, Selected, WindowCandidate};
use crate::window::plan::{Axes, Buffers, MAX_AXES, Part, Plan, Positions, Tasks};

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
#[derive(Debug)]
pub struct WindowKernel {
    name: &'static str,
    plan: Plan,
    isa: Isa,
    selected: Selected,
}

/// All candidates, from the fastest to the most general one.
fn candidates() -> [WindowCandidate; 6] {
    [
        nonoverlapping::candidate(),
        max_backward::candidate(),
        plane_vectors::candidate(),
        sum_backward::candidate(),
        row_vectors::candidate(),
        per_window::candidate(),
    ]
}

/// Returns the names of all candidates.
pub(crate) fn kernel_names() -> [&'static str; 6] {
    candidates().map(|candidate| candidate.name)
}

impl WindowKernel {
    /// Returns the name of the kernel.
    #[must_use]
    pub fn describe(&self) -> &'static str {
        self.name
    }

    /// Compiles a pooling.
    ///
    /// # Errors
    /// If the pooling is not defined for the type, if sizes or positions overflow, or if the window slides along too
    /// many axes.
    pub fn new<'a>(desc: &WindowDesc, compiler: impl Into<Compiler<'a>>) -> Result<WindowKernel, String> {
        let compiler = compiler.into();
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
        let plan = Plan { pass, dtype, planes, axes, last, width, source, target, positions };
        let (name, mut selected) = if planes * target == 0 {
            // Nothing is written.
            per_window::nothing()
        } else {
            choose(&candidates(), &Request { plan: &plan, shape }, compiler.kernels())?
        };
        selected.scratch = selected.scratch.next_multiple_of(Scratch::ALIGN);
        Ok(WindowKernel { name, plan, isa: compiler.isa(), selected })
    }

    /// Returns the bytes of scratch memory that a run on `threads` threads can use. A run requires the bytes of one
    /// thread.
    #[must_use]
    pub fn scratch_bytes(&self, threads: usize) -> usize {
        self.selected.scratch.saturating_mul(threads)
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
        let Selected { ref engine, tasks: Tasks { planes: planes_per_task, parts, rows }, scratch: bytes } =
            self.selected;
        let last = engine.rows(&self.plan);
        let pointers = [source.cast_mut(), index, target];
        let bases = BaseAddresses(&pointers);
        let (memory, limit) = match bytes {
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
            engine.compute_part(&self.plan, self.isa, buffers, part);
        });
    }
}
