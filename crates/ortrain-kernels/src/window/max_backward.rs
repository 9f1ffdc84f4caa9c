//! Gradient of max pooling: each element of the incoming gradient is added at the position of its window's maximum.

use std::marker::PhantomData;

use ortrain_expr::{DType, WindowPass, WindowShape};

use crate::isa::{Isa, Level, Work, portable};
use crate::tile::number::{Number, Stored};
use crate::window::engine::{Engine, Selected, WindowCandidate, with_element};
use crate::window::plan::{
    Buffers, Element, MAX_AXES, MIN_TASK_WORK, MIN_UNDIVIDED_PLANES, Part, Plan, Positions, Tasks,
};

/// Plan of the gradient of max pooling.
#[derive(Clone, Debug)]
pub(super) struct MaxBackward {
    /// True if sums have a wider type than the storage type.
    has_wide_sums: bool,
    /// Offset of each window cell in the target, for the first window of a plane, in elements from the plane's start.
    /// It has an entry for each value of the index type: [`NO_CELL`] if the window has no such cell. Empty if the
    /// indices are element positions instead of cells.
    cells: Vec<isize>,
    /// Smallest and largest offset in `cells`, without [`NO_CELL`].
    reach: (isize, isize),
}

/// Number of positions that are looked up before gradients are added there, so that the loads wait for no store.
const BATCH: usize = 4;
/// Maximum number of elements of a part if its sums are wider than the storage type and need scratch memory.
const MAX_NARROW_ELEMENTS: usize = 16 * 1024;
/// Offset of a missing cell. It is outside of the plane, wherever the window begins.
const NO_CELL: isize = isize::MIN / 2;

/// Gradient of a maximum with overlapping windows. Follows positions, or the numbers of cells in their windows.
pub(super) fn candidate() -> WindowCandidate {
    WindowCandidate {
        name: "window.max_backward",
        accepts: |request| request.plan.pass == WindowPass::MaxGradient,
        preferences: &[],
        build: |request| {
            let &Plan { dtype, ref positions, planes, source, target, .. } = request.plan;
            let spread = MaxBackward::new(dtype, request.shape, positions);
            let tasks = spread.tasks(planes, source, target);
            let scratch = spread.scratch(&tasks);
            Some(Selected { engine: Box::new(spread), tasks, scratch })
        },
    }
}

impl Engine for MaxBackward {
    /// Returns the number of elements of a plane.
    fn rows(&self, plan: &Plan) -> usize {
        plan.target
    }

    fn compute_part(&self, plan: &Plan, _: Isa, buffers: Buffers, part: Part) {
        // Work that goes element by element gains nothing from vectors.
        with_element!(plan.dtype, S => {
            portable::enter(Run::<S>::new(plan, self, buffers, part));
        });
    }
}

impl MaxBackward {
    /// Plans the gradient for elements of type `dtype`.
    pub(super) fn new(dtype: DType, shape: &WindowShape, positions: &Positions) -> MaxBackward {
        let narrow = matches!(dtype, DType::F16 | DType::BF16);
        let numbers = match positions.dtype() {
            Some(DType::U8) => 0x100,
            Some(DType::U16) => 0x1_0000,
            _ => return MaxBackward { has_wide_sums: narrow, cells: Vec::new(), reach: (0, 0) },
        };
        let under = |cell: usize| {
            let (mut rest, mut at, mut stride) = (cell, 0isize, 1isize);
            for axis in shape.axes.iter().rev() {
                let shift = (rest % axis.kernel * axis.dilation) as isize - axis.padding_before;
                at = at.saturating_add(shift.saturating_mul(stride));
                stride = stride.saturating_mul(axis.input as isize);
                rest /= axis.kernel;
            }
            (rest == 0).then_some(at)
        };
        let reach = (0..numbers).filter_map(under).fold((0, 0), |(a, b), at| (at.min(a), at.max(b)));
        let cells = (0..numbers).map(|cell| under(cell).unwrap_or(NO_CELL)).collect();
        MaxBackward { has_wide_sums: narrow, cells, reach }
    }

    /// Divides the work. Every part of a plane reads all positions of the plane, and adds the gradients with positions
    /// in the part.
    pub(super) fn tasks(&self, planes: usize, source: usize, target: usize) -> Tasks {
        let work = source.saturating_add(target);
        let target_parts =
            if planes < MIN_UNDIVIDED_PLANES { MIN_UNDIVIDED_PLANES.div_ceil(planes.max(1)) } else { 1 };
        let parts = target_parts
            .min(target / MIN_TASK_WORK)
            .max(if self.has_wide_sums { target.div_ceil(MAX_NARROW_ELEMENTS) } else { 1 })
            .max(1);
        let rows = target.div_ceil(parts);
        let planes_per_task =
            if parts == 1 { (MIN_TASK_WORK / work.max(1)).clamp(1, planes.max(1)) } else { 1 };
        Tasks { planes: planes_per_task, parts: target.div_ceil(rows.max(1)).max(1), rows }
    }

    /// Returns the bytes of scratch memory of a worker.
    pub(super) fn scratch(&self, tasks: &Tasks) -> usize {
        if self.has_wide_sums { tasks.rows * size_of::<f32>() } else { 0 }
    }
}

/// Computation of one part of the gradient: the elements `part.rows` of the planes `part.planes`.
pub(super) struct Run<'a, S> {
    plan: &'a Plan,
    spread: &'a MaxBackward,
    buffers: Buffers,
    part: Part,
    stored: PhantomData<S>,
}

/// Incoming gradient of a plane, for a part of the plane.
#[derive(Clone, Copy)]
struct PlaneGradient<S, I> {
    /// Gradient of the plane's output.
    gradient: *const S,
    /// Position of each maximum: an element position, or the index of a window cell.
    index: *const I,
    /// First element of the part, relative to the plane.
    start: usize,
    /// First element of the part, relative to the whole target.
    first: usize,
}

impl<'a, S: Element> Run<'a, S> {
    pub(super) fn new(plan: &'a Plan, spread: &'a MaxBackward, buffers: Buffers, part: Part) -> Self {
        Run { plan, spread, buffers, part, stored: PhantomData }
    }

    /// Zeroes the sums of each plane, calls `add` with the gradient, the sums and their number, and stores the sums.
    #[inline(always)]
    fn for_each_plane<I>(&self, add: impl Fn(PlaneGradient<S, I>, *mut S::Sum, usize)) {
        let Plan { source, target, .. } = *self.plan;
        let (start, end) = self.part.rows;
        let count = end - start;
        let narrow = size_of::<S::Sum>() > size_of::<S>();
        for plane in self.part.planes.0..self.part.planes.1 {
            let first = plane * target + start;
            let gradient = self.buffers.source.cast::<S>().wrapping_add(plane * source);
            let index = self.buffers.index.cast::<I>().cast_const().wrapping_add(plane * source);
            let to = self.buffers.target.cast::<S>().wrapping_add(first);
            let sums = if narrow { self.buffers.scratch.cast::<S::Sum>() } else { to.cast() };
            for i in 0..count {
                // SAFETY: there are `count` sums, and only this task uses them.
                unsafe { sums.add(i).write_unaligned(S::Sum::encode(S::Computed::ZERO)) };
            }
            add(PlaneGradient { gradient, index, start, first }, sums, count);
            for i in 0..if narrow { count } else { 0 } {
                // SAFETY: there are `count` sums, and the target has these elements. Only this task uses both.
                unsafe { to.add(i).write_unaligned(S::encode(sums.add(i).read().decode())) };
            }
        }
    }

    /// Adds an element of the gradient to sum `at`, if `at` is less than `count`.
    ///
    /// # Safety
    /// `from` is valid for reads. `sums` has `count` sums, and only this task uses them.
    #[inline(always)]
    unsafe fn add_gradient(from: *const S, sums: *mut S::Sum, at: usize, count: usize) {
        if at < count {
            // SAFETY: the caller's contract.
            unsafe {
                let sum = sums.add(at);
                let new = sum.read_unaligned().decode().add(from.read_unaligned().decode());
                sum.write_unaligned(S::Sum::encode(new));
            }
        }
    }

    // Separate functions, because in a single function each would spill the registers of the others.

    #[inline(never)]
    fn add_by_positions(&self) {
        let outputs = self.plan.source;
        self.for_each_plane(|arriving: PlaneGradient<S, i64>, sums, count| {
            for o in 0..outputs {
                // SAFETY: by the contract of `WindowKernel::run` the gradient and the positions have these elements.
                unsafe {
                    let position = arriving.index.add(o).read_unaligned() as u64;
                    let at = position.wrapping_sub(arriving.first as u64);
                    let at = usize::try_from(at).unwrap_or(usize::MAX);
                    Self::add_gradient(arriving.gradient.add(o), sums, at, count);
                }
            }
        });
    }

    #[inline(never)]
    fn add_by_cells<I: Copy + Into<usize>, const NUMBERS: usize>(&self) {
        let Plan { ref axes, .. } = *self.plan;
        let Some(cells) = self.spread.cells.first_chunk::<NUMBERS>() else { return };
        // Number of windows along each axis, and number of elements from one window to the next.
        let mut along = [(1usize, 0isize); MAX_AXES];
        let mut stride = 1;
        for (axis, along) in axes.iter().zip(&mut along[MAX_AXES - axes.len()..]).rev() {
            // A single window has no next one, so its step may overflow.
            *along = (axis.output, axis.stride.wrapping_mul(stride) as isize);
            stride *= axis.input;
        }
        let [.., rows, row] = along;
        let outer = &along[(MAX_AXES - axes.len()).min(MAX_AXES - 2)..MAX_AXES - 2];
        let blocks: usize = outer.iter().map(|along| along.0).product();
        let windows = rows.0 * row.0;
        self.for_each_plane(|arriving: PlaneGradient<S, I>, sums, count| {
            for block in 0..blocks {
                // Start of the block's first window, relative to the start of the part.
                let mut begin = -(arriving.start as isize);
                let mut rest = block;
                for &(windows, step) in outer.iter().rev() {
                    begin += (rest % windows) as isize * step;
                    rest /= windows;
                }
                // SAFETY: by the contract of `WindowKernel::run` the gradient and the indices have the windows of the
                // block. There are `count` sums, and only this task uses them.
                unsafe {
                    let gradient = arriving.gradient.add(block * windows);
                    let index = arriving.index.add(block * windows);
                    self.add_rows::<I, NUMBERS>((rows, row), begin, cells, (gradient, index), (sums, count));
                }
            }
        });
    }

    /// Adds the gradients of a block of windows. `begin` is the start of its first window, relative to the part. The
    /// first argument has two pairs: number of rows and step between rows, windows per row and step between windows.
    ///
    /// # Safety
    /// The gradient and the indices have all the windows. There are `count` sums, and only this task uses them.
    #[inline(never)]
    unsafe fn add_rows<I: Copy + Into<usize>, const NUMBERS: usize>(
        &self,
        ((rows, row_step), (width, step)): ((usize, isize), (usize, isize)),
        mut begin: isize,
        cells: &[isize; NUMBERS],
        (mut gradient, mut index): (*const S, *const I),
        (sums, count): (*mut S::Sum, usize),
    ) {
        let (min_reach, max_offset) = self.spread.reach;
        let max_reach = max_offset.wrapping_add((width as isize - 1) * step);
        let batched = width - width % BATCH;
        let under = |cell: I, from: isize| from.wrapping_add(cells[cell.into()]) as usize;
        for _ in 0..rows {
            if begin.wrapping_add(max_reach) >= 0 && begin.wrapping_add(min_reach) < count as isize {
                let mut from = begin;
                for o in (0..batched).step_by(BATCH) {
                    // SAFETY: the caller's contract.
                    unsafe {
                        let numbers = index.add(o).cast::<[I; BATCH]>().read_unaligned();
                        let at: [usize; BATCH] =
                            std::array::from_fn(|l| under(numbers[l], from + l as isize * step));
                        for (l, at) in at.into_iter().enumerate() {
                            Self::add_gradient(gradient.add(o + l), sums, at, count);
                        }
                    }
                    from = from.wrapping_add(step.wrapping_mul(BATCH as isize));
                }
                for o in batched..width {
                    // SAFETY: the caller's contract.
                    unsafe {
                        let at = under(index.add(o).read_unaligned(), from);
                        Self::add_gradient(gradient.add(o), sums, at, count);
                    }
                    from = from.wrapping_add(step);
                }
            }
            gradient = gradient.wrapping_add(width);
            index = index.wrapping_add(width);
            begin = begin.wrapping_add(row_step);
        }
    }
}

impl<S: Element> Work for Run<'_, S> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        match self.plan.positions.dtype() {
            Some(DType::U8) => self.add_by_cells::<u8, 0x100>(),
            Some(DType::U16) => self.add_by_cells::<u16, 0x1_0000>(),
            _ => self.add_by_positions(),
        }
    }
}
