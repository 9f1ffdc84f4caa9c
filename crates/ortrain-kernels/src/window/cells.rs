//! Window by window: each element of the target from the elements of the source that it depends on.

use std::marker::PhantomData;

use super::{Buffers, Element, Part, Plan, Rows, sources};
use crate::isa::{Level, Work};
use crate::tape::number::Number;

/// A part of a maximum (`MAX`), a sum or the gradient of a sum.
pub(super) struct Run<'a, S, const MAX: bool> {
    plan: &'a Plan,
    buffers: Buffers,
    part: Part,
    index: bool,
    stored: PhantomData<S>,
}

impl<'a, S: Element, const MAX: bool> Run<'a, S, MAX> {
    pub(super) fn new(plan: &'a Plan, buffers: Buffers, part: Part, index: bool) -> Self {
        Run { plan, buffers, part, index, stored: PhantomData }
    }

    /// The target's element at `x` of row `row`, and which element of the source's plane it is.
    #[inline(always)]
    fn element(&self, source: *const S, row: usize, x: usize) -> (S::Computed, Option<usize>) {
        let gradient = self.plan.gradient();
        let along = sources(&self.plan.last, gradient, x);
        let mut value = if MAX { S::LEAST } else { S::Computed::ZERO };
        let mut at = None;
        for line in Rows::new(&self.plan.axes, gradient, row) {
            let mut position = line.wrapping_add(along.first);
            for _ in 0..along.count {
                // SAFETY: `sources` gives positions inside each axis, so this is one of the plane.
                let next = unsafe { source.add(position).read_unaligned() }.decode();
                if MAX {
                    // Of equal ones the first. NaN beats all others, and nothing beats it.
                    if at.is_none() || (beats(next, value) && !is_nan(value)) {
                        (value, at) = (next, Some(position));
                    }
                } else {
                    value = value.plus(next);
                }
                position = position.wrapping_add(along.step);
            }
        }
        (value, at)
    }
}

/// Whether `a` is larger than `b`, or either is NaN.
#[inline(always)]
#[allow(clippy::neg_cmp_op_on_partial_ord, reason = "NaN is neither")]
pub(super) fn beats<T: PartialOrd + Copy>(a: T, b: T) -> bool {
    !(a <= b)
}

#[inline(always)]
#[allow(clippy::eq_op, reason = "NaN alone differs from itself")]
pub(super) fn is_nan<T: PartialOrd + Copy>(a: T) -> bool {
    a != a
}

impl<S: Element, const MAX: bool> Work for Run<'_, S, MAX> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        let Plan { source, target, .. } = *self.plan;
        let width = self.plan.width;
        for plane in self.part.planes.0..self.part.planes.1 {
            let from = self.buffers.source.cast::<S>().wrapping_add(plane * source);
            for row in self.part.rows.0..self.part.rows.1 {
                let first = plane * target + row * width;
                for x in 0..width {
                    let (value, at) = self.element(from, row, x);
                    // SAFETY: by the contract of `WindowKernel::run` the target has this element, and it is this
                    // task's.
                    unsafe {
                        self.buffers.target.cast::<S>().add(first + x).write_unaligned(S::encode(value));
                    };
                    if MAX && self.index {
                        let position = (plane * source + at.unwrap_or(0)) as i64;
                        // SAFETY: as above, for the positions.
                        unsafe {
                            self.buffers.index.cast::<i64>().add(first + x).write_unaligned(position);
                        };
                    }
                }
            }
        }
    }
}
