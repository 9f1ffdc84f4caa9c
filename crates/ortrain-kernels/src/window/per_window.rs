//! Window by window: each element of the target from the elements of the source that it depends on.

use std::marker::PhantomData;

use ortrain_expr::{DType, WindowPass};

use crate::isa::{Isa, Level, Work, portable};
use crate::tile::number::Number;
use crate::window::engine::{Engine, Selected, WindowCandidate, with_element};
use crate::window::plan::{Buffers, Element, Part, Plan, Rows, Tasks, sources};

/// Window by window, over the cells inside of the input. For integers, for few windows along the last axis, and for
/// sizes that fit no line.
pub(super) fn candidate() -> WindowCandidate {
    WindowCandidate {
        name: NAME,
        accepts: |request| request.plan.pass != WindowPass::MaxGradient,
        preferences: &[],
        build: |request| Some(select(request.plan.divide_into_rows())),
    }
}

const NAME: &str = "window.per_window";

fn select(tasks: Tasks) -> Selected {
    Selected { engine: Box::new(PerWindow), tasks, scratch: 0 }
}

/// Returns the engine for a pooling without results.
pub(super) fn nothing() -> (&'static str, Selected) {
    (NAME, select(Tasks { planes: 1, parts: 1, rows: 0 }))
}

#[derive(Debug)]
struct PerWindow;

impl Engine for PerWindow {
    fn compute_part(&self, plan: &Plan, _: Isa, buffers: Buffers, part: Part) {
        // Work that goes element by element gains nothing from vectors.
        with_element!(plan.dtype, S => if plan.pass == WindowPass::Max {
            portable::enter(Run::<S, true>::new(plan, buffers, part));
        } else {
            portable::enter(Run::<S, false>::new(plan, buffers, part));
        });
    }
}

/// A part of a maximum (`MAX`), a sum or the gradient of a sum.
pub(super) struct Run<'a, S, const MAX: bool> {
    plan: &'a Plan,
    buffers: Buffers,
    part: Part,
    stored: PhantomData<S>,
}

impl<'a, S: Element, const MAX: bool> Run<'a, S, MAX> {
    pub(super) fn new(plan: &'a Plan, buffers: Buffers, part: Part) -> Self {
        Run { plan, buffers, part, stored: PhantomData }
    }

    /// Computes the target's element at `x` of row `row`. Also returns the position of a maximum: the element of the
    /// source's plane, or with `NUMBERED` the number of the cell.
    #[inline(always)]
    fn compute_element<const NUMBERED: bool>(
        &self,
        source: *const S,
        row: usize,
        x: usize,
    ) -> (S::Computed, Option<usize>) {
        let gradient = self.plan.is_gradient();
        let along = sources(&self.plan.last, gradient, x);
        let mut value = if MAX { S::LOWEST } else { S::Computed::ZERO };
        let mut at = None;
        let positions = &self.plan.positions;
        let unit = positions.units[self.plan.axes.len() - 1];
        let mut rows = Rows::new(&self.plan.axes, gradient, row);
        loop {
            let mut result_position =
                if NUMBERED { rows.offset_from_window(positions) + along.skipped * unit } else { 0 };
            let Some(line) = rows.next() else { break };
            let mut position = line.wrapping_add(along.first);
            for _ in 0..along.count {
                // SAFETY: `sources` returns positions inside of each axis, so this is an element of the plane.
                let next = unsafe { source.add(position).read_unaligned() }.decode();
                if MAX {
                    // The first of equal elements wins. NaN wins over every number, and the first NaN stays.
                    if at.is_none() || (is_larger_or_nan(next, value) && !is_nan(value)) {
                        (value, at) = (next, Some(if NUMBERED { result_position } else { position }));
                    }
                } else {
                    value = value.add(next);
                }
                position = position.wrapping_add(along.step);
                result_position = result_position.wrapping_add(unit);
            }
        }
        (value, at)
    }

    /// Writes the part. There are two functions, so that neither uses registers for values that only the other needs.
    #[inline(never)]
    fn fill<const NUMBERED: bool>(&self) {
        let Plan { source, target, width, ref positions, .. } = *self.plan;
        for plane in self.part.planes.0..self.part.planes.1 {
            let from = self.buffers.source.cast::<S>().wrapping_add(plane * source);
            for row in self.part.rows.0..self.part.rows.1 {
                let first = plane * target + row * width;
                for x in 0..width {
                    let (value, at) = self.compute_element::<NUMBERED>(from, row, x);
                    // SAFETY: by the contract of `WindowKernel::run` the target has this element, and only this task
                    // uses it.
                    unsafe {
                        self.buffers.target.cast::<S>().add(first + x).write_unaligned(S::encode(value));
                    };
                    if !MAX || !positions.are_needed() {
                        continue;
                    }
                    let (index, at) = (self.buffers.index, at.unwrap_or(0));
                    // SAFETY: as above, for the positions.
                    unsafe {
                        if !NUMBERED {
                            let position = (plane * source + at) as i64;
                            index.cast::<i64>().add(first + x).write_unaligned(position);
                        } else if positions.dtype() == Some(DType::U8) {
                            index.add(first + x).write(at as u8);
                        } else {
                            index.cast::<u16>().add(first + x).write_unaligned(at as u16);
                        }
                    };
                }
            }
        }
    }
}

/// Returns true if `a` is larger than `b`, or if one of them is NaN.
#[inline(always)]
#[allow(clippy::neg_cmp_op_on_partial_ord, reason = "NaN is neither")]
pub(super) fn is_larger_or_nan<T: PartialOrd + Copy>(a: T, b: T) -> bool {
    !(a <= b)
}

#[inline(always)]
#[allow(clippy::eq_op, reason = "NaN alone differs from itself")]
pub(super) fn is_nan<T: PartialOrd + Copy>(a: T) -> bool {
    a != a
}

/// Number of adjacent windows that are computed at once.
pub(super) const LANES: usize = 16;

/// Combines one cell of adjacent windows with their results: the larger element (`MAX`), with its `position` if
/// `INDEX`, or the sum.
#[inline(always)]
pub(super) fn combine<S: Element, const MAX: bool, const INDEX: bool>(
    values: &mut [S::Computed; LANES],
    at: &mut [i32; LANES],
    next: [S::Computed; LANES],
    position: i32,
) {
    for l in 0..LANES {
        if MAX {
            let better = is_larger_or_nan(next[l], values[l]) & !is_nan(values[l]);
            values[l] = if better { next[l] } else { values[l] };
            if INDEX {
                at[l] = if better { position } else { at[l] };
            }
        } else {
            values[l] = values[l].add(next[l]);
        }
    }
}

/// Separates `count` pairs of adjacent elements. The first `aligned_count` pairs, a multiple of [`LANES`], are separated
/// as vectors.
///
/// # Safety
/// With `n` the larger of `aligned_count` and `count`: `n` pairs at `from` are valid for reads. `firsts` and `seconds`
/// are aligned, and valid for writes of `n` elements each.
#[inline(always)]
pub(super) unsafe fn split_pairs<S: Element>(
    from: *const S,
    (aligned_count, count): (usize, usize),
    firsts: *mut S::Computed,
    seconds: *mut S::Computed,
) {
    for j in (0..aligned_count).step_by(LANES) {
        // A single load, so that this becomes shuffles of vectors.
        // SAFETY: the caller's contract.
        unsafe {
            let pairs = from.add(2 * j).cast::<[S; 2 * LANES]>().read_unaligned();
            let of = |parity: usize| std::array::from_fn(|l| pairs[2 * l + parity].decode());
            firsts.add(j).cast::<[S::Computed; LANES]>().write_unaligned(of(0));
            seconds.add(j).cast::<[S::Computed; LANES]>().write_unaligned(of(1));
        }
    }
    for j in aligned_count..count {
        // SAFETY: as above.
        unsafe {
            firsts.add(j).write(from.add(2 * j).read_unaligned().decode());
            seconds.add(j).write(from.add(2 * j + 1).read_unaligned().decode());
        }
    }
}

impl<S: Element, const MAX: bool> Work for Run<'_, S, MAX> {
    type Out = ();
    #[inline(always)]
    fn work<L: Level>(self) {
        if MAX && self.plan.positions.are_cell_numbers() { self.fill::<true>() } else { self.fill::<false>() }
    }
}
