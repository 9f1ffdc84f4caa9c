//! The gradient of a maximum: what arrives at each output element is added where the maximum was.

use std::marker::PhantomData;

use ortrain_expr::{DType, WindowShape};

use super::{AXES, Buffers, Element, MIN_TASK_WORK, PLANES, Part, Plan, Positions, Tasks};
use crate::isa::{Level, Work};
use crate::tile::number::{Number, Stored};

/// How planes are gone through.
#[derive(Clone, Debug)]
pub(super) struct Spread {
    /// Whether sums are made in a wider type than elements are stored in.
    narrow: bool,
    /// Where it is numbers of cells that are read: of each number that their type has, how far the cell of the plane's
    /// first window lies behind the start of the plane, in elements of the target; [`NOWHERE`] where there is no such cell.
    cells: Vec<isize>,
    /// The least and the largest of these.
    reach: (isize, isize),
}

/// Windows whose elements are looked up before what arrives there is added: loads that wait for no store.
const BATCH: usize = 4;
/// Elements of a part whose sums are kept apart.
const NARROW: usize = 16 * 1024;
/// Outside of every plane, wherever one starts from.
const NOWHERE: isize = isize::MIN / 2;

impl Spread {
    /// Of elements of type `dtype`.
    pub(super) fn new(dtype: DType, shape: &WindowShape, positions: &Positions) -> Spread {
        let narrow = matches!(dtype, DType::F16 | DType::BF16);
        let numbers = match positions.dtype() {
            Some(DType::U8) => 0x100,
            Some(DType::U16) => 0x1_0000,
            _ => return Spread { narrow, cells: Vec::new(), reach: (0, 0) },
        };
        let under = |number: usize| {
            let (mut rest, mut at, mut stride) = (number, 0isize, 1isize);
            for axis in shape.axes.iter().rev() {
                let own = (rest % axis.kernel * axis.dilation) as isize - axis.before;
                at = at.saturating_add(own.saturating_mul(stride));
                stride = stride.saturating_mul(axis.input as isize);
                rest /= axis.kernel;
            }
            (rest == 0).then_some(at)
        };
        let reach = (0..numbers).filter_map(under).fold((0, 0), |(a, b), at| (at.min(a), at.max(b)));
        let cells = (0..numbers).map(|number| under(number).unwrap_or(NOWHERE)).collect();
        Spread { narrow, cells, reach }
    }

    /// Every part of a plane looks at all positions of the plane and adds at its own.
    pub(super) fn tasks(&self, planes: usize, source: usize, target: usize) -> Tasks {
        let work = source.saturating_add(target);
        let wanted = if planes < PLANES { PLANES.div_ceil(planes.max(1)) } else { 1 };
        let parts = wanted
            .min(target / MIN_TASK_WORK)
            .max(if self.narrow { target.div_ceil(NARROW) } else { 1 })
            .max(1);
        let rows = target.div_ceil(parts);
        let whole = if parts == 1 { (MIN_TASK_WORK / work.max(1)).clamp(1, planes.max(1)) } else { 1 };
        Tasks { planes: whole, parts: target.div_ceil(rows.max(1)).max(1), rows }
    }

    /// Bytes of scratch memory of a worker.
    pub(super) fn scratch(&self, tasks: &Tasks) -> usize {
        if self.narrow { tasks.rows * size_of::<f32>() } else { 0 }
    }
}

/// A part of the gradient of a maximum: elements `part.rows` of the planes.
pub(super) struct Run<'a, S> {
    plan: &'a Plan,
    spread: &'a Spread,
    buffers: Buffers,
    part: Part,
    stored: PhantomData<S>,
}

/// What arrives at a part of a plane.
#[derive(Clone, Copy)]
struct Arriving<S, I> {
    /// The gradient of the plane's output, and the positions or numbers of cells.
    gradient: *const S,
    index: *const I,
    /// The part's first element, counted from the start of the plane, and in the whole target.
    start: usize,
    first: usize,
}

impl<'a, S: Element> Run<'a, S> {
    pub(super) fn new(plan: &'a Plan, spread: &'a Spread, buffers: Buffers, part: Part) -> Self {
        Run { plan, spread, buffers, part, stored: PhantomData }
    }

    /// Adds what arrives to the `count` sums at the pointer that `add` is called with, for each plane.
    #[inline(always)]
    fn planes<I>(&self, add: impl Fn(Arriving<S, I>, *mut S::Sum, usize)) {
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
                // SAFETY: there are `count` sums, all this task's.
                unsafe { sums.add(i).write_unaligned(S::Sum::encode(S::Computed::ZERO)) };
            }
            add(Arriving { gradient, index, start, first }, sums, count);
            for i in 0..if narrow { count } else { 0 } {
                // SAFETY: the sums are there, and the target has these elements, all this task's.
                unsafe { to.add(i).write_unaligned(S::encode(sums.add(i).read().decode())) };
            }
        }
    }

    /// Adds an element of the gradient to the sum at `at`, if there is one.
    ///
    /// # Safety
    /// `from` is valid for reads, and `sums` are `count` sums of this task's.
    #[inline(always)]
    unsafe fn give(from: *const S, sums: *mut S::Sum, at: usize, count: usize) {
        if at < count {
            // SAFETY: the caller's contract.
            unsafe {
                let sum = sums.add(at);
                let new = sum.read_unaligned().decode().add(from.read_unaligned().decode());
                sum.write_unaligned(S::Sum::encode(new));
            }
        }
    }

    // Compiled apart from each other: in one function, what each keeps in registers is spilled by the others.

    #[inline(never)]
    fn by_positions(&self) {
        let outputs = self.plan.source;
        self.planes(|arriving: Arriving<S, i64>, sums, count| {
            for o in 0..outputs {
                // SAFETY: by the contract of `WindowKernel::run` the gradient and the positions have these elements.
                unsafe {
                    let position = arriving.index.add(o).read_unaligned() as u64;
                    let at = position.wrapping_sub(arriving.first as u64);
                    let at = usize::try_from(at).unwrap_or(usize::MAX);
                    Self::give(arriving.gradient.add(o), sums, at, count);
                }
            }
        });
    }

    #[inline(never)]
    fn by_cells<I: Copy + Into<usize>, const NUMBERS: usize>(&self) {
        let Plan { ref axes, .. } = *self.plan;
        let Some(cells) = self.spread.cells.first_chunk::<NUMBERS>() else { return };
        // Windows along each axis, and elements from one to the next.
        let mut along = [(1usize, 0isize); AXES];
        let mut stride = 1;
        for (axis, along) in axes.iter().zip(&mut along[AXES - axes.len()..]).rev() {
            // Of a single window there is no next one, however far it would lie.
            *along = (axis.output, axis.stride.wrapping_mul(stride) as isize);
            stride *= axis.input;
        }
        let [.., rows, row] = along;
        let outer = &along[(AXES - axes.len()).min(AXES - 2)..AXES - 2];
        let blocks: usize = outer.iter().map(|along| along.0).product();
        let windows = rows.0 * row.0;
        self.planes(|arriving: Arriving<S, I>, sums, count| {
            for block in 0..blocks {
                // Where the first window begins, seen from the start of the part.
                let mut begin = -(arriving.start as isize);
                let mut rest = block;
                for &(windows, step) in outer.iter().rev() {
                    begin += (rest % windows) as isize * step;
                    rest /= windows;
                }
                // SAFETY: by the contract of `WindowKernel::run` the gradient and the numbers have the windows of the
                // block; there are `count` sums, all this task's.
                unsafe {
                    let gradient = arriving.gradient.add(block * windows);
                    let index = arriving.index.add(block * windows);
                    self.follow::<I, NUMBERS>((rows, row), begin, cells, (gradient, index), (sums, count));
                }
            }
        });
    }

    /// Goes through rows of windows: how many rows there are and how far each lies behind the one before, and the same of
    /// the windows of a row, from `begin` on.
    ///
    /// # Safety
    /// Gradient and numbers have all the windows, and there are `count` sums of this task's.
    #[inline(never)]
    unsafe fn follow<I: Copy + Into<usize>, const NUMBERS: usize>(
        &self,
        ((rows, row_step), (width, step)): ((usize, isize), (usize, isize)),
        mut begin: isize,
        cells: &[isize; NUMBERS],
        (mut gradient, mut index): (*const S, *const I),
        (sums, count): (*mut S::Sum, usize),
    ) {
        let (least, most) = self.spread.reach;
        let most = most.wrapping_add((width as isize - 1) * step);
        let whole = width - width % BATCH;
        let under = |number: I, from: isize| from.wrapping_add(cells[number.into()]) as usize;
        for _ in 0..rows {
            if begin.wrapping_add(most) >= 0 && begin.wrapping_add(least) < count as isize {
                let mut from = begin;
                for o in (0..whole).step_by(BATCH) {
                    // SAFETY: the caller's contract.
                    unsafe {
                        let numbers = index.add(o).cast::<[I; BATCH]>().read_unaligned();
                        let at: [usize; BATCH] =
                            std::array::from_fn(|l| under(numbers[l], from + l as isize * step));
                        for (l, at) in at.into_iter().enumerate() {
                            Self::give(gradient.add(o + l), sums, at, count);
                        }
                    }
                    from = from.wrapping_add(step.wrapping_mul(BATCH as isize));
                }
                for o in whole..width {
                    // SAFETY: the caller's contract.
                    unsafe {
                        let at = under(index.add(o).read_unaligned(), from);
                        Self::give(gradient.add(o), sums, at, count);
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
            Some(DType::U8) => self.by_cells::<u8, 0x100>(),
            Some(DType::U16) => self.by_cells::<u16, 0x1_0000>(),
            _ => self.by_positions(),
        }
    }
}
