//! The gradient of a maximum: what arrives at each output element is added where the maximum was.

use std::marker::PhantomData;

use super::{Buffers, Element, GRAIN, PLANES, Part, Plan, Tasks};
use crate::isa::{Level, Work};
use crate::tape::number::{Number, Stored};

/// How planes are gone through.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spread {
    /// Whether sums are made in a wider type than elements are stored in.
    pub(super) narrow: bool,
}

/// Elements of a part whose sums are kept apart.
const NARROW: usize = 16 * 1024;

impl Spread {
    /// Every part of a plane looks at all positions of the plane and adds at its own.
    pub(super) fn tasks(self, planes: usize, source: usize, target: usize) -> Tasks {
        let work = source.saturating_add(target);
        let wanted = if planes < PLANES { PLANES.div_ceil(planes.max(1)) } else { 1 };
        let parts =
            wanted.min(target / GRAIN).max(if self.narrow { target.div_ceil(NARROW) } else { 1 }).max(1);
        let rows = target.div_ceil(parts);
        let whole = if parts == 1 { (GRAIN / work.max(1)).clamp(1, planes.max(1)) } else { 1 };
        Tasks { planes: whole, parts: target.div_ceil(rows.max(1)).max(1), rows }
    }

    /// Bytes of scratch memory of a worker.
    pub(super) fn scratch(self, tasks: &Tasks) -> usize {
        if self.narrow { tasks.rows * size_of::<f32>() } else { 0 }
    }
}

/// A part of the gradient of a maximum: elements `part.rows` of the planes.
pub(super) struct Run<'a, S> {
    plan: &'a Plan,
    buffers: Buffers,
    part: Part,
    stored: PhantomData<S>,
}

impl<'a, S: Element> Run<'a, S> {
    pub(super) fn new(plan: &'a Plan, buffers: Buffers, part: Part) -> Self {
        Run { plan, buffers, part, stored: PhantomData }
    }

    /// Adds into `count` elements from element `first` of the whole target on; their sums are kept at `sums`.
    #[inline(always)]
    fn add(&self, plane: usize, first: usize, sums: *mut S::Sum, count: usize) {
        let outputs = self.plan.source;
        // SAFETY: by the contract of `WindowKernel::run` the gradient and the positions have these elements; `sums` has
        // `count`, all this task's, and nothing outside of them is touched.
        unsafe {
            let gradient = self.buffers.source.cast::<S>().add(plane * outputs);
            let index = self.buffers.index.cast::<i64>().cast_const().add(plane * outputs);
            for i in 0..count {
                sums.add(i).write_unaligned(S::Sum::encode(S::Computed::ZERO));
            }
            for o in 0..outputs {
                let at = (index.add(o).read_unaligned() as u64).wrapping_sub(first as u64);
                if at < count as u64 {
                    let sum = sums.add(at as usize);
                    let new = sum.read_unaligned().decode().plus(gradient.add(o).read_unaligned().decode());
                    sum.write_unaligned(S::Sum::encode(new));
                }
            }
        }
    }
}

impl<S: Element> Work for Run<'_, S> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let (start, end) = self.part.rows;
        let count = end - start;
        let narrow = size_of::<S::Sum>() > size_of::<S>();
        for plane in self.part.planes.0..self.part.planes.1 {
            let first = plane * self.plan.target + start;
            let target = self.buffers.target.cast::<S>().wrapping_add(first);
            if !narrow {
                self.add(plane, first, target.cast(), count);
                continue;
            }
            let sums = self.buffers.scratch.cast::<S::Sum>();
            self.add(plane, first, sums, count);
            for i in 0..count {
                // SAFETY: the sums are there, and the target has these elements, all this task's.
                unsafe { target.add(i).write_unaligned(S::encode(sums.add(i).read().decode())) };
            }
        }
    }
}
